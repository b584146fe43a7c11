"""Many models with the interface of one: seeds stacked under vmap; devices; a CUDA graph.

train.Trainer trains one model. What this file adds takes the place of one of its parts:

    Stack, StackedBatches, clip_each   its model, batches and clipping: many seeds as one
    Graph                              its update(): recorded once on a GPU and replayed

Group holds the models of all seeds behind one Trainer. Nothing in a step mixes seeds: each one
trains as it would alone.
"""
import contextlib
import gc
import os
import re
import signal

import torch

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
        self.together = device.type == 'cuda' or work <= 2 ** 15
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
    """The models of all seeds, behind one Trainer, and the state of their training."""
    def __init__(self, cfg, models, batches, trainer):
        self.cfg, self.models, self.batches, self.trainer = cfg, models, batches, trainer

    def step(self, number):
        """One optimizer step; the losses [S] before it. On a GPU nothing here waits for it."""
        return self.trainer.step(number).view(-1)

    def learning_rate(self):
        """That of the first parameter group, as the last step had it."""
        return self.trainer.optimizer.param_groups[0]['lr'].item()

    def swap_ema(self):
        """Exchange the weights and their moving averages, if there are any (Trainer.update_ema)."""
        for p, state in self.trainer.optimizer.state.items():
            if 'ema' in state:
                weights = p.detach().clone()
                p.data.copy_(state['ema'])
                state['ema'].copy_(weights)

    def evaluate(self, evaluate, alive, *args):
        """{seed: evaluate(model, *args)} of the seeds alive; None where a weight is not finite."""
        scores = {}
        for seed, model in zip(self.cfg.seeds, self.models):
            if seed in alive:
                finite = all(p.isfinite().all() for p in model.parameters())
                scores[seed] = evaluate(model, *args) if finite else None
        return scores

    def state(self):
        """What restore() reads of a checkpoint. Call it while the averages are swapped in: then
        `models` holds the averages and `moments` the weights."""
        models = {}
        for seed, model in zip(self.cfg.seeds, self.models):
            weights = model.state_dict().items()
            models[seed] = {name: x.to('cpu', copy=True) for name, x in weights}
        first = self.batches[0]
        place = {'starts': [batches.start for batches in self.batches],
                 'lengths': first.lengths, 'at': first.at}
        rng = [torch.get_rng_state()]
        if first.device.type == 'cuda':
            rng.append(torch.cuda.get_rng_state())
        return {'models': models, 'moments': self.moments(), 'batches': place, 'rng': [rng]}

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
        """Go on from a checkpoint."""
        place = checkpoint['batches']
        for seed, start, model, batches in zip(self.cfg.seeds, place['starts'], self.models,
                                               self.batches):
            entry = checkpoint['seeds'][seed]
            if 'model' in entry:                           # else it failed before its first one
                model.load_state_dict(entry['model'])
            batches.resume(start, place['lengths'], place['at'])
        optimizer = self.trainer.optimizer
        params = [p for group in optimizer.param_groups for p in group['params']]
        for i, state in checkpoint['moments'].items():
            p = params[i]
            optimizer.state[p] = {key: (x.view_as(p) if x.dim() else x).to(p.device)
                                  for key, x in state.items()}
        self.swap_ema()
        cpu, *cuda = checkpoint['rng'][0]
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state(cuda[0])


# --------------------------------------------------------------------------------------------------
# devices

THREADS = torch.get_num_threads()


def pick_device(cfg):
    """The torch.device that cfg.device names, made the current one; UserError if it is missing,
    or if cfg.graph wants another.

    On a CPU, also the number of threads, unless OMP_NUM_THREADS gives it.
    """
    if not re.fullmatch(r'auto|cpu|cuda(:\d+)?', cfg.device):
        raise UserError(f'device must be auto, cpu, cuda or cuda:N, not {cfg.device!r}')
    if cfg.device == 'cpu' or cfg.device == 'auto' and not torch.cuda.is_available():
        # in a small step threads mostly wait for each other
        small = len(cfg.seeds) * cfg.batch_size * cfg.train_len * cfg.d_model <= 2 ** 18
        if 'OMP_NUM_THREADS' not in os.environ:
            torch.set_num_threads(1 if small else THREADS)
        if cfg.graph:
            raise UserError('--graph needs a CUDA device; leave it out')
        return torch.device('cpu')
    number, count = int(cfg.device.partition(':')[2] or 0), torch.cuda.device_count()
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
            with torch.cuda.graph(self.graph, stream=self.side):
                self.result = self.function(*self.args)
            # recording resets dropout's counter on that stream, and replay() sets it on this one
            torch.cuda.current_stream().wait_stream(self.side)
        self.graph.replay()
        return self.result.clone()


# --------------------------------------------------------------------------------------------------
# stopping

class Stop:
    """Ctrl-C or SIGTERM asks the loop to save and stop; a second one stops at once."""
    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
