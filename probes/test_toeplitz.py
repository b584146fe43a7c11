"""The Toeplitz study's probes against loops and planted answers, and its claims that hold, or fail,
whatever the model."""
import json
import math
import random

import numpy as np
import pytest
import torch

import pe
import probe
import tasks
import train
from engine.config import UserError
from model import Transformer
from probes import by_hand, core, toeplitz
from probes.conftest import at_random, nano, untouched
from test_all import close, encoding

# --------------------------------------------------------------------------------------------------
# ablate

def carried_by_one_head():
    """A model right at copy, length 1, in which head 3 of layer 2 alone brings x_1 to EoI."""
    _, task, cfg = nano('copy', pe='nope', n_head=4, train_lengths=[1], eval_lengths=[1])
    model, eye = Transformer(cfg).double().eval(), torch.eye(16)
    with torch.no_grad():
        for block in model.blocks:
            for p in (block.mlp[2].weight, block.attn.proj.weight, block.attn.qkv.weight):
                p.zero_()
        model.embedding.weight.copy_(eye[:6])
        model.blocks[1].attn.qkv.weight[2 * 16 + 8:][:2] = eye[4:6]    # head 3's value: the symbol
        model.blocks[1].attn.proj.weight[8:10, 8:10] = eye[:2, :2]
        model.head.weight[:3] = 0
        model.head.weight[3] = 1e4 * eye[4:6].sum(dim=0)    # EoS after a symbol
        model.head.weight[4:] = 100 * eye[8:10]
    return model, task, cfg


def test_ablate_finds_the_head_that_carries_the_answer():
    """Drops, summary and curves, where one head carries all, where two do, and where none does."""
    rows, summary, figure = toeplitz.ablate(*carried_by_one_head())
    assert [[row[f'drop {h}'] for h in (1, 2, 3, 4)] for row in rows] == [[0] * 4, [0, 0, 100, 0]]
    assert [row['effective'] for row in rows] == [None, 1] and summary['base'] == 100
    assert [summary[key] for key in ('layer', 'head', 'largest', 'second')] == [2, 3, 100, 0]
    assert list(figure.panels[0].lines[1][2]) == [100, 100, 0, 100]    # what is left, not the drop
    scores = iter([50.0, 60.0, 50.0, 40.0] * 2)
    model, _, cfg = carried_by_one_head()
    rows, _, _ = toeplitz.without_heads(model, cfg, 50.0, lambda hook: next(scores))
    assert list(rows[0].values()) == [1, 0, -10, 0, 10, 1]
    drops = torch.tensor([[1, 1, 1, 1], [0, 0, 7, -3], [1, 2, 3, 4]]).double()
    close(toeplitz.effective(drops), [4, 1, 100 / 30])
    model, cfg = by_hand.iteration_head('parity')
    rows, _, _ = toeplitz.ablate(model, cfg.the_task, cfg, n=64)
    assert [[row['drop 1'], row['drop 2'], row['effective']] for row in rows] == [[100, 0, 1]] * 2
    rows, summary, _ = toeplitz.ablate(*nano('polynomial', n_head=2), n=200)
    assert summary['unit'] == 'tokens right (%)' and 0 < summary['base'] < 60    # none is right
    assert any(row['drop 1'] or row['drop 2'] for row in rows)
    for flags, says in ((dict(), '--n_head=4'), (dict(what='positions'), r'pe=ape\+rope'),
                        (dict(what='layers'), 'heads, positions')):
        with pytest.raises(UserError, match=says):
            toeplitz.ablate(*nano(pe='rope'), **flags)
    with pytest.raises(UserError, match='--nope_every=0'):
        toeplitz.toeplitz(*nano(nope_every=2))


def test_ablate_takes_out_what_was_added(tmp_path):
    """Before layer 1 it leaves the same weights without an encoding; random vectors differ."""
    (tmp_path / 'text').write_text(''.join(random.Random(0).choices('abcdef', k=9999)))
    shape = dict(data=str(tmp_path / 'text'), train_lengths=[12], eval_lengths=[12])
    model, task, cfg = nano('characters', pe='random', n_head=2, **shape)
    plain = nano('characters', pe='nope', n_head=2, **shape)[0]
    plain.load_state_dict(model.state_dict(), strict=False)
    problems = core.problems(task, [12], 30)
    rows, summary, _ = toeplitz.ablate(model, task, cfg, what='positions', n=30)
    without, base = (train.evaluate(net, task, problems)[12]['loss'] for net in (plain, model))
    close(torch.tensor([rows[0]['without p'], summary['base']]), [without, base], 1e-3)
    assert abs(rows[0]['random'] - rows[0]['without p']) > 1e-3 and len(rows) == 2


# --------------------------------------------------------------------------------------------------
# logits

def test_a_planted_toeplitz_part_is_recovered():
    a, rest = at_random(3, 9), at_random(3, 9, 9, seed=1)
    for s, d in np.ndindex(3, 9):
        rest[s].diagonal(-d).sub_(rest[s].diagonal(-d).mean())
    rest = rest.triu(1) * 1e6 + rest.tril()    # what is above the diagonal does not count
    i, j = np.tril_indices(9)
    planted = torch.zeros(3, 9, 9).double()
    planted[:, i, j] = a[:, i - j]
    close(toeplitz.diagonal_means(planted + rest), a)
    close(toeplitz.toeplitz_matrix(a), planted)
    shares = planted[:, i, j].var(dim=1) / (planted + rest)[:, i, j].var(dim=1)
    close(toeplitz.variance_share(planted, planted + rest), shares)
    close(toeplitz.variance_share(rest, planted + rest), 1 - shares)
    hermitian = planted[0] + planted[0].tril(-1).T
    close(toeplitz.spectral_width(a[0]), np.ptp(np.linalg.eigvalsh(hermitian)))


def test_eq_2_wants_a_factor_for_each_frequency():
    """With one for each it is RoPE; a single G_e misses much, but nothing of one frequency."""
    q, k, pos = at_random(2, 2, 10, 8), at_random(2, 2, 10, 8, seed=1), torch.arange(10.0).double()
    theta = pe.frequencies(4, 1e4, q)
    turn = torch.polar(torch.ones(2, 10, 4).double(), (pos[:, None] * theta).expand(2, 10, 4))
    brute = np.zeros((10, 10))
    for t, s, c in np.ndindex(10, 10, 4):
        (a, b), (x, y) = q[1, 1, t, 2 * c:2 * c + 2].tolist(), k[1, 1, s, 2 * c:2 * c + 2].tolist()
        angle = (t - s) * 1e4 ** (-2 * c / 8)
        brute[t, s] += math.cos(angle) * (a * x + b * y) + math.sin(angle) * (a * y - b * x)
    L, G = toeplitz.grams(q, k, turn)
    close(L[1, 1].real, brute)
    close(G.real, q @ k.mT)
    off, missed = toeplitz.single_factor(L.real, G), 0
    i, j = np.tril_indices(10)
    for d in range(10):
        x, y = (np.concatenate([z[b, 0].diagonal(-d) for b in (0, 1)]) for z in (G, L.real))
        A = np.stack([x.real, -x.imag], axis=1)
        missed += ((A @ np.linalg.lstsq(A, y)[0] - y) ** 2).sum()
    variance = L.real[:, 0, i, j].var(correction=0)
    close(off['free G_e off'][0], missed / (variance * 2 * 55))
    assert (off['G_e off'] >= off['free G_e off']).all() and off['free G_e off'].min() > 0.05
    assert (L.real.abs() > G.abs()).double().mean() > 0.1    # which no modulus of 1 fits
    grid = torch.polar(torch.ones(10, 1).double(), pos[:, None] * torch.pi / 36).expand(2, 10, 1)
    L, G = toeplitz.grams(q[..., :2], k[..., :2], grid)
    off = toeplitz.single_factor(L.real, G)
    assert max(off['G_e off'].max(), off['free G_e off'].max()) < 1e-12
    mixed = toeplitz.single_factor((G * (0.5 * grid @ grid.mH + 1)).real, G)    # eq. 4, planted
    assert mixed['eq. 4 off'].max() < 1e-12 < 0.01 < mixed['G_e off'].min()


KINDS = [dict(pe='ape+rope', norm='rmsnorm'), dict(pe='learned+t5'), dict(pe='alibi'),
         dict(pe='fire'), dict(pe='yarn', eval_lengths=[9]), dict(pe='rope', rope_heads=1),
         dict(pe='ape+rope', attention='mla'), dict(pe='pope'), dict(pe='prism'),
         dict(pe='ape+vipe'), dict(pe='nope')]


@pytest.mark.parametrize('kw', KINDS, ids=lambda kw: '-'.join(map(str, kw.values())))
def test_toeplitz_splits_the_logits(kw):
    """Eq. 1 and 2 hold, the terms' shares add up to 1; only of encodings linear in q and k."""
    shape = dict(d_model=32, n_head=4, train_lengths=[3], eval_lengths=[3])
    model, task, cfg = nano('copy', dtype=torch.float32, **shape | kw)
    names = set(kw['pe'].split('+'))
    linear, turns = not names & {'pope', 'vipe', 'prism'}, bool(names & {'rope', 'yarn'})
    rows, summary, _ = untouched(toeplitz.toeplitz, model, task, cfg, length=8)
    assert len(rows) == 2 * cfg.heads
    assert ('error of eq. 1' in summary, 'error of eq. 2' in summary) == (linear, turns)
    assert ('eq. 4 off' in rows[0]) == ('attention' in kw)
    assert all(summary.get(f'error of eq. {n}', 0) < 1e-12 for n in (1, 2))
    for row in rows if linear else []:
        total = sum(row.get(name, 0) for name in ('qc kc', 'qc kp', 'qp kc', 'qp kp', 'B'))
        assert abs(total - 1) < 1e-3
    if kw['pe'] == 'rope':
        assert [row['G_e off'] < 1e-6 for row in rows] == [False, True, True, True] * 2
    if kw['pe'] == 'nope':    # nothing narrows or widens the spectrum
        assert summary['ratio'] == 1 and {row['spectrum'] for row in rows} == {1}


def test_latent_attention_adds_two_halves_where_eq_4_has_one_content():
    """Eq. 3: content of the first half, turned content of the second; eq. 4's form misses some."""
    model, task, cfg = nano('copy', pe='rope', attention='mla', d_model=32, n_head=4)
    layer = core.trace(model, task.sample(3, 8, torch.Generator())[0])[0]
    (q, turned_q), (k, turned_k) = layer.q.chunk(2, dim=-1), layer.k.chunk(2, dim=-1)
    part, pos = encoding('rope'), torch.arange(q.shape[2])
    turned = part.logits(turned_q, turned_k, pos) * 8 ** 0.5
    close((q @ k.mT + turned).tril() / 4, layer.logits.tril())
    assert min(row['eq. 4 off'] for row in toeplitz.toeplitz(model, task, cfg)[0]) > 0.01


def test_prop_b2_fails_for_one_distance_and_holds_for_two():
    """At one distance the contents that solve it are for RoPE those of a bias, turned: as many. But
    only with RoPE can it depend on the distance which of two contents has the larger logit."""
    q, k, pos = at_random(500, 1, 12, 8), at_random(500, 1, 12, 8, seed=1), torch.arange(12)
    bias, rope = encoding('alibi', heads=1), encoding('rope', heads=1)
    back = pe.rotate(q, -4 * pe.frequencies(4, 1e4, q).expand(12, 4))
    L, turned = bias.logits(q, k, pos)[:, 0], rope.logits(back, k, pos)[:, 0]
    solved = [[0.5 < x[s, 6, 2] and x[s, 9, 5] < -0.5 for s in range(500)]
              for x in (L - L.new_tensor(-4 / 256), turned)]    # its slope is 1/256
    assert solved[0] == solved[1] and 20 < sum(solved[0]) < 200
    close(turned[:, 6, 2], L[:, 6, 2] + 4 / 256)
    same = k[:, :, :1].expand(-1, -1, 12, -1), q[:, :, :1].expand(-1, -1, 12, -1)
    for enc, changes in ((bias, False), (rope, True)):
        L = enc.logits(same[1], same[0], pos)[:, 0, 11]    # one content at all distances
        order = (L[:250] > L[250:]).double().mean(dim=1)
        assert ((order > 0) & (order < 1)).any() == changes


def waves(w, phase):
    """Lemma B.1's f = sum_i 2 w_i cos(phase_i + i theta), and g, without phases, on a grid."""
    i, theta = np.arange(len(w)), np.linspace(0, 2 * np.pi, 4097)[:, None]
    return [(2 * np.array(w) * np.cos(x + i * theta)).sum(axis=1) for x in (np.array(phase), 0 * i)]


def test_lemma_b1_holds_only_in_its_bound():
    draw = np.random.default_rng(0)
    for _ in range(200):
        f, g = waves(draw.random(8), 2 * np.pi * draw.random(8))
        assert abs(f).max() <= abs(g).max() + 1e-9
    f, g = waves([1, 1, 1], [0, 1, 2])          # equality, and the phases differ
    assert abs(abs(f).max() / abs(g).max() - 1) < 1e-6
    f, g = waves([1, 1], [np.pi / 2] * 2)       # phases coincide, and no equality
    assert abs(f).max() / abs(g).max() < 0.9
    f, g = waves([0, 1, 1], [-np.pi / 2] * 3)   # neither 4 sum w nor the larger range
    assert abs(np.ptp(g) / 8 - 6.25 / 8) < 1e-5 and np.ptp(f) > 1.1 * np.ptp(g)


def test_prop_b3_changes_no_eigenvalue_or_widens_the_spectrum():
    """With E semidefinite, E_ij = e^(i phi (i - j)), none changes; another E widens: no proof that
    RoPE narrows. A positive definite E with |E_ij| = 1 does not exist: its 2 x 2 minors are 0."""
    W, d = torch.zeros(64).double(), torch.arange(64.0).double()
    W[:3] = torch.tensor([2.25, 1, 1])

    def spectrum(phase):
        return torch.linalg.eigvalsh(toeplitz.toeplitz_matrix(W * torch.polar(W * 0 + 1, phase)))
    plain, turned, other = (spectrum(x) for x in (0 * d, 0.7 * d, -d.clamp(max=1) * torch.pi / 2))
    assert plain[0] > 0 and (turned - plain).abs().max() < 1e-12
    assert other[-1] - other[0] > 1.1 * (plain[-1] - plain[0])


# --------------------------------------------------------------------------------------------------
# gradients

def test_gradients_at_all_edges_are_those_of_t5s_table():
    """Summed over the layers, which share the table, H(d) is the gradient by its bias."""
    model, task, cfg = nano('copy', pe='t5', n_head=2)
    tokens, targets = task.sample(3, 5, torch.Generator())
    rows, H, A2 = toeplitz.by_layer(model, tokens, targets, toeplitz.edges(task, tokens))
    train.token_losses(model(tokens)[0], targets).sum().backward()
    close(H.sum(dim=0).T, model.blocks[0].attn.pe.table.grad[:13], 1e-6)
    for row, heads in zip(rows, H.norm(dim=-1)):
        assert row['first'] == pytest.approx(heads.max().item(), rel=1e-3)
        assert row['margin'] == pytest.approx((heads.max() - heads.min()).item(), rel=1e-3)
    ratio = rows[0]['margin'] / rows[1]['margin']
    assert rows[0]['growth'] == pytest.approx(ratio, rel=2e-3) and rows[1]['growth'] is None
    assert 0 < A2 < 1


def test_the_condition_of_prop_6_1_cannot_hold():
    """a eta <= C chi: eta <= Lambda_uj <= |dl/dY_u| |V_j| <= C, a <= A_uj <= |A_u| <= chi; here
    nearly all attention goes to the anchor, whose value points the gradient's way."""
    for sharp in (0.0, 3.0, 30.0):
        S, V, dY = at_random(4, 4), 1e-3 * at_random(4, 4, seed=1), torch.zeros(4, 4).double()
        S[3, 1], V[1], dY[3] = sharp, 1.0, 1.0
        A = (S + pe.causal(S)).softmax(dim=-1)
        C = torch.linalg.matrix_norm(V, 2) * dY.norm(dim=-1).max()    # W_O = 1
        ratio = A[3, 1] * (dY @ V.T)[3, 1] / (C * A.norm(dim=-1).max())
        assert 0 < ratio <= 1
    assert ratio > 0.99


def cancellation(name, values=0.0, linear=True):
    """Prop. 6.2's two samples in one head: |g + g'| over the larger gradient at the anchor edge.

    The anchor is x_0 + t and x_0 - t, W_Q t = W_K t = 0, W_V x_0 = 0. values: size of W_V x of the
    other tokens; linear: whether the loss is linear in the head's output, or a cross-entropy."""
    W_Q, W_K, W_V = at_random(3, 4, 16)
    null_v = torch.linalg.svd(W_V)[2][4:]
    t = 3 * at_random(8, seed=1) @ torch.linalg.svd(torch.cat([W_Q, W_K]))[2][8:]
    x, away, found = 0.2 * at_random(7, 12, seed=2) @ null_v, at_random(4, seed=3), []
    x[[0, 1, 3, 4, 5, 6]] += values * at_random(6, 16, seed=4)
    for sign in (1, -1):
        z = x.clone()
        z[2] += sign * t
        S = encoding(name, heads=1, head_dim=4).logits((z @ W_Q.T)[None, None],
                                                    (z @ W_K.T)[None, None], torch.arange(7))
        S = S.detach().requires_grad_()
        y = (S.softmax(dim=-1) @ (z @ W_V.T))[0, 0, 5]
        loss = y @ away if linear else -y.log_softmax(dim=0)[0]
        found.append(torch.autograd.grad(loss, S)[0][0, 0, 5, 2])
    return (found[0] + found[1]).abs() / max(abs(x) for x in found)


def test_prop_6_2_cancels_for_alibi_and_for_rope():
    """And not for ALiBi, where other tokens have values or the loss is not linear."""
    assert cancellation('alibi') < 1e-12 and cancellation('rope') < 1e-12
    assert cancellation('alibi', values=1.0) > 0.1 and cancellation('alibi', linear=False) > 0.1


def test_jacobians_bound_those_of_the_whole_sequence():
    """A1: a block that adds nothing has singular values 1; planted growth shows, in its layer."""
    model, task, _ = nano('copy', pe='rope', n_head=2)
    tokens, targets = task.sample(2, 3, torch.Generator())
    J = toeplitz.jacobians(model, tokens, targets)
    for i, layer in enumerate(core.trace(model, tokens)):
        def block(x, i=i, layer=layer):
            return model.blocks[i](x, layer.pos, layer.state)[:, :-1]
        x = layer.stream[:1]
        whole = torch.autograd.functional.jacobian(block, x)[0, :, :, 0, :-1]
        close(J[i, 0], whole[-1, :, -1])    # the last token, EoS, is asked for and not read
        s, of_all = (torch.linalg.svdvals(z) for z in (J[i, 0], whole.flatten(2).flatten(0, 1)))
        assert of_all.min() <= s.min() + 1e-12 and of_all.max() >= s.max() - 1e-12
    with torch.no_grad():
        for block in model.blocks:
            block.attn.proj.weight.zero_()
            block.mlp[2].weight.zero_()
        model.blocks[1].attn.proj.weight += 9 * torch.eye(16)
    s = torch.linalg.svdvals(toeplitz.jacobians(model, tokens, targets)).flatten(1)
    close(s[0], torch.ones(32))
    assert s[1].max() > 2


def test_signal_to_noise_sees_a_planted_amplification():
    """Eq. 14: gradients of label d along direction d, amplified layer by layer, in white noise; a
    random subspace sees as much of everything; and the projections are those of a loop."""
    L, B, T, C, anchors = 3, 400, 6, 32, torch.arange(400)
    d = anchors % 5 + 1
    edge = anchors, torch.full_like(d, 4), torch.zeros_like(d), d
    noise, axes = at_random(L, B, T, C), torch.eye(C).double()[d]
    positive = torch.tensor([False, True, False, True, True, False])
    snr, control = toeplitz.signal_to_noise(noise, edge, positive)
    assert (snr - control).abs().max() < 0.1    # nothing is planted
    for strength in ((16, 8, 4), (4, 8, 16)):
        g = noise.clone()
        g[:, :, 4] += torch.tensor(strength)[:, None, None] * axes
        snr, control = toeplitz.signal_to_noise(g, edge, positive)
        assert torch.equal(snr.diff() > 0, torch.tensor(strength).diff() > 0)
        assert (control - (3 / 29) ** 0.5).abs().max() < 0.15 and snr.min() > 1.4 * control.max()
    means = [g[-1, (d == x) & (anchors % 2 == 0), 4].mean(dim=0).numpy() for x in (1, 3, 4)]
    U = np.linalg.qr(np.array(means).T)[0]
    for layer, found in zip(g[:, 1::2, 4].numpy(), snr):
        inside = sum(np.square(U.T @ row).sum() for row in layer)
        close(found, (inside / (np.square(layer).sum() - inside)) ** 0.5)


def test_anchors_of_two_triggers():
    task = tasks.make('distance')
    tokens, targets = task.sample(200, 12, torch.Generator().manual_seed(0))
    b, u, j, d = toeplitz.edges(task, tokens)
    assert (tokens[b, u] == task.query).all() and (targets[b, u] != -100).all()
    assert (tokens[b, j] + tokens[b, j - d] == 2 * task.first_trigger + 1).all()
    assert torch.equal(d // 4 + task.first_class, tokens[:, -1])


def test_gradients_repeats_the_first_steps_of_the_run(tmp_path):
    """After all steps it finds what it finds in the saved model; and what it refuses."""
    run = tmp_path / 'run'
    flags = dict(task='copy', pe='rope', d_model=16, n_head=2, n_layer=2, max_steps=12, seeds=3,
                 warmup_steps=2, train_lengths='1-3', eval_lengths='1-4', n_eval=8, n_test=8,
                 device='cpu', out_dir=run)
    train.main([f'--{key}={value}' for key, value in flags.items()])
    saved = (run / 'ckpt.pt').read_bytes()
    probe.main(['gradients', str(run), '--n=50'])    # as many steps as the run had
    assert (run / 'ckpt.pt').read_bytes() == saved
    rows = json.loads((run / 'probe_gradients.json').read_text())['rows']
    assert [row.pop('step') for row in rows][::2] == [0, 3, 6, 9, 12, 'trained']
    assert rows[0] != rows[8]
    for a, b in zip(rows[8:10], rows[10:]):
        assert all(b[key] == (x and pytest.approx(x, rel=1e-2)) for key, x in a.items())
    model, cfg = by_hand.iteration_head('copy')
    for args, flags, says in ((core.load(str(run)), dict(steps=13), 'this run had 12'),
                              (nano(pe='rope')[::2], dict(steps=0), '--n_head=4'),
                              ((model, cfg), dict(steps=0), 'by_hand')):
        with pytest.raises(UserError, match=says):
            toeplitz.gradients(args[0], args[1].the_task, args[1], **flags)
