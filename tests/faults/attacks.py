"""What tests/faults/table.py attacks a command with; as a script, runs one command under attack.

An attack is a name of FILES or NAMES, done to a path before the command starts; `NAME=value`, of a
field of a JSON file; a name of PROCESS, done in the process; or one of these at a moment of MOMENTS,
as in `step 6: deleted`.
"""

import ctypes
import importlib
import json
import os
import pathlib
import resource
import runpy
import shutil
import signal
import stat
import sys
import time

SECONDS, MEMORY = 120, 3 << 30  # of a command; a tiny run takes 5 seconds and half of a GiB
NESTED = 100_000


def _remove(path):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _instead(make):
    def attack(path):
        _remove(path)
        make(path)

    return attack


def _bytes(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def _lines(change):
    return _bytes(lambda content: b''.join(change(content.splitlines(keepends=True))))


def _future(path):
    os.utime(path, (4e9, 4e9))


# name: function of a path.
FILES = {
    'emptied': _bytes(lambda _: b''),
    'deleted': _remove,
    'cut': _bytes(lambda content: content[: len(content) // 2]),
    'one byte short': _bytes(lambda content: content[:-1]),
    'longer': _bytes(lambda content: content + b'x'),
    'a bit flipped': _bytes(_flip),
    'zeros': _bytes(lambda content: bytes(len(content))),
    'reversed': _bytes(lambda content: content[::-1]),
    'random bytes': _bytes(lambda _: bytes(range(255, 0, -1))),
    'with NUL': _bytes(lambda content: content[:20] + b'\0' + content[20:]),
    'with a BOM': _bytes(lambda content: b'\xef\xbb\xbf' + content),
    'in UTF-16': _bytes(lambda content: content.decode().encode('utf-16')),
    'in Latin-1': _bytes(lambda content: 'caf\xe9 '.encode('latin-1') + content),
    'nested': _bytes(lambda _: b'{"a":' + b'[' * NESTED),
    'a long number': _bytes(lambda _: b'9' * NESTED),
    'a list': _bytes(lambda _: b'[]\n'),
    'null': _bytes(lambda _: b'null\n'),
    'with CRLF': _bytes(lambda content: content.replace(b'\n', b'\r\n')),
    'a line twice': _lines(lambda lines: lines[:2] + lines[1:]),
    'without a line': _lines(lambda lines: lines[:1] + lines[2:]),
    'lines swapped': _lines(lambda lines: [lines[1], lines[0], *lines[2:]]),
    'half a line more': _bytes(lambda content: content + b'{"step": 7, "lo'),
    'a nested line': _lines(lambda lines: [lines[0], b'{"step":' + b'[' * NESTED + b'\n']),
    'an infinite line': _lines(lambda lines: [b'{"step": Infinity}\n', *lines]),
    'a digit changed': _bytes(lambda content: content.replace(b'"loss": 5', b'"loss": 4', 1)),
    'a directory': _instead(pathlib.Path.mkdir),
    'a file': _instead(pathlib.Path.touch),
    'a FIFO': _instead(os.mkfifo),
    'a socket': _instead(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    '/dev/zero': _instead(lambda path: path.symlink_to('/dev/zero')),
    '/dev/full': _instead(lambda path: path.symlink_to('/dev/full')),
    'a link to itself': _instead(lambda path: path.symlink_to(path.name)),
    'a broken link': _instead(lambda path: path.symlink_to('gone')),
    '10 GB': lambda path: os.truncate(path, 10 << 30),
    'unreadable': lambda path: path.chmod(0),
    'read-only': lambda path: path.chmod(0o555),
    'from the future': _future,
    'a loop inside': lambda path: (path / 'loop').symlink_to('.'),
    'a FIFO inside': lambda path: os.mkfifo(path / 'fifo'),
    'a file inside': lambda path: (path / 'abc').touch(),
    'an empty 99 inside': lambda path: (path / '99').mkdir(),
    'a half-written save inside': lambda path: (path / '99.orbax-checkpoint-tmp-1').mkdir(),
}

def _set(path, name, value):
    content = json.loads(path.read_text())
    *groups, last = name.split('.')
    group = content
    for part in groups:
        group = group[int(part) if part.isdigit() else part]
    if value == 'deleted':
        del group[last]
    else:
        group[int(last) if isinstance(group, list) else last] = json.loads(value)
    path.write_text(json.dumps(content))


def _closed(number):
    return lambda: os.close(number)


def _unread_stdout():
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)


def _send(*numbers):
    def act():
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    return act


def _sleep_and_wake():
    if not os.fork():
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _limit(which, most):
    return lambda: resource.setrlimit(which, (most, resource.getrlimit(which)[1]))


# name: function, called in the process.
PROCESS = {
    'SIGINT': _send(signal.SIGINT),
    'SIGINT twice': _send(signal.SIGINT, signal.SIGINT),
    'SIGTERM': _send(signal.SIGTERM),
    'SIGTERM and SIGINT': _send(signal.SIGTERM, signal.SIGINT),
    'SIGUSR1': _send(signal.SIGUSR1),
    'SIGHUP': _send(signal.SIGHUP),
    'SIGSTOP and SIGCONT': _sleep_and_wake,
    'SIGWINCH': _send(signal.SIGWINCH),
    'SIGKILL': _send(signal.SIGKILL),
    'closed stdin': _closed(0),
    'closed stdout': _closed(1),
    'closed stderr': _closed(2),
    'unread stdout': _unread_stdout,
    'full stdout': lambda: os.dup2(os.open('/dev/full', os.O_WRONLY), 1),
    'ulimit -n 40': _limit(resource.RLIMIT_NOFILE, 40),
    'ulimit -f 1': _limit(resource.RLIMIT_FSIZE, 1024),
    'umask 777': lambda: os.umask(0o777),
    'nice 19': lambda: os.nice(19),
    'working directory deleted': lambda: _in_deleted_directory(),
    'time 1970': lambda: _set_clock(0),
    'time 2100': lambda: _set_clock(4.1e9),
}


def _in_deleted_directory():
    os.mkdir('gone')
    os.chdir('gone')
    os.rmdir('../gone')


def _set_clock(seconds):
    time.time = lambda: seconds
    time.time_ns = lambda: int(seconds * 1e9)


# name: (module, function, which of its calls), before which an attack is done.
_PIPELINE = 'moddepth_jax.data.pipeline'
MOMENTS = {
    'compiling': (_PIPELINE, 'Dataset.train_batch', 1),
    'step 5': (_PIPELINE, 'Dataset.train_batch', 6),  # of a new run, which also compiles
    'step 6': (_PIPELINE, 'Dataset.train_batch', 2),  # of one that resumes after step 5
    'step 7': (_PIPELINE, 'Dataset.train_batch', 3),
    'save': ('moddepth_jax.training.checkpoint', 'write_manifest', 1),
    'last evaluation': ('moddepth_jax.training.trainer', 'evaluate_causal', 1),
    'summary': ('moddepth_jax.training.loop', 'write_summary', 1),
    'report': ('moddepth_jax.analysis.report', 'write_report', 1),
    'restore': ('moddepth_jax.training.checkpoint', 'Checkpoints.restore', 1),
}


def attack_of(name, path):
    """A function that attacks: one of FILES, of PROCESS, or the change of a field."""
    if name in PROCESS:
        return PROCESS[name]
    if name in FILES:
        return lambda: FILES[name](path)
    field, _, value = name.partition('=')
    if path is None:
        return lambda: os.environ.__setitem__(field, value)
    if field.startswith('every file '):
        name = field.removeprefix('every file ')
        return lambda: [FILES[name](file) for file in path.rglob('*') if file.is_file()]
    return lambda: _set(path, field, value)


def _at(moment, act):
    module, name, number = MOMENTS[moment]
    owner = importlib.import_module(module)
    *parts, name = name.split('.')
    for part in parts:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def call(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return original(*arguments, **named)

    setattr(owner, name, call)


def _drop_capabilities():
    """Root, too, obeys the permissions of files."""
    none = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), none)


def run(asked, module, arguments):
    """Runs `python -m launch.MODULE ARGUMENTS` as `asked`: in a folder, under an attack."""
    os.chdir(asked['folder'])
    sys.path[0] = os.getcwd()
    signal.alarm(SECONDS)  # kills it, also where a system call blocks
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.environ['XDG_CACHE_HOME'] = asked['cache']
    _drop_capabilities()
    act = lambda: None
    if asked['attack']:
        path = asked['path'] and pathlib.Path(asked['path'])
        act = attack_of(asked['attack'], path)
    if asked['moment']:
        _at(asked['moment'], act)
    else:
        act()
    if asked['attack'].startswith('closed') or '=' in asked['attack'].partition(' ')[0]:  # before its start
        os.execv(sys.executable, [sys.executable, '-m', f'launch.{module}', *arguments])
    sys.argv = [f'launch/{module}.py', *arguments]
    runpy.run_module(f'launch.{module}', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    run(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
