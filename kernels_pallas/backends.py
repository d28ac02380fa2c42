"""Which backends compute an attention: those asked for by name, or the fastest that are right."""

import contextlib
import os
import re

import jax
from absl import logging

from kernels_pallas import candidates, measure
from kernels_pallas.candidates import IMPLEMENTATIONS, Device, Shapes
from kernels_pallas.joint_softmax import Parts

__all__ = ['IMPLEMENTATIONS', 'Device', 'Shapes', 'choose', 'recorded', 'this_device', 'log_lines']


def choose(implementation: str | Parts | None, shapes: Shapes, device: Device | None = None):
    """The Parts of an implementation; of None: on a GPU the fastest that are right, else XLA's.

    On a GPU, what is right and what is fast is measured once (measure.py) and read from a file
    afterwards; where it cannot be measured, cuDNN and XLA are taken. What was chosen is logged
    once, with the reasons against what was not.

    Args:
      implementation: one of IMPLEMENTATIONS but `reference`; or Parts, which never fall back.
      shapes: what is computed.
      device: where; None: this process's.

    Raises:
      ValueError: a backend asked for by name that cannot do it; names the value, and what can.
    """
    for shapes_seen in _recorders:
        shapes_seen.append(shapes)
    device = this_device() if device is None else device
    if isinstance(implementation, Parts):
        reason = None
        if implementation.sequence == 'cudnn':
            reason = candidates.sequence_unsupported(shapes, device)
        if reason:
            raise ValueError(f'implementation={implementation} cannot: cudnn: {reason}')
        return implementation
    if implementation is not None:
        parts, against = candidates.named(implementation, shapes, device)
        _log_once(_line(device, parts, shapes, '', against), important=bool(against))
        return parts
    if device.platform != 'gpu':
        return Parts()
    plan = candidates.plan(shapes, device)
    against = tuple(f'{name}: {why}' for name, why in plan.refused)
    why, important = candidates.not_measured(shapes, device), bool(device.not_measured)
    if len(plan.candidates) == 1:
        important |= bool(against) and not why
        why = 'nothing else can compute it'
    if not why:
        found = measure.fastest(plan, shapes, device)
        why, against, important = found.not_measured, against + found.failed, True
    if why:
        parts = plan.proven[0]
        _log_once(_line(device, parts, shapes, f', not measured: {why}', against), important)
        return parts
    _log_once(_line(device, found.parts, shapes, f', {found.times}', against), found.new)
    return found.parts


def this_device() -> Device:
    """The first device of this process, as it can be used where this is traced."""
    platform, first = jax.default_backend(), jax.devices()[0]
    found = re.fullmatch(r'(\d+)\.(\d+)', str(getattr(first, 'compute_capability', '')))
    capability = tuple(map(int, found.groups())) if found else None
    if platform != 'gpu':
        return Device(platform, first.device_kind, capability, here=True)
    if capability is None:
        why = 'it is not an NVIDIA GPU'
    elif jax.process_count() > 1:
        why = f'{jax.process_count()} processes must run the same program'
    elif jax.device_count() > 1 and not _apart():
        # GSPMD gathers what a kernel reads on every device; asked for by name, it may do so.
        why = f'{jax.device_count()} devices, and no shard_map that gives each its own part'
    elif os.environ.get('MODDEPTH_MEASURE') == '0':
        why = 'MODDEPTH_MEASURE=0'
    else:
        why = ''
    software = ' '.join(getattr(first.client, 'platform_version', '').split())
    return Device(platform, first.device_kind, capability, software, why, here=True)


def _apart():
    """Whether this is traced for one device by itself, inside a shard_map over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and set(mesh.manual_axes) == set(mesh.axis_names)


_log_lines = []
_recorders = []


def _line(device, parts, shapes, how, against):
    chosen = f'sequence by {parts.sequence}'
    if shapes.num_slots:
        chosen += f', depth by {parts.depth}{", forward in one kernel" * parts.fused}'
    chosen += ', interpreted' * parts.interpret
    reasons = ''.join(f'; not {reason}' for reason in against)
    return f'depth_attention on {device.kind or device.platform}: {chosen}{how}{reasons}'


def _log_once(line, important):
    """Logs a line once in a process: as a warning if it is important."""
    if line not in _log_lines:
        _log_lines.append(line)
        (logging.warning if important else logging.info)(line)


def log_lines() -> list[str]:
    """The lines of this process's choices, in their order."""
    return list(_log_lines)


@contextlib.contextmanager
def recorded():
    """Yields a list that gets the Shapes of every choice that is made in the meantime."""
    found = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders.remove(found)
