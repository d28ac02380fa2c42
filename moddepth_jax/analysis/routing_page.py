"""An Inspection as JSON, and as one page that a browser opens without a network."""

import importlib.resources
import json
import unicodedata

import numpy as np

from moddepth_jax.analysis.depth_mass import DepthMass
from moddepth_jax.analysis.inspection import Inspection, totals
from moddepth_jax.analysis.page_words import RULE_COLUMNS, sentences
from moddepth_jax.analysis.token_classes import CLASSES
from moddepth_jax.hparams import Hparams
from moddepth_jax.training.summary import replace_nonfinite

_DIGITS = 4  # that count, of every number in the JSON
_MARKS = {'\n': '↵\n', '\t': '→\t', '\x7f': '␡'}
_PART = '▫'  # a token in which no character begins
_UNSHOWN = '□'  # a byte that is not UTF-8, or a character that would act on the page or be unseen


def shown_tokens(pieces) -> list[str]:
    """What stands on the page for each token: the characters that begin in it.

    A line end is ↵ and the line end, a tab → and the tab, a separator §, other control characters
    are their pictures; □ stands for what cannot be shown and ▫ for a token that is the rest of a
    character.

    Args:
      pieces: the bytes of each token, b'' for a separator.
    """
    text = b''.join(pieces).decode('utf-8', 'surrogateescape')
    sizes = [len(character.encode('utf-8', 'surrogateescape')) for character in text]
    begins = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    ends = np.cumsum([len(piece) for piece in pieces])
    shown, first = [], 0
    for piece, end in zip(pieces, ends, strict=True):
        last = int(np.searchsorted(begins[:-1], end))
        mine = ''.join(map(_visible, text[first:last]))
        shown.append((mine or _PART) if piece else '§')
        first = last
    return shown


def _visible(character):
    if character in _MARKS:
        return _MARKS[character]
    if character < ' ':
        return chr(0x2400 + ord(character))
    category = unicodedata.category(character)
    if category.startswith('M'):
        return '◌' + character
    return _UNSHOWN if category[0] == 'C' or category in ('Zl', 'Zp') else character


def page_data(
    inspection: Inspection,
    hparams: Hparams,
    classes_N,
    routing: str,
    names: dict,
    depth: DepthMass | None = None,
) -> dict:
    """What routing.json holds: JSON scalars, lists and dicts; None for what is no number.

    Args:
      inspection: of `inspect_tokens`.
      hparams: of the model.
      classes_N: of `token_classes`.
      routing: that of the inspection.
      names: `run`, `step`, `num_steps`, `text` (what it is called), `language`, `cut`, the tokens
        at the end of the text that were left out, and `depth_tokens`, those of `depth`.
      depth: of `depth_mass` on the same text, where the model has slots.

    Returns:
      `about`: the names and settings, and the page's sentences; `classes`; `tokens`: lists over
      tokens; `layers`: a dict of lists over tokens for each block, with `score`, `gate`, `entered`,
      `top_c`, `refused`, `rule_logit` for routed ones; `totals`, as `totals` says; `depth`.
    """
    logits_of = hparams.model.routing.causal_rule if routing == 'top_c' else routing
    length = hparams.data.sequence_length
    about = {
        **names,
        'routing': routing,
        'logits_of': logits_of,
        'rule_column': RULE_COLUMNS.get(logits_of) if inspection.routed_layers else None,
        'sequence_length': length,
        'windows': -(-len(inspection.tokens_N) // length),
        'looks_ahead': routing == 'top_c' and hparams.model.looks_ahead,
    }
    data = {
        'about': about | sentences(about, hparams),
        'classes': list(CLASSES),
        'tokens': {
            'shown': shown_tokens(inspection.pieces),
            'bytes': [piece.hex(' ') for piece in inspection.pieces],
            'id': inspection.tokens_N.tolist(),
            'class': np.asarray(classes_N).tolist(),
            'entropy': _rounded(inspection.entropy_N),
            'loss': _rounded(inspection.loss_N),
        },
        'layers': [
            _layer(inspection, layer, logits_of) for layer in range(hparams.model.num_layers)
        ],
        'totals': totals(inspection, classes_N),
        'depth': None,
    }
    if depth is not None:
        data['depth'] = {name: np.asarray(side).tolist() for name, side in depth._asdict().items()}
    return replace_nonfinite(data)


def _rounded(values_N):
    return [float(f'{value:.{_DIGITS}g}') for value in values_N.tolist()]


def _layer(inspection, layer, logits_of):
    routed = layer in inspection.routed_layers
    result = {
        'layer': layer,
        'routed': routed,
        'relative': _rounded(inspection.relative_LN[layer]),
    }
    if not routed:
        return result
    i = inspection.routed_layers.index(layer)
    if logits_of == 'threshold':
        apart_N = inspection.scores_RN[i] - inspection.rule_logits_RN[i]
        result['threshold'] = float(f'{np.median(apart_N):.{_DIGITS}g}')
    return result | {
        'score': _rounded(inspection.scores_RN[i]),
        'gate': _rounded(inspection.gates_RN[i]),
        'rule_logit': _rounded(inspection.rule_logits_RN[i]),
        'entered': inspection.entered_RN[i].astype(int).tolist(),
        'top_c': inspection.top_c_RN[i].astype(int).tolist(),
        'refused': inspection.refused_RN[i].astype(int).tolist(),
    }


def render(data: dict) -> str:
    """The page of `page_data`: HTML, style, script and data in one file."""
    here = importlib.resources.files('moddepth_jax.analysis')
    page = here.joinpath('routing_page.html').read_text(encoding='utf-8')
    script = here.joinpath('routing_page.js').read_text(encoding='utf-8')
    text = json.dumps(data, allow_nan=False, separators=(',', ':'))
    for character in '<>&':  # so that no text can end the element that holds it
        text = text.replace(character, f'\\u{ord(character):04x}')
    before, after = page.split('__DATA__')
    return before + text + after.replace('__SCRIPT__', script.rstrip())
