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
import platform
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

missing = []                                                      # argvs asked for and not found, in that order


@functools.cache
def runs(name):
    """What results/NAME.jsonl holds."""
    path = os.path.join(ROOT, f'results/{name}.jsonl')
    return [json.loads(line) for line in open(path)] if os.path.exists(path) else []


@functools.cache
def lines(name):
    """The same by command."""
    return {run['command'].replace(' --resume', ''): run for run in runs(name)}


def train_argv(name, folder, flags):
    return ['train.py', *shlex.split(flags), f'--out_dir=out/{name}/{folder}', f'--results=results/{name}.jsonl']


def found(name, folder, flags):
    """The run in results/NAME.jsonl that these flags made, in out/NAME/FOLDER; None, and an entry in `missing`, if there is none yet."""
    argv = train_argv(name, folder, flags)
    run = lines(name).get('python ' + shlex.join(argv))
    if run is None and (name not in PAPER or torch.cuda.is_available()):
        missing.append(argv)
    return run


def by_seed(*runs):
    """{seed: {length: scores}} of several runs of one configuration."""
    return {int(seed): {int(n): x for n, x in scores.items()} for run in runs for seed, scores in run['lengths'].items()}


def score(scores, lengths):
    """Exact match over all problems of these lengths, nan if there are none; of a corpus minus the loss, so that more is better."""
    chosen = [scores[n] for n in lengths if n in scores]
    total = sum(x.get('n', 1) for x in chosen)
    return sum(x.get('n', 1) * (-x['loss'] if 'loss' in x else x['exact']) for x in chosen) / total if chosen else math.nan


# ---------------------------------------------------------------------------------------------------------------------
# grids: encodings, or variants of one, on families of tasks. In a column all have the same width, layers and steps; the learning rate is chosen for each
# cell from RATES by what seed 0 gets on the trained lengths alone, and seeds 1 and 2 then train at it.

RATES = '1e-3', '2e-3', '4e-3'
SIZE = '--d_model=64 --n_layer=2 --n_head=2 --warmup_steps=100 --eval_interval=500 '
TO_8 = '--train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps={} --batch_size=32 --n_eval=64 --n_test=512'
TO_16 = '--train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps={} --n_test={}'
COLUMNS = {                                                       # family: flags, longer lengths that stand for twice the trained one
    'indirect indexing': (SIZE + '--task=indirect_indexing:letters=12:shift=2 --train_lengths=3-6 --eval_lengths=3-12 --max_steps=2500 --n_test=512', [12]),
    'iterative': (SIZE + '--task=polynomial ' + TO_8.format(1500), [16]),
    'algorithmic': (SIZE + '--task=string_reverse ' + TO_8.format(1500), [16]),
    'SCAN': (SIZE + '--task=scan --train_lengths=1-22 --eval_lengths=1-48 --max_steps=1500 --batch_size=32 --n_eval=16 --n_test=256', range(24, 49)),
    'distance': (SIZE + '--task=distance:span=16 ' + TO_16.format(1000, 512), [32]),
    'counting': (SIZE + '--task=trigger_count ' + TO_16.format(1000, 512), [32]),
    'chorales': (SIZE + '--task=jsb --data=data/Jsb16thSeparated.json --train_lengths=128 --eval_lengths=128,160,192,256,512 --max_steps=500 --batch_size=8 --n_eval=16', [256]),
    'text': (SIZE + '--task=stdlib --train_lengths=64 --eval_lengths=64,80,96,128,256 --max_steps=500 --batch_size=16 --n_eval=8 --n_test=64', [128]),
}
CROSS = {name: f'--pe={name}' for name in ('rope', 'pope', 'vipe', 'nope', 'ape', 'alibi', 'prism', 'pope+vipe', 'ape+rope', 'mla', 't5', 'fire', 'yarn', 'vrope',
                                           'learned', 'random', 'shifted_ape')} | {'mla': '--pe=rope --attention=mla'}
some = lambda *names: {name: CROSS[name] for name in names}


def variants(start, **switches):
    """{label: flags} of every combination of switches, each {label: flag}."""
    return {', '.join(label for label, _ in chosen): ' '.join([start, *(flag for _, flag in chosen)]) for chosen in itertools.product(*(s.items() for s in switches.values()))}


on_off = lambda what, flag, on='True', off='False': {what: f'{flag}={on}', f'no {what}': f'{flag}={off}'}
VIPE = variants('--pe=vipe', logn=on_off('log n', '--vipe_logn'), s=on_off('s', '--vipe_s', 'length', 'one'), u=on_off('u', '--vipe_u'), value=on_off('value code', '--vipe_value'))
POPE = variants('--pe=pope', softplus=on_off('softplus', '--pope_softplus'), frequencies={f'{n} frequencies': f'--pope_frequencies={key}' for n, key in (('d', 'all'), ('d/2', 'half'))},
                delta={label: f'--pope_delta={key}' for label, key in (('delta from 0', 'zero'), ('delta from anywhere', 'uniform'), ('no delta', 'none'))})
PRISM = variants('--pe=prism', sharpen=on_off('sharpening', '--prism_sharpen'), reset=on_off('reset', '--prism_reset'),
                 superpose={'superposition': '--prism_superpose=True', 'mean position': '--prism_superpose=False'},
                 warm={'short problems first': '--length_schedule=[(0,4),(300,8)]', 'all lengths at once': '--length_schedule=[]'})
def iterative(task, layers, heads=1):
    return f'{SIZE}--task={task} {TO_8.format(2000)} --n_layer={layers} --n_head={heads} --lr=1e-3', [16]


THREE = 'polynomial', 'copy', 'parity'
OF_VIPE = {f'{task}, {layers} layers': iterative(task, layers) for task in (*THREE, 'count', 'reverse', 'mode', 'sort') for layers in (2, 3)} | {
    f'{task}, 4 layers, 2 heads': iterative(task, 4, 2) for task in THREE}
OF_PRISM = {task: (f'configs/{name}', [20]) for task, name in (
    ('string_copy', 'string_copy_prism.py'), ('string_reverse', 'string_reverse_prism.py'), ('odds_first', 'odds_first_prism.py'), ('stack', 'stack_prism.py'),
    ('dyn_str_cpy', 'string_copy_prism.py --task=dyn_str_cpy --prism_copy=fixed'))} | {'addition_cot': ('configs/addition_prism.py', [16])}
OF_TOEPLITZ = {task: (f'{SIZE}--task={task} {TO_16.format(2000, 2048)} --n_layer=4 --n_head=8 --lr=2e-3', [32])
               for task in ('distance:span=16', 'trigger_count', 'distance_sum:span=16')}
GRIDS = {                                                         # name: rows, columns; where a column gives no learning rate it is chosen from RATES
    'cross': (CROSS, COLUMNS),
    'toeplitz': (some('rope', 'nope', 'ape', 'random', 'alibi', 't5', 'ape+rope', 'mla') | {f'rope on {k} of 8 heads': f'--pe=rope --rope_heads={k}' for k in (1, 2, 4)}, OF_TOEPLITZ),
    'vipe': (some('vipe', 'nope', 'rope', 'ape', 'alibi', 't5', 'fire', 'yarn'), OF_VIPE),
    'vipe_seeds': (some('vipe'), {task: (iterative(task, 3)[0] + ' --seeds=0-7', [16]) for task in THREE}),
    'prism': (some('prism', 'shifted_ape'), OF_PRISM),
    'ablation_vipe': (VIPE, {name: COLUMNS[name] for name in ('iterative', 'indirect indexing')}),
    'ablation_pope': (POPE, {name: COLUMNS[name] for name in ('indirect indexing', 'iterative')}),
    'ablation_prism': (PRISM, {name: COLUMNS[name] for name in ('iterative', 'indirect indexing')}),
}
PAPER = {                                                         # the papers' own sizes: run, and before all others, only where there is a GPU
    'paper_pope': (some('rope', 'pope'), {'indirect indexing': ('configs/indirect_indexing_pope.py configs/paper_pope.py --seeds=0-2', [])}),
    'paper_vipe': (some('vipe', 'nope', 'rope', 'ape', 'alibi', 't5', 'fire', 'yarn'), {task: (f'configs/polynomial_vipe.py configs/paper_vipe.py --task={task}', [32]) for task in THREE}),
    'paper_toeplitz': (some('rope', 'nope', 'ape', 'random', 'alibi', 't5', 'ape+rope', 'mla'), {
        'distance': ('configs/distance_rope.py configs/paper_toeplitz.py', [256]),
        'counting': ('configs/trigger_count_nope.py configs/paper_toeplitz.py --n_train=35000 --n_test=15000 --max_steps=10200', [256])}),
    'paper_prism': ({'prism': 'configs/paper_prism.py', 'shifted_ape': 'configs/paper_prism.py configs/paper_prism_baseline.py'}, {
        task: (f'configs/{task}_prism.py', [80]) for task in ('string_copy', 'string_reverse')}),
}
GRIDS = PAPER | GRIDS


def cell(name, flags, folder):
    """The runs of a cell, together of seeds 0 to 2 if it names no others, at its learning rate; None if one is missing."""
    if '--lr=' in flags or 'configs/' in flags:
        run = found(name, folder, flags if '--seeds=' in flags or name in PAPER else f'{flags} --seeds=0-2')
        return run and [run]
    tried = {rate: found(name, f'{folder},lr={rate}', f'{flags} --lr={rate}') for rate in RATES}
    if None in tried.values():
        return None
    within = lambda run: score(by_seed(run)[0], run['config']['train_lengths'])
    rate = max(tried, key=lambda rate: within(tried[rate]))
    more = found(name, f'{folder},lr={rate},seeds=1,2', f'{flags} --lr={rate} --seeds=1,2')
    return more and [tried[rate], more]


def holds(run, mean):
    """The longest length up to which {length: scores} are at least 95 %; of a corpus, whose perplexity there is at most 1 / 0.95 of the trained one."""
    longest = max(run['config']['train_lengths'])
    bar = -score(mean, [longest]) - math.log(0.95)
    good = list(itertools.takewhile(lambda n: mean[n]['loss'] <= bar if 'loss' in mean[n] else mean[n]['exact'] >= 0.95, sorted(mean)))
    return good[-1] if good else 0


def grid(name):
    """{(row, column): {trained, twice: a score for each seed; holds; lr; corpus}} of the finished cells."""
    rows, columns = GRIDS[name]
    table = {}
    for (row, flags), column in itertools.product(rows.items(), columns):
        given, twice = columns[column]
        made = cell(name, f'{given} {flags}', f'{train.slug(column)}/{train.slug(row)}')
        if made:
            scores, config = by_seed(*made), made[0]['config']
            over = lambda lengths: [score(run, lengths) for run in scores.values()]
            table[row, column] = dict(trained=over(config['train_lengths']), twice=over(twice), holds=holds(made[0], train.mean_scores(scores)), lr=config['lr'],
                                      corpus='loss' in scores[0][config['eval_lengths'][0]])
    return table


def shown(scores, corpus):
    """Mean and standard deviation over seeds: percent, or perplexity."""
    values = [math.exp(-x) if corpus else 100 * x for x in scores]
    return f'{statistics.mean(values):.{2 if corpus else 0}f} ±{statistics.stdev(values):.{2 if corpus else 0}f}'


def markdown(name, table):
    """The lines of a grid's table: in each cell the trained lengths, twice the length, the longest length that holds."""
    rows, columns = GRIDS[name]
    columns = [column for column in columns if any(column == of for _, of in table)]
    yield '| | ' + ' | '.join(columns) + ' |'
    yield '|---' * (len(columns) + 1) + '|'
    for row in rows:
        cells = [table.get((row, column)) for column in columns]
        if any(cells):
            text = [f'{shown(c["trained"], c["corpus"])}<br>{shown(c["twice"], c["corpus"])}<br>{c["holds"] or "none"}' if c else 'not run' for c in cells]
            yield f'| {row} | ' + ' | '.join(text) + ' |'


def cross_figure(plt, table):
    """The cross table as colours: within the trained lengths on the left, at twice the length on the right."""
    rows, columns = ([name for name in names if any(name in key for key in table)] for names in GRIDS['cross'])
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
# the papers' claims beside what is found here

def probed(probe, name, row, column):
    """What `python probe.py PROBE` summarized of a cell's first seed; None, and an entry in `missing`, if that is not there (first the run, if it is not in out/)."""
    rows, columns = GRIDS[name]
    folder, flags = f'{train.slug(column)}/{train.slug(row)}', f'{columns[column][0]} {rows[row]} --seeds=0-2'
    argv = ['probe.py', probe, f'out/{name}/{folder}']
    line = lines('probes').get('python ' + shlex.join(argv))
    if line is None and found(name, folder, flags):
        missing.append(argv if os.path.exists(os.path.join(ROOT, argv[2], 'ckpt.pt')) else train_argv(name, folder, flags))
    return line and line['summary']


def claims(grids):
    """The lines of the table of claims: where, what the paper says, its number, what is found here or that it is not run yet."""
    def at(name, row, column, what='twice'):
        c = grids[name].get((row, column))
        return c and shown(c[what], c['corpus'])

    def all_of(name, column, what, rows=None):
        """`what` of every row of a column: 'rope 8, nope 9'."""
        cells = {row: grids[name].get((row, column)) for row in rows or GRIDS[name][0]}
        if None not in cells.values():
            return ', '.join(f'{row} {c["holds"] or "none" if what == "holds" else shown(c[what], False)}' for row, c in cells.items())

    def r2(row):
        summary = probed('linear', 'vipe', row, 'polynomial, 3 layers')
        return summary and ' / '.join(f'{value:.3f}' for value in summary.values())

    def deposit(row, column='distance:span=16'):
        summary = probed('heads', 'toeplitz', row, column)
        return summary and f'{summary["largest"]} / {summary["second"]}'

    def alone(name, lengths, as_text):
        """as_text of score() over these lengths, for each run in results/NAME.jsonl."""
        return ', '.join(f'{run["config"]["pe"]} {as_text(score(by_seed(run)[run["config"]["seeds"][0]], lengths))}' for run in runs(name))

    both = lambda *texts: None if None in texts else '; '.join(texts)
    on_stdlib = lambda probe, key: ', '.join(f'{pe} {lines("probes")[f"python probe.py {probe} out/stdlib/pe={pe}"]["summary"][key]:.2f}' for pe in ('rope', 'pope'))
    holds_to = lambda *columns: both(*(f'{column}: {text}' if (text := all_of('vipe', column, 'holds')) else None for column in columns))
    beyond = lambda *columns: both(*(f'{column}: {text}' if (text := all_of('prism', column, 'twice')) else None for column in columns))
    table = [
        ('ViPE Figures 3, 6', 'polynomial: all but ViPE break right behind the trained length', 'trained to 16: ViPE holds to about 32', holds_to('polynomial, 2 layers', 'polynomial, 3 layers')),
        ('ViPE Figure 12', 'copy, parity with one head: ViPE reaches furthest', '', holds_to('copy, 2 layers', 'copy, 3 layers', 'parity, 2 layers', 'parity, 3 layers')),
        ('ViPE Figure 13', 'the same with more layers and heads', '', holds_to('polynomial, 4 layers, 2 heads', 'copy, 4 layers, 2 heads', 'parity, 4 layers, 2 heads')),
        ('ViPE Figure 14', 'count, reverse, mode, sort', '', holds_to(*(f'{task}, {layers} layers' for task in ('count', 'reverse', 'mode', 'sort') for layers in (2, 3)))),
        ('ViPE Figure 15', 'ViPE over 8 seeds', '', both(*(f'{task} {text}' if (text := at('vipe_seeds', 'vipe', task)) else None for task in THREE))),
        ('ViPE Tables 1, 4, 5', 'R2 of position from layer 1, distance to EoI from layer 2, trained / longer lengths', 'NoPE 0.975 / 0.864, 0.891 / 0.814; RoPE 0.943 / 0.542, 0.869 / 0.667; APE 1.000 / 0.721, 0.891 / 0.614',
         both(*(f'{row} {text}' if (text := r2(row)) else None for row in ('nope', 'rope', 'ape')))),
        ('ViPE Table 2', 'SCAN, the length split', 'ViPE 15.0, NoPE 13.2, RoPE 2.1, APE 0.0', 'reduced, one seed: ' + alone('scan', range(24, 49), lambda x: f'{100 * x:.1f}')),
        ('PRISM Figures 2, 3, 5-8, 10', 'exact far beyond the trained lengths, the baseline not; here trained to 10, at 20', '', beyond(*(task for task in OF_PRISM if task != 'addition_cot'))),
        ('PRISM Figure 1', 'addition beyond; here trained to 8, at 16', '', beyond('addition_cot')),
        ('PoPE Table 1', 'indirect indexing', 'RoPE 11.16 ±2.45, PoPE 94.82 ±2.91', all_of('paper_pope', 'indirect indexing', 'trained') or
         (text := all_of('cross', 'indirect indexing', 'trained', ('rope', 'pope'))) and f'reduced: {text}'),
        ('PoPE Table 2', 'JSB chorales, nats a token', 'RoPE 0.5081, PoPE 0.4889', 'reduced, one seed: ' + alone('jsb', [512], lambda x: f'{-x:.3f}') + ' (its phases from anywhere, then from 0)'),
        ('PoPE Figure 2', 'perplexity at 10 times the trained context: flat with PoPE', '', 'on the library, one seed, within and at 10 times: ' + both(
            alone('stdlib', [128], lambda x: f'{math.exp(-x):.2f}'), alone('stdlib', [1280], lambda x: f'{math.exp(-x):.2f}'))),
        ('PoPE Figures 3-6', 'RoPE uses few frequencies, PoPE the fast ones too', '', f'on the library: share of frequencies used {on_stdlib("frequency", "used")}; of the norm in the fast half {on_stdlib("frequency", "fast")}'),
        ('PoPE section 2', "RoPE's preferred distance moves with the content, PoPE's does not", '', f'on the library: mean shift in tokens {on_stdlib("tuning", "shift")}'),
        ('Toeplitz Figures 2, 3, Table 1', 'distance: RoPE best, NoPE at chance; counting: RoPE behind MLA and NoPE', 'distance: RoPE 92.6, MLA 88.3, NoPE 3.5; counting: 69.4, 97.4, 77.7',
         both(*(f'{task.partition(":")[0]}: {text}' if (text := all_of('toeplitz', task, 'trained')) else None for task in OF_TOEPLITZ if 'sum' not in task))),
        ('Toeplitz Figures 4, 7, 9-12', 'without one head of layer 1 RoPE falls by 60 points, without any other not; MLA, NoPE, others have no such head', 'RoPE 60 / 0',
         both(*(f'{row} {text}' if (text := deposit(row)) else None for row in ('rope', 'nope', 'ape', 'alibi', 't5', 'ape+rope', 'mla')))),
        ('Toeplitz Figure 6, D.4', 'one or two heads with RoPE are enough', '', all_of('toeplitz', 'distance:span=16', 'trained', [row for row in GRIDS['toeplitz'][0] if 'rope' in row and '+' not in row])),
        ('Toeplitz appendix E', 'the sum of two distances: no RoPE goes beyond its length', '', all_of('toeplitz', 'distance_sum:span=16', 'twice')),
        ('LLM position generalization, Figures 2 and 3, eq. 15', 'logits are a sum of axes', '0.865, 0.947, 0.959', 'SmolLM2-135M: ' + ', '.join(
            f'{run["summary"][key]:.3f}' for run in runs('probes') for key in ('mean_r', 'mean_r_fg') if key in run['summary'])),
    ]
    yield '| where | claim | there | here |'
    yield '|---|---|---|---|'
    for row in table:
        yield '| ' + ' | '.join(text or 'not run yet' if i == 3 else text for i, text in enumerate(row)) + ' |'


def perturb_table():
    """Table 1 of position_generalization.txt beside what a real language model here bears: shares of answers, or of next tokens, that are right."""
    line = lines('probes').get('python probe.py perturb --hf=SmolLM2-135M-Instruct.Q4_1.gguf --text=tinyshakespeare.txt')
    if line:                                                      # (its share 0.001 is less than a token here)
        paper = {'text': (37.39, 41.44, 42.34, 42.37), 'feature': (35.11, 41.15, 41.98, 42.33), 'position': (37.19, 42.44, 42.42, 42.74)}
        right = {(row['kind'], row.get('gamma'), row.get('l_max')): f'{100 * row["token"]:.1f}' for row in line['rows']}
        yield '| perturbed | share 0.5 | 0.1 | 0.05 | 0.01 | none |'
        yield '|---' * 6 + '|'
        for kind, name in (('text', 'tokens change places'), ('feature', 'keys change places'), ('position', 'position indices')):
            cells = [f'{right[kind, gamma, 5]} ({there:.1f})' for gamma, there in zip((0.5, 0.1, 0.05, 0.01), paper[kind])]
            yield f'| {name} | {" | ".join(cells)} | {right["original", None, None]} (42.5) |'


# ---------------------------------------------------------------------------------------------------------------------
# the three commands

def ask():
    """Make every grid, as far as its runs are there: {name: {(row, column): cell}}; fills `missing`."""
    runs.cache_clear()
    lines.cache_clear()
    missing.clear()
    grids = {name: grid(name) for name in GRIDS}
    list(claims(grids))                                           # the probes that it wants
    return grids


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
                print(f'failed: python {shlex.join(argv)}\n{process.stderr.read().strip()}')
            elif argv[0] == 'probe.py':
                write_probe(argv)
        ask()
        waiting = [argv for argv in missing if argv not in failed and argv not in [argv for _, argv in running]]
        if time.time() > deadline or not (waiting or running):
            break
        for argv in waiting[:jobs - len(running)]:
            print(f'{time.strftime("%H:%M:%S")} {len(waiting)} or more to run; next {out_dir(argv)}', flush=True)
            resume = ['--resume'] * (argv[0] == 'train.py' and os.path.exists(os.path.join(ROOT, out_dir(argv), 'ckpt.pt')))
            process = subprocess.Popen([sys.executable, *argv, *resume], cwd=ROOT, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            running.append((process, argv))
        while time.time() < deadline and all(process.poll() is None for process, _ in running):
            time.sleep(0.2)
    for process, _ in running:
        process.send_signal(signal.SIGTERM)
    for process, _ in running:
        process.communicate()
    print(f'{done} done, {len(failed)} failed, {len(missing)} or more to run')


def out_dir(argv):
    """The folder that a piece works in."""
    return argv[2] if argv[0] == 'probe.py' else next(arg for arg in argv if arg.startswith('--out_dir=')).partition('=')[2]


def write_probe(argv):
    """Append a line about a probe that has just been made."""
    with open(os.path.join(ROOT, out_dir(argv), f'probe_{argv[1]}.json')) as f:
        made = dict(probe=argv[1], command='python ' + shlex.join(argv), summary=json.load(f)['summary'])
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f'{platform.machine()} CPU'
    train.append(os.path.join(ROOT, 'results/probes.jsonl'), json.dumps(made | dict(torch=torch.__version__, python=platform.python_version(), hardware=hardware)) + '\n')


def readme(grids):
    """The README's text with every table between its marks, <!-- NAME --> and <!-- end of NAME -->, made anew."""
    with open(os.path.join(ROOT, 'README.md')) as f:
        text = f.read()
    for name, table in [(name, markdown(name, table)) for name, table in grids.items() if table] + [('perturb', perturb_table()), ('claims', claims(grids))]:
        before, mark, rest = text.partition(f'<!-- {name} -->\n')
        _, end, after = rest.partition(f'<!-- end of {name} -->\n')
        assert mark and end, f'README.md has no marks <!-- {name} --> and <!-- end of {name} -->'
        text = before + mark + '\n'.join(table) + '\n' + end + after
    return text


def main(argv):
    """The program; returns the exit status."""
    if argv[:1] == ['run'] and re.fullmatch(r'[\d.]+( [1-9]\d*)?', ' '.join(argv[1:])):
        return run(float(argv[1]), int(argv[2]) if len(argv) == 3 else 4 if torch.cuda.is_available() else os.cpu_count())
    if argv not in ([], ['readme']):
        print('evidence.py: write `run MINUTES`, `run MINUTES JOBS` (how many at a time), `readme`, or nothing to see what is there', file=sys.stderr)
        return 2
    grids = ask()
    if argv:
        train.write(os.path.join(ROOT, 'README.md'), readme(grids))
        import matplotlib
        matplotlib.use('Agg')
        import matplotlib.pyplot as plt
        cross_figure(plt, grids['cross']).savefig(os.path.join(ROOT, 'assets/cross.png'), dpi=110)
        return 0
    for name, table in grids.items():
        print(f'{name:16}{len(table):4} of {math.prod(map(len, GRIDS[name]))} cells')
    print(f'\n{len(missing)} or more pieces to run, the first: python {shlex.join(missing[0])}' if missing else '\nnothing is missing')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
