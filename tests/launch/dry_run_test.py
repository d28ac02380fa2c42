"""launch.train --dry_run compiles for devices that do not exist; docs/scale.md has its numbers."""

import json
import os

import jax
import pytest

from moddepth_jax.compiled.dry_run_tables import markdown
from tests.forked_commands import ROOT
from tests.launch.commands import call

KEPT = sorted((ROOT / 'results' / 'cpu' / 'dry_run').glob('*.json'))
MODEL = {'num_layers': 3, 'd_model': 64, 'd_ff': 96, 'num_heads': 4, 'num_kv_heads': 2}
MODEL |= {'head_dim': 16, 'dtype': 'bfloat16', 'vocab_size': 260}
SMALL = {f'model.{name}': value for name, value in MODEL.items()}
SMALL |= {'data.sequence_length': 64, 'data.batch_size': 8, 'flop_budget': 0.0}
SMALL |= {'report.sample_tokens': 8, 'training.num_steps': 10}


def test_state_and_work_are_split_over_fake_devices(tmp_path):
    """State split over 8, work split over 8, gathered and summed over the axes that say so.

    The tables fit 88 columns when piped, and nothing but the file is written. Another number of
    fake devices in the environment does not count. Regression: an attention for GPUs was refused.
    """
    others = '--xla_force_host_platform_device_count=3'
    knobs = [f'--config.{name}={value}' for name, value in SMALL.items()]
    mesh = ('--mesh=data=2,fsdp=2,tensor=2', '--dry_run', '--json=found.json')
    knobs.append('--config.model.attention=mosaic_gpu')
    given = (f'--config={ROOT}/configs/base.py', *knobs, *mesh)
    done = call('train', *given, cwd=tmp_path, XLA_FLAGS=others, COLUMNS='88')
    assert done.status == 0, done.stderr
    assert 'model.attention=mosaic_gpu: needs a GPU; compiled with xla' in done.stderr
    assert os.listdir(tmp_path) == ['found.json']
    found = json.loads((tmp_path / 'found.json').read_text())
    sizes = dict.fromkeys(('data', 'fsdp', 'tensor'), 2) | {'expert': 1}
    assert found['devices'] == 8 and found['mesh'] == sizes
    assert '--dry_run' in found['command'] and '--json=found.json' not in found['command']
    replicated = 4 * found['parameters']
    assert replicated / 4 <= found['bytes']['parameters'] < 1.1 * replicated / 4
    assert 2 * found['bytes']['parameters'] <= found['bytes']['optimizer']
    assert found['split'] == pytest.approx(1, abs=0.01) and not found['warnings']
    kinds = {}
    for row in found['collectives']:
        kinds.setdefault(row['kind'], set()).add(row['axes'])
        assert not row['unknown_loops'] and not row['branches']
    assert {'fsdp'} <= kinds['all-gather'] and {'data', 'fsdp', 'tensor'} <= kinds['all-reduce']
    assert 'all-to-all' not in kinds
    assert all(len(line) <= 88 for line in done.stdout.splitlines())
    for word in ('Memory a device', 'not measured', 'split over', 'upper bounds'):
        assert word in done.stdout


def test_what_training_refuses_is_refused(tmp_path):
    """Regression: globs were not checked, although training refuses one that fits nothing."""
    flags = ('--dry_run', '--config.optimizer.rate_factors=*/nothing:0.5')
    done = call('train', f'--config={ROOT}/configs/tiny.py', *flags, cwd=tmp_path)
    assert done.status == 2 and 'matches no parameter' in done.stderr


def test_page_has_the_table_of_the_committed_files(tmp_path):
    found = [json.loads(path.read_text()) for path in KEPT]
    assert {one['devices'] for one in found} == {8, 64, 256}
    done = call('dry_run', 'table', *KEPT, cwd=tmp_path)
    assert done.status == 0, done.stderr
    assert done.stdout.strip() == markdown(found)
    assert markdown(found) in (ROOT / 'docs' / 'scale.md').read_text()
    # Other spellings of a flag that absl takes too.
    spelled = [word for part in found[0]['command'] for word in part.split('=', 1)]
    assert markdown([found[0] | {'command': spelled}]) == markdown(found[:1])
    (tmp_path / 'cut.json').write_text(json.dumps(found[0] | {'mesh': None}))
    done = call('dry_run', 'table', 'cut.json', cwd=tmp_path)
    assert done.status == 2 and 'cut.json: mesh=None; must be' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    'path', [path for path in KEPT if json.loads(path.read_text())['devices'] == 8], ids=str
)
def test_committed_numbers_of_eight_devices_are_reproduced(tmp_path, path):
    """FLOPs, bytes of the state, and every collective's count and bytes; on the same JAX."""
    kept = json.loads(path.read_text())
    if kept['jax'] != jax.__version__:
        pytest.skip(f'kept by JAX {kept["jax"]}, this is {jax.__version__}: programs differ')
    file = tmp_path / 'found.json'
    environment = {'JAX_DISABLE_MOST_OPTIMIZATIONS': 'false'}
    done = call('train', *kept['command'], f'--json={file}', **environment)
    assert done.status == 0, done.stderr
    found = json.loads(file.read_text())
    # XLA counts after fusion, and a CPU with other instructions fuses otherwise.
    by_xla = found['flops'].pop('xla'), kept['flops'].pop('xla')
    assert by_xla[0] == pytest.approx(by_xla[1], rel=1e-3)
    for name in ('flops', 'collectives', 'sent_bytes', 'parameters', 'estimates'):
        assert found[name] == kept[name]
    for name in ('parameters', 'optimizer', 'argument', 'output'):
        assert found['bytes'][name] == kept['bytes'][name]
    assert found['bytes']['temp'] == pytest.approx(kept['bytes']['temp'], rel=0.25)
