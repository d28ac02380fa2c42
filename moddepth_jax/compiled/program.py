"""Parses the text of a compiled program: its instructions, how often each runs, its products."""

import functools
import math
import re
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r'(ENTRY )?%?([\w.\-]+) .*\{$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$')
_ARRAY = re.compile(r'\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]')
_BRANCHES = (
    r'branch_computations=\{([^}]*)\}',
    r'true_computation=([^ ,]+), false_computation=[^ ,]+',
    r'true_computation=[^ ,]+, false_computation=([^ ,]+)',
)


class Array(NamedTuple):
    """An array type, such as bf16[8,16]: bits per number, and shape."""

    bits: int
    shape: tuple[int, ...]


class Instruction(NamedTuple):
    """One line of a computation; `rest` is the text after the opening bracket of the operands."""

    name: str
    type: str
    op: str
    rest: str
    is_root: bool

    def attribute(self, pattern: str) -> str:
        """Return the group of `pattern` in operands and attributes; '' if there is no match."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ''

    def operands(self) -> list[str]:
        """Return the names of the operands."""
        return re.findall(r'%([\w.\-]+)', self.rest.split('), ')[0])

    def called(self) -> list[str]:
        """Return the names of the computations that it runs, without functions of reductions."""
        if self.op == 'conditional':
            found = ', '.join(self.attribute(pattern) for pattern in _BRANCHES)
        elif self.op in ('fusion', 'call', 'async-start'):
            found = self.attribute(r', (?:calls|to_apply)=([^ ,]+)')
        else:
            found = ''
        return [name.strip(' %') for name in found.split(',') if name.strip(' %')]


class Occurrence(NamedTuple):
    """A search result in a program, and how often it runs."""

    found: Any  # result of the search function
    times: int = 1  # a loop of unknown length counts once
    times_known: bool = True  # whether the length of every surrounding loop is known
    one_branch: bool = False  # in a conditional, of which only the most expensive branch counts


class Program:
    """A compiled program: its `computations`, each a dict of Instructions by name, in order."""

    def __init__(self, text: str):
        """Parse `compiled.as_text()`. Raises ValueError for another text."""
        self.computations, self.entry = {}, None
        self.users = functools.cache(self._users)
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                inside = self.computations[match[2]] = {}
                self.entry = match[2] if match[1] else self.entry
            elif self.computations and (match := _INSTRUCTION.match(line)):
                root, name, *parts = match.groups()
                inside[name] = Instruction(name, *parts, is_root=bool(root))
        if self.entry is None:
            raise ValueError('the text is not a compiled program: it has no ENTRY computation')

    def _users(self, computation):
        """The instructions of a computation by the names of their operands; cached as `users`."""
        found = {}
        for instruction in self.computations[computation].values():
            for operand in dict.fromkeys(instruction.operands()):
                found.setdefault(operand, []).append(instruction)
        return found

    def runs(self, search, cost) -> list[Occurrence]:
        """Search the instructions that run, and return the results with their numbers of runs.

        Args:
          search: function of (Instruction, name of its computation); None is no result.
          cost: function from a result to the cost of one run, which selects the branch of a
            conditional that counts.
        """

        def total_cost(runs):
            return sum(run.times * cost(run.found) for run in runs)

        @functools.cache
        def inside(name):
            found = []
            for instruction in self.computations[name].values():
                here = search(instruction, name)
                if here is not None:
                    found.append(Occurrence(here))
                elif instruction.op == 'while':
                    found += loop(instruction)
                elif called := [inside(name) for name in instruction.called()]:
                    costliest = max(called, key=total_cost)
                    branch = instruction.op == 'conditional'
                    found += [r._replace(one_branch=r.one_branch or branch) for r in costliest]
            return found

        def loop(instruction):
            count = instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"')
            trips, found = int(count or 1), []
            # The condition runs once more than the body.
            for part, times in (('body', trips), ('condition', trips + bool(count))):
                for run in inside(instruction.attribute(rf'{part}=%?([\w.\-]+)')):
                    known = run.times_known and bool(count)
                    found.append(run._replace(times=run.times * times, times_known=known))
            return found

        return inside(self.entry)


def arrays(text: str) -> list[Array]:
    """Return the arrays of a type, which may be a tuple; layouts are ignored."""
    return [
        Array(int(bits or 8), tuple(int(size) for size in shape.split(',') if size))
        for bits, shape in _ARRAY.findall(text)
    ]


def product_flops(program: Program) -> tuple[float, float]:
    """Return the FLOPs of all matrix products on one device, and of those in conditionals.

    Products in loops are multiplied by the loop length. Only the most expensive branch of a
    conditional counts. Matrix-vector products that the compiler turned into sums are not counted.
    """

    def flops(instruction, computation):
        if instruction.op != 'dot':
            return None
        others = program.computations[computation]
        contracted = instruction.attribute(r'lhs_contracting_dims=\{([\d,]*)\}')
        left = arrays(others[instruction.operands()[0]].type)[0]
        summed = math.prod(left.shape[int(axis)] for axis in contracted.split(',') if axis)
        return 2 * math.prod(arrays(instruction.type)[0].shape) * summed

    runs = program.runs(flops, cost=float)
    in_branches = sum(run.times * run.found for run in runs if run.one_branch)
    return float(sum(run.times * run.found for run in runs)), float(in_branches)
