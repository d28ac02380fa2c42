"""Trains a model from a config. The same command resumes a run that stopped.

python -m launch.train --config=configs/mod_isoflop.py
python -m launch.train --config=configs/mod_isoflop.py:size=8x192,budget=1e14 --workdir=runs/big
python -m launch.train --config=configs/mod_isoflop.py --mesh=data=2,fsdp=2,tensor=2
python -m launch.train --config=configs/moda_1b5.py --mesh=data=4,fsdp=8 --dry_run
python -m launch.train --config=configs/tiny.py --workdir=runs/traced --profile=20:25

Several processes with the same command form one run. Start them with SLURM, with launch.local, or
with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import dataclasses
import pathlib
import signal

from absl import flags

from launch import cli, config_file, dry_run
from moddepth_jax.data import sources
from moddepth_jax.hparams import check_values, flag_values, from_config

CONFIG = cli.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run. Default: runs/NAME.')
MESH = cli.define_mesh('Devices by axis, such as data=2,fsdp=4. Default: all as data.', default='')
DRY_RUN = flags.DEFINE_boolean('dry_run', False, 'Compile for fake devices, print costs, exit.')
PROFILE = flags.DEFINE_string('profile', None, 'Steps to profile, START:STOP, such as 20:25.')
flags.register_validator('profile', lambda steps: not steps or flag_values.parse_steps(steps))
WANDB = flags.DEFINE_string('wandb', '', 'Project of Weights & Biases; needs the extra [wandb].')
flags.adopt_module_key_flags(dry_run)


@flags.validator('config')
def _check_config(config):
    """Check before most of the imports and, where possible, before JAX is imported."""
    check_values(config)
    if not DRY_RUN.value and cli.is_alone():
        sources.check_source(config.data.source)
    return from_config(config) is not None


def main(_):
    import jax

    from moddepth_jax.analysis.report import report_programs, write_report
    from moddepth_jax.training import multihost
    from moddepth_jax.training.checkpoint import to_host
    from moddepth_jax.training.loop import train

    hparams = from_config(CONFIG.value)
    if DRY_RUN.value:
        return dry_run.run(hparams, MESH.value)
    profiled = None if PROFILE.value is None else flag_values.parse_steps(PROFILE.value)
    multihost.initialize(saves=True)
    workdir = WORKDIR.value or pathlib.Path('runs') / cli.config_name()
    cli.enable_compilation_cache(hparams)
    source = config_file.source(flags.FLAGS['config'].config_filename)
    ahead = None if multihost.is_initialized() else report_programs
    run = train(hparams, workdir, MESH.value, profiled, WANDB.value, source, ahead)
    if run.signal is not None:
        return 128 + signal.Signals[run.signal]
    if not multihost.is_initialized():
        with jax.set_mesh(run.state.step.sharding.mesh):
            write_report(run)
        return 0
    # Only process 0 writes the report, on one device, which must hold the model.
    model = {'params': run.state.params, 'averages': run.state.averages}
    state = run.state.replace(**jax.tree.map(to_host, model))
    multihost.run_on_leader(lambda: write_report(dataclasses.replace(run, state=state)))
    return 0


if __name__ == '__main__':
    cli.run(main)
