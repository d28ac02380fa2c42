"""The commands, files and links that pages and docstrings show."""

import ast
import pathlib
import re
import shlex
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    'docs/start.md',
    *sorted(
        path.relative_to(ROOT).as_posix()
        for pattern in ('*.md', 'depth_streams/*.md')
        for path in (ROOT / 'docs').glob(pattern)
        if path.name != 'start.md'
    ),
    'README.md',
    'CONTRIBUTING.md',
    'notebooks/README.md',
)
SCRIPTS = tuple(
    path.relative_to(ROOT).as_posix()
    for folder in ('configs', 'launch')
    for path in sorted((ROOT / folder).glob('*.py'))
)
# First words of commands; other lines of a block are output, equations or JSON.
PROGRAMS = (
    *('cp', 'docker', 'git', 'jupyter', 'jupytext', 'kubectl', 'make', 'mkdir', 'pip', 'python'),
    *('python3', 'sbatch', 'srun', 'tensorboard', 'wandb', 'xprof', 'zcat'),
)
_FENCE = re.compile(r'^( *)```(\w*)\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
# Within a sentence, a command without an argument is only mentioned.
_INLINE = re.compile(r'`((?:python3? -m launch\.\w+|make|pip|wandb|jupytext)\s[^`]*)`')
_LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')


class Command(NamedTuple):
    """One documented command."""

    source: str  # path of the page or script that shows it, from the root
    text: str  # as a shell would take it, its lines joined and its comment dropped

    @property
    def words(self) -> list[str]:
        """The words of the last command of a line, without variables that are set before it."""
        words = shlex.split(self.text)
        for end in ('|', '&&'):
            while end in words:
                words = words[words.index(end) + 1 :]
        while '=' in words[0] and words[0].split('=')[0].isupper():
            words = words[1:]
        return words

    @property
    def launched(self) -> str:
        """NAME of `python -m launch.NAME`, or ''."""
        words = self.words
        ours = words[:2] in (['python', '-m'], ['python3', '-m']) and len(words) > 2
        return words[2].removeprefix('launch.') if ours and words[2].startswith('launch.') else ''


def read(source: str) -> str:
    text = (ROOT / source).read_text(encoding='utf-8')
    return ast.get_docstring(ast.parse(text)) or '' if source.endswith('.py') else text


def blocks(text: str) -> list[tuple[str, str]]:
    return [(language, content) for _, language, content in _FENCE.findall(text)]


def files(text: str) -> dict[str, str]:
    """Content by path of the blocks of a page whose first line is `# PATH`.

    JSON lines have no comments, so that line is not part of the content.
    """
    found = {}
    for _, content in blocks(text):
        match = re.match(r'# ([\w/.-]+\.(?:py|yaml|jsonl))\n', content)
        if match:
            rest = content[match.end() :]
            found[match[1]] = rest if match[1].endswith('.jsonl') else content
    return found


def commands(source: str, text: str) -> list[Command]:
    """Commands of a page or docstring, in order: those of blocks, then those in sentences."""
    if source.endswith('.py'):
        shown, sentences = [text], ''
    else:
        shown = [content for language, content in blocks(text) if language in ('', 'sh', 'bash')]
        sentences = _FENCE.sub('', text)
    found = []
    for block in shown:
        for line in re.sub(r'\\\n\s*', '', block).splitlines():
            line = re.sub(r'\s+#.*$', '', line.strip())
            first = line.split(' ')[0]
            if first in PROGRAMS and not line.endswith(('.', ':', ',')):
                found.append(Command(source, line))
    inside = [' '.join(line.split()) for line in _INLINE.findall(sentences)]
    return list(dict.fromkeys([*found, *(Command(source, line) for line in inside)]))


def links(text: str) -> list[str]:
    targets = _LINK.findall(_FENCE.sub('', text))
    return [target for target in targets if not target.startswith(('http:', 'https:'))]


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings as GitHub names them, and its ids."""
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r'^#+ (.+)$', _FENCE.sub('', text), re.MULTILINE):
        plain = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).lower()
        found.add(re.sub(r'[^\w\- ]', '', plain).replace(' ', '-'))
    return found
