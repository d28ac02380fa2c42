"""A run with a tokenizer from a file does not need the file once it has begun."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.data import tokenizer_files

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    'model.vocab_size': 384,
    'model.num_layers': 2,
    'model.d_model': 32,
    'model.d_ff': 64,
    'training.num_steps': 2,
    'data.sequence_length': 64,
    'data.batch_size': 2,
    'report.sample_tokens': 8,
    'report.heatmap_tokens': 16,
}


def command(cwd, name, *arguments):
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true'}
    given = [sys.executable, '-m', f'launch.{name}', *map(str, arguments)]
    done = subprocess.run(given, cwd=cwd, env=environment, capture_output=True, timeout=300)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.slow
def test_custom_text_and_tokenizer_from_training_to_inspection(tmp_path):
    """A glob of text and trained BPE: train, remove the file, resume, generate, evaluate, inspect.

    Each from another directory than the run began in. Too small a vocabulary is refused before
    anything is written; so is a prompt that is not UTF-8.
    """
    run, tokenizer = tmp_path / 'run', tokenizer_files.byte_level()
    tokenizer.save(tmp_path / 'tokenizer')
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'text').mkdir()
    for seed in range(8):
        (tmp_path / 'text' / f'{seed}.txt').write_bytes(tokenizer_files.plain_text(seed, 900))
    knobs = SMALL | {
        'data.source': tmp_path / 'text' / '*.txt',
        'data.tokenizer': './tokenizer/tokenizer.json',
    }
    how = [f'--config.{name}={value}' for name, value in knobs.items()]
    train = ('train', f'--config={ROOT}/configs/tiny.py', f'--workdir={run}', *how)

    status, _, err = command(tmp_path, *train, '--config.model.vocab_size=319')
    assert status == 2 and 'model.vocab_size=319: must be at least 320' in err
    assert not run.exists()
    status, out, err = command(tmp_path, *train)
    assert status == 0, err
    (tmp_path / 'tokenizer' / 'tokenizer.json').unlink()
    about = json.loads((run / 'tokenizer' / 'tokenizer_about.json').read_text())
    assert about['sha256'] == tokenizer.sha256

    elsewhere = tmp_path / 'elsewhere'
    longer = [*train, '--config.report.sample_tokens=9']
    status, _, err = command(elsewhere, *longer)
    assert status == 0, err
    arguments = (f'--workdir={run}', '--prompt=def é😀', '--max_tokens=9', '--seed=1')
    status, out, err = command(elsewhere, 'generate', *arguments)
    assert status == 0 and out.startswith('def é😀'), err
    status, _, err = command(
        elsewhere,
        'generate',
        f'--workdir={run}',
        b'--prompt=a\xff'.decode(errors='surrogateescape'),
    )
    assert status == 2 and 'byte 1 of the text is 0xff' in err
    status, out, err = command(elsewhere, 'evaluate', f'--workdir={run}')
    assert status == 0 and 'bits a byte' in out, err
    file = tmp_path / 'text' / '0.txt'
    status, _, err = command(elsewhere, 'inspect', f'--workdir={run}', f'--text={file}', '--out=i')
    assert status == 0, err
    shown = json.loads((elsewhere / 'i' / 'routing.json').read_text())['tokens']
    text = file.read_bytes()
    begin = bytes.fromhex(''.join(shown['bytes']))
    assert text.startswith(begin) and len(begin) > 1.5 * len(shown['bytes'])
