"""The domains of a folder are found, and unreadable ones are refused by name."""

import dataclasses
import shutil

import pytest

from moddepth_jax.data.domains import load_domains
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.prepared_text import begin, data_hparams, prepare, refusal, write_texts

DATA = data_hparams('stdlib', sequence_length=16)


@pytest.fixture
def folder(tmp_path):
    write_texts(tmp_path / 'web', b'abc', 0)
    prepare(tmp_path / 'code', write_texts(tmp_path / '.hidden', b'xyz', 1), ByteTokenizer(), 0.25)
    (tmp_path / 'notes.jsonl').write_text('{"body": "to be or not to be"}\n' * 3)
    return tmp_path


def _load(folder, trained_on=None, **changes):
    data = dataclasses.replace(DATA, **{'text_field': 'body', **changes})
    return load_domains(str(folder), data, ByteTokenizer(), trained_on)


def _error(folder, **changes):
    message = refusal(_load, folder, **changes)
    assert message.startswith(f'--domains={folder}: ')
    return message.removeprefix(f'--domains={folder}: ')


def test_every_file_and_folder_is_a_domain(folder):
    (folder / 'web').rename(folder / 'web [1] *')
    found, skipped = _load(folder)
    assert list(found) == ['code', 'notes.jsonl', 'web [1] *'] and not skipped
    assert [len(dataset.corpus.held_out) for dataset in found.values()] == [30, 3, 30]
    assert list(_load(f'{folder}/')[0]) == list(found)


def test_text_that_a_run_trained_on_is_left_out(folder):
    for own in ('code', 'web'):  # prepared, and as files
        trained_on = make_dataset(dataclasses.replace(DATA, source=f'{folder}/{own}'), 0).corpus
        found, _ = _load(folder, trained_on={trained_on.sha256: 0.25})
        held_back = {name: dataset.held_back for name, dataset in found.items()}
        assert held_back == dict.fromkeys(('code', 'notes.jsonl', 'web'), False) | {own: True}


def test_domains_without_a_window_are_skipped_by_name(folder):
    (folder / 'short.txt').write_text('abc')
    (folder / 'a.png').write_bytes(b'\x89PNG\0')
    (folder / 'empty.txt').touch()
    for name in ('bare', 'pictures'):
        (folder / name).mkdir()
    shutil.copy(folder / 'a.png', folder / 'pictures')
    found, skipped = _load(folder)
    assert list(found) == ['code', 'notes.jsonl', 'web']
    why = 'the given text has 4 tokens and one window needs 17; give more text'
    reasons = {
        'a.png': 'a binary file, not text',
        'bare': 'holds no file; must hold text, .jsonl',
        'empty.txt': 'no byte in its 1 document; must have text of 2 bytes or more',
        'pictures': 'holds no file (left out 1 file without text',
        'short.txt': why,
    }
    assert skipped.keys() == reasons.keys()
    assert all(skipped[name].startswith(reason) for name, reason in reasons.items()), skipped
    for name in ('bare', 'pictures'):
        shutil.rmtree(folder / name)
    for name in ('a.png', 'empty.txt'):
        (folder / name).unlink()
    assert _error(folder, sequence_length=10**5).startswith('no domain has enough text; code: ')


def test_a_domain_that_cannot_be_read_is_refused(folder, tmp_path):
    """Another field, an unfinished or foreign prepared folder:
    the domain, the file and a remedy are named.
    """
    assert "notes.jsonl, line 1: no field 'text'; set --text_field to" in _error(
        folder, text_field='text'
    )
    for name, make, words in (('begun', begin, ['begun: ', 'unfinished']),):
        path = folder / name
        make(path)
        message = _error(folder)
        assert all(word in message for word in words), message
        path.rename(path.with_name(f'.{name}'))

    class Other(ByteTokenizer):
        name, sha256 = 'mine.json', 'c0ffee' * 8

    data = dataclasses.replace(DATA, text_field='body')
    message = refusal(load_domains, str(folder), data, Other(), {})
    assert "code: was prepared with 'bytes', not with 'mine.json'" in message


def test_a_folder_that_has_no_domains_is_refused(tmp_path, folder):
    (tmp_path / 'nothing').mkdir()
    assert 'no such folder' in _error(tmp_path / 'nowhere')
    assert 'no such folder' in _error(folder / 'notes.jsonl')
    assert 'is empty' in _error(tmp_path / 'nothing')
    assert 'give it to --data' in _error(folder / 'code')
