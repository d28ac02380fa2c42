"""Which files of a folder are its texts: each file once, and nothing that a command wrote."""

import json

import pytest

from moddepth_jax.data.sources import check_source, find_files
from moddepth_jax.data.token_store import is_started
from moddepth_jax.training.run_dir import open_workdir


def found(source):
    root, files, _ = find_files(str(source), 'data.source', 'must be right')
    return [path.relative_to(root).as_posix() for path in files]


def test_a_file_is_taken_once(tmp_path):
    """Regression: texts with a link were trained on and held out.

    In the cache of Hugging Face the link has the suffix that says how to read the file.
    """
    (tmp_path / 'blobs').mkdir()
    (tmp_path / 'blobs/3f9a').write_text('{"text": "a row"}\n')
    (tmp_path / 'train.jsonl').symlink_to('blobs/3f9a')
    for name in ('b.txt', 'a.txt'):
        (tmp_path / name).write_text('text')
    (tmp_path / 'c.txt').symlink_to('b.txt')
    assert found(tmp_path) == ['a.txt', 'b.txt', 'train.jsonl']


def test_a_run_inside_a_source_is_not_text(tmp_path):
    """Regression: after a run in its own source it could be neither resumed nor evaluated."""
    (tmp_path / 'a.py').write_text('text')
    for run in ('x', 'runs/y'):
        open_workdir(tmp_path / run, {'seed': 0})
        (tmp_path / run / 'metrics.jsonl').write_text('{"step": 1}\n')
    check_source(str(tmp_path))
    assert found(tmp_path) == found(tmp_path / '**/*') == ['a.py']
    with pytest.raises(ValueError, match='is a run of launch.train, not a folder of texts'):
        check_source(str(tmp_path / 'x'))


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('manifest.json', {'name': 'extension', 'version': '1.0'}),
        ('app/config.json', {'schema_version': 3}),
        ('train.bin', 'ids'),
    ],
)
def test_common_names_are_texts(name, content, tmp_path):
    """Regression: such folders were taken for checkpoints, runs or prepared text."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    assert not is_started(tmp_path)
    check_source(str(tmp_path))
    assert found(tmp_path) == [name]
