"""What each benchmark of launch.bench runs, by its flags; they yield results and their tables."""

import sys

from absl import flags

from moddepth_jax.benchmarks import models as bench_models

SIZE = flags.DEFINE_string(
    'size',
    None,
    'Shape of the models, LAYERSxWIDTH. Default: 6x256 for step, 12x512 for decode, 16x128 for '
    'depth, whose layers are those of the comparison with FLOPs. 124m and 700m are large ones, for '
    'depth and step --variants.',
)
VARIANTS = flags.DEFINE_list(
    'variants',
    None,
    'Models to compare: dense, mod, moda, both, moe, mode (staged and integrated), staged, '
    'integrated (step).',
)
DTYPE = flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16'],
    'Of activations (depth, experts, step --variants: float32), of all arrays (attention: '
    'bfloat16).',
)
ATTENTION = flags.DEFINE_string(
    'attention', None, 'model.attention of the models (depth, step --variants). Default: auto.'
)
LENGTHS = flags.DEFINE_list(
    'lengths',
    None,
    'Sequence lengths (step: default 512,2048, or what fits the size; depth: 128, each in its '
    'tables; attention).',
)
TOKENS = flags.DEFINE_integer(
    'tokens', None, 'Tokens of a batch (step). Default: 4096; more for 124m, 700m.', lower_bound=1
)
BATCHES = flags.DEFINE_list('batches', '1,8,16,64', 'Rows that decode together (decode).')
KV_HEADS = flags.DEFINE_list(
    'kv_heads',
    None,
    'Key/value heads, each in its tables (decode: default 8,2; depth: half of the query heads; '
    'step --variants, attention).',
)
CONTEXT = flags.DEFINE_integer('context', 2048, 'Tokens of the caches (decode).', lower_bound=64)
PROMPT = flags.DEFINE_integer('prompt', 1024, 'Tokens before the first (decode).', lower_bound=1)
DEPTHS = flags.DEFINE_list('depths', '8,16,32,64', 'Numbers of layers (depth).')
UNROLLED_UP_TO = flags.DEFINE_integer(
    'unrolled_up_to',
    16,
    'Most layers of the unrolled forms, a minute of compilation at 16 and growing (depth).',
    lower_bound=0,
)
RATIO_LENGTH = flags.DEFINE_integer(
    'ratio_length', 1024, 'Sequence length of the comparison with FLOPs (depth).', lower_bound=1
)
ROWS = flags.DEFINE_integer('rows', 4, 'Rows of a batch (depth).', lower_bound=1)
ROUTER = flags.DEFINE_enum(
    'router', 'none', ['none', 'learned'], 'learned: MoD, and MoD with MoDA, are compared (depth).'
)
REPEATS = flags.DEFINE_integer(
    'repeats', None, 'Rounds that are timed. Default: 11; decode 31, depth and experts 5.'
)
SHAPES = flags.DEFINE_list(
    'shapes',
    None,
    'TOKENSxWIDTHxEXPERT_WIDTHxEXPERTSxTOP_K, such as 1024x256x704x64x6 (experts).',
)
HEADS = flags.DEFINE_list('heads', None, 'Query heads (attention).')
WIDTHS = flags.DEFINE_list('widths', None, 'Widths of a head (attention).')
SLOTS = flags.DEFINE_list('slots', None, 'Depth slots of a token (attention).')
IMPLEMENTATIONS = flags.DEFINE_list(
    'implementations',
    None,
    'What is timed (attention). Default: all of ours, cudnn, pallas_triton, flash_attention_2.',
)
SECONDS = flags.DEFINE_float(
    'seconds', 300.0, 'After which no further shape is begun (attention).', lower_bound=0
)
PLOT = flags.DEFINE_string('plot', None, 'PNG for a picture of the results (attention).')


def print_table(title, heads, lines, width=None):
    """Prints one table; `width` None: that of the terminal."""
    import rich.console
    import rich.table

    table = rich.table.Table(title=title)
    table.add_column(heads[0])
    for head in heads[1:]:
        table.add_column(head, justify='right')
    for name, cells in lines.items():
        table.add_row(name, *cells)
    rich.console.Console(width=width).print(table)


def _numbers(flag, default=None, least=1):
    values = default if flag.value is None else flag.value
    if not values or not all(str(value).isdecimal() and int(value) >= least for value in values):
        raise ValueError(f'--{flag.name}={",".join(values)}: must be numbers such as 8,2')
    return [int(value) for value in values]


def _repeats(default):
    if REPEATS.value is not None and REPEATS.value < 1:
        raise ValueError(f'--repeats={REPEATS.value}: must be 1 or more')
    return REPEATS.value or default


def _names(flag, known):
    for name in flag.value:
        if name not in known:
            raise ValueError(f'--{flag.name}={name}: must be of {", ".join(known)}')
    return flag.value


def step():
    """Yields (result, *tables) of training steps."""
    size = SIZE.value or '6x256'
    if VARIANTS.value is not None:
        yield from _variants(size)
        return
    for flag in (DTYPE, ATTENTION, KV_HEADS):
        if flag.present:
            raise ValueError(f'--{flag.name}: needs --variants; by hand there is but one form')
    if size in bench_models.NAMED:
        raise ValueError(f'--size={size}: needs --variants, such as --variants=dense,mod')
    from moddepth_jax.benchmarks.bench_step import bench_step
    from moddepth_jax.benchmarks.tables import step_table

    pair = bench_models.dense_and_routed(size)
    lengths, tokens = _numbers(LENGTHS, [512, 2048]), TOKENS.value or 4096
    result = bench_step(*pair, lengths, tokens, _repeats(11))
    yield result, step_table(result, size)


def _variants(size):
    lengths, tokens = bench_models.NAMED.get(size, ([512, 2048], 4096))
    lengths, tokens = _numbers(LENGTHS, lengths), TOKENS.value or tokens
    together = bench_models.TOGETHER
    names = _names(VARIANTS, (*bench_models.VARIANTS, *together))
    names = [name for given in names for name in together.get(given, (given,))]
    if names[:1] != ['dense']:
        raise ValueError(
            f'--variants={",".join(VARIANTS.value)}: must begin with dense, as in dense,mod'
        )
    knobs = {'dtype': DTYPE.value, 'attention': ATTENTION.value}
    counts = [None] if KV_HEADS.value is None else _numbers(KV_HEADS)
    compared = []
    for kv_heads in counts:
        for length in lengths:
            if tokens % length:
                raise ValueError(f'--tokens={tokens}: must be a multiple of the length {length}')
            shape = (size, length, tokens // length)
            knobs['num_kv_heads'] = kv_heads
            compared.append({name: bench_models.one_model(name, *shape, **knobs) for name in names})
    from moddepth_jax.benchmarks.steps import bench_models as run
    from moddepth_jax.benchmarks.tables import models_table

    for models in compared:
        result = run(models, _repeats(11))
        yield {'size': size} | result, models_table(result, size)


def decode():
    """Yields (result, table) of decoding steps, for each number of key/value heads."""
    from moddepth_jax.benchmarks.decoding import SETTLE, bench_decode
    from moddepth_jax.benchmarks.tables import decode_table

    size, context = SIZE.value or '12x512', CONTEXT.value
    counts, batches, repeats = _numbers(KV_HEADS, [8, 2]), _numbers(BATCHES), _repeats(31)
    if PROMPT.value > context:
        raise ValueError(f'--prompt={PROMPT.value}: must be --context={context} or less')
    if repeats + SETTLE > context // 2:
        right = f'must be at most {context // 2 - SETTLE} at --context={context}'
        raise ValueError(f'--repeats={repeats}: {right}, or caches would be far from full')
    pairs = [
        list(bench_models.dense_and_routed(size, kv_heads, 'random', context))
        for kv_heads in counts
    ]
    for kv_heads, models in zip(counts, pairs, strict=True):
        result = bench_decode(*models, batches, PROMPT.value, repeats)
        yield {'kv_heads': kv_heads} | result, decode_table(result, size, kv_heads, context)


def depth():
    """Yields (result, *tables) of training steps by depth."""
    import jax

    from moddepth_jax.benchmarks.depth import bench_cost, bench_depth
    from moddepth_jax.benchmarks.tables import TITLES, cost_table, depth_tables

    size, lengths, depths = SIZE.value or '16x128', _numbers(LENGTHS, [128]), _numbers(DEPTHS)
    counts, repeats = _numbers(KV_HEADS, [bench_models.grouped_heads(size)]), _repeats(5)
    kinds = ('mod', 'both') if ROUTER.value == 'learned' else ('dense', 'moda')
    names = {'dense': TITLES[kinds[0]], 'moda': TITLES[kinds[1]]}
    knobs = {'dtype': DTYPE.value, 'attention': ATTENTION.value}
    pairs = {
        (kv_heads, length): [
            bench_models.one_model(kind, size, length, ROWS.value, num_kv_heads=kv_heads, **knobs)
            for kind in kinds
        ]
        for kv_heads in counts
        for length in dict.fromkeys((RATIO_LENGTH.value, *lengths))
    }
    jax.config.update('jax_enable_compilation_cache', False)  # what is read from it is not timed
    width = pairs[counts[0], lengths[0]][0].model.d_model
    for kv_heads in counts:
        said = {'kv_heads': kv_heads, 'size': size, 'router': ROUTER.value}
        rest = f'width {width}, {kv_heads} key/value heads, {ROWS.value} rows of'
        result = bench_cost(*pairs[kv_heads, RATIO_LENGTH.value], repeats)
        title = f'train step, {result["depth"]} layers, {rest} {RATIO_LENGTH.value}'
        yield said | result, (title, *cost_table(result, names))
        for length in lengths:
            result = bench_depth(*pairs[kv_heads, length], depths, UNROLLED_UP_TO.value, repeats)
            tables = depth_tables(result, names)
            yield said | result, *[(f'{what}; {rest} {length}', *t) for what, *t in tables]


def experts():
    """Yields (result, table) of the grouped products of experts."""
    from moddepth_jax.benchmarks import experts as bench_experts

    shapes = bench_experts.SHAPES if SHAPES.value is None else _shapes(bench_experts.Shape)
    result = bench_experts.bench_experts(shapes, _repeats(5), DTYPE.value or 'float32')
    yield result, bench_experts.products_table(result)


def _shapes(kind):
    shapes = []
    for text in SHAPES.value or ['']:
        sizes = text.split('x')
        right = 'must be five numbers such as 1024x256x704x64x6, the last at most the one before'
        numbers = all(size.isdecimal() and int(size) for size in sizes)
        if len(sizes) != 5 or not numbers or int(sizes[4]) > int(sizes[3]):
            raise ValueError(f'--shapes={text}: {right}')
        shapes.append(kind(*map(int, sizes)))
    return shapes


def attention():
    """Yields (result, *tables) of attention over sequence and depth slots, as they come."""
    import jax

    from moddepth_jax.benchmarks import attention_cases, attention_forms, attention_report
    from moddepth_jax.benchmarks.bench_attention import bench_attention
    from moddepth_jax.benchmarks.timing import DeviceLostError

    known = (*attention_forms.RIVALS, *attention_forms.IMPLEMENTATIONS)
    names = list(known) if IMPLEMENTATIONS.value is None else _names(IMPLEMENTATIONS, known)
    toy = jax.default_backend() != 'gpu'
    cases = attention_cases.TOY_CASES if toy else attention_cases.GPU_CASES
    if DTYPE.value:
        cases = list(dict.fromkeys(case._replace(dtype=DTYPE.value) for case in cases))
    first = cases[0]
    sizes = {'length': LENGTHS, 'heads': HEADS, 'kv_heads': KV_HEADS}
    sizes |= {'width': WIDTHS, 'slots': SLOTS}
    if any(flag.present for flag in sizes.values()):
        values = [
            _numbers(flag, [getattr(first, name)], 0 if name == 'slots' else 1)
            for name, flag in sizes.items()
        ]
        cases = attention_cases.product(*values, first.dtype)
    results, width = [], None if sys.stdout.isatty() else 160
    try:
        for result in bench_attention(cases, names, SECONDS.value):
            results.append(result)
            timed = 'rows' in result
            yield result, *([(*attention_report.case_table(result), width)] if timed else [])
            for line in attention_report.failures(result) if len(results) > 1 else ():
                print(line, file=sys.stderr)
    except DeviceLostError as error:
        print(f'error: {error}; nothing more can run in this process', file=sys.stderr)
        sys.exit(1)
    if PLOT.value:
        attention_report.plot(results, PLOT.value)
    if results[0]['hopper']:
        aims = attention_report.targets(results)
        yield {'targets': aims[2]}, (*aims, width)
