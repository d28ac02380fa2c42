"""The sequence part of the softmax by cuDNN's fused attention, through a private module of JAX.

The public `jax.nn.dot_product_attention` will not do: it rounds the logsumexp to the queries' dtype
and drops its cotangent, and no joint output and logsumexp can be given to its backward pass. The
private module has all that; what of it is used here is checked before each use.

Reruns need not give equal bits: cuDNN's backward pass sums dq in any order, unless XLA asks for its
deterministic form, as it does under XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true.

Packed documents are refused: JAX gives their logsumexp by document, [B * documents, N, T], not by
token, and JAX 0.10.2 places grouped keys by the number of query heads.
"""

import inspect

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

DTYPES = ('bfloat16', 'float16')
# Parameters of what is called below. JAX 0.12 added _SCORE_MOD to the backward pass.
_FORWARD = (
    'query key value scale mask_type qkv_layout sliding_window_length return_residual'
).split()
_BACKWARD = (
    'query key value bias q_seqlen kv_seqlen q_offsets kv_offsets page_table_k page_table_v'
    ' activation fwd_output grad_output scale seed dropout_rate variadic_args mask_type layout'
    ' sliding_window_length'
).split()
_IMPL = '_dot_product_attention_bwd_impl'
_SCORE_MOD = ['score_mod_args', 'score_mod']


def _parameters(name):
    function = getattr(fused, name, None)
    return list(inspect.signature(function).parameters) if callable(function) else []


def changed() -> str | None:
    """How JAX's private module differs from what is called here, in one line; None: it does not."""
    advice = f'in jax {jax.__version__}; kernels_pallas/cudnn.py knows those of 0.10.2 to 0.12.0'
    if missing := sorted({*_FORWARD}.difference(_parameters('dot_product_attention'))):
        return f'dot_product_attention of {fused.__name__} has no {missing[0]} {advice}'
    found = _parameters(_IMPL)
    if sorted(found) not in (sorted(_BACKWARD), sorted(_BACKWARD + _SCORE_MOD)):
        return (
            f'the backward pass of {fused.__name__} takes {" ".join(found) or "nothing"} {advice}'
        )
    for name in ('_dot_product_attention_bwd_p_wrapper', 'AttentionLayout', 'MaskType'):
        if not hasattr(fused, name):
            return f'{fused.__name__} has no {name} {advice}'
    return None


def unsupported(shapes, capability) -> str | None:
    """Why cuDNN cannot take a sequence part, in one line; None: it can, where it is not `missing`.

    Odd lengths and any number of query heads to a key/value head will do.

    Args:
      shapes: choice.Shapes.
      capability: compute capability of the GPU, (major, minor); None on a CPU.
    """
    length, num_keys, width = shapes.q[1], shapes.k[1], shapes.q[3]
    if len(shapes.dtypes) > 1 or shapes.dtypes[0] not in DTYPES:
        return f'dtypes {", ".join(shapes.dtypes)} must all be {" or all ".join(DTYPES)}'
    if capability is not None and capability < (8, 0):
        return f'compute capability {capability[0]}.{capability[1]} must be 8.0 or above'
    most = 256 if capability and capability >= (9, 0) else 128
    if width % 8 or width > most:
        return f'head width {width} must be divisible by 8 and at most {most}'
    if num_keys != length or not length:
        return f'{num_keys} keys must be as many as the {length} queries, 1 or more'
    if not shapes.ordered:
        return 'given positions must ascend, key i with query i'
    if shapes.segments:
        return 'segment ids must be None'
    if shapes.window and not shapes.consecutive:
        return f'window={shapes.window} counts indices: positions must be None'
    return changed()


def missing(capability) -> str | None:
    """Why this machine has no cuDNN for a GPU of that capability, in one line; None: it has."""
    try:
        version = fused.check_cudnn_version()
    except RuntimeError as error:
        return str(error)
    if capability == (10, 3) and version < 91100:
        return f'cuDNN {version} must be 91100 or newer for compute capability 10.3'
    return None


def _check():
    if reason := changed():
        raise ValueError(reason)


def sequence_forward(q_BTNH, k_BSKH, v_BSKH, window: int, scale: float):
    """Causal attention over the sequence.

    Args:
      q_BTNH, k_BSKH, v_BSKH: bfloat16 or float16, S = T; query t sees key s where
        0 <= t - s, and t - s < window unless window is 0.
      window: static.
      scale: factor on the scores; static.

    Returns:
      o_BTNH in q's dtype, and the natural-log logsumexp lse_BNT in float32.

    Raises:
      ValueError: JAX's private module is not as expected; names its version.
    """
    _check()
    return fused.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        scale=float(scale),
        mask_type=fused.MaskType.CAUSAL,
        qkv_layout='BTNH',
        sliding_window_length=window or None,
        return_residual=True,
    )


def sequence_backward(q_BTNH, k_BSKH, v_BSKH, o_BTNH, lse_BNT, do_BTNH, window: int, scale: float):
    """Gradients of q, k, v through the sequence's part of a joint softmax.

    cuDNN computes P = exp(q k^T scale - lse), delta = rowsum(do o), dS = P (do V^T - delta): with
    the output and logsumexp of all that the softmax covers, be it in the sequence or not, these are
    the gradients of the sequence's part. As it computes delta itself, there is no place for a
    cotangent of lse: where lse is returned and used, xla_sequence.sequence_backward must be taken.

    Args:
      q_BTNH, k_BSKH, v_BSKH, window, scale: as in sequence_forward.
      o_BTNH, lse_BNT: joint, in q's dtype and float32, finite.
      do_BTNH: cotangent of o, in q's dtype.

    Returns:
      (dq_BTNH, dk_BSKH, dv_BSKH), in the dtypes of q, k, v.

    Raises:
      ValueError: JAX's private module is not as expected; names its version.
    """
    _check()
    nothing = jnp.zeros(0, q_BTNH.dtype)
    options = {'score_mod': None} if 'score_mod' in _parameters(_IMPL) else {}
    return tuple(
        fused._dot_product_attention_bwd_p_wrapper.bind(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            *(nothing,) * 7,  # bias, lengths, offsets and pages
            lse_BNT.astype(jnp.float32),
            o_BTNH.astype(q_BTNH.dtype),
            do_BTNH.astype(q_BTNH.dtype),
            scale=float(scale),
            seed=42,  # of dropout, which there is none of; JAX's own default
            dropout_rate=0.0,
            variadic_args=(False, False),  # neither a bias nor its gradient
            mask_type=fused.MaskType.CAUSAL,
            layout=fused.AttentionLayout.BTNH.value,
            sliding_window_length=window or None,
            **options,
        )
    )
