"""Evaluates a run, finished or not, on its held-out text or on other text.

python -m launch.evaluate --workdir=runs/mod_isoflop
python -m launch.evaluate --workdir=runs/mod_isoflop --routing=dense --num_batches=0
python -m launch.evaluate --workdir=runs/mod_isoflop --data=notes --json=notes.json
python -m launch.evaluate --workdir=runs/mod_isoflop --domains=corpora --json=domains.json
python -m launch.evaluate --workdir=runs/moda --mesh=data=2,fsdp=4

It runs on any devices and with any number of processes, like launch.train.
"""

import collections
import copy
import dataclasses
import functools
import math
import os
import pathlib
import sys

from absl import flags

from launch import cli, first_checkpoint
from moddepth_jax.hparams import checks

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
cli.define_step()
cli.define_loops()
cli.define_exit_threshold()
ROUTING = cli.define_routing('top_c', more=', compared with top_c')
DATA = flags.DEFINE_string(
    'data',
    None,
    'Other text: a file, folder, glob, output of launch.prepare, or stdlib, python_environment, '
    'synthetic, recall. Of the text that the run was trained on, only held-out documents are read.',
)
DOMAINS = flags.DEFINE_string('domains', None, 'Folder whose files and folders are texts.')
TEXT_FIELD = flags.DEFINE_string('text_field', None, 'Text field of --data or --domains.')
ENCODING = flags.DEFINE_string('encoding', 'utf-8', 'Encoding of --data or --domains.')
NUM_BATCHES = flags.DEFINE_integer(
    'num_batches', None, '0: all. Default: evaluation.final_batches of the run.', lower_bound=0
)
PER_LAYER = flags.DEFINE_boolean('per_layer', False, 'Also the routing gap of each routed block.')
MESH = cli.define_mesh('As in launch.train. Default: data=N; N divides a micro-batch.', default='')
JSON = flags.DEFINE_string('json', None, 'File for the result; -: only the result, on stdout.')


def _load_data(run):
    """(datasets by name, reasons of skipped ones); without --domains, the name is None."""
    from moddepth_jax.data.domains import load_domains, name_flags
    from moddepth_jax.data.pipeline import make_held_out
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.hparams.rules import check_routing

    if ROUTING.value is not None:
        check_routing(run.hparams, ROUTING.value)
    if PER_LAYER.value and not run.hparams.model.routed_layers:
        raise ValueError('--per_layer: this run is dense and has no routed block')
    if PER_LAYER.value and not run.hparams.model.routing.looks_ahead:
        router = run.hparams.model.routing.router
        raise ValueError(f'--per_layer: the router {router} is causal in training and has no gap')
    data = run.hparams.data
    tokenizer = tokenizer_of(data, WORKDIR.value)
    if DATA.value is None and DOMAINS.value is None:
        right = 'if it was moved or is on another machine, name a text: --data=TEXT'
        return {None: cli.load_own_data(run, tokenizer, right)}, {}
    if TEXT_FIELD.value is not None:
        data = dataclasses.replace(data, text_field=TEXT_FIELD.value)
    data = dataclasses.replace(data, encoding=ENCODING.value)
    trained_on = first_checkpoint.trained_on(WORKDIR.value, run.fingerprint)
    if DOMAINS.value is not None:
        return load_domains(DOMAINS.value, data, tokenizer, trained_on)
    if DATA.value == 'mixture':
        raise ValueError('--data=mixture: must be one text; --domains=FOLDER evaluates several')
    data = dataclasses.replace(data, source=DATA.value, mixture='')
    try:
        return {None: make_held_out(data, tokenizer, trained_on)}, {}
    except ValueError as error:  # the message names knobs, which are flags here
        raise ValueError(name_flags(str(error))) from None


def _mesh(hparams):
    """The mesh of --mesh, which must divide a micro-batch, as in training."""
    import jax

    from moddepth_jax.training.mesh import check_mesh, make_mesh

    rows = hparams.data.batch_size // hparams.training.accumulate_steps
    default = f'data={math.gcd(rows, jax.device_count())}' if jax.process_count() == 1 else ''
    mesh = make_mesh(MESH.value or default)
    check_mesh(hparams, mesh)
    return mesh


def _measure(run, dataset, most):
    """The fields of --json for one text, on at most `most` batches (0: all)."""
    import jax

    from moddepth_jax.training.evaluate import evaluate, evaluate_causal, num_passes
    from moddepth_jax.training.summary import by_layer

    hparams, mesh = run.hparams_of_stage, run.state.step.sharding.mesh
    model = hparams.model
    num_batches = min(most or math.inf, dataset.num_held_out_batches)
    passes = 1 if ROUTING.value is not None else num_passes(model, PER_LAYER.value)
    with jax.set_mesh(mesh), cli.progress_bar('evaluating', passes * num_batches) as advance:

        def held_out_batch(index):
            advance()
            return dataset.held_out_batch(index)

        batches = copy.copy(dataset)
        batches.held_out_batch = held_out_batch
        measure = functools.partial(evaluate, routing=ROUTING.value)
        if ROUTING.value is None:
            per_layer = num_batches * PER_LAYER.value
            measure = functools.partial(evaluate_causal, batches_per_layer=per_layer)
        result = measure(run.state.variables, hparams, batches, mesh, num_batches)
    return {
        'data': dataset.corpus.name,
        'held_out': dataset.held_back,
        'corpus_sha256': dataset.corpus.sha256,
        'batches': num_batches,
        'all_batches': dataset.num_held_out_batches,
        **result,
        **by_layer(model, result),
    }


def _measure_domains(run, datasets, skipped, most):
    """The fields of --json for all domains, and for their targets together."""
    from moddepth_jax.training.evaluate import perplexity

    found, totals = {}, collections.Counter()
    for name, dataset in datasets.items():
        result = _measure(run, dataset, most)
        source, held_out = result.pop('data'), result.pop('held_out')
        found[name] = {'source': source, 'text': 'held out' if held_out else 'all'} | result
        found[name]['perplexity'] = perplexity(result['loss'])
        targets, nats = result['targets'], result['loss'] * result['targets']
        totals.update(targets=targets, nats=nats, gap=result.get('routing_gap', 0) * targets)
        totals['bytes'] += nats / math.log(2) / result['bits_per_byte']
    loss = totals['nats'] / totals['targets']
    together = {'targets': totals['targets'], 'loss': loss, 'perplexity': perplexity(loss)}
    together['bits_per_byte'] = totals['nats'] / math.log(2) / totals['bytes']
    if 'routing_gap' in result:
        together['routing_gap'] = totals['gap'] / totals['targets']
    texts = {'data': DOMAINS.value, 'together': together, 'domains': found, 'skipped': skipped}
    return {'num_batches': most, **texts}


def _print_report(report, model):
    """Print the losses of one text, and statistics of routers and experts."""
    from moddepth_jax.analysis.report import domain_table, expert_line, loss_table
    from moddepth_jax.training import routing_gap
    from moddepth_jax.training.tables import Table, to_rich

    text = f'the held-out text of {report["data"]}' if report['held_out'] else report['data']
    cli.show(f'{_of_run(report)}, on {text}', loss_table(report, report['rule']))
    if 'domains' in report:
        title = 'by domain (above: means weighted by share)'
        cli.show(domain_table(report['domains'], title))
    if 'routing_gap' in report:
        cli.show(routing_gap.describe(report['routing_gap'], report['loss']))
    if layers := report['routing'].values():
        columns = {'selected_fraction': 3}
        columns |= {'precision': 3, 'recall': 3} if report['compared'] else {}
        refused = any(layer['refused_fraction'] > 0 for layer in layers)
        columns |= {'refused_fraction': 3} if refused else {}
        columns |= {'routing_gap': 4} if any('routing_gap' in layer for layer in layers) else {}
        rows = {
            name.removeprefix('layer_'): [
                f'{layer[column]:.{places}f}' if math.isfinite(layer[column]) else 'n/a'
                for column, places in columns.items()
            ]
            for name, layer in report['routing'].items()
        }
        heads = ['layer', *(column.replace('_', ' ') for column in columns)]
        cli.show(to_rich(Table(None, heads, rows)))
        if report['compared']:
            cli.show(f'precision and recall: {report["compared"]} against the top C of each row')
        of = 'loop after the first' if model.routing.routes_loops else 'routed block'
        cli.show(f'tokens that no {of} selects: {report["dead_tokens"]:.1%}')
        if refused:
            cli.show('refused: selected by the rule, but beyond model.routing.cache_capacity')
    if 'loops_per_token' in report:
        found = f'{report["loops_per_token"]:.3f} of {report["loops"]} loops per token'
        cli.show(f'{found}; all loops are computed for every token')
    if report['experts']:
        cli.show(expert_line(report['experts'], model.experts))
    batches, all_batches = report['batches'], report['all_batches']
    more = '; --num_batches=0 reads all of them' if batches < all_batches else ''
    cli.show(f'{report["targets"]:,} targets in {batches} of {all_batches} batches{more}')


def _of_run(report):
    loops = f' in {report["loops"]} loops' if report['loops'] else ''
    return f'{report["workdir"]}, step {report["step"]} of {report["num_steps"]}{loops}'


def _print_domains(report):
    """Print the table of the domains, and on stderr the skipped ones."""
    from moddepth_jax.analysis.report import domain_table

    rule, domains = report['rule'] or 'no routing (causal as it is)', report['domains']
    all_rows = domain_table(domains | {'together': report['together']})
    cli.show(f'{_of_run(report)}, by {rule}', all_rows)
    if cut := [name for name in domains if domains[name]['batches'] < domains[name]['all_batches']]:
        first = f'the first {report["num_batches"]} batches of {", ".join(cut)}'
        cli.show(f'{first}; --num_batches=0 reads all of them')
    for name, reason in report['skipped'].items():
        print(f'skipped {name}: {reason}', file=sys.stderr)


def _may_have_rows(source):
    """Whether a file of `source` has rows; True if it cannot be read, which is reported later."""
    from moddepth_jax.data.readers import has_format
    from moddepth_jax.data.sources import MADE, find_files
    from moddepth_jax.data.token_store import is_started

    if source in MADE or is_started(source):
        return False
    try:
        _, files, _ = find_files(source, 'data.source', '', ENCODING.value)
    except ValueError:
        return True
    return any(map(has_format, files))


def _check_text_field():
    """Raise ValueError for --text_field if no file of --data or --domains has rows."""
    from moddepth_jax.data.readers import FORMATS

    flag, sources = f'--data={DATA.value}', [DATA.value]
    if DOMAINS.value is not None:
        folder = pathlib.Path(os.path.expanduser(DOMAINS.value))
        flag, sources = f'--domains={DOMAINS.value}', list(map(str, folder.glob('[!.]*')))
    if sources and not any(map(_may_have_rows, sources)):
        right = f'has no file with rows ({", ".join(FORMATS)}); leave --text_field out'
        raise ValueError(f'--text_field={TEXT_FIELD.value}: {flag} {right}')


def _check_flags():
    """Raise ValueError for flags that exclude each other, before the run is read."""
    checks.encoding('--encoding', ENCODING.value)
    if DATA.value is not None and DOMAINS.value is not None:
        right = 'cannot be combined with --data; leave one out'
        raise ValueError(f'--domains={DOMAINS.value}: {right}')
    own = DATA.value is None and DOMAINS.value is None
    for flag in (TEXT_FIELD, ENCODING) if own else ():
        if flag.present:
            found = f'--{flag.name}={flag.value}'
            raise ValueError(f'{found}: belongs to --data or --domains, which is missing')
    if TEXT_FIELD.present:
        _check_text_field()
    if PER_LAYER.value and ROUTING.value is not None:
        raise ValueError('--per_layer: the gap is that of the rule of the run; leave --routing out')


def main(_):
    cli.check_run(WORKDIR.value, looks_ahead=True)
    from moddepth_jax.hparams.rules import causal_routing
    from moddepth_jax.training import multihost

    multihost.initialize()
    multihost.run_on_all(_check_flags)
    run = cli.load_saved_run(WORKDIR.value, _mesh)
    datasets, skipped = multihost.run_on_all(lambda: _load_data(run))
    if multihost.is_leader():
        for note in filter(None, (dataset.corpus.left_out for dataset in datasets.values())):
            print(note, file=sys.stderr)
    model, own = run.hparams.model, causal_routing(run.hparams)
    most, default = NUM_BATCHES.value, run.hparams.evaluation.final_batches
    most = default if most is None else most
    path = JSON.value if multihost.is_leader() else None
    with multihost.run_on_all(lambda: cli.open_json(path)) as file:
        if DOMAINS.value is None:
            result = _measure(run, datasets[None], most)
        else:
            result = _measure_domains(run, datasets, skipped, most)
        if not multihost.is_leader():
            return
        rule = ROUTING.value or own
        compared = own if rule == 'top_c' else rule
        report = {
            'workdir': WORKDIR.value,
            'step': run.step,
            'num_steps': run.num_steps,
            'loops': model.loops if model.looped else None,
            'rule': rule if model.looks_ahead else None,
            'compared': compared if model.routed_layers and model.routing.looks_ahead else None,
            **result,
        }
        if JSON.value:
            cli.write_json(report, file)
    if JSON.value == '-':
        return
    if DOMAINS.value is None:
        _print_report(report, model)
    else:
        _print_domains(report)


if __name__ == '__main__':
    cli.run(main)
