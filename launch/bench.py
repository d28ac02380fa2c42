"""Benchmarks, as ratios measured in one run.

  python -m launch.bench step
  python -m launch.bench step --size=6x256 --lengths=512,2048 --json=step.json
  python -m launch.bench decode --batches=1,8,16,64 --kv_heads=8,2
  python -m launch.bench depth --depths=8,16,32,64

step: one training step of the dense and the Mixture-of-Depths model at the same shape and batch
tokens, in turn, each beside the same mathematics written out by hand.
decode: one decoding step of both at a nearly full context, in turn, and the time to the first
token; an eighth of the tokens enters every other block, by random routing.
depth: one training step of the dense and the MoDA model (slots attention+ffn): first time beside
counted FLOPs, then memory, compile time and step time by depth, scanned and unrolled, with
recomputation (model.remat block) and without.
"""

import contextlib
import itertools
import json
import sys

from absl import flags

from launch import command

SIZE = flags.DEFINE_string(
    'size',
    None,
    'Shape of both models, LAYERSxWIDTH. Default: 6x256 for step, 12x512 for decode, 16x128 for '
    'depth, whose layers are those of the comparison with FLOPs.',
)
LENGTHS = flags.DEFINE_list(
    'lengths', None, 'Sequence lengths (step: default 512,2048; depth: 128, each in its tables).'
)
TOKENS = flags.DEFINE_integer('tokens', 4096, 'Tokens of a batch (step).', lower_bound=1)
BATCHES = flags.DEFINE_list('batches', '1,8,16,64', 'Rows that decode together (decode).')
KV_HEADS = flags.DEFINE_list(
    'kv_heads',
    None,
    'Key/value heads, each in its tables (decode: default 8,2; depth: half of the query heads).',
)
CONTEXT = flags.DEFINE_integer('context', 2048, 'Tokens of the caches (decode).', lower_bound=64)
PROMPT = flags.DEFINE_integer('prompt', 1024, 'Tokens before the first (decode).', lower_bound=1)
DEPTHS = flags.DEFINE_list('depths', '8,16,32,64', 'Numbers of layers (depth).')
UNROLLED_UP_TO = flags.DEFINE_integer(
    'unrolled_up_to',
    16,
    'Most layers of the unrolled forms, a minute of compilation at 16 and growing (depth).',
    lower_bound=0,
)
RATIO_LENGTH = flags.DEFINE_integer(
    'ratio_length', 1024, 'Sequence length of the comparison with FLOPs (depth).', lower_bound=1
)
ROWS = flags.DEFINE_integer('rows', 4, 'Rows of a batch (depth).', lower_bound=1)
REPEATS = flags.DEFINE_integer(
    'repeats', None, 'Rounds that are timed. Default: 11; decode 31, depth 5.'
)
JSON = flags.DEFINE_string('json', None, 'File for the result; - for stdout.')


def _numbers(flag, default=None):
    values = default if flag.value is None else flag.value
    if not values or not all(str(value).isdecimal() and int(value) for value in values):
        raise ValueError(f'--{flag.name}={",".join(values)}: must be numbers such as 8,2')
    return [int(value) for value in values]


def _repeats(default):
    if REPEATS.value is not None and REPEATS.value < 1:
        raise ValueError(f'--repeats={REPEATS.value}: must be 1 or more')
    return REPEATS.value or default


def _print_table(title, heads, lines):
    import rich.console
    import rich.table

    table = rich.table.Table(title=title)
    table.add_column(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify='right')
    for name, cells in lines.items():
        table.add_row(name, *cells)
    rich.console.Console().print(table)


def _hparams(size, kv_heads=None, router=None, context=None):
    """The dense model and the routed one of one size."""
    from configs import dense_isoflop, mod_isoflop
    from moddepth_jax.hparams import from_config

    for module in (dense_isoflop, mod_isoflop):
        config = module.get_config(f'size={size}')
        config.model.num_kv_heads = kv_heads or config.model.num_kv_heads
        config.data.sequence_length = context or config.data.sequence_length
        if router and module is mod_isoflop:
            config.model.routing.router = router
        yield from_config(config)


def _step():
    from moddepth_jax.analysis.bench_step import bench_step

    size = SIZE.value or '6x256'
    result = bench_step(*_hparams(size), _numbers(LENGTHS, [512, 2048]), TOKENS.value, _repeats(11))
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
    cells = {name: [cell(row) for row in result['rows']] for name, cell in lines.items()}
    yield result, (f'train step, {size}, {TOKENS.value} tokens a batch', heads, cells)


def _decode():
    from moddepth_jax.analysis.bench_decode import SETTLE, bench_decode

    size, lines = SIZE.value or '12x512', {
        'dense, ms a step': lambda row: f'{1e3 * row["seconds"]["dense"]:.1f}',
        'MoD, ms a step': lambda row: f'{1e3 * row["seconds"]["routed"]:.1f}',
        'dense, tokens/s': lambda row: f'{row["tokens_per_second"]["dense"]:.0f}',
        'MoD, tokens/s': lambda row: f'{row["tokens_per_second"]["routed"]:.0f}',
        'MoD / dense, tokens/s': lambda row: f'{row["speedup"]:.2f}',
        'MoD / dense, cache bytes': lambda row: (
            f'{row["cache_bytes"]["routed"] / row["cache_bytes"]["dense"]:.3f}'
        ),
        'share of tokens that entered': lambda row: f'{row["entered_fraction"]:.3f}',
    }  # fmt: skip
    counts, batches, repeats = _numbers(KV_HEADS, [8, 2]), _numbers(BATCHES), _repeats(31)
    if PROMPT.value > CONTEXT.value:
        raise ValueError(f'--prompt={PROMPT.value}: must be --context={CONTEXT.value} or less')
    if repeats + SETTLE > CONTEXT.value // 2:
        right = f'must be at most {CONTEXT.value // 2 - SETTLE} at --context={CONTEXT.value}'
        raise ValueError(f'--repeats={repeats}: {right}, or caches would be far from full')
    pairs = [list(_hparams(size, kv_heads, 'random', CONTEXT.value)) for kv_heads in counts]
    for kv_heads, models in zip(counts, pairs, strict=True):
        result = bench_decode(*models, batches, PROMPT.value, repeats)
        heads = ['batch', *(str(row['batch']) for row in result['rows'])]
        cells = {name: [cell(row) for row in result['rows']] for name, cell in lines.items()}
        first = result['time_to_first_token']
        seconds = first['seconds']
        cells[f'first token after {PROMPT.value}: dense, MoD, ms'] = [
            f'{1e3 * seconds["dense"]:.0f}, {1e3 * seconds["routed"]:.0f}'
        ]
        title = f'decoding, {size}, {kv_heads} key/value heads, context {CONTEXT.value}'
        yield {'kv_heads': kv_heads} | result, (title, heads, cells)


def _dense_and_moda(size, kv_heads, length):
    from configs import dense_isoflop
    from moddepth_jax.hparams import from_config

    for stream in ('residual', 'moda'):
        config = dense_isoflop.get_config(f'size={size}')
        config.model.depth.stream = stream
        config.model.num_kv_heads = kv_heads
        config.data.sequence_length, config.data.batch_size = length, ROWS.value
        yield from_config(config)


def _grouped_heads(size):
    """Half of the query heads of a size, or 1 where they are odd."""
    from configs import base, sizes

    config = base.get_config()
    sizes.apply_size(config, size)
    heads = config.model.num_heads
    return heads // 2 if heads % 2 == 0 else 1


def _cost_table(result):
    lines = {
        'dense, ms': lambda row: f'{1e3 * row["seconds"]["dense"]:.0f}',
        'MoDA, ms': lambda row: f'{1e3 * row["seconds"]["moda"]:.0f}',
        'MoDA / dense, time': lambda row: f'{row["time_ratio"]:.3f}',
        'MoDA / dense, counted FLOPs': lambda row: f'{result["flops_ratio"]:.3f}',
        'time ratio / FLOP ratio': lambda row: f'{row["time_over_flops"]:.3f}',
    }
    heads = ['model.remat', *(row['remat'] for row in result['rows'])]
    return heads, {name: [cell(row) for row in result['rows']] for name, cell in lines.items()}


def _depth_tables(result):
    cells = {
        'temporary memory, MiB': lambda row: f'{row["temp_bytes"] / 2**20:.1f}',
        'compilation (tracing and lowering before it), s': lambda row: (
            f'{row["compile_seconds"]:.1f} ({row["trace_seconds"]:.1f})'
        ),
        'train step, ms (over dense, scan, block)': lambda row: (
            f'{1e3 * row["step_seconds"]:.0f} ({row["over_baseline"]:.2f})'
        ),
    }
    depths = list(dict.fromkeys(row['depth'] for row in result['rows']))
    forms = {}
    for row in result['rows']:
        name = f'{row["model"]}, {row["layer_loop"]}, {row["remat"]}'
        forms.setdefault(name, {})[row['depth']] = row
    for title, cell in cells.items():
        lines = {
            name: [cell(rows[depth]) if depth in rows else '-' for depth in depths]
            for name, rows in forms.items()
        }
        yield title, ['layers', *map(str, depths)], lines


def _depth():
    import jax

    from moddepth_jax.analysis.bench_depth import bench_cost, bench_depth

    size, lengths, depths = SIZE.value or '16x128', _numbers(LENGTHS, [128]), _numbers(DEPTHS)
    counts, repeats = _numbers(KV_HEADS, [_grouped_heads(size)]), _repeats(5)
    pairs = {
        (kv_heads, length): list(_dense_and_moda(size, kv_heads, length))
        for kv_heads in counts
        for length in dict.fromkeys((RATIO_LENGTH.value, *lengths))
    }
    jax.config.update('jax_enable_compilation_cache', False)  # what is read from it is not timed
    for kv_heads in counts:
        rest = f'width {size.partition("x")[2]}, {kv_heads} key/value heads, {ROWS.value} rows of'
        result = bench_cost(*pairs[kv_heads, RATIO_LENGTH.value], repeats)
        title = f'train step, {result["depth"]} layers, {rest} {RATIO_LENGTH.value}'
        yield {'kv_heads': kv_heads} | result, (title, *_cost_table(result))
        for length in lengths:
            result = bench_depth(*pairs[kv_heads, length], depths, UNROLLED_UP_TO.value, repeats)
            tables = [(f'{what}; {rest} {length}', *t) for what, *t in _depth_tables(result)]
            yield {'kv_heads': kv_heads} | result, *tables


BENCHMARKS = {'step': _step, 'decode': _decode, 'depth': _depth}
OWN_FLAGS = {
    'step': ('lengths', 'tokens'),
    'decode': ('batches', 'kv_heads', 'context', 'prompt'),
    'depth': ('lengths', 'kv_heads', 'depths', 'unrolled_up_to', 'ratio_length', 'rows'),
}


def _refuse_flags_of_others(benchmark):
    for flag in dict.fromkeys(itertools.chain(*OWN_FLAGS.values())):
        owners = [name for name, own in OWN_FLAGS.items() if flag in own]
        if flags.FLAGS[flag].present and benchmark not in owners:
            raise ValueError(
                f'--{flag}: is of {" and ".join(owners)}, {benchmark} has no use for it'
            )


def main(argv):
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        given = ' '.join(argv[1:]) or 'no benchmark'
        raise ValueError(f'{given}: must be one of {", ".join(BENCHMARKS)}')
    _refuse_flags_of_others(argv[1])
    with contextlib.ExitStack() as stack:
        file = sys.stdout
        if JSON.value not in (None, '-'):  # opened first: a bad path shows before the timing
            file = stack.enter_context(open(JSON.value, 'w', encoding='utf-8'))
        results = []
        for result, *tables in BENCHMARKS[argv[1]]():
            results.append(result)
            for table in tables if JSON.value != '-' else ():
                _print_table(*table)
        if JSON.value:
            print(json.dumps(results, indent=2), file=file)


if __name__ == '__main__':
    command.run(main, 'NAME of the benchmark: step, decode or depth')
