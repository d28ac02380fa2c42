"""Mixture-of-Recursions on a laptop: a router for each loop chooses the tokens that go on.

python -m launch.train --config=configs/mor.py
python -m launch.train --config=configs/mor.py --config.model.routing.loop_update=change \
    --config.model.routing.gate_scale=1.0 --config.model.routing.aux_loss_weight=0.01

Bits a byte held out, seed 0: 2.505, and 2.406 for the second command; all tokens through all loops
(configs/looped.py) 2.390 for 1.34 times the FLOPs, no loops 2.441 for 0.70 times. A run takes a
minute on two CPU cores.
"""

from configs import looped, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training, loops of all blocks but first and last."""
    values = sizes.parse(arguments, size='4x64', steps='600', loops='3')
    of_looped = ','.join(f'{name}={value}' for name, value in values.items())
    config = looped.get_config(of_looped)
    routing = config.model.routing
    routing.router = 'learned'
    routing.layers = 'loops'
    routing.capacity = 1 / config.model.loops  # at the last loop; from 1 at the first
    routing.gate = 'sigmoid'
    routing.gate_scale = 0.1
    routing.causal_rule = 'aux_loss'
    routing.aux_loss_weight = 0.001
    return config
