"""The knobs of depth streams: what `auto` stands for, and what is refused."""

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
    """MoDA's first choices; none for a stream without such a knob."""
    found = depth(tiny_config, changes, **{'routing.router': 'learned'}).depth
    assert (found.slots, found.slot_keys, found.skipped_slots) == resolved
    assert found.slots_per_layer == per_layer


def test_dense_and_narrow_models_that_fit(tiny_config):
    """The streams with demands on the model accept one that meets them."""
    for stream in ('dense', 'average'):
        every = depth(tiny_config, {'stream': stream}, layer_loop='unrolled').depth
        assert every.slots == 'none' and every.stream_class.reads_outputs
    narrow = depth(tiny_config, {'stream': 'attention'}, num_heads=2, head_dim=16)
    assert narrow.depth.stream == 'attention' and not narrow.depth.stream_class.reads_outputs
    assert depth(tiny_config, {'stream': 'moda'}, num_heads=2).depth.slots == 'attention+ffn'


@pytest.mark.parametrize(
    ('changes', 'model', 'line'),
    [
        ({'stream': 'modal'}, {}, "stream='modal': must be one of .*did you mean moda"),
        (MODA | {'slots': 'none'}, {}, "slots='none': must be one of auto, attention"),
        ({'slots': 'block'}, {}, "slots='block': must be auto: the residual stream has no such"),
        ({'slot_keys': 'rotated'}, {}, "slot_keys='rotated': must be auto: .*use stream moda"),
        ({'skipped_slots': 'masked'}, {}, "skipped_slots='masked': must be auto"),
        (MODA | {'skipped_slots': 'masked'}, {}, "skipped_slots='masked': .*no block is routed"),
        ({'slot_window': 2}, {}, 'slot_window=2: must be 0: the residual stream has no slots'),
        ({'attention_slot_projection': True}, {}, 'slot_projection=True: must be False'),
        (
            MODA | {'slots': 'block', 'attention_slot_projection': True},
            {},
            'slot_projection=True: must be False: slots block of stream moda are not attention',
        ),
        ({'stream': 'dense'}, {}, "layer_loop='scan': must be unrolled: layers of the dense"),
        ({'stream': 'attention'}, {'head_dim': 4}, 'model.d_model=32: must be .* = 16'),
    ],
)
def test_what_does_not_fit_is_refused(changes, model, line, tiny_config):
    """By a line that names the knob, its value, and what would be right or the nearest name."""
    with pytest.raises(ValueError, match=line) as error:
        depth(tiny_config, changes, **model)
    assert str(error.value).startswith('model.') and '\n' not in str(error.value)
