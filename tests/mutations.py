"""Plant mistakes in copies of the tree, one at a time: a test must fail for each.

    python -m tests.mutations [NAME ...]

`mutations.toml` lists known mistakes of public implementations (the tables of docs/) and others. A
row has a `name`, the `mistake` in words, the `file`, the `old` text that occurs there once, the
`new` text, `more` such pairs in the same file if needed, the `tests` of which one must fail, the
pytest `marker` if that test is slow, and `next` if it needs the JAX of `make test-next`, whose
interpreter runs the Hopper kernels. All took 72 minutes on two cores that other work shared.
"""

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
NEXT_PYTHON = ROOT / '.venv-next' / 'bin' / 'python'
PROCESSES = 2
TIMEOUT = 900  # seconds, of the tests of one mistake
FAILED = 1  # exit status of pytest: tests ran, and some failed


def read_mutations() -> list[dict]:
    """The rows of mutations.toml."""
    return tomllib.loads((ROOT / 'tests' / 'mutations.toml').read_text())['mutation']


def mutated(mutation: dict) -> str:
    """Return the file with the mistake; raises ValueError unless each `old` occurs once."""
    text = (ROOT / mutation['file']).read_text()
    for change in [mutation, *mutation.get('more', ())]:
        if (found := text.count(change['old'])) != 1:
            raise ValueError(f'{mutation["name"]}: occurs {found} times: {change["old"]!r}')
        text = text.replace(change['old'], change['new'])
    return text


def run_tests(mutation: dict) -> str:
    """Plant a mistake and run its tests; return 'caught by TEST' or another result."""
    python = NEXT_PYTHON if mutation.get('next') else sys.executable
    if not os.path.exists(python):
        return f'NO RESULT: `make test-next` makes {python}'
    with tempfile.TemporaryDirectory() as directory:
        copy = pathlib.Path(directory) / 'tree'
        ignored = shutil.ignore_patterns('.*', 'runs', '__pycache__', 'results')
        shutil.copytree(ROOT, copy, ignore=ignored)
        (copy / mutation['file']).write_text(mutated(mutation))
        command = [str(python), '-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider']
        command += ['-m', mutation.get('marker', 'not slow'), *mutation['tests']]
        environment = os.environ | {'PYTHONPATH': str(copy), 'PYTHONDONTWRITEBYTECODE': '1'}
        try:
            found = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return f'NO RESULT: the tests took over {TIMEOUT} s'
    # An error is one of a fixture that looks at what the test printed.
    failed = [line for line in found.stdout.splitlines() if re.match('FAILED|ERROR', line)]
    if found.returncode == FAILED and failed:
        return f'caught by {failed[0].split()[1].removeprefix("tests/")}'
    if found.returncode == 0:
        return 'NOT CAUGHT'
    return f'NO RESULT: pytest exits with {found.returncode}: {found.stdout[-300:]}'


def main():
    """Print a line for each mistake; exit with 1 if one was not caught."""
    mutations, names = read_mutations(), sys.argv[1:]
    unknown = set(names) - {mutation['name'] for mutation in mutations}
    if unknown:
        sys.exit(f'{", ".join(sorted(unknown))}: no such name in tests/mutations.toml')
    chosen = [mutation for mutation in mutations if not names or mutation['name'] in names]
    started, caught = time.monotonic(), 0
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        for mutation, result in zip(chosen, pool.map(run_tests, chosen), strict=True):
            caught += result.startswith('caught')
            print(f'{mutation["name"]}: {result}', flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f'{caught} of {len(chosen)} mistakes are caught, in {minutes:.0f} minutes')
    sys.exit(caught != len(chosen))


if __name__ == '__main__':
    main()
