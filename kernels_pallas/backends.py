"""The table of attention backends, and the choice among them."""

import contextlib
import importlib
import os
import pathlib
import re
from typing import NamedTuple

import jax
from absl import logging

from kernels_pallas import autotune


class Backend(NamedTuple):
    """One way to compute a part of the attention: a row of BACKENDS."""

    part: str  # sequence | depth | decoding
    name: str  # as in Parts; for a depth part also a value of `implementation`
    # Module under kernels_pallas with {part}_forward (fused: fused_forward; decoding:
    # decode_forward) and, unless `needs` is empty, `unsupported(shapes, device)`.
    forward: str
    backward: str = ''  # module with {part}_backward
    needs: str = ''  # '' | gpu | hopper; depth kernels also run interpreted on a CPU
    fused: bool = False  # the forward pass computes both parts in one kernel
    # Module with `fused_backward`, which computes both parts in one backward pass if the sequence
    # part is that of mosaic_gpu. '': each part has its own.
    fused_backward: str = ''
    takes_dlse: bool = True  # a sequence part's backward pass takes a cotangent of the logsumexp


# Of each part in the order in which they are tried and measured. XLA's support every call.
BACKENDS = (
    Backend('sequence', 'cudnn', 'cudnn', 'cudnn', 'gpu', takes_dlse=False),
    Backend('sequence', 'mosaic_gpu', 'mosaic.sequence', 'mosaic.sequence', 'hopper'),
    Backend('sequence', 'xla', 'xla.sequence', 'xla.sequence'),
    Backend('depth', 'xla', 'xla.depth', 'xla.depth'),
    Backend('depth', 'mosaic_gpu', 'mosaic.depth', 'mosaic.depth', 'hopper'),
    Backend(
        *('depth', 'mosaic_gpu_fused', 'mosaic.fused', 'mosaic.depth', 'hopper'),
        fused=True,
        fused_backward='mosaic.fused_backward',
    ),
    Backend('depth', 'pallas', 'triton.depth', 'triton.depth', 'gpu'),
    Backend('decoding', 'xla', 'decode'),
    Backend('decoding', 'mosaic_gpu', 'mosaic.decode', needs='hopper'),
)
SEQUENCE, DEPTH, DECODING = (
    {row.name: row for row in BACKENDS if row.part == part}
    for part in ('sequence', 'depth', 'decoding')
)
IMPLEMENTATIONS = ('reference', *DEPTH)
# With fewer queries, or places of caches, nothing is measured: initialization (at most 2048) and
# short prompts would not regain the seconds that a measurement takes.
MIN_QUERIES = 4096
WITHOUT = 'MODDEPTH_WITHOUT'
DRIVER_FILE = pathlib.Path('/sys/module/nvidia/version')


class Parts(NamedTuple):
    """The backends that compute an attention, by their names in BACKENDS."""

    sequence: str = 'xla'  # for decoding: the backend of the whole attention
    depth: str = 'xla'
    interpret: bool = False  # run kernels in their interpreter

    def label(self, shapes) -> str:
        """Return a name such as cudnn+mosaic_gpu; without slots only the sequence's backend."""
        two = shapes.num_slots and not shapes.places
        return f'{self.sequence}+{self.depth}' if two else self.sequence


class Shapes(NamedTuple):
    """The properties of a call on which the choice of backends depends."""

    q: tuple[int, ...]  # [B, T, N, H]
    k: tuple[int, ...]  # [B, S, K, H]; for decoding: the new tokens' keys
    num_slots: int  # L, 0 without slots
    dtypes: tuple[str, ...]  # distinct dtypes of q, k, v, the slots and their queries, by name
    ordered: bool  # key i belongs to query i, and positions ascend
    consecutive: bool  # position = index, so a window is a window of indices
    segments: bool  # there are segment ids
    window: int  # number of visible keys; 0: no limit
    scale: float = 1.0  # factor on the scores
    slot_window: int = 0  # number of visible slots, the newest; 0: all
    slot_rows: int = 0  # R, number of tokens that have slots, if slot_rows_BT is given; 0: R = T
    slot_mask: bool = False  # there is a mask of the slots
    slot_queries: bool = False  # other queries for the slots
    sums: str = ''  # dtype of the sums to which the slots' gradients are added; '': fresh gradients
    lse: bool = False  # the logsumexp is returned
    places: int = 0  # decoding: length of a cache row, S; 0: no cache


class Device(NamedTuple):
    """A device on which an attention runs."""

    platform: str  # cpu | gpu | tpu, as JAX calls it
    kind: str = ''  # its name, such as NVIDIA H200
    capability: tuple[int, int] | None = None  # CUDA's (major, minor); None: not an NVIDIA GPU
    software: str = ''  # driver and runtime versions; part of a measurement's key
    not_measured: str = 'the device is only described'  # why nothing can be measured; '': it can
    local: bool = False  # a device of this process, whose libraries can be inspected


def load_module(path: str):
    """Import a module of a backend. Lazily, because Pallas takes a second to import."""
    return importlib.import_module(f'kernels_pallas.{path}')


def unsupported(backend: Backend, shapes: Shapes, device: Device) -> str | None:
    """Return why a backend does not support shapes on a device, in one line; None: it does."""
    if not backend.needs:
        return None
    if backend.part == 'depth' or backend.needs == 'hopper':
        if device.platform not in ('cpu', 'gpu'):
            return f'platform {device.platform} must be a GPU, or a CPU, which interprets kernels'
        if backend.needs == 'hopper':
            if device.platform == 'cpu' and not load_module('mosaic.common').CAN_INTERPRET:
                return f'platform {device.platform} must be a Hopper GPU'
            if device.platform == 'gpu' and (device.capability or (0,))[0] != 9:
                found = '.'.join(map(str, device.capability or ('unknown',)))
                return f'compute capability {found} must be 9.x (Hopper)'
        if backend.part == 'depth' and not shapes.num_slots:
            return None
    elif device.capability is None:
        return f'{device.kind or device.platform} must be an NVIDIA GPU'
    return load_module(backend.forward).unsupported(shapes, device)


def _supported(rows, shapes, device):
    """Return the names of the backends that support shapes, and {name: reason} of the others."""
    reasons = {name: unsupported(row, shapes, device) for name, row in rows.items()}
    supported = [name for name, reason in reasons.items() if reason is None]
    return supported, {name: reason for name, reason in reasons.items() if reason}


def plan(shapes: Shapes, device: Device) -> tuple[list[Parts], dict[str, str]]:
    """Return the candidates on a GPU, the default first, and {name: reason} of the others.

    Backends that `MODDEPTH_WITHOUT` in the environment names, separated by commas, are not tried;
    XLA always is.
    """
    excluded = {*os.environ.get(WITHOUT, '').split(',')} - {'xla'}

    def supported(rows):
        names, refused = _supported(rows, shapes, device)
        refused |= {name: f'excluded by {WITHOUT}' for name in names if name in excluded}
        return [name for name in names if name not in refused], refused

    if shapes.places:
        names, refused = supported(DECODING)
        return [Parts(name) for name in names], refused
    sequences, refused = supported(SEQUENCE)
    # The default is not one of our Hopper kernels for the sequence: they are not proven.
    first, *_ = (name for name in sequences if SEQUENCE[name].needs != 'hopper')
    ours = [name for name in sequences if SEQUENCE[name].needs == 'hopper']
    depths = ['xla']
    if shapes.num_slots:
        depths, reasons = supported(DEPTH)
        refused |= reasons
    found = [Parts(first, depth) for depth in depths]
    # Ours has a backward pass for the fused kernel. With other depth parts it is not tried.
    found += [
        Parts(name, depth)
        for name in ours
        for depth in depths
        if DEPTH[depth].fused or not shapes.num_slots
    ]
    return list(dict.fromkeys((*found, Parts()))), refused


def not_measured(shapes: Shapes, device: Device) -> str:
    """Return why `implementation=None` measures nothing here; '': it measures."""
    if device.not_measured:
        return device.not_measured
    if shapes.q[0] * max(shapes.q[1], shapes.places) < MIN_QUERIES:
        return f'fewer than {MIN_QUERIES} {"places" if shapes.places else "queries"}'
    return f'dtypes {", ".join(shapes.dtypes)} are mixed' if len(shapes.dtypes) > 1 else ''


def choose(implementation: str | Parts | None, shapes: Shapes, device: Device | None = None):
    """Return the Parts that compute an attention on a device (None: that of this process).

    `implementation=None` chooses XLA on a CPU. On a GPU it chooses the fastest backends that pass a
    check (autotune.py), or cuDNN and XLA if nothing can be measured. The choice is logged once,
    with the reasons against the others. A name of IMPLEMENTATIONS, or Parts, never falls back.

    Raises:
      ValueError: the named implementation does not support the shapes on the device.
    """
    for shapes_seen in _recorders:
        shapes_seen.append(shapes)
    device = this_device() if device is None else device
    if isinstance(implementation, Parts):
        # Interpreters also compute in float32.
        dtypes = ('bfloat16',) if implementation.interpret else shapes.dtypes
        rows = [SEQUENCE[implementation.sequence]]
        rows += [DEPTH[implementation.depth]] * bool(shapes.num_slots)
        for row in rows:
            if reason := unsupported(row, shapes._replace(dtypes=dtypes), device):
                raise ValueError(f'{implementation} is not supported here: {row.name}: {reason}')
        return implementation
    if implementation is not None:
        names, reasons = _supported(DECODING if shapes.places else DEPTH, shapes, device)
        if reason := reasons.get(implementation):
            others = names if shapes.places else ['reference', *names]
            raise ValueError(
                f'implementation={implementation!r} is not supported here: {reason}; '
                f'supported: {", ".join(others)}'
            )
        if shapes.places:
            interpret = device.platform == 'cpu' and implementation != 'xla'
            return Parts(implementation, interpret=interpret)
        sequence, refused = 'xla', {}
        if shapes.num_slots and DEPTH[implementation].fused_backward:
            sequence = 'mosaic_gpu'
        elif implementation != 'xla' and device.platform == 'gpu':
            hopper = DEPTH[implementation].needs == 'hopper'
            rows = {name: row for name, row in SEQUENCE.items() if hopper or row.needs != 'hopper'}
            (sequence, *_), refused = _supported(rows, shapes, device)
        depth = implementation if shapes.num_slots else 'xla'
        parts = Parts(sequence, depth, device.platform == 'cpu' and depth != 'xla')
        _log_once(device, parts, shapes, '', refused, warn=bool(refused))
        return parts
    if device.platform != 'gpu':
        return Parts()
    candidates, refused = plan(shapes, device)
    parts, why, warn = candidates[0], not_measured(shapes, device), bool(device.not_measured)
    if len(candidates) == 1:
        warn |= bool(refused) and not why and not shapes.places
        why = 'nothing else can compute it'
    if why:
        how = f'not measured: {why}'
    else:
        parts, how, failed, warn = autotune.fastest(candidates, shapes, device)
        refused |= failed
    _log_once(device, parts, shapes, f', {how}', refused, warn)
    return parts


def this_device() -> Device:
    """Return the first device of this process, and whether it can be measured from this trace."""
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
        # Outside a shard_map over all axes, GSPMD gathers a kernel's operands on every device.
        why = f'{jax.device_count()} devices, and no shard_map that gives each its own part'
    elif os.environ.get('MODDEPTH_MEASURE') == '0':
        why = 'MODDEPTH_MEASURE=0'
    return Device(platform, first.device_kind, capability, software_of(first), why, local=True)


def software_of(device) -> str:
    """Return the versions of CUDA, with which JAX's plugin was built, and of NVIDIA's driver."""
    found = getattr(device.client, 'platform_version', '').split()
    with contextlib.suppress(OSError):
        found += ['driver', *DRIVER_FILE.read_text(encoding='utf-8').split()]
    return ' '.join(found)


_log_lines, _recorders = [], []


def _log_once(device, parts, shapes, how, refused, warn):
    """Log a choice once in a process; refused: {name: reason} of the other backends."""
    depth = f', depth by {parts.depth}' if shapes.num_slots else ''
    chosen = f'sequence by {parts.sequence}{depth}' + ', interpreted' * parts.interpret
    if shapes.places:
        chosen = f'decoding by {parts.sequence}'
    reasons = ''.join(f'; not {name}: {reason}' for name, reason in refused.items())
    line = f'depth_attention on {device.kind or device.platform}: {chosen}{how}{reasons}'
    if line not in _log_lines:
        _log_lines.append(line)
        (logging.warning if warn else logging.info)(line)


def log_lines() -> list[str]:
    """Return the log lines of this process's choices, oldest first."""
    return list(_log_lines)


@contextlib.contextmanager
def recorded():
    """Yield a list that receives the Shapes of every choice in this context."""
    _recorders.append([])
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()
