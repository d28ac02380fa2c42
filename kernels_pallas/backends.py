"""What computes an attention: one table of backends, and the choice among them."""

import contextlib
import importlib
import os
import re
from typing import NamedTuple

import jax
from absl import logging

from kernels_pallas import autotune


class Backend(NamedTuple):
    """One way to compute a part of the softmax: a row of BACKENDS."""

    part: str  # sequence | depth | decoding
    name: str  # as in Parts; for a depth part also the value of `implementation`
    # Modules under kernels_pallas with {part}_forward, fused_forward or, of decoding,
    # decode_forward, and with {part}_backward.
    # Unless `needs` is empty the first also has `unsupported(shapes, device)`.
    forward: str
    backward: str = ''
    needs: str = ''  # '' | gpu | hopper; kernels of the depth part also run interpreted on a CPU
    fused: bool = False  # the forward pass computes both parts in one kernel
    # Module with `supports` and `fused_backward`, which computes both parts in one backward pass
    # where the sequence part is mosaic_gpu's. '': each part has its own.
    joined: str = ''
    takes_dlse: bool = True  # a sequence part's backward pass takes a cotangent of the logsumexp


# A part's backends in the order in which they are tried and measured. XLA's compute everything.
BACKENDS = (
    Backend('sequence', 'cudnn', 'cudnn', 'cudnn', 'gpu', takes_dlse=False),
    Backend('sequence', 'mosaic_gpu', 'mosaic.sequence', 'mosaic.sequence', 'hopper'),
    Backend('sequence', 'xla', 'xla.sequence', 'xla.sequence'),
    Backend('depth', 'xla', 'xla.depth', 'xla.depth'),
    Backend('depth', 'mosaic_gpu', 'mosaic.depth', 'mosaic.depth', 'hopper'),
    Backend(
        *('depth', 'mosaic_gpu_fused', 'mosaic.fused', 'mosaic.depth', 'hopper'),
        fused=True,
        joined='mosaic.fused_backward',
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
# Below this many queries, or places of caches, nothing is measured: initialization, with at most
# 2048, and short prompts would not regain the seconds that a measurement takes.
MIN_QUERIES = 4096


class Parts(NamedTuple):
    """The backends that compute an attention, by their names in BACKENDS."""

    sequence: str = 'xla'  # over a cache: what computes the decoding, the slots too
    depth: str = 'xla'
    interpret: bool = False  # kernels run in their interpreter, for machines that cannot run them

    def label(self, shapes) -> str:
        """Name such as cudnn+mosaic_gpu; without slots that of the sequence's backend alone."""
        two = shapes.num_slots and not shapes.places
        return f'{self.sequence}+{self.depth}' if two else self.sequence


class Shapes(NamedTuple):
    """The call of an attention, as far as a choice depends on it."""

    q: tuple[int, ...]  # [B, T, N, H]
    k: tuple[int, ...]  # [B, S, K, H]; over a cache: the new tokens' keys
    num_slots: int  # L, 0 without slots
    dtypes: tuple[str, ...]  # names of those of q, k, v, the slots and their queries, each once
    ordered: bool  # key i belongs to query i and positions ascend
    consecutive: bool  # positions are those of the index, so that a window is one of indices
    segments: bool  # there are segment ids
    window: int  # number of visible keys; 0: no limit
    scale: float = 1.0  # factor on the scores
    slot_window: int = 0  # number of visible slots, the newest; 0: all
    slot_rows: int = 0  # R, tokens that have slots, where slot_rows_BT is given; 0: R = T
    slot_mask: bool = False  # there is a mask of the slots
    slot_queries: bool = False  # the slots have queries of their own
    sums: str = ''  # dtype of the sums that the slots' gradients are added to; '': none, fresh
    lse: bool = False  # the logsumexp is returned too
    places: int = 0  # of a row of the cache that new tokens are decoded over; 0: no cache


class Device(NamedTuple):
    """A device on which an attention runs."""

    platform: str  # cpu | gpu | tpu, as JAX calls it
    kind: str = ''  # its name, such as NVIDIA H200
    capability: tuple[int, int] | None = None  # CUDA's (major, minor); None: not an NVIDIA GPU
    software: str = ''  # versions of the driver's side; a measurement holds for these
    not_measured: str = 'the device is only described'  # why nothing can be measured; '': it can
    local: bool = False  # it is a device of this process, so that its libraries can be inspected


def load_module(path: str):
    """A backend's module. Imported when it is needed: Pallas takes a second to import."""
    return importlib.import_module(f'kernels_pallas.{path}')


def unsupported(backend: Backend, shapes: Shapes, device: Device) -> str | None:
    """Returns in one line why a backend does not support shapes on a device; None: it does."""
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
    """Names of the backends that support shapes, and {name: reason} of the others."""
    reasons = {name: unsupported(row, shapes, device) for name, row in rows.items()}
    supported = [name for name, reason in reasons.items() if reason is None]
    return supported, {name: reason for name, reason in reasons.items() if reason}


def joined_backward(depth: str, group: int, width: int, own_query: bool):
    """Module whose backward pass computes sequence and slots, by name of a depth part; or None."""
    module = DEPTH[depth].joined and load_module(DEPTH[depth].joined)
    return module if module and module.supports(group, width, own_query) else None


def plan(shapes: Shapes, device: Device) -> tuple[list[Parts], dict[str, str]]:
    """The candidates on a GPU, the one to use unmeasured first; {name: reason} against others."""
    if shapes.places:
        names, refused = _supported(DECODING, shapes, device)
        return [Parts(name) for name in names], refused
    sequences, refused = _supported(SEQUENCE, shapes, device)
    # Of the sequence's parts a kernel of ours is not proven.
    first, *_ = (name for name in sequences if SEQUENCE[name].needs != 'hopper')
    ours = [name for name in sequences if SEQUENCE[name].needs == 'hopper']
    depths = ['xla']
    if shapes.num_slots:
        depths, reasons = _supported(DEPTH, shapes, device)
        refused |= reasons
    found = [Parts(first, depth) for depth in depths]
    # It differentiates what the fused kernel computes; with other depth parts it is not tried.
    found += [
        Parts(name, depth)
        for name in ours
        for depth in depths
        if DEPTH[depth].fused or not shapes.num_slots
    ]
    return list(dict.fromkeys((*found, Parts()))), refused


def not_measured(shapes: Shapes, device: Device) -> str:
    """Returns why `implementation=None` measures nothing for shapes on a device; '': it does."""
    if device.not_measured:
        return device.not_measured
    if shapes.q[0] * max(shapes.q[1], shapes.places) < MIN_QUERIES:
        return f'fewer than {MIN_QUERIES} {"places" if shapes.places else "queries"}'
    return f'dtypes {", ".join(shapes.dtypes)} are mixed' if len(shapes.dtypes) > 1 else ''


def choose(implementation: str | Parts | None, shapes: Shapes, device: Device | None = None):
    """Returns the Parts that compute an attention on a device (None: that of this process).

    `None` is XLA on a CPU, and on a GPU the fastest backends that are right (autotune.py), or,
    where nothing can be measured, cuDNN and XLA. The choice is logged once, with the reasons
    against the rest. A name of IMPLEMENTATIONS, or Parts, never falls back: ValueError.
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
        names, reasons = _supported(DECODING if shapes.places else DEPTH, shapes, device)
        if reason := reasons.get(implementation):
            others = names if shapes.places else ['reference', *names]
            raise ValueError(
                f'implementation={implementation!r} cannot: {reason}; '
                f'these can: {", ".join(others)}'
            )
        if shapes.places:
            interpret = device.platform == 'cpu' and implementation != 'xla'
            return Parts(implementation, interpret=interpret)
        sequence, refused = 'xla', {}
        group, width = shapes.q[2] // shapes.k[2], shapes.q[3]
        if shapes.num_slots and joined_backward(implementation, group, width, shapes.slot_queries):
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


_log_lines, _recorders = [], []


def _log_once(device, parts, shapes, how, refused, warn):
    """Logs a choice, once in a process, with the {name: reason} of what is refused."""
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
    """Returns the lines of this process's choices, in their order."""
    return list(_log_lines)


@contextlib.contextmanager
def recorded():
    """Yields a list to which the Shapes of every choice in this context are appended."""
    _recorders.append([])
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()
