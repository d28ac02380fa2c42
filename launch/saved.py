"""The run that a command works on, what it compiled, and how far the command is with it."""

import contextlib
import functools
import sys


def load(workdir: str):
    """The SavedRun of `workdir`; what there is to note about it goes to stderr.

    Raises:
      ValueError: as `load_run` says.
    """
    from moddepth_jax.training.progress import printable
    from moddepth_jax.training.saved_run import load_run

    run = load_run(workdir)
    for note in run.notes:
        print(printable(note), file=sys.stderr)
    keep_compiled(run.hparams)
    return run


def keep_compiled(hparams):
    """Has compiled programs kept under the user's cache directory, if the run wants that."""
    import jax

    from moddepth_jax.data.landmarks import cache_directory

    cache = cache_directory()
    if hparams.training.compilation_cache and cache is not None:
        jax.config.update('jax_compilation_cache_dir', str(cache / 'xla'))


@contextlib.contextmanager
def bar(what: str, total: int):
    """A bar on stderr, if that is a terminal; yields a function that moves it one on."""
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn('{task.description}', markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    shown = {'console': console, 'transient': True, 'disable': not console.is_terminal}
    with rich.progress.Progress(*columns, **shown) as progress:
        yield functools.partial(progress.advance, progress.add_task(what, total=total))
