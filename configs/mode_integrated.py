"""Mixture-of-Depths-and-Experts, integrated: half of the experts are no-op experts.

python -m launch.train --config=configs/mode_integrated.py
python -m launch.train --config=configs/mode_integrated.py:size=6x128,budget=3e13

The model has the experts of configs/moe.py and as many no-op experts, which add nothing and cost
nothing. The balance loss drives them to half of the choices, and FLOPs are counted at that share.

Held-out bits per byte at 6.4e12 FLOPs and 8 rows per step (--config.data.batch_size=8), seeds 0 to
2: 2.167, 2.093, 2.163; with balance=0.01 2.164, 2.120, 2.150; the dense model 2.266, 2.229, 2.270.
A run takes about three minutes on two CPU cores.
"""

from configs import moe, sizes


def get_config(arguments: str = ''):
    """Arguments: size, budget, balance, as in moe."""
    sizes.parse(arguments, size='', budget='', balance='')  # no other arguments
    config = moe.get_config(arguments)
    apply_noop(config)
    return config


def apply_noop(config):
    """Add as many no-op experts as `config.model` has routed ones."""
    config.model.experts.num_noop = config.model.experts.num_routed
