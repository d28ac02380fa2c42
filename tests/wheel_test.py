"""The distributions contain the four packages and nothing else, and work after installation."""

import email
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.launch.commands import write_words

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ('configs', 'kernels_pallas', 'launch', 'moddepth_jax')
BESIDE = (
    *('CHANGELOG.md', 'CITATION.cff', 'CONTRIBUTING.md', 'LICENSE', 'MANIFEST.in', 'README.md'),
    *('constraints.txt', 'constraints-next.txt', 'pyproject.toml', 'setup.py'),
)
INFO = 'moddepth_jax-0.1.0.dist-info/'


def _run(command, **options):
    """Run a command, which must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope='module')
def sources():
    """Relative paths of the packages' files that git tracks or would."""
    if not (ROOT / '.git').exists():
        pytest.skip('git knows which files belong to the packages: needs a clone, not a copy')
    listed = _run(
        ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', '--', *PACKAGES],
        cwd=ROOT,
    )
    return {name for name in listed.stdout.split('\0') if name and (ROOT / name).is_file()}


@pytest.fixture(scope='module')
def built(sources, tmp_path_factory):
    """(sdist, wheel, output) of `python -m build` in a copy of the tree, without network."""
    folder = tmp_path_factory.mktemp('build')
    for name in (*sources, *BESIDE):
        (folder / 'tree' / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / 'tree' / name)
    for planted in ('tests/planted_test.py', 'launch/__pycache__/planted.cpython-311.pyc'):
        (folder / 'tree' / planted).parent.mkdir(exist_ok=True)
        (folder / 'tree' / planted).write_text('')
    done = _run(
        [sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder, folder / 'tree'],
        cwd=folder,
    )
    (sdist,), (wheel,) = folder.glob('*.tar.gz'), folder.glob('*.whl')
    return sdist, wheel, done.stdout + done.stderr


def test_wheel_contains_the_packages(built, sources):
    """Every file of the packages, with its bytes, and otherwise only metadata."""
    _, wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(INFO)}
        assert names == sources
        assert all(archive.read(name) == (ROOT / name).read_bytes() for name in names)
    assert {'launch/slurm.sh', 'launch/jobset.yaml'} < names


def test_sdist_contains_the_packages_and_their_pages(built, sources):
    """A wheel can be built from it; it has licence, citation and history, and no tests."""
    sdist, _, said = built
    with tarfile.open(sdist) as archive:
        names = {m.name.partition('/')[2] for m in archive.getmembers() if m.isfile()}
    made = {name for name in names if '.egg-info/' in name} | {'PKG-INFO', 'setup.cfg'}
    assert names - made == sources | set(BESIDE)
    assert not [line for line in said.splitlines() if 'no files found matching' in line]


def test_metadata(built):
    """The licence, the README, the Python versions and the extras."""
    _, wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(INFO + 'METADATA').decode()
        assert archive.read(INFO + 'licenses/LICENSE') == (ROOT / 'LICENSE').read_bytes()
    metadata = email.message_from_string(text)
    assert metadata['Name'] == 'moddepth-jax' and metadata['License'] == 'Apache-2.0'
    assert metadata['Requires-Python'] == '>=3.11,<3.14'
    assert metadata.get_payload() == (ROOT / 'README.md').read_text(encoding='utf-8')
    extras = {'test', 'compile', 'docs', 'gpu', 'notebooks', 'sentencepiece', 'lm_eval', 'wandb'}
    assert set(metadata.get_all('Provides-Extra')) == {name.replace('_', '-') for name in extras}
    bounds = metadata.get_all('Requires-Dist')
    assert len(bounds) > 15 and all('<' in line and '>' in line for line in bounds)


@pytest.fixture
def installed(built, tmp_path):
    """run(*arguments) runs this Python in a folder where only the wheel is installed."""
    where = tmp_path / 'site'
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', 'install', '-q']
    _run([*pip, '--no-deps', '--no-index', '--target', where, built[1]])

    def run(*arguments, cwd=tmp_path):
        environment = os.environ | {'PYTHONPATH': str(where)}
        return _run([sys.executable, *arguments], cwd=cwd, env=environment)

    return run


OWN = """
from configs import tiny
from moddepth_jax.model.mod.routers import ROUTERS, LearnedRouter

@ROUTERS.register('own')
class OwnRouter(LearnedRouter):
    pass

def get_config():
    config = tiny.get_config()
    config.model.routing.router = 'own'
    return config
"""


@pytest.mark.slow
def test_the_run_of_an_installed_package_works_anywhere(installed, tmp_path):
    """It needs only the config, its file and a checkpoint; the training text may be gone.

    Without a repository a config of one's own trains into the current directory.
    """
    (tmp_path / 'own.py').write_text(OWN)
    write_words(tmp_path / 'text')
    few = ['--config.training.num_steps=4', '--config.evaluation.final_batches=1']
    few += ['--config.data.held_out_fraction=0.3', '--config.data.source=text/*.txt']
    done = installed('-m', 'launch.train', '--config=own.py', *few)
    assert not done.stderr
    assert json.loads((tmp_path / 'runs/own/summary.json').read_text())['final_step'] == 4
    copy = tmp_path / 'elsewhere' / 'model'
    shutil.copytree(tmp_path / 'runs/own/checkpoints/4', copy / 'checkpoints/4')
    for name in ('config.json', 'config.py'):
        shutil.copy(tmp_path / 'runs/own' / name, copy)
    (tmp_path / 'own.py').unlink()
    shutil.rmtree(tmp_path / 'runs')
    (tmp_path / 'text').rename(copy.parent / 'other')

    def there(name, *arguments):
        return installed('-m', f'launch.{name}', '--workdir=model', *arguments, cwd=copy.parent)

    assert there('generate', '--prompt=to be', '--max_tokens=3').stdout.startswith('to be')
    there('inspect', '--text=to be or not', '--out=page')
    assert (copy.parent / 'page/routing.html').exists()
    assert 'bits per byte' in there('evaluate', '--data=other/0.txt', '--num_batches=1').stdout
    with pytest.raises(AssertionError, match=r'matches no file; .* name a text: --data=TEXT\n'):
        there('evaluate')


def test_installed_commands_start(installed):
    assert str(ROOT) not in installed('-c', 'import launch; print(launch.__file__)').stdout
    text = installed('-m', 'launch.train', '--config=configs/moda.py:steps=7', '--print_config')
    assert json.loads(text.stdout)['training']['num_steps'] == 7
