"""MoD and MoDA together: every other block is routed, and heads see their token's depth slots.

python -m launch.train --config=configs/mod_moda.py
python -m launch.train --config=configs/mod_moda.py --config.model.depth.skipped_slots=masked

A token that skips a block still writes its slots there, at the cost of their projections
(`projected`), or writes none (`masked`). Held-out bits per byte by the causal rule, mean of 8 seeds
in study-moda: 2.432, and 2.432 with `masked`.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: those of moda."""
    config = moda.get_config(arguments)
    config.model.routing.router = 'learned'  # every:2, capacity 0.125
    return config
