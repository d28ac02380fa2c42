"""The deep small shape of the MoDA paper: 48 layers of width 384, 6 query and 2 key/value heads.

python -m launch.train --config=configs/moda_48l.py
python -m launch.train --config=configs/moda_48l.py:slots=none

The model has 123.38M parameters, and 4.65M more for the slots of the mlps. The rest is as in
moda_24l. Not trained.
"""

from configs import moda_24l


def get_config(arguments: str = ''):
    """Arguments: those of moda_24l."""
    return moda_24l.get_config(f'size=48x384,{arguments}')
