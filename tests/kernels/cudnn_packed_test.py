"""Packed documents by cuDNN: what it is given, and that its results are mapped to tokens and back.

cuDNN itself is not run. In its place stands what it documents: of every document, by its length and
the place of its first number in memory, plain causal attention, with the logsumexp by document.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cudnn, cudnn_packed, depth_attention, xla_sequence
from kernels_pallas.choice import Shapes
from kernels_pallas.joint import Parts, Static, joint_attention

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


CASES = {
    'one document a row': ids([24], [24]),
    'length 1 first and last': ids([1, 22, 1], [23, 1]),
    'all of length 1 but one': ids([1, 1, 1, 21], [20, 1, 1, 2]),
    'other numbers of documents': ids([5, 9, 10], [24], [12, 12]),
    'padding': np.concatenate([1 + ids([8, 9]), np.zeros((1, 7), np.int32)], axis=1),
    'edges of blocks': ids([8, 8, 8], [7, 9, 8]),
}
BEYOND = {
    'too many documents': ids([4, 4, 4, 4, 8], [24]),
    'ids that come back': np.tile(np.repeat([3, 5, 3], 8), (2, 1)).astype(np.int32),
}


def compare(segments, group, monkeypatch, key_segments=None):
    """All results of a joint softmax through cuDNN's part, against the reference, in float32."""
    monkeypatch.setattr(cudnn, 'MOST_DOCUMENTS', 4)
    batch, length = segments.shape
    kv_heads, width, slots = 2, 8, 3
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(batch, length, kv_heads * group, width), *2 * [(batch, length, kv_heads, width)]]
    shapes += 2 * [(slots, batch, length, kv_heads, width)] + shapes[:1]
    *inputs, do = (jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True))
    places = np.broadcast_to(np.arange(length), (batch, length))
    key_segments = segments if key_segments is None else key_segments

    def mine(*inputs):
        static = Static(0, True, 0, 0.3, False, Parts('cudnn', 'xla'))
        masks = (places, places, segments, key_segments)
        slots = inputs[3:], (2, None, None), None
        return joint_attention(static, *inputs[:3], masks, None, *slots)[:2]

    def right(*inputs):
        options = {'num_slots': 2, 'scale': 0.3, 'segment_ids_BT': segments, 'return_lse': True}
        options |= {'key_segment_ids_BS': key_segments, 'implementation': 'reference'}
        return depth_attention(*inputs, **options)

    def results(attention):
        (o, lse), pull = jax.vjp(jax.jit(attention), *inputs)
        return o, lse, *pull((do, jnp.zeros_like(lse)))

    names = ('o', 'lse', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth')
    for name, x, y in zip(names, results(mine), results(right), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize('name', CASES)
def test_equals_the_reference(name, calls, monkeypatch):
    """Output, joint logsumexp and every gradient; nothing undefined shows."""
    monkeypatch.setattr(xla_sequence, 'sequence_forward', no_xla)
    monkeypatch.setattr(xla_sequence, 'sequence_backward', no_xla)
    compare(CASES[name], 1, monkeypatch)
    assert [call[0] for call in calls] == ['fwd', 'bwd']


def no_xla(q, k, v, mask, static, *joint):
    """NaN, in the shapes of xla_sequence, where its branch is not to be taken."""
    del mask, static
    wrong = [x * jnp.nan for x in (q, k, v)]
    return wrong if joint else (wrong[0], jnp.moveaxis(wrong[0][..., 0], 2, 1))


@GROUPED
@pytest.mark.parametrize('group', [2, 3, 8])
def test_grouped_keys(group, calls, monkeypatch):
    """Keys are found by the number of their own heads."""
    monkeypatch.setattr(xla_sequence, 'sequence_forward', no_xla)
    monkeypatch.setattr(xla_sequence, 'sequence_backward', no_xla)
    compare(CASES['other numbers of documents'], group, monkeypatch)
    assert calls


@pytest.mark.parametrize('name', BEYOND)
def test_what_does_not_fit_is_exact(name, calls, monkeypatch):
    """More documents than M, and ids that are not contiguous, take XLA's form."""
    compare(BEYOND[name], 1, monkeypatch)


def test_other_ids_of_keys_are_exact(calls, monkeypatch):
    """Keys whose ids are not those of their queries take XLA's form."""
    compare(CASES['edges of blocks'], 1, monkeypatch, ids([8, 8, 8], [8, 8, 8]))


def test_groups_of_rows(calls, monkeypatch):
    """A batch beyond the workspace goes through in groups; each chooses its form by itself."""
    monkeypatch.setattr(cudnn, 'WORKSPACE', 2 * 4 * 4 * 2 * 24 * 8)
    rows = np.concatenate([CASES['edges of blocks'], BEYOND['too many documents']])
    compare(rows, 1, monkeypatch)
    assert {call[1][0] for call in calls} == {2}
    assert {call[2] for call in calls} == {(2, 4)}


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
    assert cudnn.unsupported(FINE._replace(**change), capability) == message


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
        return cudnn_packed.sequence_backward(
            q, k, v, (rows,) * 4, static, o, do, lse, delta
        )

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


def test_gradient_of_a_long_row_is_of_its_own_document():
    """Documents are told apart by their first tokens, which are T for what is no document."""
    index_BT, starts, fit = cudnn_packed._documents(jnp.asarray(CASES['padding']), 4)
    assert starts.tolist() == [[0, 8, 17, 24, 24]] and bool(fit)
    assert index_BT[0].tolist() == 8 * [0] + 9 * [1] + 7 * [2]
