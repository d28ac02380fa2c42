"""Norms and embeddings of each loop: initial values, fewer loops, the program, conversions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.conversion.transfer_params import check_convertible
from moddepth_jax.hparams import from_config
from moddepth_jax.model.loop_params import EMBEDDINGS, NORMS
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ALL_LOOPED,
    HEAD_NORM,
    LOOPED,
    OF_LOOPS,
    OWN_NORMS,
    ROUTED,
    SMALL_BT,
    TWO,
    equations,
    parameters,
    random_variables,
    small_hparams,
)

BOTH = OWN_NORMS | OF_LOOPS | HEAD_NORM
SEQUENCE = {'model.loop_order': 'sequence'}


def leaves_of(params):
    """Return {path: leaf}, with paths that do not have the run and the layer."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
    'knobs',
    [LOOPED, pytest.param(ALL_LOOPED | ROUTED | TWO, marks=pytest.mark.slow)],
    ids=['dense', 'routed'],
)
def test_a_new_model_equals_the_one_that_shares_all(knobs, tiny_config):
    """Logits are bit-equal. It has N - 1 more copies of each scale, and N vectors of 0.

    The draws depend on each layer's number, however the layers are stored.
    """
    plain, own = (small_hparams(tiny_config, knobs, HEAD_NORM, more) for more in ({}, BOTH))
    found, counts = [], []
    for hparams in (plain, own):
        model = Transformer(hparams)
        variables = jax.jit(model.init)(jax.random.key(3), SMALL_BT)
        found.append(jax.device_get(jax.jit(model.apply)(variables, SMALL_BT)[0]))
        counts.append(sum(leaf.size for leaf in jax.tree.leaves(variables['params'])))
    np.testing.assert_array_equal(*found)
    model, leaves = own.model, leaves_of(variables['params'])
    assert leaves[EMBEDDINGS,].shape == (model.loops, model.d_model)
    assert not np.any(leaves[EMBEDDINGS,])
    scales = 2 * model.d_model + 2 * model.head_dim  # of a block: attention, mlp, query and key
    more = (model.loops - 1) * len(model.looped_range) * scales + model.loops * model.d_model
    assert counts[1] - counts[0] == more
    own_leaves = [leaf for path, leaf in leaves.items() if NORMS & {*path}]
    looped = [leaf for leaf in own_leaves if leaf.ndim == 3]
    assert looped and all(leaf.shape[1] == model.loops for leaf in looped)


@pytest.mark.parametrize('order', parameters(('cycle',), ('cycle', 'sequence')))
def test_fewer_loops_take_the_first_norms_and_embeddings(order, tiny_config):
    """Three loops, run as two, equal a model of two loops with the first two of each."""
    knobs = LOOPED | BOTH | {'model.loop_order': order}
    three = small_hparams(tiny_config, knobs)
    two = three.with_loops(2)
    variables = random_variables(three, SMALL_BT)

    def cut(path, leaf):
        if path[0].key == EMBEDDINGS:
            return leaf[:2]
        looped = NORMS & {key.key for key in path} and leaf.ndim == 3
        return leaf[:, :2] if looped else leaf

    fewer = {'params': jax.tree_util.tree_map_with_path(cut, variables['params'])}
    shapes = jax.eval_shape(Transformer(two).init, jax.random.key(0), SMALL_BT)
    assert jax.tree.map(np.shape, fewer) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    apply = jax.jit(Transformer(two).apply)
    logits_BTV, expected_BTV = (apply(given, SMALL_BT)[0] for given in (variables, fewer))
    np.testing.assert_array_equal(logits_BTV, expected_BTV)
    assert np.abs(logits_BTV - Transformer(three).apply(variables, SMALL_BT)[0]).max() > 1e-3


def test_the_program_has_the_size_of_the_blocks_and_not_of_the_loops(tiny_config):
    """Blocks share the scan: with loop embeddings only, it is as large as without them."""

    def count(*knobs):
        hparams = small_hparams(tiny_config, *knobs)
        variables = random_variables(hparams, SMALL_BT)

        def loss(variables):
            return jnp.sum(Transformer(hparams).apply(variables, SMALL_BT)[0])

        found = list(equations(jax.make_jaxpr(jax.grad(loss))(variables).jaxpr))
        return len(found), sum(eqn.primitive.name == 'scan' for eqn in found)

    two, nine = ({'model.loops': loops} for loops in (2, 9))
    assert count(LOOPED, BOTH, two) == count(LOOPED, BOTH, nine)
    assert count(LOOPED, OF_LOOPS)[1] == count(LOOPED)[1]


def test_steps_of_fewer_loops_fit(tiny_config):
    knobs = {'model.num_layers': 4, 'training.loops': (1, 3)}
    hparams = from_config(tiny_config(**LOOPED | BOTH | knobs))
    assert [hparams.with_loops(loops).model.loops for loops in (1, 3)] == [1, 3]


@pytest.mark.parametrize('knobs', parameters(('own',), {'own': OWN_NORMS, 'learned': OF_LOOPS}))
def test_a_conversion_that_would_have_to_make_them_is_refused(knobs, tiny_config):
    """The source is a looped run with shared norms and without loop embeddings."""
    more = {'own': OWN_NORMS, 'learned': OF_LOOPS}[knobs]
    looped = LOOPED | {'model.num_layers': 4}
    target = from_config(tiny_config(**looped | more))
    with pytest.raises(ValueError, match=rf"^model\.loop_\w+='{knobs}': is .* in the run that"):
        check_convertible(from_config(tiny_config(**looped)), target)
    check_convertible(target, target)
