"""What a routing gap means: the held-out loss under a causal rule minus that under top-C.

Both losses are of the same weights and batches (docs/mixture_of_depths.md, section 5).
"""

import math

NEGLIGIBLE = 0.01  # nats per token
LARGE = 0.05  # nats per token: a comparison of models must come out the same by both losses


def is_large(gap: float | None) -> bool:
    """Return whether a gap in nats is large, above or below 0. None: the model has no gap."""
    return abs(gap or 0.0) >= LARGE


def describe(gap: float) -> str:
    """Say in words what a gap in nats means."""
    if not math.isfinite(gap):
        return 'undefined, because the loss is not finite'
    if abs(gap) <= NEGLIGIBLE:
        return 'negligible'
    better = 'the causal rule does better than top-C' if gap < 0 else 'the causal rule costs loss'
    if is_large(gap):
        return f'large: {better}; compare models by both losses'
    return f'{better}; report both'
