"""The board: how far every encoding holds on every task, all with the same small budget.

    python results/evidence.py board --minutes=1                 all cells that are missing
    python results/evidence.py board --minutes=1 --pe=rope,mine --task=parity,recall

--minutes is the dial. It sets the number of steps of each task, so that RoPE's cell takes one to
two times that long on one core of a CPU. All encodings of a task get these steps: slow ones take
longer. A cell has two or three commands. In the first, seed 5 tries three learning rates, and in
the second half the lowest or twice the highest, if that was the best. Then seeds 0 to 4 train at
the rate that ended best on validation problems of the trained lengths. A cut run goes on where it
was.
A cell is known by its command: after a change of your class give it another name.
"""
import itertools
import math
import os
import statistics
import time
from typing import NamedTuple

import train
from engine import config, report
from engine.config import UserError, slug
from model import Transformer
from pe import ENCODINGS
from results import plan

DIAL, QUARTER = '1', '0.25'         # the settings of the picture and of its comparison
SEEDS, RATE_SEED = '0-4', '5'
RATES, LOWER, HIGHER = '1e-3,2e-3,4e-3', '5e-4', '8e-3'
SHAPE = '--d_model=64 --n_layer=2 --n_head=2 --batch_size=32 --n_eval=64 --n_test=256'
# lengths trained and evaluated: dense behind the trained ones, then to ten times these. They are
# short, and the tasks small, so that RoPE learns most tasks in a minute
TO_6 = '1-6', '1-10,12,14,16,18,24,36,48,60'
TO_16 = '16', '16-20,22,24,28,32,40,48,64,96,128,160'


class Column(NamedTuple):
    """A task of the board."""
    group: str                      # its kind, a heading in the picture
    flags: str
    trained: str                    # lengths
    evaluated: str
    tokens: int                     # of the longest problem evaluated
    steps: int                      # for each minute of the dial


COLUMNS = {
    'parity': Column('step by step', '--task=parity', *TO_6, 123, 640),
    'polynomial': Column('step by step', '--task=polynomial', *TO_6, 123, 640),
    'copy': Column('strings', '--task=string_copy', *TO_6, 122, 640),
    'reverse': Column('strings', '--task=string_reverse', *TO_6, 123, 640),
    'addition': Column('strings', '--task=addition:reversed=1', '1-2', '1-6,8,12,16,20', 64, 960),
    'flip-flop': Column('state', '--task=flip_flop', *TO_16, 320, 320),
    # S5 has 14,400 products: in 1,280 steps six encodings learn none. Of S3 to 4 elements all 25
    # rows learn at most 93 % in 960
    'S3': Column('state', '--task=group:name=s3', '1-3', '1-6,8,10,12,18,24,30', 32, 960),
    'recall': Column('look up', '--task=mqar:keys=2:words=8', *TO_16, 320, 400),
    'indirect': Column('look up', '--task=indirect_indexing:letters=8:shift=1', '3-4', '3-8', 16,
                       640),
    'distance': Column('look up', '--task=distance:span=8', '8',
                       '8-10,11,12,14,16,20,24,32,48,64,80', 82, 640),
    'SCAN': Column('look up', '--task=scan', '1-22', '1-48', 60, 200),
    'Python': Column('perplexity', '--task=stdlib --batch_size=16 --n_test=16', '64',
                     '64,128,512', 512, 160),
    'chorales': Column('perplexity', '--task=jsb --data=data/Jsb16thSeparated.json '
                       '--batch_size=8 --n_eval=32', '128', '128,256,1024', 1024, 120),
}
ROWS = {name: f'--pe={name}' for name in (
    'nope', 'ape', 'learned')}
ROWS |= {
    # positions, or shifts, as far as the column is evaluated
    'shifted_ape': '--pe=shifted_ape --max_shift={tokens}',
    'rope': '--pe=rope',
    'rope_d80': '--pe=rope --d_model=80',                  # about as many parameters as prism
    'rope_half': '--pe=rope --rope_fraction=0.5',
    'rope_every_2nd': '--pe=rope --nope_every=2',
    'rope_randomized': '--pe=rope --positions=randomized --positions_max={tokens}',
    'mla': '--pe=rope --attention=mla'}
ROWS |= {name: f'--pe={name}' for name in (
    'rope+ssmax', 'yarn', 'alibi', 't5', 'fire', 'kerple', 'vrope', 'vipe', 'pope', 'pope+vipe',
    'prism', 'fox', 'cope', 'path', 'stickbreaking')}


def steps(dial, column):
    """Steps of every run of a column."""
    return max(10, round(float(dial) * COLUMNS[column].steps))


def argv(dial, row, column, rate, seeds, lengths):
    """The command of seeds of a cell, evaluated at `lengths`. The search for a rate reads
    validation problems alone, the others test problems alone: --n_eval and --n_test."""
    task, n = COLUMNS[column], steps(dial, column)
    own = ROWS.get(row, f'--pe={row}').format(tokens=task.tokens)
    flags = (f'{SHAPE} {task.flags} --train_lengths={task.trained} --eval_lengths={lengths} '
             f'{own} --max_steps={n} --eval_interval={n} '
             f'--warmup_steps={max(1, n // 10)} --lr={rate} --seeds={seeds} '
             f'{"--n_test=1" if seeds == RATE_SEED else "--n_eval=1"}')
    folder = f'{slug(column)}/{slug(row)},seeds={seeds}'
    if rate in (LOWER, HIGHER) and seeds == RATE_SEED:
        folder += f',lr={rate}'
    return plan.train_argv(f'board_{dial}', folder, flags)


def search(dial, row, column):
    """The learning rate of a cell; None, and what comes next in plan.missing, while unknown."""
    name, lengths = f'board_{dial}', COLUMNS[column].trained
    command = argv(dial, row, column, RATES, RATE_SEED, lengths)
    found = {line['config']['lr']: line for line in plan.lines_of(name, command)}

    def merit(rate):
        """Exact match on validation problems; between equals, the tokens right."""
        curve = found[rate]['curves'].get(RATE_SEED)       # none if it diverged
        return plan.validation(found[rate], RATE_SEED), curve[-1][4:] if curve else []

    if len(found) < len(RATES.split(',')):
        plan.missing.append(command)
        return None
    best = max(found, key=merit)                           # of equals the first, the lowest
    beyond = {min(found): LOWER, max(found): HIGHER}.get(best)
    if beyond and merit(best) > max(merit(rate) for rate in found if rate != best):
        command = argv(dial, row, column, beyond, RATE_SEED, lengths)
        line = plan.look_up(name, command)
        if line is None:
            plan.missing.append(command)
            return None
        found[float(beyond)] = line
    return max(found, key=merit)


def cell(dial, row, column):
    """The line of a cell's five seeds; None, and what comes next in plan.missing, without it."""
    rate = search(dial, row, column)
    if rate is None:
        return None
    command = argv(dial, row, column, rate, SEEDS, COLUMNS[column].evaluated)
    line = plan.look_up(f'board_{dial}', command)
    if line is None:
        plan.missing.append(command)
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
    given = dict(minutes='', pe=','.join(ROWS), task='')
    for flag in flags:
        key, _, value = flag.removeprefix('--').partition('=')
        if key not in given or not all(value.split(',')):
            raise UserError('write `board --minutes=M`, and perhaps --pe=NAME,... and '
                            '--task=NAME,...')
        given[key] = value
    try:
        minutes = float(given['minutes'])
    except ValueError:
        minutes = 0
    if not 0.01 <= minutes <= 1000:
        raise UserError('board wants --minutes=M, from 0.01 to 1000, as in --minutes=0.5')
    # without repeats
    rows, columns = (list(dict.fromkeys(filter(None, given[key].split(',')))) for key in (
        'pe', 'task'))
    for row in rows:
        unknown = [part for part in row.split('+') if part not in ENCODINGS]
        if row not in ROWS and unknown:
            raise UserError(f'no encoding {unknown[0]!r}: register it in pe.ENCODINGS, or write '
                            f'one of {", ".join(dict.fromkeys([*ROWS, *ENCODINGS]))}')
    for column in columns:
        if column not in COLUMNS:
            raise UserError(f'no task {column} on the board: write one of {", ".join(COLUMNS)}')
        if lacks_data(column):
            raise UserError(f'{column} wants {lacks_data(column)}: put it there (results/README.md '
                            'says where it comes from)')
    return f'{minutes:g}', rows, columns or [c for c in COLUMNS if not lacks_data(c)]


def lacks_data(column):
    """The file that a column needs and that is not there, or ''."""
    path = COLUMNS[column].flags.partition('--data=')[2].partition(' ')[0]
    return path if path and not os.path.exists(os.path.join(plan.ROOT, path)) else ''


def play(dial, rows, columns, run):
    """Run what is missing of these rows and columns; then print these columns with all rows that
    there are, and draw them in out/board_M.png."""
    began, runs_at_first = time.time(), None

    def progress():
        nonlocal runs_at_first
        cells = find(dial, rows, columns)
        # five runs for each cell to come, and three where the rate is not known
        searches = sum(f'--seeds={RATE_SEED}' in command for command in plan.missing)
        left = 5 * (len(rows) * len(columns) - len(cells)) + 3 * searches
        runs_at_first = runs_at_first or left
        done = runs_at_first - left
        minutes = (time.time() - began) / 60 * left / done if done > 0 else math.nan
        return (f'{len(cells)} of {len(rows) * len(columns)} cells'
                + f', about {minutes:.1f} min left' * (done > 0))

    failed = run(ask=progress)
    cells = find(dial, dict.fromkeys([*ROWS, *rows]), columns)
    if not cells:
        return failed
    print(f'\n{cost(dial, cells)}\n\nlongest length held / longest trained, '
          'median of 5 seeds (least to most), and exact match on trained lengths;\nof a corpus '
          'its perplexity at the trained length and, over that, at 2 and 8 times the length\n')
    for column in columns:
        for row in order({key: cells[key] for key in cells if key[1] == column}):
            text = cell_text(cells[row, column]).replace('<br>', '   ')
            print(f'{column:12}{row:18}{parameters(row):>9,}  {text}')
    plt = report.pyplot()
    if plt:
        path = os.path.join(plan.ROOT, f'out/board_{dial}.png')
        figure(plt, cells).savefig(path, dpi=100)
        print(f'drew {path}')
    return failed


# --------------------------------------------------------------------------------------------------
# the measure

def is_corpus(column):
    """Whether a column's scores are perplexities."""
    return COLUMNS[column].group == 'perplexity'


def reach(line):
    """Longest length held over the longest trained one, a number for each seed: 0 where it has not
    learned all trained lengths, or diverged."""
    longest = max(line['config']['train_lengths'])
    ratios = []
    for scores in plan.by_seed(line).values():
        held = plan.holds(scores, longest).removeprefix('≥ ')
        learned = held.isdigit() and int(held) >= longest
        ratios.append(int(held) / longest if learned else 0.0)
    return ratios + [0.0] * (len(line['config']['seeds']) - len(ratios))


def trained(line):
    """Exact match on the trained lengths, or the perplexity of a corpus: mean over the seeds that
    did not diverge."""
    values = [plan.score(scores, line['config']['train_lengths'])
              for scores in plan.by_seed(line).values()]
    return statistics.mean(math.exp(-x) if x < 0 else x for x in values)


def ratios_of_perplexity(line):
    """Perplexity at 2 and at 8 times the trained length over that at the trained one: means."""
    longest = max(line['config']['train_lengths'])
    return [statistics.mean(math.exp(scores[n * longest]['loss'] - scores[longest]['loss'])
                            for scores in plan.by_seed(line).values()) for n in (2, 8)]


def standing(cells):
    """{row: mean of log2(1 + median reach) over its tasks}, without corpora."""
    by_row = {row: [] for row, _ in cells}
    for (row, column), line in cells.items():
        if not is_corpus(column):
            by_row[row].append(math.log2(1 + statistics.median(reach(line))))
    return {row: statistics.mean(values or [0]) for row, values in by_row.items()}


def order(cells):
    """Rows of {(row, column): line}: the furthest first, of equals that of the least perplexity."""
    furthest = standing(cells)
    perplexity = dict.fromkeys(furthest, 0)
    for (row, column), line in cells.items():
        if is_corpus(column):
            perplexity[row] += trained(line) if line['lengths'] else math.inf
    return sorted(furthest, key=lambda row: (-furthest[row], perplexity[row]))


def parameters(row):
    """How many parameters a row's model for parity has."""
    flags = argv(DIAL, row, 'parity', '1e-3', '0', TO_6[1])[1:]
    model = Transformer(train.make_config(config.read(train.Config, flags)))
    return sum(p.numel() for p in model.parameters())


def times(ratio, line):
    """A reach as text: '1.5', '12', '<1' where not all trained lengths hold; '2+' where no longer
    length was evaluated."""
    if not ratio:
        return '<1'
    text = f'{ratio:.2f}'.rstrip('0').rstrip('.') if ratio < 10 else f'{ratio:.0f}'
    furthest = max(line['config']['eval_lengths']) / max(line['config']['train_lengths'])
    return text + '+' * (ratio >= furthest)


def median_and_range(line):
    """The median reach of a cell, and 'least to most' or, if they are equal, nothing."""
    ratios = reach(line)
    median, least, most = (times(f(ratios), line) for f in (statistics.median, min, max))
    return median, f'{least} to {most}' if least != most else ''


# --------------------------------------------------------------------------------------------------
# the table, the picture, the sentences

def cost(dial, cells):
    """What a run of each column costs, as text."""
    texts = []
    for column, line in {column: line for (_, column), line in cells.items()}.items():
        n, cfg = steps(dial, column), line['config']
        tokens = n * cfg['batch_size'] * cfg['train_len'] / 1e6
        texts.append(f'{column} {n} steps, {tokens:.1f} M tokens')
    return '; '.join(texts)


def cell_text(line):
    """A cell of the table."""
    if not line['lengths']:
        return 'all diverged'
    lost = len(line['config']['seeds']) - len(line['lengths'])
    lost = f' ({lost} diverged)' if lost else ''
    mean = trained(line)
    if mean > 1:                                           # a perplexity
        twice, eight = ratios_of_perplexity(line)
        return f'{mean:.2f}{lost}<br>x {twice:.2f}, x {eight:.2f}'
    median, spread = median_and_range(line)
    spread = f' ({spread})' if spread else ''
    return f'{median}{spread}<br>{100 * mean:.0f} %{lost}'


def whole_columns(cells):
    """The cells of those columns in which no row is missing."""
    whole = [column for column in COLUMNS if all((row, column) in cells for row in ROWS)]
    return {(row, column): line for (row, column), line in cells.items() if column in whole}


def front():
    """The sentences under the picture in README.md."""
    yield from (f'- {text}' for text in sentences(whole_columns(find(DIAL)), find(QUARTER)))


def block():
    """The board in results/README.md: what it cost, and a table of the columns that are whole."""
    cells = whole_columns(find(DIAL))
    if not cells:
        yield f'No column is whole yet: `python results/evidence.py board --minutes={DIAL}`.'
        return
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    rates = [line['config']['lr'] for line in cells.values()]
    edges = ' and '.join(f'{rates.count(float(rate))} at {rate}' for rate in (LOWER, HIGHER))
    yield (f'One run: {cost(DIAL, cells)}. Of these {len(cells)} cells, {edges} have a rate beyond '
           'the three.\n')
    yield '| | ' + ' | '.join(columns) + ' |'
    yield '|---' * (len(columns) + 1) + '|'
    for row in order(cells):
        texts = [cell_text(cells[row, column]) for column in columns]
        yield f'| {row}<br>{parameters(row):,} | ' + ' | '.join(texts) + ' |'
    less = find(QUARTER)
    if cells.keys() <= less.keys():
        yield '\n' + comparison(cells, {key: less[key] for key in cells})


def learned(cells):
    """In how many cells, of corpora none, the median seed has learned all trained lengths."""
    return sum(not is_corpus(column) and statistics.median(reach(line)) >= 1
               for (_, column), line in cells.items())


def comparison(cells, less):
    """How the order of rows changes with the steps: two sentences about two boards' equal cells."""
    def correlation(corpora):
        """Of the rows' means of trained(), over corpora or over the other tasks."""
        means = [[statistics.mean(trained(line) for (of, column), line in board.items()
                                  if of == row and is_corpus(column) == corpora)
                  for row in standing(cells)] for board in (cells, less)]
        return f'{rank_correlation(list(zip(*means))):.2f}'

    level = list(standing(less).values()).count(0)
    return (f'With a quarter of the steps ([picture](../assets/board_quarter.png)) the median seed '
            f'has learned all trained lengths in {learned(less)} cells, here in {learned(cells)}, '
            f'and {level} rows hold none. Rank correlations of the order of rows there and here: '
            f'by how far they hold {order_correlation(cells, less)}, by the exact match on trained '
            f'lengths {correlation(False)}, by perplexity {correlation(True)}.')


def order_correlation(cells, less):
    """The rank correlation of two boards' orders of rows, of equal cells, as text."""
    here, there = standing(cells), standing({key: less[key] for key in cells})
    return f'{rank_correlation([(here[row], there[row]) for row in here]):.2f}'


LEVELS = 1, 1.25, 1.5, 2, 4, 10                            # of reach, where a colour begins


def figure(plt, cells):
    """The median reach of every cell as a colour and a number; where not all trained lengths are
    learned, the exact match on them. Below it least to most. Of a corpus the perplexity, and what
    it is multiplied by at twice the length."""
    rows = order(cells)
    columns = [name for name in COLUMNS if any(column == name for _, column in cells)]
    fig, ax = plt.subplots(figsize=(9, 2 + 0.3 * len(rows)), layout='constrained')
    shades = [plt.cm.cividis(i / (len(LEVELS) - 1)) for i in range(len(LEVELS))]
    for (j, column), (i, row) in itertools.product(enumerate(columns), enumerate(rows)):
        line = cells.get((row, column))
        if line is None:
            continue
        colour, ink, text, below = '1', '0.3', 'diverged', ''
        if line['lengths'] and is_corpus(column):
            colour, ink = '0.93', 'black'
            text, below = f'{trained(line):.2f}', f'x {ratios_of_perplexity(line)[0]:.2f}'
        elif line['lengths']:
            text, below = median_and_range(line)
            level = sum(statistics.median(reach(line)) >= low for low in LEVELS)
            if level:
                colour, ink = shades[level - 1], 'white' if level <= len(LEVELS) / 2 else 'black'
            else:
                text = f'{100 * trained(line):.0f} %'
        ax.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, color=colour))
        ax.text(j, i - 0.12, text, ha='center', va='center', color=ink, fontsize=9)
        ax.text(j, i + 0.28, below, ha='center', va='center', color=ink, fontsize=6.5)
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
    key = [plt.Rectangle((0, 0), 1, 1, color=shade) for shade in shades]
    names = [f'{low:g} and more' if low == LEVELS[-1] else f'from {low:g}' for low in LEVELS]
    fig.legend(key, names, loc='outside lower center', ncols=len(names), fontsize=8, frameon=False,
               title='longest length held / longest trained: median of five seeds, below it worst '
               'to best seed\nwhite: percent right on the trained lengths, which are not all '
               'learned; right of a name: parameters', title_fontsize=8)
    return fig


def sentences(cells, less):
    """What the board shows, every number computed; `less`: the board with a smaller dial."""
    cells = {key: line for key, line in cells.items() if not is_corpus(key[1])}
    scores, columns = standing(cells), list(dict.fromkeys(column for _, column in cells))
    if len(scores) < 3:
        return
    medians = {key: statistics.median(reach(line)) for key, line in cells.items()}

    def count(row, least):
        return sum(medians[row, column] >= least for column in columns)

    third = sorted(scores.values())[-3]
    first = ', '.join(f'`{row}` ({count(row, 2)})' for row in order(cells) if scores[row] >= third)
    yield (f'Furthest over {len(columns)} tasks go {first}; in parentheses, on how many the median '
           'seed holds to twice the trained length.')
    nobody = [c for c in columns if all(medians[row, c] < 2 for row in scores)]
    yield f'No encoding does on: {", ".join(nobody) or "none"}.'
    for row in (row for row in ('rope', 'nope') if row in scores):
        above = sum(x > scores[row] for x in scores.values())
        equal = sum(x == scores[row] for x in scores.values())
        place = f'{above + 1}' if equal == 1 else f'{above + 1} to {above + equal}'
        yield (f'`{row}` is number {place} of {len(scores)}: it learns {count(row, 1)} of '
               f'{len(columns)} tasks, and holds to 1.25 times the trained length on '
               f'{count(row, 1.25)}.')
    unlearned = len(cells) - learned(cells)
    diverged = sum(len(line['config']['seeds']) - len(line['lengths']) for line in cells.values())
    text = (f'In {unlearned} of {len(cells)} cells the median seed has not learned all trained '
            f'lengths in these steps, and {diverged} seeds diverged')
    if cells.keys() <= less.keys():
        there = len(cells) - learned({key: less[key] for key in cells})
        text += (f'; with a quarter of the steps it is {there} cells, and the order of rows has a '
                 f'rank correlation of {order_correlation(cells, less)} with this one')
    yield text + '.'


def rank_correlation(pairs):
    """Spearman's rank correlation; equal values share the mean of their ranks. nan if one side is
    all equal."""
    ranks = [[sum((y > x) + (y == x) / 2 for y in side) for x in side] for side in zip(*pairs)]
    try:
        return statistics.correlation(*ranks)
    except statistics.StatisticsError:
        return math.nan
