"""Damage to the newest checkpoint is reported, and the run resumes from the previous one."""

import contextlib
import shutil

import jax
import pytest

from moddepth_jax.training import loop
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.manifest import read_manifest
from moddepth_jax.training.train_step import init_state
from tests.faults.runs import rows_of

OLDER, NEWEST = 4, 6  # steps of the checkpoints of the run
pytestmark = pytest.mark.usefixtures('compiled_once')


class Saved:
    """A finished run in-process, its checkpoints of steps 4 and 6, and how to damage the newest."""

    def __init__(self, hparams, folder):
        self.hparams = hparams
        self.workdir = folder / 'run'
        self.run = loop.train(hparams, self.workdir)
        self.newest = self.workdir / 'checkpoints' / str(NEWEST)
        names = [path for path in self.newest.rglob('*') if path.is_file()]
        self.files = sorted(path.relative_to(self.newest).as_posix() for path in names)
        self._abstract = jax.eval_shape(lambda: init_state(hparams, NEWEST))
        state, step, skipped = self.restore()
        assert (step, skipped) == (NEWEST, [])
        assert state_sha256(state) == self.run.summary['state_sha256']
        self._older = None

    def restore(self):
        """(state, step, lines about skipped checkpoints)."""
        with Checkpoints(self.workdir / 'checkpoints', keep=2) as checkpoints:
            state, step, _ = checkpoints.restore(self._abstract)
            return state, step, checkpoints.skipped

    def check_skipped(self, *words):
        """Check that it is skipped with `words` in one line, and the older state is restored."""
        state, step, (line,) = self.restore()
        assert step == OLDER, words
        assert line.startswith(f'checkpoint {NEWEST} skipped: ') and '\n' not in line
        assert all(word in line for word in words), (line, words)
        self._older = self._older or state_sha256(state)
        assert state_sha256(state) == self._older

    def draw_file(self, draw):
        """Draw a random file, or the file of a random byte, each with probability 1/2."""
        sizes = [(self.newest / name).stat().st_size for name in self.files]
        return draw.choices(self.files, sizes if draw.random() < 0.5 else None)[0]

    @contextlib.contextmanager
    def damaged(self, name, content):
        """A context in which a file has another `content`."""
        path = self.newest / name
        original = path.read_bytes()
        path.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(original)


@pytest.fixture(scope='module')
def saved(small_run, compiled_once, tmp_path_factory):
    return Saved(small_run(), tmp_path_factory.mktemp('saved'))


@pytest.mark.parametrize('number', [5, pytest.param(50, marks=pytest.mark.faults)])
def test_a_flipped_bit_is_found_and_named(saved, draw, tally, number):
    for _ in range(number):
        name = saved.draw_file(draw)
        content = bytearray((saved.newest / name).read_bytes())
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        with saved.damaged(name, bytes(content)):
            saved.check_skipped(name, 'damaged')
        tally('flipped bits', 'found')
    assert saved.restore()[1:] == (NEWEST, [])


def flipped_bit(directory):
    name = max((directory / 'ocdbt.process_0' / 'd').iterdir(), key=lambda p: p.stat().st_size)
    content = bytearray(name.read_bytes())
    content[len(content) // 3] ^= 4
    name.write_bytes(content)
    return f'{name.name} is damaged'


def test_the_run_resumes_from_the_previous_checkpoint(saved, tmp_path, capsys, tally):
    """It reports the skipped one, ends bit-equal with every row once, and saves it again."""
    workdir = shutil.copytree(saved.workdir, tmp_path / 'run')
    found = flipped_bit(workdir / 'checkpoints' / str(NEWEST))
    again = loop.train(saved.hparams, workdir)
    out = capsys.readouterr().out
    assert f'checkpoint {NEWEST} skipped: ' in out and found in out
    assert f'resuming after step {OLDER}' in out
    assert again.summary['state_sha256'] == saved.run.summary['state_sha256']
    assert rows_of(workdir) == rows_of(saved.workdir)
    with Checkpoints(workdir / 'checkpoints', keep=2) as checkpoints:
        assert checkpoints.steps() == [OLDER, NEWEST]
    read_manifest(workdir / 'checkpoints' / str(NEWEST))
    tally('damaged runs that resumed', 'bit-equal')
