"""A float64 NumPy decoder with mixtures of experts for mlps, one row at a time: a test's oracle.

Written from the definitions alone (DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066; expert choice,
Zhou et al. 2022, arXiv 2202.09368; both forms of Mixture-of-Depths-and-Experts, Raposo et al. 2024,
arXiv 2404.02258); norms, attention and depth streams are those of `depth_oracle`. Nothing is shared
with the library. Parameters may be complex: decisions are taken on real parts and all else is
analytic, so that `directional` is exact to rounding.

Where the definitions leave a choice, it is this. The Z candidates are the routed experts and then
the no-op experts, and the balance loss too has Z for their number, so that an even load costs
alpha. A mixture inside a routed block meets the tokens that entered it and counts no others.
Sigmoid scores are divided by their sum over all that a token chose, no-op experts included. Under
expert choice every weight is the bare score.
"""

import dataclasses
import functools

import numpy as np

from tests.model import depth_oracle

_CHOICES = {'choice': ('token', 'expert'), 'scoring': ('softmax', 'sigmoid')}


@dataclasses.dataclass(frozen=True)
class Experts:
    """What the parameters do not say about mixtures of experts and routed blocks.

    top_k: experts a token chooses; under choice 'expert' the mean number that take it.
    thresholds: {layer: threshold_Z}, layers from 0; an expert of choice 'expert' takes every token
        with a score above its own. None: the largest scores of a row instead.
    capacity: fraction of the row that enters a routed block, one whose layer has a `router`.
    """

    top_k: int
    choice: str = 'token'
    scoring: str = 'softmax'
    route_scale: float = 1.0
    thresholds: dict | None = None
    capacity: float = 1.0

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f'{name}={getattr(self, name)!r}: choose from {choices}')


@dataclasses.dataclass
class Met:
    """What the router of one layer said about the real tokens it met, one item a token."""

    logits: list = dataclasses.field(default_factory=list)  # of logits_Z
    scores: list = dataclasses.field(default_factory=list)  # of scores_Z
    chosen: list = dataclasses.field(default_factory=list)  # of chosen_Z, bool


def forward(params, tokens_BT, segment_ids_BT, shape, experts, positions_BT=None):
    """Returns logits_BTV and {layer: Met} of the layers with experts, counted from 0.

    params: as in `depth_oracle.logits`, but a layer's mlp may be {router {kernel [D, Z]}, w1 and w3
    {kernel [E, D, F]}, w2 {kernel [E, F, D]}, shared {w1, w3, w2 {kernel}} or none}, Z - E of them
    no-op experts; and a layer may have a router {kernel [D]} of its own, which makes it a routed
    block. Segment 0 is padding, which chooses nothing and is not met.
    """
    met = {i: Met() for i, layer in enumerate(params['layers']) if 'router' in layer['mlp']}
    rows = []
    for b in range(len(tokens_BT)):
        layers = [
            _with_functions(layer, i, met.get(i), experts)
            for i, layer in enumerate(params['layers'])
        ]
        one = slice(b, b + 1)
        rows.append(
            depth_oracle.logits(
                params | {'layers': layers},
                tokens_BT[one],
                segment_ids_BT[one],
                shape,
                None if positions_BT is None else positions_BT[one],
            )
        )
    return np.concatenate(rows), met


def _with_functions(layer, number, met, experts):
    """Returns the layer as `depth_oracle.block` takes it: its experts and its routing functions."""
    if met is not None:
        thresholds_Z = experts.thresholds[number] if experts.thresholds else None
        mixed = functools.partial(
            mixture, layer['mlp'], experts=experts, thresholds_Z=thresholds_Z, met=met
        )
        layer = layer | {'mlp': mixed}
    if 'router' not in layer:
        return layer
    inner = {name: weights for name, weights in layer.items() if name != 'router'}
    return functools.partial(routed_block, layer['router']['kernel'], inner, experts.capacity)


def routed_block(router_D, layer, capacity, x_TD, visible, segments_T, positions_T, window, shape):
    """Returns x + r (block(x) - x) of the C tokens that enter, x of the others; and no slots."""
    if shape.stream != 'residual' or visible:
        raise ValueError(f'stream={shape.stream!r}: a routed block is of the stream residual alone')
    scores_T = x_TD @ router_D
    size = max(1, int(np.floor(capacity * len(x_TD) + 1e-6)))
    keys = [(segments_T[t] == 0, -scores_T[t].real, t) for t in range(len(x_TD))]
    enter = sorted(t for _, _, t in sorted(keys)[:size])
    y_CD, _ = depth_oracle.block(
        layer, x_TD[enter], [], segments_T[enter], positions_T[enter], window, shape
    )
    x_TD = np.array(x_TD)
    for t, y_D in zip(enter, y_CD, strict=True):
        if segments_T[t] != 0:
            x_TD[t] = x_TD[t] + scores_T[t] * (y_D - x_TD[t])
    return x_TD, []


def mixture(weights, x_TD, segments_T, *, experts, thresholds_Z=None, met=None):
    """Returns y_TD, shared experts plus weighted routed ones; `met` grows by the real tokens."""
    logits_TZ = x_TD @ weights['router']['kernel']
    scores_TZ = scores(logits_TZ, experts.scoring)
    num_routed = len(weights['w1']['kernel'])
    real_T = np.asarray(segments_T) != 0
    chosen_TZ = choose(scores_TZ.real, real_T, num_routed, experts, thresholds_Z)
    weights_TZ = np.where(chosen_TZ, scores_TZ, 0)
    if experts.choice == 'token' and experts.scoring == 'sigmoid':
        weights_TZ[real_T] = weights_TZ[real_T] / weights_TZ[real_T].sum(axis=-1, keepdims=True)
    weights_TZ = weights_TZ * experts.route_scale

    y_TD = np.zeros_like(x_TD)
    for t in range(len(x_TD)):
        for e in range(num_routed):
            if chosen_TZ[t, e]:
                matrices = [weights[name]['kernel'][e] for name in ('w1', 'w3', 'w2')]
                y_TD[t] = y_TD[t] + weights_TZ[t, e] * swiglu(x_TD[t], *matrices)
    if 'shared' in weights:
        matrices = [weights['shared'][name]['kernel'] for name in ('w1', 'w3', 'w2')]
        y_TD = y_TD + swiglu(x_TD, *matrices)
    if met is not None:
        met.logits.extend(logits_TZ[real_T])
        met.scores.extend(scores_TZ[real_T])
        met.chosen.extend(chosen_TZ[real_T])
    return y_TD


def swiglu(x, w1, w3, w2):
    """Returns w2(silu(w1 x) * w3 x) of x, [.., D]."""
    gate = x @ w1
    return (gate / (1 + np.exp(-gate)) * (x @ w3)) @ w2


def scores(logits_TZ, scoring):
    """Returns the softmax over the last axis, or the sigmoid of each."""
    if scoring == 'sigmoid':
        return 1 / (1 + np.exp(-logits_TZ))
    powers_TZ = np.exp(logits_TZ - logits_TZ.real.max(axis=-1, keepdims=True))
    return powers_TZ / powers_TZ.sum(axis=-1, keepdims=True)


def choose(scores_TZ, real_T, num_routed, experts, thresholds_Z=None):
    """Returns bool chosen_TZ of one row: which token and expert belong together; padding none."""
    num_tokens, num_all = scores_TZ.shape
    chosen_TZ = np.zeros((num_tokens, num_all), bool)
    if experts.choice == 'token':
        for t in np.flatnonzero(real_T):
            chosen_TZ[t, _largest(scores_TZ[t], range(num_all), experts.top_k)] = True
        return chosen_TZ
    if thresholds_Z is not None:
        return (scores_TZ > thresholds_Z) & real_T[:, None]
    size = max(1, experts.top_k * num_tokens // num_routed)
    for z in range(num_all):
        chosen_TZ[_largest(scores_TZ[:, z], np.flatnonzero(real_T), size), z] = True
    return chosen_TZ


def _largest(values, among, size):
    """Returns the indices of the `size` largest values of those `among`; the lower one on a tie."""
    return sorted(among, key=lambda i: (-values[i], i))[:size]


def cross_entropy(logits_BTV, labels_BT, segment_ids_BT):
    """Returns the mean over targets, in nats: labels of -100 and padding are none."""
    targets = np.argwhere((labels_BT != -100) & (segment_ids_BT != 0))
    losses = [log_sum_exp(logits_BTV[b, t]) - logits_BTV[b, t, labels_BT[b, t]] for b, t in targets]
    return sum(losses) / len(losses)


def balance_loss(met, top_k):
    """Returns the mean over layers of sum_i f_i P_i, without alpha.

    f_i = Z count_i / (k n) and P_i the mean score, over the n tokens of all rows that a layer met.
    """
    layers = []
    for layer in met.values():
        chosen_nZ, scores_nZ = np.array(layer.chosen), np.array(layer.scores)
        num_tokens, num_all = chosen_nZ.shape
        load_Z = chosen_nZ.sum(axis=0) * num_all / (top_k * num_tokens)
        layers.append((load_Z * scores_nZ.mean(axis=0)).sum())
    return sum(layers) / len(layers)


def z_loss(met):
    """Returns the mean over layers of the mean over tokens of logsumexp(router logits)^2."""
    layers = [[log_sum_exp(logits_Z) ** 2 for logits_Z in layer.logits] for layer in met.values()]
    return sum(sum(tokens) / len(tokens) for tokens in layers) / len(layers)


def log_sum_exp(x):
    """Returns log(sum(exp(x))) of a vector."""
    largest = x.real.max()
    return largest + np.log(np.exp(x - largest).sum())


def directional(loss, params, direction, step=1e-20):
    """Returns the derivative of loss(params) along `direction`, exact to rounding.

    loss: a function of nested dicts and lists of float64 arrays, analytic where it is smooth.
    direction: as params; what it leaves out, or has None for, stays. It is one evaluation of
    Im loss(params + i step direction) / step, in which nothing cancels (Squire and Trapp 1998).
    """
    return loss(_stepped(params, direction, step)).imag / step


def _stepped(params, direction, step):
    if isinstance(params, dict):
        direction = {} if direction is None else direction
        return {name: _stepped(x, direction.get(name), step) for name, x in params.items()}
    if isinstance(params, list):
        direction = [None] * len(params) if direction is None else direction
        return [_stepped(x, d, step) for x, d in zip(params, direction, strict=True)]
    return params + 1j * step * (np.zeros(()) if direction is None else direction)
