"""What a routing gap means: the held-out loss under a causal rule minus that under top-C.

Both losses are of the same weights and batches (docs/mixture_of_depths.md, section 5).
"""

import math

# Share of the loss: 0.01 nats at 3.4 nats per token. Studies decide differences of 0.3% and more.
NEGLIGIBLE = 0.003
LARGE = 0.05  # nats per token: a comparison of models must come out the same by both losses


def is_large(gap: float | None) -> bool:
    """Return whether a gap in nats is large, above or below 0. None: the model has no gap."""
    return abs(gap or 0.0) >= LARGE


def describe(gap: float, loss: float) -> str:
    """Say in a line what a gap means, given the causal loss; both are in nats per token."""
    if not math.isfinite(gap):
        return 'routing gap undefined, because the loss is not finite'
    if abs(gap) <= NEGLIGIBLE * loss:
        words = 'negligible'
    else:
        words = f'the causal rule {"does better than top-C" if gap < 0 else "costs loss"}'
        large = f'large, {LARGE} nats or more: {words}; compare models by both losses'
        words = large if is_large(gap) else words
    return f'routing gap {gap:+.4f} nats ({gap / loss:+.2%} of the loss): {words}'
