"""Constructed runs are grouped and compared, with warnings."""

import dataclasses
import json
import math

import numpy as np
import pytest
import scipy.stats

from configs import base
from moddepth_jax.studies import compare, store
from moddepth_jax.training.run_dir import CONFIG_FILE, open_workdir

LOSSES = {'mod': [2.0, 2.2, 2.1], 'dense': [2.1, 2.32, 2.19]}


@pytest.fixture
def make_run(tmp_path):
    """Write a finished run of three evaluations; returns its directory."""

    def write(name, bits, knobs=(), **changes):
        config = base.get_config()
        for knob, value in dict(knobs).items():
            config.update_from_flattened_dict({knob: value})
        path = tmp_path / name
        open_workdir(path, json.loads(config.to_json()))
        stages = [
            {'first_step': 0, 'flops_per_step': 8.0},
            {'first_step': 6, 'flops_per_step': 2.0},
        ]
        summary = {
            'eval': {'loss': bits * np.log(2), 'bits_per_byte': bits, 'routing_gap': 0.001},
            'parameters': 1000,
            'active_parameters': 1000,
            'final_step': 10,
            'total_flops': 56.0,
            'flops_per_step': 2.0,
            'seconds': 5.0,
            'stages': stages,
            'corpus_sha256': 'aa',
            'versions': {'device': 'cpu'},
        }
        (path / 'summary.json').write_text(json.dumps(summary | changes))
        rows = [{'step': s, 'loss': 3 - s / 9, 'tokens_per_second': 10.0 * s} for s in (2, 6, 10)]
        rows += [{'step': 10, 'eval/bits_per_byte': bits}]
        (path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
        return str(path)

    return write


@pytest.fixture
def paths(make_run):
    """Three seeds of two models."""
    router = {'mod': 'learned', 'dense': 'none'}
    return [
        make_run(f'{name}{seed}', bits, {'seed': seed, 'model.routing.router': router[name]})
        for name, losses in LOSSES.items()
        for seed, bits in enumerate(losses)
    ]


def read(paths):
    return compare.group_by_config([compare.read_run(path) for path in paths])


def test_runs_that_differ_only_in_seed_are_one_variant(paths):
    """In any order, and with any prompt of the sample."""
    variants = read(paths[::-1])
    assert [variant.seeds for variant in variants] == [[0, 1, 2]] * 2
    assert compare.differing_knobs(variants) == {'model.routing.router': ['none', 'learned']}


def _with_seed(run, seed):
    return dataclasses.replace(run, knobs=run.knobs | {'seed': seed})


def test_equal_seeds_are_compared_in_pairs(paths):
    """The interval is scipy's t interval over common seeds, and Welch's with less than two."""
    mod, dense = read(paths)
    found, count = dense.minus(mod)
    pairs = scipy.stats.ttest_rel(LOSSES['dense'], LOSSES['mod']).confidence_interval()
    np.testing.assert_allclose(found, [0.31 / 3, pairs.low, pairs.high])
    assert count == 3
    two = read(paths[:2])[0]
    found, count = dense.minus(two)
    pairs = scipy.stats.ttest_rel(LOSSES['dense'][:2], LOSSES['mod'][:2]).confidence_interval()
    np.testing.assert_allclose(found[1:], pairs)
    assert count == 2
    others = dataclasses.replace(
        two, runs=tuple(_with_seed(run, 9 + run.knobs['seed']) for run in two.runs)
    )
    found, count = dense.minus(others)
    welch = scipy.stats.ttest_ind(LOSSES['dense'], LOSSES['mod'][:2], equal_var=False)
    np.testing.assert_allclose(found[1:], welch.confidence_interval())
    assert count == 0


def test_rows_hold_the_spread_and_the_costs(paths):
    mod, dense = compare.describe(read(paths))
    assert mod['std_bits_per_byte'] == pytest.approx(0.1)
    assert mod['tokens_per_second'] == 60 and 'difference' not in mod
    assert dense['difference']['mean'] == pytest.approx(0.31 / 3)


def test_forward_flops_are_those_of_the_model_alone(make_run, paths):
    """Regression: with a teacher, a third of its forward pass was added to those of the model.

    Summaries of older runs have only the FLOPs of a step, which include the teacher's.
    """
    taught = {'training.distill_from': 'runs/dense', 'seed': 3}
    for name, summary, knobs, flops in (
        ('taught', {'flops_per_forward': 0.5}, taught, 0.5),
        ('older', {}, taught, None),
        ('alone', {}, {}, 2 / 3),
    ):
        variants = read([make_run(name, 2.0, knobs, **summary)])
        rows = compare.describe(variants)
        assert rows[0]['flops_per_forward'] == flops
        (table,) = compare.tables(variants, rows)
        assert (table.lines['forward FLOPs a batch'] == ['n/a']) == (flops is None)


def test_runs_that_differ_only_in_rounding_are_one_variant(make_run):
    """Regression: runs from before model.remat=elementwise were not grouped with later ones."""
    forms = ('block', 'elementwise')
    made = [
        make_run(form, 2.0, {'seed': seed, 'model.remat': form}) for seed, form in enumerate(forms)
    ]
    (variant,) = read(made)
    assert variant.seeds == [0, 1]


def test_flops_follow_the_stages(paths):
    run = compare.read_run(paths[0])
    found = store.flops_at(run.summary, np.array([0, 3, 6, 10]))
    np.testing.assert_allclose(found, [0, 24, 48, 56])


@pytest.mark.parametrize(
    ('change', 'knobs', 'part'),
    [
        ({'corpus_sha256': 'bb'}, {}, 'texts differ'),
        ({'total_flops': 60.0}, {}, 'factor of 1.07'),
        ({'versions': {'device': 'gpu'}}, {}, 'devices differ'),
        ({'eval': {'loss': 1, 'bits_per_byte': 1, 'routing_gap': 0.06}}, {}, '0.060 nats'),
        ({}, {'data.sequence_length': 64}, 'rows differ'),
        (
            {'eval': {'loss': 1, 'bits_per_byte': 1, 'routing_gap': 0, 'targets': 9}},
            {},
            'numbers of held-out targets differ',
        ),
        ({}, {'data.held_out_fraction': 0.3}, 'values of data.held_out_fraction differ'),
        ({}, {'model.num_layers': 3}, 'one seed'),
    ],
)
def test_runs_that_cannot_be_compared_have_a_warning(make_run, change, knobs, part):
    runs = make_run('one', 2.0), make_run('two', 2.1, knobs | {'seed': 1}, **change)
    assert any(part in line for line in compare.warnings(read(runs)))


def test_comparable_runs_have_no_warning(paths):
    assert not compare.warnings(read(paths))


def test_a_diverged_run_is_shown(make_run):
    """Its loss is null in summary.json."""
    lost = make_run('lost', 2.0, eval={'loss': None, 'bits_per_byte': None})
    for paths in ([lost], [lost, make_run('kept', 2.0, {'seed': 1})]):
        variants = read(paths)
        (table,) = compare.tables(variants, compare.describe(variants))
        assert table.lines['bits per byte, held out'] == ['n/a']


def test_seeds_that_log_or_save_at_other_times_are_one_variant(make_run):
    knobs = {'seed': 1, 'training.log_every': 7, 'training.checkpoint_every': 3}
    assert len(read([make_run('one', 2.0), make_run('two', 2.1, knobs)])) == 1


def test_refusals_are_one_line(make_run, paths, tmp_path):
    with pytest.raises(ValueError, match='have the same config and seed'):
        read([paths[0], paths[0]])
    with pytest.raises(ValueError, match=f'nothing: holds no {CONFIG_FILE}'):
        compare.read_run(str(tmp_path / 'nothing'))
    (tmp_path / 'mod0' / 'summary.json').unlink()
    with pytest.raises(ValueError, match='finish it: python -m launch.train'):
        compare.read_run(paths[0])
    file = tmp_path / 'mod1' / 'summary.json'
    summary = json.loads(file.read_text())
    for changes, words in (
        (None, 'cannot be read'),
        ({'seconds': [1]}, r'seconds=\[1\]; must be a finite number'),
        ({'total_flops': math.inf}, 'total_flops=inf; must be a finite number'),
        ({'parameters': 10**400}, 'parameters=1000.*; must be an integer'),
        ({'stages': [{'first_step': None}]}, 'stages: 0: first_step=None; must be an integer'),
        ({'eval': {'loss': 'low'}}, "eval: loss='low'; must be a finite number"),
    ):
        file.write_text(json.dumps(summary | changes) if changes else '{')
        with pytest.raises(ValueError, match=rf'summary.json: {words}.*; remove it and start') as e:
            compare.read_run(paths[1])
        assert '\n' not in str(e.value)


def test_curves_show_every_run(paths, tmp_path):
    compare.draw_curves(read(paths), tmp_path / 'compare.png')
    assert (tmp_path / 'compare.png').read_bytes().startswith(b'\x89PNG')


def test_losses_on_other_text_are_not_subtracted(make_run):
    """Nor is an interval named where one seed gives none."""
    base = make_run('base', 2.0)
    evaluation = {'loss': 1.4, 'bits_per_byte': 2.1, 'routing_gap': None, 'targets': 3}
    other = make_run('other', 2.1, {'evaluation.final_batches': 3}, eval=evaluation)
    longer = make_run('longer', 1.9, {'model.num_layers': 7, 'flop_budget': 193147700000.0})
    variants = compare.group_by_config([compare.read_run(path) for path in (base, other, longer)])
    rows = compare.describe(variants)
    assert ['difference' in row for row in rows] == [False, False, True]
    (table,) = compare.tables(variants, rows)
    assert table.lines['difference'] == ['base', 'other held-out text', '-0.1000']
    assert '193147700000' in table.lines['flop_budget']
