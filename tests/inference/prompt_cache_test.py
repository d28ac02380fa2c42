"""Texts that continue from a PromptCache equal those after one prompt of all tokens so far."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moddepth_jax.inference import generate as generate_module
from moddepth_jax.inference.generate import generate
from moddepth_jax.inference.prompt_cache import PromptCache
from moddepth_jax.model.kv_cache import Cache, LayerCache
from tests.model.cases import build, filled

CONTEXT, STEP = 96, 24


class Words:
    """A separator that begins documents, and stops, one of which is often drawn."""

    separator, stops = 7, (7, *range(90, 96))
    token_bytes_V = np.where(np.arange(96) == 7, 0, 1)


WORDS = Words()
# Tokens added to each row, turn by turn; documents begin within rows and at their first token.
LINES = (  # of each row
    ([1, 2, 3], [7, 11], [16], [19, 20, 21]),
    ([4], [12, 7, 13, 14], [17, 18], [7, 22]),
    ([5, 6, 8, 9], [15] * 3, [7] * 6, [23, 24, 25, 26]),
)
# The stream is large, so float32 rounds keys by 1e-4.
IN_FLOAT64 = ('token choice', 'token choice, first keys')
# The cache counts tokens without knowing which, so it cannot be cut.
COUNTS = ('mlp routed', 'row capacity', 'value embeddings, experts')
MODELS = (
    *('dense', 'mod and moda', 'scaled rope, moda', 'predictor', 'aux_loss', 'threshold'),
    *('aux_loss grows', 'mod and moda grows', 'masked', 'random', 'attention routed'),
    *('experts choose', 'staged', 'value attention, recent', 'mudd', 'hyper-connections'),
    *('attention residual grows', 'value embeddings', 'looped', 'looped moda', 'looped threshold'),
    *('recursions', 'recursions grow', 'recursions, first keys', *IN_FLOAT64),
)


def check_turn(model, hparams, kept, prompts, **how):
    """Return the Generation with a PromptCache; checks that it equals the one without."""
    how |= {'routing': model.routing, 'tokenizer': WORDS}
    fresh = PromptCache()
    expected = generate(model.variables, hparams, prompts, 7, prompt_cache=fresh, **how)
    found = generate(model.variables, hparams, prompts, 7, prompt_cache=kept, **how)
    assert list(map(list, found.tokens)) == list(map(list, expected.tokens))
    assert found.stopped == expected.stopped
    for name in ('dropped_B', 'guessed_B', 'held_B'):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    assert not expected.reused and kept._caches.keys() == fresh._caches.keys()
    for routing, cache in fresh._caches.items():
        for one, other in zip(filled(cache), filled(kept._caches[routing]), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize('name', (*MODELS, *COUNTS))
def test_turns_of_a_chat_are_texts_of_the_full_prompt(name, tiny_config, monkeypatch):
    """With guesses, documents, texts that end, prompts that differ from a text, and growing caches.

    All tokens that a cache has are used, unless it is full, or has to be cut and cannot.
    """
    monkeypatch.setattr(generate_module, '_CAPACITY_STEP', STEP)
    wide = name in IN_FLOAT64
    with jax.enable_x64(wide), jax.numpy_rank_promotion('allow' if wide else 'raise'):
        in_float64 = functools.partial(tiny_config, **{'model.dtype': 'float64'})
        check_turns(build(in_float64 if wide else tiny_config, name), name)


def check_turns(model, name):
    data = dataclasses.replace(model.hparams.data, sequence_length=CONTEXT)
    hparams = dataclasses.replace(model.hparams, data=data)
    kept, texts, capacity, reused = PromptCache(), [[7], [7, 30, 31], [7, 32]], STEP, []
    how = {'draft_tokens': 2 if hparams.model.routed_layers else 0}
    for turn, lines in enumerate(zip(*LINES, strict=True)):
        # In the last turn two texts have lost their newest tokens.
        befores = [
            text[: len(text) - 2 * (turn == 3 and row < 2)] for row, text in enumerate(texts)
        ]
        prompts = [[*before, *line] for before, line in zip(befores, lines, strict=True)]
        expected = 0
        if kept._caches:
            (held_B, dropped_B), most = lengths(kept, model), list(map(len, befores))
            assert (held_B >= np.array(list(map(len, texts))) - 1).all()
            cut_off = not (name in COUNTS or dropped_B.any()) or (held_B <= most).all()
            expected = np.minimum(held_B, most).sum() if cut_off else 0
        if grows := max(map(len, prompts)) + 7 > capacity:
            capacity, expected = 2 * capacity, 0
        result = check_turn(model, hparams, kept, prompts, seed=turn, **how)
        assert result.reused == expected
        texts = [row.tolist() for row in result.tokens]
        reused.append(result.reused)
    assert capacity > STEP and reused[0] == 0
    counts = name in COUNTS or dropped_B.any()
    assert counts or (reused[1] and (reused[3] or grows))


def lengths(kept, model):
    cache = kept._caches[model.routing]
    return np.asarray(cache.lengths_B), np.asarray(cache.dropped_B)


def made_up_cache(lengths_B, dropped=0, **counts):
    """Make a Cache of a dense block and a routed one, which has the tokens at even positions."""
    lengths_B = np.asarray(lengths_B, np.int32)
    positions_BS = np.tile(2 * np.arange(6, dtype=np.int32), (len(lengths_B), 1))
    dense = LayerCache(np.zeros((len(lengths_B), 1, 1, 12)), None, None, None, **counts)
    routed = LayerCache(positions_BS[:, None, None], None, positions_BS, (lengths_B + 1) // 2)
    zeros_B = np.zeros_like(lengths_B)
    return Cache((dense, routed), lengths_B, zeros_B, zeros_B + dropped)


def test_only_the_common_start_of_prompt_and_text_is_reused():
    """A cache is cut to it, unless it counts tokens; it serves once, and never the last token."""
    texts, same = [[7, 1, 2, 3, 4, 5], [7, 8, 9, 7, 9, 9]], [[7, 1, 2, 3, 4, 5], [7, 8, 9, 7, 9, 9]]
    other = [[7, 1, 2, 6, 6], [7, 8, 9, 7, 9, 1, 1]]

    def take(prompts, separator=7, **counts):
        kept = PromptCache()
        kept.keep([[7, 9]] * 2, {'rule': made_up_cache([1, 1])})  # of the turn before
        kept.keep(texts, {'rule': made_up_cache([5, 6], **counts)})
        result = kept.take('rule', prompts, separator)
        assert kept.take('rule', prompts, separator) == (None, None) == kept.take('', prompts, 7)
        return result

    cache, held_B = take([[*text, 0] for text in same])
    assert held_B.tolist() == [5, 6] == cache.lengths_B.tolist()
    cache, held_B = take(same)
    assert held_B.tolist() == [5, 5] == cache.lengths_B.tolist()
    for separator, documents in ((7, [0, 3]), (-1, [0, 0])):
        cache, held_B = take(other, separator)
        assert held_B.tolist() == [3, 5] == cache.lengths_B.tolist()
        assert cache.layers[1].lengths_B.tolist() == [2, 3]
        assert cache.documents_B.tolist() == documents
    taken_B = np.zeros((2, 1), np.int32)
    for counts in ({'dropped': 1}, {'taken_BE': taken_B}, {'selected_B': taken_B[:, 0]}):
        assert take([[*text, 0] for text in same], **counts)[0] is not None
        assert take(same, **counts) == take(other, **counts) == (None, None)
    assert take([[1, *texts[0]], same[1]]) == take(same[:1]) == (None, None)


def test_another_model_rule_or_tokenizer_forgets_the_caches():
    """Variables are compared by their arrays. The capacity doubles when it is too small."""
    kept, made = PromptCache(), []

    def unroll(*arguments):
        made.append(arguments)
        return len(made)

    texts, first, second = [[7, 1]], {'w': np.ones(2)}, {'w': np.ones(2)}
    each = [(first, 'h', 'r', WORDS), (second, 'h', 'r', WORDS), (second, 'i', 'r', WORDS)]
    each += [(second, 'i', 's', WORDS), (second, 'i', 's', None)]
    for expected, arguments in enumerate(each, 1):
        assert kept.unroll(unroll, *arguments) == expected
        again = dict(arguments[0]), *arguments[1:]
        assert kept.unroll(unroll, *again) == expected
        assert kept.take('r', [[7, 1, 2]], 7) == (None, None)
        capacities = [kept.capacity(length, 10, 50) for length in (3, 10, 11, 4, 45)]
        assert capacities == [10, 10, 20, 20, 50]
        kept.keep(texts, {'r': made_up_cache([1])})
        assert kept.capacity(50, 10, 50) == 50 and kept.take('r', [[7, 1, 2]], 7)[1].tolist() == [1]
        kept.keep(texts, {'r': made_up_cache([1])})
    kept = PromptCache()
    assert kept.capacity(5, 10, 50) == 10
    kept.keep(texts, {'r': made_up_cache([1])})
    assert kept.capacity(11, 10, 50) == 20 and kept.take('r', [[7, 1, 2]], 7) == (None, None)
