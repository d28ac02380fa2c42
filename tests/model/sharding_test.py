"""The rules of sharding, and functions on each device's part: results are those of one device."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from moddepth_jax.hparams.flag_values import AXES
from moddepth_jax.model.layers import embed
from moddepth_jax.model.moe.experts import routed_mlp
from moddepth_jax.model.routing import select_top_c
from moddepth_jax.model.sharding import (
    axis_names,
    constrain,
    map_batch_shards,
    map_shards,
    sharded_routed_mlp,
    spec,
    unshard_params,
)
from moddepth_jax.model.value_embeddings import ValueEmbedding
from moddepth_jax.training.mesh import batch_sharding, make_mesh, state_shardings
from tests.devices import collectives, on_devices
from tests.model.cases import equations

B, T, D, F, E, K = 4, 6, 8, 12, 4, 2


def shapes():
    """Return the shapes of x, weights of pairs, w1, w3, w2, and of the pairs' experts."""
    floats = [(B, T, D), (B, T, K), (E, D, F), (E, D, F), (E, F, D)]
    floats = [jax.ShapeDtypeStruct(shape, 'float32') for shape in floats]
    return floats, jax.ShapeDtypeStruct((B, T, K), 'int32')


def mesh_of(**sizes):
    """Return an abstract mesh; axes that are not named have size 1."""
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=types)


def under(data=None, expert=None, **sizes):
    """Return a context with an abstract mesh of these sizes, or without a mesh."""
    if data is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh_of(data=data, expert=expert or 1, **sizes))


@pytest.mark.parametrize(
    ('path', 'shape', 'sizes', 'wanted'),
    [
        ('params/embedding', (64, 32), {'fsdp': 2, 'tensor': 4}, ('tensor', 'fsdp')),
        ('params/embedding', (257, 32), {'fsdp': 2, 'tensor': 4}, (None, ('fsdp', 'tensor'))),
        ('params/embedding', (257, 33), {'fsdp': 2, 'tensor': 4}, ()),
        ('stack/l/value_embedding/embedding', (3, 257, 2, 8), {'fsdp': 2, 'tensor': 2},
         (None, None, 'tensor', 'fsdp')),
        ('stack/l/value_embedding/embedding', (3, 64, 1, 8), {'fsdp': 2, 'tensor': 2},
         (None, 'tensor', None, 'fsdp')),
        ('params/head/kernel', (32, 64), {'tensor': 4}, (None, 'tensor')),
        ('query/kernel', (32, 4, 8), {'fsdp': 2, 'tensor': 2}, ('fsdp', 'tensor', None)),
        ('a/attention/key/kernel', (32, 2, 8), {'tensor': 2}, (None, 'tensor', None)),
        ('attention/out/kernel', (4, 8, 32), {'tensor': 2}, ('tensor', None, None)),
        ('stack/l/attention/out/bias', (3, 32), {'tensor': 2, 'fsdp': 2}, ()),
        ('stack/l/mlp/w1/kernel', (3, 32, 64), {'fsdp': 2, 'expert': 2}, (None, 'fsdp', None)),
        ('stack/l/mlp/w2/kernel', (3, 8, 64, 32), {'fsdp': 2, 'tensor': 2, 'expert': 4},
         (None, 'expert', 'tensor', 'fsdp')),
        ('mlp/shared/w3/kernel', (32, 64), {'tensor': 4}, (None, 'tensor')),
        ('stack/l/mlp_norm/scale', (3, 32), {'fsdp': 2}, ()),
        ('stack/l/mlp_norm/scale', (2, 3, 32), {'fsdp': 2}, ()),  # of each of three loops
        ('stack/l/router/w', (3, 32), {'fsdp': 2}, ()),
        ('loop_routers/router/w', (3, 32), {'fsdp': 2, 'tensor': 2}, ()),
        ('loop_routers/predictor/hidden/kernel', (3, 32, 8), {'fsdp': 2, 'tensor': 2}, ()),
        ('params/loop_embeddings', (3, 32), {'fsdp': 2, 'tensor': 2}, ()),
    ],
)  # fmt: skip
def test_a_leaf_is_split_as_the_table_says(path, shape, sizes, wanted):
    """Its path and rank give its axis names; the first rule that divides is taken."""
    names = axis_names(path, len(shape))
    assert spec(mesh_of(**sizes), names, shape) == PartitionSpec(*wanted)


def test_rows_are_split_over_all_axes_but_tensor():
    """If these divide the rows. A mesh axis is used once per array."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2, expert=2)
    rows = PartitionSpec(('data', 'fsdp', 'expert'), None, 'tensor')
    assert spec(mesh, ('batch', None, 'heads'), (8, 3, 4)) == rows
    assert spec(mesh, ('batch', None, 'embed'), (8, 3, 4)) == PartitionSpec(*rows[:2], None)
    assert spec(mesh, ('batch', None, 'heads'), (6, 3, 3)) == PartitionSpec()


def test_parameters_are_gathered_along_embed():
    """In the dtype of the products. Gradients are float32 and sharded like stored parameters.

    Without a mesh and inside a shard_map nothing changes.
    """
    params = {'mlp': {'w1': {'kernel': jax.ShapeDtypeStruct((32, 64), 'float32')}},
              'mlp_norm': {'scale': jax.ShapeDtypeStruct((32,), 'float32')}}  # fmt: skip

    def loss(params):
        full = unshard_params(params, 'bfloat16')
        assert full['mlp_norm']['scale'] is params['mlp_norm']['scale']
        return sum(leaf.sum().astype('float32') for leaf in jax.tree.leaves(full))

    plain = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert 'sharding_constraint' not in plain and 'bf16' not in plain

    def apart(x):
        return map_shards(lambda x: constrain(x, 'batch'), {'x': x}, {'x': ('batch',)}, ('batch',))

    with under(2, fsdp=2, tensor=2):
        program = jax.make_jaxpr(jax.grad(loss))(params)
        apart = str(jax.make_jaxpr(apart)(jax.ShapeDtypeStruct((8,), 'float32')))
    assert 'bf16[32,64]' in str(program)
    at = [e for e in equations(program.jaxpr) if e.primitive.name == 'sharding_constraint']
    specs = [str(equation.params['sharding'].spec) for equation in at]
    stored, full = (str(PartitionSpec(side, 'tensor')) for side in ('fsdp', None))
    assert specs == [stored, full, stored, stored]
    assert 'shard_map' in apart and 'sharding_constraint' not in apart


def test_heads_are_split_only_with_their_keys():
    """If `tensor` does not divide both, neither is split."""
    names = {'q': ('batch', 'heads'), 'k': ('batch', 'kv_heads')}
    seen = []

    def shapes_seen(q, k):
        seen.append((q.shape, k.shape))
        return q

    with under(2, tensor=2):
        for heads, kv_heads in ((4, 2), (4, 1), (3, 3)):
            sizes = {'q': heads, 'k': kv_heads}
            arrays = {n: jax.ShapeDtypeStruct((4, size), 'float32') for n, size in sizes.items()}
            jax.eval_shape(lambda q, k: map_shards(shapes_seen, {'q': q, 'k': k}, names,
                                                   names['q']), **arrays)  # fmt: skip
    assert seen == [((2, 2), (2, 1)), ((2, 4), (2, 1)), ((2, 3), (2, 3))]


def sharded(arrays, expert_BTk, product='blocked'):
    x_BTD, weight_BTk, *weights = arrays
    args = x_BTD, expert_BTk, weight_BTk, *weights, product, K * T
    return sharded_routed_mlp(routed_mlp, *args)


def test_one_device_runs_the_plain_function():
    """Without a mesh, or with one device, nothing is added to the plain call."""

    def plain(arrays, expert_BTk):
        x_BTD, weight_BTk, *weights = arrays
        return routed_mlp(x_BTD, expert_BTk, weight_BTk, *weights, 'blocked', K * T)

    def traced(*sizes):
        with under(*sizes):
            return str(jax.make_jaxpr(sharded)(*shapes()))

    expected = str(jax.make_jaxpr(plain)(*shapes()))
    assert traced() == traced(1, 1) == expected
    assert 'shard_map' in traced(1, 2) and 'shard_map' in traced(2, 1)


def test_a_mesh_may_lack_axes():
    """Regression: experts needed a mesh with the axis `expert`."""
    mesh = AbstractMesh((2,), ('data',), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert 'shard_map' in str(jax.make_jaxpr(sharded)(*shapes()))


def test_the_backward_pass_keeps_no_copy_of_the_weights():
    """A layer saves the weights themselves, as on one device."""
    kept = []

    def program(arrays, expert_BTk):
        y_BTD, backward = jax.vjp(lambda *arrays: sharded(arrays, expert_BTk), *arrays)
        pairs = zip(backward.args_res, arrays, strict=True)
        kept.append([residual is array for residual, array in pairs])
        return y_BTD

    jax.make_jaxpr(program)(*shapes())
    with under(2, 2):
        jax.make_jaxpr(program)(*shapes())
    assert kept == [[False, False, True, True, True]] * 2


# Mesh, rows, product; and on each device: rows, experts, their inner width.
CASES = [
    ('data=2,expert=2', B, 'blocked', (2, 2, F)),
    ('expert=4', B, 'blocked', (4, 1, F)),
    ('data=2,tensor=2', B, 'blocked', (2, E, F // 2)),
    ('data=2,expert=2', B - 1, 'ragged_dot', None),  # rows that do not divide
    ('expert=3', 3, 'blocked', None),  # experts that do not divide
]


def check_experts(layout, num_rows, product, own):
    rng, mesh = np.random.default_rng(0), make_mesh(layout)
    arrays = [rng.normal(size=shape.shape).astype(np.float32) for shape in shapes()[0]]
    target_BTD = rng.normal(size=(B, T, D)).astype(np.float32)
    # Numbers from E on: no-op experts, and padding.
    expert_BTk = np.int32(rng.integers(0, E + 2, (B, T, 1)) + np.arange(K))
    expert_BTk[0, 0] = 99
    expert_BTk[-1] = np.arange(K)  # all tokens of a row on the same few experts
    x_BTD, weight_BTk, *weights = arrays
    inputs = [x_BTD[:num_rows], weight_BTk[:num_rows], *weights], expert_BTk[:num_rows]

    def loss(arrays, expert_BTk):
        y_BTD = sharded(arrays, expert_BTk, product)
        return jnp.sum(y_BTD * target_BTD[:num_rows]), y_BTD

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, one_BTD), gradients = step(*inputs)
    one = [one_BTD, *gradients]
    over = batch_sharding(mesh, num_rows).spec
    sides = [('experts', None, 'ffn')] * 2 + [('experts', 'ffn', None)]
    places = [spec(mesh, names, w.shape) for names, w in zip(sides, weights, strict=True)]
    specs = [over, over, *places], over
    inputs = jax.device_put(inputs, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    with jax.set_mesh(mesh):
        compiled = step.lower(*inputs).compile()
        (_, many_BTD), gradients = compiled(*inputs)
    many = [many_BTD, *gradients]
    for a, b in zip(map(np.asarray, one), map(np.asarray, many), strict=True):
        assert np.abs(a - b).max() < 1e-5 * np.abs(a).max()
    if own:
        check_communication(layout, many, collectives(compiled.as_text()), *own)


def check_communication(layout, many, moved, rows, experts, inner):
    """Assert sums over devices and gathers of shared rows, and no gathered weight."""
    own = B // 4 if 'expert' in layout else rows
    mine = [(experts, D, inner), (experts, D, inner), (experts, inner, D)]
    found = [array.addressable_shards[0].data.shape for array in many]
    assert found == [(own, T, D), (own, T, D), (own, T, K), *mine]
    assert set(moved) <= {'all-reduce', 'all-gather'}
    here = {f'f32[{rows},{T},{last}]' for last in (D, K)} | {f's32[{rows},{T},{K}]'}
    assert f'f32[{rows},{T},{D}]' in moved['all-reduce']
    assert moved.get('all-gather', set()) <= here and ('all-gather' in moved) == (own < rows)
    weights = {f'f32[{",".join(map(str, shape))}]' for shape in mine}
    assert moved['all-reduce'] <= here | weights | {'f32[]'}


def check_top_k():
    def choose(scores_BTE):
        experts_BTk = map_batch_shards(lambda rows: jax.lax.top_k(rows, K)[1], scores_BTE)
        return experts_BTk, select_top_c(scores_BTE[..., 0], K)

    mesh = make_mesh('data=2,expert=2')
    scores_BTE = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
    one = jax.jit(choose)(scores_BTE)
    scores_BTE = jax.device_put(scores_BTE, batch_sharding(mesh, B))
    with jax.set_mesh(mesh):
        compiled = jax.jit(choose).lower(scores_BTE).compile()
        many = compiled(scores_BTE)
    jax.tree.map(np.testing.assert_array_equal, many, one)
    for chosen in many:
        assert chosen.addressable_shards[0].data.shape == (B // 4, *chosen.shape[1:])
    assert not collectives(compiled.as_text())


def check_embedding(layout):
    def total(params, tokens_BT):
        return jnp.sum(embed(params['embedding'], tokens_BT, 'bfloat16').astype('float32'))

    mesh, params = make_mesh(layout), {'embedding': np.zeros((8, 4), np.float32)}
    own = state_shardings(mesh, params)
    tokens_BT = jax.device_put(np.ones((4, 1000), np.int32), batch_sharding(mesh, 4))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(total), out_shardings=own)(
            jax.device_put(params, own), tokens_BT
        )
    rows = np.asarray(gradient['embedding']).max(axis=1)
    assert abs(rows[1] - 4000) <= 4000 * 2**-8 and rows[0] == 0, layout


def check_value_embedding(layout):
    hparams = SimpleNamespace(vocab_size=8, num_kv_heads=2, head_dim=4, d_model=16)
    module = ValueEmbedding(hparams)

    def total(params, v_BTKH, x_BTD, tokens_BT):
        added_BTKH = module.apply(
            {'params': unshard_params(params, 'bfloat16')['value_embedding']},
            v_BTKH,
            x_BTD,
            tokens_BT,
        )
        return jnp.sum(added_BTKH.astype('float32'))

    leaves = {'embedding': np.zeros((8, 2, 4), np.float32), 'gate': np.zeros((12, 2), np.float32)}
    mesh, params = make_mesh(layout), {'value_embedding': leaves}
    own = state_shardings(mesh, params)
    inputs = [jnp.zeros((4, 1000, *shape), 'bfloat16') for shape in ((2, 4), (16,))]
    tokens_BT = np.ones((4, 1000), np.int32)
    inputs = [jax.device_put(side, batch_sharding(mesh, 4)) for side in (*inputs, tokens_BT)]
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(total), out_shardings=own)
        gradient = step(jax.device_put(params, own), *inputs)['value_embedding']
    rows = np.asarray(gradient['embedding'])
    assert np.all(abs(rows[1] - 6000) <= 6000 * 2**-8) and not rows[[0, *range(2, 8)]].any(), layout


def on_four_devices():
    for case in CASES:
        check_experts(*case)
    check_top_k()
    for layout in ('data=1', 'data=2', 'fsdp=2', 'tensor=2', 'fsdp=2,tensor=2'):
        check_embedding(layout)
        check_value_embedding(layout)
    print('null')


def test_many_devices_compute_what_one_does():
    """Experts: the result and all gradients are equal, and no weight is moved.

    A top_k of rows gathers nothing. Gradients of equal tokens of a bfloat16 model are summed in
    float32, also over devices: a sum of ones in bfloat16 stops at 256.
    """
    on_devices(4, 'from tests.model import sharding_test as test; test.on_four_devices()')


def test_rows_that_do_not_divide_are_not_split():
    """Without a mesh nothing is added either."""

    def program(rows):
        scores_BT = jax.ShapeDtypeStruct((rows, T), 'float32')
        return str(jax.make_jaxpr(lambda x: map_batch_shards(jax.lax.sort, x))(scores_BT))

    assert 'shard_map' not in program(4)
    with under(2, 2):
        assert "'expert')" in program(4) and "'expert')" not in program(6)
