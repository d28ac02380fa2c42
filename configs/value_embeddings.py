"""Tables of values by token in every second layer, as in nanochat, on a laptop.

python -m launch.train --config=configs/value_embeddings.py

Bits a byte held out, seeds 0, 1 and 2: 2.369, 2.289, 2.330; without tables 2.345, 2.306, 2.358, and
with wider mlps in their place (--config.model.d_ff=213) 2.314, 2.319, 2.351. A run takes a minute
on two CPU cores.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.value_embeddings = 'alternate'
    return config
