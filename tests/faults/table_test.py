"""Every row of tests/faults/table.py: refused in one line or survived bit-equal, nothing silent."""

import json
import re
import shlex
import shutil
from typing import NamedTuple

import pytest
from safetensors.numpy import load_file

from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe
from tests.faults import attacks, table
from tests.faults.runs import CONFIG, rows_of
from tests.forked_commands import LIBRARY, ROOT, run_commands
from tests.launch.commands import write_words

SCRIPT = str(ROOT / 'tests' / 'faults' / 'attacks.py')
ENVIRONMENT = {
    'XLA_FLAGS': '',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    'JAX_ENABLE_COMPILATION_CACHE': 'true',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
}
CHANGES = """config.data.{}
    training.num_steps, training.checkpoint_every, config.evaluation.every = 8, 2, 4"""


class Row(NamedTuple):
    """A line of the table; without an attack it is what others are compared with."""

    command: str
    path: str | None = None
    attack: str = ''
    expected: str = 'bit-equal'

    def __str__(self):
        return f'{self.command} [{self.path}: {self.attack}]'


class World:
    """The folder that is attacked, in a copy for each row."""

    def __init__(self, folder):
        self.original, self.folder = folder / 'world', folder
        self.results = {}  # of commands that are not attacked

    def make(self):
        """Text and prepared text, a run stopped after step 5 and at its end, a study, a model."""
        here = self.original
        texts = write_words(here / 'text', length=1000)
        rows = [json.dumps({'text': text.decode()}) + '\n' for text in texts]
        (here / 'rows.jsonl').write_text(''.join(rows))
        shutil.copytree(ROOT / 'tests/conversion/golden/olmo2', here / 'hf')
        train_bpe(iter(texts), 262).save(here / 'tokenizer')
        shutil.copy(here / 'tokenizer' / 'tokenizer.json', here / 'hf')
        files = {
            'config': CONFIG.format(
                source='text/*.txt', changes=CHANGES.format('held_out_fraction = 0.2')
            ),
            'stored': CONFIG.format(source='store', changes=CHANGES.format("tokenizer = 'prepared'")),
        }
        for name, text in files.items():
            (here / f'{name}.py').write_text(text)
        shutil.copytree(here / 'hf', here / 'sharded')
        names = load_file(here / 'hf' / 'model.safetensors')
        (here / 'sharded' / 'model.safetensors').rename(here / 'sharded' / 'one.safetensors')
        index = {'metadata': {}, 'weight_map': dict.fromkeys(names, 'one.safetensors')}
        (here / 'sharded' / 'model.safetensors.index.json').write_text(json.dumps(index))
        for status, row in (
            (0, Row('prepare --input=text/*.txt --output=store --processes=1 --tokenizer=bpe:262')),
            (143, Row('train --config=config.py --workdir=begun', None, 'step 5: SIGTERM')),
            (0, Row(table.STUDY)),
        ):
            (done,) = self._run({here: row})
            assert done.status == status, done
        shutil.copytree(here / 'begun', here / 'run')
        (done,) = self._run({here: Row('train --config=config.py --workdir=run')})
        assert done.status == 0, done

    def _run(self, rows):
        """Finished for each row of {its folder: Row}."""
        lines = []
        for folder, row in rows.items():
            words = shlex.split(row.command)
            *moment, attack = row.attack.split(': ', 1)
            asked = {'attack': attack, 'moment': (moment or [None])[0], 'path': row.path}
            cache = folder if row.path == 'cache' else self.folder
            asked |= {'folder': str(folder), 'cache': str(cache / 'cache')}
            lines.append([SCRIPT, json.dumps(asked), *words])
        return run_commands(lines, self.original, LIBRARY, **ENVIRONMENT)

    def _prepare(self, folder, row):
        """Copies the original, and does what has no moment; returns the row to run."""
        shutil.copytree(self.original, folder, symlinks=True)
        if row.path == 'cache':
            shutil.copytree(self.folder / 'cache', folder / 'cache')
        if row.attack.startswith('named '):
            new = row.attack.removeprefix('named ')
            (folder / row.path).rename(folder / new)
            command = shlex.join(w.replace(row.path, new) for w in shlex.split(row.command))
            if row.path in ('text', 'store'):
                source = f'--config.data.source={new}' + '/*.txt' * (row.path == 'text')
                command += ' ' + shlex.quote(source)
            return row._replace(command=command, path=None, attack='')
        if row.attack and row.path and ': ' not in row.attack:
            attacks.attack_of(row.attack, folder / row.path)()
            return row._replace(path=row.path if row.path == 'cache' else None, attack='')
        return row

    def check(self, rows):
        """The faults, one line each, of how the commands of these rows ended."""
        commands = dict.fromkeys(row.command for row in rows if row.command not in self.results)
        rows = [*map(Row, commands), *rows]
        ready = {}
        for number, row in enumerate(rows):
            folder = self.folder / f'row_{number}'
            ready[folder] = self._prepare(folder, row)
        before = {folder: snapshot(folder) for folder in ready}
        found = dict(zip(ready, self._run(ready), strict=True))
        again = {
            folder: Row(ready[folder].command)
            for folder, row in zip(ready, rows, strict=True)
            if row.expected.startswith('ends ')
        }
        finished = dict(zip(again, self._run(again), strict=True))
        faults = []
        for (folder, runs), row in zip(ready.items(), rows, strict=True):
            try:
                if not row.attack:
                    assert found[folder].status == 0, found[folder]
                    self.results[row.command] = result(folder, runs, found[folder])
                self._judge(row, runs, folder, before[folder], found[folder], finished.get(folder))
            except Exception as error:
                faults.append(f'{row}: {row.expected}: {type(error).__name__} {str(error)[:1500]}')
            shutil.rmtree(folder)
        return faults

    def _judge(self, row, runs, folder, before, done, finished):
        how, _, words = row.expected.partition(': ')
        if how == 'refused' and not words:
            words = re.escape(row.path.rpartition('/')[2])
        output = done.stdout + done.stderr
        assert 'Traceback' not in output and re.search(words, output), done
        if how == 'refused':
            right = done.status == 2 and done.stderr.startswith('error: ')
            assert right and done.stderr.count('\n') == 1 and not done.stdout * (': ' not in row.attack), done
            changed = before.items() ^ snapshot(folder).items() if ': ' not in row.attack else ()
            assert not changed, (sorted({str(path) for path, _ in changed}), done)
            return
        if how.startswith('ends '):
            assert done.status == int(how[5:]), done
            done = finished
        assert done.status == 0, done
        ours, right = result(folder, runs, done), self.results[row.command]
        if how == 'noted':  # what training measured may be gone, what another command read, too
            ours, right = (x[:2] if runs.command.startswith('train') else None for x in (ours, right))
        assert ours == right, (done, ours, right)


def rows_of_kind(kind):
    """The rows of one kind of the table."""
    named = 'named ' * (kind == 'names of directories')
    return [
        Row(command, path, named + attack, expected)
        for (command, path), expectations in table.TABLE[kind].items()
        for expected, attacks_ in expectations.items()
        for attack in attacks_.split('; ')
    ]


def result(folder, row, done):
    """What the command made: of training its state and rows, of others their output and files."""
    if row.command.startswith('train'):
        workdir = folder / re.search('--workdir=(.*)', shlex.split(row.command)[2])[1]
        summary = json.loads((workdir / 'summary.json').read_text())
        return summary['state_sha256'], summary['eval'], rows_of(workdir), done.stderr
    return re.sub(r'[0-9.]+ (s|tokens/s|MB/s)\b', '', done.stdout + done.stderr)


def snapshot(folder):
    """Every path below but a lock, with its kind, size and the time of its last change."""
    found = {}
    for path in folder.rglob('*'):
        stat = path.lstat()
        if path.name != 'lock' and not {'__pycache__', 'cache'} & set(path.parts):
            found[path] = stat.st_mode, not path.is_dir() and (stat.st_size, stat.st_mtime_ns)
    return found


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp('attacked'))
    world.make()
    return world


@pytest.mark.faults
@pytest.mark.parametrize('kind', table.TABLE)
def test_each_attack_is_refused_in_one_line_or_survived(world, kind):
    """Within attacks.SECONDS and attacks.MEMORY; nothing goes another way without a line."""
    faults = world.check(rows_of_kind(kind))
    assert not faults, '\n'.join(faults)
