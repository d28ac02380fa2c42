"""A float64 NumPy decoder with a depth stream, one row, token and head at a time: a test's oracle.

Written from the definitions alone (RMSNorm, RoPE and SwiGLU as in Llama; one softmax over sequence
keys and depth slots, Zhu et al. 2026, arXiv 2603.15619; a weighted sum of earlier outputs,
Pagliardini et al. 2024, arXiv 2402.02622), with nothing batched, scanned or shared with the
library, so that the two can only agree by computing the same thing.

Every function takes complex parameters, all of them complex, as it takes real ones: it never
conjugates or takes a modulus, so that a complex step along a direction gives the derivative. In
place of a layer's parameters, or of its mlp's, a function may stand: see `block`.
"""

import dataclasses

import numpy as np

_CHOICES = {
    'norm_placement': ('pre', 'post', 'reordered'),
    'qk_norm': ('none', 'head', 'full'),
    'stream': ('residual', 'dense', 'average', 'attention', 'moda'),
    'slots': ('attention', 'attention+ffn', 'block'),
    'slot_keys': ('rotated', 'unrotated'),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the parameters do not say about a model.

    windows[l] is how many positions layer l + 1 sees, its own included; None sees all. slot_window
    is how many of the newest slots a layer sees, in the streams `attention` and `moda`; 0 sees all.
    slots, attention_slot_projection and slot_keys matter to `moda` alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple
    norm_placement: str = 'pre'
    norm_eps: float = 1e-6
    qk_norm: str = 'none'
    rope_theta: float = 1e4
    use_bias: bool = False
    tie_embeddings: bool = False
    stream: str = 'residual'
    slots: str = 'attention+ffn'
    attention_slot_projection: bool = False
    slot_keys: str = 'rotated'
    slot_window: int = 0

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'{name}={getattr(self, name)!r}: choose from {choices}')


def logits(params, tokens_BT, segment_ids_BT, shape, positions_BT=None):
    """Returns float64 logits_BTV of tokens_BT; a token sees none but those of its own segment id.

    params: nested dict of float64 arrays: embedding [V, D], layers (a list of dicts), final_norm
    {scale}, head [D, V] unless tied, and of the streams entry {write} or final_read {kernel} or
    {weights}.
    positions_BT: for RoPE and windows; None counts 0, 1, .. T - 1 in every row. A padding token is
    one of a segment of its own; its logits mean nothing.
    """
    num_tokens = tokens_BT.shape[1]
    rows = []
    for b, tokens_T in enumerate(tokens_BT):
        positions_T = np.arange(num_tokens) if positions_BT is None else positions_BT[b]
        x_TD = _final_stream(params, tokens_T, segment_ids_BT[b], positions_T, shape)
        x_TD = rms_norm(x_TD, params['final_norm']['scale'], shape.norm_eps)
        head_DV = params['embedding'].T if shape.tie_embeddings else params['head']
        rows.append(x_TD @ head_DV)
    return np.stack(rows)


def _final_stream(params, tokens_T, segments_T, positions_T, shape):
    """Returns x_TD that feeds the final norm of one row."""
    stream = {
        'residual': _residual_stream,
        'moda': _moda_stream,
        'dense': _dense_stream,
        'average': _average_stream,
        'attention': _attention_stream,
    }[shape.stream]
    return stream(params, params['embedding'][tokens_T], segments_T, positions_T, shape)


def _residual_stream(params, x_TD, segments_T, positions_T, shape):
    for layer, window in zip(params['layers'], shape.windows, strict=True):
        x_TD, _ = block(layer, x_TD, [], segments_T, positions_T, window, shape)
    return x_TD


def _moda_stream(params, x_TD, segments_T, positions_T, shape):
    slots = []  # of (key_TKH, value_TKH), oldest first; the embedding writes none
    for layer, window in zip(params['layers'], shape.windows, strict=True):
        visible = _newest(slots, shape)
        x_TD, written = block(layer, x_TD, visible, segments_T, positions_T, window, shape)
        slots = slots + written
    return x_TD


def _dense_stream(params, x_TD, segments_T, positions_T, shape):
    outputs = [x_TD]  # X_0 is the embedding, X_l what block l returns
    for layer, window in zip(params['layers'], shape.windows, strict=True):
        read_TD = np.concatenate(outputs, axis=-1) @ layer['read']['kernel']
        y_TD, _ = block(layer, read_TD, [], segments_T, positions_T, window, shape)
        outputs.append(y_TD)
    return np.concatenate(outputs, axis=-1) @ params['final_read']['kernel']


def _average_stream(params, x_TD, segments_T, positions_T, shape):
    outputs = [x_TD]  # X_0 is the embedding, X_l what block l returns

    def read(weights):
        total_TD = np.zeros_like(x_TD)
        for weight, output_TD in zip(weights['weights'], outputs, strict=True):
            total_TD = total_TD + weight * output_TD
        return total_TD

    for layer, window in zip(params['layers'], shape.windows, strict=True):
        y_TD, _ = block(layer, read(layer['read']), [], segments_T, positions_T, window, shape)
        outputs.append(y_TD)
    return read(params['final_read'])


def _attention_stream(params, x_TD, segments_T, positions_T, shape):
    query_TNH, key_TKH, value_TKH = _stream_write(params['entry']['write'], x_TD, shape)
    slots = [(key_TKH, value_TKH)]
    for layer, window in zip(params['layers'], shape.windows, strict=True):
        read_TD = read_depth(query_TNH, _newest(slots, shape))
        y_TD, _ = block(layer, read_TD, [], segments_T, positions_T, window, shape)
        query_TNH, key_TKH, value_TKH = _stream_write(layer['write'], y_TD, shape)
        slots.append((key_TKH, value_TKH))
    return read_depth(query_TNH, _newest(slots, shape))


def _newest(slots, shape):
    return slots[-shape.slot_window :] if shape.slot_window else slots


def _stream_write(weights, x_TD, shape):
    return [linear(x_TD, weights[name], shape.use_bias) for name in ('query', 'key', 'value')]


def read_depth(query_TNH, slots):
    """Returns x_TD, D = N H: each token's query over the slots (key_TKH, value_TKH) of its own."""
    num_tokens, num_heads, _ = query_TNH.shape
    x_TNH = np.zeros_like(query_TNH)
    for t in range(num_tokens):
        for n in range(num_heads):
            keys_LH, values_LH = _slots_of(slots, t, n, num_heads)
            x_TNH[t, n] = one_query(query_TNH[t, n], keys_LH, values_LH)
    return x_TNH.reshape(num_tokens, -1)


def block(layer, x_TD, visible, segments_T, positions_T, window, shape):
    """Returns the block's y_TD with its residuals, and the slots it writes, attention's first.

    visible: slots (key_TKH, value_TKH) of earlier layers that its attention heads see. The last
    layer, which no other reads, has no slot projections and writes nothing for want of them.
    layer: parameters, of which `mlp` may be a function of (x_TD, segments_T) that returns y_TD; or
        a function of all the other arguments that does the whole of this.
    """
    if callable(layer):
        return layer(x_TD, visible, segments_T, positions_T, window, shape)
    place = shape.norm_placement

    def attention_norm(x_TD):
        return rms_norm(x_TD, layer['attention_norm']['scale'], shape.norm_eps)

    def mlp_norm(x_TD):
        return rms_norm(x_TD, layer['mlp_norm']['scale'], shape.norm_eps)

    def fed_forward(x_TD):
        if callable(layer['mlp']):
            return layer['mlp'](x_TD, segments_T)
        return mlp(layer['mlp'], x_TD, shape)

    attended_TD = attention_norm(x_TD) if place == 'pre' else x_TD
    f_TD, key_TKH, value_TKH = attention(
        layer['attention'], attended_TD, visible, segments_T, positions_T, window, shape
    )
    if place == 'pre':
        x_TD = x_TD + f_TD
        read_TD = mlp_norm(x_TD)
        y_TD = x_TD + fed_forward(read_TD)
    elif place == 'post':
        read_TD = attention_norm(x_TD + f_TD)
        y_TD = mlp_norm(read_TD + fed_forward(read_TD))
    else:
        read_TD = x_TD + attention_norm(f_TD)
        y_TD = read_TD + mlp_norm(fed_forward(read_TD))

    def projected(name, source_TD):
        if name not in layer:
            return []
        slot_key_TKH = linear(source_TD, layer[name]['key'], shape.use_bias)
        slot_value_TKH = linear(source_TD, layer[name]['value'], shape.use_bias)
        stored_TKH = _stored_key(layer['attention'], slot_key_TKH, positions_T, shape)
        return [(stored_TKH, slot_value_TKH)]

    if shape.slots == 'block':
        return y_TD, projected('block_slot', y_TD)
    if shape.attention_slot_projection:
        written = projected('attention_slot', attended_TD)
    else:
        written = [(_stored_key(layer['attention'], key_TKH, positions_T, shape), value_TKH)]
    if shape.slots == 'attention+ffn':
        written = written + projected('ffn_slot', read_TD)
    return y_TD, written


def _stored_key(weights, key_TKH, positions_T, shape):
    """Returns the key that a slot keeps of a bare projection."""
    if shape.slot_keys == 'unrotated':
        return key_TKH
    return rope(qk_norm(key_TKH, weights, 'key_norm', shape), positions_T, shape.rope_theta)


def attention(weights, x_TD, visible, segments_T, positions_T, window, shape):
    """Returns y_TD, and key_TKH and value_TKH as projected, before any norm or rotation."""
    query_TNH = linear(x_TD, weights['query'], shape.use_bias)
    key_TKH = linear(x_TD, weights['key'], shape.use_bias)
    value_TKH = linear(x_TD, weights['value'], shape.use_bias)
    q_TNH = rope(qk_norm(query_TNH, weights, 'query_norm', shape), positions_T, shape.rope_theta)
    k_TKH = rope(qk_norm(key_TKH, weights, 'key_norm', shape), positions_T, shape.rope_theta)
    if shape.slot_keys == 'unrotated':
        visible = [(qk_norm(key, weights, 'key_norm', shape), value) for key, value in visible]

    num_tokens, num_heads, _ = q_TNH.shape
    mixed_TNH = np.zeros_like(q_TNH)
    for t in range(num_tokens):
        seen = [s for s in range(t + 1) if _sees(t, s, segments_T, positions_T, window)]
        for n in range(num_heads):
            group = n // (num_heads // shape.num_kv_heads)
            depth_keys_LH, depth_values_LH = _slots_of(visible, t, n, num_heads)
            mixed_TNH[t, n] = one_query(
                q_TNH[t, n],
                [k_TKH[s, group] for s in seen] + depth_keys_LH,
                [value_TKH[s, group] for s in seen] + depth_values_LH,
            )
    y_TD = np.einsum('tnh,nhd->td', mixed_TNH, weights['out']['kernel'])
    if shape.use_bias:
        y_TD = y_TD + weights['out']['bias']
    return y_TD, key_TKH, value_TKH


def _sees(t, s, segments_T, positions_T, window):
    distance = positions_T[t] - positions_T[s]
    return segments_T[t] == segments_T[s] and (window is None or 0 <= distance < window)


def _slots_of(slots, t, n, num_heads):
    """Returns the lists of keys and of values that head n of token t finds in the slots."""
    groups = [n // (num_heads // key_TKH.shape[1]) for key_TKH, _ in slots]
    keys = [key_TKH[t, group] for group, (key_TKH, _) in zip(groups, slots, strict=True)]
    values = [value_TKH[t, group] for group, (_, value_TKH) in zip(groups, slots, strict=True)]
    return keys, values


def one_query(query_H, keys, values):
    """Returns softmax(query . keys H^-1/2) values, an H vector, of one query and one head."""
    scores_S = np.array([query_H @ key_H for key_H in keys]) / np.sqrt(len(query_H))
    weights_S = np.exp(scores_S - scores_S.real.max())
    weights_S = weights_S / weights_S.sum()
    return sum(weight * value_H for weight, value_H in zip(weights_S, values, strict=True))


def qk_norm(x_TNH, weights, name, shape):
    """Returns x_TNH (queries or keys) normed over each head, over all heads at once, or not."""
    if shape.qk_norm == 'none':
        return x_TNH
    scale = weights[name]['scale']
    if shape.qk_norm == 'head':
        return rms_norm(x_TNH, scale, shape.norm_eps)
    return rms_norm(x_TNH.reshape(len(x_TNH), -1), scale, shape.norm_eps).reshape(x_TNH.shape)


def rope(x_TNH, positions_T, theta):
    """Returns x_TNH with each pair (i, i + H/2) turned by position theta^(-2i/H) radians."""
    half = x_TNH.shape[-1] // 2
    turned = np.array(x_TNH)
    for t, position in enumerate(positions_T):
        for i in range(half):
            angle = position * theta ** (-i / half)
            first_N, second_N = x_TNH[t, :, i], x_TNH[t, :, i + half]
            turned[t, :, i] = first_N * np.cos(angle) - second_N * np.sin(angle)
            turned[t, :, i + half] = second_N * np.cos(angle) + first_N * np.sin(angle)
    return turned


def mlp(weights, x_TD, shape):
    """Returns w2(silu(w1 x) * w3 x), of x_TD."""
    gate_TF = linear(x_TD, weights['w1'], shape.use_bias)
    up_TF = linear(x_TD, weights['w3'], shape.use_bias)
    return linear(gate_TF / (1 + np.exp(-gate_TF)) * up_TF, weights['w2'], shape.use_bias)


def linear(x_TD, weights, use_bias):
    """Returns x_TD on the first axis of a kernel of any rank, plus a bias."""
    y = np.tensordot(x_TD, weights['kernel'], axes=1)
    return y + weights['bias'] if use_bias else y


def rms_norm(x, scale, eps):
    """Returns x / sqrt(mean(x^2) + eps) times scale, over the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
