"""A 1.5B shape for MoDA: 36 layers of width 1536, 12 query and 6 key/value heads.

python -m launch.train --config=configs/moda_1b5.py --mesh=data=8
python -m launch.train --config=configs/moda_1b5.py:slots=none

The model has 1.511B parameters, 1.428B without the slots of the mlps. A run has 95,367 steps of
4.2M tokens by the paper's recipe (`sizes.apply_large_run`); none has been made yet. The paper gives
neither the shape of its 1.5B model nor its vocabulary: see docs/claims.md. The default corpus is a
placeholder for yours.
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: slots (attention+ffn | attention | block | none: the dense model)."""
    values = sizes.parse(arguments, slots='attention+ffn')
    config = base.get_config()
    model = config.model
    model.num_layers = 36
    model.d_model, model.d_ff = 1536, 6144
    model.num_heads, model.num_kv_heads, model.head_dim = 12, 6, 128
    sizes.apply_olmo2(config)
    sizes.apply_slots(config, values['slots'])
    return config
