"""MUDD connections on a laptop: queries, keys, values and the sum read mixtures of all outputs.

python -m launch.train --config=configs/mudd.py
python -m launch.train --config=configs/mudd.py --config.model.depth.mudd_weights=static

The second has the same weights for all tokens. Bits a byte held out, seeds 0 to 2: 2.354, 2.245,
2.331 and 2.391, 2.328, 2.356; of the dense model (configs/moda.py:slots=none) 2.345, 2.306, 2.358.
A run takes 95 and 85 seconds of one CPU core, compiling included.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'mudd'
    return config
