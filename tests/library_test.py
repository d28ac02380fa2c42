"""`moddepth_jax` as a library: its names, and `route` with a user's block."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moddepth_jax

B, T, D, C = 3, 12, 8, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
SCORES = RNG.normal(size=(B, T)).astype(np.float32)
SEGMENTS = np.array([[1] * 12, [1] * 5 + [2] * 7, [1] * 3 + [0] * 9])


def test_names_are_imported_at_their_first_use():
    """`import moddepth_jax` lists the names without importing JAX. Unknown names raise an error."""
    code = 'import moddepth_jax, sys; print("jax" in sys.modules)'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert out.stdout == 'False\n'
    for name in ('route', 'select_top_c', 'depth_attention', 'from_config', 'Transformer'):
        assert callable(getattr(moddepth_jax, name)) and name in dir(moddepth_jax)
        assert getattr(moddepth_jax, name).__doc__
    with pytest.raises(AttributeError, match='no attribute'):
        _ = moddepth_jax.nothing


def attend(x_BCD, tokens):
    """Causal attention within documents with positions in its keys: a user's block."""
    positions_BC, ids_BC = tokens.positions_BT, tokens.segment_ids_BT
    keys_BCD = x_BCD * (1 + jnp.sin(positions_BC))[..., None]
    seen_BCC = positions_BC[:, :, None] >= positions_BC[:, None]
    seen_BCC &= (ids_BC[:, :, None] == ids_BC[:, None]) & (ids_BC > 0)[:, None]
    logits_BCC = jnp.where(seen_BCC, x_BCD @ jnp.swapaxes(keys_BCD, 1, 2), -1e30)
    return nn.softmax(logits_BCC) @ x_BCD


def masked_form(chosen_BT, gates_BT):
    """Compute the same over all tokens, by a loop over rows and a mask of the chosen."""
    y_BTD = X.copy()
    for b in range(B):
        at = np.flatnonzero(chosen_BT[b])
        if at.size:
            tokens = moddepth_jax.model.routing.TokenInfo(at[None], SEGMENTS[b, at][None])
            y_BTD[b, at] += gates_BT[b, at, None] * np.asarray(attend(X[b, at][None], tokens))[0]
    return y_BTD


def top_c(scores_BT, real_BT):
    chosen_BT = np.zeros((B, T), bool)
    for b in range(B):
        best = sorted(np.flatnonzero(real_BT[b]), key=lambda t: (-scores_BT[b, t], t))[:C]
        chosen_BT[b, best] = True
    return chosen_BT


@pytest.mark.parametrize('causal', [False, True])
def test_route_is_the_masked_form(causal):
    """Selected tokens get the gated output of a block that sees only them. Others keep bits."""
    wanted_BT = SCORES > 0.1 if causal else None
    run = jax.jit(
        lambda x, r: moddepth_jax.route(
            attend, x, r, C, gate=jnp.tanh, wanted_BT=wanted_BT, segment_ids_BT=SEGMENTS
        )
    )
    y_BTD, selection = run(X, SCORES)
    real_BT = SEGMENTS > 0
    chosen_BT = top_c(SCORES, real_BT)
    if causal:
        wanted_BT = wanted_BT & real_BT
        chosen_BT = wanted_BT & (wanted_BT.cumsum(1) <= C)
        np.testing.assert_array_equal(selection.dropped_BT, wanted_BT & ~chosen_BT)
        assert selection.dropped_BT.any()
    np.testing.assert_array_equal(selection.selected_BT, chosen_BT)
    assert selection.indices_BC.shape == (B, C)
    expected_BTD = masked_form(chosen_BT, np.tanh(SCORES))
    np.testing.assert_allclose(y_BTD, expected_BTD, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(y_BTD)[~chosen_BT], X[~chosen_BT])


def test_padding_keeps_its_bits_if_it_is_more_than_the_rest():
    """Regression: top-C handed padding to the block: NaN from it stayed, and -0.0 became 0.0."""

    def block_fn(x_BCD, tokens):
        return jnp.where(tokens.segment_ids_BT[..., None] > 0, x_BCD, jnp.nan)

    x_BTD = np.where(SEGMENTS[..., None] > 0, X, np.float32(-0.0))
    y_BTD, selection = moddepth_jax.route(
        block_fn, x_BTD, SCORES, 8, gate=None, segment_ids_BT=SEGMENTS
    )
    expected_BTD = np.where(selection.selected_BT[..., None], 2 * x_BTD, x_BTD)
    np.testing.assert_array_equal(np.asarray(y_BTD).view(np.int32), expected_BTD.view(np.int32))
    assert (np.asarray(selection.indices_BC)[2, 3:] >= T).all()


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        *(
            ({'capacity': capacity}, rf'capacity={capacity} must lie in \[1, {T}\], as a static')
            for capacity in (0, T + 1, 0.125)
        ),
        ({'capacity': T + 1, 'wanted_BT': SCORES > 0}, f'capacity={T + 1} must lie'),
        ({'scores_BT': SCORES[..., None]}, r'scores_BT of shape \(3, 12, 1\) must have .*12\), t'),
        ({'scores_BT': SCORES[:1]}, r'scores_BT of shape \(1, 12\)'),
        ({'positions_BT': np.arange(T)}, r'positions_BT of shape \(12,\)'),
        ({'segment_ids_BT': SEGMENTS[:, 1:]}, r'segment_ids_BT of shape \(3, 11\)'),
        ({'wanted_BT': SEGMENTS}, 'wanted_BT of dtype int64 must be bool'),
        (
            {'block_fn': lambda x, _: x[..., :1]},
            r'\(3, 4, 1\); .*shape \(3, 4, 8\)',
        ),
        ({'block_fn': lambda x, _: (x, 0)}, 'block_fn returned tuple'),
    ],
)
def test_route_refuses_what_does_not_fit(changes, words):
    """Regression: some of it was broadcast or selected nothing; the rest gave a traceback."""
    given = {'block_fn': attend, 'x_BTD': X, 'scores_BT': SCORES, 'capacity': C} | changes
    with pytest.raises(ValueError, match=words):
        moddepth_jax.route(**given)


@pytest.mark.parametrize('wrong', ['a config', 'hparams.model'])
def test_a_model_needs_hparams(wrong, tiny_config):
    config = tiny_config()
    given = config if wrong == 'a config' else moddepth_jax.from_config(config).model
    with pytest.raises(ValueError, match='type .*: must be Hparams, as from_config returns'):
        moddepth_jax.Transformer(given).init(jax.random.key(0), np.zeros((1, 4), int))


@pytest.mark.parametrize('wanted_BT', [None, SCORES > 0])
def test_a_mesh_whose_axes_are_explicit_is_refused(wanted_BT):
    """Regression: under such a mesh, JAX's default, `route` failed deep inside a vmap."""
    mesh = jax.sharding.AbstractMesh((2,), ('data',), (jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(ValueError, match=r"\('data',\) of type Explicit: must be Auto; make"):
            jax.eval_shape(lambda: moddepth_jax.route(attend, X, SCORES, C, wanted_BT=wanted_BT))
