"""The report of a run: correct numbers, pictures, a sample, and three suggested next steps."""

import dataclasses
import io
import json
import math
import pathlib
import re
import shlex
import types

import jax
import matplotlib.image
import numpy as np
import pytest
import rich.console
from ml_collections import ConfigDict

from configs import tiny
from launch import config_file, listing
from launch.config_file import unresolved
from moddepth_jax.analysis import heatmaps, report
from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model import ahead
from moddepth_jax.training.loop import Run
from moddepth_jax.training.mesh import make_mesh, replicated
from moddepth_jax.training.plan import resolve_steps, run_flops
from moddepth_jax.training.run_dir import open_workdir
from tests.forked_commands import run_commands
from tests.model.cases import random_variables

ROOT = pathlib.Path(__file__).parents[2]
ROUTING = {'selected_fraction': 0.121, 'precision': 0.912, 'recall': float('nan')}
RATIOS = ('largest_load', 'noop_fraction', 'dropped_fraction', 'computed_fraction')
EXPERTS = {
    name: {'load': load, 'unused': unused} | dict(zip(RATIOS, ratios, strict=True))
    for name, load, unused, ratios in (
        ('layer_00', [0.5, 0.0, 0.25, 0.25], 1.0, (2.0, 0.25, 0.125, 0.75)),
        ('layer_01', [0.2, 0.1, 0.1, 0.6], 0.0, (1.5, 0.6, 0.0, 1.25)),
    )
}


class HeldOut:
    """One held-out batch of text."""

    tokenizer = make_tokenizer('bytes')
    num_held_out_batches = 2  # as many as `tiny_config` asks for

    def held_out_batch(self, index):
        text = b'import os\n\ndef f(x):\n\treturn "$x"\n\n' * 4
        tokens_BT = np.frombuffer(text, np.uint8)[:64].reshape(2, 32).astype(np.int32)
        return {'tokens_BT': tokens_BT, 'segment_ids_BT': np.ones((2, 32), np.int32)}


def make_run(tiny_config, workdir, router='learned', **more):
    changes = {'model.num_layers': 1, 'model.routing.router': router, 'model.routing.layers': '0'}
    changes |= {'training.num_steps': 0, 'flop_budget': 2e9, **more}
    hparams = from_config(tiny_config(**changes))
    variables = {}
    if hparams.model.routed_layers or hparams.model.depth.stream != 'residual':  # for the pictures
        variables = random_variables(hparams, np.zeros((1, 32), np.int32))
    gap = {'loss_top_c': 1.396, 'routing_gap': 0.004} if hparams.model.looks_ahead else {}
    summary = {
        'final_step': 123,
        'eval': {'loss': 1.4, 'bits_per_byte': 2.1} | gap,
        'routing': {'layer_00': ROUTING} if router != 'none' else {},
        'experts': EXPERTS if hparams.model.expert_layers else {},
        'parameters': 34567,
        'total_flops': 1.99e9,
        'flop_budget': 2e9,
        'seconds': 83.0,
    }
    workdir.mkdir(exist_ok=True)
    (workdir / 'metrics.jsonl').write_text(json.dumps({'step': 1}) + '\n')
    state = types.SimpleNamespace(variables=variables)
    return Run(hparams, workdir, state, HeldOut(), summary)


@pytest.fixture
def printed(tiny_config, tmp_path, monkeypatch):
    """printed(router, sample, knobs): (what the report prints, its workdir)."""

    def run(router, sample='x', **knobs):
        tokens = np.array([[256, *sample.encode()]], np.int32)
        made = types.SimpleNamespace(tokens=tokens, notes=[])
        monkeypatch.setattr(report, 'generate', lambda *_, **__: made)
        file = io.StringIO()
        console = rich.console.Console(file=file, width=120)
        report.write_report(make_run(tiny_config, tmp_path / 'run', router, **knobs), console)
        return file.getvalue(), tmp_path / 'run'

    return run


def test_mean_ratio_skips_layers_without_tokens():
    layers = {name: {'a': a} for name, a in zip('xyz', (0.25, math.nan, 0.75), strict=True)}
    assert report._mean_ratio(layers, 'a') == 0.5
    assert math.isnan(report._mean_ratio({'y': layers['y']}, 'a'))


@pytest.mark.slow  # compiles every program of a report
def test_nothing_is_compiled_twice(tiny_config, tmp_path, caplog):
    """After `report_programs` of an abstract state, the report of a real one compiles nothing."""
    run = make_run(tiny_config, tmp_path / 'run', **{'model.depth.stream': 'moda'})
    placed = jax.device_put(run.state.variables, replicated(make_mesh('')))  # as in a run
    run.state.variables = placed
    abstract = {'variables': ahead.abstract(run.state.variables), 'hparams': run.hparams}
    programs = report.report_programs(types.SimpleNamespace(**abstract), run.dataset)
    with jax.log_compiles(), jax.set_mesh(make_mesh('')):
        for program in programs.values():
            program()
        jitted = set(re.findall(r'Compiling (jit\(\w+\))', caplog.text))
        caplog.clear()
        record, mass = report._routing_record(run), report._mass(run, depth_mass)
        sample, _ = report._sample(run)
    assert {'jit(_records)', 'jit(_visit)', 'jit(_start)', 'jit(_step)'} <= jitted
    assert jitted.isdisjoint(re.findall(r'Compiling (jit\(\w+\))', caplog.text))
    assert record.selected_BT.shape == (1, 2, 32) and mass.layers == ('0',) and sample


def next_steps(out):
    """The three items after `Next:`, each with its deeper indented lines."""
    before, *items = re.split(r'^  (?=\S)', out.split('Next:\n')[1], flags=re.MULTILINE)
    assert not before.strip() and len(items) == 3
    return items


def test_report_of_a_routed_run(printed):
    """Both losses, gap, routing, FLOPs and time are printed; the heatmap and sample are written."""
    out, workdir = printed('learned', 'x = 1\nreturn x')
    (causal,) = (line for line in out.splitlines() if 'the honest one' in line)
    (top_c,) = (line for line in out.splitlines() if 'sees the future' in line)
    assert re.search(r'predictor.*1\.4000.*2\.1000', causal)
    assert re.search(r'top-C.*1\.3960.*2\.0940', top_c)
    assert 'routing gap +0.0040 nats (+0.29% of the loss): negligible' in out
    assert 'selected fraction 0.121, precision 0.912, recall nan' in out
    for text in ('123 steps', '1.99e+09 FLOPs', '99.50% of the budget', '34.6k', '1m 23s'):
        assert text in out
    assert '  | x = 1\n  | return x\n' in out
    assert '\ndrawing routing.png and writing a sample ...\n' in out
    assert (workdir / 'sample.txt').read_text() == 'x = 1\nreturn x'
    (workdir / 'sample.txt').unlink()
    out, workdir = printed('learned', **{'report.sample_tokens': 0})
    assert '\ndrawing routing.png ...\n\nNext:\n' in out and 'ample' not in out
    assert not (workdir / 'sample.txt').exists()
    picture = matplotlib.image.imread(workdir / 'routing.png')
    assert min(picture.shape[:2]) > 100 and picture.std() > 0.05


@pytest.mark.parametrize('last', [ord(' '), 0], ids=['spaces', 'padding'])
def test_the_heatmap_shows_the_row_with_the_least_whitespace(
    last, tiny_config, tmp_path, monkeypatch
):
    """Regression: columns of spaces were drawn, and for a small corpus a row of padding."""
    run = make_run(tiny_config, tmp_path / 'run', **{'report.heatmap_tokens': 8})
    tokens_BT = np.full((3, 32), ord('x'), np.int32)
    tokens_BT[0, -8:-1] = tokens_BT[1, -4] = ord(' ')
    tokens_BT[2] = last
    segment_ids_BT = np.where(tokens_BT > 0, 1, 0)  # 0 for padding, as its tokens
    batch = {'tokens_BT': tokens_BT, 'segment_ids_BT': segment_ids_BT}
    monkeypatch.setattr(run.dataset, 'held_out_batch', lambda index: batch, raising=False)
    drawn = []
    monkeypatch.setattr(heatmaps, 'plot_routing', lambda *given, names: drawn.append(given[1]))
    report._draw_routing(run, tmp_path / 'routing.png')
    assert drawn == [[bytes([byte]) for byte in b'xxxx xxx']]


@pytest.mark.parametrize('router', ['learned', 'none'])
def test_the_suggested_next_steps_exist(printed, router):
    out, workdir = printed(router)
    items = ' '.join(next_steps(out))
    assert f'--config={workdir}/config.json --workdir={workdir}-' in items
    assert f'python -m launch.compare {workdir} {workdir}-' in items
    files = re.findall(rf'{re.escape(str(workdir))}/[\w.]+(?=[:,])', items)
    assert files and all(pathlib.Path(file).exists() for file in files)
    assert (workdir / 'routing.png').exists() == (router == 'learned')


def test_suggested_commands_are_quoted(tiny_config):
    hparams = from_config(tiny_config())
    run = {'workdir': pathlib.Path('x y/run'), 'hparams': hparams, 'summary': {'total_flops': 1e9}}
    text = ' '.join(report._next_steps(types.SimpleNamespace(**run)))
    for words in (
        "--config='x y/run/config.json' --workdir='x y/run-mod'",
        "launch.compare 'x y/run' 'x y/run-mod'",
        "--logdir 'x y'",
    ):
        assert words in text


@pytest.mark.parametrize('router', ['none', pytest.param('learned', marks=pytest.mark.slow)])
def test_run_with_depth_slots_shows_the_attention_on_them(printed, router):
    out, workdir = printed(router, **{'model.num_layers': 2, 'model.depth.stream': 'moda'})
    look = next_steps(out)[0]
    names = [f'{workdir}/{name}.png:' for name in ('routing', 'depth_mass')]
    assert look.startswith('look') and [n in look for n in names] == [router == 'learned', True]
    assert matplotlib.image.imread(workdir / 'depth_mass.png').std() > 0.05
    numbers = json.loads((workdir / 'depth_mass.json').read_text())
    assert numbers['routing'] == ('predictor' if router == 'learned' else 'dense')
    assert numbers['layers'] == ['0', '1'] and numbers['slots'] == ['0a', '0f']
    assert numbers['slots_LS'][0] == [0, 0] and 0 < sum(numbers['slots_LS'][1]) < 1


@pytest.mark.slow
def test_run_with_attention_residuals_shows_the_weights_of_sources(printed):
    out, workdir = printed('none', **{'model.depth.stream': 'attention_residual'})
    assert next_steps(out)[0].startswith(f'look     {workdir}/source_mass.png:')
    assert matplotlib.image.imread(workdir / 'source_mass.png').std() > 0.05
    numbers = json.loads((workdir / 'source_mass.json').read_text())
    assert numbers['routing'] == 'dense' and numbers['sources'] == ['e', '0a', '0f']
    assert numbers['weights_RS'][0] == [1, 0, 0] and numbers['newest_R'] == [0, 1, 2]


def expert_knobs(**changes):
    """Knobs of a model of two layers whose experts are those of EXPERTS."""
    knobs = {'choice': 'token', 'num_routed': 3, 'num_noop': 1, 'd_ff': 16} | changes
    return {'model.num_layers': 2} | {f'model.experts.{name}': v for name, v in knobs.items()}


def test_run_with_experts_shows_their_loads(printed):
    """One line has the largest load and the shares. Token choice has one loss and no gap."""
    out, workdir = printed('none', **expert_knobs(row_capacity=9))
    line = 'experts: largest load 2.00 of their mean (layer 00), no-op 0.42 (FLOPs are counted at '
    assert f'\n{line}0.25), dropped 0.06, 1 without a token\n' in out
    assert 'routing gap' not in out and 'sees the future' not in out
    assert f'{workdir}/expert_load.png: ' in next_steps(out)[0]
    assert matplotlib.image.imread(workdir / 'expert_load.png').std() > 0.05
    assert json.loads((workdir / 'expert_load.json').read_text()) == {
        'routing': 'dense',
        'layers': [0, 1],
        'num_routed': 3,
        'load_XZ': [[2, 0, 1, 1], pytest.approx([0.8, 0.4, 0.4, 2.4])],
        'largest_load_X': [2, 1.5],
    }


def test_a_short_held_out_text_is_named(printed):
    knobs = {'report.sample_tokens': 0, 'evaluation.final_batches': 3}
    out, _ = printed('none', **knobs)
    assert 'held-out batches' not in printed('none', **{'report.sample_tokens': 0})[0]
    assert '2 held-out batches, evaluation.final_batches=3 asks for more: for a more exact' in out


def test_an_extended_run_gets_a_baseline_of_its_own(tiny_config, tmp_path):
    """Regression: the suggested command trained that of the shorter run on."""
    run, other = make_run(tiny_config, tmp_path / 'run'), tmp_path / 'run-unrouted'
    for extended, made, name in (([], True, other), ([{}], False, other), ([{}], True, 'new')):
        run.summary['extended'] = extended
        other.mkdir(exist_ok=True) if made else other.exists() and other.rmdir()
        lines = '\n'.join(report._next_steps(run))
        name = f'{other}-123' if name == 'new' else name
        assert f'--workdir={name} ' in lines and f'{run.workdir} {name}\n' in lines


def test_run_of_experts_that_choose_has_a_gap(printed):
    """These experts look ahead in training: both losses and the experts per token are printed."""
    out, _ = printed('none', **expert_knobs(choice='expert', num_routed=4, num_noop=0))
    assert 'threshold (causal: the honest one)' in out and 'sees the future' in out
    assert 'nats (+0.29% of the loss): negligible' in out and 'A sample (threshold' in out
    assert '2.00 experts per token, 2 in training, 1 without a token\n' in out


@pytest.mark.parametrize(
    'changes',
    [
        {'model.routing.router': 'learned', 'data.held_out_fraction': 0.2},
        {'seed': 3},
        expert_knobs(),
        expert_knobs(num_noop=0) | {'model.routing.router': 'learned'},
        {'model.depth.stream': 'moda'},
    ],
)
def test_the_suggested_run_differs_in_one_mechanism(tiny_config, changes, tmp_path):
    """It has all knobs of the run, including overrides, except for one, and is a valid config."""
    hparams = from_config(tiny_config(**changes))
    _, knobs = report._counterpart(hparams)
    config = unresolved(ConfigDict(dataclasses.asdict(hparams)), tmp_path)
    config.update_from_flattened_dict(knobs)
    assert len(knobs) == 1
    other = from_config(config)
    assert (other.data, other.seed) == (hparams.data, hparams.seed)
    assert dataclasses.replace(hparams, model=other.model) == other != hparams


CONFIGS = [f'configs/{name}.py' for name in listing.configs() if name != 'base']
CONFIGS += [f'configs/moda.py:slots={slots}' for slots in ('attention', 'block', 'none')]
KNOBS = [  # of configs/tiny.py without routing, except where it is named
    {'model.depth.stream': 'moda', 'model.depth.slot_window': 2},
    {'model.depth.stream': 'moda', 'model.depth.attention_slot_projection': True},
    {'model.depth.stream': 'value_residual', 'model.depth.value_mix': 'sparse'},
    {'model.depth.stream': 'hyper_connections', 'model.depth.num_streams': 2},
    {'model.routing.router': 'norm', 'model.routing.causal_rule': 'dense'},
]


def suggested(hparams, workdir):
    """The arguments of the suggested training run, whose config.json exists; None without one."""
    open_workdir(workdir, dataclasses.asdict(hparams))
    summary = {'total_flops': run_flops(hparams, resolve_steps(hparams))}
    run = types.SimpleNamespace(workdir=workdir, hparams=hparams, summary=summary)
    text = '\n'.join(report._next_steps(run)).replace('\\\n', ' ')
    found = re.search('python -m launch.train (.*)', text)
    return found and shlex.split(found[1])


def test_the_suggested_command_is_valid_for_every_config(tmp_path):
    """Regression: that of a run planned by steps, of a routed loop or of other slots was refused.

    It spends the FLOPs of the run, whether steps or FLOPs determined these.
    """
    runs = {spec: from_config(config_file.load(spec)) for spec in CONFIGS}
    for knobs in KNOBS:
        config = tiny.get_config()
        config.update_from_flattened_dict({'model.routing.router': 'none'} | knobs)
        runs[str(knobs)] = from_config(config)
    lines = [suggested(hparams, tmp_path / str(n)) for n, hparams in enumerate(runs.values())]
    preload = 'launch.cli', 'launch.config_file', 'moddepth_jax.model.transformer'
    found = run_commands([['train', *line] for line in lines], ROOT, preload, parse_only=True)
    wrong = {spec: done.stderr for spec, done in zip(runs, found, strict=True) if done.status}
    assert not wrong
    for hparams, line in zip(runs.values(), lines, strict=True):
        given = dict(word.split('=', 1) for word in line)
        budget = hparams.flop_budget or float(given['--config.flop_budget'])
        assert 0.99 * budget < run_flops(hparams, resolve_steps(hparams)) <= 1.0001 * budget


def test_a_model_that_cannot_be_routed_has_no_suggested_run(tiny_config, tmp_path):
    """Loops that are drawn at random, or that tokens leave."""
    looped = {'model.looped_layers': 'all', 'model.loops': 2}
    for knobs in ({'training.loops': (1, 2)}, {'model.loop_exit_threshold': 0.1}):
        hparams = from_config(tiny_config(**looped | knobs))
        assert suggested(hparams, tmp_path / next(iter(knobs))) is None


@pytest.mark.parametrize(
    ('text', 'pieces'),
    [
        ('[bold red]x[/bold red] [/] [link=a]', ['  | [bold red]x[/bold red] [/] [link=a]\n']),
        ('\x1b[31mred\x1b]0;title\x07', ['red', 'title']),
    ],
)
def test_a_sample_is_printed_as_text(printed, text, pieces):
    """Brackets are not markup; control characters, which could steer a terminal, are dropped."""
    out, _ = printed('none', text)
    assert all(piece in out for piece in pieces)
    assert not {c for c in out if not c.isprintable()} - {'\n'}


def test_prompt_and_sample_are_cut_to_the_context(tiny_config):
    """Of 32 tokens, the separator and the prompt get at most half, and the sample gets the rest."""

    def tokens(prompt, sample_tokens):
        knobs = {'report.prompt': prompt, 'report.sample_tokens': sample_tokens}
        hparams = from_config(tiny_config(**knobs))
        return report.prompt_tokens(hparams, make_tokenizer('bytes'))

    assert tokens('dé', 0)[1] == 0
    assert tokens('dé', 8) == ([256, ord('d'), 0xC3, 0xA9], 8) and tokens('', 99) == ([256], 31)
    prompt, more = tokens('x' * 99, 99)
    assert (len(prompt), more) == (16, 16)
