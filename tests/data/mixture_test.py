"""Shows that prepared text trains as the text itself, and that mixtures keep their shares."""

import collections
import dataclasses
import fractions
import json
import shutil

import numpy as np
import pytest

from moddepth_jax.data.compression_baselines import describe_measured_text, measure_baselines
from moddepth_jax.data.corpus import load_corpus
from moddepth_jax.data.mixture import RowSchedule, held_out_order
from moddepth_jax.data.pipeline import check_fingerprint, make_dataset, make_held_out
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer, make_tokenizer
from moddepth_jax.hparams import DataHparams
from tests.data.prepared_text import begin, prepare, write_texts

S = 256
DATA = DataHparams('unset', '', 'text', 'prepared', 16, 5, 0.25, False)


def _data(source, mixture='', **changes):
    return dataclasses.replace(DATA, source=str(source), mixture=mixture, **changes)


def _error(call, *args, **named):
    with pytest.raises(ValueError) as caught:
        call(*args, **named)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def _same(one, other):
    return (
        all(np.array_equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    )


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


# A prepared folder.


@pytest.mark.parametrize('seed', [0, 7])
def test_prepared_text_gives_the_batches_of_the_text_itself(folder, seed):
    """Every batch to train on and held out is bit-equal, and so are the documents."""
    raw = make_dataset(_data(f'{folder}/letters-text/*.txt', tokenizer='bytes'), seed)
    prepared = make_dataset(_data(folder / 'letters'), seed)
    assert raw.num_train_windows == prepared.num_train_windows > 20
    for step in (0, 1, 9, 1000):
        assert _same(raw.train_batch(step), prepared.train_batch(step))
        assert raw.train_windows(step) == prepared.train_windows(step)
    assert raw.num_held_out_batches == prepared.num_held_out_batches > 1
    for index in range(raw.num_held_out_batches):
        assert _same(raw.held_out_batch(index), prepared.held_out_batch(index))
    for part in ('train', 'held_out'):
        assert list(getattr(prepared.corpus, part)) == getattr(raw.corpus, part)
    assert prepared.corpus.train[-1] == raw.corpus.train[-1]
    assert (
        prepared.corpus.description.partition(': ')[2] == raw.corpus.description.partition(': ')[2]
    )
    assert prepared.held_back and raw.held_back and not prepared.domains


def test_nothing_of_prepared_text_is_read_but_what_is_asked_for(folder, monkeypatch):
    """Streams stay maps of their files, and no document is decoded by a run."""
    monkeypatch.setattr(ByteTokenizer, 'decode', lambda *_: pytest.fail('decoded'))
    dataset = make_dataset(_data('mixture', f'{folder}/letters:1,{folder}/digits:1'), 0)
    dataset.train_batch(3), dataset.held_out_batch(0)
    streams = [*dataset.held_out_streams, *dataset._windows._streams]
    assert len(streams) == 4 and all(isinstance(stream, np.memmap) for stream in streams)
    assert type(dataset.train_batch(0)['tokens_BT']) is np.ndarray
    assert len(dataset.corpus.train) > 10 and describe_measured_text(dataset.corpus)


def test_baselines_decode_only_the_first_documents(folder, monkeypatch):
    """Of more text than is measured, no document after the first bytes is decoded."""
    corpus, decoded = load_corpus(_data(folder / 'letters')), []
    decode = ByteTokenizer.decode

    def note(tokenizer, ids):
        decoded.append(len(ids))
        return decode(tokenizer, ids)

    monkeypatch.setattr(ByteTokenizer, 'decode', note)
    monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
    monkeypatch.setattr('moddepth_jax.data.compression_baselines.MAX_BYTES', 150)
    measure_baselines(corpus)
    assert sum(decoded[:-1]) < 150 <= sum(decoded) and len(corpus.train) > len(decoded)


def test_baselines_of_a_mixture_weigh_its_members_by_share(folder, monkeypatch):
    """Of two texts of four letters each, by 3 to 1: the entropy of the bytes knows the shares."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
    corpus = load_corpus(_data('mixture', f'{folder}/letters:3,{folder}/digits:1'))
    share = -(0.75 * np.log2(0.75) + 0.25 * np.log2(0.25))
    assert measure_baselines(corpus)['unigram'] == pytest.approx(2 + share, abs=0.02)
    assert 'mixed by its shares' in describe_measured_text(corpus)


def test_moving_the_folder_changes_nothing(folder, tmp_path):
    """The fingerprint holds the text's, and no path; other text is refused by name."""
    first = make_dataset(_data(folder / 'letters'), 0)
    moved = make_dataset(_data(shutil.copytree(folder / 'letters', tmp_path / 'elsewhere')), 0)
    store = json.loads((folder / 'letters/prepared.json').read_text())
    assert first.fingerprint['corpus_sha256'] == first.corpus.sha256 == store['fingerprint']
    assert first.fingerprint == moved.fingerprint
    assert str(folder) not in json.dumps(first.fingerprint)
    assert set(first.may_change) == {'data.source', 'data.mixture', 'data.tokenizer'}
    other = make_dataset(_data(folder / 'digits'), 0).fingerprint
    assert 'corpus_sha256 was' in _error(check_fingerprint, first.fingerprint, other)
    raw = make_dataset(_data(f'{folder}/letters-text/*.txt', tokenizer='bytes'), 0)
    assert raw.may_change == ()
    assert 'fingerprint: corpus_sha256' in _error(
        check_fingerprint, raw.fingerprint, first.fingerprint
    )


def test_all_of_a_folder_is_evaluated_unless_it_was_trained_on(folder):
    """Given text is both splits; of text that the run was trained on, only the held-out one."""
    data = _data(folder / 'letters', held_out_fraction=0.9)
    whole = make_held_out(data)
    fingerprint = whole.corpus.sha256
    kept = make_held_out(data, trained_on={fingerprint})
    own = make_dataset(_data(folder / 'letters'), 0)
    assert not whole.held_back and kept.held_back
    assert len(whole.corpus.held_out) == len(own.corpus.train) + len(own.corpus.held_out)
    assert list(kept.corpus.held_out) == list(own.corpus.held_out)
    batches = [whole.held_out_batch(i)['labels_BT'] for i in range(whole.num_held_out_batches)]
    rows = [tuple(row) for row in np.concatenate(batches).tolist() if row[0] != -100]
    windows = [
        tuple(stream[at + 1 : at + 17].tolist())
        for stream in (own._windows._streams[0], own.held_out_streams[0])
        for at in range(0, len(stream) - 16, 16)
    ]
    assert sorted(rows) == sorted(windows)
    for index in range(own.num_held_out_batches):
        assert _same(kept.held_out_batch(index), own.held_out_batch(index))


def test_ids_beyond_16_bits_are_kept(tmp_path):
    """Of a vocabulary of 70,000: the stream is 32 bits wide, batches hold the ids as they are."""
    tokenizer = _wide_tokenizer(tmp_path)
    documents = write_texts(tmp_path / 'text', b'abcd', 0)
    store = prepare(tmp_path / 'wide', documents, tokenizer, 0.25)
    prepared = make_dataset(_data(tmp_path / 'wide'), 0)
    raw = make_dataset(
        _data(f'{tmp_path}/text/*.txt', tokenizer=str(tmp_path / 'tokenizer.json')), 0
    )
    assert store.dtype == 'uint32' and store.tokens('train').itemsize == 4
    assert _same(raw.train_batch(3), prepared.train_batch(3))
    assert prepared.train_batch(0)['tokens_BT'].max() == tokenizer.separator == 69999
    assert list(prepared.corpus.train) == raw.corpus.train
    # Its name does not count, its content does.
    assert raw.fingerprint['tokenizer'] == prepared.fingerprint['tokenizer'] == tokenizer.sha256


def _wide_tokenizer(folder):
    """A byte-level tokenizer.json whose separator is id 69,999."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, *map(str, range(1000, 70743))])}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(['<|endoftext|>'])
    library.save(str(folder / 'tokenizer.json'))
    return make_tokenizer(folder / 'tokenizer.json')


# Mixtures.


@pytest.mark.parametrize('weights', ['1', '0.7,0.3', '1,1,1', '5,3,2,1', '1e-3,2,0.333'])
def test_every_member_has_its_share_at_every_row(weights):
    """After any number of rows each member has its share to within the members before it, exactly
    so after a period; the rows of a member are counted consecutively.
    """
    weights = [fractions.Fraction(weight) for weight in weights.split(',')]
    shares = [weight / sum(weights) for weight in weights]
    schedule, seen = RowSchedule(shares), [0] * len(shares)
    for row in range(3000):
        assert schedule.counts(row) == seen
        member, nth = schedule.member(row)
        assert nth == seen[member]
        seen[member] += 1
        assert all(
            abs(count - (row + 1) * share) < len(shares)
            for count, share in zip(seen, shares, strict=True)
        )
    far = 10**12
    for count, share in zip(schedule.counts(far), shares, strict=True):
        assert abs(count - far * share) < len(shares)


def test_shares_are_exact_over_a_period(folder):
    """7 and 3 of every 10 rows; weights of another sum are the same mixture."""
    schedule = RowSchedule([fractions.Fraction(7, 10), fractions.Fraction(3, 10)])
    for first in range(0, 1000, 10):
        members = [schedule.member(row)[0] for row in range(first, first + 10)]
        assert collections.Counter(members) == {0: 7, 1: 3}
    letters, digits = folder / 'letters', folder / 'digits'
    one = make_dataset(_data('mixture', f'{letters}:0.7,{digits}:0.3'), 0)
    same = make_dataset(_data('mixture', f' {letters}/:21, {digits}:9.0'), 0)
    assert one.fingerprint == same.fingerprint and one.domains == {'letters': 0.7, 'digits': 0.3}
    assert _same(one.train_batch(4), same.train_batch(4))


def test_held_out_batches_come_one_of_each_first_then_by_shares():
    """Members without batches left are skipped; each batch comes once."""
    order = list(held_out_order([fractions.Fraction(3, 4), fractions.Fraction(1, 4)], [6, 4]))
    assert [member for member, _ in order] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 1]
    assert sorted(order) == [*((0, i) for i in range(6)), *((1, i) for i in range(4))]


@pytest.fixture(scope='module')
def mixed(folder):
    return make_dataset(_data('mixture', f'{folder}/letters:2,{folder}/digits:1'), 3)


def _members(batch):
    """Of each row: 0 where it is of letters, 1 of digits."""
    return [0 if set(row) & set(b'abcd') else 1 for row in batch['tokens_BT'].tolist()]


def test_each_member_visits_each_window_once_an_epoch_of_its_own(folder, mixed):
    """Rows of a member are the windows of its text, all of them before any comes again, and a
    mixture of one is that folder.
    """
    alone = make_dataset(_data(folder / 'letters'), 3)
    first = {'letters': alone.num_train_windows}
    first['digits'] = mixed.num_train_windows - first['letters']
    steps = range(2 * mixed.num_train_windows // 5)
    rows = [row for step in steps for row in mixed.train_windows(step)]
    seen = {'letters': [n for n in rows if n < first['letters']]}
    seen['digits'] = [n for n in rows if n >= first['letters']]
    for name, numbers in seen.items():
        size = first[name]
        begin = 0 if name == 'letters' else first['letters']
        assert len(numbers) > size
        assert sorted(numbers[:size]) == list(range(begin, begin + size))
    epochs = mixed.domain_epochs(len(steps))
    for name in seen:
        assert epochs[name] == len(seen[name]) / first[name]
    of_one = make_dataset(_data('mixture', f'{folder}/letters:5'), 3)
    for step in (0, 5, 99):
        assert _same(of_one.train_batch(step), alone.train_batch(step))
    assert not alone.domain_epochs(9) and not of_one.domains


def test_a_batch_of_a_mixture_is_a_function_of_the_step_and_its_rows(mixed, folder):
    """Any order of calls and any subset of rows give the same; windows do not span members."""
    again = make_dataset(_data('mixture', f'{folder}/letters:2,{folder}/digits:1'), 3)
    for step in (50, 0, 10**9):
        whole = mixed.train_batch(step)
        assert _same(whole, again.train_batch(step))
        assert _members(whole) == [mixed._schedule.member(5 * step + row)[0] for row in range(5)]
        for rows in (slice(0, 2), slice(3, 5)):
            part = mixed.train_batch(step, rows)
            assert all(np.array_equal(part[name], whole[name][rows]) for name in whole)
    for row in mixed.train_batch(7)['tokens_BT'].tolist():
        assert not (set(row) & set(b'abcd') and set(row) & set(b'0123'))


def test_held_out_batches_are_of_one_member_each(folder, mixed):
    """A batch of a domain is the same as without the mixture, and all of them come."""
    alone = {name: make_dataset(_data(folder / name), 0) for name in ('letters', 'digits')}
    places = collections.Counter()
    for index in range(mixed.num_held_out_batches):
        name = mixed.domain(index)
        own = alone[name].held_out_batch(places[name])
        assert _same(mixed.held_out_batch(index), own)
        places[name] += 1
    assert {n: d.num_held_out_batches for n, d in alone.items()} == places
    assert mixed.domain(0) == 'letters' and mixed.domain(1) == 'digits'
    assert alone['digits'].domain(0) is None


def test_fingerprint_of_a_mixture_names_the_member_that_changed(folder, mixed, tmp_path):
    """Members and shares are in it, paths are not; the first that differs is named."""

    def fingerprint(mixture):
        return make_dataset(_data('mixture', mixture), 3).fingerprint

    kept = mixed.fingerprint
    moved = shutil.copytree(folder / 'digits', tmp_path / 'renamed')
    check_fingerprint(json.loads(json.dumps(kept)), fingerprint(f'{folder}/letters:2,{moved}:1'))
    wrong = fingerprint(f'{folder}/letters:2,{folder}/signs:1')
    message = _error(check_fingerprint, kept, wrong)
    was, now = (repr(found['member_2']) for found in (kept, wrong))
    assert f'member_2 was {was} (digits) and is {now} (signs) now' in message
    older = {field: value for field, value in kept.items() if field != 'name_2'}
    message = _error(check_fingerprint, older, wrong)
    assert f'member_2 was {was} and is {now} (signs) now' in message
    check_fingerprint(older, kept)
    wrong = fingerprint(f'{folder}/letters:1,{folder}/digits:1')
    assert "share_1 was '2/3' and is '1/2'" in _error(check_fingerprint, kept, wrong)
    wrong = fingerprint(f'{folder}/letters:1,{folder}/digits:1,{folder}/signs:1')
    assert 'share_1' in _error(check_fingerprint, kept, wrong)
    assert 'member_1' in _error(
        check_fingerprint, make_dataset(_data(folder / 'digits'), 3).fingerprint, kept
    )


def test_members_of_one_name_are_told_apart(folder, tmp_path):
    """By as much of their paths as that needs."""
    for name, text in (('a', 'letters'), ('b', 'digits')):
        shutil.copytree(folder / text, tmp_path / name / 'data')
    mixture = f'{tmp_path}/a/data:1,{tmp_path}/b/data:1'
    assert list(make_dataset(_data('mixture', mixture), 0).domains) == ['a/data', 'b/data']


# What is refused. name: (mixture with {} for the folder, words of the line)
BAD = {
    'empty': ('', ['FOLDER:WEIGHT']),
    'no weight': ('{}/letters,{}/digits:1', ["'{}/letters'", 'FOLDER:WEIGHT']),
    'no folder': (':1', ['FOLDER:WEIGHT']),
    'trailing comma': ('{}/letters:1,', ["''", 'FOLDER:WEIGHT']),
    'word': ('{}/letters:much', ["'much'", 'letters', 'number above 0']),
    'zero': ('{}/letters:1,{}/digits:0', ["'0'", 'digits', 'above 0']),
    'negative': ('{}/letters:-1', ["'-1'"]),
    'endless': ('{}/letters:inf', ["'inf'"]),
    'no number': ('{}/letters:nan', ["'nan'"]),
    'tiny exponent': ('{}/letters:1e-999999999', ["'1e-999999999'"]),
    'twice': ('{}/letters:1,{}/digits/../letters/:2', ['{}/letters must be a member once']),
}


@pytest.mark.parametrize('name', BAD)
def test_a_mixture_that_is_none_is_refused(folder, name):
    """One line with the knob, its value, the member and what would be right."""
    mixture, words = BAD[name]
    mixture = mixture.replace('{}', str(folder))
    message = _error(_data, 'mixture', mixture)
    assert message.startswith(f'data.mixture={mixture!r}: ')
    assert all(word.replace('{}', str(folder)) in message for word in words), message


def test_members_that_do_not_fit_are_refused(folder, tmp_path):
    """An unknown or unfinished one, one without a window, a copy of another, another tokenizer or
    split: each in one line that names it.
    """

    def refusal(other, **changes):
        mixture = f'{folder}/letters:1,{other}:1'
        return _error(lambda: make_dataset(_data('mixture', mixture, **changes), 0))

    assert f'{folder}/nowhere: ' in refusal(f'{folder}/nowhere')
    begin(tmp_path / 'begun')
    assert 'begun' in refusal(tmp_path / 'begun') and 'again' in refusal(tmp_path / 'begun')
    message = refusal(folder / 'tiny')
    assert (
        'data.sequence_length=16: the training text of' in message and f'{folder}/tiny' in message
    )
    shutil.copytree(folder / 'letters', tmp_path / 'copy')
    assert 'are one text' in refusal(tmp_path / 'copy')
    prepare(tmp_path / 'split', write_texts(tmp_path / 'text', b'xy', 9), ByteTokenizer(), 0.5)
    message = refusal(tmp_path / 'split')
    assert message.startswith('data.held_out_fraction=0.25: ') and 'set it to 0.5' in message
    assert 'split was' in message
    about = json.loads((folder / 'digits/prepared.json').read_text())
    other = shutil.copytree(folder / 'digits', tmp_path / 'other')
    about['tokenizer'] |= {'sha256': 'c0ffee' * 8, 'name': 'mine.json'}
    (other / 'prepared.json').write_text(json.dumps(about))
    message = refusal(other)
    assert "'mine.json' (sha256 c0ffeec0ffee..)" in message and "'bytes'" in message
    assert f'--tokenizer={folder}/letters/tokenizer' in message
    alone = _error(make_dataset, _data(other, tokenizer='bytes'), 0)
    assert "data.tokenizer='bytes'" in alone and "set it to 'prepared'" in alone


def test_a_mixture_needs_its_source(folder):
    """The knob without data.source=mixture is refused rather than left unread."""
    message = _error(_data, 'stdlib', f'{folder}/letters:1')
    assert message.startswith('data.mixture=') and "set that to 'mixture'" in message


def test_an_unfinished_folder_is_reported_as_unfinished(tmp_path):
    """Not that it is no glob."""
    begin(tmp_path)
    assert 'run the same launch.prepare again' in _error(load_corpus, _data(tmp_path))
