"""Two processes share a checkpoint that one process, or another mesh, restores bit for bit."""

import os

import jax
import jax.numpy as jnp
import pytest

from moddepth_jax.training.checkpoint import Checkpoints, state_sha256
from tests.two_processes import on_two_processes

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
    return {'step': jnp.asarray(7), 'key': key, 'w': jax.random.normal(key, (8, 100)),
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
    """Each writes its parts of arrays that span both; both see the manifest when `wait` returns.

    Donated at once, the saved state stays as it was; the key, and a leaf without elements, too.
    """
    first, second = on_two_processes(SAVED_BY_TWO, str(tmp_path))
    assert first == second
    assert first['spans'] and first['manifest'] and first['placed']
    assert (first['step'], first['metadata']) == (7, {'a': 1})
    key = jax.random.key(7)
    state = {
        'step': jnp.asarray(7),
        'key': key,
        'w': jax.random.normal(key, (8, 100)),
        'half': jnp.ones((4, 2), jnp.bfloat16),
        'empty': jnp.zeros((0, 4)),
    }
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        restored, step, _ = checkpoints.restore(jax.eval_shape(lambda: state))
    assert step == 7 and not checkpoints.skipped and os.listdir(tmp_path) == ['7']
    assert state_sha256(restored) == first['saved'] == first['restored']


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
            told = not getattr(error, 'reported_elsewhere', False)
            found['lines'].append([step, told, error.everywhere, str(error)])
            found['left'] = sorted(os.listdir(folder))
    restored, found['step'], _ = checkpoints.restore(state(0))
    found['values'] = sorted({float(x) for leaf in jax.tree.leaves(restored)
                              for shard in leaf.addressable_shards
                              for x in shard.data.reshape(-1)[:1]})
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize('broken', [0, 1])
def test_a_part_that_one_process_cannot_write_fails_the_save_of_both(tmp_path, broken):
    """Both meet a SaveError of one line that process 0 tells; only that step is lost, and removed.

    The step before stays good, and both go on to save and restore the step after.
    """
    both = on_two_processes(FAILS_ON_ONE, str(tmp_path), str(broken))
    for process, found in enumerate(both):
        ((step, told, everywhere, line),) = found['lines']
        assert (step, told, everywhere) == (2, process == 0, True)
        assert f'process {broken}' in line and 'No space left on device' in line, line
        assert '\n' not in line
        assert (found['left'], found['step'], found['values']) == (['1'], 3, [3.0])
    assert 'checkpoint 2 in ' in both[0]['lines'][0][3]
    assert 'steps kept: 1' in both[0]['lines'][0][3]
    assert sorted(os.listdir(tmp_path)) == ['1', '3']
