"""Hyper-parameters of the transformer and of its routing."""

import dataclasses
import math

from moddepth_jax.hparams.checks import fraction, one_of, positive, refuse


@dataclasses.dataclass(frozen=True)
class RoutingHparams:
    """Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258); knobs as in configs/base.py."""

    router: str
    layers: str
    capacity: float
    gate: str
    initial_gate: float
    causal_rule: str
    predictor_width: int
    predictor_loss_weight: float
    aux_loss_weight: float

    def __post_init__(self):
        name = 'model.routing.'
        one_of(name + 'router', self.router, ('none', 'learned'))
        one_of(name + 'gate', self.gate, ('raw', 'sigmoid', 'tanh', 'none'))
        one_of(name + 'causal_rule', self.causal_rule, ('predictor', 'aux_loss', 'dense'))
        fraction(name + 'capacity', self.capacity, zero=False)
        positive(name + 'initial_gate', self.initial_gate, 0)
        positive(name + 'predictor_loss_weight', self.predictor_loss_weight, 0)
        positive(name + 'aux_loss_weight', self.aux_loss_weight, 0)
        if not 0 <= self.predictor_width <= 64:
            refuse(name + 'predictor_width', self.predictor_width, 'must lie in [0, 64]')

    def num_selected(self, length: int) -> int:
        """C, the tokens of a row of `length` that enter: max(1, floor(capacity length + 1e-6))."""
        return max(1, math.floor(self.capacity * length + 1e-6))

    def routed_layers(self, num_layers: int) -> tuple[int, ...]:
        """Indices of the routed blocks, ascending. Raises ValueError where `layers` names none."""
        if self.router == 'none':
            return ()
        kind, *numbers = self.layers.split(':')
        right = f'must be every:N, middle:FIRST:LAST or a list of layers below {num_layers}'
        try:
            if kind == 'every':
                (n,) = map(int, numbers)
                chosen = tuple(range(n - 1, num_layers, n)) if n >= 1 else ()
            elif kind == 'middle':
                first, last = map(int, numbers)
                ok = first >= 0 and last >= 0
                chosen = tuple(range(first, num_layers - last)) if ok else ()
            else:
                chosen = tuple(sorted({int(layer) for layer in self.layers.split(',')}))
        except ValueError:
            refuse('model.routing.layers', self.layers, right)
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < num_layers:
            refuse('model.routing.layers', self.layers, right + ', and name one at least')
        return chosen


@dataclasses.dataclass(frozen=True)
class ModelHparams:
    """The transformer; knobs as in configs/base.py."""

    vocab_size: int
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_placement: str
    norm_eps: float
    qk_norm: str
    rope_theta: float
    use_bias: bool
    tie_embeddings: bool
    windows: tuple[int, ...]
    init_std: float
    embedding_init_std: float
    scale_residual_init: bool
    dtype: str
    attention: str
    layer_loop: str
    remat: str
    routing: RoutingHparams

    def __post_init__(self):
        for field in ('vocab_size', 'num_layers', 'd_model', 'd_ff', 'num_heads', 'num_kv_heads'):
            positive(f'model.{field}', getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            right = f'must divide model.num_heads={self.num_heads}'
            refuse('model.num_kv_heads', self.num_kv_heads, right)
        if self.head_dim < 2 or self.head_dim % 2:
            refuse('model.head_dim', self.head_dim, 'must be even and positive: RoPE turns halves')
        one_of('model.norm_placement', self.norm_placement, ('pre', 'post', 'reordered'))
        one_of('model.qk_norm', self.qk_norm, ('none', 'head', 'full'))
        one_of('model.dtype', self.dtype, ('float32', 'bfloat16'))
        one_of('model.attention', self.attention, ('auto', 'reference', 'xla'))
        one_of('model.layer_loop', self.layer_loop, ('scan', 'unrolled'))
        one_of('model.remat', self.remat, ('block', 'none'))
        if not self.windows or any(window < 0 for window in self.windows):
            refuse('model.windows', self.windows, 'must hold sizes of 0 (no window) or more')
        for field in ('norm_eps', 'rope_theta', 'init_std', 'embedding_init_std'):
            if not 0 < getattr(self, field) < math.inf:
                refuse(f'model.{field}', getattr(self, field), 'must be above 0')
        self.routing.routed_layers(self.num_layers)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Indices of the routed blocks, ascending; empty for the dense model."""
        return self.routing.routed_layers(self.num_layers)

    def window(self, layer: int) -> int:
        """Tokens that `layer` sees, its own among them; 0 for all earlier ones."""
        return self.windows[layer % len(self.windows)]
