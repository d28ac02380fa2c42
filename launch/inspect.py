"""Shows what the model of a run does with each token of a text: a web page, pictures, numbers.

python -m launch.inspect --workdir=runs/mod_isoflop --text=setup.py --out=runs/inspection
python -m launch.inspect --workdir=runs/mod_isoflop --text='f(x) = x' --out=runs/inspection
git show | python -m launch.inspect --workdir=runs/mod_isoflop --text=- --out=runs/inspection
python -m launch.inspect --workdir=runs/mod_isoflop --importance --out=runs/importance

Open runs/inspection/routing.html in a browser; it needs no network. --importance ranks the blocks
by how much skipping each one costs on the held-out text of the run.
"""

import json
import os
import pathlib
import re
import sys

if __name__ == 'inspect':  # a script in launch/ imports this instead of Python's own module
    print(
        'error: start commands as modules, such as python -m launch.train, not as files',
        file=sys.stderr,
    )
    sys.exit(2)

from absl import flags

from launch import cli
from moddepth_jax.hparams import checks
from moddepth_jax.training.progress import printable
from moddepth_jax.training.tables import Table, to_rich

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
cli.define_step()
cli.define_loops()
TEXT = flags.DEFINE_string('text', None, 'A file, - for stdin, or the text itself.')
OUT = flags.DEFINE_string('out', None, 'Directory for page, numbers and pictures.', required=True)
ROUTING = cli.define_routing('top_c (looks at the future)')
ENCODING = flags.DEFINE_string('encoding', 'utf-8', 'Encoding of the file or stdin.')
LANGUAGE = flags.DEFINE_enum('language', 'auto', ['auto', 'python', 'prose'], 'Kind of text.')
MAX_TOKENS = flags.DEFINE_integer('max_tokens', 5000, 'Most tokens to show.', lower_bound=1)
IMPORTANCE = flags.DEFINE_boolean('importance', False, 'Rank blocks by the cost of skipping them.')
NUM_BATCHES = flags.DEFINE_integer(
    'num_batches', None, 'For --importance. Default: evaluation.num_batches.', lower_bound=1
)
OF_TEXT = ('text', 'encoding', 'language', 'max_tokens')
FILES = ('routing.html', 'routing.json', 'routing.png', 'depth_mass.png', 'depth_mass.json')
STRIP = 128  # tokens in a line of the picture
MAX_DRAWN = 1024  # tokens in the picture
_NO_EXITS = 'tokens do not leave the loops here (loop_exit_threshold={})'


def _read_text():
    """The bytes of --text, and its name."""
    from moddepth_jax.data.readers import BadText, read_text, to_utf8

    value, path = TEXT.value, pathlib.Path(TEXT.value)
    checks.encoding('--encoding', ENCODING.value)
    try:
        if value == '-':
            return to_utf8('stdin', sys.stdin.buffer.read(), ENCODING.value), 'stdin'
        if os.path.exists(value):
            return read_text(path, ENCODING.value), path.name
    except BadText as error:
        raise ValueError(str(error).replace('data.encoding', '--encoding')) from None
    if re.fullmatch(r'[\w.~-]*(/[\w.~-]*)+|[\w-]+\.[A-Za-z]{1,5}', value):
        right = 'use --text=- and stdin for a text that looks like a file name'
        raise ValueError(f'--text={value}: no such file; {right}')
    return to_utf8('--text', os.fsencode(value), 'utf-8'), 'the text of --text'


def _printable(name):
    return printable(os.fsencode(name).decode('utf-8', 'replace'))


def _measure(run, text, name, out):
    """The content of routing.json, the Inspection, and the DepthMass (None without slots)."""
    import numpy as np

    from moddepth_jax.analysis.depth_mass import depth_mass
    from moddepth_jax.analysis.inspection import inspect_tokens
    from moddepth_jax.analysis.report import DEPTH_TOKENS
    from moddepth_jax.analysis.routing_page import page_data
    from moddepth_jax.analysis.token_classes import guess_language, token_classes
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.data.windows import token_stream
    from moddepth_jax.hparams.rules import causal_routing, check_routing

    hparams, variables = run.hparams_of_stage, run.state.variables
    routing = ROUTING.value or causal_routing(hparams)
    check_routing(hparams, routing)
    tokenizer = tokenizer_of(hparams.data, WORKDIR.value)
    stream_N = token_stream([text], tokenizer)
    cli.make_directory('out', out)
    tokens_N = stream_N[: MAX_TOKENS.value]
    language = guess_language(text) if LANGUAGE.value == 'auto' else LANGUAGE.value
    windows = -(-len(tokens_N) // hparams.data.sequence_length)
    with cli.progress_bar('inspecting', windows) as advance:
        inspection = inspect_tokens(variables, hparams, tokens_N, tokenizer, routing, advance)
    mass, measured = None, 0
    if hparams.model.depth.slots_per_layer:  # on complete windows, or on a shorter text
        length = min(hparams.data.sequence_length, len(tokens_N))
        rows = max(1, min(len(tokens_N), DEPTH_TOKENS) // length)
        tokens_BT = tokens_N[: rows * length].reshape(rows, length).astype(np.int32)
        batch = {'tokens_BT': tokens_BT, 'segment_ids_BT': np.ones_like(tokens_BT)}
        mass, measured = depth_mass(variables, hparams, batch, routing), tokens_BT.size
    names = {
        'run': _printable(pathlib.Path(WORKDIR.value).resolve().name),
        'step': run.step,
        'num_steps': run.num_steps,
        'text': _printable(name),
        'language': language,
        'cut': len(stream_N) - len(tokens_N),
        'depth_tokens': measured,
    }
    classes_N = token_classes(inspection.pieces, language)
    data = page_data(inspection, hparams, classes_N, routing, names, mass)
    return data, inspection, mass


def _write(out, inspection, hparams, data, mass):
    """Write all files, and remove pictures of an earlier inspection."""
    from moddepth_jax.analysis import heatmaps
    from moddepth_jax.analysis.routing_page import render
    from moddepth_jax.data.directory import write_atomically

    about, record = data['about'], inspection.routing
    for name in FILES[2:]:
        (out / name).unlink(missing_ok=True)
    if hparams.model.routed_layers:
        sides = record.top_c_BT, record.selected_BT, hparams, record.dropped_BT
        grid_LT = heatmaps.routing_grid(*sides)
        grid_LT, pieces = grid_LT[:, :MAX_DRAWN], inspection.pieces[:MAX_DRAWN]
        what = f'the first {MAX_DRAWN:,} tokens' if inspection.pieces[MAX_DRAWN:] else 'tokens'
        title = f'{about["run"]}: routing of {about["text"]} by {about["routing"]}'
        names = hparams.model.block_names
        heatmaps.plot_routing(grid_LT, pieces, title, out / 'routing.png', what, STRIP, names)
    if mass is not None:
        title = f'{about["run"]}: attention on the slots of earlier layers, {about["text"]}'
        heatmaps.plot_depth_mass(mass, title, out / 'depth_mass.png')
        numbers = {'routing': about['routing'], 'tokens': about['depth_tokens'], **data['depth']}
        text = json.dumps(numbers, indent=2, allow_nan=False) + '\n'
        write_atomically(out / 'depth_mass.json', text)
    write_atomically(out / 'routing.json', json.dumps(data, allow_nan=False) + '\n')
    write_atomically(out / 'routing.html', render(data))


def _describe(out, data):
    totals, about = data['totals'], data['about']
    windows = f'{about["windows"]} window{"s" * (about["windows"] > 1)}'
    tokens = f'{totals["tokens"]:,} token{"s" * (totals["tokens"] > 1)}'
    parts = [f'{tokens} of {about["text"]} in {windows}']
    if totals['loss'] is not None:
        parts.append(f'loss {totals["loss"]:.4f} nats per token')
    looks = ', which looks at the future' * about['looks_ahead']
    if about['routed'] or looks:
        parts.append(f'by {about["routing"]}{looks}')
    if about['routed']:
        few, what = totals['enter_none'], 'skip every routed block'
        if about['loops']:
            few = totals['blocks_entered'][1]['tokens'] / totals['tokens']
            what = 'go through only one loop'
        parts.append(f'{few:.1%} {what}')
        routed = [layer for layer in totals['layers'] if layer['routed']]
        refused, entered = (sum(layer[name] for layer in routed) for name in ('refused', 'entered'))
        if refused:
            share = refused / (refused + entered)
            parts.append(f'{share:.1%} of what {about["routing"]} selects finds no room in a cache')
    else:
        parts.append('no block of this model is routed, so there is no routing.png')
    if about['exit_threshold']:
        parts.append(_NO_EXITS.format(about['exit_threshold']))
    print(', '.join(parts))
    for file in filter(pathlib.Path.exists, (out / name for name in FILES)):
        print(f'  {_printable(file)}')


def _rank_blocks(run, out):
    """Print the importance of the blocks; write importance.json and importance.png."""
    import jax

    from moddepth_jax.analysis import importance
    from moddepth_jax.analysis.heatmaps import plot_importance
    from moddepth_jax.data.directory import write_atomically
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.hparams.rules import causal_routing, check_routing
    from moddepth_jax.training.mesh import make_mesh
    from moddepth_jax.training.metrics import replace_nonfinite

    hparams, mesh = run.hparams_of_stage, make_mesh('data=1')
    routing = ROUTING.value or causal_routing(hparams)
    check_routing(hparams, routing)
    importance.check_importance(hparams.model)
    tokenizer = tokenizer_of(hparams.data, WORKDIR.value)
    right = 'the text of the run must be where it was in training'
    dataset = cli.load_own_data(run, tokenizer, right)
    wanted = NUM_BATCHES.value or hparams.evaluation.num_batches
    batches = min(wanted, dataset.num_held_out_batches)
    passes = importance.num_passes(hparams.model)
    with jax.set_mesh(mesh), cli.progress_bar('skipping blocks', passes) as advance:
        found = importance.block_importance(
            run.state.variables, hparams, dataset, mesh, wanted, routing, advance
        )
    name = _printable(pathlib.Path(WORKDIR.value).resolve().name)
    about = {'run': name, 'step': run.step, 'routing': routing, 'batches': batches}
    cli.make_directory('out', out)
    text = json.dumps(replace_nonfinite(about | found), indent=2, allow_nan=False) + '\n'
    write_atomically(out / 'importance.json', text)
    none = f'{found["loss"]:.4f} if none is'
    title = f'{name}: increase of the loss if a block is skipped ({none})'
    plot_importance(found, title, out / 'importance.png')
    _describe_importance(out, about, found, hparams.model.loop_exit_threshold)


def _describe_importance(out, about, found, exit_threshold):
    rows = {}
    for layer in found['ranking']:
        row = found['blocks'][layer]
        costs = [f'{row[part]["cost"]:+.4f}' for part in ('block', 'attention', 'mlp')]
        name = f'{layer} routed' if row['routed'] else str(layer)
        rows[name] = [costs[0], f'{row["block"]["cost_bits"]:+.4f}', *costs[1:]]
    heads = ['layer', 'nats per token', 'bits/byte', 'attention skipped', 'mlp skipped']
    cli.show(to_rich(Table('increase of the loss if a block, or a part, is skipped', heads, rows)))
    targets = f'{found["targets"]:,} targets of held-out text in {about["batches"]} batches'
    rule = f' by {about["routing"]}' * any(row['routed'] for row in found['blocks'])
    cli.show(f'loss {found["loss"]:.4f} nats per token{rule} if none is skipped, {targets}')
    if exit_threshold:
        cli.show(_NO_EXITS.format(f'{exit_threshold:g}'))
    cheapest = sorted(found['ranking'][: len(rows) // 2])
    if cheapest:
        layers = ','.join(map(str, cheapest))
        cli.show(f'the cheaper half: --config.model.routing.layers={layers}')
    for file in ('importance.json', 'importance.png'):
        cli.show(f'  {_printable(out / file)}')


def main(_):
    cli.check_run(WORKDIR.value, looks_ahead=True)
    from moddepth_jax.training.run_dir import CONFIG_FILE

    given = [name for name in OF_TEXT if flags.FLAGS[name].present]
    if IMPORTANCE.value and given:
        found = f'--{given[0]}={flags.FLAGS[given[0]].value}'
        raise ValueError(f'{found}: not with --importance, which reads the held-out text')
    if NUM_BATCHES.value and not IMPORTANCE.value:
        raise ValueError(f'--num_batches={NUM_BATCHES.value}: belongs to --importance')
    if TEXT.value is None and not IMPORTANCE.value:
        raise ValueError(f'--text: missing; {flags.FLAGS["text"].help.split(". ")[0]}')
    out = pathlib.Path(OUT.value)
    if not IMPORTANCE.value:
        text, name = _read_text()
        if not text:
            raise ValueError(f'--text={TEXT.value}: is empty; must hold one character at least')
    if out.exists() and not out.is_dir():
        raise ValueError(f'--out={out}: is a file; must be a directory')
    if (out / CONFIG_FILE).exists():
        right = 'must be another one, because runs have their own pictures'
        raise ValueError(f'--out={out}: is the directory of a run; {right}')
    run = cli.load_saved_run(WORKDIR.value)
    if IMPORTANCE.value:
        return _rank_blocks(run, out)
    # Measure first: an error then leaves the files of an earlier inspection unchanged.
    data, inspection, mass = _measure(run, text, name, out)
    _write(out, inspection, run.hparams_of_stage, data, mass)
    _describe(out, data)


if __name__ == '__main__':
    cli.run(main)
