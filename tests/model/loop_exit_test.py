"""Exits from the loops: which tokens exit, extreme thresholds, and evaluation."""

import dataclasses

import jax
import numpy as np
import pytest

from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.evaluate import evaluate
from moddepth_jax.training.mesh import make_mesh
from tests.model.cases import (
    HEAD_NORM,
    LOOPED,
    TOKENS_BT,
    build,
    random_variables,
    small_hparams,
)


def with_threshold(hparams, threshold):
    model = dataclasses.replace(hparams.model, loop_exit_threshold=threshold)
    return dataclasses.replace(hparams, model=model)


@pytest.mark.parametrize(
    'name',
    ['looped, exits', pytest.param('looped, exits of a block with all', marks=pytest.mark.slow)],
)
def test_tokens_of_the_case_exit_after_each_loop(name, tiny_config):
    """So the properties that are tested over tests/model/cases.py cover exits."""
    _, records = build(tiny_config, name)()
    assert {*np.unique(records.loops_BT)} == {1, 2, 3}


def test_the_ends_of_the_threshold_are_models_without_exits(tiny_config):
    """No exits: all loops run. Exits at any change: one loop runs. Training has no exits."""
    plain = small_hparams(tiny_config, LOOPED, HEAD_NORM)
    variables = random_variables(plain, TOKENS_BT % 32)

    def run(hparams, routing='dense'):
        return jax.jit(Transformer(hparams).apply, static_argnames='routing')(
            variables, TOKENS_BT % 32, routing=routing
        )

    some, records = run(with_threshold(plain, 0.5))
    all_loops, none = run(plain)
    assert none is None and np.abs(some - all_loops).max() > 1e-2
    large, records = run(with_threshold(plain, 1e9))
    assert np.all(records.loops_BT == 1)
    np.testing.assert_allclose(large, run(plain.with_loops(1))[0], rtol=1e-4, atol=1e-4)
    small, records = run(with_threshold(plain, 1e-9))
    assert np.all(records.loops_BT == 3)
    np.testing.assert_allclose(small, all_loops, rtol=1e-4, atol=1e-4)
    trained, records = run(with_threshold(plain, 0.5), 'top_c')
    assert records is None
    np.testing.assert_array_equal(trained, run(plain, 'top_c')[0])


class Padded:
    """The last held-out batch of a dataset, of which some rows are padding."""

    num_held_out_batches = 1
    domains = {}

    def __init__(self, dataset):
        self.tokenizer = dataset.tokenizer
        self.batch = dataset.held_out_batch(dataset.num_held_out_batches - 1)
        assert 0 < np.mean(self.batch['segment_ids_BT'] > 0) < 1

    def held_out_batch(self, index):
        return self.batch

    def domain(self, index):
        return None


def test_evaluation_counts_the_loops_of_real_tokens(tiny_config):
    """Of every token by its last loop; padding counts as no loop and as no token."""
    knobs = {'model.num_layers': 4, 'model.loop_exit_threshold': 0.05}
    hparams = from_config(tiny_config(**LOOPED | knobs))
    dataset, mesh = make_dataset(hparams.data, hparams.seed), make_mesh('data=1')
    variables = random_variables(hparams, np.zeros((1, 32), int))
    found = {}
    with jax.set_mesh(mesh):
        for threshold in (0.0, 0.5, 1e9):
            result = evaluate(
                variables, with_threshold(hparams, threshold), dataset, mesh, 2, 'dense'
            )
            found[threshold] = result.get('loops_per_token')
        first = with_threshold(hparams, 1e9)
        padded = evaluate(variables, first, Padded(dataset), mesh, 1, 'dense')
    assert found[0.0] is None and found[1e9] == 1 and 1 < found[0.5] < 3
    assert padded['loops_per_token'] == 1
