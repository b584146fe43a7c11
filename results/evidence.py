"""The evidence behind the README: what is there, what is missing, and the tables and the picture that are made of it.

    python results/evidence.py                 what is there and what is missing
    python results/evidence.py run 30          run the next missing pieces for 30 minutes, the most valuable first; the same command goes on
    python results/evidence.py readme          write the README's tables and their figures anew from results/*.jsonl (other pictures of probes come from probe.py)

A piece is one call of train.py or probe.py; the line that it leaves in results/ holds its command, by which it is found again. The functions that
make the tables ask for their pieces by run_of(), probed() and asked(): what these do not find is what is missing. Tables of a file alone
(by_length(), speed_table()) and probes of the runs behind them are made by the commands that stand beside them in README.
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
import tempfile
import time
import types

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import torch

import probe
import train
from model import Transformer

# ---------------------------------------------------------------------------------------------------------------------
# the plan: grids of rows, encodings or variants of one, and columns, tasks. In a column all have the same width, layers and steps. Where a column
# gives no learning rate, each cell takes the one of three with which seed 0 ends best on the validation problems of the trained lengths alone (SCAN:
# on commands trained on), and seeds 1 and 2 train at it.

SIZE = '--d_model=64 --n_layer=2 --n_head=2 --warmup_steps=100 --eval_interval=500 '
TO_8 = '--train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps={} --batch_size=32 --n_eval=64 --n_test=512'
TO_16 = '--train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps={} --n_test={}'
COLUMNS = {                                                       # family: flags, longer lengths that stand for twice the trained one
    'indirect indexing': (SIZE + '--task=indirect_indexing:letters=12:shift=2 --train_lengths=3-6 --eval_lengths=3-12 '
                          '--max_steps=2500 --n_test=512', [12]),
    'iterative': (SIZE + '--task=polynomial ' + TO_8.format(1500), [16]),
    'algorithmic': (SIZE + '--task=string_reverse ' + TO_8.format(1500), [16]),
    'SCAN': (SIZE + '--task=scan --train_lengths=1-22 --eval_lengths=1-48 --max_steps=1500 --batch_size=32 --n_eval=16 --n_test=256', range(24, 49)),
    'distance': (SIZE + '--task=distance:span=16 ' + TO_16.format(1000, 512), [32]),
    'counting': (SIZE + '--task=trigger_count:most=16 ' + TO_16.format(1000, 512), [32]),
    'chorales': (SIZE + '--task=jsb --data=data/Jsb16thSeparated.json --train_lengths=128 --eval_lengths=128,160,192,256,512 '
                 '--max_steps=500 --batch_size=8 --n_eval=16', [256]),
    'text': (SIZE + '--task=stdlib --train_lengths=64 --eval_lengths=64,80,96,128,256 --max_steps=500 --batch_size=16 --n_eval=8 --n_test=64', [128]),
}
RATES = {'chorales': ('2e-3', '4e-3', '8e-3'), 'text': ('4e-3', '8e-3', '1.6e-2'), 'indirect indexing': ('5e-4', '1e-3', '2e-3')}
OTHER_RATES = '1e-3', '2e-3', '4e-3'
CROSS = {name: f'--pe={name}' for name in (
    'rope', 'pope', 'vipe', 'nope', 'ape', 'alibi', 'prism', 'pope+vipe', 'ape+rope', 'mla', 't5', 'fire', 'yarn', 'vrope', 'learned', 'random', 'shifted_ape')}
CROSS |= {'mla': '--pe=rope --attention=mla', 'rope, d=80': '--pe=rope --d_model=80'}       # the latter has as many parameters as prism
some = lambda *names: {name: CROSS[name] for name in names}


def variants(start, *switches):
    """{label: flags} of every combination of switches, each {label: flag}."""
    chosen = [list(zip(*pairs)) for pairs in itertools.product(*(switch.items() for switch in switches))]
    return {', '.join(labels): ' '.join([start, *flags]) for labels, flags in chosen}


on_off = lambda what, flag, on=True, off=False: {what: f'{flag}={on}', f'no {what}': f'{flag}={off}'}
VIPE = variants('--pe=vipe', on_off('log n', '--vipe_logn'), on_off('s', '--vipe_s', 'length', 'one'), on_off('u', '--vipe_u'),
                on_off('value code', '--vipe_value'))
POPE = variants('--pe=pope', on_off('softplus', '--pope_softplus'), {'d frequencies': '--pope_frequencies=all', 'd/2 frequencies': '--pope_frequencies=half'},
                {'delta from 0': '--pope_delta=zero', 'delta from anywhere': '--pope_delta=uniform', 'no delta': '--pope_delta=none'})
PRISM = variants('--pe=prism', on_off('sharpening', '--prism_sharpen'), on_off('reset', '--prism_reset'),
                 {'superposition': '--prism_superpose=True', 'mean position': '--prism_superpose=False'},
                 {'short problems first': '--length_schedule=[(0,4),(300,8)]', 'all lengths at once': '--length_schedule=[]'})


def iterative(task, layers, heads=1, steps=2000):
    return f'{SIZE}--task={task} {TO_8.format(steps)} --n_layer={layers} --n_head={heads} --lr=1e-3', [16]


THREE = 'polynomial', 'copy', 'parity'
OF_VIPE = {f'{task}, {layers} layers': iterative(task, layers) for task in (*THREE, 'count', 'reverse', 'mode', 'sort') for layers in (2, 3)}
OF_VIPE |= {f'{task}, {layers} layers, {heads} heads': iterative(task, layers, heads) for layers, heads in ((4, 2), (6, 4)) for task in THREE}
OF_PRISM = {task: (f'configs/{task}_prism.py', [20]) for task in ('string_copy', 'string_reverse', 'odds_first', 'stack')}
OF_PRISM |= {
    'dyn_str_cpy': ('configs/string_copy_prism.py --task=dyn_str_cpy --prism_copy=fixed', [20]),
    'dyn_str_cpy, trained to 5': ('configs/dyn_str_cpy_prism.py --train_lengths=1-5 --length_schedule=[]', [10]),
    'addition_cot': ('configs/addition_prism.py', [16]),
    'multiplication_cot': ('configs/addition_prism.py --task=multiplication_cot --train_lengths=1-3 --length_schedule=[(0,1),(400,2),(800,3)] '
                           '--eval_lengths=1-6', [6]),
    'scan_cot': ('configs/scan_cot_prism.py --max_steps=1500 --batch_size=16 --length_schedule=[(0,6),(300,12),(600,22)] --eval_interval=500 '
                 '--n_eval=4 --n_test=64', range(24, 49))}
OF_TOEPLITZ = {task: (f'{SIZE}--task={task} {TO_16.format(2000, 2048)} --n_layer=4 --n_head=8 --lr=2e-3', [32])
               for task in ('distance:span=16', 'trigger_count:most=16', 'distance_sum:span=16')}
OF_POPE = {f'{letters} letters, shifts up to {shift}': (
    f'{SIZE}--task=indirect_indexing:letters={letters}:shift={shift} --train_lengths={length // 2}-{length} --eval_lengths={length // 2}-{2 * length} --max_steps=10000 '
    f'--n_test=512 --n_layer={layers} --norm=rmsnorm --decay=cosine --eval_interval=1000', [2 * length])
    for letters, shift, length, layers in ((12, 2, 6, 2), (16, 3, 8, 3))}
TWELVE, SIXTEEN = OF_POPE
RATES[TWELVE] = RATES['indirect indexing']
OF_ABLATION = {'iterative': (f'{SIZE}--task=polynomial {TO_8.format(2000)} --n_layer=3 --n_head=1', [10]), 'indirect indexing': (COLUMNS['indirect indexing'][0], [8])}
TO_64 = '--train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 --n_test=512'
CAUSES = {' at 1e-4': '--lr=1e-4', ', dropout': '--dropout=0.1', ', betas': '--beta1=0.98 --beta2=0.9',        # what the Toeplitz study does otherwise
          ', recipe': '--n_train=8000 --dropout=0.1 --beta1=0.98 --beta2=0.9 --weight_decay=1e-5 --grad_clip=0 --decay=cosine'}
CAUSES |= {', recipe, 13,600 steps at 1e-4': CAUSES[', recipe'].replace('8000', '70000') + ' --lr=1e-4 --max_steps=13600 --seeds=0'}
TOEPLITZ_ROWS = some('rope', 'nope', 'ape', 'random', 'alibi', 't5', 'ape+rope', 'mla')
VIPE_ROWS = some('vipe', 'nope', 'rope', 'ape', 'alibi', 't5', 'fire', 'yarn')
PAPER = {                                                         # the papers' own sizes: run, before all others, where there is a GPU
    'paper_pope': (some('rope', 'pope'), {'indirect indexing': ('configs/indirect_indexing_pope.py configs/paper_pope.py --seeds=0-2', [])}),
    'paper_vipe': (VIPE_ROWS, {task: (f'configs/polynomial_vipe.py configs/paper_vipe.py --task={task}', [32]) for task in THREE}),
    'paper_toeplitz': (TOEPLITZ_ROWS, {
        'distance': ('configs/distance_rope.py configs/paper_toeplitz.py', [256]),
        'counting': ('configs/trigger_count_nope.py configs/paper_toeplitz.py --n_train=35000 --n_test=15000 --max_steps=10200 --warmup_steps=612', [256])}),
    'paper_prism': ({'prism': 'configs/paper_prism.py', 'shifted_ape': 'configs/paper_prism.py configs/paper_prism_baseline.py'},
                    {task: (f'configs/{task}_prism.py', [80]) for task in ('string_copy', 'string_reverse')}),
}
GRIDS = PAPER | {                                                 # name: (rows, columns)
    'cross': (CROSS, COLUMNS),
    'toeplitz': (TOEPLITZ_ROWS, OF_TOEPLITZ),
    'toeplitz_64': (TOEPLITZ_ROWS | {f'rope on {k} of 8 heads': f'--pe=rope --rope_heads={k}' for k in (1, 2, 4)} |
                    {pe + what: f'--pe={pe} {flags}' for what, flags in CAUSES.items() for pe in ('rope', 'nope')} | {'rope, 4 heads': '--pe=rope --n_head=4', 'rope, 8 layers': '--pe=rope --n_layer=8'}, {
        'distance:span=64': (f'{SIZE}--task=distance:span=64 {TO_64} --n_layer=4 --n_head=8 --lr=1e-3', [128])}),
    'counting_64': (some('rope', 'nope', 'alibi', 'mla') | {f'{pe}, fixed': f'--pe={pe} --n_train=8000' for pe in ('rope', 'nope', 'alibi', 'random')}, {
        'trigger_count': (f'{SIZE}--task=trigger_count {TO_64} --n_head=4 --lr=1e-3', [128])}),
    'indirect': (some('rope', 'pope'), {TWELVE: OF_POPE[TWELVE]}),
    'indirect_16': ({f'{pe} at {rate}{more}': f'--pe={pe} --lr={rate} --seeds={seeds}' for pe, rate, more, seeds in (
        ('rope', '2e-3', '', '0'), ('rope', '1e-3', '', '0'), ('rope', '5e-4', '', '0'), ('rope', '1e-3', ', seeds 1, 2', '1,2'), ('pope', '5e-4', '', '0'), ('pope', '5e-4', ', seeds 1, 2', '1,2'))}, {SIXTEEN: OF_POPE[SIXTEEN]}),
    'vipe': (VIPE_ROWS, OF_VIPE),
    'vipe_seeds': (some('vipe'), {task: (f'{iterative(task, 3)[0]} --seeds=0-7', [16]) for task in THREE}),
    'vipe_steps': (some('vipe', 'nope'), {f'{task}, 3 layers': iterative(task, 3, steps=10000) for task in ('copy', 'parity')}),
    'vipe_causes': ({'vipe, no log n': '--pe=vipe --vipe_logn=False', 'vipe, no log n, no u': '--pe=vipe --vipe_logn=False --vipe_u=False', 'vipe, no value code': '--pe=vipe --vipe_value=False'},
                    {f'{task}, 3 layers': OF_VIPE[f'{task}, 3 layers'] for task in ('reverse', 'mode', 'sort')}),
    'vipe_scale': ({'vipe, global s': '--pe=vipe --vipe_s=global'}, {'polynomial, 3 layers': OF_VIPE['polynomial, 3 layers']}),
    'prism': (some('prism', 'shifted_ape'), OF_PRISM),
    'prism_causes': ({'prism, 4 cursors': '--pe=prism --prism_cursors=4', 'prism, learned norm': '--pe=prism --prism_recurrent=norm', 'shifted_ape, shifts to 64': '--pe=shifted_ape --max_shift=64',
                      'shifted_ape at 4e-3': '--pe=shifted_ape --lr=4e-3'},
                     {task: OF_PRISM[task] for task in ('string_copy', 'odds_first')}),
    'prism_odds': (some('prism'), {'one PRISM layer': ('configs/odds_first_prism.py --prism_layers=1', [20]), '6,000 steps': ('configs/odds_first_prism.py --max_steps=6000', [20]),
                                   'trained to 20': ('configs/odds_first_prism.py --train_lengths=1-20 --length_schedule=[(0,5),(400,10),(1000,20)]', [40])}),
    'prism_copy': ({'prism, no copy branch': '--pe=prism --prism_copy=none', 'prism, key cursors trained': '--pe=prism --prism_copy=trained'},
                   {task: OF_PRISM[task] for task in ('dyn_str_cpy', 'dyn_str_cpy, trained to 5', 'scan_cot')}),
    'ablation_vipe': (VIPE, OF_ABLATION),
    'ablation_pope': (POPE, OF_ABLATION),
    'ablation_prism': (PRISM, {name: COLUMNS[name] for name in ('iterative', 'indirect indexing')}),
}

HEADS = [('toeplitz_64', 'distance:span=64', row) for row in GRIDS['toeplitz_64'][0] if 'recipe' not in row]      # whose heads are taken out in turn: grid, column, row
HEADS += [('toeplitz', 'distance:span=16', row) for row in ('rope', 'nope', 'ape', 'alibi', 't5', 'ape+rope', 'mla')] + [('toeplitz', 'trigger_count:most=16', 'rope')]

# the most valuable: pieces whose out_dir begins so, in this order; then all others in the order of GRIDS
FIRST = tuple(f'out/{name}' for name in ('paper_pope/', 'paper_vipe/polynomial', 'paper_toeplitz/distance', 'paper_prism/', 'paper', 'ablation_vipe/', 'cross/', 'vipe', 'toeplitz/', 'prism', 'ablation_prism/',
                                          'toeplitz_64/', 'counting_64/'))

TITLES = {
    'paper_pope': "Indirect indexing at PoPE's size", 'paper_vipe': "ViPE's tasks at its paper's size", 'paper_prism': "PRISM's tasks at its paper's size",
    'paper_toeplitz': "The Toeplitz study's tasks at its size", 'toeplitz': "The Toeplitz study's tasks, 4 layers, 8 heads, trained at 16 tokens, 2,000 steps at a learning rate of 2e-3",
    'indirect': 'Indirect indexing with RMSNorm and a decay of the learning rate (cosine here), as in the PoPE paper, and 10,000 of its 100,000 steps; strings of 3 to 6 letters out of 12',
    'indirect_16': 'The same with 3 layers, strings of 4 to 8 letters out of 16; seed 0 where no other is named',
    'toeplitz_64': "Distance among 64 tokens, 4 layers, 8 heads, 2,500 steps at a learning rate of 1e-3, and what the study's own settings change: dropout of 0.1; betas of 0.98 and 0.9; "
                   'recipe: both, with 8,000 fixed problems, cosine decay, a weight decay of 1e-5 and no clipping, which it does not mention; in 13,600 steps, as there, with 70,000 problems, seed 0',
    'counting_64': 'Counting among 64 tokens, 2 layers, 4 heads, 2,500 steps at a learning rate of 1e-3; fixed: a fixed set of problems, as in the study, of 8,000',
    'vipe': "ViPE's tasks, trained to 8, 2,000 steps at a learning rate of 1e-3", 'vipe_seeds': 'ViPE, 3 layers, seeds 0 to 7',
    'vipe_steps': 'Copy and parity as above, but with 10,000 steps instead of 2,000',
    'vipe_causes': 'What may hold ViPE back where it is behind others: its parts one by one, with 3 layers, else as above',
    'vipe_scale': "ViPE with s as eq. 7 may be read: longest test length / longest training length in every test, here 4; else as above",
    'prism': "PRISM's tasks, recipes as in configs/, made for PRISM (trained to 10 digits, addition to 8, multiplication to 3, SCAN's commands to 22 actions)",
    'prism_causes': "What may hold PRISM's odds first and its baseline back: cursors for each head (2 above), the norm of the GRU's recurrent matrix, the range of the baseline's shifts (512 above) and its learning rate (1e-3 above)",
    'prism_odds': 'The same of odds first: one PRISM layer (2 above), three times the steps, twice the length in training',
    'prism_copy': "What PRISM's copy branch is worth: as above, where its key cursors only step up, but without it, or with key cursors that are trained",
    'ablation_vipe': 'ViPE, every combination of its four parts (without all of them it is NoPE); the longer length here is 10 after 8, and 8 after 6',
    'ablation_pope': "PoPE: softplus or plain magnitudes; a frequency for each feature or RoPE's number; the phase bias; the longer length as above",
    'ablation_prism': "PRISM: sharpening; resets; the mean of the offsets' sinusoids or the sinusoid of the mean offset; 300 steps with problems of up to 4 first; the longer length here is 16 after 8, and 12 after 6",
}

# ---------------------------------------------------------------------------------------------------------------------
# what is there: lines of results/, and the cells of the grids

missing = []                                                      # argvs asked for and not found, in that order
cells = {}                                                        # (grid, row, column): what cell_of() returns


@functools.cache
def runs(name):
    """What results/NAME.jsonl holds."""
    path, found = os.path.join(ROOT, f'results/{name}.jsonl'), []
    for number, line in enumerate(open(path) if os.path.exists(path) else (), 1):
        try:
            found.append(json.loads(line))
            found[-1]['command']
        except (ValueError, TypeError, KeyError):
            raise train.UserError(f'results/{name}.jsonl, line {number}, is cut off: delete it, and what it was about runs again') from None
    return found


@functools.cache
def lines(name):
    """The same by command; of two lines about one, the later."""
    return {run['command'].replace(' --resume', ''): run for run in runs(name)}


def train_argv(name, folder, flags):
    return ['train.py', *shlex.split(flags), f'--out_dir=out/{name}/{folder}', f'--results=results/{name}.jsonl']


def run_of(name, folder, flags):
    """The run in results/NAME.jsonl that these flags made, in out/NAME/FOLDER; None, and an entry in `missing`, if there is none yet."""
    argv = train_argv(name, folder, flags)
    run = lines(name).get('python ' + shlex.join(argv))
    if run is None and (name not in PAPER or torch.cuda.is_available()):
        missing.append(argv)
    return run


def piece(name, row, column):
    """(folder, flags) of a cell, and whether they have a learning rate; where they have one, they name the seeds."""
    rows, columns = GRIDS[name]
    flags = f'{columns[column][0]} {rows[row]}'
    has_rate = '--lr=' in flags or 'configs/' in flags
    if has_rate and '--seeds=' not in flags and name not in ('paper_vipe', 'paper_toeplitz'):   # these have seeds in their configs
        flags += ' --seeds=0-2'
    return f'{train.slug(column)}/{train.slug(row)}', flags, has_rate


def tried(name, row, column):
    """{learning rate: run of seed 0, or None} of a cell whose rate is chosen."""
    folder, flags, _ = piece(name, row, column)
    return {rate: run_of(name, f'{folder},lr={rate}', f'{flags} --lr={rate}') for rate in RATES.get(column, OTHER_RATES)}


def made_of(name, row, column):
    """The runs of a cell; None if one is missing."""
    folder, flags, has_rate = piece(name, row, column)
    if has_rate:
        run = run_of(name, folder, flags)
        return run and [run]
    found = tried(name, row, column)
    if None in found.values():
        return None
    rate = max(found, key=lambda rate: validation(found[rate]))
    more = run_of(name, f'{folder},lr={rate},seeds=1,2', f'{flags} --lr={rate} --seeds=1,2')
    return more and [found[rate], more]


def validation(run):
    """How well seed 0 did on the trained lengths at its last evaluation during training; more is better."""
    if not run['curves'].get('0'):
        return -math.inf                                          # it diverged
    step, trained, *_ = run['curves']['0'][-1]
    return -trained if 'loss' in next(iter(run['lengths']['0'].values())) else trained


def probed(what, name, row, column, seed=0):
    """The line about `python probe.py WHAT` on a cell's seed; None, and an entry in `missing`, if that is not there (the run, if it is not in out/)."""
    folder, flags, _ = piece(name, row, column)
    argv = ['probe.py', what, f'out/{name}/{folder}', *([f'--seed={seed}', f'--out_dir=out/{name}/{folder}/seed_{seed}'] if seed else [])]
    line = lines('probes').get('python ' + shlex.join(argv))
    if line is None and (name, row, column) in cells:             # lengths.json is there when a run has ended; trained again, it needs no second line
        train_again = train_argv(name, folder, flags)[:-1]            # without --results
        missing.append(argv if os.path.exists(os.path.join(ROOT, argv[2], 'lengths.json')) else train_again)
    return line


def asked(*argv):
    """The line about `python probe.py ARGV` on a language model or on weights set by hand; None, and an entry in `missing`, if that is not there."""
    line = lines('probes').get('python ' + shlex.join(['probe.py', *argv]))
    if line is None:
        missing.append(['probe.py', *argv])
    return line


def by_seed(*runs):
    """{seed: {length: scores}} of several runs of one configuration."""
    return {int(seed): {int(n): x for n, x in scores.items()} for run in runs for seed, scores in run['lengths'].items()}


def score(scores, lengths):
    """Exact match over all problems of these lengths (of those that there are: SCAN has no commands of some), nan if there are none; of a corpus minus the
    loss, so that more is better.
    """
    chosen = [scores[n] for n in lengths if n in scores]
    total = sum(x.get('n', 1) for x in chosen)
    return sum(x.get('n', 1) * (-x['loss'] if 'loss' in x else x['exact']) for x in chosen) / total if chosen else math.nan


def holds(scores, longest):
    """The longest length up to which {length: scores} of a seed are at least 95 %; of a corpus, perplexity at most 1 / 0.95 of that at the longest trained.
    As text: ≥ where that is the longest evaluated, none where the shortest is below, - where nothing was evaluated.
    """
    many = sorted(n for n, x in scores.items() if 'loss' in x or x['n'] >= 50)         # SCAN has six problems of length 1
    if not many:
        return '-'
    bar = -score(scores, [longest]) - math.log(0.95)
    good = list(itertools.takewhile(lambda n: scores[n]['loss'] <= bar if 'loss' in scores[n] else scores[n]['exact'] >= 0.95, many))
    return f'≥ {good[-1]}' if good == many else str(good[-1]) if good else 'none'


def cell_of(made, twice):
    """An entry of `cells` from a cell's runs."""
    config, scores, seeds = made[0]['config'], by_seed(*made), sum(len(run['config']['seeds']) for run in made)
    trained, beyond = ([score(run, lengths) for run in scores.values()] for lengths in (config['train_lengths'], twice))
    first = next(iter(scores.values()), {})
    return dict(trained=trained, twice=beyond, holds=[holds(run, max(config['train_lengths'])) for run in scores.values()], config=config,
                lost=f' ({seeds - len(scores)} of {seeds} seeds diverged)' if len(scores) < seeds else '', corpus=any('loss' in x for x in first.values()),
                lengths={n: [run[n] for run in scores.values()] for n in first}, curves=[curve for run in made for curve in run['curves'].values()])


def ask():
    """Fill `cells` with what is there and `missing` with what is not."""
    runs.cache_clear()
    lines.cache_clear()
    missing.clear()
    cells.clear()
    for name, (rows, columns) in GRIDS.items():
        for row, column in itertools.product(rows, columns):
            made = made_of(name, row, column)
            if made:
                cells[name, row, column] = cell_of(made, columns[column][1])
    list(claims()), list(heads_table()), list(perturb_table())    # for the probes that these ask for, missing ones too
    missing[:] = map(list, dict.fromkeys(map(tuple, missing)))    # several probes ask for the same run
    missing.sort(key=lambda argv: next((i for i, start in enumerate(FIRST) if out_dir(argv).startswith(start)), len(FIRST)))


# ---------------------------------------------------------------------------------------------------------------------
# tables and the figure

def spread(values, digits):
    """Mean and standard deviation over seeds; - where nothing was evaluated."""
    if not values or any(map(math.isnan, values)):
        return '-'
    return f'{statistics.mean(values):.{digits}f}' + (f' ±{statistics.stdev(values):.{digits}f}' if len(values) > 1 else '')


def shown(cell, what):
    """Of a cell, as text: trained or twice: exact match in percent, or perplexity; holds: the longest length of each seed, once if they agree; all of them."""
    if what == 'all':
        return ' → '.join(shown(cell, each) for each in ('trained', 'twice', 'holds'))
    if what == 'holds':
        return '/'.join(cell['holds'][:1] if len(set(cell['holds'])) == 1 else cell['holds']) or '-'
    text = spread([math.exp(-x) for x in cell[what]], 2) if cell['corpus'] else spread([100 * x for x in cell[what]], 0)
    return text + cell['lost'] * (what == 'trained')


def begun(name):
    """A grid's rows and columns that have a cell."""
    return [[x for x in axis if any(key[0] == name and key[place] == x for key in cells)] for place, axis in enumerate(GRIDS[name], 1)]


def grid_table(name):
    """A grid as Markdown: in each cell the trained lengths, twice the length, the longest length that holds, and the learning rate where that was chosen."""
    rows, columns = begun(name)
    there, planned = sum(key[0] == name for key in cells), math.prod(map(len, GRIDS[name]))
    waiting = [x for axis, found in zip(GRIDS[name], (rows, columns)) for x in axis if x not in found]
    if not rows:
        yield f'Not run yet{": it wants a GPU" * (name in PAPER)}; `python results/evidence.py run 30` runs its {planned} cells.'
        return
    if there < planned:
        yield f'{there} of {planned} cells so far' + (f'; no cell yet of {"; ".join(waiting)}' if waiting else '') + '.\n'
    turned = len(columns) > len(rows)                             # more columns than rows: they stand below each other, for a screen's sake
    across, down = (rows, columns) if turned else (columns, rows)
    yield '| | ' + ' | '.join(across) + ' |'
    yield '|---' * (len(across) + 1) + '|'
    for label in down:
        found = [cell_lines(name, *((other, label) if turned else (label, other))) for other in across]
        count = f'<br>{parameters(label):,}' if name == 'cross' else ''
        yield f'| {label}{count} | ' + ' | '.join(map('<br>'.join, found)) + ' |'
    chosen = [cell['config']['lr'] == float(RATES.get(key[2], OTHER_RATES)[-1]) for key, cell in cells.items() if key[0] == name and not piece(*key)[2]]
    if chosen:
        yield f'\nIn {sum(chosen)} of these {len(chosen)} cells the learning rate is the highest of the three that were tried.'
    if name in FIGURES and name != 'cross':
        yield f'\n![{TITLES[name].partition(",")[0]}](assets/{name}.png)'
    if name.startswith('ablation'):
        yield from effects(name)


def titled(name):
    """A grid's table under its title; those behind the papers' claims are folded."""
    if name.startswith('ablation'):
        return [TITLES[name] + ':\n', *grid_table(name)]
    return [f'<details><summary>{TITLES[name]}</summary>\n', *grid_table(name), '</details>'] if name in TITLES else grid_table(name)


def cell_lines(name, row, column):
    """What a table shows of a cell."""
    found = cells.get((name, row, column))
    if not found:
        return ['not run yet']
    chosen = [] if piece(name, row, column)[2] else [f'at {found["config"]["lr"]:g}']
    return [shown(found, what) for what in ('trained', 'twice', 'holds')] + chosen


def effects(name):
    """What each part of a factorial is worth, as Markdown: for every pair of rows that differ in it alone, the points by which the second is better."""
    rows, columns = GRIDS[name]
    columns = [column for column in columns if all((name, row, column) in cells for row in rows)]
    if not columns:
        return
    yield '\nOne part changed and the others as they are, each row at its own learning rate: by how many points exact match goes up, mean over all such pairs of rows (from the least to the most):\n'
    yield '| | ' + ' | '.join(f'{column}, {what}' for column in columns for what in ('trained', 'longer')) + ' |'
    yield '|---' * (2 * len(columns) + 1) + '|'
    mean = lambda row, column, what: 100 * statistics.mean(cells[name, row, column][what] or [math.nan])      # nan where all seeds diverged
    labels = [row.split(', ') for row in rows]
    for place, (first, *others) in enumerate(map(dict.fromkeys, zip(*labels))):
        for other in others:
            pairs = [(', '.join(label), ', '.join([*label[:place], other, *label[place + 1:]])) for label in labels if label[place] == first]
            gains = [[mean(b, column, what) - mean(a, column, what) for a, b in pairs] for column in columns for what in ('trained', 'twice')]
            gains = [[x for x in each if not math.isnan(x)] for each in gains]
            yield f'| {other} instead of {first} | ' + ' | '.join(f'{round(statistics.mean(x)):+d} ({round(min(x)):+d} to {round(max(x)):+d})' if x else '-' for x in gains) + ' |'


def parameters(row):
    """How many parameters a row of the cross table has on the iterative task, whose vocabulary is the smallest."""
    cfg = train.make_config(train.read_config(shlex.split(f'{COLUMNS["iterative"][0]} {CROSS[row]}')))
    return sum(p.numel() for p in Transformer(cfg).parameters())


def cross_figure(plt, name):
    """The cross table's means as colours: within the trained lengths on the left, at twice the length on the right."""
    rows, columns = begun(name)
    corpora = {column for (grid, _, column), cell in cells.items() if grid == name and cell['corpus']}
    fig, axes = plt.subplots(1, 2, figsize=(15, 2.2 + 0.36 * len(rows)), layout='constrained', sharey=True)
    for ax, what, title in zip(axes, ('trained', 'twice'), ('on the trained lengths', 'at twice the length')):
        for (j, column), (i, row) in itertools.product(enumerate(columns), enumerate(rows)):
            if (name, row, column) in cells:
                text, shade = colour(cells[name, row, column], what, [c for key, c in cells.items() if key[0] == name and key[2] == column])
                ax.add_patch(plt.Rectangle((j - 0.5, i - 0.5), 1, 1, color=plt.cm.viridis(shade)))
                ax.text(j, i, text, ha='center', va='center', color='white' if shade < 0.6 else 'black', fontsize=12)
            else:
                ax.text(j, i, 'not run', ha='center', va='center', color='0.7', fontsize=9)
        ax.set_title(title, fontsize=14)
        ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        ax.set_xticks(range(len(columns)), [f'{column},\nperplexity' if column in corpora else column for column in columns], rotation=35, ha='right', fontsize=12)
        ax.set_yticks(range(len(rows)), rows, fontsize=12)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    bar = fig.colorbar(plt.cm.ScalarMappable(cmap='viridis'), ax=axes, shrink=0.8)
    bar.set_label('exact match (numbers: %); chorales, text: the\nbest perplexity of the column over this one', fontsize=12)
    return fig


def colour(cell, what, column):
    """A cell's mean as text and its place on the scale from 0 to 1: exact match, or the best trained perplexity of its column over its own."""
    if not cell[what]:
        return 'diverged', 0.0
    if not cell['corpus']:
        mean = statistics.mean(cell[what])
        return f'{100 * mean:.0f}', mean
    perplexity = lambda c, what: statistics.mean(math.exp(-x) for x in c[what])
    best = min(perplexity(c, 'trained') for c in column if c['trained'])
    return f'{perplexity(cell, what):.{1 if perplexity(cell, what) >= 10 else 2}f}', min(1.0, best / perplexity(cell, what))


def panels(plt, name, rows=None):
    """A figure with a panel for each column of a grid: yields (axes, cell, style) of every cell, or of those of some rows, to be drawn there."""
    columns = begun(name)[1]
    across = min(4, len(columns))
    fig, axes = plt.subplots(-(-len(columns) // across), across, figsize=(1 + 3.4 * across, 3.2 * -(-len(columns) // across)), sharey=True, squeeze=False,
                             layout='constrained')
    for ax in axes.flat[len(columns):]:
        ax.remove()
    labels = {}
    for ax, column in zip(axes.flat, columns):
        ax.set(title=column, ylim=(-3, 103))
        for row in rows or GRIDS[name][0]:
            if (name, row, column) in cells:
                yield ax, cells[name, row, column], labels.setdefault(row, train.look(row) or dict(color='0.4', ls=('-', '--', ':')[len(labels) % 3]))
    for ax in axes[:, 0]:
        ax.set_ylabel('exact match (%)')
    fig.legend(handles=[plt.Line2D([], [], **style) for style in labels.values()], labels=list(labels), loc='outside right upper', fontsize=8)


def draw_seeds(ax, x, scores, style):
    """The mean over seeds of scores [len(x)][seed], and each of them as a thin line. Rows drawn before are wider, so that equal ones show behind each other."""
    ax.plot(x, list(map(statistics.mean, scores)), marker='o', ms=2.5, lw=max(1.2, 3.6 - 0.09 * len(ax.lines)), **style)
    ax.plot(x, scores, lw=0.6, alpha=0.8, **style)


def lengths_figure(plt, name):
    """Exact match by length, up to the last length at which anything is right."""
    last = {}
    for ax, cell, style in panels(plt, name):
        lengths = sorted(cell['lengths'])
        scores = [[100 * x['exact'] for x in cell['lengths'][n]] for n in lengths]
        draw_seeds(ax, lengths, scores, style)
        ax.axvline(max(cell['config']['train_lengths']), color='crimson', lw=1)
        last[ax] = max([last.get(ax, 0), *(n for n, each in zip(lengths, scores) if max(each) >= 1)])
        ax.set_xlim(0, 1.1 * last[ax] + 1)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel('length; trained to the red line', fontsize=8)
    return ax.figure


def learning_figure(plt, name, rows=None):
    """Exact match on the trained lengths in the course of training."""
    for ax, cell, style in panels(plt, name, rows):
        evaluations = list(zip(*cell['curves']))                  # of all seeds, at one step; none where all diverged
        draw_seeds(ax, [points[0][0] for points in evaluations], [[100 * exact for _, exact, *_ in points] for points in evaluations], style)
        ax.set_xlabel('step; problems of the trained lengths', fontsize=8)
    return ax.figure


FIGURES = dict(cross=cross_figure, toeplitz=learning_figure, toeplitz_64=functools.partial(learning_figure, rows=TOEPLITZ_ROWS)) | dict.fromkeys(('indirect', 'vipe', 'vipe_seeds', 'vipe_steps', 'prism'), lengths_figure)
BY_LENGTH = 'parity', 'polynomial', 'string_copy_prism', 'polynomial_prism', 'parity_prism', 'string_reverse_prism', 'stdlib', 'jsb', 'scan'


def by_length(name):
    """What train.py's tables and figures take: a configuration and (label, {length: scores}, metric) of every run and seed in results/NAME.jsonl. Runs
    of one encoding are told apart by what these files vary of it; of two lines about one run, the later counts.
    """
    latest = {(run['command'].replace(' --resume', ''), run['config']['out_dir']): run for run in runs(name)}.values()
    if not latest:
        return None, []
    configs = [run['config'] for run in latest]
    varied = [key for key in ('prism_cursors', 'pope_delta') if len({str(config.get(key)) for config in configs}) > 1]
    label = lambda config: ' '.join([config['pe'], *(f'--{key}={config[key]}' for key in varied if key.startswith(config['pe']))])
    rows = [(label(run['config']), scores, 'exact') for run in latest for scores in by_seed(run).values()]
    names = [name for name, *_ in rows]
    rows.sort(key=lambda row: names.index(row[0]))                # a configuration's seeds side by side
    corpus = 'loss' in next(iter(rows[0][1].values()))
    return types.SimpleNamespace(**configs[0], the_task=types.SimpleNamespace(corpus=corpus)), rows


def by_length_table(name):
    """These runs as train.py prints a sweep's."""
    cfg, rows = by_length(name)
    if not rows:
        yield 'Not run yet.'
        return
    yield '```'
    yield from '\n'.join(train.perplexities(cfg, [row[:2] for row in rows]) if cfg.the_task.corpus else train.strips(cfg, rows)).splitlines()
    yield '```'


def speed_table():
    """What --benchmark measured of several seeds in one step, a row for each configuration."""
    if not runs('speed'):
        yield 'Not run yet.'
        return
    counts = max(([step['seeds'] for step in run['steps']] for run in runs('speed')), key=len)
    yield '| one step | steps/s of one seed | 2 seeds together, time over one by one | ' + ' | '.join(map(str, counts[2:])) + ' |'
    yield '|---' * (len(counts) + 1) + '|'
    for run in runs('speed'):
        cfg, (alone, *together) = types.SimpleNamespace(**run['config']), run['steps']
        tokens = train.make_config({key: value for key, value in run['config'].items() if key in train.KEYS}).train_len
        row = [f'{cfg.n_layer} layers, d={cfg.d_model}, batch {cfg.batch_size}, {tokens} tokens', f'{1e3 / alone["ms"]:.1f}']
        yield '| ' + ' | '.join(row + [f'{step["ratio"]:.2f}' for step in together] + [''] * (len(counts) - 1 - len(together))) + ' |'


def perturb_table():
    """Table 1 of position_generalization.txt beside what a real language model here bears: shares of answers, or of next tokens, that are right."""
    line = of_llm('perturb', '--l_max=5', '--n=8')
    if not line:
        yield 'Not run yet.'
        return
    paper = {'text': ('37.4', '41.4', '42.3', '42.4'), 'feature': ('35.1', '41.2', '42.0', '42.3'), 'position': ('37.2', '42.4', '42.4', '42.7')}
    right = {(row['kind'], row.get('gamma'), row.get('l_max')): f'{100 * row["token"]:.1f}' for row in line['rows']}
    yield '| perturbed | share 0.5 | 0.1 | 0.05 | 0.01 | none |'
    yield '|---' * 6 + '|'
    for kind, name in (('text', 'tokens change places'), ('feature', 'keys change places'), ('position', 'position indices')):
        found = [f'{right[kind, gamma, 5]} ({there})' for gamma, there in zip((0.5, 0.1, 0.05, 0.01), paper[kind])]
        yield f'| {name} | {" | ".join(found)} | {right["original", None, None]} (42.5) |'


# ---------------------------------------------------------------------------------------------------------------------
# the papers' claims beside what is found here

def in_row(name, column, what, rows=None):
    """What shown() gives of every row of a column, as text: '`rope` 8, `nope` 9'."""
    found = {row: cells.get((name, row, column)) for row in rows or GRIDS[name][0]}
    return listed({f'`{row}`': cell and shown(cell, what) for row, cell in found.items()}, between=', ')


def in_rows(name, what, which=None, rows=None):
    """The same of several columns of a grid, each on a line of its own."""
    return listed({column: in_row(name, column, what, rows) for column in which or GRIDS[name][1]}, ': ', '<br>')


def listed(found, sign=' ', between='; '):
    """{name: text} as one text, which ends with the names that have none yet; None if none has."""
    text = between.join(f'{name}{sign}{text}' for name, text in found.items() if text is not None)
    waiting = [name for name, text in found.items() if text is None]
    return f'{text}{between if between == "<br>" else " "}(not run yet: {"; ".join(waiting)})' if text and waiting else text or None


def r2(line):
    """The four R2 of a linear probe."""
    values = [value for key, value in line['summary'].items() if 'r2' in key] if line else []
    return '{:.3f} / {:.3f}, {:.3f} / {:.3f}'.format(*values) if line else None


def deposit(name, column, row):
    """Points lost without the head that matters most / the next of the exact match with all, and the layer of the first, for each of seeds 0 to 2; then which
    share of the points that all heads are worth is each layer's, mean over seeds. None where a probe is missing.
    """
    found = [probed('heads', name, row, column, seed) for seed in range(3)]
    if None in found:
        return None
    lost = [[sum(max(0, x) for key, x in layer.items() if key.startswith('drop')) for layer in line['rows']] for line in found]
    shares = [statistics.mean(100 * layers[i] / sum(layers) for layers in lost) for i in range(len(lost[0]))]
    return ['{largest:.0f} / {second:.0f} of {base:.0f}, layer {layer}'.format(**line['summary']) for line in found] + [' / '.join(f'{x:.0f}' for x in shares)]


def heads_figure(plt):
    """assets/heads.png: RoPE and NoPE, trained with dropout, without each of their heads; seed 0. None where a probe is missing."""
    found = {pe: probed('heads', 'toeplitz_64', f'{pe}, dropout', 'distance:span=64') for pe in ('rope', 'nope')}
    if None in found.values():
        return None
    drops = lambda line: torch.tensor([[x for key, x in layer.items() if key.startswith('drop')] for layer in line['rows']])
    scores = {pe: (line['summary']['base'], line['summary']['base'] - drops(line)) for pe, line in found.items()}
    return probe.heads_figure(plt, scores, found['rope']['summary']['unit'], 'distance among 64 tokens, with dropout')


def heads_table():
    """What single heads are worth, a row for each model of HEADS."""
    found = {key: deposit(*key) for key in HEADS}
    yield '| | seed 0 | seed 1 | seed 2 | layers |'
    yield '|---' * 5 + '|'
    yield from ('| ' + ' | '.join([f'{column}, {row}', *texts]) + ' |' for (name, column, row), texts in found.items() if texts)
    waiting = [f'{column}, {row}' for (name, column, row), texts in found.items() if not texts]
    if waiting:
        yield f'\nNot run yet: {"; ".join(waiting)}.'


def taken_out(name, column, row):
    """Exact match without p_i / without random vectors of its length, taken out before each layer."""
    line = probed('positions', name, row, column)
    return line and ', '.join(f'{each["without p"]:.0f} / {each["random"]:.0f}' for each in line['rows'])


def first_states(row):
    """Percent right of the state behind that at distance 1 from EoI, in problems of 8 to 14, at positions that were trained."""
    line = probed('steps', 'vipe', row, 'polynomial, 3 layers')
    return line and ', '.join(f'{100 * each[f"{row} d=1"]:.0f}' for each in line['rows'] if each['length'] in (8, 9, 10, 12, 14))


def looks(row):
    """The best head's mean weight from a state to the input that the next one needs, at the trained length and at a longer one."""
    line = probed('attention', 'vipe', row, 'polynomial, 3 layers')
    return line and ', '.join(f'{value:.2f}' for key, value in line['summary'].items() if key.startswith('s_to_x_t'))


def alone(name, lengths, value, digits):
    """value() of the score over these lengths, of each configuration in results/NAME.jsonl: mean and standard deviation over its seeds."""
    found = {}
    for label, scores, _ in by_length(name)[1]:
        found.setdefault(label, []).append(value(score(scores, lengths)))
    return ', '.join(f'{label} {spread(values, digits)}' for label, values in found.items()) or None


def of_stdlib(what, key):
    """A number of a probe of the library's RoPE and PoPE."""
    found = {pe: lines('probes').get(f'python probe.py {what} out/stdlib/pe={pe}') for pe in ('rope', 'pope')}
    return listed({pe: line and f'{line["summary"][key]:.2f}' for pe, line in found.items()}, between=', ')


perplexity = lambda x: math.exp(-x)                               # of a score()
percent = lambda x: 100 * x
of_llm = lambda what, *flags: asked(what, '--hf=SmolLM2-135M-Instruct.Q4_1.gguf', '--text=tinyshakespeare.txt', *flags)
at_paper = lambda name, what, which=None: {"at the paper's size": in_rows(name, what, which)}


shown_here = 'vipe', 'nope', 'rope', 'fire'                       # of ViPE's Figures 12 to 14, the others in the table of its grid


def claims_of_vipe():
    """Rows of the table of claims: where, what, its number there, what is found here, and a sentence on the difference."""
    linear = listed({row: r2(probed('linear', 'vipe', row, 'polynomial, 3 layers')) for row in ('nope', 'rope', 'ape')} | {'weights set by hand': r2(asked('linear', 'by_hand:polynomial'))})
    states, seen = (listed({row: of(row) for row in rows}) for of, rows in ((first_states, ('nope', 'rope', 'ape')), (looks, ('vipe', 'nope', 'rope'))))
    yield ('Figures 3, 6', 'polynomial: all but ViPE break right behind the trained length, NoPE with 3 layers last', 'curves, best of 8 seeds, trained to 16: ViPE high to about 32',
           listed({'trained to 8, holds to': in_rows('vipe', 'holds', ['polynomial, 2 layers', 'polynomial, 3 layers']),
                   'trained to 16, 7,500 steps, one seed, percent exact at 20': alone('polynomial', [20], percent, 0), 'ViPE with one s for every test (eq. 7)': in_row('vipe_scale', 'polynomial, 3 layers', 'all')} | at_paper('paper_vipe', 'holds', ['polynomial']), ': ', '<br>'),
           'With 3 layers ViPE goes furthest, but by one or two lengths, not to twice the length, in 2,000 of 256,000 steps; behind it NoPE and ALiBi; RoPE, APE, YaRN and T5 end at 8. '
           'With 2 layers ViPE goes as far on two seeds and has not learned it on the third; nor has NoPE, as there, nor ALiBi, T5, FIRE.')
    yield ('Figure 6, left', 'each state looks at the input that the next one needs, at longer lengths too', 'a map of 39 inputs, trained to 16', seen and f'trained to 8, mean weight of the best head on it with 8 inputs, with 20, seed 0: {seen}',
           'As it says, if by half at 2.5 times the length, where no answer is right: of ViPE layer 1 looks at EoI (1.00 at both), layer 2 at the input; NoPE (in layer 3) and RoPE (in layer 2) find it too, and lose it.')
    yield ('Figure 4', 'a state at trained positions goes wrong in longer problems, with RoPE at once, with NoPE last', 'curves',
           states and f'percent of second states right at lengths 8, 9, 10, 12, 14, seed 0: {states}',
           'NoPE lasts longest, as there. Of the others APE goes first here, RoPE there; at distances 3 and 7 as well (at length 9 RoPE 44 and 37 %, APE 31 and 0).')
    yield ('Figure 12', 'copy, parity with one head: ViPE goes furthest', 'a figure, best of 8 seeds',
           listed({'trained to 8, 2,000 steps': in_rows('vipe', 'holds', [f'{task}, {n} layers' for task in ('copy', 'parity') for n in (2, 3)], shown_here),
                   '10,000 steps': in_rows('vipe_steps', 'holds')} | at_paper('paper_vipe', 'holds', ['copy', 'parity']), ': ', '<br>'),
           'In 2,000 of 256,000 steps. 2 layers: ViPE does not learn either on one seed; on the others it holds parity to 9 and 12, copy to 10 and 8 (FIRE: 9 on all). 3 layers: it goes furthest on copy, by a length (one seed of '
           'NoPE and of ALiBi comes as far), and on parity not: beyond 8 go ViPE and FIRE on one seed, NoPE on the two that learn it. '
           'Five times the steps carry ViPE one or two lengths further on all seeds but one of parity; NoPE on one seed of copy, one goes back, and on one of parity, which then learns the task: steps are a part '
           'of what is missing.')
    yield ('Figure 13', 'the same with more layers and heads', 'a figure, means over 4 to 6 layers', listed({'trained to 8': in_rows('vipe', 'holds', [column for column in OF_VIPE if 'heads' in column], shown_here)}, ': '),
           'With 6 layers and 4 heads ViPE goes furthest on all three, as there, if not far: on average it has 98 % of the polynomial at 10 (NoPE 40), 59 of copy at 12 (NoPE 22), 89 of parity at 10 (FIRE 80, NoPE 79). With 4 layers and 2 heads it does on copy '
           '(to 12 on one seed, which has 48 % at 16) and on the polynomial (93 % at 10, NoPE 36, FIRE 14); on parity NoPE, ALiBi and FIRE are ahead, 9 on all seeds. YaRN\'s stretched angles happen to fit at 14 (6 layers, copy: 56 to 80 %, next to nothing at 9 to 12 and at 16).')
    yield ('Figure 14', 'the same on count, reverse, mode, sort', 'a figure, means',
           listed({'trained to 8': in_rows('vipe', 'holds', [f'{task}, {n} layers' for task in ('count', 'reverse', 'mode', 'sort') for n in (2, 3)], shown_here), 'without its parts, sort, 3 layers': in_row('vipe_causes', 'sort, 3 layers', 'all')}, ': ', '<br>'),
           'Count: ViPE goes furthest, level with T5 (at 16, with 2 layers 11 and 14 %, NoPE 1; with 3, 30, 27 and 0). Mode: ViPE holds to 12 to 20, all others but APE to 16 at least, most to twice that. '
           'Sort at 16: with 2 layers NoPE, ALiBi, T5 and FIRE keep 44 or 45 %, ViPE 7; with 3, FIRE 65, the other three 57 to 60, YaRN 34, ViPE 24. Reverse, 2 layers: RoPE, APE and YaRN learn it, FIRE nearly, which keeps most at 10 (45 %); '
           'ViPE learns it least (44 %). 3 layers: all learn it but one seed of ViPE; at 10 FIRE has 84 to 87 %, ViPE 95, 63 and 34, NoPE and ALiBi 29 to 74. '
           'What rescales the logits costs some of it: without log n and u every seed keeps more, of sort at 16 26, 56 and 37 % instead of 10, 39 and 22, of reverse at 10 91, 97 and 45 instead of 63, 95 and 34 (seeds 0, 1, 2). Without log n alone sort and mode gain, but one seed does not '
           'learn to reverse; without the value code one does not either, and 6 % of sort are left. No mean of these comes to NoPE\'s 60 on sort or FIRE\'s 86 on reverse; steps, 2,000 of 256,000, were not varied.')
    yield ('Figure 15', 'ViPE holds beyond over 8 seeds', 'a figure, means', listed({'trained to 8': in_rows('vipe_seeds', 'all')}, ': '),
           'All 8 learn copy and parity, 7 the polynomial. Beyond 8 go those 7 on the polynomial, 7 on copy, 5 on parity, none further than 10.')
    yield ('Tables 1, 4, 5', 'R2 of position from layer 1, trained / longer lengths (to 3 times; here 4), and of distance to EoI from layer 2',
           'NoPE 0.975 / 0.864, 0.891 / 0.814; RoPE 0.943 / 0.542, 0.869 / 0.667; APE 1.000 / 0.721, 0.891 / 0.614', linear and f'seed 0: {linear}',
           'On trained lengths as high as there or higher, but for RoPE; beyond all fall, NoPE least, as there, RoPE and APE below 0. The weights set by hand need the distance alone and have it at any length.')
    yield ('Table 2', 'SCAN (which split is not said; here the length split)', 'ViPE 15.0, NoPE 13.2, RoPE 2.1, APE 0.0', listed({'reduced, one seed:': alone('scan', range(24, 49), percent, 1)}),
           'The same order but for the first two, which one seed does not tell apart; half the layers, a quarter of the width.')


def claims_of_prism():
    """As claims_of_vipe."""
    of_cot = [task for task in OF_PRISM if task.endswith('_cot')]
    cursors = [probed('cursor', 'prism_odds', 'prism', 'trained to 20', seed) for seed in (1, 2)]
    half = None if None in cursors else ', '.join(f'{min((row["moves"] for row in line["rows"]), key=lambda pace: abs(abs(pace) - 0.5)):.2f}' for line in cursors)
    yield ('Figures 2, 3, 5-7, 10', 'far beyond the trained lengths, the baseline (not in Figure 2) not', 'curves, trained to 5, 10 or 40; in words, copying and reversing to 100 after 10',
           listed({'trained to 10': in_rows('prism', 'all', [task for task in OF_PRISM if task not in (*of_cot, 'odds_first')]), 'otherwise, string_copy': in_row('prism_causes', 'string_copy', 'all'),
                   'otherwise, dyn_str_cpy': in_row('prism_copy', 'dyn_str_cpy', 'all'), 'trained to 5': in_row('prism_copy', 'dyn_str_cpy, trained to 5', 'all')} | at_paper('paper_prism', 'all'), ': ', '<br>'),
           'Holds for copying (3 of 3 seeds; 9 of 12 in two other runs, [above](#past-the-trained-length)), for reversing on 1 of 3. At twice the length stack keeps 46 %, dyn_str_cpy 77 (trained to 5: 34, less than the baseline\'s 51). '
           'With the key cursors of its copy branch trained, which the paper has step up with every token, dyn_str_cpy goes on to 80, 100 and 150 on all seeds, trained to 10 or to 5 alike; without the branch hardly anything does (27 and 30 % at twice the length). '
           'The paper saw a difference on this task and SCAN alone, and does not say which. '
           'The baseline has on no task learned all trained lengths in so few steps, a fiftieth of the paper\'s or less, at 1e-3, the rate of PRISM\'s configs here, low for it (for exact-match tasks the cross table chooses 2e-3 or 4e-3); most on dyn_str_cpy, of which it keeps 29 % at twice the length. Of copying\'s trained lengths it has 50 %, at 4e-3 49, with shifts of up to 64 instead of 512 77, and nothing beyond.')
    yield ('Figure 8', 'odds first: the same', 'a curve, trained to 40', listed({'trained to 10': in_row('prism', 'odds_first', 'all'), 'otherwise': in_row('prism_causes', 'odds_first', 'all'), **{
               column: in_row('prism_odds', column, 'all') for column in GRIDS['prism_odds'][1]},
               'of its cursors, seeds 1 and 2, the pace nearest to half a place a token': half}, ': ', '<br>'),
           'Not here: PRISM learns its lengths and has nothing right from 13 on, nor with 4 cursors for each head instead of 2, a learned norm, one PRISM layer instead of two, or three times the steps; nor from 30 on trained to 20, of which two seeds learn 15. '
           'No cursor of these two goes steadily by half a place a token, through the string two by two; some key cursors go to and fro, which could tell odd places from even. A learned norm, which the paper\'s footnote 8 has further improve odds first and SCAN, does not here (SCAN not tried). '
           'Nor were the paper\'s 150,000 steps and 40 digits.')
    yield ('Figures 1, 4, 9', 'the same with a chain of thought: addition, SCAN, multiplication', 'curves, trained to 10 digits, commands of 22 actions, 9 digits; in words, addition of 20 digits after 10', listed({'trained to 8 digits, 22 actions, 3 digits': in_rows('prism', 'all', of_cot), 'otherwise, scan_cot': in_row('prism_copy', 'scan_cot', 'all')}, ':<br>', '<br>'),
           'Addition is learned and goes on a little, multiplication is learned and does not go on; the baseline has not learned the one, the other nearly, in these 3,000 of the 150,000 steps. Of SCAN\'s commands of 24 to 48 actions, written out word by word, PRISM '
           'executes 38 % after 1,500 steps, each length counting the same, 91 to 98 of those of 24, next to none from 36 on; the baseline none of any length. Here the copy branch carries nothing: 39 ±7 % without it, 36 ±17 with its key cursors trained.')


def claims_of_pope():
    """As claims_of_vipe."""
    indirect = {'2,500 steps': in_row('cross', 'indirect indexing', 'trained', ('rope', 'pope'))} | {
        '2,500 steps, PoPE': in_row('ablation_pope', 'indirect indexing', 'trained', ['softplus, d frequencies, delta from anywhere'])} | {TWELVE: in_row('indirect', TWELVE, 'trained'), SIXTEEN: in_row('indirect_16', SIXTEEN, 'trained')}
    yield ('Table 1', 'indirect indexing', 'RoPE 11.16 ±2.45, PoPE 94.82 ±2.91', listed(indirect | at_paper('paper_pope', 'trained'), ': ', '<br>'),
           'Not seen at this size: strings of 3 to 6 of 12 letters, shifts of at most 2, or of 4 to 8 of 16, at most 3. In 2,500 steps PoPE is ahead with phases from anywhere, as there, but by less than the seeds of RoPE differ, and level with phases from 0; in '
           '10,000 both learn it, of 16 letters each on two seeds of three. There RoPE at 2e-3, its best rate with 12, has 49 %: too high a rate looks like the gap. At twice the length PoPE (phases from 0) keeps twice as much, 41 % of 12 letters and 34 of 16, RoPE 20 and 18.')
    yield ('Table 2', 'chorales, loss a token', 'RoPE 0.5081, PoPE 0.4889',
           listed({'contexts of 512': alone('jsb', [512], lambda x: -x, 3), 'contexts of 128, here as perplexity': in_row('cross', 'chorales', 'trained', ('rope', 'pope'))}, ': ', '<br>'),
           "With phases from anywhere, as it has them there, level with RoPE and ahead on two seeds of three; half the layers, a quarter of the width and of the context. With phases from 0, in the cross table too, RoPE is ahead by more than its seeds differ.")
    yield ('Table 4', 'OpenWebText, perplexity: PoPE ahead', '124 million parameters: RoPE 21.55, PoPE 21.33', listed({'the library, byte by byte, contexts of 64': in_row('cross', 'text', 'trained', ('rope', 'pope'))}, ': '),
           'As it says, on another text and at a thousandth of the size, by more than the seeds differ.')
    yield ('Figure 2', 'perplexity at 10 times the trained context: PoPE holds up, RoPE does not', 'curves',
           listed({'on the library, within': alone('stdlib', [128], perplexity, 2), 'at 10 times': alone('stdlib', [1280], perplexity, 2)}),
           'It rises less and more slowly than with RoPE, but is not flat, with 180,000 parameters and a context of 128 instead of 124 to 774 million and 1,024, on the trained kind of text, there on books. Its phases start at 0 here; from anywhere it is far worse beyond on two seeds of three (on chorales, below).')
    yield ('Figures 3-6', 'RoPE uses few frequencies in all layers, PoPE behind the first layer the fast ones too', 'maps',
           listed({'on the library, one seed: share of the frequencies used': of_stdlib('frequency', 'used'), 'of the norm in the fast half': of_stdlib('frequency', 'fast_after_first')}),
           'PoPE has more in the fast half, as there; but in contexts of 128 RoPE leaves few frequencies unused, fewer than PoPE.')
    yield ('sections 2, 3', "the distance that RoPE's logits prefer moves with the content, that of PoPE's does not", '', listed({'on the library, one seed, interquartile range over contents, of 256 tokens:': of_stdlib('tuning', 'shift')}),
           "As it says; all of PoPE's logits prefer the distance 0, where its phases started.")
    yield ('Table 8', 'OpenWebText: softplus and delta both contribute; without softplus the gain on RoPE is gone',
           'perplexity 21.33; without softplus 21.57, without delta 21.42 (in this order, we take it: the rows have lost their names); RoPE 21.55',
           in_rows('ablation_pope', 'trained', rows=['softplus, d frequencies, delta from 0', 'no softplus, d frequencies, delta from 0', 'softplus, d frequencies, no delta']),
           'Other tasks, on which single rows do not tell. Over all pairs of the table below, of indirect indexing no softplus costs 3 points (-10 to +3) and 6 beyond, no delta none; phases from anywhere (there they start at 0) are worth 5 within and cost 6 beyond (16 in one pair of four, 1 to 3 in the others).')
    yield ('section 3', 'phases that start at 0 matter beyond the trained length; from anywhere they do slightly better within', '',
           listed({'chorales, perplexity': listed({f'in contexts of {n}': alone('jsb', [n], perplexity, 2) for n in (512, 1024, 2048)})}, ': ', '<br>'),
           'As it says within, by 6 to 8 %. At four times the trained context phases from 0 have 2.19 to 2.48 on every seed, from anywhere 2.33 on one, 8.15 and 10.57 on the others: they matter on most seeds, not on all. Of indirect indexing beyond, in the factorial below, PoPE tells nothing (51 and 53 % by seeds from 28 to 66).')


def claims_of_the_toeplitz_study():
    """As claims_of_vipe."""
    rows_64 = [row for row in GRIDS['toeplitz_64'][0] if ' on ' not in row]
    partial = [row for row in GRIDS['toeplitz_64'][0] if row.startswith('rope on')]
    layers = lambda name, column, rows: listed({f'`{row}`': found and found[-1] for row in rows for found in [deposit(name, column, row)]}, between=', ')
    positions = [listed({row: taken_out(name, column, row) for row in ('ape', 'ape+rope')}) for name, column in (('toeplitz_64', 'distance:span=64'), ('toeplitz', 'distance:span=16'))]
    yield ('Figures 2, 3, Table 1', 'distance: RoPE best, absolute second, ALiBi struggles, NoPE and T5 at chance; counting: ALiBi worst (Figure 3), RoPE behind MLA and NoPE (Table 1; nearly with NoPE in Figure 3)',
           'distance: RoPE 92.6, MLA 88.3, NoPE 3.5; counting: RoPE 69.4, MLA 97.4, NoPE 77.7',
           listed({'64 tokens': in_rows('toeplitz_64', 'trained', rows=rows_64),
                   '16 tokens': in_rows('toeplitz', 'trained', ['distance:span=16', 'trigger_count:most=16']),
                   'counting, 2 layers': in_row('cross', 'counting', 'trained', ('rope', 'mla', 'nope', 'alibi')),
                   'counting, 64 tokens': in_rows('counting_64', 'trained')} | at_paper('paper_toeplitz', 'trained'), ': ', '<br>'),
           'At a learning rate of 1e-3 NoPE learns distance too, from the causal mask alone, and best, level with T5 (100) and with a RoPE of 8 layers; ALiBi does not struggle (98, like MLA), fixed random vectors are last (65). Of what the study does otherwise, its rate of 1e-4 leaves neither done in 2,500 steps, dropout of 0.1 both at the same 87 to 88, '
           'its betas NoPE behind on two of three seeds. With all of these but the rate, on 8,000 fixed problems, neither learns; with the rate as well, on 70,000 problems in 13,600 steps, both do, NoPE 86, RoPE 83 (seed 0): no part of that recipe keeps NoPE at chance. Nor does RoPE learn it fastest: after 500 steps it has 36, 29 and 48 % right, NoPE 54, 36 and 53, T5 54, 28 and 38. At 16 tokens all learn both. Counting all learn among 64 too (ALiBi 99 %), and have 3 to 5 % left at twice the length, where a guess has 3; on 8,000 fixed problems the order is that of Figure 3 (NoPE 98, RoPE 97, ALiBi 96), by less than the seeds of RoPE and ALiBi differ, '
           'behind fixed random vectors (100), which overfit there. Not tried: its batch of 512, its width, 128 tokens.')
    yield ('Figures 4, 5, 7, 9-11', 'one head of RoPE in layer 1 does nearly all (the deposit); with APE added it is in a deeper layer; NoPE, T5, ALiBi, MLA, and RoPE at counting have no such head; APE some, in shallow layers',
           'RoPE without that head: some 60 % lost, without another next to nothing',
           listed({'share of what all heads are worth (one by one in the table of heads below), layer by layer': layers('toeplitz_64', 'distance:span=64', ('rope', 'rope, dropout', 'rope, 8 layers', 'nope', 'nope, dropout', 'ape', 'random', 'alibi', 't5', 'ape+rope', 'mla')),
                   '16 tokens': layers('toeplitz', 'distance:span=16', ('rope', 'nope', 'ape', 'alibi', 't5', 'ape+rope', 'mla')),
                   'counting': layers('toeplitz', 'trigger_count:most=16', ('rope',))}, ': ', '<br>'),
           'Without dropout RoPE\'s work is in layer 1 (63 %; with NoPE 79 % in layers 3 and 4), but two or more heads share it; with the study\'s dropout one head is worth 1.4 to 2.2 times the next (1.0 to 1.7 without), but layer 1 has '
           '33 % only, and on one seed that head is in layer 2. NoPE has large heads too, but several: on seed 0 one of layer 1 and three of layer 3 take 79 to 92 points each. APE+RoPE has most in layer 1 (48 %), not deeper, and no head that stands out (1.0 to 1.4 times the next), nor has MLA (1.1 to 1.2), as there; APE\'s are in layer 1 (57 %), as there; '
           'nor has RoPE with 8 layers one: no head is worth more than 47 points, three quarters are in layers 1 to 3, the largest head is in layer 2 or 3. '
           'At 16 tokens one head stands out with APE+RoPE on all seeds (2.3 to 3.3 times the next), in layer 1, not in a deeper one, and with RoPE, MLA and APE on one seed each (3.7, 3.2 and 2.3 times), in layer 1 as well; of ALiBi\'s work half is there (among 64 tokens 35 %), T5\'s is in layers 3 and 4, like NoPE\'s, at both lengths. '
           'At counting RoPE has no such head, as there: none is worth more than 26 points; what there is is mostly in layer 1 (97, 96 and 58 %), on one seed in one head (26, the next 3).')
    yield ('Figures 6, 12, D.4', 'one or two heads with RoPE are enough, and they carry it', 'curves',
           listed({'trained': in_rows('toeplitz_64', 'trained', rows=['rope', *partial]), 'layers 1 / 2 / 3 / 4': layers('toeplitz_64', 'distance:span=64', partial)}, ': ', '<br>'),
           'One head with RoPE is enough, as there, but so is none: NoPE has 100. Two or four heads carry what layer 1 is worth (73 to 97 %, 66 to 100), one does on one seed of three (95, 24 and 44), and there the largest head of the model is one without RoPE on every seed. The fewer they are, the more is done in layers 2 and 3, where on 5 of 9 seeds the largest head is, as it may be in D.4.')
    yield ('Figure 8', 'points lost when p_i is taken out before each layer, beyond random vectors: APE in all, with RoPE only in the first two', 'curves',
           listed(dict(zip(('percent right without p_i / without random vectors, before layers 1 to 4, seed 0, 64 tokens', '16 tokens'), positions)), ': ', '<br>'),
           'Among 64 tokens p_i costs more than another vector before layers 2 and 3, with RoPE (21 and 16 points) as without (33 and 7), and not before layer 4: no difference of that kind. Before layer 1 it is 0.99 of the residual stream\'s length, as embeddings start small here, and any vector of that length '
           'leaves next to nothing. At 16 tokens it costs 6 and 2 points more before layer 2, and nothing behind.')
    yield ('appendix E', 'the sum of several distances (here of two): learned, but no RoPE goes beyond its length', 'a sentence', in_row('toeplitz', 'distance_sum:span=16', 'all', ('rope', 'ape+rope', 'mla')),
           'As it says: RoPE and MLA learn it, with APE beside it less; at twice the length 2 to 3 % are left, with APE or without, less than one answer to all would get (7).')


def claims_of_the_llm_paper():
    """As claims_of_vipe."""
    axes, apart, stretch = (line and line['summary'] for line in map(of_llm, ('axes', 'disentangle', 'stretch')))
    tuples, shaken = of_llm('tuples'), of_llm('perturb', '--gammas=0.01,0.1', '--l_max=10,100', '--n=4', '--out_dir=out/perturb_to_100')
    of_pairs = tuples and {key: statistics.median(row[key] for row in tuples['rows']) for key in ('ratio', 'rotation', 'fixed')} | tuples['summary']
    costs = shaken and {(row['kind'], row['gamma'], row['l_max']): f'{100 * math.expm1(row["cost"]):.1f} %' for row in shaken['rows'] if row['gamma']}
    yield ('the three correlations', 'logits are nearly sums: three axes; fake distances; f and g of eq. 15', '0.865, 0.947, 0.959',
           axes and apart and 'SmolLM2: three axes {mean_r:.3f}; '.format(**axes) + 'fake distances {mean_r:.3f}; f and g {mean_r_fg:.3f}, with the sign that eq. 15 drops {mean_r_signed:.3f}; f and g of all pairs of features {mean_r_all:.3f}, with the whole of k - mean {mean_r_whole:.3f}'.format(**apart),
           'Another model of another size, its weights in 4 bits, and the first two agree. The third depends on which pairs count as slow, for which the paper names no bound: with ours it does not come out, with sign or without; with all pairs its own f and g come nearer, and with the whole of k - mean nearest.')
    yield ('Observation 1, Figure 4', 'a few pairs of features, slow ones, make the logits: there keys hardly differ, and turn little over the trained length', 'drawings',
           of_pairs and '{pairs} slow dominating pairs in {heads} of {of_heads} heads; of the 60 strongest the median is {ratio:.0f} times its head\'s median pair, turns by {rotation:.1f} rad, and its keys are off their mean by '
                        '{fixed:.2f} of it'.format(**of_pairs),
           'Keys nearly fixed and pairs that stand out, as it says. That they turn little is how slow ones were chosen, by less than a quarter (1.57 rad), and most are just below.')
    yield ('Figure 5', 'perplexity bears disorder', 'from 3.688 up by 0.02 (0.5 %) with a hundredth of the tokens shuffled within 1,000 places, by 0.01 (0.3 %) with a hundredth of the position indices off by up to 10, "marginal" with a tenth',
           costs and 'perplexity up, a hundredth / a tenth disordered, within 10 places: ' + '; '.join(
               f'{name} {costs[kind, 0.01, 10]} / {costs[kind, 0.1, 10]}' for kind, name in (('text', 'tokens'), ('feature', 'keys'), ('position', 'position indices'))),
           'Position indices bear a hundredth, as there, but not a tenth. Tokens do not bear a hundredth, in plays, 512 at a time; keys, here on 4 stretches, cost 1.6 %, on the 8 of the table above, within 5 places, 7: too few to tell.')
    yield 'Table 1', 'answers bear it as well', 'Qasper', 'beside its numbers [above](#looking-inside)', 'Position indices cost least, as there up to a tenth.'
    yield ('Figure 6', 'attention over a window that slides along gives outputs such as it is used to', 'a drawing',
           stretch and 'layer {layer}, a window of {window} of {tokens} tokens: {inside:.2f} of the outputs within the ellipse of 99 % of the normal ones'.format(**stretch), 'As it says, nearly: one stretch of text, six queries, all within the 8,192 tokens that the model was trained on.')


def claims():
    """The tables of claims as Markdown, one for each paper: what it says and where, its number, what is found here, and a sentence on the difference."""
    papers = {'ViPE': claims_of_vipe, 'PRISM': claims_of_prism, 'PoPE': claims_of_pope, 'The Toeplitz study': claims_of_the_toeplitz_study, 'LLM position generalization': claims_of_the_llm_paper}
    for paper, rows in papers.items():
        yield f'**{paper}**\n'
        yield '| claim | there | here | the difference |'
        yield '|---|---|---|---|'
        for where, claim, there, here, difference in rows():
            yield f'| {where}: {claim} | {there} | {here or "not run yet"} | {difference if here else ""} |'
        yield ''
    yield '<details><summary>The probes behind it</summary>\n\n```'
    yield from (run['command'] for run in runs('probes'))
    yield '```\n</details>'


# ---------------------------------------------------------------------------------------------------------------------
# the three commands

def run(minutes, jobs):
    """Run missing pieces, `jobs` at a time, until the minutes are over or Ctrl-C; what is cut off goes on from its checkpoint next time."""
    try:
        import fcntl
    except ImportError:
        raise train.UserError('`run` locks its folder, which Python cannot do on Windows: run by hand the command that `evidence.py` names, one after the other') from None
    deadline, running, ended = time.time() + 60 * minutes, {}, []                       # running: process -> (argv, what it says of errors)
    os.makedirs(os.path.join(ROOT, 'out'), exist_ok=True)
    lock = open(os.path.join(ROOT, 'out/evidence.lock'), 'w')
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise train.UserError('another `evidence.py run` is at work in this folder') from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            for process in [process for process in running if process.poll() is not None]:
                argv, errors = running.pop(process)
                ended.append(argv)
                if process.returncode:                                                  # a run of which some seeds diverged has left its line
                    errors.seek(0)
                    print(f'status {process.returncode}: python {shlex.join(argv)}\n{errors.read().decode(errors="replace").strip()}')
                elif argv[0] == 'probe.py':
                    write_probe(argv)
            ask()
            at_work = [argv for argv, _ in running.values()]
            waiting = [argv for argv in missing if argv not in ended and argv not in at_work and not lacks(argv)]
            if time.time() > deadline or not (waiting or running):
                break
            for argv in waiting[:jobs - len(running)]:
                print(f'{time.strftime("%H:%M:%S")} {len(waiting)} or more to run; next {out_dir(argv)}', flush=True)
                process, errors = start(argv, jobs, lock.fileno())
                running[process] = argv, errors
            while time.time() < deadline and all(process.poll() is None for process in running):
                time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    finally:                                                                            # they save now
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process, (argv, _) in running.items():
            if process.wait() == 0 and argv[0] == 'probe.py':
                write_probe(argv)
    ask()
    ended += [argv for argv, _ in running.values() if argv not in missing]
    for path in sorted(set(filter(None, map(lacks, missing)))):
        print(f'left out what needs {path}: put it there')
    failed = [argv for argv in ended if argv in missing]
    print(f'{len(ended) - len(failed)} done, {len(failed)} failed, {len(missing)} or more to run')
    return bool(failed)


def lacks(argv):
    """The file that a piece needs and that is not there, or None."""
    paths = [arg.partition('=')[2] for arg in argv if arg.startswith(('--data=', '--hf=', '--text='))]
    return next((path for path in paths if not os.path.exists(os.path.join(ROOT, path))), None)


def start(argv, jobs, *shared):
    """A process for a piece, one of `jobs`, which share the CPU's cores; and the file that takes its errors. It goes on from a checkpoint of the very same piece,
    and holds the open files `shared`, so that what is locked stays so as long as it works.
    """
    env = ({} if torch.cuda.is_available() else {'OMP_NUM_THREADS': str(max(1, os.cpu_count() // jobs))}) | os.environ
    folder, resume = os.path.join(ROOT, out_dir(argv)), []
    if argv[0] == 'train.py':
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, 'piece'), 'a+') as f:
            f.seek(0)
            resume = ['--resume'] * (f.read() == shlex.join(argv) and os.path.exists(os.path.join(folder, 'ckpt.pt')))
            f.truncate(0)
            f.write(shlex.join(argv))
    errors = tempfile.TemporaryFile()
    return subprocess.Popen([sys.executable, *argv, *resume], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors,
                            start_new_session=True, pass_fds=shared), errors                             # a Ctrl-C is for this program


def out_dir(argv):
    """The folder that a piece works in."""
    flags = dict(arg[2:].split('=', 1) for arg in argv if re.match('--.*=', arg))
    if 'hf' in flags:
        flags = dict(out_dir=f'out/{train.slug(os.path.basename(flags["hf"]))}') | flags
    return flags.get('out_dir') or argv[2].replace('by_hand:', probe.BY_HAND_DIR)


def write_probe(argv):
    """Append a line about a probe that has just been made."""
    with open(os.path.join(ROOT, out_dir(argv), f'probe_{argv[1]}.json')) as f:
        line = dict(probe=argv[1], command='python ' + shlex.join(argv)) | json.load(f) | train.machine(train.pick_device(train.Config()))
    train.append(os.path.join(ROOT, 'results/probes.jsonl'), json.dumps(line) + '\n')


def readme():
    """The README's text with every table between its marks, <!-- NAME --> and <!-- end of NAME -->, made anew."""
    with open(os.path.join(ROOT, 'README.md')) as f:
        text = f.read()
    for name, table in ({name: titled(name) for name in GRIDS} | {name: by_length_table(name) for name in BY_LENGTH} |
                        dict(speed=speed_table(), perturb=perturb_table(), claims=claims(), heads=heads_table())).items():
        before, mark, rest = text.partition(f'<!-- {name} -->\n')
        _, end, after = rest.partition(f'<!-- end of {name} -->\n')
        if not (mark and end):
            raise train.UserError(f'README.md has no marks <!-- {name} --> and <!-- end of {name} -->: put both where the table belongs')
        text = before + mark + ''.join(f'{line}\n' for line in table) + end + after
    return text


def main(argv):
    """The program; returns the exit status."""
    if argv in (['--help'], ['-h']):
        print(__doc__)
        return 0
    if argv[:1] == ['run'] and re.fullmatch(r'(\d+|\d*\.\d+)( [1-9]\d*)?', ' '.join(argv[1:])):
        return run(float(argv[1]), int(argv[2]) if len(argv) == 3 else 4 if torch.cuda.is_available() else os.cpu_count())
    if argv not in ([], ['readme']):
        raise train.UserError('write `run MINUTES`, `run MINUTES JOBS` (how many at a time), `readme`, or nothing to see what is there')
    ask()
    if argv:
        try:
            import matplotlib
        except ImportError:
            raise train.UserError('the figure wants matplotlib: pip install matplotlib') from None
        matplotlib.use('Agg')
        import matplotlib.pyplot as plt
        text = readme()
        for name in {key[0] for key in cells} & FIGURES.keys():
            FIGURES[name](plt, name).savefig(os.path.join(ROOT, f'assets/{name}.png'), dpi=110)
        heads = heads_figure(plt)
        if heads:
            heads.savefig(os.path.join(ROOT, 'assets/heads.png'), dpi=110)
        for name in filter(runs, ('parity', 'stdlib')):
            train.figure(os.path.join(ROOT, f'assets/{name}.png'), *by_length(name), swept=True)
        train.write(os.path.join(ROOT, 'README.md'), text)
        return 0
    for name, (rows, columns) in GRIDS.items():
        print(f'{name:16}{sum(key[0] == name for key in cells):4} of {len(rows) * len(columns)} cells')
    print(f'\n{len(missing)} or more pieces to run, the first: python {shlex.join(missing[0])}' if missing else '\nnothing is missing')


if __name__ == '__main__':
    try:
        sys.exit(main(sys.argv[1:]))
    except train.UserError as error:
        print(f'evidence.py: {error}', file=sys.stderr)
        sys.exit(2)
