"""The comparison with PyTorch: both train the same model, or there is no result."""

import json

import numpy as np
import pytest

from moddepth_jax.benchmarks import jax_steps, pytorch
from moddepth_jax.benchmarks.pytorch import check_losses, parse_shape
from tests.data.prepared_text import refusal

TINY = '2x16x2x64x96x50'


def test_both_processes_read_one_folder(tmp_path):
    """It has the initial model and a batch whose labels are the next tokens; the loss falls."""
    shape = parse_shape(TINY)
    parameters = pytorch.write_folder(tmp_path, shape)
    assert parameters == 2 * 50 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    inputs_BT, labels_BT = np.load(tmp_path / 'tokens.npy')
    assert inputs_BT.shape == (2, 16) and (inputs_BT[:, 1:] == labels_BT[:, :-1]).all()
    setting = json.loads((tmp_path / 'setting.json').read_text())
    assert setting['adamw']['betas'] == [0.9, 0.98] and setting['clip_norm'] == 1.0
    assert (tmp_path / 'model.safetensors').exists()
    found = jax_steps.train(tmp_path)
    assert len(found['losses']) == len(found['seconds']) == jax_steps.STEPS
    assert abs(found['losses'][0] - np.log(50)) < 0.2
    assert (np.diff(found['losses']) < 0).all()


def test_other_losses_are_no_result():
    """The first step that differs is named; a rounding error is none."""
    check_losses([3.0, 2.0], [3.0, 2.0001])
    text = refusal(check_losses, [3.0, 2.0, 1.0], [3.0, 2.1, 1.0])
    assert 'loss of step 2, 2.000000 in JAX: must be that of PyTorch, 2.100000' in text
    assert 'step 1' in refusal(check_losses, [float('nan')], [3.0])


def test_a_process_that_fails_is_named_with_its_last_line(tmp_path):
    """Here the folder is empty."""
    text = refusal(pytorch.train_in, 'jax', tmp_path)
    assert text.startswith('training in JAX failed: exit status 1: FileNotFoundError: ')


@pytest.mark.parametrize('text', ['16x256', '1x2x3x64x5x0', '1x2x3x60x5x6', '1x2x3xax5x6'])
def test_shapes_are_checked(text):
    """The error shows a shape that is right."""
    right = 'must be six numbers such as 16x256x6x128x384x257, the width a multiple of 64'
    assert f'--shapes={text}: {right}' in refusal(parse_shape, text)


def test_pytorch_is_needed(monkeypatch):
    """Its absence is said before anything runs."""
    monkeypatch.setattr(pytorch.importlib.util, 'find_spec', lambda name: None)
    right = 'the package torch is not installed; run: pip install torch transformers'
    assert refusal(lambda: next(pytorch.pytorch())) == f'pytorch: {right}'


def test_a_shape_that_fails_leaves_the_others(monkeypatch, capsys):
    """Its reason is printed, and is in the results."""

    def compare(shape, repeats):
        if shape.rows == 2:
            raise ValueError('loss of step 2')
        return {'jax_seconds': [repeats, 1.0]}

    monkeypatch.setattr(pytorch, '_compare', compare)
    monkeypatch.setattr(pytorch.importlib.util, 'find_spec', lambda name: name)
    monkeypatch.setattr(pytorch.importlib.metadata, 'version', lambda name: '1')
    ((result, (table,)),) = pytorch.pytorch(shapes=[TINY, '3x16x2x64x96x50'], repeats=3)
    failed, done = result['rows']
    assert failed['failed'] == 'loss of step 2' and failed['rows'] == 2
    assert done['jax_seconds'] == [3, 1.0] and done['rows'] == 3
    assert table.lines['JAX, ms a step'] == ['loss of step 2', '2000']
    assert capsys.readouterr().err == f'{TINY}: loss of step 2\n'


@pytest.mark.slow
def test_pytorch_has_the_same_losses():
    """To 1e-4 in each step, as `check_losses` demands; the table shows medians of the rounds."""
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    ((result, (table,)),) = pytorch.pytorch(shapes=[TINY], repeats=2)
    (row,) = result['rows']
    assert row['length'] == 16 and len(row['jax_seconds']) == len(row['torch_seconds']) == 2
    assert 0 < row['time_ratio_range'][0] <= row['time_ratio'] <= row['time_ratio_range'][1]
    assert {'torch', 'transformers', 'jax'} <= result['versions'].keys()
    assert 'time, JAX / PyTorch' in table.lines and '2, 16, 2, 64, 96, 50' in table.heads
