"""Imports and exports Hugging Face checkpoints, and starts runs from the parameters of other runs.

python -m launch.convert --from_hf=SmolLM2-135M --workdir=runs/smol
python -m launch.convert --from_hf=OLMo-2-0425-1B --workdir=runs/olmo \\
    --config=configs/imported.py --config.data.source=data/web --config.data.tokenizer=prepared
python -m launch.convert --workdir=runs/smol --to_hf=exported --dtype=bfloat16
python -m launch.convert --from_workdir=runs/smol --workdir=runs/smol_mod \\
    --config=runs/smol/config.json --config.model.routing.router=learned \\
    --config.model.routing.capacity_stages=1:0.2 --config.training.num_steps=2000

python -m launch.convert --from_workdir=runs/smol --workdir=runs/smol_looped \\
    --config=runs/smol/config.json --from_layers=average --config.model.num_layers=12 \\
    --config.model.looped_layers=middle:3:3 --config.model.loops=4

python -m launch.convert --branch=runs/tiny --workdir=runs/tiny_decayed

--from_hf reads config.json and *.safetensors of a model family listed in docs/convert.md, or of an
export by --to_hf. --to_hf exports a dense run as a model of such a family. Other runs are exported
with their own PyTorch code, which transformers runs with trust_remote_code=True.
--from_workdir starts a run from the parameters of any run, at its newest checkpoint or at --step,
with other data, training knobs or model. --from_layers=0,1,3 leaves out blocks.
--branch copies a run at --step with its optimizer state and its position in the data, so that it
can continue in another way, such as a decay of the learning rate (docs/configs.md, section 3).
--from_hf and --from_workdir create a run before its first step, for launch.generate,
launch.evaluate and launch.train --config=WORKDIR/config.json.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import shutil

from absl import flags

from launch import cli, config_file, first_checkpoint
from launch.first_checkpoint import IMPORT
from moddepth_jax.conversion import special_tokens
from moddepth_jax.conversion.special_tokens import GENERATION_FILE, TOKENIZERS
from moddepth_jax.data import sources

CONFIG = cli.define_config(default='configs/imported.py')
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run; new, except for --to_hf.')
FROM_HF = flags.DEFINE_string('from_hf', None, 'Folder of a Hugging Face model to import.')
TO_HF = flags.DEFINE_string('to_hf', None, 'New folder to which --workdir is exported.')
FROM_WORKDIR = flags.DEFINE_string('from_workdir', None, 'Run whose parameters --workdir gets.')
BRANCH = flags.DEFINE_string('branch', None, 'Run that --workdir continues after --step.')
cli.define_step()
DTYPE = flags.DEFINE_enum(
    'dtype',
    None,
    ['float32', 'bfloat16', 'float16'],
    'Dtype of --to_hf. Default: that of the imported model if it is exact, else float32.',
)
LAYERS = flags.DEFINE_string(
    'from_layers',
    None,
    'Layers of a dense --from_workdir that initialise the blocks: one per block, such as 0,2,3; '
    'for a looped model also average, first or last, of the layers that a block replaces.',
)
SEPARATOR = flags.DEFINE_string('separator', None, 'Token that starts documents, for --from_hf.')
TOKENIZER_FILES = (*TOKENIZERS, 'tokenizer_config.json', 'special_tokens_map.json')
OTHER_FORMS = ('vocab.json', 'vocab.txt', 'merges.txt', 'tokenizer_config.json')
OTHER_FILES = ('chat_template.jinja', GENERATION_FILE)


def _import():
    from moddepth_jax.conversion.families import CONFIG_FILE, OWN_TYPE, knobs_of, read_config

    folder = pathlib.Path(FROM_HF.value)
    given = read_config(folder)
    knobs, own = knobs_of(given, str(folder / CONFIG_FILE)), given['model_type'] == OWN_TYPE
    context = given.get('max_position_embeddings') if own else None
    hparams, tokenizer = _hparams_and_tokenizer(folder, knobs, context)

    from moddepth_jax.conversion import torch_folder  # imports JAX, which takes a while
    from moddepth_jax.conversion.hugging_face import import_params
    from moddepth_jax.data.pipeline import make_dataset
    from moddepth_jax.training.summary import num_parameters

    first_checkpoint.check_new_run(hparams, tokenizer)
    dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
    if own:
        params, averages, dtype = torch_folder.import_model(folder, hparams)
    else:
        (params, dtype), averages = import_params(folder, hparams), {}
    files = _existing(folder, (CONFIG_FILE, *TOKENIZER_FILES, *OTHER_FILES))
    name, kind = folder.resolve().name, given['model_type']
    note = {'from': IMPORT, 'name': name, 'model_type': kind, 'dtype': dtype}
    config = config_file.source(flags.FLAGS['config'].config_filename)
    first_checkpoint.write_new_run(
        WORKDIR.value, hparams, params, averages, dataset, note, files, config
    )
    print(f'{name}: {kind}, {num_parameters(params):,} parameters, {dtype}, now float32')
    if tokenizer.name == 'bytes':
        print(f'{name} has no tokenizer: its ids are used as bytes')
    begin = f'id {tokenizer.separator}'
    if tokenizer.separator_text:
        begin = f'{tokenizer.separator_text} ({begin})'
    ends = ', '.join(map(str, tokenizer.stops))
    print(f'tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} ids')
    print(f'documents begin with {begin}; a generated text ends before id {ends}')
    print(f'data {dataset.corpus.name}')


def _existing(folder, names):
    """The files that exist; broken links count, so that reading them names the file."""
    return filter(os.path.lexists, (folder / name for name in names))


def _hparams_and_tokenizer(folder, knobs, context):
    """Hyper-parameters and tokenizer for a run of the model in `folder`.

    `context` is the sequence length of a model that --to_hf exported, else None.
    """
    from moddepth_jax.conversion.families import FREE_KNOBS, part_of_no_family
    from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer, tokenizer_of
    from moddepth_jax.hparams import from_config
    from moddepth_jax.training.run_dir import OLDER_RUNS

    overrides = dict(config_file.overrides())
    if context is not None:
        older = {name: OLDER_RUNS[name] for name in OLDER_RUNS if name.startswith('model.')}
        knobs = {name.removeprefix('model.'): value for name, value in older.items()} | knobs
        chosen = {name.removeprefix('config.model.') for name in overrides}
        free = {knob for knob in chosen if {knob, knob.partition('.')[0]} & {*FREE_KNOBS}}
        knobs = {knob: value for knob, value in knobs.items() if knob not in free}
    for knob, value in knobs.items():
        given = overrides.get(f'config.model.{knob}')
        if given and functools.reduce(getattr, knob.split('.'), CONFIG.value.model) != value:
            raise ValueError(f'{given}: is {value!r} in {folder}/config.json; leave it out')
    config = CONFIG.value.copy_and_resolve_references()
    config.unlock()
    with config.ignore_type():  # `from_config` checks them
        config.model.update_from_flattened_dict(knobs)
        if context is not None and 'config.data.sequence_length' not in overrides:
            config.data.sequence_length = context
    found, data = next(_existing(folder, TOKENIZERS), None), config.data
    if found and data.tokenizer not in ('bytes', 'prepared', found.name):
        right = f'the tokenizer is that of {folder}; leave it out, or use prepared'
        raise ValueError(f'data.tokenizer={data.tokenizer!r}: {right}')
    if not found and data.tokenizer == 'bytes':
        for other in _existing(folder, OTHER_FORMS):
            right = 'save it as tokenizer.json, or name one: --config.data.tokenizer=FILE'
            raise ValueError(f'{other}: this form of tokenizer is not read; {right}')
    if found and data.tokenizer == 'bytes':
        data.tokenizer = found.name
    hparams = from_config(config)
    model = hparams.model
    if context is None and (part := part_of_no_family(model)):
        right = 'comes in dense; --from_workdir adds routing, a depth stream or loops afterwards'
        raise ValueError(f'model.{part[0]}={part[1]!r}: --from_hf={folder} {right}')
    if SEPARATOR.value is not None and not found:
        raise ValueError(f'--separator={SEPARATOR.value}: {folder} has no tokenizer')
    tokenizer = make_tokenizer(found, SEPARATOR.value) if found else tokenizer_of(hparams.data)
    if found:
        special_tokens.add_stops(tokenizer, folder)
    if tokenizer.vocab_size > model.vocab_size:
        file = found or f'data.tokenizer={hparams.data.tokenizer!r}'
        has = f'has ids up to {tokenizer.vocab_size - 1}, and the model has {model.vocab_size}'
        raise ValueError(f'{file}: {has}; it must be the tokenizer of this model')
    return hparams, tokenizer


def _export():
    from moddepth_jax.conversion import torch_folder
    from moddepth_jax.conversion.families import CONFIG_FILE, FAMILIES, config_of, read_config
    from moddepth_jax.conversion.hugging_face import exact_dtype, export_params
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.training.run_dir import read_hparams

    workdir = pathlib.Path(WORKDIR.value)
    kind, no_family = torch_folder.kind_of(read_hparams(workdir)[0].model)
    first_checkpoint.check_new_folder('to_hf', TO_HF.value)
    run = cli.load_saved_run(WORKDIR.value, say_remaining=False).merged
    model, data = run.hparams.model, run.hparams.data
    note = first_checkpoint.read_note(workdir)
    dtype = DTYPE.value or exact_dtype(run.state.params, note.get('dtype', 'float32'))
    source_files, original = workdir / first_checkpoint.SOURCE_FILES, None
    if (source_files / CONFIG_FILE).exists():
        original = read_config(source_files)
        original = original if original.get('model_type') in tuple(FAMILIES) else None
    # The imported model may have had no tokenizer, and the run has another one or bytes.
    has_tokenizer = any(_existing(source_files, TOKENIZERS))
    token_files = source_files if has_tokenizer else workdir / 'tokenizer'
    tokenizer = tokenizer_of(data, workdir)
    other = special_tokens.has_other_separator(token_files, tokenizer)
    original = None if no_family else original
    as_imported = original and not other and run.step == 0 and note.get('from') == IMPORT
    ids = special_tokens.ids_of(original or {})
    ids = ids if as_imported else special_tokens.with_token_ids(ids, tokenizer)
    with first_checkpoint.atomic_folder('to_hf', TO_HF.value) as folder:
        tokenizer_files = _existing(token_files, TOKENIZER_FILES)
        for file in (*tokenizer_files, *_existing(source_files, OTHER_FILES)):
            shutil.copy(file, folder)
        special_tokens.name_separator(folder, tokenizer, replace=other)
        if no_family:
            hparams, train_rule = run.hparams_of_stage, model.routing.train_rule
            # PyTorch does not use the rule of training, but --from_hf reads it.
            routing = dataclasses.replace(hparams.model.routing, train_rule=train_rule)
            exported = dataclasses.replace(hparams.model, routing=routing)
            hparams = dataclasses.replace(hparams, model=exported)
            torch_folder.export_model(folder, hparams, run.state.variables, dtype, ids)
        else:
            config = config_of(model, dtype, data.sequence_length, ids, original)
            export_params(folder, run.hparams, run.state.params, dtype)
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
        if not as_imported:
            special_tokens.suppress_unknown_ids(folder, model.vocab_size, tokenizer, ids)
    print(f'{TO_HF.value}: {kind}, step {run.step} of {run.num_steps}, {dtype}')
    if no_family:
        print(f'with its own {torch_folder.MODULES[-1]}, since no family fits ({no_family})')
        print('load it with trust_remote_code=True')
    if tokenizer.name == 'bytes':
        print(f'no tokenizer: ids are bytes, and {tokenizer.separator} starts a document')


def _from_run():
    from moddepth_jax.conversion.from_layers import with_layers
    from moddepth_jax.conversion.transfer_params import check_convertible, keeps_adapters
    from moddepth_jax.conversion.upcycle import upcycle
    from moddepth_jax.data.pipeline import check_held_out, make_dataset
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.hparams import from_config
    from moddepth_jax.training.run_dir import read_hparams

    source, hparams = FROM_WORKDIR.value, from_config(CONFIG.value)
    before = read_hparams(source)[0]
    tokenizer = tokenizer_of(before.data, source)
    first_checkpoint.check_new_run(hparams, tokenizer)
    keeps = keeps_adapters(before, hparams)
    given = before if keeps else before.without_adapters
    if LAYERS.value is not None:
        given, _ = with_layers(given, hparams, LAYERS.value)
    check_convertible(given, hparams)
    if hparams.data.tokenizer not in ('prepared', before.data.tokenizer, tokenizer.name):
        right = f'the run that is converted has {before.data.tokenizer!r}'
        raise ValueError(f'data.tokenizer={hparams.data.tokenizer!r}: {right}')
    dataset = make_dataset(hparams.data, hparams.seed, tokenizer=tokenizer)
    run = cli.load_saved_run(source)
    run = run if keeps else run.merged
    trained_on = first_checkpoint.trained_on(source, run.fingerprint)
    check_held_out(dataset.fingerprint, trained_on)
    params, averages, note = upcycle(run, hparams, dataset, measure_loss, LAYERS.value)
    note['trained_on'] = trained_on
    if dtype := first_checkpoint.read_note(source).get('dtype'):
        note['dtype'] = dtype
    files = sorted((pathlib.Path(source) / first_checkpoint.SOURCE_FILES).glob('*'))
    config = config_file.source(flags.FLAGS['config'].config_filename)
    first_checkpoint.write_new_run(
        WORKDIR.value, hparams, params, averages, dataset, note, files, config
    )
    what = f'{note["held_out_batches"]} held-out batches, nats per token under top-C routing'
    print(f'{source}, step {run.step}, {what}')
    print(f'  before      {note["dense_loss"]:.4f}')
    print(f'  first step  {note["first_loss"]:.4f}  {note["difference"]:+.4f}: {note["why"]}')
    if 'loss_at_last_capacity' in note:
        print(f'  untrained at the last capacity  {note["loss_at_last_capacity"]:.4f}')


def _branch():
    step, num_steps = first_checkpoint.branch_run(BRANCH.value, flags.FLAGS.step, WORKDIR.value)
    print(
        f'{BRANCH.value}, branched at step {step} of {num_steps}; '
        '--config.training.num_steps=N sets the last step'
    )


def measure_loss(params, averages, hparams, dataset, num_batches):
    """Return nats per target on the first `num_batches` held-out batches under top-C routing."""
    import jax

    from moddepth_jax.training.evaluate import evaluate
    from moddepth_jax.training.mesh import make_mesh
    from moddepth_jax.training.train_step import model_variables

    mesh, variables = make_mesh('data=1'), model_variables(params, averages)
    with jax.set_mesh(mesh):
        return evaluate(variables, hparams, dataset, mesh, num_batches, 'top_c')['loss']


def main(_):
    actions = {'from_hf': _import, 'to_hf': _export, 'from_workdir': _from_run, 'branch': _branch}
    given = [name for name in actions if flags.FLAGS[name].value is not None]
    workdir = WORKDIR.value
    if len(given) != 1 or workdir is None:
        given = ['workdir'] * (workdir is not None) + given
        found = ', '.join(f'--{name}' for name in given) or 'nothing'
        right = f'needs --workdir and one of {", ".join(f"--{name}" for name in actions)}'
        raise ValueError(f'{right}; {found} was given')
    (action,) = given
    if action != 'to_hf':
        first_checkpoint.check_source(action, flags.FLAGS[action].value)
        if cli.is_alone():
            sources.check_source(CONFIG.value.data.source)
    has_config = flags.FLAGS['config'].config_filename != flags.FLAGS['config'].left_out
    if action == 'from_workdir' and not has_config:
        wanted = f'--config={FROM_WORKDIR.value}/config.json and the knobs that change'
        raise ValueError(f'--from_workdir={FROM_WORKDIR.value}: needs {wanted}')
    if action != 'from_workdir' and LAYERS.value is not None:
        raise ValueError(f'--from_layers={LAYERS.value}: belongs to --from_workdir')
    if action != 'to_hf':
        first_checkpoint.check_new_folder('workdir', workdir)
        if DTYPE.value is not None:
            raise ValueError(f'--dtype={DTYPE.value}: belongs to --to_hf; parameters are float32')
    if action == 'from_hf' and flags.FLAGS.step is not None:
        raise ValueError(f'--step={flags.FLAGS.step}: does not belong to --from_hf, only to runs')
    if action in ('to_hf', 'branch') and (list(config_file.overrides()) or has_config):
        raise ValueError(f'--config: does not belong to --{action}, which changes no knob')
    actions[action]()
    if action != 'to_hf':
        config, quoted = shlex.quote(f'{workdir}/config.json'), shlex.quote(workdir)
        print(f'train on it: python -m launch.train --config={config} --workdir={quoted}')


if __name__ == '__main__':
    cli.run(main)
