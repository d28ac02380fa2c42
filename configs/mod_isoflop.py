"""Mixture-of-Depths at a FLOP budget: every other block routed, an eighth of the tokens selected.

python -m launch.train --config=configs/mod_isoflop.py
python -m launch.train --config=configs/mod_isoflop.py:size=8x192,budget=1e14

The first command takes four minutes on two CPU cores. README.md has its output, and docs/claims.md
says what routing gains.
"""

from configs import sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, budget=training FLOPs; the steps follow from both."""
    config = sizes.at_budget(arguments, size='6x128', budget='1.6e13')
    config.model.routing.router = 'learned'  # every:2, capacity 0.125
    config.evaluation.final_batches = 10  # 40,960 targets take two or three seconds
    return config
