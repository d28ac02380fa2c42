"""The attention depth stream: each layer's input is attention over earlier layers' keys and values.

python -m launch.train --config=configs/depth_attention.py
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    values = sizes.parse(arguments, size='8x64', steps='600')
    config = moda.get_config('slots=none,size={size},steps={steps}'.format(**values))
    config.model.depth.stream = 'attention'
    return config
