"""The corpus: documents of one source, split into training and held-out documents."""

import dataclasses
import hashlib
import platform
from collections.abc import Mapping, Sequence

from moddepth_jax.data import python_text, recall, sources, synthetic
from moddepth_jax.data.mixture import Member, is_prepared, load_members
from moddepth_jax.data.split import split_documents
from moddepth_jax.data.token_store import SPLITS, StoredDocuments
from moddepth_jax.data.tokenizers.tokenizer import is_bytes
from moddepth_jax.hparams import DataHparams


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training documents (none with `load_held_out` of new text) and held-out ones; none is empty.

    Attributes:
      name: `data.source`.
      train, held_out: documents, split by their names; those of prepared text decode on access.
      sha256: hex digest of the names and contents of all documents in order. For a prepared folder,
        its fingerprint; for a mixture, a digest of its members' fingerprints and shares.
      description: one line to print, with the numbers of documents and bytes.
      packages: for `python_environment`, name==version of the installed packages.
      members: the prepared folders.
      left_out: a note on files without text, or ''; the description includes it.
    """

    name: str
    train: Sequence[bytes]
    held_out: Sequence[bytes]
    sha256: str
    description: str
    packages: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    left_out: str = ''

    def train_bytes(self) -> int:
        """Return the bytes of all training documents."""
        return _num_bytes(self.train)


def load_corpus(data: DataHparams) -> Corpus:
    """Load the corpus of `data.source`, without empty documents.

    Only the description of prepared text is read. Raises ValueError, one line, like the reader of
    the source, `load_members` and `split_documents`; also if all documents are empty, or if
    prepared text was split with another fraction.
    """
    if is_prepared(data.source):
        members = load_members(data)
        for folder, member in zip(data.folders, members, strict=True):
            if (found := member.store.held_out_fraction) != data.held_out_fraction:
                raise ValueError(
                    f'data.held_out_fraction={data.held_out_fraction!r}: {folder} was prepared '
                    f'with {found!r}; set it to {found!r}, or prepare the text again'
                )
        train, held_out = ([(member.store, split) for member in members] for split in SPLITS)
        return _prepared(data, members, train, held_out)
    documents, packages, left_out = _nonempty_documents(data)
    train, held_out = _split(documents, data)
    details = f'Python {platform.python_version()}'
    if packages:
        details += f', {len(packages)} packages'
    is_python = data.source in ('stdlib', 'python_environment')
    title = f'{data.source} ({details})' if is_python else data.source
    return _of_documents(title, data, documents, packages, left_out, train, held_out)


def load_held_out(data: DataHparams, trained_on: Mapping[str, float] | None = None) -> Corpus:
    """Load the corpus of `data.source` as held-out documents, with nothing to train on.

    Text whose sha256 (or fingerprint, if it is prepared) is in `trained_on` is split as in
    `load_corpus`, by the held-out fraction that it has there, so that only its held-out documents
    are used. Raises ValueError like that, except for the fraction or, of other text, a single
    document of one byte.
    """
    trained_on = trained_on or {}
    if is_prepared(data.source):
        members = tuple(
            member
            if member.store.fingerprint in trained_on
            else dataclasses.replace(member, held_out=SPLITS)
            for member in load_members(data)
        )
        held_out = [(member.store, split) for member in members for split in member.held_out]
        return _prepared(data, members, [], held_out)
    documents, packages, left_out = _nonempty_documents(data)
    corpus = _of_documents(data.source, data, documents, packages, left_out, [], documents)
    if corpus.sha256 in trained_on:
        data = dataclasses.replace(data, held_out_fraction=trained_on[corpus.sha256])
        train, held_out = _split(documents, data)
        corpus = _of_documents(data.source, data, documents, packages, left_out, train, held_out)
    return corpus


def _split(documents, data):
    """Return the training and the held-out documents as lists of (name, text)."""
    # With bytes, a document may be cut inside a character: fingerprints hold that split.
    return split_documents(documents, data.held_out_fraction, not is_bytes(data.tokenizer))


def _nonempty_documents(data):
    """Return (documents, packages, note on files that were left out)."""
    packages, left_out = (), ''
    match data.source:
        case 'python_environment':
            found, packages = python_text.environment_documents()
        case 'stdlib':
            found = python_text.stdlib_documents()
        case 'synthetic' | 'recall':
            is_recall = data.source == 'recall'
            texts = recall.make_recall() if is_recall else synthetic.make_synthetic()
            found = [(f'{data.source}/{i:06d}', text) for i, text in enumerate(texts)]
        case _:
            found, left_out = sources.load_documents(data.source, data.text_field, data.encoding)
    documents = [(name, text) for name, text in found if text]
    if not documents:
        count = f'{len(found)} document' + 's' * (len(found) != 1)
        right = 'must have text of 2 bytes or more'
        raise sources.NoText(f'data.source={data.source!r}: no byte in its {count}; {right}')
    return documents, packages, left_out


def _of_documents(title, data, documents, packages, left_out, train, held_out):
    digest = hashlib.sha256()
    for name, text in documents:
        # Without the lengths, the digest would not show bytes that move to the next document.
        name = name.encode('utf-8', 'surrogateescape')
        digest.update(b'%d %d ' % (len(name), len(text)) + name)
        digest.update(text)
    train, held_out = ([text for _, text in side] for side in (train, held_out))
    text = _describe(title, train, held_out) + f'; {left_out}' * bool(left_out)
    sha256 = digest.hexdigest()
    return Corpus(data.source, train, held_out, sha256, text, packages, left_out=left_out)


def _prepared(data, members, train, held_out):
    """Return the Corpus of prepared folders; `train` and `held_out` list (store, split)."""
    title, sha256 = data.source, members[0].store.fingerprint
    if data.source == 'mixture':
        title = f'mixture of {", ".join(member.name for member in members)}'
        text = ''.join(f'{member.store.fingerprint} {member.share}\n' for member in members)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
    train, held_out = (StoredDocuments(splits) if splits else [] for splits in (train, held_out))
    text = _describe(title, train, held_out)
    return Corpus(data.source, train, held_out, sha256, text, members=members)


def _num_bytes(documents):
    stored = isinstance(documents, StoredDocuments)
    return documents.num_bytes if stored else sum(map(len, documents))


def _describe(title, train, held_out):
    first, second = (
        f'{len(side):,} document{"s" * (len(side) != 1)} of {_num_bytes(side):,} bytes'
        for side in (train, held_out)
    )
    return f'{title}: {first} to train on, {second} held out' if train else f'{title}: {second}'
