"""The attention depth stream: a layer's input is attention over the slots of earlier layers.

python -m launch.train --config=configs/depth_attention.py

Held-out bits per byte, mean of 8 seeds in study-moda: 2.369; the dense model
(configs/moda.py:slots=none): 2.355. A step has 1.17 times the dense model's FLOPs. The time of a
run has not been measured.
"""

from configs import moda


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training."""
    config = moda.dense_config(arguments)
    config.model.depth.stream = 'attention'
    return config
