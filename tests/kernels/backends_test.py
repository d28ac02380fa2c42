"""The choice of backends: the named one, the best that fits, or an error of one line."""

import jax
import pytest
from absl import logging

from kernels_pallas import autotune, backends
from kernels_pallas.backends import Device, Parts, choose
from moddepth_jax.hparams.model import ATTENTION
from tests.kernels.cases import USUAL

HOPPER = Device('gpu', 'NVIDIA H200', (9, 0))
OLDER = Device('gpu', 'NVIDIA A100', (8, 0))
BLACKWELL = Device('gpu', 'NVIDIA B200', (10, 0))
AMD, TPU = Device('gpu', 'gfx942'), Device('tpu', 'TPU v5')
KERNELS = ('mosaic_gpu', 'mosaic_gpu_fused', 'pallas')
XLA, CUDNN = Parts(), Parts('cudnn')
LARGE = USUAL._replace(q=(8, 1024, 16, 64), k=(8, 1024, 2, 64))
FLOAT32 = {'dtypes': ('float32',)}
WIDE = {'q': (8, 1024, 16, 128), 'k': (8, 1024, 2, 128)}
# cuDNN does not support documents with a window, with any version of JAX.
NOT_CUDNN = {'segments': True, 'window': 5}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """No test here starts a process, or sees the log lines of another test."""

    def fail(*arguments):
        raise AssertionError(f'measured: {arguments}')

    monkeypatch.setattr(autotune, 'fastest', fail)
    monkeypatch.setattr(backends, '_log_lines', [])


def test_model_knob_names_every_implementation():
    assert {'auto', *backends.IMPLEMENTATIONS} == set(ATTENTION)


def test_cpu_runs_xla_unless_asked_otherwise():
    """On a CPU named kernels run interpreted, and the default logs nothing."""
    assert choose(None, LARGE) == XLA and not backends.log_lines()
    assert choose('xla', USUAL) == Parts()
    assert choose('pallas', USUAL) == Parts('xla', 'pallas', interpret=True)


@pytest.mark.parametrize(
    ('device', 'changes', 'parts'),
    [
        *((device, {}, CUDNN) for device in (HOPPER, OLDER, BLACKWELL)),
        *((device, change, XLA) for device in (HOPPER, OLDER) for change in (NOT_CUDNN, FLOAT32)),
        *((device, {}, XLA) for device in (AMD, TPU, Device('gpu', 'NVIDIA T4', (7, 5)))),
        # Initialization, a short prompt, and calls that only one form supports.
        (HOPPER._replace(not_measured=''), {}, CUDNN),
        (HOPPER._replace(not_measured=''), LARGE._asdict() | {'num_slots': 0} | FLOAT32, XLA),
    ],
)
def test_what_was_never_run_is_not_taken_unmeasured(device, changes, parts):
    """Only cuDNN and XLA are used, and the log says that nothing was measured."""
    assert choose(None, USUAL._replace(**changes), device) == parts
    assert device is TPU or 'not measured: ' in backends.log_lines()[-1]


def test_candidates_of_a_measurement():
    """Each depth part with cuDNN if it fits, and XLA for both; the default comes first."""
    with pytest.raises(AssertionError, match='measured'):
        choose(None, LARGE, HOPPER._replace(not_measured=''))
    ours = Parts('mosaic_gpu', 'mosaic_gpu_fused')
    hopper = [CUDNN, *(Parts('cudnn', name) for name in KERNELS), ours, XLA]
    packed = USUAL._replace(k=USUAL.q, num_slots=0, segments=True)
    windowed = [XLA, *(Parts('xla', name) for name in KERNELS), ours]
    for device, shapes, candidates in (
        (HOPPER, USUAL, hopper),
        *((device, USUAL, [CUDNN, hopper[3], XLA]) for device in (OLDER, BLACKWELL)),
        (HOPPER, USUAL._replace(**NOT_CUDNN), windowed),
        (HOPPER, packed, [CUDNN, Parts('mosaic_gpu'), XLA]),
        (OLDER, packed, [XLA]),
    ):
        assert backends.plan(shapes, device)[0] == candidates
    for group in (1, 2, 3):  # as in the shipped configs
        shapes = USUAL._replace(k=(2, 1024, 12 // group, 64), q=(2, 1024, 12, 64), segments=True)
        fused = {parts for parts in backends.plan(shapes, HOPPER)[0] if parts.depth == ours.depth}
        assert ours in fused and len(fused) == 2
    refused = backends.plan(USUAL._replace(**FLOAT32), HOPPER)[1]
    assert set(refused) == {'cudnn', 'mosaic_gpu', 'mosaic_gpu_fused'}


def test_a_name_is_taken_or_refused():
    """A name never falls back, and is never measured, even if the device can be measured."""
    hopper, older = (device._replace(not_measured='') for device in (HOPPER, OLDER))
    for device in (hopper, older):
        assert choose('xla', LARGE, device) == XLA
        assert choose('pallas', LARGE, device) == Parts('cudnn', 'pallas')
        assert choose('pallas', LARGE._replace(**FLOAT32), device) == Parts('xla', 'pallas')
        assert choose(Parts('xla', 'pallas'), LARGE, device) == Parts('xla', 'pallas')
    assert choose('pallas', USUAL, AMD) == Parts('xla', 'pallas')
    for name in ('mosaic_gpu', 'mosaic_gpu_fused'):
        # The fused form computes both parts.
        sequence = {'mosaic_gpu': 'cudnn', 'mosaic_gpu_fused': 'mosaic_gpu'}[name]
        for change in ({}, WIDE, {'slot_queries': True}, {'k': (8, 1024, 1, 64)}):
            assert choose(name, LARGE._replace(**change), hopper) == Parts(sequence, name)
        assert choose(name, LARGE._replace(num_slots=0), hopper) == Parts('cudnn', 'xla')
        assert choose(name, LARGE._replace(**NOT_CUDNN), hopper) == Parts('mosaic_gpu', name)
        with pytest.raises(ValueError, match='capability 8.0 must be 9.x.*: .*xla, pallas'):
            choose(name, LARGE, older)
    with pytest.raises(ValueError, match='platform tpu must be a GPU'):
        choose('pallas', USUAL, TPU)


def test_both_named_parts_are_checked():
    """With slots the depth part too; interpreted kernels may also compute in float32."""
    for change, why in (
        ({'consecutive': False, 'window': 8}, 'positions must be those of the index'),
        (FLOAT32, 'float32'),
    ):
        wrong = LARGE._replace(**change)
        fused = Parts('xla', 'mosaic_gpu_fused')
        with pytest.raises(ValueError, match=f'not supported here: mosaic_gpu_fused: .*{why}'):
            choose(fused, wrong, HOPPER)
        alone = wrong._replace(num_slots=0)
        assert choose(fused, alone, HOPPER) == fused


def test_excluded_backends_are_no_candidates(monkeypatch):
    """A visit excludes kernels that hang. XLA remains, and a name still takes its backend."""
    monkeypatch.setenv('MODDEPTH_WITHOUT', 'cudnn,xla,mosaic_gpu_fused')
    candidates, refused = backends.plan(LARGE, HOPPER)
    assert candidates[:2] == [Parts('xla', 'xla'), Parts('xla', 'mosaic_gpu')]
    assert not {'cudnn', 'mosaic_gpu_fused'} & {name for parts in candidates for name in parts[:2]}
    assert refused['cudnn'] == 'excluded by MODDEPTH_WITHOUT' and 'xla' not in refused
    assert choose('mosaic_gpu_fused', LARGE, HOPPER).depth == 'mosaic_gpu_fused'


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Pretends to be a process on a machine with a GPU."""
    (tmp_path / 'version').write_text('580.65.06\n')
    monkeypatch.setattr(backends, 'DRIVER_FILE', tmp_path / 'version')
    client = type('Client', (), {'platform_version': 'cuda\n13000'})
    fields = {'device_kind': 'NVIDIA H200', 'compute_capability': '9.0', 'client': client}
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(jax, 'devices', lambda: [type('Gpu', (), fields)])
    monkeypatch.delenv('MODDEPTH_MEASURE', raising=False)


def test_this_device(gpu, monkeypatch):
    """Only one GPU of one process can be measured, and only unless MODDEPTH_MEASURE=0."""
    found = backends.this_device()
    assert found == Device(
        *('gpu', 'NVIDIA H200', (9, 0), 'cuda 13000 driver 580.65.06', ''), local=True
    )
    monkeypatch.setenv('MODDEPTH_MEASURE', '0')
    assert backends.this_device().not_measured == 'MODDEPTH_MEASURE=0'
    monkeypatch.setattr(jax, 'device_count', lambda: 8)
    assert '8 devices, and no shard_map' in backends.this_device().not_measured
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    assert '2 processes' in backends.this_device().not_measured


def test_several_gpus_are_measured_where_each_has_its_own_part(gpu, monkeypatch):
    """In a shard_map over all axes the shapes are those of one device."""
    monkeypatch.setattr(jax, 'device_count', lambda: 8)
    axis = jax.sharding.AxisType.Auto
    mesh, seen = jax.sharding.AbstractMesh((1,), ('data',), axis_types=(axis,)), []

    def f(x):
        seen.append(backends.this_device().not_measured)
        return x

    spec = jax.sharding.PartitionSpec('data')
    over = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(over, jax.ShapeDtypeStruct((8,), 'float32'))
    assert seen and not any(seen)


def test_a_choice_is_logged_once(monkeypatch):
    """It is a warning if the sequence part is not cuDNN."""
    lines = []
    monkeypatch.setattr(logging, 'warning', lines.append)
    for _ in range(2):
        choose('pallas', USUAL._replace(**FLOAT32), HOPPER)
    assert backends.log_lines() == lines and len(lines) == 1
    start = 'depth_attention on NVIDIA H200: sequence by xla, depth by pallas; not cudnn: dtypes'
    assert lines[0].startswith(start)
