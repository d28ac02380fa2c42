"""Token streams, and their windows, which batches are made of."""

from collections.abc import Iterable

import numpy as np

from moddepth_jax.data.mixture import Member
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer
from moddepth_jax.hparams import DataHparams

IGNORED_LABEL = -100


class TooShort(ValueError):
    """A text is shorter than one window."""


def token_stream(documents: Iterable[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Encode documents into one stream [N] of the tokenizer's dtype, a separator before each.

    Raises ValueError, one line, with the number of a document that the tokenizer cannot encode.
    """
    separator = np.array([tokenizer.separator], tokenizer.dtype)
    pieces = []
    for number, text in enumerate(documents, 1):
        try:
            pieces += separator, tokenizer.encode(text)
        except ValueError as error:
            raise ValueError(f'document {number}: {error}') from None
    return np.concatenate(pieces)


def pad_rows(batch: dict, batch_size: int) -> dict:
    """Pad a batch to `batch_size` rows with label -100, segment 0 and token 0."""
    missing = batch_size - len(batch['tokens_BT'])
    padded = {name: np.pad(array, ((0, missing), (0, 0))) for name, array in batch.items()}
    padded['labels_BT'][len(batch['labels_BT']) :] = IGNORED_LABEL
    return padded


class Windows:
    """Windows of token streams, numbered consecutively; no window spans two streams.

    Window i of a stream has its tokens iT to iT + T inclusive, where T is `length`; tokens after
    the last full window are not used. Grain moves only window numbers, and a batch is cut out at
    once, which takes half the time of moving and stacking rows.

    Args:
      streams: arrays [N] of tokens.
      length: T, targets in a window.
      separator: id that starts each document.

    Attributes:
      begins: int [streams + 1], number of the first window of each stream, then of all windows.
    """

    def __init__(self, streams: list[np.ndarray], length: int, separator: int):
        self._streams, self._length, self._separator = streams, length, separator
        sizes = [max(len(stream) - 1, 0) // length for stream in streams]
        self.begins = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self.begins[-1])

    def cut(self, numbers) -> dict[str, np.ndarray]:
        """Return the batch of the windows `numbers`, int32 [B, T] arrays.

        `tokens_BT` has the first T tokens of each window and `labels_BT` the last T.
        `segment_ids_BT` numbers the documents in a row: 1 at the start, and one more at each
        separator.
        """
        numbers_B = np.asarray(numbers)
        stream_B = np.searchsorted(self.begins, numbers_B, side='right') - 1
        windows = np.empty((len(numbers_B), self._length + 1), np.int32)
        for i in np.unique(stream_B):
            starts_B = (numbers_B[stream_B == i] - self.begins[i]) * self._length
            tokens = self._streams[i][starts_B[:, None] + np.arange(self._length + 1)]
            windows[stream_B == i] = tokens
        tokens_BT, labels_BT = windows[:, :-1], windows[:, 1:]
        begins_BT = tokens_BT == self._separator
        begins_BT[:, 0] = True
        return {
            'tokens_BT': np.ascontiguousarray(tokens_BT),
            'labels_BT': np.ascontiguousarray(labels_BT),
            'segment_ids_BT': np.cumsum(begins_BT, axis=1, dtype=np.int32),
        }


def make_windows(
    streams: list[np.ndarray],
    data: DataHparams,
    tokenizer: Tokenizer,
    part: str,
    member: Member | None = None,
) -> Windows:
    """Make the Windows of a text; `part` is 'training', 'held-out' or 'given'.

    Raises TooShort if there is no window.
    """
    windows = Windows(streams, data.sequence_length, tokenizer.separator)
    if len(windows):
        return windows
    tokens = max(map(len, streams))
    fits = f'set it to {tokens - 1} or less'
    flag = 'data.held_out_fraction' if member is None else '--held_out_fraction of launch.prepare'
    right = {
        'training': f'{fits} or give more text',
        'held-out': f'{fits} or raise {flag}',
        'given': 'give more text',
    }[part]
    of_member = '' if member is None else f' of {member.store.directory}'
    raise TooShort(
        f'data.sequence_length={data.sequence_length}: the {part} text{of_member} has {tokens} '
        f'tokens and one window needs {data.sequence_length + 1}; {right}'
    )
