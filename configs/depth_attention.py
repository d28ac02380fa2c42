"""The attention depth stream: a layer's input is attention over the slots of earlier layers.

python -m launch.train --config=configs/depth_attention.py
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'attention'
    return config
