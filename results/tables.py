"""Print the records in results/*.jsonl as text; train, print and draw the board.

    python results/tables.py                          list the sets of records
    python results/tables.py vipe_long                print a set: each run with all its seeds
                             --metric=last --length=20    another score, another length
    python results/tables.py board --minutes=1 --pe=rope,mine --task=parity,mqar    train, print
    cp results/board.jsonl out/board.jsonl            before `board`: train only missing cells
    python results/tables.py refresh                  rewrite the board in results/README.md

A record is one line of JSON about a run, which `train.py --results=FILE` appends:

    {"config": {"pe": "rope", "task": "parity", "seed": 1, "out_dir": "out/SET/seed=1"},
     "lengths": "1-16,20", "scores": {"exact": [1, ...], "token": [...], "last": [...]},
     "n": {"1": 2}, "failed": "the loss ...", "torch": ..., "commit": ..., "hardware": ...}

config has pe, task, seed, out_dir and the options that differ from train.Config's defaults (rewrite
the records if you change one), except train.NOT_RECORDED. scores has each metric (for a corpus also
loss) at each length, or nothing if the run diverged. n: the number of problems of a length, where
it is not n_test. trained_with: the trained options that --eval_only replaced. Older records have
"seeds": "0-2" (none: 0) and {seed: scores} of those that did not diverge; scores omits a metric
that is equal to exact. Records of probes ({"probe"}) and of speed ({"benchmark"}) are skipped.
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
from train import as_typed, check_name, parse_list, slug  # noqa: E402

DEFAULTS = {key: as_typed(value) if isinstance(value, list) else value
            for key, value in train.defaults(train.Config).items()} | {'trained_with': None}

# ---- records -> runs -----------------------------------------------------------------------------

@dataclass
class Run:
    """All seeds of one configuration."""
    options: dict                   # all options, defaults included
    trained: list                   # training lengths
    sizes: dict                     # {evaluated length: number of problems}
    seeds: dict                     # {seed: {metric: values, one for each length}; {}: diverged}
    hardware: str = ''              # on which the last of these seeds was trained

    @property
    def corpus(self):
        return any('loss' in scores for scores in self.seeds.values())

    @property
    def diverged(self):
        """The number of seeds that diverged."""
        return sum(not scores for scores in self.seeds.values())

    def scores(self, metric):
        """[{length: score} of each seed that has this metric]; for a corpus of losses."""
        key = 'loss' if self.corpus else metric
        return [dict(zip(self.sizes, x[key])) for _, x in sorted(self.seeds.items()) if key in x]

    def means(self, lengths, metric):
        """[mean over the problems of these lengths, for each seed]; for a corpus the perplexity."""
        sizes = {n: self.sizes[n] for n in lengths if n in self.sizes}
        total = sum(sizes.values()) or math.nan
        means = [sum(sizes[n] * x[n] for n in sizes) / total for x in self.scores(metric)]
        return [math.exp(x) for x in means] if self.corpus else means

    def reaches(self, metric):
        """[the longest length, for each seed, up to which every length with 50 or more problems has
        95 % (0: none)]; for a corpus 1 / 0.95 times the perplexity at the training length."""
        counted, reaches = [n for n, size in self.sizes.items() if self.corpus or size >= 50], []
        for scores in self.scores(metric):
            if self.corpus:
                start = scores.get(max(self.trained), math.nan)
                scores = {n: math.exp(start - loss) for n, loss in scores.items()}
            low = min((n for n in counted if not scores[n] >= 0.95), default=math.inf)
            reaches.append(max((n for n in counted if n < low), default=0))
        return reaches


def read_lines(path):
    """The JSON in each line of a file; [] if there is no such file."""
    path = Path(ROOT, path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(options, *free):
    """A string of all options, defaults included, except `free` ones and those not recorded."""
    return str([(key, as_typed(x)) for key, x in sorted({**DEFAULTS, **options}.items())
                if key not in {'out_dir', *free, *train.NOT_RECORDED}])


def read_runs(*paths):
    """{set: [Run]} of files, by default results/*.jsonl. The first folder below out/ names the set.
    One configuration is one Run, but other scores of the same seed begin another Run."""
    sets, latest, known = {}, {}, {}       # known: {(configuration, seed, scores): Run}
    for record in itertools.chain(*map(read_lines, paths or sorted(ROOT.glob('results/*.jsonl')))):
        if 'scores' not in record:                         # of a probe, or of speed
            continue
        config, scores = record['config'], record['scores']
        seed, older = config.pop('seed', None), config.pop('seeds', '0')
        seeds = {seed: scores}
        if seed is None:                                   # an older record
            seeds = {seed: scores.get(str(seed), {}) for seed in parse_list(older)}
            for x in filter(None, seeds.values()):         # it omits metrics that equal exact
                x |= {'token': x['exact'], 'last': x['exact']} | x
        options = {**DEFAULTS, **config, 'trained_with': record.get('trained_with')}
        name = re.sub('^(.*/)?out/', '', options['out_dir']).partition('/')[0]
        configuration = name, record['lengths'], key_of(options)
        for seed, scores in seeds.items():
            # a second test of the same run may add metrics
            main = [tuple(scores.get(x, ())) for x in ('exact', 'token', 'last', 'loss')]
            this = configuration, seed, *main
            run = known.get(this)
            if run is None:                                # not a repeated record
                run = latest.get(configuration)
                if run is None or seed in run.seeds:
                    sizes = dict.fromkeys(parse_list(record['lengths']), options['n_test'])
                    run = Run(options, parse_list(options['train_lengths']), sizes, {})
                    sets.setdefault(name, []).append(run)
                latest[configuration] = known[this] = run
            run.sizes |= {int(length): n for length, n in record.get('n', {}).items()}
            run.seeds[seed] = run.seeds.get(seed, {}) | scores
            run.hardware = record.get('hardware', '')
    return sets


# ---- a set of runs as text -----------------------------------------------------------------------

def varying(runs):
    """The options that differ between runs, except those that follow from earlier ones."""
    keys, groups = [], 1
    for key in dict.fromkeys(['task', 'pe', *(k for run in runs for k in run.options)]):
        values = {str([run.options.get(k) for k in [*keys, key]]) for run in runs}
        if key not in ('out_dir', 'n_test') and len(values) > groups:
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
        for lengths in run.trained, [length or twice]:
            cells.append(', '.join(f'{scale * x:.{digits}f}' for x in run.means(lengths, metric)))
        cells.append(', '.join(map(str, run.reaches(metric))))
        if run.diverged:
            cells.append(f'{run.diverged} diverged')
        yield ' | '.join(cells)


# ---- the board -----------------------------------------------------------------------------------
# How far does every encoding generalize on every task? In a cell, seeds 5 and 6 select one of three
# learning rates, by final validation scores at the training lengths; seeds 0 to 4 train at it. If
# the cell is not fitted(), all five train again with three times the steps, then with nine times.

SHAPE = '--d_model=64 --n_layer=2 --n_head=2 --batch_size=32 --n_eval=64 --n_test=256'
RATES = '1e-3,2e-3,4e-3'
TIMES = 1, 3, 9
TO_32, TO_64 = [10, 12, 14, 16, 20, 24, 32], [18, 20, 24, 28, 32, 40, 48, 64]
COLUMNS = {   # RoPE's steps per minute, training lengths, longer lengths, flags
    'parity': (4000, range(1, 17), TO_64, '--task=parity'),
    'polynomial': (3000, range(1, 9), TO_32, '--task=polynomial'),
    'string_reverse': (3000, range(1, 9), TO_32, '--task=string_reverse'),
    'flip_flop': (2400, range(2, 17), TO_64, '--task=flip_flop'),
    'mqar': (3000, range(4, 17), TO_64, '--task=mqar:keys=2:words=8'),
    'string_copy': (3000, range(1, 9), TO_32, '--task=string_copy'),
    'bucket_sort': (3000, range(1, 9), TO_32, '--task=bucket_sort'),
    'stdlib': (1600, [64], [80, 96, 128, 192, 256], '--task=stdlib --batch_size=16 --n_test=64')}
ROWS = {name: f'--pe={name}' for name in train.encodings.ENCODINGS}
ROWS['shifted_ape'] += ' --max_shift=256'                  # the longest evaluated length


def plan(minutes, row, column, times):
    """(training steps, folder, flags except learning rate and seed) of a cell."""
    speed, trained, longer, flags = COLUMNS[column]
    steps = times * max(10, round(minutes * speed))
    stages = [[0, (trained[0] + trained[-1]) // 2], [steps // 5, trained[-1]]]
    flags = f'{SHAPE} {flags} {ROWS.get(row, "--pe=" + row)} --max_steps={steps}'.split() + [
        f'--train_lengths={as_typed(trained)}', f'--eval_lengths={as_typed([*trained, *longer])}',
        f'--eval_interval={steps}', f'--warmup_steps={max(1, steps // 10)}',
        f'--length_schedule={stages}']
    return steps, f'out/board/{slug(column)}/{slug(row)},{steps}', flags


def fitted(run):
    """Whether at most one seed is below 95 % exact on the training lengths; True for a corpus."""
    fit = sum(mean >= 0.95 for mean in run.means(run.trained, 'exact'))
    return run.corpus or len(run.seeds) - fit <= 1


def find_cells(minutes, cells, records):
    """{(row, column): the recorded Run with the most steps}, for cells with records of 5 seeds."""
    found, every = {}, itertools.chain(*read_runs(records).values())
    runs = {key_of(run.options, 'n_test', 'lr'): run for run in every if len(run.seeds) == 5}
    for cell, times in itertools.product(cells, TIMES):
        _, _, flags = plan(minutes, *cell, times)
        key = key_of(train.parse(train.Config, flags)[0], 'n_test', 'lr')
        if key in runs:
            found[cell] = runs[key]
    return found


def run_train(folder, *flags):
    """Run `train.py FLAGS` from step 0. Raise UserError if it fails; a seed that diverged, which it
    reports after training the others, is no failure."""
    command = [sys.executable, 'train.py', *flags, f'--out_dir={folder}', '--overwrite']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    says = (done.stderr.splitlines() or ['stopped'])[-1]
    train.need(done.returncode == 0 or ' diverged: ' in says, f'{folder}: {says}')


def validation(folder):
    """[-loss of a corpus, exact, token]: means over the lengths of a run's last evaluation; [] if
    there is none, because it diverged."""
    lines = [line for line in read_lines(f'{folder}/log.jsonl') if 'eval' in line]
    scores = lines[-1]['eval'].values() if lines else []
    metrics = [(-x.get('loss', 0), x['exact'], x['token']) for x in scores]
    return [statistics.mean(values) for values in zip(*metrics)]


def best_rate(minutes, row, column):
    """The learning rate of RATES with the best validation scores, means over seeds 5 and 6. It is
    one at which neither diverged, if there is one."""
    (_, folder, flags), merits = plan(minutes, row, column, 1), {}
    run_train(f'{folder}_lr', *flags, '--seed=5,6', '--n_test=1', f'--lr={RATES}',
              f'--eval_lengths={as_typed(COLUMNS[column][1])}')
    for rate in RATES.split(','):
        seeds = [validation(f'{folder}_lr/seed={seed},lr={float(rate)}') for seed in (5, 6)]
        merits[rate] = [statistics.mean(scores) for scores in zip(*seeds)]     # [] if one is []
    return max(merits, key=merits.get)                     # the first if several are equal


@dataclass
class Options:
    """The flags of this program."""
    # the score in the table of a set; states and final are not in older records
    metric: Literal['exact', 'token', 'last', 'states', 'final', 'greedy_states',
                    'greedy_final'] = 'exact'
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
    runs = find_cells(options.minutes, cells, options.records)
    if runs:
        print(f'{options.records} is reused: delete it if a class or a default has changed',
              file=sys.stderr)
    missing = len(cells) - len(runs)                       # each tunes with six models, trains five
    print(f'{missing} cells to train, about {missing * 11 * options.minutes:.0f} minutes on a '
          'core; cells that do not fit take longer', file=sys.stderr)
    for cell in tqdm(cells, unit='cell'):
        for times in TIMES:
            steps, folder, flags = plan(options.minutes, *cell, times)
            run = runs.get(cell)
            if not run or not fitted(run) and run.options['max_steps'] < steps:
                rate = run.options['lr'] if run else best_rate(options.minutes, *cell)
                run_train(folder, *flags, '--seed=0-4', '--n_eval=1', f'--lr={rate}',
                          f'--results={options.records}')
                runs |= find_cells(options.minutes, [cell], options.records)
    return {cell: runs[cell] for cell in cells if cell in runs}


def board_cell(run, further):
    """The text of a cell of the board, with the tokens correct at length `further`."""
    if run is None or run.diverged == len(run.seeds):
        return 'diverged' if run else ''
    longest = max(run.trained)
    if run.corpus:
        values = [run.means([n * longest], 'loss') for n in (1, 2, 4)]
        return ', '.join(f'{statistics.mean(x):.3g} ({min(x):.3g} to {max(x):.3g})' for x in values)
    reaches = [n / longest for n in run.reaches('exact')] + [0] * run.diverged
    middle, least, most = (f'{f(reaches):.3g}' for f in (statistics.median, min, max))
    spread = f' ({least} to {most})' if least != most else ''
    tokens = statistics.mean(run.means([further], 'token'))
    text = f'{middle}{spread}; {100 * tokens:.0f} %'
    return text if fitted(run) else f'*{text}*'


def board_table(runs):
    """Yield the lines of a Markdown table of {(row, column): Run}."""
    rows = list(dict.fromkeys(row for row, _ in runs))
    columns = list(dict.fromkeys(column for _, column in runs))
    own = set(rows) - {record['config']['pe'] for record in read_lines('results/board.jsonl')}
    hardware = [run.hardware for run in runs.values()]
    usual = statistics.mode(hardware) if hardware else ''
    others = ', '.join(sorted({*hardware} - {usual}))
    unfitted = sum(not fitted(run) for run in runs.values())
    yield ('Each cell: the longest length up to which all are at least 95 % exact, relative to the '
           'longest training length (4 is the longest tested; median of five seeds, least to most '
           'if they differ); mean of tokens correct at 1.5 times that length. '
           f'*Italic* ({unfitted} of {len(runs)} cells): two seeds or more have not fitted the '
           'training lengths (in the header). stdlib: mean perplexity at 1, 2 and 4 times the '
           'training length (least to most). Floor: tokens correct by a constant answer; in mqar, '
           'by the latest value not yet recalled.'
           + (' **Bold**: not in results/board.jsonl.' if own else '')
           + (f' †: trained on {others}, others on {usual}.' if others else '') + '\n')
    heads = [f'{column} ({as_typed(COLUMNS[column][1])})' for column in columns]
    # at 1.5 times the training length, or at the next evaluated length
    later = [min(n for n in COLUMNS[column][2] if n >= 1.5 * COLUMNS[column][1][-1])
             for column in columns]
    lines = [['encoding', *heads], ['---'] * (1 + len(columns))]
    for row in rows:
        cells = [runs.get((row, column)) for column in columns]
        lines.append([f'**{row}**' if row in own else row])
        lines[-1] += [board_cell(run, n) + ('†' if run and run.hardware != usual else '')
                      for run, n in zip(cells, later)]
    floors = ['' if column == 'stdlib' else f'{100 * floor(column, n, "token"):.0f} %'
              for column, n in zip(columns, later)]
    lines += [['floor', *floors]] if any(floors) else []
    yield from (f'| {" | ".join(cells)} |' for cells in lines)


# README's headline figure. {column of the board: (metric, title, the least score at the largest
# length for which a curve has a label)} of its panels; colors by Okabe and Ito
PANELS = {'parity': ('exact', 'parity: answers correct', 0.1),
          'polynomial': ('last', 'polynomial: last states correct', 0.5),
          'string_reverse': ('exact', 'reverse: answers correct', 0.1),
          'flip_flop': ('exact', 'flip-flop: answers correct', 0.6),
          'mqar': ('exact', 'recall: answers correct', 0.6),
          'stdlib': ('loss', 'text: relative perplexity (lower: better)', 1.2)}
COLORS = dict(nope='#999999', rope='#D55E00', alibi='#56B4E9', t5='#F0E442', fox='#009E73',
              stickbreaking='#000000', pope='#CC79A7', vipe='#0072B2', prism='#E69F00')


def floor(column, length, metric):
    """The score at a length of a model whose every answer is the most frequent token. In mqar it
    answers with the latest value not yet recalled: the second answer is always correct, the first
    unless the two keys' pairs cross (probability 1/3) and have other values (7/8)."""
    if column == 'mqar':
        first = 2 / 3 + 1 / 3 / 8
        return {'exact': first, 'token': (first + 1) / 2}[metric]
    task = train.tasks.make(COLUMNS[column][3].removeprefix('--task='))
    tokens, targets = task.sample(2000, length, torch.Generator().manual_seed(0))  # (2000, T) each
    asked = (targets != -100) & (targets != task.end)      # answers without the end token
    logits = torch.eye(len(task.vocab))[targets[asked].mode().values]      # (V,)
    model = torch.nn.Module()
    model.forward = lambda x: (logits.expand(*x.shape, -1), None)
    return train.evaluate(model, task, [(length, (tokens, targets))])[length][metric]


def draw(runs, path):
    """Draw and return the headline figure: mean scores by length. The fitted curves that end high
    have a label, and a band from the worst to the best seed."""
    train.need(importlib.util.find_spec('matplotlib'), '--figure requires: pip install matplotlib')
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5.6), layout='constrained')
    colors = COLORS | {row: 'brown' for row, _ in runs if row not in COLORS}     # one's own
    for axis, (column, (metric, title, high)) in zip(axes.flat, PANELS.items()):
        _, trained, longer, _ = COLUMNS[column]
        x, labels = np.array([*trained, *longer]) / max(trained), {}
        axis.set_title(title, fontsize=9)
        axis.set(xlim=(0, 4), ylim=(0.8, 3) if metric == 'loss' else (-0.03, 1.12))
        axis.axvline(1, color='black', linestyle='--', linewidth=0.8)
        if metric != 'loss':
            y = [floor(column, n, metric) for n in (*trained, *longer)]
            axis.plot(x, y, 'k-.', linewidth=0.6)
        for row in [row for row in colors if (row, column) in runs]:
            run, color = runs[row, column], colors[row]
            y = np.array([[*x.values()] for x in run.scores(metric)])      # [seeds, lengths]
            if metric == 'loss':                           # perplexity, relative to the first
                y = np.exp(y - y[:, :1])
            mean, style = y.mean(axis=0), '-' if fitted(run) else ':'
            axis.plot(x, mean, style, color=color, linewidth=1.8, label=row)
            if fitted(run) and mean[-1] > high:
                axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=color, alpha=0.12)
                labels.setdefault(round(5 * mean[-1]), [mean[-1]]).append(row)
        for height, *rows in labels.values():              # curves of about this height
            axis.annotate('\n'.join(rows), (4, height), (3, 0), textcoords='offset points',
                          fontsize=8, va='center')
    looks = {row: dict(color=color, linewidth=3) for row, color in colors.items()}
    looks |= {'training lengths not fitted': dict(color='black', linestyle=':'),
              'floor': dict(color='black', linestyle='-.', linewidth=0.6)}
    handles = [pyplot.Line2D([], [], **look) for look in looks.values()]
    figure.legend(handles, looks, loc='outside upper center', ncols=6, fontsize=8)
    figure.supxlabel('length / longest training length', fontsize=9)
    figure.savefig(path, dpi=100)
    return figure


def refreshed(text):
    """The text of results/README.md with <!-- board --> .. <!-- end of board --> regenerated."""
    runs = find_cells(Options.minutes, itertools.product(ROWS, COLUMNS), 'results/board.jsonl')
    table = '\n'.join(board_table(runs))
    return re.sub('(?s)(?<=<!-- board -->\n).*(?=\n<!-- end)', lambda _: table, text)


def main(argv):
    """List the sets of records, print one, train and print the board, or refresh the page."""
    if {'-h', '--help'} & set(argv):
        return train.print_help(__doc__, Options)
    flags, words = train.parse(Options, argv)
    options, sets, what = Options(**flags), read_runs(), ' '.join(words)
    if not what:
        for name, runs in sets.items():
            print(f'{name:22}{len(runs):4} runs; they differ in {", ".join(varying(runs))}')
    elif what == 'refresh':
        train.write_file(str(PAGE), refreshed(PAGE.read_text()))
    elif what == 'board':
        runs = board(options)
        if options.figure:
            draw(runs, options.figure)
        print('\n'.join(board_table(runs)))
    else:
        train.need(what in sets, f'unknown set {what!r}; python results/tables.py lists them')
        if removed := {key for run in sets[what] for key in run.options} - DEFAULTS.keys():
            print('options that have been removed: ' + ', '.join(sorted(removed)))
        print('\n'.join(listing(sets[what], options.metric, options.length)))


if __name__ == '__main__':
    train.run_program(main, json.JSONDecodeError)
