"""Starts a run from the parameters of another one, such as a MoD or MoDA run from a dense one."""

import functools
import types
from collections.abc import Callable

import jax.numpy as jnp

from moddepth_jax.conversion.from_layers import explain_layers, take_layers, with_layers
from moddepth_jax.conversion.init_from_dense import (
    STRENGTHS,
    TOKENS_PER_WIDTH,
    fit_routers,
    fit_slots,
    layer_moments,
)
from moddepth_jax.conversion.transfer_params import check_convertible, transfer_params
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model.adapters import ADAPTER
from moddepth_jax.model.transformer import average_shapes

_SAME = 1e-3  # nats: a first loss this close to the dense one counts as the same


def upcycle(
    run, hparams: Hparams, dataset, measure_loss: Callable, how: str | None = None
) -> tuple[dict, dict, dict]:
    """Make the parameters and averages of a new run, and the content of convert.json.

    Args:
      run: SavedRun to start from.
      hparams: hyper-parameters of the new run.
      dataset: Dataset of the new run.
      measure_loss: function of (parameters, averages, hparams, dataset, num_batches) that returns
        the held-out loss in nats per target under the routing of training.
      how: as in `with_layers`; None: the new model keeps all blocks.

    Raises:
      ValueError: like `check_convertible` and `with_layers`.
    """
    source, given, errors, note = run.hparams, run.state.params, {}, {}
    if how is not None:
        given = take_layers(source, given, hparams, how)
        source, note['layers_of_block'] = with_layers(source, hparams, how)
    check_convertible(source, hparams)
    params, new = transfer_params(source.model, given, hparams)
    averages = {name: jnp.zeros(shape) for name, shape in average_shapes(hparams.model).items()}
    averages |= {name: leaf for name, leaf in run.state.averages.items() if name in averages}
    num_batches = hparams.evaluation.num_batches  # of both models

    def dense_loss(data):
        of_run = run.state.params, run.state.averages, run.hparams_of_stage
        return measure_loss(*of_run, data, num_batches)

    def new_loss(params, stage, data):
        return measure_loss(params, averages, hparams.at(stage), data, num_batches)

    first_stage, last_stage = hparams.stages[0], hparams.stages[-1]
    changing = [name for name in new if f'.{ADAPTER}.' not in name]
    has_slots = any('_slot.' in name for name in changing)
    blocks = [name for name in changing if name.startswith('stack.')]
    if has_slots or any(name.endswith('.router.w') for name in blocks):
        tokens = hparams.data.batch_size * hparams.data.sequence_length
        steps = range(-(-TOKENS_PER_WIDTH * hparams.model.d_model // tokens))
        batches = map(dataset.train_batch, steps)
        moments = layer_moments(source.model, given, hparams.model, batches)
        params, errors = fit_routers(params, hparams.model, moments)
    if has_slots:
        train = types.SimpleNamespace(  # training batches in the form of held-out ones
            domains={},
            domain=lambda index: None,
            tokenizer=dataset.tokenizer,
            held_out_batch=dataset.train_batch,
            num_held_out_batches=num_batches,
        )
        wanted, differences = dense_loss(train), {}
        fit = functools.partial(fit_slots, params, hparams.model, moments)
        for strength in STRENGTHS:
            differences[strength] = abs(new_loss(fit(strength), first_stage, train) - wanted)
        note['slot_key_strength'] = min(differences, key=differences.get)
        params = fit(note['slot_key_strength'])

    dense, first = dense_loss(dataset), new_loss(params, first_stage, dataset)
    note |= {
        'from': 'a run',
        'source_step': run.step,
        'held_out_batches': min(num_batches, dataset.num_held_out_batches),
        'dense_loss': dense,
        'first_loss': first,
        'difference': first - dense,
        'why': 'every parameter is from the run' + ', and new adapters add 0' * bool(new),
        'new_parameters': new,
    }
    before, layers = run.hparams.model, note.get('layers_of_block')
    is_copy = layers is None and before == hparams.model
    if changing or not (new or before.routed_layers or is_copy):
        is_small = abs(first - dense) <= _SAME
        note['why'] = explain_difference(before, hparams, errors, is_small, layers)
    if first_stage != last_stage:
        note['loss_at_last_capacity'] = new_loss(params, last_stage, dataset)
    return params, averages, note


def explain_difference(
    dense: ModelHparams,
    hparams: Hparams,
    errors: dict[int, float],
    is_small: bool,
    layers_of_block=None,
) -> str:
    """Explain why the first loss differs from that of the `dense` model.

    `errors` are of `fit_routers`, and `layers_of_block` of `with_layers` if blocks are made from
    layers.
    """
    model, stage, routed = hparams.model, hparams.stages[0], bool(hparams.model.routed_layers)
    reasons = [] if layers_of_block is None else [explain_layers(layers_of_block)]
    if model.routing.routes_loops:
        own = 'each loop has its own gate, from a router that starts at random'
        reasons.append(f'tokens leave the loops, and {own}')
    if routed and not model.routing.routes_loops and stage.capacity < 1:
        reasons.append(
            f'{1 - stage.capacity:.0%} of the tokens skip each routed block from the first step; '
            'model.routing.capacity_stages=1:0.2 would route all of them at first'
        )
    if routed and model.routing.gate_scale != 1:
        reasons.append(
            f'gates are multiplied by model.routing.gate_scale={model.routing.gate_scale:g}'
        )
    if errors:
        reasons.append(
            f'the {model.routing.gate} gate multiplies the output of a block: scores, which have '
            'no bias, were fitted to a gate of 1 with a root mean square error of '
            f'{max(errors.values()):.0%}'
        )
    if difference := model.depth.stream_class.difference_at_start(model.depth):
        reasons.append(difference)
    if model.embedding_residual == 'learned' != dense.embedding_residual:
        reasons.append('each block reads a scaled stream and a share of the embedded tokens')
    if not reasons:
        return 'the same model' + ': every token is routed, with gates of 1' * routed
    return '; '.join(reasons) + ('; too little to matter here' if is_small else '')
