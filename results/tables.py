"""Tables of the records in results/*.jsonl, and the board.

    python results/tables.py                          list the sets of records
    python results/tables.py vipe_long                print a set as a Markdown table;
                             --metric=token, last     instead of exact
    python results/tables.py board --minutes=1 --pe=rope,mine --task=parity,recall
    python results/tables.py refresh                  rewrite the marked blocks of the README files

A record is one line of JSON about a run, which `train.py --results=FILE` appends:

    {"config": {"pe": "rope", "task": "parity", "lr": 0.002, "seeds": "0-2",
                "out_dir": "out/parity/rope"},
     "lengths": "1-16,20", "scores": {"0": {"exact": [1, ...], "token": [...], "last": [...]}},
     "n": {"1": 2}, "failed": ["seed 1: ..."], "torch": ..., "commit": ..., "hardware": ...}

config has pe, task, out_dir and the options that differ from train.Config's defaults (if a default
changes, rewrite the records), except train.NOT_RECORDED; lists as on the command line. The first
folder below out/ names the set. scores has, for each seed that stayed finite, each metric (for a
corpus also loss) at each of the lengths, to four digits; a metric equal to exact is left out. n is
the number of problems of a length where it is not n_test. Records of probes ({"probe", "run",
"args", "rows": {"columns", "values"}, "summary"}) and speed ({"benchmark", ...}) have no table.
"""
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from train import check_name, slug  # noqa: E402

DEFAULTS = {key: train.as_typed(value) if isinstance(value, list) else value
            for key, value in train.defaults(train.Config).items()}

# --------------------------------------------------------------------------------------------------
# records -> runs

@dataclass
class Run:
    """All seeds of one configuration."""
    options: dict                   # all of them, defaults included
    trained: list                   # lengths trained on
    sizes: dict                     # {length evaluated: number of problems}
    scores: dict                    # {seed: {metric: values, one for each length}}
    failed: set                     # seeds that diverged

    @property
    def corpus(self):
        return any('loss' in scores for scores in self.scores.values())

    def by_length(self, seed, metric):
        """{length: score} of a seed; of a corpus the loss."""
        scores = self.scores[seed]
        return dict(zip(self.sizes, scores.get('loss') or scores.get(metric, scores['exact'])))

    def mean(self, seed, lengths, metric):
        """Mean over the problems of these lengths; of a corpus its perplexity."""
        scores = self.by_length(seed, metric)
        there = [n for n in lengths if n in scores]
        total = sum(self.sizes[n] for n in there) or math.nan
        mean = sum(self.sizes[n] * scores[n] for n in there) / total
        return math.exp(mean) if self.corpus else mean

    def reach(self, seed, metric):
        """The length up to which a seed keeps 95 % at every length of 50 or more problems; or 0.
        In a corpus: up to which perplexity is at most 1 / 0.95 of that at the training length."""
        scores = self.by_length(seed, metric)
        if self.corpus:
            start = scores.get(max(self.trained), math.nan)
            scores = {n: math.exp(start - loss) for n, loss in scores.items()}
        counted = [n for n in scores if self.corpus or self.sizes[n] >= 50]
        return max(itertools.takewhile(lambda n: scores[n] >= 0.95, counted), default=0)


def numbers(text):
    """'1-3,5' -> [1, 2, 3, 5]."""
    spans = [part.split('-') for part in text.split(',')]
    return [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]


def key_of(config, free):
    """All options, defaults included, except those that are free and those not recorded."""
    return str([(key, value) for key, value in sorted({**DEFAULTS, **config}.items())
                if key not in free and key not in train.NOT_RECORDED])


def read_runs(*paths):
    """{set: [Run]} of files, by default all of results/; seeds of one configuration are one Run."""
    sets, known = {}, {}
    for path in paths or sorted(ROOT.glob('results/*.jsonl')):
        for line in Path(ROOT, path).read_text().splitlines():
            record = json.loads(line)
            if 'scores' not in record:                     # a probe, or a time
                continue
            options = {**DEFAULTS, **record['config']}
            name = re.sub('.*out/', '', options['out_dir']).partition('/')[0]
            key = name, record['lengths'], key_of(options, ('seeds', 'out_dir'))
            seeds, n = set(numbers(options['seeds'])), record.get('n', {})
            if key not in known or seeds & {*known[key].scores, *known[key].failed}:
                lengths = numbers(record['lengths'])
                sizes = {length: n.get(str(length), options['n_test']) for length in lengths}
                known[key] = Run(options, numbers(options['train_lengths']), sizes, {}, set())
                sets.setdefault(name, []).append(known[key])
            scores = {int(seed): scores for seed, scores in record['scores'].items()}
            known[key].scores |= scores
            known[key].failed |= seeds - scores.keys()
    return sets


# --------------------------------------------------------------------------------------------------
# a grid {row: {column: [Run]}} as a table

def varying(runs):
    """The options that tell runs apart; one that follows from those before it is left out."""
    keys, groups = [], 1
    for key in dict.fromkeys(['task', 'pe', *(k for run in runs for k in run.options)]):
        values = {str([run.options.get(k) for k in [*keys, key]]) for run in runs}
        if key not in ('seeds', 'out_dir', 'n_test') and len(values) > groups:
            keys, groups = [*keys, key], len(values)
    return keys


def grid_of(runs):
    """Names of the row's options, and a grid with a column for each task."""
    keys, grid = [key for key in varying(runs) if key != 'task'], {}
    for run in runs:
        row = grid.setdefault(tuple(str(run.options.get(key, '-')) for key in keys), {})
        row.setdefault(run.options['task'], []).append(run)
    return keys, grid


def over_seeds(values, digits):
    """'98 (96 to 100): 100, 96': mean, range and each seed; one number if all are equal."""
    texts = [f'{x:.{digits}f}' for x in values]
    if len(set(texts)) == 1:
        return texts[0]
    mean, least, most = (f'{f(values):.{digits}f}' for f in (statistics.mean, min, max))
    return f'{mean} ({least} to {most}): {", ".join(texts)}'


def cell_text(run, metric):
    """The metric on the training lengths, at twice the longest, and what each seed reaches."""
    count, longest = len(run.scores) + len(run.failed), max(run.trained)
    failed = f'{len(run.failed)} of {count} seeds failed' if run.failed else ''
    if not run.scores:
        return failed
    # SCAN lacks some lengths: take the nearest below twice the training length
    twice = max((n for n in run.sizes if longest < n <= 2 * longest), default=None)
    scale, digits = (1, 2) if run.corpus else (100, 1)
    texts = [over_seeds([scale * run.mean(seed, lengths, metric) for seed in run.scores], digits)
             for lengths in (run.trained, [twice])]
    held = [run.reach(seed, metric) for seed in run.scores]
    held = ['≥ ' * (n == max(run.sizes)) + str(n or 'none') for n in held]
    texts[1] = texts[1].replace('nan', '-') + f' (at {twice})' * (twice not in (None, 2 * longest))
    texts.append(', '.join(held if len(set(held)) > 1 else held[:1]))
    return '<br>'.join(filter(None, [*texts, failed]))


def table(keys, grid, metric='exact'):
    """Lines of a Markdown table."""
    columns = list(dict.fromkeys(column for row in grid.values() for column in row))
    yield (f'Each cell: {metric} in percent, or perplexity, on the training lengths; at twice the '
           'longest; longest length with 95 %. For seeds: mean (least to most): each seed.\n')
    yield '| ' + ' | '.join([*keys, *columns]) + ' |'
    yield '|---' * len([*keys, *columns]) + '|'
    for options, row in grid.items():
        cells = ['<br>'.join(cell_text(run, metric) for run in row.get(column, []))
                 for column in columns]
        yield '| ' + ' | '.join([*options, *cells]) + ' |'


# --------------------------------------------------------------------------------------------------
# the board: how far every encoding generalizes on every task, all with the same small budget.
# In a cell, seed 5 tries five learning rates; seeds 0 to 4 train at the one that ended best on
# validation problems of the training lengths. The dial sets the steps of each task, such that
# RoPE's cell takes one to two times --minutes on one CPU core.

SHAPE = '--d_model=64 --n_layer=2 --n_head=2 --batch_size=32 --n_eval=64 --n_test=256'
RATES = '1e-3,2e-3,4e-3,5e-4,8e-3'
TO_6 = '1-6 1-10,12,14,16,18,24,36,48,60'
TO_16 = '16 16-20,22,24,28,32,40,48,64,96,128,160'
COLUMNS = {   # steps a minute, tokens of the longest problem, lengths trained and evaluated, flags
    'parity': f'640 123 {TO_6} --task=parity',
    'polynomial': f'640 123 {TO_6} --task=polynomial',
    'copy': f'640 122 {TO_6} --task=string_copy',
    'reverse': f'640 123 {TO_6} --task=string_reverse',
    'addition': '960 64 1-2 1-6,8,12,16,20 --task=addition:reversed=1',
    'flip-flop': f'320 320 {TO_16} --task=flip_flop',
    'S3': '960 32 1-3 1-6,8,10,12,18,24,30 --task=group:name=s3',
    'recall': f'400 320 {TO_16} --task=mqar:keys=2:words=8',
    'indirect': '640 16 3-4 3-8 --task=indirect_indexing:letters=8:shift=1',
    'distance': '640 82 8 8-12,14,16,20,24,32,48,64,80 --task=distance:span=8',
    'Python': '160 512 64 64,128,512 --task=stdlib --batch_size=16 --n_test=16',
}
ROWS = {name: f'--pe={name}' for name in (
    'nope ape learned rope yarn alibi t5 fire vrope vipe pope pope+vipe prism fox '
    'stickbreaking').split()}
ROWS |= {                           # shifts as far as the column is evaluated
    'shifted_ape': '--pe=shifted_ape --max_shift={tokens}',
    'rope_d80': '--pe=rope --d_model=80',                  # about as many parameters as prism
    'rope_half': '--pe=rope --rope_fraction=0.5',
    'mla': '--pe=rope --attention=mla'}


def flags_of(minutes, row, column):
    """The flags of a cell, except learning rate, seeds and folder."""
    steps, tokens, trained, evaluated, *flags = COLUMNS[column].split()
    steps = max(10, round(minutes * int(steps)))
    own = ROWS.get(row, f'--pe={row}').format(tokens=tokens).split()
    return [*SHAPE.split(), *flags, f'--train_lengths={trained}', f'--eval_lengths={evaluated}',
            *own, f'--max_steps={steps}', f'--eval_interval={steps}',
            f'--warmup_steps={max(1, steps // 10)}']


def find_cells(minutes, cells, *own):
    """A grid of the board's cells that have a record; of several the last one counts."""
    free = 'seeds', 'out_dir', 'n_test', 'lr', 'train_lengths'
    paths = ['results/board.jsonl', *(path for path in own if Path(ROOT, path).exists())]
    found = {key_of(run.options, free): run for runs in read_runs(*paths).values() for run in runs}
    grid = {}
    for row, column in cells:
        flags, _ = train.parse(train.Config, flags_of(minutes, row, column))
        if key_of(flags, free) in found:
            grid.setdefault((row,), {})[column] = [found[key_of(flags, free)]]
    return grid


def run_train(folder, *flags):
    """`python train.py FLAGS`; UserError if it fails unless by NaN."""
    command = [sys.executable, 'train.py', *flags, f'--out_dir={folder}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    says = (done.stderr.splitlines() or ['stopped'])[-1]
    train.need(not done.returncode or re.search('NaN|diverged', says), f'{folder}: {says}')


def validation(folder):
    """(-loss of a corpus, exact, token): means at the end of training; () if it diverged."""
    points = map(json.loads, Path(ROOT, folder, 'log.jsonl').read_text().splitlines())
    evals = [point['eval'].values() for point in points if 'eval' in point]
    metrics = [(-x.get('loss', 0), x['exact'], x['token']) for scores in evals[-1:] for x in scores]
    return tuple(map(statistics.mean, zip(*metrics)))


def run_cell(minutes, row, column, records):
    """Train a cell: the search for its learning rate, then the five seeds."""
    folder = f'out/board_{minutes:g}/{slug(column)}/{slug(row)}'
    flags = flags_of(minutes, row, column)
    run_train(f'{folder},search', *flags, '--seeds=5', '--n_test=1', f'--lr={RATES}',
              f'--eval_lengths={COLUMNS[column].split()[2]}')
    merits = {rate: validation(f'{folder},search/lr={float(rate)}') for rate in RATES.split(',')}
    best = max(merits, key=merits.get)                     # of equals the first in RATES
    run_train(folder, *flags, '--seeds=0-4', '--n_eval=1', f'--lr={best}', f'--results={records}')


@dataclass
class Options:
    """The flags of this program."""
    metric: Literal['exact', 'token', 'last'] = 'exact'    # what a table shows
    minutes: float = 1.0            # the board's dial: the time of RoPE's run in each column
    pe: str = ','.join(ROWS)        # rows of the board: these, or any encoding
    task: str = ','.join(COLUMNS)   # columns of the board
    records: str = 'out/board.jsonl'  # the file in which your own board's records are kept


def board(options):
    """The grid of the board, after training the cells that have no record."""
    cells = list(itertools.product(options.pe.split(','), options.task.split(',')))
    train.need(options.minutes > 0, '--minutes must be positive')
    for row, column in cells:
        check_name('task of the board', column, COLUMNS)
        check_name('encoding', row.split('+')[0], [*ROWS, *train.encodings.ENCODINGS])
    known = find_cells(options.minutes, cells, options.records)
    missing = [(row, column) for row, column in cells if column not in known.get((row,), {})]
    for row, column in tqdm(missing, unit='cell', disable=not missing):
        run_cell(options.minutes, row, column, options.records)
    return find_cells(options.minutes, cells, options.records)


def refreshed(text, sets):
    """A README file's text with its blocks <!-- SET --> .. <!-- end of SET --> written again."""
    def write(match):
        check_name('set', match[2], sets)
        return '\n'.join([match[1], *table(*grid_of(sets[match[2]])), match[3]])
    return re.sub(r'(<!-- (\w+) -->)\n.*?(<!-- end of \2 -->)', write, text, flags=re.DOTALL)


def main(argv):
    """The program."""
    if '--help' in argv:
        return train.print_help(__doc__, Options)
    flags, words = train.parse(Options, argv)
    options, sets, what = Options(**flags), read_runs(), ' '.join(words)
    if not what:
        for name, runs in sets.items():
            print(f'{name:22}{len(runs):4} runs; they differ in {", ".join(varying(runs))}')
        return
    if what == 'refresh':
        for path in (ROOT / 'README.md', ROOT / 'results/README.md'):
            train.write_file(str(path), refreshed(path.read_text(), sets))
        return
    if what == 'board':
        keys, grid = ['encoding'], board(options)
    else:
        check_name('set', what, sets)
        keys, grid = grid_of(sets[what])
    print('\n'.join(table(keys, grid, options.metric)))


if __name__ == '__main__':
    train.run_program(main, json.JSONDecodeError)
