"""MoDA with experts at 7.3B: 24 layers of width 2048, 2 shared and 6 of 64 experts per token.

python -m launch.train --config=configs/openmythos_moda.py --mesh=data=4,expert=8
python -m launch.train --config=configs/openmythos_moda.py:size=tiny

The model is post-norm, with one slot per layer that is projected from the block's output. It has
7.319B parameters with tied embeddings, 1.298B of them active, and the recipe of
`sizes.apply_large_run`. Not trained. The second command trains a model of 326k parameters with the
same parts: its 300 steps take half a minute on two CPU cores and end at 2.694 held-out bits per
byte (seed 0).
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: size (full | tiny)."""
    size = sizes.parse(arguments, size='full')['size']
    shapes = {'full': _full, 'tiny': _tiny}
    if size not in shapes:
        raise ValueError(f'size={size!r}: must be full or tiny')
    config = base.get_config()
    model = config.model
    model.norm_placement = 'post'
    model.tie_embeddings = True
    model.depth.stream, model.depth.slots = 'moda', 'block'
    model.experts.choice = 'token'
    shapes[size](config)
    model.embedding_init_std = model.d_model**-0.5  # tied: the head reads these rows
    return config


def _full(config):
    model, experts = config.model, config.model.experts
    model.vocab_size = 32000
    model.num_layers, model.d_model = 24, 2048
    model.num_heads, model.num_kv_heads, model.head_dim = 16, 8, 128
    experts.num_routed, experts.num_shared, experts.top_k, experts.d_ff = 64, 2, 6, 704
    sizes.apply_large_run(config)


def _tiny(config):
    model, experts = config.model, config.model.experts
    model.num_layers, model.d_model = 4, 64
    model.num_heads, model.num_kv_heads, model.head_dim = 4, 2, 16
    model.init_std = model.d_model**-0.5
    experts.num_routed, experts.num_shared, experts.top_k, experts.d_ff = 8, 2, 3, 32
    config.data.sequence_length = 128
    config.data.batch_size = 8
    config.report.sample_tokens = 100
    config.training.num_steps = 300
