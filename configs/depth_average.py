"""The average depth stream: each layer reads a learned weighted sum of all earlier outputs.

python -m launch.train --config=configs/depth_average.py

It starts as the residual model. Each layer adds one scalar for every earlier output.
"""

from configs import depth_dense


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = depth_dense.get_config(arguments)
    config.model.depth.stream = 'average'
    return config
