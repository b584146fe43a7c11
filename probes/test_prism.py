"""PRISM's probe."""
from types import SimpleNamespace

import pytest
import torch

import pe as encodings
import tasks
from engine.config import UserError
from probes import core, prism
from probes.conftest import nano, untouched


def gates_by_hand():
    """A model of string_copy whose gates hang on biases alone: query cursors always step up, key
    cursors stay."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, dtype=torch.float32, longest=3)
    cursors = model.blocks[0].attn.pe.cursors
    with torch.no_grad():
        cursors.W.weight.zero_()
        query, key = cursors.W.bias.view(2, cursors.count, 4)
        query.copy_(torch.tensor([-30.0, 9, 0, 0]))
        key.copy_(torch.tensor([-30.0, 0, 0, 9]))
    return model, task, cfg


def test_gates_set_by_hand_are_seen():
    """Moves 1 and 0, always, in prompt and answer; and the modes are where the gates lead."""
    model, task, cfg = gates_by_hand()
    rows, summary, _ = untouched(prism.cursor, model, task, cfg, length=20)
    count = model.blocks[0].attn.pe.cursors.count
    assert [(row['of'], row['part'], row['moves'], row['steady']) for row in rows] == (
        [('query', 'prompt', 1.0, 1.0), ('query', 'answer', 1.0, 1.0)] * count +
        [('key', 'prompt', 0.0, 1.0), ('key', 'answer', 0.0, 1.0)] * count)
    assert all(abs(row['incr'] + row['decr'] + row['keep'] - 1) < 0.002 for row in rows)
    assert summary['steady'] == 1 and summary['length'] == 20
    tokens = task.sample(2, 4, torch.Generator())[0]
    for c in prism.cursors_of(model, tokens):
        offset = c['histogram'].argmax(dim=-1) - tokens.shape[1]
        assert torch.equal(offset[0], torch.arange(1, 11) * (c['of'] == 'query'))


def test_a_key_cursor_at_half_a_place_in_the_prompt_shows(monkeypatch):
    """It moves in the prompt only; over the answer alone it would read as standing still."""
    model, task, cfg = gates_by_hand()
    found = prism.cursors_of(model, task.sample(1, 20, torch.Generator())[0])

    def half_a_place(model, tokens):
        T = tokens.shape[1]
        offset = torch.arange(T).clamp(max=19) // 2
        for c in found:
            c['histogram'] = torch.eye(2 * T + 1)[offset + T].expand(len(tokens), -1, -1)
            c['gates'] = dict.fromkeys(('incr', 'decr'), torch.zeros(tokens.shape))
        return found

    monkeypatch.setattr(prism, 'cursors_of', half_a_place)
    rows, summary, _ = prism.cursor(model, task, cfg, length=20, n=2)
    for row in rows:
        pace = 0.5 if row['part'] == 'prompt' else 0
        assert row['moves'] == pytest.approx(pace, abs=0.05)
        assert row['steady'] < 0.6 if pace else row['steady'] == 1
    assert summary['steady'] < 0.8    # key cursors count by the prompt


def test_pace():
    drift, everywhere = torch.tensor([[0, 1, 1, 2, 2, 3]]), torch.ones(1, 6, dtype=torch.bool)
    assert prism.pace(drift, everywhere) == pytest.approx((0.6, 0.6))
    assert all(x != x for x in prism.pace(drift, ~everywhere))


def test_cursors_of_two_layers_with_a_copy_branch():
    """Each layer of prism_layers has cursors of its own; every fifth query cursor can jump."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, prism_copy='fixed', n_layer=2,
                            prism_layers=[1, 2], dtype=torch.float32, longest=3)
    rows, summary, figure = untouched(prism.cursor, model, task, cfg, length=5, n=3)
    assert len(rows) == 2 ** 5 and summary['length'] == 5 and len(figure.panels) == 6
    assert [row['layer'] for row in rows if row['of'] == 'query'] == [1] * 8 + [2] * 8
    jumps = [list(row.values())[:4] for row in rows if 'jump' in row]    # layer, head, cursor, of
    assert jumps[::2] == jumps[1::2] == [[1, 1, 1, 'query'], [2, 1, 1, 'query']]
    with torch.no_grad():    # layer 1 steps up, whatever it reads
        cursors = model.blocks[0].attn.pe.cursors
        cursors.W.bias.add_(1000 * torch.eye(4)[1].repeat(2 * cursors.count))
    moved = prism.cursor(model, task, cfg, length=5, n=3)[0]
    assert [row['incr'] == 1 for row in moved[:16]] == [row['layer'] == 1 for row in rows[:16]]


def test_the_first_wrong_token_is_found():
    """Planted: in every second problem the second token of the answer is wrong, and the last."""
    _, task, cfg = nano('string_copy', longest=3)

    def answers(tokens):
        targets = core.batch(task, cfg.train_lengths, 4, 8)[2]
        said = torch.where(targets >= 0, targets, 0)
        place = (targets >= 0).cumsum(dim=1) * (targets >= 0)
        planted = ((place == 2) | (place == 5)) & (torch.arange(8) % 2 == 0)[:, None] & plant
        return torch.nn.functional.one_hot(torch.where(planted, said + 1, said), 70),

    plant = True
    rows, summary, figure = prism.errors(answers, task, cfg, length=4, n=8)
    assert [(row['place'], row['wrong']) for row in rows] == [(2, 4)]
    assert rows[0]['got'] != rows[0]['wanted'] and rows[0]['before'].split()[2] == '='
    rate = 1 / 5
    even = sum(p * (1 - rate) ** (p - 1) for p in range(1, 6)) / (1 - (1 - rate) ** 5) * rate
    assert summary == dict(length=4, exact=0.5, share=0.4, even=pytest.approx(even / 5, abs=1e-4),
                           digit=0.875, end=0.5)
    right, failed = [y for _, _, y, _ in figure.panels[0].lines]
    assert right == [1, 0.5, 1, 1, 0.5] and failed == [0, 0.5, 0.5, 0.5, 0.5]
    plant = False
    rows, summary, _ = prism.errors(answers, task, cfg, length=4, n=8)
    assert rows == []
    assert summary == dict(length=4, exact=1.0, share=None, even=None, digit=1.0, end=1.0)


COMPUTED = {'repetition', 'end of a clause', 'pair or end of group', 'height that saw one symbol',
            'height that saw 0 and 1'}


@pytest.mark.parametrize('name', prism.PARTS)
def test_what_an_answer_reads_stands_there(name):
    """Every token stands at all the places given for it, unless it is computed from them."""
    task, seen = tasks.make(name), set()
    for length in (1, 2, 5, 12, 30):
        tokens, targets = task.sample(32, length, torch.Generator().manual_seed(0))
        for b, t, kind, places in prism.parts_of(task, SimpleNamespace(task=name), tokens,
                                                 targets != -100):
            assert all(place <= t for place in places)
            if places and kind not in COMPUTED:
                assert {tokens[b, place].item() for place in places} == {targets[b, t].item()}
                seen.add(kind)
    assert seen or name == 'stack'


def test_parts_by_hand():
    """The stack 01: 1 is popped and 0 pushed, so height 2 saw both. Addition, 3 digits and 2: the
    second pair of the first group; SCAN: the second "walk"."""
    assert prism.parts_of_stack('0123', '00200.') == [
        ('height that saw 0 and 1', [3]), ('height that saw one symbol', [0]),
        ('2 below the stack', []), ('zeros', []), ('zeros', []), ('end', [])]
    parts = prism.parts_of_addition('33+497', '3407,3912,0708→728.')
    assert parts[5:12] == [('digit of a', [1]), ('digit of b', [4]), ('carry', []),
                           ('digit of a + b', []), ('separator', []), ('zero past a', []),
                           ('digit of b', [5])]
    assert parts[15:] == [('sum', [10]), ('sum', [15]), ('sum', [20]), ('end', [])]
    parts = prism.parts_of_multiplication('9x13', '9x[1*(1+1)(3+0)+3*(3+1)].')
    assert parts[11:16] == [('digit of a pair', [3]), *[('mark', [])] * 3,
                            ('pair or end of group', [4])]
    assert parts[19] == ('digit of a pair', [3, 16])
    prompt, _, answer = 'walk twice = walk + walk → walk : I_WALK walk : I_WALK .'.partition(' = ')
    parts = prism.parts_of_scan(prompt.split(), answer.split())
    assert parts[2] == ('word of the command', [0, 3]) and parts[7] == (
        'word of a clause', [0, 3, 5, 7])


def test_the_cursor_that_strays_is_found(monkeypatch):
    """Copying by hand: key cursors count the prompt, query cursors the answer from "=" on. Planted:
    those of head 1.2 stand still from the fifth digit on. A digit is right if this head sees it."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, dtype=torch.float32, longest=3)
    prism_of = model.blocks[0].attn.pe
    cursors = prism_of.cursors

    def gates(x):
        B, T, _ = x.shape
        reset, step = torch.zeros(B, 2 * cursors.count, T), torch.zeros(B, 2 * cursors.count, T, 3)
        equals = T // 2 - 1
        reset[:, :cursors.count, equals] = 1
        step[..., 0] = 1
        step[:, 2:cursors.count, equals + 4:] = torch.tensor([0.0, 0, 1])
        return reset, step, None

    def right(model, tokens, targets):
        seen = []
        with core.hooked((model.blocks[0].attn.tap_logits, lambda tap, args, y: seen.append(y))):
            model(tokens)
        equals = tokens.shape[1] // 2 - 1
        found = torch.ones(tokens.shape, dtype=torch.bool)
        weights = seen[0][:, 1].softmax(dim=-1).diagonal(-equals, 1, 2)     # of the key t - equals
        found[:, equals:-2] = weights[:, :-2] > 0.5
        return found

    monkeypatch.setattr(cursors, 'gates', gates)
    monkeypatch.setattr(core, 'answers_right', right)
    with torch.no_grad():
        prism_of.m.fill_(-30)   # places alone
        prism_of.alpha.copy_(torch.tensor([[8.0, 7], [16, 14]])[:, None])
    (row,), summary, figure = untouched(prism.reads, model, task, cfg, length=6, n=3)
    assert (row['kind'], row['cursor'], row['right']) == ('digit', '1.2.1', 0.6667)
    assert row['weight'] > 0.9 and row['weight_right'] > 0.9 and row['weight_wrong'] < 0.1
    assert (row['met'], row['met_right'], row['met_wrong']) == (1, 1, 0)
    assert (row['looks'], row['often']) == (-2, 0.5)      # of -1 and -2, which are as common
    assert (row['held'], row['control']) == (1, 0)
    assert summary == dict(length=6, exact=0, kind='digit', held=1)
    (_, _, weights, _), = figure.panels[0].lines
    assert [weight > 0.9 for weight in weights] == [True] * 4 + [False] * 2


def test_the_second_number_looks_for_the_plus():
    task = tasks.make('addition_cot')
    tokens = task.encode('33+497=3407,3912,0708→728.')[None]
    asked = torch.arange(tokens.shape[1])[None] >= 6
    asked[:, -1] = False
    found = list(prism.readers(task, SimpleNamespace(task='addition_cot'), tokens, asked))
    assert found[-3:] == [(0, t, 'second part of the prompt', [2]) for t in (3, 4, 5)]
    assert found[0] == (0, 6, 'digit of a', [0])


def test_the_answer_takes_up_even_digits():
    """Token i of the answer, "=" the first, looks at place 0, 0, 2, 2, 4."""
    task = tasks.make('odds_first')
    tokens = task.encode('01234=13024.')[None]
    asked = torch.arange(tokens.shape[1])[None] >= 5
    asked[:, -1] = False
    found = prism.readers(task, SimpleNamespace(task='odds_first'), tokens, asked)
    taken = [(t, places) for _, t, kind, places in found if kind == prism.CARRIED]
    assert taken == [(6, [0]), (7, [0]), (8, [2]), (9, [2]), (10, [4])]


def test_the_cursor_that_needs_fractions_is_found(monkeypatch):
    """Planted: answers are right while one key cursor takes fractions of steps."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, dtype=torch.float32, longest=3)
    cursors = model.blocks[0].attn.pe.cursors
    latest, asked = {}, []

    def scan(x, table):
        reset, step, _ = cursors.gates(x)
        latest.update(reset=reset, step=step)
        return encodings.cursor_scan(reset, step, None, table)

    def right(model, tokens, targets):
        model(tokens)
        asked.append(dict(latest))
        return torch.full(tokens.shape, latest['step'][0, cursors.count + 2, -1].max() < 0.9)

    monkeypatch.setattr(cursors, 'scan', scan)
    monkeypatch.setattr(core, 'answers_right', right)
    rows, summary, _ = untouched(prism.whole, model, task, cfg, n=2)
    assert [row['cursor'] for row in rows[:3]] == ['none', 'all', 'key 1.2.1']
    assert [row['longer'] for row in rows] == [1, 0, 0] + [1] * (2 * cursors.count - 1)
    assert summary == dict(trained=3, longer=6, plain=1, all=0, worst=0, cursor='key 1.2.1')
    plain, _, whole, *_ = asked     # at both lengths as it is, then with all gates whole
    assert torch.allclose(whole['reset'], plain['reset'].round())
    assert torch.allclose(whole['step'], torch.eye(3)[plain['step'].argmax(dim=-1)])


def test_the_cursor_whose_gates_count_digits_is_found(monkeypatch):
    """Planted: answers are right if query cursor 1.2.1 does at the fourth to sixth digit of a
    number what it does at the third, the last that training had."""
    model, task, cfg = nano('addition_cot', pe='prism', n_head=2, dtype=torch.float32, longest=3)
    cursors, latest = model.blocks[0].attn.pe.cursors, {}

    def scan(x, table):
        reset, step, _ = cursors.gates(x)
        latest.update(step=step)
        return encodings.cursor_scan(reset, step, None, table)

    def right(model, tokens, targets):
        model(tokens)
        found = []
        for row, step in zip(tokens.tolist(), latest['step'][:, 2]):
            a, b = ''.join(task.vocab[i] for i in row).split('=')[0].split('+')
            found.append(all(torch.equal(step[start + i], step[start + 2])
                             for start, x in ((0, a), (len(a) + 1, b)) for i in range(3, len(x))))
        return torch.tensor(found)[:, None].expand(tokens.shape)

    monkeypatch.setattr(cursors, 'scan', scan)
    monkeypatch.setattr(core, 'answers_right', right)
    rows, summary, _ = untouched(prism.frozen, model, task, cfg, n=40)
    assert [row['cursor'] for row in rows[:3]] == ['none', 'all', 'query 1.2.1']
    assert [row['exact'] for row in rows] == [0, 1, 1] + [0] * (2 * cursors.count - 1)
    assert summary == dict(length=6, plain=0, all=1, best=1, cursor='query 1.2.1')
    model, task, cfg = nano('stack', pe='prism')
    with pytest.raises(UserError, match='not those of stack'):
        prism.frozen(model, task, cfg)


@pytest.mark.parametrize('kw', [{}, dict(prism_sharpen=False), dict(prism_copy='trained')])
def test_kernel_compares_eq_6_and_the_mean_place_with_what_is_right(kw):
    """With loops; and nothing differs where cursors are sure."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, longest=3, **kw)
    rows, summary, figure = untouched(prism.kernel, model, task, cfg)
    assert summary['rises'] == 4 and len(figure.panels) == 2      # of 32 features
    _, tokens, targets = core.batch(task, cfg.train_lengths, 3, 1)
    T, start = 8, 3                                               # abc=abc. and its "="
    for c, row in zip(prism.cursors_of(model, tokens), rows):
        if 'jump' in c['gates']:
            assert row['eq6'] is None
            continue
        h = c['histogram'][0].tolist()
        torch.testing.assert_close(prism.displacement(c, 0), c['histogram'][0, -1].double())
        apart = 0.0
        law = prism.displacement(c, start + 1).tolist()           # -4..4
        for d in range(-2 * T, 2 * T + 1):
            eq_6 = sum(h[start][i] * h[-1][i + d] for i in range(2 * T + 1) if 0 <= i + d <= 2 * T)
            apart += abs(eq_6 - (law[d + 4] if abs(d) <= 4 else 0)) / 2
        assert row['eq6'] == pytest.approx(apart, abs=1e-3) and apart > 0.01
        assert row['mean'] > 0.05

    sure, task, cfg = gates_by_hand()
    rows, *_ = untouched(prism.kernel, sure, task, cfg)
    assert all(row['peak'] > 0.999 and row['eq6'] < 1e-3 and row['mean'] < 1e-3 for row in rows)
