"""launch.generate prints the text that the library writes: at once, whole characters, no codes."""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from moddepth_jax.data.tokenizers.tokenizer import make_tokenizer
from moddepth_jax.hparams import from_config
from moddepth_jax.inference import generate as library
from moddepth_jax.training.checkpoint import Checkpoints
from moddepth_jax.training.progress import printable
from moddepth_jax.training.run_dir import open_workdir
from moddepth_jax.training.train_step import init_state

ROOT = pathlib.Path(__file__).parents[2]
CONTEXT = 48
SEPARATOR = 256


@pytest.fixture(scope='module', autouse=True)
def hastily_compiled():
    """As the commands are, so that both draw from the same bits."""
    before = jax.config.values['jax_disable_most_optimizations']
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture(scope='module')
def state(tiny_config):
    """Random, and so large that any byte may come; thresholds that every score is above."""
    changes = {'model.routing.router': 'learned', 'data.sequence_length': CONTEXT}
    hparams = from_config(tiny_config(**changes))
    state = jax.jit(functools.partial(init_state, hparams, 4))()
    params = jax.tree.map(lambda leaf: leaf * 12 if leaf.ndim > 1 else leaf, state.params)
    averages = jax.tree.map(lambda leaf: leaf - 1e6, state.averages)
    return state.replace(params=params, averages=averages)


@pytest.fixture(scope='module')
def folder(state, tmp_path_factory):
    """Where `run` is a run of 4 steps, and `begun` one without a checkpoint."""
    folder = tmp_path_factory.mktemp('generate')
    for name in ('run', 'begun'):
        open_workdir(folder / name, dataclasses.asdict(state.hparams))
    with Checkpoints(folder / 'run' / 'checkpoints', keep=1) as checkpoints:
        checkpoints.save(4, state, {'num_steps': 4, 'fingerprint': {}})
    return folder


def command(folder, *arguments):
    environment = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'XLA_FLAGS': '',
        'XDG_CACHE_HOME': str(folder / 'cache'),
        'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    }
    arguments = [argument.format(folder) for argument in arguments]
    command = [sys.executable, '-m', 'launch.generate', *arguments]
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    return subprocess.Popen(command, bufsize=0, cwd=folder, env=environment, **pipes)


def run_command(folder, *arguments):
    with command(folder, *arguments) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


def written(state, prompts, num_tokens, **how):
    """The Generation of the library, and the text of each row as a terminal may have it."""
    tokenizer = make_tokenizer('bytes')
    prompts = [[SEPARATOR, *prompt.encode()] for prompt in prompts]
    result = library.generate(
        state.variables, state.hparams, prompts, num_tokens, tokenizer=tokenizer, **how
    )
    texts = [tokenizer.decode(row).decode('utf-8', 'replace') for row in result.tokens]
    return result, [printable(text) for text in texts]


def test_one_text_is_printed_while_it_grows(folder, state):
    """Prompt and text appear before the end, cut at no character, and are those of the library.

    Bytes that are no character show as one; control characters are left out; the last line ends.
    The line on stderr says how much was written and how fast.
    """
    arguments = ('--prompt=né ', '--max_tokens=40', '--seed=7', '--temperature=0.9')
    with command(folder, '--workdir={}/run', *arguments) as process:
        begin = process.stdout.read(len('né '.encode()))
        assert process.poll() is None
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result, (text,) = written(state, ['né '], 40, seed=7, temperature=0.9)
    assert (begin + rest).decode() == text + '\n' * (not text.endswith('\n'))
    assert text.startswith('né ') and '\N{REPLACEMENT CHARACTER}' in text
    added = len(result.tokens[0]) - 5
    line = rf'{added} tokens in [\d.]+ s, \d+ tokens/s once compiled(, .*)?\n'
    assert re.fullmatch(line, err.decode())


@pytest.mark.slow
def test_several_texts_come_whole_under_their_places(folder, state):
    """Each sample of each prompt stands below a line that says which it is, in order."""
    how = {'seed': 6, 'num_samples': 16, 'temperature': 300.0, 'top_p': 0.999}
    flags = [f'--{name}={value}' for name, value in how.items()]
    prompts = ['--prompt=a', '--prompt=bcd']
    done = run_command(folder, '--workdir={}/run', *prompts, *flags, '--max_tokens=44')
    status, out, err = done
    assert status == 0, err
    result, texts = written(state, ['a', 'bcd'], 44, **how)
    places = [f'--- prompt {p} of 2, sample {s} of 16 ---' for p in (1, 2) for s in range(1, 17)]
    assert out == ''.join(f'{a}\n{b}\n' for a, b in zip(places, texts, strict=True))
    assert len(set(texts)) == 32 and 0 < sum(result.stopped) < 32
    assert f', {sum(result.stopped)} of 32 ended by itself' in err and err.count('\n') == 1


@pytest.mark.slow
def test_without_a_prompt_a_new_document_fills_the_context(folder, state):
    """The default length fits the context; what full caches refused is told.

    The threshold rule of this run lets in every token, its caches hold but a part of them.
    """
    arguments = ('--temperature=0', '--routing=threshold')
    status, out, err = run_command(folder, '--workdir={}/run', *arguments)
    assert status == 0, err
    result, (text,) = written(state, [''], CONTEXT - 1, temperature=0.0, routing='threshold')
    assert out == text + '\n' * (not text.endswith('\n'))
    assert result.refused > 0
    assert f', {result.refused} times a routed block had no cache slot for a token' in err


# name: (arguments with {} for the folder, words of the line)
REFUSED = {
    'no checkpoint': (['--workdir={}/begun'], ['no finished checkpoint', 'launch.train']),
    'too long': (
        ['--workdir={}/run', '--prompt=abc', '--max_tokens=45'],
        ['45 to generate', 'data.sequence_length=48', 'by 1'],
    ),
    'too long a prompt': (['--workdir={}/run', '--prompt=' + 'x' * 48], ['49 tokens', 'by 2']),
    'look ahead': (['--workdir={}/run', '--routing=top_c'], ["routing='top_c'", 'later tokens']),
    'temperature': (['--workdir={}/run', '--temperature=-1'], ['temperature=-1.0', '0']),
    'top_p': (['--workdir={}/run', '--top_p=0'], ['top_p=0.0', '(0, 1]']),
    'nothing': (['--workdir={}/run', '--max_tokens=0'], ['--max_tokens=0', 'positive']),
    'no workdir': (['--prompt=x'], ['--workdir: missing']),
}


@pytest.fixture(scope='module')
def refused(folder):
    """Every case of REFUSED, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run_command, folder, *arguments)
            for name, (arguments, _) in REFUSED.items()
        }


@pytest.mark.parametrize('name', REFUSED)
def test_bad_input_is_one_line(refused, name):
    """Status 2, nothing on stdout, and one line on stderr that names the culprit."""
    status, out, err = refused[name].result()
    assert (status, out) == (2, ''), err
    assert err.startswith('error: ') and err.count('\n') == 1, err
    for word in REFUSED[name][1]:
        assert word in err
