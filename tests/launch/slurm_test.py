"""launch/slurm.sh requeues lost tasks and signals, and neither bugs nor bad input."""

import os
import subprocess

import pytest

from tests.forked_commands import ROOT

# Stand-ins. `srun` runs a task for each of STATUSES, one after another, and returns the highest
# status, as SLURM does. The command of a task ends with its status, after a signal to its shell.
COMMANDS = {
    'bin/srun': """
highest=0
for status in $STATUSES; do
    STATUS=$status "${@:2}"
    status=$?
    if [ $status -gt $highest ]; then highest=$status; fi
done
exit $highest""",
    'bin/scontrol': 'echo "$@" >> requeued',
    '.venv/bin/python': 'kill -TERM $PPID; sleep 0.1; exit $STATUS',
}


@pytest.mark.parametrize(
    ('statuses', 'status', 'requeued'),
    [
        ('0 0', 0, False),
        ('143 143', 143, True),
        ('75 137', 137, True),
        ('2 143', 143, False),
        ('1 75 134', 134, False),
    ],
)
def test_the_task_that_failed_first_decides(tmp_path, statuses, status, requeued):
    """Regression: srun ends the other tasks of one with bad input, and the job was requeued.

    A task whose shell gets SIGTERM, too, still ends with the status of its command.
    """
    for name, text in COMMANDS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\n{text}\n')
        path.chmod(0o755)
    environment = os.environ | {
        'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
        'SLURM_JOB_ID': '7',
        'STATUSES': statuses,
    }
    (tmp_path / 'slurm-7.failed').touch()  # of an earlier start
    done = subprocess.run(['bash', ROOT / 'launch' / 'slurm.sh'], cwd=tmp_path, env=environment)
    assert done.returncode == status
    assert (tmp_path / 'requeued').exists() == requeued
