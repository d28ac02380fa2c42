"""Compiles the GPU kernels to Hopper machine code without a GPU, and reports their resources.

    python -m tests.kernels.hopper [a part of the kernels' names ...]

prints registers, spilled bytes, shared memory, threads and grid of each kernel. aot_test.py says
what must be installed. It needs its own process, since it reads what Mosaic prints to stdout.
"""

import contextlib
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from importlib import util
from pathlib import Path

import jax
import jax.numpy as jnp

from kernels_pallas.backends import DEPTH, Parts, load_module
from kernels_pallas.joint_softmax import SequenceMask, Slots, Static
from kernels_pallas.mosaic import decode, fused, fused_backward, sequence

# An H200, as XLA's target configuration describes devices.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
_PTXAS = re.compile(
    r'Function properties for (\S+)\n(?:ptxas +\.)? +\d+ bytes stack frame, '
    r'(\d+) bytes spill stores, (\d+) bytes spill loads\nptxas info    : Used (\d+) registers'
)
# The arguments are grid, cluster and block along x, y, z, then bytes of shared memory.
_MOSAIC_LAUNCH = re.compile(
    r'call (?:void|i32) @mosaic_gpu_(?:launch_kernel|build_kernel_spec)'
    r'\(ptr [^,]*((?:, i32 \d+){10}),'
)
# The name of a Triton call in StableHLO.
_TRITON_NAME = re.compile(r'\bname = "(\w+)"')
_XLA_LAUNCH = re.compile(
    r': kCustomKernel .*?(\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]'
    r'.*?shared_memory: (\d+)'
)


def cuda_program(name):
    """Return the path of a CUDA program, from a Python package or PATH, or None."""
    spec = util.find_spec('nvidia')
    for folder in spec.submodule_search_locations if spec else ():
        if (found := Path(folder, 'cu13', 'bin', name)).exists():
            return str(found)
    return shutil.which(name)


def missing() -> str | None:
    """Return why this machine cannot compile for Hopper, in one line, or None."""
    if not (util.find_spec('jax_plugins') and util.find_spec('jax_plugins.xla_cuda13')):
        return "no CUDA plugin of JAX: pip install 'jax[cuda13]'"
    return None if cuda_program('ptxas') else 'no ptxas: pip install nvidia-cuda-nvcc'


@contextlib.contextmanager
def captured_output():
    """Redirects standard output, of Python and of libraries, to the file that it yields."""
    with tempfile.TemporaryFile('w+', errors='replace') as file:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def on_hopper(arrays):
    """Return the arrays' descriptions with a sharding on a described H200."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform='cuda', target_config=TARGET, topology='1x1x1')
    mesh = topologies.make_mesh(topology, (1,), ('x',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)


def an_h200():
    """Name the GPU for which Triton lowers. JAX 0.10 has a default, later versions do not."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice('NVIDIA H200', num_cores=None, platform='gpu')
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def lower(function, *arguments) -> str:
    """Return the StableHLO text of a function of shapes, lowered for CUDA."""
    with an_h200():
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=('cuda',)).as_text()


def _numbers(text):
    return tuple(int(number) for number in re.findall(r'\d+', text))


def _by_ptxas(report):
    """Yield (name, registers, spilled bytes) of each kernel."""
    for name, stores, loads, registers in _PTXAS.findall(report):
        yield name, int(registers), int(stores) + int(loads)


def _of_mosaic(output):
    """Yield the resources of Mosaic kernels, which are printed in the order of compilation."""
    launches = [_numbers(found.replace('i32', '')) for found in _MOSAIC_LAUNCH.findall(output)]
    for (_, registers, spilled), launch in zip(_by_ptxas(output), launches, strict=True):
        yield registers, spilled, launch[9], math.prod(launch[6:9]), launch[:3]


def _of_triton(dump, names):
    """Yield the resources of the named Triton kernels, which XLA compiles like its fusions."""
    launches = {}
    for path in dump.glob('*.thunk_sequence.txt'):
        for name, grid, threads, shared in _XLA_LAUNCH.findall(path.read_text()):
            launches[name] = int(shared), _numbers(threads)[0], _numbers(grid)
    for path in dump.glob('*.ptx'):
        if '.entry' not in path.read_text():
            continue
        command = [cuda_program('ptxas'), '-v', '-arch=sm_90a', str(path), '-o', os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for name, registers, spilled in _by_ptxas(report):
            if re.sub(r'_\d+$', '', name) in names:
                yield registers, spilled, *launches[name]


def resources(function, *arrays) -> list[tuple]:
    """Return the resources of each Pallas kernel of a function of shapes on Hopper.

    Each is (registers of a thread, spilled bytes, shared memory of a block in bytes, threads of a
    block, grid). The function must not have been compiled in this process before.
    """
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS='1', MOSAIC_GPU_DUMP_HOST_LLVM='1')
    # Without a GPU each compilation symbolizes a stack trace, four fifths of its time.
    os.environ.setdefault('LLVM_DISABLE_SYMBOLIZATION', '1')
    # JAX takes the first ptxas on PATH.
    folder, path = os.path.dirname(cuda_program('ptxas')), os.environ['PATH']
    if not path.startswith(f'{folder}{os.pathsep}'):
        os.environ['PATH'] = f'{folder}{os.pathsep}{path}'
    with an_h200():
        lowered = jax.jit(function).lower(*on_hopper(arrays))
    with tempfile.TemporaryDirectory() as dump, captured_output() as output:
        # Newer JAX dumps PTX only with the second option.
        lowered.compile(compiler_options={'xla_dump_to': dump, 'xla_dump_emitter_re': '.*'})
        output.seek(0)
        names = set(_TRITON_NAME.findall(lowered.as_text()))
        found = [*_of_mosaic(output.read()), *_of_triton(Path(dump), names)]
    if not found:
        raise ValueError('no kernel was reported: had the function been compiled before?')
    return found


def shape(*sides, dtype=jnp.bfloat16):
    """Return a description of an array."""
    return jax.ShapeDtypeStruct(sides, dtype)


def depth_call(backend, way, B, T, K, G, H, L, R=None, mask=False, dtype=jnp.bfloat16, **options):
    """Return the pass `way` of a depth part, and the shapes of its arguments; num_slots is traced.

    Options are parameters of the function, `wide` (dtype of sums and of the sequence's o) and
    `fresh` (no sums).
    """
    wide, fresh = options.pop('wide', dtype), options.pop('fresh', False)
    function = getattr(load_module(getattr(DEPTH[backend], way)), f'depth_{way}')
    q, by_head = shape(B, T, K * G, H, dtype=dtype), shape(B, K * G, T, dtype=jnp.float32)
    places = L, B, R or T
    slots = Slots(
        *(shape(*places, K, H, dtype=dtype),) * 2,
        shape(dtype=jnp.int32),
        shape(*places, dtype=bool) if mask else None,
        shape(B, T, dtype=jnp.int32) if R else None,
    )
    function = functools.partial(function, **{'window': 0, 'scale': H**-0.5} | options)
    if way == 'forward':
        return function, (q, shape(*q.shape, dtype=wide), by_head, slots)
    sums = None if fresh else (shape(*places, K, H, dtype=wide),) * 2
    return function, (q, q, q, by_head, None, slots, sums, q)


def fused_call(
    T, K, G, H, L, R=None, kind='', dtype=jnp.bfloat16, windows=(1024, 16), wide=None, B=1
):
    """Return a fused pass and the shapes of its arguments; num_slots is traced.

    wide: None for the forward pass; dtype of the sums for the backward pass, or 'fresh' for none.
    kind: '' | 'documents' (segments) | 'general' (also windows, other queries for the slots, mask
    and rows).
    """
    q, key, rows = shape(B, T, K * G, H, dtype=dtype), shape(B, T, K, H, dtype=dtype), None
    segments, own, mask = shape(B, T, dtype=jnp.int32) if kind else None, None, None
    if kind == 'general':
        rows, own, mask = segments, q, shape(L, B, R or T, dtype=bool)
    side = shape(L, B, R or T, K, H, dtype=dtype)
    slots = Slots(side, side, shape(dtype=jnp.int32), mask, rows)
    window, slot_window = windows if kind == 'general' else (0, 0)
    static = Static(window, True, slot_window, H**-0.5, False, Parts('xla', 'mosaic_gpu_fused'))
    if wide is None:
        function = functools.partial(fused.fused_forward, static=static)
        return function, (q, key, key, segments, own, slots)
    by_head = shape(B, K * G, T, dtype=jnp.float32)
    sums = None if wide == 'fresh' else (shape(*side.shape, dtype=wide),) * 2

    def backward(q, k, v, ids, own, slots, sums, *joint):
        return fused_backward.fused_backward(q, k, v, ids, own, slots, sums, static, *joint)

    joint = q, q, by_head, by_head if kind == 'general' else None
    return backward, (q, key, key, segments, own, slots, sums, *joint)


def sequence_call(way, T, K, G, H, documents=False, window=0, dtype=jnp.bfloat16, B=1):
    """Return the sequence part `way` (forward or backward) by Mosaic GPU, and its arguments."""
    q, key = shape(B, T, K * G, H, dtype=dtype), shape(B, T, K, H, dtype=dtype)
    ids, by_head = shape(B, T, dtype=jnp.int32), shape(B, K * G, T, dtype=jnp.float32)
    static = Static(window, True, 0, H**-0.5, False, Parts('mosaic_gpu'))

    def function(q, k, v, ids, *joint):
        ids = ids if documents else None
        passes = {'forward': sequence.sequence_forward, 'backward': sequence.sequence_backward}
        return passes[way](q, k, v, SequenceMask(None, None, ids, ids), static, *joint)

    joint = (q, q, by_head, by_head if documents else None) if way == 'backward' else ()
    return function, (q, key, key, ids, *joint)


def decode_call(B, S, K, G, H, L, T=1, dtype=jnp.bfloat16):
    """Return decoding of B indexed rows and its arguments; T > 1: other queries for the slots."""
    q, new = shape(B, T, K * G, H, dtype=dtype), shape(B, T, K, H, dtype=dtype)
    cache, slots = shape(B, K, H, S, dtype=dtype), shape(L, B, T, K, H, dtype=dtype)
    masks = shape(B, T, S, dtype=bool), shape(B, T, T, dtype=bool)

    def function(rows, slots, q_depth, *arrays):
        given = {'slots': (*slots, None) if L else None, 'q_depth_CTNH': q_depth}
        return decode.decode_forward(*arrays, rows_C=rows, **given)

    arrays = q, new, new, cache, cache, *masks
    return function, (shape(B, dtype=jnp.int32), (slots,) * 2, q if T > 1 else None, *arrays)


# (H, G, L, with a mask and a look-up of tokens)
SHAPES = (
    (64, 8, 64, False),
    (128, 8, 64, False),
    (64, 1, 64, False),
    (64, 16, 64, False),
    (128, 3, 70, False),
    (64, 8, 70, True),
)
# (H, G, L, kind) of `fused_call`
FUSED = (
    (64, 8, 64, ''),
    (128, 8, 64, ''),
    (64, 1, 64, 'documents'),
    (128, 2, 70, 'documents'),
    (64, 3, 48, 'documents'),
    (96, 5, 70, 'general'),
    (96, 3, 48, 'documents'),
    (64, 8, 70, 'general'),
    (128, 1, 70, 'general'),
    (128, 2, 70, 'general'),
    (128, 3, 70, 'general'),
    (128, 8, 70, 'general'),
    (128, 12, 70, 'general'),
    (128, 16, 64, ''),
    (64, 32, 64, 'documents'),
)
# (H, G, with segments and a window)
SEQUENCE = (
    (64, 1, False),
    (80, 12, False),
    (128, 2, False),
    (128, 8, False),
    (64, 8, True),
    (128, 2, True),
)
# (B, K). With several batch rows TMA has another axis, and some of the kernels' divisions are by K.
ONE_ROW, ROWS = (1, 8), (3, 6)
FUSED_ROWS = ((128, 2, 70, 'documents'), (128, 3, 70, 'general'))
# (rows, H, G, L, new tokens) over caches of 4096 places
DECODE = (
    (1, 64, 8, 64, 1),
    (1, 128, 8, 64, 1),
    (64, 128, 2, 70, 1),
    (64, 64, 1, 0, 1),
    (8, 96, 3, 7, 1),
    (8, 128, 12, 70, 1),
    (8, 128, 8, 70, 8),
    (8, 56, 2, 7, 32),
)


def _kernels():
    """Return by name functions that return a function and its argument shapes; T = 4096."""
    found = {}
    cases = [(*case, *ONE_ROW) for case in FUSED] + [(*case, *ROWS) for case in FUSED_ROWS]
    for H, G, L, kind, B, K in cases:
        name = f'H{H}_G{G}_L{L}' + f'_{kind}' * bool(kind) + f'_B{B}' * (B > 1)
        call = functools.partial(fused_call, 4096, K, G, H, L, kind=kind, B=B)
        found[f'fused_forward_{name}'], name = call, f'fused_backward_{name}'
        found[name] = functools.partial(call, wide=jnp.bfloat16 if L == 64 else jnp.float32)
        found[f'{name}_fresh'] = functools.partial(call, wide='fresh')
        if L == 64:
            found[f'{name}_float32'] = functools.partial(call, wide=jnp.float32)
    cases = [(*case, *ONE_ROW) for case in SEQUENCE] + [(*SEQUENCE[-1], *ROWS)]
    for way, (H, G, documents, B, K) in itertools.product(('forward', 'backward'), cases):
        name = f'mosaic_sequence_{way}_H{H}_G{G}' + '_documents' * documents + f'_B{B}' * (B > 1)
        options = {'documents': documents, 'window': 1024 * documents, 'B': B}
        found[name] = functools.partial(sequence_call, way, 4096, K, G, H, **options)
    for B, H, G, L, T in DECODE:
        name = f'mosaic_decode_B{B}_H{H}_G{G}_L{L}' + f'_T{T}' * (T > 1)
        found[name] = functools.partial(decode_call, B, 4096, 8, G, H, L, T)
    ways = itertools.product(
        (('pallas', 'pallas'), ('mosaic', 'mosaic_gpu')), ('forward', 'backward')
    )
    for ((label, backend), way), (H, G, L, rows) in itertools.product(ways, SHAPES):
        sizes = {'B': 1, 'T': 4096, 'K': 8, 'H': H, 'G': G, 'L': L}
        sizes |= {'R': 4097, 'mask': True} if rows else {}
        name = f'{label}_depth_{way}_H{H}_G{G}_L{L}' + '_rows' * rows
        found[name] = functools.partial(depth_call, backend, way, **sizes)
        if (H, G, L, rows) in SHAPES[::4]:
            found[f'{name}_float32'] = functools.partial(found[name], wide=jnp.float32)
        if (backend, way) == ('mosaic_gpu', 'backward'):
            found[f'{name}_fresh'] = functools.partial(found[name], fresh=True)
    return found


KERNELS = _kernels()


def main(parts):
    """Print a line for each kernel whose name contains one of the parts, one by one."""
    print(f'{"":40}{"registers":>10}{"spilled":>9}{"shared":>8}{"threads":>9}  grid', flush=True)
    for name in KERNELS:
        if parts and not any(part in name for part in parts):
            continue
        try:
            function, arrays = KERNELS[name]()
            kernels = resources(function, *arrays)
        except Exception:
            traceback.print_exc()  # and go on with the others
            continue
        for registers, spilled, shared, threads, grid in kernels:
            numbers = f'{registers:>10}{spilled:>9}{shared:>8}{threads:>9}'
            print(f'{name:40}{numbers}  {grid}', flush=True)


if __name__ == '__main__':
    # Without a GPU the CUDA plugin is registered only if JAX does not try it as a platform.
    jax.config.update('jax_platforms', 'cpu')
    main(sys.argv[1:])
