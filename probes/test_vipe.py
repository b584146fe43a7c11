"""ViPE's probes against loops, and on models whose attention is known."""
import math
import statistics

import pytest
import torch

import train
from engine.config import UserError
from probes import by_hand, core, vipe
from probes.conftest import at_random, nano, untouched
from test_all import close


def head_by_hand(task):
    model, cfg = by_hand.iteration_head(task)
    return model, cfg.the_task, cfg


@pytest.mark.parametrize('name, longest', [('copy', 1000), ('parity', 999), ('polynomial', 300)])
def test_iteration_head_is_right_at_every_length(name, longest):
    """Every token of the answer right, with confidence."""
    model, task, _ = head_by_hand(name)
    for length in (1, 2, 3, 48, longest):
        tokens, targets = task.sample(2, length, torch.Generator().manual_seed(length))
        with torch.no_grad():
            assert model(tokens, targets)[1] < 1e-6


@pytest.mark.parametrize('name', ['by_hand:mode', 'by_hand:'])
def test_weights_by_hand_are_refused_without_a_rule(name):
    with pytest.raises(UserError, match=f'^{name.rstrip(":")}: .* copy, parity, polynomial'):
        core.load(name)


def test_the_iteration_head_is_seen():
    """Layer 1 looks at the anchors, layer 2 at x_t, at every length; a blunt head loses both."""
    rows, _, figure = vipe.attention(*head_by_hand('parity'), length=30, n=2)
    assert [row['length'] for row in rows] == [16] * 4 + [30] * 4
    for first, second in ((rows[0], rows[2]), (rows[4], rows[6])):    # second heads are zero
        assert first['x_to_BoS'] == first['s_to_EoI'] == second['s_to_x_t'] == 1
        assert first['s_to_BoS'] == first['s_to_x_t'] == second['x_to_BoS'] == 0
    assert [panel.title[:8] for panel in figure.panels] == ['head 1.1', 'head 2.1'] * 2
    model, task, cfg = head_by_hand('copy')
    rows, summary, _ = vipe.alignment(model, task, cfg, length=120, n=2)
    assert summary['head'] == '2.1' and rows[-1]['length'] == 120
    assert summary['right_to'] == summary['aligned_to'] == 120
    for row in rows:
        assert row['2.1'] == row['exact'] == row['states'] == 1
        assert row['1.1'] == 0 and 0 < row['2.2'] < 0.5
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:cfg.d_model] *= 1e-3
    rows, summary, _ = vipe.alignment(model, task, cfg, length=40, n=2)
    assert all(0 < row['2.1'] < 0.4 for row in rows if row['length'] > 4)
    assert summary['aligned_to'] == 0


def test_attention_and_alignment_against_loops():
    """Means over queries, on random weights, in a task where the correct key runs backwards."""
    model, task, cfg = nano('reverse', pe='rope', n_head=2)
    rows, _, _ = vipe.attention(model, task, cfg, length=6, n=3)
    mqar = nano('mqar', train_lengths=[16], eval_lengths=[20])  # answers at different places
    assert vipe.attention(*mqar, n=4)[0]
    others, found, _ = vipe.alignment(model, task, cfg, length=6, n=3)
    heads = [f'{row["layer"]}.{row["head"]}' for row in rows[:4]]
    assert found['head'] == max(heads, key=lambda head: sum(row['length'] * row[head]
                                                            for row in others))
    tokens, targets = core.problems(task, [6], 3)[6]
    layers = core.trace(model, tokens)
    for row in rows[:4]:
        a = layers[row['layer'] - 1].weights[:, row['head'] - 1].tolist()

        def mean(weight, queries, a=a):
            return pytest.approx(statistics.mean(weight(a[b], t) for b in range(3)
                                                 for t in queries), abs=6e-5)

        def entropy(a, t):
            return -sum(x * math.log(x) for x in a[t] if x)

        assert row['x_to_BoS'] == mean(lambda a, t: a[t][0], range(1, 7))
        assert row['s_to_EoI'] == mean(lambda a, t: a[t][7], range(8, 14))
        assert row['entropy'] == mean(entropy, range(7, 14))
        assert row['s_to_x_t'] == mean(lambda a, t: a[t][13 - t], range(7, 13))
        assert others[-1][f'{row["layer"]}.{row["head"]}'] == row['s_to_x_t']
        x = [math.log(n) for n in range(8, 15)]
        y = [statistics.mean(entropy(a[b], n - 1) for b in range(3)) for n in range(8, 15)]
        assert row['slope'] == pytest.approx(statistics.linear_regression(x, y).slope, abs=6e-5)
    right = (model(tokens)[0].argmax(dim=-1) == targets).double()
    assert others[-1]['states'] == pytest.approx(right[:, 7:13].mean().item(), abs=6e-5)
    # trained to 8, in all 19 tokens: the queries 13..17 are seen at length 12
    row = vipe.alignment(model, task, cfg, length=12, n=3)[0][-1]
    tokens, targets = core.problems(task, [12], 3)[12]
    right = (model(tokens)[0].argmax(dim=-1) == targets).double()
    expected = [right[:, 13:18].mean().item(), right[:, 18:25].mean().item()]
    assert [row['seen'], row['unseen']] == pytest.approx(expected, abs=6e-5)
    for name in ('mode', 'parity:steps=0'):
        other = train.Config(task=name, train_lengths=[8], eval_lengths=[8])
        for probe, flags in ((vipe.alignment, {}), (vipe.attention, dict(offset=1))):
            with pytest.raises(UserError, match='has not one correct key'):
                probe(model, other.the_task, other, **flags)


def test_slope_of_the_entropy():
    """1 for uniform attention, 0 for attention to the last two tokens, at any length."""
    _, task, cfg = nano('copy')
    tokens, targets = task.sample(2, 20, torch.Generator())
    T = tokens.shape[1]
    last_two = torch.eye(T) / 2 + torch.eye(T).roll(-1, dims=1).tril() / 2
    last_two[0, 0] = 1
    uniform = torch.ones(T, T).double().tril() / torch.arange(1, T + 1)[:, None]
    weights = torch.stack([uniform, last_two.double()]).expand(2, 2, T, T)
    means = vipe.means_of(weights, tokens, targets != -100, task, cfg, 20, 0)
    close(means['slope'], [1.0, 0.0])


def test_offset():
    """The iteration head follows the count from BoS place by place; NoPE has none to move."""
    for offset in (-3, 2):
        rows, summary, figure = untouched(vipe.attention, *head_by_hand('copy'), offset=offset, n=4)
        assert summary['head'] == '2.1' and summary['peak'] == -offset
        assert (rows[2]['moved'], rows[2]['x_t'], rows[0]['moved']) == (1, 0, 0)
        assert figure.panels[0].points[:2] == [(1, 17), (2, 18)]    # x_1 for EoI, x_2 for s_1
    model, task, cfg = nano(pe='rope')
    rows, _, _ = vipe.attention(model, task, cfg, offset=-2, length=7, n=2)
    tokens = core.problems(task, [7], 2)[7][0]
    with torch.no_grad():
        layer = core.trace(model, tokens, torch.tensor([2, *range(1, 17)]))[1]
        found = layer.weights[:, 0, range(9, 13), range(4, 8)].mean().item()    # s_1 to x_4, ..
    assert rows[1]['moved'] == pytest.approx(found, abs=6e-5)
    for name in ('nope', 'prism'):
        with pytest.raises(UserError, match='sees no positions'):
            vipe.attention(*nano(pe=name), offset=-2)
    for length, offset in ((3, -4), (8, -7), (1, 1)):     # -7: s_1 would look at x_9
        with pytest.raises(UserError, match=f'beyond the {length} inputs'):
            vipe.attention(*nano(pe='rope'), length=length, offset=offset)


def test_distances():
    """Accuracy at query L + 1 + d, and only within the trained total length of 13."""
    model, task, cfg = nano('parity', pe='nope', longest=5)
    rows, _, _ = vipe.alignment(model, task, cfg, n=20, distances='0,2')
    for row in rows:
        within = [f'd={d}' for d in (0, 2) if d < row['length'] < 11 - d]
        assert [key for key in row if 'd=' in key] == within
    assert [row['length'] for row in rows][:10] == list(range(1, 11))
    tokens, targets = core.problems(task, [7], 20)[7]
    right = (model(tokens)[0].argmax(dim=-1) == targets).double().mean(dim=0)
    expected = [right[8].item(), right[10].item()]
    assert [rows[6]['d=0'], rows[6]['d=2']] == pytest.approx(expected, abs=6e-5)
    model, task, cfg = head_by_hand('parity')
    rows, _, _ = vipe.alignment(model, task, cfg, n=4, distances='1,3,7')
    assert all(value == 1 for row in rows for key, value in row.items() if 'd=' in key)
    assert max(row['length'] for row in rows if 'd=7' in row) > 16    # trained to 16
    for flags, says in ((dict(distances='x'), 'whole numbers'),
                        (dict(distances='40'), 'within the trained 35 tokens')):
        with pytest.raises(UserError, match=says):
            vipe.alignment(model, task, cfg, **flags)


def test_ridge_and_agreement():
    """Against the normal equations; R2, Pearson's and Spearman's r by hand, where ranks tie."""
    x = at_random(200, 5) * torch.tensor([1, 10, 0.1, 1e-3, 0]) + 3
    y = x @ torch.tensor([1.0, -2, 3, 100, 0]).double() + 7
    w, b = vipe.ridge(x, y, penalty=1e-12)
    close(w[:4], [1.0, -2, 3, 100], 1e-5)
    close(x @ w + b, y, 1e-5)
    z = (x - x.mean(0))[:, :4] / x[:, :4].std(0, correction=0)
    noisy = y + at_random(200, seed=1)
    w, b = vipe.ridge(x[:, :4], noisy, penalty=0.3)
    direct = torch.linalg.inv(z.T @ z + 200 * 0.3 * torch.eye(4)) @ z.T @ (noisy - noisy.mean())
    close(x[:, :4] @ w + b, z @ direct + noisy.mean())
    assert vipe.ranks(torch.tensor([3.0, 1, 3, 3, 2])).tolist() == [4, 1, 4, 4, 2]
    found = vipe.agreement(torch.tensor([1, 2, 2, 4, 5]), torch.tensor([1.0, 3, 2, 2, 7]))
    assert found == pytest.approx(dict(
        rmse=math.sqrt(9 / 5), mae=1.0, r2=1 - 9 / 10.8, pearson=12 / math.sqrt(10.8 * 22),
        spearman=7.25 / 9.5), abs=1e-12)


def test_linear():
    """Layer 1 writes the distance to EoI: exact at 3 times the length, unlike an untrained model
    and the embedding; attention's output holds it before the stream does."""
    for of in ('stream', 'attention'):
        rows, summary, _ = vipe.linear(*head_by_hand('copy'), n=4, of=of)
        at = {(row['target'], row['layer'], row['lengths']): row for row in rows}
        assert len(rows) == 18 and at['distance', 0, 'longer']['r2'] < 0.5
        for lengths in ('trained', 'longer', '3x'):
            row = at['distance', 1, lengths]
            assert row['r2'] == row['pearson'] == 1 and row['untrained'] < 0.9
        scores = [at['distance', 2, '3x'][key] for key in ('r2', 'pearson', 'spearman')]
        # layer 2's output is the token x_t
        assert min(scores) > 0.99 if of == 'stream' else scores[0] < 0.5
    assert list(summary) == [
        f'{what}, r2 {part}' for what in ('position from layer 1', 'distance from layer 2')
        for part in ('trained', 'longer')]
    rows, _, _ = vipe.linear(*nano('string_copy', pe='ape', d_model=32), n=8)
    assert {row['target'] for row in rows} == {'position'} and rows[0]['r2'] > 0.9    # sinusoids
    assert rows[0]['untrained'] > 0.9    # which a model has without training
    noise = at_random(400, 8)
    w, b = vipe.ridge(noise[:200], torch.arange(200))
    assert vipe.agreement(torch.arange(200), noise[200:] @ w + b)['r2'] < 0.1
    short = train.Config(task='copy', train_lengths=[4], eval_lengths=[4])
    with pytest.raises(UserError, match='train with longer ones'):
        vipe.linear(nano()[0], short.the_task, short)
    with pytest.raises(UserError, match='stream, attention'):
        vipe.linear(*nano(), of='z')


def test_squeeze():
    """Beyond the trained 13 tokens positions are fractions that end where training did."""
    model, task, cfg = nano('parity', pe='ape', longest=5)
    rows, _, _ = vipe.squeeze(model, task, cfg, n=20)
    assert [row['length'] for row in rows] == list(range(1, 10))
    assert all(row['tokens'] == row['tokens, squeezed'] for row in rows[:5])
    assert rows[8]['tokens'] != rows[8]['tokens, squeezed']
    tokens, targets = core.problems(task, [9], 20)[9]    # 21 tokens
    share = (targets != -100).sum()
    squeezed = model(tokens, pos=torch.linspace(0, 12, 21))[0].argmax(dim=-1) == targets
    assert rows[8]['tokens, squeezed'] == pytest.approx((squeezed.sum() / share).item(), abs=6e-5)
    # of no encoding nothing changes; hidden: a token sees its last 13 alone, in layer 1 of 1
    model, task, cfg = nano('parity', pe='nope', longest=5, n_layer=1)
    rows, _, _ = vipe.squeeze(model, task, cfg, n=20)
    assert all(row['tokens'] == row['tokens, squeezed'] > 0 for row in rows[5:])
    windows = [model(tokens[:, max(0, t - 12):t + 1])[0][:, -1].argmax(dim=-1) for t in range(21)]
    right = (torch.stack(windows, dim=1) == targets).sum() / share
    assert rows[8]['tokens, hidden'] == pytest.approx(right.item(), abs=6e-5)
    cfg.positions = 'abacus'
    with pytest.raises(UserError, match='take a run with positions=index, not abacus'):
        vipe.squeeze(model, task, cfg)
    with pytest.raises(UserError, match='positions=index'):
        vipe.attention(*nano('parity', pe='ape', positions='randomized'), offset=2)


def test_proposition_1():
    """Gaussian values under uniform weights follow eq. 4; those of few symbols keep a variance."""
    v = torch.cat([2 + 3 * at_random(1, 200_000), 0.5 + 1.5 * at_random(19, 200_000, seed=1)])
    n = torch.arange(1, 21).double()
    for found, curve in zip(vipe.coordinate_statistics(v.cumsum(0) / n[:, None]),
                            vipe.proposition_1(n, 0.5, 1.5 ** 2, 2, 3 ** 2)):
        assert torch.allclose(found, curve[:len(found)], rtol=0.02, atol=0.005)
    model, task, cfg = nano('parity', pe='vipe', vipe_d_p=3)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:16] = 0    # no queries: uniform weights
    rows, summary, _ = vipe.prefix(model, task, cfg, n=4)
    assert len(rows) == 19 and (rows[0]['token'], rows[9]['token']) == ('BoS', 'EoI')
    for row in rows:
        for part in {'mean', 'var', 'diff'} & row.keys():
            assert row[part] == row[f'{part} 1/n']
    assert rows[-1]['var'] > 2 * rows[-1]['var eq4']
    sigma_2 = summary['sigma_2'] ** 2
    assert rows[0]['var'] == rows[0]['var eq4'] == pytest.approx(sigma_2, rel=0.01)
    with pytest.raises(UserError, match='begin with BoS'):
        vipe.prefix(*nano('string_copy', pe='nope'))
    with pytest.raises(UserError, match='every value .* is 0'):
        vipe.prefix(*head_by_hand('copy'))


def test_proposition_2():
    """z = V beta where values hang on the token alone, and not where they hold positions. D.1: NoPE
    cannot tell prefixes of equal shares apart, RoPE can; ALiBi cannot where the prefix repeats,
    since e^(-md) of both differ by one factor."""
    cases = [(['0'], ['0'] * 4), (['0', '1', '2', '3'], ['0', '1', '2', '3'] * 2)]
    cases += [(['BoS', *one], ['BoS', *other]) for one, other in cases]
    cases.append((['BoS', '0', '1', '2', '3'], ['BoS', '1', '0', '2', '3']))
    told_apart = {}
    for name in ('nope', 'rope', 'vipe', 'alibi', 'ape', 'vrope'):
        model, task, cfg = nano('polynomial', pe=name, n_head=2)
        _, summary, _ = vipe.prefix(model, task, cfg, n=4)
        assert summary['error'] > 0.1 if name in ('ape', 'vrope') else summary['error'] < 1e-12
        told_apart[name] = []
        for pair in cases:
            ids = [torch.tensor([[task.vocab.index(word) for word in words]]) for words in pair]
            (_, z, _), (_, z_2, _) = [vipe.first_layer(model, x, len(task.vocab)) for x in ids]
            told_apart[name].append(vipe.gap(z[..., -1, :], z_2[..., -1, :]) > 1e-9)
    assert told_apart['nope'] == [False, False, True, True, False]
    assert told_apart['rope'] == [False, True, True, True, True]
    assert told_apart['alibi'] == [False, False, True, True, True]


def test_a_map_has_every_token_and_the_trained_end():
    model, task, cfg = nano('polynomial', n_head=2, n_layer=1)    # trained to 19 tokens
    short, long = vipe.attention(model, task, cfg, length=40, n=1)[2].panels
    tokens = core.problems(task, [40], 1)[40][0]
    assert long.words == [task.vocab[i] for i in tokens[0]]
    assert (short.mark, long.mark) == (None, 18.5)
    head = int(long.title[7]) - 1
    with torch.no_grad():
        close(long.values, core.trace(model, tokens)[0].weights[0, head])
