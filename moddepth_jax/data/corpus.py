"""The corpus: named documents from one source, and the split that holds some of them out."""

import collections.abc
import dataclasses
import hashlib
import platform

from moddepth_jax.data import files, python_text, recall, synthetic
from moddepth_jax.data.mixture import Documents, Member, is_prepared, load_members
from moddepth_jax.data.split import place, tail
from moddepth_jax.data.token_store import PARTS
from moddepth_jax.data.tokenizers.tokenizer import is_bytes
from moddepth_jax.hparams import DataHparams


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, none of them without a byte.

    Attributes:
      name: `data.source`.
      train: documents to train on, in the order of their names; none of `load_held_out`. Of
        prepared text each is decoded when it is asked for.
      held_out: documents kept for evaluation, likewise; none of them is in `train`, but for the
        members of `load_held_out`.
      sha256: over names and contents of all documents in order, hexadecimal; of a prepared folder
        its fingerprint; of a mixture over fingerprints and shares of its members.
      description: one line to print, with documents and bytes.
      packages: of `python_environment`, name==version of what is installed; else empty.
      members: the prepared folders; empty where the text was not prepared.
      names: of the documents by 'train' and 'held_out', for messages; empty for prepared text.
    """

    name: str
    train: collections.abc.Sequence[bytes]
    held_out: collections.abc.Sequence[bytes]
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


def _documents(data):
    """(documents, packages)."""
    if data.source == 'python_environment':
        return python_text.environment_documents()
    if data.source == 'stdlib':
        return python_text.stdlib_documents(), ()
    if data.source == 'synthetic':
        texts = synthetic.make_synthetic()
        return [(f'synthetic/{i:06d}', text) for i, text in enumerate(texts)], ()
    if data.source == 'recall':
        return [(f'recall/{i:06d}', text) for i, text in enumerate(recall.make_recall())], ()
    return files.file_documents(data.source, data.text_field), ()


def _sha256(documents):
    digest = hashlib.sha256()
    for name, text in documents:
        # Lengths first, or bytes could move from one document to the next unseen.
        name = name.encode('utf-8', 'surrogateescape')
        digest.update(b'%d %d ' % (len(name), len(text)) + name)
        digest.update(text)
    return digest.hexdigest()


def split(
    documents: list[tuple[str, bytes]], held_out_fraction: float, whole_characters: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """(train, held_out) of (name, bytes) documents, each in the given order and never empty.

    A document is held out where the hash of its name lies below the fraction, so adding documents
    moves no other. Where that leaves one side without a document, the one nearest to the bound
    crosses it. A single document gives the last fraction of its bytes; with `whole_characters`, as
    a tokenizer that is not bytes needs it, it is not cut inside a character.

    Raises:
      ValueError: a single document of a single byte, or of a single character.
    """
    sides = _split(documents, held_out_fraction, whole_characters)
    return tuple([text for _, text in side] for side in sides)


def _split(documents, held_out_fraction, whole_characters):
    """`split`, with the names."""
    if len(documents) == 1:
        ((name, text),) = documents
        try:
            cut = tail(text, held_out_fraction, whole_characters)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from None
        return [(name, text[:cut])], [(name, text[cut:])]
    places = [place(name) for name, _ in documents]
    bound = held_out_fraction
    if min(places) >= bound:
        held_out = {places.index(min(places))}
    elif max(places) < bound:
        held_out = set(range(len(places))) - {places.index(max(places))}
    else:
        held_out = {i for i, at in enumerate(places) if at < bound}
    train = [document for i, document in enumerate(documents) if i not in held_out]
    return train, [documents[i] for i in sorted(held_out)]


def _count(documents, num_bytes):
    return f'{documents:,} document{"s" * (documents != 1)} of {num_bytes:,} bytes'


def _count_texts(documents):
    return _count(len(documents), sum(len(text) for _, text in documents))


def _describe(name, packages):
    version = f'Python {platform.python_version()}'
    details = {'stdlib': version, 'python_environment': f'{version}, {len(packages)} packages'}
    return f'{name} ({details[name]})' if name in details else name


def _documents_with_text(data):
    found, packages = _documents(data)
    documents = [(name, text) for name, text in found if text]
    if not documents:
        count = f'{len(found)} document' + 's' * (len(found) != 1)
        right = 'must match text of 2 bytes or more'
        raise ValueError(f'data.source={data.source!r}: no byte in its {count}; {right}')
    return documents, packages


def load_corpus(data: DataHparams) -> Corpus:
    """The corpus that `data.source` names.

    That is stdlib, python_environment, synthetic, recall, a glob of the user's files, a folder of
    launch.prepare, or the mixture of such folders. It does not depend on the run's seed. Documents
    without a byte are left out. Of prepared text nothing is read.

    Raises:
      ValueError: one line, as `files.file_documents`, `stdlib_documents`, `environment_documents`,
        `load_members` and `split` say, where all documents together hold no byte, and where
        prepared text was split by another fraction.
    """
    if is_prepared(data.source):
        return _prepared(data)
    documents, packages = _documents_with_text(data)
    # Bytes may be cut anywhere, and where they are decides the bits of every run on them.
    whole_characters = not is_bytes(data.tokenizer)
    train, held_out = _split(documents, data.held_out_fraction, whole_characters)
    sides = f'{_count_texts(train)} to train on, {_count_texts(held_out)} held out'
    description = f'{_describe(data.source, packages)}: {sides}'
    names = {'train': [name for name, _ in train], 'held_out': [name for name, _ in held_out]}
    texts = ([text for _, text in side] for side in (train, held_out))
    return Corpus(data.source, *texts, _sha256(documents), description, packages, names=names)


def load_held_out(data: DataHparams, trained_on: collections.abc.Set[str] = frozenset()) -> Corpus:
    """The corpus that `data.source` names, all of it held out and nothing to train on.

    Args:
      data: of the text.
      trained_on: fingerprints of prepared text; of a folder with one of them, only the part that
        was held out is.

    Raises:
      ValueError: as `load_corpus`, but not for a single document of a single byte, nor for a
        fraction.
    """
    if is_prepared(data.source):
        members = tuple(
            member
            if member.store.fingerprint in trained_on
            else dataclasses.replace(member, held_out=PARTS)
            for member in load_members(data)
        )
        documents = Documents((m.store, part) for m in members for part in m.held_out)
        counts = [getattr(m.store, part) for m in members for part in m.held_out]
        description = f'{_title(data, members)}: {_sum(counts)}'
        return Corpus(data.source, [], documents, _joint(data, members), description, (), members)
    documents, packages = _documents_with_text(data)
    names, texts = ([document[i] for document in documents] for i in (0, 1))
    description = f'{data.source}: {_count_texts(documents)}'
    sha256, names = _sha256(documents), {'held_out': names}
    return Corpus(data.source, [], texts, sha256, description, packages, names=names)


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
    train, held_out = (Documents((m.store, part) for m in members) for part in PARTS)
    counts = [[getattr(member.store, part) for member in members] for part in PARTS]
    sides = f'{_sum(counts[0])} to train on, {_sum(counts[1])} held out'
    description = f'{_title(data, members)}: {sides}'
    sha256 = _joint(data, members)
    return Corpus(data.source, train, held_out, sha256, description, (), members)


def _sum(counts):
    return _count(*(sum(count[field] for count in counts) for field in ('documents', 'bytes')))


def _title(data, members):
    if data.source != 'mixture':
        return data.source
    return f'mixture of {", ".join(member.name for member in members)}'


def _joint(data, members):
    if data.source != 'mixture':
        return members[0].store.fingerprint
    text = ''.join(f'{member.store.fingerprint} {member.share}\n' for member in members)
    return hashlib.sha256(text.encode()).hexdigest()
