"""Checks of single knobs by dotted name and value, and the types of knobs that name them."""

import difflib
import functools
import typing
from typing import Annotated

MAX_INT = 2**31 - 1
MAX_FLOAT = 3e38  # float32, as the two below
MIN_FLOAT = 1.2e-38
BELOW_ONE = 1 - 2**-24
MAX_SIZE = 2**20  # of an axis: a product of three, in bytes, fits into 64 bits


def refuse(field, value, right):
    """Raise a one-line ValueError that names a knob, its value and what would be right."""
    raise ValueError(f'{field}={value!r}: {right}')


def one_of(field, value, choices):
    """Refuse a value outside `choices`, and name the nearest choice."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        refuse(field, value, f'must be one of {", ".join(choices)}{hint}')


def did_you_mean(text: str, choices) -> str:
    """The end of an error message: the choice most similar to `text`, or '' without one."""
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(text.lower(), lowered, n=1)
    return f'; did you mean {lowered[near[0]]}?' if near else ''


def positive(field, value, minimum=1, maximum=None):
    """Refuse a number below `minimum`, above `maximum` (None: of int32, float32), infinity, NaN."""
    if maximum is None:
        maximum = MAX_FLOAT if isinstance(value, float) else MAX_INT
    if not value >= minimum:
        refuse(field, value, f'must be {minimum} or more')
    if value > maximum:
        refuse(field, value, f'must be at most {maximum}')


def above_zero(field, value):
    """Refuse a float that is not above 0 (in float32 too) or that is too large."""
    if not value >= MIN_FLOAT:
        refuse(field, value, 'must be above 0' + ', in float32 too' * (value > 0))
    positive(field, value, 0)


def fraction(field, value, zero=True, one=True):
    """Refuse a number outside [0, 1], or that float32 rounds to an end that is not allowed."""
    low, high = value >= 0 if zero else value > 0, value <= 1 if one else value < 1
    right = f'must lie in {"[" if zero else "("}0, 1{"]" if one else ")"}'
    if not (low and high):
        refuse(field, value, right)
    if not ((zero or value >= MIN_FLOAT) and (one or value <= BELOW_ONE)):
        refuse(field, value, right + ', in float32 too')


def encoding(field, value):
    """Refuse what Python knows as no encoding of text."""
    try:
        b'a'.decode(value)
    except UnicodeDecodeError:  # a byte alone is too short for some
        pass
    except (LookupError, ValueError):
        refuse(field, value, 'must be an encoding, as utf-8, latin-1, cp1252 or utf-16')


Count = Annotated[int, positive]
CountOrZero = Annotated[int, functools.partial(positive, minimum=0)]
# An axis of an array: not so long that a product of axes overflows.
Size = Annotated[int, functools.partial(positive, maximum=MAX_SIZE)]
SizeOrZero = Annotated[int, functools.partial(positive, minimum=0, maximum=MAX_SIZE)]
AboveZero = Annotated[float, above_zero]
Weight = Annotated[float, functools.partial(positive, minimum=0)]
Fraction = Annotated[float, fraction]
FractionAboveZero = Annotated[float, functools.partial(fraction, zero=False)]
FractionBelowOne = Annotated[float, functools.partial(fraction, one=False)]


def choice(*choices):
    """The type of a string that is one of these."""
    return choice_of(choices)


def choice_of(table):
    """The type of a string that is in a table, such as a registry."""
    return Annotated[str, functools.partial(one_of, choices=table)]


def check_fields(hparams, prefix: str):
    """Check each field of a dataclass by its type; `prefix`: of the names of its knobs."""
    for name, hint in typing.get_type_hints(type(hparams), include_extras=True).items():
        for check in getattr(hint, '__metadata__', ()):
            check(prefix + name, getattr(hparams, name))
