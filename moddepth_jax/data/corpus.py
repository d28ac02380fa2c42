"""The corpus: named documents from one source, and the split that holds some of them out."""

import dataclasses
import hashlib
import platform

from moddepth_jax.data import files, python_text, recall, synthetic
from moddepth_jax.hparams import DataHparams


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, none of them without a byte.

    Attributes:
      name: `data.source`.
      train: documents to train on, in the order of their names; none of `load_held_out`.
      held_out: documents kept for evaluation, likewise; none of them is in `train`.
      sha256: over names and contents of all documents in order, hexadecimal.
      description: one line to print, with documents and bytes.
      packages: of `python_environment`, name==version of what is installed; else empty.
    """

    name: str
    train: list[bytes]
    held_out: list[bytes]
    sha256: str
    description: str
    packages: tuple[str, ...] = ()


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


def _place(name):
    """The document's place in [0, 1): its name's sha256 as a fraction."""
    digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).digest()
    return int.from_bytes(digest[:8], 'big') / 2**64


def split(
    documents: list[tuple[str, bytes]], held_out_fraction: float
) -> tuple[list[bytes], list[bytes]]:
    """(train, held_out) of (name, bytes) documents, each in the given order and never empty.

    A document is held out where the hash of its name lies below the fraction, so adding documents
    moves no other. Where that leaves one side without a document, the one nearest to the bound
    crosses it. A single document gives the last fraction of its bytes.

    Raises:
      ValueError: a single document of a single byte.
    """
    if len(documents) == 1:
        ((name, text),) = documents
        if len(text) < 2:
            raise ValueError(f'{name}: 1 byte; needs 2 or more, to train on and to hold out')
        cut = len(text) - round(len(text) * held_out_fraction)
        cut = min(max(cut, 1), len(text) - 1)
        return [text[:cut]], [text[cut:]]
    places = [_place(name) for name, _ in documents]
    bound = held_out_fraction
    if min(places) >= bound:
        held_out = {places.index(min(places))}
    elif max(places) < bound:
        held_out = set(range(len(places))) - {places.index(max(places))}
    else:
        held_out = {i for i, place in enumerate(places) if place < bound}
    train = [text for i, (_, text) in enumerate(documents) if i not in held_out]
    return train, [documents[i][1] for i in sorted(held_out)]


def _count(texts):
    documents = 'document' if len(texts) == 1 else 'documents'
    return f'{len(texts):,} {documents} of {sum(map(len, texts)):,} bytes'


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
    """The corpus that `data.source` names: stdlib, python_environment, synthetic, recall or a glob
    of the user's files.

    It does not depend on the run's seed. Documents without a byte are left out.

    Raises:
      ValueError: one line, as `files.file_documents`, `stdlib_documents`, `environment_documents`
        and `split` say, and where all documents together hold no byte.
    """
    documents, packages = _documents_with_text(data)
    train, held_out = split(documents, data.held_out_fraction)
    sides = f'{_count(train)} to train on, {_count(held_out)} held out'
    description = f'{_describe(data.source, packages)}: {sides}'
    return Corpus(data.source, train, held_out, _sha256(documents), description, packages)


def load_held_out(data: DataHparams) -> Corpus:
    """The corpus that `data.source` names, all of it held out and nothing to train on.

    Raises:
      ValueError: as `load_corpus`, but not for a single document of a single byte.
    """
    documents, packages = _documents_with_text(data)
    texts = [text for _, text in documents]
    description = f'{data.source}: {_count(texts)}'
    return Corpus(data.source, [], texts, _sha256(documents), description, packages)
