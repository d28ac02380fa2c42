"""launch.prepare as a command: summary, kills, Ctrl-C, a full disk, two starts at once."""

import contextlib
import gzip
import json
import os
import pathlib
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

import pytest

from moddepth_jax.data.token_store import open_store
from tests.forked_commands import ROOT
from tests.launch.commands import is_running, wait_for


def _command(folder, output, *flags):
    given = [f'--input={folder}/*.jsonl', f'--output={output}', '--part_bytes=3000']
    return [sys.executable, '-m', 'launch.prepare', *given, *flags]


def _run(*args):
    return subprocess.run(_command(*args), cwd=ROOT, capture_output=True, text=True)


def _messages(stderr):
    """Its lines, without those of progress, which come where the machine is slow."""
    return [line for line in stderr.splitlines() if not line.endswith(' left')]


def _parts(output):
    return len(list(output.glob('parts/*.part')))


def _children(process):
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    return [int(word) for word in children.read_text().split()]


def _workers(process):
    """Those of its children that work, not the one that multiprocessing cleans up with."""
    found = []
    for pid in _children(process):
        with contextlib.suppress(OSError):
            if 'spawn_main' in pathlib.Path(f'/proc/{pid}/cmdline').read_text():
                found.append(pid)
    return found


@contextlib.contextmanager
def _started(folder, output, *flags, parts=5):
    """The process, once it has written some parts and long before it is done."""
    command = _command(folder, output, *flags)
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        try:
            wait_for(lambda: _parts(output) >= parts or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            process.kill()


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Two files of 0.7 MB, in some hundred parts."""
    draw = random.Random(0)
    folder = tmp_path_factory.mktemp('prepare')
    words = [draw.randbytes(4).hex() for _ in range(500)]
    for name in ('a', 'b'):
        texts = (' '.join(draw.choices(words, k=draw.randrange(400))) for _ in range(400))
        lines = ''.join(json.dumps({'n': 1, 'text': text}) + '\n' for text in texts)
        (folder / f'{name}.jsonl').write_text(lines)
    return folder


@pytest.fixture(scope='module')
def whole(folder, tmp_path_factory):
    """(output, what was printed) of an undisturbed start."""
    output = tmp_path_factory.mktemp('prepare') / 'whole'
    done = _run(folder, output, '--processes=1')
    assert done.returncode == 0 and not _messages(done.stderr), done.stderr
    return output, done.stdout


def _same(output, whole):
    files = ['train.bin', 'train.index', 'held_out.bin', 'held_out.index']
    assert open_store(output).fingerprint == open_store(whole[0]).fingerprint
    assert all((output / n).read_bytes() == (whole[0] / n).read_bytes() for n in files)
    assert not (output / 'parts').exists()


def test_the_summary_describes_the_data_and_the_training_command(whole, tmp_path):
    """Documents, tokens, what was left out; the command that it prints is one."""
    output, printed = whole
    store = open_store(output)
    assert f'{output}: 257 ids of bytes' in printed
    for counts in (store.train, store.held_out):
        assert f'{counts["documents"]:,}' in printed and f'{counts["tokens"]:,}' in printed
    empty = store.skipped['empty']
    assert f'left out, empty: {empty["count"]}, such as {empty["first"][0]}' in printed
    assert re.search(r'1\.\d+MB in .*: [\d.]+ MB/s', printed)
    (line,) = (line for line in printed.splitlines() if 'launch.train' in line)
    command = [sys.executable, *shlex.split(line)[1:], '--print_config']
    assert command[1:3] == ['-m', 'launch.train']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert config['data']['source'] == str(output) and config['data']['tokenizer'] == 'prepared'
    assert config['data']['held_out_fraction'] == store.held_out_fraction
    assert config['model']['vocab_size'] == store.tokenizer['vocab_size']


def test_a_killed_preparation_resumes_to_the_same_bytes(folder, whole, tmp_path):
    """SIGKILL of a worker is reported in one line; that of the first process ends the others."""
    with _started(folder, tmp_path / 'out', '--processes=2') as process:
        os.kill(_workers(process)[1], signal.SIGKILL)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    (line,) = _messages(error)
    assert line.startswith('error: a process of the preparation was killed by signal 9')
    assert 'the same command continues' in line
    before = _parts(tmp_path / 'out')
    with _started(folder, tmp_path / 'out', '--processes=2', parts=before + 5) as process:
        children = _children(process)
        assert len(_workers(process)) == 2
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_running, children)))
    assert before + 5 <= _parts(tmp_path / 'out') < 400
    done = _run(folder, tmp_path / 'out', '--processes=2')
    assert done.returncode == 0, done.stderr
    (line,) = _messages(done.stderr)
    assert re.fullmatch(r'tokens: [\d.]+[kM]B of 1\.\d+MB were done before', line)
    _same(tmp_path / 'out', whole)


def test_ctrl_c_ends_all_processes_in_one_line(folder, tmp_path):
    """SIGINT goes to the whole process group, as from a terminal."""
    # Started processes receive it also if these tests run in a shell's background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with _started(folder, tmp_path / 'out', '--processes=2') as process:
        signal.signal(signal.SIGINT, before)
        children = _children(process)
        os.killpg(process.pid, signal.SIGINT)
        output, error = process.communicate(timeout=10)  # alone a tenth of a second
        wait_for(lambda: not any(map(is_running, children)))
    assert process.returncode == 130 and output == '' and _messages(error) == ['interrupted']


def test_two_preparations_at_once_are_refused(folder, tmp_path):
    """The second start on a directory names the process that holds it; the first continues."""
    with _started(folder, tmp_path / 'out', '--processes=1') as process:
        process.send_signal(signal.SIGSTOP)
        second = _run(folder, tmp_path / 'out')
        assert second.returncode == 2 and second.stderr.count('\n') == 1
        assert f'in use by process {process.pid} on ' in second.stderr
        process.send_signal(signal.SIGCONT)
        assert not _messages(process.communicate(timeout=60)[1]) and process.returncode == 0


@pytest.mark.slow
def test_a_full_disk_is_reported_and_parts_are_kept(folder, whole, tmp_path):
    """A limit on file sizes simulates a full disk; without it, the same command continues."""
    limited = ['bash', '-c', 'ulimit -f 480; exec "$@"', 'bash']  # KiB
    command = [*limited, *_command(folder, tmp_path / 'out', '--processes=1')]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    right = 'free some space, about twice the size of the tokens; finished parts are kept'
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert f'error: --output={tmp_path}/out: File too large; {right}' in done.stderr
    assert _parts(tmp_path / 'out') > 200 and not (tmp_path / 'out/prepared.json').exists()
    assert _run(folder, tmp_path / 'out', '--processes=1').returncode == 0
    _same(tmp_path / 'out', whole)


def _resident(process):
    """Bytes in memory of a process and its children; shared pages count for each."""
    total = 0
    for pid in [process.pid, *_children(process)]:
        with contextlib.suppress(OSError):
            pages = pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]
            total += int(pages) * resource.getpagesize()
    return total


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path):
    """200 MB, partly compressed, need less than 500 MB of memory in all processes together."""
    draw = random.Random(0)
    words = [draw.randbytes(draw.randrange(1, 5)).hex() for _ in range(20000)]
    (tmp_path / 'in').mkdir()
    documents = num_bytes = 0
    for name, size in (('a.jsonl', 150e6), ('b.jsonl.gz', 50e6)):
        opened = gzip.open if name.endswith('.gz') else open
        with opened(tmp_path / 'in' / name, 'wt') as file:
            while size > 0:
                text = ' '.join(draw.choices(words, k=500))
                size -= file.write(json.dumps({'text': text}) + '\n')
                documents, num_bytes = documents + 1, num_bytes + len(text)
    output = tmp_path / 'out'
    command = [sys.executable, '-m', 'launch.prepare', f'--input={tmp_path}/in/*']
    command += [f'--output={output}', '--processes=2', '--part_bytes=8000000']
    command += ['--tokenizer=bpe:1000', '--bpe_bytes=3000000']
    peak = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _resident(process))
            time.sleep(0.05)
    assert process.returncode == 0 and 50e6 < peak < 500e6
    sides = [getattr(open_store(output), side) for side in ('train', 'held_out')]
    assert sum(side['documents'] for side in sides) == documents
    assert sum(side['bytes'] for side in sides) == num_bytes
