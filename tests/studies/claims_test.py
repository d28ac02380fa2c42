"""Every judge can give each verdict, and gives none without its seeds; the table of claims."""

import collections
import functools
import inspect
import itertools
import json
import math
import pathlib
import re

import numpy as np
import pytest

from moddepth_jax.studies import claims
from moddepth_jax.studies.blind import blind_check
from moddepth_jax.studies.claims import CLAIMS, JUDGES
from moddepth_jax.studies.judges import FAILS, HOLDS, UNDECIDED
from moddepth_jax.studies.places import BEST_DENSE, Evidence
from moddepth_jax.studies.plan import VARIANTS
from moddepth_jax.studies.run_numbers import NUMBERS, accuracy, first_token_of_sequence
from moddepth_jax.training.tables import replace_between

ROOT = pathlib.Path(__file__).parents[2]
FORWARD = {'mod': 0.6, 'shallow': 0.5, 'every_0.5': 0.55}  # FLOPs over the dense model of that size
CAPACITIES = {'mod_0.95': 0.95, 'mod_0.75': 0.75, 'mod_0.5': 0.5, 'mod_0.25': 0.25}
BY_ID = {claim.id: claim for claim in CLAIMS}
COMPARED = [claim for claim in CLAIMS if claim.judge == 'lower_loss']
NOISE = 1e-3  # of a variant at one seed


def a_study(spec, losses, seeds=None, noise=NOISE, steps=600, draw=0, **of_rows):
    """study.json of a place with a mean of bits per byte by 'variant size' (size of the place).

    All variants of a seed share a shift that is much larger than their noise. Where each variant is
    at its own best size it comes with bad models of two more, so that the best lies between them.
    `of_rows`: fields of every row; a function is called with the seed.
    """
    generator, rows, own = np.random.default_rng(draw), [], spec.size or '4x64'
    seeds = range(spec.seeds) if seeds is None else seeds
    if not spec.size:
        edges = itertools.product({name.partition(' ')[0] for name in losses}, ('2x64', '31x64'))
        losses = {f'{variant} {size}': 9.0 for variant, size in sorted(edges)} | losses
    for name, mean in losses.items():
        variant, _, size = name.partition(' ')
        layers, width = map(int, (size or own).split('x'))
        parameters = 12 * layers * width**2
        flops = parameters * FORWARD.get(variant, 1.0)
        for seed in seeds:
            bits = mean + 0.5 * math.sin(seed) + noise * generator.standard_normal()
            row = {'run': f'{variant}-{size or own}-{spec.budget:g}-seed{seed}', 'variant': variant}
            row |= {'size': size or own, 'budget': spec.budget, 'seed': seed, 'steps': steps}
            row |= {'flops_per_step': 3 * flops, 'flops_per_forward': flops, 'epochs': 0.5}
            row |= {'total_flops': 3 * flops * steps, 'parameters': parameters}
            row |= {'bits_per_byte': bits, 'loss': bits, 'at_best_size': mean < 9}
            row |= {'routing': routing(0.1, 0.9, 0.8, layers // 2), 'routing_gap': 0.0}
            row |= {'loss_top_c': 1.0, 'state_sha256': row['run']}
            row |= {k: value(seed) if callable(value) else value for k, value in of_rows.items()}
            rows.append(row)
    variants = {row['variant'] for row in rows}
    changes = {name: {'model.routing.capacity': CAPACITIES.get(name, 0.125)} for name in variants}
    study = {'kind': 'steps' if spec.steps else 'flops', 'config': 'configs/study.py'}
    study |= {'budgets': [spec.budget], 'runs': rows, 'seeds': list(range(spec.seeds))}
    study |= {'tuning': [], 'sizes': [spec.size] if spec.size else ['2x64', '4x64', '31x64']}
    study |= {'variants': {name: {'label': name, 'changes': changes[name]} for name in variants}}
    study |= {'corpus': 'stdlib', 'missing': [], 'diverged': []}
    study['versions'] = {'python': '3.11', 'jax': '0.10.2', 'device': 'cpu'}
    return study | {'batch_tokens': 1024, 'sequence_length': 128}


def routing(wanted, precision, recall, layers=2):
    """The rule wants this share of the tokens, and the cap refuses a tenth of them."""
    layer = {'rule_fraction': wanted, 'selected_fraction': 0.9 * wanted}
    layer |= {'precision': precision, 'recall': recall}
    return {f'layer_{number:02}': layer for number in range(layers)}


def fill(evidence):
    """The rows of all claims."""
    return claims.fill(claims.judge(evidence), evidence)


def judged(name, losses=None, measures=None, change=None, **of_study):
    """The row of one claim, and what it is judged by, from a study of its place."""
    claim = BY_ID[name]
    study = a_study(claim.spec, losses, **of_study)
    if change:
        change(study)
    place = f'cpu/{claim.spec.study}/part'
    evidence = Evidence({place: study}, {place: measures(study) if measures else {}}, {})
    return next(row for row in fill(evidence) if row['id'] == name)


def names_of(claim):
    """The variants that a comparison takes."""
    return [claim.args[name].replace(BEST_DENSE, 'dense') for name in ('first', 'second')]


def variants_of(claim):
    """The set of all variants that a claim names, BEST_DENSE among them."""
    args = (claim.args.get(name, []) for name in ('first', 'second', 'others', 'variants'))
    return set(itertools.chain(*([arg] if isinstance(arg, str) else arg for arg in args)))


@pytest.mark.parametrize('claim', COMPARED[::3], ids=lambda claim: claim.id)
def test_differences_are_judged_in_pairs(claim):
    """A difference far below the spread over seeds is decided, because pairs share the spread."""
    cost = claim.args.get('least_cost'), claim.args.get('most_cost')
    bound = 2.0 * claim.args.get('margin', 0.0)
    for difference, verdict in ((-0.2, HOLDS), (0.2, FAILS), (1e-5, UNDECIDED)):
        losses = dict(zip(names_of(claim), (2 + bound + difference, 2.0), strict=True))
        row = judged(claim.id, losses)
        if claim.spec.seeds < 5 and verdict != UNDECIDED:
            assert row['verdict'] in (verdict, UNDECIDED) and 'Holm' in row['reason']
        elif cost == (None, None):
            assert row['verdict'] == verdict, row


def only(losses, seeds, name='learned_beats_random'):
    return judged(name, losses, seeds=seeds)


def test_only_planned_seeds_judge():
    """Fewer seeds give no verdict, and extra seeds or seeds that a variant lacks do not count."""
    losses = {'mod': 2.0, 'random': 2.2}
    assert BY_ID['learned_beats_random'].spec.seeds == 16
    assert only(losses, range(16))['verdict'] == HOLDS
    assert only(losses, range(15))['reason'].startswith('15 of the 16 planned seeds')
    more = only(losses, range(20))
    assert more['verdict'] == HOLDS and more['spread'].count(',') == 2 * 15

    def lose_one(study):
        study['runs'] = [r for r in study['runs'] if (r['variant'], r['seed']) != ('random', 3)]

    row = judged('learned_beats_random', losses, change=lose_one)
    assert row['verdict'] == UNDECIDED and row['reason'].startswith('15 of the 16')


def test_the_seed_that_chooses_a_size_does_not_judge():
    def make_lucky(study):
        for row in study['runs']:
            if row['seed'] == 0 and row['variant'] == 'mod':
                row['bits_per_byte'] -= 5.0

    row = judged('mod_beats_dense', {'mod': 2.2, 'dense': 2.0}, change=make_lucky)
    seeds = BY_ID['mod_beats_dense'].spec.seeds - 1
    assert row['verdict'] == FAILS and f'{seeds} seeds' in row['power']


def test_the_best_dense_model_may_be_the_shallow_one_and_is_chosen_by_the_first_seed():
    losses = {'mod': 1.9, 'dense': 2.0, 'shallow 3x64': 1.7}
    row = judged('mod_beats_dense', losses)
    assert row['verdict'] == FAILS and 'dense 3x64' in row['spread']

    def lose_sizes(study):
        study['runs'] = [row for row in study['runs'] if row['size'] in ('4x64', '31x64')]

    row = judged('mod_beats_dense', {'mod': 1.9, 'dense': 2.0}, change=lose_sizes)
    assert row['reason'].startswith('not measured')


def _diverge(study):
    study['runs'][-1] |= dict.fromkeys(('loss', 'bits_per_byte', 'routing_gap'))


def _diverge_first(study, variant):
    """Let the first seed diverge at every size, so that it cannot choose among sizes."""
    for row in study['runs']:
        if row['variant'] == variant and row['seed'] == 0:
            row |= dict.fromkeys(('loss', 'bits_per_byte', 'routing_gap'))


PROBLEMS = [
    ({'steps': 499}, None, '499 steps, 500 are needed'),
    ({}, _diverge, 'a run of mod 4x64 diverged'),
    ({}, lambda s: s.update(diverged=['mod-4x64-6e+11-seed8']), 'a run of mod 4x64 diverged'),
    ({}, lambda s: _lose_size(s, 'dense', '31x64'), 'dense 4x64 is the smallest or largest'),
    ({}, lambda s: _lose_size(s, 'mod', '2x64'), 'mod 4x64 is the smallest or largest'),
    ({}, lambda s: _widen(s, 'mod', '31x64'), 'mod 4x64 is the smallest or largest'),
    ({}, lambda s: _diverge_first(s, 'mod'), 'a run of mod 4x64 diverged'),
]


def _widen(study, *size):
    """A larger model of another width does not show that no deeper one is better."""
    for row in study['runs']:
        if (row['variant'], row['size']) == size:
            row['size'] = '4x178'


def _lose_size(study, *lost):
    study['runs'] = [row for row in study['runs'] if (row['variant'], row['size']) != lost]


@pytest.mark.parametrize(('changes', 'change', 'reason'), PROBLEMS)
def test_runs_that_do_not_count_give_no_verdict(changes, change, reason):
    losses = {'dense': 2.0, 'dense 3x64': 8.0, 'mod': 1.9}
    row = judged('mod_beats_dense', losses, change=change, **changes)
    assert row['verdict'] == UNDECIDED and reason in row['reason'], row


@pytest.mark.parametrize(
    ('causal', 'gap', 'verdict', 'text'),
    [
        (-0.3, 0.06, HOLDS, 'must agree'),
        (-0.3, -0.06, HOLDS, 'mod 4x64 has a routing gap of -0.06 nats'),
        (0.3, -0.06, FAILS, 'under top-C mod'),
        (-0.05, -0.06, UNDECIDED, 'favour the other verdict'),
        (0.05, 0.06, UNDECIDED, 'favour the other verdict'),
        (0.0607, 0.04, FAILS, 'Holm'),
        (-0.3, lambda seed: -1.0 if seed == 5 else 0.0, UNDECIDED, 'the larger of two'),
    ],
)
def test_with_a_large_routing_gap_both_losses_must_agree(causal, gap, verdict, text):
    """Bits of one-byte tokens: under top-C the loss is lower by the gap over the log of 2."""

    def change(study):
        for row in study['runs']:
            of_dense = {'routing_gap': None, 'loss_top_c': None}
            row |= of_dense if row['variant'] == 'dense' else {}
            row['loss'] = row['bits_per_byte'] * math.log(2)

    losses = {'mod': 2.0 + causal, 'dense': 2.0}
    row = judged('mod_beats_dense_of_its_size', losses, change=change, routing_gap=gap)
    assert row['verdict'] == verdict and text in row['ours'] + row['reason'], row
    assert ('under top-C' in row['ours']) is (gap != 0.04)


def test_other_seeds_and_a_smallest_model_of_one_layer_do_not_prevent_a_verdict():
    def change(study):
        unplanned = [
            row | {'seed': 9, 'run': row['run'].replace('seed8', 'seed9'), 'steps': 10}
            for row in study['runs']
            if row['seed'] == 8
        ]
        study['runs'] += [row | {'loss': None, 'bits_per_byte': None} for row in unplanned]
        study['diverged'] = ['mod-4x64-6e+11-seed10']
        study['seeds'] = [*study['seeds'], 9, 10]

    losses = {'dense 1x64': 2.0, 'dense': 2.1, 'mod': 1.9}
    row = judged('mod_beats_dense', losses, change=change)
    assert row['verdict'] == HOLDS and 'dense 1x64' in row['spread'], row


WORSE = {'mod': 2.0} | {name: 2.1 for name in BY_ID['best_capacity_and_pattern'].args['others']}
TREND = dict(zip(('mod', 'mod_0.25', 'mod_0.5', 'mod_0.75', 'mod_0.95'), range(5), strict=True))
POST = {'dense': 2.0, 'moda': 1.9, 'dense_post': 2.1}
NEXT = {'dense': 2.0, 'mod': 2.0}


def _trend(slope):
    return {name: 2.0 + slope * place for name, place in TREND.items()}


def _by_seed(function):
    return lambda seed: function(0.001 * math.sin(7 * seed))


# Claim, losses, more of the study, the verdict, and what is in our number or the reason.
CASES = [
    ('steps_faster', NEXT, {}, HOLDS, '4x64 against 4x64, 0.60 of the FLOPs'),
    ('steps_faster', {'dense': 2.0, 'mod': 2.1}, {}, FAILS, '+4.'),
    ('steps_faster', {'dense': 2.0, 'mod 8x64': 1.9}, {}, UNDECIDED, 'has 1.20 of the FLOPs'),
    ('forward_cheaper', NEXT, {}, UNDECIDED, 'has 0.60 of the FLOPs'),
    ('causal_loss_by_flops', {'dense': 2.0, 'mod': 1.9}, {}, HOLDS, '-4.'),
    ('best_capacity_and_pattern', WORSE, {}, HOLDS, 'every_0.5 -0.1'),
    ('best_capacity_and_pattern', WORSE | {'every_0.5': 1.9}, {}, FAILS, 'every_0.5 +'),
    ('best_capacity_and_pattern', WORSE | {'mod_0.5': 2.0}, {}, UNDECIDED, 'mod_0.5'),
    ('capacity_trend', _trend(0.05), {}, HOLDS, '95.0% 2.'),
    ('capacity_trend', _trend(-0.05), {}, FAILS, 'per doubling of the capacity'),
    ('capacity_trend', _trend(0.0), {}, UNDECIDED, 'Holm'),
    ('half_in_every_block', {'dense': 2.0, 'every_0.5': 2.0}, {}, UNDECIDED, 'saves 45%'),
    ('half_in_every_block', {'dense': 2.0, 'every_0.5': 2.9}, {}, FAILS, 'Holm'),
    (
        'half_in_every_block',
        {'dense': 2.0, 'every_0.5': 2.0},
        {'flops_per_forward': 1.0},
        FAILS,
        'saves less than 30%',
    ),
    ('post_gains_more', POST | {'moda_post': 1.8}, {}, HOLDS, 'post -0.'),
    ('post_gains_more', POST | {'moda_post': 2.2}, {}, FAILS, 'post +0.'),
    ('post_gains_more', POST | {'moda_post': 2.0}, {}, UNDECIDED, 'Holm'),
]
for share, verdict in ((-0.01, HOLDS), (0.02, FAILS), (0.003, UNDECIDED)):
    rows = {'loss_top_c': 1.0, 'routing_gap': _by_seed(lambda off, s=share: s + off)}
    CASES.append(('causal_routing_costs', {'mod': 2.0}, rows, verdict, 'of the loss'))
for *layer, verdict in (
    (0.125, 0.99, 0.99, HOLDS),
    (0.1, 0.9, 0.5, FAILS),
    (0.12, 0.9, 0.86, UNDECIDED),
):
    rows = {'routing': _by_seed(lambda off, r=layer: routing(*r[:2], r[2] + 5 * off))}
    CASES.append(('predictor_accuracy', {'mod': 2.0}, rows, verdict, 'recall'))
for selected, verdict in ((0.125, HOLDS), (0.05, FAILS), (0.15, UNDECIDED)):
    rows = {'routing': _by_seed(lambda off, s=selected: routing(s + off, 1.0, 1.0))}
    CASES.append(('selected_under_aux_loss', {'aux_loss': 2.0}, rows, verdict, '%'))


@pytest.mark.parametrize(('name', 'losses', 'more', 'verdict', 'text'), CASES)
def test_each_judge_gives_each_verdict(name, losses, more, verdict, text):
    row = judged(name, losses, **more)
    assert row['verdict'] == verdict, row
    assert text in f'{row["ours"]} {row["reason"]}', row


def over_budgets(name, losses_at):
    """The row of a claim over budgets; `losses_at` of the number of the budget."""
    claim, studies = BY_ID[name], {}
    for number, budget in enumerate(claim.args['budgets']):
        spec = claim.spec._replace(flops=budget)
        studies[f'cpu/study-budgets/{budget:g}'] = a_study(spec, losses_at(number), draw=number)
    rows = fill(Evidence(studies, {}, {}))
    return next(row for row in rows if row['id'] == name)


@pytest.mark.parametrize(('step', 'verdict'), [(-0.05, HOLDS), (0.05, FAILS), (0.0, UNDECIDED)])
def test_falling_difference_is_judged_by_its_slope_over_budgets(step, verdict):
    row = over_budgets('gain_grows', lambda number: {'dense': 2.0, 'mod': 1.9 + step * number})
    assert row['verdict'] == verdict and '2e12, 6e12, 2e13 FLOPs' in row['ours'], row


@pytest.mark.parametrize(
    ('mod', 'steps', 'verdict', 'text'),
    [
        (5, 600, HOLDS, '1.67 x the parameters, 1.00 x the FLOPs'),
        (9, 600, FAILS, '3.00 x the parameters'),
        (40, 600, UNDECIDED, 'no budget has both optima inside'),
        (5, 499, UNDECIDED, 'no budget has both optima inside'),
    ],
)
def test_depth_not_width_by_the_optima_of_each_budget(mod, steps, verdict, text):
    """Losses are parabolas around a depth, of 3 for dense, which differs a little by budget."""

    def losses(number):
        best = {'mod': mod * 1.0001**number, 'dense': 3 * 1.0001 ** (number % 2)}
        return {
            f'{name} {layers}x64': 2 + 0.1 * math.log(layers / depth) ** 2
            for name, depth in best.items()
            for layers in (2, 3, 4, 6, 8, 12)
        }

    claim, studies = BY_ID['depth_not_width'], {}
    for number, budget in enumerate(claim.args['budgets']):
        study = a_study(claim.spec._replace(flops=budget), losses(number), noise=0.0, steps=steps)
        study['runs'] = [row for row in study['runs'] if row['size'] != '31x64']
        studies[f'study-budgets/{number}'] = study
    rows = fill(Evidence(studies, {}, {}))
    row = next(row for row in rows if row['id'] == 'depth_not_width')
    assert row['verdict'] == verdict and text in row['ours'] + row['reason'], row


def test_verdicts_survive_holm_over_all_claims():
    """p = 0.01 decides a single claim, but not one of a hundred; the row says what would."""
    spec = BY_ID['learned_beats_random'].spec
    study = a_study(spec, {'mod': 2.0, 'random': 2.0}, noise=0.0)
    differences = np.random.default_rng(0).standard_normal(spec.seeds)
    differences = (differences - differences.mean()) / differences.std(ddof=1)
    mod = [row for row in study['runs'] if row['variant'] == 'mod']
    for shift, verdict in ((0.75, UNDECIDED), (2.0, HOLDS)):
        for row, other, change in zip(mod, study['runs'][-spec.seeds :], differences, strict=True):
            row['bits_per_byte'] = other['bits_per_byte'] + 0.01 * (change - shift)
        (row,) = [
            row
            for row in fill(Evidence({'study-routing': study}, {}, {}))
            if row['id'] == 'learned_beats_random'
        ]
        assert row['verdict'] == verdict, row
        assert ('decided on its own but not' in row['reason']) is (verdict == UNDECIDED)
        assert ('seeds would decide' in row['reason']) is (verdict == UNDECIDED)
        assert row['power'].startswith('16 seeds detect a difference of 0.01')


def test_power_is_stated_before_the_runs():
    """Every planned comparison of losses states its power, by the guessed spread."""
    for row in fill(Evidence({}, {}, {})):
        claim = BY_ID[row['id']]
        planned = claim.judge in claims.OF_A_DIFFERENCE
        assert ('(guessed)' in row['power']) is planned and row['verdict'] == UNDECIDED
        assert ('make study-' in row['reason']) is (claim.spec is not None)


def test_accuracy_is_the_share_of_tokens_on_which_rule_and_top_c_agree():
    generator = np.random.default_rng(0)
    right = generator.permutation(8000) < 1000
    taken = right ^ (generator.random(8000) < 0.05)
    both = (right & taken).sum()
    run = {'routing': routing(taken.mean(), both / taken.sum(), both / 1000), 'capacity': 0.125}
    assert accuracy(run) == pytest.approx((right == taken).mean())
    assert accuracy(run | {'routing': routing(0.0, None, 0.0)}) == 0.875


def test_the_sink_is_a_share_of_the_attention_on_the_sequence():
    """Slots that take half of all attention evenly leave the sink as it was."""
    mass = {'first_token': [0.2, 0.1], 'depth': [0.0, 0.5]}
    assert first_token_of_sequence({'measured': {'depth_mass': mass}}) == pytest.approx(0.2)


def test_counted_claims_need_no_run():
    """All ways to count must agree; shapes not in the paper are undecided."""
    for other, moda, verdict in (
        (1.04, 1.0434, HOLDS),
        (1.05, 1.0437, FAILS),
        (1.03, 1.0363, FAILS),
        (1.05, 1.0434, UNDECIDED),
    ):
        dense, ways = {'all': 1, 'visible': 1}, {'all': moda, 'visible': other}
        counted = {'dense': dense, 'moda': ways, 'length': 4096}
        saving = {'dense': 1.0, '0.75': 0.75, '0.5': 0.65, '0.25': 0.49, '0.12': 0.3}
        counted = dict.fromkeys(('moda_700m', 'moda_1b5'), counted) | {
            'mod_7b': saving | {'length': 2048}
        }
        rows = {row['id']: row for row in fill(Evidence({}, {}, counted))}
        assert rows['cost_moda_700m']['verdict'] == verdict
        if verdict == UNDECIDED:
            assert rows['cost_moda_700m']['reason'] == 'within 0.3 points only if one counts all'
        assert rows['cost_moda_1b5']['verdict'] == UNDECIDED
        assert rows['blog_saves_at_0_75']['verdict'] == FAILS
        assert rows['blog_saves_at_0_5']['verdict'] == HOLDS
        assert rows['cost_moda_48l']['reason'].startswith('not measured')


def measured(shift, depth=0.0):
    """Measure of one run in which every number of a claim is `shift` above 0 or a base."""
    words = {name: {'entered': 0.1, 'tokens': 9} for name in ('comment', 'docstring', 'whitespace')}
    return {
        'blocks_entered': {
            **{'every': 0.1 + shift, 'every_by_chance': 0.1},
            **{'none': 0.2 + shift, 'none_by_chance': 0.2},
        },
        'entropy': {'correlation': shift},
        'classes': words
        | {name: {'entered': 0.1 + shift} for name in ('number', 'keyword')}
        | {name: {'entered': 0.1 - shift} for name in ('article', 'preposition')},
        'first_token': {'entered': 0.1 + shift, 'others_entered': 0.1},
        'layers': [
            {'score_correlation': None, 'probe_r2': 0.5 + shift},
            {'score_correlation': shift, 'probe_r2': 0.5 + shift},
        ],
        'depth_mass': {'first_token': [(0.3 - shift) * (1 - depth)] * 2, 'depth': [depth] * 2},
    }


MEASURED = [
    claim
    for claim in CLAIMS
    if claim.topic == 'Measured on trained models' and claim.spec.seeds > 4
]


@pytest.mark.parametrize('claim', MEASURED, ids=lambda claim: claim.id)
def test_measures_are_judged_by_their_interval(claim):
    variants = claim.args['variants']

    def measures(shift, seeds=99):
        return lambda study: {
            row['run']: measured(
                0.003 * math.sin(9 * row['seed']) * (row['variant'] == variants[0])
                + shift * (row['variant'] == variants[0]),
                0.5 * (row['variant'] == variants[0]),
            )
            for row in study['runs']
            if row['seed'] < seeds
        }

    judge = functools.partial(judged, claim.id, dict.fromkeys(variants, 2.0))
    for shift, verdict in ((0.05, HOLDS), (-0.05, FAILS), (0.0, UNDECIDED)):
        row = judge(measures=measures(shift))
        assert row['verdict'] == verdict, row
    seeds = claim.spec.seeds
    few = judge(measures=measures(0.0, 3))['reason']
    assert few == f'3 of the {seeds} planned seeds were run and measured'
    assert judge(measures=lambda _: {})['reason'].startswith('not measured')


def test_without_the_phenomenon_there_is_no_verdict():
    """No sink in the dense model; fewer than three routed blocks."""

    def measures(study):
        return {row['run']: measured(0.27 + 0.001 * row['seed']) for row in study['runs']}

    row = judged('sink_to_slots', dict.fromkeys(('moda', 'dense'), 2.0), measures)
    assert row['verdict'] == UNDECIDED and row['reason'].startswith('dense has 2.'), row
    few = {'routing': routing(0.1, 0.9, 0.8, 2)}
    row = judged('every_block_or_none', {'mod': 2.0}, measures, **few)
    assert row['reason'] == '2 routed blocks, 3 are needed'


def test_the_users_own_study_is_judged_by_its_seeds_at_its_largest_budget():
    spec = BY_ID['learned_beats_random'].spec._replace(seeds=5)
    losses = {'mod': 2.0, 'random': 2.2}
    small, large = (a_study(spec._replace(flops=flops), losses) for flops in (1e11, 3e11))
    for row in small['runs']:
        row['bits_per_byte'] += row['variant'] == 'mod'
    both = large | {'budgets': [1e11, 3e11], 'runs': small['runs'] + large['runs']}
    rows = {row['id']: row for row in fill(Evidence({'runs/mine': both}, {}, {}))}
    assert rows['learned_beats_random']['verdict'] == HOLDS
    assert not rows['learned_beats_random']['claim'].endswith(f'({spec.text})')
    others = (rows[name]['ours'] for name in ('moda_pre', 'learned_beats_random_at_text'))
    assert set(others) == {'-'}
    few = both | {'seeds': [0, 1, 2], 'sizes': ['2x64', '4x64']}  # the first of them chose
    rows = {row['id']: row for row in fill(Evidence({'runs/mine': few}, {}, {}))}
    assert rows['learned_beats_random']['reason'] == '2 seeds judge, 3 are needed'


def test_a_place_that_two_studies_have_is_refused():
    study = a_study(BY_ID['moda_pre'].spec, {'moda': 2.0, 'dense': 2.1})
    names = ('cpu/study-moda/8x64', 'gpu/study-moda')
    with pytest.raises(ValueError, match='cpu/study-moda/8x64 and gpu/study-moda: both are'):
        fill(Evidence(dict.fromkeys(names, study), {}, {}))


def full_evidence(generator):
    """Every planned place, with all variants of all claims and no difference between them."""
    studies, asked = {}, {}
    for claim in CLAIMS:
        if claim.spec and claim.judge not in ('numbers_within', 'depth_not_width'):
            asked.setdefault(claim.spec, set()).update(variants_of(claim))
    for spec, names in asked.items():
        names = sorted(name.replace(BEST_DENSE, 'dense') for name in names)
        study = a_study(spec, dict.fromkeys(names, 2.0))
        for row in study['runs']:
            noise = 0.02 * generator.standard_normal()
            row['bits_per_byte'] = 2.0 + 0.5 * math.sin(row['seed']) + noise
        studies[f'cpu/{spec.study}/{spec.budget:g}-{spec.size}'] = study
    return Evidence(studies, {}, {})


@pytest.mark.slow
def test_judges_rarely_decide_on_permuted_labels():
    """The rates are at most the stated ones, within two standard errors."""
    committed = claims.read_evidence(ROOT / 'results', {})
    for evidence in (full_evidence(np.random.default_rng(0)), committed):
        found = blind_check(evidence, 200)
        assert found.wrong_tables <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200), found
        assert found.wrong_claims <= 0.06, found
    assert blind_check(full_evidence(np.random.default_rng(1)), 1).claims > 50


def test_every_claim_has_a_judge_with_its_arguments_or_a_command():
    """Ids are unique; rules name the variants compared; every judge has a claim."""
    assert len(BY_ID) == len(CLAIMS) and {claim.judge for claim in CLAIMS} == {*JUDGES, ''}
    for claim in CLAIMS:
        if claim.judge:
            inspect.signature(JUDGES[claim.judge]).bind(None, **claim.args)
            assert set(claim.args.get('numbers', [])) <= set(NUMBERS)
            assert (claim.spec is None) is (claim.judge in claims.COUNTED)
        else:
            assert 'python -m launch.' in claim.needs
    for claim in COMPARED:
        if claim.spec.size:
            assert claim.rule.startswith('{first} against {second} at'.format(**claim.args))


def test_variants_and_configs_of_claims_exist():
    """A misspelt variant would never run. tests/launch/isoflop_test.py looks up the studies."""
    assert set().union(*map(variants_of, CLAIMS)) - set(VARIANTS) == {BEST_DENSE}
    files = {file for claim in CLAIMS for file in re.findall(r'configs/\S+', claim.needs)}
    assert files and all((ROOT / file).exists() for file in files)


def test_page_has_each_claim_once_and_keeps_text_outside_the_markers():
    spec = BY_ID['mod_beats_dense'].spec
    evidence = Evidence({'s': a_study(spec, {'mod': 1.9, 'dense': 2.0})}, {}, {})
    rows = fill(evidence)
    table = claims.markdown(rows, claims.judge(evidence), evidence)
    for row in rows:
        assert table.count(f'(#{row["id"]})') == table.count(f'id="{row["id"]}"') == 1
    lines = [line for line in table.splitlines() if line.startswith('| [')]
    assert len(lines) == len(rows)
    assert {len(re.findall(r'(?<!\\)\|', line)) for line in lines} == {5}
    page = f'before\n{claims.BEGIN}\nprevious text\n{claims.END}\nafter\n'
    replace = functools.partial(replace_between, begin=claims.BEGIN, end=claims.END, text=table)
    new = replace(page)
    assert new.startswith('before\n') and new.endswith('\nafter\n') and 'previous' not in new
    assert replace(new) == new
    for broken in ('', page.replace(claims.END, ''), page + page):
        with pytest.raises(ValueError, match='markers'):
            replace(broken)


def test_numbers_in_what_was_learned_equal_the_rows_they_link_to():
    """The page begins with handwritten lines; each number in them is one of their rows."""
    text, _, table = (ROOT / 'docs/claims.md').read_text().partition(claims.BEGIN)
    learned = text.split('## What was learned')[1].split('\n## ')[0]
    found = dict(re.findall(r'^\| \[.*?\]\(#(\w+)\)(.*)$', table, re.MULTILINE))
    lines = re.split(r'^\d+\. ', learned, flags=re.MULTILINE)[1:]
    assert 8 <= len(lines) <= 12
    for line in lines:
        ids = re.findall(r'\(#(\w+)\)', line)
        assert ids, line
        of_rows = ' '.join(found[name] for name in ids).replace('+', '')
        numbers = re.findall(r'-?\d+\.\d+', re.sub(r'\(#\w+\)', '', line).replace('+', ''))
        assert numbers and [n for n in numbers if n not in of_rows] == [], line


def test_links_to_a_claim_show_the_numbers_of_its_row():
    """On any page: `[-3.5% (-4.2% to -2.9%)](claims.md#id)`, with these signs and in this order.

    Outside claims.md it is bold if and only if it is decided; but of a claim with a bound the text
    says what is decided, since the number alone does not.
    """
    own, _, table = (ROOT / 'docs/claims.md').read_text().partition(claims.BEGIN)
    rows = dict(re.findall(r'^\| \[.*?\]\(#(\w+)\)(.*)$', table, re.MULTILINE))
    pages = {path.name: path.read_text() for path in (ROOT / 'docs').rglob('*.md')}
    pages |= {'README.md': (ROOT / 'README.md').read_text(), 'claims.md': own}
    linked = collections.Counter()
    for page, content in pages.items():
        for text, name in re.findall(r'\[([^]]*)\]\((?:\S*claims\.md)?#(\w+)\)', content):
            if name in rows and (numbers := _numbers(text)):
                found = _numbers(rows[name])
                starts = range(len(found) - len(numbers) + 1)
                assert any(found[at : at + len(numbers)] == numbers for at in starts), (page, name)
                linked[page] += 1
                bounded = {'margin', 'low', 'high', 'within'} & BY_ID[name].args.keys()
                if page != 'claims.md' and not bounded:
                    assert ('**' in text) == (UNDECIDED not in rows[name]), (page, name)
    assert linked['README.md'] > 10 and linked['claims.md'] > 30


def _numbers(text):
    return [float(number) for number in re.findall(r'(?<![\w.])[-+]?\d+\.\d+', text)]


def test_readme_has_the_counts_of_the_page():
    """Regression: README counted 74 runs of a study, and its page 72."""
    of_seeds = r'rest on seeds and (\d+) on counted FLOPs'
    pages = (ROOT / name for name in ('docs/claims.md', 'README.md'))
    page, readme = (' '.join(path.read_text().split()) for path in pages)
    counts = re.search(r'Of (\d+) claims: (\d+) hold, (\d+) do not', page).groups()
    wanted = r'judges (\d+) rows, .* over all rows: (\d+) hold here, (\d+) do not'
    assert re.search(wanted, readme).groups() == counts
    # The page's own words, its generated line, and README.
    split = re.findall(of_seeds, page) + re.findall(of_seeds, readme)
    assert len(split) == 2 and len(set(split)) == 1


def test_losses_of_a_study_use_the_judging_seeds():
    """A variant that ran only with the choosing seed is left out."""
    spec = BY_ID['mod_beats_dense'].spec
    study = a_study(spec, {'mod': 1.9, 'dense': 2.0}, noise=0.0)
    once = [row | {'variant': 'random'} for row in study['runs'] if row['seed'] == 0]
    study |= {'runs': study['runs'] + once}
    study['variants']['random'] = {'label': 'random', 'changes': {}}
    table = claims.markdown([], [], Evidence({'s': study}, {}, {}))
    assert '| `mod` | 4x64 | 8 | 1.' in table and '-0.100 (-0.100 to -0.100)' in table
    assert '| `random` |' not in table


def test_studies_are_read_up_to_three_levels_down(tmp_path):
    """With the measures of the same weights. At least one of several studies must be planned."""
    study = a_study(BY_ID['moda_pre'].spec, {'moda': 1.9})
    run, planned = study['runs'][0], 'cpu/study-moda/c'
    for place in ('.', 'a', planned, 'much/too/far/down'):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / 'study.json').write_text(json.dumps(study))
    known = {run['run']: {'state_sha256': run['state_sha256']}}
    other = {study['runs'][1]['run']: {'state_sha256': 'other'}, 'unknown': {}}
    (tmp_path / planned / 'measures.json').write_text(json.dumps(known | other))
    evidence = claims.read_evidence(tmp_path, {})
    name = tmp_path.name
    assert set(evidence.studies) == {name, f'{name}/a', f'{name}/{planned}'}
    assert evidence.measures == {f'{name}/{planned}': known}
    broken = {
        '{': 'JSON',
        '[]': 'JSON object',
        json.dumps({k: v for k, v in study.items() if k != 'kind'}): "'kind'",
        json.dumps(study | {'runs': [{'run': 'x'}]}): 'runs.0.',
    }
    for text, found in broken.items():
        (tmp_path / 'a' / 'study.json').write_text(text)
        with pytest.raises(ValueError, match=f'a/study.json: .*{found}'):
            claims.read_evidence(tmp_path, {})
    with pytest.raises(ValueError, match='no such directory'):
        claims.read_evidence(tmp_path / 'nowhere', {})


def test_several_unplanned_studies_are_refused(tmp_path):
    """Regression: every row was undecided, and the command succeeded."""
    study = a_study(BY_ID['moda_pre'].spec, {'moda': 1.9})
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'study.json').write_text(json.dumps(study))
    message = '2 studies, none of which claims.toml plans; give the directory of one of them$'
    with pytest.raises(ValueError, match=f'^--workdir={tmp_path}: {message}'):
        claims.read_evidence(tmp_path, {})
    assert len(claims.read_evidence(tmp_path / 'one', {}).studies) == 1
