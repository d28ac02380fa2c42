"""Two processes share a checkpoint that one process, or another mesh, restores bit for bit."""

import os

import jax
import jax.numpy as jnp

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
