"""Benchmarks, as ratios measured in one run.

  python -m launch.bench step
  python -m launch.bench step --size=6x256 --lengths=512,2048 --json=step.json
  python -m launch.bench step --variants=dense,mod,moda,both --size=124m --dtype=bfloat16
  python -m launch.bench step --variants=dense,moe,mode
  python -m launch.bench decode --batches=1,8,16,64 --kv_heads=8,2
  python -m launch.bench depth --depths=8,16,32,64
  python -m launch.bench experts --shapes=1024x256x704x64x6,4096x256x512x8x2
  python -m launch.bench attention --json=attention.json --plot=attention.png
  python -m launch.bench attention --lengths=4096 --slots=0,64 --implementations=cudnn,pallas
  python -m launch.bench scoring --size=6x128 --repeats=11

step: one training step of the dense and the Mixture-of-Depths model at the same shape and batch
tokens, in turn, each beside the same mathematics written out by hand; with --variants, of those
models, each beside the dense one (mode: both forms of MoDE; where there are experts, the table says
which grouped product they run and what it multiplies).
decode: one decoding step of both at a nearly full context, in turn, and the time to the first
token; an eighth of the tokens enters every other block, by random routing.
depth: one training step of the dense and the MoDA model (slots attention+ffn): first time beside
counted FLOPs, then memory, compile time and step time by depth, scanned and unrolled, with
recomputation (model.remat block) and without; with --router, both models routed.
experts: the routed experts of one layer, forward and backward, by each grouped product and as a
loop of all experts over all tokens: time, memory and what is executed over active FLOPs.
attention: every implementation of attention over sequence and depth slots, compared with the
equation and then timed beside plain attention; on a GPU at the shapes of a large model, on a CPU at
toy shapes, where kernels are interpreted.
scoring: log-likelihoods of the options of multiple-choice questions, of the dense and the
Mixture-of-Depths model: batches, which share rows, beside one request at a time.
"""

import contextlib
import itertools
import json

from absl import flags

from launch import bench_runs, bench_scoring, cli

JSON = flags.DEFINE_string('json', None, 'File for the result, as it grows; - for stdout.')
flags.adopt_module_key_flags(bench_runs)

BENCHMARKS = {
    'step': bench_runs.step,
    'decode': bench_runs.decode,
    'depth': bench_runs.depth,
    'experts': bench_runs.experts,
    'attention': bench_runs.attention,
    'scoring': bench_scoring.scoring,
}
_MODELS = ('size', 'dtype', 'attention', 'repeats')
OWN_FLAGS = {
    'step': (*_MODELS, 'lengths', 'tokens', 'variants', 'kv_heads'),
    'decode': ('size', 'repeats', 'batches', 'kv_heads', 'context', 'prompt'),
    'depth': (
        *(*_MODELS, 'lengths', 'kv_heads', 'depths'),
        *('unrolled_up_to', 'ratio_length', 'rows', 'router'),
    ),
    'experts': ('shapes', 'dtype', 'repeats'),
    'attention': (
        *('lengths', 'kv_heads', 'heads', 'widths', 'slots', 'dtype'),
        *('implementations', 'seconds', 'plot'),
    ),
    'scoring': ('size', 'repeats'),
}


def _refuse_flags_of_others(benchmark):
    for flag in dict.fromkeys(itertools.chain(*OWN_FLAGS.values())):
        owners = [name for name, own in OWN_FLAGS.items() if flag in own]
        if flags.FLAGS[flag].present and benchmark not in owners:
            raise ValueError(
                f'--{flag}: is of {" and ".join(owners)}, {benchmark} has no use for it'
            )


def main(argv):
    if len(argv) != 2 or argv[1] not in BENCHMARKS:
        given = ' '.join(argv[1:]) or 'no benchmark'
        raise ValueError(f'{given}: must be one of {", ".join(BENCHMARKS)}')
    _refuse_flags_of_others(argv[1])
    with contextlib.ExitStack() as stack:
        file = None
        if JSON.value not in (None, '-'):  # opened first: a bad path shows before the timing
            file = stack.enter_context(open(JSON.value, 'w', encoding='utf-8'))
        results = []
        for result, *tables in BENCHMARKS[argv[1]]():
            results.append(result)
            if file:  # whole after each result: what ends the process leaves those before it
                file.seek(0)
                file.truncate()
                print(json.dumps(results, indent=2), file=file, flush=True)
            for table in tables if JSON.value != '-' else ():
                bench_runs.print_table(*table)
        if JSON.value == '-':
            print(json.dumps(results, indent=2))


if __name__ == '__main__':
    cli.run(main, 'NAME of the benchmark: step, decode, depth, experts, attention or scoring')
