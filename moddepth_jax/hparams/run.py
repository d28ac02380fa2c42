"""Hyper-parameters of a run: data, optimizer, training, evaluation, report, and `Hparams`."""

import dataclasses
import fractions
import functools
import math
import os
from typing import Annotated

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.model import ModelHparams
from moddepth_jax.hparams.registry import OPTIMIZERS, SCHEDULES
from moddepth_jax.hparams.routing import Stage


@dataclasses.dataclass(frozen=True)
class DataHparams:
    """Corpus, tokenizer and batches. configs/base.py describes the knobs."""

    source: str
    mixture: str
    text_field: str
    tokenizer: str
    sequence_length: checks.Count
    batch_size: checks.Count
    held_out_fraction: Annotated[float, functools.partial(checks.fraction, zero=False, one=False)]
    log_windows: bool
    encoding: Annotated[str, checks.encoding]

    def __post_init__(self):
        checks.check_fields(self, 'data.')
        if not self.source.strip():
            right = (
                'must be stdlib, python_environment, synthetic, recall, a file, folder or glob of '
                'text, a folder that launch.prepare wrote, or mixture'
            )
            refuse('data.source', self.source, right)
        # The reader checks whether a file exists.
        if os.sep not in self.tokenizer and not self.tokenizer.endswith(('.json', '.model')):
            paths = 'a tokenizer.json', 'a SentencePiece .model', 'the path of a folder with one'
            checks.one_of('data.tokenizer', self.tokenizer, ('bytes', 'prepared', *paths))
        if self.mixture and self.source != 'mixture':
            right = f"must be empty where data.source={self.source!r}; or set that to 'mixture'"
            refuse('data.mixture', self.mixture, right)
        if self.source == 'mixture':
            _members(self.mixture)
        if self.batch_size * self.sequence_length > checks.MAX_INT:
            right = f'and data.sequence_length={self.sequence_length} must give below 2**31 tokens'
            refuse('data.batch_size', self.batch_size, right)

    @property
    def members(self) -> dict[str, fractions.Fraction]:
        """The exact share of each folder of `data.mixture`; {} for another source."""
        return _members(self.mixture) if self.source == 'mixture' else {}

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of prepared text: the members of the mixture, or the source."""
        return tuple(self.members) or (self.source,)


def _members(mixture):
    weights = {}
    for member in mixture.split(','):
        folder, colon, text = member.strip().rpartition(':')
        folder = os.path.normpath(folder) if folder else ''
        if not (folder and colon):
            right = f'{member!r} must be FOLDER:WEIGHT, as in data/web:0.7,data/code:0.3'
            refuse('data.mixture', mixture, right)
        try:  # float first: a Fraction of a huge exponent would fill the memory
            weight = fractions.Fraction(text) if 0 < float(text) < math.inf else 0
        except ValueError:
            weight = 0
        if not weight:
            refuse('data.mixture', mixture, f'weight {text!r} of {folder} must be a number above 0')
        if folder in weights:
            refuse('data.mixture', mixture, f'{folder} must be listed once; add up its weights')
        weights[folder] = weight
    total = sum(weights.values())
    return {folder: weight / total for folder, weight in weights.items()}


@dataclasses.dataclass(frozen=True)
class OptimizerHparams:
    """The optimizer, its schedule and clipping. configs/base.py describes the knobs."""

    name: checks.choice_of(OPTIMIZERS)
    learning_rate: checks.AboveZero
    schedule: checks.choice_of(SCHEDULES)
    decay_fraction: checks.FractionAboveZero
    final_fraction: checks.Fraction
    warmup_fraction: checks.Fraction
    b1: checks.FractionBelowOne
    b2: checks.FractionBelowOne
    eps: checks.AboveZero  # if all gradients are 0, the update is divided by this alone
    weight_decay: checks.Weight
    decay_embeddings: bool
    trainable: tuple[str, ...]
    rate_factors: tuple[str, ...]
    clip_norm: checks.Weight
    z_loss: checks.Weight

    def __post_init__(self):
        checks.check_fields(self, 'optimizer.')
        if not all(pattern.strip() for pattern in self.trainable):
            right = "must hold globs of names of parameters, such as '*/router/*'; () or * is all"
            refuse('optimizer.trainable', self.trainable, right)
        try:
            good = all(glob.strip() and 0 < factor < math.inf for glob, factor in self.factors)
        except ValueError:
            good = False
        if not good:
            right = "must hold GLOB:FACTOR with a factor above 0, such as '*/residual_scale:0.01'"
            refuse('optimizer.rate_factors', self.rate_factors, right)

    @property
    def factors(self) -> tuple[tuple[str, float], ...]:
        """The (glob, factor) pairs of `rate_factors`."""
        parts = (text.rpartition(':') for text in self.rate_factors)
        return tuple((glob, float(factor)) for glob, _, factor in parts)


@dataclasses.dataclass(frozen=True)
class TrainingHparams:
    """The train loop. configs/base.py describes the knobs."""

    num_steps: checks.CountOrZero
    extended_from: checks.CountOrZero
    loops: tuple[int, ...]
    accumulate_steps: checks.Count
    log_every: checks.Count
    checkpoint_every: checks.Count
    keep_checkpoints: checks.Count
    max_nan_steps: checks.Count
    max_unsharded: checks.Fraction
    loss_chunk: checks.CountOrZero
    distill_from: str
    distill_weight: checks.FractionAboveZero
    distill_temperature: checks.AboveZero
    compilation_cache: bool

    def __post_init__(self):
        checks.check_fields(self, 'training.')


@dataclasses.dataclass(frozen=True)
class EvaluationHparams:
    """Evaluation on the held-out set. configs/base.py describes the knobs."""

    every: checks.CountOrZero
    num_batches: checks.Count
    final_batches: checks.Count

    def __post_init__(self):
        checks.check_fields(self, 'evaluation.')


@dataclasses.dataclass(frozen=True)
class ReportHparams:
    """The sample and the figure at the end of a run. configs/base.py describes the knobs."""

    prompt: str
    sample_tokens: checks.CountOrZero
    temperature: checks.Weight
    top_p: checks.FractionAboveZero
    heatmap_tokens: checks.Count

    def __post_init__(self):
        checks.check_fields(self, 'report.')
        try:
            self.prompt.encode()
        except UnicodeEncodeError:  # half a surrogate pair, or Latin-1 from a terminal
            refuse('report.prompt', self.prompt, 'must be text that UTF-8 can encode')


@dataclasses.dataclass(frozen=True)
class Hparams:
    """All knobs of a run. Hashable, so that it can be a static argument of jitted functions."""

    seed: int
    flop_budget: checks.Weight
    model: ModelHparams
    data: DataHparams
    optimizer: OptimizerHparams
    training: TrainingHparams
    evaluation: EvaluationHparams
    report: ReportHparams

    def __post_init__(self):
        checks.check_fields(self, '')
        if not 0 <= self.seed < 2**32:
            refuse('seed', self.seed, 'must lie in [0, 2**32)')
        if not (self.flop_budget or self.training.num_steps):
            refuse('flop_budget', self.flop_budget, 'must be above 0, or set training.num_steps')
        if self.flop_budget and self.training.num_steps:
            right = f'must be 0 because flop_budget={self.flop_budget:g} decides; or set that to 0'
            refuse('training.num_steps', self.training.num_steps, right)
        if self.data.batch_size % self.training.accumulate_steps:
            right = f'must divide data.batch_size={self.data.batch_size}'
            refuse('training.accumulate_steps', self.training.accumulate_steps, right)
        if self.training.loops:
            self._check_loops()
        for field in ('num_batches', 'final_batches'):
            batches, members = getattr(self.evaluation, field), len(self.data.members)
            if batches < members:
                right = f'must be at least {members}: one for each member of data.mixture'
                refuse(f'evaluation.{field}', batches, right)

    def _check_loops(self):
        counts, model = self.training.loops, self.model
        right = ''
        if min(counts) < 1 or len(set(counts)) < 2:
            right = 'must be (), or two different counts or more, such as (1, 2, 4)'
        elif not model.looped:
            right = 'must be (): no block is looped; set model.looped_layers to all'
        elif model.looks_ahead or model.routed_layers:
            right = 'must be () where blocks are routed or experts choose: each loop has its own '
            right += 'averages'
        elif model.depth.traits.sized_by_depth:
            stream = model.depth.stream
            right = f'must be (): the {stream} stream has weights for each block that runs'
        elif model.sized_by_loops and max(counts) != model.loops:
            right = f'must have model.loops={model.loops} as its largest count: each loop has '
            right += f'its own {model.sized_by_loops}'
        if right:
            refuse('training.loops', counts, right)
        dataclasses.replace(model, loops=max(counts))  # refuses a count that is too large

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of training, in order; one for a dense model."""
        routing = self.model.routing
        return routing.stages if self.model.routed_layers else (Stage(0.0, 1.0, 'top_c'),)

    def steps_of_shares(self, num_steps: int) -> int:
        """Return the steps of which the warm-up and the stages are shares."""
        return self.training.extended_from or num_steps

    def first_step(self, stage: Stage, num_steps: int) -> int:
        """Return the step at which a stage of a run of `num_steps` begins."""
        steps = self.steps_of_shares(num_steps)
        return min(round(stage.begins * steps), max(0, steps - 1))

    def first_step_of_capacity(self, stage: Stage, num_steps: int) -> int:
        """Return the step at which the capacity of a stage began."""
        before = self.stages[: self.stages.index(stage)]
        others = [n for n, earlier in enumerate(before) if earlier.capacity != stage.capacity]
        return self.first_step(self.stages[others[-1] + 1 if others else 0], num_steps)

    def with_loops(self, loops: int) -> 'Hparams':
        """Return these hyper-parameters with `loops` loops in every step; 0: unchanged."""
        if not loops:
            return self
        training = dataclasses.replace(self.training, loops=())
        model = dataclasses.replace(self.model, loops=loops)
        return dataclasses.replace(self, model=model, training=training)

    @property
    def without_adapters(self) -> 'Hparams':
        """These hyper-parameters after the adapters are merged into their matrices."""
        return dataclasses.replace(self, model=self.model.without_adapters)

    def at(self, stage: Stage) -> 'Hparams':
        """Return these hyper-parameters with the capacity of a stage of training."""
        if not self.model.routed_layers:
            return self
        routing = dataclasses.replace(
            self.model.routing, capacity=stage.capacity, capacity_stages='', train_rule='top_c'
        )
        return dataclasses.replace(self, model=dataclasses.replace(self.model, routing=routing))
