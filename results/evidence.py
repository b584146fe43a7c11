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
import re
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


# ---------------------------------------------------------------------------------------------------------------------
# the three commands

def run(minutes, jobs):
    """Run missing pieces, `jobs` at a time, until the minutes are over; what is cut off goes on from its checkpoint next time."""
    deadline, running, failed, done = time.time() + 60 * minutes, [], [], 0
    env = dict(os.environ) if torch.cuda.is_available() else dict(os.environ, OMP_NUM_THREADS=str(max(1, os.cpu_count() // jobs)))
    while True:
        for process, argv in [(process, argv) for process, argv in running if process.poll() is not None]:
            running.remove((process, argv))
            done += process.returncode == 0
            if process.returncode:
                failed.append(argv)
                print(f'failed: python train.py {shlex.join(argv)}\n{process.stderr.read().decode().strip()}')
        ask()
        waiting = [argv for argv in missing if argv not in failed and argv not in [argv for _, argv in running]]
        if time.time() > deadline or not (waiting or running):
            break
        for argv in waiting[:jobs - len(running)]:
            out_dir = next(arg for arg in argv if arg.startswith('--out_dir=')).split('=', 1)[1]
            resume = ['--resume'] * os.path.exists(os.path.join(ROOT, out_dir, 'ckpt.pt'))
            print(f'{len(waiting)} to run: {out_dir}', flush=True)
            running.append((subprocess.Popen([sys.executable, 'train.py', *argv, *resume], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE), argv))
        time.sleep(0.2)
    for process, _ in running:
        process.send_signal(signal.SIGTERM)
    for process, _ in running:
        process.communicate()
    print(f'{done} pieces done, {len(failed)} failed, {len(missing)} to run')


def ask():
    """Make every table, for what it finds and for what is missing: {name: lines}."""
    lines.cache_clear()
    missing.clear()
    table = cross()
    return {'cross': list(cross_table(table))}


def main(argv):
    """The program."""
    if argv[:1] == ['run'] and len(argv) in (2, 3):
        return run(float(argv[1]), int(argv[2]) if len(argv) == 3 else 4 if torch.cuda.is_available() else os.cpu_count())
    tables = ask()
    for name, text in tables.items():
        print(f'\n{name}\n' + '\n'.join(text))
    print(f'\n{len(missing)} pieces to run, the first: python train.py {shlex.join(missing[0])}' if missing else '\nnothing is missing')


if __name__ == '__main__':
    main(sys.argv[1:])
