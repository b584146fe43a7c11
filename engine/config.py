"""Config files and --key=value flags -> the fields of a dataclass: the one parser of every program.

    @dataclass
    class Config:
        lr: float = 1e-3                            # peak learning rate
        decay: Literal['linear', 'none'] = 'linear' # how it falls

    read(Config, ['configs/small.py', '--lr=3e-4'])  ->  {'lr': 3e-4, 'decay': 'none'}

The field's type says what a value may be and its comment is the help text. A config file is Python
assignments to the keys; it may use the values that the files before it set (`lr = lr / 2`).
Every mistake of a user raises a UserError: one line that names the fix.
"""
import ast
import difflib
import glob
import inspect
import os
import re
import signal
import sys
import traceback
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin


class UserError(Exception):
    """Something that the user can fix: a program prints it as one line and exits with status 2."""


def suggestion(name, known, otherwise):
    """The nearest of the known names as a question, or `otherwise`."""
    near = difflib.get_close_matches(name, known, 1)
    return f', did you mean {near[0]!r}?' if near else otherwise


def check_name(what, name, known):
    """UserError, with the nearest known name, if `name` is not among them."""
    if name not in known:
        near = suggestion(name, known, '.')
        raise UserError(f'unknown {what} {name!r}{near} There are: {", ".join(known)}')


def slug(text):
    """Text as part of a file name."""
    return re.sub(r'[^\w.+=,-]', '_', text)


# --------------------------------------------------------------------------------------------------
# values

class Sweep(list):
    """The values of a key that was given a comma list: a run for each."""


def keys(cls):
    """{name: field} of what a user may set; cls.DERIVED names the fields that the program sets."""
    return {f.name: f for f in fields(cls) if f.name not in getattr(cls, 'DERIVED', ())}


def defaults(cls):
    """{key: default}; lists as lists."""
    return {name: list(f.default) if f.type is list else f.default for name, f in keys(cls).items()}


def check_key(cls, key, where):
    """UserError, with the nearest key, if the dataclass has no such key."""
    if key not in keys(cls):
        near = suggestion(key, keys(cls), '; --help lists the keys')
        raise UserError(f'{where}: unknown key {key!r}{near}')


def parse_list(text):
    """1-16 | 1,2,4-6 | [(0, 5), (400, 10)] -> list."""
    text = text.replace(' ', '')
    if not re.fullmatch(r'\d+(-\d+)?(,\d+(-\d+)?)*', text):
        return ast.literal_eval(text)
    numbers = []
    for part in text.split(','):
        first, _, last = part.partition('-')
        if int(last or first) < int(first):
            raise ValueError(f'{part} goes down')
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def convert(field, value, where):
    """The value as the type of its field; text as Python reads it. UserError if it is not one."""
    kind = field.type
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ', '.join(get_args(kind))
            raise UserError(f'{where}: {field.name} must be one of {choices}, not {value!r}')
        return value
    if isinstance(value, str) and kind is not str:
        text = value.capitalize() if kind is bool else value       # true, True
        try:
            value = parse_list(text) if kind is list else ast.literal_eval(text)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            pass                                                   # still text: refused below
    if kind is float and type(value) is int:
        value = float(value)
    elif kind is int and type(value) is float and value.is_integer():
        value = int(value)                                         # 1e4 steps
    elif kind is list and isinstance(value, (tuple, range)):
        value = list(value)
    if type(value) is kind or (value is None and field.default is None):
        return value
    name = {list: 'a list as in 1-16 or 1,2,4', int: 'a whole number', float: 'a number',
            bool: 'True or False', str: 'text'}[kind]
    raise UserError(f'{where}: {field.name} must be {name}, not {value!r}')


def check(cls, key, value, where, swept=()):
    """The value of a key, or the Sweep of values that a comma list gives to a key in `swept`."""
    check_key(cls, key, where)
    field = keys(cls)[key]
    if key in swept and isinstance(value, str) and ',' in value:
        return Sweep(convert(field, part.strip(), where) for part in value.split(','))
    return convert(field, value, where)


# --------------------------------------------------------------------------------------------------
# command line and files

def parse(cls, argv, swept=()):
    """({key: value} of the flags, the other words) of a command line. --key alone means True."""
    flags, words = {}, []
    for arg in argv:
        if not arg.startswith('-'):
            words.append(arg)
            continue
        key, equals, value = arg.lstrip('-').partition('=')
        check_key(cls, key, arg)
        if not equals and keys(cls)[key].type is not bool:
            raise UserError(f'--{key} needs a value: --{key}=...')
        flags[key] = check(cls, key, value if equals else True, f'--{key}', swept)
    return flags, words


def read_file(cls, path, values, other_keys=False, swept=()):
    """`values` with the assignments of a config file on top; other_keys: it may assign others."""
    names = dict(values)
    try:
        with open(path) as f:
            exec(compile(f.read(), path, 'exec'), names)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, 'strerror', None) or 'it is not text'
        near = suggestion(path, glob.glob('configs/*.py'), '')
        if '=' in path:
            near = f', did you mean --{path}?'
        raise UserError(f'cannot read config file {path}: {reason}{near}') from None
    except SyntaxError as error:
        raise UserError(f'{path}, line {error.lineno or 1}: {error.msg}') from None
    except Exception as error:                                     # whatever its lines raise
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        raise UserError(f'{path}, line {line}: {type(error).__name__}: {error}') from None
    del names['__builtins__']
    result = dict(values)
    for key, value in names.items():
        unchanged = key in values and value is values[key]         # the file did not assign it
        if not unchanged and (key in keys(cls) or not other_keys):
            result[key] = check(cls, key, value, path, swept)
    return result


def read(cls, argv, extra_keys_in_files=False):
    """{key: value} of every key: defaults, then the files on the command line, then its flags."""
    flags, files = parse(cls, argv)
    values = defaults(cls)
    for path in files:
        values = read_file(cls, path, values, extra_keys_in_files)
    return values | flags


def make(cls, values):
    """cls(**values); a ValueError of the dataclass becomes a UserError."""
    try:
        return cls(**values)
    except ValueError as error:
        raise UserError(str(error)) from None


# --------------------------------------------------------------------------------------------------
# programs

@dataclass
class NoFlags:
    """A command line of words alone, for parse()."""


def wants_help(argv):
    """Whether --help or -h is among the arguments."""
    return '--help' in argv or '-h' in argv


def as_typed(value):
    """A value as one would type it; a list as 1-16 if its numbers are consecutive, or as 1,2,4."""
    if not isinstance(value, (list, tuple, range)):
        return str(value)
    items = list(value)
    if any(isinstance(x, (list, tuple)) for x in items):
        return str(items)
    numbers = len(items) > 2 and all(type(x) is int for x in items)
    if numbers and items == list(range(items[0], items[-1] + 1)):
        return f'{items[0]}-{items[-1]}'
    return ','.join(map(str, items))


def print_help(doc, cls):
    """Print a program's docstring and, from the source of its dataclass, each key's comment.

    A key's help is the comment on its line, else the comment lines above it. If it has both, those
    above are a heading.
    """
    print(doc)
    for base in cls.__mro__[:-1]:
        if base is not cls:
            print(f'{base.__module__}.py')
        above = []
        for line in inspect.getsource(base).splitlines():
            key = re.match(r'    (\w+): .+? = .*?(?: +# (.*))?$', line)
            comment = re.match(r'    # (.*)', line)
            if key and key[1] in keys(cls):
                if key[2] and above:
                    print('\n' + ' '.join(above))
                field, text = keys(cls)[key[1]], key[2] or ' '.join(above)
                choices = ' | '.join(map(str, get_args(field.type)))
                if choices and ' | ' not in text:
                    text += f': {choices}'
                flag = f'--{key[1]}={as_typed(field.default)}'
                print(f'  {flag:25} {text}')
            above = above + [comment[1]] if comment else []
        print()


def run(main, *errors):
    """Run main(argv) and exit with its status; a UserError, or one of `errors`, is one line and
    status 2, and so is a lack of memory."""
    sys.stdout.reconfigure(errors='replace')
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)              # ... | head
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError, *errors) as error:
        says = error
        if isinstance(error, OSError) and error.filename:
            says = f'{error.filename}: {error.strerror}'
    except (MemoryError, RuntimeError) as error:
        lacks_memory = re.search('out of memory|allocate', str(error))
        if not (lacks_memory or isinstance(error, MemoryError)):
            raise
        says = ('not enough memory: use a smaller batch_size, a larger accumulate, or fewer and '
                'shorter problems (of a probe: a smaller --length or --n)')
    print(f'{os.path.basename(sys.argv[0])}: {says}', file=sys.stderr)
    sys.exit(2)
