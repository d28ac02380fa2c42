"""Evaluates a run, finished or not, on its held-out text or on any other.

python -m launch.evaluate --workdir=runs/mod_isoflop
python -m launch.evaluate --workdir=runs/mod_isoflop --routing=dense --num_batches=0
python -m launch.evaluate --workdir=runs/mod_isoflop --data='notes/**/*.txt' --json=notes.json
python -m launch.evaluate --workdir=runs/mod_isoflop --domains=corpora --json=domains.json
python -m launch.evaluate --workdir=runs/moda --mesh=data=2,fsdp=4

On any devices and by any number of processes, whatever the run was trained on: several processes
that are started with the same command are one, see launch.train.
"""

import contextlib
import dataclasses
import functools
import json
import math
import sys

from absl import flags

from launch import cli, domains, losses

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
ROUTING = flags.DEFINE_string(
    'routing',
    None,
    'Who enters the routed blocks: top_c, aux_loss, predictor, threshold or dense. Default: the '
    'causal rule that the run was trained for, with top_c beside it.',
)
DATA = flags.DEFINE_string(
    'data',
    None,
    'Glob of text files as launch.prepare reads them, or a folder that it wrote, or stdlib, '
    'python_environment, synthetic, recall: evaluates on all of its text, cut into windows as long '
    "as the run's; of a prepared folder that the run was trained on, on what was held out. "
    'Default: the text that the run held out.',
)
DOMAINS = flags.DEFINE_string(
    'domains',
    None,
    'Folder: evaluates on each file and each folder in it apart, as --data would, and prints a '
    'table. A folder is all text files below it, or one that launch.prepare wrote.',
)
TEXT_FIELD = flags.DEFINE_string(
    'text_field',
    None,
    "Field or column of rows of --data or --domains that holds the text. Default: the run's.",
)
NUM_BATCHES = flags.DEFINE_integer(
    'num_batches',
    None,
    'Batches to evaluate on, of --domains for each; 0 for all. Default: '
    'evaluation.final_batches of the run.',
    lower_bound=0,
)
PER_LAYER = flags.DEFINE_boolean(
    'per_layer', False, 'Also measure the routing gap of each routed block alone.'
)
MESH = flags.DEFINE_string(
    'mesh',
    '',
    'Devices by axis, as launch.train takes them. Default: as many, as data, as divide the rows of '
    'a batch.',
)
JSON = flags.DEFINE_string(
    'json', None, 'File for the result; - for stdout, and then nothing else goes there.'
)


class _Counted:
    """A dataset that calls `advance` for each batch that is read."""

    def __init__(self, dataset, advance):
        self._dataset, self._advance = dataset, advance
        self.tokenizer, self.domains = dataset.tokenizer, dataset.domains
        self.num_held_out_batches, self.domain = dataset.num_held_out_batches, dataset.domain

    def held_out_batch(self, index):
        self._advance()
        return self._dataset.held_out_batch(index)


def _load_dataset(run):
    """That of --data or of the run; of --domains (datasets, skipped) as `domains.load` gives."""
    from moddepth_jax.data.pipeline import check_fingerprint, make_dataset, make_held_out
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.training import multihost

    data = run.hparams.data
    tokenizer = tokenizer_of(data, WORKDIR.value)
    if TEXT_FIELD.value is not None:
        if DATA.value is None and DOMAINS.value is None:
            found = f'--text_field={TEXT_FIELD.value}'
            raise ValueError(f'{found}: belongs to --data or --domains, which is missing')
        data = dataclasses.replace(data, text_field=TEXT_FIELD.value)
    prepared = {
        value
        for name, value in run.fingerprint.items()
        if name == 'corpus_sha256' or name.startswith('member_')
    }
    if DOMAINS.value is not None:
        return domains.load(DOMAINS.value, data, tokenizer, prepared)
    if DATA.value is not None:
        try:
            data = dataclasses.replace(data, source=DATA.value, mixture='')
            return make_held_out(data, tokenizer, prepared)
        except ValueError as error:
            raise ValueError(domains.in_flags(error, '--data')) from None
    try:
        dataset = make_dataset(data, run.hparams.seed, tokenizer=tokenizer)
    except ValueError as error:
        if data.tokenizer != 'prepared':
            raise
        right = 'if the prepared text was moved, name its folder: --data=FOLDER'
        raise ValueError(f'{error}; {right}') from None
    try:
        check_fingerprint(run.fingerprint, dataset.fingerprint)
    except ValueError as error:
        found = str(error).split(';')[0]
        if multihost.is_leader():
            print(f'{found}: what is held out now may have been trained on', file=sys.stderr)
    return dataset


def _mesh(hparams):
    """That of --mesh; a batch is as large as in training, and runs whole, not in micro-batches."""
    import jax

    from moddepth_jax.training.mesh import check_mesh, make_mesh

    most = math.gcd(hparams.data.batch_size, jax.device_count())
    alone = jax.process_count() == 1
    mesh = make_mesh(MESH.value or (f'data={most}' if alone else ''))
    training = dataclasses.replace(hparams.training, accumulate_steps=1)
    check_mesh(dataclasses.replace(hparams, training=training), mesh)
    return mesh


def _evaluate(run, dataset, num_batches):
    """The result of `evaluate_honestly`, or of `evaluate` under --routing."""
    import jax

    from moddepth_jax.training.evaluate import evaluate, evaluate_causal

    hparams, mesh = run.hparams_of_stage, run.state.step.sharding.mesh
    passes, num_routed = 1, len(hparams.model.routed_layers)
    if ROUTING.value is None and hparams.model.looks_ahead:
        passes = 2 + (1 + num_routed if PER_LAYER.value else 0)
    with jax.set_mesh(mesh), cli.progress_bar('evaluating', passes * num_batches) as advance:
        given = (run.state.variables, hparams, _Counted(dataset, advance), mesh, num_batches)
        if ROUTING.value is None:
            return evaluate_causal(*given, batches_per_layer=num_batches if PER_LAYER.value else 0)
        return evaluate(*given, ROUTING.value)


def _report(run, result):
    """The result and what it was measured with, as --json has it."""
    from moddepth_jax.model.transformer import causal_routing

    model, own = run.hparams.model, causal_routing(run.hparams)
    rule = ROUTING.value or own
    return {
        'workdir': WORKDIR.value,
        'step': run.step,
        'num_steps': run.num_steps,
        'rule': rule if model.looks_ahead else None,
        'compared': (own if rule == 'top_c' else rule) if model.routed_layers else None,
        **result,
    }


def _by_layer(run, result):
    """The result, its lists over layers as a dict for each layer."""
    from moddepth_jax.training.summary import by_layer

    layers = {'routing': run.hparams.model.routed_layers}
    if run.hparams.model.expert_layers:
        layers['experts'] = run.hparams.model.expert_layers
    return result | {part: by_layer(of, result.get(part, {})) for part, of in layers.items()}


def _check(run):
    """Raises ValueError for flags that do not fit the run; returns what `_load_dataset` does."""
    from moddepth_jax.model.transformer import check_routing

    if ROUTING.value is not None:
        check_routing(run.hparams, ROUTING.value)
        if PER_LAYER.value:
            raise ValueError('--per_layer: the gap is that of the own rule; leave --routing out')
    if PER_LAYER.value and not run.hparams.model.routed_layers:
        raise ValueError('--per_layer: this run is dense, it has no routed block')
    return _load_dataset(run)


def _measure(run, dataset, most):
    """What --json has of one text."""
    num_batches = min(most or math.inf, dataset.num_held_out_batches)
    about = {
        'data': dataset.corpus.name,
        'held_out': dataset.held_back,
        'corpus_sha256': dataset.corpus.sha256,
        'batches': num_batches,
        'all_batches': dataset.num_held_out_batches,
    }
    return about | _by_layer(run, _evaluate(run, dataset, num_batches))


def _measure_domains(run, datasets, skipped, most):
    """What --json has of all domains."""

    def measure(dataset, num_batches):
        return _by_layer(run, _evaluate(run, dataset, num_batches))

    found = domains.measure(datasets, most, measure)
    together = domains.together(found)
    texts = {'data': DOMAINS.value, 'together': together, 'domains': found, 'skipped': skipped}
    return {'num_batches': most, **texts}


def main(_):
    from moddepth_jax.training import multihost
    from moddepth_jax.training.summary import replace_nonfinite

    if DATA.value is not None and DOMAINS.value is not None:
        raise ValueError(f'--domains={DOMAINS.value}: not together with --data; leave one out')
    multihost.initialize()
    run = cli.load_saved_run(WORKDIR.value, _mesh)
    loaded = multihost.run_on_all(lambda: _check(run))
    most = NUM_BATCHES.value
    if most is None:
        most = run.hparams.evaluation.final_batches
    with contextlib.ExitStack() as stack:
        file = sys.stdout
        if JSON.value not in (None, '-'):  # opened first: a bad path shows before the evaluation
            opened = functools.partial(open, JSON.value, 'w', encoding='utf-8')
            file = multihost.run_on_leader(lambda: stack.enter_context(opened()))
        if DOMAINS.value is None:
            result = _measure(run, loaded, most)
        else:
            result = _measure_domains(run, *loaded, most)
        if not multihost.is_leader():
            return
        report = _report(run, result)
        if JSON.value:
            print(json.dumps(replace_nonfinite(report), indent=2, allow_nan=False), file=file)
    if JSON.value == '-':
        return
    if DOMAINS.value is None:
        losses.show(report, run.hparams.model.experts)
    else:
        domains.show(report)


if __name__ == '__main__':
    cli.run(main)
