"""Prepared text gives the batches of its text, and mixtures keep their shares."""

import fractions
import json
import shutil

import numpy as np
import pytest

from moddepth_jax.data.compression_baselines import describe_measured_text, measure_baselines
from moddepth_jax.data.corpus import load_corpus
from moddepth_jax.data.mixture import RowSchedule, held_out_order
from moddepth_jax.data.pipeline import check_fingerprint, make_dataset, make_held_out
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from tests.data.prepared_text import begin, data_hparams, prepare, refusal, write_texts


def _data(source, mixture='', **changes):
    knobs = {'tokenizer': 'prepared', 'sequence_length': 16, 'batch_size': 5} | changes
    return data_hparams(source, mixture=mixture, **knobs)


def _same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Texts of letters, digits and signs, each also prepared; `tiny` has no window."""
    folder = tmp_path_factory.mktemp('mixture')
    for seed, (name, letters) in enumerate(
        {'letters': b'abcd', 'digits': b'0123', 'signs': b'+-*/'}.items()
    ):
        documents = write_texts(folder / f'{name}-text', letters, seed)
        prepare(folder / name, documents, ByteTokenizer(), 0.25)
    prepare(folder / 'tiny', [('a', b'xy'), ('b', b'zz')], ByteTokenizer(), 0.25)
    return folder


@pytest.fixture(scope='module')
def raw(folder):
    return make_dataset(_data(f'{folder}/letters-text/*.txt', tokenizer='bytes'), 3)


@pytest.fixture(scope='module')
def alone(folder):
    return make_dataset(_data(folder / 'letters'), 3)


@pytest.fixture(scope='module')
def mixed(folder):
    return make_dataset(_data('mixture', f'{folder}/letters:2,{folder}/digits:1'), 3)


# A prepared folder.


def test_prepared_text_gives_the_batches_of_the_text_itself(raw, alone):
    assert raw.num_train_windows == alone.num_train_windows > 20
    for step in (0, 1, 9, 1000):
        assert _same(raw.train_batch(step), alone.train_batch(step))
        assert raw.train_windows(step) == alone.train_windows(step)
    assert raw.num_held_out_batches == alone.num_held_out_batches > 1
    for index in range(raw.num_held_out_batches):
        assert _same(raw.held_out_batch(index), alone.held_out_batch(index))
    for part in ('train', 'held_out'):
        assert list(getattr(alone.corpus, part)) == getattr(raw.corpus, part)
    described = [dataset.corpus.description.partition(': ')[2] for dataset in (raw, alone)]
    assert described[0] == described[1]
    assert alone.held_back and raw.held_back and not alone.domains


def test_only_requested_prepared_text_is_read(folder, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, 'decode', lambda *_: pytest.fail('decoded'))
    dataset = make_dataset(_data('mixture', f'{folder}/letters:1,{folder}/digits:1'), 0)
    dataset.train_batch(3), dataset.held_out_batch(0)
    streams = [*dataset.held_out_streams, *dataset._windows._streams]
    assert len(streams) == 4 and all(isinstance(stream, np.memmap) for stream in streams)
    assert type(dataset.train_batch(0)['tokens_BT']) is np.ndarray
    assert len(dataset.corpus.train) > 10 and describe_measured_text(dataset.corpus)


def test_baselines_of_a_mixture_weight_members_by_share(folder, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
    corpus = load_corpus(_data('mixture', f'{folder}/letters:3,{folder}/digits:1'))
    share = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert measure_baselines(corpus)['unigram'] == pytest.approx(2 + share, abs=0.02)
    assert 'mixed by its shares' in describe_measured_text(corpus)


def test_moving_the_folder_changes_nothing(folder, raw, alone, tmp_path):
    moved = make_dataset(_data(shutil.copytree(folder / 'letters', tmp_path / 'elsewhere')), 3)
    store = json.loads((folder / 'letters/prepared.json').read_text())
    assert alone.fingerprint['corpus_sha256'] == alone.corpus.sha256 == store['fingerprint']
    assert alone.fingerprint == moved.fingerprint
    assert str(folder) not in json.dumps(alone.fingerprint)
    assert set(alone.may_change) == {'data.source', 'data.mixture', 'data.tokenizer'}
    assert raw.may_change == ()
    for other in (make_dataset(_data(folder / 'digits'), 3), raw):
        message = refusal(check_fingerprint, other.fingerprint, alone.fingerprint)
        assert 'corpus_sha256 was' in message


def test_all_of_a_folder_is_evaluated_unless_it_was_trained_on(folder, alone):
    """Other text is both splits; text that the run was trained on is only the held-out split."""
    data = _data(folder / 'letters', held_out_fraction=0.9)
    whole = make_held_out(data)
    kept = make_held_out(data, trained_on={whole.corpus.sha256: 0.25})
    assert not whole.held_back and kept.held_back
    assert len(whole.corpus.held_out) == len(alone.corpus.train) + len(alone.corpus.held_out)
    assert list(kept.corpus.held_out) == list(alone.corpus.held_out)
    for index in range(alone.num_held_out_batches):
        assert _same(kept.held_out_batch(index), alone.held_out_batch(index))


# Mixtures.


@pytest.mark.parametrize('weights', ['1', '5,3,2,1', '1e-3,2,0.333'])
def test_every_member_has_its_share_at_every_row(weights):
    """To within the number of members; the rows of a member are counted consecutively."""
    weights = [fractions.Fraction(weight) for weight in weights.split(',')]
    shares = [weight / sum(weights) for weight in weights]
    schedule, seen = RowSchedule(shares), [0] * len(shares)

    def check(rows):
        for count, share in zip(schedule.counts(rows), shares, strict=True):
            assert abs(count - rows * share) < len(shares)

    for row in range(3000):
        assert schedule.counts(row) == seen
        member, nth = schedule.member(row)
        assert nth == seen[member]
        seen[member] += 1
        check(row + 1)
    check(10**12)


def test_held_out_batches_come_one_of_each_first_then_by_shares():
    order = list(held_out_order([fractions.Fraction(3, 4), fractions.Fraction(1, 4)], [6, 4]))
    assert [member for member, _ in order] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 1]
    assert sorted(order) == [*((0, i) for i in range(6)), *((1, i) for i in range(4))]


def test_each_member_visits_each_window_once_per_epoch(folder, alone, mixed):
    steps = range(2 * mixed.num_train_windows // 5)
    rows = [row for step in steps for row in mixed.train_windows(step)]
    assert [mixed.domain(index) for index in (0, 1)] == ['letters', 'digits']
    assert _same(mixed.held_out_batch(0), alone.held_out_batch(0))
    bound, total = alone.num_train_windows, mixed.num_train_windows
    for name, first, last in (('letters', 0, bound), ('digits', bound, total)):
        seen = [number for number in rows if first <= number < last]
        size = last - first
        assert len(seen) > size and sorted(seen[:size]) == list(range(first, last))
        assert mixed.domain_epochs(len(steps))[name] == len(seen) / size
    of_one = make_dataset(_data('mixture', f'{folder}/letters:5'), 3)
    for step in (0, 5, 99):
        assert _same(of_one.train_batch(step), alone.train_batch(step))
    assert not alone.domain_epochs(9) and not of_one.domains


def test_a_batch_of_a_mixture_is_a_function_of_the_step_and_its_rows(mixed, folder):
    again = make_dataset(_data('mixture', f'{folder}/letters:2,{folder}/digits:1'), 3)
    for step in (50, 0, 10**9):
        whole = mixed.train_batch(step)
        assert _same(whole, again.train_batch(step))
        for rows in (slice(0, 2), slice(3, 5)):
            part = mixed.train_batch(step, rows)
            assert all(np.array_equal(part[name], whole[name][rows]) for name in whole)
        for row, tokens in enumerate(map(set, whole['tokens_BT'].tolist())):
            member, _ = mixed._schedule.member(5 * step + row)
            assert tokens & set((b'abcd', b'0123')[member])
            assert not tokens & set((b'0123', b'abcd')[member])


def test_fingerprint_of_a_mixture_names_the_member_that_changed(folder, mixed):
    """It has members and shares, but no paths; the first difference is named."""

    def fingerprint(*members):
        mixture = ','.join(str(member) for member in members)
        return make_dataset(_data('mixture', mixture), 3).fingerprint

    letters, digits, signs = (folder / name for name in ('letters', 'digits', 'signs'))
    kept = mixed.fingerprint
    check_fingerprint(json.loads(json.dumps(kept)), fingerprint(f'{letters}:4', f'{digits}:2'))
    wrong = fingerprint(f'{letters}:2', f'{signs}:1')
    was, now = (repr(found['member_2']) for found in (kept, wrong))
    message = refusal(check_fingerprint, kept, wrong)
    assert f'member_2 was {was} (digits) and is {now} (signs) now' in message
    wrong = fingerprint(f'{letters}:1', f'{digits}:1')
    assert "share_1 was '2/3' and is '1/2'" in refusal(check_fingerprint, kept, wrong)


def test_members_of_the_same_name_are_distinguished(folder, tmp_path):
    for name, text in (('a', 'letters'), ('b', 'digits')):
        shutil.copytree(folder / text, tmp_path / name / 'data')
    mixture = f'{tmp_path}/a/data:1,{tmp_path}/b/data:1'
    assert list(make_dataset(_data('mixture', mixture), 0).domains) == ['a/data', 'b/data']


# Refused mixtures, with {} for the folder, and words of the message.
BAD = [
    ('', ['FOLDER:WEIGHT']),
    ('{}/letters,{}/digits:1', ["'{}/letters'", 'FOLDER:WEIGHT']),
    ('{}/letters:much', ["'much'", 'letters', 'number above 0']),
    ('{}/letters:1,{}/digits:0', ["'0'", 'digits', 'above 0']),
    ('{}/letters:1e-999999999', ["'1e-999999999'"]),
    ('{}/letters:1,{}/digits/../letters/:2', ['{}/letters must be listed once']),
]


@pytest.mark.parametrize(('mixture', 'words'), BAD)
def test_a_malformed_mixture_is_refused(folder, mixture, words):
    mixture = mixture.replace('{}', str(folder))
    message = refusal(_data, 'mixture', mixture)
    assert message.startswith(f'data.mixture={mixture!r}: ')
    assert all(word.replace('{}', str(folder)) in message for word in words), message


def test_members_that_do_not_fit_are_refused(folder, tmp_path):
    """An unknown or unfinished one, one without a window, a copy of another, another tokenizer or
    split: each in one line that names it.
    """
    begin(tmp_path / 'begun')
    shutil.copytree(folder / 'letters', tmp_path / 'copy')
    prepare(tmp_path / 'split', write_texts(tmp_path / 'text', b'xy', 9), ByteTokenizer(), 0.5)
    tokenizer = ByteTokenizer()
    tokenizer.sha256, tokenizer.name = 'c0ffee' * 8, 'mine.json'
    other = tmp_path / 'other'
    prepare(other, write_texts(tmp_path / 'digits', b'12', 9), tokenizer, 0.25)
    mine = "'mine.json' (sha256 c0ffeec0ffee..)"
    for member, words in (
        (folder / 'nowhere', [f'{folder}/nowhere: ']),
        (tmp_path / 'begun', ['begun', 'run the same launch.prepare again']),
        (folder / 'tiny', ['data.sequence_length=16: the training text of', f'{folder}/tiny']),
        (tmp_path / 'copy', ['are the same text']),
        (tmp_path / 'split', ['data.held_out_fraction=0.25: ', 'set it to 0.5', 'split was']),
        (other, [mine, "'bytes'", f'--tokenizer={folder}/letters/tokenizer']),
    ):
        message = refusal(make_dataset, _data('mixture', f'{folder}/letters:1,{member}:1'), 0)
        assert all(word in message for word in words), message
    message = refusal(make_dataset, _data(other, tokenizer='bytes'), 0)
    assert "data.tokenizer='bytes'" in message and "set it to 'prepared'" in message
    message = refusal(_data, 'stdlib', f'{folder}/letters:1')
    assert message.startswith('data.mixture=') and "set that to 'mixture'" in message
