"""Hyper-parameters as frozen dataclasses. `from_config` is the only reader of a ConfigDict."""

import dataclasses
import difflib
import math
import typing


def _refuse(field, value, right):
    raise ValueError(f'{field}={value!r}: {right}')


def _one_of(field, value, choices):
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        _refuse(field, value, f'must be one of {", ".join(choices)}{hint}')


def _positive(field, value, minimum=1):
    if not value >= minimum or value == math.inf:
        _refuse(field, value, f'must be {minimum} or more')


def _fraction(field, value, zero=True, one=True):
    low, high = value >= 0 if zero else value > 0, value <= 1 if one else value < 1
    if not (low and high):
        _refuse(field, value, f'must lie in {"[" if zero else "("}0, 1{"]" if one else ")"}')


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
        _one_of(name + 'router', self.router, ('none', 'learned'))
        _one_of(name + 'gate', self.gate, ('raw', 'sigmoid', 'tanh', 'none'))
        _one_of(name + 'causal_rule', self.causal_rule, ('predictor', 'aux_loss', 'dense'))
        _fraction(name + 'capacity', self.capacity, zero=False)
        _positive(name + 'initial_gate', self.initial_gate, 0)
        _positive(name + 'predictor_loss_weight', self.predictor_loss_weight, 0)
        _positive(name + 'aux_loss_weight', self.aux_loss_weight, 0)
        if not 0 <= self.predictor_width <= 64:
            _refuse(name + 'predictor_width', self.predictor_width, 'must lie in [0, 64]')

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
            _refuse('model.routing.layers', self.layers, right)
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < num_layers:
            _refuse('model.routing.layers', self.layers, right + ', and name one at least')
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
            _positive(f'model.{field}', getattr(self, field))
        if self.num_heads % self.num_kv_heads:
            right = f'must divide model.num_heads={self.num_heads}'
            _refuse('model.num_kv_heads', self.num_kv_heads, right)
        if self.head_dim < 2 or self.head_dim % 2:
            _refuse('model.head_dim', self.head_dim, 'must be even and positive: RoPE turns halves')
        _one_of('model.norm_placement', self.norm_placement, ('pre', 'post', 'reordered'))
        _one_of('model.qk_norm', self.qk_norm, ('none', 'head', 'full'))
        _one_of('model.dtype', self.dtype, ('float32', 'bfloat16'))
        _one_of('model.attention', self.attention, ('auto', 'reference', 'xla'))
        _one_of('model.layer_loop', self.layer_loop, ('scan', 'unrolled'))
        _one_of('model.remat', self.remat, ('block', 'none'))
        if not self.windows or any(window < 0 for window in self.windows):
            _refuse('model.windows', self.windows, 'must hold sizes of 0 (no window) or more')
        for field in ('norm_eps', 'rope_theta', 'init_std', 'embedding_init_std'):
            if not 0 < getattr(self, field) < math.inf:
                _refuse(f'model.{field}', getattr(self, field), 'must be above 0')
        self.routing.routed_layers(self.num_layers)

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Indices of the routed blocks, ascending; empty for the dense model."""
        return self.routing.routed_layers(self.num_layers)

    def window(self, layer: int) -> int:
        """Tokens that `layer` sees, its own among them; 0 for all earlier ones."""
        return self.windows[layer % len(self.windows)]


@dataclasses.dataclass(frozen=True)
class DataHparams:
    """Corpus, tokenizer and windows; knobs as in configs/base.py."""

    source: str
    text_field: str
    tokenizer: str
    sequence_length: int
    batch_size: int
    held_out_fraction: float

    def __post_init__(self):
        if not self.source.strip():
            _refuse('data.source', self.source, 'must be stdlib, synthetic or a glob of text files')
        _one_of('data.tokenizer', self.tokenizer, ('bytes',))
        _positive('data.sequence_length', self.sequence_length)
        _positive('data.batch_size', self.batch_size)
        _fraction('data.held_out_fraction', self.held_out_fraction, zero=False, one=False)


@dataclasses.dataclass(frozen=True)
class OptimizerHparams:
    """AdamW, its schedule and clipping; knobs as in configs/base.py."""

    learning_rate: float
    final_fraction: float
    warmup_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    z_loss: float

    def __post_init__(self):
        if not 0 < self.learning_rate < math.inf:
            _refuse('optimizer.learning_rate', self.learning_rate, 'must be above 0')
        _fraction('optimizer.final_fraction', self.final_fraction)
        _fraction('optimizer.warmup_fraction', self.warmup_fraction)
        _fraction('optimizer.b1', self.b1, one=False)
        _fraction('optimizer.b2', self.b2, one=False)
        for field in ('eps', 'weight_decay', 'clip_norm', 'z_loss'):
            _positive(f'optimizer.{field}', getattr(self, field), 0)


@dataclasses.dataclass(frozen=True)
class TrainingHparams:
    """The train loop; knobs as in configs/base.py."""

    num_steps: int
    accumulate_steps: int
    log_every: int
    checkpoint_every: int
    keep_checkpoints: int
    max_nan_steps: int
    compilation_cache: bool

    def __post_init__(self):
        _positive('training.num_steps', self.num_steps, 0)
        for field in ('accumulate_steps', 'log_every', 'checkpoint_every', 'keep_checkpoints'):
            _positive(f'training.{field}', getattr(self, field))
        _positive('training.max_nan_steps', self.max_nan_steps)


@dataclasses.dataclass(frozen=True)
class EvaluationHparams:
    """Held-out evaluation; knobs as in configs/base.py."""

    every: int
    num_batches: int
    final_batches: int

    def __post_init__(self):
        _positive('evaluation.every', self.every, 0)
        _positive('evaluation.num_batches', self.num_batches)
        _positive('evaluation.final_batches', self.final_batches)


@dataclasses.dataclass(frozen=True)
class ReportHparams:
    """The sample and the picture at the end of a run; knobs as in configs/base.py."""

    prompt: str
    sample_tokens: int
    temperature: float
    heatmap_tokens: int

    def __post_init__(self):
        _positive('report.sample_tokens', self.sample_tokens)
        _positive('report.heatmap_tokens', self.heatmap_tokens)
        _positive('report.temperature', self.temperature, 0)


@dataclasses.dataclass(frozen=True)
class Hparams:
    """All of a run. Hashable, so that it can be a static argument of a jitted function."""

    seed: int
    flop_budget: float
    model: ModelHparams
    data: DataHparams
    optimizer: OptimizerHparams
    training: TrainingHparams
    evaluation: EvaluationHparams
    report: ReportHparams

    def __post_init__(self):
        _positive('seed', self.seed, 0)
        _positive('flop_budget', self.flop_budget, 0)
        if not (self.flop_budget or self.training.num_steps):
            _refuse('flop_budget', self.flop_budget, 'set it, or training.num_steps, above 0')
        if self.flop_budget and self.training.num_steps:
            right = f'must be 0 where flop_budget={self.flop_budget:g} decides the steps'
            _refuse('training.num_steps', self.training.num_steps, right)
        if self.data.batch_size % self.training.accumulate_steps:
            right = f'must divide data.batch_size={self.data.batch_size}'
            _refuse('training.accumulate_steps', self.training.accumulate_steps, right)


def _nearest(name, known):
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f'the nearest knob is {near[0]!r}' if near else f'the knobs are {", ".join(known)}'


def _convert(field, value, wanted):
    """`value` as the annotated type `wanted`, or a one-line error that names the field."""
    if dataclasses.is_dataclass(wanted):
        return _build(wanted, value, field + '.')
    if typing.get_origin(wanted) is tuple:
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(_convert(field, item, typing.get_args(wanted)[0]) for item in values)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        _refuse(field, value, f'must be {wanted.__name__}, not {type(value).__name__}')
    if wanted is float and math.isnan(value):
        _refuse(field, value, 'must be a number')
    return value


def _build(cls, values, prefix=''):
    if not hasattr(values, 'items'):
        _refuse(prefix.rstrip('.'), values, 'must be a group of knobs')
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in types:
            _refuse(prefix + name, value, f'no such knob; {_nearest(name, list(types))}')
    for name in types:
        if name not in values:
            raise ValueError(f'{prefix}{name}: missing; start from configs/base.py')
    return cls(**{name: _convert(prefix + name, values[name], types[name]) for name in types})


def from_config(config) -> Hparams:
    """The checked, frozen form of a config (a ConfigDict or a nested dict of the same shape).

    Raises:
      ValueError: one line that names the field, its value and what would be right, for an unknown
        or missing knob, a wrong type, a value out of range, or sizes that do not divide.
    """
    return _build(Hparams, config)
