"""The embedded tokens before each block, as in nanochat, on a laptop: x = r x + a x_0.

python -m launch.train --config=configs/embedding_residual.py

With --config.model.embedding_residual=identity the scalars start at r = 1 and a = 0. Held-out bits
per byte, seeds 0 to 2: 2.366, 2.348, 2.368, and with `identity` 2.368, 2.280, 2.357; the dense
model (configs/moda.py:slots=none): 2.345, 2.306, 2.358. Twelve other seeds show that the first is
worse than dense (docs/claims.md). A run takes a minute of one CPU core.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.embedding_residual = 'learned'
    return config
