"""The sequence part by cuDNN: its calls have the right arguments, and these are the right calls.

cuDNN itself is not run here: its calls are lowered for CUDA, and a stand-in does what cuDNN
documents: of every document, by its length and the place of its first number in memory, plain
causal attention, with the logsumexp by document.
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
from tests.kernels.cases import USUAL
from tests.kernels.hopper import shape

GROUPED = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason='JAX before 0.11.2 misplaces grouped keys; refused'
)
HOPPER = Device('gpu', 'NVIDIA H200', (9, 0))


def lower(function, *arrays):
    """Return options, operand types and result types of the one call to cuDNN in a program."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()
    pattern = r'@__cudnn\$(\w+)\(.*?backend_config = "(.*?[^\\])".*? : \((.*?)\) -> (.*)'
    [(name, options, operands, results)] = re.findall(pattern, text)
    options = json.loads(re.sub(r'\\(22|")', '"', options))['cudnn_fmha_backend_config']
    types = [re.findall(r'tensor<([\w]+)>', side) for side in (operands, results)]
    return name, options, *types


def passes(window=0, packed=False):
    """Return both passes as functions of q, k, v, segment ids and the joint results."""
    static = Static(window, True, 0, 0.3, False, Parts('cudnn'))

    def run(function, q, k, v, ids, *joint):
        mask = SequenceMask(ids, ids, *((ids, ids) if packed else (None, None)))
        return function(q, k, v, mask, static, *joint)

    functions = cudnn.sequence_forward, cudnn.sequence_backward
    return [functools.partial(run, function) for function in functions]


@pytest.mark.parametrize(
    ('G', 'H', 'dtype', 'window', 'packed'),
    [
        (1, 64, 'bfloat16', 0, False),
        (3, 128, 'bfloat16', 40, False),
        (8, 64, 'float16', 40, False),
        (1, 64, 'bfloat16', 0, True),
        pytest.param(4, 64, 'bfloat16', 0, True, marks=GROUPED),
    ],
)
def test_lowers_for_cuda(G, H, dtype, window, packed):
    """Each pass is one call with our mask, window, scale and documents, and lse in float32."""
    forward, backward = passes(window, packed)
    q, k, lse = shape(2, 97, 2 * G, H, dtype=dtype), shape(2, 97, 2, H, dtype=dtype), (2, 2 * G, 97)
    ids, lse = shape(2, 97, dtype='int32'), shape(*lse, dtype='float32')
    name = dtype.replace('bfloat', 'bf').replace('float', 'f')
    q_type, k_type = f'2x97x{2 * G}x{H}x{name}', f'2x97x2x{H}x{name}'
    stats = f'{64 if packed else 2}x{2 * G}x97xf32'
    documents = ['2x32xi32', '2x32xi32', '2x33xi32', '2x33xi32'] * packed
    found = lower(forward, q, k, k, ids)
    assert found[0] == 'fmhaSoftmax' and found[3][1] == stats
    assert found[2] == [q_type, k_type, k_type, *documents]
    other = lower(backward, q, k, k, ids, q, q, lse, lse)
    assert other[0] == 'fmhaSoftmaxBackward'
    assert other[2] == [q_type, k_type, k_type, stats, q_type, q_type, *documents]
    for _, options, *_ in (found, other):
        assert options['mask_type'] == ('PADDING_CAUSAL' if packed else 'CAUSAL')
        assert options['max_seg_per_batch'] == (32 if packed else 1)
        assert options['fmha_scale'] == 0.3 and options['dropout_rate'] == 0
        assert options['sliding_window_length'] == window


FINE = USUAL._replace(q=(2, 97, 6, 64), k=(2, 97, 2, 64), num_slots=4, window=5)
PACKED = FINE._replace(k=FINE.q, consecutive=False, segments=True, window=0)
WIDE = {'q': (2, 97, 6, 256), 'k': (2, 97, 2, 256)}
LARGE = {'q': (1, 65536, 64, 64), 'k': (1, 65536, 64, 64)}


@pytest.mark.parametrize(
    ('shapes', 'changes', 'capability', 'message'),
    [
        (FINE, {'dtypes': ('float32',)}, (9, 0), 'dtypes float32 must all be bfloat16 or all fl'),
        (FINE, {'q': (2, 97, 6, 60)}, (9, 0), 'head width 60 must be divisible by 8 and at most'),
        (FINE, WIDE, (8, 0), 'head width 256 must be'),
        (FINE, {'k': (2, 98, 2, 64)}, (9, 0), '98 keys must be as many as the 97 queries'),
        (FINE, {'ordered': False}, (9, 0), 'given positions must ascend'),
        (FINE, {'segments': True}, (9, 0), 'window=5 with segment ids must be 0'),
        (FINE, {'consecutive': False}, (9, 0), 'window=5 counts indices'),
        (FINE, {}, (7, 5), 'compute capability 7.5 must be 8.0 or above'),
        (PACKED, {}, (8, 9), 'compute capability 8.9 must be 9.0 or above for segment ids'),
        (PACKED, LARGE, (9, 0), '2.0 GiB for two documents with segment ids must be at most 1.0'),
        *((shapes, {}, (9, 0), None) for shapes in (FINE, PACKED)),
        (FINE, {'window': 0, 'consecutive': False}, (9, 0), None),
        (FINE, WIDE, (9, 0), None),
        (PACKED, {'k': FINE.k}, (9, 0), 'jax .* misplaces 2 key heads of 6 .*: must be 0.11.2'),
    ],
)
def test_unsupported_calls_are_refused(shapes, changes, capability, message, monkeypatch):
    """The reason has the value, and the devices of this process are not queried."""
    monkeypatch.setattr(cudnn.jax, 'devices', None)
    monkeypatch.setattr(jax, '__version_info__', (0, 10, 2))
    found = cudnn.unsupported(shapes._replace(**changes), Device('gpu', 'a GPU', capability))
    assert (found is message) if message is None else re.match(message, found)


def test_an_old_or_missing_cudnn_is_refused(monkeypatch):
    """A local device's library is inspected; if it is missing, JAX says so."""
    local = HOPPER._replace(local=True)
    monkeypatch.setattr(cudnn.fused, 'cuda_versions', None)
    assert 'cuDNN is not detected' in cudnn.unsupported(FINE, local)
    for version, message in ((90600, None), (90501, 'cuDNN 90501 must be 90600 or newer for segm')):
        monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda version=version: version)
        assert (cudnn.unsupported(PACKED, local) or '').startswith(message or '')
        assert cudnn.unsupported(FINE, local) is None


@pytest.mark.parametrize('index', [0, 1])
def test_an_unknown_jax_is_refused(monkeypatch, index):
    """Its private module is not called. If the first line fails, read it and extend cudnn.py."""
    assert cudnn.changed() is None
    monkeypatch.setattr(cudnn, 'KNOWN_JAX', ((0, 9), (0, 10)))
    x, lse = jnp.zeros((1, 8, 1, 8), jnp.bfloat16), jnp.zeros((1, 1, 8))
    message = re.escape(f'jax {jax.__version__}: kernels_pallas/cudnn.py')
    joint = (x, x, lse, lse) if index else ()
    with pytest.raises(ValueError, match=message):
        passes()[index](x, x, x, jnp.zeros((1, 8), int), *joint)
    assert re.search(message, cudnn.unsupported(FINE, HOPPER))


class Oracle:
    """Stands in for the two primitives that lower to cuDNN's calls, after JAX's preparation."""

    def __init__(self, way, calls):
        self.way, self.calls = way, calls

    def bind(self, q, k, v, bias, lengths, kv_lengths, offsets, kv_offsets, *rest, **options):
        self.calls.append((self.way, q.shape, lengths.shape))
        batch, tokens, heads, _ = q.shape
        if options['mask_type'] == cudnn.fused.MaskType.CAUSAL:
            lengths = kv_lengths = jnp.full(batch, tokens)
            offsets, kv_offsets = (jnp.arange(batch) * side[0].size for side in (q, k))
        else:
            assert lengths.dtype == offsets.dtype == jnp.int32
        sides = []
        for ends, begins, side in ((lengths, offsets, q), (kv_lengths, kv_offsets, k)):
            # There is one more offset than documents: the end of the last one.
            begins = begins.reshape(-1)[: ends.size, None, None, None]
            inside = jnp.arange(tokens)[None] < ends.reshape(-1)[:, None]
            sides.append((begins + jnp.arange(side[0].size).reshape(side.shape[1:])[None], inside))
        (at_q, inside), (at_k, _) = sides
        q_DTNH, k_DSKH, v_DSKH = self.read(q, at_q), self.read(k, at_k), self.read(v, at_k)
        group = heads // k.shape[2]
        k_DSNH, v_DSNH = (jnp.repeat(x, group, axis=2) for x in (k_DSKH, v_DSKH))
        scores = jnp.einsum('dtnh,dsnh->dnts', q_DTNH, k_DSNH) * options['scale']
        seen = jnp.tri(tokens, dtype=bool)[None, None] & inside[:, None, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        if self.way == 'fwd':
            stats = jax.nn.logsumexp(scores, axis=-1)
            weights = jnp.where(inside[:, None, :, None], jnp.exp(scores - stats[..., None]), 0)
            o_DTNH = jnp.einsum('dnts,dsnh->dtnh', weights, v_DSNH)
            stats = jnp.where(inside[:, None], stats, jnp.nan)
            return [self.write(q, at_q, inside, o_DTNH), stats]
        _, _, stats, o, do = rest
        o_DTNH, do_DTNH = (self.read(x, at_q) for x in (o, do))
        # Queries are not masked, so what is read beyond a document must do no harm.
        weights = jnp.where(seen, jnp.exp(scores - stats[..., None]), 0)
        delta = jnp.einsum('dtnh,dtnh->dnt', do_DTNH, o_DTNH)[..., None]
        dweights = jnp.einsum('dtnh,dsnh->dnts', do_DTNH, v_DSNH)
        dscores = weights * (dweights - delta) * options['scale']
        dq = jnp.einsum('dnts,dsnh->dtnh', dscores, k_DSNH)
        dk = jnp.einsum('dnts,dtnh->dsnh', dscores, q_DTNH)
        dv = jnp.einsum('dnts,dtnh->dsnh', weights, do_DTNH)
        dk, dv = (x.reshape(*k_DSKH.shape[:3], group, -1).sum(3) for x in (dk, dv))
        where = (q, at_q, dq), (k, at_k, dk), (k, at_k, dv)
        return [self.write(whole, index, inside, part) for whole, index, part in where]

    @staticmethod
    def read(whole, index):
        """Return x by document; after its end what follows in memory, and 9 after the array."""
        return jnp.take(whole.reshape(-1), index, mode='fill', fill_value=9.0)

    @staticmethod
    def write(whole, index, inside, part):
        """Return results by token, NaN where no document writes."""
        index = jnp.where(inside[:, :, None, None], index, whole.size)
        nothing = jnp.full(whole.size, jnp.nan, whole.dtype)
        return nothing.at[index].set(part, mode='drop').reshape(whole.shape)


@pytest.fixture
def calls(monkeypatch):
    """Replace cuDNN by the stand-in; yields its calls: (pass, shape of q, shape of lengths)."""
    found = []
    for way in ('fwd', 'bwd'):
        monkeypatch.setattr(cudnn.fused, f'_dot_product_attention_{way}_p', Oracle(way, found))
    monkeypatch.setattr(cudnn, 'MAX_DOCUMENTS', 4)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def ids(*rows):
    """Return segment ids [B, T], from 0, by the lengths of each row's documents."""
    return np.stack([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32)


FIT = {
    'one document a row': ids([24], [24]),
    'length 1 first and last': ids([1, 22, 1], [23, 1]),
    'all of length 1 but one': ids([1, 1, 1, 21], [20, 1, 1, 2]),
    'padding': np.repeat([[1, 2, 0], [7, 5, 0]], 8, axis=1).astype(np.int32),
    'edges of blocks': ids([8, 8, 8], [7, 9, 8]),
}
BEYOND = {
    'too many documents': ids([4, 4, 4, 4, 8], [24]),
    'ids that come back': np.tile(np.repeat([3, 5, 3], 8), (2, 1)).astype(np.int32),
}


@functools.cache
def drawn(batch, group, slots=3):
    """Return q, k, v and slots, and the cotangents of output and logsumexp."""
    q, k, slot = (batch, 24, 2 * group, 8), (batch, 24, 2, 8), (slots, batch, 24, 2, 8)
    shapes = [q, k, k, slot, slot, q, (batch, 2 * group, 24)]
    keys = [*jax.random.split(jax.random.key(0), 6), jax.random.key(1)]
    return [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]


def program(by_cudnn, dlse=False):
    """Return output, logsumexp and all gradients, by segment ids of queries and keys.

    The joint softmax whose sequence part is cuDNN's, or the reference.
    """

    def attention(mask, *inputs):
        if not by_cudnn:
            options = {'segment_ids_BT': mask[0], 'key_segment_ids_BS': mask[1], 'num_slots': 2}
            options['key_positions_BS'] = jnp.broadcast_to(jnp.arange(24), inputs[1].shape[:2])
            options |= {'scale': 0.3, 'return_lse': True, 'implementation': 'reference'}
            return depth_attention(*inputs, **options)
        static = Static(0, True, 0, 0.3, dlse, Parts('cudnn', 'xla'))
        places = jnp.broadcast_to(jnp.arange(24), inputs[0].shape[:2])
        mask, slots = SequenceMask(places, places, *mask), Slots(*inputs[3:], 2)
        return joint_attention(static, *inputs[:3], mask, None, slots, None)[:2]

    def results(segments, key_segments, *given):
        *inputs, do, dlse_BNT = given
        mask = segments, key_segments
        (o, lse), pull = jax.vjp(lambda *inputs: attention(mask, *inputs), *inputs)
        return o, lse, *pull((do, dlse_BNT * dlse))

    return jax.jit(results)


def compare(results, right, segments, key_segments, given):
    """Everything equals the reference in float32."""
    found, expected = (run(segments, key_segments, *given) for run in (results, right))
    names = ('o', 'lse', 'dq', 'dk', 'dv', 'dk_depth', 'dv_depth')
    for name, x, y in zip(names, found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5, err_msg=name)


def no_xla(q, k, v, mask, static, *joint):
    """Return NaN in the shapes of xla.sequence."""
    del mask, static
    wrong = [x * jnp.nan for x in (q, k, v)]
    return wrong if joint else (wrong[0], jnp.moveaxis(wrong[0][..., 0], 2, 1))


@pytest.mark.parametrize('group', [1, *(pytest.param(g, marks=GROUPED) for g in (3, 8))])
def test_equals_the_reference(group, calls, monkeypatch):
    """Output, joint logsumexp and every gradient are right, without undefined values or XLA's form.

    What does not fit the layout is not computed by cuDNN: there XLA's NaN shows.
    """
    monkeypatch.setattr(sequence, 'sequence_forward', no_xla)
    monkeypatch.setattr(sequence, 'sequence_backward', no_xla)
    results, right, given = program(True), program(False), drawn(2, group)
    for segments in FIT.values():
        compare(results, right, segments, segments, given)
    assert [call[0] for call in calls] == ['fwd', 'bwd']
    for segments in BEYOND.values():
        assert np.isnan(results(segments, segments, *given)[0]).all()
    keys = FIT['edges of blocks']
    assert np.isnan(results(keys, keys[::-1], *given)[0]).all()


@pytest.mark.parametrize('dlse', [False, True])
def test_a_backend_without_lse_cotangents_does_not_lose_them(dlse, calls):
    """cuDNN's backward pass takes no dlse, so XLA's replaces it."""
    compare(program(True, dlse), program(False, dlse), None, None, drawn(2, 1))
    assert [call[0] for call in calls] == ['fwd', *['bwd'] * (not dlse)]


def test_what_does_not_fit_is_exact_in_groups_of_rows(calls, monkeypatch):
    """A batch beyond the workspace runs in groups, each in the form that supports it.

    More documents than M, ids that are not contiguous, and keys with other ids take XLA's form.
    """
    monkeypatch.setattr(cudnn, 'WORKSPACE', 2 * 4 * 4 * 2 * 24 * 8)
    results, right, given = program(True), program(False), drawn(4, 1)
    for segments in BEYOND.values():
        rows = np.concatenate([FIT['edges of blocks'], segments])
        compare(results, right, rows, rows, given)
    compare(results, right, rows, rows[::-1].copy(), given)
    assert {(call[1][0], call[2]) for call in calls} == {(2, (2, 4))}
