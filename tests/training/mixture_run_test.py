"""A run on a mixture of prepared folders: domains apart, and resumed wherever the folders lie."""

import dataclasses
import json
import shutil

import jax
import pytest

from moddepth_jax.data.pipeline import make_dataset
from moddepth_jax.data.tokenizers.tokenizer import ByteTokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.training import loop, summary
from moddepth_jax.training.evaluate import evaluate_causal
from moddepth_jax.training.metrics import read_metrics
from moddepth_jax.training.plan import describe
from tests.data.prepared_text import prepare, write_texts

pytestmark = pytest.mark.usefixtures('compiled_once')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Three prepared texts of letters of their own."""
    folder = tmp_path_factory.mktemp('mixture')
    for seed, (name, letters) in enumerate(
        {'web': b'abcd', 'code': b'()+=', 'new': b'xyz'}.items()
    ):
        documents = write_texts(folder / 'text' / name, letters, seed, number=15)
        prepare(folder / name, documents, ByteTokenizer(), 0.3)
    return folder


@pytest.fixture(scope='module')
def hparams(tiny_config, folder):
    changes = {
        'model.num_layers': 1,
        'data.source': 'mixture',
        'data.mixture': f'{folder}/web:3,{folder}/code:1',
        'data.tokenizer': 'prepared',
        'data.held_out_fraction': 0.3,
        'training.num_steps': 5,
        'training.checkpoint_every': 2,
        'evaluation.every': 0,
        'evaluation.num_batches': 2,
        'evaluation.final_batches': 3,
    }
    return from_config(tiny_config(**changes))


@pytest.fixture(scope='module', autouse=True)
def flops_not_counted():
    """Of no interest here, and a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, 'step_flops_report', lambda *_: {})
        yield


@pytest.fixture(scope='module')
def finished(hparams, tmp_path_factory, compiled_once):
    return loop.train(hparams, tmp_path_factory.mktemp('finished') / 'run')


def elsewhere(hparams, mixture):
    return dataclasses.replace(hparams, data=dataclasses.replace(hparams.data, mixture=mixture))


def test_each_domain_is_told_apart_and_weighted_by_its_share(finished, hparams, folder):
    """summary.json and the last row hold the loss of each, that of its folder evaluated alone; the
    loss of all is their mean by shares.
    """
    found = json.loads((finished.workdir / 'summary.json').read_text())
    domains = found['domains']
    assert {name: values['share'] for name, values in domains.items()} == {
        'web': 0.75,
        'code': 0.25,
    }
    batches = {'web': 2, 'code': 1}
    for name, values in domains.items():
        data = dataclasses.replace(hparams.data, source=str(folder / name), mixture='')
        alone, mesh = make_dataset(data, 0), finished.state.step.sharding.mesh
        given = (finished.state.variables, hparams, alone, mesh, batches[name])
        with jax.set_mesh(mesh):
            expected = evaluate_causal(*given)
        for number in ('loss', 'bits_per_byte', 'targets'):
            assert values[number] == pytest.approx(expected[number], rel=1e-6)
        rows = {'web': 15, 'code': 5}[name]
        assert values['epochs'] == rows / alone.num_train_windows
    mean = 0.75 * domains['web']['loss'] + 0.25 * domains['code']['loss']
    assert found['eval']['loss'] == pytest.approx(mean)
    assert 'domains' not in found['eval']
    last = read_metrics(finished.workdir)[-1]
    for name, values in domains.items():
        assert last[f'eval/domains/{name}/loss'] == values['loss']


def test_it_goes_on_where_the_folders_lie_now(finished, hparams, folder, tmp_path, signals):
    """Stopped, its folders moved and its shares written otherwise, it ends in the same bits; other
    members and shares are refused by name, and nothing is written.
    """
    signals[3] = 'SIGTERM'
    workdir = tmp_path / 'run'
    assert loop.train(hparams, workdir).signal == 'SIGTERM'
    shutil.copytree(folder / 'web', tmp_path / 'moved')
    before = (workdir / 'config.json').read_text()
    for mixture, word in (
        (f'{folder}/web:3,{folder}/new:1', 'member_2 was'),
        (f'{folder}/web:4,{folder}/code:1', "share_1 was '3/4' and is '4/5'"),
    ):
        with pytest.raises(ValueError, match=word):
            loop.train(elsewhere(hparams, mixture), workdir)
    with pytest.raises(ValueError, match='data.sequence_length is 32'):
        data = dataclasses.replace(hparams.data, sequence_length=16)
        loop.train(dataclasses.replace(hparams, data=data), workdir)
    assert (workdir / 'config.json').read_text() == before
    mixture = f'{tmp_path}/moved:0.75,{folder}/code:0.25'
    resumed = loop.train(elsewhere(hparams, mixture), workdir)
    assert resumed.summary['state_sha256'] == finished.summary['state_sha256']
    assert resumed.summary['domains']['moved'] == finished.summary['domains']['web']
    assert json.loads((workdir / 'config.json').read_text())['config']['data']['mixture'] == mixture


def test_the_start_tells_the_share_and_the_epochs_of_each_member(hparams):
    """One line a member, after the corpus."""
    dataset = make_dataset(hparams.data, hparams.seed)
    lines = describe(hparams, 100, {}, dataset)
    (at,) = (
        i for i, line in enumerate(lines) if line.startswith('corpus    mixture of web, code: ')
    )
    epochs = dataset.domain_epochs(100)
    assert lines[at + 1] == f'mixture   web: 75.0% of the rows, {epochs["web"]:.2f} epochs'
    assert lines[at + 2] == f'mixture   code: 25.0% of the rows, {epochs["code"]:.2f} epochs'
    assert epochs['web'] > 3 and lines[at + 3].startswith('plan ')
