"""Attention Residuals on a laptop: each sublayer reads a softmax over earlier outputs.

python -m launch.train --config=configs/attnres.py
python -m launch.train --config=configs/attnres.py --config.model.depth.sublayers_per_source=4

The second command sums the outputs of every 4 sublayers, that is two layers, into one source.
Held-out bits per byte, seeds 0 to 2: 2.275, 2.221, 2.254 and 2.333, 2.235, 2.296; the dense model
(configs/moda.py:slots=none): 2.345, 2.306, 2.358. The runs take 115 and 90 seconds of one CPU core,
the dense one 54.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'attention_residual'
    return config
