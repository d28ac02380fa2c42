"""The sequence part by cuDNN: what is asked of it, and that it is the right thing to ask for.

cuDNN itself is not run here: its calls are lowered for CUDA, with its version check stubbed. For
packed documents a stand-in does what cuDNN documents: of every document, by its length and the
place of its first number in memory, plain causal attention, with the logsumexp by document.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import cudnn, depth_attention
from kernels_pallas.backends import Device, Parts
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static, joint_attention
from kernels_pallas.xla import sequence
from tests.kernels.cases import USUAL, jit
from tests.kernels.hopper import shape

GROUPED = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason='JAX before 0.11.2 misplaces grouped keys; refused'
)
HOPPER = Device('gpu', 'NVIDIA H200', (9, 0))


@pytest.fixture
def installed(monkeypatch):
    """As on a machine that has cuDNN."""
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)


def lower(function, *arrays):
    """The backend's options, operand types and result types of the one call to cuDNN."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()
    pattern = r'@__cudnn\$(\w+)\(.*?backend_config = "(.*?[^\\])".*? : \((.*?)\) -> (.*)'
    [(name, options, operands, results)] = re.findall(pattern, text)
    options = json.loads(re.sub(r'\\(22|")', '"', options))['cudnn_fmha_backend_config']
    types = [re.findall(r'tensor<([\w]+)>', side) for side in (operands, results)]
    return name, options, *types


@pytest.mark.parametrize(
    ('G', 'H', 'dtype', 'window'),
    [(1, 64, jnp.bfloat16, 0), (3, 128, jnp.bfloat16, 40), (8, 64, jnp.float16, 40)],
)
def test_lowers_for_cuda(installed, G, H, dtype, window):
    """Both passes become a call with our mask, window and scale, and the logsumexp in float32."""
    B, T, K = 2, 97, 2
    q, k = shape(B, T, K * G, H, dtype=dtype), shape(B, T, K, H, dtype=dtype)
    lse = shape(B, K * G, T, dtype=jnp.float32)
    static = {'window': window, 'scale': 0.3}
    forward = functools.partial(cudnn.forward, **static)
    backward = functools.partial(cudnn.backward, **static)
    o, found_lse = jax.eval_shape(forward, q, k, k)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (found_lse.shape, found_lse.dtype) == (lse.shape, lse.dtype)
    gradients = jax.eval_shape(backward, q, k, k, q, lse, q)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, k)]
    name = jnp.dtype(dtype).name.replace('bfloat', 'bf').replace('float', 'f')
    by_head = f'{B}x{K * G}x{T}xf32'
    q_type, k_type = f'{B}x{T}x{K * G}x{H}x{name}', f'{B}x{T}x{K}x{H}x{name}'
    forward_call = lower(forward, q, k, k)
    backward_call = lower(backward, q, k, k, q, lse, q)
    assert forward_call[0] == 'fmhaSoftmax' and backward_call[0] == 'fmhaSoftmaxBackward'
    assert forward_call[2] == [q_type, k_type, k_type]
    assert forward_call[3][1] == by_head
    assert backward_call[2] == [q_type, k_type, k_type, by_head, q_type, q_type]
    for _, options, *_ in (forward_call, backward_call):
        assert options['mask_type'] == 'CAUSAL' and options['sliding_window_length'] == window
        assert options['fmha_scale'] == 0.3 and options['dropout_rate'] == 0
        assert options['max_seg_per_batch'] == 1


def test_gives_cudnn_lse_output_and_cotangent_in_their_order(installed):
    """The backward call's operands are q, k, v, lse, do, o: o and do have one type."""
    x, lse = shape(1, 8, 1, 8), shape(1, 1, 8, dtype=jnp.float32)
    backward = functools.partial(cudnn.backward, window=0, scale=1.0)
    jaxpr = jax.make_jaxpr(backward)(x, x, x, x, lse, x)
    [call] = [e for e in jaxpr.jaxpr.eqns if 'dot_product_attention' in e.primitive.name]
    q, k, v, o, given_lse, do = jaxpr.jaxpr.invars
    assert [*call.invars[:3], *call.invars[10:13]] == [q, k, v, given_lse, o, do]


FINE = USUAL._replace(q=(2, 97, 6, 64), k=(2, 97, 2, 64), num_slots=4, window=5)
PACKED = FINE._replace(k=FINE.q, consecutive=False, segments=True, window=0)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'dtypes': ('float32',)}, 'dtypes float32 must all be bfloat16 or all float16'),
        ({'dtypes': ('bfloat16', 'float32')}, 'dtypes bfloat16, float32 must all'),
        ({'q': (2, 97, 6, 60)}, 'head width 60 must be divisible by 8 and at most'),
        ({'q': (2, 97, 6, 264)}, 'head width 264 must be .* at most 256'),
        ({'k': (2, 98, 2, 64)}, '98 keys must be as many as the 97 queries'),
        ({'k': (2, 0, 2, 64)}, '0 keys must be'),
        ({'ordered': False}, 'positions must ascend'),
        ({'segments': True}, 'window=5 with segment ids'),
        ({'consecutive': False}, 'window=5 counts indices'),
    ],
)
def test_unsupported_calls_are_refused(change, message):
    """What cuDNN would not compute, or not as it is meant, is refused with its value."""
    assert re.match(f'.*{message}', cudnn.unsupported(FINE._replace(**change), HOPPER))


def test_capability_is_that_of_the_device(monkeypatch):
    """Nothing is asked of the devices of this process. Odd lengths and any groups are supported."""
    monkeypatch.setattr(cudnn.jax, 'devices', None)
    assert cudnn.unsupported(FINE, HOPPER) is None
    assert cudnn.unsupported(FINE._replace(window=0, consecutive=False), HOPPER) is None
    wide = FINE._replace(q=(2, 97, 6, 256), k=(2, 97, 2, 256))
    assert cudnn.unsupported(wide, HOPPER) is None
    older, oldest = (HOPPER._replace(capability=x) for x in ((8, 0), (7, 5)))
    assert 'head width 256 must be' in cudnn.unsupported(wide, older)
    assert cudnn.unsupported(FINE, oldest) == 'compute capability 7.5 must be 8.0 or above'


@pytest.mark.parametrize(
    ('change', 'version', 'capability', 'message'),
    [
        ({}, 90600, (9, 0), None),
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
def test_unsupported_documents_are_refused(change, version, capability, message, monkeypatch):
    """What the packed layout cannot do, or this version of cuDNN, is named with its value."""
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: version)
    device = HOPPER._replace(capability=capability, local=True)
    assert cudnn.unsupported(PACKED._replace(**change), device) == message


def test_a_machine_without_cudnn_is_refused(monkeypatch):
    """JAX itself says so when it is asked for the version."""
    monkeypatch.setattr(cudnn.fused, 'cuda_versions', None)
    assert 'cuDNN is not detected' in cudnn.unsupported(FINE, HOPPER._replace(local=True))


def test_jax_that_misplaces_grouped_keys_is_refused(monkeypatch):
    monkeypatch.setattr(jax, '__version_info__', (0, 10, 2))
    reason = cudnn.unsupported(PACKED._replace(k=(2, 97, 2, 64)), HOPPER)
    assert re.search(r'misplaces 2 key heads of 6 query heads .*: must be 0.11.2', reason)
    assert cudnn.unsupported(PACKED, HOPPER) is None


def test_jax_is_as_expected():
    """Fails when a new JAX changes its private module: then look at it, and extend cudnn.py."""
    assert cudnn.changed() is None


@pytest.mark.parametrize('way', ['fwd', 'bwd'])
def test_a_changed_jax_is_refused(installed, monkeypatch, way):
    """A function with other parameters is not called; the error names the version of JAX."""
    name = f'_dot_product_attention_{way}_impl'
    monkeypatch.setattr(cudnn.fused, name, lambda query, key, value: query)
    x, lse = jnp.zeros((1, 8, 1, 8), jnp.bfloat16), jnp.zeros((1, 1, 8))
    message = re.escape(f'in jax {jax.__version__}; kernels_pallas/cudnn.py')
    with pytest.raises(ValueError, match=message):
        cudnn.forward(x, x, x, 0, 1.0)
    with pytest.raises(ValueError, match=message):
        cudnn.backward(x, x, x, x, lse, x, 0, 1.0)
    assert re.search(message, cudnn.unsupported(FINE, HOPPER))


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
    mask, slots = SequenceMask(places, places, *mask), Slots(*inputs[3:], 2)
    return joint_attention(static, *inputs[:3], mask, None, slots, None)[:2]


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
    """NaN, in the shapes of xla.sequence."""
    del mask, static
    wrong = [x * jnp.nan for x in (q, k, v)]
    return wrong if joint else (wrong[0], jnp.moveaxis(wrong[0][..., 0], 2, 1))


@pytest.mark.parametrize('group', [1, *(pytest.param(g, marks=GROUPED) for g in (2, 3, 8))])
def test_equals_the_reference(group, calls, monkeypatch):
    """Output, joint logsumexp and every gradient; nothing undefined shows; XLA's form is not used.

    What does not fit the layout is not computed by cuDNN: there XLA's NaN shows.
    """
    monkeypatch.setattr(cudnn, 'MAX_DOCUMENTS', 4)
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
    monkeypatch.setattr(cudnn, 'MAX_DOCUMENTS', 4)
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
        assert batch % rows == 0 and 2 <= documents <= cudnn.MAX_DOCUMENTS
        assert 4 * rows * documents * length * heads * width <= cudnn.WORKSPACE


@pytest.mark.parametrize('group', [1, pytest.param(4, marks=GROUPED)])
def test_documents_lower_for_cuda(group):
    """Each pass has one call, with the padded causal mask, M documents a row and their lengths."""
    batch, length, kv_heads, width = 2, 97, 2, 64
    heads = kv_heads * group

    q, k = shape(batch, length, heads, width), shape(batch, length, kv_heads, width)
    rows, lse = shape(batch, length, dtype=jnp.int32), shape(batch, heads, length, dtype='float32')
    static = Static(0, True, 0, 0.3, False, Parts('cudnn'))

    def forward(q, k, v, rows):
        return cudnn.sequence_forward(q, k, v, SequenceMask(*(rows,) * 4), static)

    def backward(q, k, v, rows, o, do, lse, delta):
        mask = SequenceMask(*(rows,) * 4)
        return cudnn.sequence_backward(q, k, v, mask, static, o, do, lse, delta)

    packed = ['2x32xi32', '2x32xi32', '2x33xi32', '2x33xi32']
    q_type, k_type = f'2x97x{heads}x64xbf16', '2x97x2x64xbf16'
    stats = f'64x{heads}x97xf32'
    found = lower(forward, q, k, k, rows)
    assert found[0] == 'fmhaSoftmax' and found[2] == [q_type, k_type, k_type, *packed]
    assert found[3][1] == stats
    other = lower(backward, q, k, k, rows, q, q, lse, lse)
    assert other[0] == 'fmhaSoftmaxBackward'
    assert other[2] == [q_type, k_type, k_type, stats, q_type, q_type, *packed]
    for _, options, *_ in (found, other):
        assert options['mask_type'] == 'PADDING_CAUSAL' and options['max_seg_per_batch'] == 32
        assert options['fmha_scale'] == 0.3 and options['sliding_window_length'] == 0


T, N, H, L = 24, 2, 8, 5
SCALE = H**-0.5


def plain_forward(q, k, v):
    """Causal attention, and its logsumexp."""
    scores = jnp.einsum('tnh,snh->nts', q, k) * SCALE
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum('nts,snh->tnh', jnp.exp(scores - lse[..., None]), v), lse


def plain_backward(q, k, v, o, lse, do):
    """What the backward pass of any fused attention computes, cuDNN's too."""
    scores = jnp.einsum('tnh,snh->nts', q, k) * SCALE
    weights = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None], jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.einsum('tnh,tnh->nt', do, o)
    dscores = weights * (jnp.einsum('tnh,snh->nts', do, v) - delta[..., None]) * SCALE
    dq, dk = jnp.einsum('nts,snh->tnh', dscores, k), jnp.einsum('nts,tnh->snh', dscores, q)
    return dq, dk, jnp.einsum('nts,tnh->snh', weights, do)


def slots_forward(q, kd, vd):
    scores = jnp.einsum('tnh,ltnh->ntl', q, kd) * SCALE
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum('ntl,ltnh->tnh', jnp.exp(scores - lse[..., None]), vd), lse


def merged(sequence, q, kd, vd):
    """One softmax out of two, by their logsumexps."""
    (o, lse), (o_slots, lse_slots) = sequence, slots_forward(q, kd, vd)
    joint = jnp.logaddexp(lse, lse_slots)
    keep, add = (jnp.exp(x - joint).T[..., None] for x in (lse, lse_slots))
    return o * keep + o_slots * add, joint


def random_inputs():
    shapes = 3 * [(T, N, H)] + 2 * [(L, T, N, H)] + [(T, N, H)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def true_gradients(q, k, v, kd, vd, do):
    """Of k and v, whose gradients come from the sequence's part alone."""

    def joint(k, v):
        return merged(plain_forward(q, k, v), q, kd, vd)[0]

    return jax.vjp(joint, k, v)[1](do)


def distance(found, true):
    return float(jnp.linalg.norm(found - true) / jnp.linalg.norm(true))


@pytest.mark.slow
def test_the_stock_backward_pass_takes_the_joint_softmax():
    """Given the joint output and logsumexp it yields the sequence's part of the true gradients."""
    q, k, v, kd, vd, do = random_inputs()
    o, lse = merged(plain_forward(q, k, v), q, kd, vd)
    dq, dk, dv = plain_backward(q, k, v, o, lse, do)
    true_dk, true_dv = true_gradients(q, k, v, kd, vd, do)
    assert distance(dk, true_dk) < 1e-5 and distance(dv, true_dv) < 1e-5

    def queries_apart(q_sequence, q_slots):
        return merged(plain_forward(q_sequence, k, v), q_slots, kd, vd)[0]

    true_dq, _ = jax.vjp(queries_apart, q, q)[1](do)
    assert distance(dq, true_dq) < 1e-5
    # Its own output and logsumexp would not do.
    wrong_dk = plain_backward(q, k, v, *plain_forward(q, k, v), do)[1]
    assert distance(wrong_dk, true_dk) > 0.05


@pytest.mark.slow
def test_the_public_residual_is_a_trap():
    """A merge by the logsumexp of jax.nn.dot_product_attention is right, its gradient is not.

    JAX drops the cotangent of that residual silently. When this fails, JAX may have fixed it: then
    cudnn.py can use the public function.
    """
    q, k, v, kd, vd, do = random_inputs()

    def public(k, v):
        o, lse = jax.nn.dot_product_attention(
            q[None], k[None], v[None], is_causal=True, implementation='xla', return_residual=True
        )
        return merged((o[0], lse[0].T), q, kd, vd)[0]

    o, vjp = jax.vjp(public, k, v)
    assert distance(o, merged(plain_forward(q, k, v), q, kd, vd)[0]) < 1e-5
    true_dk, true_dv = true_gradients(q, k, v, kd, vd, do)
    dk, dv = vjp(do)
    assert distance(dv, true_dv) < 1e-5
    assert distance(dk, true_dk) > 0.05
