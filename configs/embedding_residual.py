"""The embedded tokens before each block, as in nanochat, on a laptop: x = r x + a x_0.

python -m launch.train --config=configs/embedding_residual.py

With --config.model.embedding_residual=identity the scalars start at r = 1 and a = 0.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    sizes.parse(arguments, size='', steps='')  # no other arguments
    config = moda.get_config(f'slots=none,{arguments}')
    config.model.embedding_residual = 'learned'
    return config
