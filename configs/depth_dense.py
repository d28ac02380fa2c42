"""The dense depth stream: each layer reads a product of all earlier outputs, side by side.

python -m launch.train --config=configs/depth_dense.py

It starts as the residual model; its cost and parameters grow with the square of the depth.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'dense'
    config.model.layer_loop = 'unrolled'  # its layers differ
    return config
