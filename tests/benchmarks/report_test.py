"""The page, the plots and the claims of made-up results."""

import json

import pytest

from moddepth_jax.benchmarks import report
from moddepth_jax.benchmarks.attention_cases import Case
from moddepth_jax.benchmarks.results import FILE, Results

STAMP = {'device': 'NVIDIA H200', 'versions': {'jax': '0.11.2'}, 'driver': 'cuda 13000'}
STAMP |= {'commit': 'a' * 40, 'code': 'c1', 'date': '2026-11-22T10:00:00', 'seconds': 3.0}
PLAIN = {4096: 1.3e-3, 16384: 18e-3, 65536: 280e-3}  # of cuDNN


def row(status='ok', **values):
    return {'status': status, 'reason': '', **STAMP, **values}


def timing(name, over, direction, seconds, case, plain):
    """One form's row."""
    found = {'implementation': name, 'over': over, 'direction': direction, 'seconds': seconds}
    found['temp_bytes'] = 10
    if over == 'slots alone':
        return found | {'bytes_per_second': 3e12}
    rate = 7e11 * case.length**2 * case.heads * case.width / 1e15 / seconds
    return found | {'flops_per_second': rate, 'over_plain': seconds / plain}


def timed(name, length, factor, **sizes):
    """A case time/NAME/...: plain cuDNN, and an implementation that takes `factor` as long."""
    case, plain = Case(length, **sizes), PLAIN[length]
    rows = [timing('cudnn', 'no slots', 'fresh', plain, case, plain)]
    over = 'slots' if case.slots else 'no slots'
    rows.append(timing(name, over, 'fresh', factor * plain, case, plain))
    if case.slots and not sizes:
        for way in ('forward', 'fresh', 'accumulate'):
            rows.append(timing(name, 'slots alone', way, plain, case, plain))
    rows.append({**rows[-1], 'direction': 'forward', 'failed': 'out of device memory'})
    return row(**case._asdict(), baseline='cudnn', repeats=3, rows=rows)


def step(model, seconds, flops):
    values = {'step_seconds': seconds, 'flops': flops, 'flops_per_second': flops / seconds}
    values |= {'tokens_per_second': 16384 / seconds, 'peak_bytes': 2e10, 'temp_bytes': 1e10}
    values |= {'trace_seconds': 5.0, 'compile_seconds': 30.0, 'parameters': 7e8}
    values |= {'rows': 4, 'length': 4096}
    return row(model=model, attention_backends=[f'depth_attention on gpu: {model}'], **values)


@pytest.fixture(scope='module')
def rows():
    """Two kernels at three lengths, rivals, a wrong kernel, training steps, a training run."""
    ceilings = {'copy_bytes_per_second': 4.3e12, 'matmul_flops_per_second': 7.9e14}
    reruns = {'True': '0 of 4 reruns differ'}
    found = {
        'machine/ceilings': row(ceilings=ceilings, cudnn_backward_by_deterministic_flag=reruns)
    }
    right = {'errors': {'o': 0.001}, 'allowed': {'o': 0.004}}
    found['right/mosaic_gpu/rows'] = row(**right, sequence_gradients_rerun_equal=False)
    found['right/mosaic_gpu/group_of_2'] = row(**right)
    found['right/xla/rows'] = row()
    found['right/pallas/rows'] = row('wrong') | {'reason': 'o is off by 3, allowed 0.004'}
    found['time/pallas/4k'] = row('skipped') | {'reason': 'a wrong kernel is not timed'}
    for name, factors in (
        ('mosaic_gpu', (1.5, 1.16, 1.04)),
        ('mosaic_gpu_fused', (1.3, 1.1, 1.02)),
    ):
        for length, label, factor in zip(PLAIN, ('4k', '16k', '64k'), factors, strict=True):
            found[f'time/{name}/{label}'] = timed(name, length, factor)
    found['time/flash_attention_2/64k'] = timed('flash_attention_2', 65536, 1.2, slots=0)
    for slots in (16, 24, 48):
        result = timed('mosaic_gpu', 4096, 1 + slots / 100, slots=slots)
        found[f'time/mosaic_gpu/slots_{slots}_4k'] = result
    found['time/mosaic_gpu/packed_4k'] = timed('mosaic_gpu', 4096, 0.6, documents=16)
    found['step/700m/dense'] = step('dense', 0.4, 7e13)
    found['step/700m/mod'] = step('mod', 0.25, 4e13)
    numbers = {'final_step': 800, 'parameters': 1e8, 'train_loss': 1.2, 'tokens_per_second': 1e5}
    found['run/train'] = row(**numbers, flops_per_second=None, eval={'loss': 1.3})
    return found


def test_page_has_every_number(rows):
    """Tables of what was measured, a line for everything else, versions and commits."""
    page = report.page(rows, 'h200')
    for words in (
        'NVIDIA H200; jax 0.11.2; cuda 13000; commits aaaaaaaaaaaa (2026-11-22 to 2026-11-22)',
        'Copy 4300 GB/s, bf16 product 790 TFLOP/s.',
        '- **wrong** right/pallas/rows: o is off by 3, allowed 0.004',
        '- **skipped** time/pallas/4k: a wrong kernel is not timed',
        '| mosaic_gpu | 2 | 0 | 0 | 0.25 | no |',
        '| pallas | 0 | 1 | 0 | - | - |',
        '**attention, T=4096 N=64 K=8 H=64 L=64 B=1 bfloat16; x: over cudnn, no slots**',
        'bfloat16 16 documents; x:',
        '| T=65536, forward + backward (fresh), over cuDNN | 1.03 | 1.020 | mosaic_gpu_fused |',
        '| T=4096, depth forward, of copy bandwidth | 0.90 | 0.698 | mosaic_gpu |',
        'out of device memory',
        '**train step, 700m, 4 rows of 4096, bfloat16**',
        '| MFU | 17.7% | 16.2% |',
        '| realised saving (time ratio / FLOP ratio) | 1.000 | 0.914 |',
        '- 700m/mod: depth_attention on gpu: mod',
        'training run',
    ):
        assert words in page, (words, page)
    for result in report.timed(rows):  # each was timed in turn with cuDNN, and counts once
        assert [row['implementation'] for row in result['rows']].count('cudnn') == 1


def test_files(rows, tmp_path):
    """A page, claims and plots, which show something."""
    results = Results(tmp_path / FILE)
    for name, value in rows.items():
        results.add({'case': name, **value})
    written = report.write(tmp_path)
    assert [path.name for path in written] == ['table.md', 'claims.json', 'times.png']
    assert written[2].stat().st_size > 15000
    assert '![times.png](times.png)' in written[0].read_text()
    judged = json.loads((tmp_path / 'claims.json').read_text())
    assert {row['id']: row['verdict'] for row in judged} == {
        'kernel_efficiency': 'holds',
        'equal_time_700m': 'holds',
    }


def test_claims_have_verdicts_on_both_sides(rows):
    """Slower kernels and steps do not hold; toys and missing data judge nothing."""
    slow = {name: dict(row) for name, row in rows.items()}
    slow['step/700m/mod'] = step('mod', 0.3, 4e13)
    slow['time/flash_attention_2/64k'] = timed('flash_attention_2', 65536, 0.9, slots=0)
    verdicts = {row['id']: (row['ours'], row['verdict']) for row in report.judge_claims(slow)}
    assert verdicts['kernel_efficiency'] == ('88.2%', 'does not hold')
    assert verdicts['equal_time_700m'] == ('0.762', 'does not hold')
    assert not report.judge_claims({name: row | {'toy': True} for name, row in rows.items()})
    assert not report.judge_claims({})


def test_an_unfinished_run_has_a_page(tmp_path):
    """Of what is there; nothing at all is an error of one line."""
    page = report.page({'machine/ceilings': row('hung') | {'reason': 'no answer'}}, 'x')
    assert '- **hung** machine/ceilings: no answer' in page and '## Attention' not in page
    with pytest.raises(ValueError, match='holds no results.jsonl'):
        report.write(tmp_path)
