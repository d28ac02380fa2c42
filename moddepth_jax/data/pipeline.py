"""From documents to batches, as pure functions of the step."""

import codecs
import fractions
import itertools
import operator
from collections.abc import Mapping

import grain
import numpy as np

from moddepth_jax.data import sources
from moddepth_jax.data.corpus import Corpus, load_corpus, load_held_out
from moddepth_jax.data.mixture import RowSchedule, describe_tokenizer, held_out_order
from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from moddepth_jax.data.windows import Windows, make_windows, pad_rows, token_stream
from moddepth_jax.hparams import DataHparams

ALL_ROWS = slice(None)
HELD_OUT_SEED = 0  # for the order of the held-out windows, the same in every run


class HeldOut:
    """Batches that cover the held-out text of a corpus once; the result of `make_held_out`.

    Attributes:
      held_back: whether all of it was held out when the rest of the same text was trained on.
      num_held_out_batches: number of batches that cover the held-out windows once.
      held_out_streams: arrays of tokens from which the windows are cut.
      domains: for a mixture, the share of each member by name; otherwise empty.
    """

    def __init__(self, data: DataHparams, corpus: Corpus, tokenizer: Tokenizer):
        self.corpus, self.tokenizer = corpus, tokenizer
        self._batch_size = data.batch_size
        members, shares = corpus.members, [member.share for member in corpus.members] or [1]
        self.held_back = bool(corpus.train)
        if members:
            self.held_back = all(member.held_out == ('held_out',) for member in members)
        part = 'held-out' if corpus.train else 'given'
        texts = _load_streams(data, corpus, tokenizer, part)
        self.held_out_streams = [stream for _, streams in texts for stream in streams]
        self._held_out = []
        for member, streams in texts:
            windows = make_windows(streams, data, tokenizer, part, member)
            # Shuffled, so that the first few batches are a fair sample.
            shuffled = grain.MapDataset.range(len(windows)).shuffle(seed=HELD_OUT_SEED)
            batches = shuffled[: len(windows)].batch(self._batch_size, batch_fn=windows.cut)
            self._held_out.append(batches)
        sizes = [len(batches) for batches in self._held_out]
        self.num_held_out_batches = sum(sizes)
        self.domains = {m.name: float(m.share) for m in members if len(members) > 1}
        self._order, self._next_of_order = [], held_out_order(shares, sizes)

    def held_out_batch(self, index: int) -> dict[str, np.ndarray]:
        """Return batch `index` of the held-out windows; arrays as in `Dataset.train_batch`.

        The order is shuffled and always the same. A batch has windows of one member of a mixture.
        The last batch of each text is padded by `pad_rows`. Raises ValueError for an index out of
        range.
        """
        member, batch = self._find_batch(index)
        return pad_rows(self._held_out[member][batch], self._batch_size)

    def domain(self, index: int) -> str | None:
        """Return the member's name of held-out batch `index`, or None without a mixture."""
        member, _ = self._find_batch(index)
        return list(self.domains)[member] if self.domains else None

    def _find_batch(self, index):
        """Return (member, number of its batch) of held-out batch `index`."""
        index = operator.index(index)
        if not 0 <= index < self.num_held_out_batches:
            raise ValueError(f'index={index}: must lie in [0, {self.num_held_out_batches})')
        more = max(0, index + 1 - len(self._order))
        self._order += itertools.islice(self._next_of_order, more)
        return self._order[index]


class Dataset(HeldOut):
    """Batches of a corpus as pure functions of the step; the result of `make_dataset`.

    Attributes:
      fingerprint: JSON scalars that determine every batch; see `check_fingerprint`.
      may_change: knobs that may change in a resumed run: they only say where text and tokenizer
        are, and the fingerprint shows whether these are the same.
      num_train_windows: number of windows in an epoch.
    """

    def __init__(self, data: DataHparams, seed: int, corpus: Corpus, tokenizer: Tokenizer):
        members, streams = corpus.members, []
        for member, own in _load_streams(data, corpus, tokenizer, 'training'):
            make_windows(own, data, tokenizer, 'training', member)  # raises if there is none
            streams += own
        super().__init__(data, corpus, tokenizer)
        self._windows = Windows(streams, data.sequence_length, tokenizer.separator)
        self.num_train_windows = len(self._windows)
        self._schedule = RowSchedule([m.share for m in members] or [fractions.Fraction(1)])
        # Grain seeds epoch e with seed + e, so neighboring seeds would share epochs.
        seeds = map(int, np.random.SeedSequence(seed).generate_state(len(streams)))
        sizes = map(int, np.diff(self._windows.begins))
        self._train = [
            grain.MapDataset.range(size).shuffle(seed=member_seed).repeat()
            for size, member_seed in zip(sizes, seeds, strict=True)
        ]
        self.may_change = ('data.source', 'data.mixture') if members else ()
        if members or tokenizer.sha256:
            self.may_change += ('data.tokenizer',)
        self.fingerprint = _fingerprint(data, seed, corpus, tokenizer)

    def train_windows(self, step: int, rows: slice = ALL_ROWS) -> list[int]:
        """Return the numbers of the windows in rows `rows` of the batch of `step` (from 0).

        Each epoch visits every window of a member once, in a new order. Batches continue across
        epochs. Raises ValueError for a negative step.
        """
        step = operator.index(step)
        if step < 0:
            raise ValueError(f'step={step}: must be 0 or more')
        first = step * self._batch_size
        places = [self._schedule.member(first + row) for row in range(self._batch_size)[rows]]
        begins = self._windows.begins
        return [int(begins[member] + self._train[member][nth]) for member, nth in places]

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, np.ndarray]:
        """Return rows `rows` of the batch of `step`; arrays as in `Windows.cut`."""
        return self._windows.cut(self.train_windows(step, rows))

    def epochs(self, step: int) -> float:
        """Return the epochs in the batches before `step`, as a fraction."""
        return step * self._batch_size / self.num_train_windows

    def domain_epochs(self, step: int) -> dict[str, float]:
        """Like `epochs`, by member of a mixture; empty without one."""
        counts = self._schedule.counts(step * self._batch_size)
        sizes = np.diff(self._windows.begins).tolist()
        epochs = [count / size for count, size in zip(counts, sizes, strict=True)]
        return dict(zip(self.domains, epochs, strict=True)) if self.domains else {}


def make_dataset(
    data: DataHparams, seed: int, corpus: Corpus | None = None, tokenizer: Tokenizer | None = None
) -> Dataset:
    """Make the dataset of `data`, shuffled by `seed`.

    Corpus and tokenizer are by default those that `data` names. Raises ValueError, one line, like
    `load_corpus` and `tokenizer_of`, or for text that is shorter than one window, that the
    tokenizer cannot encode, or that was prepared with another tokenizer.
    """
    corpus = load_corpus(data) if corpus is None else corpus
    tokenizer = tokenizer_of(data) if tokenizer is None else tokenizer
    return Dataset(data, seed, corpus, tokenizer)


def make_held_out(
    data: DataHparams,
    tokenizer: Tokenizer | None = None,
    trained_on: Mapping[str, float] | None = None,
) -> HeldOut:
    """Make held-out batches of all text of `data.source`, or of its held-out part.

    `trained_on`, as in `load_held_out`, says which texts have one. Raises ValueError like that and
    `make_dataset`.
    """
    corpus = load_held_out(data, trained_on)
    return HeldOut(data, corpus, tokenizer_of(data) if tokenizer is None else tokenizer)


def _load_streams(data, corpus, tokenizer, part):
    """Return [(member, its streams)] of a part: 'training', 'held-out' or 'given'.

    Text that is not prepared has one entry, with None as member.
    """
    if corpus.members:
        _check_tokenizer(data, corpus.members, tokenizer, part)
        streams = []
        for member in corpus.members:
            splits = ('train',) if part == 'training' else member.held_out
            streams.append((member, [member.store.tokens(split) for split in splits]))
        return streams
    documents = corpus.train if part == 'training' else corpus.held_out
    return [(None, [token_stream(documents, tokenizer)])]


def _check_tokenizer(data, members, tokenizer, part):
    """Raise ValueError if text was prepared with a tokenizer other than `tokenizer`."""
    for member, folder in zip(members, data.folders, strict=True):
        theirs = member.store.tokenizer
        ours = {name: getattr(tokenizer, name) for name in theirs}
        if all(ours[name] == theirs[name] for name in ('sha256', 'vocab_size', 'separator')):
            continue
        was, now = describe_tokenizer(theirs), describe_tokenizer(ours)
        found, right = f'was prepared with {was}, not with {now}', 'prepare it with the tokenizer'
        if part == 'given':
            raise ValueError(f'data.source={folder!r}: {found}; {right} of the run')
        right = "set it to 'prepared'" if data.tokenizer != 'prepared' else f'{right} of the run'
        raise ValueError(f'data.tokenizer={data.tokenizer!r}: {folder} {found}; {right}')


def _fingerprint(data, seed, corpus, tokenizer):
    source = 'prepared' if corpus.members and data.source != 'mixture' else data.source
    members = {}
    for number, member in enumerate(corpus.members if data.source == 'mixture' else (), 1):
        members[f'member_{number}'] = member.store.fingerprint
        members[f'share_{number}'] = str(member.share)
        members[f'name_{number}'] = member.name
    fingerprint = {
        **members,  # first: an error names the first field that differs
        'corpus_sha256': corpus.sha256,
        'source': source,
        'held_out_fraction': data.held_out_fraction,
        'tokenizer': tokenizer.sha256 or tokenizer.name,
        'sequence_length': data.sequence_length,
        'batch_size': data.batch_size,
        'seed': seed,
    }
    encoding = codecs.lookup(data.encoding).name
    # Others read no text with it, and older runs have none.
    if encoding != 'utf-8' and not corpus.members and data.source not in sources.MADE:
        fingerprint['encoding'] = encoding
    if corpus.packages:
        fingerprint['packages'] = ' '.join(corpus.packages)
    return fingerprint


def fractions_of_texts(fingerprint: dict) -> dict[str, float]:
    """Return the held-out fraction of each text of a `Dataset.fingerprint`.

    A text is named by its sha256, or if it is prepared by its fingerprint.
    """
    texts = [v for name, v in fingerprint.items() if name.startswith(('corpus_s', 'member_'))]
    return {text: fingerprint['held_out_fraction'] for text in texts}


def check_held_out(fingerprint: dict, trained_on: Mapping[str, float]) -> None:
    """Raise ValueError, one line, if a run would hold out text that its parents were trained on.

    `fingerprint` is of the run's Dataset, and `trained_on` like the result of `fractions_of_texts`
    for its parents.
    """
    for text, fraction in fractions_of_texts(fingerprint).items():
        if fraction > (least := trained_on.get(text, fraction)):
            right = f'must be at most {least!r}, as the model was trained on the rest of this text'
            raise ValueError(f'data.held_out_fraction={fraction!r}: {right}')


def check_fingerprint(stored: dict, current: dict) -> None:
    """Raise ValueError, one line with the first difference, if a run would resume on other data.

    Compares two `Dataset.fingerprint`s. Other versions of packages with the same text are the same
    data, and so are members with other names.
    """
    for field in (*current, *stored):
        if field == 'packages' or field.startswith('name_'):
            continue
        if field in stored and field in current and stored[field] == current[field]:
            continue
        was, now = (_show_value(fingerprint, field) for fingerprint in (stored, current))
        right = 'resume with the data of that run, or use another --workdir'
        raise ValueError(f'data fingerprint: {field} was {was} and is {now} now; {right}')


def _show_value(fingerprint, field):
    """Format a value, with the name of the member if it is a member's fingerprint."""
    value = repr(fingerprint[field]) if field in fingerprint else 'missing'
    name = fingerprint.get(field.replace('member_', 'name_'))
    return value if name is None or not field.startswith('member_') else f'{value} ({name})'
