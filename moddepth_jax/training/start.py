"""What a run begins with: the state of its newest good checkpoint, or a new one."""

import jax

from moddepth_jax.data.pipeline import check_fingerprint
from moddepth_jax.hparams import Hparams
from moddepth_jax.training import agreement, processes
from moddepth_jax.training.saved_run import restore_state
from moddepth_jax.training.sharding import state_shardings
from moddepth_jax.training.stages import stage_at
from moddepth_jax.training.summary import versions
from moddepth_jax.training.train_step import init_state


def start(hparams: Hparams, num_steps: int, dataset, mesh, checkpoints) -> tuple:
    """The newest good state or that before step 0, where `state_shardings` wants it.

    Every process of a run has to call it.

    Returns:
      The TrainState; the dict that its next checkpoint carries; lines of news for the user.

    Raises:
      ValueError: one line, for a checkpoint of other data, steps or stage.
    """
    processes.meet(mesh)
    initial = jax.jit(lambda: init_state(hparams, num_steps))
    abstract = jax.eval_shape(initial)
    shardings = state_shardings(mesh, abstract)
    abstract = jax.tree.map(lambda leaf, to: leaf.update(sharding=to), abstract, shardings)
    here = versions() | {'processes': str(jax.process_count())}
    here |= {f'mesh axis {axis}': str(size) for axis, size in mesh.shape.items()}
    metadata = {
        'fingerprint': dataset.fingerprint,
        'num_steps': num_steps,
        'versions': here,
        'seconds': 0.0,
        'train_loss': None,
    }
    restored = restore_state(checkpoints, abstract)
    if restored is None:
        return jax.jit(initial, out_shardings=shardings)(), metadata, checkpoints.skipped
    state, step, stored = restored
    agreement.from_first(lambda: _check(stored, metadata, hparams, step))
    news = [*checkpoints.skipped, f'resuming after step {step}']
    if abstract.averages and not state.averages:
        news.append('no averages in the checkpoint: the rule threshold cannot run')
    for name, was in stored['versions'].items():
        if here.get(name) != was:
            news.append(f'{name} was {was}, is {here.get(name)}: bits may differ from here on')
    carried = {name: stored[name] for name in ('seconds', 'train_loss')}
    return state, metadata | carried, news


def _check(stored, metadata, hparams, step):
    """Raises ValueError where a run cannot go on from what a checkpoint says of itself."""
    check_fingerprint(stored['fingerprint'], metadata['fingerprint'])
    num_steps = metadata['num_steps']
    if stored['num_steps'] != num_steps:
        found = f'{stored["num_steps"]} steps when it began and {num_steps} now'
        raise ValueError(f'this run was to take {found}: FLOPs are counted otherwise; start anew')
    stage = stage_at(hparams, num_steps, step - 1)._asdict()
    if stored.get('stage', stage) != stage:
        raise ValueError(f'this run was in stage {stored["stage"]} and is in {stage}; start anew')
