"""Documents to batches: one token stream, windows of it, and the step as the only position."""

import operator

import grain
import numpy as np

from moddepth_jax.data.corpus import Corpus, load_corpus, load_held_out
from moddepth_jax.data.tokenizer import Tokenizer, make_tokenizer
from moddepth_jax.hparams import DataHparams

IGNORED_LABEL = -100
ALL_ROWS = slice(None)
HELD_OUT_SEED = 0  # of the order of held-out windows, the same for every run


def token_stream(documents: list[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """uint16 [N]: each document's tokens after one separator, in order.

    A document's first byte is thus predicted from the separator, and predicting a separator means
    that the document ends.
    """
    separator = np.array([tokenizer.separator], np.uint16)
    pieces = [piece for text in documents for piece in (separator, tokenizer.encode(text))]
    return np.concatenate(pieces)


def window_batch(stream: np.ndarray, indices, length: int, separator: int) -> dict:
    """Windows number `indices` of the stream, window i being tokens [iT, iT + T], T = `length`.

    Returns:
      `tokens_BT`, the first T tokens of each window; `labels_BT`, the last T; `segment_ids_BT`,
      which document of its row a token belongs to: 1 at the row's start, one more at each
      separator after it. All int32, B = len(indices).
    """
    starts_B = np.asarray(indices) * length
    windows = stream[starts_B[:, None] + np.arange(length + 1)].astype(np.int32)
    tokens_BT, labels_BT = windows[:, :-1], windows[:, 1:]
    begins_BT = tokens_BT == separator
    begins_BT[:, 0] = True
    return {
        'tokens_BT': np.ascontiguousarray(tokens_BT),
        'labels_BT': np.ascontiguousarray(labels_BT),
        'segment_ids_BT': np.cumsum(begins_BT, axis=1, dtype=np.int32),
    }


def _pad_rows(batch, batch_size):
    missing = batch_size - len(batch['tokens_BT'])
    fill = {'tokens_BT': 0, 'labels_BT': IGNORED_LABEL, 'segment_ids_BT': 0}
    return {
        name: np.pad(array, ((0, missing), (0, 0)), constant_values=fill[name])
        for name, array in batch.items()
    }


def _num_windows(stream, length, part):
    num_windows = (len(stream) - 1) // length
    if num_windows < 1:
        fits = f'set it to {len(stream) - 1} or less'
        right = {
            'training': fits,
            'held-out': f'{fits} or raise data.held_out_fraction',
            'given': 'give more text',
        }
        raise ValueError(
            f'data.sequence_length={length}: the {part} text has {len(stream)} tokens and one '
            f'window needs {length + 1}; {right[part]}'
        )
    return num_windows


def _windows(documents, tokenizer, length, part):
    """Window numbers of the documents' stream, and the function that cuts a batch of them."""
    stream = token_stream(documents, tokenizer)
    # Grain moves window numbers and the batch is cut out at once: half the time of moving rows and
    # stacking them. And a process can cut its own rows alone.
    numbers = grain.MapDataset.range(_num_windows(stream, length, part))
    return numbers, lambda i: window_batch(stream, i, length, tokenizer.separator)


class HeldOut:
    """Batches that cover the held-out text of a corpus once; what `make_held_out` returns.

    Attributes:
      corpus: the Corpus.
      tokenizer: the Tokenizer.
      num_held_out_batches: batches that cover the held-out windows once.
    """

    def __init__(self, data: DataHparams, corpus: Corpus):
        self.corpus, self.tokenizer = corpus, make_tokenizer(data.tokenizer)
        self._batch_size = data.batch_size
        part = 'held-out' if corpus.train else 'given'
        windows, cut = _windows(corpus.held_out, self.tokenizer, data.sequence_length, part)
        # Shuffled once and for all, so that the first few batches are a fair sample of the text.
        mixed = windows.shuffle(seed=HELD_OUT_SEED)[: len(windows)]
        self._held_out = mixed.batch(self._batch_size, batch_fn=cut)
        self.num_held_out_batches = len(self._held_out)

    def held_out_batch(self, index: int) -> dict[str, np.ndarray]:
        """Batch `index` of the held-out windows; arrays as in `Dataset.train_batch`.

        Their order is mixed but always the same, so that the first batches are a fair sample. The
        last one is filled up with rows of label -100, segment 0 and token 0. Raises ValueError for
        an index outside [0, num_held_out_batches).
        """
        index = operator.index(index)
        if not 0 <= index < self.num_held_out_batches:
            raise ValueError(f'index={index}: must lie in [0, {self.num_held_out_batches})')
        return _pad_rows(self._held_out[index], self._batch_size)


class Dataset(HeldOut):
    """Batches of a corpus as pure functions of the step; what `make_dataset` returns.

    Attributes, beside those of HeldOut:
      fingerprint: what decides every batch: a dict of JSON scalars, see `check_fingerprint`; of
        `python_environment` with the packages, for the record.
      num_train_windows: windows of one epoch.
    """

    def __init__(self, data: DataHparams, seed: int, corpus: Corpus):
        tokenizer = make_tokenizer(data.tokenizer)
        train, self._cut = _windows(corpus.train, tokenizer, data.sequence_length, 'training')
        super().__init__(data, corpus)
        # Grain seeds epoch e with seed + e, so neighbouring seeds would share epochs.
        shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._train = train.shuffle(seed=shuffle_seed).repeat()
        self.num_train_windows = len(train)
        self.fingerprint = {
            'corpus_sha256': corpus.sha256,
            'source': data.source,
            'held_out_fraction': data.held_out_fraction,
            'tokenizer': tokenizer.name,
            'sequence_length': data.sequence_length,
            'batch_size': data.batch_size,
            'seed': seed,
        }
        if corpus.packages:
            self.fingerprint['packages'] = ' '.join(corpus.packages)

    def train_windows(self, step: int, rows: slice = ALL_ROWS) -> list[int]:
        """Numbers of the windows that are rows `rows` of the batch of `step` (from 0).

        A pure function of the step: each epoch visits every window once, in an order of its own,
        and batches run on across epochs. Raises ValueError for a negative step.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f'step={step}: must be 0 or more')
        first = step * self._batch_size
        return [int(self._train[first + row]) for row in range(self._batch_size)[rows]]

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, np.ndarray]:
        """Rows `rows` of the batch of `step`: `tokens_BT`, `labels_BT`, `segment_ids_BT`, int32.

        A pure function of the step, as `train_windows` says, and of no row but those asked for.
        Raises ValueError for a negative step.
        """
        return self._cut(self.train_windows(step, rows))

    def epochs(self, step: int) -> float:
        """Passes over the training windows that the batches before `step` make."""
        return step * self._batch_size / self.num_train_windows


def make_dataset(data: DataHparams, seed: int, corpus: Corpus | None = None) -> Dataset:
    """The dataset of `data`, shuffled by `seed`; loads the corpus unless it is given.

    Raises:
      ValueError: one line, as `load_corpus` says, or for a corpus shorter than one window.
    """
    return Dataset(data, seed, load_corpus(data) if corpus is None else corpus)


def make_held_out(data: DataHparams) -> HeldOut:
    """All text of `data.source` as held-out batches: `data.held_out_fraction` does not matter.

    What is left at the end of the text, less than one window, is in no batch.

    Raises:
      ValueError: one line, as `load_held_out` says, or for text shorter than one window.
    """
    return HeldOut(data, load_held_out(data))


def check_fingerprint(stored: dict, current: dict) -> None:
    """Refuses to go on with other data: compares two `Dataset.fingerprint`s.

    Other packages with the same text are the same data.

    Raises:
      ValueError: one line that names the first field that differs and both values, and of
        `python_environment` some packages that differ.
    """
    for field in dict.fromkeys((*current, *stored)):
        was, now = (repr(d[field]) if field in d else 'missing' for d in (stored, current))
        if was != now and field != 'packages':
            right = 'resume with the data of that run, or start another workdir'
            changed = _changed_packages(stored, current) if field == 'corpus_sha256' else ''
            raise ValueError(
                f'data fingerprint: {field} was {was} and is {now} now{changed}; {right}'
            )


def _changed_packages(stored, current):
    was, now = (set(d.get('packages', '').split()) for d in (stored, current))
    changed = [f'-{name}' for name in sorted(was - now)] + [
        f'+{name}' for name in sorted(now - was)
    ]
    more = f' and {len(changed) - 6} more' if len(changed) > 6 else ''
    return f' (packages {" ".join(changed[:6])}{more})' if changed else ''
