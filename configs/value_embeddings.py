"""Tables of values by token in every second layer, as in nanochat, on a laptop.

python -m launch.train --config=configs/value_embeddings.py

Held-out bits per byte, seeds 0 to 2: 2.369, 2.289, 2.330; without tables 2.345, 2.306, 2.358; with
wider mlps instead of tables (--config.model.d_ff=213) 2.314, 2.319, 2.351. A run takes a minute on
two CPU cores.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.value_embeddings = 'alternate'
    return config
