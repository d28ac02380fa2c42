"""Checks of single knobs; each raises a ValueError of one line."""

import difflib
import math


def refuse(field, value, right):
    """Raises the one line that names a knob, its value and what would be right."""
    raise ValueError(f'{field}={value!r}: {right}')


def one_of(field, value, choices):
    """Refuses a value outside `choices`, naming the nearest of them."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        refuse(field, value, f'must be one of {", ".join(choices)}{hint}')


def positive(field, value, minimum=1):
    """Refuses a number below `minimum`, infinity and NaN."""
    if not value >= minimum or value == math.inf:
        refuse(field, value, f'must be {minimum} or more')


def fraction(field, value, zero=True, one=True):
    """Refuses a number outside [0, 1], or without the ends that are switched off."""
    low, high = value >= 0 if zero else value > 0, value <= 1 if one else value < 1
    if not (low and high):
        refuse(field, value, f'must lie in {"[" if zero else "("}0, 1{"]" if one else ")"}')
