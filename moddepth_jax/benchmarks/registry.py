"""What launch.bench runs: each benchmark is one function, and its arguments are its flags.

A benchmark is a generator of (result, tables): the result, a dict of JSON values, is kept, and its
tables are printed, as soon as they are there. Its keyword arguments, with their types, defaults and
the texts of its docstring, become flags of launch.bench; a new benchmark is a new function here.
"""

import inspect
import re
import sys
from typing import Literal

from moddepth_jax.benchmarks import models

Dtype = Literal['float32', 'bfloat16']


def _check_names(flag, names, known):
    for name in names:
        if name not in known:
            raise ValueError(f'--{flag}={name}: must be one of {", ".join(known)}')


def step(
    *,
    size: str = '6x256',
    variants: list[str] | None = None,
    lengths: list[int] | None = None,
    tokens: int | None = None,
    kv_heads: list[int] | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
    repeats: int = 11,
):
    """One training step of the dense and the Mixture-of-Depths model at the same batch tokens.

    Each is timed in turn with the same mathematics written out by hand; with `variants`, those are
    timed in turn with the dense model.

    Args:
      size: LAYERSxWIDTH, 124m or 700m.
      variants: models, dense first: dense, mod, moda, both, moe, mode (staged and integrated),
        staged, integrated. Default: dense,mod.
      lengths: sequence lengths. Default: 512,2048, or what fits the size.
      tokens: of a batch. Default: 4096, or what fits the size.
      kv_heads: key/value heads, each in a table. Default: those of the size.
      dtype: of activations. Default: float32.
      attention: model.attention of the models. Default: auto.
      repeats: timed rounds.
    """
    if variants is None:
        for flag, value in {'dtype': dtype, 'attention': attention, 'kv_heads': kv_heads}.items():
            if value is not None:
                raise ValueError(f'--{flag}: needs --variants; by hand there is only one form')
        if size in models.NAMED_SIZES:
            raise ValueError(f'--size={size}: needs --variants, such as --variants=dense,mod')
    fitting = models.NAMED_SIZES.get(size, ([512, 2048], 4096))
    lengths, tokens = lengths or fitting[0], tokens or fitting[1]
    names = [n for given in variants or ['dense', 'mod'] for n in models.GROUPS.get(given, [given])]
    _check_names('variants', names, (*models.TITLES, *models.GROUPS))
    if names[0] != 'dense':
        right = 'must begin with dense, as in dense,mod'
        raise ValueError(f'--variants={",".join(variants)}: {right}')
    for length in lengths:
        if tokens % length:
            raise ValueError(f'--tokens={tokens}: must be a multiple of the length {length}')
    compared = [
        {
            name: models.make_model(
                name,
                size,
                length,
                tokens // length,
                num_kv_heads=heads,
                dtype=dtype,
                attention=attention,
            )
            for name in names
        }
        for heads in kv_heads or [None]
        for length in lengths
    ]
    from moddepth_jax.benchmarks.steps import compare_steps, steps_table

    for pair in compared:
        result = compare_steps(pair, repeats, by_hand=variants is None)
        shape = f'{size}, {result["batch"]} rows of {result["length"]}, {result["dtype"]}'
        title = f'train step, {shape}, attention {result["attention"]}'
        yield {'size': size} | result, [steps_table(title, result['rows'])]


def decode(
    *,
    size: str = '12x512',
    batches: list[int] = (1, 8, 16, 64),
    kv_heads: list[int] = (8, 2),
    context: int = 2048,
    prompt: int = 1024,
    repeats: int = 31,
):
    """One decoding step of the dense and the Mixture-of-Depths model, and the first token.

    Caches are nearly full; an eighth of the tokens passes every other block, by random routing.

    Args:
      size: LAYERSxWIDTH.
      batches: rows that decode together.
      kv_heads: key/value heads, each in a table.
      context: capacity of the caches, in tokens.
      prompt: tokens before the first token.
      repeats: timed rounds.
    """
    from moddepth_jax.benchmarks.decoding import WARMUP, bench_decoding, decoding_table

    if prompt > context:
        raise ValueError(f'--prompt={prompt}: must be --context={context} or less')
    if repeats + WARMUP > context // 2:
        right = f'must be at most {context // 2 - WARMUP} at --context={context}'
        raise ValueError(f'--repeats={repeats}: {right}, or caches would be far from full')
    pairs = [
        [
            models.make_model(name, size, context, 1, 'random', num_kv_heads=heads)
            for name in ('dense', 'mod')
        ]
        for heads in kv_heads
    ]
    for heads, (dense, mod) in zip(kv_heads, pairs, strict=True):
        result = bench_decoding(dense, mod, batches, prompt, repeats)
        title = f'decoding, {size}, {heads} key/value heads'
        yield {'kv_heads': heads} | result, [decoding_table(title, result, 'MoD')]


def depth(
    *,
    size: str = '16x128',
    depths: list[int] = (8, 16, 32, 64),
    lengths: list[int] = (128,),
    kv_heads: list[int] | None = None,
    dtype: Dtype | None = None,
    attention: str | None = None,
    unrolled_up_to: int = 16,
    ratio_length: int = 1024,
    rows: int = 4,
    router: Literal['none', 'learned'] = 'none',
    repeats: int = 5,
):
    """One training step of the dense and the MoDA model: time over FLOPs, then costs by depth.

    First at the size's own depth, with recomputation (model.remat block) and without; then memory,
    compile time and step time by depth, scanned and unrolled.

    Args:
      size: LAYERSxWIDTH, 124m or 700m; its layers are those of the comparison with FLOPs.
      depths: numbers of layers.
      lengths: sequence lengths of the comparison by depth, each in its own tables.
      kv_heads: key/value heads, each in its own tables. Default: half of the query heads.
      dtype: of activations. Default: float32.
      attention: model.attention of the models. Default: auto.
      unrolled_up_to: most layers of the unrolled forms, which compile for a minute at 16.
      ratio_length: sequence length of the comparison with FLOPs.
      rows: of a batch.
      router: learned: MoD is compared with MoD and MoDA.
      repeats: timed rounds.
    """
    kinds = ('mod', 'both') if router == 'learned' else ('dense', 'moda')
    compared = {
        (heads, length): {
            models.TITLES[kind]: models.make_model(
                kind, size, length, rows, num_kv_heads=heads, dtype=dtype, attention=attention
            )
            for kind in kinds
        }
        for heads in kv_heads or [models.grouped_heads(size)]
        for length in dict.fromkeys((ratio_length, *lengths))
    }
    import jax

    from moddepth_jax.benchmarks.steps import (
        compare_depths,
        compare_steps,
        depth_tables,
        steps_table,
        with_model,
    )

    jax.config.update('jax_enable_compilation_cache', False)  # what is read from it is not timed
    for heads in dict.fromkeys(heads for heads, _ in compared):
        facts = {'kv_heads': heads, 'size': size, 'router': router}
        for remat in ('block', 'none'):
            pair = compared[heads, ratio_length]
            pair = {name: with_model(hparams, remat=remat) for name, hparams in pair.items()}
            result = compare_steps(pair, repeats)
            shape = f'{heads} key/value heads, {rows} rows of {ratio_length}, remat {remat}'
            table = steps_table(f'train step, {size}, {shape}', result['rows'])
            yield facts | {'remat': remat} | result, [table]
        for length in lengths:
            pair = compared[heads, length]
            result = compare_depths(pair, depths, unrolled_up_to, repeats)
            width = next(iter(pair.values())).model.d_model
            shape = f'width {width}, {heads} key/value heads, {rows} rows of {length}'
            yield facts | result, depth_tables(result, shape)


def experts(*, shapes: list[str] | None = None, dtype: Dtype = 'float32', repeats: int = 5):
    """The routed experts of one layer by each grouped matmul, and all experts over all tokens.

    Forward and backward: time, memory, and what is executed over active FLOPs.

    Args:
      shapes: TOKENSxWIDTHxEXPERT_WIDTHxEXPERTSxTOP_K, such as 1024x256x704x64x6.
      dtype: of activations.
      repeats: timed rounds.
    """
    from moddepth_jax.benchmarks.experts import SHAPES, Shape, bench_experts, experts_tables

    chosen = [] if shapes is not None else SHAPES
    for text in shapes or ():
        sizes = text.split('x')
        numbers = all(size.isdecimal() and int(size) for size in sizes)
        if len(sizes) != 5 or not numbers or int(sizes[4]) > int(sizes[3]):
            right = 'five numbers such as 1024x256x704x64x6, the last at most the one before'
            raise ValueError(f'--shapes={text}: must be {right}')
        chosen.append(Shape(*map(int, sizes)))
    result = bench_experts(chosen, repeats, dtype)
    yield result, experts_tables(result)


def attention(
    *,
    implementations: list[str] | None = None,
    lengths: list[int] | None = None,
    heads: list[int] | None = None,
    kv_heads: list[int] | None = None,
    widths: list[int] | None = None,
    slots: list[int] | None = None,
    dtype: Dtype | None = None,
    seconds: int = 300,
    plot: str | None = None,
):
    """Every implementation of attention over sequence and depth slots, and plain attention.

    Each is compared with the equation before it is timed; on a GPU at the shapes of a large model,
    on a CPU at toy shapes, where kernels are interpreted.

    Args:
      implementations: what is timed. Default: ours, cudnn, pallas_triton, flash_attention_2.
      lengths: sequence lengths.
      heads: query heads.
      kv_heads: key/value heads.
      widths: of a head.
      slots: depth slots of a token.
      dtype: of all arrays. Default: bfloat16.
      seconds: after which no further shape is begun.
      plot: PNG for a picture of the results.
    """
    import jax

    from moddepth_jax.benchmarks import attention_cases, attention_forms, attention_report
    from moddepth_jax.benchmarks.attention import bench_attention

    known = (*attention_forms.RIVALS, *attention_forms.IMPLEMENTATIONS)
    _check_names('implementations', implementations or (), known)
    on_gpu = jax.default_backend() == 'gpu'
    cases = attention_cases.GPU_CASES if on_gpu else attention_cases.TOY_CASES
    if dtype:
        cases = list(dict.fromkeys(case._replace(dtype=dtype) for case in cases))
    sizes = (lengths, heads, kv_heads, widths, slots)
    if any(size is not None for size in sizes):
        first = cases[0]
        usual = (first.length, first.heads, first.kv_heads, first.width, first.slots)
        sizes = [[one] if size is None else size for size, one in zip(sizes, usual, strict=True)]
        cases = attention_cases.product(*sizes, first.dtype)
    found = bench_attention(cases, implementations or known, seconds)
    facts, results = next(found), []
    yield facts, []
    for result in found:
        results.append(result)
        yield result, [attention_report.case_table(result)] if 'rows' in result else []
        for line in attention_report.failures(result):
            print(line, file=sys.stderr)
    copy = facts['ceilings']['copy_bytes_per_second']
    if plot:
        attention_report.draw(results, copy, plot, ['times', 'depth'])
    if facts['hopper']:
        table = attention_report.targets_table([r for r in results if 'rows' in r], copy)
        yield {'targets': table.lines}, [table]


def scoring(*, size: str = '6x256', repeats: int = 5):
    """Log-likelihoods of the options of multiple-choice questions: batches, or one by one.

    Of the dense and the Mixture-of-Depths model; batches share rows.

    Args:
      size: LAYERSxWIDTH.
      repeats: timed rounds.
    """
    compared = {name: models.make_model(name, size, 256, 1) for name in ('dense', 'mod')}
    from moddepth_jax.benchmarks.scoring import bench_scoring, scoring_table

    result = bench_scoring(compared, repeats)
    yield {'size': size} | result, [scoring_table(result, size)]


BENCHMARKS = {f.__name__: f for f in (step, decode, depth, experts, attention, scoring)}


def flag_texts(benchmark) -> dict[str, str]:
    """The text of each argument in the docstring of a benchmark."""
    section = inspect.getdoc(benchmark).split('Args:\n')[1]
    texts = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', section, re.MULTILINE)
    return {name: ' '.join(text.split()) for name, text in texts}
