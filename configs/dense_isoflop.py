"""The dense transformer at a FLOP budget: the baseline of mod_isoflop.

python -m launch.train --config=configs/dense_isoflop.py
python -m launch.train --config=configs/dense_isoflop.py:size=4x128

The first command takes four minutes on two CPU cores.
"""

from configs import mod_isoflop


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, budget=training FLOPs; the steps follow from both."""
    config = mod_isoflop.get_config(arguments)
    config.model.routing.router = 'none'
    return config
