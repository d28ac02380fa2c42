"""Counted FLOPs are the sums done by hand, and those of the program that runs."""

import functools

import jax
import jax.numpy as jnp
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model import flops
from moddepth_jax.training.train_step import init_state, train_step

ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.125}


def paper_model(tiny_config, num_layers, d_model, routed, **knobs):
    """A model of claims.md, Accounting: T=2048, V=32000, G=1, mlp parameters 8 D^2."""
    shape = {
        'model.vocab_size': 32000,
        'model.num_layers': num_layers,
        'model.d_model': d_model,
        'model.d_ff': round(8 * d_model / 3),
        'model.num_heads': d_model // 64,
        'model.num_kv_heads': d_model // 64,
        'model.head_dim': 64,
        'model.routing.causal_rule': 'dense',
    }
    return from_config(tiny_config(**shape, **(ROUTED if routed else {}), **knobs))


@pytest.mark.parametrize(
    ('num_layers', 'd_model', 'ratio'), [(12, 768, 0.638), (16, 1024, 0.609), (24, 1024, 0.593)]
)
def test_routed_over_dense_is_the_figure_of_the_claims(num_layers, d_model, ratio, tiny_config):
    """Every other block at 12.5% costs the published fraction of the dense forward pass."""
    dense = flops.forward_flops(paper_model(tiny_config, num_layers, d_model, False), 1, 2048)
    routed = flops.forward_flops(paper_model(tiny_config, num_layers, d_model, True), 1, 2048)
    assert round(routed / dense, 3) == ratio


def test_blocks_alone_and_equal_cost_in_depth(tiny_config):
    """Blocks alone cost 0.553; 12 dense layers cost what 22 layers of every-other MoD do."""

    def blocks(hparams):
        parts = flops.forward_breakdown(hparams, 1, 2048)
        return sum(parts.values()) - parts['head']

    dense = paper_model(tiny_config, 12, 768, False)
    assert blocks(paper_model(tiny_config, 12, 768, True)) / blocks(dense) == pytest.approx(
        0.553, abs=1e-3
    )
    costs = {
        depth: flops.forward_flops(paper_model(tiny_config, depth, 768, True), 1, 2048)
        for depth in (20, 22, 24)
    }
    dense_cost = flops.forward_flops(dense, 1, 2048)
    assert min(costs, key=lambda depth: abs(costs[depth] - dense_cost)) == 22
    assert costs[22] / dense_cost == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize('rule', ['predictor', 'aux_loss', 'dense'])
def test_breakdown_is_the_sum_by_hand(rule, tiny_config):
    """Each part of a small routed model is what its formula gives, term by term."""
    knobs = {'model.num_layers': 3, 'model.windows': (0, 0, 4), 'model.routing.layers': '1'}
    routing = {'model.routing.capacity': 0.25, 'model.routing.causal_rule': rule}
    hparams = from_config(tiny_config(**ROUTED | knobs | routing))
    T, C, D, F, N, K, H, V = 32, 8, 32, 64, 4, 2, 8, 257
    by_hand = {
        'projections': 2 * (2 * T + C) * (D * N * H + 2 * D * K * H + N * H * D),
        'attention': 4 * N * H * (T * T / 2 + C * C / 2 + (4 * T - 8)),
        'mlp': 2 * (2 * T + C) * 3 * D * F,
        'expert_router': 0,
        'experts': 0,
        'router': 2 * T * D,
        'predictor': 2 * T * (D * 8 + 8) if rule == 'predictor' else 0,
        'head': 2 * T * D * V,
        'depth_projections': 0,
        'depth_attention': 0,
    }
    assert flops.forward_breakdown(hparams, 5, T) == {k: 5 * v for k, v in by_hand.items()}
    assert flops.forward_flops(hparams, 5, T) == 5 * sum(by_hand.values())
    assert flops.train_step_flops(hparams) == 3 * 4 * sum(by_hand.values())


def test_dot_general_flops_of_known_programs():
    """Products count under jit, vmap, scan (times its length), remat, vjp and cond (its max)."""
    x, y = jnp.zeros((3, 5)), jnp.zeros((5, 7))
    product = 2 * 3 * 5 * 7

    def body(carry, _):
        return carry, carry @ y

    programs = [
        (lambda x: x @ y, product),
        (lambda x: jnp.sin(x) * 2, 0),
        (jax.jit(jax.jit(lambda x: x @ y)), product),
        (lambda x: jax.vmap(lambda row: row @ y)(x), product),
        (lambda x: jax.lax.scan(body, x, None, length=11)[1], 11 * product),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ y @ y.T, lambda: 0 * x), 2 * product),
        (jax.grad(lambda x: jnp.sum(jnp.sin(x @ y))), 2 * product),
        (jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ y))(x))), 3 * product),
        (lambda x: jnp.einsum('ab,cb->ac', x, x), 2 * 3 * 3 * 5),
    ]
    for program, expected in programs:
        assert flops.dot_general_flops(jax.make_jaxpr(program)(x)) == expected


def traced_step_flops(hparams):
    """FLOPs of every product in the traced train step of one row."""
    length = hparams.data.sequence_length
    state = jax.eval_shape(functools.partial(init_state, hparams, 10))
    row = jax.ShapeDtypeStruct((hparams.data.batch_size, length), jnp.int32)
    batch = dict.fromkeys(('tokens_BT', 'labels_BT', 'segment_ids_BT'), row)
    return flops.dot_general_flops(jax.make_jaxpr(train_step)(state, batch))


STEPS = {
    'dense_scan_128': (128, {}, 'scan'),
    'dense_unrolled_200': (200, {'model.windows': (0, 50)}, 'unrolled'),
    'dense_scan_512': (512, {'model.windows': (200, 0)}, 'scan'),
    'routed_unrolled_128': (128, ROUTED, 'unrolled'),
    'routed_scan_200': (200, ROUTED | {'model.routing.causal_rule': 'aux_loss'}, 'scan'),
    'routed_scan_512': (512, ROUTED | {'model.windows': (0, 100)}, 'scan'),
    'every_block_512': (
        512,
        ROUTED | {'model.routing.capacity': 0.5, 'model.routing.layers': 'every:1'},
        'scan',
    ),
    'linear_predictor': (128, ROUTED | {'model.routing.predictor_width': 0}, 'scan'),
}


def step_hparams(tiny_config, length, knobs, loop, **shape):
    """A model of a shape of its own, two rows a step, nothing recomputed, every pair computed."""
    base = {
        'model.num_layers': 4,
        'model.d_model': 96,
        'model.d_ff': 256,
        'model.head_dim': 24,
        'model.remat': 'none',
        'model.attention': 'reference',
        'model.layer_loop': loop,
        'data.sequence_length': length,
        'data.batch_size': 2,
    }
    return from_config(tiny_config(**base | knobs | shape))


@pytest.mark.parametrize('name', STEPS)
def test_counted_flops_are_those_of_the_traced_step(name, tiny_config):
    """Counted FLOPs plus those on pairs that the mask hides are the step's products within 1%."""
    length, knobs, loop = STEPS[name]
    hparams = step_hparams(tiny_config, length, knobs, loop)
    hidden = 3 * flops.masked_attention_flops(hparams, 2, length)
    counted = flops.train_step_flops(hparams)
    assert hidden > 0.02 * counted
    assert (counted + hidden) / traced_step_flops(hparams) == pytest.approx(1, abs=0.01)


def test_blocked_attention_computes_few_hidden_pairs(tiny_config):
    """In blocks of 128 queries 10/16 of the pairs are computed, in 2 products and in 5 backward."""
    reference = step_hparams(tiny_config, 512, {}, 'scan')
    blocked = step_hparams(tiny_config, 512, {'model.attention': 'xla'}, 'scan')
    product = 2 * 2 * 512**2 * 4 * 4 * 24  # 2 a multiply-add; B, T S, layers, N, H
    outside = traced_step_flops(reference) - 6 * product
    assert traced_step_flops(blocked) == outside + 7 * product * 10 / 16


@pytest.mark.parametrize('knobs', [{}, ROUTED | {'model.routing.capacity': 0.25}], ids=len)
def test_counted_flops_alone_where_attention_is_small(knobs, tiny_config):
    """With a row that is short against the width, counted FLOPs alone are the step's within 1%."""
    wide = {'model.d_model': 384, 'model.d_ff': 1024, 'model.num_heads': 4, 'model.head_dim': 64}
    hparams = step_hparams(tiny_config, 16, knobs, 'scan', **wide)
    assert flops.train_step_flops(hparams) / traced_step_flops(hparams) == pytest.approx(
        1, abs=0.01
    )


def test_depth_scan_and_loop_count_alike(tiny_config):
    """The same model, scanned or unrolled, has exactly the same products."""
    one, other = (step_hparams(tiny_config, 64, ROUTED, loop) for loop in ('scan', 'unrolled'))
    assert traced_step_flops(one) == traced_step_flops(other) > 0


def test_recomputation_shows_in_the_trace_only(tiny_config):
    """Rematerialised blocks have a fourth forward pass in the trace; the count leaves it out."""
    plain = step_hparams(tiny_config, 64, ROUTED, 'scan')
    again = step_hparams(tiny_config, 64, ROUTED, 'scan', **{'model.remat': 'block'})
    assert flops.train_step_flops(plain) == flops.train_step_flops(again)
    parts = flops.forward_breakdown(plain, 2, 64)
    blocks = sum(parts.values()) - parts['head']
    difference = traced_step_flops(again) - traced_step_flops(plain)
    assert 0.6 * blocks < difference < 1.1 * blocks + flops.masked_attention_flops(plain, 2, 64)
