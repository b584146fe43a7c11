"""Find out why a trained model works or fails: ablations and measurements of a run of train.py.

    python probe.py                                    lists the probes
    python probe.py NAME --help                        explains one probe and its options
    python probe.py cursor out/string_copy_prism       prints a table and writes probe_cursor.json
                                                       and probe_cursor.png into the run's folder
    python probe.py attention by_hand:parity --length=60    probes a model with weights set by hand
    python probe.py axes --hf=FOLDER_OR_GGUF --text=FILE    probes a Llama-family checkpoint

A probe is a function NAME(model, task, cfg, ...) -> (rows, summary, draw). rows: dictionaries, the
lines of the table. summary: a dictionary. draw(plt) returns a matplotlib figure. The other keyword
arguments are its options. probe_NAME.json contains {"rows": [...], "summary": {...}}.
"""
import argparse
import collections
import contextlib
import copy
import inspect
import itertools
import json
import os
import pathlib
import sys
import textwrap
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F

import pe as encodings
import tasks
import train
from model import Attention, Transformer
from pe import UserError, check_name, need

COLOURS = ('#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #000000 '
           '#8b1a1a #6a3d9a #fa8072 #9acd32 #ff1493 #00b3a4 #8c6d31').split()
RED = dict(color='crimson', lw=1)  # the line at the longest training length

KINDS = 'text', 'feature', 'position'  # what perturb() can change
BY_HAND, BY_HAND_DIR = 'weights set by hand', 'out/by_hand_'
NOT_CAUSAL = 'this probe requires a causal mask: train with --causal=True'
NOT_PRISM = 'this probe analyses cursors and requires a run with pe=prism'
SHORTER = 'probes require attention as in short texts; use a shorter --length'
# Shapes: B or n problems, each of T tokens with an input of length L; H heads of D features;
# C = d_model. Before an H, as in [L, H], L is the number of layers.


# ---- inside a forward pass -----------------------------------------------------------------------

class Layer:
    """The tensors of one layer in one forward pass.

    stream, after [B, T, C]: the residual stream before and after the layer. x [B, T, C], pos,
    state: the inputs of attention (x: after the norm). q, k [B, H, T, D]: queries and keys before
    the encoding. y [B, H, T, out_dim]: head outputs. logits, weights [B, H, T, T]: on demand.
    """
    def __init__(self, attn):
        self.attn, self.enc = attn, attn.pe

    @cached_property
    @torch.no_grad()
    def logits(self):
        return self.enc.logits(self.q, self.k, self.pos, self.state, self.x)  # (B, H, T, T)

    @property
    def weights(self):
        return self.enc.weigh(self.logits)  # (B, H, T, T), row sums <= 1

    def begin(self, attn, inputs):  # attention's forward pre-hook
        self.x, self.pos, self.state = inputs

    def store(self, name, module, inputs, output):  # with a name, a forward hook
        setattr(self, name, output)

    def end(self, block, inputs, output):  # the block's forward hook
        self.stream, self.after = inputs[0], output


def project(attn, x):
    """Queries, keys and values [B, H, T, D] of x [B, T, C]."""
    return [z.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for z in attn.project(x)]


@contextlib.contextmanager
def hooked(*hooks):
    """Register forward hooks, given as pairs (module, hook), inside the with block."""
    with contextlib.ExitStack() as handles:
        for module, hook in hooks:
            handles.enter_context(module.register_forward_hook(hook))
        yield


@contextlib.contextmanager
def recording(model, change=None):
    """Yield a list of Layer, which the forward pass inside the with block fills. change(i, layer)
    returns logits [B, H, T, T] to use in place of layer.logits, or None to keep these."""
    layers = [Layer(block.attn) for block in model.blocks]

    def replace(i, module, inputs, logits):
        layers[i].logits = logits  # what the model computed
        return change(i, layers[i])
    with contextlib.ExitStack() as stack:
        for i, (block, layer) in enumerate(zip(model.blocks, layers)):
            attn = layer.attn
            stack.enter_context(attn.register_forward_pre_hook(layer.begin))
            stack.enter_context(hooked(
                (attn.tap_q, partial(layer.store, 'q')), (attn.tap_k, partial(layer.store, 'k')),
                (attn.tap_head_out, partial(layer.store, 'y')), (block, layer.end)))
            if change:
                stack.enter_context(hooked((attn.tap_logits, partial(replace, i))))
        yield layers


def rotated(enc, q, k, at):
    """(q, k after the encoding's qk(), its bias [.., H, Tq, T] or None). With rope_heads only the
    first heads have the encoding; the others are zero-padded to its width, with bias 0."""
    if not isinstance(enc, encodings.SomeHeads):
        return *enc.qk(q, k, at), enc.bias(at)
    first = enc.parts[0]  # the encoding of heads 1..enc.k; the others have none
    some, bias = first.qk(q[:, :enc.k], k[:, :enc.k], at), first.bias(at)
    q, k = (enc.join(x, z[:, enc.k:]) for x, z in zip(some, (q, k)))  # (B, H, T, width)
    return q, k, None if bias is None else F.pad(bias, (0, 0, 0, 0, 0, enc.cfg.heads - enc.k))


@torch.no_grad()
def trace(model, tokens):
    """A list of Layer, filled by a forward pass over tokens [B, T]."""
    with recording(model) as layers:
        model(tokens)
    return layers


def measured(model, rows, measure):
    """[n, L, ..]: the tensor measure(layer) for each of n sequences (rows) and each layer."""
    return torch.stack([torch.stack([measure(x) for x in trace(model, row)]) for row in rows])


# ---- runs and problems ---------------------------------------------------------------------------

def name_of(cfg):
    """The label of a model in figures: its encoding, or 'weights set by hand'."""
    return BY_HAND if cfg.out_dir.startswith(BY_HAND_DIR) else cfg.pe


def problems(task, lengths, n, split='test'):
    """{length: (tokens, targets)}, both [n, T]: at most n held-out problems of each length."""
    missing = set(lengths) - set(task.existing(lengths, None))
    need(not missing, f'the task has no problems of length {min(missing, default=0)}')
    found = task.held_out(split, n, lengths, lambda length: train.generator('cpu', split, length))
    return {length: (tokens[:n], targets[:n]) for length, (tokens, targets) in found.items()}


def batch(task, lengths, length, n):
    """(length, tokens [n, T], targets [n, T]) from problems(). length=0 selects the longest of
    `lengths`, for a text at most 512."""
    length = length or (min(512, max(lengths)) if task.corpus else max(lengths))
    tokens, targets = problems(task, [length], n)[length]
    need(2 <= tokens.shape[1] <= 2 ** 13, f'--length={length} gives {tokens.shape[1]} tokens: maps '
         'of T x T tokens require T from 2 to 8,192')
    return length, tokens, targets


def sequences(task, lengths, length, n):
    """A list with the tokens [1, T] of each problem of batch(), without padding."""
    rows = batch(task, lengths, length, n)[1]
    return [row[None, :row.nonzero().max() + 1] for row in rows]


def fewer(cfg, *tensors, limit=2 ** 26):
    """The first rows of tensors [n, T], at least one, with attention maps of ≤ `limit` numbers."""
    n = max(1, limit // (cfg.n_layer * cfg.heads * tensors[0].shape[1] ** 2))  # L H T^2 per row
    return [x[:n] for x in tensors]


# ---- numbers -------------------------------------------------------------------------------------

def number(x, digits=4):
    """x as a JSON number, rounded to `digits` decimals; None for nan and infinity."""
    return round(float(x), digits) if np.isfinite(float(x)) else None


def numbers(columns, *index, digits=4):
    """{name: number(x[index])} of {name: x}, each a number or a tensor."""
    return {name: number(np.asarray(x)[index], digits) for name, x in columns.items()}


def correlation(x, y):
    """Pearson's r along the last dimension; nan where x or y is constant, up to rounding."""
    x, y = (z.double() - z.double().mean(dim=-1, keepdim=True) for z in (x, y))
    norms = (x.square().sum(dim=-1) * y.square().sum(dim=-1)).sqrt()  # |x| |y|
    return torch.where(norms > 1e-12 * x.shape[-1], (x * y).sum(dim=-1) / norms, torch.nan)


def head_rows(columns):
    """A row for each head from {name: [L, H]}; for more than 60 heads, the mean of each layer."""
    L, H = next(iter(columns.values())).shape
    if L * H > 60:
        means = {name: x.nanmean(dim=1) for name, x in columns.items()}
        return [dict(layer=i + 1) | numbers(means, i) for i in range(L)]
    return [dict(layer=i + 1, head=h + 1) | numbers(columns, i, h) for i, h in np.ndindex(L, H)]


def largest(x):
    """(layer, head), both from 0, of the largest number in x [L, H], ignoring nan."""
    return divmod(x.nan_to_num(-torch.inf).argmax().item(), x.shape[1])


# ---- pictures ------------------------------------------------------------------------------------

def figure(cfg, says, *panels):
    """Return draw(plt): a figure of panels drawn by panel(ax), titled 'TASK with MODEL: SAYS'."""
    def draw(plt):
        across = 2 if len(panels) == 4 else min(3, len(panels))
        down = -(-len(panels) // across)  # rounded up
        fig = plt.figure(figsize=(4.6 * across + 0.4, 4.1 * down + 0.4), layout='constrained')
        fig.suptitle(textwrap.fill(draw.title, 12 + 38 * across))
        for i, panel in enumerate(panels, 1):
            panel(fig.add_subplot(down, across, i))
        return fig
    draw.title = f'{cfg.task} with {name_of(cfg)}: {says}'  # printed above the table, too
    return draw


def curves(cfg, says, lines, xlabel, ylabel, **settings):
    """Return draw(plt): a panel of curves for each item of {panel title: {label: y or (x, y)}}."""
    settings |= dict(xlabel=xlabel, ylabel=ylabel)
    return figure(cfg, says, *[partial(show_curves, each=each, title=name, **settings)
                               for name, each in lines.items()])


def show_curves(ax, each, xlabel, trained=None, ls='-', **settings):
    """Draw {label: y or (x, y)}, and a red line at x = trained. Curves whose label begins with _
    are thin and gray, and not in the legend. settings: arguments of ax.set(), as title and ylim."""
    ax.set_prop_cycle(color=COLOURS)
    for i, (label, y) in enumerate(each.items()):
        x, y = y if isinstance(y, tuple) else (range(len(y)), y)
        # larger markers below, so that equal curves remain visible
        look = dict(ls=ls, marker='.' if len(y) < 60 else '', ms=max(5, 11 - 3 * i))
        if label.startswith('_'):
            look = dict(color='0.7', lw=0.7, zorder=1)  # gray, behind the others
        ax.plot(x, y, label=label, **look)
    if trained is not None:
        ax.axvline(trained, **RED)
        xlabel += f' (red line: training length {trained})'
    ax.set(xlabel=xlabel, **settings)
    ax.legend(fontsize=7)


def show_map(ax, values, title, label, ends, xlabel='key', ylabel='query', words=None, extent=None,
             trained=np.inf, **settings):
    """Draw values [rows, columns] as colours, nan as blanks, and red lines after `trained` tokens.
    words: tokens that label the columns, and the rows if these are queries. ends: the values at the
    two ends of the colour scale."""
    low, high = ends
    image = ax.imshow(np.asarray(values), vmin=low, vmax=high, aspect='auto', extent=extent)
    ax.locator_params(integer=True)  # ticks at whole numbers
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
    ax.figure.colorbar(image, ax=ax, label=label)
    if words:
        label_tokens(ax.xaxis, words)
    if words and ylabel == 'query':
        label_tokens(ax.yaxis, words)
    if len(values) > trained:
        ax.axvline(trained - 0.5, **RED)
        ax.axhline(trained - 0.5, **RED)


def label_tokens(axis, words):
    """Label an axis with its tokens if at most 40, else with its non-digits if at most 5."""
    marks = {i: word for i, word in enumerate(words) if len(words) <= 40 or not word.isdecimal()}
    if len(words) <= 40 or 0 < len(marks) < 6:
        axis.set_ticks(list(marks), marks.values(), fontsize=6)
        if axis.axis_name == 'x' and max(map(len, words)) > 1:
            axis.set_tick_params(labelrotation=90)  # long words overlap otherwise


# ---- ViPE ----------------------------------------------------------------------------------------
# Does attention find the correct token in longer inputs, and which layers encode positions?

def correct_keys(cfg, length):
    """(queries, keys), both [L]: the positions of EoI, s_1, .., s_(L-1), and of the input x_t that
    each must attend to. None if the task does not define a unique correct key for each state."""
    name, _, options = cfg.task.partition(':')
    if name not in ('copy', 'parity', 'polynomial', 'reverse') or 'steps=0' in options:
        return None
    t = torch.arange(1, length + 1)  # BoS is token 0, x_t token t, EoI token L + 1
    return length + t, length + 1 - t if cfg.task.startswith('reverse') else t


def by_length(cfg, says, rows, shown):
    """Return draw(plt) of columns of the rows by input length, from {panel title: [columns]}."""
    x = [row['length'] for row in rows]
    lines = {name: {key: (x, [row.get(key.lstrip('_'), np.nan) for row in rows])  # _: in gray
                    for key in columns} for name, columns in shown.items()}
    return curves(cfg, says, lines, 'input length', 'fraction', trained=max(cfg.train_lengths),
                  ylim=(-0.03, 1.03))


@torch.no_grad()
def attention(model, task, cfg, length=0, n=16):
    """Which tokens does every head attend to, at the training length and at a longer one?

    ViPE Figures 1c, 2, 6-8, 10, 11. --length: the longer one (0: up to 2.5 times the training
    length). Columns: mean attention weights from the inputs to BoS (x_to_BoS), from the answer to
    EoI (s_to_EoI) and to the input that the next state requires (s_to_x_t); entropy, in nats.
    """
    trained = max(cfg.train_lengths)
    length = length or min(max(cfg.eval_lengths), 5 * trained // 2, 512 if task.corpus else np.inf)
    rows, maps, chosen, summary = [], [], None, dict(trained=trained, length=length)
    for L in sorted({min(trained, length) if task.corpus else trained, length}):
        tokens, targets = fewer(cfg, *batch(task, cfg.eval_lengths, L, n)[1:])  # (n, T)
        layers = trace(model, tokens)
        means = [attention_means(x.weights, tokens, targets != -100, task, cfg, L) for x in layers]
        columns = {name: torch.stack([mean[name] for mean in means]) for name in means[0]}  # (L, H)
        rows += [dict(length=L) | row for row in head_rows(columns)]
        if 's_to_x_t' in columns:
            summary[f's_to_x_t, length {L}'] = number(columns['s_to_x_t'].max())
        chosen = chosen or sharpest_heads(layers, columns.get('s_to_x_t'))  # at the shorter length
        words = [task.vocab[i] for i in tokens[0].tolist() if i]  # of the first problem, unpadded
        maps += [dict(values=layers[i].weights[0, h, :len(words), :len(words)], words=words,
                      title=f'head {i + 1}.{h + 1}, length {L}') for i, h in chosen]
    # one colour scale for all maps, without BoS, to which many heads attend
    top = torch.cat([x['values'][1:, 1:].amax(dim=1) for x in maps]).quantile(0.9).item()
    look = dict(label='attention weight', ends=(0, top), trained=cfg.train_len)
    return rows, summary | dict(n=len(tokens)), figure(
        cfg, f'attention; red lines: the longest training sequence, {cfg.train_len} tokens.',
        *[partial(show_map, **x, **look) for x in maps])


def sharpest_heads(layers, on_x_t):
    """[(layer, head)]: the head with the sharpest attention in each of at most three layers. One
    of these heads has the largest weight on_x_t [L, H], unless on_x_t is None."""
    score = torch.stack([x.weights[0, :, 1:, 1:].amax(dim=-1).mean(dim=-1) for x in layers])
    if on_x_t is not None:
        score.view(-1)[on_x_t.argmax()] = 2.0  # above every weight
    most, heads = score.max(dim=1)  # (L, H) -> (L,)
    shown = most.argsort(descending=True)[:3].sort().values.tolist()  # layers in their order
    return [(i, heads[i].item()) for i in shown]


def attention_means(weights, tokens, asked, task, cfg, length):
    """{column: [H]} of a layer's weights [B, H, T, T]; asked [B, T]: the answer's queries."""
    means, inputs = {}, asked.cumsum(dim=1) == 0  # (B, T), before the answer
    for column, queries, name in (('x_to_BoS', inputs, 'BoS'), ('s_to_EoI', asked, 'EoI')):
        if name in task.vocab:
            is_it = tokens == task.vocab.index(name)  # (B, T)
            mass = (weights * is_it[:, None, None]).sum(dim=-1)  # (B, H, T), of each query
            means[column] = mass.transpose(1, 2)[queries & ~is_it].mean(dim=0)  # (H,)
    if correct_keys(cfg, length):
        q, k = correct_keys(cfg, length)
        means['s_to_x_t'] = weights[:, :, q, k].mean(dim=(0, 2))  # (B, H, L) -> (H,)
    entropy = torch.special.entr(weights).sum(dim=-1)  # (B, H, T)
    return means | dict(entropy=entropy.transpose(1, 2)[asked].mean(dim=0))


@torch.no_grad()
def alignment(model, task, cfg, length=0, n=32, distances=()):
    """Does attention still find x_t from s_(t-1) where the answers are wrong?

    ViPE section 3.1, A.3. --length: longest; 0: max(eval_lengths). Columns are fractions. exact:
    problems with every answer token correct. states: correct states. first: problems whose first L
    states are correct, L the longest training length. early: problems with EoS in place of a state.
    LAYER.HEAD: mean weight on the correct key. as trained (reverse: ignore): the best head's weight
    on the key at the longest training distance. --distances=1,3,7 adds Figure 4 (best with
    --n=512): correct states predicted d tokens after EoI, at trained positions only.
    """
    trained, longest = max(cfg.train_lengths), length or max(cfg.eval_lengths)
    need(correct_keys(cfg, longest), f'{cfg.task} does not define a unique correct key for each '
         'state: train copy, parity, polynomial or reverse, with steps')
    # for some L > d, the query L + 1 + d and its target must be within train_len
    need(not distances or 0 <= 2 * min(distances) < cfg.train_len - 3, '--distances '
         f'must be ≥ 0, the smallest below {(cfg.train_len - 3) / 2:g}')
    lengths = {min(trained, longest), min(trained + 1, longest),
               *torch.linspace(1, longest, 24).round().int().tolist(),
               *range(1, cfg.train_len - 2 - min(distances, default=cfg.train_len))}
    rows, on_x_t, on_late = [], {}, {}  # {length: (heads,)}
    for L, pair in problems(task, sorted(lengths), n).items():
        tokens, targets = fewer(cfg, *pair)  # (n, T)
        q, k = correct_keys(cfg, L)  # each (L,)
        late = k + max(0, L - trained)  # the key at the longest training distance
        weights = torch.cat([x.weights.mean(dim=0) for x in trace(model, tokens)])  # (heads, T, T)
        on_x_t[L], on_late[L] = (weights[:, q, key].double().mean(dim=1) for key in (k, late))
        found = model(tokens)[0].argmax(dim=-1)  # (n, T)
        right = found == targets
        columns = dict(exact=(right | (targets == -100)).all(dim=1), states=right[:, q],
                       first=right[:, q[:trained]].all(dim=1),
                       early=(found[:, q] == task.end).any(dim=1))
        columns |= {f'd={d}': right[:, L + 1 + d] for d in distances
                    if d < L and L + d + 2 < cfg.train_len}
        rows.append(dict(length=L) |
                    numbers({key: x.double().mean() for key, x in columns.items()}))
    heads = [f'{i + 1}.{h + 1}' for i, h in np.ndindex(cfg.n_layer, cfg.heads)]
    # the head with most weight on the correct keys, over all states of all training lengths
    best = heads[sum(L * x for L, x in on_x_t.items() if L <= trained).argmax()]
    listed = heads if len(heads) <= 8 else [best]  # more columns are too wide
    for row in rows:
        row |= numbers({head: on_x_t[row['length']][heads.index(head)] for head in listed})
        row['as trained'] = number(on_late[row['length']][heads.index(best)])
    shown = {f'head {best}: weight on x_t (gray: other heads); accuracy': [
        best, 'states', 'exact', *[f'_{head}' for head in listed if head != best]]}
    if distances:
        shown['states predicted d tokens after EoI (Figure 4)'] = [f'd={d}' for d in distances]
    return rows, dict(n=len(tokens), head=best), by_length(
        cfg, 'attention to the correct key, and accuracy.', rows, shown)


@torch.no_grad()
def squeeze(model, task, cfg, length=0, n=256):
    """Does a model fail because distances are new? Accuracy with positions squeezed together.

    --length: longest; 0: max(eval_lengths). Columns: fractions of correct problems (exact) and
    tokens. squeezed: if T tokens exceed T_0, the longest training sequence, token t is at position
    t (T_0 - 1) / (T - 1) (position interpolation). masked: without keys ≥ T_0 tokens back.
    """
    longest, rows = length or max(cfg.eval_lengths), []
    lengths = {L for L in (*cfg.train_lengths, *cfg.eval_lengths) if L < longest} | {longest}
    for L, pair in problems(task, sorted(lengths), n).items():
        # a lower limit, because in each of three passes PRISM's histograms are as large as maps
        tokens, targets = fewer(cfg, *pair, limit=2 ** 23)  # (n, T)
        t = torch.arange(tokens.shape[1])
        far = t[:, None] - t >= cfg.train_len  # (T, T): distances that are not in training
        found = dict.fromkeys(('', ', squeezed', ', masked'), model(tokens)[0])
        if len(t) > cfg.train_len:  # else nothing is squeezed or masked
            squeezed = t * ((cfg.train_len - 1) / t[-1].item())  # the last token is at T_0 - 1
            found[', squeezed'] = model(tokens, pos=squeezed)[0]
            with recording(model, lambda i, x, far=far: x.logits.masked_fill(far, -torch.inf)):
                found[', masked'] = model(tokens)[0]
        row, asked = dict(length=L), targets != -100
        for name, logits in found.items():  # (n, T, V)
            right = logits.argmax(dim=-1) == targets  # (n, T)
            row['exact' + name] = number((right | ~asked).all(dim=1).double().mean())
            row['tokens' + name] = number(right.sum() / asked.sum())
        rows.append(row)
    return rows, dict(n=len(tokens)), by_length(
        cfg, 'if squeezing or masking helps, the model fails at unseen distances.', rows,
        {key: [key + name for name in found] for key in ('exact', 'tokens')})


def ridge(x, y, penalty=1e-6):
    """(w [C], b) with y [N] ~ x [N, C] w + b, by ridge regression on standardized features."""
    x, y = x.double(), y.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)  # (C,)
    std = std.clamp(min=1e-9 * std.max() + 1e-30)  # constant features have std 0
    z = (x - mean) / std  # (N, C)
    gram = z.T @ z / len(z) + penalty * torch.eye(z.shape[1], dtype=z.dtype)  # (C, C)
    w = torch.linalg.solve(gram, z.T @ (y - y.mean()) / len(z)) / std  # for x, not for z
    return w, y.mean() - mean @ w


def agreement(y, y_hat):
    """RMSE, MAE, R2 = 1 - squared error / variance, Pearson's and Spearman's r of y, y_hat [N]."""
    def ranks(x):  # from 1; equal numbers get the mean of their ranks
        _, group, count = x.unique(return_inverse=True, return_counts=True)
        return (count.cumsum(dim=0) - (count - 1) / 2)[group].double()
    y, y_hat = y.double(), y_hat.double()
    scores = dict(rmse=(y_hat - y).square().mean().sqrt(), mae=(y_hat - y).abs().mean(),
                  r2=1 - (y_hat - y).square().mean() / y.var(correction=0),
                  pearson=correlation(y, y_hat), spearman=correlation(ranks(y), ranks(y_hat)))
    return {name: x.item() for name, x in scores.items()}


def hidden_states(model, task, lengths, n, split):
    """{(target, layer): (y [N], x [N, C])} of N tokens. x: the stream after the layer, 0 being the
    embedding. y: the position, or for target 'distance' of a token after EoI the distance to it."""
    found = collections.defaultdict(list)
    for tokens, _ in problems(task, lengths, n, split).values():
        y, known = torch.arange(tokens.shape[1]).expand(tokens.shape), tokens != 0  # not padding
        targets = {'position': (y, known)}  # both (n, T)
        if 'EoI' in task.vocab:
            y = y - (tokens == task.vocab.index('EoI')).int().argmax(dim=1, keepdim=True)
            targets['distance'] = y, known & (y > 0)
        layers = trace(model, tokens)
        for target, (y, known) in targets.items():
            for layer, x in enumerate([layers[0].stream, *(layer.after for layer in layers)]):
                found[target, layer].append((y[known], x[known]))
    return {key: [torch.cat(x) for x in zip(*parts)] for key, parts in found.items()}


def untrained(cfg):
    """The model of a run at its initial weights: a control."""
    with torch.random.fork_rng():  # the caller's random numbers stay as they are
        return train.build(cfg, torch.device('cpu'))[0].eval()


@torch.no_grad()
def linear(model, task, cfg, n=32):
    """How precisely do hidden states encode the position and the distance to EoI?

    ViPE Figure 5, Tables 1, 4, 5. Ridge regressions from the residual stream after each layer (0:
    the embedding) are fitted on --n held-out problems of each training length. They are scored on
    others, on longer ones, and on 3 times the longest training length (3x): rmse, mae in tokens;
    r2; Pearson's and Spearman's r. untrained: r2 with random weights.
    """
    trained = max(cfg.train_lengths)
    longer = [length for length in cfg.eval_lengths if length > trained]
    lengths = dict(trained=cfg.train_lengths, longer=longer)
    if task.existing([3 * trained], None):
        lengths['3x'] = [3 * trained]
    need(longer, f'linear requires eval_lengths above {trained}, the longest training length')

    def predictions(net):  # {(target, layer, part): (y, y_hat)}, both [N], for parts of `lengths`
        fit, found = hidden_states(net, task, cfg.train_lengths, n, 'eval'), {}
        new = {part: hidden_states(net, task, lengths[part], n, 'test') for part in lengths}
        for key, (y, x) in fit.items():
            w, b = ridge(x, y)  # (C,), ()
            for part, states in new.items():
                new_y, new_x = states[key]
                found[(*key, part)] = new_y, new_x.double() @ w + b
        return found
    found, floor = predictions(model), predictions(untrained(cfg))
    rows, lines, summary = [], collections.defaultdict(dict), {}
    for (target, layer, part), (y, y_hat) in found.items():
        control = agreement(*floor[target, layer, part])['r2']
        scores = numbers(agreement(y, y_hat) | dict(untrained=control))
        rows.append(dict(target=target, layer=layer, lengths=part) | scores)
        if part == '3x':  # not drawn
            continue
        if layer == min(dict(position=1, distance=2)[target], cfg.n_layer):  # as in the paper
            summary[f'{target} from layer {layer}, r2 {part}'] = scores['r2']
        rmse = (y.bincount((y_hat - y).square()) / y.bincount()).sqrt()  # for each y
        label = f'_layer {layer}' if part == 'trained' else f'layer {layer}'  # with _: in gray
        lines[f'{target} (tokens)'][label] = rmse
    return rows, summary, curves(
        cfg, 'linear probes at longer lengths (ViPE Fig. 5); gray: seen lengths', lines,
        'position, or distance to EoI', 'root mean squared error (tokens)')


# ---- PoPE: loss past the training length, norms at each frequency, preferred distances -----------

@torch.no_grad()
def loss(model, task, cfg, length=0, n=32):
    """Where does distant context help, and where does a model fail? Loss by position.

    See PoPE Figure 2. length: of the context (0: the longest of eval_lengths). Rows: mean loss in
    nats per token over each of 16 parts of the context, at positions `first` to `last`.
    """
    length, name = length or max(cfg.eval_lengths), name_of(cfg)
    tokens, targets = problems(task, [length], n)[length]  # (n, T)
    many = max(1, 2 ** 13 // tokens.shape[1])  # problems in a pass, to limit memory
    losses = torch.cat([train.token_losses(model(x)[0], y).double()
                        for x, y in zip(tokens.split(many), targets.split(many))])  # (n, T)
    curve = (losses.sum(dim=0) / (targets != -100).sum(dim=0))[:-1]  # nan without any target
    parts = torch.arange(len(curve)).tensor_split(min(16, len(curve)))  # of the positions
    rows = [{'first': part[0].item() + 1, 'last': part[-1].item() + 1,
             name: number(curve[part].nanmean())} for part in parts]
    rows = [row for row in rows if row[name] is not None]  # parts with targets
    summary = {'length': length,
               f'{name}, trained positions': number(curve[:cfg.train_len - 1].nanmean()),
               f'{name}, beyond': number(curve[cfg.train_len - 1:].nanmean())}
    line = [(row['first'] + row['last']) / 2 for row in rows], [row[name] for row in rows]
    return rows, summary, curves(
        cfg, 'loss by position (PoPE Figure 2). A flat curve means extrapolation.',
        {'': {name: line}}, 'position', 'loss (nats per token)', trained=cfg.train_len)


def rotating(enc):
    """The first RoPE or PoPE among the parts of an encoding, or None."""
    return next((x for x in enc.modules() if isinstance(x, (encodings.RoPE, encodings.PoPE))), None)


def pairs_of(x, rope):
    """The feature pairs of x [.., D] as complex numbers [.., D/2], as in pe.rotate()."""
    if n := rope.half(x.shape[-1] // 2):
        x, rest = x[..., :2 * n], x[..., 2 * n:]  # n rotated pairs, and others in any order
        both = zip(x.chunk(2, dim=-1), rest.chunk(2, dim=-1))
        return torch.complex(*(torch.cat(parts, dim=-1) for parts in both))
    return torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))


def polar(enc, q, k):
    """Return q, k [H, T, D] as complex zq, zk [H, T, n], not yet rotated, and theta [n].

    RoPE has n = D/2 pairs of features; PoPE has n = D magnitudes, and zk includes the phases delta.
    The logit is Re sum_c conj(zq_tc) zk_sc e^(-i (t-s) theta_c) / sqrt(d). Heads and mla features
    that the encoding does not act on are left out."""
    part = rotating(enc)
    need(part, f'this probe analyses frequencies, but pe={enc.cfg.pe} has none: use rope or pope')
    c, s = part.cfg, part.state(None, torch.arange(q.shape[1]))  # s: of pi, ntk and yarn
    need(not isinstance(part, encodings.YaRN) or s == 1, 'yarn changes logits by its temperature '
         f'after {c.original_len} tokens: use a shorter --length')
    width = c.head_dim // (2 if isinstance(part, encodings.LatentRoPE) else 1)
    q, k = (x[:c.heads, :, -width:] for x in (q, k))  # (heads it acts on, T, width)
    if isinstance(part, encodings.PoPE):
        q, k = (F.softplus(q), F.softplus(k)) if c.pope_softplus else (q, k)  # magnitudes
        phase = 1 if part.delta is None else torch.exp(1j * part.delta[:, None])  # (H, 1, D)
        return q + 0j, k * phase + 0j, part.theta(q)  # eq. 6
    return pairs_of(q, part), pairs_of(k, part), part.theta(q, s)


@torch.no_grad()
def norms(model, task, cfg, length=0, n=8):
    """Which frequencies do queries and keys use, and are there massive values?

    PoPE Figures 3-6; the Toeplitz study, appendix B.2. length, n: as for axes. Rows: frequencies,
    fast to slow (features if none rotates): wavelength in tokens, mean norm of queries (q) and keys
    (k) over heads, the largest over heads. Summary, of fractions of the norms: `used`: exp(entropy)
    / number of frequencies; `fast`: sum over the faster half; `fast_after_first`: without layer 1.
    """
    sample, part = sequences(task, cfg.train_lengths, length, n), rotating(model.blocks[0].attn.pe)

    def features(layer):  # (H, T, count) of q and of k, and frequencies (count,) or nan
        q, k = layer.q[0], layer.k[0]  # (H, T, D)
        return polar(layer.enc, q, k) if part else (q, k, q[0, 0] * torch.nan)
    found = measured(model, sample, lambda layer: torch.stack(
        features(layer)[:2]).abs().mean(dim=2)).mean(dim=0)  # (L, 2, H, count)
    waves = 2 * np.pi / features(trace(model, sample[0])[0])[2]  # (count,)
    L, _, H, count = found.shape
    (q, k), (top_q, top_k) = found.mean(dim=(0, 2)), found.amax(dim=(0, 2))  # each (count,)
    columns = dict(q=q, k=k, largest_q=top_q, largest_k=top_k)
    rows = [dict(number=c + 1, wavelength=number(waves[c], 1)) | numbers(columns, c)
            for c in range(count)]
    fraction = found / found.sum(dim=-1, keepdim=True)  # (L, 2, H, count)
    used = torch.special.entr(fraction).sum(dim=-1).exp() / count  # (L, 2, H)
    fast = fraction[..., :count // 2].sum(dim=-1) + 0 * waves[0]  # nan if nothing rotates
    summary = numbers(dict(used=used.mean(), fast=fast.mean(), fast_after_first=fast[1:].mean()))
    summary['frequencies'] = count
    ticks = range(0, count, 1 + count // 12)
    maps = [partial(show_map, values=x.reshape(L * H, count).T, title=name, label='mean norm',
                    xlabel='layer, and within it head', ends=(found.min(), found.max()),
                    ylabel='wavelength (tokens), fast to slow' if part else 'feature',
                    extent=(0.5, L + 0.5, count - 0.5, -0.5), yticks=ticks,
                    yticklabels=[f'{waves[i]:,.1f}' if part else i + 1 for i in ticks])
            for name, x in zip(('queries', 'keys'), found.unbind(dim=1))]
    return rows, summary, figure(cfg, 'mean norm at each frequency, or feature (PoPE Figures 3-6). '
                                 'Dark rows are hardly used.', *maps)


def tuning_curves(model, row, length, contents):
    """Logits [L, contents, H, length] of fixed pairs of a query and a key at every distance."""
    source, pos = torch.Generator().manual_seed(0), torch.arange(length)
    t, s = torch.randint(row.shape[1], (contents, 2), generator=source).unbind(dim=1)
    zeros = torch.zeros(1, length, model.cfg.d_model)  # (1, length, C), instead of embeddings
    state = model.blocks[0].attn.pe.state(zeros, pos)  # of a sequence of `length` tokens

    def measure(layer):  # query t at the last position, key s at all: [contents, H, length]
        q, k = (x[0].transpose(0, 1)[at, :, None] for x, at in ((layer.q, t), (layer.k, s)))
        k = k.expand(-1, -1, length, -1)  # (contents, H, length, D)
        return layer.enc.logits(q, k, pos, state)[:, :, 0].flip(-1)  # by distance
    return measured(model, [row], measure)[0]


@torch.no_grad()
def tuning(model, task, cfg, length=0, contents=24):
    """At which distance is the logit of a fixed query and a fixed key largest?

    PoPE eq. 2 and 6. length: distances 0..length-1 (0: twice the training length, at most 512).
    contents: how many pairs of a query and a key, from one held-out sequence. Rows: `range`: of the
    mean logit over pairs, largest minus smallest; `peak`: preferred distance, median over pairs;
    `shift`: its interquartile range, small for PoPE, not for RoPE, whose phases depend on content.
    """
    need(cfg.causal, NOT_CAUSAL)
    need(not any(getattr(m, 'reads_content', False) for m in model.modules()),
         f'tuning sets positions, but those of {cfg.pe} come from the content: use probe cursor')
    length = length or min(512, 2 * cfg.train_len)
    need(length > 1, '--length=1: tuning compares distances; --length must be at least 2')
    row, = sequences(task, cfg.train_lengths, 0, 1)  # (1, T)
    try:
        logits = tuning_curves(model, row, length, contents).double()  # (L, contents, H, length)
    except encodings.InputMissing:
        raise UserError(f'tuning requires an encoding of q and k alone, unlike {cfg.pe}') from None
    largest = (logits.amax(dim=-1) - logits.amin(dim=-1)).max()  # largest effect of the distance
    need(largest > 1e-5 * logits.abs().max(), 'tuning requires logits that depend on the distance, '
         f'unlike those of {name_of(cfg)}: use rope, pope or alibi')
    mean = logits.mean(dim=1)  # (L, H, length)
    quartiles = torch.tensor([0.25, 0.5, 0.75]).double()
    low, peak, high = logits.argmax(dim=-1).double().quantile(quartiles, dim=1)  # each (L, H)
    columns = dict(range=mean.amax(dim=-1) - mean.amin(dim=-1), peak=peak, shift=high - low)
    summary = {key: number(columns[key].mean()) for key in ('range', 'shift')}
    summary['distances'], lines = length, {}
    for x in columns['range'].flatten().argsort(descending=True)[:6].tolist():  # heads to draw
        i, h = divmod(x, mean.shape[1])
        pairs = {f'_{j}': curve for j, curve in enumerate(logits[i, :8, h])}  # with _: in gray
        lines[f'head {i + 1}.{h + 1}'] = {'mean': mean[i, h]} | pairs
    return head_rows(columns), summary, curves(
        cfg, 'logits by distance. Gray: single pairs; blue: the mean of all pairs.', lines,
        'distance', 'logit', trained=cfg.train_len, xlim=(0, length))


# ---- Toeplitz study: heads that an answer depends on, Toeplitz parts of logits, their gradients --

def ablate(model, task, cfg, what='heads', length=0, n=512):
    """Which heads, or which layer's position vectors, does the answer depend on?

    what=heads zeroes one head at a time (the Toeplitz study, section 4.3; Figures 4, 7, 9-12).
    `drop 1`, ...: fall of exact match without head 1, ..., in points (of correct tokens if no
    problem is exact; for a corpus: rise of the loss, nats). `effective`: how many heads share the
    drop. what=positions (section 5.4, Figure 8) subtracts the encoding's vectors p from the stream
    x before each layer in turn. `without p`: score; `random`, `sd`: its mean and deviation for four
    random p of the same norm; `norm`: mean |p| / mean |x|.
    """
    check_name('what', what, ('heads', 'positions'))
    length, tokens, targets = batch(task, cfg.train_lengths, length, n)  # (n, T)
    metric = 'loss' if task.corpus else 'exact'
    def score(*hooks):  # of the model with these hooks; higher is better
        with hooked(*hooks):
            found = train.evaluate(model, task, [(length, (tokens, targets))])[length][metric]
        return -found if task.corpus else 100 * found
    base = score()
    if not base:
        metric = 'token'  # no problem is exact
        base = score()
    unit = dict(loss='loss (nats)', exact='exact match (%)', token='tokens correct (%)')[metric]
    summary = dict(length=length, n=len(tokens), unit=unit, base=number(abs(base)))
    if what == 'heads':
        rows, found, lines = without_heads(model, cfg, base, score)
        summary |= found
        xlabel, ls = 'head that is zeroed', ':'
    else:
        rows, lines = without_positions(model, cfg, tokens, score)
        xlabel, ls = 'p is subtracted before layer', '-'
    x = range(1, 1 + len(lines[0][1]))  # heads or layers
    lines = {label: (x, y) for label, y in lines} | {'whole model': (x, [abs(base)] * len(x))}
    return rows, summary, curves(
        cfg, 'score after an ablation. The answer depends on what changes the score.', {'': lines},
        xlabel, unit, ls=ls, xticks=x)


def effective(x):
    """Participation ratio (sum x)^2 / sum x^2 of x [.., H], with negative numbers counted as 0."""
    return x.clamp(min=0).sum(dim=-1) ** 2 / x.clamp(min=0).square().sum(dim=-1)  # 1 to H


def without_heads(model, cfg, base, score):
    """Zero one head at a time at tap_head_out, and return (rows, summary, curves):

    rows [{layer, 'drop 1', .., 'effective'}], one for each layer (counted from 1), as in ablate();
    summary {layer, head} of the largest drop, {largest, second}: the two largest drops; curves
    [('layer 1', [|score| without head 1, ..]), ..]. base is the whole model's score; a drop is base
    - score((tap, hook)). Raise UserError that names --n_head if a layer has one head."""
    need(cfg.heads > 1, 'ablate compares the heads of a layer: train with --n_head=4 or more')

    def zeroing(head):
        return lambda module, _, y: y.index_fill(1, torch.tensor([head]), 0.0)  # (B, H, T, D)
    scores = torch.tensor([[score((block.attn.tap_head_out, zeroing(head)))
                            for head in range(cfg.heads)] for block in model.blocks])  # (L, H)
    drops, rows = base - scores, []  # (L, H)
    for i, drop in enumerate(drops, 1):
        columns = {f'drop {head}': x for head, x in enumerate(drop, 1)}
        rows.append(dict(layer=i) | numbers(columns | dict(effective=effective(drop)), digits=3))
    layer, head = largest(drops)
    two = dict(zip(('largest', 'second'), drops.flatten().topk(2).values))
    summary = dict(layer=layer + 1, head=head + 1) | numbers(two, digits=3)
    return rows, summary, [(f'layer {i}', row.abs()) for i, row in enumerate(scores, 1)]


def without_positions(model, cfg, tokens, score):
    """Subtract p before one layer at a time; return (rows, [(label, curve)]) for ablate()."""
    p, g, rows = added_vectors(model, tokens.shape[1]), train.generator('cpu', 'positions'), []
    need(p.any(), f'pe={cfg.pe} adds no vectors to the embeddings: train pe=ape or ape+{cfg.pe}')

    def subtracting(vectors):
        return lambda module, _, x: x - vectors[:x.shape[1]]  # (B, T, C)
    size, taps = p.norm(dim=-1, keepdim=True), [x.tap_resid for x in (model, *model.blocks)]
    for layer, tap in zip(trace(model, tokens[:8]), taps):  # the tap is before the layer
        noise = F.normalize(torch.randn(4, *p.shape, generator=g, dtype=p.dtype), dim=-1)
        own, *random = [abs(score((tap, subtracting(x)))) for x in (p, *noise * size)]  # (T, C)
        columns = {'without p': own, 'random': np.mean(random), 'sd': np.std(random),
                   'norm': size.mean() / layer.stream.norm(dim=-1).mean()}
        rows.append(dict(layer=len(rows) + 1) | numbers(columns, digits=3))
    return rows, [(key, [row[key] for row in rows]) for key in ('without p', 'random')]


def added_vectors(model, T):
    """p [T, C]: the vectors that the encoding adds to the embeddings; 0 if it adds none."""
    zeros = torch.zeros_like(model.embedding.weight[:1]).expand(1, T, -1)  # (1, T, C)
    return model.blocks[0].attn.pe.embed(zeros, torch.arange(T))[0].detach()  # (T, C)


def toeplitz_part(L):
    """T_ij = a_(i-j) for i >= j, else 0; a_d: the mean of L [.., T, T] over entries i - j = d."""
    t = torch.arange(L.shape[-1])
    i, j = torch.tril_indices(len(t), len(t))  # rows and columns with i >= j
    sums = L.new_zeros(L.shape[:-1]).index_add(-1, i - j, L[..., i, j])  # (.., T)
    a = sums / (len(t) - t)  # diagonal d has T - d entries
    return a[..., (t[:, None] - t).clamp(min=0)].tril()  # (.., T, T)


def variance_share(part, L):
    """cov(part, L) / var(L) over i >= j of [.., T, T]; 1 in total for parts that add up to L."""
    i, j = torch.tril_indices(*L.shape[-2:])  # rows and columns with i >= j
    part, L = (x[..., i, j] - x[..., i, j].mean(dim=-1, keepdim=True) for x in (part, L))
    return (part * L).sum(dim=-1) / L.square().sum(dim=-1)  # (.., entries) -> (..)


def eq_1(layer, norm, p):
    """Eq. 1's terms {name: [.., H, T, T]} of a layer's logits, if they are linear in q and k, else
    {}. The stream is content + p; the norm is linear with its scale fixed at that of the stream."""
    enc, x = layer.enc, layer.stream  # (B, T, C)
    if any(isinstance(part, (encodings.PoPE, encodings.ViPE, encodings.PRISM))
           for part in enc.modules()):
        return {}
    at = enc.at(layer.q, layer.k, layer.pos, layer.state, layer.x)
    if isinstance(norm, torch.nn.LayerNorm):
        x, p = (z - z.mean(dim=-1, keepdim=True) for z in (x, p))  # LayerNorm subtracts the mean
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps  # None: RMSNorm's default
    p = p * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * norm.weight  # (B, T, C)
    (qc, kc, bias), (qp, kp, _) = (rotated(enc, *project(layer.attn, z)[:2], at)
                                   for z in (layer.x - p, p))  # content, position
    terms = {'qc kc': qc @ kc.mT, 'qc kp': qc @ kp.mT, 'qp kc': qp @ kc.mT, 'qp kp': qp @ kp.mT}
    terms = {name: x * enc.scale for name, x in terms.items() if x.any()}  # omit 0 (no p)
    return terms if bias is None else terms | {'B': bias}


@torch.no_grad()
def toeplitz(model, task, cfg, length=0, n=8):
    """Do logits depend on the distance alone, on content, or on both?

    The Toeplitz study, section 3.2, appendix B, in float64. Columns: fractions of the logits'
    variance over i >= j. `toeplitz`: of the means along diagonals (`chance`: for white noise);
    `qc kc`, `qc kp`, `qp kc`, `qp kp`, `B`: of eq. 1's terms; c: content, p: the vectors that the
    encoding adds. `qp kp toeplitz`: `toeplitz` for that term (Assumption 3.2: 1). Summary: means.
    """
    need(cfg.causal, NOT_CAUSAL)
    length, tokens, _ = batch(task, cfg.train_lengths, length, n)
    T = tokens.shape[1]
    tokens, = fewer(cfg, tokens, limit=2 ** 23 * cfg.n_layer)  # (n, T)
    net = copy.deepcopy(model).double()
    layers, p, columns = trace(net, tokens), added_vectors(net, T), collections.defaultdict(list)
    for layer, block in zip(layers, net.blocks):
        L = layer.logits.masked_fill(layer.logits.isinf(), 0)  # (n, H, T, T)
        terms = eq_1(layer, block.norm_1, p)
        for name, part in ({'toeplitz': toeplitz_part(L)} | terms).items():
            columns[name].append(variance_share(part, L).mean(dim=0))  # (H,)
        if 'qp kp' in terms:  # Assumption 3.2
            share = variance_share(toeplitz_part(terms['qp kp']), terms['qp kp'])  # (n, H)
            columns['qp kp toeplitz'].append(share.mean(dim=0))
    columns = {name: torch.stack(layer) for name, layer in columns.items()}  # (L, H)
    means = numbers({name: x[x.isfinite()].mean() for name, x in columns.items()})
    chance = (T - 1) / (T * (T + 1) / 2 - 1)  # T diagonals fitted to T (T + 1) / 2 entries
    summary = dict(length=length, n=len(tokens), tokens=T, chance=number(chance)) | means
    L, H = columns['toeplitz'].shape
    shares = dict(label='fraction of variance', xlabel='head', ylabel='layer', ends=(0, 1),
                  extent=(0.5, H + 0.5, L + 0.5, 0.5))
    maps = [partial(show_map, values=columns[name], title=name, **shares)
            for name in ('toeplitz', 'qp kp', 'B') if name in columns]
    layer, head = largest(columns['toeplitz'])
    logits = layers[layer].logits[0, head]  # (T, T)
    part = toeplitz_part(logits).masked_fill(logits.isinf(), torch.nan)
    words, ends = [task.vocab[t] for t in tokens[0]], logits[logits.isfinite()].aminmax()
    maps += [partial(show_map, values=x, title=name, label='logit', words=words, ends=ends)
             for name, x in ((f'head {layer + 1}.{head + 1}', logits), ('its Toeplitz part', part))]
    return head_rows(columns), summary, figure(
        cfg, 'fractions of the variance of logits. At 1, logits depend on distance alone.', *maps)


def edges(task, tokens):
    """The E edges of appendix C as (b, u, j, d), each [E]: query u and key j of problem b, label d.
    With two triggers: the query, later trigger, trigger distance. Else all j <= u, d = u - j."""
    B, T = tokens.shape
    if getattr(task, 'triggers', 0) != 2:
        b, u, j = torch.ones(B, T, T).tril().nonzero().unbind(dim=1)  # each (B T (T + 1) / 2,)
        return b, u, j, u - j
    first = task.first_trigger  # the other is the next token in the vocabulary
    places = ((tokens >= first) & (tokens < first + 2)).nonzero()[:, 1]  # (2B,)
    i, j = places.view(B, 2).unbind(dim=1)  # each (B,)
    return torch.arange(B), torch.full_like(j, T - 2), j, j - i  # the query is the last but one


def jacobians(model, tokens, targets):
    """J^(l) [L, B, C, C] = d(stream after block l) / d(stream before it), both at the last
    supervised token. If causal, the full Jacobian's singular values spread at least as far."""
    b = torch.arange(len(tokens))
    last = ((targets != -100) * torch.arange(tokens.shape[1])).argmax(dim=1)  # (B,)
    found = []
    with recording(model) as layers:
        model(tokens)
    for layer in layers:
        columns = layer.after[b, last].sum(dim=0)  # (C,): problems do not affect each other
        J = [torch.autograd.grad(x, layer.stream, retain_graph=True)[0][b, last] for x in columns]
        found.append(torch.stack(J, dim=1))  # C rows (B, C) -> (B, C, C)
    return torch.stack(found)


def gradients_by_layer(model, tokens, targets, edge):
    """(rows of gradients() for one model, H(d) of appendix C [L, H, T])."""
    net, (b, u, j, d) = copy.deepcopy(model).double().eval(), edge
    with recording(net, change=lambda i, layer: None) as layers:  # stores logits, changes none
        total = train.token_losses(net(tokens)[0], targets).sum()
    dS = torch.autograd.grad(total, [layer.logits for layer in layers])  # L of (B, H, T, T)
    H = torch.stack([x.new_zeros(x.shape[1:3]).index_add(1, d, x[b, :, u, j].T) for x in dS])
    size = H.norm(dim=-1)  # (L, H)
    top, heads = size.topk(2)  # both (L, 2)
    margin = top[:, 0] - top[:, 1]  # Margin_l of eq. 5
    s = torch.linalg.svdvals(jacobians(net, tokens[:4], targets[:4])).flatten(1)  # (L, 4 C)
    growth = F.pad(margin[:-1] / margin[1:], (0, 1), value=torch.nan)  # none for the top layer
    columns = dict(first=top[:, 0], margin=margin, growth=growth, effective=effective(size),
                   least=s.amin(dim=1), most=s.amax(dim=1))  # each (L,)
    def rounded(x):  # to 4 significant digits
        return float(f'{x:.4g}') if x.isfinite() else None
    return [dict(layer=i + 1, head=heads[i, 0].item() + 1) |
            {name: rounded(x[i]) for name, x in columns.items()} for i in range(len(layers))], H


def gradients(model, task, cfg, length=0, n=256, steps=-1):
    """Does one head receive most of the gradient of position, especially in lower layers?

    Toeplitz study, section 6, appendix C. H(d): gradient of the summed loss with respect to a
    head's logits, added up over edges() with label d. Computed at 5 points in the run's first
    `steps` steps (-1: at most 200), which are repeated, and for the saved model. For each layer:
    `head` with the largest |H|; `first`: its |H|; `margin`: first minus the second largest |H|;
    `growth`: margin over that of the layer above (Theorem 6.1: above 1); `effective`: how many
    heads share |H|; `least`, `most`: of the singular values of jacobians(). Summary, fractions of
    rows: `A1`: with all singular values in (0, 2); `grows`: with growth > 1."""
    need(name_of(cfg) != BY_HAND, 'by_hand models were never trained: gradients requires a run')
    need(cfg.heads > 1, 'gradients compares the heads of a layer: train with --n_head=4 or more')
    steps = min(200, cfg.max_steps) if steps < 0 else steps
    need(steps <= cfg.max_steps, f'--steps={steps}: this run had {cfg.max_steps}, take fewer')
    length, tokens, targets = batch(task, cfg.train_lengths, length, n)
    tokens, targets = fewer(cfg, tokens, targets, limit=2 ** 23 * cfg.n_layer)  # (n, T)
    edge, found, cpu = edges(task, tokens), {}, torch.device('cpu')
    net, optimizer = train.build(cfg, cpu)
    batches = train.Batches(cfg, cpu)  # those of the run
    for step in range(steps + 1):
        if step in {round(steps * i / 4) for i in range(5)}:
            found[step], _ = gradients_by_layer(net, tokens, targets, edge)
        if step < steps:
            train.seed_noise(cfg, step)
            train.set_rates(optimizer, cfg, step)
            train.update(net, optimizer, cfg, *batches(step))
    found['trained'], _ = gradients_by_layer(model, tokens, targets, edge)
    rows = [dict(step=step) | row for step, some in found.items() for row in some]
    growth = torch.tensor([row['growth'] for row in rows if row['growth'] is not None])
    fits = [0 < row['least'] and row['most'] < 2 for row in rows]  # in 1 ± alpha, alpha < 1
    summary = dict(length=length, n=len(tokens), A1=number(np.mean(fits)),
                   grows=number((growth > 1).double().mean()))
    titles = {'margin': 'largest |H| minus the second', 'effective': 'how many heads share |H|',
              'most': 'A1: largest singular value of J'}
    lines = {title: {f'layer {i + 1}': [row[key] for row in rows[i::cfg.n_layer]]
                     for i in range(cfg.n_layer)} for key, title in titles.items()}
    return rows, summary, curves(
        cfg, 'gradient of position. By Theorem 6.1, lower layers have larger margins.', lines,
        'training step', '', yscale='log', xticks=range(len(found)), xticklabels=list(found))


# ---- PRISM: where cursors move, and how precisely scores measure positions -----------------------

def cursors_of(model, tokens):
    """A dictionary for each of PRISM's cursors on tokens [B, T], query cursors first: layer, head,
    cursor, of: 'query' or 'key', and name: these four; gates: probabilities {incr, decr, keep,
    reset, and jump if it can copy: [B, T]}; histogram [B, T, 2T+1] over the offsets -T..T, after
    each token's gates; weight: (1 - mu) |alpha|; module, index: its pe.Cursors, its index there."""
    found, inputs = [], {}  # inputs: {pe.Cursors: x [B, T, C]}

    def store(module, args, output):
        inputs[module] = args[0]
    with hooked(*[(m, store) for m in model.modules() if isinstance(m, encodings.Cursors)]):
        model(tokens)
    for i, block in enumerate(model.blocks):
        prism, = [m for m in block.attn.pe.modules() if isinstance(m, encodings.PRISM)]
        if prism.layer == 0:  # new cursors are computed before this layer
            cursors, x = prism.cursors, inputs[prism.cursors]
            reset, step, copy_gate = cursors.actions(x)  # see there for shapes
            histograms = cursors.scan(x, torch.eye(2 * tokens.shape[1] + 1, dtype=x.dtype))
        alpha = prism.alpha[:, 0, :cursors.cfg.prism_cursors].abs()  # (H, cursors of a head)
        weights = (1 - torch.sigmoid(prism.m[:, 0])) * alpha  # eq. 9: (H, cursors of a head)
        for of, start in (('query', 0), ('key', cursors.count)):
            first = start + prism.layer * weights.numel()  # of this layer's cursors
            for c, ((head, cursor), weight) in enumerate(np.ndenumerate(weights), first):
                gates = dict(zip(('incr', 'decr', 'keep'), step[:, c].unbind(dim=-1)),
                             reset=reset[:, c])  # each (B, T)
                if copy_gate is not None and of == 'query' and c % 5 == 0:  # one of five (6.0.1)
                    gates['jump'] = 1 - copy_gate[:, c // 5, :, -1]  # the last entry: no copy
                name = dict(layer=i + 1, head=head + 1, cursor=cursor + 1, of=of)
                found.append(name | dict(name=name, weight=weight.item(), gates=gates,
                                         histogram=histograms[:, c], module=cursors, index=c))
    return sorted(found, key=lambda c: c['of'] == 'key')


@torch.no_grad()
def cursor(model, task, cfg, length=0, n=32):
    """Where do PRISM's cursors move? Gates, moves, histograms (PRISM Figures 12, 14-17, 19, 20).

    length: 0: four times the longest training length. Rows: each cursor over the prompt, and over
    the answer. `weight`: (1 - mu) |alpha|; `moves`: offsets by which its mode moves, per token;
    `steady`: fraction of tokens with the most frequent move; `peak`: its largest bin; mean gates
    `incr`, `decr`, `keep`, `reset`, and `jump` if it can copy. Summary: exact match; `steady`:
    weighted mean over query cursors in the answer and key cursors in the prompt.
    """
    need('prism' in cfg.pe.split('+'), NOT_PRISM)
    trained = max(cfg.train_lengths)
    length, tokens, targets = batch(task, cfg.train_lengths, length or 4 * trained, n)
    count = sum(m.count for m in model.modules() if isinstance(m, encodings.Cursors))
    some = max(1, 2 ** 24 // (count * tokens.shape[1] ** 2))  # about 4 count T^2 bins per problem
    tokens, targets = tokens[:some], targets[:some]  # (n, T)
    answer = targets != -100
    parts = dict(prompt=(answer.cumsum(dim=1) == 0) & (tokens != 0), answer=answer)  # (n, T)
    rows, paces, weights = [], [], []
    for c in cursors_of(model, tokens):
        peak, mode = c['histogram'].max(dim=-1)  # (n, T)
        for part, where in parts.items():
            moves = mode.diff(dim=1)[where[:, 1:]]  # from the token before
            _, counts = moves.unique(return_counts=True)
            steady = (counts.max() / len(moves)).item() if len(moves) else torch.nan
            means = dict(weight=c['weight'], moves=moves.double().mean(), steady=steady)
            means |= {name: x[where].mean() for name, x in (dict(peak=peak) | c['gates']).items()}
            rows.append(c['name'] | dict(part=part) | numbers(means, digits=3))
            if (c['of'], part) in (('query', 'answer'), ('key', 'prompt')):  # where it is used
                paces.append(steady)
                weights.append(c['weight'])
    right = (model(tokens)[0].argmax(dim=-1) == targets) | ~answer  # (n, T)
    summary = dict(length=length, exact=right.all(dim=1).double().mean().item(),
                   steady=number(np.average(paces, weights=weights)))
    brief = batch(task, cfg.train_lengths, trained, 1)[1]  # (1, T)
    return rows, summary, figure(
        cfg, f'cursors; {100 * summary["exact"]:.0f} % correct at length {length}',
        *cursor_panels(model, task, [(trained, brief), (length, tokens[:1])]))


def cursor_panels(model, task, shown):
    """The six panels of cursor() for two problems [(length, tokens [1, T])]: trained, longer."""
    def show_modes(ax, found, words, title):
        for of, colour in zip(('query', 'key'), COLOURS):
            for c in [c for c in found if c['of'] == of][:6]:  # paler: less weight
                alpha = 0.15 + 0.85 * c['weight'] / max(c['weight'] for c in found)
                ax.plot(c['histogram'][0].argmax(dim=-1) - len(words), color=colour, alpha=alpha)
        ax.set(title=f'{title} (blue: query, orange: key)', xlabel='position', ylabel='offset')
        label_tokens(ax.xaxis, words)
    gates, modes, heads = [], [], []
    for length, tokens in shown:
        words = [task.vocab[i] for i in tokens[0]]
        found = sorted(cursors_of(model, tokens), key=lambda c: (c['of'] == 'key', -c['weight']))
        steps = torch.stack([(c['gates']['incr'] - c['gates']['decr'])[0] for c in found])
        gates.append(partial(show_map, values=steps, title=f'gates, length {length}', words=words,
                             label='P(increment) - P(decrement)', xlabel='position', ends=(-1, 1),
                             ylabel='query cursors, then key cursors, by weight'))
        modes.append(partial(show_modes, found=found, words=words, title=f'modes, length {length}'))
        best = found[0]  # the query cursor of most weight
        weights = trace(model, tokens)[best['layer'] - 1].weights[0, best['head'] - 1]  # (T, T)
        heads.append(partial(
            show_map, values=weights, label='attention weight', words=words, ends=(0, 1),
            title=f'head {best["layer"]}.{best["head"]}, length {length}'))
    histogram, T = best['histogram'][0], len(words)  # (T, offsets -T..T), of the longer problem
    used = (histogram.amax(dim=0) > 0.01).nonzero()  # offsets that are reached at some token
    low, high = used.min().item(), used.max().item()
    bins = partial(show_map, values=histogram[:, low:high + 1].T.flip(0), words=words,
                   title='query cursor of most weight', label='probability', xlabel='position',
                   ylabel='offset', ends=(0, 1),
                   extent=(-0.5, T - 0.5, low - T - 0.5, high - T + 0.5))
    return gates[0], bins, *modes, *heads


@torch.no_grad()
def kernel(model, task, cfg, length=0):
    """How precise are positions in PRISM's scores? Eq. 7's kernel, eq. 6 against eq. 4, and A.3.

    Rows: each cursor over one answer. `peak`: its largest bin; `eq6`: total variation distance of
    its displacement by eq. 6 (cross-correlation of two histograms) and eq. 4 (the scan restarted
    from a point), unless it can copy; `mean`: |e - f(mean offset)| / |f| of its encoding e (A.3).
    Summary: the largest of both; `rises`: the first r at which the kernel <f(0), f(r)> rises.
    """
    need('prism' in cfg.pe.split('+'), NOT_PRISM)
    length, tokens, targets = batch(task, cfg.train_lengths, length, 1)  # (1, T)
    T, start = tokens.shape[1], (targets[0] != -100).nonzero()[0].item()  # answer: from start on
    offsets = torch.arange(-T, T + 1.0).double()  # (2T+1,)
    size = cfg.prism_d_pe / 2  # |f|^2
    f = partial(encodings.sinusoids, width=cfg.prism_d_pe, base=cfg.rope_base, like=offsets)
    kappa = f(torch.arange(2 * T).double()) @ f(offsets[T:T + 1])[0] / size  # eq. 7: (2T,)
    rows, worst = [], None  # worst: the largest eq6 and its distributions by eq. 4 and by eq. 6
    for c in cursors_of(model, tokens):
        h = c['histogram'][0].double()  # (T, 2T+1)
        far = (h @ f(offsets) - f(h @ offsets))[start:].norm(dim=-1) / size ** 0.5  # A.3: (n,)
        peak = number(h[start:].max(dim=-1)[0].mean())
        row = c['name'] | dict(peak=peak, eq6=None, mean=number(far.mean()))
        if 'jump' not in c['gates'] and T - start > 1:
            eq_4 = displacement(c, start + 1).numpy()  # -n..n
            eq_4 = np.pad(eq_4, 2 * T - len(eq_4) // 2)  # -2T..2T
            eq_6 = np.correlate(h[-1].numpy(), h[start].numpy(), 'full')  # (4T+1,)
            row['eq6'] = number(abs(eq_4 - eq_6).sum() / 2)  # total variation distance
            if not worst or row['eq6'] > worst[0]:
                worst = row['eq6'], eq_4, eq_6
        rows.append(row)
    rises = (kappa.diff() > 0).nonzero()  # r with kernel(r + 1) > kernel(r)
    summary = dict(length=length, rises=rises[0].item() if len(rises) else None,
                   mean=max(row['mean'] for row in rows))
    lines = {f'kernel of eq. 7, d_pe = {cfg.prism_d_pe}': {'by distance': kappa}}
    if worst:
        summary['eq6'], eq_4, eq_6 = worst
        seen = np.flatnonzero(eq_4 + eq_6 > 1e-3)  # displacements to draw
        x = np.arange(seen[0] - 1, seen[-1] + 2)
        lines['displacement over the answer, worst cursor'] = {
            'eq. 4': (x - 2 * T, eq_4[x]), 'eq. 6': (x - 2 * T, eq_6[x])}
    return rows, summary, curves(
        cfg, 'where the kernel rises again, distant positions may score as near ones.', lines,
        'distance, or displacement (positions)', 'kernel, or probability')


def displacement(c, first):
    """PRISM eq. 4: the distribution [2n+1] of the displacement -n..n of a cursor c of cursors_of()
    over the n tokens from `first` on, in problem 0, by a scan that is restarted at `first`."""
    gates = {name: gate[:1, None, first:].double() for name, gate in c['gates'].items()}
    step = torch.stack([gates['incr'], gates['decr'], gates['keep']], dim=-1)  # (1, 1, n, 3)
    g = getattr(c['module'], 'g', None)  # (2C,), none without sharpening
    gamma = None if g is None else 1 + F.softplus(g[c['index']].double())[None]  # (1,)
    table = torch.eye(2 * step.shape[2] + 1).double()  # (2n+1, 2n+1)
    return encodings.cursor_scan(gates['reset'], step, gamma, table)[0, 0, -1]  # after n tokens


# ---- LLM position generalization: logits as sums, perturbed positions, longer texts --------------

def logits_at(layer, pos_q, pos_k, q=None):
    """Unmasked logits [B, H, Tq, Tk] of q (default: the layer's queries) at positions pos_q and the
    layer's keys at pos_k, for an encoding that depends on distances only."""
    enc, q = layer.enc, layer.q if q is None else q
    at = encodings.At(q, layer.k, pos_q[None], pos_k[None], layer.state, None, enc.cfg.causal)
    q, k, bias = rotated(enc, q, layer.k, at)
    logits = q @ k.mT * enc.scale  # (B, H, Tq, Tk)
    return logits if bias is None else logits + bias


def sees_distances(model, tokens):
    """Whether logits depend on positions, and only on distances, as logits_at() requires."""
    layer, pos = trace(model, tokens[:1])[0], torch.arange(tokens.shape[1])
    try:
        own, moved = logits_at(layer, pos, pos), logits_at(layer, pos, pos - 1)  # (1, H, T, T)
        shifted = logits_at(layer, pos + 1, pos + 1)  # the same distances
    except encodings.InputMissing:  # positions come from the content
        return False
    same = torch.allclose(own + encodings.causal(own), layer.logits, 1e-3, 1e-4)
    return same and torch.allclose(own, shifted, 1e-3, 1e-4) and not torch.allclose(own, moved)


def check_distances(model, tokens, cfg):
    """Raise UserError if logits_at() cannot compute the model's logits."""
    need(cfg.causal, NOT_CAUSAL)
    enc = model.blocks[0].attn.pe
    adds_features = any(getattr(part, 'order', 0) == 1 for part in enc.modules())  # prism
    need(enc.shift_invariant and not adds_features and sees_distances(model, tokens),
         f'this probe requires logits that are functions of distance: pe=rope, not {cfg.pe}')


def fit_figure(cfg, says, W, fit, components, ylabel='query i'):
    """Return draw(plt) of logits W [T, T], their fit [T, T] and its components {label: [T]}."""
    visible = W.isfinite()  # (T, T): i >= j, or all of fake_logits()
    ends = np.quantile(W[visible], (0.005, 0.995))
    maps = [partial(show_map, values=x.where(visible, torch.nan), title=name, label='logit',
                    xlabel='key j', ylabel=ylabel, ends=ends)
            for name, x in (('logits of the best head', W), ('fit', fit))]
    return figure(cfg, says, *maps, partial(
        show_curves, each=components, title='components of the fit', xlabel='tokens',
        ylabel='logit'))


def three_axes(W, ridge=1e-6):
    """Eq. 6: a, b, c [N, T] that minimize sum_{i >= j} (W_ij - a_{i-j} - b_i - c_j)^2 + ridge
    (|a|^2 + |b|^2 + |c|^2), and the fit [N, T, T]. (The paper's eq. 7 swaps b and c of eq. 2.)"""
    T = W.shape[-1]
    t, lower = torch.arange(T), torch.ones(T, T, dtype=torch.float64).tril()
    W = W.double().masked_fill(lower == 0, 0)  # (N, T, T)
    back = (t[:, None] - t).clamp(min=0)  # distance i - j; in row i also: the key at distance d
    diagonals = (W.gather(-1, back.expand_as(W)) * lower).sum(dim=-2)  # sum_i W_i,i-d: (N, T)
    sums = torch.cat([diagonals, W.sum(dim=-1), W.sum(dim=-2)], dim=-1)  # (N, 3T)
    none, ab, ac = torch.zeros(T, T), lower.T, lower.flip(0)  # entries with (d, i), with (d, j)
    blocks = (none, ab, ac), (ab.T, none, lower), (ac.T, lower.T, none)
    counts = torch.cat([T - t, t + 1, T - t]).double().diag()  # entries of each a_d, b_i, c_j
    M = torch.cat([torch.cat(row, dim=1) for row in blocks]) + counts + ridge * torch.eye(3 * T)
    a, b, c = torch.cholesky_solve(sums.T, torch.linalg.cholesky(M)).T.chunk(3, dim=-1)  # (N, T)
    return a, b, c, a[:, back] + b[:, :, None] + c[:, None]


def axes_fit(W):
    """[2, H]: r and row-centred r of logits W [H, T, T] with their three-axes fit, over i >= j."""
    lower = torch.ones_like(W[0], dtype=torch.bool).tril()  # (T, T), the visible entries
    maps = [x.double().masked_fill(~lower, 0) for x in (W, three_axes(W)[-1])]
    centred = [x - x.sum(dim=-1, keepdim=True) / lower.sum(dim=-1, keepdim=True) for x in maps]
    return torch.stack([correlation(*(x[:, lower] for x in pair)) for pair in (maps, centred)])


@torch.no_grad()
def axes(model, task, cfg, length=0, n=8):
    """Is a logit a sum of functions of distance, query and key? W_ij ~ a_{i-j} + b_i + c_j.

    The position-generalization paper, section 3.1, eq. 2, Figure 2. length: 0: the longest training
    length, at most 512 tokens of a text. n: sequences (for a Llama: 1). Rows: Pearson's r of logits
    and fit, i >= j (sqrt(6 / T) for noise); `r_centred`: minus row means, which softmax ignores.
    """
    need(cfg.causal, NOT_CAUSAL)
    rows = sequences(task, cfg.train_lengths, length, n)
    found = measured(model, rows, lambda layer: axes_fit(layer.logits[0]))  # (n, L, 2, H)
    r, centred = found.nanmean(dim=0).unbind(dim=1)  # each (L, H)
    summary = dict(mean_r=number(r.nanmean()), mean_r_centred=number(centred.nanmean()),
                   tokens=rows[0].shape[1])
    i, h = largest(r)
    W = trace(model, rows[0])[i].logits[0, h]  # (T, T)
    a, b, c, fit = (x[0] for x in three_axes(W[None]))
    return head_rows(dict(r=r, r_centred=centred)), summary, fit_figure(
        cfg, 'logits and their fit by distance + query + key. Equal maps: exact fit.', W, fit,
        {'c, key j': c, 'b, query i': b, 'a, distance i - j': a})


def two_axes(W):
    """Eq. 12: least-squares fit W_dj ~ a_d + b_j of W [.., n, m]; returns a, b and the fit."""
    half = W.mean(dim=(-2, -1), keepdim=True) / 2  # of the grand mean: for a and b alike
    a, b = W.mean(dim=-1, keepdim=True) - half, W.mean(dim=-2, keepdim=True) - half
    return a.squeeze(-1), b.squeeze(-2), a + b


def fake_logits(layer, i):
    """W'_dj = w(d, q_i, k_j) [H, T, T]: query i and every key j, as if at distance d = 0..T-1."""
    pos = torch.arange(layer.k.shape[2])
    q = layer.q[:, :, i:i + 1].expand_as(layer.k)  # at position d in row d, all keys at 0
    return logits_at(layer, pos, torch.zeros_like(pos), q)[0].double()  # (H, T, T)


def slow_dominating(zq, zk, theta, length):
    """(Ratio of the product of mean norms to the head's median; is the pair slow and dominating?),
    both [.., n], of zq, zk [.., T, n]. Our thresholds: a ratio above 3, a rotation below pi / 2."""
    product = zq.abs().mean(dim=-2) * zk.abs().mean(dim=-2)  # (.., n)
    ratio = product / product.quantile(0.5, dim=-1, keepdim=True)
    return ratio, (ratio > 3) & (theta * length < np.pi / 2)


def analytic_fit(W, zq, zk, theta, pairs):
    """[3, H]: r over i >= j of logits of `pairs` [H, n] and f + g of eq. 15, of all logits W [at
    least H, T, T] and those of the pairs, and of W and f + g; nan for heads without pairs.

    f = Re sum_r conj(q_r) kbar_r e^(-1j (i-j) theta_r), with the angle of the mean key kbar, so
    that f does not depend on k; g = sum_r |k_r - kbar_r| |q_r| cos(arg q_r - arg k_r)."""
    t, kbar = torch.arange(zq.shape[1]), zk.mean(dim=1, keepdim=True)  # (H, 1, n)
    conj = zq.conj() * pairs[:, None]  # (H, T, n), 0 for other pairs
    turn = torch.exp(1j * t[:, None] * theta)  # (T, n)
    f = (conj * turn.conj()) @ (kbar * turn).mT  # each (H, T, T)
    g = conj @ ((zk - kbar).abs() * zk.sgn()).mT
    own = (conj * turn.conj()) @ (zk * turn).mT  # logits of the pairs
    lower = torch.ones(W.shape[1:]).tril() > 0
    fg, own, acts = (x[:, lower] for x in ((f + g).real, own.real, W[:len(pairs)]))
    r = torch.stack([correlation(*pair) for pair in ((own, fg), (acts, own), (acts, fg))])
    return r.where(pairs.any(dim=-1), torch.nan)


def random_phases(zq, zk, theta, queries):
    """A control [H]: r of eq. 12's fit for zq, zk [H, T, n] with their norms but random phases. If
    it equals the model's r, norms and frequencies explain the fit, and learned phases do not."""
    source, T = torch.Generator().manual_seed(0), zq.shape[1]
    q, k = (x.abs() * torch.exp(2j * np.pi * torch.rand(x.shape, generator=source).double())
            for x in (zq[:, queries], zk))  # (H, queries, n), (H, T, n)
    turn = torch.exp(-1j * torch.arange(T)[:, None] * theta)  # (T, n), by distance
    maps = [((x[:, None].conj() * turn) @ k.mT).real for x in q.unbind(dim=1)]  # (H, T, T) each
    return torch.stack([correlation(W.flatten(1), two_axes(W)[-1].flatten(1))
                        for W in maps]).nanmean(dim=0)


@torch.no_grad()
def disentangle(model, task, cfg, length=0, n=4, queries=8):
    """Does a query treat distance and content separately? W'_dj ~ a_d + b_j.

    The position-generalization paper, eq. 12, Figure 3, appendix C, eq. 15. length, n: as for axes.
    queries: per sequence. Rows: `r` of W' and the fit, mean over queries; `r_random`: for random
    phases, a control. In heads with slow dominating pairs, r over i >= j of the pairs' logits and
    f + g of eq. 15 (`slow_fg`), all logits and the pairs' (`dominance`) or f + g (`r_fg`).
    """
    rows = sequences(task, cfg.train_lengths, length, n)
    check_distances(model, rows[0], cfg)
    rotates = rotating(model.blocks[0].attn.pe)

    def measure(layer):  # [1, H]: r; if pe rotates [5, H]: also analytic_fit(), random_phases()
        T = layer.k.shape[2]
        chosen = [*range(T - 1, -1, -max(1, T // queries))[:queries]]
        fakes = (fake_logits(layer, i) for i in chosen)
        r = [correlation(W.flatten(1), two_axes(W)[-1].flatten(1)) for W in fakes]
        parts = [torch.stack(r).nanmean(dim=0, keepdim=True)]  # (queries, H) -> (1, H)
        if rotates:
            z = polar(layer.enc, layer.q[0], layer.k[0])  # zq, zk, theta
            fits = analytic_fit(layer.logits[0], *z, slow_dominating(*z, cfg.train_len)[1])
            more = torch.cat([fits, random_phases(*z, chosen)[None]])  # of the heads that rotate
            parts.append(F.pad(more, (0, parts[0].shape[1] - more.shape[1]), value=torch.nan))
        return torch.cat(parts)
    found, T = measured(model, rows, measure).nanmean(dim=0), rows[0].shape[1]  # (L, 1 or 5, H)
    names = 'r', 'slow_fg', 'dominance', 'r_fg', 'r_random'
    columns = dict(zip(names, found.unbind(dim=1)))  # each (L, H)
    summary = numbers({'mean_' + name: x.nanmean() for name, x in columns.items()})
    i, h = largest(columns['r'])
    W = fake_logits(trace(model, rows[0])[i], T // 2)[h]  # (T, T)
    a, b, fit = two_axes(W)
    return head_rows(columns), summary | dict(tokens=T), fit_figure(
        cfg, f'logits of query {T // 2} by distance and key, and their fit. Equal maps: exact fit.',
        W, fit, {'b, key j': b, 'a, distance d': a}, 'distance d')


@torch.no_grad()
def tuples(model, task, cfg, length=0, n=4):
    """Which pairs of features rotate slowly and dominate the logits? Observation 1.

    The position-generalization paper, section 3.3, Figure 4. length, n: as for axes. Rows: every
    slow dominating pair. `ratio`: mean |q_r| mean |k_r| over the head's median; wavelength in
    tokens; in radians, `rotation` over the training length and initial `angle` between the means of
    q_r and k_r; `fixed`: mean |k_r - kbar_r| / |kbar_r|, 0 for constant keys. Summary: its median.
    """
    found = [[polar(x.enc, x.q[0], x.k[0]) for x in trace(model, row)]  # zq, zk (H, T, n), theta
             for row in sequences(task, cfg.train_lengths, length, n)]
    zq, zk = (torch.cat([torch.stack([x[part] for x in layers]) for layers in found], dim=-2)
              for part in (0, 1))  # (L, H, tokens of all sequences, n)
    theta = found[0][0][2]  # (n,)
    ratio, slow = slow_dominating(zq, zk, theta, cfg.train_len)  # (L, H, n)
    kbar, theta = zk.mean(dim=-2), theta.expand_as(ratio)  # (L, H, n)
    arg, turn = (zq.mean(dim=-2) * kbar.conj()).angle(), theta * cfg.train_len  # (L, H, n)
    fixed = (zk - kbar[..., None, :]).abs().mean(dim=-2) / kbar.abs().clamp(min=1e-12)
    columns = dict(ratio=ratio, wavelength=2 * np.pi / theta, rotation=turn, angle=arg, fixed=fixed)
    rows = [dict(layer=i + 1, head=h + 1, pair=c + 1) | numbers(columns, i, h, c)
            for i, h, c in slow.nonzero().tolist()]
    rows.sort(key=lambda row: -row['ratio'])
    summary = dict(pairs=len(rows), heads=slow.any(dim=-1).sum().item(),
                   of_heads=slow[..., 0].numel(), fixed=number(fixed[slow].median()))
    lines = {'': {'slow dominating pairs': ((np.pi - arg.abs())[slow], turn[slow]),
                  '_equal': ([0, np.pi], [0, np.pi])}}
    return rows, summary, curves(
        cfg, 'slow dominating pairs. Below the gray line: Observation 1.', lines,
        'gap of the initial angle to pi (radians)', 'rotation in training (radians)', ls='')


def transposition(T, gamma, l_max, source):
    """A permutation [T] that swaps disjoint pairs at most l_max apart, until about gamma T tokens
    have moved. For the same source, a larger gamma moves more tokens, a larger l_max farther."""
    swaps = int(gamma * T / 2 + torch.rand((), generator=source).item())  # rounded at random
    side, order = torch.rand(T, generator=source).tolist(), list(range(T))
    for i in torch.randperm(T, generator=source).tolist():
        if swaps and order[i] == i:  # i has not moved yet
            near = range(max(0, i - l_max), min(T, i + l_max + 1))
            free = [j for j in near if j != i and order[j] == j]  # nor have these
            if free:
                j = free[int(side[i] * len(free))]  # farther for a larger l_max
                order[i], order[j] = j, i
                swaps -= 1
    return torch.tensor(order)


def offsets(T, gamma, l_max, source):
    """Integers [T]: with probability gamma one of -l_max..l_max except 0, else 0. With the same
    random source, larger gamma gives more of them, larger l_max larger ones."""
    chosen, size, sign = torch.rand(3, T, generator=source, dtype=torch.float64)  # each (T,)
    size = 1 + (size * l_max).long()
    return torch.where(sign < 0.5, -size, size).where(chosen < gamma, 0)


def perturbed(model, tokens, targets, kind='text', gamma=0, l_max=1):
    """Losses [n, T], which tokens are correct [n, T], outputs of the heads [n, L, H, T, D] and
    which tokens moved [n, T]. Each sequence and layer has one source for all gamma, l_max."""
    pos, found = torch.arange(tokens.shape[1]), []
    draw = offsets if kind == 'position' else transposition

    def change(moves, i, layer):  # moves: for each layer (T,)
        if kind == 'position':
            return logits_at(layer, pos, pos + moves[i]) + encodings.causal(layer.logits)
        return layer.enc.logits(layer.q, layer.k[:, :, moves[i]], layer.pos, layer.state, layer.x)
    for i, (row, target) in enumerate(zip(tokens.split(1), targets.split(1))):
        moves = [draw(len(pos), gamma, l_max, train.generator('cpu', 'perturb', i, layer))
                 for layer in range(len(model.blocks))]
        order = moves[0] if kind == 'text' else pos  # (T,)
        with recording(model, None if kind == 'text' else partial(change, moves)) as layers:
            logits = model(row[:, order])[0]  # (1, T, V)
        losses, right = train.token_losses(logits, target), logits.argmax(dim=-1) == target
        y = torch.stack([layer.y[0] for layer in layers])  # (L, H, T, D)
        found.append((losses[0].double(), right[0], y, order != pos))
    return [torch.stack(x) for x in zip(*found)]


def perturb_scores(after, before, targets):
    """Columns of perturb() from what perturbed() returned for changed and for original inputs."""
    moved, row = after[-1], {}
    asked = (targets != -100) & ~F.pad(moved, (0, 1))[:, 1:]  # target t is token t + 1
    for when, (losses, right, *_) in (('', after), (' before', before)):
        row['loss' + when] = losses[asked].mean()
        row['token' + when] = right[asked].double().mean()
        row['exact' + when] = (right | ~asked).all(dim=1)[asked.any(dim=1)].double().mean()
    change = (after[2] - before[2]).norm(dim=(2, 4)) / before[2].norm(dim=(2, 4))  # (n, L, T)
    output = change.where(~moved[:, None], torch.nan).nanmean(dim=(1, 2)).nanmean()
    return numbers(row | dict(cost=row['loss'] - row['loss before'], output=output))


@torch.no_grad()
def perturb(model, task, cfg, length=0, n=0, gammas=(0.001, 0.01, 0.05, 0.1, 0.5),
            l_max=(5, 10, 100, 1000)):
    """How robust is a model to disordered positions?

    The position-generalization paper, section 4.1, Figure 5 and Table 1. length: as for axes. n:
    0: 128 problems, or 16 segments of text (for a Llama: 2). A fraction gamma of tokens (`text`),
    of the keys of each layer (`feature`), or of their positions (`position`, if logits depend on
    distances) moves by at most l_max. Rows, on targets that did not move: loss in nats per token,
    fractions of correct tokens and sequences, the same `before`; `cost`: loss minus loss before;
    `output`: |o' - o| / |o| of attention outputs. Summary: unperturbed scores on all targets.
    """
    need(0 < min(gammas) <= max(gammas) <= 1 and min(l_max) > 0,
         '--gammas must be fractions in (0, 1], and --l_max integers ≥ 1')
    n = n or (16 if task.corpus else 128)
    tokens, targets = batch(task, cfg.train_lengths, length, n)[1:]
    sizes = [x for x in l_max if x < tokens.shape[1]] or [min(l_max)]
    kinds = KINDS if sees_distances(model, tokens) else KINDS[:2]
    before = perturbed(model, tokens, targets)
    original = perturb_scores(before, before, targets)
    summary = {key: original[key] for key in ('loss', 'token', 'exact')}
    rows = [dict(kind='original', gamma=None, l_max=None) | summary]
    for level in itertools.product(kinds, gammas, sizes):
        scores = perturb_scores(perturbed(model, tokens, targets, *level), before, targets)
        rows.append(dict(zip(('kind', 'gamma', 'l_max'), level)) | scores)
    lines = collections.defaultdict(dict)
    for kind, key, size in itertools.product(kinds, ('cost', 'output'), sizes):
        y = [row[key] for row in rows if (row['kind'], row['l_max']) == (kind, size)]
        lines[f'{kind}: {key}'][f'within {size} tokens'] = gammas, y
    return rows, summary, curves(
        cfg, 'scores after perturbations (Figure 5). Near 0, order matters little.', lines,
        'fraction perturbed, gamma', 'rise of the loss (nats), or change of output', xscale='log')


def sliding(layer, t, start, window, first=0):
    """Outputs [queries, H out_dim] of the queries at positions t, moved to the end of a window of
    keys and values from `start` on, the first `first` of which are the sequence's own first."""
    pos = torch.arange(window)
    keys = torch.where(pos < first, pos, pos + start)  # (window,)
    v = project(layer.attn, layer.x)[2]  # (1, H, T, D)
    k, v = (x[:, :, keys].expand(len(t), -1, -1, -1) for x in (layer.k, v))
    q = layer.q[0, :, t].transpose(0, 1)[:, :, None]  # (queries, H, 1, D)
    weights = layer.enc.weigh(layer.enc.logits(q, k, pos, layer.state))  # (queries, H, 1, window)
    return layer.enc.mix(weights, v, pos, layer.state)[:, :, 0].flatten(1)  # (queries, H out_dim)


def nearest(x, normal):
    """Distances [..] from x [.., D] to the nearest of normal [N, D], over the median in normal."""
    apart = torch.cdist(normal, normal)  # (N, N)
    apart[apart < 1e-4 * apart.max()] = torch.inf  # itself, or sequences that begin alike
    return torch.cdist(x, normal).amin(dim=-1) / apart.amin(dim=-1).median()


@torch.no_grad()
def stretch(model, task, cfg, length=0, n=8, window=0, layer=0, queries=6):
    """Why do sliding windows extend a context? Do attention outputs over them stay normal?

    The position-generalization paper, section 4.2, Figure 6. window: in tokens (0: the training
    length, at most half of the sequence). layer: 0: the middle one. Outputs in the first window are
    normal. Rows: median distance to the nearest normal output, over the median among these: of
    `later positions`; of --queries queries over sliding `windows`, or with the first tokens kept.
    """
    _, tokens, _ = batch(task, cfg.eval_lengths, length, n)
    T, L = tokens.shape[1], len(model.blocks)
    layer, window = layer or (L + 1) // 2, window or min(cfg.train_len, T // 2)
    need(layer <= L and 1 < window < T,
         f'stretch: --layer must be 1 to {L}, and --window 2 to {T - 1}, below the length')
    check_distances(model, tokens, cfg)
    t, step = torch.linspace(window, T - 1, queries).long(), max(1, (T - window) // 40)
    found, sink = collections.defaultdict(list), max(1, min(10, window // 8))  # first tokens kept
    for row in tokens.split(1):
        seen = trace(model, row)[layer - 1]
        y = seen.y[0].transpose(0, 1).flatten(1)  # (T, H out_dim)
        found['normal'].append(y[:window])
        found['later positions'].append(y[window:])
        for kind, first in (('windows', 0), ('windows with the first tokens', sink)):
            found[kind] += [sliding(seen, t, start, window, first)
                            for start in range(0, T - window + 1, step)]
    found = {kind: torch.cat(y).double() for kind, y in found.items()}  # (points, H out_dim)
    normal = found.pop('normal')
    apart = {kind: nearest(x, normal) for kind, x in found.items()}
    medians = numbers({kind: x.quantile(0.5) for kind, x in apart.items()})
    rows = [dict(outputs=kind, points=len(apart[kind]), median=x) for kind, x in medians.items()]
    summary = dict(window=window, tokens=T, layer=layer) | medians
    lines = {kind: (np.linspace(0, 1, len(x)), x.sort()[0]) for kind, x in apart.items()}
    return rows, summary, curves(
        cfg, f'attention outputs of layer {layer} at over {window} tokens. Near 1: normal.',
        {'': lines}, 'fraction of outputs', 'distance to the nearest normal output', yscale='log')


# ---- longer contexts: angles that training has not shown -----------------------------------------

def dials(model, task, cfg):
    """Which angles between queries and keys are new at longer lengths, also with pi, ntk, yarn?

    Pair c turns by theta_c a token, so the distances 0..L-1 of training cover an arc of its circle.
    Rows: pairs, fast to slow: wavelength in tokens; turns: of distance L-1. Then fractions of the
    circle that training has not covered, but distances up to 2L-1 or 4L-1 do: rope 2x, rope 4x;
    at 4x with the frequencies of pi, ntk and yarn at s = 4. Summary: means over pairs, and how much
    more slowly the fastest pair turns, which tells neighbours apart.
    """
    part, L = rotating(model.blocks[0].attn.pe), cfg.original_len
    need(isinstance(part, encodings.RoPE), f'dials requires rope, pi, ntk or yarn, not {cfg.pe}')
    like = torch.zeros(cfg.head_dim // (2 if isinstance(part, encodings.LatentRoPE) else 1))
    theta = {name: encodings.ENCODINGS[name](part.cfg).theta(like, 4.0)  # {name: (pairs,)}
             for name in ('rope', 'pi', 'ntk', 'yarn')}
    turns = {key: theta[key.split()[0]] * (times * L - 1) / (2 * torch.pi) for key, times in (
        ('rope', 1), ('rope 2x', 2), ('rope 4x', 4), ('pi', 4), ('ntk', 4), ('yarn', 4))}
    arcs = {key: x.clamp(max=1) for key, x in turns.items()}  # covered fractions of the circle
    new = {key: (x - arcs['rope']).clamp(min=0) for key, x in arcs.items() if key != 'rope'}
    rows = [dict(pair=c + 1) | numbers(dict(wavelength=2 * np.pi / theta['rope']), c, digits=1)
            | numbers(dict(turns=turns['rope']) | new, c) for c in range(len(turns['rope']))]

    def show(ax, name, longer):  # clocks in rows of four, from the top
        for c, seen in enumerate(arcs['rope'].tolist()):
            ends = [seen, *(max(seen, arcs[key][c].item()) for key in longer), 1]
            ax.pie(np.diff([0, *ends]), center=(c % 4, -(c // 4)), radius=0.42, startangle=90,
                   counterclock=False, colors=[*COLOURS[:len(ends) - 1], '0.93'])
        ax.set(title=name, xlim=(-0.5, 3.5), ylim=(-0.5 - c // 4, 0.5))
    panels = [partial(show, name='rope at 2 and 4 times the length', longer=('rope 2x', 'rope 4x'))]
    panels += [partial(show, name=f'{name} at 4 times', longer=(name,)) for name in theta
               if name != 'rope']
    summary = {f'new, {key}': number(x.mean()) for key, x in new.items()}
    summary |= {f'pair 1 slowed, {key}': number(theta['rope'][0] / theta[key][0])
                for key in ('pi', 'ntk', 'yarn')}
    says = (f'angles of pairs, fast to slow. Blue: at distances below {L}, as in training; orange, '
            'green: only at greater ones.')
    return rows, summary, figure(cfg, says, *panels)


# ---- Llama-family checkpoints in place of a run --------------------------------------------------

class LlamaRoPE(encodings.RoPE):
    """RoPE with the frequencies theta [d/2] and the scaling of a checkpoint's rotary module."""
    def __init__(self, cfg, rotary):
        super().__init__(cfg)
        self.rotary = rotary
        self.inv_freq = self.frequencies(1)
        self.scale *= rotary.attention_scaling ** 2  # of q and of k

    def frequencies(self, T):
        """The frequencies [d/2] that the rotary module uses for T tokens."""
        rotary = copy.deepcopy(self.rotary)  # with dynamic scaling it remembers the longest T
        rotary(rotary.inv_freq, torch.arange(T)[None])
        return rotary.inv_freq.float()

    def theta(self, like, s=1.0):
        return self.inv_freq

    def state(self, x, pos, total_len=None):
        """None. Raise UserError if other frequencies are used for as many tokens."""
        need(torch.equal(self.frequencies(len(pos)), self.inv_freq), f'at {len(pos)} tokens, this '
             f'checkpoint has other frequencies ({self.rotary.rope_type} scaling): {SHORTER}')


class LlamaAttention(Attention):
    """A Llama's attention as one of ours. Keys and values are repeated for the heads that share
    them (GQA)."""
    def __init__(self, theirs, cfg, enc):
        super().__init__(cfg, enc)
        self.linears, self.proj = [theirs.q_proj, theirs.k_proj, theirs.v_proj], theirs.o_proj

    def make_projections(self, cfg):
        pass

    def project(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, self.pe.cfg.head_dim))  # (B, T, H or fewer, D)
                   for linear in self.linears)
        k, v = (z.repeat_interleave(self.heads // z.shape[2], dim=2) for z in (k, v))
        return q.flatten(-2), k.flatten(-2), v.flatten(-2)  # 3 x (B, T, H D)

    def in_place(self, hidden_states, attention_mask=None, **_):
        """Replaces forward() of transformers' attention. Raise UserError for a mask that hides the
        first key from the last query."""
        T = hidden_states.shape[1]
        need(attention_mask is None or attention_mask[0, 0, -1, 0],
             f'at {T} tokens, this checkpoint has a sliding window: {SHORTER}')
        return self(hidden_states, torch.arange(T), None), None


class Llama(torch.nn.Module):
    """A LlamaForCausalLM, Mistral or Qwen2 whose attention layers become LlamaAttention."""
    def __init__(self, net):
        super().__init__()
        self.net, self.blocks, c = net, net.model.layers, net.config
        self.cfg = encodings.PEConfig(
            d_model=c.num_attention_heads * self.blocks[0].self_attn.head_dim,
            n_head=c.num_attention_heads, n_layer=len(self.blocks), rope_pairs='half',
            train_len=c.max_position_embeddings)
        for layer in self.blocks:
            enc = LlamaRoPE(self.cfg, net.model.rotary_emb)
            layer.attn = LlamaAttention(layer.self_attn, self.cfg, enc)
            layer.self_attn.forward = layer.attn.in_place

    def forward(self, tokens):
        return self.net(input_ids=tokens, use_cache=False).logits.float(), None  # (B, T, V)


class LlamaText(tasks.Corpus):
    """A text file in a checkpoint's tokens; segments begin with its tokenizer's prefix."""
    first, needs = 0, 'a text of two tokens or more (is the tokenizer missing?)'

    def __init__(self, tokenizer, size, path):
        words = {i: word for word, i in tokenizer.get_vocab().items()}
        self.vocab, self.data = [words.get(i, f'<{i}>') for i in range(size)], path
        text = tasks.read_text(path)
        self.ids, plain, full = (
            tokenizer(text[:end], add_special_tokens=own, verbose=False).input_ids
            for end, own in ((None, False), (99, False), (99, True)))
        starts = [i for i in range(len(full)) if full[i:i + len(plain)] == plain]
        self.begin = full[:min(starts, default=0)]  # the prefix, such as a BoS token

    def read(self):
        return [('test', np.array(self.ids))]

    def lay_out(self, pieces, length):
        pieces = [[*self.begin, *piece][:length] for piece in pieces]
        tokens, targets = super().lay_out(pieces, length)  # (n, length)
        for piece, row, target in zip(pieces, tokens, targets):
            target[:len(piece) - 1] = row[1:len(piece)]  # here token 0 is a word, not padding
        return tokens, targets


def read_llama(path):
    """(transformers' model, tokenizer) from a folder or GGUF file; UserError if that fails."""
    folder, given = path, dict(trust_remote_code=False)
    gguf = path.lower().endswith('.gguf')
    if gguf:
        folder, given['gguf_file'] = os.path.split(os.path.abspath(path))
    ours = sys.modules.get('kernels')
    sys.modules['kernels'] = None  # transformers imports a package of this name if it finds one
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        kind = AutoConfig.from_pretrained(folder, **given).model_type
        need(kind in ('llama', 'mistral', 'qwen2'),
             f'--hf requires a llama, mistral or qwen2 checkpoint, not {kind}')
        net, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation='sdpa', output_loading_info=True,
            ignore_mismatched_sizes=True, **given)
        net(input_ids=torch.tensor([[0, 0]]))  # fails if the configuration contradicts itself
        tokenizer = AutoTokenizer.from_pretrained(folder, **given)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        packages = 'transformers gguf accelerate' if gguf else 'transformers'
        raise UserError(f'--hf requires {error.name}: pip install {packages}') from None
    except Exception as error:  # a truncated file, a quantization, ...
        says = textwrap.shorten(f'{type(error).__name__}: {error}', 200)
        raise UserError(f'cannot load {path}: {says} (is a file truncated, a Git LFS pointer, or '
                        'from another model?)') from None
    finally:
        del sys.modules['kernels']
        if ours:
            sys.modules['kernels'] = ours
    # transformers draws missing weights at random and ignores others, such as biases
    wrong = [*info['missing_keys'], *(key for key, *_ in info['mismatched_keys']),
             *(key for key in info['unexpected_keys'] if '.layers.' in key)]
    need(not wrong, f'{path} lacks weights that its configuration requires, or has others: '
         f'{min(wrong, default="")} ({len(wrong)} in all)')
    if gguf:
        from gguf import GGUFReader
        read_ignored(net, GGUFReader(path))
    return net.eval(), tokenizer


def read_ignored(net, reader):
    """Divide a model's frequencies by the factors in a GGUF file, which transformers ignores. Raise
    UserError if it ignores other tensors or a scaling of RoPE."""
    factors = [x.data for x in reader.tensors if x.name == 'rope_freqs.weight']
    need(len(reader.tensors) - len(factors) == len(list(net.parameters())) and not any(
        key.endswith(('.rope.scaling.factor', '.rope.scale_linear')) for key in reader.fields),
        'transformers ignores biases or a scaling of RoPE in this GGUF file: use another format')
    for x in factors:
        net.model.rotary_emb.inv_freq /= torch.tensor(x.copy())


def load_llama(path, text, length=0):
    """(model, cfg) from a checkpoint and the text to run it on, as from load(). Raise UserError if
    transformers computes other logits at this length."""
    need(text, '--hf requires a text to run the checkpoint on: --text=FILE')
    for file in (path, text):
        need(os.path.exists(file), f'no such file or folder: {file}')
    net, tokenizer = read_llama(path)
    task = LlamaText(tokenizer, net.config.vocab_size, text)
    lengths = [net.config.max_position_embeddings]
    tokens = batch(task, lengths, length, 1)[1]
    with torch.no_grad():
        theirs = net(input_ids=tokens, use_cache=False).logits
        need(theirs.isfinite().all(), f'{path} gives logits that are not finite')
        model, name = Llama(net).eval(), os.path.basename(os.path.normpath(path))
        apart = ((model(tokens)[0] - theirs).abs().max() / theirs.abs().max()).item()
    need(apart < 1e-3, f'{path}: at {tokens.shape[1]} tokens, attention as probed changes the '
         f'logits by {100 * apart:.1f} %, so that probes do not support it')
    return model, argparse.Namespace(
        **vars(model.cfg), task=name, data=text, the_task=task, train_lengths=lengths,
        eval_lengths=lengths, out_dir=f'out/{train.slug(name)}')


# ---- circuits set by hand ------------------------------------------------------------------------

RULES = {'copy': lambda s, x: x, 'parity': lambda s, x: (s + x) % 2,
         'polynomial': lambda s, x: (s * x + 1) % 5}  # s_t as a function of s_(t-1) and x_t


def iteration_head(name):
    """(model, cfg): the circuit of ViPE Figure 1b and A.2, correct at every length up to 1,000.

    Layer 1 measures distances D to two anchors. Every token after EoI attends to EoI, and EoI and
    all tokens before it attend to BoS. ViPE's value channel (eq. 8) returns the distance: D_1 = t
    at x_t, D_2 = t - 1 at s_(t-1). Layer 2 attends to D_1 = D_2 + 1: the product of normalized
    vectors (D, c) and (D', c) is largest at D' = D. Its MLP looks up s_t = f(s_(t-1), x_t). The
    second head of each layer is zero. cfg: from train.make_config, with vipe_s='one' (D unscaled),
    float64 (products differ by 1e-7), out_dir=BY_HAND_DIR + name. UserError without a rule."""
    need(name in RULES, f'by_hand:{name}: weights are set by hand for {", ".join(RULES)} only')
    V = len(tasks.make(name).vocab)
    BoS, EoI, EoS, symbols = 1, 2, 3, range(V - 4)
    # rows: (current token, token that layer 2 attends to, next token)
    table = [(EoI, x + 4, x + 4) for x in symbols]  # s_1 = x_1
    table += [(s + 4, EoI, EoS) for s in symbols]  # EoI is at D_1 = L + 1, after the last input
    table += [(s + 4, x + 4, RULES[name](s, x) + 4) for s in symbols for x in symbols]
    # channels of the residual stream: token, 1, D, token attended to, next token
    one, dist, read, write = V, V + 1, V + 2, 2 * V + 2
    C = 3 * V + 2 + V % 2  # even, for two heads
    cfg = train.make_config(dict(
        task=name, pe='vipe', vipe_s='one', vipe_logn=False, vipe_u=False, vipe_d_p=1, d_model=C,
        n_head=2, n_layer=2, d_ff=len(table), norm='rmsnorm', dtype='float64',
        out_dir=BY_HAND_DIR + name))
    model = Transformer(cfg).double().eval().requires_grad_(False)
    tokens, unit = torch.arange(V), 1e-3  # D is stored in thousands
    for p_name, p in model.named_parameters():
        p.fill_(C ** -0.5 if 'norm' in p_name else 0.0)  # norms: x / |x|; all else 0
    model.embedding.weight[tokens, tokens] = model.embedding.weight[:, one] = 1.0  # (V, C)
    anchor, match = model.blocks

    q, k, v = anchor.attn.qkv.weight.view(3, C, C)  # each (to, from)
    q[0, one], q[1, one], q[1, EoI] = 1e3, 2e3, -2e3  # attend to an earlier EoI, else to BoS
    k[0, BoS], k[1, EoI] = 1.0, 1.0  # the anchors
    anchor.attn.pe.W_p[0] = unit
    anchor.attn.proj.weight[dist, C // 2] = 1.0  # head 1's D comes after its values

    q, k, v = match.attn.qkv.weight.view(3, C, C)
    # <(D_2 + 1, c), (D_1, c)>, where c^2 = 2 is the squared norm of the token and constant channels
    q[0, dist], q[0, one], k[0, dist] = 1.0, unit, 1.0
    q[1, one], k[1, one] = 2.0, 1.0  # c * c
    q[2, EoI], k[2, dist], k[2, BoS] = -10.0, 1.0, 10.0  # EoI attends to the smallest D > 0
    q *= 1e9 * (C // 2) ** 0.5  # sharp: products differ by 1e-7
    v[tokens, tokens] = match.attn.proj.weight[read + tokens, tokens] = 1.0
    for i, (s, x, new) in enumerate(table):  # unit i: weight on x, if the token is s
        match.mlp[0].weight[i, [read + x, s, one]] = torch.tensor([1e3, 4e3, -4e3]).double()
        match.mlp[2].weight[write + new, i] = 1e-3
    model.head.weight[tokens, write + tokens] = 100.0  # (V, C)
    return model, cfg


# ---- the program ---------------------------------------------------------------------------------

PAPERS = {
    'ViPE': [attention, alignment, squeeze, linear], 'PoPE': [loss, norms, tuning],
    'Toeplitz study': [ablate, toeplitz, gradients], 'PRISM': [cursor, kernel],
    'LLM position generalization': [axes, disentangle, tuples, perturb, stretch],
    'Longer contexts': [dials],
}
PROBES = {f.__name__: f for probes in PAPERS.values() for f in probes}
# probes that accept a Llama-family checkpoint, and their default n for it (None: no such option)
LLAMA = {attention: 1, loss: 1, norms: 1, tuning: None, axes: 1, disentangle: 1, tuples: 1,
         perturb: 2, stretch: 2}


def as_text(rows, summary):
    """The rows as a table, without columns in which all are None, then the summary."""
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    cells = [[key, *('' if x is None else str(x) for x in column)]
             for key, column in columns.items() if any(x is not None for x in column)]
    widths = [max(map(len, column)) for column in cells]
    lines = ['  '.join(map(str.rjust, line, widths)) for line in zip(*cells)]
    pairs = [f'{key}: {value:.4g}' if type(value) is float else f'{key}: {value}'
             for key, value in summary.items()]
    return '\n'.join(lines + textwrap.wrap('  '.join(pairs), 130))


def read_options(function, argv):
    """Parse a probe's command line: (options that all probes have, {this probe's: value})."""
    def as_numbers(text):  # '0.5,1' -> [0.5, 1]
        return [float(x) if '.' in x else int(x) for x in text.split(',')]
    parser = argparse.ArgumentParser(
        prog=f'python probe.py {function.__name__}', description=inspect.getdoc(function),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = lambda says: need(False, says)  # one line, as every UserError
    parser.add_argument('run', nargs='?', help="a run's folder or by_hand:TASK")
    parser.add_argument('--out_dir', default='', help="folder for the results; default: the run's")
    parser.add_argument('--hf', default='', help='a Llama-family checkpoint in place of RUN')
    parser.add_argument('--text', default='', help='the text file to run the checkpoint on')
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()
                if p.default is not p.empty}
    for name, default in defaults.items():
        kind = as_numbers if type(default) is tuple else type(default)
        parser.add_argument(f'--{name}', type=kind, default=default, help=f'default: {default!r}')
    if LLAMA.get(function) and any(arg.startswith('--hf') for arg in argv):
        parser.set_defaults(n=LLAMA[function])  # a Llama is slow on a CPU
    given = parser.parse_args(argv)
    own = {name: getattr(given, name) for name in defaults}
    for key in {'n', 'contents', 'queries'} & own.keys():
        # a default of 0 lets the probe choose
        need(own[key] >= min(1, defaults[key]), f'--{key} must be an integer ≥ 1, got {own[key]}')
    return given, own


def main(argv):
    """Print the list of probes, or run one of them."""
    if not argv or argv[0] in ('--help', '-h'):
        print(__doc__)
        for paper, probes in PAPERS.items():
            print(paper)
            for function in probes:
                star = '*' if function in LLAMA else ' '
                print(f'  {function.__name__:12}{star} {inspect.getdoc(function).splitlines()[0]}')
        return print('\n* also accepts a Llama-family checkpoint')
    name, *argv = argv  # the probe, then its options
    check_name('probe', name, PROBES)
    given, own = read_options(PROBES[name], argv)
    need(bool(given.run) != bool(given.hf), f'python probe.py {name}: give one run, or --hf')
    need(not given.hf or PROBES[name] in LLAMA,
         '--hf requires a probe marked * in the list of python probe.py')
    if given.hf:
        model, cfg = load_llama(given.hf, given.text, own.get('length', 0))
    elif given.run.startswith('by_hand:'):
        model, cfg = iteration_head(given.run.removeprefix('by_hand:'))
    else:
        model, cfg = train.load(given.run)
    rows, summary, draw = PROBES[name](model, cfg.the_task, cfg, **own)
    if name in ('norms', 'tuning', 'toeplitz') and given.run and name_of(cfg) != BY_HAND:
        control = PROBES[name](untrained(cfg), cfg.the_task, cfg, **own)[1]
        summary |= {f'{key}, untrained': x for key, x in control.items() if x != summary[key]}
    print(f'{textwrap.fill(draw.title, 100)}\n\n{as_text(rows, summary)}')
    print(f'(python probe.py {name} --help explains the columns)')
    path = os.path.join(given.out_dir or cfg.out_dir, f'probe_{name}')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    train.write_file(path + '.json', json.dumps(dict(rows=rows, summary=summary), indent=1))
    pathlib.Path(path + '.png').unlink(missing_ok=True)  # of an older result
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return print(f'wrote {path}.json (pip install matplotlib to draw {path}.png)')
    draw(plt).savefig(path + '.png', dpi=150)
    plt.close('all')
    print(f'wrote {path}.json and drew {path}.png')


if __name__ == '__main__':
    train.run_program(main)
