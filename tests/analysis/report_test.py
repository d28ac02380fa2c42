"""The end of a run: true numbers, pictures, a sample, and three things to do next."""

import functools
import io
import json
import pathlib
import re
import types

import jax
import matplotlib.image
import numpy as np
import pytest
import rich.console

from moddepth_jax.analysis import report
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.loop import Run

ROOT = pathlib.Path(__file__).parents[2]
ROUTING = {'selected_fraction': 0.121, 'precision': 0.912, 'recall': float('nan')}


class HeldOut:
    """One held-out batch of text."""

    tokenizer = make_tokenizer('bytes')

    def held_out_batch(self, index):
        text = b'import os\n\ndef f(x):\n\treturn "$x"\n\n' * 4
        tokens_BT = np.frombuffer(text, np.uint8)[:64].reshape(2, 32).astype(np.int32)
        return {'tokens_BT': tokens_BT, 'segment_ids_BT': np.ones((2, 32), np.int32)}


EXPERTS = {
    'layer_00': {
        'load': [0.5, 0.0, 0.25, 0.25],
        'largest_load': 2.0,
        'noop_fraction': 0.25,
        'dropped_fraction': 0.125,
        'computed_fraction': 0.75,
        'unused': 1.0,
    },
    'layer_01': {
        'load': [0.2, 0.1, 0.1, 0.6],
        'largest_load': 1.5,
        'noop_fraction': 0.6,
        'dropped_fraction': 0.0,
        'computed_fraction': 1.25,
        'unused': 0.0,
    },
}
NO_TOKEN = {'load': [float('nan')] * 4, 'unused': 3.0} | {
    name: float('nan')
    for name in ('largest_load', 'noop_fraction', 'dropped_fraction', 'computed_fraction')
}


def make_run(tiny_config, workdir, router='learned', gap=0.004, **more):
    changes = {
        'model.num_layers': 1,
        'model.routing.router': router,
        'model.routing.layers': '0',
        'training.num_steps': 0,
        'flop_budget': 2e9,
        **more,
    }
    hparams = from_config(tiny_config(**changes))
    variables = {}
    if hparams.model.routed_layers or hparams.model.depth.slots_per_layer:  # the pictures need it
        init = functools.partial(Transformer(hparams).init, jax.random.key(0))
        tokens_BT = np.zeros((1, 32), np.int32)
        variables = jax.jit(lambda: init(tokens_BT))()
    evaluation = {'loss': 1.4, 'bits_per_byte': 2.1}
    routed, ahead = router != 'none', hparams.model.looks_ahead
    summary = {
        'final_step': 123,
        'eval': evaluation | ({'loss_top_c': 1.4 - gap, 'routing_gap': gap} if ahead else {}),
        'routing': {'layer_00': ROUTING} if routed else {},
        'experts': EXPERTS if hparams.model.expert_layers else {},
        'parameters': 34567,
        'total_flops': 1.99e9,
        'flop_budget': 2e9,
        'seconds': 83.0,
    }
    workdir.mkdir(exist_ok=True)
    state = types.SimpleNamespace(variables=variables)
    return Run(hparams, workdir, state, HeldOut(), summary)


def printed(run):
    """What the report prints where it is no terminal."""
    file = io.StringIO()
    report.write_report(run, rich.console.Console(file=file, width=120))
    return file.getvalue()


@pytest.fixture
def sampled(monkeypatch):
    """sampled(text) makes every sample that text."""

    def set_sample(text):
        tokens = np.array([[256, *text.encode()]], np.int32)
        made = types.SimpleNamespace(tokens=tokens, notes=[])
        monkeypatch.setattr(report, 'generate', lambda *_, **__: made)

    return set_sample


def next_steps(out):
    """The items after `Next:`, each with its deeper indented lines."""
    items = re.split(r'^  (?=\S)', out.split('Next:\n')[1], flags=re.MULTILINE)
    assert not items[0].strip()
    return items[1:]


def named_configs(lines):
    return re.findall(r'--config=(\S+?\.py)', ' '.join(lines))


def test_report_of_a_routed_run(tiny_config, tmp_path, sampled):
    """Both losses, gap, routing, FLOPs and time are printed; the heatmap and sample are written."""
    sampled('x = 1\nreturn x')
    run = make_run(tiny_config, tmp_path / 'run')
    out = printed(run)
    (causal,) = (line for line in out.splitlines() if 'the honest one' in line)
    (top_c,) = (line for line in out.splitlines() if 'sees the future' in line)
    assert re.search(r'predictor.*1\.4000.*2\.1000', causal)
    assert re.search(r'top-C.*1\.3960.*2\.0940', top_c)
    assert 'routing gap +0.0040 nats: negligible' in out
    assert 'selected fraction 0.121, precision 0.912, recall nan' in out
    for text in ('123 steps', '1.99e+09 FLOPs', '99.50% of the budget', '34.6k', '1m 23s'):
        assert text in out
    assert '  | x = 1\n  | return x\n' in out
    assert (tmp_path / 'run' / 'sample.txt').read_text() == 'x = 1\nreturn x'
    picture = matplotlib.image.imread(tmp_path / 'run' / 'routing.png')
    assert min(picture.shape[:2]) > 100 and picture.std() > 0.05


@pytest.mark.parametrize('router', ['learned', 'none'])
def test_three_next_steps_that_exist(tiny_config, tmp_path, sampled, router):
    """Three items say what to do next; files and configs that they name are there."""
    sampled('x')
    run = make_run(tiny_config, tmp_path / 'run', router)
    (run.workdir / 'metrics.jsonl').write_text(json.dumps({'step': 1}) + '\n')
    items = next_steps(printed(run))
    assert len(items) == 3
    configs = named_configs(items)
    assert configs and all((ROOT / config).exists() for config in configs)
    files = re.findall(rf'{re.escape(str(tmp_path))}[\w./]*', ' '.join(items))
    assert files and all(pathlib.Path(file).exists() for file in files)
    assert (run.workdir / 'routing.png').exists() == (router == 'learned')


@pytest.mark.parametrize('router', ['learned', pytest.param('none', marks=pytest.mark.slow)])
def test_run_with_depth_slots_shows_the_attention_on_them(tiny_config, tmp_path, sampled, router):
    """A MoDA run has a picture of the masses on its slots, named to look at, and the numbers."""
    sampled('x')
    moda = {'model.num_layers': 2, 'model.depth.stream': 'moda'}
    run = make_run(tiny_config, tmp_path / 'run', router, **moda)
    look, *others = next_steps(printed(run))
    assert look.startswith('look') and len(others) == 2
    names = [f'{run.workdir}/{name}.png:' for name in ('routing', 'depth_mass')]
    assert [name in look for name in names] == [router == 'learned', True]
    assert matplotlib.image.imread(run.workdir / 'depth_mass.png').std() > 0.05
    numbers = json.loads((run.workdir / 'depth_mass.json').read_text())
    assert numbers['routing'] == ('predictor' if router == 'learned' else 'dense')
    assert numbers['layers'] == ['0', '1'] and numbers['slots'] == ['0a', '0f']
    assert numbers['slots_LS'][0] == [0, 0] and 0 < sum(numbers['slots_LS'][1]) < 1
    assert numbers['depth_L'][1] == pytest.approx(sum(numbers['slots_LS'][1]))
    assert all(0 <= mass < 1 for mass in numbers['first_token_L'])


def expert_knobs(**changes):
    """Knobs of a model of two layers whose experts are those of EXPERTS."""
    knobs = {'choice': 'token', 'num_routed': 3, 'num_noop': 1, 'd_ff': 16} | changes
    return {'model.num_layers': 2} | {f'model.experts.{name}': v for name, v in knobs.items()}


def expert_line(tiny_config, layers, **changes):
    hparams = from_config(tiny_config(**expert_knobs(**changes)))
    return report.expert_line(layers, hparams.model.experts)


def test_run_with_experts_shows_their_loads(tiny_config, tmp_path, sampled):
    """A line has the largest load and the shares; there is a picture, and its numbers.

    Token choice looks at nothing later: there is one loss, and no gap.
    """
    sampled('x')
    run = make_run(tiny_config, tmp_path / 'run', 'none', **expert_knobs(row_capacity=9))
    out = printed(run)
    line = 'experts: largest load 2.00 of their mean (layer 00), no-op 0.42 (FLOPs are counted at '
    assert f'\n{line}0.25), dropped 0.06, 1 without a token\n' in out
    assert 'routing gap' not in out and 'sees the future' not in out
    look, *others = next_steps(out)
    assert f'{run.workdir}/expert_load.png: ' in look and len(others) == 2
    assert matplotlib.image.imread(run.workdir / 'expert_load.png').std() > 0.05
    numbers = json.loads((run.workdir / 'expert_load.json').read_text())
    assert numbers == {
        'routing': 'dense',
        'layers': [0, 1],
        'num_routed': 3,
        'load_XZ': [[2, 0, 1, 1], pytest.approx([0.8, 0.4, 0.4, 2.4])],
        'largest_load_X': [2, 1.5],
    }


def test_run_of_experts_that_choose_has_a_gap(tiny_config, tmp_path, sampled):
    """They look ahead in training: both losses are printed, and the experts a token passes."""
    sampled('x')
    knobs = expert_knobs(choice='expert', num_routed=4, num_noop=0)
    out = printed(make_run(tiny_config, tmp_path / 'run', 'none', **knobs))
    assert 'threshold (causal: the honest one)' in out and 'sees the future' in out
    assert 'routing gap +0.0040 nats: negligible' in out and 'A sample (threshold' in out
    assert 'a token passes 2.00 of them, in training 2, 1 without a token\n' in out
    assert json.loads((tmp_path / 'run' / 'expert_load.json').read_text())['routing'] == 'threshold'


def test_line_of_the_experts(tiny_config):
    """It has only shares that the model has; a layer without tokens does not make them NaN."""
    start = 'experts: largest load 1.50 of their mean (layer 01)'
    even = {'layer_01': EXPERTS['layer_01']}
    assert expert_line(tiny_config, even) == start + ', no-op 0.60 (FLOPs are counted at 0.25)'
    limited = expert_line(tiny_config, even, num_noop=0, row_capacity=9)
    assert limited == start + ', dropped 0.00'
    assert expert_line(tiny_config, even, num_noop=0) == start
    some = {'layer_00': NO_TOKEN, **even, 'layer_03': NO_TOKEN}
    expected = start + ', no-op 0.60 (FLOPs are counted at 0.25), 6 without a token'
    assert expert_line(tiny_config, some) == expected
    assert 'largest load nan' in expert_line(tiny_config, {'layer_00': NO_TOKEN})


@pytest.mark.parametrize(
    ('changes', 'config'),
    [
        ({'model.routing.router': 'learned'}, 'dense_isoflop.py'),
        ({}, 'mod_isoflop.py'),
        (expert_knobs(num_noop=0), 'dense_isoflop.py'),
        (expert_knobs(), 'moe.py'),
        (expert_knobs(num_noop=0) | {'model.routing.router': 'learned'}, 'moe.py'),
        (expert_knobs() | {'model.depth.stream': 'moda'}, 'moda.py'),
        ({'model.depth.stream': 'moda'}, 'moda.py:slots=none'),
    ],
)
def test_the_run_to_compare_with_lacks_one_mechanism(tiny_config, changes, config):
    """Without routing, no-op experts, experts or depth slots; a plain model is given routing."""
    model = from_config(tiny_config(**changes)).model
    assert report._other_config(model) == config
    assert (ROOT / 'configs' / config.split(':')[0]).exists()


@pytest.mark.parametrize(
    ('gap', 'words'),
    [
        (0.0099, 'negligible'),
        (-0.0099, 'negligible'),
        (0.02, 'to be reported'),
        (0.05, 'invalidates'),
    ],
)
def test_description_of_the_routing_gap(tiny_config, tmp_path, gap, words):
    """0.01 nats or less is negligible, 0.05 or more invalidates a run."""
    hparams = from_config(tiny_config(**{'model.routing.router': 'learned'}))
    summary = {
        'eval': {'loss': 1.0, 'routing_gap': gap}, 'routing': {}, 'flop_budget': 0.0,
        'final_step': 1, 'total_flops': 1.0, 'parameters': 1, 'seconds': 1.0,
    }  # fmt: skip
    run = Run(hparams, tmp_path, None, None, summary)
    (line,) = (line for line in report._lines(run) if 'routing gap' in line)
    assert words in line and f'{gap:+.4f}' in line


@pytest.mark.parametrize(
    ('text', 'pieces'),
    [
        ('[bold red]x[/bold red] [/] [link=a]', ['  | [bold red]x[/bold red] [/] [link=a]\n']),
        ('\x1b[31mred\x1b]0;title\x07', ['red', 'title']),
        ('a\x9b31mb\x08c', ['  | a', '31mb', 'c']),
    ],
)
def test_a_sample_is_printed_as_text(tiny_config, tmp_path, sampled, text, pieces):
    """Brackets are not markup; control characters, which could steer a terminal, are dropped."""
    sampled(text)
    out = printed(make_run(tiny_config, tmp_path / 'run', 'none'))
    assert all(piece in out for piece in pieces)
    assert not {c for c in out if not c.isprintable()} - {'\n'}


def test_prompt_begins_with_the_separator(tiny_config):
    """The prompt is the separator, as at the start of every document, and the bytes of the knob."""
    tokenizer = make_tokenizer('bytes')
    hparams = from_config(tiny_config(**{'report.prompt': 'dé'}))
    assert report.prompt_tokens(hparams, tokenizer) == [256, ord('d'), 0xC3, 0xA9]
    hparams = from_config(tiny_config(**{'report.prompt': ''}))
    assert report.prompt_tokens(hparams, tokenizer) == [256]


@pytest.mark.parametrize(('prompt', 'fits'), [('x' * 23, True), ('x' * 24, False)])
def test_a_prompt_longer_than_the_context_is_an_error(tiny_config, prompt, fits):
    """With the separator and the sample it must fit data.sequence_length, which the error names."""
    hparams = from_config(tiny_config(**{'report.prompt': prompt}))
    if fits:
        assert len(report.prompt_tokens(hparams, make_tokenizer('bytes'))) == 24
        return
    with pytest.raises(ValueError) as caught:
        report.prompt_tokens(hparams, make_tokenizer('bytes'))
    message = str(caught.value)
    assert 'data.sequence_length=32' in message and '\n' not in message
