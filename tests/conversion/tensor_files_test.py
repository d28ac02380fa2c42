"""Tensors are read one by one, exactly; an incomplete file is named with the remedy."""

import json
import os
import pickle
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from moddepth_jax.conversion.tensor_files import INDEX_FILE, ONE_FILE, TensorFiles, write_tensors
from tests.data.prepared_text import refusal

ARRAYS = {
    'a': np.arange(12, dtype=np.float32).reshape(3, 4),
    'b': np.full((5,), 0.1, np.float32),
    'c': np.ones((2, 2, 2), np.float32),
}
SHAPES = {name: array.shape for name, array in ARRAYS.items()}


def write(folder, dtype='float32', **how):
    write_tensors(folder, SHAPES, ARRAYS.__getitem__, dict.fromkeys(SHAPES, dtype), **how)


@pytest.mark.parametrize('max_bytes', [10**9, 60, 1])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_what_is_written_is_read(tmp_path, dtype, max_bytes):
    write(tmp_path, dtype, max_bytes=max_bytes)
    with TensorFiles(tmp_path) as files:
        assert files.shapes == SHAPES and set(files.dtypes.values()) == {dtype}
        for name, array in ARRAYS.items():
            read = files.read(name)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, array.astype(jnp.dtype(dtype)).astype(np.float32))
    written = sorted(path.name for path in tmp_path.iterdir())
    assert (written == [ONE_FILE]) == (max_bytes >= 25 * jnp.dtype(dtype).itemsize)
    for path in tmp_path.glob('*.safetensors'):
        with safetensors.safe_open(path, 'np') as file:
            assert file.metadata() == {'format': 'pt'}
    if INDEX_FILE in written:
        index = json.loads((tmp_path / INDEX_FILE).read_text())
        assert index['weight_map'].keys() == SHAPES.keys()
        assert index['metadata']['total_size'] == 25 * jnp.dtype(dtype).itemsize


def test_a_value_beyond_the_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match='big: has a value outside the range of float16'):
        write_tensors(tmp_path, {'big': (1,)}, lambda _: np.float32([1e6]), {'big': 'float16'})


def test_a_truncated_file_is_named(tmp_path):
    """For any cut, the message has the file, its size, and what to do."""
    write(tmp_path)
    file = tmp_path / ONE_FILE
    for size in (len(file.read_bytes()) - 1, 100, 5, 0):
        os.truncate(file, size)
        message = refusal(TensorFiles, tmp_path)
        assert f'{file}: cut short at {size} bytes or damaged' in message
        assert message.endswith('download it again')


def test_files_and_tensors_of_the_index_must_exist(tmp_path):
    """A missing file, one without its tensor, one that is cut short, and a broken index."""
    write(tmp_path, max_bytes=60)
    first, *_ = sorted(tmp_path.glob('model-*'))
    content = first.read_bytes()
    first.write_bytes(content[:-3])
    assert f'{first}: cut short' in refusal(TensorFiles, tmp_path)
    first.unlink()
    index = tmp_path / INDEX_FILE
    right = 'must be a file next to it; download it again'
    assert f"{index}: 'a' is in {first.name!r}; {right}" in refusal(TensorFiles, tmp_path)
    save_file({'other': ARRAYS['a']}, first)
    assert f"{first}: lacks the tensor 'a'" in refusal(TensorFiles, tmp_path)
    (tmp_path / 'folder').mkdir()
    for place in ('', '.', '..', 'folder', f'../{tmp_path.name}/{first.name}', 3, None, [[]]):
        index.write_text(json.dumps({'weight_map': {'a': place}}))
        assert f"{index}: 'a' is in {place!r}; {right}" in refusal(TensorFiles, tmp_path)
    twins = f'{{"weight_map": {{"a": "{first.name}", "a": "{first.name}"}}}}'
    nested = '{"weight_map":' * 10**5
    for broken in ('{"weight', '[]', '{}', '{"weight_map": ["a"]}', nested, twins):
        index.write_text(broken)
        message = refusal(TensorFiles, tmp_path)
        assert message.startswith(f'{index}: ') and message.endswith('; download it again')
    assert "cannot be read (holds 'a' twice)" in message
    index.unlink()
    message = refusal(TensorFiles, tmp_path)
    assert 'holds neither' in message and 'save_pretrained' in message


def test_links_are_followed_only_to_regular_files(tmp_path):
    """The snapshots of a Hugging Face cache have links; the index may not name other folders."""
    blob, folder, cache = tmp_path / 'blob', tmp_path / 'snapshot', tmp_path / 'cache'
    folder.mkdir()
    cache.mkdir()
    write(cache)
    (cache / ONE_FILE).rename(blob)
    (folder / ONE_FILE).symlink_to(blob)
    with TensorFiles(folder) as files:
        np.testing.assert_array_equal(files.read('a'), ARRAYS['a'])
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(OSError, match='a pipe, not a regular file'), TensorFiles(folder):
        pass
    blob.unlink()
    assert 'holds neither' in refusal(TensorFiles, folder)


def test_values_that_cannot_be_parameters_are_refused(tmp_path):
    """Other dtypes are refused before anything is read, infinities and NaNs when they are read."""
    save_file({'a': np.ones(3, np.int8)}, tmp_path / ONE_FILE)
    assert "'a' is I8; must be one of F32, BF16, F16" in refusal(TensorFiles, tmp_path)
    write_header(tmp_path / ONE_FILE, {'a\nb': part([4], 0, 4, 'I8')}, data=bytes(4))
    assert r"'a\nb' is I8" in refusal(TensorFiles, tmp_path)
    save_file({'a': np.array([1, np.nan], np.float32)}, tmp_path / ONE_FILE)
    with (
        TensorFiles(tmp_path) as files,
        pytest.raises(ValueError, match="'a' holds infinities or N"),
    ):
        files.read('a')


def write_header(file, header, size=None, data=b''):
    """Write a file with this header, which claims to be `size` bytes long."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(header) if size is None else size
    file.write_bytes(struct.pack('<Q', size) + header + data)


def part(shape, start, end, dtype='F32'):
    return {'dtype': dtype, 'shape': shape, 'data_offsets': [start, end]}


HOSTILE = {  # headers, some with the size that they claim
    'overlapping': ({'a': part([4], 0, 16), 'b': part([4], 8, 24)},),
    'a gap': ({'a': part([4], 0, 16), 'b': part([2], 20, 28)},),
    'a product above 2^64': ({'a': part([2**40, 2**40], 0, 16)},),
    'beyond the end': ({'a': part([4], 0, 2**62)},),
    'a long name': ({'a\nb' * 10**4: part([4], -8, 8), 'c': part([4], 0, 16)},),
    'a field twice': (
        b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [4], "data_offsets": [0, 16]}}',
    ),
    'a header of gigabytes': ({'a': part([4], 0, 16)}, 2**32),
    'nested': (b'{"a":' * 10**5,),
    'no text': (b'\xff' * 20,),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_a_hostile_header_is_refused(name, tmp_path):
    """It is refused in one line before data are read; a sparse file may be as long as it claims."""
    file = tmp_path / ONE_FILE
    write_header(file, *HOSTILE[name], data=bytes(32))
    message = refusal(TensorFiles, tmp_path)
    assert message.startswith(f'{file}: cut short at ') and len(message) < 1000
    assert message.endswith('; download it again')


def test_a_header_as_long_as_its_file_is_refused(tmp_path):
    """The header has four gigabytes, which are not read."""
    file = tmp_path / ONE_FILE
    write_header(file, b'', 2**32)
    os.truncate(file, 2**32 + 8)
    assert f'{file}: cut short at {2**32 + 8} bytes or damaged' in refusal(TensorFiles, tmp_path)


class Trap:
    def __reduce__(self):
        return os.mkdir, ('trapped',)


def test_a_pickle_is_named_and_never_loaded(tmp_path, monkeypatch):
    """Also if it has the name of a safetensors file, or the index names it."""
    monkeypatch.chdir(tmp_path)
    trap = pickle.dumps(Trap())
    (tmp_path / 'pytorch_model.bin').write_bytes(trap)
    message = refusal(TensorFiles, tmp_path)
    assert f'{tmp_path}: holds neither {ONE_FILE} nor' in message
    assert 'pytorch_model.bin is a pickle, which could run code' in message
    (tmp_path / INDEX_FILE).write_text(json.dumps({'weight_map': {'a': 'pytorch_model.bin'}}))
    assert 'pytorch_model.bin: cut short at' in refusal(TensorFiles, tmp_path)
    (tmp_path / ONE_FILE).write_bytes(trap)
    assert f'{ONE_FILE}: cut short at' in refusal(TensorFiles, tmp_path)
    assert not (tmp_path / 'trapped').exists()
    pickle.loads(trap)
    assert (tmp_path / 'trapped').exists()
