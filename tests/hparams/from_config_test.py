"""A config becomes frozen hyper-parameters, or a one-line error that says what is wrong."""

import dataclasses
import pathlib
import subprocess
import sys
import textwrap

import pytest

from moddepth_jax.hparams import from_config, registry, unknown_knobs

ROOT = pathlib.Path(__file__).parents[2]
NAN, INFINITE = float('nan'), float('inf')


def knobs(group, names, *values):
    """Return {dotted name: bad values} for some knobs of a group."""
    return {f'{group}.{name}'.removeprefix('.'): values for name in names.split()}


NOT_POSITIVE, NO_WEIGHT = (0, -1), (-1.0, NAN, INFINITE)
NOT_ABOVE_ZERO, NO_FRACTION = (0.0, *NO_WEIGHT), (-0.1, 1.5, NAN)
NO_DECAY = (-0.1, 1.0, NAN, INFINITE)
SHAPE = 'vocab_size num_layers d_model d_ff num_heads num_kv_heads head_dim'
TRAINING = 'num_steps accumulate_steps log_every checkpoint_every keep_checkpoints max_nan_steps'
LOSS_WEIGHTS = 'initial_gate predictor_loss_weight aux_loss_weight'
BAD_VALUES = {
    **knobs('', 'seed', -1),
    **knobs('', 'flop_budget', *NO_WEIGHT),
    **knobs('model', SHAPE, *NOT_POSITIVE),
    **knobs('model', 'num_kv_heads', *NOT_POSITIVE, 3, 8),
    **knobs('model', 'head_dim', 0, -2, 7),
    **knobs('model', 'norm_placement', '', 'Pre', 'prenorm'),
    **knobs('model', 'qk_norm attention layer_loop remat', 'heads', 'flash', 'full_'),
    **knobs('model', 'embedding_residual', '', 'nanochat', 'Learned'),
    **knobs('model', 'value_embeddings', '', 'every:2', 'All'),
    **knobs('model', 'dtype', 'float16', 'bf16'),
    **knobs('model', 'norm_eps init_std embedding_init_std', *NOT_ABOVE_ZERO),
    **knobs('model', 'rope_theta', 0.5, *NOT_ABOVE_ZERO),
    **knobs('model', 'windows', (), (-1,), (0, 8, -8)),
    **knobs('model', 'rope_scaling', '', 'llama3', 'linear:8', 'llama3:8:1:4', 'llama3:8:4:1:64'),
    **knobs('model', 'attention_bias', '', 'all', 'q', 'kv'),
    **knobs('model.depth', 'stream slots slot_keys skipped_slots', 'densenet'),
    **knobs('model.depth', 'gradient_dtype value_mix hyper_form', 'sharing'),
    **knobs('model.depth', 'mudd_ways mudd_weights', 'qkv'),
    **knobs('model.depth', 'num_streams value_stride', -1, 2),
    **knobs('model.depth', 'recent_layers', -1, 1),
    **knobs('model.depth', 'attention_slot_projection', True),
    **knobs('model.depth', 'slot_window', -1, 1),
    **knobs('model.depth', 'sublayers_per_source', -1, 1),
    **knobs('model.depth', 'sparse_layers', -1, 1),
    **knobs(
        'model', 'looped_layers', 'every:2', 'middle:1', 'middle:9:9', f'middle:{"9" * 5000}:1', ''
    ),
    **knobs('model', 'loops', 2, *NOT_POSITIVE),
    **knobs('model', 'loop_order', 'sequence', 'cycles'),
    **knobs('model', 'loop_norms', 'own', 'Shared', ''),
    **knobs('model', 'loop_exit_threshold', 0.5, *NO_WEIGHT),
    **knobs('model', 'loop_embeddings', 'learned', 'all', ''),
    **knobs('training', 'loops', (2,), (1, 2), (0, 1)),
    **knobs('model.experts', 'choice scores product', 'router', 'tokens', 'soft_max', 'ragged'),
    **knobs('model.experts', 'num_routed top_k d_ff', *NOT_POSITIVE),
    **knobs('model.experts', 'num_shared num_noop row_capacity', -1),
    **knobs('model.experts', 'route_scale', *NOT_ABOVE_ZERO),
    **knobs('model.experts', 'balance_weight z_loss', *NO_WEIGHT),
    **knobs('model.experts', 'threshold_decay', *NO_DECAY),
    **knobs('model.routing', 'router part capacity_form select_per gate', 'linear', 'softmax'),
    **knobs('model.routing', 'gate_scale', *NOT_ABOVE_ZERO),
    **knobs('model.routing', 'balance_weight z_loss', *NO_WEIGHT),
    **knobs('model.routing', 'loop_update', 'output', 'change', 'add'),
    **knobs('model.routing', 'loop_keys', 'first', 'last'),
    **knobs('model.routing', 'causal_rule train_rule overflow', 'predict', 'drop'),
    **knobs('model.routing', 'capacity', 0.0, -0.125, 1.5, NAN, INFINITE),
    **knobs('model.routing', 'log_length_max', 1, 0, -1),
    **knobs('model.routing', 'capacity_stages', '1', '1:0.5,0.5:0.5'),
    **knobs('model.routing', 'predictor_width', -1, 65),
    **knobs('model.routing', LOSS_WEIGHTS, *NO_WEIGHT),
    **knobs('model.routing', 'threshold_decay threshold_warmup', *NO_DECAY),
    **knobs('model.routing', 'cache_capacity', 0.0, 0.99, -1.5, NAN, INFINITE),
    **knobs('model.adapters', 'rank', -1, 2**21),
    **knobs('model.adapters', 'alpha', *NOT_ABOVE_ZERO),
    **knobs('model.adapters', 'params', (), ('',), ('*', ' ')),
    **knobs('data', 'source', '', '  '),
    **knobs('data', 'mixture', 'a:1', 'a'),
    **knobs('data', 'tokenizer', '', 'byte', 'bpe:4096'),
    **knobs('data', 'encoding', '', 'utf9', 'hex', 'a\0'),  # not text encodings
    **knobs('data', 'sequence_length', *NOT_POSITIVE),
    **knobs('data', 'batch_size', *NOT_POSITIVE, 2**26),
    **knobs('data', 'held_out_fraction', 0.0, 1.0, *NO_FRACTION),
    **knobs('optimizer', 'learning_rate eps', *NOT_ABOVE_ZERO),
    **knobs('optimizer', 'name schedule', 'adam', 'linear'),
    **knobs('optimizer', 'trainable', ('',), ('*', ' ')),
    **knobs('optimizer', 'rate_factors', ('*',), ('*:0',), (':2',), ('*:x',), ('*:nan',)),
    **knobs('optimizer', 'decay_fraction', 0.0, *NO_FRACTION),
    **knobs('optimizer', 'final_fraction warmup_fraction', *NO_FRACTION),
    **knobs('optimizer', 'b1 b2', *NO_DECAY),
    **knobs('optimizer', 'weight_decay clip_norm z_loss', *NO_WEIGHT),
    **knobs('training', TRAINING, *NOT_POSITIVE),
    **knobs('training', 'accumulate_steps', *NOT_POSITIVE, 3, 8),
    **knobs('training', 'max_unsharded', *NO_FRACTION),
    **knobs('training', 'loss_chunk extended_from', -1),
    **knobs('training', 'distill_weight', 0.0, *NO_FRACTION),
    **knobs('training', 'distill_temperature', *NOT_ABOVE_ZERO),
    **knobs('evaluation', 'every', -1),
    **knobs('evaluation', 'num_batches final_batches', *NOT_POSITIVE),
    **knobs('report', 'prompt', '\ud800', 'a\udcff'),
    **knobs('report', 'sample_tokens', -1),
    **knobs('report', 'heatmap_tokens', *NOT_POSITIVE),
    **knobs('report', 'temperature', *NO_WEIGHT),
    **knobs('report', 'top_p', 0.0, *NO_FRACTION),
}
# These knobs accept any value of the right type.
FREE = {
    *knobs('model', 'use_bias tie_embeddings across_documents scale_residual_init'),
    *('model.experts.layers', 'model.routing.layers', 'data.text_field', 'data.log_windows'),
    *('optimizer.decay_embeddings', 'training.compilation_cache', 'training.distill_from'),
}
NO_LAYERS = [
    *('every:0', 'every:8', 'every:-2', 'every', 'every:two', 'every:2:3', 'evry:2', ''),
    *('middle:4:3', 'middle:9:9', 'middle:-1:0', 'middle:0:-1', 'middle:3'),
    *('7', '1,7', '-1', '1,,2'),
]


def refusal(config):
    """Return the one-line error of from_config for a config that it must refuse."""
    with pytest.raises(ValueError) as error:
        from_config(config)
    assert '\n' not in str(error.value)
    return str(error.value)


def leaves(config, prefix=''):
    """Yield (dotted name, value) of every knob."""
    for name, value in config.items():
        if hasattr(value, 'items'):
            yield from leaves(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value


def test_bad_value_is_named(tiny_config):
    """For each knob, the error has the field and the value in one line."""
    assert dict(leaves(tiny_config())).keys() == BAD_VALUES.keys() | FREE
    for field, values in BAD_VALUES.items():
        for value in values:
            message = refusal(tiny_config(**{field: value}))
            assert field in message and (repr(value) in message or f'{value:g}' in message)


def changed(tiny_config, field, *value):
    """Return a config with any value of a knob, by dotted name, or without the knob."""
    group = config = tiny_config().to_dict()
    *groups, name = field.split('.')
    for inner in groups:
        group = group[inner]
    group.pop(name, None)
    if value:
        group[name] = value[0]
    return config


def test_wrong_types_and_large_numbers_are_named(tiny_config):
    """The error has the field, the value and the right type; a bool is not a number.

    Numbers that do not fit into int32 or float32, or into a Python float, are refused too.
    """
    for field, value in leaves(tiny_config()):
        # Empty tuples hold counts, except for one that holds texts.
        other = '' if field == 'optimizer.rate_factors' else 1
        item = (*value, other)[0] if isinstance(value, tuple) else value
        for wrong in ['three', True, None, 2.5]:
            if type(wrong) is not type(item):
                message = refusal(changed(tiny_config, field, wrong))
                assert field in message and repr(wrong) in message
                assert type(item).__name__ in message
        for wrong in {int: [2**32, 10**400], float: [1e39, 10**400]}.get(type(item), []):
            message = refusal(changed(tiny_config, field, wrong))
            assert field in message and (repr(wrong) in message or f'{float(wrong):g}' in message)


def test_an_excluded_end_is_excluded_in_float32(tiny_config):
    """A number that float32 rounds to an excluded 0 or 1 is refused: it would divide by zero."""
    fields = [name for name, values in BAD_VALUES.items() if isinstance(values[-1], float)]
    ends = [(name, 1e-46, 1e-30) for name in fields if 0.0 in BAD_VALUES[name]]
    ends += [(name, 1 - 1e-9, 0.9999999) for name in fields if 1.0 in BAD_VALUES[name]]
    for field, value, inside in ends:
        if field in ('model.rope_theta', 'model.routing.cache_capacity'):  # must be 1 or more
            continue
        message = refusal(tiny_config(**{field: value}))
        assert f'{field}={value!r}' in message and 'float32' in message
        from_config(tiny_config(**{field: inside}))


def test_sizes_are_bounded_before_anything_is_shaped(tiny_config):
    """Layers that take minutes to name are refused, and axes whose product overflows."""
    for field in ('vocab_size', 'd_model', 'd_ff', 'num_heads', 'head_dim'):
        assert 'at most 1048576' in refusal(tiny_config(**{f'model.{field}': 2**20 + 2}))
    assert 'at most 10000' in refusal(tiny_config(**{'model.num_layers': 10**6}))
    message = refusal(tiny_config(**{'data.sequence_length': 2**30}))
    assert 'data.batch_size=4' in message and f'data.sequence_length={2**30}' in message


def test_unknown_knob_names_the_nearest(tiny_config):
    """The error for a typo has its full name and the nearest knob of its group."""
    message = refusal(changed(tiny_config, 'model.routing.capacty', 1))
    assert 'model.routing.capacty' in message and "'capacity'" in message


def test_something_other_than_a_config_is_named():
    """Regression: the message began with '=' and named no knob."""
    for wrong in (None, registry, len):
        with pytest.raises(ValueError, match='^config=.*: must be a ConfigDict or dict, as get_co'):
            from_config(wrong)


def test_missing_knob_is_named(tiny_config):
    """The error names a knob or a group that is missing."""
    names = [name for name, _ in leaves(tiny_config())]
    for field in {*names, 'model', 'model.routing', 'training'}:
        message = refusal(changed(tiny_config, field))
        assert field in message and 'missing' in message
    message = refusal(changed(tiny_config, 'model', 12))
    assert 'model' in message and '12' in message


def test_steps_or_budget_decides(tiny_config):
    """Exactly one of training.num_steps and flop_budget is above 0."""
    from_config(tiny_config(**{'flop_budget': 1e9, 'training.num_steps': 0}))
    message = refusal(tiny_config(**{'flop_budget': 1e9}))
    assert 'training.num_steps=4' in message and 'flop_budget' in message
    message = refusal(tiny_config(**{'training.num_steps': 0}))
    assert 'training.num_steps' in message and 'flop_budget' in message


def test_members_of_a_mixture_are_shares_that_sum_to_one(tiny_config):
    """Shares are exact for any sum of the weights. Other sources have no members."""
    changes = {'data.source': 'mixture', 'evaluation.num_batches': 3, 'evaluation.final_batches': 3}
    mixture = {'data.mixture': 'a:0.1, ./b/c:0.2,~/d:0.7e0'}
    data = from_config(tiny_config(**changes, **mixture)).data
    tenths = {folder: share * 10 for folder, share in data.members.items()}
    assert tenths == {'a': 1, 'b/c': 2, '~/d': 7}
    assert data.folders == ('a', 'b/c', '~/d')
    other = from_config(tiny_config(**{'data.source': 'data/web'})).data
    assert (other.members, other.folders) == ({}, ('data/web',))


def test_each_member_of_a_mixture_is_evaluated(tiny_config):
    """With fewer held-out batches than members, some would not be evaluated."""
    mixture = {'data.source': 'mixture', 'data.mixture': 'a:1,b:1'}
    for field in ('evaluation.num_batches', 'evaluation.final_batches'):
        enough = {'evaluation.num_batches': 2, 'evaluation.final_batches': 2}
        message = refusal(tiny_config(**mixture | enough | {field: 1}))
        assert message.startswith(f'{field}=1: must be at least 2')


def test_tokenizers_may_be_names_or_paths(tiny_config):
    """Whether a file exists is not checked, because a run has its own copy."""
    for name in ('bytes', 'prepared', 'a.json', 'b.model', './folder', '~/x'):
        assert from_config(tiny_config(**{'data.tokenizer': name})).data.tokenizer == name


def test_every_value_arrives(tiny_config):
    """Each knob is the field of the same name, so none is dropped or swapped.

    Only `auto` is replaced by what it stands for.
    """
    auto = {'model.routing.gate': 'tanh', 'model.routing.causal_rule': 'dense'}
    auto |= {'model.routing.router': 'learned'}
    depth = {'stream': 'moda', 'slots': 'block'}
    depth |= {'slot_keys': 'unrotated', 'skipped_slots': 'masked'}
    depth |= {'value_mix': 'none', 'hyper_form': 'none'}
    depth |= {'mudd_ways': 'none', 'mudd_weights': 'none'}
    config = tiny_config(**auto, **{f'model.depth.{knob}': value for knob, value in depth.items()})
    assert dict(leaves(dataclasses.asdict(from_config(config)))) == dict(leaves(config))


def test_is_frozen_and_hashable(tiny_config):
    """Equal configs have equal hashes, other values another one, and fields cannot be assigned."""
    one, same = from_config(tiny_config()), from_config(tiny_config().to_dict())
    other = from_config(tiny_config(**{'model.routing.capacity': 0.5}))
    assert (one, hash(one)) == (same, hash(same))
    assert one != other and len({one, same, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.model.num_layers = 3


def test_harmless_differences_of_type_are_accepted(tiny_config):
    """A list or a number can stand for a tuple, and an int for a float. The hash is the same."""
    tupled = from_config(tiny_config(**{'model.windows': (8, 0)}))
    assert hash(from_config(changed(tiny_config, 'model.windows', [8, 0]))) == hash(tupled)
    assert from_config(changed(tiny_config, 'model.windows', 8)).model.windows == (8,)
    capacity = from_config(tiny_config(**{'model.routing.capacity': 1.0}))
    assert from_config(changed(tiny_config, 'model.routing.capacity', 1)) == capacity


def test_windows_repeat_over_depth(tiny_config):
    """Layer l has the window of index l modulo their number."""
    model = from_config(tiny_config(**{'model.windows': (8, 0, 4)})).model
    assert [model.window(layer) for layer in range(7)] == [8, 0, 4, 8, 0, 4, 8]


def test_pattern_without_layers_is_refused(tiny_config):
    """A pattern that is malformed, leaves the model or names no layer is refused."""
    knobs = {'model.num_layers': 7, 'model.routing.router': 'learned'}
    for layers in NO_LAYERS:
        message = refusal(tiny_config(**knobs, **{'model.routing.layers': layers}))
        assert f'model.routing.layers={layers!r}' in message and 'every:N' in message


def test_a_wrong_value_is_refused_before_jax_is_imported():
    """Regression: a typo took over two seconds."""
    wrong = {'model.num_layers': -1, 'model.num_heads': 3, 'optimizer.name': 'x', 'seed': -1}
    wrong |= {f'model.routing.{name}': 'x' for name in ('router', 'gate', 'causal_rule', 'layers')}
    wrong |= {f'model.depth.{name}': 'x' for name in ('stream', 'slots', 'mudd_ways', 'value_mix')}
    wrong |= {'model.depth.slot_window': 1, 'model.depth.num_streams': 2, 'data.batch_size': 0}
    wrong |= {'model.routing.causal_rule': 'positive', 'model.loop_embeddings': 'learned'}
    wrong |= {'flop_budget': 1e9}
    code = f"""
        import sys
        from configs import tiny
        from launch import config_file, train
        for name, value in {wrong}.items():
            config = tiny.get_config()
            config.update_from_flattened_dict({{name: value}})
            try:
                config_file.from_config(config)
            except ValueError as error:
                assert name.split('.')[-1] in str(error), error
            else:
                raise SystemExit(name)
        assert 'jax' not in sys.modules
    """
    subprocess.run([sys.executable, '-c', textwrap.dedent(code)], check=True, cwd=ROOT)


def test_training_starts_without_plotting_libraries():
    """Regression: launch.train imported matplotlib before its first step."""
    code = """
        import sys
        from launch import train
        from moddepth_jax.analysis import report
        from moddepth_jax.training import loop
        assert not {'matplotlib', 'scipy'} & sys.modules.keys()
    """
    subprocess.run([sys.executable, '-c', textwrap.dedent(code)], check=True, cwd=ROOT)


def test_unknown_knobs_are_listed_with_their_values(tiny_config):
    """They are the knobs and groups, at any depth, that this version does not have."""
    config = dataclasses.asdict(from_config(tiny_config()))
    assert unknown_knobs(config) == {}
    config['model']['experts']['later'], config['later'] = 1, {'knob': 2}
    config['model']['depth'] = 5
    assert unknown_knobs(config) == {'model.experts.later': 1, 'later': {'knob': 2}}


@pytest.mark.parametrize(
    'name', 'ROUTERS CAUSAL_RULES EXPERT_PRODUCTS STREAMS OPTIMIZERS SCHEDULES'.split()
)
def test_names_in_the_source_are_those_that_are_registered(name):
    """Names and class attributes are known before the module, which needs JAX, is imported."""
    table = getattr(registry, name)
    own = [n for n in table if table[n].__module__.startswith('moddepth_jax.')]
    assert sorted(own) == sorted(table._own_traits) and len(own) > 2
    for choice in own:
        stated = vars(table._own_traits[choice]).copy()
        del stated['_choice']
        assert stated == {field: getattr(table[choice], field) for field in stated}


CHOICES = """
import sys
from moddepth_jax.hparams.registry import TABLE
here = sys.modules[__name__]
class Base:
    gates = ('a',)
    rules = ('one',)
    first = 1
@TABLE.register('later')
class Later(here.Base):
    gates = (*Base.gates, 'b')
    first = second = 2
"""


def test_attributes_that_are_no_literals_are_those_of_the_class(tmp_path, monkeypatch):
    """Regression: commands ended with a traceback, or read the attribute of the base class."""
    (tmp_path / 'choices_of_test.py').write_text(CHOICES)
    monkeypatch.syspath_prepend(tmp_path)
    table = registry.Registry('TABLE', 'model.routing.router', 'choices_of_test')
    monkeypatch.setattr(registry, 'TABLE', table, raising=False)
    traits = table.traits('later')
    assert traits.rules == ('one',) and 'choices_of_test' not in sys.modules
    assert (traits.gates, traits.first, traits.second) == (('a', 'b'), 2, 2)
    with pytest.raises(AttributeError, match='nothing'):
        _ = traits.nothing
