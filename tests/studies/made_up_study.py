"""A made-up study.json, without training: losses on parabolas, and seeds around them."""

import math
import random

from moddepth_jax.studies.plan import VARIANTS, base_name

LAPTOP = (
    *('dense', 'shallow', 'mod', 'mod_0.25', 'mod_0.5', 'every_0.125', 'every_0.5'),
    *('random', 'random_every_0.5', 'position', 'norm', 'aux_loss'),
)
SIZED = ('dense', 'shallow', 'mod')
# FLOPs of a forward pass, and the loss, over those of dense.
_COSTS = {'mod': 0.6, 'mod_0.25': 0.67, 'mod_0.5': 0.77, 'every_0.125': 0.21, 'every_0.5': 0.55}
_COSTS |= {'random_every_0.5': 0.55, 'moda': 1.04, 'moda_attention': 1.03, 'wider': 1.04}
_SCALES = {'mod': 0.994, 'random': 1.03, 'every_0.125': 1.06, 'position': 1.012, 'shallow': 1.001}


def made_up(
    kind='flops',
    budgets=(6e11, 2e12),
    sizes=('4x64', '8x64', '4x128'),
    variants=LAPTOP,
    seeds=(0, 1, 2, 3),
    optimum=170_000,
):
    """The content of study.json; there are several seeds at the largest budget only.

    `optimum`: parameters of the dense model at the vertex of the smallest budget's parabola.
    """
    rows = []
    for place, budget in enumerate(budgets):
        vertex = optimum * 1.6**place
        anchor = min(sizes, key=lambda size: abs(math.log(_parameters(size) / vertex)))
        for variant in variants:
            for size in sizes if variant in SIZED else [anchor]:
                last = size == anchor and budget == budgets[-1]
                for seed in seeds if last else seeds[:1]:
                    row = _row(kind, variant, size, budget, seed, vertex, 1.62 - 0.09 * place)
                    rows.append(row | {'at_best_size': size == anchor})
    return {
        'kind': kind,
        'config': 'configs/study.py',
        'overrides': {},
        'budgets': list(budgets),
        'sizes': list(sizes),
        'seeds': list(seeds),
        'variants': {
            name: {'label': VARIANTS[name].label, 'changes': VARIANTS[name].changes}
            for name in variants
        },
        'learning_rates': {'64': 0.003, '128': 0.003},
        'tuning': [
            {'width': width, 'learning_rate': rate, 'loss': 1.6 + abs(rate - 0.003) * 9}
            | {'run': f'dense-4x{width}-lr{rate}'}
            for width in (64, 128)
            for rate in (0.0015, 0.003, 0.006)
        ],
        'batch_tokens': 1024,
        'sequence_length': 128,
        'corpus': 'stdlib',
        'corpus_sha256': '0f' * 32,
        'versions': {'jax': '0.10.2', 'python': '3.11.9'},
        'complete': True,
        'missing': [],
        'diverged': [],
        'runs': rows,
    }


def _parameters(size):
    layers, width = map(int, size.split('x'))
    return 12 * layers * width**2 + 256 * width


def _row(kind, variant, size, budget, seed, vertex, lowest):
    layers, width = map(int, size.split('x'))
    base, more = base_name(variant), {}
    if variant == 'shallow':
        more, layers = {'size_of_mod': size}, max(1, round(layers * 0.6))
    size = f'{layers}x{width}'
    parameters = _parameters(size) + 40 * layers * (base not in ('dense', 'shallow'))
    routed = base not in ('dense', 'shallow', 'wider', 'moda', 'moda_attention')
    cost = _COSTS.get(base, 0.6 if routed else 1)
    flops_per_step = 6 * parameters * 1024 * cost
    steps = int(budget) if kind == 'steps' else int(budget // flops_per_step)
    noise = random.Random(f'{variant} {size} {budget} {seed}').gauss(0, 0.004)
    above = 0.03 * math.log(parameters * cost / vertex) ** 2
    loss = (lowest + above) * _SCALES.get(base, 1.003) + noise
    marks = [max(1, steps * (i + 1) // 40) for i in range(40)]
    routing = {'selected_fraction': 0.12, 'precision': 0.93, 'recall': 0.8}
    row = {'run': f'{variant}-{size}-{budget:g}-lr0.003-seed{seed}', 'variant': variant}
    row |= {'size': size, **more, 'layers': layers, 'width': width, 'budget': budget, 'seed': seed}
    row |= {'learning_rate': 0.003, 'parameters': parameters, 'active_parameters': parameters}
    row |= {'steps': steps, 'skipped_steps': 0, 'flops_per_step': flops_per_step}
    row |= {'flops_per_forward': flops_per_step / 3, 'total_flops': flops_per_step * steps}
    row |= {'epochs': steps * 1024 / 1.1e7, 'loss': loss, 'bits_per_byte': loss / math.log(2)}
    row |= {'loss_top_c': loss - 0.001, 'routing_gap': 0.001, 'rule': 'predictor'}
    row |= {'routing': {'layer_01': routing}}
    if not routed:
        row |= dict.fromkeys(('loss_top_c', 'routing_gap', 'rule')) | {'routing': {}}
    row['curve'] = [[m, loss - 0.1 + 3.5 * math.exp(-7 * m / steps)] for m in marks]
    return row | {'state_sha256': 'ab' * 32}
