"""Caches that outlive a call of `generate`, for texts that go on, as those of a chat do."""

import jax
import numpy as np

from moddepth_jax.hparams import Hparams
from moddepth_jax.model.kv_cache import Cache, cut_cache


class PromptCache:
    """The caches of the texts that `generate` wrote last, one row for each prompt.

    The next call to which it is given reads only what its prompts do not share with these texts.
    """

    def __init__(self):
        self._owner = self._variables = self._unrolled = None
        self._capacity, self._texts, self._caches = 0, [], {}

    def unroll(self, function, variables, hparams: Hparams, routing: str, tokenizer):
        """`function(variables, hparams, routing)`, called once for the same arguments.

        Forgets all caches if one of these, or the tokenizer, is another than before.
        """
        owner = *map(id, jax.tree.leaves(variables)), hparams, routing, tokenizer
        if owner != self._owner:
            self.__init__()
            self._owner, self._variables = owner, variables  # so that no other arrays get their ids
            self._unrolled = function(variables, hparams, routing)
        return self._unrolled

    def capacity(self, length: int, least: int, most: int) -> int:
        """The capacity for `length` tokens: at first `least` at least, and never above `most`.

        When it does not suffice it doubles, and all caches are forgotten: texts that grow are read
        again for it few times.
        """
        if length > self._capacity:
            self._caches = {}
            while self._capacity < length:
                self._capacity = min(most, max(least, 2 * self._capacity))
        return self._capacity

    def take(self, routing: str, prompts, separator: int | None):
        """(Cache, tokens of each prompt that it holds), or (None, None); then it is forgotten.

        Of a prompt it does not hold the last token, whose logits are wanted. `separator` begins a
        document; None: nothing does.
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
        """Keeps the caches of some texts by routing; the last tokens may be missing there."""
        self._texts, self._caches = texts, caches


def _num_equal(first, second):
    """How many tokens two sequences begin with in common."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _last(token, row):
    """Where a token stands in a row for the last time, 0 if it does not."""
    return max((i for i, one in enumerate(row) if one == token), default=0)
