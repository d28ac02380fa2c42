"""The corpus: named documents from one source, and the split that holds some of them out."""

import dataclasses
import hashlib
import platform
from collections.abc import Sequence, Set

from moddepth_jax.data import python_text, readers, recall, synthetic
from moddepth_jax.data.mixture import Member, is_prepared, load_members
from moddepth_jax.data.split import Document, split_documents
from moddepth_jax.data.token_store import SPLITS, StoredDocuments
from moddepth_jax.data.tokenizers.tokenizer import is_bytes
from moddepth_jax.hparams import DataHparams


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, none of them empty.

    Attributes:
      name: `data.source`.
      train: documents to train on, in the order of their names; none for `load_held_out`. Those of
        prepared text are decoded on access.
      held_out: documents kept for evaluation, likewise; none of them is in `train`, except for the
        members of `load_held_out`.
      sha256: over names and contents of all documents in order, hexadecimal; of a prepared folder
        its fingerprint; of a mixture over fingerprints and shares of its members.
      description: one line to print, with documents and bytes.
      packages: of `python_environment`, name==version of what is installed; otherwise empty.
      members: the prepared folders; empty for text that was not prepared.
      names: of the documents by 'train' and 'held_out', for messages; empty for prepared text.
    """

    name: str
    train: Sequence[bytes]
    held_out: Sequence[bytes]
    sha256: str
    description: str
    packages: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def train_bytes(self) -> int:
        """Bytes of all documents to train on."""
        if self.members:
            return sum(member.store.train['bytes'] for member in self.members)
        return sum(map(len, self.train))


def load_corpus(data: DataHparams) -> Corpus:
    """The corpus that `data.source` names, the same for every seed of the run.

    A source is stdlib, python_environment, synthetic, recall, a glob of the user's files, a folder
    of launch.prepare, or a mixture of such folders. Empty documents are left out. Of prepared text
    only its description is read.

    Raises:
      ValueError: one line, as `readers.load_documents`, `stdlib_documents`,
        `environment_documents`, `load_members` and `split_documents`; if all documents are empty;
        if prepared text was split by another fraction.
    """
    if is_prepared(data.source):
        return _prepared(data)
    documents, packages = _nonempty_documents(data)
    # Bytes may be cut anywhere, and where they are cut decides the bits of every run on them.
    whole_characters = not is_bytes(data.tokenizer)
    train, held_out = split_documents(documents, data.held_out_fraction, whole_characters)
    version = f'Python {platform.python_version()}'
    details = {
        'stdlib': f' ({version})',
        'python_environment': f' ({version}, {len(packages)} packages)',
    }
    sides = f'{_count(train)} to train on, {_count(held_out)} held out'
    description = f'{data.source}{details.get(data.source, "")}: {sides}'
    return Corpus(
        data.source,
        [text for _, text in train],
        [text for _, text in held_out],
        _sha256(documents),
        description,
        packages,
        names={'train': [name for name, _ in train], 'held_out': [name for name, _ in held_out]},
    )


def load_held_out(data: DataHparams, trained_on: Set[str] = frozenset()) -> Corpus:
    """The corpus that `data.source` names, all of it held out and nothing to train on.

    Args:
      data: of the text.
      trained_on: fingerprints of prepared text; a folder with one of them gives only what it holds
        out.

    Raises:
      ValueError: as `load_corpus`, but not for a single document of a single byte, nor for a
        fraction.
    """
    if is_prepared(data.source):
        members = tuple(
            member
            if member.store.fingerprint in trained_on
            else dataclasses.replace(member, held_out=SPLITS)
            for member in load_members(data)
        )
        splits = [(member.store, split) for member in members for split in member.held_out]
        description = f'{_title(data, members)}: {_count_stored(splits)}'
        documents, sha256 = StoredDocuments(splits), _joint_sha256(data, members)
        return Corpus(data.source, [], documents, sha256, description, members=members)
    documents, packages = _nonempty_documents(data)
    return Corpus(
        data.source,
        [],
        [text for _, text in documents],
        _sha256(documents),
        f'{data.source}: {_count(documents)}',
        packages,
        names={'held_out': [name for name, _ in documents]},
    )


def _documents(data):
    """(documents, packages)."""
    match data.source:
        case 'python_environment':
            return python_text.environment_documents()
        case 'stdlib':
            return python_text.stdlib_documents(), ()
        case 'synthetic':
            texts = synthetic.make_synthetic()
        case 'recall':
            texts = recall.make_recall()
        case _:
            return readers.load_documents(data.source, data.text_field), ()
    return [(f'{data.source}/{i:06d}', text) for i, text in enumerate(texts)], ()


def _nonempty_documents(data):
    found, packages = _documents(data)
    documents = [(name, text) for name, text in found if text]
    if not documents:
        count = f'{len(found)} document' + 's' * (len(found) != 1)
        right = 'must match text of 2 bytes or more'
        raise ValueError(f'data.source={data.source!r}: no byte in its {count}; {right}')
    return documents, packages


def _sha256(documents):
    digest = hashlib.sha256()
    for name, text in documents:
        # With the lengths, or bytes could move from one document to the next unnoticed.
        name = name.encode('utf-8', 'surrogateescape')
        digest.update(b'%d %d ' % (len(name), len(text)) + name)
        digest.update(text)
    return digest.hexdigest()


def _prepared(data):
    members = load_members(data)
    for folder, member in zip(data.folders, members, strict=True):
        found = member.store.held_out_fraction
        if found != data.held_out_fraction:
            right = f'set it to {found!r}, or prepare the text again'
            raise ValueError(
                f'data.held_out_fraction={data.held_out_fraction!r}: {folder} was prepared with '
                f'{found!r}; {right}'
            )
    train, held_out = ([(member.store, split) for member in members] for split in SPLITS)
    sides = f'{_count_stored(train)} to train on, {_count_stored(held_out)} held out'
    return Corpus(
        data.source,
        StoredDocuments(train),
        StoredDocuments(held_out),
        _joint_sha256(data, members),
        f'{_title(data, members)}: {sides}',
        members=members,
    )


def _count(documents: list[Document]):
    return _describe_count(len(documents), sum(len(text) for _, text in documents))


def _count_stored(splits):
    counts = [getattr(store, split) for store, split in splits]
    num_bytes = sum(count['bytes'] for count in counts)
    return _describe_count(sum(count['documents'] for count in counts), num_bytes)


def _describe_count(documents, num_bytes):
    return f'{documents:,} document{"s" * (documents != 1)} of {num_bytes:,} bytes'


def _title(data, members):
    if data.source != 'mixture':
        return data.source
    return f'mixture of {", ".join(member.name for member in members)}'


def _joint_sha256(data, members):
    if data.source != 'mixture':
        return members[0].store.fingerprint
    text = ''.join(f'{member.store.fingerprint} {member.share}\n' for member in members)
    return hashlib.sha256(text.encode()).hexdigest()
