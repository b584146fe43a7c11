"""PRISM's probes: where cursors go, what scores see of it, where answers go wrong."""
from collections import Counter, defaultdict
from functools import partial

import numpy as np
import torch

import pe as encodings
from engine.config import UserError
from probes import core
from probes.core import number

STRONGEST = 6   # query cursors, and key cursors, whose modes are drawn


@torch.no_grad()
def cursors_of(model, tokens):
    """What PRISM's cursors do on tokens [B, T]: a dictionary for every cursor of every layer and
    head, query cursors first.

    gates: {incr, decr, keep, reset, and jump where there is a copy branch: [B, T]}; histogram
    [B, T, 2T+1] over the offsets -T..T, after each token's gates; weight: (1 - mu) |alpha|; module,
    index: its gates in a pe.Cursors.
    """
    found, inputs = [], {}
    with core.hooked(*[(m, lambda m, args, _: inputs.update({m: args[0]}))
                       for m in model.modules() if isinstance(m, encodings.Cursors)]):
        model(tokens)
    for i, block in enumerate(model.blocks):
        prism, = [m for m in block.attn.pe.modules() if isinstance(m, encodings.PRISM)]
        if prism.layer == 0:    # new cursors are computed before this layer
            cursors, x = prism.cursors, inputs[prism.cursors]
            reset, step, copy = cursors.gates(x)
            histograms = cursors.scan(x, torch.eye(2 * tokens.shape[1] + 1, dtype=x.dtype))
        alpha = prism.alpha[:, 0, :cursors.cfg.prism_cursors].abs()
        weights = (1 - torch.sigmoid(prism.m[:, 0])) * alpha    # (H, C)
        for of, start in (('query', 0), ('key', cursors.count)):
            first = start + prism.layer * weights.numel()
            for c, ((head, cursor), weight) in enumerate(np.ndenumerate(weights), first):
                gates = dict(zip(('incr', 'decr', 'keep'), step[:, c].unbind(dim=-1)),
                             reset=reset[:, c])
                if copy is not None and of == 'query' and c % 5 == 0:
                    gates['jump'] = 1 - copy[:, c // 5, :, -1]
                found.append(dict(layer=i + 1, head=head + 1, cursor=cursor + 1, of=of,
                                  weight=weight.item(), gates=gates, histogram=histograms[:, c],
                                  module=cursors, index=c))
    return sorted(found, key=lambda c: c['of'] == 'key')


def modules_of(model, cfg):
    """Its pe.Cursors, one for each PRISM layer."""
    modules = [m for m in model.modules() if isinstance(m, encodings.Cursors)]
    if not modules:
        raise UserError(f"this probe looks at PRISM's cursors, and this run has pe={cfg.pe}: train "
                        'one with pe=prism')
    return modules


def longer(task, cfg):
    """The first length that the task has from twice the longest trained one on."""
    longest = max(cfg.train_lengths)
    return min(task.existing(range(2 * longest, 4 * longest), None), default=longest)


def pace(mode, where):
    """Places that a cursor's mode [B, T] moves with a token, over the tokens `where` [B, T]:
    (mean, share of the commonest move); nan twice if there are none."""
    moves = mode.diff(dim=1)[where[:, 1:]]
    if not len(moves):
        return torch.nan, torch.nan
    _, counts = moves.unique(return_counts=True)
    return moves.double().mean().item(), (counts.max() / counts.sum()).item()


def cursor(model, task, cfg, length=0, n=32):
    """Where do PRISM's cursors go? Gates, moves, histograms (PRISM Figures 12, 14-17, 19, 20).

    length: of the problems in the table, 0: four times the longest trained one; n: how many. Rows:
    each cursor over the tokens of the prompt, and over those of the answer: `weight`:
    (1 - mu) |alpha|, what it counts in its head; `moves`: places per token that its mode goes;
    `steady`: share of tokens with its commonest move, 1 at an even pace of whole places or standing
    still, one half at half a place per token; `peak`: its largest bin; mean gates `incr`, `decr`,
    `keep`, `reset`, and `jump` where it can copy. Summary: exact match; `steady`, the mean by
    weight of query cursors over the answer and key cursors over the prompt, where each does its
    work.
    """
    modules = modules_of(model, cfg)
    trained = max(cfg.train_lengths)
    length, tokens, targets = core.batch(task, cfg.train_lengths, length or 4 * trained, n)
    # each problem has histograms of 4 count T^2 numbers
    some = max(1, 2 ** 24 // (sum(m.count for m in modules) * tokens.shape[1] ** 2))
    tokens, targets = tokens[:some], targets[:some]
    answer = targets != -100
    parts = dict(prompt=(answer.cumsum(dim=1) == 0) & (tokens != 0), answer=answer)
    rows, work = [], []
    for c in cursors_of(model, tokens):
        peak, mode = c['histogram'].max(dim=-1)
        for part, where in parts.items():
            moves, steady = pace(mode, where)
            means = dict(weight=c['weight'], moves=moves, steady=steady, peak=peak[where].mean())
            means |= {name: gate[where].mean() for name, gate in c['gates'].items()}
            rows.append({key: c[key] for key in ('layer', 'head', 'cursor', 'of')} |
                        dict(part=part) | {key: number(x, 3) for key, x in means.items()})
            if (c['of'], part) in (('query', 'answer'), ('key', 'prompt')):
                work.append((steady, c['weight']))
    right = core.answers_right(model, tokens, targets) | ~answer
    steady, weights = np.array(work).T
    summary = dict(length=length, exact=right.all(dim=1).double().mean().item(),
                   steady=number(steady @ weights / weights.sum()))
    _, short, _ = core.batch(task, cfg.train_lengths, trained, 1)
    title = (f'{core.titled(cfg)}: exact match '
             f'{100 * summary["exact"]:.0f} % at length {length}, trained to {trained}')
    panels = cursor_panels(model, task, (trained, short), (length, tokens[:1]))
    return rows, summary, core.Figure(title, panels)


def cursor_panels(model, task, *problems):
    """Of problems (length, tokens [1, T]): gates in the first; in each the modes of the strongest
    cursors, and attention in the head of the strongest query cursor; that cursor's histogram in the
    last."""
    curves, maps = [], []
    for length, tokens in problems:
        found, T = cursors_of(model, tokens), tokens.shape[1]
        words = [task.vocab[i] for i in tokens[0]]
        marks = core.signs(words)
        axis = dict(xticks=list(marks), xticklabels=marks.values()) if marks else {}
        by_weight = sorted(found, key=lambda c: -c['weight'])
        strongest = [c for of in ('query', 'key') for c in
                     [c for c in by_weight if c['of'] == of][:STRONGEST]]
        heaviest = by_weight[0]['weight']
        lines = [('query cursors (stronger: weigh more)', [], [], dict(color=core.QUERY)),
                 ('key cursors (stronger: weigh more)', [], [], dict(color=core.KEY, ls='--'))]
        for c in strongest:
            look = dict(color=core.KEY, ls='--') if c['of'] == 'key' else dict(color=core.QUERY)
            look['alpha'] = 0.15 + 0.85 * c['weight'] / heaviest
            lines.append(('', range(T), c['histogram'][0].argmax(dim=-1) - T, look))
        curves.append(core.Curves(f'modes of the strongest cursors, length {length}', 'position',
                                  'offset', lines, settings=axis))
        best = strongest[0]
        head = f'{best["layer"]}.{best["head"]}'
        weights = core.trace(model, tokens)[best['layer'] - 1].weights[0, best['head'] - 1]
        maps.append(core.Map(f'attention of head {head}, length {length}', 'key', 'query', weights,
                             'attention weight', words, ends=(0, 1)))
        if len(curves) == 1:
            names = [f'{c["of"][0]} {c["layer"]}.{c["head"]}.{c["cursor"]}' for c in found]
            shown = range(0, len(names), 1 + len(names) // 20)     # as many as there is room for
            gates = [(c['gates']['incr'] - c['gates']['decr'])[0] for c in found]
            gates = core.Map(f'gates, length {length}', 'position',
                             'cursor: query or key, layer.head.number', torch.stack(gates),
                             'P(increment) - P(decrement)', ends=(-1, 1),
                             settings=axis | dict(yticks=shown,
                                                  yticklabels=[names[i] for i in shown]))
    bins = best['histogram'][0]     # (T, offsets -T..T)
    there = (bins.amax(dim=0) > 0.01).nonzero()
    low, high = there.min().item(), there.max().item()
    histogram = core.Map(f'strongest query cursor, {head}.{best["cursor"]}, length {length}',
                         'position', 'offset', bins[:, low:high + 1].T.flip(0), 'probability',
                         ends=(0, 1), extent=(-0.5, T - 0.5, low - T - 0.5, high - T + 0.5),
                         settings=axis)
    return [gates, *curves, histogram, *maps]


@torch.no_grad()
def gates_changed(model, found, problems, change):
    """Exact match on problems = {name: (tokens, targets)} with the gates of no cursor, of `all` and
    of each of `found` (cursors_of) alone changed, a row each.

    change(logits [B, T, n, 4], tokens [B, T]): other logits of p_reset, p_incr, p_decr, p_keep.
    """
    def score(name, chosen):    # {pe.Cursors: which of its cursors}
        row = dict(cursor=name)
        for at, pair in problems.items():
            right = []
            for tokens, targets in zip(*(x.split(32) for x in pair)):
                def replace(module, _, logits, which, tokens=tokens):
                    logits = logits.unflatten(-1, (-1, 4)).clone()  # (B, T, 2C, 4)
                    logits[:, :, which] = change(logits[:, :, which], tokens)
                    return logits.flatten(-2)

                with core.hooked(*[(m.W, partial(replace, which=which))
                                   for m, which in chosen.items()]):
                    right.append(core.answers_right(model, tokens, targets) | (targets == -100))
            row[at] = number(torch.cat(right).all(dim=1).double().mean())
        return row

    plain = score('none', {})
    everything = score('all', {c['module']: slice(None) for c in found})
    return plain, everything, [score('{of} {layer}.{head}.{cursor}'.format(**c),
                                     {c['module']: [c['index']]}) for c in found]


def by_cursor(cfg, plain, shown, lines, what):
    """A figure: exact match of the rows `shown`; lines: {column: its label}."""
    lines = [(label, range(len(shown)), [row[at] for row in shown], dict(marker='o'))
             for at, label in lines.items()]
    names = [row['cursor'].replace('query', 'q').replace('key', 'k') for row in shown]
    return core.Figure(core.titled(cfg), [core.Curves(
        f'{100 * plain:.0f} % right as it is', f'query or key cursor whose gates are {what}',
        'exact match', lines,
        settings=dict(ylim=(-0.02, 1.02), xticks=range(len(shown)), xticklabels=names))])


def whole(model, task, cfg, length=0, n=64):
    """Which cursors need fractions of steps? Exact match with the gates of each made whole.

    It tells what a run hangs on, not why it fails: runs that hold any length need fractions, too.
    Of a cursor's p_incr, p_decr and p_keep the largest becomes 1 and the others 0; p_reset is
    rounded; jumps stay. length: the longer one, 0: the first there is from twice the longest
    trained one on; n: how many problems. Rows: with the gates of no cursor, of `all`, and of each
    alone made whole, exact match at the longest `trained` length and at the `longer` one; the worst
    first. Summary: exact match at the trained length as it is (`plain`), with `all` gates whole,
    and with those of the `worst` cursor (layer.head.number).
    """
    modules_of(model, cfg)

    def round_gates(logits, tokens):
        largest = logits[..., 1:] == logits[..., 1:].amax(dim=-1, keepdim=True)
        opened = torch.cat([logits[..., :1] > 0, largest], dim=-1)
        return torch.where(opened, 100.0, -100.0)

    longest, *trained = core.batch(task, cfg.train_lengths, max(cfg.train_lengths), n)
    length, *more = core.batch(task, cfg.train_lengths, length or longer(task, cfg), n)
    found = cursors_of(model, trained[0][:1])
    plain, everything, rows = gates_changed(model, found, dict(trained=trained, longer=more),
                                            round_gates)
    rows.sort(key=lambda row: (row['trained'], row['longer']))
    summary = dict(trained=longest, longer=length, plain=plain['trained'],
                   all=everything['trained'], worst=rows[0]['trained'], cursor=rows[0]['cursor'])
    lines = dict(trained=f'length {longest}', longer=f'length {length}')
    figure = by_cursor(cfg, plain['trained'], [everything, *rows[:9]], lines, 'made whole')
    return [plain, everything, *rows], summary, figure


def frozen(model, task, cfg, length=0, n=64):
    """Do gates count digits? Exact match with those of each cursor frozen where training ended.

    Of addition_cot and multiplication_cot. A gate should not depend on how many digits of a number
    came before, but the GRU can count those of training. From the first digit of a number that no
    trained number has, the gates stay as they were at the digit before. length: 0: twice the
    longest trained one; n: how many problems. Rows: with the gates of no cursor, of `all`, and of
    each alone frozen, `exact` match; the best first. Summary: that as it is (`plain`), with `all`
    gates frozen, and with those of the best `cursor`.
    """
    modules_of(model, cfg)
    if cfg.task not in ('addition_cot', 'multiplication_cot'):
        raise UserError('this probe knows the numbers of addition_cot and multiplication_cot, not '
                        f'those of {cfg.task}')
    longest = max(cfg.train_lengths)
    divides = [task.vocab.index(word) for word in (*DIVIDES[cfg.task], '=')]

    def freeze(logits, tokens):
        logits = logits.clone()
        for b, row in enumerate(tokens.tolist()):
            start = 0
            for end in [place for place, token in enumerate(row) if token in divides][:2]:
                logits[b, start + longest:end] = logits[b, start + longest - 1:start + longest]
                start = end + 1
        return logits

    length, *problems = core.batch(task, cfg.train_lengths, length or longer(task, cfg), n)
    found = cursors_of(model, problems[0][:1])
    plain, everything, rows = gates_changed(model, found, dict(exact=problems), freeze)
    rows.sort(key=lambda row: -row['exact'])
    summary = dict(length=length, plain=plain['exact'], all=everything['exact'],
                   best=rows[0]['exact'], cursor=rows[0]['cursor'])
    figure = by_cursor(cfg, plain['exact'], [everything, *rows[:9]],
                       dict(exact=f'length {length}'), 'frozen')
    return [plain, everything, *rows], summary, figure


# What the tokens of an answer are. A function of a task takes the words of the prompt and of the
# answer. For each of the answer's it gives (kind, places): where in the sequence the word stands
# already, or where what it is computed from stands; [] if neither can be said.

def parts_of_stack(prompt, answer):
    """'0123' pushes 0 and 1, pops the 1 and pushes a 0 there. So in its answer '00200.' the first 0
    is of a height that saw 0 and 1, the second of a height that saw one symbol. Then come the 2
    below the stack, two zeros and the end.
    """
    height, pushed = 0, defaultdict(list)
    for place, symbol in enumerate(prompt):
        height = max(0, height + (-1 if symbol == '2' else 1))
        if symbol != '2':
            pushed[height].append(place)
    parts = []
    for h in range(height, 0, -1):
        symbols = {prompt[place] in '14' for place in pushed[h]}    # 1 pushes 1, and so does 4
        kind = 'height that saw 0 and 1' if len(symbols) > 1 else 'height that saw one symbol'
        parts.append((kind, pushed[h][-1:]))
    zeros = len(answer) - height - 2
    return [*parts, ('2 below the stack', []), *[('zeros', [])] * zeros, ('end', [])]


def parts_of_addition(prompt, answer):
    """'33+497=3407,3912,0708→728.': two digits, their carry and digit, a separator; the sum. The
    shorter number has zeros past its end."""
    plus, arrow, start = prompt.index('+'), answer.index('→'), len(prompt) + 1
    numbers = dict(a=[*range(plus)], b=[*range(plus + 1, len(prompt))])
    parts = []
    for column in range((arrow + 1) // 5):
        for name, places in numbers.items():
            place = places[column:column + 1]
            parts.append((f'digit of {name}' if place else f'zero past {name}', place))
        parts += [('carry', []), ('digit of a + b', []), ('separator', [])]
    parts += [('sum', [place]) for place in range(start + 3, start + arrow, 5)]
    return parts + [('end', [])] * (len(answer) - len(parts))


def parts_of_multiplication(prompt, answer):
    """'9x13=9x[1*(1+1)(3+0)+3*(3+1)].': a; for each digit of b the digit, and pairs of it and of
    those below it, which stand in all groups before. After a pair the next token of b tells
    whether another pair comes."""
    x = prompt.index('x')
    places = {i: [i] for i in range(x + 1, len(prompt))}
    parts = [*[('digit of a', [i]) for i in range(x)], ('mark', []), ('mark', [])]
    for first in list(places):
        parts += [('digit before a group', [first]), ('mark', []), ('mark', [])]
        for i in range(first, len(prompt)):
            parts.append(('digit of a pair', places[i][:]))
            places[i].append(len(prompt) + len(parts))
            parts += [*[('mark', [])] * 3, ('pair or end of group', [i + 1])]
    return [*parts, ('end', [])]


def parts_of_scan(prompt, answer):
    """'walk twice = walk + walk → walk : I_WALK walk : I_WALK .': the command written out; then its
    clauses, whose words stand in every repetition, and their actions."""
    parts, clauses, clause = [], [], []

    def write(kind, words):
        for places in words:    # a word's so far
            parts.append((kind, places[:]))
            places.append(len(prompt) + len(parts))

    for place, word in enumerate([*prompt, '=']):
        if word not in ('and', 'after', '='):
            clause.append([place])
            continue
        times = {'twice': 2, 'thrice': 3}.get(prompt[place - 1], 1)
        words = clause[:-1] if times > 1 else clause
        for i in range(times):
            parts += [('repetition', [place - 1])] * (i > 0)
            write('word of the command', words)
        clauses.append((times, words))
        parts.append(('end of a clause', [place]))
        clause = []
    for times, words in clauses[::-1] if 'after' in prompt else clauses:
        for _ in range(times):
            write('word of a clause', words)
            parts.append(('mark', []))
            while answer[len(parts)].startswith('I_'):
                parts.append(('action', []))
    return [*parts, ('end', [])]


def parts_of_copy(prompt, answer):
    """'123=123.': the digits, then the end."""
    return [*[('digit', [i]) for i in range(len(prompt))], ('end', [])]


def parts_of_odds(prompt, answer):
    """The digits at places 1, 3, 5 ..., then those at places 0, 2, 4 ..."""
    places = range(len(prompt))
    return [*[('odd place', [i]) for i in places[1::2]],
            *[('even place', [i]) for i in places[::2]], ('end', [])]


PARTS = {'stack': parts_of_stack, 'addition_cot': parts_of_addition, 'scan_cot': parts_of_scan,
         'multiplication_cot': parts_of_multiplication, 'odds_first': parts_of_odds,
         'string_copy': parts_of_copy}
# the words between the parts of a prompt
DIVIDES = {'addition_cot': ['+'], 'multiplication_cot': ['x'], 'scan_cot': ['and', 'after']}
CARRIED = 'even digit on its way'


def parts_of(task, cfg, tokens, asked):
    """For every asked token [B, T] of a task in PARTS: (b, t, kind, places)."""
    for b, row in enumerate(tokens.tolist()):
        words = [task.vocab[i] for i in row if i]
        equals = words.index('=')
        parts = PARTS[cfg.task](words[:equals], words[equals + 1:])
        where = asked[b].nonzero()[:, 0].tolist()
        yield from ((b, t, *part) for t, part in zip(where, parts, strict=True))


def readers(task, cfg, tokens, asked):
    """Every token that has places: (b, t, kind, places). Those of parts_of(); the tokens of the
    prompt behind the symbol that divides it; and of odds first the answer's again. Two of them
    after another take up the same even digit, which later ones then find at every second token."""
    yield from (part for part in parts_of(task, cfg, tokens, asked) if part[3])
    between = [task.vocab.index(word) for word in DIVIDES.get(cfg.task, [])]
    for b, row in enumerate(tokens.tolist()):
        start, *more = asked[b].nonzero()[:, 0].tolist()
        if cfg.task == 'odds_first':
            yield from ((b, t, CARRIED, [(t - start - 1) // 2 * 2]) for t in more)
        for divide in [place for place in range(start) if row[place] in between]:
            yield from ((b, t, 'second part of the prompt', [divide])
                        for t in range(divide + 1, start))


def errors(model, task, cfg, length=0, n=256):
    """Where does an answer first go wrong? The token, what stood before it, what came instead.

    length: of the problems, 0: the first there is from twice the longest trained one on; n: how
    many. All tokens before the asked one are given; up to the first wrong token the model would
    have written the same itself. Rows: the `place` in the answer, from 1, where `wrong` answers go
    wrong first, the commonest first; of these the commonest case: `before` it, `wanted`, and `got`
    in its stead.
    Summary: exact match; `share`, the mean of first wrong place / answer's length; `even`, that
    mean if every token were wrong equally often; of tasks in PARTS also the share of tokens right,
    for each kind of token.
    """
    length, tokens, targets = core.batch(task, cfg.train_lengths, length or longer(task, cfg), n)
    with torch.no_grad():
        answers = torch.cat([model(x)[0].argmax(dim=-1) for x in tokens.split(32)])
    asked = targets != -100
    wrong = asked & (answers != targets)
    place = asked.cumsum(dim=1)                 # 1 at the first token of the answer
    first = wrong & (wrong.cumsum(dim=1) == 1)
    cases = {}
    for b, t in first.nonzero().tolist():
        text = [task.vocab[i] for i in tokens[b, max(0, t - 3):t + 1].tolist()]
        case = ' '.join(text), task.vocab[targets[b, t]], task.vocab[answers[b, t]]
        cases.setdefault(place[b, t].item(), []).append(case)
    rows = []
    for at, seen in sorted(cases.items(), key=lambda item: -len(item[1])):
        (before, wanted, got), _ = Counter(seen).most_common(1)[0]
        rows.append(dict(place=at, wrong=len(seen), before=before, wanted=wanted, got=got))
    failed = wrong.any(dim=1)
    total = asked.sum(dim=1)
    rate = wrong.sum() / asked.sum()
    # the first wrong token of an answer of m, each wrong with this rate
    at = torch.arange(1, total.max() + 1)
    chance = (1 - rate) ** (at - 1) * (at <= total[:, None])
    even = (chance * at).sum(dim=1) / chance.sum(dim=1) / total
    summary = dict(length=length, exact=number(1 - failed.double().mean()),
                   share=number((place * first).sum(dim=1)[failed].div(total[failed]).mean()),
                   even=number(even[failed].mean()))
    if cfg.task in PARTS:
        by_kind = defaultdict(list)
        for b, t, kind, _ in parts_of(task, cfg, tokens, asked):
            by_kind[kind].append(not wrong[b, t])
        summary |= {kind: number(np.mean(by_kind[kind])) for kind in sorted(by_kind)}
    places = range(1, total.max() + 1)
    right = [1 - wrong[asked & (place == p)].double().mean().item() for p in places]
    failed_by = [(failed & ((place * first).sum(dim=1) <= p)).double().mean().item()
                 for p in places]
    lines = [('tokens right, all before them given', places, right, {}),
             ('answers that went wrong up to here', places, failed_by, dict(ls='--'))]
    return rows, summary, core.Figure(
        f'{core.titled(cfg)}: first wrong token at length {length}',
        [core.Curves('', 'place in the answer', 'share', lines, settings=dict(ylim=(0, 1)))])


def looked_at(model, task, cfg, tokens, targets):
    """{kind: what its tokens read, those that have places}, each a dictionary: `nth`, which of its
    kind in this sequence, and `right`, whether it is predicted right, in the prompt and of digits
    on their way the whole answer [M]; by head [M, N]: `weight` on the places, and `apart`, how far
    the query cursor is from the key cursor on the nearest place; `beyond`, how many places beyond
    that one the most seen key stands.
    """
    found, columns = defaultdict(list), ('nth', 'right', 'weight', 'beyond', 'apart')
    for some, wanted in zip(tokens.split(8), targets.split(8)):
        asked = wanted != -100
        weights = torch.cat([layer.weights for layer in core.trace(model, some)], dim=1)
        most_seen = weights.argmax(dim=-1)      # (B, N, T)
        modes = dict(query=[], key=[])
        for c in strongest_of_heads(model, some):
            modes[c['of']].append(c['histogram'].argmax(dim=-1))
        query, key = (torch.stack(modes[of], dim=1) for of in ('query', 'key'))     # (B, N, T)
        right = core.answers_right(model, some, wanted) | ~asked
        whole = right.all(dim=1)
        nth = Counter()
        for b, t, kind, places in readers(task, cfg, some, asked):
            beyond = most_seen[b, :, t, None] - torch.tensor(places)        # (N, places)
            nearest = beyond.abs().argmin(dim=1, keepdim=True)
            at = torch.tensor(places)[nearest]
            apart = query[b, :, t] - key[b].gather(1, at)[:, 0]
            weight = weights[b, :, t, places].sum(dim=-1)
            is_right = right[b, t] if asked[b, t] and kind != CARRIED else whole[b]
            found[kind].append((torch.tensor(nth[b, kind]), is_right, weight,
                                beyond.gather(1, nearest)[:, 0], apart))
            nth[b, kind] += 1
    return {kind: dict(zip(columns, map(torch.stack, zip(*each))))
            for kind, each in found.items()}


def strongest_of_heads(model, tokens):
    """Of cursors_of() the query cursor and the key cursor of every head that weigh most."""
    found = {}
    for c in sorted(cursors_of(model, tokens), key=lambda c: c['weight']):
        found[c['of'], c['layer'], c['head']] = c
    return [found[key] for key in sorted(found)]


def of_head(known, now, head):
    """A row of `reads`: what a head does at tokens of one kind, looked_at() at the trained length
    and at the longer one."""
    apart, right, wrong = known['apart'][:, head], now['right'], ~now['right']
    home = apart.mode()[0]
    weight, met = now['weight'][:, head], (now['apart'][:, head] == home).double()
    row = dict(right=right.double().mean(), weight=known['weight'][:, head].mean(),
               weight_right=weight[right].mean(), weight_wrong=weight[wrong].mean(),
               met=(apart == home).double().mean(), met_right=met[right].mean(),
               met_wrong=met[wrong].mean())
    row = {key: number(x) for key, x in row.items()}
    if wrong.any():
        looks, count = now['beyond'][wrong, head].unique(return_counts=True)
        row |= dict(looks=looks[count.argmax()].item(), often=number(count.max() / wrong.sum()))
    return row


@torch.no_grad()
def held(model, task, cfg, problems, kind, cursor, weight, shift=0):
    """Exact match on problems = (tokens, targets) if the head of `cursor` puts, at tokens of this
    kind, at least `weight` on their places; with shift=-1 on the tokens before, as a control."""
    layer, head, exact = cursor['layer'] - 1, cursor['head'] - 1, []
    for some, wanted in zip(*(x.split(8) for x in problems)):
        where = torch.zeros(*some.shape, some.shape[1], dtype=torch.bool)
        for b, t, of, places in readers(task, cfg, some, wanted != -100):
            if of == kind:
                where[b, t, [max(0, place + shift) for place in places]] = True

        def hold(i, seen, where=where):
            logits = seen.logits
            if i == layer:
                inside, outside = (logits[:, head].masked_fill(hide, -torch.inf).logsumexp(dim=-1)
                                   for hide in (~where, where))     # softmax's sums, (B, T)
                more = weight.logit(eps=1e-6) - (inside - outside)
                logits[:, head] += torch.where(where, more.clamp(min=0)[..., None], 0.0)
            return logits

        with core.recording(model, hold):
            right = core.answers_right(model, some, wanted) | (wanted == -100)
        exact.append(right.all(dim=1))
    return torch.cat(exact).double().mean()


@torch.no_grad()
def reads(model, task, cfg, length=0, n=64):
    """Where an answer is wrong, did a head look elsewhere, did a cursor stray, and does it matter?

    Many tokens of an answer stand in the sequence already, such as a digit that is to be added.
    Tokens of the prompt look for the symbol between its parts, such as "+"; in odds first, tokens
    of the answer look for an even digit that later ones find there. For each kind of these, the
    probe follows the head with the most weight on their places at the trained length to a
    longer one. length: the longer one, 0: the first there is from twice the longest trained one on;
    n: how many problems. All tokens before the asked one are given.

    Rows, for each kind: `cursor` (layer.head.number), the strongest of that head. `weight`: the
    head's on the token's place at the trained length; if it is small, no head reads it straight
    from there. `weight_right`, `weight_wrong`: at the longer length, where the token is right and
    where it is wrong; of a token of the prompt or a digit on its way, where the answer is. `met`,
    `met_right`, `met_wrong`: the share of these tokens at which the query cursor is as far from the
    key cursor on the place as it mostly is at the trained length. `right`: share of tokens.
    `looks`: where they are wrong, how many places beyond the right one the most seen key mostly
    stands, in a share of them, `often`. `held`: exact match if the head put at least its `weight`
    on the places; `control`: on the tokens before them instead.
    Summary: exact match as it is, and the kind that gains most if it is held.
    """
    modules_of(model, cfg)
    if cfg.task not in PARTS:
        raise UserError(f'this probe knows where the tokens of {", ".join(PARTS)} stand, not those '
                        f'of {cfg.task}')
    _, *trained = core.batch(task, cfg.train_lengths, max(cfg.train_lengths), n)
    length, *problems = core.batch(task, cfg.train_lengths, length or longer(task, cfg), n)
    whole = core.answers_right(model, *problems) | (problems[1] == -100)
    found = looked_at(model, task, cfg, *problems)
    heads = [c for c in strongest_of_heads(model, trained[0][:1]) if c['of'] == 'query']
    rows, lines = [], []
    for kind, known in looked_at(model, task, cfg, *trained).items():
        if kind not in found:
            continue
        head = known['weight'].mean(dim=0).argmax().item()
        name = '{layer}.{head}.{cursor}'.format(**heads[head])
        usual = known['weight'][:, head].mean()
        row = dict(kind=kind, cursor=name) | of_head(known, found[kind], head)
        for key, shift in (('held', 0), ('control', -1)):
            row[key] = number(held(model, task, cfg, problems, kind, heads[head], usual, shift))
        rows.append(row)
        nth, weight = found[kind]['nth'], found[kind]['weight'][:, head]
        each = range(nth.max() + 1)
        lines.append((f'{kind}: cursor {name}', each,
                      [weight[nth == i].mean().item() for i in each], {}))
    best = max(rows, key=lambda row: row['held'])
    summary = dict(length=length, exact=number(whole.all(dim=1).double().mean()),
                   kind=best['kind'], held=best['held'])
    return rows, summary, core.Figure(
        f'{core.titled(cfg)}, length {length}',
        [core.Curves('', 'which of its kind in the sequence', 'weight on the place', lines,
                     settings=dict(ylim=(-0.02, 1.02)))])


@torch.no_grad()
def kernel(model, task, cfg, length=0):
    """What do PRISM's scores see of places? The kernel of eq. 7, eq. 6 against eq. 4, and A.3.

    length: of the problem, 0: the longest trained one. Rows, for each cursor over the answer:
    `peak`, its largest bin; `eq6`, how far the law of its displacement by eq. 6, the correlation of
    two histograms, is from eq. 4, the scan started anew: half the sum of differences, 0 if the
    cursor is sure of its places, at most 1, none where it can copy; `mean`,
    |e - f(mean offset)| / |f| of its encoding e (A.3). Summary: `rises`, the first distance from
    which the kernel <f(0), f(r)> / |f|^2 rises again: places further off may look nearer; and the
    largest `eq6` and `mean`.
    """
    modules_of(model, cfg)
    length, tokens, targets = core.batch(task, cfg.train_lengths, length, 1)
    T, start = tokens.shape[1], (targets[0] != -100).nonzero()[0].item()
    offsets = torch.arange(-T, T + 1.0).double()

    def f(z):
        return encodings.sinusoids(z, cfg.prism_d_pe, cfg.rope_base, z)

    kappa = f(torch.arange(2 * T).double()) @ f(offsets[T:T + 1])[0] / (cfg.prism_d_pe / 2)
    rows, laws = [], []
    for c in cursors_of(model, tokens):
        h = c['histogram'][0].double()
        far = (h @ f(offsets) - f(h @ offsets))[start:].norm(dim=-1) / (cfg.prism_d_pe / 2) ** 0.5
        row = {key: c[key] for key in ('layer', 'head', 'cursor', 'of')}
        row |= dict(peak=number(h[start:].max(dim=-1)[0].mean()), eq6=None, mean=number(far.mean()))
        if 'jump' not in c['gates'] and T - start > 1:
            eq_4 = np.zeros(4 * T + 1)                     # displacements -2T..2T
            n = T - start - 1
            eq_4[2 * T - n:2 * T + n + 1] = displacement(c, start + 1).numpy()
            eq_6 = np.correlate(h[-1].numpy(), h[start].numpy(), 'full')
            row['eq6'] = number(abs(eq_4 - eq_6).sum() / 2)
            laws.append((row['eq6'], '{of} {layer}.{head}.{cursor}'.format(**c), eq_4, eq_6))
        rows.append(row)
    rises = (kappa.diff() > 0).nonzero()
    summary = dict(length=length, rises=rises[0].item() if len(rises) else None,
                   mean=max(row['mean'] for row in rows))
    panels = [core.Curves(f'eq. 7, d_pe = {cfg.prism_d_pe}', 'distance of two places',
                          'kernel', [('', range(2 * T), kappa, {})], mark=summary['rises'])]
    if laws:
        summary['eq6'], name, eq_4, eq_6 = max(laws, key=lambda law: law[0])
        seen = np.flatnonzero(eq_4 + eq_6 > 1e-3)
        x = np.arange(seen[0] - 1, seen[-1] + 2)
        panels.append(core.Curves(f'{name} over the answer', 'displacement', 'probability',
                                  [('eq. 4', x - 2 * T, eq_4[x], {}),
                                   ('eq. 6', x - 2 * T, eq_6[x], dict(ls='--'))]))
    return rows, summary, core.Figure(f'{core.titled(cfg)}, length {length}', panels)


def displacement(c, first):
    """PRISM eq. 4 for a cursor of cursors_of() in its first problem: the law of its displacement
    -n..n over the n tokens from `first` on, the scan started anew there."""
    gates = {name: gate[:1, None, first:].double() for name, gate in c['gates'].items()}
    step = torch.stack([gates['incr'], gates['decr'], gates['keep']], dim=-1)
    gamma = None
    if c['module'].cfg.prism_sharpen:
        gamma = 1 + torch.nn.functional.softplus(c['module'].g[c['index']].double())[None]
    table = torch.eye(2 * step.shape[2] + 1).double()
    return encodings.cursor_scan(gates['reset'], step, gamma, table)[0, 0, -1]


PROBES = [cursor, kernel, whole, frozen, errors, reads]
