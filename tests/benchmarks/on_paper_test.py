"""The time model: its ideal agrees with the targets, and the docs have its tables."""

import pytest

from moddepth_jax.benchmarks import on_paper
from moddepth_jax.benchmarks.attention_cases import Case, depth_bytes
from moddepth_jax.benchmarks.attention_report import TARGETS
from moddepth_jax.training.tables import to_markdown
from tests.documented import read


def test_the_ideal_is_the_target():
    """Plain cuDNN and the least bytes of 64 slots, at 90% of copy bandwidth, to one percent."""
    for length, target in TARGETS.items():
        assert on_paper.over_cudnn(Case(length))['ideal'] == pytest.approx(target - 1, abs=0.01)


def test_no_form_moves_fewer_bytes_than_the_ideal():
    """The kernels read all visible slots and move at most 5% more, except for the sequence's dq."""
    for held, written in on_paper.SLOTS_HELD:
        for few in (8, 32, 64):
            case = Case(4096, kv_heads=few, slots=held, written=written)
            counts = on_paper.count_bytes(case)
            forward, backward = (depth_bytes(case, way) for way in (False, True))
            dq = 2 * case.batch * case.length * case.heads * case.width
            assert forward < counts.forward and backward < counts.backward - dq
            # Slots are read in eights.
            assert written or counts.forward < 1.05 * forward
            assert written or counts.backward - dq < 1.05 * backward


def test_docs_have_the_printed_tables():
    """docs/depth_attention.md shows the rows that the command prints."""
    ((_, tables),) = on_paper.paper()
    page = read('docs/depth_attention.md')
    for table in tables:
        assert '\n'.join(to_markdown(table)) in page
    for few, width in ((3, 64), (8, 96)):
        with pytest.raises(ValueError, match='must be one of'):
            list(on_paper.paper(kv_heads=[few], widths=[width]))
