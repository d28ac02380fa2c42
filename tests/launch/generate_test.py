"""launch.generate prints the text of the library as it grows, in complete characters."""

import contextlib
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from launch import generate as generate_command
from moddepth_jax.data.tokenizers.json_tokenizer import train_bpe
from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer, tokenizer_of
from moddepth_jax.hparams import from_config
from moddepth_jax.inference.generate import generate
from moddepth_jax.training.progress import printable
from moddepth_jax.training.saved_run import load_run
from tests.forked_commands import ROOT, run_commands
from tests.launch.commands import write_words
from tests.saved_run import save_run


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
    """Prompt and text appear before the end, in complete characters, and equal the library's."""
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


def test_the_speed_leaves_out_the_first_two_steps_of_each_batch(monkeypatch):
    """Regression: it included the compilation of later batches, and of steps with drafts."""
    now = [0.0]
    monkeypatch.setattr(generate_command.time, 'monotonic', lambda: now[0])
    tokenizer = make_tokenizer('bytes')
    progress = generate_command._Progress(tokenizer, [tokenizer.separator], False, False)
    for most_per_step, slow_calls in ((1, 2), (3, 6)):
        progress.begin_batch(2, most_per_step, lambda count: None)
        for call in range(10):
            now[0] += 50 if call < slow_calls else 0.5
            progress(np.zeros(3, int), np.ones(3, bool))  # the third row fills the batch up
    text = progress.describe([False, False], [])
    assert text == '40 tokens in 406.0 s, 4 tokens/s once compiled'


def test_a_text_field_without_rows_is_refused(monkeypatch):
    """Regression: for a file of plain text it was ignored."""
    given = types.SimpleNamespace(name='text_field', value='body', present=1)
    monkeypatch.setattr(generate_command, 'TEXT_FIELD', given)
    refusals = {'a.md': True, 'a.txt.gz': True, 'a.jsonl': False, 'a.parquet': False}
    for file, refused in refusals.items():
        monkeypatch.setattr(generate_command, 'PROMPTS', types.SimpleNamespace(value=file))
        words = f'^--text_field=body: --prompts={file} has no rows, unlike .jsonl, .* out$'
        with pytest.raises(ValueError, match=words) if refused else contextlib.nullcontext():
            generate_command._check_flags(True)


@pytest.mark.slow
def test_several_texts_are_printed_under_headings(trained, hasty, run, tmp_path):
    """Prompts from flags or a file, in batches of any size, give the texts of single prompts.

    Of three prompts in batches of two, the last batch is filled up with rows that nobody sees.
    """
    how = {'seed': 6, 'num_samples': 16, 'temperature': 300.0, 'top_p': 0.999, 'top_k': 200}
    line = ['generate', f'--workdir={trained}/run', '--max_tokens=28']
    line += [f'--{name}={value}' for name, value in how.items()]
    prompts = ['a', 'bcd', 'ef']
    (tmp_path / 'lines.md').write_text('a\n\nbcd\nef\n')
    (tmp_path / 'rows.jsonl').write_text(''.join(f'{{"prompt": "{p}"}}\n' for p in prompts))
    ways = [[f'--prompt={prompt}' for prompt in prompts]]
    ways.append([f'--prompts={tmp_path}/lines.md', '--batch_size=16'])
    ways.append([f'--prompts={tmp_path}/rows.jsonl'])
    lines = [[*line, *way] for way in ways]
    found = run_commands(lines, trained, ['moddepth_jax.training.saved_run'], **hasty)
    assert [done.status for done in found] == [0] * 3, found
    alone = [written(run, [prompt], 28, **how) for prompt in prompts]
    texts = [text for _, some in alone for text in some]
    places = [f'--- prompt {p} of 3, sample {s} of 16 ---' for p in (1, 2, 3) for s in range(1, 17)]
    lengths = [len(row) for result, _ in alone for row in result.tokens]
    num_tokens = sum(lengths) - 16 * sum(1 + len(prompt) for prompt in prompts)
    stopped = sum(sum(result.stopped) for result, _ in alone)
    assert len(set(texts)) == 48 and 0 < stopped < 48
    for done in found:
        assert done.stdout == ''.join(f'{a}\n{b}\n' for a, b in zip(places, texts, strict=True))
        assert done.stderr.startswith(f'{num_tokens} tokens in ')
        assert f', {stopped} of 48 ended by itself' in done.stderr
        assert done.stderr.count('\n') == 1


@pytest.mark.slow
def test_lines_are_continued_one_by_one_on_a_terminal_and_together_from_a_pipe(
    trained, hasty, run, tmp_path
):
    """A line that is too long is refused and asked again; Ctrl-D ends; lines have other seeds.

    Regression: without --max_tokens, the longest line cut the texts of all.
    """
    line = [sys.executable, '-m', 'launch.generate', f'--workdir={trained}/run', '--max_tokens=9']
    how = {'cwd': trained, 'env': {**os.environ, **hasty, 'PYTHONPATH': str(ROOT)}}
    piped = subprocess.run(line[:-1], input=b'a\nbcd\n', capture_output=True, timeout=120, **how)
    _, texts = written(run, ['a', 'bcd'], [30, 28])
    assert piped.stdout.decode() == ''.join(
        f'--- prompt {n} of 2 ---\n{text}\n' for n, text in enumerate(texts, 1)
    )
    ours, its = os.openpty()
    with (tmp_path / 'said').open('w+b') as said:
        with subprocess.Popen(line, stdin=its, stdout=said, stderr=said, **how) as process:
            os.write(ours, b'a\nbcd\n' + b'x' * 40 + b'\n\x04')
            assert process.wait(120) == 0
        said.seek(0)
        text = said.read().decode()
    for seed, prompt in enumerate(('a', 'bcd')):
        assert written(run, [prompt], 9, seed=seed)[1][0] in text
    assert text.startswith('Type the start of a text. Ctrl-D ends.\n')
    assert text.count('9 tokens in') == 2 and 'error: a prompt of 41 tokens and 9' in text


@pytest.mark.slow
def test_lines_of_a_chat_continue_the_text_so_far(tiny_config, hasty, tmp_path):
    """Each line follows the tokens so far, cut on the left to fit; only new text is printed.

    The last token of the text before and the line are read, until the text is cut. Regression: an
    answer that was not UTF-8 ended the chat, since its text was encoded again.
    """
    made = {'model.vocab_size': 260, 'data.tokenizer': 'tokenizer.json'}
    save_run(tmp_path / 'run', from_config(tiny_config(**made)))
    train_bpe(iter(write_words(tmp_path)), 260).save(tmp_path / 'run' / 'tokenizer')
    line = [sys.executable, '-m', 'launch.generate', '--workdir=run', '--max_tokens=9', '--chat']
    how = {'cwd': tmp_path, 'env': {**os.environ, **hasty, 'PYTHONPATH': str(ROOT)}}
    ours, its = os.openpty()
    with (tmp_path / 'said').open('w+b') as said:
        with subprocess.Popen(line, stdin=its, stdout=said, stderr=said, **how) as process:
            os.write(ours, b'a\nbcd\nefgh\n\x04')
            assert process.wait(120) == 0
        said.seek(0)
        text = said.read().decode()
    run, num_read = load_run(tmp_path / 'run'), []
    tokenizer = tokenizer_of(run.hparams.data, tmp_path / 'run')
    so_far, most = [tokenizer.separator], run.hparams.data.sequence_length - 9
    for seed, typed in enumerate((b'a', b'bcd', b'efgh')):
        typed = b'\n' * (tokenizer.decode(so_far)[-1:] not in (b'', b'\n')) + typed
        prompt = [*so_far, *tokenizer.encode(typed)][-most:]
        how = {'tokenizer': tokenizer, 'seed': seed}
        result = generate(run.state.variables, run.hparams, [prompt], 9, **how)
        num_read.append(len(result.tokens[0]) - 1 + result.stopped[0])
        so_far = result.tokens[0].tolist()
        new = tokenizer.decode(so_far[len(prompt) :]).decode('utf-8', 'replace')
        assert printable(new) in text and '\N{REPLACEMENT CHARACTER}' in new, typed
    assert len(prompt) == most and 'error' not in text
    held = re.findall(r', (\d+) tokens of the prompt were in the cache\n', text.replace('\r', ''))
    assert held == [str(num_read[0])]
