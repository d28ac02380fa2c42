"""The knobs of experts: their layers, how many tokens they take, and what is refused."""

import pytest

from moddepth_jax.hparams import ExpertsHparams, from_config

TOKEN, EXPERT = {'choice': 'token'}, {'choice': 'expert'}
ROUTED = {'routing.router': 'learned'}


@pytest.fixture
def model(tiny_config):
    """Return model(changes, **more): hyper-parameters with changes of experts and of others."""

    def build(changes, **more):
        knobs = {f'experts.{name}': value for name, value in changes.items()} | more
        return from_config(tiny_config(**{f'model.{k}': v for k, v in knobs.items()})).model

    return build


def test_expert_layers(model):
    """Patterns are those of routed layers. Without experts there are no such layers."""
    assert model(TOKEN | {'layers': 'middle:1:2'}, num_layers=7).expert_layers == (1, 2, 3, 4)
    assert model({'layers': 'middle:1:2'}, num_layers=7).expert_layers == ()


def test_models_that_use_later_tokens(model):
    """Experts that choose among a row's tokens and routed blocks do; token choice does not."""
    cases = [({}, {}, False), (TOKEN, {}, False), (EXPERT, {}, True), (TOKEN, ROUTED, True)]
    assert all(model(changes, **more).looks_ahead == ahead for changes, more, ahead in cases)


def test_num_taken_is_an_equal_share(model):
    """Each expert takes floor(k T / E) tokens of a row, at least 1."""
    experts = model(EXPERT | {'num_routed': 8, 'top_k': 2}).experts
    assert [experts.num_taken(length) for length in (256, 255, 3)] == [64, 63, 1]


def test_which_experts_have_an_auxiliary_loss(model):
    """Token choice has the balance loss, and both choices the z-loss; a weight of 0 is no loss."""
    weights = [
        {'balance_weight': balance, 'z_loss': z} for balance, z in ((0.5, 0), (0, 0.5), (0, 0))
    ]
    for choice, expected in (
        (TOKEN, [True, True, False]),
        (EXPERT, [False, True, False]),
        ({'choice': 'none'}, [False, False, False]),
    ):
        assert [model(choice | weight).experts.has_loss for weight in weights] == expected


@pytest.mark.parametrize('num_noop', [0, 3])
def test_top_k_is_at_most_the_number_of_experts(model, num_noop):
    """No-op experts count. One more than all of them is refused."""
    knobs, most = TOKEN | {'num_routed': 5, 'num_noop': num_noop}, 5 + num_noop
    assert model(knobs | {'top_k': most}).experts.num_choices == most
    with pytest.raises(ValueError, match=rf'^model.experts.top_k={most + 1}: must be .* {most} e'):
        model(knobs | {'top_k': most + 1})


def test_values_that_fit_are_accepted(model):
    """A value that is refused with one value of another knob is accepted with another."""
    for more in ({}, ROUTED):
        assert model(TOKEN | {'num_noop': 2}, **more).experts.num_choices == 10
        assert model(EXPERT, **more).experts.num_choices == 8
    assert model(TOKEN | {'row_capacity': 9}).experts.row_capacity == 9
    assert model({'row_capacity': 9}, use_bias=True).expert_layers == ()


def test_knobs_of_missing_features_are_refused_as_such(tiny_config):
    """Names from DeepSeek's configs are not called typos: the line says what is not built."""
    names = {'num_groups', 'n_group', 'topk_group', 'selection_bias', 'e_score_correction_bias'}
    assert names <= set(ExpertsHparams.NOT_BUILT)
    for name in ExpertsHparams.NOT_BUILT:
        config = tiny_config()
        config.model.experts[name] = 3
        with pytest.raises(ValueError, match=rf'^model.experts.{name}=3: .*not built.*balance_w'):
            from_config(config)
