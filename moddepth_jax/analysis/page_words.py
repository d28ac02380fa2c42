"""What the page of an inspection says in words, for a reader who has not read the papers."""

import math

from moddepth_jax.hparams import Hparams

# Of the rules that compare a token with something, what the page calls that.
RULE_COLUMNS = {'predictor': 'predictor', 'aux_loss': 'sigmoid', 'threshold': 'threshold'}

_LEAD_ROUTED = """
A model with Mixture-of-Depths sends only some tokens through its routed blocks; the others go by
unchanged and cost next to nothing there. This page shows, for one text, which tokens entered, what
the blocks made of them, and how sure the model was afterwards.
"""
_LEAD_DENSE = """
This page shows, for one text, how much each block of the model changes each token, and how sure the
model is of what comes next.
"""
_DENSE = """
No block of this model is routed: every token passes through every block. So there is no choice to
show, only what the blocks compute and how sure the model is.
"""
_LOOKS_AHEAD = """
The rule top_c looks at the future: what happens to a token depends on the tokens after it in the
window. A model that writes text cannot do that, and the loss here is not an honest one. Leave
--routing out to see the causal rule.
"""
_LAYERS = """
Change: how large the block's delta is against its input, over the tokens that entered: the mean,
and the values below which a tenth, half and nine tenths of them lie. To enter and be changed little
is wasted compute.
"""
_LAYERS_ROUTED = """
The rank correlation says whether tokens with a higher score are changed more (+1: in the same
order, 0: unrelated, −1: in the opposite order), again among those that entered.
"""
_COUNTS = """
One text and one checkpoint: a correlation here is a look, not evidence. Neighbouring tokens are not
independent, so no error is given.
"""
_DEPTH = """
Each layer can also attend to slots that earlier layers wrote for the same token. A cell is the
share of the attention of a layer (row) on a slot (column, named by the layer that wrote it: a
attention, f mlp, b block, e embedding), mean over heads and tokens that the layer processes. Beside
it their sum, and the share on the first token of the window (of a routed layer the first that
entered), where attention goes when nothing calls for it. The rest is on other tokens.
"""
_WORDS = {
    'token': """the piece of text that the model reads at once; § is the start of the text, ↵ the
        end of a line, → a tab, □ what cannot be shown, ▫ the rest of a character""",
    'entropy': """how unsure the model is of the next token, after reading this one: 0 nats if it
        is certain, {most:.2f} if all {vocab_size} tokens are as likely""",
    'loss': """minus the logarithm of the probability that the model gave to the token that does
        come next, in nats""",
    'change': """the block's delta, block(x) - x, in length, over the length of the block's input x:
        |delta| / |x|, L2 norms; without the gate""",
}
_ROUTED_WORDS = {
    'enters': """whether the block processed the token. “no room”: the rule let it in, but before it
        in the window as many tokens had entered as the block's cache holds""",
    'score': "the router's number for the token",
    'top-C': """whether the token's score is among the C highest of its window: a choice that has to
        see the whole window""",
    'gate': """the factor on the block's delta before it is added to the token; “× gate” is the
        change times the size of that factor, what is really added""",
}
_RULES = {
    'predictor': """the probability, by a small network that sees this token alone, that the token
        is among the top C; above 0.5 the rule lets it in""",
    'aux_loss': 'the sigmoid of the score; above 0.5 the rule lets the token in',
    'threshold': 'the score above which the rule lets a token in, fixed for a layer',
    'dense': 'the rule that lets every token in',
}


def _line(text):
    return ' '.join(text.split())


def sentences(about: dict, hparams: Hparams) -> dict:
    """`heading`, `lead`, `facts`, `notes` (a list), `words` (pairs) and captions of the page.

    Args:
      about: the names and settings that `page_data` has put there.
      hparams: of the model.
    """
    routed = bool(hparams.model.routed_layers)
    captions = {
        'layers_text': _line(_LAYERS + (_LAYERS_ROUTED if routed else '')),
        'classes_text': 'Of each kind of token: how many there are, '
        f'{"which share of them enters each routed block, " if routed else ""}and how unsure and '
        'how wrong the model is after them.',
        'counts_text': _line(_COUNTS),
        'depth_text': _line(_DEPTH),
    }
    if about['depth_tokens']:
        captions['depth_text'] += f' Measured on the first {about["depth_tokens"]:,} tokens.'
    return {
        'heading': 'Which tokens enter which block' if routed else 'What each block does',
        'lead': _line(_LEAD_ROUTED if routed else _LEAD_DENSE),
        'facts': ' · '.join(_facts(about, hparams)),
        'notes': list(map(_line, _notes(about, routed))),
        'words': [[word, _line(text)] for word, text in _words(about, hparams)],
        **captions,
    }


def _facts(about, hparams):
    routing, layers = hparams.model.routing, hparams.model.routed_layers
    yield f'checkpoint: {about["run"]}, step {about["step"]:,} of {about["num_steps"]:,}'
    yield f'text: {about["text"]}, read as {about["language"]}'
    yield f'{hparams.model.num_layers} layers'
    if layers:
        yield f'routed: {", ".join(map(str, layers))}'
        share = f'{100 * routing.capacity:g}% of the tokens'
        yield f'{routing.router} router, gate {routing.gate}, trained at {share}'
        yield f'rule: {about["routing"]}'


def _notes(about, routed):
    if not routed:
        yield _DENSE
    if about['looks_ahead']:
        yield _LOOKS_AHEAD
    if about['windows'] > 1:
        yield (
            f'The text is longer than the context of {about["sequence_length"]} tokens. It is cut '
            'into windows, as evaluation does: at each mark the model starts afresh and sees '
            'nothing of what is before it.'
        )
    if about['cut']:
        yield f'The last {about["cut"]:,} tokens of the text are left out (--max_tokens).'


def _words(about, hparams):
    vocab_size = hparams.model.vocab_size
    for word, text in _WORDS.items():
        yield word, text.format(most=math.log(vocab_size), vocab_size=vocab_size)
    if hparams.model.routed_layers:
        yield from _ROUTED_WORDS.items()
        rule = about['logits_of']
        yield RULE_COLUMNS.get(rule, rule), _RULES[rule]
