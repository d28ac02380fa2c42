"""Hyper-parameters of a mixture of experts: choice, scores, capacity and losses."""

import dataclasses

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.registry import EXPERT_PRODUCTS
from moddepth_jax.hparams.routing import parse_layers

_USE = 'is not built; use the balance loss (balance_weight)'


@dataclasses.dataclass(frozen=True)
class ExpertsHparams:
    """Experts in place of the mlp. configs/base.py describes the knobs.

    Token choice: DeepSeekMoE (Dai et al. 2024, arXiv 2401.06066). Expert choice: Zhou et al. 2022
    (arXiv 2202.09368).
    """

    choice: checks.choice('none', 'token', 'expert')
    layers: str
    num_routed: checks.Size
    num_shared: checks.SizeOrZero
    num_noop: checks.SizeOrZero
    top_k: checks.Size
    d_ff: checks.Size
    scores: checks.choice('softmax', 'sigmoid')
    route_scale: checks.AboveZero
    row_capacity: checks.CountOrZero
    balance_weight: checks.Weight
    z_loss: checks.Weight
    threshold_decay: checks.FractionBelowOne
    product: str

    NOT_BUILT = dict.fromkeys(
        ('num_groups', 'n_group', 'top_k_groups', 'topk_group'), f'group-limited routing {_USE}'
    ) | dict.fromkeys(
        ('selection_bias', 'e_score_correction_bias', 'bias_update_rate'),
        f'a selection bias {_USE}',
    )

    def __post_init__(self):
        name = 'model.experts.'
        checks.check_fields(self, name)
        checks.one_of(name + 'product', self.product, ('auto', *EXPERT_PRODUCTS))
        if self.choice == 'none':
            return
        if self.top_k > self.num_choices:
            right = f'must be at most the {self.num_choices} experts that a token can choose from'
            refuse(name + 'top_k', self.top_k, right)
        if self.choice == 'expert':
            for field in ('num_noop', 'row_capacity'):
                if value := getattr(self, field):
                    right = 'must be 0 where experts choose: each takes k T / num_routed tokens'
                    refuse(name + field, value, right)

    @property
    def num_choices(self) -> int:
        """How many experts have scores: the routed experts and the no-op experts."""
        return self.num_routed + self.num_noop

    @property
    def has_loss(self) -> bool:
        """Whether an auxiliary loss trains the experts' router."""
        balances = self.choice == 'token' and self.balance_weight > 0
        return self.choice != 'none' and (balances or self.z_loss > 0)

    def num_taken(self, length: int) -> int:
        """Return C of expert choice: how many of `length` tokens each expert takes, at least 1."""
        return max(1, self.top_k * length // self.num_routed)

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the indices of the layers with experts. Raises ValueError if there are none."""
        if self.choice == 'none':
            return ()
        return parse_layers('model.experts.layers', self.layers, num_layers)
