"""A routed model small enough to see everything work: half a minute on two CPU cores.

python -m launch.train --config=configs/tiny.py
"""

from configs import base


def get_config():
    """Two dense and two routed blocks of width 64, 60 steps on the synthetic corpus."""
    config = base.get_config()
    model = config.model
    model.num_layers, model.d_model, model.d_ff = 4, 64, 192
    model.num_heads = model.num_kv_heads = 2
    model.routing.router = 'learned'
    config.data.source = 'synthetic'
    config.data.sequence_length = 128
    config.data.batch_size = 8
    config.training.num_steps = 60
    config.training.checkpoint_every = 20
    config.evaluation.every = 20
    config.evaluation.final_batches = 8
    config.report.prompt = ''
    config.report.sample_tokens = 64
    return config
