"""A stack of layers as a list of runs: each run is a group of layers, repeated and scanned."""

from typing import NamedTuple

import jax


class Run(NamedTuple):
    """`group` layer kinds in a row, `repeats` times."""

    group: tuple
    repeats: int


def find_runs(kinds) -> tuple[Run, ...]:
    """Run-length encoding of a layer pattern, by groups: d r d r d -> (d r) x 2, (d) x 1.

    At each place the group that covers most layers by two repeats or more is taken, the shortest
    of equals; failing that, one layer by itself.
    """
    runs, start = [], 0
    while start < len(kinds):
        best = Run(tuple(kinds[start : start + 1]), 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            group = tuple(kinds[start : start + period])
            repeats = 1
            while tuple(kinds[start + repeats * period :][:period]) == group:
                repeats += 1
            if repeats > 1 and repeats * period > len(best.group) * best.repeats:
                best = Run(group, repeats)
        runs.append(best)
        start += len(best.group) * best.repeats
    return tuple(runs)


def scan_run(apply, stacked_params, x, loop: str):
    """x through a run: y, record = apply(params, x) once per repeat.

    Args:
      apply: (params of one repeat, x) -> (x, record).
      stacked_params: pytree with a leading axis of repeats.
      x: the stream.
      loop: scan (one body, compile time free of the repeats) | unrolled.

    Returns:
      The stream after the run, and the records stacked over repeats.
    """
    if loop == 'scan':
        return jax.lax.scan(lambda carry, params: apply(params, carry), x, stacked_params)
    records = []
    for repeat in range(jax.tree.leaves(stacked_params)[0].shape[0]):
        x, record = apply(jax.tree.map(lambda leaf, i=repeat: leaf[i], stacked_params), x)
        records.append(record)
    return x, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *records)
