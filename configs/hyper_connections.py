"""Hyper-connections on a laptop: four residual streams, mixed around every sublayer.

python -m launch.train --config=configs/hyper_connections.py
python -m launch.train --config=configs/hyper_connections.py \
    --config.model.depth.hyper_form=constrained

The second is mHC: its mixtures keep the mean of the streams. Bits a byte held out, mean of 12 seeds
in study-streams: 2.301 and 2.308, and 2.353 of the dense model (configs/moda.py:slots=none). By the
step times of docs/depth_streams.md, section 6, a run takes about 1.8 and 3.1 times the dense one's
54 seconds: about a minute and a half, and three minutes, of one CPU core.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'hyper_connections'
    return config
