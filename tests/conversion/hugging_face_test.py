"""Imported checkpoints of each family have the logits of transformers, and export unchanged."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moddepth_jax.conversion.families import FAMILIES, knobs_of, read_config
from moddepth_jax.conversion.hugging_face import exact_dtype, export_params, import_params
from moddepth_jax.hparams import from_config
from moddepth_jax.model.transformer import Transformer
from moddepth_jax.training.checkpoint import state_sha256
from tests.data.prepared_text import refusal

GOLDEN = pathlib.Path(__file__).parent / 'golden'
NAMES = {path.name: 'float32' for path in sorted(GOLDEN.iterdir())}
NAMES |= {'llama_tied': 'bfloat16', 'qwen2': 'bfloat16'}  # both in several files
FILE = 'model.safetensors'


@pytest.fixture(scope='module')
def imported(tiny_config):
    """Hyper-parameters, parameters and dtype of each golden folder."""

    def load(name):
        knobs = knobs_of(read_config(GOLDEN / name), name)
        hparams = from_config(tiny_config(**{f'model.{k}': value for k, value in knobs.items()}))
        return hparams, *import_params(GOLDEN / name, hparams)

    return {name: load(name) for name in NAMES}


@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_transformers(name, imported):
    """On the golden tokens, to 1e-5; each of their values differs from the others by far more."""
    hparams, params, dtype = imported[name]
    golden = np.load(GOLDEN / name / 'golden.npz')
    logits_BTV, _ = jax.jit(Transformer(hparams).apply)({'params': params}, golden['tokens'])
    assert np.abs(logits_BTV - golden['logits']).max() < 1e-5 < 0.1 < golden['logits'].std()
    assert dtype == NAMES[name]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype('float32')}


def test_each_family_has_golden_logits():
    assert {read_config(GOLDEN / name)['model_type'] for name in NAMES} == FAMILIES.keys()


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('max_bytes', [10**9, 15_000])
def test_in_out_in_again_is_bit_equal(name, max_bytes, imported, tmp_path):
    """Parameters and dtype come back bit for bit, from one file or several."""
    hparams, params, dtype = imported[name]
    export_params(tmp_path, hparams, params, dtype, max_bytes=max_bytes)
    assert (tmp_path / FILE).exists() == (max_bytes == 10**9)
    if max_bytes == 10**9 and (GOLDEN / name / FILE).exists():
        assert (tmp_path / FILE).read_bytes() == (GOLDEN / name / FILE).read_bytes()
    again, dtype_again = import_params(tmp_path, hparams)
    assert (state_sha256(again), dtype_again) == (state_sha256(params), dtype)


def test_a_dtype_is_exact_if_it_holds_all_numbers(imported):
    """Regression: trained float32 parameters of a bfloat16 checkpoint were rounded at export."""
    for name in ('llama', 'llama_tied'):
        assert exact_dtype(imported[name][1], 'bfloat16') == NAMES[name]
    assert exact_dtype({'a': np.float32([1, 2**-20])}, 'float16') == 'float16'
    for number in (2**-30, 1e6):
        assert exact_dtype({'a': np.float32([1, number])}, 'float16') == 'float32'


@pytest.mark.parametrize(
    ('shapes', 'words'),
    [
        ({'model.norm.weight': None}, 'lacks the tensor model.norm.weight; its config'),
        (
            {'model.layers.2.x': 3},
            "has a tensor 'model.layers.2.x'; the model of its",
        ),
        (
            {'lm_head.weight': (16, 270)},
            'lm_head.weight has shape [16, 270]; its config.json needs [270, 16]',
        ),
    ],
    ids=['missing', 'extra', 'transposed'],
)
def test_tensors_of_another_model_are_refused(shapes, words, imported, tmp_path):
    tensors = load_file(GOLDEN / 'llama' / FILE)
    for name, shape in shapes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.ones(shape, np.float32)
    save_file(tensors, tmp_path / FILE)
    assert words in refusal(import_params, tmp_path, imported['llama'][0])


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(imported, tmp_path):
    """So may the rotary frequencies of old checkpoints; another head is refused."""
    hparams, params, _ = imported['llama_tied']
    for file in (GOLDEN / 'llama_tied').glob('model*'):
        shutil.copy(file, tmp_path)
    tensors = {}
    for file in tmp_path.glob('*.safetensors'):
        tensors |= load_file(file)
        file.unlink()
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(2, np.float32)
    save_file(tensors, tmp_path / FILE)
    assert state_sha256(import_params(tmp_path, hparams)[0]) == state_sha256(params)
    tensors['lm_head.weight'][3, 4] += 1
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match='lm_head.weight differs from model.embed_tokens.weight'):
        import_params(tmp_path, hparams)
