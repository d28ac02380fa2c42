"""How long a training step of several models takes, each beside the dense one, in turn."""

import dataclasses

import jax
import numpy as np

from kernels_pallas.backends import log_lines
from moddepth_jax.benchmarks.depth import CompiledStep, with_model
from moddepth_jax.benchmarks.timing import time_interleaved, try_run
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import (
    dot_general_flops,
    empty_place_flops,
    forward_breakdown,
    train_step_flops,
)
from moddepth_jax.model.moe.grouped_matmul import resolve
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.summary import num_parameters, versions


def _traced(hparams, product):
    """FLOPs of the products in a forward pass whose experts run this one."""
    experts = dataclasses.replace(hparams.model.experts, product=product)
    model = Transformer(with_model(hparams, experts=experts))
    shape = (hparams.data.batch_size, hparams.data.sequence_length)
    tokens_BT = jax.ShapeDtypeStruct(shape, 'int32')
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)
    return dot_general_flops(jax.make_jaxpr(model.apply)(variables, tokens_BT))


def ragged_dot_expansion(num_experts: int) -> float | None:
    """FLOPs of a compiled ragged_dot over those of its rows on this device; None if it tells none.

    About num_experts where XLA expands it into the product of all rows with all matrices.
    """
    rows, width = 16 * num_experts, 32
    x_RX = jax.ShapeDtypeStruct((rows, width), 'float32')
    w_EXY = jax.ShapeDtypeStruct((num_experts, width, width), 'float32')
    sizes_E = jax.ShapeDtypeStruct((num_experts,), 'int32')
    compiled = jax.jit(jax.lax.ragged_dot).lower(x_RX, w_EXY, sizes_E).compile()
    flops = (compiled.cost_analysis() or {}).get('flops')
    return flops and flops / (2 * rows * width**2)


def grouped_products(hparams: Hparams) -> dict | None:
    """What the routed experts of a model run in a training step; None for a model without.

    Returns:
      dict with `product`, the implementation; `executed_over_active`, three times the FLOPs of its
      products in the traced forward pass, places that may stay empty among them, over the counted
      ones of `experts` (recomputation in neither); and `ragged_dot_expansion`.
    """
    if not hparams.model.expert_layers:
        return None
    experts = hparams.model.experts
    shape = (hparams.data.batch_size, hparams.data.sequence_length)
    product = resolve(experts.product)
    active = 3 * forward_breakdown(hparams, *shape)['experts']
    executed = active + 3 * empty_place_flops(hparams, *shape)
    if product != 'ragged_dot':  # beyond its places: those that fill up blocks
        executed += 3 * (_traced(hparams, product) - _traced(hparams, 'ragged_dot'))
    return {
        'product': product,
        'executed_over_active': executed / active,
        'ragged_dot_expansion': ragged_dot_expansion(experts.num_routed),
    }


def _row(name, hparams, step, seconds, dense):
    """What a model's own times say, and what they say beside the dense model's of the same rounds.

    Args:
      name: of the model.
      hparams: its own.
      step: its compiled step.
      seconds: of each round.
      dense: (hparams, seconds).
    """
    flops, dense_flops = train_step_flops(hparams), train_step_flops(dense[0])
    ratio = seconds / dense[1]
    tokens = hparams.data.batch_size * hparams.data.sequence_length
    median = float(np.median(seconds))
    return {
        'model': name,
        'seconds': median,
        'tokens_per_second': tokens / median,
        'flops': flops,
        'flops_per_second': flops / median,
        'over_dense': float(np.median(ratio)),
        'flops_over_dense': flops / dense_flops,
        'realised_saving': float(np.median(flops / dense_flops / ratio)),
        'parameters': num_parameters(step.state.params),
        'temp_bytes': step.temp_bytes,
        'compile_seconds': step.trace_seconds + step.compile_seconds,
        'experts': grouped_products(hparams),
    }


def bench_models(models: dict[str, Hparams], repeats: int) -> dict:
    """Times one training step of each model in turn with the dense one, two in memory at a time.

    Args:
      models: by name; the first is the dense one, that the others are compared with.
      repeats: rounds that are timed.

    Returns:
      dict with `versions`, `length`, `batch`, `dtype`, `repeats`, `chosen` (a line for each choice
      of attention backends so far), and `rows`: one for each model
      with its name and either `failed`, one line, or the median `seconds`, `tokens_per_second`,
      counted `flops` and `flops_per_second`, `over_dense` (the median over rounds of its time over
      the dense model's), `flops_over_dense`, `realised_saving` ((dense / its time) over
      (dense / its FLOPs)), `parameters`, `temp_bytes`, `compile_seconds`, `experts` (see
      `grouped_products`).

    Raises:
      ValueError: the dense model itself cannot be run.
    """
    first, *others = models
    dense, rows = models[first], []
    baseline = CompiledStep(dense)
    if why := try_run(baseline)[1]:
        raise ValueError(f'the {first} model cannot run: {why}')
    seconds = time_interleaved({first: baseline}, repeats, settle=1)[first]
    rows.append(_row(first, dense, baseline, seconds, (dense, seconds)))
    for name in others:
        step = None  # the one before makes room
        step, why = try_run(CompiledStep, models[name])
        why = why or try_run(step)[1]
        if why:
            rows.append({'model': name, 'failed': why})
            continue
        measured = time_interleaved({first: baseline, name: step}, repeats, settle=1)
        compared = (dense, measured[first])
        rows.append(_row(name, models[name], step, measured[name], compared))
    return {
        'versions': versions(),
        'length': dense.data.sequence_length,
        'batch': dense.data.batch_size,
        'dtype': dense.model.dtype,
        'attention': dense.model.attention,
        'chosen': log_lines(),
        'repeats': repeats,
        'rows': rows,
    }
