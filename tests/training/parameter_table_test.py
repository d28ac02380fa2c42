"""Where a model's parameters are: every one is counted once, in the part that it belongs to."""

import jax
import pytest

from moddepth_jax.hparams import from_config
from moddepth_jax.training.summary import parameter_lines, parameter_parts
from moddepth_jax.training.train_step import init_state


@pytest.fixture(scope='module')
def params(tiny_config):
    """Of six layers, three of them routed, with slots of MoDA that the last layer does not write.

    Layers fall into several runs, so that a part's layers have to be summed over them.
    """
    changes = {'num_layers': 6, 'routing.router': 'learned', 'depth.stream': 'moda'}
    hparams = from_config(tiny_config(**{f'model.{name}': v for name, v in changes.items()}))
    return jax.eval_shape(lambda: init_state(hparams, 1)).params


def test_each_parameter_is_counted_once(params):
    assert sum(part.parameters for part in parameter_parts(params)) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )


def test_parts_name_their_layers_and_arrays(params):
    found = {part.name: part for part in parameter_parts(params)}
    layers = {name: part.layers for name, part in found.items()}
    assert layers == {
        'embedding': 0, 'head': 0, 'attention': 6, 'mlp': 6, 'norms': 6, 'router': 3,
        'predictor': 3, 'stream': 5,
    }  # fmt: skip
    assert set(found['attention'].arrays) == {'query', 'key', 'value', 'out'}
    mlp = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params)
           if 'mlp' in [getattr(key, 'key', None) for key in path]]  # fmt: skip
    assert found['mlp'].parameters == sum(mlp)


def test_lines_fall_by_size_and_end_with_the_sum(params):
    header, *rows, last = parameter_lines(params)
    sizes = [int(row[20:].split()[0].replace(',', '')) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert f'{sum(sizes):,}' in last and 'share' in header
    assert all(line == line.rstrip() for line in (header, *rows, last))
