"""Checks of flags that hold for every run, made before JAX is imported."""

import math
import re

AXES = ('data', 'fsdp', 'tensor', 'expert')  # the axes that a mesh may have


def mesh_sizes(text: str) -> dict[str, int]:
    """Return {axis: size} of --mesh=data=2,fsdp=4. Raises a one-line ValueError if malformed."""
    sizes = {}
    for pair in text.split(',') if text else ():
        axis, _, size = pair.partition('=')
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f'--mesh={text}: must be AXIS=SIZE with an axis of {", ".join(AXES)}')
        if axis in sizes:
            raise ValueError(f'--mesh={text}: names {axis} twice; must name each axis once')
        sizes[axis] = int(size)
    return sizes


def parse_steps(text: str) -> tuple[int, int]:
    """Return (first, last) of '20:25': from the end of step 20 to the end of step 25.

    Raises a one-line ValueError for text of another form, or a range without a step.
    """
    match = re.fullmatch(r'(\d+):(\d+)', text)
    if not match or int(match[1]) >= int(match[2]):
        right = 'must be START:STOP, such as 20:25, the steps after step 20 up to step 25'
        raise ValueError(f'--profile={text}: {right}')
    return int(match[1]), int(match[2])


def check_sampling(temperature: float, top_p: float = 1.0, top_k: int = 0):
    """Raise a one-line ValueError for values that `sample` does not accept."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f'temperature={temperature}: must be 0 (the most likely token) or more')
    if not 0 < top_p <= 1:
        raise ValueError(f'top_p={top_p}: must lie in (0, 1]; 1 allows every token')
    if top_k < 0:
        raise ValueError(f'top_k={top_k}: must be 0, for every token, or more')
