"""Hyper-connections on a laptop: four residual streams, mixed around every sublayer.

python -m launch.train --config=configs/hyper_connections.py
python -m launch.train --config=configs/hyper_connections.py \
    --config.model.depth.hyper_form=constrained

The second is mHC: its mixtures keep the mean of the streams.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'hyper_connections'
    return config
