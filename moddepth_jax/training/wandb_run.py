"""A run's metrics in Weights & Biases, where that is asked for; metrics.jsonl holds the same."""

import os
import pathlib
import secrets

from moddepth_jax.training.workdir import write_atomically

ID_FILE = 'wandb-id'


def check_wandb(project: str) -> None:
    """Raises ValueError, one line, where `project` is asked for and wandb is not installed."""
    if not project:
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        right = "needs pip install 'moddepth-jax[wandb]'"
        raise ValueError(f'--wandb={project}: {right}') from None


class WandbRun:
    """Sends rows of metrics to one run of W&B; a start that resumes goes on with the same.

    Curves are drawn over `step`, which is sent with each row, so that the rows that a killed run
    writes again are taken. What W&B does not take is dropped, and the rest with it: `failure` says
    why, in one line.

    Args:
      workdir: directory of the run, whose last name is the run's there; holds its id and W&B's own
        files.
      project: of W&B.
      config: nested dict of the run's knobs.

    Raises:
      ValueError: one line, where W&B cannot begin: nobody is logged in, or there is no network.
    """

    def __init__(self, workdir: str | os.PathLike, project: str, config: dict):
        import wandb

        workdir, self.failure = pathlib.Path(workdir), ''
        path = workdir / ID_FILE
        if not path.exists():
            write_atomically(path, secrets.token_hex(8) + '\n')
        try:
            self._run = wandb.init(
                project=project,
                id=path.read_text(encoding='utf-8').strip(),
                resume='allow',
                name=workdir.resolve().name,
                dir=workdir,
                config=config,
                settings=wandb.Settings(console='off', silent=True),
            )
        except Exception as error:  # of many kinds, some of them private
            right = 'log in with `wandb login`, or set WANDB_MODE=offline'
            raise ValueError(
                f'--wandb={project}: {" ".join(str(error).split())}; {right}'
            ) from None
        self._run.define_metric('*', step_metric='step')

    def add(self, step: int, values: dict) -> None:
        """Sends the numbers of a row."""
        row = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        self._call('log', {'step': step, **row})

    def close(self) -> None:
        """Waits until all is sent."""
        self._call('finish')
        self._run = None

    def _call(self, name, *given):
        if self._run is None:
            return
        try:
            getattr(self._run, name)(*given)
        except Exception as error:  # a run must not end because its pictures cannot be drawn
            self.failure = f'no more metrics for W&B: {" ".join(str(error).split())}'
            self._run = None
