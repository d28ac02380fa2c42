"""The depth part by Pallas and Triton, for GPUs that are not Hopper.

One program takes a block of tokens of one batch row and one key/value head, and loads each visible
slot once for all query heads that share it. It uses no tensor cores. Sides of a tile are padded to
powers of two, as Triton needs, and every access is masked. An access names an element by its index
along each axis of the whole array, and Pallas computes the offset, in 64 bits beyond 2^32 bytes.

Sizes: `_tile` and `_Program`. Bodies: `_forward` and `_backward`. Call: `_call`. Vjp:
joint_softmax.py. Reference: xla/depth.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.xla.depth import first_slot

DTYPES = ('float32', 'bfloat16', 'float16')
MAX_WIDTH = 256
# Most elements of a tile [tokens, query heads, width] and [tokens, width]: 32 and 8 a thread.
QUERY_TILE, SLOT_TILE, NUM_WARPS = 4096, 1024, 4
MAX_QUERY_TILE = 4 * QUERY_TILE
SLOTS_PER_ROUND = 4  # loaded together; they share one maximum


def unsupported(shapes, device) -> str | None:
    """Return why these kernels do not support `backends.Shapes`, in one line; None: they do."""
    del device
    if unknown := [dtype for dtype in shapes.dtypes if dtype not in DTYPES]:
        return f'dtype={unknown[0]} must be one of {", ".join(DTYPES)}'
    *_, heads, width = shapes.q
    if width > MAX_WIDTH:
        return f'head width {width} must be at most {MAX_WIDTH}'
    group, most = heads // shapes.k[2], MAX_QUERY_TILE // pl.next_power_of_2(width)
    if pl.next_power_of_2(group) > most:
        return f'{group} query heads of width {width} to a key/value head must be at most {most}'
    return None


def _tile(length, group, width):
    """Return tokens, query heads and width of a program's tile, powers of two."""
    group, width = pl.next_power_of_2(group), pl.next_power_of_2(width)
    tokens = min(QUERY_TILE // (group * width), SLOT_TILE // width)
    return max(1, min(tokens, pl.next_power_of_2(length))), group, width


def _grid(q_shape, kv_heads):
    """Return a grid of one axis, since CUDA limits the others to 65,535."""
    batch, length, heads, width = q_shape
    tokens, *_ = _tile(length, heads // kv_heads, width)
    return (batch * pl.cdiv(length, tokens) * kv_heads,)


class _Program:
    """The elements that one program reads and writes, each with a mask of those that exist."""

    def __init__(self, q_ref, k_ref, rows_ref):
        _, length, heads, real_width = q_ref.shape
        num_rows, kv_heads = k_ref.shape[2:4]
        real_group = heads // kv_heads
        self.tile = tokens, group, width = _tile(length, real_group, real_width)
        blocks = jnp.int32(pl.cdiv(length, tokens))
        place, self.kv = (f(pl.program_id(0), jnp.int32(kv_heads)) for f in (lax.div, lax.rem))
        self.batch, block = (f(place, blocks) for f in (lax.div, lax.rem))
        self.token_t = block * tokens + jnp.arange(tokens, dtype=jnp.int32)
        self.head_g = self.kv * real_group + jnp.arange(group, dtype=jnp.int32)
        self.width_h = jnp.arange(width, dtype=jnp.int32)
        self.is_token_t = self.token_t < length
        self.is_head_g = jnp.arange(group, dtype=jnp.int32) < real_group
        self.is_width_h = self.width_h < real_width
        self.row_t, self.has_row_t = self.token_t, self.is_token_t
        if rows_ref is not None:
            place = rows_ref.at[self.batch, self.token_t]
            self.row_t = plgpu.load(place, mask=self.is_token_t, other=num_rows)
            self.has_row_t = self.row_t < num_rows

    def query(self, ref_BTNH):
        token_tgh, head_tgh = self.token_t[:, None, None], self.head_g[None, :, None]
        is_tg = self.is_token_t[:, None, None] & self.is_head_g[None, :, None]
        place = ref_BTNH.at[self.batch, token_tgh, head_tgh, self.width_h[None, None, :]]
        return place, is_tg & self.is_width_h[None, None, :]

    def by_head(self, ref_BNT):
        place = ref_BNT.at[self.batch, self.head_g[None, :], self.token_t[:, None]]
        return place, self.is_token_t[:, None] & self.is_head_g[None, :]

    def slot(self, ref_LBRKH, slot, visible_t):
        place = ref_LBRKH.at[slot, self.batch, self.row_t[:, None], self.kv, self.width_h[None, :]]
        return place, visible_t[:, None] & self.is_width_h[None, :]

    def visible(self, slot, num_slots, mask_ref_LBR):
        visible_t = self.has_row_t & (slot < num_slots)
        if mask_ref_LBR is None:
            return visible_t
        place = mask_ref_LBR.at[slot, self.batch, self.row_t]
        return visible_t & (plgpu.load(place, mask=visible_t, other=0) != 0)


def _load(place, mask):
    """Load in float32. Masked elements are 0 and not read."""
    return plgpu.load(place, mask=mask, other=0).astype(jnp.float32)


def _store(place, mask, value):
    plgpu.store(place, value.astype(place.dtype), mask=mask)


def _forward(q, o, lse, k_depth, v_depth, num, mask, rows, o_out, lse_out, *, window, scale):
    program = _Program(q, k_depth, rows)
    q_tgh = _load(*program.query(q)) * scale
    o_tgh, highest_tg = _load(*program.query(o)), _load(*program.by_head(lse))
    num_slots = num[0]
    first = first_slot(num_slots, window)

    def join(i, carry):
        o_tgh, highest_tg, total_tg = carry
        slots = [first + i * SLOTS_PER_ROUND + j for j in range(SLOTS_PER_ROUND)]
        visible = [program.visible(slot, num_slots, mask) for slot in slots]
        pairs = list(zip(slots, visible, strict=True))
        keys = [_load(*program.slot(k_depth, *pair)) for pair in pairs]
        values = [_load(*program.slot(v_depth, *pair)) for pair in pairs]
        scores = [
            jnp.where(visible_t[:, None], jnp.sum(q_tgh * k_th[:, None, :], axis=2), -jnp.inf)
            for visible_t, k_th in zip(visible, keys, strict=True)
        ]
        new_tg = functools.reduce(jnp.maximum, scores, highest_tg)
        finite_tg = jnp.where(new_tg == -jnp.inf, 0.0, new_tg)
        keep_tg = jnp.exp(highest_tg - finite_tg)
        o_tgh, total_tg = o_tgh * keep_tg[:, :, None], total_tg * keep_tg
        for score_tg, v_th in zip(scores, values, strict=True):
            weight_tg = jnp.exp(score_tg - finite_tg)
            o_tgh += weight_tg[:, :, None] * v_th[:, None, :]
            total_tg += weight_tg
        return o_tgh, new_tg, total_tg

    # If nothing was visible before, the first round multiplies this 1 and o by 0.
    total_tg = jnp.ones_like(highest_tg)
    rounds = (num_slots - first + SLOTS_PER_ROUND - 1) // SLOTS_PER_ROUND
    o_tgh, highest_tg, total_tg = lax.fori_loop(0, rounds, join, (o_tgh, highest_tg, total_tg))
    _store(*program.query(o_out), o_tgh / jnp.where(total_tg > 0, total_tg, 1.0)[:, :, None])
    _store(*program.by_head(lse_out), highest_tg + jnp.log(total_tg))


def _backward(*refs, window, scale):
    q, o, do, lse, _, _, dlse, dq_before, k_depth, v_depth, num, mask, rows, *results = refs
    dq, dk_sum, dv_sum = results
    # The sums given (`_`) and returned are the same memory. Only the results are named, so that the
    # compiler does not take reads and writes for those of two arrays.
    program = _Program(q, k_depth, rows)
    q_tgh, do_tgh = _load(*program.query(q)) * scale, _load(*program.query(do))
    lse_tg, delta_tg = _load(*program.by_head(lse)), jnp.sum(do_tgh * _load(*program.query(o)), 2)
    if dlse is not None:
        delta_tg -= _load(*program.by_head(dlse))
    num_slots = num[0]

    def add(place, visible, weights_tg, x_tgh):
        update_th = jnp.sum(weights_tg[:, :, None] * x_tgh, axis=1)
        _store(place, visible, _load(place, visible) + update_th)

    def one(slot, dq_tgh):
        visible_t = program.visible(slot, num_slots, mask)
        k_th = _load(*program.slot(k_depth, slot, visible_t))
        v_th = _load(*program.slot(v_depth, slot, visible_t))
        scores_tg = jnp.sum(q_tgh * k_th[:, None, :], axis=2) - lse_tg
        weights_tg = jnp.exp(jnp.where(visible_t[:, None], scores_tg, -jnp.inf))
        dscores_tg = weights_tg * (jnp.sum(do_tgh * v_th[:, None, :], axis=2) - delta_tg)
        add(*program.slot(dk_sum, slot, visible_t), dscores_tg, q_tgh)
        add(*program.slot(dv_sum, slot, visible_t), weights_tg, do_tgh)
        return dq_tgh + dscores_tg[:, :, None] * k_th[:, None, :]

    dq_tgh = jnp.zeros(program.tile, jnp.float32)
    dq_tgh = lax.fori_loop(first_slot(num_slots, window), num_slots, one, dq_tgh)
    dq_tgh *= scale
    if dq_before is not None:
        dq_tgh += _load(*program.query(dq_before))
    _store(*program.query(dq), dq_tgh)


def _call(kernel, arrays, slots, outputs, interpret, **options):
    num_slots = jnp.asarray(slots.num, jnp.int32).reshape(1)
    # An array of one byte an element would get 32-bit offsets beyond 2^31 elements.
    mask_LBR = None if slots.mask_LBR is None else slots.mask_LBR.astype(jnp.int16)
    rows_BT = None if slots.rows_BT is None else slots.rows_BT.astype(jnp.int32)
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        grid=_grid(arrays[0].shape, slots.k_LBRKH.shape[3]),
        # These parameters also choose Triton where another compiler is the default.
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        **options,
    )(*arrays, slots.k_LBRKH, slots.v_LBRKH, num_slots, mask_LBR, rows_BT)


def depth_forward(q_BTNH, o_BTNH, lse_BNT, slots, window, scale, interpret=False):
    """Compute `xla.depth.depth_forward`; queries, o and slots in DTYPES, lse in float32."""
    arrays = q_BTNH, o_BTNH, lse_BNT
    kernel = functools.partial(_forward, window=window, scale=scale)
    o_BTNH, lse_BNT = _call(kernel, arrays, slots, arrays[1:], interpret, name='depth_forward')
    return o_BTNH, lse_BNT, slots[:2]


def depth_backward(
    q_BTNH, o_BTNH, do_BTNH, lse_BNT, dlse_BNT, slots, sums, dq_BTNH, window, scale, interpret=False
):
    """Compute `xla.depth.depth_backward`; dtypes as in depth_forward, sums in one of DTYPES."""
    sums = [jnp.zeros_like(side) for side in slots[:2]] if sums is None else sums
    arrays = q_BTNH, o_BTNH, do_BTNH, lse_BNT, *sums, dlse_BNT, dq_BTNH
    kernel = functools.partial(_backward, window=window, scale=scale)
    options = {'name': 'depth_backward', 'input_output_aliases': {4: 1, 5: 2}}
    return _call(kernel, arrays, slots, (q_BTNH, *sums), interpret, **options)
