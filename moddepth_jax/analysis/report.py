"""The report at the end of a run: numbers, pictures, a sample, and suggested next commands.

Modules that draw are imported inside functions, because Matplotlib is slow to import.
"""

import dataclasses
import functools
import importlib
import json
import math
import pathlib
import shlex

import numpy as np
import rich.console
import rich.table
import rich.text

from moddepth_jax.analysis.depth_mass import depth_mass
from moddepth_jax.analysis.source_mass import has_sources, source_mass
from moddepth_jax.data.directory import write_atomically
from moddepth_jax.hparams import Hparams
from moddepth_jax.hparams.depth import AUTO_KNOBS, COUNT_KNOBS
from moddepth_jax.hparams.rules import causal_routing
from moddepth_jax.inference.generate import generate
from moddepth_jax.training import routing_gap
from moddepth_jax.training.loop import Run
from moddepth_jax.training.metrics import METRICS_FILE, replace_nonfinite
from moddepth_jax.training.progress import format_count, format_seconds, printable
from moddepth_jax.training.run_dir import CONFIG_FILE
from moddepth_jax.training.tables import Table, to_rich

SAMPLE_FILE = 'sample.txt'
ROC_FILE = 'router_roc.json'
DEPTH_TOKENS = 4096  # held-out tokens whose attention is measured, rounded to complete rows
# Values of knobs that belong to a depth stream or a router, which every other one accepts.
_OF_NO_STREAM = dict.fromkeys(AUTO_KNOBS, 'auto') | dict.fromkeys(COUNT_KNOBS, 0)
_OF_NO_STREAM |= {'attention_slot_projection': False, 'slot_window': 0}
_OF_NO_ROUTER = {'gate': 'auto', 'causal_rule': 'auto', 'loop_update': 'auto', 'loop_keys': 'own'}


def prompt_tokens(hparams: Hparams, tokenizer) -> tuple[list[int], int]:
    """Return the separator and `report.prompt` as ids, and the number of tokens to sample.

    If they do not fit the context, the prompt gets at most half of it, and the sample the rest.
    """
    context = hparams.data.sequence_length
    encoded = tokenizer.encode(hparams.report.prompt.encode())
    prompt = [tokenizer.separator, *map(int, encoded)][: max(1, context // 2)]
    return prompt, min(hparams.report.sample_tokens, context - len(prompt))


def report_programs(state, dataset):
    """Return functions, by name, that compile what `write_report` runs, for an abstract state."""
    run, model = Run(state.hparams, None, state, dataset, None), state.hparams.model
    heatmaps = 'moddepth_jax.analysis.heatmaps'
    programs = {'importing matplotlib': functools.partial(importlib.import_module, heatmaps)}
    if model.routed_layers:
        programs['compiling the routing of the picture'] = functools.partial(_routing_record, run)
    if model.depth.slots_per_layer:
        programs['compiling the attention on slots'] = functools.partial(_mass, run, depth_mass)
    if has_sources(state.hparams):
        programs['compiling the weights of sources'] = functools.partial(_mass, run, source_mass)
    if state.hparams.report.sample_tokens:
        programs['compiling the decoding of the sample'] = functools.partial(_sample, run)
    return programs


def write_report(run: Run, console: rich.console.Console | None = None):
    """Write the pictures and the sample, if any, into the workdir and print the report."""
    console = console or rich.console.Console(highlight=False)
    model = run.hparams.model
    rule = causal_routing(run.hparams) if model.looks_ahead else None
    console.print(loss_table(run.summary['eval'], rule, title='held-out text'))
    if 'domains' in run.summary:
        title = 'held-out text by domain (above: means weighted by share)'
        console.print(domain_table(run.summary['domains'], title))
    _print(console, *_lines(run))
    if model.routed_layers and run.hparams.data.source == 'recall':
        _print(console, *_roc_lines(run))
    pictures = _pictures(run.hparams)
    has_sample = run.hparams.report.sample_tokens > 0
    names = [f'drawing {", ".join(file for file, *_ in pictures)}'] * bool(pictures)
    names += ['writing a sample'] * has_sample
    _print(console, *[f'{" and ".join(names)} ...'] * bool(names))
    for file, _, draw in pictures:
        draw(run, run.workdir / file)
    _print(console, '', *(_sample_lines(run, rule) if has_sample else ()))
    _print(console, *_next_steps(run))


def _sample_lines(run, rule):
    """Write the sample. Yields the lines of the report about it."""
    sample, notes = _sample(run)
    (run.workdir / SAMPLE_FILE).write_text(sample, encoding='utf-8')
    temperature = f'temperature {run.hparams.report.temperature:g}'
    yield f'A sample ({rule or "no routing"}, {temperature}):'
    yield from (f'  | {line}' for line in sample.splitlines())
    yield from (*notes, '')


def _print(console, *lines):
    for line in lines:
        # A Text, since a str would have its [brackets] read as markup.
        console.print(rich.text.Text(line), soft_wrap=True)


def loss_table(evaluation: dict, rule: str | None, title: str | None = None) -> rich.table.Table:
    """Return a table of the losses of an evaluation; `rule` is None if the model is causal."""
    top_c = 'top-C (sees the future)'
    rows = {top_c if rule == 'top_c' else rule or 'none (causal as it is)': 'loss'}
    if 'loss_top_c' in evaluation:
        rows = {f'{rule} (causal: the honest one)': 'loss', top_c: 'loss_top_c'}
    bits_per_nat = evaluation['bits_per_byte'] / evaluation['loss']
    losses = {name: evaluation[key] for name, key in rows.items()}
    lines = {n: [f'{loss:.4f}', f'{loss * bits_per_nat:.4f}'] for n, loss in losses.items()}
    return to_rich(Table(title, ['routing', 'nats per token', 'bits per byte'], lines))


def _lines(run):
    summary, evaluation = run.summary, run.summary['eval']
    if 'routing_gap' in evaluation:
        yield routing_gap.describe(evaluation['routing_gap'], evaluation['loss'])
        for layer, values in summary['routing'].items():
            names = ('selected_fraction', 'precision', 'recall')
            shown = ', '.join(f'{name} {values[name]:.3f}' for name in names)
            yield f'{layer}: {shown}'.replace('_', ' ')
    batches, asked = run.dataset.num_held_out_batches, run.hparams.evaluation.final_batches
    if batches < asked:
        found = f'{batches} held-out batches, evaluation.final_batches={asked} asks for more'
        yield f'{found}: for a more exact loss, raise data.held_out_fraction'
    if run.hparams.model.expert_layers:
        yield expert_line(summary['experts'], run.hparams.model.experts)
    budget = summary['flop_budget']
    share = f' ({summary["total_flops"] / budget:.2%} of the budget)' if budget else ''
    yield (
        f'{summary["final_step"]} steps, {summary["total_flops"]:.4g} FLOPs{share}, '
        f'{format_count(summary["parameters"])} parameters, '
        f'{format_seconds(summary["seconds"])} of stepping'
    )
    used = [f'MFU {summary["mfu"]:.1%}'] if 'mfu' in summary else []
    if summary.get('peak_memory'):
        size, holder = summary['peak_memory']
        used.append(f'peak memory {format_count(size)}B of {holder}')
    if used:
        yield ', '.join(used)


def expert_line(layers, hparams):
    """Describe the expert loads of a summary: the most uneven layer, and means over layers."""
    loads = {layer: values['largest_load'] for layer, values in layers.items()}
    fullest = max(loads, key=lambda layer: np.nan_to_num(loads[layer]))
    where = fullest.replace('_', ' ')
    parts = [f'experts: largest load {loads[fullest]:.2f} of their mean ({where})']
    if hparams.num_noop:
        counted = hparams.num_noop / hparams.num_choices
        noop = _mean_ratio(layers, 'noop_fraction')
        parts.append(f'no-op {noop:.2f} (FLOPs are counted at {counted:.2f})')
    if hparams.row_capacity:
        parts.append(f'dropped {_mean_ratio(layers, "dropped_fraction"):.2f}')
    if hparams.choice == 'expert':
        passed = _mean_ratio(layers, 'computed_fraction') * hparams.top_k
        parts.append(f'{passed:.2f} experts per token, {hparams.top_k} in training')
    if unused := sum(values['unused'] for values in layers.values()):
        parts.append(f'{unused:.0f} without a token')
    return ', '.join(parts)


def _mean_ratio(experts, name):
    """The mean of a ratio over the layers where it is finite; NaN if there are none."""
    found = [values[name] for values in experts.values() if math.isfinite(values[name])]
    return sum(found) / len(found) if found else math.nan


def _roc_lines(run):
    """Lines on whether the routers found the hard positions, which the recall corpus knows."""
    from moddepth_jax.analysis.router_roc import router_roc

    num_batches = run.hparams.evaluation.final_batches
    found = {
        routing: router_roc(run.state.variables, run.hparams, run.dataset, num_batches, routing)
        for routing in ('top_c', causal_routing(run.hparams))
    }
    text = json.dumps(replace_nonfinite(found), indent=2, allow_nan=False) + '\n'
    write_atomically(run.workdir / ROC_FILE, text)
    for layer, values in found['top_c']['layers'].items():
        yield (
            f'layer {layer:02d}: ROC area {values["area"]:.3f} of its scores for the positions '
            'that need far context (0.5: no information)'
        )
    for routing, values in found.items():
        yield f'answers recalled under {routing}: {values["recall_accuracy"]:.1%}'


def _routing_record(run):
    from moddepth_jax.analysis.heatmaps import routing_record

    batch, rule = run.dataset.held_out_batch(0), causal_routing(run.hparams)
    return routing_record(run.state.variables, run.hparams, batch, rule)


def _draw_routing(run, path):
    from moddepth_jax.analysis import heatmaps

    hparams, record = run.hparams, _routing_record(run)
    length = hparams.data.sequence_length
    width = min(hparams.report.heatmap_tokens, length)
    # The end of a row shows routing with much context. Choose the row of text (others are padding)
    # with the least whitespace there: indented code begins with many columns of spaces.
    batch = run.dataset.held_out_batch(0)
    pieces = {
        row: run.dataset.tokenizer.pieces(batch['tokens_BT'][row, -width:])
        for row in np.flatnonzero(batch['segment_ids_BT'][:, 0])
    }
    row = min(pieces, key=lambda row: sum(map(bytes.isspace, pieces[row])))
    sides = (side[:, row] for side in (record.top_c_BT, record.selected_BT, record.dropped_BT))
    top_c_RT, selected_RT, dropped_RT = sides
    grid_LT = heatmaps.routing_grid(top_c_RT, selected_RT, hparams, dropped_RT)
    loops = f'{length} to ' * hparams.model.routing.routes_loops
    capacity = f'{loops}{hparams.model.routing.num_selected(length)} of {length} tokens per row'
    rule = causal_routing(hparams)
    title = f'{run.workdir.name}: routing by {rule}, trained at {capacity}'
    names = hparams.model.block_names
    heatmaps.plot_routing(grid_LT[:, -width:], pieces[row], title, path, names=names)


def _draw_expert_load(run, path):
    from moddepth_jax.analysis import heatmaps

    load = heatmaps.expert_load(run.summary['experts'], run.hparams.model.experts.num_routed)
    _draw_numbers(run, load, heatmaps.plot_expert_load, 'tokens on each expert', path)


def _mass(run, measure):
    """The result of depth_mass or source_mass on about DEPTH_TOKENS held-out tokens."""
    rows = max(1, DEPTH_TOKENS // run.hparams.data.sequence_length)
    batch = {name: side[:rows] for name, side in run.dataset.held_out_batch(0).items()}
    return measure(run.state.variables, run.hparams, batch, causal_routing(run.hparams))


def _draw_depth_mass(run, path):
    from moddepth_jax.analysis import heatmaps

    mass, what = _mass(run, depth_mass), 'attention on the slots of earlier layers'
    _draw_numbers(run, mass, heatmaps.plot_depth_mass, what, path)


def _draw_source_mass(run, path):
    from moddepth_jax.analysis import heatmaps

    mass, what = _mass(run, source_mass), 'weights of earlier outputs'
    _draw_numbers(run, mass, heatmaps.plot_source_mass, what, path)


def _draw_numbers(run, measured, plot, what, path):
    """Plot a NamedTuple; write its fields and the routing under which they were measured."""
    plot(measured, f'{run.workdir.name}: {what}, held-out text', path)
    numbers = {name: np.asarray(value).tolist() for name, value in measured._asdict().items()}
    content = replace_nonfinite({'routing': causal_routing(run.hparams), **numbers})
    text = json.dumps(content, indent=2, allow_nan=False) + '\n'
    write_atomically(path.with_suffix('.json'), text)


def _pictures(hparams):
    """(file, description, drawing function) of each picture that applies to the model."""
    model = hparams.model
    routing = 'routing.png', 'tokens selected by each routed block', _draw_routing
    load = 'expert_load.png', 'how evenly the tokens fall on the experts', _draw_expert_load
    mass = 'depth_mass.png', 'how much attention goes to earlier layers', _draw_depth_mass
    sources = 'source_mass.png', 'which earlier outputs each sublayer reads', _draw_source_mass
    pictures = (
        (routing, model.routed_layers),
        (load, model.expert_layers),
        (mass, model.depth.slots_per_layer),
        (sources, has_sources(hparams)),
    )
    return [picture for picture, applies in pictures if applies]


def _sample(run):
    hparams, tokenizer, knobs = run.hparams, run.dataset.tokenizer, run.hparams.report
    prompt, num_tokens = prompt_tokens(hparams, tokenizer)
    sampling = {'temperature': knobs.temperature, 'top_p': knobs.top_p, 'seed': hparams.seed}
    options = sampling | {'tokenizer': tokenizer, 'stop': False}
    result = generate(run.state.variables, hparams, [prompt], num_tokens, **options)
    if result is None:  # the state is abstract
        return None
    text = tokenizer.decode(result.tokens[0]).decode('utf-8', 'replace')
    return printable(text), result.notes


def _next_steps(run):
    workdir, pictures = run.workdir, _pictures(run.hparams)
    yield 'Next:'
    for i, (file, shows, _) in enumerate(pictures):
        yield f'  {"" if i else "look":9}{workdir / file}: {shows}'
    if not pictures and run.hparams.report.sample_tokens:
        yield f'  read     {workdir / SAMPLE_FILE}'
    if counterpart := _counterpart(run.hparams):
        name, knobs = counterpart
        if not run.hparams.flop_budget:
            flops = f'{run.summary["total_flops"]:.8g}'.replace('e+', 'e')
            knobs |= {'training.num_steps': 0, 'flop_budget': flops}
        other = pathlib.Path(f'{workdir}-{name}')
        if run.summary.get('extended') and other.exists():  # that of the shorter run
            other = f'{other}-{run.summary["final_step"]}'
        other = shlex.quote(str(other))
        config, mine = map(shlex.quote, (str(workdir / CONFIG_FILE), str(workdir)))
        yield '  compare  at equal FLOPs:'
        yield f'           python -m launch.train --config={config} --workdir={other} \\'
        yield ' ' * 15 + ' '.join(f'--config.{knob}={value}' for knob, value in knobs.items())
        yield f'           python -m launch.compare {mine} {other}'
    yield f'  curves   {workdir / METRICS_FILE}, or pip install tensorboard and'
    yield f'           tensorboard --logdir {shlex.quote(str(workdir.parent))}'


def _counterpart(hparams):
    """A model to compare with: its name, and the knobs that remove a mechanism or add routing.

    They include knobs of the mechanism that the other model refuses. None if it is impossible.
    """
    model = hparams.model
    if model.depth.stream != 'residual':
        name, group, changes, others = 'residual', 'depth', {'stream': 'residual'}, _OF_NO_STREAM
    elif model.routed_layers:
        name, group, changes, others = 'unrouted', 'routing', {'router': 'none'}, _OF_NO_ROUTER
    elif model.expert_layers:
        name, group, changes, others = 'mlp', 'experts', {'choice': 'none'}, {}
    else:
        name, group, changes, others = 'mod', 'routing', {'router': 'learned'}, {}
    mine = getattr(model, group)
    try:
        other = dataclasses.replace(mine, **changes, **others)
        dataclasses.replace(hparams, model=dataclasses.replace(model, **{group: other}))
    except ValueError:
        return None
    # launch.train sets stored defaults to auto again by itself.
    default = dataclasses.replace(mine, **others)
    changes |= {
        knob: others[knob] for knob in others if getattr(mine, knob) != getattr(default, knob)
    }
    return name, {f'model.{group}.{knob}': value for knob, value in changes.items()}


# key: (heading, number format). Keys that no text has get no column.
_COLUMNS = {
    'text': ('text', ''),
    'share': ('share', '.1%'),
    'epochs': ('epochs', '.2f'),
    'targets': ('targets', ',d'),
    'loss': ('nats a\ntoken', '.4f'),
    'perplexity': ('perplexity', '.2f'),
    'bits_per_byte': ('bits a\nbyte', '.4f'),
    'routing_gap': ('routing\ngap', '+.4f'),
}


def domain_table(domains: dict[str, dict], title: str | None = None) -> rich.table.Table:
    """Return a table of losses with one row per text; the values have some keys of _COLUMNS."""
    keys = [key for key in _COLUMNS if any(key in values for values in domains.values())]
    lines = {name: [_cell(values, key) for key in keys] for name, values in domains.items()}
    return to_rich(Table(title, ['domain', *(_COLUMNS[key][0] for key in keys)], lines))


def _cell(values, key):
    value, form = values.get(key, ''), _COLUMNS[key][1]
    if isinstance(value, str):
        return value
    return format(value, form) if math.isfinite(value) else 'n/a'
