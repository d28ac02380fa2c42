"""Nothing later, of another document or outside the window reaches a token, bit for bit.

Programs are compiled as they are used, for an unoptimised one could hide a difference in bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

LENGTH, CUT = 24, 13
ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
# (what the model is, the routing that it runs)
CAUSAL = {
    'dense_model': ({}, 'top_c'),
    'predictor': (ROUTED, 'predictor'),
    'aux_loss': (ROUTED | {'model.routing.causal_rule': 'aux_loss'}, 'aux_loss'),
    'dense_rule': (ROUTED | {'model.routing.causal_rule': 'dense'}, 'dense'),
}
# Every place of every row has a token of its own, so that its row of the embedding is its input.
TOKENS_BT = np.random.default_rng(1).permutation(2 * LENGTH).reshape(2, LENGTH)
OTHER_BT = TOKENS_BT + 2 * LENGTH


def make(tiny_config, **knobs):
    """A model and parameters so large and so random that everything shows in the logits."""
    base = {'model.num_layers': 4, 'model.vocab_size': 4 * LENGTH}
    model = Transformer(from_config(tiny_config(**base | knobs)))
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT)['params']
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        kind = path[-1].key
        spread = {'embedding': 1.0, 'scale': 0.3, 'bias': 0.3}.get(kind, 0.2)
        return (float(kind == 'scale') + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def runner(model, params, routing='top_c'):
    """A jitted tokens, segments -> logits, records."""
    apply = jax.jit(lambda *inputs: model.apply({'params': params}, *inputs, routing=routing))

    def run(tokens_BT, segment_ids_BT=None):
        ones_BT = np.ones(tokens_BT.shape, np.int32)
        return apply(tokens_BT, ones_BT if segment_ids_BT is None else segment_ids_BT)

    return run


@pytest.fixture(scope='module')
def built(tiny_config):
    """name of CAUSAL, or top_c -> (model, parameters, runner), compiled once for all tests."""

    @functools.cache
    def build(name):
        knobs, routing = CAUSAL.get(name, (ROUTED, name))
        model, params = make(tiny_config, **knobs)
        return model, params, runner(model, params, routing)

    return build


def changed(one_BTV, other_BTV):
    """bool [B, T]: places whose logits differ in any bit."""
    one, other = (np.asarray(x).view(np.uint32) for x in (one_BTV, other_BTV))
    return (one != other).any(-1)


def swapped(places):
    """The tokens, with others at some places of both rows."""
    return np.where(np.isin(np.arange(LENGTH), places), OTHER_BT, TOKENS_BT)


@pytest.mark.parametrize('name', CAUSAL)
def test_future_tokens_change_no_bit_of_the_past(name, built):
    """Whatever comes at and after a place, the logits before keep their bits and zero gradient."""
    (model, params, run), (_, routing) = built(name), CAUSAL[name]
    logits_BTV, records = run(TOKENS_BT)
    if routing in ('predictor', 'aux_loss'):
        fractions = np.asarray(records.entered_BT).mean(axis=(1, 2))
        assert ((0.1 < fractions) & (fractions < 0.9)).all()
    for first in (1, CUT, LENGTH - 1):
        other_BTV, _ = run(swapped(range(first, LENGTH)))
        differs_BT = changed(logits_BTV, other_BTV)
        assert not differs_BT[:, :first].any() and differs_BT[:, first:].all()

    def loss(params):
        logits_BTV, _ = model.apply({'params': params}, TOKENS_BT, routing=routing)
        return jnp.sum(jnp.tanh(logits_BTV[:, :CUT]))

    # An exact zero stays one without optimisation, which would take twice as long.
    options = {'xla_backend_optimization_level': 0}
    gradient = jax.jit(jax.grad(loss), compiler_options=options)(params)['embedding']
    used_BT = np.asarray(gradient)[TOKENS_BT].any(-1)
    np.testing.assert_array_equal(used_BT, np.tile(np.arange(LENGTH) < CUT, (2, 1)))


def test_top_c_looks_ahead(built):
    """Under top-C later tokens do change earlier logits, through who is selected alone."""
    _, _, run = built('top_c')
    logits_BTV, records = run(TOKENS_BT)
    other_BTV, other_records = run(swapped(range(CUT, LENGTH)))
    assert changed(logits_BTV, other_BTV)[:, :CUT].any()
    assert (records.top_c_BT != other_records.top_c_BT)[:, :, :CUT].any()
    assert (np.asarray(records.top_c_BT).sum(-1) == LENGTH // 4).all()


@pytest.mark.parametrize('name', ['dense_model', 'predictor'])
def test_packed_documents_are_isolated(name, built):
    """A document's logits keep their bits when its neighbours change; alone it has the same."""
    _, _, run = built(name)
    ids_BT = np.tile(np.repeat([1, 2, 3, 0], [7, 6, 8, 3]), (2, 1))
    logits_BTV, _ = run(TOKENS_BT, ids_BT)
    for document in (1, 2, 3):
        others = np.flatnonzero(ids_BT[0] != document)
        other_BTV, _ = run(swapped(others), ids_BT)
        inside = ids_BT[0] == document
        differs_BT = changed(logits_BTV, other_BTV)
        assert not differs_BT[:, inside].any() and differs_BT[:, ~inside].all()
    first_six_BT = np.tile((np.arange(LENGTH) < 6).astype(np.int32), (2, 1))
    alone_BTV, _ = run(np.roll(TOKENS_BT, -7, axis=1), first_six_BT)
    np.testing.assert_allclose(alone_BTV[:, :6], logits_BTV[:, 7:13], rtol=0, atol=1e-4)
    unpacked_BTV, _ = run(TOKENS_BT)
    assert changed(logits_BTV, unpacked_BTV)[:, 7:13].all()


def test_each_layer_has_its_window(tiny_config):
    """One token's change reaches 2, then 4, then 3 places further, by the windows, and no more."""
    knobs = {'model.num_layers': 3, 'model.windows': (3, 5, 4)}
    model, params = make(tiny_config, **knobs)
    run = runner(model, params)
    logits_BTV, _ = run(TOKENS_BT)
    for place in (0, 6, 20):
        other_BTV, _ = run(swapped([place]))
        distance = np.arange(LENGTH) - place
        reached = (0 <= distance) & (distance <= 2 + 4 + 3)
        np.testing.assert_array_equal(changed(logits_BTV, other_BTV), [reached, reached])


@pytest.mark.parametrize('routing', ['top_c', 'predictor'])
def test_rows_of_the_model_do_not_depend_on_each_other(routing, built):
    """Another sequence beside it changes no bit of a row, whoever is selected there."""
    _, _, run = built(routing)
    logits_BTV, _ = run(TOKENS_BT)
    for row in (0, 1):
        mate = np.arange(2)[:, None] != row
        other_BTV, _ = run(np.where(mate, OTHER_BT, TOKENS_BT))
        np.testing.assert_array_equal(changed(logits_BTV, other_BTV), np.tile(mate, LENGTH))
