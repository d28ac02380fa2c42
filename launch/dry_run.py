"""Prints results of `launch.train --dry_run --json=FILE` as one table, or computes them again.

python -m launch.dry_run table results/cpu/dry_run/*.json
python -m launch.dry_run again results/cpu/dry_run/*.json

`again` runs the command of each file with the current code and JAX, and replaces the file.
"""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys

from absl import flags

from launch import cli
from moddepth_jax.data.directory import read_json

JSON = flags.DEFINE_string('json', None, 'File for the result of --dry_run.')

MOST_DEVICES = 1024
FIELDS = {  # of a result that `table` reads
    'command': list,
    **dict.fromkeys(('devices', 'rows', 'length'), int),
    'mesh': dict,
    'bytes': dict.fromkeys(('parameters', 'optimizer', 'peak'), int),
    'flops': {'executed': float},
    'sent_bytes': float,
    'estimates': dict,
}


def run(hparams, mesh_spec: str):
    """Compile the train step for the fake devices of --mesh, print its cost, and write --json.

    Only the CPU is used, and XLA's attention in place of one for GPUs. Raises ValueError like
    `check_model`.
    """
    _fake_devices(mesh_spec)
    from moddepth_jax.compiled.dry_run import dry_run
    from moddepth_jax.compiled.dry_run_tables import print_result
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.training.mesh import make_mesh
    from moddepth_jax.training.plan import check_model

    mesh = make_mesh(mesh_spec)
    if (name := hparams.model.attention) not in ('auto', 'reference', 'xla'):
        print(f'model.attention={name}: needs a GPU; compiled with xla', file=sys.stderr)
        model = dataclasses.replace(hparams.model, attention='xla')
        hparams = dataclasses.replace(hparams, model=model)
    check_model(hparams, tokenizer_of(hparams.data), mesh)
    with cli.open_json(JSON.value) as file:
        what = f'compiling the train step for {mesh.size} fake devices; a minute for large models'
        print(what, file=sys.stderr, flush=True)
        # Remove --json=FILE or --json FILE from the command.
        command = re.sub('(?m)^--?json(=|\n).*\n', '', '\n'.join([*sys.argv[1:], ''])).splitlines()
        result = {'command': command, **dry_run(hparams, mesh)}
        if file:
            cli.write_json(result, file, indent=1)
    print_result(result)


def _fake_devices(mesh_spec):
    """Create as many fake CPU devices as --mesh needs, with few threads."""
    import jax

    devices = math.prod(int(size) for size in re.findall(r'=(\d+)', mesh_spec)) or 1
    if devices > MOST_DEVICES:
        raise ValueError(f'--mesh={mesh_spec}: {devices} devices; must be {MOST_DEVICES} or fewer')
    os.environ['NPROC'] = '2'  # threads per device; nothing runs on them
    # This option would override jax_num_cpu_devices.
    option = r'--xla_force_host_platform_device_count=\d+'
    os.environ['XLA_FLAGS'] = re.sub(option, '', os.environ.get('XLA_FLAGS', ''))
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', devices)


def main(argv):
    from moddepth_jax.compiled.dry_run_tables import markdown

    if len(argv) < 3 or argv[1] not in ('table', 'again'):
        given = ' '.join(argv[1:]) or 'no argument'
        raise ValueError(f'{given}: must be table or again, then one FILE of --json or more')
    right = 'must be what launch.train --dry_run --json wrote'
    fields = FIELDS if argv[1] == 'table' else {'command': list}
    results = {path: read_json(pathlib.Path(path), right, fields) for path in argv[2:]}
    for path in (path for path, result in results.items() if result is None):
        raise ValueError(f'{path}: no such file; {right}')
    if argv[1] == 'table':
        print(markdown(list(results.values())))
        return 0
    for path, result in results.items():
        command_line = [sys.executable, '-m', 'launch.train', *result['command'], f'--json={path}']
        print('python -m', *command_line[2:], flush=True)
        if status := subprocess.run(command_line, stdout=subprocess.DEVNULL).returncode:
            return status
    return 0


if __name__ == '__main__':
    cli.run(main, 'table or again, then FILE...')
