"""The routing knobs: how many tokens are selected, the rules of each router, and the stages."""

import pytest

from configs import base
from moddepth_jax.hparams import RoutingHparams, from_config
from moddepth_jax.hparams.registry import CAUSAL_RULES
from moddepth_jax.hparams.registry import ROUTERS as ROUTERS_BY_NAME

DEFAULTS = base.get_config().model.routing.to_dict()
ROUTERS = ('learned', 'norm', 'random', 'position', 'straight_through')
RULES = ('predictor', 'aux_loss', 'threshold', 'positive', 'dense')
GATES = ('raw', 'sigmoid', 'tanh', 'none', 'straight_through')
# docs/mixture_of_depths.md, section 4; `auto` means the first.
ALLOWED = {
    'learned': (
        ('raw', 'sigmoid', 'tanh', 'none'),
        ('predictor', 'aux_loss', 'threshold', 'dense'),
    ),
    'norm': (('none',), ('dense', 'threshold', 'predictor')),
    'random': (('none',), ('threshold',)),
    'position': (('none',), ('threshold',)),
    'straight_through': (('straight_through',), ('threshold', 'predictor', 'aux_loss', 'positive')),
}
LAYERS = {
    'every:2': (1, 3, 5),
    'every:3': (2, 5),
    'every:7': (6,),
    'middle:0:0': (0, 1, 2, 3, 4, 5, 6),
    'middle:3:2': (3, 4),
    'middle:5:1': (5,),
    '4': (4,),
    '5,0, 3': (0, 3, 5),
}


def routing(**changes):
    return RoutingHparams(**DEFAULTS | {'router': 'learned'} | changes)


def refusal(**changes):
    """Return the one-line error for knobs that must be refused."""
    with pytest.raises(ValueError) as error:
        routing(**changes)
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize('part', ['attention', 'mlp'])
@pytest.mark.parametrize(
    ('knob', 'value', 'right'),
    [
        ('depth.stream', 'moda', 'residual'),
        ('depth.stream', 'hyper_connections', 'residual'),
        ('experts.choice', 'token', 'none'),
    ],
)
def test_parts_of_a_block_are_refused_by_name(part, knob, value, right, tiny_config):
    """This holds if blocks are routed. Without a router no routing knob matters."""
    knobs = {'model.routing.part': part, f'model.{knob}': value}
    with pytest.raises(ValueError) as error:
        from_config(tiny_config(**knobs, **{'model.routing.router': 'learned'}))
    why = f'must be block if model.{knob}={value}; or set that to {right}'
    assert str(error.value) == f'model.routing.part={part!r}: {why}'
    assert from_config(tiny_config(**knobs)).model.routing.part == part


def test_num_selected():
    """C is max(1, floor(capacity T + 1e-6)): 256 of 2048, and rounding loses no token."""
    for capacity, length, selected in (
        *((0.125, 2048, 256), (0.125, 7, 1), (0.125, 17, 2), (0.999, 10, 9), (1e-9, 2048, 1)),
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
    ):
        assert routing(capacity=capacity).num_selected(length) == selected


def test_whole_shares_are_exact():
    """If capacity T is whole in exact arithmetic, C is that number, and never above T."""
    for length in range(1, 130):
        for selected in range(1, length + 1):
            assert routing(capacity=selected / length).num_selected(length) == selected


def test_log_length_falls_from_one_to_the_capacity():
    """209 of 1024 (a public implementation has 210). Beyond T_max the share is constant."""
    lengths = (1, 2, 64, 256, 1024, 2048, 4096, 8192)
    knobs = {'capacity_form': 'log_length', 'capacity': 0.125, 'log_length_max': 2048}
    found = [routing(**knobs).num_selected(length) for length in lengths]
    assert found == [1, 1, 33, 93, 209, 256, 512, 1024]


def test_routed_layers():
    """every:N starts at layer N - 1, middle leaves out both ends, and a list is sorted."""
    for layers, expected in LAYERS.items():
        assert routing(layers=layers).routed_layers(7) == expected
        assert routing(layers=layers, router='none').routed_layers(7) == ()


@pytest.mark.parametrize('router', ROUTERS)
def test_auto_is_the_first_choice_of_the_router(router):
    """`auto` equals the router's first gate and rule."""
    gates, rules = ALLOWED[router]
    chosen = routing(router=router)
    assert (chosen.gate, chosen.causal_rule) == (gates[0], rules[0])
    assert chosen == routing(router=router, gate=gates[0], causal_rule=rules[0])
    assert chosen.tracks_threshold == (router not in ('random', 'position'))


@pytest.mark.parametrize('router', ROUTERS)
def test_each_pair_is_accepted_or_refused_by_name(router):
    """The error for a gate or rule that a router does not have lists the right ones."""
    gates, rules = ALLOWED[router]
    for field, choices, right in (('gate', GATES, gates), ('causal_rule', RULES, rules)):
        for value in choices:
            if value in right:
                assert getattr(routing(router=router, **{field: value}), field) == value
                continue
            message = refusal(router=router, **{field: value})
            assert message.startswith(f'model.routing.{field}={value!r}: ')
            assert f'the {router} router' in message and ', '.join(right) in message


def test_a_registered_rule_that_the_router_does_not_list_is_explained(monkeypatch):
    CAUSAL_RULES['predictor']  # registers all, which a copy of the dict would lose
    monkeypatch.setattr(CAUSAL_RULES, '_choices', dict(CAUSAL_RULES._choices))
    CAUSAL_RULES.register('mine')(CAUSAL_RULES['threshold'])
    assert refusal(causal_rule='mine').endswith('lists what it supports in its attribute `rules`')
    monkeypatch.setattr(ROUTERS_BY_NAME['learned'], 'rules', ('mine',))
    assert routing(causal_rule='mine').causal_rule == 'mine'
    for attribute in ('gates', 'rules'):  # of a router in a config
        monkeypatch.setattr(ROUTERS_BY_NAME['learned'], attribute, ('min',))
        expected = f"model.routing.router='learned': {attribute}='min': must be one of "
        assert refusal().startswith(expected)
        monkeypatch.undo()


def test_rules_are_those_that_need_no_other_training():
    """A model can run its own rule and those rules of its router that no loss trains."""
    assert routing().rules == ('predictor', 'threshold', 'dense', 'bypass')
    assert routing(causal_rule='aux_loss').rules == ('aux_loss', 'threshold', 'dense', 'bypass')
    assert routing(causal_rule='dense').rules == ('dense', 'threshold', 'bypass')
    assert routing(router='norm').rules == ('dense', 'threshold', 'bypass')
    assert routing(router='norm', causal_rule='predictor').rules[0] == 'predictor'
    assert routing(router='random').rules == ('threshold', 'bypass')
    assert routing(router='position').rules == ('threshold', 'bypass')
    assert routing(router='straight_through').rules == ('threshold', 'positive', 'bypass')


@pytest.mark.parametrize('router', ['random', 'position'])
def test_controls_have_one_capacity_and_train_by_top_c(router):
    """Their scores are compared with a constant, so knobs that need another value are refused."""
    for knobs in ({'capacity_form': 'log_length'}, {'capacity_stages': '1:0.2'}):
        assert f'{router!r}: its scores are compared' in refusal(router=router, **knobs)
    assert f'{router} router per row has no average' in refusal(
        router=router, train_rule='threshold'
    )


def test_training_by_threshold_takes_the_threshold_rule():
    """A model that trains by the threshold is evaluated by it; other rules are refused."""
    for router in ('learned', 'norm', 'straight_through'):
        assert routing(router=router, train_rule='threshold').causal_rule == 'threshold'
    assert 'C_max is static' in refusal(train_rule='threshold', overflow='grow')
    assert 'threshold_warmup=0.0' in refusal(train_rule='threshold', threshold_warmup=0.0)
    for rule in ('predictor', 'aux_loss', 'dense'):
        message = refusal(train_rule='threshold', causal_rule=rule)
        assert f'causal_rule={rule!r}' in message and 'trained by threshold' in message


@pytest.mark.parametrize('rule', ['predictor', 'aux_loss'])
def test_a_rule_that_is_trained_has_a_loss_that_counts(rule):
    """A weight of 0 would leave the rule untrained. The weight of another rule does not matter."""
    weights = {'predictor': 'predictor_loss_weight', 'aux_loss': 'aux_loss_weight'}
    message = refusal(causal_rule=rule, **{weights.pop(rule): 0.0})
    assert message.startswith('model.routing.') and f'causal_rule is {rule}' in message
    (other,) = weights.values()
    assert routing(causal_rule=rule, **{other: 0.0}).causal_rule == rule


def test_cache_size():
    """floor(1.5 C), at least C and at most the context. `dense` keeps all tokens."""
    assert routing().cache_size(256, 'predictor') == 48
    assert routing().cache_size(256, 'dense') == 256
    assert routing(cache_capacity=1.29, capacity=0.5).cache_size(200, 'threshold') == 129
    assert routing(cache_capacity=1.0).cache_size(256, 'aux_loss') == 32
    assert routing(cache_capacity=100.0).cache_size(256, 'aux_loss') == 256
    log_length = routing(capacity_form='log_length')
    assert log_length.cache_size(1024, 'predictor') == 313


def test_a_shorter_row_never_selects_more_than_the_cache_of_a_longer_holds():
    """C grows with the length in both forms, so the top C of any prompt fits the cache."""
    for knobs in ({}, {'capacity_form': 'log_length'}, {'capacity': 1.0}):
        chosen = [routing(**knobs).num_selected(length) for length in range(1, 2500)]
        assert chosen == sorted(chosen)
    message = refusal(capacity_form='log_length', capacity=0.115)
    assert message.startswith('model.routing.capacity=0.115: must be 0.116 or more')
    message = refusal(capacity_form='log_length', capacity_stages='0.115:0.5')
    assert message.startswith("model.routing.capacity_stages='0.115:0.5': must be 0.116")
    assert routing(cache_capacity=3e38).cache_size(256, 'predictor') == 256


def test_a_pattern_needs_a_capacity_that_it_can_show():
    """A position router with a tiny capacity is refused; other routers are not."""
    assert 'capacity=1e-05' in refusal(router='position', capacity=1e-5)
    assert routing(router='random', capacity=1e-5).capacity == 1e-5


def test_documents_that_do_not_compete_have_no_threshold():
    """One number per layer cannot be the C-th score of each document, so the rule is refused."""
    for router in ('learned', 'norm', 'straight_through'):
        for knobs in ({'causal_rule': 'threshold'}, {'train_rule': 'threshold'}):
            assert 'per segment' in refusal(router=router, select_per='segment', **knobs)
        chosen = routing(router=router, select_per='segment')
        assert 'threshold' not in chosen.rules and not chosen.tracks_threshold
    assert routing(router='straight_through', select_per='segment').causal_rule == 'predictor'


def test_most_selected_tokens_are_the_cache_or_all():
    """`skip` drops tokens beyond the cache; `grow` drops none."""
    skips, grows = routing(capacity=0.25), routing(capacity=0.25, overflow='grow')
    assert [grows.max_selected(64, rule) for rule in RULES] == [64] * len(RULES)
    assert [skips.max_selected(64, rule) for rule in RULES] == [24, 24, 24, 24, 64]


@pytest.mark.parametrize(
    ('capacities', 'warmup', 'stages'),
    [
        ('', None, '0:0.125'),
        ('1:0.25,0.5:0.5', None, '0:1 0.25:0.5 0.75:0.125'),
        ('', 0.25, '0:0.125 0.25:0.125:threshold'),
        ('1:0.5', 0.25, '0:1 0.25:1:threshold 0.5:0.125:threshold'),
        ('1:0.5', 0.5, '0:1 0.5:0.125:threshold'),
        ('1:0.5', 0.75, '0:1 0.5:0.125 0.75:0.125:threshold'),
    ],
)
def test_stages(capacities, warmup, stages):
    """Each stage has one capacity and one rule. The last one trains at `capacity`."""
    knobs = {'capacity_stages': capacities}
    if warmup:
        knobs |= {'train_rule': 'threshold', 'threshold_warmup': warmup}
    found = [
        f'{begins:g}:{capacity:g}' + ':threshold' * (rule == 'threshold')
        for begins, capacity, rule in routing(**knobs).stages
    ]
    assert ' '.join(found) == stages


def test_malformed_stages_are_refused_in_one_line():
    """The line has the text as written and a correct example."""
    unreadable = ('1', '1:', ':0.2', '1:0.2:3', 'a:0.2', '1;0.2', '1:0.2 0.5:0.3')
    capacities = ('0:0.2', '-1:0.2', '1.5:0.2', 'nan:0.2')
    shares = ('1:0', '1:-0.1', '1:1', '1:0.5,0.5:0.5', '1:nan', '1:inf')
    for text in (*unreadable, *capacities, *shares):
        message = refusal(capacity_stages=text)
        assert message.startswith(f'model.routing.capacity_stages={text!r}: ')
        assert '1:0.2,0.5:0.3' in message


def test_a_stage_is_the_run_at_its_capacity(tiny_config):
    """Hparams.at changes only the capacity, of all that a forward pass reads."""
    knobs = {'capacity_stages': '0.5:0.5', 'train_rule': 'threshold', 'capacity': 0.25}
    knobs = {f'model.routing.{name}': value for name, value in knobs.items()}
    hparams = from_config(tiny_config(**knobs, **{'model.routing.router': 'learned'}))
    first, *_, last = (hparams.at(stage) for stage in hparams.stages)
    assert (first.model.routing.capacity, last.model.routing.capacity) == (0.5, 0.25)
    assert first.model.routing.causal_rule == last.model.routing.causal_rule == 'threshold'
    assert first.model.routing.rules == hparams.model.routing.rules
    assert first.stages == ((0.0, 0.5, 'top_c'),)
    dense = from_config(tiny_config(**{'model.routing.capacity_stages': '0.5:0.5'}))
    assert dense.stages == ((0.0, 1.0, 'top_c'),) and dense.at(dense.stages[0]) == dense
