"""The page and the claims of made-up results."""

import json

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from moddepth_jax.benchmarks import attention_report, report
from moddepth_jax.benchmarks.attention_cases import LENGTHS, Case
from moddepth_jax.benchmarks.results import FILE, Results

STAMP = {'device': 'NVIDIA H200', 'versions': {'jax': '0.11.2'}}
STAMP['software'] = 'cuda 13000 driver 580'
STAMP |= {'commit': 'a' * 40, 'code': 'c1', 'date': '2026-11-22T10:00:00', 'seconds': 3.0}


def row(status='ok', reason='', **values):
    return {'status': status, 'reason': reason, **STAMP, **values}


def timed(name, factor, length=4096, **sizes):
    """A case time/NAME/...: plain cuDNN, and an implementation that takes `factor` as long."""
    case, over = Case(length, **sizes), 'no slots' if sizes.get('slots') == 0 else 'slots'
    rows = [
        {
            **{'implementation': implementation, 'over': what, 'direction': 'fresh'},
            **{'seconds': times * length**2 / 1e10, 'over_plain': times},
            'flops_per_second': 7e14 if implementation == 'cudnn' else 6.3e14,
            **({} if implementation == 'cudnn' else {'backends': 'mosaic_gpu+xla'}),
        }
        for implementation, what, times in (('cudnn', 'no slots', 1), (name, over, factor))
    ]
    alone = {'implementation': name, 'over': 'slots alone', 'direction': 'fresh'}
    rows += [alone | {'direction': way, 'seconds': 1e-3, 'bytes_per_second': 3e12}
             for way in ('forward', 'fresh') if not sizes]  # fmt: skip
    rows.append(alone | {'failed': 'out of device memory'})
    return row(**case._asdict(), baseline='cudnn', repeats=3, rows=rows)


def step(model, seconds, flops):
    values = {'step_seconds': seconds, 'flops': flops, 'flops_per_second': flops / seconds}
    values |= {'rows': 4, 'length': 4096, 'parameters': 7e8}
    return row(model=model, attention_backends=[f'depth_attention on gpu: {model}'], **values)


@pytest.fixture(scope='module')
def rows():
    """Two kernels at three lengths, rivals, a wrong kernel, training steps, a training run."""
    ceilings = {'copy_bytes_per_second': 4.3e12, 'matmul_flops_per_second': 7.9e14}
    right = {'errors': {'o': 0.001}, 'allowed': {'o': 0.004}}
    numbers = {'final_step': 800, 'parameters': 1e8, 'train_loss': 1.2, 'tokens_per_second': 1e5}
    found = {
        'machine/ceilings': row(ceilings=ceilings),
        'right/mosaic_gpu/rows': row(**right, sequence_gradients_rerun_equal=False),
        'right/mosaic_gpu/group_of_2': row(**right),
        'right/pallas/rows': row('wrong', 'o is off by 3, allowed 0.004'),
        'time/pallas/4k': row('skipped', 'a wrong kernel is not timed'),
        'time/flash_attention_2/64k': timed('flash_attention_2', 1.2, 65536, slots=0),
        'time/mosaic_gpu/slots_16_4k': timed('mosaic_gpu', 1.16, slots=16),
        'time/mosaic_gpu/packed_4k': timed('mosaic_gpu', 0.6, documents=16),
        'time/mosaic_gpu_sequence/packed_no_slots_4k': timed(
            'mosaic_gpu_sequence', 0.2, slots=0, documents=16
        ),
        'right/decode/mosaic_gpu/usual': row(**right),
        'decode_kernel/mosaic_gpu/one_row': row(
            milliseconds=0.0123,
            gigabytes_per_second=3210.4,
            xla_milliseconds=0.0288,
            times_as_fast_as_xla=2.345,
        ),
        'step/700m/dense': step('dense', 0.4, 7e13),
        'step/700m/mod': step('mod', 0.25, 4e13),
        'run/train': row(**numbers, flops_per_second=None, eval={'loss': 1.3}),
    }
    for label, length in LENGTHS.items():
        found[f'time/mosaic_gpu/{label}'] = timed('mosaic_gpu', 1.04, length)
        found[f'time/mosaic_gpu_fused/{label}'] = timed('mosaic_gpu_fused', 1.02, length)
    return found


def test_page_has_every_number(rows):
    """Tables of measurements, a line for every other case, versions and commits."""
    page = report.page(rows, 'h200')
    for words in (
        'NVIDIA H200; jax 0.11.2; cuda 13000 driver 580; commit aaaaaaaaaaaa (2026-11-22 to ',
        'Copy 4300 GB/s, bf16 product 790 TFLOP/s.',
        '- **wrong** right/pallas/rows: o is off by 3, allowed 0.004',
        '- **skipped** time/pallas/4k: a wrong kernel is not timed',
        '| mosaic_gpu | 2 | 0 | 0 | 0.25 | no |',
        '| pallas | 0 | 1 | 0 | - | - |',
        '| mosaic_gpu, decoding | 1 | 0 | 0 | 0.25 | - |',
        '| mosaic_gpu, one_row | 0.012 | 3210 | 0.029 | 2.35 |',
        '**attention, T=4096 N=64 K=8 H=64 L=64 B=1 bfloat16; x: relative to cudnn without slots**',
        'bfloat16 16 documents; x:',
        '| T=65536, forward + backward, over cuDNN | 1.03 | 1.040 | mosaic_gpu |',
        '| T=65536, forward + backward, fused, over cuDNN | 1.02 | 1.020 | mosaic_gpu_fused |',
        '| T=4096, depth forward, of copy bandwidth | 0.85 | 0.698 | mosaic_gpu |',
        '| T=65536, both passes with slots, over FlashAttention-2 without | 1.00 | 0.850 |',
        '| T=4096, packed documents, of the rate of cuDNN | 0.85 | 0.900 | mosaic_gpu_sequence |',
        '| mosaic_gpu (mosaic_gpu+xla), slots |',
        '| cudnn, no slots |',
        'out of device memory',
        '**train step, 700m, 4 rows of 4096, bfloat16**',
        '| MFU | 17.7% | 16.2% |',
        '| realised saving (FLOP ratio / time ratio) | 1.000 | 0.914 |',
        '- 700m/mod: depth_attention on gpu: mod',
        'training run',
    ):
        assert words in page, (words, page)
    for result in report.timed(rows):  # each was timed in turn with cuDNN, and counts once
        assert [row['implementation'] for row in result['rows']].count('cudnn') == 1


def test_files(rows, tmp_path):
    """A page, claims and a plot of the times; without results one line."""
    with pytest.raises(ValueError, match='holds no results.jsonl'):
        report.write(tmp_path)
    results = Results(tmp_path / FILE)
    for name, value in rows.items():
        results.add({'case': name, **value})
    written = report.write(tmp_path)
    assert [path.name for path in written] == ['table.md', 'claims.json', 'attention.png']
    assert matplotlib.image.imread(written[2]).std() > 0.02
    judged = json.loads(written[1].read_text())
    names = ('kernel_efficiency', 'equal_time_700m')
    assert {row['id']: row['verdict'] for row in judged} == dict.fromkeys(names, 'holds')


def test_claims_have_verdicts_on_both_sides(rows):
    """Claims fail for slower kernels and steps; toys and missing data give no verdict."""
    slow = rows | {'step/700m/mod': step('mod', 0.3, 4e13)}
    slow['time/flash_attention_2/64k'] = timed('flash_attention_2', 0.9, 65536, slots=0)
    verdicts = {row['id']: (row['ours'], row['verdict']) for row in report.judge_claims(slow)}
    assert verdicts['kernel_efficiency'] == ('88.2%', 'does not hold')
    assert verdicts['equal_time_700m'] == ('0.762', 'does not hold')
    assert not report.judge_claims({name: row | {'toy': True} for name, row in rows.items()})


def test_times_are_drawn_by_length(rows, tmp_path, monkeypatch):
    """Bars of our kernels with slots and of the rivals without, in milliseconds, by length."""
    figure = Figure(layout='constrained')
    monkeypatch.setattr(attention_report, 'new_figure', lambda *size: figure)
    assert attention_report.draw_times(report.timed(rows), tmp_path / 'x.png')
    bars = {
        bars.get_label(): [bar.get_height() for bar in bars] for bars in figure.axes[0].containers
    }
    assert list(bars) == [
        *('cudnn, no slots', 'flash_attention_2, no slots'),
        *('mosaic_gpu, slots', 'mosaic_gpu_fused, slots'),
    ]
    lengths = np.array(list(LENGTHS.values()))
    np.testing.assert_allclose(bars['mosaic_gpu, slots'], 1.04e-7 * lengths**2.0)
    assert len(bars['flash_attention_2, no slots']) == 1
    assert not attention_report.draw_times([], tmp_path / 'y.png')


def test_an_unfinished_run_has_a_page():
    page = report.page({'machine/ceilings': row('hung', 'no answer')}, 'x')
    assert '- **hung** machine/ceilings: no answer' in page and '## Attention' not in page
