"""Mixture-of-Recursions on a laptop: a router for each loop chooses the tokens that go on.

python -m launch.train --config=configs/mor.py
python -m launch.train --config=configs/mor.py --config.model.routing.loop_update=change \
    --config.model.routing.gate_scale=1.0 --config.model.routing.aux_loss_weight=0.01
python -m launch.train --config=configs/mor.py:choice=token

In the third each token's loops are chosen at once, before the first. Bits a byte held out, seed 0:
2.505, and 2.406 for the second command; all tokens through all loops (configs/looped.py) 2.390 for
1.34 times the FLOPs, no loops 2.441 for 0.70 times. The third takes 1.34 times the FLOPs too:
2.510, and 2.437 with loop_update=gated_exit. The first with loop_keys=first and overflow=grow,
where all loops read the first one's keys: 2.465. A run takes a minute on two CPU cores.
"""

from configs import looped, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps, loops of all blocks but first and last, choice.

    choice=expert: each loop chooses tokens; token: each token chooses its loops.
    """
    values = sizes.parse(arguments, size='4x64', steps='600', loops='3', choice='expert')
    choice = values.pop('choice')
    if choice not in ('expert', 'token'):
        raise ValueError(f'choice={choice!r}: must be expert or token')
    of_looped = ','.join(f'{name}={value}' for name, value in values.items())
    config = looped.get_config(of_looped)
    routing = config.model.routing
    routing.router = 'learned'
    routing.layers = 'loops'
    if choice == 'token':
        routing.router = 'token_choice'
        return config
    routing.capacity = 1 / config.model.loops  # at the last loop; from 1 at the first
    routing.gate = 'sigmoid'
    routing.gate_scale = 0.1
    routing.causal_rule = 'aux_loss'
    routing.aux_loss_weight = 0.001
    return config
