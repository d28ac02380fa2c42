"""Experts compiled for a Hopper GPU that is only described: which products the program holds."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from moddepth_jax.model.moe.experts import routed_mlp
from tests.kernels import hopper

B, T, D, F, E, K = 4, 2048, 512, 256, 16, 4
INSTRUCTION = re.compile(r'\s*(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]')
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)[\]}]')


def sizes(text):
    return [int(size.strip('"')) for size in text.split(',') if size]


def product_flops(text):
    """FLOPs of all dots and calls of cuBLAS in a compiled program; a loop's body counts once."""
    shapes, total = {}, 0
    for line in text.splitlines():
        if not (found := INSTRUCTION.match(line)):
            continue
        shapes[found[1]] = sizes(found[2])
        if ' dot(' in line or '__cublas' in line:
            first = re.search(r'(?: dot|custom-call)\(.*?%([\w.\-]+)', line)[1]
            contracted = (shapes[first][axis] for axis in sizes(CONTRACTED.search(line)[1]))
            total += 2 * math.prod(shapes[found[1]]) * math.prod(contracted)
    return total


@pytest.mark.aot
@pytest.mark.parametrize(('product', 'times'), [('batched', 1), ('ragged_dot', E)])
def test_products_on_hopper(product, times, monkeypatch):
    """`batched` multiplies at most 15% more than the pairs need, padding counted; XLA makes of
    ragged_dot a product with every expert, and that is why `auto` is not it.
    """
    if reason := hopper.missing():
        pytest.skip(reason)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    of = jax.ShapeDtypeStruct
    matrices = (of((E, D, F), jnp.bfloat16), of((E, D, F), jnp.bfloat16))
    rows = (of((B, T, D), jnp.bfloat16), of((B, T, K), jnp.int32), of((B, T, K), jnp.float32))
    arrays = (*rows, *matrices, of((E, F, D), jnp.bfloat16))
    with hopper.an_h200():
        lowered = jax.jit(lambda *arrays: routed_mlp(*arrays, product, K * T)).lower(
            *hopper.on_hopper(arrays)
        )
    active = 3 * 2 * D * F * B * T * K
    assert times * active <= product_flops(lowered.compile().as_text()) < 1.15 * times * active
