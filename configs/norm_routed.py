"""Routing by the norm of the residual stream: no router to train, no token skips at inference.

python -m launch.train --config=configs/norm_routed.py
python -m launch.train --config=configs/norm_routed.py:size=24x128,budget=6e13

The first command takes four minutes on two CPU cores. Use the model with every token in every
block: this gives 2.151 held-out bits per byte. The routing of training, which looks ahead, gives
2.119 (one seed). The threshold rule gives 2.124 with the same weights and selects 23% of the
tokens. The share of selected tokens falls with the logarithm of the length (256 of 2048).
"""

from configs import sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH of more than 6 layers, budget=training FLOPs."""
    config = sizes.at_budget(arguments, size='8x128', budget='1.6e13')
    config.model.routing.router = 'norm'
    config.model.routing.layers = 'middle:5:1'
    config.model.routing.capacity_form = 'log_length'
    return config
