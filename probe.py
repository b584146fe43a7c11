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
