"""Claims on Mixture-of-Depths at equal training FLOPs (Raposo et al. 2024, arXiv 2404.02258)."""

from moddepth_jax.studies import judges
from moddepth_jax.studies.claims import Claim, lower_loss
from moddepth_jax.studies.statistics import MIN_SIZES

TOPIC = 'Mixture-of-Depths at equal training FLOPs'
BELOW = (
    'holds if the Welch interval of the first mean less the second lies below 0, does not hold if '
    'it lies above.'
)
STUDY = (
    'python -m launch.isoflop --config=configs/study.py --budgets=2e13 --sizes=4x128,6x128,8x128'
)
_POD = (
    'a pod: python -m launch.isoflop --config=configs/mod_isoflop_paper.py '
    '--budgets=6e18,2e19,1e20 --sizes=8x512,12x1024,24x1024,24x1536 --variants=dense,shallow,mod '
    "--seeds=0,1,2 --config.data.source='/data/text/*.parquet'"
)


def _runs(*variants):
    return f'runs: {STUDY} --variants={",".join(variants)} --seeds=0,1,2'


CLAIMS = (
    Claim(
        'mod_beats_dense',
        TOPIC,
        'MoD (12.5%, every other block) has a lower loss than the isoFLOP-optimal dense model',
        'MoD, section 4.1, figure 4',
        'up to 1.5% lower (3.09 against 3.13 at 6e18 FLOPs, read off, +-0.02)',
        f'Each at its best size, dense of {MIN_SIZES} or more; {BELOW}',
        judges.against_best_dense('mod'),
        _runs('dense', 'mod'),
    ),
    Claim(
        'mod_beats_dense_at_paper_budgets',
        TOPIC,
        'MoD has a lower loss than the isoFLOP-optimal dense model at 6e18 FLOPs and more',
        'MoD, section 4.1, figure 4',
        '3.09 against 3.13, 2.83 / 2.86 (2e19), 2.56 / 2.59 (1e20), read off, +-0.02',
        f'As above, at budgets from 6e18 on; {BELOW}',
        judges.against_best_dense('mod', least_budget=6e18),
        _POD,
    ),
    Claim(
        'mod_beats_shallow',
        TOPIC,
        "MoD has a lower loss than a shallower dense model with MoD's FLOPs per forward pass",
        'ours (control)',
        'not compared',
        f'Each at its own best size; {BELOW}',
        lower_loss('mod', 'shallow', shared=False),
        _runs('dense', 'shallow', 'mod'),
    ),
    Claim(
        'steps_faster',
        TOPIC,
        "A MoD model that equals the optimal dense model's loss steps faster",
        'MoD, section 4.1, figure 3',
        '66% faster',
        'Among MoD sizes with fewer FLOPs per step than the best dense size, equal are those whose '
        f'mean loss is no higher and whose interval excludes {judges.MARGIN:.0%} worse. Holds: '
        'there is one (ours: the cheapest). Does not hold: the interval of each lies above 0. '
        'Counted FLOPs, not time.',
        judges.equal_loss(lambda ratio: f'{ratio - 1:.0%} faster', 1.66),
        'cheaper MoD sizes; ' + _runs('dense', 'mod'),
    ),
    Claim(
        'forward_cheaper',
        TOPIC,
        "A MoD model that equals the optimal dense model's loss has a cheaper forward pass",
        'MoD, section 4.1',
        '50% fewer FLOPs and more',
        'The same sizes and the same rule: a step is three forward passes.',
        judges.equal_loss(lambda ratio: f'{1 - 1 / ratio:.0%} fewer FLOPs', 2.0),
        'cheaper MoD sizes; ' + _runs('dense', 'mod'),
    ),
    Claim(
        'causal_loss_by_flops',
        TOPIC,
        'By its causal rule MoD beats the best dense loss at 0.5 to 0.85 of its FLOPs per forward',
        'MoD, section 4.2, figure 6',
        'loss over dense by FLOPs: 0.43: 1.006, 0.56: 0.999, 0.64: 0.994, 0.80: 0.989 (read off)',
        'Holds: the Welch interval of some MoD size in that range lies below 0. Does not hold: '
        'that of each lies above 0.',
        judges.causal_loss_by_flops,
        'MoD sizes in that range; ' + _runs('dense', 'mod'),
    ),
    Claim(
        'depth_not_width',
        TOPIC,
        'The optimal MoD has more parameters and the same FLOPs per forward as the optimal dense '
        'model: add depth, not width',
        'MoD, section 4.1',
        'a rule in words',
        'Parabolas through the sizes, one for each seed. Holds: the interval (t, of logarithms, '
        'over 3 seeds or more) of the parameters lies above 1 and that of the FLOPs within '
        f'{judges.NEAR:.0%} of 1. Does not hold: one lies wholly outside.',
        judges.depth_not_width,
        'three sizes of dense and mod; ' + _runs('dense', 'mod'),
    ),
    Claim(
        'best_capacity_and_pattern',
        TOPIC,
        'Capacity 12.5% in every other block is the best of those tried',
        'MoD, section 4.1, figure 3',
        '12.5%, every other block',
        'At one size, by Welch intervals of the difference of means. Holds: below 0 against '
        'each of 25%, 50%, and every block at 12.5% and 50%. Does not hold: above 0 against one.',
        judges.best_of('mod', 'mod_0.25', 'mod_0.5', 'every_0.125', 'every_0.5'),
        _runs('mod', 'mod_0.25', 'mod_0.5', 'every_0.125', 'every_0.5'),
    ),
    Claim(
        'every_block_worse',
        TOPIC,
        'Routing every block at 12.5% is worse than every other block',
        'MoD, section 4.1, figure 3',
        'worse',
        f'mod against every_0.125 at one size; {BELOW}',
        lower_loss('mod', 'every_0.125'),
        _runs('mod', 'every_0.125'),
    ),
    Claim(
        'every_block_worse_at_half',
        TOPIC,
        'Routing every block at 50% is worse than every other block at 50%',
        'MoD, section 4.1, figure 3',
        'worse',
        f'mod_0.5 against every_0.5 at one size; {BELOW}',
        lower_loss('mod_0.5', 'every_0.5'),
        _runs('mod', 'mod_0.5', 'every_0.5'),
    ),
    Claim(
        'capacity_trend',
        TOPIC,
        'The loss falls with the capacity, from 95% down to 12.5%',
        'MoD, section 4.1',
        'a trend',
        'Every other block, at one size, from the largest capacity that was run. Holds: 12.5% is '
        'better than it by the whole Welch interval, and no step is worse by its own. Does not '
        'hold: the whole interval is on the other side, or a step is worse by its own.',
        judges.down_to_best_capacity,
        _runs('mod', 'mod_0.25', 'mod_0.5'),
    ),
    Claim(
        'capacity_below',
        TOPIC,
        'Below a capacity of 12.5% the loss rises',
        'MoD, section 4.1',
        'a trend',
        f'mod against the smallest capacity below 12.5%, at one size; {BELOW}',
        judges.below_best_capacity,
        'runs of a capacity below 12.5%, which no study plans',
    ),
    Claim(
        'equal_time',
        TOPIC,
        'At equal training FLOPs MoD takes as long to train as the dense model',
        'MoD, section 4.1',
        'equal wall-clock time',
        'None here: study.json holds no times, so that a study run twice has the same bytes.',
        needs='an idle GPU: python -m launch.bench step --variants=dense,mod --size=124m '
        '--dtype=bfloat16',
    ),
)
