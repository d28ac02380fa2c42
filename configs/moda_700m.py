"""The 700M shape of the MoDA paper: 36 layers of width 1024 at T = 4096.

python -m launch.train --config=configs/moda_700m.py --mesh=data=8
python -m launch.train --config=configs/moda_700m.py:layers=36,slots=none
python -m launch.train --config=configs/moda_700m.py:layers=38,slots=none

705.7M parameters; 669.0M without the slots of the mlps, 742.4M with a projection of the attention
slots too. 95,367 steps of 4.2M tokens by the paper's recipe (`sizes.apply_large_run`). Not trained.
Uncertain: the paper gives width, group size and parameters; the rest are values that give these
counts. The default corpus only stands in for yours (--config.data.source).
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: layers, and slots (attention+ffn | attention | block | none: dense)."""
    values = sizes.parse(arguments, layers='36', slots='attention+ffn')
    config = base.get_config()
    model = config.model
    model.num_layers = sizes.count(values['layers'], 'layers')
    model.d_model, model.d_ff = 1024, 4096
    model.num_heads, model.num_kv_heads, model.head_dim = 8, 4, 128
    sizes.apply_olmo2(config)
    sizes.apply_slots(config, values['slots'])
    return config
