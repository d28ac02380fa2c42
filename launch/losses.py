"""The losses of a run on one text, for the console: what launch.evaluate prints."""

import math


def show(report: dict, experts) -> None:
    """Prints the losses, and what the routers and experts did.

    Args:
      report: as --json has it.
      experts: ExpertsHparams of the run.
    """
    import rich.console
    import rich.text

    from moddepth_jax.analysis.report import describe_gap, domain_table, expert_line, loss_table

    console = rich.console.Console(highlight=False)

    def line(text):
        # A Text, since a str would have its [brackets] read as markup.
        console.print(rich.text.Text(text), soft_wrap=True)

    text = f'the held-out text of {report["data"]}' if report['held_out'] else report['data']
    line(f'{report["workdir"]}, step {report["step"]} of {report["num_steps"]}, on {text}')
    console.print(loss_table(report, report['rule']))
    if 'domains' in report:
        title = 'by domain (above: means of these, weighted by share)'
        console.print(domain_table(report['domains'], title))
    if 'routing_gap' in report:
        gap = report['routing_gap']
        line(f'routing gap {gap:+.4f} nats: {describe_gap(gap)}')
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


def _cell(value, digits=3):
    return f'{value:.{digits}f}' if math.isfinite(value) else 'n/a'


def _layer_table(report):
    import rich.table

    layers = report['routing']
    ratios = ['selected_fraction', 'precision', 'recall']
    if any(values['refused_fraction'] > 0 for values in layers.values()):
        ratios.append('refused_fraction')
    if any('routing_gap' in values for values in layers.values()):
        ratios.append('routing_gap')
    table = rich.table.Table()
    table.add_column('layer')
    for name in ratios:
        table.add_column(name.replace('_', ' '), justify='right')
    for layer, values in layers.items():
        cells = (_cell(values[name], 4 if name == 'routing_gap' else 3) for name in ratios)
        table.add_row(layer.removeprefix('layer_'), *cells)
    return table
