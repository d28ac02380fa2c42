"""The cases of launch.gpu in order of value, for short visits to a GPU."""

import fnmatch

from kernels_pallas.autotune import TOTAL_SECONDS
from moddepth_jax.benchmarks.attention_cases import LENGTHS, LIKE_MODELS, NO_SLOTS, PACKED, SHAPES
from moddepth_jax.benchmarks.attention_forms import SEQUENCE, SPLIT
from moddepth_jax.benchmarks.decode_cases import CASES as DECODE_CASES
from moddepth_jax.benchmarks.kernel_cases import CASES, PACKED_CASES
from moddepth_jax.benchmarks.runner import Case

FUSED, CUDNN = 'mosaic_gpu_fused', 'cudnn'
_PLAIN, _PACKED = tuple(CASES), tuple(PACKED_CASES)
# The cases that check an implementation. It supports each of them on a Hopper GPU.
_CHECKED = {
    'mosaic_gpu': tuple(name for name in _PLAIN if name not in ('float32', 'width_256')),
    FUSED: ('group_of_8', 'group_of_2', 'rows', 'window', 'own_query', 'group_of_1', 'group_of_3')
    + ('group_of_16', 'group_of_5', 'group_of_12', 'group_of_20', 'masked', 'sums', 'width_96')
    + ('octets_of_7', 'one_slot', 'none_written'),
    CUDNN: ('group_of_8', 'group_of_2', 'masked', 'window', 'own_query', 'rows', 'group_of_1'),
    SEQUENCE: ('group_of_8', 'group_of_2', 'window', 'width_96', 'group_of_5'),
    SPLIT: ('group_of_8',),
    'pallas': ('group_of_8', 'group_of_2', 'masked', 'depth_alone', 'rows', 'own_query')
    + ('group_of_3',),
    'xla': ('group_of_8', 'group_of_2', 'masked', 'rows', 'own_query', 'float32'),
}
_FUSED_PACKED = tuple(name for name in _PACKED if name != 'no_slots')
# Shapes of the decoding kernel, with the names of decode_cases.
DECODE_SHAPES = {
    f'b{rows}_4k_g{group}_h{width}': dict(B=rows, S=4096, length=4096, K=8, G=group, H=width, L=64)
    for rows in (1, 64)
    for group, width in ((8, 64), (2, 128))
}
# Sequence length and rows of a batch that fit one large GPU.
_BATCHES = {'124m': (2048, 16), '700m': (4096, 4)}
_MAIN_CHECKS = ('group_of_8', 'group_of_2', 'three')  # of each implementation
# Expected seconds of a training step case: compilation, and the measurements of `auto`, each of
# which starts a process for every candidate.
_STEPS = {'dense': 80.0, 'moda': 170.0, 'mod': 90.0, 'mod_moda': 220.0}
_STEP_LIMIT = TOTAL_SECONDS + 200.0
# One more of each kind: decoding, and the shapes of the shipped configs, which pack documents.
_MAIN_OTHERS = ('right/decode/mosaic_gpu/usual', 'decode_kernel/mosaic_gpu/b64_4k_g8_h64')
_MAIN_OTHERS += (f'time/{SEQUENCE}/packed_no_slots_4k', f'time/{FUSED}/packed_4k')
_MAIN_OTHERS += ('time/mosaic_gpu/packed_4k', f'time/mosaic_gpu/{LIKE_MODELS}4k')
_MAIN_STEPS = tuple(f'step/124m/{model}' for model in _STEPS)
# Cases of a rehearsal on a CPU, where kernels are interpreted: some of each kind.
_TOYS = ('machine/*', 'right/mosaic_gpu/depth_alone')
_TOYS += tuple(f'right/pallas/{name}' for name in ('group_of_3', 'rows', 'depth_alone'))
_TOYS += ('right/cudnn/rows', 'right/xla/rows', 'packed/[pxc]*/three', 'packed/[pxc]*/no_slots')
_TOYS += ('time/xla/packed_no_slots_4k', 'time/pallas/slots_24_4k', 'time/flash_attention_2/4k')
_TOYS += tuple(f'step/124m/{model}' for model in (*_STEPS, 'moe'))
_TOYS += ('decode/*', 'right/decode/xla/rows', 'decode_kernel/xla/*', 'experts/*', 'run/*')


def cases(toy: bool = False) -> list[Case]:
    """Return all cases, the most valuable first; with `toy`, some of each kind at CPU size."""
    found = [_case('machine/ceilings', 'machine', 20.0, 120.0, 'attention:device_ceilings')]
    # One case of each kind first: a short visit then has a number for each.
    checks, times, models = _correctness(), _times(), _models(toy)
    first = [case for case in checks if case.name.rpartition('/')[2] in _MAIN_CHECKS]
    groups = [case.group for case in first]
    first.sort(key=lambda case: groups.index(case.group))  # a start takes longer than a check
    first += [case for case in times if case.name.rpartition('/')[2] in LENGTHS]
    others = [case for case in (*times, *models) if case.name in _MAIN_OTHERS]
    assert toy or len(others) == len(_MAIN_OTHERS)
    first += others
    first += [case for case in models if case.name in _MAIN_STEPS]
    # Starts a command, which uses the device itself.
    run = ('run/train', 'run/train', 220.0, _STEP_LIMIT, 'gpu_models:training_run')
    first.append(_case(*run, in_process=False, steps=800))
    found += first + [case for case in (*checks, *times, *models) if case not in first]
    found += _more_times()
    # Unusual shapes, on which no other case depends.
    found += _checks('pallas', [name for name in _PLAIN if name not in _CHECKED['pallas']], 4.0)
    if not toy:
        return found
    return [  # generous limits for a busy CPU
        case._replace(
            expected=min(case.expected, 15.0),
            limit=300.0,
            arguments=case.arguments | {'toy': True},
        )
        for case in found
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in _TOYS)
    ]


def _case(name, group, expected, limit, function, needs=(), in_process=True, **arguments):
    run = f'moddepth_jax.benchmarks.{function}'
    return Case(name, group, expected, limit, run, arguments, needs, in_process)


def _checks(implementation, names, expected, packed=()):
    """Correctness cases of an implementation, without and with packed documents."""
    call = {'implementation': implementation}
    checked = {f'right/{implementation}/{name}': name for name in names}
    checked |= {f'packed/{implementation}/{name}': f'packed/{name}' for name in packed}
    return [
        _case(name, implementation, expected, 120.0, 'kernel_checks:check', **call, case=case)
        for name, case in checked.items()
    ]


def _correctness():
    found = _checks('mosaic_gpu', _CHECKED['mosaic_gpu'], 5.0, _PACKED)
    found += _checks(SEQUENCE, _CHECKED[SEQUENCE], 5.0, _PACKED)
    for name in ('pallas', 'xla'):
        found += _checks(name, (), 4.0, _PACKED)
    found += _checks(CUDNN, _CHECKED[CUDNN], 4.0, [name for name in _PACKED if name != 'window'])
    found += _checks(FUSED, _CHECKED[FUSED], 5.0, _FUSED_PACKED)
    found += _checks('pallas', _CHECKED['pallas'], 4.0)
    found += _checks('xla', _CHECKED['xla'], 3.0)
    return found + _checks(SPLIT, _CHECKED[SPLIT], 5.0)


def _at_lengths(implementation, prefix, sizes, expected, lengths=tuple(LENGTHS), brief=True):
    """Timing cases of one shape at each length."""
    # Every form is also checked at its own size before it is timed.
    needs = (f'right/{implementation}/group_of_8',)
    needs += (f'packed/{implementation}/three',) if 'documents' in sizes else ()
    return [
        _case(
            f'time/{implementation}/{prefix}{length}',
            f'time/{implementation}',
            expected + LENGTHS[length] / 16384,
            120.0,
            'attention:time_one',
            needs,
            implementation=implementation,
            sizes=sizes | {'length': LENGTHS[length]},
            brief=brief,
        )
        for length in lengths
    ]


def _times():
    """Timing cases: shapes of the targets, then packed documents, then one change at a time."""
    found = []
    for name in ('mosaic_gpu', FUSED):
        found += _at_lengths(name, '', {}, 17.0, brief=False)
    found += _at_lengths('flash_attention_2', '', NO_SLOTS, 6.0)
    for name, prefix, sizes in (
        (SEQUENCE, 'no_slots_', NO_SLOTS),
        (SEQUENCE, 'packed_no_slots_', PACKED | NO_SLOTS),
        (FUSED, 'packed_', PACKED),
        ('mosaic_gpu', 'packed_', PACKED),
    ):
        found += _at_lengths(name, prefix, sizes, 9.0)
    # At this length cuDNN takes the documents.
    found += _at_lengths('mosaic_gpu', 'packed_no_slots_', PACKED | NO_SLOTS, 9.0, ('4k',))
    for shape, sizes in SHAPES.items():
        brief = shape != LIKE_MODELS  # there also the slots' gradients that are added to sums
        expected = 8.0 if brief else 17.0
        found += _at_lengths('mosaic_gpu', shape, sizes, expected, ('4k',), brief)
    return found


def _more_times():
    """Timing cases that run after the training steps."""
    # If cuDNN's backward pass is wrong with a joint logsumexp, mosaic_gpu has no times.
    found = _at_lengths(SPLIT, '', {}, 17.0, brief=False)
    found += _at_lengths('pallas', '', {}, 17.0, brief=False)
    found += _at_lengths('xla', 'packed_no_slots_', PACKED | NO_SLOTS, 9.0)
    for shape, sizes in SHAPES.items():
        found += _at_lengths('mosaic_gpu', shape, sizes, 8.0, ('16k',))
    for name in (FUSED, 'pallas'):
        for shape in ('slots_24_', 'width_128_'):
            found += _at_lengths(name, shape, SHAPES[shape], 8.0, ('4k',))
    return found


def _decoding(toy):
    """Correctness of the decoding kernel, then its times over full caches with 64 slots."""
    found = []
    for kernel, cases_of_kernel in (('mosaic_gpu', DECODE_CASES), ('xla', ('usual', 'rows'))):
        checks = f'right/decode/{kernel}/'
        for case in cases_of_kernel:
            name, check = checks + case, 'decode_cases:check'
            found.append(
                _case(name, 'right/decode', 4.0, 75.0, check, implementation=kernel, case=case)
            )
        if kernel == 'xla' and not toy:  # XLA's times are in the rows of the other kernel
            continue
        for shape, sizes in DECODE_SHAPES.items():
            name, time = f'decode_kernel/{kernel}/{shape}', 'decode_cases:time_one'
            how = {'implementation': kernel, 'sizes': sizes}
            needs = (f'{checks}usual',)
            found.append(_case(name, 'decode_kernel', 9.0, 75.0, time, needs=needs, **how))
    return found


def _step(model, size, expected=110.0):
    (length, rows), name = _BATCHES[size], f'step/{size}/{model}'
    sizes = {'size': size, 'length': length, 'rows': rows}
    run = 'gpu_models:train_step'
    return _case(name, name, expected, _STEP_LIMIT, run, model=model, **sizes)


def _models(toy):
    """Training steps, each in a separate process, because peak memory is that of the process."""
    found = [_step(model, size, seconds) for size in _BATCHES for model, seconds in _STEPS.items()]
    found += _decoding(toy)
    for model in ('mod', 'moda'):
        name, sizes = f'decode/124m/{model}', {'batches': [1, 8, 64], 'kv_heads': 4}
        found.append(_case(name, name, 70.0, 200.0, 'gpu_models:decoding', model=model, **sizes))
    for shape in ([16384, 768, 512, 8, 2], [4096, 2048, 704, 64, 6]):
        name = 'experts/' + 'x'.join(map(str, shape))
        found.append(_case(name, 'experts', 40.0, 150.0, 'gpu_models:experts', shape=shape))
    return found + [_step(model, '124m') for model in ('moe', 'staged', 'integrated')]
