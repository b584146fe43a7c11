"""PoPE's probes: loss beyond the trained context, norms at each frequency, preferred distances."""
import os

import numpy as np
import torch
import torch.nn.functional as F

import pe as encodings
import train
from engine.config import UserError
from probes import core
from probes.core import number

# --------------------------------------------------------------------------------------------------
# PoPE Figure 2, position by position

@torch.no_grad()
def losses_by_position(model, tokens, targets):
    """Mean cross-entropy [T], in nats, of what each position predicts; nan where nothing is."""
    total, count = torch.zeros(2, tokens.shape[1], dtype=torch.float64)
    many = max(1, 2 ** 13 // tokens.shape[1])
    for x, y in zip(tokens.split(many), targets.split(many)):
        total += train.token_losses(model(x)[0], y).sum(dim=0)
        count += (y != -100).sum(dim=0)
    return total / count


def smooth(label, curve, window, **look):
    """A loss by position as a line, averaged over a window; nan is left out."""
    at = (~curve.isnan()).nonzero()[:, 0]
    window = max(1, min(window, len(at)))
    x, y = (F.avg_pool1d(z[None, None], window, 1)[0, 0] for z in (at.double() + 1, curve[at]))
    return label, x.numpy(), y.numpy(), look if len(x) > 1 else look | dict(marker='o')


def besides(model, cfg, beside):
    """{name: model} of a run and of those in --beside, a comma list of runs of its task."""
    runs = {core.name_of(cfg): model}
    parts = beside.split(',') if beside else []
    while parts:
        n = len(parts)
        while n > 1 and not os.path.isdir(','.join(parts[:n])):    # a sweep's folders have commas
            n -= 1
        path, parts = ','.join(parts[:n]), parts[n:]
        net, other = core.load(path)
        if other.the_task is not cfg.the_task:
            raise UserError(f'{path} was trained on {other.task}, this run on {cfg.task}: take '
                            'runs of one task and one text')
        runs[path if core.name_of(other) in runs else core.name_of(other)] = net
    return runs


def loss(model, task, cfg, length=0, n=32, beside=''):
    """Where does far context help, and where does a model break? Loss by position.

    After PoPE Figure 2, in contexts longer than trained ones. length: of the context, 0: the
    longest of eval_lengths; n: stretches of held-out text; beside: further runs, a comma list, on
    the same text. Rows: mean loss in nats per token over 16 parts of the context.
    """
    length = length or max(cfg.eval_lengths)
    tokens, targets = core.problems(task, [length], n)[length]
    curves = {name: losses_by_position(net, tokens, targets)[:-1]
              for name, net in besides(model, cfg, beside).items()}
    trained, T = cfg.train_len, tokens.shape[1]
    rows, summary = [], dict(length=length)
    for part in torch.arange(T - 1).tensor_split(min(16, T - 1)):
        means = {name: number(curve[part].nanmean()) for name, curve in curves.items()}
        if any(x is not None for x in means.values()):
            rows.append(dict(first=part[0].item() + 1, last=part[-1].item() + 1) | means)
    for name, curve in curves.items():
        summary[f'{name}, trained positions'] = number(curve[:trained - 1].nanmean())
        summary[f'{name}, beyond'] = number(curve[trained - 1:].nanmean())
    lines = [smooth(name, curve, len(curve) // 32) for name, curve in curves.items()]
    mark = trained if trained < T else None
    panel = core.Curves('', core.axis('position in the context', cfg, mark),
                        'loss (nats per token), smoothed', lines, mark)
    return rows, summary, core.Figure(f'PoPE Figure 2: {cfg.task}, loss by position', [panel])


# --------------------------------------------------------------------------------------------------
# PoPE Figures 3 to 6: what turns at each frequency

def rotating(enc):
    """The RoPE or PoPE in an encoding; None if there is none."""
    parts = (m for m in enc.modules() if isinstance(m, (encodings.RoPE, encodings.PoPE)))
    return next(parts, None)


def frequencies_of(part, like):
    """theta [n] of a RoPE or PoPE, in radians per token."""
    if isinstance(part, encodings.PoPE):
        return part.theta(like)
    if hasattr(part, 'theta'):    # a checkpoint's own
        return part.theta
    return encodings.frequencies(part.cfg.head_dim // 2, part.cfg.rope_base, like)


@torch.no_grad()
def polar(enc, q, k):
    """What an encoding rotates, as complex numbers zq, zk [H, T, n], and the frequencies theta [n].

    RoPE's n = D/2 pairs, PoPE's n = D magnitudes, with its phases delta in zk. A logit is
    Re sum_c conj(zq_tc) zk_sc e^(-i (t-s) theta_c) / sqrt(d), and whatever other encodings add. q,
    k [H, T, D] before it. Only the heads, and of mla the half of the features, that it acts on.
    """
    part = rotating(enc)
    if part is None:
        raise UserError('this probe is about the frequencies of RoPE and PoPE, and '
                        f'pe={enc.cfg.pe} has none: take one with rope or pope')
    theta, c = frequencies_of(part, q), part.cfg
    if isinstance(part, encodings.YaRN) and q.shape[1] > c.train_len:
        raise UserError(f'yarn turns otherwise beyond the {c.train_len} tokens that it was trained '
                        'on: take a --length that stays within')
    q, k = (x[:c.heads, :, -c.head_dim:].contiguous() for x in (q, k))
    if isinstance(part, encodings.PoPE):
        mu_q, mu_k = (F.softplus(q), F.softplus(k)) if c.pope_softplus else (q, k)
        phases = part.phases()[:, None].expand_as(mu_k)
        return mu_q + 0j, torch.polar(torch.ones_like(mu_k), phases) * mu_k, theta
    return *(torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (q, k)), theta


def activation_norms(layer):
    """Mean norms [2, H, n], in a layer's queries and keys, of what turns at each frequency; of each
    feature where nothing turns."""
    pair = layer.q[0], layer.k[0]
    if rotating(layer.enc):
        pair = polar(layer.enc, *pair)[:2]
    return torch.stack(pair).abs().mean(dim=2)


@torch.no_grad()
def weight_norms(attn):
    """Norms [2, H, n] of the rows of W_Q and W_K that make what turns at each frequency, or each
    feature; a pair of RoPE counts as sqrt(|row|^2 + |row'|^2)."""
    weight = attn.proj.weight
    ends = F.pad(torch.eye(len(weight), dtype=weight.dtype), (0, 0, 0, 1))[None]
    # what the last row of `ends` gives is the bias
    norms = torch.stack([(x[0, :, :-1] - x[0, :, -1:]).norm(dim=1)
                         for x in core.project(attn, ends)[:2]])
    part = rotating(attn.pe)
    norms = norms[:, :part.cfg.heads, -part.cfg.head_dim:] if part else norms
    pairs = isinstance(part, encodings.RoPE)
    return norms.unflatten(-1, (-1, 2)).norm(dim=-1) if pairs else norms


def frequencies_used(norms, wavelength):
    """(rows, summary) of norms() for activations; norms [L, 2, H, n]."""
    n = norms.shape[-1]
    mean, top = norms.mean(dim=(0, 2)), norms.amax(dim=(0, 2))    # (2, n)
    rows = [dict(number=c + 1, wavelength=number(wavelength[c], 1),
                 q=number(mean[0, c]), k=number(mean[1, c]),
                 largest_q=number(top[0, c]), largest_k=number(top[1, c])) for c in range(n)]
    share = norms / norms.sum(dim=-1, keepdim=True)
    used = torch.special.entr(share).sum(dim=-1).exp() / n
    fast = share[..., :n // 2].sum(dim=-1) + 0 * wavelength[0]    # nan where nothing turns
    return rows, dict(used=number(used.mean()), fast=number(fast.mean()),
                      fast_after_first=number(fast[1:].mean()), frequencies=n)


def largest_weights(norms, wavelength):
    """(rows, summary) of norms() for weights; norms [L, 2, H, n]."""
    ratio, at = norms.amax(dim=-1) / norms.quantile(0.5, dim=-1), norms.argmax(dim=-1)  # (L, 2, H)
    columns = dict(ratio_q=ratio[:, 0], wavelength_q=wavelength[at[:, 0]],
                   ratio_k=ratio[:, 1], wavelength_k=wavelength[at[:, 1]])
    slow = (at >= norms.shape[-1] // 2).double() + 0 * wavelength[0]
    return core.head_rows(columns), dict(
        ratio_q=number(ratio[:, 0].mean()), ratio_k=number(ratio[:, 1].mean()),
        slow=number(slow.mean()))


def norms(model, task, cfg, of='activations', length=0, n=8):
    """Which frequencies do queries and keys use, and are there massive values?

    PoPE Figures 3 to 6; the Toeplitz study, appendix B.2. An encoding that rotates nothing has
    features in place of frequencies, and no wavelengths. length, n: sequences as for axes.
    of=activations: norm of what turns at each frequency, fast to slow. Rows: wavelength in tokens,
    mean over layers and heads of queries (q) and keys (k), and the largest of a head. Summary:
    `used`, exp(entropy of the norms' shares) / number of frequencies, 1 where all are used alike;
    `fast`, the share of the norm in the faster half; `fast_after_first`, without layer 1.
    of=weights: norms of the rows of W_Q and W_K; needs no text. Rows, for each head or layer: the
    largest over the median, and the wavelength of the largest. Summary: means; `slow`, share of
    heads whose largest lies in the slower half, by chance 0.5.
    """
    core.check_alike(cfg)
    if of == 'weights':
        what, table = 'norm of the rows of W_Q, W_K', largest_weights
        found = torch.stack([weight_norms(block.attn) for block in model.blocks])
    elif of == 'activations':
        what, table = 'mean norm', frequencies_used
        found = torch.stack([
            torch.stack([activation_norms(layer) for layer in core.trace(model, row)])
            for row in core.sequences(task, cfg.train_lengths, length, n)]).mean(dim=0)
    else:
        raise UserError(f'--of={of}: activations or weights')
    part = rotating(model.blocks[0].attn.pe)
    L, _, H, count = found.shape
    theta = frequencies_of(part, found[0, 0, 0, 0]) if part else torch.full((count,), torch.nan)
    waves = 2 * np.pi / theta
    rows, summary = table(found, waves)
    ticks = range(0, count, 1 + count // 12)
    labels = [f'{waves[i]:,.1f}' if part else i + 1 for i in ticks]
    panels = [core.Map(name, 'layer' + ', and within it head' * (H > 1),
                       'wavelength (tokens), fast to slow' if part else 'feature',
                       x.reshape(L * H, count).T, what, ends=(found.min(), found.max()),
                       extent=(0.5, L + 0.5, count - 0.5, -0.5),
                       settings=dict(xticks=range(1, L + 1, 1 + L // 12), yticks=ticks,
                                     yticklabels=labels))
              for name, x in zip(('queries', 'keys'), found.unbind(dim=1))]
    title = f'PoPE Figures 3 to 6: {core.titled(cfg)}, {what} at each ' + (
        'frequency' if part else 'feature')
    return rows, summary, core.Figure(title, panels)


@torch.no_grad()
def tuning_curves(model, row, length, contents):
    """[layers, contents, heads, length]: logits by distance of a query and a key drawn from what
    stands in row [1, T]. Where positions are added to the embedding, of layer 1 only, for the
    query's and the key's token."""
    source, pos = torch.Generator().manual_seed(0), torch.arange(length)
    pairs = torch.randint(row.shape[1], (contents, 2), generator=source).tolist()
    first = model.blocks[0].attn.pe
    zeros = torch.zeros(1, length, model.cfg.d_model)
    state, layers = first.state(zeros, pos), core.trace(model, row)

    def everywhere(x, i):
        """What stands at i in x [1, H, T, D], at every position."""
        return x[:, :, i:i + 1].expand(-1, -1, length, -1).contiguous()

    def token_everywhere(i):
        """Queries, keys and values of layer 1 for the token at i, at every position."""
        x = model.embedding(row)[:, i:i + 1].expand(1, length, -1)
        return core.project(model.blocks[0].attn, model.blocks[0].norm_1(first.embed(x, pos)))

    if first.embed(zeros, pos).any():    # positions are added to the embeddings
        layers = layers[:1]
        content = [[(token_everywhere(t)[0], token_everywhere(s)[1]) for t, s in pairs]]
    else:
        content = [[(everywhere(layer.q, t), everywhere(layer.k, s)) for t, s in pairs]
                   for layer in layers]
    return torch.stack([
        torch.stack([layer.enc.logits(q, k, pos, state)[0, :, -1].flip(-1) for q, k in each])
        for layer, each in zip(layers, content)])


def tuning(model, task, cfg, length=0, contents=24):
    """At which distance does a query like a key best? Logits by distance for fixed content.

    PoPE eq. 2 and 6, for any encoding. length: distances 0..length-1, 0: twice the longest total
    length trained on, at most 512; contents: pairs of a query and a key drawn from a held-out
    sequence. With positions added to the embedding: of layer 1. Rows, for each head or layer:
    `range`, largest minus smallest mean logit over the distances; `peak`, the median preferred
    distance; `shift`, the spread (interquartile range, tokens) of the preferred distance over
    contents, which PoPE's phases keep small and RoPE's confound does not; shares of the logits'
    variance: `where` by distance, `what` by content, `both` by neither alone.
    """
    core.check_causal(cfg)
    if any(getattr(m, 'reads_content', False) for m in model.modules()):
        raise UserError(f'tuning asks for a logit at any distance, and the positions of {cfg.pe} '
                        'come from the content: see the probe cursor')
    length = length or min(512, 2 * cfg.train_len)
    if length < 2:
        raise UserError('--length=1: tuning compares distances, so take 2 or more')
    row, = core.sequences(task, cfg.train_lengths, 0, 1)
    try:
        curves = tuning_curves(model, row, length, contents).double()    # (L, N, H, d)
    except encodings.InputMissing:
        raise UserError('tuning puts queries and keys where they were not, and what a layer of '
                        f'{cfg.pe} reads besides is not known there: take rope') from None
    largest = (curves.amax(dim=-1) - curves.amin(dim=-1)).max()
    if largest <= 1e-5 * curves.abs().max():
        raise UserError(f'tuning wants logits that see distances, and those of {core.titled(cfg)} '
                        'do not: take rope, pope or alibi')
    where, what = curves.mean(dim=1, keepdim=True), curves.mean(dim=3, keepdim=True)
    mean = curves.mean(dim=(1, 3), keepdim=True)
    total = (curves - mean).square().mean(dim=(1, 3)).clamp(min=1e-20)
    parts = dict(where=where - mean, what=what - mean, both=curves - where - what + mean)
    quartiles = torch.tensor([0.25, 0.5, 0.75]).double()
    low, peak, high = curves.argmax(dim=-1).double().quantile(quartiles, dim=1)    # (L, H)
    columns = dict(range=(where.amax(dim=-1) - where.amin(dim=-1))[:, 0], peak=peak,
                   shift=high - low)
    columns |= {name: part.square().mean(dim=(1, 3)) / total for name, part in parts.items()}
    summary = {key: number(x.mean()) for key, x in columns.items()} | dict(distances=length)
    mark, panels = cfg.train_len if cfg.train_len < length else None, []
    for x in columns['range'].flatten().argsort(descending=True)[:6].tolist():
        i, h = divmod(x, curves.shape[2])
        lines = [('' if j else 'one query and key (dot: its largest)', range(length), curve,
                  dict(color=core.QUERY, alpha=0.3, lw=0.8, marker='o', ms=4,
                       markevery=[curve.argmax().item()]))
                 for j, curve in enumerate(curves[i, :8, h])]
        lines.append(('mean of all', range(length), where[i, 0, h], dict(color=core.KEY)))
        panels.append(core.Curves(f'head {i + 1}.{h + 1}',
                                  core.axis('distance t - s (tokens)', cfg, mark), 'logit', lines,
                                  mark))
    figure = core.Figure(f'{core.titled(cfg)}: logits by distance', panels)
    return core.head_rows(columns), summary, figure


PROBES = [loss, norms, tuning]
LLAMA = {loss: 1, norms: 1, tuning: None}
