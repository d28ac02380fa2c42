"""Mixture-of-Depths-and-Experts, staged: tokens are routed to a block, then to its experts.

python -m launch.train --config=configs/mode_staged.py
python -m launch.train --config=configs/mode_staged.py:size=6x128,budget=3e13

The model has the experts of configs/moe.py, and every other block is routed: an eighth of the
tokens are selected, and the others skip both attention and experts.

Held-out bits per byte by the causal rule, at 6.4e12 FLOPs and 8 rows per step
(--config.data.batch_size=8), seeds 0 to 2: 2.150, 2.080, 2.133; the dense model 2.266, 2.229,
2.270. A run takes about three minutes on two CPU cores.
"""

from configs import moe, sizes


def get_config(arguments: str = ''):
    """Arguments: size, budget, balance, choice, as in moe."""
    sizes.parse(arguments, size='', budget='', balance='', choice='')  # no other arguments
    config = moe.get_config(arguments)
    config.model.routing.router = 'learned'  # every:2, capacity 0.125
    return config
