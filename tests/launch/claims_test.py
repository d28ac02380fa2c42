"""launch.claims: what it writes and refuses; docs/claims.md holds what it writes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from launch.claims_shapes import counted
from moddepth_jax.studies import claims_page, verdicts

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / 'docs' / 'claims.md'


def run(*arguments):
    command = [sys.executable, '-m', 'launch.claims', *map(str, arguments)]
    wide = os.environ | {'COLUMNS': '300'}  # so that no cell of the table is broken
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=wide)


@pytest.fixture
def study(tmp_path):
    """A directory that holds one study of one unfinished variant."""
    row = {'run': 'mod-4x64', 'variant': 'mod', 'size': '4x64', 'budget': 1e12, 'seed': 0}
    row |= {'parameters': 1000, 'steps': 100, 'flops_per_step': 1e10, 'flops_per_forward': 3e9}
    row |= {'total_flops': 1e12, 'epochs': 0.1, 'loss': 1.6, 'bits_per_byte': 2.3}
    row |= {'routing': {}, 'routing_gap': None}
    row |= {'loss_top_c': 1.6, 'routing_gap': 0.0}
    layer = {'selected_fraction': 0.1, 'precision': 0.9, 'recall': 0.8}
    row['routing'] = {'layer_01': layer}
    changes = {'model.routing.capacity': 0.125}
    content = {
        'kind': 'flops',
        'config': 'configs/study.py',
        'budgets': [1e12],
        'variants': {'mod': {'label': 'MoD [12.5%]', 'changes': changes}},
        'batch_tokens': 1024,
        'diverged': [],
        'versions': {},
        'sequence_length': 128,
        'corpus': 'stdlib',
        'runs': [row],
    }
    (tmp_path / 'cpu' / 'study').mkdir(parents=True)
    (tmp_path / 'cpu' / 'study' / 'study.json').write_text(json.dumps(content))
    return tmp_path


def test_writes_the_table_and_fills_the_page(study):
    """Both files in --out, one row a claim; the page outside its markers stays."""
    page = study / 'page.md'
    shutil.copy(PAGE, page)
    done = run(f'--workdir={study}', f'--out={study / "new"}', f'--page={page}')
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = json.loads((study / 'new' / 'claims.json').read_text())
    names = 'id claim source paper setting ours spread verdict rule reason'
    assert all(set(names.split()) <= set(row) and all(row.values()) for row in rows)
    assert len(rows) == len(verdicts.CLAIMS)
    told = next(row for row in rows if row['id'] == 'causal_routing_costs')
    assert told['reason'] == 'mod 4x64 has 1 seed, 3 are needed'
    table = (study / 'new' / 'claims.md').read_text()
    assert 'cpu/study' in table and table.split('\n\n', 1)[1].strip() in page.read_text()
    outside = [_outside(file.read_text()) for file in (PAGE, page)]
    assert outside[0] == outside[1]
    assert f'Of {len(rows)} claims: ' in done.stdout
    assert 'cannot tell here: mod 4x64 has 1 seed, 3 are needed' in done.stdout


def _outside(text):
    return text.split(claims_page.BEGIN)[0], text.split(claims_page.END)[1]


def test_refuses_a_directory_without_studies_and_a_page_without_markers(study):
    """One line, exit status 2, nothing written."""
    (study / 'page.md').write_text('# mine\n')
    (study / 'empty').mkdir()
    cases = {
        (f'--workdir={study / "empty"}',): 'no study.json in it, nor 2 levels down',
        (
            f'--workdir={study}',
            f'--page={study / "page.md"}',
        ): 'page without its markers: must hold <!-- claims:',
    }
    for arguments, message in cases.items():
        done = run(*arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert done.stderr.count('\n') == 1
    assert not list(study.rglob('claims.*')) and (study / 'page.md').read_text() == '# mine\n'


def test_docs_hold_the_table_of_the_committed_results():
    """After a change of results or rules: python -m launch.claims --workdir=results --page=..."""
    evidence = verdicts.read_evidence(ROOT / 'results', counted())
    assert len(evidence.studies) == len(list((ROOT / 'results').rglob('study.json')))
    table = claims_page.markdown(verdicts.fill(evidence), evidence)
    assert claims_page.replaced(PAGE.read_text(), table) == PAGE.read_text()


def test_counted_costs_are_those_of_the_papers_shapes():
    """700M: 0.301 TFLOPs a row for projections, 0.021 for two slots a layer; the masked half."""
    shape = counted()['moda_700m']
    for way in ('halved', 'full'):
        assert shape['moda'][way] - shape['dense'][way] == pytest.approx(0.3218e12, rel=0.001)
    attention = 4 * 36 * shape['length'] ** 2 / 2 * 1024
    assert shape['dense']['full'] - shape['dense']['halved'] == pytest.approx(attention)
