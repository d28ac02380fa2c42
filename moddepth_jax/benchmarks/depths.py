"""Measures memory, compile time and step time by the number of layers or loops."""

import itertools

import jax
import jax.numpy as jnp

from moddepth_jax.benchmarks.models import LOOPED, TITLES, check_variants, make_model
from moddepth_jax.benchmarks.steps import compare_steps, steps_table, with_model
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.checks import one_of
from moddepth_jax.training.summary import versions
from moddepth_jax.training.tables import pivot

REMAT = ('block', 'elementwise', 'none')
TRAINED = tuple(name for name in LOOPED if name != 'exits')  # only decoding has exits


def compare_depths(models: dict[str, Hparams], depths, unrolled_up_to: int, repeats: int) -> dict:
    """Measure memory, compile time and step time of models by depth, scanned and unrolled.

    Models deeper than `unrolled_up_to` are only scanned, because unrolled programs grow with depth.

    Returns:
      The dict of `compare_steps`, whose rows also have `depth`, `layer_loop` and `remat`. Ratios
      are to the first model of the same depth, scanned with remat `block`.
    """
    rows = []
    for depth in depths:
        compared = {}
        for name, loop, remat in itertools.product(models, ('scan', 'unrolled'), REMAT):
            scans = models[name].model.depth.stream_class.scans
            fits = scans if loop == 'scan' else depth <= unrolled_up_to
            if fits:
                knobs = {'num_layers': depth, 'layer_loop': loop, 'remat': remat}
                compared[f'{name}, {loop}, {remat}'] = with_model(models[name], **knobs)
        result = compare_steps(compared, repeats)
        for row in result['rows']:
            name, loop, remat = row['model'].rsplit(', ', 2)
            form = {'depth': depth, 'model': name, 'layer_loop': loop, 'remat': remat}
            rows.append(row | form)
    return result | {'rows': rows}


def depth_tables(result: dict, shape: str) -> list:
    """Return tables of memory, compile time and step time by depth; `shape` ends their titles."""
    first = result['rows'][0]['model']
    cells = {
        'temporary memory, MiB': lambda row: f'{row["temp_bytes"] / 2**20:.1f}',
        'compilation (tracing and lowering), s': lambda row: (
            f'{row["compile_seconds"]:.1f} ({row["trace_seconds"]:.1f})'
        ),
        f'train step, ms (relative to {first}, scan, block; per FLOP)': lambda row: (
            f'{1e3 * row["step_seconds"]:.0f} '
            f'({row["time_ratio"]:.2f}; {1 / row["realised_saving"]:.2f})'
        ),
    }
    return [
        pivot(
            f'{title}; {shape}',
            result['rows'],
            line=lambda row: f'{row["model"]}, {row["layer_loop"]}, {row["remat"]}',
            column=lambda row: str(row['depth']),
            text=lambda row, cell=cell: row['failed'][:20] if 'failed' in row else cell(row),
            corner='layers',
        )
        for title, cell in cells.items()
    ]


def loops(
    *,
    variants: list[str] = TRAINED,
    size: str = '2x64',
    counts: list[int] = (2, 3, 6),
    length: int = 256,
    rows: int = 4,
    repeats: int = 3,
):
    """Memory, program size and time of a training step of looped models, by number of loops.

    Memory is also shown without saved activations: each block that runs saves its input and the
    output of its attention for the backward pass.

    Args:
      variants: looped, mor, mor_first.
      size: LAYERSxWIDTH; LAYERS is the number of blocks with parameters, which are all looped.
      counts: numbers of loops.
      length: sequence length.
      rows: rows of a batch.
      repeats: timed rounds.
    """
    for variant in variants:
        one_of('--variants', variant, TRAINED)
    jax.config.update('jax_enable_compilation_cache', False)
    found = []
    for variant, count in itertools.product(variants, counts):
        hparams = with_model(make_model(variant, size, length, rows, loops=count), remat='block')
        (row,) = compare_steps({TITLES[variant]: hparams}, repeats)['rows']
        found.append(row | {'loops': count, 'saved_bytes': saved_bytes(hparams)})
    cells = {
        'temporary memory, MiB (beyond saved activations)': lambda row: (
            f'{row["temp_bytes"] / 2**20:.2f} '
            f'({(row["temp_bytes"] - row["saved_bytes"]) / 2**20:.2f})'
        ),
        'instructions of the program (compilation, s)': lambda row: (
            f'{row["instructions"]} ({row["compile_seconds"]:.1f})'
        ),
        'train step, ms': lambda row: f'{1e3 * row["step_seconds"]:.0f}',
    }
    shape = f'{size}, {rows} rows of {length}'
    yield (
        {'versions': versions(), 'rows': found},
        [
            pivot(
                f'{title}; {shape}',
                found,
                line=lambda row: row['model'],
                column=lambda row: str(row['loops']),
                text=cell,
                corner='loops',
            )
            for title, cell in cells.items()
        ],
    )


def saved_bytes(hparams: Hparams) -> int:
    """Return the bytes that a looped model saves for the backward pass under remat=block."""
    model, length = hparams.model, hparams.data.sequence_length
    tokens = length * model.loops
    if model.routing.routes_loops:
        tokens = sum(model.routing.num_selected(length, part) for part in model.loop_progress)
    a_token = len(model.looped_range) * 2 * model.d_model * jnp.dtype(model.dtype).itemsize
    return hparams.data.batch_size * tokens * a_token


def depth(
    *,
    variants: list[str] = ('dense', 'moda'),
    size: str = '16x128',
    depths: list[int] = (8, 16, 32, 64),
    length: int = 128,
    unrolled_up_to: int = 16,
    ratio_length: int = 1024,
    rows: int = 4,
    repeats: int = 5,
):
    """One training step of the dense model and others: time relative to FLOPs, and costs by depth.

    The first comparison is at the depth of --size, for each value of `model.remat`. The second
    shows memory, compile time and step time by depth, scanned and unrolled. Key/value heads are
    half of the query heads.

    Args:
      variants: models, dense first; see `step`, such as moda, attnres, mhc.
      size: LAYERSxWIDTH; LAYERS is the depth of the first comparison.
      depths: numbers of layers.
      length: sequence length of the comparison by depth.
      unrolled_up_to: largest unrolled depth; unrolled models compile for a minute at 16 layers.
      ratio_length: sequence length of the first comparison.
      rows: rows of a batch.
      repeats: timed rounds.
    """
    variants = check_variants(list(variants))
    heads = make_model('dense', size, ratio_length, rows).model.num_heads
    heads = heads // 2 if heads % 2 == 0 else 1
    first, by_depth = (
        {TITLES[kind]: make_model(kind, size, n, rows, num_kv_heads=heads) for kind in variants}
        for n in (ratio_length, length)
    )
    jax.config.update('jax_enable_compilation_cache', False)  # compilation is timed
    facts = {'kv_heads': heads, 'size': size}
    for remat in REMAT:
        each = {name: with_model(hparams, remat=remat) for name, hparams in first.items()}
        result = compare_steps(each, repeats)
        shape = f'{heads} key/value heads, {rows} rows of {ratio_length}, remat {remat}'
        table = steps_table(f'train step, {size}, {shape}', result['rows'])
        yield facts | {'remat': remat} | result, [table]
    result = compare_depths(by_depth, depths, unrolled_up_to, repeats)
    width = next(iter(by_depth.values())).model.d_model
    shape = f'width {width}, {heads} key/value heads, {rows} rows of {result["length"]}'
    yield facts | result, depth_tables(result, shape)
