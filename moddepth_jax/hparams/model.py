"""Hyper-parameters of the transformer."""

import dataclasses
import functools
import operator
from typing import Annotated, NamedTuple

from moddepth_jax.hparams import checks
from moddepth_jax.hparams.adapters import AdapterHparams
from moddepth_jax.hparams.checks import refuse
from moddepth_jax.hparams.depth import DepthHparams
from moddepth_jax.hparams.experts import ExpertsHparams
from moddepth_jax.hparams.routing import RoutingHparams

# Backends of kernels_pallas.depth_attention. `auto`: the first that supports platform and shapes.
ATTENTION = ('auto', 'reference', 'xla', 'pallas', 'mosaic_gpu', 'mosaic_gpu_fused')
MAX_LAYERS = 10_000  # Python visits each of them before anything is compiled


class RopeScaling(NamedTuple):
    """How Llama 3.1 lowers rotary frequencies for contexts that are longer than in pretraining.

    A frequency that turns less than `low_freq_factor` times in the original context is divided by
    `factor`. One that turns more than `high_freq_factor` times is kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int  # tokens in the original context


def parse_rope_scaling(field: str, value: str) -> RopeScaling | None:
    """Return the RopeScaling of model.rope_scaling, or None. Raises a one-line ValueError."""
    kind, *numbers = value.split(':')
    if value == 'none':
        return None
    try:
        *factors, length = numbers
        scaling = RopeScaling(*map(float, factors), int(length))
    except (TypeError, ValueError):
        scaling = None
    if kind == 'llama3' and scaling is not None:
        factor, low, high, length = scaling
        in_order = 1 <= factor <= checks.MAX_FLOAT and 0 < low < high <= checks.MAX_FLOAT
        if in_order and 1 <= length <= checks.MAX_INT:
            return scaling
    right = 'must be none or llama3:FACTOR:LOW:HIGH:LENGTH, such as llama3:8:1:4:8192: '
    return refuse(
        field, value, right + 'FACTOR from 1 on, LOW above 0 and below HIGH, whole LENGTH'
    )


@dataclasses.dataclass(frozen=True)
class ModelHparams:
    """The transformer. configs/base.py describes the knobs."""

    vocab_size: checks.Size
    num_layers: Annotated[int, functools.partial(checks.positive, maximum=MAX_LAYERS)]
    looped_layers: str
    loops: Annotated[int, functools.partial(checks.positive, maximum=MAX_LAYERS)]
    loop_order: checks.choice('cycle', 'sequence')
    loop_norms: checks.choice('shared', 'own')
    loop_embeddings: checks.choice('none', 'learned')
    loop_exit_threshold: checks.Weight
    d_model: checks.Size
    d_ff: checks.Size
    num_heads: checks.Size
    num_kv_heads: checks.Size
    head_dim: checks.Size
    norm_placement: checks.choice('pre', 'post', 'reordered')
    norm_eps: checks.AboveZero
    qk_norm: checks.choice('none', 'head', 'full')
    rope_theta: Annotated[float, checks.positive]  # below 1, the frequencies would rise
    rope_scaling: Annotated[str, parse_rope_scaling]
    use_bias: bool
    attention_bias: checks.choice('none', 'qkv', 'qkvo')
    tie_embeddings: bool
    embedding_residual: checks.choice('none', 'learned', 'identity')
    value_embeddings: checks.choice('none', 'alternate', 'all')
    across_documents: bool
    windows: tuple[int, ...]
    init_std: checks.AboveZero
    embedding_init_std: checks.AboveZero
    scale_residual_init: bool
    dtype: checks.choice('float32', 'bfloat16', 'float64')
    attention: checks.choice(*ATTENTION)
    layer_loop: checks.choice('scan', 'unrolled')
    remat: checks.choice('block', 'elementwise', 'none')
    depth: DepthHparams
    experts: ExpertsHparams
    routing: RoutingHparams
    adapters: AdapterHparams

    def check_values(self):
        """Make all checks but those of the depth stream's class, which would import JAX."""
        checks.check_fields(self, 'model.')
        if self.num_heads % self.num_kv_heads:
            right = f'must divide model.num_heads={self.num_heads}'
            refuse('model.num_kv_heads', self.num_kv_heads, right)
        if self.head_dim % 2:
            refuse('model.head_dim', self.head_dim, 'must be even: RoPE rotates halves')
        if not self.windows or not all(0 <= window <= checks.MAX_INT for window in self.windows):
            refuse('model.windows', self.windows, 'must hold sizes from 0 (no window) to 2**31 - 1')
        if self.use_bias and self.attention_bias != 'none':
            right = 'must be none: model.use_bias already adds biases to every projection'
            refuse('model.attention_bias', self.attention_bias, right)
        self.routing.routed_layers(self.num_layers)
        self._check_loops()
        if self.experts.choice != 'none':
            self._check_experts()
        self._check_stream()
        if self.loop_exit_threshold:
            self._check_exits()
        if self.routing.routes_loops:
            self._check_routed_loops()
        if self.routed_layers and self.routing.part != 'block':
            self._check_routed_part()
        self._check_documents()

    def __post_init__(self):
        self.check_values()
        self.depth.stream_class.check(self)

    def _require(self, needed: dict, why: str):
        """Refuse a knob that differs from its value in `needed`, where names lack `model.`."""
        for name, right in needed.items():
            value = operator.attrgetter(name)(self)
            if value != right:
                refuse(f'model.{name}', value, f'must be {right}{why}')

    def _check_stream(self):
        traits, stream = self.depth.traits, self.depth.stream
        if not traits.scans:
            why = f': layers of the {stream} stream differ in what they read'
            self._require({'layer_loop': 'unrolled', 'looped_layers': 'none'}, why)
        if not self.routed_layers and self.depth.skipped_slots == 'masked':
            right = 'must be auto: no block is routed, so no token skips one'
            refuse('model.depth.skipped_slots', self.depth.skipped_slots, right)
        if not traits.keeps_sum:
            why = f': the {stream} stream carries no single running sum between blocks; '
            why += 'use stream residual'
            self._require({'embedding_residual': 'none', 'loop_embeddings': 'none'}, why)
        if self.depth.value_mix == 'shared':
            why = ' under value_mix shared: later layers have no values of their own to add to; '
            self._require({'value_embeddings': 'none'}, why + 'use value_mix learned')

    def _check_documents(self):
        if self.across_documents and self.routing.select_per == 'segment':
            right = 'must be row if model.across_documents=True: then a row is one document'
            refuse('model.routing.select_per', 'segment', right)

    def _check_routed_part(self):
        for field, value, right in (
            ('depth.stream', self.depth.stream, 'residual'),
            ('experts.choice', self.experts.choice, 'none'),
        ):
            if value != right:
                why = f'must be block if model.{field}={value}; or set that to {right}'
                refuse('model.routing.part', self.routing.part, why)

    def _check_exits(self):
        needed = {'loop_order': 'cycle', 'depth.stream': 'residual'}
        needed |= {'routing.router': 'none', 'experts.choice': 'none'}
        self._require(needed, f' under loop_exit_threshold={self.loop_exit_threshold:g}')

    def _check_routed_loops(self):
        why = ' where model.routing.layers=loops'
        if not self.looped:
            right = f'must be all or middle:FIRST:LAST{why}'
            refuse('model.looped_layers', self.looped_layers, right)
        if self.loops < 2:
            refuse('model.loops', self.loops, f'must be 2 or more{why}')
        needed = {'loop_order': 'cycle', 'loop_norms': 'shared', 'loop_embeddings': 'none'}
        needed |= {'embedding_residual': 'none', 'depth.stream': 'residual'}
        needed |= {'experts.choice': 'none', 'routing.select_per': 'row', 'routing.part': 'block'}
        self._require(needed, why)
        if self.routing.traits.is_control:
            right = f'must be learned, norm or straight_through{why}'
            refuse('model.routing.router', self.routing.router, right)

    def _check_loops(self):
        if self.num_blocks > MAX_LAYERS:
            most = (MAX_LAYERS - self.num_layers) // len(self.looped_range) + 1
            right = f'must be at most {most}: {self.num_blocks} blocks would run, and the limit is '
            right += f'{MAX_LAYERS}'
            refuse('model.loops', self.loops, right)
        if not self.looped:
            plain = {'loops': 1, 'loop_order': 'cycle', 'loop_norms': 'shared'}
            plain |= {'loop_embeddings': 'none', 'loop_exit_threshold': 0}
            self._require(plain, ': no block is looped; set model.looped_layers to all')

    def _check_experts(self):
        self.experts.expert_layers(self.num_layers)
        if self.use_bias:
            refuse('model.use_bias', True, 'must be False: experts have no biases')
        if self.experts.row_capacity and self.routed_layers:
            right = 'must be 0 where blocks are routed, which already limits the computed tokens'
            refuse('model.experts.row_capacity', self.experts.row_capacity, right)
        if self.experts.choice == 'expert' and self.routing.train_rule == 'threshold':
            right = 'must be top_c where experts choose: they see whole rows in training'
            refuse('model.routing.train_rule', self.routing.train_rule, right)

    @property
    def without_adapters(self) -> 'ModelHparams':
        """These hyper-parameters after the adapters are merged into their matrices."""
        return dataclasses.replace(self, adapters=dataclasses.replace(self.adapters, rank=0))

    @functools.cached_property
    def scaled_rope(self) -> RopeScaling | None:
        """The scaling of the rotary frequencies, or None."""
        return parse_rope_scaling('model.rope_scaling', self.rope_scaling)

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.use_bias or self.attention_bias != 'none'

    @property
    def attention_out_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        return self.use_bias or self.attention_bias == 'qkvo'

    @property
    def looped(self) -> bool:
        """Whether some blocks can run several times with the same parameters."""
        return self.looped_layers != 'none'

    @functools.cached_property
    def looped_range(self) -> range:
        """The looped blocks; range(0, 0) if there are none."""
        if not self.looped:
            return range(0)
        if self.looped_layers == 'all':
            return range(self.num_layers)
        kind, *numbers = self.looped_layers.split(':')
        are_numbers = all(text.isdecimal() and len(text) < 10 for text in numbers)
        if kind == 'middle' and len(numbers) == 2 and are_numbers:
            looped = range(int(numbers[0]), self.num_layers - int(numbers[1]))
            if looped:
                return looped
        right = 'must be none, all or middle:FIRST:LAST, which leaves out that many blocks at each '
        right += f'end of {self.num_layers} and loops at least one'
        return refuse('model.looped_layers', self.looped_layers, right)

    @property
    def num_blocks(self) -> int:
        """How many blocks run one after another; a looped block counts once for each loop."""
        return self.num_layers + (self.loops - 1) * len(self.looped_range)

    @functools.cached_property
    def block_order(self) -> tuple[int, ...]:
        """The block, below num_layers, that runs at each of the num_blocks places."""
        once = self.looped_range
        looped = list(once) * self.loops
        looped = sorted(looped) if self.loop_order == 'sequence' else looped
        return (*range(once.start), *looped, *range(once.stop, self.num_layers))

    @property
    def router_of_block(self) -> tuple[int | None, ...]:
        """For each block that runs, the number of the router that chooses its tokens, or None."""
        if not self.routing.routes_loops:
            numbers = {layer: number for number, layer in enumerate(self.routed_layers)}
            return tuple(map(numbers.get, range(self.num_blocks)))
        first, size = self.looped_range.start, len(self.looped_range)
        loops = [(place - first) // size for place in range(self.num_blocks)]
        return tuple(loop if 0 <= loop < self.loops else None for loop in loops)

    @property
    def block_names(self) -> list[str]:
        """Name of the blocks that run, for figures: the number, and the loop if it is routed."""
        ends = [''] * self.num_blocks
        if self.routing.routes_loops:
            ends = ['' if loop is None else f' (loop {loop + 1})' for loop in self.router_of_block]
        return [f'{block}{end}' for block, end in enumerate(ends)]

    @property
    def reads_first_keys(self) -> tuple[bool, ...]:
        """For each block that runs, whether it reads only the keys of the first routed loop."""
        shared = self.routing.loop_keys == 'first'
        return tuple(shared and bool(router) for router in self.router_of_block)

    @property
    def loop_progress(self) -> tuple[float, ...]:
        """The `progress` of each routed loop, for RoutingHparams.num_selected; 1 for a block."""
        if not self.routing.routes_loops:
            return (1.0,) * len(self.routed_layers)
        return tuple(loop / (self.loops - 1) for loop in range(self.loops))

    @property
    def blocks_that_start_loops(self) -> range:
        """The blocks that add the embedding of their loop to their input."""
        in_turn = self.loop_order == 'sequence'
        return self.looped_range if in_turn else self.looped_range[:1]

    @property
    def sized_by_loops(self) -> str:
        """Words for the parameters that exist once per loop, such as 'norms'; '' if none do."""
        own = {'norms': self.loop_norms == 'own', 'embeddings': self.loop_embeddings != 'none'}
        return ' and '.join(name for name, has in own.items() if has)

    @functools.cached_property
    def routed_layers(self) -> tuple[int, ...]:
        """Places of the routed blocks among those that run, ascending; () for a dense model.

        If loops are routed, the places where they begin.
        """
        if self.routing.routes_loops:
            first, size = self.looped_range.start, len(self.looped_range)
            return tuple(first + loop * size for loop in range(self.loops))
        routed = set(self.routing.routed_layers(self.num_layers))
        return tuple(place for place, block in enumerate(self.block_order) if block in routed)

    @functools.cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Places of the blocks with experts among those that run, ascending."""
        experts = set(self.experts.expert_layers(self.num_layers))
        return tuple(place for place, block in enumerate(self.block_order) if block in experts)

    @property
    def looks_ahead(self) -> bool:
        """Whether training looks at later tokens, so that evaluation needs a causal rule."""
        return self.routing.looks_ahead or self.experts.choice == 'expert'

    @property
    def tracks_threshold(self) -> bool:
        """Whether the model keeps moving averages of the C-th largest scores."""
        return bool(self.routed_layers) and self.routing.tracks_threshold

    @property
    def masks_slots(self) -> bool:
        """Whether a token that skips a routed block has no depth slot there."""
        masked = self.depth.skipped_slots == 'masked' or self.depth.stream_class.masks_skipped
        return bool(self.routed_layers) and masked

    def window(self, layer: int) -> int:
        """Return the attention window of a layer in tokens, with the query itself; 0: no limit."""
        return self.windows[layer % len(self.windows)]
