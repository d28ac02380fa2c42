"""The small shape of the MoDA paper: 24 layers of width 384, 6 query and 2 key/value heads.

python -m launch.train --config=configs/moda_24l.py
python -m launch.train --config=configs/moda_24l.py:slots=attention
python -m launch.train --config=configs/moda_24l.py:slots=none,steps=500

The model has 71.35M parameters with the vocabulary of the paper, and 2.28M more for the slots of
the mlps. The paper trains on FineWeb-Edu; here the text is bytes unless you give a tokenizer of
that vocabulary. Not trained.
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH (a multiple of 192), steps, slots (none: the dense model)."""
    values = sizes.parse(arguments, size='24x384', steps='2000', slots='attention+ffn')
    config = base.get_config()
    model = config.model
    sizes.apply_size(config, values['size'])
    if model.d_model % 192:
        right = 'must be a multiple of 192 wide: three query heads of 64 for each key/value head'
        raise ValueError(f'size={values["size"]!r}: {right}')
    model.dtype = 'bfloat16'  # the GPU kernels do not take float32
    model.vocab_size = 50304
    model.d_ff, model.num_kv_heads, model.init_std = 4 * model.d_model, model.num_heads // 3, 0.02
    model.norm_placement = 'post'
    model.qk_norm = 'head'
    model.use_bias = True
    model.tie_embeddings = True
    model.embedding_init_std = model.d_model**-0.5  # tied: the head reads these rows
    sizes.apply_slots(config, values['slots'])
    config.data.sequence_length = 512
    config.data.batch_size = 64
    config.optimizer.learning_rate = 1e-3
    config.training.num_steps = sizes.count(values['steps'], 'steps')
    return config
