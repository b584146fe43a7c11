"""Print the records in results/*.jsonl as text; train, print and draw the board.

    python results/tables.py                          list the sets of records
    python results/tables.py vipe_long                print a set: each run with all its seeds
                             --metric=last --length=20    another score, another length
    python results/tables.py board --minutes=1 --pe=rope,mine --task=parity,mqar    train, print
    cp results/board.jsonl out/board.jsonl            before `board`: train only missing cells
    python results/tables.py refresh                  rewrite the board in results/README.md

A record is one line of JSON about a run, which `train.py --results=FILE` appends:

    {"config": {"pe": "rope", "task": "parity", "lr": 0.002, "seeds": "0-2",
                "out_dir": "out/parity/rope"},
     "lengths": "1-16,20", "scores": {"0": {"exact": [1, ...], "token": [...], "last": [...]}},
     "n": {"1": 2}, "failed": ["seed 1: ..."], "torch": ..., "commit": ..., "hardware": ...}

config has pe, task, out_dir and the options that differ from train.Config's defaults (rewrite the
records if you change one), except train.NOT_RECORDED. The first folder below out/ names the set.
scores has, for each seed that did not diverge, each metric (for a corpus also loss) at each length;
a metric equal to exact is omitted. n: the number of problems of a length, where it is not n_test.
Records of probes ({"probe", ...}) and speed ({"benchmark", ...}) are skipped.
"""
import importlib.util
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

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / 'results/README.md'
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from train import check_name, parse_list, slug  # noqa: E402

DEFAULTS = {key: train.as_typed(value) if isinstance(value, list) else value
            for key, value in train.defaults(train.Config).items()}

# ---- records -> runs -----------------------------------------------------------------------------

@dataclass
class Run:
    """All seeds of one configuration."""
    options: dict                   # all options, defaults included
    trained: list                   # training lengths
    sizes: dict                     # {evaluated length: number of problems}
    scores: dict                    # {seed: {metric: values, one for each evaluated length}}
    failed: set                     # seeds that diverged
    hardware: str = ''              # on which the last of these seeds was trained

    @property
    def corpus(self):
        return any('loss' in scores for scores in self.scores.values())

    def by_length(self, seed, metric):
        """{length: score} of a seed; for a corpus the score is the loss."""
        scores = self.scores[seed]
        return dict(zip(self.sizes, scores.get('loss') or scores.get(metric, scores['exact'])))

    def mean(self, seed, lengths, metric):
        """Mean score over the problems of these lengths; for a corpus the perplexity."""
        scores = self.by_length(seed, metric)
        there = [n for n in lengths if n in scores]
        total = sum(self.sizes[n] for n in there) or math.nan
        mean = sum(self.sizes[n] * scores[n] for n in there) / total
        return math.exp(mean) if self.corpus else mean

    def reach(self, seed, metric):
        """The longest length up to which every length with 50 or more problems scores at least 95 %
        (0: none). For a corpus: perplexity at most 1 / 0.95 times that at the training length."""
        scores = self.by_length(seed, metric)
        if self.corpus:
            start = scores.get(max(self.trained), math.nan)
            scores = {n: math.exp(start - loss) for n, loss in scores.items()}
        counted = [n for n in scores if self.corpus or self.sizes[n] >= 50]
        return max(itertools.takewhile(lambda n: scores[n] >= 0.95, counted), default=0)


def key_of(config, free):
    """A string of all options, defaults included, except those in `free` and those not recorded."""
    return str([(key, train.as_typed(x)) for key, x in sorted({**DEFAULTS, **config}.items())
                if key not in free and key not in train.NOT_RECORDED])


def read_runs(*paths):
    """{set: [Run]} of files, by default results/*.jsonl; one configuration is one Run."""
    sets, known = {}, {}
    for path in paths or sorted(ROOT.glob('results/*.jsonl')):
        for line in Path(ROOT, path).read_text().splitlines():
            record = json.loads(line)
            if 'scores' not in record:                     # of a probe, or of speed
                continue
            options = {**DEFAULTS, **record['config']}
            name = re.sub('^(.*/)?out/', '', options['out_dir']).partition('/')[0]
            key = name, record['lengths'], key_of(options, ('seeds', 'out_dir'))
            seeds, n = set(parse_list(options['seeds'])), record.get('n', {})
            if key not in known or seeds & {*known[key].scores, *known[key].failed}:
                lengths = parse_list(record['lengths'])
                sizes = {length: n.get(str(length), options['n_test']) for length in lengths}
                known[key] = Run(options, parse_list(options['train_lengths']), sizes, {}, set())
                sets.setdefault(name, []).append(known[key])
            scores = {int(seed): scores for seed, scores in record['scores'].items()}
            known[key].scores = dict(sorted((known[key].scores | scores).items()))
            known[key].failed |= seeds - scores.keys()
            known[key].hardware = record.get('hardware', '')
    return sets


# ---- a set of runs as text -----------------------------------------------------------------------

def varying(runs):
    """The options that differ between runs, except those that follow from earlier ones."""
    keys, groups = [], 1
    for key in dict.fromkeys(['task', 'pe', *(k for run in runs for k in run.options)]):
        values = {str([run.options.get(k) for k in [*keys, key]]) for run in runs}
        if key not in ('seeds', 'out_dir', 'n_test') and len(values) > groups:
            keys, groups = [*keys, key], len(values)
    return keys


def listing(runs, metric='exact', length=0):
    """Yield a header, then a line of text for each run, with a number for each seed."""
    keys = varying(runs)
    yield ' | '.join([*keys, f'{metric} on training lengths (percent; for text: perplexity)',
                      f'at {length or "twice the longest"}', 'max length with at least 95 %'])
    for run in runs:
        longest = max(run.trained)
        # SCAN lacks some lengths: take the longest that is at most twice the training length
        twice = max((n for n in run.sizes if longest < n <= 2 * longest), default=0)
        scale, digits = (1, 2) if run.corpus else (100, 1)
        cells = [str(run.options.get(key, '-')) for key in keys]
        cells += [', '.join(f'{scale * run.mean(seed, lengths, metric):.{digits}f}' for seed
                            in run.scores) for lengths in (run.trained, [length or twice])]
        cells.append(', '.join(str(run.reach(seed, metric)) for seed in run.scores))
        yield ' | '.join(cells + [f'{len(run.failed)} diverged'] * bool(run.failed))


# ---- the board -----------------------------------------------------------------------------------
# How far does every encoding generalize on every task? In a cell, seeds 5 and 6 select one of three
# learning rates, by final validation scores at the training lengths; seeds 0 to 4 train at this
# rate. If two or more of these are below 95 % exact on the training lengths, all five train again
# with three times the steps, and if necessary with nine times.

SHAPE = '--d_model=64 --n_layer=2 --n_head=2 --batch_size=32 --n_eval=64 --n_test=256'
RATES = '1e-3,2e-3,4e-3'
TIMES = 1, 3, 9
TO_32, TO_64 = '10,12,14,16,20,24,32', '18,20,24,28,32,40,48,64'
COLUMNS = {   # RoPE's steps per minute, training lengths, evaluated lengths, flags
    'parity': f'4000 1-16 1-16,{TO_64} --task=parity',
    'polynomial': f'3000 1-8 1-8,{TO_32} --task=polynomial',
    'string_reverse': f'3000 1-8 1-8,{TO_32} --task=string_reverse',
    'flip_flop': f'2400 2-16 2-16,{TO_64} --task=flip_flop',
    'mqar': f'3000 4-16 4-16,{TO_64} --task=mqar:keys=2:words=8',
    'string_copy': f'3000 1-8 1-8,{TO_32} --task=string_copy',
    'bucket_sort': f'3000 1-8 1-8,{TO_32} --task=bucket_sort',
    'stdlib': '1600 64 64,80,96,128,192,256 --task=stdlib --batch_size=16 --n_test=64'}
ROWS = {name: f'--pe={name}' for name in train.encodings.ENCODINGS}
ROWS['shifted_ape'] += ' --max_shift=256'                  # the longest evaluated length


def flags_of(steps, row, column):
    """The flags of a cell trained for `steps`, except learning rate, seeds and folder."""
    _, trained, evaluated, *flags = COLUMNS[column].split()
    first, last = (int(n) for n in (trained.split('-') * 2)[:2])
    return [*SHAPE.split(), *flags, f'--train_lengths={trained}', f'--eval_lengths={evaluated}',
            *ROWS.get(row, f'--pe={row}').split(), f'--max_steps={steps}',
            f'--eval_interval={steps}', f'--warmup_steps={max(1, steps // 10)}',
            f'--length_schedule=[[0,{(first + last) // 2}],[{steps // 5},{last}]]']


def steps_of(minutes, column, times):
    """The number of training steps of a cell."""
    return times * max(10, round(minutes * int(COLUMNS[column].split()[0])))


def fitted(run):
    """Whether at most one seed is below 95 % exact on the training lengths; True for a corpus."""
    scores = [run.mean(seed, run.trained, 'exact') for seed in run.scores] + [0] * len(run.failed)
    return run.corpus or sum(score < 0.95 for score in scores) <= 1


def find_cells(minutes, cells, records):
    """{(row, column): the recorded Run with the most steps}, for cells that have a record."""
    free = 'seeds', 'out_dir', 'n_test', 'lr'
    runs = itertools.chain(*read_runs(p).values()) if (p := Path(ROOT, records)).exists() else ()
    known, found = {key_of(run.options, free): run for run in runs}, {}
    for (row, column), times in itertools.product(cells, TIMES):
        flags = flags_of(steps_of(minutes, column, times), row, column)
        key = key_of(train.parse(train.Config, flags)[0], free)
        if key in known:
            found[row, column] = known[key]
    return found


def run_train(folder, *flags):
    """Run `train.py FLAGS` from step 0; raise UserError if it fails, unless a seed diverged."""
    command = [sys.executable, 'train.py', *flags, f'--out_dir={folder}', '--overwrite']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    says = (done.stderr.splitlines() or ['stopped'])[-1]
    train.need(not done.returncode or re.search('NaN|diverged', says), f'{folder}: {says}')


def validation(folder):
    """(-loss of a corpus, exact, token): means over both tuning seeds; () if one diverged."""
    points = map(json.loads, Path(ROOT, folder, 'log.jsonl').read_text().splitlines())
    evals = [point['eval'].values() for point in points if 'eval' in point]        # by seed
    metrics = [(-x.get('loss', 0), x['exact'], x['token']) for x in itertools.chain(*evals)]
    return tuple(map(statistics.mean, zip(*metrics))) if len(evals) == 2 else ()


def best_rate(minutes, row, column):
    """The learning rate of RATES with the best validation scores of seeds 5 and 6."""
    steps = steps_of(minutes, column, 1)
    folder = f'out/board/{slug(column)}/{slug(row)},{steps}_lr'
    run_train(folder, *flags_of(steps, row, column), '--seeds=5,6', '--n_test=1', f'--lr={RATES}',
              f'--eval_lengths={COLUMNS[column].split()[1]}')
    merits = {rate: validation(f'{folder}/lr={float(rate)}') for rate in RATES.split(',')}
    return max(merits, key=merits.get)                     # the first if several are equal


@dataclass
class Options:
    """The flags of this program."""
    metric: Literal['exact', 'token', 'last'] = 'exact'    # the score in the table of a set
    length: int = 0                 # a length in the table of a set; 0: twice the longest trained
    minutes: float = 0.5            # board: training minutes of one RoPE model
    pe: str = ','.join(ROWS)        # rows of the board: these, or any encoding
    task: str = ','.join(COLUMNS)   # columns of the board
    records: str = 'out/board.jsonl'  # trained cells: delete it if a class or a default changes
    figure: str = ''                # file to which the board's curves are drawn


def board(options):
    """Train the cells that have no record; return {(row, column): Run} of the board."""
    cells = [(row, column) for column in options.task.split(',') for row in options.pe.split(',')]
    train.need(options.minutes > 0, '--minutes must be positive')
    for row, column in cells:
        check_name('task of the board', column, COLUMNS)
        check_name('encoding', row.split('+')[0], ROWS)
    for times in TIMES:                                    # 1: all cells; 3, 9: unfitted cells
        runs = find_cells(options.minutes, cells, options.records)
        if runs and times == 1:
            print(f'{options.records} is reused: delete it if a class or a default has changed',
                  file=sys.stderr)
        todo = [cell for cell in cells if cell not in runs or not fitted(runs[cell]) and runs[cell]
                .options['max_steps'] < steps_of(options.minutes, cell[1], times)]
        models = 6 + 5 if times == 1 else 5                # tuning trains six
        if todo:
            minutes = len(todo) * models * times * options.minutes
            print(f'{len(todo)} cells to train, about {minutes:.0f} minutes on a core',
                  file=sys.stderr)
        for row, column in tqdm(todo, f'{times} x steps', unit='cell', disable=not todo):
            known = runs.get((row, column))                # its learning rate is used again
            rate = known.options['lr'] if known else best_rate(options.minutes, row, column)
            steps = steps_of(options.minutes, column, times)
            run_train(f'out/board/{slug(column)}/{slug(row)},{steps}',
                      *flags_of(steps, row, column), '--seeds=0-4', '--n_eval=1', f'--lr={rate}',
                      f'--results={options.records}')
    return find_cells(options.minutes, cells, options.records)


def board_table(runs):
    """Yield the lines of a Markdown table of {(row, column): Run}."""
    rows, columns = ([*dict.fromkeys(names)] for names in (*zip(*runs), (), ())[:2])
    unfitted = sum(not fitted(run) for run in runs.values())
    published = Path(ROOT, 'results/board.jsonl').read_text()
    own = [row for row in rows if f'"pe":"{row}"' not in published]
    usual = statistics.mode([run.hardware for run in runs.values()] or [''])
    others = ', '.join(sorted({run.hardware for run in runs.values()} - {usual}))
    yield ('Each cell: the longest length up to which all are at least 95 % exact, relative to the '
           'longest training length (at most 4, the longest tested; median of five seeds, least to '
           'most if they differ); mean of tokens correct at 1.5 times the training length. '
           f'*Italic* ({unfitted} of {len(runs)} cells): two seeds or more have not fitted the '
           'training lengths (in the header). stdlib: mean perplexity at 1, 2 and 4 times the '
           'training context (least to most). Floor: tokens correct by a constant answer; in mqar, '
           'by the latest value not yet recalled.'
           + ' **Bold**: not in results/board.jsonl.' * bool(own)
           + f' †: trained on {others}, others on {usual}.' * bool(others) + '\n')
    heads = (f'{column} ({COLUMNS[column].split()[1]})' for column in columns)
    yield '| ' + ' | '.join(['encoding', *heads]) + ' |'
    yield '|---' * len(['', *columns]) + '|'
    for row in rows:
        there = [runs.get((row, column)) for column in columns]
        cells = [board_cell(run) + '†' * (run is not None and run.hardware != usual)
                 for run in there]
        yield '| ' + ' | '.join([f'**{row}**' if row in own else row, *cells]) + ' |'
    floors = ['' if column == 'stdlib' else floor_cell(column) for column in columns]
    if any(floors):
        yield '| ' + ' | '.join(['floor', *floors]) + ' |'


def floor_cell(column):
    """The floor of tokens correct at 1.5 times the training length, as text."""
    trained, lengths = map(parse_list, COLUMNS[column].split()[1:3])
    score, = floor(column, [further(trained, lengths)], 'token')
    return f'{100 * score:.0f} %'


def further(trained, lengths):
    """The shortest of `lengths` that is at least 1.5 times the longest training length."""
    return min(n for n in lengths if n >= 1.5 * max(trained))


def board_cell(run):
    """The text of a cell of the board."""
    if run is None or not run.scores:
        return 'diverged' if run else ''
    longest = max(run.trained)
    if run.corpus:
        values = [[run.mean(seed, [n * longest], 'loss') for seed in run.scores] for n in (1, 2, 4)]
        return ', '.join(f'{statistics.mean(x):.3g} ({min(x):.3g} to {max(x):.3g})' for x in values)
    reach = [run.reach(seed, 'exact') / longest for seed in run.scores] + [0] * len(run.failed)
    middle, least, most = (f'{f(reach):.3g}' for f in (statistics.median, min, max))
    size = further(run.trained, run.sizes)
    tokens = statistics.mean(run.mean(seed, [size], 'token') for seed in run.scores)
    text = middle + f' ({least} to {most})' * (least != most) + f'; {100 * tokens:.0f} %'
    return text if fitted(run) else f'*{text}*'


# README's headline figure: {column of the board: metric} of its panels; colors by Okabe and Ito
PANELS = dict(parity='exact', polynomial='last', string_reverse='exact', flip_flop='exact',
              mqar='exact', stdlib='loss')
NAMES = dict(string_reverse='reverse', flip_flop='flip-flop', mqar='recall', stdlib='text')
TITLES = dict(exact='answers correct', last='last states correct',
              loss='relative perplexity (lower: better)')
COLORS = dict(nope='#999999', rope='#D55E00', alibi='#56B4E9', t5='#F0E442', fox='#009E73',
              stickbreaking='#000000', pope='#CC79A7', vipe='#0072B2', prism='#E69F00')


def floor(column, lengths, metric):
    """Yield, at these lengths, the score of a model whose every answer is the most frequent token.
    In mqar it answers with the latest value not yet recalled: the second answer is always correct,
    the first unless the two keys' pairs cross (probability 1/3) and have other values (7/8)."""
    if column == 'mqar':
        first = 2 / 3 + 1 / 3 / 8
        yield from [{'exact': first, 'token': (first + 1) / 2}[metric]] * len(lengths)
        return
    task = train.tasks.make(COLUMNS[column].split()[3].removeprefix('--task='))
    model = torch.nn.Module()
    for length in lengths:
        tokens, targets = task.sample(2000, length, torch.Generator().manual_seed(0))  # (2000, T)
        asked = (targets != -100) & (targets != task.end)      # answers without the end token
        logits = torch.eye(len(task.vocab))[targets[asked].mode().values]      # (V,)
        model.forward = lambda x, logits=logits: (logits.expand(*x.shape, -1), None)
        yield train.evaluate(model, task, [(length, (tokens, targets))])[length][metric]


def draw(runs, path):
    """Draw the headline figure: mean scores by length; a band from the worst to the best seed."""
    train.need(importlib.util.find_spec('matplotlib'), '--figure requires: pip install matplotlib')
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, 3, figsize=(9, 5.6), layout='constrained')
    colors = COLORS | {row: 'brown' for row, _ in runs if row not in COLORS}     # one's own
    for axis, (column, metric) in zip(axes.flat, PANELS.items()):
        axis.set_title(f'{NAMES.get(column, column)}: {TITLES[metric]}', fontsize=9)
        axis.axvline(1, color='black', linestyle='--', linewidth=0.8)
        axis.set(xlim=(0, 4), ylim=(-0.03, 1.12))
        lengths, longest = map(parse_list, COLUMNS[column].split()[2:0:-1])
        x, means, bands = np.array(lengths) / max(longest), {}, {}
        at = 4 if column in ('flip_flop', 'stdlib') else 1.5     # x of the labels
        k = list(x).index(at)
        for row in [row for row in colors if (row, column) in runs]:
            run = runs[row, column]
            y = np.array([[*run.by_length(seed, metric).values()] for seed in run.scores])
            if run.corpus:                                 # ratio to that at the training length
                y = np.exp(y - y[:, :1])
                axis.set(ylim=(0.8, 3))
            axis.plot(x, y.mean(axis=0), '-' if fitted(run) else ':', color=colors[row], lw=1.8)
            means[row], bands[row] = fitted(run) * y.mean(axis=0)[k], (y.min(0), y.max(0))
        labels = {}           # {height: [row]} of fitted curves far above the median (others: 0)
        for row, height in means.items():
            if height - np.median([*means.values()]) > 0.2:
                labels.setdefault(round(5 * height), []).append(row)
                axis.fill_between(x, *bands[row], color=colors[row], alpha=0.12)
        place = dict(xytext=(-3, 7), ha='right') if at == 4 else dict(xytext=(1, 3))
        for rows in labels.values():                       # curves of equal height share a label
            axis.annotate(', '.join(rows), (x[k], means[rows[0]]), textcoords='offset points',
                          fontsize=8, **place)
        if column != 'stdlib':
            axis.plot(x, [*floor(column, lengths, metric)], 'k-.', linewidth=0.6)
    figure.supxlabel('length / longest training length', fontsize=9)
    looks = {row: dict(color=color, linewidth=3) for row, color in colors.items()}
    looks |= {'training lengths not fitted': dict(color='black', linestyle=':'),
              'floor': dict(color='black', linestyle='-.', linewidth=0.6)}
    handles = [pyplot.Line2D([], [], **look) for look in looks.values()]
    figure.legend(handles, looks, loc='outside upper center', ncols=6, fontsize=8)
    figure.savefig(path, dpi=100)


def refreshed(text):
    """The text of results/README.md with <!-- board --> .. <!-- end of board --> regenerated."""
    runs = find_cells(Options.minutes, itertools.product(ROWS, COLUMNS), 'results/board.jsonl')
    begin, end = '<!-- board -->', '<!-- end of board -->'
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return before + '\n'.join([begin, *board_table(runs), end]) + after


def main(argv):
    """List the sets of records, print one, train and print the board, or refresh the page."""
    if {'-h', '--help'} & set(argv):
        return train.print_help(__doc__, Options)
    flags, words = train.parse(Options, argv)
    options, sets, what = Options(**flags), read_runs(), ' '.join(words)
    if not what:
        for name, runs in sets.items():
            print(f'{name:22}{len(runs):4} runs; they differ in {", ".join(varying(runs))}')
        return
    if what == 'refresh':
        return train.write_file(str(PAGE), refreshed(PAGE.read_text()))
    if what == 'board':
        runs = board(options)
        if options.figure:
            draw(runs, options.figure)
        return print('\n'.join(board_table(runs)))
    train.need(what in sets, f'unknown set {what!r}; python results/tables.py lists them')
    if removed := {key for run in sets[what] for key in run.options} - DEFAULTS.keys():
        print('options that have been removed: ' + ', '.join(sorted(removed)))
    print('\n'.join(listing(sets[what], options.metric, options.length)))


if __name__ == '__main__':
    train.run_program(main, json.JSONDecodeError)
