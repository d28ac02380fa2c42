"""A full disk ends a run in one line; with space again the same command resumes."""

import errno
import os
import resource
import subprocess
import time

import pytest

from moddepth_jax.training import loop
from moddepth_jax.training.manifest import read_manifest
from tests.faults.runs import Runs, rows_of

DISK = 16 << 20  # bytes
pytestmark = pytest.mark.usefixtures('compiled_once')


class Disk:
    """A small file system in memory; `fill` leaves some bytes free, `make_room` all."""

    def __init__(self, folder):
        self.folder = folder
        self._filler = folder / 'filler'

    def fill(self, free=0):
        room = os.statvfs(self.folder)
        room = room.f_bavail * room.f_frsize - free
        with open(self._filler, 'wb', buffering=0) as file:
            while room > 0:
                try:
                    room -= file.write(bytes(min(room, 1 << 16)))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break

    def make_room(self):
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path):
    """Mounted for one test, which needs root."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip('needs root, to mount a small file system')
    mount = ['mount', '-t', 'tmpfs', '-o', f'size={DISK}', 'tmpfs', str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f'cannot mount a small file system here: {done.stderr.strip()}')
    yield Disk(folder)
    subprocess.run(['umount', '-l', str(folder)], check=True)


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp('full'), **CHANGES)
    runs.finish('unbroken')
    return runs


CHANGES = {'training__num_steps': 100, 'evaluation__every': 30, 'model__d_model': 64}


def check_one_line(status, err):
    """Check for status 2 and one line on stderr about the full disk; TensorBoard may add one."""
    assert status == 2, err
    *before, last = err.splitlines()
    assert last.startswith('error: ') and 'No space left on device' in last, err
    assert len(before) <= 1 and all('TensorBoard' in line for line in before), err


def check_good(workdir):
    """Check that finished checkpoints are intact and no other files remain; returns the steps."""
    steps = []
    for path in workdir.glob('checkpoints/*'):
        read_manifest(path)
        steps.append(int(path.name))
    assert not list(workdir.glob('*.tmp'))
    return sorted(steps)


def finished_checkpoints(workdir):
    return list(workdir.glob('checkpoints/*/manifest.json'))


# Whether the moment has come, by the file of stdout and the workdir.
FULL = {
    'before the start': None,
    'amid a checkpoint': lambda out, workdir: [*workdir.glob('checkpoints/*')],
    'between checkpoints': lambda out, workdir: finished_checkpoints(workdir),
    'in the last evaluation': lambda out, workdir: 'evaluating on held-out' in out.read_text(),
    'in the report': lambda out, workdir: (workdir / 'summary.json').exists(),
}


@pytest.mark.faults
@pytest.mark.parametrize('moment', FULL)
def test_a_full_disk_ends_the_run_in_one_line(unbroken, disk, tally, moment):
    """launch.train reports it with status 2; with space again it resumes and ends bit-equal."""
    runs, has_come, workdir = unbroken, FULL[moment], disk.folder / 'run'

    def act(process, out):
        while has_come and process.poll() is None:
            if has_come(out, workdir):
                return disk.fill()
            time.sleep(0.002)

    if not has_come:
        disk.fill()
    status, out, err = runs.start(workdir, act)
    check_one_line(status, err)
    steps = check_good(workdir)
    disk.make_room()
    out = runs.finish(workdir)
    assert [f'resuming after step {step}' in out for step in steps[-1:]] == [True] * bool(steps)
    assert runs.result(workdir) == runs.result('unbroken')
    tally('full disks', moment)


def test_a_limit_of_file_sizes_is_reported_like_a_full_disk(small_run, tmp_path, tally):
    """Needs no root. The limit is enough for rows, but not for arrays."""
    workdir, hparams = tmp_path / 'run', small_run()
    finished = loop.train(hparams, tmp_path / 'finished')  # its programs are compiled now
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(ValueError) as caught:
            loop.train(hparams, workdir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 'File too large' in str(caught.value) and 'steps kept: none' in str(caught.value)
    again = loop.train(hparams, workdir)
    assert again.summary['state_sha256'] == finished.summary['state_sha256']
    assert rows_of(workdir) == rows_of(finished.workdir)
    tally('full disks', 'no file above 40 kB, without root')
