"""The plan of a run is made before it starts: whole steps within the budget, ids that fit."""

import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training import plan
from tests.data import tokenizer_files


def one_line(caught, *words):
    message = str(caught.value)
    assert '\n' not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize('share', [1.0, 1.999, 2.0, 1e6])
def test_a_budget_buys_whole_steps(tiny_config, share):
    """The steps are the floor of budget over cost, so that their total never exceeds the budget."""
    cost = train_step_flops(from_config(tiny_config()))
    changes = {'training.num_steps': 0, 'flop_budget': share * cost}
    assert plan.resolve_steps(from_config(tiny_config(**changes))) == int(share)


def test_steps_are_given_where_there_is_no_budget(tiny_config):
    """Without a budget training.num_steps decides."""
    assert plan.resolve_steps(from_config(tiny_config(**{'training.num_steps': 13}))) == 13


def test_a_budget_below_one_step_is_refused_with_the_cost(tiny_config):
    """The line names the budget and what one step costs."""
    cost = train_step_flops(from_config(tiny_config()))
    changes = {'training.num_steps': 0, 'flop_budget': 0.999 * cost}
    with pytest.raises(ValueError) as caught:
        plan.resolve_steps(from_config(tiny_config(**changes)))
    one_line(caught, 'flop_budget=', f'{cost:.3g}')


def test_a_vocabulary_below_the_tokenizers_is_refused(tiny_config):
    """An id that the embedding does not have would be read as something else: both are named."""
    hparams = from_config(tiny_config(**{'model.vocab_size': 256}))
    with pytest.raises(ValueError) as caught:
        plan.check_vocabulary(hparams, make_tokenizer('bytes'))
    one_line(caught, 'model.vocab_size=256', '257')
    plan.check_vocabulary(from_config(tiny_config()), make_tokenizer('bytes'))


def test_a_run_is_planned_with_the_tokenizer_that_it_keeps(tiny_config, tmp_path):
    """Its file may be gone; without a kept one the file is asked for, before any text is read."""
    kept = tokenizer_files.byte_level()
    kept.save(tmp_path / 'tokenizer')
    for seed in range(4):
        (tmp_path / f'{seed}.txt').write_bytes(tokenizer_files.plain_text(seed, 400))
    changes = {'model.vocab_size': 320, 'data.tokenizer': '/nowhere/x.json'}
    hparams = from_config(tiny_config(**changes, **{'data.source': str(tmp_path / '*.txt')}))
    _, dataset, _ = plan.prepare_run(hparams, 'data=1', tmp_path)
    assert dataset.tokenizer.sha256 == kept.sha256
    assert dataset.train_batch(0)['tokens_BT'].max() > 256
    with pytest.raises(ValueError) as caught:
        plan.prepare_run(hparams, 'data=1')
    one_line(caught, "data.tokenizer='/nowhere/x.json'", 'no such tokenizer')


def test_a_budget_of_more_steps_than_can_be_counted_is_refused(tiny_config):
    """The step is an int32: a budget for 2^31 steps is told, not wrapped around."""
    cost = train_step_flops(from_config(tiny_config()))
    changes = {'training.num_steps': 0, 'flop_budget': 2.0**31 * cost}
    with pytest.raises(ValueError) as caught:
        plan.resolve_steps(from_config(tiny_config(**changes)))
    one_line(caught, 'flop_budget=', '2147483648')
