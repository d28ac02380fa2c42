"""The rules by which arrays are split, and what is computed apart: as one device would."""

import contextlib
import json

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from moddepth_jax.model.moe.experts import routed_mlp
from moddepth_jax.model.sharding import (
    AXES,
    axis_names,
    constrain,
    map_batch_shards,
    map_shards,
    sharded_routed_mlp,
    spec,
    unshard_params,
)
from tests.devices import collectives, on_devices
from tests.model.cases import equations

B, T, D, F, E, K = 4, 6, 8, 12, 4, 2


def shapes():
    """Of x, weights of the pairs, w1, w3, w2; and of the pairs' experts."""
    floats = [(B, T, D), (B, T, K), (E, D, F), (E, D, F), (E, F, D)]
    floats = [jax.ShapeDtypeStruct(shape, 'float32') for shape in floats]
    return floats, jax.ShapeDtypeStruct((B, T, K), 'int32')


def mesh_of(**sizes):
    """An abstract mesh; axes that are not named have size 1."""
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=types)


def under(data=None, expert=None, **sizes):
    """A context with an abstract mesh of these sizes, or with none."""
    if data is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh_of(data=data, expert=expert or 1, **sizes))


@pytest.mark.parametrize(
    ('path', 'shape', 'sizes', 'wanted'),
    [
        ('params/embedding', (64, 32), {'fsdp': 2, 'tensor': 4}, ('tensor', 'fsdp')),
        ('params/embedding', (257, 32), {'fsdp': 2, 'tensor': 4}, (None, ('fsdp', 'tensor'))),
        ('params/embedding', (257, 33), {'fsdp': 2, 'tensor': 4}, ()),
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
        ('stack/l/router/w', (3, 32), {'fsdp': 2}, ()),
    ],
)  # fmt: skip
def test_a_leaf_is_split_as_the_table_says(path, shape, sizes, wanted):
    """Its axes have names by its path and rank; the first rule that divides is taken."""
    names = axis_names(path, len(shape))
    assert spec(mesh_of(**sizes), names, shape) == PartitionSpec(*wanted)


def test_rows_are_split_over_all_axes_but_tensor():
    """Where they divide; an axis is used once in an array."""
    mesh = mesh_of(data=2, fsdp=2, tensor=2, expert=2)
    rows = PartitionSpec(('data', 'fsdp', 'expert'), None, 'tensor')
    assert spec(mesh, ('batch', None, 'heads'), (8, 3, 4)) == rows
    assert spec(mesh, ('batch', None, 'embed'), (8, 3, 4)) == PartitionSpec(*rows[:2], None)
    assert spec(mesh, ('batch', None, 'heads'), (6, 3, 3)) == PartitionSpec()


def test_parameters_are_gathered_along_embed():
    """In the dtype of the products; their gradients are split as they are stored, and float32.

    Without a mesh and inside a shard_map everything is left alone.
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


def test_heads_are_apart_only_with_their_keys():
    """Where either does not divide over `tensor`, neither is split."""
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


def sharded(arrays, expert_BTk):
    x_BTD, weight_BTk, *weights = arrays
    given = (x_BTD, expert_BTk, weight_BTk, *weights, 'blocked', K * T)
    return sharded_routed_mlp(routed_mlp, *given)


def test_one_device_runs_the_plain_function():
    """Under no mesh and under one of one device nothing is added to the plain call."""

    def plain(arrays, expert_BTk):
        x_BTD, weight_BTk, *weights = arrays
        return routed_mlp(x_BTD, expert_BTk, weight_BTk, *weights, 'blocked', K * T)

    def traced(*sizes):
        with under(*sizes):
            return str(jax.make_jaxpr(sharded)(*shapes()))

    expected = str(jax.make_jaxpr(plain)(*shapes()))
    assert traced() == traced(1, 1) == expected
    assert 'shard_map' in traced(1, 2) and 'shard_map' in traced(2, 1)


def test_the_backward_pass_keeps_no_copy_of_the_weights():
    """What a layer saves for its backward pass are the weights themselves, as on one device."""
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


ON_FOUR_DEVICES = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from moddepth_jax.model.sharding import map_batch_shards, sharded_routed_mlp
from moddepth_jax.model.moe.experts import routed_mlp
from moddepth_jax.training.mesh import batch_sharding, make_mesh

(B, T, D, F, E, K), cases = json.loads(sys.argv[1])
draw = np.random.default_rng(0)

def normal(*shape):
    return draw.normal(size=shape).astype(np.float32)

arrays = [normal(B, T, D), normal(B, T, K), normal(E, D, F), normal(E, D, F), normal(E, F, D)]
target_BTD = normal(B, T, D)
# From E on: experts that do nothing, and the number that padding has.
expert_BTk = np.int32(draw.integers(0, E + 2, (B, T, 1)) + np.arange(K))
expert_BTk[0, 0] = 99
expert_BTk[-1] = np.arange(K)  # a row on the same few experts

def loss(arrays, expert_BTk, target_BTD, product):
    x_BTD, weight_BTk, *weights = arrays
    given = (x_BTD, expert_BTk, weight_BTk, *weights)
    y_BTD = sharded_routed_mlp(routed_mlp, *given, product, K * T)
    return jnp.sum(y_BTD * target_BTD), y_BTD

step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3)
found = []
for spec, rows, product in cases:
    given = [arrays[0][:rows], arrays[1][:rows], *arrays[2:]], expert_BTk[:rows], target_BTD[:rows]
    (_, y_BTD), gradients = step(*given, product)
    one = [np.asarray(array) for array in (y_BTD, *gradients)]
    mesh = make_mesh(spec)
    over = batch_sharding(mesh, rows).spec
    outer, inner = PartitionSpec('expert', None, 'tensor'), PartitionSpec('expert', 'tensor')
    specs = [over, over, outer, outer, inner], over, over
    given = jax.device_put(given, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    with jax.set_mesh(mesh):
        compiled = step.lower(*given, product).compile()
        (_, y_BTD), gradients = compiled(*given)
    many = [y_BTD, *gradients]
    found.append({
        'errors': [float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in zip(one, many)],
        'shards': [array.addressable_shards[0].data.shape for array in many],
        'text': compiled.as_text(),
    })

def choose(scores_BTE):
    return map_batch_shards(lambda scores: jax.lax.top_k(scores, K)[1], scores_BTE)

mesh, scores_BTE = make_mesh('data=2,expert=2'), normal(B, T, E)
one = np.asarray(choose(scores_BTE))
scores_BTE = jax.device_put(scores_BTE, batch_sharding(mesh, B))
with jax.set_mesh(mesh):
    compiled = jax.jit(choose).lower(scores_BTE).compile()
    many = compiled(scores_BTE)
rows = {'equal': bool(np.all(one == many)), 'text': compiled.as_text(),
        'shard': many.addressable_shards[0].data.shape}
print(json.dumps([found, rows]))
"""
CASES = [
    ('data=2,expert=2', B, 'blocked'),
    ('expert=4', B, 'blocked'),
    ('data=2,tensor=2', B, 'blocked'),
    ('data=2,expert=2', B - 1, 'ragged_dot'),
]


@pytest.fixture(scope='module')
def found():
    """Of each case: errors and shards of y and the gradients; text of the compiled program.

    Under `rows`: what top_k by rows finds, and its program.
    """
    answers, rows = on_devices(4, ON_FOUR_DEVICES, json.dumps([(B, T, D, F, E, K), CASES]))
    return dict(zip(CASES, answers, strict=True)) | {'rows': rows}


@pytest.mark.parametrize('case', CASES, ids=str)
def test_many_devices_compute_what_one_does(found, case):
    """Result and gradients of tokens, factors and all weights are those of one device.

    Also with experts whose inner width is split, and with rows that do not divide.
    """
    assert max(found[case]['errors']) < 1e-5 and len(found[case]['errors']) == 6


@pytest.mark.parametrize(
    ('case', 'rows', 'experts', 'inner'),
    [(CASES[0], 2, 2, F), (CASES[1], 4, 1, F), (CASES[2], 2, E, F // 2)],
    ids=str,
)
def test_weights_stay_where_they_are(found, case, rows, experts, inner):
    """The program sums over devices, and gathers the rows of those that share experts: no weight.

    `rows` are those that a device computes.
    """
    own = B // 4 if 'expert' in case[0] else rows
    mine = [[experts, D, inner], [experts, D, inner], [experts, inner, D]]
    assert found[case]['shards'] == [[own, T, D], [own, T, D], [own, T, K], *mine]
    moved = collectives(found[case]['text'])
    assert set(moved) <= {'all-reduce', 'all-gather'}
    here = {f'f32[{rows},{T},{last}]' for last in (D, K)} | {f's32[{rows},{T},{K}]'}
    assert f'f32[{rows},{T},{D}]' in moved['all-reduce']
    assert moved.get('all-gather', set()) <= here and ('all-gather' in moved) == (own < rows)
    weights = {f'f32[{",".join(map(str, shape))}]' for shape in mine}
    assert moved['all-reduce'] <= here | weights | {'f32[]'}


def test_a_top_k_by_rows_gathers_nothing(found):
    """Each device ranks its own rows; the result is that of one device, still split by rows."""
    assert found['rows']['equal'] and found['rows']['shard'] == [B // 4, T, K]
    assert not collectives(found['rows']['text'])


def test_rows_that_do_not_divide_are_not_split():
    """Nor is anything added where there is no mesh."""

    def program(rows):
        scores_BT = jax.ShapeDtypeStruct((rows, T), 'float32')
        return str(
            jax.make_jaxpr(lambda scores_BT: map_batch_shards(jax.lax.sort, scores_BT))(scores_BT)
        )

    assert 'shard_map' not in program(4)
    with under(2, 2):
        assert "'expert')" in program(4) and "'expert')" not in program(6)


EMBEDDED = """
import json
import jax, jax.numpy as jnp, numpy as np
from moddepth_jax.model.layers import embed
from moddepth_jax.training.mesh import batch_sharding, make_mesh, state_shardings

def total(params, tokens_BT):
    return jnp.sum(embed(params['embedding'], tokens_BT, 'bfloat16').astype('float32'))

tokens_BT, found = np.ones((4, 1000), np.int32), {}
for layout in ('data=1', 'data=2', 'fsdp=2', 'tensor=2', 'fsdp=2,tensor=2'):
    mesh, params = make_mesh(layout), {'embedding': np.zeros((8, 4), np.float32)}
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(total), out_shardings=state_shardings(mesh, params))(
            jax.device_put(params, state_shardings(mesh, params)),
            jax.device_put(tokens_BT, batch_sharding(mesh, 4)))['embedding']
    found[layout] = np.asarray(gradient).max(axis=1).tolist()
print(json.dumps(found))
"""


def test_rows_of_equal_tokens_are_added_in_float32():
    """Of a bfloat16 model too: a sum of ones in bfloat16 stops at 256."""
    found = on_devices(4, EMBEDDED)
    assert len(found) == 5
    for layout, rows in found.items():
        assert rows[1] == pytest.approx(4000, rel=2**-8) and rows[0] == 0, layout
