"""Rotary frequencies: plain, and as Llama 3.1 lowers them."""

import numpy as np
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.model.layers import apply_rope, rope_frequencies
from tests.model.oracle import frequency


def scaled(tiny_config, text, **knobs):
    knobs |= {'model.rope_scaling': text, 'model.rope_theta': 5e5}
    return from_config(tiny_config(**knobs)).model


@pytest.mark.parametrize('text', ['none', 'llama3:8:1:4:8192', 'llama3:32:1:4:8192'])
def test_frequencies_are_those_of_llama(text, tiny_config):
    """Llama 3.1 and 3.2, by the wavelengths in the reference code; at both ends and between."""
    model = scaled(tiny_config, text)
    frequency_F = np.asarray(rope_frequencies(32, model.rope_theta, model.scaled_rope, 'float32'))
    plain_F = model.rope_theta ** (-np.arange(32) / 32)
    expected_F = np.array([frequency(plain, model) for plain in plain_F])
    np.testing.assert_allclose(frequency_F, expected_F, rtol=1e-5)
    if model.scaled_rope:
        ratio_F = np.round(frequency_F / plain_F, 3)
        least = round(1 / model.scaled_rope.factor, 3)
        assert {1.0, least} < set(ratio_F) and (np.diff(ratio_F) <= 0).all()


def test_scores_depend_only_on_distance(tiny_config):
    """Also far beyond the original context."""
    model = scaled(tiny_config, 'llama3:4:1:4:32')
    rng = np.random.default_rng(0)
    q_BTNH, k_BTNH = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(query, key):
        sides = ((q_BTNH, query), (k_BTNH, key))
        q, k = (
            apply_rope(x, np.array([[at]]), model.rope_theta, model.scaled_rope) for x, at in sides
        )
        return float((q * k).sum())

    for distance in (0, 3, 50):
        expected = score(distance, 0)
        assert abs(score(1000 + distance, 1000) - expected) < 1e-3
    assert abs(score(3, 0) - score(50, 0)) > 0.1
