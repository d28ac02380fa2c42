"""launch.convert: a Hugging Face checkpoint becomes a run, which is exported unchanged."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from flax import traverse_util

from launch import first_checkpoint
from moddepth_jax.conversion.hugging_face import import_params
from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer, tokenizer_of
from moddepth_jax.hparams import from_config
from moddepth_jax.model.adapters import has_adapters
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from moddepth_jax.training.loop import restore_or_init, train
from moddepth_jax.training.mesh import make_mesh
from moddepth_jax.training.metrics import read_metrics, read_windows
from moddepth_jax.training.plan import resolve_steps
from moddepth_jax.training.run_dir import read_hparams
from moddepth_jax.training.saved_run import load_run
from tests.forked_commands import ROOT
from tests.launch.commands import call, write_words
from tests.saved_run import save_run

GOLDEN = ROOT / 'tests' / 'conversion' / 'golden'
KNOBS = {
    'data.sequence_length': 32,
    'data.batch_size': 4,
    'data.held_out_fraction': 0.3,
    'training.num_steps': 2,
    'training.compilation_cache': False,
}
COPIED = 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json', 'chat_template.jinja'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Folders: hf, a model with its own tokenizer (later removed); text; W, the imported run."""
    folder = tmp_path_factory.mktemp('convert')
    texts = write_words(folder / 'text')
    shutil.copytree(GOLDEN / 'olmo2', folder / 'hf')
    train_bpe(iter(texts), 262).save(folder / 'trained')
    shutil.copy(folder / 'trained' / 'tokenizer.json', folder / 'hf')
    (folder / 'hf' / 'generation_config.json').write_text('{"eos_token_id": [258, 999, null]}')
    (folder / 'hf' / 'chat_template.jinja').write_text('{{ messages }}')
    named = {'eos_token': '<|endoftext|>', 'model_max_length': 64}
    (folder / 'hf' / 'tokenizer_config.json').write_text(json.dumps(named))
    knobs = KNOBS | {'data.source': f'{folder}/text/*.txt', 'report.sample_tokens': 4}
    knobs = [f'--config.{name}={value}' for name, value in knobs.items()]
    done = call('convert', '--from_hf=hf', '--workdir=W', *knobs, cwd=folder)
    assert done.status == 0, done.stderr
    assert 'olmo2' in done.stdout and 'launch.train --config=W/config.json' in done.stdout
    assert 'with <|endoftext|> (id 0); a generated text ends before id 0, 257, 258\n' in done.stdout
    (folder / 'hf').rename(folder / 'gone')
    return folder


@pytest.fixture(scope='module')
def imported(folder):
    return load_run(folder / 'W')


def test_an_import_is_a_run_before_its_first_step(folder, imported):
    """Its parameters are those of the files, and its config does not name their paths."""
    params, _ = import_params(folder / 'gone', imported.hparams)
    assert state_sha256(params) == state_sha256(imported.state.params)
    assert (imported.step, imported.num_steps) == (0, 2)
    assert imported.hparams.data.tokenizer == 'tokenizer.json'
    stored = json.loads((folder / 'W' / 'config.json').read_text())['config']
    assert stored['data'].pop('source') == f'{folder}/text/*.txt'
    assert str(folder) not in json.dumps(stored)
    assert not list(folder.glob('.W*'))
    config = (ROOT / 'configs' / 'imported.py').read_text()
    assert (folder / 'W' / 'config.py').read_text() == config
    note = json.loads((folder / 'W' / 'convert.json').read_text())
    assert (note['name'], note['model_type'], note['dtype']) == ('hf', 'olmo2', 'float32')


def test_the_imported_tokenizer_is_that_of_the_files(folder, imported):
    """Its stops include those of both configs. Regression: such ids could not be drawn."""
    tokenizer = tokenizer_of(imported.hparams.data, folder / 'W')
    assert tokenizer.vocab_size == 262 and tokenizer.decode(tokenizer.encode(b'to be')) == b'to be'
    assert tokenizer.stops == (0, 257, 258)


def test_training_starts_from_an_import(folder, imported):
    """launch.train resumes from checkpoint 0: same data, steps and versions."""
    hparams, _ = read_hparams(folder / 'W')
    tokenizer = tokenizer_of(hparams.data, folder / 'W')
    dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
    with Checkpoints(folder / 'W' / 'checkpoints', keep=1) as checkpoints:
        num_steps, mesh = resolve_steps(hparams), make_mesh('data=1')
        state, metadata, news = restore_or_init(hparams, num_steps, dataset, mesh, checkpoints)
    assert state_sha256(state) == state_sha256(imported.state)
    assert (
        dataset.fingerprint == imported.fingerprint
        and metadata['seconds'] == 0
        and news[0] == 'resuming after step 0'
    )
    assert not [line for line in news if 'python' in line or 'jax' in line]


def test_the_export_equals_the_import(folder):
    done = call('convert', '--workdir=W', '--to_hf=out', cwd=folder)
    assert (done.status, done.stderr) == (0, '')
    for name in ('model.safetensors', *COPIED):
        assert (folder / 'out' / name).read_bytes() == (folder / 'gone' / name).read_bytes(), name
    configs = [json.loads((folder / f / 'config.json').read_text()) for f in ('out', 'gone')]
    assert configs[0] == configs[1]


def test_a_run_from_a_run_keeps_its_config_and_the_texts_of_its_parents(folder, imported):
    """Regression: a router of one's own was lost, and the training text counted as unseen."""
    own = folder / 'own.py'
    own.write_text("""
from launch import config_file
from moddepth_jax.model.mod.routers import ROUTERS


@ROUTERS.register('last')
class Last(ROUTERS['position']):
    pass


def get_config():
    config = config_file.load('W/config.json')
    config.model.routing.router = 'last'
    return config
""")
    write_words(folder / 'more', count=7)
    made = ('--config=own.py', f'--config.data.source={folder}/more')
    done = call('convert', '--from_workdir=W', '--workdir=C', *made, cwd=folder)
    assert done.status == 0, done.stderr
    assert (folder / 'C' / 'config.py').read_bytes() == own.read_bytes()
    note = json.loads((folder / 'C' / 'convert.json').read_text())
    assert note['trained_on'] == {imported.fingerprint['corpus_sha256']: 0.3}


def test_an_export_has_the_tokenizer_that_the_import_lacked(folder):
    """Regression: it had none, was said to read bytes, and was imported again as such a model."""
    shutil.copytree(GOLDEN / 'olmo2', folder / 'bare')
    knobs = KNOBS | {
        'data.source': f'{folder}/text/*.txt',
        'data.tokenizer': 'trained/tokenizer.json',
    }
    knobs = [f'--config.{name}={value}' for name, value in knobs.items()]
    done = call('convert', '--from_hf=bare', '--workdir=named', *knobs, cwd=folder)
    assert done.status == 0, done.stderr
    done = call('convert', '--workdir=named', '--to_hf=with_tokenizer', cwd=folder)
    assert (done.status, done.stderr) == (0, '') and 'bytes' not in done.stdout
    exported = (folder / 'with_tokenizer' / 'tokenizer.json').read_bytes()
    assert exported == (folder / 'trained' / 'tokenizer.json').read_bytes()


@pytest.fixture(scope='module')
def changed(folder):
    """`changed`, the export of N, an imported bfloat16 model with another separator and context."""
    shutil.copytree(GOLDEN / 'llama_tied', folder / 'half')
    tokenizer = json.loads((folder / 'trained' / 'tokenizer.json').read_text())
    special = tokenizer['added_tokens'][0] | {'id': 262, 'content': '<|new|>'}
    tokenizer['added_tokens'].append(special)
    (folder / 'half' / 'tokenizer.json').write_text(json.dumps(tokenizer))
    knobs = KNOBS | {'data.source': f'{folder}/text/*.txt', 'data.sequence_length': 80}
    knobs = [f'--config.{name}={value}' for name, value in knobs.items()]
    for line in (
        ('--from_hf=half', '--workdir=N', '--separator=<|new|>', *knobs),
        ('--workdir=N', '--to_hf=changed'),
    ):
        done = call('convert', *line, cwd=folder)
        assert done.status == 0, done.stderr
    return folder / 'changed'


def read_configs(folder):
    return [
        json.loads((folder / f'{name}.json').read_text())
        for name in ('config', 'generation_config')
    ]


def test_the_export_has_the_separator_and_the_context_of_the_run(changed):
    """Regression: `generate` never stopped at the separator and could draw ids without text."""
    (before, generation), (after, generation_after) = map(
        read_configs, (GOLDEN / 'llama_tied', changed)
    )
    ids = {'bos_token_id': 262, 'eos_token_id': [257, 262]}
    assert after == before | ids | {'max_position_embeddings': 80}
    generation.pop('_from_model_config')
    without_text = {'suppress_tokens': [0, *range(263, 270)]}  # 0: the other separator
    assert generation_after == generation | ids | without_text
    assert make_tokenizer(changed).separator == 262


@pytest.mark.slow
def test_a_trained_run_is_exported_in_float32(folder, changed):
    """Regression: the parameters of a run from bfloat16 files were rounded to bfloat16.

    Also through another run, which begins at step 0.
    """
    for name, arguments in (
        ('train', ('--config=N/config.json', '--workdir=N')),
        ('convert', ('--from_workdir=N', '--workdir=M', '--config=N/config.json')),
        ('convert', ('--workdir=M', '--to_hf=full')),
        ('convert', ('--workdir=M', '--to_hf=rounded', '--dtype=bfloat16')),
    ):
        done = call(name, *arguments, cwd=folder)
        assert done.status == 0, done.stderr
    assert [
        json.loads((folder / name / 'config.json').read_text())['dtype']
        for name in ('changed', 'full', 'rounded')
    ] == ['bfloat16', 'float32', 'bfloat16']
    run = load_run(folder / 'N')
    params, dtype = import_params(folder / 'full', run.hparams)
    assert dtype == 'float32' and state_sha256(params) == state_sha256(run.state.params)


@pytest.mark.parametrize('fails', [True, False])
def test_an_output_folder_is_complete_or_absent(fails, tmp_path):
    """A failure leaves nothing, and an empty folder that existed stays.

    Regression: a link to it was refused at the end, and all was lost.
    """
    (tmp_path / 'new').mkdir()
    (tmp_path / 'link').symlink_to('new')
    try:
        with first_checkpoint.atomic_folder('workdir', str(tmp_path / 'link')) as part:
            (part / 'file').write_text('x')
            assert not fails or 1 / 0
    except ZeroDivisionError:
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ['link', 'new']
    assert (tmp_path / 'new' / 'file').exists() != fails


def test_a_mount_point_is_refused_as_an_output_folder(tmp_path, monkeypatch):
    monkeypatch.setattr('os.path.ismount', lambda path: path == str(tmp_path))
    (tmp_path / 'new').mkdir()
    first_checkpoint.check_new_folder('workdir', str(tmp_path / 'new'))
    with pytest.raises(ValueError, match='is a mount point; must be a new folder in it$'):
        first_checkpoint.check_new_folder('workdir', str(tmp_path))


@pytest.mark.parametrize(
    ('knobs', 'words'),
    [
        ({'model.looped_layers': 'all', 'model.loops': 3}, "model.looped_layers='all': --from_hf="),
        ({'training.distill_from': 'gone'}, "training.distill_from='gone': holds no config.json"),
    ],
    ids=str,
)
def test_an_import_that_cannot_train_or_is_another_function_is_refused(knobs, words, tmp_path):
    """Regression: a looped import ran its blocks three times; a teacher was not looked at."""
    knobs = [f'--config.{name}={value}' for name, value in (KNOBS | knobs).items()]
    hf = ('--from_hf', str(GOLDEN / 'llama'), '--workdir=new', '--config.data.source=synthetic')
    done = call('convert', *hf, *knobs, cwd=tmp_path)
    assert done.status and words in done.stderr and done.stderr.count('\n') == 1


@pytest.mark.slow
def test_a_routed_run_is_unchanged_by_export_and_import(tiny_config, tmp_path):
    """With a modelling file, knobs and averages; both exported folders have the same bytes.

    Regression: an export forgot the rule of training.
    """
    routed = {'model.routing.router': 'learned', 'model.depth.stream': 'moda'}
    routed['model.routing.train_rule'] = 'threshold'
    save_run(tmp_path / 'run', from_config(tiny_config(**routed, **{'model.vocab_size': 260})))
    done = call('convert', '--workdir=run', '--to_hf=out', cwd=tmp_path)
    assert (done.status, done.stderr) == (0, '')
    assert 'out: moddepth, step 4 of 4, float32\nwith its own modeling_moddepth.py, ' in done.stdout
    assert "='learned': no family has routed blocks" in done.stdout
    knobs = ('--config.data.source=synthetic', '--config.training.compilation_cache=False')
    (tmp_path / 'out' / 'modeling_moddepth.py').write_text('import this_is_never_executed')
    done = call('convert', '--from_hf=out', '--workdir=again', *knobs, cwd=tmp_path)
    assert done.status == 0, done.stderr
    runs = [load_run(tmp_path / name) for name in ('run', 'again')]
    assert runs[0].hparams.model == runs[1].hparams.model
    for part in ('params', 'averages'):
        sums = [state_sha256(getattr(run.state, part)) for run in runs]
        assert sums[0] == sums[1], part
    changed = ('--config.model.dtype=bfloat16', '--config.model.adapters.rank=2')
    done = call('convert', '--from_hf=out', '--workdir=tuned', *knobs, *changed, cwd=tmp_path)
    assert done.status == 0, done.stderr
    tuned = load_run(tmp_path / 'tuned')
    model = dataclasses.replace(runs[0].hparams.model, dtype='bfloat16')
    assert has_adapters(tuned.state.params) and tuned.hparams.without_adapters.model == model
    done = call('convert', '--workdir=again', '--to_hf=out2', cwd=tmp_path)
    assert (done.status, done.stderr) == (0, '')
    for name in ('model.safetensors', 'config.json', 'generation_config.json'):
        assert (tmp_path / 'out2' / name).read_bytes() == (tmp_path / 'out' / name).read_bytes()
    generation = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
    assert generation['suppress_tokens'] == [257, 258, 259]


@pytest.mark.slow
def test_adapters_are_merged_at_export(folder):
    """A run of the imported model with trained adapters is exported, and converted, as one model.

    Both have its held-out loss.
    """
    adapters = ('--config.model.adapters.rank=2', '--config.optimizer.trainable=*/adapter/*')
    made = ('--config=W/config.json', '--config.optimizer.learning_rate=0.03', *adapters)
    for name, arguments in (
        ('convert', ('--from_workdir=W', '--workdir=A', *made)),
        ('train', ('--config=A/config.json', '--workdir=A')),
        ('convert', ('--from_workdir=A', '--workdir=B', '--config=W/config.json')),
        ('convert', ('--workdir=A', '--to_hf=merged')),
    ):
        done = call(name, *arguments, cwd=folder)
        assert done.status == 0, done.stderr
    before, after = (load_run(folder / name) for name in 'AB')
    note = json.loads((folder / 'B' / 'convert.json').read_text())
    assert note['dense_loss'] == pytest.approx(note['first_loss'], abs=1e-6)
    assert note['new_parameters'] == []
    exported, _ = import_params(folder / 'merged', after.hparams)
    for path, leaf in traverse_util.flatten_dict(after.state.params).items():
        other = exported
        for key in path:
            other = other[key]
        np.testing.assert_allclose(leaf, other, atol=1e-7)
    assert has_adapters(before.state.params) and not has_adapters(after.state.params)
    note = json.loads((folder / 'A' / 'convert.json').read_text())
    assert note['difference'] == 0 and 'new adapters add 0' in note['why']


@pytest.mark.slow
def test_a_branch_equals_the_run_with_these_steps(tiny_config, tmp_path):
    """A wsd run branched after step 4 of 10 equals, to the bit, a run of 7 steps."""
    changes = {'optimizer.schedule': 'wsd', 'optimizer.decay_fraction': 0.4}
    changes |= {'optimizer.warmup_fraction': 0.25, 'data.source': f'{tmp_path}/text/?.txt'}
    changes |= {'training.checkpoint_every': 2, 'training.keep_checkpoints': 9}
    changes |= {'data.log_windows': True}
    write_words(tmp_path / 'text')

    def hparams(num_steps, extended_from=0):
        steps = {'training.num_steps': num_steps, 'training.extended_from': extended_from}
        return from_config(tiny_config(**changes | {'data.held_out_fraction': 0.3}, **steps))

    train(hparams(10), tmp_path / 'long')
    done = call('convert', '--branch=long', '--step=4', '--workdir=short', cwd=tmp_path)
    assert (done.status, done.stderr) == (0, '')
    branch, at_once = train(hparams(7), tmp_path / 'short'), train(hparams(7, 10), tmp_path / 'one')
    rates = [
        [row['learning_rate'] for row in read_metrics(run.workdir) if 'loss' in row]
        for run in (branch, at_once)
    ]
    assert rates[0] == rates[1] and rates[0][3] == rates[0][4] > rates[0][5] > rates[0][6]
    windows = read_windows(branch.workdir)
    assert windows == read_windows(at_once.workdir) and list(windows) == [1, 2, 3, 4, 5, 6, 7]
    for name in ('state_sha256', 'total_flops', 'eval', 'stages'):
        assert branch.summary[name] == at_once.summary[name]
    assert branch.summary['extended'] == [{'step': 4, 'num_steps': 7}]
