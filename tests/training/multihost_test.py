"""Processes connect by environment variables, agree on results and errors, and exit cleanly."""

import jax
import pytest
from jax._src.clusters import ClusterEnv

from moddepth_jax.training import multihost
from tests.data.prepared_text import refusal
from tests.two_processes import on_two_processes

OURS = {'JAX_COORDINATOR_ADDRESS': 'host7:1234', 'JAX_NUM_PROCESSES': '4', 'JAX_PROCESS_ID': '3'}
SLURM = {
    'SLURM_JOB_ID': '4099',
    'SLURM_STEP_NODELIST': 'node[007-010],other1',
    'SLURM_NTASKS': '8',
    'SLURM_PROCID': '5',
    'SLURM_LOCALID': '1',
}


@pytest.fixture
def connect_with(monkeypatch):
    """connect_with(variables) returns the arguments for jax.distributed.initialize, or None."""
    calls = []
    monkeypatch.setattr(jax.distributed, 'initialize', lambda **given: calls.append(given))
    monkeypatch.setattr(multihost, '_silence_native_stdout', lambda: None)
    for name in (*OURS, *SLURM, 'SLURM_STEP_NUM_NODES', 'JAX_LOCAL_DEVICE_IDS'):
        monkeypatch.delenv(name, raising=False)

    def connect(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        multihost.initialize()
        return calls[-1] if calls else None

    return connect


def test_one_process_joins_nothing_and_jax_reads_slurm(connect_with):
    assert connect_with({}) is None
    # Outside srun, SLURM_NTASKS counts tasks that do not exist, so do not wait for them.
    without = {name: value for name, value in SLURM.items() if name != 'SLURM_STEP_NODELIST'}
    assert connect_with(without) is None
    assert connect_with({'JAX_NUM_PROCESSES': '1', **SLURM}) is None
    assert connect_with({'JAX_NUM_PROCESSES': '', **SLURM, 'SLURM_NTASKS': '1'}) is None
    given = connect_with(SLURM)
    assert given['cluster_detection_method'] == 'slurm' and 'num_processes' not in given


@pytest.mark.parametrize(
    ('nodes', 'named', 'local'), [('2', '', [1]), ('8', '', []), ('8', '0,1', None)]
)
def test_one_slurm_task_per_node_uses_all_devices(connect_with, nodes, named, local):
    """Regression: JAX gives a task only the device SLURM_LOCALID, the first one of each node.

    An empty list is all devices. JAX itself reads JAX_LOCAL_DEVICE_IDS, if that is not empty.
    """
    named = {'JAX_LOCAL_DEVICE_IDS': named}
    given = connect_with(SLURM | named | {'SLURM_STEP_NUM_NODES': nodes})
    if local is None:
        assert 'local_device_ids' not in given
        return
    address, *found = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, given.get('local_device_ids'), given['cluster_detection_method'], 1
    )
    assert address.startswith('node007:') and found == [8, 5, local]


def test_our_variables_are_passed_on(connect_with):
    """JAX itself ignores two of the three; we also set the heartbeat timeout."""
    given = connect_with(OURS)
    assert given['coordinator_address'] == 'host7:1234'
    assert (given['num_processes'], given['process_id']) == (4, 3)
    assert given['cluster_detection_method'] == 'deactivate'
    assert given['heartbeat_timeout_seconds'] == 10 and given['shutdown_timeout_seconds'] <= 30


@pytest.mark.parametrize(
    ('variables', 'words'),
    [
        ({'JAX_NUM_PROCESSES': ''}, ['JAX_PROCESS_ID=3', 'JAX_NUM_PROCESSES missing']),
        ({'JAX_COORDINATOR_ADDRESS': '', 'JAX_PROCESS_ID': ''}, ['ADDRESS and JAX_PROCESS_ID']),
        ({'JAX_NUM_PROCESSES': 'two'}, ['JAX_NUM_PROCESSES=two', 'whole number, 1 or more']),
        ({'JAX_PROCESS_ID': '4'}, ['JAX_PROCESS_ID=4', '[0, 4)']),
        ({'JAX_COORDINATOR_ADDRESS': 'host7'}, ['JAX_COORDINATOR_ADDRESS=host7', 'HOST:PORT']),
        ({'JAX_COORDINATOR_ADDRESS': 'host7:70000'}, ['host7:70000', 'HOST:PORT']),
        ({'JAX_LOCAL_DEVICE_IDS': '0;1'}, ['JAX_LOCAL_DEVICE_IDS=0;1', 'such as 0,1']),
        (dict.fromkeys(OURS, '') | SLURM | {'SLURM_NTASKS': 'many'}, ['SLURM_NTASKS=many']),
    ],
)
def test_a_malformed_variable_is_one_line(connect_with, variables, words):
    text = refusal(connect_with, OURS | variables)
    assert all(word in text for word in words), text


def test_a_single_process_calls_functions_directly():
    assert multihost.is_leader() and not multihost.is_initialized()
    multihost.barrier('x')
    made = object()
    for call in (multihost.broadcast_from_leader, multihost.run_on_leader, multihost.run_on_all):
        assert call(lambda: made) in (made, [made])
        with pytest.raises(KeyError):
            call(lambda: {}['missing'])


def test_the_loss_of_a_process_is_recognized():
    """It is recognized in JAX's errors about a lost peer, and in errors that they cause."""
    reset = 'UNKNOWN: Gloo AllReduce failed: Read error [::1]:2: Connection reset by peer'
    lost = jax.errors.JaxRuntimeError(reset)
    around = ValueError('not saved')
    around.__cause__ = lost
    assert 'Connection reset by peer' in multihost._loss_reason(lost)
    assert 'Connection reset by peer' in multihost._loss_reason(around)
    full = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes')
    for other in (full, ValueError('connection reset'), RuntimeError('gloo')):
        assert multihost._loss_reason(other) is None
        with pytest.raises(type(other)), multihost.exit_on_lost_process():
            raise other


AGREE = """
import json, pathlib, sys, jax
me = jax.process_index()
multihost._LOOKS = 1
folder = pathlib.Path(sys.argv[1])
def outcome(call):
    try:
        return call()
    except Exception as error:
        silent = isinstance(error, multihost.RemoteError)
        return [type(error).__name__, silent, error.on_all_processes, str(error)]
def fail(process, error):
    if me == process:
        raise error
    return me
def boom(error):
    raise error
print(json.dumps({
    'first': multihost.is_leader(),
    'long': multihost.broadcast_from_leader(lambda: [me, 'x' * 5000]) == [0, 'x' * 5000],
    'raised': outcome(lambda: multihost.broadcast_from_leader(lambda: boom(KeyError('a\\nb')))),
    'made': outcome(lambda: multihost.run_on_leader(lambda: {1, me})) is not None,
    'well': multihost.run_on_all(lambda: me),
    'failed': outcome(lambda: multihost.run_on_all(lambda: fail(1, OSError('no disk')))),
    'alike': outcome(lambda: multihost.check_equal_on_all({'a': (1, 2), 'b': 3})),
    'unlike': outcome(lambda: multihost.check_equal_on_all({'a': 1, 'b': {'c': me}})),
    'shared': outcome(lambda: multihost.check_shared_directory(folder)),
    'copied': outcome(lambda: multihost.check_shared_directory(folder / str(me))),
}))
"""


def test_two_processes_agree(tmp_path):
    """A result, an error on either, and a difference reach both; only one of them reports it.

    Regression: a copy of the directory of a run passed for the directory, and its first save hung.
    """
    for index in '01':
        (tmp_path / index).mkdir()
        (tmp_path / index / 'config.json').write_text('{}')
    first, second = on_two_processes(AGREE, str(tmp_path))
    assert (first['first'], second['first']) == (True, False)
    assert first['long'] and second['long'] and (first['well'], second['well']) == (0, 1)
    assert (first['made'], second['made']) == (True, False)
    assert first['raised'][:3] == ['KeyError', False, True]
    assert second['raised'][:3] == ['RemoteError', True, True]
    assert 'a' in second['raised'][3] and '\n' not in second['raised'][3]
    assert second['failed'] == ['OSError', False, True, 'no disk']
    assert first['failed'] == ['RemoteError', True, True, 'no disk']
    assert first['alike'] is None and second['alike'] is None
    words = 'b.c: 1 on process 1 and 0 on 0; must be the same on all processes'
    assert second['unlike'] == ['ValueError', False, True, words]
    assert first['unlike'] == ['RemoteError', True, True, words]
    assert first['shared'] is None and second['shared'] is None
    assert first['copied'][:3] == ['RemoteError', True, True]
    words = f'--workdir={tmp_path}/1: process 1 does not find a new file of process 0'
    assert second['copied'][3].startswith(words)
    left = [path.name for path in tmp_path.rglob('*') if path.is_file()]
    assert left == ['config.json', 'config.json']
