"""The balance loss keeps the experts' loads even on the synthetic corpus; without it they drift."""

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop, trainer
from moddepth_jax.training.metrics import read_metrics

STEPS = 300


def largest_loads(tiny_config, workdir, weight):
    """Of a run with this weight of the loss: the largest load of any layer, by step."""
    experts = {'choice': 'token', 'd_ff': 16, 'num_shared': 1, 'balance_weight': weight}
    config = tiny_config(
        **{f'model.experts.{name}': value for name, value in experts.items()},
        **{
            'model.num_heads': 2,
            'model.head_dim': 16,
            'model.init_std': 32**-0.5,
            'model.embedding_init_std': 1.0,
            'data.sequence_length': 128,
            'data.batch_size': 8,
            'optimizer.learning_rate': 0.01,
            'training.num_steps': STEPS,
            'training.log_every': 10,
            'training.checkpoint_every': STEPS,
            'evaluation.every': 0,
        },
    )
    loop.train(from_config(config), workdir)
    rows = [row for row in read_metrics(workdir) if 'loss' in row]
    layers = [f'experts/layer_{layer:02d}/largest_load' for layer in range(2)]
    return {row['step']: max(row[layer] for layer in layers) for row in rows}


@pytest.mark.slow
def test_balance_loss_keeps_loads_within_twice_their_mean(tiny_config, tmp_path, monkeypatch):
    """In the second half of the run; without it some layer is beyond that all the time."""
    monkeypatch.setattr(trainer, 'measure_baselines', lambda corpus: {})  # seconds of compression
    kept, free = (
        largest_loads(tiny_config, tmp_path / str(weight), weight) for weight in (0.01, 0.0)
    )
    later = [step for step in kept if step > STEPS // 2]
    assert len(later) == 15
    assert max(kept[step] for step in later) < 2 < min(free[step] for step in later)
