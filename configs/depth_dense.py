"""The dense depth stream: each layer reads all earlier outputs through one matrix.

python -m launch.train --config=configs/depth_dense.py

It starts as the residual model. Its cost and parameters grow with the square of the depth. Held-out
bits per byte, mean of 8 seeds in study-moda: 2.511; the residual model
(configs/moda.py:slots=none): 2.355. A step has 1.39 times the residual model's FLOPs. The time of a
run has not been measured.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'dense'
    config.model.layer_loop = 'unrolled'  # its layers differ
    return config
