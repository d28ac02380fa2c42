"""The shapes at which attention is timed, their FLOPs, and the bytes they must move."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
    """One shape: q [B, T, N, H], keys and values [B, T, K, H], slots [L, B, T, K, H]."""

    length: int
    heads: int = 64
    kv_heads: int = 8
    width: int = 64
    slots: int = 64
    batch: int = 1
    dtype: str = 'bfloat16'
    written: int | None = None  # visible slots, passed as a traced value; None: all
    documents: int = 0  # packed documents of random lengths in a row; 0: the row is one text

    @property
    def visible(self) -> int:
        """Number of slots that a query attends to."""
        return self.slots if self.written is None else self.written

    def __str__(self):
        sizes = f'T={self.length} N={self.heads} K={self.kv_heads} H={self.width} L={self.slots}'
        written = '' if self.written is None else f' ({self.written} written)'
        packed = f' {self.documents} documents' if self.documents else ''
        return f'{sizes}{written} B={self.batch} {self.dtype}{packed}'


class Inputs(NamedTuple):
    """The inputs of attention, and the cotangent of its output."""

    q_BTNH: jax.Array
    k_BTKH: jax.Array
    v_BTKH: jax.Array
    k_depth_LBTKH: jax.Array
    v_depth_LBTKH: jax.Array
    do_BTNH: jax.Array
    q_depth_BTNH: jax.Array | None = None  # queries on the slots; None: q_BTNH
    options: dict = {}  # other arrays by argument name of depth_attention


LIKE_MODELS = 'group_of_2_width_128_'  # the shape of configs/moda_700m.py
# Lengths and shapes of docs/gpu.md, with N=64, K=8, H=64 and L=64 by default.
LENGTHS = {'4k': 4096, '16k': 16384, '64k': 65536}
SHAPES = {
    **{f'slots_{slots}_': {'slots': slots} for slots in (16, 24, 48)},
    'written_33_of_64_': {'written': 33},
    'group_of_2_': {'kv_heads': 32},
    'width_128_': {'width': 128},
    LIKE_MODELS: {
        'heads': 8,
        'kv_heads': 4,
        'width': 128,
        'slots': 72,
        'batch': 4,
    },
}
NO_SLOTS, PACKED = {'slots': 0}, {'documents': 16}


def toy(case: Case) -> Case:
    """Reduce a case to a size for CPUs."""
    return case._replace(
        length=24,
        heads=4,
        kv_heads=2,
        width=8,
        batch=1,
        slots=min(case.slots, 3),
        written=None if case.written is None else 2,
        documents=min(case.documents, 3),
    )


def document_lengths(case: Case) -> np.ndarray:
    """Return random document lengths with sum T, int64 [documents]; [T] if the row is one text."""
    if not case.documents:
        return np.array([case.length])
    rng = np.random.default_rng(case.length + case.documents)
    cuts = np.sort(rng.choice(case.length - 1, case.documents - 1, replace=False) + 1)
    return np.diff([0, *cuts, case.length])


def make_inputs(case: Case) -> Inputs:
    """Draw normal arrays; the keys of slots are larger, so that slots get much of the softmax."""
    q_shape = (case.batch, case.length, case.heads, case.width)
    k_shape = (case.batch, case.length, case.kv_heads, case.width)
    slots_shape = (case.slots, *k_shape)
    shapes = (q_shape, k_shape, k_shape, slots_shape, slots_shape, q_shape)

    @jax.jit
    def draw(key):
        arrays = [
            jax.random.normal(jax.random.fold_in(key, i), shape, case.dtype)
            for i, shape in enumerate(shapes)
        ]
        arrays[3] *= jnp.asarray(2.5, case.dtype)
        return Inputs(*arrays)

    options = {}
    if case.written is not None:
        options['num_slots'] = jnp.asarray(case.written, jnp.int32)
    if case.documents:
        ids_T = np.repeat(np.arange(case.documents), document_lengths(case)).astype(np.int32)
        options['segment_ids_BT'] = jnp.tile(ids_T, (case.batch, 1))
    return draw(jax.random.key(case.length + case.slots))._replace(options=options)


def flops(case: Case, slots: int, backward: bool) -> float:
    """Return the FLOPs of the forward pass (two products) or of both passes (seven products).

    Visible pairs count: the causal half within each document, and `slots` pairs per query.
    """
    visible = float(np.sum(document_lengths(case).astype(float) ** 2)) / 2
    pairs = case.batch * case.heads * (visible + case.length * slots)
    return 4 * pairs * case.width * (3.5 if backward else 1)


def depth_bytes(case: Case, backward: bool, alone: bool = False) -> float:
    """Return the least number of bytes that the depth part moves: slots once, queries, outputs.

    With `backward`, those of the backward pass, which reads slots and writes their gradients, also
    the zeros of hidden ones.
    With `alone` (0 sequence keys), XLA also fills o with zeros, or dq, which the kernel reads.
    """
    item = jnp.dtype(case.dtype).itemsize
    per_side = case.batch * case.length * case.width
    slot, queries = 2 * per_side * case.kv_heads, per_side * case.heads
    if backward:
        slots = (case.visible + case.slots) * slot
        return item * (slots + (6 if alone else 4) * queries)
    return item * (case.visible * slot + (4 if alone else 3) * queries)
