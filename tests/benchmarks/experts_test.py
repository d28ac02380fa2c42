"""The benchmark of grouped matmuls: equal results, counted FLOPs, numbers for every form."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from moddepth_jax.benchmarks import experts
from moddepth_jax.benchmarks.experts import DENSE, Shape
from moddepth_jax.hparams.registry import EXPERT_PRODUCTS
from moddepth_jax.model.moe.grouped_matmul import block_rows, num_blocks

TOY = Shape(tokens=16, d_model=8, d_ff=12, num_experts=8, top_k=2)


def test_timed_forms_compute_the_same():
    """Value and every gradient of each form agree, so that their times can be compared."""
    expert_Nk, operands = experts._operands(TOY, 'float32')
    dy_ND = jnp.cos(jnp.arange(16 * 8.0)).reshape(16, 8)
    runs = map(experts._both_passes, experts._forms(TOY).values())
    results = [run(expert_Nk, dy_ND, *operands) for run in runs]
    for arrays in zip(*results, strict=True):
        assert np.any(arrays[0])
        for array in arrays[1:]:
            np.testing.assert_allclose(array, arrays[0], rtol=1e-5, atol=1e-5)


def test_counted_flops_match_the_forms():
    """Three products per pair, twice as many backward; blocks and the dense loop compute more."""
    result = experts.bench_experts([TOY], repeats=2)
    json.dumps(result)
    rows = {row['form']: row for row in result['rows']}
    assert list(rows) == [*EXPERT_PRODUCTS, DENSE]
    assert all(row['flops'] == 3 * 3 * 2 * (16 * 2) * 8 * 12 for row in rows.values())
    over = {name: row['executed_over_active'] for name, row in rows.items()}
    block = block_rows(32, 8, 'blocked')
    assert over['blocked'] == pytest.approx(num_blocks(32, 8, block) * block / 32)
    assert over[DENSE] == pytest.approx(8 / 2)
    # XLA on CPUs: each of the 32 rows times all 8 matrices, and what is elementwise.
    assert 8 <= over['ragged_dot'] < 12 and result['expands'] is True
    assert all(row['seconds'] > 0 and row['temp_bytes'] > 0 for row in rows.values())


def test_a_large_dense_loop_is_left_out():
    assert DENSE not in experts._forms(Shape(2**15, 2048, 704, 64, 6))
