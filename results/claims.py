"""What each paper claims, beside what is found here: tables made of results/*.jsonl.

A claim is (where and what, the paper's number, the number here, how they differ). The numbers here
are computed; None stands for what has not run yet. How they differ is written by hand, from the
small runs: its numbers are settings, never results.
Asking for a number that is not there adds what would give it to plan.missing.
"""
import math
import statistics
import types

from probes.prism import CARRIED, PARTS
from results import plan
from results.plan import asked, by_seed, cells, probed, score, shown, spread

REACH = 'trained to 8, holds to (tokens right at 16, percent)'
SMOL = '--hf=SmolLM2-135M-Instruct.Q4_1.gguf', '--text=tinyshakespeare.txt'

# --------------------------------------------------------------------------------------------------
# numbers as text

def listed(found, sign=' ', between='; '):
    """{name: text} as one text that ends with the names still waiting; None if all are."""
    text = between.join(f'{name}{sign}{each}' for name, each in found.items() if each is not None)
    waiting = [name for name, each in found.items() if each is None]
    if not text or not waiting:
        return text or None
    return f'{text}{between if between == "<br>" else " "}(not run yet: {"; ".join(waiting)})'


def lines(found, sign=': '):
    """The same, each name on a line of its own."""
    return listed(found, sign, '<br>')


def in_row(name, column, what, rows=None):
    """shown() of every row of a column: '`rope` 8, `nope` 9'."""
    found = {row: cells.get((name, row, column)) for row in rows or plan.GRIDS[name].rows}
    return listed({f'`{row}`': cell and shown(cell, what) for row, cell in found.items()},
                  between=', ')


def in_rows(name, what, columns=None, rows=None):
    """The same of several columns."""
    columns = columns or plan.GRIDS[name].columns
    return lines({column: in_row(name, column, what, rows) for column in columns})


def at_paper_size(name, what, columns=None):
    """The same rows at the size of the paper, for a cell of the table of claims."""
    return {"at the paper's size": in_rows(name, what, columns)}


def by_length(name):
    """What engine/report.py's tables and figures take, of the runs in results/NAME.jsonl.

    A configuration and, for every run and seed, (label, {length: scores}, metric). A label is the
    encoding and what this file varies of it; of two lines about one run the later counts.
    """
    latest = {(run['command'].replace(' --resume', ''), run['config']['out_dir']): run
              for run in plan.runs(name)}.values()
    if not latest:
        return None, []
    configs = [run['config'] for run in latest]
    varied = [key for key in ('prism_cursors', 'pope_delta')
              if len({str(config.get(key)) for config in configs}) > 1]

    def label(config):
        of_encoding = [key for key in varied if key.startswith(config['pe'])]
        return ' '.join([config['pe'], *(f'--{key}={config[key]}' for key in of_encoding)])

    rows = [(label(run['config']), scores, 'exact')
            for run in latest for scores in by_seed(run).values()]
    labels = [label for label, _, _ in rows]
    rows.sort(key=lambda row: labels.index(row[0]))               # seeds side by side
    corpus = 'loss' in next(iter(rows[0][1].values()))
    task = types.SimpleNamespace(corpus=corpus)
    return types.SimpleNamespace(**configs[0], the_task=task), rows


def of_runs(name, twice):
    """shown() of every encoding in results/NAME.jsonl, over all of its seeds."""
    found = {}
    for run in plan.runs(name):
        found.setdefault(run['config']['pe'], []).append(run)
    return listed({f'`{encoding}`': shown(plan.summarize(runs, twice), 'all')
                   for encoding, runs in found.items()}, between=', ')


def alone(name, lengths, metric):
    """The score over these lengths of each configuration in results/NAME.jsonl, over its seeds:
    exact or token in percent; of a corpus loss or perplexity."""
    found, digits = {}, dict(exact=1, token=1, loss=3, perplexity=2)[metric]
    for label, scores, _ in by_length(name)[1]:
        x = score(scores, lengths, metric)                 # of a corpus minus the loss
        value = dict(loss=-x, perplexity=math.exp(-x)).get(metric, 100 * x)
        found.setdefault(label, []).append(value)
    return ', '.join(f'{label} {spread(values, digits)}' for label, values in found.items()) or None


# --------------------------------------------------------------------------------------------------
# numbers of probes

def drops(line):
    """Points lost without each head, [layer][head]."""
    return [[x for key, x in layer.items() if key.startswith('drop')] for layer in line['rows']]


def single_heads(name, row, column):
    """What single heads are worth: a text for each of seeds 0 to 2, then one for the layers.

    Points lost without the head that matters most / the next, of the exact match with all, and the
    layer of the first; then each layer's share of what all heads are worth, mean over seeds.
    """
    found = [probed('ablate', name, row, column, seed) for seed in range(3)]
    if None in found:
        return None
    shares = []
    for line in found:
        lost = [sum(max(0, x) for x in layer) for layer in drops(line)]
        shares.append([100 * x / sum(lost) for x in lost])
    layers = ' / '.join(f'{statistics.mean(share):.0f}' for share in zip(*shares))
    seeds = ['{largest:.0f} / {second:.0f} of {base:.0f}, layer {layer}'.format(**line['summary'])
             for line in found]
    return [*seeds, layers]


def head_layers(name, column, rows):
    """For each row, each layer's share of what all heads are worth."""
    found = {row: single_heads(name, row, column) for row in rows}
    return listed({f'`{row}`': texts and texts[-1] for row, texts in found.items()}, between=', ')


def heads_table():
    """What single heads are worth, a row for each model of plan.HEADS."""
    found = {}
    for name, row, column in plan.HEADS:
        column_in_words = column.replace('distance, 1', 'distance:span=16, 2 layers, std 1')
        found[f'{column_in_words}, {row}'] = single_heads(name, row, column)
    yield '| | seed 0 | seed 1 | seed 2 | layers |'
    yield '|---' * 5 + '|'
    for label, texts in found.items():
        if texts:
            yield '| ' + ' | '.join([label, *texts]) + ' |'
    waiting = [label for label, texts in found.items() if not texts]
    if waiting:
        yield f'\nNot run yet: {"; ".join(waiting)}.'


def of_probe(what, keys):
    """Numbers of a probe's summary, {name: key}, for encodings at distance among 16 tokens."""
    found = {}
    for row in ('rope', 'alibi', 'nope', 'ape'):
        seeds = [probed(what, 'toeplitz', row, 'distance:span=16', seed) for seed in range(3)]
        for name, key in keys.items():
            values = [line and line['summary'].get(key) for line in seeds]
            if all(line and key not in line['summary'] for line in seeds):
                continue                                          # not defined for it
            text = None if None in values else f'`{row}` {spread(values, 2)}'
            found.setdefault(name, []).append(text)
    return lines({name: None if None in texts else ', '.join(texts)
                  for name, texts in found.items()})


def without_p(name, column, more='', seed=0):
    """Exact match without p_i / without random vectors as long, taken out before each layer."""
    found = {}
    for row in (f'ape{more}', f'ape+rope{more}'):
        line = probed('ablate --what=positions', name, row, column, seed)
        found[row] = line and ', '.join(
            f'{layer["without p"]:.0f} / {layer["random"]:.0f} ({layer["sd"]:.0f})'
            for layer in line['rows'])
    return listed(found)


def at_steps(name, column, steps, rows):
    """Exact match on validation problems after so many steps, a mean over seeds for each row."""
    found = {}
    for row in rows:
        cell = cells.get((name, row, column))
        at = [[exact for curve in cell['curves'] for step, exact, *_ in curve if step == n]
              for n in steps] if cell else []
        found[f'`{row}`'] = ', '.join(f'{100 * statistics.mean(each):.0f}' if each else '-'
                                      for each in at) or None
    return listed(found)


POLYNOMIAL = 'polynomial, 3 layers'
SCALED = 'rope', 'ape', 'alibi'
OTHERS = 'vipe', 'nope', 'rope', 'alibi', 't5', 'fire'


def second_states(row):
    """Percent right of the second state, at trained positions, in longer and longer problems."""
    line = probed('alignment --distances=1,3,7 --n=512', 'vipe', row, POLYNOMIAL)
    return line and ', '.join(f'{100 * each["d=1"]:.0f}' for each in line['rows']
                              if each['length'] in (8, 9, 10, 12, 14))


def weight_on_input(row):
    """The best head's mean weight from a state to its input, at the trained length and a longer."""
    line = probed('attention', 'vipe', row, POLYNOMIAL)
    return line and ', '.join(f'{value:.2f}' for key, value in line['summary'].items()
                              if key.startswith('s_to_x_t'))


def linear_r2(line):
    """R2 of position from layer 1, then of distance from layer 2: on trained lengths / longer ones
    / 3 times the trained one, an untrained model's in parentheses."""
    if not line:
        return None
    rows = {(row['target'], row['layer'], row['lengths']): row for row in line['rows']}
    return '; '.join(' / '.join('{r2:.2f} ({untrained:.2f})'.format(**rows[of, layer, part])
                                for part in ('trained', 'longer', '3x'))
                     for of, layer in (('position', 1), ('distance', 2)))


def moved_inputs():
    """By how many inputs attention of RoPE on parity moves when all comes nearer to BoS."""
    found = {}
    for offset in (-2, -4):
        lines = [asked('attention', f'out/parity_rope/seed_{seed}', f'--offset={offset}')
                 for seed in range(4)]
        if None in lines:
            return None
        found[f'by {-offset}, seeds 0 to 3:'] = ', '.join(
            f'{line["summary"]["peak"]:.1f}' for line in lines)
    return listed(found)


def goal_table():
    """A row for each of PRISM's tasks. How many seeds have 95 % at twice the trained length; what
    the median seed has at the first evaluated length of five times that or more; and how long a
    seed's steps take on one CPU core, by --benchmark."""
    yield ('| task | trained to | seeds 0 to 7: 95 % at twice | fresh seeds: the same '
           '| median seed at five times, percent | minutes of a core |')
    yield '|---' * 6 + '|'
    minutes = {run['config']['task']: run['steps'][0]['ms'] * run['config']['max_steps'] / 6e4
               for run in plan.runs('speed_prism')}
    for task in dict.fromkeys(['string_copy', 'string_reverse', 'dyn_str_cpy', 'parity',
                               'polynomial', *plan.OF_PRISM]):
        of_cell = plan.runs_of_cell('prism', 'prism', task) if task in plan.OF_PRISM else []
        more = [run for run in plan.runs(f'{task}_prism') if run['config']['pe'] == 'prism']
        seeds = by_seed(*of_cell or [], *more)
        if not seeds:
            continue
        longest = max((more or of_cell)[0]['config']['train_lengths'])
        twice = plan.OF_PRISM[task][1] if task in plan.OF_PRISM else [2 * longest]
        right = {seed: score(scores, twice) >= 0.95 for seed, scores in seeds.items()}
        chosen, fresh = ([right[seed] for seed in right if (seed >= 8) == is_fresh]
                         for is_fresh in (False, True))
        counts = [f'{sum(each)} of {len(each)}' if each else '-' for each in (chosen, fresh)]
        far = [n for n in next(iter(seeds.values())) if n >= 5 * longest]
        median = '-'
        if far:
            values = [100 * score(scores, [min(far)]) for scores in seeds.values()]
            median = f'{statistics.median(values):.0f} at {min(far)}'
        took = f'{minutes[task]:.1f}' if task in minutes else '-'
        yield f'| {task} | {longest} | {" | ".join(counts)} | {median} | {took} |'


def of_kernel(*cell):
    """The claim about eq. 6, eq. 7 and A.3, by the probe `kernel`, seed by seed: a row."""
    found = [probed('kernel', *cell, seed) for seed in range(3)]
    here = None
    if None not in found:
        eq_6, mean = (', '.join(f'{line["summary"][key]:.2f}' for line in found)
                      for key in ('eq6', 'mean'))
        here = ('copying, the worst cursor of each seed: share of the law of eq. 6 that is '
                f'elsewhere than eq. 4 has it {eq_6}; norm of e - f(mean place) over that of f '
                f'{mean}; eq. 7 rises again from a distance of {found[0]["summary"]["rises"]} on')
    return (
        'eq. 6: how far a cursor goes between two tokens follows exactly from its two histograms; '
        'eq. 7: scores fall with the distance of two places; A.3: the mean of encodings is not the '
        'encoding of the mean place',
        'derivations', here,
        'A.3 holds. Eq. 6 is exact only for a cursor that is sure of its place at the first token '
        'and is not reset: the two histograms depend on each other. Eq. 7 fails with sinusoids of '
        'this width.')


def even_digits(*cell):
    """Exact match of odds first as it is and with the head held that brings the even digits."""
    texts = []
    for line in (probed('reads', *cell, seed) for seed in range(3)):
        if line is None:
            return None
        row = next(row for row in line['rows'] if row['kind'] == CARRIED)
        texts.append(f'{100 * line["summary"]["exact"]:.0f} → {100 * row["held"]:.0f}')
    return ', '.join(texts)


# where PRISM stops: task, its cell, what its cursors must follow and by which symbols
STOPS = (
    ('string_copy, which does not', ('prism', 'prism', 'string_copy'),
     'The place, counted from the start in the prompt and from "=" in the answer.'),
    ('odds_first', ('prism', 'prism', 'odds_first'),
     'Half a place a token, by key cursors in the prompt and on in the answer, whose second half '
     'reads its own first half. No symbol tells odd places from even ones.'),
    ('stack', ('prism', 'prism', 'stack'),
     'The height of the stack: a step up at 0, 1, 3, 4, a step down at 2 and in the answer; of '
     'several symbols at one height the latest. And the length of the answer, which "=" ends in '
     'the prompt.'),
    ('addition_cot', ('prism', 'prism', 'addition_cot'),
     'The column in each number: "+" starts the second number, "," the next column; and the place '
     'within a column of five tokens.'),
    ('multiplication_cot', ('prism', 'prism', 'multiplication_cot'),
     'The pair within a group, from 0 at each "*", and the number of the group.'),
    ('scan_cot', ('prism', 'prism', 'scan_cot'),
     'The word of the command that is being written out, then its clause; words tell both.'),
    ('bucket_sort', ('prism', 'prism', 'bucket_sort'),
     'None has to. One could count each digit, up where it is read, down where it is written.'))


def stops_table():
    """Where the answers of PRISM's tasks first go wrong, seed by seed, at twice the length."""
    yield ('| task | what its cursors must follow | exact match | first wrong tokens, seed by seed '
           '| trained length, gates made whole '
           '| what gains most if its head is held on its place |')
    yield '|---|---|---|---|---|---|'
    for task, cell, follows in STOPS:
        scores = shown(cells[cell], 'all') if cell in cells else 'not run yet'
        row = [task, follows, scores]
        for probe, describe in (('errors', first_error), ('whole', needs_fractions),
                                ('reads', gains_most)):
            if probe == 'reads' and cell[2] not in PARTS:
                row.append('')
                continue
            found = [probed(probe, *cell, seed) for seed in range(3)]
            texts = ['not run yet' if line is None else describe(line) for line in found]
            row.append('<br>'.join(texts))
        yield f'| {" | ".join(row)} |'


def first_error(line):
    """An `errors` probe as text: how many are right, where others first go wrong, and the
    commonest case; and the kinds of token of which not all are right."""
    summary, rows = dict(line['summary']), line['rows']
    length, exact, share, even = map(summary.pop, ('length', 'exact', 'share', 'even'))
    text = f'length {length}, {100 * exact:.0f} % right'
    if not rows:
        return text
    text += (f'; at {share:.2f} of the answer (even: {even:.2f}), '
             'most often after `{before}`: `{got}` for `{wanted}`'.format(**rows[0]))
    kinds = [f'{kind} {100 * right:.1f}' for kind, right in summary.items() if right < 1]
    return text + ('; tokens right, percent: ' + ', '.join(kinds)) * bool(kinds)


def needs_fractions(line):
    """A `whole` probe as text: exact match with every gate made whole, and which cursor alone costs
    most."""
    scores = {key: f'{100 * line["summary"][key]:.0f}' for key in ('plain', 'all', 'worst')}
    return '{plain} → {all} % ({cursor} alone: {worst})'.format(**line['summary'] | scores)


def gains_most(line):
    """A `reads` probe as text: the kind of token that gains most if its head is held on its place,
    and what head and cursors do where it is wrong."""
    kind = line['summary']['kind']
    row = next(row for row in line['rows'] if row['kind'] == kind)
    percent = {key: 'none' if row[key] is None else f'{100 * row[key]:.0f}'
               for key in ('met', 'met_right', 'met_wrong', 'held', 'control')}
    weights = {key: 'none' if row[key] is None else f'{row[key]:.2f}'
               for key in ('weight', 'weight_right', 'weight_wrong')}
    return ('{kind}, cursor {cursor}: weight {weight} / {weight_right} / {weight_wrong}, cursors '
            'meet {met} / {met_right} / {met_wrong} %; held: {exact:.0f} → {held} % (control '
            '{control})'.format(exact=100 * line['summary']['exact'], **row | percent | weights))


def of_library(what, text, encodings=('rope', 'pope'), between=', '):
    """Numbers of a probe of encodings trained on Python's library, from probes.jsonl."""
    name, *flags = what.split()
    found = {}
    for pe in encodings:
        line = plan.look_up('probes', ['probe.py', name, f'out/stdlib/pe={pe}', *flags])
        found[pe] = line and text.format(**line['summary'])
    return listed(found, between=between)


def perturb_table():
    """Table 1 of the position-generalization paper, in parentheses beside SmolLM2."""
    paper = {
        'text': ('tokens change places', '37.4', '41.4', '42.3', '42.4', '42.5'),
        'feature': ('keys change places', '35.1', '41.2', '42.0', '42.3', '42.6'),
        'position': ('position indices', '37.2', '42.4', '42.4', '42.7', '42.6'),
    }
    line = asked('perturb', *SMOL, '--l_max=5', '--n=8')
    if not line:
        yield 'Not run yet.'
        return
    rows = {(row['kind'], row.get('gamma')): row for row in line['rows']}
    yield '| perturbed | share 0.5 | 0.1 | 0.05 | 0.01 | 0.001 |'
    yield '|---' * 6 + '|'
    for kind, (name, *there) in paper.items():
        found = []
        for share, answers in zip((0.5, 0.1, 0.05, 0.01, 0.001), there):
            right = [100 * rows[kind, share][key] for key in ('token', 'token before')]
            found.append('{:.1f} / {:.1f}'.format(*right) + f' ({answers})')
        yield f'| {name} | {" | ".join(found)} |'
    yield f'\nOf all tokens, undisturbed: {100 * rows["original", None]["token"]:.1f} (42.5).'


# --------------------------------------------------------------------------------------------------
# the claims

def vipe():
    """The claims of ViPE: rows of the table."""
    def trained_to_8(tasks, layers=(2, 3)):
        columns = [f'{task}, {n} layers' for task in tasks for n in layers]
        return in_rows('vipe', 'reach', columns, OTHERS)

    yield (
        'Figures 3, 6: polynomial: all but ViPE break right behind the trained length, NoPE with 3 '
        'layers last',
        'curves, best of 8 seeds, trained to 16: ViPE high to about 32',
        lines({
            REACH:
                in_rows('vipe', 'reach', ['polynomial, 2 layers', POLYNOMIAL]),
            'with 3 layers, eight seeds': in_row('vipe_seeds', 'polynomial', 'reach'),
            'trained to 16, 20,000 steps (tokens right at 32)':
                in_row('vipe_long', 'polynomial', 'reach'),
            'ViPE with one s for all lengths beyond 8 (eq. 7)':
                in_row('vipe_scale', POLYNOMIAL, 'reach'),
        } | at_paper_size('paper_vipe', 'reach', ['polynomial'])),
        'Agrees in tokens: at twice the length ViPE has most of them right and leads. But its '
        'eight seeds spread widely, and the lowest is level with T5. Whole answers hold a length '
        'or two beyond the trained ones, not to twice these. So they do after training to 16 with '
        "the paper's recipe. There ViPE holds two or three lengths more than 16 after 10,000 "
        'steps, and no more after 20,000; 40,000 and 100,000 were not run. NoPE holds one at most, '
        "RoPE none, and at 32 both have half of ViPE's tokens. Runs of all three break down now "
        'and then, one of each at the last step; the recipe has neither clipping nor decay. The '
        'paper does not say whether its curves are tokens or answers. With 2 layers ViPE has not '
        'learned the task on every seed. One s for all lengths beyond leaves fewer tokens right. '
        "With one head ALiBi's slope is 1/256: nearly NoPE.")
    yield (
        'Figure 6, left: each state looks at the input that the next one needs, at longer lengths '
        'too',
        'a map of 39 inputs, trained to 16',
        (found := listed({row: weight_on_input(row) for row in ('vipe', 'nope', 'rope')})) and
        'trained to 8, mean weight of the best head on it with 8 inputs, with 20, seed 0: ' + found,
        'Agrees in part: at 20 inputs ViPE keeps two thirds of the weight, NoPE and RoPE next to '
        'nothing. No answer of that length is right.')
    yield (
        'Figure 4: a state at trained positions goes wrong in longer problems, with RoPE at once, '
        'with NoPE last',
        'curves',
        (found := listed({row: second_states(row) for row in ('nope', 'rope', 'ape')})) and
        'percent of second states right at lengths 8, 9, 10, 12, 14, seed 0: ' + found,
        'Agrees on NoPE. Here APE goes wrong first, there RoPE.')
    yield (
        'Figure 12: copy, parity with one head: ViPE goes furthest',
        'a figure, best of 8 seeds',
        lines({
            REACH: trained_to_8(('copy', 'parity')),
            'with 3 layers, eight seeds': in_rows('vipe_seeds', 'reach', ['copy', 'parity']),
            '10,000 steps': in_rows('vipe_steps', 'reach'),
            'trained to 16, 20,000 steps (tokens right at 32)':
                in_rows('vipe_long', 'reach', ['copy', 'parity']),
        } | at_paper_size('paper_vipe', 'reach', ['copy', 'parity'])),
        'Agrees in part. On copy with 3 layers ViPE leads in tokens, on eight seeds by little over '
        'T5 and ALiBi, and holds as far as others or a length further. On parity it leads in '
        'tokens with 2 layers; with 3 it is level with ALiBi. With 2 layers ViPE learns neither '
        'task on one seed. Five times the steps carry whole answers a little further, but not '
        "tokens. Trained to 16 with the paper's recipe, ViPE holds a length or two more than NoPE "
        'on parity, and about as far on copy. RoPE holds 16 on both and no more. ViPE has the most '
        'tokens at 32, on parity by less than seeds differ. 40,000 and 100,000 steps were not run. '
        "With one head ALiBi's slope is 1/256: nearly NoPE.")
    yield (
        'Figure 13: the same with more layers and heads',
        'a figure, means over 4 to 6 layers',
        lines({REACH: in_rows(
            'vipe', 'reach', [column for column in plan.OF_VIPE if 'heads' in column], OTHERS)}),
        'Agrees in tokens on the polynomial and copy at both sizes; on parity ViPE leads by less '
        'than seeds differ. In lengths it agrees by little; with 4 layers and 2 heads NoPE and '
        'FIRE hold longer on parity.')
    yield (
        'Figure 14: the same on count, reverse, mode, sort',
        'a figure, means',
        lines({
            REACH: trained_to_8(('count', 'reverse', 'mode', 'sort')),
            'without its parts, sort, 3 layers': in_row('vipe_causes', 'sort, 3 layers', 'reach')}),
        'On count ViPE and T5 (table below) lead in tokens, level with each other. On mode others '
        'go further; on sort others keep more; on reverse FIRE does, and ViPE learns the trained '
        'lengths least often. Rescaling the logits may be one cause: without log n and u ViPE '
        'keeps more of sort, by about what seeds differ; on reverse there is no difference. More '
        'steps were not tried.')
    yield (
        'Figure 15: ViPE holds beyond over 8 seeds',
        'a figure, means',
        lines({'trained to 8': in_rows('vipe_seeds', 'all'),
               'tokens right at 16': in_rows('vipe_seeds', 'tokens'),
               'at twice the length, the best seed of those with 85 % on the trained lengths':
                   in_rows('vipe_seeds', 'best')}),
        'Agrees in part: most seeds hold one or two lengths more than the trained ones. The other '
        'encodings were not run on eight seeds.')
    yield (
        'Tables 1, 4, 5: R2 of position from layer 1, trained / longer lengths (to 3 times; here '
        '4), and of distance to EoI from layer 2',
        'NoPE 0.975 / 0.864, 0.891 / 0.814; RoPE 0.943 / 0.542, 0.869 / 0.667; APE 1.000 / 0.721, '
        '0.891 / 0.614',
        (found := lines({f'`{row}`': linear_r2(probed('linear', 'vipe', row, POLYNOMIAL))
                         for row in ('nope', 'rope', 'ape', 'vipe')} | {
            'weights set by hand': linear_r2(asked('linear', 'by_hand:polynomial')),
            "from attention's output z_n, `nope`":
                linear_r2(probed('linear --of=attention', 'vipe', 'nope', POLYNOMIAL))})) and
        'seed 0, trained / longer / 3 times (untrained):<br>' + found,
        'In part: NoPE falls least beyond, as there, but much further. On trained lengths the R2 '
        'of position says little: an untrained model has nearly as much. The weights set by hand '
        'need the distance alone and have it at any length.')
    yield (
        'Proposition 1 (eq. 4, Figure 16), Proposition 2 (eq. 6): of NoPE, mean and variance of '
        'layer 1 tell the position; z_n is a function of the prefix',
        'proofs, a figure',
        (line := probed('prefix', 'vipe', 'nope', POLYNOMIAL)) and (
            'NoPE, seed 0: variance at the last position {:.2f}, of its values under uniform '
            'weights {:.2f}, by eq. 4 {:.3f}; largest |z - V beta| {:.0e} of z').format(
                *(line['rows'][18][key] for key in ('var', 'var 1/n', 'var eq4')),
                line['summary']['error']),
        'Proposition 1 holds under a condition that no task here meets: eq. 4 takes values of '
        'different positions for independent, and five symbols repeat, so that the variance '
        'stays. Proposition 2 holds; with values that hold positions (APE) a test shows that it '
        'fails.')
    yield (
        'Figure 9: RoPE finds the input by counting from BoS: when all stands nearer to BoS by 2, '
        'attention moves 2 inputs to the right',
        'maps',
        moved_inputs(),
        'Holds on two seeds of four in part: when all stands nearer by 2, attention moves by more '
        'than one input there; on the others it stays nearly where it was.')
    yield (
        'Table 2: SCAN (which split is not said; here the length split)',
        'ViPE 15.0, NoPE 13.2, RoPE 2.1, APE 0.0',
        lines({'reduced, one seed': alone('scan', range(24, 49), 'exact'),
               'tokens': alone('scan', range(24, 49), 'token')}),
        'Agrees but for the first two, which one seed cannot tell apart. Half the layers, a '
        'quarter of the width.')


def of_chains():
    """The claim about chains of thought: a row."""
    of_cot = [task for task in plan.OF_PRISM if task.endswith('_cot')]
    return (
        'Figures 1, 4, 9: the same with a chain of thought: addition, SCAN, multiplication',
        'curves, trained to 10 digits, commands of 22 actions, 9 digits; in words, addition of 20 '
        'digits after 10',
        lines({
            'trained to 8 digits, 22 actions, 5 digits': in_rows('prism', 'all', of_cot),
            'multiplication_cot, to 8, seeds 0 to 7': alone('multiplication_to_8', [9], 'exact'),
            'SCAN, seeds 3 to 7': of_runs('scan_cot_prism', range(24, 49)),
            'otherwise': in_rows('prism_chains', 'all'),
            'baselines with 20,000 steps': in_rows('prism_more', 'all', [
                column for column in plan.GRIDS['prism_more'].columns if '_cot' in column]),
            'addition_cot, 84 features': in_row('prism_wide', 'addition_cot', 'all')},
            ':<br>'),
        'In part. Seven recipes for addition ran on three seeds. With five of them one or two '
        'seeds go on for some digits, and the others stop at once; with two all stop. Trained to '
        '12 digits instead of 8, and for twice the steps, one seed of twelve '
        'has 95 percent right at 24. Of multiplication to 5 or 8 digits not even the trained '
        'lengths are learned on every seed. After 20,000 steps SCAN goes on to most of the longer '
        'commands on seven of eight seeds, and the baseline does on three of three. At most 20,000 '
        "of the paper's 150,000 steps. Unlike the paper: the recurrent matrix is free, gates are "
        "weighed in the loss, alpha's rate is a tenth, and there is dropout. Arithmetic also "
        'averages the weights.')


def prism():
    """The claims of PRISM: rows of the table."""
    yield (
        'Figures 2, 3, 5-7, 10: far beyond the trained lengths, the baseline (not in Figure 2) not',
        'curves, trained to 5, 10 or 40; in words, copying and reversing to 100 after 10',
        lines({
            'string_copy': of_runs('string_copy_prism', [20]),
            'stack': in_row('prism', 'stack', 'all'),
            'stack, seeds 3 to 7': of_runs('stack_prism', [20]),
            'string_reverse': of_runs('string_reverse_prism', [20]),
            'otherwise, string_reverse': in_row('prism_reverse', 'string_reverse', 'all'),
            'dyn_str_cpy': of_runs('dyn_str_cpy_prism', [20]),
            'otherwise, dyn_str_cpy': in_row('prism_dyn', 'dyn_str_cpy', 'all'),
            'otherwise, string_copy': in_row('prism_causes', 'string_copy', 'all'),
            'string_copy, the baseline after 20,000 steps':
                in_row('prism_more', 'string_copy, shifted_ape', 'all'),
        } | at_paper_size('paper_prism', 'all')),
        'Agrees on copying, reversing and dyn_str_cpy on nearly all seeds, with a free recurrent '
        'matrix, dropout and, for reversing, no copy branch. Reversing needs the start symbol of '
        'Figure 15, or more cursors; the weight on whole steps, which the paper does not have, may '
        'help. Stack goes on in part. The baseline learns the trained lengths of none of these '
        'tasks in as many steps. After 20,000 it has learned those of copying, and has 3 percent '
        "right at twice the length. Its steps are at most a seventh of the paper's. Three or more "
        'rates were tried on the three string tasks, one on all others.')
    yield of_kernel('prism', 'prism', 'string_copy')
    yield (
        'Figure 8: odds first: the same',
        'a curve, trained to 40',
        lines({
            'trained to 20': in_row('prism', 'odds_first', 'all'),
            'trained to 20, seeds 3 to 7': of_runs('odds_first_prism', [40]),
            'trained to 40': in_row('prism_odds_40', 'odds_first', 'all'),
            'otherwise': in_row('prism_parts', 'odds_first', 'all'),
            'trained to 10': in_row('prism_odds', 'odds_first', 'all'),
            'with the head held that brings the even digits, seeds 0 to 2':
                even_digits('prism', 'prism', 'odds_first')}),
        'Agrees on most seeds, to twice the length. Key cursors move by half a place a token, in '
        'the prompt and on in the answer. Three seeds stop. On seed 1 the head of layer 1 that '
        'brings the even digits goes a third of a place a token and loses some; held on its '
        'places, all problems are right. On seed 4 the key cursor of that head falls behind. Of '
        'seed 6 no model is left. Trained to 10 digits, most stop at once; trained to 40, two of '
        "three before 60. With the paper's orthogonal matrix not even the trained lengths are "
        'learned. Unlike the paper: the recurrent matrix is free and starts with units that hold a '
        'bit; its state is noisy in training; gates are weighed in the loss; no cursor resets, and '
        'a head has one; the weights are averaged. Not tried: 150,000 steps.')
    yield of_chains()


def pope():
    """The claims of PoPE: rows of the table."""
    library = 'on the library, one seed'
    yield (
        'Table 1: indirect indexing',
        'RoPE 11.16 ±2.45, PoPE 94.82 ±2.91',
        lines({
            '2,500 steps': in_row('cross', 'indirect indexing', 'trained', ('rope', 'pope')),
            '2,500 steps, PoPE': in_row('ablation_pope', 'indirect indexing', 'trained',
                                        ['softplus, d frequencies, delta from anywhere']),
            plan.TWELVE: in_row('indirect', plan.TWELVE, 'trained'),
            plan.SIXTEEN: in_row('indirect_16', plan.SIXTEEN, 'trained'),
        } | at_paper_size('paper_pope', 'trained')),
        'Not seen at this size. In 2,500 steps PoPE with phases from anywhere is ahead, by less '
        "than RoPE's seeds differ; in 10,000 both learn the task on most seeds. A rate that is "
        'too high for RoPE (16 letters, 2e-3) looks like the gap.')
    yield (
        'Table 2: chorales, loss a token',
        'RoPE 0.5081, PoPE 0.4889',
        lines({
            'contexts of 512': alone('jsb', [512], 'loss'),
            'contexts of 128, here as perplexity':
                in_row('cross', 'chorales', 'trained', ('rope', 'pope'))}),
        'Not seen: with phases from anywhere, as in the paper, PoPE is level with RoPE, with '
        'phases from 0 behind. Half the layers, a quarter of the width and of the context.')
    yield (
        'Table 4: OpenWebText, perplexity: PoPE ahead',
        '124 million parameters: RoPE 21.55, PoPE 21.33',
        lines({'the library, byte by byte, contexts of 64':
               in_row('cross', 'text', 'trained', ('rope', 'pope'))}),
        'Agrees, on another text and at a thousandth of the size.')
    yield (
        'Figure 2: perplexity at 10 times the trained context: PoPE holds up, RoPE does not',
        'curves',
        listed({
            'on the library, within': alone('stdlib', [128], 'perplexity'),
            'at 10 times': alone('stdlib', [1280], 'perplexity')}),
        'Agrees in part: PoPE rises much less, but is not flat. 180,000 parameters and contexts of '
        '128 instead of 124 to 774 million and 1,024; more of the trained text instead of books; '
        'phases from 0.')
    yield (
        'Figures 3-6: RoPE uses few frequencies in all layers, PoPE behind the first layer the '
        'fast ones too',
        'maps',
        listed({
            f'{library}: share of the frequencies used': of_library('norms', '{used:.2f}'),
            'of the norm in the fast half': of_library('norms', '{fast_after_first:.2f}')}),
        'Agrees on the fast half. In contexts of 128 RoPE leaves few frequencies unused.')
    yield (
        "sections 2, 3: the distance that RoPE's logits prefer moves with the content, that of "
        "PoPE's does not",
        '',
        listed({f'{library}, interquartile range over contents, of 256 tokens:':
                of_library('tuning', '{shift:.2f}')}),
        "Agrees: all of PoPE's logits prefer the distance 0, where its phases start.")
    yield (
        'Table 8: OpenWebText: softplus and delta both contribute; without softplus the gain on '
        'RoPE is gone',
        'perplexity 21.33; without softplus 21.57, without delta 21.42 (in this order, we take it: '
        'the rows have lost their names); RoPE 21.55',
        in_rows('ablation_pope', 'trained', rows=[
            'softplus, d frequencies, delta from 0', 'no softplus, d frequencies, delta from 0',
            'softplus, d frequencies, no delta']),
        'Not comparable: other tasks, on which single rows differ by less than seeds. Means over '
        'all pairs of rows stand with [the ablation](#ablations).')
    yield (
        'section 3: phases that start at 0 matter beyond the trained length; from anywhere they do '
        'slightly better within',
        '',
        lines({'chorales, perplexity': listed({
            f'in contexts of {n}': alone('jsb', [n], 'perplexity') for n in (512, 1024, 2048)})}),
        'Agrees within. Beyond, phases from anywhere are far worse on two seeds of three, not on '
        'all.')


def toeplitz():
    """The claims of the Toeplitz study: rows of the table."""
    rows_64 = [row for row in plan.ROWS_64 if ' on ' not in row]
    partial = [row for row in plan.ROWS_64 if row.startswith('rope on')]
    distance_64, distance = 'distance:span=64', 'distance:span=16'
    counting = 'trigger_count:most=16'
    yield (
        'Figures 2, 3, Table 1: distance: RoPE best, absolute second, ALiBi struggles, NoPE and '
        'T5 at chance; counting: ALiBi worst (Figure 3), RoPE behind MLA and NoPE (Table 1; '
        'nearly with NoPE in Figure 3)',
        'distance: RoPE 92.6, MLA 88.3, NoPE 3.5; counting: RoPE 69.4, MLA 97.4, NoPE 77.7',
        lines({
            '64 tokens': in_rows('toeplitz_64', 'trained', rows=rows_64),
            'after 500, 1,000 and 1,500 of these 2,500 steps': at_steps(
                'toeplitz_64', distance_64, (500, 1000, 1500), (
                    'rope', 'rope, 4 heads', 'nope', 'ape', 't5', 'rope, std 1', 'nope, std 1',
                    'ape, std 1', 'ape+rope, std 1')),
            '16 tokens': in_rows('toeplitz', 'trained', [distance, counting]),
            '16 tokens, standard deviation of the embedding at first, causal mask or none':
                in_rows('toeplitz_scale', 'trained'),
            'counting, 2 layers':
                in_row('cross', 'counting', 'trained', ('rope', 'mla', 'nope', 'alibi')),
            'counting, 64 tokens': in_rows('counting_64', 'trained'),
        } | at_paper_size('paper_toeplitz', 'trained')),
        "Agrees in part, where embeddings start with a standard deviation of 1, PyTorch's default. "
        'RoPE is then the fastest. NoPE and T5 are slower than with 0.1. Among 64 tokens, where '
        'only RoPE, NoPE, APE and APE+RoPE were run with 1, APE+RoPE is level with RoPE; APE leads '
        'NoPE at first and is level with it in the end. ALiBi and, at 16 tokens, random vectors '
        'are level with RoPE, unlike there. Heads of 16 features instead of 8 make RoPE faster, '
        "too. With 1 and the study's recipe of 13,600 steps RoPE comes near the study's number and "
        'NoPE to less than half of it; with 0.1 they are level (one seed each). In 2,500 steps of '
        'the recipe neither learns. NoPE at chance takes more: no causal mask. By the text the '
        'study has one, so this is a guess about its code. All learn to count, with either scale '
        'and mask. On a fixed set of problems ALiBi is last, as there, but by less than seeds '
        'differ, and random vectors are first, unlike there. Not tried: batches of 512, '
        'its width, 128 tokens.')
    yield (
        'Figures 4, 5, 7, 9-11: one head of RoPE in layer 1 does nearly all (the deposit); with '
        'APE added it is in a deeper layer; NoPE, T5, ALiBi, MLA, and RoPE at counting have no '
        'such head; APE some, in shallow layers',
        'RoPE without that head: some 60 % lost, without another next to nothing',
        lines({
            'share of what all heads are worth (one by one in the table of heads below), layer by '
            'layer': head_layers('toeplitz_64', distance_64, (
                'rope', 'rope, dropout', 'rope, 8 layers', 'nope', 'nope, dropout', 'ape', 'random',
                'alibi', 't5', 'ape+rope', 'mla', 'rope, std 1', 'nope, std 1', 'ape, std 1',
                'ape+rope, std 1')),
            '16 tokens': head_layers('toeplitz', distance, (
                'rope', 'nope', 'ape', 'alibi', 't5', 'ape+rope', 'mla')),
            '16 tokens, std 1': head_layers('toeplitz_scale', 'distance, 1', SCALED),
            '16 tokens, std 1, no mask':
                head_layers('toeplitz_scale', 'distance, 1, no mask', SCALED),
            'counting': head_layers('toeplitz', counting, ('rope',))}),
        "In part. With a standard deviation of 0.1 RoPE's work is mostly in layer 1, NoPE's and "
        "T5's in deeper layers. But several heads share RoPE's; with the study's dropout one head "
        'stands out more, and the work is spread over layers. APE+RoPE has most in layer 1, too. '
        'With a standard deviation of 1 RoPE and APE+RoPE have most in layer 2, APE in layers 2 '
        'and 3; on one seed of three a single head of RoPE is worth about what the paper says, but '
        'in layer 2. Without a mask, at 16 tokens, no head stands alone either: the second costs '
        'nearly as much on two seeds of three. Among 64 tokens MLA has no such head, as there; nor '
        'has RoPE at counting.')
    yield (
        'Figures 6, 12, D.4: one or two heads with RoPE are enough, and they carry it',
        'curves',
        lines({
            'trained': in_rows('toeplitz_64', 'trained', rows=['rope', *partial]),
            'layers 1 / 2 / 3 / 4': head_layers('toeplitz_64', distance_64, partial)}),
        'Agrees that one head is enough, but so is none (NoPE). The fewer there are, the more is '
        'done in deeper layers.')
    yield (
        'Figure 8: points lost when p_i is taken out before each layer, beyond random vectors: '
        'APE in all, with RoPE only in the first two',
        'curves',
        lines({
            'percent right without p_i / without random vectors (standard deviation of four of '
            'these), before layers 1 to 4, seed 0, 64 tokens':
                without_p('toeplitz_64', distance_64),
            '64 tokens, embeddings with a standard deviation of 1, seeds 0 to 2':
                lines({f'seed {seed}': without_p('toeplitz_64', distance_64, ', std 1', seed)
                       for seed in range(3)}),
            '16 tokens': without_p('toeplitz', distance)}),
        'In part, where embeddings start with a standard deviation of 1. APE loses more without '
        'p_i than without a random vector before layer 1, on two seeds of three before layer 2, on '
        'one before layer 3, and not before layer 4. With RoPE p_i costs no more than a random '
        'vector before any layer. Where embeddings start small, p_i is nearly all of the residual '
        'stream before layer 1, and any vector of that length destroys it.')
    yield (
        'section 3.2, eq. 1, 2, B.1, B.3: logits are Gram matrices times or plus a Toeplitz '
        'matrix; RoPE, with a single Toeplitz factor, narrows the spectrum',
        'proofs',
        of_probe('toeplitz', {
            'share of variance that is Toeplitz': 'toeplitz',
            'missed by eq. 2 with a single factor, entries of modulus 1': 'G_e off',
            'with any entries': 'free G_e off',
            "spectrum's width over the content's": 'ratio'}),
        'Eq. 1 holds to rounding, and so does eq. 2 with a factor for each frequency; with a '
        'single factor it fails. B.3 fails: RoPE does not narrow the spectrum, and a test shows a '
        "counterexample; but it widens it far less than ALiBi's bias does. White noise has a "
        'Toeplitz share of 0.10.')
    yield (
        'appendix B.2: RoPE needs one significant angle only, which makes massive values of '
        'queries and keys',
        'words, after Jin et al. 2025',
        listed({'the library, one seed, largest row of W_Q, W_K over the median:': of_library(
            'norms --of=weights', '{ratio_q:.2f}, {ratio_k:.2f}', ('rope', 'pope', 'nope'),
            between='; ')}),
        "Not seen at this size: RoPE's largest is no larger than NoPE's.")
    yield (
        'section 6: A1, singular values of each Jacobian within 0 and 2; A2, a positive signal; '
        'eq. 14 and Theorem 6.1: signal to noise and the margin of the strongest head grow '
        'towards layer 1',
        'proofs',
        of_probe('gradients --steps=100', {
            'share of Jacobians that A1 fits': 'A1',
            'share of edges that A2 fits': 'A2',
            'signal to noise over the layer above, median': 'gain',
            'margin over the layer above, share above 1': 'grows'}),
        "Fails as a cause: A1 fails in layer 1, A2 is a coin's toss, the signal to noise of eq. 14 "
        'falls towards layer 1. Margins grow in little more than half of the cases (a coin: 0.5), '
        'with RoPE less often than with ALiBi.')
    yield (
        'appendix E: the sum of several distances (here of two): learned, but no RoPE goes '
        'beyond its length',
        'a sentence',
        in_row('toeplitz', 'distance_sum:span=16', 'all', ('rope', 'ape+rope', 'mla')),
        'Agrees: at twice the length fewer are right than one constant answer would get (7 %).')


def llm_position_generalization():
    """The claims of the position-generalization paper: rows of the table."""
    def summary_of(what, text):
        line = asked(what, *SMOL)
        return line and text.format(**line['summary'])

    def perplexity_up():
        line = asked('perturb', *SMOL, '--gammas=0.01,0.1', '--l_max=10,100', '--n=4',
                     '--out_dir=out/perturb_to_100')
        if not line:
            return None
        rows = {(row['kind'], row['gamma'], row['l_max']): row for row in line['rows']}
        kinds = ('text', 'tokens'), ('feature', 'keys'), ('position', 'position indices')

        def cell(kind, gamma):
            row = rows[kind, gamma, 10]
            return f'{100 * math.expm1(row["cost"]):.1f} % ({row["output"]:.2f})'
        return ('perplexity up on the same targets (and change of attention outputs), a hundredth '
                '/ a tenth disordered, within 10 places: ' + '; '.join(
                    f'{name} {cell(kind, 0.01)} / {cell(kind, 0.1)}' for kind, name in kinds))

    def slow_pairs():
        line = asked('disentangle', *SMOL)
        if not line:
            return None
        others = {row['above']: row['slow alone'] for row in line['rows']
                  if row.get('above') and row['over'] == 8192}    # tokens: SmolLM2's length
        return lines({name: text.format(**line['summary']) for name, text in {
            "additivity, these pairs' own logits with f + g":
                'as written {mean_slow_fg:.3f}, with g signed {mean_slow_signed:.3f}, with the '
                'whole of k - mean {mean_slow_whole:.3f}',
            "dominance, all logits with these pairs' own": '{mean_dominance:.3f}',
            'both, all logits with f + g':
                '{mean_r_fg:.3f}; of all pairs of features {mean_r_all:.3f}'}.items()} | {
            'dominance of pairs above other multiples of the median':
                ', '.join(f'{above}: {r:.2f}' for above, r in others.items())})

    yield (
        'eq. 2: logits are nearly sums over distance, query and key',
        '0.865',
        summary_of('axes', 'SmolLM2: {mean_r:.3f}; without the offsets of rows, which softmax '
                           'ignores, {mean_r_centred:.3f}'),
        'Holds, a little less so for what softmax sees. A smaller model, with weights of 4 bits.')
    yield (
        'eq. 12: at fake distances, sums over distance and key',
        '0.947',
        summary_of('disentangle', 'SmolLM2: {mean_r:.3f}'),
        'Holds.')
    yield (
        'eq. 15: the slow dominating pairs make the logits (dominance), and are a sum f + g '
        '(additivity)',
        '0.959 for both at once',
        slow_pairs(),
        'Additivity holds; dominance does not, under any bound on what counts as slow and '
        'dominating, for which the paper names none. So the two together fail.')
    yield (
        'Observation 1, Figure 4: a few pairs of features make the logits: their keys hardly '
        'differ, and those that start near pi turn by less than the gap to it',
        'drawings',
        summary_of('tuples', '{pairs} slow dominating pairs in {heads} of {of_heads} heads: keys '
                   'off their mean by {fixed:.2f} of it (median); {turns_less_than_gap:.2f} of '
                   'them turn by less than their gap to pi ({by_chance:.2f} if angles were random);'
                   ' {near_pi:.2f} start within pi / 4 of pi (other pairs {near_pi_others:.2f})'),
        'In part: keys differ from their mean by less than half of it, and slow pairs start near '
        'pi more often than others. That they turn by less than their gap to pi is chance: they '
        'turn little by our definition of slow (1.57 rad).')
    yield (
        'Figure 5: perplexity bears disorder',
        'from 3.688 up by 0.02 (0.5 %) with a hundredth of the tokens shuffled within 1,000 '
        'places, by 0.01 (0.3 %) with a hundredth of the position indices off by up to 10, '
        '"marginal" with a tenth',
        perplexity_up(),
        'Not seen but for a hundredth of the position indices, nearly: tokens and keys cost much '
        'more. Plays, 512 tokens at a time, on 4 stretches: few places move, and it matters which.')
    yield (
        'Table 1: answers bear it as well',
        'Qasper',
        'in [the table below](#language-models)',
        'Agrees that position indices cost least.')
    yield (
        'Figure 6: attention over a window that slides along gives outputs such as it is used to',
        'a drawing',
        summary_of('stretch', 'layer {layer}, a window of {window} of {tokens} tokens: distance to '
                   'the nearest normal output, over the usual one (median): sliding windows '
                   '{windows:.2f}, with the first tokens kept {windows with the first '
                   'tokens:.2f}; later positions {later positions:.2f}, another layer {another '
                   'layer:.2f}, features permuted {features permuted:.2f}, Gaussian '
                   '{Gaussian:.2f}'),
        'Holds if the first tokens stay in the window: its outputs are then as near as those of '
        'later positions. Without them (the drawing keeps none) they lie further out than another '
        "layer's or permuted ones. One layer, one window, two stretches of text, within the 8,192 "
        'tokens that the model was trained on; Gaussian vectors of the same covariance lie near '
        'the others, too.')


PAPERS = {
    'ViPE': vipe,
    'PRISM': prism,
    'PoPE': pope,
    'The Toeplitz study': toeplitz,
    'LLM position generalization': llm_position_generalization,
}


def claims_table():
    """A table for each paper."""
    for paper, claims in PAPERS.items():
        yield f'**{paper}**\n'
        yield '| claim | there | here | how they differ |'
        yield '|---|---|---|---|'
        for claim, there, here, difference in claims():
            yield f'| {claim} | {there} | {here or "not run yet"} | {difference if here else ""} |'
        yield ''
