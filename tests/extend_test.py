"""The examples of docs/extend.md, docs/library.md and README.md run as the pages say."""

import contextlib
import functools
import gzip
import importlib.util
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas import backends, depth_attention
from moddepth_jax.analysis import block_stats
from moddepth_jax.data import readers
from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.model.decoding import decode_step, prefill, unroll
from moddepth_jax.model.flops import forward_breakdown
from moddepth_jax.model.own_choices import check_own_choices
from moddepth_jax.model.transformer import Transformer
from tests import documented

depth_attention_module = sys.modules['kernels_pallas.depth_attention']
EXTEND, LIBRARY, README = (
    documented.files(documented.read(name))
    for name in ('docs/extend.md', 'docs/library.md', 'README.md')
)
SMALL = {
    'model.num_layers': 3,
    'model.d_model': 16,
    'model.head_dim': 4,
    'model.d_ff': 24,
    'data.sequence_length': 16,
}
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 16))


@pytest.fixture
def load(tmp_path):
    """Return load(text): a module with that text."""

    def run(text):
        path = tmp_path / 'example.py'
        path.write_text(text)
        spec = importlib.util.spec_from_file_location('example', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return run


def hparams_of(module, **changes):
    config = module.get_config()
    config.update_from_flattened_dict(SMALL | changes)
    return from_config(config)


def test_examples_are_one_short_file_each():
    for name, text in EXTEND.items():
        assert len([line for line in text.splitlines() if line.strip()]) <= 40, name


def test_router_of_the_page_routes(load):
    """Its top C are selected, its threshold is tracked, and it adds no parameter."""
    module = load(EXTEND['peak.py'])
    hparams = hparams_of(module, **{'model.routing.capacity': 0.25})
    assert hparams.model.tracks_threshold and causal_routing(hparams) == 'threshold'
    model = Transformer(hparams)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    assert 'router' not in str(jax.tree.map(jnp.shape, variables['params']))
    _, records = jax.jit(model.apply)(variables, TOKENS)
    assert (records.routing.selected_BT.sum(-1) == 4).all()
    assert (records.routing.scores_BT >= 1).all()
    assert forward_breakdown(hparams, 1, 16)['router'] == 0


SEES_OTHERS = 'depends on other tokens, so no loss is causal; must depend on its own'


@pytest.mark.parametrize(
    'scores, error',
    [
        ('x_BTD[..., 0]', None),
        ("x_BTD @ self.param('w', lambda *_: jnp.zeros(x_BTD.shape[-1]))", None),
        ('x_BTD[..., 0] - x_BTD[:, ::-1, 0]', SEES_OTHERS),
        ("x_BTD[..., 0] * (1 + self.param('w', lambda *_: 0.0) * x_BTD.mean())", SEES_OTHERS),
        ('x_BTD[..., 0] / jnp.where(x_BTD[..., 1] > 0, 1, jnp.nan)', 'some scores are NaN; must'),
        ("jnp.log(2 - self.param('p', lambda *_: 1.5)) + x_BTD[..., 0]", None),
        ('(x_BTD[..., 0] > 0).astype(int)', None),
        ('x_BTD[..., 0].astype(jnp.bfloat16)', 'returned bfloat16 scores.*; must be float32'),
        ('x_BTD', r'returned scores of shape \(1, 16, 16\) for x of \(1, 16, 16\); must be \[B, T'),
    ],
)
def test_router_of_a_config_scores_each_token_alone(load, scores, error):
    """Also one whose initial parameters hide that it sees other tokens. Scores are float32."""
    text = EXTEND['peak.py'].replace('import jax', 'import flax\nimport jax', 1)
    text = text.replace('    def __call__', '    @flax.linen.compact\n    def __call__')
    hparams = hparams_of(load(re.sub('return jnp.abs.*', f'return {scores}', text)))
    expected = pytest.raises(ValueError, match=f"model.routing.router='peak': .*{error}")
    with expected if error else contextlib.nullcontext():
        check_own_choices(hparams)


@pytest.mark.parametrize(
    'old, new, error',
    [
        ('', '', None),
        ('depth.slots[0]', 'depth.slots[0].mean(axis=1, keepdims=True)', SEES_OTHERS),
        ('return x_BTD, None', 'return x_BTD[:, ::-1], None', SEES_OTHERS),
        ('has_ends', 'enter = classmethod(lambda *a: a[-1][:, ::-1]); has_ends', SEES_OTHERS),
        ('(y_BTD,) if', '(y_BTD.at[:, 1:].add(y_BTD[:, :-1]),) if', SEES_OTHERS),
    ],
)
def test_stream_of_a_config_uses_no_other_tokens(load, old, new, error):
    """Also one that reads them with a weight that starts at 0."""
    text = EXTEND['first.py']
    assert old in text
    hparams = hparams_of(load(text.replace(old, new)))
    expected = pytest.raises(ValueError, match=f"model.depth.stream='first': .*{error}")
    with expected if error else contextlib.nullcontext():
        check_own_choices(hparams)


@pytest.mark.parametrize('name', ['peak.py', 'first.py'])
def test_choice_must_have_its_base_class(load, name):
    text = re.sub(r'class (\w+)\(\w+\)', r'class \1', EXTEND[name])
    with pytest.raises(ValueError, match=r'^model\.\S+: \w+ must be a subclass of moddepth_jax\.'):
        load(text)


def test_stream_of_the_page_scans_unrolls_and_decodes(load):
    """Scanned, unrolled and decoded layers have equal logits, the first two equal gradients."""
    module, results = load(EXTEND['first.py']), []
    for layer_loop in ('scan', 'unrolled'):
        knobs = {'model.layer_loop': layer_loop, 'model.routing.router': 'none'}
        hparams = hparams_of(module, **knobs)
        model = Transformer(hparams)
        params = jax.jit(model.init)(jax.random.key(0), TOKENS)['params']
        assert sum('weight' in str(path) for path, _ in jax.tree.leaves_with_path(params)) == 1
        params = jax.tree.map(lambda leaf: leaf + 0.1, params)

        def loss(params, model=model):
            logits_BTV, _ = model.apply({'params': params}, TOKENS)
            return jnp.mean(jax.nn.logsumexp(logits_BTV**2, axis=-1)), logits_BTV

        gradients, logits_BTV = jax.jit(jax.grad(loss, has_aux=True))(params)
        results.append((logits_BTV, gradients))
    for scanned, unrolled in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(scanned, unrolled, rtol=1e-4, atol=1e-5)
    weight = results[0][1]['stack']['run_1']['layer_0']['stream']['weight']
    assert weight.shape == (3,) and (weight != 0).all()
    parts = unroll({'params': params}, hparams, 'dense')
    options = {'hparams': hparams, 'routing': 'dense'}
    first = functools.partial(prefill, capacity=16, routed_capacity=None, **options)
    _, cache = jax.jit(first)(parts, TOKENS[:, :15], np.ones((2, 15), int))
    begins_B, active_B = jnp.zeros(2, bool), jnp.ones(2, bool)
    step = jax.jit(functools.partial(decode_step, **options))
    last_BV, _, _ = step(parts, cache, jnp.array(TOKENS[:, 15]), begins_B, active_B)
    np.testing.assert_allclose(last_BV, logits_BTV[:, 15], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('traced', [False, True])
def test_backend_of_the_page_is_the_equation(tmp_path, monkeypatch, traced):
    """Outputs and gradients equal those of XLA, with hidden and unwritten slots."""
    (tmp_path / 'plain.py').write_text(EXTEND['kernels_pallas/plain.py'])
    monkeypatch.setattr(kernels_pallas, '__path__', [*kernels_pallas.__path__, str(tmp_path)])
    row = backends.Backend('depth', 'plain', 'plain', 'plain', 'gpu')
    monkeypatch.setitem(backends.DEPTH, 'plain', row)
    monkeypatch.setattr(depth_attention_module, 'IMPLEMENTATIONS', ('plain', 'xla'))
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, 6, 4, 8), *[(2, 6, 2, 8)] * 2, *[(3, 2, 6, 2, 8)] * 2]
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    hidden_LBR = np.ones((3, 2, 6), bool)
    hidden_LBR[1, :, 2:4] = False

    def run(name, *arrays):
        q, k, v, k_depth, v_depth = arrays
        slots = {'k_depth_LBRKH': k_depth, 'v_depth_LBRKH': v_depth, 'slot_mask_LBR': hidden_LBR}
        slots |= {'num_slots': jnp.int32(2) if traced else 2, 'slot_window': 2}
        return jnp.sum(jnp.sin(depth_attention(q, k, v, **slots, implementation=name)))

    found, right = (
        jax.jit(jax.value_and_grad(functools.partial(run, name), argnums=(0, 1, 2, 3, 4)))(*arrays)
        for name in ('plain', 'xla')
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, right)


def test_measure_of_the_page_is_registered(load, monkeypatch):
    monkeypatch.setattr(block_stats, 'MEASURES', {})
    load(EXTEND['overlap.py'])
    (measure,) = block_stats.MEASURES.values()
    selected_RN = np.array([[True, True, False, False], [True, False, True, False]])
    for layers, value in (((1, 3), 0.25), ((), None)):
        model = types.SimpleNamespace(routed_layers=layers)
        hparams = types.SimpleNamespace(model=model)
        assert measure(types.SimpleNamespace(hparams=hparams, selected_RN=selected_RN)) == value


def test_reader_of_the_page_reads_every_row(load, monkeypatch, tmp_path):
    monkeypatch.setattr(readers, 'FORMATS', dict(readers.FORMATS))
    load(EXTEND['csv_reader.py'])
    text = 'id,text\r\n1,"two\nlines"\r\n2,one\r\n'
    (tmp_path / 'a.csv').write_text(text, newline='')
    with gzip.open(tmp_path / 'b.csv.gz', 'wt', newline='') as file:
        file.write(text)
    for name in ('a.csv', 'b.csv.gz'):
        rows = list(readers.read_rows(tmp_path / name, name, 'text'))
        assert [row.text for row in rows] == [b'two\nlines', b'one']
    row = next(readers.read_rows(tmp_path / 'a.csv', 'a.csv', 'body'))
    assert str(row.text).endswith("a.csv, row 1: no field 'body'; set data.text_field")


@pytest.mark.parametrize('name', LIBRARY | README)
def test_examples_of_the_library_run(load, name, capsys):
    load((LIBRARY | README)[name])
    printed = capsys.readouterr().out
    assert printed
    if name.startswith('routed'):
        assert printed.split() == ['[4', '4]']
