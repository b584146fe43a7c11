"""What a run found: tables, figures, and its line in results/.

scores: {length: {exact, token, last, n}}, for a corpus with `loss` as well (train.evaluate).
by_seed: {seed: scores}.
"""
import contextlib
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata

import torch

import pe as encodings
from engine import checkpoint as files

# --------------------------------------------------------------------------------------------------
# numbers

def summary(cfg, scores, metric='exact'):
    """(mean over the trained lengths, mean over longer ones, the length up to which a run holds).

    Means are over problems. A run holds up to the last length before the first below 0.95.
    """
    def mean(lengths):
        sizes = [scores[n].get('n', 1) for n in lengths]
        total = sum(size * scores[n][metric] for size, n in zip(sizes, lengths))
        return total / sum(sizes) if lengths else None

    longest = max(cfg.train_lengths)
    good = list(itertools.takewhile(lambda n: scores[n][metric] >= 0.95, sorted(scores)))
    trained = [n for n in scores if n in cfg.train_lengths]
    longer = [n for n in scores if n > longest]
    return mean(trained), mean(longer), good[-1] if good else 0


def percent(x):
    """A share as text; - if there is none."""
    return '-' if x is None else f'{100 * x:.1f} %'


def context_losses(cfg, scores):
    """Of a corpus: [(length, loss)] in the longest contexts trained on and evaluated."""
    lengths = sorted(scores)
    trained = [n for n in lengths if n <= max(cfg.train_lengths)] or lengths
    return [(n, scores[n]['loss']) for n in sorted({trained[-1], lengths[-1]})]


def title(cfg, model, device, ranks):
    """The line that begins a training."""
    size = sum(p.numel() for p in model.parameters())
    processes = f', {ranks.size} processes' if ranks.size > 1 else ''
    many = f'{len(cfg.seeds)} seeds' if len(cfg.seeds) > 1 else f'seed {cfg.seeds[0]}'
    return f'{size:,} parameters on {device}{processes}, {many}'


def brief(cfg, scores):
    """summary() as one line."""
    if cfg.the_task.corpus:
        return ', '.join(f'loss {loss:.4f} (perplexity {math.exp(loss):.2f}) in contexts of {n}'
                         for n, loss in context_losses(cfg, scores))
    trained, longer, holds = summary(cfg, scores)
    return (f'exact match {percent(trained)} on trained lengths, {percent(longer)} beyond; '
            f'holds to {holds or "none"}')


def mean_scores(by_seed):
    """{length: scores}, each the mean over seeds."""
    runs = list(by_seed.values())
    return {n: {key: sum(run[n][key] for run in runs) / len(runs) for key in first}
            for n, first in runs[0].items()}


def evaluations(cfg, checkpoint):
    """{seed: [{step, lengths: scores}]} of the evaluations that saw all cfg.eval_lengths."""
    return {seed: [e for e in entry['evals'] if set(cfg.eval_lengths) <= e['lengths'].keys()]
            for seed, entry in checkpoint['seeds'].items() if 'failed' not in entry}


def top(cfg, checkpoint):
    """by_seed: for each length and score, the mean of its cfg.top_evals best evaluations."""
    found = {}
    for seed, evals in evaluations(cfg, checkpoint).items():
        if not evals:
            continue
        found[seed] = {n: {} for n in cfg.eval_lengths}
        for n in cfg.eval_lengths:
            for key in ('exact', 'token', 'last'):
                values = sorted((e['lengths'][n][key] for e in evals), reverse=True)
                found[seed][n][key] = round(statistics.mean(values[:cfg.top_evals]), 6)
    return found


def over_seeds(cfg, by_seed):
    """One line on the spread over seeds."""
    def mean_std(xs, scale=1, digits=4):
        mean, std = scale * statistics.mean(xs), scale * statistics.stdev(xs)
        return f'{mean:.{digits}f} +- {std:.{digits}f}'

    if cfg.the_task.corpus:
        runs = [dict(context_losses(cfg, scores)) for scores in by_seed.values()]
        losses = [f'loss {mean_std([run[n] for run in runs])} in contexts of {n}' for n in runs[0]]
        return f'{len(runs)} seeds: ' + ', '.join(losses)

    def spread(xs):
        return '-' if None in xs else f'{mean_std(xs, 100, 1)} %, best {100 * max(xs):.1f} %'

    trained, longer, _ = zip(*(summary(cfg, scores) for scores in by_seed.values()))
    learned = sum(x >= 0.85 for x in trained if x is not None)
    return (f'{len(by_seed)} seeds: exact match on trained lengths {spread(trained)}; '
            f'beyond {spread(longer)}; '
            f'{learned} of {len(cfg.seeds)} reach 85 % on trained lengths')


# --------------------------------------------------------------------------------------------------
# tables

def strips(cfg, rows):
    """Lines of a table: for each (label, scores, metric) a character per length."""
    longest = max(cfg.train_lengths)
    every = math.ceil(len(rows[0][1]) / 64)
    lengths = sorted(rows[0][1])[::every]
    unicode = (sys.stdout.encoding or '').lower().startswith('utf')
    shades, bar = ('·▁▂▃▄▅▆▇█', '│') if unicode else ('.12345678', '|')
    inside = sum(n <= longest for n in lengths)
    width = max(len(label) for label, _, _ in rows) + 2

    def mark(text, sign):
        return text[:inside] + sign + text[inside:]

    ticks = [' '] * len(lengths)
    for i, n in enumerate(lengths):
        start = max(0, i + 1 - len(str(n)))                # ends above its own column
        end = start + len(str(n))
        wanted = i in (0, inside - 1) or i % 8 == 7
        if wanted and set(ticks[max(0, start - 1):end]) == {' '}:
            ticks[start:end] = str(n)
    yield ' ' * width + mark(''.join(ticks), ' ') + '   trained    longer  holds to'
    for label, scores, metric in rows:
        trained, longer, holds = summary(cfg, scores, metric)
        strip = mark(''.join(shades[int(8 * scores[n][metric] + 1e-9)] for n in lengths), bar)
        yield (f'{label:{width}}{strip}   {percent(trained):>7}   {percent(longer):>7}  '
               f'{holds or "none":>8}')
    if every > 1:
        yield f'\n(every {every}th length is shown)'
    yield (f'\n{shades[0]} below 12.5 %, {shades[-1]} all right; {bar} ends the lengths trained '
           'on; holds to: the last length before one below 95 %')


def print_table(rows):
    """Print dictionaries of the same keys as a table."""
    lines = [list(rows[0])] + [[str(x) for x in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *cells in lines:
        cells = [f'{cell:>{width}}' for cell, width in zip(cells, widths[1:])]
        print('  '.join([f'{first:{widths[0]}}', *cells]))


def evenly(items, count):
    """At most `count` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def perplexities(cfg, rows):
    """Lines of a corpus's table: exp(mean loss) by context length for each (label, scores)."""
    shown = evenly(sorted(rows[0][1]), 12)
    width = max(len(label) for label, _ in rows) + 2
    longest = max(cfg.train_lengths)

    def line(label, cells):
        text = f'{label:{width}}'
        for i, (n, cell) in enumerate(zip(shown, cells)):
            ends_trained = i and n > longest >= shown[i - 1]
            text += (' |' if ends_trained else '') + f'{cell:>9}'
        return text

    yield line('context', shown)
    for label, scores in rows:
        yield line(label, [f'{math.exp(scores[n]["loss"]):.3f}' for n in shown])


def report_corpus(cfg, by_seed):
    """report() of a corpus."""
    scores = mean_scores(by_seed)
    rows = [('perplexity', scores)]
    if len(by_seed) > 1:
        rows += [(f'seed {seed}', run) for seed, run in by_seed.items()]
    note = ' (| ends the lengths trained on)' if len(scores) > 1 else ''
    print(f'\n{cfg.task} with {cfg.pe}: the same held-out text in contexts of every length{note}')
    print('\n'.join(perplexities(cfg, rows)))
    print(', '.join(f'{loss:.4f} nats, {loss / math.log(2):.4f} bits and '
                    f'{percent(scores[n]["token"])} right per token in contexts of {n}'
                    for n, loss in context_losses(cfg, scores)))
    size = max(map(len, cfg.the_task.of_part('test')))
    if size < max(cfg.eval_lengths):
        print(f'no held-out document is longer than {size} tokens: longer contexts are cut there')
    if len(by_seed) > 1:
        print(over_seeds(cfg, by_seed))


METRICS = ('exact match', 'exact'), ('tokens', 'token'), ('last state', 'last')


def report(cfg, by_seed, top_evals=None):
    """Print the final table of a run: the mean over seeds, each seed, the top evaluations."""
    if cfg.the_task.corpus:
        return report_corpus(cfg, by_seed)
    scores = mean_scores(by_seed)
    rows = [(label, scores, metric) for label, metric in METRICS]
    if len(by_seed) > 1:
        rows += [(f'exact, seed {seed}', run, 'exact') for seed, run in by_seed.items()]
    if top_evals:
        rows.append((f'mean of top {cfg.top_evals}', mean_scores(top_evals), 'exact'))
    many = f'{len(by_seed)} seeds' if len(by_seed) > 1 else '1 seed'
    per_length = scores[cfg.eval_lengths[0]]['n']
    print(f'\n{cfg.task} with {cfg.pe}, {many}, {per_length:.0f} held-out problems per length')
    print('\n'.join(strips(cfg, rows)))
    if len(by_seed) > 1:
        print(over_seeds(cfg, by_seed))
    longest = max(cfg.train_lengths)
    inside = [n for n in scores if n <= longest]
    beyond = [n for n in scores if n > longest]
    columns = evenly(inside, 4) + evenly(beyond[:4], 4) + evenly(beyond[4:], 4)
    print('\nlength      ' + ''.join(f'{n:>7}' for n in columns))
    for label, metric in METRICS:
        print(f'{label:12}' + ''.join(f'{100 * scores[n][metric]:7.1f}' for n in columns) + '  %')


# --------------------------------------------------------------------------------------------------
# figures

def pyplot():
    """matplotlib.pyplot that draws into files; None if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    return plt


COLOURS = ('#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #000000 '
           '#8b1a1a #6a3d9a #fa8072 #9acd32 #ff1493 #00b3a4 #8c6d31').split()


def style_of(name):
    """Colour and style of an encoding, the same in every figure; nothing for other names."""
    if name not in encodings.ENCODINGS:
        return {}
    number = list(encodings.ENCODINGS).index(name)
    return dict(color=COLOURS[number % len(COLOURS)], ls='--' if number % 2 else '-')


def draw_corpus(fig, ax, cfg, rows):
    """Perplexity by length of the context, a curve per row; seeds share a label and a colour."""
    labelled = set()
    for label, scores, _ in rows:
        lengths = sorted(scores)
        values = [math.exp(scores[n]['loss']) for n in lengths]
        name = None if label in labelled else label
        ax.plot(lengths, values, marker='o', ms=3, label=name, **style_of(label))
        labelled.add(label)
    ax.axvline(max(cfg.train_lengths), color='crimson', lw=1)
    ax.set(ylabel='perplexity of the same held-out text', yscale='log')
    ax.yaxis.set_minor_formatter('{x:g}')
    ax.yaxis.set_major_formatter('{x:g}')
    fig.legend(loc='outside right upper')                  # inside it would hide the red line


def draw_accuracy(fig, ax, cfg, rows):
    """A row of colours, by length, for each (label, scores, metric)."""
    lengths = sorted(rows[0][1])
    values = [[100 * scores[n][metric] for n in lengths] for _, scores, metric in rows]
    cells = ax.pcolormesh(range(len(lengths) + 1), range(len(rows) + 1), values, vmin=0, vmax=100,
                          cmap='viridis', edgecolors='white', linewidth=0.5)
    fig.colorbar(cells, label='right (%)')
    ax.axvline(sum(n <= max(cfg.train_lengths) for n in lengths), color='crimson', lw=2)
    ax.set_yticks([i + 0.5 for i in range(len(rows))], [label for label, _, _ in rows])
    every = max(1, len(lengths) // 12)
    ticks = [i for i, n in enumerate(lengths) if i == 0 or n % every == 0]
    ax.set_xticks([i + 0.5 for i in ticks], [lengths[i] for i in ticks])
    ax.invert_yaxis()


def figure(path, cfg, rows, title):
    """Draw (label, scores, metric) rows by length; say so if matplotlib is missing."""
    plt = pyplot()
    if plt is None:
        print(f'(pip install matplotlib, and {path} is drawn as well)')
        return
    corpus = cfg.the_task.corpus
    height = 4 if corpus else 1.6 + 0.28 * len(rows)
    fig, ax = plt.subplots(figsize=(8, height), layout='constrained')
    draw = draw_corpus if corpus else draw_accuracy
    draw(fig, ax, cfg, rows)
    what = 'length of the context' if corpus else 'problem length'
    ax.set(title=title, xlabel=f'{what}; trained to {max(cfg.train_lengths)} (red line)')
    fig.savefig(path, dpi=110)
    plt.close(fig)
    print(f'drew {path}')


def show(cfg, by_seed, top_evals=None):
    """The table and the figure of one run."""
    report(cfg, by_seed, top_evals)
    scores = mean_scores(by_seed)
    rows = [(label, scores, metric) for label, metric in METRICS]
    name = 'lengths.png'
    if cfg.the_task.corpus:
        rows = [(f'seed {seed}', run, 'loss') for seed, run in by_seed.items()]
        name = 'eval.png' if cfg.eval_only else name
    if top_evals:
        label = f'exact match, mean of top {cfg.top_evals}'
        rows.append((label, mean_scores(top_evals), 'exact'))
    figure(os.path.join(cfg.out_dir, name), cfg, rows, f'{cfg.task} with {cfg.pe}')


def show_sweep(cfg, out_dir, swept, by_label):
    """The table and the figure of a sweep: {label: by_seed}, the mean over seeds in a row each."""
    rows = [(label, mean_scores(by_seed), 'exact') for label, by_seed in by_label.items()]
    if not rows:
        return
    corpus = cfg.the_task.corpus
    what = 'perplexity by length of the context' if corpus else 'exact match by length'
    lines = perplexities(cfg, [row[:2] for row in rows]) if corpus else strips(cfg, rows)
    print(f'\n{what}, ' + ' x '.join(swept))
    print('\n'.join(lines))
    title = '' if 'task' in swept else cfg.task
    figure(os.path.join(out_dir, 'lengths.png'), cfg, rows, title)


# --------------------------------------------------------------------------------------------------
# results/*.jsonl

def git(*args):
    """The output of a git command in this repository."""
    argv = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), *args]
    return subprocess.run(argv, capture_output=True, text=True).stdout.strip()


def machine(device):
    """Versions, the commit of this program where git knows it, and the hardware."""
    found = dict(torch=torch.__version__, python=platform.python_version())
    for name in ('numpy', 'triton'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(OSError):                     # no git
        changed = git('status', '--porcelain', '-uno', '--', ':/*.py', ':(top,exclude)results')
        found['commit'] = git('rev-parse', '--short', 'HEAD') + ' and changes' * bool(changed)
    if device.type == 'cuda':
        return found | dict(hardware=torch.cuda.get_device_name())
    cpu = platform.machine() + ' CPU'
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as f:         # Linux
        cpu = dict(re.findall(r'(model name)\s*: (.*)', f.read())).get('model name', cpu)
    return found | dict(hardware=f'{cpu}, {torch.get_num_threads()} threads')


def provenance(cfg, command, device):
    """Configuration, command, versions and machine: what every line in results/ begins with."""
    return dict(config=asdict(cfg), command=command) | machine(device)


def append_result(cfg, by_seed, checkpoint, command, device):
    """Append a finished run to cfg.results. Seeds that diverged are named and have no scores."""
    curves = {}
    for seed in by_seed:
        curves[seed] = []
        for evaluation in checkpoint['seeds'][seed]['evals']:
            scores = evaluation['lengths']
            point = [loss for _, loss in context_losses(cfg, scores)] if cfg.the_task.corpus \
                else summary(cfg, scores)
            curves[seed].append([evaluation['step'], *point])
    found = dict(lengths=by_seed, curves=curves)
    if cfg.top_evals:
        found['top'] = top(cfg, checkpoint)
    if failed := files.failures(checkpoint):
        found['failed'] = failed
    files.append(cfg.results, json.dumps(provenance(cfg, command, device) | found) + '\n')
