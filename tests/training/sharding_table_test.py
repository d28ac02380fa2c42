"""The table of what a mesh splits adds up, and says what is whole."""

import jax
import pytest
from jax.sharding import AbstractMesh

from moddepth_jax.hparams import from_config
from moddepth_jax.model.sharding import AXES
from moddepth_jax.training.mesh import (
    device_bytes,
    mesh_lines,
    sharding_lines,
    sharding_rows,
    unsharded_fraction,
)
from moddepth_jax.training.train_step import init_state


@pytest.fixture(scope='module')
def state(tiny_config):
    """Shapes of a routed model whose vocabulary of 257 tensor cannot split."""
    hparams = from_config(tiny_config(**{'model.routing.router': 'learned'}))
    return jax.eval_shape(lambda: init_state(hparams, 4))


def mesh_of(**sizes):
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)


def test_rows_add_up_to_the_model(state):
    """All parameters are in one row each; a device's bytes are those of its parts."""
    total = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    for sizes in ({'data': 2}, {'fsdp': 4}, {'fsdp': 2, 'tensor': 2}):
        rows = sharding_rows(mesh_of(**sizes), state.params)
        assert sum(row.parameters for row in rows) == total
        held = sum(row.device_bytes for row in rows)
        assert held == device_bytes(mesh_of(**sizes), state.params)
        whole = unsharded_fraction(mesh_of(**sizes), state.params)
        parts = 4 if 'fsdp' in sizes else 1
        assert held == pytest.approx(4 * total * (whole + (1 - whole) / parts), rel=1e-6)


def test_a_row_says_over_what_its_axes_are_split(state):
    """Layers of all runs, routed or not, are one name."""
    rows = {row.name: row for row in sharding_rows(mesh_of(fsdp=4, tensor=2), state.params)}
    assert rows['attention/query/kernel'].split == '(whole, fsdp, tensor, whole)'
    assert rows['embedding'].split == '(whole, fsdp+tensor)'
    assert rows['attention_norm/scale'].split == 'whole'
    assert rows['embedding'].device_bytes == 257 * 32 * 4 // 8


def test_lines_are_as_wide_as_a_terminal(state):
    """One device says nothing; data alone one line; else the table, with the share left whole."""
    assert mesh_lines(mesh_of(), state) == []
    (line,) = mesh_lines(mesh_of(data=4), state)
    assert line.startswith('mesh      data=4: ')
    lines = mesh_lines(mesh_of(data=2, fsdp=2), state)
    assert lines[0].startswith('mesh      data=2 x fsdp=2: ') and max(map(len, lines)) < 100
    assert lines[1:] == [' ' * 10 + line for line in sharding_lines(mesh_of(fsdp=2), state.params)]
    assert lines[-1].endswith('of the parameters whole on every device')
