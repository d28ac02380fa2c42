"""Tokenizes text of any size to files that training maps into memory.

python -m launch.prepare --input=books --output=data/books
python -m launch.prepare --input='web/*.jsonl.zst' --output=data/web --tokenizer=bpe:4096
python -m launch.prepare --input='a/*.parquet,b/*.jsonl' --text_field=content \\
    --output=data/ab --tokenizer=llama/tokenizer.json

A document is a line of .jsonl, a row of .parquet, a record of .arrayrecord (a JSON object or the
text itself), or any other text file, in UTF-8 or --encoding. Files may be compressed (.gz, .zst).
Memory holds some documents at a time. The disk needs about twice the size of the tokens.

The same command continues after a kill, an interruption, or the correction of an unreadable file,
unless bpe:N was trained on that file. The result does not depend on --processes.
"""

import contextlib
import pathlib
import shlex
import sys
import time

from absl import flags

from launch import cli
from moddepth_jax.host import usable_cpus
from moddepth_jax.training.progress import format_count, format_seconds, printable
from moddepth_jax.training.tables import Table, to_rich

INPUT = flags.DEFINE_list('input', None, 'Files, folders, globs such as a/**/*.py.', required=True)
OUTPUT = flags.DEFINE_string('output', None, 'New or unfinished directory.', required=True)
TOKENIZER = flags.DEFINE_string(
    'tokenizer', 'bytes', 'bytes; bpe:N, which is trained here; or a tokenizer file.'
)
SEPARATOR = flags.DEFINE_string('separator', None, "Token that starts documents, such as '<s>'.")
TEXT_FIELD = flags.DEFINE_string('text_field', 'text', 'Field or column of the text.')
ENCODING = flags.DEFINE_string('encoding', 'utf-8', 'Encoding of plain text files.')
HELD_OUT_FRACTION = flags.DEFINE_float('held_out_fraction', 0.05, 'Share of held-out documents.')
PROCESSES = flags.DEFINE_integer('processes', None, 'Default: one per core.', lower_bound=1)
BPE_BYTES = flags.DEFINE_integer(
    'bpe_bytes', 50_000_000, 'Bytes of text on which bpe:N is trained.', lower_bound=1
)
SKIP_BAD = flags.DEFINE_boolean('skip_bad', False, 'Leave out and count unreadable documents.')
PART_BYTES = flags.DEFINE_integer(
    'part_bytes', 16 << 20, 'Bytes of text per part; a kill loses one part.', lower_bound=1
)

_SECONDS = 10.0  # between progress lines


class _Progress:
    """Prints progress lines on stderr; `tokenized` counts the bytes that this start tokenized."""

    def __init__(self):
        self.tokenized = 0

    @contextlib.contextmanager
    def phase(self, what, total, done=0):
        """The progress argument of `prepare`; an earlier start did `done` bytes of the total."""
        start = shown = time.monotonic()
        before = done
        if done:
            print(f'{what}: {_size(done)} of {_size(total)} were done before', file=sys.stderr)

        def advance(num_bytes):
            nonlocal done, shown
            done += num_bytes
            now = time.monotonic()
            if now - shown < _SECONDS or done <= before:
                return
            shown, rate = now, (done - before) / (now - start)
            left = format_seconds((total - done) / rate)
            line = f'{what}: {_size(done)} of {_size(total)}, {_size(rate)}/s, {left} left'
            print(line, file=sys.stderr, flush=True)

        yield advance
        if what == 'tokens':
            self.tokenized = total - before


def _size(num_bytes):
    return f'{format_count(num_bytes)}B' if num_bytes >= 1000 else f'{num_bytes} bytes'


def _options():
    from moddepth_jax.data.preparation.plan import Options
    from moddepth_jax.hparams import checks

    checks.encoding('--encoding', ENCODING.value)
    fraction = HELD_OUT_FRACTION.value
    if not 0 < fraction < 1:
        raise ValueError(f'--held_out_fraction={fraction}: must lie between 0 and 1')
    return Options(
        sources=tuple(INPUT.value),
        directory=pathlib.Path(OUTPUT.value).expanduser(),
        tokenizer=TOKENIZER.value,
        separator=SEPARATOR.value,
        text_field=TEXT_FIELD.value,
        encoding=ENCODING.value,
        held_out_fraction=fraction,
        skip_bad=SKIP_BAD.value,
        part_bytes=PART_BYTES.value,
        bpe_bytes=BPE_BYTES.value,
        processes=PROCESSES.value or usable_cpus(),
    )


def _print_summary(store, seconds, tokenized):
    from configs import base

    tokenizer = store.tokenizer
    _show(f'{store.directory}: {tokenizer["vocab_size"]:,} ids of {tokenizer["name"]}')
    rows = {}
    for side, counts in (('train', store.train), ('held out', store.held_out)):
        num_bytes, documents, tokens = (counts[key] for key in ('bytes', 'documents', 'tokens'))
        share = f'{num_bytes / max(1, tokens - documents):.2f}'
        rows[side] = [f'{documents:,}', f'{tokens:,}', f'{num_bytes:,}', share]
    heads = ['', 'documents', 'tokens', 'bytes', 'bytes per token']
    cli.show(to_rich(Table(None, heads, rows)))
    for reason, entry in store.skipped.items():
        _show(f'left out, {reason}: {entry["count"]:,}, such as {entry["first"][0]}')
    if tokenized:
        took = format_seconds(seconds) if seconds >= 10 else f'{seconds:.1f}s'
        _show(f'{_size(tokenized)} in {took}: {tokenized / seconds / 1e6:.2f} MB/s')
    knobs = {'data.source': shlex.quote(str(store.directory)), 'data.tokenizer': 'prepared'}
    knobs['model.vocab_size'] = tokenizer['vocab_size']
    if store.held_out_fraction != base.get_config().data.held_out_fraction:
        knobs['data.held_out_fraction'] = store.held_out_fraction
    words = ' '.join(f'--config.{name}={value}' for name, value in knobs.items())
    _show(f'fingerprint {store.fingerprint}')
    _show('train on it:')
    _show(f'  python -m launch.train --config=configs/mod_isoflop.py --workdir=runs/mine {words}')


def _show(text):
    # File names may hold bytes that are not text.
    cli.show(printable(text).encode(errors='backslashreplace').decode())


def main(_):
    from moddepth_jax.data.preparation.prepare import prepare

    start, progress = time.monotonic(), _Progress()
    try:
        store = prepare(_options(), progress.phase)
    except ValueError as error:  # the message names knobs, which are flags here
        line = str(error)
        for flag in (TEXT_FIELD, TOKENIZER, ENCODING):
            line = line.replace(f'data.{flag.name}', f'--{flag.name}')
        raise ValueError(line) from None
    _print_summary(store, time.monotonic() - start, progress.tokenized)


if __name__ == '__main__':
    cli.run(main)
