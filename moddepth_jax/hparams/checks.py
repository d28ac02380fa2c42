"""Checks of single knobs, by dotted name and value, and annotated types that apply them."""

import difflib
import functools
import typing
from typing import Annotated

MAX_INT = 2**31 - 1
MAX_FLOAT = 3e38  # this and the next two: limits of float32
MIN_FLOAT = 1.2e-38
BELOW_ONE = 1 - 2**-24
MAX_SIZE = 2**20  # of an axis: the bytes of an array with three such axes fit into 64 bits


def refuse(field, value, right):
    """Raise a one-line ValueError with the name of a knob, its value and what would be right."""
    raise ValueError(f'{field}={value!r}: {right}')


def one_of(field, value, choices):
    """Refuse a value that is not in `choices`; the error names the nearest choice."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        refuse(field, value, f'must be one of {", ".join(choices)}{hint}')


def did_you_mean(text: str, choices) -> str:
    """Return '; did you mean X?' for the choice most similar to `text`, '' if none is similar."""
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(text.lower(), lowered, n=1)
    return f'; did you mean {lowered[near[0]]}?' if near else ''


def positive(field, value, minimum=1, maximum=None):
    """Refuse NaN and numbers outside [minimum, maximum]; None: the maximum of int32 or float32."""
    if maximum is None:
        maximum = MAX_FLOAT if isinstance(value, float) else MAX_INT
    if not value >= minimum:
        refuse(field, value, f'must be {minimum} or more')
    if value > maximum:
        refuse(field, value, f'must be at most {maximum}')


def above_zero(field, value):
    """Refuse a float that is 0 or less, also after rounding to float32, or too large."""
    if not value >= MIN_FLOAT:
        refuse(field, value, 'must be above 0' + ', also in float32' * (value > 0))
    positive(field, value, 0)


def fraction(field, value, zero=True, one=True):
    """Refuse a number outside [0, 1], or one that float32 rounds to an excluded end."""
    low, high = value >= 0 if zero else value > 0, value <= 1 if one else value < 1
    right = f'must lie in {"[" if zero else "("}0, 1{"]" if one else ")"}'
    if not (low and high):
        refuse(field, value, right)
    if not ((zero or value >= MIN_FLOAT) and (one or value <= BELOW_ONE)):
        refuse(field, value, right + ', also in float32')


def encoding(field, value):
    """Refuse a name that Python does not know as a text encoding."""
    try:
        b'a'.decode(value)
    except UnicodeDecodeError:  # some encodings need more than one byte
        pass
    except (LookupError, ValueError):
        refuse(field, value, 'must be an encoding such as utf-8, latin-1, cp1252 or utf-16')


Count = Annotated[int, positive]
CountOrZero = Annotated[int, functools.partial(positive, minimum=0)]
# The length of an axis, short enough that a product of axes does not overflow.
Size = Annotated[int, functools.partial(positive, maximum=MAX_SIZE)]
SizeOrZero = Annotated[int, functools.partial(positive, minimum=0, maximum=MAX_SIZE)]
AboveZero = Annotated[float, above_zero]
Weight = Annotated[float, functools.partial(positive, minimum=0)]
Fraction = Annotated[float, fraction]
FractionAboveZero = Annotated[float, functools.partial(fraction, zero=False)]
FractionBelowOne = Annotated[float, functools.partial(fraction, one=False)]


def choice(*choices):
    """Return the type of a string that is one of `choices`."""
    return choice_of(choices)


def choice_of(table):
    """Return the type of a string that is in a table, such as a registry."""
    return Annotated[str, functools.partial(one_of, choices=table)]


def check_fields(hparams, prefix: str):
    """Run the checks in the annotated types of a dataclass; `prefix` completes the knobs' names."""
    for name, hint in typing.get_type_hints(type(hparams), include_extras=True).items():
        for check in getattr(hint, '__metadata__', ()):
            check(prefix + name, getattr(hparams, name))
