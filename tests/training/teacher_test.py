"""A run with a teacher also learns its distributions, and the teacher never changes."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import scipy.special

from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import dot_general_flops, forward_flops, train_step_flops
from moddepth_jax.training import loop
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.mesh import make_mesh, state_shardings
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.plan import run_flops
from moddepth_jax.training.saved_run import load_run, load_teacher
from moddepth_jax.training.summary import step_flops_report
from moddepth_jax.training.teacher import (
    Teacher,
    abstract_teacher,
    check_teacher,
    step_flops,
    teacher_flops,
)
from moddepth_jax.training.train_step import init_state, train_step
from tests import conftest
from tests.data.prepared_text import refusal
from tests.devices import on_devices
from tests.saved_run import save_run
from tests.training.toy_steps import NUM_STEPS, ROUTED, forward, initial, make_batch

pytestmark = pytest.mark.usefixtures('compiled_once')
SMALL = {'model.d_model': 16, 'model.num_layers': 1, 'seed': 3}
WIDE = {'model.routing.router': 'position', 'training.max_unsharded': 1.0}
SOFT = {'training.distill_weight': 1.0, 'training.distill_temperature': 2.0}
step = jax.jit(train_step)


@pytest.fixture(scope='module')
def dense(tiny_config, tmp_path_factory):
    """The directory of a dense run, narrower than its students."""
    folder = tmp_path_factory.mktemp('teacher') / 'dense'
    save_run(folder, from_config(tiny_config(**SMALL)))
    return folder


def taught(tiny_config, folder, **changes):
    """Return Hparams of a routed run that learns from the run in `folder`."""
    return from_config(tiny_config(**ROUTED | {'training.distill_from': str(folder)} | changes))


@pytest.fixture(scope='module')
def teacher(dense):
    run = load_run(dense)
    return Teacher(run.state.variables, run.hparams)


def test_the_loss_pulls_towards_the_teacher(tiny_config, dense, teacher):
    """Also at weight 1, which ignores the text. The metric is T^2 KL, the mean over targets."""
    hparams, batch = taught(tiny_config, dense, **SOFT), make_batch(0, padded=True)
    state = initial(hparams)
    logits_BTV, _ = forward(hparams, state.variables, batch)
    other_BTV, _ = forward(teacher.hparams, teacher.variables, batch, 'dense')
    log_q, log_p = (
        scipy.special.log_softmax(np.asarray(side, np.float64) / 2, axis=-1)
        for side in (logits_BTV, other_BTV)
    )
    kl_BT = 4 * np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    expected = float(kl_BT[batch['segment_ids_BT'] > 0].mean())
    found, _ = trained(state, batch, teacher)
    # Rounding of float32 log-probabilities near -5, times T^2.
    assert found[0] == pytest.approx(expected, abs=1e-6)
    assert found[-1] < 0.8 * found[0]


def test_a_routed_teacher_does_not_see_the_future(tiny_config):
    """Its hidden states are those of its causal rule: later tokens change no bit of them."""
    hparams = from_config(tiny_config(**ROUTED | {'model.routing.causal_rule': 'aux_loss'}))
    itself, batch, cut = Teacher(initial(hparams).variables, hparams), make_batch(0), 16
    other = batch | {'tokens_BT': batch['tokens_BT'].copy()}
    other['tokens_BT'][:, cut:] += 64
    hidden_states = jax.jit(Teacher.hidden_states)
    one_BTD, other_BTD = (hidden_states(itself, side) for side in (batch, other))
    np.testing.assert_array_equal(one_BTD[:, :cut], other_BTD[:, :cut])
    assert np.all(np.any(one_BTD[:, cut:] != other_BTD[:, cut:], axis=-1))
    of_top_c = [forward(hparams, itself.variables, side)[1].routing for side in (batch, other)]
    one_BT, other_BT = (record.selected_BT[0, :, :cut] for record in of_top_c)
    assert np.any(one_BT != other_BT)  # so that top-C would be seen


@pytest.mark.slow
def test_micro_batches_do_not_change_distillation(tiny_config, dense, teacher):
    found = []
    for parts in (1, 2):
        hparams = taught(tiny_config, dense, **SOFT | {'training.accumulate_steps': parts})
        found.append(trained(initial(hparams), make_batch(0, padded=True), teacher, 4)[0])
    np.testing.assert_allclose(*found, rtol=1e-4)


def trained(state, batch, teacher, num_steps=12):
    """Return the divergence before each of some steps on one batch, and the last metrics."""
    found = []
    for _ in range(num_steps):
        state, metrics = step(state, batch, teacher=teacher)
        found.append(float(metrics['teacher_divergence']))
    return found, metrics


# Fast: the test above, and tests/model/cross_entropy_test.py, which has the gradient.
@pytest.mark.slow
@pytest.mark.parametrize('parts', [1, 2])
def test_a_model_that_is_its_teacher_learns_nothing(tiny_config, dense, parts):
    """Divergence and gradient are 0 up to rounding."""
    knobs = {'training.distill_weight': 1.0, 'optimizer.z_loss': 0.0, 'model.remat': 'block'}
    knobs |= {'model.routing.router': 'none', 'training.accumulate_steps': parts}
    hparams = taught(tiny_config, dense, **knobs)
    state = initial(hparams)
    training = dataclasses.replace(hparams.training, distill_from='')
    itself = Teacher(state.variables, dataclasses.replace(hparams, training=training))
    _, metrics = step(state, make_batch(1), teacher=itself)
    assert abs(metrics['teacher_divergence']) < 1e-10 and metrics['grad_norm'] < 1e-6
    assert metrics['loss'] > 1


def test_the_teacher_is_counted(tiny_config, dense):
    """Its FLOPs count in a step, the run and the report; it has no moments."""
    hparams = taught(tiny_config, dense)
    shape = hparams.data.batch_size, hparams.data.sequence_length
    narrow = from_config(tiny_config(**SMALL))
    assert teacher_flops(hparams) == forward_flops(narrow, *shape, 'dense') > 0
    assert step_flops(hparams) == train_step_flops(hparams) + teacher_flops(hparams)
    assert run_flops(hparams, 5) == 5 * step_flops(hparams)
    alone, report = from_config(tiny_config(**ROUTED)), step_flops_report(hparams, NUM_STEPS)
    assert report['flops_per_step'] == step_flops(hparams) < report['flops_per_step_xla']
    traced = []
    for of in (hparams, alone):
        state = jax.eval_shape(lambda of=of: init_state(of, 4))
        made = step.trace(state, make_batch(0), teacher=abstract_teacher(of))
        traced.append(dot_general_flops(made.jaxpr))
    hidden = 2 * shape[0] * shape[1] ** 2 * narrow.model.num_heads * narrow.model.head_dim
    assert traced[0] - traced[1] == teacher_flops(hparams) + hidden
    states = [jax.eval_shape(lambda of=of: init_state(of, 4)) for of in (hparams, alone)]
    assert len({len(jax.tree.leaves(state)) for state in states}) == 1
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_teacher(hparams).variables)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, load_run(dense).state.variables)


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_to_the_bit(tiny_config, dense, tmp_path, signals, capsys):
    """It uses the teacher that it began with, which may move, but must exist and not change."""
    folder = shutil.copytree(dense, tmp_path / 'dense')
    hparams, before = taught(tiny_config, folder), state_sha256(load_run(folder).state)
    signals[2] = 'SIGTERM'
    assert loop.train(hparams, tmp_path / 'broken').state.step == 3
    assert f'teacher {folder} at step 4: keep this checkpoint until' in capsys.readouterr().out
    signals[2] = 'SIGTERM'
    stopped = loop.train(hparams, tmp_path / 'stopped')
    whole = loop.train(hparams, tmp_path / 'whole')
    folder = folder.rename(tmp_path / 'moved')
    hparams = taught(tiny_config, folder)
    resumed = loop.train(hparams, tmp_path / 'broken')
    assert resumed.summary['state_sha256'] == whole.summary['state_sha256']
    assert resumed.summary['total_flops'] == 4 * step_flops(hparams)
    assert before == state_sha256(load_run(folder).state)
    shutil.rmtree(folder / 'checkpoints' / '4')
    with pytest.raises(ValueError, match='; this run began with checkpoint 4: restore it$'):
        loop.train(hparams, stopped.workdir)
    shutil.rmtree(folder)
    save_run(folder, from_config(tiny_config(**SMALL | {'seed': 4})))
    with pytest.raises(ValueError, match='checkpoint 4 is not the one that the run began with'):
        loop.train(hparams, stopped.workdir)


@pytest.mark.parametrize(
    ('knobs', 'words'),
    [
        ({'training.distill_from': 'gone'}, "distill_from='gone': holds no config.json"),
        ({'model.vocab_size': 300}, 'has model.vocab_size=257; must be 300, as in this run'),
    ],
)
def test_a_teacher_of_other_ids_is_refused(tiny_config, dense, knobs, words):
    assert words in refusal(check_teacher, taught(tiny_config, dense, **knobs), ByteTokenizer())


def test_a_teacher_with_another_tokenizer_is_refused(tiny_config, dense):
    class Other(ByteTokenizer):
        name, sha256 = 'other.json', 'ab'

    with pytest.raises(ValueError, match='bytes; must be the tokenizer of this run, other.json'):
        check_teacher(taught(tiny_config, dense), Other())
    check_teacher(taught(tiny_config, dense), ByteTokenizer())


@pytest.mark.parametrize(('step', 'capacity'), [(2, 1), (3, 0.25)])
def test_a_teacher_has_its_last_capacity(tiny_config, tmp_path, step, capacity):
    """Regression: a teacher that had been trained at capacity 1 only ran at its last capacity."""
    stages = ROUTED | {'model.routing.capacity_stages': '1:0.5'}
    save_run(tmp_path / 'staged', from_config(tiny_config(**stages)), step)
    hparams, mesh = taught(tiny_config, tmp_path / 'staged'), make_mesh('data=1')
    if capacity == 1:
        words = 'its capacity is 1 at step 2 of 4; must be 0.25, as at its end'
        assert words in refusal(load_teacher, hparams, mesh, {})
    else:
        found = load_teacher(hparams, mesh, {}).hparams
        assert found.model.routing.capacity == capacity
        shape = hparams.data.batch_size, hparams.data.sequence_length
        assert teacher_flops(hparams) == forward_flops(found, *shape, 'predictor')


def test_a_step_without_its_teacher_is_refused(tiny_config, dense, teacher):
    with pytest.raises(ValueError, match='must get the Teacher of that run'):
        train_step(initial(taught(tiny_config, dense)), make_batch(0))


def on_four_devices(folder, runs):
    """Train on one device and on four, and print the metrics of both."""
    hparams, found = taught(conftest._tiny_config, folder, **WIDE), []
    for mesh_spec in ('data=1', 'fsdp=2,tensor=2'):
        run = loop.train(hparams, f'{runs}/{mesh_spec}', mesh_spec)
        rows = [row for row in read_metrics(run.workdir) if 'loss' in row]
        found.append([(row['loss'], row['teacher_divergence']) for row in rows])
    mesh = make_mesh(mesh_spec)
    variables = load_teacher(hparams, mesh, {}).variables
    shardings = jax.tree.leaves(state_shardings(mesh, variables))
    leaves = jax.tree.leaves(variables)
    placed = [leaf.sharding == to for leaf, to in zip(leaves, shardings, strict=True)]
    print(json.dumps({'rows': found, 'placed': placed}))


@pytest.mark.slow
def test_a_teacher_is_sharded_like_the_model(dense, tmp_path):
    """On four devices the run has the same losses, and the teacher is sharded by the rules."""
    code = 'import sys; from tests.training import teacher_test as test; '
    code += 'test.on_four_devices(*sys.argv[1:])'
    found = on_devices(4, code, str(dense), str(tmp_path))
    np.testing.assert_allclose(*found['rows'], rtol=1e-5)
    assert all(found['placed'])
