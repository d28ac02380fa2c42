"""A command that does what --act says, and config files that are broken in one way."""

import pathlib

TOY = '''"""A toy command.

Example:
  python -m launch.toy --config=configs/base.py --workdir=runs/base
"""
import logging, os, sys, time
from absl import flags
from absl import logging as absl_logging
import numpy as np
from jax._src import xla_bridge
from launch import cli

CONFIG = cli.define_config()
flags.DEFINE_string('workdir', None, 'Directory of the run.')
flags.DEFINE_integer('max_tokens', 8, 'Tokens to write.')
flags.DEFINE_enum('routing', 'top_c', ['top_c', 'dense'], 'Who enters.')
flags.DEFINE_string('act', '', 'What to do.')


def main(argv):
    act = flags.FLAGS.act
    if act == 'bad value':
        raise ValueError('model.num_layers=0:\\n  must be 1 or more')
    if act == 'no file':
        open('/no/such/file')
    if act == 'forbidden':
        raise PermissionError(13, 'Permission denied', '/locked/file')
    if act == 'bug':
        raise RuntimeError('a bug')
    if act == 'no message':
        one, two = (1, 2, 3)
    if act == 'compiled library':
        np.random.default_rng(-1)
    if act == 'library':
        np.broadcast_shapes((2,), (3,))
    if act == 'status':
        return 3
    if act == 'wait':
        print('waiting', flush=True)
        time.sleep(60)
    if act == 'noise':
        absl_logging.info('quiet')
        absl_logging.warning('quiet')
        logging.getLogger('grain').info('quiet')
        logging.getLogger('moddepth_jax').warning('to be seen')
    model = CONFIG.value.model
    print(cli.config_name(), model.num_layers, model.windows, model.use_bias,
          os.environ.get('NPROC'), xla_bridge.backends_are_initialized())


if __name__ == '__main__':
    cli.run(main)
'''

CHANGED = """from configs import base
def get_config(text=None):
    config = base.get_config()
    {}
    return config
"""
CONFIGS = {
    'text.py': CHANGED.format('config.model.num_layers = int(text)').replace('=None', ''),
    'mistyped.py': CHANGED.format('config.modle.num_layers = 3'),
    'ill_typed.py': CHANGED.format('config.model.num_layers = "three"'),
    'refuses.py': CHANGED.format('raise ValueError("flop_budget=-1:\\n must be 0 or more")'),
    'returns.py': 'def get_config():\n    return {"seed": 0}\n',
    'syntax.py': 'def get_config()\n    return 1\n',
    'unreadable.py': 'def get_config():\n    open("/no/such/words")\n',
    'buggy.py': 'def get_config():\n    return 1 / 0\n',
    'imports.py': 'import no_such_module\n',
}


PRELOAD = ('launch.cli', 'launch.config_file', 'jax._src.xla_bridge')


def make_toy(folder: pathlib.Path) -> str:
    (folder / 'toy.py').write_text(TOY)
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    return str(folder / 'toy.py')
