"""Value residual on a laptop: each layer mixes the first layer's values into its own.

python -m launch.train --config=configs/value_residual.py
python -m launch.train --config=configs/value_residual.py --config.model.depth.value_mix=shared

The second command trains SVFormer: later layers have no value projection, and decoding caches
values once. Held-out bits per byte of the first, mean of 12 seeds in study-streams: 2.336; the
dense model (configs/moda.py:slots=none): 2.353. By the step times of docs/depth_streams.md, section
6, a run takes at most 1.1 times the dense one's 54 seconds: about a minute of one CPU core.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'value_residual'
    return config
