"""The attention depth stream: each layer's input is attention over earlier layers' keys and values.

python -m launch.train --config=configs/depth_attention.py
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'attention'
    return config
