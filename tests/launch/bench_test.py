"""launch.bench runs; tests/benchmarks/ has the benchmarks that need no trained runs."""

import json
import shutil

import pytest

from tests.forked_commands import ROOT, run_commands


def test_several_numbers_where_one_is_expected_are_refused():
    """Regression: only the first one was used."""
    (done,) = run_commands([['bench', 'step', '--repeats=3,5']], ROOT)
    assert (done.status, done.stdout) == (2, '')
    assert done.stderr == 'error: --repeats=3,5: must be one number of 1 or more\n'


@pytest.mark.slow
def test_runs_are_timed_interleaved_with_the_first(trained, hasty, tmp_path):
    """A run with a teacher costs more training FLOPs and equal evaluation FLOPs."""
    taught = tmp_path / 'taught'
    shutil.copytree(trained / 'run', taught)
    config = json.loads((taught / 'config.json').read_text())
    config['config']['training']['distill_from'] = str(trained / 'run')
    (taught / 'config.json').write_text(json.dumps(config))
    line = ['bench', 'runs', f'--workdirs={trained}/run,{taught}', '--repeats=1']
    (done,) = run_commands([[*line, f'--json={tmp_path}/found.json']], trained, **hasty)
    assert done.status == 0 and 'held out, of the first' in done.stdout, done
    first, second = json.loads((tmp_path / 'found.json').read_text())[0]['rows']
    assert (first['run'], second['run']) == (f'{trained}/run', str(taught))
    for kind in ('train', 'held_out'):
        assert first[f'{kind}_ratio'] == pytest.approx(1)
        assert first[f'{kind}_flops_ratio'] == 1
        assert second[f'{kind}_tokens_per_second'] > 0
    assert 1.1 < second['train_flops_ratio'] < 2 and second['held_out_flops_ratio'] == 1
