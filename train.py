"""Train any encoding on any task and see at which length it breaks.

    python train.py configs/parity_rope.py                           one run
    python train.py configs/parity_rope.py --pe=nope,rope,alibi      a sweep: three runs, one table
    python train.py configs/parity_rope.py --seed=0-7                a sweep over eight seeds
    python train.py --eval_only --out_dir=out/parity_rope --eval_lengths=1-100
    torchrun --nproc_per_node=2 train.py configs/openwebtext_pope.py --data=FOLDER    on 2 GPUs
    python train.py --help                                           every option and its meaning

Config files are plain Python assignments; flags override them. The folder of a run contains
ckpt.pt, config.json, log.jsonl (a line per logged step) and lengths.json ({length: scores}). The
same command resumes a stopped run, bitwise as if it had not stopped, or shows a finished run.
"""
import ast
import contextlib
import gc
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import pe as encodings
import tasks
from model import ModelConfig, Transformer, check
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
    greedy: bool = False           # also test answers decoded greedily: one pass for each token
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
    init_from: str = ''            # begin with weights and options of this run; may have {seed}
    # optimization: AdamW, linear warm-up, decay
    seed: int = 0                  # of weights, problems and dropout; --seed=0-7 trains 8 models
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

    # make_config() reads these off the task and the run in init_from
    DERIVED = 'vocab_size', 'train_len', 'eval_len', 'first_len'

    def __post_init__(self):
        """Raise UserError if options contradict each other. Read no data and build nothing."""
        super().__post_init__()
        encodings.check_positive(self, 'batch_size', 'max_steps', 'log_interval', 'eval_interval',
                                 'n_eval', 'n_test', 'lr', 'accumulate')
        need(self.beta1 < 1 and self.beta2 < 1, 'beta1 and beta2 must be below 1')
        need(self.min_lr <= self.lr, f'min_lr={self.min_lr} must be at most lr={self.lr}')
        least = self.accumulate * (2 * WORLD if WORLD > 1 else 1)
        need(self.batch_size >= least, f'batch_size={self.batch_size} must be at least {least}: '
             'accumulate, times 2 per process of torchrun')
        for key in 'train_lengths', 'eval_lengths':
            lengths = getattr(self, key)
            need(lengths and all(type(x) is int and x < 10 ** 9 for x in lengths),
                 f'{key} must be integers below 10^9, as in 1-16 or 1,2,4; got {lengths[:99]}')
            setattr(self, key, sorted(set(lengths)))
        stages = self.length_schedule
        pairs = all(isinstance(x, (list, tuple)) and [*map(type, x)] == [int, int] for x in stages)
        starts = [x[0] for x in stages] if pairs else []
        rising = not starts or starts[0] == 0 and starts == sorted(set(starts))
        need(pairs and rising, 'length_schedule must be pairs (first step, longest length) from '
             f'step 0 on, as in [(0, 5), (400, 10)]; got {stages}')
        self.length_schedule = [list(x) for x in stages]
        single = len(self.train_lengths) == 1 and isinstance(self.the_task, tasks.Classification)
        need(self.causal or single, 'causal=False requires a classification task and one training '
             'length, because padding would be visible')
        need(not (self.the_task.fixed and self.n_train), f'{self.task} requires n_train=0')

    @property
    def the_task(self):
        """The task object. tasks.make caches it."""
        return tasks.make(self.task, self.data)

    @property
    def parent(self):
        """The folder of the run to begin from: init_from, which may contain {seed}."""
        return self.init_from.replace('{seed}', str(self.seed))

    @property
    def weights_dtype(self):
        """The dtype of the parameters, which stay in float32 when products are in bfloat16."""
        return torch.float64 if self.dtype == 'float64' else torch.float32


for cls in ModelConfig, Running, Config:
    both = encodings.OPTIONS.keys() & cls.__annotations__.keys()
    need(not both, f'rename the option {both} of an encoding: models or runs have it, too')

# options that may change when a run resumes, and options that its record omits
FREE = {f.name for f in fields(Running)} | {'kernel', 'data', 'eval_len'}
NOT_RECORDED = FREE.union(Config.DERIVED) - {'out_dir', 'n_test', 'eval_only', 'accumulate', 'data'}
# options that --eval_only may change beside FREE: the encoding, its options and the problems
EVALUATED = {*encodings.OPTIONS, 'pe', 'rope_base', 'rope_heads', 'task'}
TEXTS = 'out_dir', 'results', 'data', 'init_from'          # a comma in these makes no sweep
KINDS = {list: 'a list (1-16 or [(0, 5)])', int: 'an integer >= 0 (a size: below 10^9)',
         float: 'a number >= 0', bool: 'True or False', str: 'text'}


def make_config(values):
    """Return the Config of {option: value}, completed from its task: the lengths that have problems
    and the sizes in DERIVED. Raise UserError if the task or the encoding does not fit."""
    cfg = Config(**{key: x for key, x in values.items() if key in keys(Config)})   # not DERIVED
    task = cfg.the_task
    if task.corpus:
        for part in ('val', 'test') if cfg.eval_only else tasks.PARTS:
            task.of_part(part)                             # raises if the data are missing
    for key, part in ('train_lengths', 'train'), ('eval_lengths', None):
        setattr(cfg, key, task.existing(getattr(cfg, key), part))
        need(getattr(cfg, key), f'{cfg.task} has no problems of these {key}')
    for start, _ in cfg.length_schedule or [(0, None)]:
        pool_at(cfg, start)                                # raises if the pool is too small
    cfg.train_len = task.width(cfg.train_lengths)          # in tokens; raises if the task is wrong
    cfg.eval_len = task.width(cfg.eval_lengths)
    cfg.vocab_size = len(task.vocab)                       # V, padding included
    cfg.first_len = values.get('first_len', 0)
    if cfg.init_from and not cfg.first_len:                # not yet read
        begun = read_checkpoint(cfg.parent)['config']
        cfg.first_len = begun['first_len'] or begun['train_len']
        inherited(cfg)                                     # raises if the weights do not fit
    check(cfg)                                             # raises if the encoding does not fit
    return cfg


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
    if not isinstance(value, (list, range)) or not value or type(value[0]) is not int:
        return str(value)
    known = set(value)
    first = [x for x in sorted(known) if x - 1 not in known]       # of each span
    last = [x for x in sorted(known) if x + 1 not in known]
    return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in zip(first, last))


def parse_list(text):
    """1-16 | 1,2,4-6 | [(0, 5), (400, 10)] -> list."""
    if text.startswith('['):
        return ast.literal_eval(text)                      # accepts only literals, runs no code
    ends = [[int(x) for x in part.split('-')] for part in text.split(',')]     # [5] or [1, 16]
    need(all(span[-1] - span[0] < 10 ** 5 for span in ends), 'a range is too long')
    return [x for span in ends for x in range(span[0], span[-1] + 1)]


def convert(cls, key, value, where):
    """Convert a value, or its text, to the type of option `key`. For a scalar option of Config,
    several values become a list, for a sweep. Raise UserError if the value is invalid."""
    for encoding in encodings.ENCODINGS.values():
        need(key in keys(cls) or key not in vars(encoding), f'{encoding.__name__}.{key} is not an '
             f'option until its class says its type, as in {key}: float = 0.5')
    check_name(f'option in {where}:', key, keys(cls))
    kind, default, found = keys(cls)[key].type, defaults(cls)[key], value
    if isinstance(value, str):
        found = os.path.expanduser(value)                  # of --data=~/x, which shells leave
        with contextlib.suppress(SyntaxError, ValueError, TypeError):      # an invalid text stays
            if kind is list or key == 'seed':              # a range is allowed for seeds, too
                found = parse_list(value)
            elif kind in (bool, int, float):
                found = ast.literal_eval(value.title())    # true: True
            elif cls is Config and key not in TEXTS and ',' in value:
                found = value.split(',')                   # pe=nope,rope
    if isinstance(found, (list, tuple, range)):
        found = list(found) if kind is list else list(dict.fromkeys(found))    # each once
        if cls is Config and kind is not list and len(found) > 1:
            return [convert(cls, key, x, where) for x in found]
        found = found[0] if kind is not list and len(found) == 1 else found
    fits = type(found) is kind or found in get_args(kind)  # the choices of a Literal
    if kind in (int, float):                               # max_steps=1e4 and lr=1 are valid
        limit = 10 ** 9 if kind is int and key != 'seed' else math.inf
        fits = type(found) in (int, float) and 0 <= found < limit and kind(found) == found
        found = kind(found) if fits else found
    what = KINDS.get(kind) or 'one of ' + ', '.join(get_args(kind))
    got = 'no value' if value is True else repr(found)     # the flag alone means True
    need(fits or found is None and default is None,
         f'{where}: {key} must be {what}, as in --{key}={as_typed(default)}; got {got}')
    return found


def parse(cls, argv):
    """({option: value}, other words) of a command line. --key alone means --key=True."""
    flags, words = {}, [arg for arg in argv if not arg.startswith('--')]
    for arg in [arg for arg in argv if arg.startswith('--')]:
        key, equals, value = arg[2:].partition('=')
        flags[key] = convert(cls, key, value if equals else True, arg)
    return flags, words


def read_file(path, values):
    """Return `values` updated with a config file's assignments, which may use earlier values."""
    names = dict(values)
    try:
        with open(path, encoding='utf-8-sig') as f:        # Windows may begin it with a mark
            exec(compile(f.read(), path, 'exec'), names)
    except (Exception, SystemExit) as error:               # whatever its lines raise
        raise UserError(f'config file {path}: {type(error).__name__}: {error}') from None
    where = f'{path} (helpers begin with _)'
    return {key: convert(Config, key, x, where) for key, x in names.items()
            if key in values or not (key.startswith('_') or inspect.ismodule(x) or callable(x))}


def swept(values):
    """The options that a sweep varies: those with a list of values instead of a single one."""
    return [key for key, field in keys(Config).items()
            if isinstance(values[key], list) and field.type is not list]


def read_options(argv):
    """{option: value} from defaults, config files (or, with --eval_only, the configuration of the
    run) and flags; a list where a sweep varies an option."""
    flags, paths = parse(Config, argv)
    values = defaults(Config)
    if 'init_from' in flags:                               # its options, too
        need('eval_only' not in flags, '--init_from begins a training, --eval_only has none: use '
             '--eval_only with --out_dir=RUN')
        seed = flags.get('seed', 0)
        folder = flags['init_from'].replace('{seed}', str(seed[0] if type(seed) is list else seed))
        trained = read_checkpoint(folder)['config']
        values |= {key: trained[key] for key in values if key not in (
            'out_dir', 'results', 'overwrite', 'eval_only', 'length_schedule')}
    for path in paths:                                     # a later file overrides an earlier one
        values = read_file(path, values)
    values |= flags                                        # flags override all files
    if not values['out_dir']:                              # out/TASK_PE, or what else varies
        names = [slug(values[key]) for key in ('task', 'pe') if key not in swept(values)]
        if values['init_from']:                            # out/from_RUN_PE
            names = ['from', slug(os.path.basename(values['init_from'])), *names[1:]]
        names += [key for key in swept(values) if key not in ('task', 'pe')]
        values['out_dir'] = 'out/' + ('_'.join(names) or 'sweep')
    if values['eval_only']:
        need(not swept(values) and not paths, '--eval_only takes one trained run and no config '
             'file: --out_dir=RUN')
        trained = read_checkpoint(values['out_dir'])['config']
        values = trained | {key: values[key] for key in ('out_dir', 'eval_only', 'results', *flags)}
    return values


def print_help(doc, cls):
    """Print a program's docstring and the options of its dataclass and of every encoding, as the
    source declares them: NAME: type = default  # meaning."""
    print(f'{doc or ""}\nSet --NAME=value, or NAME = value in a config file.')
    field = re.compile(r'^((?:    # .*\n)*    (\w+): .+ = .*)', re.M)      # (its lines, its name)
    classes = [base for x in encodings.ENCODINGS.values() for base in x.__mro__]
    for owner in dict.fromkeys([*cls.__mro__, *classes]):  # each class once, in order
        if owner not in (object, encodings.PEConfig, torch.nn.Module):     # these have no options
            found = field.findall(inspect.getsource(owner))
            lines = [text for text, name in found if name in keys(cls)]
            if lines:
                print('\n'.join(['', owner.__name__, *lines]))


# ---- batches. Everything random is a function of (stream, seed, step, rank) ----------------------

def random_seed(*words):
    """A seed of 32 bits, as many as CPU generators read: a hash of a stream's name and numbers."""
    return zlib.crc32(' '.join(map(str, words)).encode())


def generator(device, *words):
    """A random generator for a stream and numbers. The streams are: train, fixed (problems of
    n_train), eval, test (the same for every seed); random_seed() also serves weights and noise."""
    return torch.Generator(device).manual_seed(random_seed(*words))


def seed_noise(cfg, step):
    """Seed dropout and random position shifts, which differ between processes."""
    number = random_seed('noise', cfg.seed, step, RANK)
    torch.default_generator.manual_seed(number)            # torch.manual_seed() asks every backend
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def pool_at(cfg, step):
    """(training lengths, range of steps) of a step's pool of problems: 64 steps if problems are
    drawn online, an epoch if they are fixed. Each stage of length_schedule begins a pool."""
    stages = cfg.length_schedule or [(0, math.inf)]
    start, longest = [stage for stage in stages if stage[0] <= step][-1]       # of this stage
    lengths = [n for n in cfg.train_lengths if n <= longest]
    need(lengths, f'length_schedule at step {start} is below all train_lengths: raise it')
    size = cfg.n_train * len(lengths) or cfg.the_task.count(lengths)       # None: drawn online
    steps = 64 if size is None else size // cfg.batch_size
    need(steps, f'the lengths {lengths} have too few problems for batch_size={cfg.batch_size}')
    first = step - (step - start) % steps
    next_stage = min([x for x, _ in stages if x > step], default=math.inf)
    return lengths, range(first, min(first + steps, next_stage))


class Batches:
    """batches(step): the training problems of a step, which follow from cfg.seed and the step.

    A pool is drawn at its first step and kept until its last. Its problems are in random order, so
    that a batch mixes lengths. To limit padding, a batch has rows of the narrower half of the pool
    and rows of the wider half. Each part keeps its shape for a whole pool, as CUDA graphs require.
    """
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.steps = range(0)                              # the steps of the pool in self.parts

    def __call__(self, step):
        """[tokens, targets, tokens, ...] of a step: a pair [b, t] per micro-batch of each part."""
        if step not in self.steps:
            lengths, self.steps = pool_at(self.cfg, step)
            self.parts = self.draw(lengths)
        at, batch = step - self.steps.start, []
        for tokens, targets in self.parts:                 # [steps, rows, width] each
            pieces = min(self.cfg.accumulate, tokens.shape[1])
            for x, y in zip(tokens[at].tensor_split(pieces), targets[at].tensor_split(pieces)):
                batch += x, y
        return batch

    def draw(self, lengths):
        """Draw a pool: [(tokens, targets)] of each part, both [steps, rows of a batch, width]."""
        cfg, B, steps, problems = self.cfg, self.cfg.batch_size, len(self.steps), []
        source = generator(self.device, 'train', cfg.seed, self.steps.start)
        n = cfg.n_train or math.ceil(64 * B / len(lengths))            # problems per length
        for length in lengths:                             # n_train: the same in every pool
            fixed = generator(self.device, 'fixed', cfg.seed, length)
            problems.append(cfg.the_task.pool(n, length, fixed if cfg.n_train else source))
        T = max(x.shape[1] for x, _ in problems)           # problems: [([n, t], [n, t])]
        tokens = torch.cat([F.pad(x, (0, T - x.shape[1]), value=tasks.PAD) for x, _ in problems])
        targets = torch.cat([F.pad(y, (0, T - y.shape[1]), value=-100) for _, y in problems])
        widths, rows = (tokens != tasks.PAD).sum(dim=1).sort(stable=True)      # (N,), N >= steps B
        half = B // 2                                      # rows of a batch from the narrower part
        cut = len(rows) * half // B                        # 0 if a batch has one row
        bounds = [(0, cut, half), (cut, len(rows), B - half)]
        if cut == 0 or widths[cut - 1] > 0.8 * widths[-1]:     # one part costs less despite padding
            bounds = [(0, len(rows), B)]
        parts = []
        for start, end, count in bounds:
            order = torch.randperm(end - start, generator=source, device=self.device)
            order = rows[start:end][order[:steps * count]]     # each problem at most once per pool
            parts.append([x[order, :int(widths[end - 1])].view(steps, count, -1)
                          for x in (tokens, targets)])
        return parts

    def fingerprint(self):
        """A checksum of the first pool, which tells whether the data or the task has changed."""
        self(0)
        return zlib.crc32(b''.join(x.cpu().numpy().tobytes() for part in self.parts for x in part))


def held_out(cfg, split, device):
    """Yield (length, (tokens, targets)) of split eval or test, the same for every encoding."""
    n, task = cfg.n_eval if split == 'eval' else cfg.n_test, cfg.the_task
    lengths = [cfg.eval_lengths] if task.corpus else [[length] for length in cfg.eval_lengths]
    for some in lengths:                                   # a corpus cuts one text at all lengths
        sets = task.held_out(split, n, some, lambda length: generator('cpu', split, length))
        for length, (tokens, targets) in sets.items():
            yield length, (tokens.to(device), targets.to(device))  # [n, T], drawn on the CPU


# ---- a training step -----------------------------------------------------------------------------

def build(cfg, device):
    """(model, optimizer) at the first step of a run."""
    if cfg.kernel == 'triton':
        encodings.kernels()                                # before the optimizer imports Triton
    torch.manual_seed(random_seed('weights', cfg.seed))
    model = Transformer(cfg).to(device, cfg.weights_dtype)         # initialized on the CPU
    if cfg.init_from:
        weights, apart = inherited(cfg)
        model.load_state_dict(weights, strict=False)
        print(f'weights of {cfg.parent}' + ', except ' * bool(apart) + ', '.join(apart))
    on_gpu, groups = device.type == 'cuda', model.optim_groups(cfg.lr, cfg.weight_decay)
    for group in groups:                                   # a CUDA graph reads lr from a tensor
        group['peak'] = group['lr']                        # before warm-up and decay
        dtype = torch.float32 if on_gpu else torch.float64
        group['lr'] = torch.tensor(group['lr'], device=device, dtype=dtype)
    return model, torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), fused=True,
                                    capturable=on_gpu)     # keeps step counts on the GPU


def learning_rate(cfg, step):
    """Linear warm-up to lr, then decay to min_lr at max_steps, or constant lr if decay=none."""
    if step < cfg.warmup_steps:                            # step counts from 0
        return cfg.lr * (step + 1) / cfg.warmup_steps      # from lr / warmup_steps up to lr
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)    # in [0, 1)
    left = {'none': 1.0, 'linear': 1 - done, 'cosine': (1 + math.cos(math.pi * done)) / 2}
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left[cfg.decay]


def set_rates(optimizer, cfg, step):
    """Set the learning rate of each parameter group in place, where a CUDA graph reads it."""
    factor = learning_rate(cfg, step) / cfg.lr             # 1 at the peak
    for group in optimizer.param_groups:
        group['lr'].fill_(factor * group['peak'])


def add_up(tensor, op=dist.ReduceOp.SUM):
    """Sum a tensor over the processes of torchrun, in place. UserError if one of them has ended."""
    try:
        dist.all_reduce(tensor, op)
    except RuntimeError:
        raise UserError('another process of this run ended: restart the run') from None


def update(forward, optimizer, cfg, *batch):
    """Forward, backward, clip, AdamW on a batch of Batches. Return the loss [] before the step: the
    mean over the supervised targets of all micro-batches and processes, plus penalties. The batch
    is a flat sequence of tensors, as a CUDA graph requires: tokens, targets, tokens, ..."""
    params = [p for group in optimizer.param_groups for p in group['params']]
    loss, total = 0, sum((y != -100).sum() for y in batch[1::2]).clamp(min=1)
    for x, y in zip(batch[::2], batch[1::2]):              # micro-batches, [b, t] each
        x, y = x[RANK::WORLD], y[RANK::WORLD]              # all rows, or those of this process
        share = (y != -100).sum(dtype=cfg.weights_dtype) / total   # shares of a step add up to 1
        with precision(cfg, x.device):
            part = share * forward(x, y)[1]                # the model returns (logits, mean loss)
        part.backward()                                    # adds to p.grad
        loss = loss + part.detach()                        # [], without its autograd graph
    if WORLD > 1:                                          # sum over processes
        for tensor in (loss, *(p.grad for p in params if p.grad is not None)):
            add_up(tensor)
    if cfg.grad_clip:
        torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip)          # joint norm of all
    optimizer.step()                                       # AdamW
    encodings.clamp(optimizer)                             # PoPE's delta
    optimizer.zero_grad(set_to_none=False)                 # a CUDA graph adds to the same tensors
    return loss


# ---- CUDA graphs, device and precision -----------------------------------------------------------

class Graph:
    """A function of tensors, captured as a CUDA graph and replayed: one launch, not hundreds. Three
    eager calls come first, because libraries and the optimizer initialize in them; again after the
    shapes of the arguments change. A replay uses the seed that its caller has set."""
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


def wrapped(model, optimizer, cfg, device):
    """update() as a function of a batch: compiled or as a CUDA graph where cfg asks for it."""
    on_gpu, size = device.type == 'cuda', sum(p.numel() for p in model.parameters())
    compiled = on_gpu and size >= 1e7 if cfg.compile is None else cfg.compile
    possible = on_gpu and not compiled and WORLD == 1 and all(
        getattr(part, 'capturable', True) for part in model.modules())
    forward = torch.compile(model, dynamic=False) if compiled else model   # recompiles per shape
    step = partial(update, forward, optimizer, cfg)
    return Graph(step) if cfg.graph or cfg.graph is None and possible else step


def pick_device(cfg):
    """The torch.device for cfg.device."""
    gpus = [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    name = cfg.device.replace('auto', 'cuda' if gpus else 'cpu')
    if name == 'cuda':
        name = 'cuda:' + os.environ.get('LOCAL_RANK', '0')             # torchrun sets it
    need(name in ['cpu', *gpus], f'--device={name} is not available: use cpu or auto')
    need(name != 'cpu' or not cfg.graph, '--graph requires a CUDA device; leave it out')
    if name != 'cpu':
        torch.cuda.set_device(name)                        # for calls that name no device
    work = cfg.batch_size * cfg.train_len * cfg.d_model    # B T C, the size of an activation
    if 'OMP_NUM_THREADS' not in os.environ:                # in small steps, threads mostly wait
        torch.set_num_threads(1 if work <= 2 ** 18 else THREADS)
    torch.set_float32_matmul_precision('high' if cfg.dtype == 'tf32' else 'highest')
    return torch.device(name)


def precision(cfg, device):
    """A context for a forward pass: products are in bfloat16 if cfg.dtype says so."""
    half = cfg.dtype == 'bfloat16'                         # weights stay in float32
    return torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext()


# ---- evaluation ----------------------------------------------------------------------------------

def token_losses(logits, targets):
    """Cross-entropy of every token [B, T], 0 where the target is -100."""
    return F.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100,
                           reduction='none')               # of (B, V, T) and (B, T)


@torch.no_grad()
def evaluate(model, task, sets, autocast=None, greedy=False):
    """{length: scores} under teacher forcing; sets: (length, (tokens, targets)), [n, T] each.

    exact: fraction of the n sequences with every supervised token correct.
    token: fraction of supervised tokens that are correct, over all sequences together.
    last: fraction of sequences whose last supervised token, the end token aside, is correct.
    states: fraction of supervised tokens other than the end token that are correct if the model may
        not answer with the end token; final: of the last such token. For tasks with an end token.
    greedy_states, greedy_final: the same if the model reads its own answers (with greedy=True).
    loss: mean cross-entropy of a token, in nats, for a corpus.
    n: number of sequences; those without a target do not count."""
    scores, training = {}, model.training
    model.eval()                                           # no dropout, no random position shift
    for length, (tokens, targets) in sets:
        x, y = tokens[RANK::WORLD], targets[RANK::WORLD]   # all rows, or those of this process
        if len(x) == 0:                                    # a row that counts nothing
            x, y = tokens[:1], torch.full_like(targets[:1], -100)
        rows = max(1, min(2 ** 13, 2 ** 28 // len(task.vocab)) // x.shape[1])  # of a forward pass
        total = 0
        with autocast or contextlib.nullcontext():
            for part in zip(x.split(rows), y.split(rows)):
                names, sums = tally(model, task, *part, greedy)
                total = total + sums                       # (scores, 2)
        if WORLD > 1:
            add_up(total)
        total = dict(zip(names, total.tolist()))           # waits for the device
        n = int(total['exact'][1])
        need(n, f'{task.name}: no problem of length {length} has a target')
        scores[length] = {name: round(a / b, 6) for name, (a, b) in total.items()} | dict(n=n)
    model.train(training)
    return scores


def tally(model, task, x, y, greedy):
    """Names of scores, and for each [sum over tokens x and targets y [n, T], what to divide by]."""
    logits, asked = model(x)[0], y != -100                 # (n, T, V), (n, T)
    states = asked if task.end is None else asked & (y != task.end)
    last = (torch.arange(x.shape[1], device=x.device) * states).argmax(dim=1, keepdim=True)
    rows = asked.any(dim=1)                                # (n,), sequences with a target
    correct = logits.argmax(dim=-1) == y                   # (n, T); False where the target is -100
    # if every argmax is correct, greedy decoding reads the same prefixes: same exact score
    found = dict(exact=((correct == asked).all(dim=1) & rows, rows), token=(correct, asked),
                 last=(correct.gather(1, last), rows))
    if task.corpus:
        found['loss'] = token_losses(logits, y), asked
    elif task.end is not None:
        correct = likeliest(logits, task.end) == y
        found |= dict(states=(correct & states, states), final=(correct.gather(1, last), rows))
    if greedy and not task.corpus:
        correct = decoded(model, task, x, states).roll(-1, dims=1) == y
        found |= dict(greedy_states=(correct & states, states),
                      greedy_final=(correct.gather(1, last), rows))
    sums = [z.sum(dtype=torch.float64) for pair in found.values() for z in pair]
    return [*found], torch.stack(sums).view(-1, 2)


def decoded(model, task, x, states):
    """Tokens x [n, T] whose states are replaced, one after another, by the model's own answers: the
    most likely token except the end token. states [n, T]: where the next token is a state."""
    x = x.clone()
    for t in states.any(dim=0).nonzero().flatten().tolist():
        logits = model(x[:, :t + 1], total_len=x.shape[1])[0][:, -1]       # (n, V)
        x[:, t + 1] = torch.where(states[:, t], likeliest(logits, task.end), x[:, t + 1])
    return x


def likeliest(logits, end):
    """The most likely tokens [..] for logits [.., V], except the token `end`, if there is one."""
    V = logits.shape[-1]
    tokens = torch.arange(V, device=logits.device)
    return logits.masked_fill(tokens == (V if end is None else end), -math.inf).argmax(dim=-1)


# ---- the files of a run --------------------------------------------------------------------------

# ckpt.pt: {'config': every field of Config, 'step': optimizer steps done, 'model': state_dict,
# 'optimizer': AdamW's averages by the number of a parameter, 'pool': Batches.fingerprint()} and, of
# a finished run, 'scores': {length: scores} and 'test_of': the options that they depend on; of a
# diverged run, 'failed': what became NaN or infinite, and when
RUN_FILES = re.compile(r'(ckpt\.pt|config\.json|log\.jsonl|lengths\.json|eval(_.+=.+)?\.json|'
                       r'probe_[a-z]+\.(json|png))')


def write_file(path, data):
    """Write bytes or text atomically: the file is either the whole old or the whole new one."""
    if RANK:
        return                                             # RANK 0 writes
    part = f'{path}.{os.getpid()}.tmp'                     # a name that nothing else has
    try:
        with open(part, 'wb') as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()                                      # from Python to the operating system
            os.fsync(f.fileno())                           # raises if the disk is full
        os.replace(part, path)                             # atomic
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise UserError(f'cannot write {path}: {error.strerror}') from None


def append_line(path, entry):
    """Add a line of JSON to a file."""
    try:
        with open(os.devnull if RANK else path, 'a') as f:
            f.write(json.dumps(entry, separators=(',', ':')) + '\n')
    except OSError as error:                               # the disk is full
        raise UserError(f'cannot write {path}: {error.strerror}') from None


def save(cfg, checkpoint):
    """Write ckpt.pt, with cfg, and config.json."""
    buffer = io.BytesIO()                                  # in memory, for write_file()
    torch.save(checkpoint | dict(config=asdict(cfg)), buffer)
    write_file(os.path.join(cfg.out_dir, 'ckpt.pt'), buffer.getvalue())
    write_file(os.path.join(cfg.out_dir, 'config.json'), json.dumps(asdict(cfg), indent=1))


def read_checkpoint(folder):
    """The dictionary in a run's ckpt.pt, with defaults for options that its config lacks."""
    path = os.path.join(folder, 'ckpt.pt')
    need(os.path.exists(path), f'no run in {folder}: train it first, or name the folder of a run')
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)   # runs no code
    except Exception as error:                             # torch raises many types
        raise UserError(f'cannot read {path} ({type(error).__name__}): use --overwrite') from None
    need({'pool', 'config'} <= {*checkpoint}, f'older code wrote {path}, and git checkout 1490abb '
         'reads it: use another --out_dir')
    checkpoint['config'] = defaults(Config) | checkpoint['config']
    return checkpoint


def run_files(folder):
    """The files of a run in a folder. Raise UserError if they are of another program."""
    there = [name for name in os.listdir(folder) if RUN_FILES.fullmatch(name)]
    ours = 'ckpt.pt' in there and os.path.exists(os.path.join(folder, '.lock'))
    need(ours or not there, f'{folder} has {", ".join(there)} of another program or of older code: '
         'use another --out_dir')
    return there


def delete_results(folder):
    """Delete the files of a run, except its checkpoint."""
    for name in run_files(folder):
        if name not in ('ckpt.pt', 'config.json') and not RANK:
            os.remove(os.path.join(folder, name))


def find_checkpoint(cfg):
    """The checkpoint of the same run in cfg.out_dir; {} if there is none, or for --overwrite."""
    if cfg.overwrite or not os.path.exists(os.path.join(cfg.out_dir, 'ckpt.pt')):
        return {}
    checkpoint = read_checkpoint(cfg.out_dir)
    unused = set(encodings.OPTIONS)                        # options of other encodings may differ
    for name in cfg.pe.split('+'):
        unused -= encodings.options_of(encodings.ENCODINGS[name]).keys()
    for key, now in asdict(cfg).items():
        saved = checkpoint['config'].get(key)
        need(key in FREE | unused or saved == now, f'the run in {cfg.out_dir} was trained with '
             f'{key}={saved}, not {now}: use another --out_dir, or --overwrite')
    return checkpoint


def load_weights(model, checkpoint, folder):
    """Load the weights of a checkpoint. Raise UserError if they have other names or shapes."""
    try:
        model.load_state_dict(checkpoint['model'])
    except RuntimeError:                                   # an option, pe.py or model.py differs
        raise UserError(f'this model has other parameters than the run in {folder}') from None


def check_run(cfg, checkpoint, folder):
    """Raise UserError if a run diverged, or if it has another vocabulary than cfg."""
    saved, task = checkpoint['config'], cfg.the_task
    need('failed' not in checkpoint, f'the run in {folder} diverged: {checkpoint.get("failed")}')
    trained = tasks.make(saved['task'], saved['data'])
    need(task.vocab == trained.vocab and type(task) is type(trained), f'the run in {folder} was '
         f'trained with task={trained.name}; {task.name} is another task or vocabulary')


def inherited(cfg):
    """{name: weight} of the run cfg.parent for a model of cfg, and the names that only one of the
    two models has. UserError if these are not of an encoding, or if the task is another one."""
    checkpoint = read_checkpoint(cfg.parent)
    check_run(cfg, checkpoint, cfg.parent)
    with torch.device('meta'):
        new = Transformer(cfg).state_dict()
    old = checkpoint['model']
    weights = {name: x for name, x in old.items() if name in new and new[name].shape == x.shape}
    apart = sorted((old.keys() | new.keys()) - weights.keys())
    wrong = [name for name in apart if '.pe.' not in name]
    need(not wrong, f'the run in {cfg.parent} has other weights, such as {wrong[:1]}: use its '
         'sizes, and an encoding with outputs of the same width')
    return weights, apart


def restore(cfg, checkpoint, model, optimizer, pool):
    """Load weights and AdamW's averages, and drop lines of the log beyond the checkpoint."""
    need(checkpoint['pool'] == pool, f'the training problems of the run in {cfg.out_dir} have '
         'changed (its data, tasks.py or the kind of device); use --overwrite')
    load_weights(model, checkpoint, cfg.out_dir)
    optimizer.load_state_dict(optimizer.state_dict() | dict(state=checkpoint['optimizer']))
    log = os.path.join(cfg.out_dir, 'log.jsonl')
    lines = open(log).readlines() if os.path.exists(log) else []
    whole = [line for line in lines if line.endswith('\n')]        # not cut off by SIGKILL
    write_file(log, ''.join(x for x in whole if json.loads(x)['step'] <= checkpoint['step']))


def append_record(cfg, device, scores, **more):
    """Append a finished run to cfg.results, if that is set, in the format of results/tables.py."""
    if not cfg.results:
        return
    config = {}
    for key, default in defaults(Config).items():
        value = getattr(cfg, key)
        if key in ('pe', 'task', 'seed') or key not in NOT_RECORDED and value != default:
            config[key] = as_typed(value) if isinstance(value, list) else value
    metrics = [key for key in next(iter(scores.values()), {}) if key != 'n']
    columns = {key: [round(row[key], 4) for row in scores.values()] for key in metrics}
    sizes = {n: row['n'] for n, row in scores.items() if row['n'] != cfg.n_test}   # SCAN: fewer
    git = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'describe', '--always',
           '--dirty', '--exclude=*']                       # the hash; -dirty if files have changed
    commit = ''
    with contextlib.suppress(OSError):                     # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    hardware = torch.cuda.get_device_name() if device.type == 'cuda' else platform.machine()
    origin = dict(n=sizes, **more, torch=torch.__version__, commit=commit, hardware=hardware)
    append_line(cfg.results, dict(config=config, lengths=as_typed(cfg.eval_lengths), scores=columns)
                | {key: x for key, x in origin.items() if x})


# ---- tables --------------------------------------------------------------------------------------

LABELS = dict(exact='exact match', token='tokens', last='last state', states='states',
              final='final state', greedy_states='states, greedy', greedy_final='final, greedy')


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


def brief(cfg, scores):
    """{length: scores} in one line."""
    if cfg.the_task.corpus:
        return 'perplexity ' + ', '.join(f'{math.exp(min(x["loss"], 700)):.2f} ({n})'
                                         for n, x in scores.items())
    texts = 'exact match {} on training lengths, {} on longer ones; max length >= 95 %: {}'
    return texts.format(*summary(cfg, scores))


def show(cfg, groups):
    """Print {label: {seed: {length: scores}}} as a table: for each label the mean over seeds, then
    each seed. The label '' means cfg.pe alone, of which all metrics are shown."""
    corpus, lengths, rows = cfg.the_task.corpus, cfg.eval_lengths, []
    metrics = LABELS if cfg.greedy else ('exact', 'token', 'last')
    for label, by_seed in groups.items():
        runs = list(by_seed.values())
        scores = {n: {key: sum(run[n][key] for run in runs) / len(runs) for key in row}
                  for n, row in runs[0].items()}           # means over seeds
        if corpus or label:
            rows.append((label or 'perplexity', scores, 'exact'))
        else:
            rows += [(LABELS[key], scores, key) for key in metrics if key in scores[lengths[0]]]
        if len(by_seed) > 1:
            rows += [(f'  seed {seed}', run, 'exact') for seed, run in by_seed.items()]
    what = ('perplexity of the same held-out text in contexts of every length' if corpus else
            f'{scores[lengths[0]]["n"]:.0f} held-out problems per length')
    print(f'\n{cfg.task}' + f' with {cfg.pe}' * ('' in groups) + f', {what}')
    width = max(len(label) for label, _, _ in rows) + 2
    if not corpus:
        return print_strips(cfg, rows, width)
    print(f'{"context":{width}}' + ''.join(f'{n:>9}' for n in lengths))
    for label, scores, _ in rows:
        cells = (f'{math.exp(min(scores[n]["loss"], 700)):>9.3f}' for n in lengths)
        print(f'{label:{width}}' + ''.join(cells))


def print_strips(cfg, rows, width):
    """Print rows (label, {length: scores}, metric): a character per length, then summary()."""
    inside = sum(n <= max(cfg.train_lengths) for n in cfg.eval_lengths)    # up to the last trained
    every = math.ceil(len(cfg.eval_lengths) / 64)          # shows at most 64, the last trained too
    lengths = cfg.eval_lengths[(inside - 1) % every::every]
    inside = math.ceil(inside / every)
    shades = '·▁▂▃▄▅▆▇█'                                   # of scores from 0 to 1
    ticks = ''                                             # numbers that end above their lengths
    for i, n in enumerate(lengths, 1):
        room = i - len(ticks) - (ticks > '')               # one space between numbers
        if (i in (1, inside, len(lengths)) or i % 8 == 0) and len(str(n)) <= room:
            ticks = ticks.ljust(i - len(str(n))) + str(n)
    ticks = ticks.ljust(len(lengths))
    print(f'{"":{width}}{ticks[:inside]} {ticks[inside:]}  training    longer  max length')
    for label, scores, metric in rows:
        strip = ''.join(shades[int(8 * scores[n][metric] + 1e-9)] for n in lengths)        # eighths
        texts = '{:>7}   {:>7}  {:>10}'.format(*summary(cfg, scores, metric))
        print(f'{label:{width}}{strip[:inside]}│{strip[inside:]}   {texts}')
    print(f'\n{len(lengths)} of {len(cfg.eval_lengths)} lengths; · below 12.5 %, █ 100 %; │ ends '
          'the training lengths; max length: at least 95 % up to this length')


# ---- the training loop ---------------------------------------------------------------------------

def train(cfg, device, checkpoint, stop):
    """Train one seed of one configuration, from a checkpoint if there is one, and test it. Return
    what to add to its checkpoint, `scores` or `failed`; None if a signal in `stop` ended it."""
    model, optimizer = build(cfg, device)
    batches = Batches(cfg, device)                         # the same for every encoding
    pool, first = batches.fingerprint(), checkpoint.get('step', 0)
    if checkpoint:
        restore(cfg, checkpoint, model, optimizer, pool)
    print(f'{sum(p.numel() for p in model.parameters()):,} parameters on {device}, seed '
          f'{cfg.seed}, {first} of {cfg.max_steps} steps done')

    def save_at(step):
        save(cfg, dict(step=step, pool=pool, model=model.state_dict(),
                       optimizer=optimizer.state_dict()['state']))
    if first == 0:
        save_at(0)                                         # raises now if it cannot be written
        delete_results(cfg.out_dir)                        # of a run that this one replaces
    take_step = wrapped(model, optimizer, cfg, device)     # update(), a CUDA graph, or compiled
    autocast, began, before = precision(cfg, device), time.time(), first
    bar = tqdm(range(first, cfg.max_steps), f'{cfg.task} {cfg.pe}', cfg.max_steps, initial=first,
               unit='step', leave=False, disable=RANK > 0 or not sys.stderr.isatty())
    for step in bar:
        seed_noise(cfg, step)                              # dropout and random position shifts
        set_rates(optimizer, cfg, step)                    # warm-up, then decay
        loss = take_step(*batches(step))                   # forward, backward, clip, AdamW
        done = step + 1                                    # steps completed
        if WORLD > 1:                                      # all processes stop after one step
            number = torch.tensor(stop[0] if stop else 0)
            add_up(number, dist.ReduceOp.MAX)              # 0, or the number of a signal
            stop += [number.item()] if number else []
        evaluating = done % cfg.eval_interval == 0 or done == cfg.max_steps
        logging = done % cfg.log_interval == 0 or evaluating
        if not (logging or stop):
            continue
        if not all(x.isfinite().all() for x in [loss, *model.parameters()]):
            return dict(failed=f'the loss or a weight was NaN or infinite at step {done}')
        speed = (done - before) / (time.time() - began)    # since the last evaluation
        entry = dict(step=done, loss=loss.item(), lr=learning_rate(cfg, step),
                     steps_per_s=round(speed, 2))
        bar.set_postfix(loss=f'{entry["loss"]:.4f}', refresh=False)
        if evaluating:
            entry['eval'] = evaluate(model, cfg.the_task, held_out(cfg, 'eval', device), autocast)
            began, before = time.time(), done
            tqdm.write(f'step {done:>6}  loss {entry["loss"]:.4f}  {speed:6.1f} steps/s  '
                       f'{brief(cfg, entry["eval"])}')
        if logging:
            append_line(os.path.join(cfg.out_dir, 'log.jsonl'), entry)
        if evaluating or stop:
            save_at(done)
        if stop and done < cfg.max_steps:                  # after the last step, test anyway
            return None
    # on problems that no evaluation used
    return dict(scores=evaluate(model, cfg.the_task, held_out(cfg, 'test', device), autocast,
                                cfg.greedy))


# ---- the program: a run, a sweep, an evaluation --------------------------------------------------

def run(cfg, stop):
    """Train or resume a run. Return its final checkpoint, or None if a signal stopped it."""
    device = pick_device(cfg)
    if cfg.results:
        open(cfg.results, 'a').close()                     # raises now rather than after training
    os.makedirs(cfg.out_dir, exist_ok=True)
    run_files(cfg.out_dir)                                 # raises if the folder is not ours
    with open(os.path.join(cfg.out_dir, '.lock'), 'w') as mine:    # closing it releases the lock
        try:
            if os.name == 'posix' and not RANK:
                import fcntl
                fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)   # raises instead of waiting
        except BlockingIOError:
            raise UserError(f'another process is training in {cfg.out_dir}') from None
        checkpoint = find_checkpoint(cfg)
        test_of = [cfg.n_test, cfg.eval_lengths, cfg.greedy]       # other values: another test
        if 'failed' in checkpoint or checkpoint.get('test_of') == test_of:
            print(f'{cfg.out_dir} was finished earlier; --overwrite trains it again')
        else:
            result = train(cfg, device, checkpoint, stop)
            if result is None:
                return None
            checkpoint = read_checkpoint(cfg.out_dir) | result | dict(test_of=test_of)
            save(cfg, checkpoint)
        scores = checkpoint.get('scores', {})              # none if the run diverged
        write_file(os.path.join(cfg.out_dir, 'lengths.json'), json.dumps(scores))
        append_record(cfg, device, scores, failed=checkpoint.get('failed'))
        return checkpoint


def load(run_dir, cfg=None):
    """(model, config) of a run, on the CPU in evaluation mode. cfg: another configuration for the
    same weights, for example with another encoding. Raise UserError if there is no such model."""
    checkpoint = read_checkpoint(run_dir)
    saved = checkpoint['config']
    cfg = cfg or make_config(saved | dict(out_dir=str(run_dir)))
    check_run(cfg, checkpoint, run_dir)
    cfg.train_len = saved['train_len']                     # vipe, yarn and fire depend on it
    model = Transformer(cfg).to(cfg.weights_dtype)
    load_weights(model, checkpoint, run_dir)
    return model.eval(), cfg


def evaluate_run(cfg):
    """--eval_only: write and show the scores of a run, possibly with another encoding or task."""
    device, saved = pick_device(cfg), read_checkpoint(cfg.out_dir)['config']
    changed = [key for key in keys(Config) if key not in FREE and getattr(cfg, key) != saved[key]]
    for key in changed:
        need(key in EVALUATED, f'--eval_only evaluates a trained run: remove --{key}')
        print(f'the run was trained with {key}={saved[key]}')
    model = load(cfg.out_dir, cfg)[0].to(device)
    scores = evaluate(model, cfg.the_task, held_out(cfg, 'test', device), precision(cfg, device),
                      cfg.greedy)
    names = ['eval', *(slug(f'{key}={getattr(cfg, key)}') for key in changed)]
    path = os.path.join(cfg.out_dir, '_'.join(names) + '.json')
    write_file(path, json.dumps(scores))
    append_record(cfg, device, scores, trained_with={key: saved[key] for key in changed})
    show(cfg, {'': {cfg.seed: scores}})
    print(f'wrote {path}')


def read_points(values):
    """[(label, config)] of a sweep or of one run. A label has the values that vary, no seeds."""
    varied, points = swept(values), []
    for point in itertools.product(*(values[key] for key in varied)):      # (): the one run
        here = values | dict(zip(varied, point))
        if varied:
            name = ','.join(f'{key}={slug(str(here[key]))}' for key in varied)
            here['out_dir'] = os.path.join(values['out_dir'], name)
        label = ' '.join(str(here[key]) for key in varied if key != 'seed')
        points.append((label, make_config(here)))
    need(len({(*cfg.eval_lengths, cfg.the_task.corpus) for _, cfg in points}) == 1,
         'these tasks differ in their eval_lengths or scores, for one table: run them one by one')
    return points


def main(argv):
    """One run, a sweep or an evaluation. Return the exit status; UserError if a run diverged."""
    if {'-h', '--help'} & set(argv):
        return print_help(__doc__, Config)
    if RANK:
        sys.stdout = open(os.devnull, 'w', encoding='utf-8')           # RANK 0 prints
    points = read_points(read_options(argv))
    if WORLD > 1 and not dist.is_initialized():
        dist.init_process_group()                          # gloo for CPUs, NCCL for GPUs
    if points[0][1].eval_only:
        return evaluate_run(points[0][1])
    stop, groups, failed = [], {}, []                      # signals, {label: {seed: scores}}, texts

    def catch(number, frame):                              # the loop saves and stops
        stop.append(number)                                # nothing else: a step may be running
        signal.signal(number, signal.SIG_DFL)              # the same signal again ends the process
    before = {x: signal.signal(x, catch) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        for label, cfg in points:
            if len(points) > 1:
                print(f'--- {cfg.out_dir}')
            result = run(cfg, stop)
            if result is None:
                print('stopped and saved; resume with the same command, without --overwrite')
                return 128 + stop[0]                       # as a shell reports a signal
            if 'failed' in result:
                failed.append(f'{cfg.out_dir}: {result["failed"]}')
                print(failed[-1])
            else:
                groups.setdefault(label, {})[cfg.seed] = result['scores']
    finally:
        for number, handler in before.items():             # for a notebook, which continues
            signal.signal(number, handler)
    if groups:
        show(points[0][1], groups)
    need(not failed, f'{len(failed)} diverged: {"; ".join(failed)}. A lower --lr or a longer '
         '--warmup_steps may help')
    return 0


def run_program(main, *errors):
    """Run main(argv) and exit with its status. Errors that a user can fix (UserError, OSError,
    `errors`) and a lack of memory print one line and exit with 2."""
    sys.stdout.reconfigure(encoding='utf-8', errors='replace')         # for the strips
    if hasattr(signal, 'SIGPIPE'):                         # for train.py ... | head
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError, MemoryError, torch.OutOfMemoryError, *errors) as error:
        says = ' '.join(str(error).split()) or 'not enough memory'     # on one line
    except RuntimeError as error:
        if 'allocate memory' not in str(error):            # PyTorch's words on a CPU
            raise
        says = 'not enough memory: use a smaller batch_size, or fewer and shorter problems'
    print(f'{os.path.basename(sys.argv[0])}: {says}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
    run_program(main)
