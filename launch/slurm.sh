#!/bin/bash
# Trains on several nodes of a SLURM cluster: sbatch launch/slurm.sh
#
# A template. It has not been tried on a real cluster: the variables that SLURM sets for each task,
# and what JAX makes of them, are tested without one (tests/training/processes_test.py).
#
# Edit: the lines #SBATCH, and the four below them. One task is one process; with one GPU for each
# task, give --ntasks-per-node and --gpus-per-node the same number. The working directory and
# WORKDIR lie on a file system that all nodes share. The product of the sizes in MESH is the number
# of all GPUs.
#SBATCH --job-name=moddepth
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
CONFIG=configs/moda.py
WORKDIR=runs/moda
MESH=data=2,fsdp=8
PYTHON=.venv/bin/python

# Two minutes before its time is over each task gets SIGTERM, saves, and ends with status 143; it is
# put into the queue again. Where a task dies of a signal, or of the loss of another one, srun ends
# the others, and the job is queued again, ten times at the most. Each start goes on from the newest
# good checkpoint. A finished run (status 0), bad input (2) and a defect (1) are not queued again.
srun --kill-on-bad-exit=1 "$PYTHON" -m launch.train \
    --config="$CONFIG" --workdir="$WORKDIR" --mesh="$MESH"
status=$?
case "$status" in
75 | 134 | 137 | 143)
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    ;;
esac
exit "$status"
