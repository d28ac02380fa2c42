"""Shared parts of commands: flags, --config, one-line errors, exit status, --help, saved runs."""

import contextlib
import dataclasses
import errno
import functools
import gc
import inspect
import itertools
import json
import os
import pathlib
import re
import shutil
import stat
import sys
import textwrap
import traceback

from absl import app, flags, logging

from launch import flag_errors
from moddepth_jax import hparams
from moddepth_jax.hparams import flag_values, registry

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags defined here belong to the command that calls the function

_CONFIG_HELP = (
    'FILE.py, such as configs/tiny.py (--list shows all), FILE.py:TEXT (TEXT is the argument of '
    'get_config) or WORKDIR/config.json. --config.model.num_layers=12 sets a knob.'
)
_notes = []  # notes of load_saved_run that are not printed yet
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS)
# Set by launch.local for all processes but the first, which reports bad flags for all of them.
REPORTED_BY_LEADER = 'MODDEPTH_REPORTED_BY_LEADER'
_PATHS = (  # flags that are paths
    *('workdir', 'out', 'output', 'results', 'page', 'json', 'data', 'domains', 'prompts'),
    *('from_hf', 'to_hf', 'from_workdir', 'branch'),
)
_HELP = {'-h', '-?', '-help', '--help', '--helpshort', '--helpfull'}
_ROOT = pathlib.Path(__file__).absolute().parents[1]
# Paths of code that is no user's; that in configs/ is.
_OURS = re.compile(re.escape(f'{_ROOT}{os.sep}') + r'(kernels_pallas|launch|moddepth_jax)\b')
_LIBRARIES = '|'.join(re.escape(f'{x}{os.sep}') for x in (sys.prefix, sys.base_prefix))
_OF_LIBRARIES = re.compile(rf'{_LIBRARIES}|.*[/\\](site|dist)-packages[/\\]')
_OUT_OF_MEMORY = (
    'out of device memory; lower data.batch_size, raise training.accumulate_steps, or set '
    'model.remat=block'
)


def run(main, positional: str = '', described=()):
    """Parse the flags, call `main(argv)` and exit the process.

    Exit status: the int that main returns, or 0; 2 with one line on stderr for a bad flag or
    config, a ValueError, or an unusable file; 130 with one line after Ctrl-C; 1 with a traceback
    for any other exception; 75 if another process of the same run was lost. Processes of one run
    end together, and one of them reports an error that several raise.

    Args:
      main: the command.
      positional: what --help says about positional arguments and the flags `described`.
      described: names of flags that `positional` describes.
    """
    flags.DEFINE_boolean('traceback', False, 'Show a traceback for every error.')
    FLAGS.set_gnu_getopt(True)
    if sys.stdout and sys.stdout.errors == 'strict':  # samples may not be encodable
        sys.stdout.reconfigure(errors='backslashreplace')
    parse = functools.partial(_parse, positional=positional, described=described)
    app.run(functools.partial(_call, main), flags_parser=parse)


def define_config(default: str | None = None) -> flags.FlagHolder:
    """Define --config (a ConfigDict, required without a `default`), --print_config and --list."""
    # Imported here because launch.gpu also works without ml_collections.
    from ml_collections import config_flags

    from launch import config_file

    text = _CONFIG_HELP + f' Default: {default}.' * bool(default)
    with _errors_in_one_line():  # config_flags reads a --flagfile here
        holder = config_flags.DEFINE_config_file('config', help_string=text)
    FLAGS['config'].parser = config_file.Parser()
    FLAGS['config'].left_out = default
    flags.mark_flag_as_required('config')
    flags.DEFINE_boolean('print_config', False, 'Print the resolved config as JSON and exit.')
    flags.DEFINE_string('list', None, 'List configs and knobs; --list=TEXT: those with this name.')
    return holder


def config_name() -> str:
    """Return NAME of --config=configs/NAME.py[:TEXT] or NAME/config.json."""
    path = pathlib.Path(os.path.abspath(FLAGS['config'].config_filename.split(':', 1)[0]))
    return path.parent.name if path.suffix == '.json' else path.stem


def _prepare_backend():
    """Give fake CPU devices two threads each (XLA may block otherwise), and silence libraries."""
    counts = re.findall(r'_host_platform_device_count=(\d+)', os.environ.get('XLA_FLAGS', ''))
    if counts and int(counts[-1]) >= 2:
        os.environ.setdefault('NPROC', str(2 * int(counts[-1])))
    if FLAGS['verbosity'].using_default_value:
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_logger().setLevel('ERROR')


def _multihost():
    """The module training.multihost if several processes are initialized, else None."""
    module = sys.modules.get('moddepth_jax.training.multihost')
    return module if module is not None and module.is_initialized() else None


def _call(main, argv):
    """Call main. Processes of one run end together, and at once if one of them is lost."""
    try:
        with _errors_in_one_line():
            if 'print_config' in FLAGS and FLAGS.print_config:
                resolved = hparams.from_config(FLAGS.config)
                return print(json.dumps(dataclasses.asdict(resolved), indent=2))
            try:
                status = main(argv)
                _print_notes()
                if multihost := _multihost():
                    multihost.barrier('end of main')
                gc.freeze()  # collecting the garbage of traces at exit would take most of a second
                return status
            except Exception as error:
                if multihost := _multihost():
                    multihost.exit_if_process_lost(error)
                raise
    except Exception as error:
        if _multihost() is None:
            raise
        traceback.print_exc()
        _exit(1, error)


def _exit(status, error):
    if multihost := _multihost():
        multihost.exit_process(status, error)
    sys.exit(status)


def _parse(argv, positional, described):
    with _errors_in_one_line(quiet=bool(os.environ.get(REPORTED_BY_LEADER))):
        own = argv[1 : argv.index('--') if '--' in argv else None]
        if _HELP & set(own):
            print(_help_text(positional, described))
            sys.exit(0)
        for word, following in itertools.pairwise([*own, '--']):
            asked = re.fullmatch('--?list(=.*)?', word)
            if asked and 'config' in FLAGS:
                from launch import listing

                separate = '' if following.startswith('-') else following
                print(listing.describe(asked[1][1:] if asked[1] else separate))
                sys.exit(0)
        default = FLAGS['config'].left_out if 'config' in FLAGS else None
        given = FLAGS.read_flags_from_files(argv[1:], force_gnu=False)
        if default and not any(re.match('--?config(=|$)', argument) for argument in given):
            # A default of the flag would be loaded before the overrides are known.
            sys.argv[1:] = [f'--config={default}', *argv[1:]]
            argv = list(sys.argv)
        try:
            rest = FLAGS(argv)
        except (flags.Error, ValueError) as error:
            flag_errors.check_words(given, positional, error)
            raise
        flag_errors.check_words(given, positional)
        _check_paths()
        _prepare_backend()
        return rest


def _value(name):
    """The value of a flag; None if the command does not have it."""
    return FLAGS[name].value if name in FLAGS else None


def _check_paths():
    for name in _PATHS:
        if (path := _value(name)) == '':
            raise ValueError(f'--{name}=: is empty; must be a path (is a shell variable unset?)')
        if path:  # shells do not expand ~ after "="
            FLAGS[name].value = os.path.expanduser(path)
    path = _value('json')
    if path is None or path == '-' or not os.path.exists(path):
        return
    found = os.stat(path)  # results replace the content of the file, which a pipe cannot do
    special = not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))
    if special or (sys.stdout and os.path.samestat(found, os.fstat(1))):
        raise ValueError(f'--json={path}: must be a regular file, or - for stdout')


@contextlib.contextmanager
def _errors_in_one_line(quiet=False):
    try:
        yield
    except KeyboardInterrupt as error:
        print('interrupted', file=sys.stderr)
        _exit(130, error)
    except BrokenPipeError as error:  # the reader of stdout is gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        _exit(141, error)
    except Exception as error:
        line = _one_line(error)
        if not line:
            raise
        if '--traceback' in sys.argv:
            traceback.print_exc()
        if not (quiet or getattr(error, 'reported_elsewhere', False)):
            print('error:', ' '.join(line.split()), file=sys.stderr)
        _exit(2, error)


def _one_line(error):
    """The line that describes an error of the user; '' for other errors."""
    if isinstance(error, MemoryError):
        return 'out of memory; lower data.batch_size'
    if _is_of_platform(error):
        given = os.environ.get('JAX_PLATFORMS', '')
        return f'JAX_PLATFORMS={given}: is not available here; unset it, or set it to cpu'
    if isinstance(error, RuntimeError):  # JAX raises this when the device is out of memory
        return _OUT_OF_MEMORY if 'RESOURCE_EXHAUSTED' in str(error) else ''
    if isinstance(error, OSError):
        if error.filename is not None:
            name = error.filename2 or error.filename
            right = '; must be a file' if isinstance(error, IsADirectoryError) else ''
            return f'{name}: {error.strerror or error}{right}'
        users = isinstance(error, (FileNotFoundError, PermissionError))
        return str(error) if users or error.errno in _DISK_ERRORS else ''
    if isinstance(error, flags.Error):
        return flag_errors.describe(error)
    if not isinstance(error, ValueError):
        return ''
    calls = traceback.extract_tb(error.__traceback__)
    raised = 'raise' in (calls[-1].line or '')  # Python itself raises for `a, b = 1, 2, 3`
    ours = raised and not re.search(r'/(jax|flax|numpy)/', calls[-1].filename)
    files = [c for c in calls if os.path.isabs(c.filename)]  # compiled code has no absolute path
    files = [c for c in files if _OURS.match(c.filename) or not _OF_LIBRARIES.match(c.filename)]
    of_user = files and not _OURS.match(files[-1].filename)
    place = f'{files[-1].filename}, line {files[-1].lineno}: ' if of_user else ''
    return place + (str(error) or type(error).__name__) + '; --traceback shows where' * (not ours)


def _is_of_platform(error):
    """Whether JAX cannot start the platform of JAX_PLATFORMS (for some, it only asserts)."""
    if isinstance(error, AssertionError):
        calls = traceback.extract_tb(error.__traceback__)
        return calls[-1].filename.endswith('jax/_src/xla_bridge.py')
    unknown = str(error).startswith('Unable to initialize backend')
    return isinstance(error, RuntimeError) and unknown


def _help_text(positional, described):
    lines = [inspect.cleandoc(sys.modules['__main__'].__doc__ or ''), '']
    lines += ['arguments:', f'  {positional}', ''] * bool(positional)
    rows = {}
    for flag in (flag for flag in flag_errors.own_flags() if flag.name not in described):
        default = ','.join(flag.default) if isinstance(flag.default, list) else flag.default
        text = flag.help.partition(';\n')[0]  # absl adds a line to flags that may be repeated
        text += f' Default: {default}.' if default else ''
        rows[f'--{"[no]" * flag.boolean}{flag.name}'] = text
    return '\n'.join([*lines, 'flags:', *columns(rows)])


def columns(rows: dict[str, str], **options):
    """Yield lines of two columns, the second wrapped to the terminal; `options` are textwrap's."""
    first = max(map(len, rows)) + 4
    width = max(first + 30, shutil.get_terminal_size((100, 24)).columns)
    for name, text in rows.items():
        indents = {'initial_indent': f'  {name}'.ljust(first), 'subsequent_indent': ' ' * first}
        yield textwrap.fill(text, width, placeholder=' ...', **indents, **options)


def define_step():
    """Define --step, which `load_saved_run` reads."""
    flags.DEFINE_integer('step', None, 'Checkpoint to read, such as 600. Default: the newest.', 0)


def define_loops():
    """Define --loops, which `load_saved_run` reads."""
    flags.DEFINE_integer('loops', None, 'How often looped blocks run. Default: as trained.', 1)


def define_exit_threshold():
    """Define --exit_threshold, which `load_saved_run` reads."""
    text = 'A token leaves the loops when its stream changes less than this. Default: as trained.'
    flags.DEFINE_float('exit_threshold', None, text, lower_bound=0.0)


def define_mesh(text: str, default: str | None = None) -> flags.FlagHolder:
    """Define --mesh, whose form is checked before JAX is imported."""
    holder = flags.DEFINE_string('mesh', default, text)
    flags.register_validator('mesh', lambda value: flag_values.mesh_sizes(value or '') is not None)
    return holder


def check_run(workdir: str, looks_ahead: bool = False):
    """Raise ValueError unless `workdir` is a run that has --step and can run --routing.

    This needs no JAX. Several processes check together later. With `looks_ahead`, --routing=top_c
    is allowed.
    """
    from moddepth_jax.hparams.rules import check_causal, check_routing
    from moddepth_jax.training import run_dir

    if not is_alone():
        return
    config, _ = run_dir.read_config(workdir)
    routing, step = map(_value, ('routing', 'step'))
    if step is not None and step not in run_dir.checkpoint_steps(workdir, 0):
        raise ValueError(run_dir.missing_step(workdir, step))
    if routing is not None:
        try:
            resolved = hparams.check_values(config)
        except ValueError:  # the run uses names that its own Python file defines
            resolved, _ = run_dir.read_hparams(workdir)
        (check_routing if looks_ahead else check_causal)(resolved, routing)


def is_alone() -> bool:
    """Return whether this is the only process of the command."""
    return not any(map(os.environ.get, ('JAX_COORDINATOR_ADDRESS', 'SLURM_PROCID')))


def load_saved_run(workdir: str, mesh_of=None, say_remaining=True):
    """Load the SavedRun in `workdir` on the mesh `mesh_of(hparams)`, or on one device.

    Notes about the run and the remaining steps of an unfinished run are printed before the first
    output of the command, so that no note precedes an error.
    """
    from moddepth_jax.training import multihost
    from moddepth_jax.training.run_dir import read_hparams
    from moddepth_jax.training.saved_run import load_run

    mesh = mesh_of and multihost.run_on_all(lambda: mesh_of(read_hparams(workdir)[0]))
    step, loops, threshold = map(_value, ('step', 'loops', 'exit_threshold'))
    if threshold and _value('routing') == 'top_c':
        right = 'no token exits under --routing=top_c, as in training; leave one out'
        raise ValueError(f'--exit_threshold={threshold:g}: {right}')
    run = load_run(workdir, mesh, step)
    run = run if loops is None else run.with_loops(loops)
    run = run if threshold is None else run.with_exits(threshold)
    _notes.extend(run.notes if multihost.is_leader() else ())
    if say_remaining and step is None and 0 < run.step < run.num_steps and multihost.is_leader():
        remaining = run.num_steps - run.step
        _notes.append(f'checkpoint {run.step} is the newest: {remaining} steps of the run remain')
    enable_compilation_cache(run.hparams)
    return run


def load_own_data(run, tokenizer, right: str):
    """Return the dataset of a SavedRun; warns on stderr if it has changed.

    Raises ValueError, which ends with `right`, if it cannot be read.
    """
    from moddepth_jax.data.pipeline import check_fingerprint, make_dataset
    from moddepth_jax.training import multihost

    try:
        dataset = make_dataset(run.hparams.data, run.hparams.seed, tokenizer=tokenizer)
    except ValueError as error:
        raise ValueError(f'{error}; {right}') from None
    try:
        check_fingerprint(run.fingerprint, dataset.fingerprint)
    except ValueError as error:
        found = str(error).split(';')[0]
        if multihost.is_leader():
            print(f'{found}: the held-out text may have been trained on', file=sys.stderr)
    return dataset


def _print_notes():
    while _notes:
        from moddepth_jax.training.progress import printable

        print(printable(_notes.pop(0)), file=sys.stderr)


def define_routing(*others: str, more: str = '') -> flags.FlagHolder:
    """Define --routing, a causal rule or one of `others`; the default is the rule of the run."""
    rules = ', '.join([*others, *registry.CAUSAL_RULES])
    text = f'Routing rule: {rules}. Default: the rule of the training{more}.'
    return flags.DEFINE_string('routing', None, text)


def checked_mesh(hparams, text: str):
    """Return the mesh of --mesh, for batches of any size.

    Raises ValueError if it does not divide a size of the model.
    """
    from moddepth_jax.training.mesh import check_mesh, make_mesh

    mesh = make_mesh(text)
    data = dataclasses.replace(hparams.data, batch_size=mesh.size)
    training = dataclasses.replace(hparams.training, accumulate_steps=1)
    check_mesh(dataclasses.replace(hparams, data=data, training=training), mesh)
    return mesh


def enable_compilation_cache(hparams):
    """Keep compiled programs in the user's cache directory if training.compilation_cache."""
    import jax

    from moddepth_jax.data.directory import cache_directory

    cache = cache_directory()
    if hparams.training.compilation_cache and cache is not None:
        jax.config.update('jax_compilation_cache_dir', str(cache / 'xla'))
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


@contextlib.contextmanager
def progress_bar(what: str, total: int, hidden: bool = False):
    """Show a progress bar on a terminal (stderr of process 0); yields a function to advance it."""
    import rich.console
    import rich.progress as bars

    from moddepth_jax.training import multihost

    _print_notes()
    console = rich.console.Console(stderr=True)
    hidden = hidden or not (console.is_terminal and multihost.is_leader())
    title = bars.TextColumn('{task.description}', markup=False)
    columns = (title, bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield functools.partial(progress.advance, progress.add_task(what, total=total))


def show(*blocks):
    """Print tables, and lines of text without wrapping; [brackets] are not markup."""
    import rich.console

    _print_notes()
    console = rich.console.Console(highlight=False, emoji=False)
    for block in blocks:
        console.print(block, soft_wrap=isinstance(block, str), markup=False)


def make_directory(flag: str, path: str) -> pathlib.Path:
    """Create the directory of a flag. Raises ValueError if that fails."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--{flag}={path}: {error.strerror}; {right}') from None
    return pathlib.Path(path)


def open_json(path: str | None):
    """Open the file of --json; a context that yields None without a path or for stdout.

    An earlier result stays in the file until `write_json` replaces it.
    """
    return contextlib.nullcontext() if path in (None, '-') else open(path, 'a', encoding='utf-8')


def write_json(report, file, indent: int = 2):
    """Replace the content of an open file by JSON, or print it if `file` is None; NaN is null."""
    from moddepth_jax.training.metrics import replace_nonfinite

    if file is not None:
        file.seek(0)
        file.truncate()
    text = json.dumps(replace_nonfinite(report), indent=indent, allow_nan=False, default=str)
    print(text, file=file, flush=True)
