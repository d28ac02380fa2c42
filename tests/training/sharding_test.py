"""Rows of a batch are split over devices, the state is whole on each, and the result the same."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from moddepth_jax.training import sharding

ROOT = pathlib.Path(__file__).parents[2]
FAKE_DEVICES = '--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0'


@pytest.mark.parametrize(
    ('spec', 'words'),
    [
        ('data', 'AXIS=SIZE'),
        ('data=', 'AXIS=SIZE'),
        ('data=0', 'AXIS=SIZE'),
        ('data=-2', 'AXIS=SIZE'),
        ('data=two', 'AXIS=SIZE'),
        ('data=1.5', 'AXIS=SIZE'),
        ('data=²', 'AXIS=SIZE'),
        ('dta=1', 'an axis of data'),
        ('data=1,model=1', 'an axis of data'),
        ('data=1000', 'needs 1000 devices, 1 are here'),
    ],
)
def test_a_bad_mesh_is_refused_in_one_line(spec, words):
    """The line has the flag as it was given and says what would be right."""
    with pytest.raises(ValueError) as caught:
        sharding.make_mesh(spec)
    message = str(caught.value)
    assert message.startswith(f'--mesh={spec}: ') and words in message and '\n' not in message


def test_the_mesh_is_all_devices_unless_told():
    """Without a spec every device lies along `data`."""
    assert sharding.make_mesh().shape == {'data': jax.device_count()}
    assert sharding.make_mesh('data=1').shape == {'data': 1}


@pytest.mark.parametrize(
    ('batch_size', 'parts', 'shards', 'divides'),
    [(8, 1, 4, True), (8, 2, 4, True), (8, 4, 4, False), (6, 1, 4, False), (1, 1, 1, True)],
)
def test_rows_of_a_micro_batch_must_divide(batch_size, parts, shards, divides):
    """A micro-batch whose rows do not divide over `data` is refused, with the sizes in the line."""
    mesh = jax.sharding.AbstractMesh((shards,), ('data',))
    if divides:
        sharding.check_batch(mesh, batch_size, parts)
        return
    with pytest.raises(ValueError) as caught:
        sharding.check_batch(mesh, batch_size, parts)
    message = str(caught.value)
    assert message.startswith(f'data.batch_size={batch_size} in {parts} micro-batches')
    assert f'over {shards} devices' in message and '\n' not in message


ON_FOUR_DEVICES = """
import json, sys
import jax, numpy as np
from ml_collections import ConfigDict
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.sharding import make_mesh, put_batch, replicated
from moddepth_jax.training.train_step import init_state, train_step

hparams = from_config(ConfigDict(json.loads(sys.argv[1])))
router = hparams.model.routing.router
batches = []
for seed in range(4):
    tokens_BT = np.random.default_rng(seed).integers(0, 257, (8, 33)).astype(np.int32)
    tokens_BT[:, 9] = 256
    segments_BT = np.cumsum(tokens_BT[:, :-1] == 256, axis=1, dtype=np.int32) + 1
    batches.append({'tokens_BT': tokens_BT[:, :-1], 'labels_BT': tokens_BT[:, 1:],
                    'segment_ids_BT': segments_BT})
found = {'devices': jax.device_count(), 'losses': []}
for shards in (1, 4):
    mesh = make_mesh(f'data={shards}')
    state = jax.jit(lambda: init_state(hparams, 4), out_shardings=replicated(mesh))()
    step = jax.jit(train_step, donate_argnums=0)
    losses = []
    for batch in batches[: 1 if router == 'learned' else 4]:
        batch = put_batch(mesh, batch)
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        losses.append(float(metrics['loss']))
    found['losses'].append(losses)
leaves = jax.tree.leaves(state)
found['state_whole'] = all(leaf.is_fully_replicated for leaf in leaves)
found['state_devices'] = sorted({len(leaf.sharding.device_set) for leaf in leaves})
found['batch_shards'] = sorted({str(s.data.shape) for s in batch['tokens_BT'].addressable_shards})
logits_BTV, records = jax.jit(Transformer(hparams).apply)(
    state.variables, batch['tokens_BT'], batch['segment_ids_BT'])
found['logits_shards'] = sorted({str(s.data.shape) for s in logits_BTV.addressable_shards})
if records is not None:
    shards = records.top_c_BT.addressable_shards
    found['records_shards'] = sorted({str(s.data.shape) for s in shards})
print(json.dumps(found))
"""


def on_four_devices(config):
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': FAKE_DEVICES,
        'NPROC': '8',
    }
    command = [sys.executable, '-c', ON_FOUR_DEVICES, config.to_json()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_placement(found):
    assert found['devices'] == 4
    assert found['state_whole'] and found['state_devices'] == [4]
    assert found['batch_shards'] == ['(2, 32)'] and found['logits_shards'] == ['(2, 32, 257)']


@pytest.mark.parametrize(
    ('router', 'stream'),
    [
        ('position', 'moda'),
        pytest.param('none', 'residual', marks=pytest.mark.slow),
        pytest.param('position', 'residual', marks=pytest.mark.slow),
        pytest.param('none', 'moda', marks=pytest.mark.slow),
    ],
)
def test_a_model_of_fixed_choices_trains_alike_on_four_devices(router, stream, tiny_config):
    """Four steps on four devices have the losses of one device to 1e-5.

    The state comes out whole on every device; logits stay split by rows, as the batch was.
    """
    changes = {
        'model.routing.router': router,
        'model.depth.stream': stream,
        'data.batch_size': 8,
        'optimizer.warmup_fraction': 0.0,
        'optimizer.learning_rate': 0.01,
    }
    found = on_four_devices(tiny_config(**changes))
    check_placement(found)
    one, four = found['losses']
    assert len(one) == 4 and min(np.abs(np.diff(one))) > 1e-3
    np.testing.assert_allclose(four, one, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_routed_model_keeps_its_rows_apart(tiny_config):
    """The first loss is that of one device to 1e-5; decisions are split by rows like the batch.

    Later losses may part: scores that nearly tie are chosen differently by different programs.
    """
    changes = {
        'model.routing.router': 'learned',
        'data.batch_size': 8,
        'optimizer.warmup_fraction': 0.0,
    }
    found = on_four_devices(tiny_config(**changes))
    check_placement(found)
    assert found['records_shards'] == ['(1, 2, 32)']
    one, four = found['losses']
    np.testing.assert_allclose(four, one, atol=1e-5, rtol=0)
