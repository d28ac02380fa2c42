"""Shows that the byte tokenizer loses nothing and that its table of bytes is the truth."""

import numpy as np
import pytest

from moddepth_jax.data.tokenizer import make_tokenizer

ALL_BYTES = bytes(range(256)) * 3 + 'naïve \x00 text\r\n'.encode()


def test_round_trip_keeps_every_byte():
    """decode inverts encode on all 256 byte values, on nothing, and whatever the integer type."""
    tokenizer = make_tokenizer('bytes')
    ids = tokenizer.encode(ALL_BYTES)
    assert ids.dtype == np.uint16 and ids.tolist() == list(ALL_BYTES)
    assert tokenizer.decode(ids) == ALL_BYTES
    assert tokenizer.decode(ids.astype(np.int32).tolist()) == ALL_BYTES
    assert tokenizer.encode(b'').shape == (0,) and tokenizer.decode([]) == b''


def test_separator_is_an_id_of_its_own_and_no_text():
    """The separator is in the vocabulary, comes from no byte, and decodes to none."""
    tokenizer = make_tokenizer('bytes')
    assert tokenizer.name == 'bytes'
    assert (tokenizer.vocab_size, tokenizer.separator) == (257, 256)
    assert tokenizer.separator not in tokenizer.encode(ALL_BYTES)
    assert tokenizer.decode([256, 97, 256, 256, 98, 256]) == b'ab'


def test_token_bytes_count_what_decode_gives():
    """token_bytes_V of any id is the length of the text it decodes to."""
    tokenizer = make_tokenizer('bytes')
    lengths = [len(tokenizer.decode([i])) for i in range(tokenizer.vocab_size)]
    assert tokenizer.token_bytes_V.dtype == np.int32
    assert tokenizer.token_bytes_V.tolist() == lengths
    assert sum(lengths) == 256


@pytest.mark.parametrize('ids', [[257], [97, -1], [-100]])
def test_decode_refuses_what_is_no_id(ids):
    """An id outside the vocabulary, an ignored label among them, is an error and no character."""
    with pytest.raises(ValueError, match=rf'token id {ids[-1]}: must lie in \[0, 257\)'):
        make_tokenizer('bytes').decode(ids)


def test_unknown_name_is_refused():
    """A name outside the table is answered with the table."""
    with pytest.raises(ValueError, match="data.tokenizer='byte': must be one of bytes"):
        make_tokenizer('byte')
