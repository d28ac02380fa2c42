"""Mixture-of-Depths Attention on a laptop: heads also see slots that earlier layers wrote.

python -m launch.train --config=configs/moda.py
python -m launch.train --config=configs/moda.py:slots=none --workdir=runs/dense
python -m launch.train --config=configs/moda.py --config.model.norm_placement=post

The second command trains the dense model for as many steps. With --config.model.d_ff=211 it also
has as many parameters as the first. Held-out bits per byte of MoDA, the dense model and the wider
dense model, means of 8 seeds in study-moda: 2.360, 2.355 and 2.347; under post-norm 2.330, 2.333
and 2.338. No gain is shown (docs/claims.md). A run takes two minutes on one CPU core.
"""

from configs import base, sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, steps of training, slots (none: the dense model)."""
    values = sizes.parse(arguments, size='8x64', steps='600', slots='auto')
    config = base.get_config()
    sizes.apply_size(config, values['size'])
    config.model.num_kv_heads = max(1, config.model.num_heads // 2)
    sizes.apply_slots(config, values['slots'])
    config.data.sequence_length = 128
    config.data.batch_size = 8
    config.evaluation.final_batches = 32  # 32,768 targets
    config.report.sample_tokens = 100
    config.training.num_steps = sizes.count(values['steps'], 'steps')
    return config


def dense_config(arguments: str = ''):
    """Return the dense model, to which other experiments compare theirs. Arguments: size, steps."""
    sizes.parse(arguments, size='', steps='')  # refuses the argument `slots`
    return get_config(f'slots=none,{arguments}')
