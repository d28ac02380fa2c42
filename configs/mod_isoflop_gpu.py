"""Mixture-of-Depths at the budgets of one GPU, 1e15 to 1e17 training FLOPs: minutes per run.

python -m launch.isoflop --config=configs/mod_isoflop_gpu.py --workdir=runs/study_1e15 \
    --budgets=1e15,1e16 --sizes=4x256,6x256,8x256,8x384 --learning_rates=0.0015,0.003,0.006 \
    --variants=dense,shallow,mod,mod_0.25,mod_0.5,every_0.125,every_0.5,random,position,norm \
    --seeds=0,1,2
python -m launch.isoflop --config=configs/mod_isoflop_gpu.py --workdir=runs/study_1e17 \
    --budgets=1e17 --sizes=8x384,12x384,12x512,16x768 --learning_rates=0.001,0.002,0.004 \
    --variants=dense,shallow,mod,random --seeds=0,1,2
python -m launch.train --config=configs/mod_isoflop_gpu.py:size=8x384,budget=1e16

Each command continues where it stopped. The text is the standard library and all installed
packages. A batch has 32 rows of 1024 bytes, so that a dense 8x256 gets 592 steps at 1e15. Not run
yet.
"""

from configs import sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, budget=training FLOPs; the steps follow from both."""
    config = sizes.at_budget(arguments, size='8x384', budget='1e16')
    config.model.dtype = 'bfloat16'
    config.model.remat = 'none'  # activations of these models fit
    config.model.routing.router = 'learned'
    config.data.source = 'python_environment'
    config.data.sequence_length = 1024
    config.data.batch_size = 32
    config.training.log_every = 20
    config.training.checkpoint_every = 1000
    config.training.keep_checkpoints = 1
    config.evaluation.every = 0
    return config
