"""Hyper-parameters of low-rank adapters."""

import dataclasses

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.checks import refuse


@dataclasses.dataclass(frozen=True)
class AdapterHparams:
    """LoRA (Hu et al. 2021, arXiv 2106.09685). configs/base.py describes the knobs."""

    rank: checks.SizeOrZero
    alpha: checks.AboveZero
    params: tuple[str, ...]

    def __post_init__(self):
        checks.check_fields(self, 'model.adapters.')
        if not self.params or not all(pattern.strip() for pattern in self.params):
            right = "must hold globs of names of matrices, such as '*/attention/*'"
            refuse('model.adapters.params', self.params, right)

    @property
    def scale(self) -> float:
        """The factor on A B."""
        return self.alpha / self.rank
