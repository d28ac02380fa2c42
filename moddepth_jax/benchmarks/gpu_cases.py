"""What launch.gpu runs, in order of value: the list that a short visit to a GPU works through."""

from moddepth_jax.benchmarks.kernel_cases import CASES, PACKED_CASES, TOY_CASES
from moddepth_jax.benchmarks.runner import Case

_CHECKS = 'moddepth_jax.benchmarks.kernel_checks'
_ATTENTION = 'moddepth_jax.benchmarks.attention'
FUSED, CUDNN = 'mosaic_gpu_fused', 'cudnn'
# Of the fused kernel and of cuDNN with XLA's depth part: those that they can do.
_FUSED = ('group_of_8', 'fused_rows', 'fused_window', 'fused_own_query', 'group_of_16')
_FUSED += ('masked', 'fused_one_slot', 'fused_octets_of_7')
_FUSED_PACKED = ('edges', 'fused_three', 'fused_rows', 'fused_window')
_CUDNN = ('group_of_8', 'group_of_2', 'masked', 'window', 'own_query', 'rows', 'group_of_1')
_PALLAS = ('group_of_8', 'group_of_2', 'masked', 'depth_alone', 'rows', 'own_query', 'group_of_3')
_PLAIN = ('group_of_8', 'group_of_2', 'masked', 'rows', 'own_query', 'float32')
# Length and rows of a batch that fit one large GPU.
_BATCHES = {'124m': (2048, 16), '700m': (4096, 4)}
# Lengths and shapes of docs/gpu.md. H=64, G=8, L=64 where nothing else is said.
_LENGTHS = (4096, 16384, 65536)
_NAMES = {4096: '4k', 16384: '16k', 65536: '64k'}
_SHAPES = {
    **{f'slots_{slots}': {'slots': slots} for slots in (16, 24, 48)},
    'written_33_of_64': {'written': 33},
    'group_of_2': {'kv_heads': 32},
    'width_128': {'width': 128},
    'group_of_2_width_128': {'heads': 8, 'kv_heads': 4, 'width': 128, 'slots': 72, 'batch': 4},
}
# At T = 16k too, before training steps.
_LONGER = ('written_33_of_64', 'width_128', 'group_of_2_width_128')
_TOY_TIMES = ('xla/packed_no_slots_4k', 'pallas/slots_24_4k', 'flash_attention_2/4k')
# Expected seconds of a training step's case: compilation, and what `auto` measures before it.
_STEPS = {'dense': 60.0, 'moda': 85.0, 'mod': 60.0, 'both': 110.0}


def _check(implementation, name, expected, toy):
    packed = name.startswith('packed/')
    start = f'packed/{implementation}/' if packed else f'right/{implementation}/'
    arguments = {'implementation': implementation, 'case': name, 'toy': toy}
    limit = 240.0 if toy else 75.0
    short = name.removeprefix('packed/')
    return Case(start + short, implementation, expected, limit, f'{_CHECKS}:check', arguments)


def _checks(implementation, names, packed, expected, toy):
    """Correctness of an implementation: its own cases, packed ones, sums of gradients."""
    chosen = [*names, *(f'packed/{name}' for name in packed)]
    if toy:
        chosen = [name for name in chosen if name.removeprefix('packed/') in TOY_CASES]
    return [_check(implementation, name, expected, toy) for name in chosen]


def _sums(implementation, expected, toy):
    """Both ways of adding to sums of the slots' gradients."""
    return [
        Case(
            f'right/{implementation}/sums_{dtype}',
            implementation,
            expected,
            240.0 if toy else 75.0,
            f'{_CHECKS}:check_sums',
            {'implementation': implementation, 'dtype': dtype, 'toy': toy},
        )
        for dtype in ('bfloat16', 'float32')
    ]


def _correctness(toy):
    plain = [name for name in CASES if not name.startswith('fused_')]
    packed = [name for name in PACKED_CASES if not name.startswith('fused_')]
    if toy:  # interpreted, it takes half a minute a case
        cases = _checks('mosaic_gpu', ['depth_alone'], (), 30.0, toy)
    else:
        cases = _checks('mosaic_gpu', plain, packed, 5.0, toy) + _sums('mosaic_gpu', 5.0, toy)
    for name in ('pallas', 'xla'):
        cases += _checks(name, (), packed, 4.0, toy)
    cases += _checks(CUDNN, _CUDNN, [name for name in packed if name != 'window'], 4.0, toy)
    if not toy:
        cases += _checks(FUSED, _FUSED, _FUSED_PACKED, 5.0, toy) + _sums(FUSED, 5.0, toy)
    for batch, length, slots in ((8, 4096, 72), (64, 2048, 0), (1, 16384, 24)):
        arguments = {'batch': batch, 'length': length, 'slots': slots, 'toy': toy}
        name = f'right/decode/{batch}_rows_of_{length}_slots_{slots}'
        cases.append(Case(name, 'decode', 5.0, 75.0, f'{_CHECKS}:check_decode', arguments))
    cases += _checks('pallas', _PALLAS, (), 4.0, toy) + _sums('pallas', 5.0, toy)
    return cases + _checks('xla', _PLAIN, (), 3.0, toy)


def _odd_shapes(toy):
    """The rest of what Triton's kernels are given: odd shapes, which nothing above waits for."""
    rest = [name for name in CASES if not name.startswith('fused_') and name not in _PALLAS]
    return [] if toy else _checks('pallas', rest, (), 4.0, toy)


def _time(implementation, name, sizes, expected, brief, toy):
    packed = 'documents' in sizes
    needs = (f'right/{implementation}/',) + ((f'packed/{implementation}/',) if packed else ())
    arguments = {'implementation': implementation, 'sizes': sizes, 'brief': brief, 'toy': toy}
    full = f'time/{implementation}/{name}'
    run = f'{_ATTENTION}:time_attention'
    return Case(full, f'time/{implementation}', expected, 120.0, run, arguments, needs)


def _times(toy):
    """Of the shapes that the targets speak of first; then packed ones; then one thing at a time."""
    cases = []
    for name in ('mosaic_gpu', FUSED):
        cases += _at_lengths(name, '', {}, _LENGTHS, 15.0, toy, brief=False)
    cases += _at_lengths('flash_attention_2', '', {'slots': 0}, _LENGTHS, 6.0, toy)
    for name, slots in (('mosaic_gpu', 64), ('mosaic_gpu', 0), (FUSED, 64)):
        what = 'packed_' if slots else 'packed_no_slots_'
        sizes = {'documents': 16, 'slots': slots}
        cases += _at_lengths(name, what, sizes, _LENGTHS, 9.0, toy)
    for shape in _SHAPES:
        lengths = _LENGTHS[:2] if shape in _LONGER else _LENGTHS[:1]
        cases += _at_lengths('mosaic_gpu', f'{shape}_', _SHAPES[shape], lengths, 8.0, toy)
    return cases


def _more_times(toy):
    """What can wait until training steps have been timed."""
    cases = _at_lengths('pallas', '', {}, _LENGTHS, 15.0, toy, brief=False)
    cases += _at_lengths('pallas_triton', '', {'slots': 0}, _LENGTHS, 6.0, toy)
    packed = {'documents': 16, 'slots': 0}
    cases += _at_lengths('xla', 'packed_no_slots_', packed, _LENGTHS, 9.0, toy)
    for name, shapes in (
        ('mosaic_gpu', [shape for shape in _SHAPES if shape not in _LONGER]),
        (FUSED, ('slots_24', 'written_33_of_64', 'width_128')),
        ('pallas', ('slots_24', 'group_of_2_width_128')),
    ):
        for shape in shapes:
            lengths = _LENGTHS[1:2] if name == 'mosaic_gpu' else _LENGTHS[:1]
            cases += _at_lengths(name, f'{shape}_', _SHAPES[shape], lengths, 8.0, toy)
    return cases


def _at_lengths(name, what, sizes, lengths, expected, toy, brief=True):
    """A case at each length; of a rehearsal one for each kind."""
    cases = []
    for length in lengths:
        full = f'{what}{_NAMES[length]}'
        if not toy or f'{name}/{full}' in _TOY_TIMES:
            seconds = expected + length / 16384
            cases.append(_time(name, full, sizes | {'length': length}, seconds, brief, toy))
    return cases


def _step(model, size, toy, expected=90.0):
    length, rows = _BATCHES[size]
    arguments = {'model': model, 'size': size, 'length': length, 'rows': rows}
    name, run = f'step/{size}/{model}', 'moddepth_jax.benchmarks.gpu_models:train_step'
    return Case(name, name, expected, 420.0, run, arguments | {'toy': toy})


def _models(toy):
    """Training steps, each in a process of its own: the peak of memory is the process's."""
    cases = []
    for size in ('124m',) if toy else ('124m', '700m'):
        cases += [_step(model, size, toy, expected) for model, expected in _STEPS.items()]
    for model in ('mod', 'moda'):
        arguments = {'model': model, 'batches': [1, 8, 64], 'kv_heads': 4, 'toy': toy}
        name, run = f'decode/124m/{model}', 'moddepth_jax.benchmarks.gpu_models:decoding'
        cases.append(Case(name, name, 70.0, 200.0, run, arguments))
    for name in ('mosaic_gpu', 'pallas', 'xla'):
        for slots in (64, 0) if name == 'xla' else (64,):
            arguments = {'implementation': name, 'lengths': list(_LENGTHS), 'slots': slots}
            full = f'memory/packed/{name}' + ('' if slots else '_no_slots')
            run = f'{_ATTENTION}:attention_memory'
            cases.append(Case(full, 'memory', 15.0, 120.0, run, arguments | {'toy': toy}))
    if toy:
        cases = [case for case in cases if case.name != 'memory/packed/mosaic_gpu']
    for shape in ([16384, 768, 512, 8, 2], [4096, 2048, 704, 64, 6]):
        name = 'experts/' + 'x'.join(map(str, shape))
        arguments = {'shape': shape, 'toy': toy}
        cases.append(
            Case(
                name,
                'experts',
                40.0,
                150.0,
                'moddepth_jax.benchmarks.gpu_models:experts',
                arguments,
            )
        )
    rest = ('moe',) if toy else ('moe', 'staged', 'integrated')
    return cases + [_step(model, '124m', toy) for model in rest]


def _runs(toy):
    """Commands, which hold the device themselves."""
    train = {'steps': 800, 'toy': toy}
    study = {'variants': ['dense', 'mod', 'random'], 'toy': toy}
    cases = []
    for name, expected, limit, run, arguments in (
        ('train', 150.0, 420.0, 'training_run', train),
        ('study', 240.0, 500.0, 'small_study', study),
    ):
        run, name = f'moddepth_jax.benchmarks.gpu_models:{run}', f'run/{name}'
        cases.append(Case(name, name, expected, limit, run, arguments, in_process=False))
    return cases


def cases(toy: bool = False) -> list[Case]:
    """All cases, the most valuable first.

    Args:
      toy: those of a rehearsal on a CPU: some of each kind, cut down.
    """
    first = Case('machine/ceilings', 'machine', 20.0, 120.0, f'{_ATTENTION}:ceilings')
    found = [first, *_correctness(toy), *_times(toy), *_models(toy)]
    found += [*_more_times(toy), *_odd_shapes(toy), *_runs(toy)]
    if toy:  # a busy CPU, and nobody waits for the clock
        found = [case._replace(expected=min(case.expected, 15.0), limit=300.0) for case in found]
    return found
