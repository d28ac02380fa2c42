"""Lists the commands with the first line of their docstrings."""

import ast
import difflib
import pathlib
import sys

MAIN = "if __name__ == '__main__':"


def commands() -> dict[str, str]:
    """Return the first line of the docstring of each command, by name."""
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob('[!_]*.py')):
        text = path.read_text(encoding='utf-8')
        if MAIN in text:
            found[path.stem] = ast.get_docstring(ast.parse(text)).splitlines()[0]
    return found


def main(words: list[str]) -> int:
    """Print the list, or report that the first of `words` is not a command."""
    known = commands()
    if not words or words[0] in ('-h', '--help', '--list'):
        print('python -m launch.NAME --help describes a command. NAME is one of')
        print(*(f'  {name:<10}{line}' for name, line in known.items()), sep='\n')
        return 0
    near = difflib.get_close_matches(words[0], known, n=1)
    right = f'did you mean python -m launch.{near[0]}?' if near else 'python -m launch lists them'
    print(f'error: {words[0]}: no such command; {right}', file=sys.stderr)
    return 2


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
