"""Folders with a modelling file are complete, exact, and the same model in PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moddepth_jax.conversion import torch_folder
from moddepth_jax.conversion.families import knobs_of, read_config
from moddepth_jax.conversion.hugging_face import export_params
from moddepth_jax.conversion.special_tokens import suppress_unknown_ids
from moddepth_jax.hparams import from_config
from moddepth_jax.inference.generate import generate
from moddepth_jax.model.adapters import has_adapters, merge_adapters
from moddepth_jax.training.checkpoint import state_sha256
from tests.data.prepared_text import refusal
from tests.model import cases


class Words:
    """A tokenizer with fewer ids than the model; one id has no text."""

    separator, stops = 7, (7,)
    token_bytes_V = np.where(np.arange(90) == 80, 0, 1)


IDS = {'bos_token_id': Words.separator, 'eos_token_id': list(Words.stops)}
EXPRESSED = [
    name
    for name, (knobs, _) in cases.CASES.items()
    if knobs.get('model.depth.stream') in (None, *torch_folder.CHOICES['depth.stream'])
    and knobs.get('model.routing.router') != 'random'
    and knobs.get('model.routing.layers') != 'loops'
    and knobs.get('model.routing.part', 'block') == 'block'
    and not {'model.loop_norms', 'model.loop_embeddings', 'model.loop_exit_threshold'} & {*knobs}
]
STORED = (  # leaves of every kind, of scalars, looped and gathered layers, and averages
    'mod and moda, own slots',
    'staged, experts choose',
    'straight through, threshold',
    'embedding residual, values',
    'looped threshold',
    'integrated',  # layers that share arrays
)
FAST = ('staged, experts choose', 'looped threshold', 'integrated')
GENERATED = (
    *('predictor', 'scaled rope', 'threshold', 'aux_loss grows', 'position', 'masked'),
    *('straight through, predictor', 'mod and moda', 'mod and moda, block slots', 'moda unrotated'),
    *('value residual', 'value attention grows', 'embedding residual', 'value embeddings, moda'),
    *('looped', 'looped moda', 'integrated', 'row capacity', 'experts choose', 'staged'),
)
CONTEXT = 40


def export(folder, hparams, variables):
    """Write a model, its adapters merged."""
    stack = merge_adapters(variables['params']['stack'], hparams.model)
    variables = variables | {'params': variables['params'] | {'stack': stack}}
    hparams = hparams.without_adapters
    torch_folder.export_model(folder, hparams, variables, 'float32', IDS)
    suppress_unknown_ids(folder, hparams.model.vocab_size, Words(), IDS)
    return folder


@pytest.mark.parametrize('name', cases.parameters(FAST, STORED))
def test_each_parameter_is_stored_once_and_comes_back(name, tiny_config, tmp_path):
    """The folder has all numbers of the run once; knobs and bits are restored from it.

    An export in another dtype rounds parameters, but not averages.
    """
    hparams = cases.small_hparams(tiny_config, cases.SIZES, cases.CASES[name][0])
    variables = cases.random_variables(hparams, cases.TOKENS_BT)
    export(tmp_path, hparams, variables)
    names = {path.name for path in tmp_path.iterdir()}
    files = {'config.json', 'generation_config.json', 'model.safetensors'}
    assert names == files | set(torch_folder.MODULES)
    tensors, model = load_file(tmp_path / 'model.safetensors'), hparams.model
    out = model.d_model, model.num_heads * model.head_dim
    assert tensors['layers.0.attention.out.weight'].shape == out
    stored = np.concatenate([array.ravel() for array in tensors.values()])
    ours = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(variables)])
    np.testing.assert_array_equal(np.sort(stored), np.sort(ours))
    config = tiny_config(**{'data.sequence_length': hparams.data.sequence_length})
    with config.ignore_type():
        config.model.update_from_flattened_dict(knobs_of(read_config(tmp_path), 'config.json'))
    again = from_config(config)
    assert again.model == hparams.model
    params, averages, dtype = torch_folder.import_model(tmp_path, again)
    assert state_sha256(params) == state_sha256(variables['params']) and dtype == 'float32'
    assert state_sha256(averages) == state_sha256(variables.get('averages', {}))
    torch_folder.export_model(tmp_path, hparams, variables, 'bfloat16', IDS)
    _, averages, dtype = torch_folder.import_model(tmp_path, again)
    assert state_sha256(averages) == state_sha256(variables.get('averages', {}))
    assert dtype == 'bfloat16'


def test_an_import_may_have_new_adapters(tiny_config, tmp_path):
    """Regression: docs/convert.md had such a command for --from_hf, which refused it."""
    hparams = cases.small_hparams(tiny_config, cases.SIZES, cases.ADAPTERS)
    plain = hparams.without_adapters
    variables = cases.random_variables(plain, cases.TOKENS_BT)
    export(tmp_path, plain, variables)
    params, _, _ = torch_folder.import_model(tmp_path, hparams)
    assert has_adapters(params)
    merged = params | {'stack': merge_adapters(params['stack'], hparams.model)}
    assert state_sha256(merged) == state_sha256(variables['params'])


ROUTED = {'model.routing.router': 'learned'}


@pytest.mark.parametrize(
    ('knobs', 'words'),
    [
        (
            {'model.depth.stream': 'mudd'},
            "depth.stream='mudd': modeling_moddepth.py has no such st",
        ),
        (cases.ATTENTION, "depth.stream='attention': modeling_moddepth.py has no such stream; it"),
        ({'model.routing.router': 'random'}, "routing.router='random': modeling_moddepth.py has "),
        (cases.LOOPED | cases.OWN_NORMS, "loop_norms='own': modeling_moddepth.py has only shar"),
        (cases.LOOPED | cases.OF_LOOPS, "loop_embeddings='learned': modeling_moddepth.py has only"),
        (
            ROUTED | cases.OF_MLP,
            "routing.part='mlp': modeling_moddepth.py has no such part; it has block",
        ),
        (cases.RECURSIONS, "routing.layers='loops': modeling_moddepth.py has no routed loops; it "),
    ],
    ids=str,
)
def test_unsupported_models_are_refused(knobs, words, tiny_config, tmp_path):
    """In one line, before anything is written."""
    hparams = cases.small_hparams(tiny_config, knobs)
    given = tmp_path, hparams, {}, 'float32', IDS
    assert refusal(torch_folder.kind_of, hparams.model).startswith(f'model.{words}')
    assert refusal(torch_folder.export_model, *given).startswith(f'model.{words}')
    assert not list(tmp_path.iterdir())


def test_models_of_a_family_need_no_modelling_file(tiny_config):
    """For other models, the reason says why they need one."""
    assert torch_folder.kind_of(from_config(tiny_config()).model) == ('llama', '')
    for knobs, words in (
        (ROUTED, "model.routing.router='learned': no family has routed blocks"),
        ({'model.norm_placement': 'post'}, "model.norm_placement='post': no family has it"),
    ):
        kind, why = torch_folder.kind_of(from_config(tiny_config(**knobs)).model)
        assert kind == 'moddepth' and why.startswith(words)


def test_a_rule_without_its_averages_is_refused(tiny_config, tmp_path):
    hparams = cases.small_hparams(tiny_config, cases.SIZES, cases.CASES['threshold'][0])
    params = cases.random_variables(hparams, cases.TOKENS_BT)['params']
    with pytest.raises(ValueError, match="routing='threshold': needs averages of scores"):
        export(tmp_path, hparams, {'params': params})


def test_adapters_that_are_not_merged_are_refused(tiny_config, tmp_path):
    """Regression: adapters were dropped silently, and what they had learned was lost."""
    hparams = cases.small_hparams(tiny_config, cases.SIZES, cases.ADAPTERS)
    for call in (
        lambda: torch_folder.export_model(tmp_path, hparams, {}, 'float32', IDS),
        lambda: export_params(tmp_path, hparams, {}, 'float32'),
    ):
        with pytest.raises(ValueError, match='model.adapters.rank=3: must be 0; merge'):
            call()


@pytest.fixture(scope='module')
def in_pytorch():
    """in_pytorch(folder, ...) returns the model that transformers loads from it."""
    pytest.importorskip('torch')
    auto = pytest.importorskip('transformers').AutoModelForCausalLM
    return lambda folder, **how: auto.from_pretrained(folder, trust_remote_code=True, **how)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')  # of PyTorch and transformers
@pytest.mark.parametrize('name', EXPRESSED)
def test_pytorch_has_the_same_logits(name, tiny_config, in_pytorch, tmp_path):
    """To 1e-4 under the causal rule, for rows of several documents, also after padding."""
    import torch

    model = cases.build(tiny_config, name)
    there = in_pytorch(export(tmp_path, model.hparams, model.variables))
    tokens_BT, padding = cases.TOKENS_BT, 3
    expected_BTV, _ = model(tokens_BT, 1 + np.cumsum(tokens_BT == Words.separator, axis=1))
    with torch.no_grad():
        found_BTV = there(torch.tensor(tokens_BT)).logits.numpy()
        mask_BT = torch.tensor(np.pad(np.ones_like(tokens_BT), ((0, 0), (padding, 0))))
        padded_BT = torch.tensor(np.pad(tokens_BT, ((0, 0), (padding, 0)), constant_values=1))
        behind_BTV = there(padded_BT, attention_mask=mask_BT).logits[:, padding:].numpy()
    assert np.abs(found_BTV - expected_BTV).max() < 1e-4 < 0.1 < expected_BTV.std()
    assert np.abs(behind_BTV - expected_BTV).max() < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', GENERATED)
def test_pytorch_generates_the_same_tokens(name, tiny_config, in_pytorch, tmp_path):
    """20 greedy tokens of two prompts, of which one is padded, with a cache and without.

    Of one row, the cache of a routed block holds the tokens that it selects, and no others.
    """
    import torch

    model = cases.build(tiny_config, name)
    data = dataclasses.replace(model.hparams.data, sequence_length=CONTEXT)
    hparams = dataclasses.replace(model.hparams, data=data)
    there = in_pytorch(export(tmp_path, hparams, model.variables))
    there.generation_config.eos_token_id = None  # as stop=False
    prompts = [cases.TOKENS_BT[0, :5], cases.TOKENS_BT[1, :9]]
    prompts[1][4] = Words.separator
    expected = generate(
        model.variables, hparams, prompts, 20, temperature=0.0, tokenizer=Words(), stop=False
    )
    ids = np.array([np.pad(prompt, (9 - len(prompt), 0)) for prompt in prompts])
    mask = np.array([np.pad(np.ones_like(prompt), (9 - len(prompt), 0)) for prompt in prompts])
    inputs = {'input_ids': torch.tensor(ids), 'attention_mask': torch.tensor(mask)}
    lengths = []
    counter = there.register_forward_pre_hook(
        lambda _, __, given: lengths.append(given['input_ids'].shape[1]), with_kwargs=True
    )
    for use_cache in (True, False):
        found = there.generate(**inputs, max_new_tokens=20, do_sample=False, use_cache=use_cache)
        # Regression: transformers 5.24 renamed the cache, and each step read all tokens again.
        assert not use_cache or lengths == [9] + 19 * [1]
        for row, prompt, tokens in zip(found.numpy(), prompts, expected.tokens, strict=True):
            np.testing.assert_array_equal(row[9 - len(prompt) :], tokens)
    counter.remove()
    row_1T = torch.tensor(expected.tokens[1][None].astype(int))
    with torch.no_grad():
        cache = there(row_1T, use_cache=True).past_key_values
        steps = None
        for token_11 in row_1T.split(1, dim=1):
            steps = there(token_11, past_key_values=steps, use_cache=True).past_key_values
    places = zip(cache.blocks, steps.blocks, there.config.block_order, strict=True)
    for of_pass, of_steps, block in places:
        num_tokens = of_pass.sides[0].shape[1]
        assert of_steps.sides[0].shape[1] == num_tokens
        assert (num_tokens < row_1T.shape[1]) == there.config.blocks[block]['routed']


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_pytorch_refuses_unsupported_arguments(tiny_config, in_pytorch, tmp_path):
    import torch

    model = cases.build(tiny_config, 'mod and moda')
    there = in_pytorch(export(tmp_path, model.hparams, model.variables))
    row_1T = torch.ones((1, 4), dtype=int)
    for given, words in (
        ({'input_ids': torch.ones((1, 17), dtype=int)}, 'a row of 17 tokens: must be at most 16'),
        ({'input_ids': row_1T, 'position_ids': row_1T}, 'position_ids: not supported'),
        ({'input_ids': row_1T, 'output_attentions': True}, 'output_attentions: not supported'),
        ({'input_ids': row_1T, 'attention_mask': row_1T[:, 1:]}, r'shape \[1, 3\]: must be \[rows'),
    ):
        with pytest.raises(ValueError, match=words):
            there(**given)
    loss = there(row_1T, labels=row_1T).loss
    loss.backward()
    assert there.layers[0].attention.query.weight.grad.abs().max() > 0 and np.isfinite(loss.item())


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_pytorch_trains_a_straight_through_router_and_does_not_round_thresholds(
    tiny_config, in_pytorch, tmp_path
):
    import torch

    model = cases.build(tiny_config, 'straight through, threshold')
    torch_folder.export_model(tmp_path, model.hparams, model.variables, 'bfloat16', IDS)
    there = in_pytorch(tmp_path, dtype='auto')
    averages = model.variables['averages']['thresholds_R']
    np.testing.assert_array_equal(there.thresholds_R.numpy(), averages)
    tokens_BT = torch.tensor(cases.TOKENS_BT)
    there(tokens_BT, labels=tokens_BT).loss.backward()
    layer = next(layer for layer in there.layers if layer.kind.routed)
    assert layer.mlp.w1.weight.dtype == torch.bfloat16
    assert layer.router.w.grad.abs().max() > 0
