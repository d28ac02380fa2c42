"""Training continues from a Hugging Face checkpoint; all but its sizes is set here.

python -m launch.convert --from_hf=FOLDER --workdir=runs/imported --config=configs/imported.py
python -m launch.train --config=runs/imported/config.json --workdir=runs/imported

launch.convert writes all knobs to the run's own config.json. Those of data, optimizer and training
are set there: --config.data.source=DIR (of launch.prepare) --config.training.num_steps=N.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """base, with a gentle optimizer and a schedule for weights that are already trained."""
    config = base.get_config()
    config.data.sequence_length = 512
    config.data.batch_size = 8
    config.optimizer.learning_rate = 1e-4
    config.optimizer.b2 = 0.95
    config.training.num_steps = 1000
    return config
