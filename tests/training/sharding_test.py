"""Rows and parameters are split over devices as the rules say, and the result is the same."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from moddepth_jax.hparams import from_config
from moddepth_jax.training import mesh as sharding
from moddepth_jax.training.train_step import init_state
from tests.devices import collectives, on_devices


@pytest.mark.parametrize(
    ('spec', 'words'),
    [
        (',', 'AXIS=SIZE'),
        ('data=1,', 'AXIS=SIZE'),
        ('data', 'AXIS=SIZE'),
        ('data=', 'AXIS=SIZE'),
        ('data=0', 'AXIS=SIZE'),
        ('data=-2', 'AXIS=SIZE'),
        ('data=two', 'AXIS=SIZE'),
        ('data=1.5', 'AXIS=SIZE'),
        ('data=²', 'AXIS=SIZE'),
        ('dta=1', 'an axis of data, fsdp, tensor, expert'),
        ('data=1,model=1', 'an axis of data, fsdp, tensor, expert'),
        ('expert=1,data=1,expert=1', 'names expert twice'),
        ('data=1000', 'needs 1000 devices, 1 are here'),
        ('data=5,expert=4', 'needs 20 devices, 1 are here'),
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
    ones = dict.fromkeys(sharding.AXES, 1)
    assert sharding.make_mesh().shape == ones | {'data': jax.device_count()}
    assert sharding.make_mesh('expert=1').shape == ones


@pytest.mark.parametrize(
    ('batch_size', 'parts', 'shards', 'divides'),
    [(8, 1, 4, True), (8, 2, 4, True), (8, 4, 4, False), (6, 1, 4, False), (1, 1, 1, True)],
)
def test_rows_of_a_micro_batch_must_divide(batch_size, parts, shards, divides):
    """A micro-batch whose rows do not divide over `data` is refused, with the sizes in the line."""
    mesh = mesh_of(data=shards)
    if divides:
        sharding.check_batch(mesh, batch_size, parts)
        return
    with pytest.raises(ValueError) as caught:
        sharding.check_batch(mesh, batch_size, parts)
    message = str(caught.value)
    assert message.startswith(f'data.batch_size={batch_size} in {parts} micro-batches')
    assert f'over {shards} devices' in message and '\n' not in message


EXPERTS = {'model.experts.choice': 'token', 'model.experts.num_routed': 6}


@pytest.mark.parametrize(
    ('experts', 'sizes', 'words'),
    [
        (EXPERTS, {'expert': 4}, ['model.experts.num_routed=6', 'expert=4', 'a divisor of 6']),
        (EXPERTS, {'expert': 12}, ['model.experts.num_routed=6', '--mesh=expert=12']),
        ({}, {'data': 2, 'expert': 2}, ['expert=2', 'model.experts.choice=none', '--mesh=data=N']),
        (EXPERTS, {'data': 5, 'expert': 2}, ['data.batch_size=12', 'data=5 x expert=2']),
        ({}, {'tensor': 3}, ['model.num_heads=4', '--mesh=tensor=3']),
        (EXPERTS | {'model.experts.d_ff': 5}, {'tensor': 2}, ['model.experts.d_ff=5']),
        ({'model.d_ff': 5}, {'tensor': 2}, ['model.d_ff=5', '--mesh=tensor=2']),
        ({}, {'fsdp': 6}, ['model.d_model=32', '--mesh=fsdp=6']),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(tiny_config, experts, sizes, words):
    """In one line, with both numbers: experts that do not divide, or that there are none."""
    hparams = from_config(tiny_config(**experts, **{'data.batch_size': 12}))
    sharding.check_mesh(hparams, mesh_of(data=2))
    if 'model.experts.choice' in experts:
        sharding.check_mesh(hparams, mesh_of(expert=3))
    with pytest.raises(ValueError) as caught:
        sharding.check_mesh(hparams, mesh_of(**sizes))
    message = str(caught.value)
    assert all(word in message for word in words) and '\n' not in message


def mesh_of(**sizes):
    """An abstract mesh; axes that are not named have size 1."""
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in sharding.AXES), sharding.AXES)


@pytest.mark.parametrize('stream', ['residual', 'dense', 'attention', 'moda'])
def test_parameters_and_their_moments_are_split_alike(tiny_config, stream):
    """Over fsdp, tensor and expert: all but vectors and narrow matrices, in every depth stream."""
    changes = {'model.num_layers': 4, 'model.depth.stream': stream, 'model.experts.layers': '1,2'}
    changes['model.layer_loop'] = 'unrolled'
    hparams = from_config(tiny_config(**EXPERTS, **changes))
    state = jax.eval_shape(lambda: init_state(hparams, 4))
    mesh = mesh_of(data=2, fsdp=2, tensor=2, expert=3)
    shardings = sharding.state_shardings(mesh, state)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    split = {}
    places = jax.tree_util.tree_leaves_with_path(shardings)
    for (path, place), leaf in zip(places, jax.tree.leaves(state), strict=True):
        path = jax.tree_util.keystr(path, simple=True, separator='/')
        place.shard_shape(leaf.shape)  # raises where it does not divide
        split[path] = place.spec
        narrow = leaf.ndim < 2 or any(name in path for name in ('norm', 'router', 'predictor'))
        assert narrow == (place.spec == PartitionSpec()), path
    moments = [path for path in split if '/mu/' in path or '/nu/' in path]
    for path in moments:
        assert split[path] == split['params/' + re.split('/[mn]u/', path)[1]]
    assert len(moments) == 2 * sum(path.startswith('params/') for path in split)


def test_what_a_mesh_leaves_whole_is_bounded(tiny_config):
    """What lies whole under fsdp counts against training.max_unsharded; under data alone it may.

    Sizes that an axis does not divide are refused by the name of the size.
    """
    hparams = from_config(tiny_config(**{'data.batch_size': 24, 'training.max_unsharded': 0.001}))
    sharding.check_mesh(hparams, mesh_of(data=24))
    with pytest.raises(ValueError, match='training.max_unsharded=0.001') as caught:
        sharding.check_mesh(hparams, mesh_of(fsdp=2))
    assert '--mesh=fsdp=2: ' in str(caught.value) and '\n' not in str(caught.value)
    more = dataclasses.replace(hparams.training, max_unsharded=0.05)
    sharding.check_mesh(dataclasses.replace(hparams, training=more), mesh_of(fsdp=2))
    for sizes, name in (({'fsdp': 3}, 'model.d_model=32'), ({'tensor': 4}, 'model.num_kv_heads=2')):
        with pytest.raises(ValueError, match=name):
            sharding.check_mesh(hparams, mesh_of(**sizes))


def test_a_process_alone_has_all_rows():
    """It reads and places them all. Several processes: tests/launch/several_processes_test.py."""
    mesh = sharding.make_mesh()
    assert sharding.local_rows(mesh, 8) == slice(0, 8)
    batch = {'tokens_BT': np.arange(16).reshape(8, 2)}
    placed = sharding.shard_rows(mesh, batch, slice(0, 8), 8)
    assert (np.asarray(placed['tokens_BT']) == batch['tokens_BT']).all()


ON_FOUR_DEVICES = """
import json, sys, tempfile
import jax, numpy as np
from ml_collections import ConfigDict
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.mesh import make_mesh, shard_batch, replicated, state_shardings
from moddepth_jax.training.train_step import init_state, train_step

config, specs, num_steps = json.loads(sys.argv[1])
hparams = from_config(ConfigDict(config))
batches = []
for seed in range(num_steps):
    tokens_BT = np.random.default_rng(seed).integers(0, 257, (8, 33)).astype(np.int32)
    tokens_BT[:, 9] = 256
    segments_BT = np.cumsum(tokens_BT[:, :-1] == 256, axis=1, dtype=np.int32) + 1
    batches.append({'tokens_BT': tokens_BT[:, :-1], 'labels_BT': tokens_BT[:, 1:],
                    'segment_ids_BT': segments_BT})

def shards(array):
    return sorted({str(shard.data.shape) for shard in array.addressable_shards})

def w1(state):
    return shards(state.params['stack']['run_0']['layer_0']['mlp']['w1']['kernel'])

state = jax.jit(lambda: init_state(hparams, 4))()
first = jax.device_get(state)
found = {'devices': jax.device_count(), 'losses': []}
optimizer_states = []
for spec in specs:
    mesh = make_mesh(spec)
    shardings = state_shardings(mesh, first)
    state = jax.device_put(first, shardings)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
    losses = []
    with jax.set_mesh(mesh):
        compiled = step.lower(state, shard_batch(mesh, batches[0])).compile()
        for batch in batches:
            batch = shard_batch(mesh, batch)
            state, metrics = compiled(state, batch)
            jax.block_until_ready(state)
            losses.append(float(metrics['loss']))
    found['losses'].append(losses)
    optimizer_states.append(jax.device_get(jax.tree.leaves(state.optimizer_state)))
# After a step the first moments are the clipped gradients times 1 - b1.
found['moments'] = max(
    float(np.max(np.abs(a - b)) / (np.max(np.abs(a)) or 1.0))
    for a, b in zip(*optimizer_states, strict=True))
found['text'] = compiled.as_text()
leaves = jax.tree.leaves(state)
found['state_whole'] = all(leaf.is_fully_replicated for leaf in leaves)
found['state_devices'] = sorted({len(leaf.sharding.device_set) for leaf in leaves})
found['batch_shards'] = shards(batch['tokens_BT'])
if hparams.model.expert_layers:
    found['w1_shards'] = w1(state)
    with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, 1) as checkpoints:
        checkpoints.save(1, state, {})
        for spec in ('data=4', 'expert=4'):
            shardings = state_shardings(make_mesh(spec), state)
            placed = jax.tree.map(
                lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
                state, shardings)
            restored, _, _ = checkpoints.restore(placed)
            found[spec] = [w1(restored), state_sha256(restored) == state_sha256(state)]
else:
    logits_BTV, records = jax.jit(Transformer(hparams).apply)(
        state.variables, batch['tokens_BT'], batch['segment_ids_BT'])
    found['logits_shards'] = shards(logits_BTV)
    if records is not None:
        found['records_shards'] = shards(records.routing.top_c_BT)
print(json.dumps(found))
"""


def trained(config, specs=('data=1', 'data=4'), num_steps=4):
    return on_devices(4, ON_FOUR_DEVICES, json.dumps([config.to_dict(), specs, num_steps]))


def check_placement(found):
    assert found['devices'] == 4
    assert found['state_whole'] and found['state_devices'] == [4]
    assert found['batch_shards'] == ['(2, 32)'] and found['logits_shards'] == ['(2, 32, 257)']


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
    found = trained(tiny_config(**changes), num_steps=1)
    check_placement(found)
    assert found['records_shards'] == ['(1, 2, 32)']
    one, four = found['losses']
    np.testing.assert_allclose(four, one, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_experts_train_alike_on_two_by_two_devices(tiny_config):
    """One step with experts and rows split has the loss and gradients of one device to 1e-5.

    Each device holds half of the experts, and the program moves none of their weights. A checkpoint
    from there is restored bit for bit onto meshes of other shapes.
    """
    changes = {
        'model.num_layers': 1,
        'model.experts.choice': 'token',
        'model.experts.num_routed': 4,
        'model.experts.d_ff': 24,
        'data.batch_size': 8,
        'optimizer.warmup_fraction': 0.0,
    }
    found = trained(tiny_config(**changes), ('data=1', 'data=2,expert=2'), num_steps=1)
    np.testing.assert_allclose(*found['losses'], atol=1e-5, rtol=0)
    assert found['moments'] < 1e-5
    assert found['devices'] == 4 and found['state_devices'] == [4]
    assert found['batch_shards'] == ['(2, 32)'] and found['w1_shards'] == ['(1, 2, 32, 24)']
    assert found['data=4'] == [['(1, 4, 32, 24)'], True]
    assert found['expert=4'] == [['(1, 1, 32, 24)'], True]
    gathered = collectives(found['text']).pop('all-gather', set())
    # Tokens, weights and experts of the pairs, and their masks: of the rows of two devices.
    assert {'f32[4,32,32]', 'f32[4,32,2]'} <= gathered
    assert all(shape.split('[')[1].startswith('4,32,') for shape in gathered)
    assert not collectives(found['text']).keys() & {'all-to-all', 'collective-permute'}


STOPPED_AND_RESUMED = """
import json, os, signal, sys
from ml_collections import ConfigDict
from moddepth_jax.data.pipeline import Dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop

config, folder = json.loads(sys.argv[1])
hparams, train_batch = from_config(ConfigDict(config)), Dataset.train_batch
alone = loop.train(hparams, f'{folder}/alone', 'data=1')

def stops(dataset, step, *rows):
    if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return train_batch(dataset, step, *rows)

Dataset.train_batch = stops
stopped = loop.train(hparams, f'{folder}/moved', 'data=2,expert=2')
Dataset.train_batch = train_batch
done = int(stopped.state.step)
resumed = loop.train(hparams, f'{folder}/moved', 'data=4')
print(json.dumps({
    'stopped': [stopped.signal, done],
    'mesh': dict(resumed.state.step.sharding.mesh.shape),
    'results': [[run.summary['train_loss'], run.summary['eval']['loss']]
                for run in (alone, resumed)],
    'flops': [run.summary['flops_per_step_dot_general'] for run in (alone, resumed)],
}))
"""


@pytest.mark.slow
def test_a_run_with_experts_goes_on_on_another_mesh(tiny_config, tmp_path):
    """Stopped on two by two devices and resumed on four along `data`, it ends as one never split.

    To 1e-4, for a choice on a near-tie may fall otherwise. FLOPs are counted as on one device.
    """
    changes = EXPERTS | {'model.experts.num_routed': 4, 'data.batch_size': 8}
    arguments = json.dumps([tiny_config(**changes).to_dict(), str(tmp_path)])
    found = on_devices(4, STOPPED_AND_RESUMED, arguments)
    assert found['stopped'] == ['SIGTERM', 2] and found['mesh']['data'] == 4
    alone, resumed = found['results']
    np.testing.assert_allclose(resumed, alone, atol=1e-4, rtol=0)
    assert found['flops'][0] == found['flops'][1] > 0
