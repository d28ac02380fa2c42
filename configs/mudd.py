"""MUDD connections on a laptop: queries, keys, values and the sum read mixtures of all outputs.

python -m launch.train --config=configs/mudd.py
python -m launch.train --config=configs/mudd.py --config.model.depth.mudd_weights=static

The second command uses the same mixture weights for all tokens. Held-out bits per byte, seeds 0 to
2: 2.354, 2.245, 2.331 and 2.391, 2.328, 2.356; the dense model (configs/moda.py:slots=none): 2.345,
2.306, 2.358. The runs take 95 and 85 seconds of one CPU core, including compilation.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'mudd'
    return config
