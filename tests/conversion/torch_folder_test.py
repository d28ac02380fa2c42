"""Folders with a modelling file: complete, read back to the bit, and the same model in PyTorch."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moddepth_jax.conversion import torch_folder
from moddepth_jax.conversion.families import read_config
from moddepth_jax.hparams import from_config
from moddepth_jax.inference.generate import generate
from moddepth_jax.model.transformer import Transformer, causal_routing
from tests.model import cases
from tests.model.cases import parameters

SEPARATOR = 7
IDS = {'bos_token_id': SEPARATOR, 'eos_token_id': [SEPARATOR]}
EXPRESSED = [
    name
    for name, (knobs, _) in cases.CASES.items()
    if knobs.get('model.depth.stream') in (None, *torch_folder.CHOICES['depth.stream'])
    and knobs.get('model.routing.router') != 'random'
    and knobs.get('model.routing.layers') != 'loops'
]
LENGTH = 24


@pytest.fixture(scope='module')
def exported(tiny_config, tmp_path_factory):
    """exported(case) -> the model of a case, and a folder of it with documents and few places."""

    def export(name):
        model = cases.build(tiny_config, name)
        folder = tmp_path_factory.mktemp('folder')
        torch_folder.export_model(folder, model.hparams, model.variables, 'float32', IDS)
        return model, folder

    return export


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # of torch and transformers
@pytest.mark.parametrize('name', EXPRESSED)
def test_pytorch_gives_the_same_logits(name, exported):
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    model, folder = exported(name)
    there = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens_BT = cases.TOKENS_BT
    with torch.no_grad():
        found = there(torch.tensor(tokens_BT)).logits.numpy()
    segments = 1 + np.cumsum(tokens_BT == SEPARATOR, axis=1)
    expected, _ = model(tokens_BT, segments)
    assert np.abs(found - expected).max() < 1e-4 < 0.1 < expected.std()
