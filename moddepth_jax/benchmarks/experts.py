"""What the routed experts of one layer take by each grouped product, beside all experts on all."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.benchmarks.timing import time_interleaved
from moddepth_jax.model.flops import dot_general_flops
from moddepth_jax.model.layers import swiglu
from moddepth_jax.model.moe.experts import routed_mlp
from moddepth_jax.model.moe.grouped_matmul import IMPLEMENTATIONS, block_rows
from moddepth_jax.training.summary import versions

DENSE = 'dense loop'
MOST_DENSE_FLOPS = 2e11  # of both passes, above which the dense loop is left out
EXPANDED = 1.5  # executed over active FLOPs, above which a ragged_dot was expanded


class Shape(NamedTuple):
    """Tokens, and the experts that each of them goes through."""

    tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int


SHAPES = (Shape(64, 256, 176, 64, 6), Shape(512, 256, 176, 64, 6), Shape(4096, 256, 512, 8, 2))


def active_flops(shape: Shape) -> float:
    """Counted FLOPs of forward and backward, of the pairs of token and expert alone."""
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
    """A function of (expert_Nk, dy_ND, differentiable ones): the value and all cotangents."""

    def run(expert_Nk, dy_ND, *operands):
        value, pull = jax.vjp(functools.partial(function, expert_Nk), *operands)
        return value, *pull(dy_ND)

    return jax.jit(run)


def _forms(shape):
    forms = {name: functools.partial(_grouped, implementation=name) for name in IMPLEMENTATIONS}
    if active_flops(shape) * shape.num_experts / shape.top_k <= MOST_DENSE_FLOPS:
        forms[DENSE] = _dense
    return forms


def _row(shape, repeats, dtype):
    expert_Nk, operands = _operands(shape, dtype)
    arguments, calls, rows = (expert_Nk, operands[0], *operands), {}, {}
    for name, form in _forms(shape).items():
        compiled = _both_passes(form).lower(*arguments).compile()
        # A traced ragged_dot does not say what becomes of it; a compiled loop counts its body once.
        if name == 'ragged_dot':
            executed = (compiled.cost_analysis() or {}).get('flops')
        else:
            forward = jax.make_jaxpr(functools.partial(form, expert_Nk))(*operands)
            executed = 3 * dot_general_flops(forward)
        over = executed / active_flops(shape) if executed else None
        by = (
            'compiled program'
            if name == 'ragged_dot'
            else 'three times the traced forward products'
        )
        rows[name] = {'executed_over_active': over, 'executed_by': by}
        rows[name]['temp_bytes'] = compiled.memory_analysis().temp_size_in_bytes
        calls[name] = functools.partial(compiled, *arguments)
    for name, seconds in time_interleaved(calls, repeats, settle=1).items():
        rows[name]['seconds'] = float(np.median(seconds))
    block = block_rows(shape.tokens * shape.top_k, shape.num_experts, 'blocked')
    return {**shape._asdict(), 'block': block, 'flops': active_flops(shape), 'forms': rows}


def bench_experts(shapes, repeats: int, dtype: str = 'float32') -> dict:
    """Times forward and backward of routed SwiGLU experts by each implementation, in turn.

    Every token has top_k distinct experts, drawn evenly; parameters are float32.

    Args:
      shapes: Shapes.
      repeats: rounds that are timed.
      dtype: of tokens and results.

    Returns:
      dict with `versions`, `device`, `dtype`, `repeats`; `expands`: whether XLA makes products of
      all rows with all experts' matrices of a ragged_dot here, None where it tells no FLOPs; and
      `rows`: one for each shape with its sizes, `block` (rows of a block of `blocked`), counted
      active `flops` of both passes, and `forms`, by implementation and 'dense loop' (left out above
      2e11 FLOPs): median `seconds`, `executed_over_active` FLOPs (None: unknown), `executed_by`:
      'three times the traced forward products', padding included, or 'compiled program' (XLA's,
      with what is elementwise), and `temp_bytes`.
    """
    rows = [_row(shape, repeats, dtype) for shape in shapes]
    overs = [row['forms']['ragged_dot']['executed_over_active'] for row in rows]
    known = [over for over in overs if over is not None]
    return {
        'versions': versions(),
        'device': jax.devices()[0].device_kind,
        'dtype': dtype,
        'repeats': repeats,
        'expands': max(known) > EXPANDED if known else None,
        'rows': rows,
    }


def products_table(result):
    """Of bench_experts: title, heads and lines of cells, a column for each shape."""
    names, lines = (*IMPLEMENTATIONS, DENSE), {}

    def line(title, name, cell):
        forms = [(row, row['forms'].get(name)) for row in result['rows']]
        lines[title] = [cell(row, form) if form else '-' for row, form in forms]

    def executed(_, form):
        over = form['executed_over_active']
        return 'not told' if over is None else f'{over:.2f}'

    for name in names:
        line(f'{name}, ms', name, lambda _, form: f'{1e3 * form["seconds"]:.1f}')
    for name in names:
        line(f'{name}, executed / active FLOPs', name, executed)
    line(
        'ragged_dot / blocked, time',
        'ragged_dot',
        lambda row, form: f'{form["seconds"] / row["forms"]["blocked"]["seconds"]:.2f}',
    )
    for name in names:
        line(f'{name}, MiB', name, lambda _, form: f'{form["temp_bytes"] / 2**20:.1f}')
    heads = ['tokens, width, expert width, top k of experts']
    for row in result['rows']:
        sizes = f'{row["tokens"]}, {row["d_model"]}, {row["d_ff"]}'
        heads.append(f'{sizes}, {row["top_k"]} of {row["num_experts"]}')
    said = {True: 'expands ragged_dot', False: 'groups ragged_dot', None: 'tells no FLOPs'}
    device = f'{result["device"]}, which {said[result["expands"]]}'
    return f'experts, forward and backward, {result["dtype"]}, {device}', heads, lines
