"""KV caches that are kept between calls of `generate`, for texts that grow, as in a chat."""

import jax
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.kv_cache import Cache, cut_cache


class PromptCache:
    """The KV caches of the texts of the last call of `generate`, one row for each prompt.

    The next call with this object computes only the tokens that its prompts do not share with these
    texts.
    """

    def __init__(self):
        self._owner = self._variables = self._unrolled = None
        self._capacity, self._texts, self._caches = 0, [], {}

    def unroll(self, function, variables, hparams: Hparams, routing: str, tokenizer):
        """Return `function(variables, hparams, routing)`, called once for the same arguments.

        Drops all caches if one of the arguments, or the tokenizer, has changed.
        """
        owner = *map(id, jax.tree.leaves(variables)), hparams, routing, tokenizer
        if owner != self._owner:
            self.__init__()
            # Keeping the variables prevents that new arrays get the same ids.
            self._owner, self._variables = owner, variables
            self._unrolled = function(variables, hparams, routing)
        return self._unrolled

    def capacity(self, length: int, least: int, most: int) -> int:
        """Return the capacity for `length` tokens, between `least` and `most`.

        If the capacity is too small, it doubles and all caches are dropped, so that a growing text
        is computed again only a few times.
        """
        if length > self._capacity:
            self._caches = {}
            while self._capacity < length:
                self._capacity = min(most, max(least, 2 * self._capacity))
        return self._capacity

    def take(self, routing: str, prompts, separator: int):
        """Remove and return (Cache, number of tokens of each prompt in it), or (None, None).

        The last token of a prompt is never in it, because its logits are needed. `separator` begins
        a document; -1 if no token does.
        """
        cache = self._caches.pop(routing, None)
        if cache is None or len(prompts) != len(self._texts):
            return None, None
        texts, held_B = zip(prompts, self._texts, strict=True), np.asarray(cache.lengths_B)
        same_B = np.minimum(held_B, [_num_equal(prompt[:-1], text) for prompt, text in texts])
        if (same_B < held_B).any():
            rows = zip(prompts, same_B, strict=True)
            cache = cut_cache(cache, same_B, [_last(separator, row[:same]) for row, same in rows])
        return (None, None) if cache is None or not same_B.all() else (cache, same_B)

    def keep(self, texts, caches: dict[str, Cache]):
        """Keep the caches of some texts by routing; these may lack the last tokens."""
        self._texts, self._caches = texts, caches


def _num_equal(first, second):
    """Count the tokens that two sequences have in common at their start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _last(token, row):
    """Return the last index of a token in a row, 0 if it is not there."""
    return max((i for i, one in enumerate(row) if one == token), default=0)
