"""Programs that run once are compiled quickly."""

import jax
import pytest

from moddepth_jax.analysis import depth_mass, heatmaps, layer_walk, router_roc
from tests.model.cases import FAST

_JITTED = (
    (layer_walk, '_begin', ('hparams', 'routing')),
    (layer_walk, '_visit', ('stack', 'kind')),
    (depth_mass, '_visit', ('stack', 'kind', 'summarize')),
    (heatmaps, '_records', ('hparams', 'routing')),
    (router_roc, '_forward', ('hparams', 'routing')),
)


@pytest.fixture(scope='module', autouse=True)
def compiled_quickly():
    """Replaces the jitted functions of the measures by ones that are compiled with FAST."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, static in _JITTED:
            function = getattr(module, name).__wrapped__
            quick = jax.jit(function, static_argnames=static, compiler_options=FAST)
            patch.setattr(module, name, quick)
        yield
