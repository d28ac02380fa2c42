"""Distillation: the teacher is another run, whose next-token distributions a run also learns."""

import functools

import flax.struct
import jax

from moddepth_jax.data.tokenizers.tokenizer import Tokenizer, tokenizer_of
from moddepth_jax.hparams import Hparams, Stage
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.flops import forward_flops, train_step_flops
from moddepth_jax.model.transformer import Transformer, abstract_variables
from moddepth_jax.training.run_dir import build_stored, read_config


@flax.struct.dataclass
class Teacher:
    """A Transformer that is not trained: its Linen variables and, static, its `hparams`."""

    variables: dict
    hparams: Hparams = flax.struct.field(pytree_node=False)

    def hidden_states(self, batch):
        """Return x_BTD after the final norm, under the model's causal rule."""
        x_BTD, _ = Transformer(self.hparams).apply(
            jax.lax.stop_gradient(self.variables),
            batch['tokens_BT'],
            batch['segment_ids_BT'],
            causal_routing(self.hparams),
            method='hidden_states',
        )
        return x_BTD


def teacher_hparams(hparams: Hparams) -> Hparams | None:
    """Return the hyper-parameters of a run's teacher at its last stage; None without a teacher.

    Raises ValueError, one line, if training.distill_from is not the directory of a run.
    """
    folder = hparams.training.distill_from
    return _read(folder) if folder else None


@functools.lru_cache(maxsize=8)
def _read(folder):
    try:
        stored = build_stored(folder, read_config(folder)[0])
    except ValueError as error:
        found = str(error).removeprefix(f'--workdir={folder}: ')
        raise ValueError(f'training.distill_from={folder!r}: {found}') from None
    return stored.at(stored.stages[-1])


def check_teacher(hparams: Hparams, tokenizer: Tokenizer):
    """Raise ValueError, one line, if the teacher has another vocabulary or tokenizer."""
    teacher = teacher_hparams(hparams)
    if teacher is None:
        return
    folder, ids = hparams.training.distill_from, hparams.model.vocab_size
    if teacher.model.vocab_size != ids:
        found = f'has model.vocab_size={teacher.model.vocab_size}'
        raise ValueError(
            f'training.distill_from={folder!r}: {found}; must be {ids}, as in this run'
        )
    theirs = tokenizer_of(teacher.data, folder)
    if theirs.sha256 != tokenizer.sha256:
        found = f'has the tokenizer {theirs.name}'
        right = f'must be the tokenizer of this run, {tokenizer.name}, byte for byte'
        raise ValueError(f'training.distill_from={folder!r}: {found}; {right}')


def abstract_teacher(hparams: Hparams) -> Teacher | None:
    """Return the Teacher of a run with shapes in place of arrays; None without a teacher."""
    teacher = teacher_hparams(hparams)
    if teacher is None:
        return None
    return Teacher(abstract_variables(teacher), teacher)


def step_flops(hparams: Hparams, stage: Stage | None = None, loops: int = 0) -> float:
    """Return the counted FLOPs of a step: `train_step_flops` plus the teacher's forward pass."""
    return train_step_flops(hparams, stage, loops) + teacher_flops(hparams)


def teacher_flops(hparams: Hparams) -> float:
    """Return the counted FLOPs of the teacher's forward pass over a batch; 0 without a teacher."""
    teacher, data = teacher_hparams(hparams), hparams.data
    if teacher is None:
        return 0.0
    return forward_flops(teacher, data.batch_size, data.sequence_length, causal_routing(teacher))
