"""Experts that are spread over devices compute what one device would, and stay where they are."""

import contextlib
import json

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from moddepth_jax.model.experts import routed_mlp
from moddepth_jax.model.shards import by_rows, sharded_routed_mlp
from tests.four_devices import collectives, on_four_devices

B, T, D, F, E, K = 4, 6, 8, 12, 4, 2


def shapes():
    """Of x, weights of the pairs, w1, w3, w2; and of the pairs' experts."""
    floats = [(B, T, D), (B, T, K), (E, D, F), (E, D, F), (E, F, D)]
    floats = [jax.ShapeDtypeStruct(shape, 'float32') for shape in floats]
    return floats, jax.ShapeDtypeStruct((B, T, K), 'int32')


def under(data=None, expert=None):
    """A context with an abstract mesh of these sizes, or with none."""
    if data is None:
        return contextlib.nullcontext()
    types = (AxisType.Auto, AxisType.Auto)
    mesh = AbstractMesh((data, expert), ('data', 'expert'), axis_types=types)
    return jax.sharding.use_abstract_mesh(mesh)


def sharded(arrays, expert_BTk):
    x_BTD, weight_BTk, *weights = arrays
    given = (x_BTD, expert_BTk, weight_BTk, *weights, 'blocked', K * T)
    return sharded_routed_mlp(routed_mlp, *given)


def plain(arrays, expert_BTk):
    x_BTD, weight_BTk, *weights = arrays
    return routed_mlp(x_BTD, expert_BTk, weight_BTk, *weights, 'blocked', K * T)


def traced(*sizes):
    with under(*sizes):
        return str(jax.make_jaxpr(sharded)(*shapes()))


def test_one_device_runs_the_plain_function():
    """Under no mesh and under one of one device nothing is added to the plain call."""
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
from moddepth_jax.model.shards import by_rows, sharded_routed_mlp
from moddepth_jax.model.experts import routed_mlp
from moddepth_jax.training.sharding import make_mesh

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
    over = PartitionSpec('data' if rows % mesh.shape['data'] == 0 else None)
    specs = [over, over, *[PartitionSpec('expert')] * 3], over, over
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
    return by_rows(lambda scores: jax.lax.top_k(scores, K)[1], scores_BTE)

mesh, scores_BTE = make_mesh('data=2,expert=2'), normal(B, T, E)
one = np.asarray(choose(scores_BTE))
scores_BTE = jax.device_put(scores_BTE, NamedSharding(mesh, PartitionSpec('data')))
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
    ('data=2,expert=2', B - 1, 'ragged_dot'),
]


@pytest.fixture(scope='module')
def found():
    """Of each case: errors and shards of y and the gradients; text of the compiled program.

    Under `rows`: what top_k by rows finds, and its program.
    """
    answers, rows = on_four_devices(ON_FOUR_DEVICES, json.dumps([(B, T, D, F, E, K), CASES]))
    return dict(zip(CASES, answers, strict=True)) | {'rows': rows}


@pytest.mark.parametrize('case', CASES, ids=str)
def test_many_devices_compute_what_one_does(found, case):
    """Result and gradients of tokens, factors and all weights are those of one device.

    Also with rows that do not divide over `data`.
    """
    assert max(found[case]['errors']) < 1e-5 and len(found[case]['errors']) == 6


@pytest.mark.parametrize(('case', 'rows', 'experts'), [(CASES[0], 2, 2), (CASES[1], 4, 1)], ids=str)
def test_tokens_and_weights_stay_where_they_are(found, case, rows, experts):
    """The program moves nothing but sums: of a device's rows, and of gradients of its experts."""
    here = [[rows, T, D], [rows, T, D], [rows, T, K]]
    mine = [[experts, D, F], [experts, D, F], [experts, F, D]]
    assert found[case]['shards'] == here + mine
    sums = collectives(found[case]['text'])
    assert set(sums) == {'all-reduce'}
    allowed = {f'f32[{",".join(map(str, shape))}]' for shape in here + mine} | {'f32[]'}
    assert f'f32[{rows},{T},{D}]' in sums['all-reduce'] <= allowed


def test_a_top_k_by_rows_gathers_nothing(found):
    """Each device ranks its own rows; the result is that of one device, still split by rows."""
    assert found['rows']['equal'] and found['rows']['shard'] == [B // 2, T, K]
    assert not collectives(found['rows']['text'])


def test_rows_that_do_not_divide_are_not_split():
    """Nor is anything added where there is no mesh."""

    def program(rows):
        scores_BT = jax.ShapeDtypeStruct((rows, T), 'float32')
        return str(jax.make_jaxpr(lambda scores_BT: by_rows(jax.lax.sort, scores_BT))(scores_BT))

    assert 'shard_map' not in program(2)
    with under(2, 2):
        assert 'shard_map' in program(2) and 'shard_map' not in program(3)
