"""A feature that is off, or in its initial state, leaves the plain model unchanged, in float64."""

import jax
import numpy as np
import pytest

from moddepth_jax.conversion.transfer_params import check_convertible, transfer_params
from tests.model.cases import (
    ALL_LOOKED_UP,
    ALL_LOOPED,
    ATTENTION_SLOT,
    CONSTRAINED,
    EMBEDDED,
    HEAD_NORM,
    HYPER,
    LOOPED,
    MASKED,
    MIXED,
    MODA,
    MUDD,
    POST,
    REORDERED,
    ROUTED,
    SMALL_BT,
    SMALL_SEGMENTS_BT,
    SOURCES,
    SOURCES_OF_2,
    SOURCES_OF_3,
    STATIC,
    STATIC_WAYS,
    UNROLLED,
    VALUES,
    WINDOWS,
    by_name,
    gradient,
    parameters,
    random_variables,
    routed_by,
    small_hparams,
    with_leaves,
)

# Without epsilon, a norm removes the factor between the mean and the sum of sources.
EXACT = {'model.dtype': 'float64', 'model.norm_eps': 1e-30}
# Its scores do not depend on that factor.
BY_POSITION = routed_by('position', 'threshold') | {'model.routing.capacity': 0.5}
EVERY = {'model.routing.layers': 'every:1'}
DENSE = HEAD_NORM | WINDOWS


def sources_of(size):
    return SOURCES | {'model.depth.sublayers_per_source': size}


def streams(form, number):
    return form | {'model.depth.num_streams': number}


# How to turn a feature off: (values of leaves by the end of their path, or None to keep the
# initial values; names of new leaves that then have no gradient, or None not to check that).
BLEND = {'residual_scale': 1, 'embedding_scale': 0}, ()
TABLES = {'value_embedding/embedding': 0}, ('gate',)  # without a table the gate is a factor of 0
FIRST_VALUES = {'weights': [0, 1]}, ()
QUERIES = {'query': 0}, ('scale',)
START_OF_WAYS = None, ('inner',)  # W_1 waits for W_2
START_OF_STREAMS = None, ('read_scale', 'mix_scale', 'add_scale')  # projections are 0
# The last mixture keeps the mean, and only the mean is read. Weights are rounded to float32.
START_OF_MEANS = None, None
# Streams that are equal stay equal under any mixture, and a norm removes the factor of any read.
# These logits are far apart, so that the rows of the mixture sum to 1 but its columns do not.
FAR_LOGITS = {'add_bias': 0, 'mix_bias': np.random.default_rng(0).normal(size=(4, 4)) * 8}
FAR_LOGITS |= {f'projections_{name}/kernel': 0 for name in ('read', 'mix', 'add')}
EQUAL_STREAMS = FAR_LOGITS, None
# name: (knobs of both models, knobs of the feature, how to turn it off)
FEATURES = {
    'embedding residual': (HEAD_NORM, EMBEDDED, BLEND),
    'embedding residual, unrolled': (UNROLLED, EMBEDDED, BLEND),
    'embedding residual, routed': (ROUTED, EMBEDDED, BLEND),
    'embedding residual, looped': (LOOPED, EMBEDDED, BLEND),
    'embedding residual, masked': (MODA | ROUTED | MASKED, EMBEDDED, BLEND),
    'embedding residual, values': (VALUES | ROUTED, EMBEDDED, BLEND),
    'embedding residual, mixed values': (MIXED, EMBEDDED, BLEND),
    'value embeddings': (HEAD_NORM, ALL_LOOKED_UP, TABLES),
    'value embeddings, unrolled': (UNROLLED, ALL_LOOKED_UP, TABLES),
    'value embeddings, routed': (ROUTED, ALL_LOOKED_UP, TABLES),
    'value embeddings, post': (ROUTED | POST, ALL_LOOKED_UP, TABLES),
    'value embeddings, looped': (LOOPED, ALL_LOOKED_UP, TABLES),
    'value embeddings, slots': (MODA | ATTENTION_SLOT | ROUTED, ALL_LOOKED_UP, TABLES),
    'value embeddings, values': (VALUES | ROUTED, ALL_LOOKED_UP, TABLES),
    'value embeddings, mixed values': (MIXED, ALL_LOOKED_UP, TABLES),
    'value embeddings, hyper-connections': (HYPER, ALL_LOOKED_UP, TABLES),
    'value embeddings, mudd': (MUDD, ALL_LOOKED_UP, TABLES),
    'value residual': (HEAD_NORM, VALUES, FIRST_VALUES),
    'value residual, routed': (ROUTED, VALUES, FIRST_VALUES),
    'attention residual, dense': (DENSE, SOURCES, QUERIES),
    'attention residual, unrolled': (UNROLLED, SOURCES_OF_2, QUERIES),
    'attention residual, unrolled, one source': (UNROLLED, sources_of(8), QUERIES),
    'attention residual, routed': (BY_POSITION, SOURCES_OF_3, QUERIES),
    'attention residual, routed, full': (BY_POSITION, SOURCES, QUERIES),
    'attention residual, routed, of 4': (BY_POSITION, sources_of(4), QUERIES),
    'attention residual, all routed': (BY_POSITION | EVERY, SOURCES_OF_2, QUERIES),
    'attention residual, all routed, of 3': (BY_POSITION | EVERY, SOURCES_OF_3, QUERIES),
    'mudd': (DENSE, MUDD, START_OF_WAYS),
    'mudd, unrolled': (UNROLLED | POST, MUDD, START_OF_WAYS),
    'mudd, one way': (REORDERED, MUDD | {'model.depth.mudd_ways': 'one'}, START_OF_WAYS),
    'mudd, static': ({}, STATIC_WAYS | {'model.depth.mudd_ways': 'qv'}, START_OF_WAYS),
    'mudd, looped': (ALL_LOOPED, MUDD, START_OF_WAYS),
    'hyper-connections': (DENSE, streams(HYPER, 4), START_OF_STREAMS),
    'hyper-connections, static': ({}, streams(STATIC, 3), START_OF_STREAMS),
    'hyper-connections, one stream': ({}, streams(HYPER, 1), START_OF_STREAMS),
    'mhc': ({}, streams(CONSTRAINED, 4), START_OF_MEANS),
    'mhc, one stream': ({}, streams(CONSTRAINED, 1), START_OF_MEANS),
    'mhc, any mixture': ({}, streams(CONSTRAINED, 4), EQUAL_STREAMS),
    # Without a norm, a reader also depends on the sum of the weights.
    'mhc, reordered': (REORDERED, CONSTRAINED, START_OF_MEANS),
    'mhc, routed': (ROUTED, CONSTRAINED, START_OF_MEANS),
}
FAST = ('embedding residual, routed', 'value embeddings, routed', 'value residual, routed')
FAST += ('attention residual, routed', 'mudd', 'hyper-connections')


@pytest.mark.parametrize('name', parameters(FAST, FEATURES))
def test_a_feature_that_is_off_changes_nothing(name, tiny_config):
    """Logits and common gradients are equal. New parameters have gradients as well."""
    knobs, feature, (off, waiting) = FEATURES[name]
    with jax.enable_x64(True), jax.numpy_rank_promotion('allow'):
        plain, other = (small_hparams(tiny_config, knobs, EXACT, some) for some in ({}, feature))
        variables = random_variables(other, SMALL_BT)
        shared, new = transfer_params(other.model, variables['params'], plain)
        assert not new
        if off is None:
            if not plain.model.routed_layers:
                check_convertible(plain, other)
            params, _ = transfer_params(plain.model, shared, other)
            params = jax.tree.map(np.float64, params)
        else:
            params = with_leaves(variables['params'], off)
        expected_BTV, expected = gradient(plain, variables | {'params': shared})
        logits_BTV, slopes = gradient(other, variables | {'params': params})
    real_BT = SMALL_SEGMENTS_BT > 0
    exact = 1e-5 if (off, waiting) == START_OF_MEANS else 1e-9
    np.testing.assert_allclose(logits_BTV[real_BT], expected_BTV[real_BT], rtol=exact, atol=exact)
    slopes, expected = by_name(other, slopes), by_name(plain, expected)
    close = {'rtol': 100 * exact, 'atol': exact / 100}
    for key, leaf in expected.items():
        np.testing.assert_allclose(slopes.pop(key), leaf, **close, err_msg=str(key))
    assert slopes
    for (block, end), leaf in slopes.items() if waiting is not None else ():
        # The first sublayer of attention residuals reads one source, with weight 1.
        alone = block == 0 and end.endswith("['attention_connection']['query']")
        waits = any(end.endswith(f"['{leaf_name}']") for leaf_name in waiting)
        assert np.any(leaf) != (waits or alone), (block, end)
