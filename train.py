"""Train any encoding on any task and see at which length it breaks.

    python train.py configs/parity_rope.py                           one run
    python train.py configs/parity_rope.py --pe=nope,rope,alibi      a sweep: a run each, one table
    python train.py configs/parity_rope.py --resume                  go on where a run was stopped
    python train.py --eval_only --out_dir=out/parity_rope --eval_lengths=1-100
    python train.py --eval_only --out_dir=out/stdlib_pope --prompt="def "
    python train.py --help                                           every key and its meaning

Config files are plain Python assignments, read in the given order; --key=value comes last. A run's
folder holds ckpt.pt, config.json, log.jsonl (a line per logged point), lengths.json ({seed:
{length: {exact, token, last, n}}}) and, with matplotlib, lengths.png.

In this file, top to bottom: the keys, the batches, a training step (Trainer), evaluation, the
training loop (train), and the program around it. engine/ holds what a reader may skip.
"""
import contextlib
import json
import math
import os
import shlex
import time
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

import pe as encodings
import tasks
from engine import bench, checkpoint, config, report, runs, seeds
from engine.config import UserError
from model import ModelConfig, Transformer

# --------------------------------------------------------------------------------------------------
# the keys

@dataclass
class Config(ModelConfig):
    """Every key that a config file or --key=value may set, in addition to model.ModelConfig's."""
    # data
    task: str = 'parity'           # what to learn, with its options, as in polynomial:p=7
    data: str = ''                 # file or folder, for a task that reads one
    train_lengths: list = range(1, 17)  # problem lengths trained on, mixed within a batch
    eval_lengths: list = range(1, 49)   # problem lengths evaluated
    length_schedule: list = ()     # [(0, 5), (400, 10)]: lengths <= 5 until step 400, then <= 10
    n_train: int = 0               # training problems per length, drawn once; 0: endless fresh ones
    n_eval: int = 128              # validation problems per length, seen during training
    n_test: int = 1024             # test problems per length, from a random stream of their own
    # optimization: AdamW, linear warm-up, decay
    seeds: list = (0,)             # a model per seed, all trained together
    batch_size: int = 64           # sequences per step
    max_steps: int = 4000          # optimizer steps
    lr: float = 1e-3               # peak learning rate
    min_lr: float = 0.0            # learning rate at the end of the decay
    warmup_steps: int = 200        # steps of linear warm-up
    decay: Literal['linear', 'cosine', 'none'] = 'linear'  # shape of the decay
    beta1: float = 0.9             # AdamW's decay rate for the mean gradient
    beta2: float = 0.98            # AdamW's decay rate for the mean squared gradient
    weight_decay: float = 0.01     # on matrices only; 0: plain Adam
    grad_clip: float = 1.0         # largest norm of the gradient; 0: no clipping
    # decay of the weights' exponential moving average, evaluated and saved in their place; 0: none
    ema: float = 0.0
    # running
    out_dir: str = ''              # the run's folder; empty: out/TASK_PE
    log_interval: int = 50         # steps between lines of log.jsonl
    eval_interval: int = 1000      # steps between evaluations, each followed by a checkpoint
    device: str = 'auto'           # auto | cpu | cuda | cuda:N
    dtype: Literal['float32', 'tf32', 'bfloat16', 'float64'] = 'float32'  # of matrix products
    accumulate: int = 1            # micro-batches that a batch is cut into, to save memory
    compile: bool = None           # torch.compile; None: on CUDA from 10 million parameters on
    graph: bool = None             # replay a step from a CUDA graph; None: on CUDA, if not compiled
    resume: bool = False           # go on from out_dir's checkpoint, with the config of that run
    eval_only: bool = False        # do not train: evaluate out_dir's checkpoint at eval_lengths
    prompt: str = ''               # with eval_only: continue this text instead of evaluating
    new_tokens: int = 200          # largest number of tokens that continue a prompt
    temperature: float = 0.8       # sampling temperature for a prompt; 0: the likeliest token
    benchmark: bool = False        # do not train: time a step of the first 1, 2, 4, ... seeds
    results: str = ''              # append a JSON line about each finished run to this file

    DERIVED = ('vocab_size', 'digits', 'train_len', 'eval_len')    # the task sets these

    def __post_init__(self):
        super().__post_init__()
        config.check_name('task', self.task.partition(':')[0], tasks.known())
        self.check_numbers()
        self.check_lengths()
        self.check_task()
        self.check_schedule()
        if self.kernel == 'triton' and self.dtype == 'float64':
            raise ValueError('kernel=triton computes in float32: use kernel=reference for float64')
        if self.accumulate > self.batch_size:
            raise ValueError(f'accumulate={self.accumulate} is larger than '
                             f'batch_size={self.batch_size}')
        task = self.the_task
        if task.vocab[tasks.PAD] != '<pad>':
            raise ValueError(f"the vocab of {self.task} must begin with '<pad>', for token 0 pads "
                             'short problems')
        self.vocab_size = len(task.vocab)
        numbers = [i for i, word in enumerate(task.vocab) if word.isdecimal()]
        is_written_in_digits = all(len(task.vocab[i]) == 1 for i in numbers)
        self.digits = numbers if is_written_in_digits else []
        if self.positions == 'coupled' and not task.couples:
            raise ValueError('positions=coupled wants numbers written lowest digit first, as in '
                             f'--task=addition:reversed=1, not {self.task}')
        self.train_len = task.width(self.train_lengths)
        self.eval_len = task.width(self.eval_lengths)
        self.out_dir = self.out_dir or runs.default_out_dir(vars(self))
        encodings.build(self)                              # ValueError if it does not fit

    @property
    def the_task(self):
        return tasks.make(self.task, self.data)

    def check_numbers(self):
        """ValueError if a number is out of range."""
        encodings.check_positive(self, 'batch_size', 'max_steps', 'log_interval', 'eval_interval',
                                 'n_eval', 'n_test', 'lr', 'accumulate', 'new_tokens')
        encodings.check_positive(self, 'n_train', 'min_lr', 'warmup_steps', 'weight_decay',
                                 'grad_clip', 'temperature', zero=True)
        for key in ('beta1', 'beta2', 'ema'):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f'{key} must be in [0, 1), not {getattr(self, key)}')
        if self.min_lr > self.lr:
            raise ValueError(f'min_lr={self.min_lr} is above lr={self.lr}: lower it')

    def check_lengths(self):
        """ValueError if lengths or seeds are not whole numbers in range; drop repeats."""
        for key, low in (('train_lengths', 1), ('eval_lengths', 1), ('seeds', 0)):
            value = list(getattr(self, key))
            if not value or any(type(x) is not int or not low <= x < 2 ** 28 for x in value):
                raise ValueError(f'{key} must be whole numbers from {low} on, as in 1-16 or 1,2,4; '
                                 f'it is {value}')
            setattr(self, key, list(dict.fromkeys(value)))

    def check_task(self):
        """ValueError if the task does not fit the keys; drop the lengths that a data set lacks."""
        task = self.the_task
        for key, part in (('train_lengths', 'train'), ('eval_lengths', None)):
            lengths = task.existing(sorted(getattr(self, key)), part)
            if not lengths:
                raise ValueError(f'{self.task} has no problems of the lengths '
                                 f'{key}={getattr(self, key)}')
            setattr(self, key, lengths)
        if task.corpus:
            for part in ('val', 'test') if self.eval_only else tasks.PARTS:
                task.of_part(part)                         # says now what is missing
        if not self.causal and not (isinstance(task, tasks.Classification)
                                    and len(self.train_lengths) == 1):
            raise ValueError('causal=False needs an answer of one class (distance, distance_sum, '
                             'trigger_count) and one length in train_lengths, for padding would '
                             'be seen')
        if task.fixed and self.n_train:
            raise ValueError(f'{self.task} has a training set of its own: leave n_train out')

    def check_schedule(self):
        """ValueError if length_schedule is malformed or leaves too few problems at some step."""
        stages = [list(x) if isinstance(x, (list, tuple)) else [x] for x in self.length_schedule]
        self.length_schedule = stages
        steps = [stage[0] for stage in stages]
        if any([type(x) for x in stage] != [int, int] for stage in stages) \
                or steps and (steps[0] != 0 or steps != sorted(set(steps))):
            raise ValueError('length_schedule must be pairs (first step, longest length) in order '
                             f'of steps and begin at step 0; it is {stages}')
        for step in steps or [0]:
            lengths = lengths_at(self, step)
            if not lengths:
                raise ValueError('length_schedule leaves no length of train_lengths '
                                 f'at step {step}')
            size = self.n_train * len(lengths) or self.the_task.count(lengths)
            if size and size < self.batch_size:
                raise ValueError(f'there are {size} problems to train on at step {step}, '
                                 f'fewer than batch_size={self.batch_size}')


# keys that must match for weights to fit (vipe_s may differ: s is 1 in training)
ARCHITECTURE = ['task', 'train_lengths']
ARCHITECTURE += [f.name for f in fields(ModelConfig)
                 if f.name not in (*Config.DERIVED, 'vipe_s', 'kernel', 'prism_alpha_lr')]
# the type of the weights
DTYPES = {'float32': torch.float32, 'tf32': torch.float32, 'bfloat16': torch.float32,
          'float64': torch.float64}


def make_config(values):
    """The Config of {key: value}, other keys aside; UserError if the values do not fit together."""
    return config.make(Config, {k: v for k, v in values.items() if k in config.keys(Config)})


# --------------------------------------------------------------------------------------------------
# the batches

def lengths_at(cfg, step):
    """The problem lengths trained on at a step, up to the limit of length_schedule's stage."""
    limits = [limit for start, limit in cfg.length_schedule if start <= step]
    return [n for n in cfg.train_lengths if not limits or n <= limits[-1]]


def generator(device, stream, number):
    """A random generator of its own for every stream and number."""
    stream = ('train', 'fixed', 'eval', 'test').index(stream) + 1
    # the CPU's generator uses the lowest 32 bits of its seed only
    return torch.Generator(device).manual_seed(stream << 28 | number)


class Batches:
    """Shuffled batches [B, T] of mixed lengths, rows padded on the right. They live on the device.

    An epoch is a pool of problems (n_train per length, or fresh ones every time) in random order.
    It follows from the generator's state at its start, which is what a checkpoint keeps.
    """
    def __init__(self, cfg, seed, task, device):
        self.cfg, self.seed, self.task, self.device = cfg, seed, task, device
        self.generator = generator(device, 'train', seed)
        self.lengths, self.at = None, 0

    def pool(self, lengths, source):
        """The problems of an epoch: tokens, targets [N, T]."""
        per_length = self.cfg.n_train or math.ceil(64 * self.cfg.batch_size / len(lengths))
        problems = [self.task.pool(per_length, length, source) for length in lengths]
        T = max(tokens.shape[1] for tokens, _ in problems)
        dtype = torch.int16 if self.cfg.vocab_size < 2 ** 15 else torch.int32

        def stack(parts, fill):
            return torch.cat([F.pad(x.to(dtype), (0, T - x.shape[1]), value=fill) for x in parts])
        tokens, targets = zip(*problems)
        return stack(tokens, tasks.PAD), stack(targets, -100)

    def begin_epoch(self, lengths):
        """Draw the pool, unless it is fixed, and the order of its problems."""
        self.start, self.at = self.generator.get_state(), 0
        if lengths != self.lengths or not self.cfg.n_train:
            fixed = self.cfg.n_train > 0
            source = generator(self.device, 'fixed', self.seed) if fixed else self.generator
            self.tokens, self.targets = self.pool(lengths, source)
        self.lengths = lengths
        self.order = torch.randperm(len(self.tokens), generator=self.generator, device=self.device)

    def next(self, step):
        """tokens, targets [B, T] of a step."""
        lengths = lengths_at(self.cfg, step)
        if lengths != self.lengths or self.at + self.cfg.batch_size > len(self.tokens):
            self.begin_epoch(lengths)
        rows = self.order[self.at:self.at + self.cfg.batch_size]
        self.at += self.cfg.batch_size
        return self.tokens[rows].long(), self.targets[rows].long()

    def resume(self, start, lengths, at):
        """Go on at place `at` of the epoch that began with the generator's state `start`."""
        self.generator.set_state(start)
        self.begin_epoch(lengths)
        self.at = at


def held_out(cfg, task, split, device):
    """{length: (tokens, targets)} of split eval or test, the same for every seed and encoding."""
    n = cfg.n_eval if split == 'eval' else cfg.n_test
    problems = task.held_out(split, n, cfg.eval_lengths, lambda n: generator('cpu', split, n))
    return {n: (tokens.to(device), targets.to(device)) for n, (tokens, targets) in problems.items()}


# --------------------------------------------------------------------------------------------------
# a training step

def learning_rate(cfg, step):
    """Linear warm-up to lr, then linear or cosine decay to min_lr at max_steps."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(1, cfg.max_steps - cfg.warmup_steps)
    if cfg.decay == 'none':
        left = 1.0
    elif cfg.decay == 'linear':
        left = 1 - done
    else:
        left = (1 + math.cos(math.pi * done)) / 2
    return cfg.min_lr + (cfg.lr - cfg.min_lr) * left


class Trainer:
    """A model, its optimizer and its batches: one seed on one device.

    engine/seeds.py can replace them by objects with the same methods: a Stack of many models,
    for which tokens are [S, B, T] and losses [S], its clipping, and a Graph for update().
    """
    def __init__(self, cfg, model, batches, device, clip=clip_grad_norm_, graph=False):
        self.cfg, self.model, self.batches, self.clip = cfg, model, batches, clip
        groups = model.optim_groups(cfg.lr, cfg.weight_decay)
        for group in groups:                               # a CUDA graph reads rates from tensors
            dtype = torch.float32 if device.type == 'cuda' else torch.float64
            group['lr'] = torch.tensor(group['lr'], device=device, dtype=dtype)
        self.peaks = [group['lr'].item() for group in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=(cfg.beta1, cfg.beta2), fused=True,
                                           capturable=device.type == 'cuda')
        self.autocast = seeds.precision(cfg, device)
        self.run_update = seeds.Graph(self.update) if graph else self.update

    def step(self, number):
        """One optimizer step; returns the loss before it."""
        tokens, targets = self.batches.next(number)
        factor = learning_rate(self.cfg, number) / self.cfg.lr
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group['lr'].fill_(factor * peak)
        return self.run_update(tokens, targets)

    def update(self, tokens, targets):
        """One optimizer step on a batch: forward, backward, clip, AdamW. Returns the loss."""
        total = self.supervised(targets)
        loss = 0
        pieces = self.cfg.accumulate
        for x, y in zip(tokens.tensor_split(pieces, dim=-2), targets.tensor_split(pieces, dim=-2)):
            fraction = self.supervised(y) / total          # 1 if the batch is in one piece
            with self.autocast:
                part = fraction * self.model(x, y)[1]      # the model gives (logits, mean loss)
            part.sum().backward()                          # .sum() is over the seeds of a Stack
            loss = loss + part.detach()
        if self.cfg.grad_clip:
            self.clip(self.model.parameters(), self.cfg.grad_clip)
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            if 'bounds' in group:                          # PoPE's delta
                for p in group['params']:
                    p.data.clamp_(*group['bounds'])
        if self.cfg.ema:
            self.update_ema()
        self.optimizer.zero_grad(set_to_none=False)        # a CUDA graph adds to the same tensors
        return loss

    def update_ema(self):
        """ema <- decay ema + (1 - decay) weights, from the first step's weights on. It is kept with
        AdamW's moments, which a checkpoint has."""
        for p, state in self.optimizer.state.items():
            if 'ema' not in state:
                state['ema'] = p.detach().clone()
            state['ema'].lerp_(p.detach(), 1 - self.cfg.ema)

    def supervised(self, targets):
        """How many targets of a batch are supervised."""
        return (targets != -100).sum(dim=(-2, -1), dtype=DTYPES[self.cfg.dtype])


def make_group(cfg, device):
    """One Trainer for all seeds: of a plain model for one, of a Stack for several."""
    models, batches = [], []
    for seed in cfg.seeds:
        torch.manual_seed(seed)
        models.append(Transformer(cfg).to(device, DTYPES[cfg.dtype]))
        batches.append(Batches(cfg, seed, cfg.the_task, device))

    compiled, graph = cfg.compile, cfg.graph
    if compiled is None:
        size = sum(p.numel() for p in models[0].parameters())
        compiled = device.type == 'cuda' and size >= 1e7
    if graph is None:
        # a capture refuses the factorization that keeps PRISM's matrix orthogonal
        capturable = cfg.prism_recurrent != 'orthogonal'
        graph = device.type == 'cuda' and not compiled and capturable
    if compiled:
        torch._dynamo.reset()                              # or a sweep's ninth model runs eagerly

    model, data, clip = models[0], batches[0], clip_grad_norm_
    if len(models) > 1:
        model, data = seeds.Stack(cfg, models, device, compiled), seeds.StackedBatches(batches)
        clip = seeds.clip_each
    elif compiled:
        model = torch.compile(model, dynamic=False)
    trainer = Trainer(cfg, model, data, device, clip, graph)
    return seeds.Group(cfg, models, batches, trainer)


# --------------------------------------------------------------------------------------------------
# evaluation

def token_losses(logits, targets):
    """Cross-entropy of every token [B, T], 0 where it is not supervised."""
    return F.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100,
                           reduction='none')


@torch.no_grad()
def evaluate(model, task, sets, autocast=None):
    """{length: {exact, token, last, n}} under teacher forcing, for {length: (tokens, targets)}.

    exact: share of sequences with every supervised token right, which equals greedy decoding;
    token: share of supervised tokens; last: share of final states, the end token aside; n:
    sequences; for a corpus also loss: the mean cross-entropy of a token, in nats.
    """
    training = model.training
    model.eval()
    scores = {}
    for length, (tokens, targets) in sets.items():
        T = tokens.shape[1]
        rows = max(1, min(2 ** 15, 2 ** 25 // len(task.vocab)) // T)       # limits memory
        right, loss = [], 0
        for x, y in zip(tokens.split(rows), targets.split(rows)):
            with autocast or contextlib.nullcontext():
                logits = model(x)[0]
            right.append(logits.argmax(dim=-1) == y)
            if task.corpus:
                loss = loss + token_losses(logits, y).sum(dtype=torch.float64)
        right = torch.cat(right)                           # (n, T)
        asked = targets != -100
        states = asked if task.end is None else asked & (targets != task.end)
        last = (torch.arange(T, device=tokens.device) * states).argmax(dim=1, keepdim=True)
        score = dict(exact=(right | ~asked).all(dim=1).double().mean(),
                     token=((right & asked).sum() / asked.sum()).double(),
                     last=right.gather(1, last).double().mean())
        if task.corpus:
            score['loss'] = loss / asked.sum()
        scores[length] = {key: round(x.item(), 6) for key, x in score.items()}
        scores[length]['n'] = len(tokens)
    model.train(training)
    return scores


# --------------------------------------------------------------------------------------------------
# the training loop

def train(cfg, device, state, stop):
    """Train all seeds from where the checkpoint `state` left them.

    Returns {seed: {length: scores}} of the seeds that stayed finite, None if it was stopped.
    """
    task, autocast = cfg.the_task, seeds.precision(cfg, device)
    group = make_group(cfg, device)
    validation, test = (held_out(cfg, task, split, device) for split in ('eval', 'test'))
    run = checkpoint.Run(cfg, state)
    first = state['step']
    if first:
        group.restore(state)

    print(report.title(cfg, group.models[0], device))
    began = time.time()
    bar = tqdm(range(first, cfg.max_steps), total=cfg.max_steps, initial=first, unit='step',
               desc=f'{cfg.task} {cfg.pe}', disable=None, leave=False)
    losses = []                                            # (S,) each, still on the device
    for step in bar:
        losses.append(group.step(step))                    # Group.step calls Trainer.step, above
        done = step + 1
        evaluating = done % cfg.eval_interval == 0 or done == cfg.max_steps
        logging = evaluating or done % cfg.log_interval == 0
        if not (logging or stop.signal):
            continue

        # the only place where the loop waits for the device
        run.add_losses(done, torch.stack(losses).tolist())
        losses.clear()
        if logging:
            speed = (done - first) / (time.time() - began)
            mean = run.log_losses(done, group.learning_rate(), speed)
            bar.set_postfix(loss=f'{mean:.4f}')
        if not (evaluating or stop.signal):
            continue

        pause = time.time()
        group.swap_ema()
        scores = group.evaluate(evaluate, run.alive, task, validation if evaluating else {},
                                autocast)
        run.drop(done, 'a weight', {seed: x is not None for seed, x in scores.items()})
        if evaluating:
            run.log_scores(done, scores)
            mean_scores = report.mean_scores({seed: scores[seed] for seed in run.alive})
            tqdm.write(f'step {done:>6}  loss {mean:.4f}  {speed:6.1f} steps/s  '
                       f'{report.brief(cfg, mean_scores)}')
        run.save(done, group.state())
        group.swap_ema()
        if stop.signal and done < cfg.max_steps:
            return None
        began += time.time() - pause                       # evaluations do not count as training
    group.swap_ema()
    return group.evaluate(evaluate, run.alive, task, test, autocast)


def load(run_dir, seed=None):
    """(model, config) of a run, on the CPU in evaluation mode; seed None: the first sound one.
    cfg.seeds: this seed."""
    path = os.path.join(run_dir, 'ckpt.pt')
    state = checkpoint.read(path, Config)
    cfg = make_config(state['config'])
    checkpoint.check_same(cfg, state['config'], path, [])  # what the task sets
    model = Transformer(cfg).to(DTYPES[cfg.dtype])
    chosen = checkpoint.first_sound(state) if seed is None else seed
    model.load_state_dict(checkpoint.weights(state, chosen, path))
    cfg.seeds, cfg.out_dir = [chosen], str(run_dir)
    return model.eval(), cfg


def load_for_evaluation(cfg):
    """(model, checkpoint, its path): a model on cfg.device, into which a seed's weights fit."""
    path = os.path.join(cfg.out_dir, 'ckpt.pt')
    state = checkpoint.read(path, Config)
    same = ARCHITECTURE + ['data'] * cfg.the_task.own_vocab
    checkpoint.check_same(cfg, state['config'], path, same)
    trained = tasks.make(state['config']['task'], cfg.data)
    if cfg.the_task.vocab != trained.vocab:
        raise UserError(f'{cfg.task} has other tokens than {trained.name}, which was trained')
    return Transformer(cfg).to(seeds.pick_device(cfg), DTYPES[cfg.dtype]), state, path


def evaluate_run(cfg):
    """--eval_only: {seed: {length: scores}} of a run at cfg.eval_lengths, added to lengths.json.

    The text that a corpus is tested on depends on the lengths. Its scores, and those of a task with
    other options, go into eval.json and replace what it had.
    """
    device, task = seeds.pick_device(cfg), cfg.the_task
    model, state, path = load_for_evaluation(cfg)
    failed = {seed: entry['failed'] for seed, entry in state['seeds'].items()
              if 'failed' in entry and seed in cfg.seeds}
    if len(failed) < len(cfg.seeds):                       # all failed: evaluate what they left
        print(''.join(f'left out: {line}\n' for line in failed.values()), end='')
        cfg.seeds = [seed for seed in cfg.seeds if seed not in failed]
    sets, by_seed = held_out(cfg, task, 'test', device), {}
    for seed in cfg.seeds:
        model.load_state_dict(checkpoint.weights(state, seed, path))
        by_seed[seed] = evaluate(model, task, sets, seeds.precision(cfg, device))
    apart = task.corpus or cfg.task != state['config']['task']
    table = os.path.join(cfg.out_dir, 'eval.json' if apart else 'lengths.json')
    known = {}
    if os.path.exists(table) and not apart:
        known = checkpoint.read_lengths(table)
    for seed, scores in by_seed.items():
        known[seed] = dict(sorted((known.get(seed, {}) | scores).items()))
    checkpoint.write(table, json.dumps(known))
    return by_seed


def continue_prompt(cfg):
    """cfg.prompt and how the first of the run's seeds continues it."""
    device, task = seeds.pick_device(cfg), cfg.the_task
    model, state, path = load_for_evaluation(cfg)
    model.eval().load_state_dict(checkpoint.weights(state, cfg.seeds[0], path))
    prompt = task.encode(cfg.prompt)[None].to(device)
    if not prompt.numel():
        raise UserError(f'--prompt={cfg.prompt!r} has no token of this task in it')
    if task.labels:
        raise UserError(f'{cfg.task} labels tokens, so the model continues no prompt')
    if not cfg.causal:
        raise UserError('a model without causal mask answers at the query token alone and '
                        'continues no prompt: leave --prompt out')
    if cfg.positions == 'randomized' and prompt.shape[1] + cfg.new_tokens > cfg.positions_max:
        raise UserError(f'there are {cfg.positions_max} positions: lower --new_tokens')
    torch.manual_seed(cfg.seeds[0])
    with seeds.precision(cfg, device):
        tokens = model.generate(prompt, cfg.new_tokens, cfg.temperature, task.end)
    return task.decode(tokens[0].cpu())


def run_without_training(points, command):
    """The benchmark of each configuration, the continuation of its prompt, or its scores."""
    for label, cfg in points:
        if cfg.benchmark:
            bench.run(label, cfg, command, make_group)
        elif cfg.prompt:
            print(continue_prompt(cfg))
        else:
            by_seed = evaluate_run(cfg)
            report.show(cfg, by_seed)
            if cfg.results:
                report.append_line(cfg, command, seeds.pick_device(cfg), lengths=by_seed)


def main(argv):
    """One run, a sweep, or an evaluation; returns the exit status."""
    if config.wants_help(argv):
        return config.print_help(__doc__, Config)
    values = runs.read_config(Config, argv)
    command = 'python train.py ' + shlex.join(argv)
    points, swept = runs.read_points(Config, values)
    cfg = points[0][1]
    usual = config.defaults(Config)
    changed = {key: config.as_typed(value) for key, value in values.items()
               if key in ('task', 'pe') or value != usual[key]}
    print(' '.join(f'--{key}={value}' for key, value in changed.items()) + '\n')

    if cfg.eval_only or cfg.benchmark:
        return run_without_training(points, command)
    if swept:
        return runs.train_sweep(points, swept, values['out_dir'], train, command)
    return runs.train_run(cfg, train, command)


if __name__ == '__main__':
    config.run(main, tasks.DataError)
