"""A directory belongs to one config and one process at a time; it keeps the tokenizer."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from flax import traverse_util

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer, tokenizer_of
from moddepth_jax.hparams import from_config
from moddepth_jax.training import run_dir
from moddepth_jax.training.run_dir import read_hparams
from tests.data import tokenizer_files
from tests.data.prepared_text import refusal

ROOT = pathlib.Path(__file__).parents[2]
# No limit on selected tokens or on unsharded parameters.
OLD = {'model.routing.overflow': 'grow', 'training.max_unsharded': 1.0}
# The knobs of the first version, whose runs have no others. This list never grows: a knob that was
# added later is one of OLDER_RUNS, with the value that keeps the behavior of those runs.
FIRST_KNOBS = """
    seed flop_budget
    model: vocab_size num_layers d_model d_ff num_heads num_kv_heads head_dim norm_placement
    norm_eps qk_norm rope_theta use_bias tie_embeddings windows init_std embedding_init_std
    scale_residual_init dtype attention layer_loop remat
    model.routing: router layers capacity gate initial_gate causal_rule predictor_width
    predictor_loss_weight aux_loss_weight
    data: source text_field tokenizer sequence_length batch_size held_out_fraction
    optimizer: learning_rate final_fraction warmup_fraction b1 b2 eps weight_decay clip_norm z_loss
    training: num_steps accumulate_steps log_every checkpoint_every keep_checkpoints max_nan_steps
    compilation_cache
    evaluation: every num_batches final_batches
    report: prompt sample_tokens temperature heatmap_tokens
"""


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def changed(config, name, value):
    config = json.loads(json.dumps(config))
    *groups, knob = name.split('.')
    group = config
    for part in groups:
        group = group[part]
    group[knob] = value
    return config


def without(config, names):
    flat = traverse_util.flatten_dict(json.loads(json.dumps(config)), sep='.')
    flat = {name: value for name, value in flat.items() if name not in names}
    return traverse_util.unflatten_dict(flat, sep='.')


def write_config(path, config, version=1):
    content = {'schema_version': version, 'config': config}
    (path / 'config.json').write_text(json.dumps(content))


def first_knobs():
    group, names = '', set()
    for word in FIRST_KNOBS.split():
        if word.endswith(':'):
            group = word.removesuffix(':') + '.'
        else:
            names.add(group + word)
    return names


@pytest.fixture(scope='module')
def config(tiny_config):
    return dataclasses.asdict(from_config(tiny_config(**{'model.windows': (0, 16)})))


def test_config_is_written_once_and_read_back(tmp_path, config):
    path = tmp_path / 'runs' / 'a'
    run_dir.open_workdir(path, config)
    text = (path / 'config.json').read_text()
    expected = json.loads(json.dumps(config))
    assert json.loads(text) == {'schema_version': 1, 'config': expected}
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + '\n'
    assert run_dir.read_config(path) == (expected, [])
    (path / 'metrics.jsonl').write_text('{}\n')
    before = contents(path)
    assert run_dir.open_workdir(path, config) == []
    assert contents(path) == before and sorted(before) == ['config.json', 'lock', 'metrics.jsonl']


@pytest.mark.parametrize(
    ('field', 'old', 'new'),
    [
        ('model.d_model', 32, 64),
        ('model.windows', [0, 16], [0, 8]),
        ('model.remat', 'absent', 'block'),
        ('training.log_every', 1, 'absent'),
    ],
)
def test_another_config_is_refused_by_field(tmp_path, config, field, old, new):
    sides = [
        without(config, [field]) if value == 'absent' else changed(config, field, value)
        for value in (old, new)
    ]
    run_dir.open_workdir(tmp_path, sides[0])
    before = contents(tmp_path)
    message = refusal(run_dir.open_workdir, tmp_path, sides[1], volatile=('seed',))
    assert f'{field} is {old!r} in its config.json and {new!r} in this run' in message
    # Regression: after a default had changed, nothing said how to resume a run.
    assert f'; --config={tmp_path}/config.json resumes that run; or use another --w' in message
    assert contents(tmp_path) == before
    several = changed(changed(sides[0], 'training.num_steps', 3), 'report.top_p', 0.5)
    message = refusal(run_dir.open_workdir, tmp_path, several)
    assert 'report.top_p is 1.0 in its config.json and 0.5 in this run (also training.n' in message


@pytest.mark.parametrize('volatile', ['training.log_every', 'training'])
def test_volatile_fields_may_differ(tmp_path, config, volatile):
    run_dir.open_workdir(tmp_path, config)
    other = changed(config, 'training.log_every', 7)
    run_dir.open_workdir(tmp_path, other, volatile=(volatile,))
    run_dir.update_config(tmp_path, other)
    assert run_dir.read_config(tmp_path)[0]['training']['log_every'] == 7
    with pytest.raises(ValueError, match=r'training\.log_every'):
        run_dir.open_workdir(tmp_path, config, volatile=('train',))


def test_a_run_killed_while_it_wrote_its_config_leaves_a_usable_directory(tmp_path, config):
    (tmp_path / 'lock').touch()
    (tmp_path / 'config.json.host-7.tmp').write_text('{"sche')
    run_dir.open_workdir(tmp_path, config)
    assert run_dir.read_config(tmp_path)[0]['seed'] == 0


def test_every_later_knob_has_a_value_for_older_runs(tiny_config):
    """Without this, a knob that is missing in OLDER_RUNS would make every older run unreadable."""
    config = dataclasses.asdict(from_config(tiny_config()))
    names = set(traverse_util.flatten_dict(config, sep='.'))
    first, later = first_knobs(), set(run_dir.OLDER_RUNS)
    assert len(first) == 61 and not first & later
    assert names == first | later


@pytest.mark.parametrize('lacking', [run_dir.OLDER_RUNS, ['report.top_p']], ids=len)
def test_an_older_run_resumes_with_the_values_of_its_time(tmp_path, tiny_config, lacking):
    """Each missing knob or group has its old behavior; one line lists them."""
    hparams = from_config(tiny_config(**OLD))
    config = dataclasses.asdict(hparams)
    write_config(tmp_path, without(config, lacking))
    before = contents(tmp_path)
    stored, (note,) = run_dir.read_config(tmp_path)
    assert dataclasses.asdict(from_config(stored)) == config
    assert str(tmp_path) in note and '\n' not in note
    for name, value in run_dir.OLDER_RUNS.items():
        assert (f'{name}={value!r}' in note) == (name in lacking)
    other = dataclasses.asdict(from_config(tiny_config(**OLD, **{'report.top_p': 0.5})))
    with pytest.raises(ValueError, match='report.top_p is 1.0 in its config.json and 0.5'):
        run_dir.open_workdir(tmp_path, other)
    assert run_dir.open_workdir(tmp_path, config) == [note]
    assert contents(tmp_path) == before
    run_dir.update_config(tmp_path, config)
    assert run_dir.open_workdir(tmp_path, config) == []
    assert read_hparams(tmp_path) == (hparams, [])


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        (None, ['holds no config.json']),
        ('{"schema_version": 1, "con', ['config.json: cannot be read']),
        ('{"seed": 0}', ["config.json: holds no 'schema_version'"]),
        ('{"a":' * 100_000, ['config.json: cannot be read (nested more than 64 deep)']),
        ('{"schema_version": 2, "config": {}}', ['schema_version=2; must be 1', 'newer version']),
        ('{"schema_version": 1, "config": []}', ['config.json: config=[]; must be an object']),
    ],
)
def test_a_missing_or_corrupt_config_is_one_line(tmp_path, text, words):
    if text is not None:
        (tmp_path / 'config.json').write_text(text)
    for read in (run_dir.read_config, read_hparams):
        assert_refused(lambda read=read: read(tmp_path), [str(tmp_path), *words])


def assert_refused(call, words):
    message = refusal(call)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ('name', 'value', 'word'),
    [
        ('model.d_model', '32', ''),
        ('model.depth', 5, ''),
        ('model', 5, ''),
        ('report', 'def ', ''),
        ('model.later', 1, 'no such knob; it was edited, or a newer version wrote it'),
        ('later', {'knob': 2}, 'no such knob; it was edited, or a newer version wrote it'),
    ],
)
def test_a_stored_knob_that_does_not_fit_is_named(name, value, word, tmp_path, tiny_config):
    config = dataclasses.asdict(from_config(tiny_config()))
    write_config(tmp_path, changed(config, name, value))
    before = contents(tmp_path)
    for read in (lambda: run_dir.open_workdir(tmp_path, config), lambda: read_hparams(tmp_path)):
        assert_refused(read, [str(tmp_path), name, repr(value), word])
    assert contents(tmp_path) == before


def test_a_missing_first_knob_is_not_filled_in(tmp_path, tiny_config):
    config = dataclasses.asdict(from_config(tiny_config()))
    for lacking, stored in (
        ('model.d_model: missing', without(config, ['model.d_model'])),
        ('config.json: [a-z_.]+', {'model': {}, 'data': None}),
    ):
        write_config(tmp_path, stored)
        with pytest.raises(ValueError, match=lacking):
            read_hparams(tmp_path)


ROUTER = """
from moddepth_jax.model.mod.routers import ROUTERS, NormRouter
@ROUTERS.register('of_this_test')
class OwnRouter(NormRouter):
    pass
"""


def test_a_run_keeps_the_file_that_defines_its_router(tmp_path, tiny_config):
    """Without it, or if it fails, the error names the router."""
    config = dataclasses.asdict(from_config(tiny_config(**{'model.routing.router': 'norm'})))
    config['model']['routing']['router'] = 'of_this_test'
    write_config(tmp_path, config)
    words = ["model.routing.router='of_this_test'"]
    assert_refused(lambda: read_hparams(tmp_path), words)
    source = tmp_path / 'given.py'
    source.write_text('import no_such_module')
    run_dir.save_source(tmp_path, source)
    assert_refused(lambda: read_hparams(tmp_path), [*words, 'config.py', 'no_such_module'])
    latin = f'# -*- coding: latin-1 -*-\n# é\n{ROUTER}'.encode('latin-1')  # Python reads it
    source.write_bytes(latin)
    run_dir.save_source(tmp_path, source)
    run_dir.save_source(tmp_path, None)
    hparams = read_hparams(tmp_path)[0]
    assert hparams.model.routing.router == 'of_this_test'
    # Once it has trained, other code is refused, if the config needs code of the file.
    source.write_bytes(latin + b'\nother = 1')
    run_dir.check_source(tmp_path, source, hparams)
    steps = tmp_path / 'checkpoints/2'
    steps.mkdir(parents=True)
    (steps / run_dir.MANIFEST_FILE).write_text('{}')
    words = [f'{source} differs from its config.py', words[0], f'{tmp_path}/config.json resumes']
    assert_refused(lambda: run_dir.check_source(tmp_path, source, hparams), words)
    run_dir.check_source(tmp_path, source, from_config(tiny_config()))
    for same in (tmp_path / 'config.py', None):
        run_dir.check_source(tmp_path, same, hparams)


def test_running_the_file_of_a_run_is_said_first(tmp_path, tiny_config, capsys):
    """Regressions: reading the directory of someone else ran its code without a word.

    So did reading a damaged number, which no code defines.
    """
    config = dataclasses.asdict(from_config(tiny_config(**{'model.routing.router': 'norm'})))
    source = tmp_path / 'given.py'
    source.write_text('import sys\nprint("it runs", file=sys.stderr)')
    run_dir.save_source(tmp_path, source)
    write_config(tmp_path, config)
    read_hparams(tmp_path)
    assert not capsys.readouterr().err
    write_config(tmp_path, config | {'seed': -1})
    assert_refused(lambda: read_hparams(tmp_path), ['seed=-1'])
    assert not capsys.readouterr().err
    config['model']['routing']['router'] = 'nosuch'
    write_config(tmp_path, config)
    assert_refused(lambda: read_hparams(tmp_path), ["model.routing.router='nosuch': must"])
    said = f"running {tmp_path}/config.py, which may define model.routing.router='nosuch' of "
    assert capsys.readouterr().err == f'{said}config.json\nit runs\n'


HOLD = """
import sys
from moddepth_jax.data.directory import lock_directory
lock = lock_directory(sys.argv[1])
print('held', flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path, config):
    """Two processes never hold the same directory, and a kill -9 leaves no lock."""
    pipe = subprocess.PIPE
    command = [sys.executable, '-c', HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == 'held\n'
        words = [f'--workdir={tmp_path}: in use by process {process.pid} on ', 'another --workdir']
        assert_refused(lambda: run_dir.lock_directory(tmp_path), words)
        assert_refused(lambda: run_dir.open_workdir(tmp_path, config), words)
        assert os.listdir(tmp_path) == ['lock']
        process.kill()
    with run_dir.lock_directory(tmp_path):
        assert_refused(lambda: run_dir.lock_directory(tmp_path), [f'process {os.getpid()} '])
    run_dir.lock_directory(tmp_path).close()


@pytest.fixture
def hparams(tiny_config, tmp_path):
    return from_config(tiny_config(**{'data.tokenizer': str(tmp_path / 'gone.json')}))


def test_the_tokenizer_is_stored_once(hparams, tmp_path):
    """It is read without its file. A second start keeps it, and removes the remains of a kill."""
    (tmp_path / 'tokenizer.tmp').mkdir()
    (tmp_path / 'tokenizer.tmp' / 'tokenizer.json').write_text('{')
    tokenizer = tokenizer_files.byte_level()
    run_dir.save_tokenizer(tmp_path, hparams, tokenizer)
    assert os.listdir(tmp_path) == ['tokenizer']
    assert tokenizer_of(hparams.data, tmp_path).sha256 == tokenizer.sha256
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / 'tokenizer').iterdir()}
    run_dir.save_tokenizer(tmp_path, hparams, tokenizer)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / 'tokenizer').iterdir()} == files


def test_another_tokenizer_is_refused(hparams, tmp_path):
    """A run resumes with the ids that it began with. A file instead of a directory is named."""
    (tmp_path / 'llama.json').write_text(tokenizer_files.llama_file())
    run_dir.save_tokenizer(tmp_path, hparams, tokenizer_files.byte_level())
    other = make_tokenizer(tmp_path / 'llama.json')
    words = ['tokenizer: has bpe:320, ', '; restore']
    assert_refused(lambda: run_dir.save_tokenizer(tmp_path, hparams, other), words)
    words = ['--workdir=', '; must be a directory that can be written']
    file = tmp_path / 'llama.json'
    assert_refused(lambda: run_dir.save_tokenizer(file, hparams, other), words)


def test_bytes_need_no_folder_unless_they_were_prepared(tiny_config, tmp_path):
    """`prepared` does not say which tokenizer it was after the prepared text has moved."""
    tokenizer = make_tokenizer('bytes')
    run_dir.save_tokenizer(tmp_path, from_config(tiny_config()), tokenizer)
    assert not list(tmp_path.iterdir())
    prepared = from_config(tiny_config(**{'data.tokenizer': 'prepared'}))
    run_dir.save_tokenizer(tmp_path, prepared, tokenizer)
    assert tokenizer_of(prepared.data, tmp_path).name == 'bytes'
