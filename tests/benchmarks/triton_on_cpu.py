"""Runs the FlashAttention-2 baseline in Triton's interpreter, on PyTorch tensors of the CPU.

pip install triton torch
TRITON_INTERPRET=1 python -m tests.benchmarks.triton_on_cpu
"""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import torch


def _triton_call(*inputs, kernel, out_shape, grid, **options):
    """Do what jax_triton.triton_call does."""
    single = not isinstance(out_shape, tuple)
    shapes = (out_shape,) if single else out_shape
    tensors = [torch.tensor(np.asarray(x)) if isinstance(x, jax.Array) else x for x in inputs]
    outs = [torch.full(shape.shape, float('nan')) for shape in shapes]
    kernel[grid](*[x.item() if isinstance(x, np.generic) else x for x in tensors], *outs, **options)
    outs = [jnp.asarray(x.numpy()) for x in outs]
    return outs[0] if single else outs


def _plain(q_BTNH, k_BTKH, v_BTKH):
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True)


def main():
    """Print the largest difference from plain attention: of o, and of each gradient."""
    # The real one needs a GPU for its import.
    sys.modules['jax_triton'] = types.SimpleNamespace(triton_call=_triton_call)
    from moddepth_jax.benchmarks import triton_baseline

    for length, heads, kv_heads, width in ((200, 6, 2, 32), (128, 2, 2, 64), (1, 4, 1, 16)):
        keys = jax.random.split(jax.random.key(length), 4)
        sizes = (heads, kv_heads, kv_heads, heads)
        q, k, v, do = (
            jax.random.normal(key, (2, length, n, width))
            for key, n in zip(keys, sizes, strict=True)
        )
        o, residuals = triton_baseline._forward(q, k, v)
        found = (o, *triton_baseline._backward(residuals, do))
        with jax.default_matmul_precision('float32'):
            plain, pull = jax.vjp(_plain, q, k, v)
            right = (plain, *pull(do))
        errors = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(found, right, strict=True)]
        print(f'T={length} N={heads} K={kv_heads} H={width}', *(f'{x:.1e}' for x in errors))


if __name__ == '__main__':
    main()
