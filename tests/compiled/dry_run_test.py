"""A dry run reports the cost of a step, checked by hand for one device and for estimates."""

import jax
import pytest

from moddepth_jax.compiled.collectives import Collective
from moddepth_jax.compiled.dry_run import Hardware, bandwidth, dry_run, estimate, warnings_of
from moddepth_jax.compiled.program import Occurrence
from moddepth_jax.hparams import from_config
from moddepth_jax.model.flops import train_step_flops
from moddepth_jax.training.mesh import make_mesh
from moddepth_jax.training.train_step import init_state

MADE_UP = Hardware(flops=1e6, node=4, within=1000.0, across=100.0, source='nowhere')


@pytest.fixture(scope='module')
def alone(tiny_config):
    """The hyper-parameters of a small dense model, and its dry run on one device."""
    hparams = from_config(tiny_config(**{'model.qk_norm': 'head'}))
    return hparams, dry_run(hparams, make_mesh('data=1'))


def test_one_device_holds_everything_and_sends_nothing(alone):
    """Its bytes are those of the arrays, and outputs reuse the memory of arguments."""
    hparams, found = alone
    state = jax.eval_shape(lambda: init_state(hparams, 4))
    held = {
        'parameters': sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params)),
        'optimizer': sum(leaf.size * 4 for leaf in jax.tree.leaves(state.optimizer_state)),
    }
    assert found['bytes'] | held == found['bytes']
    batch = 3 * 4 * hparams.data.batch_size * hparams.data.sequence_length
    everything = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert found['bytes']['argument'] == everything + batch
    assert everything - 64 <= found['bytes']['alias'] <= everything
    assert found['bytes']['peak'] >= found['bytes']['argument'] + found['bytes']['temp']
    assert found['collectives'] == [] and found['sent_bytes'] == 0
    assert found['flops_per_byte'] is None and found['warnings'] == []
    assert found['parameters'] == held['parameters'] // 4


def test_products_of_the_program_are_those_of_the_trace(alone):
    """Both include recomputation and nothing else; the counted FLOPs are fewer."""
    hparams, found = alone
    assert found['flops']['counted'] == train_step_flops(hparams) < found['flops']['executed']
    assert found['split'] == pytest.approx(1, abs=0.05)
    assert found['flops']['in_branches'] == 0


@pytest.mark.parametrize(
    ('group', 'rate'),
    [
        ((0, 1, 2, 3), 1000),  # one node
        ((4, 5), 1000),
        ((0, 4, 8, 12), 100),  # one device in each of four nodes
        ((0, 1, 4, 5), 200),  # two in each of two
        (tuple(range(64)), 400),
        ((3, 4), 100),  # neighbours of different nodes
    ],
)
def test_the_slowest_link_of_a_ring_counts(group, rate):
    """Within a node, its links; across nodes, as many network links as devices in the node."""
    assert bandwidth(group, MADE_UP) == rate


def test_an_estimate_is_a_division():
    """FLOPs and bytes are divided by the vendor's numbers; reduce-scatters save half.

    Regression: of groups of 3 on nodes of 4, only the first counted, which stays within a node.
    """
    near = Occurrence(Collective('all-gather', ('fsdp',), ((0, 1),), sent_bytes=500.0), times=4)
    far = Collective('all-reduce', ('data',), ((0, 4),), sent_bytes=300.0, sliced_bytes=200.0)
    mixed = Collective('all-gather', ('tensor',), ((0, 1, 2), (3, 4, 5)), sent_bytes=300.0)
    found = estimate(2e6, [near, Occurrence(far), near, Occurrence(mixed)], MADE_UP)
    assert found == {
        'compute': 2.0,
        'collectives': {'fsdp': 4.0, 'data': 3.0, 'tensor': 2.0},
        'sliced': 1.0,
        'source': 'nowhere',
    }


def test_warnings_of_the_compiler_are_kept():
    """Each once, without time and source location; alarms about slow compilation are left out."""
    line = 'W1122 04:15:00.123456   77 spmd_partitioner.cc:652] [spmd] Involuntary full remat [1]'
    slow = 'E1122 04:15:00.1 7 slow_operation_alarm.cc:73] The operation took 3m'
    log = f'I1122 04:15:00.1 7 a.cc:1] starts\n{line}\n{slow}\n{line}\n  more of it\n'
    assert warnings_of(log) == ['[spmd] Involuntary full remat [1]']
