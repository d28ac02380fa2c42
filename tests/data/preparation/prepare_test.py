"""A preparation gives the tokens of the raw files, resumes, and refuses bad text."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import random

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from moddepth_jax.data.corpus import load_corpus
from moddepth_jax.data.preparation import encode as encode_module
from moddepth_jax.data.preparation import prepare as prepare_module
from moddepth_jax.data.preparation import workers
from moddepth_jax.data.preparation.parts import PartWriter
from moddepth_jax.data.preparation.plan import Options, Task
from moddepth_jax.data.preparation.prepare import prepare
from moddepth_jax.data.token_store import SPLITS, StoreWriter
from moddepth_jax.data.tokenizers import json_tokenizer
from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.data.windows import token_stream
from tests.data import tokenizer_files
from tests.data.prepared_text import data_hparams, refusal

FRACTION = 0.25


class _InProcess:
    """Does the jobs in this process, since others take half a second to start."""

    def __init__(self, count, threads=1):
        pass

    def run(self, function, jobs, advance):
        return [function(*job, advance) for job in jobs]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture(scope='module', autouse=True)
def no_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, 'Workers', _InProcess)
        yield


@contextlib.contextmanager
def _phase(what, total, done=0):
    yield lambda num_bytes: None


def _options(folder, output, **changes):
    options = Options(
        sources=(f'{folder}/**/*.*',),
        directory=pathlib.Path(output),
        tokenizer='bytes',
        separator=None,
        text_field='text',
        encoding='utf-8',
        held_out_fraction=FRACTION,
        skip_bad=False,
        part_bytes=1000,
        bpe_bytes=10**6,
        processes=1,
    )
    return dataclasses.replace(options, **changes)


def _prepare(folder, output, **changes):
    return prepare(_options(folder, output, **changes), _phase)


def _error(*args, **changes):
    return refusal(_prepare, *args, **changes)


def _zstd(data):
    return pyarrow.compress(data, 'zstd', asbytes=True)


def _jsonl(texts):
    return ''.join(json.dumps({'text': text}) + '\n' for text in texts).encode()


def _raw(folder, tokenizer='bytes', fraction=FRACTION):
    knobs = {'tokenizer': tokenizer, 'held_out_fraction': fraction}
    return load_corpus(data_hparams(f'{folder}/**/*.*', **knobs))


def _texts(store):
    return sorted([*store.documents('train'), *store.documents('held_out')])


def _content(store):
    names = [f'{part}.{kind}' for part in SPLITS for kind in ('bin', 'index')]
    return {name: (store.directory / name).read_bytes() for name in names}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Documents of every kind, in folders; some empty, some long, one file compressed twice."""
    folder = tmp_path_factory.mktemp('prepare') / 'in'
    (folder / 'b/deep').mkdir(parents=True)
    draw = random.Random(0)

    def texts(n):
        words = ['to ', 'be, ', 'or ', 'nöt\n']
        return [''.join(draw.choices(words, k=draw.randrange(60))) for _ in range(n)]

    for i in range(12):
        (folder / f'b/deep/{i}.txt').write_text(texts(1)[0])
    (folder / 'a.jsonl').write_bytes(_jsonl(texts(40)))
    (folder / 'b/c.jsonl.gz').write_bytes(gzip.compress(_jsonl(texts(30))))
    (folder / 'b/c.jsonl.zst').write_bytes(_zstd(_jsonl(texts(30))))
    table = pyarrow.table({'n': list(range(30)), 'text': texts(30)})
    parquet.write_table(table, folder / 'd.parquet', row_group_size=7)
    return folder


@pytest.fixture(scope='module')
def store(folder, tmp_path_factory):
    return _prepare(folder, tmp_path_factory.mktemp('prepare') / 'out')


def test_prepared_text_is_that_of_the_raw_files(folder, store):
    raw, tokenizer = _raw(folder), make_tokenizer('bytes')
    for part in SPLITS:
        documents = getattr(raw, part)
        assert len(documents) > 20
        assert list(store.documents(part)) == documents
        stream = token_stream(documents, tokenizer)
        assert np.array_equal(store.tokens(part), stream)
        counts = getattr(store, part)
        assert counts['documents'] == len(documents) and counts['tokens'] == len(stream)
        assert counts['bytes'] == sum(map(len, documents))
        starts = np.flatnonzero(stream == tokenizer.separator)
        assert np.array_equal(store.offsets(part), [*starts, len(stream)])
    assert store.skipped['empty']['count'] > 0
    files = [path for path in folder.rglob('*') if path.is_file()]
    assert [entry['name'] for entry in store.inputs] == sorted(
        path.relative_to(folder).as_posix() for path in files
    )


def test_processes_parts_and_place_do_not_change_the_result(folder, store, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, 'Workers', workers.Workers)
    (tmp_path / 'moved').symlink_to(folder)
    other = _prepare(tmp_path / 'moved', tmp_path / 'out', processes=2, part_bytes=10**6)
    assert other.fingerprint == store.fingerprint
    assert _content(other) == _content(store)


@pytest.mark.parametrize('fraction', [1e-6, 1 - 1e-6])
def test_no_split_is_empty(tmp_path, fraction):
    """If the hash holds out all documents or none, the same one moves as for the raw files."""
    (tmp_path / 'in').mkdir()
    for i in range(4):
        (tmp_path / f'in/{i}.txt').write_text(f'text {i}')
    store = _prepare(tmp_path / 'in', tmp_path / 'out', held_out_fraction=fraction, part_bytes=1)
    raw = _raw(tmp_path / 'in', fraction=fraction)
    for part in SPLITS:
        assert list(store.documents(part)) == getattr(raw, part)
        assert getattr(store, part)['bytes'] == sum(map(len, getattr(raw, part)))


def test_a_single_document_gives_its_tail(tmp_path):
    """As with the raw file: bytes are cut anywhere, BPE does not cut a character."""
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/book.txt').write_text('to be or nöt ' * 20 + 'x' + 'ö' * 81)
    cuts = {}
    for name in ('bytes', 'bpe:260'):
        store = _prepare(tmp_path / 'in', tmp_path / name, tokenizer=name)
        kept = str(store.directory / 'tokenizer')
        for same in {'bytes', kept} if name == 'bytes' else {kept}:
            raw, tokenizer = _raw(tmp_path / 'in', same), make_tokenizer(same)
            for part in SPLITS:
                assert store.documents(part)[:] == getattr(raw, part)
                stream = token_stream(getattr(raw, part), tokenizer)
                assert np.array_equal(store.tokens(part), stream)
        cuts[name] = len(raw.train[0])
    assert cuts['bytes'] == cuts['bpe:260'] + 1  # the case in which the two differ


def test_a_tokenizer_is_trained_on_documents_to_train_on(folder, tmp_path):
    store = _prepare(folder, tmp_path / 'out', tokenizer='bpe:265')
    raw = _raw(folder)
    alone = train_bpe(iter(raw.train), 265)
    assert store.tokenizer['sha256'] == alone.sha256 and store.tokenizer['vocab_size'] == 265
    for part in SPLITS:
        assert np.array_equal(store.tokens(part), token_stream(getattr(raw, part), alone))


@pytest.mark.parametrize('fraction', [1e-6, 1 - 1e-6])
def test_a_tokenizer_is_never_trained_on_the_document_that_moves(tmp_path, fraction):
    """Regression: if the hash holds out all documents or none, it was trained on all of them."""
    (tmp_path / 'in').mkdir()
    for word in ('hamlet', 'ophelia', 'gertrude', 'yorick'):
        (tmp_path / f'in/{word}.txt').write_text(f'{word} ' * 40)
    (tmp_path / 'in/empty.txt').write_text('')
    knobs = {'tokenizer': 'bpe:262', 'held_out_fraction': fraction}
    store = _prepare(tmp_path / 'in', tmp_path / 'out', **knobs)
    texts = _raw(tmp_path / 'in', fraction=fraction).train
    assert store.tokenizer['sha256'] == train_bpe(iter(texts), 262).sha256


TEXTS = [f'text {i}' for i in range(20)]
LONG = _jsonl(random.Random(i).randbytes(500).hex() for i in range(400))
NO_FIELD = b'{"body": "x"}\n'


def _with_line(line):
    lines = _jsonl(TEXTS).splitlines(keepends=True)
    return b''.join([*lines[:6], line, *lines[7:]])


# Name of the file, its content, words of the message.
BAD = {
    'field': (
        'b.jsonl',
        _with_line(NO_FIELD),
        ["line 7: no field 'text'; set data.text_field to one that it has: 'body'"],
    ),
    'txt': ('b.txt', b'caf\xe9', [': byte 3 is 0xe9, which is not UTF-8', 'or save it as UTF-8']),
    'empty': ('b.txt.gz', b'', [': its data are damaged or cut off (0 bytes); write']),
    'gz': ('b.jsonl.gz', gzip.compress(LONG)[:100_000], ['after row ', 'cut off (Truncated']),
}


def _plant(folder, kind=None):
    """Write a good file of 20 rows and then a bad one; returns the path of the bad one."""
    folder.mkdir()
    (folder / 'a.jsonl').write_bytes(_jsonl(TEXTS))
    name, content, _ = BAD.get(kind, ('b.jsonl', _jsonl(TEXTS), None))
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize('kind', BAD)
def test_bad_text_is_named_and_can_be_skipped(tmp_path, kind):
    path = _plant(tmp_path / 'in', kind)
    message = _error(tmp_path / 'in', tmp_path / 'out', part_bytes=200)
    assert message.startswith(str(path)) and all(part in message for part in BAD[kind][2])
    assert message.endswith(
        'or --skip_bad leaves it out; finished parts are kept: the same command continues'
    )
    store = _prepare(tmp_path / 'in', tmp_path / 'out', part_bytes=200, skip_bad=True)
    assert store.train['documents'] + store.held_out['documents'] >= 20
    ((_, entry),) = store.skipped.items()
    assert entry['count'] == 1 and entry['first'][0].startswith(str(path))


def test_parts_after_a_damaged_one_are_done_again(tmp_path):
    """The third of many parts of a file is lost: no row is repeated or missing in the result.

    Those after it are removed first: the parts that replace them may end at other rows.
    """
    (tmp_path / 'in').mkdir()
    texts = [f'text {i} ' * 5 for i in range(60)]
    lines = _jsonl(texts).splitlines(keepends=True)
    bad = b''.join([*lines[:50], b'{"text": \n', *lines[50:]])
    (tmp_path / 'in/a.jsonl.gz').write_bytes(gzip.compress(bad))
    _error(tmp_path / 'in', tmp_path / 'out', part_bytes=170)
    parts = sorted((tmp_path / 'out/parts').glob('*.part'))
    assert len(parts) > 6
    task = Task(parts[0].name[:-11], [], 0)
    task.remove_parts(tmp_path / 'out/parts', 4)
    assert [part for part in parts if part.exists()] == parts[:4]
    for damaged in (b'\xff' * 50, b'\2' + bytes(7) + b'[]', b'\x18' + bytes(7) + b'[' * 24, b''):
        parts[2].write_bytes(damaged)
        assert len(task.parts(tmp_path / 'out/parts')) == 2
    knobs = dict(part_bytes=170, skip_bad=True)
    content = parts[1].read_bytes()
    parts[1].write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    message = _error(tmp_path / 'in', tmp_path / 'out', **knobs)
    remedy = 'remove it, and the same command continues'
    assert message == f'{parts[1]}: was changed after it was written; {remedy}'
    parts[1].unlink()
    store = _prepare(tmp_path / 'in', tmp_path / 'out', **knobs)
    assert _texts(store) == sorted(text.encode() for text in texts)


def test_a_folder_in_another_encoding_is_prepared_as_its_text(tmp_path):
    stores = {}
    for name in ('utf-8', 'utf-16'):
        (tmp_path / name).mkdir()
        for file in ('a.md', 'b', 'c.py'):
            (tmp_path / name / file).write_text(f'text of {file}, é', encoding=name)
        (tmp_path / name / 'logo.png').write_bytes(b'\x89PNG\r\n\x1a\n\0\0\0\r')
        how = {'sources': (str(tmp_path / name),), 'encoding': name.upper()}
        stores[name] = _prepare(None, tmp_path / f'{name}.out', **how)
        assert _prepare(None, tmp_path / f'{name}.out', **how) == stores[name]
        left_out = {'count': 1, 'first': [f'{tmp_path}/{name}/logo.png']}
        assert stores[name].skipped == {'no text': left_out}
    message = _error(None, tmp_path / 'utf-16.out', **how | {'encoding': 'utf-8'})
    assert "encoding was 'utf-16' when it was started and is None now" in message
    how['sources'] = (str(tmp_path / 'utf-8'),)
    message = _error(None, tmp_path / 'utf-8.out', **how | {'encoding': 'cp1252'})
    assert "encoding was None when it was started and is 'cp1252' now" in message
    assert stores['utf-16'].fingerprint == stores['utf-8'].fingerprint
    assert 'encoding' not in stores['utf-8'].arguments  # as in earlier stores


def test_another_preparation_is_refused(folder, store, tmp_path):
    _plant(tmp_path / 'in', 'field')
    _error(tmp_path / 'in', tmp_path / 'out', part_bytes=100)
    message = _error(tmp_path / 'in', tmp_path / 'out', part_bytes=100, text_field='body')
    assert "text_field was 'text' when it was started and is 'body' now; use" in message

    assert _prepare(folder, store.directory) == store
    assert 'tokenizer was' in _error(folder, store.directory, tokenizer='bpe:300')
    message = _error(tmp_path / 'in', store.directory)
    assert 'a.jsonl is not what it was when this text was prepared; use another' in message


def test_the_output_may_lie_in_the_input(tmp_path):
    """Its files are no text, neither when a start continues nor for a run on the folder."""
    folder, out = tmp_path / 'in', tmp_path / 'in/out'
    path = _plant(folder, 'field')
    for _ in range(2):
        assert 'line 7: no field' in _error(folder, out, sources=(str(folder),))
    path.write_bytes(_jsonl(TEXTS))
    store = _prepare(folder, out, sources=(str(folder),))
    assert _prepare(folder, out) == store
    raw = load_corpus(data_hparams(folder, held_out_fraction=FRACTION))
    assert [list(store.documents(part)) for part in SPLITS] == [raw.train, raw.held_out]


def test_other_files_do_not_change_the_tokenizer(tmp_path, monkeypatch):
    """Not those next to it in a folder, and no folder that is called bytes."""
    monkeypatch.chdir(tmp_path)
    _plant(tmp_path / 'in')
    tokenizer_files.byte_level().save('model')
    for output, tokenizer in (('out', 'model'), ('bytes', 'bytes')):
        store = _prepare(tmp_path / 'in', output, tokenizer=tokenizer)
        (tmp_path / 'model/README.md').write_text(output)
        assert _prepare(tmp_path / 'in', output, tokenizer=tokenizer) == store


class _Backwards(_InProcess):
    """Does the last job first, as if other processes were faster."""

    def run(self, function, jobs, advance):
        return [function(*job, advance) for job in reversed(list(jobs))][::-1]


def _four_files(folder, bad_line=6, bad_file=2):
    """Write four files of 60 rows; returns (path, lines) of one with a row without the field."""
    folder.mkdir()
    for i in range(4):
        lines = _jsonl(f'text {i} {row} ' * 4 for row in range(60)).splitlines(keepends=True)
        path = folder / f'f{i}.jsonl'
        if i == bad_file:
            lines[bad_line] = NO_FIELD
            bad = path, lines
        path.write_bytes(b''.join(lines))
    return bad


def _correct(path, lines, text):
    path.write_bytes(b''.join(lines).replace(NO_FIELD, _jsonl([text])))


@pytest.mark.parametrize(('order', 'length'), [(_InProcess, 40), (_Backwards, 1)])
def test_only_a_corrected_file_is_done_again(tmp_path, monkeypatch, order, length):
    """Only rows in the same part may be done twice; the result is that of a fresh start."""
    # A span of 210 bytes is longer than an average row, so that parts have two rows, of two files.
    monkeypatch.setattr(prepare_module, 'Workers', order)
    begun, add = [], PartWriter.add

    def note(writer, name, text):
        begun.append(name)
        add(writer, name, text)

    monkeypatch.setattr(PartWriter, 'add', note)
    path, lines = _four_files(tmp_path / 'in')
    message = _error(tmp_path / 'in', tmp_path / 'out', part_bytes=210)
    assert 'f2.jsonl, line 7: no field' in message
    done = {name for name in begun if not name.startswith('f2')}
    assert len(done) >= 55
    _correct(path, lines, 'corrected ' * length)
    begun.clear()
    store = _prepare(tmp_path / 'in', tmp_path / 'out', part_bytes=210)
    assert len([name for name in begun if name.startswith('f2')]) == 60
    assert len(done.intersection(begun)) <= 10
    fresh = _prepare(tmp_path / 'in', tmp_path / 'fresh', part_bytes=210)
    assert _content(store) == _content(fresh)


@pytest.fixture
def sampled(monkeypatch):
    """The lengths of the texts on which a tokenizer is trained."""
    found, train = [], json_tokenizer.train_bpe

    def counted(texts, vocab_size):
        found[:] = map(len, texts := list(texts))
        return train(iter(texts), vocab_size)

    monkeypatch.setattr(json_tokenizer, 'train_bpe', counted)
    return found


def test_a_tokenizer_is_trained_on_bpe_bytes_of_compressed_text(tmp_path, sampled):
    """Regression: if the files were smaller than --bpe_bytes on disk, all text was read."""
    (tmp_path / 'in').mkdir()
    for name in 'ab':
        texts = _jsonl([f'to be or not {name}' * 20] * 2000)
        (tmp_path / f'in/{name}.jsonl.gz').write_bytes(gzip.compress(texts))
    bpe_bytes = 50_000
    assert sum(path.stat().st_size for path in (tmp_path / 'in').iterdir()) < bpe_bytes
    _prepare(tmp_path / 'in', tmp_path / 'out', tokenizer='bpe:260', bpe_bytes=bpe_bytes)
    assert bpe_bytes <= sum(sampled) < bpe_bytes + 2 * 300


def test_a_sample_of_many_tasks_has_bpe_bytes_with_parts_of_any_size(
    tmp_path, monkeypatch, sampled
):
    """Regression: each task gave a text, and there were as many tasks as parts."""
    monkeypatch.setattr(prepare_module, '_MIN_TASK_BYTES', 100)
    (tmp_path / 'in').mkdir()
    texts = [f'to be or not {row} ' * 20 for row in range(400)]
    (tmp_path / 'in/a.jsonl').write_bytes(_jsonl(texts))
    samples = []
    for part_bytes in (300, 10**6):
        knobs = dict(tokenizer='bpe:260', bpe_bytes=3000, part_bytes=part_bytes)
        _prepare(tmp_path / 'in', tmp_path / f'{part_bytes}', **knobs)
        samples.append(list(sampled))
    assert samples[0] == samples[1]
    assert 3000 < sum(sampled) < 1.1 * 3000 + max(sampled)


def test_a_tokenizer_is_trained_on_the_corrected_text(tmp_path, monkeypatch):
    """Its sample is that of a fresh start, although the text is longer and split elsewhere."""
    monkeypatch.setattr(prepare_module, '_MIN_TASK_BYTES', 100)
    knobs = dict(tokenizer='bpe:300', bpe_bytes=10_000, part_bytes=10**6)
    path, lines = _four_files(tmp_path / 'in', bad_line=0)
    message = _error(tmp_path / 'in', tmp_path / 'out', **knobs)
    assert message.endswith('the same command continues')
    _correct(path, lines, 'corrected by much more text ' * 900)
    store = _prepare(tmp_path / 'in', tmp_path / 'out', **knobs)
    fresh = _prepare(tmp_path / 'in', tmp_path / 'fresh', **knobs)
    assert store.tokenizer == fresh.tokenizer and store.fingerprint == fresh.fingerprint


def test_text_that_a_tokenizer_was_trained_on_must_not_change(tmp_path):
    """A bad row after the sample may be skipped, but corrected only in a new start."""
    knobs = dict(tokenizer='bpe:260', bpe_bytes=1000, part_bytes=10**6)
    path, lines = _four_files(tmp_path / 'in', bad_line=59)
    out = tmp_path / 'out'
    message = _error(tmp_path / 'in', out, **knobs)
    right = f'start again (rm -r {out}): bpe:260 was trained on the current text'
    assert message.endswith(f'--skip_bad leaves it out; to correct it, {right}')
    _correct(path, lines, 'corrected')
    message = _error(tmp_path / 'in', out, **knobs)
    assert f'f2.jsonl is not what it was when bpe:260 was trained; to start again: rm -r {out}' in (
        message
    )
    path.write_bytes(b''.join(lines))
    store = _prepare(tmp_path / 'in', out, skip_bad=True, **knobs)
    assert store.skipped['no field']['count'] == 1


def test_a_file_that_is_written_to_while_it_is_read_is_read_again(tmp_path):
    path, lines = _four_files(tmp_path / 'in', bad_file=1)
    _correct(path, lines, 'corrected')
    path = tmp_path / 'in/f2.jsonl'
    content = path.read_bytes()

    @contextlib.contextmanager
    def phase(what, total, done=0):
        if what == 'tokens':
            path.write_bytes(content.replace(b'text 2', b'TEXT 2'))
        yield lambda num_bytes: None
        if what == 'tokens':
            path.write_bytes(content)

    with pytest.raises(ValueError, match='f2.jsonl was written to while it was read; .* continues'):
        prepare(_options(tmp_path / 'in', tmp_path / 'out', part_bytes=200), phase)
    assert any((tmp_path / 'out/parts').glob('*.part'))
    store = _prepare(tmp_path / 'in', tmp_path / 'out', part_bytes=200)
    fresh = _prepare(tmp_path / 'in', tmp_path / 'fresh', part_bytes=200)
    assert store.fingerprint == fresh.fingerprint


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe:260'])
def test_killed_anywhere_it_ends_with_the_same_bytes(
    folder, store, tmp_path, tokenizer, monkeypatch
):
    knobs = dict(tokenizer=tokenizer, part_bytes=300)
    whole = store if tokenizer == 'bytes' else _prepare(folder, tmp_path / 'whole', **knobs)
    places = [
        (prepare_module, 'survey', 5),
        (prepare_module if tokenizer == 'bytes' else encode_module, 'save_atomically', 0),
        *((PartWriter, 'save', after) for after in (0, 7, 9)),
        (StoreWriter, 'add', 3),
        (StoreWriter, 'finish', 0),
    ]
    for where, name, after in places:
        calls, call = itertools.count(), getattr(where, name)

        def kill(*args, calls=calls, call=call, after=after, **named):
            if next(calls) == after:
                raise KeyboardInterrupt
            return call(*args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, kill)
            with pytest.raises(KeyboardInterrupt):
                _prepare(folder, tmp_path / 'out', **knobs)
        assert not (tmp_path / 'out/prepared.json').exists()
    ended = _prepare(folder, tmp_path / 'out', **knobs)
    assert ended.fingerprint == whole.fingerprint and _content(ended) == _content(whole)


def test_a_changed_input_of_a_finished_text_is_noticed(tmp_path, monkeypatch):
    """Its size is equal, its time newer or older; only files with another time are read."""
    path, out = _plant(tmp_path / 'in'), tmp_path / 'out'
    content, time = path.read_bytes(), path.stat().st_mtime_ns
    store = _prepare(tmp_path / 'in', out)
    for moved in (-(10**12), 10**12):
        path.write_bytes(content.replace(b'text 3', b'text x'))
        os.utime(path, ns=(time, time + moved))
        assert 'b.jsonl is not what it was when this text' in _error(tmp_path / 'in', out)
    path.write_bytes(content)
    os.utime(path, ns=(time, time))
    monkeypatch.setattr(prepare_module, 'open_file', None)
    assert _prepare(tmp_path / 'in', out) == store
    (tmp_path / 'in/new.txt').write_text('x')
    assert 'new.txt was not there when this text was prepared' in _error(tmp_path / 'in', out)
    path.unlink()
    assert 'b.jsonl was there when this text was prepared, but' in _error(tmp_path / 'in', out)


def test_a_directory_of_something_else_is_refused(folder, tmp_path):
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other/thesis.tex').write_text('x')
    message = _error(folder, tmp_path / 'other')
    assert "holds 'thesis.tex', so it is not a directory of launch.prepare" in message
    assert (tmp_path / 'other/thesis.tex').exists()
    message = _error(folder, tmp_path / 'other/thesis.tex')
    assert 'must be a directory that can be written' in message
    message = _error(folder, tmp_path / 'out', sources=('no/*.txt',))
    assert message.startswith("--input='no/*.txt': matches no file; must be a file, folder or glob")
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/a.txt').write_text('')
    assert 'no document with text, 1 rows left out' in _error(tmp_path / 'in', tmp_path / 'a')
    (tmp_path / 'in/a.txt').write_text('x')
    assert 'a single document of 1 byte' in _error(tmp_path / 'in', tmp_path / 'b')
