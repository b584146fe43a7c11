"""The evidence: what is there, what is missing, and the tables and figures made of it.

    python results/evidence.py                  what is there and what is missing
    python results/evidence.py run 30           run missing pieces for 30 minutes, the most valuable
                                                first; the same command goes on
    python results/evidence.py run 30 2         two at a time
    python results/evidence.py board --minutes=1    the board of results/board.py
    python results/evidence.py readme           write the tables of results/README.md and README.md
                                                and their figures anew from results/*.jsonl

results/plan.py holds the plan, results/claims.py the papers' claims. Tables of one file alone
(BY_LENGTH, speed, compile, seeds) come from runs started by hand, whose commands stand below them.
"""
import functools
import importlib
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

# These come after the path that they are found on: hence noqa.
import torch  # noqa: E402

import kernels  # noqa: E402
import train  # noqa: E402
from engine import checkpoint, config, report, seeds  # noqa: E402
from engine.config import UserError  # noqa: E402
from model import Transformer  # noqa: E402
from probes import core  # noqa: E402
from results import board, claims, plan  # noqa: E402
from results.plan import GRIDS, PAPER, cells, shown  # noqa: E402

USAGE = ('write `run MINUTES`, `run MINUTES JOBS` (how many at a time), `board --minutes=M`, '
         '`readme`, or nothing to see what is there')


def ask():
    """Fill plan.cells with what is there and plan.missing with what is not."""
    plan.find_cells()
    for table in (claims.claims_table, claims.heads_table, claims.perturb_table,
                  claims.stops_table, why_table):
        list(table())                             # for the probes that it asks for
    plan.sort_missing()


# --------------------------------------------------------------------------------------------------
# tables

def found_axes(name):
    """A grid's rows and columns that have a cell."""
    keys = [key for key in cells if key[0] == name]
    rows = [row for row in GRIDS[name].rows if any(key[1] == row for key in keys)]
    columns = [column for column in GRIDS[name].columns if any(key[2] == column for key in keys)]
    return rows, columns


def markdown(header, rows):
    """Lines of a Markdown table."""
    if not rows:
        yield 'Not run yet.'
        return
    yield '| ' + ' | '.join(header).lstrip() + ' |'
    yield '|---' * len(header) + '|'
    for row in rows:
        yield '| ' + ' | '.join(row) + ' |'


def grid_table(name):
    """A grid as Markdown, under its title, with its figure and the effects of an ablation."""
    grid = GRIDS[name]
    folded = grid.title and not name.startswith('ablation')
    if grid.title:
        yield f'<details><summary>{grid.title}</summary>\n' if folded else f'{grid.title}:\n'
    yield from grid_lines(name)
    if folded:
        yield '</details>'


def grid_lines(name):
    """The lines of one grid: a row per encoding or variant, a column per task."""
    rows, columns = found_axes(name)
    grid = GRIDS[name]
    planned = len(grid.rows) * len(grid.columns)
    there = sum(key[0] == name for key in cells)
    if not rows:
        gpu = ': it wants a GPU' if name in PAPER else ''
        yield f'Not run yet{gpu}; `python results/evidence.py run 30` runs all {planned} of it.'
        return
    if there < planned:
        waiting = [x for x in (*grid.rows, *grid.columns) if x not in (*rows, *columns)]
        none_of = f'; no cell yet of {"; ".join(waiting)}' if waiting else ''
        yield f'{there} of {planned} cells so far{none_of}.\n'
    turned = len(columns) > len(rows)             # the longer axis goes down the screen
    across, down = (rows, columns) if turned else (columns, rows)
    body = []
    for label in down:
        count = f'<br>{parameters(label):,}' if name == 'cross' else ''
        keys = [(other, label) if turned else (label, other) for other in across]
        body.append([label + count, *(cell_text(name, *key) for key in keys)])
    yield from markdown(['', *across], body)
    at_highest = [cell['config']['lr'] == float(plan.rates(key[2])[-1])
                  for key, cell in cells.items() if key[0] == name and not plan.piece(*key)[2]]
    if at_highest:
        yield (f'\nIn {sum(at_highest)} of these {len(at_highest)} cells the learning rate is the '
               'highest of the three that were tried.')
    if name in FIGURES and name != 'cross':
        yield f'\n![{grid.title.partition(", ")[0]}](../assets/{name}.png)'
    if name.startswith('ablation'):
        yield from effects(name)


def cell_text(name, row, column):
    """Trained lengths, twice the length, the longest that holds, and the rate if it was chosen."""
    cell = cells.get((name, row, column))
    if not cell:
        return 'not run yet'
    rate_was_chosen = not plan.piece(name, row, column)[2]
    rate = [f'at {cell["config"]["lr"]:g}'] if rate_was_chosen else []
    last = 'reach' if 'vipe' in name else 'holds'
    return '<br>'.join([*(shown(cell, what) for what in ('trained', 'twice', last)), *rate])


def effects(name):
    """What each part of a factorial is worth: differences of rows that differ in it alone."""
    rows, columns = GRIDS[name].rows, GRIDS[name].columns
    columns = [c for c in columns if all((name, row, c) in cells for row in rows)]
    if not columns:
        return
    yield ('\nThe effect of changing one part, each row at its own learning rate: points of exact '
           'match, mean over all pairs of rows that differ in it alone (from the least to the '
           'most):\n')
    header = [f'{column}, {what}' for column in columns for what in ('trained', 'longer')]
    body = []
    labels = [row.split(', ') for row in rows]
    for place, values in enumerate(zip(*labels)):
        first, *others = dict.fromkeys(values)
        for other in others:
            pairs = []
            for label in labels:
                if label[place] == first:
                    changed = [*label[:place], other, *label[place + 1:]]
                    pairs.append((', '.join(label), ', '.join(changed)))
            gains = [gain(name, column, what, pairs)
                     for column in columns for what in ('trained', 'twice')]
            body.append([f'{other} instead of {first}', *gains])
    yield from markdown(['', *header], body)


def gain(name, column, what, pairs):
    """Mean, least and largest difference over pairs of rows; pairs that diverged are left out."""
    def mean(row):
        values = cells[name, row, column][what]
        return 100 * statistics.mean(values) if values else math.nan

    gains = [mean(b) - mean(a) for a, b in pairs]
    gains = [x for x in gains if not math.isnan(x)]
    if not gains:
        return '-'
    return (f'{round(statistics.mean(gains)):+d} ({round(min(gains)):+d} to '
            f'{round(max(gains)):+d})')


def parameters(row):
    """A row's parameters in the cross table, on the task with the smallest vocabulary."""
    argv = shlex.split(f'{plan.COLUMNS["iterative"][0]} {plan.ROWS[row]}')
    model = Transformer(train.make_config(config.read(train.Config, argv)))
    return sum(p.numel() for p in model.parameters())


BY_LENGTH = ('parity', 'polynomial', 'string_copy_prism', 'polynomial_prism', 'parity_prism',
             'string_reverse_prism', 'dyn_str_cpy_prism', 'odds_first_prism', 'bucket_sort_prism',
             'stack_prism', 'multiplication_to_8', 'scan_cot_prism', 'stdlib', 'jsb', 'scan')


def by_length_table(name):
    """The runs of one file as train.py prints a sweep, and their commands."""
    cfg, rows = claims.by_length(name)
    if not rows:
        yield 'Not run yet.'
        return
    yield '```'
    yield from '\n'.join(report.table(cfg, rows)).splitlines()
    yield '```'
    yield from made_by(name)


def made_by(name):
    """The commands behind results/NAME.jsonl, folded away."""
    yield '\n<details><summary>Commands</summary>\n\n```'
    yield from dict.fromkeys(run['command'] for run in plan.runs(name))
    yield '```\n</details>'


def first_run():
    """The strips of README's first run, RoPE on parity, as train.py prints them."""
    cfg, rows = claims.by_length('parity_rope')
    if not rows:
        yield 'Not run yet.'
        return
    scores = rows[0][1]
    rows = [('exact match', scores, 'exact'), ('tokens', scores, 'token'),
            ('last state', scores, 'last')]
    yield '```'
    yield from '\n'.join(report.strips(cfg, rows)).splitlines()
    yield '```'


def why_table():
    """What the probes of README's ten minutes find in each seed of RoPE on parity."""
    header = ['', 'exact match at 16, 17, 18, 20', 'squeezed', 'far keys hidden', 'head',
              'its weight on the right bit at 16, 17, 20, 32', 'it prefers the distance']
    body = []
    for seed in range(4):
        folder = f'seed_{seed}'
        if not plan.run_of('parity_rope', folder, f'configs/parity_rope.py --seeds={seed}'):
            continue
        found = [plan.asked(name, f'out/parity_rope/{folder}')
                 for name in ('alignment', 'squeeze', 'tuning')]
        if None in found:
            continue
        alignment, squeeze, tuning = found
        head = alignment['summary']['head']
        weight = {row['length']: row[head] for row in alignment['rows']}
        right = {row['length']: row for row in squeeze['rows']}
        peak, = (row['peak'] for row in tuning['rows'] if f'{row["layer"]}.{row["head"]}' == head)
        exact, squeezed, hidden = (
            ', '.join(f'{100 * right[n][key]:.0f}' for n in (16, 17, 18, 20))
            for key in ('exact', 'exact, squeezed', 'exact, hidden'))
        weights = [f'{weight[n]:.2f}' for n in (16, 17, 20, 32)]
        body.append([f'seed {seed}', exact, squeezed, hidden, head, ', '.join(weights),
                     f'{peak:.0f}'])
    yield from markdown(header, body)


def seeds_table():
    """The spread over seeds trained together, and over the same seeds trained one by one."""
    cfg, _ = claims.by_length('seeds')
    if not cfg:
        yield 'Not run yet.'
        return
    all_scores = [plan.by_seed(run) for run in plan.runs('seeds')]
    together = next(scores for scores in all_scores if len(scores) > 1)
    alone = {seed: x for scores in all_scores if len(scores) == 1 for seed, x in scores.items()}
    cfg.seeds = list(together)
    yield '```'
    for label, scores in (('together', together), ('alone', alone)):
        yield f'{label:11}{report.over_seeds(cfg, scores)}'
    yield '```'


FLIP_FLOP = {                       # published errors (Yang et al. 2025): as trained, 98 % ignored
    'rope': (6.9, 40.3), 'stickbreaking': (9.6, 38.9), 'fox': (8.3, 36.3), 'path': (0.0, 0.0001)}


def flip_flop_table():
    """Share of wrong bits by encoding and by how much is to be ignored."""
    errors = {}
    for run in plan.runs('flip_flop'):
        ignored = int(run['config']['task'].partition('=')[2] or 80)
        scores = plan.by_seed(run).values()
        errors[run['config']['pe'], ignored] = [100 * (1 - by_length[64]['token'])
                                                for by_length in scores]
    header = ['percent of bits wrong', '80 % ignored, as trained', '98 %', '10 %',
              'published, 80 % / 98 %']
    body = []
    for pe in dict.fromkeys(pe for pe, _ in errors):
        cells_of_pe = [', '.join(f'{x:.2g}' for x in errors.get((pe, ignored), []))
                       for ignored in (80, 98, 10)]
        published = ' / '.join(f'{x:g}' for x in FLIP_FLOP.get(pe, ()))
        body.append([f'`{pe}`', *cells_of_pe, published])
    yield from markdown(header, body)
    yield from made_by('flip_flop')


def one_step(run):
    """The size of a run's training step, as text."""
    return '{n_layer} layers, d={d_model}, batch {batch_size}, {train_len} tokens'.format(
        **run['config'])


def speed_table():
    """What --benchmark measured of several seeds in one step."""
    speed = plan.runs('speed')
    counts = max(([step['seeds'] for step in run['steps']] for run in speed), key=len, default=[])
    together = ['2 seeds together, time over one by one', *map(str, counts[2:])]
    body = []
    for run in speed:
        alone, *others = run['steps']
        ratios = [f'{step["ratio"]:.2f}' for step in others]
        ratios += [''] * (len(counts) - 1 - len(others))
        body.append([one_step(run), f'{1e3 / alone["ms"]:.1f}', *ratios])
    yield from markdown(['one step', 'steps/s of one seed', *together], body)


def compile_table():
    """What --benchmark measured of torch.compile and of CUDA graphs: the last step of a line is
    with neither."""
    body = []
    for run in [*plan.runs('compile'), *plan.runs('speed_gpu')]:
        config, (alone, *together, plain) = run['config'], run['steps']
        many = [f'{step["seeds"]}: {step["ms"]:.1f}' for step in together]
        body.append([run['hardware'], f'{config["pe"]}, {config["dtype"]}, {one_step(run)}',
                     f'{plain["ms"]:.1f}', f'{alone["ms"]:.1f}', f'{plain["ratio"]:.2f}',
                     '<br>'.join(many)])
    yield from markdown(['on', 'one step', 'launch by launch, ms', 'compiled or recorded', 'ratio',
                         'of several seeds together, ms'], body)


def blocks_table():
    """Times of the attention kernels on a GPU, with the blocks of kernels.BLOCKS and the best."""
    times = {}
    for row in itertools.chain.from_iterable(run['rows'] for run in plan.runs('blocks')):
        blocks = tuple(row[key] for key in ('M', 'N', 'warps', 'stages'))
        times.setdefault((row['encoding'], row['D'], row['T']), {}).setdefault(
            row['kernel'], {})[blocks] = row['ms']
    body = []
    for (encoding, D, T), by_kernel in times.items():
        width = 2 * D if encoding == 'pope' else D
        now, best = [], []
        for kernel, found in by_kernel.items():
            own = kernels.default_blocks(f'{kernel}_kernel', width, torch.bfloat16, kernels.LARGE)
            now.append(found[own])
            best.append(min(found.values()))
        texts = [f'{a:.2f} ({b:.2f})' for a, b in zip([*now, sum(now)], [*best, sum(best)])]
        body.append([encoding, str(D), f'{T:,}', *texts])
    yield from markdown(['attention', 'D', 'tokens', 'forward, ms (the best)', 'queries', 'keys',
                         'together'], body)


def kernels_table():
    """What `python kernels.py` measured on a GPU."""
    body = [[row['inputs'], row['what'], f'{row["forward_ms"]:.2f}', f'{row["both_ms"]:.2f}',
             f'{row["ratio"]:.2f}'] for run in plan.runs('kernels') for row in run['rows']]
    yield from markdown(['inputs', 'what', 'forward, ms', 'with backward', 'ratio'], body)


# --------------------------------------------------------------------------------------------------
# figures

def cross_figure(plt, name):
    """The cross table's means as colours: trained lengths on the left, twice that on the right."""
    rows, columns = found_axes(name)
    fig, axes = plt.subplots(1, 2, figsize=(15, 2.2 + 0.36 * len(rows)), layout='constrained',
                             sharey=True)
    for ax, what, title in zip(axes, ('trained', 'twice'),
                               ('on the trained lengths', 'at twice the length')):
        for (j, column), (i, row) in itertools.product(enumerate(columns), enumerate(rows)):
            cell = cells.get((name, row, column))
            if not cell:
                ax.text(j, i, 'not run', ha='center', va='center', color='0.7', fontsize=9)
                continue
            of_column = [c for key, c in cells.items() if (key[0], key[2]) == (name, column)]
            text, shade = colour(cell, what, of_column)
            ax.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, color=plt.cm.viridis(shade)))
            ax.text(j, i, text, ha='center', va='center', fontsize=12,
                    color='white' if shade < 0.6 else 'black')
        ax.set_title(title, fontsize=14)
        ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        corpora = {key[2] for key, cell in cells.items() if key[0] == name and cell['corpus']}
        ax.set_xticks(range(len(columns)),
                      [column + ',\nperplexity' * (column in corpora) for column in columns],
                      rotation=35, ha='right', fontsize=12)
        ax.set_yticks(range(len(rows)), rows, fontsize=12)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap='viridis'), ax=axes, shrink=0.8)
    bar.set_label('exact match (numbers: %); chorales, text: the\n'
                  'best perplexity of the column over this one', fontsize=12)
    return fig


def colour(cell, what, column):
    """A cell's mean as text, and its place on the scale from 0 to 1.

    Exact match, or the best trained perplexity of its column over its own.
    """
    if not cell[what]:
        return 'diverged', 0.0
    if not cell['corpus']:
        mean = statistics.mean(cell[what])
        return f'{100 * mean:.0f}', mean

    def perplexity(cell, what):
        return statistics.mean(math.exp(-x) for x in cell[what])

    here = perplexity(cell, what)
    best = min(perplexity(other, 'trained') for other in column if other['trained'])
    return f'{here:.{1 if here >= 10 else 2}f}', min(1.0, best / here)


def panels(plt, name):
    """A figure with a panel for each column of a grid: yields (axes, cell, style) of every cell."""
    columns = found_axes(name)[1]
    across = min(4, len(columns))
    down = math.ceil(len(columns) / across)
    fig, axes = plt.subplots(down, across, figsize=(1 + 3.4 * across, 3.2 * down), sharey=True,
                             squeeze=False, layout='constrained')
    for ax in axes.flat[len(columns):]:
        ax.remove()
    styles = {}
    for ax, column in zip(axes.flat, columns):
        ax.set(title=column, ylim=(-3, 103))
        for row in GRIDS[name].rows:
            if (name, row, column) in cells:
                grey = dict(color='0.4', ls=('-', '--', ':')[len(styles) % 3])
                style = styles.setdefault(row, report.style_of(row) or grey)
                yield ax, cells[name, row, column], style
    for ax in axes[:, 0]:
        ax.set_ylabel('exact match (%)')
    fig.legend(handles=[plt.Line2D([], [], **style) for style in styles.values()],
               labels=list(styles), loc='outside right upper', fontsize=8)


def draw_seeds(ax, x, scores, style):
    """The mean over seeds of scores [len(x)][seed], and each seed as a thin line."""
    width = max(1.2, 3.6 - 0.09 * len(ax.lines))  # earlier rows show behind later ones
    ax.plot(x, list(map(statistics.mean, scores)), marker='o', ms=2.5, lw=width, **style)
    ax.plot(x, scores, lw=0.6, alpha=0.8, **style)


def lengths_figure(plt, name):
    """Exact match by length, up to the last length at which anything is right; of ViPE's tasks the
    tokens right as well, dotted, up to twice the trained length."""
    last = {}
    for ax, cell, style in panels(plt, name):
        lengths = sorted(cell['lengths'])
        scores = [[100 * x['exact'] for x in cell['lengths'][n]] for n in lengths]
        draw_seeds(ax, lengths, scores, style)
        ax.axvline(max(cell['config']['train_lengths']), color='crimson', lw=1)
        right = [n for n, each in zip(lengths, scores) if max(each) >= 1]
        if name.startswith('vipe'):
            tokens = [100 * statistics.mean(x['token'] for x in cell['lengths'][n])
                      for n in lengths]
            ax.plot(lengths, tokens, lw=1.2, **style | dict(ls=':'))
            right.append(2 * max(cell['config']['train_lengths']))
        last[ax] = max([last.get(ax, 0), *right])
        ax.set_xlim(0, 1.1 * last[ax] + 1)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel('length; trained to the red line', fontsize=8)
    if name.startswith('vipe'):
        for left in filter(plt.Axes.get_ylabel, ax.figure.axes):
            left.set_ylabel('exact match; dotted: tokens (%)')
    return ax.figure


def draw_learning(ax, cell, style):
    """Exact match on the trained lengths in the course of training."""
    points = list(zip(*cell['curves']))           # [evaluation][seed]; none where all diverged
    steps = [point[0][0] for point in points]
    draw_seeds(ax, steps, [[100 * exact for _, exact, *_ in point] for point in points], style)
    ax.set_xlabel('step; problems of the trained lengths', fontsize=8)


def learning_figure(plt, name):
    """The same of every cell of a grid."""
    for ax, cell, style in panels(plt, name):
        draw_learning(ax, cell, style)
    return ax.figure


def scale_figure(plt, name):
    """The same of distance among 64 tokens, for the two scales at which embeddings start."""
    fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.2), sharey=True, layout='constrained')
    encodings = ('rope', 'nope', 'ape', 'ape+rope')
    for ax, std, more in zip(axes, ('0.1', '1'), ('', ', std 1')):
        ax.set(title=f'embeddings start with a std of {std}', ylim=(-3, 103))
        for pe in encodings:
            cell = cells.get((name, pe + more, 'distance:span=64'))
            if cell:
                draw_learning(ax, cell, report.style_of(pe) or dict(color='0.4'))
    axes[0].set_ylabel('exact match (%)')
    lines = [line for line in axes[0].lines if line.get_marker() == 'o']
    fig.legend(lines, encodings, loc='outside right upper', fontsize=8)
    return fig


def held_figure(plt, name):
    """The length up to which a run holds, in the course of training."""
    for ax, cell, style in panels(plt, name):
        points = list(zip(*cell['curves']))       # as above
        steps = [point[0][0] for point in points]
        held = [[length for _, _, _, length, _ in point] for point in points]
        draw_seeds(ax, steps, held, style)
        longest = max(cell['config']['train_lengths'])
        furthest = max(max(line.get_ydata()) for each in ax.figure.axes for line in each.lines)
        ax.set(xlabel='step', ylim=(0, max(1.1 * furthest, 1.5 * longest)))
        ax.axhline(longest, color='crimson', lw=1)
    ax.figure.axes[0].set_ylabel('longest length held')
    return ax.figure


def heads_figure(plt, name):
    """RoPE and NoPE, trained with dropout, without each of their heads; seed 0."""
    found = {pe: claims.probed('ablate', 'toeplitz_64', f'{pe}, dropout', 'distance:span=64')
             for pe in ('rope', 'nope')}
    if None in found.values():
        return None
    panels = []
    for layer in range(len(found['rope']['rows'])):
        lines = []
        for pe, line in found.items():
            base, lost = line['summary']['base'], claims.drops(line)[layer]
            heads = range(1, len(lost) + 1)
            lines.append((pe, heads, [base - x for x in lost], dict(marker='o')))
            lines.append((f'{pe}, all heads', heads, [base] * len(heads),
                          report.style_of(pe) | dict(ls=':')))
        panels.append(core.Curves(f'layer {layer + 1}', 'head that is off', 'exact match (%)',
                                  lines, settings=dict(ylim=(-3, 103))))
    title = 'The Toeplitz study, Figure 9: distance among 64 tokens, with dropout, seed 0'
    return core.Figure(title, panels).draw(plt)


FIGURES = {
    'cross': cross_figure,
    'toeplitz': learning_figure,
    'toeplitz_64': scale_figure,
    'heads': heads_figure,
    'vipe_long': held_figure,
} | dict.fromkeys(('indirect', 'vipe', 'vipe_seeds', 'vipe_steps', 'prism'), lengths_figure)


def draw_figures():
    """Draw every figure in assets/ that is made from results/*.jsonl."""
    plt = report.pyplot()
    if plt is None:
        raise UserError('the figures want matplotlib: pip install matplotlib')
    begun = {key[0] for key in cells} | {'heads'}
    for name in begun & FIGURES.keys():
        fig = FIGURES[name](plt, name)
        if fig:
            fig.savefig(os.path.join(plan.ROOT, f'assets/{name}.png'), dpi=110)
    for dial, name in ((board.DIAL, 'board'), (board.QUARTER, 'board_quarter')):
        on_board = board.whole_columns(board.find(dial))
        if on_board:
            path = os.path.join(plan.ROOT, f'assets/{name}.png')
            board.figure(plt, on_board).savefig(path, dpi=90)
    for name in filter(plan.runs, ('parity', 'stdlib')):
        path = os.path.join(plan.ROOT, f'assets/{name}.png')
        cfg, rows = claims.by_length(name)
        if name == 'parity':
            by_label = {}
            for i, (label, scores, _) in enumerate(rows):
                by_label.setdefault(label, {})[i] = scores
            rows = [(label, report.mean_scores(runs), 'exact') for label, runs in by_label.items()]
        report.figure(path, cfg, rows, cfg.task)


# --------------------------------------------------------------------------------------------------
# run

def run(minutes, jobs, ask=ask):
    """Run what ask() puts into plan.missing, `jobs` at a time, until the minutes are over or
    Ctrl-C.

    What is cut off goes on from its checkpoint next time. Returns whether a piece has failed. Edit
    no code meanwhile: pieces take modules from this process's memory, but programs from their file.
    """
    deadline = time.time() + 60 * minutes
    lock = take_lock()
    torch.set_num_threads(1)                      # a fork could not use this process's threads
    importlib.import_module('torch._dynamo')      # which a fork's first optimizer imports
    report.pyplot()
    running, ended = [], []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            for piece in [piece for piece in running if piece.has_ended()]:
                running.remove(piece)
                ended.append(piece.argv)
                piece.finish()
            progress = ask()
            started = [*ended, *(piece.argv for piece in running)]
            waiting = [argv for argv in plan.missing if argv not in started and not lacks(argv)]
            if time.time() > deadline or not (waiting or running):
                break
            for argv in waiting[:jobs - len(running)]:
                left = progress or f'{len(waiting)} or more to run'
                print(f'{time.strftime("%H:%M:%S")} {left}; next {plan.out_dir(argv)}', flush=True)
                running.append(Piece(argv, jobs))
            while time.time() < deadline and not any(piece.has_ended() for piece in running):
                time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    finally:
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)
        for piece in running:
            piece.process.terminate()             # it saves now
        for piece in running:
            piece.finish(cut_off=True)
        lock.close()
    ask()
    ended += [piece.argv for piece in running if piece.argv not in plan.missing]
    for path in sorted(set(filter(None, map(lacks, plan.missing)))):
        print(f'left out what needs {path}: put it there')
    failed = [argv for argv in ended if argv in plan.missing]
    for argv in failed:
        print(f'left no line in results/: {plan.out_dir(argv)}; if nothing above says why, delete '
              'that folder')
    left = f'{len(plan.missing)} or more to run' if plan.missing else 'nothing left to run'
    print(f'{len(ended) - len(failed)} done, {len(failed)} failed, {left}')
    return bool(failed)


def take_lock():
    """An open file that one `run` at a time holds."""
    try:
        import fcntl
    except ImportError:
        raise UserError('`run` locks its folder, which Python cannot do on Windows: run the '
                        'command that `evidence.py` names by hand, then the next') from None
    os.makedirs(os.path.join(plan.ROOT, 'out'), exist_ok=True)
    lock = open(os.path.join(plan.ROOT, 'out/evidence.lock'), 'w')
    os.set_inheritable(lock.fileno(), True)                # pieces hold it, too
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError('another `evidence.py run` is at work in this folder') from None
    return lock


def lacks(argv):
    """The file that a piece needs and that is not there, or None."""
    for arg in argv:
        flag, _, path = arg.partition('=')
        if flag in ('--data', '--hf', '--text'):
            if not os.path.exists(os.path.join(plan.ROOT, path)):
                return path
    return None


class Piece:
    """A process for a missing piece, one of `jobs` that share the CPU's cores.

    It goes on from a checkpoint of the very same piece. It holds the lock, too: another `run` must
    wait for it even if this program is killed.
    """

    def __init__(self, argv, jobs):
        self.argv = argv
        self.errors = tempfile.TemporaryFile()
        resume = ['--resume'] if argv[0] == 'train.py' and same_piece_begun(argv) else []
        threads = int(os.environ.get('OMP_NUM_THREADS') or max(1, os.cpu_count() // jobs))
        self.process = multiprocessing.get_context('fork').Process(
            target=run_program, args=([*argv, *resume], threads, self.errors))
        self.process.start()

    def has_ended(self):
        return not self.process.is_alive()

    def finish(self, cut_off=False):
        """Wait; store a probe's line, or say how the piece failed (train.py stores its own)."""
        self.process.join()
        status = self.process.exitcode
        if status == 0 and self.argv[0] == 'probe.py':
            store_probe(self.argv)
        elif status and not cut_off:
            self.errors.seek(0)
            print(f'status {status}: python {shlex.join(self.argv)}')
            print(self.errors.read().decode(errors='replace').strip())


def run_program(argv, threads, errors):
    """`python argv` in this process, a fork that has imported what it needs: half of the time of a
    short run."""
    os.setsid()                                            # a Ctrl-C is for the parent alone
    os.chdir(plan.ROOT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors.fileno(), 2)
    if torch.cuda.is_available():                          # a fork cannot use CUDA
        os.execv(sys.executable, [sys.executable, *argv])
    sys.stdout, sys.stderr = (open(fd, 'w', closefd=False) for fd in (1, 2))
    os.environ['OMP_NUM_THREADS'] = str(threads)           # or train.py chooses the number
    torch.set_num_threads(threads)
    sys.argv = argv
    runpy.run_path(argv[0], run_name='__main__')


def same_piece_begun(argv):
    """Whether the folder has a checkpoint of these very flags. From now on it belongs to them: what
    other flags left there is deleted."""
    folder = os.path.join(plan.ROOT, plan.out_dir(argv))
    path = os.path.join(folder, 'piece')
    same = False
    if os.path.exists(path):
        with open(path) as f:
            same = f.read() == shlex.join(argv)
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
    checkpoint.make_folder(folder)
    checkpoint.write(path, shlex.join(argv))
    return same and os.path.exists(os.path.join(folder, 'ckpt.pt'))


def store_probe(argv):
    """Append a line about a probe that has just been made."""
    with open(os.path.join(plan.ROOT, plan.out_dir(argv), f'probe_{argv[1]}.json')) as f:
        found = json.load(f)
    line = dict(probe=argv[1], command='python ' + shlex.join(argv)) | found
    line |= report.machine(seeds.pick_device(train.Config()))
    checkpoint.append(os.path.join(plan.ROOT, 'results/probes.jsonl'), json.dumps(line) + '\n')


# --------------------------------------------------------------------------------------------------
# readme and the program

def blocks():
    """{name: lines} of every generated block, in the order of the plan."""
    tables = {name: grid_table(name) for name in GRIDS}
    tables |= {name: by_length_table(name) for name in BY_LENGTH}
    return tables | dict(
        first_run=first_run(), why=why_table(), seeds=seeds_table(),
        flip_flop=flip_flop_table(), speed=speed_table(),
        compile=compile_table(), kernels=kernels_table(),
        blocks=blocks_table(),
        perturb=claims.perturb_table(), claims=claims.claims_table(), heads=claims.heads_table(),
        stops=claims.stops_table(), goal=claims.goal_table(), board=board.block(),
        board_front=board.front())


def readme():
    """{path: text} of both READMEs with each block between its marks made anew."""
    texts = {}
    for path in ('README.md', 'results/README.md'):
        with open(os.path.join(plan.ROOT, path)) as f:
            texts[path] = f.read()
    for name, lines in blocks().items():
        start, end = f'<!-- {name} -->\n', f'<!-- end of {name} -->\n'
        block = ''.join(f'{line}\n' for line in lines)
        homes = [path for path, text in texts.items() if end in text.partition(start)[2]]
        if not homes:
            raise UserError(f'no README has the marks <!-- {name} --> and '
                                  f'<!-- end of {name} -->: put both where the table belongs')
        for path in homes:
            before, _, rest = texts[path].partition(start)
            texts[path] = before + start + block + end + rest.partition(end)[2]
    return texts


def main(argv):
    """The program; returns the exit status."""
    if config.wants_help(argv):
        print(board.__doc__ if argv[0] == 'board' else __doc__)
        return 0
    jobs = 4 if torch.cuda.is_available() else os.cpu_count()
    if argv[:1] == ['run'] and re.fullmatch(r'(\d+|\d*\.\d+)( [1-9]\d*)?', ' '.join(argv[1:])):
        return run(float(argv[1]), int(argv[2]) if len(argv) == 3 else jobs)
    if argv[:1] == ['board']:
        return board.play(*board.options(argv[1:]), functools.partial(run, math.inf, jobs))
    if argv not in ([], ['readme']):
        raise UserError(USAGE)
    ask()
    if argv == ['readme']:
        texts = readme()
        draw_figures()
        for path, text in texts.items():
            checkpoint.write(os.path.join(plan.ROOT, path), text)
        return 0
    for name, grid in GRIDS.items():
        there = sum(key[0] == name for key in cells)
        print(f'{name:16}{there:4} of {len(grid.rows) * len(grid.columns)} cells')
    if plan.missing:
        print(f'\n{len(plan.missing)} or more pieces to run, the first: '
              f'python {shlex.join(plan.missing[0])}')
    else:
        print('\nnothing is missing')
    return 0


if __name__ == '__main__':
    config.run(main)
