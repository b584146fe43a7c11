"""The plan of the evidence: which runs and probes there should be, and which of them are there.

A piece is one call of train.py or probe.py. The line that it leaves in results/*.jsonl stores its
command, and by that command it is found again: a flag changed here asks for a new run.
A grid is a table of pieces: rows (encodings or variants of one) by columns (tasks). Tables and
claims ask for pieces by run_of(), probed() and asked(); what these do not find goes into `missing`.
"""
import functools
import itertools
import json
import math
import os
import re
import shlex
import statistics
from typing import NamedTuple

import torch

from engine.config import UserError, slug
from probes import by_hand

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# --------------------------------------------------------------------------------------------------
# the cross table: every encoding on a task of every family. A column has one width, depth and
# number of steps. Where a column gives no learning rate, each cell takes the one of three with
# which seed 0 ends best on validation problems of the trained lengths; seeds 1 and 2 train at it.

SIZE = '--d_model=64 --n_layer=2 --n_head=2 --warmup_steps=100 --eval_interval=500 '
TO_8 = ('--train_lengths=1-8 --eval_lengths=1-12,14,16,20,24,32 --max_steps={} --batch_size=32 '
        '--n_eval=64 --n_test=512')
TO_16 = '--train_lengths=16 --eval_lengths=16-24,28,32,48 --max_steps={} --n_test={}'
TO_64 = ('--train_lengths=64 --eval_lengths=64,72,80,96,128 --max_steps=2500 --batch_size=32 '
         '--n_test=512')
INDIRECT = (SIZE + '--task=indirect_indexing:letters=12:shift=2 --train_lengths=3-6 '
            '--eval_lengths=3-12 --max_steps=2500 --n_test=512')

COLUMNS = {                     # task family: flags, lengths that stand for twice the trained one
    'indirect indexing': (INDIRECT, [12]),
    'iterative': (SIZE + '--task=polynomial ' + TO_8.format(1500), [16]),
    'algorithmic': (SIZE + '--task=string_reverse ' + TO_8.format(1500), [16]),
    'SCAN': (SIZE + '--task=scan --train_lengths=1-22 --eval_lengths=1-48 --max_steps=1500 '
             '--batch_size=32 --n_eval=16 --n_test=256', range(24, 49)),
    'distance': (SIZE + '--task=distance:span=16 ' + TO_16.format(1000, 512), [32]),
    'counting': (SIZE + '--task=trigger_count:most=16 ' + TO_16.format(1000, 512), [32]),
    'chorales': (SIZE + '--task=jsb --data=data/Jsb16thSeparated.json --train_lengths=128 '
                 '--eval_lengths=128,160,192,256,512 --max_steps=500 --batch_size=8 --n_eval=16',
                 [256]),
    'text': (SIZE + '--task=stdlib --train_lengths=64 --eval_lengths=64,80,96,128,256 '
             '--max_steps=500 --batch_size=16 --n_eval=8 --n_test=64', [128]),
}
TWELVE = '12 letters, shifts up to 2'
SIXTEEN = '16 letters, shifts up to 3'
RATES = {                       # other columns try 1e-3, 2e-3, 4e-3
    'chorales': ('2e-3', '4e-3', '8e-3'),
    'text': ('4e-3', '8e-3', '1.6e-2'),
    'indirect indexing': ('5e-4', '1e-3', '2e-3'),
    TWELVE: ('5e-4', '1e-3', '2e-3'),
}

ROWS = {name: f'--pe={name}' for name in (
    'rope', 'pope', 'vipe', 'nope', 'ape', 'alibi', 'prism', 'pope+vipe', 'ape+rope')}
ROWS['mla'] = '--pe=rope --attention=mla'
ROWS |= {name: f'--pe={name}' for name in (
    't5', 'fire', 'yarn', 'vrope', 'learned', 'random', 'shifted_ape')}
ROWS['rope, d=80'] = '--pe=rope --d_model=80'           # as many parameters as prism


def some(*names):
    """These rows of ROWS: {name: flags}."""
    return {name: ROWS[name] for name in names}


# --------------------------------------------------------------------------------------------------
# ablations: every combination of an encoding's parts

def variants(start, *switches):
    """{label: flags} of every combination of switches, each {label: flag}."""
    rows = {}
    for chosen in itertools.product(*(switch.items() for switch in switches)):
        labels, flags = zip(*chosen)
        rows[', '.join(labels)] = ' '.join([start, *flags])
    return rows


def on_off(part, flag, on=True, off=False):
    """Two rows: with a part of an encoding and without it."""
    return {part: f'{flag}={on}', f'no {part}': f'{flag}={off}'}


VIPE = variants(
    '--pe=vipe',
    on_off('log n', '--vipe_logn'),
    on_off('s', '--vipe_s', 'length', 'one'),
    on_off('u', '--vipe_u'),
    on_off('value code', '--vipe_value'))
POPE = variants(
    '--pe=pope',
    on_off('softplus', '--pope_softplus'),
    {'d frequencies': '--pope_frequencies=all', 'd/2 frequencies': '--pope_frequencies=half'},
    {'delta from 0': '--pope_delta=zero', 'delta from anywhere': '--pope_delta=uniform',
     'no delta': '--pope_delta=none'})
PRISM = variants(
    '--pe=prism',
    on_off('sharpening', '--prism_sharpen'),
    on_off('reset', '--prism_reset'),
    {'superposition': '--prism_superpose=True', 'mean position': '--prism_superpose=False'},
    {'short problems first': '--length_schedule=[(0,4),(300,8)]',
     'all lengths at once': '--length_schedule=[]'})

# --------------------------------------------------------------------------------------------------
# what the papers' claims rest on

VIPE_ROWS = some('vipe', 'nope', 'rope', 'ape', 'alibi', 't5', 'fire', 'yarn')
THREE = 'polynomial', 'copy', 'parity'


def iterative(task, layers, heads=1, steps=2000):
    """A column: an iterative task trained to 8, its flags and twice that length."""
    flags = f'{SIZE}--task={task} {TO_8.format(steps)} --n_layer={layers} --n_head={heads}'
    return f'{flags} --lr=1e-3', [16]


OF_VIPE = {f'{task}, {layers} layers': iterative(task, layers)
           for task in (*THREE, 'count', 'reverse', 'mode', 'sort') for layers in (2, 3)}
OF_VIPE |= {f'{task}, {layers} layers, {heads} heads': iterative(task, layers, heads)
            for layers, heads in ((4, 2), (6, 4)) for task in THREE}

OF_PRISM = {task: (f'configs/{task}_prism.py', [20])
            for task in ('string_copy', 'stack', 'bucket_sort')}
OF_PRISM |= {
    'odds_first': ('configs/odds_first_prism.py', [40]),
    'addition_cot': ('configs/addition_prism.py', [16]),
    'multiplication_cot': ('configs/multiplication_cot_prism.py', [10]),
    'scan_cot': ('configs/scan_cot_prism.py', range(24, 49)),
}


TO_10 = ('--train_lengths=1-10 --length_schedule=[(0,5),(400,10)] --batch_size=64 '
         '--max_steps=4000 --eval_lengths=1-15,20,30,40,60,80,100,150')
LESS_WHOLE = '--prism_whole=0.1 --prism_whole_at=0.3 --ema=0'
NOISE = '--prism_noise=0.3 --ema=0.99'
WIDE = '--prism_alpha_lr=0.03 --prism_d_pe=84'
NARROW = '--prism_alpha_lr=0.003 --prism_d_pe=32'
MORE_SCAN = 'configs/scan_cot_prism.py --max_steps=20000 --eval_interval=2000'
OLD_STACK = f'configs/stack_prism.py {NARROW}', [20]
NO_WEIGHTS = ('--prism_input=0.5 --prism_info=0 --prism_whole=0 --prism_whole_at=0 '
              '--prism_alpha_lr=0.03 --ema=0')


def indirect(letters, shift, length, layers):
    """The flags and the double length of indirect indexing at a small size."""
    flags = (f'{SIZE}--task=indirect_indexing:letters={letters}:shift={shift} '
             f'--train_lengths={length // 2}-{length} --eval_lengths={length // 2}-{2 * length} '
             f'--max_steps=10000 --n_test=512 --n_layer={layers} --norm=rmsnorm --decay=cosine '
             '--eval_interval=1000')
    return flags, [2 * length]


SIXTEEN_ROWS = {f'{pe} at {rate}{more}': f'--pe={pe} --lr={rate} --seeds={seeds}'
                for pe, rate, more, seeds in (
                    ('rope', '2e-3', '', '0'),
                    ('rope', '1e-3', '', '0'),
                    ('rope', '5e-4', '', '0'),
                    ('rope', '1e-3', ', seeds 1, 2', '1,2'),
                    ('pope', '5e-4', '', '0'),
                    ('pope', '5e-4', ', seeds 1, 2', '1,2'))}

TOEPLITZ_ROWS = some('rope', 'nope', 'ape', 'random', 'alibi', 't5', 'ape+rope', 'mla')
OF_TOEPLITZ = {
    task: (f'{SIZE}--task={task} {TO_16.format(2000, 2048)} --n_layer=4 --n_head=8 --lr=2e-3', [32])
    for task in ('distance:span=16', 'trigger_count:most=16', 'distance_sum:span=16')}
# settings in which the Toeplitz study differs
RECIPE = ('--n_train={} --dropout=0.1 --beta1=0.98 --beta2=0.9 --weight_decay=1e-5 --grad_clip=0 '
          '--decay=cosine')
CAUSES = {
    ' at 1e-4': '--lr=1e-4',
    ', dropout': '--dropout=0.1',
    ', betas': '--beta1=0.98 --beta2=0.9',
    ', recipe': RECIPE.format(8000),
    ', recipe, 13,600 steps at 1e-4':
        RECIPE.format(70000) + ' --lr=1e-4 --max_steps=13600 --seeds=0',
}
SCALE_AND_MASK = {
    f'{task.split(":")[0]}, {std}{", no mask" * no_mask}': (
        f'{SIZE}--task={task} {TO_16.format(1000, 1024)} --n_head=4 --lr=1e-3 '
        f'--embedding_std={std}{" --causal=False" * no_mask}', [32])
    for task in ('distance:span=16', 'trigger_count:most=16')
    for no_mask in (False, True) for std in ('0.1', '1')}
ROWS_64 = TOEPLITZ_ROWS | {
    f'rope on {k} of 8 heads': f'--pe=rope --rope_heads={k}' for k in (1, 2, 4)}
ROWS_64 |= {pe + cause: f'--pe={pe} {flags}'
            for cause, flags in CAUSES.items() for pe in ('rope', 'nope')}
ROWS_64 |= {f'{pe}, std 1': f'--pe={pe} --embedding_std=1'
            for pe in ('rope', 'nope', 'ape', 'ape+rope')}
ROWS_64 |= {f'{pe}, std 1, recipe, 13,600 steps at 1e-4':
            f'--pe={pe} --embedding_std=1 {CAUSES[", recipe, 13,600 steps at 1e-4"]}'
            for pe in ('rope', 'nope')}
ROWS_64 |= {'rope, 4 heads': '--pe=rope --n_head=4', 'rope, 8 layers': '--pe=rope --n_layer=8'}
DISTANCE_64 = {'distance:span=64': (
    f'{SIZE}--task=distance:span=64 {TO_64} --n_layer=4 --n_head=8 --lr=1e-3', [128])}
COUNTING_64 = some('rope', 'nope', 'alibi', 'mla') | {
    f'{pe}, fixed': f'--pe={pe} --n_train=8000' for pe in ('rope', 'nope', 'alibi', 'random')}


WORDS = (SIZE + '--task=group:name={} --train_lengths=1-{} --eval_lengths={} --max_steps=5000 '
         '--batch_size=32 --n_eval=64 --n_test=512 --lr=2e-3')
TO_8_AT_1E3 = SIZE + '--task={} ' + TO_8.format(3000) + ' --lr=1e-3'


def ape_and_rope(variants):
    """APE and RoPE at the index, then with each of {name: flags}, as rows."""
    return {f'{pe}{name}': f'--pe={pe}{flags}'
            for pe in ('ape', 'rope') for name, flags in {'': '', **variants}.items()}


class Grid(NamedTuple):
    """A table of runs: every row with every column."""
    title: str
    rows: dict                      # {row: flags}
    columns: dict                   # {column: (flags, lengths that stand for twice the trained)}
    has_seeds: bool = False         # the flags or configs of the columns name the seeds


TO_150 = '--eval_lengths=2-20,25,30,40,60,80,100,150'


def prism_figure(name, twice, lengths='', flags=''):
    """A column: configs/NAME_prism.py at the paper's size, trained to 40 digits unless `lengths`
    names the config of others; `twice` that."""
    configs = f'configs/{name}_prism.py configs/paper_prism.py'
    if lengths:
        configs += f' configs/paper_prism_{lengths}.py'
    return f'{configs} {flags}'.strip(), twice


def paper_toeplitz(distance, counting):
    """The columns of the Toeplitz study at its size, with more flags for each task."""
    return {
        'distance': (f'configs/distance_rope.py configs/paper_toeplitz.py{distance}', [256]),
        'counting': ('configs/trigger_count_nope.py configs/paper_toeplitz.py --n_train=35000 '
                     f'--n_test=15000 {counting}', [256])}


PAPER = {                           # the papers' own sizes: these need a GPU
    'paper_pope': Grid(
        "Indirect indexing at PoPE's size", some('rope', 'pope'),
        {'indirect indexing': ('configs/indirect_indexing_pope.py configs/paper_pope.py', [])}),
    'paper_vipe': Grid(
        "ViPE's tasks at its paper's size", VIPE_ROWS,
        {task: (f'configs/polynomial_vipe.py configs/paper_vipe.py --task={task}', [32])
         for task in THREE}, has_seeds=True),
    'paper_toeplitz': Grid(
        "The Toeplitz study's tasks at its size",
        {name: flags for name, flags in TOEPLITZ_ROWS.items() if name != 'mla'},
        paper_toeplitz('', '--max_steps=10200 --warmup_steps=612'), has_seeds=True),
    'paper_toeplitz_mla': Grid(
        'The same with MLA, in batches of 1,024 (its Table 4)', some('mla'),
        paper_toeplitz(' --batch_size=1024 --max_steps=6800 --warmup_steps=408',
                       '--batch_size=1024 --max_steps=5100 --warmup_steps=306'), has_seeds=True),
    'paper_prism': Grid(
        "PRISM's tasks (its Figures 1 to 10) at its paper's size",
        {'prism': '--pe=prism', 'shifted_ape': 'configs/paper_prism_baseline.py'},
        {'addition_cot': prism_figure('addition', [20], 'short'),
         'dyn_str_cpy, to 5': prism_figure('dyn_str_cpy', [10], 'short', '--prism_copy=fixed '
                                           '--train_lengths=1-5 --length_schedule=[]'),
         'dyn_str_cpy': prism_figure('dyn_str_cpy', [20], 'short', f'--prism_copy=fixed {TO_150}'),
         'scan_cot': prism_figure('scan_cot', range(24, 49), 'scan'),
         'string_reverse': prism_figure('string_reverse', [80], flags='--prism_copy=fixed'),
         'string_copy, to 10': prism_figure('string_copy', [20], 'short', TO_150),
         'string_copy': prism_figure('string_copy', [80]),
         'odds_first': prism_figure('odds_first', [80], flags='--prism_layers=1,4'),
         'multiplication_cot': prism_figure('multiplication_cot', [18], 'short',
                                            '--train_lengths=1-9 --length_schedule=[(0,5),(5000,9)]'
                                            ' --eval_lengths=1-18'),
         'stack': prism_figure('stack', [80], flags='--prism_layers=1,4')}),
}
GRIDS = PAPER | {
    'cross': Grid('', ROWS, COLUMNS),
    'toeplitz': Grid(
        "The Toeplitz study's tasks, 4 layers, 8 heads, trained at 16 tokens, 2,000 steps at a "
        'learning rate of 2e-3', TOEPLITZ_ROWS, OF_TOEPLITZ),
    'toeplitz_scale': Grid(
        'Scale and mask at 16 tokens: 2 layers, 4 heads of 16, 1,000 steps at 1e-3. Embeddings '
        "start with a standard deviation of 0.1 (as elsewhere) or 1 (PyTorch's default). Attention "
        'has a causal mask or none',
        some('rope', 'nope', 'ape', 'random', 'alibi', 't5'), SCALE_AND_MASK),
    'embedding': Grid(
        'The same scales on other tasks; 1,500 steps (indirect indexing: 2,500) at a learning rate '
        'of 1e-3',
        {f'{pe}, {std}': f'--pe={pe} --embedding_std={std} --lr=1e-3'
         for pe in ('rope', 'nope', 'ape') for std in ('0.1', '1')},
        {name: COLUMNS[name] for name in ('iterative', 'algorithmic', 'indirect indexing')}),
    'toeplitz_64': Grid(
        'Distance among 64 tokens, 4 layers, 8 heads, 2,500 steps at a learning rate of 1e-3, and '
        "the study's own settings: dropout of 0.1; betas of 0.98 and 0.9; recipe: both, with 8,000 "
        'fixed problems, cosine decay, a weight decay of 1e-5 and no clipping (the study mentions '
        'none); the same with 13,600 steps, as in the study, and 70,000 problems, seed 0; '
        'embeddings that start with a standard deviation of 1',
        ROWS_64, DISTANCE_64),
    'counting_64': Grid(
        'Counting among 64 tokens, 2 layers, 4 heads, 2,500 steps at a learning rate of 1e-3; '
        'fixed: a fixed set of 8,000 problems (the study has a fixed set, too)', COUNTING_64,
        {'trigger_count': (f'{SIZE}--task=trigger_count {TO_64} --n_head=4 --lr=1e-3', [128])}),
    'indirect': Grid(
        'Indirect indexing with RMSNorm and a decay of the learning rate (cosine here), as in the '
        'PoPE paper, and 10,000 of its 100,000 steps; strings of 3 to 6 letters out of 12',
        some('rope', 'pope'), {TWELVE: indirect(12, 2, 6, 2)}),
    'indirect_16': Grid(
        'The same with 3 layers, strings of 4 to 8 letters out of 16; seed 0 where none is named',
        SIXTEEN_ROWS, {SIXTEEN: indirect(16, 3, 8, 3)}),
    'vipe': Grid(
        "ViPE's tasks, trained to 8, 2,000 steps at a learning rate of 1e-3; with one head ALiBi's "
        'slope is 1/256', VIPE_ROWS, OF_VIPE),
    'vipe_seeds': Grid(
        'ViPE, 3 layers, seeds 0 to 7, otherwise as above', some('vipe'),
        {task: (f'{iterative(task, 3)[0]} --seeds=0-7', [16]) for task in THREE}, has_seeds=True),
    'vipe_steps': Grid(
        'Copy and parity as above, but with 10,000 steps instead of 2,000', some('vipe', 'nope'),
        {f'{task}, 3 layers': iterative(task, 3, steps=10000) for task in ('copy', 'parity')}),
    'vipe_long': Grid(
        "ViPE's tasks with its paper's recipe, which has 2,048 problems for each length to 16 and "
        'the same learning rate throughout; d=64, 20,000 steps in batches of 32 instead of 256,000 '
        "in batches of 256: 1 % of the paper's sequences",
        some('vipe', 'nope', 'rope'),
        {task: (f'configs/polynomial_vipe.py configs/paper_vipe.py --task={task} --d_model=64 '
                '--batch_size=32 --max_steps=20000 --eval_interval=2000 --n_eval=64 --n_test=512 '
                '--seeds=0-2', [32]) for task in THREE}),
    'vipe_options': Grid(
        'Parity without a chain of thought, its last state alone; a running product; the same '
        'where each place has a factor of its own. 3 layers, otherwise as above',
        some('vipe', 'nope', 'rope'),
        {task: iterative(task, 3) for task in ('parity:steps=0', 'product', 'product:own=1')}),
    'vipe_causes': Grid(
        'ViPE without one or two of its parts, on tasks where it is behind others; 3 layers, '
        'otherwise as above',
        {'vipe, no log n': '--pe=vipe --vipe_logn=False',
         'vipe, no log n, no u': '--pe=vipe --vipe_logn=False --vipe_u=False',
         'vipe, no value code': '--pe=vipe --vipe_value=False'},
        {f'{task}, 3 layers': iterative(task, 3) for task in ('reverse', 'mode', 'sort')}),
    'vipe_scale': Grid(
        'ViPE with the other reading of s in eq. 7: longest test length / longest training length, '
        'here 67 / 19 tokens, in every test beyond the trained lengths; otherwise as above',
        {'vipe, global s': '--pe=vipe --vipe_s=global'},
        {'polynomial, 3 layers': iterative('polynomial', 3)}),
    'prism': Grid(
        "PRISM's tasks with the recipes of configs/, which were made for PRISM (trained to 10 "
        "digits, odds first to 20, addition to 8, multiplication to 5, SCAN's commands to 22 "
        'actions)',
        some('prism', 'shifted_ape', 'rope', 'nope'), OF_PRISM),
    'prism_causes': Grid(
        'Other settings of PRISM and its baseline: cursors per head (2 above), the norm of the '
        "GRU's recurrent matrix, noise on its state (none above; seeds 0 to 5), the baseline's "
        'range of shifts (512 above) and its learning rate (1e-3 above)',
        {'prism, 4 cursors': '--pe=prism --prism_cursors=4',
         'prism, learned norm': '--pe=prism --prism_recurrent=norm',
         'prism, noise 0.3': '--pe=prism --prism_noise=0.3 --seeds=0-5',
         'shifted_ape, shifts to 64': '--pe=shifted_ape --max_shift=64',
         'shifted_ape at 4e-3': '--pe=shifted_ape --lr=4e-3'},
        {'string_copy': OF_PRISM['string_copy']}),
    'prism_parts': Grid(
        'Odds first with ten times the weight on whole steps, or none; with the orthogonal '
        'recurrent matrix of the paper, which cannot start with units that flip; with cursors of '
        '84 features',
        {'prism, more whole': '--pe=prism --prism_whole=1',
         'prism, nothing whole': '--pe=prism --prism_whole=0 --prism_whole_at=0',
         'prism, orthogonal': '--pe=prism --prism_recurrent=orthogonal --prism_start=fading',
         'prism, 84': '--pe=prism --prism_d_pe=84'},
        {'odds_first': OF_PRISM['odds_first']}),
    'prism_odds': Grid(
        'Odds first trained to 10 digits (20 above): with ten times the weight on whole steps; '
        'then with the weight above, which sets in at a higher loss, and no average of the '
        'weights: as much on what gates tell, or nothing; then without noise on the GRU',
        {'prism, more whole': '--pe=prism --prism_whole=1',
         'prism, information': f'--pe=prism {LESS_WHOLE}',
         'prism, no information': f'--pe=prism {LESS_WHOLE} --prism_info=0',
         'prism, nor noise': f'--pe=prism {LESS_WHOLE} --prism_info=0 --prism_noise=0'},
        {'odds_first': (f'configs/odds_first_prism.py {TO_10}', [20])}),
    'prism_stack': Grid(
        'The stack with the weights of addition on whole steps (ten times that above) and on what '
        'gates tell, and the average of the weights; trained to 10 symbols as above, or to 20 with '
        'batches of half the size',
        {'prism, information': '--pe=prism --prism_info=0.1 --prism_whole=1 --prism_whole_at=0.1 '
                               '--ema=0.99'},
        {'stack': OLD_STACK,
         'stack, to 20': (
             f'{OLD_STACK[0]} --train_lengths=2-20 --length_schedule=[(0,5),(400,10),'
             '(1000,20)] --eval_lengths=2-20,25,30,40,60,80,100 --batch_size=32', [40])}),
    'prism_stack_noise': Grid(
        'The stack with noise on the state of the GRU, and the average of the weights; with these '
        'two and 4 cursors a head, or a layer between the PRISM layers, or a warm-up of shorter '
        'stages',
        {'prism, noise': f'--pe=prism {NOISE}',
         'prism, 4 cursors': f'--pe=prism {NOISE} --prism_cursors=4',
         'prism, 3 layers': f'--pe=prism {NOISE} --n_layer=3 --prism_layers=1,3',
         'prism, warm-up': f'--pe=prism {NOISE} --length_schedule=[(0,3),(300,5),(800,10)]'},
        {'stack': OLD_STACK}),
    'prism_width': Grid(
        "The stack with 84 features, as in the config, or with 32 and a tenth of alpha's rate, "
        '0.003; with --rope_base=100 instead of 10,000 each time',
        {'prism, base 100': '--pe=prism --rope_base=100',
         'prism, 32, alpha at 0.003': f'--pe=prism {NARROW}',
         'prism, 32, alpha at 0.003, base 100': f'--pe=prism {NARROW} --rope_base=100'},
        {'stack': OF_PRISM['stack']}),
    'prism_latest': Grid(
        'The stack with a second encoding beside the cursors, which prefers the later of two keys',
        {'prism+stickbreaking': '--pe=prism+stickbreaking',
         'prism+alibi': '--pe=prism+alibi'},
        {'stack': OF_PRISM['stack']}),
    'prism_wide': Grid(
        "Addition and sorting with cursors of 84 features and alpha's rate at 0.03, as for the "
        'stack',
        {'prism, 84': f'--pe=prism {WIDE}'},
        {task: OF_PRISM[task] for task in ('addition_cot', 'bucket_sort')}),
    'prism_recipe': Grid(
        'The keys of string_reverse on the other tasks that reach the goal, 1,500 steps, no copy '
        'branch',
        {'prism': '--pe=prism --prism_input=0.5 --prism_whole=0.03 --prism_copy=none '
                  '--min_lr=5e-4 --max_steps=1500'},
        {task: (f'configs/{task}_prism.py', [2 * longest]) for task, longest in (
            ('string_copy', 10), ('dyn_str_cpy', 10), ('parity', 16), ('polynomial', 16))}),
    'prism_odds_40': Grid(
        'Odds first trained to 40 digits, as in the paper',
        {'prism': '--pe=prism'},
        {'odds_first': (
            'configs/odds_first_prism.py --train_lengths=1-40 '
            '--length_schedule=[(0,5),(400,10),(1000,20),(1800,40)] '
            '--eval_lengths=1-40,50,60,80,100,150,200', [80])}),
    'prism_noise': Grid(
        'Sorting without noise on the state of the GRU; with noise, a weight on what gates tell '
        'and the average of the weights',
        {'prism, no noise': '--pe=prism --prism_noise=0',
         'prism, information': '--pe=prism --prism_info=0.1 --ema=0.99'},
        {'bucket_sort': OF_PRISM['bucket_sort']}),
    'prism_chains': Grid(
        'Chains of thought with other recipes than above: multiplication trained to 3 digits, with '
        '2 heads and 3 layers, and no weight on gates; addition with a tenth of the weight on '
        'whole steps, with noise on the state of the GRU, and with both; with a recurrent matrix '
        'whose norm is learned and half as large at first; trained to 12 digits, also for twice '
        'the steps; SCAN with more steps. Those of 7,000 and 20,000 steps were trained on a GPU',
        some('prism'),
        {'multiplication_cot, to 3': (
            'configs/multiplication_cot_prism.py --n_head=2 --n_layer=3 --train_lengths=1-3 '
            '--length_schedule=[(0,1),(400,2),(800,3)] --eval_lengths=1-6 --batch_size=64 '
            f'--max_steps=3000 {NO_WEIGHTS}', [6]),
         'addition_cot, less whole': ('configs/addition_prism.py --prism_whole=0.1', [16]),
         'addition_cot, noise': (
             'configs/addition_prism.py --prism_whole=0.1 --prism_noise=0.3', [16]),
         'addition_cot, noise alone': ('configs/addition_prism.py --prism_noise=0.3', [16]),
         'addition_cot, learned norm': (
             'configs/addition_prism.py --prism_recurrent=norm', [16]),
         'addition_cot, to 12': (
             'configs/addition_prism.py --train_lengths=1-12 '
             '--length_schedule=[(0,3),(500,5),(1000,8),(1500,12)]', [24]),
         'addition_cot, to 12, 7,000 steps, seeds 0 to 11': (
             'configs/addition_prism.py --train_lengths=1-12 '
             '--length_schedule=[(0,3),(500,5),(1000,8),(1500,12)] --max_steps=7000 '
             '--eval_interval=1000 --eval_lengths=1-12,14,16,20,24,30,36 --seeds=0-11', [24]),
         'scan_cot, 3,000 steps': (
             'configs/scan_cot_prism.py --max_steps=3000 --eval_interval=1000', range(24, 49)),
         'scan_cot, 20,000 steps, seeds 0 to 7': (f'{MORE_SCAN} --seeds=0-7', range(24, 49))}),
    'prism_more': Grid(
        'Baselines with 20,000 steps',
        {'more steps': ''},
        {'scan_cot, shifted_ape': (f'{MORE_SCAN} --pe=shifted_ape', range(24, 49)),
         'scan_cot, rope': (f'{MORE_SCAN} --pe=rope', range(24, 49)),
         'string_copy, shifted_ape': (
             'configs/string_copy_prism.py --pe=shifted_ape --max_steps=20000 --eval_interval=2000',
             [20])}),
    'prism_reverse': Grid(
        'Reversing with PRISM without a weight on the entropy of the gates (0.03 in the config): '
        "alpha's learning rate as in the paper, 0.03, or a tenth; the recurrent matrix orthogonal, "
        "with a penalty on |W'W - 1| (6.3) or with a learned norm (footnote 8); the two scores and "
        'the absolute branch of Algorithm 3',
        {'prism': '--pe=prism --prism_whole=0',
         'prism, alpha at 0.003': '--pe=prism --prism_whole=0 --prism_alpha_lr=0.003 --seeds=0-7',
         'prism, orthogonal': '--pe=prism --prism_whole=0 --prism_recurrent=orthogonal',
         'prism, penalty': '--pe=prism --prism_whole=0 --prism_recurrent=penalty',
         'prism, learned norm': '--pe=prism --prism_whole=0 --prism_recurrent=norm',
         'prism, scaled score': '--pe=prism --prism_whole=0 --prism_norm=scale',
         'prism, unit vectors': '--pe=prism --prism_whole=0 --prism_norm=unit',
         'prism, absolute branch': '--pe=prism --prism_whole=0 --prism_absolute=True'},
        {'string_reverse': ('configs/string_reverse_prism.py', [20])}),
    'prism_baseline': Grid(
        "PRISM's baseline, shifted sinusoids, at other learning rates than 1e-3, and the positions "
        'of Ruoss et al. (2023), drawn at random in order, with the budget of PRISM',
        {'shifted_ape at 3e-4': '--pe=shifted_ape --lr=3e-4 --min_lr=1.5e-4',
         'shifted_ape at 3e-3': '--pe=shifted_ape --lr=3e-3 --min_lr=1.5e-3',
         'shifted_ape at 1e-2': '--pe=shifted_ape --lr=1e-2 --min_lr=5e-3',
         'ape, randomized': '--pe=ape --positions=randomized'},
        {task: (f'configs/{task}_prism.py', [20])
         for task in ('string_reverse', 'string_copy', 'dyn_str_cpy')}),
    'prism_dyn': Grid(
        "PRISM's copy branch on dyn_str_cpy: left out, or with key cursors that only step up (the "
        'config trains them)',
        {f'copy branch {kind}': f'--pe=prism --prism_copy={kind}' for kind in ('none', 'fixed')} |
        {'copy branch fixed, no weight on whole steps, 1,500 steps':
         '--pe=prism --prism_copy=fixed --prism_whole=0 --max_steps=1500'},
        {'dyn_str_cpy': ('configs/dyn_str_cpy_prism.py', [20])}),
    'group': Grid(
        'State tracking: the running product of elements of S3, trained to 8 elements, 5,000 steps '
        'at a learning rate of 2e-3',
        {name: f'--pe={name}' for name in ('rope', 'nope', 'ape', 'alibi', 'fox', 'path',
                                           'stickbreaking', 'prism')},
        {'S3': (WORDS.format('s3', 8, '1-16,20,24,32'), [16])}),
    'group_s5': Grid(
        'The same in S5, with 14,400 products of two elements, trained to 4 elements',
        {name: f'--pe={name}' for name in ('rope', 'path')},
        {'S5': (WORDS.format('s5', 4, '1-6,8'), [8])}),
    'positions': Grid(
        'Other positions than the index: addition with digits of one significance at one position '
        '(abacus, with offsets to 99 in training, or to 20; coupled, where signs share the '
        'offset); 3,000 steps at a rate of 1e-3',
        ape_and_rope({', abacus': ' --positions=abacus',
                      ', abacus to 20': ' --positions=abacus --abacus_offset=20',
                      ', coupled': ' --positions=coupled',
                      ', coupled to 20': ' --positions=coupled --abacus_offset=20'}),
        {'addition, lowest digit first': (TO_8_AT_1E3.format('addition:reversed=1'), [16])}),
    'randomized': Grid(
        'Copying and reversing at positions drawn at random in order, from 2,048 or from 128; '
        '3,000 steps at a learning rate of 1e-3',
        ape_and_rope({', randomized': ' --positions=randomized',
                      ', of 128': ' --positions=randomized --positions_max=128'}),
        {task: (TO_8_AT_1E3.format(task), [16]) for task in ('string_copy', 'string_reverse')}),
    'mqar': Grid(
        'Recall of 4 values among noise, trained with 16 pairs of tokens, 2,000 steps at a '
        'learning rate of 1e-3',
        {name: f'--pe={name}' for name in ('rope', 'nope', 'ape', 'alibi', 'fox', 'path',
                                           'stickbreaking', 'cope')},
        {'mqar': (f'{SIZE}--task=mqar {TO_16.format(2000, 512)} --lr=1e-3', [32])}),
    'to_20': Grid(
        'Trained to 20 characters, 2,000 steps at a learning rate of 1e-3; the longer lengths are '
        '21 to 40. Copying a repeated digit or letter, copying digits, reversing them; and SCAN, '
        'trained to 25 actions and tested to 48',
        some('nope', 't5', 'alibi', 'rope', 'ape'),
        {task: (f'{SIZE}--task={task} --train_lengths=1-{trained} --eval_lengths=1-{longest} '
                '--max_steps=2000 --batch_size=32 --n_eval=16 --n_test=128 --lr=1e-3',
                range(trained + 1, longest + 1))
         for task, trained, longest in (
             ('copy_repeated', 20, 40), ('string_copy', 20, 40), ('string_reverse', 20, 40),
             ('scan_simple', 25, 48))}),
    'ablation_vipe': Grid(
        'ViPE, every combination of its four parts (without all of them it is NoPE); the longer '
        'length here is 10 after 8, and 8 after 6', VIPE,
        {'iterative': (f'{SIZE}--task=polynomial {TO_8.format(2000)} --n_layer=3 --n_head=1', [10]),
         'indirect indexing': (INDIRECT, [8])}),
    'ablation_pope': Grid(
        "PoPE: softplus or plain magnitudes; a frequency for each feature or RoPE's number; the "
        'phase bias; the longer length as above', POPE,
        {'iterative': (f'{SIZE}--task=polynomial {TO_8.format(2000)} --n_layer=3 --n_head=1', [10]),
         'indirect indexing': (INDIRECT, [8])}),
    'ablation_prism': Grid(
        "PRISM: sharpening; resets; the mean of the offsets' sinusoids or the sinusoid of the mean "
        'offset; 300 steps with problems of up to 4 first; the longer length here is 16 after 8, '
        'and 12 after 6', PRISM,
        {name: COLUMNS[name] for name in ('iterative', 'indirect indexing')}),
}

# Models whose heads are taken out one by one: grid, row, column
HEADS = [('toeplitz_64', row, 'distance:span=64') for row in ROWS_64 if 'recipe' not in row]
HEADS += [('toeplitz', row, 'distance:span=16')
          for row in ('rope', 'nope', 'ape', 'alibi', 't5', 'ape+rope', 'mla')]
HEADS += [('toeplitz_scale', row, f'distance, 1{mask}')
          for mask in ('', ', no mask') for row in ('rope', 'ape', 'alibi')]
HEADS += [('toeplitz', 'rope', 'trigger_count:most=16')]

# What runs first: pieces whose out_dir begins so, in this order; the rest in the order of GRIDS
FIRST = ('out/paper_pope/', 'out/paper_vipe/polynomial', 'out/paper_toeplitz/distance',
         'out/paper_prism/', 'out/paper', 'out/prism/', 'out/prism_parts/', 'out/ablation_vipe/',
         'out/cross/', 'out/vipe', 'out/toeplitz/', 'out/prism', 'out/ablation_prism/',
         'out/toeplitz_64/', 'out/counting_64/')

# --------------------------------------------------------------------------------------------------
# what is there: lines of results/*.jsonl

missing = []                        # argvs asked for and not found
cells = {}                          # (grid, row, column): what summarize() returns


@functools.cache
def runs(name):
    """What results/NAME.jsonl holds."""
    path = os.path.join(ROOT, f'results/{name}.jsonl')
    found = []
    if not os.path.exists(path):
        return found
    with open(path) as f:
        for number, line in enumerate(f, 1):
            try:
                found.append(json.loads(line))
                found[-1]['command']
            except (ValueError, TypeError, KeyError):
                raise UserError(f'results/{name}.jsonl, line {number}, is cut off: delete '
                                      'the line, and its piece runs again') from None
    return found


@functools.cache
def by_command(name):
    """{command: lines}: of a sweep one for each point."""
    lines = {}
    for run in runs(name):
        lines.setdefault(run['command'].replace(' --resume', ''), []).append(run)
    return lines


def lines_of(name, argv):
    """The lines in results/NAME.jsonl that this command left."""
    return by_command(name).get('python ' + shlex.join(argv), [])


def look_up(name, argv):
    """The last of them, or None."""
    return (lines_of(name, argv) or [None])[-1]


def train_argv(name, folder, flags):
    """The command of a run in out/NAME/FOLDER that leaves a line in results/NAME.jsonl."""
    return ['train.py', *shlex.split(flags), f'--out_dir=out/{name}/{folder}',
            f'--results=results/{name}.jsonl']


def run_of(name, folder, flags):
    """The run of these flags in out/NAME/FOLDER; None, and an entry in `missing`, otherwise."""
    argv = train_argv(name, folder, flags)
    run = look_up(name, argv)
    if run is None and (name not in PAPER or torch.cuda.is_available()):
        missing.append(argv)
    return run


def piece(name, row, column):
    """(folder, flags) of a cell, and whether its learning rate is given."""
    grid = GRIDS[name]
    flags = f'{grid.columns[column][0]} {grid.rows[row]}'
    has_rate = '--lr=' in flags or 'configs/' in flags
    if has_rate and not grid.has_seeds and '--seeds=' not in flags:
        flags += ' --seeds=0-2'
    return f'{slug(column)}/{slug(row)}', flags, has_rate


def rates(column):
    """The learning rates that seed 0 tries in a column."""
    return RATES.get(column, ('1e-3', '2e-3', '4e-3'))


def runs_of_cell(name, row, column):
    """The runs of a cell; None if one is missing."""
    folder, flags, has_rate = piece(name, row, column)
    if has_rate:
        run = run_of(name, folder, flags)
        return run and [run]
    # of seed 0, which tries the rates
    first = {rate: run_of(name, f'{folder},lr={rate}', f'{flags} --lr={rate}')
             for rate in rates(column)}
    if None in first.values():
        return None
    rate = max(first, key=lambda rate: validation(first[rate]))
    more = run_of(name, f'{folder},lr={rate},seeds=1,2', f'{flags} --lr={rate} --seeds=1,2')
    return more and [first[rate], more]


def validation(run, seed=0):
    """A seed's score on the trained lengths, at the last evaluation during training."""
    seed = str(seed)
    if not run['curves'].get(seed):
        return -math.inf                                          # it diverged
    step, trained, *_ = run['curves'][seed][-1]
    is_corpus = 'loss' in next(iter(run['lengths'][seed].values()))
    return -trained if is_corpus else trained


def probed(what, name, row, column, seed=0):
    """The line about `python probe.py WHAT` on a seed of a cell; None if it is missing. WHAT: a
    probe's name, and flags behind it."""
    folder, flags, _ = piece(name, row, column)
    what, *own = what.split()
    argv = ['probe.py', what, f'out/{name}/{folder}', *own]
    if seed:
        argv += [f'--seed={seed}', f'--out_dir=out/{name}/{folder}/seed_{seed}']
    line = look_up('probes', argv)
    if line is None and (name, row, column) in cells:
        if os.path.exists(os.path.join(ROOT, argv[2], 'lengths.json')):
            missing.append(argv)
        else:                       # train it again first; without --results, it has its line
            missing.append(train_argv(name, folder, flags)[:-1])
    return line


def asked(*args):
    """The line about `python probe.py ARGS`; None, and an entry in `missing`, if there is none."""
    argv = ['probe.py', *args]
    line = look_up('probes', argv)
    if line is None:
        missing.append(argv)
    return line


def out_dir(argv):
    """The folder that a piece works in."""
    flags = dict(arg[2:].split('=', 1) for arg in argv if re.match('--.*=', arg))
    if 'out_dir' in flags:
        return flags['out_dir']
    if 'hf' in flags:
        return f'out/{slug(os.path.basename(flags["hf"]))}'
    return argv[2].replace('by_hand:', by_hand.OUT_DIR)


def find_cells():
    """Read results/ again: fill `cells` with what is there and `missing` with what is not."""
    runs.cache_clear()
    by_command.cache_clear()
    missing.clear()
    cells.clear()
    for name, grid in GRIDS.items():
        for row, column in itertools.product(grid.rows, grid.columns):
            found = runs_of_cell(name, row, column)
            if found:
                cells[name, row, column] = summarize(found, grid.columns[column][1])


def sort_missing():
    """Each missing piece once, the most valuable first."""
    def rank(argv):
        folder = out_dir(argv)
        return next((i for i, start in enumerate(FIRST) if folder.startswith(start)), len(FIRST))

    unique = dict.fromkeys(map(tuple, missing))
    missing[:] = sorted(map(list, unique), key=rank)


# --------------------------------------------------------------------------------------------------
# cells

def by_seed(*runs):
    """{seed: {length: scores}} of several runs of one configuration."""
    return {int(seed): {int(n): x for n, x in scores.items()}
            for run in runs for seed, scores in run['lengths'].items()}


def score(scores, lengths, metric='exact'):
    """Exact match, or with metric='token' tokens right, over all problems of these lengths; of a
    corpus minus the loss. nan if there are none."""
    chosen = [scores[n] for n in lengths if n in scores]          # SCAN lacks some lengths
    if not chosen:
        return math.nan
    total = sum(x.get('n', 1) for x in chosen)
    return sum(x.get('n', 1) * (-x['loss'] if 'loss' in x else x[metric]) for x in chosen) / total


def holds(scores, longest):
    """The longest length up to which a seed's {length: scores} stay at least 95 %, as text.

    Of a corpus: up to which perplexity is at most 1 / 0.95 of that at `longest`, the trained one.
    ≥ if that is the longest evaluated, 'none' if the shortest fails, - if nothing was evaluated.
    """
    bar = -score(scores, [longest]) - math.log(0.95)

    def good(x):
        return x['loss'] <= bar if 'loss' in x else x['exact'] >= 0.95

    # a length with few problems says little: SCAN has six of length 1
    many = [n for n in sorted(scores) if 'loss' in scores[n] or scores[n]['n'] >= 50]
    held = list(itertools.takewhile(lambda n: good(scores[n]), many))
    if not many:
        return '-'
    if not held:
        return 'none'
    return f'≥ {held[-1]}' if held == many else str(held[-1])


def summarize(runs, twice):
    """A cell: what its runs scored, a value per seed."""
    config = runs[0]['config']
    scores = by_seed(*runs)
    seeds = sum(len(run['config']['seeds']) for run in runs)
    lost = seeds - len(scores)
    first = next(iter(scores.values()), {})
    return dict(
        config=config,
        trained=[score(seed, config['train_lengths']) for seed in scores.values()],
        twice=[score(seed, twice) for seed in scores.values()],
        tokens=[score(seed, twice, 'token') for seed in scores.values()],
        holds=[holds(seed, max(config['train_lengths'])) for seed in scores.values()],
        lost=f' ({lost} of {seeds} seeds diverged)' if lost else '',
        corpus=any('loss' in x for x in first.values()),
        lengths={n: [seed[n] for seed in scores.values()] for n in first},
        curves=[curve for run in runs for curve in run['curves'].values()])


def spread(values, digits):
    """Mean and standard deviation over seeds; - where nothing was evaluated."""
    if not values or any(map(math.isnan, values)):
        return '-'
    mean = f'{statistics.mean(values):.{digits}f}'
    return mean if len(values) == 1 else f'{mean} ±{statistics.stdev(values):.{digits}f}'


def shown(cell, what):
    """One number of a cell as text.

    trained, twice: exact match in percent, or perplexity; tokens: right at `twice`, all before them
    given; holds: the longest length, seed by seed where they differ; reach: holds (tokens); all:
    trained, twice and holds; best: `twice` of the best seed among those with 85 % on the
    trained lengths, and how many these are (ViPE, appendix B.1, experiment 2).
    """
    if what == 'best':
        learned = [twice for trained, twice in zip(cell['trained'], cell['twice'])
                   if trained >= 0.85]
        best = f'{100 * max(learned):.0f}' if learned else 'none'
        return f'{best} ({len(learned)} of {len(cell["trained"])} seeds)'
    if what == 'all':
        return ' → '.join(shown(cell, each) for each in ('trained', 'twice', 'holds'))
    if what == 'reach':
        return f'{shown(cell, "holds")} ({shown(cell, "tokens")})'
    if what == 'holds':
        return '/'.join(cell['holds'] if len(set(cell['holds'])) > 1 else cell['holds'][:1]) or '-'
    if cell['corpus']:
        text = spread([math.exp(-x) for x in cell[what]], 2)
    else:
        text = spread([100 * x for x in cell[what]], 0)
    return text + cell['lost'] if what == 'trained' else text
