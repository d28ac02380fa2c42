"""What a user sees when a run ends: numbers, a heatmap, a sample, and what to do next."""

import rich.console
import rich.table
import rich.text

from moddepth_jax.analysis.routing_maps import plot_routing, routing_grid, routing_record
from moddepth_jax.hparams import Hparams
from moddepth_jax.inference.generate import check_prompt, generate
from moddepth_jax.model.transformer import causal_routing
from moddepth_jax.training.loop import Run
from moddepth_jax.training.progress import format_count, format_seconds

HEATMAP_FILE = 'routing.png'
SAMPLE_FILE = 'sample.txt'


def prompt_tokens(hparams: Hparams, tokenizer) -> list[int]:
    """The separator and `report.prompt`. Raises ValueError where the sample would not fit."""
    encoded = tokenizer.encode(hparams.report.prompt.encode())
    prompt = [tokenizer.separator, *map(int, encoded)]
    check_prompt(hparams, prompt, hparams.report.sample_tokens)
    return prompt


def write_report(run: Run, console: rich.console.Console | None = None):
    """Writes the heatmap and the sample into the workdir and prints the end of the run."""
    console = console or rich.console.Console(highlight=False)
    console.print(_table(run))
    _print(console, *_lines(run))
    if run.hparams.model.routed_layers:
        _draw_heatmap(run)
    sample = _sample(run)
    (run.workdir / SAMPLE_FILE).write_text(sample, encoding='utf-8')
    rule = causal_routing(run.hparams) if run.hparams.model.routed_layers else 'no routing'
    _print(console, '', f'A sample ({rule}, temperature {run.hparams.report.temperature:g}):')
    _print(console, *(f'  | {line}' for line in sample.splitlines()), '')
    _print(console, *_next_steps(run))


def _print(console, *lines):
    for line in lines:
        # A Text, since a str would have its [brackets] read as markup.
        console.print(rich.text.Text(line), soft_wrap=True)


def _table(run):
    evaluation = run.summary['eval']
    table = rich.table.Table(title='held-out text', title_justify='left')
    for name in ('routing', 'nats a token', 'bits a byte'):
        table.add_column(name, justify='left' if name == 'routing' else 'right')
    bits_per_nat = evaluation['bits_per_byte'] / evaluation['loss']
    if not run.hparams.model.routed_layers:
        table.add_row('none (dense)', f'{evaluation["loss"]:.4f}', _bits(evaluation['loss'], run))
        return table
    rule = causal_routing(run.hparams)
    rows = {f'{rule} (causal: the honest one)': 'loss', 'top-C (sees the future)': 'loss_top_c'}
    for name, key in rows.items():
        bits = evaluation[key] * bits_per_nat
        table.add_row(name, f'{evaluation[key]:.4f}', f'{bits:.4f}')
    return table


def _bits(loss, run):
    return f'{run.summary["eval"]["bits_per_byte"] * loss / run.summary["eval"]["loss"]:.4f}'


def _lines(run):
    summary, evaluation = run.summary, run.summary['eval']
    if 'routing_gap' in evaluation:
        gap = evaluation['routing_gap']
        verdict = (
            'negligible'
            if abs(gap) <= 0.01
            else 'invalidates the run'
            if abs(gap) >= 0.05
            else 'to be reported with the loss'
        )
        yield f'routing gap {gap:+.4f} nats: {verdict}'
        for layer, values in summary['routing'].items():
            numbers = ', '.join(
                f'{name.replace("_", " ")} {value:.3f}'
                for name, value in values.items()
                if name != 'selected_gate'
            )
            yield f'{layer.replace("_", " ")}: {numbers}'
    budget = summary['flop_budget']
    share = f' ({summary["total_flops"] / budget:.2%} of the budget)' if budget else ''
    yield (
        f'{summary["final_step"]} steps, {summary["total_flops"]:.4g} FLOPs{share}, '
        f'{format_count(summary["parameters"])} parameters, {format_seconds(summary["seconds"])}'
    )


def _draw_heatmap(run):
    hparams = run.hparams
    batch = run.dataset.held_out_batch(0)
    rule = causal_routing(hparams)
    record = routing_record(run.state.params, hparams, batch, rule)
    width = min(hparams.report.heatmap_tokens, hparams.data.sequence_length)
    # The end of a row shows routing with context behind it.
    grid_LT = routing_grid(record, hparams, row=0)[:, -width:]
    tokens = [run.dataset.tokenizer.decode([token]) for token in batch['tokens_BT'][0, -width:]]
    fraction = hparams.model.routing.capacity
    title = f'{run.workdir.name}: routing by {rule}, trained at capacity {fraction:g}'
    plot_routing(grid_LT, tokens, title, run.workdir / HEATMAP_FILE)


def _sample(run):
    hparams, tokenizer = run.hparams, run.dataset.tokenizer
    prompt = prompt_tokens(hparams, tokenizer)
    tokens = generate(
        run.state.params,
        hparams,
        prompt,
        hparams.report.sample_tokens,
        temperature=hparams.report.temperature,
        seed=hparams.seed,
    )
    return tokenizer.decode(tokens[0]).decode('utf-8', 'replace')


def _next_steps(run):
    workdir, routed = run.workdir, run.hparams.model.routed_layers
    yield 'Next:'
    if routed:
        yield f'  look   {workdir / HEATMAP_FILE}: which bytes enter which block'
        yield '  compare  python -m launch.train --config=configs/dense_isoflop.py   (equal FLOPs)'
    else:
        yield '  compare  python -m launch.train --config=configs/mod_isoflop.py   (equal FLOPs)'
    yield f'  curves   tensorboard --logdir {workdir.parent}   (or {workdir / "metrics.jsonl"})'
