"""See why a trained model works or breaks: a probe for every question, on any run of train.py.

    python probe.py                                       lists the probes
    python probe.py cursor out/string_copy_prism          prints a table, writes probe_cursor.json and, with matplotlib, probe_cursor.png into the run
    python probe.py cursor RUN --seed=3 --length=60 --out_dir=FOLDER
    python probe.py attention by_hand:parity              of a Transformer whose weights are set by hand (iteration_head)

A probe is one function, NAME(model, task, cfg, ...) -> (rows, summary, figure): rows are dictionaries, a line of the table each, summary is a
dictionary, figure a function that draws with the matplotlib.pyplot it is given. Its further arguments are flags of the command line. probe_NAME.json
holds {"rows": [...], "summary": {...}}. A probe changes nothing in the model and nothing in a run but its own output.
"""
import ast
import contextlib
import copy
import dataclasses
import difflib
import inspect
import json
import os
import signal
import sys

import numpy as np
import torch

import pe as encodings
import train
from model import Transformer

QUERY, KEY = '#0072b2', '#d55e00'                               # colours that mean the same in every figure


@contextlib.contextmanager
def listening(*modules):
    """A list of (module, its inputs, its output) of every forward pass of these modules within."""
    heard = []
    hooks = [m.register_forward_hook(lambda m, inputs, output: heard.append((m, inputs, output))) for m in modules]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def attention_maps(model, tokens):
    """Attention weights [B, H, T, T] of every layer."""
    with listening(*(block.attn.tap_logits for block in model.blocks)) as heard, torch.no_grad():
        model(tokens)
    return [logits.softmax(dim=-1) for _, _, logits in heard]


def label_tokens(axis, labels):
    """Write the tokens along a matplotlib axis, or only numbers where they would run into each other."""
    if len(labels) <= 48:
        axis.set_ticks(range(len(labels)), labels, fontsize=6)


# ---------------------------------------------------------------------------------------------------------------------
# prism.txt, appendix B

@torch.no_grad()
def cursors_of(model, tokens):
    """What PRISM's cursors do on tokens [B, T]: a dictionary for every cursor of every layer and head, query cursors first.

    incr, decr, keep, reset, jump [B, T], the last None where there is no copy branch; histogram [B, T, 2T+1] over the offsets -T..T, after each
    token's gates; gamma, alpha, mu.
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
            gamma = 1 + torch.nn.functional.softplus(cursors.g) if cursors.cfg.prism_sharpen else torch.ones(2 * cursors.count)
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
    """Places that a cursor's mode [B, T] moves with a token, on average over the tokens `asked` [B, T]; (mean, share of them at the commonest pace)."""
    moves = mode.diff(dim=1)[asked[:, 1:]]
    values, counts = moves.unique(return_counts=True)
    return moves.double().mean().item(), (counts.max() / counts.sum()).item()


def cursor(model, task, cfg, length=0):
    """Where PRISM's cursors go: gates before and after training, the mode of every histogram, whole histograms and attention (prism.txt Figures 11-20).

    length: the problem length shown beside the longest one trained on, 0: four times that. The table is of that length: gates and moves over
    the answer's tokens, in up to 32 problems. `moves`: places per token that the mode goes; `steady`: share of tokens at which it makes its commonest
    move; `peak`: largest bin; `jump`: mean probability of a jump, where a cursor can copy; `weight`: (1 - mu) |alpha|, what the cursor counts in its
    head. A cursor that holds at every length is steady.
    """
    if not any(isinstance(m, encodings.PRISM) for m in model.modules()):
        raise train.UserError(f'cursor looks at PRISM\'s cursors, and this run has pe={cfg.pe}: train one with pe=prism')
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
        rows.append(dict({key: c[key] for key in ('layer', 'head', 'cursor', 'of')}, weight=round((1 - c['mu']) * c['alpha'], 3), gamma=round(c['gamma'], 3),
                         **means, moves=round(moves, 3), steady=round(steady, 3), peak=round(c['histogram'].max(dim=-1)[0][asked].mean().item(), 3),
                         **({} if c['jump'] is None else dict(jump=round(c['jump'][asked].mean().item(), 3)))))
    total = sum(row['weight'] for row in rows)
    with torch.no_grad():
        right = (model(tokens)[0].argmax(dim=-1) == targets) | ~asked
    summary = dict(length=length, exact=right.all(dim=1).double().mean().item(), steady=round(sum(r['steady'] * r['weight'] for r in rows) / total, 4))
    figure = lambda plt: cursor_figure(plt, model, before, cfg, task, found, short, tokens, trained, length, summary['exact'])
    return rows, summary, figure


def cursor_figure(plt, model, before, cfg, task, found, short, tokens, trained, length, exact):
    """The figure of `cursor`: gates; modes; the strongest query cursor's histogram; attention. short, tokens: problems of the lengths trained and length."""
    strongest = max((c for c in found if c['of'] == 'query'), key=lambda c: (1 - c['mu']) * c['alpha'])
    T = tokens.shape[1]
    fig, axes = plt.subplots(4, 4, figsize=(14, 16), width_ratios=(1, 1, 1, 0.05), layout='constrained')
    words = lambda row: [task.vocab[i] for i in row.tolist()]
    names = [f'{c["of"][0]} {c["layer"]}.{c["head"]}.{c["cursor"]}' for c in found]
    for row, (when, cursors) in enumerate((('before training', cursors_of(before, short[:1])), ('after training', cursors_of(model, short[:1])))):
        for ax, gate, title in zip(axes[row], ('incr', 'decr', 'reset'), ('increment', 'decrement', 'reset')):
            image = ax.imshow(torch.stack([c[gate][0] for c in cursors]).numpy(), vmin=0, vmax=1, aspect='auto', cmap='viridis', interpolation='nearest')
            ax.set_title(f'P({title}), {when}')
            ax.set_yticks(range(len(names)) if len(names) <= 32 else [], names if len(names) <= 32 else [], fontsize=6)
            label_tokens(ax.xaxis, words(short[0]))
        axes[row][0].set_ylabel('cursor: query or key, layer.head.number')
        fig.colorbar(image, cax=axes[row][3], label='probability')
    weight = lambda c: (1 - c['mu']) * c['alpha']
    for ax, net, row, title in zip(axes[2], (before, model, model), (short[:1], short[:1], tokens[:1]),
                                   ('before training', f'trained, length {trained}', f'trained, length {length}')):
        for c in cursors_of(net, row):
            mode = c['histogram'][0].argmax(dim=-1) - row.shape[1]
            strength = 0.15 + 0.85 * weight(c) / max(map(weight, found)) if net is model else 0.5
            ax.plot(mode.numpy(), '-' if c['of'] == 'query' else '--', color=QUERY if c['of'] == 'query' else KEY, alpha=strength)
        for of, style, colour in (('query', '-', QUERY), ('key', '--', KEY)):
            ax.plot([], style, color=colour, label=f'{of} cursors' + (' (stronger: weigh more)' if net is model else ''))
        ax.set(title=f'mode of each histogram, {title}', xlabel='token')
        label_tokens(ax.xaxis, words(row[0]))
        ax.legend(fontsize=8)
    axes[2][0].set(ylabel='offset', ylim=[f(ends) for f, ends in zip((min, max), zip(axes[2][0].get_ylim(), axes[2][1].get_ylim()))])
    axes[2][3].axis('off')
    at = '{layer}.{head}'.format(**strongest)
    axes[3][0].imshow(strongest['histogram'][0].T.numpy(), origin='lower', extent=(-0.5, T - 0.5, -T - 0.5, T + 0.5), aspect='auto', vmin=0, vmax=1,
                      cmap='viridis', interpolation='nearest')
    axes[3][0].set(title=f'strongest query cursor, {at}.{strongest["cursor"]}, length {length}', xlabel='token', ylabel='offset')
    for ax, row, n in zip(axes[3][1:], (short[:1], tokens[:1]), (trained, length)):
        weights = attention_maps(model, row)[strongest['layer'] - 1][0, strongest['head'] - 1]
        image = ax.imshow(weights.numpy(), vmin=0, vmax=1, aspect='auto', cmap='viridis', interpolation='nearest')
        ax.set(title=f'attention of head {at}, length {n}', xlabel='key', ylabel='query')
        label_tokens(ax.xaxis, words(row[0]))
        label_tokens(ax.yaxis, words(row[0]))
    fig.colorbar(image, cax=axes[3][3], label='probability, attention weight')
    fig.suptitle(f'{cfg.task} with {cfg.pe}: exact match {100 * exact:.0f} % at length {length}, trained to {trained}')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# vipe.txt

ITERATIVE = ('copy', 'parity', 'polynomial', 'reverse')             # tasks with one correct key for each state
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9')


def iteration_head(name):
    """(model, cfg) of a two-layer Transformer with weights set by hand: the circuit of vipe.txt Figure 1b and A.2, right at every length up to 1,000.

    Layer 1 measures distances to the anchors: every token attends to EoI, those that cannot see it and EoI itself to BoS, and ViPE's value channel
    (eq. 8) hands over the distance D, so D_1 = t at x_t and D_2 = t - 1 at s_(t-1). Layer 2 matches D_1 = D_2 + 1: a normalized vector (D, c) has its
    largest product with (D', c) at D' = D. Its MLP looks s_t = f(s_(t-1), x_t) up. Neighbouring distances differ by 1e-7 in that product: float64.
    cfg calls lengths to 16 trained, as the paper's are.
    """
    rules = {'copy': lambda s, x: x, 'parity': lambda s, x: (s + x) % 2, 'polynomial': lambda s, x: (s * x + 1) % 5}
    if name not in rules:
        raise train.UserError(f'by_hand:{name}: weights are set by hand for {", ".join(rules)} only')
    V = len(train.Config(task=name).the_task.vocab)
    BoS, EoI, EoS, symbols = 1, 2, 3, range(V - 4)
    table = [(EoI, x + 4, x + 4) for x in symbols] + [(s + 4, EoI, EoS) for s in symbols]                                # (state, input, next state)
    table += [(s + 4, x + 4, rules[name](s, x) + 4) for s in symbols for x in symbols]
    one, dist, read, write, C = V, V + 1, V + 2, 2 * V + 2, 3 * V + 2                   # the residual stream: token, 1, D, token read, next token
    cfg = train.Config(task=name, pe='vipe', vipe_s='one', vipe_logn=False, vipe_u=False, vipe_d_p=1, d_model=C, n_head=1, n_layer=2, d_ff=len(table),
                       norm='rmsnorm', dtype='float64', out_dir=f'out/by_hand_{name}')
    model, tokens, unit = Transformer(cfg).double().eval(), torch.arange(V), 1e-3       # D is kept in thousands
    with torch.no_grad():
        for p_name, p in model.named_parameters():
            p.fill_(C ** -0.5 if 'norm' in p_name else 0.0)                             # norms: x / |x|; all else 0
        model.embedding.weight[tokens, tokens] = model.embedding.weight[:, one] = 1.0
        anchor, match = model.blocks
        q, k, v = anchor.attn.qkv.weight.view(3, C, C)                                  # each (to, from)
        q[0, one], q[1, one], q[1, EoI] = 1e3, 2e3, -2e3                                # to BoS; rather to EoI, except from EoI
        k[0, BoS], k[1, EoI] = 1.0, 1.0
        anchor.attn.pe.W_p.fill_(unit)
        anchor.attn.proj.weight[dist, C] = 1.0                                          # D from the channel behind the values
        q, k, v = match.attn.qkv.weight.view(3, C, C)
        q[0, dist], q[0, one], k[0, dist] = 1.0, unit, 1.0                              # <(D_2 + 1, c), (D_1, c)>: c^2 = 2, as the token and the
        q[1, one], k[1, one] = 2.0, 1.0                                                 # constant add 1 each to the length of the vector
        q[2, EoI], k[2, dist], k[2, BoS] = -10.0, 1.0, 10.0                             # EoI asks for the smallest D but BoS's: for x_1
        q *= 1e9 * C ** 0.5
        v[tokens, tokens] = match.attn.proj.weight[read + tokens, tokens] = 1.0
        for i, (s, x, new) in enumerate(table):                                         # unit i: how strongly x was read, if the token is s
            match.mlp[0].weight[i, [read + x, s, one]] = torch.tensor([1e3, 4e3, -4e3], dtype=torch.float64)
            match.mlp[2].weight[write + new, i] = 1e-3
        model.head.weight[tokens, write + tokens] = 100.0
    return model, cfg


def problems(task, lengths, n, split='test'):
    """{length: (tokens, targets)}, up to n held-out problems of each."""
    if missing := sorted(set(lengths) - set(task.existing(lengths, None))):
        raise train.UserError(f'the task has no problems of length {missing[0]}')
    return task.held_out(split, n, lengths, lambda length: train.generator('cpu', split, length))


def fewer(cfg, *pair):
    """As many of the problems (tokens [n, T], ...) as all their attention maps have at most 2^26 numbers, at least one."""
    n = max(1, 2 ** 26 // (cfg.n_layer * cfg.heads * pair[0].shape[1] ** 2))
    return [x[:n] for x in pair]


def ladder(cfg, length):
    """(queries, keys) [L]: where EoI, s_1, .., s_(L-1) stand, and the input that each needs for the next state: x_t for s_(t-1), D_1 = D_2 + 1."""
    name, t = cfg.task.partition(':')[0], torch.arange(1, length + 1)
    if name not in ITERATIVE:
        raise train.UserError(f'{cfg.task} has not one correct key for each state: train copy, parity, polynomial or reverse')
    return length + t, length + 1 - t if name == 'reverse' else t


def by_head(layers):
    """[B, H, L] of every layer -> [layers * H, B, L]."""
    return torch.cat(list(layers), dim=1).transpose(0, 1)


def masses(maps, queries, keys):
    """Attention weights [B, H, T, T] of every layer -> every head's weight from each of L queries to its own key [layers * H, B, L]."""
    return by_head(weights[:, :, queries, keys] for weights in maps)


def attention(model, task, cfg, length=0, n=16):
    """Where does every head look, at the trained length and at a longer one (vipe.txt Figures 1, 2, 6-8, 10, 11)?

    length: the longer one, 0: 2.5 times the trained one (the paper's 39 after 16), at most the longest of eval_lengths; n: problems averaged over.
    Rows: mean attention weight from the inputs to BoS (x_to_BoS), from the answer's tokens to BoS and to EoI, and from EoI and these to the one input
    that the next state needs (s_to_x_t; iterative tasks); their largest weight; their entropy in nats. Summary: the best head's. Figure: one problem.
    """
    trained = max(cfg.train_lengths)
    length, rows, shown = length or min(max(cfg.eval_lengths), 5 * trained // 2), [], {}
    for L, (tokens, targets) in problems(task, sorted({trained, length}), n).items():
        tokens, targets = fewer(cfg, tokens, targets)
        maps, asked = attention_maps(model, tokens), targets != -100
        shown[L] = tokens[0][tokens[0] != 0], [weights[0] for weights in maps]
        for layer, weights in enumerate(maps, 1):
            means = means_of(weights, tokens, asked, task)
            if cfg.task.partition(':')[0] in ITERATIVE:
                means['s_to_x_t'] = masses([weights], *ladder(cfg, L)).mean(dim=(1, 2))
            rows += [dict(length=L, layer=layer, head=h + 1, **{name: round(mean[h].item(), 3) for name, mean in means.items()})
                     for h in range(weights.shape[1])]
    summary = dict(trained=trained, length=length)
    for name in [name for name in rows[0] if name in ('x_to_BoS', 's_to_EoI', 's_to_x_t', 'largest')]:
        summary |= {f'{name}, length {L}': max(row[name] for row in rows if row['length'] == L) for L in shown}
    return rows, summary, lambda plt: attention_figure(plt, shown, task, f'{cfg.task} with {cfg.pe}, trained to {trained}')


def means_of(weights, tokens, asked, task):
    """Means [H] over the queries of attention weights [B, H, T, T]; asked [B, T]: the queries whose next token is part of the answer."""
    of = lambda mass, queries: mass.transpose(1, 2)[queries].mean(dim=0)                # mass [B, H, T]
    is_a = {name: tokens == task.vocab.index(name) for name in ('BoS', 'EoI') if name in task.vocab}
    to = {name: (weights * is_it[:, None, None]).sum(dim=-1) for name, is_it in is_a.items()}
    means = {'x_to_BoS': of(to['BoS'], (asked.cumsum(dim=1) == 0) & ~is_a['BoS'])} if 'BoS' in to else {}
    means |= {f's_to_{name}': of(mass, asked & ~is_a['EoI']) for name, mass in to.items() if 'EoI' in to}
    return means | dict(largest=of(weights.amax(dim=-1), asked), entropy=of(torch.special.entr(weights).sum(dim=-1), asked))


def attention_figure(plt, shown, task, title):
    """The figure of `attention`: a map for every layer (row), head and length (columns)."""
    first = next(iter(shown.values()))[1]
    H, size = first[0].shape[0], 4 if len(first) * len(first[0]) < 5 else 2.4
    rows, columns = len(first), H * len(shown)
    fig, axes = plt.subplots(rows, columns, figsize=(size * columns + 0.8, size * rows + 0.4), squeeze=False, layout='constrained')
    for n, (length, (tokens, maps)) in enumerate(shown.items()):
        words, T = [task.vocab[i] for i in tokens.tolist()], len(tokens)
        for layer, weights in enumerate(maps):
            for head in range(H):
                ax = axes[layer][n * H + head]
                image = ax.imshow(weights[head, :T, :T].numpy(), vmin=0, vmax=1, cmap='viridis', interpolation='nearest')
                ax.set_title(f'head {layer + 1}.{head + 1}, length {length}', fontsize=9)
                for axis in (ax.xaxis, ax.yaxis):
                    label_sequence(axis, words, size)
    fig.supxlabel('key', fontsize=9)
    fig.supylabel('query', fontsize=9)
    fig.colorbar(image, ax=axes, label='attention weight', shrink=0.6)
    fig.suptitle(title)
    return fig


def label_sequence(axis, words, inches):
    """Write the tokens along an axis so many inches long; only BoS, EoI, EoS and a few numbers where the tokens would run into each other."""
    axis.set_tick_params(labelrotation=90 if axis.axis_name == 'x' and len(words) <= 10 * inches else 0)
    if len(words) <= 10 * inches:
        return axis.set_ticks(range(len(words)), words, fontsize=6)
    marks = {i: word for i, word in enumerate(words) if word in ('BoS', 'EoI', 'EoS')}
    apart = max(1, len(words) // 8)
    marks |= {i: str(i) for i in range(0, len(words), apart) if all(abs(i - j) > apart / 2 for j in marks)}
    axis.set_ticks(list(marks), marks.values(), fontsize=6)


@torch.no_grad()
def ridge(x, y, penalty=1e-6):
    """Linear regression of y [N] on x [N, C], features scaled to variance 1, with `penalty` times the squared weights -> (w [C], b): y ~ x w + b."""
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
    """How well y_hat [N] predicts y [N]: RMSE and MAE in y's units, R2 = 1 - squared error / variance, Pearson's and Spearman's correlation."""
    y, y_hat = y.double(), y_hat.double()
    pearson = lambda a, b: torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    error = y_hat - y
    return dict(rmse=error.square().mean().sqrt().item(), mae=error.abs().mean().item(), r2=1 - (error.square().mean() / y.var(correction=0)).item(),
                pearson=pearson(y, y_hat), spearman=pearson(ranks(y), ranks(y_hat)))


def hidden_states(model, task, lengths, n, split):
    """Every token of n problems of these lengths: its vectors [N, C] after the embedding and each layer; its position and distance to EoI [N], 0 before."""
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
    """How exactly do hidden states hold the position, and the distance to EoI (vipe.txt Figure 5, Tables 1, 4, 5)?

    A ridge regression of each from the residual stream after each layer (0: the embedding), fitted on n held-out problems of every trained length,
    scored on other problems of the trained lengths and on the longer ones of eval_lengths. rmse, mae in tokens. The distance is that of the
    tokens behind EoI. The paper reports position from layer 1 and distance from layer 2 of 3: for NoPE R2 0.975 and 0.891, then 0.864 and
    0.814 on longer problems; RoPE 0.943 and 0.869, then 0.542 and 0.667; APE 1.000 and 0.891, then 0.721 and 0.614.
    """
    longer = [length for length in cfg.eval_lengths if length > max(cfg.train_lengths)]
    if not longer:
        raise train.UserError(f'linear compares the trained lengths with longer ones, and eval_lengths={cfg.eval_lengths} has none: train with longer ones')
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
                rows.append(dict(target=target, layer=layer, lengths=part, **{key: round(value, 4) for key, value in agreement(y, y_hat).items()}))
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
        ax.plot([], 'k--', lw=1, label='trained lengths')
        seen = len(errors[target, 0, 'trained']) - 1
        ax.axvline(seen, color='crimson', lw=1)
        ax.set(ylim=(0, None), ylabel='root mean squared error (tokens)', title='absolute position' if target == 'position' else 'distance to EoI',
               xlabel=f'{"position" if target == "position" else "distance to EoI"} (tokens); trained to {seen} (red line)')
    axes[0][0].legend(fontsize=8)
    fig.suptitle(f'{cfg.task} with {cfg.pe}: linear probes')
    return fig


def alignment(model, task, cfg, length=0, n=32):
    """Does attention still find the one correct key x_t for s_(t-1), D_1 = D_2 + 1, at the lengths where the answers break (vipe.txt section 3.1, A.3)?

    length: the longest one, 0: the longest of eval_lengths; n: problems of each length. Rows: exact match; accuracy of the states, of those that are
    predicted at positions within the trained total length (seen) and beyond (unseen); for every layer.head the mean weight on the correct key;
    peak: share of the best head's queries whose largest weight is on it. Summary: the length to which, from the longest trained one on, 90 % of the
    states are right (right_to) and the best head has half its weight on the correct key (aligned_to), 0: not even there; A.3's two notions
    apart: accuracy in longer problems at seen positions (longer context only) and at unseen ones; and where the peak is on x_t, and where not.
    """
    trained = max(cfg.train_lengths)
    length, found = length or max(cfg.eval_lengths), {}
    ladder(cfg, length)                                                                 # a task with correct keys, or a UserError
    lengths = sorted({*(min(x, length) for x in (trained, trained + 1)), *np.linspace(1, length, 24).round().astype(int).tolist()})
    for L, pair in problems(task, lengths, n).items():
        found[L] = on_the_ladder(model, cfg, L, *fewer(cfg, *pair))
    names = [f'{layer}.{head}' for layer in range(1, cfg.n_layer + 1) for head in range(1, cfg.heads + 1)]
    best = sum(f['mass'].mean(dim=(1, 2)) for L, f in found.items() if L <= trained).argmax().item()
    mean = lambda x: round(x.double().mean().item(), 4) if x.numel() else None
    rows = []
    for L, f in found.items():
        row = dict(length=L, exact=mean(f['exact']), states=mean(f['right']), seen=mean(f['right'][f['seen']]), unseen=mean(f['right'][~f['seen']]),
                   **{name: mean(mass) for name, mass in zip(names, f['mass'])}, peak=mean(f['peak'][best]))
        rows.append({key: value for key, value in row.items() if value is not None})
    tail = [row for row in rows if row['length'] >= trained]
    holds_to = lambda key, least: max((row['length'] for i, row in enumerate(tail) if all(r[key] >= least for r in tail[:i + 1])), default=0)
    over = lambda part: mean(torch.cat([f['right'][part(f)] for L, f in found.items() if L > trained] or [torch.empty(0)]))
    summary = dict(head=names[best], right_to=holds_to('states', 0.9), aligned_to=holds_to(names[best], 0.5))
    summary |= {f'accuracy beyond, {where}': over(part) for where, part in {
        'seen positions': lambda f: f['seen'], 'unseen positions': lambda f: ~f['seen'],
        'peak on x_t': lambda f: f['peak'][best], 'peak elsewhere': lambda f: ~f['peak'][best]}.items()}
    return rows, summary, lambda plt: alignment_figure(plt, rows, found, names, best, cfg)


def on_the_ladder(model, cfg, L, tokens, targets):
    """For the states of problems [B, T] of length L: every head's weight on the correct key [heads, B, L]; is it the largest; is the state right [B, L];
    is its position one of those trained [B, L]; and is the whole answer right [B].
    """
    queries, keys = ladder(cfg, L)
    maps, right = attention_maps(model, tokens), answers_right(model, tokens, targets)
    peak = by_head(weights[:, :, queries].argmax(dim=-1) == keys for weights in maps)
    return dict(mass=masses(maps, queries, keys), peak=peak, right=right[:, queries], seen=(queries + 1 < cfg.train_len).expand(len(tokens), L),
                exact=(right | (targets == -100)).all(dim=1))


@torch.no_grad()
def answers_right(model, tokens, targets):
    """Which of the answer's tokens [B, T] are predicted right, all before them given."""
    return torch.cat([model(x)[0].argmax(dim=-1) for x in tokens.split(max(1, 2 ** 15 // tokens.shape[1]))]) == targets


def alignment_figure(plt, rows, found, names, best, cfg):
    """The figure of `alignment`: every head's weight on the correct key beside accuracy; seen and unseen positions; the best head, state by state."""
    trained, longest = max(cfg.train_lengths), max(found)
    fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout='constrained')
    draw = lambda ax, key, *style, **kw: ax.plot(*zip(*((row['length'], row[key]) for row in rows if key in row)), *style, **kw)
    for i, name in enumerate(names):
        draw(axes[0], name, color=COLOURS[0] if i == best else '0.7', lw=2 if i == best else 1, label=f'weight of head {name}' if i == best else None)
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
        ax.set(ylim=(-0.03, 1.03), xlabel=f'input length; trained to {trained} (red line)')
        ax.legend(fontsize=8)
    grid = torch.full((longest, len(found)), float('nan'))
    for i, (L, f) in enumerate(found.items()):
        grid[:L, i] = f['mass'][best].mean(dim=0)
    edges = [0.5, *((a + b) / 2 for a, b in zip(list(found), list(found)[1:])), longest + 0.5]
    image = axes[2].pcolormesh(edges, np.arange(longest + 1) + 0.5, grid.numpy(), vmin=0, vmax=1, cmap='viridis')
    axes[2].axvline(trained, color='crimson', lw=1)
    last = [(L, cfg.train_len - 1.5 - L) for L in range(trained, min(longest + 1, cfg.train_len - 1))]                  # query L + t, train_len - 2 at most
    if last:
        axes[2].plot(*zip(*last), color='white', lw=1, label='last seen position')
        axes[2].legend(fontsize=8, loc='upper left', facecolor='0.6')
    axes[2].set(title=f'head {names[best]}, weight on the correct key', xlabel='input length', ylabel='t of the state $s_t$')
    fig.colorbar(image, ax=axes[2], label='attention weight')
    fig.suptitle(f'{cfg.task} with {cfg.pe}')
    return fig


def steps(model, task, cfg, n=512, distances='1,3,7', beside=''):
    """How long do the first states stay right while the input grows, at positions that were trained (vipe.txt Figure 4)?

    distances: of s_(t-1) from EoI, a comma list; n: problems of each length; beside: further runs, a comma list. Rows: accuracy of the next state
    predicted there, at every input length at which this is still within the trained total length. Only the context is longer than in training.
    """
    runs = {cfg.pe: (model, cfg)}
    for path in filter(None, beside.split(',')):
        net, other = load(path)
        if other.task != cfg.task or other.train_len != cfg.train_len:
            raise train.UserError(f'{path} was trained on {other.task} to {other.train_len} tokens, this run on {cfg.task} to {cfg.train_len}')
        runs[path if other.pe in runs else other.pe] = net, other
    try:
        wanted = sorted({int(d) for d in distances.split(',')})
    except ValueError:
        raise train.UserError(f'--distances={distances}: whole numbers, as in 1,3,7') from None
    last = cfg.train_len - 3 - wanted[0]                                                # query L + 1 + d, target behind it, within train_len tokens
    if wanted[0] < 0 or last < wanted[0] + 1:
        raise train.UserError(f'--distances={distances}: from 0 on, and some within the trained {cfg.train_len} tokens')
    ladder(cfg, last)                                                                   # a task with a state for every input, or a UserError
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
    fig, axes = plt.subplots(1, len(distances), figsize=(4.4 * len(distances), 3.6), sharex=True, sharey=True, squeeze=False, layout='constrained')
    for ax, d in zip(axes[0], distances):
        for i, name in enumerate(names):
            found = [(row['length'], row[f'{name} d={d}']) for row in rows if f'{name} d={d}' in row]
            if found:
                ax.plot(*zip(*found), 'o-', ms=3, color=COLOURS[i % 6], label=name)
        ax.axvline(trained, color='crimson', lw=1)
        ax.set(title=f'next state after the one at distance {d} from EoI', ylim=(-0.03, 1.03), xlabel=f'input length; trained to {trained} (red line)')
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
    v = block.attn.qkv_of(x)[2].unflatten(-1, (cfg.heads, -1)).transpose(1, 2)
    if not torch.equal(block.attn.pe.value(v, torch.arange(tokens.shape[1]), None), v):
        raise train.UserError(f'{cfg.pe} turns the values by their positions, so that z is no average of them: take a run with another encoding')
    return logits.softmax(dim=-1), v, z[..., :v.shape[-1]]                              # ViPE's distance code stands behind the values


def coordinate_statistics(z):
    """Over the coordinates of z [.., T, d] (eq. 3): mean [.., T], variance [.., T], mean of z_(n+1) - z_n [.., T - 1]."""
    return z.mean(dim=-1), z.var(dim=-1, correction=0), z.mean(dim=-1).diff(dim=-1)


def proposition_1(n, mu, var, mu_2, var_2):
    """Eq. 4: the statistics of z_n under uniform weights, values of mean mu and variance var but mu_2, var_2 at BoS, independent between positions."""
    return mu + (mu_2 - mu) / n, (var_2 + (n - 1) * var) / n ** 2, -(mu_2 - mu) / (n * (n + 1))


def stats(model, task, cfg, length=0, n=64):
    """Do hidden-state statistics tell the position, as Proposition 1 says of NoPE (vipe.txt eq. 2-4, Figure 16)?

    Mean and variance over the coordinates of the first attention layer's output z_n (all heads), and mean of z_(n+1) - z_n: measured; with this
    model's values under uniform weights 1/n (eq. 2); and by eq. 4, whose mu, sigma, mu_2, sigma_2 are those of the values, at BoS for the latter
    two. Averages over n problems of `length` (0: the longest trained), n counted from 1. Eq. 4 takes values for independent between positions: those
    of few symbols repeat, so their average keeps a variance that does not decay. Summary: mean absolute errors of eq. 4.
    """
    if 'BoS' not in task.vocab:
        raise train.UserError(f'Proposition 1 is about sequences that begin with BoS, and those of {cfg.task} do not')
    length = length or max(cfg.train_lengths)
    tokens, = fewer(cfg, problems(task, [length], n)[length][0])
    v, z = (x.transpose(1, 2).flatten(2).double() for x in first_attention(model, tokens, cfg)[1:])                     # (B, T, H D)
    place = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64)                   # (T,)
    mu, var, mu_2, var_2 = v[:, 1:].mean(), v[:, 1:].var(correction=0), v[:, 0].mean(), v[:, 0].var(correction=0)
    curves = {'measured': coordinate_statistics(z), 'uniform': coordinate_statistics(v.cumsum(dim=1) / place[:, None])}
    curves = {name: [x.mean(dim=0) for x in found] for name, found in curves.items()}
    curves['eq. 4'] = proposition_1(place, mu, var, mu_2, var_2)
    labels = ('mean', 'variance', 'difference')
    rows = []
    for i in np.linspace(0, tokens.shape[1] - 1, min(48, tokens.shape[1])).round().astype(int).tolist():
        values = {f'{label}, {name}': found[part][i].item() for part, label in enumerate(labels) for name, found in curves.items() if i < len(found[part])}
        rows.append(dict(n=i + 1, token=task.vocab[tokens[0, i]]) | short(values))
    summary = dict(length=length, mu=mu.item(), sigma=var.sqrt().item(), mu_2=mu_2.item(), sigma_2=var_2.sqrt().item())
    summary |= {f'error of eq. 4, {label}, {name}': (curves[name][part] - curves['eq. 4'][part][:len(curves[name][part])]).abs().mean().item()
                for part, label in enumerate(labels) for name in ('measured', 'uniform')}
    anchor = (tokens[0] == task.vocab.index('EoI')).int().argmax().item() + 1 if 'EoI' in task.vocab else None
    return rows, short(summary), lambda plt: stats_figure(plt, curves, labels, anchor, f'{cfg.task} with {cfg.pe}, length {length}')


def short(row):
    """The floats of a row, to four digits."""
    return {key: float(f'{x:.4g}') if type(x) is float else x for key, x in row.items()}


def stats_figure(plt, curves, labels, anchor, title):
    """The figure of `stats`: mean, variance and difference by position."""
    fig, axes = plt.subplots(1, 3, figsize=(13, 4), layout='constrained')
    names = {'measured': 'measured', 'uniform': 'its values under uniform weights', 'eq. 4': 'Proposition 1 (eq. 4)'}
    for part, (ax, label) in enumerate(zip(axes, labels)):
        for (name, found), colour, style in zip(curves.items(), COLOURS, ('-', '-', 'k--')):
            y = found[part][:len(curves['measured'][part])]
            ax.plot(np.arange(1, len(y) + 1), y.numpy(), style, label=names[name], **({} if style == 'k--' else dict(color=colour)))
        if anchor:
            ax.axvline(anchor, color='crimson', lw=1)
        ax.set(title={'mean': 'mean of $z_n$', 'variance': 'variance of $z_n$', 'difference': 'mean of $z_{n+1} - z_n$'}[label],
               xlabel='position n' + (' (red line: EoI)' if anchor else ''), ylabel=f'{label} over the coordinates')
    axes[0].legend(fontsize=8)
    fig.suptitle(title)
    return fig


def prefix(model, task, cfg, length=0, n=16):
    """Is the first layer's output a picture of what stands in the prefix, and nothing else: z_n = V beta_n (vipe.txt Proposition 2, appendix D.1)?

    beta_n: the attention that position n pays to each token of the vocabulary, V: the tokens' values. Rows: for each head the largest
    |z_n - V beta_n| over n problems of `length` (0: the longest trained), relative to the largest |z_n|; then D.1's cases: how far two
    prefixes are apart in their shares of tokens (beta_uniform), in this model's beta, and in z, relative to the larger. NoPE cannot tell
    apart what has equal shares; with RoPE, ALiBi and others that act on the weights z = V beta still holds, but beta depends on the order.
    """
    length = length or max(cfg.train_lengths)
    (tokens,), block, C = fewer(cfg, problems(task, [length], n)[length][0]), model.blocks[0], len(task.vocab)
    with torch.no_grad():
        V = block.attn.qkv_of(block.norm_1(model.embedding.weight))[2].unflatten(-1, (cfg.heads, -1)).transpose(0, 1)     # (H, C, D)
    gap = lambda a, b: ((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-30)).item()

    def betas(tokens):
        weights, v, z = first_attention(model, tokens, cfg)
        if gap(V[:, tokens].transpose(0, 1), v) > 1e-4:
            raise train.UserError(f'Proposition 2 needs values that depend on the token alone; {cfg.pe} adds positions to the embeddings: take another run')
        return weights @ torch.nn.functional.one_hot(tokens, C).to(weights.dtype)[:, None], z                             # (B, H, T, C), (B, H, T, D)

    beta, z = betas(tokens)
    rows = [dict(case=f'z = V beta, head {h + 1}', z=gap(z[:, h], beta[:, h] @ V[h])) for h in range(cfg.heads)]
    summary = dict(error=max(row['z'] for row in rows))
    for first, m, second, k in cases_of_D_1(task):
        one, other = (torch.tensor([[task.vocab.index(word) for word in words]]) for words in (first, second))
        shares = [torch.nn.functional.one_hot(x[0, :i], C).double().mean(dim=0) for x, i in ((one, m), (other, k))]
        (beta, z), (beta_, z_) = betas(one), betas(other)
        rows.append(dict(case=' '.join(first[:m]) + '  |  ' + ' '.join(second[:k]), beta_uniform=gap(*shares),
                         beta=gap(beta[0, :, m - 1], beta_[0, :, k - 1]), z=gap(z[0, :, m - 1], z_[0, :, k - 1])))
    return [short(row) for row in rows], summary, lambda plt: prefix_figure(plt, rows, cfg)


def cases_of_D_1(task):
    """Appendix D.1's sequences, of this task's symbols: (tokens, m, other tokens, k), is position m of the one like position k of the other?"""
    words = [word for word in task.vocab[1:] if word not in ('BoS', 'EoI', 'EoS')][:4]  # '1 2 3 4', or fewer
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
    ax.set(xlabel='how far apart the two prefixes are, relative to the larger', title=f'{cfg.task} with {cfg.pe}: which prefixes layer 1 can tell apart')
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


def shift(model, task, cfg, length=0, offsets='0,-2,-4,-6', n=32):
    """Does attention to x_t move when every token stands nearer to BoS, or further, so that D_1 counts wrong (vipe.txt Figure 9, RoPE)?

    offsets: places added to every token's distance from BoS, a comma list; the positions of all others among themselves stay. length: 0: the longest
    trained; n: problems. Rows: for every head and offset its mean weight on the correct key (x_t); on x_(t - offset), where D_1 = D_2 + 1 now (moved);
    how many inputs to the right of x_t its largest weight among the inputs lies (peak); all over the states that have both keys. The summary names
    the head that looks at x_t most, and says how many states are right.
    """
    length = length or max(cfg.train_lengths)
    queries, keys = (x[1:] for x in ladder(cfg, length))                                # of s_1, s_2, ..; EoI itself has no D_2 to compare
    if set(cfg.pe.split('+')) <= {'nope', 'prism'} and not cfg.prism_absolute:
        raise train.UserError(f'{cfg.pe} sees no positions, so there is nothing to shift: take a run with rope or another encoding')
    try:
        offsets = [int(offset) for offset in offsets.split(',')]
    except ValueError:
        raise train.UserError(f'--offsets={offsets}: whole numbers, as in 0,-2,-4') from None
    if max(map(abs, offsets)) >= length:
        raise train.UserError(f'--offsets={",".join(map(str, offsets))} go beyond the {length} inputs: take smaller ones, or a larger --length')
    tokens, targets = fewer(cfg, *problems(task, [length], n)[length])
    rows = [dict(head=f'{layer}.{head}') for layer in range(1, cfg.n_layer + 1) for head in range(1, cfg.heads + 1)]
    summary, shown = dict(length=length), {}
    for offset in offsets:
        with moved_from_first(model, offset):
            maps, right = attention_maps(model, tokens), answers_right(model, tokens, targets)
        both = (keys - offset >= 1) & (keys - offset <= length)
        q, k = queries[both], keys[both]
        on_x_t, on_moved = masses(maps, q, k), masses(maps, q, k - offset)              # (heads, B, L)
        peak = by_head(weights[:, :, q, 1:length + 1].argmax(dim=-1) + 1 - k for weights in maps)
        for i, row in enumerate(rows):
            row |= {f'{name} {offset:+d}': round(x[i].double().mean().item(), 4) for name, x in (('x_t', on_x_t), ('moved', on_moved), ('peak', peak))}
        summary[f'states right {offset:+d}'], shown[offset] = round(right[:, queries].double().mean().item(), 4), [weights[0] for weights in maps]
    best = max(rows, key=lambda row: row[f'moved {min(offsets, key=abs):+d}'])
    summary |= dict(head=best['head']) | {key: value for key, value in best.items() if key.startswith('peak')}
    best = best['head']
    return rows, summary, lambda plt: shift_figure(plt, shown, [task.vocab[i] for i in tokens[0].tolist()], length, best, cfg)


def shift_figure(plt, shown, words, length, best, cfg):
    """The figure of `shift`: the best head's attention from the states to the input at every offset."""
    fig, axes = plt.subplots(1, len(shown), figsize=(3.6 * len(shown) + 0.8, 4), squeeze=False, layout='constrained')
    layer, head = map(int, best.split('.'))
    for ax, (offset, maps) in zip(axes[0], shown.items()):
        image = ax.imshow(maps[layer - 1][head - 1, length + 1:-1, :length + 2].numpy(), vmin=0, vmax=1, cmap='viridis', interpolation='nearest')
        queries, keys = ladder(cfg, length)
        ax.plot(keys.numpy(), queries.numpy() - length - 1, '.', color='crimson', ms=3)
        label_sequence(ax.xaxis, words[:length + 2], 3)
        label_sequence(ax.yaxis, words[length + 1:-1], 3)
        ax.set(title=f'distance to BoS {offset:+d}', xlabel='key')
    axes[0][0].set_ylabel('query')
    fig.colorbar(image, ax=axes, label='attention weight', shrink=0.8)
    fig.suptitle(f'{cfg.task} with {cfg.pe}: head {best}; dots: the correct keys')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# toeplitz.txt

@contextlib.contextmanager
def changing(module, change):
    """The output of this module is change(output) within."""
    hook = module.register_forward_hook(lambda m, inputs, output: change(output))
    try:
        yield
    finally:
        hook.remove()


def held_out_problems(task, cfg, length, n):
    """(length, tokens [n, T], targets [n, T]) of up to n held-out problems; length 0: the longest one trained on."""
    length = length or max(cfg.train_lengths)
    if not n:
        raise train.UserError('--n=0: take at least one problem')
    if not task.existing([length], None):
        raise train.UserError(f'{cfg.task} has no problems of length {length}: take one of the trained ones, --length={max(cfg.train_lengths)}')
    return length, *task.held_out('test', n, [length], lambda length: train.generator('cpu', 'test', length))[length]


def per_head(columns):
    """Rows of {name: [L, H] tensor}: one for every head, or where these were too many for a table, for every layer, with the mean over its heads."""
    L, H = next(iter(columns.values())).shape
    value = lambda x: round(x.item(), 4) if x.isfinite() else None
    if L * H > 60:
        return [dict(layer=layer + 1, head='mean', **{name: value(x[layer].mean()) for name, x in columns.items()}) for layer in range(L)]
    return [dict(layer=layer + 1, head=head + 1, **{name: value(x[layer, head]) for name, x in columns.items()}) for layer in range(L) for head in range(H)]


def concentration(drops):
    """How unevenly drops [.., H] fall on the heads, those below 0 taken as 0: a dictionary of tensors [..], nan where there is no drop at all.

    share: of the largest one in their sum; gini: mean difference of two of them over twice their mean, from 0 to 1 - 1/H; effective: (sum d)^2 / sum d^2,
    from 1, all on one head, to H.
    """
    d = drops.clamp(min=0)
    total, H = d.sum(dim=-1), d.shape[-1]
    gini = (d[..., :, None] - d[..., None, :]).abs().sum(dim=(-2, -1)) / (2 * H * total)
    return dict(share=d.amax(dim=-1) / total, gini=gini, effective=total ** 2 / (d ** 2).sum(dim=-1))


def heads(model, task, cfg, length=0, n=512):
    """Which heads does the answer hang on, and is it a single one? Zeroes one head's output at a time (toeplitz.txt 4.3; Figures 4, 7, 9-12).

    length: of the problems, 0: the longest trained; n: how many, held out. A row for each layer: `drop 1`, `drop 2`, ... of exact match without that head,
    in points (of a corpus: rise of the loss, in nats); `share`: of the largest drop in the layer's sum, `gini` (from 0 to 1 - 1/H) and `effective`,
    the number of heads that carry it: share near 1 with a large drop is the single-head deposit. Drops below 0 count as 0 there; where none is
    above 0, they are empty. Summary: the same over all heads.
    """
    L, H = len(model.blocks), model.blocks[0].attn.heads
    if H == 1:
        raise train.UserError('heads compares the heads of a layer, and this run has one: train it with more, --n_head=4')
    length, *problems = held_out_problems(task, cfg, length, n)
    metric, scale = ('loss', -1) if task.corpus else ('exact', 100)
    score = lambda: train.evaluate(model, task, {length: problems})[length][metric] * scale
    base, scores = score(), torch.zeros(L, H)
    for layer, block in enumerate(model.blocks):
        for head in range(H):
            with changing(block.attn.tap_head_out, lambda y: y.index_fill(1, torch.tensor([head], device=y.device), 0.0)):       # (B, H, T, out_dim)
                scores[layer, head] = score()
    drops = base - scores
    number = lambda x: round(x.item(), 3) if x.isfinite() else None
    rows = [dict(layer=layer + 1, **{f'drop {head + 1}': round(x, 3) for head, x in enumerate(drops[layer].tolist())},
                 **{key: number(x[layer]) for key, x in concentration(drops).items()}) for layer in range(L)]
    worst = drops.argmax().item()
    unit = 'nats' if task.corpus else '% exact match'
    summary = dict(length=length, n=len(problems[0]), unit=unit, base=round(abs(base), 4), layer=worst // H + 1, head=worst % H + 1, largest=number(drops.max()),
                   second=number(drops.flatten().sort().values[-2]), **{key: number(x) for key, x in concentration(drops.flatten()).items()})
    label = 'loss (nats)' if task.corpus else 'exact match (%)'
    return rows, summary, lambda plt: heads_figure(plt, scores.abs().numpy(), abs(base), label, f'{cfg.task} with {cfg.pe}, length {length}')


def heads_figure(plt, scores, base, label, title):
    """The figure of `heads`: a violin per layer (Figure 4), and under it a curve over the heads of each layer (Figure 9). scores [L, H], base: no head off."""
    L, H = scores.shape
    columns = min(L, 4)
    fig = plt.figure(figsize=(max(7, 2.6 * columns), 3.4 + 2.2 * -(-L // columns)), layout='constrained')
    top, bottom = fig.subfigures(2, 1, height_ratios=(3.2, 2.2 * -(-L // columns)))
    ax = top.subplots()
    violins = ax.violinplot(scores.T, positions=range(1, L + 1), showextrema=False, widths=0.7)
    for body in violins['bodies']:
        body.set(facecolor='#56b4e9', alpha=0.6)
    ax.plot([layer + 1 for layer in range(L) for _ in range(H)], scores.flatten(), 'o', color=QUERY, ms=4, label='one head off')
    ax.axhline(base, color='#d55e00', lw=1, label='no head off')
    ax.set(xlabel='layer of the head that is off', ylabel=label, xticks=range(1, L + 1), title=title)
    ax.legend(fontsize=8)
    for layer, ax in enumerate(bottom.subplots(-(-L // columns), columns, sharey=True, squeeze=False).flat):
        if layer >= L:
            ax.axis('off')
            continue
        ax.plot(range(1, H + 1), scores[layer], 'o-', color=QUERY, ms=4)
        ax.axhline(base, color='#d55e00', lw=1)
        ax.set(title=f'layer {layer + 1}', xlabel='head that is off', xticks=range(1, H + 1, 1 + H // 9))
        if layer % columns == 0:
            ax.set_ylabel(label)
    return fig


def diagonal_means(L):
    """Mean a_d [.., T] of L [.., T, T] along its diagonals i - j = d, d = 0..T-1; what is above the main one does not count."""
    T = L.shape[-1]
    i, j = torch.tril_indices(T, T, device=L.device)
    return torch.zeros(*L.shape[:-1], dtype=L.dtype, device=L.device).index_add(-1, i - j, L[..., i, j]) / torch.arange(T, 0, -1, device=L.device)


def toeplitz_matrix(a):
    """T_ij = a_(i-j) [.., T, T] on and below the main diagonal, 0 above, of a [.., T]."""
    return a[..., encodings.distance(torch.arange(a.shape[-1], device=a.device))].tril()


def variance_share(part, L):
    """Share of the variance of L [.., T, T] over i >= j that a part of it accounts for [..]: cov(part, L) / var(L). Those of parts that make up L add up to 1."""
    i, j = torch.tril_indices(*L.shape[-2:], device=L.device)
    part, L = (x[..., i, j] - x[..., i, j].mean(dim=-1, keepdim=True) for x in (part, L))
    return (part * L).mean(dim=-1) / (L ** 2).mean(dim=-1)


def grams(q, k, turn):
    """Eq. 2's parts for queries and keys [B, H, T, D] whose pairs (2m, 2m+1) are taken as complex numbers: complex (L, G) [B, H, T, T].

    L = sum_m G^(m) o T^(m), G^(m)_ij = q_i^(m) conj(k_j^(m)), T^(m)_ij = u_i conj(u_j), u = turn [H, T, D/2], for RoPE e^(i theta_m t): one Toeplitz
    factor for each frequency m. RoPE's logit is Re L. G = sum_m G^(m).
    """
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))           # (B, H, T, D/2)
    L, G = 0, 0
    for m in range(q.shape[-1]):
        G_m, u = q[..., :, None, m] * k[..., None, :, m].conj(), turn[..., m]
        L, G = L + G_m * (u[..., :, None] * u[..., None, :].conj()), G + G_m
    return L, G


def single_factor(L, G):
    """How far eq. 2 is off as it stands in the paper, L = Re(G o G_e) with one Toeplitz matrix G_e: a dictionary of shares [H], for L and complex G [B, H, T, T].

    unit: of the variance of L that the best G_e with entries of modulus 1 leaves unexplained (above 1: it is worse than a constant); free: the
    best G_e with any complex entries. impossible: pairs with |L_ij| > |G_ij|, which no angle makes equal, not even one of their own.
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
                impossible=(entries.abs() > G[..., i, j].abs().transpose(0, 1).flatten(1) + 1e-9 * entries.abs().max()).double().mean(dim=1))


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
    return [z.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for z in attn.qkv_of(x)]


def is_linear(model):
    """Whether the encoding turns queries and keys linearly, as eq. 1 and 2 want it."""
    return not any(isinstance(m, (encodings.PoPE, encodings.ViPE, encodings.PRISM)) for m in model.modules())


def turns_of(enc, q, pos, state):
    """By what the encoding multiplies the pairs (2m, 2m+1) of q [B, H, T, D], as complex numbers [H, T, D/2]: RoPE's e^(i theta_m t), 1 where nothing turns."""
    one = torch.zeros_like(q[:1]).index_fill(-1, torch.arange(0, q.shape[-1], 2), 1.0)
    return torch.view_as_complex(enc.qk(one, one, pos, state)[0][0].unflatten(-1, (-1, 2)))


def gram_terms(attn, x, position, pos, state):
    """Eq. 1's terms {name: [B, H, T, T] or [H, T, T]} of the logits, where x = content + position after the norm and the encoding is linear in q and k."""
    content, turned = x - position, {}
    for name, part in (('c', content), ('p', position)):
        q, k, _ = project(attn, part)
        turned[name] = attn.pe.qk(q, k, pos, state)
    terms = {f'q{a} k{b}': turned[a][0] @ turned[b][1].mT * attn.pe.scale for a in 'cp' for b in 'cp'}
    bias = attn.pe.bias(pos, state)
    return {name: term for name, term in terms.items() if term.any()} | ({} if bias is None else {'B': bias})


def logit_shares(attn, x, position, pos, state, linear, turns):
    """(L [B, H, T, T], {name: share [H]}, {equation: (its right side, L)}) of a layer, x = content + position [B, T, C] its input; see toeplitz()."""
    q, k, _ = project(attn, x)
    L = attn.pe.logits(q, k, pos, state)
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
    """Do the logits depend on the distance alone, on content, or on both? Their Toeplitz part and the Gram terms (toeplitz.txt eq. 1, 2, B.1).

    length: of the problems, 0: the longest trained; n: how many. Shares of the variance of the logits over i >= j, a row for each head (mean over problems):
    `toeplitz`: of the mean along each diagonal (chance: what white noise would have); `shared`: of one such matrix for all problems, which is what a relative
    bias could do. `qc kc`, `qc kp`, `qp kc`, `qp kp`, `B`: the terms of eq. 1, adding up to 1, with p_i the vectors that the encoding adds, as they still
    stand in the residual stream at every layer; `qp kp toeplitz`: how Toeplitz that term is by itself (Assumption 3.2 wants 1). With RoPE also how far
    eq. 2's single G_e is off: `G_e off`, `free G_e off`, `impossible` are what single_factor() finds. Summary: means over the heads, and
    the largest errors of eq. 1 and of eq. 2 with a Toeplitz factor for each frequency, relative to the largest logit, in float64.
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
    columns = {name: torch.stack([shares.get(name, torch.zeros(cfg.heads)) for shares in found]) for name in dict.fromkeys(key for f in found for key in f)}
    chance = (T - 1) / (T * (T + 1) / 2 - 1)
    summary = dict(length=length, n=len(tokens), tokens=T, chance=round(chance, 4), **{name: round(value.mean().item(), 4) for name, value in columns.items()},
                   **{f'error of {name}': error for name, error in errors.items()})
    words = [task.vocab[t] for t in tokens[0].tolist()]
    title = f'{cfg.task} with {cfg.pe}, length {length}'
    return per_head(columns), summary, lambda plt: toeplitz_figure(plt, columns, chance, profiles, words, cfg.train_len, title)


def toeplitz_figure(plt, columns, chance, profiles, words, trained, title):
    """The figure of `toeplitz`: shares of every head, its profile a_d, and the most Toeplitz head's logits taken apart. profiles: (L, a, mean a) by layer."""
    share = columns['toeplitz']
    L, H = share.shape
    layer, head = divmod(share.argmax().item(), H)
    few = L * H <= 24
    bars = {name: (value if few else value.mean(dim=1)).flatten().numpy() for name, value in columns.items()}
    names = [f'{x + 1}.{y + 1}' for x in range(L) for y in range(H)] if few else [str(x + 1) for x in range(L)]
    at = range(len(names))
    fig, axes = plt.subplots(2, 3, figsize=(14, 8.5), layout='constrained')
    ax = axes[0][0]
    ax.bar([x - 0.2 for x in at], bars['toeplitz'], 0.4, color=QUERY, label="each problem's own")
    ax.bar([x + 0.2 for x in at], bars['shared'], 0.4, color='#56b4e9', label='one for all problems')
    ax.axhline(chance, color='black', lw=1, ls=':', label='white noise, own')
    ax.set(title='Toeplitz part of the logits', ylabel='share of variance', ylim=(min(0, bars['shared'].min()), 1.02))
    ax.legend(fontsize=8)
    terms, what = {name: value for name, value in bars.items() if name in ('qc kc', 'qc kp', 'qp kc', 'qp kp', 'B')}, 'terms of eq. 1'
    if len(terms) < 2:
        terms, what = {name: bars[name] for name in ('G_e off', 'free G_e off', 'impossible') if name in bars}, 'eq. 2 with a single G_e: how far off'
    ax = axes[0][1]
    for number, (name, value) in enumerate(terms.items()):
        ax.bar([x + 0.8 * (number + 0.5) / len(terms) - 0.4 for x in at], value, 0.8 / len(terms), label=name,
               color=('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00')[number])
    if terms:
        ax.margins(y=0.25)
        ax.set(title=what, ylabel='share of variance' + ', of pairs' * ('impossible' in terms))
        ax.legend(fontsize=8)
    else:
        ax.axis('off')
    for ax in axes[0][:2]:
        ax.set(xlabel='layer.head' if few else 'layer (mean over its heads)', xticks=at, xticklabels=names)
        ax.tick_params(axis='x', labelsize=8)
    colours = plt.get_cmap('viridis')
    for number, (_, _, mean) in enumerate(profiles):
        for row in mean:
            axes[0][2].plot(row.numpy(), color=colours(number / max(1, L)), lw=1, alpha=0.8)
        axes[0][2].plot([], color=colours(number / max(1, L)), label=f'layer {number + 1}')
    if len(words) > trained:
        axes[0][2].axvline(trained, color='crimson', lw=1, label='trained length')
    axes[0][2].set(title='mean logit at each distance, a line for each head', xlabel='distance i - j (tokens)', ylabel='logit')
    axes[0][2].legend(fontsize=8)
    logits, part = profiles[layer][0][head], toeplitz_matrix(profiles[layer][1][head])
    hidden = torch.ones_like(logits).triu(1).bool()
    maps = [z.masked_fill(hidden, float('nan')).numpy() for z in (logits, part, logits - part)]
    low, high = min(z[z == z].min() for z in maps), max(z[z == z].max() for z in maps)
    for ax, z, what in zip(axes[1], maps, ('logits', 'their Toeplitz part', 'the rest')):
        image = ax.imshow(z, vmin=low, vmax=high, cmap='viridis', interpolation='nearest')
        ax.set(title=f'head {layer + 1}.{head + 1}: {what}', xlabel='key', ylabel='query')
        label_tokens(ax.xaxis, words)
        label_tokens(ax.yaxis, words)
        ax.tick_params(axis='x', rotation=90)
    fig.colorbar(image, ax=axes[1], label='logit')
    fig.suptitle(title)
    return fig


def positions(model, task, cfg, length=0, n=512, draws=4):
    """Does a layer still read the vectors p_i that were added to the embeddings? Takes them out of the residual stream (toeplitz.txt 5.4; Figure 8).

    At each layer p_i is subtracted from the stream before it, so for that layer and all after it; or a random vector of the same length, a fresh one for
    every position in each of the draws. length: of the problems, 0: the longest trained; n: how many. Rows: exact match in % (of a corpus: loss in nats)
    `without p`, `random` (mean over draws) and its standard deviation; `more`: what p costs beyond the random vectors; `norm`: mean |p_i| over mean |x_i|.
    For ape, learned, random, shifted_ape (without a shift, as in evaluation) and sums with them.
    """
    length, tokens, targets = held_out_problems(task, cfg, length, n)
    p = added_vectors(model, tokens.shape[1])
    if not p.any():
        raise train.UserError(f'positions takes out the vectors that an encoding adds to the embeddings, and pe={cfg.pe} adds none: '
                              f'train with pe=ape or pe=ape+{cfg.pe}')
    if not draws:
        raise train.UserError('--draws=0: take at least one draw of random vectors')
    metric, scale = ('loss', -1) if task.corpus else ('exact', 100)
    score = lambda: train.evaluate(model, task, {length: (tokens, targets)})[length][metric] * scale
    base, g, rows = score(), train.generator('cpu', 'test', 0), []

    def without(module, vectors):
        with changing(module, lambda x: x - vectors[:x.shape[1]]):
            return score()
    for layer, module in enumerate([model.tap_resid, *(block.tap_resid for block in model.blocks[:-1])]):
        noise = [torch.nn.functional.normalize(torch.randn(p.shape, generator=g, dtype=p.dtype), dim=-1) * p.norm(dim=-1, keepdim=True) for _ in range(draws)]
        with listening(module) as heard, torch.no_grad():
            model(tokens[:8])
        random, removed = torch.tensor([without(module, r) for r in noise]), without(module, p)
        rows.append(dict(layer=layer + 1, **{'without p': round(abs(removed), 3), 'random': round(random.mean().abs().item(), 3),
                                             'sd': round(random.std(correction=0).item(), 3), 'more': round(random.mean().item() - removed, 3),
                                             'norm': round((p.norm(dim=-1).mean() / heard[0][2].norm(dim=-1).mean()).item(), 3)}))
    label = 'loss (nats)' if task.corpus else 'exact match (%)'
    summary = dict(length=length, n=len(tokens), unit=label, base=round(abs(base), 4), most_more_at=max(rows, key=lambda row: row['more'])['layer'])
    return rows, summary, lambda plt: positions_figure(plt, rows, abs(base), label, f'{cfg.task} with {cfg.pe}, length {length}')


def positions_figure(plt, rows, base, label, title):
    """The figure of `positions` (Figure 8)."""
    fig, ax = plt.subplots(figsize=(6, 4), layout='constrained')
    layers = [row['layer'] for row in rows]
    ax.axhline(base, color='grey', lw=1, ls=':', label='nothing taken out')
    ax.plot(layers, [row['without p'] for row in rows], 'o-', color='#d55e00', label='without p')
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
    """f(theta) = Re a_0 + 2 Re sum_(d > 0) a_d e^(-i d theta) [.., points], theta from 0 to 2 pi: the symbol of hermitian(a), whose eigenvalues lie in its range."""
    return 2 * torch.fft.fft(a, points).real - a[..., :1].real


def lemma_b1(w, phase):
    """Lemma B.1 for weights w [N] and phases [N] on a fine grid of theta: (f, g), f = sum_i 2 w_i cos(phase_i + i theta) and g without the phases."""
    wave = lambda phase: 2 * torch.fft.fft(torch.polar(w, -phase), 2 ** 12).real
    return wave(phase), wave(torch.zeros_like(phase))


def spectral_claims(seed=0):
    """Lemma B.1 and Prop. B.3 beside what they say: rows (what, claimed, found). The phases of the statement are i theta_i, those of its proof theta_i."""
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
              ('max |f| / max |g| with w = 1 1, equal phases pi/2', '1', largest(*lemma_b1(one[:2], vector(pi / 2, pi / 2)))),
              ('range of g / 4 sum w with w = 0 1 1', '1', width(lemma_b1(*sine)[1]) / 8),
              ('range of f / range of g with w = 0 1 1, phases -pi/2', '<= 1', width(lemma_b1(*sine)[0]) / width(lemma_b1(*sine)[1])),
              ('largest change of an eigenvalue from W to W o E, E positive definite, |E_ij| = 1', '> 0', (turned - plain).abs().max().item()),
              ('width of the spectrum of W o E / of W, |E_ij| = 1, E not definite', '< 1', width(quarter) / width(plain)))
    return [dict(what=what, claimed=claimed, found=round(found, 6)) for what, claimed, found in claims]


@torch.no_grad()
def spectrum(model, task, cfg, length=0, n=8):
    """Does an encoding make the spectrum of the logits' Toeplitz part narrower, as toeplitz.txt has it of RoPE (Theorem B.1, Prop. B.3, Lemma B.1)?

    length: of the problems, 0: the longest trained; n: how many, averaged over. Rows: `content`, the Toeplitz part of <q_i, k_j> / sqrt(d), and `logits`, that
    of the logits (with RoPE both in complex form, sum_m q^(m) conj(k^(m))), of every head, or where these are more than 12 of the widest in each layer; the
    encoding's own Toeplitz factors: `B`, `p_i p_j` (its Toeplitz part), RoPE's `T^(m)`. Each is continued to i < j as a Hermitian matrix: range of its symbol,
    of its eigenvalues (which lie within the former) and, of the logits, `ratio`: width of that range over the content's. Then what the paper claims and what is
    found. Prop. B.3 is empty: a positive definite E with |E_ij| = 1 has rank one, E_ij = e^(i phi (i - j)), so that W o E has exactly the eigenvalues of W;
    without definiteness the spectrum can grow. Summary: mean ratio, and share of the heads where it is below 1.
    """
    length, tokens, _ = held_out_problems(task, cfg, length, n)
    T = tokens.shape[1]
    tokens = tokens[:max(1, 2 ** 22 // (cfg.heads * T * T))]
    net = copy.deepcopy(model).double()
    turns, pairs, factors = is_linear(net) and any(isinstance(m, encodings.RoPE) for m in net.modules()), {}, {}
    for layer, (attn, x, pos, state, _) in enumerate(attention_inputs(net, tokens)):
        q, k, _ = project(attn, x)
        bias, logits = attn.pe.bias(pos, state), attn.pe.logits(q, k, pos, state)
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
    chosen = list(pairs) if len(pairs) <= 12 else [max((name for name in pairs if name.startswith(f'{layer + 1}.')), key=lambda name: widths(pairs[name][1]))
                                                   for layer in range(len(net.blocks))]

    def row(what, a, **more):
        f, e = symbol(a), torch.linalg.eigvalsh(hermitian(a))
        ends = {'symbol from': f.min(), 'symbol to': f.max(), 'eigenvalues from': e[0], 'eigenvalues to': e[-1]}
        return dict(what=what) | {key: round(x.item(), 4) for key, x in ends.items()} | more
    rows = [r for name in chosen for r in (row(f'content {name}', pairs[name][0]), row(f'logits {name}', pairs[name][1], ratio=round(ratio[name], 4)))]
    rows += [row(name, a) for name, a in factors.items() if name[2:] in chosen or name[0] != 'B'] + spectral_claims()
    values = torch.tensor(list(ratio.values()))
    summary = dict(length=length, n=len(tokens), tokens=T, ratio=round(values.mean().item(), 4), narrower=round((values < 1).double().mean().item(), 4))
    widest = max(pairs, key=lambda name: widths(pairs[name][1]))
    return rows, summary, lambda plt: spectrum_figure(plt, pairs[widest], f'head {widest}, {cfg.task} with {cfg.pe}, length {length}')


def spectrum_figure(plt, pair, title):
    """The figure of `spectrum`: symbols and eigenvalues of one head's content and logits, and the counterexample to Lemma B.1's last sentence."""
    fig, axes = plt.subplots(1, 3, figsize=(14, 4), layout='constrained')
    for a, colour, name in zip(pair, ('#009e73', QUERY), ('content', 'logits')):
        f, e = symbol(a), torch.linalg.eigvalsh(hermitian(a))
        axes[0].plot(torch.linspace(0, 2 * torch.pi, len(f)), f, color=colour, label=name)
        axes[1].plot(range(1, len(e) + 1), e.flip(0), 'o-', ms=3, color=colour, label=f'{name}, from {e[0]:.1f} to {e[-1]:.1f}')
    fig.suptitle(title)
    axes[0].set(title='symbols of their Toeplitz parts', xlabel='theta (rad)', ylabel='symbol')
    axes[1].set(title='eigenvalues', xlabel='eigenvalue, from the largest', ylabel='value')
    w, phase = torch.tensor([0, 1, 1], dtype=torch.float64), torch.full((3,), -torch.pi / 2, dtype=torch.float64)
    for f, colour, name in zip(lemma_b1(w, phase), ('#d55e00', '#56b4e9'), ('f, with phases -pi/2', 'g, without')):
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
    """Lemma C.2 for a row A [T] of weights: the softmax Jacobian's row of j along e_j, A_j (1 - A_j), and the length of the rest of it, which is never longer."""
    row = A[j] * (torch.eye(len(A), dtype=A.dtype)[j] - A)
    return row[j], torch.cat([row[:j], row[j + 1:]]).norm()


def logit_gradients(model, tokens, targets):
    """For every layer (A, dl/dS [B, H, T, T], dl/dY [B, H, T, D], dl/dy [B, T, C], V, Y): S the logits, Y a head's output, y that of all heads, after W_O."""
    taps = [(block.attn.tap_logits, block.attn.tap_head_out, block.attn) for block in model.blocks]
    with listening(*(module for layer in taps for module in layer)) as heard:
        loss = train.token_losses(model(tokens)[0], targets).sum()
    found = [heard[3 * i:3 * i + 3] for i in range(len(taps))]
    grads = torch.autograd.grad(loss, [output for layer in found for _, _, output in layer])
    return [(S.detach().softmax(dim=-1), *grads[3 * i:3 * i + 3], project(attn, inputs[0])[2].detach(), Y.detach())
            for i, ((_, _, S), (_, _, Y), (attn, inputs, _)) in enumerate(found)]


def edges(task, tokens, kind):
    """The anchors of every problem: (b, u, j, d), edges from row u to column j with label d, all [E].

    pair: from the later of two triggers to the earlier; read: from the token at which the class is read to the later trigger; d: the distance of the
    triggers. all: every edge, d = u - j.
    """
    B, T = tokens.shape
    if kind == 'all':
        u, j = torch.tril_indices(T, T)
        return torch.arange(B).repeat_interleave(len(u)), u.repeat(B), j.repeat(B), (u - j).repeat(B)
    first = task.first_trigger
    i, j = ((tokens >= first) & (tokens < first + 2)).nonzero()[:, 1].view(B, 2).unbind(dim=1)
    return torch.arange(B), *((j, i) if kind == 'pair' else (torch.full_like(j, T - 2), j)), j - i


def seeds_of(dS, edge, T):
    """H(d) [H, T], the gradient dl/dS [B, H, T, T] summed over the edges with label d, and how much of it does not cancel: sum |H| / sum |dl/dS| [H]."""
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
    g = dS[b, :, u].transpose(1, 2).gather(1, (u[:, None] - D).clamp(min=0)[..., None].expand(-1, -1, dS.shape[1]))[inside]           # (E, H)

    def between(group):
        sums, count = (torch.zeros(group.max() + 1, x.shape[1], dtype=g.dtype).index_add(0, group, x) for x in (g, torch.ones_like(g)))
        return (sums ** 2 / count.clamp(min=1)).sum(dim=0) - g.sum(dim=0) ** 2 / len(g)
    cell, place = (d[:, None] * len(D) + D)[inside], (D - d[:, None] + len(D))[inside]
    return between(place) / between(cell), (len(place.unique()) - 1) / (len(cell.unique()) - 1)


def seed_condition(A, dY, dy, V, W_O, edge):
    """Prop. 6.1's condition a eta > C chi in the top layer: (share of the edges with Lambda > 0, which (A2) wants of all; largest a eta / (C chi)).

    The second is never above 1: eta <= Lambda_uj <= |dl/dY_u| |V_j| <= C and a <= A_uj <= |A_u| <= chi. (And chi = 1, by the first row of causal attention.)
    """
    b, u, j, d = edge
    Lambda, a = (dY[b, :, u] * V[b, :, j]).sum(dim=-1), A[b, :, u, j]                   # (E, H)
    C = torch.linalg.matrix_norm(W_O, 2) * torch.linalg.matrix_norm(V, 2).amax(dim=0) * dy.norm(dim=-1).max()               # (H,)
    chi = A.norm(dim=-1).amax(dim=(0, 2))
    least = lambda x: torch.full((d.max() + 1, x.shape[1]), torch.inf, dtype=x.dtype).scatter_reduce(0, d[:, None].expand_as(x), x, 'amin')[d.unique()]
    return (Lambda > 0).double().mean().item(), (least(a) * least(Lambda) / (C * chi)).max().item()


def cancellation(name, values=0.0, linear=True):
    """Prop. 6.2's pair of samples in one head with encoding `name`: |g + g'| over the larger of their gradients at the anchor edge, 0 where they cancel.

    The anchor tokens are x_0 + t and x_0 - t with W_Q t = W_K t = 0 and W_V x_0 = 0. values: size of W_V x of the other tokens; linear: whether the loss
    is linear in the head's output, or a cross-entropy.
    """
    g, (C, D, T, u, j) = torch.Generator().manual_seed(0), (16, 4, 7, 5, 2)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    W_Q, W_K, W_V, away = draw(D, C), draw(D, C), draw(D, C), draw(D)
    null = lambda W: torch.linalg.svd(W)[2][len(W):]                                    # rows: a basis of the kernel
    x, t = draw(T, C - D) @ null(W_V), draw(C - 2 * D) @ null(torch.cat([W_Q, W_K]))
    x = x + values * torch.nn.functional.one_hot(torch.arange(T), T).double().index_fill(0, torch.tensor([j]), 0.0) @ draw(T, C)
    enc, found = encodings.build(encodings.PEConfig(pe=name, d_model=D, n_head=1)), []
    for sign in (1, -1):
        z = x.index_add(0, torch.tensor([j]), sign * t[None])
        S = enc.logits((z @ W_Q.T)[None, None], (z @ W_K.T)[None, None], torch.arange(T)).detach().requires_grad_()
        y = (S.softmax(dim=-1) @ (z @ W_V.T))[0, 0, u]
        found.append(torch.autograd.grad(y @ away if linear else -y.log_softmax(dim=0)[0], S)[0][0, 0, u, j])
    return ((found[0] + found[1]).abs() / max(found[0].abs(), found[1].abs())).item()


def gradients(model, task, cfg, length=0, n=256, steps=200, edge=''):
    """Does one head collect the gradient of position, and more so the lower the layer? H_l^(h)(d) in training (toeplitz.txt section 6, appendix C).

    H_l^(h)(d): gradient of the summed loss by the logit of head h in layer l, over the edges with label d of n held-out problems of this length (0: the
    longest trained). edge: read or pair, where the task has two triggers, or all, everywhere: see edges(). Taken before training, in the first `steps`
    steps of this very run, done again here (0: none, for a run too large for that), and in the saved model. Rows, by layer: strongest `head` by
    |H| = sqrt(sum_d H(d)^2), its |H| as `first`, the next one's as `second`; their difference `margin` and its `growth`, margin over that of the layer
    above, which Theorem 6.1 wants above 1; of the strongest head the share of distances with H > 0 (`positive`; descent lowers such a logit) and
    `coherence`, how much does not cancel; `effective`, the number of heads that share |H|. Then the claims: Lemmas C.1, C.2, Prop. 6.1 (its condition cannot hold; of edge=read), 6.2, and C.6 where there are two triggers.
    """
    two = getattr(task, 'triggers', 0) == 2
    edge = edge or ('read' if two else 'all')
    if edge not in ('read', 'pair', 'all') or edge != 'all' and not two:
        raise train.UserError(f'--edge={edge}: read and pair need two triggers, as in task=distance; all is for every task')
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
    summary = dict(length=length, n=len(tokens), edge=edge, effective=first['effective'], growth=median, grows=grows)
    figure = lambda plt: gradients_figure(plt, rows, curves, anchors[3].unique(), edge, f'{cfg.task} with {cfg.pe}, length {length}')
    return rows + gradient_claims(tests, grows), summary, figure


def margins(H, coherence):
    """The rows of gradients() for H_l^(h)(d) [L, H, distances] and coherence [L, H]."""
    strength, rows = H.norm(dim=-1), []                                                 # (L, H)
    order = torch.nn.functional.pad(strength, (0, 1)).sort(dim=1, descending=True, stable=True)        # a head of 0 more, where there is but one
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
              ('C.2: across / along, the largest of 200 rows', '<= 1', max((across / along).item() for along, across in (anchor_gain(row, 3) for row in A))),
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
    """measure(step, model) before training and at four more points of the first steps of the run of cfg.seeds[0], trained again from its start."""
    cfg = dataclasses.replace(cfg, seeds=cfg.seeds[:1], device='cpu', compile=False, graph=False)
    seeds = train.Seeds(cfg, task, torch.device('cpu'))
    (net,) = seeds.models.values()
    points = sorted({round(steps * i / 4) for i in range(5)})
    for step in range(steps + 1):
        if step in points:
            measure(step, net)
        if step < steps:
            seeds.step(step)


def gradients_figure(plt, rows, curves, at, edge, title):
    """The figure of `gradients`: H(d) of every head in the lowest and the highest layer, at the start and trained; margins by layer through training."""
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
    axes[0][2].set(title='margin of the strongest head', ylabel='|H| of the first less the second', yscale='log' if any(row['margin'] for row in rows) else 'linear')
    axes[1][2].set(title='heads that share the gradient', ylabel='effective number of heads', ylim=(0.9, len(H) + 0.1))
    for ax in axes[:, 2]:
        ax.set(xlabel='training step', xticks=range(len(steps)), xticklabels=steps)
        ax.legend(fontsize=8)
    fig.suptitle(f'{title}; edges: {edge}')
    return fig


# ---------------------------------------------------------------------------------------------------------------------
# pope.txt, Figure 2, place by place

@torch.no_grad()
def losses_by_position(model, tokens, targets):
    """Mean cross-entropy at every position [T], in nats, of what is predicted there; nan where nothing is."""
    total, count = torch.zeros(2, tokens.shape[1], dtype=torch.float64)
    for x, y in zip(tokens.split(8), targets.split(8)):
        total += train.token_losses(model(x)[0], y).sum(dim=0)
        count += (y != -100).sum(dim=0)
    return total / count


def loss(model, task, cfg, length=0, n=32, beside=''):
    """Loss by position in contexts longer than the trained ones: where does a model profit from what lies far back, and where does it break?

    length: of the context, 0: the longest of eval_lengths; n: stretches of held-out text; beside: further runs, a comma list, on the same text.
    Rows: means over 16 parts of the context; the curves are smoothed over a 32nd of it.
    """
    length = length or max(cfg.eval_lengths)
    if not task.existing([length], None):
        raise train.UserError(f'{cfg.task} has no problems of length {length}: take one of eval_lengths, {cfg.eval_lengths}')
    tokens, targets = task.held_out('test', n, [length], lambda length: train.generator('cpu', 'test', length))[length]
    curves = {cfg.pe: losses_by_position(model, tokens, targets)[:-1]}
    for path in filter(None, beside.split(',')):
        net, other = train.load(path)
        if other.the_task is not task:
            raise train.UserError(f'{path} was trained on {other.task} {other.data}, this run on {cfg.task} {cfg.data}: their losses do not compare')
        curves[path if other.pe in curves else other.pe] = losses_by_position(net, tokens, targets)[:-1]
    mean = lambda curve: None if curve.isnan().all() else round(curve.nanmean().item(), 4)
    parts = torch.arange(tokens.shape[1] - 1).tensor_split(16)
    rows = [dict(first=part[0].item() + 1, last=part[-1].item() + 1, **{name: mean(curve[part]) for name, curve in curves.items()})
            for part in parts if len(part)]
    trained = cfg.train_len
    summary = dict(length=length) | {f'{name}, {where}': mean(curve[cut]) for name, curve in curves.items()
                                     for where, cut in (('trained positions', slice(0, trained - 1)), ('beyond', slice(trained - 1, None)))}
    return rows, summary, lambda plt: loss_figure(plt, curves, trained, cfg.task)


def loss_figure(plt, curves, trained, name):
    """The figure of `loss`."""
    fig, ax = plt.subplots(figsize=(8, 4), layout='constrained')
    for label, curve in curves.items():
        window = max(1, len(curve) // 32)
        smooth = torch.nn.functional.avg_pool1d(curve.nan_to_num(curve.nanmean().item())[None, None], window, 1).squeeze()
        ax.plot((torch.arange(len(smooth)) + (window + 1) / 2).numpy(), smooth.numpy(), label=label)
    ax.axvline(trained, color='crimson', lw=1)
    ax.set(xlabel=f'position in the context; trained to {trained} (red line)', ylabel='loss (nats per token)', title=f'{name}: loss by position')
    ax.legend()
    return fig


PROBES = {
    'cursor': cursor,
    'attention': attention,
    'alignment': alignment,
    'linear': linear,
    'steps': steps,
    'stats': stats,
    'prefix': prefix,
    'shift': shift,
    'heads': heads,
    'positions': positions,
    'toeplitz': toeplitz,
    'spectrum': spectrum,
    'gradients': gradients,
    'loss': loss,
}


# ---------------------------------------------------------------------------------------------------------------------
# running

def show(rows, summary):
    """Print rows as a table, and the summary."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns] + [[str(row.get(key, '')) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print('  '.join(f'{text:>{width}}' for text, width in zip(line, widths)))
    print(', '.join(f'{key} {value}' for key, value in summary.items()))


def read_flags(argv, function):
    """--key=value -> the probe's own arguments, of the type of their defaults; seed and out_dir are every probe's."""
    known = {'seed': None, 'out_dir': ''} | {name: p.default for name, p in list(inspect.signature(function).parameters.items())[3:]}
    values = {}
    for arg in argv:
        key, equals, text = arg[2:].partition('=')
        if not arg.startswith('--') or not equals or key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise train.UserError(f'{arg}: not a flag of this probe' + (f', did you mean --{near[0]}=...?' if near else '.') + f' It takes {", ".join(f"--{k}=..." for k in known)}')
        kind = int if known[key] is None else type(known[key])
        try:
            values[key] = text if kind is str else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[key] = None
        if type(values[key]) is not kind or kind is int and values[key] < 0:
            raise train.UserError(f'{arg}: {key} must be {"a whole number from 0 on" if kind is int else kind.__name__}')
    return values.pop('seed', None), values.pop('out_dir', ''), values


def load(run, seed=None):
    """(model, cfg) of a run, or of by_hand:TASK; cfg.seeds is the one seed and cfg.out_dir the folder."""
    if run.startswith('by_hand:'):
        return iteration_head(run.partition(':')[2])
    seed = train.first_sound(train.read_checkpoint(os.path.join(run, 'ckpt.pt'))) if seed is None else seed
    model, cfg = train.load(run, seed)
    cfg.seeds, cfg.out_dir = [seed], run
    return model, cfg


def main(argv):
    """The program: the list of probes, or one probe on one run."""
    if not argv or {'--help', '-h'} & set(argv):
        print(__doc__)
        for name, function in PROBES.items():
            print(f'{name:12} {inspect.getdoc(function)}\n')
        return
    if argv[0] not in PROBES:
        near = difflib.get_close_matches(argv[0], PROBES, 1)
        raise train.UserError(f'unknown probe {argv[0]!r}' + (f', did you mean {near[0]!r}?' if near else '') + f' There are: {", ".join(PROBES)}')
    if len(argv) < 2 or argv[1].startswith('--'):
        raise train.UserError(f'python probe.py {argv[0]} RUN: which run? For example out/string_copy_prism')
    name, run_dir, function = argv[0], argv[1], PROBES[argv[0]]
    seed, out_dir, values = read_flags(argv[2:], function)
    model, cfg = load(run_dir, seed)
    out_dir = out_dir or cfg.out_dir
    train.make_folder(out_dir)
    try:
        rows, summary, figure = function(model, cfg.the_task, cfg, **values)
    except ValueError as error:
        raise train.UserError(str(error)) from None
    show(rows, summary)
    path = os.path.join(out_dir, f'probe_{name}')
    train.write(path + '.json', json.dumps(dict(rows=rows, summary=summary), indent=1))
    try:
        import matplotlib
    except ImportError:
        print(f'(pip install matplotlib, and {path}.png is drawn as well)')
        return
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure(plt).savefig(path + '.png', dpi=110)
    print(f'wrote {path}.json and drew {path}.png')


if __name__ == '__main__':
    sys.stdout.reconfigure(errors='replace')
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)                                       # ... | head
    try:
        main(sys.argv[1:])
    except (train.UserError, OSError) as error:
        print(f'probe.py: {error}', file=sys.stderr)
        sys.exit(2)
