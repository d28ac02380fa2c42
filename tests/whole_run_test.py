"""A run, from the first step to the report, traces each program once per shape."""

import collections

import pytest

from moddepth_jax.analysis.report import write_report
from moddepth_jax.hparams import from_config
from moddepth_jax.inference import generate as generate_module
from moddepth_jax.training import evaluate as evaluate_module
from moddepth_jax.training import trainer
from moddepth_jax.training.loop import train


@pytest.mark.slow
@pytest.mark.parametrize('stages', ['', '1:0.25,0.5:0.25'])
def test_each_step_function_is_traced_once_a_shape(stages, tiny_config, tmp_path, monkeypatch):
    """One train step per stage, an evaluation with each routing, one prefill, step and write."""
    traces = collections.Counter()

    def counted(state, batch, stage, *rest):
        traces[stage.capacity] += 1
        return step(state, batch, stage, *rest)

    step = trainer.train_step
    monkeypatch.setattr(trainer, 'train_step', counted)
    programs = {
        'eval': evaluate_module.eval_step,
        'start': generate_module._start,
        'step': generate_module._step,
        'write': generate_module._write,
    }
    before = {name: program._cache_size() for name, program in programs.items()}
    config = tiny_config(
        **{
            'model.routing.router': 'learned',
            'model.routing.capacity_stages': stages,
            'training.num_steps': 8,
            'report.sample_tokens': 20,
            'report.prompt': 'ab',
            'seed': 7 + len(stages),
        }
    )
    run = train(from_config(config), tmp_path / 'run')
    write_report(run)
    made = {name: program._cache_size() - before[name] for name, program in programs.items()}
    assert set(traces.values()) == {1}
    assert sorted(traces) == ([0.125, 0.5, 1.0] if stages else [0.125])
    # By the rule, in all layers or in one, and by top-C; at steps 2, 4, 6 and the end.
    assert made['start'] == made['step'] == 1
    assert made['write'] <= 1  # it depends on shapes only, which may not be new
    assert made['eval'] == 2 * len(traces)
