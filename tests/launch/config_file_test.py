"""A stored config.json is read as a config, and configs of the installed package are found."""

import dataclasses
import json
import pathlib

import pytest
from absl import flags

from configs import base, mor
from launch import config_file
from moddepth_jax.hparams import from_config
from moddepth_jax.training.run_dir import open_workdir
from tests.launch.toy_command import CHANGED


def stored(tmp_path, config):
    """The path of config.json of a run of `config`, and its hyper-parameters."""
    hparams = from_config(config)
    open_workdir(tmp_path / 'run', dataclasses.asdict(hparams))
    return str(tmp_path / 'run' / 'config.json'), hparams


def with_knobs(config, **knobs):
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({f'model.{name}': value for name, value in knobs.items()})
    return from_config(config).model


@pytest.mark.parametrize(
    'changes',
    [
        {'model.windows': (8, 0), 'model.experts.choice': 'token'},
        {'model.routing.router': 'norm', 'model.routing.causal_rule': 'threshold'},
        {'model.depth.stream': 'moda', 'model.depth.slot_keys': 'unrotated'},
        {'model.routing.gate': 'sigmoid', 'model.depth.gradient_dtype': 'model'},
    ],
    ids=str,
)
def test_a_stored_config_has_the_knobs_of_its_run(changes, tiny_config, tmp_path):
    """Every knob has its value and the type of configs/base.py, so that flags can change it."""
    path, hparams = stored(tmp_path, tiny_config(**changes))
    config = config_file.load(path)
    assert from_config(config) == hparams
    assert set(config_file.knob_names(config)) == set(config_file.knob_names(base.get_config()))
    assert type(config.model.windows) is tuple


def test_auto_is_resolved_again_after_changes(tiny_config, tmp_path):
    """The config of a dense run accepts any router and stream without changes of other knobs."""
    config = config_file.load(stored(tmp_path, tiny_config())[0])
    for router, gate in (('learned', 'raw'), ('norm', 'none'), ('random', 'none')):
        assert with_knobs(config, **{'routing.router': router}).routing.gate == gate
    moda = with_knobs(config, **{'depth.stream': 'moda'}).depth
    assert (moda.slots, moda.slot_keys, moda.gradient_dtype) == (
        'attention+ffn',
        'rotated',
        'float32',
    )


def test_the_update_of_routed_loops_is_resolved_again(tmp_path):
    """Regression: the stored `output` refused the same model without its router."""
    config = config_file.load(stored(tmp_path, mor.get_config())[0])
    assert with_knobs(config).routing.loop_update == 'output'
    assert not with_knobs(config, **{'routing.router': 'none'}).routed_layers


def test_a_bad_config_json_is_one_line(tiny_config, tmp_path):
    path, _ = stored(tmp_path, tiny_config())
    content = json.loads(pathlib.Path(path).read_text())
    for name, text, words in (
        ('other.json', '{}', 'must be FILE.py or the config.json of a run'),
        ('config.json', '{}', "holds no 'schema_version'; must be an integer"),
        ('config.json', json.dumps(content | {'schema_version': 99}), 'schema_version=99'),
        ('config.json', json.dumps({**content, 'config': {'modle': {}}}), 'modle={}: no such knob'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(flags.Error) as caught:
            config_file.load(str(tmp_path / name))
        assert words in str(caught.value) and '\n' not in str(caught.value)
    with pytest.raises(flags.Error, match='holds no config.json'):
        config_file.load(str(tmp_path / 'nowhere' / 'config.json'))


def test_configs_of_the_package_are_found_from_anywhere(tmp_path, monkeypatch):
    """configs/NAME.py if the current directory has none; its own file is preferred."""
    monkeypatch.chdir(tmp_path)
    assert config_file.load('configs/tiny.py').model.num_layers > 0
    with pytest.raises(flags.Error, match='configs/tyni.py: no such Python file'):
        config_file.load('configs/tyni.py')
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs' / 'tiny.py').write_text(CHANGED.format('config.model.num_layers = 77'))
    assert config_file.load('configs/tiny.py').model.num_layers == 77
