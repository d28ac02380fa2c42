"""The documents of each corpus, and its sha256."""

import platform
import sysconfig

import pytest

from moddepth_jax.data.corpus import load_corpus, load_held_out
from moddepth_jax.data.pipeline import make_held_out
from moddepth_jax.data.python_text import environment_documents, stdlib_documents
from tests.data.prepared_text import data_hparams, refusal, write_texts


def _data(source, held_out_fraction=0.25):
    return data_hparams(source, held_out_fraction=held_out_fraction)


# The standard library.


def test_stdlib_is_the_text_of_the_library_and_nothing_else():
    stdlib = load_corpus(_data('stdlib', 0.05))
    names = [name for name, _ in stdlib_documents()]
    assert {'json/decoder.py', 'os.py', 'asyncio/tasks.py'} < set(names)
    assert names == sorted(set(names)) and len(names) > 400
    left_out = {'test', 'tests', 'idle_test', 'idlelib', 'lib2to3', 'site-packages'}
    assert not any(left_out & set(name.split('/')) for name in names)
    assert not any('_sysconfigdata' in name or name.startswith('config-') for name in names)
    with open(f'{sysconfig.get_paths()["stdlib"]}/json/decoder.py', 'rb') as file:
        assert (stdlib.train + stdlib.held_out).count(file.read()) == 1
    assert 5e6 < sum(map(len, stdlib.train + stdlib.held_out)) < 3e7
    assert stdlib.name == 'stdlib' and '\n' not in stdlib.description
    for part in (stdlib.train, stdlib.held_out):
        assert f'{len(part):,} documents of {sum(map(len, part)):,} bytes' in stdlib.description


def test_python_without_text_is_refused(tmp_path):
    for name in ('test/a.py', 'tests/b.py', 'os.pyc', '_sysconfigdata_x.py'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('pass')
    right = f'no .py file below {tmp_path}; use a Python that ships its library as .py files'
    assert right in refusal(stdlib_documents, str(tmp_path))
    message = refusal(environment_documents, (str(tmp_path),))
    assert "set data.source to 'stdlib' or a glob" in message


# The installed packages.


@pytest.fixture
def environment(tmp_path, monkeypatch):
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


def test_environment_is_split_like_the_library(environment):
    """It lists its packages; documents of the library are on the same side as in `stdlib`."""
    for i in range(60):
        (environment.parent / f'lib/module_{i}.py').write_text(f'library {i}')
    corpus, stdlib = (load_corpus(_data(name)) for name in ('python_environment', 'stdlib'))
    theirs = set(stdlib.train + stdlib.held_out)
    assert theirs & set(corpus.held_out) == set(stdlib.held_out) and len(stdlib.held_out) > 5
    assert corpus.packages == ('Alpha==1.5', 'zeta==2') and stdlib.packages == ()
    start = f'python_environment (Python {platform.python_version()}, 2 packages): '
    assert corpus.description.startswith(start) and '\n' not in corpus.description
    alone = load_held_out(_data('python_environment'))
    assert alone.sha256 == corpus.sha256 and len(alone.held_out) == 67


# The user's files.


def test_sha256_changes_with_every_change(tmp_path):
    """A byte, a name, a new document or a byte that moves to another document changes it."""

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


def test_text_that_a_run_trained_on_is_split_as_in_the_run(tmp_path):
    """Regression: launch.evaluate --data read the training text of a run, too, without a word.

    The fraction is that of the run that was trained on the text, which may be a parent.
    """
    write_texts(tmp_path / 'own', b'abc', 0)
    data = _data(tmp_path / 'own', 0.2)
    own = load_corpus(data)
    of_child = _data(tmp_path / 'own', 0.9)
    assert load_held_out(of_child, {own.sha256: 0.2}).held_out == own.held_out
    assert make_held_out(data, trained_on={own.sha256: 0.2}).held_back
    new = make_held_out(data, trained_on={'0f': 0.2})
    assert len(new.corpus.held_out) == 30 > len(own.held_out) > 0 and not new.held_back


def test_empty_documents_are_left_out(tmp_path):
    for name in ('a', 'b', 'c'):
        (tmp_path / f'{name}.txt').write_bytes(b'')
    data = _data(tmp_path / '*.txt', 0.2)
    message = refusal(load_corpus, data)
    assert f"data.source='{tmp_path}/*.txt': no byte in its 3 documents" in message
    (tmp_path / 'b.txt').write_bytes(b'0123456789')
    (tmp_path / 'c.png').write_bytes(b'\0')
    corpus = load_corpus(_data(tmp_path, 0.2))
    assert (corpus.train, corpus.held_out) == ([b'01234567'], [b'89'])
    note = f'; left out 1 file without text, such as {tmp_path}/c.png'
    assert corpus.description.endswith(note)
