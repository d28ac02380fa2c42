"""Checkpoints come back bit for bit or not at all, whatever happens to processes or the disk."""

import errno
import logging
import os
import pathlib
import resource
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moddepth_jax.training import checkpoint
from tests.devices import on_devices
from tests.two_processes import on_two_processes

ROOT = pathlib.Path(__file__).parents[2]


def make_state(seed):
    """Every kind of leaf: AdamW's tuples, bfloat16, int32, a typed key, an array of no elements."""
    key = jax.random.key(seed)
    params = {
        'dense': {'kernel': jax.random.normal(key, (8, 4)), 'bias': jnp.full((4,), seed + 0.5)},
        'half': jax.random.normal(key, (4, 3)).astype(jnp.bfloat16),
        'empty': jnp.zeros((0, 4)),
    }
    optimizer_state = optax.adamw(1e-3).init(params)
    optimizer_state = jax.tree.map(lambda x: x + jnp.asarray(seed, x.dtype), optimizer_state)
    return {
        'step': jnp.asarray(seed, jnp.int32),
        'params': params,
        'optimizer_state': optimizer_state,
        'key': key,
        'flags': jnp.asarray([True, False]),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def save_steps(directory, *steps):
    with checkpoint.Checkpoints(directory, keep=len(steps)) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {'step': step})


def restore(directory):
    with checkpoint.Checkpoints(directory, keep=2) as checkpoints:
        restored = checkpoints.restore(abstract(make_state(0)))
        return restored, checkpoints.skipped


def largest_file(directory):
    files = [path for path in directory.rglob('*') if path.is_file()]
    return max(files, key=lambda path: (path.name != 'manifest.json', path.stat().st_size))


def test_round_trip_is_bit_equal_with_structure_and_metadata(tmp_path):
    """What is saved comes back with the same bits, dtypes, tree and metadata."""
    state = make_state(7)
    metadata = {'corpus_sha256': 'ab', 'config': {'windows': [0, 16]}, 'seconds': 1.5}
    with checkpoint.Checkpoints(tmp_path / 'checkpoints', keep=2) as checkpoints:
        checkpoints.save(7, state, metadata)
        restored, step, found = checkpoints.restore(abstract(state))
    assert (step, found) == (7, metadata)
    assert (tmp_path / 'checkpoints' / '7' / 'manifest.json').exists()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert (old.dtype, old.shape, old.sharding) == (new.dtype, new.shape, new.sharding)
    assert jax.random.bits(restored['key']) == jax.random.bits(state['key'])
    assert checkpoint.state_sha256(restored) == checkpoint.state_sha256(state)


@pytest.mark.parametrize(
    'change',
    [
        lambda state: state | {'step': state['step'] + 1},
        lambda state: state | {'step': state['step'].astype(jnp.uint32)},
        lambda state: state | {'flags': state['flags'][None]},
        lambda state: state | {'key': jax.random.key(8)},
        lambda state: {'renamed' if k == 'flags' else k: v for k, v in state.items()},
        lambda state: state | {'params': state['params'] | {'empty': jnp.zeros((0, 5))}},
    ],
)
def test_digest_depends_on_value_dtype_shape_and_path(change):
    """Equal states have equal digests; any change gives another."""
    assert checkpoint.state_sha256(make_state(7)) == checkpoint.state_sha256(make_state(7))
    assert checkpoint.state_sha256(change(make_state(7))) != checkpoint.state_sha256(make_state(7))


def test_later_donated_steps_do_not_change_a_save(tmp_path):
    """The state may be donated at once: its buffer is reused, and the old values are on disk."""
    step = jax.jit(lambda state: {'w': state['w'] + 1}, donate_argnums=0)
    state, reused = {'w': jnp.zeros((3_000_000,))}, []
    with checkpoint.Checkpoints(tmp_path, keep=9) as checkpoints:
        for i in range(4):
            pointer = state['w'].unsafe_buffer_pointer()
            checkpoints.save(i, state, {})
            state = step(state)
            reused.append(state['w'].unsafe_buffer_pointer() == pointer)
            restored, found, _ = checkpoints.restore(abstract(state))
            assert found == i and np.all(np.asarray(restored['w']) == i)
    assert all(reused)


def flip_bit(directory):
    file = largest_file(directory)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return 'sha256'


def remove_manifest(directory):
    (directory / 'manifest.json').unlink()
    return 'no manifest.json'


@pytest.mark.parametrize('damage', [flip_bit, remove_manifest])
def test_a_damaged_newest_checkpoint_is_skipped_and_reported(tmp_path, damage):
    """Restore then takes the one before. Kinds of damage: manifest_test.py, tests/faults."""
    save_steps(tmp_path, 1, 2)
    (_, step, _), skipped = restore(tmp_path)
    assert step == 2 and not skipped
    reason = damage(tmp_path / '2')
    (state, step, metadata), skipped = restore(tmp_path)
    assert step == 1 and metadata == {'step': 1}
    assert checkpoint.state_sha256(state) == checkpoint.state_sha256(make_state(1))
    assert len(skipped) == 1 and 'checkpoint 2 ' in skipped[0] and reason in skipped[0]


def test_nothing_to_restore_is_none(tmp_path):
    """No directory, an empty one, and one of damaged checkpoints only: None, and the reasons."""
    assert restore(tmp_path / 'none') == (None, [])
    (tmp_path / 'empty').mkdir()
    assert restore(tmp_path / 'empty') == (None, [])
    save_steps(tmp_path / 'damaged', 1)
    (tmp_path / 'damaged' / '2').mkdir()
    flip_bit(tmp_path / 'damaged' / '1')
    restored, skipped = restore(tmp_path / 'damaged')
    assert restored is None and len(skipped) == 2


@pytest.mark.parametrize(
    ('path', 'leaf', 'values'),
    [
        ('kernel', jax.ShapeDtypeStruct((8, 5), jnp.float32), ('float32[8,4]', 'float32[8,5]')),
        ('kernel', jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), ('float32[8,4]', 'bfloat16[8,4]')),
        ('scale', jax.ShapeDtypeStruct((8,), jnp.float32), ('absent', 'float32[8]')),
        ('bias', None, ('float32[4]', 'absent')),
    ],
)
def test_another_structure_is_refused_before_anything_is_read(
    tmp_path, monkeypatch, path, leaf, values
):
    """Another shape, dtype or leaf is one line with both values, with no fallback to step 1."""
    save_steps(tmp_path, 1, 2)
    target = abstract(make_state(0))
    target['params']['dense'][path] = leaf
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        monkeypatch.setattr(checkpoints, '_read', lambda *_: pytest.fail('it was read'))
        with pytest.raises(ValueError) as caught:
            checkpoints.restore(target)
    message = str(caught.value)
    assert f'params.dense.{path} is {values[0]} in the checkpoint and {values[1]}' in message
    assert 'checkpoint 2 ' in message and '\n' not in message


def test_only_the_newest_good_checkpoints_stay(tmp_path):
    """Damaged and unfinished ones do not count as kept, and go when a newer good one is saved."""
    save_steps(tmp_path, 1, 2, 3)
    flip_bit(tmp_path / '3')
    (tmp_path / '4').mkdir()
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(abstract(make_state(0)))[1] == 2
        checkpoints.save(5, make_state(5), {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5]
        assert sorted(os.listdir(tmp_path)) == ['2', '5']
        checkpoints.save(6, make_state(6), {})
        checkpoints.wait()
        assert sorted(os.listdir(tmp_path)) == ['5', '6']


def test_saving_a_step_again_replaces_a_bad_one_only(tmp_path):
    """A resumed run replaces the damaged checkpoint that it skipped, but not a good one."""
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {})
        checkpoints.wait()
        flip_bit(tmp_path / '2')
        assert checkpoints.restore(abstract(make_state(0)))[1] == 1
        checkpoints.save(1, make_state(100), {})
        checkpoints.save(2, make_state(2), {})
        restored, step, _ = checkpoints.restore(abstract(make_state(0)))
        assert step == 2 and not checkpoints.skipped
        assert checkpoint.state_sha256(restored) == checkpoint.state_sha256(make_state(2))
        (tmp_path / '2' / 'manifest.json').unlink()
        assert int(checkpoints.restore(abstract(make_state(0)))[0]['step']) == 1


def test_a_failed_write_is_one_line_and_costs_only_its_own_step(tmp_path, caplog, capfd):
    """A write that fails is reported by the next save or by wait; the older steps stay."""
    state = {'w': jax.random.normal(jax.random.key(0), (200_000,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            checkpoints.save(2, state, {})
            with pytest.raises(checkpoint.SaveError) as at_next_save:
                checkpoints.save(3, state, {})
            with pytest.raises(checkpoint.SaveError) as at_wait:
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for step, caught in ((2, at_next_save), (3, at_wait)):
            where = f'checkpoint {step} in {tmp_path}'
            right = 'free disk space there, then the same command resumes after step 1'
            line = f'{where}: not saved, File too large; steps kept: 1; {right}'
            assert str(caught.value) == line
        checkpoints.wait()
        assert os.listdir(tmp_path) == ['1']
        checkpoints.save(4, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4] and sorted(os.listdir(tmp_path)) == ['1', '4']
    assert not caplog.records and capfd.readouterr() == ('', '')


def test_the_save_that_reports_a_failed_one_is_made_itself(tmp_path, monkeypatch):
    """A disk that was full for one save costs one checkpoint, not two."""

    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, 'write_manifest', full_disk)
            checkpoints.save(1, make_state(1), {})
            checkpoints._pending.exception()
        with pytest.raises(checkpoint.SaveError, match='checkpoint 1 .*No space.*kept: none'):
            checkpoints.save(2, make_state(2), {})
        checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_a_failed_save_does_not_hide_the_error_that_ends_the_run(tmp_path, monkeypatch):
    """An exit by another error raises that error, with a note about the failed save."""
    monkeypatch.setattr(checkpoint, 'write_manifest', lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match='of the run') as caught:
        with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
            checkpoints.save(1, make_state(1), {})
            raise RuntimeError('of the run')
    assert 'checkpoint 1 ' in caught.value.__notes__[0]
    with pytest.raises(checkpoint.SaveError, match='checkpoint 1 '):
        with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
            checkpoints.save(1, make_state(1), {})


def test_a_leaf_that_is_no_array_is_refused_by_name(tmp_path):
    """A Python number in the state would be restored as another type, so it is refused."""
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(ValueError, match='params.scale=0.5: must be a jax array'):
            checkpoints.save(1, {'params': {'scale': 0.5}}, {})
    assert not os.listdir(tmp_path)


SAVE_FOREVER = """
import itertools, sys
import jax.numpy as jnp
from moddepth_jax.training import checkpoint
abstract = {'w': jnp.zeros((300, 1000)), 'step': jnp.zeros((), jnp.int32)}
with checkpoint.Checkpoints(sys.argv[1], keep=1) as checkpoints:
    restored = checkpoints.restore(abstract)
    for step in itertools.count(restored[1] + 1 if restored else 1):
        state = {'w': jnp.full((300, 1000), step, jnp.float32), 'step': jnp.asarray(step)}
        checkpoints.save(step, state, {'step': step})
        print(step, flush=True)
"""


def test_killed_at_any_moment_a_good_checkpoint_remains(tmp_path):
    """SIGKILL during saves leaves one that restores, no older than the last finished; keep is 1."""
    rng, reached = np.random.default_rng(0), 0
    target = {'w': jnp.zeros((300, 1000)), 'step': jnp.zeros((), jnp.int32)}
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-c', SAVE_FOREVER, str(tmp_path)]
    for _ in range(2):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                begun = [int(process.stdout.readline()) for _ in range(3)]
                time.sleep(rng.uniform(0, 0.1))
            finally:
                process.kill()
            begun += [int(line) for line in process.stdout.read().split()]
        # A save that was printed had waited for the one before it.
        with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
            state, step, metadata = checkpoints.restore(target)
        assert begun[0] == reached + 1 and step in (begun[-1] - 1, begun[-1], begun[-1] + 1)
        assert step == int(state['step']) == metadata['step'] and np.all(state['w'] == step)
        reached = step


ON_FOUR_DEVICES = """
import json, sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from moddepth_jax.training import checkpoint
mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,))
def place(x):
    divides = x.ndim and x.shape[0] and x.shape[0] % 4 == 0
    spec = PartitionSpec('data') if divides else PartitionSpec()
    return x.update(sharding=NamedSharding(mesh, spec))
def make():
    key = jax.random.key(3)
    return {'step': jnp.asarray(3), 'key': key, 'w': jax.random.normal(key, (8, 4)),
            'half': jnp.ones((4, 2), jnp.bfloat16), 'empty': jnp.zeros((0, 4))}
target = jax.tree.map(place, jax.eval_shape(make))
with checkpoint.Checkpoints(sys.argv[1], keep=3) as checkpoints:
    state, step, metadata = checkpoints.restore(target)
    placed = all(x.sharding == y.sharding
                 for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(target), strict=True))
    checkpoints.save(step + 1, state, metadata)
print(json.dumps({'placed': placed, 'shard': state['w'].addressable_shards[0].data.shape,
                  'sha256': checkpoint.state_sha256(state)}))
"""


def make_spread_state(seed):
    """The state that ON_FOUR_DEVICES (seed 3) and SAVED_BY_TWO (seed 7) make."""
    key = jax.random.key(seed)
    return {
        'step': jnp.asarray(seed),
        'key': key,
        'w': jax.random.normal(key, (8, 4)),
        'half': jnp.ones((4, 2), jnp.bfloat16),
        'empty': jnp.zeros((0, 4)),
    }


def test_one_device_and_four_share_checkpoints_and_digests(tmp_path):
    """Saved from one device, restored over four and back: placed as asked, the same digest."""
    state = make_spread_state(3)
    with checkpoint.Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(3, state, {'step': 3})
        checkpoints.wait()
        found = on_devices(4, ON_FOUR_DEVICES, str(tmp_path))
        digest = checkpoint.state_sha256(state)
        assert found == {'placed': True, 'shard': [2, 4], 'sha256': digest}
        restored, step, metadata = checkpoints.restore(abstract(state))
    assert (step, metadata) == (4, {'step': 3}) and not checkpoints.skipped
    assert checkpoint.state_sha256(restored) == digest


SAVED_BY_TWO = """
import json, os, sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from moddepth_jax.training.checkpoint import Checkpoints, state_sha256

folder = sys.argv[1]
mesh = jax.make_mesh((4,), ('fsdp',), axis_types=(AxisType.Auto,))

def make():
    key = jax.random.key(7)
    return {'step': jnp.asarray(7), 'key': key, 'w': jax.random.normal(key, (8, 4)),
            'half': jnp.ones((4, 2), jnp.bfloat16), 'empty': jnp.zeros((0, 4))}

abstract = jax.eval_shape(make)
specs = {name: PartitionSpec('fsdp' if name in ('w', 'half') else None) for name in abstract}
specs = {name: spec if abstract[name].ndim else PartitionSpec() for name, spec in specs.items()}
placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
state = jax.jit(make, out_shardings=placed)()
abstract = {name: leaf.update(sharding=placed[name]) for name, leaf in abstract.items()}
found = {'spans': not state['w'].is_fully_addressable, 'saved': state_sha256(state)}
with Checkpoints(folder, keep=2) as checkpoints:
    checkpoints.save(7, state, {'a': 1})
    state = jax.jit(lambda state: {**state, 'w': state['w'] + 1}, donate_argnums=0)(state)
    checkpoints.wait()
    found['manifest'] = os.path.exists(f'{folder}/7/manifest.json')
    restored, found['step'], found['metadata'] = checkpoints.restore(abstract)
found['restored'] = state_sha256(restored)
found['placed'] = all(restored[name].sharding == placed[name] for name in placed)
print(json.dumps(found))
"""


def test_what_two_processes_save_one_restores_with_the_same_digest(tmp_path):
    """Each writes its parts of arrays that span both; the manifest exists when `wait` returns.

    With donated arrays, a typed key and a leaf without elements.
    """
    first, second = on_two_processes(SAVED_BY_TWO, str(tmp_path))
    assert first == second
    assert first['spans'] and first['manifest'] and first['placed']
    assert (first['step'], first['metadata']) == (7, {'a': 1})
    state = make_spread_state(7)
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        restored, step, _ = checkpoints.restore(jax.eval_shape(lambda: state))
    assert step == 7 and not checkpoints.skipped and os.listdir(tmp_path) == ['7']
    assert checkpoint.state_sha256(restored) == first['saved'] == first['restored']


FAILS_ON_ONE = """
import json, os, sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import serialization
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.checkpoint import SaveError

folder, broken = sys.argv[1:]
placed = NamedSharding(
    jax.make_mesh((4,), ('fsdp',), axis_types=(AxisType.Auto,)), PartitionSpec('fsdp'))
write, full = serialization.async_serialize_from_host, False

async def write_unless_full(*given, **named):
    if full and jax.process_index() == int(broken):
        raise OSError(28, 'No space left on device')
    return await write(*given, **named)

def state(step):
    whole = {name: jnp.full((8, 100), step, jnp.float32) for name in 'abc'}
    return jax.device_put(whole, placed)

serialization.async_serialize_from_host = write_unless_full
found = {'lines': []}
with Checkpoints(folder, keep=2) as checkpoints:
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    for step, full in ((2, True), (3, False)):
        checkpoints.save(step, state(step), {})
        try:
            checkpoints.wait()
        except SaveError as error:
            reports = not getattr(error, 'reported_elsewhere', False)
            found['lines'].append([step, reports, error.on_all_processes, str(error)])
            found['kept'] = sorted(os.listdir(folder))
    restored, found['step'], _ = checkpoints.restore(state(0))
    found['values'] = sorted({float(x) for leaf in jax.tree.leaves(restored)
                              for shard in leaf.addressable_shards
                              for x in shard.data.reshape(-1)[:1]})
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize('broken', [0, 1])
def test_a_part_that_one_process_cannot_write_fails_the_save_of_both(tmp_path, broken):
    """Both raise a SaveError of one line that process 0 reports; only that step is lost.

    The step before stays good, and both save and restore the step after.
    """
    both = on_two_processes(FAILS_ON_ONE, str(tmp_path), str(broken))
    for process, found in enumerate(both):
        ((step, reports, on_all, line),) = found['lines']
        assert (step, reports, on_all) == (2, process == 0, True)
        assert f'process {broken}' in line and 'No space left on device' in line, line
        assert '\n' not in line
        assert (found['kept'], found['step'], found['values']) == (['1'], 3, [3.0])
    assert 'checkpoint 2 in ' in both[0]['lines'][0][3]
    assert 'steps kept: 1' in both[0]['lines'][0][3]
    assert sorted(os.listdir(tmp_path)) == ['1', '3']


@pytest.fixture
def passed_on(monkeypatch):
    """What reaches the sys.unraisablehook from before `silence_orbax`, which is called twice."""
    passed = []
    monkeypatch.setattr(sys, 'unraisablehook', passed.append)
    checkpoint.silence_orbax()
    checkpoint.silence_orbax()
    return passed


def test_only_late_errors_of_callbacks_are_dropped(passed_on):
    """The same error of a Python object, and other errors of callbacks, reach the hook once."""

    def unraisable(error, blamed=None):
        found = {'exc_type': type(error), 'exc_value': error, 'object': blamed}
        sys.unraisablehook(types.SimpleNamespace(**found))
        return error, blamed

    unraisable(RuntimeError('Event loop is closed'))
    expected = [
        unraisable(RuntimeError('Event loop is closed'), blamed=print),
        unraisable(RuntimeError('Event loop stopped')),
        unraisable(ValueError('Event loop is closed')),
    ]
    assert [(found.exc_value, found.object) for found in passed_on] == expected


def test_only_log_records_of_orbax_and_dropped_saves_are_dropped(passed_on):
    logger = logging.getLogger('absl')
    paths = ('/lib/orbax/checkpoint/save.py', '/lib/elsewhere.py')
    records = [logger.makeRecord('absl', logging.ERROR, path, 1, '', (), None) for path in paths]
    assert [bool(logger.filter(record)) for record in records] == [False, True]
    logger, never = logging.getLogger('asyncio'), 'Future exception was never retrieved\nfuture: '
    texts = [f"{never}ValueError('in OCDBT database')", f"{never}ValueError('other')", 'OCDBT']
    records = [logger.makeRecord('asyncio', logging.ERROR, '', 1, text, (), None) for text in texts]
    assert [bool(logger.filter(record)) for record in records] == [False, True, True]
