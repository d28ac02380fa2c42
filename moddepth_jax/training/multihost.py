"""Runs of several processes: how they connect, share results and errors, and exit.

Process 0 is the leader. Only the leader prints and writes files that are not split over processes.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

ADDRESS, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'
SLURM_COUNT, SLURM_INDEX = 'SLURM_NTASKS', 'SLURM_PROCID'
_SLURM_NODES = 'SLURM_STEP_NUM_NODES'
_SLURM_STEP = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', SLURM_COUNT, SLURM_INDEX, 'SLURM_LOCALID')
HEARTBEAT_SECONDS = 10  # a process without a heartbeat for this long counts as lost
SHUTDOWN_SECONDS = 10  # an exiting process waits this long for the others
LOST = 75  # exit status of a process that lost another one: EX_TEMPFAIL of sysexits.h
# Messages of Gloo, NCCL and JAX's coordination service about a process that is gone.
_GONE = re.compile(
    'gloo|connection (reset|closed|refused)|socket closed|remote process exited|heartbeat|'
    'unhealthy|deadline_exceeded|timed out',
    re.IGNORECASE,
)
_CHUNK = 1024  # bytes; a broadcast compiles a program for each length, so lengths are rounded up
_LOOKS = 10  # times to look for a file, once a second: network disks show new files late


class RemoteError(ValueError):
    """An error of another process, which prints it; this process exits without printing it."""

    on_all_processes = reported_elsewhere = True


def initialize(saves: bool = False) -> None:
    """Connect this process to the others of its run, if there are any; call it before using JAX.

    The processes are described by JAX_COORDINATOR_ADDRESS (HOST:PORT of process 0),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0), or by a SLURM step of several tasks;
    JAX_NUM_PROCESSES=1 overrides SLURM. A SLURM task uses the device SLURM_LOCALID, or all devices
    of its node if each node has one task; JAX_LOCAL_DEVICE_IDS overrides both. With `saves`, JAX
    catches SIGTERM for `PreemptionHandler`.
    Raises ValueError, one line, if a variable is missing or malformed.
    """
    found = {name: os.environ[name] for name in (ADDRESS, COUNT, INDEX) if os.environ.get(name)}
    if found.get(COUNT) == '1':
        return
    devices = os.environ.get(LOCAL_DEVICES)
    if devices and not all(part.strip().isdecimal() for part in devices.split(',')):
        raise ValueError(f'{LOCAL_DEVICES}={devices}: must be device numbers, such as 0,1')
    jax.config.update('jax_enable_preemption_service', saves)
    if found:
        address, count, index = _read_variables(found)
        _connect('deactivate', coordinator_address=address, num_processes=count, process_id=index)
    elif all(name in os.environ for name in _SLURM_STEP) and _read_number(SLURM_COUNT, 1) > 1:
        _read_number(SLURM_INDEX, 0)
        alone = os.environ.get(_SLURM_NODES) == os.environ[SLURM_COUNT]  # on its node
        # An empty list is all devices. Without it, JAX would use the first device of each node.
        _connect('slurm', **({'local_device_ids': []} if alone and not devices else {}))


def _connect(method, **settings):
    jax.distributed.initialize(
        **settings,
        cluster_detection_method=method,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    _silence_native_stdout()
    # All processes arrive here together, so this makes Gloo's group of all devices in time: it
    # fails if one process reaches it 30 s after another, for example because it reads text first.
    barrier('connected')


def _silence_native_stdout():
    """Hide what native code prints on stdout: Gloo prints a line for each group of devices."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), 'w', encoding=sys.stdout.encoding, buffering=1)
    with open(os.devnull, 'wb') as devnull:
        os.dup2(devnull.fileno(), 1)


def _read_variables(found):
    missing = [name for name in (ADDRESS, COUNT, INDEX) if name not in found]
    if missing:
        pairs = ' '.join(f'{name}={value}' for name, value in found.items())
        problem = f'{" and ".join(missing)} missing'
        raise ValueError(f'{pairs}: {problem}; a run of several processes needs all three')
    host, _, port = found[ADDRESS].rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f'{ADDRESS}={found[ADDRESS]}: must be HOST:PORT of process 0')
    count, index = _read_number(COUNT, 1), _read_number(INDEX, 0)
    if index >= count:
        raise ValueError(f'{INDEX}={index}: must lie in [0, {count}), as {COUNT}={count}')
    return found[ADDRESS], count, index


def _read_number(name, minimum):
    value = os.environ[name]
    if not value.isdecimal() or int(value) < minimum:
        raise ValueError(f'{name}={value}: must be a whole number, {minimum} or more')
    return int(value)


def is_initialized() -> bool:
    """Return whether this process is one of several."""
    return jax.distributed.is_initialized()


def is_leader() -> bool:
    """Return whether this is process 0, which prints, logs and decides."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has called it with this name."""
    multihost_utils.sync_global_devices(name)


def warm_up_collectives(mesh) -> None:
    """Run one collective over every group of mesh axes; every process calls it.

    As in `_connect`, no process may be late. Compile times can differ by more than 30 s, since one
    process may find its program in a cache.
    """
    if jax.process_count() == 1:
        return
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    groups = [g for n in range(len(axes)) for g in itertools.combinations(axes, n + 1)]
    spread = PartitionSpec(axes)
    how = {'mesh': mesh, 'in_specs': spread, 'out_specs': spread, 'check_vma': False}
    sums = jax.shard_map(lambda one: [jax.lax.psum(one, group) for group in groups], **how)
    host = np.arange(mesh.size, dtype=np.float32)
    sharding = NamedSharding(mesh, spread)
    numbers = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    compiled = jax.jit(sums).lower(numbers).compile()
    barrier('collectives compiled')
    jax.block_until_ready(compiled(numbers))


def exit_process(status: int, error: BaseException) -> NoReturn:
    """Exit with `status`, at once unless all processes exit: JAX would wait for the others."""
    if is_initialized() and not getattr(error, 'on_all_processes', False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def exit_on_lost_process():
    """A context that applies `exit_if_process_lost` to errors before outer contexts clean up."""
    try:
        yield
    except Exception as error:
        exit_if_process_lost(error)
        raise


def exit_if_process_lost(error: BaseException) -> None:
    """Exit at once with status 75 and one line on stderr if `error` comes from a lost process.

    On a normal exit, JAX would wait for the lost process and then abort. If a device hangs in a
    collective, there is no Python error: JAX's runtime aborts this process.
    """
    reason = _loss_reason(error)
    if reason is not None and is_initialized():
        line = f'lost another process of this run ({reason})'
        # Not `print`, for speed: JAX may be about to abort this process for the same reason.
        os.write(2, f'error: {line}; run the same command again, it resumes\n'.encode())
        os._exit(LOST)


def _loss_reason(error):
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and _GONE.search(str(error)):
            return one_line(error)[:200]
        error = error.__cause__ or error.__context__
    return None


def run_on_all(function: Callable[[], Any]) -> Any:
    """Call `function` on every process and return its local result; all raise if one fails.

    `function` must not wait for other processes, since one of them may have failed. Every process
    calls this, and the functions below, in the same order.

    Raises:
      RemoteError: if `function` failed first on another process, which raises the error itself.
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
    report = _broadcast(one_line(error), first)
    if jax.process_index() == first:
        error.on_all_processes = True
        raise error
    raise RemoteError(report)


def run_on_leader(function: Callable[[], Any]) -> Any:
    """Like `run_on_all`, but on process 0 only; the others get None."""
    return run_on_all(function if is_leader() else lambda: None)


def broadcast_from_leader(function: Callable[[], Any]) -> Any:
    """Like `run_on_leader`, but every process gets the result, which consists of JSON values."""
    result = run_on_leader(function)
    return result if jax.process_count() == 1 else _broadcast(result, 0)


def check_equal_on_all(values: dict) -> None:
    """Raise ValueError with the first difference if processes have different JSON values."""
    mine = traverse_util.flatten_dict(json.loads(json.dumps(values)), sep='.')
    leaders = broadcast_from_leader(lambda: mine)

    def compare():
        for name in dict.fromkeys((*mine, *leaders)):
            here, there = (side.get(name, 'absent') for side in (mine, leaders))
            if here != there:
                where = f'{here!r} on process {jax.process_index()} and {there!r} on 0'
                raise ValueError(f'{name}: {where}; must be the same on all processes')

    run_on_all(compare)


def check_shared_directory(path: pathlib.Path) -> None:
    """Raise ValueError if a process does not find a new file of process 0 in the directory.

    The file is removed afterwards. A file of the run would not do: a copy of the directory has it.
    """
    if jax.process_count() == 1:
        return
    probe = path / f'shared-{broadcast_from_leader(lambda: secrets.token_hex(8))}'

    def find():
        for _ in range(_LOOKS):
            if probe.exists():
                return
            time.sleep(1)
        right = 'must be a directory that all processes share'
        what = f'process {jax.process_index()} does not find a new file of process 0'
        raise ValueError(f'--workdir={path}: {what}; {right}')

    run_on_leader(probe.touch)
    try:
        run_on_all(find)
    finally:
        if is_leader():
            probe.unlink(missing_ok=True)


def one_line(error: BaseException | None) -> str:
    """Return the message of an error, or the name of its class, in one line."""
    return ' '.join(str(error).split()) or type(error).__name__


def _broadcast(value, source):
    """Return the JSON `value` of process `source` on every process."""
    text = json.dumps(value).encode()
    here = jax.process_index() == source
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text)), here))
    padded = np.zeros(-(-length // _CHUNK) * _CHUNK, np.uint8)
    if here:
        padded[:length] = np.frombuffer(text, np.uint8)
    padded = multihost_utils.broadcast_one_to_all(padded, here)
    return json.loads(padded[:length].tobytes())
