"""What `launch.train --dry_run --json=FILE` wrote: several such files as one table, or made again.

python -m launch.dry_run table results/cpu/dry_run/*.json
python -m launch.dry_run again results/cpu/dry_run/*.json

again: runs the command that each file tells, with this code and version of JAX, and replaces it.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys

from absl import flags

from launch import cli

JSON = flags.DEFINE_string('json', None, 'File for what --dry_run finds.')

MOST_DEVICES = 1024
NOTES = (
    'Compiled for CPUs, nothing was run. Where the sum of an all-reduce is sliced afterwards, a '
    'GPU may scatter it instead, with half of the bytes. Programs for CPUs hold many products of '
    'bfloat16 in float32 and their own form of attention and of the experts: temporaries and peak '
    'are upper bounds. FLOPs in conditionals are those of the dearest branch.',
    'The estimates divide by numbers of data sheets, which no real step reaches, and add up '
    'collectives as if none went on beside computation or another one. They are not measurements.',
)


def run(hparams, mesh_spec: str):
    """Prints what the train step takes on a mesh of fake devices; with --json writes it, too.

    Nothing else is written, no parameter is made, and no device but the CPU is asked for.

    Args:
      hparams: of the run.
      mesh_spec: of --mesh; the devices are as many as the product of its sizes.

    Raises:
      ValueError: a mesh that is none, or does not fit the model or its batch.
    """
    _fake_devices(mesh_spec)
    from moddepth_jax.compiled.dry_run import dry_run
    from moddepth_jax.model.transformer import check_dtype
    from moddepth_jax.training.mesh import check_mesh, make_mesh

    check_dtype(hparams.model)
    mesh = make_mesh(mesh_spec)
    check_mesh(hparams, mesh)
    with contextlib.ExitStack() as stack:
        file = None
        if JSON.value is not None:  # opened first: a bad path shows before the compilation
            file = stack.enter_context(open(JSON.value, 'a', encoding='utf-8'))
        said = f'compiling the train step for {mesh.size} fake devices; a minute for large models'
        print(said, file=sys.stderr, flush=True)
        given = _without_json(sys.argv[1:])
        result = {'command': given, **dry_run(hparams, mesh)}
        if file:
            file.truncate(0)
            print(json.dumps(result, indent=1), file=file)
    _print(result)


def _without_json(arguments):
    """The arguments but --json=FILE, or --json FILE."""
    after = [False, *(argument in ('--json', '-json') for argument in arguments)]
    pairs = zip(arguments, after, strict=False)
    return [one for one, of_json in pairs if not of_json and not re.match('--?json(=|$)', one)]


def _fake_devices(mesh_spec):
    """As many CPU devices as the sizes of --mesh ask for, of which few threads are started."""
    import jax

    devices = math.prod(int(size) for size in re.findall(r'=(\d+)', mesh_spec)) or 1
    if devices > MOST_DEVICES:
        raise ValueError(f'--mesh={mesh_spec}: {devices} devices; must be {MOST_DEVICES} or fewer')
    os.environ['NPROC'] = '2'  # threads for each of them; none of them runs anything
    # It would contradict the number asked for here.
    option = r'--xla_force_host_platform_device_count=\d+'
    os.environ['XLA_FLAGS'] = re.sub(option, '', os.environ.get('XLA_FLAGS', ''))
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', devices)


def _print(result):
    import rich.console
    import rich.table
    import rich.text

    from moddepth_jax.compiled import dry_run_tables

    console = rich.console.Console(highlight=False)

    def say(text, **how):
        # A Text, since a str would have its [brackets] read as markup.
        console.print(rich.text.Text(text), **how)

    for text in dry_run_tables.headlines(result):
        say(text)
    for title, heads, rows in dry_run_tables.tables(result):
        table = rich.table.Table(title=title, title_justify='left')
        for place, head in enumerate(heads):
            table.add_column(head, justify='right' if place else 'left')
        for row in rows:
            table.add_row(*row)
        say('')
        console.print(table)
    say('')
    for text in result['sharding']:
        say(text, soft_wrap=True)
    for text in (*result['warnings'], *NOTES):
        say('')
        say(text)


def main(argv):
    from moddepth_jax.compiled.dry_run_tables import markdown

    if len(argv) < 3 or argv[1] not in ('table', 'again'):
        raise ValueError(f'{" ".join(argv[1:])}: must be table or again, and the files')
    results = {path: json.loads(pathlib.Path(path).read_text()) for path in argv[2:]}
    if argv[1] == 'table':
        print(markdown(list(results.values())))
        return 0
    for path, result in results.items():
        command_line = [sys.executable, '-m', 'launch.train', *result['command'], f'--json={path}']
        print('python -m', *command_line[2:], flush=True)
        status = subprocess.run(command_line, stdout=subprocess.DEVNULL).returncode
        if status:
            return status
    return 0


if __name__ == '__main__':
    cli.run(main, 'table or again, then FILE...')
