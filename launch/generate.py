"""Generates text with a run, finished or not, under the causal routing of its evaluation.

python -m launch.generate --workdir=runs/mod_isoflop --prompt='def '
python -m launch.generate --workdir=runs/mod_isoflop --prompt='def ' --prompt='class ' \\
    --max_tokens=100 --temperature=0.8 --top_k=40 --top_p=0.95 --num_samples=3
python -m launch.generate --workdir=runs/mod_isoflop --prompts=rows/a.jsonl --text_field=body
ls | python -m launch.generate --workdir=runs/mod_isoflop --mesh=fsdp=2,tensor=2

Without --prompt it continues each line that you type; with --chat, all lines and answers so far are
the context. Each line of a pipe is a prompt. --temperature applies first, then --top_k, then
--top_p. A model that does not fit one device needs --mesh, or several processes as in launch.train.
"""

import codecs
import contextlib
import functools
import itertools
import os
import pathlib
import sys
import time

from absl import flags

from launch import cli
from moddepth_jax.hparams.flag_values import check_sampling

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
cli.define_step()
cli.define_loops()
cli.define_exit_threshold()
PROMPT = flags.DEFINE_multi_string('prompt', None, 'Start of the text; may be given repeatedly.')
PROMPTS = flags.DEFINE_string(
    'prompts', None, 'File of prompts: text with one per line, or rows as in data.source.'
)
TEXT_FIELD = flags.DEFINE_string('text_field', 'prompt', 'Field of the prompt in --prompts rows.')
ENCODING = flags.DEFINE_string('encoding', 'utf-8', 'Encoding of --prompts or stdin.')
MAX_TOKENS = flags.DEFINE_integer(
    'max_tokens', None, 'New tokens of a text. Default: 200, or fewer to fit it.', lower_bound=1
)
TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Of sampling; 0 is greedy decoding.')
TOP_K = flags.DEFINE_integer('top_k', 0, 'Sample from the most likely K tokens; 0: all.')
TOP_P = flags.DEFINE_float('top_p', 1.0, 'Sample from the most likely tokens with total mass P.')
SEED = flags.DEFINE_integer('seed', 0, 'Of sampling.', lower_bound=0, upper_bound=2**32 - 1)
PREFILL_CHUNK = flags.DEFINE_integer(
    'prefill_chunk', 0, 'Read prompts in chunks of this many tokens to save memory; 0: at once.'
)
DRAFT_TOKENS = flags.DEFINE_integer(
    'draft_tokens', 0, 'Speculate this many tokens without routed blocks, verified in one pass.'
)
CHAT = flags.DEFINE_bool('chat', False, 'Keep earlier lines and answers as context if they fit.')
NUM_SAMPLES = flags.DEFINE_integer('num_samples', 1, 'Texts for each prompt.', lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer(
    'batch_size',
    32,
    'Most texts generated together. The samples of one prompt always are, even if there are more.',
    lower_bound=1,
)
ROUTING = cli.define_routing()
MESH = cli.define_mesh('As in launch.train. Default with one process: one device.')
DEFAULT_TOKENS = 200


class _Progress:
    """Callback of `generate`: prints a single text while it grows, and measures the speed.

    `shown` means that the prompt is already on the terminal.
    """

    def __init__(self, tokenizer, prompt, single, shown):
        from moddepth_jax.data.tokenizers.tokenizer import TokenStream

        self._stream, self._single = TokenStream(tokenizer, prompt), single
        self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self._new = b'' if shown else tokenizer.decode(prompt)  # bytes that are not printed yet
        self._last, self._begin = '', time.monotonic()
        self._num_tokens = 0  # of all rows
        self._timed_tokens, self._timed_seconds = 0, 0.0  # of the steps that do not compile

    def begin_batch(self, num_rows, most_per_step, advance):
        """Call before each batch.

        Args:
          num_rows: rows of the batch, without those that fill it up.
          most_per_step: the most tokens that a step adds to a row.
          advance: advances the progress bar by a number of tokens.
        """
        self._num_rows, self._advance = num_rows, advance
        self._untimed = 2 * most_per_step  # calls left of the first two steps, which may compile

    def __call__(self, tokens_B, active_B):
        end, new = time.monotonic(), int(active_B[: self._num_rows].sum())
        if self._untimed:
            self._untimed -= 1
        else:
            self._timed_tokens += new
            self._timed_seconds += end - self._end
        self._end = end
        self._num_tokens += new
        self._advance(new)
        if self._single and active_B[0]:
            self._new += self._stream.add(int(tokens_B[0]))
            self.show()

    def show(self, final: bool = False):
        """Print the new complete characters of the text; `final` also ends the line."""
        from moddepth_jax.training.progress import printable

        new = printable(self._decoder.decode(self._new, final))
        self._new, self._last = b'', new[-1:] or self._last
        print(new, end='\n' if final and self._last != '\n' else '', flush=True)

    def describe(self, stopped, notes):
        """Return one line: tokens, speed, rows whose document ended (`stopped`), and `notes`."""
        seconds = time.monotonic() - self._begin
        parts = [f'{self._num_tokens} tokens in {seconds:.1f} s']
        if self._timed_tokens:
            rate = self._timed_tokens / self._timed_seconds
            parts.append(f'{rate:.0f} tokens/s once compiled')
        if ended := sum(stopped):
            which = 'the document' if len(stopped) == 1 else f'{ended} of {len(stopped)}'
            parts.append(f'{which} ended by itself')
        return ', '.join([*parts, *notes])


def _print_rows(texts, first, num_prompts):
    """Print the texts of a batch of prompts that begins at number `first`."""
    from moddepth_jax.training.progress import printable

    counts = {'prompt': num_prompts, 'sample': NUM_SAMPLES.value}
    for i, text in enumerate(texts, first * NUM_SAMPLES.value):
        numbers = zip(counts.items(), divmod(i, NUM_SAMPLES.value), strict=True)
        places = [f'{what} {n + 1} of {total}' for (what, total), n in numbers if total > 1]
        print(f'--- {", ".join(places)} ---')
        print(printable(text.decode('utf-8', 'replace')), flush=True)


def _check_flags(reads):
    """Raise ValueError for flags without effect; `reads`: prompts come from a file or a pipe."""
    from moddepth_jax.data.readers import FORMATS, has_format

    for flag, used, source in (
        (TEXT_FIELD, PROMPTS.value, '--prompts'),
        (ENCODING, reads, '--prompts or a pipe'),
    ):
        if flag.present and not used:
            raise ValueError(f'--{flag.name}={flag.value}: belongs to {source}, which is missing')
    if TEXT_FIELD.present and not has_format(pathlib.Path(PROMPTS.value)):
        right = f'has no rows, unlike {", ".join(FORMATS)}; leave --text_field out'
        raise ValueError(f'--text_field={TEXT_FIELD.value}: --prompts={PROMPTS.value} {right}')


def _read_prompts():
    """The prompts as bytes: from flags, a file or a pipe; without any, one empty prompt."""
    from moddepth_jax.data.domains import name_flags
    from moddepth_jax.data.readers import BadText, read_rows, to_utf8
    from moddepth_jax.hparams import checks
    from moddepth_jax.training import multihost

    checks.encoding('--encoding', ENCODING.value)
    name, texts = PROMPTS.value, []
    if name and PROMPT.value is not None:
        raise ValueError(f'--prompts={name}: cannot be combined with --prompt; leave one out')
    if not name and (PROMPT.value is not None or multihost.is_initialized()):
        return list(map(os.fsencode, PROMPT.value or ['']))
    try:
        if not name:
            piped = sys.stdin.buffer.read() if sys.stdin else b''
            texts = to_utf8('stdin', piped, ENCODING.value).splitlines()
            return list(filter(None, texts)) or [b'']
        for row in read_rows(pathlib.Path(name), '', TEXT_FIELD.value, encoding=ENCODING.value):
            if isinstance(row.text, BadText):
                raise row.text
            texts += [row.text] if row.name else filter(None, row.text.splitlines())
    except BadText as error:
        raise ValueError(name_flags(str(error))) from None
    if not texts:
        raise ValueError(f'--prompts={name}: holds no prompt; write one per line')
    return texts


def _encode(tokenizer, text):
    """The ids of a text, bytes."""
    try:
        return tokenizer.encode(text).tolist()
    except ValueError as error:
        raise ValueError(f'prompt {os.fsdecode(text[:60])!r}: {error}') from None


def _request(run, prompts, cut=False):
    """The arguments of `generate` except the model; raises its errors, or cuts prompts' left."""
    from moddepth_jax.hparams.rules import causal_routing, check_causal
    from moddepth_jax.inference.generate import check_request

    context = run.hparams.data.sequence_length
    if cut:
        most = context - (MAX_TOKENS.value or min(DEFAULT_TOKENS, context // 2))
        prompts = [prompt[-max(1, most) :] for prompt in prompts]
    rooms = (context - len(prompt) for prompt in prompts)
    request = {
        'prompts': prompts,
        'num_tokens': [MAX_TOKENS.value or max(1, min(DEFAULT_TOKENS, room)) for room in rooms],
        'temperature': TEMPERATURE.value,
        'top_p': TOP_P.value,
        'top_k': TOP_K.value,
        'seed': SEED.value,
        'num_samples': NUM_SAMPLES.value,
        'prefill_chunk': PREFILL_CHUNK.value,
        'draft_tokens': DRAFT_TOKENS.value,
    }
    check_request(run.hparams, **request)
    routing = ROUTING.value or causal_routing(run.hparams)
    check_causal(run.hparams, routing)
    return request | {'routing': routing}


def _write(run, tokenizer, shown=False, *, prompts, num_tokens, **request):
    """Continue the prompts in batches; process 0 prints. Returns the ids of the last batch.

    `shown` means that a single prompt is already on the terminal.
    """
    from moddepth_jax.inference.generate import describe, generate
    from moddepth_jax.training import multihost

    samples = NUM_SAMPLES.value
    leader, single = multihost.is_leader(), len(prompts) * samples == 1
    size = max(1, BATCH_SIZE.value // samples)
    size = -(-len(prompts) // -(-len(prompts) // size))
    progress, parts = _Progress(tokenizer, prompts[0], single and leader, shown), []
    for first in range(0, len(prompts), size):
        batch, most = prompts[first : first + size], num_tokens[first : first + size]
        num_rows, total = len(batch) * samples, sum(most) * samples
        # The last batch is filled up to the size of the others, so that a program may serve more.
        missing = size - len(batch)
        batch, most = batch + batch[:1] * missing, most + most[:1] * missing
        with cli.progress_bar('writing', total, hidden=single) as advance:
            progress.begin_batch(num_rows, 1 + DRAFT_TOKENS.value, advance)
            how = {'tokenizer': tokenizer, 'on_tokens': progress, **request}
            result = generate(run.state.variables, run.hparams_of_stage, batch, most, **how)
        parts.append(result.first_rows(num_rows))
        if single and leader:
            progress.show(final=True)
        elif leader:
            _print_rows(map(tokenizer.decode, parts[-1].tokens), first, len(prompts))
    if leader:
        stopped = [row for part in parts for row in part.stopped]
        print(progress.describe(stopped, describe(parts)), file=sys.stderr)
    return parts[-1].tokens


def _converse(run, tokenizer):
    """Continue each line that the user types; each line has another seed."""
    from moddepth_jax.inference.prompt_cache import PromptCache

    begin = so_far = [tokenizer.separator]
    _request(run, [begin], CHAT.value)
    kept = {'prompt_cache': PromptCache()} if CHAT.value else {}
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() a history and arrow keys
    print('Type the start of a text. Ctrl-D ends.', file=sys.stderr)
    for count in itertools.count(SEED.value):
        try:
            line = os.fsencode(input('> '))
            if tokenizer.decode(so_far)[-1:] not in (b'', b'\n'):
                line = b'\n' + line
            request = _request(run, [[*so_far, *_encode(tokenizer, line)]], CHAT.value)
            request |= {'seed': count % 2**32, **kept}
            row, *_ = _write(run, tokenizer, CHAT.value, **request)
            so_far = row.tolist() if CHAT.value else begin
        except EOFError:
            return print()
        except ValueError as error:
            print(f'error: {error}', file=sys.stderr)


def _start(run, texts):
    """Continue the texts or, without texts, what the user types."""
    from moddepth_jax.data.tokenizers.tokenizer import tokenizer_of
    from moddepth_jax.training import multihost

    def prepare():
        tokenizer = tokenizer_of(run.hparams.data, WORKDIR.value)
        prompts = [[tokenizer.separator, *_encode(tokenizer, text)] for text in texts or ()]
        return tokenizer, texts and _request(run, prompts)

    tokenizer, request = multihost.run_on_all(prepare)
    _write(run, tokenizer, **request) if request else _converse(run, tokenizer)


def main(_):
    check_sampling(TEMPERATURE.value, TOP_P.value, TOP_K.value)
    cli.check_run(WORKDIR.value)
    import jax

    from moddepth_jax.training import multihost

    multihost.initialize()
    given = PROMPT.value is not None or PROMPTS.value or multihost.is_initialized()
    interactive = not given and sys.stdin and sys.stdin.isatty()
    if CHAT.value and (not interactive or NUM_SAMPLES.value > 1):
        raise ValueError('--chat: needs a terminal, and one sample per line')
    _check_flags(PROMPTS.value or not (given or interactive))
    # Before the run, which may take minutes to load.
    texts = None if interactive else multihost.run_on_all(_read_prompts)
    if MESH.value is None and not multihost.is_initialized():
        return _start(cli.load_saved_run(WORKDIR.value), texts)
    # Rows need not divide evenly over the mesh.
    mesh_of = functools.partial(cli.checked_mesh, text=MESH.value or '')
    run = cli.load_saved_run(WORKDIR.value, mesh_of)
    with jax.set_mesh(run.state.step.sharding.mesh):
        _start(run, texts)


if __name__ == '__main__':
    cli.run(main)
