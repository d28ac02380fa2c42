"""Each kind of file gives its documents in order, whole or by spans, and bad files are told."""

import functools
import gzip
import json
import random
import tracemalloc

import pyarrow
import pytest
import zstandard
from array_record.python import array_record_module
from pyarrow import parquet

from moddepth_jax.data import files
from moddepth_jax.data.json_lines import LineSpans
from moddepth_jax.data.rows import BadText, Span

TEXTS = ['first', 'zw\u00f6lf\u2028!', '', 'x' * 3000, 'last\n']
KINDS = ['.jsonl', '.parquet', '.arrayrecord']
_GZIP = functools.partial(gzip.compress, compresslevel=1)
COMPRESS = {'': bytes, '.gz': _GZIP, '.zst': zstandard.compress}


def _write(path, texts, group=2):
    """`texts` as the kind of file that the suffix says, perhaps compressed."""
    kind, packing = path.suffix, ''
    if kind in ('.gz', '.zst'):
        kind, packing = path.with_suffix('').suffix, kind
    plain = path.with_name('plain' + kind)
    if kind == '.txt':
        plain.write_text(''.join(texts))
    elif kind == '.jsonl':
        plain.write_text(''.join(json.dumps({'n': 1, 'text': text}) + '\n' for text in texts))
    elif kind == '.parquet':
        parquet.write_table(pyarrow.table({'text': texts}), plain, row_group_size=group)
    else:
        writer = array_record_module.ArrayRecordWriter(str(plain), f'group_size:{group}')
        for text in texts:
            writer.write(json.dumps({'text': text}).encode())
        writer.close()
    path.write_bytes(COMPRESS[packing](plain.read_bytes()))
    plain.unlink()


def _rows(path, *span):
    return list(files.rows(path, 'name', 'text', *span))


def _error(path):
    """What the last row, the only bad one, says."""
    *good, last = _rows(path)
    assert not any(isinstance(row.text, BadText) for row in good)
    assert isinstance(last.text, BadText) and '\n' not in str(last.text)
    with pytest.raises(BadText, match='^' + str(path)):
        list(files.iterate(path, 'name', 'text'))
    return good, str(last.text)


@pytest.mark.parametrize('packing', COMPRESS)
@pytest.mark.parametrize('kind', ['.txt', *KINDS])
def test_each_kind_is_read_alike_plain_and_compressed(tmp_path, kind, packing):
    """The documents and their names; the end of the last row is no later than that of the file."""
    path = tmp_path / f'a{kind}{packing}'
    _write(path, TEXTS)
    found = list(files.iterate(path, 'name', 'text'))
    if kind == '.txt':
        assert found == [('name', ''.join(TEXTS).encode())]
    else:
        assert found == [(f'name#{i}', text.encode()) for i, text in enumerate(TEXTS, 1)]
    ends = [row.end for row in _rows(path)]
    assert ends == sorted(ends) and 0 < ends[-1] <= path.stat().st_size


@pytest.mark.parametrize('kind', KINDS[1:])
def test_spans_together_are_the_file(tmp_path, kind):
    """More than one span; read one after the other they give all rows, with their numbers."""
    path = tmp_path / f'a{kind}'
    draw = random.Random(0)
    _write(path, [draw.randbytes(draw.randrange(3000)).hex() for _ in range(40)], group=3)
    whole = _rows(path)
    spans = files.spans(path, 'text', 5000)
    assert len(spans) > 3
    rows = [row for span in spans for row in _rows(path, span)]
    assert [row[:2] for row in rows] == [row[:2] for row in whole]
    compressed = tmp_path / f'b{kind}.gz'
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert files.spans(compressed, 'text', 5000) == [Span(0, None, 1)]


@pytest.mark.parametrize('size', [1, 30, 200, 10**6])
def test_lines_are_cut_into_spans_that_together_are_the_file(tmp_path, size):
    """However the chunks fall: blank lines, a byte-order mark and a last line without its end."""
    draw = random.Random(size)
    lines = ['{"text": "%s"}' % ('x' * draw.randrange(90)) for _ in range(50)]
    lines[3] = lines[20] = ''
    path = tmp_path / 'a.jsonl'
    content = b'\xef\xbb\xbf' + '\n'.join(lines).encode()
    path.write_bytes(content)
    whole = _rows(path)
    assert len(whole) == 48
    for chunk in (1, 7, 64, 10**6):
        cutter = LineSpans(size)
        for start in range(0, len(content), chunk):
            cutter.add(content[start : start + chunk])
        spans = cutter.spans()
        assert [row[:2] for span in spans for row in _rows(path, span)] == [r[:2] for r in whole]
        assert spans[0].start == 0 and spans[-1].stop == len(content)
        sizes = [span.stop - span.start for span in spans]
        assert all(size <= found <= size + 110 for found in sizes[:-1])
        assert len(spans) == 50 if size == 1 else len(spans) <= len(content) // size + 1


def test_a_span_ends_where_the_file_ended(tmp_path):
    """A line that is appended after the survey belongs to no span; an empty file has one span."""
    path = tmp_path / 'a.jsonl'
    _write(path, ['a', 'b'])
    cutter = LineSpans(1000)
    cutter.add(path.read_bytes())
    with open(path, 'a') as file:
        file.write('{"text": "new"}\n')
    (span,) = cutter.spans()
    assert [row.text for row in _rows(path, span)] == [b'a', b'b']
    assert LineSpans(10).spans() == [Span(0, 0, 1)]


@pytest.mark.parametrize('packing, word', [('.gz', 'gzip'), ('.zst', 'zstd')])
def test_compressed_files_that_are_cut_off_or_damaged_are_told(tmp_path, packing, word):
    """Rows before the place are given; then file, last good row and remedy."""
    path = tmp_path / f'a.jsonl{packing}'
    draw = random.Random(0)
    _write(path, [draw.randbytes(100).hex() for _ in range(3000)])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4])
    good, message = _error(path)
    assert 100 < len(good) < 3000
    assert f'after row {len(good)}: it is cut off within' in message and word in message
    assert 'write the file again' in message
    path.write_bytes(b'no compressed data at all')
    assert f'{path}: its {word} data are damaged' in _error(path)[1]
    path.write_bytes(b'')
    assert _rows(path) == []


def test_frames_of_zstd_follow_each_other(tmp_path):
    """As pzstd and `cat a.zst b.zst` write them."""
    path = tmp_path / 'a.txt.zst'
    path.write_bytes(zstandard.compress(b'one ') + zstandard.compress(b'two'))
    assert list(files.iterate(path, 'a', 'text')) == [('a', b'one two')]


def test_records_of_plain_text_are_taken_as_they_are(tmp_path):
    """Where the first record is no JSON object; where it is one, all must be."""
    path = tmp_path / 'a.arrayrecord'
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for text in (b'plain', b'{"n": 1}'):
        writer.write(text)
    writer.close()
    assert [row.text for row in _rows(path)] == [b'plain', b'{"n": 1}']
    _write(path, TEXTS)
    (row, *_) = files.rows(path, 'name', 'body')
    told = f"{path}, record 1: no field 'body'; set data.text_field to one of its own: 'text'"
    assert str(row.text) == told and row.text.reason == 'no field'


def test_damaged_records_are_told(tmp_path):
    """A file that is cut off, one of other bytes, and one with a damaged middle."""
    path = tmp_path / 'a.arrayrecord'
    _write(path, [f'{i} {i**7}' for i in range(500)])
    content = path.read_bytes()
    for bad in (content[: len(content) // 2], b'junk', content[:80] + b'\xff' * 90 + content[170:]):
        path.write_bytes(bad)
        message = _error(path)[1]
        assert f'{path}: not a readable arrayrecord file' in message and '; write' in message


def test_rows_after_a_bad_one_are_read(tmp_path):
    """A bad line, or a null, is one row, with its reason; iterate ends there."""
    path = tmp_path / 'a.jsonl'
    path.write_bytes(b'{"text": "a"}\n{"text": \n{"body": "b"}\n{"text": "\xff"}\n{"text": "c"}\n')
    rows = _rows(path)
    found = [r.text.reason if isinstance(r.text, BadText) else r.text for r in rows]
    assert found == [b'a', 'not JSON', 'no field', 'not UTF-8', b'c']
    path = tmp_path / 'a.parquet'
    parquet.write_table(pyarrow.table({'text': ['a', None, 'c']}), path)
    rows = _rows(path)
    assert (rows[0].text, rows[1].text.reason, rows[2].text) == (b'a', 'null', b'c')


@pytest.mark.parametrize('kind', ['.jsonl', '.jsonl.gz', '.jsonl.zst', '.parquet'])
def test_memory_stays_flat(tmp_path, kind):
    """Python holds a small part of a file's text at a time."""
    path = tmp_path / f'a{kind}'
    draw = random.Random(0)
    total = 0
    texts = [draw.randbytes(50_000).hex() for _ in range(200)]
    _write(path, texts, group=200)
    del texts
    tracemalloc.start()
    for _, text in files.iterate(path, 'a', 'text'):
        total += len(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 20_000_000 and peak < 8_000_000
