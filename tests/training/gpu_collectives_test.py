"""The communication of a sharded step that is compiled for eight H200s, without a GPU."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from moddepth_jax.hparams import from_config
from moddepth_jax.hparams.flag_values import AXES
from moddepth_jax.training.mesh import abstract_on_mesh, batch_sharding, replicated
from moddepth_jax.training.train_step import init_state, train_step
from tests.devices import collectives
from tests.kernels import hopper

B, T, D, V = 8, 256, 512, 768
SIZES = {
    'model.num_layers': 4,
    'model.d_model': D,
    'model.d_ff': 1024,
    'model.head_dim': 64,
    'model.num_heads': 8,
    'model.num_kv_heads': 8,
    'model.vocab_size': V,
    'model.dtype': 'bfloat16',
    'model.attention': 'xla',
    'data.batch_size': B,
    'data.sequence_length': T,
}
LEARNED = {'model.routing.router': 'learned'}


def compiled_for_hopper(hparams, sizes):
    from jax.experimental import topologies

    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    target = {'target_config': hopper.TARGET, 'topology': '1x8x1'}
    devices = topologies.get_topology_desc('eight', platform='cuda', **target).devices
    mesh = Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    state = abstract_on_mesh(mesh, jax.eval_shape(lambda: init_state(hparams, 4)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    rows = jax.ShapeDtypeStruct((B, T), 'int32', sharding=batch_sharding(mesh, B))
    batch = dict.fromkeys(('tokens_BT', 'labels_BT', 'segment_ids_BT'), rows)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
    with jax.set_mesh(mesh):
        return step.lower(state, batch).compile().as_text()


@pytest.mark.aot
@pytest.mark.parametrize('knobs', [{}, LEARNED, {'model.depth.stream': 'moda'}], ids=str)
@pytest.mark.parametrize('sizes', [{'fsdp': 8}, {'data': 2, 'fsdp': 4}], ids=str)
def test_fsdp_gathers_weights_and_scatters_their_gradients(tiny_config, sizes, knobs):
    """Matrices are gathered as bfloat16; their gradients are reduce-scattered; no row moves."""
    if reason := hopper.missing():
        pytest.skip(reason)
    moved = collectives(compiled_for_hopper(from_config(tiny_config(**SIZES | knobs)), sizes))
    assert set(moved) == {'all-gather', 'reduce-scatter', 'all-reduce'}
    shapes = set.union(*moved.values())
    sizes_moved = [set(re.findall('[0-9]+', shape.split('[')[1])) for shape in shapes]
    assert not [moved for moved in sizes_moved if {str(T), str(B * T)} & moved]
    assert {shape.split('[')[0] for shape in moved['all-gather']} == {'bf16'}
    part = D // sizes['fsdp']
    assert f'bf16[{part},1024]' in moved['reduce-scatter']
    if sizes['fsdp'] == 8:
        assert all(shape.startswith(('f32', 's32', 'u32', 'pred')) for shape in moved['all-reduce'])
