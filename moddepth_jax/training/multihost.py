"""Several processes as one run: how they find each other, meet, and part.

Only the first of them, process 0, speaks to the user and writes what is not split over processes.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

ADDRESS, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'
SLURM_COUNT, SLURM_INDEX = 'SLURM_NTASKS', 'SLURM_PROCID'
_SLURM_STEP = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', SLURM_COUNT, SLURM_INDEX, 'SLURM_LOCALID')
HEARTBEAT_SECONDS = 10  # without a sign of a process: it counts as lost, and the others end
SHUTDOWN_SECONDS = 10  # that a process which ends waits for the others
LOST = 75  # exit status of a process that lost another one: EX_TEMPFAIL of sysexits.h
# What Gloo, NCCL and JAX's coordination service say of a process that is gone.
_GONE = re.compile(
    'gloo|connection (reset|closed|refused)|socket closed|remote process exited|heartbeat|'
    'unhealthy|deadline_exceeded|timed out',
    re.IGNORECASE,
)


def initialize(saves: bool = False) -> None:
    """Makes this process one of several, where the environment says so; to be called first.

    Where it `saves`, SIGTERM is kept for Interruption from then on; else it ends the process.

    It says so by JAX_COORDINATOR_ADDRESS (HOST:PORT of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (from 0), all three of them; or by the variables of a step of SLURM with more
    than one task, of which JAX makes the same. JAX_NUM_PROCESSES=1 keeps a task of SLURM alone.

    Raises:
      ValueError: one line, for a variable that is missing or malformed.
    """
    found = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if found.get(COUNT) == '1':
        return
    _check_local_devices()
    jax.config.update('jax_enable_preemption_service', saves)
    if found:
        address, count, index = _read(found)
        given = {'coordinator_address': address, 'num_processes': count, 'process_id': index}
        _initialize('deactivate', **given)
    elif all(name in os.environ for name in _SLURM_STEP) and _number(SLURM_COUNT, 1) > 1:
        _number(SLURM_INDEX, 0)
        _initialize('slurm')


def _initialize(method, **given):
    jax.distributed.initialize(
        **given,
        cluster_detection_method=method,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    _keep_stdout()


def _keep_stdout():
    """Sends what C++ writes on stdout nowhere: Gloo greets each group of devices there."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), 'w', encoding=sys.stdout.encoding, buffering=1)
    with open(os.devnull, 'wb') as nowhere:
        os.dup2(nowhere.fileno(), 1)


def _read(found):
    """Address, number of processes and own index."""
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in found]
    if missing:
        given = ' '.join(f'{name}={value}' for name, value in found.items())
        raise ValueError(
            f'{given}: {" and ".join(missing)} missing; a run of several processes needs all three'
        )
    host, _, port = found[ADDRESS].rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f'{ADDRESS}={found[ADDRESS]}: must be HOST:PORT of process 0')
    count, index = _number(COUNT, 1), _number(INDEX, 0)
    if index >= count:
        raise ValueError(f'{INDEX}={index}: must lie in [0, {count}), as {COUNT}={count}')
    return found[ADDRESS], count, index


def _number(name, least):
    value = os.environ[name]
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f'{name}={value}: must be a whole number, {least} or more')
    return int(value)


def _check_local_devices():
    value = os.environ.get(LOCAL_DEVICES)
    if value and not all(part.strip().isdecimal() for part in value.split(',')):
        raise ValueError(f'{LOCAL_DEVICES}={value}: must be numbers of devices, such as 0,1')


def is_initialized() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized()


def is_leader() -> bool:
    """Whether this is process 0, the one that prints, logs and decides."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns once every process has called it with this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def warm_up_collectives(mesh) -> None:
    """Has the devices of every group that programs may join communicate once; all call it.

    Gloo gives up on a group of which one process comes 30 s after another for the first time, and
    processes compile for longer than that, or find the program in a cache.
    """
    if jax.process_count() == 1:
        return
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    groups = [g for n in range(len(axes)) for g in itertools.combinations(axes, n + 1)]
    spread = PartitionSpec(axes)
    sums = jax.shard_map(
        lambda one: [jax.lax.psum(one, group) for group in groups],
        mesh=mesh,
        in_specs=spread,
        out_specs=spread,
        check_vma=False,
    )
    numbers = np.arange(mesh.size, dtype=np.float32)
    place = NamedSharding(mesh, spread)
    given = jax.make_array_from_callback(numbers.shape, place, lambda index: numbers[index])
    compiled = jax.jit(sums).lower(given).compile()
    barrier('devices meet')
    jax.block_until_ready(compiled(given))


def exit_process(status: int, error: BaseException) -> NoReturn:
    """Ends this process with `status` after `error`, which has been told.

    JAX waits for the other processes where one ends, and aborts when they do not come: only after
    an error that every process has met, as its attribute `everywhere` says, are they waited for.
    """
    if is_initialized() and not getattr(error, 'everywhere', False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def exit_on_lost_process():
    """`leave_if_lost` for an error inside, before what encloses this waits for the lost process."""
    try:
        yield
    except Exception as error:
        exit_if_process_lost(error)
        raise


def exit_if_process_lost(error: BaseException) -> None:
    """Ends this process, in one line on stderr, where `error` comes of another that is gone.

    At once, with status 75: JAX would wait for the lost one, and then abort. Where a device waits
    in a collective that another of this process has given up, no error comes up: then JAX's runtime
    aborts the process, with words of its own, HEARTBEAT_SECONDS after the last sign of the lost
    one, and at once where that was process 0.
    """
    reason = _loss(error)
    if reason is not None and is_initialized():
        line = f'lost another process of this run ({reason})'
        # Not print, for speed: JAX's runtime may be about to abort this process for the same loss.
        os.write(2, f'error: {line}; run the same command again, it resumes\n'.encode())
        os._exit(LOST)


def _loss(error):
    """What a JaxRuntimeError, the error or a cause of it, says of a loss; None of another."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and _GONE.search(str(error)):
            return _one_line(error)[:200]
        error = error.__cause__ or error.__context__
    return None


def _one_line(error):
    return ' '.join(str(error).split()) or type(error).__name__


_CHUNK = 1024  # bytes; each length that is broadcast compiles a program of its own
_GLANCES = 10  # at a file, a second apart: network file systems are slow to show a new one


class RemoteError(ValueError):
    """An error that another process of this run has met and tells: this one ends in silence."""

    everywhere = reported_elsewhere = True


def broadcast_from_leader(function: Callable[[], Any]) -> Any:
    """Calls `function` on process 0 alone; every process gets what it returns, or its error.

    Every process has to call this, and in the same order as other exchanges of theirs.

    Args:
      function: without arguments; returns JSON values.

    Raises:
      ToldByAnother: a ValueError of the same one line, on the other processes, where `function`
        raised anything on process 0; there the error goes on as it is.
    """
    if jax.process_count() == 1:
        return function()
    answer, error = {}, None
    if is_leader():
        answer, error = _attempt(function)
    answer = _exchange(answer, 0)
    if error is not None:
        error.everywhere = True
        raise error
    if 'error' in answer:
        raise RemoteError(answer['error'])
    return answer['result']


def run_on_leader(make: Callable[[], Any]) -> Any:
    """Calls `make` on process 0 alone, as `from_first` does; what it made there, None elsewhere."""
    made = []
    broadcast_from_leader(lambda: made.append(make()))
    return made[0] if made else None


def check_equal_on_all(values: dict) -> None:
    """Refuses a run whose processes were started with different things.

    Args:
      values: of this process, JSON values by name, in nested dicts.

    Raises:
      ValueError: one line, where those of another process than the first are not those of process
        0; it names the first that differs.
    """
    if jax.process_count() == 1:
        return
    mine = _flat(json.loads(json.dumps(values)))
    first = broadcast_from_leader(lambda: mine)

    def compare():
        for name in dict.fromkeys((*mine, *first)):
            here, there = (side.get(name, 'absent') for side in (mine, first))
            if here != there:
                where = f'{here!r} on process {jax.process_index()} and {there!r} on 0'
                raise ValueError(f'{name}: {where}; must be the same on all processes')

    run_on_all(compare)


def check_shared_directory(path: pathlib.Path) -> None:
    """Refuses a run whose processes do not see one directory: its checkpoints would be torn apart.

    Args:
      path: a file that process 0 has written there and leaves alone now.

    Raises:
      ValueError: one line, where another process finds no such file, or another text in it.
    """
    if jax.process_count() == 1:
        return
    text = broadcast_from_leader(path.read_text)

    def compare():
        for _ in range(_GLANCES):
            if path.exists() and path.read_text() == text:
                return
            time.sleep(1)
        right = 'must be one directory that all processes share'
        what = f'process {jax.process_index()} does not find the {path.name} of process 0'
        raise ValueError(f'--workdir={path.parent}: {what}; {right}')

    run_on_all(compare)


def run_on_all(function: Callable[[], Any]) -> Any:
    """Calls `function` on every process; where it fails on any of them, none goes on.

    Inside, no process should wait for another: one that has failed before does not come.

    Returns:
      What `function` returned here.

    Raises:
      ToldByAnother: a ValueError of one line, where the first process on which `function` failed is
        another one; on that one, its error goes on as it is.
    """
    if jax.process_count() == 1:
        return function()
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    failed_P = multihost_utils.process_allgather(np.int32(error is not None))
    if not failed_P.any():
        return result
    first = int(np.argmax(failed_P))
    told = _exchange({'error': _agreement_one_line(error)}, first)
    if jax.process_index() == first:
        error.everywhere = True
        raise error
    raise RemoteError(told['error'])


def _flat(values, prefix=''):
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f'{prefix}{name}.')
        else:
            flat[prefix + name] = value
    return flat


def _attempt(function):
    try:
        return {'result': function()}, None
    except Exception as error:
        return {'error': _agreement_one_line(error)}, error


def _agreement_one_line(error):
    return ' '.join(str(error).split()) or type(error).__name__


def _exchange(value, source):
    """The JSON `value` of process `source`, on every process."""
    text = json.dumps(value).encode()
    here = jax.process_index() == source
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text)), here))
    padded = np.zeros(-(-length // _CHUNK) * _CHUNK, np.uint8)
    if here:
        padded[:length] = np.frombuffer(text, np.uint8)
    padded = multihost_utils.broadcast_one_to_all(padded, here)
    return json.loads(padded[:length].tobytes())
