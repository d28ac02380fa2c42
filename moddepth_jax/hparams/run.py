"""Hyper-parameters of a run: data, optimizer, training, evaluation, report; and all of it."""

import dataclasses
import difflib
import fractions
import math
import os

from moddepth_jax.hparams.checks import MAX_INT, above_zero, fraction, one_of, positive, refuse
from moddepth_jax.hparams.model import ModelHparams
from moddepth_jax.hparams.registry import OPTIMIZERS, SCHEDULES
from moddepth_jax.hparams.routing import Stage


@dataclasses.dataclass(frozen=True)
class DataHparams:
    """Corpus, tokenizer and windows; knobs as in configs/base.py."""

    source: str
    mixture: str
    text_field: str
    tokenizer: str
    sequence_length: int
    batch_size: int
    held_out_fraction: float
    log_windows: bool

    def __post_init__(self):
        if not self.source.strip():
            right = (
                'must be stdlib, python_environment, synthetic, recall, a glob of text files, a '
                'folder that launch.prepare wrote, or mixture'
            )
            refuse('data.source', self.source, right)
        _check_tokenizer(self.tokenizer)
        if self.mixture and self.source != 'mixture':
            right = f"must be empty where data.source={self.source!r}; or set that to 'mixture'"
            refuse('data.mixture', self.mixture, right)
        if self.source == 'mixture':
            _members(self.mixture)
        positive('data.sequence_length', self.sequence_length)
        positive('data.batch_size', self.batch_size)
        if self.batch_size * self.sequence_length > MAX_INT:
            right = f'and data.sequence_length={self.sequence_length} must give below 2**31 tokens'
            refuse('data.batch_size', self.batch_size, right)
        fraction('data.held_out_fraction', self.held_out_fraction, zero=False, one=False)

    @property
    def members(self) -> dict[str, fractions.Fraction]:
        """The exact share of each folder of `data.mixture`; empty for another source."""
        return _members(self.mixture) if self.source == 'mixture' else {}

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of prepared text: the members of the mixture, or the source."""
        return tuple(self.members) or (self.source,)


def _check_tokenizer(name):
    """Refuse what cannot be a tokenizer. The reader checks whether a file exists."""
    if os.sep in name or name.endswith(('.json', '.model')):
        return
    right = 'a tokenizer.json, a SentencePiece .model or the path of a folder with one'
    if name.startswith('bpe:'):
        refuse('data.tokenizer', name, f'launch.prepare trains it; then set prepared, or {right}')
    names = ('bytes', 'prepared')
    near = difflib.get_close_matches(name, names, n=1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    if name not in names:
        refuse('data.tokenizer', name, f'must be bytes, prepared, {right}{hint}')


def _weight(text):
    """Parse an exact number above 0; None if the text is not one."""
    try:
        number = float(text)  # first: Fraction of a huge exponent would fill the memory
        return fractions.Fraction(text) if 0 < number < math.inf else None
    except ValueError:
        return None


def _members(mixture):
    weights = {}
    for member in mixture.split(','):
        folder, colon, text = member.strip().rpartition(':')
        folder = os.path.normpath(folder) if folder else ''
        if not (folder and colon):
            right = f'{member!r} must be FOLDER:WEIGHT, as in data/web:0.7,data/code:0.3'
            refuse('data.mixture', mixture, right)
        weight = _weight(text)
        if weight is None:
            refuse('data.mixture', mixture, f'weight {text!r} of {folder} must be a number above 0')
        if folder in weights:
            refuse('data.mixture', mixture, f'{folder} must be a member once; add up its weights')
        weights[folder] = weight
    total = sum(weights.values())
    return {folder: weight / total for folder, weight in weights.items()}


@dataclasses.dataclass(frozen=True)
class OptimizerHparams:
    """The optimizer, its schedule and clipping; knobs as in configs/base.py."""

    name: str
    learning_rate: float
    schedule: str
    decay_fraction: float
    final_fraction: float
    warmup_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decay_embeddings: bool
    clip_norm: float
    z_loss: float

    def __post_init__(self):
        one_of('optimizer.name', self.name, OPTIMIZERS)
        one_of('optimizer.schedule', self.schedule, SCHEDULES)
        fraction('optimizer.decay_fraction', self.decay_fraction, zero=False)
        above_zero('optimizer.learning_rate', self.learning_rate)
        above_zero('optimizer.eps', self.eps)  # if all gradients are 0, it alone divides
        fraction('optimizer.final_fraction', self.final_fraction)
        fraction('optimizer.warmup_fraction', self.warmup_fraction)
        fraction('optimizer.b1', self.b1, one=False)
        fraction('optimizer.b2', self.b2, one=False)
        for field in ('weight_decay', 'clip_norm', 'z_loss'):
            positive(f'optimizer.{field}', getattr(self, field), 0)


@dataclasses.dataclass(frozen=True)
class TrainingHparams:
    """The train loop; knobs as in configs/base.py."""

    num_steps: int
    accumulate_steps: int
    log_every: int
    checkpoint_every: int
    keep_checkpoints: int
    max_nan_steps: int
    max_unsharded: float
    loss_chunk: int
    compilation_cache: bool

    def __post_init__(self):
        if not 0 <= self.num_steps < 2**31:
            refuse('training.num_steps', self.num_steps, 'must lie in [0, 2**31)')
        for field in ('accumulate_steps', 'log_every', 'checkpoint_every', 'keep_checkpoints'):
            positive(f'training.{field}', getattr(self, field))
        positive('training.max_nan_steps', self.max_nan_steps)
        fraction('training.max_unsharded', self.max_unsharded)
        positive('training.loss_chunk', self.loss_chunk, 0)


@dataclasses.dataclass(frozen=True)
class EvaluationHparams:
    """Held-out evaluation; knobs as in configs/base.py."""

    every: int
    num_batches: int
    final_batches: int

    def __post_init__(self):
        positive('evaluation.every', self.every, 0)
        positive('evaluation.num_batches', self.num_batches)
        positive('evaluation.final_batches', self.final_batches)


@dataclasses.dataclass(frozen=True)
class ReportHparams:
    """The sample and the picture at the end of a run; knobs as in configs/base.py."""

    prompt: str
    sample_tokens: int
    temperature: float
    top_p: float
    heatmap_tokens: int

    def __post_init__(self):
        try:
            self.prompt.encode()
        except UnicodeEncodeError:  # half a surrogate pair, or what a terminal sent in Latin-1
            refuse('report.prompt', self.prompt, 'must be text that UTF-8 can hold')
        positive('report.sample_tokens', self.sample_tokens)
        positive('report.heatmap_tokens', self.heatmap_tokens)
        positive('report.temperature', self.temperature, 0)
        fraction('report.top_p', self.top_p, zero=False)


@dataclasses.dataclass(frozen=True)
class Hparams:
    """All knobs of a run. Hashable, so that it can be a static argument of a jitted function."""

    seed: int
    flop_budget: float
    model: ModelHparams
    data: DataHparams
    optimizer: OptimizerHparams
    training: TrainingHparams
    evaluation: EvaluationHparams
    report: ReportHparams

    def __post_init__(self):
        if not 0 <= self.seed < 2**32:
            refuse('seed', self.seed, 'must lie in [0, 2**32)')
        positive('flop_budget', self.flop_budget, 0)
        if not (self.flop_budget or self.training.num_steps):
            refuse('flop_budget', self.flop_budget, 'set it, or training.num_steps, above 0')
        if self.flop_budget and self.training.num_steps:
            right = f'must be 0 where flop_budget={self.flop_budget:g} decides; or set that to 0'
            refuse('training.num_steps', self.training.num_steps, right)
        if self.data.batch_size % self.training.accumulate_steps:
            right = f'must divide data.batch_size={self.data.batch_size}'
            refuse('training.accumulate_steps', self.training.accumulate_steps, right)
        for field in ('num_batches', 'final_batches'):
            batches, members = getattr(self.evaluation, field), len(self.data.members)
            if batches < members:
                right = f'must be at least {members}: one for each member of data.mixture'
                refuse(f'evaluation.{field}', batches, right)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of training, in order; one for a dense model."""
        routing = self.model.routing
        return routing.stages if self.model.routed_layers else (Stage(0.0, 1.0, 'top_c'),)

    def at(self, stage: Stage) -> 'Hparams':
        """These hyper-parameters, with the capacity of a stage of training."""
        if not self.model.routed_layers:
            return self
        routing = dataclasses.replace(
            self.model.routing, capacity=stage.capacity, capacity_stages='', train_rule='top_c'
        )
        return dataclasses.replace(self, model=dataclasses.replace(self.model, routing=routing))
