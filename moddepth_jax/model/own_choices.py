"""Checks of routers, gates, causal rules and depth streams that a config file defines.

Each is run on random tokens. What it returns for a token must not depend on other tokens: on later
ones no causal loss may depend, and decoding shows it one token at a time. Parameters are random,
because initial values may hide a difference. Choices that this project defines are not run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.hparams.registry import CAUSAL_RULES, GATES, ROUTERS, STREAMS
from moddepth_jax.model.attention import DepthSlots
from moddepth_jax.model.embedding_residual import embedded_input
from moddepth_jax.model.layer import LayerArgs
from moddepth_jax.model.mod.mixture_of_depths import Chooser, RoutingArgs
from moddepth_jax.model.routing import TokenInfo
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import empty_slots

LENGTH = 16  # tokens of a row
OTHERS = 'what it returns for a token depends on other tokens, so no loss is causal'


def check_own_choices(hparams: Hparams):
    """Raise ValueError, one line, if a choice of a config file looks at others, or gives NaN."""
    model = hparams.model
    tables = (ROUTERS, GATES, CAUSAL_RULES) if model.routing.router != 'none' else ()
    if added := [*filter(None, (table.added(hparams) for table in tables))]:
        _check_chooser(model, ', '.join(added))
    if added := STREAMS.added(hparams):
        _check_stream(model, added)


def _check_chooser(hparams: ModelHparams, added: str):
    """Compare a row with the first half of its tokens one by one, as in decoding."""
    draw, routing = np.random.default_rng(0), hparams.routing
    x_BTD = jnp.array(draw.normal(size=(1, LENGTH, hparams.d_model)), jnp.float32)
    positions_BT = jnp.arange(LENGTH)[None]
    seeds_BT = jnp.array(draw.integers(2**32, size=(1, LENGTH)), jnp.uint32)
    row = x_BTD, TokenInfo(positions_BT, jnp.ones_like(positions_BT), seeds_BT)
    alone = jax.tree.map(lambda side: jnp.swapaxes(side[:, : LENGTH // 2], 0, 1), row)
    args = RoutingArgs(jnp.int32(0), jnp.float32(0), None)
    chooser = Chooser(hparams, routing.causal_rule)
    initialize = functools.partial(chooser.init, jax.random.key(0), *row, args, method='decide')
    initial = initialize()
    variables = jax.tree.map(  # not near 0
        lambda leaf: jnp.array(draw.uniform(0.5, 1.5, leaf.shape), leaf.dtype),
        jax.eval_shape(initialize),
    )
    with jax.default_matmul_precision('highest'):
        results = [chooser.apply(variables, *side, args, method='decide') for side in (row, alone)]
        decided = chooser.apply(initial, *row, args, method='decide')
    # The gates of token choice are a softmax over loops, which this does not run.
    count = 1 if routing.traits.assigns_depth else len(results[0])
    for what, side_BT in list(zip(('scores', 'logits', 'gates'), decided, strict=True))[:count]:
        if np.isnan(side_BT).any():
            raise ValueError(f'{added}: some {what} are NaN; must be numbers')
    for row_BT, alone_BT in zip(*(result[:count] for result in results), strict=True):
        if not _near(row_BT[0, : LENGTH // 2], alone_BT[:, 0]):
            right = 'must depend on its own vector, position and seed only'
            raise ValueError(f'{added}: {OTHERS}; {right}')


def _check_stream(hparams: ModelHparams, added: str):
    """Run one layer of each kind on two rows that differ in every second token, after some slots.

    Each token is a document, so that attention sees no other one.
    """
    draw, stream = np.random.default_rng(0), hparams.depth.stream_class
    hparams = dataclasses.replace(
        hparams, attention='reference', dtype='float32', across_documents=False
    )
    stack, places_BT = Stack(hparams, 'dense').stored, jnp.tile(jnp.arange(LENGTH), (2, 1))
    ids_BT = places_BT % hparams.vocab_size
    tokens = TokenInfo(places_BT, places_BT + 1, places_BT.astype(jnp.uint32), ids_BT)
    args = LayerArgs(RoutingArgs(jnp.int32(0), jnp.float32(0), None))

    def rows(shape):
        """Return random values for rows of shape [2, T, ...] with equal tokens at even places."""
        values = draw.normal(size=shape)
        values[1, ::2] = values[0, ::2]
        return jnp.array(values, jnp.float32)

    x_BTD = stream.enter(hparams, rows((2, LENGTH, hparams.d_model)))
    empty, valid_LBT = empty_slots(hparams, x_BTD)
    slots = jax.tree.map(lambda side: jnp.stack([rows(side.shape[1:]) for _ in side]), empty)
    valid_LBT = None if valid_LBT is None else jnp.ones_like(valid_LBT)
    written = sum(kind.slots for kind in stack.kinds)
    depth = None if slots is None else DepthSlots(slots, valid_LBT, written)
    inputs = x_BTD, depth, tokens, args, embedded_input(hparams, x_BTD)
    for kind in dict.fromkeys(kind._replace(routed=False, experts=False) for kind in stack.kinds):
        layer = stack.layer(kind, parent=None)
        initial = jax.eval_shape(layer.init, jax.random.key(0), *inputs)
        variables = jax.tree.map(
            lambda leaf: jnp.array(draw.normal(0, 0.1, leaf.shape), leaf.dtype), initial
        )
        output = jax.jit(layer.apply)(variables, *inputs)
        results = output.written.slots, output.x_BTD, stream.leave(hparams, output.x_BTD)
        for side_BTX in jax.tree.leaves(results):
            if not _near(*side_BTX[:, ::2]):
                raise ValueError(f'{added}: {OTHERS}; must depend on its own vectors only')


def _near(one, other):
    near = {'rtol': 1e-3, 'atol': 1e-3 * np.median(np.abs(one)), 'equal_nan': True}
    return np.allclose(one, other, **near)
