"""The tables of docs/depth_streams.md and its pages have the numbers of the committed results."""

import functools
import json
import re

import numpy as np
import pytest

from moddepth_jax.studies.statistics import interval
from tests.documented import ROOT

RESULTS = ROOT / 'results/cpu'
STREAMS, SHALLOW, DEEP = 'study-streams', 'study-moda/8x64', 'study-moda/24x64'
BENCHES = [f'depth_streams_2026-11-{day}.json' for day in (23, 24, 26)]
# First cell of a row: the variant, and its label in the benchmark of time.
ROWS = {
    '`residual`': ('dense', 'dense'),
    '`dense` (8 seeds)': ('dense_average', None),
    '`attention` (8 seeds)': ('depth_attention', None),
    '`average`': ('average', None),
    '`moda`, attention+ffn': ('moda', 'MoDA'),
    '`moda`, attention+ffn (8 seeds)': ('moda', None),
    '`value_residual`, learned': ('value_residual', 'value residual'),
    '`value_attention`, two sources': ('value_attention', None),
    '`value_attention`, stride 1': (None, 'values of all earlier layers in a softmax'),
    '`attention_residual`, full': ('attnres', 'attention residuals'),
    '`attention_residual`, blocks of 4 sublayers': (
        'attnres_block',
        'attention residuals, blocks of 4 sublayers',
    ),
    '`hyper_connections`, dynamic': ('hyper', 'hyper-connections'),
    '`hyper_connections`, constrained': ('mhc', 'manifold-constrained hyper-connections'),
    '`mudd`, dynamic': ('mudd', 'MUDD connections'),
    '`mudd`, static': ('mudd_static', 'static MUDD connections'),
    '`model.embedding_residual`': ('embedding_residual', 'embedding residual'),
    '`model.value_embeddings`': ('value_embeddings', None),
}


def table(*heads):
    """Return the cells of each row of the table with these heads, by the first cell."""
    docs = ROOT / 'docs'
    files = docs / 'depth_streams.md', *sorted((docs / 'depth_streams').glob('*.md'))
    text = '\n'.join(file.read_text(encoding='utf-8') for file in files)
    _, _, rest = text.partition(f'| {" | ".join(heads)} |\n')
    rows = [line[1:-1].split('|') for line in rest.split('\n\n')[0].splitlines()[1:]]
    assert rows, heads
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows}


@functools.cache
def read(name):
    return json.loads((RESULTS / name).read_text())


def runs(study):
    """Return the runs of a study by variant and seed."""
    found = {}
    for run in read(f'{study}/study.json')['runs']:
        found.setdefault(run['variant'], {})[run['seed']] = run
    return found


def difference(of_seed, base):
    """Return the interval of paired differences; both arguments are numbers by seed."""
    assert of_seed.keys() == base.keys()
    return interval([[of_seed[seed] - base[seed] for seed in sorted(base)]])


def against(study, variant, base):
    """Return the FLOPs of a variant over those of its base, and its difference in percent."""
    both = [runs(study).get(name) for name in (variant, base)]
    if None in both:
        return '', ''
    mean = np.mean([run['bits_per_byte'] for run in both[1].values()])
    shares = ({seed: run['bits_per_byte'] / mean for seed, run in side.items()} for side in both)
    flops = [next(iter(side.values()))['flops_per_step'] for side in both]
    return f'{flops[0] / flops[1]:.2f}', format(difference(*shares), '+.1%')


def test_differences_from_wider_models():
    rows = table(
        *('stream', 'FLOPs over `wider`, 8 and 24 layers', '8 layers', '24 layers'),
        *('FLOPs over `wider_mhc`', 'against `wider_mhc`, 8 layers'),
    )
    assert len(rows) >= 13
    for name, cells in rows.items():
        few, variant = '(8 seeds)' in name, ROWS[name][0]
        shallow = against(SHALLOW if few else STREAMS, variant, 'wider')
        deep = against(DEEP, variant, 'wider')
        same = ('', '') if few else against(STREAMS, variant, 'wider_mhc')
        expected = [', '.join(filter(None, (shallow[0], deep[0]))), shallow[1], deep[1], *same]
        shown = [re.sub(r'^\[\**(.*?)\**\]\(.*\)$', r'\1', cell) for cell in cells]
        assert shown == expected, name


def test_growth_and_dilution_along_depth():
    places = ['0', '8', '16', '23']
    rows = table('stream', 'input 0', *places[1:], 'gradient 0', *places[1:], 'R²', 'difference')
    assert len(rows) >= 7
    measures = read(f'{DEEP}/measures.json')

    def by_layer(variant, key):
        """Return a number of each layer, by seed."""
        found = {seed: measures[run['run']] for seed, run in runs(DEEP)[variant].items()}
        if key == 'gradient_norms':
            return {seed: measured[key] for seed, measured in found.items()}
        return {seed: [row[key] for row in measured['layers']] for seed, measured in found.items()}

    def mean_r2(variant):
        return {seed: np.mean(row) for seed, row in by_layer(variant, 'probe_r2').items()}

    for name, cells in rows.items():
        variant, expected = ROWS[name][0], []
        for key, digits in (('input_rms', 2), ('gradient_norms', 3)):
            means = np.mean([*by_layer(variant, key).values()], axis=0)
            expected += [f'{means[int(place)]:.{digits}f}' for place in places]
        r2 = mean_r2(variant)
        expected.append(f'{np.mean([*r2.values()]):.3f}')
        change = difference(r2, mean_r2('dense'))
        expected.append('' if variant == 'dense' else format(change, '+.3f'))
        assert cells == expected, name


def test_time_per_flop():
    rows = table(
        *('stream', 'time, 32 and 64 layers', 'FLOPs', 'per FLOP'),
        *('time, 16 layers, T = 1024', 'FLOPs', 'per FLOP'),
    )
    assert len(rows) >= 10
    # Parts of a file: T = 1024 under `block` first, and depths 32 and 64 last. A later file wins.
    deep = {
        (row['model'], row['depth']): row
        for name in BENCHES
        for row in read(name)[-1]['rows']
        if row['remat'] == 'block'
    }
    long = {row['model']: row for name in BENCHES for row in read(name)[0]['rows']}

    def shown(some, digits):
        times, flops = ([row[key] for row in some] for key in ('time_ratio', 'flops_ratio'))
        ratios = np.divide(times, flops)
        parts = ((times, 2), (flops, digits), (ratios, 2))
        return [', '.join(f'{x:.{places}f}' for x in values) for values, places in parts]

    for name, cells in rows.items():
        label = ROWS[name][1]
        expected = shown([deep[label, 32], deep[label, 64]], 2) + shown([long[label]], 3)
        assert cells == expected, name


def test_weights_of_sources():
    """Cells with at most one digit after the point: percent of the softmax."""
    places = ('even', 'embedding', 'newest', 'rest')
    rows = table('read by', 'full: even', *places[1:], 'blocks of 4: even', *places[1:])
    assert len(rows) >= 9
    measures = read('study-sources/measures.json')

    def parts(variant, name):
        """Return the shares of a read in percent, means over the seeds."""
        reads = [
            measures[run['run']]['source_mass'] for run in runs('study-sources')[variant].values()
        ]
        weights = np.mean([read['weights'][read['reads'].index(name)] for read in reads], axis=0)
        seen = weights[weights > 0]
        return 100 / len(seen), 100 * seen[0], 100 * seen[-1], 100 * seen[1:-1].sum()

    for name, cells in rows.items():
        part, _, layer = name.partition(' ')
        read_name = {'attention': f'{layer}a', 'MLP': f'{layer}f', 'final': 'end'}[part]
        expected = [*parts('attnres', read_name), *parts('attnres_block', read_name)]
        assert [float(cell) for cell in cells] == [round(x, 1) for x in expected], name


@pytest.mark.parametrize(
    ('config', 'variant'),
    [
        ('depth_attention', 'depth_attention'),
        ('depth_dense', 'dense_average'),
        ('depth_average', 'average'),
    ],
)
def test_scores_of_depth_configs(config, variant):
    """The docstring has the means over seeds of the config and of the plain model."""
    text = (ROOT / f'configs/{config}.py').read_text()
    for name in (variant, 'dense'):
        mean = np.mean([run['bits_per_byte'] for run in runs(SHALLOW)[name].values()])
        assert f'{mean:.3f}' in text
