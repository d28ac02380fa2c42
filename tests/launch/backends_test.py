"""launch.backends: the page shows what the code chooses for each config and platform."""

import pathlib
import re
import types

import jax
import pytest

from configs import mod_moda
from kernels_pallas import backends as kernel_backends
from launch import backends, listing
from moddepth_jax.hparams import from_config
from moddepth_jax.training.train_step import init_state, train_step

# The page is for the JAX that GPU results are measured with; older ones refuse more.
for_the_page = pytest.mark.skipif(
    jax.__version_info__ < backends.OLDEST_JAX, reason='the page is for a newer JAX: make test-next'
)
PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'backends.md'


def rows(table):
    notes = dict(re.findall(r'^(\d+)\. (.*)$', table, re.MULTILINE))

    def spelled(match):
        return '; '.join(notes[number] for number in match[1].split(', '))

    lines = [line for line in table.splitlines() if line.startswith('| ')][1:]
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    return [[re.sub(r'\(([\d, ]+)\)$', spelled, cell) for cell in row] for row in cells]


def written():
    return PAGE.read_text().split(backends.BEGIN)[1].split(backends.END)[0].strip()


@for_the_page
@pytest.mark.parametrize('name', ['tiny', 'mod_moda', 'moda_700m'])
def test_the_page_shows_the_chosen_backends(name):
    """If this fails, run: python -m launch.backends --page=docs/backends.md"""
    found = rows(backends.table([name]))
    assert found and found == [row for row in rows(written()) if row[0] == name]


@for_the_page
@pytest.mark.slow
def test_the_page_has_the_table_of_all_configs():
    assert backends.table(list(listing.configs())) == written()


def test_the_page_is_not_written_by_an_older_jax(monkeypatch, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(before := f'{backends.BEGIN}\n{backends.END}\n')
    monkeypatch.setattr(backends, 'OLDEST_JAX', (99, 1, 0))
    monkeypatch.setattr(backends, 'PAGE', types.SimpleNamespace(value=str(page)))
    with pytest.raises(ValueError, match='must run with jax 99.1.0 or newer'):
        backends.main(['backends', 'tiny'])
    assert page.read_text() == before


def test_every_config_is_on_the_page():
    names = list(listing.configs())
    assert {'base', 'tiny', 'moda_1b5'} <= set(names) and 'sizes' not in names
    assert list(dict.fromkeys(row[0] for row in rows(written()))) == names


def test_models_for_a_gpu_have_kernels_for_all_of_their_attention():
    """On Hopper, of the configs in bfloat16: the sequence unmeasured is cuDNN's, and with slots the
    fused kernels of both passes are among the candidates. The others are for a laptop: float32.
    """
    hopper = {'with slots': set(), 'without': set()}
    for name, attention, _, cell, _ in rows(written()):
        if 'float32' in attention:
            continue
        slots = ' slots' in attention
        hopper['with slots' if slots else 'without'].add(name)
        first, *others = re.findall('`([^`]+)`', cell)
        assert first.startswith('cudnn / '), name
        fused = 'mosaic_gpu / mosaic_gpu_fused / xla' if slots else 'mosaic_gpu / - / xla'
        assert fused in others, name
    assert hopper == {
        'with slots': {'moda_24l', 'moda_48l', 'moda_700m', 'moda_1b5', 'openmythos_moda'},
        'without': {'mod_isoflop_gpu', 'mod_isoflop_paper'},
    }


@pytest.mark.slow
def test_shapes_are_those_of_the_train_step():
    """They include slots, gathered rows, and everything else in a trace of the step."""
    hparams = from_config(mod_moda.get_config())
    state = jax.eval_shape(lambda: init_state(hparams, 10))
    row = jax.ShapeDtypeStruct((hparams.data.batch_size, hparams.data.sequence_length), 'int32')
    batch = {name: row for name in ('tokens_BT', 'labels_BT', 'segment_ids_BT')}
    with kernel_backends.recorded() as seen:
        jax.eval_shape(train_step, state, batch)
    found = backends.attentions('mod_moda')
    assert set(found) == set(seen) and len(found) == len(set(found)) > 1
