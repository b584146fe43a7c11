"""The board: how far every encoding holds on every task, all with the same small budget.

    python results/evidence.py board --minutes=4                 all cells that are missing
    python results/evidence.py board --minutes=2 --pe=rope,mine --task=parity,recall

--minutes is the dial. It sets the number of steps of each task, so that RoPE's cell takes about
that long on one core of a CPU. All encodings of a task get these steps: slow ones take longer. A
cell is a run of seed 5 at each of three learning rates, and one of seeds 0 to 4 together at the
rate that ends best on validation problems of the trained lengths. A cut run goes on where it was.
"""
import itertools
import math
import re
import shlex
import statistics
import time
from typing import NamedTuple

import train
from engine import config
from engine.config import UserError, slug
from model import Transformer
from pe import ENCODINGS
from results import plan

DIAL, QUARTER = '4', '1'             # the settings of README's picture and its comparison
SEEDS, RATE_SEED, RATES = range(5), 5, '1e-3,2e-3,4e-3'
SHAPE = ('--d_model=64 --n_layer=2 --n_head=2 --batch_size=32 --warmup_steps=50 --n_eval=64 '
         '--n_test=128')
# lengths trained and evaluated: dense behind the trained ones, then to ten times these
TO_8 = '1-8', '1-12,14,16,20,24,32,48,64,80'
TO_16 = '16', '16-20,22,24,28,32,40,48,64,96,128,160'


class Column(NamedTuple):
    """A task of the board."""
    group: str                      # its kind, a heading in the picture
    flags: str
    trained: str                    # lengths
    evaluated: str
    steps: int                      # for each minute of the dial


COLUMNS = {
    'parity': Column('step by step', '--task=parity', *TO_8, 320),
    'polynomial': Column('step by step', '--task=polynomial', *TO_8, 320),
    'copy': Column('strings', '--task=string_copy', *TO_8, 320),
    'reverse': Column('strings', '--task=string_reverse', *TO_8, 320),
    'addition': Column('strings', '--task=addition:reversed=1', *TO_8, 240),
    'flip-flop': Column('state', '--task=flip_flop', *TO_16, 240),
    'S5': Column('state', '--task=group:name=s5', *TO_8, 320),
    'recall': Column('look up', '--task=mqar', *TO_16, 200),
    'indirect': Column('look up', '--task=indirect_indexing:letters=12:shift=2', '3-6', '3-12',
                       200),
    'distance': Column('look up', '--task=distance:span=16', *TO_16, 320),
    'SCAN': Column('text', '--task=scan', '1-22', '1-48', 100),
    'Python': Column('text', '--task=stdlib --batch_size=16 --n_eval=8 --n_test=16', '64',
                     '64,72,80,96,128,256,512,640', 60),
    'chorales': Column('text', '--task=jsb --data=data/Jsb16thSeparated.json --batch_size=8 '
                       '--n_eval=16', '128', '128,144,160,192,256,512,1024', 48),
}
ROWS = {name: f'--pe={name}' for name in (
    'nope', 'ape', 'learned', 'shifted_ape', 'rope')}
ROWS |= {
    'rope_d80': '--pe=rope --d_model=80',                  # as large as the largest others
    'rope_half': '--pe=rope --rope_fraction=0.5',
    'rope_every_2nd': '--pe=rope --nope_every=2',
    'rope_randomized': '--pe=rope --positions=randomized',
    'mla': '--pe=rope --attention=mla'}
ROWS |= {name: f'--pe={name}' for name in (
    'rope+ssmax', 'yarn', 'alibi', 't5', 'fire', 'kerple', 'vrope', 'vipe', 'pope', 'pope+vipe',
    'prism', 'fox', 'cope', 'path', 'stickbreaking')}


def argv(dial, row, column, more):
    """The command of a run of a cell: `more`, its rate and seeds."""
    task = COLUMNS[column]
    steps = max(10, round(float(dial) * task.steps))
    flags = (f'{SHAPE} {task.flags} --train_lengths={task.trained} '
             f'{ROWS.get(row, f"--pe={row}")} --max_steps={steps} --eval_interval={steps} {more}')
    rates, seeds = re.match(r'--lr=(\S+) --seeds=(\S+)', more).groups()
    folder = f'{slug(column)}/{slug(row)},seeds={seeds}' + f',lr={rates}' * (rates != RATES)
    return plan.train_argv(f'board_{dial}', folder, flags)


def cell(dial, row, column):
    """The line of a cell's five seeds; None, and what comes next in plan.missing, without it."""
    task = COLUMNS[column]
    longest = task.trained.split('-')[-1]                  # these scores are not looked at
    tries = argv(dial, row, column, f'--lr={RATES} --seeds={RATE_SEED} --eval_lengths={longest}')
    command = 'python ' + shlex.join(tries)
    tried = {run['config']['lr']: run for run in plan.runs(f'board_{dial}')
             if run['command'].replace(' --resume', '') == command}
    if len(tried) < len(RATES.split(',')):
        plan.missing.append(tries)
        return None
    best = max(tried, key=lambda rate: plan.validation(tried[rate], RATE_SEED))
    last = argv(dial, row, column, f'--lr={best:g} --seeds={SEEDS[0]}-{SEEDS[-1]} '
                                   f'--eval_lengths={task.evaluated}')
    line = plan.look_up(f'board_{dial}', last)
    if line is None:
        plan.missing.append(last)
    return line


def find(dial, rows=None, columns=None):
    """{(row, column): line} of the cells that are there; the others' next runs in plan.missing."""
    plan.runs.cache_clear()
    plan.by_command.cache_clear()
    plan.missing.clear()
    found = {}
    for column, row in itertools.product(columns or COLUMNS, rows or ROWS):
        line = cell(dial, row, column)
        if line:
            found[row, column] = line
    return found


def options(flags):
    """(dial, rows, columns) of a command line; UserError if it makes no sense."""
    known = dict(minutes='', pe='', task='')
    for flag in flags:
        key, _, value = flag.removeprefix('--').partition('=')
        if key not in known or not value:
            raise UserError('write `board --minutes=M`, and perhaps --pe=NAME,... and '
                            '--task=NAME,...')
        known[key] = value
    try:
        minutes = float(known['minutes'])
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise UserError('board wants --minutes=M, a number above 0, as in --minutes=0.5')
    rows, columns = (list(filter(None, known[key].split(','))) for key in ('pe', 'task'))
    for row in rows:
        unknown = [part for part in row.split('+') if part not in ENCODINGS]
        if row not in ROWS and unknown:
            raise UserError(f'no encoding {unknown[0]}: register it in pe.ENCODINGS, or write one '
                            f'of {", ".join(dict.fromkeys([*ROWS, *ENCODINGS]))}')
    for column in columns:
        if column not in COLUMNS:
            raise UserError(f'no task {column} on the board: write one of {", ".join(COLUMNS)}')
    return f'{minutes:g}', rows, columns


def play(dial, rows, columns, run):
    """Run what is missing of these rows and columns, all by default, then print them."""
    began, at_first = time.time(), []
    planned = len(rows or ROWS) * len(columns or COLUMNS)

    def progress():
        there = len(find(dial, rows, columns))
        at_first.append(there)
        done = there - at_first[0]
        left = (time.time() - began) / 60 * (planned - there) / done if done else math.nan
        return f'{there} of {planned} cells' + f', about {left:.0f} min left' * bool(done)

    failed = run(ask=progress)
    cells = find(dial, rows, columns)
    for row in order(cells):
        for (of, column), line in cells.items():
            if of == row:
                print(f'{row:22}{column:12}{cell_text(line).replace("<br>", "   ")}')
    return failed


# --------------------------------------------------------------------------------------------------
# the measure

def reach(line):
    """Longest length held over the longest trained one, a number for each seed; a seed that
    diverged has 0, and so has one that fails the shortest length."""
    longest = max(line['config']['train_lengths'])
    ratios = []
    for scores in plan.by_seed(line).values():
        held = plan.holds(scores, longest).removeprefix('≥ ')
        ratios.append(int(held) / longest if held.isdigit() else 0.0)
    return ratios + [0.0] * (len(line['config']['seeds']) - len(ratios))


def trained(line):
    """Exact match on the trained lengths, or the perplexity of a corpus: mean over seeds."""
    values = [plan.score(scores, line['config']['train_lengths'])
              for scores in plan.by_seed(line).values()]
    if not values:
        return math.nan
    is_corpus = 'loss' in next(iter(next(iter(plan.by_seed(line).values())).values()))
    return statistics.mean(math.exp(-x) for x in values) if is_corpus else statistics.mean(values)


def order(cells):
    """Rows of {(row, column): line}, by the mean over columns of log2(1 + median reach), the
    furthest first."""
    def mean(row):
        of_row = [statistics.median(reach(line)) for (r, _), line in cells.items() if r == row]
        return statistics.mean(math.log2(1 + x) for x in of_row)
    return sorted(dict.fromkeys(row for row, _ in cells), key=mean, reverse=True)


def parameters(row):
    """How many parameters a row's model for parity has."""
    flags = argv(DIAL, row, 'parity', f'--lr=1e-3 --seeds=0 --eval_lengths={TO_8[1]}')[1:]
    model = Transformer(train.make_config(config.read(train.Config, flags)))
    return sum(p.numel() for p in model.parameters())


def times(ratio):
    """A reach as text: '1.5', '12'; '<1' where not all trained lengths hold."""
    if ratio < 1:
        return '<1' if ratio else '0'
    return f'{ratio:.2f}'.rstrip('0').rstrip('.') if ratio < 10 else f'{ratio:.0f}'


# --------------------------------------------------------------------------------------------------
# the table, the picture, the sentences

def table(dial):
    """Each cell's median reach (least to most), exact match on trained lengths or perplexity."""
    cells = find(dial)
    if not cells:
        yield f'Not run yet: `python results/evidence.py board --minutes={dial}`.'
        return
    missing = len(ROWS) * len(COLUMNS) - len(cells)
    if missing:
        yield f'{missing} cells are not run yet.\n'
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    steps = [f'{round(float(dial) * COLUMNS[name].steps)} steps' for name in columns]
    yield '| | ' + ' | '.join(f'{name}<br>{n}' for name, n in zip(columns, steps)) + ' |'
    yield '|---' * (len(columns) + 1) + '|'
    for row in order(cells):
        texts = [cell_text(cells.get((row, column))) for column in columns]
        yield f'| {row}<br>{parameters(row):,} | ' + ' | '.join(texts) + ' |'


def cell_text(line):
    """A cell of the table."""
    if line is None:
        return ''
    if not line['lengths']:
        return 'all diverged'
    ratios, score = reach(line), trained(line)
    is_perplexity = score > 1
    median, least, most = (times(f(ratios)) for f in (statistics.median, min, max))
    spread = f' ({least} to {most})' if least != most else ''
    return f'{median}{spread}<br>' + (f'{score:.2f}' if is_perplexity else f'{100 * score:.0f} %')


def block():
    """The board in results/README.md: sentences and table of README's setting."""
    yield from (f'- {sentence}' for sentence in sentences(DIAL, QUARTER))
    yield ''
    yield from table(DIAL)


LEVELS = 0, 1e-9, 1, 1.1, 1.25, 1.5, 2, 4, 10              # where a colour begins


def figure(plt, dial):
    """The median reach of every cell as a colour and a number, least and most below it; beside a
    row its parameters."""
    cells = find(dial)
    rows = order(cells)
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    fig, ax = plt.subplots(figsize=(9, 1.3 + 0.3 * len(rows)), layout='constrained')
    for (j, column), (i, row) in itertools.product(enumerate(columns), enumerate(rows)):
        line = cells.get((row, column))
        if line is None:
            continue
        ratios = reach(line)
        level = sum(statistics.median(ratios) >= low for low in LEVELS) - 1
        shade = level / (len(LEVELS) - 1)
        ax.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, color=plt.cm.cividis(shade)))
        ink = 'white' if shade < 0.5 else 'black'
        ax.text(j, i - 0.1, times(statistics.median(ratios)), ha='center', va='center', color=ink,
                fontsize=9)
        least, most = times(min(ratios)), times(max(ratios))
        if least != most:
            ax.text(j, i + 0.3, f'{least}-{most}', ha='center', va='center', color=ink, fontsize=6)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks(range(len(columns)), columns, rotation=35, ha='right', fontsize=9)
    names = [f'{row}  {parameters(row) / 1e3:.0f}k' for row in rows]
    ax.set_yticks(range(len(rows)), names, fontsize=9)
    for group, of_group in itertools.groupby(enumerate(columns),
                                             lambda item: COLUMNS[item[1]].group):
        places = [j for j, _ in of_group]
        ax.text(statistics.mean(places), -0.75, group, ha='center', fontsize=8, style='italic')
        ax.axvline(places[-1] + 0.5, color='white', lw=3)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig


def sentences(dial, other=None):
    """What the board shows, every number computed."""
    cells = find(dial)
    if len({row for row, _ in cells}) < 3:
        return
    rows = order(cells)
    columns = list(dict.fromkeys(column for _, column in cells))
    medians = {key: statistics.median(reach(line)) for key, line in cells.items()}
    far = {row: sum(medians.get((row, column), 0) >= 2 for column in columns) for row in rows}
    first = ', '.join(f'`{row}` ({far[row]})' for row in rows[:3])
    yield (f'Furthest over all {len(columns)} tasks go {first}; in parentheses: the tasks on which '
           'the median seed holds to twice the trained length.')
    nobody = [c for c in columns if all(medians.get((row, c), 0) < 2 for row in rows)]
    yield (f'On {len(nobody)} of {len(columns)} tasks no encoding does'
           + (f': {", ".join(nobody)}.' if nobody else '.'))
    for row in ('rope', 'nope'):
        if row in rows:
            at = sum(medians.get((row, column), 0) > 1 for column in columns)
            yield (f'`{row}` is number {rows.index(row) + 1} of {len(rows)}: it holds beyond the '
                   f'trained lengths on {at} of {len(columns)} tasks.')
    unlearned = sum(x < 1 for x in medians.values())
    diverged = sum(len(line['config']['seeds']) - len(line['lengths']) for line in cells.values())
    yield (f'In {unlearned} of {len(cells)} cells the median seed has not learned all trained '
           f'lengths in these steps; {diverged} of {len(SEEDS) * len(cells)} seeds diverged.')
    less = find(other) if other else {}
    if cells.keys() <= less.keys():
        rank = order({key: less[key] for key in cells})
        n = len(rows)
        gap = sum((rows.index(row) - rank.index(row)) ** 2 for row in rows)
        yield (f'With --minutes={other} the order of the rows is much the same or not: its rank '
               f'correlation is {1 - 6 * gap / (n * (n * n - 1)):.2f}.')
