"""Many models behind the calls of one: seeds stacked under vmap, a CUDA graph, torchrun.

train.Trainer trains one model. What this file adds takes the place of one of its parts:

    Stack, StackedBatches   its model and batches: many seeds as one, [S, B, T] -> losses [S]
    Graph                   its update(): recorded once on a GPU and replayed
    Ranks                   several processes, which share the seeds, or the batch of a single seed
    Group                   the models of a process's seeds behind one Trainer, and their state

Nothing in a step mixes seeds: each one trains as it would alone.
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

    def clip_grad_norm_(self, largest):
        """Scale each seed's gradient to a norm of at most `largest`."""
        grads = [p.grad for p in self.params.values()]
        norms = [grad.reshape(len(grad), -1).norm(dim=1) for grad in grads]
        norm = torch.stack(norms).norm(dim=0)              # (S,)
        scale = (largest / (norm + 1e-6)).clamp(max=1)
        for grad in grads:
            grad.mul_(scale.view(-1, *[1] * (grad.dim() - 1)))

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
        parts = self.ranks.all_gather(mine)
        rows = sum(parts) if self.ranks.split else torch.cat(parts, dim=1)
        return [dict(zip(self.cfg.seeds, row)) for row in rows.tolist()]

    def local_losses(self, losses):
        """This process's part, [S] each, of the losses [steps, seeds] in a checkpoint."""
        x = next(self.models[0].parameters())
        mine = losses.to(x.device, x.dtype)[:, self.ranks.share_slice(len(self.cfg.seeds))]
        if self.ranks.split and self.ranks.rank:
            mine = torch.zeros_like(mine)                  # the parts of a split batch add up
        return list(mine)

    def evaluate(self, evaluate, alive, *args):
        """{seed: evaluate(model, *args)} of all processes; None where a weight is not finite."""
        found = {}
        if not (self.ranks.split and self.ranks.rank):     # else rank 0 evaluates the same model
            for seed, model in zip(self.seeds, self.models):
                if seed in alive:
                    finite = all(p.isfinite().all() for p in model.parameters())
                    found[seed] = evaluate(model, *args) if finite else None
        parts = self.ranks.all_gather(found)
        return {seed: scores for part in parts for seed, scores in part.items()}

    def state(self):
        """What this process adds to a checkpoint, on the CPU."""
        device = next(self.models[0].parameters()).device
        rng = [torch.get_rng_state()]
        if device.type == 'cuda':
            rng.append(torch.cuda.get_rng_state(device))
        if self.ranks.split and self.ranks.rank:
            return {'rng': rng}
        models = {}
        for seed, model in zip(self.seeds, self.models):
            weights = model.state_dict().items()
            models[seed] = {name: x.to('cpu', copy=True) for name, x in weights}
        first = self.batches[0]
        place = {'starts': [batches.start for batches in self.batches],
                 'lengths': first.lengths, 'at': first.at}
        return {'rng': rng, 'models': models, 'moments': self.moments(), 'batches': place}

    def moments(self):
        """AdamW's state, stacked over the seeds: {number of the parameter: {name: [S, ...]}}."""
        found = {}
        for i, state in self.trainer.optimizer.state_dict()['state'].items():
            found[i] = {}
            for key, x in state.items():
                if x.dim() and len(self.models) == 1:      # a single model has no axis of seeds
                    x = x[None]
                found[i][key] = x.cpu()
        return found

    def restore(self, checkpoint):
        """Put back what checkpoint.Run.save wrote, from however many processes."""
        for seed, model in zip(self.seeds, self.models):
            entry = checkpoint['seeds'][seed]
            if 'model' in entry:                           # else it failed before its first one
                model.load_state_dict(entry['model'])
        mine = self.ranks.share_slice(len(self.cfg.seeds))
        part = mine.start if len(self.models) == 1 else mine
        moments = {}
        for i, state in checkpoint['moments'].items():
            moments[i] = {key: x[part] if x.dim() else x for key, x in state.items()}
        optimizer = self.trainer.optimizer
        groups = optimizer.state_dict()['param_groups']
        rates = [group['lr'] for group in optimizer.param_groups]
        optimizer.load_state_dict({'state': moments, 'param_groups': groups})
        for group, rate in zip(optimizer.param_groups, rates):
            group['lr'] = rate                             # loading put a copy in its place
        saved = checkpoint['batches']
        for batches, start in zip(self.batches, saved['starts'][mine]):
            batches.resume(start, saved['lengths'], saved['at'])
        if len(checkpoint['rng']) != self.ranks.size:      # saved by another number of processes
            torch.manual_seed(checkpoint['step'] << 16 | self.ranks.rank)
            return
        cpu, *cuda = checkpoint['rng'][self.ranks.rank]
        torch.set_rng_state(cpu)
        device = next(self.models[0].parameters()).device
        if cuda and device.type == 'cuda':
            torch.cuda.set_rng_state(cuda[0], device)


# --------------------------------------------------------------------------------------------------
# devices

def pick_device(cfg):
    """The torch.device that cfg.device names, made the current one; UserError if missing."""
    if not re.fullmatch(r'auto|cpu|cuda(:\d+)?', cfg.device):
        raise UserError(f'device must be auto, cpu, cuda or cuda:N, not {cfg.device!r}')
    if cfg.device == 'cpu' or cfg.device == 'auto' and not torch.cuda.is_available():
        return torch.device('cpu')
    count = torch.cuda.device_count()
    number = 0
    if ':' in cfg.device:
        number = int(cfg.device[5:])
    elif count:
        number = torch.cuda.current_device()  # each of torchrun's processes has its own
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
    """The processes that work on one run; this is number `rank` of `size`.

    Each has its share of the seeds. A single seed they all have, and its batch is `split`.
    """
    def __init__(self, rank=0, size=1, split=False):
        self.rank, self.size, self.split = rank, size, split

    @classmethod
    def of_torchrun(cls, one_seed):
        """The processes that torchrun started. Each takes a GPU in turn; only rank 0 prints."""
        if int(os.environ.get('WORLD_SIZE', 1)) == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ['LOCAL_RANK']) % torch.cuda.device_count())
        backend = 'cpu:gloo,cuda:nccl' if torch.cuda.is_available() else 'gloo'
        # torchrun ends this process when another one dies, so there is no need for a time limit
        distributed.init_process_group(backend, timeout=datetime.timedelta(days=30))
        if distributed.get_rank():
            sys.stdout = open(os.devnull, 'w')
        return cls(distributed.get_rank(), distributed.get_world_size(), one_seed)

    def share_slice(self, count):
        """Which of `count` seeds are this process's."""
        if self.split:
            return slice(0, 1)
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def share(self, seeds):
        """The seeds of this process."""
        return seeds[self.share_slice(len(seeds))]

    def rows(self, tokens):
        """This process's rows of a batch [.., B, T]: all of them, unless the batch is split."""
        return tokens.tensor_split(self.size, dim=-2)[self.rank] if self.split else tokens

    def add_gradients(self, model):
        """Sum the gradients of processes that split a batch."""
        if not self.split:
            return
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        distributed.all_reduce(flat)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view_as(grad))

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


def check_parallel(cfg, device, ranks):
    """UserError if the processes, the device and the run do not go together."""
    seeds, pieces = len(cfg.seeds), ranks.size * cfg.accumulate
    if cfg.graph and (device.type != 'cuda' or ranks.split):
        needs = 'a model of its own for every process' if ranks.split else 'a CUDA device'
        raise UserError(f'--graph needs {needs}; leave it out')
    if seeds > 1 and ranks.size > seeds:
        raise UserError(f'{ranks.size} processes are too many for {seeds} seeds: '
                        'start at most one per seed')
    if ranks.split and pieces > cfg.batch_size:
        raise UserError(f'{ranks.size} processes with accumulate={cfg.accumulate} cut '
                        f'batch_size={cfg.batch_size} into more parts than it has sequences')
    gpus = torch.cuda.device_count()
    here = int(os.environ.get('LOCAL_WORLD_SIZE', 1))
    if ranks.split and gpus and cfg.device != 'cpu' and (':' in cfg.device or here > gpus):
        raise UserError(f'{here} processes that split a batch need a GPU each and --device=auto; '
                        f'this machine has {gpus}')


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
            if not distributed.is_initialized() or 'gloo' not in str(error):
                raise
            raise UserError('another process has ended, and so does this one') from None
    status = config.status_of(main_of_rank, *errors)
    if distributed.is_initialized():                       # closing gloo's threads may abort
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
