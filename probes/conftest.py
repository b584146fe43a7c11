"""What several tests of the probes start from."""
import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch: more threads only wait for each other
import torch

import train
from model import Transformer


def nano(task='copy', dtype=torch.float64, longest=8, **kw):
    """(model, task, cfg) with random weights, as of a run trained to `longest`."""
    torch.manual_seed(0)
    small = dict(d_model=16, n_layer=2, dtype='float64', train_lengths=range(1, longest + 1),
                 eval_lengths=range(1, longest + 5))
    cfg = train.Config(task=task, **small | kw)
    return Transformer(cfg).to(dtype).eval(), cfg.the_task, cfg


def at_random(*shape, dtype=torch.float64, seed=0):
    """Normal numbers of this shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def untouched(probe, model, task, cfg, **flags):
    """What the probe returns. Afterwards the model has no hook and gives bitwise the same."""
    tokens, _ = task.sample(2, 5, torch.Generator())
    before = model(tokens)[0]
    found = probe(model, task, cfg, **flags)
    assert torch.equal(model(tokens)[0], before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return found
