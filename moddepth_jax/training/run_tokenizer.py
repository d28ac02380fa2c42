"""The tokenizer that a run keeps in its directory, so that it needs no other file later."""

import os
import pathlib
import shutil
import socket

from moddepth_jax.data.tokenizers.tokenizer import DIRECTORY, Tokenizer, make_tokenizer
from moddepth_jax.hparams import Hparams


def keep_tokenizer(workdir: str | os.PathLike, hparams: Hparams, tokenizer: Tokenizer) -> None:
    """Writes workdir/tokenizer/ unless it is there or `data.tokenizer` is bytes.

    The caller holds the lock of `workdir`. Killed anywhere, the folder is whole or not there.

    Raises:
      ValueError: one line, where the folder holds another tokenizer or cannot be written.
    """
    if hparams.data.tokenizer == 'bytes':
        return
    folder = pathlib.Path(workdir) / DIRECTORY
    if folder.exists():
        kept = make_tokenizer(folder)
        if kept.sha256 != tokenizer.sha256:
            right = 'put back the one that the run began with, or use another --workdir'
            found = f'holds {kept.name}, sha256 {kept.sha256}, and the run has {tokenizer.name}'
            raise ValueError(f'{folder}: {found}, {tokenizer.sha256}; {right}')
        return
    try:
        for left in folder.parent.glob(f'{DIRECTORY}.*.tmp'):  # of starts that were killed
            shutil.rmtree(left)
        temporary = folder.with_name(f'{DIRECTORY}.{socket.gethostname()}-{os.getpid()}.tmp')
        tokenizer.save(temporary)
        os.rename(temporary, folder)
    except OSError as error:
        right = 'must be a directory that can be written'
        raise ValueError(f'--workdir={workdir}: {error.strerror}; {right}') from None
