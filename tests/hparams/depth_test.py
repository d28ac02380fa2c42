"""The knobs of depth streams: what `auto` stands for. tests/model/refused_test.py has the rest."""

import pytest

from moddepth_jax.hparams import from_config

MODA = {'stream': 'moda'}


def depth(make_config, changes, **model):
    knobs = {f'model.depth.{name}': value for name, value in changes.items()}
    return from_config(make_config(**knobs, **{f'model.{k}': v for k, v in model.items()})).model


@pytest.mark.parametrize(
    ('changes', 'resolved', 'per_layer'),
    [
        ({}, ('none', 'none', 'none'), 0),
        ({'stream': 'attention', 'slot_window': 3}, ('none', 'none', 'none'), 1),
        (MODA, ('attention+ffn', 'rotated', 'projected'), 2),
        (MODA | {'slots': 'attention'}, ('attention', 'rotated', 'projected'), 1),
        (
            MODA | {'slots': 'block', 'slot_keys': 'unrotated'},
            ('block', 'unrotated', 'projected'),
            1,
        ),
        (MODA | {'skipped_slots': 'masked'}, ('attention+ffn', 'rotated', 'masked'), 2),
    ],
)
def test_auto_is_the_choice_of_the_stream(changes, resolved, per_layer, tiny_config):
    """`auto` becomes MoDA's first choice, and none in a stream without the knob."""
    found = depth(tiny_config, changes, **{'routing.router': 'learned'}).depth
    assert (found.slots, found.slot_keys, found.skipped_slots) == resolved
    assert found.slots_per_layer == per_layer


def test_dense_and_narrow_models_that_fit(tiny_config):
    """The streams with requirements accept a model that meets them."""
    for stream in ('dense', 'average'):
        every = depth(tiny_config, {'stream': stream}, layer_loop='unrolled').depth
        assert every.slots == 'none' and every.stream_class.reads_outputs
    narrow = depth(tiny_config, {'stream': 'attention'}, num_heads=2, head_dim=16)
    assert narrow.depth.stream == 'attention' and not narrow.depth.stream_class.reads_outputs
    assert depth(tiny_config, {'stream': 'moda'}, num_heads=2).depth.slots == 'attention+ffn'
