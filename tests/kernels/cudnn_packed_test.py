"""Packed documents by cuDNN: what it is given, and that its results are mapped to tokens and back.

cuDNN itself is not run. In its place stands what it documents: of every document, by its length and
the place of its first number in memory, plain causal attention, with the logsumexp by document.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cudnn, cudnn_packed, depth_attention
from kernels_pallas.backends import Shapes
from kernels_pallas.joint_softmax import Parts, Static, joint_attention
from kernels_pallas.xla import sequence
from tests.kernels.cases import jit

GROUPED = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason='JAX before 0.11.2 misplaces grouped keys; refused'
)


def of_documents(lengths, offsets, tokens, heads, width):
    """Indices into flat memory [documents, T, heads, width], and which lie inside a document."""
    place = jnp.arange(tokens * heads * width).reshape(tokens, heads, width)
    inside = jnp.arange(tokens)[None] < lengths[:, None]
    return offsets[:, None, None, None] + place[None], inside


class Oracle:
    """Stands for the two primitives that lower to cuDNN's calls, after JAX's own preparation."""

    def __init__(self, way, calls):
        self.way, self.calls = way, calls

    def bind(self, q, k, v, bias, lengths, kv_lengths, offsets, kv_offsets, *rest, **options):
        assert options['mask_type'] == cudnn.fused.MaskType.PADDING_CAUSAL
        assert lengths.dtype == offsets.dtype == jnp.int32
        self.calls.append((self.way, q.shape, lengths.shape))
        batch, tokens, heads, width = q.shape
        documents = lengths.size
        # One offset more than documents: the end of the last one.
        sides = []
        for lengths_BM, offsets_BM, side in (
            (lengths, offsets, q),
            (kv_lengths, kv_offsets, k),
            (kv_lengths, kv_offsets, v),
        ):
            sizes = lengths_BM.reshape(-1), offsets_BM.reshape(-1)[:documents], tokens
            index, inside = of_documents(*sizes, *side.shape[2:])
            sides.append((index, inside, self.read(side, index, inside)))
        (at_q, inside, q_DTNH), (at_k, _, k_DSKH), (_, _, v_DSKH) = sides
        group = heads // k.shape[2]
        repeated = [jnp.repeat(x, group, axis=2) for x in (k_DSKH, v_DSKH)]
        scores = jnp.einsum('dtnh,dsnh->dnts', q_DTNH, repeated[0]) * options['scale']
        seen = jnp.tri(tokens, dtype=bool)[None, None] & inside[:, None, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        if self.way == 'fwd':
            stats = jax.nn.logsumexp(scores, axis=-1)
            weights = jnp.where(inside[:, None, :, None], jnp.exp(scores - stats[..., None]), 0)
            o_DTNH = jnp.einsum('dnts,dsnh->dtnh', weights, repeated[1])
            stats = jnp.where(inside[:, None], stats, jnp.nan)
            return [self.write(q, at_q, inside, o_DTNH), stats]
        _, _, stats, o, do = rest
        o_DTNH, do_DTNH = (self.read(x, at_q, inside) for x in (o, do))
        # What is read beyond a document must do no harm: nothing is masked by rows of queries.
        weights = jnp.where(seen, jnp.exp(scores - stats[..., None]), 0)
        delta = jnp.einsum('dtnh,dtnh->dnt', do_DTNH, o_DTNH)[..., None]
        dweights = jnp.einsum('dtnh,dsnh->dnts', do_DTNH, repeated[1])
        dscores = weights * (dweights - delta) * options['scale']
        dq = jnp.einsum('dnts,dsnh->dtnh', dscores, repeated[0])
        dk = jnp.einsum('dnts,dtnh->dsnh', dscores, q_DTNH)
        dv = jnp.einsum('dnts,dtnh->dsnh', weights, do_DTNH)
        dk, dv = (x.reshape(*k_DSKH.shape[:3], group, -1).sum(3) for x in (dk, dv))
        where = (q, at_q, dq), (k, at_k, dk), (k, at_k, dv)
        return [self.write(whole, index, inside, part) for whole, index, part in where]

    @staticmethod
    def read(whole, index, inside):
        """By document; beyond its end what follows in memory, 9 beyond the array's."""
        del inside
        return jnp.take(whole.reshape(-1), index, mode='fill', fill_value=9.0)

    @staticmethod
    def write(whole, index, inside, part):
        """NaN where no document writes."""
        index = jnp.where(inside[:, :, None, None], index, whole.size)
        nothing = jnp.full(whole.size, jnp.nan, whole.dtype)
        return nothing.at[index].set(part, mode='drop').reshape(whole.shape)


@pytest.fixture
def calls(monkeypatch):
    """Calls of the oracle, (pass, shape of q, shape of the lengths), which takes cuDNN's place."""
    found = []
    for way in ('fwd', 'bwd'):
        monkeypatch.setattr(cudnn.fused, f'_dot_product_attention_{way}_p', Oracle(way, found))
    jax.clear_caches()
    yield found
    jax.clear_caches()


def ids(*rows):
    """Segment ids [B, T] from the lengths of the documents of each row, 0 first."""
    return np.stack([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32)


FIT = {
    'one document a row': ids([24], [24]),
    'length 1 first and last': ids([1, 22, 1], [23, 1]),
    'all of length 1 but one': ids([1, 1, 1, 21], [20, 1, 1, 2]),
    'other numbers of documents': ids([5, 9, 10], [24]),
    'padding': np.repeat([[1, 2, 0], [7, 5, 0]], 8, axis=1).astype(np.int32),
    'edges of blocks': ids([8, 8, 8], [7, 9, 8]),
}
BEYOND = {
    'too many documents': ids([4, 4, 4, 4, 8], [24]),
    'ids that come back': np.tile(np.repeat([3, 5, 3], 8), (2, 1)).astype(np.int32),
}


def mine(mask, *inputs):
    """The joint softmax whose sequence part is cuDNN's."""
    static = Static(0, True, 0, 0.3, False, Parts('cudnn', 'xla'))
    places = jnp.broadcast_to(jnp.arange(24), mask[0].shape)
    slots = inputs[3:], (2, None, None), None
    return joint_attention(static, *inputs[:3], (places, places, *mask), None, *slots)[:2]


def right(mask, *inputs):
    options = {'segment_ids_BT': mask[0], 'key_segment_ids_BS': mask[1], 'num_slots': 2}
    options |= {'scale': 0.3, 'return_lse': True, 'implementation': 'reference'}
    return depth_attention(*inputs, **options)


@functools.cache
def drawn(batch, group):
    """q, k, v and slots, and the output's cotangent."""
    shapes = [(batch, 24, 2 * group, 8), *2 * [(batch, 24, 2, 8)], *2 * [(3, batch, 24, 2, 8)]]
    keys = jax.random.split(jax.random.key(0), 6)
    return [jax.random.normal(*pair) for pair in zip(keys, shapes + shapes[:1], strict=True)]


def program(attention):
    """Output, logsumexp and the gradients of all inputs, of segment ids of queries and keys."""

    def results(mask, *given):
        *inputs, do = given
        (o, lse), pull = jax.vjp(lambda *inputs: attention(mask, *inputs), *inputs)
        return o, lse, *pull((do, jnp.zeros_like(lse)))

    return jit(results)


reference = functools.cache(lambda: program(right))


def compare(results, segments, key_segments, given):
    """In float32 all is as in the reference."""
    found = results((segments, key_segments), *given)
    names = ('o', 'lse', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth')
    for name, x, y in zip(names, found, reference()((segments, key_segments), *given), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5, err_msg=name)


def no_xla(q, k, v, mask, static, *joint):
    """NaN, in the shapes of xla_sequence."""
    del mask, static
    wrong = [x * jnp.nan for x in (q, k, v)]
    return wrong if joint else (wrong[0], jnp.moveaxis(wrong[0][..., 0], 2, 1))


@pytest.mark.parametrize('group', [1, *(pytest.param(g, marks=GROUPED) for g in (2, 3, 8))])
def test_equals_the_reference(group, calls, monkeypatch):
    """Output, joint logsumexp and every gradient; nothing undefined shows; XLA's form is not used.

    What does not fit the layout is not computed by cuDNN: there XLA's NaN shows.
    """
    monkeypatch.setattr(cudnn, 'MOST_DOCUMENTS', 4)
    monkeypatch.setattr(sequence, 'sequence_forward', no_xla)
    monkeypatch.setattr(sequence, 'sequence_backward', no_xla)
    results, given = program(mine), drawn(2, group)
    for segments in FIT.values():
        compare(results, segments, segments, given)
    assert [call[0] for call in calls] == ['fwd', 'bwd']
    for segments in BEYOND.values():
        assert np.isnan(results((segments, segments), *given)[0]).all()
    keys = FIT['edges of blocks']
    assert np.isnan(results((keys, keys[::-1]), *given)[0]).all()


def test_what_does_not_fit_is_exact_in_groups_of_rows(calls, monkeypatch):
    """A batch beyond the workspace goes through in groups, and each takes the form that it can.

    More documents than M, ids that are not contiguous, and keys with other ids take XLA's form.
    """
    monkeypatch.setattr(cudnn, 'MOST_DOCUMENTS', 4)
    monkeypatch.setattr(cudnn, 'WORKSPACE', 2 * 4 * 4 * 2 * 24 * 8)
    results, given = program(mine), drawn(4, 1)
    for segments in BEYOND.values():
        rows = np.concatenate([FIT['edges of blocks'], segments])
        compare(results, rows, rows, given)
    compare(results, rows, rows[::-1].copy(), given)
    assert {(call[1][0], call[2]) for call in calls} == {(2, (2, 4))}


def test_sizes():
    """The workspace is kept to; documents are as many as it allows, up to the most."""
    assert cudnn.packed_sizes(1, 4096, 64, 64) == (16, 1)
    assert cudnn.packed_sizes(8, 4096, 16, 128) == (32, 1)
    assert cudnn.packed_sizes(64, 1024, 12, 64) == (32, 8)
    for batch, length, heads, width in ((6, 97, 3, 56), (32, 2048, 16, 128), (1, 32768, 64, 64)):
        documents, rows = cudnn.packed_sizes(batch, length, heads, width)
        assert batch % rows == 0 and 2 <= documents <= cudnn.MOST_DOCUMENTS
        assert 4 * rows * documents * length * heads * width <= cudnn.WORKSPACE


FINE = Shapes(
    q=(2, 97, 6, 64),
    k=(2, 97, 6, 64),
    num_slots=4,
    dtypes=('bfloat16',),
    ordered=True,
    consecutive=False,
    segments=True,
    window=0,
)


@pytest.mark.parametrize(
    ('change', 'version', 'capability', 'message'),
    [
        ({}, 90600, (9, 0), None),
        ({}, 90600, None, None),
        ({'consecutive': True, 'window': 5}, 91000, (9, 0), 'window=5 with segment ids must be 0'),
        ({}, 91000, (8, 9), 'compute capability 8.9 must be 9.0 or above for segment ids'),
        ({}, 90501, (9, 0), 'cuDNN 90501 must be 90600 or newer for segment ids'),
        (
            {'q': (1, 65536, 64, 64), 'k': (1, 65536, 64, 64)},
            91000,
            (9, 0),
            '2.0 GiB for two documents with segment ids must be at most 1.0',
        ),
    ],
)
def test_refuses(change, version, capability, message, monkeypatch):
    """What the packed layout cannot do is refused in one line, with its value."""
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: version)
    shapes = FINE._replace(**change)
    found = cudnn.unsupported(shapes, capability) or cudnn.missing(shapes, capability)
    assert found == message


def test_jax_that_misplaces_grouped_keys_is_refused(monkeypatch):
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(jax, '__version_info__', (0, 10, 2))
    reason = cudnn.unsupported(FINE._replace(k=(2, 97, 2, 64)), (9, 0))
    assert re.search(r'misplaces 2 key heads of 6 query heads .*: must be 0.11.2', reason)
    assert cudnn.unsupported(FINE, (9, 0)) is None


@pytest.mark.parametrize('group', [1, pytest.param(4, marks=GROUPED)])
def test_lowers_for_cuda(group):
    """Each pass has one call, with the padded causal mask, M documents a row and their lengths."""
    batch, length, kv_heads, width = 2, 97, 2, 64
    heads = kv_heads * group

    def shape(*sides, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sides, dtype)

    q, k = shape(batch, length, heads, width), shape(batch, length, kv_heads, width)
    rows, lse = shape(batch, length, dtype=jnp.int32), shape(batch, heads, length, dtype='float32')
    static = Static(0, True, 0, 0.3, False, Parts('cudnn'))

    def forward(q, k, v, rows):
        return cudnn_packed.sequence_forward(q, k, v, (rows,) * 4, static)

    def backward(q, k, v, rows, o, do, lse, delta):
        return cudnn_packed.sequence_backward(q, k, v, (rows,) * 4, static, o, do, lse, delta)

    def call(function, *arrays):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()
        pattern = r'@__cudnn\$(\w+)\(.*?backend_config = "(.*?[^\\])".*? : \((.*?)\) -> (.*)'
        [(name, options, operands, results)] = re.findall(pattern, text)
        options = json.loads(re.sub(r'\\(22|")', '"', options))['cudnn_fmha_backend_config']
        return name, options, *(re.findall(r'tensor<([\w]+)>', x) for x in (operands, results))

    packed = ['2x32xi32', '2x32xi32', '2x33xi32', '2x33xi32']
    q_type, k_type = f'2x97x{heads}x64xbf16', '2x97x2x64xbf16'
    stats = f'64x{heads}x97xf32'
    found = call(forward, q, k, k, rows)
    assert found[0] == 'fmhaSoftmax' and found[2] == [q_type, k_type, k_type, *packed]
    assert found[3][1] == stats
    other = call(backward, q, k, k, rows, q, q, lse, lse)
    assert other[0] == 'fmhaSoftmaxBackward'
    assert other[2] == [q_type, k_type, k_type, stats, q_type, q_type, *packed]
    for _, options, *_ in (found, other):
        assert options['mask_type'] == 'PADDING_CAUSAL' and options['max_seg_per_batch'] == 32
        assert options['fmha_scale'] == 0.3 and options['sliding_window_length'] == 0
