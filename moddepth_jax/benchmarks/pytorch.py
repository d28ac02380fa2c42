"""Compares the time of a dense training step with that of the same model in PyTorch, on the CPU.

The model of Hugging Face is the exported model of this project, so both start from the same
parameters. Each trains for a few steps on one batch, in a process of its own, in turn. Their losses
must agree, or the shape fails: times of different work would say nothing.
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

from moddepth_jax.benchmarks.jax_steps import HEAD_DIM, STEPS, Shape, make_hparams
from moddepth_jax.benchmarks.timing import median_and_range
from moddepth_jax.conversion.families import CONFIG_FILE, config_of
from moddepth_jax.conversion.hugging_face import export_params
from moddepth_jax.training.summary import num_parameters, versions
from moddepth_jax.training.tables import column_per_row, fixed
from moddepth_jax.training.train_step import init_state

PACKAGES = ('torch', 'transformers')
FRAMEWORKS = {'jax': 'JAX', 'torch': 'PyTorch'}
MODULES = {'jax': 'jax_steps', 'torch': 'pytorch_steps'}
LOSS_TOLERANCE = 1e-4  # relative, for the losses of a few steps in float32
SHAPES = ('16x256x6x128x384x257', '4x1024x8x256x704x257', '2x2048x8x256x704x8192')


def write_folder(folder: pathlib.Path, shape: Shape) -> int:
    """Write what both processes read; return the number of parameters.

    config.json and model.safetensors are the initial model in Hugging Face's format, tokens.npy is
    the batch of random ids as int32 [inputs or labels, B, T], and setting.json the rest.
    """
    hparams = make_hparams(shape)
    params = jax.jit(lambda: init_state(hparams, STEPS).params)()
    ids = {'bos_token_id': None, 'eos_token_id': None}
    config = config_of(hparams.model, 'float32', shape.length, ids)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    export_params(folder, hparams, params, 'float32')
    rng, of = np.random.default_rng(0), hparams.optimizer
    rows_BT = rng.integers(0, shape.ids, (shape.rows, shape.length + 1), dtype=np.int32)
    np.save(folder / 'tokens.npy', np.stack([rows_BT[:, :-1], rows_BT[:, 1:]]))
    adamw = {'lr': of.learning_rate, 'betas': (of.b1, of.b2), 'eps': of.eps}
    adamw['weight_decay'] = of.weight_decay
    setting = {'shape': shape, 'steps': STEPS, 'clip_norm': of.clip_norm, 'adamw': adamw}
    (folder / 'setting.json').write_text(json.dumps(setting))
    return num_parameters(params)


def train_in(framework: str, folder) -> dict:
    """Train in a process of this framework and return what it prints."""
    command = [sys.executable, '-m', f'{__package__}.{MODULES[framework]}', str(folder)]
    env = os.environ | {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        how = ': '.join([f'exit status {done.returncode}', *last])
        raise ValueError(f'training in {FRAMEWORKS[framework]} failed: {how}')
    return json.loads(done.stdout.splitlines()[-1])


def check_losses(jax_losses: list[float], torch_losses: list[float]):
    """Raise ValueError if the losses of some step differ, because the work does then."""
    for step, (ours, theirs) in enumerate(zip(jax_losses, torch_losses, strict=True), 1):
        if not abs(ours - theirs) <= LOSS_TOLERANCE * theirs:
            right = f'must be that of PyTorch, {theirs:.6f}'
            raise ValueError(f'loss of step {step}, {ours:.6f} in JAX: {right}')


def _compare(shape, repeats):
    """Return the measurements of a shape: median seconds of a step, peak memory, and ratios.

    Raises ValueError if a process fails, or if the losses differ.
    """
    rounds = {framework: [] for framework in FRAMEWORKS}
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_folder(pathlib.Path(folder), shape)
        for _ in range(repeats):
            for framework, found in rounds.items():
                found.append(train_in(framework, folder))
            check_losses(*(found[-1]['losses'] for found in rounds.values()))
    row = {'parameters': parameters}
    for framework, found in rounds.items():
        seconds = np.array([np.median(one['seconds'][1:]) for one in found])
        row[f'{framework}_seconds'] = seconds.tolist()
        row[f'{framework}_bytes'] = [one['peak_bytes'] for one in found]
        row[f'{framework}_last_loss'] = found[-1]['losses'][-1]
    for what, name in (('seconds', 'time_ratio'), ('bytes', 'memory_ratio')):
        row |= median_and_range(name, np.divide(row[f'jax_{what}'], row[f'torch_{what}']))
    return row


def _lines():
    spread, lines = '{0[0]:.2f} to {0[1]:.2f}'.format, {}

    def median(scale, digits):
        return lambda values: fixed(digits, scale)(np.median(values))

    for name, title in FRAMEWORKS.items():
        lines[f'{title}, ms a step'] = (f'{name}_seconds', median(1e3, 0))
    lines['time, JAX / PyTorch'] = ('time_ratio', fixed(2))
    lines['range'] = ('time_ratio_range', spread)
    for name, title in FRAMEWORKS.items():
        lines[f'{title}, peak memory, GiB'] = (f'{name}_bytes', median(2**-30, 2))
    return lines | {
        'memory, JAX / PyTorch': ('memory_ratio', fixed(2)),
        'parameters, million': ('parameters', fixed(1, 1e-6)),
        'last loss in JAX': ('jax_last_loss', fixed(4)),
        'last loss in PyTorch': ('torch_last_loss', fixed(4)),
    }


def parse_shape(text: str) -> Shape:
    """Parse ROWSxLENGTHxLAYERSxWIDTHxD_FFxIDS. Raises ValueError, one line."""
    sizes = text.split('x')
    valid = len(sizes) == 6 and all(size.isdecimal() and int(size) for size in sizes)
    if not valid or int(sizes[3]) % HEAD_DIM:
        right = f'six numbers such as {SHAPES[0]}, the width a multiple of {HEAD_DIM}'
        raise ValueError(f'--shapes={text}: must be {right}')
    return Shape(*map(int, sizes))


def pytorch(*, shapes: list[str] = SHAPES, repeats: int = 5):
    """One training step of the dense model and of Hugging Face's Llama in PyTorch, on the CPU.

    Both have the same initial parameters, batch and optimizer (AdamW, fused in PyTorch). They train
    in turn, in processes of their own, with their default numbers of threads. A shape whose losses
    differ has failed. Needs the packages torch and transformers.

    Args:
      shapes: ROWSxLENGTHxLAYERSxWIDTHxD_FFxIDS, the width in heads of 64.
      repeats: rounds, of one process each.
    """
    parsed = [parse_shape(text) for text in shapes]
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            right = 'run: pip install torch transformers'
            raise ValueError(f'pytorch: the package {package} is not installed; {right}')
    rows = []
    for text, shape in zip(shapes, parsed, strict=True):
        try:
            row = _compare(shape, repeats)
        except ValueError as error:  # other shapes can still run
            print(f'{text}: {error}', file=sys.stderr)
            row = {'failed': str(error)}
        rows.append(shape._asdict() | row)
    heads = ['rows, length, layers, width, d_ff, ids']
    heads += [', '.join(str(row[name]) for name in Shape._fields) for row in rows]
    title = 'train step on the CPU, float32'
    installed = {package: importlib.metadata.version(package) for package in PACKAGES}
    result = {'versions': versions() | installed, 'steps': STEPS, 'repeats': repeats, 'rows': rows}
    yield result, [column_per_row(title, heads, _lines(), rows)]
