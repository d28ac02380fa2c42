"""Shows which documents a corpus holds, how they are split, and that bad input is refused."""

import itertools
import json
import platform
import sysconfig

import pyarrow
import pytest
from pyarrow import parquet

from moddepth_jax.data.corpus import load_corpus, load_held_out, split
from moddepth_jax.data.files import KINDS, file_documents
from moddepth_jax.data.python_text import environment_documents, stdlib_documents
from moddepth_jax.hparams import DataHparams


def _data(source, **changes):
    knobs = dict(mixture='', text_field='text', tokenizer='bytes', sequence_length=8, batch_size=2)
    knobs |= dict(held_out_fraction=0.25, log_windows=False)
    return DataHparams(source=str(source), **{**knobs, **changes})


def _documents(n):
    return [(f'folder/{i}.txt', b'text %d' % i) for i in range(n)]


def _error(call, *args):
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope='module')
def stdlib():
    return load_corpus(_data('stdlib', held_out_fraction=0.05))


# The split.


def test_split_keeps_each_document_once_and_in_order():
    """Every document lies on exactly one side, both keep the order, about a quarter is held out."""
    documents = _documents(400)
    train, held_out = split(documents, 0.25)
    texts = [text for _, text in documents]
    assert sorted(train + held_out) == sorted(texts)
    assert not set(train) & set(held_out)
    for side in (train, held_out):
        assert side == sorted(side, key=texts.index)
    assert 70 < len(held_out) < 130


def test_split_of_a_document_depends_on_its_name_alone():
    """More documents, another order or other text moves no name; a larger fraction only adds."""
    documents = _documents(200)
    held_out = set(split(documents, 0.25)[1])
    assert set(split(documents[:100], 0.25)[1]) == held_out & {t for _, t in documents[:100]}
    assert set(split(documents[::-1], 0.25)[1]) == held_out
    rewritten = split([(name, b'new ' + text) for name, text in documents], 0.25)[1]
    assert set(rewritten) == {b'new ' + text for text in held_out}
    assert held_out < set(split(documents, 0.5)[1])


@pytest.mark.parametrize('n', [2, 3, 9])
def test_split_leaves_no_side_empty(n):
    """Where the hash takes all or none, one document crosses: the next to in the order of hashes.

    So what is held out only grows with the fraction, from one document to all but one.
    """
    documents = _documents(n)
    sides = [split(documents, f) for f in (1e-9, 0.3, 0.5, 0.8, 1 - 1e-9)]
    assert all(len(train) + len(held_out) == n for train, held_out in sides)
    assert len(sides[0][1]) == len(sides[-1][0]) == 1
    for (_, fewer), (_, more) in itertools.pairwise(sides):
        assert set(fewer) <= set(more)


@pytest.mark.parametrize('length, fraction, held', [(100, 0.05, 5), (2, 0.01, 1), (2, 0.99, 1)])
def test_single_document_is_split_by_its_tail(length, fraction, held):
    """One document gives its last bytes, one at least and not all."""
    text = bytes(range(length))
    assert split([('a', text)], fraction) == ([text[:-held]], [text[-held:]])


@pytest.mark.parametrize('character', ['x', 'é', '€', '😀'])
@pytest.mark.parametrize('fraction', [1e-9, 0.05, 0.3, 0.5, 0.95, 1 - 1e-9])
def test_single_document_is_split_between_characters_if_wanted(character, fraction):
    """Both sides are text, and no more than a character away from where bytes are cut.

    Bytes are cut at the fraction, inside a character or not.
    """
    width = len(character.encode())
    for before in ('', 'a', 'ab', 'abc'):
        text = (before + character * (40 if before else 2)).encode()
        wanted = len(text) - round(len(text) * fraction)
        wanted = min(max(wanted, 1), len(text) - 1)
        assert split([('a', text)], fraction) == ([text[:wanted]], [text[wanted:]])
        (train,), (held_out,) = split([('a', text)], fraction, whole_characters=True)
        assert train.decode() + held_out.decode() == text.decode() and train and held_out
        assert abs(len(train) - wanted) < width
        assert len(train) <= wanted or wanted < width


def test_single_byte_cannot_be_split():
    """One document of one byte is refused, for nothing could be held out; or of one character."""
    assert _error(split, [('a.txt', b'x')], 0.5).startswith('a.txt: 1 byte; needs 2 or more')
    message = _error(split, [('a.txt', '😀'.encode())], 0.5, True)
    assert message.startswith('a.txt: 1 character; needs 2 or more')
    damaged = b'\x80' * 9  # what is not UTF-8 is told by the tokenizer
    assert b''.join(sum(split([('a.txt', damaged)], 0.5, True), [])) == damaged


# The standard library.


def test_stdlib_is_the_text_of_the_library_and_nothing_else(stdlib):
    """Library modules are in, byte for byte; tests, idlelib, packages and machine files are not."""
    names = [name for name, _ in stdlib_documents()]
    assert {'json/decoder.py', 'os.py', 'asyncio/tasks.py'} < set(names)
    assert names == sorted(set(names)) and len(names) > 400
    left_out = {'test', 'tests', 'idle_test', 'idlelib', 'lib2to3', 'site-packages'}
    assert not any(left_out & set(name.split('/')) for name in names)
    assert not any('_sysconfigdata' in name or name.startswith('config-') for name in names)
    with open(f'{sysconfig.get_paths()["stdlib"]}/json/decoder.py', 'rb') as file:
        assert (stdlib.train + stdlib.held_out).count(file.read()) == 1
    size = sum(map(len, stdlib.train + stdlib.held_out))
    assert 5e6 < size < 3e7
    assert stdlib.name == 'stdlib' and '\n' not in stdlib.description
    for part in (stdlib.train, stdlib.held_out):
        assert f'{len(part):,} documents of {sum(map(len, part)):,} bytes' in stdlib.description


def test_stdlib_is_the_same_each_time(stdlib):
    """Loading again gives equal documents and the same sha256."""
    again = load_corpus(_data('stdlib', held_out_fraction=0.05))
    assert again == stdlib


def test_python_without_a_library_as_text_is_refused(tmp_path):
    """A folder without .py files, or with tests and packages only, is an error that names it."""
    for name in ('test/a.py', 'site-packages/b.py', 'os.pyc', '_sysconfigdata_x.py'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('pass')
    assert f'no .py file below {tmp_path}' in _error(stdlib_documents, str(tmp_path))


# The packages beside it.


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A Python with a library of four documents and packages, some of which are left out."""
    library, site = tmp_path / 'lib', tmp_path / 'site'
    files = {
        library: {'os.py': 'one', 'json/decoder.py': 'two', 'test/a.py': 'x', 'heap.py': 'heap'},
        site: {
            'alpha/__init__.py': '',
            'alpha/core.py': 'three é',
            'alpha/idlelib/tool.py': 'five',
            'alpha/_vendor/core.py': 'three é',
            'alpha/heap.py': 'heap',
            'alpha/tests/data.py': 'x',
            'alpha/test_core.py': 'x',
            'alpha/core_test.py': 'x',
            'alpha/conftest.py': 'x',
            'alpha/notes.txt': 'x',
            'alpha/testing.py': 'four',
            '__editable___beta_finder.py': 'x',
            'moddepth_jax/model.py': 'ours',
            'moddepth_other/model.py': 'theirs',
            'Alpha-1.5.dist-info/METADATA': 'Name: Alpha\nVersion: 1.5\n',
            'zeta-2.dist-info/METADATA': 'Name: zeta\nVersion: 2\n',
            'moddepth_jax-0.1.dist-info/METADATA': 'Name: moddepth_jax\nVersion: 0.1\n',
            'moddepth_jax-0.1.dist-info/RECORD': 'moddepth_jax/model.py,,\n',
        },
    }
    for root, texts in files.items():
        for name, text in texts.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text.encode())
    (site / 'alpha/latin.py').write_bytes(b'# \xe9')
    paths = {'stdlib': str(library), 'purelib': str(site), 'platlib': str(site)}
    monkeypatch.setattr(sysconfig, 'get_paths', lambda: paths)
    return site


def test_environment_is_library_and_packages(environment):
    """Their text is in, each content once under its first name; tests, this project, other
    encodings and what an installation writes about its machine are not.
    """
    documents, packages = environment_documents()
    assert documents == [
        ('alpha/_vendor/core.py', 'three é'.encode()),
        ('alpha/idlelib/tool.py', b'five'),
        ('alpha/testing.py', b'four'),
        ('heap.py', b'heap'),
        ('json/decoder.py', b'two'),
        ('moddepth_other/model.py', b'theirs'),
        ('os.py', b'one'),
    ]
    assert packages == ('Alpha==1.5', 'zeta==2')


def test_environment_is_a_corpus_as_the_library_is(environment):
    """It names its packages; the library's documents are held out where they are in `stdlib`."""
    for i in range(60):
        (environment.parent / f'lib/module_{i}.py').write_text(f'library {i}')
    corpus, stdlib = (load_corpus(_data(name)) for name in ('python_environment', 'stdlib'))
    theirs = set(stdlib.train + stdlib.held_out)
    assert theirs & set(corpus.held_out) == set(stdlib.held_out) and len(stdlib.held_out) > 5
    assert corpus.packages == ('Alpha==1.5', 'zeta==2') and stdlib.packages == ()
    start = f'python_environment (Python {platform.python_version()}, 2 packages): '
    assert corpus.description.startswith(start) and '\n' not in corpus.description
    assert len(corpus.train + corpus.held_out) == 67
    alone = load_held_out(_data('python_environment'))
    assert alone.sha256 == corpus.sha256 and len(alone.held_out) == 67
    (environment / 'alpha/testing.py').write_text('fouR')
    assert load_corpus(_data('python_environment')).sha256 != corpus.sha256


def test_python_without_packages_is_refused(tmp_path):
    """The one line names the folders and what would be right."""
    (tmp_path / 'tests').mkdir()
    (tmp_path / 'tests/a.py').write_text('x')
    message = _error(environment_documents, None, (str(tmp_path),))
    assert message.startswith(f"data.source='python_environment': no .py file below {tmp_path}; ")
    assert "'stdlib' or a glob" in message


# Identity.


def test_sha256_changes_with_every_change(tmp_path):
    """A byte, a name, a document more or a byte across a border changes it; nothing else does."""

    def sha(**texts):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in texts.items():
            (folder / f'{name}.txt').write_text(text)
        return load_corpus(_data(folder / '*.txt')).sha256

    base = sha(a='one', b='two')
    assert sha(b='two', a='one') == base
    changed = [sha(a='onE', b='two'), sha(a='one', c='two'), sha(a='one', b='two', c='x')]
    changed += [sha(a='onet', b='wo'), sha(a='two', b='one'), sha(a='oneb.txttwo')]
    assert len({base, *changed}) == 7


def test_the_names_of_the_documents_are_kept(tmp_path):
    """On the side on which their texts are, so that messages can name them."""
    for i in range(9):
        (tmp_path / f'{i}.txt').write_text(f'text {i}')
    corpus = load_corpus(_data(tmp_path / '*.txt'))
    whole = load_held_out(_data(tmp_path / '*.txt'))
    for part, texts in (('train', corpus.train), ('held_out', corpus.held_out)):
        assert [f'text {name[0]}'.encode() for name in corpus.names[part]] == texts
    assert whole.names == {'held_out': [f'{i}.txt' for i in range(9)]}
    assert corpus.train_bytes() == 6 * len(corpus.train)


# The user's files.


def test_each_kind_of_file_gives_its_documents(tmp_path):
    """One a .txt file, one a line of .jsonl, one a row of .parquet; names are relative paths."""
    (tmp_path / 'b/deep').mkdir(parents=True)
    (tmp_path / 'b/deep/a.txt').write_bytes(b'\xff\x00 latin \xe9\r\n')
    rows = [{'text': 'first'}, {'id': 3, 'text': 'zw\u00f6lf\u2028!'}]
    lines = '\ufeff' + json.dumps(rows[0]) + '\n\n' + json.dumps(rows[1], ensure_ascii=False)
    (tmp_path / 'a.jsonl').write_bytes(lines.encode() + b'\r\n')
    table = pyarrow.table({'n': [1, 2], 'text': ['p', 'q']})
    parquet.write_table(table, tmp_path / 'b/c.parquet')
    assert file_documents(str(tmp_path / '**/*.*'), 'text') == [
        ('a.jsonl#1', b'first'),
        ('a.jsonl#3', 'zwölf\u2028!'.encode()),
        ('b/c.parquet#1', b'p'),
        ('b/c.parquet#2', b'q'),
        ('b/deep/a.txt', b'\xff\x00 latin \xe9\r\n'),
    ]


def test_a_file_may_be_named_without_wildcards(tmp_path):
    """A path is a glob of one file, even with brackets in its name, and needs a tail held out."""
    path = tmp_path / 'my [1] text.txt'
    path.write_bytes(b'0123456789')
    assert file_documents(str(path), 'text') == [('my [1] text.txt', b'0123456789')]
    corpus = load_corpus(_data(path, held_out_fraction=0.2))
    assert (corpus.train, corpus.held_out) == ([b'01234567'], [b'89'])


@pytest.mark.parametrize('kind', ['binary', 'large_string', 'dictionary', 'broken'])
def test_parquet_strings_of_every_kind_are_read(tmp_path, kind):
    """Binary, large and dictionary columns give the same bytes; broken UTF-8 is kept as it is."""
    texts = ['a', 'é', 'a']
    columns = {
        'binary': pyarrow.array([text.encode() for text in texts]),
        'large_string': pyarrow.array(texts, pyarrow.large_string()),
        'dictionary': pyarrow.array(texts).dictionary_encode(),
        'broken': pyarrow.array([b'\xff', b'', b'\xff']).view(pyarrow.string()),
    }
    parquet.write_table(pyarrow.table({'body': columns[kind]}), tmp_path / 'x.parquet')
    found = [text for _, text in file_documents(str(tmp_path / 'x.parquet'), 'body')]
    assert found == ([b'\xff', b'', b'\xff'] if kind == 'broken' else [t.encode() for t in texts])


def test_empty_documents_are_left_out(tmp_path):
    """A file without a byte is no document; a corpus of such files is refused."""
    for name in ('a', 'b', 'c'):
        (tmp_path / f'{name}.txt').write_bytes(b'')
    source = tmp_path / '*.txt'
    assert f"data.source='{source}': no byte in its 3 documents" in _error(
        load_corpus, _data(source)
    )
    (tmp_path / 'b.txt').write_bytes(b'xy')
    assert load_corpus(_data(source)).train == [b'x']


GOOD = b'{"text": "good"}\n'
BAD_FILES = {
    'no.suffix': ('a.md', b'x', ["'.md' is no known kind of file", 'glob of .txt']),
    'none': ('README', b'x', ['no suffix', 'glob of .txt']),
    'not_json': ('a.jsonl', GOOD + b'{"text": }', ['line 2: not JSON', 'column 10']),
    'huge_number': ('a.jsonl', b'{"n": ' + b'9' * 5000 + b'}', ['line 1: not JSON']),
    'deep': ('a.jsonl', b'[' * 200000, ['line 1: not JSON']),
    'no_object': ('a.jsonl', GOOD + b'["text"]', ['line 2: a JSON list, not an object']),
    'no_field': ('a.jsonl', GOOD + b'{"body": "x"}', ['line 2: no field', "'body'"]),
    'no_text': ('a.jsonl', GOOD + b'\n{"text": null}', ["line 3: 'text' is NoneType, not text"]),
    'surrogate': ('a.jsonl', b'{"text": "\\ud800"}', ['line 1: ', 'half a surrogate pair']),
    'latin': ('a.jsonl', GOOD + b'{"text": "\xe9"}', ['line 2: byte 10', 'not UTF-8']),
    'no_parquet': ('a.parquet', b'PAR1 nothing of the kind', ['not a readable parquet file']),
}


@pytest.mark.parametrize('name, content, parts', BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_refused_by_name_row_and_remedy(tmp_path, name, content, parts):
    """Each kind of bad file among good ones is one line with its path, its row and a remedy."""
    (tmp_path / 'good.txt').write_bytes(b'good')
    (tmp_path / name).write_bytes(content)
    message = _error(load_corpus, _data(tmp_path / '*'))
    assert message.startswith(str(tmp_path / name)) and '; ' in message
    assert all(part in message for part in parts)


@pytest.mark.parametrize(
    'column, parts',
    [
        ({'body': ['x']}, ["no column 'text'", "'body'"]),
        ({'text': [1, 2]}, ["column 'text' holds int64", 'column of strings']),
        ({'text': ['a', None]}, ["row 2: 'text' is null"]),
    ],
)
def test_bad_parquet_is_refused_by_name_row_and_remedy(tmp_path, column, parts):
    """A missing column, a column of numbers and a null row are named."""
    parquet.write_table(pyarrow.table(column), tmp_path / 'a.parquet')
    message = _error(load_corpus, _data(tmp_path / '*'))
    assert message.startswith(str(tmp_path / 'a.parquet')) and '; ' in message
    assert all(part in message for part in parts)


def test_corrupt_parquet_is_refused(tmp_path):
    """A parquet file with its middle overwritten or its end cut off is named, in one line."""
    path = tmp_path / 'a.parquet'
    text = [f'{i} {i**7}' for i in range(2000)]
    parquet.write_table(pyarrow.table({'text': text}), path)
    good = path.read_bytes()
    middle = len(good) // 2
    for bad in (good[:middle], good[:4] + b'\xff' * 5000 + good[5004:]):
        path.write_bytes(bad)
        message = _error(load_corpus, _data(path))
        assert message.startswith(f'{path}: not a readable parquet file')


def test_a_glob_without_a_match_is_refused(tmp_path):
    """A typo and a bare folder name the value and what would be right."""
    right = (
        'must be stdlib, python_environment, synthetic, recall, mixture, a folder of '
        f'launch.prepare or a glob of {KINDS}'
    )
    assert _error(load_corpus, _data('stdlb')) == f"data.source='stdlb': matches no file; {right}"
    message = _error(load_corpus, _data(tmp_path))
    assert message.endswith(f'for a folder write {tmp_path}/**/*.txt')


def test_a_link_to_nowhere_is_refused(tmp_path):
    """A file that is listed but cannot be read is an error, not a document less."""
    (tmp_path / 'a.txt').write_bytes(b'text')
    (tmp_path / 'b.txt').symlink_to(tmp_path / 'gone.txt')
    message = _error(load_corpus, _data(tmp_path / '*.txt'))
    assert message.startswith(f'{tmp_path}/b.txt: cannot be read')
