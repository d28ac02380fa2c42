"""Only regular files of a bounded size are opened, wherever a small file is read."""

import pytest

from moddepth_jax.conversion.families import read_config
from moddepth_jax.conversion.tensor_files import TensorFiles
from moddepth_jax.data.compression import open_file, read_small
from moddepth_jax.data.directory import read_json
from moddepth_jax.data.token_store import open_store
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.training import run_dir
from tests.data.prepared_text import make_special

READERS = {  # of a file, by its name in a folder
    'any': open_file,
    'small': read_small,
    'some.json': lambda path: read_json(path, 'remove it'),
    'tokenizer.json': make_tokenizer,
    'tokenizer.model': lambda path: make_tokenizer(path.parent),
    'tokenizer_about.json': lambda path: make_tokenizer(path.parent),
    'prepared.json': lambda path: open_store(path.parent),
    'config.json': lambda path: (run_dir.read_config(path.parent), read_config(path.parent)),
    'model.safetensors': lambda path: TensorFiles(path.parent),
    'model.safetensors.index.json': lambda path: TensorFiles(path.parent),
}


@pytest.mark.parametrize('kind', ['pipe', 'socket', 'directory', 'device', 'loop', 'large'])
@pytest.mark.parametrize('name', READERS)
def test_anything_but_a_regular_file_is_refused_without_reading(tmp_path, name, kind):
    if kind == 'large' and name in ('any', 'model.safetensors'):
        return  # of any size
    path = tmp_path / name
    make_special(path, kind)
    with pytest.raises((OSError, ValueError)) as raised:
        READERS[name](path)
    assert '\n' not in str(raised.value) and str(tmp_path) in str(raised.value)
