"""A profile holds the steps that were asked for, and no others."""

import gzip
import json

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop, preemption
from moddepth_jax.training.profile import Profile, parse_steps

pytestmark = pytest.mark.usefixtures('compiled_once')


@pytest.mark.parametrize('text', ['', '20', '20:', ':20', '5:5', '6:5', '-1:5', 'a:b', '1:2:3'])
def test_bad_ranges_are_one_line(text):
    with pytest.raises(ValueError) as caught:
        parse_steps(text)
    message = str(caught.value)
    assert f'--profile={text}: must be START:STOP' in message and '\n' not in message


@pytest.mark.parametrize(('steps', 'first_step'), [((10, 12), 0), ((2, 5), 5)])
def test_a_range_without_a_step_that_is_left_is_refused(tmp_path, steps, first_step):
    with pytest.raises(ValueError, match=r'--profile=\d+:\d+: this run has 10 steps'):
        Profile(tmp_path, steps, 10, first_step)


def traced_steps(workdir):
    """Numbers of the steps that the one trace of a run names."""
    (path,) = (workdir / 'profile').rglob('*.trace.json.gz')
    events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
    return sorted(
        int(event['args']['step_num'])
        for event in events
        if event.get('name') == 'train' and 'step_num' in event.get('args', {})
    )


@pytest.fixture(scope='module')
def hparams(tiny_config, corpus):
    return from_config(tiny_config(**{'data.source': corpus, 'training.num_steps': 6}))


def test_the_steps_asked_for_are_traced(hparams, tmp_path, capsys):
    """The trace changes no bit, holds steps 2 to 3 of 6, and the console says how to open it."""
    traced = loop.train(hparams, tmp_path / 'traced', profiled=(2, 4))
    assert f'xprof --logdir={tmp_path}/traced/profile' in ''.join(
        capsys.readouterr().out.split('\n')
    )
    assert traced_steps(tmp_path / 'traced') == [2, 3]
    plain = loop.train(hparams, tmp_path / 'plain')
    assert not (tmp_path / 'plain' / 'profile').exists()
    assert traced.summary['state_sha256'] == plain.summary['state_sha256']


def test_a_run_that_stops_keeps_what_was_traced(hparams, tmp_path, monkeypatch):
    """Stopped after step 3, the trace of steps 2 to 5 holds the one step that ran."""
    monkeypatch.setattr(preemption.PreemptionHandler, 'asked', _stop_at(3))
    assert loop.train(hparams, tmp_path / 'run', profiled=(2, 6)).signal == 'SIGTERM'
    assert traced_steps(tmp_path / 'run') == [2]


def _stop_at(last):
    def asked(self, step):
        self.requested = 'SIGTERM' if step == last else None
        return step == last

    return asked
