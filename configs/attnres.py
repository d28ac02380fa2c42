"""Attention Residuals on a laptop: each sublayer reads a softmax over the outputs of earlier ones.

python -m launch.train --config=configs/attnres.py
python -m launch.train --config=configs/attnres.py --config.model.depth.sublayers_per_source=4

The second sums the outputs of each 4 sublayers, which are two layers, to one source.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.depth.stream = 'attention_residual'
    return config
