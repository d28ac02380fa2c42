"""An export names the tokens that begin and end texts, and draws no others without text."""

import json

import numpy as np
import pytest

from moddepth_jax.conversion import special_tokens
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from tests.data.tokenizer_files import llama_file

NAMED = {'bos_token': '<s>', 'eos_token': '</s>', 'model_max_length': 9}


class Words:
    """A tokenizer whose ids 1 and 3 have no text; 1 begins documents, and 1 and 2 end them."""

    separator, separator_text, stops = 1, '', (1, 2)
    token_bytes_V = np.array([1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ('config', 'stops'),
    [
        ({}, [1, 2]),
        ({'eos_token_id': None}, [1, 2]),
        ({'eos_token_id': 2}, [2, 1]),
        ({'eos_token_id': [7, 2], 'bos_token_id': 2}, [7, 2, 1]),
        ({'eos_token_id': [2, 7, 1]}, [2, 7, 1]),
    ],
    ids=str,
)
def test_stops_are_added_to_those_of_the_import(config, stops):
    found = special_tokens.with_token_ids(config | {'other': 3}, Words)
    assert found == {'bos_token_id': 1, 'eos_token_id': stops, 'other': 3}


def test_ids_without_text_are_not_drawn(tmp_path):
    """Other fields of an existing file are kept, and so are its stops, which may have no text.

    Its suppressed ids are kept too, unless the run stops at them.
    """
    file = tmp_path / special_tokens.GENERATION_FILE
    ids = {'bos_token_id': 1, 'eos_token_id': [1, 2]}
    special_tokens.suppress_unknown_ids(tmp_path, 6, Words, ids)
    assert json.loads(file.read_text()) == ids | {'suppress_tokens': [3, 5]}
    existing = {
        'eos_token_id': 5,
        'top_k': 4,
        '_from_model_config': True,
        'suppress_tokens': [0, 1],
    }
    file.write_text(json.dumps(existing))
    special_tokens.suppress_unknown_ids(tmp_path, 6, Words, ids)
    wanted = {'bos_token_id': 1, 'eos_token_id': [5, 1, 2], 'top_k': 4}
    wanted['suppress_tokens'] = [0, 3]
    assert json.loads(file.read_text()) == wanted


@pytest.mark.parametrize('separator', [None, '</s>', '<unk>'])
def test_files_name_another_separator(separator, tmp_path):
    """A tokenizer that is made from the exported files has the separator of the run."""
    (tmp_path / 'tokenizer.json').write_text(llama_file())
    for name in ('tokenizer_config.json', 'special_tokens_map.json'):
        (tmp_path / name).write_text(json.dumps(NAMED))
    tokenizer = make_tokenizer(tmp_path, separator)
    other = special_tokens.has_other_separator(tmp_path, tokenizer)
    assert other == (separator is not None)
    special_tokens.name_separator(tmp_path, tokenizer, other)
    again = make_tokenizer(tmp_path)
    assert again.separator == tokenizer.separator
    for name in ('tokenizer_config.json', 'special_tokens_map.json'):
        named = json.loads((tmp_path / name).read_text())
        text = dict.fromkeys(('bos_token', 'eos_token'), separator)
        assert named == NAMED | (text if other else {})


def test_prompts_of_an_export_are_padded_on_the_left(tmp_path):
    (tmp_path / 'tokenizer.json').write_text(llama_file())
    special_tokens.name_separator(tmp_path, make_tokenizer(tmp_path, '</s>'), replace=False)
    named = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    found = named['padding_side'], named['pad_token'], named['eos_token']
    assert found == ('left', '</s>', '</s>')


def test_files_without_a_tokenizer_are_kept(tmp_path):
    """They may describe a tokenizer of a form that is not read."""
    file = tmp_path / 'tokenizer_config.json'
    file.write_text(json.dumps(NAMED))
    assert special_tokens.has_other_separator(tmp_path, Words)
    special_tokens.name_separator(tmp_path, Words, replace=True)
    assert json.loads(file.read_text()) == NAMED and list(tmp_path.iterdir()) == [file]
