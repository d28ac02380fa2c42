"""Parameters of a dense model as those of another that has its layers: stacked otherwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.attention import TokenInfo
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import empty_slots
from moddepth_jax.model.transformer import LayerGroup, Transformer

MAY_DIFFER = (  # knobs of the model that a conversion may change
    'depth',
    'routing',
    'attention',
    'layer_loop',
    'remat',
    'dtype',
    'init_std',
    'embedding_init_std',
    'scale_residual_init',
)
NEW = ('router', 'predictor', 'stream')  # what routing and depth streams add to a layer


def check_shared(source: ModelHparams, target: ModelHparams):
    """Raises ValueError, one line, where the source is not dense, or other knobs must be its own.

    Args:
      source: of the dense model.
      target: of what it is to become.
    """
    if source.routed_layers:
        found = f'model.routing.router={source.routing.router!r}'
        raise ValueError(f'{found} in the run that is converted: must be dense, without a router')
    if source.depth.stream != 'residual':
        found = f'model.depth.stream={source.depth.stream!r}'
        raise ValueError(f'{found} in the run that is converted: must be residual')
    _refuse_difference('model', source, target)


def _refuse_difference(group, source, target):
    for field in dataclasses.fields(source):
        name, was, now = field.name, getattr(source, field.name), getattr(target, field.name)
        if was == now or name in MAY_DIFFER:
            continue
        if dataclasses.is_dataclass(was):
            _refuse_difference(f'{group}.{name}', was, now)
        right = 'a conversion adds routing and a depth stream alone'
        raise ValueError(
            f'{group}.{name}={now!r}: is {was!r} in the run that is converted; {right}'
        )


def leaf_places(model: ModelHparams) -> dict[tuple[int, int, int], int | str]:
    """The layer at (run, repeat, place in the group); entry and exit have their part's name."""
    places, layer = {}, 0
    for i, run in enumerate(Stack(model, 'top_c').runs):
        for repeat in range(run.repeats):
            for j, kind in enumerate(run.group):
                places[i, repeat, j] = layer if kind.part == 'block' else kind.part
                layer += kind.part == 'block'
    return places


def _keys(path):
    return tuple(key.key for key in path)


def _in_layer(keys):
    """(run, place in the group, name in the layer) of a leaf of the stack.

    A routed block's own parameters lie one level deeper than a dense one's.
    """
    run, place, *name = keys[1:]
    name = name[1:] if name[0] == 'block' else name
    return int(run.removeprefix('run_')), int(place.removeprefix('layer_')), tuple(name)


def carry(source: ModelHparams, params: dict, target: Hparams) -> tuple[dict, list[str]]:
    """Parameters of the target: each leaf that the source has bit for bit, others as at a start.

    Args:
      source: of the dense model.
      params: of the same.
      target: as `check_shared` lets pass.

    Returns:
      The parameters, and the names of the leaves that are new, such as
      stack.run_1.layer_0.router.w.
    """
    places, found = leaf_places(source), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys, leaf = _keys(path), np.asarray(leaf)  # cut up on the host: no program for each shape
        if keys[0] != 'stack':
            found[keys] = leaf
            continue
        i, j, name = _in_layer(keys)
        for repeat in range(len(leaf)):
            found[places[i, repeat, j], name] = (leaf, repeat)
    tokens_BT = jax.ShapeDtypeStruct((1, target.data.sequence_length), 'int32')
    abstract = jax.eval_shape(Transformer(target).init, jax.random.key(0), tokens_BT)['params']
    places, kinds = leaf_places(target.model), _kinds(target.model)
    new, fresh = [], {}

    def leaf(path, wanted):
        keys = _keys(path)
        if keys[0] != 'stack':
            return jnp.asarray(found[keys])
        i, j, name = _in_layer(keys)
        mine = [(i, repeat, j) for repeat in range(wanted.shape[0])]
        if (places[mine[0]], name) in found:
            parts = (found[places[place], name] for place in mine)
            return jnp.asarray(np.stack([part[repeat] for part, repeat in parts]))
        new.append('.'.join(keys))
        for place in (place for place in mine if place not in fresh):
            key = jax.random.fold_in(jax.random.key(target.seed), len(fresh))
            made = _fresh_layer(key, model=target.model, kind=kinds[place])
            fresh[place] = jax.tree.map(np.asarray, made)
        return jnp.asarray(np.stack([fresh[place][keys[3:]] for place in mine]))

    return jax.tree_util.tree_map_with_path(leaf, abstract), new


def _kinds(model):
    runs = Stack(model, 'top_c').runs
    return {
        (i, repeat, j): kind
        for i, run in enumerate(runs)
        for repeat in range(run.repeats)
        for j, kind in enumerate(run.group)
    }


@functools.partial(jax.jit, static_argnames=('model', 'kind'))
def _fresh_layer(key, *, model, kind):
    """Initial leaves of router, predictor and stream of a layer, by their path in it.

    Not those of a whole initialised model, which computes a stream for its routers to look at: the
    dense model's own is at hand.
    """
    x_BTD = jax.random.normal(key, (1, 8, model.d_model), model.dtype)
    ones_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
    tokens = TokenInfo(jnp.cumsum(ones_BT, axis=1) - 1, ones_BT, ones_BT.astype(jnp.uint32))
    group = LayerGroup(Stack(model, 'top_c'), (kind,), parent=None)
    params = group.init(key, (x_BTD, *empty_slots(model, x_BTD)), 0, tokens)['params']['layer_0']
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_keys(path): leaf for path, leaf in leaves if path[0].key in NEW}
