"""What computes an attention: what was asked for, what fits, or one line that says why nothing."""

import jax
import numpy as np
import pytest
from absl import logging

from kernels_pallas import choice, cudnn, depth_attention
from kernels_pallas.choice import choose
from kernels_pallas.joint import Parts
from moddepth_jax.hparams.model import ATTENTION
from tests.kernels.cases import USUAL


class Gpu:
    """What choose asks of a device."""

    platform = 'gpu'

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.fixture(params=['9.0', '8.0', '10.0'])
def gpu(request, monkeypatch):
    """A machine whose GPU has that compute capability, and a cuDNN that fits."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(jax, 'devices', lambda: [Gpu(request.param)])
    monkeypatch.setattr(cudnn.fused, 'check_cudnn_version', lambda: 91000)
    return request.param


def test_model_knob_names_every_implementation():
    assert ('auto', *choice.IMPLEMENTATIONS) == ATTENTION


def test_cpu_runs_xla_unless_asked_otherwise():
    """Kernels that are asked for by name on a CPU run interpreted."""
    assert choose(None, USUAL) == choose('xla', USUAL) == Parts()
    assert choose('pallas', USUAL) == Parts('xla', 'pallas', False, True)


def test_gpu_runs_the_first_that_fits(gpu):
    """Hopper kernels on Hopper alone; float32 by those that take it."""
    depth = 'mosaic_gpu' if gpu == '9.0' else 'pallas'
    assert choose(None, USUAL) == Parts('cudnn', depth)
    assert choose(None, USUAL._replace(segments=True)) == Parts('xla', depth)
    assert choose('xla', USUAL) == Parts()
    assert choose(None, USUAL._replace(dtypes=('float32',))) == Parts('xla', 'pallas')
    if gpu != '9.0':
        with pytest.raises(ValueError, match=f'capability {gpu} must be 9.x.*: .*xla, pallas'):
            choose('mosaic_gpu', USUAL)


def test_several_gpus_run_xla(gpu, monkeypatch):
    """No kernel is partitioned yet, and none may gather the slots of all devices unasked."""
    monkeypatch.setattr(jax, 'device_count', lambda: 8)
    assert choose(None, USUAL) == Parts('cudnn', 'xla')
    assert choose('pallas', USUAL) == Parts('cudnn', 'pallas')


def test_float32_sequences_are_not_given_to_cudnn(gpu):
    assert choose('pallas', USUAL._replace(dtypes=('float32',))).sequence == 'xla'


def test_other_accelerators_run_xla(monkeypatch):
    """No kernel of ours is one of a TPU; what is not CUDA's has no cuDNN."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
    assert choose(None, USUAL) == Parts()
    with pytest.raises(ValueError, match='platform tpu must be a GPU'):
        choose('pallas', USUAL)
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    for capability in ('gfx942', '7.5'):
        monkeypatch.setattr(jax, 'devices', lambda capability=capability: [Gpu(capability)])
        assert choose(None, USUAL) == Parts('xla', 'pallas')


def test_hopper_kernels_take_one_dtype(monkeypatch):
    """None is cast to another without a word."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(choice, '_capability', lambda: '9.0')
    with pytest.raises(ValueError, match='dtypes bfloat16, float16 must be one'):
        choose('mosaic_gpu', USUAL._replace(dtypes=('bfloat16', 'float16')))


@pytest.mark.parametrize('name', ['mosaic_gpu', 'mosaic_gpu_fused'])
def test_hopper_kernels_refuse_what_they_cannot_do(name):
    """In one line with the value, and what can."""
    q, slots = np.zeros((1, 4, 2, 8), np.float32), np.zeros((3, 1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match='these can: reference, xla, pallas') as error:
        depth_attention(q, q, q, slots, slots, implementation=name)
    assert '\n' not in str(error.value)


def test_a_choice_is_logged_once(gpu, monkeypatch):
    lines = []
    monkeypatch.setattr(logging, 'warning', lines.append)
    monkeypatch.setattr(choice, '_told', [])
    choice._log.cache_clear()
    for _ in range(2):
        choose('pallas', USUAL._replace(dtypes=('float32',)))
    assert choice.told() == lines and len(lines) == 1
    assert lines[0].startswith('depth_attention on gpu: sequence by xla, depth by pallas; not cudn')
