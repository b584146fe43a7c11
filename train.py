"""Train any encoding on any task and see at which length it breaks.

    python train.py configs/parity_rope.py                           one run
    python train.py configs/parity_rope.py --pe=nope,rope,alibi      a sweep: three runs, one table
    python train.py --eval_only --out_dir=out/parity_rope --eval_lengths=1-100
    torchrun --nproc_per_node=2 train.py configs/openwebtext_pope.py --data=FOLDER    on 2 GPUs
    python train.py --help                                           every option and its meaning

Config files are plain Python assignments, read in the given order; flags override them. The folder
of a run contains ckpt.pt, config.json, log.jsonl (a line per logged point) and lengths.json ({seed:
{length: {exact, token, last, n}}}). The same command resumes a stopped run, and prints the table of
a finished run; --overwrite trains it again.
"""
import ast
import contextlib
import copy
import gc
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

try:
    import fcntl
except ImportError:                                        # Windows: folders are not locked
    fcntl = None

import pe as encodings
import tasks
from model import ModelConfig, Transformer
from pe import UserError, check_name, need

# torchrun starts WORLD processes: each takes its rows of every batch, and RANK 0 writes and prints
WORLD, RANK = int(os.environ.get('WORLD_SIZE', 1)), int(os.environ.get('RANK', 0))
THREADS = torch.get_num_threads()                          # PyTorch's choice for this machine

# ---- options -------------------------------------------------------------------------------------

@dataclass
class Running:
    """How a run is executed and evaluated. These options may change when a run resumes."""
    out_dir: str = ''              # the run's folder; empty: out/TASK_PE
    eval_lengths: list = range(1, 49)   # problem lengths to evaluate
    n_eval: int = 128              # validation problems per length, evaluated during training
    n_test: int = 1024             # test problems per length, from another random stream
    log_interval: int = 50         # steps between lines of log.jsonl
    eval_interval: int = 1000      # steps between evaluations, each followed by a checkpoint
    device: str = 'auto'           # auto | cpu | cuda | cuda:N
    accumulate: int = 1            # micro-batches that a step is split into, to save memory
    compile: bool = None           # torch.compile; None: on CUDA, from 10 million parameters
    graph: bool = None             # replay each step as a CUDA graph; None: on CUDA, where possible
    overwrite: bool = False        # replace the run in out_dir by a new one
    eval_only: bool = False        # only evaluate the checkpoint in out_dir at eval_lengths
    results: str = ''              # append a JSON line about each finished run to this file


@dataclass
class Config(ModelConfig, Running):
    """All options of a run: those of the model (and of its encoding), of Running, and these."""
    # data
    task: str = 'parity'           # a task with its options, as in parity:steps=0
    data: str = ''                 # the file or folder that the task reads, if any
    train_lengths: list = range(1, 17)  # problem lengths to train on, mixed within a batch
    length_schedule: list = ()     # [(0, 5), (400, 10)]: lengths <= 5 until step 400, then <= 10
    n_train: int = 0               # training problems per length, drawn once; 0: sampled online
    # optimization: AdamW, linear warm-up, decay
    seeds: list = (0,)             # one model per seed, trained side by side
    batch_size: int = 64           # sequences per step
    max_steps: int = 4000          # optimizer steps
    lr: float = 1e-3               # peak learning rate
    min_lr: float = 0.0            # learning rate at the end of the decay
    warmup_steps: int = 200        # steps of linear warm-up
    decay: Literal['linear', 'cosine', 'none'] = 'linear'  # shape of the decay
    beta1: float = 0.9             # AdamW's decay rate for the mean gradient
    beta2: float = 0.98            # AdamW's decay rate for the mean squared gradient
    weight_decay: float = 0.01     # of matrices (see Transformer.optim_groups); 0: plain Adam
    grad_clip: float = 1.0         # largest norm of the gradient; 0: no clipping
    dtype: Literal['float32', 'tf32', 'bfloat16', 'float64'] = 'float32'  # of matrix products

    DERIVED = ('vocab_size', 'train_len', 'eval_len')      # computed from the task

    def __post_init__(self):
        super().__post_init__()
        encodings.check_positive(self, 'batch_size', 'max_steps', 'log_interval', 'eval_interval',
                                 'n_eval', 'n_test', 'lr', 'accumulate')
        need(max(self.beta1, self.beta2) < 1, f'beta1 and beta2 must be below 1, got {self.beta1} '
             f'and {self.beta2}')
        need(self.min_lr <= self.lr, f'min_lr={self.min_lr} must be at most lr={self.lr}')
        need(self.accumulate <= self.batch_size,
             f'accumulate={self.accumulate} must be at most batch_size={self.batch_size}')
        self.check_lengths()
        task = self.the_task
        if task.corpus:
            for part in ('val', 'test') if self.eval_only else tasks.PARTS:
                task.of_part(part)                         # raises if the data are missing
        need(not (task.fixed and self.n_train),
             f'{self.task} has its own training set: remove n_train')
        need(self.causal or isinstance(task, tasks.Classification) and len(self.train_lengths) == 1,
             'causal=False requires a classification task (distance, distance_sum, trigger_count) '
             'and one training length, because padding would be visible')
        self.vocab_size = len(task.vocab)                  # V, padding included
        self.train_len = task.width(self.train_lengths)    # in tokens
        self.eval_len = task.width(self.eval_lengths)
        self.out_dir = os.path.expanduser(self.out_dir or default_out_dir(vars(self)))
        with torch.random.fork_rng(devices=[]):            # building draws random numbers
            encodings.build(self)                          # raises if the options do not fit

    @property
    def the_task(self):
        """The task object. tasks.make caches it."""
        return tasks.make(self.task, self.data)

    @property
    def weights_dtype(self):
        """The dtype of the parameters, which stay in float32 when products are in bfloat16."""
        return torch.float64 if self.dtype == 'float64' else torch.float32

    def check_lengths(self):
        """Sort the lengths and keep those that the task has. Raise UserError if none is left, or if
        length_schedule or batch_size does not fit."""
        for key in 'seeds', 'train_lengths', 'eval_lengths':
            values = getattr(self, key)
            need(0 < len(values) < 10 ** 6
                 and all(type(x) is int and 0 <= x < 2 ** 28 for x in values),
                 f'{key} must be integers in [0, 2^28), as in 1-16 or 1,2,4; got {values[:99]}')
            values = list(dict.fromkeys(values))           # without repeats
            if key != 'seeds':
                part = 'train' if key == 'train_lengths' else None
                values = self.the_task.existing(sorted(values), part)
            need(values, f'{self.task} has no problems of these {key}')
            setattr(self, key, values)
        stages = self.length_schedule = [list(stage) if isinstance(stage, (list, tuple)) else []
                                         for stage in self.length_schedule]
        pairs = all([*map(type, stage)] == [int, int] for stage in stages)
        steps = [stage[0] for stage in stages] if pairs and stages else [0]    # of each stage
        need(pairs and steps[0] == 0 and steps == sorted(steps),
             'length_schedule must be pairs (first step, longest length) in ascending order of '
             f'steps, from step 0 on; got {stages}')
        for step in steps:
            lengths = lengths_at(self, step)
            need(lengths, f'length_schedule at step {step} is below all train_lengths: raise it')
            # the number of problems that a batch is drawn from; None: unlimited
            size = self.n_train * len(lengths) or self.the_task.count(lengths)
            need(not size or size >= self.batch_size,
                 f'at step {step}, the lengths {lengths} have too few problems for '
                 f'batch_size={self.batch_size}: lower it, or raise n_train')


# options that may change when a run resumes, and options that its record omits
FREE = {f.name for f in fields(Running)} | {'kernel', 'eval_len'}
NOT_RECORDED = FREE.union(Config.DERIVED) - {'out_dir', 'n_test', 'eval_only', 'accumulate'}
TEXTS = 'out_dir', 'results', 'data'                       # a comma in these does not make a sweep


# ---- reading options. The type of a field says which values are valid; its comment is its help ---

def slug(text):
    """The text with _ for characters that file names avoid: parity:steps=0 -> parity_steps=0."""
    return re.sub(r'[^\w.+=,-]', '_', text)


def keys(cls):
    """{name: field} of the options that a user can set in a dataclass."""
    return {f.name: f for f in fields(cls) if f.name not in getattr(cls, 'DERIVED', ())}


def defaults(cls):
    """{option: default}, with ranges and tuples as lists."""
    return {name: list(f.default) if f.type is list else f.default for name, f in keys(cls).items()}


def as_typed(value):
    """A value as it is written on the command line; a list of integers as 1-16,20,24."""
    if not isinstance(value, (list, tuple, range)):
        return str(value)
    if not value or any(type(x) is not int for x in value):
        return str(list(value))
    spans = []                                             # [first, last] of consecutive numbers
    for x in value:
        if spans and x == spans[-1][1] + 1:
            spans[-1][1] = x
        else:
            spans.append([x, x])
    return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)


def parse_list(text):
    """1-16 | 1,2,4-6 | [(0, 5), (400, 10)] -> list."""
    if not re.fullmatch(r'\d+(-\d+)?(,\d+(-\d+)?)*', text):
        return ast.literal_eval(text)                      # accepts only literals, runs no code
    numbers = []
    for part in text.split(','):                           # 5 or 1-16
        first, _, last = part.partition('-')
        numbers += range(int(first), int(last or first) + 1)[:10 ** 6]     # both ends included
    return numbers


def convert(cls, key, value, where):
    """Convert a value, or its text, to the type of option `key`. For a scalar option of Config, a
    comma-separated text becomes a list, for a sweep. Raise UserError if the value is invalid."""
    check_name(f'option in {where}:', key, keys(cls))
    field, given, is_text = keys(cls)[key], value, isinstance(value, str)
    kind, choices = field.type, get_args(field.type)       # the choices of a Literal
    if cls is Config and is_text and ',' in value and kind is not list and key not in TEXTS:
        return [convert(cls, key, part.strip(), where) for part in value.split(',')]
    if is_text and kind in (list, bool, int, float):       # as a Python literal; true means True
        text = value.capitalize() if kind is bool else value
        with contextlib.suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            value = parse_list(text) if kind is list else ast.literal_eval(text)
    if value in choices or value is None and field.default is None:
        return value
    if kind is list and isinstance(value, (tuple, range)):         # from a config file
        value = list(value)
    if kind in (int, float) and type(value) in (int, float) and 0 <= value < math.inf:
        value = kind(value) if kind(value) == value else value     # max_steps=1e4, lr=1
    names = {list: 'a list (1-16 or [(0, 5)])', int: 'an integer >= 0', float: 'a number >= 0',
             bool: 'True or False', str: 'text'}
    what = names.get(kind) or 'one of ' + ', '.join(choices)
    got = 'no value' if given is True else repr(given)     # the flag alone means True
    need(type(value) is kind and (kind not in (int, float) or 0 <= value < math.inf),
         f'{where}: {key} must be {what}, as in --{key}={as_typed(field.default)}; got {got}')
    return value


def parse(cls, argv):
    """({option: value}, other words) of a command line. --key alone means --key=True."""
    flags, words = {}, []
    for arg in argv:
        key, equals, value = arg.lstrip('-–—').partition('=')      # pasted text may have – or —
        if key != arg.partition('=')[0]:                   # the word began with a dash
            flags[key] = convert(cls, key, value if equals else True, arg)
        else:
            words.append(arg)                              # such as the path of a config file
    return flags, words


def read_file(path, values):
    """Return `values` updated with a config file's assignments, which may use earlier values."""
    names = dict(values)                                   # names that its lines can read
    try:
        with open(path, encoding='utf-8-sig') as f:        # skips a byte-order mark
            exec(compile(f.read(), path, 'exec'), names)   # the traceback then contains the path
    except OSError as error:
        hint = f'; did you mean --out_dir={path}?' if os.path.isdir(path) else ''
        raise UserError(f'cannot read config file {path}: {error.strerror}{hint}') from None
    except Exception as error:                             # whatever its lines raise
        line = traceback.extract_tb(error.__traceback__)[-1].lineno
        line = getattr(error, 'lineno', line)              # of a SyntaxError
        says = getattr(error, 'msg', error)                # without the line again
        raise UserError(f'{path}, line {line}: {type(error).__name__}: {says}') from None
    changed = {key: x for key, x in names.items() if not (         # what the file assigned
        key.startswith('_') or inspect.ismodule(x) or callable(x)
        or key in values and x is values[key])}
    for key in changed:
        check_name(f'option in {path} (names of helpers begin with _):', key, keys(Config))
    return values | {key: convert(Config, key, x, path) for key, x in changed.items()}


def swept(values):
    """The options that a sweep varies: those with a list of values instead of a single one."""
    return [key for key, field in keys(Config).items()
            if isinstance(values[key], list) and field.type is not list]


def read_options(argv):
    """{option: value} from defaults, config files and flags; a list where a sweep varies an option.

    With --eval_only the configuration of the run replaces the files; flags override it."""
    flags, paths = parse(Config, argv)
    values = defaults(Config)
    for path in paths:                                     # a later file overrides an earlier one
        values = read_file(path, values)
    values |= flags                                        # flags override all files
    values['out_dir'] = os.path.expanduser(values['out_dir'] or default_out_dir(values))
    if values['eval_only']:
        need(not swept(values), '--eval_only takes one trained run: --out_dir=RUN')
        here = {key: values[key] for key in ('out_dir', 'eval_only', 'results')}
        values = read_checkpoint(values['out_dir'])['config'] | flags | here
    return values


def default_out_dir(values):
    """out/TASK_PE. A sweep omits TASK or PE if varied, and adds other varied options."""
    names = [slug(values[key]) for key in ('task', 'pe') if key not in swept(values)]
    names += [key for key in swept(values) if key not in ('task', 'pe')]
    return 'out/' + ('_'.join(names) or 'sweep')


def make_config(values):
    """Return the Config of {option: value}. Raise UserError if the values are inconsistent."""
    return Config(**{key: x for key, x in values.items() if key in keys(Config)})  # not DERIVED


def print_help(doc, cls):
    """Print a program's docstring and the options of its dataclass and of every encoding, as the
    source declares them: NAME: type = default  # meaning."""
    print(doc + '\nSet --NAME=value, or NAME = value in a config file.')
    classes = [base for x in encodings.ENCODINGS.values() for base in x.__mro__]
    for owner in dict.fromkeys([*cls.__mro__, *classes]):  # each class once, in order
        if owner.__module__ in (cls.__module__, 'model', 'pe') and owner is not encodings.PEConfig:
            lines = re.findall(r'^(?:    # .*\n)*    \w+: .+ = .*', inspect.getsource(owner), re.M)
            lines = [x for x in lines if re.search(r'(?m)^    (\w+):', x)[1] in keys(cls)]
            if lines:
                print('\n'.join(['', owner.__name__, *lines]))


# ---- batches -------------------------------------------------------------------------------------

def lengths_at(cfg, step):
    """The problem lengths to train on at a step, up to the limit that length_schedule sets."""
    limits = [limit for start, limit in cfg.length_schedule if start <= step]  # stages begun
    return [n for n in cfg.train_lengths if not limits or n <= limits[-1]]


def generator(device, stream, number):
    """A separate random generator for each stream (train, fixed, eval, test) and number."""
    stream = ('train', 'fixed', 'eval', 'test').index(stream) + 1
    # CPU generators use only the lowest 32 bits of a seed
    return torch.Generator(device).manual_seed(stream << 28 | number)      # number < 2 ** 28


class Batches:
    """Shuffled batches of mixed lengths on the device, with rows padded on the right.

    An epoch is a pool of problems in random order: the same n_train per length, or the data set of
    the task, or new ones. The generator's state at its start, which a checkpoint stores, determines
    it. To limit padding, a batch has two parts: rows of the narrower half of the pool and rows of
    the wider half. Each part keeps its shape during an epoch, as CUDA graphs require."""
    def __init__(self, cfg, seed, task, device):
        self.cfg, self.seed, self.task, self.device = cfg, seed, task, device
        self.generator = generator(device, 'train', seed)  # draws orders, and problems online
        self.lengths, self.at = None, 0                    # at: the next step within the epoch

    def pool(self, lengths, source):
        """The problems of an epoch: tokens and targets [N, T], padded to the widest."""
        # online: a pool for 64 steps, so that one call draws many problems
        per_length = self.cfg.n_train or math.ceil(64 * self.cfg.batch_size / len(lengths))
        problems = [self.task.pool(per_length, length, source) for length in lengths]      # [n, t]
        most = max(int(tokens.max()) for tokens, _ in problems)
        need(most < self.cfg.vocab_size, f'{type(self.task).__name__} returned token {most}, but '
             f'its vocabulary has {self.cfg.vocab_size} tokens')
        T = max(tokens.shape[1] for tokens, _ in problems)         # the pool's width
        dtype = torch.int16 if self.cfg.vocab_size < 2 ** 15 else torch.int32      # saves memory

        def stack(parts, fill):                            # [n, t] of each length -> (N, T)
            return torch.cat([F.pad(x.to(dtype), (0, T - x.shape[1]), value=fill) for x in parts])
        tokens, targets = zip(*problems)                   # each: one [n, t] per length
        return stack(tokens, tasks.PAD), stack(targets, -100)      # -100 masks the loss

    def begin_epoch(self, lengths):
        """Draw the pool, unless it is fixed and drawn already, and the order of its problems."""
        self.start, self.at = self.generator.get_state(), 0        # the state is for restore()
        if lengths != self.lengths or not self.cfg.n_train:
            fixed = self.cfg.n_train > 0                   # the same pool in every epoch
            source = generator(self.device, 'fixed', self.seed) if fixed else self.generator
            self.tokens, self.targets = self.pool(lengths, source)         # [N, T], on the device
        self.lengths = lengths
        widths, rows = (self.tokens != tasks.PAD).sum(dim=1).sort(stable=True)     # (N,) each
        half = self.cfg.batch_size // 2                    # rows of a batch from the narrower part
        cut = len(rows) * half // self.cfg.batch_size      # 0 if a batch has one row
        if cut and widths[cut - 1] > 0.8 * widths[-1]:     # one part costs less, despite padding
            half = cut = 0
        self.parts = []                                    # (row indices, rows per step, width)
        for part, count in (rows[:cut], half), (rows[cut:], self.cfg.batch_size - half):
            if count:
                order = torch.randperm(len(part), generator=self.generator, device=self.device)
                width = int((self.tokens[part[-1]] != tasks.PAD).sum())    # the last is the widest
                self.parts.append((part[order], count, width))

    def next(self, step):
        """[tokens, targets, tokens, ...] of a step: a pair [b, t] per micro-batch of each part."""
        lengths, batch = lengths_at(self.cfg, step), []
        if lengths != self.lengths or (self.at + 1) * self.cfg.batch_size > len(self.tokens):
            self.begin_epoch(lengths)                      # a new stage, or too few rows are left
        for rows, count, width in self.parts:
            rows = rows[self.at * count:(self.at + 1) * count]     # (b,), each once per epoch
            for some in rows.tensor_split(min(count, self.cfg.accumulate)):
                batch += self.tokens[some, :width].long(), self.targets[some, :width].long()
        self.at += 1
        return batch

    def state(self):
        """The state for restore(): how the epoch began, its next step, a checksum of the pool."""
        return dict(start=self.start, lengths=self.lengths, at=self.at,
                    sum=zlib.crc32(self.tokens.cpu().numpy().tobytes()))

    def restore(self, state):
        """Resume in the middle of an epoch."""
        self.generator.set_state(state['start'])
        self.begin_epoch(state['lengths'])                 # draws the same pool and order again
        self.at = state['at']
        need(self.state()['sum'] == state['sum'], 'the training problems of the run in '
             f'{self.cfg.out_dir} have changed (its data or tasks.py); --overwrite trains it again')


def held_out(cfg, split, device):
    """Yield (length, (tokens, targets)) of split eval or test, the same for every encoding."""
    n, task = cfg.n_eval if split == 'eval' else cfg.n_test, cfg.the_task
    lengths = [cfg.eval_lengths] if task.corpus else [[length] for length in cfg.eval_lengths]
    for some in lengths:                                   # a corpus cuts one text at all lengths
        sets = task.held_out(split, n, some, lambda length: generator('cpu', split, length))
        for length, (tokens, targets) in sets.items():
            yield length, (tokens.to(device), targets.to(device))  # [n, T], drawn on the CPU


# ---- a training step -----------------------------------------------------------------------------

def learning_rate(cfg, step):
    """Linear warm-up to lr, then decay to min_lr at max_steps, or constant lr if decay=none."""
    if step < cfg.warmup_steps:                            # step counts from 0
        return cfg.lr * (step + 1) / cfg.warmup_steps      # from lr / warmup_steps up to lr
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)    # in [0, 1)
    left = {'none': 1.0, 'linear': 1 - done, 'cosine': (1 + math.cos(math.pi * done)) / 2}
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left[cfg.decay]


class Trainer:
    """The model of one seed, its batches and its optimizer."""
    def __init__(self, cfg, seed, device):
        self.cfg, self.device = cfg, device
        self.losses = []                                   # of the steps since the last log line
        if cfg.kernel == 'triton':
            encodings.kernels()                            # before the optimizer imports Triton
        torch.manual_seed(seed)                            # for initial weights, then dropout
        self.model = Transformer(cfg).to(device, cfg.weights_dtype)        # initialized on the CPU
        self.batches = Batches(cfg, seed, cfg.the_task, device)    # the same for every encoding
        self.autocast = precision(cfg, device)             # a context for each forward pass
        on_gpu = device.type == 'cuda'
        groups = self.model.optim_groups(cfg.lr, cfg.weight_decay)
        for group in groups:                               # a CUDA graph reads lr from tensors
            dtype = torch.float32 if on_gpu else torch.float64
            group['lr'] = torch.tensor(group['lr'], device=device, dtype=dtype)
        self.peaks = [group['lr'].item() for group in groups]      # before warm-up and decay
        self.optimizer = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), fused=True,
                                           capturable=on_gpu)      # keeps step counts on the GPU
        # a step calls self.update (possibly a CUDA graph), which calls self.forward
        self.forward = self.model
        large = sum(p.numel() for p in self.model.parameters()) >= 1e7
        compiled = on_gpu and large if cfg.compile is None else cfg.compile
        if compiled:
            self.forward = torch.compile(self.model, dynamic=False)        # recompiles per shape
        captures = not compiled and WORLD == 1 and all(
            getattr(part, 'capturable', True) for part in self.model.modules())
        graph = on_gpu and captures if cfg.graph is None else cfg.graph
        if graph:
            self.update = Graph(self.update)               # hides the method of this name

    def step(self, number):
        """Take an optimizer step; return the loss before it. Waits for the GPU once per epoch."""
        batch = self.batches.next(number)                  # tokens, targets, tokens, ...
        factor = learning_rate(self.cfg, number) / self.cfg.lr     # 1 at the peak, then decays
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group['lr'].fill_(factor * peak)               # in place, for a CUDA graph
        return self.update(*batch)

    def update(self, *batch):
        """Forward, backward, clip, AdamW on a batch of Batches.next(). Return the mean loss []."""
        loss, total = 0, sum((y != -100).sum() for y in batch[1::2])       # supervised targets
        for x, y in zip(batch[::2], batch[1::2]):          # micro-batches, (b, t) each
            x, y = x[RANK::WORLD], y[RANK::WORLD]          # all rows, or those of this process
            # its fraction of the supervised targets: losses weighted by it add up to the mean loss
            fraction = (y != -100).sum(dtype=self.cfg.weights_dtype) / total
            with self.autocast:
                part = fraction * self.forward(x, y)[1]    # the model returns (logits, mean loss)
            part.backward()                                # adds to p.grad
            loss = loss + part.detach()                    # [], without its autograd graph
        if WORLD > 1:                                      # sum over processes
            for tensor in (loss, *(p.grad for p in self.model.parameters() if p.grad is not None)):
                dist.all_reduce(tensor)
        if self.cfg.grad_clip:
            clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip)   # joint norm of all
        self.optimizer.step()                              # AdamW
        for group in self.optimizer.param_groups:
            if 'clamp' in group:                           # PoPE's delta
                for p in group['params']:
                    p.data.clamp_(*group['clamp'])         # (lowest, highest)
        self.optimizer.zero_grad(set_to_none=False)        # a CUDA graph adds to the same tensors
        return loss

    def mean_loss(self):
        """The mean loss since the previous call."""
        losses, self.losses = self.losses, []
        return sum(losses) / len(losses)

    def state(self):
        """The state for restore(). Copies the weights, because training changes them in place."""
        weights = self.model.state_dict()
        rng = [torch.get_rng_state()]                      # of dropout
        if self.device.type == 'cuda':
            rng.append(torch.cuda.get_rng_state())         # of dropout on the GPU
        return dict(model={name: x.to('cpu', copy=True) for name, x in weights.items()}, rng=rng,
                    moments=self.optimizer.state_dict()['state'], batches=self.batches.state(),
                    losses=self.losses)

    def restore(self, state):
        """Resume from the state of a run with the same configuration."""
        self.model.load_state_dict(state['model'])
        self.batches.restore(state['batches'])
        self.losses = state['losses']
        # the optimizer numbers its parameters in the order of its groups
        params = [p for group in self.optimizer.param_groups for p in group['params']]
        saved = state['moments']                           # {number: {name: average, or step}}
        need(saved and all(x['exp_avg'].shape == params[i].shape for i, x in saved.items()),
             f'older code trained the run in {self.cfg.out_dir}: use --eval_only or --overwrite')
        self.optimizer.load_state_dict(self.optimizer.state_dict() | dict(state=saved))
        torch.set_rng_state(state['rng'][0])
        if self.device.type == 'cuda':
            torch.cuda.set_rng_state(state['rng'][1])


# ---- CUDA graphs, device and precision -----------------------------------------------------------

class Graph:
    """A function of tensors, captured as a CUDA graph and replayed: one launch, not hundreds.

    The first three calls are eager, so that libraries and the optimizer can initialize. When the
    shapes of the arguments change, three eager calls and a new capture follow."""
    def __init__(self, function):
        self.function, self.shapes, self.side = function, None, torch.cuda.Stream()

    def __call__(self, *args):
        shapes = [x.shape for x in args]
        if shapes != self.shapes:                          # on the first call, and if T changes
            self.shapes, self.calls, self.graph = shapes, 0, None
            self.args = [torch.empty_like(x) for x in args]        # the graph reads these addresses
        self.calls += 1
        for mine, x in zip(self.args, args):
            mine.copy_(x)
        if self.calls <= 3:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)                 # the copies come first
            with torch.cuda.stream(self.side):             # PyTorch requires a side stream
                result = self.function(*self.args)
            current.wait_stream(self.side)                 # before the caller reads the result
            return result
        if self.graph is None:                             # at the fourth call
            gc.collect()                                   # freeing a graph would break a capture
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.side):   # captures kernels, runs none
                self.result = self.function(*self.args)    # also at a fixed address
            # the capture resets dropout's counter on its stream; replay() sets it on this stream
            torch.cuda.current_stream().wait_stream(self.side)
        self.graph.replay()
        return self.result.clone()                         # the next replay overwrites self.result


def pick_device(cfg):
    """The torch.device for cfg.device. Small steps use one CPU thread, because several would mostly
    wait for each other; OMP_NUM_THREADS overrides this."""
    name = cfg.device
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    if WORLD > 1 and name == 'cuda':
        name += ':' + os.environ['LOCAL_RANK']
    try:
        device = torch.empty(0, device=name).device        # cuda: cuda:0
    except (RuntimeError, AssertionError):
        raise UserError(f'--device={name} is not available: use cpu or auto') from None
    if device.type == 'cuda':
        torch.cuda.set_device(device)                      # for calls that name no device
    need(device.type == 'cuda' or not cfg.graph, '--graph requires a CUDA device; leave it out')
    work = cfg.batch_size * cfg.train_len * cfg.d_model    # B T C, the size of an activation
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1 if work <= 2 ** 18 else THREADS)
    return device


def precision(cfg, device):
    """Set the precision of float32 matrix products; return the autocast context."""
    torch.set_float32_matmul_precision('high' if cfg.dtype == 'tf32' else 'highest')
    if cfg.dtype == 'bfloat16':
        return torch.autocast(device.type, torch.bfloat16)         # weights stay in float32
    return contextlib.nullcontext()                        # nothing is cast


# ---- evaluation ----------------------------------------------------------------------------------

def token_losses(logits, targets):
    """Cross-entropy of every token [B, T], 0 where the target is -100."""
    return F.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100,
                           reduction='none')               # of (B, V, T) and (B, T)


@torch.no_grad()
def evaluate(model, task, sets, autocast=None):
    """{length: {exact, token, last, n}} under teacher forcing; sets: (length, (tokens, targets)).

    exact: fraction of the n sequences with every supervised token correct. token: fraction of
    supervised tokens correct. last: fraction of sequences whose last token (the end token aside) is
    correct. For a corpus also loss: the mean cross-entropy of a token, in nats."""
    training = model.training
    model.eval()                                           # no dropout, no random position shift
    scores, finite = {}, True
    for length, (tokens, targets) in sets:                 # (n, T) each
        T = tokens.shape[1]
        rows = max(1, min(2 ** 13, 2 ** 25 // len(task.vocab)) // T)       # to fit caches
        correct, loss = [], 0
        for x, y in zip(tokens.split(rows), targets.split(rows)):  # (rows, T) each
            with autocast or contextlib.nullcontext():
                logits = model(x)[0]                       # (rows, T, V)
            if finite and not logits.isfinite().all():
                finite = False
                tqdm.write(f'logits are NaN or infinite at length {length}')
            correct.append(logits.argmax(dim=-1) == y)     # (rows, T), padding included
            if task.corpus:
                loss = loss + token_losses(logits, y).sum(dtype=torch.float64)     # [], in nats
        correct = torch.cat(correct)                       # (n, T)
        asked = targets != -100                            # (n, T) supervised
        states = asked if task.end is None else asked & (targets != task.end)
        # (n, 1): the last of these positions
        last = (torch.arange(T, device=tokens.device) * states).argmax(dim=1, keepdim=True)
        # if every argmax is correct, greedy decoding reads the same prefixes: same exact score
        score = dict(exact=(correct | ~asked).all(dim=1).double().mean(),          # (n,) -> []
                     token=((correct & asked).sum() / asked.sum()).double(),       # over all rows
                     last=correct.gather(1, last).double().mean())                 # (n, 1) -> []
        if task.corpus:
            score['loss'] = loss / asked.sum()
        scores[length] = {key: round(x.item(), 6) for key, x in score.items()} | {'n': len(tokens)}
    model.train(training)
    return scores


# ---- the files of a run. ckpt.pt is a dictionary: ------------------------------------------------
#
#   config    every field of Config
#   step      optimizer steps done
#   seeds     {seed: {model: state_dict; step: of this model; failed: why the seed diverged;
#             moments: AdamW's averages; batches: Batches.state(); rng: states of the generators
#             that dropout uses; losses: of the steps since the last line of the log}}
#   log       the text of log.jsonl
#   scores    of a finished run: {seed: {length: scores}}; test_of: its n_test and eval_lengths

@contextlib.contextmanager
def locked(folder):
    """Keep other processes from training in a folder. Raise UserError if one already is."""
    if fcntl is None or RANK:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)         # raises instead of waiting
    except BlockingIOError:
        os.close(handle)
        raise UserError(f'another process is training in {folder}: use another --out_dir') from None
    try:
        yield
    finally:
        os.close(handle)                                   # releases the lock


def write_file(path, data):
    """Write bytes or text atomically: the file is either the whole old or the whole new one."""
    if RANK:
        return                                             # RANK 0 writes
    try:
        with open(path + '.tmp', 'wb') as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()                                      # from Python to the operating system
            os.fsync(f.fileno())                           # raises if the disk is full
        os.replace(path + '.tmp', path)                    # atomic
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        raise UserError(f'cannot write {path}: {error.strerror}') from None


def read_checkpoint(folder):
    """The dictionary in a run's ckpt.pt, with defaults for options that it lacks."""
    path = os.path.join(folder, 'ckpt.pt')
    need(os.path.exists(path), f'no run in {folder}: train it first, or name another '
         'folder (of a sweep: that of one run)')
    try:
        if zipfile.ZipFile(path).testzip():                # compares checksums; torch does not
            raise zipfile.BadZipFile
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)       # runs no code
        config, seeds, scores = (checkpoint.get(x, {}) for x in ('config', 'seeds', 'scores'))
        assert all(type(x) is dict and x for x in (config, *seeds.values(), *scores.values()))
        assert {*map(type, (*seeds, checkpoint['step']))} == {int} and checkpoint['step'] >= 0
        assert all(x is None or isinstance(config.get(key, x), type(x))
                   for key, x in defaults(Config).items())
    except (OSError, MemoryError):                         # the file itself may be valid
        raise
    except Exception:                                      # torch raises many types
        raise UserError(f'{path} is damaged, or not a checkpoint of train.py; use another '
                        '--out_dir, or train again with --overwrite') from None
    checkpoint['config'] = defaults(Config) | checkpoint['config']
    return checkpoint


def save(cfg, checkpoint, trainers, step, log):
    """Add the points in `log` to the log; write ckpt.pt, config.json and log.jsonl. A diverged seed
    keeps the model of the last checkpoint before it diverged."""
    if RANK:
        return
    first = not checkpoint['step']
    checkpoint['log'] += ''.join(json.dumps(point) + '\n' for point in log)
    for seed, trainer in trainers.items():
        checkpoint['seeds'][seed].update(trainer.state(), step=step)
    checkpoint['step'] = step
    write_checkpoint(cfg, checkpoint)
    if first:                                              # now delete the replaced run, if any
        for name in os.listdir(cfg.out_dir):
            if re.fullmatch(r'(lengths|eval|probe_[a-z]+)\.(json|png)', name):
                os.remove(os.path.join(cfg.out_dir, name))
    write_file(os.path.join(cfg.out_dir, 'log.jsonl'), checkpoint['log'])


def write_checkpoint(cfg, checkpoint):
    """Write ckpt.pt and config.json."""
    buffer = io.BytesIO()                                  # in memory, for write_file()
    torch.save(checkpoint, buffer)                         # a zip archive with checksums
    write_file(os.path.join(cfg.out_dir, 'ckpt.pt'), buffer.getvalue())
    write_file(os.path.join(cfg.out_dir, 'config.json'), json.dumps(asdict(cfg), indent=1))


def check_same(cfg, checkpoint, names):
    """Raise UserError if the checkpoint's config differs from cfg in one of these options. Options
    of other encodings may differ."""
    options = {name: {*encodings.options_of(cls)} for name, cls in encodings.ENCODINGS.items()}
    used = set().union(*(options[name] for name in cfg.pe.split('+')))
    unused = set().union(*options.values()) - used
    for key in [key for key in names if key not in unused]:
        saved, now = checkpoint['config'].get(key), getattr(cfg, key)
        need(saved == now, f'the run in {cfg.out_dir} was trained with {key}={saved}, not {now}: '
             'use the same value, another --out_dir, or --overwrite')


def failures(checkpoint):
    """One line of text per seed that diverged."""
    return [entry['failed'] for entry in checkpoint['seeds'].values() if 'failed' in entry]


def append_record(cfg, device, by_seed, failed):
    """Append a finished run to cfg.results, once, in the format of results/tables.py."""
    if RANK:
        return
    config = {key: as_typed(getattr(cfg, key)) if field.type is list else getattr(cfg, key)
              for key, field in keys(Config).items()
              if key not in NOT_RECORDED and (key in ('pe', 'task')
                                              or getattr(cfg, key) != defaults(Config)[key])}
    scores = {}
    for seed, by_length in by_seed.items():
        rows = [by_length[n] for n in cfg.eval_lengths]    # in the order of the record's lengths
        # a list per metric, without metrics that equal exact
        columns = {metric: [round(row[metric], 4) for row in rows] for metric in rows[0]}
        scores[seed] = {metric: column for metric, column in columns.items() if metric != 'n'
                        and (metric == 'exact' or column != columns['exact'])}
    sizes = {n: row['n'] for by_length in by_seed.values() for n, row in by_length.items()
             if row['n'] != cfg.n_test}                    # SCAN can have fewer problems
    git = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'describe', '--always',
           '--dirty', '--exclude=*']                       # the hash; -dirty if files have changed
    commit = ''
    with contextlib.suppress(OSError):                     # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    hardware = torch.cuda.get_device_name() if device.type == 'cuda' else platform.machine()
    result = dict(config=config, lengths=as_typed(cfg.eval_lengths), scores=scores)
    origin = dict(n=sizes, failed=list(failed), torch=torch.__version__, commit=commit,
                  hardware=hardware)
    line = json.dumps(result | {key: x for key, x in origin.items() if x}, separators=(',', ':'))
    with open(cfg.results, 'a+', errors='surrogateescape') as f:    # always writes at the end
        f.seek(0)
        known = f.read()
        # the same result is recorded once, even if its origin differs
        if json.dumps(result, separators=(',', ':'))[:-1] + ',' not in known:
            f.write('\n' * (known[-1:] not in ('', '\n')) + line + '\n')   # ends a cut-off line


# ---- tables. rows: [(label, {length: scores}, metric)] -------------------------------------------

def mean_scores(by_seed):
    """{length: scores}, where each score is the mean over seeds."""
    runs = list(by_seed.values())                          # [{length: scores}]
    return {n: {key: sum(run[n][key] for run in runs) / len(runs) for key in first}
            for n, first in runs[0].items()}


def summary(cfg, scores, metric='exact'):
    """Three texts: the mean over the training lengths, the mean over longer lengths, and the max
    length, up to which every length has at least 95 %. Means are over problems."""
    def mean(lengths):
        total = sum(scores[n]['n'] for n in lengths)
        right = sum(scores[n]['n'] * scores[n][metric] for n in lengths)
        return f'{100 * right / total:.1f} %' if total else '-'

    longest = max(cfg.train_lengths)
    accurate = itertools.takewhile(lambda n: scores[n][metric] >= 0.95, sorted(scores))
    return (mean([n for n in scores if n in cfg.train_lengths]),
            mean([n for n in scores if n > longest]), max(accurate, default=0) or 'none')


def perplexity(score):
    """e^loss, from the loss in nats."""
    return math.exp(min(score['loss'], 700))               # e^710 would overflow


def brief(cfg, scores):
    """The scores {length: scores} in one line."""
    if cfg.the_task.corpus:
        trained = [n for n in scores if n <= max(cfg.train_lengths)] or list(scores)
        return ', '.join(f'loss {scores[n]["loss"]:.4f} (perplexity '
                         f'{perplexity(scores[n]):.2f}) in contexts of {n}'
                         for n in sorted({max(trained), max(scores)}))     # one if they are equal
    trained, longer, largest = summary(cfg, scores)
    return (f'exact match {trained} on training lengths, {longer} on longer ones; '
            f'max length >= 95 %: {largest}')


def print_rows(cfg, rows):
    """Print a table by length: for a corpus, perplexities; for other tasks, a line per row with one
    character per length, then the texts of summary()."""
    lengths, width = sorted(rows[0][1]), max(len(label) for label, _, _ in rows) + 2
    if cfg.the_task.corpus:
        print(f'{"context":{width}}' + ''.join(f'{n:>9}' for n in lengths))
        for label, scores, _ in rows:
            cells = (f'{perplexity(scores[n]):>9.3f}' for n in lengths)
            print(f'{label:{width}}' + ''.join(cells))
        return
    inside = sum(n <= max(cfg.train_lengths) for n in lengths)     # up to the longest trained
    every = math.ceil(len(lengths) / 64)                   # shows at most 64, one of them `inside`
    lengths, inside = lengths[(inside - 1) % every::every], math.ceil(inside / every)
    unicode = (sys.stdout.encoding or '').lower().startswith('utf')
    shades, bar = ('·▁▂▃▄▅▆▇█', '│') if unicode else ('.12345678', '|')
    ticks = ' ' * len(lengths)                             # the numbers above the strips
    for i in (inside - 1, len(lengths) - 1, 0, *range(7, len(lengths), 8)):
        text = str(lengths[i])
        start = max(0, i + 1 - len(text))                  # a number ends above its column
        if i >= 0 and not ticks[max(0, start - 1):start + len(text) + 1].strip():  # free space
            ticks = ticks[:start] + text + ticks[start + len(text):]
    print(f'{"":{width}}{ticks[:inside]} {ticks[inside:]}  training    longer  max length')
    for label, scores, metric in rows:
        strip = ''.join(shades[int(8 * scores[n][metric] + 1e-9)] for n in lengths)        # eighths
        trained, longer, largest = summary(cfg, scores, metric)
        print(f'{label:{width}}{strip[:inside]}{bar}{strip[inside:]}   {trained:>7}   '
              f'{longer:>7}  {largest:>10}')
    print(f'\n{len(lengths)} of {len(rows[0][1])} lengths; {shades[0]} below 12.5 %, {shades[-1]} '
          f'100 %; {bar} ends the training lengths; max length: at least 95 % up to this length')


def show(cfg, by_seed):
    """Print the mean of each metric over seeds; for several seeds, also the first of each."""
    scores, corpus = mean_scores(by_seed), cfg.the_task.corpus
    metrics = dict(exact='exact match', token='tokens', last='last state')
    rows = [(label, scores, metric) for metric, label in metrics.items()]
    if corpus:
        rows = [('perplexity', scores, 'loss')]
    if len(by_seed) > 1:
        rows += [(f'{rows[0][0]}, seed {seed}', run, rows[0][2]) for seed, run in by_seed.items()]
    what = ('the same held-out text in contexts of every length' if corpus else
            f'{scores[cfg.eval_lengths[0]]["n"]:.0f} held-out problems per length')
    print(f'\n{cfg.task} with {cfg.pe}, seeds {as_typed(list(by_seed))}, {what}')
    print_rows(cfg, rows)


# ---- the training loop ---------------------------------------------------------------------------

@contextlib.contextmanager
def caught_signals():
    """A list to which Ctrl-C or SIGTERM appends its signal number. The loop then saves and stops.
    The same signal again ends the process at once."""
    caught = []

    def catch(number, frame):
        caught.append(number)                              # nothing else: a step may be running
        signal.signal(number, signal.SIG_DFL)
    before = {x: signal.signal(x, catch) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():             # for a notebook, which continues
            signal.signal(number, handler or signal.SIG_DFL)       # None: set by C code


def train(cfg, device, checkpoint, stop):
    """Train all seeds from where the checkpoint left them. Return {seed: {length: scores}} of the
    seeds that did not diverge, or None if a signal stopped the run. The checkpoint is updated: it
    says which seeds diverged."""
    trainers = begin(cfg, device, checkpoint)              # {seed: Trainer}
    first, log = checkpoint['step'], []                    # log: points not yet written
    began = time.time()
    every = 0.1 if sys.stderr.isatty() else 10             # seconds between updates of the bar
    bar = tqdm(range(first, cfg.max_steps), total=cfg.max_steps, initial=first, unit='step',
               desc=f'{cfg.task} {cfg.pe}', mininterval=every, delay=every, leave=False,
               disable=RANK > 0)
    for step in bar:
        for trainer in trainers.values():
            trainer.losses.append(trainer.step(step))      # [], stays on the device, without a wait
        done = step + 1                                    # steps completed
        if WORLD > 1:                                      # all processes stop after the same step
            number = torch.tensor(stop[0] if stop else 0)
            dist.all_reduce(number, dist.ReduceOp.MAX)     # 0, or the number of a signal
            stop += [number.item()] if number else []
        evaluating = done % cfg.eval_interval == 0 or done == cfg.max_steps
        logging = done % cfg.log_interval == 0 or evaluating
        if not (logging or stop):
            continue
        drop_diverged(trainers, checkpoint, done)          # first, as save() must not save NaN
        if not trainers:
            save(cfg, checkpoint, trainers, done, log)
            return {}
        if logging:
            speed = round((done - first) / (time.time() - began), 2)       # of all seeds together
            means = {seed: trainer.mean_loss() for seed, trainer in trainers.items()}
            log += [dict(step=done, seed=seed, loss=x, lr=learning_rate(cfg, step),
                         steps_per_s=speed) for seed, x in means.items()]
            loss = sum(means.values()) / len(means)        # over seeds, for the progress bar
            bar.set_postfix(loss=f'{loss:.4f}', refresh=False)
        if evaluating:
            pause = time.time()
            scores = test(cfg, trainers, 'eval', device)   # {seed: {length: scores}}
            log += [dict(step=done, seed=seed, eval=x) for seed, x in scores.items()]
            began += time.time() - pause                   # leaves evaluation out of the speed
            tqdm.write(f'step {done:>6}  loss {loss:.4f}  {speed:6.1f} steps/s  '
                       f'{brief(cfg, mean_scores(scores))}')
        if evaluating or stop:
            save(cfg, checkpoint, trainers, done, log)
            log = []
        if stop and done < cfg.max_steps:                  # after the last step, test anyway
            return None
    return test(cfg, trainers, 'test', device)             # on problems that no evaluation used


def begin(cfg, device, checkpoint):
    """{seed: Trainer} of the seeds that have not diverged, resumed from the checkpoint."""
    trainers = {seed: Trainer(cfg, seed, device) for seed, entry in checkpoint['seeds'].items()
                if 'failed' not in entry}
    first = checkpoint['step']
    if first:
        try:
            for seed, trainer in trainers.items():
                trainer.restore(checkpoint['seeds'][seed]) # weights, moments, batches, generators
            log = checkpoint['log']
        except (LookupError, TypeError, AttributeError, RuntimeError):
            raise UserError(f'the checkpoint in {cfg.out_dir} cannot be resumed: other code or '
                            'another kind of device made it; use that --device, or --eval_only, '
                            'or train again with --overwrite') from None
        write_file(os.path.join(cfg.out_dir, 'log.jsonl'), log)    # it can be older than ckpt.pt
        print(f'resuming the run in {cfg.out_dir}')
    size = sum(p.numel() for x in trainers.values() for p in x.model.parameters())
    what = f'steps {first + 1} to {cfg.max_steps}' if first < cfg.max_steps else 'only the test'
    print(f'{size // max(1, len(trainers)):,} parameters on {device}, seeds {as_typed(cfg.seeds)}, '
          f'{what}')
    return trainers


def drop_diverged(trainers, checkpoint, step):
    """Remove seeds with non-finite weights, or losses since the last log line, and note why."""
    for seed, trainer in [*trainers.items()]:              # a copy, because the loop deletes items
        trainer.losses = [float(x) for x in trainer.losses]        # waits for the device
        start = step + 1 - len(trainer.losses)             # the step of the first loss, from 1
        bad = [i for i, x in enumerate(trainer.losses, start) if not math.isfinite(x)]
        # check the weights as well: the last update came after the last loss
        if not all(p.isfinite().all() for p in trainer.model.parameters()):
            bad.append(step)
        if bad:
            says = f'seed {seed}: the loss or a weight became NaN or infinite at step {bad[0]}'
            tqdm.write(says)
            checkpoint['seeds'][seed]['failed'] = says     # beside its last saved model
            del trainers[seed]


def test(cfg, trainers, split, device):
    """{seed: {length: scores}} on held-out problems."""
    return {seed: evaluate(trainer.model, cfg.the_task, held_out(cfg, split, device),
                           trainer.autocast) for seed, trainer in trainers.items()}


# ---- the program: a run, a sweep, an evaluation --------------------------------------------------

def run(cfg, stop):
    """Train one configuration, or resume it from its checkpoint. Return ({seed: {length: scores}}
    or, if a signal stopped it, None; one line per diverged seed)."""
    device = pick_device(cfg)
    need(WORLD == 1 or len(cfg.seeds) == 1 and cfg.batch_size >= 2 * WORLD * cfg.accumulate,
         f'torchrun trains one seed, with batch_size at least 2 x accumulate x {WORLD} processes')
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group()                          # gloo for CPUs, NCCL for GPUs
    need(not os.path.isfile(cfg.out_dir), f'{cfg.out_dir} is a file; use another --out_dir')
    os.makedirs(cfg.out_dir, exist_ok=True)
    if cfg.results:
        open(cfg.results, 'a').close()                     # raises now rather than after training
    with locked(cfg.out_dir):
        checkpoint = {'seeds': {seed: {} for seed in cfg.seeds}, 'step': 0, 'log': ''}
        there = {'ckpt.pt', 'config.json', 'log.jsonl', 'lengths.json'} & {*os.listdir(cfg.out_dir)}
        need(not there or 'ckpt.pt' in there, f'{cfg.out_dir} has no ckpt.pt, but other files with '
             f'the names of a run: {", ".join(sorted(there))}; use another --out_dir')
        if there and not cfg.overwrite:
            checkpoint = read_checkpoint(cfg.out_dir)
            check_same(cfg, checkpoint, [f.name for f in fields(Config) if f.name not in FREE])
        checkpoint['config'] = asdict(cfg)                 # options in FREE may have changed
        test_of = [cfg.n_test, cfg.eval_lengths]           # other values require a new test
        if checkpoint.get('test_of') == test_of:
            by_seed = checkpoint['scores']
            print(f'{cfg.out_dir} was finished earlier; --overwrite trains it again')
        else:
            by_seed = train(cfg, device, checkpoint, stop)         # {} if every seed diverged
            if by_seed is None:
                return None, []
            checkpoint |= dict(test_of=test_of, scores=by_seed)
            write_checkpoint(cfg, checkpoint)
        write_file(os.path.join(cfg.out_dir, 'lengths.json'), json.dumps(by_seed))
        if cfg.results:
            append_record(cfg, device, by_seed, failures(checkpoint))
    return by_seed, failures(checkpoint)


def train_points(points, varied, stop):
    """Train each (label, config) of a run, or of a sweep over the options `varied`, and print a
    table. Return the exit status. Raise UserError if a seed diverged."""
    scores, failed = {}, []                                # {label: {seed: {length: scores}}}
    for label, cfg in points:
        if varied:
            print(f'--- {label} ({cfg.out_dir})')
        by_seed, lines = run(cfg, stop)
        if by_seed is None:
            print('stopped and saved; resume with the same command'
                  + (', without --overwrite' if cfg.overwrite else ''))
            return 128 + stop[0]                           # as a shell reports a signal
        failed += [f'{label} {line}'.strip() for line in lines]
        if by_seed:
            scores[label] = by_seed
            if varied:
                print(brief(cfg, mean_scores(by_seed)))
            else:
                show(cfg, by_seed)
    if varied and scores:
        what = 'perplexity' if cfg.the_task.corpus else 'exact match'
        print(f'\n{what} by length, ' + ' x '.join(varied))
        print_rows(cfg, [(label, mean_scores(x), 'exact') for label, x in scores.items()])
    if failed:
        advice = '. A lower --lr or a longer --warmup_steps may help'
        if any(line.endswith('at step 1') for line in failed):      # at most one update was made
            advice = '. It began in the first step: check the model and the data'
        raise UserError(f'{len(failed)} diverged: {"; ".join(failed)}{advice}')
    return 0


def load(run_dir, seed=None, cfg=None):
    """(model, config) of a run, on the CPU in evaluation mode. seed=None: the first that did not
    diverge. cfg: another configuration for the same weights, for example with other eval_lengths.
    `seeds` of the returned config is [seed]. Raise UserError if there is no such model."""
    checkpoint = read_checkpoint(str(run_dir))
    saved = checkpoint['config']
    cfg = copy.copy(cfg) if cfg else make_config(saved | dict(out_dir=str(run_dir)))
    trained = tasks.make(saved['task'], cfg.data)          # the task of the run
    need(cfg.the_task.vocab == trained.vocab and type(cfg.the_task) is type(trained),
         f'the run in {run_dir} was trained with task={trained.name}; {cfg.task} is another task '
         'or has another vocabulary')
    same = ['vocab_size', 'train_len', 'data'] if trained.own_vocab else ['vocab_size', 'train_len']
    check_same(cfg, checkpoint, same)
    models = {s: entry['model'] for s, entry in checkpoint['seeds'].items()
              if 'model' in entry and 'failed' not in entry}
    seed = next(iter(models), None) if seed is None else seed
    need(seed in models, f'no model of seed {seed} in {run_dir}; found: '
         + '; '.join([*map(str, models), *failures(checkpoint)]))
    model = Transformer(cfg).to(cfg.weights_dtype)
    try:
        model.load_state_dict(models[seed])
    except (RuntimeError, TypeError):                      # other names or shapes
        raise UserError(f'the run in {run_dir} has other parameters than this configuration: an '
                        'option, pe.py or model.py has changed') from None
    cfg.seeds = [seed]
    return model.eval(), cfg


def evaluate_run(cfg):
    """--eval_only: {seed: {length: scores}} of a run at cfg.eval_lengths. Also writes eval.json."""
    device, by_seed = pick_device(cfg), {}
    saved = read_checkpoint(cfg.out_dir)
    print(''.join(f'left out: {line}\n' for line in failures(saved)), end='')
    seeds = [seed for seed in cfg.seeds if 'failed' not in saved['seeds'].get(seed, {})]
    need(seeds, f'every seed of the run in {cfg.out_dir} diverged')
    if saved['config']['pe'] != cfg.pe:
        print(f'the run in {cfg.out_dir} was trained with pe={saved["config"]["pe"]}')
    for seed in seeds:
        model = load(cfg.out_dir, seed, cfg)[0].to(device)
        by_seed[seed] = evaluate(model, cfg.the_task, held_out(cfg, 'test', device),
                                 precision(cfg, device))
    write_file(os.path.join(cfg.out_dir, 'eval.json'), json.dumps(by_seed))
    if cfg.results:
        append_record(cfg, device, by_seed, failures(saved))
    return by_seed


def read_points(values):
    """([(label, config)] of the points of a sweep or of a single run, [options that vary])."""
    varied, points = swept(values), []
    for point in itertools.product(*(values[key] for key in varied)):      # (): the one run
        here = values | dict(zip(varied, point))
        if varied:
            name = ','.join(f'{key}={slug(str(x))}' for key, x in zip(varied, point))
            here['out_dir'] = os.path.join(values['out_dir'], name)
        points.append((' '.join(map(str, point)), make_config(here)))
    need(len({(*cfg.eval_lengths, cfg.the_task.corpus) for _, cfg in points}) == 1,
         'a sweep prints one table, but these tasks differ in their eval_lengths or in what is '
         'scored; run them one by one')
    return points, varied


def main(argv):
    """One run, a sweep or an evaluation. Return the exit status."""
    if {'-h', '--help'} & set(argv):
        return print_help(__doc__, Config)
    if RANK:
        sys.stdout = open(os.devnull, 'w')                 # RANK 0 prints
    values = read_options(argv)
    points, varied = read_points(values)
    cfg = points[0][1]
    changed = {key: ','.join(map(str, values[key])) if key in varied else as_typed(values[key])
               for key, usual in defaults(Config).items()
               if key in ('task', 'pe') or values[key] != usual}
    print(shlex.join(f'--{key}={value}' for key, value in changed.items()) + '\n')
    if cfg.eval_only:
        return show(cfg, evaluate_run(cfg))
    with caught_signals() as stop:
        return train_points(points, varied, stop)


def run_program(main, *errors):
    """Run main(argv) and exit with its status. Errors that a user can fix (UserError, OSError,
    `errors`, a lack of memory) or a lost process print one line and exit with 2."""
    sys.stdout.reconfigure(errors='replace')               # prints ? for unsupported characters
    if hasattr(signal, 'SIGPIPE'):                         # for train.py ... | head
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]) or 0)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError, *errors) as error:
        says = error
        if isinstance(error, OSError) and error.filename:
            says = f'{error.filename}: {error.strerror}'
    except (MemoryError, RuntimeError) as error:
        lost = WORLD > 1 and re.search('onnection|NCCL|peer', str(error))  # PyTorch's words
        lacks_memory = re.search('out of memory|allocate', str(error))
        if not (lost or lacks_memory or isinstance(error, MemoryError)):
            raise
        says = ('another process of this run ended: restart the run' if lost else
                'not enough memory: use a smaller model or batch_size, a larger accumulate, or '
                'fewer and shorter problems (of a probe: a smaller --length or --n)')
    print(f'{os.path.basename(sys.argv[0])}: {says}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
    run_program(main)
