"""Mixture-of-Recursions: routers choose how often the looped blocks run on each token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moddepth_jax.hparams import Hparams, ModelHparams
from moddepth_jax.hparams.registry import GATES
from moddepth_jax.model.attention import FirstKeys, KeysValues
from moddepth_jax.model.kv_cache import Cache, CacheUpdate, cache_from_prefill, select_into_cache
from moddepth_jax.model.layer import LayerArgs
from moddepth_jax.model.mod.mixture_of_depths import Chooser, RoutingArgs
from moddepth_jax.model.routing import (
    CHOICE,
    RoutingRecord,
    TokenInfo,
    gather_tokens,
    mask_to_indices,
    mask_tokens,
    pad_tokens,
    run_on_rows,
    scatter_tokens,
    select_first,
    select_highest,
    smallest_size,
    static_sizes,
)
from moddepth_jax.model.stack import Stack
from moddepth_jax.model.stack_scan import run_stack, run_with_keys

CERTAIN = 1e9  # the logit of a token that is selected in any case


class TokenChoice(NamedTuple):
    """The choice of all tokens before the first loop, under token choice."""

    x_BTD: jax.Array  # the stream before the first loop
    scores_NBT: jax.Array  # float32, of each loop
    depth_BT: jax.Array  # int32, the last loop of each token, from 0

    @classmethod
    def of(cls, hparams: Hparams, routing: str, loops: list, x_BTD) -> 'TokenChoice | None':
        """Make the choice; None under expert choice. `loops` is that of Recursions."""
        knobs = hparams.model.routing
        if not knobs.router_class.assigns_depth:
            return None
        module = knobs.router_class(knobs, parent=None)
        each = [module.apply({'params': one['router']}, x_BTD, None, None) for one, _ in loops]
        scores_NBT = jnp.stack(each)
        depth_BT = jnp.argmax(scores_NBT, axis=0)
        if routing == 'bypass':
            depth_BT = jnp.zeros_like(depth_BT)
        return cls(x_BTD, scores_NBT, checkpoint_name(depth_BT, CHOICE))


class Update(NamedTuple):
    """How a loop computes the new x of a token from the output y of the looped blocks."""

    gates_BT: jax.Array  # float32, factors on y
    # Token choice: the new x is g y, plus first_BTD in the last loop of a token.
    first_BTD: jax.Array | None = None  # the stream before the loops
    last_BT: jax.Array | None = None  # bool, this loop is the token's last


class Loop(NamedTuple):
    """One routed loop of Mixture-of-Recursions (Bae et al. 2025, arXiv 2507.10524, section 2.2.1).

    f is all looped blocks, one after another, and x_1 the stream before the loops.

    Expert choice: each loop has a router, which selects among the tokens of the loop before. The
    first loop selects all tokens. x' = x + g f(x) or x + g (f(x) - x).

    Token choice: the scores before the first loop determine the last loop n of each token.
    `gated_loops`: x' = g_r f(x) in loop r, plus x_1 in loop n. `gated_exit`: x' = f(x), and
    x_1 + g_n f(x) in loop n.
    """

    hparams: Hparams
    routing: str  # top_c or the name of a causal rule
    number: int  # from 0
    progress: float  # as in RoutingHparams.num_selected

    @property
    def makes_keys(self) -> bool:
        """Whether later loops read the keys of this loop."""
        return self.hparams.model.routing.loop_keys == 'first' and not self.number

    @property
    def reads_keys(self) -> bool:
        """Whether this loop reads the keys of the first loop and makes none."""
        return self.hparams.model.routing.loop_keys == 'first' and self.number > 0

    def decide(
        self, router, x_BTD, tokens: TokenInfo, args: RoutingArgs, choice: TokenChoice | None
    ):
        """Return scores_BT, rule_logits_BT and Update. Tokens of segment id 0 are no candidates."""
        real_BT = tokens.segment_ids_BT > 0
        if choice is not None:
            knobs = self.hparams.model.routing
            gates_BT = GATES[knobs.gate](choice.scores_NBT)[self.number] * knobs.gate_scale
            last_BT, scores_BT = choice.depth_BT == self.number, choice.scores_NBT[self.number]
            if knobs.loop_update == 'gated_exit':
                gates_BT = jnp.where(last_BT, gates_BT, 1)
            wanted_BT = real_BT & (choice.depth_BT >= self.number)
            logits_BT = jnp.where(wanted_BT, CERTAIN, -CERTAIN)
            update = Update(jnp.where(real_BT, gates_BT, 0), choice.x_BTD, last_BT)
            return scores_BT, logits_BT, update
        chooser = Chooser(self.hparams.model, self.routing, parent=None)
        run = functools.partial(chooser.apply, {'params': router}, x_BTD, tokens, args)
        if self.progress:
            scores_BT, logits_BT, gates_BT = run(method='decide')
        else:  # all tokens, without the causal rule
            scores_BT, gates_BT = run(method='score')
            logits_BT = jnp.full_like(scores_BT, CERTAIN)
        return scores_BT, jnp.where(real_BT, logits_BT, -CERTAIN), Update(gates_BT)

    def new_x(self, x_BTD, y_BTD, update: Update):
        """Return x after the loop for tokens that it processes, given the output y."""
        gates_BT1 = update.gates_BT[..., None]
        if update.last_BT is not None:  # x + (new - x) would be rounded at the size of x
            first_BTD = jnp.where(update.last_BT[..., None], update.first_BTD, 0)
            return (gates_BT1 * y_BTD + first_BTD).astype(x_BTD.dtype)
        if self.hparams.model.routing.loop_update == 'change':
            y_BTD = y_BTD - x_BTD
        return x_BTD + (gates_BT1 * y_BTD).astype(x_BTD.dtype)

    def run(self, blocks, router, args: RoutingArgs, x_BTD, tokens: TokenInfo, sizes, choice=None):
        """Run the loop on whole rows.

        Args:
          blocks: the looped blocks: blocks(x_BCD, TokenInfo) -> (y_BCD, other arrays [B, C, ...]).
          router: the parameters of the loop's router.
          args: those of the loop.
          x_BTD: the stream before the loop.
          tokens: candidates have a segment id above 0.
          sizes: static and ascending; a causal rule runs at the smallest that is enough.
          choice: the TokenChoice, or None under expert choice.

        Returns:
          x', the RoutingRecord, the selected indices [B, C], and the other arrays of `blocks`.
        """
        scores_BT, logits_BT, update = self.decide(router, x_BTD, tokens, args, choice)
        num_selected = self.hparams.model.routing.num_selected(x_BTD.shape[1], self.progress)
        wanted_BT = logits_BT > 0
        if choice is not None:
            selection = top_c = select_first(wanted_BT, sizes[-1] if sizes else num_selected)
        else:
            selection = top_c = select_highest(scores_BT, tokens.segment_ids_BT, num_selected)
            if self.routing != 'top_c':
                if args.causal is not None:
                    wanted_BT = jnp.where(args.causal, wanted_BT, top_c.selected_BT)
                selection = select_first(wanted_BT, sizes[-1])
        indices_BC, selected_BT, dropped_BT = selection
        record = RoutingRecord(
            scores_BT, logits_BT, top_c.selected_BT, selected_BT, dropped_BT, update.gates_BT
        )

        def run_on(x_BTD, indices_BC):
            x_BCD, picked_update, tokens_BC = jax.tree.map(
                lambda side: gather_tokens(side, indices_BC), (x_BTD, update, tokens)
            )
            y_BCD, aux = blocks(x_BCD, tokens_BC)
            new_BCD = self.new_x(x_BCD, y_BCD, picked_update)
            return scatter_tokens(x_BTD, indices_BC, new_BCD), aux

        if self.makes_keys:  # for all tokens
            sizes = ()
        if len(sizes) < 2:
            x_BTD, aux = run_on(x_BTD, indices_BC)
            return x_BTD, record, indices_BC, aux

        def run_at(size):
            def branch(x_BTD):
                x_BTD, aux = run_on(x_BTD, mask_to_indices(selected_BT, size))
                return x_BTD, pad_tokens(aux, sizes[-1])

            return branch

        which = smallest_size(jnp.max(jnp.sum(selected_BT, axis=1)), sizes)
        x_BTD, aux = jax.lax.switch(which, [run_at(size) for size in sizes], x_BTD)
        return x_BTD, record, indices_BC, aux


def loops_of(hparams: Hparams, routing: str) -> list[Loop]:
    """Return all routed loops of the model, in order."""
    progress = hparams.model.loop_progress
    return [Loop(hparams, routing, number, part) for number, part in enumerate(progress)]


class Section(NamedTuple):
    """The layers before the loops, those of one loop, or those after the loops."""

    kept: Any  # what their blocks return besides x'; in a loop, arrays [B, C, ...]
    loop: Loop | None = None
    record: RoutingRecord | None = None
    indices_BC: jax.Array | None = None
    x_BTD: jax.Array | None = None  # before the loop, of all tokens


def run_loops(hparams: Hparams, routing: str, each, x_BTD, tokens: TokenInfo, blocks, sizes_of):
    """Run all routed loops on whole rows.

    Args:
      hparams, routing: of the model, and the rule.
      each: (parameters of the router, RoutingArgs) of each loop.
      x_BTD: the stream before the loops.
      tokens: of all rows.
      blocks: the looped blocks: blocks(Loop, first, x_BCD, TokenInfo) -> (y_BCD, (kept, made)).
        `made` are the keys that the first loop makes for others, which they get as `first`.
      sizes_of: returns the static sizes of a Loop.

    Returns:
      x_BTD after the loops, and a Section of each.
    """
    sections, first, candidates = [], None, tokens
    choice = TokenChoice.of(hparams, routing, each, x_BTD)
    for loop, (router, args) in zip(loops_of(hparams, routing), each, strict=True):
        before_BTD, run = x_BTD, functools.partial(blocks, loop, first)
        x_BTD, record, indices_BC, (kept, made) = loop.run(
            run, router, args, x_BTD, candidates, sizes_of(loop), choice
        )
        first = made if loop.makes_keys else first
        sections.append(Section(kept, loop, record, indices_BC, before_BTD))
        candidates = mask_tokens(candidates, record.selected_BT)
    return x_BTD, sections


def run_recursions(hparams: Hparams, routing: str, params, tokens: TokenInfo, args, x_BTD):
    """Run the embedded tokens through all layers.

    `params` has the `stack` and the `loop_routers` of a Transformer, and `args` is the RoutingArgs
    of all loops, stacked. Returns x_BTD and the RoutingRecord with an axis of loops.
    """
    stack, looped = Stack(hparams.model, routing), hparams.model.looped_range

    def run(layers, x_BTD, tokens):
        part, part_params = stack.section(params['stack'], layers)
        return run_stack(part, part_params, tokens, LayerArgs(), x_BTD)[0]

    def run_loop(loop, first, x_BCD, tokens):
        if hparams.model.routing.loop_keys != 'first':
            return run(looped, x_BCD, tokens), (None, None)
        part, part_params = stack.section(params['stack'], looped)
        y_BCD, made = run_with_keys(part, part_params, tokens, x_BCD, first)
        return y_BCD, (None, made)

    def sizes_of(loop):
        return causal_sizes(hparams, x_BTD.shape[1], routing, loop.progress)

    if looped.start:
        x_BTD = run(range(looped.start), x_BTD, tokens)
    each = [
        jax.tree.map(lambda leaf, n=number: leaf[n], (params['loop_routers'], args))
        for number in range(len(hparams.model.loop_progress))
    ]
    x_BTD, sections = run_loops(hparams, routing, each, x_BTD, tokens, run_loop, sizes_of)
    if looped.stop < hparams.model.num_layers:
        x_BTD = run(range(looped.stop, hparams.model.num_layers), x_BTD, tokens)
    records = [section.record for section in sections]
    return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *records)


def causal_sizes(hparams: Hparams, length: int, routing: str, progress: float = 1.0):
    """Return the static sizes of a routed block or loop under a causal rule.

    There are several if its cache grows, and none under top_c.
    """
    if routing == 'top_c' or not hparams.model.routed_layers:
        return ()
    knobs = hparams.model.routing
    most = knobs.max_selected(max(hparams.data.sequence_length, length), routing, progress)
    return (min(most, length),) if knobs.overflow == 'skip' else static_sizes(length, most)


def init_loop_routers(key, hparams: ModelHparams, length: int):
    """Initialize the routers and causal rules of all loops, stacked.

    Their inputs are a random row that is distributed like embeddings.
    """
    stream_key, key = jax.random.split(key)
    x_BTD = jax.random.normal(stream_key, (1, length, hparams.d_model))
    x_BTD = (hparams.embedding_init_std * x_BTD).astype(hparams.dtype)
    tokens = TokenInfo(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32))
    args = RoutingArgs(jnp.int32(0), jnp.float32(0), None)
    chooser = Chooser(hparams, 'top_c', parent=None)

    def init(key):
        variables = chooser.init(key, x_BTD, tokens, args, method='decide')
        return variables.get('params', {})

    return jax.vmap(init)(jax.random.split(key, hparams.loops))


class Recursions(NamedTuple):
    """The layers of a model with routed loops, unrolled."""

    hparams: Hparams
    routing: str
    loops: list  # (parameters of the router, RoutingArgs) of each loop
    layers: list  # (Layer, its variables, LayerArgs) of each layer that runs

    def _sections(self):
        """Return the layers before the loops, a list of those of each loop, and those after."""
        looped = self.hparams.model.looped_range
        first, size = looped.start, len(looped)
        last = first + size * len(self.loops)
        of_loops = [self.layers[at : at + size] for at in range(first, last, size)]
        return self.layers[:first], of_loops, self.layers[last:]

    def run(self, x_BTD, tokens: TokenInfo, keep, sizes_of):
        """Run whole rows. Returns x_BTD after all layers, and a list of Section.

        keep(layer input, LayerOutput) returns the arrays of tokens to keep, and sizes_of(Loop) the
        static sizes. `kept` of a Section is a list, with what `keep` returned for each layer.
        """
        before, of_loops, after = self._sections()

        def run(layers, loop, first, x_BTD, tokens):
            reads = [None] * len(layers) if first is None else first
            kept, made = [], []
            for (layer, variables, args), read in zip(layers, reads, strict=True):
                output = layer.apply(variables, x_BTD, None, tokens, args, None, read)
                made.append(FirstKeys(output.aux.keys, tokens))
                kept.append(keep(x_BTD, output if read is None else output._replace(aux=None)))
                x_BTD = output.x_BTD
            return x_BTD, (kept, made if loop is not None and loop.makes_keys else None)

        def run_loop(loop, first, x_BCD, tokens):
            return run(of_loops[loop.number], loop, first, x_BCD, tokens)

        x_BTD, (kept_before, _) = run(before, None, None, x_BTD, tokens)
        x_BTD, sections = run_loops(
            self.hparams, self.routing, self.loops, x_BTD, tokens, run_loop, sizes_of
        )
        x_BTD, (kept_after, _) = run(after, None, None, x_BTD, tokens)
        return x_BTD, [Section(kept_before), *sections, Section(kept_after)]

    def prefill(self, x_BTD, tokens: TokenInfo, capacity: int, grows: bool):
        """Return x_BTD after all layers, the LayerCaches and dropped_B, as decoding.prefill."""
        length, knobs = x_BTD.shape[1], self.hparams.model.routing

        def most(loop):
            context = self.hparams.data.sequence_length
            some = min(capacity, knobs.cache_size(context, self.routing, loop.progress))
            return length if grows or loop.reads_keys else some

        x_BTD, sections = self.run(
            x_BTD,
            tokens,
            lambda _, output: None if output.aux is None else output.aux.keys,
            lambda loop: static_sizes(length, most(loop)),
        )
        caches, dropped_B = [], jnp.zeros(x_BTD.shape[0], jnp.int32)
        for keys, loop, record, indices_BC, _ in sections:
            size, places = capacity, ()
            if loop is not None:
                dropped_B += jnp.sum(record.dropped_BT, axis=1)
            if loop is not None and loop.reads_keys:
                continue
            if loop is not None and loop.progress:  # otherwise the cache has all tokens, in order
                lengths_B = jnp.sum(record.selected_BT, axis=1)
                places = (gather_tokens(tokens.positions_BT, indices_BC), lengths_B)
                size = most(loop)
            caches += [cache_from_prefill(one, size, *places) for one in keys]
        return x_BTD, caches, dropped_B

    def extend(self, x_BTD, tokens: TokenInfo, cache: Cache, documents_BT):
        """Return x_BTD after all layers, CacheUpdates and dropped_BT, as decoding.extend."""
        caches, updates = iter(cache.layers), []

        def run(layers, caches, x_CTD, tokens_CT, documents_CT, first=None, rows_C=None):
            keys = []
            reads = [None] * len(layers) if first is None else first
            for (layer, variables, args), past, read in zip(layers, caches, reads, strict=True):
                read = None if read is None else FirstKeys(read, tokens_CT)
                inputs = tokens_CT, args, past, documents_CT, None, rows_C, read
                x_CTD, _, update, _ = layer.apply(variables, x_CTD, None, *inputs, method='extend')
                keys.append(update.keys)
            return x_CTD, keys if first is None else []

        def run_all(layers, x_BTD):
            own = [next(caches) for _ in layers]
            x_BTD, keys = run(layers, own, x_BTD, tokens, documents_BT)
            updates.extend(CacheUpdate(one, None) for one in keys)
            return x_BTD, own, keys

        before, of_loops, after = self._sections()
        (x_BTD, *_), dropped_BT = run_all(before, x_BTD), jnp.zeros_like(tokens.positions_BT)
        candidates = tokens
        choice = TokenChoice.of(self.hparams, self.routing, self.loops, x_BTD)
        for loop, (router, args), layers in zip(
            loops_of(self.hparams, self.routing), self.loops, of_loops, strict=True
        ):
            _, logits_BT, update = loop.decide(router, x_BTD, candidates, args, choice)
            if not loop.progress:
                y_BTD, first_caches, first = run_all(layers, x_BTD)
                x_BTD = loop.new_x(x_BTD, y_BTD, update)
                continue
            selected_BT = wanted_BT = logits_BT > 0
            if loop.reads_keys:  # all new tokens are visible, selected or not
                blocks = functools.partial(run, layers, first_caches)
                rows = x_BTD, update, (tokens, documents_BT, first)
            else:
                own = [next(caches) for _ in layers]
                selected_BT = select_into_cache(own[0], wanted_BT, tokens.segment_ids_BT)
                blocks = functools.partial(run, layers, own)
                rows = x_BTD, update, (mask_tokens(candidates, selected_BT), documents_BT, None)
            dropped_BT += wanted_BT & ~selected_BT
            candidates = mask_tokens(candidates, selected_BT)
            x_BTD, keys = _extend_selected(loop, blocks, rows, selected_BT, first_caches)
            updates.extend(CacheUpdate(one, selected_BT) for one in keys)
        x_BTD, *_ = run_all(after, x_BTD)
        return x_BTD, updates, dropped_BT


def _extend_selected(loop, blocks, rows, selected_BT, caches):
    """Run a loop on the rows with a selected token. Returns x' and the KeysValues it makes.

    `caches` are used for their shapes only.
    """
    batch, length = selected_BT.shape
    nothing_BTKH = jnp.zeros((batch, length, *caches[0].k_BKHS.shape[1:3]), rows[0].dtype)
    nothing = [] if loop.reads_keys else [KeysValues(nothing_BTKH, nothing_BTKH)] * len(caches)

    def run(sides, rows_C):
        selected_CT, (x_CTD, picked_update, inputs) = sides
        y_CTD, keys = blocks(x_CTD, *inputs, rows_C)
        new_CTD = loop.new_x(x_CTD, y_CTD, picked_update)
        return jnp.where(selected_CT[..., None], new_CTD, x_CTD), keys

    def skip(sides):
        return sides[1][0], nothing

    return run_on_rows(run, skip, jnp.any(selected_BT, axis=1), (selected_BT, rows))
