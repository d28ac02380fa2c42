"""Each format gives its documents in order, in one or in spans; bad files are refused by row."""

import codecs
import functools
import gzip
import json
import os
import random

import pyarrow
import pytest
from array_record.python import array_record_module
from pyarrow import parquet

from moddepth_jax.data import readers
from moddepth_jax.data.readers import BadText, Span, find_spans
from moddepth_jax.data.sources import check_source, describe_left_out, find_files, load_documents
from tests.data.prepared_text import make_special, refusal

TEXTS = ['first', 'zw\u00f6lf\u2028!', '', 'x' * 3000, 'last\n']
FORMATS = ['.jsonl', '.parquet', '.arrayrecord']
COMPRESS = {
    '': bytes,
    '.gz': functools.partial(gzip.compress, compresslevel=1),
    '.zst': functools.partial(pyarrow.compress, codec='zstd', asbytes=True),
}


def _write(path, texts, group=2):
    """Write `texts` in the format of the suffix, perhaps compressed."""
    suffix, packing = path.suffix, ''
    if suffix in ('.gz', '.zst'):
        suffix, packing = path.with_suffix('').suffix, suffix
    plain = path.with_name('plain' + suffix)
    if suffix == '.txt':
        plain.write_text(''.join(texts))
    elif suffix == '.jsonl':
        plain.write_text(''.join(json.dumps({'n': 1, 'text': text}) + '\n' for text in texts))
    elif suffix == '.parquet':
        parquet.write_table(pyarrow.table({'text': texts}), plain, row_group_size=group)
    else:
        writer = array_record_module.ArrayRecordWriter(str(plain), f'group_size:{group}')
        for text in texts:
            writer.write(text if isinstance(text, bytes) else json.dumps({'text': text}).encode())
        writer.close()
    path.write_bytes(COMPRESS[packing](plain.read_bytes()))
    plain.unlink()


def _rows(path, *span):
    return list(readers.read_rows(path, 'name', 'text', *span))


def _error(path):
    """Return (the good rows, the message of the last row, which is the only bad one)."""
    *good, last = _rows(path)
    assert not any(isinstance(row.text, BadText) for row in good)
    message = refusal(load_documents, str(path), 'text')
    assert message == str(last.text) and message.startswith(str(path))
    return good, message


@pytest.mark.parametrize('packing', COMPRESS)
@pytest.mark.parametrize('suffix', ['.txt', *FORMATS])
def test_each_format_is_read_plain_and_compressed(tmp_path, suffix, packing):
    path = tmp_path / f'a{suffix}{packing}'
    _write(path, TEXTS)
    found = [(row.name, row.text) for row in _rows(path)]
    if suffix == '.txt':
        assert found == [('name', ''.join(TEXTS).encode())]
    else:
        assert found == [(f'name#{i}', text.encode()) for i, text in enumerate(TEXTS, 1)]
    ends = [row.end for row in _rows(path)]
    assert ends == sorted(ends) and 0 < ends[-1] <= path.stat().st_size


def test_names_are_paths_relative_to_the_glob(tmp_path):
    (tmp_path / 'b/deep').mkdir(parents=True)
    (tmp_path / 'b/deep/a.txt').write_bytes('\ufefflatin é\r\n'.encode())
    (tmp_path / 'my [1] text.txt').write_bytes(b'0123')
    rows = [{'text': 'first'}, {'id': 3, 'text': 'zw\u00f6lf\u2028!'}]
    lines = '\ufeff' + json.dumps(rows[0]) + '\n\n' + json.dumps(rows[1], ensure_ascii=False)
    (tmp_path / 'a.jsonl').write_bytes(lines.encode() + b'\r\n')
    table = pyarrow.table({'n': [1, 2], 'text': ['p', 'q']})
    parquet.write_table(table, tmp_path / 'b/c.parquet')
    found, _ = load_documents(str(tmp_path / '**/*.*'), 'text')
    assert found == [
        ('a.jsonl#1', b'first'),
        ('a.jsonl#3', 'zwölf\u2028!'.encode()),
        ('b/c.parquet#1', b'p'),
        ('b/c.parquet#2', b'q'),
        ('b/deep/a.txt', '\ufefflatin é\r\n'.encode()),
        ('my [1] text.txt', b'0123'),
    ]
    assert load_documents(str(tmp_path / 'my [1] text.txt'), 'text') == (found[-1:], '')


@pytest.mark.parametrize('kind', ['binary', 'large_string', 'dictionary', 'broken'])
def test_parquet_strings_of_every_kind_are_read(tmp_path, kind):
    texts = ['a', 'é', 'a']
    columns = {
        'binary': pyarrow.array([text.encode() for text in texts]),
        'large_string': pyarrow.array(texts, pyarrow.large_string()),
        'dictionary': pyarrow.array(texts).dictionary_encode(),
        'broken': pyarrow.array([b'\xff', b'', b'\xff']).view(pyarrow.string()),
    }
    parquet.write_table(pyarrow.table({'body': columns[kind]}), tmp_path / 'x.parquet')
    rows = list(readers.read_rows(tmp_path / 'x.parquet', 'x', 'body'))
    if kind == 'broken':
        line = f'{tmp_path}/x.parquet, row 1: byte 0 is 0xff, which is not UTF-8'
        assert str(rows[0].text).startswith(line) and rows[1].text == b''
    else:
        assert [row.text for row in rows] == [text.encode() for text in texts]


@pytest.mark.parametrize('suffix', FORMATS[1:])
def test_spans_together_are_the_file(tmp_path, suffix):
    path = tmp_path / f'a{suffix}'
    draw = random.Random(0)
    _write(path, [draw.randbytes(draw.randrange(3000)).hex() for _ in range(40)], group=3)
    spans = find_spans(path, 'text', 5000, ())
    assert len(spans) > 3
    rows = [row for span in spans for row in _rows(path, span)]
    assert [row[:2] for row in rows] == [row[:2] for row in _rows(path)]
    compressed = tmp_path / f'b{suffix}.gz'
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert find_spans(compressed, 'text', 5000, ()) == [Span(0, None, 1)]


@pytest.mark.parametrize('size', [1, 30, 200, 10**6])
def test_spans_of_lines_together_are_the_file(tmp_path, size):
    """For chunks of any size: blank lines, a byte-order mark and a last line without its end.

    A line that is appended after the survey is in no span.
    """
    draw = random.Random(size)
    lines = ['{"text": "%s"}' % ('x' * draw.randrange(90)) for _ in range(50)]
    lines[3] = lines[20] = ''
    path = tmp_path / 'a.jsonl'
    content = b'\xef\xbb\xbf' + '\n'.join(lines).encode()
    path.write_bytes(content)
    whole = _rows(path)
    assert len(whole) == 48
    path.write_bytes(content + b'\n{"text": "new"}\n')
    for chunk in (1, 7, 64, 10**6):
        chunks = (content[start : start + chunk] for start in range(0, len(content), chunk))
        spans = find_spans(path, 'text', size, chunks)
        assert [row[:2] for span in spans for row in _rows(path, span)] == [r[:2] for r in whole]
        assert spans[0].start == 0 and spans[-1].stop == len(content)
        sizes = [span.stop - span.start for span in spans]
        assert all(size <= found <= size + 110 for found in sizes[:-1])
        assert len(spans) == 50 if size == 1 else len(spans) <= len(content) // size + 1
    assert find_spans(path, 'text', size, []) == [Span(0, 0, 1)]


def test_a_text_that_no_memory_holds_is_refused_before_it_is_read(tmp_path):
    """Regression: the message came when memory was full, and advised a smaller batch."""
    path = tmp_path / 'a.txt'
    path.touch()
    os.truncate(path, 1 << 40)
    message = refusal(readers.read_text, path, 'utf-8')
    assert message.startswith(f'{path}: 1,099,511,627,776 bytes, more than the ')
    assert message.endswith('split it into files or rows of a .jsonl')


@pytest.mark.parametrize('packing', ['', '.gz', '.zst'])
def test_the_limit_of_a_text_counts_plain_bytes(packing, tmp_path, monkeypatch):
    """Regression: a small compressed file could fill the memory."""
    monkeypatch.setattr(readers, '_MAX_TEXT', 3000)
    monkeypatch.setattr(readers, '_PIECE', 1000)
    path = tmp_path / f'a.txt{packing}'
    for length in (0, 999, 3000):
        path.write_bytes(COMPRESS[packing](b'x' * length))
        assert readers.read_text(path, 'utf-8') == b'x' * length
    path.write_bytes(COMPRESS[packing](b'x' * 10**6))
    message = refusal(readers.read_text, path, 'utf-8')
    assert 'more than the 3,000 bytes that one text may have; split it' in message


@pytest.mark.parametrize('packing', ['.gz', '.zst'])
def test_truncated_or_damaged_compressed_files_are_refused(tmp_path, packing):
    path = tmp_path / f'a.jsonl{packing}'
    draw = random.Random(0)
    _write(path, [draw.randbytes(100).hex() for _ in range(3000)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    good, message = _error(path)
    assert 100 < len(good) < 3000
    assert f'after row {len(good)}: its data are damaged or cut off' in message
    path.write_bytes(b'no compressed data at all')
    assert f'{path}: its data are damaged' in _error(path)[1]
    path.write_bytes(content + content)  # as pzstd and `cat a.zst b.zst` write them
    assert len(_rows(path)) == 6000


def test_records_of_plain_text_are_read_as_they_are(tmp_path):
    """If the first record is not a JSON object; otherwise all must be objects."""
    path = tmp_path / 'a.arrayrecord'
    _write(path, [b'plain', b'{"n": 1}'], group=1)
    assert [row.text for row in _rows(path)] == [b'plain', b'{"n": 1}']
    _write(path, TEXTS)
    (row, *_) = readers.read_rows(path, 'name', 'body')
    message = f"{path}, record 1: no field 'body'; set data.text_field to one that it has: 'text'"
    assert str(row.text) == message and row.text.reason == 'no field'


def test_the_first_record_that_is_not_blank_decides(tmp_path):
    """Regression: after an empty record, objects were read as texts of raw JSON."""
    path = tmp_path / 'a.arrayrecord'
    _write(path, [b'', b' ', b'{"text": "x"}'], group=1)
    assert [row.text for row in _rows(path)] == [b'x']


def test_texts_may_look_like_json(tmp_path):
    """Regression: a text that began with a brace was refused; objects after texts were texts."""
    path = tmp_path / 'a.arrayrecord'
    _write(path, [b'{\\bf Bold} text', b'{"n": 1}', GOOD], group=1)
    *texts, last = (row.text for row in readers.read_rows(path, 'name', 'text'))
    assert texts == [b'{\\bf Bold} text', b'{"n": 1}']
    assert f"{path}, record 3: a JSON object with 'text' after a record" in str(last)


def test_names_and_contents_of_json_files(tmp_path):
    """Lines of JSON are also called .ndjson; another .json is one text."""
    (tmp_path / 'a.ndjson').write_bytes(GOOD + GOOD)
    assert [row.text for row in _rows(tmp_path / 'a.ndjson')] == [b'good', b'good']
    for content in (b'{"text": "good"}\n', b'{\n"a": 1\n}\n', b'[\n{"a": 1},\n{"a": 2}\n]\n'):
        (tmp_path / 'a.json').write_bytes(content)
        assert [row.text for row in _rows(tmp_path / 'a.json')] == [content]


def test_a_zstd_window_that_is_too_large_is_no_damage(tmp_path):
    """Regression: a valid file was called damaged."""
    error = OSError('zstd decompress error: Frame requires too much memory for decoding')
    found = str(readers.as_bad_text('a.zst', error))
    assert found == 'a.zst: its zstd window is too large; compress it again without --long'


GOOD = b'{"text": "good"}\n'
TWICE = pyarrow.table([['x'], ['y']], names=['text', 'text'])
# Name of the file, its content, parts of the message.
BAD_FILES = [
    ('a.md', b'# caf\xe9', ['byte 5 is 0xe9, which is not UTF-8', 'data.encoding=latin-1']),
    ('a.md', 'h\xe9'.encode('utf-16'), ['mark of UTF-16; set data.encoding=utf-16']),
    ('a', 'h\xe9'.encode('utf-32'), ['mark of UTF-32; set data.encoding=utf-32']),
    ('a.txt', 'text'.encode('utf-16-le'), ['byte 1 is NUL', 'data.encoding=utf-16-le']),
    ('a.jsonl', GOOD + b'{"text": }', ['line 2: not JSON', 'column 10']),
    ('a.jsonl', b'{"n": ' + b'9' * 5000 + b'}', ['line 1: not JSON']),
    ('a.jsonl', b'[' * 200000, ['line 1: not JSON']),
    ('a.jsonl', GOOD + b'["text"]', ['line 2: a JSON list, not an object']),
    ('a.jsonl', GOOD + b'{"body": "x"}', ['line 2: no field', "'body'"]),
    ('a.jsonl', GOOD + b'\n{"text": null}', ["line 3: 'text' is NoneType, not text"]),
    ('a.jsonl', b'{"text": "\\ud800"}', ['line 1: ', 'half a surrogate pair']),
    ('a.jsonl', GOOD + b'{"text": "\xe9"}', ['line 2: byte 10 is 0xe9', 'not UTF-8']),
    ('a.parquet', b'PAR1 nothing of the kind', ['not a readable parquet file']),
    ('a.parquet', {'body': ['x']}, ["no column 'text'", "'body'"]),
    ('a.parquet', {'text': [1]}, ["column 'text' holds int64", 'column of strings']),
    ('a.parquet', TWICE, ["2 columns are named 'text'; must be one"]),
    ('a.parquet', {'text': ['a', None]}, ["row 2: 'text' is null"]),
    ('a.arrayrecord', b'junk', ['not a readable arrayrecord file', '; write']),
    # Regressions: a shard was one text of raw JSON; compressed texts were left out like pictures.
    ('a.json', GOOD + GOOD, ['has a JSON object in each line; rename it to .jsonl']),
    ('a.jsonl.xz', b'\xfd7zXZ\0', ['.xz is not read; compress it as .gz or .zst']),
    ('a.json.bz2', b'BZh9\0', ['.bz2 is not read; compress it as .gz or .zst']),
    ('b.json', b'\xef\xbb\xbf' + GOOD + GOOD, ['has a JSON object in each line']),
    ('b.txt', None, ['b.txt: cannot be read']),  # a broken link
]


@pytest.mark.parametrize('name, content, parts', BAD_FILES)
def test_bad_files_are_refused_by_name_row_and_remedy(tmp_path, name, content, parts):
    (tmp_path / 'good.txt').write_bytes(b'good')
    if content is None:
        (tmp_path / name).symlink_to(tmp_path / 'gone.txt')
    elif not isinstance(content, bytes):
        content = pyarrow.table(content) if isinstance(content, dict) else content
        parquet.write_table(content, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    message = refusal(load_documents, str(tmp_path / '*'), 'text')
    assert message.startswith(str(tmp_path / name)) and '; ' in message
    assert all(part in message for part in parts)


@pytest.mark.parametrize('suffix', FORMATS[1:])
def test_corrupt_files_are_refused(tmp_path, suffix):
    path = tmp_path / f'a{suffix}'
    _write(path, [f'{i} {i**7}' for i in range(2000)], group=2000 if suffix == '.parquet' else 2)
    good = path.read_bytes()
    start, length = (4, 5000) if suffix == '.parquet' else (80, 90)
    overwritten = good[:start] + b'\xff' * length + good[start + length :]
    for bad in (good[: len(good) // 2], overwritten):
        path.write_bytes(bad)
        assert f'{path}: not a readable {suffix[1:]} file' in _error(path)[1]


def test_a_glob_without_a_match_is_refused(tmp_path):
    message = refusal(load_documents, 'stdlb', 'text')
    assert message.startswith("data.source='stdlb': matches no file; must be stdlib, python_env")
    assert 'launch.prepare, or a file, folder or glob of text, .jsonl, ' in message
    (tmp_path / 'code.jsonl').touch()
    for given, meant in (('stdlbi', 'stdlib'), (f'{tmp_path}/cod.jsonl', 'code.jsonl')):
        assert f'matches no file; did you mean {meant}?; must be' in refusal(check_source, given)
    (tmp_path / 'code.jsonl').unlink()
    (tmp_path / 'a.png').write_bytes(b'\x89PNG\r\n\x1a\n\0\0')
    message = refusal(load_documents, str(tmp_path), 'text')
    assert f'no file (left out 1 file without text, such as {tmp_path}/a.png)' in message


def test_text_in_another_encoding_is_that_text(tmp_path):
    """If the encoding is named and each byte is valid; a byte-order mark is removed."""
    text, path = 'zwölf\r\n', tmp_path / 'notes'
    for name in ('latin-1', 'utf-16', 'utf-16-le', 'utf-32', 'utf-8-sig', 'utf-8'):
        path.write_bytes(text.encode(name))
        assert load_documents(str(path), 'text', name) == ([('notes', text.encode())], '')
    path.write_bytes(codecs.BOM_UTF8 + b'x')
    for name, read in (('utf-8', '\ufeffx'), ('utf-8-sig', 'x')):
        assert readers.read_text(path, name) == read.encode()
    path.write_bytes(b'ab\x81')
    assert 'byte 2 is 0x81, which is not CP1252' in refusal(readers.read_text, path, 'cp1252')
    path.write_bytes(b'\x89PNG\0')
    assert 'character 4 is NUL' in refusal(readers.read_text, path, 'latin-1')


PNG = b'\x89PNG\r\n\x1a\n\0\0\0\rIHDR'


@pytest.fixture
def docs(tmp_path):
    """A folder with text of many suffixes, and other files that people keep there."""
    folder = tmp_path / 'docs'
    (folder / 'b/.git').mkdir(parents=True)
    for name in ('a.py', 'README', 'b/x.md', 'b/y.rst', 'b/.git/config', '.hidden'):
        (folder / name).write_text(f'text of {name}')
    (folder / 'z.py.gz').write_bytes(gzip.compress(b'text of z.py'))
    (folder / 'b/logo.png').write_bytes(PNG)
    return folder


def _found(source):
    root, files, left_out = find_files(str(source), 'data.source', 'must be right')
    return [path.relative_to(root).as_posix() for path in files], describe_left_out(left_out)


def test_a_folder_is_its_text_and_counts_the_rest(docs):
    names = ['README', 'a.py', 'b/x.md', 'b/y.rst', 'z.py.gz']
    note = f'left out 1 file without text, such as {docs}/b/logo.png'
    for source in (docs, f'{docs}/', docs / '**', docs / '**/*'):
        assert _found(source) == (names, note)
        check_source(str(source))
    assert _found(docs / '*') == (['README', 'a.py', 'z.py.gz'], '')
    assert _found(docs / '**/*.[mr]*') == (['b/x.md', 'b/y.rst'], '')
    documents, _ = load_documents(str(docs), 'text')
    assert dict(documents)['z.py.gz'] == b'text of z.py'
    named = refusal(load_documents, f'{docs}/b/logo.png', 'text')
    assert named.startswith(f'{docs}/b/logo.png: byte 8 is NUL, as in a binary file; leave it out')
    docs.rename(docs.with_name('docs [1]'))
    assert _found(docs.with_name('docs [1]'))[0] == names


def test_links_are_followed_and_loops_of_them_end(docs, tmp_path):
    """Python's glob enters a loop 40 times, and two loops 2**40 times."""
    names, _ = _found(docs)
    for name in ('here', 'b/here', 'b/there', 'b/more'):
        (docs / name).symlink_to(docs, target_is_directory=True)
    assert _found(docs)[0] == _found(docs / '**/*')[0] == names
    (docs / 'up').symlink_to(tmp_path)
    (docs / 'root').symlink_to('/')
    assert _found(docs)[0] == names
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'elsewhere/c.md').write_text('text')
    (docs / 'b/out').symlink_to(tmp_path / 'elsewhere')
    (docs / 'b/c.md').symlink_to(docs / 'a.py')
    assert set(_found(docs)[0]) - set(names) == {'b/out/c.md'}  # a.py is there already


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'device', 'loop'])
def test_special_files_are_left_out_or_refused_by_name(docs, kind):
    names, _ = _found(docs)
    make_special(docs / '0', kind)
    assert _found(docs) == (names, f'left out 2 files without text, such as {docs}/0')
    assert refusal(load_documents, f'{docs}/0', 'text').startswith(f'{docs}/0: cannot be read (')
    (docs / '0').rename(docs / '0.txt')  # which promises text
    line = refusal(load_documents, str(docs), 'text')
    assert line.startswith(f'{docs}/0.txt: cannot be read (')
