"""ViPE: does attention find the right token as the input grows, and where are positions held?"""
import itertools

import torch
import torch.nn.functional as F

from engine import config
from engine.config import UserError
from engine.report import COLOURS
from model import Transformer
from probes import core
from probes.core import Curves, Figure, Map, number


def is_iterative(cfg):
    """Whether the task has one correct key for each state."""
    name, _, options = cfg.task.partition(':')
    one_key = 'copy', 'parity', 'polynomial', 'product', 'reverse'
    return name in one_key and 'steps=0' not in options


def ladder(cfg, length):
    """(queries, keys) [L]: where EoI, s_1, .., s_(L-1) stand; x_t, the input that each needs."""
    if not is_iterative(cfg):
        raise UserError(f'{cfg.task} has not one correct key for each state: train copy, parity, '
                        'polynomial, product or reverse, with steps')
    t = torch.arange(1, length + 1)
    return length + t, length + 1 - t if cfg.task.startswith('reverse') else t


def panel_by_length(cfg, title, ylabel, rows, lines):
    """Columns of rows by length, where they have it. lines: [(label, column, look)]."""
    trained, curves = max(cfg.train_lengths), []
    for label, key, look in lines:
        known = [row for row in rows if key in row]
        curves.append((label, [row['length'] for row in known], [row[key] for row in known], look))
    xlabel = f'input length; {core.trained_to(cfg, trained)} (red line)'
    return Curves(title, xlabel, ylabel, curves, trained, dict(ylim=(-0.03, 1.03)))


@torch.no_grad()
def attention(model, task, cfg, length=0, n=16, offset=0):
    """Where does every head look, at the trained length and at a longer one?

    ViPE Figures 1c, 2, 6-8, 10, 11. --length: the longer one, 0: 2.5 times the trained one, within
    eval_lengths. Columns, means over queries: x_to_BoS: weight from the inputs to BoS. s_to_BoS,
    s_to_EoI: from the answer's tokens to each. s_to_x_t: from EoI and the states to the input that
    the next state needs; uniform attention has 1/n. entropy (nats): of the answer's tokens. slope:
    of that entropy over log n, from n = 8 on; 1 for uniform attention, 0 if it does not dilute.
    Maps: of at most three layers the sharpest head, or the one with most weight on x_t.
    --offset (Figure 9) moves every token but BoS so many places further from it, so that D_1 is
    wrong. x_t: weight on the correct key. moved: on x_(t-offset), where D_1 = D_2 + 1 now. peak:
    by how many inputs the largest weight lies right of x_t; 0 if the head counts no places. The
    summary is about the head that has most weight on x_t without an offset.
    """
    trained = max(cfg.train_lengths)
    longest = min(max(cfg.eval_lengths), 5 * trained // 2, 512 if task.corpus else torch.inf)
    length = length or (trained if offset else longest)
    lengths = {length} if offset else {min(trained, length) if task.corpus else trained, length}
    rows, maps, summary = [], {}, dict(trained=trained, length=length)
    for L in sorted(lengths):
        tokens, targets = core.fewer(cfg, *core.batch(task, cfg.eval_lengths, L, n)[1:])
        pos = torch.arange(tokens.shape[1])
        pos[0] -= offset
        pos -= pos.min().clamp(max=0)
        layers = core.trace(model, tokens, pos if offset else None)
        means = [means_of(x.weights, tokens, targets != -100, task, cfg, L, offset) for x in layers]
        columns = {name: torch.stack([mean[name] for mean in means]) for name in means[0]}
        rows += [dict(length=L) | row for row in core.head_rows(columns)]
        summary[f'mean slope, length {L}'] = number(columns['slope'].nanmean())
        if 's_to_x_t' in columns:
            summary[f's_to_x_t, length {L}'] = number(columns['s_to_x_t'].max())
        if not maps:    # heads are picked at the shorter length; many look at the first token
            score = torch.stack([x.weights[0, :, 1:, 1:].amax(dim=-1).mean(dim=-1) for x in layers])
            if is_iterative(cfg):
                q, k = ladder(cfg, L)
                usual = core.trace(model, tokens) if offset else layers
                on_x_t = torch.stack([x.weights[:, :, q, k].mean(dim=(0, 2)) for x in usual])
                best = on_x_t.argmax().item()
                score.view(-1)[best] = 2.0
        maps[L] = layers, [task.vocab[i] for i in core.unpadded(tokens[0]).tolist()]
    points = ()
    if offset:
        points = [(x.item(), y.item()) for y, x in zip(*ladder(cfg, length))]
        if torch.equal(model(tokens, pos=pos)[0], model(tokens)[0]):
            raise UserError(f'{cfg.pe} sees no positions, so there is nothing to move: take rope')
        summary |= dict(head=f'{best // cfg.heads + 1}.{best % cfg.heads + 1}',
                        peak=number(columns['peak'].flatten()[best]))
    most, sharpest = score.max(dim=1)    # of each layer
    shown, panels = most.argsort(descending=True)[:3].sort().values.tolist(), []
    for (L, (layers, words)), i in itertools.product(maps.items(), shown):
        head, T = sharpest[i].item(), len(words)
        panels.append(Map(f'head {i + 1}.{head + 1}, length {L}', 'key', 'query',
                          layers[i].weights[0, head, :T, :T], 'attention weight', words,
                          mark=cfg.train_len - 0.5 if T > cfg.train_len else None))
    top = torch.cat([panel.values[1:, 1:].amax(dim=1) for panel in panels]).quantile(0.9).item()
    for panel in panels:
        panel.ends, panel.points = (0, top), points
    paper = f'ViPE Figure 9, {offset:+d} from BoS (dots: x_t): ' if offset else 'ViPE Figure 2: '
    of = f'{core.titled(cfg)}, {core.trained_to(cfg, trained)} ({cfg.train_len} tokens, red)'
    return rows, summary | dict(n=len(tokens)), Figure(paper * is_iterative(cfg) + of, panels)


def means_of(weights, tokens, asked, task, cfg, length, offset):
    """{column: [H]} of a layer's attention weights [B, H, T, T]; asked [B, T]: the queries whose
    next token is part of the answer."""
    def over(queries, mass):
        return mass.transpose(1, 2)[queries].mean(dim=0)    # mass (B, H, T) -> (H,)

    means = {}
    is_a = {name: tokens == task.vocab.index(name) for name in ('BoS', 'EoI') if name in task.vocab}
    to = {name: (weights * is_it[:, None, None]).sum(dim=-1) for name, is_it in is_a.items()}
    if 'BoS' in to:
        means['x_to_BoS'] = over((asked.cumsum(dim=1) == 0) & ~is_a['BoS'], to['BoS'])
    if 'EoI' in to:
        means |= {f's_to_{name}': over(asked & ~is_a['EoI'], mass) for name, mass in to.items()}
    if offset or is_iterative(cfg):
        q, k = ladder(cfg, length)
        means['s_to_x_t'] = weights[:, :, q, k].mean(dim=(0, 2))
    if offset:
        # of s_1, s_2, ..: EoI itself has no D_2 to compare
        both = (k - offset >= 1) & (k - offset <= length) & (q > length + 1)
        if not both.any():
            raise UserError(f'--offset={offset} goes beyond the {length} inputs: take less')
        q, k = q[both], k[both]
        peak = weights[:, :, q, 1:length + 1].argmax(dim=-1) + 1.0 - k
        found = dict(x_t=weights[:, :, q, k], moved=weights[:, :, q, k - offset], peak=peak)
        means |= {name: x.mean(dim=(0, 2)) for name, x in found.items()}
    entropy = torch.special.entr(weights).sum(dim=-1)       # (B, H, T)
    every = asked.all(dim=0)    # nowhere, if prompts differ in size
    rows = (every if every.any() else asked.any(dim=0)).nonzero()[:, 0]
    rows = rows[rows >= min(7, rows.max() // 2)]
    log_n = (rows + 1).double().log()
    log_n -= log_n.mean()
    slope = entropy.double().mean(dim=0)[:, rows] @ log_n / log_n.square().sum()
    return means | dict(slope=slope, entropy=over(asked, entropy))


@torch.no_grad()
def alignment(model, task, cfg, length=0, n=32, distances=''):
    """Does attention still find x_t from s_(t-1) where the answers are wrong?

    ViPE section 3.1, A.3. --length: the longest, 0: of eval_lengths; --n: problems of each.
    Columns, shares: exact: answers right. states: states right; seen, unseen: at positions within
    the trained total length, and beyond. LAYER.HEAD: mean weight on the correct key; uniform
    attention has 1/n; of more than 8 heads only the best. Summary, lengths from the trained one on,
    0: not even there: right_to: 90 % of the states are right. aligned_to: the best head has half
    its weight on the key. --distances=1,3,7 adds Figure 4, best with --n=512: states right so many
    tokens behind EoI, at trained positions, so that the context alone is longer.
    """
    trained, longest = max(cfg.train_lengths), length or max(cfg.eval_lengths)
    ladder(cfg, longest)    # refuses a task without correct keys
    wanted = core.numbers(distances, 'distances', '1,3,7') if distances else []
    # query L + 1 + d, L > d, and its target are within train_len
    if wanted and not 0 <= 2 * min(wanted) < cfg.train_len - 3:
        raise UserError(f'--distances={distances}: from 0 on, and some within the trained '
                        f'{cfg.train_len} tokens')
    lengths = {min(trained, longest), min(trained + 1, longest),
               *torch.linspace(1, longest, 24).round().int().tolist(),
               *range(1, cfg.train_len - 2 - min(wanted, default=cfg.train_len))}
    rows, mass = [], {}
    for L, pair in core.problems(task, sorted(lengths), n).items():
        tokens, targets = core.fewer(cfg, *pair)
        q, k = ladder(cfg, L)
        mass[L] = torch.cat([layer.weights[:, :, q, k].mean(dim=0)    # (heads, L)
                             for layer in core.trace(model, tokens)])
        whole = core.answers_right(model, tokens, targets)
        states, seen = whole[:, q], q + 1 < cfg.train_len    # (B, L), (L,)
        columns = dict(exact=(whole | (targets == -100)).all(dim=1), states=states,
                       seen=states[:, seen], unseen=states[:, ~seen])
        columns |= {f'd={d}': whole[:, L + 1 + d] for d in wanted
                    if d < L and L + d + 2 < cfg.train_len}
        rows.append(dict(length=L) | {key: number(x.double().mean()) for key, x in columns.items()
                                      if x.numel()})
    # the most weight in all trained lengths, every state alike
    best = sum(x.sum(dim=1) for L, x in mass.items() if L <= trained).argmax().item()
    heads = [f'{i}.{h}' for i in range(1, cfg.n_layer + 1) for h in range(1, cfg.heads + 1)]
    for row in rows:
        weights = dict(zip(heads, mass[row['length']].double().mean(dim=1)))
        row |= {head: number(x) for head, x in weights.items()
                if len(heads) <= 8 or head == heads[best]}    # a table of more is too wide
    summary = dict(n=len(tokens), head=heads[best])
    longer = [row for row in rows if row['length'] >= trained]
    for name, key, least in (('right_to', 'states', 0.9), ('aligned_to', heads[best], 0.5)):
        failed = min((row['length'] for row in longer if row[key] < least), default=torch.inf)
        summary[name] = max((row['length'] for row in longer if row['length'] < failed), default=0)
    panels = alignment_panels(cfg, rows, mass, heads, best, wanted)
    return rows, summary, Figure(f'ViPE, section 3.1: {core.titled(cfg)}', panels)


def alignment_panels(cfg, rows, mass, heads, best, wanted):
    """Weights on the correct key beside accuracy; seen and unseen positions; the best head state by
    state, from mass {length: [heads, states]}; Figure 4 for the distances wanted."""
    trained, longest = max(cfg.train_lengths), max(mass)
    grid = torch.full((longest, longest), torch.nan)    # t by length, of the nearest length drawn
    for i in range(longest):
        L = min(mass, key=lambda L: abs(L - i - 1))
        grid[:L, i] = mass[L][best]
    best, others = heads[best], [head for head in heads if head != heads[best]]
    last = [(L, cfg.train_len - 1.5 - L) for L in range(trained, cfg.train_len - 1) if L <= longest]
    panels = [
        panel_by_length(cfg, 'attention to the correct key', 'weight, accuracy', rows, [
            *(('other heads' * (head == others[0]), head, dict(color='0.7')) for head in others),
            (f'weight of head {best}', best, dict(color=COLOURS[0], lw=2)),
            ('states right', 'states', dict(color='black', ls='--')),
            ('exact match', 'exact', dict(color='black', ls=':'))]),
        panel_by_length(cfg, 'where the states are predicted', 'accuracy', rows, [
            ('seen: only the context is longer', 'seen', dict(marker='.')),
            ('unseen positions', 'unseen', dict(marker='.'))]),
        Map(f'weight of head {best} on the correct key', 'input length (dots: seen to here)',
            't of the state $s_t$', grid.flip(0), 'attention weight', ends=(0, 1), points=last,
            extent=(0.5, longest + 0.5, 0.5, longest + 0.5))]
    if wanted:
        panels.append(panel_by_length(cfg, 'ViPE Figure 4: next state', 'accuracy', rows, [
            (f'd = {d}', f'd={d}', dict(marker='.')) for d in wanted]))
    return panels


@torch.no_grad()
def squeeze(model, task, cfg, length=0, n=256):
    """Are new distances the problem? Accuracy with positions squeezed together.

    --length: the longest one, 0: of eval_lengths; --n: problems of each, fewer of long ones;
    summary: n of the longest. Columns: share of problems (exact) and of tokens right; squeezed: of
    T tokens, more than the T_0 trained on, token t stands at t (T_0 - 1) / (T - 1) (position
    interpolation, Chen et al. 2023), so distances are shorter; hidden: keys T_0 or more tokens back
    are hidden. Control: NoPE reads no positions: no change.
    """
    core.check_index_positions(cfg)
    longest, rows = length or max(cfg.eval_lengths), []
    known = {*cfg.train_lengths, *cfg.eval_lengths}
    lengths = sorted({L for L in known if L < longest} | {longest})
    for L, pair in core.problems(task, lengths, n).items():
        # three forward passes, in which PRISM keeps histograms as large as maps
        tokens, targets = core.fewer(cfg, *pair, limit=2 ** 23)
        t = torch.arange(tokens.shape[1])
        far = t[:, None] - t >= cfg.train_len

        def hide(i, layer, far=far):
            return vars(layer).pop('logits').masked_fill(far, -torch.inf)

        found = dict.fromkeys(('', ', squeezed', ', hidden'), model(tokens)[0])
        if len(t) > cfg.train_len:    # else nothing is squeezed or hidden
            squeezed = t * ((cfg.train_len - 1) / t[-1].item())
            found[', squeezed'] = model(tokens, pos=squeezed)[0]
            with core.recording(model, hide):
                found[', hidden'] = model(tokens)[0]
        row = dict(length=L)
        for name, logits in found.items():
            right, asked = logits.argmax(dim=-1) == targets, targets != -100
            row['exact' + name] = number((right | ~asked).all(dim=1).double().mean())
            row['tokens' + name] = number(right.sum() / asked.sum())
        rows.append(row)
    looks = [('positions 0, 1, 2, ...', '', dict(marker='.')),
             ('squeezed into the trained range', ', squeezed', dict(marker='.')),
             ('keys beyond the trained distance hidden', ', hidden', dict(color='black', ls=':'))]
    panels = [panel_by_length(cfg, title, 'share right', rows,
                              [(label, key + name, look) for label, name, look in looks])
              for key, title in (('exact', 'exact match'), ('tokens', 'supervised tokens'))]
    return rows, dict(n=len(tokens)), Figure(core.titled(cfg), panels)


def ridge(x, y, penalty=1e-6):
    """Regression of y [N] on x [N, C], scaled to variance 1, with `penalty` times the squared
    weights -> (w [C], b): y ~ x w + b."""
    x, y = x.double(), y.double()
    mean, std = x.mean(dim=0), x.std(dim=0, correction=0)
    std = std.clamp(min=1e-9 * std.max() + 1e-30)
    z = (x - mean) / std
    gram = z.T @ z / len(z) + penalty * torch.eye(z.shape[1], dtype=z.dtype)
    w = torch.linalg.solve(gram, z.T @ (y - y.mean()) / len(z)) / std
    return w, y.mean() - mean @ w


def ranks(x):
    """Ranks of x [N] from 1, equal numbers sharing the average of theirs."""
    _, group, count = x.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(dim=0) - (count - 1) / 2)[group].double()


def agreement(y, y_hat):
    """How well y_hat [N] predicts y [N]: RMSE and MAE in y's units, R2 = 1 - squared error /
    variance, Pearson's and Spearman's r."""
    y, y_hat = y.double(), y_hat.double()
    scores = dict(rmse=(y_hat - y).square().mean().sqrt(), mae=(y_hat - y).abs().mean(),
                  r2=1 - (y_hat - y).square().mean() / y.var(correction=0),
                  pearson=core.correlation(y, y_hat),
                  spearman=core.correlation(ranks(y), ranks(y_hat)))
    return {name: x.item() for name, x in scores.items()}


def hidden_states(model, task, lengths, n, split, of):
    """{target: [y [N], then [N, C] of each layer]} of the tokens of n problems of each length, y:
    the position, or the distance from EoI of the tokens behind it."""
    found = {'position': [], 'distance': []} if 'EoI' in task.vocab else {'position': []}
    for tokens, _ in core.problems(task, lengths, n, split).values():
        layers = core.trace(model, tokens)
        states = [layers[0].stream, *(x.after if of == 'stream' else x.out for x in layers)]
        y = torch.arange(tokens.shape[1]).expand(tokens.shape)
        known = tokens != 0
        for target, parts in found.items():
            if target == 'distance':
                y = y - (tokens == task.vocab.index('EoI')).int().argmax(dim=1, keepdim=True)
                known = known & (y > 0)
            parts.append([x[known] for x in (y, *states)])
    return {target: [torch.cat(x) for x in zip(*parts)] for target, parts in found.items()}


@torch.no_grad()
def linear(model, task, cfg, n=32, of='stream'):
    """How exactly do hidden states hold the position, and the distance to EoI?

    ViPE Figure 5, Tables 1, 4, 5. Ridge regressions from the residual stream after each layer (0:
    the embedding), or --of=attention from attention's output z_n, the paper's, fitted on --n
    held-out problems of each trained length; scored on others, on the longer eval_lengths, and on 3
    times the longest trained (3x). rmse, mae in tokens; R2; Pearson's and Spearman's r (equal
    distances keep it below 1). Control, untrained: R2 from the same model with random weights. The
    paper's R2, NoPE: position, layer 1: 0.975, longer 0.864; distance, layer 2: 0.891, 0.814.
    """
    config.check_name('of', of, ('stream', 'attention'))
    trained = max(cfg.train_lengths)
    longer = [length for length in cfg.eval_lengths if length > trained]
    lengths = {'trained': cfg.train_lengths, 'longer': longer}
    if task.existing([3 * trained], None):
        lengths['3x'] = [3 * trained]
    if not longer:
        raise UserError('linear wants lengths beyond the trained ones, and eval_lengths='
                        f'{cfg.eval_lengths} has none: train with longer ones')
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seeds[0])
        untrained = Transformer(cfg).to(next(model.parameters()).dtype).eval()

    def predictions(net):
        """{(target, layer, part): (y, y_hat)}."""
        fit, found = hidden_states(net, task, cfg.train_lengths, n, 'eval', of), {}
        for part, those in lengths.items():
            for target, (y, *layers) in hidden_states(net, task, those, n, 'test', of).items():
                for layer, x in enumerate(layers):
                    w, b = ridge(fit[target][1 + layer], fit[target][0])
                    found[target, layer, part] = y, x.double() @ w + b
        return found

    found, floor, at = predictions(model), predictions(untrained), dict(position=1, distance=2)
    rows, lines, summary = [], {}, {}
    for key in sorted(found, key=lambda key: (key[0] == 'distance', key[1])):
        (target, layer, part), (y, y_hat) = key, found[key]
        scores = agreement(y, y_hat) | dict(untrained=agreement(*floor[key])['r2'])
        scores = {name: number(x) for name, x in scores.items()}
        rows.append(dict(target=target, layer=layer, lengths=part) | scores)
        if part == '3x':
            continue
        if layer == min(at[target], cfg.n_layer):
            summary[f'{target} from layer {layer}, r2 {part}'] = scores['r2']
        rmse = (y.bincount((y_hat - y).square()) / y.bincount()).sqrt()
        look = dict(ls='--' if part == 'trained' else '-', color=COLOURS[layer % 6])
        line = f'layer {layer}, {part}', range(len(rmse)), rmse, look
        lines.setdefault(target, []).append(line)
    panels = [Curves(target, f'{target} (tokens)', 'root mean squared error (tokens)', y,
                     max(found[target, 0, 'trained'][0]).item()) for target, y in lines.items()]
    title = f'ViPE Figure 5: {core.titled(cfg)} (red line: where training ended)'
    return rows, summary, Figure(title, panels)


def proposition_1(n, mu, var, mu_2, var_2):
    """ViPE eq. 4: mean, variance and difference of z_n under uniform weights over independent
    values with mean mu and variance var, at BoS mu_2 and var_2."""
    return mu + (mu_2 - mu) / n, (var_2 + (n - 1) * var) / n ** 2, -(mu_2 - mu) / (n * (n + 1))


def coordinate_statistics(z):
    """ViPE eq. 3, over the coordinates of z [.., T, d]: mean, variance [.., T], mean of
    z_(n+1) - z_n [.., T - 1]."""
    return z.mean(dim=-1), z.var(dim=-1, correction=0), z.mean(dim=-1).diff(dim=-1)


def gap(a, b):
    """The largest difference, relative to the largest number of both."""
    return ((a - b).abs().max() / max(a.abs().max(), b.abs().max(), 1e-30)).item()


def first_layer(model, tokens, symbols):
    """Layer 1: values v and outputs z [B, H, T, D], beta [B, H, T, C] of so many symbols."""
    layer = core.trace(model, tokens)[0]
    v = layer.v
    beta = layer.weights @ F.one_hot(tokens, symbols).to(v.dtype)[:, None]
    return v, layer.y[..., :v.shape[-1]], beta    # ViPE's distance code stands behind the values


@torch.no_grad()
def prefix(model, task, cfg, length=0, n=64):
    """What does layer 1's output z_n tell of the position and of the prefix?

    ViPE section 5, --n problems of --length (0: the longest trained). Proposition 1 (eq. 2-4,
    Figure 16): mean and variance of z_n over its coordinates, mean of z_(n+1) - z_n (diff):
    measured; of this model's values under uniform weights (1/n); by eq. 4 (eq4) from the values'
    mu, sigma, at BoS mu_2, sigma_2 (few symbols repeat: more variance); token: the first problem's.
    Proposition 2 (eq. 6), z_n = V beta_n, V: the tokens' values, beta_n: the attention to each
    token. error: largest |z_n - V beta_n|, relative to z; 1e-6 is rounding, more a value that holds
    positions (ape).
    """
    if 'BoS' not in task.vocab:
        raise UserError(f'Propositions 1 and 2 are about sequences that begin with BoS, and those '
                        f'of {cfg.task} do not: train parity, for example')
    length, block, symbols = length or max(cfg.train_lengths), model.blocks[0], len(task.vocab)
    tokens, = core.fewer(cfg, core.problems(task, [length], n)[length][0])
    v, z, beta = first_layer(model, tokens, symbols)
    if not v.any():
        raise UserError(f'every value of layer 1 of {core.titled(cfg)} is 0: take another run')
    T = tokens.shape[1]
    places = torch.arange(1, T + 1).double()
    z_n, v_n = (x.transpose(1, 2).flatten(2).double() for x in (z, v))    # (B, T, H D)
    mu, mu_2 = v_n[:, 1:].mean(), v_n[:, 0].mean()
    var, var_2 = v_n[:, 1:].var(correction=0), v_n[:, 0].var(correction=0)
    summary = dict(length=length, n=len(tokens), mu=mu.item(), sigma=var.sqrt().item(),
                   mu_2=mu_2.item(), sigma_2=var_2.sqrt().item())
    rows = [dict(n=i + 1, token=task.vocab[tokens[0, i]])
            for i in torch.linspace(0, T - 1, min(48, T)).round().long().tolist()]
    EoI, panels = (tokens[0] == task.vocab.index('EoI')).int().argmax().item() + 1, []
    for key, measured, uniform, eq_4 in zip(
            ('mean', 'var', 'diff'), coordinate_statistics(z_n),
            coordinate_statistics(v_n.cumsum(dim=1) / places[:, None]),
            proposition_1(places, mu, var, mu_2, var_2)):
        found = {key: measured.mean(dim=0), f'{key} 1/n': uniform.mean(dim=0), f'{key} eq4': eq_4}
        for row, (name, x) in itertools.product(rows, found.items()):
            if row['n'] <= len(x):
                row[name] = x[row['n'] - 1].item()
        lines = [(label.removeprefix(key).strip() or 'measured', places[:len(x)], x, {})
                 for label, x in found.items()]
        panels.append(Curves(f'{key} of $z_n$', 'position n (red line: EoI)',
                             'over the coordinates', lines, EoI))
    V = core.project(block.attn, block.norm_1(model.embedding.weight)[None])[2][0]    # (H, C, D)
    summary['error'] = max(gap(z[:, h], beta[:, h] @ V[h]) for h in range(cfg.heads))
    title = f'ViPE Figure 16: {core.titled(cfg)}'
    return [core.short(row) for row in rows], core.short(summary), Figure(title, panels)


PROBES = [attention, alignment, squeeze, linear, prefix]
LLAMA = {attention: 1}
