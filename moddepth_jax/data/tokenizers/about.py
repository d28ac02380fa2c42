"""The note beside a saved tokenizer: what its own file does not say."""

import json
import os
import pathlib

FILE = 'tokenizer_about.json'
_FIELDS = {'kind': str, 'name': str, 'separator': int, 'stops': list, 'sha256': str}


def write(directory: str | os.PathLike, kind: str, tokenizer) -> None:
    """Writes the note of `tokenizer` into `directory`, which is made if it is not there.

    Args:
      directory: where its file is.
      kind: 'bytes', 'tokenizer.json' or 'tokenizer.model'.
      tokenizer: a Tokenizer.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    about = {
        'kind': kind,
        'name': tokenizer.name,
        'separator': tokenizer.separator,
        'stops': list(tokenizer.stops),
        'sha256': tokenizer.sha256,
    }
    (directory / FILE).write_text(json.dumps(about, indent=2) + '\n', encoding='utf-8')


def read(directory: str | os.PathLike) -> dict | None:
    """The note in `directory`: kind, name, separator, stops, sha256; None where there is none.

    Raises:
      ValueError: one line, for a note that cannot be read.
    """
    file = pathlib.Path(directory) / FILE
    try:
        about = json.loads(file.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        right = 'save the tokenizer again, or take its own file'
        raise ValueError(f'{file}: cannot be read ({error}); {right}') from None
    for name, kind in _FIELDS.items():
        if not isinstance(about, dict) or not isinstance(about.get(name), kind):
            right = f'must be a JSON object with {", ".join(_FIELDS)}'
            raise ValueError(f'{file}: no {name!r} that is {kind.__name__}; {right}')
    return about
