"""Models the bytes and the time of attention over sequence and slots on Hopper; nothing is run.

Times of cuDNN follow from published rates. Times of our kernels follow from the bytes that
kernels_pallas/mosaic/traffic.py counts, and from published rates of Mosaic kernels.
"""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp

from kernels_pallas.mosaic import decode, traffic
from kernels_pallas.mosaic.slot_loader import Sizes
from kernels_pallas.mosaic.tiles import ROWS, SLOTS, TILES
from kernels_pallas.mosaic.tiles import Sizes as TileSizes
from moddepth_jax.benchmarks.attention_cases import LENGTHS, Case, depth_bytes, flops
from moddepth_jax.benchmarks.decode_cases import least_bytes
from moddepth_jax.training.tables import Table

COPY = 0.9 * 4.3e12  # bytes per second: a share of the copy bandwidth of an H200
# Published FLOPs per second of causal attention on an H100 (T = 16k, bfloat16), by head width.
CUDNN, MOSAIC = {64: 538e12, 128: 645e12}, {64: 502e12, 128: 636e12}
# Both passes of cuDNN at H = 64, by T (published). Wider heads are assumed to gain as in forward.
CUDNN_BOTH = {4096: 370e12, 16384: 432e12, 65536: 441e12}
# A Mosaic backward pass of two kernels, like ours, which runs 7 products where 5 are counted.
MOSAIC_BACKWARD, DQ_PRODUCTS, ALL_PRODUCTS = {64: 334e12, 128: 452e12}, 3, 7
# (allocated slots, written slots); None: all are written.
SLOTS_HELD = ((16, None), (24, None), (48, None), (64, None), (64, 33))


class Bytes(NamedTuple):
    """Bytes of the depth phase of a case whose slot gradients are fresh, not added to others."""

    forward: float  # forward kernel
    backward: float  # backward kernel
    around: float  # XLA around the kernels: logsumexps of heads padded to multiples of 8


def tile_sizes(case: Case) -> TileSizes:
    """Return the sizes of the fused kernel, without documents or windows."""
    flags = dict.fromkeys(('documents', 'own_query', 'masked', 'copy_by_token', 'interpret'), False)
    group = case.heads // case.kv_heads
    return TileSizes(
        case.length, case.kv_heads, group, case.width, stages=8, window=0, factor=1.0, **flags
    )


def count_bytes(case: Case) -> Bytes:
    """Return the bytes of the depth phase of a case whose slots are a multiple of 8."""
    group = case.heads // case.kv_heads
    sizes = Sizes(
        *(case.batch, case.length, case.kv_heads, group, case.width, case.slots, case.length),
        *(jnp.dtype(case.dtype), False, False, 0),
    )
    forward = traffic.depth_forward(sizes, case.visible)
    backward = traffic.depth_backward(sizes, case.visible)
    # XLA passes over the padded numbers twice in the forward pass and once in the backward pass.
    padded = (group + sizes.scalars) * (sizes.scalars > group)
    around = 3 * sizes.items * padded * traffic.FLOAT
    return Bytes(forward.total, backward.total, around)


def _fused(case: Case, forward_rate: float, backward_rate: float) -> tuple[float, float]:
    """Return the seconds of the fused forward kernel, and of both passes of the fused kernels.

    A kernel takes the larger of the times of its products and of the bytes of its slots. Slots
    count as products of complete 64 x 64 tiles, at the rate at which it multiplies the sequence.

    Args:
      case: the shape.
      forward_rate, backward_rate: FLOPs per second over the sequence. Backward, 5 products are
        counted, and 7 are done.
    """
    sizes, plain = tile_sizes(case), flops(case, 0, False)
    tiles = case.batch * case.kv_heads * sizes.blocks * TILES
    products = 4 * tiles * sizes.parts * math.ceil(case.visible / SLOTS) * ROWS**2 * case.width
    moved = traffic.fused_forward(sizes, case.batch, case.slots, case.visible)
    forward = max((plain + products) / forward_rate, (moved.slots + moved.own) / COPY)
    sequence = (flops(case, 0, True) - plain) / backward_rate
    moved = traffic.fused_backward_q(sizes, case.batch, case.slots, case.visible)
    compute = sequence * DQ_PRODUCTS / ALL_PRODUCTS
    compute += 2.5 * products / (backward_rate * ALL_PRODUCTS / 5)
    dq = max(compute, (moved.slots + moved.sums + moved.own) / COPY)
    return forward, forward + dq + sequence * (1 - DQ_PRODUCTS / ALL_PRODUCTS)


def over_cudnn(case: Case) -> dict[str, float]:
    """Return the modelled time of both passes over that of plain cuDNN, minus 1, for five forms.

    `ideal` is cuDNN and the least bytes of the slots. `split` is cuDNN and our depth kernels.
    `fused` is our fused kernels at the published rates of Mosaic; in `as cuDNN` they take cuDNN's
    time for the sequence. `mixed` is the fused forward pass with the split backward pass.
    """
    counts, both = count_bytes(case), flops(case, 0, True)
    # Rates of one pass are published for T = 16k. They are assumed to change with T as cuDNN's do.
    scale = CUDNN_BOTH[case.length] / CUDNN_BOTH[16384]
    plain = both / (CUDNN_BOTH[case.length] * CUDNN[case.width] / CUDNN[64])
    plain_forward = flops(case, 0, False) / (CUDNN[case.width] * scale)
    backward_rate = (both - flops(case, 0, False)) / (plain - plain_forward)
    rates = MOSAIC[case.width] * scale, MOSAIC_BACKWARD[case.width] * scale
    forward, fused = _fused(case, *rates)
    ideal = depth_bytes(case, False) + depth_bytes(case, True)
    added = {
        'ideal': ideal / COPY,
        'split': sum(counts) / COPY,
        'mixed': forward - plain_forward + (sum(counts) - counts.forward) / COPY,
        'fused': fused - plain,
        'as cuDNN': _fused(case, CUDNN[case.width] * scale, backward_rate)[1] - plain,
    }
    return {name: seconds / plain for name, seconds in added.items()}


def _row(case):
    """The cells of a case: bytes relative to the ideal, and time relative to cuDNN by length."""
    counts, ideal = count_bytes(case), [depth_bytes(case, backward) for backward in (False, True)]
    shares = counts.forward / ideal[0], counts.backward / ideal[1], sum(counts) / sum(ideal)
    cells = [f'{share:.2f}' for share in shares]
    for length in LENGTHS.values():
        added = over_cudnn(case._replace(length=length))
        cells += [f'{100 * share:+.0f}' for share in added.values()]
    return cells


def _decoding_row(rows, places, group, width, slots):
    """The cells of a decoding step over full caches: megabytes, and bytes relative to the least."""
    shapes = {'B': rows, 'T': 1, 'K': 8, 'G': group, 'H': width, 'length': places, 'L': slots}
    least = least_bytes(shapes)
    sizes = decode.Sizes(
        rows=rows,
        tokens=1,
        kv_heads=8,
        group=group,
        width=width,
        places=places,
        slots=slots,
        dtype=jnp.dtype('bfloat16'),
        own_query=False,
    )
    moved = traffic.decode_forward(sizes, places).total
    # XLA reads the sums, totals and maximum scores of all splits, and writes their softmax.
    numbers = sizes.heads * width + 2 * sizes.columns
    joined = sizes.blocks * numbers * traffic.FLOAT + rows * 8 * group * width * 2
    cells = sizes.splits, f'{least / 1e6:.1f}', f'{moved / least:.2f}'
    return [*map(str, cells), f'{(moved + joined) / least:.2f}']


def paper(*, kv_heads: list[int] | None = None, widths: list[int] | None = None):
    """Bytes of the Hopper kernels, and modelled times relative to cuDNN; nothing is run.

    The shapes have 64 query heads, T = 4k, 16k and 64k, and 16 to 64 slots in bfloat16. A second
    table has the bytes of decoding.

    Args:
      kv_heads: divisors of 64. Default: 8,32,64.
      widths: head widths, 64 or 128. Default: 64,128.
    """
    lines = {}
    for few, width in itertools.product(kv_heads or (8, 32, 64), widths or CUDNN):
        if 64 % few or few < 2:
            raise ValueError(f'--kv_heads={few}: must be one of 2, 4, 8, 16, 32, 64')
        if width not in CUDNN:
            raise ValueError(f'--widths={width}: must be one of {", ".join(map(str, CUDNN))}')
        for held, written in SLOTS_HELD:
            case = Case(4096, kv_heads=few, width=width, slots=held, written=written)
            slots = f'{held}' if written is None else f'{written} of {held}'
            lines[f'{64 // few}, {width}, {slots}'] = _row(case)
    heads = ['G, H, slots', 'forward', 'backward', 'all']
    forms = 'ideal', 'split', 'mixed', 'fused', 'as cuDNN'
    heads += [f'{name} {form}' for name in LENGTHS for form in forms]
    title = 'bytes of the depth phase over the ideal; modelled extra time over plain cuDNN, %'
    caches, heads_of_keys = ((1, 4096), (8, 4096), (64, 4096), (1, 65536)), ((8, 64), (2, 128))
    cases = [(*cache, *of_keys, 64) for cache in caches for of_keys in heads_of_keys]
    decoding = {', '.join(map(str, case)): _decoding_row(*case) for case in cases}
    over = 'a decoding step of one layer, 8 key/value heads: bytes over the least'
    names = ['rows, places, G, H, slots', 'splits', 'least, MB', 'kernel', "with XLA's join"]
    tables = Table(title, heads, lines), Table(over, names, decoding)
    yield {'lines': lines, 'decoding': decoding}, list(tables)
