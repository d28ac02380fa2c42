"""Tables of values by token in every second layer, as in nanochat, on a laptop.

python -m launch.train --config=configs/value_embeddings.py
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.value_embeddings = 'alternate'
    return config
