"""Generated text is what the causally routed model predicts from its own growing prefix."""

import functools
import re

import jax
import numpy as np
import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.inference import generate as generate_module
from moddepth_jax.inference.generate import describe, generate
from moddepth_jax.inference.prompt_cache import PromptCache
from moddepth_jax.inference.sampling import sample
from moddepth_jax.inference.scoring import score
from moddepth_jax.model.decoding import empty_cache, unroll
from moddepth_jax.model.transformer import Transformer
from tests.model.cases import TOKEN_CHOICE, random_variables

LENGTH = 24
PROMPT = [256, 100, 101, 102]
TOKENIZER = make_tokenizer('bytes')


def make_hparams(tiny_config, **knobs):
    changes = {
        'model.routing.router': 'learned',
        'model.routing.capacity': 0.25,
        'data.sequence_length': LENGTH,
    }
    return from_config(tiny_config(**{**changes, **knobs}))


def make_variables(hparams):
    """Random, and so large that each token affects the next ones and routing is mixed."""
    return random_variables(hparams, np.zeros((1, LENGTH), np.int32))


@pytest.fixture(scope='module')
def hparams(tiny_config):
    return make_hparams(tiny_config)


@pytest.fixture(scope='module')
def variables(hparams):
    return make_variables(hparams)


@functools.cache
def _forward(hparams, routing):
    apply = functools.partial(Transformer(hparams).apply, routing=routing)
    return jax.jit(apply)


def forward(variables, hparams, tokens, routing, tokenizer=None):
    """(logits of the last token, share of routed tokens) of a pass over these tokens."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tokens)] = tokens
    begins = row == tokenizer.separator if tokenizer else np.zeros_like(row)
    segments = np.where(np.arange(LENGTH)[None] < len(tokens), 1 + np.cumsum(begins, axis=1), 0)
    logits_BTV, records = _forward(hparams, routing)(variables, row, segments)
    selected = np.asarray(records.routing.selected_BT)[..., : len(tokens)].mean()
    return np.asarray(logits_BTV[0, len(tokens) - 1]), selected


@pytest.mark.parametrize(
    ('routing', 'knobs'),
    [
        (None, {}),
        pytest.param('dense', {}, marks=pytest.mark.slow),
        pytest.param('threshold', {'model.routing.overflow': 'grow'}, marks=pytest.mark.slow),
        pytest.param(
            'threshold',
            {'model.routing.router': 'random', 'model.num_layers': 3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_greedy_texts_are_the_argmax_of_full_forwards(tiny_config, routing, knobs):
    """At temperature 0 a token is the argmax of one pass over the tokens before it and no more."""
    hparams = make_hparams(tiny_config, **knobs)
    variables = make_variables(hparams)
    prompts = [PROMPT, [256], [256, 7, 8, 256, 9, 10, 11, 12, 13]]  # none ends in the second chunk
    how = {'temperature': 0.0, 'routing': routing, 'tokenizer': TOKENIZER, 'stop': False}
    result = generate(variables, hparams, prompts, 14, **how)
    in_chunks = generate(variables, hparams, prompts, 14, prefill_chunk=4, **how)
    assert list(map(list, in_chunks.tokens)) == list(map(list, result.tokens))
    assert in_chunks.dropped_B.tolist() == result.dropped_B.tolist()
    assert in_chunks.grown_to == result.grown_to
    for prompt, text in zip(prompts, result.tokens, strict=True):
        assert text.dtype == np.int32 and text.shape == (len(prompt) + 14,)
        assert text[: len(prompt)].tolist() == prompt
        for position in range(len(prompt), len(text)):
            logits_V, selected = forward(
                variables, hparams, text[:position], routing or 'predictor', TOKENIZER
            )
            assert text[position] == logits_V.argmax(), position
    assert len(set(result.tokens[0][4:].tolist())) > 3
    assert selected == 1 if routing == 'dense' else 0.02 < selected < 0.98
    assert result.stopped == [False] * 3


def test_across_documents_a_separator_is_a_token_like_others(tiny_config):
    """In a prompt and in the generated text. Apart from that, documents would change the text."""

    class Other(type(TOKENIZER)):
        def __init__(self, separator):
            self.separator, self.stops = separator, (256, separator)  # both can be drawn
            super().__init__()
            self.token_bytes_V = np.ones(self.vocab_size, np.int32)

    prompt, how = [256, 100, 101, 102, 256, 103], {'temperature': 0.0, 'stop': False}

    def text(across, tokenizer):
        hparams = make_hparams(tiny_config, **{'model.across_documents': across})
        how['tokenizer'] = tokenizer
        return generate(make_variables(hparams), hparams, [prompt], 14, **how).tokens[0].tolist()

    one = text(True, TOKENIZER)
    other = Other(one[len(prompt) + 2])
    assert text(True, other) == one != text(False, other)


@pytest.mark.parametrize('router', ['none', 'learned'])
def test_a_chunk_in_which_no_prompt_ends_leaves_out_the_mlp_of_the_last_block(tiny_config, router):
    """It needs the keys and values of that block alone."""
    knobs = {'model.num_layers': 3, 'model.d_ff': 40, 'model.routing.router': router}
    hparams = make_hparams(tiny_config, **knobs | {'model.routing.layers': '2'})
    variables = jax.eval_shape(lambda: make_variables(hparams))
    how = {'hparams': hparams, 'routing': causal_routing(hparams)}
    unrolled = jax.eval_shape(lambda of: unroll(of, **how), variables)
    sizes = {'capacity': LENGTH, 'routed_capacity': LENGTH}
    cache = jax.eval_shape(lambda of: empty_cache(of, 2, **how, **sizes), unrolled)
    x_B1D, row_BT = np.zeros((2, 1, hparams.model.d_model), np.float32), np.zeros((2, 8), np.int32)
    inputs = unrolled, cache, x_B1D, row_BT, row_BT > 0, row_BT == 0
    products = []
    for ends in (True, False):
        text = generate_module._chunk.lower(*inputs, ends=ends, **how).as_text()
        products.append(len(re.findall(r'dot_general.*-> tensor<[\dx]*x40xf32>', text)))
    assert products[1] == 2 * 2 < products[0]  # two of each of two blocks


def test_chunks_know_whether_a_prompt_ends_in_them(hparams, monkeypatch):
    """Prompts of 4, 1 and 9 tokens, by 4 at a time; no chunk is longer than the padded prompts."""

    def chunk(*inputs, ends, **how):
        seen.append((inputs[3].shape[1], ends))
        return None, ()

    monkeypatch.setattr(generate_module, '_chunk', chunk)
    monkeypatch.setattr(generate_module, '_write', lambda cache: cache)
    batch = generate_module._pad([[1] * 4, [1], [1] * 9], -1, LENGTH)
    for size, expected in ((4, [(4, True), (4, False), (4, True)]), (512, [(16, True)])):
        seen = []
        generate_module._in_chunks(None, None, batch, size, hparams=hparams, routing='predictor')
        assert seen == expected


# The static arguments of most tests below, so that they share one compiled program.
DRAWN = {'num_samples': 2, 'top_p': 0.9, 'tokenizer': TOKENIZER}
PROMPTS = [PROMPT, [256, 1, 2], [256, 50, 60, 70, 80]]


def test_the_seed_decides_and_samples_differ(variables, hparams):
    """Equal seeds give equal texts, another seed another; samples of one call are not copies.

    The longest text just fills the context.
    """
    first, again, other = (
        generate(variables, hparams, PROMPTS, LENGTH - 5, seed=seed, stop=False, **DRAWN).tokens
        for seed in (0, 0, 1)
    )
    for row, (text, same, another) in enumerate(zip(first, again, other, strict=True)):
        prompt = PROMPTS[row // 2]
        assert np.array_equal(text, same) and not np.array_equal(text, another)
        assert text[: len(prompt)].tolist() == prompt and len(text) == len(prompt) + LENGTH - 5
        assert (text < 257).all() and (text >= 0).all()
    assert len({text.tobytes() for text in first}) == 6


def test_other_rows_of_a_batch_do_not_change_a_draw(variables, hparams):
    """Nor does the number of their new tokens, which each prompt may have of its own."""
    expected = generate(variables, hparams, [PROMPT, [256, 9, 8, 7], [256]], 12, seed=5, **DRAWN)
    prompts, lengths = [PROMPTS[2], PROMPT, PROMPT], [LENGTH - 5, 12, 3]
    among = generate(variables, hparams, prompts, lengths, seed=5, **DRAWN).tokens
    for text, same, begin in zip(expected.tokens[:2], among[2:4], among[4:], strict=True):
        np.testing.assert_array_equal(text, same)
        np.testing.assert_array_equal(text[: len(PROMPT) + 3], begin)


def test_a_text_goes_on_from_its_cache_as_from_the_whole_prompt(variables, hparams):
    """prompt_cache_test has more models, and turns that follow each other."""
    kept, how = PromptCache(), DRAWN | {'num_samples': 1}
    texts = generate(
        variables, hparams, PROMPTS * 2, 6, prompt_cache=kept, stop=False, **how
    ).tokens
    prompts = [
        [*text, *line] for text, line in zip(texts, 2 * [[9], [8, 256], [5, 6, 7]], strict=True)
    ]
    found, whole = (
        generate(variables, hparams, prompts, 8, seed=[*range(6)], prompt_cache=of, **how)
        for of in (kept, None)
    )
    assert list(map(list, found.tokens)) == list(map(list, whole.tokens))
    assert (found.reused, whole.reused) == (sum(len(text) - 1 for text in texts), 0)
    assert f'{found.reused} tokens of the prompt were in the cache' in found.notes
    with pytest.raises(ValueError, match='num_samples=2: must be 1 with a prompt_cache'):
        generate(variables, hparams, [PROMPT], 4, num_samples=2, prompt_cache=kept)


def test_each_program_is_traced_once_a_shape(variables, hparams):

    def sizes():
        return [f._cache_size() for f in (generate_module._start, generate_module._step)]

    generate(variables, hparams, PROMPTS, 2, **DRAWN)
    before = sizes()
    for seed, prompts in ((1, PROMPTS[::-1]), (2, [[256], [256, 5], PROMPT])):
        generate(variables, hparams, prompts, 6, seed=seed, **DRAWN)
    assert sizes() == before


def test_a_row_stops_with_its_document_and_others_continue(variables, hparams):
    """The separator ends a row, is not part of its text, and on_tokens sees which rows run."""
    rigged = jax.tree.map(np.asarray, variables)
    rigged['params']['head'] = {'kernel': rigged['params']['head']['kernel'].copy()}
    rigged['params']['head']['kernel'][:, TOKENIZER.separator] *= 2.5
    seen = []

    def watch(tokens_B, active_B):
        seen.append((tokens_B.copy(), active_B.copy()))

    prompts = [PROMPT] * 3
    seeds = {'seed': [1, 2, 3]}
    result = generate(rigged, hparams, prompts, 20, on_tokens=watch, **seeds, **DRAWN)
    assert 0 < sum(result.stopped) < 6
    for row, (text, stopped) in enumerate(zip(result.tokens, result.stopped, strict=True)):
        steps = [tokens_B[row] for tokens_B, active_B in seen if active_B[row]]
        assert text[4:].tolist() == steps and TOKENIZER.separator not in text[4:]
        assert (len(text) < 24) == stopped
    longer = generate(rigged, hparams, prompts, 20, stop=False, **seeds, **DRAWN)
    assert longer.stopped == [False] * 6 and all(len(text) == 24 for text in longer.tokens)
    assert any(TOKENIZER.separator in text[4:] for text in longer.tokens)


@pytest.mark.slow
def test_tokens_without_room_in_a_cache_are_counted(tiny_config):
    """With `skip` a full cache drops tokens and reports it; with `grow` it has room for all."""
    for overflow, dropped in (('skip', (21 - 6) + (18 - 6)), ('grow', 0)):
        knobs = {'causal_rule': 'threshold', 'overflow': overflow, 'cache_capacity': 1.0}
        changes = {f'model.routing.{name}': value for name, value in knobs.items()}
        hparams = make_hparams(tiny_config, **changes)
        assert hparams.model.routing.cache_size(LENGTH, 'threshold') == 6
        variables = make_variables(hparams)
        variables['averages'] = {'thresholds_R': np.full(1, -1e9, np.float32)}
        # 4 + 17 tokens of the first row and 1 + 17 of the other are read; the last is not.
        result = generate(variables, hparams, [PROMPT, [256]], 18)
        assert (result.dropped_B.sum(), result.grown_to) == (dropped, 0 if dropped else LENGTH)
        assert len(result.notes) == 1 and str(dropped or LENGTH) in result.notes[0]
        for samples in (1, 3):  # tokens of a prompt count once
            result = generate(variables, hparams, [PROMPT * 3], 1, num_samples=samples)
            assert result.dropped_B.tolist() == [6 if dropped else 0] + [0] * (samples - 1)
            # Regression: batches of prompts had a note each.
            parts = [result, result, result.first_rows(1)]
            assert len(describe(parts)) == bool(dropped)
            assert not dropped or describe(parts)[0].startswith('18 times a routed block')


@pytest.mark.parametrize(
    'knobs',
    [
        pytest.param({'model.routing.router': 'none'}, id='dense'),
        pytest.param(TOKEN_CHOICE, id='token choice', marks=pytest.mark.slow),
    ],
)
def test_top_c_is_the_causal_rule_of_a_model_that_does_not_look_ahead(knobs, tiny_config):
    """Generation and scoring, also of options that share their prompt."""
    knobs = knobs | {'model.num_layers': 3}
    hparams = from_config(tiny_config(**{'data.sequence_length': LENGTH} | knobs))
    variables = make_variables(hparams)
    pairs = [([1], [2, 3]), ([1], [4, 5])]
    texts, scores = [], []
    for routing in ('top_c', causal_routing(hparams)):
        made = generate(variables, hparams, [PROMPT], 4, routing=routing, temperature=0.0)
        texts.append(made.tokens[0].tolist())
        scores.append(score(variables, hparams, pairs, routing=routing))
    assert texts[0] == texts[1]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'prompts': [PROMPT, []]}, ['no token']),
        ({'prompts': [[1] * 25]}, ['25 tokens and 4', 'data.sequence_length=24: shorten the pr']),
        ({'prompts': [[1] * 4], 'num_tokens': 21}, ['prompt by 1 or generate at most 20']),
        ({'prompts': [[1] * 4], 'num_tokens': 24}, ['=24: generate at most 20']),
        ({'prompts': [[1] * 24], 'num_tokens': 24}, ['=24: shorten both']),
        ({'num_tokens': 0}, ['num_tokens=0']),
        ({'prompts': [[1, 257]]}, ['257']),
        ({'prompts': [[1, 2.5]]}, ['prompt=[1, 2.5]', 'integers']),
        ({'prompts': []}, ['prompts=[]']),
        ({'num_samples': 0}, ['num_samples=0']),
        ({'seed': 2**32}, ['seed=4294967296']),
        ({'seed': [1, 2]}, ['seed=[1, 2]: holds 2']),
        ({'num_tokens': [4, 4]}, ['num_tokens=[4, 4]: holds 2']),
        ({'prompts': [[1], [1] * 4], 'num_tokens': [23, 21]}, ['prompt 2 of 4 tokens and 21 to']),
        ({'temperature': -1.0}, ['temperature=-1.0']),
        ({'top_p': 0.0}, ['top_p=0.0']),
        ({'routing': 'top_c'}, ["routing='top_c'", 'later tokens']),
        ({'routing': 'aux_loss'}, ["routing='aux_loss'", 'trained for predictor']),
        ({'draft_tokens': -1}, ['draft_tokens=-1: must be 0']),
        ({'draft_tokens': 1.5}, ['draft_tokens=[1.5]', 'integers']),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(hparams, changes, words):
    with pytest.raises(ValueError) as caught:
        generate(None, hparams, **{'prompts': [PROMPT], 'num_tokens': 4} | changes)
    message = str(caught.value)
    assert all(word in message for word in words) and '\n' not in message


class Gapped:
    """Ids of text are 10, 20, ..., 150; the separator is 3, and 5 also ends a text."""

    separator, stops = 3, (3, 5)
    token_bytes_V = np.bincount(np.arange(10, 160, 10), minlength=200)


def test_neither_gaps_nor_special_ids_are_drawn_and_every_stop_ends_a_text(tiny_config):
    """With equal logits, ids of text are drawn, and the two stops, which are not in the text."""
    changes = {'model.num_layers': 1, 'model.vocab_size': 256, 'model.routing.router': 'none'}
    hparams = make_hparams(tiny_config, **changes)
    variables = make_variables(hparams)
    arguments = {'temperature': 1e4, 'num_samples': 60, 'tokenizer': Gapped()}
    texts = generate(variables, hparams, [[3, 10]], 10, **arguments, stop=False).tokens
    drawn = {int(token) for text in texts for token in text[2:]}
    assert drawn == {3, 5, *range(10, 160, 10)}
    result = generate(variables, hparams, [[3, 10]], 10, **arguments)
    for text, free, stopped in zip(result.tokens, texts, result.stopped, strict=True):
        ends = np.flatnonzero(np.isin(free[2:], [3, 5]))
        assert stopped == bool(len(ends))
        assert text.tolist() == free[: 2 + ends[0] if stopped else None].tolist()
    assert 0 < sum(result.stopped) < 60


def test_a_document_does_not_see_the_one_before_it(variables, hparams):
    """With a tokenizer, text after a separator does not depend on text before it."""
    befores = ([256, 1, 2, 3], [256, 9, 8, 7], [256, 50, 60, 70])
    prompts = [[*before, 256, 100] for before in befores]
    last = {}
    for tokenizer in (TOKENIZER, None):
        how = {'temperature': 0.0, 'tokenizer': tokenizer}
        texts = generate(variables, hparams, prompts, 1, **how).tokens
        last[tokenizer] = [text[-1] for text in texts]
    assert len(set(last[TOKENIZER])) == 1 < len(set(last[None]))


class Few:
    """Two ids of text and a separator, which begins many documents."""

    separator, stops = 3, (3,)
    token_bytes_V = np.array([0, 1, 1, 0])


# A cache of three places per row, which has no room for some selected tokens.
FULL = {'model.routing.capacity': 0.125, 'model.routing.cache_capacity': 1.0}
LOOPS = {'model.routing.layers': 'loops', 'model.looped_layers': 'all', 'model.loops': 2}
LOOPS |= {'model.routing.gate': 'raw'}  # with the sigmoid, all guesses are right here


@pytest.mark.parametrize(
    ('knobs', 'chunk'),
    [
        (FULL, 0),
        pytest.param({'model.routing.overflow': 'grow'}, 2, marks=pytest.mark.slow),
        pytest.param(FULL | {'model.depth.stream': 'moda'}, 2, marks=pytest.mark.slow),
        pytest.param(LOOPS, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_guesses_change_no_text_and_are_those_of_the_model_that_skips(tiny_config, knobs, chunk):
    """Texts are equal, also with stops; as many guesses are held as in full forward passes."""
    hparams = make_hparams(tiny_config, **knobs)
    init = functools.partial(Transformer(hparams).init, jax.random.key(3))
    variables = jax.jit(lambda: init(np.zeros((1, LENGTH), np.int32)))()
    # With these weights, many guesses are wrong.
    variables = jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 1 else leaf, variables)
    prompts = [[3, 1, 2], [3], [3, 2, 3, 1, 2, 2]]
    shared = {'tokenizer': Few(), 'temperature': 2.0, 'num_samples': 2}
    for how in ({'stop': False}, {'seed': 1}):
        plain = generate(variables, hparams, prompts, [18, 5, 18], **shared, **how)
        fast = generate(variables, hparams, prompts, [18, 5, 18], draft_tokens=3, **shared, **how)
        assert list(map(list, fast.tokens)) == list(map(list, plain.tokens))
        assert fast.stopped == plain.stopped
        assert fast.dropped_B.tolist() == plain.dropped_B.tolist()
        assert plain.guessed_B.sum() == 0 < fast.held_B.sum() < fast.guessed_B.sum()

    assert plain.dropped_B.sum() or 'loops' in str(knobs) or 'grow' in str(knobs)

    how = {'draft_tokens': 3, 'prefill_chunk': chunk, 'stop': False}
    result = generate(variables, hparams, prompts, 18, **shared, **how)
    guessed, held = 0, 0
    for number, text in enumerate(result.tokens):
        end = len(prompts[number // 2]) + 1
        while end < len(text):
            row = [*text[:end]]
            for _ in range(min(3, len(text) - end - 1)):
                row.append(guess(variables, hparams, row, number % 2))
            guessed += len(row) - end
            right = int(np.cumprod(np.equal(row, text[: len(row)])).sum()) - end
            held, end = held + right, end + right + 1
    assert (result.guessed_B.sum(), result.held_B.sum()) == (guessed, held)


def guess(variables, hparams, row, sample_number):
    """Return the token that the model draws after a row without its routed blocks, seed 0."""
    logits_V, selected = forward(variables, hparams, row, 'bypass', Few())
    assert not selected or hparams.model.routing.routes_loops
    key = generate_module._row_keys(np.zeros(1, np.uint32), 2)[sample_number]
    key = jax.random.fold_in(key, len(row))
    few_V = np.where(np.isin(np.arange(len(logits_V)), [1, 2, 3]), logits_V, -np.inf)
    return int(sample(key[None], few_V[None], 2.0)[0])


def test_a_model_without_routed_blocks_has_no_guesses(tiny_config):
    dense = make_hparams(tiny_config, **{'model.routing.router': 'none'})
    with pytest.raises(ValueError, match='draft_tokens=2: must be 0: guesses skip routed blocks'):
        generate(None, dense, [PROMPT], 4, draft_tokens=2)
