"""A directory belongs to one config and, at a time, to one process."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training import run_dir
from moddepth_jax.training.saved_run import read_hparams

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = {'seed': 0, 'model': {'d_model': 32, 'windows': (0, 16), 'across_documents': False}}
CONFIG['training'] = {'log_every': 10, 'max_unsharded': 0.05, 'loss_chunk': 0}


def changed(group, field, value):
    return CONFIG | {group: CONFIG[group] | {field: value}}


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != 'lock'}


def run_python(code, *arguments):
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-c', code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def test_config_is_written_once_and_read_back(tmp_path):
    """A new directory gets the config under a schema version; the same config opens it again."""
    path = tmp_path / 'runs' / 'a'
    run_dir.open_workdir(path, CONFIG)
    text = (path / 'config.json').read_text()
    expected = CONFIG | {'model': CONFIG['model'] | {'windows': [0, 16]}}
    assert json.loads(text) == {'schema_version': 1, 'config': expected}
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + '\n'
    assert run_dir.read_config(path) == (expected, [])
    (path / 'metrics.jsonl').write_text('{}\n')
    before = contents(path)
    assert run_dir.open_workdir(path, CONFIG) == []
    assert contents(path) == before and sorted(before) == ['config.json', 'metrics.jsonl']


@pytest.mark.parametrize(
    ('config', 'field', 'values'),
    [
        (changed('model', 'd_model', 64), 'model.d_model', ('32', '64')),
        (changed('model', 'windows', (0, 8)), 'model.windows', ('[0, 16]', '[0, 8]')),
        (changed('model', 'remat', 'block'), 'model.remat', ("'absent'", "'block'")),
        ({'model': CONFIG['model'], 'seed': 0}, 'training.log_every', ('10', "'absent'")),
    ],
)
def test_another_config_is_refused_by_field(tmp_path, config, field, values):
    """The first differing field is named with both values in one line, and nothing is written."""
    run_dir.open_workdir(tmp_path, CONFIG)
    before = contents(tmp_path)
    with pytest.raises(ValueError) as caught:
        run_dir.open_workdir(tmp_path, config, volatile=('seed',))
    message = str(caught.value)
    assert f'{field} is {values[0]} in its config.json and {values[1]} in this run' in message
    assert 'use another --workdir' in message and '\n' not in message
    assert contents(tmp_path) == before


@pytest.mark.parametrize('volatile', ['training.log_every', 'training'])
def test_volatile_fields_may_differ(tmp_path, volatile):
    """A field named volatile, alone or by its group, may change, and is stored as it is now."""
    run_dir.open_workdir(tmp_path, CONFIG)
    run_dir.open_workdir(tmp_path, changed('training', 'log_every', 1), volatile=(volatile,))
    run_dir.update_config(tmp_path, changed('training', 'log_every', 1))
    assert run_dir.read_config(tmp_path)[0]['training']['log_every'] == 1
    with pytest.raises(ValueError, match=r'training\.log_every'):
        run_dir.open_workdir(tmp_path, changed('training', 'log_every', 2), volatile=('train',))


def test_a_place_of_something_else_is_refused_untouched(tmp_path):
    """A file, and a directory of other things, are refused by name; nothing appears in them."""
    file = tmp_path / 'notes.txt'
    file.write_text('mine')
    for path, found in ((tmp_path, "holds 'notes.txt' but no config.json"), (file, 'is a file')):
        with pytest.raises(ValueError, match=found) as caught:
            run_dir.open_workdir(path, CONFIG)
        assert f'--workdir={path}' in str(caught.value)
    assert os.listdir(tmp_path) == ['notes.txt'] and file.read_text() == 'mine'
    with pytest.raises(ValueError, match='must be a directory that can be written'):
        run_dir.open_workdir(file / 'below', CONFIG)


def test_a_run_killed_before_its_config_was_whole_leaves_a_usable_directory(tmp_path):
    """What a kill can leave beside no config.json does not count as something else."""
    (tmp_path / 'lock').touch()
    (tmp_path / 'config.json.host-7.tmp').write_text('{"sche')
    run_dir.open_workdir(tmp_path, CONFIG)
    assert run_dir.read_config(tmp_path)[0]['seed'] == 0


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        (None, 'holds no config.json'),
        ('{"schema_version": 1, "con', 'config.json: unreadable'),
        ('{"seed": 0}', 'config.json: unreadable'),
        ('[]', 'config.json: unreadable'),
        ('{"schema_version": 2, "config": {}}', 'schema_version=2; must be 1'),
    ],
)
def test_missing_or_corrupt_config_is_one_line(tmp_path, text, found):
    """Commands that read a run's config name the file and what is wrong with it."""
    if text is not None:
        (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ValueError, match=found) as caught:
        run_dir.read_config(tmp_path)
    assert str(tmp_path) in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize(
    'config', [{}, {'model': 3}, {'model': {'routing': 'learned'}}, {'model': {}, 'data': None}]
)
def test_a_config_that_lacks_groups_is_told_of_by_its_reader(tmp_path, config):
    """No knob is filled in where its group is missing or none; the line names what is."""
    (tmp_path / 'config.json').write_text(json.dumps({'schema_version': 1, 'config': config}))
    stored, _ = run_dir.read_config(tmp_path)
    assert stored.keys() == config.keys()
    with pytest.raises(ValueError, match='config.json: [a-z_.]+') as caught:
        read_hparams(tmp_path)
    assert '\n' not in str(caught.value)


def without(config, names):
    """A copy of the config that lacks the dotted `names`."""
    config = json.loads(json.dumps(config))
    for name in names:
        *groups, knob = name.split('.')
        group = config
        for part in groups:
            group = group[part]
        del group[knob]
    return config


# The knobs of the first version, whose runs have no others. This list never grows: a knob that came
# later is one of OLDER_RUNS, with the value under which those runs behave as they did.
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


def first_knobs():
    """Dotted names of FIRST_KNOBS."""
    group, names = '', set()
    for word in FIRST_KNOBS.split():
        if word.endswith(':'):
            group = word.removesuffix(':') + '.'
        else:
            names.add(group + word)
    return names


def knob_names(config, prefix=''):
    """Dotted names of all knobs of nested dicts."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from knob_names(value, f'{prefix}{name}.')
        else:
            yield prefix + name


def test_every_knob_since_the_first_version_has_a_value_for_older_runs(tiny_config):
    """A knob that is added and forgotten in OLDER_RUNS would leave every older run unreadable."""
    names = set(knob_names(dataclasses.asdict(from_config(tiny_config()))))
    first, later = first_knobs(), set(run_dir.OLDER_RUNS)
    assert len(first) == 61 and not first & later
    assert names == first | later


# No cap on those who enter, and no bound on what is whole on every device.
OLD = {'model.routing.overflow': 'grow', 'training.max_unsharded': 1.0}


def as_written_before(path, config, names):
    """Makes `path` the directory of a run from before these knobs."""
    stored = {'schema_version': 1, 'config': without(config, names)}
    (path / 'config.json').write_text(json.dumps(stored))


@pytest.mark.parametrize('lacking', [run_dir.OLDER_RUNS, ['report.top_p']], ids=len)
def test_an_older_run_is_read_with_the_values_it_ran_by(tmp_path, tiny_config, lacking):
    """Each knob that came after it has its old behaviour, and one line names them and no other."""
    config = dataclasses.asdict(from_config(tiny_config(**OLD)))
    as_written_before(tmp_path, config, lacking)
    before = contents(tmp_path)
    stored, (note,) = run_dir.read_config(tmp_path)
    assert dataclasses.asdict(from_config(stored)) == config
    assert str(tmp_path) in note and '\n' not in note
    for name, value in run_dir.OLDER_RUNS.items():
        assert (f'{name}={value!r}' in note) == (name in lacking)
    assert contents(tmp_path) == before


def test_an_older_run_goes_on_in_its_directory(tmp_path, tiny_config):
    """It is accepted and told of once; another value of a knob that it lacked is refused."""
    config = dataclasses.asdict(from_config(tiny_config(**OLD)))
    as_written_before(tmp_path, config, run_dir.OLDER_RUNS)
    other = dataclasses.asdict(
        from_config(tiny_config(**OLD, **{'model.routing.select_per': 'segment'}))
    )
    with pytest.raises(ValueError, match="select_per is 'row' in its config.json and 'segment'"):
        run_dir.open_workdir(tmp_path, other)
    (note,) = run_dir.open_workdir(tmp_path, config)
    assert "model.routing.select_per='row'" in note
    run_dir.update_config(tmp_path, config)
    assert run_dir.open_workdir(tmp_path, config) == []
    assert json.loads((tmp_path / 'config.json').read_text())['config']['report']['top_p'] == 1.0


def test_a_run_of_the_first_version_goes_on_as_it_began(tmp_path, tiny_config):
    """Its config lacks whole groups; what is filled in is the dense stream without experts."""
    config = dataclasses.asdict(from_config(tiny_config(**OLD)))
    later = [name for name in run_dir.OLDER_RUNS if name.split('.')[1] not in ('depth', 'experts')]
    as_written_before(tmp_path, config, [*later, 'model.depth', 'model.experts'])
    stored, (note,) = run_dir.read_config(tmp_path)
    assert dataclasses.asdict(from_config(stored)) == config
    assert all(f'{name}={value!r}' in note for name, value in run_dir.OLDER_RUNS.items())
    (told,) = run_dir.open_workdir(tmp_path, config)
    assert told == note
    run_dir.update_config(tmp_path, config)
    assert read_hparams(tmp_path) == (from_config(tiny_config(**OLD)), [])


def put(config, name, value):
    """A copy of the config in which the dotted `name` is `value`."""
    config = json.loads(json.dumps(config))
    *groups, knob = name.split('.')
    group = config
    for part in groups:
        group = group[part]
    group[knob] = value
    return config


def refusals(path, config):
    """What resuming the run of `config` in `path` is told, and what the other commands are."""
    for read in (lambda: run_dir.open_workdir(path, config), lambda: read_hparams(path)):
        with pytest.raises(ValueError) as caught:
            read()
        assert '\n' not in str(caught.value) and str(path) in str(caught.value)
        yield str(caught.value)


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('model.d_model', '32'),
        ('model.d_model', None),
        ('model.depth', 5),
        ('model', 5),
        ('model', ['routing']),
        ('model.routing', [1]),
        ('report', 'def '),
        ('model.windows', 'wide'),
        ('optimizer.b1', [0.9]),
    ],
)
def test_a_stored_knob_of_another_type_is_named(name, value, tmp_path, tiny_config):
    """By every command that reads the run, with its value, in one line, and nothing is written."""
    config = dataclasses.asdict(from_config(tiny_config()))
    stored = {'schema_version': 1, 'config': put(config, name, value)}
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    before = contents(tmp_path)
    for message in refusals(tmp_path, config):
        assert name in message and repr(value) in message
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ('name', 'value'),
    [('model.later', 1), ('later', {'knob': 2}), ('training.max_nan_step', 5)],
)
def test_a_stored_knob_that_is_unknown_is_refused_by_name(name, value, tmp_path, tiny_config):
    """Of a newer version, or edited: every command says so and names it; nothing is written."""
    config = dataclasses.asdict(from_config(tiny_config()))
    stored = {'schema_version': 1, 'config': put(config, name, value)}
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    before = contents(tmp_path)
    for message in refusals(tmp_path, config):
        assert f'{name}={value!r}: no such knob; a newer version wrote it' in message
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('{"schema_version": 2, "config": {}}', ['schema_version=2; must be 1', 'newer version']),
        ('{"schema_version": 1, "config": []}', ['schema_version=1', 'config of named fields']),
        ('[' * 100_000, ['config.json: unreadable']),
        ('', ['config.json: unreadable']),
    ],
)
def test_a_config_of_another_shape_is_one_line(text, words, tmp_path, tiny_config):
    """Of another schema, a list, nested beyond reading, or empty."""
    (tmp_path / 'config.json').write_text(text)
    for message in refusals(tmp_path, dataclasses.asdict(from_config(tiny_config()))):
        assert all(word in message for word in words)


def test_a_directory_in_place_of_the_config_is_one_line(tmp_path, tiny_config):
    """It is told by its name, by every command."""
    (tmp_path / 'config.json').mkdir()
    for message in refusals(tmp_path, dataclasses.asdict(from_config(tiny_config()))):
        assert 'config.json: unreadable' in message and 'Is a directory' in message


def test_a_knob_without_an_old_value_stays_missing(tmp_path, tiny_config):
    """What no older version lacked is a damaged config, and is named when it is built."""
    config = dataclasses.asdict(from_config(tiny_config()))
    as_written_before(tmp_path, config, ['model.d_model'])
    with pytest.raises(ValueError, match='model.d_model: missing'):
        from_config(run_dir.read_config(tmp_path)[0])


def test_written_atomically_the_old_text_survives_a_failed_write(tmp_path):
    """An error amid the write leaves the file as it was."""
    path = tmp_path / 'file'
    run_dir.write_atomically(path, 'old')
    with pytest.raises(UnicodeEncodeError):
        run_dir.write_atomically(path, 'new \ud800')
    assert path.read_text() == 'old'
    run_dir.write_atomically(path, 'new')
    assert path.read_text() == 'new'


HOLD = """
import sys
from moddepth_jax.training import run_dir
from moddepth_jax.training.saved_run import read_hparams
lock = run_dir.WorkdirLock(sys.argv[1])
print('held', flush=True)
sys.stdin.read()
"""


def test_a_second_run_on_a_directory_is_refused_until_the_first_is_dead(tmp_path):
    """Two processes never hold one directory, and a kill -9 leaves no lock behind."""
    with run_python(HOLD, tmp_path) as process:
        assert process.stdout.readline() == 'held\n'
        with pytest.raises(ValueError) as caught:
            run_dir.WorkdirLock(tmp_path)
        message = str(caught.value)
        assert f'--workdir={tmp_path}: in use by process {process.pid} on ' in message
        assert 'use another --workdir' in message and '\n' not in message
        with pytest.raises(ValueError, match='in use by'):
            run_dir.open_workdir(tmp_path, CONFIG)
        assert os.listdir(tmp_path) == ['lock']
        process.kill()
    with run_dir.WorkdirLock(tmp_path):
        with pytest.raises(ValueError, match=f'process {os.getpid()} '):
            run_dir.WorkdirLock(tmp_path)
    run_dir.WorkdirLock(tmp_path).close()
