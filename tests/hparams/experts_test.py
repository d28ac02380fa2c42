"""The knobs of experts: their layers, how many tokens they take, and what is refused."""

import pytest

from moddepth_jax.hparams import ExpertsHparams, from_config

LAYERS = {
    'every:1': tuple(range(7)),
    'every:2': (1, 3, 5),
    'middle:1:2': (1, 2, 3, 4),
    '6,2': (2, 6),
}
TOKEN, EXPERT = {'choice': 'token'}, {'choice': 'expert'}
ROUTED = {'routing.router': 'learned'}


@pytest.fixture
def model(tiny_config):
    """model(changes, **more): hyper-parameters of a model by changes of its experts, and others."""

    def build(changes, **more):
        knobs = {f'experts.{name}': value for name, value in changes.items()} | more
        return from_config(tiny_config(**{f'model.{k}': v for k, v in knobs.items()})).model

    return build


@pytest.mark.parametrize('layers', LAYERS)
def test_expert_layers(model, layers):
    """They are named as routed layers are; without a choice there are none."""
    assert model(TOKEN | {'layers': layers}, num_layers=7).expert_layers == LAYERS[layers]
    assert model({'layers': layers}, num_layers=7).expert_layers == ()


@pytest.mark.parametrize(
    ('changes', 'more', 'ahead'),
    [({}, {}, False), (TOKEN, {}, False), (EXPERT, {}, True), (TOKEN, ROUTED, True)],
)
def test_models_that_use_later_tokens(model, changes, more, ahead):
    """Experts that choose among the tokens of a row, and routed blocks; not tokens that choose."""
    assert model(changes, **more).looks_ahead == ahead


@pytest.mark.parametrize(
    ('num_routed', 'top_k', 'length', 'taken'),
    [(8, 2, 256, 64), (8, 2, 255, 63), (64, 6, 2048, 192), (8, 2, 3, 1), (4, 4, 17, 17)],
)
def test_num_taken_is_an_equal_share(model, num_routed, top_k, length, taken):
    """floor(k T / E) tokens of a row for each expert, 1 at least."""
    experts = model(EXPERT | {'num_routed': num_routed, 'top_k': top_k}).experts
    assert experts.num_taken(length) == taken


def test_which_experts_have_an_auxiliary_loss(model):
    """The balance loss is of tokens that choose, the z-loss of all; a weight of 0 is no loss."""
    balance, z = {'balance_weight': 0.5, 'z_loss': 0.0}, {'balance_weight': 0.0, 'z_loss': 0.5}
    found = [
        [model(choice | weights).experts.has_loss for weights in (balance, z)]
        for choice in (TOKEN, EXPERT, {'choice': 'none'})
    ]
    assert found == [[True, True], [False, True], [False, False]]
    assert not model(TOKEN | {'balance_weight': 0.0, 'z_loss': 0.0}).experts.has_loss


@pytest.mark.parametrize('num_noop', [0, 3])
def test_top_k_is_at_most_the_number_of_experts(model, num_noop):
    """No-op experts count; one more than all of them is refused."""
    knobs = TOKEN | {'num_routed': 5, 'num_noop': num_noop}
    most = 5 + num_noop
    assert model(knobs | {'top_k': most}).experts.num_choices == most
    with pytest.raises(ValueError) as error:
        model(knobs | {'top_k': most + 1})
    expected = f'model.experts.top_k={most + 1}: must be at most the {most} experts'
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ('changes', 'more', 'line'),
    [
        (EXPERT | {'num_noop': 2}, {}, 'experts.num_noop=2: must be 0 where experts choose'),
        (EXPERT | {'row_capacity': 9}, {}, 'experts.row_capacity=9: must be 0 where experts'),
        (TOKEN, {'use_bias': True}, 'use_bias=True: must be False: experts have no biases'),
        (EXPERT, {'use_bias': True}, 'use_bias=True: must be False'),
        (
            TOKEN | {'row_capacity': 9},
            ROUTED,
            'experts.row_capacity=9: must be 0 where blocks are routed',
        ),
        (
            EXPERT,
            ROUTED | {'routing.train_rule': 'threshold', 'routing.causal_rule': 'threshold'},
            "routing.train_rule='threshold': must be top_c where experts choose",
        ),
        *(
            (
                TOKEN | {'layers': layers},
                {},
                f'experts.layers={layers!r}: must be every:N, .* layers below 2',
            )
            for layers in ('every:3', 'every:0', 'middle:1:1', '2', '0,2', '-1', 'all', '')
        ),
    ],
)
def test_what_does_not_fit_is_refused(model, changes, more, line):
    """By one line that names the knob, its value, and what would be right or the nearest name."""
    with pytest.raises(ValueError, match=f'^model.{line}') as error:
        model(changes, **more)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('more', [{}, ROUTED])
def test_values_that_fit_are_accepted(model, more):
    """What is refused with one value of another knob is right with another."""
    assert model(TOKEN | {'num_noop': 2}, **more).experts.num_choices == 10
    assert model(EXPERT, **more).experts.num_choices == 8
    if not more:
        assert model(TOKEN | {'row_capacity': 9}).experts.row_capacity == 9
        assert model({'row_capacity': 9}, use_bias=True).expert_layers == ()


@pytest.mark.parametrize('name', ExpertsHparams.NOT_BUILT)
def test_knobs_of_what_is_not_built_are_refused_as_such(tiny_config, name):
    """Names that other code has are no typos: the line says that the feature is not built."""
    config = tiny_config()
    config.model.experts[name] = 3
    with pytest.raises(ValueError) as error:
        from_config(config)
    message = str(error.value)
    assert message.startswith(f'model.experts.{name}=3: ') and 'not built' in message
    assert 'balance_weight' in message and '\n' not in message


def test_what_is_not_built_is_known_under_its_usual_names():
    """Group-limited routing and selection biases, as DeepSeek's configs call them."""
    names = {'num_groups', 'n_group', 'topk_group', 'selection_bias', 'e_score_correction_bias'}
    assert names <= set(ExpertsHparams.NOT_BUILT)
