"""The position-generalization paper's probes, and Llamas in place of runs."""
import cmath
import itertools
import json
import math
import random
import statistics
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pe
import probe
import train
from engine.config import UserError
from probes import core, llama, pope, position
from probes.conftest import at_random, nano, untouched
from test_all import close, encoding, make


def layer_of(enc, q, k):
    """A layer of a trace, of these queries and keys [B, H, T, D]."""
    logits = enc.logits(q, k, torch.arange(q.shape[2]))
    return types.SimpleNamespace(enc=enc, q=q, k=k, state=None, logits=logits)


def twelve_tokens():
    return torch.randint(1, 11, (1, 12), generator=torch.Generator().manual_seed(0))


def test_three_axes_solve_equation_7():
    """A sum of three axes is found whole; of any other map the fit is the least-squares one."""
    T, (i, j) = 9, torch.tril_indices(9, 9)
    a, b, c = at_random(3, T)
    W = torch.zeros(T, T).double().index_put((i, j), a[i - j] + b[i] + c[j])
    close(position.three_axes(W[None])[-1][0][i, j], W[i, j], 1e-6)
    close(position.axes_fit(W[None]), torch.ones(2, 1), 1e-9)
    design = torch.cat([F.one_hot(z, T) for z in (i - j, i, j)], dim=1).double()
    ridged = torch.cat([design, 1e-3 * torch.eye(3 * T)])    # ridge 1e-6
    W = at_random(2, T, T)
    for one, a, b, c, fit in zip(W, *position.three_axes(W)):
        aim = torch.cat([one[i, j], torch.zeros(3 * T)])
        solution = torch.tensor(np.linalg.lstsq(ridged.numpy(), aim.numpy(), rcond=None)[0])
        close(torch.cat([a, b, c]), solution, 1e-5)
        close(fit[i, j], design @ solution, 1e-7)


def test_r_centred_does_not_see_row_offsets():
    """Offsets of whole rows make r 1, and leave the row-centred r, which noise has, as it is."""
    W, offset = at_random(1, 40, 40), 1000 * at_random(1, 40, 1, seed=1)
    (r,), (centred,) = position.axes_fit(W + offset)
    assert r > 0.999 and abs(centred - math.sqrt(6 / 40)) < 0.15
    rows = [torch.cat([row[:i + 1] - row[:i + 1].mean() for i, row in enumerate(of)])
            for of in (W[0], position.three_axes(W)[-1][0])]
    close(centred, torch.corrcoef(torch.stack(rows))[0, 1], 1e-6)


def test_two_axes_are_equation_12():
    W, n = at_random(7, 7), 7
    a, b, fit = position.two_axes(W)
    close(a[3], W[3].mean() - W.sum() / (2 * n * n))
    close(b[2], W[:, 2].mean() - W.sum() / (2 * n * n))
    close(fit, a[:, None] + b)
    close(a.sum(), b.sum())    # eq. 11
    a, b = at_random(2, 7)
    close(position.two_axes(a[:, None] + b)[-1], a[:, None] + b)


@pytest.mark.parametrize('kw', [
    dict(pe='rope'), dict(pe='pope', pope_delta='uniform'), dict(pe='rope', rope_heads=2),
    dict(pe='pope', attention='mla'), dict(pe='alibi', rope_heads=1), dict(pe='yarn'),
    dict(pe='pope+alibi'), dict(pe='nope')])
def test_logits_at_other_distances(kw):
    """The encoding's own logits at the true positions; at fake ones those of a sequence there."""
    enc = make(**kw).blocks[0].attn.pe
    layer = layer_of(enc, *at_random(2, 1, enc.cfg.heads, 10, enc.cfg.head_dim))
    pos = torch.arange(10)
    below = torch.ones(10, 10, dtype=torch.bool).tril()
    close(position.logits_at(layer, pos, pos)[..., below], layer.logits[..., below])
    close(position.fake_logits(layer, 7)[:, 7 - pos[:8], pos[:8]], layer.logits[0, :, 7, :8])


def planted(n, seed=0):
    """zq, zk [1, 200, n] of random pairs, and theta [n]: the first slow, the others fast."""
    zq, zk = (torch.complex(*at_random(2, 1, 200, n, seed=seed + i)) for i in (0, 1))
    return zq, zk, torch.tensor([1e-6] + [1.0] * (n - 1)).double()


def test_slow_dominating_pairs():
    zq, zk, theta = planted(6)
    grown = zk * torch.tensor([20.0, 20, 1, 1, 1, 1])
    ratio, slow = position.slow_dominating(zq, grown, theta, 1000)
    assert slow.tolist() == [[True] + [False] * 5]    # the second dominates and is fast
    product = [(zq[0, :, c].abs().mean() * grown[0, :, c].abs().mean()).item() for c in range(6)]
    close(ratio[0, 0], product[0] / np.median(product))
    assert not position.slow_dominating(zq, grown, theta, 2e6)[1].any()
    assert not position.slow_dominating(zq, zk, theta, 1000)[1].any()
    assert not position.slow_dominating(zq, grown, theta, 1000, above=100)[1].any()


def test_analytic_f_and_g():
    """Entry by entry; and the slow part's own logits."""
    zq, zk = (torch.complex(at_random(2, 5, 3, seed=n), at_random(2, 5, 3, seed=n + 1))
              for n in (0, 2))
    kbar, theta = zk.mean(dim=1), (0.5, 0.1, 0.01)
    slow = torch.tensor([[True, True, True], [True, False, True]])
    f, g, signed, whole, own = position.analytic(
        zq, zk, torch.tensor(theta, dtype=torch.float64), slow)
    for h, i, j in itertools.product(range(2), range(5), range(5)):
        sums = np.zeros(5)
        for c in slow[h].nonzero()[:, 0].tolist():
            q, k, m = (x.item() for x in (zq[h, i, c], zk[h, j, c], kbar[h, c]))
            to_m, to_k, to_rest = (cmath.phase(q) - cmath.phase(z) for z in (m, k, k - m))
            along = abs(k) * math.cos(cmath.phase(k) - cmath.phase(m)) - abs(m)
            sums += abs(q) * np.array([
                abs(m) * math.cos(to_m + (i - j) * theta[c]), abs(k - m) * math.cos(to_k),
                along * math.cos(to_m), abs(k - m) * math.cos(to_rest),
                abs(k) * math.cos(to_k + (i - j) * theta[c])])
        close([x[h, i, j] for x in (g, signed, whole, own)], sums[1:])
        assert j > i or abs(f[h, i, j] - sums[0]) < 1e-10


def test_additivity_is_not_dominance():
    """Both hold of a large slow pair; of a small one the first only; of a fast one the second."""
    zq, zk, theta = planted(3)
    zk = zk * 0.3 + torch.tensor([1.0, 0, 0])    # the first pair has a fixed direction

    def fit(size, slow):
        pos, z = torch.arange(200), zq * torch.tensor(size)
        turn = torch.polar(torch.ones(()).double(), -(pos[:, None] - pos)[..., None] * theta)
        W = (z[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1)
        found = position.analytic_fit(W, z, zk, theta, torch.tensor([slow]))
        return dict(zip(position.FITS, found[:, 0].tolist()))
    large = fit([20.0, 1, 1], [True, False, False])
    assert min(large['slow_whole'], large['dominance']) > 0.99
    close(large['r_fg'], large['slow_fg'], 0.02)
    assert large['slow_fg'] < large['slow_signed'] < large['slow_whole']    # the sign matters
    small = fit([0.05, 1, 1], [True, False, False])
    assert small['slow_whole'] > 0.99 and max(abs(small['dominance']), abs(small['r_fg'])) < 0.2
    fast = fit([1.0, 20, 1], [False, True, False])
    assert fast['dominance'] > 0.98 and abs(fast['slow_whole']) < 0.2
    assert all(map(math.isnan, fit([1.0, 1, 1], [False] * 3).values()))    # no such pair


def test_tuples_are_all_and_tested(monkeypatch):
    """Rows for all pairs; Observation 1 holds, fails, or is as random angles make it."""
    model, task, cfg = nano(pe='rope', d_model=256, n_head=1, n_layer=4)
    found, n = {}, 128
    size = torch.tensor([1.0, 1, 30]).double().repeat(43)[:n]    # every third dominates
    for case, start in dict(at_pi=3.0, at_0=0.1, random=6.28 * at_random(n)).items():
        def pairs(enc, q, k, angle=start):
            ones = torch.ones(*q.shape[:2], n).double()
            return torch.polar(ones * size, ones * angle * (size > 1)), ones + 0j, None
        monkeypatch.setattr(position, 'polar', pairs)
        rows, found[case], _ = position.tuples(model, task, cfg, n=1)
        assert len(rows) == found[case]['pairs'] > 60
        gaps = [math.pi - abs(row['angle']) for row in rows]
        less = [row['rotation'] < gap for row, gap in zip(rows, gaps)]
        close(statistics.mean(gap < math.pi / 4 for gap in gaps), found[case]['near_pi'], 1e-3)
        close(statistics.mean(less), found[case]['turns_less_than_gap'], 1e-3)
        assert all(row['fixed'] == 0 for row in rows)
    assert found['at_0']['near_pi'] == 0 and found['at_pi']['near_pi'] == 1
    assert found['at_pi']['near_pi_others'] < 0.4    # the fast ones of those that dominate
    by_chance = found['random'].pop('by_chance')
    assert found['at_pi']['turns_less_than_gap'] < by_chance - 0.05
    assert found['at_0']['turns_less_than_gap'] == 1 > by_chance + 0.05
    assert abs(found['random']['turns_less_than_gap'] - by_chance) < 0.05


@pytest.mark.parametrize('gamma, l_max', [(0.2, 3), (0.5, 1), (1.0, 40), (0.01, 5)])
def test_draws_are_the_same_for_all_levels(gamma, l_max):
    """Shares and distances as asked for; a larger gamma moves the same and more, a larger l_max the
    same ones farther, to the same side."""
    pos, moved = torch.arange(40), []
    for seed in range(30):
        def draw(of, *level, seed=seed):
            return of(40, *level, torch.Generator().manual_seed(seed))
        order, fewer = (draw(position.transposition, g, l_max) for g in (gamma, gamma / 2))
        assert torch.equal(order[order], pos) and (order - pos).abs().max() <= l_max
        assert torch.equal(fewer[fewer != pos], order[fewer != pos])
        moved.append((order != pos).double().mean().item())
        shift, less = (draw(position.offsets, g, l_max) for g in (gamma, gamma / 2))
        assert shift.abs().max() <= l_max and (gamma < 1 or (shift != 0).all())
        assert torch.equal(less[less != 0], shift[less != 0])
        far = draw(position.offsets, gamma, 10 * l_max)
        assert torch.equal(far.sign(), shift.sign()) and (far.abs() >= shift.abs()).all()
    assert abs(statistics.mean(moved) - gamma) < (0.01 if gamma < 0.5 else 0.2)


@pytest.mark.parametrize('name', ['rope', 't5', 'alibi', 'pope', 'yarn'])
def test_positions_move_in_each_layer_by_a_draw_of_its_own(name, monkeypatch):
    """T5 shares its encoding between layers, and not the draw."""
    model, tokens, pos = make(pe=name, n_layer=2), twelve_tokens(), torch.arange(12)
    seen, offsets = [], position.offsets
    monkeypatch.setattr(position, 'offsets', lambda *args: seen.append(offsets(*args)) or seen[-1])
    y, moved = position.perturbed(model, tokens, tokens, 'position', 0.5, 5)[2:]
    assert len(seen) == 2 and not torch.equal(*seen) and not moved.any()

    def change(i, layer):
        distance = pos[:, None] - pos - seen[i]
        W = torch.cat([position.logits_at(layer, pos[t:t + 1], t - distance[t],
                                          layer.q[:, :, t:t + 1]) for t in range(12)], dim=2)
        return W + pe.causal(W)
    with torch.no_grad(), core.recording(model, change) as layers:
        model(tokens)
    close(torch.stack([layer.y for layer in layers], dim=1), y)
    before = position.perturbed(model, tokens, tokens)[2]
    assert not torch.allclose(before, y)
    close(torch.stack([layer.y for layer in core.trace(model, tokens)], dim=1), before)


@pytest.mark.parametrize('gamma', [0.0, 1.0])
@pytest.mark.parametrize('kind', position.KINDS)
def test_perturbed_and_original_have_the_same_targets(kind, gamma):
    """Before and after are of the targets that have not moved; nothing moved costs nothing."""
    model, _, cfg = nano('copy', pe='rope', longest=6)
    _, tokens, targets = core.batch(cfg.the_task, [6], 0, 5)
    before = position.perturbed(model, tokens, targets)
    after = position.perturbed(model, tokens, targets, kind, gamma, 4)
    for x, seed in ((before, 0), (after, 1)):
        x[1] = at_random(*targets.shape, seed=seed) > -1
    row, moved = position.scores(after, before, targets), after[-1]
    asked = [(i, t) for i, t in (targets != -100).nonzero().tolist()
             if t + 1 == targets.shape[1] or not moved[i, t + 1]]
    for when, x in (('', after), (' before', before)):
        losses, right = ([of[at].item() for at in asked] for of in x[:2])
        close(row['loss' + when], statistics.mean(losses), 2e-4)
        close(row['token' + when], statistics.mean(right), 2e-4)
        exact = {i: all(x[1][at] for at in asked if at[0] == i) for i, _ in asked}
        close(row['exact' + when], statistics.mean(exact.values()), 2e-4)
    close(before[0][asked[0]], train.token_losses(model(tokens)[0], targets)[asked[0]].double())
    assert len(asked) < (targets != -100).sum() if kind == 'text' and gamma else not moved.any()
    y, y0 = (x[2].transpose(2, 3).flatten(3) for x in (after, before))    # (n, L, T, H D)
    change = [statistics.mean(((y[i, j, t] - y0[i, j, t]).norm() / y0[i, j, t].norm()).item()
                              for j, t in itertools.product(range(2), (~still).nonzero()[:, 0]))
              for i, still in enumerate(moved) if not still.all()]
    close(row['output'], statistics.mean(change), 2e-4)
    assert row['output'] > 0 if gamma else row['cost'] == row['output'] == 0


@pytest.mark.parametrize('L, first', [(128, 10), (24, 3), (2, 1)])
def test_distances_laid_out_anew(L, first):
    """LM-Infinite and clamped, entry by entry; the paper's 10 first tokens in large windows."""
    q, k = at_random(2, 1, 4, 160, 8)
    layer, pos = layer_of(encoding('rope', heads=4), q, k), torch.arange(160)
    far = position.logits_at(layer, pos * 0 + L, pos * 0)
    assert position.laid_out('as trained', L) is None
    clamped, infinite = (position.laid_out(layout, L)(0, layer) for layout in position.LAYOUTS[1:])
    for t, s in itertools.product((0, L, L + 1, 155, 159), range(160)):
        own = layer.logits[..., t, s] if t - s <= L else far[..., t, s]
        assert torch.equal(clamped[..., t, s], own)
        seen = own if t - s <= L or s < first else torch.full_like(own, -math.inf)
        assert torch.equal(infinite[..., t, s], seen)


@pytest.mark.parametrize('name', ['rope', 'pope', 'alibi', 't5', 'yarn'])
def test_a_window_over_everything_is_attention(name):
    """A query at the end of a window gives what it gives there; with the first tokens kept, what
    the sequence of these tokens gives."""
    model = make(pe=name)
    tokens = twelve_tokens()
    layer, t = core.trace(model, tokens)[0], torch.tensor([11])
    close(position.sliding(layer, t, 0, 12)[0], layer.y[0, :, -1].flatten())
    other = core.trace(model, tokens[:, [0, 1, 4, 5, 6, 7]])[0]
    found = position.sliding(layer, torch.tensor([7]), 2, 6, first=2)[0]
    close(found, other.y[0, :, -1].flatten())
    assert not torch.allclose(position.sliding(layer, torch.tensor([7]), 2, 6)[0], found)


def test_nearest_sees_what_the_plane_does_not():
    """Points off the plane of the two main axes are far; held-out normal points are not."""
    points = at_random(600, 20) * torch.tensor([5.0, 4] + [0.2] * 18)
    normal, later = points[:300], points[300:]
    main = torch.linalg.svd(normal - normal.mean(dim=0))[2][:2]
    away = later.clone()
    away[:, 10] += 8.0
    inside = ((away - normal.mean(dim=0)) @ main.T / torch.tensor([5.0, 4])).square().sum(dim=1)
    assert (inside < 9.21).double().mean() > 0.97    # the old measure: of the 99 % ellipse
    assert 0.8 < position.nearest(later, normal).median() < 1.3
    assert position.nearest(away, normal).median() > 5
    assert position.nearest(normal.roll(7, dims=1), normal).median() > 3    # features permuted
    xs = normal.tolist()
    typical = statistics.median(min(math.dist(x, y) for y in xs if y is not x) for x in xs)
    close(position.nearest(later, normal)[0],
          min(math.dist(later[0].tolist(), y) for y in xs) / typical, 2e-2)


def test_what_attention_sees():
    """Which encodings have distances to move keys by; the others are refused in one line."""
    for name in pe.ENCODINGS:
        sees = position.sees_distances(make(pe=name), torch.arange(1, 10)[None])
        assert sees or name not in ('rope', 'pope', 'alibi', 't5', 'yarn')
        assert not sees or name not in ('nope', 'ape', 'fire', 'vipe')
    rope = nano(pe='rope')
    for of, subject, flags, says in (
            (position.disentangle, nano(pe='ape'), {}, 'pe=ape has not'),
            (position.stretch, nano(pe='ape'), {}, 'pe=ape has not'),
            (position.tuples, nano(pe='ape'), {}, 'RoPE and PoPE'),
            (position.perturb, rope, dict(gammas='2'), 'shares above 0'),
            (position.perturb, rope, dict(gammas='x'), 'numbers, as in'),
            (position.stretch, rope, dict(layer=3), 'layer is from 1 to 2')):
        with pytest.raises(UserError, match=says):
            of(*subject, **flags)


@pytest.mark.parametrize('kw', [dict(pe='rope', n_head=2, n_layer=1),
                                dict(pe='pope+alibi', n_head=2), dict(pe='t5', n_head=2)])
def test_probes_that_need_distances(kw):
    """Beside test_core's: sums, T5's biases; the levels and the controls that there are."""
    net, task, cfg = nano(**kw)
    for p in net.blocks[0].attn.pe.parameters():
        torch.nn.init.normal_(p)    # T5's begin as zeros
    rows, _, _ = untouched(position.disentangle, net, task, cfg, n=1)
    if pope.rotating(net.blocks[0].attn.pe):
        layer = core.trace(net, core.sequences(task, cfg.train_lengths, 0, 1)[0])[0]
        z = pope.polar(layer.enc, layer.q[0], layer.k[0])
        every = torch.ones_like(z[0][:, 0], dtype=torch.bool)
        r = position.analytic_fit(layer.logits[0], *z, every)[-1]
        close([row['r_all'] for row in rows[:2]], r, 1e-4)
    rows, _, _ = untouched(position.perturb, net, task, cfg, n=2, gammas='0.5', l_max='3,9,100')
    assert {row['l_max'] for row in rows} == {None, 3, 9}    # 19 tokens
    assert {row['kind'] for row in rows} == {'original', *position.KINDS}
    kinds = {row.get('outputs') for row in untouched(position.stretch, net, task, cfg, n=2)[0]}
    assert ('another layer' in kinds) == (cfg.n_layer > 1) and 'windows' in kinds


# --------------------------------------------------------------------------------------------------
# a Llama in place of a run

def small_llama(**kw):
    """A Llama with random weights, with shared keys."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=67, max_position_embeddings=64)
    cfg = transformers.LlamaConfig(**shape | kw, attn_implementation='eager', initializer_range=0.5)
    return transformers.LlamaForCausalLM(cfg).eval()


LLAMA3 = dict(rope_type='llama3', rope_theta=500.0, factor=4.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize('kw', [dict(), dict(head_dim=12),
                                dict(attention_bias=True, rope_parameters=LLAMA3)],
                         ids=['plain', 'wide', 'llama3'])
@torch.no_grad()
def test_a_llama_as_one_of_ours(kw):
    """q, k and logits of a trace give the attention and the output that transformers computes."""
    net = small_llama(**kw)
    tokens = torch.randint(67, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = net(input_ids=tokens, output_attentions=True, use_cache=False)
    model = llama.Llama(net)
    close(model(tokens)[0], theirs.logits, 1e-4)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    for layer, attention in zip(core.trace(model, tokens), theirs.attentions):
        assert layer.q.shape == layer.k.shape == (2, 4, 20, kw.get('head_dim', 8))
        close(layer.weights, attention, 1e-4)
        close(layer.enc.mix(layer.weights, layer.v, layer.pos, layer.state), layer.y, 1e-4)
        zq, zk, theta = pope.polar(layer.enc, layer.q[0], layer.k[0])
        turn = torch.polar(torch.ones(()), -distance[..., None] * theta)
        logits = (zq[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1) * layer.enc.scale
        close((logits + pe.causal(logits)).softmax(dim=-1), attention[0], 1e-4)
    with pytest.raises(UserError, match='positions 0, 1, 2'):
        model(tokens, pos=torch.arange(20))


def test_a_llama_from_a_folder(tmp_path, monkeypatch):
    """--hf and --text in place of a run, with every probe that takes a Llama."""
    net, tokenizers = small_llama(), pytest.importorskip('tokenizers')
    vocabulary = {f'w{i}': i for i in range(67)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token='w66'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder, text, out = tmp_path / 'net', tmp_path / 'text', tmp_path / 'out'
    net.save_pretrained(folder)
    fast = sys.modules['transformers'].PreTrainedTokenizerFast(tokenizer_object=words)
    fast.save_pretrained(folder)
    tokens = [f'w{random.Random(i).randrange(1, 66)}' for i in range(200)]
    text.write_text(' '.join(tokens))
    model, cfg = llama.load(str(folder), str(text))
    for function in probe.LLAMA:
        given = dict(gammas='0.5', l_max='3') if function is position.perturb else {}
        rows, summary, _ = function(model, cfg.the_task, cfg, length=16, **given)
        assert summary and (rows or function is position.tuples)
    row, = core.sequences(cfg.the_task, [16], 0, 1)
    assert [f'w{i}' for i in row[0].tolist()] in [tokens[i:i + 16] for i in range(len(tokens))]
    where = [f'--hf={folder}', f'--text={text}', f'--out_dir={out}']
    drawn, sequences = [], core.sequences
    monkeypatch.setattr(core, 'sequences', lambda *args: drawn.append(args[-1]) or sequences(*args))
    for flag in ([], ['--n=3']):
        probe.main(['axes', *where, '--length=16', *flag])
    assert drawn == [1, 3] and len(json.loads((out / 'probe_axes.json').read_text())['rows']) == 8
    for argv, says in (
            (['axes', *where, '--seed=3'], 'has one only'),
            (['axes', 'run', where[1]], '--text is the text'),
            (['axes', where[0]], 'needs --text'),
            (['axes', where[0], '--text=none'], 'no such file or folder: none'),
            (['axes', '--hf=none', where[1]], 'no such file or folder: none'),
            (['axes', f'--hf={tmp_path}', where[1]], 'cannot load'),
            (['axes', 'run', where[0]], 'not both'),
            (['cursor', where[0]], 'looks into runs only')):
        with pytest.raises(UserError, match=says):
            probe.main(argv)


def test_a_llamas_token_0_is_a_token():
    text = object.__new__(llama.LlamaText)
    text.begin, text.vocab = [2], list('!ab')
    tokens, targets = text.lay_out([[0, 1], [1, 0, 1, 0, 1]], 5)
    assert tokens.tolist() == [[2, 0, 1, 0, 0], [2, 1, 0, 1, 0]]
    assert targets.tolist() == [[0, 1, -100, -100, -100], [1, 0, 1, 0, -100]]


def test_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    (tmp_path / 'x.gguf').touch()
    with pytest.raises(UserError, match='pip install transformers gguf accelerate'):
        probe.main(['axes', f'--hf={tmp_path / "x.gguf"}', f'--text={tmp_path / "x.gguf"}'])
