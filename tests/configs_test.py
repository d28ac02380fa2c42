"""Every experiment of configs/ is listed, checked and traced, and budgets become steps."""

import ast
import dataclasses
import functools
import importlib
import pathlib
import re

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import base, sizes
from launch import listing
from moddepth_jax.analysis.report import prompt_tokens
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.mesh import check_batch, make_mesh
from moddepth_jax.training.plan import check_vocabulary, resolve_steps
from moddepth_jax.training.train_step import init_state, train_step

FOLDER = pathlib.Path(base.__file__).parent
MODULES = {
    path.stem: importlib.import_module(f'configs.{path.stem}') for path in FOLDER.glob('*.py')
}
EXPERIMENTS = sorted(name for name, module in MODULES.items() if hasattr(module, 'get_config'))
EXPERTS = ('moe', 'mode_staged', 'mode_integrated')
ISOFLOP = [name for name in EXPERIMENTS if name.endswith('_isoflop') or name in EXPERTS]
# Each differs only in sizes from one or two other experiments.
SIMILAR = (
    *('depth_average', 'imported', 'mod_isoflop_gpu', 'mod_isoflop_paper'),
    *('moda_24l', 'moda_48l', 'moda_700m', 'moda_1b5', 'mode_staged', 'openmythos_moda', 'study'),
)
# Many unrolled layers, or many parts: tracing takes seconds. tests/model traces these parts.
LONG = ('depth_dense', 'mod_moda', 'mor', 'value_attention')
ARGUMENTS = ['', 'size=8x192,budget=1e14', 'budget=5e11,size=2x128']


def names(config, prefix=''):
    """Yield the dotted names of all knobs."""
    for name, value in config.items():
        inner = isinstance(value, ConfigDict)
        yield from names(value, f'{prefix}{name}.') if inner else [prefix + name]


def hparams_of(name, *arguments):
    """Return Hparams of an experiment. base has neither steps nor a budget, so it gets a step."""
    config = MODULES[name].get_config(*arguments)
    if name == 'base':
        config.training.num_steps = 1
    return from_config(config)


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_an_experiment_is_base_with_differences(name):
    """It has exactly the knobs of base, and its docstring has its command."""
    assert set(names(MODULES[name].get_config())) == set(names(base.get_config()))
    command = f'python -m launch.train --config=configs/{name}.py'
    if name == 'imported':  # its checkpoint is converted first
        command = 'python -m launch.convert --from_hf=FOLDER --workdir=runs/imported --config='
    assert name == 'base' or command in MODULES[name].__doc__


def test_every_knob_and_config_is_listed():
    """--list has each knob of base.py with its default and comment, and each config."""
    config, knobs = base.get_config(), listing.knobs()
    assert set(knobs) == set(names(config)) and list(listing.configs()) == EXPERIMENTS
    for name, (default, comment) in knobs.items():
        value = functools.reduce(getattr, name.split('.'), config)
        assert (default if isinstance(value, str) else ast.literal_eval(default)) == value
        assert len(comment) > 3, name
    everything = listing.describe()
    assert all(re.search(rf'^  {name} +\S', everything, re.MULTILINE) for name in EXPERIMENTS)
    assert all(name.split('.')[-1] in everything for name in knobs)
    assert len(everything.splitlines()) <= 72  # a screen
    assert 'router=none' in listing.describe('routing') and 'num_heads' not in listing.describe('q')
    assert MODULES['tiny'].__doc__.strip() in listing.describe('tiny')


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SIMILAR + LONG else [])
        for name in EXPERIMENTS
    ],
)
def test_an_experiment_is_traced_at_its_own_shapes(name):
    """Parameters get shapes and the train step is traced, without compiling or computing."""
    hparams = hparams_of(name)
    state = jax.eval_shape(lambda: init_state(hparams, resolve_steps(hparams)))
    rows = jax.ShapeDtypeStruct((hparams.data.batch_size, hparams.data.sequence_length), np.int32)
    batch = {part: rows for part in ('tokens_BT', 'labels_BT', 'segment_ids_BT')}
    after, metrics = jax.eval_shape(train_step, state, batch)
    assert str(after) == str(state) and metrics['loss'].shape == ()
    model = hparams.model
    assert state.params['embedding'].shape == (model.vocab_size, model.d_model)


@pytest.mark.parametrize('name', EXPERIMENTS)
def test_an_experiment_passes_the_checks_of_a_run(name):
    """A run on one device accepts its vocabulary, prompt and batch."""
    hparams = hparams_of(name)
    tokenizer = make_tokenizer(hparams.data.tokenizer)
    check_vocabulary(hparams, tokenizer)
    assert prompt_tokens(hparams, tokenizer)[1] == hparams.report.sample_tokens  # not shortened
    check_batch(make_mesh('data=1'), hparams.data.batch_size, hparams.training.accumulate_steps)


@pytest.mark.parametrize('arguments', ARGUMENTS)
@pytest.mark.parametrize('name', ISOFLOP)
def test_steps_follow_from_the_budget(name, arguments):
    """Steps are floor(budget / cost). A hundred or more spend over 99% of the budget."""
    hparams = hparams_of(name, arguments)
    if arguments:
        given = dict(pair.split('=') for pair in arguments.split(','))
        assert hparams.flop_budget == float(given['budget'])
        assert given['size'] == f'{hparams.model.num_layers}x{hparams.model.d_model}'
    steps, cost = resolve_steps(hparams), train_step_flops(hparams)
    assert steps * cost <= hparams.flop_budget < (steps + 1) * cost
    assert steps < 100 or steps * cost > 0.99 * hparams.flop_budget
    assert arguments or steps > 100


def test_the_two_models_of_a_size_differ_in_routing_only():
    """MoD routes every other block at capacity 0.125. Shape, data and budget are equal."""
    routed, dense = (hparams_of(name, 'size=8x192') for name in ('mod_isoflop', 'dense_isoflop'))
    assert routed.model.routed_layers == (1, 3, 5, 7) and dense.model.routed_layers == ()
    assert routed.model.routing.capacity == 0.125
    model = dataclasses.replace(routed.model, routing=dense.model.routing)
    assert dataclasses.replace(routed, model=model) == dense
    assert train_step_flops(routed) < train_step_flops(dense)


def test_models_with_experts_of_a_size_differ_in_one_thing():
    """A token's experts are as wide as the dense mlp. Staged adds routing, integrated no-ops."""
    dense = hparams_of('dense_isoflop', 'size=6x192')
    moe, staged, integrated = (hparams_of(name, 'size=6x192') for name in EXPERTS)
    experts = moe.model.experts
    active = (experts.num_shared + experts.top_k) * experts.d_ff
    assert 0 <= dense.model.d_ff - active < 3
    assert (experts.choice, experts.num_routed, experts.num_noop) == ('token', 8, 0)
    assert moe.model.expert_layers == tuple(range(moe.model.num_layers))
    assert train_step_flops(moe) == pytest.approx(train_step_flops(dense), rel=0.03)
    assert staged.model.experts == experts
    assert staged.model.routing == hparams_of('mod_isoflop').model.routing
    assert integrated.model.experts == dataclasses.replace(experts, num_noop=8)
    assert integrated.model.routing == moe.model.routing
    assert train_step_flops(staged) < train_step_flops(integrated) < train_step_flops(moe)


def test_arguments_of_moe():
    """A capacity is a share of T k / E = 64 tokens of a row. Balance and choice are as given."""
    for capacity, tokens in (('1', 0), ('0.5', 32), ('0.51', 32), ('0.001', 1)):
        assert hparams_of('moe', f'capacity={capacity}').model.experts.row_capacity == tokens
    assert hparams_of('moe', 'balance=0').model.experts.balance_weight == 0
    for name in ('moe', 'mode_staged'):
        given = hparams_of(name, 'choice=expert,balance=0.25').model.experts
        assert (given.choice, given.balance_weight) == ('expert', 0.25)


def test_parameters_of_openmythos_moda():
    """7.319B parameters, 1.298B of them active, as its docstring says."""
    hparams = hparams_of('openmythos_moda')
    model, experts = hparams.model, hparams.model.experts
    params = jax.eval_shape(lambda: init_state(hparams, 10)).params
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    unused = model.num_layers * (experts.num_routed - experts.top_k)
    active = total - unused * 3 * model.d_model * experts.d_ff
    assert (total, active) == (7_318_636_544, 1_297_713_152)


def test_a_size_fixes_the_shape():
    """Heads fill the width, and the mlp is 8/3 of it, rounded up."""
    for width in (64, 128, 768):
        config = base.get_config()
        sizes.apply_size(config, f'6x{width}')
        model = config.model
        assert model.num_heads * model.head_dim == width == model.d_model
        assert 0 <= model.d_ff - 8 * width / 3 < 64


BAD_SIZES = ('6', '6x', 'x128', '0x128', '6x0', '6x100', '-6x128', '6x128x2', '²x128', '')
BAD_BUDGETS = ('', '0', '-1e12', 'much', 'inf', 'nan')
BAD_ARGUMENTS = [
    *((name, 'size', value) for name in ISOFLOP for value in BAD_SIZES),
    *((name, 'budget', value) for name in ISOFLOP for value in BAD_BUDGETS),
    *(('moe', 'capacity', value) for value in ('0', '1.5', 'half', 'nan')),
    *(('moe', 'balance', value) for value in ('-1', 'inf')),
    *(('moe', 'choice', 'none'), ('openmythos_moda', 'size', '4x64')),
]
UNKNOWN = [('mod_isoflop', 'bugdet'), ('mode_staged', 'capacity'), ('mode_integrated', 'choice')]


def test_a_bad_argument_is_one_line():
    """The one-line error has the argument as it was given."""
    for name, key, value in BAD_ARGUMENTS:
        with pytest.raises(ValueError, match=rf'^{key}={re.escape(repr(value))}: [^\n]*$'):
            MODULES[name].get_config(f'{key}={value}')
    for name, key in UNKNOWN:
        with pytest.raises(ValueError, match=f'^{key!r}: no such config argument; it takes'):
            MODULES[name].get_config(f'{key}=1')
