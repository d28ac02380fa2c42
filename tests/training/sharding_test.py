"""Rows are split over devices, and experts; all else is whole on each, and the result the same."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from moddepth_jax.hparams import from_config
from moddepth_jax.training import sharding
from moddepth_jax.training.train_step import init_state
from tests.four_devices import collectives, on_four_devices


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
        ('dta=1', 'an axis of data, expert'),
        ('data=1,model=1', 'an axis of data, expert'),
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
    assert sharding.make_mesh().shape == {'data': jax.device_count(), 'expert': 1}
    assert sharding.make_mesh('expert=1').shape == {'data': 1, 'expert': 1}


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


EXPERTS = {'model.experts.choice': 'token', 'model.experts.num_routed': 6}


@pytest.mark.parametrize(
    ('experts', 'sizes', 'words'),
    [
        (EXPERTS, (2, 4), ['model.experts.num_routed=6', '--mesh=expert=4', 'a divisor of 6']),
        (EXPERTS, (1, 12), ['model.experts.num_routed=6', '--mesh=expert=12']),
        ({}, (2, 2), ['expert=2', 'model.experts.choice=none', '--mesh=data=N']),
        (EXPERTS, (3, 2), ['data.batch_size=4', 'over 3 devices']),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(tiny_config, experts, sizes, words):
    """In one line, with both numbers: experts that do not divide, or that there are none."""
    hparams = from_config(tiny_config(**experts))
    sharding.check_mesh(hparams, AbstractMesh((2, 1), sharding.AXES))
    if experts:
        sharding.check_mesh(hparams, AbstractMesh((1, 3), sharding.AXES))
    with pytest.raises(ValueError) as caught:
        sharding.check_mesh(hparams, AbstractMesh(sizes, sharding.AXES))
    message = str(caught.value)
    assert all(word in message for word in words) and '\n' not in message


def test_experts_and_their_moments_are_split_and_nothing_else_is(tiny_config):
    """Of a MoD model: all three kernels of routed experts, in blocks with and without a router.

    A dense mlp has the same names; it is whole, as are routers and shared experts.
    """
    changes = {
        'model.num_layers': 4,
        'model.experts.layers': '1,2',
        'model.routing.router': 'position',
    }
    hparams = from_config(tiny_config(**EXPERTS, **changes))
    state = jax.eval_shape(lambda: init_state(hparams, 4))
    mesh = AbstractMesh((2, 3), sharding.AXES)
    shardings = sharding.state_shardings(mesh, state)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    split = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(shardings):
        assert leaf.mesh == mesh
        if leaf.spec != PartitionSpec():
            assert leaf.spec == PartitionSpec(None, 'expert', None, None)
            split.append(jax.tree_util.keystr(path, simple=True, separator='/'))
    wanted = [f'mlp/{name}/kernel' for name in ('w1', 'w2', 'w3')]
    for tree in ('params', '/mu', '/nu'):
        mine = [path for path in split if tree in path]
        assert sorted(path[-len(wanted[0]) :] for path in mine) == sorted(2 * wanted)
        assert sum('/block/' in path for path in mine) == 3
    assert len(split) == 18


ON_FOUR_DEVICES = """
import json, sys, tempfile
import jax, numpy as np
from ml_collections import ConfigDict
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.sharding import make_mesh, put_batch, replicated, state_shardings
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
        compiled = step.lower(state, put_batch(mesh, batches[0])).compile()
        for batch in batches:
            batch = put_batch(mesh, batch)
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
    return on_four_devices(ON_FOUR_DEVICES, json.dumps([config.to_dict(), specs, num_steps]))


def check_placement(found):
    assert found['devices'] == 4
    assert found['state_whole'] and found['state_devices'] == [4]
    assert found['batch_shards'] == ['(2, 32)'] and found['logits_shards'] == ['(2, 32, 257)']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('router', 'stream'),
    [('position', 'moda'), ('none', 'residual'), ('position', 'residual'), ('none', 'moda')],
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
    found = trained(tiny_config(**changes))
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
    found = trained(tiny_config(**changes), num_steps=1)
    check_placement(found)
    assert found['records_shards'] == ['(1, 2, 32)']
    one, four = found['losses']
    np.testing.assert_allclose(four, one, atol=1e-5, rtol=0)


def test_experts_train_alike_on_two_by_two_devices(tiny_config):
    """One step with experts and rows split has the loss and gradients of one device to 1e-5.

    Each device holds half of the experts, and the program moves neither their weights nor tokens.
    A checkpoint from there is restored bit for bit onto meshes of other shapes.
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
    assert found['batch_shards'] == ['(4, 32)'] and found['w1_shards'] == ['(1, 2, 32, 24)']
    assert found['data=4'] == [['(1, 4, 32, 24)'], True]
    assert found['expert=4'] == [['(1, 1, 32, 24)'], True]
    gathered = collectives(found['text']).pop('all-gather', set())
    assert gathered <= {'f32[8,32,4]'}  # scores of the router, for top_k
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

def stops(dataset, step):
    if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return train_batch(dataset, step)

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
    found = on_four_devices(STOPPED_AND_RESUMED, arguments)
    assert found['stopped'] == ['SIGTERM', 2] and found['mesh'] == {'data': 4, 'expert': 1}
    alone, resumed = found['results']
    np.testing.assert_allclose(resumed, alone, atol=1e-4, rtol=0)
    assert found['flops'][0] == found['flops'][1] > 0
