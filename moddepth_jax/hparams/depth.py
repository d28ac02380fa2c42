"""Hyper-parameters of the depth stream: what a layer reads from earlier layers, and writes."""

import dataclasses

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import STREAMS

_OF_STREAMS = [STREAMS.traits(name) for name in STREAMS]
# Knobs of which the stream's `choices` says what `auto` means.
AUTO_KNOBS = tuple(dict.fromkeys(knob for traits in _OF_STREAMS for knob in traits.choices))
# Knobs that are 0 unless the stream's `counts` names them.
COUNT_KNOBS = tuple(dict.fromkeys(knob for traits in _OF_STREAMS for knob in traits.counts))


@dataclasses.dataclass(frozen=True)
class DepthHparams:
    """The depth stream. configs/base.py describes the knobs; `auto` is replaced by its meaning."""

    stream: checks.choice_of(STREAMS)
    slots: str
    attention_slot_projection: bool
    slot_keys: str
    skipped_slots: str
    slot_window: checks.CountOrZero
    gradient_dtype: checks.choice('float32', 'model', 'none')
    value_mix: str
    sparse_layers: checks.CountOrZero
    sublayers_per_source: checks.CountOrZero
    hyper_form: str
    num_streams: checks.CountOrZero
    mudd_ways: str
    mudd_weights: str
    value_stride: checks.CountOrZero
    recent_layers: checks.CountOrZero

    def __post_init__(self):
        checks.check_fields(self, 'model.depth.')
        if not self.traits.sums_gradients:
            object.__setattr__(self, 'gradient_dtype', 'none')
        elif self.gradient_dtype == 'none':  # a run that is older than this knob
            object.__setattr__(self, 'gradient_dtype', 'model')
        for field in AUTO_KNOBS:
            self._resolve(field)
        if self.attention_slot_projection and self.slots not in ('attention', 'attention+ffn'):
            right = f'must be False: slots {self.slots} of stream {self.stream} are not attention'
            if self.slots == 'none':
                right = f'must be False: the {self.stream} stream has no such knob; use stream moda'
            refuse('model.depth.attention_slot_projection', True, right)
        if self.slot_window and not self.traits.attends:
            readers = ' or '.join(name for name in STREAMS if STREAMS.traits(name).attends)
            right = f'must be 0: attention reads no slots of stream {self.stream}; use {readers}'
            refuse('model.depth.slot_window', self.slot_window, right)

        for field in COUNT_KNOBS:
            owners = [name for name in STREAMS if field in STREAMS.traits(name).counts]
            if getattr(self, field) and self.stream not in owners:
                right = f'must be 0: the {self.stream} stream has no such knob; use stream '
                refuse(f'model.depth.{field}', getattr(self, field), right + ' or '.join(owners))

    def _resolve(self, field):
        name, value = f'model.depth.{field}', getattr(self, field)
        choices = self.traits.choices.get(field)
        if choices is not None:
            checks.one_of(name, value, ('auto', *choices))
            object.__setattr__(self, field, choices[0] if value == 'auto' else value)
        elif value in ('auto', 'none'):
            object.__setattr__(self, field, 'none')
        else:
            known = {stream: STREAMS.traits(stream).choices.get(field, ()) for stream in STREAMS}
            owners = [stream for stream, choices in known.items() if choices]
            checks.one_of(name, value, ('auto', *dict.fromkeys(sum(known.values(), ()))))
            right = f'must be auto: the {self.stream} stream has no such knob; use stream '
            refuse(name, value, right + ' or '.join(owners))

    @property
    def traits(self):
        """The class attributes of `stream_class`, without importing JAX."""
        return STREAMS.traits(self.stream)

    @property
    def stream_class(self):
        """The subclass of `model.streams.Stream`, which defines all that depends on the stream."""
        return STREAMS[self.stream]

    @property
    def slots_per_layer(self) -> int:
        """How many key/value slots a layer writes for later layers."""
        return self.stream_class.slots_per_layer(self)
