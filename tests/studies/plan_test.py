"""The runs of a study, and how losses determine the next runs."""

import dataclasses

import pytest

from configs import base
from launch.study_config import StudyConfig
from moddepth_jax.hparams import from_config
from moddepth_jax.studies.plan import (
    DIVERGED,
    VARIANTS,
    Plan,
    PlannedRun,
    Study,
    Variant,
    nearest_depth,
)

STUDY = Study(
    kind='flops',
    budgets=(4e9, 1e9),
    sizes=('2x64', '4x64', '2x128'),
    variants=('dense', 'shallow', 'mod', 'random', 'norm'),
    seeds=(5, 6, 7),
    learning_rates=(0.002, 0.004),
)
HALF = {'2x64': '1x64', '4x64': '2x64', '2x128': '1x128'}


def plan_of(**changes):
    return Plan(dataclasses.replace(STUDY, **changes), HALF.__getitem__)


def all_runs(plan, loss):
    losses = {}
    for _ in range(4):
        runs, complete = plan.runs(losses)
        if complete and all(run.name in losses for run in runs):
            return runs
        losses |= {run.name: loss(run) for run in runs}
    raise AssertionError('a plan of more than three rounds')


def loss_of(run):
    """Lowest for 4x64, by learning rate 0.004 at width 64 and 0.002 at width 128."""
    best_rate = {'64': 0.004, '128': 0.002}[run.size.split('x')[1]]
    return 1 + (run.size != '4x64') * 0.1 + (run.learning_rate != best_rate) * 0.01


def test_rates_are_tuned_with_the_dense_model_at_the_smallest_budget_once_per_width():
    runs, complete = plan_of().runs({})
    assert not complete
    assert {(run.variant, run.size, run.budget, run.learning_rate, run.seed) for run in runs} == {
        ('dense', size, 1e9, rate, 5) for size in ('2x64', '2x128') for rate in (0.002, 0.004)
    }
    losses = {run.name: loss_of(run) for run in runs}
    assert plan_of().learning_rates(losses) == {64: 0.004, 128: 0.002}
    losses |= {run.name: DIVERGED for run in runs if run.learning_rate == 0.004}
    assert plan_of().learning_rates(losses) == {64: 0.002, 128: 0.002}


def test_three_variants_run_at_every_size_with_the_first_seed():
    """The others run at the best size."""
    runs = all_runs(plan_of(), loss_of)[len(plan_of().tuning()) :]
    for variant in STUDY.variants:
        sizes = STUDY.sizes if variant in ('dense', 'shallow', 'mod') else ('4x64',)
        mine = [run for run in runs if run.variant == variant]
        first = sorted((run.size, run.budget) for run in mine if run.seed == 5)
        assert first == sorted((size, budget) for size in sizes for budget in (1e9, 4e9))
        best = {run.size for run in mine if run.at_best_size}
        assert best == {'4x64'} or variant in ('dense', 'shallow')


def test_other_seeds_run_only_at_the_best_sizes_of_the_largest_budget():
    plan = plan_of()
    runs = all_runs(plan, loss_of)[len(plan.tuning()) :]
    for variant in STUDY.variants:
        others = {(run.size, run.budget, run.seed) for run in runs if run.variant == variant}
        others = {run for run in others if run[2] != 5}
        assert others == {('4x64', 4e9, seed) for seed in (6, 7)} or variant in ('dense', 'shallow')
        assert len(others) == 2
    assert len({run.name for run in runs}) <= len(plan.max_runs())


def test_one_layer_sizes_only_run_unrouted_variants():
    plan = plan_of(sizes=('1x64', '2x64', '4x64'), variants=('dense', 'shallow', 'mod', 'random'))
    for runs in (all_runs(plan, loss_of), plan.examples()):
        assert {run.variant for run in runs if run.size == '1x64'} == {'dense'}


def test_max_runs_bounds_the_number_of_different_runs():
    plan = plan_of()
    for loss in (loss_of, lambda run: 1 + len(run.name) / 100, lambda run: hash(run.trained) % 7):
        names = {run.name for run in all_runs(plan, loss)}
        assert len(names) <= len(plan.max_runs())
    # The tuned variant runs later at another size than the one that is tuned.
    tuned = plan_of(variants=('norm', 'mod'), sizes=('2x64', '4x64'))
    runs = all_runs(tuned, lambda run: 1 + (run.trained != '4x64'))
    assert len({run.name for run in runs}) <= len(tuned.max_runs())
    # A shallower dense model that is one of the dense sizes is trained once for both.
    alone = plan_of(variants=('dense', 'mod', 'random'))
    names = {run.name for run in all_runs(alone, loss_of)}
    assert len(names) == len(alone.max_runs())


def test_the_cost_of_the_plan_bounds_that_of_its_runs():
    """At the sizes that runs of a chosen size may get, which differ in cost at equal steps."""
    plan = plan_of()

    def cost(run):
        layers, width = map(int, run.trained.split('x'))
        return layers * width**2

    most = sum(max(map(cost, plan.possible_sizes(run))) for run in plan.max_runs())
    for best in STUDY.sizes:
        runs = all_runs(plan, lambda run, best=best: 1 + (run.trained != best))
        chosen = {run.name: run for run in runs}
        assert sum(map(cost, chosen.values())) <= most
        known = plan.max_runs({name: 1 + (run.trained != best) for name, run in chosen.items()})
        assert {run.name for run in known} == chosen.keys()


def test_two_sizes_of_mod_with_the_same_shallower_model_are_both_filed():
    """Regression: only the larger one had a row, and its control was not found at the other."""
    shallower = {'2x64': '1x64', '3x64': '2x64', '4x64': '2x64'}
    variants = ('dense', 'shallow', 'mod')
    study = dataclasses.replace(STUDY, sizes=tuple(shallower), variants=variants)
    for best in ('3x64', '4x64'):
        runs = all_runs(
            Plan(study, shallower.get), lambda run, best=best: 1 + (run.trained != best)
        )
        filed = {(run.size, run.budget) for run in runs if run.variant == 'shallow'}
        assert filed == {(size, budget) for size in shallower for budget in (1e9, 4e9)}


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'budgets': ()}, 'budgets'),
        ({'budgets': (1e9, 1e9)}, 'budgets'),
        ({'budgets': (-1.0,)}, '^budgets=-1: must be numbers above 0'),
        ({'kind': 'steps', 'budgets': (0, 600)}, '^steps=0,600: must be numbers above 0'),
        ({'learning_rates': (float('nan'),)}, '^learning_rates=nan: must be numbers above 0'),
        ({'variants': ('mood',)}, 'mood'),
        ({'variants': ('dense', 'shallow')}, 'add mod'),
        ({'seeds': (0, 2**32)}, r'^seeds=4294967296: must lie in \[0, 2\*\*32\)'),
        ({'sizes': ('1x64', '1x128')}, '^sizes=1x64,1x128: mod needs a size of two layers or more'),
    ],
)
def test_impossible_studies_are_refused_in_one_line(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(STUDY, **changes)


def test_a_variant_that_leaves_the_model_to_the_config_is_refused(monkeypatch):
    """Regression: a KeyError."""
    monkeypatch.setitem(VARIANTS, 'mine', Variant('mine', {'model.d_ff': 128}, 'rose h'))
    right = r"model.routing.router must be set; start from mod_knobs\(\) or from VARIANTS\['dense"
    with pytest.raises(ValueError, match=f'^variants=mine: {right}'):
        dataclasses.replace(STUDY, variants=('dense', 'mine'))


def test_every_variant_is_a_valid_config():
    for name, variant in VARIANTS.items():
        config = base.get_config()
        config.training.num_steps = 1
        config.update_from_flattened_dict(variant.changes)
        model = from_config(config).model
        routed = variant.changes['model.routing.router'] != 'none'
        assert bool(model.routed_layers) == routed, name


@pytest.mark.parametrize(
    'control, routed, router',
    [
        ('random', 'mod', 'random'),
        ('position', 'mod', 'position'),
        ('norm', 'mod', 'norm'),
        ('random_every_0.5', 'every_0.5', 'random'),
        ('aux_loss', 'mod', 'learned'),
        ('threshold', 'mod', 'learned'),
        ('sigmoid', 'mod', 'learned'),
        ('straight_through', 'mod', 'straight_through'),
    ],
)
def test_a_control_differs_only_in_the_choice_of_tokens(control, routed, router):
    changes = [VARIANTS[name].changes for name in (control, routed)]
    of_choice = {f'model.routing.{knob}' for knob in ('router', 'gate', 'causal_rule')}
    first, second = ({k: v for k, v in each.items() if k not in of_choice} for each in changes)
    assert first == second and first['model.routing.capacity'] in (0.125, 0.5)
    assert changes[0]['model.routing.router'] == router


@pytest.mark.parametrize('file', ['study', 'moda', 'moe'])
def test_variants_of_a_seed_read_the_same_batches_and_train_alike(file):
    """Everything but the model is equal: batches depend on these knobs, the seed and the step."""
    kind, found = 'steps' if file == 'moda' else 'flops', []
    config = StudyConfig(f'configs/{file}.py', {}, kind)
    for variant in ('dense', 'mod', 'moda_projection', 'average', 'random', 'moda_post', 'staged'):
        run = PlannedRun(variant, '4x64', '4x64', 2e12 if file != 'moda' else 600, 0.006, 7)
        found.append(dataclasses.replace(config.hparams(run), model=None))
    assert found[1:] == found[:-1] and found[0].seed == 7


def test_nearest_depth_by_flops():
    assert nearest_depth({1: 10.0, 2: 20.0, 3: 30.0}, 24.0) == 2
    assert nearest_depth({1: 10.0, 2: 20.0}, 15.0) == 1
