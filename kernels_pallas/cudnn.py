"""The sequence part of the softmax by cuDNN's fused attention, through a private module of JAX.

The public `jax.nn.dot_product_attention` will not do: it rounds the logsumexp to the queries' dtype
and drops its cotangent, and no joint output and logsumexp can be given to its backward pass. The
private module has all that; what of it is used here is checked before each use.

Reruns need not give equal bits: cuDNN's backward pass sums dq in any order, unless XLA asks for its
deterministic form, as it does under XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true.

Packed documents are calls of their own kind: cudnn_packed.py makes them.
"""

import inspect

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

DTYPES = ('bfloat16', 'float16')
# Packed documents: bytes for the sums of dq, and documents of a row, at most.
WORKSPACE = 2**30
MOST_DOCUMENTS = 32
# Parameters of what is called below, by the pass. JAX 0.12 added _SCORE_MOD.
_OPERANDS = 'query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v'
_OPTIONS = 'scale seed dropout_rate variadic_args mask_type layout sliding_window_length'
_PARAMETERS = {
    'fwd': f'{_OPERANDS} {_OPTIONS} is_training'.split(),
    'bwd': f'{_OPERANDS} activation fwd_output grad_output {_OPTIONS}'.split(),
}
_SCORE_MOD = ['score_mod_args', 'score_mod']


def _parameters(way):
    function = getattr(fused, f'_dot_product_attention_{way}_impl', None)
    return list(inspect.signature(function).parameters) if callable(function) else []


def changed() -> str | None:
    """How JAX's private module differs from what is called here, in one line; None: it does not."""
    advice = f'in jax {jax.__version__}; kernels_pallas/cudnn.py knows those of 0.10.2 to 0.12.0'
    for way, known in _PARAMETERS.items():
        found = _parameters(way)
        if sorted(found) not in (sorted(known), sorted(known + _SCORE_MOD)):
            name, found = f'_dot_product_attention_{way}_impl', ' '.join(found) or 'nothing'
            return f'{name} of {fused.__name__} takes {found} {advice}'
    wrappers = [f'_dot_product_attention_{way}_p_wrapper' for way in _PARAMETERS]
    for name in (*wrappers, 'AttentionLayout', 'MaskType'):
        if not hasattr(fused, name):
            return f'{fused.__name__} has no {name} {advice}'
    return None


def unsupported(shapes, capability: tuple[int, int] | None) -> str | None:
    """Why cuDNN cannot compute a sequence part, in one line; None: it can, if it is not `missing`.

    Odd lengths and any number of query heads to a key/value head are supported.

    Args:
      shapes: choice.Shapes.
      capability: compute capability of the GPU, as (major, minor); None: not known.
    """
    length, num_keys, width = shapes.q[1], shapes.k[1], shapes.q[3]
    if len(shapes.dtypes) > 1 or shapes.dtypes[0] not in DTYPES:
        return f'dtypes {", ".join(shapes.dtypes)} must all be {" or all ".join(DTYPES)}'
    if capability and capability < (8, 0):
        return f'compute capability {capability[0]}.{capability[1]} must be 8.0 or above'
    most = 256 if capability and capability >= (9, 0) else 128
    if width % 8 or width > most:
        return f'head width {width} must be divisible by 8 and at most {most}'
    if num_keys != length or not length:
        return f'{num_keys} keys must be as many as the {length} queries, 1 or more'
    if not shapes.ordered:
        return 'given positions must ascend, key i with query i'
    if shapes.window and not shapes.consecutive:
        return f'window={shapes.window} counts indices: positions must be None'
    return changed() or (_packed_unsupported(shapes, capability) if shapes.segments else None)


def missing(shapes, capability: tuple[int, int] | None) -> str | None:
    """Why this machine's cuDNN cannot compute what is not `unsupported`; None: it can."""
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
    """(documents that a row may have, rows of a call) of packed documents.

    The backward pass sums dq in float32. As XLA does not say how many tokens there are in all
    (`set_max_total_seq_len_q`), its workspace has T rows for each document: 4 B M N T H bytes for B
    rows of M documents. M is what WORKSPACE allows for one row, at most MOST_DOCUMENTS.
    """
    one = 4 * heads * length * width
    documents = min(MOST_DOCUMENTS, WORKSPACE // one)
    most = max(1, WORKSPACE // (one * max(documents, 1)))
    return documents, max(rows for rows in range(1, min(batch, most) + 1) if batch % rows == 0)


def _packed_unsupported(shapes, capability):
    """Why packed documents cannot be computed; None: they can."""
    if shapes.window:
        return f'window={shapes.window} with segment ids must be 0'
    if capability and capability < (9, 0):
        number = f'{capability[0]}.{capability[1]}'
        return f'compute capability {number} must be 9.0 or above for segment ids'
    _, length, heads, width = shapes.q
    if heads != shapes.k[2] and jax.__version_info__ < (0, 11, 2):
        wrong = f'jax {jax.__version__} misplaces {shapes.k[2]} key heads of {heads} query heads'
        return f'{wrong} with segment ids: must be 0.11.2 or newer'
    if packed_sizes(1, length, heads, width)[0] < 2:
        need, most = 8 * heads * length * width / 2**30, WORKSPACE / 2**30
        return f'{need:.1f} GiB for two documents with segment ids must be at most {most:.1f}'
    return None


def _call(way, operands, packed, window, scale, **options):
    """Bind one pass of JAX's primitive; packed: (lengths [B, M], offsets [B, M + 1]) or None."""
    if reason := changed():
        raise ValueError(reason)
    query, key, value, *others = operands
    nothing = jnp.zeros(0, query.dtype)
    lengths, offsets = packed or (nothing, nothing)
    if 'score_mod' in _parameters(way):
        options['score_mod'] = None
    mask = fused.MaskType.PADDING_CAUSAL if packed else fused.MaskType.CAUSAL
    bias, pages = nothing, (nothing, nothing)
    primitive = getattr(fused, f'_dot_product_attention_{way}_p_wrapper')
    return primitive.bind(
        query,
        key,
        value,
        bias,
        lengths,
        lengths,
        offsets,
        offsets,
        *pages,
        *others,
        scale=float(scale),
        seed=42,  # of dropout, which is off; JAX's own default
        dropout_rate=0.0,
        variadic_args=(False, False),  # neither a bias nor its gradient
        mask_type=mask,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window or None,
        **options,
    )


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, window: int, scale: float, packed=None):
    """Causal attention over the sequence.

    Args:
      q_BTNH, k_BSKH, v_BSKH: bfloat16 or float16, S = T; query t sees key s where
        0 <= t - s, and t - s < window unless window is 0.
      window: static.
      scale: factor on the scores; static.
      packed: (lengths_BM, offsets [B, M + 1]), int32, of the documents of each row, whose tokens
        do not see each other's; see cudnn_packed. None: one document a row.

    Returns:
      o_BTNH in q's dtype, and the natural-log logsumexp in float32: lse_BNT, or, packed, by
      document and place in it, [B * M, N, T], of which what lies beyond a document is undefined.

    Raises:
      ValueError: JAX's private module is not as expected; names its version.
    """
    operands = q_BTNH, k_BSKH, v_BSKH
    return tuple(_call('fwd', operands, packed, window, scale, is_training=True))


def sequence_backward(
    q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse, do_BTNH, window: int, scale: float, packed=None
):
    """Gradients of q, k, v through the sequence's part of a joint softmax.

    cuDNN computes P = exp(q k^T scale - lse), delta = rowsum(do o), dS = P (do V^T - delta): with
    the output and logsumexp of all that the softmax covers, be it in the sequence or not, these are
    the gradients of the sequence's part. As it computes delta itself, there is no place for a
    cotangent of lse: where lse is returned and used, xla_sequence.sequence_backward must be taken.

    Args:
      q_BTNH, k_BSKH, v_BSKH, window, scale, packed: as in sequence_forward.
      o_BTNH, lse: joint, in q's dtype and float32, finite; lse in the layout of sequence_forward.
      do_BTNH: cotangent of o, in q's dtype.

    Returns:
      (dq_BTNH, dk_BSKH, dv_BSKH), in the dtypes of q, k, v.

    Raises:
      ValueError: JAX's private module is not as expected; names its version.
    """
    dtype = q_BTNH.dtype
    joint = lse.astype(jnp.float32), o_BTNH.astype(dtype), do_BTNH.astype(dtype)
    return tuple(_call('bwd', (q_BTNH, k_BSKH, v_BSKH, *joint), packed, window, scale))
