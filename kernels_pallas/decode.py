"""Attention of one new token over a cache and itself: one softmax, and no joint array of keys."""

import jax
import jax.numpy as jnp


def decode_attention(q_C1NH, k_C1KH, v_C1KH, k_BKHS, v_BKHS, visible_CS, rows_C=None):
    """softmax over [q . k_cached, q . k_own] H^-1/2, applied to the values of both.

    The own key is not written into the cache before it is read: XLA would copy the cache.

    Args:
      q_C1NH: queries [C, 1, N, H].
      k_C1KH, v_C1KH: the new token's key and value [C, 1, K, H]; always visible.
      k_BKHS, v_BKHS: the cache [B, K, H, S], read only.
      visible_CS: bool [C, S], which slots a token sees.
      rows_C: int32 [C], the row of the cache that a token reads, B and above for none: these come
        last, and what is returned for them has no meaning. None: C = B, row by row.

    Returns:
      o_C1NH in q's dtype; softmax in float32.
    """
    given = (q_C1NH, k_C1KH, v_C1KH)
    if rows_C is None:
        return _attend(*given, k_BKHS, v_BKHS, visible_CS)
    if jax.default_backend() != 'cpu':
        k_CKHS, v_CKHS = (side.at[rows_C].get(mode='clip') for side in (k_BKHS, v_BKHS))
        return _attend(*given, k_CKHS, v_CKHS, visible_CS)

    def one(i, o_C1NH):
        def row_of(side, at):
            return jax.lax.dynamic_slice_in_dim(side, at, 1)

        mine = [row_of(side, i) for side in given]
        cached = [row_of(side, rows_C[i]) for side in (k_BKHS, v_BKHS)]
        o_11NH = _attend(*mine, *cached, row_of(visible_CS, i))
        return jax.lax.dynamic_update_slice_in_dim(o_C1NH, o_11NH, i, axis=0)

    # A CPU would copy the rows to gather them; one at a time they are read where they lie.
    num_rows = jnp.sum(rows_C < k_BKHS.shape[0])
    return jax.lax.fori_loop(0, num_rows, one, jnp.zeros_like(q_C1NH))


def _attend(q_B1NH, k_B1KH, v_B1KH, k_BKHS, v_BKHS, visible_BS):
    """One softmax over a row's cache and its new token.

    Slots are the innermost axis of the cache, the cache stands on the left of the second product,
    and its result is turned round last: XLA on CPUs is several times slower otherwise.
    """
    batch, _, heads, width = q_B1NH.shape
    kv_heads = k_B1KH.shape[2]
    wide = jnp.promote_types(q_B1NH.dtype, jnp.float32)
    if jax.default_backend() == 'cpu':
        # XLA on CPU cannot run some bfloat16 products with a float32 result.
        k_BKHS, v_BKHS = k_BKHS.astype(wide), v_BKHS.astype(wide)
    q_BKGH = (q_B1NH.astype(wide) * width**-0.5).reshape(batch, kv_heads, -1, width)
    own_BKG = jnp.sum(q_BKGH * k_B1KH[:, 0, :, None].astype(wide), axis=-1)
    scores_BKGS = jnp.einsum('bkgh,bkhs->bkgs', q_BKGH.astype(k_BKHS.dtype), k_BKHS)
    scores_BKGS = jnp.where(visible_BS[:, None, None], scores_BKGS.astype(wide), -jnp.inf)
    highest_BKG = jnp.maximum(jnp.max(scores_BKGS, axis=-1), own_BKG)
    weights_BKGS = jnp.exp(scores_BKGS - highest_BKG[..., None])
    own_BKG = jnp.exp(own_BKG - highest_BKG)
    total_BK1G = (jnp.sum(weights_BKGS, axis=-1) + own_BKG)[:, :, None]
    o_BKHG = jnp.einsum('bkhs,bkgs->bkhg', v_BKHS, weights_BKGS.astype(v_BKHS.dtype)).astype(wide)
    o_BKHG = (o_BKHG + v_B1KH[:, 0, ..., None].astype(wide) * own_BKG[:, :, None]) / total_BK1G
    o_BKGH = jnp.swapaxes(o_BKHG, 2, 3)
    return o_BKGH.reshape(batch, 1, heads, width).astype(q_B1NH.dtype)
