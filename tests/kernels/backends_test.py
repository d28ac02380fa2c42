"""What computes an attention: what was asked for, what fits, or one line that says why nothing."""

import jax
import pytest
from absl import logging

from kernels_pallas import autotune, backends, cudnn
from kernels_pallas.backends import Device, Parts, choose
from moddepth_jax.hparams.model import ATTENTION
from tests.kernels.cases import USUAL

CPU = Device('cpu', 'cpu', local=True)
HOPPER = Device('gpu', 'NVIDIA H200', (9, 0))
OLDER = Device('gpu', 'NVIDIA A100', (8, 0))
BLACKWELL = Device('gpu', 'NVIDIA B200', (10, 0))
XLA, CUDNN = Parts(), Parts('cudnn')
LARGE = USUAL._replace(q=(8, 1024, 16, 64), k=(8, 1024, 2, 64))
# Documents and a window at once are not for cuDNN, on any version of JAX.
NOT_CUDNN = {'segments': True, 'window': 5}


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """No test here starts a process; and none knows the lines of another."""

    def fail(*arguments):
        raise AssertionError(f'measured: {arguments}')

    monkeypatch.setattr(autotune, 'fastest', fail)
    monkeypatch.setattr(backends, '_log_lines', [])


def test_model_knob_names_every_implementation():
    assert {'auto', *backends.IMPLEMENTATIONS} == set(ATTENTION)


def test_cpu_runs_xla_unless_asked_otherwise():
    """Kernels that are asked for by name on a CPU run interpreted. auto says nothing."""
    assert choose(None, LARGE) == XLA and not backends.log_lines()
    assert choose('xla', USUAL) == Parts()
    assert choose('pallas', USUAL) == Parts('xla', 'pallas', interpret=True)


@pytest.mark.parametrize('device', [HOPPER, OLDER, BLACKWELL], ids=lambda device: device.kind)
def test_what_was_never_run_is_not_taken_unmeasured(device):
    """Only cuDNN and XLA, and the line says that nothing was measured."""
    assert choose(None, USUAL, device) == CUDNN
    assert choose(None, USUAL._replace(**NOT_CUDNN), device) == XLA
    assert choose(None, USUAL._replace(dtypes=('float32',)), device) == XLA
    assert all(
        'not measured: the device is only described' in line for line in backends.log_lines()
    )


def test_candidates_of_a_measurement():
    """Each depth part with cuDNN where it fits, and XLA's own form; the proven one comes first."""
    depths = [Parts('cudnn', 'mosaic_gpu'), Parts('cudnn', 'mosaic_gpu_fused')]
    pallas = Parts('cudnn', 'pallas')
    hopper = backends.plan(USUAL, HOPPER)
    assert hopper.proven == (CUDNN, XLA)
    assert hopper.candidates == (CUDNN, *depths, pallas, XLA)
    assert hopper.otherwise == tuple(p._replace(sequence='xla') for p in (*depths, pallas))
    for device in (OLDER, BLACKWELL):
        assert backends.plan(USUAL, device).candidates == (CUDNN, pallas, XLA)
    windowed = backends.plan(USUAL._replace(**NOT_CUDNN), HOPPER)
    assert windowed.proven == (XLA,) and not windowed.otherwise
    assert {p.sequence for p in windowed.candidates} == {'xla'}
    assert len(windowed.candidates) == 4
    packed = USUAL._replace(k=USUAL.q, num_slots=0, segments=True)
    assert backends.plan(packed, HOPPER).candidates == (CUDNN, XLA)
    assert backends.plan(packed, OLDER).candidates == (XLA,)
    assert backends.plan(USUAL._replace(num_slots=0), HOPPER).candidates == (CUDNN, XLA)
    refused = dict(backends.plan(USUAL._replace(dtypes=('float32',)), HOPPER).refused)
    assert set(refused) == {'cudnn', 'mosaic_gpu', 'mosaic_gpu_fused'}


@pytest.mark.parametrize('device', [HOPPER, OLDER], ids=lambda device: device.kind)
def test_a_name_is_taken_or_refused(device):
    """A name never falls back, and is never measured, though the device could be."""
    device = device._replace(not_measured='')
    assert choose('xla', LARGE, device) == XLA
    assert choose('pallas', LARGE, device) == Parts('cudnn', 'pallas')
    assert choose('pallas', LARGE._replace(dtypes=('float32',)), device) == Parts('xla', 'pallas')
    if device.capability[0] == 9:
        assert choose('mosaic_gpu', LARGE, device) == Parts('cudnn', 'mosaic_gpu')
        assert choose('mosaic_gpu_fused', LARGE, device) == Parts('cudnn', 'mosaic_gpu_fused')
    else:
        with pytest.raises(ValueError, match='capability 8.0 must be 9.x.*: .*xla, pallas'):
            choose('mosaic_gpu', LARGE, device)
    assert choose(Parts('xla', 'pallas'), LARGE, device) == Parts('xla', 'pallas')


def test_small_and_unrivalled_attentions_are_not_measured():
    """Neither initialisation nor a short prompt, nor what one form alone can compute."""
    device = HOPPER._replace(not_measured='')
    assert choose(None, USUAL, device) == CUDNN
    dense = LARGE._replace(num_slots=0, **NOT_CUDNN)
    assert choose(None, dense, device) == XLA
    with pytest.raises(AssertionError, match='measured'):
        choose(None, LARGE, device)


def test_other_accelerators_run_xla():
    """No kernel of ours is one of a TPU; what is not CUDA's has no cuDNN."""
    tpu = Device('tpu', 'TPU v5')
    assert choose(None, USUAL, tpu) == XLA
    with pytest.raises(ValueError, match='platform tpu must be a GPU'):
        choose('pallas', USUAL, tpu)
    assert choose(None, USUAL, Device('gpu', 'gfx942')) == XLA
    assert choose('pallas', USUAL, Device('gpu', 'gfx942')) == Parts('xla', 'pallas')
    old = Device('gpu', 'NVIDIA T4', (7, 5))
    assert choose(None, USUAL, old) == XLA and '7.5 must be 8.0' in backends.log_lines()[-1]


class Gpu:
    """What is asked of a device of JAX."""

    platform, device_kind, compute_capability = 'gpu', 'NVIDIA H200', '9.0'
    client = type('Client', (), {'platform_version': 'cuda\n13000'})


@pytest.fixture
def gpu(monkeypatch):
    """A process on a machine with a GPU."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(jax, 'devices', lambda: [Gpu()])
    monkeypatch.delenv('MODDEPTH_MEASURE', raising=False)


def test_this_device(gpu, monkeypatch):
    """One GPU of one process can be measured; nothing can of several, and none that shall not."""
    found = backends.this_device()
    assert found == Device('gpu', 'NVIDIA H200', (9, 0), 'cuda 13000', '', True)
    monkeypatch.setenv('MODDEPTH_MEASURE', '0')
    assert backends.this_device().not_measured == 'MODDEPTH_MEASURE=0'
    monkeypatch.setattr(jax, 'device_count', lambda: 8)
    assert '8 devices, and no shard_map' in backends.this_device().not_measured
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    assert '2 processes' in backends.this_device().not_measured


def test_several_gpus_are_measured_where_each_has_its_own_part(gpu, monkeypatch):
    """Inside of a shard_map over all axes the shapes are those of one device."""
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


def test_cudnn_that_is_not_installed_is_refused_here(monkeypatch):
    """Of a device of this process the library is looked at; a described one is taken to have it."""
    monkeypatch.setattr(cudnn.fused, 'cuda_versions', None)
    assert choose(None, USUAL, HOPPER) == CUDNN
    assert choose(None, USUAL, HOPPER._replace(local=True)) == XLA
    assert 'cuDNN is not detected' in backends.log_lines()[-1]


def test_hopper_kernels_take_one_dtype():
    """None is cast to another without a word."""
    with pytest.raises(ValueError, match='dtypes bfloat16, float16 must be one'):
        choose('mosaic_gpu', USUAL._replace(dtypes=('bfloat16', 'float16')), HOPPER)


def test_a_choice_is_logged_once(monkeypatch):
    """As a warning where the sequence is not cuDNN's."""
    lines = []
    monkeypatch.setattr(logging, 'warning', lines.append)
    for _ in range(2):
        choose('pallas', USUAL._replace(dtypes=('float32',)), HOPPER)
    assert backends.log_lines() == lines and len(lines) == 1
    start = 'depth_attention on NVIDIA H200: sequence by xla, depth by pallas; not cudnn: dtypes'
    assert lines[0].startswith(start)
