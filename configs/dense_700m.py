"""The dense baseline of moda_700m with about its parameters: 38 layers, 700.5M.

python -m launch.train --config=configs/dense_700m.py --mesh=data=8

Not trained.
"""

from configs import moda_700m, sizes


def get_config(arguments: str = ''):
    """Arguments: layers."""
    sizes.parse(arguments, layers='')  # no other arguments
    return moda_700m.get_config(f'layers=38,slots=none,{arguments}')
