"""A step is a pure function that learns, refuses what is not finite, and is traced once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.checkpoint import state_sha256
from moddepth_jax.training.train_step import init_state, train_step

FAST = {'xla_backend_optimization_level': 0}  # these tests compile longer than they compute
NUM_STEPS = 40
RARE = 256  # a token that no batch holds unless a test puts it there
ROUTED = {
    'model.num_layers': 1,
    'model.routing.router': 'learned',
    'model.routing.layers': '0',
    'model.routing.capacity': 0.25,
    'optimizer.warmup_fraction': 0.0,
    'optimizer.learning_rate': 0.01,
    'optimizer.clip_norm': 1e6,  # on, but never reached: gradients can be read off the optimizer
    'optimizer.z_loss': 0.02,  # large enough to be seen in a gradient
}


def make_batch(seed, rows=4, length=32):
    """Two documents a row, no ignored label."""
    tokens_BT = np.random.default_rng(seed).integers(0, 64, (rows, length + 1)).astype(np.int32)
    segment_ids_BT = np.ones((rows, length), np.int32)
    segment_ids_BT[:, length // 3 :] = 2
    return {
        'tokens_BT': tokens_BT[:, :-1].copy(),
        'labels_BT': tokens_BT[:, 1:].copy(),
        'segment_ids_BT': segment_ids_BT,
    }


def initial(hparams):
    return jax.jit(lambda: init_state(hparams, NUM_STEPS), compiler_options=FAST)()


def trained_part(state):
    return {'params': state.params, 'optimizer_state': state.optimizer_state}


class Counted:
    """The train step jitted, without donation, with the number of its traces."""

    def __init__(self):
        self.traces = 0
        self.jitted = jax.jit(self.step, compiler_options=FAST)

    def step(self, state, batch):
        self.traces += 1
        return train_step(state, batch)


@pytest.fixture(scope='module')
def hparams(tiny_config):
    return from_config(tiny_config(**ROUTED))


@pytest.fixture(scope='module')
def state(hparams):
    return initial(hparams)


@pytest.fixture(scope='module')
def counted():
    return Counted()


@pytest.fixture(scope='module')
def step(counted):
    return counted.jitted


def test_state_before_step_0_follows_from_the_seed(tiny_config):
    """Equal hyper-parameters give equal states, another seed another; counters are 0."""
    first, again, other = (
        initial(from_config(tiny_config(**{'model.num_layers': 1}, seed=seed)))
        for seed in (0, 0, 1)
    )
    assert state_sha256(first) == state_sha256(again)
    assert state_sha256(first.params) != state_sha256(other.params)
    assert (first.step, first.skipped, first.skipped_in_a_row) == (0, 0, 0)


def test_step_is_pure_and_deterministic(state, step):
    """Twice the same step gives the same bits and leaves its input as it was."""
    before = state_sha256(state)
    first, metrics = step(state, make_batch(0))
    again, metrics_again = step(state, make_batch(0))
    other, _ = step(state, make_batch(1))
    assert state_sha256(first) == state_sha256(again) != state_sha256(other)
    assert state_sha256(metrics) == state_sha256(metrics_again)
    assert state_sha256(state) == before
    assert first.step == 1


def test_loss_falls_on_a_repeated_batch_in_one_trace(state, counted):
    """Thirty steps on one batch cut its loss to less than half; all steps share one trace."""
    seen = []
    for _ in range(30):
        state, metrics = counted.jitted(state, make_batch(0))
        seen.append(float(metrics['loss']))
    assert abs(seen[0] - np.log(257)) < 0.1
    assert seen[-1] < 0.5 * seen[0]
    assert counted.traces == 1
    assert (state.step, state.skipped) == (30, 0)


def losses_by_hand(hparams, params, batch):
    """(loss, z_loss, rule_loss), and each rule logit's slope in the last, in float64.

    The first two are means over targets whose label is not -100, the third over real tokens.
    """
    logits_BTV, records = Transformer(hparams).apply(
        {'params': params}, batch['tokens_BT'], batch['segment_ids_BT']
    )
    logits_BTV = np.asarray(logits_BTV, np.float64)
    counted_BT = batch['labels_BT'] != -100
    log_z_BT = np.log(np.exp(logits_BTV).sum(-1))
    labels_BT1 = np.maximum(batch['labels_BT'], 0)[..., None]
    nll_BT = log_z_BT - np.take_along_axis(logits_BTV, labels_BT1, -1)[..., 0]
    z_loss = hparams.optimizer.z_loss * (log_z_BT[counted_BT] ** 2).mean()
    chance_LBT = 1 / (1 + np.exp(-np.asarray(records.routing.rule_logits_BT, np.float64)))
    rule_LBT = -np.log(np.where(records.routing.top_c_BT, chance_LBT, 1 - chance_LBT))
    real_BT = batch['segment_ids_BT'] > 0
    slopes = (chance_LBT - records.routing.top_c_BT)[:, real_BT]
    return (nll_BT[counted_BT].mean(), z_loss, rule_LBT[:, real_BT].mean()), slopes


def gradient(state):
    """Of the first step from `state`: AdamW's running mean is then (1 - b1) times it."""
    mean = optax.tree_utils.tree_get(state.optimizer_state, 'mu')
    return jax.tree.map(lambda leaf: leaf / (1 - state.hparams.optimizer.b1), mean)


def test_losses_and_their_gradient_by_hand(hparams, state, step):
    """loss, z_loss and rule_loss equal their definitions on the model's own logits in float64.

    Their sum is what is descended: the head's gradient is the slope of the first two along it, the
    predictor's bias has the mean slope of the third.
    """
    batch = make_batch(2)
    batch['labels_BT'][0, 5:9] = -100
    batch['segment_ids_BT'][3, 20:] = 0
    batch['labels_BT'][3, 20:] = -100
    after, metrics = step(state, batch)
    by_hand, slopes = losses_by_hand(hparams, state.params, batch)
    for name, value in zip(('loss', 'z_loss', 'rule_loss'), by_hand, strict=True):
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    gradients = gradient(after)
    bias = gradients['stack']['run_0']['layer_0']['predictor']['out']['bias']
    np.testing.assert_allclose(bias, [[slopes.mean()]], rtol=1e-4)

    slope_DV = gradients['head']['kernel']
    # The second direction moves all logits of a token alike: only the z-loss sees it.
    alike_DV = jnp.broadcast_to(slope_DV.mean(1, keepdims=True), slope_DV.shape)
    for direction_DV in (slope_DV, alike_DV):
        direction_DV = direction_DV / optax.tree.norm(direction_DV)

        def total(distance, direction_DV=direction_DV):
            kernel_DV = state.params['head']['kernel'] + distance * direction_DV
            params = state.params | {'head': {'kernel': kernel_DV}}
            (loss, z_loss, _), _ = losses_by_hand(hparams, params, batch)
            return loss + z_loss

        expected = float(jnp.sum(slope_DV * direction_DV))
        np.testing.assert_allclose((total(0.1) - total(-0.1)) / 0.2, expected, rtol=2e-2)
        assert expected > 1e-3


def test_labels_of_padding_do_not_count(state, step):
    """Padding masks a target whatever its label: loss and step are those of the label -100."""
    padded, ignored = make_batch(3), make_batch(3)
    for batch in (padded, ignored):
        batch['segment_ids_BT'][1:3, 10:] = 0
    ignored['labels_BT'] = np.where(ignored['segment_ids_BT'] == 0, -100, ignored['labels_BT'])
    first, metrics = step(state, padded)
    second, expected = step(state, ignored)
    np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-6)
    assert state_sha256(first) == state_sha256(second)


@pytest.fixture(scope='module')
def in_four_parts(hparams):
    """state, batch -> the same step in four micro-batches of a row each."""
    training = dataclasses.replace(hparams.training, accumulate_steps=4)
    jitted = jax.jit(train_step, compiler_options=FAST)
    divided = dataclasses.replace(hparams, training=training)
    return lambda state, batch: jitted(state.replace(hparams=divided), batch)


def full_rows(batch):
    del batch


def ignored_labels(batch):
    batch['labels_BT'][0, 3:] = batch['labels_BT'][1] = batch['labels_BT'][2, ::2] = -100


def padding(batch):
    ignored_labels(batch)
    batch['segment_ids_BT'][0, 4:] = batch['segment_ids_BT'][1] = 0


@pytest.mark.parametrize('spoil', [full_rows, ignored_labels, padding])
def test_micro_batches_do_not_change_the_step(state, step, in_four_parts, spoil):
    """Four micro-batches give the loss, gradient and routing of the whole batch.

    Also where their rows hold unequal numbers of ignored labels or of padding, one nothing else.
    """
    batch = make_batch(4)
    spoil(batch)
    whole, metrics = step(state, batch)
    parts, metrics_parts = in_four_parts(state, batch)
    assert (whole.skipped, parts.skipped) == (0, 0)
    for name in ('loss', 'z_loss', 'rule_loss', 'grad_norm'):
        np.testing.assert_allclose(metrics_parts[name], metrics[name], rtol=1e-5, err_msg=name)
    for name, values in metrics['routing'].items():
        np.testing.assert_allclose(metrics_parts['routing'][name], values, rtol=1e-5, err_msg=name)
    pairs = zip(jax.tree.leaves(gradient(whole)), jax.tree.leaves(gradient(parts)), strict=True)
    for one, four in pairs:
        np.testing.assert_allclose(four, one, rtol=1e-4, atol=1e-5 * float(jnp.abs(one).max()))


@pytest.mark.parametrize('parts', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_chunks_of_the_loss_do_not_change_the_step(hparams, state, step, parts):
    """In chunks of 25 tokens, the last one padded, losses and gradients are those of all at once.

    To 1e-6, with ignored labels and padding, and in micro-batches too.
    """
    batch = make_batch(4)
    padding(batch)
    both = []
    for chunk in (0, 25):
        training = dataclasses.replace(hparams.training, loss_chunk=chunk, accumulate_steps=parts)
        changed = dataclasses.replace(hparams, training=training)
        both.append(step(state.replace(hparams=changed), batch))
    (at_once, metrics), (in_chunks, metrics_chunks) = both
    for name in ('loss', 'z_loss', 'rule_loss', 'grad_norm'):
        np.testing.assert_allclose(metrics_chunks[name], metrics[name], rtol=1e-6, err_msg=name)
    pairs = zip(*(jax.tree.leaves(gradient(after)) for after in (at_once, in_chunks)), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6 * float(jnp.abs(one).max()))


@pytest.fixture(scope='module')
def fragile(state):
    """A state that is finite but for the embedding of the token RARE."""
    embedding_VD = state.params['embedding'].at[RARE].set(jnp.nan)
    return state.replace(params=state.params | {'embedding': embedding_VD})


def bad_batch(seed):
    batch = make_batch(seed)
    batch['tokens_BT'][2, 7] = RARE
    return batch


def test_a_step_that_is_not_finite_changes_nothing_but_counters(fragile, step):
    """Parameters and optimizer keep every bit, skips are counted, and training goes on as before.

    The good step after two bad ones equals the one that would have followed without them.
    """
    first, _ = step(fragile, make_batch(0))
    assert (first.skipped, first.skipped_in_a_row) == (0, 0)
    before = state_sha256(trained_part(first))
    assert before != state_sha256(trained_part(fragile))
    state = first
    for skips in (1, 2):
        state, metrics = step(state, bad_batch(skips))
        assert not np.isfinite(metrics['loss'])
        assert (metrics['skipped'], metrics['skipped_in_a_row']) == (skips, skips)
        assert (state.step, state.skipped, state.skipped_in_a_row) == (1 + skips, skips, skips)
        assert state_sha256(trained_part(state)) == before
    state, metrics = step(state, make_batch(5))
    assert (state.step, state.skipped, state.skipped_in_a_row) == (4, 2, 0)
    assert (metrics['skipped'], metrics['skipped_in_a_row']) == (2, 0)
    assert np.isfinite(metrics['loss'])
    directly, _ = step(first, make_batch(5))
    assert state_sha256(trained_part(state)) == state_sha256(trained_part(directly)) != before


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped(state, step):
    """Logits of 1e20 have a finite loss, but their squared log-partition overflows: no step."""
    norm = {'scale': state.params['final_norm']['scale'] * 1e22}
    state = state.replace(params=state.params | {'final_norm': norm})
    after, metrics = step(state, make_batch(0))
    assert np.isfinite(metrics['loss']) and not np.isfinite(metrics['grad_norm'])
    assert state_sha256(trained_part(after)) == state_sha256(trained_part(state))
    assert (after.step, after.skipped, after.skipped_in_a_row) == (1, 1, 1)


def test_the_learning_rate_reported_is_the_one_applied(fragile, step):
    """After skipped steps too: AdamW's first update moves a norm scale by just that rate."""
    state = fragile
    for seed in range(8):
        state, _ = step(state, bad_batch(seed))
    after, metrics = step(state, make_batch(0))
    moved = after.params['final_norm']['scale'] - state.params['final_norm']['scale']
    np.testing.assert_allclose(jnp.abs(moved).max(), metrics['learning_rate'], rtol=1e-3)


def test_bfloat16_computes_and_float32_is_kept(hparams, state, step):
    """Under bfloat16 the loss is near that of float32 and not equal; what is stored is float32."""
    model = dataclasses.replace(hparams.model, dtype='bfloat16')
    lower = state.replace(hparams=dataclasses.replace(hparams, model=model))
    jitted = jax.jit(train_step, compiler_options=FAST)
    _, exact = step(state, make_batch(0))
    seen = []
    for _ in range(10):
        lower, metrics = jitted(lower, make_batch(0))
        seen.append(float(metrics['loss']))
    assert seen[0] != exact['loss'] and abs(seen[0] - exact['loss']) < 0.01 * exact['loss']
    assert seen[-1] < 0.9 * seen[0] and lower.skipped == 0
    for leaf in jax.tree.leaves(trained_part(lower)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


def test_donated_state_is_used_up_and_nothing_else_changes(state, step):
    """Under donation the step gives the same bits, and every buffer of its input is gone."""
    donating = jax.jit(train_step, donate_argnums=0, compiler_options=FAST)
    given = jax.tree.map(jnp.copy, state)
    after, _ = donating(given, make_batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    expected, _ = step(state, make_batch(0))
    assert state_sha256(after) == state_sha256(expected)
    again, _ = donating(after, make_batch(1))
    assert again.step == 2
