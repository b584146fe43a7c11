"""Train any encoding on any task and see at which length it breaks.

    python train.py configs/parity_rope.py                           one run
    python train.py configs/parity_rope.py --pe=nope,rope,alibi      a comma list sweeps: a run each, one table
    python train.py configs/parity_rope.py --resume                  go on where a run was stopped
    python train.py --eval_only --out_dir=out/parity_rope --eval_lengths=1-100
    python train.py --eval_only --out_dir=out/stdlib_pope --prompt="def "
    python train.py --help                                           every key, its default and its meaning

Config files are plain Python assignments, read in the given order; --key=value comes last. A run's folder holds ckpt.pt, config.json,
log.jsonl (a line per logged point), lengths.json ({seed: {length: {exact, token, last, n}}}) and, with matplotlib, lengths.png.
"""
import ast
import contextlib
import datetime
import difflib
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
import statistics
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import pe as encodings
import tasks
from model import ModelConfig, Transformer


@dataclass
class Config(ModelConfig):
    """Every key that a config file or --key=value may set: these, those of model.ModelConfig and of pe.PEConfig."""
    # data
    task: str = 'parity'                  # what to learn: `python tasks.py` lists the tasks; options as in polynomial:p=7
    data: str = ''                        # file or folder that the task reads, if it reads any: `python tasks.py TASK` says which
    train_lengths: list = range(1, 17)    # problem lengths trained on, mixed within a batch
    eval_lengths: list = range(1, 49)     # problem lengths evaluated
    length_schedule: list = ()            # curriculum: [(0, 5), (400, 10)] trains lengths <= 5 until step 400, then <= 10
    n_train: int = 0                      # training problems per length, drawn once, reshuffled every epoch; 0: endless fresh ones
    n_eval: int = 128                     # held-out problems per length in the evaluations during training
    n_test: int = 1024                    # held-out problems per length, other than those, in the final table
    top_evals: int = 0                    # report also every length's mean over its best so many evaluations during training (prism.txt 6.1: 3)
    # optimization: AdamW, linear warm-up, decay
    seeds: list = (0,)                    # a model per seed, all trained together in one batched step
    batch_size: int = 64                  # sequences per step
    max_steps: int = 4000                 # optimizer steps
    lr: float = 1e-3                      # peak learning rate
    min_lr: float = 0.0                   # learning rate at the end of the decay
    warmup_steps: int = 200               # steps of linear warm-up
    decay: str = 'linear'                 # linear | cosine | none
    beta1: float = 0.9                    # AdamW's average of the gradient
    beta2: float = 0.98                   # AdamW's average of its square
    weight_decay: float = 0.01            # on matrices only; 0 makes it Adam
    grad_clip: float = 1.0                # largest norm of the gradient; 0: no clipping
    # running
    out_dir: str = ''                     # the run's folder; empty: out/TASK_PE
    log_interval: int = 50                # steps between lines of log.jsonl
    eval_interval: int = 1000             # steps between evaluations, each followed by a checkpoint
    device: str = 'auto'                  # auto | cpu | cuda | cuda:N
    dtype: str = 'float32'                # float32 | tf32 | bfloat16 (autocast) | float64
    accumulate: int = 1                   # micro-batches that a step's batch is cut into, to save memory
    compile: bool = None                  # torch.compile the model; None: on CUDA from 10 million parameters on
    graph: bool = None                    # replay the training step from a CUDA graph; None: on CUDA, unless compiled or split over GPUs
    resume: bool = False                  # go on from out_dir's checkpoint (a sweep always does)
    eval_only: bool = False               # train nothing: evaluate out_dir's checkpoint at eval_lengths
    prompt: str = ''                      # with eval_only: evaluate nothing, continue this text
    new_tokens: int = 200                 # how many tokens a prompt is continued by, at most
    temperature: float = 0.8              # of the distribution that they are drawn from; 0: always the likeliest token
    benchmark: bool = False               # train nothing: time the training step for the first 1, 2, 4, ... of the seeds together
    results: str = ''                     # append a JSON line about each finished run to this file

    def __post_init__(self):
        for key in ('batch_size', 'max_steps', 'log_interval', 'eval_interval', 'n_eval', 'n_test', 'lr', 'accumulate', 'new_tokens'):
            if getattr(self, key) <= 0:
                raise ValueError(f'{key} must be positive, not {getattr(self, key)}')
        for key in ('n_train', 'min_lr', 'warmup_steps', 'weight_decay', 'grad_clip', 'top_evals', 'temperature'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} must not be negative, it is {getattr(self, key)}')
        for key in ('beta1', 'beta2'):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f'{key} must be in [0, 1), not {getattr(self, key)}')
        for key, known in dict(decay=('linear', 'cosine', 'none'), dtype=tuple(DTYPES)).items():
            if getattr(self, key) not in known:
                raise ValueError(f'{key} must be one of {", ".join(known)}, not {getattr(self, key)!r}')
        for key in ('train_lengths', 'eval_lengths', 'seeds'):
            value, low = list(getattr(self, key)), 0 if key == 'seeds' else 1
            if not value or any(type(x) is not int or not low <= x < 2 ** 28 for x in value):
                raise ValueError(f'{key} must be whole numbers from {low} on, as in 1-16 or 1,2,4; it is {value}')
            setattr(self, key, list(dict.fromkeys(value)) if key == 'seeds' else sorted(set(value)))
        self.check_data()
        schedule = self.length_schedule = [list(stage) if isinstance(stage, (list, tuple)) else stage for stage in self.length_schedule]
        if any(not isinstance(stage, list) or [type(x) for x in stage] != [int, int] for stage in schedule) or \
                schedule and schedule[0][0] != 0 or len({step for step, _ in schedule}) < len(schedule) or schedule != sorted(schedule):
            raise ValueError(f'length_schedule must be pairs (first step, longest length) in order of steps and begin at step 0; it is {schedule}')
        for step in [step for step, _ in schedule] or [0]:
            lengths = lengths_at(self, step)
            if not lengths:
                raise ValueError(f'length_schedule leaves no length of train_lengths at step {step}')
            size = self.n_train * len(lengths) or self.the_task.count(lengths)
            if size and size < self.batch_size:
                raise ValueError(f'there are {size} problems to train on at step {step}, fewer than batch_size={self.batch_size}')
        if self.kernel == 'triton' and self.dtype == 'float64':
            raise ValueError('kernel=triton computes in float32 at most: take kernel=reference with dtype=float64')
        if self.accumulate > self.batch_size:
            raise ValueError(f'accumulate={self.accumulate} cuts batch_size={self.batch_size} into more parts than it has sequences')
        self.vocab_size = len(self.the_task.vocab)
        self.train_len, self.eval_len = self.the_task.width(self.train_lengths), self.the_task.width(self.eval_lengths)
        self.out_dir = self.out_dir or f'out/{slug(self.task)}_{slug(self.pe)}'
        super().__post_init__()
        encodings.build(self)                                     # says what does not fit before anything is written

    @property
    def the_task(self):
        return tasks.make(self.task, self.data)

    def check_data(self):
        """ValueError if the task has not what the run asks of it; lengths that a data set does not have are left out."""
        task, fixed = self.the_task, isinstance(self.the_task, tasks.Pairs) or self.the_task.corpus
        for key, part in (('train_lengths', 'train'), ('eval_lengths', None)):
            lengths = task.existing(getattr(self, key), part)
            if not lengths:
                raise ValueError(f'{self.task} has no problems of the lengths {key}={getattr(self, key)}')
            setattr(self, key, lengths)
        if task.corpus:
            for part in ('val', 'test') if self.eval_only else tasks.PARTS:
                task.of_part(part)
        if fixed and self.n_train or task.corpus and self.top_evals:
            raise ValueError(f'{self.task} has a training set of its own: leave n_train out' if self.n_train else 'top_evals is for exact match, which a corpus has none of')


DTYPES = {'float32': torch.float32, 'tf32': torch.float32, 'bfloat16': torch.float32, 'float64': torch.float64}     # of the weights
DERIVED = ('vocab_size', 'train_len', 'eval_len')                 # set from the task, not by the user
KEYS = {f.name: f for f in fields(Config) if f.name not in DERIVED}
# what a checkpoint's weights depend on (s is 1 in training, whatever vipe_s), and what may differ when a run is resumed
ARCHITECTURE = ['task', 'train_lengths'] + [f.name for f in fields(ModelConfig) if f.name not in (*DERIVED, 'vipe_s', 'kernel', 'prism_alpha_lr')]
FREE = ('out_dir', 'device', 'kernel', 'compile', 'graph', 'accumulate', 'log_interval', 'eval_interval', 'eval_lengths', 'n_eval', 'n_test', 'top_evals',
        'results', 'resume', 'eval_only', 'benchmark', 'prompt', 'new_tokens', 'temperature')


class UserError(Exception):
    """Something that the user can mend: one line, exit code 2."""


def slug(text):
    """Text as part of a file name."""
    return re.sub(r'[^\w.+=,-]', '_', text)


# ---------------------------------------------------------------------------------------------------------------------
# configuration: files and flags -> one Config, or the points of a sweep

def check_key(key, where):
    """UserError, naming the nearest key, if there is no such key."""
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, 1)
        raise UserError(f'{where}: unknown key {key!r}' + (f', did you mean {near[0]!r}?' if near else '; --help lists the keys'))


def coerce(key, value, where):
    """The value as the type of its key: whole numbers for floats, lists for ranges; strings as on the command line."""
    kind = KEYS[key].type
    if isinstance(value, str) and kind is not str:
        text = value.capitalize() if kind is bool else value
        if kind is list:                                          # 1-16 | 1,2,4 | range(1, 17) | [1, 2, 4]
            text = re.sub(r'(?<![\w(])(\d+)-(\d+)', lambda m: f'*range({m[1]}, {int(m[2]) + 1})', text)
        try:
            if kind is list:
                value = eval(text if text[:1] in '[(' or text.startswith('range') else f'[{text}]', {'__builtins__': {}, 'range': range})
            else:
                value = ast.literal_eval(text)
        except Exception:
            pass                                                  # no value of the right type: refused below
    if kind is float and type(value) is int:
        value = float(value)
    if kind is int and type(value) is float and value.is_integer():
        value = int(value)                                        # 1e4 steps
    if kind is list and isinstance(value, (list, tuple, range)):
        value = list(value)
    if type(value) is not kind and not (value is None and KEYS[key].default is None):
        raise UserError(f'{where}: {key} must be {"a list as in 1-16 or 1,2,4" if kind is list else kind.__name__}, not {value!r}')
    return value


class Sweep(list):
    """The values of a key given as a comma list."""


def checked(key, value, where):
    """The value, or the Sweep of values, that a key was given."""
    check_key(key, where)
    if isinstance(value, str) and ',' in value and KEYS[key].type is not list and key not in ('out_dir', 'results', 'data', 'prompt'):
        return Sweep(coerce(key, part.strip(), where) for part in value.split(','))
    return coerce(key, value, where)


def read_file(path, values):
    """The values after a config file has run on top of them; every name that it assigns must be a key."""
    names = dict(values)
    try:
        with open(path) as f:
            exec(compile(f.read(), path, 'exec'), names)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'cannot read config file {path}: {getattr(error, "strerror", None) or "it is not text"}') from None
    except SyntaxError as error:
        raise UserError(f'{path}, line {error.lineno or 1}: {error.msg}') from None
    except Exception as error:
        line = [0, *(frame.lineno for frame in inspect.getinnerframes(error.__traceback__) if frame.filename == path)][-1]
        raise UserError(f'{path}, line {line}: {type(error).__name__}: {error}') from None
    del names['__builtins__']
    return values | {key: value if key in values and value is values[key] else checked(key, value, path) for key, value in names.items()}


def read_config(argv):
    """Files and flags -> the value of every key, a Sweep where a comma list was given."""
    values, flags = {key: f.default for key, f in KEYS.items()}, {}
    files = [arg for arg in argv if not arg.startswith('-')]
    for arg in argv:
        if arg.startswith('-'):
            key, equals, value = arg.lstrip('-').partition('=')
            check_key(key, arg)
            if not equals and KEYS[key].type is not bool:
                raise UserError(f'--{key} needs a value: --{key}=...')
            flags[key] = checked(key, value if equals else True, f'--{key}')
    for path in files:
        values = read_file(path, values)
    values |= flags
    sweeps = any(isinstance(value, Sweep) for value in values.values())
    if values['prompt'] and not values['eval_only']:
        raise UserError('--prompt continues a text with a trained model: add --eval_only and --out_dir=RUN')
    if values['eval_only'] and sweeps:
        raise UserError('--eval_only takes one run: name its folder by --out_dir')
    if (values['eval_only'] or values['resume']) and not sweeps:  # the run's own configuration is the base, flags come on top
        saved = os.path.join(values['out_dir'] or default_out_dir(values), 'config.json')
        if not os.path.exists(saved):
            raise UserError(f'no run to {"evaluate" if values["eval_only"] else "resume"}: {saved} does not exist; name the run by --out_dir')
        values |= {k: v for k, v in read_json(saved).items() if k in KEYS} | {'resume': values['resume'], 'out_dir': os.path.dirname(saved)} | flags
    return values


def default_out_dir(values):
    """out/TASK_PE, without those that a sweep varies."""
    return 'out/' + ('_'.join(slug(values[k]) for k in ('task', 'pe') if not isinstance(values[k], Sweep)) or 'sweep')


def read_json(path):
    """The dictionary in a JSON file of a run."""
    try:
        with open(path) as f:
            value = json.load(f)
    except (OSError, ValueError) as error:
        raise UserError(f'cannot read {path}: {error}') from None
    if not isinstance(value, dict):
        raise UserError(f'cannot read {path}: it is not a run\'s')
    return value


def make_config(values):
    """The Config of these values; what does not fit together is the user's to mend."""
    try:
        return Config(**values)
    except ValueError as error:
        raise UserError(str(error)) from None


def print_help():
    """The keys, as the lines that define them say."""
    print(__doc__)
    for cls in (Config, ModelConfig, encodings.PEConfig):
        for line in inspect.getsource(cls).splitlines():
            if m := re.match(r'    (\w+): \w+ = (.+?) +# (.*)', line):
                if m[1] not in DERIVED:
                    print(f'  --{m[1]}={m[2]:<{max(1, 22 - len(m[1]))}} {m[3]}')
            elif m := re.match(r'    # (.*)', line):
                print(f'\n{m[1]}')
        print()


# ---------------------------------------------------------------------------------------------------------------------
# data

def lengths_at(cfg, step):
    """The problem lengths trained on at a step: train_lengths up to the limit that length_schedule sets."""
    limits = [limit for start, limit in cfg.length_schedule if start <= step]
    return [n for n in cfg.train_lengths if not limits or n <= limits[-1]]


def generator(device, stream, number):
    """A random generator of its own for every stream and number. (The CPU's looks at the lowest 32 bits of its seed only.)"""
    return torch.Generator(device).manual_seed(('train', 'fixed', 'eval', 'test').index(stream) + 1 << 28 | number)


class Batches:
    """Shuffled batches [S, batch_size, T] of mixed lengths, one per seed, rows padded on the right with 0. The data live on the device.

    An epoch is a pool of problems (n_train per length, or fresh ones every time) in random order. It follows from the generators'
    states at its start, which are what a checkpoint keeps.
    """
    def __init__(self, cfg, seeds, task, device):
        self.cfg, self.seeds, self.task, self.device = cfg, seeds, task, device
        self.generators = [generator(device, 'train', seed) for seed in seeds]
        self.seed_axis = torch.arange(len(seeds), device=device)[:, None]               # (S, 1)
        self.window = torch.arange(cfg.batch_size, device=device)
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)                 # `at`, where the device sees it
        self.lengths, self.size, self.at = None, 0, 0
        self.tokens = self.targets = self.order = torch.empty(0, device=device)

    def pool(self, lengths, source):
        """All problems of one seed's epoch: tokens, targets [N, T]."""
        per_length = self.cfg.n_train or math.ceil(64 * self.cfg.batch_size / len(lengths))
        problems = [self.task.pool(per_length, length, source) for length in lengths]
        T = max(tokens.shape[1] for tokens, _ in problems)
        dtype = torch.int16 if self.cfg.vocab_size < 2 ** 15 else torch.int32
        pad = lambda rows, value: torch.nn.functional.pad(rows.to(dtype), (0, T - rows.shape[1]), value=value)
        return torch.cat([pad(x, tasks.PAD) for x, _ in problems]), torch.cat([pad(y, -100) for _, y in problems])

    def begin_epoch(self, lengths):
        self.starts, self.at = [g.get_state() for g in self.generators], 0
        if lengths != self.lengths or not self.cfg.n_train:
            fixed = [generator(self.device, 'fixed', seed) for seed in self.seeds] if self.cfg.n_train else self.generators
            pools = zip(*(self.pool(lengths, source) for source in fixed))
            self.tokens, self.targets = map(keep, (self.tokens, self.targets), map(torch.stack, pools))     # (S, N, T)
        self.lengths, self.size = lengths, self.tokens.shape[1]
        orders = [torch.randperm(self.size, generator=g, device=self.device) for g in self.generators]
        self.order = keep(self.order, torch.stack(orders))                              # (S, N)

    def prepare(self, step):
        """Make the step's batch the one that take() gives: all that the host decides."""
        lengths = lengths_at(self.cfg, step)
        if lengths != self.lengths or self.at + self.cfg.batch_size > self.size:
            self.begin_epoch(lengths)
        self.cursor.fill_(self.at)
        self.at += self.cfg.batch_size

    def take(self):
        """tokens, targets [S, B, T]."""
        rows = self.order[:, self.cursor + self.window]                                 # (S, B)
        return self.tokens[self.seed_axis, rows].long(), self.targets[self.seed_axis, rows].long()

    def state_dict(self):
        return {'starts': self.starts, 'lengths': self.lengths, 'at': self.at}

    def load_state_dict(self, state):
        for g, start in zip(self.generators, state['starts']):
            g.set_state(start)
        self.begin_epoch(state['lengths'])
        self.at = state['at']


def keep(old, new):
    """The new values, in the old tensor if they fit: a CUDA graph reads them from where they were."""
    return old.copy_(new) if old.shape == new.shape else new


def held_out(cfg, task, split, device):
    """{length: (tokens, targets)}, the same for every seed and encoding; split: 'eval' or 'test'. No training stream reaches them."""
    n = cfg.n_eval if split == 'eval' else cfg.n_test
    problems = task.held_out(split, n, cfg.eval_lengths, lambda length: generator('cpu', split, length))
    return {length: tuple(x.to(device) for x in pair) for length, pair in problems.items()}


@torch.no_grad()
def evaluate(model, task, sets, precision=contextlib.nullcontext()):
    """{length: {exact, token, last, n}} under teacher forcing, which for exact match equals greedy decoding.

    exact: share of sequences with every supervised token right; token: share of supervised tokens; last: of final states, the end
    token aside; n: sequences; for a corpus also loss: the mean cross-entropy of a token, in nats.
    """
    training = model.training
    model.eval()
    scores = {}
    for length, (tokens, targets) in sets.items():
        rows, right, loss = max(1, min(2 ** 15, 2 ** 25 // len(task.vocab)) // tokens.shape[1]), [], 0
        for x, y in zip(tokens.split(rows), targets.split(rows)):
            with precision:
                logits = model(x)[0]
            right.append(logits.argmax(dim=-1) == y)
            if task.corpus:
                loss = loss + token_losses(logits, y).sum(dtype=torch.float64)
        right, asked = torch.cat(right), targets != -100                                # (n, T)
        state = asked & (targets != task.end) if task.end is not None else asked
        at = torch.arange(tokens.shape[1], device=tokens.device)
        last = (at * state).argmax(dim=1, keepdim=True)                                 # (n, 1)
        exact = (right | ~asked).all(dim=1)
        scores[length] = torch.stack([exact.double().mean(), (right & asked).sum() / asked.sum(), right.gather(1, last).double().mean(),
                                      *([loss / asked.sum()] if task.corpus else [])])
    model.train(training)
    return {length: dict(zip(('exact', 'token', 'last', 'loss'), map(lambda x: round(x, 6), score.tolist())), n=len(sets[length][0]))
            for length, score in scores.items()}


def token_losses(logits, targets):
    """Cross-entropy of every token [B, T], 0 where none is asked for."""
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100, reduction='none')


# ---------------------------------------------------------------------------------------------------------------------
# files

def write(path, data):
    """Write bytes or text so that the file is either the old one or the new one, whenever the machine stops."""
    data = data.encode() if isinstance(data, str) else data
    try:
        with open(path + '.tmp', 'wb') as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + '.tmp', path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        raise UserError(f'cannot write {path}: {error.strerror}; the last checkpoint is whole') from None


def append(path, text):
    """Add text at the end of a file, in one piece even if several processes do."""
    try:
        with open(path, 'ab', buffering=0) as f:
            f.write(text.encode())
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from None


def read_checkpoint(path):
    """The dictionary in a checkpoint; UserError if it is cut off or not one of ours."""
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        if {'config', 'seeds', 'step'} <= checkpoint.keys() and {'task', 'pe'} <= checkpoint['config'].keys():
            newer = {key: list(f.default) if f.type is list else f.default for key, f in KEYS.items()}          # keys that it does not have yet
            checkpoint['config'] = newer | checkpoint['config']
            return checkpoint
    except FileNotFoundError:
        raise UserError(f'no checkpoint {path}; train the run first, or name it by --out_dir') from None
    except Exception:
        pass                                                                            # cut off, or no checkpoint at all
    raise UserError(f'{path} is no whole checkpoint of this program; delete it and train again')


def check_same(cfg, saved, path, keys):
    """What was trained in one configuration is not to be taken for another's."""
    for key in [*keys, 'vocab_size']:                                                   # the latter: data have changed
        if saved[key] != getattr(cfg, key):
            raise UserError(f'{path} was trained with {key}={saved[key]}, not {getattr(cfg, key)}: give it the same, or another --out_dir')


def weights(checkpoint, seed, path):
    """One seed's model in a checkpoint."""
    entries = checkpoint['seeds']
    if 'model' not in entries.get(seed, {}):
        raise UserError(f'{path} has no model of seed {seed}; it has {", ".join(str(s) for s in entries if "model" in entries[s]) or "none"}')
    return entries[seed]['model']


def first_sound(checkpoint):
    """The first seed that did not fail; the first of all if none is left."""
    return [*(seed for seed, entry in checkpoint['seeds'].items() if 'failed' not in entry), *checkpoint['config']['seeds']][0]


def make_folder(path):
    """Make a folder, if it is not there."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot make the folder {path}: {error.strerror}; choose another --out_dir') from None


def load(run_dir, seed=None):
    """(model, config) of a run, the model in evaluation mode on the CPU; seed: which of its models, the first that did not fail if None."""
    path = os.path.join(run_dir, 'ckpt.pt')
    checkpoint = read_checkpoint(path)
    cfg = make_config({k: v for k, v in checkpoint['config'].items() if k in KEYS})
    check_same(cfg, checkpoint['config'], path, [])
    model = Transformer(cfg).to(DTYPES[cfg.dtype])
    model.load_state_dict(weights(checkpoint, first_sound(checkpoint) if seed is None else seed, path))
    return model.eval(), cfg


# ---------------------------------------------------------------------------------------------------------------------
# training

class Ranks:
    """The processes that work on one run: this is number `rank` of `size`."""
    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    @classmethod
    def of_torchrun(cls):
        """All that torchrun started. The devices are theirs in turn, and what the others than the first print is not shown."""
        if int(os.environ.get('WORLD_SIZE', 1)) == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())
        backend = 'cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo'
        distributed.init_process_group(backend, timeout=datetime.timedelta(days=30))      # torchrun ends us when one of us dies
        if distributed.get_rank():
            sys.stdout = open(os.devnull, 'w')
        return cls(distributed.get_rank(), distributed.get_world_size())

    def to_all(self, part):
        """Every process's part, in order, on all of them."""
        parts = [part] * self.size
        if self.size > 1:
            distributed.all_gather_object(parts, part)
        return parts

    def to_first(self, part):
        """Every process's part, in order, on the first; None on the others."""
        parts = [part] if self.rank == 0 else None
        if self.size > 1:
            parts = [None] * self.size if self.rank == 0 else None
            distributed.gather_object(part, parts)
        return parts


class Stop:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once. torchrun repeats what it gets, and kills after 30 seconds:
    there a second one changes nothing, but torchrun's own end does.
    """
    def __init__(self, parent=None):
        self.signal, self.parent = 0, parent
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, self.ask)

    def ask(self, number, frame):
        self.signal = number
        if self.parent is None:
            signal.signal(number, signal.SIG_DFL)

    def asked(self):
        """The signal, 0 if there was none."""
        if self.parent not in (None, os.getppid()):
            self.signal = self.signal or signal.SIGTERM
        return self.signal


class Diverged(UserError):
    """The loss or a weight is no longer finite."""


def learning_rate(cfg, step):
    """Linear warm-up to lr, then linear or cosine decay to min_lr at max_steps."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    left = {'none': 1.0, 'linear': 1 - done, 'cosine': (1 + math.cos(math.pi * done)) / 2}[cfg.decay]
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


def pick_device(cfg):
    """The torch.device that cfg.device names, if the machine has it; made the current one."""
    if not re.fullmatch(r'auto|cpu|cuda(:\d+)?', cfg.device):
        raise UserError(f'device must be auto, cpu, cuda or cuda:N, not {cfg.device!r}')
    if cfg.device == 'cpu' or cfg.device == 'auto' and not torch.cuda.is_available():
        return torch.device('cpu')
    count = torch.cuda.device_count()
    number = int(cfg.device[5:]) if ':' in cfg.device else torch.cuda.current_device() if count else 0      # the current one: torchrun's processes differ in it
    if number >= count:
        raise UserError(f'--device={cfg.device}: this machine has {count} CUDA devices; take --device=cpu')
    torch.cuda.set_device(number)
    return torch.device('cuda', number)


def check_device(checkpoint, path, device):
    """UserError if a run's random numbers, which CPUs and GPUs draw differently, cannot go on on this device."""
    if checkpoint['batches']['starts'][0].shape != generator(device, 'train', 0).get_state().shape:
        other = 'cuda' if device.type == 'cpu' else 'cpu'
        raise UserError(f'{path} was trained on another kind of device, which draws other random numbers: go on with --device={other}')


def check_parallel(cfg, device, ranks):
    """UserError if the processes, the devices and the run do not go together."""
    seeds, split = len(cfg.seeds), ranks.size > 1 and len(cfg.seeds) == 1
    if cfg.graph and (device.type != 'cuda' or split):
        raise UserError('--graph needs ' + ('a model of its own for every process' if split else 'a CUDA device') + '; leave it out')
    if seeds > 1 and ranks.size > seeds:
        raise UserError(f'{ranks.size} processes are too many for {seeds} seeds: start at most one per seed')
    if split and ranks.size * cfg.accumulate > cfg.batch_size:
        raise UserError(f'{ranks.size} processes with accumulate={cfg.accumulate} cut batch_size={cfg.batch_size} into more parts than it has sequences')
    here = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if split and device.type == 'cuda' and (':' in cfg.device or here > torch.cuda.device_count()):
        raise UserError(f'{here} processes that split a batch need a GPU each and --device=auto; this machine has {torch.cuda.device_count()}')


def precision(cfg, device):
    """Set how matrices are multiplied; the autocast context of the forward pass."""
    torch.set_float32_matmul_precision('high' if cfg.dtype == 'tf32' else 'highest')
    return torch.autocast(device.type, torch.bfloat16) if cfg.dtype == 'bfloat16' else contextlib.nullcontext()


class Seeds:
    """The models of all seeds, trained together. Their parameters, and gradients, are slices of stacked ones, name -> [S, ...], which the
    optimizer holds. Nothing in a step mixes seeds, so each one trains as it would alone.

    Of several processes each has its share of the seeds; a single seed they all have, and its batch is split among them.
    """
    def __init__(self, cfg, task, device, ranks=Ranks()):
        self.cfg, self.device, self.ranks, n = cfg, device, ranks, len(cfg.seeds)
        self.split = n == 1 and ranks.size > 1
        self.share = slice(0, 1) if self.split else slice(n * ranks.rank // ranks.size, n * (ranks.rank + 1) // ranks.size)
        self.models = {}
        for seed in cfg.seeds[self.share]:
            torch.manual_seed(seed)
            self.models[seed] = Transformer(cfg).to(device, DTYPES[cfg.dtype])
        self.first, *_ = models = list(self.models.values())
        self.params, self.buffers = torch.func.stack_module_state(models)
        for p in self.params.values():
            p.grad = torch.zeros_like(p)
        for i, model in enumerate(models):
            for name, p in model.named_parameters():
                p.data, p.grad = self.params[name].data[i], self.params[name].grad[i]
            for name, x in model.named_buffers():
                x.data = self.buffers[name][i]
        compiled = cfg.compile or (cfg.compile is None and device.type == 'cuda' and sum(p.numel() for p in self.first.parameters()) >= 1e7)
        if compiled:
            torch._dynamo.reset()                                                       # after 8 points of a sweep it would compile no more
        fused = lambda f: torch.compile(f, dynamic=False) if compiled else f
        self.forward = [fused(model) for model in models]
        if self.split:
            self.forward = [DistributedDataParallel(self.forward[0], [device] if device.type == 'cuda' else None)]
            torch.manual_seed(cfg.seeds[0] + ranks.rank)                                # dropout of its own
        # on a CPU one pass for all seeds saves calls but not arithmetic, and large steps fall out of the cache
        work = cfg.batch_size * cfg.train_len * cfg.d_model
        self.together = n > 1 and (device.type == 'cuda' or work <= 2 ** 17)
        self.all_losses = fused(torch.func.vmap(self.loss_of, randomness='different'))
        self.optimizer = self.make_optimizer()
        self.batches, self.amp = Batches(cfg, list(self.models), task, device), precision(cfg, device)
        graph = cfg.graph if cfg.graph is not None else device.type == 'cuda' and not compiled and not self.split
        inputs = lambda: (self.batches.tokens, self.batches.targets, self.batches.order)
        self.run = Graph(self.update, inputs) if graph else self.update

    def make_optimizer(self):
        """AdamW on the stacked parameters, in the groups of one model; a tensor holds each group's learning rate, where a CUDA graph finds it."""
        names, on_gpu = {id(p): name for name, p in self.first.named_parameters()}, self.device.type == 'cuda'
        groups = self.first.optim_groups(self.cfg.lr, self.cfg.weight_decay)
        for group in groups:
            group['params'] = [self.params[names[id(p)]] for p in group['params']]
            group['lr'] = torch.tensor(group['lr'], device=self.device, dtype=torch.float32 if on_gpu else torch.float64)
        self.peaks = [group['lr'].item() for group in groups]
        return torch.optim.AdamW(groups, betas=(self.cfg.beta1, self.cfg.beta2), fused=True, capturable=on_gpu)

    def rates(self, number):
        """Set the learning rate of every group for a step: the peaks of the others follow the schedule of lr."""
        share = learning_rate(self.cfg, number) / self.cfg.lr
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group['lr'].fill_(share * peak)

    def step(self, number):
        """Train one step; the losses [S] before it. On CUDA nothing here waits for the device."""
        self.batches.prepare(number)
        self.rates(number)
        return self.run()

    def update(self):
        """The step itself: batch, forward, backward, clipping, AdamW."""
        losses = self.backward(*self.batches.take())
        if self.cfg.grad_clip:
            self.clip(self.cfg.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)                                     # the models' .grad are slices of these
        return losses

    def backward(self, tokens, targets):
        """Add every seed's gradient on its own batch, tokens and targets [S, B, T], to .grad; the losses [S].

        The batch is cut into the process's part and that into `accumulate` micro-batches, each weighted by its share of what is supervised.
        """
        count = lambda y: (y != -100).sum(dim=(1, 2), dtype=DTYPES[self.cfg.dtype])     # (S,)
        total, losses = count(targets), 0
        cut = lambda x: (x.tensor_split(self.ranks.size, dim=1)[self.ranks.rank] if self.split else x).tensor_split(self.cfg.accumulate, dim=1)
        parts = list(zip(cut(tokens), cut(targets)))
        for k, (x, y) in enumerate(parts):
            last = k == len(parts) - 1
            with contextlib.nullcontext() if last or not self.split else self.forward[0].no_sync():
                losses = losses + self.one_pass(x, y, count(y) / total)
        return losses

    def loss_of(self, params, buffers, tokens, targets):
        """The loss of a model with one seed's parameters and buffers on its batch [B, T]."""
        if self.cfg.tie:                                                                # named once in params, used twice
            params = dict(params) | {'head.weight': params['embedding.weight']}
        return torch.func.functional_call(self.first, (params, buffers), (tokens, targets), tie_weights=False)[1]

    def one_pass(self, tokens, targets, share):
        """backward() of one micro-batch; share [S]."""
        if self.together:
            with self.amp:
                losses = share * self.all_losses(self.params, self.buffers, tokens, targets)
            losses.sum().backward()
            return losses.detach()
        losses = []
        for forward, x, y, part in zip(self.forward, tokens, targets, share):
            with self.amp:
                loss = part * forward(x, y)[1]
            (loss * self.ranks.size if self.split else loss).backward()                 # DistributedDataParallel takes the mean
            losses.append(loss.detach())
        return torch.stack(losses)

    def clip(self, largest):
        """Scale each seed's gradient to a norm of at most `largest`."""
        grads = [p.grad for p in self.params.values()]
        norm = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in grads]).norm(dim=0)      # (S,)
        scale = (largest / (norm + 1e-6)).clamp(max=1)
        for g in grads:
            g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))

    def own_losses(self, losses):
        """This process's part [S] of each of losses [steps, seeds]: what gather_losses puts together again."""
        return list(losses.to(self.device, DTYPES[self.cfg.dtype])[:, self.share] * (0 if self.split and self.ranks.rank else 1))

    def gather_losses(self, losses):
        """[{seed: loss}] of all processes, from this one's [S] each."""
        parts = self.ranks.to_all(torch.stack(losses).cpu())                            # (steps, S) each
        rows = sum(parts) if self.split else torch.cat(parts, dim=1)
        return [dict(zip(self.cfg.seeds, row)) for row in rows.tolist()]

    def evaluate(self, seeds, sets):
        """{seed: {length: scores}} of all processes; None for a seed with a weight that is not finite."""
        part = {}
        for seed, model in self.models.items():
            if seed in seeds and not (self.split and self.ranks.rank):
                finite = all(p.isfinite().all() for p in model.parameters())
                part[seed] = evaluate(model, self.batches.task, sets, self.amp) if finite else None
        return {seed: scores for part in self.ranks.to_all(part) for seed, scores in part.items()}

    def state(self):
        """What a process adds to a checkpoint, on the CPU."""
        rng = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(self.device)] if self.device.type == 'cuda' else [])
        if self.split and self.ranks.rank:
            return {'rng': rng}
        models = {seed: {name: x.to('cpu', copy=True) for name, x in model.state_dict().items()} for seed, model in self.models.items()}
        moments = {i: {key: x.cpu() for key, x in state.items()} for i, state in self.optimizer.state_dict()['state'].items()}
        return {'rng': rng, 'models': models, 'moments': moments, 'batches': self.batches.state_dict()}

    def restore(self, checkpoint):
        """Put back what save() wrote, by however many processes."""
        for seed, model in self.models.items():
            if 'model' in checkpoint['seeds'][seed]:                                    # else it failed before its first checkpoint
                model.load_state_dict(checkpoint['seeds'][seed]['model'])
        mine = lambda x: x[self.share] if x.dim() else x
        moments = {i: {key: mine(x) for key, x in state.items()} for i, state in checkpoint['moments'].items()}
        rates = [group['lr'] for group in self.optimizer.param_groups]                  # loading puts copies in their place
        self.optimizer.load_state_dict({'state': moments, 'param_groups': self.optimizer.state_dict()['param_groups']})
        for group, rate in zip(self.optimizer.param_groups, rates):
            group['lr'] = rate
        batches = checkpoint['batches']
        self.batches.load_state_dict(batches | {'starts': batches['starts'][self.share]})
        if len(checkpoint['rng']) != self.ranks.size:                                   # other processes than those that saved
            torch.manual_seed(checkpoint['step'] << 16 | self.ranks.rank)
            return
        cpu, *cuda = checkpoint['rng'][self.ranks.rank]
        torch.set_rng_state(cpu)
        if cuda and self.device.type == 'cuda':
            torch.cuda.set_rng_state(cuda[0], self.device)


class Graph:
    """A function of no arguments, recorded as a CUDA graph and replayed: one launch instead of hundreds.

    The first three calls run as they are, so that the libraries and the optimizer set themselves up; likewise when one of the tensors
    `inputs()`, which the function reads, has been replaced by another.
    """
    def __init__(self, function, inputs):
        self.function, self.inputs, self.where, self.side = function, inputs, None, torch.cuda.Stream()

    def __call__(self):
        where = [(x.data_ptr(), x.shape) for x in self.inputs()]
        if where != self.where:
            self.where, self.calls, self.graph = where, 0, None
        self.calls += 1
        if self.calls <= 3:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                result = self.function()
            current.wait_stream(self.side)
            return result
        if self.graph is None:
            gc.collect()                                                                # a graph that is freed while another is recorded breaks that
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.function()
        self.graph.replay()
        return self.result.clone()


def save(checkpoint, step, seeds, recent, alive):
    """The whole state of the training to disk, in one form however many processes there are; a seed that failed keeps the model that it had."""
    checkpoint['step'] = step
    for seed in alive:
        checkpoint['seeds'][seed]['step'] = step
    states = seeds.ranks.to_first(seeds.state())
    if seeds.ranks.rank:
        return
    parts = [state for state in states if 'models' in state]
    for seed, model in ((seed, model) for part in parts for seed, model in part['models'].items() if seed in alive):
        checkpoint['seeds'][seed]['model'] = model
    every = lambda i, key: [part['moments'][i][key] for part in parts]
    moments = {i: {key: torch.cat(every(i, key)) if x.dim() else x for key, x in state.items()} for i, state in parts[0]['moments'].items()}
    batches = parts[0]['batches'] | {'starts': [start for part in parts for start in part['batches']['starts']]}
    checkpoint.update(moments=moments, batches=batches, rng=[state['rng'] for state in states])
    buffer = io.BytesIO()
    losses = torch.tensor([[*row.values()] for row in recent], dtype=torch.float64).view(-1, len(seeds.cfg.seeds))     # not in the log yet
    torch.save(checkpoint | {'losses': losses}, buffer)
    write(os.path.join(seeds.cfg.out_dir, 'ckpt.pt'), buffer.getvalue())


def drop_failed(entries, alive, finite, step, what):
    """Take the seeds for which finite(seed) is false out of `alive`; Diverged if none is left."""
    for seed in [seed for seed in alive if not finite(seed)]:
        alive.remove(seed)
        kept = f'; its checkpoint of step {entries[seed]["step"]} is kept' if 'step' in entries[seed] else ', before its first checkpoint'
        entries[seed]['failed'] = f'seed {seed}: {what} became NaN or infinite at step {step}{kept}'
        if not alive:
            raise Diverged(entries[seed]['failed'] + '. A lower --lr or a longer --warmup_steps may help')
        tqdm.write(entries[seed]['failed'])


def train(cfg, task, device, checkpoint, stop, ranks):
    """Train all seeds together, from where the checkpoint left them; {seed: {length: scores}} of those that stayed finite, None if stopped."""
    seeds, sets = Seeds(cfg, task, device, ranks), held_out(cfg, task, 'eval', device)
    if checkpoint['step']:
        seeds.restore(checkpoint)
    else:
        checkpoint['seeds'] = {seed: {'evals': []} for seed in cfg.seeds}
    entries, first = checkpoint['seeds'], checkpoint['step']
    alive = [seed for seed in cfg.seeds if 'failed' not in entries[seed]]
    losses = seeds.own_losses(checkpoint.pop('losses', torch.empty(0, len(cfg.seeds))))  # [S] each, since the last line of the log
    if not alive:
        raise Diverged('every seed of this run has failed; train it into another --out_dir with a lower --lr')

    print(f'{sum(p.numel() for p in seeds.first.parameters()):,} parameters on {device}' + (f', {ranks.size} processes' if ranks.size > 1 else ''))
    name = f'{cfg.task} {cfg.pe} ' + (f'seed {cfg.seeds[0]}' if len(entries) == 1 else f'{len(entries)} seeds')
    bar = tqdm(total=cfg.max_steps, initial=first, desc=name, unit='step', disable=None if ranks.rank == 0 else True, leave=False)
    with bar, open(os.path.join(cfg.out_dir, 'log.jsonl') if ranks.rank == 0 else os.devnull, 'a') as log:
        began, stopping, asked_at, ask_at = time.time(), 0, first, first + 1            # began: moves on by what evaluations take
        for step in range(first, cfg.max_steps):
            losses.append(seeds.step(step))                                             # (S,)
            bar.update()
            done = step + 1
            evaluating = done % cfg.eval_interval == 0 or done == cfg.max_steps
            logging = evaluating or done % cfg.log_interval == 0
            if ranks.size == 1 or done == ask_at:                                       # processes agree to stop, about every 2 seconds
                signals, paces = zip(*ranks.to_all((stop.asked(), (time.time() - began) / (done - first))))
                stopping, ask_at = max(signals), done + min(2 * (ask_at - asked_at), max(1, int(2 / max(paces))))
                asked_at = done
            if not (logging or stopping):
                continue
            recent = seeds.gather_losses(losses)                                        # the loop's only synchronization
            for k, row in enumerate(recent):
                drop_failed(entries, alive, lambda seed: math.isfinite(row[seed]), done - len(recent) + k + 1, 'the loss')
            if logging:
                speed = (done - first) / (time.time() - began)
                mean = sum(recent[-1][seed] for seed in alive) / len(alive)
                bar.set_postfix(loss=f'{mean:.4f}')
                rate = seeds.optimizer.param_groups[0]['lr'].item()
                for seed in alive:
                    loss = sum(row[seed] for row in recent) / len(recent)
                    log.write(json.dumps(dict(step=done, seed=seed, loss=loss, lr=rate, steps_per_s=round(speed, 2))) + '\n')
                losses.clear()
            pause = time.time()
            if evaluating or stopping:
                scores = seeds.evaluate(alive, sets if evaluating else {})
                drop_failed(entries, alive, lambda seed: scores[seed] is not None, done, 'a weight')
            if evaluating:
                for seed in alive:
                    entries[seed]['evals'].append({'step': done, 'lengths': scores[seed]})
                    log.write(json.dumps(dict(step=done, seed=seed, eval=scores[seed])) + '\n')
                found = brief(cfg, mean_scores({seed: scores[seed] for seed in alive}))
                tqdm.write(f'step {done:>6}  loss {mean:.4f}  {speed:6.1f} steps/s  {found}')
            if evaluating or stopping:
                log.flush()
                save(checkpoint, done, seeds, [] if logging else recent, alive)
            began += time.time() - pause
            if stopping and done < cfg.max_steps:
                stop.signal = stopping
                return None
    return seeds.evaluate(alive, held_out(cfg, task, 'test', device))


# ---------------------------------------------------------------------------------------------------------------------
# what a run found, as text and figure

def summary(cfg, scores, metric='exact'):
    """Means of {length: score} over the problems of trained and of longer lengths, and the longest length up to which every one is at least 0.95."""
    size = lambda n: scores[n].get('n', 1)
    mean = lambda lengths: sum(size(n) * scores[n][metric] for n in lengths) / sum(map(size, lengths)) if lengths else None
    holds = list(itertools.takewhile(lambda n: scores[n][metric] >= 0.95, sorted(scores)))
    longest = max(cfg.train_lengths)
    return mean([n for n in scores if n in cfg.train_lengths]), mean([n for n in scores if n > longest]), holds[-1] if holds else 0


def percent(x):
    """A share as text; - if there is none."""
    return '-' if x is None else f'{100 * x:.1f} %'


def context_losses(cfg, scores):
    """Of a corpus, {length: score} -> [(length, loss)] of the longest context trained on and the longest one evaluated."""
    lengths = sorted(scores)
    trained = [n for n in lengths if n <= max(cfg.train_lengths)] or lengths
    return [(n, scores[n]['loss']) for n in sorted({trained[-1], lengths[-1]})]


def brief(cfg, scores):
    """summary() as one line."""
    if cfg.the_task.corpus:
        return ', '.join(f'loss {loss:.4f} (perplexity {math.exp(loss):.2f}) in contexts of {n}' for n, loss in context_losses(cfg, scores))
    trained, longer, holds = summary(cfg, scores)
    return f'exact match {percent(trained)} on trained lengths, {percent(longer)} beyond; holds to {holds or "none"}'


def mean_scores(by_seed):
    """The mean over seeds of {seed: {length: scores}}."""
    runs = list(by_seed.values())
    return {n: {key: sum(run[n][key] for run in runs) / len(runs) for key in run0} for n, run0 in runs[0].items()}


def evaluations(cfg, checkpoint):
    """{seed: [{step, lengths: {length: scores}}]} of the evaluations during training that saw all of cfg.eval_lengths, of seeds that did not fail."""
    return {seed: [e for e in entry['evals'] if set(cfg.eval_lengths) <= e['lengths'].keys()]
            for seed, entry in checkpoint['seeds'].items() if 'failed' not in entry}


def best(cfg, checkpoint):
    """(step, {length: score}) of the evaluation during training with the highest mean exact match, or lowest loss, over lengths and seeds. None
    where those evaluations were of the test problems, by which nothing is to be chosen.
    """
    if isinstance(cfg.the_task, tasks.Pairs) and not cfg.the_task.rows['val']:
        return None
    value = lambda score: -score['loss'] if cfg.the_task.corpus else score['exact']
    points = [(evals[0]['step'], mean_scores({i: e['lengths'] for i, e in enumerate(evals)})) for evals in zip(*evaluations(cfg, checkpoint).values())]
    return max(points, key=lambda point: sum(map(value, point[1].values()))) if points else None


def top(cfg, checkpoint):
    """{seed: {length: scores}}: for each length and score the mean of the best cfg.top_evals evaluations during training."""
    mean = lambda evals, n, key: statistics.mean(sorted((e['lengths'][n][key] for e in evals), reverse=True)[:cfg.top_evals])
    return {seed: {n: {key: round(mean(evals, n, key), 6) for key in ('exact', 'token', 'last')} for n in cfg.eval_lengths}
            for seed, evals in evaluations(cfg, checkpoint).items() if evals}


def over_seeds(cfg, by_seed):
    """One line on the spread over seeds."""
    if cfg.the_task.corpus:
        runs = [dict(context_losses(cfg, scores)) for scores in by_seed.values()]
        spread = lambda xs: f'{statistics.mean(xs):.4f} +- {statistics.stdev(xs):.4f}'
        return f'{len(runs)} seeds: ' + ', '.join(f'loss {spread([run[n] for run in runs])} in contexts of {n}' for n in runs[0])
    trained, longer, _ = zip(*(summary(cfg, scores) for scores in by_seed.values()))

    def spread(xs):
        return '-' if None in xs else f'{100 * statistics.mean(xs):.1f} +- {100 * statistics.stdev(xs):.1f} %, best {100 * max(xs):.1f} %'
    return (f'{len(by_seed)} seeds: exact match on trained lengths {spread(trained)}; beyond {spread(longer)}; '
            f'{sum(x >= 0.85 for x in trained if x is not None)} of {len(cfg.seeds)} reach 85 % on trained lengths')


def strips(cfg, rows):
    """The lines of a table: for each (label, scores, metric) a character per length, the trained lengths marked off from longer ones."""
    longest, lengths = max(cfg.train_lengths), sorted(rows[0][1])
    lengths = lengths[::math.ceil(len(lengths) / 64)]
    unicode = (sys.stdout.encoding or '').lower().startswith('utf')
    shades, bar = ('·▁▂▃▄▅▆▇█', '│') if unicode else ('.12345678', '|')
    inside = sum(n <= longest for n in lengths)
    width, ticks = max(len(label) for label, _, _ in rows) + 2, [' '] * len(lengths)
    for i, n in enumerate(lengths):                                                     # a number ends above its own column
        start = max(0, i + 1 - len(str(n)))
        if (i in (0, inside - 1) or i % 8 == 7) and set(ticks[max(0, start - 1):start + len(str(n))]) == {' '}:
            ticks[start:start + len(str(n))] = str(n)
    mark = lambda text, sign: text[:inside] + sign + text[inside:]
    yield ' ' * width + mark(''.join(ticks), ' ') + '   trained    longer  holds to'
    for label, scores, metric in rows:
        trained, longer, holds = summary(cfg, scores, metric)
        strip = mark(''.join(shades[int(8 * scores[n][metric] + 1e-9)] for n in lengths), bar)
        yield f'{label:{width}}{strip}   {percent(trained):>7}   {percent(longer):>7}  {holds or "none":>8}'
    if len(lengths) < len(rows[0][1]):
        yield f'\n(every {math.ceil(len(rows[0][1]) / 64)}th length is shown)'
    yield f'\n{shades[0]} below 12.5 %, {shades[-1]} all right; {bar} ends the lengths trained on; holds to: the last length before one below 95 %'


def perplexities(cfg, rows):
    """The lines of a corpus's table: perplexity, exp(mean loss), by length of the context for each (label, {length: scores}); at most 12 lengths."""
    lengths = sorted(rows[0][1])
    shown = sorted({lengths[round(i * (len(lengths) - 1) / 11)] for i in range(12)}) if len(lengths) > 12 else lengths
    width, longest = max(len(label) for label, _ in rows) + 2, max(cfg.train_lengths)
    mark = lambda cells: ''.join(f'{" |" if i and n > longest >= shown[i - 1] else ""}{cell:>9}' for i, (n, cell) in enumerate(zip(shown, cells)))
    yield f'{"context":{width}}' + mark(shown)
    for label, scores in rows:
        yield f'{label:{width}}' + mark(f'{math.exp(scores[n]["loss"]):.3f}' for n in shown)


def report_corpus(cfg, by_seed, best):
    """report() of a corpus."""
    scores = mean_scores(by_seed)
    rows = [('perplexity', scores), *((f'seed {seed}', run) for seed, run in by_seed.items() if len(by_seed) > 1)]
    rows += [(f'best, step {best[0]}', best[1])] if best else []
    print(f'\n{cfg.task} with {cfg.pe}: the same held-out text in contexts of every length' + (' (| ends the lengths trained on)' if len(scores) > 1 else ''))
    print('\n'.join(perplexities(cfg, rows)))
    print(', '.join(f'{loss:.4f} nats, {loss / math.log(2):.4f} bits and {percent(scores[n]["token"])} right per token in contexts of {n}'
                    for n, loss in context_losses(cfg, scores)))
    size = max(map(len, cfg.the_task.of_part('test')))
    if size < max(cfg.eval_lengths):
        print(f'no held-out document is longer than {size} tokens: longer contexts are cut there')
    if len(by_seed) > 1:
        print(over_seeds(cfg, by_seed))


def report(cfg, by_seed, best, top):
    """Print the final table of one run, beside the best of its evaluations during training, and `top` if there is one."""
    if cfg.the_task.corpus:
        return report_corpus(cfg, by_seed, best)
    scores = mean_scores(by_seed)
    rows = [('exact match', scores, 'exact'), ('tokens', scores, 'token'), ('last state', scores, 'last')]
    if len(by_seed) > 1:
        rows += [(f'exact, seed {seed}', run, 'exact') for seed, run in by_seed.items()]
    if best:
        rows.append((f'best, step {best[0]}', best[1], 'exact'))
    if top:
        rows.append((f'mean of top {cfg.top_evals}', mean_scores(top), 'exact'))
    many = f'{len(by_seed)} seeds' if len(by_seed) > 1 else '1 seed'
    print(f'\n{cfg.task} with {cfg.pe}, {many}, {scores[cfg.eval_lengths[0]]["n"]:.0f} held-out problems per length')
    print('\n'.join(strips(cfg, rows)))
    if len(by_seed) > 1:
        print(over_seeds(cfg, by_seed))
    longest = max(cfg.train_lengths)
    inside, beyond = [n for n in scores if n <= longest], [n for n in scores if n > longest]
    some = lambda lengths, k: sorted({lengths[round(i * (len(lengths) - 1) / max(1, k - 1))] for i in range(k)}) if lengths else []
    columns = some(inside, 4) + some(beyond[:4], 4) + some(beyond[4:], 4)
    print('\nlength      ' + ''.join(f'{n:>7}' for n in columns))
    for label, metric in (('exact match', 'exact'), ('tokens', 'token'), ('last state', 'last')):
        print(f'{label:12}' + ''.join(f'{100 * scores[n][metric]:7.1f}' for n in columns) + '  %')


def look(name):
    """Colour and style that mean an encoding in every figure; nothing for other names."""
    colours = '#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #000000 #8b1a1a #6a3d9a #fa8072 #9acd32 #ff1493 #00b3a4 #8c6d31'.split()
    number = list(encodings.ENCODINGS).index(name) if name in encodings.ENCODINGS else None
    return dict(color=colours[number % 14], ls='--' if number % 2 else '-') if number is not None else {}


def figure(path, cfg, rows, swept):
    """lengths.png: a curve per (label, scores, metric), or a row of colours for each point of a sweep. Says so if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print(f'(pip install matplotlib, and {path} is drawn as well)')
        return
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    lengths, longest = sorted(rows[0][1]), max(cfg.train_lengths)
    corpus = cfg.the_task.corpus
    fig, ax = plt.subplots(figsize=(8, 1.6 + 0.28 * len(rows) if swept and not corpus else 4), layout='constrained')
    if corpus:
        for i, (label, scores, _) in enumerate(rows):
            first = label not in [name for name, *_ in rows[:i]]                        # seeds share a label and a colour
            ax.plot(lengths, [math.exp(scores[n]['loss']) for n in lengths], marker='o', ms=3, label=label if first else None, **look(label))
        ax.axvline(longest, color='crimson', lw=1)
        ax.set(ylabel='perplexity of the same held-out text', yscale='log')
        ax.yaxis.set_minor_formatter('{x:g}')
        ax.yaxis.set_major_formatter('{x:g}')
        fig.legend(loc='outside right upper')                                           # inside it would hide the red line
    elif swept:
        cells = ax.pcolormesh(range(len(lengths) + 1), range(len(rows) + 1), [[100 * s[n][m] for n in lengths] for _, s, m in rows],
                              vmin=0, vmax=100, cmap='viridis', edgecolors='white', linewidth=0.5)
        fig.colorbar(cells, label='exact match (%)')
        ax.axvline(sum(n <= longest for n in lengths), color='crimson', lw=2)
        ax.set_yticks([i + 0.5 for i in range(len(rows))], [label for label, _, _ in rows])
        ticks = [i for i, n in enumerate(lengths) if i == 0 or n % max(1, len(lengths) // 12) == 0]
        ax.set_xticks([i + 0.5 for i in ticks], [lengths[i] for i in ticks])
        ax.invert_yaxis()
    else:
        ax.axvspan(min(cfg.train_lengths) - 0.5, longest + 0.5, color='0.9', label='lengths trained on')
        for (label, scores, metric), style in zip(rows, ('-', '--', ':', '-.')):
            ax.plot(lengths, [100 * scores[n][metric] for n in lengths], style, marker='o', ms=3, label=label)
        ax.set(ylabel='right (%)', ylim=(-3, 103))
        ax.legend()
    ax.set_title(cfg.task if swept else f'{cfg.task} with {cfg.pe}')
    ax.set_xlabel(('length of the context' if corpus else 'problem length') + (f'; trained to {longest} (red line)' if swept or corpus else ''))
    fig.savefig(path, dpi=110)
    plt.close(fig)
    print(f'drew {path}')


# ---------------------------------------------------------------------------------------------------------------------
# running

def keep_log(cfg, checkpoint):
    """Drop the lines of log.jsonl that a resumed run will write again: those after the checkpoint."""
    path = os.path.join(cfg.out_dir, 'log.jsonl')
    lines = []
    if checkpoint['step'] and os.path.exists(path):
        with open(path) as f:
            for line in f:
                with contextlib.suppress(ValueError):                                   # a line cut off by a kill
                    point = json.loads(line)
                    if point['step'] <= checkpoint['step']:
                        lines.append(line)
    write(path, ''.join(lines))


def write_result(cfg, by_seed, checkpoint, command):
    """Append a line about a run that has ended: what the README's numbers are backed by. Seeds that diverged are named and have no scores."""
    of = lambda scores: [loss for _, loss in context_losses(cfg, scores)] if cfg.the_task.corpus else summary(cfg, scores)
    curves = {seed: [[e['step'], *of(e['lengths'])] for e in checkpoint['seeds'][seed]['evals']] for seed in by_seed}
    found = dict(lengths=by_seed, curves=curves) | (dict(top=top(cfg, checkpoint)) if cfg.top_evals else {})
    found |= dict(failed=failures(checkpoint)) if failures(checkpoint) else {}
    append(cfg.results, json.dumps(made_by(cfg, command) | found) + '\n')


def made_by(cfg, command):
    """Configuration, command, versions and machine."""
    return dict(config=asdict(cfg), command=command) | machine(pick_device(cfg))


def machine(device):
    """Versions, with the commit of this program where git knows it, and hardware."""
    versions, cpu = dict(torch=torch.__version__, python=platform.python_version()), platform.machine() + ' CPU'
    for name in ('numpy', 'triton'):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with contextlib.suppress(OSError):
        git = lambda *args: subprocess.run(['git', *args], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True).stdout.strip()
        versions['commit'] = git('rev-parse', '--short', 'HEAD') + ' and changes' * bool(git('status', '--porcelain', '-uno', '--', '*.py', ':!results'))
    with contextlib.suppress(OSError):
        with open('/proc/cpuinfo') as f:                                                # on Linux
            cpu = dict(re.findall(r'(model name)\s*: (.*)', f.read())).get('model name', cpu)
    return versions | dict(hardware=torch.cuda.get_device_name() if device.type == 'cuda' else f'{cpu}, {torch.get_num_threads()} threads')


def untrained(cfg):
    """(model, checkpoint, its path): a model for --eval_only, into which the weights of the run's seeds fit."""
    path = os.path.join(cfg.out_dir, 'ckpt.pt')
    checkpoint = read_checkpoint(path)
    check_same(cfg, checkpoint['config'], path, ARCHITECTURE + ['data'] * cfg.the_task.own_vocab)
    return Transformer(cfg).to(pick_device(cfg), DTYPES[cfg.dtype]), checkpoint, path


def evaluate_run(cfg):
    """--eval_only: {seed: {length: scores}} of a finished run at cfg.eval_lengths, added to its lengths.json; for a corpus, where other lengths and data
    are other text, instead of what its eval.json had.
    """
    device, task, (model, checkpoint, path) = pick_device(cfg), cfg.the_task, untrained(cfg)
    sets, by_seed = held_out(cfg, task, 'test', device), {}
    failed = {seed: checkpoint['seeds'][seed]['failed'] for seed in cfg.seeds if 'failed' in checkpoint['seeds'].get(seed, {})}
    if len(failed) < len(cfg.seeds):                                                    # a failed one is evaluated only if asked for alone
        print(''.join(f'left out: {line}\n' for line in failed.values()), end='')
        cfg.seeds = [seed for seed in cfg.seeds if seed not in failed]
    for seed in cfg.seeds:
        model.load_state_dict(weights(checkpoint, seed, path))
        by_seed[seed] = evaluate(model, task, sets, precision(cfg, device))
    table = os.path.join(cfg.out_dir, 'eval.json' if task.corpus else 'lengths.json')
    known = read_lengths(table) if os.path.exists(table) and not task.corpus else {}
    write(table, json.dumps({seed: dict(sorted({**known.get(seed, {}), **by_seed.get(seed, {})}.items())) for seed in {**known, **by_seed}}))
    return by_seed


def continuation(cfg):
    """cfg.prompt and how the first of the run's seeds goes on: drawn at cfg.temperature, to the end token or cfg.new_tokens."""
    device, task, (model, checkpoint, path) = pick_device(cfg), cfg.the_task, untrained(cfg)
    model.eval().load_state_dict(weights(checkpoint, cfg.seeds[0], path))
    prompt = task.encode(cfg.prompt)[None].to(device)
    if not prompt.numel():
        raise UserError(f'--prompt={cfg.prompt!r} has no token of this task in it')
    torch.manual_seed(cfg.seeds[0])
    with precision(cfg, device):
        return task.decode(model.generate(prompt, cfg.new_tokens, cfg.temperature, task.end)[0].cpu())


def benchmark(cfg, rounds=5):
    """Time the training step for 1, 2, 4, ... seeds together, in rounds that take turns: [{what, seeds, ms, ratio}], medians over the rounds.

    ms: per step of all these seeds; ratio: that over as many seeds trained one after the other.
    """
    device, task, rows = pick_device(cfg), cfg.the_task, []
    first = lambda n, **kw: Seeds(replace(cfg, seeds=cfg.seeds[:n], **kw), task, device)
    runs = {f'{n} together': first(n) for n in (2 ** i for i in range(len(cfg.seeds).bit_length()))}
    if device.type == 'cuda' or cfg.compile:
        runs['1, neither compiled nor in a graph'] = first(1, compile=False, graph=False)

    def seconds(seeds, steps, at):
        if device.type == 'cuda':
            torch.cuda.synchronize()
        start = time.perf_counter()
        for step in range(steps):
            seeds.step(at + step)
        if device.type == 'cuda':
            torch.cuda.synchronize()
        return time.perf_counter() - start
    for seeds in runs.values():
        seconds(seeds, 5 if device.type == 'cuda' else 1, 0)                            # 5: the graph is recorded in the fourth
    steps = {name: math.ceil(0.3 / seconds(seeds, 1, 5)) for name, seeds in runs.items()}
    times = {name: [] for name in runs}
    for _ in tqdm(range(rounds), unit='round', disable=None, leave=False):
        for name, seeds in runs.items():
            times[name].append(seconds(seeds, steps[name], 6) / steps[name])
    for name, seeds in runs.items():
        ratio = statistics.median(t / one for t, one in zip(times[name], times['1 together'])) / len(seeds.models)
        took, tokens = statistics.median(times[name]), len(seeds.models) * cfg.batch_size * cfg.train_len
        rows.append(dict(what=name, seeds=len(seeds.models), ms=round(1e3 * took, 3), ratio=round(ratio, 3), tokens_per_s=round(tokens / took),
                         tflops=round(1e-12 * tokens / took * flops_per_token(cfg, seeds.first), 3)))
    return rows


def flops_per_token(cfg, model):
    """What training on a token takes, forward and backward, as PaLM's model FLOP utilization counts it: 6 N + 12 n_layer d_model T. N leaves out
    the token embedding, unless it is the output matrix as well; T is the length of the sequence.
    """
    N = sum(p.numel() for p in model.parameters()) - (0 if cfg.tie else model.embedding.weight.numel())
    return 6 * N + 12 * cfg.n_layer * cfg.d_model * cfg.train_len


PEAK = {'H200': 989, 'H100': 989, 'A100': 312}                    # TFLOP/s in bfloat16


def show_benchmark(label, rows):
    """Print what benchmark() found."""
    print(f'\n{label}\n{"seeds":<34}{"ms/step":>10}{"steps/s":>10}{"seeds x steps/s":>17}{"over one by one":>17}{"tokens/s":>12}{"TFLOP/s":>9}')
    for row in rows:
        rate = 1e3 / row['ms']
        print(f'{row["what"]:<34}{row["ms"]:10.2f}{rate:10.2f}{row["seeds"] * rate:17.2f}{row["ratio"]:17.2f}{row["tokens_per_s"]:12,}{row["tflops"]:9.3f}')
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ''
    for name, peak in PEAK.items():
        if name in gpu:
            print(f'model FLOP utilization {100 * max(row["tflops"] for row in rows) / peak:.1f} % of the {peak} TFLOP/s of an {name} in bfloat16')


def run(cfg, stop, command, ranks):
    """Train the seeds of one configuration; returns the checkpoint and {seed: {length: scores}}, None instead if it was asked to stop."""
    device, task = pick_device(cfg), cfg.the_task
    check_parallel(cfg, device, ranks)
    path, table = os.path.join(cfg.out_dir, 'ckpt.pt'), os.path.join(cfg.out_dir, 'lengths.json')
    checkpoint = {'config': asdict(cfg), 'seeds': {}, 'step': 0}
    if cfg.resume and os.path.exists(path):
        checkpoint = read_checkpoint(path)
        check_same(cfg, checkpoint['config'], path, [key for key in KEYS if key not in FREE])
        checkpoint['config'] = asdict(cfg)
        check_device(checkpoint, path, device)
    ranks.to_all(None)                                                                  # all have read before the first writes
    if task.corpus:
        held_out(cfg, task, 'test', 'cpu')                                              # fails now if it cannot be read
    if ranks.rank == 0:
        begin_files(cfg, checkpoint, path, table)
    try:
        by_seed = train(cfg, task, device, checkpoint, stop, ranks)
    except Diverged:
        if ranks.rank == 0 and cfg.results:
            write_result(cfg, {}, checkpoint, command)
        raise
    if by_seed and ranks.rank == 0:
        write(table, json.dumps(by_seed))
        if cfg.results:
            write_result(cfg, by_seed, checkpoint, command)
    return checkpoint, by_seed


def begin_files(cfg, checkpoint, path, table):
    """Make a run's folder ready: nothing in it that the checkpoint at hand has not seen."""
    make_folder(cfg.out_dir)
    if cfg.results:
        append(cfg.results, '')                                                         # fails now rather than after the training
    for old in (table,) if checkpoint['step'] else (table, path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(old)
    write(os.path.join(cfg.out_dir, 'config.json'), json.dumps(asdict(cfg), indent=1))
    keep_log(cfg, checkpoint)


def read_lengths(path):
    """{seed: {length: scores}} in a lengths.json."""
    return {int(seed): {int(n): x for n, x in scores.items()} for seed, scores in read_json(path).items()}


def finished(cfg):
    """The checkpoint and {seed: {length: scores}} of a point of a sweep that an earlier call finished with this very configuration, or None twice."""
    path, table = os.path.join(cfg.out_dir, 'ckpt.pt'), os.path.join(cfg.out_dir, 'lengths.json')
    if os.path.exists(table) and os.path.exists(path):
        checkpoint, scores = read_checkpoint(path), read_lengths(table)
        check_same(cfg, checkpoint['config'], path, [key for key in KEYS if key not in FREE])
        known = lambda seed: scores.get(seed, {}).keys()
        has = lambda seed: known(seed) == set(cfg.eval_lengths) if cfg.the_task.corpus else known(seed) >= set(cfg.eval_lengths)
        sound = [seed for seed in cfg.seeds if 'failed' not in checkpoint['seeds'][seed]]
        if checkpoint['step'] == cfg.max_steps and all(map(has, sound)):
            return checkpoint, {seed: {n: scores[seed][n] for n in cfg.eval_lengths} for seed in sound}
    return None, None


def failures(checkpoint):
    """A line about each seed that failed."""
    return [entry['failed'] for entry in checkpoint['seeds'].values() if 'failed' in entry]


def main(argv):
    """The program: one run, a sweep, or an evaluation; returns the exit status."""
    if '--help' in argv or '-h' in argv:
        return print_help()
    values = read_config(argv)
    command = 'python train.py ' + shlex.join(argv)
    swept = [key for key, value in values.items() if isinstance(value, Sweep)]
    values['out_dir'] = values['out_dir'] or default_out_dir(values)
    points = []
    for point in itertools.product(*(values[key] for key in swept)):
        name = ','.join(f'{key}={slug(str(value))}' for key, value in zip(swept, point))
        here = dict(values, **dict(zip(swept, point)))
        if swept:
            here |= {'out_dir': os.path.join(values['out_dir'], name), 'resume': True}
        points.append((' '.join(map(str, point)), make_config(here)))
    first = points[0][1]
    if any((cfg.eval_lengths, cfg.the_task.corpus) != (first.eval_lengths, first.the_task.corpus) for _, cfg in points):
        raise UserError('a sweep makes one table: these tasks differ in what is scored or in the eval_lengths that they have; run them one by one')
    ranks = Ranks.of_torchrun()
    shown = ', '.join(f'{key}={value}' for key, value in values.items())
    print('\n'.join(textwrap.wrap(shown, 120)), end='\n\n')
    if values['eval_only'] or values['benchmark']:
        if ranks.size > 1:
            raise UserError('--eval_only and --benchmark take a single process: leave torchrun out')
        for label, cfg in points:
            if cfg.eval_only:
                print(continuation(cfg)) if cfg.prompt else show(cfg, evaluate_run(cfg))
                continue
            if cfg.results:
                append(cfg.results, '')                                                 # fails now rather than after the timing
            rows = benchmark(cfg)
            show_benchmark(label, rows)
            if cfg.results:
                append(cfg.results, json.dumps(made_by(cfg, command) | dict(steps=rows)) + '\n')
        return None
    stop = Stop(os.getppid() if ranks.size > 1 else None)
    if swept:
        done, failed = sweep(points[ranks.rank::ranks.size], stop, command)             # each process its own points
    else:
        (_, cfg), = points
        checkpoint, done = run(cfg, stop, command, ranks)
        failed = failures(checkpoint)
    if done is None:
        print('stopped and saved; go on with ' + ('the same command' if swept else '--resume'))
        return 128 + stop.signal
    if swept:
        parts = ranks.to_all((done, failed))
        done, failed = {k: v for part, _ in parts for k, v in part.items()}, [line for _, lines in parts for line in lines]
        rows = [(label, mean_scores(done[label]), 'exact') for label, _ in points if label in done]
        if rows and ranks.rank == 0:
            corpus = first.the_task.corpus
            print(f'\n{"perplexity by length of the context" if corpus else "exact match by length"}, ' + ' x '.join(swept))
            print('\n'.join(perplexities(first, [row[:2] for row in rows]) if corpus else strips(first, rows)))
            figure(os.path.join(values['out_dir'], 'lengths.png'), first, rows, swept)
    elif ranks.rank == 0:
        show(cfg, done, best(cfg, checkpoint), top(cfg, checkpoint) if cfg.top_evals else None)
    if failed:
        raise UserError(f'{len(failed)} diverged: ' + '; '.join(failed))


def sweep(points, stop, command):
    """Run each (label, config): {label: {seed: {length: scores}}} and a line about each failure; None instead if it was asked to stop."""
    done, failed = {}, []
    for label, cfg in points:
        print(f'--- {label} ({cfg.out_dir})')
        checkpoint, by_seed = finished(cfg)
        if by_seed:
            print('finished earlier; delete the folder to train it again')
        else:
            try:
                checkpoint, by_seed = run(cfg, stop, command, Ranks())
            except Diverged as error:
                failed.append(f'{label}: {error}')
                continue
        if by_seed is None:
            return None, failed
        failed += [f'{label} {line}' for line in failures(checkpoint)]
        done[label] = by_seed
        print(brief(cfg, mean_scores(by_seed)) + ('\n' + over_seeds(cfg, by_seed) if len(by_seed) > 1 else ''))
    return done, failed


def show(cfg, by_seed, best=None, top=None):
    """The table and the figure of one run."""
    report(cfg, by_seed, best, top)
    scores = mean_scores(by_seed)
    rows = [('exact match', scores, 'exact'), ('tokens', scores, 'token'), ('last state', scores, 'last')]
    if cfg.the_task.corpus:
        rows = [(f'seed {seed}', run, 'loss') for seed, run in by_seed.items()]
    if top:
        rows.append((f'exact match, mean of top {cfg.top_evals}', mean_scores(top), 'exact'))
    figure(os.path.join(cfg.out_dir, 'eval.png' if cfg.eval_only and cfg.the_task.corpus else 'lengths.png'), cfg, rows, swept=False)


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')
    try:
        status = main(sys.argv[1:])
    except BrokenPipeError:                                                             # ... | head
        status = 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError, tasks.DataError) as error:
        if int(os.environ.get('RANK', 0)):                                              # what all of them meet, the first one tells
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f'train.py: {error}', file=sys.stderr)
        status = 2
    except RuntimeError as error:
        if not distributed.is_initialized() or 'gloo' not in str(error):
            raise
        print('train.py: another process has ended, and so does this one', file=sys.stderr)
        status = 2
    if distributed.is_initialized():                                                    # gloo's threads now and then abort a process
        sys.stdout.flush()                                                              # that takes them down
        os._exit(status or 0)
    sys.exit(status)
