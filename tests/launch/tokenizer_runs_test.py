"""A run with a tokenizer from a file does not need the file once it has begun."""

import json

import pytest

from tests.data import tokenizer_files
from tests.forked_commands import ROOT
from tests.launch.commands import call

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

    done = call(*train, '--config.model.vocab_size=319', cwd=tmp_path)
    assert done.status == 2 and 'model.vocab_size=319: must be at least 320' in done.stderr
    assert not run.exists()
    done = call(*train, cwd=tmp_path)
    assert done.status == 0, done.stderr
    (tmp_path / 'tokenizer' / 'tokenizer.json').unlink()
    about = json.loads((run / 'tokenizer' / 'tokenizer_about.json').read_text())
    assert about['sha256'] == tokenizer.sha256

    elsewhere, file = tmp_path / 'elsewhere', tmp_path / 'text' / '0.txt'
    bad_prompt = b'--prompt=a\xff'.decode(errors='surrogateescape')
    for words, status, shown in (
        ((*train, '--config.report.sample_tokens=9'), 0, ''),
        (('generate', f'--workdir={run}', '--prompt=def é😀', '--max_tokens=9'), 0, 'def é😀'),
        (('generate', f'--workdir={run}', bad_prompt), 2, 'byte 1 of the text is 0xff'),
        (('evaluate', f'--workdir={run}'), 0, 'bits a byte'),
        (('inspect', f'--workdir={run}', f'--text={file}', '--out=i'), 0, ''),
    ):
        done = call(*words, cwd=elsewhere)
        assert done.status == status and shown in done.stdout + done.stderr, done
    shown = json.loads((elsewhere / 'i' / 'routing.json').read_text())['tokens']
    begin = bytes.fromhex(''.join(shown['bytes']))
    assert file.read_bytes().startswith(begin) and len(begin) > 1.5 * len(shown['bytes'])
