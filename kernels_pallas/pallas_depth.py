"""The depth slots of each query's own token by generic Pallas: any GPU that Triton compiles for.

One program takes a block of tokens of one row and one key/value head, and goes through the visible
slots once: each slot's key and value are loaded once for all query heads that share them. At
8 FLOP a byte this is bound by memory, so products are multiplied and summed without tensor cores,
and any number of query heads to a key/value head will do.

Every access is masked and names one element by its place along each axis of the whole array. Sides
of a tile may so be padded to the powers of two that Triton wants, tokens may be looked up, and
Pallas computes the offset itself: in 64 bits as soon as the array has more than 2^32 bytes. Arrays
of one byte an element would pass 2^31 elements before that, so none is given to a kernel.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

DTYPES = ('float32', 'bfloat16', 'float16')
MAX_WIDTH = 256
# Most elements of tiles [tokens, query heads, width] and [tokens, width]: 32 and 8 a thread. For an
# H200, bfloat16, G = 8 and H = 64 the compiler then takes 133 registers forward and 214 backward,
# and spills none.
QUERY_TILE, SLOT_TILE, NUM_WARPS = 4096, 1024, 4
MAX_QUERY_TILE = 4 * QUERY_TILE
# The loads of so many slots are under way at once, and one maximum serves them all.
SLOTS_A_ROUND = 4


def unsupported(q_shape, kv_heads: int, num_slots_held: int, dtype) -> str | None:
    """Why these kernels cannot take such queries and slots, in one line; None: they can.

    Args:
      q_shape: (B, T, N, H).
      kv_heads, num_slots_held: K and L of the slots.
      dtype: of queries and slots.
    """
    del num_slots_held  # Any number does.
    *_, heads, width = q_shape
    if jnp.dtype(dtype).name not in DTYPES:
        return f'dtype={jnp.dtype(dtype).name} must be one of {", ".join(DTYPES)}'
    if width > MAX_WIDTH:
        return f'head width {width} must be at most {MAX_WIDTH}'
    group = heads // kv_heads
    if pl.next_power_of_2(group) * pl.next_power_of_2(width) > MAX_QUERY_TILE:
        most = MAX_QUERY_TILE // pl.next_power_of_2(width)
        return f'{group} query heads of width {width} to a key/value head must be at most {most}'
    return None


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The padded sides of a program's tiles, powers of two, and the arrays' own."""

    length: int
    kv_heads: int
    group: int
    width: int
    num_rows: int

    @classmethod
    def of(cls, q_BTNH, k_depth_LBRKH):
        _, length, heads, width = q_BTNH.shape
        num_rows, kv_heads = k_depth_LBRKH.shape[2:4]
        return cls(length, kv_heads, heads // kv_heads, width, num_rows)

    @property
    def tile(self):
        """Tokens, query heads and width of a program."""
        group, width = pl.next_power_of_2(self.group), pl.next_power_of_2(self.width)
        tokens = min(QUERY_TILE // (group * width), SLOT_TILE // width)
        return max(1, min(tokens, pl.next_power_of_2(self.length))), group, width

    def grid(self, batch):
        """One axis, as CUDA has 65,535 of the others; heads whose slots are neighbours meet."""
        return (batch * pl.cdiv(self.length, self.tile[0]) * self.kv_heads,)


class _Program:
    """What one program reads and writes: its places along each axis, and which of them exist."""

    def __init__(self, sizes: _Sizes, rows_ref):
        tokens, group, width = sizes.tile
        kv_heads, blocks = jnp.int32(sizes.kv_heads), jnp.int32(sizes.grid(1)[0] // sizes.kv_heads)
        place, self.kv = (f(pl.program_id(0), kv_heads) for f in (lax.div, lax.rem))
        self.batch, block = (f(place, blocks) for f in (lax.div, lax.rem))
        self.token_t = block * tokens + jnp.arange(tokens, dtype=jnp.int32)
        self.head_g = self.kv * sizes.group + jnp.arange(group, dtype=jnp.int32)
        self.width_h = jnp.arange(width, dtype=jnp.int32)
        self.is_token_t = self.token_t < sizes.length
        self.is_head_g = jnp.arange(group, dtype=jnp.int32) < sizes.group
        self.is_width_h = self.width_h < sizes.width
        self.row_t, self.has_row_t = self.token_t, self.is_token_t
        if rows_ref is not None:
            place = rows_ref.at[self.batch, self.token_t]
            self.row_t = plgpu.load(place, mask=self.is_token_t, other=sizes.num_rows)
            self.has_row_t = self.row_t < sizes.num_rows

    def query(self, ref_BTNH):
        """The block's (reference, mask) [t, g, h]."""
        place = (
            self.batch,
            self.token_t[:, None, None],
            self.head_g[None, :, None],
            self.width_h[None, None, :],
        )
        is_tg = self.is_token_t[:, None, None] & self.is_head_g[None, :, None]
        return ref_BTNH.at[place], is_tg & self.is_width_h[None, None, :]

    def by_head(self, ref_BNT):
        """The block's (reference, mask) [t, g]."""
        place = self.batch, self.head_g[None, :], self.token_t[:, None]
        return ref_BNT.at[place], self.is_token_t[:, None] & self.is_head_g[None, :]

    def slot(self, ref_LBRKH, slot, visible_t):
        """One slot's (reference, mask) [t, h]."""
        place = slot, self.batch, self.row_t[:, None], self.kv, self.width_h[None, :]
        return ref_LBRKH.at[place], visible_t[:, None] & self.is_width_h[None, :]

    def visible(self, slot, num_slots, mask_ref_LBR):
        """bool [t]: which tokens see a slot."""
        visible_t = self.has_row_t & (slot < num_slots)
        if mask_ref_LBR is None:
            return visible_t
        place = mask_ref_LBR.at[slot, self.batch, self.row_t]
        return visible_t & (plgpu.load(place, mask=visible_t, other=0) != 0)


def _load(place, mask):
    """In float32; zeros where masked, so that nothing hidden is read."""
    return plgpu.load(place, mask=mask, other=0).astype(jnp.float32)


def _store(place, mask, value):
    plgpu.store(place, value.astype(place.dtype), mask=mask)


def _first(num_slots, window):
    return jnp.maximum(num_slots - window, 0) if window else 0


def _forward(q, o, lse, k_depth, v_depth, num, mask, rows, o_out, lse_out, *, sizes, window, scale):
    program = _Program(sizes, rows)
    q_tgh = _load(*program.query(q)) * scale
    o_tgh, highest_tg = _load(*program.query(o)), _load(*program.by_head(lse))
    num_slots = num[0]
    first = _first(num_slots, window)

    def join(i, carry):
        o_tgh, highest_tg, total_tg = carry
        slots = [first + i * SLOTS_A_ROUND + j for j in range(SLOTS_A_ROUND)]
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

    # Where nothing was seen yet, the first round forgets this 1 as it forgets o.
    total_tg = jnp.ones_like(highest_tg)
    rounds = (num_slots - first + SLOTS_A_ROUND - 1) // SLOTS_A_ROUND
    o_tgh, highest_tg, total_tg = lax.fori_loop(0, rounds, join, (o_tgh, highest_tg, total_tg))
    _store(*program.query(o_out), o_tgh / jnp.where(total_tg > 0, total_tg, 1.0)[:, :, None])
    _store(*program.by_head(lse_out), highest_tg + jnp.log(total_tg))


def _backward(*refs, sizes, window, scale):
    q, do, lse, delta, _, _, k_depth, v_depth, num, mask, rows, dq, dk_sum, dv_sum = refs
    # The sums given (unnamed) and returned are the same memory: it has one name here, so that no
    # compiler takes reads and writes of it for those of two arrays.
    program = _Program(sizes, rows)
    q_tgh, do_tgh = _load(*program.query(q)) * scale, _load(*program.query(do))
    lse_tg, delta_tg = _load(*program.by_head(lse)), _load(*program.by_head(delta))
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

    dq_tgh = jnp.zeros(sizes.tile, jnp.float32)
    dq_tgh = lax.fori_loop(_first(num_slots, window), num_slots, one, dq_tgh)
    _store(*program.query(dq), dq_tgh * scale)


def _call(kernel, arrays, buffers, slots, outputs, window, scale, interpret, **options):
    """One pallas_call on whole arrays, of which every program takes its own part."""
    num_slots, mask_LBR, rows_BT = slots
    num_slots = jnp.asarray(num_slots, jnp.int32).reshape(1)
    # One byte an element would be indexed in 32 bits beyond 2^31 elements.
    mask_LBR = None if mask_LBR is None else mask_LBR.astype(jnp.int16)
    rows_BT = None if rows_BT is None else rows_BT.astype(jnp.int32)
    sizes = _Sizes.of(arrays[0], buffers[0])
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes, window=window, scale=scale),
        out_shape=outputs,
        grid=sizes.grid(len(arrays[0])),
        # These also choose Triton where another backend is the default.
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        **options,
    )(*arrays, *buffers, num_slots, mask_LBR, rows_BT)


def depth_forward(
    q_BTNH,
    o_BTNH,
    lse_BNT,
    buffers,
    num_slots,
    mask_LBR,
    rows_BT,
    window: int,
    scale: float,
    *,
    interpret: bool,
):
    """Continue the softmax of (o, lse) over the slots.

    Args:
      q_BTNH: queries [B, T, N, H] for the slots, in one of DTYPES.
      o_BTNH, lse_BNT: of the sequence alone; lse in float32, -inf and o = 0 where nothing was seen.
      buffers: (k_depth_LBRKH, v_depth_LBRKH), in one of DTYPES.
      num_slots: int or traced, 0 to L: slots from there on are not read.
      mask_LBR: bool, True where a slot of a token is seen; None: everywhere.
      rows_BT: int, the place along R of each query's token, R and above for none; None: R = T.
      window: static, only this many of the newest slots are seen; 0: all.
      scale: static factor on the scores.
      interpret: run by the interpreter, on any platform.

    Returns:
      The joint o_BTNH, in its dtype, and lse_BNT (0 and -inf where nothing is seen), the buffers.
    """
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (o_BTNH, lse_BNT)]
    arrays = q_BTNH, o_BTNH, lse_BNT
    slots = num_slots, mask_LBR, rows_BT
    static = {'window': window, 'scale': scale, 'interpret': interpret, 'name': 'depth_forward'}
    return *_call(_forward, arrays, buffers, slots, outputs, **static), buffers


def depth_backward(
    q_BTNH,
    do_BTNH,
    lse_BNT,
    delta_BNT,
    buffers,
    sums,
    num_slots,
    mask_LBR,
    rows_BT,
    window: int,
    scale: float,
    *,
    interpret: bool,
):
    """Gradients through the slots' part of the softmax.

    Args:
      q_BTNH, buffers, num_slots, mask_LBR, rows_BT, window, scale, interpret: as in depth_forward;
        rows_BT distinct in a row.
      do_BTNH: the output's cotangent.
      lse_BNT, delta_BNT: float32, the joint logsumexp, finite, and rowsum(do o) - dlse.
      sums: (dk_depth_LBRKH, dv_depth_LBRKH) in one of DTYPES, to be added to in place.

    Returns:
      dq_BTNH in q's dtype and the two sums, in which what no query sees keeps its bits.
    """
    outputs = [jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype)]
    outputs += [jax.ShapeDtypeStruct(total.shape, total.dtype) for total in sums]
    arrays = q_BTNH, do_BTNH, lse_BNT, delta_BNT, *sums
    slots = num_slots, mask_LBR, rows_BT
    static = {'window': window, 'scale': scale, 'interpret': interpret, 'name': 'depth_backward'}
    static['input_output_aliases'] = {4: 1, 5: 2}
    return tuple(_call(_backward, arrays, buffers, slots, outputs, **static))
