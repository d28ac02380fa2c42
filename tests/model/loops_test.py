"""A looped model equals a deeper model whose blocks are copies: outputs, gradients, program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.model.stack import Stack
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import (
    ALL_LOOPED,
    ATTENTION,
    LOOPED,
    MASKED,
    MODA,
    MUDD,
    POST,
    ROUTED,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    SOURCES,
    TWO,
    VALUES,
    WINDOWS,
    equations,
    experts,
    parameters,
    random_variables,
    small_hparams,
)

SEQUENCE = {'model.loop_order': 'sequence'}
# SMALL has four layers: 0, then 1 and 2 looped, then 3.
MODELS = {
    'dense': LOOPED | WINDOWS,
    'in sequence': LOOPED | SEQUENCE | WINDOWS,
    'routed in sequence': LOOPED | SEQUENCE | ROUTED | TWO,
    'routed': LOOPED | ROUTED | TWO,
    'routed in part': LOOPED | ROUTED | {'model.routing.layers': '2'} | POST,
    'moda, all': ALL_LOOPED | MODA | ROUTED | MASKED,
    'moda in the middle': LOOPED | MODA | ROUTED | {'model.routing.layers': '0,2'},
    'values': LOOPED | VALUES,
    'attention stream': LOOPED | ATTENTION | SEQUENCE,
    'attention residuals': LOOPED | SOURCES | ROUTED | TWO,
    'mudd': LOOPED | MUDD,
    'experts': LOOPED | experts(layers='every:2'),
    'last one looped': ALL_LOOPED | {'model.looped_layers': 'middle:2:0'} | MODA,
}


def untied(hparams):
    """Return the hyper-parameters of the deeper model without loops."""
    model = hparams.model
    order, deep = model.block_order, {'looped_layers': 'none', 'loops': 1, 'loop_order': 'cycle'}
    windows = tuple(model.window(block) for block in order)
    routing, some = model.routing, model.experts
    if model.routed_layers:
        layers = ','.join(map(str, model.routed_layers))
        routing = dataclasses.replace(routing, layers=layers)
    if model.expert_layers:
        some = dataclasses.replace(some, layers=','.join(map(str, model.expert_layers)))
    deep |= {'num_layers': len(order), 'windows': windows, 'routing': routing, 'experts': some}
    return dataclasses.replace(hparams, model=dataclasses.replace(model, **deep))


def copied(looped, deep, params):
    """Return the parameters of the deeper model, where each block that runs has its own copy."""
    shapes = jax.eval_shape(Transformer(deep).init, jax.random.key(0), SMALL_BT)['params']
    sources, places = (Stack(hparams.model, 'top_c').visits for hparams in (looped, deep))
    stack = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, 'float64'), shapes['stack'])
    for (place, at), (source, tied_at) in zip(places, sources, strict=True):
        if place.layer not in stack.get(place.run, {}):
            continue  # an entry without parameters
        own, tied = stack[place.run][place.layer], params['stack'][source.run][source.layer]
        for name, side in own.items():  # the last MoDA layer writes no slots without loops
            own[name] = jax.tree.map(
                lambda a, b, to=at.row, at=tied_at.row: a.at[to].set(b[at]),
                side,
                tied[name],
            )
    return params | {'stack': stack}


@pytest.mark.parametrize('name', parameters(('routed in sequence',), MODELS))
def test_looped_model_equals_a_deeper_one_with_copied_blocks(name, tiny_config):
    """Logits and choices are equal. The gradient of a shared parameter is the sum over copies."""
    knobs = MODELS[name] | {'model.dtype': 'float64', 'model.scale_residual_init': False}
    looped = small_hparams(tiny_config, knobs)
    deep = untied(looped)
    weights_BTV = np.random.default_rng(7).normal(size=(*SMALL_BT.shape, 32))

    def loss(params, averages, hparams):
        given = {'params': params, 'averages': averages}
        logits_BTV, records = Transformer(hparams).apply(given, SMALL_BT, SMALL_SEGMENTS_BT)
        return jnp.sum(jnp.tanh(logits_BTV) * weights_BTV), (logits_BTV, records)

    def loss_of_copies(params, averages):
        return loss(copied(looped, deep, params), averages, deep)

    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        variables = random_variables(looped, SMALL_BT)
        given = variables['params'], variables.get('averages', {})
        run = jax.value_and_grad(lambda *args: loss(*args, looped), has_aux=True)
        (_, found), gradient = jax.device_get(jax.jit(run)(*given))
        run = jax.value_and_grad(loss_of_copies, has_aux=True)
        (_, expected), wanted = jax.device_get(jax.jit(run)(*given))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    wanted = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, leaf), mine in zip(wanted, jax.tree.leaves(gradient), strict=True):
        where = jax.tree_util.keystr(path)
        largest = np.abs(leaf).max()
        assert np.abs(mine - leaf).max() <= 1e-9 * max(largest, 1e-3), where


def test_the_program_has_the_size_of_the_blocks_and_not_of_the_loops(tiny_config):
    """So do the parameters: only the scan gets longer."""

    def count(loops):
        hparams = small_hparams(tiny_config, LOOPED, MODA, {'model.loops': loops})
        variables = random_variables(hparams, SMALL_BT)

        def loss(variables):
            return jnp.sum(Transformer(hparams).apply(variables, SMALL_BT)[0])

        program = jax.make_jaxpr(jax.grad(loss))(variables).jaxpr
        return len(list(equations(program))), sum(x.size for x in jax.tree.leaves(variables))

    assert count(2) == count(9)


def test_order_of_the_blocks(tiny_config):
    def order(**knobs):
        knobs = {f'model.{name}': value for name, value in knobs.items()}
        return ''.join(map(str, small_hparams(tiny_config, knobs).model.block_order))

    assert order() == order(looped_layers='all') == '0123'
    assert order(looped_layers='all', loops=2) == '01230123'
    assert order(looped_layers='all', loops=2, loop_order='sequence') == '00112233'
    assert order(looped_layers='middle:1:1', loops=3) == '01212123'
    assert order(looped_layers='middle:1:1', loops=3, loop_order='sequence') == '01112223'
    assert order(looped_layers='middle:3:0', loops=4) == '0123333'
