"""The run that a command works on, what it compiled, and how far the command is with it."""

import contextlib
import functools
import sys


def load(workdir: str, mesh_of=None):
    """The SavedRun of `workdir`; what there is to note about it goes to stderr, by process 0.

    Args:
      workdir: of the run.
      mesh_of: from its hyper-parameters to the mesh for its state; None: it goes to one device.

    Raises:
      ValueError: as `load_run` says, or of `mesh_of`.
    """
    from moddepth_jax.training import agreement, processes
    from moddepth_jax.training.progress import printable
    from moddepth_jax.training.saved_run import load_run, read_hparams

    mesh = None
    if mesh_of is not None:
        mesh = agreement.together(lambda: mesh_of(read_hparams(workdir)[0]))
    run = load_run(workdir, mesh)
    if processes.is_first():
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
    """A bar on stderr of process 0, if that is a terminal; yields a function that moves it on."""
    import rich.console
    import rich.progress

    from moddepth_jax.training import processes

    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn('{task.description}', markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    hidden = not (console.is_terminal and processes.is_first())
    shown = {'console': console, 'transient': True, 'disable': hidden}
    with rich.progress.Progress(*columns, **shown) as progress:
        yield functools.partial(progress.advance, progress.add_task(what, total=total))
