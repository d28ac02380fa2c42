"""Every rule of the claims table gives each of its verdicts, and none without seeds or steps."""

import itertools
import json
import math
import pathlib
import re

import numpy as np
import pytest
import scipy.stats

from moddepth_jax.studies import claims_page, routing_claims, verdicts
from moddepth_jax.studies.claims import FAILS, HOLDS, UNTOLD, Evidence
from moddepth_jax.studies.plan import VARIANTS
from moddepth_jax.studies.statistics import Place, interval

ROOT = pathlib.Path(__file__).parents[3]
SPREAD = (-0.004, 0.0, 0.004)  # of seeds: with three, the interval of a difference is +-0.0091
FORWARD = {'mod': 0.6, 'shallow': 0.5, 'every_0.5': 0.55}  # FLOPs over the dense model of that size
BY_ID = {claim.id: claim for claim in verdicts.CLAIMS}


def a_study(losses, kind='flops', budget=1e13, steps=600, spread=SPREAD, **of_rows):
    """study.json with a mean of bits a byte by 'variant size' (size 4x64 if not given).

    With dense models come bad ones of two more sizes, for the best to be called optimal.
    `of_rows`: fields of every row; a function is called with the seed.
    """
    rows = []
    if any(name.startswith('dense') for name in losses):
        losses = losses | {'dense 1x64': 9.0, 'dense 31x64': 9.0}
    for name, mean in losses.items():
        variant, _, size = name.partition(' ')
        size = size or '4x64'
        layers, width = map(int, size.split('x'))
        parameters = 12 * layers * width**2
        flops = parameters * FORWARD.get(variant, 1.0)
        for seed, shift in enumerate(spread):
            row = {
                'run': f'{variant}-{size}-{budget:g}-seed{seed}',
                'variant': variant,
                'size': size,
            }
            row |= {'budget': budget, 'seed': seed, 'parameters': parameters, 'steps': steps}
            row |= {'flops_per_step': 3 * flops, 'flops_per_forward': flops, 'epochs': 0.5}
            row |= {'total_flops': 3 * flops * steps, 'bits_per_byte': mean + shift}
            row |= {'loss': (mean + shift) * math.log(2), 'routing': {}, 'routing_gap': None}
            row |= {k: value(seed) if callable(value) else value for k, value in of_rows.items()}
            rows.append(row)
    names = dict.fromkeys(row['variant'] for row in rows)
    changes = {'model.routing.capacity': 0.125}
    return {
        'kind': kind,
        'config': 'configs/study.py',
        'budgets': [budget],
        'variants': {name: {'label': name, 'changes': changes} for name in names},
        'batch_tokens': 1024,
        'sequence_length': 128,
        'corpus': 'stdlib',
        'versions': {'python': '3.11', 'jax': '0.10.2', 'device': 'cpu'},
        'missing': [],
        'diverged': [],
        'runs': rows,
    }


def routing(selected, precision, recall):
    layer = {'selected_fraction': selected, 'precision': precision, 'recall': recall}
    return {'layer_01': layer, 'layer_03': layer}


GAP = {'loss_top_c': 1.0, 'routing_gap': 0.001, 'routing': routing(0.1, 0.9, 0.8)}


def judged(name, *studies, measures=None, counted=None):
    """The row of one claim from some studies; `measures`: of those of the first."""
    named = {f'study{i}': study for i, study in enumerate(studies)}
    return BY_ID[name].row(Evidence(named, {'study0': measures or {}}, counted or {}))


# The claim, what it compares ('first|second'), and the kind of its study.
DIFFERENCES = {
    'mod_beats_dense': 'mod|dense',
    'mod_beats_shallow': 'mod|shallow',
    'every_block_worse': 'mod|every_0.125',
    'every_block_worse_at_half': 'mod_0.5|every_0.5',
    'capacity_trend': 'mod|mod_0.5',
    'capacity_below': 'mod|mod_0.0625',
    'learned_beats_random': 'mod|random',
    'learned_beats_random_every_block': 'every_0.5|random_every_0.5',
    'dense_beats_random': 'dense|random',
    'learned_beats_position': 'mod|position',
    'learned_beats_norm': 'mod|norm',
    'mode_beats_lower_capacity': 'integrated|moe_capacity_0.5',
    'mode_beats_moe': 'integrated|moe',
    'moe_beats_dense': 'moe|dense',
    'moda_attention_pre': 'moda_attention|dense',
    'moda_pre': 'moda|dense',
    'moda_attention_post': 'moda_attention_post|dense_post',
    'moda_post': 'moda_post|dense_post',
    'moda_beats_wider_pre': 'moda|wider',
    'moda_beats_wider_post': 'moda_post|wider_post',
    'moda_beats_best_baseline': 'moda_post|dense',
    'moda_beats_average': 'moda|average',
    'mod_moda_beats_mod': 'mod_moda|mod',
    'projected_beats_masked': 'mod_moda|mod_moda_masked',
}

EITHER_KIND = ('mod_moda_beats_mod', 'projected_beats_masked')


def kind_of(name):
    return 'steps' if BY_ID[name].topic == 'Mixture-of-Depths Attention' else 'flops'


@pytest.mark.parametrize('name', DIFFERENCES)
@pytest.mark.parametrize(
    ('difference', 'verdict'), [(-0.03, HOLDS), (0.03, FAILS), (-0.006, UNTOLD), (0.006, UNTOLD)]
)
def test_differences_by_their_interval(name, difference, verdict):
    """Lower by more than the interval holds, higher by more does not, else it cannot be told."""
    first, second = DIFFERENCES[name].split('|')
    study = a_study({first: 2 + difference, second: 2.0}, kind_of(name))
    row = judged(name, study)
    assert row['verdict'] == verdict, row
    assert f'{difference / 2:+.1%}' in row['ours'] and '2.004' in row['spread']
    other = study | {'kind': {'flops': 'steps', 'steps': 'flops'}[kind_of(name)]}
    assert (judged(name, other)['ours'] == '-') is (name not in EITHER_KIND)


@pytest.mark.parametrize('name', DIFFERENCES)
def test_no_verdict_from_few_seeds_or_steps(name):
    """The number is shown, the reason says what lacks."""
    first, second = DIFFERENCES[name].split('|')
    losses = {first: 1.0, second: 2.0}
    short = judged(name, a_study(losses, kind_of(name), steps=499))
    few = judged(name, a_study(losses, kind_of(name), spread=(0.0, 0.001)))
    for row, reason in ((short, '499 steps, 500 are needed'), (few, '2 seeds, 3 are needed')):
        assert row['verdict'] == UNTOLD and row['reason'].endswith(reason), row
        assert '-50.0%' in row['ours']


def test_interval_is_welchs():
    """Of two samples it is scipy's; of one, Student's; of one value it is infinite."""
    a, b = [2.1, 2.3, 2.2, 2.25], [2.5, 2.4, 2.9]
    theirs = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert interval([a, b], (1.0, -1.0))[1:] == pytest.approx(tuple(theirs))
    assert interval([a])[1:] == pytest.approx(
        tuple(scipy.stats.ttest_1samp(a, 0).confidence_interval(0.95))
    )
    assert interval([[1.0], b], (1.0, -1.0)).high == math.inf
    assert interval([[1.0, math.inf]]).low == -math.inf
    assert interval([[1.0] * 3]) == (1.0, 1.0, 1.0)


def test_largest_budget_with_enough_runs_decides():
    """More FLOPs go first, but not before three seeds; two budgets never mix."""
    small = a_study({'mod': 1.9, 'dense': 2.0})
    large = a_study({'mod': 2.1, 'dense': 2.0}, budget=1e14, steps=6000)
    assert judged('mod_beats_dense', small, large)['verdict'] == FAILS
    large['runs'] = [row for row in large['runs'] if row['seed'] < 2]
    row = judged('mod_beats_dense', small, large)
    assert row['verdict'] == HOLDS and '1e13 FLOPs, 600 steps' in row['setting']
    assert row['setting'].startswith('study0: ')
    apart = [a_study({'mod': 1.9}), a_study({'dense': 2.0})]
    assert judged('mod_beats_dense', *apart)['reason'].startswith('not measured; needs runs')


def test_each_model_at_its_own_best_size():
    """The better of two dense sizes is the baseline; with seeds at one of them, that one."""
    losses = {'mod': 2.0, 'mod 6x64': 2.2, 'dense': 2.1, 'dense 3x64': 1.9}
    study = a_study(losses)
    assert judged('mod_beats_dense', study)['verdict'] == FAILS
    for row in study['runs']:
        row['bits_per_byte'] += 0.2 * (row['seed'] == 0 and row['size'] == '3x64')
    study['runs'] = [row for row in study['runs'] if row['size'] == '3x64' or row['seed'] == 0]
    assert Place('x', study, 1e13).best('dense').size == '3x64'


def test_best_dense_model_is_of_three_sizes_and_may_be_the_shallow_one():
    """Of two sizes none is an optimum; the control of MoD's FLOPs is a dense model as well."""
    study = a_study({'mod': 1.9, 'dense': 2.0})
    study['runs'] = [row for row in study['runs'] if row['size'] != '31x64']
    assert judged('mod_beats_dense', study)['ours'] == '-'
    row = judged('mod_beats_dense', a_study({'mod': 1.9, 'dense': 2.0, 'shallow 2x64': 1.8}))
    assert row['verdict'] == FAILS and 'dense 2x64: 1.796' in row['spread']


def test_run_that_diverged_gives_no_verdict():
    """A loss of None is shown as infinite."""
    study = a_study({'mod': 1.9, 'dense': 2.0})
    study['runs'][0] |= {'loss': None, 'bits_per_byte': None}
    row = judged('mod_beats_dense', study)
    assert row['verdict'] == UNTOLD and 'a run of mod 4x64 diverged' == row['reason']
    study = a_study({'mod': 1.9}, **GAP)
    study['runs'][0] |= dict.fromkeys(('loss', 'bits_per_byte', 'routing_gap'))
    gap = judged('causal_routing_costs', study)
    assert gap['reason'] == 'a run of mod 4x64 diverged'


def test_budgets_of_the_paper_wait_for_a_pod():
    """The same rule from 6e18 FLOPs on; until then the row says what it takes."""
    small, pod = (a_study({'mod': 1.9, 'dense': 2.0}, budget=budget) for budget in (5e18, 6e18))
    name = 'mod_beats_dense_at_paper_budgets'
    assert '--budgets=6e18' in judged(name, small)['reason']
    assert judged(name, small, pod)['verdict'] == HOLDS


@pytest.mark.parametrize('name', ['steps_faster', 'forward_cheaper'])
def test_equal_loss_at_fewer_flops(name):
    """Equal needs a mean no higher and an interval that excludes 1% worse; costs decide ours."""
    text = {'steps_faster': '67% faster', 'forward_cheaper': '40% fewer'}[name]
    cheapest = {'dense': 2.0, 'mod': 1.999, 'mod 2x64': 2.1}
    row = judged(name, a_study(cheapest))
    assert row['verdict'] == HOLDS and row['ours'].startswith(text), row
    assert judged(name, a_study({'dense': 2.0, 'mod': 2.05, 'mod 2x64': 2.1}))['verdict'] == FAILS
    assert judged(name, a_study({'dense': 2.0, 'mod': 2.005}))['verdict'] == UNTOLD
    wide = a_study({'dense': 2.0, 'mod': 1.999}, spread=(-0.02, 0, 0.02))
    assert judged(name, wide)['verdict'] == UNTOLD
    dearer = a_study({'dense 2x64': 2.0, 'mod': 1.9})
    assert judged(name, dearer)['verdict'] == UNTOLD and 'cheaper' in judged(name, dearer)['reason']


def test_equal_loss_ignores_sizes_of_one_seed():
    """A size that one seed makes look cheap does not carry the number."""
    study = a_study({'dense': 2.0, 'mod': 1.98, 'mod 2x64': 1.98})
    study['runs'] = [r for r in study['runs'] if r['size'] != '2x64' or r['seed'] == 0]
    row = judged('steps_faster', study)
    assert row['verdict'] == HOLDS and row['ours'].startswith('67% faster')


def test_causal_loss_at_a_share_of_the_flops():
    """Of sizes between 0.5 and 0.85 of the dense optimum's FLOPs; others do not count."""
    for mean, verdict in ((1.9, HOLDS), (2.1, FAILS), (2.001, UNTOLD)):
        row = judged('causal_loss_by_flops', a_study({'dense': 2.0, 'mod': mean, 'mod 8x64': 1.0}))
        assert row['verdict'] == verdict and row['ours'] == f'0.60: {mean / 2:.3f}', row
    assert judged('causal_loss_by_flops', a_study({'dense': 2.0, 'mod 8x64': 1.0}))['ours'] == '-'


OTHERS = ('mod_0.25', 'mod_0.5', 'every_0.125', 'every_0.5')


def test_best_of_all_patterns():
    """Holds against each of four; one that is better suffices against it; one lacking, nothing."""
    name, worse = 'best_capacity_and_pattern', dict.fromkeys(OTHERS, 2.1)
    assert judged(name, a_study({'mod': 2.0, **worse}))['verdict'] == HOLDS
    assert judged(name, a_study({'mod': 2.0, **worse, 'every_0.5': 1.9}))['verdict'] == FAILS
    close = judged(name, a_study({'mod': 2.0, **worse, 'every_0.5': 2.001}))
    assert close['verdict'] == UNTOLD and 'every_0.5' in close['reason']
    del worse['mod_0.25']
    lacking = judged(name, a_study({'mod': 2.0, **worse}))
    assert (lacking['verdict'], lacking['reason']) == (UNTOLD, 'not run: mod_0.25')


def test_trend_has_no_step_upwards():
    """Better in all, but worse from 25% to 12.5%: no trend."""
    study = a_study({'mod': 2.0, 'mod_0.25': 1.9, 'mod_0.5': 2.1, 'mod_moda': 1.0})
    row = judged('capacity_trend', study)
    assert row['verdict'] == FAILS and 'a step to fewer tokens' in row['reason']
    assert row['ours'].startswith('50.0% 2.100, 25.0% 1.900, 12.5% 2.000')


def bowl(variant, best_layers, shifts=(0, 0, 0)):
    """Losses by size with an optimum near a depth; `shifts`: of the depth, by seed."""
    sizes = [f'{layers}x64' for layers in (2, 3, 4, 6, 8, 12)]
    return {
        f'{variant} {size}': [
            2 + 0.1 * math.log(int(size.split('x')[0]) / (best_layers + shift)) ** 2
            for shift in shifts
        ]
        for size in sizes
    }


def curved(*bowls):
    """A study whose losses are given by size and seed."""
    losses = {name: values for each in bowls for name, values in each.items()}
    study = a_study(dict.fromkeys(losses, 2.0))
    study['runs'] = [row for row in study['runs'] if f'{row["variant"]} {row["size"]}' in losses]
    for row in study['runs']:
        row['loss'] = losses[f'{row["variant"]} {row["size"]}'][row['seed']]
    return study


def test_depth_not_width_by_optima_of_each_seed():
    """More parameters at the same FLOPs; fewer, or another cost; or an unsteady optimum."""
    name, noise = 'depth_not_width', (-0.1, 0, 0.1)
    dense = bowl('dense', 3, noise)
    row = judged(name, curved(dense, bowl('mod', 5, noise)))
    assert row['verdict'] == HOLDS, row
    assert row['ours'].startswith('1.67 x the parameters, 1.00 x the FLOPs')
    assert row['spread'].count('seed') == 3
    assert judged(name, curved(dense, bowl('mod', 8, noise)))['verdict'] == FAILS
    assert judged(name, curved(dense, bowl('mod', 2.5, noise)))['verdict'] == FAILS
    assert judged(name, curved(dense, bowl('mod', 5, (-2, 0, 2))))['verdict'] == UNTOLD
    outside = judged(name, curved(dense, bowl('mod', 40)))
    assert outside['verdict'] == UNTOLD and outside['reason'].startswith('0 seeds')


@pytest.mark.parametrize(
    ('name', 'variant'),
    [('causal_routing_costs', 'mod'), ('causal_routing_costs_aux_loss', 'aux_loss')],
)
def test_gap_as_share_of_the_loss(name, variant):
    """Below 0.3% by the whole interval, above it, or around it."""
    for share, verdict in ((0.001, HOLDS), (0.01, FAILS), (0.003, UNTOLD)):
        gap = {'loss_top_c': 1.0, 'routing_gap': lambda seed, s=share: s + 1e-4 * seed}
        assert judged(name, a_study({variant: 2.0}, **gap))['verdict'] == verdict


def test_accuracy_of_a_rule_from_what_it_selects():
    """Counted on tokens: as the mean of agreement; who never enters is right by 1 - capacity."""
    generator = np.random.default_rng(0)
    right = generator.permutation(8000) < 1000
    taken = right ^ (generator.random(8000) < 0.05)
    both = (right & taken).sum()
    row = {'routing': routing(taken.mean(), both / taken.sum(), both / 1000)}
    assert routing_claims.accuracy(row, 0.125) == pytest.approx((right == taken).mean())
    assert routing_claims.accuracy({'routing': routing(0.0, None, 0.0)}, 0.125) == 0.875


def test_predictor_accuracy_and_selected_fraction():
    """Each verdict of both; the numbers differ a little by seed."""
    of_mod = ((0.125, 0.99, 0.99, HOLDS), (0.1, 0.9, 0.7, FAILS), (0.12, 0.9, 0.86, UNTOLD))
    for selected, precision, recall, verdict in of_mod:
        rows = {
            'routing': lambda seed, f=(selected, precision, recall): routing(
                *f[:2], f[2] + 0.01 * seed - 0.01
            )
        }
        row = judged('predictor_accuracy', a_study({'mod': 2.0}, **rows))
        assert row['verdict'] == verdict and 'recall' in row['ours'], row
    for selected, verdict in ((0.125, HOLDS), (0.05, FAILS), (0.149, UNTOLD)):
        rows = {'routing': lambda seed, s=selected: routing(s + 0.002 * seed, 1.0, 1.0)}
        row = judged('selected_under_aux_loss', a_study({'aux_loss': 2.0}, **rows))
        assert row['verdict'] == verdict, row


def test_half_in_every_block_in_perplexity_per_byte():
    """Within 0.3 of another unit at 45% saved; further off; around it; or saving too little."""
    name = 'half_in_every_block'
    for bits, verdict in ((2.05, UNTOLD), (2.2, FAILS), (math.log2(4.3), UNTOLD)):
        row = judged(name, a_study({'dense': 2.0, 'every_0.5': bits}))
        assert row['verdict'] == verdict and row['ours'].startswith('saves 45%'), row
    dear = a_study({'dense': 2.0, 'every_0.5': 2.0})
    for row in dear['runs']:
        row['flops_per_forward'] = 1.0
    assert judged(name, dear)['verdict'] == FAILS


def test_post_norm_gains_more_by_four_groups():
    """The difference of two differences has the noise of all four."""
    losses = {'dense': 2.0, 'moda': 1.99, 'dense_post': 2.1}
    for post, verdict in ((2.0, HOLDS), (2.2, FAILS), (2.085, UNTOLD)):
        row = judged('post_gains_more', a_study(losses | {'moda_post': post}, 'steps'))
        assert row['verdict'] == verdict, row


def test_cost_is_counted():
    """Within a point of the paper's number, with attention by causal pairs; ours for 1.5B."""
    for moda, verdict in ((1.045, HOLDS), (1.06, FAILS)):
        flops = {
            'length': 4096,
            'dense': {'halved': 1, 'full': 1},
            'moda': {'halved': moda, 'full': 1},
        }
        counted = dict.fromkeys(('moda_700m', 'moda_1b5'), flops)
        assert judged('cost_moda_700m', counted=counted)['verdict'] == verdict
        assert judged('cost_moda_1b5', counted=counted)['verdict'] == UNTOLD
    assert judged('cost_moda_700m')['verdict'] == UNTOLD


def measured(shift=0.0):
    """Measures of one run in which all that is claimed is larger than nothing by `shift`."""
    return {
        'blocks_entered': {
            **{'every': 0.1 + shift, 'every_by_chance': 0.1},
            **{'none': 0.2 + shift, 'none_by_chance': 0.2},
        },
        'entropy': {'correlation': shift},
        'classes': {name: {'entered': 0.1 + shift} for name in ('number', 'keyword')}
        | {'whitespace': {'entered': 0.1}},
        'first_token': {'entered': 0.1 + shift, 'others_entered': 0.1},
        'layers': [
            {'score_correlation': None, 'probe_r2': 0.5 + shift},
            {'score_correlation': shift, 'probe_r2': 0.5 + shift},
        ],
        'depth_mass': {'first_token': [0.4 - shift, 0.2 - shift]},
    }


MEASURED = [claim.id for claim in verdicts.CLAIMS if claim.topic == 'Measured on trained models']


@pytest.mark.parametrize('name', MEASURED)
def test_measures_by_their_interval(name):
    """Above nothing, below it, about it; of too few seeds; not measured at all."""
    kind = 'steps' if name in ('sink_to_slots', 'sink_to_slots_post', 'less_dilution') else 'flops'
    study = a_study(dict.fromkeys(('mod', 'moda', 'dense', 'moda_post', 'dense_post'), 2.0), kind)
    for shift, verdict in ((0.05, HOLDS), (-0.05, FAILS), (0.0, UNTOLD)):
        measures = {
            row['run']: measured(
                0.01 * (row['seed'] - 1) + shift * (not row['variant'].startswith('dense'))
            )
            for row in study['runs']
        }
        row = judged(name, study, measures=measures)
        assert row['verdict'] == verdict, row
    some = {run: value for run, value in measures.items() if run.endswith(('-seed0', '-seed1'))}
    assert '2 seeds, 3 are needed' in judged(name, study, measures=some)['reason']
    row = judged(name, study)
    assert row['verdict'] == UNTOLD and row['reason'].startswith('not measured')


def test_every_verdict_of_every_rule_is_tested():
    """No claim is left out of the tests above."""
    special = {
        *('steps_faster', 'forward_cheaper', 'causal_loss_by_flops', 'depth_not_width'),
        *('best_capacity_and_pattern', 'mod_beats_dense_at_paper_budgets', 'half_in_every_block'),
        *('causal_routing_costs', 'causal_routing_costs_aux_loss', 'predictor_accuracy'),
        *('selected_under_aux_loss', 'post_gains_more'),
    }
    costs = {name for name in BY_ID if name.startswith('cost_')}
    tested = special | costs | set(DIFFERENCES) | set(MEASURED)
    unjudged = {claim.id for claim in verdicts.CLAIMS if claim.judge is None}
    assert tested | unjudged == set(BY_ID) and not tested & unjudged
    assert len(BY_ID) == len(verdicts.CLAIMS)
    empty = Evidence({}, {}, {})
    assert all('python -m launch.' in BY_ID[name].row(empty)['reason'] for name in unjudged)


def test_page_holds_each_claim_once_and_keeps_what_is_around(tmp_path):
    """Bars in text do not break cells; what stands outside the markers stays."""
    evidence = Evidence({'s': a_study({'mod': 1.9, 'dense': 2.0}, **GAP)}, {}, {})
    rows = verdicts.fill(evidence)
    table = claims_page.markdown(rows, evidence)
    for row in rows:
        assert table.count(f'(#{row["id"]})') == table.count(f'id="{row["id"]}"') == 1
    lines = [line for line in table.splitlines() if line.startswith('| [')]
    assert len(lines) == len(rows)
    assert {len(re.findall(r'(?<!\\)\|', line)) for line in lines} == {5}
    page = f'before\n{claims_page.BEGIN}\nprevious text\n{claims_page.END}\nafter\n'
    new = claims_page.replaced(page, table)
    assert new.startswith('before\n') and new.endswith('\nafter\n') and 'previous' not in new
    assert claims_page.replaced(new, table) == new
    for broken in ('', page.replace(claims_page.END, ''), page + page):
        with pytest.raises(ValueError, match='markers'):
            claims_page.replaced(broken, table)


def test_reads_studies_up_to_two_levels_down(tmp_path):
    """By their path from the directory; measures beside them; broken files named."""
    study = a_study({'mod': 1.9})
    for place in ('.', 'a', 'cpu/b', 'too/far/down'):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / 'study.json').write_text(json.dumps(study))
    (tmp_path / 'cpu/b/measures.json').write_text('{"run": {}}')
    evidence = verdicts.read_evidence(tmp_path, {})
    assert set(evidence.studies) == {tmp_path.name, 'a', 'cpu/b'}
    assert evidence.measures == {'cpu/b': {'run': {}}}
    lacking = [
        {k: v for k, v in study.items() if k != 'kind'},
        study | {'runs': [{'run': 'x'}]},
        [],
    ]
    for text, found in (
        ('{', 'JSON'),
        *zip(map(json.dumps, lacking), ("'kind'", 'runs.0.', 'list'), strict=True),
    ):
        (tmp_path / 'a' / 'study.json').write_text(text)
        with pytest.raises(ValueError, match=f'a/study.json: .*{found}'):
            verdicts.read_evidence(tmp_path, {})
    with pytest.raises(ValueError, match='no such directory'):
        verdicts.read_evidence(tmp_path / 'nowhere', {})


def test_names_are_those_that_studies_plan():
    """A misspelt variant would never be run; these three cannot be planned yet."""
    names = set(itertools.chain(*(text.split('|') for text in DIFFERENCES.values()), OTHERS))
    assert names - set(VARIANTS) <= {'average', 'mod_moda_masked', 'mod_0.0625'}
    asked = [re.search(r'--variants=(\S+)', claim.needs) for claim in verdicts.CLAIMS]
    asked = {name for found in asked if found for name in found[1].split(',')}
    assert 'mod' in asked and asked <= set(VARIANTS)
    files = {file for claim in verdicts.CLAIMS for file in re.findall(r'configs/\S+', claim.needs)}
    assert files and all((ROOT / file).exists() for file in files)


def test_runs_that_do_not_count_carry_no_verdict():
    """A void routing gap, runs that diverged beside three that did not, a best size at an edge."""
    sound = a_study({'mod': 1.9, 'random': 2.0}, **GAP)
    assert judged('learned_beats_random', sound)['verdict'] == HOLDS
    void = a_study({'mod': 1.9, 'random': 2.0}, **GAP | {'routing_gap': 0.06})
    assert 'void' in judged('learned_beats_random', void)['reason']
    better = a_study({'mod': 1.9, 'random': 2.0}, **GAP | {'routing_gap': -0.06})
    assert judged('learned_beats_random', better)['verdict'] == HOLDS  # than top-C
    lost = sound | {'diverged': [sound['runs'][0]['run'].replace('seed0', 'seed9')]}
    assert 'diverged' in judged('learned_beats_random', lost)['reason']
    others = sound | {'diverged': ['mod-4x64-5e11-lr0.01-seed0']}
    assert judged('learned_beats_random', others)['verdict'] == HOLDS
    study = a_study({'mod': 1.9, 'dense': 2.0}, **GAP)
    assert judged('mod_beats_dense', study)['verdict'] == HOLDS
    for others in (('1x64', '2x64'), ('30x64', '31x64')):  # of a best size of 4x64
        bad = a_study({f'dense {size}': 9.0 for size in others})['runs']
        sizes = {'4x64', *others}
        runs = [row for row in study['runs'] + bad if row['size'] in sizes]
        found = judged('mod_beats_dense', study | {'runs': runs})
        assert 'smallest or largest' in found['reason'], others


def test_of_equal_budgets_the_one_with_more_seeds_is_judged():
    """And of unequal ones the larger, as long as it has seeds enough."""
    few = a_study({'mod': 1.9, 'random': 2.0}, **GAP)
    many = a_study({'mod': 2.0, 'random': 1.9}, spread=(-0.01, 0.0, 0.01, 0.0, 0.01), **GAP)
    for order in ((few, many), (many, few)):
        assert judged('learned_beats_random', *order)['verdict'] == FAILS
    larger = a_study({'mod': 1.9, 'random': 2.0}, budget=2e13, steps=1200, **GAP)
    assert judged('learned_beats_random', many, larger)['verdict'] == HOLDS
