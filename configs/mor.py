"""Mixture-of-Recursions on a laptop: a router for each loop chooses the tokens that go on.

python -m launch.train --config=configs/mor.py
python -m launch.train --config=configs/mor.py --config.model.routing.loop_update=change \
    --config.model.routing.gate_scale=1.0 --config.model.routing.aux_loss_weight=0.01
python -m launch.train --config=configs/mor.py:choice=token

In the third command, the number of loops of each token is chosen once, before the first loop.
Held-out bits per byte, seed 0, and FLOPs relative to the first command:

    first command                                     2.505   1
    second command                                    2.406   1
    third command                                     2.510   1.34
    third command with loop_update=gated_exit         2.437   1.34
    all tokens through all loops (configs/looped.py)  2.390   1.34
    no loops                                          2.441   0.70

The first command with loop_keys=first and overflow=grow, where all loops read the keys of the first
one, reaches 2.465. A run takes a minute on two CPU cores.
"""

from configs import looped, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps, loops of all blocks but the first and last, choice.

    choice=expert: each loop chooses its tokens; choice=token: each token chooses its loops.
    """
    values = sizes.parse(arguments, size='4x64', steps='600', loops='3', choice='expert')
    choice = values.pop('choice')
    if choice not in ('expert', 'token'):
        raise ValueError(f'choice={choice!r}: must be expert or token')
    config = looped.get_config(','.join(f'{name}={value}' for name, value in values.items()))
    routing = config.model.routing
    routing.router = 'learned'
    routing.layers = 'loops'
    if choice == 'token':
        routing.router = 'token_choice'
        return config
    routing.capacity = 1 / config.model.loops  # of the last loop; the first selects all tokens
    routing.gate = 'sigmoid'
    routing.gate_scale = 0.1
    routing.causal_rule = 'aux_loss'
    # The paper's number, but of another mean. Three loops would need 0.003 (loop 2) to 0.0045.
    routing.aux_loss_weight = 0.001
    return config
