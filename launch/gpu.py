"""Everything that wants a GPU, in one command: tests, benchmarks, a training run, one table.

  python -m launch.gpu                                   # into results/gpu/DATE
  python -m launch.gpu --parts=tests,attention           # these alone; the table keeps the others'
  python -m launch.gpu --out=results/gpu/2026-11-21 --parts=steps,depth,train --attention=xla
  python -m launch.gpu --toy --out=/tmp/toy              # all of it at toy size on a CPU

tests: every implementation of attention, compiled, against the float64 softmax.
attention: launch.bench attention in full.
steps, depth: launch.bench step and depth for dense, MoD, MoDA and both, in bfloat16, at 124M and
700M parameters.
experts: launch.bench experts, and launch.bench step for experts and both forms of MoDE.
train: launch.train on MoD with MoDA, in bfloat16.

Each part runs in processes of its own under a time limit. One that fails is told, the others go on,
and the exit status is 1. The directory holds a JSON file for each benchmark, pictures, log.txt with
all that was printed, parts.json, and table.md with every number.
"""

import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from typing import NamedTuple

from absl import flags

from launch import command

PARTS = ('tests', 'attention', 'steps', 'experts', 'depth', 'train')
OUT = flags.DEFINE_string(
    'out', None, 'Directory of the results. Default: results/gpu/DATE, or results/gpu/toy.'
)
TOY = flags.DEFINE_boolean('toy', False, 'The same at toy size, on the CPU.')
CHOSEN = flags.DEFINE_list('parts', ','.join(PARTS), 'What to run.')
ATTENTION = flags.DEFINE_string(
    'attention', 'auto', 'model.attention of the models (steps, depth, train).'
)

_MACHINE = """
import json, jax
from moddepth_jax.training.summary import versions
device = jax.devices()[0]
print(json.dumps(versions() | {
    'platform': device.platform, 'platform_version': device.client.platform_version}))
"""


class Command(NamedTuple):
    """One process of a part.

    Attributes:
      name: what it is told as.
      arguments: of Python.
      limit: seconds.
      file: what it leaves in the directory of the results; it is removed before.
      env: beside the environment.
    """

    name: str
    arguments: list[str]
    limit: float
    file: str
    env: dict[str, str] = {}


def _tests(out, toy):
    from kernels_pallas.choice import IMPLEMENTATIONS

    # A kernel that fails may take the device with it: each has a process of its own.
    found, file = {}, out / 'tests.xml'
    for name in ('xla', 'pallas') if toy else IMPLEMENTATIONS:
        arguments = ['-m', 'pytest', 'tests/kernels', '-m', 'gpu', '-q', '--tb=short']
        arguments += ['-p', 'no:cacheprovider', f'--junitxml={file}']
        env = {'KERNEL_TESTS': f'toy:{name}' if toy else name}
        yield Command(name, arguments, 300, file.name, env)
        found[name] = read_tests(file) if file.exists() else {}
        (out / 'tests.json').write_text(json.dumps(found, indent=2))
        file.unlink(missing_ok=True)


def read_tests(file) -> dict:
    """`passed`, and one line for each of `failed` and `skipped` tests, of pytest's --junitxml."""
    found = {'passed': 0, 'failed': [], 'skipped': []}
    for case in xml.etree.ElementTree.parse(file).iter('testcase'):
        kinds = {child.tag: child for child in case}
        for tag, kind in (('failure', 'failed'), ('error', 'failed'), ('skipped', 'skipped')):
            if tag in kinds:
                why = (kinds[tag].get('message') or '').splitlines()[:1]
                found[kind].append(': '.join([case.get('name'), *why])[:240])
                break
        else:
            found['passed'] += 1
    return found


def _bench(benchmark, file, out, limit, *arguments):
    start = ['-m', 'launch.bench', benchmark, f'--json={out / file}']
    return Command(file.removesuffix('.json'), [*start, *arguments], limit, file)


def _attention(out, toy):
    limit, seconds = (600, 30) if toy else (560, 300)
    plot = f'--plot={out / "attention.png"}'
    yield _bench('attention', 'attention.json', out, limit, plot, f'--seconds={seconds}')


def _steps(out, toy):
    models = ('--variants=dense,mod,moda,both', '--dtype=bfloat16')
    models += (f'--attention={ATTENTION.value}',)
    small = ('--lengths=32', '--tokens=64', '--repeats=2') if toy else ()
    for size in ('2x64',) if toy else ('124m', '700m'):
        yield _bench('step', f'step_{size}.json', out, 540, *models, f'--size={size}', *small)


def _experts(out, toy):
    shapes = '64x16x8x4x2' if toy else '16384x768x512x8x2,4096x2048x704x64x6'
    rest = ('--dtype=bfloat16', f'--repeats={1 if toy else 5}')
    yield _bench('experts', 'experts.json', out, 540, f'--shapes={shapes}', *rest)
    size = '--size=2x64' if toy else '--size=124m'
    rest += ('--lengths=32', '--tokens=64') if toy else ()
    models = f'--variants=dense,moe{"" if toy else ",mode"}'
    yield _bench('step', 'step_experts.json', out, 540, models, size, *rest)


def _depth(out, toy):
    shapes = {
        '124m': ('--depths=12,24', '--unrolled_up_to=12', '--lengths=2048', '--rows=4'),
        '700m': ('--depths=18,36', '--unrolled_up_to=0', '--lengths=2048', '--rows=2'),
    }
    if toy:
        shapes = {'2x64': ('--depths=2', '--unrolled_up_to=0', '--lengths=32', '--rows=1')}
    rest = ('--dtype=bfloat16', f'--attention={ATTENTION.value}', '--repeats=1' if toy else '')
    rest += ('--ratio_length=32' if toy else '--ratio_length=2048',)
    for size, shape in shapes.items():
        for router in ('none', 'learned'):
            name = f'depth_{size}' + ('_routed' if router == 'learned' else '')
            arguments = (f'--size={size}', f'--router={router}', *shape, *filter(None, rest))
            yield _bench('depth', f'{name}.json', out, 540, *arguments)


def _train(out, toy):
    knobs = {'model.dtype': 'bfloat16', 'model.attention': ATTENTION.value}
    if toy:
        config = 'configs/mod_moda.py:size=2x64,steps=4'
        knobs |= {'data.source': 'synthetic', 'data.sequence_length': 32, 'data.batch_size': 2}
        knobs |= {'report.sample_tokens': 8, 'evaluation.final_batches': 1, 'report.prompt': ''}
        knobs |= {'training.log_every': 1}
    else:
        config = 'configs/mod_moda.py:size=12x768,steps=800'
        knobs |= {'data.sequence_length': 1024, 'data.batch_size': 32}
        knobs |= {'model.across_documents': True}
        knobs |= {'optimizer.learning_rate': 1e-3}
    with tempfile.TemporaryDirectory() as workdir:
        arguments = ['-m', 'launch.train', f'--config={config}', f'--workdir={workdir}']
        arguments += [f'--config.{knob}={value}' for knob, value in knobs.items()]
        yield Command('train', arguments, 540, 'train.json')
        if (pathlib.Path(workdir) / 'summary.json').exists():
            _keep_run(pathlib.Path(workdir), out)


_COMMANDS = {
    'tests': _tests,
    'attention': _attention,
    'steps': _steps,
    'experts': _experts,
    'depth': _depth,
    'train': _train,
}


def _environment(toy):
    env = dict(os.environ)
    if toy:
        return env | {'JAX_PLATFORMS': 'cpu'}
    env.setdefault('JAX_PLATFORMS', 'cuda,cpu')
    env.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.92')  # no other process is there
    env.setdefault('CUDA_VISIBLE_DEVICES', '0')  # of several, one is measured
    return env


def run_command(todo: Command, env, log) -> dict:
    """Runs one process to its end or its limit, its output at the end of the file `log`.

    Returns:
      dict with `name`, `seconds`, `status`, and `failed`: one line, or None.
    """
    begin = time.perf_counter()
    with open(log, 'a', encoding='utf-8') as file:
        print(f'\n$ python {" ".join(todo.arguments)}', file=file, flush=True)
        start = file.tell()
        process = subprocess.Popen(
            [sys.executable, *todo.arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env | todo.env,
            start_new_session=True,
        )
        failed = None
        try:
            status = process.wait(timeout=todo.limit)
        except subprocess.TimeoutExpired:
            failed, status = f'not done in {todo.limit:g} s', None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    with open(log, encoding='utf-8', errors='replace') as file:
        file.seek(start)
        said = file.read()
    if status:
        last = [line for line in said.splitlines() if line.strip()][-1:]
        failed = ': '.join([f'exit status {status}', *last])[:240]
    seconds = time.perf_counter() - begin
    if todo.file == 'tests.xml' and not failed and not re.search(r'\b[1-9]\d* passed', said):
        failed = 'no test ran: each implementation says why in log.txt'
    return {'name': todo.name, 'seconds': seconds, 'status': status, 'failed': failed, 'said': said}


def run_part(part, commands, out, env):
    """Yields what became of each command.

    A benchmark whose device is lost runs again without what ran last.
    """
    from moddepth_jax.analysis.attempt import HUNG

    for todo in commands:
        (out / todo.file).unlink(missing_ok=True)
        left_out = []
        while True:
            without = [f'--without={",".join(left_out)}'] if left_out else []
            again = todo._replace(arguments=todo.arguments + without)
            done = run_command(again, env, out / 'log.txt')
            running = re.findall(r'^running (\w+)$', done.pop('said'), re.MULTILINE)
            if done['status'] != HUNG or not running or running[-1] in left_out:
                break
            left_out.append(running[-1])
            print(f'{part}, {todo.name}: {done["failed"]}; again without {running[-1]}')
        if left_out:
            done['failed'] = done['failed'] or f'ends with the device: {", ".join(left_out)}'
        said = f'FAILED: {done["failed"]}' if done['failed'] else 'ok'
        print(f'{part}, {todo.name}: {said} ({done["seconds"]:.0f} s)', flush=True)
        yield done


def _machine(env):
    """Device and versions, asked of another process: this one must not hold the device's memory."""
    asked = subprocess.run(
        [sys.executable, '-c', _MACHINE], env=env, capture_output=True, text=True, timeout=300
    )
    said = asked.stdout.strip().splitlines()
    machine = json.loads(said[-1]) if asked.returncode == 0 and said else {}
    if not TOY.value and machine.get('platform') != 'gpu':
        last = ''.join(asked.stderr.strip().splitlines()[-1:]) or 'JAX sees only a CPU'
        raise ValueError(f'no GPU: {last}; --toy runs everything at toy size on a CPU')
    return machine


def _keep_run(workdir, out):
    """Of a training run only its summary and its speed are kept."""
    summary = json.loads((workdir / 'summary.json').read_text())
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    names = ('tokens_per_second', 'flops_per_second')
    kept = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    median = {name: sorted(values)[len(values) // 2] for name, values in kept.items() if values}
    (out / 'train.json').write_text(json.dumps({'median': median, 'summary': summary}, indent=2))


def main(_):
    from moddepth_jax.analysis.gpu_table import gpu_table

    for part in CHOSEN.value:
        if part not in PARTS:
            raise ValueError(f'--parts={part}: must be of {", ".join(PARTS)}')
    env, today = _environment(TOY.value), datetime.date.today().isoformat()
    machine = _machine(env)
    name = 'toy' if TOY.value else today
    out = pathlib.Path(OUT.value or pathlib.Path('results/gpu') / name).absolute()
    out.mkdir(parents=True, exist_ok=True)
    file = out / 'parts.json'
    parts = json.loads(file.read_text()) if file.exists() else {}
    for part in CHOSEN.value:
        parts[part] = {'date': today, 'machine': machine, 'toy': TOY.value, 'commands': []}
        for done in run_part(part, _COMMANDS[part](out, TOY.value), out, env):
            parts[part]['commands'].append(done)
            file.write_text(json.dumps(parts, indent=2))
        (out / 'table.md').write_text(gpu_table(out), encoding='utf-8')
    print(out / 'table.md')
    return int(any(done['failed'] for part in CHOSEN.value for done in parts[part]['commands']))


if __name__ == '__main__':
    command.run(main)
