"""Evaluates a run, finished or not, on its held-out text or on any other.

python -m launch.evaluate --workdir=runs/mod_isoflop
python -m launch.evaluate --workdir=runs/mod_isoflop --routing=dense --num_batches=0
python -m launch.evaluate --workdir=runs/mod_isoflop --data='notes/**/*.txt' --json=notes.json
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

from launch import command, saved

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
    'Glob of .txt, .jsonl or .parquet files, or stdlib, python_environment, synthetic, recall: '
    "evaluates on all of its text, cut into windows as long as the run's. Default: the text that "
    'the run held out.',
)
TEXT_FIELD = flags.DEFINE_string(
    'text_field',
    None,
    "Field or column of --data's .jsonl and .parquet that holds the text. Default: the run's.",
)
NUM_BATCHES = flags.DEFINE_integer(
    'num_batches',
    None,
    "Batches to evaluate on, 0 for all. Default: the run's evaluation.final_batches.",
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
        self.tokenizer = dataset.tokenizer
        self.num_held_out_batches = dataset.num_held_out_batches

    def held_out_batch(self, index):
        self._advance()
        return self._dataset.held_out_batch(index)


def _load_dataset(run):
    from moddepth_jax.data.pipeline import check_fingerprint, make_dataset, make_held_out
    from moddepth_jax.training import processes

    data = run.hparams.data
    if DATA.value is not None:
        field = data.text_field if TEXT_FIELD.value is None else TEXT_FIELD.value
        try:
            return make_held_out(dataclasses.replace(data, source=DATA.value, text_field=field))
        except ValueError as error:  # the knobs that it blames are flags here
            line = str(error).replace('data.source', '--data')
            raise ValueError(line.replace('data.text_field', '--text_field')) from None
    if TEXT_FIELD.value is not None:
        raise ValueError(f'--text_field={TEXT_FIELD.value}: belongs to --data, which is missing')
    dataset = make_dataset(data, run.hparams.seed)
    try:
        check_fingerprint(run.fingerprint, dataset.fingerprint)
    except ValueError as error:
        found = str(error).split(';')[0]
        if processes.is_first():
            print(f'{found}: what is held out now may have been trained on', file=sys.stderr)
    return dataset


def _mesh(hparams):
    """That of --mesh; a batch is as large as in training, and runs whole, not in micro-batches."""
    import jax

    from moddepth_jax.training.sharding import check_mesh, make_mesh

    most = math.gcd(hparams.data.batch_size, jax.device_count())
    alone = jax.process_count() == 1
    mesh = make_mesh(MESH.value or (f'data={most}' if alone else ''))
    training = dataclasses.replace(hparams.training, accumulate_steps=1)
    check_mesh(dataclasses.replace(hparams, training=training), mesh)
    return mesh


def _evaluate(run, dataset, num_batches):
    """The result of `evaluate_honestly`, or of `evaluate` under --routing."""
    import jax

    from moddepth_jax.training.evaluate import evaluate, evaluate_honestly

    hparams, mesh = run.hparams_of_stage, run.state.step.sharding.mesh
    passes, num_routed = 1, len(hparams.model.routed_layers)
    if ROUTING.value is None and hparams.model.looks_ahead:
        passes = 2 + (1 + num_routed if PER_LAYER.value else 0)
    with jax.set_mesh(mesh), saved.bar('evaluating', passes * num_batches) as advance:
        given = (run.state.variables, hparams, _Counted(dataset, advance), mesh, num_batches)
        if ROUTING.value is None:
            return evaluate_honestly(
                *given, batches_per_layer=num_batches if PER_LAYER.value else 0
            )
        return evaluate(*given, ROUTING.value)


def _report(run, dataset, num_batches, result):
    """The result and what it was measured on, as --json has it."""
    from moddepth_jax.model.transformer import causal_routing
    from moddepth_jax.training.summary import by_layer

    model, own = run.hparams.model, causal_routing(run.hparams)
    rule = ROUTING.value or own
    layers = {'routing': model.routed_layers}
    if model.expert_layers:
        layers['experts'] = model.expert_layers
    return {
        'workdir': WORKDIR.value,
        'step': run.step,
        'num_steps': run.num_steps,
        'data': dataset.corpus.name,
        'held_out': DATA.value is None,
        'corpus_sha256': dataset.corpus.sha256,
        'batches': num_batches,
        'all_batches': dataset.num_held_out_batches,
        'rule': rule if model.looks_ahead else None,
        'compared': (own if rule == 'top_c' else rule) if model.routed_layers else None,
        **result,
        **{part: by_layer(places, result.get(part, {})) for part, places in layers.items()},
    }


def _cell(value, digits=3):
    return f'{value:.{digits}f}' if math.isfinite(value) else 'n/a'


def _layer_table(report):
    import rich.table

    layers = report['routing']
    ratios = ['selected_fraction', 'precision', 'recall']
    if any(values['refused_fraction'] > 0 for values in layers.values()):
        ratios.append('refused_fraction')
    if PER_LAYER.value:
        ratios.append('routing_gap')
    table = rich.table.Table()
    table.add_column('layer')
    for name in ratios:
        table.add_column(name.replace('_', ' '), justify='right')
    for layer, values in layers.items():
        cells = (_cell(values[name], 4 if name == 'routing_gap' else 3) for name in ratios)
        table.add_row(layer.removeprefix('layer_'), *cells)
    return table


def _print_report(report, experts):
    import rich.console
    import rich.text

    from moddepth_jax.analysis.report import expert_line, loss_table, verdict

    console = rich.console.Console(highlight=False)

    def line(text):
        # A Text, since a str would have its [brackets] read as markup.
        console.print(rich.text.Text(text), soft_wrap=True)

    text = f'the held-out text of {report["data"]}' if report['held_out'] else report['data']
    line(f'{report["workdir"]}, step {report["step"]} of {report["num_steps"]}, on {text}')
    console.print(loss_table(report, report['rule']))
    if 'routing_gap' in report:
        gap = report['routing_gap']
        line(f'routing gap {gap:+.4f} nats: {verdict(gap)}')
    if report['routing']:
        console.print(_layer_table(report))
        line(f'precision and recall: of {report["compared"]} against the top C of each row')
        if any(layer['refused_fraction'] > 0 for layer in report['routing'].values()):
            line('refused: let in by the rule, but beyond model.routing.cache_capacity')
    if 'experts' in report:
        line(expert_line(report['experts'], experts))
    batches, all_batches = report['batches'], report['all_batches']
    more = '; --num_batches=0 takes all of them' if batches < all_batches else ''
    line(f'{report["targets"]:,} targets in {batches} of {all_batches} batches{more}')


def _check(run):
    """Raises ValueError for flags that do not fit the run; returns its dataset."""
    from moddepth_jax.model.transformer import check_routing

    if ROUTING.value is not None:
        check_routing(run.hparams, ROUTING.value)
        if PER_LAYER.value:
            raise ValueError('--per_layer: the gap is that of the own rule; leave --routing out')
    if PER_LAYER.value and not run.hparams.model.routed_layers:
        raise ValueError('--per_layer: this run is dense, it has no routed block')
    return _load_dataset(run)


def main(_):
    from moddepth_jax.training import agreement, processes
    from moddepth_jax.training.summary import finite

    processes.join()
    run = saved.load(WORKDIR.value, _mesh)
    dataset = agreement.together(lambda: _check(run))
    num_batches = NUM_BATCHES.value
    if num_batches is None:
        num_batches = run.hparams.evaluation.final_batches
    num_batches = min(num_batches or math.inf, dataset.num_held_out_batches)
    with contextlib.ExitStack() as stack:
        file = sys.stdout
        if JSON.value not in (None, '-'):  # opened first: a bad path shows before the evaluation
            opened = functools.partial(open, JSON.value, 'w', encoding='utf-8')
            file = agreement.on_first(lambda: stack.enter_context(opened()))
        result = _evaluate(run, dataset, num_batches)
        if not processes.is_first():
            return
        report = _report(run, dataset, num_batches, result)
        if JSON.value:
            print(json.dumps(finite(report), indent=2, allow_nan=False), file=file)
    if JSON.value != '-':
        _print_report(report, run.hparams.model.experts)


if __name__ == '__main__':
    command.run(main)
