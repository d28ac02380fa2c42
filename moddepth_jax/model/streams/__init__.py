"""Depth streams, one per file (Zhu et al. 2026, arXiv 2603.15619, section 2.2)."""

from moddepth_jax.hparams.registry import STREAMS
from moddepth_jax.model.streams import (
    attention,
    attention_residual,
    average,
    dense,
    hyper_connections,
    moda,
    mudd,
    value_attention,
    value_residual,
)
from moddepth_jax.model.streams.base import LayerKind, Stream, layer_kinds, layer_order
