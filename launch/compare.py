"""Compares finished runs: losses with their spread over seeds, FLOPs, speed, configs, curves.

python -m launch.compare runs/mod_isoflop runs/dense_isoflop
python -m launch.compare runs/mod-seed* runs/dense-seed* --out=runs/mod-against-dense

Runs that differ only in their seed form one column. Differences are to the first column, with a 95%
interval if there are two seeds or more; equal seeds are compared in pairs. --out gets compare.json
and the curves, compare.png.
"""

import json
import os

from absl import flags

from launch import cli

OUT = flags.DEFINE_string('out', 'runs/comparison', 'Directory for compare.json and compare.png.')


def main(argv):
    if len(argv) < 2:
        raise ValueError('RUN: missing; give the directory of one run or more')
    from moddepth_jax.data.directory import write_atomically
    from moddepth_jax.training.run_dir import read_finished

    for path in argv[1:]:  # fails before JAX is imported
        if ',' in path and not os.path.exists(path):
            raise ValueError(f'{path}: no such directory; separate runs by spaces')
        read_finished(path)
    from moddepth_jax.studies import compare
    from moddepth_jax.training.metrics import replace_nonfinite
    from moddepth_jax.training.tables import print_table

    variants = compare.group_by_config([compare.read_run(path) for path in argv[1:]])
    rows, warnings = compare.describe(variants), compare.warnings(variants)
    out = cli.make_directory('out', OUT.value)
    content = {'runs': rows, 'warnings': warnings, 'knobs': compare.differing_knobs(variants)}
    text = json.dumps(replace_nonfinite(content), indent=1, allow_nan=False)
    write_atomically(out / 'compare.json', text + '\n')
    compare.draw_curves(variants, out / 'compare.png')
    for table in compare.tables(variants, rows):
        print_table(table)
    for line in (*(f'note: {warning}' for warning in warnings), f'curves: {out}/compare.png'):
        print(line)


if __name__ == '__main__':
    cli.run(main, positional='RUN ...   directories of finished runs')
