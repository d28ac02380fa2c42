"""Benchmarks, as ratios measured in one run.

  python -m launch.bench step
  python -m launch.bench step --size=6x256 --lengths=512,2048 --json=step.json

step: one training step of the dense and the Mixture-of-Depths model at the same shape and batch
tokens, in turn, each beside the same mathematics written out by hand.
"""

import contextlib
import json
import sys

from absl import flags

from launch import command

SIZE = flags.DEFINE_string('size', '6x256', 'Shape of both models, LAYERSxWIDTH.')
LENGTHS = flags.DEFINE_list('lengths', '512,2048', 'Sequence lengths.')
TOKENS = flags.DEFINE_integer('tokens', 4096, 'Tokens of a batch.', lower_bound=1)
REPEATS = flags.DEFINE_integer('repeats', 11, 'Rounds that are timed.', lower_bound=1)
JSON = flags.DEFINE_string('json', None, 'File for the result; - for stdout.')


def _lengths():
    if not all(length.isdecimal() and int(length) for length in LENGTHS.value):
        raise ValueError(f'--lengths={",".join(LENGTHS.value)}: must be numbers such as 512,2048')
    return [int(length) for length in LENGTHS.value]


def _print_table(result):
    import rich.console
    import rich.table

    table = rich.table.Table(title=f'train step, {SIZE.value}, {TOKENS.value} tokens a batch')
    table.add_column('sequence length')
    for row in result['rows']:
        table.add_column(str(row['length']), justify='right')
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
    for name, cell in lines.items():
        table.add_row(name, *map(cell, result['rows']))
    rich.console.Console().print(table)


def main(argv):
    if argv[1:] != ['step']:
        raise ValueError(f'{" ".join(argv[1:]) or "no benchmark"}: must be step')
    from configs import dense_isoflop, mod_isoflop
    from moddepth_jax.analysis.bench_step import bench_step
    from moddepth_jax.hparams import from_config

    dense, routed = (
        from_config(module.get_config(f'size={SIZE.value}'))
        for module in (dense_isoflop, mod_isoflop)
    )
    with contextlib.ExitStack() as stack:
        file = sys.stdout
        if JSON.value not in (None, '-'):  # opened first: a bad path shows before the timing
            file = stack.enter_context(open(JSON.value, 'w', encoding='utf-8'))
        result = bench_step(dense, routed, _lengths(), TOKENS.value, REPEATS.value)
        if JSON.value:
            print(json.dumps(result, indent=2), file=file)
    if JSON.value != '-':
        _print_table(result)


if __name__ == '__main__':
    command.run(main, 'NAME of the benchmark: step')
