"""launch.generate prints the text that the library writes: at once and in whole characters."""

import os
import re
import subprocess
import sys

import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.inference.generate import generate
from moddepth_jax.training.progress import printable
from moddepth_jax.training.saved_run import load_run
from tests.forked_commands import ROOT, run_commands


@pytest.fixture(scope='module')
def run(trained):
    return load_run(trained / 'run')


def written(run, prompts, num_tokens, **how):
    tokenizer = make_tokenizer('bytes')
    prompts = [[tokenizer.separator, *prompt.encode()] for prompt in prompts]
    result = generate(
        run.state.variables, run.hparams, prompts, num_tokens, tokenizer=tokenizer, **how
    )
    texts = [tokenizer.decode(row).decode('utf-8', 'replace') for row in result.tokens]
    return result, [printable(text) for text in texts]


def test_one_text_is_printed_while_it_grows(trained, hasty, run):
    """Prompt and text appear before the end, in whole characters, and are those of the library."""
    line = [sys.executable, '-m', 'launch.generate', f'--workdir={trained}/run', '--prompt=né ']
    line += ['--max_tokens=25', '--seed=7', '--temperature=300']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'bufsize': 0}
    environment = {**os.environ, **hasty, 'PYTHONPATH': str(ROOT)}
    with subprocess.Popen(line, cwd=trained, env=environment, **pipes) as process:
        begin = process.stdout.read(len('né '.encode()))
        assert process.poll() is None
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result, (text,) = written(run, ['né '], 25, seed=7, temperature=300.0)
    assert (begin + rest).decode() == text + '\n' * (not text.endswith('\n'))
    assert text.startswith('né ') and '\N{REPLACEMENT CHARACTER}' in text
    added = len(result.tokens[0]) - 5
    line = rf'{added} tokens in [\d.]+ s, \d+ tokens/s once compiled(, .*)?\n'
    assert re.fullmatch(line, err.decode())


@pytest.mark.slow
def test_several_texts_are_printed_under_headings(trained, hasty, run):
    how = {'seed': 6, 'num_samples': 16, 'temperature': 300.0, 'top_p': 0.999}
    line = ['generate', f'--workdir={trained}/run', '--prompt=a', '--prompt=bcd', '--max_tokens=28']
    line += [f'--{name}={value}' for name, value in how.items()]
    (done,) = run_commands([line], trained, ['moddepth_jax.training.saved_run'], **hasty)
    assert done.status == 0, done.stderr
    result, texts = written(run, ['a', 'bcd'], 28, **how)
    places = [f'--- prompt {p} of 2, sample {s} of 16 ---' for p in (1, 2) for s in range(1, 17)]
    assert done.stdout == ''.join(f'{a}\n{b}\n' for a, b in zip(places, texts, strict=True))
    assert len(set(texts)) == 32 and 0 < sum(result.stopped) < 32
    assert f', {sum(result.stopped)} of 32 ended by itself' in done.stderr
    assert done.stderr.count('\n') == 1
