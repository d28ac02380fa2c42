"""Counted FLOPs equal sums by hand and the products of the program that runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import moda_1b5, moda_24l, moda_48l, moda_700m
from moddepth_jax.hparams import from_config
from moddepth_jax.model import flops
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.training.summary import num_parameters
from moddepth_jax.training.train_step import init_state, train_step
from tests.model.cases import (
    CASES,
    FIRST_KEYS,
    GROWS,
    MASKED,
    MODA,
    NEWEST,
    RECURSIONS,
    SOURCES,
    at_size,
    experts,
    parameters,
)

ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.125}
QUARTER = ROUTED | {'model.routing.capacity': 0.25}


def paper_model(tiny_config, num_layers, d_model, routed, **knobs):
    """Return a model of claims.md, Accounting: T=2048, V=32000, G=1, mlp parameters 8 D^2."""
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
    """With every other block at 12.5%, the forward pass costs the published fraction of dense."""
    dense = flops.forward_flops(paper_model(tiny_config, num_layers, d_model, False), 1, 2048)
    routed = flops.forward_flops(paper_model(tiny_config, num_layers, d_model, True), 1, 2048)
    assert round(routed / dense, 3) == ratio


def test_blocks_alone_and_equal_cost_in_depth(tiny_config):
    """Blocks cost 0.553 of dense ones, and 22 layers of MoD cost as much as 12 dense layers."""

    def blocks(hparams):
        parts = flops.forward_breakdown(hparams, 1, 2048)
        return sum(parts.values()) - parts['head']

    dense = paper_model(tiny_config, 12, 768, False)
    ratio = blocks(paper_model(tiny_config, 12, 768, True)) / blocks(dense)
    assert ratio == pytest.approx(0.553, abs=1e-3)
    costs = {
        depth: flops.forward_flops(paper_model(tiny_config, depth, 768, True), 1, 2048)
        for depth in (20, 22, 24)
    }
    dense_cost = flops.forward_flops(dense, 1, 2048)
    assert min(costs, key=lambda depth: abs(costs[depth] - dense_cost)) == 22
    assert costs[22] / dense_cost == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize('rule', ['predictor', 'aux_loss', 'dense'])
def test_breakdown_is_the_sum_by_hand(rule, tiny_config):
    """Each part of a small routed model equals its formula, term by term."""
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


def test_breakdown_of_slots_is_the_sum_by_hand(tiny_config):
    """Four layers, of which the second and fourth are routed, projected and masked."""
    T, C, D, N, K, H = 32, 8, 32, 4, 2, 8
    slot = 2 * 2 * D * K * H
    cases = [(MODA, 4 * T, (2, 4, 6)), (MODA | MASKED, 2 * T + C, (2, 4, 6))]
    cases.append((MODA | NEWEST, 4 * T, (2, 2, 2)))
    for knobs, projections, (second, third, fourth) in cases:
        hparams = from_config(tiny_config(**QUARTER | {'model.num_layers': 4} | knobs))
        parts = flops.forward_breakdown(hparams, 1, T)
        assert parts['depth_projections'] == projections * slot
        # The first layer sees no slot; scores and values are two products.
        pairs = second * C + third * T + fourth * C
        assert parts['depth_attention'] == 4 * N * H * pairs


@pytest.mark.parametrize('window', [0, 4])
def test_later_loops_only_make_queries_to_all_keys(window, tiny_config):
    """C_r queries see the keys of the first loop that C_r evenly spread tokens see."""
    knobs = RECURSIONS | FIRST_KEYS | GROWS | {'model.num_layers': 4, 'model.windows': (window,)}
    parts = flops.forward_breakdown(from_config(tiny_config(**knobs)), 1, 32)
    T, D, N, K, H = 32, 32, 4, 2, 8
    queries = 2 * T + 2 * (32 + 20 + 8)  # two blocks once, two in loops of 1, 5/8 and 1/4
    pairs = T / 2 if not window else window - window**2 / (2 * T)  # per query, on average
    assert parts['attention'] == 4 * N * H * pairs * queries
    assert parts['projections'] == 2 * D * H * (2 * N * queries + 2 * K * 4 * T)


def four_experts(**knobs):
    return experts(num_routed=4, d_ff=16, **knobs)


KINDS = {
    # name: (knobs, and for two layers and a row of 32: tokens of the shared expert, scores, pairs)
    'token': (four_experts(), 64, 2 * 32 * 4, 2 * 64),
    'no shared expert': (four_experts(num_shared=0), 0, 2 * 32 * 4, 2 * 64),
    'second layer only': (four_experts(layers='1'), 32, 32 * 4, 64),
    'integrated': (four_experts(num_noop=4), 64, 2 * 32 * 8, 2 * 32),
    'row capacity': (four_experts(row_capacity=3), 64, 2 * 32 * 4, 2 * 12),
    'row capacity, no-ops': (four_experts(row_capacity=7, num_noop=4), 64, 512, 2 * 28),
    'expert choice': (four_experts(choice='expert'), 64, 2 * 32 * 4, 2 * 4 * 16),
    'staged': (four_experts() | QUARTER, 40, 40 * 4, 64 + 16),
    'staged, experts choose': (four_experts(choice='expert') | QUARTER, 40, 40 * 4, 64 + 16),
}


@pytest.mark.parametrize('name', KINDS)
def test_breakdown_of_experts_is_the_sum_by_hand(name, tiny_config):
    """If only one of two layers has experts, the other one has its mlp."""
    D, F, F_e, T = 32, 64, 16, 32
    knobs, shared, scored, pairs = KINDS[name]
    hparams = from_config(tiny_config(**knobs))
    parts = flops.forward_breakdown(hparams, 3, T)
    plain_mlp = 2 * T * 3 * D * F if name == 'second layer only' else 0
    assert parts['mlp'] == 3 * (plain_mlp + 6 * D * F_e * shared)
    assert parts['expert_router'] == 3 * 2 * D * scored
    assert parts['experts'] == 3 * 6 * D * F_e * pairs


def test_dot_general_flops_of_known_programs():
    """Products count under jit, vmap, scan (times its length), remat, vjp and cond (maximum)."""
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


def test_ragged_products_of_known_programs():
    """A row is multiplied by one of three matrices, in the product and in both gradients."""
    x, w, sizes = jnp.zeros((12, 5)), jnp.zeros((3, 5, 7)), jnp.array([4, 0, 8])

    def loss(x, w):
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(x, w, sizes)))

    product = 2 * 12 * 5 * 7
    for program, products in ((loss, 1), (jax.grad(loss), 2), (jax.grad(loss, argnums=(0, 1)), 3)):
        traced = jax.make_jaxpr(program)(x, w)
        assert flops.dot_general_flops(traced) == products * product


def traced_step_flops(hparams):
    """Return the FLOPs of all products in the traced train step."""
    state = jax.eval_shape(lambda: init_state(hparams, 10))
    row = jax.ShapeDtypeStruct((hparams.data.batch_size, hparams.data.sequence_length), 'int32')
    batch = dict.fromkeys(('tokens_BT', 'labels_BT', 'segment_ids_BT'), row)
    return flops.dot_general_flops(jax.make_jaxpr(train_step)(state, batch))


def _visible_keys(queries, length, window):
    """Return the causal pairs of a mask, where the first and last place of a band count half."""
    past = np.arange(queries)[:, None] - np.arange(queries)  # of tokens that are spread evenly
    reach = -(-window * queries // length) if window else length
    weights = np.where((past == 0) | (past == reach), 0.5, (past > 0) & (past < reach))
    return weights.sum()


def _not_counted(hparams, rows, length):
    """Return FLOPs of a pass on hidden query-key and query-slot pairs and on places of no-ops.

    They are counted by masks, so that wrong pairs or slots of `flops` do not cancel.
    """
    model, hidden, empty = hparams.model, 0.0, 0.0
    experts_of, written = model.experts, sum(kind.slots for kind in layer_kinds(model))
    routing = hparams.stages[-1].routing
    for kind, tokens, _, makes_keys, _ in flops._layers(hparams, length, routing):
        if kind.part == 'block' and makes_keys:
            hidden += tokens**2 - _visible_keys(tokens, length, kind.window)
        elif kind.part == 'block':  # later loops read the keys of all tokens
            hidden += tokens * (length - _visible_keys(length, length, kind.window) / length)
        if kind.experts and experts_of.choice == 'token':
            places = tokens * experts_of.top_k
            if experts_of.row_capacity:
                places = min(places, experts_of.num_routed * experts_of.row_capacity)
            real = tokens * experts_of.top_k * experts_of.num_routed / experts_of.num_choices
            empty += places - min(places, real)
    for tokens, _, before in flops.depth_readers(hparams, length, routing):
        seen = min(before, model.depth.slot_window) if model.depth.slot_window else before
        hidden += tokens * ((written if model.layer_loop == 'scan' else before) - seen)
    pair = 4 * model.num_heads * model.head_dim
    return rows * pair * hidden, rows * empty * flops._pair_flops(model)


def _traced_reads_of_sources(hparams, rows, length):
    """Return the products of the reads of sources in the traced step, minus the counted ones.

    Slots are read one after another. If the length of that loop is data, as in a scan over layers,
    the trace has one iteration. A weighted sum is not a product. For `mudd`, the gradients of the
    weights are products. For attention residuals, the logit takes two products of 2 D each, and its
    gradients four; for a slot, the backward pass computes the logit again and has one product more,
    and each read has one. Reads of `value_attention` are counted, and their few products in a trace
    are below 1%.
    """
    model, traced, counted, written = hparams.model, 0, 0, 0
    total = sum(kind.slots for kind in layer_kinds(model))
    scanned = model.layer_loop == 'scan'
    if model.depth.stream == 'mudd':
        ways = {'qkvr': 4, 'kv': 3, 'one': 1}[model.depth.mudd_ways]
        reads = [(ways, number + 1) for number in range(model.num_blocks)] + [(1, total)]
        products = sum(ways * ((1 if scanned else slots) - 3 * slots) for ways, slots in reads)
        return rows * 2 * length * model.d_model * products
    if model.depth.stream == 'value_attention':
        return -3 * flops.forward_breakdown(hparams, rows, length)['depth_attention']
    if model.depth.stream != 'attention_residual':
        return 0
    for kind, tokens, *_ in flops._layers(hparams, length, hparams.stages[-1].routing):
        reads = [(length, 1)] if kind.routed or kind.part == 'exit' else []
        if kind.part == 'block':
            reads += [(tokens, 1), (tokens, 1 + kind.opens[0])]
        for n, newer in reads:
            slots = 1 if scanned else written
            traced += 2 * model.d_model * n * (6 * newer + 9 * slots + (slots > 0))
            counted += 3 * 4 * model.d_model * n * (newer + written)
        written += kind.slots
    return rows * (traced - counted)


# No rematerialization; every pair of a query and a key or slot is computed.
LITERAL = {'model.remat': 'none', 'model.attention': 'reference'}
SHAPE = LITERAL | {
    'model.num_layers': 3,
    'model.routing.layers': 'every:2',
    'model.experts.product': 'ragged_dot',
    'model.routing.predictor_width': 0,
    'data.sequence_length': 64,
}
LONG = {
    'windows, T = 200': {'model.windows': (0, 50), 'data.sequence_length': 200},
    'routed, windows, T = 512': ROUTED | {'model.windows': (0, 100), 'data.sequence_length': 512},
    'every block': ROUTED | {'model.routing.capacity': 0.5, 'model.routing.layers': 'every:1'},
    'hidden layer of the predictor': ROUTED | {'model.routing.predictor_width': 8},
    'trained by threshold': QUARTER
    | {
        **{'model.routing.causal_rule': 'threshold', 'model.routing.train_rule': 'threshold'},
        **{'model.routing.threshold_warmup': 0.5, 'model.routing.cache_capacity': 1.5},
    },
}
WIDE = {'model.num_layers': 4, 'model.d_model': 96, 'model.d_ff': 256, 'model.head_dim': 24}
TRACED = (
    {name: at_size(knobs, SHAPE) for name, (knobs, _) in CASES.items()}
    | {name: knobs | SHAPE for name, (knobs, *_) in KINDS.items()}
    | {name: SHAPE | WIDE | {'data.batch_size': 2} | knobs for name, knobs in LONG.items()}
)
FAST = (
    'predictor',
    'attention stream',
    'attention residual',
    'mudd',
    'dense stream',
    'mod and moda',
    'moda attention slots',
    'mlp routed',
)
FAST += ('shared values', 'integrated', 'expert choice', *LONG)
FAST += ('recursions, first keys',)


@pytest.mark.parametrize('name', parameters(FAST, TRACED))
def test_counted_flops_are_those_of_the_traced_step(name, tiny_config):
    """They agree within 0.3%, without hidden pairs and empty places.

    With adapters within 1.2%: products of their weights matter in small models and do not count.
    """
    hparams = from_config(tiny_config(**TRACED[name]))
    rows = hparams.data.batch_size, hparams.data.sequence_length
    hidden, empty = (3 * number for number in _not_counted(hparams, *rows))
    counted = flops.train_step_flops(hparams)
    traced = traced_step_flops(hparams) - _traced_reads_of_sources(hparams, *rows)
    within = 0.012 if hparams.model.adapters.rank else 0.003
    assert traced - hidden - empty == pytest.approx(counted, rel=within)
    parts = flops.forward_breakdown(hparams, *rows)
    depth = parts['depth_projections'] + parts['depth_attention']
    # Otherwise the bound above would not notice a stream that is not counted.
    stream = hparams.model.depth.stream
    if stream in ('residual', 'value_residual'):
        assert depth == 0
    else:
        assert stream in ('average', 'value_attention') or depth > 0.004 * counted / 3
    if hparams.model.experts.choice != 'none':
        assert parts['experts'] > 0.01 * counted / 3
        assert (empty > 0.02 * counted) == (name == 'integrated')
    if 'windows' in name:
        assert hidden > 0.02 * counted


@pytest.mark.parametrize('knobs', [{}, QUARTER], ids=['dense', 'routed'])
def test_counted_flops_agree_if_attention_is_small(knobs, tiny_config):
    """With a row that is short relative to the width, counted FLOPs agree within 1%."""
    wide = {'model.d_model': 384, 'model.d_ff': 1024, 'model.head_dim': 64}
    row = {'data.sequence_length': 16, 'data.batch_size': 2}
    hparams = from_config(tiny_config(**LITERAL | WIDE | wide | row | knobs))
    counted = flops.train_step_flops(hparams)
    assert counted == pytest.approx(traced_step_flops(hparams), rel=0.01)


@pytest.mark.parametrize('loop', ['scan', 'unrolled'])
@pytest.mark.parametrize('size', [1, 3])
def test_reads_of_sources_are_counted_to_the_product(loop, size, tiny_config):
    """4 T D for each source that a sublayer or the final norm reads, and nothing else."""
    shape = {'model.num_layers': 3, 'model.remat': 'none', 'model.layer_loop': loop}
    plain, sources = (
        from_config(tiny_config(**shape | some))
        for some in ({}, SOURCES | {'model.depth.sublayers_per_source': size})
    )
    rows = sources.data.batch_size, sources.data.sequence_length
    by_hand = 1 + 2 + 3 + 4 + 5 + 6 + 7 if size == 1 else 1 + 2 + 2 + 2 + 3 + 3 + 3
    more = flops.train_step_flops(sources) - flops.train_step_flops(plain)
    assert more == 3 * 4 * rows[0] * rows[1] * sources.model.d_model * by_hand
    of_reads = more + _traced_reads_of_sources(sources, *rows)
    assert traced_step_flops(sources) - traced_step_flops(plain) == of_reads


def test_reads_of_an_average_are_counted_to_the_product(tiny_config):
    """2 T D for each of the 1 to L + 1 arrays that a layer reads, and nothing else."""
    shape = {'model.num_layers': 3, 'model.remat': 'none', 'model.layer_loop': 'unrolled'}
    plain, average = (
        from_config(tiny_config(**shape | {'model.depth.stream': stream}))
        for stream in ('residual', 'average')
    )
    tokens = average.data.batch_size * average.data.sequence_length
    by_hand = 2 * tokens * average.model.d_model * (1 + 2 + 3 + 4)
    for count in (flops.train_step_flops, traced_step_flops):
        assert count(average) - count(plain) == 3 * by_hand


@pytest.mark.parametrize(
    ('module', 'arguments', 'wanted'),
    [
        (moda_24l, 'slots=none', 71.35),
        # With a projection in the last layer, which nothing reads, it would be 73.72 and 128.12.
        (moda_24l, '', 73.62),
        (moda_48l, 'slots=none', 123.38),
        (moda_48l, '', 128.02),
        (moda_700m, 'slots=none', 669.05),
        (moda_700m, 'layers=38,slots=none', 700.51),
        (moda_700m, '', 705.75),
        (moda_1b5, 'slots=none', 1428.24),
        (moda_1b5, '', 1510.82),
    ],
)
def test_parameters_of_the_papers_shapes(module, arguments, wanted):
    """Counts are as published (tables 2 and 3), in millions, and as in the config of our 1.5B."""
    hparams = from_config(module.get_config(arguments))
    count = num_parameters(jax.eval_shape(lambda: init_state(hparams, 1)).params)
    assert count / 1e6 == pytest.approx(wanted, abs=0.005)
