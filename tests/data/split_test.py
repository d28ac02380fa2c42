"""The split depends on names alone, keeps every document once and leaves no side empty."""

import itertools

import pytest

from moddepth_jax.data.split import split_documents


def _documents(n):
    return [(f'folder/{i}.txt', b'text %d' % i) for i in range(n)]


def _texts(documents, fraction, **how):
    return tuple([text for _, text in side] for side in split_documents(documents, fraction, **how))


def test_each_document_is_on_one_side_and_in_order():
    documents = _documents(400)
    train, held_out = split_documents(documents, 0.25)
    assert sorted(train + held_out, key=documents.index) == documents
    for side in (train, held_out):
        assert side == sorted(side, key=documents.index)
    assert 70 < len(held_out) < 130


def test_the_side_of_a_document_depends_on_its_name_alone():
    documents = _documents(200)

    def held_out(some, fraction=0.25):
        return {name for name, _ in split_documents(some, fraction)[1]}

    names = held_out(documents)
    assert held_out(documents[:100]) == names & {name for name, _ in documents[:100]}
    assert held_out(documents[::-1]) == names
    assert held_out([(name, b'new ' + text) for name, text in documents]) == names
    assert names < held_out(documents, 0.5)


@pytest.mark.parametrize('n', [2, 3, 9])
def test_no_side_is_empty(n):
    """What is held out only grows with the fraction, from one document to all but one."""
    documents = _documents(n)
    sides = [_texts(documents, f) for f in (1e-9, 0.3, 0.5, 0.8, 1 - 1e-9)]
    assert all(len(train) + len(held_out) == n for train, held_out in sides)
    assert len(sides[0][1]) == len(sides[-1][0]) == 1
    for (_, fewer), (_, more) in itertools.pairwise(sides):
        assert set(fewer) <= set(more)


@pytest.mark.parametrize('character', ['x', 'é', '€', '😀'])
@pytest.mark.parametrize('fraction', [1e-9, 0.05, 0.3, 0.5, 0.95, 1 - 1e-9])
def test_a_single_document_is_split_between_characters_on_demand(character, fraction):
    width = len(character.encode())
    for before in ('', 'a', 'ab', 'abc'):
        text = (before + character * (40 if before else 2)).encode()
        wanted = len(text) - round(len(text) * fraction)
        wanted = min(max(wanted, 1), len(text) - 1)
        assert _texts([('a', text)], fraction) == ([text[:wanted]], [text[wanted:]])
        (train,), (held_out,) = _texts([('a', text)], fraction, whole_characters=True)
        assert train.decode() + held_out.decode() == text.decode() and train and held_out
        assert abs(len(train) - wanted) < width
        assert len(train) <= wanted or wanted < width


@pytest.mark.parametrize(
    'text, whole, words', [(b'x', False, '1 byte'), ('😀'.encode(), True, '1 character')]
)
def test_what_cannot_be_split_is_refused(text, whole, words):
    with pytest.raises(ValueError, match=f'^a.txt: {words}; needs 2 or more'):
        split_documents([('a.txt', text)], 0.5, whole_characters=whole)
