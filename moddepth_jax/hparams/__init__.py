"""Checked hyper-parameters as frozen dataclasses, which `from_config` makes from a ConfigDict."""

from moddepth_jax.hparams.depth import DepthHparams
from moddepth_jax.hparams.experts import ExpertsHparams
from moddepth_jax.hparams.from_config import check_values, from_config, unknown_knobs
from moddepth_jax.hparams.model import ModelHparams, RopeScaling
from moddepth_jax.hparams.routing import RoutingHparams, Stage
from moddepth_jax.hparams.run import (
    DataHparams,
    EvaluationHparams,
    Hparams,
    OptimizerHparams,
    ReportHparams,
    TrainingHparams,
)
