"""Renders a page for each module from its docstrings: python docs/api.py FOLDER.

`make docs-api` runs it. Commands describe themselves with --help, configs with --list.
"""

import pathlib
import pkgutil
import sys
import warnings
from unittest import mock

import pdoc

import moddepth_jax

warnings.simplefilter('error')
warnings.filterwarnings('ignore', message='.*ArrayTree')  # optax names it without a definition
for name in ('jax_triton', 'triton', 'triton.language'):  # need a GPU; one benchmark has them
    sys.modules.setdefault(name, mock.MagicMock())
for name in moddepth_jax.__all__:  # pdoc reads names that were imported
    setattr(moddepth_jax, name, getattr(moddepth_jax, name))
moddepth_jax.__all__ += [module.name for module in pkgutil.iter_modules(moddepth_jax.__path__)]
pdoc.render.configure(docformat='google', footer_text='moddepth-jax')
pdoc.pdoc('moddepth_jax', 'kernels_pallas', output_directory=pathlib.Path(sys.argv[1]))
