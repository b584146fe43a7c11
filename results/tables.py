"""Print the records in results/*.jsonl as text; train, print and draw the board.

    python results/tables.py                          list the sets of records
    python results/tables.py vipe_long --metric=last --length=20    print each run of a set
    python results/tables.py board --minutes=1 --pe=rope,mine --task=parity,mqar    train, print
    cp results/board.jsonl out/board.jsonl            before `board`: train only missing cells
    python results/tables.py refresh                  rewrite the board in results/README.md

A record is the line of JSON that `train.py --results=FILE` appends about a run:

    {"config": {"pe": "rope", "task": "parity", "seed": 1, "out_dir": "out/SET/seed=1"}, "n": ...,
     "lengths": "1-16,20", "scores": {"exact": [1, ...], "token": [...], "last": [...]}, ...}

config has pe, task, seed, out_dir and the options that differ from train.Config's defaults, except
train.NOT_RECORDED. scores is {} if the run diverged; n is {length: problems} where not n_test;
trained_with has the options that --eval_only replaced. Older records have several "seeds" (if
absent: 0) and {seed: scores}, without metrics equal to exact. Records of probes have no scores.
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

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / 'results/README.md'
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from train import UserError, as_typed, check_name, need, parse_list  # noqa: E402

DEFAULTS = {key: as_typed(value) if isinstance(value, list) else value
            for key, value in train.defaults(train.Config).items()} | {'trained_with': None}

# ---- records -> runs -----------------------------------------------------------------------------

@dataclass
class Run:
    """All seeds of one configuration."""
    key: str                        # of the configuration
    options: dict                   # all options, defaults included
    trained: list                   # training lengths
    sizes: dict                     # {evaluated length: number of problems}
    seeds: dict                     # {seed: {metric: values, one for each length}; {}: diverged}
    corpus: bool = False

    def scores(self, metric):
        """[{length: score} of each seed that did not diverge]; for a corpus of losses."""
        key = 'loss' if self.corpus else metric
        return [dict(zip(self.sizes, x[key])) for _, x in sorted(self.seeds.items()) if key in x]

    def means(self, lengths, metric):
        """[mean over the problems of these lengths, for each seed]; for a corpus the perplexity."""
        sizes = {n: self.sizes[n] for n in lengths if n in self.sizes}
        total = sum(sizes.values()) or math.nan
        means = [sum(sizes[n] * x[n] for n in sizes) / total for x in self.scores(metric)]
        return [math.exp(x) for x in means] if self.corpus else means

    def reaches(self, metric):
        """[length up to which every length with 50 or more problems has 95 %, for each seed; 0:
        none]; for a corpus at most 1 / 0.95 times the perplexity at the training length."""
        reaches = []
        for scores in self.scores(metric):
            start = scores.get(max(self.trained), math.nan)
            parts = [(n, math.exp(start - x) if self.corpus else x) for n, x in scores.items()
                     if self.corpus or self.sizes[n] >= 50]
            fit = itertools.takewhile(lambda part: part[1] >= 0.95, parts)
            reaches.append(max(dict(fit), default=0))
        return reaches

    @property
    def fitted(self):
        """Whether at most one seed is below 95 % exact on the training lengths, or a corpus."""
        fit = sum(mean >= 0.95 for mean in self.means(self.trained, 'exact'))
        return self.corpus or len(self.seeds) - fit <= 1


def read_lines(path):
    """[('FILE, line N', its JSON)] of the lines of a file; [] if there is no such file."""
    path, found = Path(ROOT, path), []
    for n, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            found.append((f'{path}, line {n}', json.loads(line)))
        except ValueError:                                 # cut off, or two lines in one
            raise UserError(f'{path}, line {n} is damaged: repair or delete it') from None
    return found


def key_of(options, *free):
    """A string of all options, defaults included, except `free` ones and those not recorded."""
    return str([(key, as_typed(x)) for key, x in sorted((DEFAULTS | options).items())
                if key not in {'out_dir', *free, *train.NOT_RECORDED}])


def read_runs(*paths):
    """{set: [Run]} of files, by default results/*.jsonl. The first folder below out/ names the set.
    Repeated scores of a seed count once; other scores of the same seed begin another Run."""
    sets = {}
    paths = paths or sorted(ROOT.glob('results/*.jsonl'))
    for place, record in itertools.chain(*map(read_lines, paths)):
        if 'scores' not in record:                         # of a probe, or of speed
            continue
        config, seeds, lengths = record['config'], record['scores'], parse_list(record['lengths'])
        if 'seed' in config:
            seeds = {config.pop('seed'): seeds}
        else:                                              # an older record
            seeds = {n: seeds.get(str(n), {}) for n in parse_list(config.pop('seeds', '0'))}
            for x in filter(None, seeds.values()):         # it omits metrics that equal exact
                x |= {'token': x['exact'], 'last': x['exact']} | x
        need(all(len(x) == len(lengths) for scores in seeds.values() for x in scores.values()),
             f'{place} requires {len(lengths)} scores, one per length: repair or delete it')
        options = DEFAULTS | config | {'trained_with': record.get('trained_with')}
        name = re.sub('^(.*/)?out/', '', options['out_dir']).partition('/')[0]
        key, runs = record['lengths'] + key_of(options), sets.setdefault(name, [])
        known = [run for run in runs if run.key == key and all(    # seeds of both have equal scores
            run.seeds.get(seed, x).get('token') == x.get('token') for seed, x in seeds.items())]
        if not known:
            sizes = dict.fromkeys(lengths, options['n_test'])
            known = [Run(key, options, parse_list(options['train_lengths']), sizes, {})]
            runs += known
        run = known[0]
        run.corpus |= any('loss' in scores for scores in seeds.values())
        run.sizes |= {int(length): n for length, n in record.get('n', {}).items()}
        run.seeds |= {seed: run.seeds.get(seed, {}) | scores for seed, scores in seeds.items()}
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
        if diverged := sum(not scores for scores in run.seeds.values()):
            cells.append(f'{diverged} diverged')
        yield ' | '.join(cells)


# ---- the board -----------------------------------------------------------------------------------
# How far does every encoding generalize on every task? In a cell, seeds 5 and 6 select one of three
# learning rates, by final validation scores at the training lengths; seeds 0 to 4 train at it. If
# the cell is not fitted, all five train again with three times the steps, then with nine times.

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


def plan(minutes, row, column, times):
    """(folder, flags except learning rate and seed) of a cell with `times` the steps."""
    speed, trained, longer, flags = COLUMNS[column]
    steps = times * max(10, round(minutes * speed))
    stages = f'[[0,{(trained[0] + trained[-1]) // 2}],[{steps // 5},{trained[-1]}]]'
    shift = '--max_shift=256' if row == 'shifted_ape' else ''          # the longest length
    flags = f"""{SHAPE} {flags} --pe={row} {shift} --max_steps={steps} --eval_interval={steps}
        --warmup_steps={max(1, steps // 10)} --train_lengths={as_typed(trained)}
        --eval_lengths={as_typed([*trained, *longer])} --length_schedule={stages}"""
    return f'out/board/{column}/{row},{steps}', flags.split()


def run_train(folder, *flags):
    """Run `train.py FLAGS` from step 0. UserError if it fails, except because a seed diverged."""
    command = [sys.executable, 'train.py', *flags, f'--out_dir={folder}', '--overwrite']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    says = (done.stderr.splitlines() or ['stopped'])[-1]
    need(done.returncode == 0 or ' diverged: ' in says, f'{folder}: {says}')


def best_rate(minutes, row, column):
    """The learning rate of RATES with the best (-loss of a corpus, exact, token) at the end: means
    over seeds 5 and 6, and lengths. It is one at which neither diverged, if there is one."""
    folder, flags = plan(minutes, row, column, 1)
    run_train(f'{folder}_lr', *flags, '--seed=5,6', '--n_test=1', f'--lr={RATES}',
              f'--eval_lengths={as_typed(COLUMNS[column][1])}')

    def merit(rate):
        logs = [f'{folder}_lr/seed={seed},lr={float(rate)}/log.jsonl' for seed in (5, 6)]
        ends = [x['eval'] for log in logs for _, x in read_lines(log) if 'eval' in x]
        scores = [(-x.get('loss', 0), x['exact'], x['token']) for end in ends for x in end.values()]
        return len(ends), *map(statistics.mean, zip(*scores))          # (0,) if both diverged
    return max(RATES.split(','), key=merit)                # the first if several are equal


@dataclass
class Options:
    """The flags of this program."""
    metric: Literal[tuple(train.LABELS)] = 'exact'     # in a set: token, last, states, final, ...
    length: int = 0                 # a length in the table of a set; 0: twice the longest trained
    minutes: float = 0.5            # board: to train one RoPE model; a cell trains 11 or more
    pe: str = ','.join(train.encodings.ENCODINGS)      # rows of the board: these, or any encoding
    task: str = ','.join(COLUMNS)   # columns of the board
    records: str = 'out/board.jsonl'  # trained cells: delete it if a class or a default changes
    figure: str = ''                # file to which the board's curves are drawn


def board(options, training=True):
    """{(row, column): Run with the most steps} of the board, after training what has no record."""
    def recorded():                                        # {configuration: Run with five seeds}
        every = itertools.chain(*read_runs(options.records).values())
        return {key_of(run.options, 'n_test', 'lr'): run for run in every if len(run.seeds) == 5}
    cells = [(row, column) for column in options.task.split(',') for row in options.pe.split(',')]
    for row, column in cells:
        check_name('task of the board', column, COLUMNS)
        check_name('encoding', row.split('+')[0], train.encodings.ENCODINGS)
    known, runs = recorded(), {}
    for cell in tqdm(cells, unit='cell', disable=None if training else True):
        for times in TIMES:
            folder, flags = plan(options.minutes, *cell, times)
            key, run = key_of(train.parse(train.Config, flags)[0], 'n_test', 'lr'), runs.get(cell)
            if training and key not in known and not (run and run.fitted):
                rate = run.options['lr'] if run else best_rate(options.minutes, *cell)
                run_train(folder, *flags, '--seed=0-4', '--n_eval=1', f'--lr={rate}',
                          f'--results={options.records}')
                known = recorded()
            if key in known:
                runs[cell] = known[key]
    return runs


def board_cell(run, further):
    """The text of a cell of the board, with the tokens correct at length `further`."""
    longest = max(run.trained)
    if not any(run.seeds.values()):
        return 'diverged'
    if run.corpus:
        values = [run.means([n * longest], 'loss') for n in (1, 2, 4)]
        return ', '.join(f'{statistics.mean(x):.3g} ({min(x):.3g} to {max(x):.3g})' for x in values)
    reaches = [n / longest for n in run.reaches('exact')]
    reaches += [0] * (len(run.seeds) - len(reaches))       # of those that diverged
    middle, least, most = (f'{f(reaches):.3g}' for f in (statistics.median, min, max))
    spread = f' ({least} to {most})' if least != most else ''
    text = f'{middle}{spread}; {100 * statistics.mean(run.means([further], "token")):.0f} %'
    return text if run.fitted else f'*{text}*'


def board_table(runs):
    """Return a Markdown table of {(row, column): Run}, as in results/README.md; your rows are bold,
    those with a run that is not in results/board.jsonl."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*runs))
    published = [run for some in read_runs('results/board.jsonl').values() for run in some]
    own = {row for (row, _), run in runs.items() if run not in published}
    names = [f'**{row}**' if row in own else row for row in rows]
    last = ['floor'] * (columns != ['stdlib'])             # a text has none
    lines = [[name] for name in ('encoding', '---', *names, *last)]
    for column in columns:
        _, trained, longer, _ = COLUMNS[column]
        further = min(n for n in longer if n >= 1.5 * trained[-1])     # that is evaluated
        cells = [board_cell(runs[row, column], further) if (row, column) in runs else ''
                 for row in rows]
        least = '' if column == 'stdlib' else f'{100 * floor(column, further, "token"):.0f} %'
        for line, cell in zip(lines, [f'{column} ({as_typed(trained)})', '---', *cells, least]):
            line.append(cell)
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# of the figure: each column's metric, if not exact; titles; colors by Okabe and Ito
METRICS = {'polynomial': 'last', 'stdlib': 'loss'}
TITLES = {'exact': 'answers correct', 'last': 'last states correct', 'loss': 'relative perplexity'}
COLORS = dict(nope='#999999', rope='#D55E00', alibi='#56B4E9', t5='#F0E442', fox='#009E73',
              stickbreaking='#000000', pope='#CC79A7', vipe='#0072B2', prism='#E69F00')


def floor(column, length, metric):
    """The score at a length of a model whose every answer is the most frequent token."""
    if column == 'mqar':     # the latest value not yet recalled; it is wrong in the first answer of
        wrong = 1 / 3 * 7 / 8        # two if the keys' pairs cross and have different values
        return 1 - (wrong if metric == 'exact' else wrong / 2)
    task = train.tasks.make(COLUMNS[column][3].removeprefix('--task='))
    tokens, targets = task.sample(2000, length, torch.Generator().manual_seed(0))  # (2000, T) each
    asked = (targets != -100) & (targets != task.end)      # answers without the end token
    logits = torch.eye(len(task.vocab))[targets[asked].mode().values]      # (V,)
    names, sums = train.tally(lambda x: [logits.expand(*x.shape, -1)], task, tokens, targets, False)
    return (sums[:, 0] / sums[:, 1])[names.index(metric)].item()


def draw(runs, path):
    """Draw mean scores by length; shade the range over seeds of prism, stickbreaking and yours."""
    from matplotlib import pyplot
    columns, shown = list(dict.fromkeys(column for _, column in runs)), {}
    figure = pyplot.figure(figsize=(10, 5.6), layout='constrained')
    for number, column in enumerate(columns, 1):
        metric = METRICS.get(column, 'exact')
        axis = figure.add_subplot(2, math.ceil(len(columns) / 2), number)
        axis.set(xlim=(0, 4), ylim=(0.8, 3) if metric == 'loss' else (-0.03, 1.12))
        axis.set_title(f'{column}: {TITLES[metric]}', fontsize=9)
        axis.axvline(1, color='black', ls='--', lw=0.8)
        for row in [row for row, name in runs if name == column]:
            run, color = runs[row, column], COLORS.get(row, 'brown')
            x = [n / max(run.trained) for n in run.sizes]
            y = torch.tensor([[*x.values()] for x in run.scores(metric)])  # [seeds, lengths]
            if metric == 'loss':                           # perplexity, relative to the first
                y = (y - y[:, :1]).exp()
            axis.plot(x, y.mean(dim=0), '-' if run.fitted else ':', color=color, lw=1.8, label=row)
            if row in ('prism', 'stickbreaking') or row not in COLORS:
                axis.fill_between(x, y.amin(dim=0), y.amax(dim=0), color=color, alpha=0.12)
        if metric != 'loss':
            y = [floor(column, n, metric) for n in run.sizes]
            axis.plot(x, y, 'k-.', lw=0.6, label='floor')
        shown |= {line.get_label(): line for line in axis.get_legend_handles_labels()[0]}
    figure.legend(handles=shown.values(), loc='outside upper center', ncols=5, fontsize=8)
    figure.supxlabel('length / longest training length (dotted: not fitted)', fontsize=9)
    figure.savefig(path, dpi=100)
    return figure


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
        table = board_table(board(Options(records='results/board.jsonl'), False))
        start, _, end = re.split('(?s)(?<=<!-- board -->\n)(.*)(?=\n<!-- end)', PAGE.read_text())
        train.write_file(str(PAGE), start + table + end)
    elif what == 'board':
        runs = board(options)
        if options.figure:
            draw(runs, options.figure)
        print(board_table(runs))
    else:
        need(what in sets, f'unknown set {what!r}; python results/tables.py lists them')
        if removed := {key for run in sets[what] for key in run.options} - DEFAULTS.keys():
            print('options that have been removed: ' + ', '.join(sorted(removed)))
        print('\n'.join(listing(sets[what], options.metric, options.length)))


if __name__ == '__main__':
    train.run_program(main, ImportError)                   # no matplotlib
