"""Makes tests/model/golden/: tiny random models of public code of depth streams, and their logits.

python3.11 -m venv /tmp/public
/tmp/public/bin/pip install torch==2.13.0 transformers==4.45.2 einops numpy
/tmp/public/bin/python tests/model/make_golden.py FOLDER

FOLDER has clones of these repositories of github.com:

  lucidrains/hyper-connections      4775103
  Caiyun-AI/MUDDFormer              fc067b2
  Zcchill/Value-Residual-Learning   95652f6
  linkedin/Liger-Kernel             ead96b6
  hyq718/Depth-Attention            3bdad70
  karpathy/nanochat                 92d63d4
  KellerJordan/modded-nanogpt       e59ae87
  epfml/DenseFormer                 c99a623

Nothing of this project is imported. What the public code leaves open is that of Llama. Each file
but value_attention has `tokens` [2, 7], `logits` [2, 7, V], `weights` of the logits in the loss
mean(weights logits), the parameters by their public names, and as `d NAME` the gradients of the
loss. Every parameter is random. Models run in float64, and their numbers are rounded to float32
once. value_attention has no model: see `mixtures`.
"""

import ast
import importlib
import importlib.util
import math
import os
import pathlib
import sys
import types

import numpy as np
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama as llama

GOLDEN = pathlib.Path(__file__).parent / 'golden'
LAYERS, WIDTH, STREAMS, IDS = 3, 16, 4, 32
CONFIG = transformers.LlamaConfig(
    vocab_size=IDS,
    hidden_size=WIDTH,
    intermediate_size=16,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-12,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    attn_implementation='eager',
)


def _module(path):
    """Import the module in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _functions(path, *names, **known):
    """Return functions and classes of a file that cannot be imported, such as a test for GPUs.

    `known` are the names that it imports besides torch.
    """
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, 'name', None) in names]
    found = {'torch': torch} | known
    exec(compile(tree, str(path), 'exec'), found)
    return [found[name] for name in names]


class Float64(TorchFunctionMode):
    """Give float64 to public code that asks for float32, as norms and softmax do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        wider = {torch.float32: torch.float64}
        args = [wider.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args]
        if kwargs and 'dtype' in kwargs:
            kwargs = kwargs | {'dtype': wider.get(kwargs['dtype'], kwargs['dtype'])}
        return function(*args, **(kwargs or {}))


class Llama(nn.Module):
    """The parts of Llama. `sublayers`, a list of functions of x, are its blocks."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(IDS, WIDTH)
        self.layers = nn.ModuleList(llama.LlamaDecoderLayer(CONFIG, i) for i in range(LAYERS))
        self.norm = llama.LlamaRMSNorm(WIDTH, CONFIG.rms_norm_eps)
        self.lm_head = nn.Linear(WIDTH, IDS, bias=False)
        self.rotary = llama.LlamaRotaryEmbedding(config=CONFIG)

    def sublayers(self, tokens):
        """Return attention and mlp of each layer, each after its norm, without residual sums."""
        length = tokens.shape[1]
        positions = torch.arange(length)[None]
        hidden = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        angles = self.rotary(self.embed_tokens.weight, positions)
        for layer in self.layers:
            yield lambda x, layer=layer: layer.self_attn(
                layer.input_layernorm(x), attention_mask=hidden, position_embeddings=angles
            )[0]
            yield lambda x, layer=layer: layer.mlp(layer.post_attention_layernorm(x))


class Hyper(Llama):
    """Dynamic hyper-connections. The released code sums the streams; this takes their mean."""

    def __init__(self, code):
        super().__init__()
        public = _module(code / 'hyper-connections/hyper_connections/hyper_connections.py')
        begin, self.expand, self.reduce = public.get_init_and_expand_reduce_stream_functions(
            STREAMS, dim=WIDTH
        )
        self.connections = nn.ModuleList(begin(layer_index=i) for i in range(2 * LAYERS))

    def forward(self, tokens):
        x = self.expand(self.embed_tokens(tokens))
        for connection, sublayer in zip(self.connections, self.sublayers(tokens), strict=True):
            read, add = connection(x)
            x = add(sublayer(read))
        return self.lm_head(self.norm(self.reduce(x) / STREAMS))


class Static(Hyper):
    """The same with constant zeros as the scales of the part that depends on the token."""

    def __init__(self, code):
        super().__init__(code)
        for connection in self.connections:
            connection.norm = nn.Identity()
            for name in ('alpha_fn', 'alpha_scale', 'beta_fn', 'beta_scale'):
                parameter = connection._parameters.pop(f'dynamic_{name}')
                connection.register_buffer(f'dynamic_{name}', torch.zeros_like(parameter))


class Constrained(Llama):
    """Manifold-constrained hyper-connections, without the small numbers that the code adds.

    The code's Sinkhorn iterations begin and end differently from the paper's. The logits here are
    so small that both converge.
    """

    def __init__(self, code):
        super().__init__()
        path = code / 'Liger-Kernel/test/transformers/test_mhc.py'
        sinkhorn, self.weights = _functions(path, 'mhc_sinkhorn_ref', 'mhc_coeffs_ref')
        self.weights.__globals__['mhc_sinkhorn_ref'] = sinkhorn
        size = STREAMS**2 + 2 * STREAMS
        for name, shape in (('phi', (STREAMS * WIDTH, size)), ('b', (size,)), ('alpha', (3,))):
            each = (nn.Parameter(torch.zeros(shape)) for _ in range(2 * LAYERS))
            self.register_module(name, nn.ParameterList(each))

    def forward(self, tokens):
        x = self.embed_tokens(tokens)[:, :, None].expand(-1, -1, STREAMS, -1)
        options = {'tmax': 100, 'rms_eps': CONFIG.rms_norm_eps, 'pre_eps': 0.0, 'sinkhorn_eps': 0.0}
        for i, sublayer in enumerate(self.sublayers(tokens)):
            read, add, mix = self.weights(
                x, self.phi[i], self.b[i], *self.alpha[i], **options, post_mult=2.0
            )
            output = sublayer(torch.einsum('bts,btsd->btd', read, x))
            x = torch.einsum('btij,btjd->btid', mix, x) + add[..., None] * output[:, :, None]
        return self.lm_head(self.norm(x.mean(2)))


class Residual(Llama):
    """Attention residuals over the sums of `size` sublayers; full ones if it is 1."""

    size = 1

    def __init__(self, code):
        super().__init__()
        path = code / 'Liger-Kernel/test/transformers/test_attn_res.py'
        (self.mix,) = _functions(path, 'pytorch_attn_res')
        for name in ('query', 'scale'):
            each = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2 * LAYERS + 1))
            self.register_module(name, nn.ParameterList(each))

    def forward(self, tokens):
        sources = [self.embed_tokens(tokens)]

        def read(i):
            return self.mix(torch.stack(sources), self.query[i], self.scale[i], CONFIG.rms_norm_eps)

        for i, sublayer in enumerate(self.sublayers(tokens)):
            output = sublayer(read(i))
            if i % self.size:
                output = sources.pop() + output
            sources.append(output)
        return self.lm_head(self.norm(read(2 * LAYERS)))


class ResidualBlocks(Residual):
    """Sums of 5 sublayers: the second one begins at an mlp."""

    size = 5


class Average(Llama):
    """DenseFormer: after each block a weighted sum of its output and all earlier ones."""

    def __init__(self, code):
        super().__init__()
        self.averages = _module(code / 'DenseFormer/denseformer/denseformer.py').DWAModules(LAYERS)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        torch.set_default_dtype(x.dtype)  # of an empty tensor that the public code fills
        self.averages.init_accumulators(x)
        for i, sublayer in enumerate(self.sublayers(tokens)):
            x = x + sublayer(x)
            if i % 2:
                x = self.averages(x, i // 2)
        torch.set_default_dtype(torch.float32)
        return self.lm_head(self.norm(x))


class Values(nn.Module):
    """ResFormer's values (half and half), or SVFormer's: whole models of the released code."""

    def __init__(self, code, form):
        super().__init__()
        path = code / f'Value-Residual-Learning/src/modeling/modeling_llama_{form}.py'
        self.model = _module(path).LlamaForCausalLM(CONFIG)

    def forward(self, tokens):
        return self.model(tokens, use_cache=False).logits


class Mudd(nn.Module):
    """MUDD connections: the released model, with mlps of one width.

    Its queries, keys and values have their own norms, whose scales are shared here. Its rotary
    angles are rounded to bfloat16; these are not.
    """

    def __init__(self, code):
        super().__init__()
        folder = code / 'MUDDFormer/pytorch/muddformer'
        configuration = _module(folder / 'configuration_muddformer.py')
        public = _module(folder / 'modeling_muddformer.py')
        config = configuration.MUDDFormerConfig(
            block_size=64,
            vocab_size=IDS,
            n_layer=LAYERS,
            n_head=4,
            n_local_heads=4,
            dim=WIDTH,
            intermediate_size=16,
            norm_eps=CONFIG.rms_norm_eps,
            is_training=True,
        )
        self.model = public.MUDDFormer(config)
        for i, layer in enumerate(self.model.layers):
            plain = {'round128': False, 'scale_with_layer': False}
            layer.feed_forward = public.FeedForward(config, i, **plain)
            if i:
                scale = layer.attention_norms[0].weight
                for norm in layer.attention_norms[1:]:
                    norm.weight = scale
        self.model.setup_caches(2, 64)
        half = torch.arange(config.head_dim // 2).double() / (config.head_dim // 2)
        angles = torch.outer(torch.arange(64).double(), config.rope_base**-half)
        self.model.freqs_cis = torch.stack([angles.cos(), angles.sin()], -1)

    def forward(self, tokens):
        return self.model(tokens, return_tensor=True)


class Speedrun(nn.Module):
    """A released model with Llama's mlps. Its logits are taken before it bounds them."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        for block in model.transformer.h:
            block.mlp = llama.LlamaMLP(CONFIG)

    def forward(self, tokens):
        found = []
        hook = self.model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits))
        self.model(tokens, targets=tokens)
        hook.remove()
        return found[0]


def nanochat(code):
    """Value embeddings, and the embedded tokens before each block.

    Left out: what it adds from the previous token and subtracts of the middle layer.
    """
    os.environ['NANOCHAT_DTYPE'] = 'float32'
    sys.path.insert(0, str(code / 'nanochat'))
    public = importlib.import_module('nanochat.gpt')
    public.COMPUTE_DTYPE = torch.float64
    sizes = {'n_layer': LAYERS, 'n_head': 4, 'n_kv_head': 2, 'n_embd': WIDTH}
    config = public.GPTConfig(sequence_len=64, vocab_size=IDS, window_pattern='L', **sizes)
    with Float64():
        model = public.GPT(config, pad_vocab_size_to=IDS)
    for name in ('smear_gate', 'smear_lambda', 'backout_lambda'):
        delattr(model, name)
    model.smear_gate, model.smear_lambda = lambda x: x[..., :1], torch.zeros(1)
    model.backout_lambda = model.smear_lambda
    return Speedrun(model)


def modded_nanogpt(code):
    """The first layer's values with a learned weight, and the embedded tokens before each block.

    Its rotary angles are rounded to bfloat16; these are not.
    """
    names = 'GPT', 'Block', 'CausalSelfAttention', 'MLP', 'apply_rotary_emb'
    known = {'F': nn.functional, 'nn': nn, 'Rotary': Rotary}
    build, *_ = _functions(code / 'modded-nanogpt/train_gpt2.py', *names, **known)
    sizes = {'n_layer': LAYERS, 'n_head': 4, 'n_embd': WIDTH, 'vocab_size': IDS}
    return Speedrun(build(types.SimpleNamespace(**sizes)))


class Rotary(nn.Module):
    """The cosines and sines for the positions of x [B, T, heads, H], not rounded."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def forward(self, x):
        half = torch.arange(0, self.width, 2).double() / self.width
        angles = torch.outer(torch.arange(x.shape[1]).double(), 10000.0**-half)
        return angles.cos()[None, :, None], angles.sin()[None, :, None]


MODELS = {
    'hyper_connections': Hyper,
    'mhc': Constrained,
    'attention_residual': Residual,
    'value_residual': lambda code: Values(code, 'resformer'),
    'value_shared': lambda code: Values(code, 'svformer'),
    'mudd': Mudd,
    'hyper_static': Static,
    'nanochat': nanochat,
    'modded_nanogpt': modded_nanogpt,
    'average': Average,
    'attention_residual_blocks': ResidualBlocks,
}


def _spread(name, parameter):
    """Return (mean, standard deviation) of a parameter's values."""
    if 'norm' in name and parameter.ndim == 1:
        return 1.0, 0.2
    if 'alpha.' in name:
        return 1.0, 0.2
    if 'embed' in name:
        return 0.0, 1.0
    return 0.0, 0.05 if name.startswith('phi.') else 0.3


# Sources of Depth-Attention: each n-th layer from the first on, and the newest ones.
SOURCES = {'stride': (2, 0), 'recent': (3, 1)}


def mixtures(code):
    """Depth-Attention: the values of five layers, each of which can be a source of later ones.

    `q`, `k`, `v` [5, B, T, heads, H] are those of the layers after norms and RoPE. As in the
    released attention (`sdpa`, the one that supports grouped queries), the query of a layer is the
    mean of its group, its own key and value take part, and it stores the mixed values. The
    differences come before and after: that code rotates keys before their norm, and where values
    are mixed it attends without the mask and caches the unmixed values. For each of SOURCES the
    file has `values NAME` [5, B, T, K, H], and as `d ARRAY NAME` the gradients of sum(weights
    values).
    """
    path = 'Depth-Attention/src/llamafactory/model/modeling/modeling_llama_depth_attention.py'
    (mix,) = _functions(code / path, '_depth_attention_split_mix')
    rng, layers, batch, length, heads, width = np.random.default_rng(1), 5, 2, 3, 2, 4
    sizes = {'q': 3 * heads, 'k': heads, 'v': heads, 'weights': heads}
    shapes = {name: (layers, batch, length, size, width) for name, size in sizes.items()}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found = dict(arrays)
    for name, (stride, recent) in SOURCES.items():
        leaves = {key: torch.tensor(arrays[key], requires_grad=True) for key in 'qkv'}
        q, k, v = (leaf.transpose(2, 3) for leaf in leaves.values())
        q = q.unflatten(2, (heads, 3)).mean(3)
        stored = []
        for i in range(layers):
            seen = [j for j in range(i) if j % stride == 0 or j >= i - recent]
            values = v[i]
            if seen:
                sources = (torch.stack([side[j] for j in seen]) for side in (k, stored))
                values = mix(q[i], *sources, k[i], v[i], math.sqrt(width))
            stored.append(values)
        values = torch.stack(stored).transpose(2, 3)
        (values * torch.tensor(arrays['weights'])).sum().backward()
        found[f'values {name}'] = values.detach().numpy()
        found |= {f'd {key} {name}': leaf.grad.numpy() for key, leaf in leaves.items()}
    np.savez_compressed(GOLDEN / 'value_attention.npz', **found)
    print(f'value_attention: {sum(array.nbytes for array in found.values())} bytes')


def _single(tensor):
    return tensor.detach().float().numpy()


def make(code):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, IDS, (2, 7)).astype(np.int32)
    weights = rng.normal(size=(2, 7, IDS)).astype(np.float32)
    GOLDEN.mkdir(exist_ok=True)
    for number, (name, build) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = build(code).float()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.normal_(*_spread(key, parameter))
        model.double()
        with Float64():
            logits = model(torch.tensor(tokens, dtype=torch.long))
            (logits * torch.tensor(weights)).mean().backward()
        assert logits.dtype == torch.float64
        arrays = {'tokens': tokens, 'weights': weights, 'logits': _single(logits)}
        for key, parameter in parameters.items():
            public = key.replace('model.', '')
            arrays[public] = _single(parameter)
            arrays[f'd {public}'] = _single(parameter.grad)
        np.savez_compressed(GOLDEN / f'{name}.npz', **arrays)
        print(f'{name}: logits to {logits.detach().abs().max().item():.2f}')


if __name__ == '__main__':
    make(pathlib.Path(sys.argv[1]))
    mixtures(pathlib.Path(sys.argv[1]))
