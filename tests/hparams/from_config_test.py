"""A config becomes frozen hyper-parameters, or one line that names what is wrong with it."""

import dataclasses

import pytest

from moddepth_jax.hparams import from_config, unknown_knobs

NAN, INFINITE = float('nan'), float('inf')
NOT_POSITIVE = [0, -1]
BAD_VALUES = {
    'seed': [-1],
    'flop_budget': [-1.0, NAN, INFINITE],
    'model.vocab_size': NOT_POSITIVE,
    'model.num_layers': NOT_POSITIVE,
    'model.d_model': NOT_POSITIVE,
    'model.d_ff': NOT_POSITIVE,
    'model.num_heads': NOT_POSITIVE,
    'model.num_kv_heads': [*NOT_POSITIVE, 3, 8],
    'model.head_dim': [0, -2, 7],
    'model.norm_placement': ['', 'Pre', 'prenorm'],
    'model.norm_eps': [0.0, -1e-6, NAN, INFINITE],
    'model.qk_norm': ['heads'],
    'model.rope_theta': [0.0, -1.0, 0.5, NAN, INFINITE],
    'model.windows': [(), (-1,), (0, 8, -8)],
    'model.init_std': [0.0, -0.02, NAN, INFINITE],
    'model.embedding_init_std': [0.0, -0.02, NAN, INFINITE],
    'model.dtype': ['float16', 'bf16'],
    'model.attention': ['flash'],
    'model.layer_loop': ['scanned'],
    'model.remat': ['full'],
    'model.depth.stream': ['densenet'],
    'model.depth.slots': ['ffn'],
    'model.depth.attention_slot_projection': [True],
    'model.depth.slot_keys': ['raw'],
    'model.depth.skipped_slots': ['zero'],
    'model.depth.slot_window': [-1, 1],
    'model.depth.gradient_dtype': ['bfloat16'],
    'model.experts.choice': ['router', 'tokens'],
    'model.experts.num_routed': NOT_POSITIVE,
    'model.experts.num_shared': [-1],
    'model.experts.num_noop': [-1],
    'model.experts.top_k': NOT_POSITIVE,
    'model.experts.d_ff': NOT_POSITIVE,
    'model.experts.scores': ['soft_max'],
    'model.experts.route_scale': [0.0, -1.0, NAN, INFINITE],
    'model.experts.row_capacity': [-1],
    'model.experts.balance_weight': [-0.001, NAN, INFINITE],
    'model.experts.z_loss': [-1.0, NAN, INFINITE],
    'model.experts.threshold_decay': [-0.1, 1.0, NAN, INFINITE],
    'model.experts.product': ['ragged', 'dense'],
    'model.routing.router': ['linear'],
    'model.routing.capacity': [0.0, -0.125, 1.5, NAN, INFINITE],
    'model.routing.capacity_form': ['constant'],
    'model.routing.log_length_max': [1, 0, -1],
    'model.routing.capacity_stages': ['1', '1:0.5,0.5:0.5'],
    'model.routing.select_per': ['document'],
    'model.routing.gate': ['softmax'],
    'model.routing.initial_gate': [-1.0, NAN, INFINITE],
    'model.routing.causal_rule': ['top_c'],
    'model.routing.predictor_width': [-1, 65],
    'model.routing.predictor_loss_weight': [-1.0, NAN, INFINITE],
    'model.routing.aux_loss_weight': [-1.0, NAN, INFINITE],
    'model.routing.threshold_decay': [-0.1, 1.0, NAN, INFINITE],
    'model.routing.train_rule': ['predictor'],
    'model.routing.threshold_warmup': [-0.1, 1.0, NAN, INFINITE],
    'model.routing.cache_capacity': [0.0, 0.99, -1.5, NAN, INFINITE],
    'model.routing.overflow': ['drop'],
    'data.source': ['', '  '],
    'data.mixture': ['a:1', 'a'],
    'data.tokenizer': ['', 'byte', 'bpe:4096'],
    'data.sequence_length': NOT_POSITIVE,
    'data.batch_size': [*NOT_POSITIVE, 2**26],
    'data.held_out_fraction': [0.0, 1.0, -0.1, 1.5, NAN],
    'optimizer.name': ['adam', ''],
    'optimizer.schedule': ['linear', ''],
    'optimizer.decay_fraction': [0.0, 1.5, NAN],
    'optimizer.learning_rate': [0.0, -1e-3, NAN, INFINITE],
    'optimizer.final_fraction': [-0.1, 1.5, NAN],
    'optimizer.warmup_fraction': [-0.1, 1.5, NAN],
    'optimizer.b1': [-0.1, 1.0, NAN],
    'optimizer.b2': [-0.1, 1.0, NAN],
    'optimizer.eps': [0.0, -1e-8, NAN, INFINITE],
    'optimizer.weight_decay': [-0.1, NAN, INFINITE],
    'optimizer.clip_norm': [-1.0, NAN, INFINITE],
    'optimizer.z_loss': [-1.0, NAN, INFINITE],
    'training.num_steps': [-1, 0],
    'training.accumulate_steps': [*NOT_POSITIVE, 3, 8],
    'training.log_every': NOT_POSITIVE,
    'training.checkpoint_every': NOT_POSITIVE,
    'training.keep_checkpoints': NOT_POSITIVE,
    'training.max_nan_steps': NOT_POSITIVE,
    'training.max_unsharded': [-0.1, 1.5, NAN],
    'training.loss_chunk': [-1],
    'evaluation.every': [-1],
    'evaluation.num_batches': NOT_POSITIVE,
    'evaluation.final_batches': NOT_POSITIVE,
    'report.prompt': ['\ud800', 'a\udcff'],
    'report.sample_tokens': NOT_POSITIVE,
    'report.heatmap_tokens': NOT_POSITIVE,
    'report.temperature': [-0.5, NAN, INFINITE],
    'report.top_p': [0.0, -0.5, 1.5, NAN],
}
# Any value of the right type will do here.
FREE = {
    'model.use_bias',
    'model.tie_embeddings',
    'model.across_documents',
    'model.scale_residual_init',
    'model.experts.layers',
    'model.routing.layers',
    'data.text_field',
    'data.log_windows',
    'optimizer.decay_embeddings',
    'training.compilation_cache',
}
NO_LAYERS = [
    *('every:0', 'every:8', 'every:-2', 'every', 'every:two', 'every:2:3', 'evry:2', ''),
    *('middle:4:3', 'middle:9:9', 'middle:-1:0', 'middle:0:-1', 'middle:3'),
    *('7', '1,7', '-1', '1,,2'),
]


def refusal(config):
    """What from_config says about a config that it must refuse: one line."""
    with pytest.raises(ValueError) as error:
        from_config(config)
    assert '\n' not in str(error.value)
    return str(error.value)


def leaves(config, prefix=''):
    """(dotted name, value) of every knob."""
    for name, value in config.items():
        if hasattr(value, 'items'):
            yield from leaves(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value


def test_table_of_bad_values_is_complete(tiny_config):
    """Every knob has values that the next test feeds it, or is free."""
    assert dict(leaves(tiny_config())).keys() == BAD_VALUES.keys() | FREE


@pytest.mark.parametrize('field', BAD_VALUES)
def test_bad_value_is_named(field, tiny_config):
    """A value out of range is refused in one line with the field and the value."""
    for value in BAD_VALUES[field]:
        message = refusal(tiny_config(**{field: value}))
        assert field in message
        assert repr(value) in message or f'{value:g}' in message


def group_of(config, field):
    """The group that holds the knob of a dotted name."""
    for group in field.split('.')[:-1]:
        config = config[group]
    return config


def test_wrong_type_is_named(tiny_config):
    """A value of another type is refused by field, value and wanted type; a bool is no number."""
    for field, value in leaves(tiny_config()):
        item = value[0] if isinstance(value, tuple) else value
        for wrong in ['three', True, None, 2.5]:
            if type(wrong) is type(item):
                continue
            config = tiny_config().to_dict()
            group_of(config, field)[field.split('.')[-1]] = wrong
            message = refusal(config)
            assert field in message and repr(wrong) in message
            assert type(item).__name__ in message


def test_numbers_that_32_bits_do_not_hold_are_refused(tiny_config):
    """Too large for an int32 or a float32, or for a float of Python: each by name and value."""
    for field, value in leaves(tiny_config()):
        item = value[0] if isinstance(value, tuple) else value
        large = {int: [2**32, 10**400], float: [1e39, 10**400]}.get(type(item), [])
        for wrong in large:
            config = tiny_config().to_dict()
            group_of(config, field)[field.split('.')[-1]] = wrong
            message = refusal(config)
            assert field in message and (repr(wrong) in message or f'{float(wrong):g}' in message)


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        *((f'model.{name}', 1e-46) for name in ('norm_eps', 'init_std', 'embedding_init_std')),
        ('model.experts.route_scale', 1e-46),
        ('model.routing.capacity', 1e-46),
        ('optimizer.learning_rate', 1e-46),
        ('optimizer.eps', 1e-46),
        ('report.top_p', 1e-46),
        ('optimizer.b1', 1 - 1e-9),
        ('optimizer.b2', 1 - 1e-9),
        ('model.routing.threshold_decay', 1 - 1e-9),
        ('model.experts.threshold_decay', 1 - 1e-9),
    ],
)
def test_an_end_that_is_left_out_is_so_in_float32(field, value, tiny_config):
    """What float32 rounds to 0 or to 1 is refused where that end is: it would divide by zero."""
    message = refusal(tiny_config(**{field: value}))
    assert f'{field}={value!r}' in message and 'float32' in message
    from_config(tiny_config(**{field: 1e-30 if value < 0.5 else 0.9999999}))


def test_sizes_are_bounded_before_anything_is_shaped(tiny_config):
    """So many layers that naming them takes minutes, or an axis whose product overflows."""
    for field in ('vocab_size', 'd_model', 'd_ff', 'num_heads', 'head_dim'):
        assert 'at most 1048576' in refusal(tiny_config(**{f'model.{field}': 2**20 + 2}))
    assert 'at most 10000' in refusal(tiny_config(**{'model.num_layers': 10**6}))
    message = refusal(tiny_config(**{'data.sequence_length': 2**30}))
    assert 'data.batch_size=4' in message and f'data.sequence_length={2**30}' in message


@pytest.mark.parametrize(
    ('field', 'nearest'),
    [
        ('flop_budgets', 'flop_budget'),
        ('model.num_layer', 'num_layers'),
        ('model.routing.capacty', 'capacity'),
        ('optimizer.lerning_rate', 'learning_rate'),
    ],
)
def test_unknown_knob_names_the_nearest(field, nearest, tiny_config):
    """A typo is refused with its full name and the nearest knob of its group."""
    config = tiny_config()
    group_of(config, field)[field.split('.')[-1]] = 1
    message = refusal(config)
    assert field in message
    assert f"'{nearest}'" in message


def test_missing_knob_is_named(tiny_config):
    """Each knob and each group, once taken away, is missed by name."""
    names = [name for name, _ in leaves(tiny_config())]
    for field in {*names, 'model', 'model.routing', 'training'}:
        config = tiny_config().to_dict()
        del group_of(config, field)[field.split('.')[-1]]
        message = refusal(config)
        assert field in message and 'missing' in message
    config = tiny_config().to_dict()
    config['model'] = 12
    message = refusal(config)
    assert 'model' in message and '12' in message


def test_sizes_that_do_not_divide_name_both(tiny_config):
    """The two knobs of a division that leaves a rest are in the line, with both values."""
    message = refusal(tiny_config(**{'model.num_kv_heads': 3}))
    assert 'num_kv_heads=3' in message and 'num_heads=4' in message
    message = refusal(tiny_config(**{'training.accumulate_steps': 3}))
    assert 'accumulate_steps=3' in message and 'batch_size=4' in message


def test_steps_or_budget_decides(tiny_config):
    """Exactly one of training.num_steps and flop_budget is above 0."""
    from_config(tiny_config(**{'flop_budget': 1e9, 'training.num_steps': 0}))
    message = refusal(tiny_config(**{'flop_budget': 1e9}))
    assert 'training.num_steps=4' in message and 'flop_budget' in message
    message = refusal(tiny_config(**{'training.num_steps': 0}))
    assert 'training.num_steps' in message and 'flop_budget' in message


def test_members_of_a_mixture_are_shares_that_sum_to_one(tiny_config):
    """Whatever the weights sum to, exactly; another source has none."""
    changes = {'data.source': 'mixture', 'evaluation.num_batches': 3, 'evaluation.final_batches': 3}
    mixture = {'data.mixture': 'a:0.1, ./b/c:0.2,~/d:0.7e0'}
    data = from_config(tiny_config(**changes, **mixture)).data
    tenths = {folder: share * 10 for folder, share in data.members.items()}
    assert tenths == {'a': 1, 'b/c': 2, '~/d': 7}
    assert data.folders == ('a', 'b/c', '~/d')
    other = from_config(tiny_config(**{'data.source': 'data/web'})).data
    assert (other.members, other.folders) == ({}, ('data/web',))


@pytest.mark.parametrize('field', ['evaluation.num_batches', 'evaluation.final_batches'])
def test_each_member_of_a_mixture_is_evaluated(field, tiny_config):
    """Fewer held-out batches than members would leave some unseen."""
    changes = {'evaluation.num_batches': 2, 'evaluation.final_batches': 2, field: 1}
    mixture = {'data.source': 'mixture', 'data.mixture': 'a:1,b:1'}
    message = refusal(tiny_config(**mixture, **changes))
    assert message.startswith(f'{field}=1: must be at least 2')


@pytest.mark.parametrize('name', ['bytes', 'prepared', 'a.json', 'b.model', './folder', '~/x'])
def test_tokenizers_may_be_names_or_paths(name, tiny_config):
    """Whether a file exists is not checked: a run keeps its own copy."""
    assert from_config(tiny_config(**{'data.tokenizer': name})).data.tokenizer == name


def test_every_value_arrives(tiny_config):
    """Each knob of the config is the field of the same name, so none is dropped or swapped.

    Except `auto`, which is replaced by what it stands for.
    """
    auto = {'model.routing.gate': 'tanh', 'model.routing.causal_rule': 'dense'}
    auto |= {'model.routing.router': 'learned'}
    depth = {'stream': 'moda', 'slots': 'block'}
    depth |= {'slot_keys': 'unrotated', 'skipped_slots': 'masked'}
    config = tiny_config(**auto, **{f'model.depth.{knob}': value for knob, value in depth.items()})
    assert dict(leaves(dataclasses.asdict(from_config(config)))) == dict(leaves(config))


def test_is_frozen_and_hashable(tiny_config):
    """Equal configs give equal hashes, another value another one, and nothing can be assigned."""
    one, same = from_config(tiny_config()), from_config(tiny_config().to_dict())
    other = from_config(tiny_config(**{'model.routing.capacity': 0.5}))
    assert (one, hash(one)) == (same, hash(same))
    assert one != other and len({one, same, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.model.num_layers = 3


def test_harmless_differences_of_type_are_accepted(tiny_config):
    """A list or one number stands for a tuple, and an integer for a float; the hash is the same."""
    tupled = from_config(tiny_config(**{'model.windows': (8, 0)}))
    config = tiny_config().to_dict()
    config['model']['windows'] = [8, 0]
    assert hash(from_config(config)) == hash(tupled)
    config['model']['windows'] = 8
    assert from_config(config).model.windows == (8,)
    capacity = from_config(tiny_config(**{'model.routing.capacity': 1.0}))
    config = tiny_config().to_dict()
    config['model']['routing']['capacity'] = 1
    assert from_config(config) == capacity


def test_windows_repeat_over_depth(tiny_config):
    """Layer l takes the window of index l modulo their number."""
    model = from_config(tiny_config(**{'model.windows': (8, 0, 4)})).model
    assert [model.window(layer) for layer in range(7)] == [8, 0, 4, 8, 0, 4, 8]


@pytest.mark.parametrize('layers', NO_LAYERS)
def test_pattern_without_layers_is_refused(layers, tiny_config):
    """A pattern that cannot be read, leaves the model or names no layer is refused as such."""
    knobs = {'model.num_layers': 7, 'model.routing.router': 'learned'}
    message = refusal(tiny_config(**knobs, **{'model.routing.layers': layers}))
    assert 'model.routing.layers' in message and repr(layers) in message and 'every:N' in message


def test_unknown_knobs_are_listed_with_their_values(tiny_config):
    """Knobs and groups that this version does not have, wherever they stand; none of its own."""
    config = dataclasses.asdict(from_config(tiny_config()))
    assert unknown_knobs(config) == {}
    config['model']['experts']['later'], config['later'] = 1, {'knob': 2}
    config['model']['depth'] = 5
    assert unknown_knobs(config) == {'model.experts.later': 1, 'later': {'knob': 2}}
