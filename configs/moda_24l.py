"""The small shape of the MoDA paper: 24 layers of width 384, 6 query and 2 key/value heads.

python -m launch.train --config=configs/moda_24l.py
python -m launch.train --config=configs/moda_24l.py:layers=24,slots=attention
python -m launch.train --config=configs/moda_24l.py:layers=24,slots=none

71.35M parameters with the vocabulary of the paper, and 2.28M for the slots of the mlps. The paper
trains on FineWeb-Edu; here the text is bytes until a tokenizer of that size is given. Not trained.
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: layers, and slots (attention+ffn | attention | block | none: dense)."""
    values = sizes.parse(arguments, layers='24', slots='attention+ffn')
    config = base.get_config()
    model = config.model
    model.vocab_size = 50304
    model.num_layers = sizes.count(values['layers'], 'layers')
    model.d_model, model.d_ff = 384, 1536
    model.num_heads, model.num_kv_heads, model.head_dim = 6, 2, 64
    model.norm_placement = 'post'
    model.qk_norm = 'head'
    model.use_bias = True
    model.tie_embeddings = True
    model.embedding_init_std = model.d_model**-0.5  # tied: the head reads these rows
    sizes.apply_slots(config, values['slots'])
    config.data.sequence_length = 512
    config.data.batch_size = 64
    config.optimizer.learning_rate = 1e-3
    config.training.num_steps = 2000
    return config
