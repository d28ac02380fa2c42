"""Starts launch.train for tests that kill, stop or starve it, and reads the workdir."""

import json
import os
import pathlib
import re
import subprocess
import sys

from moddepth_jax.training.metrics import read_metrics
from tests.launch.commands import write_words

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS = 300
TIMES = {'tokens_per_second', 'flops_per_second', 'data_wait_fraction', 'peak_memory_bytes'}
SHA256 = re.compile('[0-9a-f]{64}')

CONFIG = """
from configs import base


def get_config():
    config = base.get_config()
    model, training = config.model, config.training
    model.num_layers, model.d_model, model.d_ff = 1, 32, 64
    model.num_heads, model.num_kv_heads, model.head_dim = 4, 2, 8
    model.routing.router, model.routing.layers = 'learned', '0'
    config.data.source = {source!r}
    config.data.sequence_length, config.data.batch_size = 32, 4
    training.num_steps, training.checkpoint_every, training.log_every = 300, 20, 1
    config.evaluation.every, config.evaluation.num_batches = 50, 1
    config.evaluation.final_batches = 2
    config.report.sample_tokens, config.report.heatmap_tokens = 4, 8
    {changes}
    return config
"""

# launch.train with slow steps: JAX looks for a SIGTERM once a second.
SLOWLY = """
import time

from launch import cli, train
from moddepth_jax.data.pipeline import Dataset

train_batch = Dataset.train_batch


def train_batch_slowly(*arguments):
    time.sleep(0.04)
    return train_batch(*arguments)


Dataset.train_batch = train_batch_slowly
cli.run(train.main)
"""


def rows_of(workdir):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(workdir)]


class Runs:
    """Starts of launch.train on fake devices; 0 devices: launch.local sets them.

    `folder` holds the text to train on, the config, the cache of programs and the workdirs.
    `changes` are knobs that differ from CONFIG, with double underscores for dots.
    """

    def __init__(self, folder, devices=1, **changes):
        write_words(folder, count=8, length=2000)
        (folder / 'train_slowly.py').write_text(SLOWLY)
        lines = [f'config.{name.replace("__", ".")} = {changes[name]!r}' for name in changes]
        self.config = folder / 'config.py'
        self.config.write_text(
            CONFIG.format(source=str(folder / '*.txt'), changes='\n    '.join(lines))
        )
        self.num_steps = changes.get('training__num_steps', NUM_STEPS)
        self.evaluation_every = changes.get('evaluation__every', 50)
        self.folder = folder
        self.environment = os.environ | {
            'PYTHONPATH': f'{ROOT}{os.pathsep}{folder}',
            'XDG_CACHE_HOME': str(folder / 'cache'),
            'JAX_ENABLE_COMPILATION_CACHE': 'true',
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
        }
        if devices:
            flags = f'--xla_force_host_platform_device_count={devices}'
            self.environment |= {'XLA_FLAGS': flags, 'NPROC': str(2 * devices)}

    def start(self, name, act=lambda process, out: None, flags=(), module=('launch.train',)):
        """Train in the workdir `name`, or resume there; return (status, stdout, stderr).

        Meanwhile act(process, out) is called, with the file of its stdout.
        """
        workdir = self.folder / name
        arguments = [f'--config={self.config}', f'--workdir={workdir}', *flags]
        command = [sys.executable, '-m', *module, *arguments]
        out, err = (self.folder / f'{workdir.name}.{stream}' for stream in ('out', 'err'))
        with open(out, 'w') as stdout, open(err, 'w') as stderr:
            files = {'stdout': stdout, 'stderr': stderr}
            with subprocess.Popen(
                command, env=self.environment, cwd=self.folder, **files
            ) as process:
                try:
                    act(process, out)
                    process.wait(timeout=300)
                finally:
                    process.kill()
        return process.returncode, out.read_text(), err.read_text()

    def finish(self, name, **how):
        status, out, err = self.start(name, **how)
        assert status == 0, out + err
        assert 'Next:' in out
        return out

    def result(self, name):
        """Return (digest of the final state, held-out loss, rows of metrics without times)."""
        summary = json.loads((self.folder / name / 'summary.json').read_text())
        assert summary['final_step'] == self.num_steps
        assert SHA256.fullmatch(summary['state_sha256'])
        return summary['state_sha256'], summary['eval'], rows_of(self.folder / name)

    def check_rows(self, rows):
        """Check for one row for each step and each evaluation, in order."""
        steps = list(range(1, self.num_steps + 1))
        assert [row['step'] for row in rows if 'loss' in row] == steps
        due = [s for s in steps if s % self.evaluation_every == 0 or s == self.num_steps]
        assert [row['step'] for row in rows if 'eval/loss' in row] == due


def last_row(workdir):
    """Return the last complete line of metrics.jsonl, or {}."""
    try:
        return json.loads((workdir / 'metrics.jsonl').read_bytes().split(b'\n')[-2])
    except (FileNotFoundError, IndexError):
        return {}


def last_step(workdir):
    return last_row(workdir).get('step', 0)
