"""Many models with the interface of one: seeds stacked under vmap, a CUDA graph, torchrun.

train.Trainer trains one model. What this file adds takes the place of one of its parts:

    Stack, StackedBatches, clip_each   its model, batches and clipping: many seeds as one
    Graph                              its update(): recorded once on a GPU and replayed

Group holds the models of a process's seeds behind one Trainer; Ranks, the processes that share the
seeds. Nothing in a step mixes seeds: each one trains as it would alone.
"""
import contextlib
import datetime
import gc
import os
import re
import signal
import sys
import time

import torch
from torch import distributed

from engine import config
from engine.config import UserError

# --------------------------------------------------------------------------------------------------
# many seeds

class Stack:
    """The models of several seeds as one: calling it on [S, B, T] gives (None, losses [S]).

    Its parameters are stacks [S, ...]. Those of the models, and their gradients, are views of the
    stacks, so evaluating a model works on it alone.
    """
    def __init__(self, cfg, models, device, compiled):
        self.cfg, self.models = cfg, models
        # on a CPU one pass for all saves calls, not arithmetic, and a large one leaves the cache
        work = cfg.batch_size * cfg.train_len * cfg.d_model
        self.together = device.type == 'cuda' or work <= 2 ** 17
        self.params, self.buffers = torch.func.stack_module_state(models)
        for p in self.params.values():
            p.grad = torch.zeros_like(p)
        for i, model in enumerate(models):
            for name, p in model.named_parameters():
                p.data = self.params[name].data[i]
                p.grad = self.params[name].grad[i]
            for name, x in model.named_buffers():
                x.data = self.buffers[name][i]
        self.losses = torch.func.vmap(self.loss, randomness='different')
        self.forward = models
        if compiled:
            self.losses = torch.compile(self.losses, dynamic=False)
            self.forward = [torch.compile(model, dynamic=False) for model in models]

    def __call__(self, tokens, targets):
        if self.together:
            return None, self.losses(self.params, self.buffers, tokens, targets)
        losses = [model(x, y)[1] for model, x, y in zip(self.forward, tokens, targets)]
        return None, torch.stack(losses)

    def loss(self, params, buffers, tokens, targets):
        """The loss on a batch [B, T] of a model with one seed's parameters and buffers."""
        if self.cfg.tie:                                   # named once in params, used twice
            params = dict(params) | {'head.weight': params['embedding.weight']}
        model, state = self.models[0], (params, buffers)
        return torch.func.functional_call(model, state, (tokens, targets), tie_weights=False)[1]

    def parameters(self):
        return self.params.values()

    def optim_groups(self, lr, weight_decay):
        """The parameter groups of one model, with the stacks in place of its parameters."""
        names = {id(p): name for name, p in self.models[0].named_parameters()}
        groups = self.models[0].optim_groups(lr, weight_decay)
        for group in groups:
            group['params'] = [self.params[names[id(p)]] for p in group['params']]
        return groups


class StackedBatches:
    """The batches of several seeds as one: tokens, targets [S, B, T]."""
    def __init__(self, batches):
        self.batches = batches

    def next(self, step):
        tokens, targets = zip(*(batches.next(step) for batches in self.batches))
        return torch.stack(tokens), torch.stack(targets)


def clip_each(params, largest):
    """Scale each seed's gradient to a norm of at most `largest`; params: stacks [S, ...]."""
    grads = [p.grad for p in params]
    norms = [grad.reshape(len(grad), -1).norm(dim=1) for grad in grads]
    norm = torch.stack(norms).norm(dim=0)                  # (S,)
    scale = (largest / (norm + 1e-6)).clamp(max=1)
    for grad in grads:
        grad.mul_(scale.view(-1, *[1] * (grad.dim() - 1)))


class Group:
    """The models of this process's seeds, behind one Trainer, and the state of their training."""
    def __init__(self, cfg, models, batches, trainer, ranks):
        self.cfg, self.models, self.batches = cfg, models, batches
        self.trainer, self.ranks = trainer, ranks
        self.seeds = ranks.share(cfg.seeds)

    def step(self, number):
        """One optimizer step; the losses [S] before it. On a GPU nothing here waits for it."""
        return self.trainer.step(number).view(-1)

    def learning_rate(self):
        """That of the first parameter group, as the last step had it."""
        return self.trainer.optimizer.param_groups[0]['lr'].item()

    def gather_losses(self, losses):
        """[{seed: loss}] of all processes from this one's losses, [S] of each step."""
        mine = torch.stack(losses).cpu()                   # (steps, S): waits for the device
        rows = torch.cat(self.ranks.all_gather(mine), dim=1)
        return [dict(zip(self.cfg.seeds, row)) for row in rows.tolist()]

    def evaluate(self, evaluate, alive, *args):
        """{seed: evaluate(model, *args)} of all processes; None where a weight is not finite."""
        scores = {}
        for seed, model in zip(self.seeds, self.models):
            if seed in alive:
                finite = all(p.isfinite().all() for p in model.parameters())
                scores[seed] = evaluate(model, *args) if finite else None
        return merge(self.ranks.all_gather(scores))

    def gather_state(self):
        """The part of a checkpoint that restore() reads, of all processes; None but on rank 0."""
        models = {}
        for seed, model in zip(self.seeds, self.models):
            weights = model.state_dict().items()
            models[seed] = {name: x.to('cpu', copy=True) for name, x in weights}
        starts = [batches.start for batches in self.batches]
        rng = [torch.get_rng_state()]
        if self.batches[0].device.type == 'cuda':
            rng.append(torch.cuda.get_rng_state())
        parts = self.ranks.gather((models, starts, rng, self.moments()))
        if self.ranks.rank:
            return None

        models, starts, rng, all_moments = zip(*parts)
        moments = {}
        for i, state in all_moments[0].items():
            moments[i] = dict(state)
            for key, x in state.items():
                if x.dim():
                    moments[i][key] = torch.cat([part[i][key] for part in all_moments])
        first = self.batches[0]
        place = {'starts': sum(starts, []), 'lengths': first.lengths, 'at': first.at}
        return {'models': merge(models), 'moments': moments, 'batches': place, 'rng': list(rng)}

    def moments(self):
        """AdamW's state, stacked over the seeds: {number of the parameter: {name: [S, ...]}}."""
        moments = {}
        for i, state in self.trainer.optimizer.state_dict()['state'].items():
            moments[i] = {}
            for key, x in state.items():
                if x.dim() and len(self.models) == 1:      # a single model has no axis of seeds
                    x = x[None]
                moments[i][key] = x.cpu()
        return moments

    def restore(self, checkpoint):
        """Go on from a checkpoint, written by however many processes."""
        rows = [self.cfg.seeds.index(seed) for seed in self.seeds]
        place = checkpoint['batches']
        for seed, row, model, batches in zip(self.seeds, rows, self.models, self.batches):
            entry = checkpoint['seeds'][seed]
            if 'model' in entry:                           # else it failed before its first one
                model.load_state_dict(entry['model'])
            batches.resume(place['starts'][row], place['lengths'], place['at'])
        self.restore_moments(checkpoint['moments'], rows if len(rows) > 1 else rows[0])
        if len(checkpoint['rng']) != self.ranks.size:      # saved by another number of processes
            torch.manual_seed(checkpoint['step'] << 16 | self.ranks.rank)
            return
        cpu, *cuda = checkpoint['rng'][self.ranks.rank]
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state(cuda[0])

    def restore_moments(self, moments, rows):
        """Give AdamW these rows of what moments() returned for all seeds."""
        optimizer = self.trainer.optimizer
        params = [p for group in optimizer.param_groups for p in group['params']]
        for i, state in moments.items():
            p = params[i]
            optimizer.state[p] = {key: (x[rows] if x.dim() else x).to(p.device)
                                  for key, x in state.items()}


# --------------------------------------------------------------------------------------------------
# devices

THREADS = torch.get_num_threads()


def pick_device(cfg):
    """The torch.device that cfg.device names, made the current one; UserError if missing.

    On a CPU, also the number of threads, unless OMP_NUM_THREADS gives it.
    """
    if not re.fullmatch(r'auto|cpu|cuda(:\d+)?', cfg.device):
        raise UserError(f'device must be auto, cpu, cuda or cuda:N, not {cfg.device!r}')
    if cfg.device == 'cpu' or cfg.device == 'auto' and not torch.cuda.is_available():
        # in a small step threads mostly wait for each other
        small = len(cfg.seeds) * cfg.batch_size * cfg.train_len * cfg.d_model <= 2 ** 18
        if 'OMP_NUM_THREADS' not in os.environ:
            torch.set_num_threads(1 if small else THREADS)
        return torch.device('cpu')
    count = torch.cuda.device_count()
    current = torch.cuda.current_device() if count else 0  # torchrun's processes have one each
    number = int(cfg.device.partition(':')[2] or current)
    if number >= count:
        raise UserError(f'--device={cfg.device}: this machine has {count} CUDA devices; '
                        'use --device=cpu')
    torch.cuda.set_device(number)
    return torch.device('cuda', number)


def precision(cfg, device):
    """Set how matrices are multiplied; the autocast context of the forward pass."""
    torch.set_float32_matmul_precision('high' if cfg.dtype == 'tf32' else 'highest')
    if cfg.dtype == 'bfloat16':
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


class Graph:
    """A function of tensors, recorded as a CUDA graph and replayed: one launch, not hundreds.

    The first three calls run as they are, so that the libraries and the optimizer set themselves
    up; likewise when the shapes of the arguments change.
    """
    def __init__(self, function):
        self.function, self.shapes, self.side = function, None, torch.cuda.Stream()

    def __call__(self, *args):
        shapes = [x.shape for x in args]
        if shapes != self.shapes:
            self.shapes, self.calls, self.graph = shapes, 0, None
            self.args = [torch.empty_like(x) for x in args]        # where the graph reads them
        self.calls += 1
        for mine, x in zip(self.args, args):
            mine.copy_(x)
        if self.calls <= 3:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            with torch.cuda.stream(self.side):
                result = self.function(*self.args)
            current.wait_stream(self.side)
            return result
        if self.graph is None:
            gc.collect()                                   # freeing a graph would break a recording
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.result = self.function(*self.args)
        self.graph.replay()
        return self.result.clone()


# --------------------------------------------------------------------------------------------------
# several processes

class Ranks:
    """The processes that share the seeds of a run, or a sweep: this is number `rank` of `size`."""
    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    @classmethod
    def of_torchrun(cls):
        """The processes that torchrun started. Each takes a GPU in turn; only rank 0 prints."""
        if int(os.environ.get('WORLD_SIZE', 1)) == 1:
            return cls()
        backend = 'gloo'
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())
            backend = 'cpu:gloo,cuda:nccl'
        # torchrun ends this process when another one dies, so there is no need for a time limit
        distributed.init_process_group(backend, timeout=datetime.timedelta(days=30))
        if distributed.get_rank():
            sys.stdout = open(os.devnull, 'w')
        return cls(distributed.get_rank(), distributed.get_world_size())

    def share(self, seeds):
        """The seeds of this process."""
        count = len(seeds)
        return seeds[count * self.rank // self.size:count * (self.rank + 1) // self.size]

    def all_gather(self, part):
        """Every process's part, in order, on all of them."""
        parts = [part] * self.size
        if self.size > 1:
            distributed.all_gather_object(parts, part)
        return parts

    def gather(self, part):
        """Every process's part, in order, on the first; None on the others."""
        if self.size == 1:
            return [part]
        parts = None if self.rank else [None] * self.size
        distributed.gather_object(part, parts)
        return parts


def merge(parts):
    """One dictionary of several processes' parts of it."""
    return {key: x for part in parts for key, x in part.items()}


def check_parallel(cfg, device, ranks):
    """UserError if the processes, the device and the run do not go together."""
    if cfg.graph and device.type != 'cuda':
        raise UserError('--graph needs a CUDA device; leave it out')
    if ranks.size > len(cfg.seeds):
        seeds = '1 seed' if len(cfg.seeds) == 1 else f'{len(cfg.seeds)} seeds'
        raise UserError(f'{ranks.size} processes are too many for {seeds}: '
                        'start at most one per seed')


class Stop:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once.

    torchrun repeats the signals that it gets, and kills after 30 seconds: under torchrun a second
    signal changes nothing, but torchrun's own end stops the run.
    """
    def __init__(self, torchrun=False):
        self.signal = 0
        self.parent = os.getppid() if torchrun else None
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, self.handle)

    def handle(self, number, frame):
        self.signal = number
        if self.parent is None:
            signal.signal(number, signal.SIG_DFL)

    def agreed(self, step, ranks):
        """The signal at which all processes stop after this step; 0 if there was none.

        A process sees its own signals at once; several agree at every tenth step.
        """
        if self.parent not in (None, os.getppid()):
            self.signal = self.signal or signal.SIGTERM
        if ranks.size > 1:
            if step % 10:
                return 0
            self.signal = max(ranks.all_gather(self.signal))
        return self.signal


def run_program(main, *errors):
    """config.run for a program that torchrun may start: rank 0 alone reports what all meet."""
    def main_of_rank(argv):
        try:
            return main(argv)
        except (UserError, OSError, *errors):
            if int(os.environ.get('RANK', 0)):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(5)                              # rank 0 reports, torchrun ends the rest
            raise
        except RuntimeError as error:
            if 'out of memory' in str(error) or 'allocate memory' in str(error):
                raise UserError('not enough memory: use a smaller batch_size, a larger accumulate '
                                'or shorter lengths') from None
            if distributed.is_initialized() and 'gloo' in str(error):
                raise UserError('another process has ended, and so does this one') from None
            raise
    status = config.status_of(main_of_rank, *errors)
    if distributed.is_initialized():                       # closing gloo's threads may abort
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
