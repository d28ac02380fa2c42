"""Hyper-connections on a laptop: four residual streams, mixed around every sublayer.

python -m launch.train --config=configs/hyper_connections.py
python -m launch.train --config=configs/hyper_connections.py \
    --config.model.depth.hyper_form=constrained

The second command trains mHC, whose mixtures keep the mean of the streams. Held-out bits per byte,
means of 12 seeds in study-streams: 2.301 and 2.308; the dense model (configs/moda.py:slots=none):
2.353. By the step times of docs/depth_streams.md, section 6, the runs take about 1.8 and 3.1 times
the dense one's 54 seconds: about a minute and a half, and three minutes, of one CPU core.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'hyper_connections'
    return config
