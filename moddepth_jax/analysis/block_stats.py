"""Measures what the blocks of a trained model do, on held-out text under its causal rule.

launch.isoflop writes `block_stats` of each measured run into measures.json.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

from moddepth_jax.analysis import depth_mass as depth_mass_lib
from moddepth_jax.analysis import source_mass as source_mass_lib
from moddepth_jax.analysis import stream_gains as stream_gains_lib
from moddepth_jax.analysis import token_classes
from moddepth_jax.analysis.layer_walk import (
    entropies,
    layer_deltas,
    relative_change,
    root_mean_square,
)
from moddepth_jax.analysis.signal_dilution import Moments, moments, probe_r2
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.cross_entropy import cross_entropy
from moddepth_jax.model.stack import Stack, unstack_layers
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.losses import IGNORED, masked_labels

MEASURES = {}  # name: function from Observations to a JSON value


class TokenArrays(NamedTuple):
    """Arrays over N real tokens, L blocks and R routed blocks."""

    input_rms_LN: np.ndarray  # root mean square of the input of the block or its router
    change_LN: np.ndarray  # |delta| / |input| of the block, without the gate
    selected_LN: np.ndarray  # bool: the block processed the token
    scores_RN: np.ndarray  # router scores
    entropy_N: np.ndarray  # entropy of the next-token distribution, in nats
    first_N: np.ndarray  # bool: first token of a row


@dataclasses.dataclass(frozen=True)
class Observations:
    """The input of the measures: a model, held-out batches, and what the model did with them."""

    variables: dict  # of the Transformer
    hparams: Hparams
    dataset: object  # the dataset of the batches
    batches: list[dict]  # with `tokens_BT` and `segment_ids_BT`
    routing: str  # the causal rule
    tokens: TokenArrays  # of all real tokens of the batches
    # Moments of the final stream and each block's delta over the tokens that the block processed.
    fitted_L: list[Moments]  # of the first, third, ... batch
    scored_L: list[Moments]  # of the other batches

    @property
    def selected_RN(self) -> np.ndarray:
        """bool [R, N]: the routed block processed the token."""
        return self.tokens.selected_LN[list(self.hparams.model.routed_layers)]

    def of_batches(self, function) -> list:
        """Return the results of function(variables, hparams, batch, routing) by batch."""
        return [
            function(self.variables, self.hparams, batch, self.routing) for batch in self.batches
        ]


def measure(routed_only: bool = False):
    """Decorator that adds a function of Observations to MEASURES.

    With `routed_only`, the measure of a model without routed blocks is None.
    """

    def add(function):
        @functools.wraps(function)
        def checked(observed):
            if routed_only and not observed.hparams.model.routed_layers:
                return None
            return function(observed)

        MEASURES[function.__name__] = checked
        return checked

    return add


def block_stats(variables, hparams: Hparams, dataset, num_batches: int) -> dict:
    """Compute all MEASURES of a model on the first `num_batches` held-out batches.

    Returns a dict of JSON values: the measures by name, `routing` (the causal rule or `dense`) and
    `tokens` (the number of real tokens). Raises ValueError for fewer than two batches, and for
    logits that are not finite.
    """
    observed = observe(variables, hparams, dataset, num_batches)
    result = {'routing': observed.routing, 'tokens': observed.tokens.entropy_N.size}
    return result | {name: function(observed) for name, function in MEASURES.items()}


def observe(variables, hparams: Hparams, dataset, num_batches: int) -> Observations:
    """Run the model on the batches. Raises the errors of `block_stats`."""
    num_read = min(num_batches, dataset.num_held_out_batches)
    if num_read < 2:
        found = f'num_batches={num_batches}, with {dataset.num_held_out_batches} held-out batches'
        raise ValueError(f'{found}: must be 2 or more, to fit the probes and to score them')
    routing = causal_routing(hparams)
    batches = [dataset.held_out_batch(index) for index in range(num_read)]
    parts, halves = [], [None, None]
    for index, batch in enumerate(batches):
        arrays, moments_L = _observe_batch(variables, hparams, batch, routing)
        parts.append(arrays)
        half = halves[index % 2]
        halves[index % 2] = list(map(operator.add, half, moments_L)) if half else moments_L
    tokens = TokenArrays(*[np.concatenate(side, axis=-1) for side in zip(*parts, strict=True)])
    return Observations(variables, hparams, dataset, batches, routing, tokens, *halves)


def _observe_batch(variables, hparams, batch, routing):
    """The TokenArrays of a batch, and the Moments of each block."""
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    deltas = layer_deltas(variables, hparams, tokens_BT, segment_ids_BT, routing)
    moments_L = [
        moments(deltas.final_BTD, deltas_BTD, selected_BT)
        for deltas_BTD, selected_BT in zip(deltas.deltas_LBTD, deltas.selected_LBT, strict=True)
    ]
    scores_RBT = np.zeros((0, *tokens_BT.shape))
    if hparams.model.routed_layers:
        scores_RBT = deltas.records.routing.scores_BT
    arrays = TokenArrays(
        input_rms_LN=root_mean_square(deltas.inputs_LBTD),
        change_LN=relative_change(deltas.inputs_LBTD, deltas.deltas_LBTD),
        selected_LN=deltas.selected_LBT,
        scores_RN=scores_RBT,
        entropy_N=entropies(deltas.logits_BTV),
        first_N=np.broadcast_to(np.arange(tokens_BT.shape[1]) == 0, tokens_BT.shape),
    )
    real_BT = segment_ids_BT > 0
    arrays = TokenArrays(*[array[..., real_BT] for array in jax.device_get(arrays)])
    if not np.isfinite(arrays.entropy_N).all():
        raise ValueError('logits: not finite on held-out text; the run must not have diverged')
    return arrays, moments_L


@measure()
def layers(observed: Observations) -> list[dict]:
    """Measure each block over the tokens that it processed.

    Fields of each row:
      input_rms: root mean square of the block's input before its norm. It shows how the residual
        stream grows along depth.
      score_correlation: Spearman's correlation of |block(x) - x| / |x|, without the gate, with the
        router's score.
      probe_r2: R^2 of the probe of signal_dilution.py, fitted on the first, third, ... batch and
        scored on the others. Low values mean that the signal is diluted. Each half needs far more
        tokens than the model's width.
    """
    tokens, routers = observed.tokens, observed.hparams.model.router_of_block
    halves = zip(observed.fitted_L, observed.scored_L, strict=True)
    rows = []
    for layer, (fitted, scored) in enumerate(halves):
        selected_N, router = tokens.selected_LN[layer], routers[layer]
        row = {
            'layer': layer,
            'routed': router is not None,
            'tokens': int(selected_N.sum()),
            'input_rms': _mean(tokens.input_rms_LN[layer, selected_N]),
            'score_correlation': None,
            'probe_r2': probe_r2(fitted, scored),
        }
        if router is not None:
            row['score_correlation'] = rank_correlation(
                tokens.change_LN[layer, selected_N],
                tokens.scores_RN[router, selected_N],
            )
        rows.append(row)
    return rows


@measure()
def gradient_norms(observed: Observations) -> list[float]:
    """Return the gradient norm of the parameters of each block that runs.

    The loss is the mean over targets, in nats, with the routing of the last stage of training. A
    looped block appears once per loop with the gradient of all its loops.
    """
    hparams, routing = observed.hparams, observed.hparams.stages[-1].routing
    parts = (
        _gradients(observed.variables, batch, hparams=hparams, routing=routing)
        for batch in observed.batches
    )
    gradients, targets = functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)
    layers = unstack_layers(Stack(hparams.model, routing), gradients)
    return [
        float(optax.tree.norm(of_layer) / targets)
        for kind, of_layer in layers
        if kind.part == 'block'
    ]


@functools.partial(jax.jit, static_argnames=('hparams', 'routing'))
def _gradients(variables, batch, *, hparams, routing):
    """The gradient of the summed loss by the parameters of the stack, and the number of targets."""
    labels_BT = masked_labels(batch)

    def loss(stack):
        params = variables['params'] | {'stack': stack}
        tokens = batch['tokens_BT'], batch['segment_ids_BT']
        x_BTD, _ = Transformer(hparams).apply(
            variables | {'params': params},
            *tokens,
            routing,
            rngs={'routing': jax.random.key(0)},
            method='hidden_states',
        )
        return cross_entropy(x_BTD, params, labels_BT, 0.0, hparams.training.loss_chunk)[0]

    return jax.grad(loss)(variables['params']['stack']), jnp.sum(labels_BT != IGNORED)


@measure(routed_only=True)
def blocks_entered(observed: Observations) -> dict:
    """Return the shares of tokens that entered every routed block and none.

    `*_by_chance` are the shares if the blocks selected tokens independently of each other.
    """
    selected_RN = observed.selected_RN
    share_R = selected_RN.mean(axis=1)
    return {
        'every': float(selected_RN.all(axis=0).mean()),
        'none': float((~selected_RN).all(axis=0).mean()),
        'every_by_chance': float(np.prod(share_R)),
        'none_by_chance': float(np.prod(1 - share_R)),
    }


@measure()
def entropy(observed: Observations) -> dict:
    """Return the mean entropy of the next token, in nats.

    `correlation` is Spearman's, with the number of routed blocks that the token entered.
    """
    entropy_N, blocks_N = observed.tokens.entropy_N, observed.selected_RN.sum(axis=0)
    return {'mean': _mean(entropy_N), 'correlation': rank_correlation(entropy_N, blocks_N)}


@measure(routed_only=True)
def classes(observed: Observations) -> dict:
    """Return, for each token class that occurs, the number of tokens and the share that entered."""
    # Padding rows at the end of a batch are not windows of the text.
    rows = [batch['tokens_BT'][batch['segment_ids_BT'][:, 0] > 0] for batch in observed.batches]
    tokens_XT, kind = np.concatenate(rows), language(observed)
    class_N = token_classes.held_out_classes(observed.dataset, tokens_XT, kind).reshape(-1)
    found = {}
    for number, name in enumerate(token_classes.CLASSES):
        mine_RN = observed.selected_RN[:, class_N == number]
        if mine_RN.size:
            found[name] = {'tokens': mine_RN.shape[1], 'entered': float(mine_RN.mean())}
    return found


@measure(routed_only=True)
def language(observed: Observations) -> str:
    """Return `python` or `prose`, the language that `classes` assumes for the text."""
    return token_classes.language_of(observed.dataset.corpus)


@measure(routed_only=True)
def first_token(observed: Observations) -> dict:
    """Return the number of first tokens, and the shares of these and of others that entered."""
    selected_RN, first_N = observed.selected_RN, observed.tokens.first_N
    return {
        'tokens': int(first_N.sum()),
        'entered': float(selected_RN[:, first_N].mean()),
        'others_entered': float(selected_RN[:, ~first_N].mean()),
    }


@measure()
def depth_mass(observed: Observations) -> dict | None:
    """Return means over batches of analysis/depth_mass.py.

    None if a stream reads outputs, or if loops are routed. `depth` and `first_token` are the shares
    of each layer's attention on slots and on the first token (the attention sink); a batch in which
    the layer processes no token does not count, and a layer without a batch has None.
    """
    model = observed.hparams.model
    if model.depth.stream_class.reads_outputs or model.routing.routes_loops:
        return None
    masses = observed.of_batches(depth_mass_lib.depth_mass)
    return {
        'depth': _mean_of_batches([mass.depth_L for mass in masses]),
        'first_token': _mean_of_batches([mass.first_token_L for mass in masses]),
    }


@measure()
def source_mass(observed: Observations) -> dict | None:
    """Return the `source_table` of analysis/source_mass.py; None without attention residuals."""
    if not source_mass_lib.has_sources(observed.hparams):
        return None
    return source_mass_lib.source_table(observed.of_batches(source_mass_lib.source_mass))


@measure()
def stream_gains(observed: Observations) -> dict | None:
    """Return means over batches of analysis/stream_gains.py by block; None without mixtures."""
    if not stream_gains_lib.has_mixtures(observed.hparams):
        return None
    gains = observed.of_batches(stream_gains_lib.stream_gains)
    forward, backward = np.mean(gains, axis=0).tolist()
    return {'forward': forward, 'backward': backward}


def _mean_of_batches(values_BL):
    """The mean of each layer over the batches where it is not NaN; None if there are none."""
    return np.ma.masked_invalid(values_BL).mean(axis=0).tolist()


def _mean(values_N):
    return float(np.mean(values_N, dtype=np.float64)) if len(values_N) else None


def rank_correlation(a_N, b_N) -> float | None:
    """Return Spearman's correlation of the finite pairs; None if constant or fewer than 3."""
    both_N = np.isfinite(a_N) & np.isfinite(b_N)
    a_N, b_N = (np.asarray(side, float)[both_N] for side in (a_N, b_N))
    if len(a_N) < 3 or np.ptp(a_N) == 0 or np.ptp(b_N) == 0:
        return None
    return float(scipy.stats.spearmanr(a_N, b_N).statistic)
