"""The comparison with the MoDA authors' times: their numbers, ours next to them, no GPU."""

import pytest

from moddepth_jax.benchmarks import authors
from moddepth_jax.benchmarks.attention_forms import BOTH, PLAIN


def test_published_times_give_the_published_ratios():
    """Extra time, in percent of MoDA's, as the authors print it next to their times."""
    extra = [25.86, 18.99, 8.59, 4.38, 2.73, 27.07, 15.76, 4.57, 2.84, 15.57, 30.52]
    for (flash, moda), percent in zip(authors.PUBLISHED.values(), extra, strict=True):
        assert 100 * (1 - flash / moda) == pytest.approx(percent, abs=0.01)


def test_our_times_are_shown_next_to_theirs(monkeypatch):
    """A form that failed, or a shape without room, leaves a dash."""

    def bench_case(case, names, seconds, brief):
        if case.slots == 256:
            raise ValueError('no room')
        rows = [{'implementation': names[0], 'over': PLAIN, 'seconds': 4e-3}]
        rows += [{'implementation': 'xla', 'over': BOTH, 'seconds': 5e-3}]
        return {'rows': [row | {'direction': 'fresh'} for row in rows], **case._asdict()}

    monkeypatch.setattr(authors, 'bench_case', bench_case)
    monkeypatch.setattr(authors.jax, 'default_backend', lambda: 'gpu')
    *_, (_, (table,)) = authors.authors(implementations=['xla', 'pallas'])
    assert len(table.lines) == len(authors.PUBLISHED)
    assert table.lines['4096, 8, 64'] == ['8.0', '10.8', '1.349', '4', '5, 1.250x', '-']
    assert table.lines['16384, 8, 256'][3:] == ['-', '-', '-']
    assert all(len(cells) == len(table.heads) - 1 for cells in table.lines.values())


def test_authors_benchmark_needs_a_gpu():
    """In one line."""
    with pytest.raises(ValueError, match='authors: needs a GPU, but JAX has a cpu'):
        list(authors.authors())
    with pytest.raises(ValueError, match="implementations='cudnn': must be one of"):
        list(authors.authors(implementations=['cudnn']))
