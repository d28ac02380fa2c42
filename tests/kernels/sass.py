"""Counts instructions of inner loops in the machine code of the Hopper kernels, without a GPU.

    pip install nvidia-cuda-nvdisasm
    python -m tests.kernels.sass [a part of the kernels' names ...]

prints, for each loop over keys or slots, what one warpgroup issues for 64 x 128 scores of keys (64
queries and a block of 128 keys), or for 16 slots of a tile's tokens; and the cycles in which a
processor's units can do it: the tensor core, the units for exp2, and the issue of instructions.
"""

import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.mosaic import fused_backward, tiles
from kernels_pallas.mosaic.common import CHUNK, OCTET
from moddepth_jax.training.tables import Table, print_table
from tests.kernels import hopper

_INSTRUCTION = re.compile(r'\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)(.*)')
_LABEL = re.compile(r'(\.L_x_\d+):')
# Columns of the table, and the names with which their instructions begin.
COLUMNS = {
    'HGMMA': ('HGMMA',),
    'MUFU': ('MUFU',),
    'FP32': ('FFMA', 'FADD', 'FMUL', 'FMNMX'),
    'select': ('FSEL', 'SEL', 'FSETP', 'ISETP', 'PRMT'),
    'shared': ('LDS', 'STS', 'LDSM', 'STSM'),
    'global': ('LD', 'LDG', 'ST', 'STG', 'UTMALDG', 'UTMASTG'),
    'barrier': ('BAR', 'SYNCS', 'WARPGROUP', 'MEMBAR', 'FENCE'),
    'spill': ('STL', 'LDL'),
}
HEADS = ['', *COLUMNS, 'tensor cycles', 'exp2 cycles', 'issue cycles']
EXP2_CYCLES = 8  # of a warp: 4 units in each of the processor's four quarters
KEY_SCORES = 64  # exp2 of each of 128 threads in 64 x 128 scores


class Instruction(NamedTuple):
    """One instruction."""

    name: str  # with its modifiers
    guarded: bool  # by a predicate
    target: str | None  # label, of a branch
    text: str


class Loop(NamedTuple):
    """An innermost loop with a matrix product and exp2."""

    counts: collections.Counter  # of instructions by their first name, in one round
    tensor_cycles: int


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions that nvdisasm printed, and the index of each label."""
    found, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.match(line):
            target = re.search(r'\((\.L_x_\d+)\)', match[3]) if match[2] == 'BRA' else None
            guard, target = bool(match[1]), target and target[1]
            found.append(Instruction(match[2], guard, target, match[3]))
    return found, labels


def _first(name):
    return name.split('.')[0]


def _has(code, name):
    return any(instruction.name.startswith(name) for instruction in code)


def _range(code, labels, i):
    """Return the first and last instruction of the loop that ends with branch i, or None.

    A wait that is repeated stands at the end of the code, and then jumps back: that is no loop.
    """
    target = code[i].target
    if target is None or labels[target] > i:
        return None
    before = code[i - 1].target
    waited = before and labels[before] < i and not _has(code[labels[before] : i], 'HGMMA')
    return None if waited and not code[i].guarded else (labels[target], i)


def find_loops(text: str, trips: int = 1) -> list[Loop]:
    """Return the inner loops of a kernel in code order; loops inside them count `trips` times.

    Counted is the shortest way through a round: no wait is repeated, and what only incomplete
    chunks do is passed over. A way that leaves out a product does not count.
    """
    code, labels = parse(text)
    ranges = [found for i in range(len(code)) if (found := _range(code, labels, i))]
    ranges = [(a, b) for a, b in ranges if _has(code[a:b], 'HGMMA')]
    inner = [(a, b) for a, b in ranges if _has(code[a:b], 'MUFU.EX2')]
    inner = [x for x in inner if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in inner)]
    loops = []
    for begin, end in sorted(inner):
        nested = [r for r in ranges if begin <= r[0] and r[1] <= end and r != (begin, end)]
        counts, cycles = collections.Counter(), 0
        for i in _shortest(code, labels, begin, end):
            times = trips if any(a <= i <= b for a, b in nested) else 1
            counts[_first(code[i].name)] += times
            if shape := re.match(r'HGMMA\.64x(\d+)x16', code[i].name):
                cycles += times * int(shape[1]) // 2
        loops.append(Loop(counts, cycles))
    return loops


def _shortest(code, labels, begin, end):
    """Return the indices of the instructions on the shortest path through a loop."""
    best, before = {begin: 0}, {}
    for i in range(begin, end):
        instruction, following = code[i], []
        if instruction.target and i < labels[instruction.target] <= end:
            skipped = code[i + 1 : labels[instruction.target]]
            following += [] if _has(skipped, 'HGMMA') else [labels[instruction.target]]
        if not instruction.target or instruction.guarded or not following:
            following.append(i + 1)
        for j in following if i in best else ():
            if best[i] + 1 < best.get(j, len(code)):
                best[j], before[j] = best[i] + 1, i
    way = [end]
    while way[-1] != begin:
        way.append(before[way[-1]])
    return way[::-1]


def machine_code(function, *arrays) -> dict[str, str]:
    """Return the disassembly of each Mosaic kernel of a function of shapes, by kernel name."""
    os.environ.update(MOSAIC_GPU_DUMP_PTX='1')
    os.environ.setdefault('LLVM_DISABLE_SYMBOLIZATION', '1')
    with hopper.an_h200():
        lowered = jax.jit(function).lower(*hopper.on_hopper(arrays))
    with hopper.captured_output() as output:
        lowered.compile()
        output.seek(0)
        programs = output.read().split('// Generated by LLVM')[1:]
    found = {}
    for ptx in programs:
        with tempfile.TemporaryDirectory() as folder:
            path, cubin = Path(folder, 'kernel.ptx'), Path(folder, 'kernel.cubin')
            path.write_text('//' + ptx[: ptx.rindex('}') + 1])
            command = [hopper.cuda_program('ptxas'), '-arch=sm_90a', path, '-o', cubin]
            subprocess.run(command, check=True, capture_output=True)
            command = [hopper.cuda_program('nvdisasm'), '--print-code', cubin]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
        name = re.search(r'\.entry (\w+?)_mosaic_gpu_kernel', ptx)[1]
        found[name] = run.stdout
    return found


def _named(kernel, loops, slots):
    """Return (name, loop, rounds that the table counts) of a kernel's loops; slots: has slots."""
    if kernel.startswith('depth'):  # chunks of 64 slots
        return [('slots', x, 1 / 4) for x in loops]
    keys, names = loops, ['by ids', 'documents or window', 'all visible', 'causal']
    of_slots = []
    if kernel.endswith('_kv'):
        names = ['causal', 'all visible', 'documents or window']
    elif slots:  # 8 of them
        keys, of_slots = loops[:-1], [('slots', loops[-1], 2)]
    names = names[: len(keys)] if kernel.endswith('_kv') else names[len(names) - len(keys) :]
    rounds = [KEY_SCORES / (x.counts['MUFU'] // 16 * 16) for x in keys]
    return [*zip(names, keys, rounds, strict=True), *of_slots]


def count(function, arrays, slots: bool, trips: dict[str, int]) -> dict[str, list[str]]:
    """Return the table cells of each inner loop of each kernel of a function, by name."""
    lines = {}
    for kernel, text in machine_code(function, *arrays).items():
        for name, loop, rounds in _named(kernel, find_loops(text, trips.get(kernel, 1)), slots):
            total = sum(loop.counts.values())
            numbers = [sum(loop.counts[n] for n in names) for names in COLUMNS.values()]
            numbers += [loop.tensor_cycles, EXP2_CYCLES * loop.counts['MUFU'], total]
            lines[f'{kernel}: {name}'] = [f'{rounds * x:.0f}' for x in numbers]
    return lines


def main(parts):
    """Print a table for each kernel whose name contains one of the parts."""
    if not hopper.cuda_program('nvdisasm'):
        raise SystemExit('no nvdisasm: pip install nvidia-cuda-nvdisasm')
    for name, make in hopper.KERNELS.items():
        if name.startswith('pallas') or parts and not any(part in name for part in parts):
            continue
        group, width = (int(re.search(rf'_{x}(\d+)', name)[1]) for x in 'GH')
        tokens = max(tiles.ROWS >> (group - 1).bit_length(), OCTET)
        # Trips of nested loops: products of a chunk; pieces of the sums; parts of 64 columns.
        pieces = width // fused_backward.piece_columns(width, jnp.bfloat16)
        trips = {'fused_forward': tokens // OCTET, 'fused_backward_q': 2 * pieces}
        trips |= {'depth_backward': -(-width // CHUNK)}
        lines = count(*make(), name.startswith('fused'), trips)
        print_table(Table(name, HEADS, lines), 160)


if __name__ == '__main__':
    # Without a GPU the CUDA plugin is registered only if JAX does not try it as a platform.
    jax.config.update('jax_platforms', 'cpu')
    main(sys.argv[1:])
