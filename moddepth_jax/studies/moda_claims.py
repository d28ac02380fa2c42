"""Claims on experts (MoDE) and on MoDA (Zhu et al. 2026, arXiv 2603.15619)."""

from moddepth_jax.studies.claims import (
    FAILS,
    HOLDS,
    UNTOLD,
    Claim,
    Outcome,
    lower_loss,
    problem_of,
    told_groups,
    verdict_below,
)
from moddepth_jax.studies.mod_claims import BELOW
from moddepth_jax.studies.plan import VARIANTS
from moddepth_jax.studies.statistics import choose, interval

EXPERTS, TOPIC = 'Mixture-of-Depths and experts', 'Mixture-of-Depths Attention'
_STEPS = ('steps',)
_POINT = 0.01  # of the FLOPs of the dense model: what still counts as the paper's cost
_EXPERT_RUNS = (
    'runs: python -m launch.isoflop --config=configs/moe.py --budgets=6.4e12 --sizes=4x128 '
    '--variants=dense,moe,moe_capacity_0.5,integrated --seeds=0,1,2'
)
_MODA_RUNS = 'runs: python -m launch.isoflop --config=configs/moda.py --steps=600 --sizes=8x64'
_LARGE = 'several GPUs for weeks: python -m launch.train --config=configs/{} --mesh=data=8'


def _runs(*variants):
    return f'{_MODA_RUNS} --variants={",".join(variants)} --seeds=0,1,2'


def _gains_more(evidence):
    """(moda - dense) under post-norm lies below (moda - dense) under pre-norm."""
    names = ('moda_post', 'dense_post', 'moda', 'dense')
    found = choose(evidence.studies, lambda place: place.shared(*names), _STEPS)
    if not found:
        return None
    place, groups = found
    values = [group.values() for group in groups]
    difference = interval(values, (1.0, -1.0, -1.0, 1.0))
    verdict, reason = verdict_below(difference)
    if problem_of(groups):
        verdict, reason = UNTOLD, problem_of(groups)
    post, pre = (interval(pair, (1.0, -1.0)) for pair in (values[:2], values[2:]))
    ours = f'post {post.mean:+.3f}, pre {pre.mean:+.3f} bits a byte: {difference.told("+.3f")}'
    return Outcome(ours, told_groups(groups), verdict, reason, place.told(groups))


def _cost(shape, paper, published=True):
    """A judge of counted FLOPs: needs no run.

    Args:
      shape: name in Evidence.counted.
      paper: its cost, over dense.
      published: whether the paper gives that shape.
    """

    def judge(evidence):
        if shape not in evidence.counted:
            return None
        counted = evidence.counted[shape]
        halved, full = (
            counted['moda'][way] / counted['dense'][way] - 1 for way in ('halved', 'full')
        )
        verdict, reason = HOLDS, f'within one percentage point of {paper:.1%}'
        if abs(halved - paper) > _POINT:
            verdict, reason = FAILS, f'more than one percentage point from {paper:.1%}'
        if not published:
            verdict, reason = UNTOLD, 'the paper does not give this shape; ours is a guess'
        ours = f'+{halved:.1%} (attention not halved for causality: +{full:.1%})'
        setting = f'configs/{shape}.py, rows of {counted["length"]} tokens, counted, no run'
        return Outcome(ours, 'none: a count', verdict, reason, setting)

    return judge


def _cost_claim(shape, title, paper, published=True):
    return Claim(
        f'cost_{shape}',
        TOPIC,
        f'MoDA with mlp slots costs {paper:.1%} more FLOPs than dense at {title}',
        'MoDA, cost of the method',
        f'+{paper:.1%}',
        'Forward pass counted by moddepth_jax.model.flops. Holds: within one percentage point of '
        "the paper's; does not hold: further off.",
        _cost(shape, paper, published),
    )


EXPERT_CLAIMS = (
    Claim(
        'mode_beats_lower_capacity',
        EXPERTS,
        'Integrated MoDE has a lower loss than experts of half the capacity',
        'MoD, section 4.3',
        'distinctly better',
        f'integrated against moe_capacity_0.5 at one size, equal training FLOPs; {BELOW}',
        lower_loss('integrated', 'moe_capacity_0.5'),
        _EXPERT_RUNS,
    ),
    Claim(
        'mode_beats_moe',
        EXPERTS,
        'Integrated MoDE has a lower loss than experts alone',
        'MoD, section 4.3, figure 7',
        'loss over dense at 0.6 of the FLOPs: experts 0.983, MoDE 0.969',
        f'integrated against moe at one size, equal training FLOPs; {BELOW}',
        lower_loss('integrated', 'moe'),
        _EXPERT_RUNS,
    ),
    Claim(
        'moe_beats_dense',
        EXPERTS,
        'Experts have a lower loss than the dense model',
        'MoD, section 4.3, figure 7',
        'loss over dense at 0.6 of the FLOPs: dense 1.007, experts 0.983',
        f'moe against dense at one size, equal training FLOPs; {BELOW}',
        lower_loss('moe', 'dense'),
        _EXPERT_RUNS,
    ),
)

_SMALL = 'MoDA, 48 layers of width 384'
_PRE = 'pre-norm {} (dense 3.3800)'
_POST = 'post-norm {} (dense 3.4062); 24 layers {} (3.4740)'


def _small(name, claim, first, second, paper, source=_SMALL, kinds=_STEPS):
    equal = ' or '.join({'steps': 'equal steps', 'flops': 'equal FLOPs'}[kind] for kind in kinds)
    rule = f'{first} against {second} at one size and {equal}; {BELOW}'
    judge = lower_loss(first, second, kinds)
    unplanned = ', '.join(variant for variant in (first, second) if variant not in VARIANTS)
    needs = f'runs of {unplanned}, which no study plans' if unplanned else _runs(first, second)
    return Claim(name, TOPIC, claim, source, paper, rule, judge, needs)


CLAIMS = (
    _small(
        'moda_attention_pre',
        'Attention slots lower the loss at equal tokens, pre-norm',
        'moda_attention',
        'dense',
        _PRE.format('3.3759'),
    ),
    _small(
        'moda_pre',
        'Attention and mlp slots lower the loss at equal tokens, pre-norm',
        'moda',
        'dense',
        _PRE.format('3.3656'),
    ),
    _small(
        'moda_attention_post',
        'Attention slots lower the loss at equal tokens, post-norm',
        'moda_attention_post',
        'dense_post',
        _POST.format('3.3653', '3.4537'),
    ),
    _small(
        'moda_post',
        'Attention and mlp slots lower the loss at equal tokens, post-norm',
        'moda_post',
        'dense_post',
        _POST.format('3.3484', '3.4338'),
    ),
    _small(
        'moda_beats_wider_pre',
        'MoDA has a lower loss than a dense model with as many parameters, pre-norm',
        'moda',
        'wider',
        'not compared',
        'ours (control)',
    ),
    _small(
        'moda_beats_wider_post',
        'MoDA has a lower loss than a dense model with as many parameters, post-norm',
        'moda_post',
        'wider_post',
        'not compared',
        'ours (control)',
    ),
    _small(
        'moda_beats_best_baseline',
        'Post-norm MoDA has a lower loss than the better baseline, the pre-norm dense model',
        'moda_post',
        'dense',
        '3.3484 against 3.3800, with 3.8% more parameters',
    ),
    Claim(
        'post_gains_more',
        TOPIC,
        'Slots gain more under post-norm than under pre-norm',
        _SMALL,
        'post 0.0578, pre 0.0144',
        'The gain is the mean loss of moda less that of dense. Holds: the t interval (Welch, four '
        'groups at one size) of the post-norm gain less the pre-norm one lies below 0. Does not '
        'hold: above.',
        _gains_more,
        _runs('dense', 'moda', 'dense_post', 'moda_post'),
    ),
    _small(
        'moda_beats_average',
        'MoDA has a lower loss than a learned average of earlier layers (after DenseFormer)',
        'moda',
        'average',
        'not compared',
        'ours (rival)',
    ),
    _small(
        'mod_moda_beats_mod',
        'MoD with depth slots has a lower loss than MoD alone',
        'mod_moda',
        'mod',
        'not tried',
        'ours',
        ('flops', 'steps'),
    ),
    _small(
        'projected_beats_masked',
        'With MoD, slots projected for tokens that skip beat leaving these out (masked)',
        'mod_moda',
        'mod_moda_masked',
        'not tried',
        'ours',
        ('flops', 'steps'),
    ),
    Claim(
        'parts_at_700m',
        TOPIC,
        'Each part adds to the mean score on ten tasks at 700M',
        'MoDA, 700M',
        '36 layers 56.93, 38 layers 57.11, + slots 58.10, + mlp slots 58.87, + projection 58.97',
        'None here: no such run.',
        needs=_LARGE.format('moda_700m.py'),
    ),
    Claim(
        'moda_at_scale',
        TOPIC,
        'MoDA lowers perplexity and raises ten tasks at 700M and 1.5B on 400B tokens',
        'MoDA, 700M and 1.5B',
        'perplexity 15.61 to 15.46, 13.67 to 13.47; tasks 57.11 to 58.87, 62.28 to 64.39',
        'None here: no such run.',
        needs=_LARGE.format('moda_1b5.py'),
    ),
    _cost_claim('moda_700m', '700M', 0.040),
    _cost_claim('moda_48l', '48 layers of width 384', 0.054),
    _cost_claim('moda_1b5', '1.5B', 0.037, published=False),
    Claim(
        'kernel_stages',
        TOPIC,
        'Each stage of the kernel is faster than the one before, at T = 1024',
        'MoDA, kernel',
        'naive 2128.9, flash layout 13.1, chunks 6.29, groups 1.46 ms',
        'None here: a time on a GPU.',
        needs='a GPU: python -m launch.gpu --cases=time/',
    ),
)
