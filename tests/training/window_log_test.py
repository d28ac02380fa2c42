"""The log of windows has each step once after any kill, whatever processes wrote it."""

import json

import pytest

from moddepth_jax.training.metrics import WindowLog, read_windows


def log(workdir, first_step, process, steps):
    with WindowLog(workdir, first_step, process) as windows:
        for step in steps:
            windows.write(step, [10 * step + process])


def test_windows_of_all_processes_are_read_together(tmp_path):
    """A step's windows are those of all files, sorted; other files are left alone."""
    (tmp_path / 'windows-x.jsonl').write_text('no log')
    log(tmp_path, 0, 1, [1, 2])
    log(tmp_path, 2, 0, [3])
    log(tmp_path, 3, 1, [4])
    assert read_windows(tmp_path) == {1: [11], 2: [21], 3: [30], 4: [41]}
    log(tmp_path, 9, 0, [4])
    assert read_windows(tmp_path)[4] == [40, 41]


@pytest.mark.parametrize('torn', ['', '{"step": 4, "windows": [4', '{"step": 4, "windows": [41]'])
def test_a_resume_drops_later_rows_of_all_processes(tmp_path, torn):
    """Also of a process that is no more, and a line that a kill cut short."""
    log(tmp_path, 0, 1, [1, 2, 3])
    with open(tmp_path / 'windows-1.jsonl', 'a') as file:
        file.write(torn)
    assert list(read_windows(tmp_path)) == [1, 2, 3]
    log(tmp_path, 2, 0, [3, 4])
    assert read_windows(tmp_path) == {1: [11], 2: [21], 3: [30], 4: [40]}
    rows = (tmp_path / 'windows-1.jsonl').read_text().splitlines()
    assert [json.loads(row)['step'] for row in rows] == [1, 2]


def test_a_row_is_on_its_way_when_write_returns(tmp_path):
    """A process that is killed next leaves it."""
    with WindowLog(tmp_path, 0, 0) as windows:
        windows.write(1, [5, 6])
        assert read_windows(tmp_path) == {1: [5, 6]}
