"""The sequence part by cuDNN's fused attention, through a private module of JAX.

The public function does not return a float32 logsumexp and cannot take a joint one
(docs/depth_attention.md, section 5). Packed documents use the ragged layout: JAX takes the length
and the first token of each of M documents, [B, M], and returns the logsumexp by document and place
in it, [B * M, N, T]. Documents beyond the last are empty.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as fused

from kernels_pallas.xla import sequence as xla

DTYPES = ('bfloat16', 'float16')
# Packed documents: most bytes of cuDNN's workspace for dq, and most documents in a batch row.
WORKSPACE = 2**30
MAX_DOCUMENTS = 32
# Logsumexp beyond the end of a document: exp(score - UNUSED) is 0 for any score.
UNUSED = 1e30
KNOWN_JAX = (0, 10, 2), (0, 13)  # versions whose private module is known: first, end


def changed() -> str | None:
    """Return why the private module of this JAX version cannot be used, in one line, or None."""
    if KNOWN_JAX[0] <= jax.__version_info__ < KNOWN_JAX[1]:
        return None
    return f'jax {jax.__version__}: kernels_pallas/cudnn.py knows 0.10.2 to 0.12, before 0.13'


def unsupported(shapes, device) -> str | None:
    """Return why cuDNN does not support `backends.Shapes` on a device, in one line, or None."""
    length, num_keys, width = shapes.q[1], shapes.k[1], shapes.q[3]
    capability = device.capability
    number = f'{capability[0]}.{capability[1]}'
    if len(shapes.dtypes) > 1 or shapes.dtypes[0] not in DTYPES:
        return f'dtypes {", ".join(shapes.dtypes)} must all be {" or all ".join(DTYPES)}'
    if capability < (8, 0):
        return f'compute capability {number} must be 8.0 or above'
    most = 256 if capability >= (9, 0) else 128
    if width % 8 or width > most:
        return f'head width {width} must be divisible by 8 and at most {most}'
    if num_keys != length or not length:
        return f'{num_keys} keys must be as many as the {length} queries, 1 or more'
    if not shapes.ordered:
        return 'given positions must ascend, key i with query i'
    if shapes.window and not shapes.consecutive:
        return f'window={shapes.window} counts indices: positions must be None'
    if shapes.segments and capability < (9, 0):
        return f'compute capability {number} must be 9.0 or above for segment ids'
    reason = changed() or (_packed_unsupported(shapes) if shapes.segments else None)
    if reason or not device.local:
        return reason
    try:
        version = fused.check_cudnn_version()
    except RuntimeError as error:
        return str(error)
    if capability == (10, 3) and version < 91100:
        return f'cuDNN {version} must be 91100 or newer for compute capability 10.3'
    if shapes.segments and version < 90600:
        return f'cuDNN {version} must be 90600 or newer for segment ids'
    return None


def packed_sizes(batch: int, length: int, heads: int, width: int) -> tuple[int, int]:
    """Return (most documents in a row, rows of a call): dq takes a workspace of 4 B M N T H."""
    one = 4 * heads * length * width
    documents = min(MAX_DOCUMENTS, WORKSPACE // one)
    most = max(1, WORKSPACE // (one * max(documents, 1)))
    return documents, max(rows for rows in range(1, min(batch, most) + 1) if batch % rows == 0)


def _packed_unsupported(shapes):
    if shapes.window:
        return f'window={shapes.window} with segment ids must be 0'
    _, length, heads, width = shapes.q
    if heads != shapes.k[2] and jax.__version_info__ < (0, 11, 2):
        wrong = f'jax {jax.__version__} misplaces {shapes.k[2]} key heads of {heads} query heads'
        return f'{wrong} with segment ids: must be 0.11.2 or newer'
    if packed_sizes(1, length, heads, width)[0] < 2:
        need, most = 8 * heads * length * width / 2**30, WORKSPACE / 2**30
        return f'{need:.1f} GiB for two documents with segment ids must be at most {most:.1f}'
    return None


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, mask, static):
    """Compute `xla.sequence.sequence_forward` for supported shapes."""

    def by_cudnn(operands, index_BT=None, starts=None):
        o, stats = _call('fwd', operands, static, starts, is_training=True)
        return o, stats if starts is None else _lse_of_tokens(stats, index_BT, starts)

    def by_xla(operands, mask):
        return xla.sequence_forward(*operands, mask, static)

    return _dispatch((q_BTNH, k_BSKH, v_BSKH), mask, by_cudnn, by_xla)


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, mask, static, o_BTNH, do_BTNH, lse_BNT, dlse_BNT):
    """Compute `xla.sequence.sequence_backward` without dlse, which cuDNN does not take."""
    del dlse_BNT

    def by_cudnn(operands, index_BT=None, starts=None):
        q, k, v, o, do, stats = operands
        stats = stats if starts is None else _lse_of_documents(stats, starts)
        joint = stats.astype(jnp.float32), o.astype(q.dtype), do.astype(q.dtype)
        return _call('bwd', (q, k, v, *joint), static, starts)

    def by_xla(operands, mask):
        q, k, v, o, do, lse = operands
        dq, dk, dv = xla.sequence_backward(q, k, v, mask, static, o, do, lse, None)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    operands = q_BTNH, k_BSKH, v_BSKH, o_BTNH, do_BTNH, lse_BNT
    return _dispatch(operands, mask, by_cudnn, by_xla)


def _call(way, operands, static, starts, **options):
    """Binds JAX's primitive for a pass, fwd or bwd; starts [B, M + 1]: as `_documents` returns."""
    if reason := changed():
        raise ValueError(reason)
    lengths = offsets = nothing = jnp.zeros(0, operands[0].dtype)
    mask_type = fused.MaskType.CAUSAL
    if starts is not None:
        lengths, offsets = jnp.diff(starts, axis=1), starts.at[:, -1].set(-1)
        mask_type = fused.MaskType.PADDING_CAUSAL
    if jax.__version_info__ >= (0, 12):
        options['score_mod'] = None
    bias = page_table = nothing
    documents = lengths, lengths, offsets, offsets, page_table, page_table
    results = getattr(fused, f'_dot_product_attention_{way}_p_wrapper').bind(
        *(*operands[:3], bias, *documents, *operands[3:]),
        scale=float(static.scale),
        seed=42,  # of dropout, which is off; JAX's own default
        dropout_rate=0.0,
        variadic_args=(False, False),  # neither a bias nor its gradient
        mask_type=mask_type,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=static.window or None,
        **options,
    )
    return tuple(results)


def _documents(segment_ids_BT, most):
    """Find the packed documents of each batch row, at most M = `most`.

    Returns (document of each token [B, T], first token of each document [B, M + 1], T for absent
    ones, bool: there are at most M in each row, and all are contiguous).
    """
    ids, length = segment_ids_BT, segment_ids_BT.shape[1]
    begins_BT = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    index_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)
    before = index_BT[:, :, None] < jnp.arange(most + 1)[None, None]
    starts = jnp.sum(before, axis=1, dtype=jnp.int32)
    # Contiguous: no two documents of a row have the same id.
    of_BM = jnp.take_along_axis(ids, jnp.minimum(starts[:, :most], length - 1), axis=1)
    again = (of_BM[:, :, None] == of_BM[:, None]) & jnp.tri(most, k=-1, dtype=bool)[None]
    again &= (starts[:, :most] < length)[:, :, None]
    return index_BT, starts, jnp.all(index_BT < most) & ~jnp.any(again)


def _lse_of_tokens(stats, index_BT, starts):
    """Return lse_BNT of the logsumexps by document, [B * M, N, T]."""
    batch, most = starts.shape[0], starts.shape[1] - 1
    start_BT = jnp.take_along_axis(starts, jnp.minimum(index_BT, most), axis=1)
    places_BT = jnp.arange(index_BT.shape[1])[None] - start_BT

    def row(stats_MNT, index_T, places_T):
        return stats_MNT.at[index_T, :, places_T].get(mode='clip')

    stats_BMNT = stats.reshape(batch, most, *stats.shape[1:])
    return jnp.moveaxis(jax.vmap(row)(stats_BMNT, index_BT, places_BT), 1, 2)


def _lse_of_documents(lse_BNT, starts):
    """Return the logsumexps by document, [B * M, N, T]; UNUSED beyond the end of each."""
    batch, heads, length = lse_BNT.shape
    document = functools.partial(lax.dynamic_slice_in_dim, slice_size=length, axis=1)
    padded = jnp.pad(lse_BNT, ((0, 0), (0, 0), (0, length)))
    moved_BMNT = jax.vmap(jax.vmap(document, (None, 0)))(padded, starts[:, :-1])
    inside = jnp.arange(length)[None, None, None] < jnp.diff(starts, axis=1)[:, :, None, None]
    return jnp.where(inside, moved_BMNT, UNUSED).reshape(-1, heads, length)


def _dispatch(operands, mask, by_cudnn, by_xla):
    """Compute by cuDNN. Documents: in groups of rows; by XLA for groups that do not fit."""
    if mask.segment_ids_BT is None:
        return by_cudnn(operands)
    batch = operands[0].shape[0]
    documents, rows = packed_sizes(*operands[0].shape)

    def group(given):
        operands, mask = given
        index_BT, starts, fit = _documents(mask.segment_ids_BT, documents)
        fit &= jnp.all(mask.segment_ids_BT == mask.key_segment_ids_BS)
        forms = lambda: by_cudnn(operands, index_BT, starts), lambda: by_xla(operands, mask)
        return lax.cond(fit, *forms)

    if rows == batch:
        return group((operands, mask))
    groups = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), (operands, mask))
    return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), lax.map(group, groups))
