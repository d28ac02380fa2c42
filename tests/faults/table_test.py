"""Each attack of tests/faults/table.py is refused in one line or survived bit-equal."""

import collections
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

ENVIRONMENT = {
    'XLA_FLAGS': '',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    'JAX_ENABLE_COMPILATION_CACHE': 'true',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
}
CHANGES = """config.data.{}
    training.num_steps, training.checkpoint_every, config.evaluation.every = 8, 2, 4"""


class Row(NamedTuple):
    """A row of the table; without an attack, it is the reference for rows with its command."""

    command: str
    path: str | None = None
    attack: str = ''
    expected: str = 'bit-equal'

    @property
    def moment(self):
        return ': ' in self.attack and self.attack.split(': ')[0]


class World:
    """A folder with all inputs of the commands; each row of the table attacks a copy."""

    def __init__(self, folder):
        self.original, self.folder = folder / 'world', folder
        self.results = {}  # by command, without an attack

    def make(self):
        here = self.original
        texts = write_words(here / 'text', length=1000)
        rows = [json.dumps({'text': text.decode()}) + '\n' for text in texts]
        (here / 'rows.jsonl').write_text(''.join(rows))
        for name, source, more in (
            ('config', 'text/*.txt', 'held_out_fraction = 0.2'),
            ('stored', 'store', "tokenizer = 'prepared'; model.vocab_size = 262"),
        ):
            text = CONFIG.format(source=source, changes=CHANGES.format(more))
            (here / f'{name}.py').write_text(text)
        shutil.copytree(ROOT / 'tests/conversion/golden/olmo2', here / 'hf')
        train_bpe(iter(texts), 262).save(here / 'tokenizer')
        shutil.copy(here / 'tokenizer' / 'tokenizer.json', here / 'hf')
        shutil.copytree(here / 'hf', here / 'sharded')
        (here / 'sharded' / 'model.safetensors').rename(here / 'sharded' / 'one.safetensors')
        names = dict.fromkeys(load_file(here / 'hf' / 'model.safetensors'), 'one.safetensors')
        index = json.dumps({'metadata': {}, 'weight_map': names})
        (here / 'sharded' / 'model.safetensors.index.json').write_text(index)
        prepare = 'prepare --input=text/*.txt --output=store --processes=1 --tokenizer=bpe:262'
        self._run({here: Row(prepare)}, 0)
        self._run({here: Row(table.STUDY)}, 0)
        self._run({here: Row(table.BEGUN, None, 'step 5 of a new run: SIGTERM')}, 143)
        shutil.copytree(here / 'begun', here / 'run')
        self._run({here: Row(table.DONE)}, 0)

    def _run(self, rows, status=None):
        """{folder: Finished} of {folder: Row}; each should end with `status`, if that is given."""
        lines = []
        for folder, row in rows.items():
            cache = folder if row.path == 'cache' else self.folder
            asked = {'folder': str(folder), 'cache': str(cache / 'cache'), 'path': row.path}
            asked |= {'moment': row.moment, 'attack': row.attack.split(': ')[-1]}
            lines.append([attacks.__file__, json.dumps(asked), *shlex.split(row.command)])
        found = run_commands(lines, self.original, LIBRARY, **ENVIRONMENT)
        assert status is None or {done.status for done in found} == {status}, found
        return dict(zip(rows, found, strict=True))

    def _prepare(self, folder, row):
        """Copy the folder, attack a path unless there is a moment, and return the command."""
        shutil.copytree(self.original, folder, symlinks=True)
        path = row.path and folder / row.path
        if row.path == 'cache':
            shutil.copytree(self.folder / 'cache', path)
        if row.attack.startswith('named '):
            name = row.attack.removeprefix('named ')
            path.rename(folder / name)
            words = [
                re.sub(f'={row.path}$', lambda _: f'={name}', word)
                for word in shlex.split(row.command)
            ]
            if row.path in ('text', 'store'):
                words.append(f'--config.data.source={name}' + '/*.txt' * (row.path == 'text'))
            return Row(shlex.join(words))
        if row.attack and path and not row.moment:
            attacks.attack_of(row.attack, path)()
            return row._replace(attack='')
        return row

    def check(self, rows):
        """Return a line for each row that did not end as expected."""
        commands = dict.fromkeys(row.command for row in rows if row.command not in self.results)
        rows = [*map(Row, commands), *rows]
        folders = {self.folder / f'row_{number}': row for number, row in enumerate(rows)}
        to_run = {folder: self._prepare(folder, row) for folder, row in folders.items()}
        before = {folder: snapshot(folder) for folder in folders}
        found, wrong = self._run(to_run), []
        ended = [folder for folder, row in folders.items() if row.expected.startswith('ends')]
        last = found | self._run({folder: Row(to_run[folder].command) for folder in ended})
        for folder, row in folders.items():
            try:
                check_end(row, found[folder])
                if not row.expected.startswith('refused'):
                    made = result(folder, to_run[folder].command, last[folder])
                    right = self.results.setdefault(row.command, made)
                    same = 4 if row.expected == 'bit-equal' else 3
                    same = 2 if row.path and 'metrics' in row.path else same
                    assert made[:same] == right[:same], (made, right)
                elif not row.moment:
                    changed = before[folder].items() ^ snapshot(folder).items()
                    assert not changed, {str(path) for path, _ in changed}
            except (AssertionError, OSError, ValueError) as error:
                wrong.append(f'{row}: {str(error)[:500]}\n{str(found[folder])[:1000]}')
            shutil.rmtree(folder)
        return wrong


def check_end(row, done):
    """Check the status and the words of the output against the row."""
    how, _, words = row.expected.partition(': ')
    if how == 'refused':
        words = words or re.escape(row.path.rpartition('/')[2])
        assert re.match(f'error: [^\n]*({words})[^\n]*\n$', done.stderr), 'not one line'
        assert row.moment or not done.stdout, 'printed'
    status = (
        {'refused': 2, 'bit-equal': 0, 'noted': 0}.get(how) if ' ' not in how else how.split()[1]
    )
    assert done.status == int(status), 'the status'
    output = done.stdout + done.stderr
    assert 'Traceback' not in output and re.search(words, output), 'the words'


def result(folder, command, done):
    """Return the result of a command: state, losses and rows of training, or the output."""
    if command.startswith('prepare'):
        prepared = json.loads((folder / 'prepared/prepared.json').read_text())
        return (), (), (), prepared['fingerprint']
    if not command.startswith('train'):
        return (), (), (), re.sub(r'[0-9.]+ (s|tokens/s|MB/s)\b', '', done.stdout + done.stderr)
    workdir = folder / re.search('--workdir=(.*)', shlex.split(command)[2])[1]
    summary = json.loads((workdir / 'summary.json').read_text())
    return summary['state_sha256'], summary['eval'], rows_of(workdir), done.stderr


def snapshot(folder):
    """Return kind, size and mtime of every path except locks, caches and finished parts."""
    stats = {path: path.lstat() for path in folder.rglob('*')}
    return {
        path: (stat.st_mode, not path.is_dir() and (stat.st_size, stat.st_mtime_ns))
        for path, stat in stats.items()
        if not {'lock', '__pycache__', 'cache', 'prepared'} & set(path.parts)
    }


def rows_of_kind(kind):
    """The rows of one kind of the table."""
    named = 'named ' * (kind == 'names of directories')
    return [
        Row(command, path, named + attack, expected)
        for (command, path), expectations in table.TABLE[kind].items()
        for expected, attacks_ in expectations.items()
        for attack in attacks_.split('; ')
    ]


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp('attacked'))
    world.make()
    return world


@pytest.mark.faults
@pytest.mark.parametrize('kind', table.TABLE)
def test_each_attack_is_refused_in_one_line_or_survived(world, kind):
    """Within attacks.SECONDS and attacks.MEMORY; no other result goes without a line."""
    wrong = world.check(rows_of_kind(kind))
    assert not wrong, '\n'.join(wrong)


def test_the_page_counts_the_rows():
    """docs/scale.md has a line for each kind, with the numbers of rows by what is expected."""
    page = (ROOT / 'docs' / 'scale.md').read_text()
    lines, totals = [], collections.Counter()
    for kind in table.TABLE:
        number = collections.Counter(
            row.expected.split(':')[0].split()[0] for row in rows_of_kind(kind)
        )
        totals += number
        lines.append(count_line(kind, number))
    assert not [line for line in [*lines, count_line('together', totals)] if line not in page]


def count_line(kind, number):
    cells = [kind, *(str(number[how]) for how in ('refused', 'noted', 'bit-equal', 'ends'))]
    return f'| {" | ".join(cells)} |\n'
