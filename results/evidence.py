"""The evidence behind the README: what is there, what is missing, and the tables and pictures that are made of it.

    python results/evidence.py                 what is there and what is missing
    python results/evidence.py run 30          run the next missing pieces for 30 minutes, the most valuable first; the same command goes on
    python results/evidence.py readme          write the README's tables and figures anew from results/*.jsonl

A piece is one call of train.py; the line that it leaves in results/ holds its command, by which it is found again. The functions that make the tables ask
for their runs by found(): what that does not find is what is missing.
"""
import functools
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch

import train

missing = []                                                      # argvs of train.py asked for and not found, in that order


@functools.cache
def lines(name):
    """{command: run} of results/NAME.jsonl."""
    path = os.path.join(ROOT, f'results/{name}.jsonl')
    runs = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    return {run['command'].replace(' --resume', ''): run for run in runs}


def found(name, folder, flags):
    """The run in results/NAME.jsonl that these flags made, in out/NAME/FOLDER; None, and an entry in `missing`, if there is none yet."""
    argv = [*shlex.split(flags), f'--out_dir=out/{name}/{folder}', f'--results=results/{name}.jsonl']
    run = lines(name).get('python train.py ' + shlex.join(argv))
    if run is None:
        missing.append(argv)
    return run


def by_seed(*runs):
    """{seed: {length: scores}} of several runs of one configuration."""
    return {int(seed): {int(n): x for n, x in scores.items()} for run in runs for seed, scores in run['lengths'].items()}


def score(scores, lengths):
    """Exact match over all problems of these lengths; of a corpus minus the loss, so that more is better."""
    chosen = [scores[n] for n in lengths if n in scores]
    return sum(x.get('n', 1) * (-x['loss'] if 'loss' in x else x['exact']) for x in chosen) / sum(x.get('n', 1) for x in chosen)


# ---------------------------------------------------------------------------------------------------------------------
# the cross table: every encoding on every family of tasks. In a column all have the same width, layers and steps; the learning rate is chosen for each
# cell from RATES by what seed 0 gets on the trained lengths alone, and seeds 1 and 2 then train at it.

RATES = '1e-3', '2e-3', '4e-3'
ROWS = {name: f'--pe={name}' for name in ('rope', 'pope', 'vipe', 'nope', 'ape', 'alibi', 'prism', 'pope+vipe', 'ape+rope', 'mla', 't5', 'fire', 'yarn', 'vrope',
                                          'learned', 'random', 'shifted_ape')} | {'mla': '--pe=rope --attention=mla'}
SIZE = '--d_model=64 --n_layer=2 --n_head=2 --warmup_steps=100 --eval_interval=500'
COLUMNS = {                                                       # family: flags, longer lengths that stand for twice the trained one
    'indirect indexing': ('--task=indirect_indexing:letters=12:shift=2 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512', [12]),
    'iterative': ('--task=polynomial --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=1500 --batch_size=32 --n_eval=64 --n_test=512', [16]),
    'algorithmic': ('--task=string_reverse --train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps=1500 --batch_size=32 --n_eval=64 --n_test=512', [16]),
    'SCAN': ('--task=scan --train_lengths=1-22 --eval_lengths=1-48 --max_steps=1500 --batch_size=32 --n_eval=16 --n_test=256', range(24, 49)),
    'distance': ('--task=distance:span=16 --train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps=1000 --n_test=512', [32]),
    'counting': ('--task=trigger_count --train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps=1000 --n_test=512', [32]),
    'chorales': ('--task=jsb --data=data/Jsb16thSeparated.json --train_lengths=128 --eval_lengths=128,160,192,256,512 --max_steps=500 --batch_size=8 --n_eval=16', [256]),
    'text': ('--task=stdlib --train_lengths=64 --eval_lengths=64,80,96,128,256 --max_steps=500 --batch_size=16 --n_eval=8 --n_test=64', [128]),
}


def cell(row, column):
    """The runs of a cell at its chosen learning rate, of seed 0 and of seeds 1 and 2; None if one is missing."""
    flags, folder = f'{SIZE} {COLUMNS[column][0]} {ROWS[row]}', f'{train.slug(column)}/{train.slug(row)}'
    tried = {rate: found('cross', f'{folder},lr={rate}', f'{flags} --lr={rate}') for rate in RATES}
    if None in tried.values():
        return None
    within = lambda run: score(by_seed(run)[0], run['config']['train_lengths'])
    rate = max(tried, key=lambda rate: within(tried[rate]))
    more = found('cross', f'{folder},lr={rate},seeds=1,2', f'{flags} --lr={rate} --seeds=1,2')
    return more and (tried[rate], more)


def holds(run, mean):
    """The longest length up to which {length: scores} are at least 95 %; of a corpus, whose perplexity there is at most 1 / 0.95 of the trained one."""
    longest = max(run['config']['train_lengths'])
    bar = -score(mean, [longest]) - math.log(0.95)
    good = list(itertools.takewhile(lambda n: mean[n]['loss'] <= bar if 'loss' in mean[n] else mean[n]['exact'] >= 0.95, sorted(mean)))
    return good[-1] if good else 0


def cross():
    """{(row, column): {trained, twice: a score for each seed; holds; lr; seeds}} of the finished cells."""
    table = {}
    for row, column in itertools.product(ROWS, COLUMNS):
        runs = cell(row, column)
        if runs:
            scores, config = by_seed(*runs), runs[0]['config']
            over = lambda lengths: [score(run, lengths) for run in scores.values()]
            table[row, column] = dict(trained=over(config['train_lengths']), twice=over(COLUMNS[column][1]), holds=holds(runs[0], train.mean_scores(scores)), lr=config['lr'],
                                      corpus='loss' in scores[0][config['eval_lengths'][0]])
    return table


def shown(scores, corpus):
    """Mean and standard deviation over seeds: percent, or perplexity."""
    values = [math.exp(-x) if corpus else 100 * x for x in scores]
    return f'{statistics.mean(values):.{2 if corpus else 0}f} ±{statistics.stdev(values):.{2 if corpus else 0}f}'


def cross_table(table):
    """The cross table as Markdown."""
    columns = [column for column in COLUMNS if any(column == c for _, c in table)]
    yield '| | ' + ' | '.join(columns) + ' |'
    yield '|---' * (len(columns) + 1) + '|'
    for row in ROWS:
        cells = [table.get((row, column)) for column in columns]
        if any(cells):
            text = [f'{shown(c["trained"], c["corpus"])}<br>{shown(c["twice"], c["corpus"])}<br>{c["holds"] or "none"}' if c else 'not run' for c in cells]
            yield f'| {row} | ' + ' | '.join(text) + ' |'


def cross_figure(plt, table):
    """The cross table as colours: within the trained lengths on the left, at twice the length on the right."""
    rows, columns = ([name for name in names if any(name in key for key in table)] for names in (ROWS, COLUMNS))
    fig, axes = plt.subplots(1, 2, figsize=(13, 1.5 + 0.3 * len(rows)), layout='constrained', sharey=True)
    for ax, what, title in zip(axes, ('trained', 'twice'), ('on the trained lengths', 'at twice the length')):
        for j, column in enumerate(columns):
            least = min(math.exp(-statistics.mean(c['trained'])) for (_, of), c in table.items() if of == column)
            for i, row in enumerate(rows):
                if (row, column) in table:
                    c = table[row, column]
                    value = statistics.mean(math.exp(-x) if c['corpus'] else x for x in c[what])
                    shade = min(1, least / value) if c['corpus'] else value
                    ax.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, color=plt.cm.viridis(shade)))
                    ax.text(j, i, f'{value:.2f}' if c['corpus'] else f'{100 * value:.0f}', ha='center', va='center', color='white' if shade < 0.6 else 'black', fontsize=9)
        ax.set(title=title, xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=rows)
        ax.set_xticks(range(len(columns)), columns, rotation=20, ha='right')
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap='viridis'), ax=axes, shrink=0.8)
    bar.set_label('exact match; chorales, text: the best trained\nperplexity of the column over this one')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# the three commands

def ask():
    """Make every table: {name: (its lines for the README, a figure of plt)}; fills `missing`."""
    lines.cache_clear()
    missing.clear()
    table = cross()
    return {'cross': (list(cross_table(table)), lambda plt: cross_figure(plt, table))}


def run(minutes, jobs):
    """Run missing pieces, `jobs` at a time, until the minutes are over; what is cut off goes on from its checkpoint next time."""
    deadline, running, failed, done = time.time() + 60 * minutes, [], [], 0
    env = os.environ | ({} if torch.cuda.is_available() else {'OMP_NUM_THREADS': str(max(1, os.cpu_count() // jobs))})
    while True:
        for process, argv in [pair for pair in running if pair[0].poll() is not None]:
            running.remove((process, argv))
            done += process.returncode == 0
            if process.returncode:
                failed.append(argv)
                print(f'failed: python train.py {shlex.join(argv)}\n{process.stderr.read().strip()}')
        ask()
        waiting = [argv for argv in missing if argv not in failed and argv not in [argv for _, argv in running]]
        if time.time() > deadline or not (waiting or running):
            break
        for argv in waiting[:jobs - len(running)]:
            out_dir = next(arg for arg in argv if arg.startswith('--out_dir=')).partition('=')[2]
            resume = ['--resume'] * os.path.exists(os.path.join(ROOT, out_dir, 'ckpt.pt'))
            print(f'{len(waiting)} or more to run; next {out_dir}', flush=True)
            running.append((subprocess.Popen([sys.executable, 'train.py', *argv, *resume], cwd=ROOT, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE), argv))
        time.sleep(0.5)
    for process, _ in running:
        process.send_signal(signal.SIGTERM)
    for process, _ in running:
        process.communicate()
    print(f'{done} done, {len(failed)} failed, {len(missing)} or more to run')


def readme(tables):
    """The README's text with every table between its marks, <!-- NAME --> and <!-- end of NAME -->, made anew."""
    with open(os.path.join(ROOT, 'README.md')) as f:
        text = f.read()
    for name, (table, _) in tables.items():
        before, mark, rest = text.partition(f'<!-- {name} -->\n')
        _, end, after = rest.partition(f'<!-- end of {name} -->\n')
        assert mark and end, f'README.md has no marks <!-- {name} --> and <!-- end of {name} -->'
        text = before + mark + '\n'.join(table) + '\n' + end + after
    return text


def draw(tables):
    """The README's figures, assets/NAME.png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    for name, (_, figure) in tables.items():
        figure(plt).savefig(os.path.join(ROOT, f'assets/{name}.png'), dpi=110)


def main(argv):
    """The program."""
    if argv[:1] == ['run'] and len(argv) in (2, 3):
        jobs = int(argv[2]) if len(argv) == 3 else 4 if torch.cuda.is_available() else os.cpu_count()
        return run(float(argv[1]), jobs)
    tables = ask()
    if argv == ['readme']:
        train.write(os.path.join(ROOT, 'README.md'), readme(tables))
        return draw(tables)
    for name, (table, _) in tables.items():
        print(f'\n{name}\n' + '\n'.join(table))
    print(f'\n{len(missing)} or more pieces to run, the first: python train.py {shlex.join(missing[0])}' if missing else '\nnothing is missing')


if __name__ == '__main__':
    main(sys.argv[1:])
