"""Several processes as one run: how they find each other, meet, and part.

Only the first of them, process 0, speaks to the user and writes what is not split over processes.
"""

import contextlib
import itertools
import os
import re
import sys
from typing import NoReturn

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


def join(saves: bool = False) -> None:
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


def joined() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is process 0, the one that prints, logs and decides."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns once every process has called it with this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def meet(mesh) -> None:
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


def leave(status: int, error: BaseException) -> NoReturn:
    """Ends this process with `status` after `error`, which has been told.

    JAX waits for the other processes where one ends, and aborts when they do not come: only after
    an error that every process has met, as its attribute `everywhere` says, are they waited for.
    """
    if joined() and not getattr(error, 'everywhere', False):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def ended_by_loss():
    """`leave_if_lost` for an error inside, before what encloses this waits for the lost process."""
    try:
        yield
    except Exception as error:
        leave_if_lost(error)
        raise


def leave_if_lost(error: BaseException) -> None:
    """Ends this process, in one line on stderr, where `error` comes of another that is gone.

    At once, with status 75: JAX would wait for the lost one, and then abort. Where a device waits
    in a collective that another of this process has given up, no error comes up: then JAX's runtime
    aborts the process, with words of its own, HEARTBEAT_SECONDS after the last sign of the lost
    one, and at once where that was process 0.
    """
    reason = _loss(error)
    if reason is not None and joined():
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
