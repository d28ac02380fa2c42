"""A looped transformer on a laptop: its two middle blocks run three times, with the same weights.

python -m launch.train --config=configs/looped.py
python -m launch.train --config=configs/looped.py:loops=1 --workdir=runs/once
python -m launch.evaluate --workdir=runs/looped --loops=4

Held-out bits per byte, seed 0: 2.390, and 2.441 with one loop. Eight separate blocks
(configs/moda.py:slots=none), at the FLOPs of three loops: 2.345. A run takes a minute or two on two
CPU cores.
"""

from configs import moda, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps, loops of all blocks but the first and last."""
    values = sizes.parse(arguments, size='4x64', steps='600', loops='3')
    config = moda.dense_config(f'size={values["size"]},steps={values["steps"]}')
    config.model.looped_layers = 'middle:1:1'
    config.model.loops = sizes.count(values['loops'], 'loops')
    return config
