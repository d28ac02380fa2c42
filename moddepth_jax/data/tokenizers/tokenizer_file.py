"""The tokenizer of a tokenizer.json, the file of the library tokenizers."""

import json
import os
import pathlib

from moddepth_jax.data.tokenizers.piece_tokenizer import PieceTokenizer
from moddepth_jax.data.tokenizers.separators import find_separator
from moddepth_jax.data.tokenizers.token_bytes import json_pieces


class FileTokenizer(PieceTokenizer):
    """A Tokenizer of a tokenizer.json; see `make_tokenizer`.

    Text that spells a special token is encoded as plain text, and nothing that the file's template
    puts around a text is added. Byte-level BPE without a normalizer gives back every UTF-8 text
    byte for byte, and `token_bytes_V` of its ids sums to the bytes of the text. What others lose is
    of their making: a normalizer changes the text; a space that is put before every document but
    those that begin with one; characters without a token, where there is no byte fallback.

    Args:
      content: of the file.
      file: where it was read, for messages and for the tokenizer_config.json beside it.
      separator: text of a special token, or None.
      about: what `about.read` found beside it, or None.
      name: None for that of `about` or of the file.

    Raises:
      ValueError: one line, for a file that is no tokenizer, or without a separator.
    """

    def __init__(self, content: bytes, file: pathlib.Path, separator=None, about=None, name=None):
        self._library, parsed = _load(content, file)
        added = self._library.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special}
        self._library.encode_special_tokens = True
        try:
            pieces = json_pieces(self._library, parsed, set(special.values()))
        except ValueError as error:
            raise ValueError(f'{file}: {error}') from None
        if not any(pieces):
            right = 'must be the tokenizer.json of a trained tokenizer'
            raise ValueError(f'{file}: its vocabulary holds no text; {right}')
        if about is not None and separator is None:
            found = about['separator'], tuple(about['stops'])
        else:
            found = find_separator(file, special, self._first(special), separator)
        ids = self._ids('a')
        prefixed = bool(ids) and pieces[ids[0]].startswith(b' ')
        if name is None:
            name = file.name if about is None else about['name']
        super().__init__('tokenizer.json', name, content, pieces, *found, prefixed)
        self._check_about(about, file)
        self.encode(self._library.id_to_token(self.separator).encode())

    def _ids(self, text):
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def _first(self, special):
        """The special token that the file's template puts before a text."""
        tokens = self._library.encode('a').tokens
        return tokens[0] if tokens and tokens[0] in special else None


def without_threads():
    """Has the library use one thread, unless the user has set TOKENIZERS_PARALLELISM.

    Whoever wants more takes more processes; and a process that is forked while the library has
    threads prints warnings.
    """
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')


def _load(content, file):
    without_threads()
    import tokenizers

    right = 'must be the tokenizer.json of the library tokenizers, or a SentencePiece .model'
    try:
        parsed = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{file}: not JSON ({error}); {right}') from None
    try:
        library = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more special
        told = ' '.join(str(error).split())
        raise ValueError(f'{file}: no tokenizer ({told}); {right}') from None
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, 'dropout', None):
        library.model.dropout = None  # the same text shall have the same ids
    return library, parsed
