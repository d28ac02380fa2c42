"""The attention benchmark checks before it times, and reports what fails while it continues."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.autotune_trial import describe_error
from kernels_pallas.backends import Parts, Shapes
from moddepth_jax.benchmarks import attention, attention_forms, attention_report
from moddepth_jax.benchmarks.attention_cases import (
    Case,
    depth_bytes,
    document_lengths,
    flops,
    make_inputs,
)
from moddepth_jax.benchmarks.attention_check import checked_queries, compute_expected, find_wrong
from moddepth_jax.benchmarks.attention_forms import ALONE, BOTH, PLAIN, RIVALS, Form
from moddepth_jax.benchmarks.timing import try_run

CASE = Case(24, heads=4, kv_heads=2, width=8, slots=3)


def attend(q, k, v, **_):
    """Plain attention by hand."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum('btnh,bsnh->bnts', q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum('bnts,bsnh->btnh', weights, v)


def wrong(q, k, v, **_):
    """Forgets the scale of a single head."""
    return attend(q.at[:, :, 3].multiply(1.5), k, v)


def absent(q, k, v, **_):
    raise ModuleNotFoundError("No module named 'jax_triton'")


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    """One rival is correct and timed, one is wrong, one fails."""
    for name, function in {'cudnn': attend, 'flash_attention_2': wrong, 'third': absent}.items():
        monkeypatch.setitem(RIVALS, name, function)
    result = attention.bench_case(CASE, RIVALS, 0.0)
    json.dumps(result)
    right, other = result['rows'][:2], result['rows'][2:]
    assert result['baseline'] == 'cudnn'
    assert all(row['seconds'] > 0 and row['over_plain'] == 1 for row in right)
    assert not [row for row in other if 'seconds' in row]
    line, lacks = attention_report.failures(result)
    assert 'jax_triton' in lacks
    assert line.startswith(
        'flash_attention_2 (no slots, forward; no slots, fresh): wrong: o is off by'
    )


def test_every_form_of_ours_is_right_and_timed():
    """xla: without slots, with slots (also with sums, as in a model), and only slots."""
    result = attention.bench_case(CASE, ['xla'], 0.0)
    assert not [row for row in result['rows'] if 'failed' in row]
    assert len(result['rows']) == len(attention_forms.forms('xla', CASE)) == 7
    assert {'over_plain', 'flops_per_second'} <= result['rows'][-1].keys()
    backends = {row['over']: row['backends'] for row in result['rows']}
    assert backends == {PLAIN: 'xla', BOTH: 'xla+xla', ALONE: 'xla+xla'}
    for row in result['rows']:
        assert row['seconds'] > 0 and (row['over'] == ALONE or row['flops_per_second'] > 0)


@pytest.mark.parametrize(('documents', 'sequence'), [(4, 'cudnn'), (5, 'xla')])
def test_a_row_names_the_sequence_part_that_runs(documents, sequence, monkeypatch):
    """Where a row has more documents than a call of cuDNN takes, XLA computes the sequence."""
    monkeypatch.setattr(attention, 'choose', lambda *_: Parts('cudnn', 'mosaic_gpu'))
    case, form = Case(16384, documents=documents), Form('mosaic_gpu', BOTH, 'fresh')
    shapes = Shapes(
        *((1, 16384, 64, 64), (1, 16384, 8, 64), 64, ('bfloat16',), True, True, True, 0),
    )
    assert attention._backends(form, case, [shapes, shapes]) == f'{sequence}+mosaic_gpu'


def test_documents_and_unwritten_slots_are_checked(monkeypatch):
    """A rival is checked with rows as one text; ours gets documents and only the first slots."""
    monkeypatch.setitem(RIVALS, 'cudnn', attend)
    case = CASE._replace(documents=3, written=2)
    rows = attention.bench_case(case, ['cudnn', 'xla'], 0.0, brief=True)['rows']
    assert not [row for row in rows if 'failed' in row]
    forms = [(row['implementation'], row['over']) for row in rows]
    assert forms == [('cudnn', PLAIN)] * 2 + [('xla', BOTH)] * 2
    lengths = document_lengths(case)
    assert lengths.sum() == 24 and (lengths > 0).all() and len(lengths) == 3
    pairs = (lengths**2).sum() / 2 + 24 * 2
    assert flops(case, case.visible, False) == 4 * 4 * 8 * pairs
    one_text = make_inputs(case)
    del one_text.options['segment_ids_BT']
    right = compute_expected(make_inputs(case), np.arange(24), BOTH)
    run = attention_forms.lower(Form('xla', BOTH, 'forward'), one_text).compile()
    assert 'o is off' in find_wrong(run(one_text, None), right, np.arange(24))


def test_gradients_of_hidden_tokens_are_wrong():
    """A nonzero gradient outside the checked queries is found, even if all checked ones agree."""
    inputs, chosen = make_inputs(CASE), np.array([0, 5, 23], np.int32)
    right = compute_expected(inputs, chosen, PLAIN)
    o, dq = (
        jnp.zeros(inputs.q_BTNH.shape).at[:, chosen].set(right[0][name]) for name in ('o', 'dq')
    )
    for found, why in (
        (dq, 'None'),
        (1.1 * dq, 'dq is off'),
        (jnp.nan * dq, 'dq is off'),
        (dq.at[0, 7].set(1e-3), 'dq is not zero'),
    ):
        assert why in str(find_wrong((o, found), right, chosen))


def test_sums_are_added_to():
    """The slots' gradients are added to the sums in float32; the other results are the same."""
    inputs = make_inputs(CASE)
    fresh, added = (
        attention_forms.lower(Form('xla', BOTH, direction), inputs).compile()
        for direction in ('fresh', 'sums')
    )
    names = 'o', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth'
    sums = tuple(x + 1 for x in attention_forms.make_sums('sums', inputs))
    for name, new, right in zip(names, added(inputs, sums), fresh(inputs, None), strict=True):
        of_slots = name.endswith('_depth')
        assert new.dtype == ('float32' if of_slots else 'bfloat16')
        np.testing.assert_allclose(new, right.astype('float32') + of_slots, atol=0.01, rtol=0.01)


def test_flops_and_bytes_equal_those_counted_by_hand():
    """N=64, K=8, H=64, L=64 at T = 4096."""
    case = Case(4096)
    assert flops(case, 0, False) == 4 * 64 * 64 * 4096**2 / 2
    assert flops(case, 0, True) == 3.5 * flops(case, 0, False)
    assert flops(case, 64, False) - flops(case, 0, False) == 4 * 4096 * 64 * 64 * 64
    slots, queries = 2 * 2 * 64 * 4096 * 8 * 64, 2 * 4096 * 64 * 64
    assert depth_bytes(case, False) == slots + 3 * queries
    assert depth_bytes(case, True) == 2 * slots + 4 * queries
    # Alone, o and dq of the sequence are zeros: one more array is written, or one written and read.
    assert depth_bytes(case, False, alone=True) == slots + 4 * queries
    assert depth_bytes(case, True, alone=True) == 2 * slots + 6 * queries


@pytest.mark.parametrize('length', [1, 96, 97, 65536])
def test_checked_queries_span_the_sequence(length):
    """They include the first, second and last position, without duplicates, and are few."""
    chosen = checked_queries(length)
    assert {0, min(1, length - 1), length - 1} <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all() and len(chosen) <= 96


def test_reasons_are_one_line():
    """Out of memory has plain words; an error without a message keeps its name."""
    error = RuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.')
    assert describe_error(error) == 'out of device memory'
    assert describe_error(AssertionError()) == 'AssertionError'
    result, why = try_run(lambda: jnp.zeros(2) @ jnp.zeros(3))
    assert result is None and why.startswith('TypeError: ') and '\n' not in why
