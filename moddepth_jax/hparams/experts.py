"""Hyper-parameters of mixtures of experts: choice, scores, capacity and losses."""

import dataclasses

from moddepth_jax.hparams.checks import (
    MAX_SIZE,
    above_zero,
    fraction,
    one_of,
    positive,
    refuse,
    size,
)
from moddepth_jax.hparams.registry import EXPERT_PRODUCTS
from moddepth_jax.hparams.routing import parse_layers


@dataclasses.dataclass(frozen=True)
class ExpertsHparams:
    """Experts in place of the mlp; knobs as in configs/base.py.

    DeepSeekMoE, Dai et al. 2024, arXiv 2401.06066; expert choice, Zhou et al. 2022, arXiv
    2202.09368.
    """

    choice: str
    layers: str
    num_routed: int
    num_shared: int
    num_noop: int
    top_k: int
    d_ff: int
    scores: str
    route_scale: float
    row_capacity: int
    balance_weight: float
    z_loss: float
    threshold_decay: float
    product: str

    NOT_BUILT = {
        name: f'{what} is not built; the balance loss (balance_weight) evens the loads'
        for what, names in {
            'group-limited routing': ('num_groups', 'n_group', 'top_k_groups', 'topk_group'),
            'a selection bias': ('selection_bias', 'e_score_correction_bias', 'bias_update_rate'),
        }.items()
        for name in names
    }

    def __post_init__(self):
        name = 'model.experts.'
        one_of(name + 'choice', self.choice, ('none', 'token', 'expert'))
        one_of(name + 'scores', self.scores, ('softmax', 'sigmoid'))
        one_of(name + 'product', self.product, ('auto', *EXPERT_PRODUCTS))
        for field in ('num_routed', 'top_k', 'd_ff'):
            size(name + field, getattr(self, field))
        for field in ('num_shared', 'num_noop'):
            positive(name + field, getattr(self, field), 0, MAX_SIZE)
        for field in ('row_capacity', 'balance_weight', 'z_loss'):
            positive(name + field, getattr(self, field), 0)
        fraction(name + 'threshold_decay', self.threshold_decay, one=False)
        above_zero(name + 'route_scale', self.route_scale)
        if self.choice == 'none':
            return
        if self.top_k > self.num_choices:
            right = f'must be at most the {self.num_choices} experts there are to choose from'
            refuse(name + 'top_k', self.top_k, right)
        if self.choice == 'expert':
            for field in ('num_noop', 'row_capacity'):
                if value := getattr(self, field):
                    right = 'must be 0 where experts choose: each takes k T / num_routed tokens'
                    refuse(name + field, value, right)

    @property
    def num_choices(self) -> int:
        """Experts that have scores: the routed experts, then the no-op experts."""
        return self.num_routed + self.num_noop

    @property
    def has_loss(self) -> bool:
        """Whether an auxiliary loss trains the experts' router."""
        balances = self.choice == 'token' and self.balance_weight > 0
        return self.choice != 'none' and (balances or self.z_loss > 0)

    def num_taken(self, length: int) -> int:
        """C of expert choice: the tokens that each expert takes of `length`, at least 1."""
        return max(1, self.top_k * length // self.num_routed)

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """Indices of the layers whose mlp is experts, ascending.

        Raises:
          ValueError: `layers` names none.
        """
        if self.choice == 'none':
            return ()
        return parse_layers('model.experts.layers', self.layers, num_layers)
