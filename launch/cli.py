"""What every command shares: flags, --config, one-line errors, exit status, --help, saved runs."""

import contextlib
import dataclasses
import errno
import functools
import inspect
import json
import os
import re
import sys
import textwrap
import traceback

from absl import app, flags, logging

from moddepth_jax import hparams

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags defined below belong to the command that asks for them

_CONFIG_HELP = (
    'FILE.py or FILE.py:TEXT, such as configs/base.py: its get_config(), or get_config(TEXT), '
    'returns the knobs. Or WORKDIR/config.json, those of a run. --config.model.num_layers=12 sets '
    'one of them.'
)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS)
# Set by launch.local for all processes but the first, which reports bad flags for all of them.
REPORTED_BY_LEADER = 'MODDEPTH_REPORTED_BY_LEADER'
_HELP = ('-h', '-?', '-help', '--help', '--helpshort', '--helpfull')


def run(main, positional: str = ''):
    """Parses the flags, calls `main(argv)` and exits the process.

    Exit status: 0 if main returned None (if it returns an int, that is the status); 2 with one line
    on stderr after a bad flag or config, a ValueError, or a file that could not be used; 130 with
    one line after Ctrl-C; 1 with a traceback for any other exception; 75 if another process of the
    same run was lost. Processes of one run end together, and one of them reports an error that
    several raise.

    Args:
      main: called with the program's name and the positional arguments.
      positional: the text of --help on positional arguments; empty: the command takes none.
    """
    flags.DEFINE_boolean('traceback', False, 'Also show where in the code an error arose.')
    FLAGS.set_gnu_getopt(True)
    parse = functools.partial(_parse, positional=positional)
    app.run(functools.partial(_call, main), flags_parser=parse)


def define_config(default: str | None = None) -> flags.FlagHolder:
    """Defines --config and --print_config; the holder's `.value` is a locked ConfigDict.

    --config.model.num_layers=3 overrides a knob. The text after a colon in --config=FILE.py:TEXT is
    passed to the file's get_config.

    Args:
      default: the --config of a command line without one; None: --config is required.
    """
    # Imported here because launch.gpu also works without ml_collections.
    from ml_collections import config_flags

    from launch import config_file

    help_string = _CONFIG_HELP + (f' Default: {default}.' if default else '')
    with _errors_in_one_line():  # config_flags reads a --flagfile here
        holder = config_flags.DEFINE_config_file('config', help_string=help_string)
    FLAGS['config'].parser = config_file.Parser()
    FLAGS['config'].left_out = default
    flags.mark_flag_as_required('config')
    flags.DEFINE_boolean('print_config', False, 'Print the resolved config as JSON and exit.')
    return holder


def config_name() -> str:
    """NAME of --config=configs/NAME.py[:TEXT] or NAME/config.json, after the flags are parsed."""
    path = FLAGS['config'].config_filename
    if path.endswith('.json'):
        return os.path.basename(os.path.dirname(os.path.abspath(path)))
    return os.path.splitext(os.path.basename(path.split(':', 1)[0]))[0]


def prepare_backend():
    """Sets the environment that JAX reads when it looks for devices. `run` calls it before main.

    Fake CPU devices need two threads each, or XLA's CPU runtime can block until it aborts: NPROC
    becomes twice their number unless it is set. Logs below WARNING, and those of Orbax and Grain
    below ERROR, are dropped unless --verbosity is given.
    """
    counts = re.findall(
        r'--xla_force_host_platform_device_count=(\d+)', os.environ.get('XLA_FLAGS', '')
    )
    if counts and int(counts[-1]) >= 2:
        os.environ.setdefault('NPROC', str(2 * int(counts[-1])))
    if FLAGS['verbosity'].using_default_value:
        logging.set_verbosity(logging.WARNING)
        logging.get_absl_logger().setLevel('ERROR')


def _call(main, argv):
    try:
        with _errors_in_one_line(), _ending_together():
            if 'print_config' in FLAGS and FLAGS.print_config:
                return _print_config()
            return main(argv)
    except Exception as error:
        if _multihost() is None:
            raise
        traceback.print_exc()
        _exit(1, error)


def _multihost():
    """The module training.multihost if main has initialized several processes by it, else None."""
    module = sys.modules.get('moddepth_jax.training.multihost')
    return module if module is not None and module.is_initialized() else None


@contextlib.contextmanager
def _ending_together():
    """Waits for the other processes at the end of main; exits at once if one of them is lost."""
    try:
        yield
        if multihost := _multihost():
            multihost.barrier('end of main')
    except Exception as error:
        if multihost := _multihost():
            multihost.exit_if_process_lost(error)
        raise


def _exit(status, error):
    """Ends the process after `error` was reported."""
    if multihost := _multihost():
        multihost.exit_process(status, error)
    sys.exit(status)


def _print_config():
    print(json.dumps(dataclasses.asdict(hparams.from_config(FLAGS.config)), indent=2))


def _parse(argv, positional):
    with _errors_in_one_line(quiet=bool(os.environ.get(REPORTED_BY_LEADER))):
        if set(_HELP) & set(argv[1 : argv.index('--') if '--' in argv else None]):
            print(_help_text(positional))
            sys.exit(0)
        argv = _with_config(argv)
        rest = FLAGS(argv)
        if rest[1:] and not positional:
            raise ValueError(_unexpected(rest[1], argv))
        prepare_backend()
        return rest


def _with_config(argv):
    """The command line with the default --config added if it has none, also in sys.argv.

    A default of the flag itself would be loaded before the overrides are known.
    """
    default = FLAGS['config'].left_out if 'config' in FLAGS else None
    given = FLAGS.read_flags_from_files(argv[1:], force_gnu=False)
    if default is None or any(re.match('--?config(=|$)', argument) for argument in given):
        return argv
    sys.argv[1:] = [f'--config={default}', *argv[1:]]
    return list(sys.argv)


@contextlib.contextmanager
def _errors_in_one_line(quiet=False):
    try:
        yield
    except KeyboardInterrupt as error:
        print('interrupted', file=sys.stderr)
        _exit(130, error)
    except BrokenPipeError as error:  # nobody reads our output any more, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        _exit(141, error)
    except (ValueError, OSError, flags.Error) as error:
        line = _one_line(error)
        if not line:
            raise
        if '--traceback' in sys.argv:
            traceback.print_exc()
        if not (quiet or getattr(error, 'reported_elsewhere', False)):
            print('error:', ' '.join(line.split()), file=sys.stderr)
        _exit(2, error)
    except MemoryError as error:
        print('error: out of memory; lower data.batch_size', file=sys.stderr)
        _exit(2, error)
    except RuntimeError as error:  # JAX raises this when the device is out of memory
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        remedy = 'lower data.batch_size, raise training.accumulate_steps, or set model.remat=block'
        print(f'error: out of device memory; {remedy}', file=sys.stderr)
        _exit(2, error)


def _one_line(error):
    """The line on what the user did wrong, or '' if the error is not the user's."""
    if isinstance(error, OSError):
        if error.filename is not None:
            return f'{error.filename}: {error.strerror or error}'
        users = isinstance(error, (FileNotFoundError, PermissionError))
        return str(error) if users or error.errno in _DISK_ERRORS else ''
    if isinstance(error, flags.UnrecognizedFlagError):
        from launch import config_file

        if error.flagname.startswith('config.') and 'config' in FLAGS and not FLAGS['config'].value:
            return f'{error.flagvalue}: needs --config=FILE.py before it'
        known = [flag.name for flag in _own_flags()]
        if 'config' in FLAGS and FLAGS['config'].value:
            known += config_file.knob_names(FLAGS['config'].value)
        return f'{error.flagvalue}: no such flag; {config_file.nearest(error.flagname, known)}'
    if isinstance(error, flags.IllegalFlagValueError):
        return _illegal_value(error)
    missing = re.match('Missing value for flag (.*)', str(error))
    if missing:
        return f'{missing[1]}: missing value; write {missing[1]}=VALUE'
    return str(error) or type(error).__name__


def _illegal_value(error):
    text = str(error)
    name = re.match(r'flag --([^=]+)=', text)
    if not name or name[1] not in FLAGS:
        return text
    flag = FLAGS[name[1]]
    if 'must have a value other than None' in text:
        return f'--{flag.name}: missing; {flag.help.split(". ")[0]}'
    parser = flag.parser
    if isinstance(parser, flags.BooleanParser):
        right = 'must be true or false'
    elif isinstance(parser, flags.EnumParser):
        right = f'must be one of {", ".join(parser.enum_values)}'
    elif parser.flag_type() == 'tuple':
        right = "must be a tuple, such as '(256, 0)'"
    elif parser.syntactic_help:
        right = f'must be {parser.syntactic_help}'
    else:
        return text.removeprefix('flag ')
    reason = f': {error.__context__}'
    return f'{text.removesuffix(reason).removeprefix("flag ")}: {right}'


def _unexpected(argument, argv):
    before = argv[argv.index(argument) - 1]
    name = before.lstrip('-')
    if name in FLAGS and FLAGS[name].boolean:
        return f'{before} {argument}: a value of {before} follows "=", as in {before}=false'
    return f'{argument}: unexpected; every option starts with --, and --help lists them'


def _own_flags():
    return sorted(FLAGS.get_key_flags_for_module(sys.argv[0]), key=lambda flag: flag.name)


def _help_text(positional):
    lines = [inspect.cleandoc(sys.modules['__main__'].__doc__ or ''), '']
    if positional:
        lines += ['arguments:', textwrap.indent(positional, '  '), '']
    lines.append('flags:')
    for flag in _own_flags():
        name = f'  --[no]{flag.name}' if flag.boolean else f'  --{flag.name}'
        default = '' if flag.default in (None, False, '') else f' Default: {flag.default}.'
        body = ' '.join((flag.help + default).split())
        indents = {'initial_indent': ' ' * 6, 'subsequent_indent': ' ' * 6}
        lines += [name, textwrap.fill(body, 88, **indents)]
    return '\n'.join(lines)


def load_saved_run(workdir: str, mesh_of=None):
    """Loads the run in `workdir`; process 0 prints the notes about it to stderr.

    Args:
      workdir: of the run.
      mesh_of: function from its hyper-parameters to the mesh for its state; None: one device.

    Returns:
      A SavedRun.

    Raises:
      ValueError: as `load_run` says, or of `mesh_of`.
    """
    from moddepth_jax.training import multihost
    from moddepth_jax.training.progress import printable
    from moddepth_jax.training.saved_run import load_run, read_hparams

    mesh = None
    if mesh_of is not None:
        mesh = multihost.run_on_all(lambda: mesh_of(read_hparams(workdir)[0]))
    run = load_run(workdir, mesh)
    if multihost.is_leader():
        for note in run.notes:
            print(printable(note), file=sys.stderr)
    enable_compilation_cache(run.hparams)
    return run


def enable_compilation_cache(hparams):
    """Keeps compiled programs under the user's cache directory if training.compilation_cache."""
    import jax

    from moddepth_jax.data.directory import cache_directory

    cache = cache_directory()
    if hparams.training.compilation_cache and cache is not None:
        jax.config.update('jax_compilation_cache_dir', str(cache / 'xla'))


@contextlib.contextmanager
def progress_bar(what: str, total: int):
    """A bar on stderr of process 0, if that is a terminal; yields a function that advances it."""
    import rich.console
    import rich.progress

    from moddepth_jax.training import multihost

    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn('{task.description}', markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    hidden = not (console.is_terminal and multihost.is_leader())
    progress = rich.progress.Progress(*columns, console=console, transient=True, disable=hidden)
    with progress:
        yield functools.partial(progress.advance, progress.add_task(what, total=total))
