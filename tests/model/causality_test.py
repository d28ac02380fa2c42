"""Nothing later, of another document or outside the window reaches a token, bit for bit.

Programs are compiled as they are used, for an unoptimised one could hide a difference in bits; but
for those of more routers, which differ from the first ones in scores alone and compile in half the
time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

LENGTH, CUT = 24, 13
NOT_OPTIMISED = {'xla_backend_optimization_level': 0}
ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
ROOMY = ROUTED | {'model.routing.cache_capacity': 4.0}  # no token is refused


def routed_by(router, rule, **knobs):
    """A model of two blocks, both routed, and its rule."""
    chosen = {'model.routing.router': router, 'model.routing.causal_rule': rule}
    shape = {'model.num_layers': 2, 'model.routing.layers': 'every:1'}
    shape |= {'model.remat': 'none', 'model.attention': 'reference'}
    return ROUTED | chosen | shape | knobs, rule


# (what the model is, the routing that it runs)
CAUSAL = {
    'dense_model': ({}, 'top_c'),
    'predictor': (ROUTED, 'predictor'),
    'aux_loss': (ROUTED | {'model.routing.causal_rule': 'aux_loss'}, 'aux_loss'),
    'dense_rule': (ROUTED | {'model.routing.causal_rule': 'dense'}, 'dense'),
}
MORE_ROUTERS = {
    'threshold': routed_by('learned', 'threshold'),
    'norm_dense': routed_by('norm', 'dense'),
    'norm_threshold': routed_by('norm', 'threshold'),
    'norm_predictor': routed_by('norm', 'predictor'),
    'random': routed_by('random', 'threshold'),
    'position': routed_by('position', 'threshold'),
    'straight_through_threshold': routed_by('straight_through', 'threshold'),
    'straight_through_predictor': routed_by('straight_through', 'predictor'),
    'straight_through_aux_loss': routed_by('straight_through', 'aux_loss'),
}
OTHERS = {
    'top_c': (ROUTED, 'top_c'),
    'roomy': (ROOMY, 'predictor'),
    'grow': (ROUTED | {'model.routing.overflow': 'grow'}, 'predictor'),
    'top_c_of_segments': (ROUTED | {'model.routing.select_per': 'segment'}, 'top_c'),
}
# Every place of every row has a token of its own, so that its row of the embedding is its input.
TOKENS_BT = np.random.default_rng(1).permutation(2 * LENGTH).reshape(2, LENGTH)
OTHER_BT = TOKENS_BT + 2 * LENGTH
PACKED_BT = np.tile(np.repeat([1, 2, 3, 0], [7, 6, 8, 3]), (2, 1))


def make(tiny_config, **knobs):
    """A model and variables so large and so random that everything shows in the logits."""
    base = {'model.num_layers': 4, 'model.vocab_size': 4 * LENGTH}
    model = Transformer(from_config(tiny_config(**base | knobs)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        kind = path[-1].key
        if kind == 'thresholds_R':
            return np.zeros(leaf.shape, np.float32)
        spread = {'embedding': 1.0, 'scale': 0.3, 'bias': 0.3}.get(kind, 0.2)
        return (float(kind == 'scale') + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def runner(model, variables, routing='top_c', options=None):
    """A jitted tokens, segments -> logits, records."""
    apply = jax.jit(lambda *i: model.apply(*i, routing=routing), compiler_options=options)

    def run(tokens_BT, segment_ids_BT=None):
        ones_BT = np.ones(tokens_BT.shape, np.int32)
        return apply(variables, tokens_BT, ones_BT if segment_ids_BT is None else segment_ids_BT)

    return run


@pytest.fixture(scope='module')
def built(tiny_config):
    """name of a model above -> (model, variables, runner), compiled once for all tests."""

    @functools.cache
    def build(name):
        knobs, routing = (CAUSAL | MORE_ROUTERS | OTHERS)[name]
        model, variables = make(tiny_config, **knobs)
        run = runner(model, variables, routing, NOT_OPTIMISED if name in MORE_ROUTERS else None)
        if routing == 'predictor' and name in MORE_ROUTERS:
            for layer in variables['params']['stack']['run_0'].values():
                layer['predictor']['out']['bias'] += 0.5
        if routing == 'threshold' and 'averages' in variables:
            thresholds_R = variables['averages']['thresholds_R']
            for layer in range(len(thresholds_R)):  # each moves the stream of the next
                thresholds_R[layer] = np.quantile(run(TOKENS_BT)[1].routing.scores_BT[layer], 0.7)
        return model, variables, run

    return build


def changed(one_BTV, other_BTV):
    """bool [B, T]: places whose logits differ in any bit."""
    one, other = (np.asarray(x).view(np.uint32) for x in (one_BTV, other_BTV))
    return (one != other).any(-1)


def swapped(places):
    """The tokens, with others at some places of both rows."""
    return np.where(np.isin(np.arange(LENGTH), places), OTHER_BT, TOKENS_BT)


@pytest.mark.parametrize('name', CAUSAL | MORE_ROUTERS)
def test_future_tokens_change_no_bit_of_the_past(name, built):
    """Whatever comes at and after a place, the logits before keep their bits and zero gradient."""
    (model, variables, run), (_, routing) = built(name), (CAUSAL | MORE_ROUTERS)[name]
    logits_BTV, records = run(TOKENS_BT)
    if routing in ('predictor', 'aux_loss', 'threshold'):
        fractions = np.asarray(records.routing.selected_BT).mean(axis=(1, 2))
        assert ((0.1 < fractions) & (fractions < 0.9)).all()
    for first in (1, CUT, LENGTH - 1):
        other_BTV, _ = run(swapped(range(first, LENGTH)))
        differs_BT = changed(logits_BTV, other_BTV)
        assert not differs_BT[:, :first].any() and differs_BT[:, first:].all()

    def loss(params):
        logits_BTV, _ = model.apply(variables | {'params': params}, TOKENS_BT, routing=routing)
        return jnp.sum(jnp.tanh(logits_BTV[:, :CUT]))

    # An exact zero stays one without optimisation, which would take twice as long.
    gradient = jax.jit(jax.grad(loss), compiler_options=NOT_OPTIMISED)(variables['params'])
    used_BT = np.asarray(gradient['embedding'])[TOKENS_BT].any(-1)
    np.testing.assert_array_equal(used_BT, np.tile(np.arange(LENGTH) < CUT, (2, 1)))


def test_top_c_looks_ahead(built):
    """Under top-C later tokens do change earlier logits, through who is selected alone."""
    _, _, run = built('top_c')
    logits_BTV, records = run(TOKENS_BT)
    other_BTV, other_records = run(swapped(range(CUT, LENGTH)))
    assert changed(logits_BTV, other_BTV)[:, :CUT].any()
    assert (records.routing.top_c_BT != other_records.routing.top_c_BT)[:, :, :CUT].any()
    assert (np.asarray(records.routing.top_c_BT).sum(-1) == LENGTH // 4).all()


@pytest.mark.parametrize('name', ['dense_model', 'top_c_of_segments'])
def test_packed_documents_are_isolated(name, built):
    """A document's logits keep their bits when its neighbours change.

    Under top-C they do where it chooses per segment.
    """
    _, _, run = built(name)
    logits_BTV, _ = run(TOKENS_BT, PACKED_BT)
    for document in (1, 2, 3):
        others = np.flatnonzero(PACKED_BT[0] != document)
        other_BTV, _ = run(swapped(others), PACKED_BT)
        inside = PACKED_BT[0] == document
        differs_BT = changed(logits_BTV, other_BTV)
        assert not differs_BT[:, inside].any() and differs_BT[:, ~inside].all()


def test_packed_documents_under_a_rule_share_slots_alone(built):
    """Later documents change no bit of a document; earlier ones no choice where none is refused.

    They do move its tokens along the block's slots, and so the last bits of its sums.
    """
    _, _, run = built('roomy')
    logits_BTV, records = run(TOKENS_BT, PACKED_BT)
    assert not np.any(records.routing.dropped_BT)
    for document in (1, 2, 3):
        inside = PACKED_BT[0] == document
        other_BTV, other = run(swapped(np.flatnonzero(~inside)), PACKED_BT)
        np.testing.assert_array_equal(
            np.asarray(other.routing.selected_BT)[:, :, inside],
            np.asarray(records.routing.selected_BT)[:, :, inside],
        )
        assert changed(logits_BTV, other_BTV)[:, ~inside].all()
        atol = 1e-5 * np.abs(logits_BTV).max()
        np.testing.assert_allclose(other_BTV[:, inside], logits_BTV[:, inside], rtol=0, atol=atol)
        later_BTV, _ = run(swapped(np.flatnonzero(PACKED_BT[0] > document)), PACKED_BT)
        assert not changed(logits_BTV, later_BTV)[:, inside].any()


@pytest.mark.parametrize('name', ['dense_model', 'roomy'])
def test_a_packed_document_is_as_it_is_alone(name, built):
    """Its logits are those of a row of its own, and not those of a row without documents."""
    _, _, run = built(name)
    logits_BTV, _ = run(TOKENS_BT, PACKED_BT)
    first_six_BT = np.tile((np.arange(LENGTH) < 6).astype(np.int32), (2, 1))
    alone_BTV, _ = run(np.roll(TOKENS_BT, -7, axis=1), first_six_BT)
    np.testing.assert_allclose(alone_BTV[:, :6], logits_BTV[:, 7:13], rtol=0, atol=1e-4)
    unpacked_BTV, _ = run(TOKENS_BT)
    assert changed(logits_BTV, unpacked_BTV)[:, 7:13].all()


def test_each_layer_has_its_window(tiny_config):
    """One token's change reaches 2, then 4, then 3 places further, by the windows, and no more."""
    knobs = {'model.num_layers': 3, 'model.windows': (3, 5, 4)}
    run = runner(*make(tiny_config, **knobs))
    logits_BTV, _ = run(TOKENS_BT)
    for place in (0, 6, 20):
        other_BTV, _ = run(swapped([place]))
        distance = np.arange(LENGTH) - place
        reached = (0 <= distance) & (distance <= 2 + 4 + 3)
        np.testing.assert_array_equal(changed(logits_BTV, other_BTV), [reached, reached])


def test_a_cache_that_grows_changes_bits_by_its_size_alone(built):
    """Under `grow` future tokens and mates may change the static size, and so the last bits.

    Choices stay, logits stay within 1e-5 of their size, and every bit where no size changes.
    """
    _, _, run = built('grow')
    logits_BTV, records = run(TOKENS_BT)
    fullest_R = np.asarray(records.routing.selected_BT).sum(2).max(1)
    scale, sizes = np.abs(logits_BTV).max(), np.array([3, 6, 12, LENGTH])
    same_sizes = []
    for seed, first in enumerate((1, 4, 9, CUT, 20, LENGTH - 1)):
        for mate in (False, True):
            future_BT = (np.arange(LENGTH) >= first)[None] | (np.array([[False], [mate]]))
            future = np.random.default_rng(seed).integers(0, 4 * LENGTH, TOKENS_BT.shape)
            other_BTV, other = run(np.where(future_BT, future, TOKENS_BT))
            kept_BT = ~future_BT
            np.testing.assert_array_equal(
                np.asarray(other.routing.selected_BT)[:, kept_BT],
                np.asarray(records.routing.selected_BT)[:, kept_BT],
            )
            difference_BTV = np.asarray(other_BTV)[kept_BT] - np.asarray(logits_BTV)[kept_BT]
            assert np.abs(difference_BTV).max() < 1e-5 * scale
            full_R = np.asarray(other.routing.selected_BT).sum(2).max(1)
            same = (np.searchsorted(sizes, full_R) == np.searchsorted(sizes, fullest_R)).all()
            assert not (same and changed(logits_BTV, other_BTV)[kept_BT].any())
            same_sizes.append(same)
    assert any(same_sizes) and not all(same_sizes)
    assert not np.any(records.routing.dropped_BT)


@pytest.mark.parametrize('name', ['top_c', 'predictor', 'random'])
def test_rows_of_the_model_do_not_depend_on_each_other(name, built):
    """Another sequence beside it changes no bit of a row, whoever is selected there."""
    _, _, run = built(name)
    logits_BTV, _ = run(TOKENS_BT)
    for row in (0, 1):
        mate = np.arange(2)[:, None] != row
        other_BTV, _ = run(np.where(mate, OTHER_BT, TOKENS_BT))
        np.testing.assert_array_equal(changed(logits_BTV, other_BTV), np.tile(mate, LENGTH))
