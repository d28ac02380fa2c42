"""launch.evaluate repeats the numbers of a run, and measures it on any text under any rule."""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys

import jax
import pytest

from moddepth_jax.data.pipeline import make_held_out
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop
from moddepth_jax.training.evaluate import evaluate_causal
from moddepth_jax.training.mesh import make_mesh
from tests.data.prepared_text import prepare

ROOT = pathlib.Path(__file__).parents[2]
LENGTH = 32


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Six files of words, and others that hold too little or another field."""
    words, draw = ['to ', 'be, ', 'or ', 'not\n'], random.Random(0)
    folder = tmp_path_factory.mktemp('evaluate')
    for i in range(6):
        text = ''.join(draw.choice(words) for _ in range(400))
        (folder / f'{i}.txt').write_text(text)
    (folder / 'other').mkdir()
    (folder / 'other' / 'short.txt').write_text('short')
    (folder / 'other' / 'windows.jsonl').write_text(
        ''.join(json.dumps({'body': 'to be or not ' * 5}) + '\n' for _ in range(4))
    )
    return folder


@pytest.fixture(scope='module')
def run(tiny_config, folder):
    """A finished run of 4 steps on these files."""
    changes = {
        'model.routing.router': 'learned',
        'model.routing.capacity': 0.25,
        'data.source': str(folder / '*.txt'),
        'data.held_out_fraction': 0.3,
        'evaluation.every': 0,
    }
    hasty = jax.config.values['jax_disable_most_optimizations']
    jax.config.update('jax_disable_most_optimizations', True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(folder / 'cache'))
        finished = loop.train(from_config(tiny_config(**changes)), folder / 'run')
    jax.config.update('jax_disable_most_optimizations', hasty)
    return finished


def evaluate(folder, *arguments):
    environment = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': '',
        'XDG_CACHE_HOME': str(folder / 'cache'),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    }
    arguments = [argument.format(folder) for argument in arguments]
    command = [sys.executable, '-m', 'launch.evaluate', *arguments]
    pipes = {'capture_output': True, 'text': True, 'timeout': 120}
    return subprocess.run(command, cwd=folder, env=environment, **pipes)


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob('*')]
    }


def test_it_repeats_the_last_evaluation_of_the_run(folder, run):
    """The honest loss, top-C beside it and each layer's routing are those of summary.json.

    With --json=- stdout is the JSON and nothing else; the directory of the run is left alone.
    """
    before = snapshot(run.workdir)
    done = evaluate(folder, '--workdir={}/run', '--json=-')
    assert (done.returncode, done.stderr) == (0, '')
    assert snapshot(run.workdir) == before
    report, summary = json.loads(done.stdout), run.summary
    for name, value in summary['eval'].items():
        assert report[name] == pytest.approx(value, abs=2e-5), name
    assert {'loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'} <= set(summary['eval'])
    assert (report['rule'], report['step'], report['num_steps']) == ('predictor', 4, 4)
    assert report['corpus_sha256'] == summary['corpus_sha256'] and report['held_out']
    assert report['batches'] == 2 and set(report['routing']) == {'layer_01'}
    for name in ('selected_fraction', 'recall'):
        value = summary['routing']['layer_01'][name]
        assert report['routing']['layer_01'][name] == pytest.approx(value, abs=1e-6)


def test_a_rule_by_name_is_measured_alone(folder, run):
    """--routing=dense lets all in; the tables show what the file says, n/a what is no number."""
    arguments = ('--routing=dense', '--num_batches=1', '--json={}/dense.json')
    done = evaluate(folder, '--workdir={}/run', *arguments)
    assert (done.returncode, done.stderr) == (0, '')
    report = json.loads((folder / 'dense.json').read_text())
    assert (report['rule'], report['batches'], report['targets']) == ('dense', 1, 4 * LENGTH)
    assert 'loss_top_c' not in report and 'routing_gap' not in report
    layer = report['routing']['layer_01']
    assert layer['selected_fraction'] == 1 and layer['recall'] == 1
    loss = rf'dense +│ +{report["loss"]:.4f} │ +{report["bits_per_byte"]:.4f}'
    assert re.search(loss, done.stdout)
    assert re.search(r'01 +│ +1\.000 │ +0\.250 │ +1\.000', done.stdout)
    assert f'128 targets in 1 of {report["all_batches"]} batches' in done.stdout
    assert 'the held-out text of' in done.stdout


def test_other_text_is_measured_whole(folder, run):
    """--data takes every document of its files, nothing of it held back, in the run's windows."""
    arguments = ('--data={}/other/*.jsonl', '--text_field=body', '--num_batches=0', '--json=-')
    done = evaluate(folder, '--workdir={}/run', *arguments)
    assert (done.returncode, done.stderr) == (0, '')
    report = json.loads(done.stdout)
    tokens = 4 * (1 + 5 * len('to be or not '))
    assert report['targets'] == (tokens - 1) // LENGTH * LENGTH
    assert report['batches'] == report['all_batches'] == 2
    assert report['data'].endswith('other/*.jsonl') and not report['held_out']


def test_text_that_changed_since_is_told_of(folder, run):
    """Held-out text of other files than the run's is measured, with a line that says so.

    Shown as a table, the loss under the causal rule stands over that under top-C.
    """
    (folder / '6.txt').write_text('to be ' * 40)
    try:
        done = evaluate(folder, '--workdir={}/run')
    finally:
        (folder / '6.txt').unlink()
    assert done.returncode == 0
    assert done.stderr.startswith('data fingerprint: corpus_sha256 was ')
    assert 'may have been trained on' in done.stderr and done.stderr.count('\n') == 1
    lines = done.stdout.splitlines()
    honest, top_c = (
        i for i, line in enumerate(lines) for rule in ('the honest one', 'top-C (') if rule in line
    )
    assert honest < top_c
    assert re.search(r'routing gap [-+]\d\.\d{4} nats', done.stdout)
    assert re.search(r'precision and recall: of predictor', done.stdout)


def test_each_domain_is_measured_as_it_would_be_alone(folder, run):
    """Files, folders of files and prepared folders are domains; each has the numbers of --data, the
    held-out part of what was trained on alone; one without a window is skipped by name.
    """
    domains = folder / 'domains'
    (domains / 'web').mkdir(parents=True)
    for name in ('a', 'b'):
        (domains / 'web' / f'{name}.txt').write_text(f'to {name} ' * 40)
    (domains / 'notes.txt').write_text('not to be ' * 40)
    (domains / 'short.txt').write_text('to be')
    documents = [(f'{i}.txt', b'or not to be ' * i) for i in range(1, 30)]
    prepare(domains / 'kept', documents, ByteTokenizer(), 0.3)
    done = evaluate(folder, '--workdir={}/run', '--domains={}/domains', '--json={}/domains.json')
    assert done.returncode == 0
    skipped = 'the given text has 6 tokens and one window needs 33; give more text'
    assert done.stderr == f'skipped short.txt: {skipped}\n'
    report = json.loads((folder / 'domains.json').read_text())
    assert report['skipped'] == {'short.txt': skipped} and report['rule'] == 'predictor'
    sources = {'kept': 'kept', 'notes.txt': 'notes.txt', 'web': 'web/*.txt'}
    assert list(report['domains']) == list(sources)
    mesh = make_mesh('data=1')
    for name, source in sources.items():
        own = dataclasses.replace(run.hparams.data, source=str(domains / source))
        given = (run.state.variables, run.hparams, make_held_out(own), mesh)
        with jax.set_mesh(mesh):
            expected = evaluate_causal(*given, run.hparams.evaluation.final_batches)
        found = report['domains'][name]
        assert found['targets'] == expected['targets'] and found['text'] == 'all'
        for number in ('loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'):
            assert found[number] == pytest.approx(expected[number], abs=2e-5), (name, number)
        assert found['perplexity'] == pytest.approx(math.exp(expected['loss']), rel=1e-4)
        cells = [f'{found["loss"]:.4f}', f'{found["perplexity"]:.2f}', f'{found["targets"]:,}']
        (line,) = (line for line in done.stdout.splitlines() if name in line and '│' in line)
        assert all(cell in line for cell in cells)
    together, parts = report['together'], report['domains'].values()
    assert together['targets'] == sum(part['targets'] for part in parts)
    nats = sum(part['loss'] * part['targets'] for part in parts)
    assert together['loss'] == pytest.approx(nats / together['targets'])
    assert min(p['bits_per_byte'] for p in parts) < together['bits_per_byte']


# name: (arguments with {} for the folder, words of the line)
REFUSED = {
    'no workdir': ([], ['--workdir: missing']),
    'no run': (['--workdir={}/other'], ['--workdir=', '/other', 'config.json']),
    'rule not trained': (['--workdir={}/run', '--routing=aux_loss'], ["'aux_loss'", 'predictor']),
    'no file': (['--workdir={}/run', '--data={}/*.md'], ['--data=', '/*.md', 'no file']),
    'no window': (['--workdir={}/run', '--data={}/other/short.txt'], ['6 tokens', 'needs 33']),
    'other field': (['--workdir={}/run', '--data={}/other/*.jsonl'], ['--text_field', "'body'"]),
    'field of nothing': (
        ['--workdir={}/run', '--text_field=body'],
        ['--text_field=body', '--data or --domains'],
    ),
    'domains of text': (
        ['--workdir={}/run', '--domains={}/other', '--data={}/*.txt'],
        ['--domains=', '/other', 'not together with --data'],
    ),
    'json nowhere': (['--workdir={}/run', '--json={}/no/a.json'], ['/no/a.json: No such file']),
}


@pytest.fixture(scope='module')
def refused(folder, run):
    """Every case of REFUSED, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(evaluate, folder, *arguments)
            for name, (arguments, _) in REFUSED.items()
        }
        yield started


@pytest.mark.parametrize('name', REFUSED)
def test_bad_input_is_one_line(refused, name):
    """Status 2, nothing on stdout, and one line on stderr that names the culprit."""
    done = refused[name].result()
    assert (done.returncode, done.stdout) == (2, ''), done.stderr
    assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1, done.stderr
    for word in REFUSED[name][1]:
        assert word in done.stderr
