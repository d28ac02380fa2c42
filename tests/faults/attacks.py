"""The attacks of tests/faults/table.py; as a script, runs one command under one of them.

An attack on a path is a name of FILES, alone or after `every file `, or a field of a JSON file and
its new value, as in `model.num_layers="2"`. Others are a name of PROCESS, or a variable, as in
`HOME=/none`. Each is done before the command starts, or at one of MOMENTS: `step 6: deleted`.
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

from moddepth_jax.data.directory import lock_directory

SECONDS, MEMORY = 300, 3 << 30  # of a command, which usually needs 5 seconds and half a GiB
_DEEP = 100_000


def _replaced(make):
    def attack(path):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        make(path)

    return attack


def _link_to(target):
    return _replaced(lambda path: path.symlink_to(target or path.name))


def _bytes(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _lines(change):
    return _bytes(lambda content: b''.join(change(content.splitlines(keepends=True))))


def _flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


FILES = {
    'emptied': _bytes(lambda _: b''),
    'deleted': _replaced(lambda path: None),
    'cut': _bytes(lambda content: content[: len(content) // 2]),
    'longer': _bytes(lambda content: content + b'x'),
    'a bit flipped': _bytes(_flip),
    'zeros': _bytes(lambda content: bytes(len(content))),
    'random bytes': _bytes(lambda _: bytes(range(255, 0, -1))),
    'with NUL': _bytes(lambda content: content[:20] + b'\0' + content[20:]),
    'with a BOM': _bytes(lambda content: b'\xef\xbb\xbf' + content),
    'with CRLF': _bytes(lambda content: content.replace(b'\n', b'\r\n')),
    'in UTF-16': _bytes(lambda content: content.decode().encode('utf-16')),
    'in Latin-1': _bytes(lambda content: b'caf\xe9 ' + content),
    'nested': _bytes(lambda _: b'{"a":' + b'[' * _DEEP),
    'a long number': _bytes(lambda _: b'9' * _DEEP),
    'a list': _bytes(lambda _: b'[]\n'),
    'null': _bytes(lambda _: b'null\n'),
    'without a line': _lines(lambda lines: lines[1:]),
    'lines swapped': _lines(lambda lines: [lines[1], lines[0], *lines[2:]]),
    'half a line more': _bytes(lambda content: content + b'{"step": 7, "lo'),
    'a nested line': _lines(lambda lines: [b'{"step":' + b'[' * _DEEP + b'\n', *lines]),
    'an infinite line': _lines(lambda lines: [b'{"step": Infinity}\n', *lines]),
    'a digit changed': _bytes(lambda content: content.replace(b'"loss": 5', b'"loss": 4', 1)),
    'a directory': _replaced(pathlib.Path.mkdir),
    'a file': _replaced(pathlib.Path.touch),
    'a FIFO': _replaced(os.mkfifo),
    'a socket': _replaced(lambda path: os.mknod(path, stat.S_IFSOCK | 0o600)),
    '/dev/zero': _link_to('/dev/zero'),
    'a link to itself': _link_to(None),
    'a broken link': _link_to('gone'),
    '10 GB': lambda path: os.truncate(path, 10 << 30),
    'unreadable': lambda path: path.chmod(0),
    'read-only': lambda path: path.chmod(0o555),
    'from the future': lambda path: os.utime(path, (4e9, 4e9)),
    'a loop inside': lambda path: (path / 'loop').symlink_to('.'),
    'a FIFO inside': lambda path: os.mkfifo(path / 'fifo'),
    'a file inside': lambda path: (path / 'abc').touch(),
    'an empty 99 inside': lambda path: (path / '99').mkdir(),
    'a half-written save inside': lambda path: (path / '99.orbax-checkpoint-tmp-1').mkdir(),
}


def _set_field(path, name, value):
    content = json.loads(path.read_text())
    *groups, last = name.split('.')
    group = content
    for part in groups:
        group = group[part]
    group[last] = None if value == 'deleted' else json.loads(value)
    if value == 'deleted':
        del group[last]
    path.write_text(json.dumps(content))


def _send(*numbers):
    def send():
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    return send


def _sleep_and_wake():
    if not os.fork():
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _limit(which, most):
    return lambda: resource.setrlimit(which, (most, resource.getrlimit(which)[1]))


def _set_clock(seconds):
    def set_clock():
        time.time, time.time_ns = lambda: seconds, lambda: int(seconds * 1e9)

    return set_clock


def _unread_stdout():
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)


def _enter_deleted_directory():
    os.mkdir('gone')
    os.chdir('gone')
    os.rmdir('../gone')


_LOCKS = []
PROCESS = {
    'SIGINT': _send(signal.SIGINT),
    'SIGINT twice': _send(signal.SIGINT, signal.SIGINT),
    'SIGTERM': _send(signal.SIGTERM),
    'SIGTERM and SIGINT': _send(signal.SIGTERM, signal.SIGINT),
    'SIGUSR1': _send(signal.SIGUSR1),
    'SIGHUP': _send(signal.SIGHUP),
    'SIGKILL': _send(signal.SIGKILL),
    'SIGSTOP and SIGCONT': _sleep_and_wake,
    'closed stdin': lambda: os.close(0),
    'closed stdout': lambda: os.close(1),
    'closed stderr': lambda: os.close(2),
    'unread stdout': _unread_stdout,
    'full stdout': lambda: os.dup2(os.open('/dev/full', os.O_WRONLY), 1),
    'ulimit -n 64': _limit(resource.RLIMIT_NOFILE, 64),
    'ulimit -f 1': _limit(resource.RLIMIT_FSIZE, 1024),
    'working directory deleted': _enter_deleted_directory,
    'in use by another run': lambda: _LOCKS.append(lock_directory('begun')),
    'time 1970': _set_clock(0),
    'time 2100': _set_clock(4.1e9),
}
# name: (module, function, number of the call that it precedes), in a run that resumes at step 5.
MOMENTS = {
    'restore': ('moddepth_jax.training.checkpoint', 'Checkpoints.restore', 1),
    'compiling': ('moddepth_jax.data.pipeline', 'Dataset.train_batch', 1),
    'step 6': ('moddepth_jax.data.pipeline', 'Dataset.train_batch', 2),
    'step 7': ('moddepth_jax.data.pipeline', 'Dataset.train_batch', 3),
    'step 5 of a new run': ('moddepth_jax.data.pipeline', 'Dataset.train_batch', 6),
    'save': ('moddepth_jax.training.checkpoint', 'write_manifest', 1),
    'last evaluation': ('moddepth_jax.training.trainer', 'evaluate_causal', 1),
    'summary': ('moddepth_jax.training.loop', 'write_summary', 1),
    'report': ('moddepth_jax.analysis.report', 'write_report', 1),
}


def attack_of(name, path):
    """The function without arguments that attacks; `path` may be None."""
    if name in PROCESS:
        return PROCESS[name]
    if name.startswith('every file '):
        attack = FILES[name.removeprefix('every file ')]
        return lambda: [attack(file) for file in path.rglob('*') if file.is_file()]
    if name in FILES:
        return lambda: FILES[name](path)
    field, _, value = name.partition('=')
    if path is None:
        return lambda: os.environ.__setitem__(field, value)
    return lambda: _set_field(path, field, value)


def _do_at(moment, attack):
    module, names, number = MOMENTS[moment]
    owner, (*parts, name) = importlib.import_module(module), names.split('.')
    for part in parts:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), []

    def call(*arguments, **named):
        calls.append(name)
        if len(calls) == number:
            attack()
        return original(*arguments, **named)

    setattr(owner, name, call)


def _obey_permissions():
    """Drop all capabilities, with which root could read and write any file."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).prctl(28, 1, 0, 0, 0)  # PR_SET_SECUREBITS, NOROOT: also for children
    ctypes.CDLL(None).capset(header, none)


def _run(asked, module, *arguments):
    os.chdir(asked['folder'])
    os.environ['XDG_CACHE_HOME'] = asked['cache']
    sys.path[0] = os.getcwd()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and `&` ignore these
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.alarm(SECONDS)  # its default action also ends a process in a blocking system call
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    _obey_permissions()
    moment, name, path = (asked[key] for key in ('moment', 'attack', 'path'))
    attack = attack_of(name, path and pathlib.Path(path)) if name else list
    if moment:
        _do_at(moment, attack)
    else:
        attack()
    if name.startswith('closed') or '=' in name:  # read at the start of Python
        os.execv(sys.executable, [sys.executable, '-m', f'launch.{module}', *arguments])
    sys.argv = [f'launch/{module}.py', *arguments]
    runpy.run_module(f'launch.{module}', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    _run(json.loads(sys.argv[1]), *sys.argv[2:])
