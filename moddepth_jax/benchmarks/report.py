"""What the results of launch.gpu say: one page with every number, plots, and claims."""

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
from moddepth_jax.benchmarks.tables import Table, to_markdown
from moddepth_jax.studies.claims import FAILS, HOLDS

CLAIM_COLUMNS = ('claim', 'paper', 'ours', 'verdict', 'reason')
# Dense bf16 peak of the vendor, FLOP/s, by what the device's name contains.
PEAKS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'B200': 2250e12}
EFFICIENCY = 0.973  # of FlashAttention-2, at T = 64k
SAVING = 0.9  # of what the FLOPs allow


def peak_flops(device: str) -> float | None:
    """The vendor's bf16 peak of a device; None if it is unknown."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def starting(rows: dict[str, dict], start: str) -> dict[str, dict]:
    """The ok rows of cases whose names begin with `start`, by the rest of the name."""
    return {
        name.removeprefix(start): row
        for name, row in rows.items()
        if name.startswith(start) and row['status'] == 'ok'
    }


def timed(rows: dict[str, dict]) -> list[dict]:
    """Results of bench_case, one for each shape; the rows of the baseline are the first ones."""
    joined = {}
    for row in starting(rows, 'time/').values():
        shape = tuple(row[field] for field in Case._fields)
        if shape not in joined:
            joined[shape] = row | {'rows': list(row['rows'])}
            continue
        held = joined[shape]
        held['baseline'] = held['baseline'] or row['baseline']
        names = {other['implementation'] for other in held['rows']}
        held['rows'] += [new for new in row['rows'] if new['implementation'] not in names]
    return list(joined.values())


def _machines(rows):
    """A line for each device with its versions and commits."""
    found = {}
    for row in rows.values():
        versions = ', '.join(f'{name} {version}' for name, version in row['versions'].items())
        toy = ', toy sizes' if row.get('toy') else ''
        line = f'{row["device"]}{toy}; {versions}; {row.get("driver", "").replace(chr(10), " ")}'
        found.setdefault(line, {}).setdefault(row['commit'][:12], []).append(row['date'][:10])
    return [
        f'- {line}; commits '
        + ', '.join(f'{commit} ({min(dates)} to {max(dates)})' for commit, dates in commits.items())
        for line, commits in found.items()
    ] + ['']


def _outcomes(rows):
    """The number of cases by status, and a line for each that is not ok."""
    counts = {}
    for row in rows.values():
        counts[row['status']] = counts.get(row['status'], 0) + 1
    total = sum(row['seconds'] for row in rows.values()) / 60
    listed = ', '.join(f'{number} {status}' for status, number in counts.items())
    page = [f'{len(rows)} cases in {total:.0f} minutes: {listed}.', '']
    for status in (*BAD, 'cut', 'missing', 'skipped'):
        for name, row in rows.items():
            if row['status'] == status:
                page.append(f'- **{status}** {name}: {row["reason"]}')
    return [*page, '']


def _correctness(rows):
    """By kernel: how many cases were right, and the largest error over what is allowed."""
    lines = {}
    for name, row in rows.items():
        kind, kernel, *_ = name.split('/')
        if kind not in ('right', 'packed'):
            continue
        title = f'{kernel}, packed documents' if kind == 'packed' else kernel
        line = lines.setdefault(title, {'ok': 0, 'bad': 0, 'skipped': 0, 'worst': [], 'rerun': []})
        status = row['status']
        line['ok' if status == 'ok' else 'bad' if status in BAD else 'skipped'] += 1
        errors = row.get('errors', {}) if status == 'ok' else {}
        line['worst'] += [errors[what] / row['allowed'][what] for what in errors]
        if 'sequence_gradients_rerun_equal' in row:
            line['rerun'].append(row['sequence_gradients_rerun_equal'])
    heads = ['', 'right', 'wrong, failed or hung', 'skipped', 'largest error / allowed']
    heads.append('dq, dk, dv equal in a rerun')
    cells = {
        title: [
            *(str(line[what]) for what in ('ok', 'bad', 'skipped')),
            f'{max(line["worst"]):.2f}' if line['worst'] else '-',
            {True: 'yes', False: 'no'}[all(line['rerun'])] if line['rerun'] else '-',
        ]
        for title, line in lines.items()
    }
    return to_markdown(Table('against the softmax in float64', heads, cells)) if cells else []


def _ceilings(rows):
    page = []
    for row in starting(rows, 'machine/ceilings').values():
        copy, product = row['ceilings'].values()
        page.append(f'Copy {copy / 1e9:.4g} GB/s, bf16 product {product / 1e12:.4g} TFLOP/s.')
        for flag, reruns in row.get('cudnn_backward_by_deterministic_flag', {}).items():
            page.append(f'cuDNN backward, xla_gpu_deterministic_ops={flag}: {reruns}.')
    return [*page, ''] if page else []


def _copy_bandwidth(rows):
    """The measured bytes a second of a copy; None: not measured."""
    found = starting(rows, 'machine/ceilings').get('')
    return found and found['ceilings']['copy_bytes_per_second']


def _attention(rows):
    results, page, copy = timed(rows), [], _copy_bandwidth(rows)
    if copy and results:
        table = attention_report.targets_table(results, copy)
        page += to_markdown(table) if table.lines else []
    for result in results:
        page += to_markdown(attention_report.case_table(result))
        page += [*(f'- {line}' for line in attention_report.failures(result)), '']
    return page


def _compared_steps(rows):
    """Rows of training steps by size and model, with their ratios to the dense model's."""
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
    memory = starting(rows, 'memory/packed/')
    if memory:
        lengths = list(dict.fromkeys(t for row in memory.values() for t in row['temp_bytes']))
        lines = {
            name: [f'{row["temp_bytes"].get(length, 0) / 2**30:.3f}' for length in lengths]
            for name, row in memory.items()
        }
        title = 'temporary memory of one attention over packed documents, both passes, GiB'
        yield Table(title, ['', *(f'T={length}' for length in lengths)], lines)
    if row := starting(rows, 'run/').get('train'):
        names = ('final_step', 'parameters', 'train_loss', 'tokens_per_second', 'flops_per_second')
        lines = {name: [f'{row[name]:.6g}'] for name in names if row[name] is not None}
        lines |= {f'eval {name}': [str(value)] for name, value in row['eval'].items()}
        yield Table('training run, MoD with MoDA, bfloat16', ['', ''], lines)
    if row := starting(rows, 'run/').get('study'):
        lines = {
            f'{run["variant"]} {run["size"]}, seed {run["seed"]}': [
                str(run['steps']),
                f'{run["total_flops"]:.3g}',
                f'{run["bits_per_byte"]:.3f}',
            ]
            for run in row['rows']
        }
        yield Table('first runs of the study', ['', 'steps', 'FLOPs', 'bits a byte'], lines)
    for row in starting(rows, 'experts/').values():
        yield from experts_tables(row)


def _models(rows):
    page = [line for table in _model_tables(rows) for line in to_markdown(table)]
    for name, row in starting(rows, 'step/').items():
        page += [f'- {name}: {line}' for line in row['attention_backends']]
    return page


def _claim(claim_id, claim, paper, rule, ours, holds, reason):
    verdict = HOLDS if holds else FAILS
    row = {'id': claim_id, 'topic': 'GPU', 'claim': claim, 'paper': paper, 'rule': rule}
    return row | {'ours': ours, 'spread': '-', 'verdict': verdict, 'reason': reason}


def _fresh_seconds(row, implementation, over):
    """Seconds of both passes; None if they were not timed."""
    for found in (row or {}).get('rows', ()):
        fields = (found['implementation'], found['over'], found['direction'])
        if fields == (implementation, over, 'fresh') and 'seconds' in found:
            return found['seconds']
    return None


def _judge_efficiency(rows):
    """The time of FlashAttention-2 without slots over the best of ours with them."""
    rival = 'flash_attention_2'
    plain = _fresh_seconds(rows.get(f'time/{rival}/64k'), rival, PLAIN)
    ours = {
        name: _fresh_seconds(rows.get(f'time/{name}/64k'), name, BOTH)
        for name in ('mosaic_gpu', 'mosaic_gpu_fused', 'pallas')
    }
    ours = {name: seconds for name, seconds in ours.items() if seconds}
    if not plain or not ours:
        return []
    best = min(ours, key=ours.get)
    reached, times = plain / ours[best], (1e3 * ours[best], 1e3 * plain)
    return [
        _claim(
            'kernel_efficiency',
            'The kernel reaches 97.3% of the efficiency of FlashAttention-2 at T = 64k',
            '97.3%',
            'Both passes, T = 65536, G = 8, L = 64, H = 64, bfloat16. Holds: at 97.3% or above.',
            f'{reached:.1%}',
            reached >= EFFICIENCY,
            '{}: {:.1f} ms with slots; without, in Triton: {:.1f} ms'.format(best, *times),
        )
    ]


def _judge_equal_time(rows):
    """Whether a MoD step is as much faster as its FLOPs are fewer."""
    found = []
    for size, models in _compared_steps(rows).items():
        if {'dense', 'mod'} <= models.keys():
            dense, mod = (1e3 * models[name]['step_seconds'] for name in ('dense', 'mod'))
            saving = models['mod']['realised_saving']
            row = _claim(
                f'equal_time_{size}',
                f'At equal training FLOPs MoD takes as long to train as the dense model, {size}',
                'equal',
                'One training step. Holds: (time ratio / FLOP ratio) is at least 0.9.',
                f'{saving:.3f}',
                saving >= SAVING,
                f'{dense:.1f} ms dense, {mod:.1f} ms MoD',
            )
            found.append(row)
    return found


def judge_claims(rows: dict[str, dict]) -> list[dict]:
    """A row for each claim of the papers with data, as in claims.json of launch.claims.

    The rules were set before the first result.

    Args:
      rows: the newest of each case, by name.
    """
    ok = {name: row for name, row in rows.items() if row['status'] == 'ok' and not row.get('toy')}
    return [*_judge_efficiency(ok), *_judge_equal_time(ok)]


def _claims(rows):
    lines = {row['id']: [row[name] for name in CLAIM_COLUMNS] for row in judge_claims(rows)}
    return to_markdown(Table('by rule', ['', *CLAIM_COLUMNS], lines)) if lines else []


def page(rows: dict[str, dict], title: str, pictures=()) -> str:
    """The page, as Markdown.

    Args:
      rows: the newest of each case, by name.
      title: of the page.
      pictures: names of files next to it.
    """
    lines = [f'# {title}', '', *_machines(rows), *_outcomes(rows)]
    sections = {'Ceilings': _ceilings, 'Correctness': _correctness, 'Attention': _attention}
    sections |= {'Models': _models, 'Claims': _claims}
    for name, section in sections.items():
        if found := section(rows):
            lines += [f'## {name}', '', *found]
        if name == 'Attention':
            lines += [line for picture in pictures for line in (f'![{picture}]({picture})', '')]
    return '\n'.join(lines).rstrip() + '\n'


def write(out: pathlib.Path) -> list[pathlib.Path]:
    """Writes table.md, claims.json and plots into the directory of results.jsonl.

    Args:
      out: the directory.

    Returns:
      Paths of what was written.

    Raises:
      ValueError: no results in it.
    """
    rows = Results(out / FILE).latest
    if not rows:
        raise ValueError(f'--out={out}: holds no {FILE} with results; launch.gpu writes it')
    pictures = [
        name
        for name, kind in (('times.png', 'times'), ('depth.png', 'depth'))
        if attention_report.draw(timed(rows), _copy_bandwidth(rows), out / name, [kind])
    ]
    texts = {'table.md': page(rows, out.absolute().name, pictures)}
    texts['claims.json'] = json.dumps(judge_claims(rows), indent=1) + '\n'
    for name, text in texts.items():
        (out / name).write_text(text, encoding='utf-8')
    return [out / name for name in (*texts, *pictures)]
