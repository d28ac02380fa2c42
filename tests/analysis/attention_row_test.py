"""A row of attention: a distribution over what the token may see, and what depth_mass averages."""

import functools

import jax
import numpy as np
import pytest

from moddepth_jax.analysis import attention_row as module
from moddepth_jax.analysis import depth_mass as mass_module
from moddepth_jax.analysis.attention_row import attention_row
from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer

T = 6
TOKENS_T = np.random.default_rng(0).integers(0, 257, T).astype(np.int32)
BATCH = {'tokens_BT': TOKENS_T[None], 'segment_ids_BT': np.ones((1, T), np.int32)}


@pytest.fixture(scope='module', autouse=True)
def fast():
    """Programs that run once are compiled the quick way."""
    options = {'xla_backend_optimization_level': 0}
    with pytest.MonkeyPatch.context() as patch:
        for where, name in ((module, '_visit'), (mass_module, '_layer')):
            slow = getattr(where, name).__wrapped__
            quick = jax.jit(slow, static_argnames=('stack', 'kind'), compiler_options=options)
            patch.setattr(where, name, quick)
        yield


def make_model(tiny_config, **changes):
    hparams = from_config(tiny_config(**{'model.num_layers': 3, **changes}))
    shapes = jax.eval_shape(Transformer(hparams).init, jax.random.key(0), TOKENS_T[None])
    draw = functools.partial(np.random.default_rng(2).normal, scale=0.3)
    return jax.tree.map(lambda leaf: draw(size=leaf.shape).astype(leaf.dtype), shapes), hparams


def test_mean_of_rows_is_depth_mass(tiny_config):
    """Rows sum to 1, see nothing later, and their mean over heads and tokens is the depth mass."""
    variables, hparams = make_model(tiny_config, **{'model.depth.stream': 'moda'})
    rows = [attention_row(variables, hparams, TOKENS_T, 2, place) for place in range(T)]
    for place, row in enumerate(rows):
        total_N = row.sequence_NT.sum(axis=1) + row.slots_NL.sum(axis=1)
        np.testing.assert_allclose(total_N, 1, rtol=1e-6)
        assert not row.sequence_NT[:, place + 1 :].any()
        assert row.sequence_NT[:, : place + 1].all() and row.slots_NL.shape[1] == 4
    mass = depth_mass(variables, hparams, BATCH, 'dense')
    mine_L = np.mean([row.slots_NL.mean(axis=0) for row in rows], axis=0)
    np.testing.assert_allclose(mine_L, mass.slots_LS[2], rtol=1e-4)
    assert mass.depth_L[2] > 0.05
    first = np.mean([row.sequence_NT[:, 0].mean() for row in rows[1:]])
    np.testing.assert_allclose(first, mass.first_token_L[2], rtol=1e-4)


def test_windows_hide(tiny_config):
    """A window of tokens and one of slots leave the newest; without slots there are none."""
    windows = {'model.windows': (2,), 'model.depth.slot_window': 1}
    variables, hparams = make_model(tiny_config, **windows, **{'model.depth.stream': 'moda'})
    row = attention_row(variables, hparams, TOKENS_T, 1, 4)
    assert (row.sequence_NT > 0).any(axis=0).nonzero()[0].tolist() == [3, 4]
    assert (row.slots_NL > 0).any(axis=0).tolist() == [False, True]
    variables, hparams = make_model(tiny_config)
    row = attention_row(variables, hparams, TOKENS_T, 1, 4)
    assert row.slots_NL.shape[1] == 0
    np.testing.assert_allclose(row.sequence_NT.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ('changes', 'layer', 'position', 'message'),
    [
        ({'model.depth.stream': 'attention'}, 0, 0, "stream='attention'.*residual or moda"),
        ({'model.routing.router': 'position'}, 1, 0, r'layer=1.*\[0, 2\]'),
        ({}, 3, 0, r'layer=3.*\[0, 1, 2\]'),
        ({}, 0, T, r'position=6.*\[0, 6\)'),
    ],
)
def test_refuses(tiny_config, changes, layer, position, message):
    """What has no such row is refused by name, before anything is computed."""
    hparams = from_config(tiny_config(**{'model.num_layers': 3, **changes}))
    with pytest.raises(ValueError, match=message):
        attention_row(None, hparams, TOKENS_T, layer, position)
