"""Error messages of one line for wrong flags and words on the command line."""

import re
import shlex
import sys

from absl import flags

FLAGS = flags.FLAGS
_BOOLEANS = ('true', 'false', '1', '0', 'yes', 'no', 'on', 'off')
_DASHES = '\u2010\u2011\u2012\u2013\u2014\u2015\u2212'  # editors and web pages replace - by these


def own_flags() -> list[flags.Flag]:
    """Return the flags of the command, sorted by name."""
    return sorted(FLAGS.get_key_flags_for_module(sys.argv[0]), key=lambda flag: flag.name)


def describe(error: Exception) -> str:
    """Return one line for an error of the flags."""
    if isinstance(error, flags.UnrecognizedFlagError):
        return _unknown_flag(error)
    if isinstance(error, flags.IllegalFlagValueError):
        return _illegal_value(error)
    return str(error)


def check_words(words: list[str], positional: str, error: Exception | None = None):
    """Raise ValueError for a word that was probably not meant as it was parsed.

    Args:
      words: the command line; words after `--` are not checked.
      positional: the text of --help on positional arguments; '' if there are none.
      error: error of the flag parser. Stray words are then only reported if a flag is missing.
    """
    required = re.match('flag --(.+)=None: .* other than None', str(error))
    no_config = error is not None and 'config' in FLAGS and FLAGS['config'].value is None
    strays, i = [], 0
    while i < len(words) and words[i] != '--':
        word, following = words[i], words[i + 1 : i + 3]
        name, equals, value = word.lstrip('-').partition('=')
        name = name if name in FLAGS else name.removeprefix('no')  # of a boolean
        flag = FLAGS[name] if name in FLAGS else None
        if word == '-' or not word.startswith('-'):
            strays.append((word, words[i - 1] if i else ''))
        elif not value:
            takes_next = not equals and (flag is None or not flag.boolean)
            if flag is not None:
                _check_neighbors(word, following, takes_next, positional)
            i += takes_next and (name in FLAGS or not ''.join(following[:1]).startswith('-'))
        i += 1
    if positional and isinstance(error, flags.UnrecognizedFlagError):
        raise ValueError(_unknown_flag(error, positional.splitlines()[0]))
    if not strays or positional:
        return
    if no_config:
        raise ValueError(_without_flag(strays[0][0], 'config'))
    if required:
        raise ValueError(_without_flag(strays[0][0], required[1]))
    if error is None:
        raise ValueError(_unexpected(*strays[0]))


def _check_neighbors(word, following, takes_next, positional):
    """Raise ValueError if a flag without a value is followed by another flag or a spaced "="."""
    name, equals, _ = word.partition('=')
    after = following[0] if following else '--'
    spaced = [after] if after.startswith('=') else []
    spaced = following if after == '=' else spaced
    if equals and not after.startswith('-') and not positional:
        spaced = [after]
    if spaced:
        value = shlex.quote(spaced[-1].removeprefix('=')) if spaced != ['='] else 'VALUE'
        found = f'{word} {" ".join(spaced)}'
        raise ValueError(f'{found}: has a space next to "="; write {name}={value}')
    next_flag = after.lstrip('-').partition('=')[0]
    if takes_next and after.startswith('--') and (after == '--' or next_flag in FLAGS):
        raise ValueError(f'{name}: missing value; write {name}=VALUE')


def _without_flag(word, name):
    """One line for a word that is probably the value of a required flag."""
    meant = word
    if name == 'config':
        from launch import config_file

        meant = config_file.meant(word) or word
    return f'{word}: unexpected; did you mean --{name}={meant}?'


def _unexpected(word, before):
    """One line for a word that belongs to no flag and follows the word `before`."""
    name, _, value = word.partition('=')
    known = _known()
    for meant in (name.lstrip(_DASHES), f'config.{name}'):
        if meant in known:
            return f'{word}: unexpected; did you mean --{meant}{word[len(name) :]}?'
    flag, equals, given = before.partition('=')
    if flag.lstrip('-') in FLAGS and not equals and word.lower() in _BOOLEANS:
        return f'{before} {word}: a value of {before} follows "=", as in {before}=false'
    if given.endswith(',') or word.startswith(',') or (value and '=' in given):
        joined = f'{before.rstrip(",")},{word.lstrip(",")}'
        return f'{before} {word}: has a space inside; write {joined}'
    after = f' after {before}' * bool(given)
    right = 'an option starts with --, a value with spaces is quoted, and --help lists the options'
    return f'{word}: unexpected{after}; {right}'


def _known():
    """Name of the flags, and of the knobs of --config."""
    names = [flag.name for flag in own_flags()]
    if 'config' in FLAGS and FLAGS['config'].value:
        from launch import config_file  # launch.gpu does not need it

        names += config_file.knob_names(FLAGS['config'].value)
    return names


def _unknown_flag(error, positional=''):
    from launch import config_file

    if 'config' in FLAGS and not FLAGS['config'].value and error.flagname.startswith('config.'):
        return f'{error.flagvalue}: needs --config=FILE.py before it'
    right = config_file.nearest(error.flagname, _known())
    if positional and right.startswith('there are'):
        right = f'{right}, and without a flag {positional}'
    if error.flagname.split('.')[0] == 'config' and 'config' not in FLAGS:
        right = 'the run of --workdir has its own config' if 'workdir' in FLAGS else right
        right = 'flags of the command follow --' if 'restarts' in FLAGS else right
    return f'{error.flagvalue}: no such flag; {right}'


def _illegal_value(error):
    text = str(error).removeprefix('flag ')
    name = re.match(r'--([^=]+)=', text)
    if not name or name[1] not in FLAGS:
        return str(error)
    flag = FLAGS[name[1]]
    if 'must have a value other than None' in text:
        return f'--{flag.name}: missing; {flag.help.split(". ")[0]}'
    parser, right = flag.parser, flag.parser.syntactic_help
    if isinstance(parser, flags.BooleanParser):
        right = 'true or false'
    elif isinstance(parser, flags.EnumParser):
        right = f'one of {", ".join(parser.enum_values)}'
    elif parser.flag_type() == 'tuple':
        right = "a tuple, such as '(256, 0)'"
    return f'{text.removesuffix(f": {error.__context__}")}: must be {right}' if right else text
