"""Measures how much each sublayer reads of each source of attention residuals."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moddepth_jax.analysis.layer_walk import walk
from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.model import ahead
from moddepth_jax.model.layers import wide_dtype
from moddepth_jax.model.routing import gather_tokens
from moddepth_jax.model.streams import layer_kinds
from moddepth_jax.model.streams.attention_residual import SourceReader, score_source

DECIMALS = 5  # of the weights in `source_table`


class SourceMass(NamedTuple):
    """Softmax weights of R reads on S sources: means over the real tokens that a sublayer runs on.

    Sources are counted in the order in which they are opened. A token that skips a routed block has
    no source from it, and the newest source of a read is the one that the token still adds to.
    """

    reads: tuple[str, ...]  # block number and a (attention) or f (mlp); `end`: for the final norm
    sources: tuple[str, ...]  # named after the sublayer that opens the source; `e`: the embedding
    # float64; 0 if the source does not exist yet, NaN if the sublayer ran on no token.
    weights_RS: np.ndarray
    newest_R: np.ndarray  # int, the number of the newest source of each read


def has_sources(hparams: Hparams) -> bool:
    """Return whether each sublayer reads a softmax over sources."""
    return hparams.model.depth.stream_class.connection is SourceReader


def source_mass(variables, hparams: Hparams, batch, routing: str) -> SourceMass | None:
    """Measure the weights on a batch (Attention Residuals, arXiv 2603.15031).

    With abstract variables, this only compiles and returns None. Raises ValueError for a stream
    without sources, and for a routing that the model cannot run.
    """
    model = hparams.model
    if not has_sources(hparams):
        right = 'has no sources to measure; must be attention_residual'
        raise ValueError(f'model.depth.stream={model.depth.stream!r}: {right}')
    tokens_BT, segment_ids_BT = batch['tokens_BT'], batch['segment_ids_BT']
    found, _ = walk(variables, hparams, tokens_BT, segment_ids_BT, routing, _sums, _catch)
    if ahead.is_abstract(variables):
        return None
    reads, sources, newest_R = _names(model)
    weights_RS = np.zeros((len(reads), len(sources)))
    sums = [of_read for _, of_layer in found for of_read in jax.device_get(of_layer)]
    for row_S, newest, (slots_S, newer_S, tokens) in zip(weights_RS, newest_R, sums, strict=True):
        # A buffer of slots may have more room than there are slots.
        written = newest + 1 - len(newer_S)
        row_S[: newest + 1] = [*slots_S[:written], *newer_S]
        row_S /= tokens or np.nan
    return SourceMass(reads, sources, weights_RS, newest_R)


def source_table(masses: list[SourceMass]) -> dict:
    """Return means of several batches as JSON values.

    Fields:
      reads, sources: names of the rows and columns of the table.
      weights: the table of mean weights, rounded; None for a read that has no token in any batch.
      embedding, newest, rest: shares of the embedding, of the newest source, and of all others.
        They are means over the reads with tokens and two sources or more.
    """
    reads, sources, _, newest_R = masses[0]
    weights_RS = np.ma.masked_invalid([mass.weights_RS for mass in masses]).mean(axis=0)
    rows_R = np.flatnonzero(newest_R)
    embedding = weights_RS[rows_R, 0].mean()
    newest = weights_RS[rows_R, newest_R[rows_R]].mean()
    shares = {'embedding': embedding, 'newest': newest, 'rest': 1 - embedding - newest}
    table = {'reads': list(reads), 'sources': list(sources)}
    table['weights'] = weights_RS.round(DECIMALS).tolist()
    return table | {name: round(float(share), DECIMALS) for name, share in shares.items()}


def _names(model: ModelHparams):
    """Names of reads and sources, and the number of the newest source at each read."""
    reads, sources, newest = [], ['e'], []
    kinds = layer_kinds(model)
    for number, kind in enumerate(kinds[:-1]):
        for letter, opens in zip('af', kind.opens, strict=True):
            reads.append(f'{number}{letter}')
            newest.append(len(sources) - 1)
            sources += [f'{number}{letter}'] * opens
    return (*reads, 'end'), tuple(sources), np.array([*newest, len(sources) - 1])


def _catch(caught, module, method, args, result):
    """Catch the arguments of each read by the name of its reader: a router's, then the block's."""
    if isinstance(module, SourceReader) and method == 'read':
        query_D = module.query * module.scale
        reads = caught.setdefault('source_reads', {})
        reads[module.name] = (module.hparams.norm_eps, query_D, *args)


def _sums(seen):
    """For each read of a layer: sums over tokens of the weights on slots and newer sources; count.

    The router of a block reads what its attention reads, for all tokens, and is left out.
    """
    sums = []
    for epsilon, query_D, sources, depth in seen.caught['source_reads'].values():
        newer, real_BT = (*sources.closed, sources.newest_BTD), seen.tokens.segment_ids_BT > 0
        if depth.indices_BC is not None:  # of the selected tokens
            real_BT = gather_tokens(real_BT, depth.indices_BC)
        logits_NBT = _logits(epsilon, query_D, newer, depth)
        weights_NBT = jnp.where(real_BT[None], jax.nn.softmax(logits_NBT, axis=0), 0.0)
        weights_N = jnp.sum(weights_NBT, axis=(1, 2))
        num_slots = len(weights_N) - len(newer)
        sums.append((weights_N[:num_slots], weights_N[num_slots:], jnp.sum(real_BT)))
    return sums


def _logits(epsilon, query_D, newer, depth):
    """Logits [N, B, T] of the slots and the newer sources; -inf if a token does not see a slot."""
    wide = wide_dtype(newer[0].dtype)

    def logit(v_BTD):
        return score_source(epsilon, query_D.astype(wide), v_BTD.astype(wide))[0]

    logits_LBT = jax.vmap(logit)(depth.of_tokens())
    seen_LBT = (jnp.arange(len(logits_LBT)) < depth.num_written)[:, None, None]
    if depth.valid_LBT is not None:
        seen_LBT &= jax.vmap(depth.pick)(depth.valid_LBT)
    logits_LBT = jnp.where(seen_LBT, logits_LBT, -jnp.inf)
    return jnp.concatenate([logits_LBT, jnp.stack([logit(v_BTD) for v_BTD in newer])])
