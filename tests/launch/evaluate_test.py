"""launch.evaluate repeats the numbers of a run, and measures it on any text under any rule."""

import dataclasses
import json
import math
import re
import shutil

import jax
import pytest

from moddepth_jax.data.corpus import load_held_out
from moddepth_jax.data.pipeline import make_held_out
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.training.evaluate import evaluate_causal
from moddepth_jax.training.mesh import make_mesh
from moddepth_jax.training.saved_run import load_run
from tests.data.prepared_text import data_hparams, prepare
from tests.forked_commands import run_commands
from tests.launch.bad_inputs import snapshot

LENGTH = 32
LINES = {
    'repeated': ['--workdir={run}', '--json=-'],
    'dense': ['--workdir={run}', '--routing=dense', '--num_batches=1', '--json={out}/dense.json'],
    'other': ['--workdir={run}', '--data={out}/other', '--text_field=body', '--encoding=UTF16',
              '--num_batches=0', '--json=-'],
    'own': ['--workdir={run}', '--data={run}/../*.txt', '--routing=predictor', '--json=-'],
    'inherited': ['--workdir={out}/child', '--data={out}/domains/web', '--json=-'],
    'changed': ['--workdir={out}/run'],
    'domains': ['--workdir={run}', '--domains={out}/domains', '--json={out}/domains.json'],
}  # fmt: skip
PLAIN = ('--data={out}/domains/web', '--data=stdlib', '--data={out}/domains/kept',
         '--domains={out}/domains')  # fmt: skip


@pytest.fixture(scope='module')
def out(trained, tmp_path_factory):
    """domains: files, a folder and a prepared one. run: the run, whose text has changed.

    child: the run, as if it came from one that was trained on domains/web.
    """
    out = tmp_path_factory.mktemp('evaluate')
    (out / 'domains' / 'web').mkdir(parents=True)
    for name in ('a', 'b'):
        (out / 'domains' / 'web' / f'{name}.txt').write_text(f'to {name} ' * 40)
    (out / 'domains' / 'notes.txt').write_text('not to be ' * 40)
    (out / 'domains' / 'short.txt').write_text('to be')
    documents = [(f'{i}.txt', b'or not to be ' * i) for i in range(1, 30)]
    prepare(out / 'domains' / 'kept', documents, ByteTokenizer(), 0.3)
    shutil.copytree(trained / 'other', out / 'other', ignore=lambda *_: ['short.txt'])
    (out / 'other' / 'note.md').write_text('é' * 32, encoding='utf-16')
    (out / 'other' / 'logo.png').write_bytes(b'\x89PNG\r\n\x1a\n\0\0\0\r')
    shutil.copytree(trained / 'run', out / 'run')
    shutil.copytree(trained / 'run', out / 'child')
    web = load_held_out(data_hparams(out / 'domains' / 'web'))
    note = {'trained_on': {web.sha256: 0.5}}
    (out / 'child' / 'convert.json').write_text(json.dumps(note))
    for path in [*trained.glob('*.txt')]:
        shutil.copy(path, out)
    (out / '6.txt').write_text('to be ' * 40)
    config = (out / 'run' / 'config.json').read_text()
    (out / 'run' / 'config.json').write_text(config.replace(f'{trained}/*', f'{out}/*'))
    return out


@pytest.fixture(scope='module')
def done(trained, out, hasty):
    """What became of each of LINES; the run is left as it was."""
    before = snapshot(trained / 'run')
    places = {'run': trained / 'run', 'out': out}
    lines = [['evaluate', *(word.format(**places) for word in line)] for line in LINES.values()]
    finished = run_commands(lines, out, ['moddepth_jax.training.saved_run'], **hasty)
    assert snapshot(trained / 'run') == before
    assert all(one.status == 0 for one in finished), finished
    return dict(zip(LINES, finished, strict=True))


def test_a_text_field_without_rows_is_refused(trained, out):
    """Regression: it was ignored for plain and for prepared text."""
    given = [text.format(out=out) for text in PLAIN]
    lines = [['evaluate', f'--workdir={trained}/run', text, '--text_field=body'] for text in given]
    found = run_commands(lines, out, ['moddepth_jax.training.saved_run'])
    right = 'has no file with rows (.jsonl, .parquet, .arrayrecord); leave --text_field out'
    for text, one in zip(given, found, strict=True):
        assert one == (2, '', f'error: --text_field=body: {text} {right}\n')


def test_evaluate_repeats_the_last_evaluation_of_the_run(trained, done):
    """The loss, top-C for comparison and each layer's routing are those of summary.json."""
    assert done['repeated'].stderr == ''
    report = json.loads(done['repeated'].stdout)
    summary = json.loads((trained / 'run' / 'summary.json').read_text())
    for name, value in summary['eval'].items():
        assert report[name] == pytest.approx(value, abs=2e-5), name
    assert {'loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'} <= set(summary['eval'])
    assert (report['rule'], report['step'], report['num_steps']) == ('predictor', 4, 4)
    assert report['corpus_sha256'] == summary['corpus_sha256'] and report['held_out']
    assert report['batches'] == 2 and set(report['routing']) == {'layer_00'}
    for name in ('selected_fraction', 'recall'):
        value = summary['routing']['layer_00'][name]
        assert report['routing']['layer_00'][name] == pytest.approx(value, abs=1e-6)
    dead = 1 - summary['routing']['layer_00']['selected_fraction']
    assert 0 < report['dead_tokens'] == pytest.approx(dead, abs=1e-6)


def test_a_named_rule_is_the_only_one_measured(out, done):
    """--routing=dense selects all tokens; the tables agree with the file, with n/a for NaN."""
    stdout, report = done['dense'].stdout, json.loads((out / 'dense.json').read_text())
    assert (report['rule'], report['batches'], report['targets']) == ('dense', 1, 4 * LENGTH)
    assert 'loss_top_c' not in report and 'routing_gap' not in report
    layer = report['routing']['layer_00']
    assert layer['selected_fraction'] == 1 and layer['recall'] == 1
    loss = rf'dense +│ +{report["loss"]:.4f} │ +{report["bits_per_byte"]:.4f}'
    assert re.search(loss, stdout)
    assert re.search(r'00 +│ +1\.000 │ +0\.250 │ +1\.000', stdout)
    assert re.search(r'tokens that no routed block selects: 0\.0%', stdout)
    assert f'128 targets in 1 of {report["all_batches"]} batches' in stdout
    assert 'the held-out text of' in stdout and done['dense'].stderr == ''


def test_other_text_is_measured_completely(done):
    """--data reads every text of a folder completely, in windows of the run."""
    report = json.loads(done['other'].stdout)
    tokens = 4 * (1 + 5 * len('to be or not ')) + 1 + 64  # é has two bytes in UTF-8
    assert report['targets'] == (tokens - 1) // LENGTH * LENGTH
    assert report['batches'] == report['all_batches'] == 3
    stderr = done['other'].stderr
    assert stderr == f'left out 1 file without text, such as {report["data"]}/logo.png\n'
    assert report['data'].endswith('/other') and not report['held_out']


def test_the_text_of_the_run_is_read_where_it_was_held_out(trained, done):
    """Regression: --data with the text of the run scored the training documents, too."""
    report = json.loads(done['own'].stdout)
    summary = json.loads((trained / 'run' / 'summary.json').read_text())
    assert report['held_out'] and report['corpus_sha256'] == summary['corpus_sha256']
    assert report['loss'] == pytest.approx(summary['eval']['loss'], abs=2e-5)


def test_the_text_of_a_parent_is_read_where_it_was_held_out(done):
    """Regression: of a converted run, the training text of its parent was scored."""
    report = json.loads(done['inherited'].stdout)
    assert report['held_out'] and report['targets'] == len('to a ' * 40) // LENGTH * LENGTH


def test_text_that_has_changed_is_reported(done):
    """Held-out text that has changed since the run is measured, with a warning of one line."""
    stdout, stderr = done['changed'].stdout, done['changed'].stderr
    assert stderr.startswith('data fingerprint: corpus_sha256 was ')
    assert 'may have been trained on' in stderr and stderr.count('\n') == 1
    causal, top_c = stdout.index('predictor'), stdout.index('top-C (')
    assert causal < top_c
    assert re.search(r'routing gap [-+]\d\.\d{4} nats', stdout)
    assert re.search(r'precision and recall: predictor against', stdout)


def test_each_domain_is_measured_as_if_alone(trained, out, done):
    """Files, folders of files and prepared folders are domains; each has the numbers of --data.

    A domain without a window is skipped by name; the numbers of all are those of one text.
    """
    reason = 'the given text has 6 tokens and one window needs 33; give more text'
    assert done['domains'].stderr == f'skipped short.txt: {reason}\n'
    report = json.loads((out / 'domains.json').read_text())
    assert report['skipped'] == {'short.txt': reason} and report['rule'] == 'predictor'
    sources = {'kept': 'kept', 'notes.txt': 'notes.txt', 'web': 'web/*.txt'}
    assert list(report['domains']) == list(sources)
    run, mesh = load_run(trained / 'run'), make_mesh('data=1')
    own = dataclasses.replace(run.hparams.data, source=str(out / 'domains' / 'web/*.txt'))
    num_batches = run.hparams.evaluation.final_batches
    with jax.set_mesh(mesh):
        expected = evaluate_causal(
            run.state.variables, run.hparams, make_held_out(own), mesh, num_batches
        )
    web = report['domains']['web']
    assert web['targets'] == expected['targets'] and web['text'] == 'all'
    for number in ('loss', 'loss_top_c', 'routing_gap', 'bits_per_byte'):
        assert web[number] == pytest.approx(expected[number], abs=2e-5), number
    together, parts = report['together'], report['domains'].values()
    assert together['targets'] == sum(part['targets'] for part in parts)
    total = sum(part['loss'] * part['targets'] for part in parts)
    assert together['loss'] == pytest.approx(total / together['targets'], rel=1e-6)
    assert together['perplexity'] == pytest.approx(math.exp(together['loss']))
    assert f'{together["loss"]:.4f}' in done['domains'].stdout
