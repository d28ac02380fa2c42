"""Which backends compute an attention: those asked for by name, or the first that fit."""

import functools
import importlib
from typing import NamedTuple

import jax
from absl import logging

from kernels_pallas.joint import Parts

IMPLEMENTATIONS = ('reference', 'xla', 'pallas', 'mosaic_gpu', 'mosaic_gpu_fused')

# Tried in this order on GPUs: by what the kernels move through memory. No form has been timed yet.
GPU_ORDER = ('mosaic_gpu', 'pallas', 'xla')


class Shapes(NamedTuple):
    """What a choice depends on.

    Attributes:
      q, k: shapes [B, T, N, H] and [B, S, K, H].
      num_slots: L, 0 without slots.
      dtypes: names of the dtypes of q, k, v, the slots and their queries, each once.
      ordered: key i belongs to query i and positions ascend.
      consecutive: positions are those of the index, so that a window is one of indices.
      segments: there are segment ids.
      window: keys seen; 0: no limit.
      scale: factor on the scores.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    num_slots: int
    dtypes: tuple[str, ...]
    ordered: bool
    consecutive: bool
    segments: bool
    window: int
    scale: float = 1.0


def choose(implementation: str | None, shapes: Shapes) -> Parts:
    """The backends of an implementation; of None: the first of those for the platform that fit.

    What was chosen is logged once for each choice, with the reasons against what was not: a
    warning where there are such.

    Raises:
      ValueError: a backend asked for by name that cannot do it; names the value, and what can.
    """
    platform = jax.default_backend()
    if implementation is None:
        order = GPU_ORDER if platform == 'gpu' else ('xla',)
    else:
        order = (implementation,)
    refused = {name: _unsupported(name, platform, shapes) for name in order}
    if implementation is None and jax.device_count() > 1 and not _apart():
        # GSPMD gathers what a kernel reads on every device; asked for by name, they may do so.
        why = f'{jax.device_count()} devices, and no shard_map that gives each its own part'
        refused |= {name: refused[name] or why for name in order if name != 'xla'}
    fitting = [name for name in order if refused[name] is None]
    if not fitting:
        others = [n for n in IMPLEMENTATIONS if _unsupported(n, platform, shapes) is None]
        raise ValueError(
            f'implementation={implementation!r} cannot: {refused[implementation]}; '
            f'these can: {", ".join(others)}'
        )
    name = fitting[0]
    against = [f'{n}: {refused[n]}' for n in order[: order.index(name)]]
    sequence, reason = _sequence(implementation, platform, shapes)
    against += [reason] if reason else []
    if not shapes.num_slots:
        parts = Parts(sequence)
    else:
        depth = 'mosaic_gpu' if name.startswith('mosaic_gpu') else name
        fused, interpret = name == 'mosaic_gpu_fused', platform == 'cpu' and depth != 'xla'
        parts = Parts(sequence, depth, fused, interpret)
    if platform != 'cpu' or implementation is not None:
        _log(parts, platform, shapes.num_slots > 0, tuple(against))
    return parts


def _apart():
    """Whether this is traced for one device by itself, inside a shard_map over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and set(mesh.manual_axes) == set(mesh.axis_names)


_told = []


@functools.cache
def _log(parts, platform, slots, against):
    how = f'sequence by {parts.sequence}'
    if slots:
        how += f', depth by {parts.depth}{", forward in one kernel" * parts.fused}'
    how += ', interpreted' * parts.interpret
    reasons = ''.join(f'; not {reason}' for reason in against)
    line = f'depth_attention on {platform}: {how}{reasons}'
    _told.append(line)
    # What is not the first choice is worth a line at any level of verbosity.
    (logging.warning if against else logging.info)(line)


def told() -> list[str]:
    """The lines of this process's choices, in their order."""
    return list(_told)


def _sequence(implementation, platform, shapes):
    """The backend of the sequence part, and why it is not the fastest one."""
    if implementation == 'xla' or platform != 'gpu':
        return 'xla', None
    cudnn = _backend('cudnn')
    reason = cudnn.unsupported(shapes, cudnn.capability())
    return ('cudnn', None) if reason is None else ('xla', f'cudnn: {reason}')


def _backend(name):
    return importlib.import_module(f'kernels_pallas.{name}')


def _unsupported(name, platform, shapes):
    """Why an implementation cannot do it; None: it can."""
    if name in ('reference', 'xla'):
        return None
    if platform not in ('cpu', 'gpu'):
        return f'platform {platform} must be a GPU, or a CPU, which interprets kernels'
    if name == 'pallas':
        return _depth_refusal('pallas_depth', shapes)
    if platform == 'gpu':
        capability = _capability()
        if not capability.startswith('9.'):
            return f'compute capability {capability} must be 9.x (Hopper)'
    elif not _backend('_compat').CAN_INTERPRET:
        return f'platform {platform} must be a Hopper GPU'
    if shapes.num_slots and len(shapes.dtypes) > 1:
        return f'dtypes {", ".join(shapes.dtypes)} must be one'
    reason = _depth_refusal('mosaic_depth', shapes)
    if reason is None and name == 'mosaic_gpu_fused':
        reason = _backend('mosaic_fused').unsupported(shapes)
    return reason


def _capability():
    """Compute capability of the GPU, such as 9.0."""
    return str(getattr(jax.devices()[0], 'compute_capability', 'unknown'))


def _depth_refusal(name, shapes):
    if not shapes.num_slots:
        return None
    sizes = shapes.q, shapes.k[2], shapes.num_slots
    reasons = [_backend(name).unsupported(*sizes, dtype) for dtype in shapes.dtypes]
    return next((reason for reason in reasons if reason), None)
