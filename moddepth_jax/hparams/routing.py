"""Hyper-parameters of Mixture-of-Depths routing."""

import dataclasses
import functools
import math
from typing import Annotated, NamedTuple

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import CAUSAL_RULES, GATES, ROUTERS


class Stage(NamedTuple):
    """A part of training with one set of static shapes."""

    begins: float  # the share of the steps that come before it
    capacity: float  # the share of the tokens that a routed block processes
    routing: str  # how tokens are selected: top_c or a causal rule


@dataclasses.dataclass(frozen=True)
class RoutingHparams:
    """Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258).

    configs/base.py describes the knobs.
    """

    router: str
    layers: str
    part: checks.choice('block', 'attention', 'mlp')
    capacity: checks.FractionAboveZero
    capacity_form: checks.choice('fraction', 'log_length')
    log_length_max: Annotated[int, functools.partial(checks.positive, minimum=2)]
    capacity_stages: str
    select_per: checks.choice('row', 'segment')
    gate: str
    gate_scale: checks.AboveZero
    loop_update: checks.choice('auto', 'output', 'change', 'gated_loops', 'gated_exit')
    loop_keys: checks.choice('own', 'first')
    balance_weight: checks.Weight
    z_loss: checks.Weight
    initial_gate: checks.Weight
    causal_rule: str
    predictor_width: Annotated[int, functools.partial(checks.positive, minimum=0, maximum=64)]
    predictor_loss_weight: checks.Weight
    aux_loss_weight: checks.Weight
    threshold_decay: checks.FractionBelowOne
    train_rule: checks.choice('top_c', 'threshold')
    threshold_warmup: checks.FractionBelowOne
    cache_capacity: Annotated[float, checks.positive]
    overflow: checks.choice('skip', 'grow')

    def check_values(self):
        """Resolve `auto` and make all checks but those of the router's class, which import JAX."""
        checks.one_of('model.routing.router', self.router, ('none', *ROUTERS))
        for field, table, own in (
            ('gate', GATES, self.traits.gates),
            ('causal_rule', CAUSAL_RULES, self.traits.rules),
        ):
            # `_resolve` refuses what exists, but not for this router.
            value = getattr(self, field)
            known = table if value in table else own
            checks.one_of(f'model.routing.{field}', value, ('auto', *known))
        for attribute, table in (('gates', GATES), ('rules', CAUSAL_RULES)):
            for name in getattr(self.traits, attribute):
                checks.one_of(f'model.routing.router={self.router!r}: {attribute}', name, table)
        checks.check_fields(self, 'model.routing.')
        self._check_log_length()
        if self.routes_loops:
            assigns = self.traits.assigns_depth
            self._resolve(
                'loop_update', ('gated_loops', 'gated_exit') if assigns else ('output', 'change')
            )
        else:
            for field, only in (('loop_update', 'auto'), ('loop_keys', 'own')):
                if (value := getattr(self, field)) != only:
                    right = f'must be {only}: no loop is routed; set model.routing.layers to loops'
                    refuse(f'model.routing.{field}', value, right)
        gates = self.traits.gates
        if self.routes_loops and 'sigmoid' in gates:  # raw gates of all tokens have mean 0
            gates = tuple(dict.fromkeys(('sigmoid', *gates)))
        self._resolve('gate', gates)
        rules = self._possible_rules()
        by_threshold = self.train_rule == 'threshold' and 'threshold' in rules
        self._resolve('causal_rule', ('threshold',) if by_threshold else rules)
        if self.router != 'none':
            self._check_rule()
        capped = not self.traits.assigns_depth and self.overflow == 'skip'
        if self.loop_keys == 'first' and capped:
            right = 'must be grow if loop_keys is first: later loops have no cache that overflows'
            refuse('model.routing.overflow', self.overflow, right)

    def __post_init__(self):
        self.check_values()
        if self.router != 'none':
            self.router_class.check(self)

    @property
    def routes_loops(self) -> bool:
        """Whether loops are routed instead of blocks (Mixture-of-Recursions)."""
        return self.router != 'none' and self.layers == 'loops'

    @property
    def router_class(self):
        """The subclass of `model.mod.routers.Router`; without a router that of `learned`."""
        return ROUTERS['learned' if self.router == 'none' else self.router]

    @property
    def traits(self):
        """The class attributes of `router_class`, without importing JAX."""
        return ROUTERS.traits('learned' if self.router == 'none' else self.router)

    def _possible_rules(self):
        rules, is_control = self.traits.rules, self.traits.is_control
        if self.select_per == 'row' or is_control:
            return rules
        # If documents do not compete, no single score separates the selected tokens of a row.
        return tuple(rule for rule in rules if not CAUSAL_RULES.traits(rule).needs_threshold)

    def _resolve(self, field, choices):
        value = getattr(self, field)
        if value == 'auto':
            object.__setattr__(self, field, choices[0])
        elif value not in choices:
            how = f', trained by {self.train_rule} per {self.select_per}'
            right = f'must be one of auto, {", ".join(choices)} for the {self.router} router{how}'
            lists = {'gate': (GATES, 'gates'), 'causal_rule': (CAUSAL_RULES, 'rules')}
            registry, attribute = lists.get(field, (None, ''))
            # The value is registered: `check_values` refuses others first.
            if registry and not registry.is_own(value):
                right += f'; a router lists what it supports in its attribute `{attribute}`'
            refuse(f'model.routing.{field}', value, right)

    def _check_rule(self):
        weight = CAUSAL_RULES.traits(self.causal_rule).loss_weight
        if weight and not getattr(self, weight):
            right = f'must be above 0 if causal_rule is {self.causal_rule}, which this loss trains'
            refuse(f'model.routing.{weight}', 0.0, right)
        if self.train_rule == 'top_c':
            return
        if not self.tracks_threshold:
            right = f'must be top_c: the {self.router} router per {self.select_per} has no average'
            refuse('model.routing.train_rule', self.train_rule, right)
        if self.overflow == 'grow':
            right = 'must be skip where train_rule is threshold: C_max is static'
            refuse('model.routing.overflow', self.overflow, right)
        if not self.threshold_warmup:
            right = 'must be above 0 where train_rule is threshold: the average starts from top-C'
            refuse('model.routing.threshold_warmup', self.threshold_warmup, right)

    def _check_log_length(self):
        stages = [capacity for capacity, _ in _parse_stages(self.capacity_stages)]
        # With a smaller capacity, C would shrink while the length grows.
        least = 1 / (1 + math.log(self.log_length_max))
        for field, values in (('capacity', [self.capacity]), ('capacity_stages', stages)):
            if self.capacity_form == 'log_length' and min(values, default=1) < least:
                right = f'must be {least:.3f} or more under log_length to {self.log_length_max}'
                refuse(f'model.routing.{field}', getattr(self, field), right)

    @property
    def tracks_threshold(self) -> bool:
        """Whether the model keeps a moving average of each layer's C-th largest score."""
        if self.router == 'none' or self.traits.is_control:
            return False
        return any(CAUSAL_RULES.traits(rule).needs_threshold for rule in self._possible_rules())

    @property
    def rules(self) -> tuple[str, ...]:
        """The causal rules that a model trained with these knobs can run, its own first."""
        untrained = (
            rule for rule in self._possible_rules() if not CAUSAL_RULES.traits(rule).loss_weight
        )
        return tuple(dict.fromkeys((self.causal_rule, *untrained, 'bypass')))

    @property
    def rule_loss_weight(self) -> float:
        """The weight of the loss that trains the causal rule; 0 if no loss does."""
        weight = CAUSAL_RULES.traits(self.causal_rule).loss_weight
        return getattr(self, weight) if weight else 0.0

    def num_selected(self, length: int, progress: float = 1.0) -> int:
        """Return C, how many tokens of a row of `length` are selected, at least 1.

        Under `log_length` the share falls from 1 for one token to `capacity` at log_length_max.
        `progress` goes from 0 in the first routed loop, which selects all tokens, to 1 in the last
        one, which selects that share; between them the share falls linearly.
        """
        share = 1.0 if self.traits.assigns_depth else self.capacity
        if self.capacity_form == 'log_length':
            clamped = math.log(min(length, self.log_length_max)) / math.log(self.log_length_max)
            share = 1 - clamped * (1 - self.capacity)
        share = 1 - progress * (1 - share)
        return max(1, math.floor(share * length + 1e-6))

    @property
    def looks_ahead(self) -> bool:
        """Whether the selection in training depends on later tokens."""
        return self.router != 'none' and not self.traits.assigns_depth

    def cache_size(self, context: int, routing: str, progress: float = 1.0) -> int:
        """Return the capacity of a routed block's cache for `context` tokens, under a causal rule.

        `num_selected` describes `progress`. A model that does not look ahead may also run `top_c`.
        """
        if routing == 'top_c' or not CAUSAL_RULES[routing].is_capped:
            return context
        size = min(context, self.cache_capacity * self.num_selected(context, progress) + 1e-6)
        return max(1, math.floor(size))

    def max_selected(self, context: int, routing: str, progress: float = 1.0) -> int:
        """Return the most tokens of a row that a causal rule selects: `cache_size`, or all."""
        return context if self.overflow == 'grow' else self.cache_size(context, routing, progress)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of training, in order; the last one trains at `capacity`."""
        begins, capacities = 0.0, []
        for capacity, share in _parse_stages(self.capacity_stages):
            capacities.append((begins, capacity))
            begins += share
        capacities.append((begins, self.capacity))
        first = self.causal_rule if self.traits.assigns_depth else 'top_c'
        switch = self.threshold_warmup if self.train_rule == 'threshold' else 1.0
        places = sorted({begins for begins, _ in capacities} | ({switch} if switch < 1 else set()))
        return tuple(
            Stage(
                place,
                [capacity for begins, capacity in capacities if begins <= place][-1],
                'threshold' if place >= switch else first,
            )
            for place in places
        )

    def routed_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the routed blocks, ascending; () if loops are routed.

        Raises ValueError if `layers` names no block.
        """
        if self.router == 'none' or self.routes_loops:
            return ()
        return parse_layers('model.routing.layers', self.layers, num_layers)


def parse_layers(field: str, text: str, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers that a knob names, ascending.

    every:N is every N-th layer from N-1 on. middle:FIRST:LAST leaves out that many layers at each
    end. 1,3,5 is a list. Raises ValueError if there are no such layers.
    """
    kind, *numbers = text.split(':')
    try:
        if kind == 'every':
            (n,) = map(int, numbers)
            chosen = range(n - 1, num_layers, n)
        elif kind == 'middle':
            first, last = map(int, numbers)
            chosen = range(first, num_layers - last)
        else:
            chosen = sorted({int(layer) for layer in text.split(',')})
    except ValueError:
        chosen = ()
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < num_layers:
        right = 'must be every:N, middle:FIRST:LAST or a list such as 0,1 of layers below'
        refuse(field, text, f'{right} {num_layers}, with at least one layer')
    return tuple(chosen)


def _parse_stages(text):
    """Return the capacities and shares of the steps: '1:0.2,0.5:0.3' -> [(1, 0.2), (0.5, 0.3)]."""
    right = (
        'must be CAPACITY:SHARE,... such as 1:0.2,0.5:0.3, with capacities in (0, 1] and shares of '
        'the steps above 0 whose sum is below 1'
    )
    try:
        stages = [tuple(map(float, stage.split(':'))) for stage in text.split(',') if text]
        ok = all(0 < capacity <= 1 and share > 0 for capacity, share in stages)
    except ValueError:
        ok = False
    if not ok or sum(share for _, share in stages) >= 1:
        refuse('model.routing.capacity_stages', text, right)
    return stages
