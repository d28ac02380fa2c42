"""The user, the config next to the file, or the file decide which token starts a document."""

import json

import pytest

from moddepth_jax.data.tokenizers.separators import find_separator
from tests.data.prepared_text import refusal

SPECIAL = {'<s>': 1, '</s>': 2, '<pad>': 3, '<|end|>': 4}


def found(folder, config=None, special=SPECIAL, first=None, given=None):
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / 'tokenizer_config.json').write_text(text)
    return find_separator(folder / 'tokenizer.json', special, first, given)


@pytest.mark.parametrize(
    ('config', 'how', 'separator', 'stops'),
    [
        (None, {}, 1, (1, 2)),
        (None, {'special': {'<|begin_of_text|>': 9, '<|end_of_text|>': 8}}, 9, (9, 8)),
        (None, {'first': '<pad>'}, 3, (3,)),
        ({'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': True}, {}, 1, (1, 2)),
        ({'bos_token': '<s>', 'eos_token': '</s>', 'add_bos_token': False}, {}, 2, (2,)),
        ({'bos_token': '<s>', 'eos_token': '</s>'}, {'first': '<pad>'}, 2, (2,)),
        ({'bos_token': None, 'eos_token': {'content': '<|end|>'}}, {}, 4, (4,)),
        ({'bos_token': '<s>', 'eos_token': '<|end|>'}, {'first': '<s>'}, 1, (1, 4)),
        (
            {'bos_token': '<s>', 'add_bos_token': True, 'eos_token': '</s>'},
            {'given': '<pad>'},
            3,
            (3, 2),
        ),
    ],
)
def test_the_first_that_says_it_decides(tmp_path, config, how, separator, stops):
    assert found(tmp_path, config, **how) == (separator, stops)


@pytest.mark.parametrize(
    ('config', 'how', 'words'),
    [
        (None, {'given': 'a'}, "tokenizer.json: separator 'a' is not a special token of it"),
        ({'eos_token': 'a'}, {}, "eos_token of tokenizer_config.json 'a' is not a special token"),
        (None, {'special': {}}, 'no special token is known to start a document (it has none)'),
        (None, {'special': {f'<{i}>': i for i in range(200)}}, "'<7>' and 192 more"),
        ('{', {}, 'tokenizer_config.json: cannot be read'),
        (
            {'bos_token': 3},
            {},
            'tokenizer_config.json: bos_token is 3; must be the text of a token',
        ),
    ],
)
def test_none_or_a_wrong_one_is_refused_by_name(tmp_path, config, how, words):
    assert words in refusal(found, tmp_path, config, **how)
