"""Loads the file of --config and checks the knobs on the command line."""

import difflib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback

from absl import flags
from ml_collections import ConfigDict

from configs import base
from moddepth_jax.hparams import ExpertsHparams, from_config
from moddepth_jax.hparams.depth import AUTO_KNOBS
from moddepth_jax.training.run_dir import CONFIG_FILE, SOURCE_FILE, build_stored, read_config

FLAGS = flags.FLAGS
_AUTO = (  # knobs whose default depends on other knobs
    *(f'model.routing.{knob}' for knob in ('gate', 'causal_rule', 'loop_update')),
    *(f'model.depth.{knob}' for knob in (*AUTO_KNOBS, 'gradient_dtype')),
)
_ELSEWHERE = {  # names in other projects, and the last part of our names for the same thing
    **dict.fromkeys(('epochs', 'max_steps', 'max_iters', 'iterations'), ['num_steps']),
    **dict.fromkeys(('layers', 'n_layer', 'num_hidden_layers'), ['layers', 'num_layers']),
    **dict.fromkeys(('hidden_size', 'n_embd', 'dim', 'width'), ['d_model']),
    **dict.fromkeys(('block_size', 'seq_len', 'context', 'context_length'), ['sequence_length']),
    **dict.fromkeys(('dataset', 'data', 'text', 'input', 'corpus'), ['data', 'source', 'text']),
    **dict.fromkeys(('output', 'output_dir', 'logdir', 'checkpoint', 'run'), ['workdir']),
    **dict.fromkeys(('gpus', 'devices', 'num_gpus'), ['mesh']),
    'model': ['workdir', 'config'],
}


class Parser(flags.ArgumentParser):
    """Converts --config to a locked ConfigDict; raises flags.Error with one line."""

    def parse(self, path):
        """Return the config of --config=`path`."""
        if FLAGS['config'].present:
            knob = f'config.{path.partition("=")[0]}' in knob_names(FLAGS['config'].value)
            right = f'did you mean --config.{path}?' if knob else 'a run has one config'
            raise flags.Error(f'--config={path}: given twice; {right}')
        config = load(path)
        config.lock()
        knobs = knob_names(config)
        for name, argument in overrides():
            if name not in knobs:
                raise flags.Error(f'{argument}: {_why_no_knob(name, knobs)}')
        return config


def knob_names(config: ConfigDict, prefix: str = 'config.') -> list[str]:
    """Return the dotted names of all knobs, such as config.model.num_layers."""
    names = []
    for name, value in config.items():
        group = isinstance(value, ConfigDict)
        names += knob_names(value, f'{prefix}{name}.') if group else [f'{prefix}{name}']
    return names


def nearest(name: str, known: list[str]) -> str:
    """Return the end of an error message: the most similar known name, or names of its group."""
    last = {other: other.split('.')[-1] for other in known}
    group, _, word = name.rpartition('.')
    inside = [tail for other, tail in last.items() if group and other == f'{group}.{tail}']
    tails = [tail for tail in _ELSEWHERE.get(word, ()) if tail in last.values()]
    tails = tails or _alike(word, last.values(), 0.8 if inside else 0.65)
    if not {word, *_ELSEWHERE.get(word, ())} & {*tails}:
        tails = _alike(word, inside, 0.65) or tails
    if tails:
        near = [other for other in known if last[other] in tails]
        best = max(near, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())
        return f'did you mean --{best}?'
    group, inside = name, []
    while group and not inside:
        group = group.rpartition('.')[0]
        prefix = group + '.' if group else ''
        inside = [other.removeprefix(prefix) for other in known if other.startswith(prefix)]
    members = dict.fromkeys(other.split('.')[0] for other in inside)
    return f'{group} has {", ".join(members)}' if group else f'there are --{", --".join(members)}'


def _alike(word, names, cutoff):
    """The names equal to `word`, or else containing it, or with these initials, or most similar."""
    parts = {name: name.split('_') for name in names}
    initials = [name for name, words in parts.items() if word == ''.join(w[:1] for w in words)]
    begun = {name for name in parts if word[2:] and name.startswith(word)}
    holding = [name for name, words in parts.items() if word in words or name in begun]
    near = difflib.get_close_matches(word, parts, n=1, cutoff=cutoff)
    return [name for name in parts if name == word] or holding or initials or near


def load(spec: str) -> ConfigDict:
    """Load the config of FILE.py[:TEXT] or WORKDIR/config.json, unlocked. Raises flags.Error.

    If configs/NAME.py is not in the current directory, it is read from the installed package.
    """
    spec = os.path.expanduser(spec)
    if spec.endswith('.json'):
        return _load_stored(pathlib.Path(spec))
    path, texts = _python_file(spec), spec.split(':', 1)[1:]
    if not os.path.isfile(path) or not path.endswith('.py'):
        near = meant(spec)
        hint = f'did you mean {near}?' if near else '--list shows those of configs/'
        wrong = 'no such Python file, and not the config.json of a run'
        raise flags.Error(f'--config={spec}: {wrong}; {hint}')
    module_spec = importlib.util.spec_from_file_location('config_file_of_this_run', path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
        return _call_get_config(module, texts)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise flags.Error(f'--config={spec}: {_describe(error, path)}') from error


def meant(spec: str) -> str | None:
    """Guess the config that `spec` stands for: that of a run, or a file with a similar name."""
    path, *texts = re.sub(r'^[A-Za-z]:(?=[\\/])', '', spec).replace('\\', '/').split(':', 1)
    folder, name = os.path.split(path)
    for run in (path, folder):
        if os.path.isfile(os.path.join(run, CONFIG_FILE)):
            return os.path.join(run, CONFIG_FILE)
    installed = os.path.dirname(base.__file__)
    for place, folders in ((folder, [folder or '.']), ('configs', ['configs', installed])):
        files = [file for f in folders if os.path.isdir(f) for file in os.listdir(f)]
        names = [file.removesuffix('.py') for file in files if file.endswith('.py')]
        if near := difflib.get_close_matches(name.removesuffix('.py'), names, n=1):
            return ':'.join([os.path.join(place, f'{near[0]}.py'), *texts])
    return None


def _python_file(spec):
    path = spec.split(':', 1)[0]
    installed = pathlib.Path(base.__file__).parents[1] / path
    if pathlib.PurePath(path).parts[:1] == ('configs',) and not os.path.isfile(path):
        return os.fspath(installed) if installed.is_file() else path
    return path


def source(spec: str) -> str | None:
    """Return the Python file of --config=`spec`, or the copy in the run of a config.json."""
    spec = os.path.expanduser(spec)
    if not spec.endswith('.json'):
        return _python_file(spec)
    kept = pathlib.Path(spec).with_name(SOURCE_FILE)
    return os.fspath(kept) if kept.exists() else None


def _call_get_config(module, texts):
    get_config = getattr(module, 'get_config', None)
    if not callable(get_config):
        raise flags.Error('defines no get_config(), which must return a ConfigDict')
    try:
        inspect.signature(get_config).bind(*texts)
    except TypeError:
        right = 'takes no text after the colon' if texts else 'needs a text, as in FILE.py:TEXT'
        raise flags.Error(f'its get_config {right}') from None
    config = get_config(*texts)
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise flags.Error(f'get_config() returned {got}, it must return a ConfigDict')
    knob_names(config)  # reads every value, because a required placeholder only raises then
    return config


def _describe(error, path):
    """The line on an error that the config file at `path` raised."""
    if isinstance(error, SyntaxError):
        return f'line {error.lineno}: {error.msg}'
    if isinstance(error, (flags.Error, ValueError)):
        return str(error)
    # ConfigDict raises these for an unknown knob or a wrong type.
    ours = isinstance(error, (AttributeError, KeyError, TypeError))
    text = _explain(error) if ours else f'{type(error).__name__}: {error}'
    # FILE:LINE of the innermost call in the folder of the config.
    folder = os.path.dirname(os.path.abspath(path))
    calls = traceback.extract_tb(error.__traceback__)
    calls = [call for call in calls if os.path.dirname(call.filename) == folder]
    return f'{os.path.relpath(calls[-1].filename)}:{calls[-1].lineno}: {text}' if calls else text


def _load_stored(path):
    if path.name != CONFIG_FILE:
        raise flags.Error(f'--config={path}: must be FILE.py or the {CONFIG_FILE} of a run')
    try:
        stored, notes = read_config(path.parent)
    except ValueError as error:
        line = str(error).removeprefix(f'--workdir={path.parent}: ')
        raise flags.Error(f'--config={path}: {line}') from None
    for note in notes:
        print(note, file=sys.stderr)
    return unresolved(ConfigDict(_with_tuples(stored)), path.parent)


def _with_tuples(value):
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def unresolved(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
    """Return a stored config with `auto` restored, so that it resolves again for other knobs."""
    try:
        hparams = build_stored(workdir, config)
    except ValueError:  # main reports it after the overrides are applied
        return config
    for name in _AUTO:
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict({name: base.get_config()[name]})
        if from_config(changed) == hparams:
            config = changed
    return config


def _explain(error):
    """Rephrase ConfigDict's message on a bad assignment."""
    kinds = "<class '(?:.*[.])?(.+)'>"
    typed = re.match(
        f"Could not override field '(.+)' [(]reference[)][.] (.*) is of original type {kinds} and "
        f'cannot be casted to type {kinds}$',
        str(error),
        re.DOTALL,
    )
    if typed:
        return f'{typed[1]}={typed[2]}: must be {typed[4]}, not {typed[3]}'
    missed = re.search('Did you mean "(.+)" instead of "(.+)"[?]', str(error))
    return f'{missed[2]}: no such knob; did you mean {missed[1]}?' if missed else str(error)


def overrides():
    """Yield (dotted name, argument as typed) for each knob on the command line."""
    argv = FLAGS.read_flags_from_files(sys.argv[1:], force_gnu=False)
    file_seen = False
    for argument, following in zip(argv, [*argv[1:], '-'], strict=True):
        file_seen = file_seen or re.match(r'--?config(=|$)', argument)
        match = re.match(r'--?(?:no)?(config\.[^=]*)(=?)', argument)
        if not match:
            continue
        if not file_seen:
            raise flags.Error(f'{argument}: comes before --config; put --config=FILE.py first')
        value = '' if match[2] or following.startswith('-') else f'={following}'
        yield match[1], argument + value


def _why_no_knob(name, knobs):
    if inside := [knob for knob in knobs if knob.startswith(name + '.')]:
        return f'a group of knobs; set one of them, such as --{inside[0]}'
    group, _, knob = name.rpartition('.')
    if group == 'config.model.experts' and knob in ExpertsHparams.NOT_BUILT:
        return ExpertsHparams.NOT_BUILT[knob]
    return f'no such knob; {nearest(name, knobs)}'
