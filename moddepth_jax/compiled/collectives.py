"""Finds the collectives of a compiled program: kind, bytes, mesh axes, and number of runs.

Bytes are what one device sends in a ring; it receives as many. XLA for CPUs converts 16-bit numbers
to float32 before it communicates them, and XLA for GPUs does not. Where the program has such a
conversion, the bytes of the 16-bit numbers count.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moddepth_jax.compiled.program import Occurrence, Program, arrays

# Bytes that a device sends in a ring of n devices, relative to the bytes of its result.
_SENT = {
    'all-gather': lambda n: (n - 1) / n,
    'reduce-scatter': lambda n: n - 1,
    'all-reduce': lambda n: 2 * (n - 1) / n,
    'all-to-all': lambda n: (n - 1) / n,
    'collective-permute': lambda n: 1,
}
_NOT_COUNTED = ('ragged-all-to-all', 'collective-broadcast', 'send', 'recv')
_NOT_COUNTED += tuple(f'{kind}-start' for kind in _SENT)  # programs for CPUs do not have these
_MOVES = ('bitcast', 'copy', 'transpose', 'reshape')
_MESH_AXIS = re.compile(r"'(\w+)'(?:=|:\((\d+)\))?(\d+)?")


class Collective(NamedTuple):
    """One collective operation of a program."""

    kind: str  # such as all-reduce
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ
    groups: tuple[tuple[int, ...], ...]  # those that communicate, as indices into the mesh
    sent_bytes: float  # sent by one device per run
    sliced_bytes: float = 0.0  # part of sent_bytes: sums of which a device uses only its own slice


def collectives(program: Program, mesh_shape: Mapping[str, int]) -> list[Occurrence]:
    """Return the Collectives of a program as Occurrences; `mesh_shape` is that of its mesh.

    Raises:
      ValueError: an unknown kind of collective, or an unknown notation for its groups.
    """

    def search(instruction, computation):
        return _collective(instruction, computation, program, dict(mesh_shape))

    return program.runs(search, cost=lambda found: found.sent_bytes)


def _collective(instruction, computation, program, mesh_shape):
    """The Collective of an instruction; None for others, and if groups have one device."""
    kind = instruction.op
    if kind in _NOT_COUNTED:
        known = ', '.join(_SENT)
        raise ValueError(f'{kind} ({instruction.name}): must be one of {known}')
    groups = _groups(kind, instruction, mesh_shape) if kind in _SENT else []
    size = max((len(group) for group in groups), default=1)
    if size == 1:
        return None
    bits = [
        math.prod(array.shape) * (16 if _is_widened(operand, computation, program) else array.bits)
        for operand, array in zip(instruction.operands(), arrays(instruction.type), strict=True)
    ]
    sliced = _sliced(instruction, computation, program) if kind == 'all-reduce' else []
    # For each mesh axis, the coordinates of the devices of each group.
    places = zip(*(np.unravel_index(g, tuple(mesh_shape.values())) for g in groups), strict=True)
    differ = [any(np.ptp(place) for place in of_axis) for of_axis in places]
    return Collective(
        kind=kind,
        axes=tuple(itertools.compress(mesh_shape, differ)),
        groups=tuple(map(tuple, groups)),
        sent_bytes=math.ceil(sum(bits) / 8) * _SENT[kind](size),
        sliced_bytes=sum(itertools.compress(bits, sliced)) / 8 * _SENT[kind](size),
    )


def _groups(kind, instruction, mesh_shape):
    """The groups of devices that communicate, as lists of indices into the mesh."""
    if kind == 'collective-permute':
        pairs = instruction.attribute(r'source_target_pairs=\{(.*?)\}\}')
        pairs = [(int(a), int(b)) for a, b in re.findall(r'(\d+),(\d+)', pairs)]
        return [pair for pair in pairs if pair[0] != pair[1]]
    text = instruction.attribute(r'replica_groups=(.*?)(?:, [a-z_]+=(?!\()|$)')
    if text == '{}':
        return [list(range(math.prod(mesh_shape.values())))]
    if text.startswith('{{'):
        return [list(map(int, group.split(','))) for group in re.findall(r'\{([\d,]+)\}', text)]
    if match := re.fullmatch(r'\[([\d,]+)\]<=(.*)', text):
        return _counted(match[2]).reshape(_numbers(match[1])).tolist()
    if match := re.fullmatch(r'mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}', text):
        return _along_axes(*match.groups())
    raise ValueError(
        f'replica_groups={text}: must be {{{{0,1}},..}}, [2,4]<=[8] or mesh[..] {{..}}'
    )


def _numbers(text):
    return [int(number) for number in text.split(',')]


def _counted(text):
    """Parse `[4,2]T(1,0)`: 0, 1, 2, ... in this shape, transposed to this order of axes."""
    shape, order = re.fullmatch(r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text).groups()
    places = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return places.transpose(_numbers(order) if order else None)


def _along_axes(mesh, device_ids, axes):
    """Group along `axes` of a mesh; `'fsdp':(2)4` means 4 parts of each of the first 2 of fsdp."""
    sizes = {name: int(size) for name, _, size in _MESH_AXIS.findall(mesh)}
    spans = {name: [] for name in sizes}
    for name, before, size in _MESH_AXIS.findall(axes):
        begin = int(before or 1)
        spans[name].append((begin, begin * int(size or sizes[name])))
    shape, inside = [], []
    for name, size in sizes.items():
        cuts = {1, size}.union(*spans[name])
        for begin, end in itertools.pairwise(sorted(cuts)):
            shape.append(end // begin)
            inside.append(any(first <= begin and end <= last for first, last in spans[name]))
    ids = _counted(device_ids) if device_ids else np.arange(math.prod(shape))
    order = sorted(range(len(shape)), key=lambda place: inside[place])
    size = math.prod(n for n, mine in zip(shape, inside, strict=True) if mine)
    return ids.reshape(shape).transpose(order).reshape(-1, size).tolist()


def _is_widened(operand, computation, program):
    """Whether a 16-bit array was converted to a wider type only to be communicated."""
    others = program.computations[computation]
    seen = others[operand]
    while True:
        if seen.op == 'fusion':
            others = program.computations[seen.called()[0]]
            seen = next(inner for inner in others.values() if inner.is_root)
        elif seen.op == 'convert':
            return others[seen.operands()[0]].type.startswith(('bf16[', 'f16['))
        elif seen.op in _MOVES:
            seen = others[seen.operands()[0]]
        else:
            return False


def _sliced(instruction, computation, program):
    """For each array of the result, whether it is only read by device-dependent slices."""

    def only_sliced(name, computation, fusion=None):
        """If `computation` is the body of a fusion, `fusion` is (its name, its computation)."""
        uses = program.users(computation).get(name, ())
        uses = [slices(name, use, computation, fusion) for use in uses]
        if fusion and program.computations[computation][name].is_root:
            uses.append(only_sliced(*fusion))
        return bool(uses) and all(uses)

    def slices(name, use, computation, fusion):
        if use.op == 'dynamic-slice':
            return use.operands()[0] == name
        if use.op in (*_MOVES, 'convert'):
            return only_sliced(use.name, computation, fusion)
        if use.op != 'fusion':
            return False
        inner = use.called()[0]
        places = [place for place, operand in enumerate(use.operands()) if operand == name]
        return all(
            only_sliced(other.name, inner, (use.name, computation))
            for other in program.computations[inner].values()
            if other.op == 'parameter' and int(other.attribute(r'^(\d+)')) in places
        )

    if not instruction.type.startswith('('):
        return [only_sliced(instruction.name, computation)]
    parts = [[] for _ in arrays(instruction.type)]
    for use in program.users(computation).get(instruction.name, []):
        if use.op == 'get-tuple-element':
            parts[int(use.attribute(r', index=(\d+)'))].append(use.name)
    return [bool(names) and all(only_sliced(n, computation) for n in names) for names in parts]


def by_axes(runs: list[Occurrence]) -> list[dict]:
    """Sum the collectives by mesh axes (such as data+fsdp) and kind, most bytes first.

    Fields of each row, besides `axes` and `kind`:
      places: instructions in the program.
      count: runs.
      bytes: what a device sends in all runs.
      sliced_bytes: part of `bytes` in all-reduces that a GPU may run as reduce-scatters, with half
        of the bytes.
      unknown_loops: places in loops of unknown length, which count once.
      branches: places in conditionals.
    """
    rows = {}
    names = ('places', 'count', 'bytes', 'sliced_bytes', 'unknown_loops', 'branches')
    for run in runs:
        key = '+'.join(run.found.axes), run.found.kind
        row = rows.setdefault(key, dict.fromkeys(names, 0))
        row['places'] += 1
        row['count'] += run.times
        row['bytes'] += run.times * run.found.sent_bytes
        row['sliced_bytes'] += run.times * run.found.sliced_bytes
        row['unknown_loops'] += not run.times_known
        row['branches'] += run.one_branch
    found = [{'axes': axes, 'kind': kind} | row for (axes, kind), row in rows.items()]
    return sorted(found, key=lambda row: (-row['bytes'], row['axes'], row['kind']))
