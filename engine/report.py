"""What a run found: tables, figures, and its line in results/.

scores: {length: {exact, token, last, n}}, for a corpus with `loss` as well (train.evaluate).
by_seed: {seed: scores}. rows: [(label, scores, metric)], those of a table or a figure.
"""
import contextlib
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
from engine import checkpoint

# --------------------------------------------------------------------------------------------------
# numbers

def summary(cfg, scores, metric='exact'):
    """(mean over the trained lengths, mean over longer ones, the length up to which a run holds).

    Means are over problems. A run holds up to the last length before the first below 0.95.
    """
    def mean(lengths):
        sizes = [scores[n].get('n', 1) for n in lengths]
        right = sum(size * scores[n][metric] for size, n in zip(sizes, lengths))
        return right / sum(sizes) if lengths else None

    trained = [n for n in scores if n in cfg.train_lengths]
    longer = [n for n in scores if n > max(cfg.train_lengths)]
    holds = 0
    for n in sorted(scores):
        if scores[n][metric] < 0.95:
            break
        holds = n
    return mean(trained), mean(longer), holds


def percent(x):
    """A share as text; - if there is none."""
    return '-' if x is None else f'{100 * x:.1f} %'


def context_losses(cfg, scores):
    """Of a corpus: [(length, loss)] of the longest trained context and of the longest one."""
    lengths = sorted(scores)
    trained = [n for n in lengths if n <= max(cfg.train_lengths)] or lengths
    return [(n, scores[n]['loss']) for n in sorted({trained[-1], lengths[-1]})]


def title(cfg, model, device):
    """The line that begins a training."""
    size = sum(p.numel() for p in model.parameters())
    many = f'{len(cfg.seeds)} seeds' if len(cfg.seeds) > 1 else f'seed {cfg.seeds[0]}'
    return f'{size:,} parameters on {device}, {many}'


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


def over_seeds(cfg, by_seed):
    """One line on the spread over seeds, and on the best beyond the trained lengths among those
    that learned these to 85 % (ViPE, appendix B.1, experiment 2)."""
    def spread(xs, digits):
        return f'{statistics.mean(xs):.{digits}f} +- {statistics.stdev(xs):.{digits}f}'

    def spread_of_shares(xs):
        if None in xs:
            return '-'
        return f'{spread([100 * x for x in xs], 1)} %'

    runs = list(by_seed.values())
    if cfg.the_task.corpus:
        losses = [dict(context_losses(cfg, scores)) for scores in runs]
        return f'{len(runs)} seeds: ' + ', '.join(
            f'loss {spread([loss[n] for loss in losses], 4)} in contexts of {n}' for n in losses[0])
    trained, longer, _ = zip(*(summary(cfg, scores) for scores in runs))
    learned = [beyond for x, beyond in zip(trained, longer) if x is not None and x >= 0.85]
    best = max((x for x in learned if x is not None), default=None)
    return (f'{len(runs)} seeds: exact match on trained lengths {spread_of_shares(trained)}; '
            f'beyond {spread_of_shares(longer)}; {len(learned)} of {len(cfg.seeds)} reach 85 % on '
            f'trained lengths, the best of these {percent(best)} beyond')


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


def perplexities(cfg, rows):
    """Lines of a corpus's table: exp(mean loss) by context length for each row."""
    shown = sorted(rows[0][1])
    width = max(len(label) for label, *_ in rows) + 2
    longest = max(cfg.train_lengths)

    def line(label, cells):
        text = f'{label:{width}}'
        for i, (n, cell) in enumerate(zip(shown, cells)):
            ends_trained = i and n > longest >= shown[i - 1]
            text += (' |' if ends_trained else '') + f'{cell:>9}'
        return text

    yield line('context', shown)
    for label, scores, *_ in rows:
        yield line(label, [f'{math.exp(scores[n]["loss"]):.3f}' for n in shown])


def table(cfg, rows):
    """Lines of a table by length: perplexity for a corpus, accuracy for other tasks."""
    return perplexities(cfg, rows) if cfg.the_task.corpus else strips(cfg, rows)


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


def draw_perplexity(fig, ax, cfg, rows):
    """Perplexity by context length, a curve for each row; rows of one label share a style."""
    labels = [label for label, *_ in rows]
    for i, (label, scores, _) in enumerate(rows):
        lengths = sorted(scores)
        values = [math.exp(scores[n]['loss']) for n in lengths]
        name = label if labels.index(label) == i else None     # once in the legend
        ax.plot(lengths, values, marker='o', ms=3, label=name, **style_of(label))
    ax.axvline(max(cfg.train_lengths), color='crimson', lw=1)
    ax.set(ylabel='perplexity of the same held-out text', yscale='log')
    ax.yaxis.set_minor_formatter('{x:g}')
    ax.yaxis.set_major_formatter('{x:g}')
    fig.legend(loc='outside right upper')                  # inside it would hide the red line


def draw_accuracy(fig, ax, cfg, rows):
    """A strip of colours by length for each row."""
    lengths = sorted(rows[0][1])
    values = [[100 * scores[n][metric] for n in lengths] for _, scores, metric in rows]
    cells = ax.pcolormesh(range(len(lengths) + 1), range(len(rows) + 1), values, vmin=0, vmax=100,
                          cmap='viridis', edgecolors='white', linewidth=0.5)
    fig.colorbar(cells, label='right (%)')
    ax.axvline(sum(n <= max(cfg.train_lengths) for n in lengths), color='crimson', lw=2)
    ax.set_yticks([i + 0.5 for i in range(len(rows))], [label for label, *_ in rows])
    every = max(1, len(lengths) // 12)
    ticks = [i for i, n in enumerate(lengths) if i == 0 or n % every == 0]
    ax.set_xticks([i + 0.5 for i in ticks], [lengths[i] for i in ticks])
    ax.invert_yaxis()


def figure(path, cfg, rows, title):
    """Draw rows by length; say so if matplotlib is missing."""
    plt = pyplot()
    if plt is None:
        print(f'(pip install matplotlib, and {path} is drawn as well)')
        return
    if cfg.the_task.corpus:
        draw, height, length = draw_perplexity, 4, 'length of the context'
    else:
        draw, height, length = draw_accuracy, 1.6 + 0.28 * len(rows), 'problem length'
    fig, ax = plt.subplots(figsize=(8, height), layout='constrained')
    draw(fig, ax, cfg, rows)
    ax.set(title=title, xlabel=f'{length}; trained to {max(cfg.train_lengths)} (red line)')
    fig.savefig(path, dpi=110)
    plt.close(fig)
    print(f'drew {path}')


# --------------------------------------------------------------------------------------------------
# a run, a sweep

def show(cfg, by_seed):
    """Print the table of a run, the mean over seeds and each seed, and draw it."""
    task, scores = cfg.the_task, mean_scores(by_seed)
    if task.corpus:
        metrics = [('perplexity', 'loss')]
        held_out = 'the same held-out text in contexts of every length'
        if len(scores) > 1:
            held_out += ' (| ends the lengths trained on)'
    else:
        metrics = [('exact match', 'exact'), ('tokens', 'token'), ('last state', 'last')]
        held_out = f'{scores[cfg.eval_lengths[0]]["n"]:.0f} held-out problems per length'
    rows = [(label, scores, metric) for label, metric in metrics]
    seeds = '1 seed'
    if len(by_seed) > 1:
        label, metric = metrics[0]
        rows += [(f'{label}, seed {seed}', run, metric) for seed, run in by_seed.items()]
        seeds = f'{len(by_seed)} seeds'

    print(f'\n{cfg.task} with {cfg.pe}, {seeds}, {held_out}')
    print('\n'.join(table(cfg, rows)))
    if len(by_seed) > 1:
        print(over_seeds(cfg, by_seed))
    elif task.corpus:
        print(brief(cfg, scores))
    if task.corpus:
        longest = max(map(len, task.of_part('test')))
        if longest < max(cfg.eval_lengths):
            print(f'the longest held-out document has {longest} tokens: no context is longer')
    name = 'eval.png' if cfg.eval_only else 'lengths.png'
    figure(os.path.join(cfg.out_dir, name), cfg, rows, f'{cfg.task} with {cfg.pe}')


def show_sweep(cfg, out_dir, swept, by_label):
    """The table and the figure of a sweep, {label: by_seed}: a row each, the mean over seeds."""
    rows = [(label, mean_scores(by_seed), 'exact') for label, by_seed in by_label.items()]
    if not rows:
        return
    corpus = cfg.the_task.corpus
    what = 'perplexity by length of the context' if corpus else 'exact match by length'
    print(f'\n{what}, ' + ' x '.join(swept))
    print('\n'.join(table(cfg, rows)))
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
    about = dict(torch=torch.__version__, python=platform.python_version())
    for name in ('numpy', 'triton'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[name] = metadata.version(name)
    with contextlib.suppress(OSError):                     # no git
        changed = git('status', '--porcelain', '-uno', '--', ':/*.py', ':(top,exclude)results')
        about['commit'] = git('rev-parse', '--short', 'HEAD') + ' and changes' * bool(changed)
    if device.type == 'cuda':
        return about | dict(hardware=torch.cuda.get_device_name())
    cpu = platform.machine() + ' CPU'
    with contextlib.suppress(OSError), open('/proc/cpuinfo') as f:         # Linux
        cpu = dict(re.findall(r'(model name)\s*: (.*)', f.read())).get('model name', cpu)
    return about | dict(hardware=f'{cpu}, {torch.get_num_threads()} threads')


def append_line(cfg, command, device, **content):
    """Append a line to cfg.results: configuration, command, versions and machine, then content."""
    line = dict(config=asdict(cfg), command=command) | machine(device) | content
    checkpoint.append(cfg.results, json.dumps(line) + '\n')


def append_result(cfg, by_seed, state, command, device):
    """Append a finished run to cfg.results. Seeds that diverged are named and have no scores."""
    def point(scores):
        if cfg.the_task.corpus:
            return [loss for _, loss in context_losses(cfg, scores)]
        return *summary(cfg, scores), summary(cfg, scores, 'token')[0]

    curves = {seed: [[evaluation['step'], *point(evaluation['lengths'])]
                     for evaluation in state['seeds'][seed]['evals']] for seed in by_seed}
    failures = checkpoint.failures(state)
    failed = {'failed': failures} if failures else {}
    append_line(cfg, command, device, lengths=by_seed, curves=curves, **failed)
