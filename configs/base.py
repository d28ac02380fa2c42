"""Every knob of the project with its default. An experiment is this file plus its differences."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Return the dense transformer that every experiment starts from."""
    config = ConfigDict()
    config.seed = 0  # seed of the parameters, the shuffling and the sampling
    config.flop_budget = 0.0  # training FLOPs of the run, by formula; 0: use training.num_steps

    model = config.model = ConfigDict()
    model.vocab_size = 257  # at least that of the tokenizer; 257: all bytes and a separator
    model.num_layers = 6  # blocks with their own parameters; a looped block counts once
    model.looped_layers = 'none'  # none | all | middle:FIRST:LAST: all but so many at each end
    model.loops = 1  # how often the looped blocks run, each time with the same parameters
    model.loop_order = 'cycle'  # two loops of blocks a, b: cycle (a b a b) | sequence (a a b b)
    model.loop_norms = 'shared'  # scales of the norms in looped blocks: shared | own (by loop)
    model.loop_embeddings = 'none'  # none | learned: a vector for each loop, added to the stream
    model.loop_exit_threshold = 0.0  # evaluation: relative change below which a token exits; 0: off
    model.d_model = 128  # D, hidden size: width of the residual stream
    model.d_ff = 384  # F, width of the SwiGLU mlp
    model.num_heads = 4  # N, query heads
    model.num_kv_heads = 4  # K, key/value heads; divides num_heads
    model.head_dim = 32  # H, even (RoPE rotates halves)
    model.norm_placement = 'pre'  # pre (Llama) | post (post-LN) | reordered (OLMo2)
    model.norm_eps = 1e-6  # epsilon of every RMSNorm
    model.qk_norm = 'none'  # none | head (over H) | full (over N H and K H)
    model.rope_theta = 10000.0  # base of the rotary frequencies
    model.rope_scaling = 'none'  # none | llama3:FACTOR:LOW:HIGH:LENGTH (8:1:4:8192 in Llama 3.1)
    model.use_bias = False  # whether every projection of a block has a bias
    model.attention_bias = 'none'  # biases in attention only: none | qkv (Qwen2) | qkvo
    model.tie_embeddings = False  # whether the head uses the embedding table
    # none | learned (scalars start as in nanochat) | identity (r starts at 1 and a at 0)
    model.embedding_residual = 'none'  # before each block: x = r x + a x_0, x_0 the embedded tokens
    # none | alternate (every second layer, counted from the last) | all
    model.value_embeddings = 'none'  # layers with v += 3 sigmoid(W x[:12]) VE[token], VE a table
    model.across_documents = False  # whether attention crosses the documents packed in a row
    model.windows = (0,)  # attention windows in tokens, cycled over the layers; 0: no limit
    model.init_std = 0.02  # initial std of every weight matrix, truncated at 3 sigma
    model.embedding_init_std = 0.02  # same of the embedding; post or reordered: 1; tied: D^-0.5
    model.scale_residual_init = True  # divide the init of residual outputs by sqrt(2 blocks)
    model.dtype = 'float32'  # of activations: float32 | bfloat16 | float64 (JAX_ENABLE_X64=1)
    model.attention = 'auto'  # auto | reference | xla | pallas | mosaic_gpu | mosaic_gpu_fused
    model.layer_loop = 'scan'  # scan (compile time independent of depth) | unrolled
    # block (all but the attention output) | elementwise (all but that and matrix products) | none
    model.remat = 'elementwise'  # what the backward pass recomputes, to save memory

    depth = model.depth = ConfigDict()
    # residual | dense | average | attention | moda | value_residual | attention_residual |
    # hyper_connections | mudd | value_attention
    depth.stream = 'residual'  # what a layer reads from earlier layers and writes for later ones
    depth.slots = 'auto'  # moda: auto (attention+ffn) | attention | attention+ffn | block
    depth.attention_slot_projection = False  # moda: a separate projection for the attention slot
    depth.slot_keys = 'auto'  # moda: auto (rotated) | rotated | unrotated (the authors' code)
    depth.skipped_slots = 'auto'  # moda with routed blocks: auto (projected) | projected | masked
    depth.slot_window = 0  # moda, attention: how many of the newest slots are visible; 0: all
    depth.value_mix = 'auto'  # value_residual: auto (learned) | learned | fixed | sparse | shared
    depth.sparse_layers = 0  # value_residual, sparse: how many of the last layers mix; 0: 3
    depth.sublayers_per_source = 0  # attention_residual: sublayer outputs a source sums; 0: 1
    depth.hyper_form = 'auto'  # hyper_connections: auto (dynamic) | dynamic | static | constrained
    depth.num_streams = 0  # hyper_connections: number of residual streams of width D; 0: 4
    # auto (qkvr) | one | one or two letters: these readers get their own way, the others share one
    depth.mudd_ways = 'auto'  # mudd: which of the readers q, k, v, r have their own mixture
    depth.mudd_weights = 'auto'  # mudd: auto (dynamic) | dynamic (depend on the token) | static
    depth.value_stride = 0  # value_attention: every n-th layer is a source; 0: n = L / 2
    depth.recent_layers = 0  # value_attention: how many of the newest layers are sources as well
    depth.gradient_dtype = 'float32'  # sums of slot gradients: float32 (or wider) | model

    experts = model.experts = ConfigDict()
    # none (the mlp is one SwiGLU) | token (tokens choose experts) | expert (experts choose tokens)
    experts.choice = 'none'  # whether there are experts, and which side chooses
    experts.layers = 'every:1'  # layers with experts, as routing.layers; the others have an mlp
    experts.num_routed = 8  # E, routed experts of a layer
    experts.num_shared = 1  # experts that every token uses: one SwiGLU, num_shared x d_ff wide
    experts.num_noop = 0  # token: no-op experts, which cost nothing (integrated MoDE)
    experts.top_k = 2  # k, routed experts of a token (expert: on average)
    experts.d_ff = 128  # F_e, width of one expert
    experts.scores = 'softmax'  # softmax (scores are weights) | sigmoid (normalized over the k)
    experts.route_scale = 1.0  # factor on the output of the routed experts
    experts.row_capacity = 0  # token: most tokens of a row an expert takes, first come; 0: all
    experts.balance_weight = 0.001  # token: weight of the loss that balances the experts' loads
    experts.z_loss = 0.0  # weight of the mean squared log-partition of the experts' scores
    experts.threshold_decay = 0.99  # expert: decay, per step, of the average lowest selected score
    experts.product = 'auto'  # grouped matmul: auto | blocked | batched | ragged_dot

    routing = model.routing = ConfigDict()
    # none (dense model) | learned | norm | random | position | straight_through | token_choice
    routing.router = 'none'  # how the tokens of a routed block are scored
    # every:N (from layer N-1 on) | middle:FIRST:LAST | 1,3,5 | loops (those of looped_layers)
    routing.layers = 'every:2'  # which blocks are routed, or the loops (Mixture-of-Recursions)
    # block | attention (the mlp runs on all tokens) | mlp (attention runs on all tokens)
    routing.part = 'block'  # the part of a routed block that runs on the selected tokens only
    routing.capacity = 0.125  # C / T: share of a row's tokens that a routed block or loop selects
    routing.capacity_form = 'fraction'  # fraction | log_length: falls with ln T, from 1 to capacity
    routing.log_length_max = 2048  # log_length: the length at which the share reaches capacity
    routing.capacity_stages = ''  # 1:0.2,0.5:0.3: 1 in 20% of the steps, 0.5 in 30%, then capacity
    routing.select_per = 'row'  # who competes for the C places: row (the whole row) | segment
    # auto (learned: raw, or sigmoid for loops) | raw | sigmoid | tanh | none | straight_through
    routing.gate = 'auto'  # function of the score, a factor on what a routed block or loop adds
    routing.gate_scale = 1.0  # factor on the gate
    # auto (output) | output: x + g f(x) | change: x + g (f(x) - x); token choice, with x_1 the
    # stream before the loops: auto (gated_loops) | gated_loops: g f(x), plus x_1 in the last loop |
    # gated_exit: f(x), and x_1 + g f(x) in the last loop
    routing.loop_update = 'auto'  # loops: the new x of a routed loop with blocks f and gate g
    # own: each loop makes keys and values of the tokens that it selects | first: the first loop
    # makes those of all tokens, and later loops only make queries
    routing.loop_keys = 'own'  # loops: the keys and values that a routed loop attends to
    # less above C/T 0.7; with loops, that of the last one: the first selects all tokens and has 0
    routing.initial_gate = 1.0  # mean raw gate of selected tokens at step 0
    # auto | predictor | aux_loss | threshold | positive (score > 0, untrained) | dense
    routing.causal_rule = 'auto'  # how tokens are selected in evaluation and generation
    routing.predictor_width = 32  # hidden units of the predictor, at most 64; 0: linear
    routing.predictor_loss_weight = 1.0  # weight of its cross-entropy, which trains nothing else
    routing.aux_loss_weight = 0.01  # aux_loss: weight of the router's loss; also trains the trunk
    routing.balance_weight = 0.1  # token_choice: weight of the loss that balances the last loops
    routing.z_loss = 1e-5  # token_choice: weight of the mean squared log-partition of the scores
    routing.threshold_decay = 0.99  # decay, per step, of the average C-th largest score
    routing.train_rule = 'top_c'  # selection in training, after the warm-up: top_c | threshold
    routing.threshold_warmup = 0.2  # share of the steps with top_c before train_rule threshold
    routing.cache_capacity = 1.5  # most tokens of a row that a causal rule selects, divided by C
    routing.overflow = 'skip'  # tokens beyond that: skip (dropped) | grow (the caches double)

    adapters = model.adapters = ConfigDict()
    adapters.rank = 0  # r of the LoRA adapters W + (alpha / r) A B; 0: no adapters
    adapters.alpha = 16.0  # divided by r, the factor on A B; B starts at 0
    adapters.params = ('*/attention/*', '*/mlp/*')  # which matrices of the stack, as globs of names

    data = config.data = ConfigDict()
    # stdlib | python_environment | synthetic | recall | a glob of text files in a format that
    # launch.prepare reads | a folder that launch.prepare wrote | mixture
    data.source = 'stdlib'  # where the text comes from
    data.mixture = ''  # prepared folders and their shares of the rows: data/web:0.7,data/code:0.3
    data.text_field = 'text'  # field of .jsonl, or column of .parquet, that holds the text
    data.encoding = 'utf-8'  # encoding of plain text files, such as latin-1 or utf-16
    data.tokenizer = 'bytes'  # bytes | prepared (that of the prepared text) | a tokenizer's file
    data.sequence_length = 256  # T, tokens per row
    data.batch_size = 16  # B, rows per step, over all devices
    data.held_out_fraction = 0.05  # share of held-out documents, chosen by the hash of their path
    data.log_windows = False  # write the windows of each step to windows-PROCESS.jsonl

    optimizer = config.optimizer = ConfigDict()
    optimizer.name = 'adamw'  # adamw | lion | muon (matrices of the blocks; Adam for the rest)
    optimizer.learning_rate = 3e-3  # peak, reached after the warm-up
    optimizer.schedule = 'cosine'  # after the warm-up: cosine | wsd (flat, then linear) | constant
    optimizer.decay_fraction = 0.2  # wsd: share of the steps after the warm-up with linear decay
    optimizer.final_fraction = 0.1  # cosine, wsd: last learning rate, as a share of the peak
    optimizer.warmup_fraction = 0.03  # share of the steps in which the rate rises linearly from 0
    optimizer.b1 = 0.9  # decay of the gradient's mean
    optimizer.b2 = 0.98  # decay of the gradient's square (lion: of its mean)
    optimizer.eps = 1e-8  # added to the root of the mean square
    optimizer.weight_decay = 0.1  # applies to matrices only
    optimizer.decay_embeddings = True  # whether it applies to the embedding; never under muon
    optimizer.trainable = ('*',)  # globs of names such as '*/router/*'; other parameters are frozen
    optimizer.rate_factors = ()  # GLOB:FACTOR on learning rate and decay; the first match counts
    optimizer.clip_norm = 1.0  # largest gradient norm, separately for the predictor; 0: no clipping
    optimizer.z_loss = 1e-4  # weight of the mean squared log-partition of the logits

    training = config.training = ConfigDict()
    training.num_steps = 0  # steps of the run if flop_budget is 0
    training.extended_from = 0  # steps before an extension; warm-up and stages are shares of these
    training.loops = ()  # loop counts from which each step draws one; (): always model.loops
    training.accumulate_steps = 1  # micro-batches per step; divides data.batch_size
    training.log_every = 10  # steps between rows of metrics
    training.checkpoint_every = 200  # steps between checkpoints; the last step is always saved
    training.keep_checkpoints = 2  # how many of the newest checkpoints are kept
    training.max_nan_steps = 5  # consecutive non-finite steps (all skipped) that end the run
    training.max_unsharded = 0.1  # share of parameters that fsdp and tensor may leave unsharded
    training.loss_chunk = 0  # most tokens per device with logits in memory; 0: what fits 256 MiB
    training.distill_from = ''  # work directory of the teacher's run; '': no distillation
    training.distill_weight = 0.5  # w in the loss (1 - w) nll + w T^2 KL(teacher || model)
    training.distill_temperature = 1.0  # T, which divides the logits of both
    training.compilation_cache = True  # keep compiled programs under the user's cache directory

    evaluation = config.evaluation = ConfigDict()
    evaluation.every = 200  # steps between evaluations during training; 0: only at the end
    evaluation.num_batches = 8  # held-out batches of such an evaluation
    evaluation.final_batches = 64  # held-out batches of the last evaluation; all if there are fewer

    report = config.report = ConfigDict()
    report.prompt = 'def '  # start of the text that a finished run generates
    report.sample_tokens = 200  # tokens to generate, fewer if the context ends; 0: no sample
    report.temperature = 0.8  # sampling temperature; 0: the most likely token
    report.top_p = 1.0  # probability mass of nucleus sampling; 1: all tokens
    report.heatmap_tokens = 96  # held-out tokens in the routing heatmap
    return config
