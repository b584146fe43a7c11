"""The position-generalization paper: logits as sums, disordered positions, longer texts."""
import dataclasses
import itertools

import numpy as np
import torch
import torch.nn.functional as F

import train
from engine.config import UserError
from pe import InputMissing, causal
from probes import core
from probes.core import Curves, Figure, Map, correlation, number
from probes.pope import frequencies_of, losses_by_position, polar, rotating, smooth

PAPER = 'Position generalization, Figure'


def logits_at(layer, pos_q, pos_k, q=None):
    """Unmasked logits [B, H, Tq, Tk] of a layer's queries, or of q, at pos_q and its keys at pos_k,
    of encodings that see distances only."""
    enc = layer.enc
    at = dataclasses.replace(enc.at(0, pos_k, layer.state), t=pos_q[None])
    q, k = enc.scaled_qk(layer.q if q is None else q, layer.k, at)
    logits, bias = q @ k.transpose(-2, -1) * enc.scale, enc.by_distance(at.distance)
    if bias is None:
        return logits
    return logits + F.pad(bias, (0, 0, 0, 0, 0, logits.shape[1] - len(bias)))


@torch.no_grad()
def sees_distances(model, tokens):
    """Whether logits depend on positions, and through distances alone: logits_at() is right."""
    layer, pos = core.trace(model, tokens[:1])[0], torch.arange(tokens.shape[1])
    try:
        here, there = logits_at(layer, pos, pos), logits_at(layer, pos, pos - 1)
    except InputMissing:    # positions come from the content
        return False
    same = torch.allclose(here + causal(here), layer.logits, 1e-3, 1e-4)
    return same and not torch.allclose(here, there)


def check_distances(model, tokens, cfg):
    """UserError where logits_at() would not be right."""
    core.check_causal(cfg)
    enc = model.blocks[0].attn.pe
    if not enc.shift_invariant or enc.widens or not sees_distances(model, tokens):
        raise UserError('this probe asks for the logit at any distance, which '
                        f'pe={cfg.pe} has not: take rope, pope, alibi or t5')


def each_layer(model, rows, measure):
    """For every sequence [1, T] of rows: measure(layer) [L, ...] of the layers of its trace."""
    return [torch.stack([measure(layer) for layer in core.trace(model, row)]) for row in rows]


def fit_panels(r, maps, ylabel, names):
    """Of the best and the worst head by r [L, H]: logits, their fit and its components, as maps(i,
    h) gives them: (W, *components, fit)."""
    order, panels = r.flatten().nan_to_num(-2).argsort(descending=True).tolist(), []
    for x in dict.fromkeys((order[0], order[-1])):
        i, h = divmod(x, r.shape[1])
        W, *parts, fit = maps(i, h)
        known = W.isfinite()
        ends = [W[known].double().quantile(q).item() for q in (0.005, 0.995)]
        for title, z in ((f'head {i + 1}.{h + 1}', W), (f'fit, r {r[i, h]:.3f}', fit)):
            z = z.where(known, torch.nan)
            panels.append(Map(title, 'key j', ylabel, z, 'logit', ends=ends))
        lines = [(name, range(len(y)), y, dict(lw=0.9)) for name, y in zip(names, parts)]
        panels.append(Curves('components of the fit', 'tokens', 'logit', lines[::-1]))
    return panels


# --------------------------------------------------------------------------------------------------
# section 3.1: three axes

def three_axes(W, ridge=1e-6):
    """Eq. 6: a, b, c [N, T] that minimize sum_{i >= j} (W_ij - a_{i-j} - b_i - c_j)^2 +
    ridge (|a|^2 + |b|^2 + |c|^2), and their sum [N, T, T]. (Eq. 7 swaps b and c of eq. 2.)"""
    T = W.shape[-1]
    t, lower = torch.arange(T), torch.ones(T, T, dtype=torch.float64).tril()
    W = W.double().masked_fill(lower == 0, 0)
    back = (t[:, None] - t).clamp(min=0)    # i - j, and also: column d of row t is key t - d
    diagonals = (W.gather(-1, back.expand_as(W)) * lower).sum(dim=-2)
    sums = torch.cat([diagonals, W.sum(dim=-1), W.sum(dim=-2)], dim=-1)    # (N, 3T)
    none, ab, ac = torch.zeros(T, T), lower.T, lower.flip(0)    # which d meets which i, which j
    blocks = (none, ab, ac), (ab.T, none, lower), (ac.T, lower.T, none)
    counts = torch.cat([T - t, t + 1, T - t]).double().diag()
    M = torch.cat([torch.cat(row, dim=1) for row in blocks]) + counts + ridge * torch.eye(3 * T)
    a, b, c = torch.cholesky_solve(sums.T, torch.linalg.cholesky(M)).T.chunk(3, dim=-1)
    return a, b, c, a[:, back] + b[:, :, None] + c[:, None]


def axes_fit(W):
    """[2, H]: r of logits W [H, T, T] with their three axes over i >= j; and row-centred."""
    lower = torch.ones_like(W[0], dtype=torch.bool).tril()
    maps = [x.double().masked_fill(~lower, 0) for x in (W, three_axes(W)[-1])]
    centred = [x - x.sum(dim=-1, keepdim=True) / lower.sum(dim=-1, keepdim=True) for x in maps]
    return torch.stack([correlation(*(x[:, lower] for x in pair)) for pair in (maps, centred)])


def axes(model, task, cfg, length=0, n=8):
    """Is a logit a sum over distance, query and key? W_ij ~ a_{i-j} + b_i + c_j.

    The position-generalization paper, section 3.1, eq. 2. length: of the problems or of the text,
    0: the longest trained on, of a text at most 512 tokens; n: sequences (of a Llama 1). Rows, for
    each head, or layer where there are many: Pearson's r of the logits over i >= j with the fit;
    `r_centred`: both less their rows' means, which softmax ignores. Noise scores sqrt(6 / T).
    """
    core.check_causal(cfg)
    rows = core.sequences(task, cfg.train_lengths, length, n)
    found = each_layer(model, rows, lambda layer: axes_fit(layer.logits[0]))
    r, centred = torch.stack(found).nanmean(dim=0).unbind(dim=1)    # (L, H)
    summary = dict(mean_r=number(r.nanmean()), mean_r_centred=number(centred.nanmean()),
                   tokens=rows[0].shape[1])
    layers = core.trace(model, rows[0])

    def maps(i, h):
        W = layers[i].logits[0, h]
        return W, *(x[0] for x in three_axes(W[None]))
    panels = fit_panels(r, maps, 'query i', ('a, distance i - j', 'b, query i', 'c, key j'))
    title = f'{PAPER} 2: {core.titled(cfg)}, logits over distance + query + key'
    return core.head_rows(dict(r=r, r_centred=centred)), summary, Figure(title, panels)


# --------------------------------------------------------------------------------------------------
# sections 3.2 and 3.3: distance and content, and the pairs that part them

def two_axes(W):
    """Eq. 12: W_dj ~ a_d + b_j of W [.., n, m] by least squares, split evenly: a, b, their sum."""
    half = W.mean(dim=(-2, -1), keepdim=True) / 2
    a, b = W.mean(dim=-1, keepdim=True) - half, W.mean(dim=-2, keepdim=True) - half
    return a.squeeze(-1), b.squeeze(-2), a + b


@torch.no_grad()
def fake_logits(layer, i):
    """W'_dj = w(d, q_i, k_j) [H, T, T] of query i and every key j, for the distances d = 0..T-1."""
    pos = torch.arange(layer.k.shape[2])
    q = layer.q[:, :, i:i + 1].expand_as(layer.k)
    return logits_at(layer, pos, torch.zeros_like(pos), q)[0].double()


def slow_dominating(zq, zk, theta, length, above=3):
    """(Mean product of norms, over the head's median; which pairs are slow and dominating) [.., n]
    of zq, zk [.., T, n]. The paper names no threshold; ours: more than 3 times the median, and
    turning by less than pi / 2 over the trained length."""
    product = zq.abs().mean(dim=-2) * zk.abs().mean(dim=-2)
    ratio = product / product.quantile(0.5, dim=-1, keepdim=True)
    return ratio, (ratio > above) & (theta * length < np.pi / 2)


def analytic(zq, zk, theta, slow):
    """f and g of eq. 15, g signed and g whole, and the logits themselves, of the slow pairs [H, n],
    for query i and key j [H, T, T].

    f = Re sum_r conj(q_r) kbar_r e^(-i (i-j) theta_r), with kbar's angle, as f is no function of k;
    g = sum_r |k_r - kbar_r| |q_r| cos(arg q_r - arg k_r), which has lost the sign of k - kbar. The
    signed g is what the part of k - kbar along kbar adds at distance 0, the whole g what all does.
    """
    t, kbar = torch.arange(zq.shape[1]), zk.mean(dim=1, keepdim=True)    # (H, 1, n)
    conj, rest = zq.conj() * slow[:, None], zk - kbar
    turn = torch.exp(1j * t[:, None] * theta)    # (T, n)
    f = ((conj * kbar) @ turn.conj().T).real    # (H, T, d)
    f = f.gather(-1, (t[:, None] - t).clamp(min=0).expand_as(f))
    along = (rest * kbar.sgn().conj()).real * kbar.sgn()
    g, signed, whole = ((conj @ z.mT).real for z in (rest.abs() * zk.sgn(), along, rest))
    return f, g, signed, whole, ((conj * turn.conj()) @ (zk * turn).mT).real


FITS = 'slow_fg', 'slow_signed', 'slow_whole', 'dominance', 'r_fg'
SWEEP = 'f + g', 'g signed', 'g whole', 'slow alone'    # FITS in the second table


def analytic_fit(W, zq, zk, theta, slow):
    """FITS [5, H], r over i >= j: the slow pairs' own logits with f + each g, and logits W
    [H, T, T] with the slow pairs' own and with f + g; nan where a head has no such pair."""
    f, *g, own = analytic(zq, zk, theta, slow)
    lower = torch.ones(W.shape[-2:], dtype=torch.bool).tril()
    acts = W[:len(slow)]    # it may act on some heads only
    pairs = *((own, f + z) for z in g), (acts, own), (acts, f + g[0])
    r = torch.stack([correlation(x[:, lower], y[:, lower]) for x, y in pairs])
    return F.pad(r.where(slow.any(dim=-1), torch.nan), (0, len(W) - len(slow)), value=torch.nan)


def disentangle(model, task, cfg, length=0, n=4, queries=8):
    """Does a query treat distance and content apart? W'_dj ~ a_d + b_j.

    The position-generalization paper, section 3.2, eq. 12, and appendix C, eq. 15. length, n: as
    for axes; queries: so many of each sequence, evenly spread. Rows, for each head or layer: `r` of
    W' with the fit, mean over queries. Of encodings that rotate, over i >= j, of heads that have
    slow dominating pairs: their own logits with f + g of eq. 15 (slow_fg), with g signed, with the
    whole of g; `dominance`: all logits with those pairs' own, 0 if these do not matter; all logits
    with f + g (r_fg), of all pairs (r_all). Second table, means over heads: pairs above other
    multiples of the median, slow over other lengths in tokens.
    """
    rows = core.sequences(task, cfg.train_lengths, length, n)
    check_distances(model, rows[0], cfg)
    trained, rotates = cfg.train_len, rotating(model.blocks[0].attn.pe)
    levels = [(0, 0), *((above, trained) for above in (1, 2, 3, 5, 10)),    # (0, 0): all pairs
              *((3, max(1, round(trained * x))) for x in (1 / 16, 1 / 4, 4))]

    def measure(layer):
        """[1, H], and FITS of every level if it rotates: [1 + 5 levels, H]."""
        T = layer.k.shape[2]
        fakes = (fake_logits(layer, i) for i in range(T - 1, -1, -max(1, T // queries))[:queries])
        r = [correlation(W.flatten(1), two_axes(W)[-1].flatten(1)) for W in fakes]
        parts = [torch.stack(r).nanmean(dim=0, keepdim=True)]
        if rotates:
            z = polar(layer.enc, layer.q[0], layer.k[0])
            for above, over in levels:
                slow = slow_dominating(*z, over, above)[1]
                parts.append(analytic_fit(layer.logits[0], *z, slow))
        return torch.cat(parts)
    found = torch.stack(each_layer(model, rows, measure)).nanmean(dim=0)
    columns, sweep = dict(r=found[:, 0]), []
    if rotates:
        fits = found[:, 1:].unflatten(1, (len(levels), len(FITS)))    # (L, levels, FITS, H)
        columns |= dict(zip(FITS, fits[:, levels.index((3, trained))].unbind(dim=1)))
        columns['r_all'] = fits[:, 0, FITS.index('r_fg')]
        for (above, over), fit in zip(levels, fits.unbind(dim=1)):
            means = {name: number(fit[:, i].nanmean()) for i, name in enumerate(SWEEP)}
            heads = (~fit[:, 0].isnan()).sum().item()
            sweep.append(dict(above=above, over=over, heads=heads) | means)
    tokens, layers = rows[0].shape[1], core.trace(model, rows[0])
    summary = {'mean_' + name: number(x.nanmean()) for name, x in columns.items()}

    def maps(i, h):
        W = fake_logits(layers[i], tokens // 2)[h]
        return W, *two_axes(W)
    panels = fit_panels(columns['r'], maps, 'fake distance d', ('a, distance d', 'b, key j'))
    title = f'{PAPER} 3: {core.titled(cfg)}, logits of query {tokens // 2} over distance + key'
    return core.head_rows(columns) + sweep, summary | dict(tokens=tokens), Figure(title, panels)


def tuples(model, task, cfg, length=0, n=4):
    """Which pairs of features turn slowly and dominate the logits? Observation 1.

    The position-generalization paper, section 3.3, Figure 4. length, n: as for axes. Rows: every
    slow dominating pair: wavelength in tokens; `ratio` of mean |q_r| mean |k_r| to the head's
    median pair; `rotation` over the trained length and mean start `angle` = arg q_r - arg k_r, in
    radians; `fixed` = mean |k_r - kbar_r| / |kbar_r|. Summary: the median of `fixed`; shares of the
    pairs: `turns_less_than_gap`, that is less than their angle's gap to pi, `by_chance` if angles
    were random; `near_pi`, with a gap below pi / 4, by chance 0.25, `near_pi_others` of all others.
    """
    z = each_layer(model, core.sequences(task, cfg.train_lengths, length, n),
                   lambda layer: torch.stack(polar(layer.enc, layer.q[0], layer.k[0])[:2]))
    zq, zk = torch.cat(z, dim=-2).unbind(dim=1)    # (L, H, T, n) of all sequences
    theta = frequencies_of(rotating(model.blocks[0].attn.pe), zq.real)
    ratio, slow = slow_dominating(zq, zk, theta, cfg.train_len)    # (L, H, n)
    kbar, theta = zk.mean(dim=-2), theta.expand_as(ratio)
    angle, turn = (zq.mean(dim=-2) * kbar.conj()).angle(), theta * cfg.train_len
    fixed = (zk - kbar[..., None, :]).abs().mean(dim=-2) / kbar.abs().clamp(min=1e-12)
    rows = [dict(layer=x[0] + 1, head=x[1] + 1, pair=x[2] + 1, ratio=number(ratio[x]),
                 wavelength=number(2 * np.pi / theta[x]), rotation=number(turn[x]),
                 angle=number(angle[x]), fixed=number(fixed[x]))
            for x in map(tuple, slow.nonzero().tolist())]
    rows.sort(key=lambda row: -row['ratio'])
    gap = np.pi - angle.abs()
    shares = dict(turns_less_than_gap=(turn < gap)[slow], by_chance=1 - turn[slow] / np.pi,
                  near_pi=gap[slow] < np.pi / 4, near_pi_others=gap[~slow] < np.pi / 4)
    summary = dict(pairs=len(rows), heads=slow.any(dim=-1).sum().item(),
                   of_heads=slow[..., 0].numel(), fixed=number(fixed[slow].median()))
    summary |= {name: number(x.double().mean()) for name, x in shares.items()}
    lines = [('slow dominating pairs', gap[slow], turn[slow], dict(ls='', marker='.')),
             ('rotation = gap', [0, np.pi], [0, np.pi], dict(color='0.6'))]
    panel = Curves('Observation 1', 'gap between the start angle and pi (radians)',
                   'rotation over the trained length (radians)', lines)
    return rows, summary, Figure(f'{PAPER} 4\n{core.titled(cfg)}', [panel])


# --------------------------------------------------------------------------------------------------
# section 4.1: disorder

KINDS = 'text', 'feature', 'position'


def transposition(T, gamma, l_max, source):
    """A permutation [T] that swaps disjoint pairs at most l_max apart, until about gamma T places
    have moved. The same source moves more for a larger gamma, and farther for a larger l_max."""
    swaps = int(gamma * T / 2 + torch.rand((), generator=source).item())
    side, order = torch.rand(T, generator=source).tolist(), list(range(T))
    for i in torch.randperm(T, generator=source).tolist():
        if swaps and order[i] == i:
            near = range(max(0, i - l_max), min(T, i + l_max + 1))
            free = [j for j in near if j != i and order[j] == j]
            if free:
                j = free[int(side[i] * len(free))]
                order[i], order[j] = j, i
                swaps -= 1
    return torch.tensor(order)


def offsets(T, gamma, l_max, source):
    """Integers [T]: with probability gamma one of -l_max..l_max but 0, else 0. The same source
    gives more of them for a larger gamma, and larger ones for a larger l_max."""
    chosen, size, sign = torch.rand(3, T, generator=source, dtype=torch.float64)
    return (chosen < gamma) * (1 + (size * l_max).long()) * (1 - 2 * (sign < 0.5).long())


@torch.no_grad()
def perturbed(model, tokens, targets, kind='text', gamma=0, l_max=1):
    """Losses [n, T], which tokens are right [n, T], outputs of the heads [n, L, H, T, D] and which
    tokens have moved [n, T]. Each sequence and layer has its own draw, the same for all levels."""
    pos, L, found = torch.arange(tokens.shape[1]), len(model.blocks), []
    draw = offsets if kind == 'position' else transposition

    def change(i, layer):
        if kind == 'position':
            return logits_at(layer, pos, pos + moves[i]) + causal(layer.logits)
        return layer.enc.logits(layer.q, layer.k[:, :, moves[i]], layer.pos, layer.state, layer.x)
    for i, (row, target) in enumerate(zip(tokens.split(1), targets.split(1))):
        sources = [train.generator('cpu', 'test', i * L + j) for j in range(L)]
        moves = [draw(len(pos), gamma, l_max, source) for source in sources]
        order = moves[0] if kind == 'text' else pos
        with core.recording(model, change if kind in ('feature', 'position') else None) as layers:
            logits = model(row[:, order])[0]
        losses, right = train.token_losses(logits, target), logits.argmax(dim=-1) == target
        y = torch.stack([layer.y[0] for layer in layers])
        found.append((losses[0].double(), right[0], y, order != pos))
    return [torch.stack(x) for x in zip(*found)]


def scores(after, before, targets):
    """Columns of perturb() for perturbed() sequences and their originals."""
    moved, row = after[-1], {}
    asked = (targets != -100) & ~F.pad(moved, (0, 1))[:, 1:]    # target t is token t + 1
    for when, (losses, right, *_) in (('', after), (' before', before)):
        row['loss' + when] = losses[asked].mean()
        row['token' + when] = right[asked].double().mean()
        row['exact' + when] = (right | ~asked).all(dim=1)[asked.any(dim=1)].double().mean()
    change = (after[2] - before[2]).norm(dim=(2, 4)) / before[2].norm(dim=(2, 4))    # (n, L, T)
    output = change.where(~moved[:, None], torch.nan).nanmean(dim=(1, 2)).nanmean()
    row |= dict(cost=row['loss'] - row['loss before'], output=output)
    return {key: number(x) for key, x in row.items()}


def perturb(model, task, cfg, length=0, n=0, gammas='0.001,0.01,0.05,0.1,0.5',
            l_max='5,10,100,1000'):
    """How much disorder of positions does a model bear?

    The position-generalization paper, section 4.1, Figure 5 and Table 1 (of a text next tokens, as
    a text has no questions). length: as for axes; n: 128 problems, or 16 stretches of text (of a
    Llama 2), unless given; l_max from the tokens' number on are left out. A share gamma of the
    positions moves within l_max in three ways. `text`: tokens change places in pairs; `feature`:
    keys do, in each layer others; `position`: a key counts as up to l_max places away, where
    attention sees distances. Rows: loss in nats per token, shares of tokens and sequences right and
    the same `before`, all on the targets that have not moved; `cost`: loss over that; `output`:
    |o' - o| / |o| of attention's outputs where tokens have not moved, mean over layers. Summary: of
    all targets, unperturbed.
    """
    sizes = core.numbers(l_max, 'l_max', '5,10')
    shares = core.numbers(gammas, 'gammas', '0.01,0.1', float)
    if not 0 < min(shares) <= max(shares) <= 1 or min(sizes) < 1:
        raise UserError('--gammas are shares above 0 and up to 1, --l_max whole numbers from 1 on')
    n = n or (16 if task.corpus else 128)
    _, tokens, targets = core.batch(task, cfg.train_lengths, length, n)
    sizes = [x for x in sizes if x < tokens.shape[1]] or [min(sizes)]
    kinds = KINDS if sees_distances(model, tokens) else KINDS[:2]
    before = perturbed(model, tokens, targets)
    original = scores(before, before, targets)
    summary = {key: original[key] for key in ('loss', 'token', 'exact')}
    rows = [dict(kind='original', gamma=None, l_max=None) | summary]
    for kind, gamma, size in itertools.product(kinds, shares, sizes):
        after = perturbed(model, tokens, targets, kind, gamma, size)
        rows.append(dict(kind=kind, gamma=gamma, l_max=size) | scores(after, before, targets))
    labels = dict(cost='loss over the original (nats)',
                  output="relative change of attention's outputs")
    panels = []
    for key, kind in itertools.product(labels, kinds):
        lines = []
        for size in sizes:
            y = [row[key] for row in rows if (row['kind'], row['l_max']) == (kind, size)]
            lines.append((f'within {size} tokens', shares, np.array(y, float), dict(marker='o')))
        panels.append(Curves(kind, 'share perturbed, gamma', labels[key], lines,
                             settings=dict(xscale='log')))
    title = f'{PAPER} 5: {core.titled(cfg)}, perturbed; without, loss {summary["loss"]}'
    return rows, summary, Figure(title, panels)


# --------------------------------------------------------------------------------------------------
# section 4.2: longer texts

LAYOUTS = 'as trained', 'clamped', 'LM-Infinite'


def sink(window):
    """How many first tokens a window keeps: the paper's 10, of a small window an eighth."""
    return max(1, min(10, window // 8))


def laid_out(layout, window):
    """For core.recording(): attention with distances laid out for a trained length `window`.

    clamped: at most the window; LM-Infinite: only the last window keys, and the first sink() tokens
    at distance window. InfLLM, which looks up distant keys by their content, is left out.
    """
    def change(i, layer):
        pos = torch.arange(layer.q.shape[2])
        far = logits_at(layer, torch.full_like(pos, window), torch.zeros_like(pos))
        if layout == 'LM-Infinite':
            far = far.where(pos < sink(window), -torch.inf)
        return torch.where(pos[:, None] - pos <= window, layer.logits, far)
    return None if layout == 'as trained' else change


@torch.no_grad()
def sliding(layer, t, start, window, first=0):
    """Outputs [queries, H out_dim] of queries t over `window` keys and values from `start` on, the
    first of them replaced by the sequence's first, as if the query stood at their end."""
    pos = torch.arange(window)
    keys = torch.where(pos < first, pos, pos + start)
    k, v = (x[:, :, keys].expand(len(t), -1, -1, -1) for x in (layer.k, layer.v))
    q = layer.q[0, :, t].transpose(0, 1)[:, :, None]
    weights = layer.enc.weigh(layer.enc.logits(q, k, pos, layer.state))
    return layer.enc.mix(weights, v, pos, layer.state)[:, :, 0].flatten(1)


def nearest(x, normal):
    """Distances [..] of points x [.., D] to the nearest of normal [N, D], over the median distance
    of a normal point to the nearest other."""
    apart = torch.cdist(normal, normal)
    apart[apart < 1e-4 * apart.max()] = torch.inf    # itself, or of another sequence that began so
    return torch.cdist(x, normal).amin(dim=-1) / apart.amin(dim=-1).median()


def outputs_of(model, tokens, i, window, queries):
    """(normal [N, H out_dim], {kind: points [.., H out_dim]}): outputs of attention in layer i."""
    T, found = tokens.shape[1], []
    t, step = torch.linspace(window, T - 1, queries).long(), max(1, (T - window) // 40)
    for row in tokens.split(1):
        layers = core.trace(model, row)
        here, before = (layers[x].y[0].transpose(0, 1).flatten(1) for x in (i, i - 1))
        kinds = {'normal': here[:window], 'later positions': here[window:]}
        for kind, first in (('windows', 0), ('windows with the first tokens', sink(window))):
            kinds[kind] = torch.cat([sliding(layers[i], t, start, window, first)
                                     for start in range(0, T - window + 1, step)])
        if len(layers) > 1:
            kinds['another layer'] = before[:window]
        found.append(kinds)
    found = {kind: torch.cat([kinds[kind] for kinds in found]).double() for kind in found[0]}
    normal, source = found.pop('normal'), torch.Generator().manual_seed(0)
    N, D = normal.shape
    found['features permuted'] = normal[:, torch.randperm(D, generator=source)]
    noise = torch.randn(N, N, generator=source, dtype=normal.dtype) / (N - 1) ** 0.5
    found['Gaussian'] = normal.mean(dim=0) + noise @ (normal - normal.mean(dim=0))
    return normal, found


def stretch(model, task, cfg, length=0, n=8, window=0, layer=0, queries=6):
    """What lets a model go beyond its trained length? Windows that slide along.

    The position-generalization paper, section 4.2, Figure 6. length: 0: the longest evaluated, of
    a text at most 512 tokens; n: problems, or stretches of text (of a Llama 2); window: tokens
    taken for the trained length, 0: that, or half of the sequence if that is less; layer: the one
    looked at, 0: the middle one. Rows: loss in nats by part of the sequence, for each layout of
    distances. Second table: attention's outputs of some queries over sliding windows, without and
    with the first tokens, of later positions, and controls: distance to the nearest output of the
    first window, 1 as typical among these. Summary: losses beyond the window, and the medians.
    """
    _, tokens, targets = core.batch(task, cfg.eval_lengths, length, n)
    T, L = tokens.shape[1], len(model.blocks)
    layer, window = layer or (L + 1) // 2, window or min(cfg.train_len, T // 2)
    if layer > L or not 1 < window < T:
        raise UserError(f'stretch: layer is from 1 to {L}, and window from 2 to {T - 1}, one less '
                        'than the tokens here')
    check_distances(model, tokens, cfg)
    curves = {}
    for layout in LAYOUTS:
        with core.recording(model, laid_out(layout, window)):
            curves[layout] = losses_by_position(model, tokens, targets)[:-1]

    def means(part):
        return {name: number(curve[part].nanmean()) for name, curve in curves.items()}
    rows = [dict(first=part[0].item() + 1, last=part[-1].item() + 1, **means(part))
            for part in torch.arange(T - 1).tensor_split(8) if len(part)]
    summary = means(slice(window, None)) | dict(window=window, tokens=T, layer=layer)
    normal, found = outputs_of(model, tokens, layer - 1, window, queries)
    lines = []
    for kind, x in found.items():
        apart = nearest(x, normal)
        summary[kind] = number(apart.quantile(0.5))
        rows.append(dict(outputs=kind, points=len(x), median=summary[kind]))
        lines.append((kind, np.linspace(0, 1, len(x)), apart.sort()[0], {}))
    panels = [
        Curves('loss', f'position; window of {window} tokens (red line)', 'loss (nats), smoothed',
               [smooth(*curve, T // 12) for curve in curves.items()], window),
        Curves(f'outputs of layer {layer}', 'share of the outputs',
               'distance to the nearest normal one', lines,
               settings=dict(yscale='log', ylim=(0.1, None)))]
    return rows, summary, Figure(f'{PAPER} 6: {core.titled(cfg)}, beyond {window} tokens', panels)


PROBES = [axes, disentangle, tuples, perturb, stretch]
LLAMA = {axes: 1, disentangle: 1, tuples: 1, perturb: 2, stretch: 2}
