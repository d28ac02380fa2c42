"""The harness's requests are answered with the right tokens, windows, stops and characters."""

import codecs
import functools
import math
import re

import numpy as np
import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.inference.generate import generate
from moddepth_jax.inference.scoring import score
from tests.inference.conftest import CONTEXT

SEPARATOR = 256


@pytest.fixture(scope='module')
def model(small_model):
    """(variables, hparams) of a dense model, which compiles fastest."""
    return small_model('dense')


@pytest.fixture(scope='module')
def make_lm(model):
    from moddepth_jax.inference.harness import HarnessLM

    return functools.partial(HarnessLM, *model, make_tokenizer('bytes'), batch_size=3)


def asked(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i, ('task', i, 1)) for i, given in enumerate(arguments)]


def answers(model, pairs):
    scores = score(*model, pairs, batch_size=3)
    return [(one.log_likelihood, one.greedy) for one in scores]


def tokens(text, begin=(SEPARATOR,)):
    return [*begin, *text.encode()]


def test_a_context_follows_the_separator(model, make_lm):
    """Spaces at its end move to the continuation; an empty context is only the separator."""
    pairs = {
        ('2+2=', '4'): ('2+2=', '4'),
        ('a ', 'é'): ('a', ' é'),
        ('', 'text'): ('', 'text'),
        ('  ', 'x'): ('', '  x'),
        ('<|endoftext|>', 'x'): ('<|endoftext|>', 'x'),
    }
    want = [(tokens(context), tokens(text, ())) for context, text in pairs.values()]
    assert make_lm().loglikelihood(asked('loglikelihood', *pairs)) == answers(model, want)


class Merging:
    """Bytes, but the letters `se` and `self` are one token each."""

    separator, merged = SEPARATOR, {b'self': 300, b'se': 301}

    def encode(self, text):
        pieces = re.findall(rb'self|se|(?s:.)', text)
        return np.array([self.merged.get(piece, piece[0]) for piece in pieces])


def test_a_token_across_the_end_of_a_context_belongs_to_the_continuation(model):
    """Regression: it was left out, or the command ended because the continuation was empty."""
    from moddepth_jax.inference.harness import HarnessLM

    pair = HarnessLM(*model, Merging())._encode_pair
    assert pair('a se', 'lf.x') == (tokens('a '), [300, *b'.x'])
    assert pair('a se', 'lf') == (tokens('a '), [300])
    assert pair('a s', 'elf') == (tokens('a '), [300])
    assert pair('a se', ' lf') == ([*tokens('a '), 301], [*b' lf'])
    assert pair('a', 'a') == (tokens('a'), [*b'a'])


def test_a_long_context_loses_its_left_and_is_counted(model, make_lm):
    """The rest is the middle of a document; two of three requests are cut."""
    lm = make_lm()
    pairs = [('0123456789' * 3, 'abc'), ('short', 'abc'), ('x' * CONTEXT, 'a')]
    found = lm.loglikelihood(asked('loglikelihood', *pairs))
    want = [(tokens('67890123456789', ()), tokens('abc', ())), (tokens('short'), tokens('abc', ()))]
    assert found[:2] == answers(model, want)
    assert lm.num_cut == 2


def test_a_rolling_text_is_predicted_once_in_windows(model, make_lm):
    """From the separator on, each window has as much context as fits."""
    text = 'Forty bytes are more than two contexts..'
    ids, lm = tokens(text, ()), make_lm()
    assert len(ids) == 40
    windows = [([SEPARATOR], ids[:16]), (ids[15:16], ids[16:32]), (ids[23:32], ids[32:])]
    want = sum(one for one, _ in answers(model, windows))
    short = answers(model, [([SEPARATOR], tokens('short', ()))])[0][0]
    found = lm.loglikelihood_rolling(asked('loglikelihood_rolling', (text,), ('',), ('short',)))
    assert found == pytest.approx([want, 0, short], rel=1e-6)
    assert found[1] == 0 and lm.num_cut == 0


class Script:
    """Replaces `generate`: writes the bytes of `texts` in turn until it is stopped."""

    def __init__(self, *texts):
        self.texts, self.steps, self.calls = [text.encode() for text in texts], 0, []

    def __call__(self, variables, hparams, prompts, num_tokens, *, on_tokens, **how):
        self.calls.append((prompts, num_tokens, how))
        rows = (self.texts + self.texts[:1] * len(prompts))[: len(prompts)]
        for step in range(num_tokens):
            self.steps += 1
            token_B = np.array([row[step] if step < len(row) else SEPARATOR for row in rows])
            on_tokens(token_B, np.array([step < len(row) for row in rows]))


def written(make_lm, monkeypatch, script, *contexts, **settings):
    from moddepth_jax.inference import harness

    monkeypatch.setattr(harness, 'generate', script)
    requests = asked('generate_until', *((context, settings) for context in contexts))
    return make_lm().generate_until(requests)


def test_a_text_ends_before_its_first_stop(make_lm, monkeypatch):
    """Before the first of several; the batch runs until each of its texts has stopped."""
    script = Script('an END, and more', 'two\nlines', 'x')
    found = written(
        make_lm, monkeypatch, script, 'a', 'b', 'c', until=['END', '\n'], max_gen_toks=12
    )
    assert found == ['an ', 'two', 'x']
    assert script.steps == len('an END')


def test_the_time_to_find_stops_is_linear(make_lm, monkeypatch):
    """Regression: each token decoded all tokens of its row again."""
    lm, decoded = make_lm(), []
    decode = lm._tokens.decode
    monkeypatch.setattr(lm._tokens, 'decode', lambda ids: decoded.append(len(ids)) or decode(ids))
    from moddepth_jax.inference import harness

    monkeypatch.setattr(harness, 'generate', Script('x' * 500))
    found = lm._write(['a'], 0, [b'\n'], 500)
    assert found == ['x' * 500] and sum(decoded) < 3 * 20 * 500


def test_a_character_is_complete_or_left_out(make_lm, monkeypatch):
    """A text that is cut in the middle of a character ends before it; a stop may be a character."""
    assert written(make_lm, monkeypatch, Script('né' * 5), 'a', max_gen_toks=5) == ['nén']
    found = written(make_lm, monkeypatch, Script('vu été'), 'a', until='é', max_gen_toks=9)
    assert found == ['vu ']


def test_settings_of_generation(make_lm, monkeypatch):
    """It is greedy unless the settings sample; long contexts are cut.

    Documents and samples of one document have draws of their own, whatever the batch is.
    """

    def calls(*contexts, **settings):
        script = Script('abc')
        written(make_lm, monkeypatch, script, *contexts, **settings)
        return script.calls

    prompts, num_tokens, how = calls('x' * 40, max_gen_toks=4, temperature=0.0)[0]
    assert (num_tokens, how['temperature']) == (4, 0.0)
    assert prompts == [[ord('x')] * (CONTEXT - 4)] * 3
    settings = {'do_sample': True, 'temperature': 0.5, 'top_p': 0.9, 'top_k': 7}
    found = calls('a', 'a', 'b', **settings)
    first, second = (how['seed'] for _, _, how in found)
    assert first[0] == first[2] and len({first[0], first[1], second[0]}) == 3
    assert calls('b', **settings)[0][2]['seed'][0] == first[1]
    for prompts, num_tokens, how in found:
        assert (how['temperature'], how['top_p'], how['top_k']) == (0.5, 0.9, 7)
        assert num_tokens == CONTEXT // 2
        assert len(prompts) == 3
    # Not the harness's 0, which draws nothing.
    assert calls('a', do_sample=True)[0][2]['temperature'] == 1.0
    ((_, _, plain),) = calls('a')
    # Regression: a null top_p was a traceback.
    assert calls('a', top_p=None, top_k=None, temperature=None)[0][2] == plain


def test_settings_are_checked_before_any_text_is_generated(make_lm, monkeypatch):
    """Regression: those of a later request were checked after the texts of earlier ones."""
    from moddepth_jax.inference import harness

    script = Script('abc')
    monkeypatch.setattr(harness, 'generate', script)
    requests = asked('generate_until', ('a', {'max_gen_toks': 4}), ('b', {'max_gen_toks': CONTEXT}))
    with pytest.raises(ValueError, match=f'max_gen_toks={CONTEXT}'):
        make_lm().generate_until(requests)
    assert not script.calls


@pytest.mark.slow
def test_greedy_texts_are_those_of_generate(model, make_lm):
    tokenizer = make_tokenizer('bytes')
    contexts = ['def ', 'a', 'class']
    requests = asked('generate_until', *((text, {'max_gen_toks': 6}) for text in contexts))
    prompts = [tokens(text) for text in contexts]
    rows = generate(*model, prompts, 6, temperature=0.0, tokenizer=tokenizer).tokens
    raw = [tokenizer.decode(row[len(prompt) :]) for row, prompt in zip(rows, prompts, strict=True)]
    want = [codecs.getincrementaldecoder('utf-8')('replace').decode(text) for text in raw]
    for batch_size in (1, 2):
        found = make_lm(batch_size=batch_size).generate_until(requests)
        assert found == want


@pytest.mark.parametrize(
    ('kind', 'request_', 'words'),
    [
        ('generate_until', ('a', {'min_p': 0.1}), "'min_p'.*max_gen_toks.*temperature"),
        ('generate_until', ('a', {'max_gen_toks': CONTEXT}), f'max_gen_toks={CONTEXT}.*data.sequ'),
        ('generate_until', ('a', {'do_sample': True, 'temperature': math.inf}), 'temperature=inf'),
        ('loglikelihood', ('', ''), 'request 0 has an empty continuation'),
        ('loglikelihood', ('', 'x' * 17), '17 tokens is longer than the context'),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(make_lm, kind, request_, words):
    with pytest.raises(ValueError, match=words) as caught:
        getattr(make_lm(), kind)(asked(kind, request_))
    assert '\n' not in str(caught.value)


def test_a_routing_that_looks_ahead_is_refused(small_model):
    from moddepth_jax.inference.harness import HarnessLM

    with pytest.raises(ValueError, match='looks at later tokens.*; must be predictor, threshold'):
        HarnessLM(*small_model('both'), make_tokenizer('bytes'), routing='top_c')
