"""The average depth stream: each layer reads a learned weighted sum of all earlier outputs.

python -m launch.train --config=configs/depth_average.py

It starts as the residual model. Each layer adds one scalar for every earlier output. Held-out bits
per byte, mean of 8 seeds in study-moda: 2.358; the residual model (configs/moda.py:slots=none):
2.355. A step has 1.006 times the residual model's FLOPs. The time of a run has not been measured.
"""

from configs import depth_dense


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = depth_dense.get_config(arguments)
    config.model.depth.stream = 'average'
    return config
