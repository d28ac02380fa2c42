"""One routed block: skipped tokens keep their bits, and static sizes change nothing.

oracle_test.py compares routed blocks with their equation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.block import LayerKind
from moddepth_jax.model.mod import mixture_of_depths
from moddepth_jax.model.mod.mixture_of_depths import MixtureOfDepths, RoutingArgs
from tests.model.cases import random_like, routed_by

LENGTH, WIDTH = 16, 32
# Rows: one document, two documents, padding at the end, fewer real tokens than C, no tokens.
SEGMENTS = np.array(
    [[1] * 16, [1] * 5 + [2] * 7 + [3] * 4, [1] * 10 + [0] * 6, [1] * 2 + [0] * 14, [0] * 16]
)
REAL = SEGMENTS > 0
POSITIONS = np.tile(np.arange(LENGTH), (5, 1))
KIND = LayerKind(routed=True, window=0)


def stream(seed=1):
    return np.random.default_rng(seed).normal(size=(5, LENGTH, WIDTH)).astype(np.float32)


def block(make_config, routing, sizes=(), rule='threshold'):
    """Return a block as (params, x, threshold) -> (y, RoutingRecord), and random parameters."""
    knobs = routed_by('learned', rule) | {'model.routing.capacity': 0.375}
    hparams = from_config(make_config(**knobs)).model
    tokens = TokenInfo(POSITIONS, SEGMENTS)

    def args(threshold):
        return RoutingArgs(jnp.int32(0), jnp.float32(threshold), jnp.bool_(True))

    def apply(params, x_BTD, threshold=0.0):
        module = MixtureOfDepths(hparams, routing, KIND, sizes)
        return module.apply({'params': params}, x_BTD, tokens, args(threshold))[::3]

    init = MixtureOfDepths(hparams, 'top_c', KIND).init
    shapes = jax.eval_shape(lambda x: init(jax.random.key(0), x, tokens, args(0)), stream())
    return apply, random_like(shapes['params'])


def bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.fixture(scope='module')
def plain(tiny_config):
    """Under top-C, jitted once: (params, apply, gradients of the inner product with stream(3))."""
    apply, params = block(tiny_config, 'top_c')
    params['router']['w'] = np.eye(WIDTH, dtype=np.float32)[0]

    def loss(params, x_BTD):
        return jnp.vdot(apply(params, x_BTD)[0], stream(3))

    return params, jax.jit(apply), jax.jit(jax.grad(loss, argnums=(0, 1)))


def test_skipped_tokens_keep_their_bits(plain):
    """Padding keeps its values."""
    params, apply, _ = plain
    x_BTD = stream()
    x_BTD[:, :, 5] = -0.0
    y_BTD, record = apply(params, x_BTD)
    selected_BT = np.asarray(record.selected_BT)
    np.testing.assert_array_equal(selected_BT.sum(1), [6, 6, 6, 2, 0])
    same_BT = (bits(y_BTD) == bits(x_BTD)).all(-1)
    np.testing.assert_array_equal(same_BT[REAL], ~selected_BT[REAL])
    np.testing.assert_array_equal(y_BTD[~REAL], x_BTD[~REAL])


def test_padding_is_never_attended(plain):
    """Its values change no bit of a real token and get no gradient from one."""
    params, apply, gradients = plain
    x_BTD = stream()
    other_BTD = np.where(REAL[..., None], x_BTD, 1e3 * stream(9))
    y_BTD, other_y_BTD = (apply(params, side)[0] for side in (x_BTD, other_BTD))
    np.testing.assert_array_equal(bits(y_BTD)[REAL], bits(other_y_BTD)[REAL])
    np.testing.assert_array_equal(other_y_BTD[~REAL], other_BTD[~REAL])
    found = gradients(params, x_BTD)
    np.testing.assert_array_equal(found[1][~REAL], stream(3)[~REAL])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_silent_router_learns_and_its_block_does_not(plain):
    """With w = 0 and a raw gate, only the router's gradient is not exactly 0."""
    params, apply, gradients = plain
    silent = params | {'router': {'w': np.zeros(WIDTH, np.float32)}}
    gradient, _ = gradients(silent, stream())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient['block']))
    assert np.linalg.norm(gradient['router']['w']) > 1
    y_BTD, record = apply(silent, stream())
    np.testing.assert_array_equal(y_BTD, stream())
    np.testing.assert_array_equal(record.selected_BT[0], np.arange(LENGTH) < 6)


@pytest.mark.parametrize(('rule', 'learns'), [('predictor', 'predictor'), ('aux_loss', 'router')])
def test_what_the_loss_of_a_causal_rule_trains(rule, learns, tiny_config):
    """Only the predictor, not the stream; the auxiliary loss trains the scores themselves."""
    apply, params = block(tiny_config, 'top_c', rule=rule)

    def loss(params, x_BTD):
        return jnp.sum(apply(params, x_BTD)[1].rule_logits_BT)

    gradient, of_stream_BTD = jax.grad(loss, argnums=(0, 1))(params, stream())
    moved = {name for name, leaves in gradient.items() if any(map(np.any, jax.tree.leaves(leaves)))}
    assert moved == {learns}
    assert np.any(of_stream_BTD) == (rule == 'aux_loss')


def test_any_number_of_tokens_in_the_smallest_size(tiny_config, monkeypatch):
    """The fullest row decides: up to T / 8, T / 4, T / 2 or T. The result equals that of size T.

    The threshold is strict: a score that equals it is not selected.
    """
    taken, switch = [], mixture_of_depths.nn.switch

    def watched(which, *rest):
        jax.debug.callback(lambda which: taken.append(int(which)), which)
        return switch(which, *rest)

    monkeypatch.setattr(mixture_of_depths.nn, 'switch', watched)
    grows, params = block(tiny_config, 'threshold', (2, 4, 8, 16))
    fixed, _ = block(tiny_config, 'threshold', (16,))
    params['router']['w'] = np.eye(WIDTH, dtype=np.float32)[0]  # r is exact: a component of x
    x_BTD = stream()
    x_BTD[:, :, 0] = np.random.default_rng(0).permutation(LENGTH) - np.arange(5)[:, None]
    both = jax.jit(lambda *inputs: (grows(params, *inputs), fixed(params, *inputs)))
    for count, size in ((0, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 3)):
        (y_BTD, record), (expected_BTD, expected) = both(x_BTD, np.float32(LENGTH - 1 - count))
        jax.effects_barrier()
        assert np.sum(record.selected_BT, axis=1).max() == count and taken.pop() == size
        jax.tree.map(np.testing.assert_array_equal, record, expected)
        np.testing.assert_array_equal(record.selected_BT, (record.rule_logits_BT > 0) & REAL)
        np.testing.assert_allclose(y_BTD, expected_BTD, rtol=0, atol=1e-4)
    assert not taken
