"""Checkpoints come back bit for bit or not at all, whatever happens to processes or the disk.

Kills and damaged files: tests/faults, tests/launch/resume_test.py.
"""

import logging
import os
import resource
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moddepth_jax.training import checkpoint
from moddepth_jax.training.checkpoint import Checkpoints, SaveError, state_sha256
from tests.data.prepared_text import refusal
from tests.two_processes import on_two_processes


def make_state(seed):
    """Make leaves of several kinds: AdamW's tuples, bfloat16, int32, bool."""
    key = jax.random.key(seed)
    params = {
        'dense': {'kernel': jax.random.normal(key, (8, 4)), 'bias': jnp.full((4,), seed + 0.5)},
        'half': jax.random.normal(key, (4, 3)).astype(jnp.bfloat16),
    }
    optimizer_state = optax.adamw(1e-3).init(params)
    optimizer_state = jax.tree.map(lambda x: x + jnp.asarray(seed, x.dtype), optimizer_state)
    step, flags = jnp.asarray(seed, jnp.int32), jnp.asarray([True, False])
    return {'step': step, 'params': params, 'optimizer_state': optimizer_state, 'flags': flags}


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def save_steps(directory, *steps):
    with Checkpoints(directory, keep=len(steps)) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {'step': step})


def flip_bit(directory):
    files = [path for path in directory.rglob('*') if path.is_file()]
    file = max(files, key=lambda path: (path.name != 'manifest.json', path.stat().st_size))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_round_trip_is_bit_equal_with_structure_and_metadata(tmp_path):
    state = make_state(7)
    metadata = {'corpus_sha256': 'ab', 'config': {'windows': [0, 16]}, 'seconds': 1.5}
    with Checkpoints(tmp_path / 'checkpoints', keep=2) as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        checkpoints.save(7, state, metadata)
        restored, step, found = checkpoints.restore(abstract(state))
    assert (step, found) == (7, metadata)
    assert (tmp_path / 'checkpoints' / '7' / 'manifest.json').exists()
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert (old.dtype, old.shape, old.sharding) == (new.dtype, new.shape, new.sharding)
    assert state_sha256(restored) == state_sha256(state)


@pytest.mark.parametrize('name', ['run[1]', 'a\\b', 'a?b *', '{100%}:~#ü\n', '\udcff'])
def test_a_directory_of_any_name_is_read_also_as_another(tmp_path, name):
    folder, state = tmp_path / name / 'checkpoints', make_state(2)
    save_steps(folder, 1, 2)
    for directory in (folder, shutil.copytree(folder, tmp_path / 'plain')):
        with Checkpoints(directory, keep=2) as checkpoints:
            restored, step, _ = checkpoints.restore(abstract(state))
            assert (step, checkpoints.steps()) == (2, [1, 2])
        assert state_sha256(restored) == state_sha256(state)
    assert not [path for path in folder.rglob('*') if path.is_symlink()]


@pytest.mark.parametrize(
    'change',
    [
        lambda state: state | {'step': state['step'] + 1},
        lambda state: state | {'step': state['step'].astype(jnp.uint32)},
        lambda state: state | {'flags': state['flags'][None]},
        lambda state: {'renamed' if k == 'flags' else k: v for k, v in state.items()},
    ],
)
def test_digest_depends_on_value_dtype_shape_and_path(change):
    assert state_sha256(make_state(7)) == state_sha256(make_state(7))
    assert state_sha256(change(make_state(7))) != state_sha256(make_state(7))


def test_later_donated_steps_do_not_change_a_save(tmp_path):
    """The state may be donated at once: its buffer is reused, and the disk has the old values."""
    step = jax.jit(lambda state: {'w': state['w'] + 1}, donate_argnums=0)
    state, reused = {'w': jnp.zeros((3_000_000,))}, []
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for i in range(4):
            pointer = state['w'].unsafe_buffer_pointer()
            checkpoints.save(i, state, {})
            state = step(state)
            reused.append(state['w'].unsafe_buffer_pointer() == pointer)
            restored, found, _ = checkpoints.restore(abstract(state))
            assert found == i and np.all(np.asarray(restored['w']) == i)
    assert all(reused)


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
    save_steps(tmp_path, 1, 2)
    target = abstract(make_state(0))
    target['params']['dense'][path] = leaf
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(target, abstract(make_state(0)))[1] == 2
        monkeypatch.setattr(checkpoints, '_read', lambda *_: pytest.fail('it was read'))
        message = refusal(checkpoints.restore, target, target)
    assert f'params.dense.{path} is {values[0]} in the checkpoint and {values[1]}' in message
    assert 'checkpoint 2 ' in message


def test_only_the_newest_good_checkpoints_stay(tmp_path):
    """Damaged and unfinished ones do not count, and are removed when a newer good one is saved."""
    save_steps(tmp_path, 1, 2, 3)
    flip_bit(tmp_path / '3')
    (tmp_path / '4').mkdir()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(abstract(make_state(0)))[1] == 2
        unfinished, damaged = checkpoints.skipped
        assert unfinished.startswith('checkpoint 4 ') and 'no manifest.json' in unfinished
        assert damaged.startswith('checkpoint 3 ') and 'sha256' in damaged
        checkpoints.save(2, make_state(100), {})  # a good one is not written again
        assert int(checkpoints.restore(abstract(make_state(0)))[0]['step']) == 2
        checkpoints.save(5, make_state(5), {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 5]
        assert sorted(os.listdir(tmp_path)) == ['2', '5']
        checkpoints.save(6, make_state(6), {})
        checkpoints.wait()
        assert sorted(os.listdir(tmp_path)) == ['5', '6']


def test_a_failed_write_is_one_line_and_costs_only_its_own_step(tmp_path, caplog, capfd):
    """A failed write is reported by wait, or by the next save, which is written nevertheless."""
    state = {'w': jax.random.normal(jax.random.key(0), (200_000,))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            checkpoints.save(2, state, {})
            with pytest.raises(SaveError) as at_next_save:
                checkpoints.save(3, state, {})
            with pytest.raises(SaveError) as at_wait:
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


def test_a_failed_save_does_not_hide_the_error_that_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, 'write_manifest', lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match='of the run') as caught:
        with Checkpoints(tmp_path, keep=3) as checkpoints:
            checkpoints.save(1, make_state(1), {})
            raise RuntimeError('of the run')
    assert 'checkpoint 1 ' in caught.value.__notes__[0]
    with pytest.raises(SaveError, match='checkpoint 1 .*kept: none'):
        with Checkpoints(tmp_path, keep=3) as checkpoints:
            checkpoints.save(1, make_state(1), {})


FAILS_ON_ONE = """
import json, os, sys
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import serialization
from moddepth_jax.training.checkpoint import Checkpoints, SaveError

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
            found['lines'].append(
                [step, not error.reported_elsewhere, error.on_all_processes, str(error)])
            found['kept'] = sorted(os.listdir(folder))
    restored, found['step'], _ = checkpoints.restore(state(0))
    found['values'] = sorted({float(x) for leaf in jax.tree.leaves(restored)
                              for shard in leaf.addressable_shards
                              for x in shard.data.reshape(-1)[:1]})
print(json.dumps(found))
"""


@pytest.mark.parametrize('broken', [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_part_that_one_process_cannot_write_fails_the_save_of_both(tmp_path, broken):
    """Both raise a SaveError of one line that process 0 reports; only that step is lost.

    What both have saved is restored by both, and by this process alone.
    """
    folder = tmp_path / ('run[1]' if broken else 'run')
    both = on_two_processes(FAILS_ON_ONE, str(folder), str(broken))
    for process, found in enumerate(both):
        ((step, reports, on_all, line),) = found['lines']
        assert (step, reports, on_all) == (2, process == 0, True)
        assert f'process {broken}' in line and 'No space left on device' in line, line
        assert '\n' not in line
        assert (found['kept'], found['step'], found['values']) == (['1'], 3, [3.0])
    assert 'checkpoint 2 in ' in both[0]['lines'][0][3]
    assert 'steps kept: 1' in both[0]['lines'][0][3]
    assert sorted(os.listdir(folder)) == ['1', '3']
    with Checkpoints(folder, keep=2) as checkpoints:
        restored, *_ = checkpoints.restore({name: jnp.zeros((8, 100)) for name in 'abc'})
    assert all((leaf == 3).all() for leaf in restored.values())


def test_errors_of_others_that_python_cannot_raise_pass(monkeypatch):
    passed = []
    monkeypatch.setattr(sys, 'unraisablehook', passed.append)
    for name in ('absl', 'asyncio'):
        monkeypatch.setattr(logging.getLogger(name), 'filters', [])
    checkpoint.silence_orbax.__wrapped__()
    closed = RuntimeError('Event loop is closed')
    for error, blamed in ((closed, None), (closed, print), (ValueError('other'), None)):
        found = {'exc_type': type(error), 'exc_value': error, 'object': blamed}
        sys.unraisablehook(types.SimpleNamespace(**found))
    assert [found.object for found in passed] == [print, None]
