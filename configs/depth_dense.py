"""The dense depth stream: each layer reads all earlier outputs through one matrix.

python -m launch.train --config=configs/depth_dense.py

It starts as the residual model. Its cost and parameters grow with the square of the depth.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'dense'
    config.model.layer_loop = 'unrolled'  # its layers differ
    return config
