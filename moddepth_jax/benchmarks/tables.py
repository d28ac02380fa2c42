"""What the benchmarks' results say as tables: a title, heads, and lines of cells by name."""

from moddepth_jax.benchmarks.experts import EXPANDED

TITLES = {
    'dense': 'dense',
    'mod': 'MoD',
    'moda': 'MoDA',
    'both': 'MoD and MoDA',
    'moe': 'experts',
    'staged': 'MoDE staged',
    'integrated': 'MoDE integrated',
}


def _by_row(lines, rows):
    return {name: [cell(row) for row in rows] for name, cell in lines.items()}


def step_table(result, size):
    """Of bench_step: the dense and the routed model, each beside itself written out by hand."""
    lines = {
        'dense, ms': lambda row: f'{1e3 * row["seconds"]["dense"]:.0f}',
        'MoD, ms': lambda row: f'{1e3 * row["seconds"]["routed"]:.0f}',
        'dense / MoD, counted FLOPs': lambda row: (
            f'{row["flops"]["dense"] / row["flops"]["routed"]:.3f}'
        ),
        'realised saving (time ratio / FLOP ratio)': lambda row: f'{row["realised_saving"]:.3f}',
        'dense / written by hand': lambda row: f'{row["over_by_hand"]["dense"]:.3f}',
        'MoD / written by hand': lambda row: f'{row["over_by_hand"]["routed"]:.3f}',
        'data wait, share of a MoD step': lambda row: f'{row["data_wait_fraction"]:.2%}',
    }
    heads = ['sequence length', *(str(row['length']) for row in result['rows'])]
    title = f'train step, {size}, {result["tokens"]} tokens a batch'
    return title, heads, _by_row(lines, result['rows'])


def _of_experts(cell):
    return lambda row: cell(row['experts']) if row['experts'] else '-'


def _expansion(factor):
    """What XLA makes of ragged_dot here, from its FLOPs over those of the rows; None: unknown."""
    if factor is None:
        return 'not told'
    return f'expanded, {factor:.1f} x' if factor > EXPANDED else 'grouped'


_EXPERTS = {
    'grouped product of the experts': _of_experts(lambda experts: experts['product']),
    'its FLOPs, executed at most / active': _of_experts(
        lambda experts: f'{experts["executed_over_active"]:.3f}'
    ),
    'ragged_dot on this device, compiled FLOPs': _of_experts(
        lambda experts: _expansion(experts['ragged_dot_expansion'])
    ),
}


def models_table(result, size):
    """Of bench_models: each model beside the dense one, and what those with experts run."""
    cells = {
        'ms': lambda row: f'{1e3 * row["seconds"]:.1f}',
        'tokens/s': lambda row: f'{row["tokens_per_second"]:.0f}',
        'TFLOP/s, counted': lambda row: f'{row["flops_per_second"] / 1e12:.3g}',
        'time / dense': lambda row: f'{row["over_dense"]:.3f}',
        'FLOPs / dense': lambda row: f'{row["flops_over_dense"]:.3f}',
        'realised saving (time ratio / FLOP ratio)': lambda row: f'{row["realised_saving"]:.3f}',
        'parameters, million': lambda row: f'{row["parameters"] / 1e6:.1f}',
        'temporary memory, GiB': lambda row: f'{row["temp_bytes"] / 2**30:.2f}',
        'compilation, s': lambda row: f'{row["compile_seconds"]:.1f}',
    }
    rows = result['rows']
    if any(row.get('experts') for row in rows):
        cells |= _EXPERTS
    lines = {
        name: [row['failed'][:40] if 'failed' in row else cell(row) for row in rows]
        for name, cell in cells.items()
    }
    shape = f'{size}, {result["batch"]} rows of {result["length"]}, {result["dtype"]}'
    title = f'train step, {shape}, attention {result["attention"]}'
    return title, ['', *(TITLES[row['model']] for row in rows)], lines


def decode_table(result, size, kv_heads, context):
    """Of bench_decode: tokens a second, and the first token after a prompt."""
    lines = {
        'dense, ms a step': lambda row: f'{1e3 * row["seconds"]["dense"]:.1f}',
        'MoD, ms a step': lambda row: f'{1e3 * row["seconds"]["routed"]:.1f}',
        'dense, tokens/s': lambda row: f'{row["tokens_per_second"]["dense"]:.0f}',
        'MoD, tokens/s': lambda row: f'{row["tokens_per_second"]["routed"]:.0f}',
        'MoD / dense, tokens/s': lambda row: f'{row["speedup"]:.2f}',
        'MoD / dense, cache bytes': lambda row: (
            f'{row["cache_bytes"]["routed"] / row["cache_bytes"]["dense"]:.3f}'
        ),
        'share of tokens that entered': lambda row: f'{row["entered_fraction"]:.3f}',
    }
    cells, first = _by_row(lines, result['rows']), result['time_to_first_token']
    seconds = first['seconds']
    cells[f'first token after {first["prompt"]}: dense, MoD, ms'] = [
        f'{1e3 * seconds["dense"]:.0f}, {1e3 * seconds["routed"]:.0f}'
    ]
    heads = ['batch', *(str(row['batch']) for row in result['rows'])]
    return f'decoding, {size}, {kv_heads} key/value heads, context {context}', heads, cells


def cost_table(result, names):
    """Of bench_cost; `names`: what its dense and its moda model are called."""
    dense, moda = names['dense'], names['moda']
    lines = {
        f'{dense}, ms': lambda row: f'{1e3 * row["seconds"]["dense"]:.0f}',
        f'{moda}, ms': lambda row: f'{1e3 * row["seconds"]["moda"]:.0f}',
        f'{moda} / {dense}, time': lambda row: f'{row["time_ratio"]:.3f}',
        f'{moda} / {dense}, counted FLOPs': lambda row: f'{result["flops_ratio"]:.3f}',
        'time ratio / FLOP ratio': lambda row: f'{row["time_over_flops"]:.3f}',
    }
    heads = ['model.remat', *(row['remat'] for row in result['rows'])]
    return heads, _by_row(lines, result['rows'])


def depth_tables(result, names):
    """Of bench_depth: memory, compilation and time by depth; `names` as in cost_table."""
    cells = {
        'temporary memory, MiB': lambda row: f'{row["temp_bytes"] / 2**20:.1f}',
        'compilation (tracing and lowering before it), s': lambda row: (
            f'{row["compile_seconds"]:.1f} ({row["trace_seconds"]:.1f})'
        ),
        f'train step, ms (over {names["dense"]}, scan, block)': lambda row: (
            f'{1e3 * row["step_seconds"]:.0f} ({row["over_baseline"]:.2f})'
        ),
    }
    depths = list(dict.fromkeys(row['depth'] for row in result['rows']))
    by_form = {}
    for row in result['rows']:
        name = f'{names[row["model"]]}, {row["layer_loop"]}, {row["remat"]}'
        by_form.setdefault(name, {})[row['depth']] = row
    for title, cell in cells.items():
        lines = {
            name: [cell(rows[depth]) if depth in rows else '-' for depth in depths]
            for name, rows in by_form.items()
        }
        yield title, ['layers', *map(str, depths)], lines
