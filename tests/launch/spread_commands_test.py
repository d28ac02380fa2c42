"""launch.evaluate and launch.generate print the same on one device, several, and two processes."""

import json
import re

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop
from tests.launch.commands import call

EVALUATE = ('evaluate', '--workdir=run')
GENERATE = ('generate', '--workdir=run', '--prompt=to be', '--temperature=0')
FAKE = {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}
WRITTEN = r'12 tokens in [\d.]+ s, \d+ tokens/s once compiled\n'
MESHES = ['fsdp=2,tensor=2', 'data=2,expert=2']
TWO_PROCESSES = ['fsdp=2,tensor=2', 'data=4']

pytestmark = pytest.mark.slow


MODELS = {
    'blocks': {'model.experts.choice': 'token', 'model.experts.num_routed': 4},
    'loops': {
        **{'model.looped_layers': 'all', 'model.loops': 3, 'model.routing.layers': 'loops'},
        **{'model.routing.capacity': 1 / 3, 'model.routing.causal_rule': 'aux_loss'},
    },
}


def trained(name, tiny_config, tmp_path_factory):
    """A folder where `run` is a run of 4 steps of one of MODELS."""
    folder = tmp_path_factory.mktemp('spread')
    for i in range(6):
        (folder / f'{i}.txt').write_text(f'{i} to be, or not to be\n' * 40)
    changes = MODELS[name] | {
        'model.routing.router': 'learned',
        'data.source': str(folder / '*.txt'),
        'data.held_out_fraction': 0.3,
        'evaluation.every': 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
        loop.train(from_config(tiny_config(**changes)), folder / 'run')
    return folder


@pytest.fixture(scope='module')
def folder(tiny_config, tmp_path_factory):
    """Where `run` has a routed block and experts."""
    return trained('blocks', tiny_config, tmp_path_factory)


def on_two(name, *arguments, cwd):
    """`call` by launch.local, as two processes of two devices."""
    how = ('--processes=2', '--devices=2', '--', f'launch.{name}')
    return call('local', *how, *arguments, cwd=cwd)


def test_any_devices_evaluate_as_the_run_did(folder):
    """--json=- prints one JSON object with the losses of the run's own evaluation."""
    mesh = f'--mesh={MESHES[0]}'
    runs = [call(*EVALUATE, f'--mesh={mesh}', '--json=-', cwd=folder, **FAKE) for mesh in MESHES]
    runs += [
        call(*EVALUATE, '--json=-', cwd=folder),
        on_two(*EVALUATE, mesh, '--json=-', cwd=folder),
    ]
    summary = json.loads((folder / 'run' / 'summary.json').read_text())
    for done in runs:
        assert (done.status, done.stderr) == (0, ''), done.stderr
        report = json.loads(done.stdout)
        for name in ('loss', 'loss_top_c'):
            assert report[name] == pytest.approx(summary['eval'][name], abs=1e-6), name
        assert report['batches'] == 2 and set(report['routing']) == {'layer_01'}


def test_two_processes_print_one_table_and_write_one_file(folder):
    assert on_two(*EVALUATE, '--json=two.json', cwd=folder) == call(*EVALUATE, cwd=folder)
    assert json.loads((folder / 'two.json').read_text())['step'] == 4


def test_any_devices_generate_the_same_text(folder):
    """Greedy, token by token on stdout, with the one line on stderr of one device."""
    check_texts(folder, MESHES, TWO_PROCESSES)


def test_any_devices_generate_the_same_text_with_routed_loops(tiny_config, tmp_path_factory):
    folder = trained('loops', tiny_config, tmp_path_factory)
    check_texts(folder, ['fsdp=2,tensor=2', 'data=4'], TWO_PROCESSES[:1])


def check_texts(folder, meshes, two_processes):
    line = (*GENERATE, '--max_tokens=12')
    runs = [call(*line, cwd=folder)]
    runs += [call(*line, f'--mesh={mesh}', cwd=folder, **FAKE) for mesh in meshes]
    runs += [on_two(*line, f'--mesh={mesh}', cwd=folder) for mesh in two_processes]
    for done in runs:
        assert (done.status, done.stdout) == (0, runs[0].stdout), done.stderr
        assert re.fullmatch(WRITTEN, done.stderr), done.stderr
