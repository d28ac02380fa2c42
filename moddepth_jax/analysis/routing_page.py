"""Converts an Inspection to JSON and to a self-contained web page."""

import itertools
import json
import math
import pathlib
import unicodedata

import jax
import numpy as np

from moddepth_jax.analysis.depth_mass import DepthMass
from moddepth_jax.analysis.inspection import Inspection, totals
from moddepth_jax.analysis.token_classes import CLASSES
from moddepth_jax.hparams import Hparams
from moddepth_jax.training.metrics import replace_nonfinite

# Column heading, by causal rule, for the number that the rule uses.
RULE_COLUMNS = {
    'predictor': 'predictor',
    'aux_loss': 'sigmoid',
    'positive': 'sigmoid',
    'threshold': 'threshold',
}
_DIGITS = 4  # significant digits of the numbers of tokens
_MARKS = {'\n': '↵\n', '\t': '→\t', '\x7f': '␡'}
_REST = '▫'  # token in which no character begins
_UNSHOWN = '□'  # byte that is not UTF-8, or invisible or control character


def shown_tokens(pieces) -> list[str]:
    """Return the text that the page shows for each token (bytes): characters that begin in it."""
    text = b''.join(pieces).decode('utf-8', 'surrogateescape')
    begins = np.cumsum([0, *(len(c.encode('utf-8', 'surrogateescape')) for c in text)])[:-1]
    ends = np.cumsum([0, *map(len, pieces)])
    cuts = itertools.pairwise(np.searchsorted(begins, ends))
    shown = [''.join(map(_visible, text[first:last])) or _REST for first, last in cuts]
    return [each if piece else '§' for each, piece in zip(shown, pieces, strict=True)]


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
    """Return the content of routing.json: JSON values; None for numbers that are not finite.

    `names` has `run`, `step`, `num_steps`, `text` (its name), `language`, `cut` (number of tokens
    left out at the end) and `depth_tokens` (number of tokens on which `depth` was measured).
    """
    logits_of = hparams.model.routing.causal_rule if routing == 'top_c' else routing
    data = {
        'about': _about(inspection, hparams, routing, logits_of) | names,
        'classes': list(CLASSES),
        'tokens': {
            'shown': shown_tokens(inspection.pieces),
            'bytes': [piece.hex(' ') for piece in inspection.pieces],
            'id': inspection.tokens_N.tolist(),
            'class': np.asarray(classes_N).tolist(),
            'entropy': _rounded(inspection.entropy_N),
            'loss': _rounded(inspection.loss_N),
            'passed': inspection.routing.selected_BT.sum(axis=0).tolist(),  # routed blocks or loops
        },
        'layers': [
            _layer(inspection, layer, logits_of) | {'name': name}
            for layer, name in enumerate(hparams.model.block_names)
        ],
        'totals': totals(inspection, classes_N),
        'depth': depth and {k: np.asarray(side).tolist() for k, side in depth._asdict().items()},
    }
    return replace_nonfinite(data)


def _about(inspection, hparams, routing, logits_of):
    model, length = hparams.model, hparams.data.sequence_length
    least = f'{100 * model.routing.num_selected(length) / length:.3g}%'
    routed, windows = bool(model.routed_layers), -(-len(inspection.tokens_N) // length)
    return {
        'routing': routing,
        'logits_of': logits_of if routed else None,
        'rule_column': RULE_COLUMNS.get(logits_of) if routed else None,
        'sequence_length': length,
        'windows': windows,
        'several_windows': windows > 1,
        'looks_ahead': routing == 'top_c' and model.looks_ahead,
        'routed': routed,
        'loops': model.loops if model.routing.routes_loops else 0,
        'blocks': routed and not model.routing.routes_loops,
        'dense': not routed,
        # As text, because the page rounds numbers; '' if no token ever leaves a loop.
        'exit_threshold': f'{model.loop_exit_threshold:g}' if model.loop_exit_threshold else '',
        'num_layers': model.num_blocks,
        'routed_layers': ', '.join(
            str(layer) for layer, router in enumerate(model.router_of_block) if router is not None
        ),
        'router': model.routing.router,
        'gate': model.routing.gate,
        'capacity': '100% to ' * (model.routing.routes_loops and least != '100%') + least,
        'vocab_size': model.vocab_size,
        'max_entropy': round(math.log(model.vocab_size), 2),
    }


def _rounded(values_N):
    return [float(f'{value:.{_DIGITS}g}') for value in values_N.tolist()]


def _layer(inspection, layer, logits_of):
    router = inspection.routers[layer]
    routed = router is not None
    relative = _rounded(inspection.change_LN[layer])
    result = {'layer': layer, 'routed': routed, 'relative': relative}
    if not routed:
        return result
    record = jax.tree.map(lambda side_RN: side_RN[router], inspection.routing)
    if logits_of == 'threshold':
        threshold = np.median(record.scores_BT - record.rule_logits_BT)
        result['threshold'] = float(f'{threshold:.{_DIGITS}g}')
    return result | {
        'router': router,
        'score': _rounded(record.scores_BT),
        'gate': _rounded(record.gates_BT),
        'rule_logit': _rounded(record.rule_logits_BT),
        'entered': record.selected_BT.astype(int).tolist(),
        'top_c': record.top_c_BT.astype(int).tolist(),
        'refused': record.dropped_BT.astype(int).tolist(),
    }


def render(data: dict) -> str:
    """Return the page for `page_data`: HTML, style, script and data in one file."""
    here = pathlib.Path(__file__)
    page = here.with_suffix('.html').read_text(encoding='utf-8')
    script = here.with_suffix('.js').read_text(encoding='utf-8')
    text = json.dumps(data, allow_nan=False, separators=(',', ':'))
    for character in '<>&':  # so that no text can close the script element
        text = text.replace(character, f'\\u{ord(character):04x}')
    before, after = page.split('__DATA__')
    return before + text + after.replace('__SCRIPT__', script.rstrip())
