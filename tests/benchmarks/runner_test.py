"""launch.gpu: a bad case does not affect others, and an interrupted run continues."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from moddepth_jax.benchmarks import gpu_cases, runner, visit, worker
from moddepth_jax.benchmarks.results import FINAL, Results
from tests.benchmarks import fake_cases
from tests.benchmarks.fake_cases import case

ROOT = pathlib.Path(__file__).parents[2]
STAMP = {'device': 'H200', 'commit': 'abc', 'code': 'c1'}


class Bench:
    """Runs fake cases in real child processes, and counts these."""

    def __init__(self, folder, target=worker.serve, args=(fake_cases.CASES, False)):
        self.folder, self.target, self.args = folder, target, args
        self.starts, self.lines = 0, []
        self.results = Results(folder / 'results.jsonl')

    def start(self, group):
        self.starts += 1
        return runner.Child(self.target, self.args, self.folder / 'log.txt')

    def run(self, cases, seconds=1e9):
        end = time.monotonic() + seconds
        left = lambda: end - time.monotonic()  # noqa: E731
        run = runner.CaseRunner(self.results, self.start, STAMP, left, self.lines.append)
        return run.run(cases)

    def rows(self):
        return [json.loads(line) for line in self.results.path.read_text().splitlines()]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_bad_case_does_not_affect_others(bench):
    """A crash, a hang, a wrong result, an error and an unsupported case: one line each.

    A case whose package is missing runs again with the wheels in place.
    """
    names = ('fine0', 'crash0', 'fine1', 'hang0', 'wrong0', 'failing0', 'unable0', 'missing0')
    cases = [case(name) for name in names]
    cases[3] = case('hang0', limit=1.0)._replace(group='another')
    later = bench.run(cases)
    rows = {row['case']: row for row in bench.rows()}
    assert list(rows) == list(names) and len(bench.rows()) == len(names)
    assert later == ['missing0'] and 'no_such_module; docs/gpu.md' in rows['missing0']['reason']
    assert [row['status'] for row in rows.values()] == [
        *('ok', 'failed', 'ok', 'hung', 'wrong', 'failed', 'skipped', 'missing'),
    ]
    assert rows['crash0']['reason'].startswith('the process ended: SIGABRT: ')
    assert rows['hang0']['reason'] == 'no answer in 1 s' and rows['hang0']['seconds'] < 5
    assert rows['failing0']['reason'] == 'OSError: disk on fire'
    assert 'capability 8.0' in rows['unable0']['reason']
    assert all(row['device'] == 'H200' and row['date'] for row in rows.values())
    assert bench.starts == 4  # one more after the crash, one for each change of the group
    log = (bench.folder / 'log.txt').read_text()
    assert 'fine' in log and 'about to crash' in log and len(bench.lines) == len(names)


def test_a_wrong_kernel_is_not_timed(bench):
    """The timings of a wrong kernel are skipped, and those of other kernels are not."""
    cases = [case('wrong0'), case('fine0', needs=('wrong',)), case('fine1', needs=('other/',))]
    bench.run(cases)
    rows = {row['case']: row for row in bench.rows()}
    assert rows['fine0']['status'] == 'skipped' and rows['fine1']['status'] == 'ok'
    assert rows['fine0']['reason'] == 'a wrong kernel is not timed: wrong0 wrong'


def test_a_group_that_hangs_is_skipped(bench):
    """Only one case runs into the time limit, not all cases of the group."""
    bench.run([case(f'hang{n}', limit=0.5) for n in range(3)])
    assert [row['status'] for row in bench.rows()] == ['hung', 'skipped', 'skipped']
    assert bench.rows()[2]['reason'] == 'hang0 hung before it'


def test_a_deadline_cuts_and_the_next_run_continues(bench, monkeypatch):
    """Cases that need longer do not start, the running case is cut, and none has two results."""
    cases = [case('fine0'), case('slow0'), case('fine1', expected=900), case('fine2')]
    monkeypatch.setattr(runner, 'START_SECONDS', 0.0)
    later = bench.run(cases, seconds=1.2)
    assert later == ['slow0', 'fine1', 'fine2']
    assert bench.results.status('slow0') == 'cut' and bench.results.status('fine1') is None
    again = Bench(bench.folder)
    todo, lines = runner.pending(cases, again.results, 'c1', False, False)
    assert [c.name for c in todo] == later and lines == ['1 of 4 cases are done']
    assert again.run(todo) == []
    final = [row['case'] for row in again.rows() if row['status'] in FINAL]
    assert sorted(final) == sorted(c.name for c in cases)


def test_a_damaged_last_line_is_ignored(tmp_path):
    """A write was cut short; the next line does not continue it."""
    path = tmp_path / 'results.jsonl'
    path.write_text('{"case": "a", "status": "ok", "code": "c1"}\n{"case": "b", "sta')
    results = Results(path)
    assert results.damaged == 1 and list(results.latest) == ['a']
    results.add({'case': 'b', 'status': 'ok', 'value': float('nan')})
    again = Results(path)
    assert again.damaged == 1 and again.latest['b']['value'] == 'NaN'


def test_results_of_another_commit_are_kept(tmp_path):
    """One line says so; --again repeats these, and with --cases all that are named."""
    results = Results(tmp_path / 'results.jsonl')
    for name, code in (('a', 'old'), ('b', 'new')):
        results.add({'case': name, 'status': 'ok', 'commit': f'{name}1', 'code': code})
    cases = [case('fine0')._replace(name=name) for name in 'abc']
    for again, chosen, names in ((False, False, 'c'), (True, False, 'ac'), (True, True, 'abc')):
        todo, lines = runner.pending(cases, results, 'new', again, chosen)
        assert len([line for line in lines if 'other code (commit a1)' in line]) == 1
        assert ''.join(c.name for c in todo) == names


@pytest.mark.parametrize(
    ('target', 'words', 'starts'),
    [
        (fake_cases.serve_broken, 'does not start: .*exit status 1: no such device', 2),
        (fake_cases.serve_lost, 'no GPU any more', 2),
    ],
)
def test_a_lost_device_ends_the_run(target, words, starts, tmp_path):
    """No case gets a row: one more start is tried, and the CPU does not replace the GPU."""
    bench = Bench(tmp_path, target, ())
    with pytest.raises(runner.LostError, match=words):
        bench.run([case('fine0')])
    assert bench.starts == starts and not bench.results.path.exists()


@pytest.mark.parametrize('toy', [False, True])
def test_the_list_of_cases_is_complete(toy):
    """Names are unique, functions exist, timings need checks, and cases fit into a visit."""
    cases = gpu_cases.cases(toy)
    names = [c.name for c in cases]
    assert len(set(names)) == len(names) and names[0] == 'machine/ceilings'
    kinds = ('machine', 'right', 'packed', 'time', 'step', 'decode', 'experts', 'run')
    kinds += ('decode_kernel',)
    assert {name.split('/')[0] for name in names} == set(kinds)
    for c in cases:
        module, _, function = c.run.partition(':')
        source = (ROOT / f'{module.replace(".", "/")}.py').read_text()
        assert f'def {function}(' in source and c.expected <= c.limit <= 510
        for start in c.needs:
            first = next((n for n, name in enumerate(names) if name.startswith(start)), 0)
            assert first < names.index(c.name)
    if not toy:
        # As docs/gpu.md says: one of each kind, everything up to the largest models, the end.
        for last, sessions in (('run/train', 3), ('step/700m/mod_moda', 5), (names[-1], 7)):
            upto = names.index(last) + 1
            groups = sum(a.group != b.group for a, b in zip(cases[:upto], cases[1:], strict=False))
            seconds = sum(c.expected for c in cases[:upto]) + runner.START_SECONDS * groups
            assert seconds < sessions * 540, (last, seconds)
        needed = {start for c in cases for start in c.needs}
        assert {'right/mosaic_gpu/group_of_8', 'packed/mosaic_gpu_fused/three'} < needed
        early = names[: names.index('run/train')]
        assert {'time/mosaic_gpu_fused/16k', 'right/cudnn/group_of_2', 'step/124m/mod'} < set(early)


def gpu(*arguments, **env):
    command = [sys.executable, '-m', 'launch.gpu', *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env)


def test_without_a_gpu_the_error_is_one_line(tmp_path, monkeypatch, capsys):
    """The exit status is 1, and nothing is written."""
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setattr(visit, '_set_environment', lambda toy: None)
    monkeypatch.setattr(visit, 'probe', lambda: ({'platform': 'cpu'}, ''))
    assert visit.visit([], lambda: 1e9, out=tmp_path / 'out') == 1
    assert capsys.readouterr().err == (
        'error: no GPU: JAX_PLATFORMS=cpu is set; unset it, or set it to cuda,cpu\n'
    )
    done = gpu(f'--out={tmp_path / "out"}', '--cases=machine', JAX_PLATFORMS='cuda')
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert 'no GPU: JAX says: ' in done.stderr and '; --toy rehearses' in done.stderr
    assert not (tmp_path / 'out').exists()


def test_results_of_two_kinds_of_gpu_are_not_mixed(tmp_path, monkeypatch, capsys):
    """Regression: a step on one and a step on another were compared, and a claim was judged."""
    Results(tmp_path / 'results.jsonl').add({'case': 'a', 'status': 'ok', 'device': 'NVIDIA H100'})
    found = {'device': 'NVIDIA H200', 'capability': '9.0', 'software': ''}
    monkeypatch.setattr(visit, '_find_device', lambda toy: found)
    assert visit.visit([], lambda: 1e9, out=tmp_path) == 1
    assert 'results of NVIDIA H100, and this is NVIDIA H200; use another' in capsys.readouterr().err


def test_auto_does_not_wait_for_kernels_that_hung():
    rows = {f'right/{name}': {'status': 'hung'} for name in ('mosaic_gpu_sequence/x', 'pallas/y')}
    rows |= {'right/cudnn/x': {'status': 'wrong'}, 'right/decode/xla/rows': {'status': 'hung'}}
    rows |= {'packed/mosaic_gpu_fused/three': {'status': 'hung'}, 'step/a/b': {'status': 'hung'}}
    assert visit._hung_kernels(rows) == ['mosaic_gpu', 'mosaic_gpu_fused', 'pallas']


def test_what_auto_measured_comes_back_and_goes_to_the_next_machine(tmp_path, monkeypatch):
    """In one file. What that machine measured itself and other kinds of GPU are not touched."""
    path, key = tmp_path / 'attention.json', {'shapes': {'q': [1, 2]}}
    folders = [tmp_path / name / 'moddepth_jax' / 'attention' for name in ('first', 'second')]
    folders[0].mkdir(parents=True)
    (folders[0] / 'NVIDIA_H200-1.json').write_text(json.dumps({'key': key, 'results': {}}))
    (folders[0] / 'NVIDIA_H200-2.json').write_text('{"key": cut sh')
    (folders[0] / 'NVIDIA_H100-3.json').write_text('{}')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'first'))
    visit._share_measurements(path, 'NVIDIA H200')
    assert json.loads(path.read_text()) == {'NVIDIA_H200-1.json': {'key': key, 'results': {}}}
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'second'))
    visit._share_measurements(path, 'NVIDIA H200')
    (here,) = folders[1].iterdir()
    assert json.loads(here.read_text())['key'] == key
    here.write_text(json.dumps({'key': key, 'results': {'xla': {'milliseconds': 1.0}}}))
    for _ in range(2):
        visit._share_measurements(path, 'NVIDIA H200')
    kept = json.loads(path.read_text())['NVIDIA_H200-1.json']
    assert kept['results'] == json.loads(here.read_text())['results'] != {}


@pytest.mark.slow
def test_whole_list_at_toy_size(tmp_path):
    """Every case that a CPU supports is ok; the same command again runs nothing."""
    done = gpu('--toy', f'--out={tmp_path}')
    results = Results(tmp_path / 'results.jsonl')
    assert done.returncode == 0, done.stdout
    assert {row['status'] for row in results.latest.values()} == {'ok', 'skipped'}
    for name in ('step/124m/mod_moda', 'decode/124m/mod', 'run/train', 'time/pallas/slots_24_4k'):
        assert results.status(name) == 'ok', results.latest[name]
    assert not results.latest['step/124m/mod_moda']['across_documents']
    again = gpu('--toy', f'--out={tmp_path}')
    lines = (tmp_path / 'results.jsonl').read_text().splitlines()
    assert len(lines) == len(results.latest) and 'cases are done' in again.stdout
    assert gpu('--report', f'--out={tmp_path}').returncode == 0
    assert '**train step, 124m' in (tmp_path / 'table.md').read_text()
    assert len(list(tmp_path.iterdir())) <= 8
