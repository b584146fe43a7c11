"""Contracts, not snapshots. `python -m pytest test_all.py` runs all of it on a CPU in a few minutes."""
import cmath
import concurrent.futures
import doctest
import itertools
import math
import os
import random
import re
import statistics
import subprocess
import sys
import warnings

os.environ.setdefault('OMP_NUM_THREADS', '1')            # in what follows, too: two threads mostly wait for each other on tensors as small as these
import pytest
import torch
import torch.nn.functional as F

import kernels
import pe
import tasks
from engine import data
from model import ModelConfig, Transformer

HERE = os.path.dirname(os.path.abspath(__file__))

# every encoding, and every switch that changes what one computes
VARIANTS = {name: dict(pe=name) for name in pe.ENCODINGS} | {
    'yarn beta': dict(pe='yarn', yarn_beta_fast=3.0, yarn_beta_slow=0.5), 't5 24': dict(pe='t5', t5_buckets=24, t5_max_distance=40),
    'fire 64': dict(pe='fire', fire_width=64), 'rope base': dict(pe='rope', rope_base=100.0),
    'pope uniform': dict(pe='pope', pope_delta='uniform'), 'pope no delta': dict(pe='pope', pope_delta='none'),
    'pope no softplus': dict(pe='pope', pope_softplus=False), 'pope half': dict(pe='pope', pope_frequencies='half'), 'vipe s one': dict(pe='vipe', vipe_s='one'),
    'vipe s global': dict(pe='vipe', vipe_s='global', eval_len=40), 'vipe as': dict(pe='vipe', vipe_g='as'),
    'vipe as+b': dict(pe='vipe', vipe_g='as+b'), 'vipe rational': dict(pe='vipe', vipe_g='rational'),
    'vipe logits only': dict(pe='vipe', vipe_value=False), 'vipe value only': dict(pe='vipe', vipe_logn=False, vipe_u=False),
    'vipe d_p': dict(pe='vipe', vipe_d_p=5), 'ape+rope': dict(pe='ape+rope'), 'pope+vipe': dict(pe='pope+vipe'),
    'pope+alibi': dict(pe='pope+alibi'), 'vrope+vipe': dict(pe='vrope+vipe'), 'vipe+vrope': dict(pe='vipe+vrope'), 't5+fire': dict(pe='t5+fire'),
    'rope on 1 head': dict(pe='rope', rope_heads=1), 'pope+vipe on 3 heads': dict(pe='pope+vipe', rope_heads=3),
    'alibi on 2 heads': dict(pe='alibi', rope_heads=2), 'mla rope': dict(pe='rope', attention='mla'),
    'prism copy': dict(pe='prism', prism_copy='fixed'), 'prism copy trained': dict(pe='prism', prism_copy='trained', prism_sharpen=False),
    'prism absolute': dict(pe='prism', prism_absolute=True, prism_norm='unit'), 'prism two layers': dict(pe='prism', prism_layers=[1, 2]),
    'prism orthogonal': dict(pe='prism', prism_recurrent='orthogonal'), 'prism norm': dict(pe='prism', prism_recurrent='norm', prism_norm='scale'),
    'prism no reset, mean': dict(pe='prism', prism_reset=False, prism_superpose=False), 'prism penalty+rope': dict(pe='prism+rope', prism_recurrent='penalty'), 'prism on 2 heads': dict(pe='prism', rope_heads=2),
    'mla pope+vipe': dict(pe='pope+vipe', attention='mla'), 'mla rope on 1 head': dict(pe='rope', attention='mla', rope_heads=1)}
variants = pytest.mark.parametrize('kw', VARIANTS.values(), ids=VARIANTS)
TRAIN_LEN = 12


def make(dtype=torch.float64, seed=0, **kw):
    """A small model, its encoding's parameters moved off their starting values, so that nothing is tested at a special point."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**dict(dict(d_model=32, n_head=4, vocab_size=11, train_len=TRAIN_LEN, max_len=64), **kw))).to(dtype)
    with torch.no_grad():
        for block in model.blocks:
            for p in block.attn.pe.parameters():
                p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def encoding(name, heads=2, head_dim=8, **kw):
    torch.manual_seed(0)
    return pe.build(pe.PEConfig(pe=name, d_model=heads * head_dim, n_head=heads, **kw)).double().eval()


def qkv(heads=2, T=10, head_dim=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return (*(torch.randn(2, heads, T, head_dim, generator=g, dtype=torch.float64) for _ in range(3)), torch.arange(T))


def gpu(test):
    """Marks a test that needs one."""
    with warnings.catch_warnings(action='ignore'):
        return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')(test))


def close(a, b, tol=1e-10):
    assert torch.allclose(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=tol, atol=tol)


TINY = dict(d_model=16, n_layer=1, batch_size=8, max_steps=12, eval_interval=4, log_interval=2, train_lengths='1-3', eval_lengths='1-5',
            n_eval=8, n_test=16, warmup_steps=2, device='cpu')


def flags(**kw):
    return [f'--{key}={value}' for key, value in {**TINY, **kw}.items()]


def python(*argv, **kw):
    return subprocess.run([sys.executable, *argv], cwd=HERE, capture_output=True, text=True, **kw)


def pythons(*argvs):
    """python() of each at the same time, two by two."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda argv: python(*argv), argvs))


# ---------------------------------------------------------------------------------------------------------------------
# pe.py: each encoding against its equation, in loops and in float64

def loop_logits(q, k, score):
    """[B, H, T, T] from score(h, q_t, k_s, t, s), -inf above the diagonal."""
    B, H, T, _ = q.shape
    out = torch.full((B, H, T, T), -math.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                for s in range(t + 1):
                    out[b, h, t, s] = score(h, q[b, h, t].tolist(), k[b, h, s].tolist(), t, s)
    return out


def dot(q, k):
    return sum(x * y for x, y in zip(q, k))


def rope_score(theta, d=8):
    def score(h, q, k, t, s):
        pairs = [(complex(q[2 * c], q[2 * c + 1]), complex(k[2 * c], k[2 * c + 1])) for c in range(d // 2)]
        return sum((a.conjugate() * b * cmath.exp(1j * (s - t) * theta[c])).real for c, (a, b) in enumerate(pairs)) / math.sqrt(d)
    return score


def test_nope_is_plain_attention():
    q, k, v, pos = qkv()
    close(encoding('nope').logits(q, k, pos), loop_logits(q, k, lambda h, q, k, t, s: dot(q, k) / math.sqrt(8)))


def test_rope():
    q, k, v, pos = qkv()
    close(encoding('rope').logits(q, k, pos), loop_logits(q, k, rope_score([10000 ** (-2 * c / 8) for c in range(4)])))


@pytest.mark.parametrize('T, train_len, d', [(10, 12, 8), (40, 12, 8), (99, 35, 32), (400, 100, 64)])
def test_yarn(T, train_len, d):
    enc = encoding('yarn', head_dim=d, train_len=train_len)
    s = max(1, T / train_len)
    theta = []
    low = max(math.floor(d * math.log(train_len / (32 * 2 * math.pi)) / (2 * math.log(10000))), 0)
    high = min(math.ceil(d * math.log(train_len / (1 * 2 * math.pi)) / (2 * math.log(10000))), d - 1)
    for c in range(d // 2):
        w = min(max((c - low) / (high - low), 0), 1)
        theta.append(10000 ** (-2 * c / d) * ((1 - w) + w / s))
    close(enc.scaled_frequencies(s, torch.zeros(1, dtype=torch.float64).expand(1, d)), theta)
    q, k, v, pos = qkv(T=10, head_dim=d)
    temperature = 0.1 * math.log(s) + 1
    close(enc.logits(q, k, pos, enc.state(None, pos, T)), temperature ** 2 * loop_logits(q, k, rope_score(theta, d)))


def test_yarn_against_published_values():
    """transformers 5.23, _compute_yarn_parameters: dim 16, original length 128, factor 10, base 10000."""
    theta = encoding('yarn', head_dim=16, train_len=128).scaled_frequencies(10.0, torch.zeros(1, 16, dtype=torch.float64))
    close(theta, [1.0, 0.221359, 0.04, 0.003162, 0.001, 0.000316, 0.0001, 0.000032], 1e-6)


@pytest.mark.parametrize('delta', ['zero', 'uniform', 'none'])
@pytest.mark.parametrize('softplus, number', [(True, 'all'), (False, 'all'), (True, 'half')])
def test_pope(delta, softplus, number):
    enc = encoding('pope', pope_delta=delta, pope_softplus=softplus, pope_frequencies=number)
    if delta == 'zero':
        with torch.no_grad():
            enc.delta.copy_(torch.linspace(-8, 1, 16).view(2, 8))                        # beyond both bounds
    q, k, v, pos = qkv()
    mu = (lambda x: math.log1p(math.exp(x))) if softplus else (lambda x: x)
    phase = (lambda h, c: min(max(enc.delta[h, c].item(), -2 * math.pi), 0)) if delta != 'none' else (lambda h, c: 0)
    close(enc.logits(q, k, pos), loop_logits(q, k, lambda h, q, k, t, s: sum(
        mu(q[c]) * mu(k[c]) * math.cos((s - t) * 10000 ** (-(c if number == 'all' else c // 2 * 2) / 8) + phase(h, c)) for c in range(8)) / math.sqrt(8)))


def test_pope_delta_start():
    assert (encoding('pope').delta == 0).all()
    delta = encoding('pope', heads=16, pope_delta='uniform').delta
    assert -2 * math.pi <= delta.min() < -5 and -1 < delta.max() <= 0


def test_alibi_slopes():
    """The published slopes: powers of two, and 12 heads as in BLOOM's and MPT's code."""
    slope = lambda heads: encoding('alibi', heads=heads).slope.tolist()
    assert slope(8) == [2.0 ** -h for h in range(1, 9)] and slope(1) == [2.0 ** -8]
    close(slope(12), [2.0 ** -h for h in range(1, 9)] + [2.0 ** -0.5, 2.0 ** -1.5, 2.0 ** -2.5, 2.0 ** -3.5], 1e-6)
    q, k, v, pos = qkv()
    close(encoding('alibi').logits(q, k, pos), loop_logits(q, k, lambda h, q, k, t, s: dot(q, k) / math.sqrt(8) - 2.0 ** (-4 * (h + 1)) * (t - s)))


@pytest.mark.parametrize('buckets, max_distance', [(32, 128), (24, 128), (32, 64), (7, 20)])
def test_t5(buckets, max_distance):
    def bucket(d):
        exact = buckets // 2
        if d < exact:
            return d
        return min(buckets - 1, exact + int(math.log(d / exact) / math.log(max_distance / exact) * (buckets - exact)))
    enc = encoding('t5', t5_buckets=buckets, t5_max_distance=max_distance)
    assert enc.float().bucket(torch.arange(1000)).tolist() == [bucket(d) for d in range(1000)]
    enc = enc.double()
    torch.nn.init.normal_(enc.table)
    q, k, v, pos = qkv(T=25)
    close(enc.logits(q, k, pos), loop_logits(q, k, lambda h, q, k, t, s: dot(q, k) / math.sqrt(8) + enc.table[bucket(t - s), h].item()))


def test_fire():
    enc = encoding('fire', train_len=12)
    q, k, v, pos = qkv()
    with torch.no_grad():
        enc.c.fill_(-0.3)
        enc.L.fill_(1.2)                                                                # the threshold is 1.2 * 12 / 4 = 3.6
    psi = lambda x: math.log(0.3 * x + 1)

    def score(h, q, k, t, s):
        x = psi(t - s) / (psi(max(t, 3.6)) + 1e-6)
        hidden = [max(0.0, w * x + b) for w, b in zip(enc.mlp[0].weight[:, 0].tolist(), enc.mlp[0].bias.tolist())]
        return dot(q, k) / math.sqrt(8) + dot(hidden, enc.mlp[2].weight[h].tolist()) + enc.mlp[2].bias[h].item()
    close(enc.logits(q, k, pos), loop_logits(q, k, score))


def test_vrope():
    q, k, v, pos = qkv()
    enc = encoding('vrope')
    alpha = enc.logits(q, k, pos).softmax(-1)
    expected = torch.zeros_like(v)
    for t in range(10):
        for s in range(t + 1):
            for c in range(4):
                value = torch.complex(v[:, :, s, 2 * c], v[:, :, s, 2 * c + 1]) * cmath.exp(1j * (s - t) * 10000 ** (-2 * c / 8))
                expected[:, :, t, 2 * c] += alpha[:, :, t, s] * value.real
                expected[:, :, t, 2 * c + 1] += alpha[:, :, t, s] * value.imag
    close(enc.attend(q, k, v, pos), expected)


@pytest.mark.parametrize('total_len', [None, 30])
@pytest.mark.parametrize('kw', [dict(), dict(vipe_g='as+b'), dict(vipe_g='rational'), dict(vipe_s='one'), dict(vipe_s='global', eval_len=48)],
                         ids=lambda kw: str(kw))
def test_vipe_averages_the_values_of_eq_8(kw, total_len):
    enc = encoding('vipe', train_len=6, vipe_d_p=3, **kw)
    with torch.no_grad():
        for p in enc.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    q, k, v, pos = qkv()
    s = {'one': 1.0, 'global': 8.0}.get(kw.get('vipe_s'), (total_len or 10) / 6)
    p = [] if enc.g_param is None else enc.g_param.tolist()
    g = {'s': lambda: s, 'as+b': lambda: p[0] * s + p[1], 'rational': lambda: (1 + p[0]) * (s - p[0] + p[0] ** 2 / s)}[kw.get('vipe_g', 's')]()
    state = enc.state(None, pos, total_len)
    logits = loop_logits(q, k, lambda h, q, k, t, i: g * math.log(t + 1) * (1 + dot(enc.u[h].tolist(), k)) * dot(q, k) / math.sqrt(8))
    close(enc.logits(q, k, pos, state), logits)
    alpha, z = logits.softmax(-1), torch.zeros(2, 2, 10, 11, dtype=torch.float64)
    for n in range(10):
        for i in range(n + 1):
            code = enc.W_p[:, 0] * (n - i) / s + enc.b_p[:, 0]                           # p_(n-i) (H, d_p)
            z[:, :, n] += alpha[:, :, n, i, None] * torch.cat([v[:, :, i], code.expand(2, 2, 3)], dim=-1)
    close(enc.attend(q, k, v, pos, state), z)


def test_vipe_global_scale_is_one_in_training():
    enc = encoding('vipe', train_len=6, vipe_s='global', eval_len=48)
    assert enc.state(None, torch.arange(5)) == 8 and enc.train().state(None, torch.arange(5)) == 1


def test_pope_vipe_scales_by_the_raw_key():
    q, k, v, pos = qkv()
    enc = encoding('pope+vipe', train_len=20)
    pope, vipe = enc.parts
    torch.nn.init.normal_(vipe.u)
    row, col = torch.arange(1, 11).double().log()[:, None], 1 + torch.einsum('bhtd,hd->bht', k, vipe.u)[:, :, None, :]
    close(enc.logits(q, k, pos).masked_fill(torch.ones(10, 10).triu(1) > 0, 0),
          (row * col * pope.logits(q, k, pos).masked_fill(torch.ones(10, 10).triu(1) > 0, 0)))
    assert enc.out_dim == 16


def test_sinusoids():
    x = torch.zeros(1, 9, 8, dtype=torch.float64)
    p = [[(math.sin if c % 2 == 0 else math.cos)(t / 10000 ** (c // 2 * 2 / 8)) for c in range(8)] for t in range(9)]
    close(pe.APE(pe.PEConfig(d_model=8)).embed(x, torch.arange(9))[0], p)


def test_shifted_ape_shifts_in_training_only():
    cfg, pos = pe.PEConfig(d_model=8, max_shift=50), torch.arange(9)
    enc, ape, x = pe.ShiftedAPE(cfg), pe.APE(cfg), torch.zeros(300, 9, 8)
    close(enc.eval().embed(x, pos), ape.embed(x, pos), 1e-6)
    rows = enc.train().embed(x, pos)
    table = ape.embed(torch.zeros(1, 60, 8), torch.arange(60))[0]
    offsets = [next(m for m in range(51) if torch.allclose(row, table[m:m + 9], atol=1e-5)) for row in rows]
    assert min(offsets) < 5 and max(offsets) > 45 and len(set(offsets)) > 25


@pytest.mark.parametrize('name', ['learned', 'random'])
def test_tables_repeat_their_last_row(name):
    enc = encoding(name, max_len=5)
    x = enc.embed(torch.zeros(1, 9, 16, dtype=torch.float64), torch.arange(9))[0]
    close(x[:5], enc.table)
    close(x[5:], enc.table[4].expand(4, 16))


# ---------------------------------------------------------------------------------------------------------------------
# PRISM's cursors

def random_gates(B, C, T, P, seed=0, copy=False, dtype=torch.float64):
    """reset, step, copy, and a table that shows the histograms themselves."""
    g = torch.Generator().manual_seed(seed)
    reset, step = torch.rand(B, C, T, generator=g, dtype=dtype), torch.randn(B, C, T, 3, generator=g, dtype=dtype).softmax(dim=-1)
    jump = torch.randn(B, C, T, T + 1, generator=g, dtype=dtype)
    jump[..., :-1].masked_fill_(torch.ones(T, T).triu(1) > 0, -math.inf)                # from past tokens and this one
    return reset, step, jump.softmax(dim=-1) if copy else None, torch.eye(2 * P + 1, dtype=dtype)


def enumerated(reset, step, jump, start=0):
    """{offset: probability} of one cursor after all its gates, over all their paths; the first gate acts on offset `start`."""
    law = {}
    for path in itertools.product(*[[(r, d, j) for r in (0, 1) for d in (1, -1, 0) for j in range(-1, 0 if jump is None else len(reset))] for _ in reset]):
        weight, offset = 1.0, start
        for t, (r, d, j) in enumerate(path):
            weight *= (reset[t] if r else 1 - reset[t]) * step[t][(1, -1, 0).index(d)] * (jump[t][j] if jump is not None else 1.0)
            offset = j if j >= 0 else (0 if r else offset) + d
        law[offset] = law.get(offset, 0.0) + weight
    return law


@pytest.mark.parametrize('copy, T', [(False, 6), (True, 3)])
def test_cursor_histogram_is_the_sum_over_all_paths(copy, T):
    reset, step, jump, table = random_gates(1, 2, T, T + 2, copy=copy)
    h = kernels.cursor_scan_reference(reset, step, None, table, jump)
    for c in range(2):
        for t in ([1, 3, 5] if T == 6 else [0, 1, 2]):
            part = None if jump is None else torch.cat([jump[0, c, :t + 1, :t + 1], jump[0, c, :t + 1, -1:]], dim=-1).tolist()
            law = enumerated(reset[0, c, :t + 1].tolist(), step[0, c, :t + 1].tolist(), part)
            assert abs(sum(law.values()) - 1) < 1e-12
            close(h[0, c, t], [law.get(d, 0.0) for d in range(-T - 2, T + 3)], 1e-12)


def test_cursor_keeps_its_mass():
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        reset, step, _, _ = random_gates(1, 2, 2048, 1, dtype=dtype)
        mass = kernels.cursor_scan_reference(reset * 0.01, step, None, torch.ones(4097, 1, dtype=dtype))
        assert (mass - 1).abs().max() < tol


def test_sharpening_multiplies_exponents():
    """Appendix A.2.1: n sharpenings by gamma are one by gamma^n; and a large gamma leaves the largest bin, not NaN."""
    T, keep = 4, torch.tensor([0.0, 0.0, 1.0]).double()
    first = torch.tensor([0.5, 0.2, 0.3]).double()
    step = torch.stack([first, *[keep] * (T - 1)]).view(1, 1, T, 3)
    h = kernels.cursor_scan_reference(torch.zeros(1, 1, T).double(), step, torch.tensor([1.7]).double(), torch.eye(2 * T + 1).double())
    for n in range(1, T + 1):
        p = first ** 1.7 ** n
        close(h[0, 0, n - 1, [T + 1, T - 1, T]], p / p.sum(), 1e-5)                     # eps = 1e-8 adds to every bin
    for dtype in (torch.float32, torch.float64):
        sharp = kernels.cursor_scan_reference(torch.zeros(1, 1, T, dtype=dtype), step.to(dtype), torch.tensor([1e4], dtype=dtype), torch.eye(2 * T + 1, dtype=dtype))
        close(sharp[0, 0, -1], F.one_hot(torch.tensor(T + 1), 2 * T + 1).double(), 1e-6)


def test_displacement_restarts_from_a_point_and_is_not_eq_6():
    """NOTES on eq. 4 and eq. 6: the displacement law is the filter started anew at k; the cross-correlation of two histograms gives mass to
    displacements that no path makes."""
    reset, step, _, table = random_gates(1, 1, 5, 5)
    k, steps = 2, 2                                                                     # from after token 2 to after token 4
    exact = kernels.cursor_scan_reference(reset[:, :, k + 1:], step[:, :, k + 1:], None, torch.eye(2 * steps + 1).double())[0, 0, -1]
    law = enumerated(reset[0, 0, k + 1:].tolist(), step[0, 0, k + 1:].tolist(), None)
    close(exact, [law.get(d, 0.0) for d in range(-steps, steps + 1)], 1e-12)
    h = kernels.cursor_scan_reference(reset * 0, step, None, table)[0, 0]
    eq_6 = {d: sum(float(h[k, i] * h[4, i + d]) for i in range(11) if 0 <= i + d < 11) for d in range(-10, 11)}
    close(sum(eq_6.values()), 1.0, 1e-10)
    assert sum(p for d, p in eq_6.items() if abs(d) > steps) > 0.05                     # impossible in two steps
    point = kernels.cursor_scan_reference(torch.zeros(1, 1, 5).double(), torch.tensor([1.0, 0, 0]).double().expand(1, 1, 5, 3), None, table)[0, 0]
    close([sum(float(point[k, i] * point[4, i + d]) for i in range(11 - d)) for d in (1, 2, 3)], [0.0, 1.0, 0.0])     # right for a one-hot


def test_superposition_is_not_the_encoding_of_the_mean():
    reset, step, _, _ = random_gates(1, 1, 3, 4)
    d = torch.arange(-4, 5).double()
    table = torch.stack([d.sin(), d.cos()], dim=-1)
    always = torch.tensor([1.0, 0.0, 0.0]).double().expand(1, 1, 3, 3)
    close(kernels.cursor_scan_reference(reset * 0, always, None, table)[0, 0], table[5:8])                       # one-hot at 1, 2, 3
    mixed = kernels.cursor_scan_reference(reset, step, None, table)[0, 0, -1]
    mean = kernels.cursor_scan_reference(reset, step, None, d[:, None])[0, 0, -1]
    assert (mixed - torch.cat([mean.sin(), mean.cos()])).abs().max() > 0.05


def test_cursor_machines():
    """Gates set by hand: always increment is the absolute position; a reset counts from its token; a copy jumps to its token."""
    T, up = 8, torch.tensor([1.0, 0.0, 0.0]).double()
    places = lambda reset, step, jump=None: kernels.cursor_scan_reference(reset, step.expand(1, 1, T, 3), torch.tensor([2.0]).double(),
                                                                         torch.arange(-T, T + 1).double()[:, None], jump)[0, 0, :, 0]
    reset = torch.zeros(1, 1, T).double()
    close(places(reset, up), torch.arange(1, T + 1), 1e-6)
    reset[0, 0, 4] = 1
    close(places(reset, up), [1, 2, 3, 4, 1, 2, 3, 4], 1e-6)
    jump = torch.zeros(1, 1, T, T + 1).double()
    jump[..., -1] = 1
    jump[0, 0, 6] = F.one_hot(torch.tensor(2), T + 1)                                   # at token 6 to token 2
    close(places(reset, up, jump), [1, 2, 3, 4, 1, 2, 2, 3], 1e-6)
    with pytest.raises(ValueError, match='must hold offsets -8..8'):
        kernels.cursor_scan_reference(reset, up.expand(1, 1, T, 3), None, torch.ones(15, 1).double())


def test_cursor_scan_in_chunks():
    reset, step, jump, table = random_gates(2, 3, 20, 20, copy=True)
    gamma = torch.tensor([1.5, 2.0, 3.0]).double()
    whole = kernels.cursor_scan_reference(reset, step, gamma, table, jump)
    close(kernels.cursor_scan_reference(reset, step, gamma, table, jump, chunk=7), whole)
    jump[:, :, :8, :8] = jump[:, :, :8, :8].tril()                                      # the first 8 tokens alone, with a smaller table
    jump[:, :, :8, 8:-1] = 0
    first = kernels.cursor_scan_reference(reset[..., :8], step[:, :, :8], gamma, table[12:29], torch.cat([jump[:, :, :8, :8], jump[:, :, :8, -1:]], dim=-1))
    close(first, whole[:, :, :8])


def test_prism_scores_are_eq_9():
    """Content and position scores, cursors of this layer and head, in loops; alpha only by its size."""
    model = make(pe='prism', prism_cursors=3, prism_d_pe=4)
    for layer in (0, 1):
        enc, x, (q, k, _, pos) = model.blocks[layer].attn.pe, torch.randn(2, 10, 32).double(), qkv(4, 10, 8)
        torch.nn.init.normal_(enc.alpha)
        state = model.blocks[0].attn.pe.state(x, pos)
        logits, mu = enc.logits(q, k, pos, state), torch.sigmoid(enc.m[:, 0, 0])
        g_q, g_k = (g.view(2, 2, 4, 10, 3, 4)[layer] for g in state)                    # (B, H, T, cursors, d_pe)
        for b, h, t, s in itertools.product((0, 1), range(4), (0, 5, 9), (0, 3)):
            if s <= t:
                place = sum(abs(enc.alpha[h, 0, c]) * (g_q[b, h, t, c] @ g_k[b, h, s, c]) for c in range(3))
                close(logits[b, h, t, s], mu[h] * q[b, h, t] @ k[b, h, s] / 8 ** 0.5 + (1 - mu[h]) * 4 * place / 12 ** 0.5)
    groups = {group['name']: group for group in model.optim_groups(1e-3, 0.1)}
    assert len(groups['alpha']['params']) == 2 and (groups['alpha']['lr'], groups['alpha']['betas']) == (0.03, (0.8, 0.92))


def test_prism_without_reset_or_superposition():
    """The sinusoid of the histogram's mean offset, which is not the mean of the sinusoids (A.3); without resets a closed form: the drift of the gates' means."""
    enc = make(pe='prism', prism_reset=False, prism_superpose=False, prism_sharpen=False, prism_d_pe=4).blocks[0].attn.pe
    x = torch.randn(1, 6, 32).double()
    reset, step, _ = enc.cursors.gates(x)
    assert (reset == 0).all()
    mean = (step[..., 0] - step[..., 1]).cumsum(dim=-1)                                 # (1, 2C, T)
    close(enc.state(x, torch.arange(6)).unflatten(-1, (2, 4)).permute(2, 0, 1, 3, 5, 4, 6).reshape(1, -1, 6, 4), pe.sinusoids(mean, 4, 10000.0, x))


def test_prism_copies_by_hand():
    """Every fifth query cursor jumps; with prism_copy='fixed' its key cursor counts tokens from 0, so that a jump to k meets the key of token k."""
    model = make(pe='prism', prism_copy='fixed', prism_cursors=3, prism_d_pe=4, n_layer=1)
    cursors, x = model.blocks[0].attn.pe.cursors, torch.randn(2, 9, 32).double()
    assert cursors.count == 12
    reset, step, copy = cursors.gates(x)
    assert copy.shape == (2, 3, 9, 10) and not copy[..., :-1].triu(1).any()
    close(copy.sum(dim=-1), torch.ones(2, 3, 9))
    h = cursors.scan(x, torch.eye(19).double())
    for c in range(24):
        plain = kernels.cursor_scan_reference(reset[:, c:c + 1], step[:, c:c + 1], 1 + F.softplus(cursors.g[c:c + 1]), torch.eye(19).double(),
                                              copy[:, [c // 5]] if c in (0, 5, 10) else None)
        close(h[:, c:c + 1], plain)
    for c in (12, 17, 22):
        assert h[:, c].argmax(dim=-1).tolist() == [[9 + t for t in range(9)]] * 2       # offsets 0..8
    with torch.no_grad():
        cursors.W_stay.weight.zero_(), cursors.W_stay.bias.fill_(-1e9)                  # always jump
        jumped = cursors.scan(x, torch.eye(19).double())[:, 5]
        close(jumped[..., 9:18].argmax(dim=-1), cursors.gates(x)[2][:, 1, :, :-1].argmax(dim=-1))
    with pytest.raises(ValueError, match='the first of them 1'):
        ModelConfig(pe='prism', prism_layers=[2])
    free = make(pe='prism', prism_copy='trained').blocks[0].attn.pe.cursors
    assert not (free.gates(x)[0] == 0).any()


def test_prism_branches_and_norms_are_algorithm_3():
    """One scale for all, or every position to length sqrt(d_pe) over all branches; the absolute position as the last branch."""
    x, pos, d_pe = torch.randn(2, 9, 32).double(), torch.arange(9), 8
    plain, scaled, unit = (make(pe='prism', prism_cursors=3, prism_d_pe=d_pe, n_layer=1, prism_absolute=True, prism_norm=norm).blocks[0].attn.pe.state(x, pos)
                           for norm in ('none', 'scale', 'unit'))
    absolute = plain.unflatten(-1, (4, d_pe))[..., 3, :]
    angle = pos[:, None] * 1e4 ** (-torch.arange(4) * 2 / d_pe)
    close(absolute[..., 0::2], angle.sin().expand(2, 1, 2, 4, 9, 4), 1e-6)
    close(absolute[..., 1::2], angle.cos().expand(2, 1, 2, 4, 9, 4), 1e-6)
    close(scaled, plain * d_pe ** 0.5 / (4 * (d_pe / 2)) ** 0.5)
    close(unit, plain / plain.norm(dim=-1, keepdim=True) * d_pe ** 0.5)


def test_orthogonal_is_pytorchs():
    """pe.Orthogonal reads the same numbers as torch.nn.utils.parametrizations.orthogonal: the same matrix, the same gradients."""
    def parametrized(how):
        torch.manual_seed(0)
        W = torch.nn.Linear(5, 15, dtype=torch.float64)
        torch.nn.init.orthogonal_(W.weight)
        start = W.weight.detach().clone()
        how(W)
        close(W.weight.detach(), start, 1e-6)
        return W
    theirs = parametrized(torch.nn.utils.parametrizations.orthogonal)
    ours = parametrized(lambda W: torch.nn.utils.parametrize.register_parametrization(W, 'weight', pe.Orthogonal()))
    with torch.no_grad():
        theirs.parametrizations.weight.original.add_(torch.randn(15, 5, dtype=torch.float64).tril(-1))
    ours.load_state_dict(theirs.state_dict())
    close(ours.weight.detach(), theirs.weight.detach())
    weight = torch.randn(15, 5, dtype=torch.float64)
    a, b = (torch.autograd.grad((W.weight * weight).sum(), W.parametrizations.weight.original)[0] for W in (ours, theirs))
    close(a, b)


def test_prism_layers_and_recurrent_matrices():
    """A second PRISM layer reads the residual stream before its layer; W_h stays orthogonal, is drawn to it, or has a learned norm."""
    model = make(pe='prism', n_layer=5, prism_layers=[1, 4])
    parts = [block.attn.pe for block in model.blocks]
    assert [hasattr(p, 'cursors') for p in parts] == [True, False, False, True, False] and [p.layer for p in parts] == [0, 1, 2, 0, 1]
    assert [parts[i].cursors.layers for i in (0, 3)] == [3, 2]
    seen = []
    parts[3].cursors.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0]))
    model.blocks[2].tap_resid.register_forward_hook(lambda m, i, out: seen.append(out))
    model(torch.randint(11, (2, 7)))
    assert torch.equal(*seen)
    orthogonal = Transformer(ModelConfig(pe='prism', prism_recurrent='orthogonal', prism_hidden=20)).double()
    optimizer = torch.optim.AdamW(orthogonal.optim_groups(1e-2, 0.01))
    tokens = torch.randint(11, (4, 9))
    for _ in range(3):
        orthogonal(tokens, tokens)[1].backward()
        optimizer.step()
    W = orthogonal.blocks[0].attn.pe.cursors.W_recurrent().detach()
    close(W.T @ W, torch.eye(20), 1e-6)                                                 # its starting point is rounded to float32
    cursors = make(pe='prism', prism_recurrent='norm', prism_hidden=20).blocks[0].attn.pe.cursors
    close(cursors.W_recurrent().norm().detach(), cursors.s.abs().detach() * 20 ** 0.5)
    drawn = make(pe='prism', prism_recurrent='penalty', prism_hidden=20)
    W = drawn.blocks[0].attn.pe.cursors.W_h.weight
    with torch.no_grad():
        excess = drawn.train()(tokens, tokens)[1] - drawn.eval()(tokens, tokens)[1]
    close(excess, 1e-3 * sum(((W[:, i] @ W[:, j]).item() - (i == j)) ** 2 for i in range(20) for j in range(20)), 1e-8)


def test_picture_of_a_sum():
    """README's picture shows a sum by its logits if no part acts on the values: here, of one bias and nothing else, as that bias alone."""
    alone, added = pe.picture('alibi', 6), pe.picture('alibi+nope', 6)
    assert torch.equal(alone, added) and alone[5, 0] < alone[5, 5]


def test_prism_comes_last_in_a_sum():
    """'prism+rope' is 'rope+prism': rotated content, cursors as they are; nothing else of a sum sees them."""
    x, (q, k, v, pos) = torch.randn(2, 10, 32).double(), qkv(4, 10, 8)
    for other in ('rope', 'pope', 'alibi', 'vipe'):
        found = []
        for names in (['prism', other], [other, 'prism']):
            enc = make(pe='+'.join(names), n_layer=1).blocks[0].attn.pe
            assert not enc.kernel                                                       # of attention, whose vectors are wider than the values
            parts = dict(zip(names, enc.parts))
            with torch.no_grad():
                for p in enc.parameters():
                    p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
            found.append(enc.logits(q, k, pos, enc.state(x, pos)))
            close(enc.attend(q, k, v, pos, enc.state(x, pos)), enc.mix(found[-1].softmax(-1), v, pos, enc.state(x, pos)))
        close(*found)
        mu, state = torch.sigmoid(parts['prism'].m), parts['prism'].state(x, pos)
        factors = parts[other].rescale(q, k, pos, parts[other].state(x, pos)) or (1, 1)
        if other != 'alibi':                                                            # mu times the other's, and the place score alone
            place = parts['prism'].logits(0 * q, k, pos, state).tril()
            close(found[1].tril(), (mu * parts[other].logits(q, k, pos, parts[other].state(x, pos)).tril()
                                    + place * factors[0] * (factors[1].mT if other == 'vipe' else 1)))
    with pytest.raises(ValueError, match='prism cannot be added to itself'):
        make(pe='prism+prism')


def test_prism_gru_is_pytorchs():
    cursors = make(pe='prism').blocks[0].attn.pe.cursors
    gru = torch.nn.GRU(32, 100, batch_first=True).double()
    with torch.no_grad():
        for ours, name in ((cursors.W_x, 'ih'), (cursors.W_h, 'hh')):
            getattr(gru, f'weight_{name}_l0').copy_(ours.weight)
            getattr(gru, f'bias_{name}_l0').copy_(ours.bias)
    x = torch.randn(3, 9, 32).double()
    close(cursors.gru(x), gru(x)[0])


# ---------------------------------------------------------------------------------------------------------------------
# pe.py and model.py: what holds for every encoding

@variants
def test_attend_is_softmax_of_logits_times_value(kw):
    for T in (TRAIN_LEN, 3 * TRAIN_LEN):
        first, enc = (block.attn.pe for block in make(**kw).blocks)
        H, D = enc.cfg.heads, enc.cfg.head_dim
        q, k, v, pos = qkv(H, T, D)
        x = torch.randn(2, T, 32, dtype=torch.float64)
        state = enc.restate(x, pos, first.state(x, pos))
        y = enc.attend(q, k, v, pos, state)
        close(y, enc.mix(enc.logits(q, k, pos, state).softmax(-1), v, pos, state))
        assert y.shape == (2, H, T, enc.out_dim)


@variants
def test_causal_and_prefix_consistent(kw):
    model = make(**kw)
    tokens = torch.randint(11, (3, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 11
    with torch.no_grad():
        full = model(tokens)[0]
        assert torch.equal(full[:, :12], model(changed)[0][:, :12]) and not torch.equal(full[:, 12:], model(changed)[0][:, 12:])
        for t in (1, 7, 19):
            close(model(tokens[:, :t], total_len=20)[0], full[:, :t])


@variants
def test_gradient_reaches_every_parameter(kw):
    model = make(**kw).train()
    tokens = torch.randint(11, (3, TRAIN_LEN))
    model(tokens, tokens)[1].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@variants
def test_float32_agrees_with_float64(kw):
    model = make(**kw)
    tokens = torch.randint(11, (3, 3 * TRAIN_LEN))
    with torch.no_grad():
        reference = model(tokens)[0]
        assert (model.float()(tokens)[0].double() - reference).abs().max() < 1e-5 * max(1, reference.abs().max())


@variants
def test_shift_invariance_where_declared(kw):
    enc = make(**kw).blocks[0].attn.pe
    q, k, v, pos = qkv(enc.cfg.heads, TRAIN_LEN, enc.cfg.head_dim)
    x = torch.randn(2, TRAIN_LEN, 32, dtype=torch.float64)
    there = lambda pos: enc.attend(q, k, v, pos, enc.state(x, pos))
    same = torch.allclose(there(pos), there(pos + 7)) and torch.allclose(enc.embed(x, pos), enc.embed(x, pos + 7))
    assert same == enc.shift_invariant


@variants
def test_save_and_load(kw, tmp_path):
    model, other = make(**kw), make(seed=1, **kw)
    tokens = torch.randint(11, (2, 9))
    torch.save(model.state_dict(), tmp_path / 'm.pt')
    other.load_state_dict(torch.load(tmp_path / 'm.pt', weights_only=True))
    assert torch.equal(model(tokens)[0], other(tokens)[0])


@variants
def test_beyond_every_trained_length(kw):
    logits, loss = make(**kw)(torch.randint(11, (1, 200)), torch.randint(11, (1, 200)))                  # tables have 64 rows
    assert logits.isfinite().all() and loss.isfinite()


@variants
def test_overfits_one_batch(kw):
    """Within 200 steps."""
    model = make(torch.float32, max_shift=4, **kw).train()
    tokens = torch.randint(11, (8, TRAIN_LEN), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.arange(8)                                                      # so that each row can be told apart
    optimizer = torch.optim.AdamW(model.optim_groups(3e-3, 0.0))
    for _ in range(200):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        if loss < 0.2:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f'the loss is {loss:.3f} after 200 steps')


@variants
def test_bfloat16_autocast_stays_near(kw):
    model = make(torch.float32, **kw)
    tokens = torch.randint(11, (2, 3 * TRAIN_LEN))
    with torch.no_grad():
        reference = model(tokens)[0]
        with torch.autocast('cpu', torch.bfloat16):
            assert (model(tokens)[0].float() - reference).abs().max() < 0.15 * reference.abs().max()


def test_t5_table_is_shared_and_others_are_not():
    layers = lambda name: [block.attn.pe for block in make(pe=name, n_layer=3).blocks]
    assert len({id(enc.table) for enc in layers('t5')}) == 1
    assert len({id(enc.delta) for enc in layers('pope')}) == 3
    both = layers('t5+pope')
    assert len({id(enc.parts[0].table) for enc in both}) == 1 and len({id(enc.parts[1].delta) for enc in both}) == 3


def test_rope_heads():
    rope, nope = encoding('rope', heads=4), encoding('nope', heads=4)
    q, k, v, pos = qkv(4)
    y = encoding('rope', heads=4, rope_heads=1).attend(q, k, v, pos)
    close(y[:, :1], rope.attend(q, k, v, pos)[:, :1])
    close(y[:, 1:], nope.attend(q, k, v, pos)[:, 1:])
    assert not torch.allclose(y[:, 1:], rope.attend(q, k, v, pos)[:, 1:])


def test_mla_logits_are_eq_3():
    model = make(pe='rope', attention='mla', n_head=8, d_compress=6)                     # 4 real heads of 8: 4 NoPE + 4 RoPE features
    attn, x, pos = model.blocks[0].attn, torch.randn(2, 10, 32, dtype=torch.float64), torch.arange(10)
    seen = []
    attn.tap_logits.register_forward_hook(lambda m, i, o: seen.append(o))
    attn(x, pos, None)
    W_Q, W_K = attn.q.weight.view(4, 8, 32), (attn.kv.weight[:32] @ attn.compress.weight).view(4, 8, 32)
    q, k = torch.einsum('hdc,btc->bhtd', W_Q, x), torch.einsum('hdc,btc->bhtd', W_K, x)
    rope = loop_logits(q[..., 4:], k[..., 4:], rope_score([1, 10000 ** -0.5], 4)) * 2     # undo its 1/sqrt(4)
    close(seen[0], (q[..., :4] @ k[..., :4].transpose(-1, -2) + rope) / math.sqrt(8))
    assert attn.compress.weight.shape == (6, 32) and attn.kv.weight.shape == (64, 6)


def test_taps_read_and_replace():
    model = make(pe='rope')
    tokens, shapes = torch.randint(11, (2, 9)), {}
    before = model(tokens)[0]
    handles = [m.register_forward_hook(lambda m, i, o, n=n: shapes.__setitem__(n, tuple(o.shape)))
               for n, m in model.named_modules() if n.split('.')[-1].startswith('tap_')]
    close(model(tokens)[0], before)
    assert shapes['blocks.1.attn.tap_q'] == shapes['blocks.1.attn.tap_k'] == shapes['blocks.1.attn.tap_head_out'] == (2, 4, 9, 8)
    assert shapes['blocks.0.attn.tap_logits'] == (2, 4, 9, 9) and shapes['tap_resid'] == shapes['blocks.1.tap_resid'] == (2, 9, 32)
    for h in handles:
        h.remove()
    h = model.blocks[1].attn.tap_head_out.register_forward_hook(lambda m, i, o: o * 0)
    assert not torch.allclose(model(tokens)[0], before)
    h.remove()
    assert torch.equal(model(tokens)[0], before)


@pytest.mark.parametrize('kw', [dict(norm='rmsnorm'), dict(tie=True), dict(dropout=0.3), dict(d_ff=20, n_layer=3, n_head=1)], ids=str)
def test_model_switches(kw):
    model = make(pe='rope', **kw)
    tokens = torch.randint(11, (2, 9))
    assert (model.head.weight is model.embedding.weight) == bool(kw.get('tie'))
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert torch.equal(model(tokens)[0], model(tokens)[0]) != bool(kw.get('dropout'))
    ignored = torch.full((2, 9), -100)
    ignored[0, 3] = 5
    close(model.eval()(tokens, ignored)[1], F.cross_entropy(model(tokens)[0][0, 3][None], torch.tensor([5])))


def test_optimizer_groups_hold_every_parameter_once():
    model = make(pe='pope+t5')
    groups = model.optim_groups(1e-3, 0.1)
    ids = [id(p) for group in groups for p in group['params']]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    decays = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    names = [n for n, p in model.named_parameters() if id(p) in decays]
    assert names and all(n.endswith('weight') and 'norm' not in n and '.pe.' not in n and n != 'embedding.weight' for n in names)


@pytest.mark.parametrize('kw, says', [
    (dict(d_model=30, n_head=4), 'divisible'), (dict(pe='rope', d_model=20, n_head=4), 'even'), (dict(pe='rop'), "'rope'"), (dict(pe='rope+'), 'unknown'),
    (dict(n_head=3, d_model=30, attention='mla'), 'even'), (dict(rope_heads=9), 'rope_heads'), (dict(norm='batch'), 'layernorm'), (dict(n_layer=0), 'n_layer'), (dict(d_compress=-1), 'd_compress'),
    (dict(vipe_s='both'), 'length'), (dict(pope_delta='one'), 'uniform'), (dict(attention='gqa'), 'mla'), (dict(dropout=1.5), 'dropout'),
    (dict(pe='ape', d_model=21, n_head=1), 'even'), (dict(pe='t5', t5_buckets=1), 't5')], ids=str)
def test_impossible_shapes_say_what_to_do(kw, says):
    with pytest.raises(ValueError, match=says):
        Transformer(ModelConfig(**kw))


# ---------------------------------------------------------------------------------------------------------------------
# tasks.py: slow, obvious oracles

def answer(name, prompt):
    """What a task's answer must be, from the words before it, by the definition alone."""
    if name in ('copy', 'reverse', 'sort', 'count', 'parity', 'polynomial', 'mode'):
        assert prompt[0] == 'BoS' and prompt[-1] == 'EoI'
        x = prompt[1:-1]
        numbers = [int(w) for w in x] if name != 'mode' else None
        if name == 'copy':
            states = numbers
        elif name == 'reverse':
            states = numbers[::-1]
        elif name == 'sort':
            assert len(set(numbers)) == len(numbers)
            states = sorted(numbers)
        elif name == 'count':
            states = list(range(numbers[0], numbers[1] + 1))
        elif name == 'mode':
            assert len(statistics.multimode(x)) == 1
            states = [statistics.mode(x)]
        else:
            states = [numbers[0]]
            for n in numbers[1:]:
                states.append((states[-1] + n) % 2 if name == 'parity' else (states[-1] * n + 1) % 5)
        return [str(s) for s in states] + ['EoS']
    assert prompt[-1] == '?'
    places = {w: [i for i, x in enumerate(prompt) if x == w] for w in prompt}
    if name == 'distance':
        (i,), (j,) = places['trigger0'], places['trigger1']
        return [f'class{abs(i - j) // 4}']
    if name == 'distance_sum':
        i, j, k, l = (places[f'trigger{m}'][0] for m in range(4))
        return [f'class{(abs(i - j) + abs(k - l)) // 8}']
    if name == 'trigger_count':
        return [f'class{sum(w.startswith("trigger") for w in prompt)}']


LENGTHS = {'copy': (1, 5, 48), 'parity': (1, 5, 48), 'polynomial': (1, 5, 48), 'count': (1, 5, 48, 128), 'reverse': (1, 5, 48), 'mode': (1, 2, 7, 48),
           'sort': (1, 5, 48, 100), 'indirect_indexing': (1, 20, 40, 52), 'distance': (2, 9, 128, 200), 'trigger_count': (1, 9, 128, 200),
           'distance_sum': (4, 9, 128, 200), 'scan': (1, 22, 48), 'scan_simple': (2, 5), 'scan_cot': (2, 24), 'stdlib': (2, 100)}


@pytest.mark.parametrize('name, length', [(n, length) for n in tasks.TASKS for length in LENGTHS.get(n, (5, 20))])
def test_tasks_against_an_oracle(name, length):
    task = tasks.TASKS[name]
    n = 2000 if length < 60 else 300
    length = max(length, task.min_length)
    tokens, targets = task.sample(n, length, torch.Generator().manual_seed(length))
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape and len(tokens) == n
    assert tokens.min() >= 0 and tokens.max() < len(task.vocab) and len(set(task.vocab)) == len(task.vocab)
    for row, target in zip(tokens.tolist(), targets.tolist()):
        assert all(t == -100 or t == row[i + 1] for i, t in enumerate(target)) and target[-1] == -100
        words = [task.vocab[i] for i in row if i != 0]
        first = next(i for i, t in enumerate(target) if t != -100) + 1
        assert all(t != -100 for t in target[first - 1:len(words) - 1]) and all(i == 0 for i in row[len(words):])
        if name == 'indirect_indexing':
            source, letter, shift, goal = task.decode(torch.tensor(row)).split(', ')
            assert len(source) == length == len(set(source)) and source.isalpha() and re.fullmatch(r'[+-]\d{1,2}', shift) and abs(int(shift)) <= 15
            assert words[first:] == [goal] == [source[source.index(letter) + int(shift)]] and source.index(letter) + int(shift) >= 0
        elif name.startswith('scan'):
            command, said = task.decode(torch.tensor(row)).removeprefix('BoS ').split(' = ' if name == 'scan_cot' else ' EoI ')
            actions = [word for word in said.split() if word.startswith('I_')]
            assert actions == scan_actions(command.split()) and len(actions) == length and words[first:] == said.split()
        elif name == 'stdlib':
            assert first == 1 and len(words) <= length
        elif name in LENGTHS:                                                           # else a task without an oracle yet
            assert words[first:] == answer(name, words[:first])
            assert len(words[:first]) == (4 if name == 'count' else length + 1 + (task.end is not None))
            assert task.decode(torch.tensor(row)).split() == words


def completion(name, prompt):
    """What must stand right of "=" in prism.txt's tasks, by strings and whole numbers."""
    if name in ('string_copy', 'string_reverse', 'odds_first'):
        return {'string_copy': prompt, 'string_reverse': prompt[::-1], 'odds_first': prompt[1::2] + prompt[::2]}[name] + '.'
    if name == 'stack':
        left = []
        for action in prompt:
            if action in '01':
                assert not left or all(c in '01' for c in prompt[:prompt.index(action)])
                left.append(action)
            elif action == '2':
                left = left[:-1]
            else:
                left.append('0' if action == '3' else '1')
        return (''.join(reversed(left)) + '2').ljust(len(prompt) + 1, '0') + '.'
    if name == 'dyn_str_cpy':
        s, d = prompt.split(',')
        assert s.count(d) == 1
        return s[s.index(d):] + '.'
    a, b = re.split('[+x]', prompt)
    if name == 'multiplication_cot':
        assert all(x == str(int(x)) for x in (a, b))
        return f'{a}x[' + '+'.join(f'{d}*' + ''.join(f'({e}+{int(i == j)})' for j, e in enumerate(b) if j >= i) for i, d in enumerate(b)) + '].'
    x, y, carry, steps = int(a[::-1]), int(b[::-1]), 0, []
    assert all(n[::-1] == str(int(n[::-1])) for n in (a, b))
    for t in range(max(len(a), len(b))):
        d_a, d_b = x // 10 ** t % 10, y // 10 ** t % 10
        carry, d = divmod(d_a + d_b + carry, 10)
        steps.append(f'{d_a}{d_b}{carry}{d}')
    return f'{",".join(steps)}→{str(x + y)[::-1].ljust(len(steps), "0")}.'


PRISM_TASKS = [name for name, task in tasks.TASKS.items() if isinstance(task, tasks.Characters)]


@pytest.mark.parametrize('length', [1, 2, 7, 23])
@pytest.mark.parametrize('name', PRISM_TASKS)
def test_tasks_of_prism_against_an_oracle(name, length):
    task, lengths = tasks.TASKS[name], set()
    tokens, targets = task.sample(400, length, torch.Generator().manual_seed(length))
    assert len(task.vocab) == 64 and len(PRISM_TASKS) == 7
    for row, target in zip(tokens, targets):
        text = task.decode(row)
        prompt, answer = text.split('=')
        assert answer == completion(name, prompt)
        first = len(prompt)                                                             # at "=" the first token of the answer is predicted
        assert target[first:len(text) - 1].tolist() == row[first + 1:len(text)].tolist() and (row[len(text):] == 0).all()
        assert (target[:first] == -100).all() and (target[len(text) - 1:] == -100).all()
        lengths.add(len(prompt))
        parts = [len(x) for x in re.split('[+x,]', prompt)]
        assert {'addition_cot': max(parts), 'multiplication_cot': parts[-1]}.get(name, parts[0]) == length
    assert (len(lengths) > 1) == (name in ('addition_cot', 'multiplication_cot') and length > 1)
    assert (tokens[:, -1] != 0).any() or name == 'addition_cot' or length > 7           # no wider than the longest problem


def test_places_and_sizes_in_prism_tasks_are_uniform():
    text = lambda name, n: [tasks.TASKS[name].decode(row) for row in tasks.TASKS[name].sample(n, 10, torch.Generator().manual_seed(0))[0]]
    counts = {'dyn_str_cpy': lambda x: x[:10].index(x[11]), 'addition_cot': lambda x: min(map(len, x.split('=')[0].split('+'))),
              'multiplication_cot': lambda x: x.index('x'), 'stack': lambda x: min([x.index(c) for c in '234' if c in x[:10]], default=0)}
    for name, count in counts.items():
        found = torch.tensor([count(x) for x in text(name, 6000)]).unique(return_counts=True)[1] / 6000
        assert len(found) == (9 if name == 'stack' else 10) and (found - 1 / len(found)).abs().max() < 0.03, (name, found)


@pytest.mark.parametrize('name, length', [('distance', 128), ('trigger_count', 128), ('indirect_indexing', 30), ('mode', 9), ('count', 9), ('parity', 9)])
def test_task_distributions(name, length):
    tokens, targets = tasks.TASKS[name].sample(20000, length, torch.Generator().manual_seed(0))
    last = targets.gather(1, (torch.arange(targets.shape[1]) * ((targets != -100) & (targets != 3))).argmax(1, keepdim=True))
    share = last.unique(return_counts=True)[1] / 20000
    expected = {'distance': [3 / 127] + [4 / 127] * 31, 'trigger_count': [1 / 32] * 32, 'indirect_indexing': [1 / 52] * 52, 'mode': [1 / 10] * 10,
                'parity': [1 / 2] * 2}.get(name, [1 / 120] * 120)
    assert len(share) == len(expected) and (share - torch.tensor(expected)).abs().max() < 6 * math.sqrt(max(expected) / 20000)
    if name == 'distance':                                                              # both orders, and the whole range of distances
        a, b = (tokens == 34).int().argmax(1), (tokens == 35).int().argmax(1)
        assert 0.48 < (a < b).float().mean() < 0.52 and set((a - b).abs().tolist()) == set(range(1, 128))
    if name == 'indirect_indexing':
        shifts = [int(''.join(tasks.TASKS[name].vocab[i] for i in row[33:36] if i > 1)) for row in tokens[:3000].tolist()]
        assert set(shifts) == set(range(-15, 16))


def test_tasks_are_seeded():
    for name, task in tasks.TASKS.items():
        draw = lambda seed: task.sample(50, LENGTHS.get(name, (5, 20))[1], torch.Generator().manual_seed(seed))[0]
        assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))


def test_tasks_doctests_and_docstrings():
    assert doctest.testmod(tasks).failed == 0
    assert all(re.search(r'>>> (example|written)\(', type(task).__doc__) for name, task in tasks.TASKS.items() if name != 'stdlib')
    assert all('`length`' in type(task).__doc__ for task in data.READERS.values())


def test_polynomial_of_any_modulus():
    task = tasks.make('polynomial:p=7')
    tokens, _ = task.sample(500, 9, torch.Generator().manual_seed(0))
    assert task.p == 7 and len(task.vocab) == 11 and tokens.max() == 10
    row = [int(w) for w in task.decode(tokens[0]).split() if w.isdigit()]
    assert all((row[9 + t - 1] * row[t] + 1) % 7 == row[9 + t] for t in range(1, 9))


def test_smaller_problems():
    """All shifts up to 2 occur and no other, all 12 letters and no other; at span 16 distances 1 to 15 in classes two apart; counts to 16 in 40 tokens."""
    task, draw = tasks.make('indirect_indexing:letters=12:shift=2'), torch.Generator().manual_seed(0)
    rows = [task.decode(row).split(', ') for row in task.sample(500, 6, draw)[0]]
    assert {row[2] for row in rows} == {'+0', '+1', '+2', '-1', '-2'} and set(''.join(row[0] for row in rows)) == set('ABCDEFGHIJKL')
    assert all(row[3] == row[0][row[0].index(row[1]) + int(row[2])] for row in rows)
    tokens, _ = tasks.make('distance:span=16').sample(500, 40, draw)
    places = (tokens[:, :40] == 34) | (tokens[:, :40] == 35)
    i, j = places.nonzero()[:, 1].view(500, 2).T
    assert set((j - i).tolist()) == set(range(1, 16)) and torch.equal(tokens[:, 41] - 2, 2 * (j - i))
    tokens, _ = tasks.make('trigger_count:most=16').sample(500, 40, draw)
    count = ((tokens[:, :40] >= 34) & (tokens[:, :40] < 54)).sum(dim=1)
    assert set(count.tolist()) == set(range(17)) and torch.equal(tokens[:, 41] - 2, count)


@pytest.mark.parametrize('name, length, says', [('pairty', 5, "'parity'"), ('polynomial:q=7', 5, 'options'), ('polynomial:p=', 5, 'options'), ('count', 200, '128'),
                                                ('sort', 101, '100'), ('copy', 0, 'from 1'), ('distance_sum', 3, 'from 4'), ('indirect_indexing', 53, '52'),
                                                ('indirect_indexing:letters=12:shift=2', 13, '12'), ('indirect_indexing:letters=53', 5, '1 to 52'), ('distance:span=1', 5, 'at least 2'),
                                                ('trigger_count:most=32', 5, 'from 1 to 31')])
def test_task_errors(name, length, says):
    with pytest.raises(ValueError, match=says):
        tasks.make(name).sample(2, length)


# ---------------------------------------------------------------------------------------------------------------------
# SCAN

def scan_actions(words):
    """What a SCAN command means (Lake & Baroni 2018, Figure 7), by recursion."""
    for word in ('and', 'after'):
        if word in words:
            x, y = (scan_actions(part) for part in (words[:words.index(word)], words[words.index(word) + 1:]))
            return x + y if word == 'and' else y + x
    if words[-1] in ('twice', 'thrice'):
        return scan_actions(words[:-1]) * (2 if words[-1] == 'twice' else 3)
    verb, turn = {'turn': []}.get(words[0], ['I_' + words[0].upper()]), ['I_TURN_' + words[-1].upper()]
    return verb if len(words) == 1 else turn + verb if len(words) == 2 else turn * 2 + verb if words[1] == 'opposite' else (turn + verb) * 4


def test_scan_is_the_published_data_set():
    """Its size, that of the length split, single lines, and the number of characters in the published tasks.txt (one "IN: .. OUT: .." a line)."""
    train_pairs, test_pairs = (tasks.scan_pairs('length', part) for part in ('train', 'test'))
    pairs = train_pairs + test_pairs
    assert len(train_pairs) == 16990 and len(test_pairs) == 3920 and len(dict(pairs)) == 20910
    assert sum(len(f'IN: {command} OUT: {actions}\n') for command, actions in pairs) == 4080388
    assert dict(pairs)['jump opposite left twice after jump opposite left'] == 'I_TURN_LEFT I_TURN_LEFT I_JUMP ' * 2 + 'I_TURN_LEFT I_TURN_LEFT I_JUMP'
    assert dict(pairs)['run opposite right after turn opposite right twice'] == 'I_TURN_RIGHT ' * 6 + 'I_RUN'
    assert dict(pairs)['walk around right after walk'] == 'I_WALK' + ' I_TURN_RIGHT I_WALK' * 4
    assert all(actions.split() == scan_actions(command.split()) for command, actions in pairs)
    size = lambda pairs: {len(actions.split()) for _, actions in pairs}
    assert size(train_pairs) == set(range(1, 23)) and size(test_pairs) == {24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48}
    simple = [tasks.scan_pairs('simple', part) for part in ('train', 'test')]
    assert [len(part) for part in simple] == [16728, 4182] and {*simple[0], *simple[1]} == {*pairs}
    with pytest.raises(ValueError, match='length and simple'):
        tasks.scan_pairs('mcd', 'train')


def test_scan_cot_spells_out_every_clause():
    task = tasks.make('scan_cot')
    for command, actions in random.Random(0).sample(tasks.scan_pairs('length', 'train') + tasks.scan_pairs('length', 'test'), 2000):
        left, right = task.text(command, actions).split(' = ')
        written, steps = right.removesuffix(' .').split(' → ')
        assert left == command and 'twice' not in right and 'thrice' not in right
        assert scan_actions(re.sub(r' \+ ', ' and ', written).split()) == actions.split() if 'after' not in written else True
        said = re.findall(r'((?:walk|look|run|jump|turn)[a-z ]*) : ((?:I_\w+ ?)+)', steps)
        assert [a for _, part in said for a in part.split()] == actions.split() and all(scan_actions(clause.split()) == part.split() for clause, part in said)
        halves = re.split(' (?:and|after) ', written)
        assert [clause for half in (halves[::-1] if ' after ' in written else halves) for clause in half.split(' + ')] == [clause for clause, _ in said]
    assert task.text('walk around left thrice and look opposite right', '') == (                        # Table 4's example, with four pairs in every clause
        'walk around left thrice and look opposite right = walk around left + walk around left + walk around left and look opposite right → '
        + 'walk around left : I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK I_TURN_LEFT I_WALK ' * 3 + 'look opposite right : I_TURN_RIGHT I_TURN_RIGHT I_LOOK .')


# ---------------------------------------------------------------------------------------------------------------------
# kernels.py: in Triton's interpreter without a GPU, compiled with one

CUDA = torch.cuda.is_available()
DEVICE = 'cuda' if CUDA else 'cpu'
kernel_test = gpu if CUDA else pytest.mark.skipif(kernels.triton is None, reason='needs Triton')


def own_arguments(name, H, T, D, g):
    make = {'pope': lambda: -6 * torch.rand(H, D, generator=g), 'vipe': lambda: 0.1 * torch.randn(H, D, generator=g), 'bias': lambda: torch.randn(H, T, generator=g)}
    return make[name]().to(DEVICE).requires_grad_()


def errors(function, reference, inputs, seed=0):
    """Relative errors of the outputs and of the gradients of all inputs, against the reference in float64."""
    double = [x.detach().double().requires_grad_() for x in inputs]
    g = torch.Generator().manual_seed(seed)
    ys, ds = (y if isinstance(y, tuple) else (y,) for y in (function(*inputs), reference(*double)))
    weights = [torch.randn(y.shape, generator=g, dtype=torch.float64).to(DEVICE) for y in ds]
    grads = [torch.autograd.grad(sum((y.double() * w).sum() for y, w in zip(out, weights)), x) for out, x in ((ys, inputs), (ds, double))]
    return [((a.double() - b).norm() / b.norm().clamp(min=1)).item() for a, b in [*zip(ys, ds), *zip(*grads)]]     # some are 0 at T = 1


def strided(B, H, T, D, dtype, layout, g):
    """q, k, v [B, H, T, D] as slices of a projection, contiguous, or with a last axis that is not."""
    if layout == 'projected':
        parts = torch.randn(B, T, 3 * H * D, generator=g).to(DEVICE, dtype).chunk(3, dim=-1)
        return [x.view(B, T, H, D).transpose(1, 2).requires_grad_() for x in parts]
    x = torch.randn(3, B, H, T, D, generator=g).to(DEVICE, dtype)
    return [(y if layout == 'contiguous' else y.transpose(2, 3).contiguous().transpose(2, 3)).requires_grad_() for y in x]


@kernel_test
@pytest.mark.parametrize('name', ['pope', 'vipe', 'bias'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('seed', range(16 if CUDA else 6))
def test_kernels_against_their_references(name, dtype, seed):
    """Random shapes and strides: 1e-5 in float32; in half precision at most twice what PyTorch's attention errs on its inputs (the interpreter,
    whose casts to bfloat16 truncate, four times)."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    B, H, T, D = rng.randint(1, 2), rng.randint(1, 3), rng.choice([1, 2, 17, 64, 65, 100, 131]), rng.choice([16, 20, 32, 64, 80, 128])
    q, k, v = strided(B, H, T, D, dtype, rng.choice(['projected', 'contiguous', 'other']), g)
    own = own_arguments(name, H, T, D, g)
    got = errors(getattr(kernels, f'{name}_attention'), getattr(kernels, f'{name}_attention_reference'), [q, k, v, own], seed)
    if dtype == torch.float32:
        assert max(got) < 1e-5, got
        return
    sdpa = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    usual = max(errors(sdpa, lambda *x: kernels.attention_reference(*x)[0], [q, k, v], seed))
    spread = 4 if dtype == torch.bfloat16 and not CUDA else 2
    assert max(got) < spread * max(usual, torch.finfo(dtype).eps / 2), (got, usual)


@kernel_test
@pytest.mark.parametrize('on', ['', 'pope', 'vipe', 'bias', 'pope vipe', 'pope bias', 'vipe bias', 'pope vipe bias'])
@pytest.mark.parametrize('G', [1, 2])
def test_kernels_with_every_switch(on, G):
    """attention() with any of its parts, groups of the batch having their own; every gradient."""
    g, (B, H, T, D) = torch.Generator().manual_seed(1), (2, 2, 70, 24)
    tensors = strided(B, H, T, D, torch.float32, 'contiguous', g)
    shapes = {'pope': dict(delta=(G, H, D)), 'vipe': dict(row=(G, H, T), col=(B, H, T)), 'bias': dict(bias=(G, H, T))}
    names = [key for part in on.split() for key in shapes[part]]
    tensors += [(torch.rand(shapes[part][key], generator=g) * 2).to(DEVICE).requires_grad_() for part in on.split() for key in shapes[part]]
    base = 100.0 if 'pope' in on else 0.0
    call = lambda f, **kw: lambda q, k, v, *rest: f(q, k, v, base=base, **dict(zip(names, rest)), **kw)
    assert max(errors(call(kernels.attention, distance=True), call(kernels.attention_reference), tensors)) < 1e-5


@kernel_test
def test_kernels_write_every_element():
    """Of their outputs and gradients: nothing shows what was in memory before."""
    torch.use_deterministic_algorithms(True, warn_only=True)                            # fills new memory with NaN
    try:
        g = torch.Generator().manual_seed(0)
        for name in ('pope', 'vipe', 'bias'):
            inputs = [*strided(2, 2, 41, 20, torch.float32, 'projected', g), own_arguments(name, 2, 41, 20, g)]
            out = getattr(kernels, f'{name}_attention')(*inputs)
            grads = torch.autograd.grad(sum(y.sum() for y in out) if name == 'vipe' else out.sum(), inputs)
            assert all(x.isfinite().all() for x in (*grads, *(out if name == 'vipe' else [out])))
    finally:
        torch.use_deterministic_algorithms(False)


@kernel_test
def test_kernels_repeat_themselves():
    """Bit for bit, but for the bias's gradient, which blocks add to in any order."""
    for name in ('pope', 'vipe', 'bias'):
        def once():
            g = torch.Generator().manual_seed(0)
            inputs = [*strided(2, 2, 100, 32, torch.float32, 'contiguous', g), own_arguments(name, 2, 100, 32, g)]
            out = getattr(kernels, f'{name}_attention')(*inputs)
            y = out[0] if name == 'vipe' else out
            return y, *torch.autograd.grad(y.square().sum(), inputs)[:3 if name == 'bias' else 4]
        assert all(torch.equal(a, b) for a, b in zip(once(), once()))


@kernel_test
def test_kernels_as_operators():
    """Schema, fake tensors and gradient registration, as torch.compile needs them; no second gradient."""
    g = torch.Generator().manual_seed(0)
    q, k, v = strided(2, 2, 20, 16, torch.float32, 'projected', g)
    delta, row, col, bias = (torch.rand(shape, generator=g).to(DEVICE).requires_grad_() for shape in ((1, 2, 16), (1, 2, 20), (2, 2, 20), (1, 2, 20)))
    for args in ((q, k, v, delta, row, col, bias, 100.0, True, True), (q, k, v, None, None, None, bias, 0.0, False, False)):
        torch.library.opcheck(kernels.attention_forward, args, test_utils=('test_schema', 'test_autograd_registration', 'test_faketensor'))
    y = kernels.bias_attention(q, k, v, bias[0])
    grad, = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='second-order'):
        grad.sum().backward()
    for wrong, says in (((q.double(), k, v), 'float32, bfloat16 or float16'), ((q[:, :1], k, v), 'must all be'), ((q, k, v, delta), 'delta goes with base'),
                        ((q, k, v, delta[:, :1], 9.0), r'delta must be \[1, 2, 16\]'), ((q, k, v, None, 0.0, row), 'row with col'),
                        ((q, k, v, None, 0.0, None, None, bias[..., :9]), r'bias must be \[1, 2, 20\]'),
                        ((q, k, v, None, 0.0, None, None, bias.expand(3, 2, 20)), '3 groups do not divide')):
        with pytest.raises(ValueError, match=says):
            kernels.attention(*wrong)


@kernel_test
def test_bias_kernel_with_a_window():
    """-inf beyond a distance: whole blocks of keys may be hidden from a row."""
    q, k, v = strided(1, 2, 150, 16, torch.float32, 'projected', torch.Generator().manual_seed(0))
    window = torch.where(torch.arange(150, device=DEVICE) < 8, 0.0, -math.inf).expand(2, 150)
    assert max(errors(lambda *x: kernels.bias_attention(*x, window), lambda *x: kernels.bias_attention_reference(*x, window.double()), [q, k, v])) < 1e-5


@kernel_test
@pytest.mark.parametrize('name', ['pope', 'vipe', 'pope+vipe', 't5'])
def test_kernels_under_autocast(name):
    """Half precision for q, k and v only: factors, bias and the expected distance stay in float32."""
    tokens = torch.randint(1, 11, (1, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = make(torch.float32, pe=name, kernel='reference').to(DEVICE)(tokens)[0]
    with torch.autocast(DEVICE, torch.bfloat16):
        half = make(torch.float32, pe=name, kernel='triton').to(DEVICE)(tokens)[0]
    assert (half - exact).abs().max() < 0.1 * exact.abs().max()


@kernel_test
def test_sums_compile_in_one_graph():
    for name in ('pope+vipe', 'rope+alibi'):
        model = make(torch.float32, pe=name, kernel='reference').to(DEVICE)
        tokens = torch.randint(1, 11, (1, 9)).to(DEVICE)
        close(torch.compile(model, fullgraph=True, backend='aot_eager')(tokens)[0].detach(), model(tokens)[0].detach(), 1e-4)


@kernel_test
@pytest.mark.parametrize('shape', [(2, 3, 20, 20, 8), (1, 2, 50, 50, 3), (3, 1, 1, 1, 4), (1, 2, 16, 100, 34), (1, 1, 120, 512, 5)])
@pytest.mark.parametrize('sharpen, copy', [(True, False), (True, True), (False, True)])
def test_cursor_scan_by_the_kernel(shape, sharpen, copy):
    """Output and the gradients of gates, gamma, table and jumps, against the reference in float64."""
    if shape[3] == 512 and not (sharpen and copy):
        pytest.skip('once is enough')
    assert max(scan_errors(shape, sharpen, copy)) < 1e-4


def scan_errors(shape, sharpen, copy, seed=0, scan=kernels.cursor_scan):
    torch.manual_seed(sum(shape) + seed)
    reset, step, gamma, table, jumps = kernels.random_scan(*shape, DEVICE)
    inputs = [reset, step, table, *[gamma] * sharpen, *[jumps] * copy]
    call = lambda f: lambda reset, step, table, *rest: f(reset, step, rest[0] if sharpen else None, table, rest[-1] if copy else None)
    return errors(call(scan), call(kernels.cursor_scan_reference), inputs)


@kernel_test
def test_cursor_scan_by_the_kernel_at_512():
    """Where two bins tie, sharpening doubles every rounding error at each step: seed 0 draws such gates, and float32 itself loses 4e-5 there."""
    assert max(scan_errors((1, 1, 512, 512, 4), True, False, seed=1)) < 1e-4


@gpu
@pytest.mark.parametrize('copy', [False, True])
def test_gpu_cursor_scan_at_length(copy):
    """1e-4, or where ties between bins amplify every rounding, ten times what the reference errs in float32."""
    shape = (2, 3, 2048, 2048, 84)
    own = max(scan_errors(shape, True, copy, scan=kernels.cursor_scan_reference))
    assert max(scan_errors(shape, True, copy)) < max(1e-4, 10 * own)


@kernel_test
def test_cursor_scan_as_an_operator():
    """Large and tiny exponents, nothing unwritten, errors, schema; gamma of a group of sequences; the table is one for all seeds."""
    torch.manual_seed(0)
    reset, step, gamma, table, jumps = (x.detach() for x in kernels.random_scan(2, 2, 9, 12, 4, DEVICE))
    for g in (1.0001, 1e4):
        sharp = torch.full((2,), g, device=DEVICE)
        close(kernels.cursor_scan(reset, step, sharp, table, jumps), kernels.cursor_scan_reference(reset, step, sharp, table, jumps), 1e-5)
    both = torch.stack([gamma, gamma + 1])
    for b in (0, 1):
        one = kernels.cursor_scan_reference(reset[b:b + 1], step[b:b + 1], both[b], table)
        close(kernels.cursor_scan(reset, step, both, table)[b:b + 1], one, 1e-5)
    torch.library.opcheck(kernels.scan_forward, (reset, step, gamma[None], table, jumps), test_utils=('test_schema', 'test_faketensor'))
    _, checkpoints = kernels.scan_forward(reset, step, gamma[None], table, jumps)
    back = (torch.randn(2, 2, 9, 4, device=DEVICE), reset, step, gamma[None], table, jumps, checkpoints, True)
    torch.library.opcheck(kernels.scan_backward, back, test_utils=('test_schema', 'test_faketensor'))
    torch.use_deterministic_algorithms(True, warn_only=True)                            # fills new memory with NaN
    try:
        longer = [x.detach().requires_grad_() for x in kernels.random_scan(1, 1, 50, 50, 4, DEVICE)]                 # two windows, a chunk cut short
        for inputs in ([x.clone().requires_grad_() for x in (reset, step, gamma, table, jumps)], longer):
            y = kernels.cursor_scan(*inputs)
            assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y.sum(), inputs)))
    finally:
        torch.use_deterministic_algorithms(False)
    for wrong, says in (((reset, step[..., :2], gamma, table), r'step must be \[2, 2, 9, 3\]'), ((reset, step, gamma[:1], table), r'gamma must be \[(1, )?2\]'),
                        ((reset, step, gamma, table, jumps[..., :9]), r'copy must be \[2, 2, 9, 10\]'), ((reset, step, gamma, table[:24]), r'\[2P\+1, d_pe\]'),
                        ((reset, step, gamma, table[:17]), 'must hold offsets -9..9')):
        for scan in (kernels.cursor_scan, kernels.cursor_scan_reference):
            with pytest.raises(ValueError, match=says):
                scan(*wrong)


COMPILE = """
import sys, torch, kernels, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for kind in ('forward', 'keys', 'queries'):
    for dtype, D, on in ((torch.bfloat16, 64, True), (torch.bfloat16, 128, False), (torch.float32, 80, True)):
        M, N, warps, stages = kernels.blocks(kind, D, 4096, dtype, on)
        fixed = dict(D=D, BD=triton.next_power_of_2(D), POPE=on, RESCALE=on, TOEPLITZ=on, DISTANCE=on, STEP=16, FINE=128, M=M, N=N,
                     PRECISION='ieee' if dtype == torch.float32 else 'tf32')
        kernel = getattr(kernels, kind + '_kernel')
        half = '*bf16' if dtype == torch.bfloat16 else '*fp32'
        kinds = {'scale': 'fp32', **{name: half for name in 'Q K V Y DY DK DV DQ'.split()}, **{name: 'i32' for name in ('H', 'T')},
                 **{name: 'constexpr' for name in fixed}}
        names = kernel.arg_names
        signature = {name: kinds.get(name, '*fp32' if name.isupper() else 'i32') for name in names}
        aligned = {(i,): [['tt.divisibility', 16]] for i, name in enumerate(names) if signature[name][0] == '*' or name[-2:] in ('_b', '_h', '_t')}
        source = ASTSource(kernel, signature, {(names.index(name),): x for name, x in fixed.items() if name in names}, aligned)
        made = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=dict(num_warps=warps, num_stages=stages))
        print(kind, dtype, made.metadata.shared <= 232448, 'wgmma' in made.asm['ptx'])
for kernel in (kernels.scan_kernel, kernels.scan_backward_kernel):
    P, d_pe, ints = 256, 32, ('first', 'last', 'C', 'T', 'L', 'D', 'EACH')
    fake = [torch.empty(1, 1, P), torch.empty(1, 1), torch.empty(2 * P + 1, d_pe), torch.empty(1, 1, P, P + 1)]
    _, (*_, fixed) = kernels.scan_launches(*fake)
    warps, stages = fixed.pop('num_warps'), fixed.pop('num_stages')
    fixed = {key: x for key, x in fixed.items() if key not in ints} | dict(WANT_TABLE=True, PRECISION='tf32x3')
    names = kernel.arg_names
    signature = {name: 'constexpr' if name in fixed else 'i32' if name in ints else '*fp32' for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): x for name, x in fixed.items() if name in names})
    made = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=dict(num_warps=warps, num_stages=stages))
    print(kernel.__name__, torch.float32, made.metadata.shared <= 232448, 'wgmma' in made.asm['ptx'])
    print(kernel.__name__, 'log2', 'lg2.approx' in made.asm['ptx'], False)
"""


@pytest.mark.skipif(kernels.triton is None, reason='needs Triton')
def test_kernels_compile_for_an_h200():
    """Without one: Triton's compiler alone. Their shared memory fits, half precision uses the tensor cores' asynchronous instructions, the scan's logarithm is one."""
    pretend = 'import torch; torch.cuda.is_available = lambda: True'                     # so that kernels.py leaves the interpreter off
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    out = python('-c', pretend + COMPILE, env=environment)
    lines = out.stdout.splitlines()
    assert len(lines) == 13, out.stderr
    assert all(line.split()[2:] == ['True', str('bfloat16' in line)] for line in lines), lines


KERNEL_VARIANTS = {name: kw for name, kw in VARIANTS.items() if pe.build(pe.PEConfig(**dict(dict(d_model=32, n_head=4), **kw))).kernel} | {
    'prism copy': dict(VARIANTS['prism copy'], n_head=2, prism_cursors=1)}


@kernel_test
@pytest.mark.parametrize('kw', KERNEL_VARIANTS.values(), ids=KERNEL_VARIANTS)
def test_encodings_by_kernels(kw):
    """A model with kernel=triton is the one with kernel=reference: loss and every gradient, single and as two seeds under vmap."""
    assert len(KERNEL_VARIANTS) == 21
    tokens = torch.randint(1, 11, (1, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for kernel in ('triton', 'reference'):
        models = [make(torch.float32, seed, n_layer=1, kernel=kernel, **kw).to(DEVICE) for seed in (0, 1)]
        loss = sum(model(tokens[:, :-1], tokens[:, 1:], total_len=30)[1] for model in models)
        loss.backward()
        params, buffers = torch.func.stack_module_state(models)
        one = lambda p, b: torch.func.functional_call(models[0], (p, b), (tokens[:, :-1], tokens[:, 1:]), dict(total_len=30), tie_weights=False)[1]
        losses = torch.func.vmap(one)(params, buffers)
        losses.sum().backward()
        together = [torch.stack([dict(model.named_parameters())[name].grad for model in models]) for name in params]
        found.append([loss, losses.sum(), *together, *(p.grad for p in params.values())])
    assert abs(found[0][0] - found[1][0]) < 1e-4
    for a, b in zip(*found):
        assert (a - b).norm() <= 2e-4 * b.norm() + 1e-6


@gpu
def test_gpu_kernels_at_32768_tokens():
    """Finite, and right on sampled rows, which float64 computes one by one."""
    g, (H, T, D) = torch.Generator().manual_seed(0), (2, 32768, 64)
    q, k, v = strided(1, H, T, D, torch.bfloat16, 'projected', g)
    delta, u, bias = (own_arguments(name, H, T, D, g) for name in ('pope', 'vipe', 'bias'))
    t = torch.arange(T, device=DEVICE)
    angle = t[:, None].double() * 1e4 ** (-torch.arange(D, device=DEVICE, dtype=torch.float64) / D)
    for name, own in (('pope', delta), ('vipe', u), ('bias', bias)):
        out = getattr(kernels, f'{name}_attention')(q, k, v, own)
        y, e = out if name == 'vipe' else (out, None)
        grads = torch.autograd.grad(y.float().square().sum() + (0 if e is None else e.sum()), (q, k, v, own))
        assert all(x.isfinite().all() for x in (y, *grads))
        for row in (0, 1, 4095, 20000, T - 1):
            qd, kd, vd = q[0, :, row].double(), k[0, :, :row + 1].double(), v[0, :, :row + 1].double()
            if name == 'pope':
                x = torch.einsum('hd,hsd->hs', F.softplus(qd), F.softplus(kd) * (angle[:row + 1] - angle[row] + delta[:, None].double()).cos())
            else:
                x = torch.einsum('hd,hsd->hs', qd, kd)
            x = x * D ** -0.5
            if name == 'vipe':
                x = x * math.log(row + 1) * (1 + torch.einsum('hd,hsd->hs', u.double(), kd))
            if name == 'bias':
                x = x + bias[:, row - t[:row + 1]]
            p = x.softmax(dim=-1)
            expected = torch.einsum('hs,hsd->hd', p, vd)
            assert (y[0, :, row].double() - expected).norm() < 0.02 * expected.norm()
            if e is not None and row:
                assert ((e[0, :, row] - (p * (row - t[:row + 1])).sum(dim=-1)).abs() / (row + 1)).max() < 0.01


def test_every_file_runs():
    zoo, known, examples, lengths, shapes = (run.stdout for run in pythons(['pe.py'], ['tasks.py'], ['tasks.py', 'parity', '3'], ['tasks.py', 'scan', 'lengths'],
                                                                            ['model.py', 'configs/parity_rope.py', '--d_model=128']))
    assert 'parameters: delta [4, 16]' in zoo and known.count('\n') > len(tasks.known()) and 'predicted: ' in examples
    assert 'train, 16990 problems: tokens in all, from 5 to 34' in lengths and 'test, 3920 problems: tokens after EoI, from 25 to 49' in lengths
    assert re.search(r'embedding.weight +\[\d+, 128\]', shapes) and 'total' in shapes
