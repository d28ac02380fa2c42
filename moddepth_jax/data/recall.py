"""A synthetic corpus in which known positions need far context, and all others only near bytes.

A document is 21 lines of 6 bytes and a full stop, 127 bytes, so that a separator and a document
fill a row of 128 tokens exactly:

    Arstu Bwxmn Cstuv Dnopq Evwxm Frstu G3456 H6701 I(hZ) J0123 K(cZ) L4567 M2345 N7012 ... U(mZ) .

A line is its letter, four bytes and a space. Where the four bytes are a word, its first byte is
drawn at random and each other one follows the byte before it in a circle:

- The first NUM_DIALECT_LINES lines are in one of two dialects, circles of 12 small letters each;
  the dialect is drawn for each document.
- All others are in the circle of 8 digits, except that every other one of them, from line
  FIRST_QUESTION on, is a question with probability QUESTION_PROBABILITY: `(xY)`, where x is any
  small letter drawn at random and Y is the capital that names the document's dialect.

Far context is thus needed at x (`needs_far_context`): the last byte that determines Y is
MIN_DISTANCE or more bytes before it. The bytes that begin a word or a question, and x, are drawn at
random. All other bytes follow from the last NEAR bytes. The ideal predictor scores 0.441 nats per
target on average.

The dialect shows at many positions, because the gate of a position is trained only by its own
output. x is any of 24 letters, so that an untrained router selects some and they get gradients.
"""

import numpy as np

LETTERS = b'ABCDEFGHIJKLMNOPQRSTU'  # of the lines
DIALECTS = (b'abcdefghijkl', b'mnopqrstuvwx')
NAMES = b'YZ'  # of the dialects
DIGITS = b'01234567'
OPEN, CLOSE = b'(', b')'
NUM_DIALECT_LINES = 6
FIRST_QUESTION = 8
QUESTION_PROBABILITY = 0.8
MIN_DISTANCE = 11  # from a question's x to the nearest byte before it that determines the answer
NEAR = 6  # bytes that determine the next one, if it is neither drawn nor an answer

SEED = 0
NUM_DOCUMENTS = 16000

_SMALL = b''.join(DIALECTS)


def _word(circle, start):
    return bytes(circle[(start + i) % len(circle)] for i in range(4))


def make_recall(seed: int = SEED, num_documents: int = NUM_DOCUMENTS) -> list[bytes]:
    """Make `num_documents` texts of 127 bytes, as the module describes; `seed` is 0 or more."""
    # Uniform draws only: NumPy may change other distributions between versions.
    random = np.random.Generator(np.random.PCG64([seed, 2])).random
    documents = []
    for dialect, asked_L, start_L in zip(
        (random(num_documents) * len(DIALECTS)).astype(int),
        random((num_documents, len(LETTERS))) < QUESTION_PROBABILITY,
        random((num_documents, len(LETTERS))),
        strict=True,
    ):
        lines = []
        for line, (asked, start) in enumerate(zip(asked_L, start_L, strict=True)):
            if line < NUM_DIALECT_LINES:
                circle = DIALECTS[dialect]
                content = _word(circle, int(start * len(circle)))
            elif asked and line >= FIRST_QUESTION and (line - FIRST_QUESTION) % 2 == 0:
                any_letter = _SMALL[int(start * len(_SMALL))]
                content = OPEN + bytes([any_letter, NAMES[dialect]]) + CLOSE
            else:
                content = _word(DIGITS, int(start * len(DIGITS)))
            lines.append(LETTERS[line : line + 1] + content + b' ')
        documents.append(b''.join(lines) + b'.')
    return documents


def needs_far_context(tokens_BT: np.ndarray) -> np.ndarray:
    """Return bool [B, T], True at the x of each question, a small letter after a bracket.

    False at the first token of a row. `tokens_BT` has ids of the byte tokenizer.
    """
    tokens_BT = np.asarray(tokens_BT)
    opened_BT = np.zeros(tokens_BT.shape, bool)
    opened_BT[:, 1:] = tokens_BT[:, :-1] == OPEN[0]
    return opened_BT & np.isin(tokens_BT, np.frombuffer(_SMALL, np.uint8))
