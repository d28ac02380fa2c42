"""Creates output folders atomically, and new runs from parameters or from a checkpoint."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil

from moddepth_jax.data.directory import read_json

IMPORT = 'hugging face'  # `from` in the note of an import
SOURCE_FILES = 'hugging_face'  # folder of a run with other files of the imported checkpoint


def check_new_folder(flag: str, folder: str):
    """Raise ValueError if `folder` exists and is not an empty directory, or is a mount point."""
    path = pathlib.Path(folder)
    if os.path.ismount(os.path.realpath(path)):  # no folder can be renamed to it
        raise ValueError(f'--{flag}={folder}: is a mount point; must be a new folder in it')
    if path.exists() and not path.is_dir():
        raise ValueError(f'--{flag}={folder}: is a file; must be a new folder')
    if path.is_dir() and any(path.iterdir()):
        right = 'must be new or empty; remove it or name another'
        raise ValueError(f'--{flag}={folder}: holds {next(path.iterdir()).name!r}; {right}')


def check_source(flag: str, folder: str):
    """Raise ValueError if `folder` is a model name or URL, or belongs to another flag."""
    url = re.match(r'https?://(?:www[.])?(?:huggingface|hf)[.]co/(.*)', folder)
    name = re.split('/(?:tree|blob|resolve)/|[?#]', url[1])[0].strip('/') if url else folder
    known = re.fullmatch(r'\w[\w.-]*(/\w[\w.-]*)?', name)  # ORGANISATION/NAME, or an old NAME
    if flag == 'from_hf' and known and (url or not os.path.lexists(folder)):
        full = name if '/' in name else f'ORGANISATION/{name}'
        right = f'download it first: hf download {full} --local-dir {name.rpartition("/")[2]}'
        raise ValueError(f'--from_hf={folder}: no such folder; {right}')
    right = 'must be a run of launch.train, or a Hugging Face model'
    config = read_json(pathlib.Path(folder, 'config.json'), right) or {}
    if flag == 'from_hf' and 'schema_version' in config:
        raise ValueError(
            f'--from_hf={folder}: is a run; write --from_workdir={shlex.quote(folder)}'
        )
    if flag != 'from_hf' and 'model_type' in config:
        right = f'write --from_hf={shlex.quote(folder)}'
        raise ValueError(f'--{flag}={folder}: is a Hugging Face model; {right}')
    if flag != 'from_hf' and not config:
        from moddepth_jax.training.run_dir import read_config

        try:
            read_config(folder)
        except ValueError as error:
            line = str(error).replace('--workdir=', f'--{flag}=', 1)
            raise ValueError(line) from None


@contextlib.contextmanager
def atomic_folder(flag: str, folder: str):
    """Yield a temporary folder that is renamed to `folder`, or removed on an error.

    Links are followed. Parents of `folder` are created, and are kept on an error.
    """
    check_new_folder(flag, folder)
    path = pathlib.Path(os.path.realpath(folder))  # a link cannot be replaced by a folder
    part = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        part.mkdir(parents=True)
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--{flag}={folder}: {error.strerror}; {right}') from None
    try:
        yield part
        os.rename(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_note(workdir: str) -> dict:
    """Return the content of convert.json; {} if the run was not converted."""
    from moddepth_jax.training.run_dir import NOTE_FILE

    return read_json(pathlib.Path(workdir) / NOTE_FILE, 'convert the model again') or {}


def trained_on(workdir: str, fingerprint: dict) -> dict[str, float]:
    """Return the held-out fraction of each text that a run or its parents were trained on.

    `fingerprint` is that of the run's data. Texts are named as in `fractions_of_texts`. Parents are
    the runs that it was converted from, which convert.json lists.
    """
    from moddepth_jax.data.pipeline import fractions_of_texts

    return read_note(workdir).get('trained_on', {}) | fractions_of_texts(fingerprint)


def branch_run(source: str, step: int | None, workdir: str) -> tuple[int, int]:
    """Copy the run in `source` as it was after `step` (default: the newest) to a new `workdir`.

    The checkpoint includes the optimizer state and the position in the data. Returns the step and
    the planned number of steps. Raises ValueError if there is no good checkpoint.
    """
    from moddepth_jax.data.tokenizers.tokenizer import DIRECTORY
    from moddepth_jax.training.manifest import read_manifest
    from moddepth_jax.training.metrics import METRICS_FILE, WINDOWS
    from moddepth_jax.training.run_dir import (
        CONFIG_FILE,
        NOTE_FILE,
        SOURCE_FILE,
        checkpoint_steps,
        missing_step,
    )

    kept = checkpoint_steps(source)
    step = max(kept, default=0) if step is None else step
    if step not in kept:
        raise ValueError(missing_step(source, step, ' after a step', 1))
    with atomic_folder('workdir', workdir) as folder:
        files = CONFIG_FILE, SOURCE_FILE, NOTE_FILE, METRICS_FILE
        paths = map(pathlib.Path(source).joinpath, files)
        # Training drops the rows of later steps, in these logs as in the metrics.
        for path in (*filter(pathlib.Path.exists, paths), *pathlib.Path(source).glob(WINDOWS)):
            shutil.copyfile(path, folder / path.name)
        for name in (DIRECTORY, SOURCE_FILES, os.path.join('checkpoints', str(step))):
            if os.path.exists(os.path.join(source, name)):
                shutil.copytree(os.path.join(source, name), folder / name)
        try:
            content = read_manifest(folder / 'checkpoints' / str(step))
        except ValueError as error:
            right = 'name another --step'
            raise ValueError(f'--step={step}: checkpoint of {source}: {error}; {right}') from None
    return step, content['metadata']['num_steps']


def check_new_run(hparams, tokenizer):
    """Raise ValueError, one line, for a run that `launch.train` would refuse on any machine.

    Checks the steps, the teacher (`tokenizer` is that of the run), the dtype, the globs of
    parameters, and routers and streams of a config file. The mesh and model.attention are not
    checked, since a run may be prepared on another machine.
    """
    from moddepth_jax.model.own_choices import check_own_choices
    from moddepth_jax.model.transformer import check_dtype
    from moddepth_jax.training.plan import resolve_steps
    from moddepth_jax.training.teacher import check_teacher
    from moddepth_jax.training.trainable import check_trainable

    resolve_steps(_not_extended(hparams))
    check_teacher(hparams, tokenizer)
    check_dtype(hparams.model)
    check_own_choices(hparams)
    check_trainable(hparams)


def _not_extended(hparams):
    """These hyper-parameters for a run that extends no other."""
    training = dataclasses.replace(hparams.training, extended_from=0)
    return dataclasses.replace(hparams, training=training)


def write_new_run(
    workdir: str, hparams, params, averages, dataset, note: dict, source_files=(), config=None
):
    """Create a run before its first step in a new `workdir`, from which launch.train can start.

    Args:
      workdir: new directory.
      hparams: of the run.
      params: parameters of its TrainState.
      averages: averages of its TrainState.
      dataset: from `make_dataset`.
      note: content of convert.json.
      source_files: files to copy to the folder `hugging_face`.
      config: the --config file, as `save_source` takes it.
    """
    import jax

    from moddepth_jax.training.checkpoint import Checkpoints
    from moddepth_jax.training.plan import resolve_steps
    from moddepth_jax.training.run_dir import (
        NOTE_FILE,
        open_workdir,
        save_source,
        save_tokenizer,
    )
    from moddepth_jax.training.summary import initial_metadata
    from moddepth_jax.training.train_step import TrainState, init_optimizer

    hparams = _not_extended(hparams)
    num_steps, zero = resolve_steps(hparams), jax.numpy.zeros((), 'int32')
    optimizer_state = jax.jit(lambda params: init_optimizer(hparams, num_steps, params))(params)
    state = TrainState(zero, params, averages, optimizer_state, zero, zero, hparams, num_steps)
    with atomic_folder('workdir', workdir) as folder:
        open_workdir(folder, dataclasses.asdict(hparams))
        save_source(folder, config)
        save_tokenizer(folder, hparams, dataset.tokenizer)
        for file in source_files:
            (folder / SOURCE_FILES).mkdir(exist_ok=True)
            shutil.copyfile(file, folder / SOURCE_FILES / file.name)
        text = json.dumps(note, indent=2, ensure_ascii=False) + '\n'
        (folder / NOTE_FILE).write_text(text, encoding='utf-8')
        with Checkpoints(folder / 'checkpoints', keep=1) as checkpoints:
            checkpoints.save(0, state, initial_metadata(dataset, num_steps))
