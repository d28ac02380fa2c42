"""A float64 NumPy decoder, one row, token and head at a time: the oracle of whole models.

It is written from the definitions only: RMSNorm, RoPE and SwiGLU as in Llama; one softmax over
sequence keys and depth slots (Zhu et al. 2026, arXiv 2603.15619); a weighted sum of earlier outputs
(Pagliardini et al. 2024, arXiv 2402.02622); DeepSeekMoE (Dai et al. 2024, arXiv 2401.06066); expert
choice (Zhou et al. 2022, arXiv 2202.09368); Mixture-of-Depths-and-Experts (Raposo et al. 2024,
arXiv 2404.02258). Nothing is batched or scanned. Only the names of parameters and knobs are shared
with the library, so that the two can agree only by computing the same thing.

Parameters may be complex: decisions use real parts and all else is analytic, so that a complex step
along a direction gives the derivative up to rounding (Squire and Trapp 1998).

Where the definitions leave a choice, it is as follows. The Z candidates of a token are the routed
experts and then the no-op experts. The balance loss uses the same Z, so that an even load costs
alpha. Experts of a routed block see and count only its selected tokens. Sigmoid scores are divided
by their sum over all that a token chose, including no-op experts. Under expert choice a weight is
the score itself.
"""

import dataclasses
import itertools
import math

import jax
import numpy as np

SUBLAYERS = ('attention', 'mlp')


@dataclasses.dataclass
class Seen:
    """What the router of one layer said about the real tokens it saw, one item per token."""

    logits: list = dataclasses.field(default_factory=list)  # of logits_Z
    scores: list = dataclasses.field(default_factory=list)  # of scores_Z
    chosen: list = dataclasses.field(default_factory=list)  # of chosen_Z, bool


@dataclasses.dataclass
class Pass:
    """How tokens are chosen in one pass over a batch, and what its layers record.

    Attributes:
      routing: top_c, or the causal rule that selects tokens.
      thresholds: {layer: threshold} for the rule `threshold`.
      expert_thresholds: {layer: threshold_Z}. An expert that chooses takes every token with a
        higher score. Empty: the highest scores of the row.
      seen: {layer: Seen} of experts.
      choices: {layer: a dict for each row} of routed blocks, by the names of RoutingRecord.
      loops: how many loops each token of each row went through, if tokens can exit.
      reads: for each read of attention residuals, {token: the weights of its sources}.
    """

    routing: str = 'top_c'
    thresholds: dict = dataclasses.field(default_factory=dict)
    expert_thresholds: dict = dataclasses.field(default_factory=dict)
    seen: dict = dataclasses.field(default_factory=dict)
    choices: dict = dataclasses.field(default_factory=dict)
    loops: list = dataclasses.field(default_factory=list)
    reads: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Row:
    """One row of tokens, or the selected tokens of it."""

    segments_T: np.ndarray
    positions_T: np.ndarray
    run: Pass
    tokens_T: np.ndarray | None = None
    # {block: (Row, key_TKH, value_TKH)} of the first loop, if later loops read them.
    made: dict | None = None

    def take(self, tokens):
        """Return the same for some tokens only."""
        arrays = self.segments_T, self.positions_T, self.tokens_T
        segments_T, positions_T, tokens_T = (array[tokens] for array in arrays)
        return Row(segments_T, positions_T, self.run, tokens_T, self.made)


def forward(params, tokens_BT, segment_ids_BT, model, run):
    """Return logits_BTV.

    A token sees only tokens of its own segment id. The logits of padding mean nothing.

    Args:
      params: `embedding`, `final_norm`, `head` unless tied, and `layers`: a list of each layer's
        parameters, including entry and exit of a depth stream. If loops are routed, also
        `loop_routers` with an axis of loops.
      tokens_BT: int [B, T].
      segment_ids_BT: int [B, T], 0 for padding.
      model: ModelHparams.
      run: a Pass, to which the decisions of the layers are added.
    """
    rows = []
    for tokens_T, segments_T in zip(tokens_BT, segment_ids_BT, strict=True):
        row = Row(segments_T, np.arange(len(tokens_T)), run, tokens_T)
        x_TD = params['embedding'][tokens_T]
        if 'loop_routers' in params:
            x_TD = recursions(params['layers'], params['loop_routers'], x_TD, row, model)
        else:
            x_TD = stream(params['layers'], x_TD, row, model)
        x_TD = rms_norm(x_TD, params['final_norm'], model)
        tied = model.tie_embeddings
        rows.append(x_TD @ (params['embedding'].T if tied else params['head']['kernel']))
    return np.stack(rows)


def stream(layers, x_TD, row, model):
    """Return x_TD after all layers."""
    kind = model.depth.stream
    if kind in ('residual', 'moda', 'value_residual', 'value_attention'):
        slots = []  # of (key_TKH, value_TKH, valid_T), oldest first; the embedding writes none
        first_TD, exits = x_TD, LoopExits(model, row, len(x_TD))
        for number, layer in zip(blocks_that_run(model), layers, strict=True):
            before_TD = x_TD
            if 'loop_embedding' in layer:
                x_TD = x_TD + layer['loop_embedding']
            if model.embedding_residual != 'none':
                blend = layer['blend']
                x_TD = blend['residual_scale'] * x_TD + blend['embedding_scale'] * first_TD
            x_TD, written = block(layer, x_TD, newest(slots, model), row, number, model)
            x_TD = exits.after(number, before_TD, x_TD)
            slots = slots + written
        return x_TD
    if kind == 'attention_residual':
        return attention_residual(layers, x_TD, row, model)
    if kind == 'hyper_connections':
        return hyper_connections(layers, x_TD, row, model)
    if kind == 'mudd':
        return mudd(layers, x_TD, row, model)
    entry, *layers, last = layers
    if kind == 'attention':
        query_TNH, *slot = stream_write(entry['stream'], x_TD)
        slots = [slot]
        for number, layer in enumerate(layers):
            read_TD = read_depth(query_TNH, newest(slots, model))
            y_TD, _ = block(layer, read_TD, [], row, number, model)
            query_TNH, *slot = stream_write(layer['stream'], y_TD)
            slots.append(slot)
        return read_depth(query_TNH, newest(slots, model))
    outputs = [x_TD]  # X_0 is the embedding, X_l what block l returns

    def read(weights):
        """Return x_TD: the sources of each token, mixed by the softmax of their logits."""
        if kind == 'dense':
            return np.concatenate(outputs, axis=-1) @ weights['kernel']
        return sum(w * output for w, output in zip(weights['weights'], outputs, strict=True))

    for number, layer in enumerate(layers):
        outputs.append(block(layer, read(layer['stream']), [], row, number, model)[0])
    return read(last['stream'])


class LoopExits:
    """Which tokens of a row have exited the loops, by a threshold in evaluation."""

    def __init__(self, model, row, num_tokens):
        self.threshold = model.loop_exit_threshold if row.run.routing != 'top_c' else 0
        self.left_T, self.loops = [False] * num_tokens, [0] * num_tokens
        if self.threshold:
            _, before, after = model.looped_layers.split(':')
            self.first, self.last = int(before), model.num_layers - int(after) - 1
            row.run.loops.append(self.loops)

    def after(self, number, before_TD, x_TD):
        """Return x_TD after a block, where tokens that have exited keep their earlier value."""
        if not self.threshold or not self.first <= number <= self.last:
            return x_TD
        if number == self.first:
            self.start_TD = before_TD
        kept_TD = [
            b if left else x for b, x, left in zip(before_TD, x_TD, self.left_T, strict=True)
        ]
        if number == self.last:
            for t, left in enumerate(self.left_T):
                change = np.linalg.norm((kept_TD[t] - self.start_TD[t]).real)
                self.loops[t] += not left
                self.left_T[t] = left or change < self.threshold * np.linalg.norm(kept_TD[t].real)
        return np.stack(kept_TD)


def blocks_that_run(model):
    """Return the numbers of the blocks in the order in which they run."""
    if model.looped_layers == 'none':
        return range(model.num_layers)
    _, before, after = model.looped_layers.split(':')
    first, end = int(before), model.num_layers - int(after)
    looped = [*range(first, end)] * model.loops
    if model.loop_order == 'sequence':
        looped = [block for block in range(first, end) for _ in range(model.loops)]
    return [*range(first), *looped, *range(end, model.num_layers)]


def looped_layers(params, model):
    """Return the parameters of each layer that runs, with those of its loop."""
    stack, blocks, layers = params['stack'], [], []
    for _, run in sorted(stack.items(), key=lambda item: int(item[0].removeprefix('run_'))):
        for row in range(len(jax.tree.leaves(run)[0])):
            for _, layer in sorted(run.items(), key=lambda item: int(item[0][len('layer_') :])):
                blocks.append(jax.tree.map(lambda leaf, row=row: leaf[row], layer))
    _, before, after = model.looped_layers.split(':')
    visits = dict.fromkeys(range(model.num_layers), 0)
    for block in blocks_that_run(model):
        loop, layer = visits[block], blocks[block]
        visits[block] += 1
        if int(before) <= block < model.num_layers - int(after):
            layer = at_loop(layer, loop, model)
            starts = block == int(before) or model.loop_order == 'sequence'
            if starts and 'loop_embeddings' in params:
                layer = layer | {'loop_embedding': params['loop_embeddings'][loop]}
        layers.append(layer)
    return layers


def at_loop(layer, loop, model):
    """Return a looped layer with its norm scales for that loop."""
    if model.loop_norms == 'shared':
        return layer

    def pick(path, leaf):
        return leaf[loop] if path[-2].key.endswith('_norm') else leaf

    return jax.tree_util.tree_map_with_path(pick, layer)


def recursions(layers, routers, x_TD, row, model):
    """Return x_TD after all layers, where a router for each loop chooses the tokens that go on.

    A loop sees only tokens that all loops before it have chosen.
    """
    _, before, after = model.looped_layers.split(':')
    size = model.num_layers - int(before) - int(after)
    end = int(before) + model.loops * size
    going_T = row.segments_T != 0
    looped_row = dataclasses.replace(row, made={} if model.routing.loop_keys == 'first' else None)
    for number, layer in enumerate(layers[: int(before)]):
        x_TD, _ = block(layer, x_TD, [], row, number, model)
    if model.routing.router == 'token_choice':
        looped = layers[int(before) : int(before) + size]
        x_TD = assigned_loops(looped, routers['router']['w'], x_TD, looped_row, int(before), model)
    for loop in range(model.loops if model.routing.router != 'token_choice' else 0):
        start = int(before) + loop * size
        router = jax.tree.map(lambda leaf, loop=loop: leaf[loop], routers)
        share = (model.loops - 1 - loop * (1 - model.routing.capacity)) / (model.loops - 1)
        places = max(1, int(share * len(x_TD) + 1e-6))
        taken, gates_T = recur(router, x_TD, row, going_T, places, start, loop, model)
        y_TD, part = x_TD[taken], looped_row.take(taken)
        part.segments_T = np.where(going_T[taken], part.segments_T, 0)
        for i, layer in enumerate(layers[start : start + size]):
            y_TD, _ = block(layer, y_TD, [], part, int(before) + i, model)
        if model.routing.loop_update == 'change':
            y_TD = y_TD - x_TD[taken]
        x_TD = x_TD.astype(y_TD.dtype)
        x_TD[taken] = x_TD[taken] + gates_T[taken][:, None] * y_TD
        going_T = row.run.choices[start][-1]['selected_BT']
    for number, layer in enumerate(layers[end:]):
        x_TD, _ = block(layer, x_TD, [], row, int(before) + size + number, model)
    return x_TD


def assigned_loops(blocks, w_ND, first_TD, row, before, model):
    """Return x_TD after the loops, where each token goes through the first few.

    Their number is the place of its highest score, from the stream before them. Records the
    choices.
    """
    routing, real_T = model.routing, row.segments_T != 0
    scores_TN = first_TD @ w_ND.T
    last_T = np.argmax(scores_TN.real, axis=1)
    exp_TN = np.exp(scores_TN - scores_TN.real.max(axis=1, keepdims=True))
    gates_TN = routing.gate_scale * exp_TN / exp_TN.sum(axis=1, keepdims=True)
    x_TD = first_TD
    for loop in range(len(w_ND)):
        taken_T = real_T & (last_T >= loop)
        taken = np.flatnonzero(taken_T)
        y_TD, part = x_TD[taken], row.take(taken)
        for i, layer in enumerate(blocks):
            y_TD, _ = block(layer, y_TD, [], part, before + i, model)
        new_TD, factors_T = x_TD.astype(y_TD.dtype), gates_TN[:, loop].copy()
        if routing.loop_update == 'gated_exit':
            factors_T[last_T > loop] = 1
            factors_T[last_T < loop] = 1  # only records
        for at, t in enumerate(taken):
            new_TD[t] = factors_T[t] * y_TD[at]
            if last_T[t] == loop:
                new_TD[t] = new_TD[t] + first_TD[t]
        x_TD = new_TD
        choice = {'scores_BT': scores_TN[:, loop], 'rule_logits_BT': np.where(taken_T, 1e9, -1e9)}
        choice |= {'top_c_BT': taken_T, 'selected_BT': taken_T, 'dropped_BT': taken_T & False}
        choice |= {'gates_BT': np.where(real_T & (last_T >= loop - 1), factors_T, 0)}
        row.run.choices.setdefault(before + loop * len(blocks), []).append(choice)
    return x_TD


def depth_loss(choices, routing, real_BT):
    """Return the weighted balance loss and z-loss of token choice over all real tokens."""
    tokens_nN = np.stack([stack(rows, 'scores_BT')[real_BT] for rows in choices.values()], axis=1)
    count, loops = tokens_nN.shape
    log_z_n = np.array([log_sum_exp(scores_N) for scores_N in tokens_nN])
    probabilities_nN = np.exp(tokens_nN - log_z_n[:, None])
    last_n = np.argmax(tokens_nN.real, axis=1)
    balance = sum(np.mean(last_n == i) * np.mean(probabilities_nN[:, i]) for i in range(loops))
    return routing.balance_weight * loops * balance + routing.z_loss * np.mean(log_z_n**2)


def recur(router, x_TD, row, going_T, places, start, loop, model):
    """Return the tokens that a loop runs on and their gates_T, and record the choice."""
    routing, run, tokens = model.routing, row.run, np.arange(len(x_TD))
    scores_T = x_TD @ router['router']['w'] + router['router'].get('b', 0)
    top_c_T = np.isin(tokens, largest(scores_T.real, np.flatnonzero(going_T), places))
    rule = routing.causal_rule if run.routing == 'top_c' else run.routing
    logits_T = rule_logits(rule, router, x_TD, scores_T, run.thresholds.get(start, 0))
    if loop == 0:  # no choice
        logits_T = np.full(len(x_TD), 1e9)
    logits_T = np.where(going_T, logits_T, -1e9)
    wanted_T = selected_T = top_c_T
    if run.routing != 'top_c':
        wanted_T = going_T & (logits_T.real > 0)
        endless = rule == 'dense' or routing.overflow == 'grow'
        most = len(x_TD) if endless else int(routing.cache_capacity * places + 1e-6)
        selected_T = wanted_T & (np.cumsum(wanted_T) <= most)
    gates_T = routing.gate_scale * GATES[routing.gate](scores_T)
    gates_T = np.where(going_T, gates_T, 0)
    choice = {'scores_BT': scores_T, 'rule_logits_BT': logits_T, 'top_c_BT': top_c_T}
    choice |= {'selected_BT': selected_T, 'dropped_BT': wanted_T & ~selected_T, 'gates_BT': gates_T}
    run.choices.setdefault(start, []).append(choice)
    return np.flatnonzero(selected_T), gates_T


def attention_residual(layers, x_TD, row, model):
    """Return the input of the final norm, where each sublayer reads all earlier outputs.

    Each token has its own sources: lists of what sublayers added, of which the first has the
    embedding. They are summed when they are read.
    """
    size = model.depth.sublayers_per_source or 1
    sources = [[[x_D]] for x_D in x_TD]  # of each token; a source is a list of vectors

    def read(weights, tokens, sources):
        """Return one x_TD for each way."""
        found, weights_of = [], {}
        for t in tokens:
            sums = [sum(source) for source in sources[t]]
            keys = [rms_norm(v_D, {'scale': weights['scale']}, model) for v_D in sums]
            logits = np.array([weights['query'] @ key_D for key_D in keys])
            p = np.exp(logits - logits.real.max())
            weights_of[t] = p / p.sum()
            found.append(sum(one * v_D for one, v_D in zip(weights_of[t], sums, strict=True)))
        row.run.reads.append(weights_of)
        return np.array(found).reshape(len(tokens), -1)

    def add(sublayer, tokens, sources, outputs):
        """Return the sources of each token with the output of a sublayer."""
        sources = list(sources)
        for t, output_D in zip(tokens, outputs, strict=True):
            opens = sublayer % size == 0
            old = sources[t]
            sources[t] = [*old, [output_D]] if opens else [*old[:-1], [*old[-1], output_D]]
        return sources

    def run(layer, number, tokens, sources):
        """Return the outputs of attention and mlp of a layer for these tokens."""
        part, outputs = row.take(tokens), []
        for i, name in enumerate(SUBLAYERS):
            read_TD = read(layer[f'{name}_connection'], tokens, sources)
            output_TD = sublayer(name, layer, read_TD, part, number, model)
            outputs.append(output_TD)
            sources = add(2 * number + i, tokens, sources, output_TD)
        return outputs

    *layers, last = layers
    every = np.arange(len(x_TD))
    for number, layer in enumerate(layers):
        taken, gates_T, inner = every, np.ones(len(x_TD)), layer
        if 'router' in layer:
            read_TD = read(layer['block']['attention_connection'], every, sources)
            taken, selected_T, gates_T = decide(layer, read_TD, row, number, model)
            gates_T, inner = np.where(selected_T, gates_T, 0), layer['block']
        for i, output_TD in enumerate(run(inner, number, taken, sources)):
            gated_TD = gates_T[taken][:, None] * output_TD
            sources = add(2 * number + i, taken, sources, gated_TD)
    return read(last['stream']['reader'], every, sources)


def hyper_connections(layers, x_TD, row, model):
    """Return the input of the final norm: the mean of each token's streams."""
    form, size = model.depth.hyper_form, model.depth.num_streams or 4
    streams = [[x_D] * size for x_D in x_TD]

    def norm(v):
        return v / np.sqrt(np.mean(v * v) + model.norm_eps)

    def weights_of(part, weights, streams):
        """Return the weights of a token's streams for the read, mix or add of a sublayer."""
        bias = weights[f'{part}_bias']
        if form == 'static':
            return bias
        kernel, scale = weights[f'projections_{part}']['kernel'], weights[f'{part}_scale']
        if form == 'dynamic':
            found = np.array([norm(x_D) @ kernel for x_D in streams])
            return bias + scale * np.tanh(found if part == 'mix' else found[:, 0])
        logits = bias + scale * (norm(np.concatenate(streams)) @ kernel).reshape(bias.shape)
        if part != 'mix':
            return (1 if part == 'read' else 2) / (1 + np.exp(-logits))
        matrix = np.exp(logits)
        for _ in range(20):
            matrix = matrix / matrix.sum(axis=0)[None, :]
            matrix = matrix / matrix.sum(axis=1)[:, None]
        return matrix

    def read(weights, tokens):
        found = []
        for t in tokens:
            of_streams = weights_of('read', weights, streams[t])
            found.append(sum(w * x_D for w, x_D in zip(of_streams, streams[t], strict=True)))
        return np.array(found).reshape(len(tokens), len(x_TD[0]))

    def add(weights, old, output_D):
        """Return the streams of a token with the output of a sublayer."""
        mix, of_output = (weights_of(part, weights, old) for part in ('mix', 'add'))
        new = []
        for j in range(size):
            # HC: a row for each old stream. mHC: a row for each new one.
            column = mix[j] if form == 'constrained' else mix[:, j]
            mixed_D = sum(w * x_D for w, x_D in zip(column, old, strict=True))
            new.append(mixed_D + of_output[j] * output_D)
        return new

    for number, layer in enumerate(layers):
        taken, gates_T, inner = np.arange(len(x_TD)), np.ones(len(x_TD)), layer
        if 'router' in layer:
            read_TD = read(layer['block']['attention_connection'], taken)
            taken, selected_T, gates_T = decide(layer, read_TD, row, number, model)
            gates_T, inner = np.where(selected_T, gates_T, 0), layer['block']
        before = list(streams)
        for name in SUBLAYERS:
            weights = inner[f'{name}_connection']
            read_TD = read(weights, taken)
            outputs = sublayer(name, inner, read_TD, row.take(taken), number, model)
            for t, output_D in zip(taken, outputs, strict=True):
                streams[t] = add(weights, streams[t], output_D)
        for t in taken:
            pairs = zip(before[t], streams[t], strict=True)
            streams[t] = [old_D + gates_T[t] * (new_D - old_D) for old_D, new_D in pairs]
    return np.array([sum(of_token) / size for of_token in streams])


def mudd(layers, x_TD, row, model):
    """Return the input of the final norm: mixtures of all block outputs, for each token."""
    own, place = model.depth.mudd_ways, model.norm_placement
    outputs = [x_TD]  # of the embedding and each block

    def gelu(z):
        """Return z P(Z < z) with Z normal; along an imaginary part by its derivative."""
        below = np.vectorize(lambda x: (1 + math.erf(x / math.sqrt(2))) / 2)(z.real)
        density = np.exp(-(z.real**2) / 2) / math.sqrt(2 * math.pi)
        return z * below + z.real * density * (z - z.real)

    def read(weights):
        """Return one x_TD for each way."""
        found = []
        for t, newest_D in enumerate(outputs[-1]):
            weight_CA = weights['bias']  # A: 0 for the newest output, 1 for the one before it
            if model.depth.mudd_weights == 'dynamic':
                normed_D = newest_D / np.sqrt(np.mean(newest_D**2) + model.norm_eps)
                inner_I = gelu(normed_D @ weights['inner'])
                weight_CA = weight_CA + np.tensordot(inner_I, weights['outer'], axes=1)
            newest_first = [output_TD[t] for output_TD in reversed(outputs)]
            found.append(weight_CA[:, : len(outputs)] @ np.array(newest_first))
        return np.moveaxis(np.array(found), 1, 0)

    def normed(x_TD, name, layer, where):
        return rms_norm(x_TD, layer[f'{name}_norm'], model) if place == where else x_TD

    _, *layers, last = layers
    for number, layer in enumerate(layers):
        ways, shared = read(layer['stream']), len(own) if own != 'one' else 0
        queries, keys, values, x_TD = (
            ways[own.index(way) if way in own else shared] for way in 'qkvr'
        )
        inputs = [normed(way, 'attention', layer, 'pre') for way in (queries, keys, values)]
        window = model.windows[number % len(model.windows)]
        f_TD, _ = attention(layer['attention'], inputs, [], row, window, number, model)
        x_TD = normed(
            x_TD + normed(f_TD, 'attention', layer, 'reordered'), 'attention', layer, 'post'
        )
        read_TD = normed(x_TD, 'mlp', layer, 'pre')
        if 'router' in layer['mlp']:
            f_TD = mixture(layer['mlp'], read_TD, row, number, model.experts)
        else:
            f_TD = mlp(layer['mlp'], read_TD)
        outputs.append(normed(x_TD + normed(f_TD, 'mlp', layer, 'reordered'), 'mlp', layer, 'post'))
    return read(last['stream'])[0]


def sublayer(name, layer, read_TD, row, number, model):
    """Return what the attention or mlp of a layer adds to these tokens."""
    place, weights, norm = model.norm_placement, layer[name], layer[f'{name}_norm']
    if place == 'pre':
        read_TD = rms_norm(read_TD, norm, model)
    if name == 'attention':
        window = model.windows[number % len(model.windows)]
        inputs = (read_TD, read_TD, read_TD)
        output_TD, _ = attention(weights, inputs, [], row, window, number, model)
    elif 'router' in weights:
        output_TD = mixture(weights, read_TD, row, number, model.experts)
    else:
        output_TD = mlp(weights, read_TD)
    return rms_norm(output_TD, norm, model) if place == 'reordered' else output_TD


def newest(slots, model):
    """Return the slots that a layer sees."""
    return slots[-model.depth.slot_window :] if model.depth.slot_window else slots


def stream_write(weights, x_TD):
    """Return the query and the slot of the attention stream."""
    weights = {'query': weights['query'], **weights['slot']}
    written = [linear(x_TD, weights[name]) for name in ('query', 'key', 'value')]
    return *written, np.ones(len(x_TD), bool)


def read_depth(query_TNH, slots):
    """Return x_TD, D = N H: each token's query over its own slots."""
    num_tokens, num_heads, _ = query_TNH.shape
    x_TNH = np.zeros_like(query_TNH)
    for t, n in np.ndindex(num_tokens, num_heads):
        x_TNH[t, n] = one_query(query_TNH[t, n], *slots_of(slots, t, n, num_heads))
    return x_TNH.reshape(num_tokens, -1)


def block(layer, x_TD, visible, row, number, model):
    """Return the block's y_TD with its residuals, and the slots it writes, attention's first.

    visible: slots of earlier layers that its attention heads see.
    """
    if 'router' in layer:
        return routed_block(layer, x_TD, visible, row, number, model)
    place = model.norm_placement

    def fed_forward(x_TD):
        if 'router' in layer['mlp']:
            return mixture(layer['mlp'], x_TD, row, number, model.experts)
        return mlp(layer['mlp'], x_TD)

    attended_TD = rms_norm(x_TD, layer['attention_norm'], model) if place == 'pre' else x_TD
    window = model.windows[number % len(model.windows)]
    inputs = (attended_TD, attended_TD, attended_TD)
    f_TD, slot = attention(layer['attention'], inputs, visible, row, window, number, model)
    if place == 'pre':
        x_TD = x_TD + f_TD
        read_TD = rms_norm(x_TD, layer['mlp_norm'], model)
        y_TD = x_TD + fed_forward(read_TD)
    elif place == 'post':
        read_TD = rms_norm(x_TD + f_TD, layer['attention_norm'], model)
        y_TD = rms_norm(read_TD + fed_forward(read_TD), layer['mlp_norm'], model)
    else:
        read_TD = x_TD + rms_norm(f_TD, layer['attention_norm'], model)
        y_TD = read_TD + rms_norm(fed_forward(read_TD), layer['mlp_norm'], model)
    if model.depth.stream == 'value_residual' and number == 0:
        return y_TD, [slot]
    if model.depth.stream == 'value_attention':
        return y_TD, [slot]
    if model.depth.stream != 'moda':
        return y_TD, []
    return y_TD, written_slots(layer, attended_TD, read_TD, y_TD, row, model)


def written_slots(layer, attended_TD, read_TD, y_TD, row, model):
    """Return the slots of a layer, from the inputs of its two parts and its output."""
    depth, projections = model.depth, layer.get('stream', {})
    if depth.slots == 'block':
        sources = [(projections.get('block_slot'), y_TD)]
    else:
        projected = depth.attention_slot_projection
        own = projections.get('attention_slot') if projected else layer['attention']
        sources = [(own, attended_TD)]
    if depth.slots == 'attention+ffn':
        sources.append((projections.get('ffn_slot'), read_TD))
    slots = []
    for weights, x_TD in sources:
        if weights:  # the last layer has no projections: nothing reads its slots
            key_TKH, value_TKH = linear(x_TD, weights['key']), own_values(weights, x_TD, row)
            if depth.slot_keys == 'rotated':
                key_TKH = qk_norm(key_TKH, layer['attention'], 'key_norm', model)
                key_TKH = rope(key_TKH, row.positions_T, model)
            slots.append((key_TKH, value_TKH, np.ones(len(x_TD), bool)))
    return slots


def slope_of_sigmoid(r):
    return np.exp(-r.real) / (1 + np.exp(-r.real)) ** 2


GATES = {
    'raw': lambda r: r,
    'sigmoid': lambda r: 1 / (1 + np.exp(-r)),
    'tanh': np.tanh,
    'none': np.ones_like,
    'straight_through': lambda r: 1 + slope_of_sigmoid(r) * (r - r.real),
}


def routed_block(layer, x_TD, visible, row, number, model):
    """Return x + gate(r) (block(x) - x) for selected tokens, x for the others; and the slots.

    Tokens that skip the block write slots as if it added 0, or no slots.
    """
    if model.routing.part != 'block':
        return routed_sublayer(layer, x_TD, row, number, model), []
    taken, selected_T, gates_T = decide(layer, x_TD, row, number, model)
    inner = layer['block'] | {'stream': layer.get('stream', {})}
    visible = [[side[taken] for side in slot] for slot in visible]
    y_CD, written = block(inner, x_TD[taken], visible, row.take(taken), number, model)
    block_TD = np.array(x_TD)
    block_TD[taken] = y_CD
    y_TD = np.where(selected_T[:, None], x_TD + gates_T[:, None] * (block_TD - x_TD), x_TD)
    if model.depth.stream == 'value_attention':
        return y_TD, [scattered(slot, taken, selected_T) for slot in written]
    if model.depth.stream != 'moda':
        return y_TD, []
    attended_TD = x_TD
    if model.norm_placement != 'reordered':
        attended_TD = rms_norm(x_TD, inner['attention_norm'], model)
    read_TD = attended_TD
    if model.norm_placement == 'pre':
        read_TD = rms_norm(x_TD, inner['mlp_norm'], model)
    slots = written_slots(inner, attended_TD, read_TD, y_TD, row, model)
    for (key_TKH, value_TKH, valid_T), (key_CKH, value_CKH, _) in zip(slots, written, strict=True):
        if model.depth.slots != 'block':
            key_TKH[taken], value_TKH[taken] = key_CKH, value_CKH
        if model.depth.skipped_slots == 'masked':
            valid_T[:] = selected_T
    return y_TD, slots


def routed_sublayer(layer, x_TD, row, number, model):
    """Return x after a block in which a router chooses the tokens of one sublayer.

    The sublayer adds its output times gate(r) to chosen tokens, with r from the x it adds to.
    """
    inner = layer['block']
    for name in SUBLAYERS:
        taken, selected_T, gates_T = np.arange(len(x_TD)), np.ones(len(x_TD), bool), None
        if name == model.routing.part:
            taken, selected_T, gates_T = decide(layer, x_TD, row, number, model)
        y_CD = x_TD[taken] + sublayer(name, inner, x_TD[taken], row.take(taken), number, model)
        if model.norm_placement == 'post':
            y_CD = rms_norm(y_CD, inner[f'{name}_norm'], model)
        y_TD = x_TD.astype(y_CD.dtype)
        for at, t in enumerate(taken):
            if gates_T is None:
                y_TD[t] = y_CD[at]
            elif selected_T[t]:
                y_TD[t] = x_TD[t] + gates_T[t] * (y_CD[at] - x_TD[t])
        x_TD = y_TD
    return x_TD


def scattered(slot, taken, selected_T):
    """Return a slot of some tokens as a slot of all tokens, valid for the selected ones."""
    sides = [np.zeros((len(selected_T), *side.shape[1:]), side.dtype) for side in slot[:2]]
    for side, some in zip(sides, slot, strict=False):
        side[taken] = some
    return *sides, selected_T


def decide(layer, x_TD, row, number, model):
    """Return the tokens that a routed block runs on, bool selected_T, and gates_T."""
    routing, run = model.routing, row.run
    real_T, num_tokens = row.segments_T != 0, len(x_TD)
    scores_T = x_TD @ layer['router']['w'] + layer['router'].get('b', 0)
    size = max(1, int(routing.capacity * num_tokens + 1e-6))
    if routing.select_per == 'segment':
        top_c_T = best_of_segments(scores_T.real, row.segments_T, size)
    else:
        best = largest(scores_T.real, np.flatnonzero(real_T), size)
        top_c_T = np.isin(np.arange(num_tokens), best)
    rule = routing.causal_rule if run.routing == 'top_c' else run.routing
    logits_T = rule_logits(rule, layer, x_TD, scores_T, run.thresholds.get(number, 0))
    wanted_T = selected_T = top_c_T
    padding = np.flatnonzero(~real_T)[: size - top_c_T.sum()]  # takes the remaining places
    if run.routing != 'top_c':
        wanted_T, padding = real_T & (logits_T.real > 0), []
        endless = rule == 'dense' or routing.overflow == 'grow'
        most = num_tokens if endless else int(routing.cache_capacity * size + 1e-6)
        selected_T = wanted_T & (np.cumsum(wanted_T) <= most)
    gates_T = np.where(real_T, GATES[routing.gate](scores_T), 0)
    choice = {'scores_BT': scores_T, 'rule_logits_BT': logits_T, 'top_c_BT': top_c_T}
    choice |= {'selected_BT': selected_T, 'dropped_BT': wanted_T & ~selected_T, 'gates_BT': gates_T}
    run.choices.setdefault(number, []).append(choice)
    return np.array(sorted([*np.flatnonzero(selected_T), *padding]), int), selected_T, gates_T


def rule_logits(rule, layer, x_TD, scores_T, threshold):
    """Return what a causal rule compares with 0."""
    if rule == 'predictor':
        weights, hidden_TX = layer['predictor'], x_TD.real  # its loss changes nothing else
        if 'hidden' in weights:
            gate_TX = hidden_TX @ weights['hidden']['kernel'] + weights['hidden']['bias']
            hidden_TX = gate_TX / (1 + np.exp(-gate_TX))
        return (hidden_TX @ weights['out']['kernel'] + weights['out']['bias'])[:, 0]
    if rule == 'dense':
        return np.ones(len(x_TD))
    return scores_T - (threshold if rule == 'threshold' else 0)


def best_of_segments(scores_T, segments_T, num_selected):
    """Return bool [T]: the best of each document. Places are spread evenly along the row."""
    length, chosen_T = len(scores_T), np.zeros(len(scores_T), bool)
    bounds = [0, *np.flatnonzero(np.diff(segments_T)) + 1, length]
    for start, end in itertools.pairwise(bounds):
        if segments_T[start] > 0:
            places = num_selected * end // length - num_selected * start // length
            chosen_T[largest(scores_T, range(start, end), places)] = True
    return chosen_T


def has_table(number, model):
    """Return whether a layer has value embeddings: every second one, counted from the last."""
    every = {'none': [], 'all': [*range(model.num_layers)]}
    every['alternate'] = [*range(model.num_layers - 1, -1, -2)]
    return number in every[model.value_embeddings]


def own_values(weights, x_TD, row):
    """Return the projected values, plus the gated row of a table for a token's id."""
    own_TKH = linear(x_TD, weights['value'])
    if 'value_embedding' not in weights:
        return own_TKH
    table, gate_CK = (weights['value_embedding'][name] for name in ('embedding', 'gate'))
    for t, k in np.ndindex(own_TKH.shape[:2]):
        gate = 3 / (1 + np.exp(-(x_TD[t, :12] @ gate_CK[:, k])))
        own_TKH[t, k] = own_TKH[t, k] + gate * table[row.tokens_T[t], k]
    return own_TKH


def mixed_values(weights, x_TD, q_TNH, k_TKH, visible, row, number, model):
    """Return the values that a layer attends to, from its own and the visible slots."""
    own_TKH = own_values(weights, x_TD, row) if 'value' in weights else None
    if model.depth.stream == 'value_attention':
        return attended_values(q_TNH, k_TKH, own_TKH, visible, number, model.depth, model)
    if model.depth.stream != 'value_residual' or number == 0:
        return own_TKH
    first_TKH, mix = visible[0][1], model.depth.value_mix
    if mix == 'shared':
        return first_TKH
    if mix == 'sparse':
        last = model.depth.sparse_layers or 3
        return own_TKH if number < model.num_layers - last else 5 * first_TKH + own_TKH
    weight, own_weight = weights['values']['weights'] if mix == 'learned' else (0.5, 0.5)
    return weight * first_TKH + own_weight * own_TKH


def attended_values(q_TNH, k_TKH, own_TKH, visible, number, depth, model):
    """Return values that are each a softmax over those of earlier layers and its own.

    visible: slots of all earlier layers, the first first.
    """
    stride = depth.value_stride or max(1, model.num_layers // 2)
    sources = [i for i in range(number) if i % stride == 0 or i >= number - depth.recent_layers]
    mixed_TKH, group = np.zeros_like(own_TKH), model.num_heads // model.num_kv_heads
    for t, k in np.ndindex(mixed_TKH.shape[:2]):
        mean_H = sum(q_TNH[t, k * group + n] for n in range(group)) / group
        found = [visible[i] for i in sources if visible[i][2][t]]
        keys = [key[t, k] for key, *_ in found] + [k_TKH[t, k]]
        values = [value[t, k] for _, value, _ in found] + [own_TKH[t, k]]
        mixed_TKH[t, k] = one_query(mean_H, keys, values)
    return mixed_TKH


def attention(weights, inputs, visible, row, window, number, model):
    """Return y_TD, attention over the row and the visible slots in one softmax, and its slot.

    inputs: x_TD of the queries, of the keys and of the values.
    """
    assert ('value_embedding' in weights) == has_table(number, model)
    if row.made and number in row.made:
        return attention_to_first(weights, inputs[0], row, window, number, model), None
    query_TNH, key_TKH = (
        linear(x_TD, weights[name]) for x_TD, name in zip(inputs, ('query', 'key'), strict=False)
    )

    def turned(x_TNH, norm):
        return rope(qk_norm(x_TNH, weights, norm, model), row.positions_T, model)

    q_TNH, k_TKH = turned(query_TNH, 'query_norm'), turned(key_TKH, 'key_norm')
    value_TKH = mixed_values(weights, inputs[2], q_TNH, k_TKH, visible, row, number, model)
    if row.made is not None:
        row.made[number] = (row, k_TKH, value_TKH)
    if model.depth.stream != 'moda':
        visible = []
    if model.depth.slot_keys == 'unrotated':
        visible = [(qk_norm(key, weights, 'key_norm', model), *rest) for key, *rest in visible]
    num_tokens, num_heads, _ = q_TNH.shape
    mixed_TNH = np.zeros_like(q_TNH)
    for t in range(num_tokens):
        seen = [s for s in range(t + 1) if sees(t, s, row, window)]
        for n in range(num_heads):
            group = n // (num_heads // model.num_kv_heads)
            depth_keys, depth_values = slots_of(visible, t, n, num_heads)
            keys = [k_TKH[s, group] for s in seen] + depth_keys
            values = [value_TKH[s, group] for s in seen] + depth_values
            mixed_TNH[t, n] = one_query(q_TNH[t, n], keys, values)
    y_TD = np.einsum('tnh,nhd->td', mixed_TNH, weights['out']['kernel'])
    slot = (k_TKH, value_TKH, np.ones(num_tokens, bool))
    return y_TD + weights['out'].get('bias', 0), slot


def attention_to_first(weights, x_TD, row, window, number, model):
    """Return y_TD of a row's queries to all keys that the block made in the first loop."""
    of_keys, k_SKH, value_SKH = row.made[number]
    q_TNH = qk_norm(linear(x_TD, weights['query']), weights, 'query_norm', model)
    q_TNH = rope(q_TNH, row.positions_T, model)
    mixed_TNH, size = np.zeros_like(q_TNH), model.num_heads // model.num_kv_heads
    for t, n in np.ndindex(q_TNH.shape[:2]):
        seen = []
        for s, segment in enumerate(of_keys.segments_T):
            distance = row.positions_T[t] - of_keys.positions_T[s]
            near = not window or distance < window
            if segment == row.segments_T[t] and distance >= 0 and near:
                seen.append(s)
        keys, values = ([side[s, n // size] for s in seen] for side in (k_SKH, value_SKH))
        mixed_TNH[t, n] = one_query(q_TNH[t, n], keys, values)
    y_TD = np.einsum('tnh,nhd->td', mixed_TNH, weights['out']['kernel'])
    return y_TD + weights['out'].get('bias', 0)


def sees(t, s, row, window):
    """Return whether token t sees the earlier token s; window 0 is no limit."""
    near = not window or 0 <= row.positions_T[t] - row.positions_T[s] < window
    return row.segments_T[t] == row.segments_T[s] and near


def slots_of(slots, t, n, num_heads):
    """Return the lists of keys and of values that head n of token t finds in the slots."""
    own = [(key[t], value[t]) for key, value, valid_T in slots if valid_T[t]]
    keys = [key_KH[n * len(key_KH) // num_heads] for key_KH, _ in own]
    return keys, [value_KH[n * len(value_KH) // num_heads] for _, value_KH in own]


def one_query(query_H, keys, values):
    """Return softmax(query . keys H^-1/2) values, an H vector, for one query and one head."""
    scores_S = np.array([query_H @ key_H for key_H in keys]) / np.sqrt(len(query_H))
    weights_S = np.exp(scores_S - scores_S.real.max())
    weights_S = weights_S / weights_S.sum()
    return sum(weight * value_H for weight, value_H in zip(weights_S, values, strict=True))


def qk_norm(x_TNH, weights, name, model):
    """Return x_TNH (queries or keys) normed over each head, over all heads at once, or not."""
    if model.qk_norm == 'none':
        return x_TNH
    if model.qk_norm == 'head':
        return rms_norm(x_TNH, weights[name], model)
    return rms_norm(x_TNH.reshape(len(x_TNH), -1), weights[name], model).reshape(x_TNH.shape)


def rope(x_TNH, positions_T, model):
    """Return x_TNH with each pair (i, i + H/2) rotated by position times `frequency`."""
    half = x_TNH.shape[-1] // 2
    frequencies = [frequency(model.rope_theta ** (-i / half), model) for i in range(half)]
    turned = np.array(x_TNH)
    for t, position in enumerate(positions_T):
        for i in range(half):
            angle = position * frequencies[i]
            first_N, second_N = x_TNH[t, :, i], x_TNH[t, :, i + half]
            turned[t, :, i] = first_N * np.cos(angle) - second_N * np.sin(angle)
            turned[t, :, i + half] = second_N * np.cos(angle) + first_N * np.sin(angle)
    return turned


def frequency(plain, model):
    """Return a rotary frequency as Llama 3.1 lowers it, by its wavelength in tokens."""
    if model.rope_scaling == 'none':
        return plain
    factor, low, high, length = map(float, model.rope_scaling.removeprefix('llama3:').split(':'))
    wavelength = 2 * np.pi / plain
    if wavelength > length / low:  # too slow to turn `low` times
        return plain / factor
    if wavelength < length / high:
        return plain
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * plain / factor + smooth * plain


def mlp(weights, x_TD):
    """Return w2(silu(w1 x) * w3 x) for x_TD."""
    gate_TF, up_TF = linear(x_TD, weights['w1']), linear(x_TD, weights['w3'])
    return linear(gate_TF / (1 + np.exp(-gate_TF)) * up_TF, weights['w2'])


def linear(x_TD, weights):
    """Return x_TD times a kernel of any rank, over its first axis, plus a bias if there is one."""
    return np.tensordot(x_TD, weights['kernel'], axes=1) + weights.get('bias', 0)


def rms_norm(x, weights, model):
    """Return x / sqrt(mean(x^2) + epsilon) times the scale, over the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + model.norm_eps) * weights['scale']


def mixture(weights, x_TD, row, number, experts):
    """Return y_TD, shared plus weighted routed experts, and record the real tokens as seen."""
    logits_TZ, real_T = x_TD @ weights['router']['kernel'], row.segments_T != 0
    if experts.scores == 'sigmoid':
        scores_TZ = 1 / (1 + np.exp(-logits_TZ))
    else:
        scores_TZ = np.exp(logits_TZ - logits_TZ.real.max(axis=-1, keepdims=True))
        scores_TZ = scores_TZ / scores_TZ.sum(axis=-1, keepdims=True)
    chosen_TZ = choose(scores_TZ.real, real_T, experts, row.run.expert_thresholds.get(number))
    weights_TZ = np.where(chosen_TZ, scores_TZ, 0)
    if experts.choice == 'token' and experts.scores == 'sigmoid':
        weights_TZ[real_T] = weights_TZ[real_T] / weights_TZ[real_T].sum(axis=-1, keepdims=True)
    computed_TZ = chosen_TZ
    if experts.row_capacity:  # an expert computes the first tokens of a row that chose it
        computed_TZ = chosen_TZ & (np.cumsum(chosen_TZ, axis=0) <= experts.row_capacity)
    every = [
        {name: {'kernel': weights[name]['kernel'][e]} for name in ('w1', 'w3', 'w2')}
        for e in range(experts.num_routed)
    ]
    y_TD = mlp(weights['shared'], x_TD) if 'shared' in weights else 0 * mlp(every[0], x_TD)
    for t, e in np.argwhere(computed_TZ[:, : experts.num_routed]):
        y_TD[t] = y_TD[t] + experts.route_scale * weights_TZ[t, e] * mlp(every[e], x_TD[t])
    seen = row.run.seen.setdefault(number, Seen())
    seen.logits.extend(logits_TZ[real_T])
    seen.scores.extend(scores_TZ[real_T])
    seen.chosen.extend(chosen_TZ[real_T])
    return y_TD


def choose(scores_TZ, real_T, experts, thresholds_Z):
    """Return bool chosen_TZ of one row: whether token and expert belong together; no padding."""
    num_tokens, num_all = scores_TZ.shape
    chosen_TZ = np.zeros((num_tokens, num_all), bool)
    if experts.choice == 'token':
        for t in np.flatnonzero(real_T):
            chosen_TZ[t, largest(scores_TZ[t], range(num_all), experts.top_k)] = True
        return chosen_TZ
    if thresholds_Z is not None:
        return (scores_TZ > thresholds_Z) & real_T[:, None]
    size = max(1, experts.top_k * num_tokens // experts.num_routed)
    for z in range(num_all):
        chosen_TZ[largest(scores_TZ[:, z], np.flatnonzero(real_T), size), z] = True
    return chosen_TZ


def largest(values, among, size):
    """Return the indices of the `size` largest values of those `among`; ties go to the lower."""
    return sorted(among, key=lambda i: (-values[i], i))[:size]


def cross_entropy(logits_BTV, labels_BT, segment_ids_BT):
    """Return the mean over targets in nats; labels of -100 and padding do not count."""
    targets = np.argwhere((labels_BT != -100) & (segment_ids_BT != 0))
    losses = [log_sum_exp(logits_BTV[b, t]) - logits_BTV[b, t, labels_BT[b, t]] for b, t in targets]
    return sum(losses) / len(losses)


def balance_loss(seen, top_k):
    """Return the mean over layers of sum_i f_i P_i, without alpha.

    f_i = Z count_i / (k n), and P_i is the mean score over the n tokens of all rows that a layer
    saw.
    """
    layers = []
    for layer in seen.values():
        chosen_nZ, scores_nZ = np.array(layer.chosen), np.array(layer.scores)
        num_tokens, num_all = chosen_nZ.shape
        load_Z = chosen_nZ.sum(axis=0) * num_all / (top_k * num_tokens)
        layers.append((load_Z * scores_nZ.mean(axis=0)).sum())
    return sum(layers) / len(layers)


def z_loss(seen):
    """Return the mean over layers of the mean over tokens of logsumexp(router logits)^2."""
    layers = [[log_sum_exp(logits_Z) ** 2 for logits_Z in layer.logits] for layer in seen.values()]
    return sum(sum(tokens) / len(tokens) for tokens in layers) / len(layers)


def rule_loss(choices, real_BT):
    """Return the mean over layers and real tokens of the rule's cross-entropy against top-C.

    Tokens for which a routed loop has no choice add 0.
    """
    layers = []
    for rows in choices.values():
        logits_BT, top_c_BT = (stack(rows, name) for name in ('rule_logits_BT', 'top_c_BT'))
        free_BT = np.abs(logits_BT) < 1e8  # not all tokens of a routed loop can be chosen, or not
        logits_BT = np.where(free_BT, logits_BT, 0)
        losses_BT = np.log(1 + np.exp(-logits_BT)) + np.where(top_c_BT, 0, logits_BT)
        losses_BT = np.where(free_BT, losses_BT, 0)
        layers.append(losses_BT[real_BT].mean())
    return sum(layers) / len(layers)


def stack(rows, name):
    """Return one entry of the rows of a layer, [B, T]."""
    return np.stack([row[name] for row in rows])


def assert_gradients(gradients, loss, params, tolerance, rng):
    """Assert that the slope of `loss` along a random direction of every leaf is that gradient."""
    for path, found in jax.tree_util.tree_leaves_with_path(gradients):
        along = rng.normal(size=found.shape)

        def step(at, leaf, path=path, along=along):
            return leaf + 1e-100j * along if at == path else leaf + 0j

        slope = loss(jax.tree_util.tree_map_with_path(step, params)).imag / 1e-100
        # If the gradient is zero up to rounding, use the size of the others.
        most = max(np.linalg.norm(found), 1e-2) * np.linalg.norm(along) / along.size**0.5
        error = np.abs(np.sum(found * along) - slope)
        assert error <= tolerance * most, (jax.tree_util.keystr(path), error / most)


def log_sum_exp(x):
    """Return log(sum(exp(x))) of a vector."""
    high = x.real.max()
    return high + np.log(np.exp(x - high).sum())
