"""A run keeps its tokenizer in its directory: once, whole, and no other."""

import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer, tokenizer_of
from moddepth_jax.hparams import from_config
from moddepth_jax.training.run_dir import save_tokenizer
from tests.data import tokenizer_files


@pytest.fixture
def hparams(tiny_config, tmp_path):
    return from_config(tiny_config(**{'data.tokenizer': str(tmp_path / 'gone.json')}))


def test_the_run_needs_its_file_no_more(hparams, tmp_path):
    """What was kept is the same tokenizer; a second start leaves it as it is."""
    tokenizer = tokenizer_files.byte_level()
    save_tokenizer(tmp_path, hparams, tokenizer)
    assert tokenizer_of(hparams.data, tmp_path).sha256 == tokenizer.sha256
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / 'tokenizer').iterdir()}
    save_tokenizer(tmp_path, hparams, tokenizer)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / 'tokenizer').iterdir()} == files


def test_what_a_killed_start_left_goes(hparams, tmp_path):
    """Half a tokenizer under a temporary name is in nobody's way."""
    (tmp_path / 'tokenizer.host-1.tmp').mkdir()
    (tmp_path / 'tokenizer.host-1.tmp' / 'tokenizer.json').write_text('{')
    save_tokenizer(tmp_path, hparams, tokenizer_files.byte_level())
    assert [file.name for file in tmp_path.iterdir()] == ['tokenizer']


def test_another_tokenizer_is_refused(hparams, tmp_path):
    """A run goes on with the ids that it began with."""
    (tmp_path / 'llama.json').write_text(tokenizer_files.llama_file())
    save_tokenizer(tmp_path, hparams, tokenizer_files.byte_level())
    with pytest.raises(ValueError, match=r'tokenizer: holds bpe:320, .*; put back') as caught:
        save_tokenizer(tmp_path, hparams, make_tokenizer(tmp_path / 'llama.json'))
    assert '\n' not in str(caught.value)


def test_bytes_need_no_folder_unless_they_were_prepared(tiny_config, tmp_path):
    """`prepared` does not say what it was, once the prepared text has moved."""
    tokenizer = make_tokenizer('bytes')
    save_tokenizer(tmp_path, from_config(tiny_config()), tokenizer)
    assert not list(tmp_path.iterdir())
    prepared = from_config(tiny_config(**{'data.tokenizer': 'prepared'}))
    save_tokenizer(tmp_path, prepared, tokenizer)
    assert tokenizer_of(prepared.data, tmp_path).name == 'bytes'


def test_a_directory_that_cannot_be_written_is_named(hparams, tmp_path):
    """One line that names the option."""
    with pytest.raises(ValueError, match='--workdir=.*; must be a directory that can be written'):
        (tmp_path / 'file').write_text('')
        save_tokenizer(tmp_path / 'file', hparams, tokenizer_files.byte_level())
