"""The variants of a study by name, and the plan of its runs, which depends on earlier losses.

See docs/isoflop.md (Raposo et al. 2024, section 4.1).
"""

import dataclasses
import math
from typing import NamedTuple

from moddepth_jax.hparams.checks import did_you_mean

SIZED = ('dense', 'shallow', 'mod')  # variants that run at every size; others at MoD's best size
DIVERGED = math.inf  # the loss of a run that diverged


class Variant(NamedTuple):
    """One kind of model that a study compares."""

    label: str  # name in figures and tables
    changes: dict[str, object]  # knobs that the variant sets on top of the study's config
    look: str  # 'COLOUR MARKER': a key of COLOURS in plot_style.py and a Matplotlib marker


_PLAIN = {
    'model.routing.router': 'none',
    'model.experts.choice': 'none',
    'model.depth.stream': 'residual',
    'model.depth.slots': 'auto',
    'model.depth.value_mix': 'auto',
    'model.looped_layers': 'none',
    'model.loops': 1,
    'model.depth.sublayers_per_source': 0,
    'model.depth.hyper_form': 'auto',
    'model.depth.value_stride': 0,
    'model.depth.mudd_weights': 'auto',
    'model.embedding_residual': 'none',
    'model.value_embeddings': 'none',
}


# Every variant sets these, so that the models of a study do not depend on its config.
_ALWAYS_SET = 'model.routing.router', 'model.experts.choice', 'model.depth.stream'


def mod_knobs(router='learned', layers='every:2', capacity=0.125, **routing) -> dict[str, object]:
    """Return the `changes` of a Variant with routed blocks; `routing`: other knobs of that group.

    Gate and causal rule are `auto` unless they are given or the router is `learned`.
    """
    knobs = {'router': router, 'layers': layers, 'capacity': capacity, **routing}
    free = {'gate': 'auto', 'causal_rule': 'auto'} if router != 'learned' else {}
    return _PLAIN | {f'model.routing.{name}': value for name, value in (free | knobs).items()}


def _looped(loops):
    """Run all blocks except the first and the last `loops` times, with the same weights."""
    return _PLAIN | {'model.looped_layers': 'middle:1:1', 'model.loops': loops}


def _recursions(loops):
    """Expert choice with the paper's knobs (but see docs/looped.md, 6) and capacity 1 / loops."""
    knobs = {'router': 'learned', 'layers': 'loops', 'capacity': 1 / loops}
    knobs |= {'gate': 'sigmoid', 'gate_scale': 0.1}
    knobs |= {'causal_rule': 'aux_loss', 'aux_loss_weight': 0.001}
    return {f'model.routing.{name}': value for name, value in knobs.items()}


_TOKEN_CHOICE = {
    'model.routing.router': 'token_choice',
    'model.routing.layers': 'loops',
    'model.routing.gate': 'auto',
    'model.routing.causal_rule': 'auto',
}


_FIRST_KEYS = {'model.routing.loop_keys': 'first', 'model.routing.overflow': 'grow'}


def _depth(**knobs):
    return {f'model.depth.{name}': value for name, value in knobs.items()}


def _moda(slots='attention+ffn', **knobs):
    return _depth(stream='moda', slots=slots, **knobs)


def _stream(stream, **knobs):
    return _PLAIN | _depth(stream=stream, **knobs)


def _capacities(name, words, layers, looks):
    """Variants NAME_CAPACITY: a learned router in `layers` at several capacities."""
    return {
        f'{name}_{capacity:g}': Variant(
            f'MoD {100 * capacity:g}%, {words}', mod_knobs(layers=layers, capacity=capacity), look
        )
        for capacity, look in looks.items()
    }


_UNROLLED = {'model.layer_loop': 'unrolled'}
_EXPERTS = {'model.experts.choice': 'token'}
STREAM_VARIANTS = {
    'dense': Variant('dense', _PLAIN, 'black o'),
    'wider': Variant('dense, as many parameters', _PLAIN, 'grey s'),
    'wider_mhc': Variant('dense, as many FLOPs as mHC', _PLAIN, 'grey X'),
    'moda_attention': Variant('MoDA, attention slots', _PLAIN | _moda('attention'), 'sky >'),
    'moda': Variant('MoDA, attention and mlp slots', _PLAIN | _moda(), 'blue D'),
    'moda_blocks': Variant('MoDA, slots of blocks', _PLAIN | _moda('block'), 'sky d'),
    'moda_unrotated': Variant(
        'MoDA, slots not rotated', _PLAIN | _moda(slot_keys='unrotated'), 'blue <'
    ),
    'moda_projection': Variant(
        'MoDA, a projection for each slot', _PLAIN | _moda(attention_slot_projection=True), 'blue ^'
    ),
    'depth_attention': Variant('depth attention', _stream('attention'), 'orange *'),
    'dense_average': Variant(
        "matrices on the layers' outputs", _stream('dense') | _UNROLLED, 'orange d'
    ),
    'average': Variant('learned average of the layers', _stream('average') | _UNROLLED, 'green d'),
    'value_residual': Variant('value residual', _stream('value_residual'), 'rose d'),
    'value_shared': Variant(
        'values of the first layer alone', _stream('value_residual', value_mix='shared'), 'rose s'
    ),
    'value_attention': Variant(
        'values of two earlier layers in a softmax', _stream('value_attention'), 'rose v'
    ),
    'value_attention_all': Variant(
        'values of all earlier layers in a softmax',
        _stream('value_attention', value_stride=1),
        'rose ^',
    ),
    'embedding_residual': Variant(
        'embedding residual', _PLAIN | {'model.embedding_residual': 'learned'}, 'blue s'
    ),
    'embedding_identity': Variant(
        'embedding residual that starts at 0',
        _PLAIN | {'model.embedding_residual': 'identity'},
        'blue p',
    ),
    'value_embeddings': Variant(
        'tables of values in each second layer',
        _PLAIN | {'model.value_embeddings': 'alternate'},
        'rose p',
    ),
    'attnres': Variant('attention residuals', _stream('attention_residual'), 'red d'),
    'attnres_block': Variant(
        'attention residuals, blocks of 4 sublayers',
        _stream('attention_residual', sublayers_per_source=4),
        'red s',
    ),
    'hyper': Variant(
        'hyper-connections', _stream('hyper_connections', hyper_form='dynamic'), 'green s'
    ),
    'hyper_static': Variant(
        'static hyper-connections', _stream('hyper_connections', hyper_form='static'), 'green p'
    ),
    'mhc': Variant(
        'manifold-constrained hyper-connections',
        _stream('hyper_connections', hyper_form='constrained'),
        'green X',
    ),
    'mudd': Variant('MUDD connections', _stream('mudd'), 'sky s'),
    'mudd_static': Variant(
        'static MUDD connections', _stream('mudd', mudd_weights='static'), 'sky p'
    ),
    'mod_moda': Variant('MoD and MoDA', mod_knobs() | _moda(), 'green h'),
    'mod_moda_masked': Variant(
        'MoD and MoDA, no slots of skipped blocks',
        mod_knobs() | _moda(skipped_slots='masked'),
        'green H',
    ),
}
_LOOP_WORDS = ((2, 'two loops', '<'), (3, 'three loops', '>'))
# At size LxD, L blocks run: the first, the last, and N loops over the blocks between them. `once_N`
# has the same blocks as `looped_N` and runs each of them once.
LOOPED_VARIANTS = {
    **{
        f'looped_{loops}': Variant(f'looped, {words}', _looped(loops), f'orange {marker}')
        for loops, words, marker in _LOOP_WORDS
    },
    **{
        f'once_{loops}': Variant(f'the blocks of {words}, each once', _PLAIN, f'grey {marker}')
        for loops, words, marker in _LOOP_WORDS
    },
    **{
        f'recursions_{loops}': Variant(
            f'Mixture-of-Recursions, {words}', _looped(loops) | _recursions(loops), f'blue {marker}'
        )
        for loops, words, marker in _LOOP_WORDS
    },
    'recursions_3_first': Variant(
        "Mixture-of-Recursions, three loops that read the first one's keys",
        _looped(3) | _recursions(3) | _FIRST_KEYS,
        'sky *',
    ),
    'token_choice_3': Variant(
        'Mixture-of-Recursions, up to three loops by token choice',
        _looped(3) | _TOKEN_CHOICE,
        'rose >',
    ),
}
_PLACEMENTS = {'post': 'post-norm', 'reordered': "OLMo2's norm"}
# Looks of the variants by capacity.
_SKY = {0.0625: 'sky <', 0.25: 'sky ^', 0.5: 'sky v', 0.75: 'sky >', 0.95: 'sky h'}
_GREEN = {0.125: 'green ^', 0.25: 'green <', 0.5: 'green v', 0.75: 'green >'}
VARIANTS = {
    'dense': STREAM_VARIANTS['dense'],
    'shallow': Variant("dense, shallower: MoD's FLOPs per forward", _PLAIN, 'grey s'),
    'mod': Variant('MoD 12.5%, every other block', mod_knobs(), 'blue D'),
    **_capacities('mod', 'every other block', 'every:2', _SKY),
    **_capacities('every', 'every block', 'every:1', _GREEN),
    'random': Variant('random 12.5%, every other block', mod_knobs('random'), 'red X'),
    'random_every_0.5': Variant(
        'random 50%, every block', mod_knobs('random', 'every:1', 0.5), 'red v'
    ),
    'position': Variant('by position 12.5%, every other block', mod_knobs('position'), 'orange P'),
    'norm': Variant(
        'by norm 12.5%, every other block', mod_knobs('norm', causal_rule='threshold'), 'rose p'
    ),
    'aux_loss': Variant(
        'MoD 12.5%, causal by aux. loss', mod_knobs(causal_rule='aux_loss'), 'rose <'
    ),
    'threshold': Variant(
        'MoD 12.5%, causal by threshold', mod_knobs(causal_rule='threshold'), 'rose >'
    ),
    'sigmoid': Variant('MoD 12.5%, sigmoid gate', mod_knobs(gate='sigmoid'), 'orange ^'),
    'tanh': Variant('MoD 12.5%, tanh gate', mod_knobs(gate='tanh'), 'orange v'),
    'straight_through': Variant(
        'straight-through 12.5%, causal by score > 0',
        mod_knobs('straight_through', causal_rule='positive'),
        'rose h',
    ),
    'moe': Variant('experts', _PLAIN | _EXPERTS, 'orange ^'),
    'moe_capacity_0.5': Variant('experts, half the expert capacity', _PLAIN | _EXPERTS, 'green v'),
    'integrated': Variant('MoDE integrated, half no-ops', _PLAIN | _EXPERTS, 'rose p'),
    'staged': Variant('MoDE staged, 12.5%, every other block', mod_knobs() | _EXPERTS, 'blue D'),
    **STREAM_VARIANTS,
    **LOOPED_VARIANTS,
    **{
        f'{name}_{placement}': Variant(
            f'{label}, {words}', changes | {'model.norm_placement': placement}, look
        )
        for placement, words in _PLACEMENTS.items()
        for name, (label, changes, look) in STREAM_VARIANTS.items()
        # Post-norm needs exactly one residual stream: attention residuals have none and
        # hyper-connections several. `wider_mhc` only serves as a baseline for such a model.
        if placement != 'post'
        or changes['model.depth.stream'] not in ('attention_residual', 'hyper_connections')
        and name != 'wider_mhc'
    },
}
OWN_VARIANTS = frozenset(VARIANTS)  # without those that a config file adds


def blocks_of_loops(variant: str, num_layers: int) -> int:
    """Return how many blocks have parameters in a looped variant that runs `num_layers` blocks.

    Raises ValueError if the loops do not divide the blocks between the first and the last.
    """
    loops = int(variant.removesuffix('_first').rpartition('_')[2])
    between, left = divmod(num_layers - 2, loops)
    if left or between < 1:
        right = f'must be 2 blocks and a multiple of {loops}, as in {2 + 2 * loops}x64'
        raise ValueError(f'{num_layers} blocks of {variant}: {right}')
    return 2 + between


def base_name(variant: str) -> str:
    """Return the name of the variant without the suffix for its norm placement."""
    for placement in _PLACEMENTS:
        variant = variant.removesuffix(f'_{placement}')
    return variant


@dataclasses.dataclass(frozen=True)
class Study:
    """What a study compares. The fields are flags of `launch.isoflop`."""

    kind: str  # unit of the budgets: flops or steps
    budgets: tuple[float, ...]  # ascending
    sizes: tuple[str, ...]  # LAYERSxWIDTH, see configs/sizes.py
    variants: tuple[str, ...]  # keys of VARIANTS
    seeds: tuple[int, ...]  # where there is only one run, it uses the first seed
    learning_rates: tuple[float, ...]  # tuned if there are several

    def __post_init__(self):
        for name in ('budgets', 'sizes', 'variants', 'seeds', 'learning_rates'):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                given = ','.join(map(str, values))
                raise ValueError(f'{name}={given!r}: must be one or more, all different')
            if name in ('budgets', 'learning_rates') and not all(0 < v < math.inf for v in values):
                flag = 'steps' if (name, self.kind) == ('budgets', 'steps') else name
                given = ','.join(f'{value:g}' for value in values)
                raise ValueError(f'{flag}={given}: must be numbers above 0')
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown:
            right = 'no such variant: docs/isoflop.md, section 6, has all'
            right += did_you_mean(unknown[0], VARIANTS)
            raise ValueError(f'variants={unknown[0]!r}: {right}')
        if 'shallow' in self.variants and 'mod' not in self.variants:
            raise ValueError('variants: shallow gets its depth from the cost of mod; add mod')
        if 'mod' in self.variants and all(size.startswith('1x') for size in self.sizes):
            given = ','.join(self.sizes)
            raise ValueError(f'sizes={given}: mod needs a size of two layers or more, such as 2x64')
        for name in self.variants:
            if unset := [knob for knob in _ALWAYS_SET if knob not in VARIANTS[name].changes]:
                right = "must be set; start from mod_knobs() or from VARIANTS['dense'].changes"
                raise ValueError(f'variants={name}: {unset[0]} {right}')
        for seed in self.seeds:
            if not 0 <= seed < 2**32:
                raise ValueError(f'seeds={seed}: must lie in [0, 2**32)')
        object.__setattr__(self, 'budgets', tuple(sorted(self.budgets)))

    @property
    def sized(self) -> tuple[str, ...]:
        """The variants that run at every size: those of SIZED, or else the first."""
        return tuple(name for name in self.variants if name in SIZED) or self.variants[:1]


class PlannedRun(NamedTuple):
    """One planned run."""

    variant: str
    size: str  # size under which results are filed; for `shallow`, the size of MoD
    trained: str  # size of the model that trains
    budget: float  # in the study's unit
    learning_rate: float  # peak
    seed: int
    at_best_size: bool = False  # whether the size was chosen by the loss

    @property
    def model_name(self) -> str:
        """Variant, size and budget. `shallow` is `dense`, so that equal models train once."""
        model = 'dense' if self.variant == 'shallow' else self.variant
        budget = f'{self.budget:g}'.replace('+', '')
        return f'{model}-{self.trained}-{budget}'

    @property
    def name(self) -> str:
        """Directory name: the model's name, the learning rate and the seed."""
        return f'{self.model_name}-lr{self.learning_rate:g}-seed{self.seed}'


def width(size: str) -> int:
    """Return D of a size LxD."""
    return int(size.partition('x')[2])


class Plan:
    """Derives the runs of a study from the losses that are known so far.

    Args:
      study: what is compared.
      shallower: function from a size of MoD to the size of `shallow`.
    """

    def __init__(self, study: Study, shallower):
        self.study = study
        self._shallower = shallower

    def tuning(self) -> list[PlannedRun]:
        """Return the runs that tune the learning rate of each width, [] if there is only one rate.

        The dense model (or the first variant) runs at the smallest budget and the first size of
        each width.
        """
        study = self.study
        if len(study.learning_rates) == 1:
            return []
        first = {width(size): size for size in reversed(study.sizes)}
        variant = 'dense' if 'dense' in study.variants else study.variants[0]
        return [
            self._run(variant, size, study.budgets[0], rate)
            for size in sorted(first.values(), key=study.sizes.index)
            for rate in study.learning_rates
        ]

    def learning_rates(self, losses: dict[str, float]) -> dict[int, float] | None:
        """Return the learning rate with the lowest loss by width; None while a loss is missing."""
        rates = {width(size): self.study.learning_rates[0] for size in self.study.sizes}
        tuning = self.tuning()
        if any(run.name not in losses for run in tuning):
            return None
        # The last assignment wins: the lowest loss, and the smallest rate among equal losses.
        for run in sorted(tuning, key=lambda run: (-losses[run.name], -run.learning_rate)):
            rates[width(run.size)] = run.learning_rate
        return rates

    def runs(self, losses: dict[str, float]) -> tuple[list[PlannedRun], bool]:
        """Return the runs that follow from `losses` (by run name), and whether these are all runs.

        The stages are: tuning runs; all sizes with the first seed; then the other variants at the
        best size of each budget, and the other seeds at the best sizes of the largest budget.
        """
        study, rates = self.study, self.learning_rates(losses)
        if rates is None:
            return self.tuning(), False
        sized = [
            self._run(variant, size, budget, rates[width(size)])
            for budget in study.budgets
            for variant in study.sized
            for size in self._sizes(variant)
        ]
        if any(run.name not in losses for run in sized):
            return self.tuning() + sized, False
        best = {}
        for run in sorted(sized, key=lambda run: losses[run.name]):
            best.setdefault((run.variant, run.budget), run)
        last = study.budgets[-1]
        runs = list(sized)
        anchor = 'mod' if 'mod' in study.variants else study.sized[0]
        for budget in study.budgets:
            for variant in study.variants:
                at = best.get((variant, budget), best[anchor, budget])
                run = self._run(variant, at.size, budget, at.learning_rate)
                seeds = study.seeds if budget == last else study.seeds[:1]
                runs += [run._replace(seed=seed, at_best_size=True) for seed in seeds]
        # Two sizes of MoD may have the same `shallow` model.
        kept = {(run.variant, run.size, run.name): run for run in runs}
        return self.tuning() + list(kept.values()), True

    def max_runs(self, losses: dict[str, float] | None = None) -> list[PlannedRun]:
        """Return as many runs as there may be, given the losses that are known.

        Of runs whose size these losses do not choose, `size` is any of the possible ones.
        """
        losses = dict(losses or {})
        runs, complete = self.runs(losses)
        if complete:
            return list({run.name: run for run in runs}.values())
        while not complete:
            losses |= {run.name: 0.0 for run in runs if run.name not in losses}
            runs, complete = self.runs(losses)
        different = {}
        for run in runs:
            # Variants that share runs of the first seed may end up with different best sizes, and
            # at another size than the one that is tuned.
            first = run.seed == self.study.seeds[0]
            chosen = run.at_best_size and run.variant not in self.study.sized
            different[run.name, '' if first and not chosen else run.variant] = run
        return list(different.values())

    def possible_sizes(self, run: PlannedRun) -> list[PlannedRun]:
        """Return a run of `max_runs` at each size that the losses may choose for it."""
        first = run.seed == self.study.seeds[0]
        if not run.at_best_size or (first and run.variant in self.study.sized):
            return [run]
        return [
            self._run(run.variant, size, run.budget, run.learning_rate)
            for size in self._sizes(run.variant)
        ]

    def examples(self) -> list[PlannedRun]:
        """Return one run of every variant, size and budget, even if it will not be trained."""
        study = self.study
        return [
            self._run(variant, size, budget, study.learning_rates[0])
            for budget in study.budgets
            for variant in study.variants
            for size in self._sizes(variant)
        ]

    def possible_names(self) -> set[str]:
        """Return the names of all runs that the study may have, whatever their losses are."""
        study = self.study
        return {
            run._replace(learning_rate=rate, seed=seed).name
            for run in self.examples()
            for rate in study.learning_rates
            for seed in (study.seeds if run.budget == study.budgets[-1] else study.seeds[:1])
        }

    def _sizes(self, variant):
        """Sizes of a variant; a single layer cannot route every other block or be shallower."""
        routed = VARIANTS[variant].changes['model.routing.router'] != 'none'
        if 'mod' in self.study.variants and (routed or variant == 'shallow'):
            return [size for size in self.study.sizes if not size.startswith('1x')]
        return list(self.study.sizes)

    def _run(self, variant, size, budget, rate):
        """The run with the first seed."""
        trained = self._shallower(size) if variant == 'shallow' else size
        return PlannedRun(variant, size, trained, budget, rate, self.study.seeds[0])


def nearest_depth(flops_by_depth: dict[int, float], flops: float) -> int:
    """Return the depth with the nearest FLOPs, the smaller one in a tie."""
    return min(flops_by_depth, key=lambda depth: (abs(flops_by_depth[depth] - flops), depth))
