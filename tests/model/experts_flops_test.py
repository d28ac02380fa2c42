"""FLOPs of experts: by hand, and as traced."""

import jax
import jax.numpy as jnp
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model import flops
from moddepth_jax.training.train_step import init_state, train_step

TOKEN = {
    'model.experts.choice': 'token',
    'model.experts.num_routed': 4,
    'model.experts.d_ff': 16,
}
ROUTED = {'model.routing.router': 'learned', 'model.routing.capacity': 0.25}
KINDS = {
    'token': TOKEN,
    'sigmoid, no shared expert': TOKEN
    | {'model.experts.scores': 'sigmoid', 'model.experts.num_shared': 0},
    'every choice': TOKEN | {'model.experts.top_k': 4},
    'second layer only': TOKEN | {'model.experts.layers': '1'},
    'integrated': TOKEN | {'model.experts.num_noop': 4},
    'row capacity': TOKEN | {'model.experts.row_capacity': 3},
    'row capacity beside no-op experts': TOKEN
    | {'model.experts.row_capacity': 7, 'model.experts.num_noop': 4},
    'expert choice': TOKEN | {'model.experts.choice': 'expert'},
    'staged': TOKEN | ROUTED,
    'staged, experts choose': TOKEN | ROUTED | {'model.experts.choice': 'expert'},
}


@pytest.mark.parametrize(
    ('name', 'shared', 'scored', 'pairs'),
    [
        ('token', 2 * 32, 2 * 32 * 4, 2 * 64),
        ('sigmoid, no shared expert', 0, 2 * 32 * 4, 2 * 64),
        ('every choice', 2 * 32, 2 * 32 * 4, 2 * 128),
        ('second layer only', 32, 32 * 4, 64),
        ('integrated', 2 * 32, 2 * 32 * 8, 2 * 32),
        ('row capacity', 2 * 32, 2 * 32 * 4, 2 * 12),
        ('row capacity beside no-op experts', 2 * 32, 2 * 32 * 8, 2 * 28),
        ('expert choice', 2 * 32, 2 * 32 * 4, 2 * 4 * 16),
        ('staged', 32 + 8, (32 + 8) * 4, 64 + 16),
        ('staged, experts choose', 32 + 8, (32 + 8) * 4, 4 * 16 + 4 * 4),
    ],
)
def test_breakdown_is_the_sum_by_hand(name, shared, scored, pairs, tiny_config):
    """Tokens of shared experts, scores and pairs of routed ones, by two layers of a row of 32.

    Without experts 2 layers cost a mlp each; where only one has them, the other keeps its own.
    """
    D, F, F_e, T = 32, 64, 16, 32
    hparams = from_config(tiny_config(**KINDS[name]))
    parts = flops.forward_breakdown(hparams, 3, T)
    plain_mlp = 2 * T * 3 * D * F if name == 'second layer only' else 0
    assert parts['mlp'] == 3 * (plain_mlp + 6 * D * F_e * shared)
    assert parts['expert_router'] == 3 * 2 * D * scored
    assert parts['experts'] == 3 * 6 * D * F_e * pairs
    dense = tiny_config(**KINDS[name] | {'model.experts.choice': 'none'})
    without = flops.forward_breakdown(from_config(dense), 3, T)
    own = ('mlp', 'expert_router', 'experts')
    assert {k: v for k, v in parts.items() if k not in own} == {
        k: v for k, v in without.items() if k not in own
    }
    assert without['experts'] == without['expert_router'] == 0


def test_empty_places_by_hand(tiny_config):
    """Half of the choices do nothing at balance; of 28 places of a row 28 are full, of 12 12."""
    empty = {name: 0 for name in KINDS} | {'integrated': 2 * 32}
    for name, places in empty.items():
        hparams = from_config(tiny_config(**KINDS[name]))
        assert flops.empty_place_flops(hparams, 3, 32) == 3 * 6 * 32 * 16 * places, name


def test_ragged_products_of_known_programs():
    """A row meets one matrix of the three, in the product and in both of its gradients."""
    x, w, sizes = jnp.zeros((12, 5)), jnp.zeros((3, 5, 7)), jnp.array([4, 0, 8])

    def loss(x, w):
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(x, w, sizes)))

    product = 2 * 12 * 5 * 7
    for program, products in ((loss, 1), (jax.grad(loss), 2), (jax.grad(loss, argnums=(0, 1)), 3)):
        traced = jax.make_jaxpr(program)(x, w)
        assert flops.dot_general_flops(traced) == products * product


FEW = ('token', 'integrated', 'expert choice')
SLOW = [name for name in KINDS if name not in FEW]


@pytest.mark.parametrize(
    'name', [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_counted_flops_are_those_of_the_traced_step(name, tiny_config):
    """The count is the step's products within 1%, empty places and hidden pairs left out."""
    shape = {
        'model.num_layers': 3,
        'model.remat': 'none',
        'model.attention': 'reference',
        'model.experts.product': 'ragged_dot',
        'model.routing.predictor_width': 0,
        'data.sequence_length': 64,
    }
    hparams = from_config(tiny_config(**shape | KINDS[name]))
    state = jax.eval_shape(lambda: init_state(hparams, 10))
    row = jax.ShapeDtypeStruct((hparams.data.batch_size, 64), 'int32')
    batch = dict.fromkeys(('tokens_BT', 'labels_BT', 'segment_ids_BT'), row)
    traced = flops.dot_general_flops(jax.make_jaxpr(train_step)(state, batch))
    rows = (hparams.data.batch_size, 64)
    empty = 3 * flops.empty_place_flops(hparams, *rows)
    hidden = 3 * flops.masked_attention_flops(hparams, *rows)
    counted = flops.train_step_flops(hparams)
    assert traced - hidden - empty == pytest.approx(counted, rel=0.01)
    assert flops.forward_breakdown(hparams, 1, 64)['experts'] > 0.02 * counted / (3 * rows[0])
    assert (empty > 0.02 * counted) == (name == 'integrated')
