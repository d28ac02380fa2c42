"""Builds the Hparams of each run of a study from a config file and the changes of its variant."""

from absl import flags
from ml_collections import ConfigDict

from configs import mode_integrated, moe
from launch import config_file
from moddepth_jax.hparams import Hparams, from_config
from moddepth_jax.studies.plan import (
    LOOPED_VARIANTS,
    VARIANTS,
    PlannedRun,
    base_name,
    blocks_of_loops,
    nearest_depth,
)

SET_BY_STUDY = {  # knobs that a study sets, and the flags that determine them
    'seed': '--seeds',
    'flop_budget': '--budgets',
    'training.num_steps': '--steps',
    'optimizer.learning_rate': '--learning_rates',
    **dict.fromkeys(('model.num_layers', 'model.d_model'), '--sizes'),
    # Those of MoD: routing, and all that the plain variants set.
    **dict.fromkeys(VARIANTS['mod'].changes, '--variants'),
}
# In errors of a config that lacks an argument.
_NOT_OF_A_STUDY = ('no such config argument', 'takes no text')


class StudyConfig:
    """Builds the configs of a study.

    Args:
      spec: FILE.py or FILE.py:TEXT.
      overrides: knobs of the command line, by dotted name.
      kind: unit of the budgets, flops or steps.

    Raises:
      ValueError: `overrides` has a knob that the study sets.
    """

    def __init__(self, spec: str, overrides: dict, kind: str):
        self._path, _, self._text = spec.partition(':')
        self._overrides, self._shallower = dict(overrides), {}
        self._argument = {'flops': 'budget', 'steps': 'steps'}[kind]
        for name, flag in SET_BY_STUDY.items():
            if name in overrides:
                raise ValueError(f'--config.{name}={overrides[name]}: a study sets it; use {flag}')

    def hparams(self, run: PlannedRun) -> Hparams:
        """Return the Hparams of a planned run. Raises ValueError if size or knobs do not fit."""
        config = self.config(run.variant, run.trained, run.budget)
        config.seed = run.seed
        config.optimizer.learning_rate = run.learning_rate
        return from_config(config)

    def config(self, variant: str, size: str, budget: float) -> ConfigDict:
        """Return the config: that of the file, with the overrides, then the variant's changes."""
        amount = f'{budget:.0f}' if self._argument == 'steps' else repr(float(budget))
        text = ','.join(filter(None, (self._text, f'size={size}', f'{self._argument}={amount}')))
        try:
            config = config_file.load(f'{self._path}:{text}')
        except flags.Error as error:
            line = str(error).removeprefix(f'--config={self._path}:{text}: ')
            if any(found in line for found in _NOT_OF_A_STUDY):
                line += f'; a study needs a config that takes size=LxD and {self._argument}='
                if self._argument == 'steps':
                    line += '; use --budgets with one that takes budget='
                else:
                    line += '; use --steps with one that takes steps='
            raise ValueError(f'--config={self._path} of size {size}: {line}') from None
        changes = VARIANTS[variant].changes
        if config.model.experts.choice == 'none' != changes['model.experts.choice']:
            moe.apply_experts(config)
        config.update_from_flattened_dict(self._overrides)
        if changes.get('model.norm_placement') == (placement := config.model.norm_placement):
            right = (
                f'the others are {placement}-norm as well; add --config.model.norm_placement=pre'
            )
            raise ValueError(f'--variants={variant}: {right}')
        config.update_from_flattened_dict(changes)

        # Knobs that follow from the shape of the model.
        name = base_name(variant)
        if name == 'moe_capacity_0.5':
            moe.apply_capacity(config, 0.5)
        elif name == 'integrated':
            mode_integrated.apply_noop(config)
        elif name in LOOPED_VARIANTS:
            config.model.num_layers = blocks_of_loops(name, config.model.num_layers)
        elif name in _MATCHED:
            other, count = _MATCHED[name]
            model = self.config(variant.replace(name, other), size, budget)
            config.model.d_ff = _matching_d_ff(config, model, count)
        return config

    def shallower(self, size: str) -> str:
        """Return the dense size of the same width whose forward cost is nearest to that of MoD."""

        def flops(variant, size):  # of one step, so any budget will do
            return _flops(self.config(variant, size, 1 if self._argument == 'steps' else 1e30))

        if size not in self._shallower:
            flops_of_mod = flops('mod', size)
            layers, _, width = size.partition('x')
            depths = range(1, int(layers) + 1)
            by_depth = {depth: flops('dense', f'{depth}x{width}') for depth in depths}
            self._shallower[size] = f'{nearest_depth(by_depth, flops_of_mod)}x{width}'
        return self._shallower[size]


def _matching_d_ff(config, other, count):
    """The mlp width at which `count` of a dense model is about that of `other`."""
    wider = config.copy_and_resolve_references()
    wider.model.d_ff += 1
    missing, step = count(other) - count(config), count(wider) - count(config)
    return config.model.d_ff + round(missing / step)


def _parameters(config):
    import jax

    from moddepth_jax.training.summary import num_parameters
    from moddepth_jax.training.train_step import init_state

    hparams = from_config(config)
    return num_parameters(jax.eval_shape(lambda: init_state(hparams, 1)).params)


def _flops(config):
    from moddepth_jax.model.flops import train_step_flops

    return train_step_flops(from_config(config))


# Dense models with wider mlps: (variant that they match, the quantity that is equal).
_MATCHED = {'wider': ('moda', _parameters), 'wider_mhc': ('mhc', _flops)}
