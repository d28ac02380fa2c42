"""Makes configs that are broken in one known way each; broken_configs_test.py runs them."""

import dataclasses
import importlib
import json
import math
import random
import textwrap
from typing import NamedTuple

from moddepth_jax.hparams import from_config

ARGUMENTS = {  # of the files of configs/ that take some
    'mod_isoflop': 'size=8x64',
    'dense_isoflop': 'size=8x64',
    'moe': 'size=8x64',
    'mode_staged': 'size=8x64',
    'mode_integrated': 'size=8x64',
    'norm_routed': 'size=8x64',
    'study': 'size=8x64',
    'openmythos_moda': 'size=tiny',
}
SMALL = """
config.model.num_layers = 8
config.model.d_model, config.model.d_ff, config.model.experts.d_ff = 64, 96, 32
config.model.num_heads, config.model.num_kv_heads, config.model.head_dim = 4, 2, 16
config.data.source = {folder!r} + '/text/good.txt'
config.data.sequence_length, config.data.batch_size = 64, 8
config.training.accumulate_steps = 1
config.report.prompt, config.report.sample_tokens = 'def ', 8
config.training.compilation_cache = False
if not config.flop_budget and not config.training.num_steps:
    config.training.num_steps = 10
"""
CHOICES = {
    'model.norm_placement': ('post', 'reordered'),
    'model.qk_norm': ('none', 'head', 'full'),
    'model.dtype': ('float32', 'bfloat16'),
    'model.attention': ('auto', 'reference', 'pallas', 'mosaic_gpu'),
    'model.layer_loop': ('scan', 'unrolled'),
    'model.remat': ('block', 'none'),
    'model.depth.stream': ('residual', 'dense', 'average', 'attention', 'moda'),
    'model.depth.slots': ('attention', 'attention+ffn', 'block'),
    'model.depth.slot_keys': ('rotated', 'unrotated'),
    'model.depth.skipped_slots': ('projected', 'masked'),
    'model.depth.gradient_dtype': ('float32', 'model'),
    'model.experts.choice': ('none', 'token', 'expert'),
    'model.experts.scores': ('softmax', 'sigmoid'),
    'model.experts.product': ('blocked', 'batched', 'ragged_dot'),
    'model.routing.router': ('learned', 'norm', 'random', 'position', 'straight_through'),
    'model.routing.capacity_form': ('fraction', 'log_length'),
    'model.routing.select_per': ('segment',),
    'model.routing.gate': ('sigmoid', 'tanh', 'straight_through'),
    'model.routing.causal_rule': ('predictor', 'aux_loss', 'threshold', 'dense'),
    'model.routing.train_rule': ('top_c', 'threshold'),
    'model.routing.overflow': ('skip', 'grow'),
    'data.tokenizer': ('bytes',),
}
LEARNED = {'model.routing.router': 'learned', 'model.routing.layers': 'every:2'}
TOKEN = {'model.experts.choice': 'token', 'model.use_bias': False, 'model.experts.row_capacity': 0}
EXPERT = TOKEN | {'model.experts.choice': 'expert', 'model.experts.num_noop': 0}
PLAIN = {'model.depth.stream': 'residual', 'model.depth.slots': 'auto'}
# Knobs that contradict each other, and the one that the error must name.
CONTRADICTIONS = [
    (PLAIN | {'model.depth.slots': 'block'}, 'model.depth.slots'),
    (PLAIN | {'model.depth.slot_keys': 'rotated'}, 'model.depth.slot_keys'),
    (PLAIN | {'model.depth.slot_window': 2}, 'model.depth.slot_window'),
    (PLAIN | {'model.depth.attention_slot_projection': True}, 'attention_slot_projection'),
    (
        {
            'model.depth.stream': 'moda',
            'model.depth.skipped_slots': 'masked',
            'model.routing.router': 'none',
        },
        'model.depth.skipped_slots',
    ),
    (PLAIN | {'model.depth.stream': 'dense', 'model.layer_loop': 'scan'}, 'model.layer_loop'),
    (PLAIN | {'model.depth.stream': 'attention', 'model.head_dim': 8}, 'model.d_model'),
    (LEARNED | {'model.routing.layers': '8'}, 'model.routing.layers'),
    (LEARNED | {'model.routing.layers': 'middle:5:3'}, 'model.routing.layers'),
    (LEARNED | {'model.routing.capacity_stages': '1:0.5,0.5:0.5'}, 'capacity_stages'),
    (
        LEARNED | {'model.routing.capacity_form': 'log_length', 'model.routing.capacity': 0.01},
        'model.routing.capacity',
    ),
    (LEARNED | {'model.routing.gate': 'straight_through'}, 'model.routing.gate'),
    (
        LEARNED | {'model.routing.causal_rule': 'aux_loss', 'model.routing.aux_loss_weight': 0.0},
        'aux_loss_weight',
    ),
    (
        LEARNED | {'model.routing.train_rule': 'threshold', 'model.routing.overflow': 'grow'},
        'model.routing.overflow',
    ),
    (
        LEARNED | {'model.routing.train_rule': 'threshold', 'model.routing.threshold_warmup': 0.0},
        'threshold_warmup',
    ),
    (
        LEARNED | {'model.routing.train_rule': 'threshold', 'model.routing.select_per': 'segment'},
        'model.routing.train_rule',
    ),
    (
        LEARNED | {'model.routing.router': 'random', 'model.routing.train_rule': 'threshold'},
        'model.routing.train_rule',
    ),
    (
        LEARNED | {'model.routing.router': 'position', 'model.routing.capacity_stages': '1:0.2'},
        'model.routing.router',
    ),
    (LEARNED | {'model.routing.router': 'norm', 'model.routing.gate': 'raw'}, 'gate'),
    (TOKEN | {'model.experts.top_k': 9, 'model.experts.num_noop': 0}, 'model.experts.top_k'),
    (TOKEN | {'model.experts.layers': 'every:9'}, 'model.experts.layers'),
    (TOKEN | {'model.use_bias': True}, 'model.use_bias'),
    (LEARNED | TOKEN | {'model.experts.row_capacity': 4}, 'model.experts.row_capacity'),
    (EXPERT | {'model.experts.row_capacity': 4}, 'model.experts.row_capacity'),
    (EXPERT | {'model.experts.num_noop': 2}, 'model.experts.num_noop'),
    (
        LEARNED | EXPERT | {'model.routing.train_rule': 'threshold'},
        'model.routing.train_rule',
    ),
    ({'flop_budget': 1e12, 'training.num_steps': 5}, 'training.num_steps'),
    ({'flop_budget': 0.0, 'training.num_steps': 0}, 'flop_budget'),
    ({'model.vocab_size': 300, 'model.dtype': 'float64'}, 'model.dtype'),
    ({'data.sequence_length': 64, 'report.sample_tokens': 60}, 'data.sequence_length'),
]
BUDGETS = [1.0, -1.0, 1e30, float('inf'), float('nan')]
CORPORA = ['nothing/*.txt', 'bad.jsonl', 'bad.parquet', 'empty.txt', 'notes.md', 'other.jsonl']
LONG = [{'data.sequence_length': 10**6}, {'data.sequence_length': 5000}]
MESHES = {  # of 8 devices: rows of 8 in micro-batches of 8, 64 wide, 4 heads, 8 experts
    'data=3': 'data.batch_size',
    'fsdp=3': 'data.batch_size',
    'tensor=3': 'model.num_heads',
    'tensor=8': 'model.num_heads',
    'tensor=4': 'model.num_kv_heads',
    'data=16': '--mesh=data=16',
    'data=9': '--mesh=data=9',
    'data': '--mesh=data',
    'data=': '--mesh=data=',
    'data=0': '--mesh=data=0',
    'data=-1': '--mesh=data=-1',
    'data=two': '--mesh=data=two',
    'data=2.0': '--mesh=data=2.0',
    'modle=2': '--mesh=modle=2',
    'data=2,data=2': '--mesh=data=2,data=2',
    'data=2;fsdp=2': '--mesh=data=2;fsdp=2',
    '=2': '--mesh==2',
    'data=4,fsdp=4': '--mesh=data=4,fsdp=4',
}


class Case(NamedTuple):
    """One broken command line.

    Attributes:
      kind: how it is broken.
      lines: of Python, for the end of the config file.
      arguments: of the command, {config} standing for its --config.
      words: what the error must name.
    """

    kind: str
    lines: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]


def set_knobs(knobs: dict) -> str:
    """Lines that assign knobs, of whatever type."""
    lines = [f'    config.{name} = {_literal(value)}' for name, value in knobs.items()]
    return '\n'.join(['with config.ignore_type():', *lines])


def _literal(value):
    odd = isinstance(value, float) and not math.isfinite(value)
    return f'float({str(value)!r})' if odd else repr(value)


def _broken(kind, knobs, *words):
    return Case(kind, set_knobs(knobs), ('{config}',), words)


def typo(rng: random.Random, word: str, known) -> str:
    """`word` without one of its letters, or with one doubled; not in `known`."""
    while True:
        i = rng.randrange(len(word))
        wrong = word[:i] + rng.choice(('', word[i] * 2)) + word[i + 1 :]
        if wrong not in known and wrong.isidentifier():
            return wrong


def _wrong_type(rng, knobs, _):
    name, value = rng.choice(list(knobs.items()))
    wrong = {
        int: ['three', 2.5, [1]],
        float: ['much', [0.5]],
        bool: ['yes', 1, None],
        str: [3, 0.5, None],
        tuple: ['wide', (1.5,)],
    }[type(value)]
    wrong = rng.choice(wrong)
    if rng.random() < 0.5 and wrong is not None and wrong != (1.5,):
        # ConfigDict rejects the assignment itself, in the file.
        knob = name.split('.')[-1]
        lines = f'config.{name} = {wrong!r}'
        return Case('type in the file', lines, ('{config}',), (knob, str(wrong)))
    return _broken('type', {name: wrong}, name, repr(wrong[0] if wrong == (1.5,) else wrong))


def _out_of_range(rng, knobs, bad_values):
    name = rng.choice(sorted(bad_values))
    value = rng.choice(bad_values[name])
    return _broken('range', {name: value}, name, repr(value) if value != -1.0 else '-1')


def _misspelt_knob(rng, knobs, _):
    name = rng.choice([name for name in knobs if len(name.split('.')[-1]) > 2])  # not b1, b2
    group, _, knob = name.rpartition('.')
    wrong = typo(rng, knob, [other.split('.')[-1] for other in knobs])
    full = f'{group}.{wrong}'.removeprefix('.')
    if rng.random() < 0.5:
        return _broken('misspelt knob', {full: 1}, full, 'no such knob', knob)
    arguments = ('{config}', f'--config.{full}=1')
    return Case('misspelt flag', '', arguments, (full, 'no such knob', knob))


def _missing(rng, knobs, _):
    name = rng.choice([*knobs, 'model', 'model.depth', 'model.routing', 'optimizer', 'report'])
    return Case('missing', f'del config.{name}', ('{config}',), (name, 'missing'))


def _unknown_choice(rng, knobs, _):
    name = rng.choice(sorted(CHOICES))
    right = rng.choice(CHOICES[name])
    wrong = typo(rng, right.replace('+', ''), CHOICES[name])
    # Only long words are similar enough without a letter.
    near = ('did you mean',) if len(right) > 3 else ()
    return _broken('unknown choice', {name: wrong}, name, repr(wrong), *near)


def _contradiction(rng, knobs, _):
    changes, named = rng.choice(CONTRADICTIONS)
    known = {'flop_budget': 0.0, 'training.num_steps': 10}
    values = [str(value) for name, value in changes.items() if name.endswith(named)]
    if 'report.sample_tokens' in changes:
        values = ['64']
    return _broken('contradiction', known | changes, named, *values[:1])


def _budget(rng, knobs, _):
    budget = rng.choice(BUDGETS)
    changes = {'training.num_steps': 0, 'flop_budget': budget}
    return _broken('budget', changes, 'flop_budget', f'{budget:g}')


def _corpus(rng, knobs, _):
    name = rng.choice(CORPORA)
    lines = f'config.data.source = folder + {"/text/" + name!r}'
    return Case('corpus', lines, ('{config}',), ('/text/' + name,))


def _too_long(rng, knobs, _):
    wrong = rng.choice(LONG)
    paid = {'flop_budget': 0.0, 'training.num_steps': 10}
    return _broken(
        'too long', paid | wrong, f'data.sequence_length={wrong["data.sequence_length"]}'
    )


def _vocabulary(rng, knobs, _):
    size = rng.randrange(2, 257)
    return _broken('vocabulary', {'model.vocab_size': size}, f'model.vocab_size={size}', '257')


def _mesh(rng, knobs, _):
    mesh, word = rng.choice(list(MESHES.items()))
    return Case('mesh', '', ('{config}', f'--mesh={mesh}'), (word,))


def _mesh_and_experts(rng, knobs, _):
    if knobs['model.experts.choice'] == 'none':
        return Case('mesh', '', ('{config}', '--mesh=expert=2'), ('expert=2', 'without experts'))
    lines = set_knobs({'data.batch_size': 12})
    return Case('mesh', lines, ('{config}', '--mesh=expert=3'), ('num_routed=8', 'expert=3'))


def _unsharded(rng, knobs, _):
    lines = set_knobs({'training.max_unsharded': 0.0})
    return Case('mesh', lines, ('{config}', '--mesh=fsdp=2'), ('max_unsharded=0', 'fsdp=2'))


KINDS = (
    _wrong_type,
    _out_of_range,
    _misspelt_knob,
    _missing,
    _unknown_choice,
    _contradiction,
    _budget,
    _corpus,
    _too_long,
    _vocabulary,
    _mesh,
    _mesh_and_experts,
)


def leaves(config, prefix=''):
    """(dotted name, value) of every knob."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value


def file_text(name: str, folder: str, lines: str) -> str:
    """A config file: configs/NAME.py at small size, then `lines`."""
    body = SMALL.format(folder=folder) + f'folder = {folder!r}\n' + lines
    return (
        f'from configs import {name}\n\n\ndef get_config():\n'
        f'    config = {name}.get_config({_call(name)})\n'
        + textwrap.indent(body, '    ')
        + '\n    return config\n'
    )


def _call(name):
    return repr(ARGUMENTS[name]) if name in ARGUMENTS else ''


def small_knobs(name: str, folder: str) -> dict:
    """The knobs of configs/NAME.py at small size, checked: value by dotted name."""
    module = importlib.import_module(f'configs.{name}')
    config = module.get_config(*filter(None, [ARGUMENTS.get(name)]))
    exec(SMALL.format(folder=folder), {'config': config})
    return dict(leaves(dataclasses.asdict(from_config(config))))


def make_folder(folder):
    """Writes texts; only good.txt is one that a run can read."""
    text = folder / 'text'
    text.mkdir()
    (text / 'good.txt').write_text('It is a text of no great length. ' * 100)
    (text / 'bad.jsonl').write_text('{"text": "one"}\n{"text": \n')
    (text / 'other.jsonl').write_text(json.dumps({'body': 'one'}) + '\n')
    (text / 'bad.parquet').write_bytes(b'PAR1 and then nothing of the kind')
    (text / 'empty.txt').touch()
    (text / 'notes.md').write_text('mine')


def make_cases(count: int, seed: int, names: list[str], folder, bad_values: dict):
    """(config name, Case) for `count` command lines: every kind and every config in turn."""
    rng = random.Random(seed)
    knobs = {name: small_knobs(name, str(folder)) for name in names}
    cases = [(name, _unsharded(rng, knobs[name], bad_values)) for name in rng.sample(names, 2)]
    while len(cases) < count:
        name, kind = names[len(cases) % len(names)], KINDS[len(cases) % len(KINDS)]
        cases.append((name, kind(rng, knobs[name], bad_values)))
    return cases
