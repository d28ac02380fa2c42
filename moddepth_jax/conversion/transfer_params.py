"""Transfers parameters between equal models, or from a dense model to one with more parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.adapters import ADAPTER, add_adapters, has_adapters
from moddepth_jax.model.embedding_residual import embedded_input
from moddepth_jax.model.mod.mixture_of_recursions import init_loop_routers
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import empty_slots
from moddepth_jax.model.transformer import (
    MAX_INIT_LENGTH,
    abstract_variables,
    init_layer,
    random_row_info,
)

_MAY_DIFFER = {  # knobs and groups of the model that a conversion may change
    *('depth', 'routing', 'adapters', 'attention', 'layer_loop', 'remat', 'dtype'),
    *('init_std', 'embedding_init_std', 'scale_residual_init', 'embedding_residual'),
    *('value_embeddings', 'loop_exit_threshold', 'experts.balance_weight', 'experts.z_loss'),
    *('experts.threshold_decay', 'experts.product'),
}
_ONLY_ADDED = {'embedding_residual', 'value_embeddings'}
# Parts that routing and streams add to a layer.
_NEW = {
    'router',
    'predictor',
    'stream',
    'values',
    'blend',
    'value_embedding',
    'attention_connection',
    'mlp_connection',
}


def check_convertible(source: Hparams, target: Hparams):
    """Raise ValueError, one line, unless `source` can be converted to `target`.

    The source must be dense, or both models must have the same parameters; and only some knobs may
    differ.
    """
    router, stream = source.model.routing.router, source.model.depth.stream
    dense = not source.model.routed_layers and stream == 'residual'
    bare = source.without_adapters, target.without_adapters
    before, after = (
        traverse_util.flatten_dict(dataclasses.asdict(run.model), sep='.')
        for run in (source, target)
    )
    if not dense and abstract_params(bare[0]) != abstract_params(bare[1]):
        changed = (
            f'model.{name}={after[name]!r} (was {was!r})'
            for name, was in before.items()
            if after[name] != was
        )
        right = 'only a run with router none and stream residual gets other parameters'
        own = f'the run that is converted has router {router} and stream {stream}'
        raise ValueError(f'{", ".join(changed)}: {right}; {own}')
    for name, was in before.items():
        may_differ = bool({name, name.split('.')[0]} & _MAY_DIFFER)
        if name in _ONLY_ADDED and was != 'none' and after[name] in ('none', 'alternate'):
            may_differ = False  # the new model would not have all of these parameters
        if after[name] != was and not may_differ:
            right = 'a conversion only adds routing and a depth stream'
            if name in ('num_layers', 'looped_layers', 'loops') and not source.model.looped:
                right += ', or makes blocks from layers of a dense run by --from_layers'
            found = f'model.{name}={after[name]!r}: is {was!r} in the run that is converted'
            raise ValueError(f'{found}; {right}')


def keeps_adapters(source: Hparams, target: Hparams) -> bool:
    """Return whether a conversion keeps the adapters, which needs the same parameters.

    Otherwise the adapters of the source are merged, and those of the target are new.
    """
    if not source.model.adapters.rank:
        return True  # there are none
    same = source.model.adapters == target.model.adapters
    return same and abstract_params(source) == abstract_params(target)


def abstract_params(hparams: Hparams):
    """Return the shapes and dtypes of the parameters of a model."""
    return abstract_variables(hparams)['params']


def in_layer(keys: tuple) -> tuple[tuple[str, str], tuple]:
    """Return (run, layer) and the name in the layer of a leaf of the stack.

    The name is without 'block', the additional level of routed blocks.
    """
    run, layer, *name = keys[1:]
    name = name[1:] if name[0] == 'block' else name
    return (run, layer), tuple(name)


def transfer_params(source: ModelHparams, params: dict, target: Hparams) -> tuple[dict, list[str]]:
    """Make the parameters of the target: leaves of the source bit for bit, new ones initialized.

    `check_convertible` must accept the models, and the source has no adapters, or the target has
    the same. Also returns the names of new leaves, such as stack.run_1.layer_0.router.w.
    """
    numbers, found = Stack(source, 'top_c').layer_numbers, {}
    for keys, leaf in traverse_util.flatten_dict(params).items():
        leaf = np.asarray(leaf)  # on the host, so that no program compiles
        if keys[0] != 'stack':
            found[keys] = leaf
            continue
        place, name = in_layer(keys)
        for number, of_layer in zip(numbers[place], leaf, strict=True):
            found[int(number), name] = of_layer
    stack = Stack(target.model, 'top_c').stored
    numbers = stack.layer_numbers
    kinds = {(place.run, place.layer): place.kind for place, _ in stack.visits}
    new, fresh, routers = [], {}, {}
    if target.model.routing.routes_loops:
        key, length = jax.random.key(target.seed), target.data.sequence_length
        made = init_loop_routers(key, target.model, min(length, MAX_INIT_LENGTH))
        routers = traverse_util.flatten_dict(made)

    keeps = has_adapters(params)
    wanted = abstract_params(target if keeps else target.without_adapters)

    def leaf(keys, wanted):
        if keys[0] == 'loop_routers' and keys not in found:
            new.append('.'.join(keys))
            return routers[keys[1:]]
        if keys[0] != 'stack':
            return jnp.asarray(found[keys])
        place, name = in_layer(keys)
        of_leaf = [int(number) for number in numbers[place]]
        if (of_leaf[0], name) in found:
            return jnp.asarray(np.stack([found[number, name] for number in of_leaf]))
        new.append('.'.join(keys))
        if keys[-2:] == ('value_embedding', 'embedding'):  # 0 changes no value and gets gradients
            return jnp.zeros(wanted.shape, wanted.dtype)
        for number in (number for number in of_leaf if number not in fresh):
            key = jax.random.fold_in(jax.random.key(target.seed), len(fresh))
            made = _new_leaves(key, np.int32(number), model=target.model, kind=kinds[place])
            fresh[number] = jax.tree.map(np.asarray, made)
        return jnp.asarray(np.stack([fresh[number][keys[3:]] for number in of_leaf]))

    made = traverse_util.path_aware_map(leaf, wanted)
    if not keeps:
        made = with_new_adapters(made, target)
        names = traverse_util.flatten_dict(made, sep='.')
        new += [name for name in names if f'.{ADAPTER}.' in name]
    return made, new


def with_new_adapters(params: dict, hparams: Hparams) -> dict:
    """Add new adapters of `hparams`, which add 0, to the parameters of a model without them."""
    key, numbers = jax.random.key(hparams.seed), Stack(hparams.model, 'top_c').layer_numbers
    return params | {'stack': add_adapters(key, params['stack'], hparams.model, numbers)}


@functools.partial(jax.jit, static_argnames=('model', 'kind'))
def _new_leaves(key, number, *, model, kind):
    """Initialize the leaves of _NEW in one layer; returns them by their path in it."""
    x_BTD = jax.random.normal(key, (1, 8, model.d_model), model.dtype)
    x_BTD = model.depth.stream_class.enter(model, x_BTD)
    tokens = random_row_info(model, x_BTD.shape[1])
    carry = (x_BTD, *empty_slots(model, x_BTD))
    params, _ = init_layer(
        key, number, Stack(model, 'top_c'), kind, carry, 0, tokens, embedded_input(model, x_BTD)
    )
    leaves = traverse_util.flatten_dict(params)
    return {keys: leaf for keys, leaf in leaves.items() if _NEW & {*keys}}
