"""The dense baseline of moda_700m with about its parameters: 38 layers, 700.5M.

python -m launch.train --config=configs/dense_700m.py --mesh=data=8

Not trained.
"""

from configs import moda_700m, sizes


def get_config(arguments: str = ''):
    """Arguments: layers."""
    values = sizes.parse(arguments, layers='38')
    return moda_700m.get_config('slots=none,layers={layers}'.format(**values))
