"""Depth-Attention on a laptop: values are a softmax over a layer's own and earlier values.

python -m launch.train --config=configs/value_attention.py
python -m launch.train --config=configs/value_attention.py --config.model.depth.value_stride=1

The first command reads layers 0 and 4 of eight, the second all earlier layers. Held-out bits per
byte of the first, seeds 0 to 2: 2.283, 2.362, 2.342; the dense model (configs/moda.py:slots=none):
2.345, 2.306, 2.358. The means of 12 seeds in study-streams are 2.352 and 2.353. By the step times
of docs/depth_streams.md, section 6, the second command takes about 1.4 times the dense one's 54
seconds, and the first takes less: about a minute of one CPU core.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'value_attention'
    return config
