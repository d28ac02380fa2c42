"""Writes text with a run, finished or not, by the causal routing that its evaluation uses.

python -m launch.generate --workdir=runs/mod_isoflop --prompt='def '
python -m launch.generate --workdir=runs/mod_isoflop --prompt='def ' --prompt='class ' \\
    --max_tokens=100 --temperature=0.8 --top_p=0.95 --num_samples=3
python -m launch.generate --workdir=runs/mod_isoflop --mesh=fsdp=2,tensor=2

A model that does not fit one device needs --mesh, or several processes as launch.train has them.
"""

import codecs
import functools
import os
import sys
import time

from absl import flags

from launch import cli

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
cli.define_step()
PROMPT = flags.DEFINE_multi_string('prompt', [''], 'Start of the text; several run together.')
MAX_TOKENS = flags.DEFINE_integer('max_tokens', None, 'To add. Default: 200.', lower_bound=1)
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Lower is safer, 0 takes the likeliest token.')
TOP_P = flags.DEFINE_float('top_p', 1.0, 'Draw from the likeliest tokens of this probability.')
SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.', lower_bound=0, upper_bound=2**32 - 1)
NUM_SAMPLES = flags.DEFINE_integer('num_samples', 1, 'Texts for each prompt.', lower_bound=1)
ROUTING = cli.define_routing('aux_loss, predictor, threshold or dense')
MESH = flags.DEFINE_string(
    'mesh', None, 'As of launch.train. Default with one process: one device.'
)
DEFAULT_TOKENS = 200


class _Progress:
    """Called by `generate` after each step: prints a single text while it grows; measures time."""

    def __init__(self, tokenizer, prompt, single, advance):
        self._tokenizer, self._row = tokenizer, list(prompt)
        self._single, self._advance = single, advance
        self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self._num_bytes, self._last = 0, ''
        self.ends, self.num_tokens = [], []  # of each step: seconds, and new tokens of all rows

    def __call__(self, tokens_B, active_B):
        self.ends.append(time.monotonic())
        self.num_tokens.append(int(active_B.sum()))
        self._advance()
        if self._single and active_B[0]:
            self._row.append(tokens_B[0])
            self.show(self._tokenizer.decode(self._row))

    def show(self, text: bytes, final: bool = False):
        """Prints characters of `text` as they are complete; `final` also ends the line."""
        from moddepth_jax.training.progress import printable

        new = printable(self._decoder.decode(text[self._num_bytes :], final))
        self._num_bytes, self._last = len(text), new[-1:] or self._last
        print(new, end='\n' if final and self._last != '\n' else '', flush=True)

    def describe(self, result, seconds):
        """One line: tokens, speed, and notes on the caches."""
        parts = [f'{sum(self.num_tokens)} tokens in {seconds:.1f} s']
        if later := sum(self.num_tokens[2:]):  # the first two steps wait for compilation
            rate = later / (self.ends[-1] - self.ends[1])
            parts.append(f'{rate:.0f} tokens/s once compiled')
        if ended := sum(result.stopped):
            rows = len(result.stopped)
            which = 'the document' if rows == 1 else f'{ended} of {rows}'
            parts.append(f'{which} ended by itself')
        return ', '.join(parts + result.notes)


def _print_rows(texts):
    from moddepth_jax.training.progress import printable

    counts = {'prompt': len(PROMPT.value), 'sample': NUM_SAMPLES.value}
    for i, text in enumerate(texts):
        numbers = zip(counts.items(), divmod(i, NUM_SAMPLES.value), strict=True)
        places = [f'{what} {n + 1} of {total}' for (what, total), n in numbers if total > 1]
        print(f'--- {", ".join(places)} ---')
        print(printable(text.decode('utf-8', 'replace')))


def _request(run):
    """The tokenizer, and the arguments of `generate` except the model; raises as it does."""
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.inference.generate import check_request
    from moddepth_jax.model.transformer import causal_routing, check_causal

    tokenizer, prompts = tokenizer_of(run.hparams.data, WORKDIR.value), []
    for text in PROMPT.value:
        try:
            encoded = tokenizer.encode(os.fsencode(text)).tolist()
        except ValueError as error:
            raise ValueError(f'--prompt={text!r}: {error}') from None
        prompts.append([tokenizer.separator, *encoded])
    room = run.hparams.data.sequence_length - max(map(len, prompts))
    request = {
        'prompts': prompts,
        'num_tokens': MAX_TOKENS.value or max(1, min(DEFAULT_TOKENS, room)),
        'temperature': TEMPERATURE.value,
        'top_p': TOP_P.value,
        'seed': SEED.value,
        'num_samples': NUM_SAMPLES.value,
    }
    check_request(run.hparams, **request)
    routing = ROUTING.value or causal_routing(run.hparams)
    check_causal(run.hparams, routing)
    return tokenizer, request | {'routing': routing}


def _write(run):
    """Generates; process 0 prints."""
    from moddepth_jax.inference.generate import generate
    from moddepth_jax.training import multihost

    tokenizer, request = multihost.run_on_all(lambda: _request(run))
    first, single = multihost.is_leader(), len(PROMPT.value) * NUM_SAMPLES.value == 1
    bar = cli.progress_bar('writing', request['num_tokens'], hidden=single)
    begin = time.monotonic()
    with bar as advance:
        progress = _Progress(tokenizer, request['prompts'][0], single and first, advance)
        model = run.state.variables, run.hparams_of_stage
        result = generate(*model, **request, tokenizer=tokenizer, on_tokens=progress)
    seconds = time.monotonic() - begin
    if not first:
        return
    texts = [tokenizer.decode(row) for row in result.tokens]
    if single:
        progress.show(texts[0], final=True)
    else:
        _print_rows(texts)
    print(progress.describe(result, seconds), file=sys.stderr)


def main(_):
    import jax

    from moddepth_jax.training import multihost

    multihost.initialize()
    if MESH.value is None and not multihost.is_initialized():
        return _write(cli.load_saved_run(WORKDIR.value))
    # Rows need not divide over it.
    mesh_of = functools.partial(cli.checked_mesh, text=MESH.value or '')
    run = cli.load_saved_run(WORKDIR.value, mesh_of)
    with jax.set_mesh(run.state.step.sharding.mesh):
        _write(run)


if __name__ == '__main__':
    cli.run(main)
