"""The Toeplitz study: which heads an answer hangs on, how Toeplitz its logits are, and which head
the gradient of position reaches."""
import copy
import dataclasses

import numpy as np
import torch
import torch.nn.functional as F

import pe as encodings
import train
from engine import config
from engine.config import UserError
from probes import by_hand, core
from probes.core import Curves, Figure, Map, number


def ablate(model, task, cfg, what='heads', length=0, n=512):
    """Which heads, or which layer's position vectors, does the answer hang on?

    what=heads zeroes one head at a time (the Toeplitz study, section 4.3; Figures 4, 7, 9-12). A
    row for each layer: `drop 1`, `drop 2`, ... of exact match without that head, in points (where a
    run has 0: of the tokens right; of a corpus: rise of the loss, nats); `effective`: how many
    heads carry it, 1 with a large drop is the single-head deposit. what=positions (section 5.4,
    Figure 8) subtracts the vectors p that the encoding adds to the embeddings from the stream
    before each layer: score `without p`; `random`, `sd`: mean and deviation of the control, four
    draws of random vectors as long; `norm`: mean |p| over mean |x|. length 0: the longest trained.
    """
    config.check_name('what', what, ('heads', 'positions'))
    length, tokens, targets = core.batch(task, cfg.train_lengths, length, n)
    metric = 'loss' if task.corpus else 'exact'

    def score(*hooks):
        with core.hooked(*hooks):
            found = train.evaluate(model, task, {length: (tokens, targets)})[length][metric]
        return -found if task.corpus else 100 * found
    if not score():
        metric = 'token'
    unit = dict(loss='loss (nats)', exact='exact match (%)', token='tokens right (%)')[metric]
    base = score()
    summary = dict(length=length, n=len(tokens), unit=unit, base=round(abs(base), 4))
    if what == 'heads':
        rows, found, curves = without_heads(model, cfg, base, score)
        summary, figure, xlabel = summary | found, 'Figures 4, 7, 9-12', 'head that is zeroed'
    else:
        rows, curves = without_positions(model, cfg, tokens, score)
        figure, xlabel = 'Figure 8', 'p is taken out before layer'
    x = range(1, 1 + (cfg.heads if what == 'heads' else cfg.n_layer))
    look = dict(marker='o', ms=4, ls=':' if what == 'heads' else '-')    # heads have no order
    lines = [(label, x, y, look) for label, y in curves]
    lines.append(('nothing', x, [abs(base)] * len(x), dict(color='black', ls=':')))
    title = f'Toeplitz study, {figure}\n{core.titled(cfg)}, length {length}'
    return rows, summary, Figure(title, [Curves('', xlabel, unit, lines, None, dict(xticks=x))])


def effective(x):
    """How many numbers share the sum of x [.., H], those below 0 as 0: (sum)^2 / sum of squares."""
    return x.clamp(min=0).sum(dim=-1) ** 2 / x.clamp(min=0).square().sum(dim=-1)


def without_heads(model, cfg, base, score):
    """What is left without one head at a time, by zeroing it at tap_head_out:

    rows [{layer, 'drop 1', .., 'effective'}], one for each layer (counted from 1), as in ablate();
    summary {layer, head} of the largest drop, {largest, second} the two largest; curves
    [('layer 1', [score without head 1, ..]), ..]. base is the whole model's score; a drop is base
    - score(tap and hook). UserError that names --n_head if a layer has one head.
    """
    if cfg.heads == 1:
        raise UserError(f'ablate compares the heads of a layer, and {core.name_of(cfg)} has one: '
                        'train it with more, --n_head=4')

    def zeroing(head):
        return lambda module, _, y: y.index_fill(1, torch.tensor([head]), 0.0)

    scores = torch.tensor([[score((block.attn.tap_head_out, zeroing(head)))
                            for head in range(cfg.heads)] for block in model.blocks])
    drops, rows = base - scores, []
    for i, drop in enumerate(drops, 1):
        each = {f'drop {head}': number(x, 3) for head, x in enumerate(drop, 1)}
        rows.append(dict(layer=i) | each | dict(effective=number(effective(drop), 3)))
    layer, head = divmod(drops.argmax().item(), cfg.heads)
    largest, second = (number(x, 3) for x in drops.flatten().topk(2).values)
    summary = dict(layer=layer + 1, head=head + 1, largest=largest, second=second)
    return rows, summary, [(f'layer {i}', row.abs()) for i, row in enumerate(scores, 1)]


def without_positions(model, cfg, tokens, score):
    """(rows, [(label, curve)]) of ablate(), which takes p out of the stream."""
    p, g, rows = added_vectors(model, tokens.shape[1]), train.generator('cpu', 'test', 0), []
    if not p.any():
        raise UserError('--what=positions takes out the vectors that an encoding adds to the '
                        f'embeddings, and pe={cfg.pe} adds none: train pe=ape or pe=ape+{cfg.pe}')

    def subtracting(vectors):
        return lambda module, _, x: x - vectors[:x.shape[1]]

    size, taps = p.norm(dim=-1, keepdim=True), [x.tap_resid for x in (model, *model.blocks)]
    for layer, tap in zip(core.trace(model, tokens[:8]), taps):
        noise = F.normalize(torch.randn(4, *p.shape, generator=g, dtype=p.dtype), dim=-1)
        own, *random = [abs(score((tap, subtracting(x)))) for x in (p, *noise * size)]
        columns = {'without p': own, 'random': np.mean(random), 'sd': np.std(random),
                   'norm': size.mean() / layer.stream.norm(dim=-1).mean()}
        rows.append(dict(layer=len(rows) + 1) | {key: number(x, 3) for key, x in columns.items()})
    return rows, [(label, [row[key] for row in rows]) for label, key in (
        ('without p', 'without p'), ('without random vectors', 'random'))]


def added_vectors(model, T):
    """p_i [T, C], what the encoding adds to the embeddings; zeros if nothing."""
    zeros = torch.zeros_like(model.embedding.weight[:1]).expand(1, T, -1)
    return model.blocks[0].attn.pe.embed(zeros, torch.arange(T))[0].detach()


def diagonal_means(L):
    """Mean a_d [.., T] of L [.., T, T] along i - j = d >= 0."""
    T = L.shape[-1]
    i, j = torch.tril_indices(T, T)
    return L.new_zeros(L.shape[:-1]).index_add(-1, i - j, L[..., i, j]) / torch.arange(T, 0, -1)


def toeplitz_matrix(a):
    """T_ij = a_(i-j) [.., T, T] for i >= j, 0 above, of a [.., T]."""
    t = torch.arange(a.shape[-1])
    return a[..., (t[:, None] - t).clamp(min=0)].tril()


def variance_share(part, L):
    """cov(part, L) / var(L) over i >= j of [.., T, T]: what a part explains of L; all parts 1."""
    i, j = torch.tril_indices(*L.shape[-2:])
    part, L = (x[..., i, j] - x[..., i, j].mean(dim=-1, keepdim=True) for x in (part, L))
    return (part * L).sum(dim=-1) / L.square().sum(dim=-1)


def spectral_width(a):
    """Largest less least eigenvalue of the Hermitian matrix with a_d [.., T] on i - j = d >= 0."""
    values = torch.linalg.eigvalsh(toeplitz_matrix(a))    # reads the lower triangle alone
    return values[..., -1] - values[..., 0]


def grams(q, k, turn):
    """Eq. 2 as it is exact: (sum_m G^(m) o T^(m), whose real part is RoPE's logit, sum_m G^(m)).

    Pairs of features of q, k [B, H, T, D] are complex numbers: G^(m)_ij = q_i^(m) conj(k_j^(m)), of
    each frequency, is a Gram matrix; T^(m)_ij = u_i conj(u_j), u = turn [H, T, D/2], Toeplitz.
    """
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    return (q * turn) @ (k * turn).mH, q @ k.mH


def single_factor(L, G):
    """The share of the variance of L [B, H, T, T] that Re(G o a) with the best Toeplitz factor a
    misses: {name: [H]}; see toeplitz()."""
    x = torch.stack([G.real, -G.imag])    # Re(G a) = x_0 Re a + x_1 Im a
    S = diagonal_means(x[:, None] * x).mean(dim=2).permute(2, 3, 0, 1)    # (H, T, 2, 2)
    b = diagonal_means(x * L).mean(dim=1).permute(1, 2, 0)[..., None]     # (H, T, 2, 1)
    square, T = diagonal_means(L * L).mean(dim=0)[..., None], L.shape[-1]
    sizes = torch.arange(T, 0, -1, dtype=L.dtype) * 2 / (T * T + T)
    variance = square[..., 0] @ sizes - (diagonal_means(L).mean(dim=0) @ sizes) ** 2

    def missed(a):    # at best, with each a_d one of those in a [.., 2, points]
        error = square - 2 * (b * a).sum(dim=-2) + (a * (S @ a)).sum(dim=-2)
        return error.amin(dim=-1) @ sizes / variance
    angle = torch.linspace(0, 2 * torch.pi, 721, dtype=L.dtype)
    circle, one = torch.stack([angle.cos(), angle.sin()]), L.new_tensor([[1], [0]])
    mixed = torch.stack([missed(alpha * circle + one) for alpha in np.linspace(0, 4, 41)])
    return {'G_e off': missed(circle), 'free G_e off': missed(torch.linalg.pinv(S) @ b),
            'eq. 4 off': mixed.amin(dim=0)}


def eq_1(layer, norm, p, at):
    """Eq. 1's terms {name: [.., H, T, T]} of a layer's logits, x = content + p before the norm,
    whose scale is held at that of x, so that it is linear."""
    enc, x = layer.enc, layer.stream
    if isinstance(norm, torch.nn.LayerNorm):
        x, p = (z - z.mean(dim=-1, keepdim=True) for z in (x, p))
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    p = p * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * norm.weight
    (qc, kc), (qp, kp) = (enc.qk(*core.project(layer.attn, z)[:2], at) for z in (layer.x - p, p))
    terms = {'qc kc': qc @ kc.mT, 'qc kp': qc @ kp.mT, 'qp kc': qp @ kc.mT, 'qp kp': qp @ kp.mT}
    terms, bias = {name: x * enc.scale for name, x in terms.items() if x.any()}, enc.bias(at)
    return terms if bias is None else terms | {'B': bias}


def logit_shares(layer, norm, p):
    """{column of toeplitz(): [H]} of a layer."""
    enc, q, k, parts = layer.enc, layer.q, layer.k, tuple(layer.enc.modules())
    L = layer.logits.masked_fill(layer.logits.isinf(), 0)
    at = enc.at(L.shape[-1], layer.pos, layer.state, layer.x)
    content, whole, terms, equations, found = q @ k.mT * enc.scale, L, {}, {}, {}
    if not any(isinstance(x, (encodings.PoPE, encodings.ViPE, encodings.PRISM)) for x in parts):
        terms = eq_1(layer, norm, p, at)    # the others are not linear in q and k
        equations['error of eq. 1'] = sum(terms.values())
    if terms and any(isinstance(x, encodings.RoPE) for x in parts):
        ones = torch.zeros_like(q[:1])
        ones[..., ::2] = 1    # by what the encoding turns it, it turns every pair
        turn = torch.view_as_complex(enc.qk(ones, ones, at)[0][0].unflatten(-1, (-1, 2)))
        whole, content = (z * enc.scale for z in grams(q, k, turn))
        found = single_factor(whole.real, content)
        whole = whole + terms.get('B', 0)
        equations['error of eq. 2'] = whole.real
    for name, x in equations.items():
        found[name] = (x - L).tril().abs().amax(dim=(0, 2, 3)) / L.abs().max()
    width = [spectral_width(diagonal_means(z).mean(dim=0)) for z in (whole, content)]
    parts = dict(toeplitz=toeplitz_matrix(diagonal_means(L))) | terms
    shares = {name: variance_share(x.expand_as(L), L).mean(dim=0) for name, x in parts.items()}
    if 'qp kp' in terms:
        part = toeplitz_matrix(diagonal_means(terms['qp kp']))
        shares['qp kp toeplitz'] = variance_share(part, terms['qp kp']).mean(dim=0)
    return shares | found | dict(spectrum=width[0] / width[1])


@torch.no_grad()
def toeplitz(model, task, cfg, length=0, n=8):
    """Do logits depend on the distance alone, on content, or on both?

    The Toeplitz study, section 3.2, appendix B, in float64. For each head, of the variance of the
    logits over i >= j, what a part explains. `toeplitz`: the means along the diagonals (`chance`:
    of white noise's); `qc kc`, `qc kp`, `qp kc`, `qp kp`, `B`: eq. 1's terms, 1 together, p the
    vectors that the encoding adds; `qp kp toeplitz`: the diagonals' means of that term alone
    (Assumption 3.2: 1). With RoPE, what eq. 2 misses: `G_e off`: with the best entries
    of modulus 1 (above 1: worse than a constant); `free G_e off`: with any; of latent attention
    `eq. 4 off`: with the best alpha G_e + 1. `spectrum`: width of the spectrum of the logits'
    Toeplitz part over the content's (B.3 says RoPE narrows it; nothing encoded: 1). Summary: means,
    spectrum's as `ratio`; errors of eq. 1, and of eq. 2 with a factor for each frequency, of the
    largest logit. length 0: the longest trained.
    """
    core.check_causal(cfg)
    core.check_alike(cfg)
    length, tokens, _ = core.batch(task, cfg.train_lengths, length, n)
    T = tokens.shape[1]
    tokens, = core.fewer(cfg, tokens, limit=2 ** 23 * cfg.n_layer)
    net = copy.deepcopy(model).double()
    layers, p = core.trace(net, tokens), added_vectors(net, T)
    found = [logit_shares(layer, block.norm_1, p) for layer, block in zip(layers, net.blocks)]
    columns = {name: torch.stack([shares[name] for shares in found]) for name in found[0]}
    if cfg.attention != 'mla':
        columns.pop('eq. 4 off', None)
    errors = {name: columns.pop(name).max().item() for name in found[0] if 'error' in name}
    means = {name: number(x[x.isfinite()].mean()) for name, x in columns.items()}
    chance = (T - 1) / (T * (T + 1) / 2 - 1)
    summary = dict(length=length, n=len(tokens), tokens=T, chance=round(chance, 4)) | means | errors
    summary['ratio'] = summary.pop('spectrum')

    layer, head = divmod(columns['toeplitz'].nan_to_num(-1).argmax().item(), cfg.heads)
    logits, words = layers[layer].logits[0, head], [task.vocab[t] for t in tokens[0]]
    parts = {'logits': logits, 'Toeplitz part': toeplitz_matrix(diagonal_means(logits))}
    titles = {'toeplitz': 'Toeplitz part', 'qp kp': 'eq. 1: position, position',
              'B': 'eq. 1: bias', 'G_e off': 'eq. 2: missed with one $G_e$'}
    panels = [core.Heads(title, columns[name], 'share of variance')
              for name, title in titles.items() if name in columns]
    ends = logits[~logits.isinf()].aminmax()
    panels += [Map(f'head {layer + 1}.{head + 1}: {what}', 'key', 'query',
                   x.masked_fill(logits.isinf(), torch.nan), 'logit', words, ends)
               for what, x in parts.items()]
    title = f'Toeplitz study, section 3.2: {core.titled(cfg)}, length {length}'
    return core.head_rows(columns), summary, Figure(title, panels)


def edges(task, tokens):
    """Anchors (b, u, j, d), all [E]: from row u of problem b to column j, with the label d. Of a
    task with two triggers from the token that reads the class to the later one, d: their distance.
    Of others every edge, d = u - j."""
    B, T = tokens.shape
    if getattr(task, 'triggers', 0) != 2:
        b, u, j = torch.ones(B, T, T).tril().nonzero().unbind(dim=1)
        return b, u, j, u - j
    first = task.first_trigger
    places = ((tokens >= first) & (tokens < first + 2)).nonzero()[:, 1]
    i, j = places.view(B, 2).unbind(dim=1)
    return torch.arange(B), torch.full_like(j, T - 2), j, j - i


def jacobians(model, tokens, targets):
    """J^(l) [L, B, C, C]: of the stream behind each block by that before it, both at the last
    supervised token. The whole sequence's is block triangular; its singular values spread at least
    as far."""
    b = torch.arange(len(tokens))
    last = ((targets != -100) * torch.arange(tokens.shape[1])).argmax(dim=1)
    with core.recording(model) as layers:
        model(tokens)
    return torch.stack([torch.stack([
        torch.autograd.grad(x.sum(), layer.stream, retain_graph=True)[0][b, last]
        for x in layer.after[b, last].unbind(dim=1)], dim=1) for layer in layers])


def signal_to_noise(g, edge, positive):
    """Eq. 14 for dl/d(stream) [L, B, T, C] before each layer: (|P_U g| / |g - P_U g| [L], the same
    of a random subspace of U's dimension, the control).

    U: the span of the top layer's mean gradients in the rows of edges with label d, for each d with
    positive[d], their C/4 main directions at most. U is of even problems, g of odd ones.
    """
    L, B, T, C = g.shape
    b, u, _, d = edge
    weight = g.new_zeros(T, B * T).index_put((d, b * T + u), g.new_ones(()), accumulate=True)
    even, g = torch.arange(B * T) // T % 2 == 0, g.flatten(1, 2)
    _, size, directions = torch.linalg.svd(weight[positive][:, even] @ g[-1, even])
    dim = min((size > 1e-9 * size.sum()).sum().item(), max(1, C // 4))
    noise = torch.randn(C, dim, generator=train.generator('cpu', 'test', 0), dtype=g.dtype)
    g, ratios = g[:, weight.any(dim=0) & ~even], []    # (L, rows, C)
    for U in (directions[:dim].T, torch.linalg.qr(noise).Q):
        inside, whole = (x.square().sum(dim=(1, 2)) for x in (g @ U, g))
        ratios.append((inside / (whole - inside)).sqrt())
    return ratios


def by_layer(model, tokens, targets, edge):
    """(rows, H [L, H, T], A2's share) of gradients() for a model."""
    net = copy.deepcopy(model).double().eval()
    with core.recording(net, change=lambda i, layer: None) as layers:
        loss = train.token_losses(net(tokens)[0], targets).sum()
    dS, dY, dx = zip(*(torch.autograd.grad(loss, (x.logits, x.y, x.stream), retain_graph=True)
                       for x in layers))
    b, u, j, d = edge
    H = torch.stack([x.new_zeros(x.shape[1], x.shape[2]).index_add(1, d, x[b, :, u, j].T)
                     for x in dS])
    (first, second), (head, _) = (x.unbind(dim=1) for x in H.norm(dim=-1).topk(2))
    snr, random = signal_to_noise(torch.stack(dx), edge, H[-1, head[-1]] > 0)
    s = torch.linalg.svdvals(jacobians(net, tokens[:4], targets[:4])).flatten(1)
    A, V, Y = (getattr(layers[-1], name).detach() for name in ('weights', 'v', 'y'))
    A2 = torch.nan    # where the encoding changes values or outputs
    if V.shape == Y.shape and torch.allclose(A @ V, Y):
        A2 = ((dY[-1][b, :, u] * V[b, :, j]).sum(dim=-1) > 0).double().mean().item()
    margin, rows = first - second, []
    growth, gain = (F.pad(x[:-1] / x[1:], (0, 1), value=torch.nan) for x in (margin, snr))
    columns = dict(head=head + 1, first=first, margin=margin, growth=growth,
                   effective=effective(H.norm(dim=-1)), least=s.amin(dim=1), most=s.amax(dim=1),
                   snr=snr, gain=gain, random=random)
    for i in range(len(layers)):
        known = {key: x[i].item() if x[i].isfinite() else None for key, x in columns.items()}
        rows.append(dict(layer=i + 1) | core.short(known))
    return rows, H, A2


def gradients(model, task, cfg, length=0, n=256, steps=-1):
    """Does one head collect the gradient of position, more so the lower the layer?

    The Toeplitz study, section 6, appendix C. H(d): gradient of the summed loss by a head's logits,
    over the edges() with label d of n held-out problems (length 0: the longest trained), before
    training, in a repetition of the run's first `steps` steps (-1: 200, or all if it had fewer),
    and in the saved model. For each layer: strongest `head` by |H|, its |H| `first`, its `margin`
    over the next; `growth`: over the layer above's margin (Theorem 6.1: above 1);
    `effective`: how many heads share |H|; `least`, `most`: singular values of jacobians(); `snr`,
    control `random`: see signal_to_noise(); `gain`: over the layer above (above 1). Summary: `A1`:
    the share of J^(l) with singular values within 0 and 2; `A2`: of edges with Lambda > 0 in the
    top layer (1; a coin: 0.5); median of gain; `grows`: share of growth above 1. H below the top
    layer is ours.
    """
    if core.name_of(cfg) == by_hand.NAME:
        raise UserError('gradients follows a training, and by_hand never had one: take a run')
    if cfg.heads == 1:
        raise UserError('gradients compares the heads of a layer, and this run has one: train it '
                        'with more, --n_head=4')
    if steps < 0:
        steps = min(200, cfg.max_steps)
    if steps > cfg.max_steps:
        raise UserError(f'--steps={steps}: this run had {cfg.max_steps}, take as many or fewer')
    length, tokens, targets = core.batch(task, cfg.train_lengths, length, n)
    tokens, targets = core.fewer(cfg, tokens, targets, limit=2 ** 23 * cfg.n_layer)
    edge = edges(task, tokens)
    again = dataclasses.replace(cfg, seeds=cfg.seeds[:1], device='cpu', compile=False, graph=False)
    group, found = train.make_group(again, torch.device('cpu')), {}
    for step in range(steps + 1):
        if step in {round(steps * i / 4) for i in range(5)}:
            found[step] = by_layer(group.models[0], tokens, targets, edge)
        if step < steps:
            group.step(step)
    found['trained'] = by_layer(model, tokens, targets, edge)

    rows = [dict(step=step) | row for step, (some, *_) in found.items() for row in some]
    growth, gain = (torch.tensor([row[key] for row in rows if row[key] is not None])
                    for key in ('growth', 'gain'))
    fits = [0 < row['least'] and row['most'] < 2 for row in rows]
    A2 = torch.tensor([A2 for _, _, A2 in found.values()]).nanmean()
    summary = dict(length=length, n=len(tokens), A1=number(np.mean(fits)), A2=number(A2),
                   gain=number(gain.median()), grows=number((growth > 1).double().mean()))

    panels, ticks = [], dict(xticks=range(len(found)), xticklabels=list(found))
    titles = dict(margin='Theorem 6.1: margin of |H|', effective='how many heads share |H|',
                  snr='eq. 14: signal to noise', most='A1: largest singular value of J')
    for key, title in titles.items():
        lines = [(f'layer {i + 1}', range(len(found)), [row[key] for row in rows[i::cfg.n_layer]],
                  dict(marker='o', ms=4)) for i in range(cfg.n_layer)]
        scale = dict(yscale='linear' if key == 'effective' else 'log')
        panels.append(Curves(title, 'training step', key, lines, settings=ticks | scale))
    title = f'Toeplitz study, section 6: {core.titled(cfg)}, length {length}'
    return rows, summary, Figure(title, panels)


PROBES = [ablate, toeplitz, gradients]
