"""A dense run continues as MoD or MoDA near its loss, and the difference is explained."""

import re

import jax
import numpy as np
import pytest

from launch import first_checkpoint
from moddepth_jax.conversion.upcycle import explain_difference, upcycle
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop
from moddepth_jax.training.evaluate import evaluate
from moddepth_jax.training.mesh import make_mesh
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.saved_run import load_run
from moddepth_jax.training.train_step import model_variables
from tests.saved_run import save_run

STAGES = {'model.routing.capacity_stages': '1:0.2'}


def measure_loss(params, averages, hparams, dataset, num_batches):
    mesh = make_mesh('data=1')
    with jax.set_mesh(mesh):
        variables = model_variables(params, averages)
        return evaluate(variables, hparams, dataset, mesh, num_batches, 'top_c')['loss']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('changes', 'most'),
    [
        ({'model.depth.stream': 'moda'}, 0.05),
        ({'model.depth.stream': 'attention_residual'}, 0.01),
        ({'model.depth.stream': 'mudd'}, 1e-6),
        (STAGES | {'model.routing.router': 'learned'}, 0.05),
        (STAGES | {'model.routing.router': 'straight_through'}, 1e-6),
    ],
    ids=str,
)
def test_a_dense_run_continues_to_learn(changes, most, tiny_config, tmp_path):
    """As MoD and as MoDA it begins near its loss, as convert.json says, and ends below it."""
    dense = {
        'model.num_layers': 4,
        'model.routing.capacity': 0.5,
        'training.num_steps': 120,
        'training.checkpoint_every': 120,
        'evaluation.every': 0,
        'evaluation.num_batches': 8,
        'evaluation.final_batches': 8,
    }
    before = loop.train(from_config(tiny_config(**dense)), tmp_path / 'dense').summary['eval']
    hparams = from_config(tiny_config(**dense | changes))
    run = load_run(tmp_path / 'dense')
    dataset = make_dataset(hparams.data, hparams.seed)
    params, averages, note = upcycle(run, hparams, dataset, measure_loss)
    assert note['dense_loss'] == pytest.approx(before['loss'], abs=1e-5)
    assert abs(note['difference']) < most and note['why'] and note['new_parameters']
    workdir = str(tmp_path / 'new')
    first_checkpoint.write_new_run(workdir, hparams, params, averages, dataset, note)
    after = loop.train(hparams, workdir).summary['eval']
    assert after.get('loss_top_c', after['loss']) < before['loss'] - 0.02
    losses = [row['loss'] for row in read_metrics(tmp_path / 'new') if 'loss' in row]
    assert np.mean(losses[:5]) < before['loss'] + 0.3


def test_a_copy_is_measured_on_the_same_batches(tiny_config, tmp_path):
    """Regression: each model had its own evaluation.num_batches, so a copy had another loss.

    Its reason was that every token is routed, though nothing is.
    """
    save_run(tmp_path / 'dense', from_config(tiny_config(**{'evaluation.num_batches': 8})))
    hparams = from_config(tiny_config(**{'evaluation.num_batches': 1}))
    run, dataset = load_run(tmp_path / 'dense'), make_dataset(hparams.data, hparams.seed)

    def used_batches(params, averages, hparams, dataset, num_batches):
        return num_batches

    _, _, note = upcycle(run, hparams, dataset, used_batches)
    assert (note['dense_loss'], note['first_loss'], note['held_out_batches']) == (1, 1, 1)
    assert note['why'] == 'every parameter is from the run'


def test_the_difference_is_explained(tiny_config):
    """Capacity, gate and shared keys are named; without any of them the model is the same."""
    cases = {
        'the same model': {},
        '88% of the tokens skip': {'model.routing.router': 'norm'},
        'the raw gate multiplies': {
            'model.routing.router': 'learned',
            'model.routing.capacity_stages': '1:0.5',
        },
        'gates are multiplied by model.routing.gate_scale=0.5': {
            'model.routing.router': 'straight_through',
            'model.routing.capacity_stages': '1:0.5',
            'model.routing.gate_scale': 0.5,
        },
        'heads share their softmax': {'model.depth.stream': 'moda'},
        'differ only by model.norm_eps': {'model.depth.stream': 'attention_residual'},
        'mixes values of earlier layers': {'model.depth.stream': 'value_attention'},
        'a share of the embedded tokens': {'model.embedding_residual': 'learned'},
        'new slots have values 0': {'model.depth.stream': 'moda', 'model.depth.slots': 'block'},
    }
    dense = from_config(tiny_config()).model
    for words, changes in cases.items():
        hparams = from_config(tiny_config(**changes))
        errors = {1: 0.1} if 'raw gate' in words else {}
        text = explain_difference(dense, hparams, errors, is_small=not changes)
        assert words in text and '\n' not in text
        assert [other for other in cases if other in text] == [words]
    shared = explain_difference(dense, from_config(tiny_config()), {}, False, [(0, 2), (1, 3)])
    assert shared.startswith('block 0 the mean of layers 0, 2, block 1') and '\n' not in shared
    assert re.search('error of 10%', explain_difference(dense, hparams, {1: 0.1}, is_small=False))
    blended = from_config(tiny_config(**cases['a share of the embedded tokens']))
    assert explain_difference(blended.model, blended, {}, True) == 'the same model'
