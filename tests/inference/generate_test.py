"""Generated text is what the causal-routed model says of its own growing prefix."""

import functools

import jax
import numpy as np
import pytest

from moddepth_jax.data.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.inference.generate import check_prompt, generate
from moddepth_jax.model.transformer import Transformer

FAST = {'xla_backend_optimization_level': 0}  # these tests compile longer than they compute
LENGTH = 24
PROMPT = [256, 100, 101, 102]


@pytest.fixture(scope='module')
def hparams(tiny_config):
    changes = {
        'model.routing.router': 'learned',
        'model.routing.capacity': 0.25,
        'data.sequence_length': LENGTH,
    }
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module')
def params(hparams):
    """Random, and so large that each token tells on the next ones and routing is mixed."""
    init = functools.partial(Transformer(hparams).init, jax.random.key(3))
    params = jax.jit(lambda: init(np.zeros((1, LENGTH), np.int32))['params'], compiler_options=FAST)
    return jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 1 else leaf, params())


def forward(params, hparams, tokens, routing):
    """(logits of the last token, share of tokens that entered) of a pass over just `tokens`."""
    apply = functools.partial(Transformer(hparams).apply, routing=routing)
    jitted = jax.jit(apply, compiler_options=FAST)
    logits_BTV, records = jitted({'params': params}, np.array([tokens], np.int32))
    return np.asarray(logits_BTV[0, -1]), np.mean(records.entered_BT)


@pytest.mark.parametrize('routing', [None, 'dense'])
def test_greedy_text_is_the_argmax_of_a_full_forward(params, hparams, routing):
    """At temperature 0 a token is the argmax of one pass over the tokens before it and no more.

    `None` runs the rule that the model was trained for, which lets in a part of the tokens.
    """
    text = generate(params, hparams, PROMPT, 12, temperature=0.0, routing=routing)
    assert text.shape == (1, 16) and text.dtype == np.int32
    assert text[0, : len(PROMPT)].tolist() == PROMPT
    assert len(set(text[0, 4:].tolist())) > 3
    for position in (4, 5, 10, 15):
        prefix = text[0, :position]
        logits_V, entered = forward(params, hparams, prefix, routing or 'predictor')
        assert text[0, position] == logits_V.argmax(), position
    assert entered == 1 if routing == 'dense' else 0.05 < entered < 0.95


def test_routing_makes_a_difference(params, hparams):
    """The trained rule and `dense` write different texts: the test above tells them apart."""
    texts = [
        generate(params, hparams, PROMPT, 12, temperature=0.0, routing=routing)
        for routing in ('predictor', 'dense')
    ]
    assert not np.array_equal(*texts)


def test_the_seed_decides_and_samples_differ(params, hparams):
    """Equal seeds give equal texts, another seed another; samples of one call are not copies."""
    first, again, other = (
        generate(params, hparams, PROMPT, 12, temperature=1.0, seed=seed, num_samples=3)
        for seed in (0, 0, 1)
    )
    assert first.shape == (3, 16)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len({row.tobytes() for row in first}) == 3
    assert (first[:, :4] == PROMPT).all() and (first < 257).all() and (first >= 0).all()


def test_the_first_token_is_drawn_from_the_models_distribution(params, hparams):
    """Over 2000 samples the share of the likeliest next token is the softmax of its logit."""
    temperature = 0.5
    drawn_B = generate(params, hparams, PROMPT, 1, temperature=temperature, num_samples=2000)[:, -1]
    logits_V, _ = forward(params, hparams, PROMPT, 'predictor')
    odds_V = np.exp((logits_V - logits_V.max()).astype(np.float64) / temperature)
    chance_V = odds_V / odds_V.sum()
    top = chance_V.argmax()
    assert 0.02 < chance_V[top] < 0.9
    error = np.sqrt(chance_V[top] * (1 - chance_V[top]) / 2000)
    assert abs((drawn_B == top).mean() - chance_V[top]) < 5 * error


def test_prompt_and_text_may_just_fill_the_context(params, hparams):
    """A text as long as the context is written whole, and begins like any shorter one."""
    text = generate(params, hparams, PROMPT, LENGTH - 4, temperature=0.0)
    assert text.shape == (1, LENGTH)
    shorter = generate(params, hparams, PROMPT, 5, temperature=0.0)
    assert np.array_equal(text[:, :9], shorter)


@pytest.mark.parametrize(
    ('prompt', 'num_tokens', 'words'),
    [
        ([], 4, ['no token']),
        ([1] * 25, 1, ['25 tokens', 'data.sequence_length=24', 'by 2']),
        ([1] * 4, 21, ['4 tokens', '21 to generate', 'data.sequence_length=24', 'by 1']),
        ([1] * 4, 0, ['num_tokens=0']),
        ([1, 257], 4, ['257']),
        ([1, -1], 4, ['-1']),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(hparams, prompt, num_tokens, words):
    """Empty, too long or of unknown ids, it is one line with the value, before anything runs."""
    for refuse in (
        lambda: check_prompt(hparams, prompt, num_tokens),
        lambda: generate(None, hparams, prompt, num_tokens),
    ):
        with pytest.raises(ValueError) as caught:
            refuse()
        message = str(caught.value)
        assert all(word in message for word in words) and '\n' not in message


def test_only_ids_of_the_tokenizer_are_written(tiny_config):
    """A vocabulary padded beyond the tokenizer's has logits for ids that stand for nothing."""
    changes = {'model.num_layers': 1, 'model.vocab_size': 2048, 'data.sequence_length': LENGTH}
    hparams = from_config(tiny_config(**changes))
    init = functools.partial(Transformer(hparams).init, jax.random.key(0))
    params = jax.jit(lambda: init(np.zeros((1, LENGTH), np.int32))['params'], compiler_options=FAST)
    arguments = {'temperature': 5.0, 'num_samples': 20}
    free = generate(params(), hparams, PROMPT, 10, **arguments)
    known = generate(params(), hparams, PROMPT, 10, **arguments, tokenizer=make_tokenizer('bytes'))
    assert free.max() > 256 and known.max() <= 256
    assert len(set(known[:, 4:].ravel().tolist())) > 50


def test_a_document_does_not_see_the_one_before_it(params, hparams):
    """Told what the separator is, text after one is that of the separator alone, as in training."""
    tokenizer = make_tokenizer('bytes')
    arguments = {'temperature': 0.0, 'routing': 'dense'}
    texts = [
        generate(params, hparams, [*prompt, 256, 100], 1, **arguments, tokenizer=tokenizer)[0, -1]
        for prompt in ([256, 1, 2, 3], [256, 9, 8, 7], [256, 50, 60, 70])
    ]
    blind = [
        generate(params, hparams, [*prompt, 256, 100], 1, **arguments)[0, -1]
        for prompt in ([256, 1, 2, 3], [256, 9, 8, 7], [256, 50, 60, 70])
    ]
    assert len(set(texts)) == 1 < len(set(blind))


@pytest.mark.parametrize(
    ('routing', 'words'),
    [('top_c', 'later tokens'), ('aux_loss', 'trained for predictor'), ('topc', 'must be one of')],
)
def test_a_routing_that_cannot_write_is_refused(hparams, routing, words):
    """Looking ahead, untrained or unknown: refused by name, in one line, before anything runs."""
    with pytest.raises(ValueError) as caught:
        generate(None, hparams, PROMPT, 4, routing=routing)
    message = str(caught.value)
    assert f'routing={routing!r}' in message and words in message and '\n' not in message
