"""The teacher of a run: another run, whose distributions of the next token this one learns too."""

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
    """The Linen variables of a Transformer, which do not train; `hparams` is static."""

    variables: dict
    hparams: Hparams = flax.struct.field(pytree_node=False)

    def hidden_states(self, batch):
        """x_BTD after the final norm, by the model's causal rule."""
        x_BTD, _ = Transformer(self.hparams).apply(
            jax.lax.stop_gradient(self.variables),
            batch['tokens_BT'],
            batch['segment_ids_BT'],
            causal_routing(self.hparams),
            method='hidden_states',
        )
        return x_BTD


def teacher_hparams(hparams: Hparams) -> Hparams | None:
    """Those of the teacher of a run at its last stage, or None without one.

    Raises ValueError, one line, if training.distill_from holds no run.
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
    """Raises ValueError, one line, if the teacher's ids are not those of the run's tokenizer."""
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
        right = f'must be that of this run, {tokenizer.name}, to the byte'
        raise ValueError(f'training.distill_from={folder!r}: {found}; {right}')


def abstract_teacher(hparams: Hparams) -> Teacher | None:
    """The Teacher of a run with shapes in place of arrays; None without one."""
    teacher = teacher_hparams(hparams)
    if teacher is None:
        return None
    return Teacher(abstract_variables(teacher), teacher)


def step_flops(hparams: Hparams, stage: Stage | None = None, loops: int = 0) -> float:
    """Counted FLOPs of a step: `train_step_flops`, and one forward pass of the teacher."""
    return train_step_flops(hparams, stage, loops) + teacher_flops(hparams)


def teacher_flops(hparams: Hparams) -> float:
    """Counted FLOPs of the teacher's forward pass over the batch of a step; 0 without a teacher."""
    teacher, data = teacher_hparams(hparams), hparams.data
    if teacher is None:
        return 0.0
    return forward_flops(teacher, data.batch_size, data.sequence_length, causal_routing(teacher))
