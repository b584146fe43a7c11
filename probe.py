"""See why a trained model works or breaks: a probe for every question, on any run of train.py.

    python probe.py                                       lists the probes; python probe.py NAME --help tells of one and its flags
    python probe.py cursor out/string_copy_prism          prints a table, writes probe_cursor.json and .png into the run
    python probe.py cursor RUN --seed=3 --length=60 --out_dir=FOLDER
    python probe.py attention by_hand:parity              of a Transformer whose weights are set by hand (iteration_head)
    python probe.py report RUN                            gathers what the probes have found there on one page, RUN/report.html
    python probe.py axes --hf=FOLDER_OR_GGUF --text=FILE --out_dir=FOLDER      looks inside a Llama-family checkpoint, where a probe can

A probe is one function, NAME(model, task, cfg, ...) -> (rows, summary, figure): rows are dictionaries, a line of the table each, summary is
a dictionary, figure a function that draws with the matplotlib.pyplot it is given (without matplotlib there is no .png). Its further
arguments are flags of the command line. probe_NAME.json holds {"rows": [...], "summary": {...}}. A probe changes nothing in the model and
nothing in a run but its own output.
"""
import base64
import contextlib
import copy
import dataclasses
import glob
import html
import inspect
import io
import json
import os
import textwrap
import types

import numpy as np
import torch
import torch.nn.functional as F

import pe as encodings
import tasks
import train
from engine import checkpoint, config, data
from engine.config import UserError
from engine.report import pyplot, style_of
from model import Attention, Transformer

COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')        # which the colour-blind can tell apart (Okabe and Ito)
QUERY, KEY = COLOURS[:2]                                        # these mean the same in every figure
BY_HAND, BY_HAND_DIR = 'weights set by hand', 'out/by_hand_'


@contextlib.contextmanager
def hooked(*hooks):
    """Forward hooks, pairs (module, hook), on these modules within."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def listening(*modules):
    """A list of (module, its inputs, its output) of every forward pass of these modules within."""
    heard = []
    with hooked(*((m, lambda m, inputs, output: heard.append((m, inputs, output))) for m in modules)):
        yield heard


def attention_maps(model, tokens):
    """Attention weights [B, H, T, T] of every layer."""
    with listening(*(block.attn.tap_logits for block in model.blocks)) as heard, torch.no_grad():
        model(tokens)
    return [logits.softmax(dim=-1) for _, _, logits in heard]


def made(cfg):
    """What a model is called beside others of its task: by its encoding, or that its weights are set by hand."""
    return BY_HAND if cfg.out_dir.startswith(BY_HAND_DIR) else cfg.pe


def titled(cfg):
    """What a figure is of."""
    return f'{cfg.task} with {made(cfg)}'


def besides(model, cfg, beside):
    """{name: (model, cfg)} of a run and of those in --beside, a comma list of further runs of its task."""
    runs, parts = {made(cfg): (model, cfg)}, beside.split(',') if beside else []
    while parts:
        n = next((n for n in range(len(parts), 1, -1) if os.path.isdir(','.join(parts[:n]))), 1)            # a name with commas
        path, parts = ','.join(parts[:n]), parts[n:]
        net, other = load(path)
        if other.the_task is not cfg.the_task:
            raise UserError(f'{path} was trained on {f"{other.task} {other.data}".strip()}, this run on '
                                  f'{f"{cfg.task} {cfg.data}".strip()}: not to be compared')
        runs[path if made(other) in runs else made(other)] = net, other
    return runs


def side_by_side(found):
    """Rows and summary of several runs {name: (rows, summary)} as one: each row says its run, if there are several, and so does the summary
    but for the first run.
    """
    first, *others = found
    rows = [dict(run=name) | row if others else row for name, (rows, _) in found.items() for row in rows]
    return rows, found[first][1] | {f'{name}, {key}': value for name in others for key, value in found[name][1].items()}


def trained_to(cfg, length):
    """What a figure says of the longest trained length: weights set by hand were not trained."""
    return f'runs are trained to {length}' if made(cfg) == BY_HAND else f'trained to {length}'


def label_tokens(axis, words, inches):
    """Write the tokens along an axis so many inches long; only BoS, EoI, EoS and a few positions where they would run into each other."""
    if len(words) <= 10 * inches:
        axis.set_tick_params(labelrotation=90 if axis.axis_name == 'x' and max(map(len, words)) > 1 else 0)
        return axis.set_ticks(range(len(words)), words, fontsize=6)
    marks = {i: word for i, word in enumerate(words) if word in ('BoS', 'EoI', 'EoS')}
    apart = max(1, len(words) // 8)
    marks |= {i: str(i) for i in range(0, len(words), apart) if all(abs(i - j) > 0.75 * apart for j in marks)}
    axis.set_ticks(list(marks), marks.values(), fontsize=6)


def map_labels(T, inches):
    """What stands along the axes of a map of T tokens that label_tokens has written."""
    what = 'token' if T <= 10 * inches else 'token or position'
    return dict(xlabel=f'key ({what})', ylabel=f'query ({what})')


def problems(task, lengths, n, split='test'):
    """{length: (tokens, targets)}, up to n held-out problems of each."""
    if missing := sorted(set(lengths) - set(task.existing(lengths, None))):
        raise UserError(f'the task has no problems of length {missing[0]}')
    if n < 1:
        raise UserError(f'--n={n}: take at least one problem')
    return {length: (tokens[:n], targets[:n]) for length, (tokens, targets) in
            task.held_out(split, n, lengths, lambda length: train.generator('cpu', split, length)).items()}


def drawn(task, lengths, length, n):
    """(tokens, targets) [n, T] of one length, held out. length 0: the longest of lengths, of a corpus at most 512 tokens."""
    length = length or (min(512, max(lengths)) if task.corpus else max(lengths))
    if task.corpus and not 8 <= length <= 2 ** 13:
        raise UserError(f'--length={length}: this probe makes maps of length x length, for lengths from 8 to 8,192')
    tokens, targets = problems(task, [length], n)[length]
    if task.corpus and tokens.shape[1] < 8:
        raise UserError(f'the text has {tokens.shape[1]} tokens only: take one of 8 or more')
    return tokens, targets


def sequences(task, lengths, length, n):
    """Those tokens row by row, each [1, T] without its padding."""
    return [row[None, :row.nonzero()[-1] + 1] for row in drawn(task, lengths, length, n)[0]]


@torch.no_grad()
def inside(model, tokens):
    """(encoding, q, k [B, H, T, D] before it, state) of every layer."""
    with listening(*(m for block in model.blocks for m in (block.attn.tap_q, block.attn.tap_k, block.attn))) as heard:
        model(tokens)
    layers = zip(heard[::3], heard[1::3], heard[2::3])
    return [(attn.pe, q, k, inputs[2] if len(inputs) == 3 else None) for (_, _, q), (_, _, k), (attn, inputs, _) in layers]


def logits_at(enc, q, k, pos_q, pos_k, state=None):
    """Logits [B, H, Tq, Tk] of queries at pos_q and keys at pos_k, wherever those are, unmasked; of encodings that see distances only."""
    at = dataclasses.replace(enc.at(0, pos_k, state), t=pos_q[None])
    q, k = enc.scaled_qk(q, k, at)
    bias = enc.by_distance(at.distance)
    logits = q @ k.transpose(-2, -1) * enc.scale
    return logits if bias is None else logits + F.pad(bias, (0, 0, 0, 0, 0, logits.shape[1] - len(bias)))


def correlation(x, y):
    """Pearson's r along the last dimension, nan where x or y is constant."""
    x, y = (z.double() - z.double().mean(dim=-1, keepdim=True) for z in (x, y))
    norms = (x.square().sum(dim=-1) * y.square().sum(dim=-1)).sqrt()
    return torch.where(norms > 1e-12 * x.shape[-1], (x * y).sum(dim=-1) / norms, torch.nan)


def number(x, digits=4):
    """A JSON number, None for nan and infinity."""
    return round(float(x), digits) if np.isfinite(float(x)) else None


def head_rows(columns):
    """Rows from {name: [layers, heads]}: one for each head, or, of more than 60, for each layer, with the ends of the first column."""
    first = next(iter(columns.values()))
    layers, heads = first.shape
    if layers * heads <= 60:
        return [dict(layer=i + 1, head=h + 1, **{name: number(x[i, h]) for name, x in columns.items()})
                for i in range(layers) for h in range(heads)]
    return [dict(layer=i + 1, **{name: number(x[i].nanmean()) for name, x in columns.items()},
                 lowest=number(first[i].nan_to_num(torch.inf).min()),
                 highest=number(first[i].nan_to_num(-torch.inf).max())) for i in range(layers)]


def panels(plt, n, width, height):
    """(figure, axes of n panels), three in a row, all of one size in inches."""
    across, down = min(3, n), -(-n // 3)
    fig, axes = plt.subplots(down, across, figsize=(width * across, height * down + 0.5), squeeze=False, layout='constrained')
    for ax in axes.flat[n:]:
        ax.axis('off')
    return fig, axes.flat[:n]


def head_grid(fig, ax, values, label):
    """A picture of values [layers, heads], its colours from the least to the largest, or over 0.01 where these are nearer to each other."""
    known = values[~values.isnan()].tolist() or [0.0]
    ends = dict(vmin=min(*known, max(known) - 0.01), vmax=max(known))
    image = ax.imshow(values.numpy(), aspect='auto', cmap='viridis', interpolation='nearest', **ends)
    for axis, n in ((ax.xaxis, values.shape[1]), (ax.yaxis, values.shape[0])):
        axis.set_ticks(range(0, n, 1 + n // 12), range(1, n + 1, 1 + n // 12))
    ax.set(xlabel='head', ylabel='layer')
    fig.colorbar(image, ax=ax, label=label)


# ---------------------------------------------------------------------------------------------------------------------
# PRISM, appendix B

@torch.no_grad()
def cursors_of(model, tokens):
    """What PRISM's cursors do on tokens [B, T]: a dictionary for every cursor of every layer and head, query cursors first.

    incr, decr, keep, reset, jump [B, T], the last None where there is no copy branch; histogram [B, T, 2T+1] over the offsets -T..T, after
    each token's gates; gamma, alpha, mu.
    """
    layers = [[m for m in block.attn.pe.modules() if isinstance(m, encodings.PRISM)] for block in model.blocks]
    with listening(*(m for m in model.modules() if isinstance(m, encodings.Cursors))) as heard:
        model(tokens)
    found, passes, first = [], iter(heard), 0
    for number, (prism,) in enumerate(layers):
        if prism.layer == 0:
            cursors, (x, _), _ = next(passes)
            reset, step, copy = cursors.gates(x)
            histograms, first = cursors.scan(x, torch.eye(2 * tokens.shape[1] + 1, dtype=x.dtype)), number
            gamma = 1 + F.softplus(cursors.g) if cursors.cfg.prism_sharpen else torch.ones(2 * cursors.count)
        H, C = cursors.cfg.heads, cursors.cfg.prism_cursors
        for family, head, cursor in ((f, h, c) for f in (0, 1) for h in range(H) for c in range(C)):
            i = family * cursors.count + ((number - first) * H + head) * C + cursor
            incr, decr, keep = step[:, i].unbind(dim=-1)
            jump = 1 - copy[:, i // 5, :, -1] if copy is not None and family == 0 and i % 5 == 0 else None
            found.append(dict(layer=number + 1, head=head + 1, cursor=cursor + 1, of=('query', 'key')[family], gamma=gamma[i].item(),
                              alpha=prism.alpha[head, 0, cursor].abs().item(), mu=torch.sigmoid(prism.m[head]).item(), incr=incr, decr=decr,
                              keep=keep, reset=reset[:, i], jump=jump, histogram=histograms[:, i]))
    return sorted(found, key=lambda c: c['of'] == 'key')


def pace(mode, asked):
    """Places that a cursor's mode [B, T] moves with a token, over the tokens `asked` [B, T]: (mean, share of the commonest pace)."""
    moves = mode.diff(dim=1)[asked[:, 1:]]
    values, counts = moves.unique(return_counts=True)
    return moves.double().mean().item(), (counts.max() / counts.sum()).item()


def cursor(model, task, cfg, length=0):
    """Where do PRISM's cursors go? Gates, the mode of every histogram, whole histograms and attention (PRISM Figures 11-17, 19, 20).

    length: the problem length shown beside the longest one trained on, 0: four times that. The table is of that length: gates and moves
    over the answer's tokens, in up to 32 problems. `moves`: places per token that the mode goes; `steady`: share of tokens at which it
    makes its commonest move; `peak`: largest bin; `jump`: mean probability of a jump, where a cursor can copy; `weight`: (1 - mu) |alpha|,
    what the cursor counts in its head. A cursor that holds at every length is steady.
    """
    if not any(isinstance(m, encodings.PRISM) for m in model.modules()):
        raise UserError(f'cursor looks at PRISM\'s cursors, and this run has pe={cfg.pe}: train one with pe=prism')
    trained = max(cfg.train_lengths)
    length = length or 4 * trained
    torch.manual_seed(cfg.seeds[0])
    before = Transformer(cfg).to(train.DTYPES[cfg.dtype]).eval()
    draw = lambda n, problems: task.sample(problems, n, train.generator('cpu', 'test', n))
    (short, _), T = draw(trained, 1), draw(length, 1)[0].shape[1]
    C = sum(m.count for m in model.modules() if isinstance(m, encodings.Cursors))
    tokens, targets = draw(length, max(1, min(32, 2 ** 24 // (C * T * T))))             # the histograms have 4 C T^2 numbers for each
    found, asked = cursors_of(model, tokens), targets != -100
    rows = []
    for c in found:
        moves, steady = pace(c['histogram'].argmax(dim=-1), asked)
        means = {name: round(c[name][asked].mean().item(), 3) for name in ('incr', 'decr', 'keep', 'reset')}
        rows.append(dict({key: c[key] for key in ('layer', 'head', 'cursor', 'of')}, weight=round((1 - c['mu']) * c['alpha'], 3),
                         gamma=round(c['gamma'], 3), **means, moves=round(moves, 3), steady=round(steady, 3),
                         peak=round(c['histogram'].max(dim=-1)[0][asked].mean().item(), 3),
                         **({} if c['jump'] is None else dict(jump=round(c['jump'][asked].mean().item(), 3)))))
    total = sum(row['weight'] for row in rows)
    with torch.no_grad():
        right = (model(tokens)[0].argmax(dim=-1) == targets) | ~asked
    summary = dict(length=length, exact=right.all(dim=1).double().mean().item(),
                   steady=round(sum(r['steady'] * r['weight'] for r in rows) / total, 4))
    figure = lambda plt: cursor_figure(plt, model, before, cfg, task, found, short, tokens, trained, length, summary['exact'])
    return rows, summary, figure


def cursor_figure(plt, model, before, cfg, task, found, short, tokens, trained, length, exact):
    """The figure of `cursor`: gates; modes; the strongest query cursor's histogram; attention. short, tokens: problems of both lengths."""
    weight = lambda c: (1 - c['mu']) * c['alpha']
    strongest = max((c for c in found if c['of'] == 'query'), key=weight)
    T = tokens.shape[1]
    fig, axes = plt.subplots(4, 4, figsize=(14, 16), width_ratios=(1, 1, 1, 0.05), layout='constrained')
    words = lambda row: [task.vocab[i] for i in row.tolist()]
    names = [f'{c["of"][0]} {c["layer"]}.{c["head"]}.{c["cursor"]}' for c in found]
    for row, (when, cursors) in enumerate((('before training', cursors_of(before, short[:1])),
                                           ('after training', cursors_of(model, short[:1])))):
        for ax, gate, title in zip(axes[row], ('incr', 'decr', 'reset'), ('increment', 'decrement', 'reset')):
            image = ax.imshow(torch.stack([c[gate][0] for c in cursors]).numpy(), vmin=0, vmax=1, aspect='auto', cmap='viridis',
                              interpolation='nearest')
            ax.set_title(f'P({title}), {when}')
            ax.set_yticks(range(len(names)) if len(names) <= 32 else [], names if len(names) <= 32 else [], fontsize=6)
            label_tokens(ax.xaxis, words(short[0]), 4)
        axes[row][0].set_ylabel('cursor: query or key, layer.head.number')
        fig.colorbar(image, cax=axes[row][3], label='probability')
    for ax, net, row, title in zip(axes[2], (before, model, model), (short[:1], short[:1], tokens[:1]),
                                   ('before training', f'trained, length {trained}', f'trained, length {length}')):
        for c in cursors_of(net, row):
            mode = c['histogram'][0].argmax(dim=-1) - row.shape[1]
            strength = 0.15 + 0.85 * weight(c) / max(map(weight, found)) if net is model else 0.5
            ax.plot(mode.numpy(), '-' if c['of'] == 'query' else '--', color=QUERY if c['of'] == 'query' else KEY, alpha=strength)
        for of, style, colour in (('query', '-', QUERY), ('key', '--', KEY)):
            ax.plot([], style, color=colour, label=f'{of} cursors' + (' (stronger: weigh more)' if net is model else ''))
        ax.set(title=f'mode of each histogram, {title}', xlabel='token')
        label_tokens(ax.xaxis, words(row[0]), 4)
        ax.legend(fontsize=8)
    axes[2][0].set(ylabel='offset', ylim=[f(ends) for f, ends in zip((min, max), zip(axes[2][0].get_ylim(), axes[2][1].get_ylim()))])
    axes[2][3].axis('off')
    at = '{layer}.{head}'.format(**strongest)
    axes[3][0].imshow(strongest['histogram'][0].T.numpy(), origin='lower', extent=(-0.5, T - 0.5, -T - 0.5, T + 0.5), aspect='auto', vmin=0,
                      vmax=1, cmap='viridis', interpolation='nearest')
    axes[3][0].set(title=f'strongest query cursor, {at}.{strongest["cursor"]}, length {length}', xlabel='token', ylabel='offset')
    for ax, row, n in zip(axes[3][1:], (short[:1], tokens[:1]), (trained, length)):
        weights = attention_maps(model, row)[strongest['layer'] - 1][0, strongest['head'] - 1]
        image = ax.imshow(weights.numpy(), vmin=0, vmax=1, aspect='auto', cmap='viridis', interpolation='nearest')
        ax.set(title=f'attention of head {at}, length {n}', **map_labels(row.shape[1], 4))
        label_tokens(ax.xaxis, words(row[0]), 4)
        label_tokens(ax.yaxis, words(row[0]), 4)
    fig.colorbar(image, cax=axes[3][3], label='probability, attention weight')
    fig.suptitle(f'{titled(cfg)}: exact match {100 * exact:.0f} % at length {length}, trained to {trained}')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# ViPE

ITERATIVE = ('copy', 'parity', 'polynomial', 'reverse')             # tasks with one correct key for each state


def iteration_head(name):
    """(model, cfg) of a Transformer with weights set by hand: the circuit of ViPE Figure 1b and A.2, right at every length up to 1,000.

    Layer 1 measures distances to the anchors: every token attends to EoI, those that cannot see it and EoI itself to BoS, and ViPE's value
    channel (eq. 8) hands over the distance D, so D_1 = t at x_t and D_2 = t - 1 at s_(t-1). Layer 2 matches D_1 = D_2 + 1: a normalized
    vector (D, c) has its largest product with (D', c) at D' = D. Its MLP looks s_t = f(s_(t-1), x_t) up. Neighbouring distances differ by
    1e-7 in that product: float64. The second head of each layer is zero. cfg calls lengths to 16 trained, as the paper's are.
    """
    rules = {'copy': lambda s, x: x, 'parity': lambda s, x: (s + x) % 2, 'polynomial': lambda s, x: (s * x + 1) % 5}
    if name not in rules:
        raise UserError(f'{f"by_hand:{name}".rstrip(":")}: weights are set by hand for {", ".join(rules)} only')
    V = len(train.Config(task=name).the_task.vocab)
    BoS, EoI, EoS, symbols = 1, 2, 3, range(V - 4)
    table = [(EoI, x + 4, x + 4) for x in symbols] + [(s + 4, EoI, EoS) for s in symbols]  # (state, input, next state)
    table += [(s + 4, x + 4, rules[name](s, x) + 4) for s in symbols for x in symbols]
    one, dist, read, write = V, V + 1, V + 2, 2 * V + 2             # the residual stream: token, 1, D, token read, next token
    C = 3 * V + 2 + V % 2                                           # even, for two heads
    cfg = train.Config(task=name, pe='vipe', vipe_s='one', vipe_logn=False, vipe_u=False, vipe_d_p=1, d_model=C, n_head=2, n_layer=2,
                       d_ff=len(table), norm='rmsnorm', dtype='float64', out_dir=BY_HAND_DIR + name)
    model, tokens, unit = Transformer(cfg).double().eval(), torch.arange(V), 1e-3       # D is kept in thousands
    with torch.no_grad():
        for p_name, p in model.named_parameters():
            p.fill_(C ** -0.5 if 'norm' in p_name else 0.0)                             # norms: x / |x|; all else 0
        model.embedding.weight[tokens, tokens] = model.embedding.weight[:, one] = 1.0
        anchor, match = model.blocks
        q, k, v = anchor.attn.qkv.weight.view(3, C, C)                                  # each (to, from)
        q[0, one], q[1, one], q[1, EoI] = 1e3, 2e3, -2e3                                # to BoS; rather to EoI, except from EoI
        k[0, BoS], k[1, EoI] = 1.0, 1.0
        anchor.attn.pe.W_p[0] = unit
        anchor.attn.proj.weight[dist, C // 2] = 1.0                                     # D from the channel behind the values
        q, k, v = match.attn.qkv.weight.view(3, C, C)
        q[0, dist], q[0, one], k[0, dist] = 1.0, unit, 1.0                              # <(D_2 + 1, c), (D_1, c)>: c^2 = 2, for token and
        q[1, one], k[1, one] = 2.0, 1.0                                                 # constant add 1 each to the length of the vector
        q[2, EoI], k[2, dist], k[2, BoS] = -10.0, 1.0, 10.0                             # EoI asks for the smallest D but BoS's: for x_1
        q *= 1e9 * (C // 2) ** 0.5
        v[tokens, tokens] = match.attn.proj.weight[read + tokens, tokens] = 1.0
        for i, (s, x, new) in enumerate(table):                                         # unit i: how strongly x was read, if the token is s
            match.mlp[0].weight[i, [read + x, s, one]] = torch.tensor([1e3, 4e3, -4e3], dtype=torch.float64)
            match.mlp[2].weight[write + new, i] = 1e-3
        model.head.weight[tokens, write + tokens] = 100.0
    return model, cfg


def fewer(cfg, *pair):
    """As many of the problems (tokens [n, T], ...) as all their attention maps have at most 2^26 numbers, at least one."""
    n = max(1, 2 ** 26 // (cfg.n_layer * cfg.heads * pair[0].shape[1] ** 2))
    return [x[:n] for x in pair]


def ladder(cfg, length):
    """(queries, keys) [L]: where EoI, s_1, .., s_(L-1) stand, and the input that each needs next: x_t for s_(t-1), D_1 = D_2 + 1."""
    name, t = cfg.task.partition(':')[0], torch.arange(1, length + 1)
    if name not in ITERATIVE:
        raise UserError(f'{cfg.task} has not one correct key for each state: train copy, parity, polynomial or reverse')
    return length + t, length + 1 - t if name == 'reverse' else t


def by_head(layers):
    """[B, H, L] of every layer -> [layers * H, B, L]."""
    return torch.cat(list(layers), dim=1).transpose(0, 1)


def masses(maps, queries, keys):
    """Attention weights [B, H, T, T] of every layer -> every head's weight from each of L queries to its own key [layers * H, B, L]."""
    return by_head(weights[:, :, queries, keys] for weights in maps)


def attention(model, task, cfg, length=0, n=16, layer=0, head=0):
    """Where does every head look, at the trained length and at a longer one (ViPE Figures 1, 2, 6-8, 10, 11)?

    length: the longer one, 0: 2.5 times the trained one (40 after 16; the paper shows 39), at most the longest of eval_lengths; n: problems
    averaged over. Rows: mean attention weight from the inputs to BoS (x_to_BoS), from the answer's tokens to BoS and to EoI, and from EoI
    and these to the one input that the next state needs (s_to_x_t; iterative tasks); their largest weight; their entropy in nats. Summary:
    the best head's. Figure: one problem; layer, head: only this one, in maps large enough for 100 tokens by name where both are given, 0:
    every one (by_hand: the first head of each layer, the second is zero).
    """
    trained = max(cfg.train_lengths)
    length, rows, shown = length or min(max(cfg.eval_lengths), 5 * trained // 2), [], {}
    if layer > cfg.n_layer or head > cfg.heads:
        raise UserError(f'attention: layer is from 1 to {cfg.n_layer}, head from 1 to {cfg.heads}; 0 for every one')
    layers = [layer] if layer else range(1, cfg.n_layer + 1)
    heads = [head] if head else range(1, 1 + (1 if made(cfg) == BY_HAND else cfg.heads))
    for L, (tokens, targets) in problems(task, sorted({trained, length}), n).items():
        tokens, targets = fewer(cfg, tokens, targets)
        maps, asked = attention_maps(model, tokens), targets != -100
        shown[L] = tokens[0][tokens[0] != 0], {(i, h): maps[i - 1][0, h - 1] for i in layers for h in heads}
        for i, weights in enumerate(maps, 1):
            means = means_of(weights, tokens, asked, task)
            if cfg.task.partition(':')[0] in ITERATIVE:
                means['s_to_x_t'] = masses([weights], *ladder(cfg, L)).mean(dim=(1, 2))
            rows += [dict(length=L, layer=i, head=h + 1, **{name: round(mean[h].item(), 3) for name, mean in means.items()})
                     for h in range(weights.shape[1])]
    summary = dict(trained=trained, length=length, n=len(tokens))
    for name in [name for name in rows[0] if name in ('x_to_BoS', 's_to_EoI', 's_to_x_t', 'largest')]:
        summary |= {f'{name}, length {L}': max(row[name] for row in rows if row['length'] == L) for L in shown}
    return rows, summary, lambda plt: attention_figure(plt, shown, len(layers), len(heads), task, cfg)


def means_of(weights, tokens, asked, task):
    """Means [H] over the queries of attention weights [B, H, T, T]; asked [B, T]: the queries whose next token is part of the answer."""
    of = lambda mass, queries: mass.transpose(1, 2)[queries].mean(dim=0)                # mass [B, H, T]
    is_a = {name: tokens == task.vocab.index(name) for name in ('BoS', 'EoI') if name in task.vocab}
    to = {name: (weights * is_it[:, None, None]).sum(dim=-1) for name, is_it in is_a.items()}
    means = {'x_to_BoS': of(to['BoS'], (asked.cumsum(dim=1) == 0) & ~is_a['BoS'])} if 'BoS' in to else {}
    means |= {f's_to_{name}': of(mass, asked & ~is_a['EoI']) for name, mass in to.items() if 'EoI' in to}
    return means | dict(largest=of(weights.amax(dim=-1), asked), entropy=of(torch.special.entr(weights).sum(dim=-1), asked))


def attention_figure(plt, shown, rows, H, task, cfg):
    """The figure of `attention`: a map for every layer (row), head and length (columns)."""
    longest = max(len(tokens) for tokens, _ in shown.values())
    size = min(10, max(4, longest / 10)) if rows * H == 1 else 4 if rows * H < 5 else 2.4
    columns, marked = H * len(shown), longest > cfg.train_len
    fig, axes = plt.subplots(rows, columns, figsize=(size * columns + 0.8, size * rows + 0.4), squeeze=False, layout='constrained')
    for n, (length, (tokens, maps)) in enumerate(shown.items()):
        words, T = [task.vocab[i] for i in tokens.tolist()], len(tokens)
        for i, ((layer, head), weights) in enumerate(maps.items()):
            ax = axes[i // H][n * H + i % H]
            pixels = F.adaptive_max_pool2d(weights[None, :T, :T], min(T, 300))[0]                      # no line of a large map is lost
            image = ax.imshow(pixels.numpy(), vmin=0, vmax=1, cmap='viridis', interpolation='nearest',
                              extent=(-0.5, T - 0.5, T - 0.5, -0.5))
            ax.set_title(f'head {layer}.{head}, length {length}', fontsize=9)
            if T > cfg.train_len:
                ax.axvline(cfg.train_len - 0.5, color='crimson', lw=0.8)
                ax.axhline(cfg.train_len - 0.5, color='crimson', lw=0.8)
            for axis in (ax.xaxis, ax.yaxis):
                label_tokens(axis, words, size)
    along = map_labels(longest, size)
    fig.supxlabel(along['xlabel'], fontsize=9)
    fig.supylabel(along['ylabel'], fontsize=9)
    fig.colorbar(image, ax=axes, label='attention weight', shrink=0.6)
    trained = trained_to(cfg, max(cfg.train_lengths)) + f' ({cfg.train_len} tokens: red lines)' * marked
    fig.suptitle(f'{titled(cfg)}, {trained}')
    return fig


@torch.no_grad()
def ridge(x, y, penalty=1e-6):
    """Regression of y [N] on x [N, C], scaled to variance 1, with `penalty` times the squared weights -> (w [C], b): y ~ x w + b."""
    x, y = x.double(), y.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    z = (x - mean) / (std := std.clamp(min=1e-9 * std.max() + 1e-30))                   # (N, C)
    w = torch.linalg.solve(z.T @ z / len(z) + penalty * torch.eye(z.shape[1], dtype=z.dtype), z.T @ (y - y.mean()) / len(z)) / std
    return w, y.mean() - mean @ w


def ranks(x):
    """Ranks of x [N] from 1, equal numbers sharing the average of theirs."""
    _, group, count = x.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(dim=0) - (count - 1) / 2)[group].double()


def agreement(y, y_hat):
    """How well y_hat [N] predicts y [N]: RMSE and MAE in y's units, R2 = 1 - squared error / variance, Pearson's and Spearman's r."""
    y, y_hat = y.double(), y_hat.double()
    pearson = lambda a, b: torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    error = y_hat - y
    return dict(rmse=error.square().mean().sqrt().item(), mae=error.abs().mean().item(),
                r2=1 - (error.square().mean() / y.var(correction=0)).item(),
                pearson=pearson(y, y_hat), spearman=pearson(ranks(y), ranks(y_hat)))


def hidden_states(model, task, lengths, n, split):
    """Every token of n problems of each length: vectors [N, C] after the embedding and each layer; position; distance to EoI, 0 before it
    [N].
    """
    found = []
    for tokens, _ in problems(task, lengths, n, split).values():
        with listening(model.tap_resid, *(block.tap_resid for block in model.blocks)) as heard, torch.no_grad():
            model(tokens)
        position = torch.arange(tokens.shape[1]).expand(tokens.shape)
        EoI = (tokens == task.vocab.index('EoI')).int().argmax(dim=1, keepdim=True) if 'EoI' in task.vocab else tokens.shape[1]
        real = tokens != 0
        found.append((position[real], (position - EoI).clamp(min=0)[real], *(x[real] for _, _, x in heard)))
    position, distance, *streams = map(torch.cat, zip(*found))
    return streams, {'position': position, 'distance': distance}


def linear(model, task, cfg, n=32):
    """How exactly do hidden states hold the position, and the distance to EoI (ViPE Figure 5, Tables 1, 4, 5)?

    A ridge regression of each from the residual stream after each layer (0: the embedding; the paper's z_n is attention's output), fitted on
    n held-out problems of every trained length (the paper: on the training data), scored on other problems of the trained lengths and on the
    longer ones of eval_lengths. rmse, mae in tokens. The distance is that of the tokens behind EoI. (Spearman's r can be below 1 beside an R2 of 1: rounding ranks equal distances.) The paper reports
    position from layer 1 and distance from layer 2 of 3: for NoPE R2 0.975 and 0.891, then 0.864 and 0.814 on longer problems; RoPE 0.943
    and 0.869, then 0.542 and 0.667; APE 1.000 and 0.891, then 0.721 and 0.614.
    """
    longer = [length for length in cfg.eval_lengths if length > max(cfg.train_lengths)]
    if not longer:
        raise UserError(f'linear wants lengths beyond trained ones, eval_lengths={cfg.eval_lengths} has none: train with longer ones')
    fit = hidden_states(model, task, cfg.train_lengths, n, 'eval')
    parts = {'trained': hidden_states(model, task, cfg.train_lengths, n, 'test'), 'longer': hidden_states(model, task, longer, n, 'test')}
    rows, errors = [], {}
    for target, first in (('position', 0), ('distance', 1)) if 'EoI' in task.vocab else (('position', 0),):
        asked = lambda hidden, layer: (hidden[0][layer][hidden[1][target] >= first], hidden[1][target][hidden[1][target] >= first])
        for layer in range(len(fit[0])):
            w, b = ridge(*asked(fit, layer))
            for part, hidden in parts.items():
                x, y = asked(hidden, layer)
                y_hat = x.double() @ w + b
                rows.append(dict(target=target, layer=layer, lengths=part,
                                 **{key: round(value, 4) for key, value in agreement(y, y_hat).items()}))
                errors[target, layer, part] = (y.bincount((y_hat - y).square()) / y.bincount()).sqrt()
    summary = {f'{row["target"]} from layer {row["layer"]}, r2 {row["lengths"]}': row['r2'] for row in rows
               if row['layer'] == min(len(model.blocks), 1 + (row['target'] == 'distance'))}
    return rows, summary, lambda plt: linear_figure(plt, errors, cfg)


def linear_figure(plt, errors, cfg):
    """The figure of `linear`: error by position and by distance to EoI, a line for each layer, dashed on the trained lengths."""
    targets = list(dict.fromkeys(target for target, _, _ in errors))
    fig, axes = plt.subplots(1, len(targets), figsize=(5 * len(targets), 4), squeeze=False, layout='constrained')
    for ax, target in zip(axes[0], targets):
        for (of, layer, part), error in errors.items():
            if of == target:
                ax.plot(error.numpy(), '--' if part == 'trained' else '-', color=COLOURS[layer % 6], lw=1 + (part == 'longer'),
                        label=f'layer {layer}' if part == 'longer' else None)
        ax.plot([], 'k-', lw=2, label='longer lengths')
        ax.plot([], 'k--', lw=1, label='trained lengths')
        seen = len(errors[target, 0, 'trained']) - 1
        ax.axvline(seen, color='crimson', lw=1)
        ax.set(ylabel='root mean squared error (tokens)', title='absolute position' if target == 'position' else 'distance to EoI',
               xlabel=f'{"position" if target == "position" else "distance to EoI"} (tokens); {trained_to(cfg, seen)} (red line)')
    axes[0][0].legend(fontsize=8)
    fig.suptitle(f'{titled(cfg)}: linear probes')
    return fig


def alignment(model, task, cfg, length=0, n=32):
    """Does attention still find x_t from s_(t-1) at lengths where the answers are wrong (ViPE section 3.1, A.3)?

    length: the longest one, 0: the longest of eval_lengths; n: problems of each length. Rows: exact match; accuracy of the states, of those
    that are predicted at positions within the trained total length (seen) and beyond (unseen); for every layer.head the mean weight on the
    correct key; peak: share of the best head's queries whose largest weight is on it. Summary: the length to which, from the longest
    trained one on, 90 % of the states are right (right_to) and the best head has half its weight on the correct key (aligned_to), 0: not
    even there; A.3's two notions apart: accuracy in longer problems at seen positions (longer context only) and at unseen ones; and where
    the peak is on x_t, and where not.
    """
    trained = max(cfg.train_lengths)
    length, found = length or max(cfg.eval_lengths), {}
    ladder(cfg, length)                                                                 # a task with correct keys, or a UserError
    lengths = sorted({*(min(x, length) for x in (trained, trained + 1)), *np.linspace(1, length, 24).round().astype(int).tolist()})
    for L, pair in problems(task, lengths, n).items():
        found[L] = on_the_ladder(model, cfg, L, *fewer(cfg, *pair))
    names = [f'{layer}.{head}' for layer in range(1, cfg.n_layer + 1) for head in range(1, cfg.heads + 1)]
    best = sum(f['mass'].mean(dim=1).sum(dim=1) for L, f in found.items() if L <= trained).argmax().item()          # every state alike
    mean = lambda x: round(x.double().mean().item(), 4) if x.numel() else None
    rows = []
    for L, f in found.items():
        row = dict(length=L, exact=mean(f['exact']), states=mean(f['right']), seen=mean(f['right'][f['seen']]),
                   unseen=mean(f['right'][~f['seen']]),
                   **{name: mean(mass) for name, mass in zip(names, f['mass'])}, peak=mean(f['peak'][best]))
        rows.append({key: value for key, value in row.items() if value is not None})
    tail = [row for row in rows if row['length'] >= trained]
    holds_to = lambda key, least: max([0, *(row['length'] for i, row in enumerate(tail) if all(r[key] >= least for r in tail[:i + 1]))])
    over = lambda part: mean(torch.cat([f['right'][part(f)] for L, f in found.items() if L > trained] or [torch.empty(0)]))
    summary = dict(n=min(len(f['exact']) for f in found.values()), head=names[best], right_to=holds_to('states', 0.9),
                   aligned_to=holds_to(names[best], 0.5))
    summary |= {f'accuracy beyond, {where}': over(part) for where, part in {
        'seen positions': lambda f: f['seen'], 'unseen positions': lambda f: ~f['seen'],
        'peak on x_t': lambda f: f['peak'][best], 'peak elsewhere': lambda f: ~f['peak'][best]}.items()}
    return rows, summary, lambda plt: alignment_figure(plt, rows, found, names, best, cfg)


def on_the_ladder(model, cfg, L, tokens, targets):
    """For the states of problems [B, T] of length L: every head's weight on the correct key [heads, B, L]; is it the largest; is the state
    right [B, L]; is its position one of those trained [B, L]; and is the whole answer right [B].
    """
    queries, keys = ladder(cfg, L)
    maps, right = attention_maps(model, tokens), answers_right(model, tokens, targets)
    peak = by_head(weights[:, :, queries].argmax(dim=-1) == keys for weights in maps)
    return dict(mass=masses(maps, queries, keys), peak=peak, right=right[:, queries],
                seen=(queries + 1 < cfg.train_len).expand(len(tokens), L), exact=(right | (targets == -100)).all(dim=1))


@torch.no_grad()
def answers_right(model, tokens, targets):
    """Which of the answer's tokens [B, T] are predicted right, all before them given."""
    return torch.cat([model(x)[0].argmax(dim=-1) for x in tokens.split(max(1, 2 ** 15 // tokens.shape[1]))]) == targets


def alignment_figure(plt, rows, found, names, best, cfg):
    """The figure of `alignment`: weights on the correct key beside accuracy; seen and unseen positions; the best head, state by state."""
    trained, longest = max(cfg.train_lengths), max(found)
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.5), layout='constrained')
    draw = lambda ax, key, *style, **kw: ax.plot(*zip(*((row['length'], row[key]) for row in rows if key in row)), *style, **kw)
    for i, name in enumerate(names):
        draw(axes[0], name, color=COLOURS[0] if i == best else '0.7', lw=2 if i == best else 1,
             label=f'weight of head {name}' if i == best else None)
    if len(names) > 1:
        axes[0].plot([], color='0.7', lw=1, label='weight of the other heads')
    draw(axes[0], 'states', 'k--', label='accuracy of the states')
    draw(axes[0], 'exact', 'k:', label='exact match')
    axes[0].set(title='attention to the correct key', ylabel='attention weight, accuracy')
    draw(axes[1], 'seen', 'o-', ms=3, color=COLOURS[2], label='seen positions: only the context is longer')
    draw(axes[1], 'unseen', 'o-', ms=3, color=COLOURS[1], label='unseen positions')
    axes[1].set(title='where the states are predicted', ylabel='accuracy')
    for ax in axes[:2]:
        ax.axvline(trained, color='crimson', lw=1)
        ax.set(ylim=(-0.03, 1.03), xlabel=f'input length; {trained_to(cfg, trained)} (red line)')
        ax.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.15), ncols=2)
    grid = torch.full((longest, len(found)), float('nan'))
    for i, (L, f) in enumerate(found.items()):
        grid[:L, i] = f['mass'][best].mean(dim=0)
    edges = [0.5, *((a + b) / 2 for a, b in zip(list(found), list(found)[1:])), longest + 0.5]
    image = axes[2].pcolormesh(edges, np.arange(longest + 1) + 0.5, grid.numpy(), vmin=0, vmax=1, cmap='viridis')
    axes[2].axvline(trained, color='crimson', lw=1)
    last = [(L, cfg.train_len - 1.5 - L) for L in range(trained, min(longest + 1, cfg.train_len - 1))]  # query L + t, train_len - 2 at most
    if last:
        axes[2].plot(*zip(*last), color='white', lw=1, label='last seen position')
        axes[2].legend(fontsize=8, loc='upper left', facecolor='0.6')
    axes[2].set(title=f'head {names[best]}, weight on the correct key', xlabel='input length', ylabel='t of the state $s_t$')
    fig.colorbar(image, ax=axes[2], label='attention weight')
    fig.suptitle(f'{titled(cfg)}')
    return fig


def squeeze(model, task, cfg, length=0, n=256):
    """Do longer inputs break because distances are new? Accuracy with positions squeezed into the trained range.

    length: the longest one, 0: the longest of eval_lengths; n: problems of each length. Of T tokens, more than the T_0 trained on, token t
    stands at t (T_0 - 1) / (T - 1), a fraction (position interpolation, Chen et al. 2023). Rows: exact match and accuracy of the supervised
    tokens, as it is; squeezed; and, with the usual positions, keys T_0 or more tokens back hidden. Squeezing shortens every distance; hiding
    only takes away those that are longer than any in training. An encoding that reads no positions, like NoPE, is not changed by squeezing.
    """
    length, rows = length or max(cfg.eval_lengths), []
    lengths = sorted({*cfg.train_lengths, *cfg.eval_lengths} & set(range(1, length + 1)))
    for L, (tokens, targets) in problems(task, lengths, n).items():
        T = tokens.shape[1]
        t = torch.arange(T)
        pos = t * min(1.0, (cfg.train_len - 1) / (T - 1))
        far = t[:, None] - t >= cfg.train_len
        hide = other_logits(model, lambda enc, q, k, state, logits, far=far: logits.masked_fill(far, -torch.inf))
        row = dict(length=L)
        for name, at, context in (('', None, contextlib.nullcontext()), (', squeezed', pos, contextlib.nullcontext()), (', hidden', None, hide)):
            with torch.no_grad(), context:
                right = model(tokens, pos=at)[0].argmax(dim=-1) == targets
            row['exact' + name] = number((right | (targets == -100)).all(dim=1).double().mean())
            row['tokens' + name] = number(right.sum() / (targets != -100).sum())
        rows.append(row)
    beyond = [row for row in rows if row['length'] > max(cfg.train_lengths)]
    summary = {key: number(torch.tensor([row[key] for row in beyond]).mean()) for key in rows[0] if key != 'length' and beyond}
    return rows, summary, lambda plt: squeeze_figure(plt, rows, cfg)


def squeeze_figure(plt, rows, cfg):
    """The figure of `squeeze`: exact match and tokens by length, a panel each."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout='constrained', sharey=True)
    lengths = [row['length'] for row in rows]
    for ax, key, title in zip(axes, ('exact', 'tokens'), ('exact match', 'supervised tokens')):
        ax.plot(lengths, [row[key] for row in rows], 'o-', ms=3, color=COLOURS[1], label='positions 0, 1, 2, ...')
        ax.plot(lengths, [row[f'{key}, squeezed'] for row in rows], 'o-', ms=3, color=COLOURS[0], label='squeezed into the trained range')
        ax.plot(lengths, [row[f'{key}, hidden'] for row in rows], ':', color='black', label='keys beyond the trained distance hidden')
        ax.axvline(max(cfg.train_lengths), color='crimson', lw=1)
        ax.set(title=title, xlabel=f'input length; {trained_to(cfg, max(cfg.train_lengths))} (red line)', ylim=(-0.03, 1.03))
    axes[0].set_ylabel('share right')
    fig.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=3, fontsize=9)
    fig.suptitle(titled(cfg))
    return fig


def steps(model, task, cfg, n=512, distances='1,3,7', beside=''):
    """How long do the first states stay right while the input grows, at positions that were trained (ViPE Figure 4)?

    distances: of s_(t-1) from EoI, a comma list; n: problems of each length; beside: further runs, a comma list. Rows: accuracy of the next
    state predicted there, at every input length at which this is still within the trained total length. Only the context is longer than in
    training.
    """
    runs = besides(model, cfg, beside)
    for name, (_, other) in runs.items():
        if other.train_len != cfg.train_len:
            raise UserError(f'{name} was trained to {other.train_len} tokens, this run to {cfg.train_len}: not to be compared')
    try:
        wanted = sorted({int(d) for d in distances.split(',')})
    except ValueError:
        raise UserError(f'--distances={distances}: whole numbers, as in 1,3,7') from None
    last = cfg.train_len - 3 - wanted[0]  # query L + 1 + d, target behind it, within train_len tokens
    if wanted[0] < 0 or last < wanted[0] + 1:
        raise UserError(f'--distances={distances}: from 0 on, and some within the trained {cfg.train_len} tokens')
    ladder(cfg, last)  # a task with a state for every input, or a UserError
    rows = []
    for L, (tokens, targets) in problems(task, range(1, last + 1), n).items():
        right = {name: answers_right(net, tokens, targets).double().mean(dim=0) for name, (net, _) in runs.items()}
        within = [d for d in wanted if d < L and L + d + 2 < cfg.train_len]
        rows.append({'length': L} | {f'{name} d={d}': round(right[name][L + 1 + d].item(), 4) for d in within for name in runs})
    trained = max(cfg.train_lengths)
    summary = {}
    for key in [f'{name} d={d}' for d in wanted for name in runs]:
        for where, lengths in (('trained lengths', range(trained + 1)), ('longer', range(trained + 1, last + 1))):
            found = [row[key] for row in rows if row['length'] in lengths and key in row]
            summary[f'{key}, {where}'] = round(sum(found) / len(found), 4) if found else None
    return rows, summary, lambda plt: steps_figure(plt, rows, wanted, list(runs), trained, cfg)


def steps_figure(plt, rows, distances, names, trained, cfg):
    """The figure of `steps`: a panel for each distance, a line for each run."""
    fig, axes = plt.subplots(1, len(distances), figsize=(4.4 * len(distances), 3.6), sharex=True, sharey=True, squeeze=False,
                             layout='constrained')
    for ax, d in zip(axes[0], distances):
        for i, name in enumerate(names):
            found = [(row['length'], row[f'{name} d={d}']) for row in rows if f'{name} d={d}' in row]
            if found:
                ax.plot(*zip(*found), marker='o', ms=3, label=name, **(style_of(name) or dict(color=COLOURS[i % 6])))
        ax.axvline(trained, color='crimson', lw=1)
        ax.set(title=f'next state after the one at distance {d} from EoI', ylim=(-0.03, 1.03),
               xlabel=f'input length; {trained_to(cfg, trained)} (red line)')
    axes[0][0].set_ylabel('accuracy of the next state')
    axes[0][0].legend(fontsize=8)
    fig.suptitle(f'{cfg.task}: states at trained positions in longer contexts')
    return fig


@torch.no_grad()
def first_attention(model, tokens, cfg):
    """The first attention layer: weights [B, H, T, T], values v [B, H, T, D], averages z = weights @ v [B, H, T, D]."""
    block = model.blocks[0]
    with listening(block.norm_1, block.attn.tap_logits, block.attn.tap_head_out) as heard:
        model(tokens)
    (_, _, x), (_, _, logits), (_, _, z) = heard
    v = block.attn.project(x)[2].unflatten(-1, (cfg.heads, -1)).transpose(1, 2)
    if not torch.equal(block.attn.pe.value(v, block.attn.pe.at(0, torch.arange(tokens.shape[1]))), v):
        raise UserError(f'{cfg.pe} turns the values by their positions, so that z is no average of them: take another encoding')
    return logits.softmax(dim=-1), v, z[..., :v.shape[-1]]                              # ViPE's distance code stands behind the values


def coordinate_statistics(z):
    """Over the coordinates of z [.., T, d] (eq. 3): mean [.., T], variance [.., T], mean of z_(n+1) - z_n [.., T - 1]."""
    return z.mean(dim=-1), z.var(dim=-1, correction=0), z.mean(dim=-1).diff(dim=-1)


def proposition_1(n, mu, var, mu_2, var_2):
    """Eq. 4: the statistics of z_n under uniform weights, of independent values with mean mu and variance var, at BoS mu_2 and var_2."""
    return mu + (mu_2 - mu) / n, (var_2 + (n - 1) * var) / n ** 2, -(mu_2 - mu) / (n * (n + 1))


def stats(model, task, cfg, length=0, n=64):
    """Do hidden-state statistics tell the position, as Proposition 1 says of NoPE (ViPE eq. 2-4, Figure 16)?

    Rows: mean and variance (var) over the coordinates of the first attention layer's output z_n (all heads), and mean of z_(n+1) - z_n
    (diff): measured; with this model's values under uniform weights (1/n, eq. 2); and by eq. 4 (eq4), whose mu, sigma, mu_2, sigma_2 are
    those of the values, at BoS for the latter two. Averages over n problems of `length` (0: the longest trained), n counted from 1. Eq. 4
    takes values for independent between positions: those of p symbols repeat, so z_n goes to their mean vector, whose variance stays
    (sigma^2 / p if they are independent of each other). Summary: mean absolute errors of eq. 4.
    """
    if 'BoS' not in task.vocab:
        raise UserError(f'Proposition 1 is about sequences that begin with BoS, and those of {cfg.task} do not')
    length = length or max(cfg.train_lengths)
    tokens, = fewer(cfg, problems(task, [length], n)[length][0])
    v, z = (x.transpose(1, 2).flatten(2).double() for x in first_attention(model, tokens, cfg)[1:])                     # (B, T, H D)
    if not v.any():
        raise UserError(f'every value of the first layer of {titled(cfg)} is 0, and so is z_n: take another run')
    place = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64)                   # (T,)
    mu, var, mu_2, var_2 = v[:, 1:].mean(), v[:, 1:].var(correction=0), v[:, 0].mean(), v[:, 0].var(correction=0)
    curves = {'measured': coordinate_statistics(z), 'uniform': coordinate_statistics(v.cumsum(dim=1) / place[:, None])}
    curves = {name: [x.mean(dim=0) for x in found] for name, found in curves.items()}
    curves['eq. 4'] = proposition_1(place, mu, var, mu_2, var_2)
    labels = ('mean', 'variance', 'difference')
    rows = []
    for i in np.linspace(0, tokens.shape[1] - 1, min(48, tokens.shape[1])).round().astype(int).tolist():
        values = {label + of: found[part][i].item() for part, label in enumerate(('mean', 'var', 'diff'))
                  for of, found in zip(('', ' 1/n', ' eq4'), curves.values()) if i < len(found[part])}
        rows.append(dict(n=i + 1, token=task.vocab[tokens[0, i]]) | short(values))
    summary = dict(length=length, n=len(tokens), mu=mu.item(), sigma=var.sqrt().item(), mu_2=mu_2.item(), sigma_2=var_2.sqrt().item())
    error = lambda found, of: (found - of[:len(found)]).abs().mean().item()
    summary |= {f'error of eq. 4, {label}, {name}': error(curves[name][part], curves['eq. 4'][part])
                for part, label in enumerate(labels) for name in ('measured', 'uniform')}
    anchor = (tokens[0] == task.vocab.index('EoI')).int().argmax().item() + 1 if 'EoI' in task.vocab else None
    return rows, short(summary), lambda plt: stats_figure(plt, curves, labels, anchor, f'{titled(cfg)}, length {length}')


def short(row):
    """The floats of a row, to four digits."""
    return {key: float(f'{x:.4g}') if type(x) is float else x for key, x in row.items()}


def stats_figure(plt, curves, labels, anchor, title):
    """The figure of `stats`: mean, variance and difference by position."""
    fig, axes = plt.subplots(1, 3, figsize=(13, 4), layout='constrained')
    names = {'measured': 'measured', 'uniform': 'its values under uniform weights', 'eq. 4': 'Proposition 1 (eq. 4)'}
    for part, (ax, label) in enumerate(zip(axes, labels)):
        for (name, found), colour, style in zip(curves.items(), (*COLOURS[:2], 'black'), ('-', '-', '--')):
            y = found[part][:len(curves['measured'][part])]
            ax.plot(np.arange(1, len(y) + 1), y.numpy(), style, color=colour, label=names[name])
        if anchor:
            ax.axvline(anchor, color='0.5', lw=1)
        ax.locator_params(axis='x', integer=True)
        ax.set(title={'mean': 'mean of $z_n$', 'variance': 'variance of $z_n$', 'difference': 'mean of $z_{n+1} - z_n$'}[label],
               xlabel='position n' + (' (grey line: EoI)' if anchor else ''), ylabel=f'{label} over the coordinates')
    fig.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc='outside lower center', ncols=3)
    fig.suptitle(title)
    return fig


def prefix(model, task, cfg, length=0, n=16):
    """Does the first layer's output tell what stands in the prefix, and nothing else: z_n = V beta_n (ViPE Proposition 2, D.1)?

    beta_n: the attention that position n pays to each token of the vocabulary, V: the tokens' values. Rows: for each head the largest
    |z_n - V beta_n| over n problems of `length` (0: the longest trained), relative to the largest |z_n|; then D.1's cases: how far two
    prefixes are apart in their shares of tokens (beta_uniform), in this model's beta, and in z, relative to the larger. NoPE cannot tell
    apart what has equal shares; with RoPE, ALiBi and others that act on the weights z = V beta still holds, but beta depends on the order.
    """
    length = length or max(cfg.train_lengths)
    (tokens,), block, C = fewer(cfg, problems(task, [length], n)[length][0]), model.blocks[0], len(task.vocab)
    with torch.no_grad():
        V = block.attn.project(block.norm_1(model.embedding.weight))[2].unflatten(-1, (cfg.heads, -1)).transpose(0, 1)     # (H, C, D)
    gap = lambda a, b: ((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-30)).item()

    def betas(tokens):
        weights, v, z = first_attention(model, tokens, cfg)
        if gap(V[:, tokens].transpose(0, 1), v) > 1e-4:
            raise UserError(f'Proposition 2 needs values of the token alone; {cfg.pe} adds positions to the embeddings: take another')
        return weights @ F.one_hot(tokens, C).to(weights.dtype)[:, None], z  # (B, H, T, C), (B, H, T, D)

    beta, z = betas(tokens)
    rows = [dict(case=f'z = V beta, head {h + 1}', z=gap(z[:, h], beta[:, h] @ V[h])) for h in range(cfg.heads)]
    summary = dict(n=len(tokens), error=max(row['z'] for row in rows))
    for first, m, second, k in cases_of_D_1(task):
        one, other = (torch.tensor([[task.vocab.index(word) for word in words]]) for words in (first, second))
        shares = [F.one_hot(x[0, :i], C).double().mean(dim=0) for x, i in ((one, m), (other, k))]
        (beta, z), (beta_, z_) = betas(one), betas(other)
        rows.append(dict(case=' '.join(first[:m]) + '  |  ' + ' '.join(second[:k]), beta_uniform=gap(*shares),
                         beta=gap(beta[0, :, m - 1], beta_[0, :, k - 1]), z=gap(z[0, :, m - 1], z_[0, :, k - 1])))
    return [short(row) for row in rows], summary, lambda plt: prefix_figure(plt, rows, cfg)


def cases_of_D_1(task):
    """D.1's sequences, of this task's symbols: (tokens, m, other tokens, k), is position m of the one like position k of the other?"""
    # '1 2 3 4', or fewer
    words = [word for word in task.vocab[1:] if word not in ('BoS', 'EoI', 'EoS') and word.isprintable() and word.strip()][:4]
    a, b, *rest = words
    n, swapped = len(words), rest or [a]
    cases = [([a] * 4, 1, [a] * 4, 4), (words * 2, n, words * 2, 2 * n)]
    if 'BoS' in task.vocab:
        cases += [(['BoS', *first], m + 1, ['BoS', *second], k + 1) for first, m, second, k in cases]
        cases += [(['BoS', a, b, *swapped], 3 + len(swapped), ['BoS', b, a, *swapped], 3 + len(swapped))]
    return cases


def prefix_figure(plt, rows, cfg):
    """The figure of `prefix`: D.1's cases."""
    cases = [row for row in rows if 'beta' in row]
    fig, ax = plt.subplots(figsize=(9, 0.6 * len(cases) + 1.5), layout='constrained')
    for i, key in enumerate(('beta_uniform', 'beta', 'z')):
        label = {'beta_uniform': 'shares of tokens', 'beta': 'beta: attention to each token', 'z': 'z: output of layer 1'}[key]
        ax.barh(np.arange(len(cases)) + 0.25 * (i - 1), [row[key] for row in cases], 0.22, color=COLOURS[i], label=label)
    ax.set_yticks(range(len(cases)), [row['case'] for row in cases], fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel='how far apart the two prefixes are, relative to the larger',
           title=f'{titled(cfg)}: which prefixes layer 1 can tell apart')
    ax.legend(fontsize=8)
    return fig


@contextlib.contextmanager
def moved_from_first(model, offset):
    """Within, every token but the first stands at a position `offset` further from the first one: the order and the causal mask stay."""
    def moved(pos):
        pos = torch.cat([pos[:1] - offset, pos[1:]])
        return pos - pos.min().clamp(max=0)
    enc = model.blocks[0].attn.pe
    embed = enc.embed
    hooks = [block.register_forward_pre_hook(lambda block, inputs: (inputs[0], moved(inputs[1]), *inputs[2:])) for block in model.blocks]
    enc.embed = lambda x, pos: embed(x, moved(pos))
    try:
        yield
    finally:
        del enc.embed
        for hook in hooks:
            hook.remove()


def shift(model, task, cfg, length=0, offsets='', n=32):
    """Does attention to x_t move when every token stands nearer to BoS, or further, so that D_1 counts wrong (ViPE Figure 9, RoPE)?

    offsets: places added to every token's distance from BoS, a comma list, 0,-2,-4,-6 by default; the positions of all others among
    themselves stay. length: 0: the longest trained; n: problems. Rows: for every head and offset its mean weight on the correct key (x_t);
    on x_(t - offset), where D_1 = D_2 + 1 now (moved); how many inputs to the right of x_t its largest weight among the inputs lies (peak);
    all over the states that have both keys. The summary names the head that looks at x_t most, and says how many states are right.
    """
    length = length or max(cfg.train_lengths)
    queries, keys = (x[1:] for x in ladder(cfg, length))                                # of s_1, s_2, ..; EoI itself has no D_2 to compare
    if set(cfg.pe.split('+')) <= {'nope', 'prism'} and not cfg.prism_absolute:
        raise UserError(f'{cfg.pe} sees no positions, so there is nothing to shift: take a run with rope or another encoding')
    try:
        offsets = [int(offset) for offset in offsets.split(',')] if offsets else [x for x in (0, -2, -4, -6) if -x < max(1, length - 1)]
    except ValueError:
        raise UserError(f'--offsets={offsets}: whole numbers, as in 0,-2,-4') from None
    if not all(((keys - offset >= 1) & (keys - offset <= length)).any() for offset in offsets):
        raise UserError(f'--offsets={",".join(map(str, offsets))} go beyond the {length} inputs: take smaller ones')
    tokens, targets = fewer(cfg, *problems(task, [length], n)[length])
    rows = [dict(head=f'{layer}.{head}') for layer in range(1, cfg.n_layer + 1) for head in range(1, cfg.heads + 1)]
    summary, shown = dict(length=length, n=len(tokens)), {}
    for offset in offsets:
        with moved_from_first(model, offset):
            maps, right = attention_maps(model, tokens), answers_right(model, tokens, targets)
        both = (keys - offset >= 1) & (keys - offset <= length)
        q, k = queries[both], keys[both]
        on_x_t, on_moved = masses(maps, q, k), masses(maps, q, k - offset)              # (heads, B, L)
        peak = by_head(weights[:, :, q, 1:length + 1].argmax(dim=-1) + 1 - k for weights in maps)
        for i, row in enumerate(rows):
            row |= {f'{name} {offset:+d}': round(x[i].double().mean().item(), 4)
                    for name, x in (('x_t', on_x_t), ('moved', on_moved), ('peak', peak))}
        summary[f'states right {offset:+d}'] = round(right[:, queries].double().mean().item(), 4)
        shown[offset] = [weights[0] for weights in maps]
    best = max(rows, key=lambda row: row[f'moved {min(offsets, key=abs):+d}'])
    summary |= dict(head=best['head']) | {key: value for key, value in best.items() if key.startswith('peak')}
    best = best['head']
    return rows, summary, lambda plt: shift_figure(plt, shown, [task.vocab[i] for i in tokens[0].tolist()], length, best, cfg)


def shift_figure(plt, shown, words, length, best, cfg):
    """The figure of `shift`: the best head's attention from the states to the input at every offset."""
    fig, axes = plt.subplots(1, len(shown), figsize=(3.6 * len(shown) + 0.8, 4), squeeze=False, layout='constrained')
    layer, head = map(int, best.split('.'))
    for ax, (offset, maps) in zip(axes[0], shown.items()):
        image = ax.imshow(maps[layer - 1][head - 1, length + 1:-1, :length + 2].numpy(), vmin=0, vmax=1, cmap='viridis',
                          interpolation='nearest')
        queries, keys = ladder(cfg, length)
        ax.plot(keys.numpy(), queries.numpy() - length - 1, '.', color='crimson', ms=3)
        label_tokens(ax.xaxis, words[:length + 2], 3)
        label_tokens(ax.yaxis, words[length + 1:-1], 3)
        ax.set(title=f'distance to BoS {offset:+d}', xlabel=map_labels(length + 2, 3)['xlabel'])
    axes[0][0].set_ylabel(map_labels(length + 2, 3)['ylabel'])
    fig.colorbar(image, ax=axes, label='attention weight', shrink=0.8)
    fig.suptitle(f'{titled(cfg)}: head {best}; dots: the correct keys')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# the Toeplitz study

def held_out_problems(task, cfg, length, n):
    """(length, tokens [n, T], targets [n, T]) of up to n held-out problems; length 0: the longest one trained on."""
    length = length or max(cfg.train_lengths)
    return length, *problems(task, [length], n)[length]


def scoring(models, task, length, tokens, targets):
    """(score(model), its name): of a corpus minus the loss; else exact match, or, where a model has 0, the tokens right."""
    of = lambda metric, scale: lambda model: train.evaluate(model, task, {length: (tokens, targets)})[length][metric] * scale
    if task.corpus:
        return of('loss', -1), 'loss (nats)'
    exact = of('exact', 100)
    return (exact, 'exact match (%)') if all(map(exact, models)) else (of('token', 100), 'tokens right (%)')


def concentration(drops):
    """How unevenly drops [.., H] fall on the heads, those below 0 taken as 0: a dictionary of tensors [..], nan where nothing drops.

    share: of the largest one in their sum; gini: mean difference of two of them over twice their mean, from 0 to 1 - 1/H; effective: (sum
    d)^2 / sum d^2, from 1, all on one head, to H.
    """
    d = drops.clamp(min=0)
    total, H = d.sum(dim=-1), d.shape[-1]
    gini = (d[..., :, None] - d[..., None, :]).abs().sum(dim=(-2, -1)) / (2 * H * total)
    return dict(share=d.amax(dim=-1) / total, gini=gini, effective=total ** 2 / (d ** 2).sum(dim=-1))


def heads(model, task, cfg, length=0, n=512, beside=''):
    """Which heads does the answer hang on, and is it a single one? Zeroes one head at a time (the Toeplitz study, section 4.3; Figures 4, 7, 9-12).

    length: of the problems, 0: the longest trained; n: how many, held out; beside: further runs of the task, a comma list. A row for each
    layer: `drop 1`, `drop 2`, ... of exact match without that head, in points (where a run has 0 anyway: of the tokens right; of a corpus:
    rise of the loss, in nats); `share`: of the largest drop in the layer's sum, `gini` (from 0 to 1 - 1/H) and `effective`, the number of
    heads that carry it: share near 1 with a large drop is the single-head deposit (by_hand: it is each layer's first head). Drops below 0
    count as 0 there; where none is above 0, they are empty. Summary: the same over all heads.
    """
    runs = besides(model, cfg, beside)
    for name, (net, _) in runs.items():
        if net.blocks[0].attn.heads == 1:
            raise UserError(f'heads compares the heads of a layer, and {name if beside else "this run"} has one: '
                                  'train it with more, --n_head=4')
    length, *problems = held_out_problems(task, cfg, length, n)
    score, unit = scoring([net for net, _ in runs.values()], task, length, *problems)
    scores = {name: (score(net), without_each_head(net, score)) for name, (net, _) in runs.items()}
    rows, summary = side_by_side({name: drops_of(base, base - each) for name, (base, each) in scores.items()})
    title = f'{titled(cfg) if len(runs) == 1 else cfg.task}, length {length}'
    return rows, dict(length=length, n=len(problems[0]), unit=unit) | summary, lambda plt: heads_figure(plt, scores, unit, title)


def without_each_head(model, score):
    """score(model) [L, H] with the output of one head at a time zero."""
    scores = torch.zeros(len(model.blocks), model.blocks[0].attn.heads)
    for layer, head in np.ndindex(*scores.shape):
        # (B, H, T, out_dim)
        with hooked((model.blocks[layer].attn.tap_head_out, lambda m, _, y: y.index_fill(1, torch.tensor([head], device=y.device), 0.0))):
            scores[layer, head] = score(model)
    return scores


def drops_of(base, drops):
    """(rows, summary) of heads() for one run."""
    rows = [dict(layer=layer, **{f'drop {head}': round(x, 3) for head, x in enumerate(row.tolist(), 1)},
                 **{key: number(x, 3) for key, x in concentration(row).items()}) for layer, row in enumerate(drops, 1)]
    layer, head = divmod(drops.argmax().item(), drops.shape[1])
    return rows, dict(base=round(abs(base), 4), layer=layer + 1, head=head + 1, largest=number(drops.max(), 3),
                      second=number(drops.flatten().sort().values[-2], 3),
                      **{key: number(x, 3) for key, x in concentration(drops.flatten()).items()})


def heads_figure(plt, scores, unit, title):
    """The figure of `heads`: violins per layer (Figure 4), under them curves over its heads (Figure 9), a colour for each run. scores:
    {run: (with all heads, [L, H] with one off)}.
    """
    L, H = (max(each.shape[i] for _, each in scores.values()) for i in (0, 1))
    columns, many, width = min(L, 4), len(scores) > 1, 0.8 / len(scores)
    fig = plt.figure(figsize=(max(7, 2.6 * columns), 3.4 + 2.2 * -(-L // columns)), layout='constrained')
    top, bottom = fig.subfigures(2, 1, height_ratios=(3.2, 2.2 * -(-L // columns)))
    ax, below = top.subplots(), bottom.subplots(-(-L // columns), columns, sharey=True, squeeze=False).flatten()
    for i, (name, (base, each)) in enumerate(scores.items()):
        look = many and style_of(name) or dict(color=COLOURS[i % 6], ls='-')
        base, each, look['marker'] = abs(base), each.abs().numpy(), {'-': 'o', '--': 's', ':': '^'}[look['ls']]
        at = np.arange(1, len(each) + 1) + (i + 0.5) * width - 0.4
        for body in ax.violinplot(each.T, positions=at, showextrema=False, widths=0.9 * width)['bodies']:
            body.set(facecolor=look['color'], alpha=0.35)
        ax.hlines(np.full(len(at), base), at - width / 2, at + width / 2, color='black', label=None if i else 'no head off')
        ax.plot(at.repeat(each.shape[1]), each.flatten(), **look | dict(ls=''), ms=4, label=f'{name}, ' * many + 'one head off')
        for curve, ax_ in zip(each, below):
            ax_.plot(range(1, len(curve) + 1), curve, **look, ms=4)
            if not many:
                ax_.axhline(base, color='black', lw=1)
    ax.set(xlabel='layer of the head that is off', ylabel=unit, xticks=range(1, L + 1), title=title)
    ax.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    for layer, ax in enumerate(below):
        ax.set(title=f'layer {layer + 1}', xlabel='head that is off', xticks=range(1, H + 1, 1 + H // 9))
        if layer % columns == 0:
            ax.set_ylabel(unit)
        if layer >= L:
            ax.axis('off')
    return fig


def diagonal_means(L):
    """Mean a_d [.., T] of L [.., T, T] along its diagonals i - j = d, d = 0..T-1; what is above the main one does not count."""
    T = L.shape[-1]
    i, j = torch.tril_indices(T, T, device=L.device)
    return L.new_zeros(L.shape[:-1]).index_add(-1, i - j, L[..., i, j]) / torch.arange(T, 0, -1, device=L.device)


def toeplitz_matrix(a):
    """T_ij = a_(i-j) [.., T, T] on and below the main diagonal, 0 above, of a [.., T]."""
    t = torch.arange(a.shape[-1], device=a.device)
    return a[..., (t[:, None] - t).clamp(min=0)].tril()


def variance_share(part, L):
    """Share of the variance of L [.., T, T] over i >= j that a part of it accounts for [..]: cov(part, L) / var(L). All parts: 1."""
    i, j = torch.tril_indices(*L.shape[-2:], device=L.device)
    part, L = (x[..., i, j] - x[..., i, j].mean(dim=-1, keepdim=True) for x in (part, L))
    return (part * L).mean(dim=-1) / (L ** 2).mean(dim=-1)


def grams(q, k, turn):
    """Eq. 2's parts for queries and keys [B, H, T, D] whose pairs (2m, 2m+1) are taken as complex numbers: complex (L, G) [B, H, T, T].

    L = sum_m G^(m) o T^(m), G^(m)_ij = q_i^(m) conj(k_j^(m)), T^(m)_ij = u_i conj(u_j), u = turn [H, T, D/2], for RoPE e^(i theta_m t): one
    Toeplitz factor for each frequency m. RoPE's logit is Re L. G = sum_m G^(m).
    """
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))           # (B, H, T, D/2)
    L, G = 0, 0
    for m in range(q.shape[-1]):
        G_m, u = q[..., :, None, m] * k[..., None, :, m].conj(), turn[..., m]
        L, G = L + G_m * (u[..., :, None] * u[..., None, :].conj()), G + G_m
    return L, G


def single_factor(L, G):
    """How far the paper's eq. 2, L = Re(G o G_e) with one Toeplitz matrix G_e, is off: a dictionary of shares [H], of L and G [B, H, T, T].

    unit: of the variance of L that the best G_e with entries of modulus 1 leaves unexplained (above 1: it is worse than a constant); free:
    the best G_e with any complex entries. impossible: pairs with |L_ij| > |G_ij|, which no angle makes equal, not even one of their own.
    """
    x, y = G.real, -G.imag                                                              # Re(G a) = x Re(a) + y Im(a)
    xx, xy, yy, xl, yl, ll = (diagonal_means(z).mean(dim=0) for z in (x * x, x * y, y * y, x * L, y * L, L * L))    # (H, T)
    angle = torch.linspace(0, 2 * torch.pi, 721, dtype=L.dtype, device=L.device)
    c, s = angle.cos(), angle.sin()
    at = lambda z: z[..., None]
    unit = (at(ll) - 2 * (c * at(xl) + s * at(yl)) + c * c * at(xx) + 2 * c * s * at(xy) + s * s * at(yy)).amin(dim=-1)
    b = torch.stack([xl, yl], dim=-1)[..., None]
    S = torch.stack([torch.stack([xx, xy], dim=-1), torch.stack([xy, yy], dim=-1)], dim=-2)
    free = ll - (b.mT @ torch.linalg.pinv(S, hermitian=True) @ b).squeeze((-2, -1))
    i, j = torch.tril_indices(*L.shape[-2:], device=L.device)
    weight, entries = torch.arange(L.shape[-1], 0, -1, device=L.device), L[..., i, j].transpose(0, 1).flatten(1)
    total = entries.var(dim=1, correction=0) * len(i)
    return dict(unit=(unit * weight).sum(dim=-1) / total, free=(free * weight).sum(dim=-1) / total,
                impossible=(entries.abs() > G[..., i, j].abs().transpose(0, 1).flatten(1)
                            + 1e-9 * entries.abs().max()).double().mean(dim=1))


def added_vectors(model, T):
    """p_i [T, C], what the encoding adds to the embeddings; zeros if nothing."""
    weight = model.embedding.weight.detach()
    with torch.no_grad():
        return model.blocks[0].attn.pe.embed(torch.zeros_like(weight[:1]).expand(1, T, -1), torch.arange(T, device=weight.device))[0]


def share_of_norm(norm, x, p):
    """p's part of norm(x) for x = c + p: the norm is linear once its scale is held at that of x, so norm(x) less this is c's part."""
    if isinstance(norm, torch.nn.LayerNorm):
        x, p = (z - z.mean(dim=-1, keepdim=True) for z in (x, p))
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return p * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * norm.weight


def attention_inputs(model, tokens):
    """[(attention, x [B, T, C] after the norm, pos, state, stream [B, T, C] before it)] of every layer."""
    streams = [model.tap_resid, *(block.tap_resid for block in model.blocks[:-1])]
    with listening(*streams) as before, listening(*(block.attn for block in model.blocks)) as heard, torch.no_grad():
        model(tokens)
    return [(attn, *inputs, stream) for (attn, inputs, _), (_, _, stream) in zip(heard, before)]


def project(attn, x):
    """Queries, keys and values [B, H, T, D] of x [B, T, C]."""
    return [z.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for z in attn.project(x)]


def is_linear(model):
    """Whether the encoding turns queries and keys linearly, as eq. 1 and 2 want it."""
    return not any(isinstance(m, (encodings.PoPE, encodings.ViPE, encodings.PRISM)) for m in model.modules())


def turns_of(enc, q, pos, state):
    """By what the encoding multiplies the pairs (2m, 2m+1) of q [B, H, T, D]: complex [H, T, D/2], RoPE's e^(i theta_m t), 1 without turns.
    """
    one = torch.zeros_like(q[:1]).index_fill(-1, torch.arange(0, q.shape[-1], 2), 1.0)
    return torch.view_as_complex(enc.qk(one, one, enc.at(len(pos), pos, state))[0][0].unflatten(-1, (-1, 2)))


def gram_terms(attn, x, position, pos, state):
    """Eq. 1's terms {name: [.., H, T, T]} of the logits, x = content + position after the norm; of encodings linear in q and k."""
    content, turned = x - position, {}
    for name, part in (('c', content), ('p', position)):
        q, k, _ = project(attn, part)
        turned[name] = attn.pe.qk(q, k, attn.pe.at(len(pos), pos, state))
    terms = {f'q{a} k{b}': turned[a][0] @ turned[b][1].mT * attn.pe.scale for a in 'cp' for b in 'cp'}
    bias = attn.pe.bias(attn.pe.at(len(pos), pos, state, x))
    return {name: term for name, term in terms.items() if term.any()} | ({} if bias is None else {'B': bias})


def logit_shares(attn, x, position, pos, state, linear, turns):
    """(L [B, H, T, T], {name: share [H]}, {equation: (its right side, L)}) of a layer with the input x [B, T, C]; see toeplitz()."""
    q, k, _ = project(attn, x)
    L = attn.pe.logits(q, k, pos, state, x)
    L = L.masked_fill(L.isinf(), 0)                                                     # 0 above the diagonal
    by_head = lambda z: z.expand_as(L)[(..., *torch.tril_indices(*L.shape[-2:]))].transpose(0, 1).flatten(1)           # (H, B entries)
    a, equations = diagonal_means(L), {}                                                # (B, H, T)
    shares = dict(toeplitz=variance_share(toeplitz_matrix(a), L).mean(dim=0),
                  shared=1 - (by_head(L) - by_head(toeplitz_matrix(a.mean(dim=0)))).var(dim=1) / by_head(L).var(dim=1))
    if linear:
        terms = gram_terms(attn, x, position, pos, state)
        equations['eq. 1'] = sum(terms.values()).expand_as(L), L
        shares |= {name: variance_share(term.expand_as(L), L).mean(dim=0) for name, term in terms.items()}
        if 'qp kp' in terms:
            shares['qp kp toeplitz'] = variance_share(toeplitz_matrix(diagonal_means(terms['qp kp'])), terms['qp kp']).mean(dim=0)
    if turns:
        turned, G = (z * attn.pe.scale for z in grams(q, k, turns_of(attn.pe, q, pos, state)))
        equations['eq. 2'] = turned.real + terms.get('B', 0), L
        shares |= dict(zip(('G_e off', 'free G_e off', 'impossible'), single_factor(turned.real, G).values()))
    return L, shares, equations


@torch.no_grad()
def toeplitz(model, task, cfg, length=0, n=8):
    """Do logits depend on the distance alone, on content, or on both? Their Toeplitz part and the Gram terms (the Toeplitz study, eq. 1, 2, B.1).

    length: of the problems, 0: the longest trained; n: how many. Shares of the variance of the logits over i >= j, a row for each head
    (mean over problems): `toeplitz`: of the mean along each diagonal (chance: what white noise would have); `shared`: of one such matrix
    for all problems, which is what a relative bias could do. `qc kc`, `qc kp`, `qp kc`, `qp kp`, `B`: the terms of eq. 1, adding up to 1,
    with p_i the vectors that the encoding adds, as they still stand in the residual stream at every layer; `qp kp toeplitz`: how Toeplitz
    that term is by itself (Assumption 3.2 wants 1). With RoPE also how far eq. 2's single G_e is off: `G_e off`, `free G_e off`,
    `impossible` are what single_factor() finds. Summary: means over the heads, and the largest errors of eq. 1 and of eq. 2 with a Toeplitz
    factor for each frequency, relative to the largest logit, in float64.
    """
    length, tokens, _ = held_out_problems(task, cfg, length, n)
    T = tokens.shape[1]
    tokens = tokens[:max(1, 2 ** 23 // (cfg.heads * T * T))]
    net, errors, found, profiles = copy.deepcopy(model).double(), {}, [], []
    linear, p = is_linear(net), added_vectors(net, T)
    turns = linear and any(isinstance(m, encodings.RoPE) for m in net.modules())
    for block, (attn, x, pos, state, stream) in zip(net.blocks, attention_inputs(net, tokens)):
        L, shares, equations = logit_shares(attn, x, share_of_norm(block.norm_1, stream, p), pos, state, linear, turns)
        for name, (sum_, whole) in equations.items():
            errors[name] = max(errors.get(name, 0.0), ((sum_ - whole).tril().abs().max() / whole.abs().max()).item())
        found.append(shares)
        profiles.append((L[0], diagonal_means(L[0]), diagonal_means(L).mean(dim=0)))
    columns = {name: torch.stack([shares.get(name, torch.zeros(cfg.heads)) for shares in found])
               for name in dict.fromkeys(key for f in found for key in f)}
    chance = (T - 1) / (T * (T + 1) / 2 - 1)
    summary = dict(length=length, n=len(tokens), tokens=T, chance=round(chance, 4),
                   **{name: number(value.nanmean()) for name, value in columns.items()},
                   **{f'error of {name}': error for name, error in errors.items()})
    words = [task.vocab[t] for t in tokens[0].tolist()]
    title = f'{titled(cfg)}, length {length}'
    return head_rows(columns), summary, lambda plt: toeplitz_figure(plt, columns, chance, profiles, words, cfg.train_len, title)


def toeplitz_figure(plt, columns, chance, profiles, words, trained, title):
    """The figure of `toeplitz`: shares, profiles a_d, and the most Toeplitz head's logits taken apart. profiles: (L, a, mean a) by layer.
    """
    share = columns['toeplitz']
    L, H = share.shape
    layer, head = divmod(share.nan_to_num(-1).argmax().item(), H)
    few = L * H <= 24
    bars = {name: (value if few else value.nanmean(dim=1)).flatten().numpy() for name, value in columns.items()}
    ticks = [f'{x + 1}.{y + 1}' for x in range(L) for y in range(H)] if few else [str(x + 1) for x in range(L)]
    at = range(len(ticks))
    bar_charts = [(title, label, {name: word for name, word in names.items() if name in bars}) for title, label, names in (
        ('Toeplitz part of the logits', 'share of their variance', {'toeplitz': 'one for each problem', 'shared': 'one for all problems'}),
        ('terms of eq. 1: of the query, of the key', 'share of the variance of the logits',
         {'qc kc': 'content, content', 'qc kp': 'content, position', 'qp kc': 'position, content', 'qp kp': 'position, position',
          'B': 'bias'}),
        ('eq. 2 with one Toeplitz matrix $G_e$', 'share of variance it misses, or of pairs',
         {'G_e off': 'missed, entries of modulus 1', 'free G_e off': 'missed, any entries',
          'impossible': 'pairs i, j that no $G_e$ fits'}))]
    bar_charts = [chart for chart in bar_charts if len(chart[2]) > 1]
    fig = plt.figure(figsize=(14 if len(bar_charts) < 3 else 18, 9), layout='constrained')
    top, bottom = fig.subfigures(2, 1, height_ratios=(1, 1.1))
    *charts, by_distance = top.subplots(1, 1 + len(bar_charts))
    for ax, (what, label, names) in zip(charts, bar_charts):
        for i, (name, word) in enumerate(names.items()):
            ax.bar([x + 0.8 * (i + 0.5) / len(names) - 0.4 for x in at], bars[name], 0.8 / len(names), label=word, color=COLOURS[i])
        ax.set(title=what, ylabel=label, xlabel='layer.head' if few else 'layer (mean over its heads)', xticks=at, xticklabels=ticks,
               xlim=(-0.6, len(ticks) - 0.4))
        ax.tick_params(axis='x', labelsize=8)
    charts[0].axhline(chance, color='black', lw=1, ls=':', label='white noise')
    charts[0].set_ylim(min(0, np.nanmin(bars['shared'])), 1.02)
    for ax in charts:
        ax.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.15), ncols=2)
    colours = plt.get_cmap('viridis')
    for number, (_, _, mean) in enumerate(profiles):
        for row in mean:
            by_distance.plot(row.numpy(), color=colours(number / max(1, L)), lw=1, alpha=0.8)
        by_distance.plot([], color=colours(number / max(1, L)), label=f'layer {number + 1}')
    if len(words) > trained:
        by_distance.axvline(trained, color='crimson', lw=1, label='trained length')
    by_distance.set(title='mean logit of each head', xlabel='distance i - j (tokens)', ylabel='logit')
    by_distance.locator_params(axis='x', integer=True)
    by_distance.legend(fontsize=8)
    logits, part = profiles[layer][0][head], toeplitz_matrix(profiles[layer][1][head])
    hidden = torch.ones_like(logits).triu(1).bool()
    maps = [z.masked_fill(hidden, float('nan')).numpy() for z in (logits, part, logits - part)]
    low, high = min(z[z == z].min() for z in maps), max(z[z == z].max() for z in maps)
    axes = bottom.subplots(1, 3)
    for ax, z, what in zip(axes, maps, ('logits', 'their Toeplitz part', 'the rest')):
        image = ax.imshow(z, vmin=low, vmax=high, cmap='viridis', interpolation='nearest')
        ax.set(title=f'head {layer + 1}.{head + 1}: {what}', **map_labels(len(words), 4))
        label_tokens(ax.xaxis, words, 4)
        label_tokens(ax.yaxis, words, 4)
    bottom.colorbar(image, ax=axes, label='logit')
    fig.suptitle(title)
    return fig


def positions(model, task, cfg, length=0, n=512, draws=4):
    """Does a layer still read the vectors p_i added to the embeddings? Takes them out of the residual stream (the Toeplitz study, section 5.4; Figure 8).

    At each layer p_i is subtracted from the stream before it, so for that layer and all after it; or a random vector of the same length, a
    fresh one for every position in each of the draws. length: of the problems, 0: the longest trained; n: how many. Rows: exact match in %
    (see heads; of a corpus: loss) `without p`, `random` (mean over draws) and its standard deviation; `more`: what p costs beyond the
    random vectors; `norm`: mean |p_i| over mean |x_i|. For ape, learned, random, shifted_ape (without a shift, as in evaluation) and sums
    with them.
    """
    length, tokens, targets = held_out_problems(task, cfg, length, n)
    p = added_vectors(model, tokens.shape[1])
    if not p.any():
        raise UserError(f'positions takes out the vectors that an encoding adds to the embeddings, and pe={cfg.pe} adds none: '
                              f'train with pe=ape or pe=ape+{cfg.pe}')
    if not draws:
        raise UserError('--draws=0: take at least one draw of random vectors')
    (score, unit), g, rows = scoring([model], task, length, tokens, targets), train.generator('cpu', 'test', 0), []
    base = score(model)

    def without(module, vectors):
        with hooked((module, lambda m, _, x: x - vectors[:x.shape[1]])):
            return score(model)
    for layer, module in enumerate([model.tap_resid, *(block.tap_resid for block in model.blocks[:-1])]):
        noise = [F.normalize(torch.randn(p.shape, generator=g, dtype=p.dtype), dim=-1) * p.norm(dim=-1, keepdim=True)
                 for _ in range(draws)]
        with listening(module) as heard, torch.no_grad():
            model(tokens[:8])
        random, removed = torch.tensor([without(module, r) for r in noise]), without(module, p)
        rows.append(dict(layer=layer + 1, **{'without p': round(abs(removed), 3), 'random': round(random.mean().abs().item(), 3),
                                             'sd': round(random.std(correction=0).item(), 3),
                                             'more': round(random.mean().item() - removed, 3),
                                             'norm': round((p.norm(dim=-1).mean() / heard[0][2].norm(dim=-1).mean()).item(), 3)}))
    summary = dict(length=length, n=len(tokens), unit=unit, base=round(abs(base), 4),
                   most_more_at=max(rows, key=lambda row: row['more'])['layer'], more=[row['more'] for row in rows])
    return rows, summary, lambda plt: positions_figure(plt, rows, abs(base), unit, f'{titled(cfg)}, length {length}')


def positions_figure(plt, rows, base, label, title):
    """The figure of `positions` (Figure 8)."""
    fig, ax = plt.subplots(figsize=(6, 4), layout='constrained')
    layers = [row['layer'] for row in rows]
    ax.axhline(base, color='grey', lw=1, ls=':', label='nothing taken out')
    ax.plot(layers, [row['without p'] for row in rows], 'o-', color=COLOURS[1], label='without p')
    ax.errorbar(layers, [row['random'] for row in rows], [row['sd'] for row in rows], fmt='s--', color=QUERY, capsize=3,
                label='without random vectors of that length')
    ax.set(xlabel='taken out before layer', ylabel=label, xticks=layers, title=title)
    ax.legend(fontsize=8)
    return fig


def hermitian(a):
    """The Hermitian Toeplitz matrix [.., T, T] with a_d [.., T] on its diagonals i - j = d >= 0."""
    below = toeplitz_matrix(a)
    return below.tril(-1).mH + below.tril(-1) + torch.diag_embed(below.diagonal(dim1=-2, dim2=-1).real).to(a.dtype)


def symbol(a, points=4096):
    """f(theta) = Re a_0 + 2 Re sum_(d > 0) a_d e^(-i d theta) [.., points], theta from 0 to 2 pi: the symbol of hermitian(a)."""
    return 2 * torch.fft.fft(a, points).real - a[..., :1].real


def lemma_b1(w, phase):
    """Lemma B.1's f = sum_i 2 w_i cos(phase_i + i theta), for weights w [N] and phases [N], and g, without phases, on a grid of theta."""
    wave = lambda phase: 2 * torch.fft.fft(torch.polar(w, -phase), 2 ** 12).real
    return wave(phase), wave(torch.zeros_like(phase))


def spectral_claims(seed=0):
    """Lemma B.1 and Prop. B.3 beside what they say: rows (what, claimed, found).

    The phases of the lemma's statement are i theta_i: equal theta_i do give equality then (f is g shifted), but so do others. Those of its
    proof are theta_i: then neither follows from the other.
    """
    g, pi = torch.Generator().manual_seed(seed), torch.pi
    vector = lambda *x: torch.tensor(x, dtype=torch.float64)
    largest = lambda f, g: (f.abs().max() / g.abs().max()).item()
    width = lambda x: (x.max() - x.min()).item()
    draw = lambda: (torch.rand(8, generator=g, dtype=torch.float64), 2 * pi * torch.rand(8, generator=g, dtype=torch.float64))
    one, steps, sine = vector(1, 1, 1), vector(0, 1, 2), (vector(0, 1, 1), vector(-pi / 2, -pi / 2, -pi / 2))
    W, d = vector(2.25, 1, 1, *[0] * 61).to(torch.complex128), torch.arange(64, dtype=torch.float64)       # positive definite
    spectrum_with = lambda phase: torch.linalg.eigvalsh(hermitian(W * torch.polar(torch.ones_like(d), phase)))
    plain, turned, quarter = (spectrum_with(phase) for phase in (0 * d, 0.7 * d, -pi / 2 * d.clamp(max=1)))
    claims = (('max |f| / max |g|, the largest of 200 draws', '<= 1', max(largest(*lemma_b1(*draw())) for _ in range(200))),
              ('max |f| / max |g| with w = 1 1 1, phases 0 1 2: theta 0 1 2, or 5 1 1', '< 1', largest(*lemma_b1(one, steps))),
              ('max |f| / max |g| with w = 1 1, phases pi/2: equal theta in the proof', '1',
               largest(*lemma_b1(one[:2], vector(pi / 2, pi / 2)))),
              ('range of g / 4 sum w with w = 0 1 1', '1', width(lemma_b1(*sine)[1]) / 8),
              ('range of f / range of g with w = 0 1 1, phases -pi/2', '<= 1', width(lemma_b1(*sine)[0]) / width(lemma_b1(*sine)[1])),
              ('largest change of an eigenvalue from W to W o E, E semidefinite, |E_ij| = 1', '> 0', (turned - plain).abs().max().item()),
              ('width of the spectrum of W o E / of W, |E_ij| = 1, E not definite', '< 1', width(quarter) / width(plain)))
    return [dict(what=what, claimed=claimed, found=round(found, 6)) for what, claimed, found in claims]


@torch.no_grad()
def spectrum(model, task, cfg, length=0, n=8):
    """Does an encoding narrow the spectrum of the logits' Toeplitz part, as the paper has it of RoPE (the Toeplitz study, B.1, B.3)?

    length: of the problems, 0: the longest trained; n: how many, averaged over. Rows: `content`, the Toeplitz part of <q_i, k_j> / sqrt(d),
    and `logits`, that of the logits (with RoPE both in complex form, sum_m q^(m) conj(k^(m))), of every head, or where these are more than
    12 of the widest in each layer; the encoding's own Toeplitz factors: `B`, `p_i p_j` (its Toeplitz part), RoPE's `T^(m)`. Each is
    continued to i < j as a Hermitian matrix: range of its symbol, of its eigenvalues (which lie within the former) and, of the logits,
    `ratio`: width of that range over the content's. Then what the paper claims and what is found. Prop. B.3 is empty: no E with |E_ij| = 1
    is positive definite (its 2 x 2 minors are 0); a semidefinite one has rank one, E_ij = e^(i phi (i - j)), so that W o E has exactly the
    eigenvalues of W; any other can widen the spectrum. Summary: mean ratio, and share of the heads where it is below 1.
    """
    length, tokens, _ = held_out_problems(task, cfg, length, n)
    T = tokens.shape[1]
    tokens = tokens[:max(1, 2 ** 22 // (cfg.heads * T * T))]
    net = copy.deepcopy(model).double()
    turns, pairs, factors = is_linear(net) and any(isinstance(m, encodings.RoPE) for m in net.modules()), {}, {}
    for layer, (attn, x, pos, state, _) in enumerate(attention_inputs(net, tokens)):
        q, k, _ = project(attn, x)
        bias, logits = attn.pe.bias(attn.pe.at(T, pos, state, x)), attn.pe.logits(q, k, pos, state, x)
        content, whole = q @ k.mT * attn.pe.scale, logits.masked_fill(logits.isinf(), 0)
        if turns:
            turn = turns_of(attn.pe, q, pos, state)
            whole, content = (z * attn.pe.scale for z in grams(q, k, turn))
            whole = whole + (0 if bias is None else bias)
            factors.setdefault('T^(m), each', turn[0, :, 0] * turn[0, 0, 0].conj())
        for head in range(attn.heads):
            pairs[f'{layer + 1}.{head + 1}'] = [diagonal_means(z[:, head].mean(dim=0)) for z in (content, whole)]
            if bias is not None:
                factors[f'B {layer + 1}.{head + 1}'] = diagonal_means(bias[head])
    p = added_vectors(net, T)
    if p.any():
        factors['p_i p_j'] = diagonal_means(p @ p.T)
    widths = lambda a: (lambda e: e[-1] - e[0])(torch.linalg.eigvalsh(hermitian(a)))
    ratio = {name: (widths(whole) / widths(content)).item() for name, (content, whole) in pairs.items()}
    chosen = list(pairs) if len(pairs) <= 12 else [max((name for name in pairs if name.startswith(f'{layer + 1}.')),
                                                       key=lambda name: widths(pairs[name][1]))
                                                   for layer in range(len(net.blocks))]

    def row(name, a, **more):
        f, e = symbol(a), torch.linalg.eigvalsh(hermitian(a))
        ends = {'symbol from': f.min(), 'symbol to': f.max(), 'eigenvalues from': e[0], 'eigenvalues to': e[-1]}
        return {'of': name} | {key: round(x.item(), 4) for key, x in ends.items()} | more
    rows = [r for name in chosen for r in (row(f'content {name}', pairs[name][0]),
                                           row(f'logits {name}', pairs[name][1], ratio=number(ratio[name])))]
    rows += [row(name, a) for name, a in factors.items() if name[2:] in chosen or name[0] != 'B'] + spectral_claims()
    values = torch.tensor([x for x in ratio.values() if x == x])
    summary = dict(length=length, n=len(tokens), tokens=T, ratio=number(values.mean()), narrower=number((values < 1).double().mean()))
    widest = max(pairs, key=lambda name: widths(pairs[name][1]))
    return rows, summary, lambda plt: spectrum_figure(plt, pairs[widest], f'head {widest}, {titled(cfg)}, length {length}')


def spectrum_figure(plt, pair, title):
    """The figure of `spectrum`: symbols and eigenvalues of one head's content and logits; a counterexample to Lemma B.1's last sentence."""
    fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout='constrained')
    for a, colour, width, name in zip(pair, (COLOURS[2], QUERY), (3, 1), ('content', 'logits')):
        f, e = symbol(a), torch.linalg.eigvalsh(hermitian(a))
        axes[0].plot(torch.linspace(0, 2 * torch.pi, len(f)), f, lw=width, color=colour, label=name)
        axes[1].plot(range(1, len(e) + 1), e.flip(0), 'o-', lw=width, ms=1 + width, color=colour,
                     label=f'{name}, from {e[0]:.3g} to {e[-1]:.3g}')
    fig.suptitle(title)
    axes[0].set(title='symbols of their Toeplitz parts', xlabel='theta (rad)', ylabel='symbol')
    axes[1].set(title='eigenvalues', xlabel='eigenvalue, from the largest', ylabel='value')
    axes[1].locator_params(axis='x', integer=True)
    w, phase = torch.tensor([0, 1, 1], dtype=torch.float64), torch.full((3,), -torch.pi / 2, dtype=torch.float64)
    for f, colour, name in zip(lemma_b1(w, phase), (COLOURS[1], COLOURS[5]), ('f, with phases -pi/2', 'g, without')):
        axes[2].plot(torch.linspace(0, 2 * torch.pi, len(f)), f, color=colour, label=f'{name}: range {f.max() - f.min():.2f}')
    axes[2].set(title='Lemma B.1, w = 0 1 1: f has the larger range', xlabel='theta (rad)', ylabel='value', ylim=(-4.4, 6))
    for ax in axes:
        ax.legend(fontsize=8)
    return fig


def softmax_gradient(A, dY, V):
    """Lemma C.1: dl/dS_ij = A_ij (Lambda_ij - <Lambda_i, A_i>), Lambda = dl/dY V^T, for weights A [.., T, T] and Y = A V."""
    Lambda = dY @ V.mT
    return A * (Lambda - (Lambda * A).sum(dim=-1, keepdim=True))


def anchor_gain(A, j):
    """Lemma C.2 for a row A [T] of weights: the softmax Jacobian's row of j along e_j, A_j (1 - A_j), and the rest's length, never more."""
    row = A[j] * (torch.eye(len(A), dtype=A.dtype)[j] - A)
    return row[j], torch.cat([row[:j], row[j + 1:]]).norm()


def logit_gradients(model, tokens, targets):
    """By layer (A, dl/dS [B, H, T, T], dl/dY [B, H, T, D], dl/dy [B, T, C], V, Y): S the logits, Y a head's output, y all heads', after
    W_O.
    """
    taps = [(block.attn.tap_logits, block.attn.tap_head_out, block.attn) for block in model.blocks]
    with listening(*(module for layer in taps for module in layer)) as heard:
        loss = train.token_losses(model(tokens)[0], targets).sum()
    found = [heard[3 * i:3 * i + 3] for i in range(len(taps))]
    grads = torch.autograd.grad(loss, [output for layer in found for _, _, output in layer])
    return [(S.detach().softmax(dim=-1), *grads[3 * i:3 * i + 3], project(attn, inputs[0])[2].detach(), Y.detach())
            for i, ((_, _, S), (_, _, Y), (attn, inputs, _)) in enumerate(found)]


def edges(task, tokens, kind):
    """The anchors of every problem: (b, u, j, d), edges from row u to column j with label d, all [E].

    pair: from the later of two triggers to the earlier; read: from the token at which the class is read to the later trigger; d: the
    distance of the triggers. all: every edge, d = u - j.
    """
    B, T = tokens.shape
    if kind == 'all':
        u, j = torch.tril_indices(T, T)
        return torch.arange(B).repeat_interleave(len(u)), u.repeat(B), j.repeat(B), (u - j).repeat(B)
    first = task.first_trigger
    i, j = ((tokens >= first) & (tokens < first + 2)).nonzero()[:, 1].view(B, 2).unbind(dim=1)
    return torch.arange(B), *((j, i) if kind == 'pair' else (torch.full_like(j, T - 2), j)), j - i


def seeds_of(dS, edge, T):
    """H(d) [H, T], the gradient dl/dS [B, H, T, T] summed over the edges of label d, and what does not cancel: sum |H| / sum |dl/dS| [H].
    """
    b, u, j, d = edge
    g = dS[b, :, u, j].T                                                                # (H, E)
    H = torch.zeros(len(g), T, dtype=g.dtype).index_add(1, d, g)
    return H, H.abs().sum(dim=1) / g.abs().sum(dim=1)


def convolution_share(dS, task, tokens):
    """C.6: share [H] of the variance of M(d, D) that a kernel k(D - d) explains, and what it would explain of noise.

    M(d, D): mean gradient in the row of the later trigger, D places before it, over the problems with distance d between the triggers.
    """
    b, u, _, d = edges(task, tokens, 'pair')
    D = torch.arange(tokens.shape[1])
    inside = D <= u[:, None]                                                            # (B, T)
    g = dS[b, :, u].transpose(1, 2).gather(1, (u[:, None] - D).clamp(min=0)[..., None].expand(-1, -1, dS.shape[1]))[inside]  # (E, H)

    def between(group):
        sums, count = (torch.zeros(group.max() + 1, x.shape[1], dtype=g.dtype).index_add(0, group, x) for x in (g, torch.ones_like(g)))
        return (sums ** 2 / count.clamp(min=1)).sum(dim=0) - g.sum(dim=0) ** 2 / len(g)
    cell, place = (d[:, None] * len(D) + D)[inside], (D - d[:, None] + len(D))[inside]
    return between(place) / between(cell), (len(place.unique()) - 1) / (len(cell.unique()) - 1)


def seed_condition(A, dY, dy, V, W_O, edge):
    """Prop. 6.1's a eta > C chi in the top layer: (share of the edges with Lambda > 0, which (A2) wants of all; largest a eta / (C chi)).

    The second is never above 1: eta <= Lambda_uj <= |dl/dY_u| |V_j| <= C and a <= A_uj <= |A_u| <= chi. (And chi = 1, by the first row of
    causal attention.)
    """
    b, u, j, d = edge
    Lambda, a = (dY[b, :, u] * V[b, :, j]).sum(dim=-1), A[b, :, u, j]                   # (E, H)
    C = torch.linalg.matrix_norm(W_O, 2) * torch.linalg.matrix_norm(V, 2).amax(dim=0) * dy.norm(dim=-1).max()               # (H,)
    chi = A.norm(dim=-1).amax(dim=(0, 2))
    least = lambda x: x.new_full((d.max() + 1, x.shape[1]), torch.inf).scatter_reduce(0, d[:, None].expand_as(x), x, 'amin')[d.unique()]
    return (Lambda > 0).double().mean().item(), (least(a) * least(Lambda) / (C * chi)).max().item()


def cancellation(name, values=0.0, linear=True):
    """Prop. 6.2's pair of samples in one head with encoding `name`: |g + g'| over the larger gradient at the anchor edge; 0: they cancel.

    The anchor tokens are x_0 + t and x_0 - t with W_Q t = W_K t = 0 and W_V x_0 = 0. values: size of W_V x of the other tokens; linear:
    whether the loss is linear in the head's output, or a cross-entropy.
    """
    g, (C, D, T, u, j) = torch.Generator().manual_seed(0), (16, 4, 7, 5, 2)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    W_Q, W_K, W_V, away = draw(D, C), draw(D, C), draw(D, C), draw(D)
    null = lambda W: torch.linalg.svd(W)[2][len(W):]                                    # rows: a basis of the kernel
    x, t = draw(T, C - D) @ null(W_V), draw(C - 2 * D) @ null(torch.cat([W_Q, W_K]))
    x = x + values * F.one_hot(torch.arange(T), T).double().index_fill(0, torch.tensor([j]), 0.0) @ draw(T, C)
    enc, found = encodings.build(encodings.PEConfig(pe=name, d_model=D, n_head=1)), []
    for sign in (1, -1):
        z = x.index_add(0, torch.tensor([j]), sign * t[None])
        S = enc.logits((z @ W_Q.T)[None, None], (z @ W_K.T)[None, None], torch.arange(T)).detach().requires_grad_()
        y = (S.softmax(dim=-1) @ (z @ W_V.T))[0, 0, u]
        found.append(torch.autograd.grad(y @ away if linear else -y.log_softmax(dim=0)[0], S)[0][0, 0, u, j])
    return ((found[0] + found[1]).abs() / max(found[0].abs(), found[1].abs())).item()


def gradients(model, task, cfg, length=0, n=256, steps=200, edge=''):
    """Does one head collect the gradient of position, more so the lower the layer? H_l^(h)(d) in training (the Toeplitz study, section 6, appendix C).

    H_l^(h)(d): gradient of the summed loss by the logit of head h in layer l, over the edges with label d of n held-out problems of this
    length (0: the longest trained). edge: read or pair, where the task has two triggers, or all, everywhere: see edges(). Taken before
    training, in the first `steps` steps of this very run, done again here (0: none, for a run too large for that), and in the saved model.
    Rows, by layer: strongest `head` by |H| = sqrt(sum_d H(d)^2), its |H| as `first`, the next one's as `second`; their difference `margin`
    and its `growth`, margin over that of the layer above, which Theorem 6.1 wants above 1; of the strongest head the share of distances
    with H > 0 (`positive`; descent lowers such a logit) and `coherence`, how much does not cancel; `effective`, the number of heads that
    share |H|. (H below the top layer, and the margin as a difference, are ours.) Then the claims: Lemmas C.1, C.2, Prop. 6.1 (its condition
    cannot hold; of edge=read), 6.2, and C.6 where there are two triggers.
    """
    if made(cfg) == BY_HAND:
        raise UserError('gradients follows a training, and by_hand never had one: take a run')
    two = getattr(task, 'triggers', 0) == 2
    edge = edge or ('read' if two else 'all')
    if edge not in ('read', 'pair', 'all') or edge != 'all' and not two:
        raise UserError(f'--edge={edge}: read and pair need two triggers, as in task=distance; all is for every task')
    length, tokens, targets = held_out_problems(task, cfg, length, n)
    T = tokens.shape[1]
    tokens, targets = (x[:max(1, 2 ** 23 // (cfg.heads * T * T))] for x in (tokens, targets))
    anchors, rows, curves, tests = edges(task, tokens, edge), [], {}, {'C.1': [], '6.1': [], 'C.6': []}

    def measure(step, net):
        net = copy.deepcopy(net).double().eval()
        found = logit_gradients(net, tokens, targets)
        H, coherence = map(torch.stack, zip(*(seeds_of(layer[1], anchors, T) for layer in found)))
        rows.extend(dict(step=step) | row for row in margins(H[..., anchors[3].unique()], coherence))
        curves[step] = H
        for A, dS, dY, dy, V, Y in found:
            plain = V.shape == Y.shape and torch.allclose(A @ V, Y)                     # neither values nor outputs are the encoding's
            if plain:
                tests['C.1'].append(((softmax_gradient(A, dY, V) - dS).abs().max() / dS.abs().max()).item())
            if two and dS[anchors[0], :, edges(task, tokens, 'pair')[1]].any():
                share, chance = convolution_share(dS, task, tokens)
                tests['C.6'].append((share.mean().item(), chance))
        if plain and edge == 'read':
            tests['6.1'].append(seed_condition(A, dY, dy, V, net.blocks[-1].attn.proj.weight.detach(), anchors))
    first_steps(cfg, task, steps, measure)
    measure('trained', model)
    growth = torch.tensor([row['growth'] for row in rows if row['growth'] is not None])
    median, grows = (growth.median().item(), (growth > 1).double().mean().item()) if len(growth) else (None, None)
    first = next(row for row in rows if row['step'] == 'trained')
    summary = dict(length=length, n=len(tokens), edge=edge, effective=first['effective'], growth=median and round(median, 4),
                   grows=grows and round(grows, 4))
    figure = lambda plt: gradients_figure(plt, rows, curves, anchors[3].unique(), edge, f'{titled(cfg)}, length {length}')
    return rows + gradient_claims(tests, grows), summary, figure


def margins(H, coherence):
    """The rows of gradients() for H_l^(h)(d) [L, H, distances] and coherence [L, H]."""
    strength, rows = H.norm(dim=-1), []                                                 # (L, H)
    order = F.pad(strength, (0, 1)).sort(dim=1, descending=True, stable=True)  # a head of 0 more, where there is but one
    margin, number = order.values[:, 0] - order.values[:, 1], lambda x: float(f'{x.item():.4g}') if x.isfinite() else None
    growth = torch.cat([margin[:-1] / margin[1:], torch.full((1,), torch.nan)])
    for layer, head in enumerate(order.indices[:, 0].tolist()):
        rows.append(dict(layer=layer + 1, head=head + 1, first=number(order.values[layer, 0]), second=number(order.values[layer, 1]),
                         margin=number(margin[layer]), growth=number(growth[layer]), positive=number((H[layer, head] > 0).double().mean()),
                         coherence=number(coherence[layer, head]), effective=number(concentration(strength[layer])['effective'])))
    return rows


def gradient_claims(tests, grows):
    """Section 6 and appendix C beside what is found: rows (what, claimed, found), from the measurements of gradients()."""
    mean = lambda xs: sum(xs) / len(xs) if xs else None
    A = torch.rand(200, 8, generator=train.generator('cpu', 'test', 0), dtype=torch.float64).mul(9).softmax(dim=1)
    claims = (('C.1: largest error of a gradient, relative to the largest', '0', max(tests['C.1'], default=None)),
              ('C.2: across / along, the largest of 200 rows', '<= 1',
               max((across / along).item() for along, across in (anchor_gain(row, 3) for row in A))),
              ('6.1: share of anchors with Lambda > 0 (assumption A2)', '1', mean([positive for positive, _ in tests['6.1']])),
              ('6.1: a eta / (C chi), the largest', '> 1', max((most for _, most in tests['6.1']), default=None)),
              ("6.2: |g + g'| / |g| with ALiBi", '0', cancellation('alibi')),
              ("6.2: |g + g'| / |g| with RoPE, the same tokens", '> 0', cancellation('rope')),
              ("6.2: |g + g'| / |g| with ALiBi, other tokens with values", '0', cancellation('alibi', values=1.0)),
              ("6.2: |g + g'| / |g| with ALiBi, cross-entropy", '0', cancellation('alibi', linear=False)),
              ('Theorem 6.1: share of the growths above 1', '1', grows),
              ('C.6: share of M(d, D) that a kernel k(D - d) explains', '1', mean([share for share, _ in tests['C.6']])),
              ('C.6: the same of noise', '', mean([chance for _, chance in tests['C.6']])))
    return [dict(what=what, claimed=claimed, found=float(f'{found:.4g}')) for what, claimed, found in claims if found is not None]


def first_steps(cfg, task, steps, measure):
    """measure(step, model) before training and at four more points of the first steps of the run of cfg.seeds[0], trained once more."""
    cfg = dataclasses.replace(cfg, seeds=cfg.seeds[:1], device='cpu', compile=False, graph=False)
    seeds = train.make_group(cfg, torch.device('cpu'))
    net, = seeds.models
    points = sorted({round(steps * i / 4) for i in range(5)})
    for step in range(steps + 1):
        if step in points:
            measure(step, net)
        if step < steps:
            seeds.step(step)


def gradients_figure(plt, rows, curves, at, edge, title):
    """The figure of `gradients`: H(d) by head in the lowest and the highest layer, at the start and trained; margins through training."""
    fig, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout='constrained')
    layers = len(next(iter(curves.values())))
    colours = plt.get_cmap('viridis')
    shown = [next(iter(curves)), 'trained']
    for column, step in enumerate(shown):
        for ax, layer in zip(axes[:, column], (0, layers - 1)):
            H = curves[step][layer]
            for head, curve in enumerate(H):
                ax.plot(at, curve[at], color=colours(head / max(1, len(H) - 1) * 0.9), lw=1.2, label=f'head {head + 1}')
            ax.axhline(0, color='grey', lw=0.8, ls=':')
            ax.locator_params(axis='x', integer=True)
            ax.set(title=f'H(d), layer {layer + 1}, {"step " if step != "trained" else ""}{step}', xlabel='distance d (tokens)',
                   ylabel='gradient (nats per logit, summed)')
    if len(H) <= 8:
        axes[0][0].legend(fontsize=8)
    steps = list(curves)
    for layer in range(layers):
        mine = [row for row in rows if row['layer'] == layer + 1]
        colour = colours(layer / max(1, layers - 1) * 0.9)
        axes[0][2].plot(range(len(steps)), [row['margin'] for row in mine], 'o-', color=colour, label=f'layer {layer + 1}')
        axes[1][2].plot(range(len(steps)), [row['effective'] for row in mine], 'o-', color=colour, label=f'layer {layer + 1}')
    axes[0][2].set(title='margin of the strongest head', ylabel='|H| of the first less the second',
                   yscale='log' if any(row['margin'] for row in rows) else 'linear')
    axes[1][2].set(title='heads that share the gradient', ylabel='effective number of heads', ylim=(0.9, len(H) + 0.1))
    for ax in axes[:, 2]:
        ax.set(xlabel='training step', xticks=range(len(steps)), xticklabels=steps)
    axes[1][2].legend(fontsize=8)
    fig.suptitle(f'{title}; edges: {edge}')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# PoPE Figure 2, place by place

@torch.no_grad()
def losses_by_position(model, tokens, targets):
    """Mean cross-entropy at every position [T], in nats, of what is predicted there; nan where nothing is."""
    total, count = torch.zeros(2, tokens.shape[1], dtype=torch.float64)
    for x, y in zip(*(z.split(max(1, 2 ** 13 // tokens.shape[1])) for z in (tokens, targets))):
        total += train.token_losses(model(x)[0], y).sum(dim=0)
        count += (y != -100).sum(dim=0)
    return total / count


def loss(model, task, cfg, length=0, n=32, beside=''):
    """Where does a model profit from what lies far back, and where does it break? Loss by position in contexts longer than trained ones.

    length: of the context, 0: the longest of eval_lengths; n: stretches of held-out text (of a Llama 1, unless given); beside: further
    runs, a comma list, on the same text. Rows: means over 16 parts of the context; the curves are smoothed over a 32nd of it.
    """
    length = length or max(cfg.eval_lengths)
    tokens, targets = problems(task, [length], n)[length]
    curves = {name: losses_by_position(net, tokens, targets)[:-1] for name, (net, _) in besides(model, cfg, beside).items()}
    mean = lambda curve: None if curve.isnan().all() else round(curve.nanmean().item(), 4)
    parts = torch.arange(tokens.shape[1] - 1).tensor_split(16)
    rows = [dict(first=part[0].item() + 1, last=part[-1].item() + 1, **{name: mean(curve[part]) for name, curve in curves.items()})
            for part in parts if len(part)]
    trained = cfg.train_len
    summary = dict(length=length) | {f'{name}, {where}': mean(curve[cut]) for name, curve in curves.items()
                                     for where, cut in (('trained positions', slice(0, trained - 1)), ('beyond', slice(trained - 1, None)))}
    return rows, summary, lambda plt: loss_figure(plt, curves, trained, cfg)


def loss_figure(plt, curves, trained, cfg):
    """The figure of `loss`."""
    fig, ax = plt.subplots(figsize=(8, 4), layout='constrained')
    for label, curve in curves.items():
        at, window = (~curve.isnan()).nonzero()[:, 0], max(1, len(curve) // 32)         # nothing is predicted elsewhere
        smooth = lambda x: F.avg_pool1d(x[None, None], min(window, len(x)), 1)[0, 0]
        ax.plot(smooth(at.double() + 1).numpy(), smooth(curve[at]).numpy(), label=label, **style_of(label))
    longer = trained <= max(map(len, curves.values()))
    if longer:
        ax.axvline(trained, color='crimson', lw=1)
    ax.set(xlabel='position in the context' + f'; {trained_to(cfg, trained)} (red line)' * longer, ylabel='loss (nats per token), smoothed',
           title=f'{cfg.task}: loss by position')
    fig.legend(loc='outside right upper')                                               # inside it would hide the red line
    return fig


def rotating(enc):
    """The RoPE or PoPE in an encoding; UserError if there is none."""
    for part in enc.modules():
        if isinstance(part, (encodings.RoPE, encodings.PoPE)):
            return part
    raise UserError(f'this probe is about the frequencies of RoPE and PoPE, and pe={enc.cfg.pe} has none: take one with rope or pope')


def frequencies_of(part, like):
    """theta [n] of a RoPE or PoPE, in radians per token."""
    if isinstance(part, encodings.PoPE):
        return part.theta(like)
    return part.theta if isinstance(part, LlamaRoPE) else encodings.frequencies(part.cfg.head_dim // 2, part.cfg.rope_base, like)


@torch.no_grad()
def polar(enc, q, k):
    """What an encoding rotates, as complex numbers zq, zk [H, T, n], and the frequencies theta [n]: RoPE's n = D/2 pairs, PoPE's n = D
    magnitudes, its phases delta in zk. A logit is Re sum_c conj(zq_tc) zk_sc e^(-i (t-s) theta_c) / sqrt(d), and whatever other encodings
    add.

    q, k [H, T, D] before it. Only the heads, and of mla the half of the features, that the encoding acts on.
    """
    part, theta = rotating(enc), frequencies_of(rotating(enc), q)
    c = part.cfg
    if isinstance(part, encodings.YaRN) and q.shape[1] > c.train_len:
        raise UserError(f'yarn turns otherwise beyond the {c.train_len} tokens that it was trained on: take a --length that stays within')
    q, k = (x[:c.heads, :, -c.head_dim:].contiguous() for x in (q, k))
    if isinstance(part, encodings.PoPE):
        mu_q, mu_k = (F.softplus(q), F.softplus(k)) if c.pope_softplus else (q, k)
        return mu_q + 0j, torch.polar(torch.ones_like(mu_k), part.phases()[:, None].expand_as(mu_k)) * mu_k, theta
    return *(torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k)), theta


def frequency(model, task, cfg, length=0, n=8, beside=''):
    """Which frequencies do queries and keys use? The mean norm of what turns at each (PoPE Figures 3-6, after Barbero et al. 2025).

    length, n: as for axes; beside: further runs of the task, a comma list, on the same sequences. Rows: a frequency each, from fast to
    slow: its wavelength in tokens, the mean norm in queries and in keys over layers and heads, and the largest of a head. summary: `used`:
    the effective share of the frequencies, exp(entropy of the norms' shares) / their number, mean over heads, 1 where all are used alike;
    `fast` the share of the norm in the faster half, `fast_after_first` the same without layer 1.
    """
    sample = sequences(task, cfg.train_lengths, length, n)
    norms = {name: norms_of(net, sample) for name, (net, _) in besides(model, cfg, beside).items()}
    rows, summary = side_by_side({name: frequencies_used(*found) for name, found in norms.items()})
    title = f'{titled(cfg) if len(norms) == 1 else cfg.task}: mean norm at each frequency'
    return rows, summary, lambda plt: frequency_figure(plt, norms, 'mean norm', title)


def norms_of(model, sample):
    """(mean norms [L, 2, H, n] of what turns at each frequency in queries and keys, the frequencies theta [n]) over sequences [1, T]."""
    norms = []
    for row in sample:
        layers = []
        for enc, q, k, _ in inside(model, row):
            zq, zk, theta = polar(enc, q[0], k[0])
            layers.append(torch.stack([zq.abs().mean(dim=1), zk.abs().mean(dim=1)]))    # (2, H, n)
        norms.append(torch.stack(layers))
    return torch.stack(norms).mean(dim=0), theta


def frequencies_used(norms, theta):
    """(rows, summary) of frequency() for one run."""
    mean, top = norms.mean(dim=(0, 2)), norms.amax(dim=(0, 2))                          # (2, n)
    rows = [dict(number=c + 1, wavelength=number(2 * np.pi / theta[c], 1), q=number(mean[0, c]), k=number(mean[1, c]),
                 largest_q=number(top[0, c]), largest_k=number(top[1, c])) for c in range(len(theta))]
    share = norms / norms.sum(dim=-1, keepdim=True)
    used, fast = share.mul(-share.clamp(min=1e-12).log()).sum(dim=-1).exp() / len(theta), share[..., :len(theta) // 2].sum(dim=-1)
    return rows, dict(used=number(used.mean()), used_q=number(used[:, 0].mean()), used_k=number(used[:, 1].mean()),
                      fast=number(fast.mean()), fast_after_first=number(fast[1:].mean()), frequencies=len(theta))


def frequency_figure(plt, found, label, title):
    """Pictures of {run: (norms [L, 2, H, n], theta [n])}, a line for each run, queries beside keys: frequencies from fast to slow against
    layers, and within them heads.
    """
    fig, axes = plt.subplots(len(found), 2, figsize=(11, 0.8 + 4.2 * len(found)), squeeze=False, layout='constrained')
    ends = dict(vmin=min(x.min() for x, _ in found.values()), vmax=max(x.max() for x, _ in found.values()))
    for line, (run, (norms, theta)) in zip(axes, found.items()):
        L, _, H, n = norms.shape
        at = range(0, n, 1 + n // 12)
        waves = [f'{x:.1f}' if x < 100 else f'{x:,.0f}' for x in (2 * np.pi / theta[list(at)]).tolist()]
        for ax, x, name in zip(line, norms.unbind(dim=1), ('queries', 'keys')):
            image = ax.imshow(x.reshape(L * H, n).T.numpy(), aspect='auto', cmap='viridis', interpolation='nearest', **ends)
            ax.set_xticks([i * H + (H - 1) / 2 for i in range(0, L, 1 + L // 16)], range(1, L + 1, 1 + L // 16))
            ax.set_yticks(at, waves)
            ax.set(title=f'{name}, {run}' if len(found) > 1 else name, xlabel='layer, and within it head' if H > 1 else 'layer')
            for i in range(1, L):
                ax.axvline(i * H - 0.5, color='white', lw=0.5 if L <= 12 else 0.2)
        line[0].set_ylabel('wavelength (tokens), fast to slow')
        line[1].set_yticklabels([])
    fig.colorbar(image, ax=axes, label=label)
    fig.suptitle(title)
    return fig


@torch.no_grad()
def row_norms(attn):
    """Norms [2, H, D] of the rows of W_Q and W_K that make each feature of a head's queries and keys."""
    W_O = attn.proj.weight                                                              # (C, H out_dim)
    ends = torch.cat([torch.eye(len(W_O)), torch.zeros(1, len(W_O))]).to(W_O.dtype)[None]       # the last: what a bias adds
    return torch.stack([(x[0, :-1] - x[0, -1]).norm(dim=0).view(attn.heads, -1) for x in attn.project(ends)[:2]])


def norms(model, task, cfg):
    """Are there massive values, and at which frequencies? Norms of the rows of W_Q and W_K that make each rotated feature; needs no text.

    Rows: for each head, or layer, the largest over the median norm, of queries and of keys, and the wavelength of that largest (of a layer,
    its most extreme head's). A pair of RoPE counts as sqrt(|row|^2 + |row'|^2). summary: means of the ratios; `slow`: share of heads whose
    largest lies in the slower half.
    """
    found, theta = [], None
    for block in model.blocks:
        x = row_norms(block.attn)                                                       # (2, H, D)
        part = rotating(block.attn.pe)
        x = x[:, :part.cfg.heads, -part.cfg.head_dim:]
        found.append(x if isinstance(part, encodings.PoPE) else x.unflatten(-1, (-1, 2)).norm(dim=-1))
        theta = frequencies_of(part, x)
    found = torch.stack(found)                                                          # (L, 2, H, n)
    ratio, at = found.amax(dim=-1) / found.quantile(0.5, dim=-1), found.argmax(dim=-1)
    wavelength = (2 * np.pi / theta)[at]
    columns = {f'{what}_{of}': x[:, i] for i, of in enumerate('qk') for what, x in (('ratio', ratio), ('wavelength', wavelength))}
    many = ratio[:, 0].numel() > 60
    if many:                                                                            # of each layer the most extreme head
        best = {of: columns[f'ratio_{of}'].argmax(dim=1, keepdim=True) for of in 'qk'}
        columns = {name: x.gather(1, best[name[-1]]) for name, x in columns.items()}
    rows = [{key: x for key, x in row.items() if key != 'head' or not many} for row in head_rows(columns)]
    summary = dict(ratio_q=number(ratio[:, 0].mean()), ratio_k=number(ratio[:, 1].mean()),
                   slow=number((at >= len(theta) // 2).double().mean()))
    title = f'{titled(cfg)}: norms of the rows of W_Q and W_K at each frequency'
    return rows, summary, lambda plt: frequency_figure(plt, {made(cfg): (found, theta)}, 'norm of the rows', title)


def curves_of(enc, q, k, state):
    """The logit [H, T] of a query q [1, H, 1, D] at the last of T places with the same key k at each of them, by distance 0..T-1; q and k
    [1, H, T, D] where an encoding has been added to them.
    """
    pos = torch.arange(q.shape[2])
    return enc.logits(q, k, pos, state)[0, :, -1].flip(-1)


@torch.no_grad()
def tuning_curves(model, row, length, contents):
    """[layers, contents, heads, length]: logits by distance of a query and a key drawn from what stands in row [1, T]. Where positions are
    added to the embedding, of layer 1 only, for the query's and the key's token.
    """
    source, pos = torch.Generator().manual_seed(0), torch.arange(length)
    pairs = torch.randint(row.shape[1], (contents, 2), generator=source).tolist()
    enc = model.blocks[0].attn.pe
    state = enc.state(torch.zeros(1, length, model.cfg.d_model), pos)
    added = not isinstance(model, Llama) and enc.embed(torch.zeros(1, length, model.cfg.d_model), pos).any()
    if added:
        block, x = model.blocks[0], model.embedding(row)
        see = lambda i: block.norm_1(enc.embed(x[:, i:i + 1].expand(1, length, -1), pos))
        heads = lambda x, i: block.attn.project(x)[i].unflatten(-1, (block.attn.heads, -1)).transpose(1, 2)
        return torch.stack([curves_of(enc, heads(see(t), 0), heads(see(s), 1), state) for t, s in pairs])[None]
    everywhere = lambda x, i: x[:, :, i:i + 1].expand(-1, -1, length, -1).contiguous()
    return torch.stack([torch.stack([curves_of(enc, everywhere(q, t), everywhere(k, s), state) for t, s in pairs])
                        for enc, q, k, _ in inside(model, row)])


def tuning(model, task, cfg, length=0, contents=24):
    """At which distance does a query like a key best? Logits against distance for fixed content, of any encoding (PoPE eq. 2 and 6).

    length: distances 0..length-1, 0: twice the longest total length trained on, at most 512; contents: pairs of a query and a key drawn
    from a held-out sequence. With positions added to the embedding: of layer 1. Rows, for each head or layer: `range`, largest minus
    smallest mean logit over the distances; `peak`, the median preferred distance; `shift`, the spread (interquartile range, tokens) of the
    preferred distance over contents, which PoPE's phases keep small and RoPE's confound does not; shares of the logits' variance: `where`
    by distance, `what` by content, `both` by neither alone.
    """
    if any(getattr(m, 'reads_content', False) for m in model.modules()):
        raise UserError(f'tuning asks for a logit at any distance, and the positions of {cfg.pe} come from the content: see the probe cursor')
    length, (row,) = length or min(512, 2 * cfg.train_len), sequences(task, cfg.train_lengths, 0, 1)
    curves = tuning_curves(model, row, length, contents).double()                       # (L, N, H, d)
    if (curves.amax(dim=-1) - curves.amin(dim=-1)).max() <= 1e-5 * curves.abs().max():
        raise UserError(f'tuning wants logits that see distances, and those of {titled(cfg)} do not: take rope, pope or alibi')
    mean, where, what = curves.mean(dim=(1, 3), keepdim=True), curves.mean(dim=1, keepdim=True), curves.mean(dim=3, keepdim=True)
    total = (curves - mean).square().mean(dim=(1, 3)).clamp(min=1e-20)
    best = curves.argmax(dim=-1).double()                                               # (L, N, H)
    low, peak, high = best.quantile(torch.tensor([0.25, 0.5, 0.75]).double(), dim=1)
    spread = where.amax(dim=-1) - where.amin(dim=-1)
    columns = dict(range=spread[:, 0], peak=peak, shift=high - low, where=(where - mean).square().mean(dim=(1, 3)) / total,
                   what=(what - mean).square().mean(dim=(1, 3)) / total,
                   both=(curves - where - what + mean).square().mean(dim=(1, 3)) / total)
    summary = {key: number(x.mean()) for key, x in columns.items()} | dict(distances=length)
    return head_rows(columns), summary, lambda plt: tuning_figure(plt, curves, columns['range'], cfg)


def tuning_figure(plt, curves, spread, cfg):
    """The figure of `tuning`: the heads that tell distances apart most."""
    L, N, H, T = curves.shape
    order = spread.flatten().argsort(descending=True)[:6].tolist()
    fig, axes = panels(plt, len(order), 4, 3)
    for ax, (i, h) in zip(axes, (divmod(x, H) for x in order)):
        for number, curve in enumerate(curves[i, :8, h]):
            ax.plot(curve.numpy(), color=QUERY, alpha=0.3, lw=0.8, label=None if number else 'one query and key (dot: at its largest)')
            if curve.max() > curve.min():
                ax.plot(curve.argmax(), curve.max(), 'o', color=QUERY, ms=4)
        ax.plot(curves[i, :, h].mean(dim=0).numpy(), color=KEY, lw=2 if T < 200 else 0.8, label='mean of all')
        ax.set(title=f'head {i + 1}.{h + 1}', xlabel='distance t - s (tokens)', ylabel='logit')
        if cfg.train_len < T:
            ax.axvline(cfg.train_len, color='crimson', lw=1, label=trained_to(cfg, cfg.train_len))
    fig.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc='outside lower center', ncols=3)
    fig.suptitle(titled(cfg))
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# the position-generalization paper

def three_axes(W, ridge=1e-6):
    """Eq. 6: a, b, c [N, T] that minimize sum_{i >= j} (W_ij - a_{i-j} - b_i - c_j)^2 + ridge (|a|^2 + |b|^2 + |c|^2), and their sum [N, T,
    T].

    W [N, T, T]. The matrix of the normal equations (eq. 7), (3T)^2, is the same for every head. (Eq. 7 writes b and c the other way round than eq.
    2.)
    """
    T, lower = W.shape[-1], torch.ones(W.shape[-2:], dtype=torch.bool).tril()
    t = torch.arange(T)
    back = (t[:, None] - t).clamp(min=0)                                                # i - j, and also: column d of row t is key t - d
    W = W.double().masked_fill(~lower, 0)
    sums = torch.cat([W.gather(-1, back.expand_as(W)).masked_fill(~lower, 0).sum(dim=-2), W.sum(dim=-1), W.sum(dim=-2)], dim=-1)  # (N, 3T)
    L = lower.double()
    ab, ac, diagonal = L.T, L.flip(0), torch.cat([T - t, t + 1, T - t]).double()        # which d meets i, which d meets j
    M = torch.cat([torch.cat([torch.zeros(T, T), ab, ac], dim=1), torch.cat([ab.T, torch.zeros(T, T), L], dim=1),
                   torch.cat([ac.T, L.T, torch.zeros(T, T)], dim=1)]).double() + (diagonal + ridge).diag()
    a, b, c = torch.cholesky_solve(sums.T, torch.linalg.cholesky(M)).T.chunk(3, dim=-1)
    return a, b, c, a[:, back] + b[:, :, None] + c[:, None]


def axes(model, task, cfg, length=0, n=8):
    """Is a logit a sum over distance, query and key? W_ij ~ a_{i-j} + b_i + c_j for i >= j (the position-generalization paper, section 3.1).

    length: of the problems or of the text, 0: the longest trained on, of a text at most 512 tokens; n: sequences (of a Llama 1, unless
    given). Rows: Pearson's r of the fit with the logits, over i >= j, for each head, or each layer where there are many. summary.mean_r:
    over all heads.
    """
    found, first = [], None
    for row in sequences(task, cfg.train_lengths, length, n):
        lower, layers = torch.ones(row.shape[1], row.shape[1], dtype=torch.bool).tril(), inside(model, row)
        found.append(torch.stack([correlation(*(x[:, lower] for x in axes_of(*layer))) for layer in layers]))
        first = first or layers
    r = torch.stack(found).nanmean(dim=0)                                               # (L, H)
    summary = dict(mean_r=number(r.nanmean()), lowest=number(r.nan_to_num(1).min()), tokens=first[0][1].shape[2])

    def one(i, h):
        W, fit = (x[h].float() for x in axes_of(*first[i]))
        above = torch.ones_like(W, dtype=torch.bool).triu(1)
        return W.masked_fill(above, torch.nan), fit.masked_fill(above, torch.nan)
    title = f'{titled(cfg)}: logits over distance + query + key, mean r {summary["mean_r"]}'
    names = ('logits W', r'$a_{i-j} + b_i + c_j$', 'query i', 'key j')
    return head_rows(dict(r=r)), summary, lambda plt: maps_figure(plt, r, one, names, title)


@torch.no_grad()
def axes_of(enc, q, k, state):
    """The logits of a layer and their fit by three axes, [H, T, T] each."""
    W = enc.logits(q, k, torch.arange(q.shape[2]), state)[0]
    return W, three_axes(W)[-1]


def maps_figure(plt, r, maps, names, title):
    """The best, the worst and two heads between by r [L, H]: their map above, its fit below in the same colours; and r of all heads."""
    order = r.flatten().nan_to_num(-2).argsort(descending=True)
    chosen = [divmod(order[i].item(), r.shape[1]) for i in dict.fromkeys(round(x * (len(order) - 1)) for x in (0, 1 / 3, 2 / 3, 1))]
    fig, axes = plt.subplots(2, len(chosen) + 1, figsize=(3.3 * len(chosen) + 3.5, 6), layout='constrained', squeeze=False)
    for column, (i, h) in zip(axes.T, chosen):
        both = maps(i, h)
        seen = both[0][~both[0].isnan()]
        for ax, m, name in zip(column, both, names):
            image = ax.imshow(m.numpy(), cmap='viridis', interpolation='nearest', vmin=seen.quantile(0.005), vmax=seen.quantile(0.995))
            ax.set_title(f'{name}, head {i + 1}.{h + 1}' + (f', r {r[i, h]:.3f}' if ax is column[1] else ''), fontsize=10)
            ax.set_xlabel(names[3])
        fig.colorbar(image, ax=column, label='logit', location='bottom', shrink=0.8)
    for ax in axes[:, 0]:
        ax.set_ylabel(names[2])
    head_grid(fig, axes[0][-1], r, 'r of each head')
    axes[1][-1].hist(r[~r.isnan()].numpy(), bins=np.linspace(min(0.9, r.nan_to_num(1).min().item()), 1 + 1e-6, 21), color=QUERY)
    axes[1][-1].set(xlabel='r', ylabel='heads')
    axes[1][-1].locator_params(nbins=4)
    axes[1][-1].locator_params(axis='y', integer=True)
    fig.suptitle(title)
    return fig


def two_axes(W):
    """Eq. 12: W_dj ~ a_d + b_j by least squares, split evenly: a, b and their sum, of W [.., n, m]."""
    mean = W.mean(dim=(-2, -1), keepdim=True)
    a, b = W.mean(dim=-1, keepdim=True) - mean / 2, W.mean(dim=-2, keepdim=True) - mean / 2
    return a.squeeze(-1), b.squeeze(-2), a + b


def slow_dominating(zq, zk, theta, trained):
    """(mean product of norms [H, n], which pairs are slow and dominating [H, n]) of rotating pairs zq, zk [H, T, n].

    Ours, since the paper names no threshold: above 3 times the head's median, and turning by less than pi/2 over the trained length.
    """
    product = zq.abs().mean(dim=1) * zk.abs().mean(dim=1)
    return product, (product > 3 * product.quantile(0.5, dim=-1, keepdim=True)) & (theta * trained < np.pi / 2)


def analytic(zq, zk, theta, slow):
    """f, g, the signed g and the whole g [H, T, T] of eq. 15, for query i and key j, from the slow dominating pairs.

    f = Re sum_r conj(q_r) kbar_r e^(-i (i-j) theta_r), with kbar's angle, as f is no function of k; g = sum_r |k_r - kbar_r| |q_r|
    cos(arg q_r - arg k_r), which has lost the sign of k - kbar: the signed g has its projection on kbar in place of both, Re sum_r
    conj(q_r) u_r Re((k_r - kbar_r) conj(u_r)) with u = kbar / |kbar|, and the whole g is the logit at distance 0 that k - kbar adds, Re
    sum_r conj(q_r) (k_r - kbar_r).
    """
    t = torch.arange(zq.shape[1])
    kbar = zk.mean(dim=1, keepdim=True)                                                 # (H, 1, n)
    unit, conj = lambda z: z / z.abs().clamp(min=1e-12), zq.conj() * slow[:, None]
    turn = -theta[:, None] * t                                                          # (n, d)
    f = ((conj * kbar) @ torch.polar(torch.ones_like(turn), turn)).real                 # (H, T, d)
    f = f.gather(-1, (t[:, None] - t).clamp(min=0).expand_as(f))
    along = ((zk - kbar) * unit(kbar).conj()).real * unit(kbar)                         # of k - kbar, what lies along kbar
    return f, *((conj @ z.transpose(-2, -1)).real for z in ((zk - kbar).abs() * unit(zk), along, zk - kbar))


def disentangle(model, task, cfg, length=0, n=4, queries=8):
    """Does a query treat distance and content apart? With fake distances W'_dj ~ a_d + b_j (the position-generalization paper, section 3.2, eq. 12).

    length, n: as for axes; queries: so many of each sequence, evenly spread; as many d, from 0, as keys. Rows, for each head or layer:
    r, of W' with the fit, mean over queries; of rotating encodings also, of the logits over i >= j, r_fg with eq. 15's f + g from the slow
    dominating pairs (see `tuples`), in heads that have some, r_signed with g signed (see analytic); r_all, r_whole: of all pairs, with g as
    eq. 15 has it and with the whole k - mean. summary.mean_r: r over all heads.
    """
    enc = model.blocks[0].attn.pe
    if not enc.shift_invariant or enc.widens or not sees_distances(model, drawn(task, cfg.train_lengths, length, 1)[0]):
        raise UserError(f'disentangle asks for the logit at any distance, which pe={cfg.pe} has not: take rope, pope, alibi or t5')
    rotates = any(isinstance(m, (encodings.RoPE, encodings.PoPE)) for m in enc.modules())
    found, maps = [], []
    for row in sequences(task, cfg.train_lengths, length, n):
        layers = []
        for enc, q, k, state in inside(model, row):
            layers.append(dict(r=fake_fit(enc, q, k, state, queries)) | (analytic_fit(enc, q, k, state, cfg.train_len) if rotates else {}))
            if not found:
                maps.append((enc, q, k, state))
        found.append({key: torch.stack([layer[key] for layer in layers]) for key in layers[0]})
    columns = {key: torch.stack([one[key] for one in found]).nanmean(dim=0) for key in found[0]}
    summary = {'mean_' + key: number(x.nanmean()) for key, x in columns.items()} | dict(tokens=maps[0][1].shape[2])
    if rotates:
        summary['heads_with_slow_pairs'] = (~columns['r_fg'].isnan()).sum().item()

    def one(i, h):
        enc, q, k, state = maps[i]
        W = fake_logits(enc, q[:, :, q.shape[2] // 2:][:, :, :1], k, state)[h]
        return W, two_axes(W)[-1]
    names = ("fake logits W'", r'$a_d + b_j$', 'fake distance d', 'key j')
    title = f'{titled(cfg)}: logits over distance + key, mean r {summary["mean_r"]}'
    return head_rows(columns), summary, lambda plt: maps_figure(plt, columns['r'], one, names, title)


@torch.no_grad()
def fake_logits(enc, q, k, state):
    """W'_dj = w(d, q, k_j) [H, T, T] of one query q [1, H, 1, D] and keys k [1, H, T, D], for the distances 0..T-1."""
    pos = torch.arange(k.shape[2])
    return logits_at(enc, q.expand_as(k), k, pos, torch.zeros_like(pos), state)[0]


def fake_fit(enc, q, k, state, queries):
    """Mean r [H] over some queries of their fake logits with a_d + b_j."""
    T, r = q.shape[2], []
    for i in range(T - 1, -1, -max(1, T // queries))[:queries]:
        W = fake_logits(enc, q[:, :, i:i + 1], k, state)
        r.append(correlation(W.flatten(1), two_axes(W.double())[-1].flatten(1)))
    return torch.stack(r).nanmean(dim=0)


@torch.no_grad()
def analytic_fit(enc, q, k, state, trained):
    """r [H] of the logits with eq. 15's f + g, and with g signed, nan without slow dominating pairs; of all pairs with f + g, and with the whole g.
    """
    zq, zk, theta = polar(enc, q[0], k[0])
    lower = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    W = enc.logits(q, k, torch.arange(q.shape[2]), state)[0][:, lower]
    slow = slow_dominating(zq, zk, theta, trained)[1]
    (f, g, signed, _), (f_all, g_all, _, whole) = analytic(zq, zk, theta, slow), analytic(zq, zk, theta, torch.ones_like(slow))
    fill = lambda fit, heads: F.pad(correlation(W[:len(fit)], fit[:, lower]).where(heads, torch.nan), (0, len(W) - len(fit)),
                                    value=torch.nan)
    some = slow.any(dim=-1)
    every = torch.ones_like(some)
    return dict(r_fg=fill(f + g, some), r_signed=fill(f + signed, some), r_all=fill(f_all + g_all, every), r_whole=fill(f_all + whole, every))


@contextlib.contextmanager
def other_logits(model, change):
    """Within, every layer attends by change(enc, q, k, state, logits) in place of its logits [B, H, T, T]."""
    hooks, states = [], {}
    for attn in (block.attn for block in model.blocks):
        heard = {}
        states[attn] = heard
        hooks += [(attn.tap_q, lambda m, _, q, heard=heard: heard.update(q=q)),
                  (attn.tap_k, lambda m, _, k, heard=heard: heard.update(k=k)), (attn.tap_logits, lambda m, _, logits, heard=heard,
                   enc=attn.pe: change(enc, heard['q'], heard['k'], heard['state'], logits))]
    see = lambda heard: lambda m, inputs: heard.update(state=inputs[2] if len(inputs) == 3 else None)
    before = [attn.register_forward_pre_hook(see(heard)) for attn, heard in states.items()]
    try:
        with hooked(*hooks):
            yield
    finally:
        for handle in before:
            handle.remove()


def sees_distances(model, tokens):
    """Whether attention's logits depend on position, and through distances alone, so that logits_at can put keys elsewhere."""
    enc, q, k, state = inside(model, tokens[:1])[0]
    pos = torch.arange(q.shape[2])
    with torch.no_grad():
        here, there = logits_at(enc, q, k, pos, pos, state), logits_at(enc, q, k, pos, pos - 1, state)
        return torch.allclose(here + encodings.causal(here), enc.logits(q, k, pos, state), 1e-3, 1e-4) and not torch.allclose(here, there)


def transposition(T, gamma, l_max, source):
    """A permutation [T] that swaps pairs at most l_max apart, disjoint, until about gamma T places have moved."""
    order, swaps = list(range(T)), gamma * T / 2
    swaps = int(swaps) + (torch.rand((), generator=source).item() < swaps % 1)
    for i in torch.randperm(T, generator=source).tolist():
        free = [j for j in range(max(0, i - l_max), min(T, i + l_max + 1)) if j != i and order[j] == j] if swaps and order[i] == i else []
        if free:
            j = free[torch.randint(len(free), (), generator=source).item()]
            order[i], order[j], swaps = j, i, swaps - 1
    return torch.tensor(order)


def offsets(T, gamma, l_max, source):
    """Integers [T]: with probability gamma one of -l_max..l_max but 0, else 0."""
    size = torch.randint(1, l_max + 1, (T,), generator=source) * (2 * torch.randint(2, (T,), generator=source) - 1)
    return size * (torch.rand(T, generator=source) < gamma)


@torch.no_grad()
def perturbed(model, kind, tokens, targets, gamma, l_max, source):
    """One sequence [1, T] under one perturbation (the position-generalization paper, section 4.1): losses, which are right, which asked for, [1, T]."""
    T = tokens.shape[1]
    pos, change = torch.arange(T), contextlib.nullcontext()
    if kind == 'text':
        order = transposition(T, gamma, l_max, source)
        moved = F.pad(order != pos, (0, 1))[1:]                                         # where the token that is to be predicted has moved
        tokens, targets = tokens[:, order], targets.masked_fill(moved, -100)
    elif kind == 'feature':
        shuffled = lambda order: lambda m, _, k: k[:, :, order]
        change = hooked(*((block.attn.tap_k, shuffled(transposition(T, gamma, l_max, source))) for block in model.blocks))
    elif kind == 'position':
        shift = {block.attn.pe: offsets(T, gamma, l_max, source) for block in model.blocks}
        change = other_logits(model, lambda enc, q, k, state, logits: logits_at(enc, q, k, pos, pos + shift[enc], state)
                              + encodings.causal(logits))
    with change:
        logits = model(tokens)[0]
    return train.token_losses(logits, targets), logits.argmax(dim=-1) == targets, targets != -100


def scores_of(model, kind, tokens, targets, *perturbation):
    """dict(loss in nats per token, share of tokens right, share of sequences all right), each sequence [n, T] perturbed in its own way."""
    losses, right, asked = (torch.cat(x) for x in zip(*(perturbed(model, kind, *one, *perturbation)
                                                        for one in zip(tokens.split(1), targets.split(1)))))
    exact = (right | ~asked).all(dim=1).double().mean()
    return dict(loss=number(losses.double().sum() / asked.sum()), token=number(right.sum() / asked.sum()), exact=number(exact))


def perturb(model, task, cfg, length=0, n=0, gammas='0.01,0.05,0.1,0.5', l_max='5,10,100'):
    """How much disorder does a model bear? A share gamma perturbed within l_max (the position-generalization paper, section 4.1, Figure 5, Table 1).

    length: as for axes; n: 128 problems, or 16 stretches of text (of a Llama 2), unless given. Three ways: `text`: tokens change places in
    pairs, scored where the token to be predicted has not moved (an algorithmic task's problem is then another one, and the old answer is
    still asked for); `feature`: keys change places, in every layer others; `position`: a key counts as up to l_max places away from where
    it is, where attention sees distances. Rows: loss in nats per token, share of tokens, and of sequences, right; `cost`: loss over the
    original one. summary: the original's, and each way's mean cost at the gamma nearest to 0.05. Of a text these are next tokens: Table 1's
    answers to questions about documents need a benchmark, which a text is not.
    """
    try:
        values = [float(x) for x in gammas.split(',')], [int(x) for x in l_max.split(',')]
    except ValueError:
        values = [0], [0]
    if min(values[0]) <= 0 or max(values[0]) > 1 or min(values[1]) < 1:
        raise UserError('--gammas are shares above 0 and up to 1, --l_max whole numbers from 1 on, both comma lists')
    source = train.generator('cpu', 'test', 0)
    tokens, targets = drawn(task, cfg.train_lengths, length, n or (16 if task.corpus else 128))
    kinds = ('text', 'feature') + ('position',) * sees_distances(model, tokens)
    rows = [dict(kind='original', gamma=None, l_max=None, **scores_of(model, 'original', tokens, targets, 0, 0, None))]
    for kind in kinds:
        for gamma in values[0]:
            for l in values[1]:
                rows.append(dict(kind=kind, gamma=gamma, l_max=l, **scores_of(model, kind, tokens, targets, gamma, l, source)))
                rows[-1]['cost'] = None if None in (rows[-1]['loss'], rows[0]['loss']) else number(rows[-1]['loss'] - rows[0]['loss'])
    near = min(values[0], key=lambda gamma: abs(gamma - 0.05))
    cost = lambda kind: np.mean([row['cost'] for row in rows if row['kind'] == kind and row['gamma'] == near and row['cost'] is not None]
                                or [np.nan])
    summary = {key: rows[0][key] for key in ('loss', 'token', 'exact')}
    summary |= {f'cost_{kind}': number(cost(kind)) for kind in kinds} | dict(gamma=near)
    return rows, summary, lambda plt: perturb_figure(plt, rows, kinds, *values, 'token' if task.corpus else 'exact', cfg)


def perturb_figure(plt, rows, kinds, gammas, lengths, right, cfg):
    """The figure of `perturb`: over gamma and l_max the cost in loss, and the share `right`: of tokens, or of exact answers."""
    share = {'token': 'share of tokens right', 'exact': 'share of answers right (exact match)'}[right]
    fig, axes = plt.subplots(2, len(kinds), figsize=(3.6 * len(kinds) + 1, 6), squeeze=False, layout='constrained')
    for line, (key, label) in zip(axes, (('cost', 'loss over the original (nats per token)'), (right, share))):
        values = {kind: [row[key] for row in rows if row['kind'] == kind] for kind in kinds}
        table = {kind: np.array(x, dtype=float).reshape(len(gammas), len(lengths)).T for kind, x in values.items()}
        top = max(np.nanmax(x, initial=1e-9) for x in table.values()) if key == 'cost' else 1
        for ax, kind in zip(line, kinds):
            image = ax.imshow(table[kind], cmap='viridis', vmin=0, vmax=top, aspect='auto', origin='lower')
            for (y, x), value in np.ndenumerate(table[kind]):
                ax.text(x, y, f'{value:.3f}', ha='center', va='center', color='black' if value >= 0.6 * top or np.isnan(value) else 'white',
                        fontsize=8)
            ax.set_xticks(range(len(gammas)), gammas)
            ax.set_yticks(range(len(lengths)), lengths)
            ax.set(title=f'{kind} order' if kind != 'position' else 'position indices', xlabel='share perturbed, gamma')
        line[0].set_ylabel('largest distance, l_max (tokens)')
        fig.colorbar(image, ax=line, label=label)
    fig.suptitle(f'{titled(cfg)}: perturbed positions\nwithout, loss {rows[0]["loss"]}, {share} {rows[0][right]}')
    return fig


def infinite_logits(near, far, d, L, first):
    """LM-Infinite's logits from those at true distances (near) and those at distance L (far), [.., T, T]; d = t - s [T, T].

    The last L keys as they are; before them, the first tokens only, at distance L.
    """
    start = torch.arange(d.shape[1]) < first
    return torch.where(d <= L, near, torch.where(start, far, -torch.inf))


def retrieved_logits(near, far, mid, d, l, first, top):
    """InfLLM's: the last l keys as they are; of those before, the first tokens at the trained length's distance (far), and at distance l
    (mid) the `top` that the query likes best.
    """
    start = torch.arange(d.shape[1]) < first
    between = mid.masked_fill((d <= l) | start, -torch.inf)
    least = between.topk(min(top, d.shape[1]), dim=-1)[0][..., -1:]
    return torch.where(d <= l, near, torch.where(start, far, between.masked_fill(between < least, -torch.inf)))


ELLIPSE = 9.21  # 99 % of a normal distribution in the plane: chi^2 with 2 degrees
LAYOUTS = ('as trained', 'clamped', 'LM-Infinite', 'InfLLM')


def laid_out(layout, window):
    """For other_logits: attention with distances laid out for a trained length of `window` tokens (the position-generalization paper, section 4.2)."""
    first, top = max(1, min(10, window // 8)), max(1, min(32, window // 4))

    def change(enc, q, k, state, logits):
        pos = torch.arange(q.shape[2])
        d = pos[:, None] - pos
        at = lambda distance: logits_at(enc, q, k, torch.full_like(pos, distance), torch.zeros_like(pos), state)
        if layout == 'clamped':
            return torch.where(d <= window, logits, at(window))
        if layout == 'LM-Infinite':
            return infinite_logits(logits, at(window), d, window, first)
        return retrieved_logits(logits, at(window), at(window // 2), d, window // 2, first, top)
    return change


@torch.no_grad()
def sliding(enc, q, k, v, state, t, window, step):
    """Outputs [windows, H out_dim] of query t [1, H, T, D] over each stretch of window keys and values, as if it stood at their end."""
    outputs = []
    for i in range(0, k.shape[2] - window + 1, step):
        pos, cut = torch.arange(window), slice(i, i + window)
        weights = enc.logits(q[:, :, t:t + 1].expand(-1, -1, window, -1), k[:, :, cut], pos, state).softmax(dim=-1)
        outputs.append(enc.mix(weights, v[:, :, cut], pos, state)[0, :, -1].flatten())
    return torch.stack(outputs)


def plane(x):
    """(mean, the two main axes [2, D], their standard deviations) of points x [N, D]: PCA."""
    _, size, axes = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    return x.mean(dim=0), axes[:2], size[:2] / (len(x) - 1) ** 0.5


def stretch(model, task, cfg, length=0, n=8, window=0, layer=0, queries=6):
    """What lets a model go beyond its trained length? Sliding windows, distances that stop there (the position-generalization paper, section 4.2).

    length: 0: the longest evaluated, of a text at most 512 tokens; n: problems, or stretches of text (of a Llama 2, unless given); window:
    tokens taken for the trained length, 0: that itself, or half of the sequence if that is less. Lengths end at 8,192, since the maps are
    length x length: a Llama trained to as many is seen with such a shorter window only. layer: the one looked at, 0: the middle one. Rows:
    loss by part of the sequence, in nats, as trained; with distances clamped at the window; with only the window and the first 10 tokens
    (LM-Infinite); with half of it, the first 10, and 32 retrieved keys for each query (InfLLM); of a small window at most an eighth as
    first, a quarter as retrieved keys. summary: means over the targets beyond the window; `inside`: share of the outputs of some queries
    over sliding windows within the 99 % ellipse of the normal outputs on the plane of their two main axes (Figure 6).
    """
    tokens, targets = drawn(task, cfg.eval_lengths, length, n)
    T, layer = tokens.shape[1], layer or (len(model.blocks) + 1) // 2
    window = window or min(cfg.train_len, T // 2)
    if layer > len(model.blocks) or not 1 < window < T:
        raise UserError(f'stretch: layer is from 1 to {len(model.blocks)}, and window from 2 to {T - 1}, the tokens here less one')
    if not (model.blocks[0].attn.pe.shift_invariant and sees_distances(model, tokens)):
        raise UserError(f'stretch lays distances out anew, which pe={cfg.pe} does not see in attention: take rope, pope, alibi or t5')
    curves = {}
    for layout in LAYOUTS:
        with other_logits(model, laid_out(layout, window)) if layout != LAYOUTS[0] else contextlib.nullcontext():
            curves[layout] = losses_by_position(model, tokens, targets)[:-1]
    parts = torch.arange(T - 1).tensor_split(8)
    means = lambda part: {name: number(curve[part].nanmean()) for name, curve in curves.items()}
    rows = [dict(first=part[0].item() + 1, last=part[-1].item() + 1, **means(part)) for part in parts if len(part)]
    normal, lines = windows_of(model, tokens[:1], layer - 1, window, queries)
    mean, axes, std = plane(normal)
    project = lambda x: (x - mean) @ axes.T
    inside_share = (project(torch.cat(list(lines.values()))) / std).square().sum(dim=-1).lt(ELLIPSE).double().mean()
    summary = means(slice(window, None)) | dict(inside=number(inside_share), window=window, tokens=T, layer=layer)
    shown = project(normal), std, {t: project(x) for t, x in lines.items()}
    return rows, summary, lambda plt: stretch_figure(plt, curves, *shown, window, layer, cfg)


@torch.no_grad()
def windows_of(model, tokens, layer, window, queries):
    """A layer's attention outputs at the first window tokens [window, H out_dim]; {t: over sliding windows [windows, H out_dim]} of
    queries.
    """
    attn, heard = model.blocks[layer].attn, []
    handle = attn.register_forward_pre_hook(lambda m, inputs, named: heard.append(inputs[0] if inputs else named['hidden_states']),
                                            with_kwargs=True)
    with listening(attn.tap_head_out) as outputs:
        try:
            enc, q, k, state = inside(model, tokens)[layer]
        finally:
            handle.remove()
    v, T = attn.project(heard[0])[2].unflatten(-1, (attn.heads, -1)).transpose(1, 2), q.shape[2]
    step = max(1, (T - window) // 40)
    lines = {t: sliding(enc, q, k, v, state, t, window, step) for t in torch.linspace(window, T - 1, queries).long().tolist()}
    return outputs[0][2][0, :, :window].transpose(0, 1).flatten(1), lines


def stretch_figure(plt, curves, normal, std, lines, window, layer, cfg):
    """The figure of `stretch`: loss by position for each layout; attention's outputs on the plane of their main axes, six queries at most.
    """
    fig, axes = plt.subplots(1, 2, figsize=(15, 5), layout='constrained')
    for (name, curve), colour, style in zip(curves.items(), ('black', COLOURS[1], COLOURS[0], COLOURS[2]), ('-', '-', '--', ':')):
        known = ~curve.isnan()
        at, y = torch.arange(1, len(curve) + 1)[known], curve[known]
        width = max(1, len(y) // 12)
        smooth = F.avg_pool1d(y[None, None], width, 1)[0, 0]
        axes[0].plot((at[:len(smooth)] + (width - 1) / 2).numpy(), smooth.numpy(), style, color=colour, lw=2, label=name)
    axes[0].axvline(window, color='crimson', lw=1)
    axes[0].set(title='loss', xlabel=f'position; window of {window} tokens (red line)', ylabel='loss (nats per token), smoothed')
    axes[0].legend()
    axes[1].scatter(*normal.T.numpy(), s=14, color='0.75', label='first window: every query over the keys up to it')
    angle = np.linspace(0, 2 * np.pi, 200)
    axes[1].plot(*(ELLIPSE ** 0.5 * std.numpy()[:, None] * np.stack([np.cos(angle), np.sin(angle)])), '--', color='black', lw=1,
                 label='99 % of these, if normal')
    for (t, line), colour in zip(lines.items(), COLOURS):
        axes[1].plot(*line.T.numpy(), 'o-', lw=0.8, ms=3.5, alpha=0.8, mew=0, color=colour, label=f'query {t + 1} over sliding windows')
    axes[1].set(title=f'attention output of layer {layer}', xlabel='first main axis', ylabel='second main axis')
    axes[1].legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    fig.suptitle(f'{titled(cfg)}: beyond {window} tokens')
    return fig


def entropies(W):
    """Entropy in nats [.., T] of the attention of every row of causal logits W [.., T, T]."""
    p = W.softmax(dim=-1)
    return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(dim=-1)


def slope(y, x):
    """Slope [..] of the least-squares line through y [.., n] over x [n]."""
    x = x - x.mean()
    return (y * x).sum(dim=-1) / x.square().sum()


@torch.no_grad()
def entropy(model, task, cfg, length=0, n=8):
    """Does attention dilute as the row grows? Its entropy against log n, which uniform attention has (what vipe's log(n) corrects).

    length: 0: the longest evaluated, of a text at most 512 tokens; n: sequences (of a Llama 1, unless given). Rows, for each head or layer:
    `slope` of the entropy over log n, 1 for uniform attention and 0 where it does not dilute, over row lengths from 8 on; `end`: entropy of
    the last row over log n.
    """
    rows = sequences(task, cfg.eval_lengths, length, n)
    T = min(row.shape[1] for row in rows)
    of_row = lambda enc, q, k, state: entropies(enc.logits(q, k, torch.arange(q.shape[2]), state))[0, :, :T].double()
    found = torch.stack([torch.stack([of_row(*layer) for layer in inside(model, row)]) for row in rows]).mean(dim=0)       # (L, H, T)
    logs, start = torch.arange(1, T + 1).double().log(), min(7, T // 2)
    slopes = slope(found[..., start:], logs[start:])
    columns = dict(slope=slopes, end=found[..., -1] / logs[-1])
    summary = dict(mean_slope=number(slopes.mean()), highest=number(slopes.max()), mean_end=number(columns['end'].mean()), tokens=T)
    return head_rows(columns), summary, lambda plt: entropy_figure(plt, found, slopes, cfg)


def entropy_figure(plt, found, slopes, cfg):
    """The figure of `entropy`: a curve for every layer, mean over heads, and the slope of every head."""
    L, H, T = found.shape
    fig, axes = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout='constrained')
    n = torch.arange(1, T + 1)
    axes[0].plot(n.numpy(), n.log().numpy(), '--', color='black', label='log n (uniform)')
    bins = n.split(torch.tensor(np.logspace(0, np.log10(T + 1), 40)).round().long().unique().diff().tolist())  # of even width in log n
    for i, layer in enumerate(found.mean(dim=1)):
        axes[0].plot([part.double().mean() for part in bins], [layer[part - 1].mean() for part in bins],
                     color=plt.cm.viridis(i / max(1, L - 1)), label=f'layer {i + 1}' if i in (0, L - 1) or L <= 8 else None)
    if cfg.train_len < T:
        axes[0].axvline(cfg.train_len, color='crimson', lw=1)
    axes[0].set(xscale='log', xlabel=f'row length n (tokens); {trained_to(cfg, cfg.train_len)} (red line)' if cfg.train_len < T
                else 'row length n (tokens)', ylabel='entropy (nats), mean over heads')
    axes[0].legend(fontsize=8)
    head_grid(fig, axes[1], slopes, 'slope of the entropy over log n')
    fig.suptitle(f'{titled(cfg)}: entropy of attention by row length')
    return fig


def tuples(model, task, cfg, length=0, n=4):
    """Which pairs of features turn slowly and dominate the logits? Observation 1 (the position-generalization paper, section 3.3, Figure 4).

    length, n: as for axes. Rows: the slow dominating pairs (see slow_dominating), the strongest 60: wavelength in tokens; `logit` = mean
    |q_r| mean |k_r| / sqrt(d); `ratio` of that to the head's median pair; `rotation` over the trained length and mean starting `angle`, arg
    q_r - arg k_r, in radians; `spread`: standard deviation of q_r conj(k_r) over all pairs of tokens, over the length of its mean; `fixed`
    = mean |k_r - kbar_r| / |kbar_r|, which Observation 1 wants small. Without such pairs there is no table, and the summary says so.
    """
    z = [torch.stack([torch.stack(polar(enc, q[0], k[0])[:2]) for enc, q, k, _ in inside(model, row)]) for row in
         sequences(task, cfg.train_lengths, length, n)]
    zq, zk = torch.cat(z, dim=-2).unbind(dim=1)                                         # (L, H, T, n) of all sequences
    enc = model.blocks[0].attn.pe
    theta = frequencies_of(rotating(enc), zq.real)
    product, slow = (torch.stack(x) for x in zip(*(slow_dominating(*one, theta, cfg.train_len) for one in zip(zq, zk))))       # (L, H, n)
    qbar, kbar = zq.mean(dim=2), zk.mean(dim=2)
    start = qbar * kbar.conj() * enc.scale
    std = ((zq.abs().square().mean(dim=2) * zk.abs().square().mean(dim=2)) * enc.scale ** 2 - start.abs().square()).clamp(min=0).sqrt()
    ratio = product / product.quantile(0.5, dim=-1, keepdim=True)
    fixed = (zk - kbar[:, :, None]).abs().mean(dim=2) / kbar.abs().clamp(min=1e-12)
    rows = [dict(layer=i + 1, head=h + 1, pair=c + 1, wavelength=number(2 * np.pi / theta[c], 1),
                 logit=number(product[i, h, c] * enc.scale),
                 ratio=number(ratio[i, h, c], 2), rotation=number(theta[c] * cfg.train_len), angle=number(start[i, h, c].angle()),
                 spread=number(std[i, h, c] / start[i, h, c].abs()), fixed=number(fixed[i, h, c])) for i, h, c in slow.nonzero().tolist()]
    rows.sort(key=lambda row: -row['logit'])
    summary = dict(pairs=len(rows), heads=slow.any(dim=-1).sum().item(), of_heads=slow[..., 0].numel(),
                   share_of_pairs=number(slow.double().mean())) | ({} if rows else dict(note='no pair is slow and dominating'))
    return rows[:60], summary, lambda plt: tuples_figure(plt, start, std, theta, slow, product, cfg)


def tuples_figure(plt, start, std, theta, slow, product, cfg):
    """The figure of `tuples`, after Figure 4: mean pairs as arrows, standard deviations as circles, rotations over the trained length as
    arcs; the heads with the strongest slow dominating pair, or, where no head has one, with the strongest pair.
    """
    L, H, n = start.shape
    order = (product * slow).amax(dim=-1).flatten()
    order = (order if order.any() else product.amax(dim=-1).flatten()).argsort(descending=True)[:6].tolist()
    fig, axes = panels(plt, len(order), 4.2, 4.6)
    for ax, (i, h) in zip(axes, (divmod(x, H) for x in order)):
        largest = start[i, h].abs().argsort(descending=True)[:5].tolist()
        for c, colour in zip(largest, COLOURS):
            z, turn = complex(start[i, h, c]), theta[c].item() * cfg.train_len
            ax.annotate('', (z.real, z.imag), (0, 0), arrowprops=dict(arrowstyle='-|>', color=colour, lw=3 if slow[i, h, c] else 1.2,
                                                                      shrinkA=0, shrinkB=0))
            ax.add_patch(plt.Circle((z.real, z.imag), std[i, h, c].item(), color=colour, fill=False, lw=0.8, ls=':'))
            if turn < 2 * np.pi:
                arc = z * np.exp(1j * np.linspace(0, turn, 100))
                ax.plot(arc.real, arc.imag, color=colour, lw=1)
            length = 2 * np.pi / theta[c].item()
            ax.plot([], color=colour, lw=3 if slow[i, h, c] else 1.2, label=f'pair {c + 1}, wavelength {length:,.0f}'
                    + ', slow, dominating' * slow[i, h, c].item())
        size = 1.1 * (start[i, h].abs() + std[i, h])[largest].max().item()
        ax.set(title=f'head {i + 1}.{h + 1}', aspect='equal', xlim=(-size, size), ylim=(-size, size), xlabel='contribution to the logit',
               ylabel='imaginary part')
        ax.axvline(0, color='grey', lw=0.5)
        ax.legend(fontsize=7, loc='lower left')
    none = '' if slow.any() else '; none is slow and dominating'
    fig.suptitle(f'{titled(cfg)}: the 5 largest pairs of each head, wavelengths in tokens{none}\n'
                 'arrow: mean; dotted: standard deviation; arc: rotation over the trained length, if within a turn')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# a Llama-family checkpoint in place of a run

class LlamaRoPE(encodings.RoPE):
    """RoPE with the frequencies theta [d/2], and the scaling, of a checkpoint's own rotary module."""
    def __init__(self, cfg, rotary):
        super().__init__(cfg)
        self.theta, self.scaling = rotary.inv_freq.float(), getattr(rotary, 'attention_scaling', 1.0)

    def qk(self, q, k, at):
        turned = encodings.rotate(q, at.t[..., None] * self.theta), encodings.rotate(k, at.s[..., None] * self.theta)
        return turned[0] * self.scaling, turned[1] * self.scaling


class LlamaAttention(Attention):
    """A Llama's attention as one of ours, taps and all: keys and values repeated for the queries that share them (GQA), and the pairs of
    features (c, c + d/2) that it rotates moved to (2c, 2c + 1).
    """
    def __init__(self, theirs, cfg, enc):
        super().__init__(cfg, enc)
        self.q_proj, self.k_proj, self.v_proj, self.proj = theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj

    def make_projections(self, cfg):
        pass

    def project(self, x):
        # (B, T, H or fewer, D)
        q, k, v = (linear(x).unflatten(-1, (-1, self.pe.cfg.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (z.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2) for z in (q, k))             # halves -> pairs
        k, v = (z.repeat_interleave(self.heads // z.shape[2], dim=2) for z in (k, v))
        return q.flatten(-2), k.flatten(-2), v.flatten(-2)

    def forward(self, hidden_states, **_):
        return super().forward(hidden_states, torch.arange(hidden_states.shape[1], device=hidden_states.device), None), None


class Llama(torch.nn.Module):
    """A LlamaForCausalLM, or a Mistral or Qwen2, that the probes can look at: its attention layers are replaced by LlamaAttention."""
    def __init__(self, net):
        super().__init__()
        c, self.net, self.blocks = net.config, net, net.model.layers
        if c.model_type not in ('llama', 'mistral', 'qwen2'):
            raise UserError(f'--hf takes checkpoints of the Llama family (llama, mistral, qwen2), not {c.model_type}')
        head_dim = getattr(c, 'head_dim', None) or c.hidden_size // c.num_attention_heads
        self.cfg = encodings.PEConfig(d_model=c.num_attention_heads * head_dim, n_head=c.num_attention_heads, n_layer=c.num_hidden_layers,
                                      train_len=c.max_position_embeddings)
        for layer in self.blocks:
            layer.attn = layer.self_attn = LlamaAttention(layer.self_attn, self.cfg, LlamaRoPE(self.cfg, net.model.rotary_emb))

    def forward(self, tokens, targets=None, total_len=None):
        return self.net(input_ids=tokens, use_cache=False).logits.float(), None


class LlamaText(data.Corpus):
    """A text file in a checkpoint's tokens, all of it for tests; every stretch begins with what its tokenizer begins a text with, if at
    all.
    """
    first = 0

    def __init__(self, tokenizer, path):
        self.vocab, self.data = tokenizer.convert_ids_to_tokens(range(len(tokenizer))), path
        self.begin = tokenizer('').input_ids
        self.ids = np.array(tokenizer(data.read_text(path), add_special_tokens=False, verbose=False).input_ids)

    def read(self):
        return [('test', self.ids)]

    def lay_out(self, pieces, length):
        return super().lay_out([[*self.begin, *piece][:length] for piece in pieces], length)


def load_llama(path, text='', needs_text=True):
    """(model, config) of a folder or GGUF file and the text to run it on, as train.load gives them of a run."""
    if not text and needs_text:
        raise UserError('--hf needs --text=FILE, a text to look at')
    if not os.path.exists(path) or text and not os.path.isfile(text):
        raise UserError(f'no such {"text file: --text=" + text if os.path.exists(path) else "folder or GGUF file: --hf=" + path}')
    is_gguf = path.endswith('.gguf')
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        if is_gguf:
            import accelerate, gguf
    except ImportError as error:
        raise UserError(f'--hf needs {error.name}: pip install transformers' + ' gguf accelerate' * is_gguf) from None
    folder, name = os.path.split(os.path.abspath(path))
    where = dict(pretrained_model_name_or_path=folder, gguf_file=name) if is_gguf else dict(pretrained_model_name_or_path=path)
    try:
        net, tokenizer = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32), AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError) as error:
        raise UserError(f'cannot load {path}: {str(error).strip().splitlines()[0]}') from None
    model = Llama(net.eval()).eval()
    c, name = model.cfg, os.path.basename(os.path.normpath(path))
    values = dict(task=name, data=text, the_task=LlamaText(tokenizer, text) if text else None, train_lengths=[c.train_len],
                  eval_lengths=[c.train_len])
    return model, types.SimpleNamespace(**vars(c), **values, out_dir=f'out/{config.slug(name)}')


PROBES = {f.__name__: f for f in (cursor, attention, alignment, squeeze, linear, steps, stats, prefix, shift, heads, positions, toeplitz, spectrum,
                                  gradients, loss, tuning, frequency, norms, axes, disentangle, tuples, perturb, stretch, entropy)}
# those that take a Llama in place of a run, and --n unless given
LLAMA = {loss: 1, tuning: None, frequency: 1, norms: None, axes: 1, disentangle: 1, tuples: 1, perturb: 2, stretch: 2, entropy: 1}


# ---------------------------------------------------------------------------------------------------------------------
# running

def tables(rows):
    """Rows as tables, one for all rows that share columns: lists of lines of text, the first the names of the columns."""
    found = []
    for row in rows:
        if not found or not found[-1][0].keys() & row.keys():
            found.append(({}, []))
        found[-1][0].update(row)
        found[-1][1].append(row)
    return [[list(columns)] + [['' if row.get(key) is None else str(row[key]) for key in columns] for row in of] for columns, of in found]


def said(summary):
    """[(key, value)] of a summary as text, numbers with four digits."""
    return [(key, f'{value:.4g}' if type(value) is float else str(value)) for key, value in summary.items()]


def show(rows, summary):
    """Print rows as tables, and the summary."""
    for lines in tables(rows):
        widths = [max(map(len, column)) for column in zip(*lines)]
        for line in lines:
            print('  '.join(f'{text:>{width}}' for text, width in zip(line, widths)))
    parts = '  '.join(f'{key}: {value}'.replace(' ', '\0') for key, value in said(summary))         # a key and its value on one line
    print(textwrap.fill(parts, 130, break_long_words=False, break_on_hyphens=False).replace('\0', ' '))


def flags_of(function):
    """(dataclass of what every probe takes, dataclass of that and the probe's own arguments)."""
    common = [('seed', int, dataclasses.field(default=None)), ('out_dir', str, dataclasses.field(default=''))]
    if function in LLAMA:
        common += [('hf', str, dataclasses.field(default='')), ('text', str, dataclasses.field(default=''))]
    own = [(name, type(p.default), dataclasses.field(default=p.default))
           for name, p in list(inspect.signature(function).parameters.items())[3:]]
    return dataclasses.make_dataclass('Common', common), dataclasses.make_dataclass('Flags', common + own)


def tell(name=None):
    """Print what a probe does and its flags; without a name what all of them ask."""
    if name:
        common, every = map(config.defaults, flags_of(PROBES[name]))
        own = [f'--{key}={value}' for key, value in every.items() if key not in common]
        print(f'python probe.py {name} RUN {" ".join(own)} {" ".join(f"[--{key}=...]" for key in common)}\n\n'
              f'{inspect.getdoc(PROBES[name])}')
        return
    print(__doc__)
    for name, function in PROBES.items():
        print(f'{name:12} {inspect.getdoc(function).splitlines()[0]}')


def read_flags(argv, function):
    """--key=value -> what every probe takes, and the probe's own arguments."""
    common, flags = flags_of(function)
    if any(arg.startswith(('--hf=', '--text=')) for arg in argv) and function not in LLAMA:
        raise UserError(f'{function.__name__} looks into runs only; with --hf: {", ".join(f.__name__ for f in LLAMA)}')
    given, words = config.parse(flags, argv)
    if words:
        raise UserError(f'{words[0]}: flags are written --key=value')
    for key, value in given.items():
        least = 1 if key in ('n', 'contents', 'queries') else 0
        if type(value) is int and value < least:
            raise UserError(f'--{key}={value}: {key} must be a whole number from {least} on')
    shared = {key: given.pop(key, default) for key, default in config.defaults(common).items()}
    return shared, given


def report(folder):
    """One page of all that the probes have written into a folder, figures inside it, for any browser."""
    found = sorted(glob.glob(os.path.join(glob.escape(folder), 'probe_*.json')))
    if not found:
        raise UserError(f'no probe has looked at {folder} yet: python probe.py lists the probes')
    cell = lambda x: '' if x is None else html.escape(str(x))
    parts = []
    for path in found:
        with open(path) as f:
            result = json.load(f)
        name, png = os.path.basename(path)[len('probe_'):-len('.json')], path[:-len('.json')] + '.png'
        asks = (inspect.getdoc(PROBES[name]) or '').splitlines()[0] if name in PROBES else ''
        summary = ' &emsp; '.join(f'{cell(key)}: <b>{cell(value)}</b>' for key, value in said(result['summary']))
        parts += [f'<h2>{cell(name)}</h2><p>{cell(asks)}</p><p>{summary}</p>']
        if os.path.exists(png):
            with open(png, 'rb') as f:
                parts += [f'<img alt="{cell(name)}" src="data:image/png;base64,{base64.b64encode(f.read()).decode()}">']
        line_of = lambda tag, line: '<tr>' + ''.join(f'<{tag}>{cell(x)}</{tag}>' for x in line) + '</tr>'
        lines = ['<table>' + line_of('th', columns) + ''.join(line_of('td', line) for line in of) + '</table>'
                 for columns, *of in tables(result['rows'])]
        parts += [f'<details><summary>{len(result["rows"])} rows</summary>{"".join(lines)}</details>']
    style = 'body{font-family:sans-serif;margin:2em;max-width:90em}img{max-width:100%}td,th{text-align:right;padding:0 .6em}'
    title = cell(f'Probes of {os.path.normpath(folder)}')
    page = f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title><style>{style}</style><h1>{title}</h1>' + '\n'.join(parts)
    checkpoint.write(os.path.join(folder, 'report.html'), page)
    print(f'wrote {os.path.join(folder, "report.html")}')


def load(run, seed=None):
    """(model, cfg) of a run, or of by_hand:TASK; cfg.seeds is the one seed and cfg.out_dir the folder."""
    if run.startswith('by_hand:'):
        if seed is not None:
            raise UserError(f'--seed={seed} picks one of a run\'s models, and {run} has one only, its weights set by hand')
        return iteration_head(run.partition(':')[2])
    seed = checkpoint.first_sound(checkpoint.read(os.path.join(run, 'ckpt.pt'), train.Config)) if seed is None else seed
    model, cfg = train.load(run, seed)
    cfg.seeds, cfg.out_dir = [seed], run
    return model, cfg


def main(argv):
    """The program: the list of probes, or one probe on one run or on one Llama."""
    if not argv or argv[0] in ('--help', '-h'):
        return tell()
    if argv[0] == 'report':
        if len(argv) != 2:
            raise UserError('python probe.py report RUN takes a run, or the folder that probes wrote to, and no flags')
        return report(argv[1].replace('by_hand:', BY_HAND_DIR))
    if os.path.isdir(argv[0]) and argv[0] not in PROBES:
        raise UserError(f'name a probe before the run: python probe.py NAME {argv[0]}')
    config.check_name('probe', argv[0], PROBES)
    if config.wants_help(argv):
        return tell(argv[0])
    name, function = argv[0], PROBES[argv[0]]
    run_dir = argv[1] if len(argv) > 1 and not argv[1].startswith('--') else ''
    if not run_dir and not any(arg.startswith('--hf=') for arg in argv):
        raise UserError(f'python probe.py {name} RUN: which run? For example out/parity_rope')
    common, values = read_flags(argv[2 if run_dir else 1:], function)
    if run_dir and common.get('hf'):
        raise UserError(f'either a run or --hf={common["hf"]}, not both')
    if run_dir:
        if common.get('text'):
            raise UserError('--text is the text that a checkpoint is run on, with --hf; a run has its own')
        model, cfg = load(run_dir, common['seed'])
    else:
        if common['seed'] is not None:
            raise UserError(f'--seed={common["seed"]} picks one of a run\'s models, and a checkpoint has one only')
        model, cfg = load_llama(common['hf'], common['text'], needs_text=function is not norms)
        values = ({'n': LLAMA[function]} if LLAMA[function] else {}) | values
    out_dir = common['out_dir'] or cfg.out_dir
    rows, summary, figure = function(model, cfg.the_task, cfg, **values)
    show(rows, summary)
    path, png = os.path.join(out_dir, f'probe_{name}'), drawing(figure)
    checkpoint.make_folder(out_dir)
    checkpoint.write(path + '.json', json.dumps(dict(rows=rows, summary=summary), indent=1))
    if png is None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + '.png')                                                    # an older one shows something else
        print(f'(pip install matplotlib, and {path}.png is drawn as well)')
        return
    checkpoint.write(path + '.png', png)
    print(f'wrote {path}.json and drew {path}.png')


def drawing(figure):
    """The PNG of a figure, None without matplotlib."""
    plt = pyplot()
    if plt is None:
        return None
    png = io.BytesIO()
    fig = figure(plt)
    fig.savefig(png, format='png', dpi=110)
    plt.close(fig)
    return png.getvalue()


def within_memory(argv):
    """main(), with what numpy and torch say of too little memory as one line."""
    try:
        main(argv)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and 'allocate memory' not in str(error):
            raise
        raise UserError('not enough memory: take a smaller --length or --n') from None


if __name__ == '__main__':
    config.run(within_memory, tasks.DataError, encodings.InputMissing)
