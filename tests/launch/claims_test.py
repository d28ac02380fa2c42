"""launch.claims: what it writes and refuses; docs/claims.md holds what it writes."""

import json
import shutil

import pytest

from launch.counted import counted_flops
from moddepth_jax.studies import claims
from moddepth_jax.training.tables import replace_between
from tests.forked_commands import ROOT
from tests.launch.commands import call
from tests.studies.made_up_study import made_up

PAGE = ROOT / 'docs' / 'claims.md'


def _outside(page):
    text = page.read_text()
    return text.split(claims.BEGIN)[0], text.split(claims.END)[1]


def test_writes_the_table_and_fills_the_page(tmp_path):
    """Both files in --out, one row a claim; the page outside its markers stays."""
    study = made_up(variants=('mod',), seeds=(0,))
    study['variants']['mod']['label'] = 'MoD [12.5%]'
    (tmp_path / 'cpu' / 'study').mkdir(parents=True)
    (tmp_path / 'cpu' / 'study' / 'study.json').write_text(json.dumps(study))
    page, new = tmp_path / 'page.md', tmp_path / 'new'
    shutil.copy(PAGE, page)
    given = (f'--workdir={tmp_path}', f'--out={new}', f'--page={page}')
    done = call('claims', *given, COLUMNS='300')  # so that no cell of the table is broken
    assert done.status == 0 and not done.stderr, done.stderr
    rows = json.loads((new / 'claims.json').read_text())
    names = 'id topic claim source paper rule ours spread setting verdict reason power'.split()
    assert all(list(row) == names and all(row.values()) for row in rows)
    assert len(rows) == len(claims.CLAIMS)
    row = next(row for row in rows if row['id'] == 'causal_routing_costs')
    assert row['reason'].startswith('not measured; needs make study-gates (12 seeds, 2e12')
    table = (new / 'claims.md').read_text()
    assert 'cpu/study' in table and table.split('\n\n', 1)[1].strip() in page.read_text()
    assert _outside(PAGE) == _outside(page)
    assert f'Of {len(rows)} claims: ' in done.stdout
    assert f'undecided: {row["reason"]}' in done.stdout


def test_docs_have_the_table_of_the_committed_results():
    """After a change of results or rules: python -m launch.claims --workdir=results --page=..."""
    evidence = claims.read_evidence(ROOT / 'results', counted_flops())
    assert len(evidence.studies) == len(list((ROOT / 'results').rglob('study.json')))
    judged = claims.judge(evidence)
    table = claims.markdown(claims.fill(judged, evidence), judged, evidence)
    page = PAGE.read_text()
    assert replace_between(page, claims.BEGIN, claims.END, table) == page


def test_counted_costs_match_the_papers_shapes():
    """700M: 0.301 TFLOPs a row for projections, 0.021 for two slots a layer; the masked half."""
    counted = counted_flops()
    shape = counted['moda_700m']
    dense, moda = shape['dense'], shape['moda']
    for (way, flops), slots in zip(dense.items(), (1, 1, 2), strict=True):
        assert moda[way] - flops == pytest.approx(0.301e12 + slots * 0.0211e12, rel=0.005), way
    hidden = 4 * 36 * shape['length'] ** 2 / 2 * 1024
    assert dense['all pairs'] - dense['visible pairs and slots'] == pytest.approx(hidden)
    seven = counted['mod_7b']  # 2 FLOPs a parameter and token, and attention
    assert seven['dense'] == pytest.approx(2 * 2048 * 6.6e9 + 32 * 2 * 2048**2 * 4096, rel=0.01)
    assert 1 - seven['0.5'] / seven['dense'] == pytest.approx(0.50, abs=0.02)
