"""Reads and writes the *.safetensors of a folder: one file, or several with an index."""

import contextlib
import json
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from moddepth_jax.data.compression import open_file
from moddepth_jax.data.directory import read_json, short_repr

ONE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
DTYPES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}
PICKLES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.bin.index.json')
_AGAIN = 'download it again'


class TensorFiles(contextlib.ExitStack):
    """The tensors of a folder by name, read on demand; a context manager.

    `shapes` and `dtypes` (float32, bfloat16 or float16) have an entry for each tensor. Raises
    ValueError if a file is missing or truncated, lacks a tensor of the index, or has other dtypes.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__()
        self.shapes, self.dtypes, self._files = {}, {}, {}
        for file_name, names in _files(folder).items():
            path = folder / file_name
            file = self.enter_context(_open(path))
            there = set(file.keys())
            for name in sorted(there if names is None else names):
                if name not in there:
                    right = f'which {INDEX_FILE} gives it; {_AGAIN}'
                    raise ValueError(f'{path}: lacks the tensor {short_repr(name)}, {right}')
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    right = f'must be one of {", ".join(DTYPES)}'
                    found = f'{short_repr(name)} is {part.get_dtype()}'
                    raise ValueError(f'{path}: {found}; {right}')
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = DTYPES[part.get_dtype()]
                self._files[name] = (file, path)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in float32; raises ValueError for infinities and NaNs."""
        file, path = self._files[name]
        array = file.get_tensor(name).astype(np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f'{path}: {short_repr(name)} holds infinities or NaNs; {_AGAIN}')
        return array


def _files(folder):
    """Return {file: its tensors in the index} of a folder; None stands for all tensors."""
    if (folder / ONE_FILE).exists():
        return {ONE_FILE: None}
    content = read_json(folder / INDEX_FILE, _AGAIN, {'weight_map': dict})
    there = {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()
    if content is None:
        found = f'holds neither {ONE_FILE} nor {INDEX_FILE}'
        if pickles := sorted(name for name in there if name.endswith(PICKLES)):
            found += f', and {pickles[0]} is a pickle, which could run code when read'
        right = 'other formats are not read; save_pretrained of transformers writes safetensors'
        raise ValueError(f'{folder}: {found}; {right}')
    files = {}
    for name, file in content['weight_map'].items():
        if not isinstance(file, str) or file not in there:
            found = f'{folder}/{INDEX_FILE}: {short_repr(name)} is in {short_repr(file)}'
            raise ValueError(f'{found}; must be a file next to it; {_AGAIN}')
        files.setdefault(file, []).append(name)
    return files


def _open(path):
    import safetensors

    open_file(path).close()  # raises OSError unless it is a regular file
    try:
        return safetensors.safe_open(path, 'np')
    except safetensors.SafetensorError as error:
        why = ' '.join(str(error).split())[:200]  # it may quote names with any characters
        found = f'cut short at {path.stat().st_size} bytes or damaged ({why})'
        raise ValueError(f'{path}: {found}; {_AGAIN}') from None


def write_tensors(
    folder: pathlib.Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtypes: dict[str, str],
    max_bytes: int = 5 * 10**9,  # of a file, which is in memory while it is written
) -> None:
    """Write tensors to one file, or to several of at most `max_bytes` or one tensor each.

    `read` returns a tensor by its name. Raises ValueError for a value that its dtype cannot hold.
    """
    from safetensors.numpy import save_file

    wanted = {name: jnp.dtype(dtype) for name, dtype in dtypes.items()}
    sizes = {name: int(np.prod(shapes[name])) * wanted[name].itemsize for name in shapes}
    shards, places = [[]], {}
    for name, size in sizes.items():
        if shards[-1] and size + sum(map(sizes.get, shards[-1])) > max_bytes:
            shards.append([])
        shards[-1].append(name)
    for i, names in enumerate(shards, 1):
        file = f'model-{i:05d}-of-{len(shards):05d}.safetensors' if shards[1:] else ONE_FILE
        places |= dict.fromkeys(names, file)
        arrays = {name: _rounded(name, read(name), wanted[name]) for name in names}
        save_file(arrays, folder / file, metadata={'format': 'pt'})
    if len(shards) > 1:
        index = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + '\n', encoding='utf-8')


def _rounded(name, array, dtype):
    with np.errstate(over='ignore'):  # to infinity
        array = array.astype(dtype)
    if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f'{name}: has a value outside the range of {dtype}; use --dtype=float32')
    return array
