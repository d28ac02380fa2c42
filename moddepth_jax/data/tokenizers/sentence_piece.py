"""Tokenizers of a SentencePiece .model."""

import pathlib

from moddepth_jax.data.tokenizers.piece_tokenizer import PieceTokenizer

_SPACE = '\u2581'  # how the library writes a space


class SentencePieceTokenizer(PieceTokenizer):
    """A Tokenizer of a SentencePiece .model; see `make_tokenizer`.

    With byte fallback, it restores all text that the model's normalizer does not change, except the
    character U+2581, which becomes a space. Raises ValueError, one line, for a file that is not a
    model, or if sentencepiece is not installed.
    """

    def __init__(self, content: bytes, file: pathlib.Path, separator=None, metadata=None):
        self._library = _load(content, file)
        size = self._library.get_piece_size()
        special = {
            self._library.id_to_piece(number): number
            for number in range(size)
            if self._library.is_control(number)
        }
        pieces = [self._piece(number) for number in range(size)]
        bos = self._library.bos_id()
        first = self._library.id_to_piece(bos) if bos >= 0 else None
        super().__init__(
            'tokenizer.model', content, file, pieces, special, first, separator, metadata
        )

    def _ids(self, text):
        return self._library.encode(text, out_type=int, add_bos=False, add_eos=False)

    def _piece(self, number):
        library = self._library
        if library.is_control(number) or library.is_unused(number) or library.is_unknown(number):
            return b''
        piece = library.id_to_piece(number)
        if library.is_byte(number):
            return bytes.fromhex(piece[3:5])  # of <0x0A>
        return piece.replace(_SPACE, ' ').encode()


def _load(content, file):
    try:
        import sentencepiece
    except ImportError:
        right = "install it: pip install 'moddepth-jax[sentencepiece]'"
        raise ValueError(f'{file}: needs the library sentencepiece; {right}') from None
    right = 'must be a SentencePiece .model, or the tokenizer.json of the library tokenizers'
    try:
        library = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        reason = ' '.join(str(error).split())
        raise ValueError(f'{file}: no SentencePiece model ({reason}); {right}') from None
    if not content or not library.get_piece_size():
        raise ValueError(f'{file}: its vocabulary is empty; {right}')
    return library
