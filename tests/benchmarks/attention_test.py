"""The attention benchmark checks before it times, and reports what fails while it continues."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.benchmarks import attention, attention_forms, attention_report
from moddepth_jax.benchmarks.attention_cases import (
    Case,
    depth_bytes,
    document_lengths,
    flops,
    make_inputs,
)
from moddepth_jax.benchmarks.attention_check import checked_queries, compute_expected, find_wrong
from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PLAIN, Form, forms
from moddepth_jax.benchmarks.timing import describe_error, try_run

CASE = Case(24, heads=4, kv_heads=2, width=8, slots=3)


@pytest.fixture(scope='module')
def inputs():
    return make_inputs(CASE)


@pytest.fixture
def plain_attention():
    """Plain attention by hand, which a test may distort."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum('btnh,bsnh->bnts', q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        seen = jnp.tri(q.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
        return jnp.einsum('bnts,bsnh->btnh', weights, v)

    return attend


def test_a_wrong_kernel_is_not_timed(plain_attention, monkeypatch):
    """One rival is right and timed; one forgets the scale of a single head, one cannot run."""

    def wrong(q, k, v):
        return plain_attention(q.at[:, :, 3].multiply(1.5), k, v)

    def absent(q, k, v):
        raise ModuleNotFoundError("No module named 'jax_triton'")

    rivals = dict(zip(attention_forms.RIVALS, (plain_attention, wrong, absent), strict=True))
    monkeypatch.setattr(attention_forms, '_RIVALS', rivals)
    result = attention.bench_case(CASE, attention_forms.RIVALS, 0.0)
    json.dumps(result)
    assert result['baseline'] == 'cudnn'
    by_name = {}
    for row in result['rows']:
        by_name.setdefault(row['implementation'], []).append(row)
    assert all(row['seconds'] > 0 and row['over_plain'] == 1 for row in by_name['cudnn'])
    for row in by_name['pallas_triton']:
        assert row['failed'].startswith('wrong: o is off by') and 'seconds' not in row
    assert all('jax_triton' in row['failed'] for row in by_name['flash_attention_2'])
    lines = attention_report.failures(result)
    assert len(lines) == 2 and lines[1].count('jax_triton') == 1, lines


def test_every_form_of_ours_is_right_and_timed():
    """xla: with and without slots, slots alone, both passes, sums in both dtypes."""
    result = attention.bench_case(CASE, ['xla'], 0.0)
    assert not [row for row in result['rows'] if 'failed' in row]
    assert len(result['rows']) == len(forms(['xla'], CASE)) == 10
    for row in result['rows']:
        number = 'bytes_per_second' if row['over'] == ALONE else 'flops_per_second'
        assert row['seconds'] > 0 and (row['over'] == ALONE or row[number] > 0)


def test_documents_and_slots_that_are_not_written(plain_attention, monkeypatch):
    """A rival is checked as if a row were one text; ours is given documents and the first slots."""
    monkeypatch.setitem(attention_forms._RIVALS, 'cudnn', plain_attention)
    case = CASE._replace(documents=3, written=2)
    result = attention.bench_case(case, ['cudnn', 'xla'], 0.0, brief=True)
    assert not [row for row in result['rows'] if 'failed' in row]
    assert [(row['implementation'], row['over']) for row in result['rows']] == [
        *[('cudnn', PLAIN)] * 2,
        *[('xla', BOTH)] * 2,
    ]
    lengths = document_lengths(case)
    assert lengths.sum() == 24 and (lengths > 0).all() and len(lengths) == 3
    pairs = (lengths**2).sum() / 2 + 24 * 2
    assert flops(case, case.visible, False) == 4 * 4 * 8 * pairs
    wrong = make_inputs(case)
    del wrong.options['segment_ids_BT']
    right = compute_expected(make_inputs(case), np.arange(24), BOTH)
    run = attention_forms.lower(Form('xla', BOTH, 'forward'), wrong, case).compile()
    o = run(wrong, None)[0][0]
    assert 'o is off' in find_wrong({'o': (o, 1)}, right, np.arange(24))


def test_gradients_of_hidden_tokens_are_wrong(inputs):
    """A gradient where there must be none is found, though every checked number is right."""
    chosen = np.array([0, 5, 23], np.int32)
    right = compute_expected(inputs, chosen, PLAIN)
    exact = {name: value for name, value in right.values.items() if name in ('o', 'dq')}
    full = {name: jnp.zeros(inputs.q_BTNH.shape).at[:, chosen].set(x) for name, x in exact.items()}
    assert find_wrong({name: (x, 1) for name, x in full.items()}, right, chosen) is None
    assert find_wrong({'dq': (2 * full['dq'], 2)}, right, chosen) is None
    assert 'dq is off' in find_wrong({'dq': (1.1 * full['dq'], 1)}, right, chosen)
    assert 'dq is off' in find_wrong({'dq': (jnp.nan * full['dq'], 1)}, right, chosen)
    elsewhere = full['dq'].at[0, 7].set(1e-3)
    assert 'dq is not zero' in find_wrong({'dq': (elsewhere, 1)}, right, chosen)


def test_work_and_bytes_are_those_counted_by_hand():
    """The table of the design: N=64, K=8, H=64, L=64 at T = 4096."""
    case = Case(4096)
    assert flops(case, 0, False) == 4 * 64 * 64 * 4096**2 / 2
    assert flops(case, 0, True) == 3.5 * flops(case, 0, False)
    assert flops(case, 64, False) - flops(case, 0, False) == 4 * 4096 * 64 * 64 * 64
    slots, queries = 2 * 2 * 64 * 4096 * 8 * 64, 2 * 4096 * 64 * 64
    assert depth_bytes(case, 'forward') == slots + 3 * queries
    assert depth_bytes(case, 'fresh') == 2 * slots + 4 * queries
    assert depth_bytes(case, 'accumulate', 2) == 3 * slots + 4 * queries
    assert depth_bytes(case, 'accumulate', 4) == 5 * slots + 4 * queries


@pytest.mark.parametrize('length', [1, 96, 97, 4096, 65536])
def test_checked_queries_span_the_sequence(length):
    """First, second and last are among them, each once, and few of a long one."""
    chosen = checked_queries(length)
    assert {0, min(1, length - 1), length - 1} <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all() and len(chosen) <= 96


def test_targets_and_what_was_reached(tmp_path):
    """The best of ours counts; the plots are drawn from the same rows."""
    rows = [
        {'implementation': name, 'over': over, 'direction': 'fresh', 'seconds': s, 'over_plain': s}
        for name, over, s in (
            ('cudnn', PLAIN, 1.0),
            ('pallas_triton', PLAIN, 1.6),
            ('pallas', BOTH, 1.5),
            ('mosaic_gpu', BOTH, 1.2),
        )
    ]
    depth = {'implementation': 'pallas', 'over': ALONE, 'direction': 'forward', 'seconds': 1.0}
    rows += [depth | {'bytes_per_second': 3e12}]
    case = {**Case(4096)._asdict(), 'baseline': 'cudnn', 'rows': rows}
    results = [case, Case(16384)._asdict() | {'skipped': 'no time'}]
    table = attention_report.targets_table(results[:1], 4e12)
    assert list(table.lines.values()) == [
        ['1.37', '1.200', 'mosaic_gpu'],
        ['0.90', '0.750', 'pallas'],
        ['1.00', '0.750', 'mosaic_gpu'],
    ]
    assert attention_report.draw(results, 4e12, tmp_path / 'plot.png', ['times', 'depth'])
    assert (tmp_path / 'plot.png').stat().st_size > 10000


def test_reasons_are_one_line():
    """Out of memory has plain words; an error without a message keeps its name."""
    error = RuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.')
    assert describe_error(error) == 'out of device memory'
    assert describe_error(AssertionError()) == 'AssertionError'
    result, why = try_run(lambda: jnp.zeros(2) @ jnp.zeros(3))
    assert result is None and why.startswith('TypeError: ') and '\n' not in why


def test_flash_attention_2_says_why_it_is_absent(inputs):
    """One line without jax-triton, and without a GPU, which jax-triton needs when imported."""
    _, why = try_run(
        attention_forms.lower, Form('flash_attention_2', PLAIN, 'forward'), inputs, CASE
    )
    assert why.split(':')[0] in ('ModuleNotFoundError', 'ImportError'), why
