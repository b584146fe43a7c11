"""See why a trained model works or breaks: a probe for every question, on any run of train.py.

    python probe.py                                    lists the probes
    python probe.py NAME --help                        explains one and its flags
    python probe.py cursor out/string_copy_prism       prints a table, writes probe_cursor.json and
                                                       draws probe_cursor.png into the run's folder
    python probe.py cursor RUN --seed=3 --length=60 --out_dir=FOLDER --format=svg
    python probe.py attention by_hand:parity           a Transformer whose weights are set by hand
    python probe.py axes --hf=FOLDER_OR_GGUF --text=FILE    a Llama-family checkpoint
    python probe.py report RUN                         gathers what was found in RUN/report.md

Each paper has its file in probes/. probe_NAME.json holds {"rows": [...], "summary": {...}}.
"""
import dataclasses
import glob
import inspect
import json
import os
import pathlib
import textwrap
from typing import Literal

import pe as encodings
import tasks
from engine import checkpoint, config
from engine.config import UserError
from engine.report import pyplot
from probes import by_hand, core, llama, pope, position, prism, toeplitz, vipe

FILES = {'ViPE': vipe, 'PRISM': prism, 'PoPE': pope, 'the Toeplitz study': toeplitz,
         'LLM position generalization': position}
PROBES = {f.__name__: f for file in FILES.values() for f in file.PROBES}
# probes that take a Llama in place of a run: how many sequences unless --n says otherwise
LLAMA = {f: n for file in FILES.values() for f, n in getattr(file, 'LLAMA', {}).items()}
FORMATS = 'png', 'svg', 'pdf'
# the flags of every probe, and of those that take a Llama
COMMON = [('seed', int, None), ('out_dir', str, ''), ('format', Literal[FORMATS], 'png')]
OF_LLAMA = [('hf', str, ''), ('text', str, '')]


def tables(rows):
    """Rows as tables of text, the names of the columns first; rows that share columns are one.
    Columns that are None throughout are left out."""
    groups = []
    for row in rows:
        if not groups or not groups[-1][0].keys() & row.keys():
            groups.append(({}, []))
        groups[-1][0].update(row)
        groups[-1][1].append(row)
    for columns, members in groups:
        for key in list(columns):
            if all(row.get(key) is None for row in members):
                del columns[key]
    return [[list(columns), *(['' if row.get(key) is None else str(row[key]) for key in columns]
                              for row in members)] for columns, members in groups]


def as_text(rows, summary):
    """Rows as tables, then the summary, each key on one line with its value."""
    lines = []
    for table in tables(rows):
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += ['  '.join(map(str.rjust, line, widths)) for line in table]
    pairs = [f'{key}: {value:.4g}' if type(value) is float else f'{key}: {value}'
             for key, value in summary.items()]
    text = '  '.join(pair.replace(' ', '\0') for pair in pairs)
    lines += textwrap.wrap(text, 130, break_long_words=False, break_on_hyphens=False)
    return '\n'.join(lines).replace('\0', ' ')


def report(folder):
    """Write one page of Markdown about all that the probes have found in a folder."""
    found = sorted(glob.glob(os.path.join(glob.escape(folder), 'probe_*.json')))
    if not found:
        raise UserError(f'no probe has looked at {folder} yet: python probe.py lists the probes')
    page = f'# Probes of {os.path.normpath(folder)}\n'
    for path in found:
        with open(path) as f:
            result = json.load(f)
        base = pathlib.Path(path).stem
        name = base[len('probe_'):]
        asks = inspect.getdoc(PROBES[name]).splitlines()[0] if name in PROBES else ''
        pictures = [f'![{name}]({base}.{ending})\n\n' for ending in FORMATS
                    if os.path.exists(os.path.join(folder, f'{base}.{ending}'))]
        page += f'\n## {name}\n\n{asks}\n\n{"".join(pictures)}```\n{as_text(**result)}\n```\n'
    path = os.path.join(folder, 'report.md')
    checkpoint.write(path, page)
    print(f'wrote {path}')


def flags_of(function):
    """(dataclass of the flags that every probe takes, dataclass of these and the probe's own)."""
    common = COMMON + OF_LLAMA * (function in LLAMA)
    own = [(name, type(p.default), p.default)
           for name, p in list(inspect.signature(function).parameters.items())[3:]]
    return [dataclasses.make_dataclass('Flags', fields) for fields in (common, common + own)]


def print_help(name=None):
    """What a probe does and its flags; without a name, what all of them ask."""
    if name:
        common, every = (config.defaults(flags) for flags in flags_of(PROBES[name]))
        flags = [f'--{key}={x}' for key, x in every.items() if key not in common]
        flags += [f'[--{key}=...]' for key in common]
        print(f'python probe.py {name} RUN {" ".join(flags)}\n\n{inspect.getdoc(PROBES[name])}')
        return
    print(__doc__)
    for paper, file in FILES.items():
        print(f'{paper} ({os.path.relpath(file.__file__, os.path.dirname(__file__))})')
        for function in file.PROBES:
            star = '*' if function in LLAMA else ' '
            print(f'  {function.__name__:12}{star} {inspect.getdoc(function).splitlines()[0]}')
    print('\n* also takes a Llama-family checkpoint')


def read_flags(argv, function):
    """--key=value -> (the flags that every probe takes, the probe's own that were given)."""
    common, flags = flags_of(function)
    if function not in LLAMA and any(arg.startswith(('--hf=', '--text=')) for arg in argv):
        raise UserError(f'{function.__name__} looks into runs only; with --hf: '
                        f'{", ".join(f.__name__ for f in LLAMA)}')
    given, words = config.parse(flags, argv)
    if words:
        raise UserError(f'{words[0]}: flags are written --key=value')
    for key, value in given.items():
        least = 1 if key in ('n', 'contents', 'queries') else 0
        if type(value) is int and value < least and key != 'offset':
            raise UserError(f'--{key}={value}: {key} must be a whole number from {least} on')
    return {key: given.pop(key, x) for key, x in config.defaults(common).items()}, given


def subject(function, run, flags, own):
    """(model, cfg, own flags) of a run, or of a Llama, for which n has its own default."""
    hf, text, seed = flags.get('hf'), flags.get('text'), flags['seed']
    if text and not hf and not run:
        raise UserError('--text is the text of a checkpoint: name it by --hf=FOLDER_OR_GGUF')
    if not run and not hf:
        raise UserError(f'python probe.py {function.__name__} RUN: which run?')
    if run and (hf or text):
        raise UserError('either a run or --hf, not both; --text is the text of a checkpoint')
    if run:
        return *core.load(run, seed), own
    if seed is not None:
        raise UserError(f'--seed={seed} picks a model of a run; a checkpoint has one only')
    model, cfg = llama.load(hf, text, needs_text=own.get('of') != 'weights')
    return model, cfg, ({'n': LLAMA[function]} if LLAMA[function] else {}) | own


def main(argv):
    """Print the list of probes, or run one of them."""
    if not argv or argv[0] in ('--help', '-h'):
        return print_help()
    if argv[0] == 'report':
        if len(argv) != 2:
            raise UserError('python probe.py report RUN takes the folder of a run and no flags')
        return report(argv[1].replace('by_hand:', by_hand.OUT_DIR))
    if os.path.isdir(argv[0]) and argv[0] not in PROBES:
        raise UserError(f'name a probe before the run: python probe.py NAME {argv[0]}')
    config.check_name('probe', argv[0], PROBES)
    if config.wants_help(argv):
        return print_help(argv[0])
    name, function = argv[0], PROBES[argv[0]]
    run = argv[1] if len(argv) > 1 and not argv[1].startswith('--') else ''
    flags, own = read_flags(argv[2 if run else 1:], function)
    model, cfg, own = subject(function, run, flags, own)
    rows, summary, figure = function(model, cfg.the_task, cfg, **own)
    print(as_text(rows, summary))
    path = os.path.join(flags['out_dir'] or cfg.out_dir, f'probe_{name}')
    plt, picture = pyplot(), f'{path}.{flags["format"]}'
    drawn = plt and figure.draw(plt)
    checkpoint.make_folder(os.path.dirname(path))
    checkpoint.write(path + '.json', json.dumps(dict(rows=rows, summary=summary), indent=1))
    for ending in FORMATS:    # an older picture shows something else
        pathlib.Path(f'{path}.{ending}').unlink(missing_ok=True)
    if plt is None:
        print(f'(pip install matplotlib, and {picture} is drawn as well)')
        return
    drawn.savefig(picture, dpi=150)
    plt.close(drawn)
    print(f'wrote {path}.json and drew {picture}')


if __name__ == '__main__':
    config.run(main, tasks.DataError, encodings.InputMissing)
