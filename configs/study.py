"""Models of an isoFLOP study on a laptop: steps are small, so that a small budget pays for many.

python -m launch.isoflop --config=configs/study.py --workdir=runs/study --processes=2 \
    --budgets=6e11,2e12 --sizes=4x64,8x64,4x128
python -m launch.train --config=configs/study.py:size=8x64,budget=2e12
"""

from configs import sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, budget=training FLOPs; the steps follow from both."""
    config = sizes.at_budget(arguments, size='8x64', budget='2e12')
    config.data.sequence_length = 128
    config.data.batch_size = 8
    config.report.sample_tokens = 100
    config.training.log_every = 5
    config.training.checkpoint_every = 500
    config.training.keep_checkpoints = 1
    config.evaluation.every = 0
    config.evaluation.final_batches = 256
    return config
