"""A routed model small enough to see everything work: well under a minute on two CPU cores.

python -m launch.train --config=configs/tiny.py
"""

from configs import base, sizes


def get_config():
    """Two dense and two routed blocks of width 64, 200 steps on the synthetic corpus."""
    config = base.get_config()
    sizes.apply_size(config, '4x64')
    config.model.routing.router = 'learned'
    config.data.source = 'synthetic'
    config.data.sequence_length = 128
    config.data.batch_size = 8
    config.training.num_steps = 200
    config.training.checkpoint_every = 50
    config.evaluation.every = 50
    config.evaluation.final_batches = 16
    config.report.prompt = ''
    config.report.sample_tokens = 64
    return config
