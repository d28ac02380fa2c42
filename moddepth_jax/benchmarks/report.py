"""Writes the report on results of launch.gpu: a page with all numbers, and claims."""

import collections
import json
import pathlib

from moddepth_jax.benchmarks import attention_report
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.attention_forms import BOTH, PLAIN
from moddepth_jax.benchmarks.decoding import decoding_table
from moddepth_jax.benchmarks.experts import experts_tables
from moddepth_jax.benchmarks.models import TITLES
from moddepth_jax.benchmarks.results import BAD, FILE, Results
from moddepth_jax.benchmarks.steps import compare, steps_table
from moddepth_jax.studies.judges import FAILS, HOLDS
from moddepth_jax.training.devices import peak_flops
from moddepth_jax.training.tables import Table, to_markdown

CLAIM_COLUMNS = ('claim', 'paper', 'ours', 'verdict', 'reason')
EFFICIENCY = 0.973  # relative to FlashAttention-2 at T = 64k, claimed by the MoDA paper
SAVING = 0.9  # least realised share of the FLOP saving


def starting(rows: dict[str, dict], start: str) -> dict[str, dict]:
    """Return the rows with status ok whose names begin with `start`, by the rest of the name."""
    return {
        name.removeprefix(start): row
        for name, row in rows.items()
        if name.startswith(start) and row['status'] == 'ok'
    }


def timed(rows: dict[str, dict]) -> list[dict]:
    """Return one result of bench_case per shape, joining the implementations; baseline first."""
    joined = {}
    for row in starting(rows, 'time/').values():
        held = joined.setdefault(tuple(row[field] for field in Case._fields), row | {'rows': []})
        held['baseline'] = held['baseline'] or row['baseline']
        names = {other['implementation'] for other in held['rows']}
        held['rows'] += [new for new in row['rows'] if new['implementation'] not in names]
    return list(joined.values())


def _machines(rows):
    """A line for each device, with versions, commit and dates."""
    found = collections.defaultdict(list)
    for row in rows.values():
        versions = ', '.join(f'{name} {version}' for name, version in row['versions'].items())
        toy = ', toy sizes' if row.get('toy') else ''
        line = f'{row["device"]}{toy}; {versions}; {row["software"]}; commit {row["commit"][:12]}'
        found[line].append(row['date'][:10])
    return [f'- {line} ({min(dates)} to {max(dates)})' for line, dates in found.items()]


def _outcomes(rows):
    """The number of cases by status, and a line for each case that is not ok."""
    counts = collections.Counter(row['status'] for row in rows.values())
    minutes = sum(row['seconds'] for row in rows.values()) / 60
    listed = ', '.join(f'{number} {status}' for status, number in counts.items())
    return [f'{len(rows)} cases in {minutes:.0f} minutes: {listed}.', ''] + [
        f'- **{status}** {name}: {row["reason"]}'
        for status in (*BAD, 'cut', 'missing', 'skipped')
        for name, row in rows.items()
        if row['status'] == status
    ]


def _correctness(rows):
    """A table by kernel: numbers of correct cases, and the largest error over the allowed error."""
    by_kernel = {}
    for name, row in rows.items():
        kind, kernel, *rest = name.split('/')
        if kind in ('right', 'packed'):
            title = f'{kernel}, packed documents' if kind == 'packed' else kernel
            title = f'{rest[0]}, decoding' if kernel == 'decode' else title
            by_kernel.setdefault(title, []).append(row)
    cells = {}
    for title, of_kernel in by_kernel.items():
        right = [row for row in of_kernel if row['status'] == 'ok']
        bad = sum(row['status'] in BAD for row in of_kernel)
        worst = [
            error / row['allowed'][what]
            for row in right
            for what, error in row.get('errors', {}).items()
        ]
        name = 'sequence_gradients_rerun_equal'
        equal = [row[name] for row in right if name in row]
        cells[title] = [
            *map(str, (len(right), bad, len(of_kernel) - len(right) - bad)),
            f'{max(worst):.2f}' if worst else '-',
            {True: 'yes', False: 'no'}[all(equal)] if equal else '-',
        ]
    heads = ['', 'right', 'wrong, failed or hung', 'skipped', 'largest error / allowed']
    heads.append('dq, dk, dv equal in a rerun')
    return to_markdown(Table('against the softmax in float64', heads, cells)) if cells else []


def _ceilings(rows):
    found = [row['ceilings'].values() for row in starting(rows, 'machine/ceilings').values()]
    line = 'Copy {:.4g} GB/s, bf16 product {:.4g} TFLOP/s.'
    return [line.format(copy / 1e9, product / 1e12) for copy, product in found]


def _attention(rows):
    results, page = timed(rows), []
    for row in starting(rows, 'machine/ceilings').values() if results else ():
        copy = row['ceilings']['copy_bytes_per_second']
        table = attention_report.targets_table(results, copy)
        page += to_markdown(table) if table.lines else []
    for result in results:
        page += to_markdown(attention_report.case_table(result))
        page += [*(f'- {line}' for line in attention_report.failures(result)), '']
    return page


def _compared_steps(rows):
    """Rows of training steps by size and model, with ratios to the dense model."""
    by_size = {}
    for name, row in starting(rows, 'step/').items():
        size, model = name.split('/')
        by_size.setdefault(size, {})[model] = dict(row)
    for models in by_size.values():
        dense = models.get('dense')
        for row in models.values():
            if peak := peak_flops(row['device']):
                row['mfu'] = row['flops_per_second'] / peak
            if dense:
                seconds = dense['step_seconds']
                row |= compare(row['step_seconds'], row['flops'], seconds, dense['flops'])
    return by_size


def _model_tables(rows):
    for size, models in _compared_steps(rows).items():
        first = next(iter(models.values()))
        title = f'train step, {size}, {first["rows"]} rows of {first["length"]}, bfloat16'
        yield steps_table(title, list(models.values()))
    for name, row in starting(rows, 'decode/').items():
        yield decoding_table(f'decoding, {name}', row, TITLES[row['model']])
    if row := starting(rows, 'run/').get('train'):
        names = ('final_step', 'parameters', 'train_loss', 'tokens_per_second', 'flops_per_second')
        lines = {name: [f'{row[name]:.6g}'] for name in names if row[name] is not None}
        lines |= {f'eval {name}': [str(value)] for name, value in row['eval'].items()}
        yield Table('training run, MoD with MoDA, bfloat16', ['', ''], lines)
    for row in starting(rows, 'experts/').values():
        yield from experts_tables(row)


def _decoding_kernels(rows):
    """A table of the times of decoding attention over full caches, by kernel and shape."""
    cells = {
        name.replace('/', ', '): [
            f'{row["milliseconds"]:.3f}',
            f'{row["gigabytes_per_second"]:.0f}',
            f'{row["xla_milliseconds"]:.3f}',
            f'{row["times_as_fast_as_xla"]:.2f}',
        ]
        for name, row in starting(rows, 'decode_kernel/').items()
    }
    heads = ['', 'ms', 'GB/s of the least bytes', 'ms of XLA', 'times as fast as XLA']
    return to_markdown(Table('decoding, one layer', heads, cells)) if cells else []


def _models(rows):
    page = [line for table in _model_tables(rows) for line in to_markdown(table)]
    for name, row in starting(rows, 'step/').items():
        page += [f'- {name}: {line}' for line in row['attention_backends']]
    return page


def _fresh_seconds(rows, implementation, over):
    """Seconds of both passes at T = 64k; None if not timed."""
    row = rows.get(f'time/{implementation}/64k', {'rows': ()})
    return attention_report.find(row, 'seconds', over, 'fresh').get(implementation)


def _judge_efficiency(rows):
    """Judge the time of FlashAttention-2 in Triton without slots over our best with slots."""
    plain = _fresh_seconds(rows, 'flash_attention_2', PLAIN)
    names = ('mosaic_gpu', 'mosaic_gpu_fused', 'pallas')
    ours = {seconds: name for name in names if (seconds := _fresh_seconds(rows, name, BOTH))}
    if plain and ours:
        best = min(ours)
        times = f'{1e3 * best:.1f} ms with slots; FlashAttention-2 without: {1e3 * plain:.1f} ms'
        yield {
            'id': 'kernel_efficiency',
            'claim': 'The kernel reaches 97.3% of the efficiency of FlashAttention-2 at T = 64k',
            'paper': '97.3%',
            'rule': 'Both passes, T = 65536, G = 8, L = 64, H = 64, bfloat16. Holds: at 97.3% or '
            'above.',
            'ours': f'{plain / best:.1%}',
            'verdict': HOLDS if plain / best >= EFFICIENCY else FAILS,
            'reason': f'{ours[best]}: {times}',
        }


def _judge_equal_time(rows):
    """Judge whether the time of a MoD step shrinks as much as its FLOPs."""
    what = 'At equal training FLOPs MoD takes as long to train as the dense model'
    for size, models in _compared_steps(rows).items():
        if {'dense', 'mod'} <= models.keys():
            dense, mod = (1e3 * models[name]['step_seconds'] for name in ('dense', 'mod'))
            saving = models['mod']['realised_saving']
            yield {
                'id': f'equal_time_{size}',
                'claim': f'{what}, {size}',
                'paper': 'equal',
                'rule': 'One training step. Holds: (FLOP ratio / time ratio) is at least 0.9.',
                'ours': f'{saving:.3f}',
                'verdict': HOLDS if saving >= SAVING else FAILS,
                'reason': f'{dense:.1f} ms dense, {mod:.1f} ms MoD',
            }


def judge_claims(rows: dict[str, dict]) -> list[dict]:
    """Return rows as in claims.json of launch.claims, for each claim that has data.

    The rules were fixed before the first result. `rows` has the newest row of each case by name.
    """
    ok = {name: row for name, row in rows.items() if row['status'] == 'ok' and not row.get('toy')}
    judged = (*_judge_efficiency(ok), *_judge_equal_time(ok))
    return [{'topic': 'GPU', 'spread': '-'} | row for row in judged]


def _claims(rows):
    lines = {row['id']: [row[name] for name in CLAIM_COLUMNS] for row in judge_claims(rows)}
    return to_markdown(Table('by rule', ['', *CLAIM_COLUMNS], lines)) if lines else []


def page(rows: dict[str, dict], title: str) -> str:
    """Return the page in Markdown from the newest row of each case."""
    lines = [f'# {title}', '', *_machines(rows), '', *_outcomes(rows), '']
    sections = {'Ceilings': _ceilings, 'Correctness': _correctness, 'Attention': _attention}
    sections |= {'Decoding': _decoding_kernels, 'Models': _models, 'Claims': _claims}
    for name, section in sections.items():
        if found := section(rows):
            lines += [f'## {name}', '', *found, '']
    return '\n'.join(lines).replace('\n\n\n', '\n\n').rstrip() + '\n'


def write(out: pathlib.Path) -> list[pathlib.Path]:
    """Write table.md, claims.json and, if attention was timed, attention.png into `out`.

    Returns their paths. Raises ValueError if there are no results.
    """
    rows = Results(out / FILE).latest
    if not rows:
        raise ValueError(f'--out={out}: holds no {FILE} with results; launch.gpu writes it')
    texts = {'table.md': page(rows, out.absolute().name)}
    texts['claims.json'] = json.dumps(judge_claims(rows), indent=1) + '\n'
    for name, text in texts.items():
        (out / name).write_text(text, encoding='utf-8')
    ok = {name: row for name, row in rows.items() if not row.get('toy')}
    drawn = attention_report.draw_times(timed(ok), out / 'attention.png')
    return [out / name for name in (*texts, *['attention.png'] * drawn)]
