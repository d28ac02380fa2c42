"""A JSON file without the expected object is refused in one line."""

import pytest

from moddepth_jax.data.directory import parse_object, read_json
from tests.data.prepared_text import refusal

FIELDS = {'a': int, 'b': float, 'c': {'d': [{'e': str}]}}
RIGHT = '{"a": 1, "b": 2, "c": {"d": [{"e": ""}, {"e": "f", "g": null}]}}'


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        (b'', 'Expecting value'),
        (b'{"a": 1', 'delimiter'),
        (b'[]', 'not a JSON object'),
        (b'\xff\xfe{}', "'utf-8' codec can't decode byte 0xff in position 0"),
        (b'[' * 10**5, 'nested more than 64 deep'),
        (b'{"a": %s1%s}' % (b'[' * 64, b']' * 64), 'nested more than 64 deep'),
        (b'{"a": 1%s}' % (b'0' * 5000), 'digits'),
        (b'{"b": 2}', "holds no 'a'; must be an integer"),
        (b'{"a": true}', 'a=True; must be an integer'),
        (b'{"a": 1.0}', 'a=1.0; must be an integer'),
        (b'{"a": [[[[[[[[[1]]]]]]]]]}', 'a=[[[[[[[...]]]]]]]; must be an integer'),
        (b'{"a": 1, "b": "%s"}' % (b'x' * 10**6), '...'),
        (b'{"a": 1, "b": 2, "c": 3}', 'c=3; must be an object'),
        (b'{"a": 1, "b": 2, "c": {"d": null}}', ': c: d=None; must be a list'),
        (b'{"a": 1, "b": 2, "c": {"d": [{"e": ""}, 1]}}', ': c: d: 1=1; must be an object'),
        (b'{"a": 1, "b": 2, "c": {"d": [{}]}}', ": c: d: 0: holds no 'e'; must be text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_objects_are_refused(tmp_path, text, words):
    file = tmp_path / 'some.json'
    file.write_bytes(text)
    message = refusal(read_json, file, 'write it again', FIELDS)
    assert words in message and len(message) < 400, message
    assert message.startswith(f'{file}: ') and message.endswith('; write it again')


def test_an_object_is_read_and_a_missing_file_is_none(tmp_path):
    file = tmp_path / 'some.json'
    assert read_json(file, '') is read_json(file / 'below', '') is None
    file.write_text(RIGHT)
    assert read_json(file, '', FIELDS)['c']['d'][1] == {'e': 'f', 'g': None}
    assert parse_object('{"a": ' + '[' * 63 + ']' * 63 + '}')
