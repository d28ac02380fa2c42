"""Estimates the cost of a train step on a mesh by compiling it for fake devices.

Nothing is computed and no parameters are allocated: shapes are traced, lowered and compiled for
CPUs.
"""

import contextlib
import os
import re
import tempfile
import time
from typing import NamedTuple

import jax

from kernels_pallas.xla import sequence
from moddepth_jax.compiled.collectives import by_axes, collectives
from moddepth_jax.compiled.program import Occurrence, Program, product_flops
from moddepth_jax.hparams import Hparams
from moddepth_jax.model.flops import dot_general_flops
from moddepth_jax.training.mesh import (
    abstract_on_mesh,
    batch_sharding,
    device_bytes,
    replicated,
    sharding_lines,
)
from moddepth_jax.training.plan import resolve_steps
from moddepth_jax.training.summary import active_parameters, num_parameters
from moddepth_jax.training.teacher import abstract_teacher, step_flops
from moddepth_jax.training.train_step import init_state, train_step

# The program never runs, so its machine code need not be fast. Allocations and communication are
# decided before code generation.
_OPTIONS = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
    'xla_allow_excess_precision': False,  # keeps conversions to 16 bits visible
}


class Hardware(NamedTuple):
    """The vendor's numbers for one device."""

    flops: float  # dense bfloat16 FLOPs per second
    node: int  # devices joined by the fast links
    within: float  # bytes per second that a device sends within a node
    across: float  # bytes per second that a device sends to another node
    source: str  # source of these numbers


HARDWARE = {
    'H100': Hardware(
        989e12, 8, 450e9, 50e9, 'data sheets of H100 SXM (NVLink 4) and DGX H100 (400 Gbit/s a GPU)'
    )
}


def dry_run(hparams: Hparams, mesh) -> dict:
    """Compile the train step of the last stage for a mesh of CPU devices, real or fake.

    Returns the fields of --json, among them:
      parts: micro-batches of a step.
      bytes: memory of a device. `alias` are outputs that reuse the memory of arguments.
      flops: `counted` for the step; `executed`, with recomputation; `products` of one device in the
        compiled program; `in_branches`, those of them in conditionals (the most expensive branch);
        and `xla`, XLA's estimate for a device, which counts each loop once.
      split: traced products per device over `products`. It is 1 if no device repeats the work of
        another, and None with conditionals. Products in loops of unknown length (over the keys of
        rows longer than 2048) count once in both, but in full in `executed`.
      collectives: rows of `by_axes`.
      estimates: `estimate` by hardware.
      flops_per_byte: executed FLOPs over sent bytes.
    """
    state = jax.eval_shape(lambda: init_state(hparams, resolve_steps(hparams)))
    state = abstract_on_mesh(mesh, state)
    shape = (hparams.data.batch_size, hparams.data.sequence_length)
    row = jax.ShapeDtypeStruct(shape, 'int32', sharding=batch_sharding(mesh, shape[0]))
    batch = dict.fromkeys(('tokens_BT', 'labels_BT', 'segment_ids_BT'), row)
    teacher = abstract_teacher(hparams)
    teacher = teacher and abstract_on_mesh(mesh, teacher)
    # Trace without the mesh: within shard_map, products have the shapes of one device.
    step = jax.jit(train_step)
    traced = float(dot_general_flops(step.trace(state, batch, teacher=teacher).jaxpr))
    with sequence.static_blocks():
        # A new function, so that the trace above is not reused.
        step = jax.jit(lambda *args, **named: train_step(*args, **named))
        executed = float(dot_general_flops(step.trace(state, batch, teacher=teacher).jaxpr))
    compiled, warnings, trace_seconds, compile_seconds = _compile(mesh, state, batch, teacher)
    program = Program(compiled.as_text())
    found = collectives(program, mesh.shape)
    products, in_branches = product_flops(program)
    sent = sum(run.times * run.found.sent_bytes for run in found)
    executed_each = executed / mesh.size
    return {
        'jax': jax.__version__,
        'mesh': dict(mesh.shape),
        'devices': mesh.size,
        'rows': shape[0],
        'length': shape[1],
        'parts': hparams.training.accumulate_steps,
        'parameters': num_parameters(state.params),
        'active_parameters': active_parameters(hparams, state.params),
        'bytes': {
            'parameters': device_bytes(mesh, state.params),
            'optimizer': device_bytes(mesh, state.optimizer_state),
            **_memory(compiled),
        },
        'flops': {
            'counted': step_flops(hparams),
            'executed': executed,
            'products': products,
            'in_branches': in_branches,
            'xla': (compiled.cost_analysis() or {}).get('flops'),
        },
        'split': traced / mesh.size / products if products and not in_branches else None,
        'collectives': by_axes(found),
        'sent_bytes': sent,
        'flops_per_byte': executed_each / sent if sent else None,
        'estimates': {name: estimate(executed_each, found, of) for name, of in HARDWARE.items()},
        'sharding': sharding_lines(mesh, state.params),
        'warnings': warnings,
        'trace_seconds': trace_seconds,
        'compile_seconds': compile_seconds,
    }


def _compile(mesh, state, batch, teacher):
    """(compiled train step, compiler warnings, seconds to trace, seconds to compile)."""
    begin = time.perf_counter()
    with jax.set_mesh(mesh), _captured_stderr() as log:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state), replicated(mesh)
        jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
        lowered = jitted.lower(state, batch, teacher=teacher)
        traced_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=_OPTIONS)
        compile_seconds = time.perf_counter() - traced_at
        log.seek(0)
        return compiled, warnings_of(log.read()), traced_at - begin, compile_seconds


def _memory(compiled):
    memory = compiled.memory_analysis()
    names = ('argument', 'output', 'temp', 'alias')
    parts = {name: getattr(memory, f'{name}_size_in_bytes') for name in names}
    return parts | {'peak': sum(parts.values()) - 2 * parts['alias']}


def bandwidth(group: tuple[int, ...], hardware: Hardware) -> float:
    """Return the bytes per second that a device of a group sends in a ring through each node once.

    `group` has indices into the mesh, and neighbours in the mesh share nodes. If a node has g
    devices of the group, their g network links share what the ring sends out of the node.
    """
    nodes = {place // hardware.node for place in group}
    if len(nodes) == 1:
        return hardware.within
    return min(hardware.within, hardware.across * len(group) / len(nodes))


def estimate(flops: float, runs: list[Occurrence], hardware: Hardware) -> dict:
    """Estimate the seconds of a step from the vendor's numbers, which no real step reaches.

    Returns:
      `compute`: seconds for the `flops` of one device; `collectives`: seconds by mesh axes;
      `sliced`: seconds that reduce-scatters would save where an all-reduce is sliced afterwards;
      `source` of the numbers.
    """
    by_axis, sliced = {}, 0.0
    for one, times, *_ in runs:
        rate = min(bandwidth(group, hardware) for group in one.groups)  # all wait for the slowest
        axes = '+'.join(one.axes)
        by_axis[axes] = by_axis.get(axes, 0.0) + times * one.sent_bytes / rate
        sliced += times * one.sliced_bytes / 2 / rate
    return {
        'compute': flops / hardware.flops,
        'collectives': by_axis,
        'sliced': sliced,
        'source': hardware.source,
    }


@contextlib.contextmanager
def _captured_stderr():
    """Redirect stderr, to which XLA writes, to a temporary file, and yield the file."""
    with tempfile.TemporaryFile('w+') as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def warnings_of(log: str) -> list[str]:
    """Return the distinct warnings and errors in an XLA log, without time and source location.

    Alarms about slow compilation are left out, because they depend on the load of the machine.
    """
    found = re.findall(r'^[WEF]\d{4} (?!.*slow_operation_alarm).*?\] (.*)$', log, re.MULTILINE)
    return sorted(set(found))
