"""What launch.gpu found, as one page of Markdown: device, versions, dates, every number."""

import json
import pathlib

from moddepth_jax.analysis import attention_report, bench_experts, bench_tables


def _markdown(title, heads, lines):
    cells = [[head or ' ' for head in heads]] + [[name, *row] for name, row in lines.items()]
    rows = ['| ' + ' | '.join(str(cell).replace('|', '/') for cell in row) + ' |' for row in cells]
    rule = '|' + '---|' * len(heads)
    return [f'**{title}**', '', rows[0], rule, *rows[1:], '']


def _read(file):
    """A benchmark's results; [] where the process ended before the first."""
    text = file.read_text() if file.exists() else ''
    return json.loads(text) if text else []


def _parts(parts):
    lines = {}
    for part, record in parts.items():
        for done in record['commands']:
            said = [record['date'], f'{done["seconds"]:.0f}', done['failed'] or 'ok']
            lines[f'{part}, {done["name"]}'] = said
    return _markdown('what ran', ['', 'date', 'seconds', ''], lines)


def _machines(parts):
    """The device and versions of each part, equal ones told once."""
    told = {}
    for part, record in parts.items():
        machine = ', '.join(f'{name} {value}' for name, value in record['machine'].items())
        machine += ', toy sizes' if record['toy'] else ''
        told.setdefault(machine, []).append(part)
    return [f'{", ".join(names)}: {machine}.' for machine, names in told.items()] + ['']


def _tests(out):
    found, page = _read(out / 'tests.json') or {}, []
    lines = {
        name: [str(counts['passed']), str(len(counts['failed'])), str(len(counts['skipped']))]
        for name, counts in found.items()
        if counts
    }
    if lines:
        page += _markdown('compiled tests', ['', 'passed', 'failed', 'skipped'], lines)
    for name, counts in found.items():
        for kind in ('failed', 'skipped'):
            page += [f'- {name}, {kind}: {line}' for line in dict.fromkeys(counts.get(kind, ()))]
    return page + ['']


def _attention(out):
    results = [result for result in _read(out / 'attention.json') if 'targets' not in result]
    if not results:
        return []
    first, *cases = results
    ceilings, page = first['ceilings'], []
    copy, product = ceilings['copy_bytes_per_second'], ceilings['matmul_flops_per_second']
    page += [f'Measured: copy {copy / 1e9:.4g} GB/s, bf16 product {product / 1e12:.4g} TFLOP/s.']
    for flag, said in first.get('cudnn_backward_by_deterministic_flag', {}).items():
        page += [f'cuDNN backward, xla_gpu_deterministic_ops={flag}: {said}.']
    page += ['']
    if first['hopper']:
        page += _markdown(*attention_report.targets(results))
    for result in cases:
        if 'rows' in result:
            page += _markdown(*attention_report.case_table(result))
        page += [f'- {line}' for line in attention_report.failures(result)] + ['']
    if (out / 'attention.png').exists():
        page += ['![times and bandwidth](attention.png)', '']
    return page


def _steps(out):
    page = []
    for file in sorted(out.glob('step_*.json')):
        for result in _read(file):
            page += _markdown(*bench_tables.models_table(result, result['size']))
            page += [
                f'- {row["model"]}: {row["failed"]}' for row in result['rows'] if 'failed' in row
            ]
    return page


def _experts(out):
    return [
        line
        for result in _read(out / 'experts.json')
        for line in _markdown(*bench_experts.products_table(result))
    ]


def _depth(out):
    page, titles = [], bench_tables.TITLES
    for file in sorted(out.glob('depth_*.json')):
        for result in _read(file):
            kinds = ('mod', 'both') if result['router'] == 'learned' else ('dense', 'moda')
            names = {'dense': titles[kinds[0]], 'moda': titles[kinds[1]]}
            shape = f'{result["size"]}, {result["batch"]} rows of {result["length"]}'
            if 'flops_ratio' in result:
                title = f'train step, {result["depth"]} layers, {shape}'
                page += _markdown(title, *bench_tables.cost_table(result, names))
                continue
            for what, *table in bench_tables.depth_tables(result, names):
                page += _markdown(f'{what}; {shape}', *table)
    return page


def _train(out):
    found = _read(out / 'train.json')
    if not found:
        return []
    summary, lines = found['summary'], {}
    lines |= {f'median {name}': [f'{value:.4g}'] for name, value in found['median'].items()}
    for name in ('final_step', 'parameters', 'train_loss', 'seconds', 'flops_per_step'):
        lines[name] = [f'{summary[name]:.6g}']
    lines |= {f'eval {name}': [str(value)] for name, value in summary['eval'].items()}
    return _markdown('training run, MoD with MoDA, bfloat16', ['', ''], lines)


def gpu_table(out: pathlib.Path) -> str:
    """The page, from the files that launch.gpu has left in the directory `out` so far."""
    parts = _read(out / 'parts.json') or {}
    page = [f'# {out.name}', '', *_machines(parts), *_parts(parts)]
    sections = {'Tests': _tests, 'Attention': _attention, 'Training step': _steps}
    sections |= {'Experts': _experts, 'By depth': _depth, 'Training run': _train}
    for title, section in sections.items():
        if lines := section(out):
            page += [f'## {title}', '', *lines]
    return '\n'.join(page).rstrip() + '\n'
