"""The directory of a run: its config, its config file and its tokenizer."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import sys

from moddepth_jax.data.directory import LOCK_FILE, lock_directory, read_json, write_atomically
from moddepth_jax.data.tokenizers.tokenizer import (
    DIRECTORY,
    Tokenizer,
    make_tokenizer,
    save_atomically,
)
from moddepth_jax.hparams import Hparams, from_config, registry, unknown_knobs
from moddepth_jax.hparams.checks import did_you_mean
from moddepth_jax.training.manifest import MANIFEST_FILE

CONFIG_FILE = 'config.json'
SUMMARY_FILE = 'summary.json'  # a finished run has one
NOTE_FILE = 'convert.json'  # of launch.convert
SOURCE_FILE = 'config.py'  # copy of the --config file, which may define what the config names
SCHEMA_VERSION = 1
# Knobs that were added later, with the values that keep the behavior of older runs.
OLDER_RUNS = {
    'model.across_documents': False,
    'model.routing.part': 'block',
    'model.routing.capacity_form': 'fraction',
    'model.routing.log_length_max': 2048,
    'model.routing.capacity_stages': '',
    'model.routing.select_per': 'row',
    'model.routing.gate_scale': 1.0,
    'model.routing.loop_update': 'auto',
    'model.routing.loop_keys': 'own',
    'model.routing.balance_weight': 0.1,
    'model.routing.z_loss': 1e-5,
    'model.routing.train_rule': 'top_c',
    'model.routing.threshold_warmup': 0.2,
    'model.routing.threshold_decay': 0.99,
    'model.routing.cache_capacity': 1.5,
    'model.routing.overflow': 'grow',
    'report.top_p': 1.0,
    'data.log_windows': False,
    'data.mixture': '',
    'data.encoding': 'utf-8',
    'model.depth.stream': 'residual',
    'model.depth.slots': 'none',
    'model.depth.attention_slot_projection': False,
    'model.depth.slot_keys': 'none',
    'model.depth.skipped_slots': 'none',
    'model.depth.slot_window': 0,
    'model.depth.gradient_dtype': 'none',
    'model.looped_layers': 'none',
    'model.loops': 1,
    'model.loop_order': 'cycle',
    'model.loop_norms': 'shared',
    'model.loop_embeddings': 'none',
    'model.loop_exit_threshold': 0.0,
    'training.loops': [],
    'model.embedding_residual': 'none',
    'model.value_embeddings': 'none',
    'model.rope_scaling': 'none',
    'model.attention_bias': 'none',
    'model.depth.value_mix': 'none',
    'model.depth.sparse_layers': 0,
    'model.depth.sublayers_per_source': 0,
    'model.depth.hyper_form': 'none',
    'model.depth.num_streams': 0,
    'model.depth.mudd_ways': 'none',
    'model.depth.mudd_weights': 'none',
    'model.depth.value_stride': 0,
    'model.depth.recent_layers': 0,
    'model.experts.choice': 'none',
    'model.experts.layers': 'every:1',
    'model.experts.num_routed': 8,
    'model.experts.num_shared': 1,
    'model.experts.num_noop': 0,
    'model.experts.top_k': 2,
    'model.experts.d_ff': 128,
    'model.experts.scores': 'softmax',
    'model.experts.route_scale': 1.0,
    'model.experts.row_capacity': 0,
    'model.experts.balance_weight': 0.001,
    'model.experts.z_loss': 0.0,
    'model.experts.threshold_decay': 0.99,
    'model.experts.product': 'auto',
    'model.adapters.rank': 0,
    'model.adapters.alpha': 16.0,
    'model.adapters.params': ['*/attention/*', '*/mlp/*'],
    'training.max_unsharded': 1.0,
    'optimizer.decay_embeddings': True,
    'optimizer.name': 'adamw',
    'optimizer.schedule': 'cosine',
    'optimizer.trainable': ['*'],
    'optimizer.rate_factors': [],
    'optimizer.decay_fraction': 0.2,
    'training.loss_chunk': 0,
    'training.distill_from': '',
    'training.distill_weight': 0.5,
    'training.distill_temperature': 1.0,
    'training.extended_from': 0,
}

_NEWER = 'it was edited, or a newer version wrote it, which can resume this run'
_WRITABLE = 'must be a directory that can be written'
_MOST_DIFFERENCES = 4  # in a message


def temporary_files(names: set[str], file: str) -> set[str]:
    """Return those of `names` that a killed `write_atomically` may have left behind of `file`."""
    return {name for name in names if name.startswith(f'{file}.') and name.endswith('.tmp')}


def open_workdir(
    path: str | os.PathLike, config: dict, volatile: tuple[str, ...] = ()
) -> list[str]:
    """Make `path` the directory of a run of `config`, or check that it is one already.

    A new or empty directory gets `config.json`; an existing run is not changed. The caller then
    uses `lock_directory` and `update_config`.

    Args:
      path: directory of the run.
      config: config of the run, as nested dicts.
      volatile: dotted names of fields or groups that may differ from the stored config.

    Returns:
      Lines for the user, like `read_config`.

    Raises:
      ValueError: one line, before anything is written, if `path` is a file, holds something else,
        or belongs to a running run or to another config. The message has the first fields that
        differ, with both values.
    """
    path = pathlib.Path(path)
    right = 'use another --workdir'
    if re.search('[\x00-\x1f\x7f-\x9f\ud800-\udfff]', str(path)):  # cannot be printed in a line
        right = 'must be text without line ends and other control characters'
        raise ValueError(f'--workdir={str(path)!r}: {right}')
    if path.exists() and not path.is_dir():
        raise ValueError(f'--workdir={path}: is a file; {right}')
    if not (path / CONFIG_FILE).exists():
        names = {file.name for file in path.iterdir()} if path.exists() else set()
        # A run that was killed before it wrote its config may have left these.
        others = sorted(names - {LOCK_FILE} - temporary_files(names, CONFIG_FILE))
        if others:
            found = f'has {others[0]!r} but no {CONFIG_FILE}, so it is not the directory of a run'
            raise ValueError(f'--workdir={path}: {found}; {right}')
        try:
            path.mkdir(parents=True, exist_ok=True)
            with lock_directory(path):
                if not (path / CONFIG_FILE).exists():
                    update_config(path, config)
        except OSError as error:
            raise ValueError(f'--workdir={path}: {error.strerror}; {_WRITABLE}') from None
    stored = shlex.quote(str(path / CONFIG_FILE))
    return check_config(path, config, volatile, f'--config={stored} resumes that run; or ')


def update_config(path: str | os.PathLike, config: dict, extended: list | None = None) -> None:
    """Write a `config` that `open_workdir` accepted to config.json; the caller holds the lock.

    `extended` has {step, num_steps} of each extension of the run.
    """
    content = {'schema_version': SCHEMA_VERSION, 'config': config}
    content |= {'extended': extended} if extended else {}
    text = json.dumps(content, indent=2, sort_keys=True) + '\n'
    file = pathlib.Path(path) / CONFIG_FILE
    if not file.exists() or file.read_text(encoding='utf-8') != text:
        write_atomically(file, text)


def may_differ(name: str, volatile: tuple[str, ...]) -> bool:
    """Return whether a knob is one of `volatile`, or in one of its groups (dotted names)."""
    return any(f'{name}.'.startswith(f'{field}.') for field in volatile)


def check_config(
    path: str | os.PathLike, config: dict, volatile: tuple[str, ...] = (), right: str = ''
) -> list[str]:
    """Raise ValueError, one line, if `path` is not a run of `config`; see `open_workdir`.

    `right` comes before the remedy that always helps, another --workdir.
    """
    from flax import traverse_util  # imports JAX, which is slow; errors come before it

    stored, added = _read_config(path)
    stored, wanted = (
        traverse_util.flatten_dict(side, sep='.')
        for side in (stored, json.loads(json.dumps(config)))
    )
    differ = []  # (name, value in config.json, value in this run)
    for name in sorted(wanted.keys() | stored.keys()):
        old, new = stored.get(name, 'absent'), wanted.get(name, 'absent')
        if old != new and not may_differ(name, volatile):
            differ.append((name, old, new))
    if differ:
        name, old, new = differ[0]
        found = f'{name} is {old!r} in its {CONFIG_FILE} and {new!r} in this run'
        more = [f'{name} {old!r} and {new!r}' for name, old, new in differ[1:_MOST_DIFFERENCES]]
        more += [f'{len(differ) - _MOST_DIFFERENCES} more'] * (len(differ) > _MOST_DIFFERENCES)
        found += f' (also {", ".join(more)})' * bool(more)
        raise ValueError(f'--workdir={path}: {found}; {right}use another --workdir')
    added = {name: value for name, value in added.items() if not may_differ(name, volatile)}
    return _note(path, added)


def read_config(path: str | os.PathLike) -> tuple[dict, list[str]]:
    """Read the config of a run, as nested dicts of JSON values, and lines for the user.

    A knob that was added after the run gets its value in `OLDER_RUNS`, and a line lists these
    knobs. Raises ValueError, one line, if there is no readable config.json.
    """
    config, added = _read_config(path)
    return config, _note(path, added)


def checkpoint_steps(path: str | os.PathLike, first: int = 1) -> list[int]:
    """Return the steps of the finished checkpoints of a run, from `first` on, ascending."""
    manifests = pathlib.Path(path).glob(f'checkpoints/*/{MANIFEST_FILE}')
    names = [file.parent.name for file in manifests]
    return sorted(step for step in map(int, filter(str.isdecimal, names)) if step >= first)


def read_hparams(workdir: str | os.PathLike) -> tuple[Hparams, list[str]]:
    """Read the hyper-parameters of a run, and lines for the user, like `read_config`.

    Raises ValueError, one line, if there is no run, or if this version cannot read its config.
    """
    workdir = pathlib.Path(workdir)
    config, notes = read_config(workdir)
    try:
        return build_stored(workdir, config), notes
    except ValueError as error:
        raise ValueError(f'{workdir / CONFIG_FILE}: {error}') from None


def missing_step(path: str | os.PathLike, step: int, found: str = '', first: int = 0) -> str:
    """Return the error for a --step without a checkpoint; `found` adds what is wrong with it."""
    steps = ', '.join(map(str, checkpoint_steps(path, first))) or 'none'
    return f'--step={step}: no checkpoint of {path}{found}; steps kept: {steps}'


def read_finished(path: str | os.PathLike) -> dict:
    """Read the config of a finished run; raises ValueError, one line, for anything else."""
    try:
        config, _ = read_config(path)
    except ValueError as error:
        raise ValueError(str(error).removeprefix('--workdir=')) from None
    if not os.path.exists(os.path.join(path, SUMMARY_FILE)):
        stored, workdir = shlex.quote(f'{path}/{CONFIG_FILE}'), shlex.quote(str(path))
        command = f'python -m launch.train --config={stored} --workdir={workdir}'
        raise ValueError(f'{path}: has not finished (no {SUMMARY_FILE}); finish it: {command}')
    return config


def has_teacher(path: str | os.PathLike) -> bool:
    """Return whether `path` has a config.json of a run with a teacher."""
    if not (pathlib.Path(path) / CONFIG_FILE).exists():
        return False
    training = read_config(path)[0].get('training')
    return isinstance(training, dict) and bool(training.get('distill_from'))


def check_fresh(path: str | os.PathLike, skipped: list[str], extended_from: int = 0):
    """Raise ValueError, one line, unless a run without a good checkpoint may start at step 0.

    A run of launch.convert may not, since it began from other parameters; nor one whose number of
    steps was `extended_from` another, since its schedule is that of a run with earlier steps.
    `skipped` has a line for each bad checkpoint.
    """
    if extended_from and skipped and checkpoint_steps(path):
        found = f'its number of steps was changed from {extended_from}, and no checkpoint is good'
        right = 'restore it, or train anew in another folder'
        raise ValueError(f'--workdir={path}: {found} ({skipped[0]}); {right}')
    if (pathlib.Path(path) / NOTE_FILE).exists():
        found = f'{NOTE_FILE} says that it began from converted parameters, and it has no good '
        found += f'checkpoint ({skipped[0] if skipped else "none is there"})'
        raise ValueError(f'--workdir={path}: {found}; convert it again, into another folder')


def check_writable(folder: pathlib.Path):
    """Raise ValueError, one line, if `folder` exists but is not a writable directory."""
    usable = folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    if os.path.lexists(folder) and not usable:
        raise ValueError(f'{folder}: {_WRITABLE}')


def check_source(path: str | os.PathLike, source: str | os.PathLike | None, hparams: Hparams):
    """Raise ValueError, one line, if code that a trained run uses is not in the --config file.

    This is so if `hparams` name a choice, such as a router, which a config file defines, and the
    text of `source` differs from the run's copy. With None there is nothing to compare.
    """
    file = pathlib.Path(path) / SOURCE_FILE
    if source is None or not file.is_file() or not checkpoint_steps(path):
        return
    added = next(filter(None, (table.added(hparams) for table in registry.ALL)), None)
    kept, new = (pathlib.Path(each).read_bytes() for each in (file, source))
    if added and kept != new:
        stored = shlex.quote(os.fspath(file.with_name(CONFIG_FILE)))
        found = f'{source} differs from its {SOURCE_FILE}, and may define {added} anew'
        right = f'--config={stored} resumes that run; or use another --workdir'
        raise ValueError(f'--workdir={path}: {found}; {right}')


def save_source(path: str | os.PathLike, source: str | os.PathLike | None):
    """Copy the --config file into the directory of a run; with None there is no such file."""
    if source is not None:
        content = pathlib.Path(source).read_bytes()
        file = pathlib.Path(path) / SOURCE_FILE
        if not file.is_file() or file.read_bytes() != content:
            write_atomically(file, content)


def build_stored(path: str | os.PathLike, config: dict) -> Hparams:
    """Build the hyper-parameters of a run, which may use a router that its config file defines.

    If `from_config` refuses the config, and this names a choice that is not known, the run's copy
    of the config file is imported, and then it is tried again. A line on stderr says so first,
    because the import runs the code of whoever made the run. Raises ValueError, one line, if that
    fails, too, or if the import fails.
    """
    try:
        return from_config(config)
    except ValueError as error:
        refusal, file = str(error), pathlib.Path(path) / SOURCE_FILE
        unknown = next(filter(None, (table.unknown(config) for table in registry.ALL)), None)
        if not unknown or not file.exists():
            raise
    found = f'{unknown} of {CONFIG_FILE}'
    print(f'running {file}, which may define {found}', file=sys.stderr, flush=True)
    spec = importlib.util.spec_from_file_location('config_file_of_a_run', file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        found = f'{type(error).__name__}: {error}'
        raise ValueError(f'{refusal}; {file}, which may define it, fails: {found}') from None
    return from_config(config)


def _note(path, added):
    knobs = ', '.join(f'{name}={value!r}' for name, value in added.items())
    what = 'older than these knobs, which get the values that keep its behavior'
    return [f'{pathlib.Path(path) / CONFIG_FILE}: {what}: {knobs}'] if added else []


def _meant(path):
    """Suggests a run for an error message: one above `path`, below it, or with a similar name."""
    for folder in path.parents:
        if (folder / CONFIG_FILE).is_file():
            return f'; did you mean {folder}?'
    if inside := sorted(found.parent for found in path.glob('*/checkpoints')):
        more = ', ...' * bool(inside[3:])
        return f', such as {", ".join(map(str, inside[:3]))}{more}'
    runs = [found.parent for found in path.parent.glob(f'*/{CONFIG_FILE}')]
    return did_you_mean(str(path), sorted(map(str, runs)))


def _read_config(path):
    """Return the config, and {dotted name: value} of the knobs that it lacked."""
    file = pathlib.Path(path) / CONFIG_FILE
    right = f'{CONFIG_FILE} must be as launch.train wrote it'
    stored = read_json(file, right, {'schema_version': int, 'config': dict})
    if stored is None:
        right = f'must be the directory of a run of launch.train{_meant(pathlib.Path(path))}'
        raise ValueError(f'--workdir={path}: holds no {CONFIG_FILE}; {right}')
    config = stored['config']
    if (version := stored['schema_version']) != SCHEMA_VERSION:
        raise ValueError(f'{file}: schema_version={version}; must be {SCHEMA_VERSION}; {_NEWER}')
    for name, value in unknown_knobs(config).items():
        raise ValueError(f'{file}: {name}={value!r}: no such knob; {_NEWER}')
    model, added = config.get('model'), {}
    if isinstance(model, dict) and 'routing' in model:
        for group in ('depth', 'experts', 'adapters'):  # added after the group routing
            model.setdefault(group, {})
    for name, value in OLDER_RUNS.items():
        *groups, knob = name.split('.')
        group = config
        for part in groups:  # `from_config` reports a missing group
            group = group.get(part) if isinstance(group, dict) else None
        if isinstance(group, dict) and knob not in group:
            group[knob] = added[name] = value
    return config, added


def save_tokenizer(workdir: str | os.PathLike, hparams: Hparams, tokenizer: Tokenizer) -> None:
    """Save the tokenizer to workdir/tokenizer/, so that the run needs no other file later.

    The byte tokenizer needs no file. The caller holds the lock of `workdir`. After a kill at any
    moment there is a complete folder or none. Raises ValueError, one line, if the folder has
    another tokenizer or cannot be written.
    """
    if hparams.data.tokenizer == 'bytes':
        return
    folder = pathlib.Path(workdir) / DIRECTORY
    if folder.exists():
        stored = make_tokenizer(folder)
        if stored.sha256 != tokenizer.sha256:
            right = 'restore the one that the run began with, or use another --workdir'
            found = f'has {stored.name}, sha256 {stored.sha256}'
            now = f'the run has {tokenizer.name}, sha256 {tokenizer.sha256}'
            raise ValueError(f'{folder}: {found}, but {now}; {right}')
        return
    try:
        save_atomically(tokenizer, folder)
    except OSError as error:
        raise ValueError(f'--workdir={workdir}: {error.strerror}; {_WRITABLE}') from None
