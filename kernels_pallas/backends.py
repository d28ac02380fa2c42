"""What computes an attention: one table of backends, and the choice among them.

All but `this_device` depends on a described device and on shapes alone, so it can be asked about a
machine that is not at hand.
"""

import contextlib
import importlib
import os
import re
from typing import NamedTuple

import jax
from absl import logging

from kernels_pallas import autotune


class Backend(NamedTuple):
    """One way to compute a part of the softmax: a row of BACKENDS.

    Attributes:
      part: sequence | depth.
      name: as in `Parts`; for a depth part also the value of `implementation`.
      forward: module under kernels_pallas with `sequence_forward` or `depth_forward`, or with
        `fused_forward`, and, unless `needs` is empty, `unsupported(shapes, device)`.
      backward: module with `sequence_backward` or `depth_backward`.
      needs: '' | gpu | hopper; kernels of the depth part also run interpreted on a CPU.
      fused: the forward pass computes both parts in one kernel.
      takes_dlse: the backward pass of a sequence part takes a cotangent of the logsumexp.
    """

    part: str
    name: str
    forward: str
    backward: str
    needs: str = ''
    fused: bool = False
    takes_dlse: bool = True


# A part's backends in the order in which they are tried and measured. XLA's compute everything.
BACKENDS = (
    Backend('sequence', 'cudnn', 'cudnn', 'cudnn', 'gpu', takes_dlse=False),
    Backend('sequence', 'xla', 'xla.sequence', 'xla.sequence'),
    Backend('depth', 'xla', 'xla.depth', 'xla.depth'),
    Backend('depth', 'mosaic_gpu', 'mosaic.depth', 'mosaic.depth_backward', 'hopper'),
    Backend(
        'depth', 'mosaic_gpu_fused', 'mosaic.fused', 'mosaic.depth_backward', 'hopper', fused=True
    ),
    Backend('depth', 'pallas', 'triton.depth', 'triton.depth', 'gpu'),
)
SEQUENCE, DEPTH = (
    {row.name: row for row in BACKENDS if row.part == part} for part in ('sequence', 'depth')
)
IMPLEMENTATIONS = ('reference', *DEPTH)
DECODING = 'xla'  # decode.py, on every platform
# Below this many queries nothing is measured: initialization, with at most 2048, and short prompts
# would not regain the seconds that a measurement takes.
MIN_QUERIES = 4096


class Parts(NamedTuple):
    """The backends that compute an attention.

    Attributes:
      sequence, depth: names in BACKENDS.
      interpret: kernels run in their interpreter, for machines that cannot run them.
    """

    sequence: str = 'xla'
    depth: str = 'xla'
    interpret: bool = False

    def label(self, shapes) -> str:
        """Name such as cudnn+mosaic_gpu; without slots that of the sequence's backend alone."""
        return f'{self.sequence}+{self.depth}' if shapes.num_slots else self.sequence


class Shapes(NamedTuple):
    """The call of an attention, as far as a choice depends on it.

    Attributes:
      q, k: shapes [B, T, N, H] and [B, S, K, H].
      num_slots: L, 0 without slots.
      dtypes: names of the dtypes of q, k, v, the slots and their queries, each once.
      ordered: key i belongs to query i and positions ascend.
      consecutive: positions are those of the index, so that a window is one of indices.
      segments: there are segment ids.
      window: number of visible keys; 0: no limit.
      scale: factor on the scores.
      slot_window: number of visible slots, the newest; 0: all.
      slot_rows: R, tokens that have slots, where `slot_rows_BT` is given; 0: R = T.
      slot_mask: there is a mask of the slots.
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
    """A device on which an attention runs.

    Attributes:
      platform: cpu | gpu | tpu, as JAX calls it.
      kind: its name, such as NVIDIA H200.
      capability: CUDA compute capability (major, minor); None if it is not an NVIDIA GPU.
      software: versions of the driver's side, as text; a measurement holds for these.
      not_measured: why nothing can be measured on it, in one line; '': it can.
      local: it is a device of this process, so that its libraries can be inspected.
    """

    platform: str
    kind: str = ''
    capability: tuple[int, int] | None = None
    software: str = ''
    not_measured: str = 'the device is only described'
    local: bool = False


class Plan(NamedTuple):
    """What `implementation=None` can run on a GPU.

    Attributes:
      proven: used, in this order, if nothing can be measured: cuDNN if it supports the shapes,
        then XLA.
      candidates: what a measurement compares.
      otherwise: what is measured next if every candidate with the first sequence backend fails.
      refused: (name, reason) of the backends that do not support these shapes on this device.
    """

    proven: tuple[Parts, ...]
    candidates: tuple[Parts, ...]
    otherwise: tuple[Parts, ...]
    refused: tuple[tuple[str, str], ...]


def load_module(path: str):
    """A backend's module. Imported when it is needed: Pallas takes a second to import."""
    return importlib.import_module(f'kernels_pallas.{path}')


def unsupported(backend: Backend, shapes: Shapes, device: Device) -> str | None:
    """Returns in one line why a backend does not support shapes on a device; None: it does."""
    if not backend.needs:
        return None
    if backend.part == 'depth':
        if device.platform not in ('cpu', 'gpu'):
            return f'platform {device.platform} must be a GPU, or a CPU, which interprets kernels'
        if backend.needs == 'hopper':
            if device.platform == 'cpu' and not load_module('mosaic.common').CAN_INTERPRET:
                return f'platform {device.platform} must be a Hopper GPU'
            if device.platform == 'gpu' and (device.capability or (0,))[0] != 9:
                found = '.'.join(map(str, device.capability or ('unknown',)))
                return f'compute capability {found} must be 9.x (Hopper)'
        if not shapes.num_slots and not backend.fused:
            return None
    elif device.capability is None:
        return f'{device.kind or device.platform} must be an NVIDIA GPU'
    return load_module(backend.forward).unsupported(shapes, device)


def _sequences(shapes, device):
    """Names of the sequence backends that support shapes, and {name: reason} of the others."""
    reasons = {name: unsupported(row, shapes, device) for name, row in SEQUENCE.items()}
    supported = [name for name, reason in reasons.items() if reason is None]
    return supported, {name: reason for name, reason in reasons.items() if reason}


def plan(shapes: Shapes, device: Device) -> Plan:
    """Returns the candidates for shapes on a GPU, and the reasons against the other backends."""
    (first, *others), refused = _sequences(shapes, device)
    depths = ['xla']
    if shapes.num_slots:
        reasons = {name: unsupported(DEPTH[name], shapes, device) for name in DEPTH}
        depths = [name for name, reason in reasons.items() if reason is None]
        refused |= {name: reason for name, reason in reasons.items() if reason}
    return Plan(
        proven=tuple(dict.fromkeys((Parts(first), Parts()))),
        candidates=tuple(dict.fromkeys((*(Parts(first, depth) for depth in depths), Parts()))),
        otherwise=tuple(Parts(name, depth) for name in others for depth in depths[1:]),
        refused=tuple(refused.items()),
    )


def not_measured(shapes: Shapes, device: Device) -> str:
    """Returns why `implementation=None` measures nothing for shapes on a device; '': it does."""
    if device.not_measured:
        return device.not_measured
    if shapes.q[0] * shapes.q[1] < MIN_QUERIES:
        return f'fewer than {MIN_QUERIES} queries'
    return f'dtypes {", ".join(shapes.dtypes)} are mixed' if len(shapes.dtypes) > 1 else ''


def _named(implementation, shapes, device):
    """(the Parts of an implementation, reasons against sequence backends that come before)."""
    if reason := unsupported(DEPTH[implementation], shapes, device):
        others = [name for name in DEPTH if unsupported(DEPTH[name], shapes, device) is None]
        raise ValueError(
            f'implementation={implementation!r} cannot: {reason}; '
            f'these can: {", ".join(["reference", *others])}'
        )
    sequence, refused = 'xla', {}
    if implementation != 'xla' and device.platform == 'gpu':
        (sequence, *_), refused = _sequences(shapes, device)
    depth = implementation if shapes.num_slots else 'xla'
    interpret = device.platform == 'cpu' and depth != 'xla'
    against = tuple(f'{name}: {reason}' for name, reason in refused.items())
    return Parts(sequence, depth, interpret), against


def choose(implementation: str | Parts | None, shapes: Shapes, device: Device | None = None):
    """Returns the Parts that compute an attention.

    `None` is XLA on a CPU, and on a GPU the fastest backends that are right. What is right and what
    is fast is measured once (autotune.py) and read from a file afterwards; where it cannot be
    measured, cuDNN and XLA are used. The choice is logged once, with the reasons against the rest.

    Args:
      implementation: one of IMPLEMENTATIONS but `reference`; or Parts; neither ever falls back.
      shapes: of the call.
      device: where it runs; None: this process's.

    Raises:
      ValueError: a backend asked for by name does not support it; names the value, and what does.
    """
    for shapes_seen in _recorders:
        shapes_seen.append(shapes)
    device = this_device() if device is None else device
    if isinstance(implementation, Parts):
        backend = SEQUENCE[implementation.sequence]
        if reason := unsupported(backend, shapes, device):
            raise ValueError(f'implementation={implementation} cannot: {backend.name}: {reason}')
        return implementation
    if implementation is not None:
        parts, against = _named(implementation, shapes, device)
        _log_once(_line(device, parts, shapes, '', against), important=bool(against))
        return parts
    if device.platform != 'gpu':
        return Parts()
    options = plan(shapes, device)
    against = tuple(f'{name}: {reason}' for name, reason in options.refused)
    why, important = not_measured(shapes, device), bool(device.not_measured)
    if len(options.candidates) == 1:
        important |= bool(against) and not why
        why = 'nothing else can compute it'
    if not why:
        found = autotune.fastest(options, shapes, device)
        why, against, important = found.not_measured, against + found.failed, True
    if why:
        parts = options.proven[0]
        _log_once(_line(device, parts, shapes, f', not measured: {why}', against), important)
        return parts
    _log_once(_line(device, found.parts, shapes, f', {found.times}', against), found.new)
    return found.parts


def this_device() -> Device:
    """Returns the first device of this process, as it can be used where this is traced."""
    platform, first = jax.default_backend(), jax.devices()[0]
    found = re.fullmatch(r'(\d+)\.(\d+)', str(getattr(first, 'compute_capability', '')))
    capability = tuple(map(int, found.groups())) if found else None
    if platform != 'gpu':
        return Device(platform, first.device_kind, capability, local=True)
    mesh, why = jax.sharding.get_abstract_mesh(), ''
    if capability is None:
        why = 'it is not an NVIDIA GPU'
    elif jax.process_count() > 1:
        why = f'{jax.process_count()} processes must run the same program'
    elif jax.device_count() > 1 and set(mesh.manual_axes) != set(mesh.axis_names or ('none',)):
        # Outside a shard_map over all axes GSPMD gathers what a kernel reads on every device.
        why = f'{jax.device_count()} devices, and no shard_map that gives each its own part'
    elif os.environ.get('MODDEPTH_MEASURE') == '0':
        why = 'MODDEPTH_MEASURE=0'
    software = ' '.join(getattr(first.client, 'platform_version', '').split())
    return Device(platform, first.device_kind, capability, software, why, local=True)


_log_lines = []
_recorders = []


def _line(device, parts, shapes, how, against):
    chosen = f'sequence by {parts.sequence}'
    if shapes.num_slots:
        chosen += f', depth by {parts.depth}'
    chosen += ', interpreted' * parts.interpret
    reasons = ''.join(f'; not {reason}' for reason in against)
    return f'depth_attention on {device.kind or device.platform}: {chosen}{how}{reasons}'


def _log_once(line, important):
    """Logs a line once in a process: as a warning if it is important."""
    if line not in _log_lines:
        _log_lines.append(line)
        (logging.warning if important else logging.info)(line)


def log_lines() -> list[str]:
    """Returns the lines of this process's choices, in their order."""
    return list(_log_lines)


@contextlib.contextmanager
def recorded():
    """Yields a list to which the Shapes of every choice in this context are appended."""
    found = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders.remove(found)
