"""How the processes of a run agree, beside training, on whether a checkpoint was written."""

import itertools

import jax
from jax._src import distributed  # its key-value store has no public name

PATIENCE_SECONDS = 3600  # for a slow disk; a process that died ends the others far sooner
_numbers = itertools.count()  # alike on every process: all begin the same saves in the same order


class SaveOutcome:
    """Of one save: each process reports on its part, then process 0 on the whole.

    Threads beside the training cannot use the collectives of devices, whose order has to be the
    same everywhere. So the processes leave notes at the coordinator of `jax.distributed`.
    """

    def __init__(self):
        number = next(_numbers)
        self._folder, self._reported = f'moddepth_jax/saves/{number}', False
        self._several = jax.process_count() > 1
        if self._several and jax.process_index() == 0:
            # All have begun the save after that one, so none will read of it any more.
            distributed.global_state.client.key_value_delete(f'moddepth_jax/saves/{number - 2}')

    def report(self, error: str = '') -> str:
        """Tells how this process's part ended, and waits until every process has told that.

        Args:
          error: one line; empty where the part is written. Only the first report counts.

        Returns:
          The first error of any process, or ''. None of them writes any more.
        """
        if not self._several:
            return error
        if not self._reported:
            self._reported = True
            self._leave(f'part_{jax.process_index()}', error)
        told = {process: self._find(f'part_{process}') for process in range(jax.process_count())}
        return next((f'process {process}: {text}' for process, text in told.items() if text), '')

    def conclude(self, error: str = '') -> str:
        """What process 0 gives as the error of the whole save, or ''; the others wait for that."""
        if not self._several:
            return error
        if jax.process_index() == 0:
            self._leave('whole', error)
        return self._find('whole')

    def _leave(self, note, text):
        # Behind a colon, for a note without text is none.
        distributed.global_state.client.key_value_set(f'{self._folder}/{note}', f':{text}')

    def _find(self, note):
        client = distributed.global_state.client
        return client.blocking_key_value_get(f'{self._folder}/{note}', 1000 * PATIENCE_SECONDS)[1:]
