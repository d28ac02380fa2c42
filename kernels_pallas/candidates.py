"""Which backends can compute an attention on a device, and which of them are worth measuring.

Everything here is a function of a described device and of shapes: it can be asked about a machine
that is not there.
"""

import importlib
from typing import NamedTuple

from kernels_pallas.joint_softmax import Parts

IMPLEMENTATIONS = ('reference', 'xla', 'pallas', 'mosaic_gpu', 'mosaic_gpu_fused')
DEPTHS = ('mosaic_gpu', 'pallas', 'xla')
DECODING = 'xla'  # decode.py, on every platform
# A training step has more. Initialisation, with at most 2048, and short prompts have fewer, and
# would not regain the seconds that a measurement takes.
LEAST_QUERIES = 4096


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
      slot_window: newest slots seen; 0: all.
      slot_rows: R, tokens that have slots, where the queries name theirs; 0: R = T, each its own.
      slot_mask: slots are hidden one by one.
      slot_queries: the slots have queries of their own.
      sums: dtype of the arrays to which the slots' gradients are added; '': that of the slots.
      lse: the logsumexp is returned too.
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
    slot_window: int = 0
    slot_rows: int = 0
    slot_mask: bool = False
    slot_queries: bool = False
    sums: str = ''
    lse: bool = False


class Device(NamedTuple):
    """What a choice depends on besides shapes.

    Attributes:
      platform: cpu | gpu | tpu, as JAX calls it.
      kind: its name, such as NVIDIA H200.
      capability: CUDA compute capability (major, minor); None of what is not an NVIDIA GPU.
      software: versions of the driver's side, as text; a measurement holds for these.
      not_measured: why nothing can be measured on it, in one line; '': it can.
      here: it is a device of this process, so that its libraries can be looked at.
    """

    platform: str
    kind: str = ''
    capability: tuple[int, int] | None = None
    software: str = ''
    not_measured: str = 'the device is only described'
    here: bool = False


class Plan(NamedTuple):
    """What `implementation=None` can run on a GPU.

    Attributes:
      proven: in order of preference where nothing can be measured: forms that others have run on
        such a device; the last is XLA's, which can compute everything.
      candidates: what a measurement compares.
      otherwise: candidates if every one with cuDNN fails.
      refused: (name, reason) of the backends that cannot compute these shapes here.
    """

    proven: tuple[Parts, ...]
    candidates: tuple[Parts, ...]
    otherwise: tuple[Parts, ...]
    refused: tuple[tuple[str, str], ...]


def label(parts: Parts, shapes: Shapes) -> str:
    """Name of the parts, such as cudnn+mosaic_gpu; of the sequence's alone without slots."""
    if not shapes.num_slots:
        return parts.sequence
    return f'{parts.sequence}+{parts.depth}{"_fused" * parts.fused}'


def plan(shapes: Shapes, device: Device) -> Plan:
    """The candidates for shapes on a GPU, and the reasons against the others."""
    refused = {'cudnn': sequence_unsupported(shapes, device)}
    sequence = 'xla' if refused['cudnn'] else 'cudnn'
    proven = tuple(dict.fromkeys((Parts(sequence), Parts())))
    depths = [Parts(sequence)]
    if shapes.num_slots:
        names = ('mosaic_gpu', 'mosaic_gpu_fused', 'pallas')
        refused |= {name: unsupported(name, shapes, device) for name in names}
        for name in names:
            if refused[name] is None:
                depths.append(Parts(sequence, name.removesuffix('_fused'), name.endswith('fused')))
    return Plan(
        proven,
        candidates=tuple(dict.fromkeys((*depths, Parts()))),
        otherwise=tuple(
            parts._replace(sequence='xla') for parts in depths[1:] * (not refused['cudnn'])
        ),
        refused=tuple((name, why) for name, why in refused.items() if why),
    )


def not_measured(shapes: Shapes, device: Device) -> str:
    """Why `implementation=None` measures nothing for shapes on a device; '': it does."""
    if device.not_measured:
        return device.not_measured
    if shapes.q[0] * shapes.q[1] < LEAST_QUERIES:
        return f'fewer than {LEAST_QUERIES} queries'
    return f'dtypes {", ".join(shapes.dtypes)} are mixed' if len(shapes.dtypes) > 1 else ''


def named(implementation: str, shapes: Shapes, device: Device) -> tuple[Parts, tuple[str, ...]]:
    """The parts of an implementation, and why its sequence is not cuDNN's, in at most one line.

    Raises:
      ValueError: it cannot compute these shapes here; names the reason, and what can.
    """
    if reason := unsupported(implementation, shapes, device):
        others = [n for n in IMPLEMENTATIONS if unsupported(n, shapes, device) is None]
        raise ValueError(
            f'implementation={implementation!r} cannot: {reason}; these can: {", ".join(others)}'
        )
    sequence, against = 'xla', ()
    if implementation != 'xla' and device.platform == 'gpu':
        reason = sequence_unsupported(shapes, device)
        sequence, against = ('xla', (f'cudnn: {reason}',)) if reason else ('cudnn', ())
    if not shapes.num_slots:
        return Parts(sequence), against
    depth = implementation.removesuffix('_fused')
    interpret = device.platform == 'cpu' and depth != 'xla'
    return Parts(sequence, depth, implementation == 'mosaic_gpu_fused', interpret), against


def _backend(name):
    return importlib.import_module(f'kernels_pallas.{name}')


def sequence_unsupported(shapes: Shapes, device: Device) -> str | None:
    """Why cuDNN cannot compute the sequence part of shapes on a GPU; None: it can."""
    if device.capability is None:
        return f'{device.kind or device.platform} must be an NVIDIA GPU'
    cudnn = _backend('cudnn')
    reason = cudnn.unsupported(shapes, device.capability)
    return reason or (cudnn.missing(shapes, device.capability) if device.here else None)


def unsupported(name: str, shapes: Shapes, device: Device) -> str | None:
    """Why an implementation cannot compute shapes on a device, in one line; None: it can."""
    if name in ('reference', 'xla'):
        return None
    if device.platform not in ('cpu', 'gpu'):
        return f'platform {device.platform} must be a GPU, or a CPU, which interprets kernels'
    if name == 'pallas':
        return _slots_unsupported('pallas_depth', shapes)
    if device.platform == 'gpu':
        if device.capability is None or device.capability[0] != 9:
            found = '.'.join(map(str, device.capability or ('unknown',)))
            return f'compute capability {found} must be 9.x (Hopper)'
    elif not _backend('_compat').CAN_INTERPRET:
        return f'platform {device.platform} must be a Hopper GPU'
    if shapes.num_slots and len(shapes.dtypes) > 1:
        return f'dtypes {", ".join(shapes.dtypes)} must be one'
    reason = _slots_unsupported('mosaic_depth', shapes)
    if reason is None and name == 'mosaic_gpu_fused':
        reason = _backend('mosaic_fused').unsupported(shapes)
    return reason


def _slots_unsupported(module, shapes):
    if not shapes.num_slots:
        return None
    sizes = shapes.q, shapes.k[2], shapes.num_slots
    reasons = [_backend(module).unsupported(*sizes, dtype) for dtype in shapes.dtypes]
    return next((reason for reason in reasons if reason), None)
