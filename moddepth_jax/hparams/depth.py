"""Hyper-parameters of the depth stream: what a layer reads of the earlier ones and writes."""

import dataclasses

from moddepth_jax.hparams.checks import one_of, positive, refuse

STREAMS = ('residual', 'dense', 'average', 'attention', 'moda')
CHOICES = {  # of MoDA's knobs; the first of each is what `auto` stands for
    'slots': ('attention+ffn', 'attention', 'block'),
    'slot_keys': ('rotated', 'unrotated'),
    'skipped_slots': ('projected', 'masked'),
}


@dataclasses.dataclass(frozen=True)
class DepthHparams:
    """The depth stream (Zhu et al. 2026, arXiv 2603.15619); knobs as in configs/base.py.

    `auto` is replaced by MoDA's own choice, and by `none` for the streams that have no such knob.
    """

    stream: str
    slots: str
    attention_slot_projection: bool
    slot_keys: str
    skipped_slots: str
    slot_window: int
    gradient_dtype: str

    def __post_init__(self):
        one_of('model.depth.stream', self.stream, STREAMS)
        positive('model.depth.slot_window', self.slot_window, 0)
        self._resolve_gradient_dtype()
        for field, choices in CHOICES.items():
            self._resolve(field, choices)
        if self.attention_slot_projection and self.slots not in ('attention', 'attention+ffn'):
            right = f'must be False: slots {self.slots} of stream {self.stream} are not attention'
            refuse('model.depth.attention_slot_projection', True, right)
        if self.slot_window and self.stream not in ('moda', 'attention'):
            right = f'must be 0: the {self.stream} stream has no slots'
            refuse('model.depth.slot_window', self.slot_window, right)

    def _resolve(self, field, choices):
        value = getattr(self, field)
        if self.stream == 'moda':
            one_of(f'model.depth.{field}', value, ('auto', *choices))
            object.__setattr__(self, field, choices[0] if value == 'auto' else value)
        elif value in ('auto', 'none'):
            object.__setattr__(self, field, 'none')
        else:
            one_of(f'model.depth.{field}', value, ('auto', *choices))
            right = f'must be auto: the {self.stream} stream has no such slots; use stream moda'
            refuse(f'model.depth.{field}', value, right)

    def _resolve_gradient_dtype(self):
        one_of('model.depth.gradient_dtype', self.gradient_dtype, ('float32', 'model', 'none'))
        if self.stream not in ('moda', 'attention'):
            object.__setattr__(self, 'gradient_dtype', 'none')
        elif self.gradient_dtype == 'none':  # of a run from before this knob
            object.__setattr__(self, 'gradient_dtype', 'model')

    @property
    def reads_outputs(self) -> bool:
        """Whether every layer reads the outputs [B, T, D] of all earlier ones, one by one."""
        return self.stream in ('dense', 'average')

    @property
    def slots_per_layer(self) -> int:
        """Slots that a layer writes for those above it; 0 for a stream without keys and values."""
        if self.stream == 'attention':
            return 1
        return {'attention+ffn': 2, 'attention': 1, 'block': 1, 'none': 0}[self.slots]
