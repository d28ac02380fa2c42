"""The losses of a run on each domain below a folder: what launch.evaluate --domains does."""

import dataclasses
import glob
import math
import os
import pathlib
import sys


def find(folder: str) -> dict[str, str]:
    """`data.source` of each domain by its name, sorted: every file and every folder in `folder`.

    A folder is one that launch.prepare wrote, or all files below it. Hidden ones are left out.

    Raises:
      ValueError: one line, where `folder` is no folder, is itself prepared, or holds nothing.
    """
    from moddepth_jax.data.token_store import is_store

    path = pathlib.Path(os.path.expanduser(folder))
    right = 'must be a folder with one file or folder of text for each domain'
    if not path.is_dir():
        raise ValueError(f'--domains={folder}: no such folder; {right}')
    if is_store(path):
        raise ValueError(f'--domains={folder}: is one prepared text; give it to --data, or {right}')
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith('.'))
    if not names:
        raise ValueError(f'--domains={folder}: is empty; {right}')
    # Joined as strings: ./stdlib is a file there, stdlib would be a source.
    return {name: _source(os.path.join(os.path.expanduser(folder), name)) for name in names}


def _source(path):
    from moddepth_jax.data.mixture import is_prepared

    return f'{glob.escape(path)}/**/*' if os.path.isdir(path) and not is_prepared(path) else path


def load(folder: str, data, tokenizer, trained_on) -> tuple[dict, dict]:
    """(datasets, skipped) by name of the domain; in place of the latter, why.

    A domain that is shorter than one window is skipped.

    Args:
      folder: as `find` takes it.
      data: DataHparams of the run; `source` and `mixture` do not matter.
      tokenizer: of the run.
      trained_on: as `make_held_out` takes it.

    Raises:
      ValueError: one line with the domain's name, for text that cannot be read, and where all
        domains are too short.
    """
    from moddepth_jax.data import readers
    from moddepth_jax.data.mixture import is_prepared
    from moddepth_jax.data.pipeline import make_held_out
    from moddepth_jax.data.windows import TooShort

    datasets, skipped = {}, {}
    for name, source in find(folder).items():
        own = dataclasses.replace(data, source=source, mixture='')
        try:
            if not is_prepared(source):
                readers.find_files(source, 'domain', f'must hold {readers.describe_formats()}, or launch.prepare wrote it')
            datasets[name] = make_held_out(own, tokenizer, trained_on)
        except TooShort as error:
            skipped[name] = str(error).partition(': ')[2]
        except ValueError as error:
            text = in_flags(error, '--data').replace(f'--data={source!r}: ', '')
            raise ValueError(f'--domains={folder}: {name}: {text}') from None
    if not datasets:
        name, why = next(iter(skipped.items()))
        raise ValueError(f'--domains={folder}: no domain is long enough; {name}: {why}')
    return datasets, skipped


def in_flags(error: ValueError, source: str) -> str:
    """The error's line, the knobs that it blames as the flags of this command."""
    return str(error).replace('data.source', source).replace('data.text_field', '--text_field')


def measure(datasets: dict, num_batches: int | None, evaluate) -> dict[str, dict]:
    """What `evaluate(dataset, batches)` returns of each, with perplexity and what was read.

    Args:
      datasets: by name.
      num_batches: at most so many of each; None for all.
      evaluate: its result has `loss` and `bits_per_byte`.
    """
    from moddepth_jax.training.evaluate import perplexity

    found = {}
    for name, dataset in datasets.items():
        batches = min(num_batches or math.inf, dataset.num_held_out_batches)
        result = evaluate(dataset, batches)
        found[name] = {
            'source': dataset.corpus.name,
            'text': 'held out' if dataset.held_back else 'all',
            'corpus_sha256': dataset.corpus.sha256,
            'batches': batches,
            'all_batches': dataset.num_held_out_batches,
            'perplexity': perplexity(result['loss']),
            **result,
        }
    return found


def together(domains: dict[str, dict]) -> dict:
    """The losses over the targets of all domains."""
    from moddepth_jax.training.evaluate import perplexity

    targets = sum(values['targets'] for values in domains.values())
    nats, num_bytes, gaps = 0.0, 0.0, []
    for values in domains.values():
        mine = values['loss'] * values['targets']
        nats += mine
        num_bytes += mine / math.log(2) / values['bits_per_byte']
        gaps += [values['routing_gap'] * values['targets']] if 'routing_gap' in values else []
    loss = nats / targets
    whole = {'targets': targets, 'loss': loss, 'perplexity': perplexity(loss)}
    whole['bits_per_byte'] = nats / math.log(2) / num_bytes
    return whole | ({'routing_gap': sum(gaps) / targets} if gaps else {})


def show(report: dict) -> None:
    """Prints the table of the domains, and those that were skipped on stderr."""
    import rich.console
    import rich.text

    from moddepth_jax.analysis.report import domain_table

    console = rich.console.Console(highlight=False)
    rule = report['rule'] or 'no routing (causal as it is)'
    head = f'{report["workdir"]}, step {report["step"]} of {report["num_steps"]}, by {rule}'
    console.print(rich.text.Text(head), soft_wrap=True)
    console.print(domain_table(report['domains'] | {'together': report['together']}))
    found = report['domains'].items()
    cut = [name for name, values in found if values['batches'] < values['all_batches']]
    if cut:
        first = f'the first {report["num_batches"]} batches of {", ".join(cut)}'
        line = rich.text.Text(f'{first}; --num_batches=0 takes all of them')
        console.print(line, soft_wrap=True)
    for name, why in report['skipped'].items():
        print(f'skipped {name}: {why}', file=sys.stderr)
