"""Meshes are checked against the model; state and batches are split by the rules."""

import dataclasses
import re

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from moddepth_jax.hparams import from_config
from moddepth_jax.model.streams import STREAMS
from moddepth_jax.training import mesh as sharding
from moddepth_jax.training.train_step import init_state
from tests.data.prepared_text import refusal


@pytest.mark.parametrize(
    ('spec', 'words'),
    [
        (',', 'AXIS=SIZE'),
        ('data=²', 'AXIS=SIZE'),
        ('expert=1,data=1,expert=1', 'names expert twice'),
        ('data=1000', 'needs 1000 devices, and there are 1'),
    ],
)
def test_a_bad_mesh_is_refused_in_one_line(spec, words):
    message = refusal(sharding.make_mesh, spec)
    assert message.startswith(f'--mesh={spec}: ') and words in message


def test_the_default_mesh_is_all_devices_along_data():
    ones = dict.fromkeys(sharding.AXES, 1)
    assert sharding.make_mesh().shape == ones | {'data': jax.device_count()}
    assert sharding.make_mesh('expert=1').shape == ones


EXPERTS = {'model.experts.choice': 'token', 'model.experts.num_routed': 6}


@pytest.mark.parametrize(
    ('experts', 'sizes', 'words'),
    [
        (EXPERTS, {'expert': 4}, ['model.experts.num_routed=6', 'expert=4', 'a divisor of 6']),
        (EXPERTS, {'expert': 12}, ['model.experts.num_routed=6', '--mesh=expert=12']),
        ({}, {'data': 2, 'expert': 2}, ['expert=2', 'model.experts.choice=none', '--mesh=data=N']),
        (EXPERTS, {'data': 5, 'expert': 2}, ['data.batch_size=12', 'data=5 x expert=2']),
        ({'training.accumulate_steps': 4}, {'data': 2}, ['=12 in 4 micro-batches', '2 devices']),
        ({}, {'tensor': 3}, ['model.num_heads=4', '--mesh=tensor=3']),
        (EXPERTS | {'model.experts.d_ff': 5}, {'tensor': 2}, ['model.experts.d_ff=5']),
        ({'model.d_ff': 5}, {'tensor': 2}, ['model.d_ff=5', '--mesh=tensor=2']),
        ({}, {'fsdp': 6}, ['model.d_model=32', '--mesh=fsdp=6']),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(tiny_config, experts, sizes, words):
    """The line has both numbers; also for experts that do not divide, or without experts."""
    hparams = from_config(tiny_config(**experts, **{'data.batch_size': 12}))
    sharding.check_mesh(hparams, mesh_of(data=3))
    if 'model.experts.choice' in experts:
        sharding.check_mesh(hparams, mesh_of(expert=3))
    message = refusal(sharding.check_mesh, hparams, mesh_of(**sizes))
    assert all(word in message for word in words)


def mesh_of(**sizes):
    """Make an abstract mesh; other axes have size 1."""
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in sharding.AXES), sharding.AXES)


# Parts of the paths of vectors and narrow matrices.
NARROW = ('norm', 'router', 'predictor', 'connection', 'reader', 'weights', 'outer', 'bias')


@pytest.mark.parametrize('stream', STREAMS)
def test_parameters_and_their_moments_have_equal_shardings(tiny_config, stream):
    """They are sharded over fsdp, tensor and expert, except vectors and narrow matrices."""
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
        narrow = leaf.ndim < 2 or any(name in path for name in NARROW)
        assert narrow == (place.spec == PartitionSpec()), path
    moments = [path for path in split if '/mu/' in path or '/nu/' in path]
    for path in moments:
        assert split[path] == split['params/' + re.split('/[mn]u/', path)[1]]
    assert len(moments) == 2 * sum(path.startswith('params/') for path in split)


def test_the_unsharded_share_is_bounded(tiny_config):
    """With fsdp it must be at most training.max_unsharded; `data` shards no parameters."""
    hparams = from_config(tiny_config(**{'data.batch_size': 24, 'training.max_unsharded': 0.001}))
    sharding.check_mesh(hparams, mesh_of(data=24))
    message = refusal(sharding.check_mesh, hparams, mesh_of(fsdp=2))
    assert '--mesh=fsdp=2: ' in message and 'training.max_unsharded=0.001' in message
    more = dataclasses.replace(hparams.training, max_unsharded=0.05)
    sharding.check_mesh(dataclasses.replace(hparams, training=more), mesh_of(fsdp=2))


@pytest.fixture(scope='module')
def state(tiny_config):
    """Shapes of a routed model with a vocabulary of 257, which the axis tensor cannot split."""
    hparams = from_config(tiny_config(**{'model.routing.router': 'learned'}))
    return jax.eval_shape(lambda: init_state(hparams, 4))


@pytest.mark.parametrize('sizes', [{'data': 2}, {'fsdp': 2, 'tensor': 2}])
def test_lines_add_up_to_the_model(state, sizes):
    mesh = mesh_of(**sizes)
    *_, total, last = [
        line
        for line in sharding.sharding_lines(mesh, state.params)
        if 'model.vocab_size' not in line
    ]
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    held = sharding.device_bytes(mesh, state.params)
    assert total.split()[:2] == ['all', 'parameters']
    assert total.split()[2:] == [f'{size:,}', f'{held / 1e6:.3f}']
    unsharded, parts = float(last.split('%')[0]) / 100, 4 if 'fsdp' in sizes else 1
    assert held == pytest.approx(4 * size * (unsharded + (1 - unsharded) / parts), rel=1e-3)


def test_lines_are_as_wide_as_a_terminal(state):
    assert sharding.mesh_lines(mesh_of(), state) == []
    (line,) = sharding.mesh_lines(mesh_of(data=4), state)
    assert line.startswith('mesh      data=4: ')
    line = 'every device computes all logits: model.vocab_size=257 is not a multiple of tensor=2'
    assert sharding.mesh_lines(mesh_of(tensor=2), state)[-1].strip() == line
    lines = sharding.mesh_lines(mesh_of(data=2, fsdp=2), state)
    assert lines[0].startswith('mesh      data=2 x fsdp=2: ') and max(map(len, lines)) < 100
    table = sharding.sharding_lines(mesh_of(data=2, fsdp=2), state.params)
    assert lines[1:] == [' ' * 10 + line for line in table]
    table = sharding.sharding_lines(mesh_of(fsdp=4, tensor=2), state.params)
    rows = {line.split()[0]: ' '.join(line.split()[1:]) for line in table}
    assert rows['attention/query/kernel'].startswith('(-, fsdp, tensor, -) ')
    held = 257 * 32 * 4 // 8
    assert rows['embedding'] == f'(-, fsdp+tensor) {257 * 32:,} {held / 1e6:.3f}'
