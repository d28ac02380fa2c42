"""A corpus in which known positions need far context, and everything else follows from near bytes.

A document is 21 lines of 6 bytes and a full stop, 127 bytes, so that a separator and a document
fill a row of 128 tokens exactly:

    Arstu Bwxmn Cstuv Dnopq Evwxm Frstu G3456 H6701 I(hZ) J0123 K(cZ) L4567 M2345 N7012 ... U(mZ) .

A line is its letter, four bytes and a space. Where the four bytes are a word, its first byte is
drawn at random and each other one follows the byte before it in a circle:

- The first NUM_TOLD lines are in one of two dialects, circles of 12 small letters each; the
  document has drawn which.
- All others are in the circle of 8 digits, except that every other one of them, from line
  FIRST_ASKED on, is with probability ASKED a question: `(xY)`, x any small letter drawn at random
  and Y the capital that names the document's dialect.

So x is where far context is needed: what follows is Y, x itself does not tell it, and the last byte
that does is MIN_DISTANCE or more before it. These positions are `needs_far_context`. The positions
before a word, a question or an x are harder still, for what follows was drawn and no context tells
it. All other targets follow from the last NEAR bytes. Over any targets y_1..y_n of whole documents
the ideal reader therefore scores

    floor = 1/n sum_i -log p(y_i)      in nats per target, p = 1 where nothing is drawn.

What is remembered stands in many places, each as good as any other, because a routed block's gate
is trained by what a position does for its own output alone: no gradient of that block tells the
router of the one place whose keys and values others would need. x is any of 24 letters, so that a
router which has learned nothing yet selects some: a token never selected has no gradient either.
"""

import math

import numpy as np

LETTERS = b'ABCDEFGHIJKLMNOPQRSTU'  # of the lines
DIALECTS = (b'abcdefghijkl', b'mnopqrstuvwx')
NAMES = b'YZ'  # of the dialects
DIGITS = b'01234567'
OPEN, CLOSE = b'(', b')'
NUM_TOLD = 6
FIRST_ASKED = 8
ASKED = 0.8
MIN_DISTANCE = 11  # from a question's x to the nearest byte before that tells its answer
NEAR = 6  # a byte that is neither drawn nor asked for follows from so many last bytes

SEED = 0
NUM_DOCUMENTS = 16000

_SMALL = b''.join(DIALECTS)


def _word(circle, start):
    return bytes(circle[(start + i) % len(circle)] for i in range(4))


def make_recall(seed: int = SEED, num_documents: int = NUM_DOCUMENTS) -> list[bytes]:
    """`num_documents` texts of 127 bytes, as the module describes them; `seed` from 0 on."""
    # Only uniform draws: NumPy keeps those across versions, unlike its other distributions.
    random = np.random.Generator(np.random.PCG64([seed, 2])).random
    documents = []
    for dialect, asked_L, start_L in zip(
        (random(num_documents) * len(DIALECTS)).astype(int),
        random((num_documents, len(LETTERS))) < ASKED,
        random((num_documents, len(LETTERS))),
        strict=True,
    ):
        lines = []
        for line, (asked, start) in enumerate(zip(asked_L, start_L, strict=True)):
            if line < NUM_TOLD:
                circle = DIALECTS[dialect]
                content = _word(circle, int(start * len(circle)))
            elif asked and line >= FIRST_ASKED and (line - FIRST_ASKED) % 2 == 0:
                content = (
                    OPEN + b'%c%c' % (_SMALL[int(start * len(_SMALL))], NAMES[dialect]) + CLOSE
                )
            else:
                content = _word(DIGITS, int(start * len(DIGITS)))
            lines.append(LETTERS[line : line + 1] + content + b' ')
        documents.append(b''.join(lines) + b'.')
    return documents


def needs_far_context(tokens_BT: np.ndarray) -> np.ndarray:
    """bool [B, T]: True at the x of each question, a small letter after an opening bracket.

    False at a row's first token.

    Args:
      tokens_BT: int, token ids of the bytes tokenizer.
    """
    tokens_BT = np.asarray(tokens_BT)
    opened_BT = np.zeros(tokens_BT.shape, bool)
    opened_BT[:, 1:] = tokens_BT[:, :-1] == OPEN[0]
    return opened_BT & np.isin(tokens_BT, np.frombuffer(_SMALL, np.uint8))


def _surprisals():
    """float [257, 257]: nats of a token after the one before it; 0 where that was no draw."""
    nats_VV = np.zeros((257, 257))
    for line, letter in enumerate(LETTERS):
        if line < NUM_TOLD:
            choices = len(DIALECTS[0]) if line else len(_SMALL)
            nats_VV[letter, list(_SMALL)] = math.log(choices)
            continue
        may_ask = line >= FIRST_ASKED and (line - FIRST_ASKED) % 2 == 0
        not_asked = -math.log(1 - ASKED) if may_ask else 0.0
        nats_VV[letter, list(DIGITS)] = math.log(len(DIGITS)) + not_asked
        nats_VV[letter, OPEN[0]] = -math.log(ASKED)
    nats_VV[OPEN[0], list(_SMALL)] = math.log(len(_SMALL))
    return nats_VV


def entropy_floor(tokens_BT: np.ndarray, labels_BT: np.ndarray) -> float:
    """Mean nats per target that the ideal reader scores on exactly these rows.

    The module's equation over labels that are not -100. For rows that cut documents it is a lower
    bound: their questions may have lost what tells the answer.

    Args:
      tokens_BT, labels_BT: int, of a batch.

    Raises:
      ValueError: all labels are -100.
    """
    tokens_BT, labels_BT = np.asarray(tokens_BT), np.asarray(labels_BT)
    counted_BT = labels_BT >= 0
    if not counted_BT.any():
        raise ValueError(f'labels of shape {labels_BT.shape}: must hold one target at least')
    return float(_surprisals()[tokens_BT[counted_BT], labels_BT[counted_BT]].mean())
