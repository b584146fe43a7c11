"""Train any encoding on any task and see at which length it breaks.

    python train.py configs/parity_rope.py                           one run
    python train.py configs/parity_rope.py --pe=nope,rope,alibi      a comma list sweeps: a run each, one table
    python train.py configs/parity_rope.py --resume                  go on where a run was stopped
    python train.py --eval_only --out_dir=out/parity_rope --eval_lengths=1-100
    python train.py --help                                           every key, its default and its meaning

Config files are plain Python assignments, read in the given order; --key=value comes last. A run's folder holds ckpt.pt, config.json,
log.jsonl (a line per logged point), lengths.json ({seed: {length: {exact, token, last, n}}}) and, with matplotlib, lengths.png.
"""
import ast
import contextlib
import difflib
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
import sys
import textwrap
import time
from dataclasses import asdict, dataclass, fields

import torch
from tqdm import tqdm

import pe as encodings
import tasks
from model import ModelConfig, Transformer


@dataclass
class Config(ModelConfig):
    """Every key that a config file or --key=value may set: these, those of model.ModelConfig and of pe.PEConfig."""
    # data
    task: str = 'parity'                  # what to learn: `python tasks.py` lists the tasks; options as in polynomial:p=7
    train_lengths: list = range(1, 17)    # problem lengths trained on, mixed within a batch
    eval_lengths: list = range(1, 49)     # problem lengths evaluated
    length_schedule: list = ()            # curriculum: [(0, 5), (400, 10)] trains lengths <= 5 until step 400, then <= 10
    n_train: int = 0                      # training problems per length, drawn once, reshuffled every epoch; 0: endless fresh ones
    n_eval: int = 128                     # held-out problems per length in the evaluations during training
    n_test: int = 1024                    # held-out problems per length, other than those, in the final table
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
    compile: bool = None                  # torch.compile the model; None: on CUDA from 10 million parameters on
    resume: bool = False                  # go on from out_dir's checkpoint (a sweep always does)
    eval_only: bool = False               # train nothing: evaluate out_dir's checkpoint at eval_lengths
    results: str = ''                     # append a JSON line about each finished run to this file

    def __post_init__(self):
        for key in ('batch_size', 'max_steps', 'log_interval', 'eval_interval', 'n_eval', 'n_test', 'lr'):
            if getattr(self, key) <= 0:
                raise ValueError(f'{key} must be positive, not {getattr(self, key)}')
        for key in ('n_train', 'min_lr', 'warmup_steps', 'weight_decay', 'grad_clip'):
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
        schedule = self.length_schedule = [list(stage) if isinstance(stage, (list, tuple)) else stage for stage in self.length_schedule]
        if any(not isinstance(stage, list) or [type(x) for x in stage] != [int, int] for stage in schedule) or \
                schedule and schedule[0][0] != 0 or schedule != sorted(schedule):
            raise ValueError(f'length_schedule must be pairs (first step, longest length) in order of steps and begin at step 0; it is {schedule}')
        for step in [step for step, _ in schedule] or [0]:
            lengths = lengths_at(self, step)
            if not lengths:
                raise ValueError(f'length_schedule leaves no length of train_lengths at step {step}')
            if self.n_train and self.n_train * len(lengths) < self.batch_size:
                raise ValueError(f'n_train={self.n_train} gives {self.n_train * len(lengths)} problems, fewer than batch_size={self.batch_size}')
        the_task = tasks.make(self.task)
        total = lambda lengths: max(the_task.sample(1, length, torch.Generator())[0].shape[1] for length in (min(lengths), max(lengths)))
        self.vocab_size, self.train_len, self.eval_len = len(the_task.vocab), total(self.train_lengths), total(self.eval_lengths)
        self.out_dir = self.out_dir or f'out/{slug(self.task)}_{slug(self.pe)}'
        super().__post_init__()
        encodings.build(self)                                     # says what does not fit before anything is written


DTYPES = {'float32': torch.float32, 'tf32': torch.float32, 'bfloat16': torch.float32, 'float64': torch.float64}     # of the weights
DERIVED = ('vocab_size', 'train_len', 'eval_len')                 # set from the task, not by the user
KEYS = {f.name: f for f in fields(Config) if f.name not in DERIVED}
# what a checkpoint's weights depend on (s is 1 in training, whatever vipe_s), and what may differ when a run is resumed
ARCHITECTURE = ['task', 'train_lengths'] + [f.name for f in fields(ModelConfig) if f.name not in (*DERIVED, 'vipe_s')]
FREE = ('out_dir', 'device', 'compile', 'log_interval', 'eval_interval', 'eval_lengths', 'n_eval', 'n_test', 'results', 'resume', 'eval_only')


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
        raise UserError(f'{where}: {key} must be {kind.__name__}, not {value!r}')
    return value


class Sweep(list):
    """The values of a key given as a comma list."""


def checked(key, value, where):
    """The value, or the Sweep of values, that a key was given."""
    check_key(key, where)
    if isinstance(value, str) and ',' in value and KEYS[key].type is not list and key not in ('out_dir', 'results'):
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
    def __init__(self, cfg, task, device):
        self.cfg, self.task, self.device = cfg, task, device
        self.generators = [generator(device, 'train', seed) for seed in cfg.seeds]
        self.seed_axis = torch.arange(len(cfg.seeds), device=device)[:, None]           # (S, 1)
        self.lengths, self.size, self.at = None, 0, 0

    def pool(self, lengths, source):
        """All problems of one seed's epoch: tokens, targets [N, T]."""
        per_length = self.cfg.n_train or math.ceil(64 * self.cfg.batch_size / len(lengths))
        problems = [self.task.sample(per_length, length, source) for length in lengths]
        T = max(tokens.shape[1] for tokens, _ in problems)
        dtype = torch.int16 if self.cfg.vocab_size < 2 ** 15 else torch.int32
        pad = lambda rows, value: torch.nn.functional.pad(rows.to(dtype), (0, T - rows.shape[1]), value=value)
        return torch.cat([pad(x, tasks.PAD) for x, _ in problems]), torch.cat([pad(y, -100) for _, y in problems])

    def begin_epoch(self, lengths):
        self.starts, self.at = [g.get_state() for g in self.generators], 0
        if lengths != self.lengths or not self.cfg.n_train:
            sources = [generator(self.device, 'fixed', seed) for seed in self.cfg.seeds] if self.cfg.n_train else self.generators
            self.tokens, self.targets = map(torch.stack, zip(*(self.pool(lengths, source) for source in sources)))       # (S, N, T)
        self.lengths, self.size = lengths, self.tokens.shape[1]
        self.order = torch.stack([torch.randperm(self.size, generator=g, device=self.device) for g in self.generators])  # (S, N)

    def next(self, step):
        lengths = lengths_at(self.cfg, step)
        if lengths != self.lengths or self.at + self.cfg.batch_size > self.size:
            self.begin_epoch(lengths)
        rows = self.order[:, self.at:self.at + self.cfg.batch_size]                     # (S, B)
        self.at += self.cfg.batch_size
        return self.tokens[self.seed_axis, rows].long(), self.targets[self.seed_axis, rows].long()          # (S, B, T)

    def state_dict(self):
        return {'starts': self.starts, 'lengths': self.lengths, 'at': self.at}

    def load_state_dict(self, state):
        for g, start in zip(self.generators, state['starts']):
            g.set_state(start)
        self.begin_epoch(state['lengths'])
        self.at = state['at']


def held_out(cfg, task, split, device):
    """{length: (tokens, targets)}, the same for every seed and encoding; split: 'eval' or 'test'. No training stream reaches them."""
    n = cfg.n_eval if split == 'eval' else cfg.n_test
    return {length: tuple(x.to(device) for x in task.sample(n, length, generator('cpu', split, length))) for length in cfg.eval_lengths}


@torch.no_grad()
def evaluate(model, task, sets, precision=contextlib.nullcontext()):
    """{length: {exact, token, last, n}} under teacher forcing, which for exact match equals greedy decoding.

    exact: share of sequences with every supervised token right; token: share of supervised tokens; last: of final states, the end
    token aside; n: sequences.
    """
    training = model.training
    model.eval()
    scores = {}
    for length, (tokens, targets) in sets.items():
        rows = max(1, 2 ** 15 // tokens.shape[1])
        with precision:
            right = torch.cat([model(part)[0].argmax(dim=-1) for part in tokens.split(rows)]) == targets       # (n, T)
        asked = targets != -100
        state = asked & (targets != task.end) if task.end is not None else asked
        at = torch.arange(tokens.shape[1], device=tokens.device)
        last = (at * state).argmax(dim=1, keepdim=True)                                 # (n, 1)
        exact = (right | ~asked).all(dim=1)
        scores[length] = torch.stack([exact.double().mean(), (right & asked).sum() / asked.sum(), right.gather(1, last).double().mean()])
    model.train(training)
    return {length: dict(zip(('exact', 'token', 'last'), map(lambda x: round(x, 6), score.tolist())), n=len(sets[length][0]))
            for length, score in scores.items()}


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
    """Add text at the end of a file."""
    try:
        with open(path, 'a') as f:
            f.write(text)
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}') from None


def read_checkpoint(path):
    """The dictionary in a checkpoint; UserError if it is cut off or not one of ours."""
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        if {'config', 'seeds', 'step'} <= checkpoint.keys() and set(KEYS) <= checkpoint['config'].keys():
            return checkpoint
    except FileNotFoundError:
        raise UserError(f'no checkpoint {path}; train the run first, or name it by --out_dir') from None
    except Exception:
        pass                                                                            # cut off, or no checkpoint at all
    raise UserError(f'{path} is no whole checkpoint of this program; delete it and train again')


def check_same(cfg, saved, path, keys):
    """What was trained in one configuration is not to be taken for another's."""
    for key in keys:
        if saved[key] != getattr(cfg, key):
            raise UserError(f'{path} was trained with {key}={saved[key]}, not {getattr(cfg, key)}: give it the same, or another --out_dir')


def weights(checkpoint, seed, path):
    """One seed's model in a checkpoint."""
    entries = checkpoint['seeds']
    if 'model' not in entries.get(seed, {}):
        raise UserError(f'{path} has no model of seed {seed}; it has {", ".join(str(s) for s in entries if "model" in entries[s]) or "none"}')
    return entries[seed]['model']


def load(run_dir, seed=None):
    """(model, config) of a run, the model in evaluation mode on the CPU; seed: which of its models, the first if None."""
    path = os.path.join(run_dir, 'ckpt.pt')
    checkpoint = read_checkpoint(path)
    cfg = Config(**{k: v for k, v in checkpoint['config'].items() if k in KEYS})
    model = Transformer(cfg).to(DTYPES[cfg.dtype])
    model.load_state_dict(weights(checkpoint, cfg.seeds[0] if seed is None else seed, path))
    return model.eval(), cfg


# ---------------------------------------------------------------------------------------------------------------------
# training

class Stop:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once."""
    def __init__(self):
        self.signal = None
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, self.ask)

    def ask(self, number, frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)


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
    """The torch.device that cfg.device names, if the machine has it."""
    if cfg.device == 'auto':
        return torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    if not re.fullmatch(r'cpu|cuda(:\d+)?', cfg.device):
        raise UserError(f'device must be auto, cpu, cuda or cuda:N, not {cfg.device!r}')
    device = torch.device(cfg.device)
    if device.type == 'cuda' and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f'--device={cfg.device}: this machine has {torch.cuda.device_count()} CUDA devices; take --device=cpu')
    return device


def precision(cfg, device):
    """Set how matrices are multiplied; the autocast context of the forward pass."""
    torch.set_float32_matmul_precision('high' if cfg.dtype == 'tf32' else 'highest')
    return torch.autocast(device.type, torch.bfloat16) if cfg.dtype == 'bfloat16' else contextlib.nullcontext()


class Seeds:
    """The models of all seeds, trained together. Their parameters, and gradients, are slices of stacked ones, name -> [S, ...], which the
    optimizer holds. Nothing in a step mixes seeds, so each one trains as it would alone.
    """
    def __init__(self, cfg, device):
        self.models = []
        for seed in cfg.seeds:
            torch.manual_seed(seed)
            self.models.append(Transformer(cfg).to(device, DTYPES[cfg.dtype]))
        self.params, self.buffers = torch.func.stack_module_state(self.models)
        for p in self.params.values():
            p.grad = torch.zeros_like(p)
        for i, model in enumerate(self.models):
            for name, p in model.named_parameters():
                p.data, p.grad = self.params[name].data[i], self.params[name].grad[i]
            for name, x in model.named_buffers():
                x.data = self.buffers[name][i]
        first, names = self.models[0], {id(p): name for name, p in self.models[0].named_parameters()}
        self.groups = first.optim_groups(cfg.lr, cfg.weight_decay)
        for group in self.groups:
            group['params'] = [self.params[names[id(p)]] for p in group['params']]
        compiled = cfg.compile or (cfg.compile is None and device.type == 'cuda' and sum(p.numel() for p in first.parameters()) >= 1e7)
        self.forward = [torch.compile(model) if compiled else model for model in self.models]
        # on a CPU one pass for all seeds saves calls but not arithmetic, and large steps fall out of the cache
        work = cfg.batch_size * cfg.train_len * cfg.d_model
        self.together = len(self.models) > 1 and not compiled and (device.type == 'cuda' or work <= 2 ** 17)

    def backward(self, tokens, targets, amp=contextlib.nullcontext()):
        """Add every seed's gradient on its own batch, tokens and targets [S, B, T], to .grad; the losses [S]."""
        if self.together:
            def loss_of(params, buffers, tokens, targets):
                return torch.func.functional_call(self.models[0], (params, buffers), (tokens, targets), tie_weights=False)[1]
            with amp:
                losses = torch.func.vmap(loss_of, randomness='different')(self.params, self.buffers, tokens, targets)
            losses.sum().backward()
            return losses.detach()
        losses = []
        for forward, x, y in zip(self.forward, tokens, targets):
            with amp:
                _, loss = forward(x, y)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def clip(self, largest):
        """Scale each seed's gradient to a norm of at most `largest`."""
        grads = [p.grad for p in self.params.values()]
        norm = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in grads]).norm(dim=0)      # (S,)
        scale = (largest / (norm + 1e-6)).clamp(max=1)
        for g in grads:
            g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))


def drop_failed(cfg, entries, alive, finite, step, what):
    """Take the seeds i for which finite(i) is false out of `alive`; Diverged if none is left."""
    for i in [i for i in alive if not finite(i)]:
        alive.remove(i)
        kept = f'; its checkpoint of step {entries[i]["step"]} is kept' if 'step' in entries[i] else ', before its first checkpoint'
        entries[i]['failed'] = f'seed {cfg.seeds[i]}: {what} became NaN or infinite at step {step}{kept}'
        if not alive:
            raise Diverged(entries[i]['failed'] + '. A lower --lr or a longer --warmup_steps may help')
        tqdm.write(entries[i]['failed'])


def train(cfg, task, device, checkpoint, stop):
    """Train all seeds together, from where the checkpoint left them; {seed: {length: scores}} of those that stayed finite, None if stopped."""
    seeds = Seeds(cfg, device)
    optimizer = torch.optim.AdamW(seeds.groups, betas=(cfg.beta1, cfg.beta2), fused=True)
    batches, sets, amp = Batches(cfg, task, device), held_out(cfg, task, 'eval', device), precision(cfg, device)
    if checkpoint['step']:
        restore(checkpoint, cfg, seeds, optimizer, batches, device)
    else:
        checkpoint['seeds'] = {seed: {'evals': []} for seed in cfg.seeds}
    entries = list(checkpoint['seeds'].values())
    alive = [i for i, entry in enumerate(entries) if 'failed' not in entry]
    losses = list(checkpoint.pop('losses', torch.empty(0)).to(device))                  # [S] each, since the last line of the log

    if not alive:
        raise Diverged('every seed of this run has failed; train it into another --out_dir with a lower --lr')
    print(f'{sum(p.numel() for p in seeds.models[0].parameters()):,} parameters on {device}')
    name = f'{cfg.task} {cfg.pe} ' + (f'seed {cfg.seeds[0]}' if len(entries) == 1 else f'{len(entries)} seeds')
    bar = tqdm(total=cfg.max_steps, initial=checkpoint['step'], desc=name, unit='step', disable=None, leave=False)
    with bar, open(os.path.join(cfg.out_dir, 'log.jsonl'), 'a') as log:
        began, first = time.time(), checkpoint['step']                                  # began: moves on by what evaluations take
        for step in range(first, cfg.max_steps):
            rate = learning_rate(cfg, step)
            for group in optimizer.param_groups:
                group['lr'] = rate
            tokens, targets = batches.next(step)                                        # (S, B, T)
            losses.append(seeds.backward(tokens, targets, amp))                         # (S,)
            if cfg.grad_clip:
                seeds.clip(cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)                                      # the models' .grad are slices of these
            bar.update()

            done = step + 1
            evaluating = done % cfg.eval_interval == 0 or done == cfg.max_steps
            if not (evaluating or stop.signal or done % cfg.log_interval == 0):
                continue
            recent = torch.stack(losses).tolist()                                       # the loop's only synchronization
            for k, row in enumerate(recent):
                drop_failed(cfg, entries, alive, lambda i: math.isfinite(row[i]), done - len(recent) + k + 1, 'the loss')
            mean = sum(recent[-1][i] for i in alive) / len(alive)
            if evaluating or done % cfg.log_interval == 0:
                speed = (done - first) / (time.time() - began)
                bar.set_postfix(loss=f'{mean:.4f}')
                for i in alive:
                    line = dict(step=done, seed=cfg.seeds[i], loss=sum(row[i] for row in recent) / len(recent), lr=rate, steps_per_s=round(speed, 2))
                    log.write(json.dumps(line) + '\n')
                losses.clear()
            pause = time.time()
            if evaluating or stop.signal:
                drop_failed(cfg, entries, alive, lambda i: all(p[i].isfinite().all() for p in seeds.params.values()), done, 'a weight')
            if evaluating:
                for i in alive:
                    entries[i]['evals'].append({'step': done, 'lengths': evaluate(seeds.models[i], task, sets, amp)})
                    log.write(json.dumps(dict(step=done, seed=cfg.seeds[i], eval=entries[i]['evals'][-1]['lengths'])) + '\n')
                scores = mean_scores({i: entries[i]['evals'][-1]['lengths'] for i in alive})
                tqdm.write(f'step {done:>6}  loss {mean:.4f}  {speed:6.1f} steps/s  {brief(cfg, scores)}')
            if evaluating or stop.signal:
                log.flush()
                save(checkpoint, done, cfg, seeds, optimizer, batches, losses, alive, device)
            began += time.time() - pause
            if stop.signal and done < cfg.max_steps:
                return None
    test = held_out(cfg, task, 'test', device)
    return {cfg.seeds[i]: evaluate(seeds.models[i], task, test, amp) for i in alive}


def save(checkpoint, step, cfg, seeds, optimizer, batches, losses, alive, device):
    """The whole state of the training to disk; a seed that failed keeps the model that it had."""
    for i in alive:
        model = {name: x.clone() for name, x in seeds.models[i].state_dict().items()}
        checkpoint['seeds'][cfg.seeds[i]].update(step=step, model=model)
    checkpoint.update(step=step, optimizer=optimizer.state_dict(), batches=batches.state_dict(), rng=torch.get_rng_state())
    if device.type == 'cuda':
        checkpoint['cuda_rng'] = torch.cuda.get_rng_state(device)
    buffer = io.BytesIO()
    torch.save(checkpoint | {'losses': torch.stack(losses) if losses else torch.empty(0)}, buffer)
    write(os.path.join(cfg.out_dir, 'ckpt.pt'), buffer.getvalue())


def restore(checkpoint, cfg, seeds, optimizer, batches, device):
    """Put everything that save() wrote back in place."""
    for seed, model in zip(cfg.seeds, seeds.models):
        if 'model' in checkpoint['seeds'][seed]:                                        # else it failed before its first checkpoint
            model.load_state_dict(checkpoint['seeds'][seed]['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    batches.load_state_dict(checkpoint['batches'])
    torch.set_rng_state(checkpoint['rng'])
    if device.type == 'cuda':
        torch.cuda.set_rng_state(checkpoint['cuda_rng'], device)


# ---------------------------------------------------------------------------------------------------------------------
# what a run found, as text and figure

def summary(cfg, scores, metric='exact'):
    """Means of {length: score} over trained and longer lengths, and the longest length up to which every one is at least 0.95."""
    mean = lambda lengths: sum(scores[n][metric] for n in lengths) / len(lengths) if lengths else None
    holds = list(itertools.takewhile(lambda n: scores[n][metric] >= 0.95, sorted(scores)))
    longest = max(cfg.train_lengths)
    return mean([n for n in scores if n in cfg.train_lengths]), mean([n for n in scores if n > longest]), holds[-1] if holds else 0


def percent(x):
    """A share as text; - if there is none."""
    return '-' if x is None else f'{100 * x:.1f} %'


def brief(cfg, scores):
    """summary() as one line."""
    trained, longer, holds = summary(cfg, scores)
    return f'exact match {percent(trained)} on trained lengths, {percent(longer)} beyond; holds to {holds or "none"}'


def mean_scores(by_seed):
    """The mean over seeds of {seed: {length: scores}}."""
    runs = list(by_seed.values())
    return {n: {key: sum(run[n][key] for run in runs) / len(runs) for key in run0} for n, run0 in runs[0].items()}


def best(cfg, checkpoint):
    """(step, {length: score}) of the evaluation during training with the highest mean exact match, over lengths and seeds."""
    runs = [entry['evals'] for entry in checkpoint['seeds'].values() if 'failed' not in entry]
    points = [(evals[0]['step'], mean_scores({i: e['lengths'] for i, e in enumerate(evals)})) for evals in zip(*runs)]
    return max(points, key=lambda point: sum(x['exact'] for x in point[1].values())) if points else None


def over_seeds(cfg, by_seed):
    """One line on the spread over seeds."""
    trained, longer, _ = zip(*(summary(cfg, scores) for scores in by_seed.values()))

    def spread(xs):
        return '-' if None in xs else f'{100 * statistics.mean(xs):.1f} +- {100 * statistics.stdev(xs):.1f} %, best {100 * max(xs):.1f} %'
    return (f'{len(by_seed)} seeds: exact match on trained lengths {spread(trained)}; beyond {spread(longer)}; '
            f'{sum(x >= 0.85 for x in trained if x is not None)} of {len(by_seed)} reach 85 % on trained lengths')


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


def report(cfg, by_seed, best):
    """Print the final table of one run, beside the best of its evaluations during training."""
    scores = mean_scores(by_seed)
    rows = [('exact match', scores, 'exact'), ('tokens', scores, 'token'), ('last state', scores, 'last')]
    if len(by_seed) > 1:
        rows += [(f'exact, seed {seed}', run, 'exact') for seed, run in by_seed.items()]
    if best:
        rows.append((f'best, step {best[0]}', best[1], 'exact'))
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
    fig, ax = plt.subplots(figsize=(8, 1.6 + 0.28 * len(rows) if swept else 4), layout='constrained')
    if swept:
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
        for (label, scores, metric), style in zip(rows, ('-', '--', ':')):
            ax.plot(lengths, [100 * scores[n][metric] for n in lengths], style, marker='o', ms=3, label=label)
        ax.set(ylabel='right (%)', ylim=(-3, 103))
        ax.legend()
    ax.set_title(cfg.task if swept else f'{cfg.task} with {cfg.pe}')
    ax.set_xlabel('problem length' + (f'; trained to {longest} (red line)' if swept else ''))
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
    """Append what the README's numbers are backed by: configuration, machine, versions, command, curves, accuracy per length."""
    gpu = torch.cuda.get_device_name() if pick_device(cfg).type == 'cuda' else None
    line = dict(config=asdict(cfg), command=command, torch=torch.__version__, python=platform.python_version(),
                hardware=gpu or f'{platform.machine()} CPU, {torch.get_num_threads()} threads', lengths=by_seed,
                curves={seed: [[e['step'], *summary(cfg, e['lengths'])] for e in checkpoint['seeds'][seed]['evals']] for seed in by_seed})
    append(cfg.results, json.dumps(line) + '\n')


def evaluate_run(cfg):
    """--eval_only: {seed: {length: scores}} of a finished run at cfg.eval_lengths, added to its lengths.json."""
    device, path, table = pick_device(cfg), os.path.join(cfg.out_dir, 'ckpt.pt'), os.path.join(cfg.out_dir, 'lengths.json')
    checkpoint, task = read_checkpoint(path), tasks.make(cfg.task)
    check_same(cfg, checkpoint['config'], path, ARCHITECTURE)
    model, sets, by_seed = Transformer(cfg).to(device, DTYPES[cfg.dtype]), held_out(cfg, task, 'test', device), {}
    for seed in cfg.seeds:
        model.load_state_dict(weights(checkpoint, seed, path))
        by_seed[seed] = evaluate(model, task, sets, precision(cfg, device))
    known = read_lengths(table) if os.path.exists(table) else {}
    write(table, json.dumps({seed: dict(sorted({**known.get(seed, {}), **by_seed.get(seed, {})}.items())) for seed in {**known, **by_seed}}))
    return by_seed


def run(cfg, stop, command):
    """Train the seeds of one configuration; returns the checkpoint and {seed: {length: scores}}, None instead if it was asked to stop."""
    device, task = pick_device(cfg), tasks.make(cfg.task)
    path, table = os.path.join(cfg.out_dir, 'ckpt.pt'), os.path.join(cfg.out_dir, 'lengths.json')
    checkpoint = {'config': asdict(cfg), 'seeds': {}, 'step': 0}
    if cfg.resume and os.path.exists(path):
        checkpoint = read_checkpoint(path)
        check_same(cfg, checkpoint['config'], path, [key for key in KEYS if key not in FREE])
        checkpoint['config'] = asdict(cfg)
    try:
        os.makedirs(cfg.out_dir, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot make the folder {cfg.out_dir}: {error.strerror}; choose another --out_dir') from None
    if cfg.results:
        append(cfg.results, '')                                                         # fails now rather than after the training
    for old in (table,) if checkpoint['step'] else (table, path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(old)
    write(os.path.join(cfg.out_dir, 'config.json'), json.dumps(asdict(cfg), indent=1))
    keep_log(cfg, checkpoint)
    by_seed = train(cfg, task, device, checkpoint, stop)
    if by_seed:
        write(table, json.dumps(by_seed))
        if cfg.results:
            write_result(cfg, by_seed, checkpoint, command)
    return checkpoint, by_seed


def read_lengths(path):
    """{seed: {length: scores}} in a lengths.json."""
    return {int(seed): {int(n): x for n, x in scores.items()} for seed, scores in read_json(path).items()}


def finished(cfg):
    """{seed: {length: scores}} of a point of a sweep that an earlier call finished with this very configuration, or None."""
    path, table = os.path.join(cfg.out_dir, 'ckpt.pt'), os.path.join(cfg.out_dir, 'lengths.json')
    if os.path.exists(table) and os.path.exists(path):
        checkpoint, scores = read_checkpoint(path), read_lengths(table)
        check_same(cfg, checkpoint['config'], path, [key for key in KEYS if key not in FREE])
        if checkpoint['step'] == cfg.max_steps and all(set(cfg.eval_lengths) <= run.keys() for run in scores.values()):
            return {seed: {n: run[n] for n in cfg.eval_lengths} for seed, run in scores.items()}


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
    shown = ', '.join(f'{key}={value}' for key, value in values.items())
    print('\n'.join(textwrap.wrap(shown, 120)), end='\n\n')
    if values['eval_only']:
        (_, cfg), = points
        return show(cfg, evaluate_run(cfg), None)
    stop, rows, failed = Stop(), [], []
    for label, cfg in points:
        if swept:
            print(f'--- {label} ({cfg.out_dir})')
        checkpoint, by_seed = None, finished(cfg) if swept else None
        if by_seed:
            print('finished earlier; delete the folder to train it again')
        else:
            try:
                checkpoint, by_seed = run(cfg, stop, command)
            except Diverged as error:
                if not swept:
                    raise
                failed.append(f'{label}: {error}')
                continue
            failed += [f'{label} {entry["failed"]}'.strip() for entry in checkpoint['seeds'].values() if 'failed' in entry]
        if by_seed is None:
            print(f'stopped at step {checkpoint["step"]} and saved; go on with ' + ('the same command' if swept else '--resume'))
            return 128 + stop.signal
        if swept:
            rows.append((label, mean_scores(by_seed), 'exact'))
            print(brief(cfg, rows[-1][1]) + ('\n' + over_seeds(cfg, by_seed) if len(by_seed) > 1 else ''))
        else:
            show(cfg, by_seed, best(cfg, checkpoint))
    if rows:
        print('\nexact match by length, ' + ' x '.join(swept))
        print('\n'.join(strips(cfg, rows)))
        figure(os.path.join(values['out_dir'], 'lengths.png'), cfg, rows, swept)
    if failed:
        raise UserError(f'{len(failed)} diverged: ' + '; '.join(failed))


def show(cfg, by_seed, best):
    """The table and the figure of one run."""
    report(cfg, by_seed, best)
    scores = mean_scores(by_seed)
    rows = [('exact match', scores, 'exact'), ('tokens', scores, 'token'), ('last state', scores, 'last')]
    figure(os.path.join(cfg.out_dir, 'lengths.png'), cfg, rows, swept=False)


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:                                                             # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        print(f'train.py: {error}', file=sys.stderr)
        sys.exit(2)
