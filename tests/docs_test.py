"""The documentation is true: every command parses and runs, every link has a target."""

import ast
import dataclasses
import importlib
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from jax.sharding import AbstractMesh

from configs import tiny
from moddepth_jax.hparams import flag_values, from_config
from moddepth_jax.hparams.flag_values import AXES
from moddepth_jax.training import run_dir
from moddepth_jax.training.mesh import check_batch
from tests import documented
from tests.documented import PAGES, ROOT, SCRIPTS
from tests.forked_commands import run_commands

TEXTS = {source: documented.read(source) for source in (*PAGES, *SCRIPTS)}
COMMANDS = [
    command for source, text in TEXTS.items() for command in documented.commands(source, text)
]
# First words of commands that no test runs, and why.
NOT_HERE = {
    'pip': 'installs packages, which the tests have from the same setup.py; see wheel_test.py',
    'make': 'creates an environment; its targets are looked up, their commands are tested',
    'jupyter': 'opens a browser',
    'jupytext': 'notebooks_test.py executes the notebooks',
    'tensorboard': 'a server of another project',
    'xprof': 'a server of another project',
    'wandb': 'needs an account',
    'sbatch': 'needs a cluster',
    'kubectl': 'needs a cluster',
}


def _parsed(lists, folder):
    """Return what is wrong with each list of words [NAME, ARGUMENT, ...], or ''."""
    config = dataclasses.asdict(from_config(tiny.get_config()))
    for name in {word.removeprefix('--config=') for words in lists for word in words}:
        if name.endswith('/config.json'):
            run_dir.open_workdir((folder / name).parent, config)
    found = run_commands(lists, folder, parse_only=True)
    # Text that a reader is assumed to have made is not there.
    absent = re.compile(r"error: data\.source='\S+': matches no file")
    return [
        done.status and not absent.match(done.stderr) and (done.stderr or f'status {done.status}')
        for done in found
    ]


@pytest.fixture
def folder(tmp_path):
    """The folder in which commands run, with the files that the pages show and no repository."""
    for source in PAGES:
        _write(tmp_path, documented.files(TEXTS[source]))
    return tmp_path


def _write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding='utf-8')


def _parts(command):
    """Split a command of ours into lists of words: launch.local contains another command."""
    words = [command.launched, *command.words[3:]]
    if words[0] != 'local' or '--' not in words:
        return [words]
    place = words.index('--')
    carried = words[place + 1 :]
    own = carried[0].startswith('launch.')
    name = carried[0].removeprefix('launch.') if own else 'train'
    return [words[:place], [name, *carried[own:]]]


def test_every_command_is_of_a_known_kind():
    known = {'python', 'python3', *NOT_HERE}
    strange = [c for c in COMMANDS if c.words[0] not in known]
    strange += [c for c in COMMANDS if c.words[0].startswith('python') and not c.launched]
    assert not strange
    assert len(COMMANDS) > 120 and {c.source for c in COMMANDS} > {'README.md', 'docs/start.md'}


PLANTED = {
    'python -m launch.train --config=configs/tiny.py --stepz=3': 'no such flag',
    'python -m launch.train --config=configs/tiny.py --config.model.layers=3': 'no such knob',
    'python -m launch.local --processes=2 -- --config=configs/tiny.py --x': 'no such flag',
    'python -m launch.traim --config=configs/tiny.py': 'launch.traim',
}


def test_commands_parse(folder):
    """All of them, and the mistakes in PLANTED are found."""
    commands = [*COMMANDS, *(documented.Command('planted', text) for text in PLANTED)]
    parts = [(c, tuple(w)) for c in commands if c.launched for w in _parts(c) if '...' not in w]
    distinct = list(dict.fromkeys(words for _, words in parts))
    faults = dict(zip(distinct, _parsed(distinct, folder), strict=True))
    wrong = {f'{c.source}: {c.text}': faults[words] for c, words in parts if faults[words]}
    for text, fault in PLANTED.items():
        assert fault in wrong.pop(f'planted: {text}', ''), text
    assert not wrong


def test_make_targets_exist():
    """`make TARGET`, with the variables shown, has a recipe."""
    lines = {' '.join(c.words) for c in COMMANDS if c.words[0] == 'make'} | {'make nothing'}
    quiet = {'cwd': ROOT, 'capture_output': True}
    missing = [line for line in lines if subprocess.run([*line.split(), '-n'], **quiet).returncode]
    assert {'make train', 'make test'} < lines and missing == ['make nothing']


def test_python_and_yaml_blocks_are_valid():
    """Blocks of Python compile (a table entry as an expression), blocks of YAML load."""
    found = [block for source in PAGES for block in documented.blocks(TEXTS[source])]
    assert sum(language == 'python' for language, _ in found) >= 6
    for language, content in found:
        assert language in ('', 'python', 'yaml', 'json'), content
        if language == 'python':
            entry = re.match(r"'\w+': ", content)
            ast.parse(f'{{{content}}}' if entry else content)
        elif language == 'yaml':
            assert isinstance(yaml.safe_load(content), dict)


def test_links_have_targets():
    broken = []
    for source in PAGES:
        for target in documented.links(TEXTS[source]):
            name, _, anchor = target.partition('#')
            path = (ROOT / source).parent / name if name else ROOT / source
            known = path.suffix != '.md' or not anchor
            if not path.exists() or not (known or anchor in documented.anchors(path.read_text())):
                broken.append(f'{source}: {target}')
    assert not broken
    assert 'two-words' in documented.anchors('## Two [words](x)\n')


def test_paths_in_templates_exist():
    """Regression: launch/slurm.sh named a test that had moved."""
    path = re.compile(r'(?<![\w./])(?:configs|docs|launch|moddepth_jax|tests)/[\w/-]+\.[a-z]+')
    templates = [file for end in ('sh', 'yaml') for file in (ROOT / 'launch').rglob(f'*.{end}')]
    found = {name for file in templates for name in path.findall(file.read_text(encoding='utf-8'))}
    assert {'launch/slurm.sh', 'configs/moda_700m.py'} <= found
    assert not [name for name in found if not (ROOT / name).exists()]


def test_meshes_divide_the_batches_of_their_configs():
    """Regression: four shipped commands for several devices were refused as they stood."""
    texts = [command.text for command in COMMANDS if command.launched]
    texts += [(ROOT / 'launch' / name).read_text() for name in ('slurm.sh', 'jobset.yaml')]
    num_checked = 0
    for text in texts:
        named = re.search(r'(?:CONFIG|--config)=configs/(\w+)\.py(?::(\S+))?', text)
        sizes = re.search(r'(?:MESH|--mesh)=(\w[\w=,]+)', text)
        if not named or not sizes:
            continue
        module = importlib.import_module(f'configs.{named[1]}')
        config = module.get_config(named[2]) if named[2] else module.get_config()
        for name, value in re.findall(r'--config\.([\w.]+\.(?:batch_size|\w+_steps))=(\d+)', text):
            config.update_from_flattened_dict({name: int(value)})
        sizes = flag_values.mesh_sizes(sizes[1])
        mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)
        check_batch(mesh, config.data.batch_size, config.training.accumulate_steps)
        num_checked += 1
    assert num_checked >= 10


def test_every_command_and_page_is_documented():
    """Each command of launch/ is on some page; each page is in the index, or linked from there."""
    texts = {pathlib.Path(name).stem: (ROOT / name).read_text() for name in SCRIPTS}
    programs = {name for name, text in texts.items() if 'cli.run(' in text}
    shown = {c.launched for c in COMMANDS if c.source in PAGES}
    assert 'train' in programs and not programs - shown
    index = {
        target.partition('#')[0]
        for page in ('docs/README.md', 'docs/depth_streams.md')
        for target in documented.links(TEXTS[page])
    }
    pages = {page.removeprefix('docs/') for page in PAGES if page.startswith('docs/')}
    assert pages <= {*index, 'README.md'}


# Appended to a command when it is run; of two equal flags the later one wins.
TRAINED = (
    '--config.flop_budget=0 --config.training.num_steps=4 --config.training.log_every=1 '
    '--config.data.sequence_length=64 --config.data.batch_size=8 --config.report.sample_tokens=4 '
    '--config.report.heatmap_tokens=16 --config.evaluation.num_batches=2 '
    '--config.evaluation.final_batches=2 --config.training.accumulate_steps=1 '
    '--config.model.num_layers=2'
)
SHORT = f'{TRAINED} --config.data.source=synthetic'
LOOPED = f'{SHORT} --config.model.num_layers=3'
BENCHES = {
    'step --variants': '--size=2x64 --lengths=32 --tokens=64 --repeats=1 --dtype=float32',
    'step': '--size=2x64 --lengths=32 --tokens=64 --repeats=1',
    'runs': '--repeats=1',
    'decode': '--size=2x64 --context=64 --prompt=8 --batches=1,2 --kv_heads=1 --repeats=2',
    'prompts': '--size=2x64 --length=96 --chunk=16 --repeats=1',
    'depth': '--size=2x64 --depths=2,3 --length=32 --ratio_length=64 --rows=1 --repeats=1',
    'loops': '--size=1x64 --counts=2,3 --length=32 --rows=1 --repeats=1 --variants=looped',
    'experts': '--shapes=64x32x16x4x2 --repeats=1',
    'scoring': '--size=2x64 --repeats=1',
    'attention': '--implementations=xla --lengths=16 --widths=8 --slots=2 --seconds=1',
}
RULES = (
    # (what the command contains, appended, reason); the first that fits.
    ('launch.convert runs/dropped', '--config.training.num_steps=4', 'few steps'),
    ('launch.convert runs/routers_only', '--config.training.num_steps=4', 'few steps'),
    ('launch.convert runs/routed_at_once', '--config.training.num_steps=4', 'few steps'),
    ('--config=runs/', '', 'its run was made by a command above, and is as small'),
    ('launch.train runs/pretrained', f'{SHORT} --config.model.num_layers=6', 'few steps'),
    ('launch.train --dry_run', '--config.model.num_layers=2 --mesh=fsdp=2', 'compiles'),
    ('--profile=20:25', f'{TRAINED} --profile=2:3', 'few steps'),
    ('--config=configs/recall.py', '', 'its rows have a length of their own'),
    ('launch.train --config.data.source', TRAINED, 'few steps of few tokens'),
    ('launch.train --config=configs/looped.py', LOOPED, 'as others; a loop is between two blocks'),
    ('launch.train', SHORT, 'few steps of few tokens, and no corpus to read'),
    ('launch.local --config', SHORT, 'as launch.train'),
    ('launch.convert --from_hf', TRAINED, 'the run that is trained from it is small'),
    ('launch.convert', '', 'small, since its checkpoint is'),
    ('launch.evaluate', '--num_batches=1', 'few batches'),
    ('launch.generate', '--max_tokens=4', 'few tokens'),
    ('launch.inspect --importance', '--num_batches=1', 'one batch'),
    ('launch.inspect', '--max_tokens=64', 'few tokens'),
    ('launch.lm_eval', '', 'few questions'),
    ('launch.prepare', '', 'few texts'),
    ('launch.claims', '', 'reads what is committed'),
    ('launch.compare', '', 'reads two small runs'),
    ('launch.backends', '', 'traces only'),
    ('launch.bench paper', '', 'runs nothing'),
    ('launch.dry_run table', '', 'reads what is committed'),
    ('launch.isoflop --config=configs/study.py --budgets=6e11', '--dry_run', 'plans only'),
    ('launch.isoflop', '--dry_run', 'plans only; tests/launch/isoflop_test.py runs it'),
    *((f'launch.bench {name}', flags, 'toy shapes') for name, flags in BENCHES.items()),
)
# Commands of ours that are parsed and not run, and why.
PARSED_ONLY = (
    ('SmolLM2', 'its checkpoint is downloaded; docs/convert.md imports a small one'),
    ('OLMo-2', 'its checkpoint is downloaded; docs/convert.md imports a small one'),
    ('runs/smol', 'its checkpoint is downloaded; docs/convert.md imports a small one'),
    ('FOLDER', 'stands for a folder of the reader; docs/convert.md has one'),
    ('llama/tokenizer.json', 'a file of the reader; tests/data has all kinds'),
    ('web/*.jsonl.zst', 'files of the reader; tests/data has all kinds'),
    ('launch.gpu', 'needs a GPU; tests/benchmarks/runner_test.py carries out --toy'),
    ('launch.bench authors', 'needs a GPU; tests/benchmarks/authors_test.py'),
    ('launch.bench pytorch', 'needs PyTorch; tests/benchmarks/pytorch_test.py'),
    ('--tasks=moda', 'downloads its tasks'),
    ('--tasks=arc_easy', 'downloads its tasks'),
    ('--wandb', 'needs an account; tests/training/wandb_run_test.py has a double'),
    ('launch.dry_run again', 'half an hour; tests/launch/dry_run_test.py does one file'),
    ('runs/mod-seed*', "a reader's runs; tests/studies/compare_test.py has some"),
    ('launch.claims --workdir=runs/mine', "a reader's study; claims_test.py has some"),
    ('--page=docs/backends.md', 'needs JAX 0.11.2; tests/launch/backends_test.py'),
    ('my_tasks', 'a folder of the reader; docs/evaluation.md has one'),
    ('...', 'stands for flags of the reader'),
    ('/anywhere/', 'a machine without the repository; tests/wheel_test.py copies a run'),
    ('/shared/', 'needs several hosts; tests/launch/isoflop_test.py shares runs'),
    ('moda_700m.py --mesh=data=8', 'needs GPUs for weeks; tests/configs_test.py traces its step'),
    ('moda_1b5.py --mesh=data=8', 'needs GPUs for weeks; tests/configs_test.py traces its step'),
    ('moda_1b5.py --mesh=data=4,fsdp=8', 'minutes; docs/scale.md has a smaller batch'),
    ('mod_isoflop_paper.py --budgets=', 'needs a pod: even its plan times a step of 24x1536'),
)


def _rule(command):
    """Return (appended, reason) of a command; None if it is only parsed; raises without a rule."""
    text = ' '.join(command.words)
    if any(all(part in text for part in what.split(' ')) for what, _ in PARSED_ONLY):
        return None
    for what, appended, reason in RULES:
        if all(part in text for part in what.split(' ')):
            return appended, reason
    raise AssertionError(f'{command.source}: {command.text}: in no table of docs_test.py')


def test_every_command_has_a_rule():
    """A rule runs each command of ours, or PARSED_ONLY says why it is not run."""
    ours = [command for command in COMMANDS if command.launched]
    assert sum(_rule(command) is not None for command in ours) > 0.75 * len(ours)
    for what, *_ in (*RULES, *PARSED_ONLY):
        assert any(all(part in c.text for part in what.split(' ')) for c in ours), what


# Files that a reader is assumed to have.
READERS = {
    **{f'notes/{name}.txt': f'The {name} note. ' * 200 for name in ('first', 'second', 'third')},
    **{f'code/{name}.txt': f'def {name}(x):\n    return x\n' * 200 for name in 'abcdef'},
    'rows/a.jsonl': ''.join(
        json.dumps({'body': f'row {n} of a corpus, {n * n}'}) + '\n' for n in range(900)
    ),
    'corpora/letters.txt': 'Dear reader, ' * 200,
    'corpora/code/a.txt': 'print(1)\n' * 200,
    'books/old/one.txt': 'It was a dark night. ' * 400,
    'books/two.txt': 'Call me. ' * 400,
}


class Reader:
    """Runs the commands of a page, one after the other, in a folder with a reader's files."""

    def __init__(self, folder, cache):
        self.folder, self.cache = folder, cache
        _write(folder, READERS)
        for name in ('setup.py', 'docs', 'results'):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        shutil.copytree(ROOT / 'results/cpu/study', folder / 'runs/study')
        python = folder / 'bin/python'
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        self.environment = os.environ | {
            'PATH': f'{python.parent}:{os.environ["PATH"]}',
            'PYTHONPATH': str(ROOT),
            'GIT_DIR': str(ROOT / '.git'),
            'XDG_CACHE_HOME': str(cache),
            'JAX_ENABLE_COMPILATION_CACHE': 'true',
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
            'HF_HUB_OFFLINE': '1',
        }

    def do(self, command):
        self._train_for(command)
        return self._shell(f'{command.text} {_rule(command)[0]}')

    def _train_for(self, command):
        """Train runs/NAME by configs/NAME.py if the command reads it and none has made it."""
        reads = r'(?:--(?:from_workdir|workdir|branch|config)=|compare )(runs/(\w+))'
        named = re.search(reads, command.text)
        makes = command.launched == 'isoflop' or '--from_hf' in command.text
        makes = makes or command.launched == 'train' and '--config=runs/' not in command.text
        if named and not makes:
            self.train(named[2])

    def train(self, name):
        """Train runs/NAME by configs/NAME.py if nothing has made it."""
        run, kept = self.folder / 'runs' / name, self.cache / name
        if run.exists():
            return
        if not kept.exists():  # once for all pages
            short = LOOPED if name == 'looped' else SHORT
            fault = self._shell(
                f'python -m launch.train --config=configs/{name}.py {short} --workdir={kept}'
            )
            assert not fault, fault
        shutil.copytree(kept, run)

    def _shell(self, text):
        environment = dict(self.environment)
        sizes = re.search(r'--mesh=(\S+)', text)
        if sizes and '--dry_run' not in text:
            count = math.prod(int(axis.split('=')[1]) for axis in sizes[1].split(','))
            environment['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={count}'
        return self.run(['bash', '-o', 'pipefail', '-c', text], environment)

    def run(self, words, environment=None):
        """Run a command; returns what was wrong, or ''."""
        pipes = {'capture_output': True, 'text': True}
        env = environment or self.environment
        done = subprocess.run(words, cwd=self.folder, env=env, **pipes)
        if done.returncode:
            return f'{words[-1]}: exit status {done.returncode}: {done.stderr[-1000:]}'
        said = [line for line in done.stderr.splitlines() if re.search('(?i)warn|deprec', line)]
        return f'{words[-1]}: {said[:3]}' if said else ''


RUN_SOURCES = [source for source in TEXTS if not source.startswith('configs/')]


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp('cache')


@pytest.mark.slow
@pytest.mark.parametrize('source', RUN_SOURCES)
def test_commands_do_their_work(source, folder, cache):
    """Each ends with exit status 0 and without a warning, in the order of its page.

    Commands of config docstrings are only parsed: configs_test.py traces the step of every config.
    A command that a page shows is not run again for a docstring.
    """
    shown = {c.text for c in COMMANDS if c.source in PAGES}
    reader = Reader(folder, cache)
    faults = []
    for command in COMMANDS:
        again = command.source not in PAGES and command.text in shown
        if command.source != source or not command.launched or again or _rule(command) is None:
            continue
        faults.append(reader.do(command))
    assert not [fault for fault in faults if fault]
    for language, content in documented.blocks(TEXTS[source]) if source in PAGES else ():
        # Programs, and not files or entries of a table.
        if language == 'python' and 'import' in content and not content.startswith('# '):
            for name in re.findall(r"load_run\('runs/(\w+)'\)", content):
                reader.train(name)
            assert not reader.run([sys.executable, '-c', content])
