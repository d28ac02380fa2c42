"""Trains a model from a config, or goes on where an earlier start of the same command stopped.

python -m launch.train --config=configs/mod_isoflop.py
python -m launch.train --config=configs/mod_isoflop.py:size=8x192,budget=1e14 --workdir=runs/big
python -m launch.train --config=configs/tiny.py --config.model.num_layers=4
"""

import pathlib
import signal

from absl import flags

from launch import command, saved

CONFIG = command.define_config()
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run. Default: runs/NAME.')
MESH = flags.DEFINE_string(
    'mesh', '', 'Devices by axis, such as data=4 or data=2,expert=4. Default: all, as data.'
)


def main(_):
    import jax

    from moddepth_jax.analysis.report import prompt_tokens, write_report
    from moddepth_jax.data.tokenizer import make_tokenizer
    from moddepth_jax.hparams import from_config
    from moddepth_jax.training.loop import train

    hparams = from_config(CONFIG.value)
    prompt_tokens(hparams, make_tokenizer(hparams.data.tokenizer))
    saved.keep_compiled(hparams)
    workdir = WORKDIR.value or pathlib.Path('runs') / command.config_name()
    run = train(hparams, workdir, MESH.value)
    if run.signal is not None:
        return 128 + signal.Signals[run.signal]
    with jax.set_mesh(run.state.step.sharding.mesh):
        write_report(run)
    return 0


if __name__ == '__main__':
    command.run(main)
