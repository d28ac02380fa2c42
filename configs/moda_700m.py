"""The 700M shape of the MoDA paper: 36 layers of width 1024 at T = 4096.

python -m launch.train --config=configs/moda_700m.py --mesh=data=8
python -m launch.train --config=configs/moda_700m.py:layers=36,slots=none
python -m launch.train --config=configs/moda_700m.py:layers=38,slots=none

The model has 705.7M parameters: 669.0M without the slots of the mlps, 742.4M if the attention slots
have a projection as well. A run has 95,367 steps of 4.2M tokens by the paper's recipe
(`sizes.apply_large_run`); none has been made yet. The paper gives the width, the group size and the
number of parameters. The other sizes are uncertain: they are chosen to give these counts. The
default corpus is a placeholder for yours (--config.data.source).
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: layers, slots (attention+ffn | attention | block | none: the dense model)."""
    values = sizes.parse(arguments, layers='36', slots='attention+ffn')
    config = base.get_config()
    model = config.model
    model.num_layers = sizes.count(values['layers'], 'layers')
    model.d_model, model.d_ff = 1024, 4096
    model.num_heads, model.num_kv_heads, model.head_dim = 8, 4, 128
    sizes.apply_olmo2(config)
    sizes.apply_slots(config, values['slots'])
    return config
