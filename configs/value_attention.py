"""Depth-Attention on a laptop: values are a softmax over those of earlier layers and their own.

python -m launch.train --config=configs/value_attention.py
python -m launch.train --config=configs/value_attention.py --config.model.depth.value_stride=1

The first reads layers 0 and 4 of eight, the second all earlier layers. Bits a byte held out by the
first, seeds 0 to 2: 2.283, 2.362, 2.342; by the dense model (configs/moda.py:slots=none) 2.345,
2.306, 2.358; mean of 12 seeds in study-streams 2.352 and 2.353. By the step times of
docs/depth_streams.md, section 6, a run of the second takes about 1.4 times the dense one's 54
seconds, and of the first less: about a minute of one CPU core.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'value_attention'
    return config
