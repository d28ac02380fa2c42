"""Every knob of the project, with its default. Experiments are this file plus their differences."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The dense transformer that every experiment starts from."""
    config = ConfigDict()
    config.seed = 0  # seeds parameters, shuffling and sampling
    config.flop_budget = 0.0  # counted training FLOPs of the run; 0: training.num_steps decides

    model = config.model = ConfigDict()
    model.vocab_size = 257  # at least the tokenizer's; 256 bytes and one separator
    model.num_layers = 6  # blocks, each with parameters of its own
    model.looped_layers = 'none'  # none | all | middle:FIRST:LAST (not that many at both ends)
    model.loops = 1  # times that the looped blocks run, with the same parameters each time
    model.loop_order = 'cycle'  # of blocks a, b looped twice: cycle (a b a b) | sequence (a a b b)
    model.loop_norms = 'shared'  # shared | own: scales of norms of a looped block for each loop
    model.loop_embeddings = 'none'  # none | learned: a vector added to the stream at each loop
    model.loop_exit_threshold = 0.0  # evaluation: relative change at which a token leaves; 0: off
    model.d_model = 128  # D, width of the residual stream
    model.d_ff = 384  # F, width of the SwiGLU mlp
    model.num_heads = 4  # N, query heads
    model.num_kv_heads = 4  # K, key/value heads; divides num_heads
    model.head_dim = 32  # H, even (RoPE rotates halves)
    model.norm_placement = 'pre'  # pre (Llama) | post (post-LN) | reordered (OLMo2)
    model.norm_eps = 1e-6  # epsilon of every RMSNorm
    model.qk_norm = 'none'  # none | head (over H) | full (over N H and K H)
    model.rope_theta = 10000.0  # base of the rotary frequencies
    model.rope_scaling = 'none'  # none | llama3:FACTOR:LOW:HIGH:LENGTH (8:1:4:8192 in Llama 3.1)
    model.use_bias = False  # biases on every projection of the blocks
    model.attention_bias = 'none'  # on those of attention alone: none | qkv (Qwen2) | qkvo
    model.tie_embeddings = False  # the head reads the embedding table
    # none | learned (two scalars a block start as in nanochat) | identity (they start at 1 and 0)
    model.embedding_residual = 'none'  # before each block x = r x + a x_0, x_0 the embedded tokens
    # none | alternate (each second layer, and the last) | all: v += 3 sigmoid(W x[:12]) VE[token]
    model.value_embeddings = 'none'  # layers whose attention adds a table's row to its values
    model.across_documents = False  # a token sees all earlier ones of its row, of any document
    model.windows = (0,)  # tokens seen by each layer, repeated over depth; 0: all earlier ones
    model.init_std = 0.02  # of every weight matrix, truncated at 3 sigma
    model.embedding_init_std = 0.02  # of the embedding; under post, reordered norms 1; tied D^-0.5
    model.scale_residual_init = True  # residual outputs start smaller by 1/sqrt(2 blocks)
    model.dtype = 'float32'  # float32 | bfloat16 | float64 (with JAX_ENABLE_X64=1); of activations
    model.attention = 'auto'  # auto | reference | xla | pallas | mosaic_gpu | mosaic_gpu_fused
    model.layer_loop = 'scan'  # scan (compile time free of depth) | unrolled; same parameters
    model.remat = 'block'  # block (backward recomputes each block, but its attention) | none

    depth = model.depth = ConfigDict()
    # residual | dense | average | attention | moda | value_residual | attention_residual |
    # hyper_connections | mudd | value_attention
    depth.stream = 'residual'  # what a layer reads of the earlier ones, and writes for later ones
    depth.slots = 'auto'  # moda: auto (attention+ffn) | attention | attention+ffn | block
    depth.attention_slot_projection = False  # moda: a matrix of its own for the attention slot
    depth.slot_keys = 'auto'  # moda: auto (rotated) | rotated | unrotated (the authors' code)
    depth.skipped_slots = 'auto'  # moda with routed blocks: auto (projected) | projected | masked
    depth.slot_window = 0  # moda, attention: number of newest slots that are visible; 0: all
    depth.value_mix = 'auto'  # value_residual: auto (learned) | learned | fixed | sparse | shared
    depth.sparse_layers = 0  # value_residual, sparse: number of last layers that mix; 0: auto (3)
    depth.sublayers_per_source = 0  # attention_residual: outputs summed in a source; 0: 1, full
    depth.hyper_form = 'auto'  # hyper_connections: auto (dynamic) | dynamic | static | constrained
    depth.num_streams = 0  # hyper_connections: residual streams, each of width D; 0: 4
    depth.mudd_ways = 'auto'  # mudd: auto (qkvr) | one | one or two of q, k, v, r with own ways
    depth.mudd_weights = 'auto'  # mudd: auto (dynamic, by token) | dynamic | static
    depth.value_stride = 0  # value_attention: each n-th layer is a source; 0: L / 2
    depth.recent_layers = 0  # value_attention: number of newest layers that are sources too
    depth.gradient_dtype = 'float32'  # float32 (or wider) | model: sums of slots' gradients

    experts = model.experts = ConfigDict()
    experts.choice = 'none'  # none (the mlp is one SwiGLU) | token | expert: who chooses whom
    experts.layers = 'every:1'  # layers whose mlp is experts, as routing.layers; others have d_ff
    experts.num_routed = 8  # E, experts of which each token uses some
    experts.num_shared = 1  # experts that every token uses: one SwiGLU, so many times d_ff wide
    experts.num_noop = 0  # token: no-op experts, which cost nothing (integrated MoDE)
    experts.top_k = 2  # k, routed experts of a token; expert: on average
    experts.d_ff = 128  # F_e, width of one expert
    experts.scores = 'softmax'  # softmax (weights as scored) | sigmoid (renormalised over k)
    experts.route_scale = 1.0  # factor on what the routed experts add
    experts.row_capacity = 0  # token: most tokens of a row for an expert, first come; 0: no limit
    experts.balance_weight = 0.001  # token: of the loss that balances the experts' loads
    experts.z_loss = 0.0  # of the mean squared log-partition of the experts' scores
    experts.threshold_decay = 0.99  # expert: per step, of the average of the lowest selected score
    experts.product = 'auto'  # auto | blocked | batched | ragged_dot: tokens times their matrices

    routing = model.routing = ConfigDict()
    # none (dense model) | learned | norm | random | position | straight_through | token_choice
    routing.router = 'none'  # what scores the tokens of the routed blocks
    # every:N, from layer N-1 on | middle:FIRST:LAST | 1,3,5 | loops: those of model.looped_layers
    routing.layers = 'every:2'  # blocks that are routed, or loops (Mixture-of-Recursions)
    # block | attention: the mlp runs on all tokens | mlp: attention runs on all tokens
    routing.part = 'block'  # part of a routed block that runs on the selected tokens alone
    routing.capacity = 0.125  # share of a sequence's tokens that a routed block, or loop, selects
    routing.capacity_form = 'fraction'  # fraction | log_length: falls with ln T, from 1 to capacity
    routing.log_length_max = 2048  # length at which log_length comes down to capacity
    routing.capacity_stages = ''  # 1:0.2,0.5:0.3: capacity 1 for a fifth of the steps, then 0.5, ..
    routing.select_per = 'row'  # row: packed documents compete for the C places | segment
    routing.gate = 'auto'  # auto (learned: raw) | raw | sigmoid | tanh | none | straight_through
    routing.gate_scale = 1.0  # factor on the gate
    # loops: auto (output) | output: x + g f(x) | change: x + g (f(x) - x); by token choice, of the
    # stream x_1 before them: auto (gated_loops) | gated_loops: g f(x), at the last + x_1 |
    # gated_exit: f(x), at the last x_1 + g f(x)
    routing.loop_update = 'auto'  # what a routed loop adds, of its blocks f and its gate g
    # own: each loop makes keys and values, of the tokens that it selects | first: the first loop
    # makes those of all tokens, and later loops make queries alone
    routing.loop_keys = 'own'  # loops: what the attention of a routed loop reads
    routing.initial_gate = 1.0  # mean raw gate of selected tokens at step 0 (less above C/T 0.7)
    # auto | predictor | aux_loss | threshold | positive (score > 0, untrained) | dense
    routing.causal_rule = 'auto'  # what selects tokens at evaluation
    routing.predictor_width = 32  # hidden units of the predictor, at most 64; 0: linear
    routing.predictor_loss_weight = 1.0  # of its cross-entropy, which trains nothing else
    routing.aux_loss_weight = 0.01  # of the router's loss under aux_loss; trains the trunk too
    routing.balance_weight = 0.1  # token_choice: of the loss that balances the tokens by last loop
    routing.z_loss = 1e-5  # token_choice: of the mean squared log-partition of the scores
    routing.threshold_decay = 0.99  # per step, of the moving average of the C-th largest score
    routing.train_rule = 'top_c'  # top_c | threshold: selects tokens in training, after the warm-up
    routing.threshold_warmup = 0.2  # share of the steps with top_c before train_rule threshold
    routing.cache_capacity = 1.5  # most tokens of a row that a causal rule selects, over C
    routing.overflow = 'skip'  # tokens beyond: skip (they are dropped) | grow (caches double)

    adapters = model.adapters = ConfigDict()
    adapters.rank = 0  # r, of the adapters W + (alpha / r) A B (LoRA) of some matrices W; 0: none
    adapters.alpha = 16.0  # over r the factor on A B, which starts at 0
    adapters.params = ('*/attention/*', '*/mlp/*')  # globs of names of matrices of the stack

    data = config.data = ConfigDict()
    # stdlib | python_environment | synthetic | recall | a glob of text files, as launch.prepare
    # reads them | the folder that launch.prepare wrote | mixture
    data.source = 'stdlib'  # where the text comes from
    data.mixture = ''  # of prepared folders, by shares of the rows: data/web:0.7,data/code:0.3
    data.text_field = 'text'  # field or column of .jsonl and .parquet that holds the text
    data.encoding = 'utf-8'  # of files of plain text; any that Python knows, as latin-1, utf-16
    data.tokenizer = 'bytes'  # bytes | prepared (that of the prepared text) | a tokenizer's file
    data.sequence_length = 256  # T, tokens a row
    data.batch_size = 16  # B, rows a step over all devices
    data.held_out_fraction = 0.05  # of the documents, chosen by the hash of their path
    data.log_windows = False  # write the windows of each step to windows-PROCESS.jsonl

    optimizer = config.optimizer = ConfigDict()
    optimizer.name = 'adamw'  # adamw | lion | muon (matrices of the blocks; Adam for the rest)
    optimizer.learning_rate = 3e-3  # peak, reached after the warm-up
    optimizer.schedule = 'cosine'  # after the warm-up: cosine | wsd (flat, then linear) | constant
    optimizer.decay_fraction = 0.2  # of the steps after the warm-up, in which wsd decays
    optimizer.final_fraction = 0.1  # of the peak, at the last step of cosine and wsd
    optimizer.warmup_fraction = 0.03  # of the steps, linear from 0
    optimizer.b1 = 0.9  # decay of the gradient's mean
    optimizer.b2 = 0.98  # decay of the gradient's square (lion: of its mean)
    optimizer.eps = 1e-8  # added to the root
    optimizer.weight_decay = 0.1  # on matrices only
    optimizer.decay_embeddings = True  # so does the embedding, tied or not; never under muon
    optimizer.trainable = ('*',)  # globs of names such as '*/router/*'; other parameters are frozen
    optimizer.rate_factors = ()  # GLOB:FACTOR of the rate and the decay; the first that fits
    optimizer.clip_norm = 1.0  # of the gradient's norm, the predictor's apart; 0: no clipping
    optimizer.z_loss = 1e-4  # weight of the mean squared log-partition of the logits

    training = config.training = ConfigDict()
    training.num_steps = 0  # steps of the run where flop_budget is 0
    training.extended_from = 0  # steps before an extension, of which warm-up and stages are shares
    training.loops = ()  # counts of which each step draws the loops of its model; (): model.loops
    training.accumulate_steps = 1  # micro-batches summed into one step; divides data.batch_size
    training.log_every = 10  # steps between rows of metrics
    training.checkpoint_every = 200  # steps between checkpoints; the last step is always saved
    training.keep_checkpoints = 2  # newest ones kept
    training.max_nan_steps = 5  # non-finite steps in a row that end the run; each is skipped
    training.max_unsharded = 0.1  # share of parameters that fsdp and tensor may leave unsharded
    training.loss_chunk = 0  # most tokens of a device with logits at once; 0: what fits 256 MiB
    training.distill_from = ''  # work directory of a run whose next-token distributions to learn
    training.distill_weight = 0.5  # w: the loss is (1 - w) nll + w T^2 KL(teacher || model)
    training.distill_temperature = 1.0  # T, which divides the logits of both
    training.compilation_cache = True  # keep compiled programs under the user's cache directory

    evaluation = config.evaluation = ConfigDict()
    evaluation.every = 200  # steps between evaluations during training; 0: only at the end
    evaluation.num_batches = 8  # held-out batches of each of them
    evaluation.final_batches = 64  # held-out batches of the last one, or all if fewer

    report = config.report = ConfigDict()
    report.prompt = 'def '  # start of the text that a finished run generates
    report.sample_tokens = 200  # length of that text; prompt and sample fit the sequence length
    report.temperature = 0.8  # of its sampling; 0: the most likely token
    report.top_p = 1.0  # probability kept by its nucleus; 1: every token may come
    report.heatmap_tokens = 96  # held-out tokens across the routing heatmap
    return config
