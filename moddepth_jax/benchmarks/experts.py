"""Times the routed experts of one layer with each grouped matmul, and as a dense loop."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks.models import Dtype
from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.hparams.registry import EXPERT_PRODUCTS
from moddepth_jax.model.flops import dot_general_flops
from moddepth_jax.model.layers import swiglu
from moddepth_jax.model.moe.experts import routed_mlp
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import pivot

DENSE = 'dense loop'
EXPANDED = 1.5  # a higher ratio of executed to active FLOPs means that XLA expanded ragged_dot
MOST_DENSE_FLOPS = 2e11  # the dense loop is left out above this, forward and backward


class Shape(NamedTuple):
    """Sizes of a layer of experts; each token goes to top_k of them."""

    tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int


SHAPES = (Shape(64, 256, 176, 64, 6), Shape(512, 256, 176, 64, 6), Shape(4096, 256, 512, 8, 2))


def active_flops(shape: Shape) -> float:
    """Return the counted FLOPs of forward and backward for the selected (token, expert) pairs."""
    return 3 * 6.0 * shape.tokens * shape.top_k * shape.d_model * shape.d_ff


def _operands(shape, dtype):
    rng, (tokens, width, inner, experts, per_token) = np.random.default_rng(0), shape
    chosen = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :per_token]
    sides = (experts, width, inner), (experts, width, inner), (experts, inner, width)
    matrices = [rng.normal(size=side).astype('float32') / side[1] ** 0.5 for side in sides]
    weight_Nk = np.full((tokens, per_token), 1 / per_token, 'float32')
    x_ND = jnp.asarray(rng.normal(size=(tokens, width)), dtype)
    return jnp.asarray(chosen, jnp.int32), (x_ND, *map(jnp.asarray, (weight_Nk, *matrices)))


def _grouped(expert_Nk, x_ND, weight_Nk, w1_EDF, w3_EDF, w2_EFD, implementation):
    row = (x_ND[None], expert_Nk[None], weight_Nk[None])
    return routed_mlp(*row, w1_EDF, w3_EDF, w2_EFD, implementation, expert_Nk.size)[0]


def _dense(expert_Nk, x_ND, weight_Nk, *matrices_E):
    def add(y_ND, expert):
        number, *matrices = expert
        w1_DF, w3_DF, w2_FD = (matrix.astype(x_ND.dtype) for matrix in matrices)
        weight_N1 = jnp.sum(jnp.where(expert_Nk == number, weight_Nk, 0), axis=1, keepdims=True)
        out_ND = swiglu(x_ND @ w1_DF, x_ND @ w3_DF) @ w2_FD
        return y_ND + (weight_N1 * out_ND).astype(y_ND.dtype), None

    numbers_E = jnp.arange(matrices_E[0].shape[0])
    return jax.lax.scan(add, jnp.zeros_like(x_ND), (numbers_E, *matrices_E))[0]


def _both_passes(function):
    """Function of (expert_Nk, dy_ND, *operands) that returns the value and all gradients."""

    def run(expert_Nk, dy_ND, *operands):
        value, pull = jax.vjp(functools.partial(function, expert_Nk), *operands)
        return value, *pull(dy_ND)

    return jax.jit(run)


def _forms(shape):
    forms = {name: functools.partial(_grouped, implementation=name) for name in EXPERT_PRODUCTS}
    if active_flops(shape) * shape.num_experts / shape.top_k <= MOST_DENSE_FLOPS:
        forms[DENSE] = _dense
    return forms


def _rows(shape, repeats, dtype):
    """One result row for each form."""
    expert_Nk, operands = _operands(shape, dtype)
    dy_ND, calls, rows = operands[0], {}, {}
    for name, form in _forms(shape).items():
        compiled = _both_passes(form).lower(expert_Nk, dy_ND, *operands).compile()
        if name == 'ragged_dot':  # the trace does not show whether XLA expands it
            executed = (compiled.cost_analysis() or {}).get('flops')
        else:  # counted in the trace, because XLA counts the body of a loop only once
            forward = jax.make_jaxpr(functools.partial(form, expert_Nk))(*operands)
            executed = 3 * dot_general_flops(forward)
        rows[name] = {
            **shape._asdict(),
            'form': name,
            'flops': active_flops(shape),
            'executed_over_active': executed / active_flops(shape) if executed else None,
            'temp_bytes': compiled.memory_analysis().temp_size_in_bytes,
        }
        calls[name] = functools.partial(compiled, expert_Nk, dy_ND, *operands)
    for name, seconds in time_interleaved(calls, repeats, warmup=1).items():
        rows[name]['seconds'] = float(np.median(seconds))
    return list(rows.values())


def bench_experts(shapes, repeats: int, dtype: str = 'float32') -> dict:
    """Time forward and backward of routed SwiGLU experts with each implementation, interleaved.

    Every token has top_k distinct experts, drawn uniformly. Parameters are float32.

    Returns:
      `expands`: whether XLA multiplies all rows by all matrices in a ragged_dot here; None if it
      counts no FLOPs. `rows`, with `executed_over_active`: for ragged_dot the FLOPs that XLA counts
      (or None), else three times the traced forward products, including padding, over the active
      `flops` of both passes.
    """
    rows = [row for shape in shapes for row in _rows(shape, repeats, dtype)]
    known = [row['executed_over_active'] for row in rows if row['form'] == 'ragged_dot']
    known = [factor for factor in known if factor is not None]
    return {
        'versions': versions(),
        'device': jax.devices()[0].device_kind,
        'dtype': dtype,
        'repeats': repeats,
        'expands': max(known) > EXPANDED if known else None,
        'rows': rows,
    }


def experts_tables(result: dict) -> list:
    """Return tables of time, executed FLOPs and memory with a column for each shape."""
    expands = {True: 'expands ragged_dot', False: 'groups ragged_dot', None: 'counts no FLOPs'}
    device = f'{result["device"]}, which {expands[result["expands"]]}'
    cells = {
        'ms': lambda row: f'{1e3 * row["seconds"]:.1f}',
        'executed / active FLOPs': lambda row: (
            f'{row["executed_over_active"]:.2f}' if row['executed_over_active'] else 'unknown'
        ),
        'MiB': lambda row: f'{row["temp_bytes"] / 2**20:.1f}',
    }
    shape = '{tokens}, {d_model}, {d_ff}, {top_k} of {num_experts}'
    return [
        pivot(
            f'{title} of experts, forward and backward, {result["dtype"]}, {device}',
            result['rows'],
            line=lambda row: row['form'],
            column=lambda row: shape.format(**row),
            text=cell,
            corner='tokens, width, expert width, top k of experts',
        )
        for title, cell in cells.items()
    ]


def experts(*, shapes: list[str] | None = None, dtype: Dtype = 'float32', repeats: int = 5):
    """The routed experts of one layer with each grouped matmul, and all experts on all tokens.

    Shows time, memory, and executed over active FLOPs of forward and backward.

    Args:
      shapes: TOKENSxWIDTHxEXPERT_WIDTHxEXPERTSxTOP_K, such as 1024x256x704x64x6.
      dtype: dtype of activations.
      repeats: timed rounds.
    """
    chosen = [] if shapes is not None else SHAPES
    for text in shapes or ():
        sizes = text.split('x')
        numbers = all(size.isdecimal() and int(size) for size in sizes)
        if len(sizes) != 5 or not numbers or int(sizes[4]) > int(sizes[3]):
            right = 'five numbers such as 1024x256x704x64x6, the last at most the one before'
            raise ValueError(f'--shapes={text}: must be {right}')
        chosen.append(Shape(*map(int, sizes)))
    result = bench_experts(chosen, repeats, dtype)
    yield result, experts_tables(result)
