"""Compares our times with those that the authors of MoDA published, at the shapes of their table.

Zhu et al. 2026 (https://arxiv.org/abs/2603.15619, table 2; https://github.com/hustvl/MoDA, README):
both passes in Triton on an A100, bfloat16, B = 1, K = 8, H = 64, chunks of 64.
"""

import sys

import jax

from kernels_pallas.depth_attention import IMPLEMENTATIONS
from moddepth_jax.benchmarks.attention import bench_case
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import BOTH, PLAIN
from moddepth_jax.benchmarks.attention_report import failures, find
from moddepth_jax.hparams.checks import one_of
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import Table

FLASH = 'flash_attention_2'
# (T, G, slots): published milliseconds of FlashAttention-2 without slots, and of MoDA.
PUBLISHED = {
    (4096, 8, 64): (7.970, 10.750),
    (8192, 8, 64): (28.700, 35.427),
    (16384, 8, 64): (116.700, 127.661),
    (32768, 8, 64): (459.854, 480.914),
    (65536, 8, 64): (1831.668, 1883.026),
    (16384, 2, 64): (28.982, 39.741),
    (16384, 4, 64): (58.071, 68.939),
    (16384, 16, 64): (233.700, 244.900),
    (16384, 32, 64): (467.107, 480.767),
    (16384, 8, 128): (116.700, 138.224),
    (16384, 8, 256): (116.700, 167.958),
}


def _row(published, result, names):
    """Cells of a shape: milliseconds and ratio of FlashAttention-2 and MoDA, published and here."""
    flash, moda = published
    cells = [f'{flash:.1f}', f'{moda:.1f}', f'{moda / flash:.3f}']
    plain = find(result, 'seconds', PLAIN, 'fresh') if result else {}
    slots = find(result, 'seconds', BOTH, 'fresh') if result else {}
    here = plain.get(FLASH)
    cells.append('-' if here is None else f'{1e3 * here:.3g}')
    for name in names:
        cell = '-' if name not in slots else f'{1e3 * slots[name]:.3g}'
        ratio = here and name in slots
        cells.append(f'{cell}, {slots[name] / here:.3f}x' if ratio else cell)
    return cells


def authors(*, implementations: list[str] | None = None, seconds: int = 20):
    """Both passes of attention with slots at the shapes that the MoDA authors timed on an A100.

    Needs a GPU. `x` is relative to FlashAttention-2 in Triton without slots, on the same GPU.

    Args:
      implementations: our implementations. Default: mosaic_gpu_fused, mosaic_gpu, pallas and xla.
      seconds: time budget for each shape.
    """
    known = [name for name in IMPLEMENTATIONS if name != 'reference']
    names = implementations or ['mosaic_gpu_fused', 'mosaic_gpu', 'pallas', 'xla']
    for name in names:
        one_of('--implementations', name, known)
    if jax.default_backend() != 'gpu':
        raise ValueError(f'authors: needs a GPU, but JAX has a {jax.default_backend()}')
    yield {'versions': versions(), 'device': jax.devices()[0].device_kind}, []
    heads = ['T, G, slots', 'FA2 ms, A100, authors', 'MoDA ms, A100, authors', 'MoDA over FA2']
    heads += ['FA2 ms', *(f'{name} ms' for name in names)]
    lines = {}
    for (length, group, slots), published in PUBLISHED.items():
        case, result = Case(length, heads=8 * group, slots=slots), None
        try:
            result = bench_case(case, [FLASH, *names], seconds, brief=True)
            for line in failures(result):
                print(line, file=sys.stderr)
        except ValueError as error:  # the inputs do not fit; other shapes may
            print(f'{case}: {error}', file=sys.stderr)
        lines[f'{length}, {group}, {slots}'] = _row(published, result, names)
        yield {'published_ms': published, **(result or {'failed': str(case)})}, []
    yield {'lines': lines}, [Table('both passes, with slots, H = 64, bfloat16', heads, lines)]
