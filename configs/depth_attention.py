"""The attention depth stream: each layer's input is attention over earlier layers' keys and values.

python -m launch.train --config=configs/depth_attention.py
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: those of moda but slots."""
    config = moda.get_config(','.join(filter(None, (arguments, 'slots=none'))))
    config.model.depth.stream = 'attention'
    return config
