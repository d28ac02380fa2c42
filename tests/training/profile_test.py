"""A profile holds the given steps, and no others."""

import gzip
import json
import shutil

import jax
import pytest

from moddepth_jax.hparams.flag_values import parse_steps
from moddepth_jax.training import loop
from moddepth_jax.training.profile import Profile, check_profiled
from tests.data.prepared_text import refusal

pytestmark = pytest.mark.usefixtures('compiled_once')


def test_bad_ranges_are_one_line():
    for text in ('', '20:', ':20', '5:5', '-1:5', 'a:b', '1:2:3'):
        assert f'--profile={text}: must be START:STOP' in refusal(parse_steps, text)
    assert '--profile=10:12: this run has 10 steps' in refusal(check_profiled, (10, 12), 10)


def traced_steps(workdir):
    (path,) = (workdir / 'profile').rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
    return sorted(
        int(event['args']['step_num'])
        for event in events
        if event.get('name') == 'train' and 'step_num' in event.get('args', {})
    )


def test_the_given_steps_are_traced(finished, run_hparams, tmp_path, signals, capsys):
    workdir = tmp_path / 'run'
    signals[2] = 'SIGTERM'
    assert loop.train(run_hparams, workdir, profiled=(2, 5)).signal == 'SIGTERM'
    assert traced_steps(workdir) == [2]
    assert f'xprof --logdir={workdir}/profile' in ''.join(capsys.readouterr().out.split('\n'))
    shutil.rmtree(workdir / 'profile')
    signals[3] = 'SIGTERM'
    assert loop.train(run_hparams, workdir, profiled=(1, 3)).signal == 'SIGTERM'
    assert '--profile=1:3: these steps are done' in ' '.join(capsys.readouterr().out.split())
    assert not (workdir / 'profile').exists()
    resumed = loop.train(run_hparams, workdir, profiled=(4, 6))
    assert traced_steps(workdir) == [4, 5]
    assert resumed.summary['state_sha256'] == finished.summary['state_sha256']
    assert not (finished.workdir / 'profile').exists()


def test_a_trace_that_cannot_be_written_does_not_end_a_run(copied, run_hparams, monkeypatch):
    (copied / 'profile').touch()
    words = f'{copied}/profile: must be a directory that can be written'
    assert words in refusal(loop.train, run_hparams, copied, profiled=(0, 1))
    (copied / 'profile').unlink()

    def fail():
        raise RuntimeError('FAILED_PRECONDITION:\nthe disk is full')

    monkeypatch.setattr(jax.profiler, 'stop_trace', fail)
    try:
        trained = Profile(copied, (1, 3), 7)
        assert trained.start() == '' and trained.ends(3)
        line = f'profile   {copied}/profile: not written: FAILED_PRECONDITION: the disk is full'
        assert trained.stop() == line and not trained.begins(1) and trained.stop() == ''
    finally:
        monkeypatch.undo()
        jax.profiler.stop_trace()
