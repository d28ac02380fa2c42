"""MUDD connections on a laptop: queries, keys, values and the sum read mixtures of all outputs.

python -m launch.train --config=configs/mudd.py
python -m launch.train --config=configs/mudd.py --config.model.depth.mudd_weights=static
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'mudd'
    return config
