"""Continued training of a Hugging Face checkpoint. Its sizes come from the checkpoint.

python -m launch.convert --from_hf=FOLDER --workdir=runs/imported --config=configs/imported.py
python -m launch.train --config=runs/imported/config.json --workdir=runs/imported

launch.convert writes all knobs to the run's own config.json. To change those of data, optimizer and
training, pass flags: --config.data.source=DIR (of launch.prepare) --config.training.num_steps=N.
"""

from configs import base


def get_config():
    """Return base with a low learning rate, for weights that are already trained."""
    config = base.get_config()
    config.data.sequence_length = 512
    config.data.batch_size = 8
    config.optimizer.learning_rate = 1e-4
    config.optimizer.b2 = 0.95
    config.training.num_steps = 1000
    return config
