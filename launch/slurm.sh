#!/bin/bash
# Trains on several nodes of a SLURM cluster: sbatch launch/slurm.sh
#
# This is a template that has not been tried on a real cluster. The variables that SLURM sets for
# each task, and how JAX uses them, are tested without one (tests/training/multihost_test.py).
#
# Edit: the #SBATCH lines and the four lines below them. One task is one process. Give
# --ntasks-per-node the number of GPUs of a node, for one GPU per task, or 1, for one task per node
# with all of its GPUs. For other numbers, set JAX_LOCAL_DEVICE_IDS. The working directory and
# WORKDIR must be on a file system that all nodes share. The product of the sizes in MESH is the
# total number of GPUs; data x fsdp x expert must divide the rows of a micro-batch.
#SBATCH --job-name=moddepth
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
CONFIG=configs/moda_700m.py
WORKDIR=runs/moda_700m
MESH=data=2,fsdp=8
PYTHON=.venv/bin/python

# Two minutes before the time limit, each task gets SIGTERM, saves, and exits with status 143, and
# the job is requeued. If a task dies from a signal or because another task was lost, srun ends the
# others, and the job is requeued, at most ten times. Each start resumes from the newest good
# checkpoint. A finished run (status 0), bad input (2) and a bug (1) are not requeued. Since srun
# returns the highest status of its tasks, a task that ends with 1 or 2 makes the file $failed.
failed=$PWD/slurm-$SLURM_JOB_ID.failed
rm -f "$failed"
srun --kill-on-bad-exit=1 bash -c 'trap : TERM # bash waits until the command has saved
    "${@:2}"
    status=$?
    case $status in 1 | 2) : >"$1" ;; esac
    exit $status' task "$failed" "$PYTHON" -m launch.train \
    --config="$CONFIG" --workdir="$WORKDIR" --mesh="$MESH"
status=$?
if [ -e "$failed" ]; then exit "$status"; fi
case "$status" in
75 | 129 | 13[1-9] | 14[0-9]) # a lost task, or any signal but Ctrl-C
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    ;;
esac
exit "$status"
