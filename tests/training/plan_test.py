"""The plan of a run: stages, whole steps within the budget, ids that fit the vocabulary."""

import dataclasses

import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model import flops
from moddepth_jax.training import plan
from moddepth_jax.training.optimizer import learning_rate_schedule
from moddepth_jax.training.plan import loops_at, run_flops, stage_at, stage_starts
from moddepth_jax.training.run_dir import update_config
from tests.data import tokenizer_files
from tests.data.prepared_text import refusal

ROUTED = {'model.routing.router': 'learned', 'model.routing.layers': 'every:1'}
STAGED = ROUTED | {'model.routing.capacity_stages': '1:0.2,0.5:0.3'}
LOOPED = {'model.looped_layers': 'all', 'training.loops': (1, 2, 5)}
BY_THRESHOLD = {'model.routing.train_rule': 'threshold', 'model.routing.threshold_warmup': 0.4}


@pytest.mark.parametrize(
    ('num_steps', 'starts'),
    [
        (1, [(0, 0.125)]),
        (2, [(0, 0.5), (1, 0.125)]),
        (3, [(0, 1.0), (1, 0.5), (2, 0.125)]),
        (10, [(0, 1.0), (2, 0.5), (5, 0.125)]),
        (1000, [(0, 1.0), (200, 0.5), (500, 0.125)]),
    ],
)
def test_stages_begin_at_whole_steps(num_steps, starts, tiny_config):
    """At the rounded share of the steps; one without a step is omitted, the last one has a step."""
    hparams = from_config(tiny_config(**STAGED))
    found = stage_starts(hparams, num_steps)
    assert [(first, stage.capacity) for first, stage in found] == starts
    for step in range(min(num_steps, 20)):
        (capacity,) = [c for first, c in starts if first <= step][-1:]
        assert stage_at(hparams, num_steps, step).capacity == capacity
    assert stage_at(hparams, num_steps, num_steps).capacity == 0.125


@pytest.mark.parametrize('first_capacity', [1.0, 0.125])
def test_a_capacity_begins_where_it_changes(first_capacity, tiny_config):
    """Not where only the rule changes, and again if an earlier capacity returns."""
    stages = {'model.routing.capacity_stages': f'{first_capacity}:0.2,0.5:0.3'}
    hparams = from_config(tiny_config(**STAGED | BY_THRESHOLD | stages))
    assert [first for first, _ in stage_starts(hparams, 10)] == [0, 2, 4, 5]
    begun = [hparams.first_step_of_capacity(stage, 10) for stage in hparams.stages]
    assert begun == [0, 2, 2, 5]


@pytest.mark.parametrize('knobs', [STAGED, STAGED | BY_THRESHOLD, LOOPED])
def test_a_run_costs_the_sum_of_its_steps(knobs, tiny_config):
    hparams = from_config(tiny_config(**knobs))
    for num_steps in (1, 3, 7, 40):
        costs = [
            flops.train_step_flops(
                hparams, stage_at(hparams, num_steps, step), loops_at(hparams, num_steps, step)
            )
            for step in range(num_steps)
        ]
        for done in {0, 1, num_steps // 2, num_steps}:
            assert run_flops(hparams, num_steps, done) == pytest.approx(sum(costs[:done]))
        assert run_flops(hparams, num_steps) == pytest.approx(sum(costs))


def test_loops_are_drawn_for_each_step_of_a_seed_alike_in_a_longer_run(tiny_config):
    def drawn(num_steps, **knobs):
        hparams = from_config(tiny_config(**LOOPED, **knobs))
        return [loops_at(hparams, num_steps, step) for step in range(num_steps)]

    loops = drawn(600)
    assert loops[:50] == drawn(50) and loops != drawn(600, seed=1)
    assert all(160 < loops.count(n) < 240 for n in (1, 2, 5))
    assert loops_at(from_config(tiny_config()), 600, 3) == 0


@pytest.mark.parametrize('share', [1.0, 7.7, 90.0])
def test_a_budget_of_drawn_loops_is_filled_to_within_a_step(share, tiny_config):
    knobs = LOOPED | {'training.num_steps': 0}
    most = flops.train_step_flops(from_config(tiny_config(**knobs, flop_budget=1.0)), loops=5)
    hparams = from_config(tiny_config(**knobs, flop_budget=share * most))
    num_steps = plan.resolve_steps(hparams)
    assert run_flops(hparams, num_steps) <= share * most < run_flops(hparams, num_steps + 1)


@pytest.mark.parametrize('stages', ['', '1:0.2', '1:0.05,0.9:0.05,0.1:0.3,0.8:0.1', '0.01:0.7'])
@pytest.mark.parametrize('by_threshold', [False, True])
def test_a_budget_is_filled_to_within_a_step(stages, by_threshold, tiny_config):
    knobs = ROUTED | {'model.routing.capacity_stages': stages, 'training.num_steps': 0}
    knobs |= BY_THRESHOLD if by_threshold else {}
    hparams = from_config(tiny_config(**knobs, flop_budget=1.0))
    dearest = max(flops.train_step_flops(hparams, stage) for stage in hparams.stages)
    for times in np.random.default_rng(0).uniform(1, 60, 10):
        given = from_config(tiny_config(**knobs, flop_budget=float(times * dearest)))
        num_steps = plan.resolve_steps(given)
        assert run_flops(given, num_steps) <= times * dearest < run_flops(given, num_steps + 1)


@pytest.mark.parametrize('schedule', ['constant', 'wsd'])
def test_an_extension_changes_no_step_before_it(schedule, tiny_config):
    """The 20 first steps of 50 have the rates, until wsd decays, stages and costs that they had."""
    knobs = STAGED | BY_THRESHOLD | {'training.num_steps': 0, 'optimizer.schedule': schedule}
    knobs |= {'optimizer.warmup_fraction': 0.25}
    short, long = (
        from_config(tiny_config(**knobs, flop_budget=1.0, **{'training.extended_from': steps}))
        for steps in (0, 20)
    )
    budgets = [run_flops(short, 20), run_flops(long, 50)]
    assert run_flops(long, 50, 20) == budgets[0] and stage_starts(long, 50) == stage_starts(
        short, 20
    )
    for hparams, budget, num_steps in zip((short, long), budgets, (20, 50), strict=True):
        given = dataclasses.replace(hparams, flop_budget=budget)
        assert plan.resolve_steps(given) == num_steps
    rates, rates_long = (
        [float(learning_rate_schedule(hparams, num_steps)(step)) for step in range(16)]
        for hparams, num_steps in ((short, 20), (long, 50))
    )
    assert rates == rates_long


@pytest.mark.parametrize('schedule', ['constant', 'wsd'])
def test_an_earlier_end_changes_no_step_before_the_decay(schedule, tiny_config):
    """The 20 first steps of 22, planned as 50, have the rates, stages and costs of the 50."""
    knobs = STAGED | BY_THRESHOLD | {'training.num_steps': 0, 'optimizer.schedule': schedule}
    knobs |= {'optimizer.warmup_fraction': 0.25, 'flop_budget': 1.0}
    long, short = (
        from_config(tiny_config(**knobs, **{'training.extended_from': steps})) for steps in (0, 50)
    )
    assert [first for first, _ in stage_starts(long, 50)][-1] > 22
    for step in range(20):
        rates = [learning_rate_schedule(*run)(step) for run in ((short, 22), (long, 50))]
        assert rates[0] == rates[1] and stage_at(short, 22, step) == stage_at(long, 50, step)
    budget = run_flops(short, 22)
    assert budget == run_flops(long, 50, 22)
    assert stage_starts(short, 22) == [start for start in stage_starts(long, 50) if start[0] < 22]
    assert plan.resolve_steps(dataclasses.replace(short, flop_budget=budget)) == 22


@pytest.mark.parametrize(('share', 'word'), [(0.999, 'pays for no step'), (2.0**31, '2147483648')])
def test_a_budget_for_no_step_or_too_many_is_refused(tiny_config, share, word):
    """The step is an int32: a budget for 2^31 steps is refused, not wrapped around."""
    cost = flops.train_step_flops(from_config(tiny_config()))
    changes = {'training.num_steps': 0, 'flop_budget': share * cost}
    message = refusal(plan.resolve_steps, from_config(tiny_config(**changes)))
    assert 'flop_budget=' in message and word in message


def test_a_run_is_planned_with_the_tokenizer_that_it_stores(tiny_config, tmp_path):
    kept = tokenizer_files.byte_level()
    kept.save(tmp_path / 'tokenizer')
    for seed in range(4):
        (tmp_path / f'{seed}.txt').write_bytes(tokenizer_files.plain_text(seed, 400))
    changes = {'model.vocab_size': 320, 'data.tokenizer': '/nowhere/x.json'}
    hparams = from_config(tiny_config(**changes, **{'data.source': str(tmp_path / '*.txt')}))
    _, dataset, _ = plan.prepare_run(hparams, 'data=1', tmp_path)
    assert dataset.tokenizer.sha256 == kept.sha256
    assert dataset.train_batch(0)['tokens_BT'].max() > 256
    message = refusal(plan.prepare_run, hparams, 'data=1')
    assert "data.tokenizer='/nowhere/x.json'" in message and 'no such tokenizer' in message


def test_another_tokenizer_is_refused_when_a_run_resumes(tiny_config, tmp_path):
    """Regression: it was ignored, but written to config.json. An equal one may have moved."""
    kept, other = tokenizer_files.byte_level(), tmp_path / 'llama.json'
    kept.save(tmp_path / 'run' / 'tokenizer')
    kept.save(tmp_path / 'moved')
    other.write_text(tokenizer_files.llama_file())
    for seed in range(4):
        (tmp_path / f'{seed}.txt').write_bytes(tokenizer_files.plain_text(seed, 400))

    def hparams(tokenizer):
        changes = {'model.vocab_size': 400, 'data.tokenizer': str(tokenizer)}
        return from_config(tiny_config(**changes, **{'data.source': str(tmp_path / '*.txt')}))

    update_config(tmp_path / 'run', dataclasses.asdict(hparams('gone.json')))
    for same in ('gone.json', tmp_path / 'moved'):
        _, dataset, _ = plan.prepare_run(hparams(same), 'data=1', tmp_path / 'run')
        assert dataset.tokenizer.sha256 == kept.sha256
    message = refusal(plan.prepare_run, hparams(other), 'data=1', tmp_path / 'run')
    assert f"data.tokenizer={str(other)!r}: differs from 'gone.json', the tokenizer of" in message
    message = refusal(plan.prepare_run, hparams('nowhere.json'), 'data=1', tmp_path / 'run')
    assert "data.tokenizer='nowhere.json': " in message
