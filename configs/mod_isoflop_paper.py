"""Mixture-of-Depths at the budgets of its paper, 6e18 to 1e20 training FLOPs, for a pod.

python -m launch.isoflop --config=configs/mod_isoflop_paper.py --workdir=runs/study_paper \
    --budgets=6e18,2e19,1e20 --variants=dense,shallow,mod,random --seeds=0,1,2 \
    --sizes=8x512,8x768,12x1024,16x1024,24x1024,24x1536,24x2048,36x2560 \
    --config.data.source='/data/text/*.parquet'
python -m launch.train --config=configs/mod_isoflop_paper.py:size=24x1024,budget=2e19 \
    --config.data.source='/data/text/*.parquet'

Never run. The setting is that of Raposo et al. 2024 (arXiv 2404.02258, section 4.1), as far as they
give it: 128 rows of 2048 tokens, a vocabulary of 32,000, a cosine to the end, one learning rate for
each width. The sizes are 58M to 3.0B parameters. They are not split over devices: the largest take
48 GB of each. Without a tokenizer of that vocabulary, your text is read as bytes.
"""

from configs import sizes


def get_config(arguments: str = ''):
    """Arguments: size=LAYERSxWIDTH, budget=training FLOPs; the steps follow from both."""
    config = sizes.at_budget(arguments, size='12x1024', budget='6e18')
    config.model.vocab_size = 32000
    config.model.dtype = 'bfloat16'
    config.model.remat = 'block'
    config.model.routing.router = 'learned'
    config.data.sequence_length = 2048
    config.data.batch_size = 128
    config.optimizer.learning_rate = 1e-3
    config.optimizer.b2 = 0.95
    config.training.log_every = 50
    config.training.checkpoint_every = 1000
    config.evaluation.every = 0
    return config
