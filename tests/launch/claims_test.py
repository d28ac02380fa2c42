"""launch.claims: what it writes and refuses; docs/claims.md holds what it writes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from launch.study_config import counted_flops
from moddepth_jax.studies import claims
from tests.studies.made_up_study import made_up

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / 'docs' / 'claims.md'


def run(*arguments):
    command = [sys.executable, '-m', 'launch.claims', *map(str, arguments)]
    wide = os.environ | {'COLUMNS': '300'}  # so that no cell of the table is broken
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide)


@pytest.fixture
def results(tmp_path):
    """A directory that holds one study of one variant with one seed."""
    study = made_up(variants=('mod',), seeds=(0,))
    study['variants']['mod']['label'] = 'MoD [12.5%]'
    (tmp_path / 'cpu' / 'study').mkdir(parents=True)
    (tmp_path / 'cpu' / 'study' / 'study.json').write_text(json.dumps(study))
    return tmp_path


def _outside(page):
    text = page.read_text()
    return text.split(claims.BEGIN)[0], text.split(claims.END)[1]


def test_writes_the_table_and_fills_the_page(results):
    """Both files in --out, one row a claim; the page outside its markers stays."""
    page = results / 'page.md'
    shutil.copy(PAGE, page)
    done = run(f'--workdir={results}', f'--out={results / "new"}', f'--page={page}')
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = json.loads((results / 'new' / 'claims.json').read_text())
    names = 'id topic claim source paper rule ours spread verdict reason setting'.split()
    assert all(list(row) == names and all(row.values()) for row in rows)
    assert len(rows) == len(claims.CLAIMS)
    row = next(row for row in rows if row['id'] == 'causal_routing_costs')
    assert row['reason'].endswith('has 1 seed, 3 are needed')
    table = (results / 'new' / 'claims.md').read_text()
    assert 'cpu/study' in table and table.split('\n\n', 1)[1].strip() in page.read_text()
    assert _outside(PAGE) == _outside(page)
    assert f'Of {len(rows)} claims: ' in done.stdout
    assert f'cannot tell here: {row["reason"]}' in done.stdout


def test_refuses_a_directory_without_studies_and_a_page_without_markers(results):
    """One line, exit status 2, nothing written."""
    (results / 'page.md').write_text('# mine\n')
    (results / 'empty').mkdir()
    for arguments, message in (
        ([f'--workdir={results / "empty"}'], 'no study.json in it, nor 2 levels down'),
        (
            [f'--workdir={results}', f'--page={results / "page.md"}'],
            'page without its markers: must hold <!-- claims:',
        ),
    ):
        done = run(*arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert done.stderr.count('\n') == 1
    assert not list(results.rglob('claims.*')) and (results / 'page.md').read_text() == '# mine\n'


def test_docs_hold_the_table_of_the_committed_results():
    """After a change of results or rules: python -m launch.claims --workdir=results --page=..."""
    evidence = claims.read_evidence(ROOT / 'results', counted_flops())
    assert len(evidence.studies) == len(list((ROOT / 'results').rglob('study.json')))
    table = claims.markdown(claims.fill(evidence), evidence)
    assert claims.replaced(PAGE.read_text(), table) == PAGE.read_text()


def test_counted_costs_are_those_of_the_papers_shapes():
    """700M: 0.301 TFLOPs a row for projections, 0.021 for two slots a layer; the masked half."""
    shape = counted_flops()['moda_700m']
    for way in ('halved', 'full'):
        assert shape['moda'][way] - shape['dense'][way] == pytest.approx(0.3218e12, rel=0.001)
    attention = 4 * 36 * shape['length'] ** 2 / 2 * 1024
    assert shape['dense']['full'] - shape['dense']['halved'] == pytest.approx(attention)
