"""The core's contracts: read a test to learn what a piece of nanoPE promises.

    python -m pytest test_all.py            on a CPU in some minutes (pip install pytest)
    python -m pytest test_all.py -k rope    what concerns one encoding

Each encoding is compared with its equation, written as a loop over plain numbers in float64. What
must hold for all of them (causality, gradients, precision, ...) runs over VARIANTS, which reads
pe.ENCODINGS, so an encoding that you register is tested, too. Tasks are compared with oracles, and
kernels with their plain references, in Triton's interpreter where there is no GPU.
"""
import collections
import concurrent.futures
import contextlib
import doctest
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import string
import subprocess
import sys
import time
import types
import warnings
from functools import partial
from unittest import mock

# For torch and for the programs that tests run: on tensors this small, threads mostly wait.
os.environ.setdefault('OMP_NUM_THREADS', '1')
if __name__ == '__main__' and {'-h', '--help'} & set(sys.argv):
    sys.exit(print(__doc__))  # works without pytest
try:
    import pytest
except ImportError:
    sys.exit('the tests require pytest: pip install pytest')
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import pe
import probe
import tasks
import train
from model import ModelConfig, Transformer
from results import tables

HERE = os.path.dirname(os.path.abspath(__file__))
TRAIN_LEN = 12

# Every encoding as it is, ...
VARIANTS = {name: dict(pe=name) for name in pe.ENCODINGS}
# ... every switch that changes what one computes, sums, and what wraps an encoding
VARIANTS |= {
    't5 24': dict(pe='t5', t5_buckets=24, t5_max_distance=40),
    'pope uniform': dict(pe='pope', pope_delta='uniform'),
    'pope no delta': dict(pe='pope', pope_delta='none'),
    'pope no softplus': dict(pe='pope', pope_softplus=False),
    'pope half': dict(pe='pope', pope_frequencies='half'),
    'vipe s one': dict(pe='vipe', vipe_s='one'),
    'vipe s global': dict(pe='vipe', vipe_s='global', eval_len=40),
    'vipe logits only': dict(pe='vipe', vipe_value=False),
    'vipe value only': dict(pe='vipe', vipe_logn=False, vipe_u=False),
    'vipe d_p': dict(pe='vipe', vipe_d_p=5),
    'prism copy': dict(pe='prism', prism_copy='fixed'),
    'prism copy trained': dict(pe='prism', prism_copy='trained', prism_sharpen=False),
    'prism absolute': dict(pe='prism', prism_absolute=True, prism_norm='unit'),
    'prism two layers': dict(pe='prism', prism_layers=[1, 2]),
    'prism orthogonal': dict(pe='prism', prism_recurrent='orthogonal'),
    'prism norm': dict(pe='prism', prism_recurrent='norm', prism_norm='scale'),
    'prism no reset, mean': dict(pe='prism', prism_reset=False, prism_superpose=False),
    'prism penalty+rope': dict(pe='prism+rope', prism_recurrent='penalty'),
    'ape+rope': dict(pe='ape+rope'),
    'pope+vipe': dict(pe='pope+vipe'),
    'pope+alibi': dict(pe='pope+alibi'),
    'rope fraction': dict(pe='rope', rope_fraction=0.5),
    'rope+ssmax': dict(pe='rope+ssmax'),
    'rope+stickbreaking': dict(pe='rope+stickbreaking'),
    'path+fox': dict(pe='path+fox'),
    'dape+vipe': dict(pe='dape+vipe'),
    'cope on 2 heads': dict(pe='cope', rope_heads=2),
    'vrope+vipe': dict(pe='vrope+vipe'),
    'vipe+vrope': dict(pe='vipe+vrope'),
    't5+fire': dict(pe='t5+fire'),
    'rope on 1 head': dict(pe='rope', rope_heads=1),
    'stickbreaking on 2 heads': dict(pe='stickbreaking', rope_heads=2),
    'pope+vipe on 3 heads': dict(pe='pope+vipe', rope_heads=3),
    'alibi on 2 heads': dict(pe='alibi', rope_heads=2),
    'prism on 2 heads': dict(pe='prism', rope_heads=2),
    'nope every 2': dict(pe='ape+rope', nope_every=2),
    'mla rope': dict(pe='rope', attention='mla'),
    'mla rope on 1 head': dict(pe='rope', attention='mla', rope_heads=1),
}
variants = pytest.mark.parametrize('kw', VARIANTS.values(), ids=VARIANTS)


# ------------------------------------------------------------------------------------------------
# helpers

def noisy(module, by=1.0):
    """The module, with noise on every parameter, so that none is at its starting value."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * by)
    return module


def make(dtype=torch.float64, seed=0, **kw):
    """A small model in evaluation, its encoding's parameters moved off their starting values."""
    torch.manual_seed(seed)
    small = dict(d_model=32, n_head=4, vocab_size=11, train_len=TRAIN_LEN, max_len=64)
    model = Transformer(ModelConfig(**(small | kw))).to(dtype)
    for block in model.blocks:
        noisy(block.attn.pe, 0.1)
    return model.eval()


def encoding(name, heads=2, head_dim=8, **kw):
    """The encoding alone, in float64, at its starting values."""
    torch.manual_seed(0)
    cfg = pe.PEConfig(pe=name, d_model=heads * head_dim, n_head=heads, **kw)
    return pe.build(cfg)[0].double().eval()


def qkv(heads=2, T=10, head_dim=8, seed=1):
    """Random q, k, v [2, heads, T, head_dim] in float64, and the positions 0..T-1."""
    g = torch.Generator().manual_seed(seed)
    shape = 2, heads, T, head_dim
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(3))
    return q, k, v, torch.arange(T)


def content(q, k):
    """<q, k> / sqrt(d) of two vectors: the logit that an additive bias is added to."""
    return q @ k / math.sqrt(len(q))


def rotated(q, k, angle):
    """RoPE's logit Re sum_c conj(q_c) k_c e^(i angle_c) / sqrt(d), pairs of features as complex."""
    q_c, k_c = (torch.view_as_complex(z.reshape(-1, 2).contiguous()) for z in (q, k))
    return (q_c.conj() * k_c * torch.exp(1j * angle)).real.sum() / math.sqrt(len(q))


@torch.no_grad()
def loop_logits(q, k, score):
    """Logits [B, H, T, T]: score(q_t, k_s, t, s, h, b) of vectors of width D; -inf where s > t."""
    B, H, T, _ = q.shape
    logits = torch.full((B, H, T, T), -math.inf, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        for s in range(t + 1):
            logits[b, h, t, s] = score(q[b, h, t], k[b, h, s], t, s, h, b)
    return logits


def check_logits(enc, score, state=None, x=None, T=10):
    """Asserts that the encoding's logits, for the q and k of qkv(), are those of loop_logits."""
    q, k, _, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
    close(enc.logits(q, k, pos, state, x), loop_logits(q, k, score))


def close(a, b, tol=1e-10):
    """Asserts that a and b (tensors, lists or numbers) agree to tol, relative and absolute."""
    a = torch.as_tensor(a, dtype=torch.float64)
    b = torch.as_tensor(b, dtype=torch.float64)
    # where they differ: of logits at -inf the difference is no number
    assert torch.allclose(a, b, rtol=tol, atol=tol), (
        f'largest error {(a - b)[a != b].abs().max():.1e}')


def gpu(test):
    """Marks a test that needs a GPU."""
    with warnings.catch_warnings(action='ignore'):
        needs = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
        return pytest.mark.gpu(needs(test))


# train.py's keys for a run of seconds
TINY = dict(d_model=16, n_layer=1, batch_size=8, max_steps=12, eval_interval=4, log_interval=2,
            train_lengths='1-3', eval_lengths='1-5', n_eval=8, n_test=16, warmup_steps=2,
            device='cpu')


def flags(**kw):
    """TINY and the keys given, as command-line arguments."""
    return [f'--{key}={value}' for key, value in {**TINY, **kw}.items()]


def python(*argv, **kw):
    """Run a program of the repository: its returncode, stdout and stderr."""
    return subprocess.run([sys.executable, *argv], cwd=HERE, capture_output=True, text=True, **kw)


def pythons(*argvs):
    """python() of each, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda argv: python(*argv), argvs))


# ------------------------------------------------------------------------------------------------
# pe.py: each encoding against its equation, in loops and in float64

THETA = 10.0 ** -torch.arange(4).double()   # RoPE's theta_c = 10000^(-2c/d) at d = 8


@pytest.mark.parametrize('causal', [True, False])
def test_nope_is_plain_attention(causal):
    """<q_t, k_s> / sqrt(d) for s <= t, or for every s but the last, for the last queries alone."""
    q, k, _, pos = qkv()
    enc = encoding('nope', causal=causal)
    hidden = pos > pos[:, None] if causal else pos.expand(10, 10) == 9
    expected = (q @ k.mT / math.sqrt(8)).masked_fill(hidden, -math.inf)
    close(enc.logits(q, k, pos), expected)
    close(enc.logits(q[:, :, -2:], k, pos), expected[:, :, -2:])


def test_rope():
    """Pair c is rotated by t 10000^(-2c/d): the logit depends on s - t alone."""
    check_logits(encoding('rope'), lambda q, k, t, s, *_: rotated(q, k, (s - t) * THETA))


def test_rope_fraction():
    """The fastest ceil(p D/2) frequencies rotate, the others do not."""
    theta = THETA * torch.tensor([1, 1, 0, 0])
    check_logits(encoding('rope', rope_fraction=0.3),
                 lambda q, k, t, s, *_: rotated(q, k, (s - t) * theta))


def yarn_frequencies(s, train_len, d):
    """RoPE's frequencies, the slow ones divided by s, the fast ones not; a ramp between."""
    def feature(turns):  # that rotates this often over train_len
        return d * math.log(train_len / (turns * 2 * math.pi)) / (2 * math.log(10000))

    low, high = max(math.floor(feature(32)), 0), min(math.ceil(feature(1)), d - 1)
    c = torch.arange(d // 2).double()
    w = ((c - low) / (high - low)).clamp(0, 1)
    return 10000 ** (-2 * c / d) * (1 - w + w / s)


@pytest.mark.parametrize('T, train_len, d', [(10, 12, 8), (1280, 128, 16), (9999, 3333, 64)])
def test_yarn(T, train_len, d):
    """RoPE with frequencies that depend on s = T / train_len, and logits times (0.1 ln s + 1)^2."""
    ratio = max(1, T / train_len)
    theta = yarn_frequencies(ratio, train_len, d)
    if d == 16:  # published: transformers 5.23, _compute_yarn_parameters
        close(theta, [1, 0.221359, 0.04, 0.003162, 0.001, 0.000316, 0.0001, 0.000032], 1e-6)
    enc = encoding('yarn', head_dim=d, train_len=train_len)
    temperature = (0.1 * math.log(ratio) + 1) ** 2
    check_logits(enc, lambda q, k, t, s, *_: temperature * rotated(q, k, (s - t) * theta),
                 enc.state(None, torch.arange(10), T))


@pytest.mark.parametrize('delta', ['zero', 'uniform', 'none'])
@pytest.mark.parametrize('positive, number', [(True, 'all'), (False, 'all'), (True, 'half')])
def test_pope(delta, positive, number):
    """Magnitudes softplus(q), softplus(k); phases (s - t) theta_c + delta_c."""
    enc = encoding('pope', pope_delta=delta, pope_softplus=positive, pope_frequencies=number)
    low, high = (-2 * math.pi, 0) if delta == 'uniform' else (0, 0)
    assert low <= enc.delta.min() <= low + 1 and high - 1 <= enc.delta.max() <= high
    noisy(enc)
    c = torch.arange(8) if number == 'all' else torch.tensor([0, 0, 2, 2, 4, 4, 6, 6])
    theta = 10000 ** (-c.double() / 8)

    def score(q, k, t, s, h, b):
        mu = F.softplus(q) * F.softplus(k) if positive else q * k
        return (mu * ((s - t) * theta + enc.delta[h]).cos()).sum() / math.sqrt(8)

    check_logits(enc, score)


def test_alibi():
    """The published slopes: powers of two, and for 12 heads those of BLOOM's and MPT's code."""
    def slopes(heads):
        return encoding('alibi', heads=heads).slope.tolist()

    assert slopes(8) == [2.0 ** -h for h in range(1, 9)]
    close(slopes(12), slopes(8) + [2.0 ** -0.5, 2.0 ** -1.5, 2.0 ** -2.5, 2.0 ** -3.5], 1e-6)
    check_logits(encoding('alibi'),
                 lambda q, k, t, s, h, b: content(q, k) - 2.0 ** (-4 * (h + 1)) * (t - s))


@pytest.mark.parametrize('buckets, max_distance', [(32, 128), (24, 128), (32, 64), (7, 20)])
def test_t5(buckets, max_distance):
    """Half of the buckets hold one distance each, the others are log-spaced up to max_distance."""
    exact = buckets // 2

    def bucket(d):
        if d < exact:
            return d
        log = math.log(d / exact) / math.log(max_distance / exact)
        return min(buckets - 1, exact + int(log * (buckets - exact)))

    enc = noisy(encoding('t5', t5_buckets=buckets, t5_max_distance=max_distance))
    assert enc.bucket(torch.arange(1000)).tolist() == [bucket(d) for d in range(1000)]
    check_logits(enc, lambda q, k, t, s, h, b: content(q, k) + enc.table[bucket(t - s), h], T=25)


@pytest.mark.parametrize('name', ['alibi', 't5'])
def test_the_bias_of_an_encoder_is_symmetric(name):
    q, pos = torch.zeros(2, 2, 10, 8).double(), torch.arange(10)
    bias = noisy(encoding(name, causal=False)).logits(q, q, pos)[..., :-1, :-1]
    close(bias, bias.mT)
    assert bias[..., 0, 1].ne(bias[..., 0, 2]).all()


def test_fire():
    """Bias MLP(psi(t - s) / psi(max(t, L))), psi(x) = log(c x + 1)."""
    enc = noisy(encoding('fire', train_len=12))
    with torch.no_grad():
        enc.c.fill_(-0.3)  # |c| counts
        enc.L.fill_(1.2)  # in units of 12 / 4: L = 3.6
    W_1, b_1, W_2, b_2 = enc.mlp.parameters()

    def psi(x):
        return math.log(0.3 * x + 1)

    def score(q, k, t, s, h, b):
        x = psi(t - s) / (psi(max(t, 3.6)) + 1e-6)
        return content(q, k) + W_2[h] @ (W_1[:, 0] * x + b_1).relu() + b_2[h]

    check_logits(enc, score)


def test_kerple_and_dape():
    """Bias - a log(1 + b d); DAPE adds an MLP of both terms of all heads."""
    q, k, _, pos = qkv()
    dape, kerple = encoding('dape'), encoding('kerple')
    a, b = torch.tensor([[0.75, 0.01], [0.4, 0.9]], dtype=torch.float64)[..., None, None]
    dape.load_state_dict(dict(a=torch.tensor([0.75, -3.0]), b=b.flatten()), strict=False)
    kerple.load_state_dict(dape.state_dict(), strict=False)
    S = (q @ k.mT / math.sqrt(8)).tril()
    B = (-a * torch.log(1 + b * (pos[:, None] - pos).clamp(min=0))).expand_as(S)  # a from 0.01 on
    logits = kerple.logits(q, k, pos)
    close(logits.tril(), S + B)
    logits[0, 1, 9, 0].backward()
    assert kerple.a.grad[1] != 0    # though it is held
    W_1, b_1, W_2, b_2 = dape.mlp.parameters()
    hidden = torch.einsum('ij,bjts->btsi', W_1, torch.cat([S, B], dim=1)) + b_1
    bias = torch.einsum('hi,btsi->bhts', W_2, F.leaky_relu(hidden)) + b_2[:, None, None]
    close(dape.logits(q, k, pos).tril(), (S + B + bias).tril())


def test_fox():
    """Every token between s and t multiplies what t attends to by its gate f."""
    enc = encoding('fox')
    x = torch.randn(2, 10, 16).double()
    f = torch.sigmoid(x @ enc.gate.weight.T + enc.gate.bias)  # (B, T, H)
    check_logits(enc, lambda q, k, t, s, h, b: content(q, k) + f[b, s + 1:t + 1, h].log().sum(),
                 x=x)


def test_cope():
    """The position of a key counts the gates from it to the query; vectors are interpolated."""
    enc = noisy(encoding('cope', cope_positions=4))
    _, keys, _, _ = qkv()

    def score(q, k, t, s, h, b):
        p = min(torch.sigmoid(keys[b, h, s:t + 1] @ q / math.sqrt(8)).sum().item(), 3)
        low, high = q @ enc.e[math.floor(p)], q @ enc.e[math.ceil(p)]
        return content(q, k) + low + (p - math.floor(p)) * (high - low)

    check_logits(enc, score)


def convolved(enc, x):
    """[B, T, F]: x [B, T, C] through two matrices, then sum_j conv[:, j] of j tokens before."""
    rows = x @ enc.W[0].weight.T @ enc.W[1].weight.T
    shifted = [F.pad(rows, (0, 0, j, 0))[:, :x.shape[1]] for j in range(enc.conv.shape[1])]
    return sum(w * row for w, row in zip(enc.conv.T, shifted))


def test_selective_rope():
    """Pair c is rotated by theta_c times the sum of the angles that the tokens so far ask for."""
    enc = encoding('selective_rope')
    x = torch.randn(2, 10, 16).double()
    steps = convolved(enc, x).view(2, 10, 2, 4)  # (B, T, H, D/2)
    check_logits(enc, lambda q, k, t, s, h, b:
                 rotated(q, k, -THETA * steps[b, s + 1:t + 1, h].sum(dim=0)), x=x)


def test_path():
    """k_s passes a reflection by every token after it, one after the other."""
    enc = encoding('path')
    x = torch.randn(2, 10, 16).double()
    w = F.normalize(convolved(enc, x).view(2, 10, 2, 8), dim=-1)  # (B, T, H, D)
    beta = 2 * torch.sigmoid(x @ enc.W_beta.weight.T + enc.W_beta.bias)  # (B, T, H)

    def score(q, k, t, s, h, b):
        for j in range(s + 1, t + 1):
            k = k - beta[b, j, h] * (k @ w[b, j, h]) * w[b, j, h]
        return content(q, k)

    check_logits(enc, score, x=x)


def test_stickbreaking():
    """The latest key takes sigmoid(z) of the stick, the one before it of what is left, ..."""
    q, k, v, pos = qkv()
    y = encoding('stickbreaking').attend(q, k, v, pos)
    for t in range(10):
        stick, total = 1.0, torch.zeros(2, 2, 8).double()
        for s in reversed(range(t)):
            z = (q[:, :, t] * k[:, :, s]).sum(dim=-1, keepdim=True) / math.sqrt(8)
            total += stick * torch.sigmoid(z) * v[:, :, s]
            stick = stick * (1 - torch.sigmoid(z))
        close(y[:, :, t], total)


@pytest.mark.parametrize('name, theta', [('ssmax', 0 * THETA), ('rope+ssmax', THETA)])
def test_ssmax(name, theta):
    """Logits times s log n, n the number of visible keys; with RoPE, RoPE's."""
    enc = noisy(encoding(name))
    s, = enc.parameters()
    check_logits(enc, lambda q, k, t, j, h, b:
                 s[h] * math.log(t + 1) * rotated(q, k, (j - t) * theta))
    q, k, _, pos = qkv()
    close(encoding('ssmax').logits(q, k, 8 * pos), encoding('ssmax').logits(q, k, pos))


def test_vrope():
    """Each value arrives rotated by its distance: y_t = sum_s alpha_ts R_(s-t) v_s."""
    q, k, v, pos = qkv()
    enc = encoding('vrope')
    alpha = enc.logits(q, k, pos).softmax(-1)[..., None]  # (B, H, T, T, 1)
    pairs = torch.view_as_complex(v.unflatten(-1, (4, 2)))  # (B, H, T, D/2)
    expected = torch.zeros_like(pairs)
    for t in range(10):
        for s in range(t + 1):
            expected[:, :, t] += alpha[:, :, t, s] * pairs[:, :, s] * torch.exp(
                1j * (s - t) * THETA)
    close(enc.attend(q, k, v, pos), torch.view_as_real(expected).flatten(-2))


@pytest.mark.parametrize('total_len', [None, 30])
@pytest.mark.parametrize('kw', [
    dict(), dict(vipe_s='one'), dict(vipe_s='global', eval_len=48), dict(vipe_u=False),
    dict(vipe_logn=False), dict(vipe_value=False)], ids=str)
def test_vipe(kw, total_len):
    """Logits of ViPE eq. 7; eq. 8's average of [v_i ; p_(n-i)], the code p linear in n - i."""
    enc = noisy(encoding('vipe', train_len=6, vipe_d_p=3, **kw), 0.3)
    s = {'one': 1, 'global': 48 / 6}.get(kw.get('vipe_s'), (total_len or 10) / 6)

    def score(q, k, t, i, h, b):
        row = math.log(t + 1) if kw.get('vipe_logn', True) else 1
        col = 1 + enc.u[h] @ k if kw.get('vipe_u', True) else 1
        return s * row * col * content(q, k)

    q, k, v, pos = qkv()
    state = enc.state(None, pos, total_len)
    check_logits(enc, score, state)
    alpha = enc.logits(q, k, pos, state).softmax(-1)
    expected = alpha @ v
    if 'vipe_value' not in kw:
        distance = (pos[:, None] - pos)[..., None].double()  # (n, i, 1)
        code = distance / s * enc.W_p[:, None] + enc.b_p[:, None]  # (H, n, i, d_p)
        expected = torch.cat([expected, torch.einsum('bhni,hnip->bhnp', alpha, code)], dim=-1)
    close(enc.attend(q, k, v, pos, state), expected)
    if kw.get('vipe_s') == 'global':  # 1 on trained lengths
        assert [enc.state(None, torch.arange(T)) for T in (1, 6, 7, 48)] == [1, 1, 8, 8]


def test_pope_vipe_scales_by_the_raw_key():
    """In 'pope+vipe' the factor 1 + <u, k> reads k as it was before PoPE."""
    enc = noisy(encoding('pope+vipe', train_len=20))
    q, k, _, pos = qkv()
    pope, vipe = enc.parts
    polar = pope.logits(q, k, pos)
    check_logits(enc, lambda q, k, t, s, h, b:
                 math.log(t + 1) * (1 + vipe.u[h] @ k) * polar[b, h, t, s])


def test_ape():
    """Even features are sin(t theta), odd ones cos(t theta), with one theta for each pair."""
    angle = torch.arange(9)[:, None] * THETA
    x = torch.randn(1, 9, 8).double()
    p = pe.APE(pe.PEConfig(d_model=8)).embed(x, torch.arange(9))[0] - x[0]
    close(p[:, 0::2], angle.sin())
    close(p[:, 1::2], angle.cos())


def test_shifted_ape_shifts_in_training_only():
    cfg = pe.PEConfig(d_model=8, max_shift=50)
    pos, x = torch.arange(9), torch.zeros(300, 9, 8)
    enc, ape = pe.ShiftedAPE(cfg), pe.APE(cfg)
    close(enc.eval().embed(x, pos), ape.embed(x, pos), 1e-6)
    table = ape.embed(torch.zeros(1, 60, 8), torch.arange(60))[0]
    shifted = enc.train().embed(x, pos)
    m = torch.cdist(shifted[:, 0], table).argmin(dim=-1)
    close(shifted, table[m[:, None] + pos], 1e-5)
    assert m.min() < 5 and 45 < m.max() <= 50 and len(m.unique()) > 25


@pytest.mark.parametrize('name, std', [('learned', 0.02), ('random', 0.5 ** 0.5)])
def test_tables_repeat_their_last_row(name, std):
    enc = encoding(name, max_len=500)
    x = enc.embed(torch.zeros(1, 504, 16).double(), torch.arange(504))[0]
    close(x[:500], enc.table)
    close(x[500:], enc.table[499].expand(4, 16))
    assert abs(enc.table.std() / std - 1) < 0.05


# ------------------------------------------------------------------------------------------------
# pe.py: PRISM's cursors

def random_gates(T, copy=False, B=1, C=2, dtype=torch.float64):
    """p_reset [B, C, T], p_step [B, C, T, 3] and p_copy [B, C, T, T + 1] or None."""
    g = torch.Generator().manual_seed(0)
    reset = torch.rand(B, C, T, generator=g, dtype=dtype)
    step = torch.randn(B, C, T, 3, generator=g, dtype=dtype).softmax(dim=-1)
    jump = torch.randn(B, C, T, T + 1, generator=g, dtype=dtype)
    jump[..., :-1].masked_fill_(torch.ones(T, T).triu(1) > 0, -math.inf)  # no jumps to later tokens
    return reset, step, jump.softmax(dim=-1) if copy else None


def law_of_paths(reset, step, jump):
    """{offset: probability} of one cursor after its gates, summed over every path that they allow.

    At each step a path resets or not, moves by +1, -1 or 0, and jumps to a token or (-1) does not.
    """
    choices = list(itertools.product((True, False), (1, -1, 0), range(-1, len(jump[0]) - 1)))
    law = collections.Counter()
    for path in itertools.product(choices, repeat=len(reset)):
        weight, offset = 1.0, 0
        for t, (resets, move, target) in enumerate(path):
            weight *= reset[t] if resets else 1 - reset[t]
            weight *= step[t][(1, -1, 0).index(move)] * jump[t][target]
            offset = target if target >= 0 else (0 if resets else offset) + move
        law[offset] += weight
    return law


@pytest.mark.parametrize('copy, T', [(False, 6), (True, 3)])
def test_cursor_histogram_is_the_sum_over_all_paths(copy, T):
    """Algorithm 1 without sharpening: the distribution of a random walk with resets and jumps."""
    reset, step, jump = random_gates(T, copy)
    table = torch.eye(2 * T + 5).double()  # with which a scan returns histograms over -T-2..T+2
    h = pe.cursor_scan(reset, step, None, table, jump)
    for c, n in itertools.product((0, 1), (1, 2, 4, 6) if T == 6 else (1, 2, 3)):
        seen = [[1.0]] * n
        if copy:  # jumps to the first n tokens, and none at all
            seen = torch.cat([jump[0, c, :n, :n], jump[0, c, :n, -1:]], dim=-1).tolist()
        law = law_of_paths(reset[0, c, :n].tolist(), step[0, c, :n].tolist(), seen)
        close(h[0, c, n - 1], [law[d] for d in range(-T - 2, T + 3)], 1e-12)


@pytest.mark.parametrize('dtype, tol', [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_cursor_keeps_its_mass(dtype, tol):
    """Over 2,048 tokens; what jumps to a later token is lost."""
    reset, step, _ = random_gates(2048, dtype=dtype)
    ones = torch.ones(4097, 1, dtype=dtype)
    mass = pe.cursor_scan(reset * 0.01, step, None, ones)
    assert (mass - 1).abs().max() < tol
    jump = torch.tensor([0.25, 0.75, 0.0], dtype=dtype).expand(1, 2, 2, 3)
    mass = pe.cursor_scan(reset[..., :2], step[:, :, :2], None, ones[:5], jump)
    close(mass[0, :, :, 0], [[0.25, 1.0]] * 2, tol)


def test_sharpening_multiplies_exponents():
    """PRISM appendix A.2.1: n sharpenings by gamma are one by gamma^n.

    A large gamma leaves the top bin, not NaN; EPS, 1e-8, fills the empty bins.
    """
    T = 4
    first, keep = torch.tensor([0.5, 0.2, 0.3]).double(), torch.tensor([0.0, 0.0, 1.0]).double()

    def scan(step, gamma, dtype=torch.float64):
        gates = torch.zeros(1, 1, len(step)).to(dtype), torch.stack(step)[None, None].to(dtype)
        table = torch.eye(2 * T + 1, dtype=dtype)  # histograms over -T..T
        return pe.cursor_scan(*gates, torch.tensor([gamma], dtype=dtype), table)[0, 0]

    for n in range(1, T + 1):
        p = first ** 1.7 ** n
        h = scan([first, keep, keep, keep], 1.7)[n - 1]
        close(h[[T + 1, T - 1, T]], p / p.sum(), 1e-5)  # eps = 1e-8 adds to every bin
    for dtype in (torch.float32, torch.float64):
        h = scan([first, keep, keep, keep], 1e4, dtype)[-1]
        close(h, F.one_hot(torch.tensor(T + 1), 2 * T + 1), 1e-6)
    h = scan([keep], 0.125)[0]  # eps^(1/8) = 0.1 where nothing is
    close(h[T - 1:T + 2], torch.tensor([0.1, 1.0, 0.1]) / 1.2, 1e-6)


def test_cursor_scan_in_chunks():
    """Neither the chunk size, nor the size of the table, nor what follows changes an encoding."""
    reset, step, jump = random_gates(20, copy=True, B=2, C=3)
    gamma = torch.tensor([1.01, 2.0, 3.0]).double()  # near 1 the sharpening's eps counts
    table = torch.eye(41).double()
    whole = pe.cursor_scan(reset, step, gamma, table, jump)
    close(pe.cursor_scan(reset, step, gamma, table, jump, chunk=7), whole)
    jump = torch.cat([jump[:, :, :8, :8], jump[:, :, :8, -1:]], dim=-1)  # the first 8 tokens alone
    first = pe.cursor_scan(reset[..., :8], step[:, :, :8], gamma, table[12:29], jump)
    close(first, whole[:, :, :8])


def prism(layer=0, **kw):
    """The encoding of a layer of a small model with 3 cursors a head, which are 4 wide."""
    return make(pe='prism', prism_cursors=3, prism_d_pe=4, **kw).blocks[layer].attn.pe


@pytest.mark.parametrize('layer', [0, 1])
def test_prism_scores_are_eq_9(layer):
    """mu q.k / sqrt(d) + (1 - mu) 4 sum_c |alpha_c| g_t.g_s / sqrt(C d_pe), for each layer."""
    enc = noisy(prism(layer))
    q, k, _, pos = qkv(4)
    state = prism().state(torch.randn(2, 10, 32).double(), pos)
    g_q, g_k = state.unflatten(-1, (3, 4))[:, layer]  # (B, H, T, C, d_pe)
    mu = torch.sigmoid(enc.m)  # (H, 1, 1)
    meetings = torch.einsum('bhtcd,bhscd,hc->bhts', g_q, g_k, enc.alpha[:, 0].abs())
    expected = mu * q @ k.mT / 8 ** 0.5 + (1 - mu) * 4 * meetings / (3 * 4) ** 0.5
    close(enc.logits(q, k, pos, state).tril(), expected.tril())


def test_prism_without_reset_or_superposition():
    """The sinusoid of the mean offset, which without resets is the sum of p_incr - p_decr."""
    enc = prism(prism_reset=False, prism_superpose=False, prism_sharpen=False)
    x = torch.randn(1, 6, 32).double()
    step = enc.cursors.actions(x)[1]
    mean = (step[..., 0] - step[..., 1]).cumsum(dim=-1)  # (1, 2 layers H cursors, T)
    state = enc.state(x, torch.arange(6)).unflatten(-1, (3, 4)).movedim(2, 0).transpose(-3, -2)
    close(state.flatten(1, 4), pe.sinusoids(mean, 4, 10000.0, x))


def test_prism_copies_by_hand():
    """Every fifth query cursor can jump to a token. With prism_copy='fixed' its key cursor counts
    tokens from -1, so that a jump to k meets the key of token k + 1."""
    cursors = prism(prism_copy='fixed', n_layer=1).cursors
    x, table = torch.randn(2, 9, 32).double(), torch.eye(19).double()
    reset, step, copy = cursors.actions(x)
    assert torch.equal(copy[..., :-1] > 0, torch.ones(2, 3, 9, 9).tril() > 0)
    close(copy.sum(dim=-1), torch.ones(2, 3, 9))
    h = cursors.scan(x, table)
    for c in range(24):  # each cursor alone
        gamma = 1 + F.softplus(cursors.g[c:c + 1])
        jump = copy[:, [c // 5]] if c in (0, 5, 10) else None
        alone = pe.cursor_scan(reset[:, c:c + 1], step[:, c:c + 1], gamma, table, jump)
        close(h[:, c:c + 1], alone)
    for c in (12, 17, 22):
        assert (h[:, c].argmax(dim=-1) - 9).tolist() == [list(range(-1, 8))] * 2


def test_prism_branches_and_norms_are_algorithm_3():
    """The absolute position is the last branch.

    'scale' is one factor; 'unit' makes the encoding of each token sqrt(d_pe) long.
    """
    x, pos = torch.randn(2, 9, 32).double(), torch.arange(9)
    none, scale, unit = (prism(prism_absolute=True, prism_norm=norm).state(x, pos)
                         for norm in ('none', 'scale', 'unit'))
    close(none[..., 12:], pe.sinusoids(pos, 4, 10000.0, x).expand(2, 2, 2, 4, 9, 4))
    close(scale, none * 4 ** 0.5 / (4 * (4 / 2)) ** 0.5)
    close(unit, none / none.norm(dim=-1, keepdim=True) * 4 ** 0.5)


def test_prism_layers():
    """A second PRISM layer reads the residual stream before its layer; later layers use it."""
    model = make(pe='prism', n_layer=5, prism_layers=[1, 4])
    parts = [block.attn.pe for block in model.blocks]
    assert [hasattr(p, 'cursors') for p in parts] == [True, False, False, True, False]
    seen = []
    parts[3].cursors.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.blocks[2].tap_resid.register_forward_hook(lambda module, inputs, out: seen.append(out))
    model(torch.randint(11, (2, 7)))
    assert torch.equal(*seen)


def test_prism_recurrent_matrices():
    """W_h stays orthogonal, is drawn to it by a penalty, or has a learned norm."""
    tokens = torch.randint(11, (4, 9))
    orthogonal = Transformer(ModelConfig(pe='prism', prism_recurrent='orthogonal')).double()
    optimizer = torch.optim.AdamW(orthogonal.optim_groups(1e-2, 0.01))
    for _ in range(3):
        orthogonal(tokens, tokens)[1].backward()
        optimizer.step()
    W = orthogonal.blocks[0].attn.pe.cursors.gates.W_recurrent()
    close(W.T @ W, torch.eye(100), 1e-5)  # its starting point is rounded to float32

    gates = prism(prism_recurrent='norm').cursors.gates
    close(gates.W_recurrent().norm(), gates.s.abs() * 100 ** 0.5)

    drawn = make(pe='prism', prism_recurrent='penalty')
    excess = drawn.train()(tokens, tokens)[1] - drawn.eval()(tokens, tokens)[1]
    W = drawn.blocks[0].attn.pe.cursors.gates.W_h.weight
    close(excess, 1e-3 * (W.T @ W - torch.eye(100)).square().sum(), 1e-8)


@pytest.mark.parametrize('other', ['rope', 'pope', 'alibi', 'vipe'])
def test_prism_comes_last_in_a_sum(other):
    """'prism+rope' is 'rope+prism': content scores are rotated, position scores are not."""
    x = torch.randn(2, 10, 32).double()
    q, k, _, pos = qkv(4, 10, 8)
    found = []
    for names in (['prism', other], [other, 'prism']):
        enc = make(pe='+'.join(names), n_layer=1).blocks[0].attn.pe
        with torch.no_grad():
            for p in enc.parameters():  # the same in both orders
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        state = enc.state(x, pos)
        found.append(enc.logits(q, k, pos, state).tril())
    close(*found)
    first, last = enc.parts
    of_content, plain = first.logits(q, k, pos, state[0]).tril(), (q @ k.mT / 8 ** 0.5).tril()
    of_place = last.logits(0 * q, k, pos, state[1]).tril()
    if other == 'alibi':  # its bias is no content score
        of_place += (1 - torch.sigmoid(last.m)) * (of_content - plain)
    if other == 'vipe':  # it scales both
        of_place *= torch.where(plain != 0, of_content / plain, 0)
    close(found[1], torch.sigmoid(last.m) * of_content + of_place)


def test_prism_gru_is_pytorchs():
    gates = prism().cursors.gates
    gru = torch.nn.GRU(32, 100, batch_first=True).double()
    gru.load_state_dict(dict(weight_ih_l0=gates.W_x.weight, bias_ih_l0=gates.W_x.bias,
                             weight_hh_l0=gates.W_h.weight, bias_hh_l0=gates.W_h.bias))
    x = torch.randn(3, 9, 32).double()
    close(gates.gru(x), gru(x)[0])


# ------------------------------------------------------------------------------------------------
# what holds for every encoding: the contract that one of your own has to meet

def layer_2(kw, T):
    """The encoding of layer 2, what its attend() reads, and its state of x, pos as a function."""
    first, enc = (block.attn.pe for block in make(**kw).blocks)
    q, k, v, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
    x = torch.randn(2, T, 32, dtype=torch.float64)

    def state(x, pos, total_len=None):
        return enc.restate(x, pos, first.state(x, pos, total_len))

    return enc, q, k, v, pos, x, state


@variants
def test_attend_is_softmax_of_logits_times_value(kw):
    """The fast path equals the one that probes look into, in training lengths and beyond."""
    for T in (TRAIN_LEN, 3 * TRAIN_LEN):
        enc, q, k, v, pos, x, state = layer_2(kw, T)
        here = pos, state(x, pos), x
        y = enc.attend(q, k, v, *here)
        close(y, enc.mix(enc.weigh(enc.logits(q, k, *here)), v, *here))
        assert y.shape == (2, enc.cfg.heads, T, enc.out_dim)


@variants
def test_decoding_with_a_cache(kw):
    """A query against the keys and values so far gives its row of the whole sequence.

    The state is made of the tokens so far and the final length, or is that of the whole sequence.
    """
    T = 2 * TRAIN_LEN
    enc, q, k, v, pos, x, state = layer_2(kw, T)
    here = pos, state(x, pos), x
    whole, logits = enc.attend(q, k, v, *here), enc.logits(q, k, *here)
    for t in (0, 5, T - 1):
        row, far = slice(t, t + 1), slice(t + 1)
        for known in (state(x[:, far], pos[far], T), here[1]):
            past = k[:, :, far], v[:, :, far], pos[far], known, x[:, far]
            close(enc.attend(q[:, :, row], *past), whole[:, :, row])
    close(enc.attend(q[:, :, 9:], k, v, *here), whole[:, :, 9:])  # a chunk of queries
    close(enc.logits(q[:, :, 9:], k, *here), logits[:, :, 9:])
    close(enc.mix(enc.weigh(logits[:, :, 9:]), v, *here), whole[:, :, 9:])


@variants
def test_causal_and_prefix_consistent(kw):
    """A token changes no earlier output, and a prefix alone gives the same outputs."""
    model = make(**kw)
    tokens = torch.randint(11, (3, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 11
    with torch.no_grad():
        full, other = model(tokens)[0], model(changed)[0]
        assert torch.equal(full[:, :12], other[:, :12])
        assert not torch.equal(full[:, 12:], other[:, 12:])
        for t in (1, 7, 19):
            close(model(tokens[:, :t], total_len=20)[0], full[:, :t])


@variants
def test_an_encoder_sees_all_but_the_answer(kw):
    """causal=False: a late word reaches early tokens; the last token, the class, reaches none."""
    if any(pe.ENCODINGS[name].needs_causal for name in kw['pe'].split('+')):
        with pytest.raises(ValueError, match='requires a causal mask'):
            make(causal=False, **kw)
        return
    model = make(causal=False, **kw)
    tokens = torch.randint(11, (3, 12))
    late, last = tokens.clone(), tokens.clone()
    late[:, 10] = (late[:, 10] + 1) % 11
    last[:, 11] = (last[:, 11] + 1) % 11
    with torch.no_grad():
        seen = model(tokens)[0]
        assert not torch.isclose(model(late)[0][:, 0], seen[:, 0], rtol=0, atol=1e-12).all()
        assert torch.equal(model(last)[0][:, :11], seen[:, :11])
        layer = model.blocks[0].attn
        layer.tap_logits.register_forward_hook(lambda *_: None)  # by stored logits: the same
        close(model(tokens)[0], seen)


@variants
def test_rows_with_positions_of_their_own(kw):
    """A batch whose rows stand at positions of their own, fractions too, equals its rows alone."""
    model = make(**kw)
    tokens = torch.randint(11, (1, 14)).expand(3, -1)
    steps = 3 * torch.rand(14, dtype=torch.float64)
    pos = torch.stack([torch.arange(14).double(), torch.arange(14) + 7.0, steps.cumsum(0)])
    with torch.no_grad():
        logits = model(tokens, pos=pos)[0]
        for i in range(3):
            close(model(tokens[i:i + 1], pos=pos[i])[0], logits[i:i + 1])
        close(model(tokens)[0], logits[:1].expand(3, -1, -1))  # 0..T-1 are the usual positions
    same = torch.allclose(logits[0], logits[1])
    assert same == model.blocks[0].attn.pe.shift_invariant, f'unchanged by a shift of 7: {same}'


@variants
def test_gradient_reaches_every_parameter(kw):
    model = make(**kw).train()
    tokens = torch.randint(11, (3, TRAIN_LEN))
    model(tokens, tokens)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@variants
def test_lower_precision_stays_near(kw):
    """Logits in float32 are within 1e-5; in bfloat16, autocast or in all weights, within 15 %."""
    model = make(**kw)
    tokens = torch.randint(11, (2, 3 * TRAIN_LEN))
    with torch.no_grad():
        exact = model(tokens)[0]
        rounded = [model.float()(tokens)[0]]
        with torch.autocast('cpu', torch.bfloat16):
            rounded.append(model(tokens)[0])
        if kw.get('prism_recurrent') != 'orthogonal':  # PyTorch has no such map in bfloat16
            rounded.append(model.bfloat16()(tokens)[0])
    for logits, tol in zip(rounded, (1e-5, 0.15, 0.15)):
        assert (logits.double() - exact).abs().max() < tol * exact.abs().max()


@variants
def test_save_and_load(kw, tmp_path):
    """A loaded model gives the same logits, also at 200 tokens, where tables have 64 rows."""
    model, other = make(**kw), make(seed=1, **kw)
    tokens = torch.randint(11, (2, 200))
    torch.save(model.state_dict(), tmp_path / 'm.pt')
    other.load_state_dict(torch.load(tmp_path / 'm.pt', weights_only=True))
    logits = model(tokens)[0]
    assert logits.isfinite().all() and torch.equal(logits, other(tokens)[0])


@variants
def test_overfits_one_batch(kw):
    """To a loss of 0.2 within 200 steps."""
    model = make(torch.float32, max_shift=4, **kw).train()
    tokens = torch.randint(11, (8, TRAIN_LEN), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.arange(8)  # so that each row can be told apart
    optimizer = torch.optim.AdamW(model.optim_groups(3e-3, 0.0))
    for _ in range(200):
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        if loss < 0.2:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f'the loss is {loss:.3f} after 200 steps')


@pytest.mark.parametrize('name', ['fox', 'alibi', 'rope', 'fire'])
def test_seeds_in_one_pass_with_positions_of_their_own(name):
    """Under vmap, masks that differ by seed, by row, or both, are each row's and seed's own."""
    models = [make(pe=name, seed=seed) for seed in (0, 1)]
    params, buffers = torch.func.stack_module_state(models)
    tokens, pos = torch.randint(11, (3, 9)), torch.rand(3, 9, dtype=torch.float64).cumsum(dim=1)
    for kw in (dict(), dict(pos=pos)):
        def logits_of(params, buffers, kw=kw):
            return torch.func.functional_call(models[0], (params, buffers), (tokens,), kw)[0]
        together = torch.func.vmap(logits_of)(params, buffers)
        for model, logits in zip(models, together):
            close(logits, model(tokens, **kw)[0])


def test_randomized_positions(tmp_path):
    """In order, without repeats, uniform; in training drawn anew each time, in evaluation once."""
    def draw(training):
        cfg = pe.PEConfig(positions='randomized', positions_max=20, train_len=12)
        return pe.positions(cfg, torch.zeros(2, 9, dtype=torch.int64), training)

    draws = torch.stack([draw(training=True) for _ in range(4000)])
    assert (draws.diff() > 0).all()
    counts = draws.flatten().bincount(minlength=20)
    assert (counts / 4000 - 9 / 20).abs().max() < 6 * 0.5 / math.sqrt(4000)
    assert torch.equal(draw(training=False), draw(training=False))
    model = make(pe='rope', positions='randomized')
    tokens = torch.randint(11, (2, 12))
    with torch.no_grad():   # the first 7 of 12 tokens are at the same positions as in all 12
        close(model(tokens[:, :7], total_len=12)[0], model(tokens)[0][:, :7])
    assert not train.main(flags(pe='learned', positions='randomized', positions_max=1000,
                                seeds='0-1', out_dir=tmp_path))  # under vmap, too


def test_only_shared_encodings_share_parameters():
    """T5's table serves all layers; PoPE's delta is each layer's own; in a sum, too."""
    for name, of_t5, of_pope in (('t5', 1, 0), ('pope', 0, 3), ('t5+pope', 1, 3)):
        names = [n for n, _ in make(pe=name, n_layer=3).named_parameters()]  # each tensor once
        assert sum(n.endswith('table') for n in names) == of_t5
        assert sum(n.endswith('delta') for n in names) == of_pope


def test_rope_heads_and_nope_every():
    """rope_heads=1: the first head is RoPE's, the others are NoPE's; nope_every: whole layers."""
    q, k, v, pos = qkv(4)
    y = encoding('rope', heads=4, rope_heads=1).attend(q, k, v, pos)
    close(y[:, :1], encoding('rope', heads=4).attend(q, k, v, pos)[:, :1])
    plain = encoding('nope', heads=4).attend(q, k, v, pos)[:, 1:]
    close(y[:, 1:], plain)
    wide = encoding('vipe', heads=4, rope_heads=1).attend(q, k, v, pos)[:, 1:]
    close(wide, F.pad(plain, (0, 8)))                      # ViPE's code is zero in these heads
    model = make(pe='t5', n_layer=5, nope_every=2)
    assert [type(block.attn.pe) for block in model.blocks] == [pe.T5, pe.NoPE] * 2 + [pe.T5]


@pytest.mark.parametrize('first', pe.ENCODINGS)
def test_any_two_encodings_add_or_say_why_not(first):
    for second in pe.ENCODINGS:
        try:
            model = make(pe=f'{first}+{second}', n_layer=1)
        except ValueError:
            continue
        logits, _ = model(torch.ones(1, 5, dtype=torch.int64))
        assert logits.isfinite().all()


def test_attend_refuses_what_does_not_fit():
    q, k, v, pos = qkv(4)
    rope = encoding('rope', heads=4)
    for enc, given, says in (
            (rope, (q, k[:, :2], v[:, :2], pos), 'built for 4 heads of 8: .* repeat grouped keys'),
            (rope, (q, k, v[:, :, :9], pos), 'k and v must have length T'),
            (rope, (q, k[:, :, :9], v[:, :, :9], pos[:9]), 'q covers all T positions or the last'),
            (rope, (q, k, v, pos[:9]), 'pos must have a position for each'),
            (rope, (q, k, v, pos, None, torch.randn(2, 1, 32)), 'the inputs of all 10 keys'),
            (encoding('fox', heads=4), (q, k, v, pos), 'requires the attention input'),
            (encoding('prism', heads=4), (q, k, v, pos), 'requires state=enc.state')):
        with pytest.raises(ValueError, match=says):
            enc.attend(*given)


def readme_code(marker):
    """README's block of Python that contains a word."""
    with open(os.path.join(HERE, 'README.md'), encoding='utf-8') as f:
        blocks = re.findall(r'```python\n(.*?)```', f.read(), re.DOTALL)
    block, = (block for block in blocks if marker in block)
    return block


def test_readme_shows_an_encoding_as_it_stands():
    with open(pe.__file__, encoding='utf-8') as f:
        assert readme_code('class FoX') in f.read()


# ------------------------------------------------------------------------------------------------
# model.py

def test_mla_logits_are_eq_3():
    """The Toeplitz study, eq. 3: heads of 4 NoPE and 4 RoPE features, keys from a vector of 6."""
    attn = make(pe='rope', attention='mla', n_head=8, d_compress=6).blocks[0].attn  # 4 heads of 8
    x, pos = torch.randn(2, 10, 32, dtype=torch.float64), torch.arange(10)
    seen = []
    attn.tap_logits.register_forward_hook(lambda module, inputs, out: seen.append(out))
    attn(x, pos, None)
    assert attn.compress.weight.shape == (6, 32) and attn.kv.weight.shape == (64, 6)
    W_K = attn.kv.weight[:32] @ attn.compress.weight
    q, k = (torch.einsum('hdc,btc->bhtd', W.view(4, 8, 32), x) for W in (attn.q.weight, W_K))
    theta = THETA[[0, 2]]  # 10000^(-2c/4)
    close(seen[0], loop_logits(q, k, lambda q, k, t, s, *_: (
        q[:4] @ k[:4] + rotated(q[4:], k[4:], (s - t) * theta) * math.sqrt(4)) / math.sqrt(8)))


@pytest.mark.parametrize('tap, shape', [
    ('blocks.1.attn.tap_q', (2, 4, 9, 8)), ('blocks.1.attn.tap_k', (2, 4, 9, 8)),
    ('blocks.1.attn.tap_logits', (2, 4, 9, 9)), ('blocks.1.attn.tap_head_out', (2, 4, 9, 8)),
    ('blocks.1.tap_resid', (2, 9, 32)), ('tap_resid', (2, 9, 32))])
def test_taps_read_and_replace(tap, shape):
    """A hook on a tap sees the activation; what it returns takes the activation's place."""
    model, seen = make(pe='rope'), []
    tokens = torch.randint(11, (2, 9))
    before, tap = model(tokens)[0], model.get_submodule(tap)
    tap.register_forward_hook(lambda module, inputs, out: seen.append(out))
    close(model(tokens)[0], before)
    assert seen[0].shape == shape
    tap.register_forward_hook(lambda module, inputs, out: out * 0)
    assert not torch.allclose(model(tokens)[0], before)


@pytest.mark.parametrize('kw', [
    dict(norm='rmsnorm'), dict(tie=True), dict(dropout=0.3), dict(d_ff=20, n_layer=3, n_head=1)],
    ids=str)
def test_model_switches(kw):
    """Tied weights are one tensor; dropout is for training only; targets of -100 have no loss."""
    model = make(pe='rope', **kw)
    tokens = torch.randint(11, (2, 9))
    assert (model.head.weight is model.embedding.weight) == bool(kw.get('tie'))
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert torch.equal(model(tokens)[0], model(tokens)[0]) != bool(kw.get('dropout'))
    targets = torch.full((2, 9), -100)
    targets[0, 3] = 5
    logits, loss = model.eval()(tokens, targets)
    close(loss, F.cross_entropy(logits[0, 3][None], torch.tensor([5])))


def test_generate_pads_rows_after_their_end_and_never_draws_padding():
    model, planned = make(pe='nope'), torch.tensor([[3, 2, 5], [4, 5, 2]])     # 2 ends a row

    def forward(tokens, total_len):
        logits = torch.zeros(2, tokens.shape[1], 11)
        logits[:, -1, 0] = 9.0                             # padding would be most likely
        logits[torch.arange(2), -1, planned[:, tokens.shape[1] - 1]] = 5.0
        return logits, None
    model.forward = forward
    rows = model.generate(torch.ones(2, 1, dtype=torch.int64), 5, end=2)
    assert rows.tolist() == [[1, 3, 2, 0], [1, 4, 5, 2]]


def test_starting_weights():
    """Their variance is 1 / fan_in, over 2 n_layer where they write to the residual stream."""
    model = Transformer(ModelConfig(d_model=128, vocab_size=300, n_layer=3, embedding_std=0.2))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (1 if name.endswith('weight') else 0)).all(), name  # of norms; biases
            continue
        writes = name.endswith(('attn.proj.weight', 'mlp.2.weight'))
        std = 0.2 if name == 'embedding.weight' else (p.shape[1] * (6 if writes else 1)) ** -0.5
        assert abs(p.std() / std - 1) < 0.05, name
    assert abs(encoding('vipe', vipe_d_p=3000).W_p.std() / 0.02 - 1) < 0.05


def test_optimizer_groups_hold_every_parameter_once():
    """Only matrices decay, and none of the embedding's, the norms' or the encoding's parameters."""
    model = make(pe='prism+pope')
    groups = {group['name']: group for group in model.optim_groups(1e-3, 0.1)}
    ids = [id(p) for group in groups.values() for p in group['params']]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    decaying = [p for group in groups.values() if group['weight_decay'] for p in group['params']]
    matrices = ('qkv.weight', 'proj.weight', 'mlp.0.weight', 'mlp.2.weight', 'head.weight')
    names = [name for name, p in model.named_parameters() if any(p is d for d in decaying)]
    assert names == [n for n, _ in model.named_parameters() if n.endswith(matrices)]
    alpha = groups['alpha']  # PRISM section 6.4
    assert (len(alpha['params']), alpha['lr'], alpha['betas']) == (2, 0.03, (0.8, 0.92))


@pytest.mark.parametrize('kw, says', [
    (dict(d_model=30, n_head=4), 'divisible'), (dict(dropout=1.5), 'dropout'),
    (dict(n_head=3, d_model=30, attention='mla'), 'even'),
    (dict(pe='rop'), 'unknown.*shifted_ape'),  # lists what there is
    (dict(pe='rope', d_model=20, n_head=4), 'even'), (dict(rope_fraction=2.0), 'at most 1'),
    (dict(pe='ape', rope_heads=1), 'acts on the embedding'), (dict(rope_heads=9), 'rope_heads'),
    (dict(pe='vipe', vipe_s='both'), 'length'), (dict(pe='prism', nope_every=2), 'leave prism'),
    (dict(nope_every=3), 'nope_every must be 0, or from 2 to n_layer=2'),
    (dict(positions='randomized', positions_max=100), '128 tokens require positions_max=128'),
    (dict(pe='path+rope'), 'PaTH and RoPE cannot be added'), (dict(pe='path+path'), 'cannot be'),
    (dict(pe='prism+prism'), 'cannot be added'), (dict(pe='ssmax+path'), 'change the product'),
    (dict(pe='stickbreaking+vipe'), 'weights that sum to 1'),
    (dict(pe='pope+selective_rope'), 'write it once, and last')], ids=str)
def test_what_does_not_fit_together_says_what_to_do(kw, says):
    with pytest.raises(ValueError, match=says):
        Transformer(ModelConfig(**kw))


# ------------------------------------------------------------------------------------------------
# tasks.py, against oracles; SCAN against its published counts; readers of files

FILE_READERS = [name for name, task in tasks.TASKS.items() if task.corpus or task.needs]


def generator(seed):
    return torch.Generator().manual_seed(seed)


# Oracles: of a prompt as text they return its length and the correct answer.

def vipe_oracle(states):
    """BoS x_1..x_L EoI s_1..s_m EoS: states(x) of the numbers or letters x."""
    def oracle(prompt):
        bos, *x, eoi = prompt.split()
        assert (bos, eoi) == ('BoS', 'EoI')
        x = [int(word) if word.isdigit() else word for word in x]
        return len(x), ' '.join(map(str, [*states(x), 'EoS']))
    return oracle


def count(prompt):
    _, first, last, _ = prompt.split()
    states = range(int(first), int(last) + 1)
    return len(states), ' '.join(map(str, [*states, 'EoS']))


def product(x, beta=(1,) * 1000):
    return [math.prod([*beta[:t], *x[:t]]) % 5 for t in range(1, len(x) + 1)]


def indexing(prompt, letters=string.ascii_letters, most=15):
    """abcd,b,+2, asks for the letter two positions after the b."""
    source, letter, shift, _ = prompt.split(',')
    assert len(source) == len(set(source)) and set(source) <= set(letters)
    assert re.fullmatch(r'[+-]\d{1,2}', shift) and abs(int(shift)) <= most
    place = source.index(letter) + int(shift)
    assert place >= 0
    return len(source), source[place]


def trigger_count(prompt):
    *words, _ = prompt.split()
    return len(words), f'class{sum("trigger" in word for word in words)}'


def trigger_distance(triggers, span):
    """The distances between trigger0 and 1, and 2 and 3, in 32nds of the largest sum."""
    def oracle(prompt):
        *words, mark = prompt.split()
        assert mark == '?'
        place = [words.index(f'trigger{i}') for i in range(triggers)]
        assert sum('trigger' in word for word in words) == triggers
        distances = [abs(i - j) for i, j in zip(place[::2], place[1::2])]
        assert max(distances) < span
        return len(words), f'class{32 * sum(distances) // (len(distances) * span)}'
    return oracle


def string_oracle(answer, start=''):
    """start x=answer(x)."""
    def oracle(prompt):
        x = prompt.removeprefix(start).removesuffix('=')
        assert prompt == start + x + '=' and x.isalnum()
        return len(x), answer(x) + '.'
    return oracle


def stack(x):
    """The stack from its top down after bits (pushed) and actions: 2 pops, 3 and 4 push 0 and 1."""
    assert re.fullmatch('[01]+[234]*', x)
    left = ''
    for symbol in x:
        left = left[:-1] if symbol == '2' else left + '01.01'[int(symbol)]
    return (left[::-1] + '2').ljust(len(x) + 1, '0')


def dyn_str_cpy(prompt):
    x, digit = prompt.removesuffix('=').split(',')
    assert x.count(digit) == 1
    return len(x), x[x.index(digit):] + '.'


def addition(prompt, order=1):
    a, b = (x[::order] for x in prompt.removesuffix('=').split('+'))
    assert (a, b) == (str(int(a)), str(int(b)))     # no leading zeros
    return max(len(a), len(b)), str(int(a) + int(b))[::order] + '.'


def addition_cot(prompt):
    """Digits of a, b, carry and sum for each column, lowest first; the sum."""
    length, total = addition(prompt, -1)
    a, b = (x.ljust(length, '0') for x in prompt.removesuffix('=').split('+'))
    steps, carry = [], 0
    for d_a, d_b in zip(a, b):
        carry, digit = divmod(int(d_a) + int(d_b) + carry, 10)
        steps.append(f'{d_a}{d_b}{carry}{digit}')
    return length, ','.join(steps) + '→' + total


def multiplication_cot(prompt):
    a, b = prompt.removesuffix('=').split('x')
    assert (a, b) == (str(int(a)), str(int(b)))     # no leading zeros
    terms = [f'{d}*({d}+1)' + ''.join(f'({lower}+0)' for lower in b[i + 1:])
             for i, d in enumerate(b)]
    return len(b), f'{a}x[{"+".join(terms)}].'


def scan_actions(words):
    """What a SCAN command means (Lake & Baroni 2018, Figure 7), by recursion."""
    for word in ('and', 'after'):
        if word in words:
            x = scan_actions(words[:words.index(word)])
            y = scan_actions(words[words.index(word) + 1:])
            return x + y if word == 'and' else y + x
    if words[-1] in ('twice', 'thrice'):
        return scan_actions(words[:-1]) * (2 if words[-1] == 'twice' else 3)
    verb = [] if words[0] == 'turn' else ['I_' + words[0].upper()]
    turn = ['I_TURN_' + words[-1].upper()]
    if len(words) == 1:
        return verb
    if words[1] == 'opposite':
        return turn * 2 + verb
    return (turn + verb) * (4 if words[1] == 'around' else 1)


def scan(prompt):
    actions = scan_actions(prompt.split()[1:-1])
    return len(actions), ' '.join([*actions, 'EoS'])


def scan_cot(prompt):
    """The command with twice and thrice written out → clause : actions, as executed."""
    command = prompt.removesuffix(' =')
    halves = [[re.sub(' twice| thrice', '', x)] * (1 + ('twice' in x) + 2 * ('thrice' in x))
              for x in re.split(' and | after ', command)]
    plan = (' after ' if 'after' in command else ' and ').join(map(' + '.join, halves))
    steps = [f'{clause} : {" ".join(scan_actions(clause.split()))}'
             for half in halves[::-1 if 'after' in command else 1] for clause in half]
    return len(scan_actions(command.split())), f'{plan} → {" ".join(steps)} .'


TEXT, VIPE = (1, 2, 7, 23), (1, 5, 48)      # lengths to try
ORACLES = {
    'copy': (vipe_oracle(lambda x: x), VIPE),
    'reverse': (vipe_oracle(lambda x: x[::-1]), VIPE),
    'sort': (vipe_oracle(lambda x: sorted(set(x))), (1, 5, 48, 100)),
    'count': (count, (1, 5, 48, 128)),
    'mode': (vipe_oracle(statistics.multimode), (1, 2, 7, 48)),
    'parity': (vipe_oracle(lambda x: [sum(x[:t + 1]) % 2 for t in range(len(x))]), VIPE),
    'parity:steps=0': (vipe_oracle(lambda x: [sum(x) % 2]), VIPE),
    'polynomial': (
        vipe_oracle(lambda x: itertools.accumulate(x, lambda s, x_t: (s * x_t + 1) % 5)), VIPE),
    'product': (vipe_oracle(product), VIPE),
    'product:own=1': (
        vipe_oracle(lambda x: product(x, tasks.make('product:own=1').beta.tolist())), VIPE),
    'indirect_indexing': (indexing, (1, 20, 40, 52)),
    'indirect_indexing:letters=12:shift=2': (partial(indexing, letters='ABCDEFGHIJKL', most=2),
                                             (1, 6, 12)),
    'distance': (trigger_distance(2, 128), (2, 9, 128, 200)),
    'distance:span=16': (trigger_distance(2, 16), (2, 40)),
    'distance_sum': (trigger_distance(4, 128), (4, 9, 128, 200)),
    'distance_sum:span=16': (trigger_distance(4, 16), (4, 40)),
    'trigger_count': (trigger_count, (1, 9, 128, 200)),
    'trigger_count:most=16': (trigger_count, (1, 40)),
    'string_copy': (string_oracle(lambda x: x), TEXT),
    'copy_repeated': (string_oracle(lambda x: x[0] * len(x)), TEXT),
    'string_reverse': (string_oracle(lambda x: x[::-1], '^'), TEXT),
    'odds_first': (string_oracle(lambda x: x[1::2] + x[::2]), TEXT),
    'bucket_sort': (string_oracle(lambda x: ''.join(d * x.count(d) for d in '01234')), TEXT),
    'stack': (string_oracle(stack), TEXT),
    'dyn_str_cpy': (dyn_str_cpy, TEXT),
    'addition': (addition, TEXT),
    'addition:reversed=1': (partial(addition, order=-1), TEXT),
    'addition_cot': (addition_cot, TEXT),
    'multiplication_cot': (multiplication_cot, TEXT),
    'scan': (scan, (1, 22, 48)),
    'scan_simple': (scan, (2, 5)),
    'scan_cot': (scan_cot, (2, 9, 24)),
}


# Oracles of tasks that supervise some tokens only: {t: targets[t]} of all words.

def flip_flop(words):
    written, answers = {}, {}
    for t in range(0, len(words), 2):
        if words[t] == 'r':
            answers[t] = written['w']
        written[words[t]] = words[t + 1]
    return answers


def mqar(words):
    seen, answers = {}, {}
    for t in range(0, len(words), 2):
        if words[t] in seen:
            answers[t] = seen[words[t]]
        if words[t].startswith('key'):
            seen[words[t]] = words[t + 1]
    assert len(answers) == len(seen)
    return answers


def group(words):
    """The item at place p goes to place word[p]."""
    answers, places = {}, range(len(words[1]))
    for t, word in enumerate(words[1:], 1):
        places = [int(word[place]) for place in places]
        answers[t] = ''.join(map(str, places))
    return answers


PARTIAL = {'flip_flop': (flip_flop, (2, 40)), 'flip_flop:ignore=10': (flip_flop, (2, 40)),
           'mqar': (mqar, (8, 20)), 'mqar:keys=3:words=9': (mqar, (6, 30)),
           'group:name=s3': (group, (1, 12)), 'group': (group, (1, 12))}


@pytest.mark.parametrize('name, length', [
    (name, n) for name, (_, lengths) in (ORACLES | PARTIAL).items() for n in lengths])
def test_every_task(name, length):
    """tokens, targets [n, T]: padding is last; targets are next tokens, or -100, at least one a
    row. What is supervised is correct, by an oracle, and the seed decides all of it."""
    task = tasks.make(name)
    n = 2000 if task.end == tasks.EOS and length == 48 else 400
    tokens, targets = task.sample(n, length, generator(length))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape and len(tokens) == n
    assert len(task.vocab) == len(set(task.vocab))
    padding, supervised = tokens == tasks.PAD, targets != -100
    assert torch.equal(padding, padding.int().cummax(dim=1).values > 0)
    assert not (targets == tasks.PAD).any() and not supervised[:, -1].any()
    assert task.labels or torch.equal(targets[supervised], tokens.roll(-1, dims=1)[supervised])
    assert torch.equal(tokens, task.sample(n, length, generator(length))[0])
    if len(tokens.unique(dim=0)) > 1:
        assert not torch.equal(tokens, task.sample(n, length, generator(length + 1))[0])
    for row, target in zip(tokens, targets.tolist()):
        words = [task.vocab[i] for i in row if i != tasks.PAD]
        assert task.decode(row).replace(', ', ',') == task.separator.join(words)
        found = {t: task.vocab[i] for t, i in enumerate(target) if i != -100}
        if name in PARTIAL:
            assert found == PARTIAL[name][0](words)
            assert len(words) == (1 + length if task.labels else 2 * length)
        else:       # the answer is supervised, to the last token
            first = min(found) + 1
            assert list(found) == list(range(first - 1, len(words) - 1))
            prompt, answer = (task.separator.join(x) for x in (words[:first], words[first:]))
            size, correct = ORACLES[name][0](prompt)
            assert (size, answer) == (length, correct)


def distance(text):
    """The signed distance from trigger0 to trigger1."""
    words = text.split()
    return words.index('trigger1') - words.index('trigger0')


@pytest.mark.parametrize('name, length, value, values', [
    ('dyn_str_cpy', 10, lambda text: text[:10].index(text[11]), range(10)),
    ('addition_cot', 10, lambda text: min(map(len, text.split('=')[0].split('+'))), range(1, 11)),
    ('multiplication_cot', 10, lambda text: text.index('x'), range(1, 11)),
    ('stack', 10, lambda text: re.search('[234]', text).start(), range(1, 10)),
    ('distance', 128, lambda text: abs(distance(text)), range(1, 128)),
    ('distance:span=16', 40, lambda text: abs(distance(text)), range(1, 16)),
    ('distance', 40, lambda text: distance(text) > 0, range(2)),
    ('trigger_count:most=16', 40, lambda text: text.count('trigger'), range(17)),
    ('trigger_count', 128, lambda text: text.count('trigger'), range(32)),
    ('indirect_indexing:letters=12:shift=2', 6, lambda text: text[0], 'ABCDEFGHIJKL'),
    ('indirect_indexing', 30, lambda text: text[-1], string.ascii_letters),
    ('mode', 9, lambda text: text.split()[-2], 'abcdefghij'),
    ('count', 9, lambda text: int(text.split()[1]), range(120)),
    ('product', 9, lambda text: text.split()[-2], '1234'),
    ('parity', 9, lambda text: text.split()[-2], '01'),
    ('group:name=s3', 9, lambda text: text[-3:], ['012', '021', '102', '120', '201', '210'])])
def test_values_are_uniform(name, length, value, values):
    """Positions, sizes, distances and last states take all values, within six deviations."""
    task, n = tasks.make(name), 6000
    counts = collections.Counter(value(task.decode(row))
                                 for row in task.sample(n, length, generator(0))[0])
    assert set(counts) == set(values)
    mean = n / len(values)
    assert all(abs(count - mean) < 6 * math.sqrt(mean) for count in counts.values())


def test_rates_of_instructions_and_shifts():
    """ignore=98 ignores 98 % between the ends; shifts reach -15 and 15."""
    for ignore in (10, 98):
        tokens, _ = tasks.make(f'flip_flop:ignore={ignore}').sample(200, 100, generator(0))
        write, skip, read = ((tokens[:, 2:-2:2] == i).double().mean() for i in (1, 2, 3))
        close([write, skip, read], [(1 - ignore / 100) / 2, ignore / 100, (1 - ignore / 100) / 2],
              0.02)
    task = tasks.make('indirect_indexing')
    texts = [task.decode(row) for row in task.sample(3000, 30, generator(0))[0]]
    assert {int(text.split(', ')[2]) for text in texts} == set(range(-15, 16))


def test_docstrings_show_an_example():
    """All generated tasks have a doctest; all docstrings define `length`, or their base."""
    assert doctest.testmod(tasks).failed == 0
    for name, task in tasks.TASKS.items():
        docs = ' '.join(base.__doc__ for base in type(task).__mro__[:-1])
        names = [x for x, other in tasks.TASKS.items() if type(other) is type(task)]
        assert '`length`' in docs, name
        shown = rf"{type(task).__name__}\(|'({'|'.join(names)})\b"
        assert name in FILE_READERS or re.search(shown, docs), name


def test_make_returns_new_tasks():
    """Options and data of one task leave the others, and the registered one, as they are."""
    cot, bare = tasks.make('parity'), tasks.make('parity:steps=0')
    jsb = tasks.make('jsb', 'there')
    assert (cot.steps, bare.steps, tasks.TASKS['parity'].steps) == (True, False, True)
    assert (jsb.name, jsb.data, tasks.TASKS['jsb'].data) == ('jsb', 'there', '')
    assert tasks.make('parity') is cot and bare.name == 'parity:steps=0'


@pytest.mark.parametrize('name, length, says', [
    ('pairty', 5, "unknown task 'pairty'.*parity.*scan_cot"),
    ('jsb', 5, 'add --data=PATH, Jsb16thSeparated.json'),
    ('copy:p=7', 5, "'p=7' is not an option of copy, whose options are: steps=1"),
    ('parity:steps=2', 5, "'steps=2' is not an option"),
    ('flip_flop:ignore', 5, 'whose options are: ignore=80'),
    ('distance_sum', 3, 'from 4'),
    ('scan', 23, r'\[1, 2, .*, not 23')])
def test_task_errors(name, length, says):
    with pytest.raises(tasks.DataError, match=says):
        tasks.make(name).sample(2, length)


# data sets of commands and answers

def test_scan_is_the_published_data_set():
    """Its size, and the number of characters in the published tasks.txt; split by length, up to 22
    actions for training, more for the test; or 80 % and 20 % at random."""
    train, test = (tasks.scan_pairs('length', part) for part in ('train', 'test'))
    pairs = dict(train + test)
    assert len(pairs) == 20910
    assert sum(len(f'IN: {command} OUT: {pairs[command]}\n') for command in pairs) == 4080388
    assert all(pairs[command].split() == scan_actions(command.split()) for command in pairs)
    assert (len(train), len(test)) == (16990, 3920)
    lengths = [{len(actions.split()) for _, actions in part} for part in (train, test)]
    assert lengths == [set(range(1, 23)), {24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48}]
    simple = [tasks.scan_pairs('simple', part) for part in ('train', 'test')]
    assert [len(part) for part in simple] == [16728, 4182]
    assert dict(simple[0] + simple[1]) == pairs


def test_data_sets_train_on_all_and_test_on_the_rest():
    cfg = train.make_config(train.read_options(flags(
        task='scan', train_lengths='1-30', eval_lengths='1-60', n_test=10 ** 6)))
    assert cfg.train_lengths == list(range(1, 23)) and max(cfg.eval_lengths) == 48
    task, batches = cfg.the_task, train.Batches(cfg, 0, cfg.the_task, 'cpu')
    batches.next(0)
    trained = {task.decode(row) for row in batches.tokens}
    held = train.held_out(cfg, 'test', 'cpu')
    tested = {task.decode(row) for n, (rows, _) in held if n > 22 for row in rows}
    assert (len(batches.tokens), len(trained), len(tested)) == (16990, 16990, 3920)
    assert not trained & tested


@pytest.fixture
def cfq(tmp_path):
    """A folder of 20 questions in CFQ's format, with a random split and the split mcd1."""
    (tmp_path / 'splits').mkdir()
    entries = [{'questionPatternModEntities': f"Did M{i}'s writer , a film editor, write M1",
                'sparqlPatternModEntities': 'SELECT count(*) WHERE {\n?x0 a ns:film.editor .\n?x0 '
                f'ns:people.x m.0{i}{second}\n}}'}
               for i, second in enumerate(['', ' .\nM1 ns:x ?x1'] * 10)]
    (tmp_path / 'dataset.json').write_text(json.dumps(entries))
    i = list(range(20))
    for name, parts in (('random_split', (i[:12], i[12:15], i[15:])), ('mcd1', (i[2:], [1], [0]))):
        split = dict(zip(('trainIdxs', 'devIdxs', 'testIdxs'), parts))
        (tmp_path / f'splits/{name}.json').write_text(json.dumps(split))
    return tmp_path


def test_cfq(cfq):
    """Questions and queries in words; parts are those of the split."""
    task, mcd = (tasks.make(name, str(cfq)) for name in ('cfq', 'cfq:mcd=1'))
    text = task.decode(task.rows['train', 15][0][0])
    assert text == ("BoS Did M0 ' s writer , a film editor , write M1 EoI SELECT count ( * ) WHERE "
                    '{ ?x0 a film.editor . ?x0 people.x m_00 } EoS')
    sizes = {key: len(tokens) for key, (tokens, _) in task.rows.items()}
    assert sizes == {('train', 15): 6, ('train', 19): 6, ('val', 15): 2, ('val', 19): 1,
                     ('test', 15): 2, ('test', 19): 3}
    for split, part in (('eval', 'val'), ('test', 'test')):
        held, _ = task.held_out(split, 9, [15], generator)[15]
        assert set(map(task.decode, held)) == set(map(task.decode, task.rows[part, 15][0]))
    assert task.count([15, 19]) == 12 and mcd.existing(range(100), 'val') == [19]
    for row, target in zip(*task.sample(5, 19, generator(0))):
        assert task.decode(target[target != -100]) == task.decode(row).split('EoI ')[1]
    assert mcd.decode(mcd.rows['test', 15][0][0]) == text
    with pytest.raises(tasks.DataError, match='mcd2.json.*cfq1.1.tar.gz'):
        tasks.make('cfq:mcd=2', str(cfq)).sample(1, 15)


# corpora

def token_file(path, array):
    path.parent.mkdir(exist_ok=True)
    np.save(path, array)


@pytest.mark.parametrize('sizes', [[1000], [7, 350, 2, 99, 100, 101, 199], [40] * 30])
def test_windows_predict_every_token_once(sizes, tmp_path):
    """Whatever the length of the context, and the same tokens for all; documents are cut apart, and
    the rest of a document is not dropped."""
    ends = np.cumsum(sizes)
    for i, (end, size) in enumerate(zip(ends, sizes)):
        token_file(tmp_path / f'test/{i:02}.npy', np.arange(end - size, end, dtype=np.uint16))
    task = tasks.make('tokens:size=2000', str(tmp_path))
    lengths, firsts = [2, 9, 50, 100], {0, *ends[:-1].tolist()}
    for length, (tokens, targets) in task.held_out('test', 10 ** 6, lengths, generator).items():
        predicted = sorted((targets[targets != -100] - 1).tolist())
        assert predicted == sorted(set(range(int(ends[-1]))) - firsts), length
        row, t = (targets != -100).nonzero(as_tuple=True)
        assert torch.equal(tokens[row, t] + 1, targets[row, t])  # from the token before it
        assert tokens.shape[1] == length and (targets != -100).any(dim=1).all()
    few = task.held_out('test', 3, lengths, generator).values()
    kept, *others = ({*targets[targets != -100].tolist()} for _, targets in few)
    assert all(tokens == kept for tokens in others)
    assert len(kept) == min(3 * 99, 3 * (max(sizes) - 1), sum(sizes) - len(sizes))


def test_contexts_of_a_corpus_are_uniform_and_within_a_document(tmp_path):
    token_file(tmp_path / 'train/a.npy', np.arange(20))
    token_file(tmp_path / 'train/b.npy', np.arange(100, 103))
    token_file(tmp_path / 'val.npy', np.arange(5))
    task = tasks.make('tokens:size=200', str(tmp_path))
    tokens, targets = task.sample(6000, 5, generator(0))
    assert torch.equal(targets[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100))
    short = tokens[:, 0] > 100
    assert abs(short.double().mean() - 3 / 23) < 0.02
    assert set(map(tuple, tokens[short].tolist())) == {(101, 102, 103, 0, 0)}
    starts, counts = tokens[~short][:, 0].unique(return_counts=True)
    assert starts.tolist() == list(range(1, 17)) and counts.min() > 240
    assert (tokens[~short].diff(dim=1) == 1).all()


def test_documents_are_dealt_to_parts(tmp_path):
    """At random; a single one is cut; a folder of a part's name, and no hidden file, is that part,
    and validation replaces a missing test part."""
    def parts(path):
        found = tasks.make('text', str(path)).parts
        return [[bytes(document) for document in found[part]] for part in tasks.PARTS]

    for i in range(40):
        (tmp_path / f'{i}.txt').write_text(f'document {i} ' * 3)
    dealt = parts(tmp_path)
    assert list(map(len, dealt)) == [36, 2, 2] and len(set(itertools.chain(*dealt))) == 40
    one, text = tmp_path / 'one', bytes(range(200))
    (one / 'validation').mkdir(parents=True)
    (one / 'a').write_bytes(text)
    assert parts(one / 'a') == [[text[:180]], [text[180:190]], [text[190:]]]
    (one / 'validation/.hidden').write_text('no')
    (one / 'validation/b').write_text('yes')
    assert parts(f'{one}/') == [[text], [b'yes'], [b'yes']]
    library = [bytes(x) for part in tasks.PARTS for x in tasks.make('stdlib').parts[part]]
    assert open(json.__file__, 'rb').read() in library


class REMI(dict):
    """A stub of miditok's: every file is the same five notes."""
    def __init__(self, config):
        names = ['PAD_None', 'BOS_None', 'EOS_None', *(f'Pitch_{p}' for p in range(21, 109))]
        super().__init__({name: i for i, name in enumerate(names)})
        self.vocab = self

    def __call__(self, path):
        return [types.SimpleNamespace(ids=[42, 46, 49, 3, 90])]


@pytest.fixture
def stubs(monkeypatch):
    """Packages that readers require: miditok, and tiktoken, which here encodes bytes."""
    pairs = types.SimpleNamespace(encode_ordinary=lambda text: list(text.encode()),
                                  decode=lambda tokens: bytes(tokens).decode())
    for name, names in dict(tiktoken=dict(get_encoding={'gpt2': pairs}.get),
                            miditok=dict(REMI=REMI, TokenizerConfig=dict)).items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**names))


@pytest.fixture
def midi(tmp_path, stubs):
    for part in tasks.PARTS:
        (tmp_path / f'{part}.mid').touch()
    return tmp_path


UNICODE = 'Grüße, ∀x: x≠0 → 𝄞\r\n\tend\n\n'
MIDI = 'BOS_None Pitch_60 Pitch_64 Pitch_67 Pitch_21 Pitch_108 EOS_None'


@pytest.mark.parametrize('name, file, content, texts, size', [
    ('text', 'a.txt', UNICODE.encode(), [UNICODE], 257),
    ('characters', 'a.txt', UNICODE.encode(), [UNICODE], 1 + len(set(UNICODE))),
    ('tokens:size=300', 'a.bin', np.array([7, 258, 0], np.uint16).tobytes(), ['7 258 0'], 301),
    ('openwebtext', 'a.bin', np.array([*b'pairs'], np.uint16).tobytes(), ['pairs'], 50304),
    ('jsb', 'j.json', b'{"train": [[[-1, 21, 64, 108], [60, 60, 60, 61]], [[99, 50, 40, 30]]], '
     b'"valid": [], "test": []}', ['- 21 64 108 60 60 60 61', '99 50 40 30'], 90),
    ('maestro', 'a.mid', b'', [MIDI], 91),
    ('genome', 'a.fa', b'>chr 1\r\nACGTac\r\ngtNNr\r\n\r\n>chr 2\nTTTTTTTACGTNAAAAAACCCCCCG\n',
     ['ACGTAC G T N N N', 'TTTTTT T A C G T N AAAAAA CCCCCC G'], 4107)])
def test_documents_are_decoded_as_written(name, file, content, texts, size, tmp_path, stubs):
    (tmp_path / file).write_bytes(content)
    task = tasks.make(name, str(tmp_path / file))
    assert len(task.vocab) == size == len(set(task.vocab))
    for (_, document), text in zip(task.read(), texts, strict=True):
        row, _ = task.lay_out([document], len(document) + 2)    # with padding
        assert task.decode(row[0]) == text == task.decode(task.encode(text))


def test_byte_pairs_and_packages(stubs, monkeypatch):
    """Unused tokens and padding are not written; a missing package is named."""
    task = tasks.make('openwebtext', 'FILE')
    assert task.decode(torch.tensor([1 + ord('a'), 50258, 50303, tasks.PAD])) == 'a'
    for name, package in (('openwebtext', 'tiktoken'), ('maestro', 'miditok')):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(tasks.DataError, match=f'pip install {package}'):
            tasks.make(name, 'OTHER').encode('a')


@pytest.mark.parametrize('name, content, says', [
    ('text', None, 'does not exist'), ('characters', b'', 'nothing to read'),
    ('characters', b'\xff\xfe', 'required: UTF-8'),
    ('tokens', b'123', 'required: a .bin (uint16) or .npy file'),
    ('tokens:size=9', 'big.npy', 'the vocabulary of 0 to 8'),
    ('jsb', b'{"train": 3}', 'required: Jsb16th'),
    ('jsb', b'{"train": [[[1, 2, 3]]], "valid": [], "test": []}', 'required: Jsb16th'),
    ('genome', b'ACGT', 'begin with ">"'), ('cfq', b'', 'dataset.json')])
def test_data_that_do_not_fit(name, content, says, tmp_path):
    np.save(tmp_path / 'big.npy', np.full(99, 9, dtype=np.uint16))
    path = tmp_path / (content if isinstance(content, str) else 'data')
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(tasks.DataError, match=re.escape(says)) as error:
        tasks.make(name, str(path)).sample(2, 8)
    assert '\n' not in str(error.value)


def test_large_files_stay_on_disk(tmp_path):
    """Only contexts are read into memory."""
    np.arange(2 ** 20, dtype=np.uint16).tofile(tmp_path / 'big.bin')
    for name in ('text', 'tokens:size=65536'):
        task = tasks.make(name, str(tmp_path / 'big.bin'))
        assert all(isinstance(task.of_part(part)[0], np.memmap) for part in tasks.PARTS)
        assert task.held_out('test', 4, [512, 4096], generator)[512][0].shape == (36, 512)


def test_jsb_contexts_begin_with_the_first_voice(tmp_path):
    """Also in the test, which predicts all but the first token of each chorale."""
    chorales = {part: [[[30, 40, 50, 60 + t] for t in range(size)] for size in sizes]
                for part, sizes in (('train', (5, 30)), ('valid', (9,)), ('test', (1, 12)))}
    (tmp_path / 'j.json').write_text(json.dumps(chorales))
    task = tasks.make('jsb', str(tmp_path / 'j.json'))
    assert [len(task.parts[part]) for part in tasks.PARTS] == [2, 1, 2]
    tokens, _ = task.sample(200, 16, generator(0))
    assert {task.decode(row)[:9] for row in tokens.view(-1, 4)} == {'30 40 50 '}
    for tokens, targets in task.held_out('test', 99, [5, 16, 60], generator).values():
        assert (targets != -100).sum() == 4 * (1 + 12) - 2
        assert (tokens[:, 0] == tokens[0, 0]).all()


def test_midi_is_transposed_in_training(midi):
    """By -3 to 3 semitones, and by an octave at the piano's ends."""
    task, shifts = tasks.make('maestro', str(midi)), set()
    for row in task.sample(200, 7, generator(0))[0]:
        first, *rest = [int(word[6:]) for word in task.decode(row).split()[1:-1]]
        shift = first - 60
        shifts.add(shift)
        assert rest == [64 + shift, 67 + shift, 21 + shift + 12 * (shift < 0),
                        108 + shift - 12 * (shift > 0)]
    assert shifts == set(range(-3, 4))
    assert task.decode(task.held_out('test', 1, [7], generator)[7][0][0]) == MIDI


# runs on them

def test_a_sweep_on_a_corpus(tmp_path, capsys):
    """Its table is of perplexities, which are a Markov chain's entropy at every length, correct to
    1 %. --eval_only scores a seed again, and refuses another vocabulary; a model writes text."""
    source = np.random.default_rng(0)
    P = source.dirichlet(np.full(6, 0.5), size=6)
    entropy = -(np.linalg.matrix_power(P, 200)[0][:, None] * P * np.log(P)).sum()
    chain = [0]
    for x in source.random(200000):
        chain.append(min(5, int(np.searchsorted(P[chain[-1]].cumsum(), x))))
    (tmp_path / 'text').write_text(''.join('abcdef'[x] for x in chain))
    train.main(flags(task='characters', data=tmp_path / 'text', out_dir=tmp_path / 'sweep', lr=1e-2,
                     train_lengths=32, eval_lengths='16,32', max_steps=250, eval_interval=250,
                     n_test=300, batch_size=32, pe='nope,alibi', seeds='0,1'))
    out = capsys.readouterr().out
    assert re.search(r'perplexity by length, pe\ncontext +16 +32\nnope +\d+\.\d+ +\d', out)
    run = tmp_path / 'sweep/pe=alibi'
    scores = json.loads((run / 'lengths.json').read_text())['1']
    for score in scores.values():
        assert abs(math.exp(score['loss'] - entropy) - 1) < 0.01
    again = [f'--out_dir={run}', '--eval_only']
    train.main([*again, '--eval_lengths=32', '--seeds=1'])
    assert json.loads((run / 'eval.json').read_text()) == {'1': {'32': scores['32']}}
    assert f'{math.exp(scores["32"]["loss"]):.3f}' in capsys.readouterr().out
    model, cfg = train.load(run)
    texts = [cfg.the_task.decode(model.generate(cfg.the_task.encode('face')[None], 20, t)[0])
             for t in (0, 0, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith('face') and len(text) == 24 for text in texts)
    tasks.make.cache_clear()        # as in a new process
    (tmp_path / 'text').write_text('fewer' * 99)
    with pytest.raises(train.UserError, match='trained with vocab_size=7, not'):
        train.main(again)


def test_scan_exact_match_is_greedy_decoding(tmp_path):
    """Of a trained model, with an encoding that depends on the final length, to the end token."""
    train.main(flags(out_dir=tmp_path, task='scan', pe='vipe', n_layer=2, d_model=32, lr=3e-3,
                     max_steps=300, eval_interval=300, batch_size=32, train_lengths='1-4',
                     eval_lengths='1-5'))
    model, cfg = train.load(tmp_path)
    task, exact = cfg.the_task, 0
    for length, (tokens, targets) in task.held_out('test', 40, [2, 4, 5], generator).items():
        greedy = 0
        for row, target in zip(tokens, targets):
            prompt = row[None, :(target != -100).nonzero()[0] + 1]
            answer = model.generate(prompt, len(row) - prompt.shape[1], end=task.end)[0]
            greedy += task.decode(answer) == task.decode(row)
        score = train.evaluate(model, task, [(length, (tokens, targets))])[length]['exact']
        assert abs(greedy / len(tokens) - score) < 1e-6
        exact += score
    assert exact > 0.5


# ------------------------------------------------------------------------------------------------
# kernels.py: in Triton's interpreter without a GPU, compiled with one

CUDA = torch.cuda.is_available()
DEVICE = 'cuda' if CUDA else 'cpu'
needs_triton = pytest.mark.skipif(kernels.triton is None, reason='needs Triton')
kernel_test = gpu if CUDA else needs_triton
FULL, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def nan_memory():
    """New tensors hold NaN, so that an element that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def laid_out(x, layout):
    """x [B, H, T, D] as a slice of one projection, with its features far apart, or contiguous."""
    if layout == 'slice':
        rows = torch.cat([x, x], dim=1).transpose(1, 2).contiguous()        # (B, T, 2H, D)
        return rows.transpose(1, 2)[:, x.shape[1]:]
    return x.mT.contiguous().mT if layout == 'apart' else x


ATTENTIONS = [
    (1, 3, 131, 20, 'slice', (FULL, BF16, HALF)),       # ragged: T and D are no powers of two
    (1, 2, 100, 80, 'apart', (FULL, BF16)),             # PoPE's q and k have 160 features, v has 80
    (2, 1, 65, 128, 'whole', (FULL, HALF)),
    (1, 2, 64, 32, 'slice', (FULL, BF16)),              # whole blocks
    (1, 1, 17, 64, 'apart', (BF16, HALF)),
    (2, 2, 2, 16, 'whole', (FULL,)), (1, 2, 1, 48, 'slice', (FULL,))]
ATTENTIONS += [(1, 2, 8192, 64, 'whole', (FULL, BF16))] * CUDA


@kernel_test
@pytest.mark.parametrize('name', ['attention', 'pope_attention', 'vipe_attention'])
@pytest.mark.parametrize('B, H, T, D, layout, dtypes', ATTENTIONS)
def test_attention_kernels(nan_memory, name, B, H, T, D, layout, dtypes):
    """Outputs (ViPE's distance, too) and gradients for every shape, layout and precision are as
    near the float64 reference as allowed."""
    function, reference = getattr(kernels, name), getattr(kernels, f'{name}_reference')
    function = partial(function, mean_distance=True) if name == 'attention' else function
    torch.manual_seed(T)
    for dtype in dtypes:
        inputs = [x.detach() for x in kernels.sample_inputs(name, B, H, T, D, dtype, DEVICE)]
        inputs = [laid_out(x, layout) if x.dim() == 4 else x for x in inputs]
        error, allowed = kernels.compare(function, reference, [x.requires_grad_() for x in inputs])
        assert error <= allowed


SCANS = [(*shape, *switches)
         for shape in ((2, 2, 12, 12, 8), (1, 1, 50, 50, 3), (3, 1, 1, 1, 4), (1, 2, 16, 100, 34))
         for switches in ((True, False), (True, True), (False, True))]
SCANS += [(1, 1, 130, 512, 5, True, True)]  # 128 bins for 63 tokens, 256 for 64, then 512
SCANS += [(2, 3, 2048, 2048, 84, True, copy) for copy in (False, True) if CUDA]


@kernel_test
@pytest.mark.parametrize('B, C, T, P, d_pe, sharpen, copy', SCANS)
def test_cursor_scan_by_the_kernel(nan_memory, B, C, T, P, d_pe, sharpen, copy):
    """The encodings, and the gradients of gates, gamma, table and jumps."""
    torch.manual_seed(T)
    inputs = kernels.sample_inputs('cursor_scan', B, C, T, d_pe, device=DEVICE, P=P)

    def call(scan, reset, step, gamma, table, jumps):
        return scan(reset, step, gamma if sharpen else None, table, jumps if copy else None)

    exact = partial(call, pe.cursor_scan)
    error, allowed = kernels.compare(partial(call, kernels.cursor_scan), exact, inputs)
    assert error <= allowed
    if T <= 16:
        inputs = [x.detach().double() for x in inputs]
        close(call(kernels.cursor_scan_reference, *inputs), exact(*inputs))


@kernel_test
def test_cursor_scan_at_its_limits():
    """Exponents near 1 and of 10,000 are right; a table that a cursor can leave is refused."""
    torch.manual_seed(0)
    reset, step, gamma, table, jumps = (x.detach() for x in kernels.sample_inputs(
        'cursor_scan', 2, 2, 9, 4, device=DEVICE))
    inputs = reset, step, gamma.new_tensor([1.0001, 1e4]), table, jumps
    close(kernels.cursor_scan(*inputs), pe.cursor_scan(*inputs), 1e-5)
    for scan in (kernels.cursor_scan, pe.cursor_scan):
        for wrong, message in ((table[1:-1], '-9..9'), (table[1:], '2P')):
            with pytest.raises(AssertionError, match=message):
                scan(reset, step, gamma, wrong)


@kernel_test
@pytest.mark.parametrize('name', ['pope_attention', 'vipe_attention', 'cursor_scan'])
def test_kernels_repeat_bit_for_bit(name):
    torch.manual_seed(0)
    inputs = kernels.sample_inputs(name, 1, 2, 20, 32, device=DEVICE)
    once, again = (kernels.outputs_and_gradients(getattr(kernels, name), inputs) for _ in range(2))
    assert all(map(torch.equal, once, again))


@kernel_test
def test_kernels_as_operators():
    """Schema, fake tensors and gradients, as torch.compile requires them; no second gradient."""
    torch.manual_seed(0)
    check = partial(torch.library.opcheck, test_utils=(
        'test_schema', 'test_autograd_registration', 'test_faketensor'))
    q, k, v, delta = kernels.sample_inputs('pope_attention', 2, 2, 20, 16, device=DEVICE)
    y, e, lse = kernels.attention_forward(q, k, v, True)
    for distance in (True, False):
        check(kernels.attention_forward, (q, k, v, distance))
        check(kernels.attention_backward, (y, e, lse, q, k, v, y, e, lse, distance))
    reset, step, gamma, _, jumps = kernels.sample_inputs('cursor_scan', 2, 2, 9, 4, device=DEVICE)
    for phases, rest in ((delta, (gamma, jumps)), (None, (None, None))):
        check(kernels.polar, (q, phases, 100.0, True))
        check(kernels.polar_backward, (torch.cat([q, k], dim=-1), q, phases, 100.0, True))
        h = kernels.scan_forward(reset, step, *rest)
        check(kernels.scan_forward, (reset, step, *rest))
        check(kernels.scan_backward, (h, reset, step, *rest, h))
    y, e = kernels.attention(q, k, v)
    grad, = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match='backward through .*attention_backward'):
        grad.sum().backward()
    assert e is None


@needs_triton
def test_positions_are_a_multiple_of_16_numbers_apart():
    """Of what the kernels write, and of what they read: others are copied. Blocks divide, too."""
    x = torch.randn(1, 3, 65, 20)
    assert kernels.new_rows(x, 40).stride() == (65 * 128, 40, 128, 1)
    rows = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert rows.stride(2) == 60 and kernels.readable(rows).stride(2) == 64
    assert torch.equal(kernels.readable(rows), x)
    for name, blocks in kernels.BLOCKS.items():
        assert not any(N % M if name == 'keys_kernel' else M % N for M, N, *_ in blocks)


def test_auto_takes_the_reference_where_shared_memory_is_small(monkeypatch):
    """And warns once."""
    auto, sizes = encoding('pope', heads=1, head_dim=64), dict(small=64 * 1024, large=99 * 1024)
    monkeypatch.setattr(kernels, 'triton', object())
    monkeypatch.setattr(kernels, 'shared_memory', sizes.get)
    for device in sizes:
        q = types.SimpleNamespace(is_cuda=True, shape=(1, 1, 512, 64), dtype=BF16, device=device)
        with warnings.catch_warnings(record=True, action='always') as said:
            takes = [auto.takes_kernel(q, q, torch.arange(512)) for _ in range(2)]
        assert takes == 2 * [device == 'large'] and len(said) == (device == 'small')


BY_KERNELS = {
    'pope', 'pope uniform', 'pope no delta', 'pope no softplus', 'ssmax', 'rope+ssmax', 'vipe',
    'vipe s one', 'vipe s global', 'vipe logits only', 'vipe value only', 'vipe d_p', 'pope+vipe',
    'vrope+vipe', 'vipe+vrope'}


def test_only_encodings_without_a_bias_take_kernels():
    encodings = {name: pe.build(pe.PEConfig(**dict(d_model=48, n_head=4) | kw))[0]
                 for name, kw in VARIANTS.items()}
    assert {name for name, x in encodings.items() if x.fusable and x.triton_pays} == BY_KERNELS


@kernel_test
@pytest.mark.parametrize('name', [*sorted(BY_KERNELS), 'pope+alibi', 'prism copy'])
def test_encodings_by_kernels(name):
    """kernel=triton has the loss and the gradients of kernel=reference. Factors and distances stay
    in float32 under autocast; sums compile in one graph."""
    kw, T = VARIANTS[name] | dict(n_layer=1, rope_base=100.0), 17
    if name == 'prism copy':  # its cursors have a kernel, at whose steps the interpreter is slow
        kw, T = kw | dict(n_head=2, prism_cursors=1), 6
    tokens = torch.randint(1, 11, (2, T + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batch = tokens[:, :-1], tokens[:, 1:], 30
    plain, model = (make(FULL, kernel=x, **kw).to(DEVICE) for x in ('reference', 'triton'))
    (exact, loss), (_, by_kernel) = plain(*batch), model(*batch)
    close(by_kernel.detach(), loss.detach(), 3e-5)
    grads = torch.autograd.grad(by_kernel, [*model.parameters()])
    for a, b in zip(grads, torch.autograd.grad(loss, [*plain.parameters()]), strict=True):
        assert (a - b).norm() <= 2e-4 * b.norm() + 1e-6
    with torch.autocast(DEVICE, BF16):
        assert (model(*batch)[0] - exact).abs().max() < 0.1 * exact.abs().max()
    if name.startswith('pope+'):
        compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
        close(compiled(*batch)[0].detach(), exact.detach(), 1e-4)


@kernel_test
def test_kernels_refuse_other_positions():
    """Fractions take the reference; integers that do not count up by 1 give NaN."""
    q, k, v, pos = (x.to(DEVICE) for x in qkv())
    q, k, v = q.float(), k.float(), v.float()
    enc, plain = (encoding('pope', kernel=x).float().to(DEVICE) for x in ('triton', 'reference'))
    assert enc.attend(q, k, v, 3 * pos).isnan().any()
    for where, same in ((pos + 7, pos), (pos * 0.5, pos * 0.5)):
        close(enc.attend(q, k, v, where), plain.attend(q, k, v, same), 1e-4)


def test_without_triton_everything_but_the_kernels_works(monkeypatch):
    """import pe imports neither Triton nor kernels, and leaves the environment as it was."""
    code = ("import os; before = dict(os.environ); import sys, torch, pe; "
            "assert os.environ == before and not {'triton', 'kernels'} & set(sys.modules); "
            "sys.modules['triton'] = None; import kernels; "
            "x = torch.randn(1, 1, 4, 4); kernels.attention_reference(x, x, x); "
            "pe.build(pe.PEConfig(pe='pope')); kernels.attention(x, x, x)")
    assert 'RuntimeError: the kernels require Triton' in python('-c', code).stderr
    monkeypatch.setitem(sys.modules, 'kernels', None)
    assert pe.kernels(required=False) is None
    with pytest.raises(pe.UserError, match='requires kernels.py beside pe.py'):
        pe.kernels()


@pytest.mark.skipif(CUDA or kernels.triton is None, reason='needs Triton and no GPU')
def test_kernels_warn_where_triton_was_imported_too_early():
    env = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    for code in ('import triton, kernels', 'import kernels, triton'):
        early = code.endswith('kernels')
        assert ('too late to choose' in python('-c', code, env=env).stderr) == early


COMPILE = """
import sys, types
import torch, triton
from triton.backends.compiler import GPUTarget
import kernels

arch, shared = int(sys.argv[1]), int(sys.argv[2])
triton.runtime.driver.set_active(types.SimpleNamespace(
    get_current_target=lambda: GPUTarget('cuda', arch, 32),
    get_current_device=lambda: 0, get_current_stream=lambda device: 0))
kernels.shared_memory = lambda device: shared
run = triton.JITFunction.run

def compile_only(kernel, *args, **kw):  # launches nothing; ptxas makes machine code
    made = run(kernel, *args, **(kw | dict(warmup=True)))
    products = [x in made.asm['ptx'] for x in ('wgmma.mma_async', 'mma.sync.')]
    print(kernel.__name__, dtype, made.metadata.shared, *products)

triton.JITFunction.run = compile_only
for call in sys.argv[3:] + ['cursor_scan/64/float32']:
    name, D, dtype = call.split('/')
    inputs = kernels.sample_inputs(name, 1, 1, 112, int(D), getattr(torch, dtype))
    kernels.outputs_and_gradients(getattr(kernels, name), inputs)
"""


@needs_triton
@pytest.mark.parametrize('arch, shared, calls', [  # bytes a block on A100, RTX 4090, H100
    (90, 232448, ['pope_attention/128/float16', 'vipe_attention/64/bfloat16',
                  'vipe_attention/128/float32']),
    (89, 101376, ['pope_attention/128/bfloat16', 'vipe_attention/128/bfloat16']),
    (80, 166912, ['pope_attention/128/bfloat16', 'vipe_attention/64/float16'])])
def test_kernels_compile(arch, shared, calls):
    """Without a GPU, by Triton's compiler alone: shared memory suffices. On sm_90 products in half
    precision are asynchronous (wgmma, no mma.sync); those in float32 are exact (neither)."""
    run = python('-c', COMPILE, str(arch), str(shared), *calls,
                 env=os.environ | dict(TRITON_INTERPRET='0'))
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    attention = {'forward_kernel', 'queries_kernel', 'keys_kernel'}
    for kernel, dtype, bytes_used, *products in lines:
        assert int(bytes_used) <= shared, kernel
        if kernel in attention:
            half = dtype != 'float32'
            assert products == [str(half and arch == 90), str(half and arch < 90)], kernel
    others = {'polar_kernel', 'polar_backward_kernel', 'scan_kernel', 'scan_backward_kernel'}
    assert {kernel for kernel, *_ in lines} == attention | others


# ------------------------------------------------------------------------------------------------
# train.py: runs and their files, resuming, many seeds, bad input

CONFIGS = os.path.join(HERE, 'configs')
CPU = torch.device('cpu')


def read_config(*argv):
    """The configuration that train.py makes of a command line."""
    return train.make_config(train.read_options(list(argv)))


def small(**kw):
    """The configuration of a run of seconds, with the given keys."""
    return read_config(*flags(**kw))


def smaller(**kw):
    """A model and batches for single steps."""
    keys = dict(d_model=16, n_head=4, n_layer=2, batch_size=4, train_lengths=[1, 2, 3, 4],
                eval_lengths=[3], warmup_steps=5)
    return train.Config(**(keys | kw))


def read_checkpoint(folder):
    return torch.load(folder / 'ckpt.pt', weights_only=True)


def weights(folder, seed=0):
    return read_checkpoint(folder)['seeds'][seed]['model']


def same(a, b):
    """Whether two dictionaries of tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def read_json(path):
    return json.loads(path.read_text())


def log_lines(folder):
    """The points of a run's log, without the one value that a clock gives."""
    points = map(json.loads, (folder / 'log.jsonl').read_text().splitlines())
    return [{key: x for key, x in point.items() if key != 'steps_per_s'} for point in points]


def assert_same_run(a, b, tol=1e-9):
    """Two runs have the same scores, and the same losses to `tol`."""
    for x, y in zip(log_lines(a), log_lines(b), strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == y[key] if key == 'eval' else abs(x[key] - y[key]) <= tol
    assert read_json(a / 'lengths.json') == read_json(b / 'lengths.json')


@contextlib.contextmanager
def sigterm_in_step(step):
    """A SIGTERM reaches this process in training step number `step`, counted from 1."""
    learning_rate = train.learning_rate

    def learning_rate_and_signal(cfg, number):
        if number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(cfg, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'learning_rate', learning_rate_and_signal)
        yield


def draw(batches, steps):
    """The tokens [steps B, T] of some steps."""
    return torch.cat([batches.next(0)[0] for _ in range(steps)])


# a run and its files

def test_a_run_and_its_files(tmp_path, capsys):
    run, results = tmp_path / 'r', tmp_path / 'results.jsonl'
    argv = flags(out_dir=run, seeds='3,4', results=results)
    assert train.main(argv) == 0
    assert 'exact match' in capsys.readouterr().out
    scores = read_json(run / 'lengths.json')
    assert list(scores) == ['3', '4'] and list(scores['3']) == list('12345')
    assert set(scores['3']['1']) == {'exact', 'token', 'last', 'n'}
    logged = [(point['step'], point['seed']) for point in log_lines(run) if 'loss' in point]
    assert logged == [(step, seed) for step in range(2, 13, 2) for seed in (3, 4)]
    record = read_json(results)                            # a single line
    assert record['config']['seeds'] == '3-4' and record['lengths'] == '1-5'
    assert 'lr' not in record['config']                    # defaults are not written
    model, cfg = train.load(run, seed=4)
    assert cfg.task == 'parity' and not model.training
    assert same(model.state_dict(), weights(run, 4))
    assert same(train.load(run)[0].state_dict(), weights(run, 3))
    with pytest.raises(train.UserError, match='seed 9 in .*there are: 3; 4'):
        train.load(run, seed=9)


def test_a_finished_run_is_replaced_only_on_request(tmp_path, capsys):
    """The same command shows its table again and records it once; another configuration is refused;
    with --overwrite the old files stay until the first checkpoint of the new run."""
    run, results = tmp_path / 'r', tmp_path / 'results.jsonl'
    argv = flags(out_dir=run)
    train.main(argv)
    kept = {path: path.read_bytes() for path in run.iterdir()}
    for _ in range(2):
        train.main([*argv, f'--results={results}'])
        assert '--overwrite' in capsys.readouterr().out
    assert read_json(results)['scores']['0']               # a single line
    for text in ('{"0": half', '{}', '{"0": {}}', '{"0": {"1": {}}}'):     # damaged: test again
        (run / 'lengths.json').write_text(text)
        train.main(argv)
        assert 'finished earlier' not in capsys.readouterr().out
        assert kept[run / 'lengths.json'] == (run / 'lengths.json').read_bytes()
    train.main([*argv, '--n_test=20'])                     # and so is a run for another test
    assert read_json(run / 'lengths.json')['0']['1']['n'] == 20
    train.main(argv)
    with pytest.raises(train.UserError, match='trained with lr=0.001, not 0.5: .*--overwrite'):
        train.main([*argv, '--lr=0.5'])
    other = [*argv, '--lr=0.5', '--overwrite']
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, 'update', mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            train.main(other)
    assert kept == {path: path.read_bytes() for path in run.iterdir()}
    for name in ('probe_axes.json', 'eval.json', 'report.md'):
        (run / name).touch()
    with sigterm_in_step(1):
        train.main(other)
    assert 'the same command, without --overwrite' in capsys.readouterr().out
    names = {path.name for path in run.iterdir()}
    assert names == {'ckpt.pt', 'config.json', 'log.jsonl', 'report.md'}
    assert read_checkpoint(run)['config']['lr'] == 0.5


def test_a_second_process_in_a_folder_is_refused(tmp_path):
    with train.locked(tmp_path), pytest.raises(train.UserError, match='another process trains'):
        train.main(flags(out_dir=tmp_path))
    assert not list(tmp_path.iterdir())


def test_same_seed_same_losses_other_seed_other_losses(tmp_path):
    losses = {}
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        folder = tmp_path / name
        train.main(flags(out_dir=folder, seeds=seed, dropout=0.1, pe='shifted_ape'))
        losses[name] = [point['loss'] for point in log_lines(folder) if 'loss' in point]
    assert losses['a'] == losses['b'] != losses['c']
    assert same(weights(tmp_path / 'a'), weights(tmp_path / 'b'))


def test_reading_options_draws_no_random_number():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    smaller(pe='learned')
    assert torch.rand(1) == expected


RESUMED = [dict(pe='shifted_ape', dropout=0.1, log_interval=5),
           dict(n_train=9, length_schedule='[(0, 2), (5, 3)]'),
           dict(seeds='0,1', dtype='float64')]


@pytest.mark.parametrize('kw', RESUMED, ids=str)
def test_stopped_at_any_step_and_continued_is_bitwise_the_same(kw, tmp_path):
    whole = tmp_path / 'whole'
    train.main(flags(out_dir=whole, **kw))
    for stop_at in (1, 4, 7, 11):
        folder = tmp_path / str(stop_at)
        with sigterm_in_step(stop_at):
            assert train.main(flags(out_dir=folder, **kw)) == 128 + signal.SIGTERM
        assert read_checkpoint(folder)['step'] == stop_at
        with open(folder / 'log.jsonl', 'a') as log:
            log.write('half a li')                         # as if killed while saving once more
        train.main(['--resume', f'--out_dir={folder}'])    # the other options are the run's own
        for seed in small(**kw).seeds:
            assert same(weights(whole, seed), weights(folder, seed))
        assert log_lines(folder) == log_lines(whole)


def test_killed_at_random_and_continued_is_bitwise_the_same(tmp_path):
    kw = dict(max_steps=300, eval_interval=30, log_interval=15, pe='pope', n_eval=2)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    python('train.py', *flags(out_dir=whole, **kw), check=True)
    rng, path = random.Random(time.time_ns()), killed / 'ckpt.pt'
    for _ in range(2):
        before = path.exists() and path.stat().st_mtime_ns
        run = subprocess.Popen([sys.executable, 'train.py', *flags(out_dir=killed, **kw)], cwd=HERE,
                               stdout=subprocess.DEVNULL)
        while not path.exists() or path.stat().st_mtime_ns == before:
            assert run.poll() is None                      # until it has saved once more
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.2))
        run.kill()
        assert run.wait() == -signal.SIGKILL
    python('train.py', *flags(out_dir=killed, **kw), check=True)
    assert same(weights(whole), weights(killed))
    assert log_lines(whole) == log_lines(killed)


def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / 'ckpt.pt'
    path.write_bytes(b'old')
    monkeypatch.setattr(os, 'fsync', mock.Mock(side_effect=OSError(28, 'No space left on device')))
    with pytest.raises(train.UserError, match='No space left'):
        train.write_file(str(path), b'new')
    assert path.read_bytes() == b'old' and list(tmp_path.iterdir()) == [path]


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    forward, calls = Transformer.forward, []

    def poisoned(self, tokens, targets=None, total_len=None):
        logits, loss = forward(self, tokens, targets, total_len)
        if self.training and targets is not None:
            calls.append(1)
            loss = loss * math.nan if len(calls) == 7 else loss
        return logits, loss
    monkeypatch.setattr(Transformer, 'forward', poisoned)
    for _ in range(2):                                     # the second time from its files
        with pytest.raises(train.UserError, match='NaN or infinite at step 7'):
            train.main(flags(out_dir=tmp_path))
    entry = read_checkpoint(tmp_path)['seeds'][0]
    assert entry['step'] == 4 and all(p.isfinite().all() for p in entry['model'].values())


def test_checkpoints_that_do_not_fit(tmp_path):
    """Those of an older version are read if only options are missing."""
    argv = flags(out_dir=tmp_path)
    train.main(argv)
    path, whole = tmp_path / 'ckpt.pt', read_checkpoint(tmp_path)

    def refuses(says, *argv, **changes):
        torch.save(whole | changes, path)
        with pytest.raises(train.UserError, match=says):
            train.main(['--resume', f'--out_dir={tmp_path}', *argv])
    refuses('trained with seeds', '--seeds=0,1')
    refuses('max_steps', '--max_steps=99')
    refuses('trained with train_len=3, not', config=whole['config'] | dict(train_len=3))
    refuses('used ema', config=whole['config'] | dict(ema=0.9))
    state = torch.zeros(16, dtype=torch.uint8)             # as of a GPU's generator
    refuses('another kind of device', '--eval_lengths=1-6', step=8,
            batches=whole['batches'] | dict(starts=[state]))
    refuses('have changed: its data', '--eval_lengths=1-6', step=8,
            batches=whole['batches'] | dict(sum=1))
    del whole['config']['pope_frequencies']
    torch.save(whole, path)
    assert train.load(tmp_path)[1].pope_frequencies == 'all'
    whole['seeds'][0]['model']['blocks.0.attn.pe.table'] = torch.zeros(3)
    refuses('has other parameters', '--eval_only')
    good = path.read_bytes()
    for bad in (good[:-99], good[:2000] + b'?' + good[2001:], b'hello'):
        path.write_bytes(bad)
        with pytest.raises(train.UserError, match='damaged, or not a checkpoint'):
            train.main(argv)


# many seeds

def losses_of(numbers, steps, together=True, **kw):
    """Losses [S, steps] of seeds that train in one Trainer."""
    trainer = train.Trainer(smaller(seeds=numbers, **kw), CPU)
    if len(numbers) > 1:
        assert trainer.model.together                      # models this small go under vmap
        trainer.model.together = together
    return torch.stack([trainer.step(step) for step in range(steps)], dim=1)


def compare_seeds(numbers, steps, tol, **kw):
    """Seeds stacked under vmap, and in a loop, have the losses that each has alone."""
    alone = torch.cat([losses_of([seed], steps, **kw) for seed in numbers])
    assert alone[0, -1] != alone[1, -1] and (alone[:, -1] < alone[:, 0]).all()
    close(losses_of(numbers, steps, **kw), alone, tol)
    close(losses_of(numbers, steps, together=False, **kw), alone, tol)


@variants
def test_seeds_together_train_as_each_alone(kw):
    """20 steps of an encoding, 10 of one with switches or of a sum, in float64. Stick-breaking
    learns more slowly at first: 20 in a sum, too."""
    plain = kw['pe'] in pe.ENCODINGS and len(kw) == 1
    long = plain or 'stickbreaking' in kw['pe']
    compare_seeds([5, 6, 7], 20 if long else 10, 1e-9, dtype='float64', **kw)


@pytest.mark.parametrize('size', [0.01, 100.0])
def test_each_seed_is_clipped_as_alone(size):
    """Small gradients stay, large ones are scaled to the largest norm."""
    stacks = [torch.randn(2, 3, 4), torch.randn(2)]        # two seeds of two parameters
    alone = [[x[seed].clone() for x in stacks] for seed in (0, 1)]
    for x in (*stacks, *alone[0], *alone[1]):
        x.grad = size * x.detach().clone()
    train.clip_each(stacks, 1.0)
    for seed, params in enumerate(alone):
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for x, p in zip(stacks, params):
            close(x.grad[seed], p.grad, 1e-6)


def test_seeds_with_tied_embeddings_train_as_each_alone():
    compare_seeds([5, 6, 7], 15, 1e-9, dtype='float64', tie=True)


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_phases_stay_in_their_bounds(numbers):
    """A phase that is pushed against a bound for long leaves it as soon as the push turns."""
    trainer = train.Trainer(smaller(pe='pope', seeds=numbers, lr=0.01, min_lr=0.01), CPU)
    optimizer = trainer.optimizer
    delta = next(g for g in optimizer.param_groups if 'clamp' in g)['params'][0]
    gradient = -1.0

    def push(*_):
        delta.grad.fill_(gradient)

    optimizer.register_step_pre_hook(push)
    for step in range(100):
        trainer.step(step)
    assert (delta == 0).all()
    gradient = 1.0
    for step in range(100, 130):
        trainer.step(step)
    assert (delta < -0.01).all()


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_compiled_seeds_are_eager_ones(numbers, monkeypatch):
    """--compile compiles what a step calls in one graph: the model, or the pass of all seeds."""
    compiler = torch.compile

    def compile_whole(function, dynamic):
        return compiler(function, fullgraph=True, backend='aot_eager', dynamic=dynamic)
    monkeypatch.setattr(torch, 'compile', compile_whole)
    kw = dict(pe='pope+vipe', n_layer=1, n_head=2, train_lengths=[2, 3], dtype='float64')
    compiled = losses_of(numbers, 4, compile=True, **kw)
    close(compiled, losses_of(numbers, 4, compile=False, **kw), 1e-9)


def test_a_failing_seed_does_not_disturb_the_others(tmp_path, monkeypatch, capsys):
    a, b, results = tmp_path / 'a', tmp_path / 'b', tmp_path / 'r.jsonl'
    train.main(flags(out_dir=a, seeds='0,1,2'))
    clip, calls = train.clip_each, []

    def poisoned(params, largest):
        clip(params, largest)
        calls.append(1)
        if len(calls) == 6:                                # weights are NaN after step 6
            for p in params:
                p.grad[1] = math.nan
    monkeypatch.setattr(train, 'clip_each', poisoned)
    with pytest.raises(train.UserError, match='1 diverged: seed 1'):
        train.main(flags(out_dir=b, seeds='0,1,2', results=results))
    says = 'seed 1: the loss or a weight became NaN or infinite at step 6'
    assert says in capsys.readouterr().out
    record = read_json(results)
    assert list(record['scores']) == ['0', '2'] and record['failed'] == [says]
    assert same(weights(a, 0), weights(b, 0)) and same(weights(a, 2), weights(b, 2))
    failed = read_checkpoint(b)['seeds'][1]
    assert failed['step'] == 4 and all(p.isfinite().all() for p in failed['model'].values())
    assert not train.main(['--eval_only', f'--out_dir={b}'])
    assert f'left out: {says}' in capsys.readouterr().out
    assert list(read_json(b / 'eval.json')) == ['0', '2']


def test_micro_batches_give_the_same_gradient(tmp_path):
    """Micro-batches count by what is supervised in them, not by their rows."""
    for accumulate in (1, 3, 8):
        train.main(flags(dtype='float64', seeds='0,1', accumulate=accumulate,
                         out_dir=tmp_path / str(accumulate)))
    assert_same_run(tmp_path / '1', tmp_path / '3')
    assert_same_run(tmp_path / '1', tmp_path / '8')


# GPUs

class Operators(TorchDispatchMode):
    """The names of the operators that are called within it."""
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


# the host waits inside these, or may, which tensors without values do not show
WAITS = {'linalg_matrix_exp', 'linalg_householder_product', 'linalg_qr', 'linalg_inv_ex',
         '_linalg_solve_ex', 'nonzero'}


@variants
@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_no_step_waits_for_the_device(numbers, kw, monkeypatch):
    """A CUDA graph can record a step: the host reads no value and makes no tensor in it.

    Here the step runs on meta tensors, which have no values; all but AdamW, which is torch's.
    """
    if kw.get('prism_recurrent') == 'orthogonal':
        pytest.skip('train.Trainer makes no graph of this one')
    trainer = train.Trainer(smaller(seeds=numbers, **kw), CPU)
    model = trainer.model
    for batches in trainer.batches:
        batches.next(0)
        for name in ('tokens', 'targets', 'order'):
            setattr(batches, name, getattr(batches, name).to('meta'))
    if isinstance(model, train.Stack):
        model.params = {name: p.detach().to('meta').requires_grad_()
                        for name, p in model.params.items()}
        model.buffers = {name: x.to('meta') for name, x in model.buffers.items()}
        params = list(model.params.values())
    else:
        params = list(model.to('meta').parameters())
    trainer.optimizer = mock.Mock(param_groups=[dict(params=params, clamp=(-1, 1))])
    # autocast knows no meta device
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kw: contextlib.nullcontext())
    with Operators() as operators:
        loss = trainer.update(*trainer.next_batch(0))
    assert loss.is_meta and all(p.grad.is_meta for p in params)
    assert 'embedding' in operators.names and not operators.names & WAITS


@gpu
@variants
@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_gpu_graph_trains_as_eager_steps(numbers, kw):
    """Through an epoch's end and a change of lengths, each of which a graph must notice."""
    losses = {}
    for graph in (False, True):
        cfg = smaller(d_model=32, batch_size=8, train_lengths=[1, 2, 4], n_train=8, seeds=numbers,
                      length_schedule=[(0, 2), (6, 4)], graph=graph, **kw)
        trainer = train.Trainer(cfg, torch.device('cuda'))
        losses[graph] = torch.stack([trainer.step(step) for step in range(20)]).cpu()
    close(losses[True], losses[False], 1e-4)


@gpu
@pytest.mark.parametrize('numbers', ['0', '0,1'])
def test_gpu_run_stops_and_continues(numbers, tmp_path):
    argv = flags(device='cuda', seeds=numbers, dropout=0.1, max_steps=40, eval_interval=20)
    a, b = tmp_path / 'a', tmp_path / 'b'
    train.main([*argv, f'--out_dir={a}'])
    with sigterm_in_step(25):
        assert train.main([*argv, f'--out_dir={b}']) == 128 + signal.SIGTERM
    train.main([*argv, f'--out_dir={b}'])
    assert_same_run(a, b, 1e-4)


# sweeps and evaluation

def test_sweep_makes_one_table_and_continues(tmp_path, capsys):
    """A point that diverges does not end it, and is not trained again."""
    results = tmp_path / 'r.jsonl'
    argv = flags(pe='nope,rope', lr='1e-3,1e30', out_dir=tmp_path / 'sweep', results=results)
    with pytest.raises(train.UserError, match=r'2 diverged: nope 1e\+30.*; rope 1e\+30'):
        train.main(argv)
    names = [f'pe={name},lr={lr}' for name in ('nope', 'rope') for lr in ('0.001', '1e+30')]
    assert sorted(path.name for path in (tmp_path / 'sweep').iterdir()) == names
    assert re.findall(r'^(nope|rope) 0.001 .*│', capsys.readouterr().out, re.M) == ['nope', 'rope']
    good, bad, *_ = lines = results.read_text().splitlines()
    assert json.loads(bad)['scores'] == {} and len(json.loads(bad)['failed']) == 1
    assert list(json.loads(good)['scores']) == ['0'] and 'failed' not in json.loads(good)
    for path in (tmp_path / 'sweep' / names[2]).iterdir():           # as if killed in the third run
        path.unlink()
    with pytest.raises(train.UserError, match='2 diverged'):
        train.main(argv)
    assert capsys.readouterr().out.count('finished earlier') == 3
    assert results.read_text().splitlines() == lines       # the same run is recorded once
    diverged = tmp_path / 'sweep' / names[1]
    with pytest.raises(train.UserError, match='every seed of the run in .* diverged'):
        train.main(['--eval_only', f'--out_dir={diverged}'])
    train.main(['--eval_only', f'--out_dir={tmp_path / "sweep" / names[0]}'])
    assert not (diverged / 'eval.json').exists() and results.read_text().splitlines() == lines


def test_eval_only_uses_the_runs_own_configuration(tmp_path, capsys):
    """Its scores, at other lengths or of another encoding, go to eval.json."""
    train.main(flags(out_dir=tmp_path, pe='rope'))
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = ['--eval_only', f'--out_dir={tmp_path}']
    train.main([*again, '--eval_lengths=2,9', '--pe=yarn'])         # for the same weights
    assert 'parity with yarn' in capsys.readouterr().out
    assert list(read_json(tmp_path / 'eval.json')['0']) == list('29')
    assert kept == {path: path.read_bytes() for path in kept}
    with pytest.raises(train.UserError, match='task=parity; copy is another'):
        train.main([*again, '--task=copy'])
    with pytest.raises(train.UserError, match='has other parameters'):
        train.main([*again, '--pe=fire'])


def test_the_scale_of_vipe_follows_the_lengths_evaluated(tmp_path):
    """--eval_only at other lengths reports what training with these eval_lengths would have."""
    kw = dict(pe='vipe', vipe_s='global', max_steps=60)
    train.main(flags(out_dir=tmp_path / 'a', eval_lengths='1-9', **kw))
    train.main(flags(out_dir=tmp_path / 'b', eval_lengths='1-5', **kw))
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--eval_lengths=1-9'])
    assert read_json(tmp_path / 'a/lengths.json') == read_json(tmp_path / 'b/eval.json')


def test_evaluate_counts():
    class Fixed(torch.nn.Module):
        """A model that gives the answers that it was told."""
        def forward(self, tokens):
            return F.one_hot(self.answers, 8).float(), None
    task = tasks.make('copy')
    tokens, targets = task.sample(4, 3, torch.Generator().manual_seed(0))
    model = Fixed()
    model.answers = targets.clamp(min=0)
    model.answers[0, 4] += 1                               # row 0: its first state is wrong
    model.answers[1, 6] += 1                               # row 1: its last state
    model.answers[2, 6] += 1                               # row 2: its last state
    model.answers[3, 7] += 1                               # row 3: its end token
    scores = train.evaluate(model, task, [(3, (tokens, targets))])[3]
    assert scores == dict(exact=0, token=0.75, last=0.5, n=4)


# batches and the learning rate

def test_batches_mix_lengths_and_repeat_fixed_data():
    task = tasks.make('parity')
    batches = train.Batches(small(n_train=8, batch_size=6), 0, task, CPU)
    epoch, again = draw(batches, 4), draw(batches, 4)
    assert epoch.shape == (24, 9) and not torch.equal(epoch, again)
    assert sorted(epoch.tolist()) == sorted(again.tolist())
    assert len({(row != 0).sum().item() for row in epoch[:6]}) > 1
    online = train.Batches(small(), 0, task, CPU)
    assert len({tuple(row) for row in draw(online, 200).tolist()}) == 2 + 4 + 8


def test_schedule_limits_lengths():
    cfg = small(length_schedule='[(0, 1), (5, 3)]')
    assert train.lengths_at(cfg, 4) == [1] and train.lengths_at(cfg, 5) == [1, 2, 3]
    batches = train.Batches(cfg, 0, tasks.make('parity'), CPU)
    assert [batches.next(step)[0].shape[1] for step in (0, 4, 5)] == [5, 5, 9]


@pytest.mark.parametrize('n_train', [0, 1500])
def test_held_out_problems_come_from_generators_of_their_own(n_train):
    """Problems of length 40, where chance repeats are impossible: none is in two parts."""
    cfg = small(train_lengths='40', eval_lengths='40', n_eval=200, n_test=200, n_train=n_train)
    parts = [draw(train.Batches(cfg, 0, cfg.the_task, CPU), 200)]
    for split in ('eval', 'test'):
        parts += [tokens for _, (tokens, _) in train.held_out(cfg, split, CPU)]
    trained, validation, test = ({tuple(row) for row in part.tolist()} for part in parts)
    assert len(trained) > 1000
    assert not (trained & validation or trained & test or validation & test)
    with pytest.raises(train.UserError, match='seeds'):          # no seed reaches another generator
        small(seeds=2 ** 40)


def test_held_out_text_is_never_trained_on(tmp_path):
    """40 files, each of a byte of its own: no file is in two parts."""
    for i in range(1, 41):
        (tmp_path / f'{i}.txt').write_bytes(bytes([i]) * 50)
    cfg = small(task='text', data=tmp_path, train_lengths=16, eval_lengths='16,32')
    drawn = [[draw(train.Batches(cfg, 0, cfg.the_task, CPU), 200)]]
    for split in ('eval', 'test'):
        drawn.append([tokens for _, (tokens, _) in train.held_out(cfg, split, CPU)])
    parts = [{*torch.cat([x.flatten() for x in part]).tolist()} - {tasks.PAD} for part in drawn]
    assert [len(part) for part in parts] == [36, 2, 2] and len(set().union(*parts)) == 40


@pytest.mark.parametrize('decay, rates', [
    ('linear', {0: 0.1, 9: 1, 10: 1, 55: 0.55, 100: 0.1}),
    ('cosine', {0: 0.1, 9: 1, 32.5: 0.1 + 0.9 * (0.5 + 0.5 ** 1.5), 55: 0.55, 100: 0.1}),
    ('none', {0: 0.1, 9: 1, 99: 1})])
def test_learning_rate_schedules(decay, rates):
    cfg = small(lr=1.0, max_steps=100, warmup_steps=10, min_lr=0.1, decay=decay)
    for step, rate in rates.items():
        close(train.learning_rate(cfg, step), rate)


# input

BAD = {
    'unknown option': (['--batchsize=3'], "did you mean 'batch_size'"),
    'wrong type': (['--lr=fast'], "--lr=fast: lr must be a number >= 0, got 'fast'"),
    'unknown task': (['--task=pairty'], "'parity'"),
    'unknown encoding': (['--pe=rop'], "'rope'"),
    'heads': (['--n_head=5'], 'divisible'),
    'an encoder of padding': (['--task=distance', '--train_lengths=8,9', '--causal=False'],
                              'one training length'),
    'no such length': (['--task=scan', '--train_lengths=23'], 'no problems of the lengths'),
    'zero steps': (['--max_steps=0'], 'max_steps must be positive'),
    'many pieces': (['--accumulate=9'], 'larger than the batch_size'),
    'late schedule': (['--length_schedule=[(5, 3)]'], 'from step 0 on'),
    'bad schedule': (['--length_schedule=5'], 'length_schedule must be pairs'),
    'bad stage': (['--length_schedule=[(0, 1.5)]'], 'length_schedule must be pairs'),
    'bad beta': (['--beta1=1.5'], 'below 1'),
    'small set': (['--n_train=1'], 'too few problems'),
    'a point of a sweep': (['--d_model=32,33'], 'even'),
    'no data': (['--task=jsb'], 'add --data=PATH'),
    'no file': (['configs/none.py'], 'cannot read config file configs/none.py'),
    'no cuda': (['--device=cuda:7'], 'not available'),
    'no graph': (['--graph'], '--graph requires a CUDA device'),
    'nothing to resume': (['--resume', '--out_dir=nowhere'], 'no run in nowhere'),
    'two to evaluate': (['--eval_only', '--pe=nope,rope'], 'takes one trained run'),
}


@pytest.mark.parametrize('argv, says', BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {word.split('=')[0] for word in argv}
    others = [word for word in flags() if word.split('=')[0] not in given]
    with pytest.raises(train.UserError, match=re.escape(says)) as error:
        train.main(others + argv)
    assert '\n' not in str(error.value)
    assert not list(tmp_path.rglob('ckpt.pt'))


@pytest.mark.parametrize('text, says', [
    ('lr = 1e-3\npee = 1\n', "'pee', did you mean 'pe'"),
    ('lr = = 2', 'line 1: SyntaxError'), ('lr = 1\nseeds = [x]', 'line 2: NameError')])
def test_bad_config_files(text, says, tmp_path):
    (tmp_path / 'bad.py').write_text(text)
    with pytest.raises(train.UserError, match=f'bad.py.*{says}'):
        train.main([str(tmp_path / 'bad.py')])


def test_a_mistake_in_the_code_of_an_encoding_is_not_called_a_bad_option(monkeypatch):
    class Mistaken(pe.Encoding):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.a, self.b = range(3)
    monkeypatch.setitem(pe.ENCODINGS, 'mistaken', Mistaken)
    with pytest.raises(ValueError, match='too many values to unpack'):
        small(pe='mistaken')


def test_exit_code_2_without_a_traceback():
    argvs = [['train.py', '--lr=fast'], ['tasks.py', 'pairty'], ['probe.py', 'cursor', 'nowhere']]
    for argv, run in zip(argvs, pythons(*argvs)):
        assert run.returncode == 2, run.stderr
        assert run.stderr.startswith(f'{argv[0]}: ') and run.stderr.count('\n') == 1, run.stderr


def test_files_and_flags_chain(tmp_path):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text('task = "copy"\nlr = 0.5\nmax_steps = 10\n')
    b.write_text('# on top of a\nlr = lr / 2\neval_lengths = range(1, 4)\n')
    cfg = read_config(str(a), str(b), '--max_steps=1e3', '--eval_lengths=1-3,7', '--rope_heads=1')
    assert (cfg.task, cfg.lr, cfg.max_steps, cfg.rope_heads) == ('copy', 0.25, 1000, 1)
    assert cfg.eval_lengths == [1, 2, 3, 7] and cfg.out_dir == 'out/copy_rope'
    assert (cfg.vocab_size, cfg.train_len, cfg.eval_len) == (6, 35, 17)
    sweep = train.read_options(['--task=copy,reverse', '--n_head=1,2'])
    assert sweep['out_dir'] == 'out/rope_n_head' and sweep['n_head'] == [1, 2]


@pytest.mark.parametrize('key, given, value', [
    ('d_model', '1e2', 100), ('d_model', 4.0, 4), ('lr', '3', 3.0), ('lr', 1, 1.0),
    ('compile', 'true', True), ('compile', 'False', False), ('compile', 'None', None),
    ('data', '12', '12'), ('seeds', '2-4,7', [2, 3, 4, 7]), ('seeds', '5', [5]),
    ('length_schedule', '[(0, 5), (9, 7)]', [(0, 5), (9, 7)]), ('lr', '1, 2', [1.0, 2.0]),
    ('d_model', '1.5', None), ('d_model', True, None), ('lr', 'inf', None), ('decay', 'exp', None),
    ('compile', '2', None), ('data', 3, None), ('seeds', '1-', None), ('n_layer', -1, None)])
def test_a_value_takes_the_type_of_its_field_or_is_refused(key, given, value):
    if value is None and given != 'None':
        with pytest.raises(train.UserError, match=f'{key} must be'):
            train.convert(train.Config, key, given, 'a test')
    else:
        found = train.convert(train.Config, key, given, 'a test')
        assert found == value and type(found) is type(value)


def test_help_names_every_option(capsys):
    train.main(['--help'])
    out = capsys.readouterr().out
    for key in train.keys(train.Config):
        line = re.search(rf'^  --{key}=(.*)$', out, re.M)
        assert line and len(line[1].split()) > 1, key


# configs

def config_file(name):
    return os.path.join(CONFIGS, name + '.py')


CHORALE = [[60, -1, 60, 60]]
SMALL_DATA = {'jsb': json.dumps(dict(train=[CHORALE], valid=[CHORALE], test=[CHORALE])).encode(),
              'genome': b'>x\n' + b'ACGT' * 999,
              'openwebtext': bytes(9998)}


@pytest.mark.parametrize('name', sorted(os.listdir(CONFIGS)))
def test_configs_are_valid(name, tmp_path, request):
    values = train.read_options([os.path.join(CONFIGS, name)])
    task = values['task']
    if task in SMALL_DATA:
        (tmp_path / 'data.bin').write_bytes(SMALL_DATA[task])
        values['data'] = str(tmp_path / 'data.bin')
    elif task == 'cfq':
        values |= dict(data=str(request.getfixturevalue('cfq')), batch_size=12)
    elif task == 'maestro':
        values['data'] = str(request.getfixturevalue('midi'))
    cfg = train.make_config(values)
    if not name.startswith('paper_') and name != 'addition_prism.py':
        assert name == f'{cfg.task}_{cfg.pe}.py'
    with torch.device('meta'):                             # of the right shape, without numbers
        Transformer(cfg)


@pytest.mark.parametrize('baseline', [False, True])
def test_the_chains_of_paper_prism_are_the_papers(baseline):
    """The lengths of PRISM section 6, the layers with PRISM, and where the copy branch is."""
    settings = {}
    with open(config_file('paper_prism')) as f:
        chains = [re.split(', | or ', line) for line in re.findall(r'^#   (.+)$', f.read(), re.M)]
    for line in chains:
        tasks_in, words = line[:line.index('paper_prism')], line[line.index('paper_prism'):]
        words = words + ['paper_prism_baseline'] * baseline
        for name in tasks_in:
            cfg = read_config(*(word if word.startswith('--') else config_file(word)
                                for word in [name, *words]))
            settings[name] = (max(cfg.train_lengths), cfg.length_schedule[-1],
                              max(cfg.eval_lengths), cfg.prism_layers, cfg.prism_copy)
            assert (cfg.pe, cfg.d_model) == (('shifted_ape', 512) if baseline else ('prism', 196))
            assert cfg.n_test == (10000 if name == 'scan_cot_prism' else 1000)
    long, short = (40, [30000, 40], 150), (10, [5000, 10], 30)
    assert settings == {'string_copy_prism': (*long, [1], 'none'),
                        'string_reverse_prism': (*long, [1], 'fixed'),
                        'odds_first_prism': (*long, [1, 4], 'none'),
                        'stack_prism': (*long, [1, 4], 'none'),
                        'addition_prism': (*short, [1], 'none'),
                        'dyn_str_cpy_prism': (*short, [1], 'fixed'),
                        'multiplication_cot_prism': (*short, [1], 'none'),
                        'scan_cot_prism': (22, [10000, 22], 48, [1], 'fixed')}


# ------------------------------------------------------------------------------------------------
# probe.py: each probe finds a planted truth, or agrees with a loop

def nano(task='copy', dtype=torch.float64, longest=8, **kw):
    """(model, task, cfg) with random weights, as of a run trained to `longest`."""
    torch.manual_seed(0)
    small = dict(d_model=16, n_layer=2, dtype='float64', train_lengths=range(1, longest + 1),
                 eval_lengths=range(1, longest + 5))
    cfg = train.Config(task=task, **small | kw)
    return Transformer(cfg).to(dtype).eval().requires_grad_(False), cfg.the_task, cfg


def head_by_hand(task):
    model, cfg = probe.iteration_head(task)
    return model, cfg.the_task, cfg


def at_random(*shape, dtype=torch.float64, seed=0):
    """Normal numbers of this shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def untouched(function, model, task, cfg, **options):
    """The results of a probe, after which the model has no hook and computes bitwise the same."""
    tokens, _ = task.sample(2, 5, torch.Generator())
    before = model(tokens)[0]
    found = function(model, task, cfg, **options)
    assert torch.equal(model(tokens)[0], before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return found


def rotated_products(zq, zk, theta, pos):
    """Re sum_c conj(zq_tc) zk_sc e^(-i (t-s) theta_c) [H, T, T] of zq, zk [H, T, n]."""
    turn = torch.exp(-1j * (pos[:, None] - pos)[..., None] * theta)  # (T, T, n)
    return (zq[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1)


@variants
def test_a_trace_is_what_the_model_computes(kw):
    """Weights, values and outputs of every layer fit together, for every encoding."""
    model = make(**kw).requires_grad_(False)
    tokens = torch.randint(1, 11, (2, 12), generator=torch.Generator().manual_seed(0))
    before, layers = model(tokens)[0], probe.trace(model, tokens)
    assert layers[1].stream is layers[0].after
    for layer, block in zip(layers, model.blocks):
        y = layer.enc.mix(layer.weights, layer.v, layer.pos, layer.state, layer.x)
        close(y, layer.y, 1e-6)
        close(layer.x, block.norm_1(layer.stream))
    with probe.recording(model) as layers:
        for x in (tokens.flip(1), tokens):  # the second forward pass replaces the first
            model(x)
            close(layers[0].weights, probe.trace(model, x)[0].weights)
    with probe.recording(model, lambda i, layer: layer.logits.roll(i, 1)):
        assert not torch.allclose(model(tokens)[0], before)  # layer 2's heads are exchanged
    assert torch.equal(model(tokens)[0], before)


@pytest.mark.parametrize('kw', [
    dict(pe='rope'), dict(pe='ape+rope', n_head=8), dict(pe='nope', n_head=2, n_layer=1),
    dict(pe='prism', n_head=2)], ids=['one head', 'eight heads', 'one layer', 'prism'])
def test_every_probe_on_every_kind_of_run(kw):
    """It returns numbers that JSON can store and a figure that draws, or says why it cannot."""
    plt = pytest.importorskip('matplotlib.pyplot')
    subject, answered = nano('parity', dtype=torch.float32, longest=4, **kw), 0
    subject[0].requires_grad_(True)
    for name, function in probe.PROBES.items():
        own = inspect.signature(function).parameters.keys()
        small = dict(n=4, steps=0, gammas=[0.5], l_max=[3])
        try:
            rows, summary, draw = untouched(function, *subject,
                                            **{key: small[key] for key in small.keys() & own})
        except train.UserError as error:
            assert '\n' not in str(error), name
            continue
        answered += 1
        json.dumps(dict(rows=rows, summary=summary), allow_nan=False)
        assert max(map(len, probe.as_text(rows, summary).splitlines())) <= 130, name
        figure = draw(plt)
        figure.set_layout_engine('none')  # slow
        figure.draw_without_rendering()
        plt.close(figure)
    assert answered >= 10


def test_the_program(tmp_path, monkeypatch, capsys):
    """It writes rows, a summary and a picture; the run's own files stay as they were. A mistake is
    one line, and without arguments it lists the probes."""
    run, found = tmp_path / 'run', tmp_path / 'run/probe_cursor.json'
    train.main(flags(task='string_copy', pe='prism', n_head=2, out_dir=run, seeds='0,3'))
    before = {path: path.read_bytes() for path in run.iterdir()}
    probe.main(['cursor', str(run), '--seed=3', '--length=5'])
    assert json.loads(found.read_text())['summary']['length'] == 5
    assert {path: path.read_bytes() for path in before} == before
    drawn = importlib.util.find_spec('matplotlib') is not None
    assert (run / 'probe_cursor.png').exists() == drawn
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    probe.main(['cursor', str(run), '--length=4'])
    assert json.loads(found.read_text())['summary']['length'] == 4
    assert not (run / 'probe_cursor.png').exists()  # no picture of older numbers stays
    for argv, says in (
            (['perturb', run, '--gammas=0.5,2'], r'fractions in \(0, 1\]'),
            (['axes', run, '--n=0'], '--n must be an integer ≥ 1, got 0'),
            (['cursr', run], "did you mean 'cursor'?"), (['cursor'], 'give one run'),
            (['cursor', run, '--lenght=5'], '--lenght=5'), (['cursor', run, '--length=x'], "'x'"),
            (['cursor', run, '--seed=1'], 'seed 1'), (['axes', 'nowhere'], 'no run in nowhere'),
            (['axes', 'by_hand:mode'], 'by_hand:mode: .* copy, parity, polynomial')):
        with pytest.raises(train.UserError, match=says):
            probe.main(list(map(str, argv)))
    capsys.readouterr()
    probe.main([])
    listed = capsys.readouterr().out
    for name in probe.PROBES:
        assert re.search(rf'(?m)^  {name} *\*? +[A-Z].*[?.]', listed), name


BIDIRECTIONAL = dict(task='distance', pe='alibi', causal=False, train_lengths=[8],
                     eval_lengths=[8])


@pytest.mark.parametrize('name, kw, given, says', [
    ('toeplitz', BIDIRECTIONAL, {}, 'causal mask'), ('tuning', BIDIRECTIONAL, {}, 'causal mask'),
    ('axes', BIDIRECTIONAL, {}, 'causal mask'), ('stretch', BIDIRECTIONAL, {}, 'causal mask'),
    ('cursor', {}, {}, 'pe=prism'), ('kernel', {}, {}, 'pe=prism'),
    ('alignment', dict(task='mode'), {}, 'unique correct key'),
    ('squeeze', dict(pe='ape', positions='randomized'), {}, 'positions=index'),
    ('linear', dict(eval_lengths=[4]), {}, 'eval_lengths above 8'),
    ('norms', dict(nope_every=2), {}, 'nope_every=0'),
    ('tuning', dict(pe='ape'), {}, 'depend on the distance'),
    ('tuning', dict(pe='prism', n_head=2), {}, 'come from the content'),
    ('tuning', dict(pe='fox'), {}, 'all inputs of fox'),
    ('ablate', dict(pe='rope'), {}, 'n_head=4'),
    ('ablate', dict(pe='rope'), dict(what='positions'), r'pe=ape or ape\+rope'),
    ('gradients', dict(n_head=2), dict(steps=10 ** 9), 'take fewer'),
    ('stretch', dict(pe='rope'), dict(layer=3), 'must be 1 to 2'),
    *[('disentangle', dict(pe=name), {}, f'those of pe={name}')
      for name in ('nope', 'ape', 'fire', 'vipe')]])
def test_a_probe_says_what_it_requires(name, kw, given, says):
    with pytest.raises(train.UserError, match=says):
        probe.PROBES[name](*nano(**kw), **given)


def test_problems_and_rows():
    """Probes run on the problems that the scores are from, sequences without padding; of more than
    60 heads tables have the mean of each layer."""
    _, task, cfg = nano('addition')
    found = probe.problems(task, [3], cfg.n_test)[3][0]
    assert torch.equal(found, dict(train.held_out(cfg, 'test', 'cpu'))[3][0])
    rows = probe.sequences(task, cfg.train_lengths, 3, 20)
    assert all(row.all() for row in rows) and len({row.shape for row in rows}) > 1
    many = torch.arange(122.0).view(2, 61)
    assert probe.head_rows(dict(r=many)) == [dict(layer=1, r=30.0), dict(layer=2, r=91.0)]
    assert probe.head_rows(dict(r=many[:, :2]))[2] == dict(layer=2, head=1, r=61.0)


def test_correlation():
    """Of each row; a constant has none, also where rounding leaves its mean off: nan, no error,
    which tables show as an empty cell."""
    x, y = at_random(2, 3, 50)
    close(probe.correlation(x, y), [torch.corrcoef(torch.stack(xy))[0, 1] for xy in zip(x, y)])
    for constant in (torch.zeros(50), torch.full((50,), 0.1), torch.full((50,), -1e6)):
        for pair in ((constant, y[0]), (y[0], constant), (constant, constant)):
            assert probe.correlation(*pair).isnan()
    assert probe.number(torch.nan) is probe.number(-torch.inf) is None
    scores = probe.agreement(torch.ones(5), torch.arange(5.0))  # of a constant target
    assert math.isnan(scores['pearson']) and math.isnan(scores['spearman'])
    mixed = probe.correlation(torch.stack([x[0], torch.ones(50)]), y[:2])
    close(mixed[0], probe.correlation(x[0], y[0]))  # the rows beside it are not affected
    assert mixed[1].isnan()


# ViPE

def test_the_iteration_head_and_what_attention_and_alignment_find_in_it():
    """The circuit is correct at every length. Layer 1 attends to the anchors, layer 2 to x_t, also
    where the output is wrong; with small logits layer 2 loses x_t."""
    for name, longest in (('copy', 1000), ('parity', 999), ('polynomial', 300)):
        model, task, _ = head_by_hand(name)
        for length in (1, 2, 3, 48, longest):
            tokens, targets = task.sample(2, length, torch.Generator().manual_seed(length))
            with torch.no_grad():
                assert model(tokens, targets)[1] < 1e-6
    rows, _, _ = probe.attention(*head_by_hand('parity'), length=30, n=2)
    assert [row['length'] for row in rows] == [16] * 4 + [30] * 4
    for first, second in ((rows[0], rows[2]), (rows[4], rows[6])):  # second heads are zero
        assert first['x_to_BoS'] == first['s_to_EoI'] == second['s_to_x_t'] == 1
        assert first['s_to_x_t'] == second['x_to_BoS'] == 0
    model, task, cfg = head_by_hand('copy')
    rows, summary, _ = probe.alignment(model, task, cfg, length=120, n=2, distances=[3])
    assert summary['head'] == '2.1' and rows[-1]['length'] == 120
    assert summary['right_to'] == summary['aligned_to'] == 120
    for row in rows:
        assert row['2.1'] == row['exact'] == row['states'] == row.get('d=3', 1) == 1
        assert row['1.1'] == 0 and 0 < row['2.2'] < 0.5
    model.requires_grad_(False).head.weight[4] = 0  # the symbol 0 is never predicted
    rows, summary, _ = probe.alignment(model, task, cfg, length=17, n=99)
    right = (probe.problems(task, [3], 99)[3][1][:, 4:7] != 4).double()  # targets of EoI, s_1, s_2
    row = next(row for row in rows if row['length'] == 3)
    close([row['exact'], row['states']], [right.prod(dim=1).mean(), right.mean()], 6e-5)
    assert 0 < row['exact'] < row['states'] < row['2.1'] == 1 and summary['right_to'] == 0
    assert summary['aligned_to'] == 17
    model.blocks[1].attn.qkv.weight[:cfg.d_model] *= 1e-3
    assert probe.alignment(model, task, cfg, length=40, n=2)[1]['aligned_to'] == 0


def test_attention_and_alignment_against_loops():
    """Means over queries, on random weights, in a task where the correct key runs backwards."""
    model, task, cfg = nano('reverse', pe='rope', n_head=2)
    rows, _, _ = probe.attention(model, task, cfg, length=6, n=64)
    aligned = probe.alignment(model, task, cfg, length=6, n=64, distances=[2])[0][5]
    tokens, targets = probe.problems(task, [6], 64)[6]  # BoS, 6 inputs, EoI at 7, 6 states, EoS
    layers = probe.trace(model, tokens)
    for row in rows[:4]:
        weights = layers[row['layer'] - 1].weights[:, row['head'] - 1]
        close(row['x_to_BoS'], weights[:, 1:7, 0].mean(), 6e-5)
        close(row['s_to_EoI'], weights[:, 8:14, 7].mean(), 6e-5)
        close(row['entropy'], torch.special.entr(weights)[:, 7:14].sum(dim=-1).mean(), 6e-5)
        x_t = statistics.mean(weights[:, t, 13 - t].mean().item() for t in range(7, 13))
        close([row['s_to_x_t'], aligned[f'{row["layer"]}.{row["head"]}']], [x_t, x_t], 6e-5)
    right = (model(tokens)[0].argmax(dim=-1) == targets).double()
    close([aligned['length'], aligned['states'], aligned['d=2']],
          [6, right[:, 7:13].mean(), right[:, 9].mean()], 6e-5)


def test_linear():
    """Ridge equals the normal equations; R2, Pearson's and Spearman's r by hand, with ties. Layer 1
    of the iteration head writes the distance to EoI: exact at 3 times the length, unlike an
    untrained model and the embedding."""
    x = at_random(200, 4) * torch.tensor([1, 10, 0.1, 1e-3]) + 3
    y = x @ torch.tensor([1.0, -2, 3, 100]).double() + at_random(200, seed=1)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    w, b = probe.ridge(x, y, penalty=0.3)
    direct = torch.linalg.inv(z.T @ z + 200 * 0.3 * torch.eye(4)) @ z.T @ (y - y.mean())
    close(x @ w + b, z @ direct + y.mean())
    found = probe.agreement(torch.tensor([1, 2, 2, 4, 5]), torch.tensor([1.0, 3, 2, 2, 7]))
    assert found == pytest.approx(dict(
        rmse=math.sqrt(9 / 5), mae=1.0, r2=1 - 9 / 10.8, pearson=12 / math.sqrt(10.8 * 22),
        spearman=7.25 / 9.5), abs=1e-12)
    rows, _, _ = probe.linear(*head_by_hand('copy'), n=4)
    at = {(row['target'], row['layer'], row['lengths']): row for row in rows}
    assert len(rows) == 18 and at['distance', 0, 'longer']['r2'] < 0.5
    for lengths in ('trained', 'longer', '3x'):
        row = at['distance', 1, lengths]
        assert row['r2'] == row['pearson'] == 1 and row['untrained'] < 0.9
    rows, _, _ = probe.linear(*nano('string_copy', pe='ape', d_model=32), n=8)
    assert {row['target'] for row in rows} == {'position'} and rows[0]['r2'] > 0.9  # sinusoids


def test_squeeze():
    """After the trained 13 tokens positions are fractions that end where training did; a key 13
    or more tokens back is hidden."""
    model, task, cfg = nano('parity', pe='ape', longest=5)
    rows, _, _ = probe.squeeze(model, task, cfg, n=20)
    assert all(row['tokens'] == row['tokens, squeezed'] for row in rows[:5])
    tokens, targets = probe.problems(task, [9], 20)[9]  # 21 tokens
    asked = (targets != -100).sum()
    squeezed = model(tokens, pos=torch.linspace(0, 12, 21))[0].argmax(dim=-1) == targets
    close(rows[8]['tokens, squeezed'], squeezed.sum() / asked, 6e-5)
    assert rows[8]['tokens'] != rows[8]['tokens, squeezed']
    model, task, cfg = nano('parity', pe='nope', longest=5, n_layer=1)
    row = probe.squeeze(model, task, cfg, n=20)[0][8]
    windows = [model(tokens[:, max(0, t - 12):t + 1])[0][:, -1].argmax(dim=-1) for t in range(21)]
    close(row['tokens, hidden'], (torch.stack(windows, dim=1) == targets).sum() / asked, 6e-5)
    assert row['tokens'] == row['tokens, squeezed']


# PoPE

def test_loss_by_position():
    """The mean over problems at each position that is supervised."""
    model, task, cfg = nano('copy', pe='rope', longest=3)
    rows, summary, _ = untouched(probe.loss, model, task, cfg, n=5)
    tokens, targets = probe.problems(task, [7], 5)[7]
    curve = train.token_losses(model(tokens)[0], targets)[:, 8:16].mean(dim=0)
    assert [row['first'] for row in rows] == list(range(9, 17))
    close([row['rope'] for row in rows], curve, 1e-4)
    close(summary['rope, beyond'], curve.mean(), 1e-4)


def test_norms_of_planted_frequencies():
    """Three of four pairs of features have the same norm, the second has none; head 2 has twice
    the norms of head 1."""
    (model, task, cfg), pairs = nano(pe='rope', n_head=2), torch.tensor([1.0, 0, 1, 1])
    scale = torch.cat([pairs, 2 * pairs]).repeat_interleave(2)  # (H D,)
    for block in model.blocks:
        W = block.attn.qkv.weight
        W[:] = W[:1]  # every feature of a query and of a key is the same number
        W[:32] *= scale.repeat(2)[:, None]
    rows, summary, _ = probe.norms(model, task, cfg, n=2)
    close([summary['used'], summary['fast']], [3 / 4, 1 / 3], 1e-3)
    q = torch.tensor([row['q'] for row in rows])
    close(q, q[0] * pairs, 1e-3)
    layers = probe.trace(model, probe.batch(task, cfg.train_lengths, 0, 2)[1])
    first = torch.stack([x.q[..., :2].norm(dim=-1).mean(dim=(0, 2)) for x in layers])  # (L, H)
    close([q[0], rows[0]['largest_q']], [first.mean(), first.max()], 1e-4)
    close([row['wavelength'] for row in rows], [2 * math.pi * 10 ** c for c in range(4)], 0.01)


def test_tuning_of_alibi_are_lines_and_of_rope_the_median_peaks():
    row = torch.randint(1, 11, (1, 9), generator=torch.Generator().manual_seed(0))
    model = make(pe='alibi')
    curves = probe.tuning_curves(model, row, 6, 3)
    slope = model.blocks[0].attn.pe.slope[:, None]
    close(curves - curves[..., :1], (-slope * torch.arange(6)).expand_as(curves))
    model, task, cfg = nano(pe='rope', n_head=2)
    rows, summary, _ = untouched(probe.tuning, model, task, cfg, contents=6)
    row, = probe.sequences(task, cfg.train_lengths, 0, 1)
    curves = probe.tuning_curves(model, row, summary['distances'], 6)
    for line, curve in zip(rows, curves.transpose(1, 2).flatten(0, 1)):
        peaks = curve.argmax(dim=1).numpy()
        shift = np.quantile(peaks, 0.75) - np.quantile(peaks, 0.25)
        close([line['peak'], line['shift'], line['range']],
              [np.median(peaks), shift, np.ptp(curve.mean(dim=0).numpy())], 1e-4)


# the Toeplitz study

def test_ablate_finds_the_head_that_carries_the_answer():
    """Copy, length 1: head 3 of layer 2 alone brings x_1 to EoI. By hand: head 1 of each layer."""
    model, task, cfg = nano('copy', pe='nope', n_head=4, train_lengths=[1], eval_lengths=[1])
    eye = torch.eye(16)
    for block in model.blocks:
        for p in (block.mlp[2].weight, block.attn.proj.weight, block.attn.qkv.weight):
            p.zero_()
    model.embedding.weight.copy_(eye[:6])
    model.blocks[1].attn.qkv.weight[2 * 16 + 8:][:2] = eye[4:6]  # head 3's value: the symbol
    model.blocks[1].attn.proj.weight[8:10, 8:10] = eye[:2, :2]
    model.head.weight[:3] = 0
    model.head.weight[3] = 1e4 * eye[4:6].sum(dim=0)  # EoS after a symbol
    model.head.weight[4:] = 100 * eye[8:10]
    rows, summary, _ = probe.ablate(model, task, cfg)
    assert [[row[f'drop {h}'] for h in (1, 2, 3, 4)] for row in rows] == [[0] * 4, [0, 0, 100, 0]]
    assert [row['effective'] for row in rows] == [None, 1] and summary['base'] == 100
    assert [summary[key] for key in ('layer', 'head', 'largest', 'second')] == [2, 3, 100, 0]
    rows, _, _ = probe.ablate(*head_by_hand('parity'), n=64)
    assert [[row['drop 1'], row['drop 2'], row['effective']] for row in rows] == [[100, 0, 1]] * 2
    drops = torch.tensor([[1, 1, 1, 1], [0, 0, 7, -3], [1, 2, 3, 4]]).double()
    close(probe.effective(drops), [4, 1, 100 / 30])


def test_ablate_subtracts_the_vectors_that_were_added(tmp_path):
    """Before layer 1 it leaves the same weights without an encoding; random vectors of the same
    norm differ."""
    (tmp_path / 'text').write_text(''.join(random.Random(0).choices('abcdef', k=9999)))
    shape = dict(data=str(tmp_path / 'text'), train_lengths=[12], eval_lengths=[12], n_head=2)
    model, task, cfg = nano('characters', pe='random', **shape)
    plain = nano('characters', pe='nope', **shape)[0]
    plain.load_state_dict(model.state_dict(), strict=False)
    rows, _, _ = probe.ablate(model, task, cfg, what='positions', n=30)
    without = train.evaluate(plain, task, probe.problems(task, [12], 30).items())[12]['loss']
    close(rows[0]['without p'], without, 1e-3)
    assert abs(rows[0]['random'] - rows[0]['without p']) > 1e-3 and len(rows) == 2
    tokens, p, taken = probe.batch(task, [12], 0, 2)[1], probe.added_vectors(model, 12), []

    def score(tap_and_hook):
        taken.append(-tap_and_hook[1](None, None, torch.zeros_like(p)))
        return 1.0
    probe.without_positions(model, cfg, tokens, score)
    close(taken[0], p)
    close(torch.stack(taken).norm(dim=-1), p.norm(dim=-1).expand(10, 12))  # 2 layers, 1 + 4 each
    assert not torch.allclose(taken[1], taken[2])


@pytest.mark.parametrize('kw', [
    dict(pe='ape+rope', norm='rmsnorm'), dict(pe='learned+t5'), dict(pe='yarn', eval_lengths=[9]),
    dict(pe='rope', rope_heads=1), dict(pe='rope', attention='mla'), dict(pe='pope'),
    dict(pe='ape+vipe')], ids=lambda kw: '-'.join(map(str, kw.values())))
def test_toeplitz_splits_the_logits(kw):
    """The Toeplitz part of each problem's logits is the means along its diagonals, in a loop. Eq.
    1's terms are the logits and their fractions add up to 1, for encodings that are linear in q
    and k; the others have no terms."""
    shape = dict(d_model=32, n_head=4, train_lengths=[3], eval_lengths=[3])
    model, task, cfg = nano('copy', **shape | kw)
    rows, _, _ = untouched(probe.toeplitz, model, task, cfg, length=8, n=4)
    tokens = probe.batch(task, [8], 8, 4)[1]
    p, (i, j) = probe.added_vectors(model, tokens.shape[1]), np.tril_indices(tokens.shape[1])
    names = 'qc kc', 'qc kp', 'qp kc', 'qp kp', 'B'
    for layer, block in zip(probe.trace(model, tokens), model.blocks):
        for h in range(cfg.heads):
            row = rows.pop(0)
            shares = []
            for L in layer.logits[:, h].numpy():
                means = np.array([L.diagonal(-d).mean() for d in range(len(L))])
                shares.append(means[i - j].var() / L[i, j].var())
            close(row['toeplitz'], statistics.mean(shares), 6e-5)
            if cfg.pe in ('pope', 'ape+vipe'):
                assert not set(names) & row.keys()
            else:
                close(sum(row.get(name, 0) for name in names), 1, 1e-3)
        if 'qc kc' in row:
            total = sum(probe.eq_1(layer, block.norm_1, p).values())
            close((total + pe.causal(total)).expand_as(layer.logits), layer.logits)


def test_gradients_and_jacobians_by_layer():
    """Summed over the layers, which share T5's table, H(d) at all edges is the gradient by its
    bias. J is autograd's Jacobian of a block at the last target."""
    model, task, cfg = nano('copy', pe='t5', n_head=2)
    model.requires_grad_(True)
    tokens, targets = task.sample(3, 5, torch.Generator())
    rows, H = probe.gradients_by_layer(model, tokens, targets, probe.edges(task, tokens))
    train.token_losses(model(tokens)[0], targets).sum().backward()
    close(H.sum(dim=0).T, model.blocks[0].attn.pe.table.grad[:13], 1e-6)
    for row, heads in zip(rows, H.norm(dim=-1)):
        close([row['head'], row['first'], row['margin']],
              [heads.argmax() + 1, heads.max(), heads.max() - heads.min()], 1e-3)
    close(rows[0]['growth'], rows[0]['margin'] / rows[1]['margin'], 2e-3)
    assert rows[1]['growth'] is None
    J = probe.jacobians(model, tokens, targets)
    for block, layer, own, row in zip(model.blocks, probe.trace(model, tokens), J, rows):
        whole = torch.autograd.functional.jacobian(
            lambda x, block=block, layer=layer: block(x, layer.pos, layer.state), layer.stream[:1])
        close(own[0], whole[0, -2, :, 0, -2])  # the last token, EoS, is predicted and not read
        values = torch.linalg.svdvals(own)
        close([row['least'], row['most']], [values.min(), values.max()], 1e-3)


def test_edges_of_two_triggers():
    task = tasks.make('distance')
    tokens, targets = task.sample(200, 12, torch.Generator().manual_seed(0))
    b, u, j, d = probe.edges(task, tokens)
    assert (tokens[b, u] == task.query).all() and (targets[b, u] != -100).all()
    assert (tokens[b, j] + tokens[b, j - d] == 2 * task.first_trigger + 1).all()
    assert torch.equal(d // 4 + task.first_class, tokens[:, -1])


def test_gradients_repeats_the_first_steps_of_the_run(tmp_path):
    """After all steps it finds what it finds in the saved model; A1 counts the blocks whose
    singular values are within 0 and 2."""
    run = tmp_path / 'run'
    train.main(flags(task='copy', n_head=2, n_layer=2, seeds=3, out_dir=run))
    probe.main(['gradients', str(run), '--n=50'])  # as many steps as the run had
    found = json.loads((run / 'probe_gradients.json').read_text())
    rows = found['rows']
    close(found['summary']['A1'], statistics.mean(0 < row['least'] and row['most'] < 2
                                                  for row in rows), 1e-4)
    assert [row.pop('step') for row in rows][::2] == [0, 3, 6, 9, 12, 'trained']
    assert rows[0] != rows[8]
    for a, b in zip(rows[8:10], rows[10:]):
        assert all(b[key] == (x and pytest.approx(x, rel=1e-2)) for key, x in a.items())


# PRISM

def test_cursor_and_kernel_find_gates_set_by_hand():
    """The gates depend on biases alone: query cursors always step up, key cursors stay. So their
    moves are 1 and 0, in prompt and answer; the modes are where the gates lead; and eq. 6 and the
    mean position are exact where cursors are sure."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, dtype=torch.float32, longest=3)
    cursors = model.blocks[0].attn.pe.cursors
    cursors.gates.W.weight.zero_()
    query, key = cursors.gates.W.bias.view(2, cursors.count, 4)  # reset, incr, decr, keep
    query.copy_(torch.tensor([-30.0, 9, 0, 0]))
    key.copy_(torch.tensor([-30.0, 0, 0, 9]))
    rows, summary, _ = untouched(probe.cursor, model, task, cfg, length=20)
    assert [(row['of'], row['part'], row['moves'], row['steady']) for row in rows] == (
        [('query', 'prompt', 1.0, 1.0), ('query', 'answer', 1.0, 1.0)] * cursors.count +
        [('key', 'prompt', 0.0, 1.0), ('key', 'answer', 0.0, 1.0)] * cursors.count)
    assert summary['steady'] == 1 and summary['length'] == 20
    tokens = task.sample(2, 4, torch.Generator())[0]
    for c in probe.cursors_of(model, tokens):
        offset = c['histogram'].argmax(dim=-1) - tokens.shape[1]
        assert torch.equal(offset[0], torch.arange(1, 11) * (c['of'] == 'query'))
    rows, *_ = untouched(probe.kernel, model, task, cfg)
    assert all(row['peak'] > 0.999 and row['eq6'] < 1e-3 and row['mean'] < 1e-3 for row in rows)


def test_cursors_of_two_layers_with_a_copy_branch():
    """Each layer of prism_layers has cursors of its own; every fifth query cursor can jump. Means
    are over the prompt, and over the answer from "=" on."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, prism_copy='fixed', n_layer=2,
                            prism_layers=[1, 2], dtype=torch.float32, longest=3)
    for block in model.blocks:
        block.attn.pe.alpha.uniform_(0, 2)
    rows, summary, _ = untouched(probe.cursor, model, task, cfg, length=5, n=3)
    found = probe.cursors_of(model, probe.problems(task, [5], 3)[5][0])
    for i, (c, t) in enumerate(itertools.product(found, (range(5), range(5, 11)))):
        close([rows[i]['incr'], rows[i]['peak']],
              [c['gates']['incr'][:, t].mean(), c['histogram'][:, t].amax(dim=-1).mean()], 6e-4)
    used = [(row['steady'], row['weight']) for row in rows
            if (row['of'], row['part']) in (('query', 'answer'), ('key', 'prompt'))]
    close(summary['steady'], sum(x * w for x, w in used) / sum(w for _, w in used), 4e-4)
    assert [row['layer'] for row in rows if row['of'] == 'query'] == [1] * 8 + [2] * 8
    jumps = [list(row.values())[:4] for row in rows if 'jump' in row]  # layer, head, cursor, of
    assert jumps[::2] == jumps[1::2] == [[1, 1, 1, 'query'], [2, 1, 1, 'query']]
    cursors = model.blocks[0].attn.pe.cursors  # layer 1 steps up, whatever it reads
    cursors.gates.W.bias.add_(1000 * torch.eye(4)[1].repeat(2 * cursors.count))
    cursors.copy.W_stay.bias.fill_(1000)  # "no copy"
    moved = probe.cursor(model, task, cfg, length=5, n=3)[0]
    assert [row['incr'] == 1 for row in moved[:16]] == [row['layer'] == 1 for row in rows[:16]]
    assert [row['jump'] == 0 for row in moved if 'jump' in row] == [True, True, False, False]


@pytest.mark.parametrize('kw', [{}, dict(prism_sharpen=False), dict(prism_copy='trained')])
def test_kernel_compares_eq_6_with_eq_4(kw):
    """Half the sum of absolute differences over the displacements, in a loop."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, longest=3, **kw)
    rows, summary, _ = untouched(probe.kernel, model, task, cfg)
    assert summary['rises'] == 4  # of 32 features
    _, tokens, targets = probe.batch(task, cfg.train_lengths, 3, 1)
    T, start = 8, 3  # abc=abc. and its "="
    for c, row in zip(probe.cursors_of(model, tokens), rows):
        if 'jump' in c['gates']:
            assert row['eq6'] is None
            continue
        h, apart = c['histogram'][0].tolist(), 0.0
        torch.testing.assert_close(probe.displacement(c, 0), c['histogram'][0, -1].double())
        law = probe.displacement(c, start + 1).tolist()  # -4..4
        for d in range(-2 * T, 2 * T + 1):
            eq_6 = sum(h[start][i] * h[-1][i + d] for i in range(2 * T + 1) if 0 <= i + d <= 2 * T)
            apart += abs(eq_6 - (law[d + 4] if abs(d) <= 4 else 0)) / 2
        close(row['eq6'], apart, 1e-3)
        assert apart > 0.01 and row['mean'] > 0.05


# LLM position generalization

def test_three_axes_solve_equation_7():
    """A sum of three axes is found whole; of any other map the fit is the least-squares one."""
    T, (i, j) = 9, torch.tril_indices(9, 9)
    a, b, c = at_random(3, T)
    W = torch.zeros(T, T).double().index_put((i, j), a[i - j] + b[i] + c[j])
    close(probe.three_axes(W[None])[-1][0][i, j], W[i, j], 1e-6)
    close(probe.axes_fit(W[None]), torch.ones(2, 1), 1e-9)
    design = torch.cat([F.one_hot(z, T) for z in (i - j, i, j)], dim=1).double()
    ridged = torch.cat([design, 1e-3 * torch.eye(3 * T)])  # ridge 1e-6
    W = at_random(2, T, T)
    for one, a, b, c, fit in zip(W, *probe.three_axes(W)):
        aim = torch.cat([one[i, j], torch.zeros(3 * T)])
        solution = torch.tensor(np.linalg.lstsq(ridged.numpy(), aim.numpy(), rcond=None)[0])
        close(torch.cat([a, b, c]), solution, 1e-5)
        close(fit[i, j], design @ solution, 1e-7)
    lower = torch.ones(T, T).tril()
    centred = [torch.stack([z - z[:t + 1].mean() for t, z in enumerate(x)])[lower > 0]
               for x in (W[0], probe.three_axes(W)[-1][0])]
    close(probe.axes_fit(W)[1, 0], torch.corrcoef(torch.stack(centred))[0, 1])


def test_two_axes_are_equation_12():
    W = at_random(7, 7)
    a, b, fit = probe.two_axes(W)
    close(a[3], W[3].mean() - W.mean() / 2)
    close(b[2], W[:, 2].mean() - W.mean() / 2)
    close(fit, a[:, None] + b)
    model, task, cfg = nano(pe='alibi', n_head=2)
    for block in model.blocks:
        block.attn.qkv.weight[:16] = 0  # no queries: logits are the bias alone
    assert probe.disentangle(model, task, cfg, n=1)[1]['mean_r'] == 1


@pytest.mark.parametrize('kw', [
    dict(pe='rope'), dict(pe='pope', pope_delta='uniform'), dict(pe='rope', rope_heads=2),
    dict(pe='rope', attention='mla'), dict(pe='alibi', rope_heads=1), dict(pe='yarn'),
    dict(pe='pope+alibi')])
def test_logits_at_other_distances(kw):
    """The encoding's own logits at the true positions; at fake ones those of a sequence there. Of
    rope and pope they are Re sum_c conj(zq) zk e^(-i (t-s) theta) / sqrt(d)."""
    enc, pos = make(**kw).blocks[0].attn.pe, torch.arange(10)
    q, k = at_random(2, 1, enc.cfg.heads, 10, enc.cfg.head_dim)
    layer = types.SimpleNamespace(enc=enc, q=q, k=k, state=None, logits=enc.logits(q, k, pos))
    below = torch.ones(10, 10, dtype=torch.bool).tril()
    close(probe.logits_at(layer, pos, pos)[..., below], layer.logits[..., below])
    close(probe.fake_logits(layer, 7)[:, 7 - pos[:8], pos[:8]], layer.logits[0, :, 7, :8])
    if kw in (dict(pe='rope'), dict(pe='pope', pope_delta='uniform')):
        logits = rotated_products(*probe.polar(enc, q[0], k[0]), pos) * enc.scale
        close(logits[:, below], layer.logits[0][:, below])


def test_tuples_finds_a_planted_slow_pair():
    """Its row has ratio, rotation, angle and fixed (0: the key is constant)."""
    model, task, cfg = nano(pe='rope', d_model=8, n_head=1, n_layer=1)
    angle = torch.tensor([0, 0, 0, 2.0]).double()
    q = torch.stack([angle.cos(), angle.sin()], dim=1) * torch.tensor([[1], [1], [1], [20]])
    with torch.no_grad():    # the embedding is 1 in channel 1, which the norm makes 7 ** 0.5
        model.embedding.weight.zero_()[:, 0] = 1
        model.blocks[0].attn.qkv.weight[:16].zero_()[:, 0] = torch.cat(
            [q.flatten(), torch.tensor([1.0, 0]).repeat(4).double()])
    (row,), summary, _ = probe.tuples(model, task, cfg, n=2)
    assert (row['layer'], row['head'], row['pair'], row['fixed']) == (1, 1, 4, 0)
    found = [row[key] for key in ('ratio', 'angle', 'rotation', 'wavelength')]
    close(found, [20, 2, cfg.train_len * 1e-3, 2000 * math.pi], 1e-3)
    assert summary == dict(pairs=1, heads=1, of_heads=1, fixed=0)


def test_slow_dominating_pairs_and_eq_15():
    """The first of six pairs of features is slow and dominates, the second dominates and is fast.
    f has the mean key, g what keys add to it without a rotation."""
    zq, zk = (torch.complex(*at_random(2, 1, 200, 6, seed=seed)) for seed in (0, 1))
    zk *= torch.tensor([20.0, 20, 1, 1, 1, 1])
    theta, pos = torch.tensor([1e-3] + [1.0] * 5).double(), torch.arange(200)
    ratio, slow = probe.slow_dominating(zq, zk, theta, 1000)
    assert slow.tolist() == [[True] + [False] * 5]
    product = (zq.abs().mean(dim=1) * zk.abs().mean(dim=1))[0]
    close(ratio[0], product / np.median(product))
    assert not probe.slow_dominating(zq, zk, theta, 2000)[1].any()  # rotates by 2 rad
    zk += torch.tensor([30.0, 0, 0, 0, 0, 0])
    q, kbar = zq * slow, zk.mean(dim=1, keepdim=True)
    f, g, own = probe.analytic(zq, zk, theta, slow)
    close(own, rotated_products(q, zk, theta, pos))
    close(f.tril(), rotated_products(q, kbar.expand_as(zk), theta, pos).tril())
    close(g, rotated_products(q, torch.polar((zk - kbar).abs(), zk.angle()), 0 * theta, pos))
    W, lower = rotated_products(zq, zk, theta, pos), np.tril_indices(200)
    found = probe.analytic_fit(torch.cat([W, W]), zq, zk, theta, slow)  # it acts on one head of two
    for r, (x, y) in zip(found, ((own, f + g), (W, own), (W, f + g))):
        close(r[0], np.corrcoef(x[0][lower], y[0][lower])[0, 1])
        assert r[1].isnan()
    assert probe.analytic_fit(W, zq, zk, theta, ~slow & slow).isnan().all()  # no such pair


@pytest.mark.parametrize('gamma, l_max', [(0.2, 3), (0.5, 1), (1.0, 40)])
def test_draws_are_the_same_for_all_levels(gamma, l_max):
    """A larger gamma moves the same tokens and more; a larger l_max the same ones farther, to the
    same side."""
    pos, moved = torch.arange(40), []
    for seed in range(30):
        def draw(of, *level, seed=seed):
            return of(40, *level, torch.Generator().manual_seed(seed))
        order, fewer = (draw(probe.transposition, g, l_max) for g in (gamma, gamma / 2))
        assert torch.equal(order[order], pos) and (order - pos).abs().max() <= l_max
        assert torch.equal(fewer[fewer != pos], order[fewer != pos])
        moved.append((order != pos).double().mean().item())
        shift, less = (draw(probe.offsets, g, l_max) for g in (gamma, gamma / 2))
        assert shift.abs().max() <= l_max and (gamma < 1 or (shift != 0).all())
        assert torch.equal(less[less != 0], shift[less != 0])
        far = draw(probe.offsets, gamma, 10 * l_max)
        assert torch.equal(far.sign(), shift.sign()) and (far.abs() >= shift.abs()).all()
    assert abs(statistics.mean(moved) - gamma) < (0.01 if gamma < 0.5 else 0.2)


@pytest.mark.parametrize('kind', probe.KINDS)
def test_perturbed_and_original_have_the_same_targets(kind):
    """Before and after are of the targets that have not moved; nothing moved costs nothing."""
    model, task, cfg = nano('copy', pe='rope', longest=6)
    _, tokens, targets = probe.batch(task, [6], 0, 5)
    before = probe.perturbed(model, tokens, targets)
    close(before[0], train.token_losses(model(tokens)[0], targets))
    same = probe.perturbed(model, tokens, targets, kind, 0.0, 4)
    row = probe.perturb_scores(same, before, targets)
    assert row['cost'] == row['output'] == 0
    drawn = []

    def draw(T, gamma, l_max, source):
        drawn.append(source.initial_seed())
        return torch.zeros(T, dtype=torch.int64)
    with mock.patch.multiple(probe, offsets=draw, transposition=draw):
        probe.perturbed(model, tokens, targets, kind, 0.5, 4)
    assert len(set(drawn)) == len(drawn) == 5 * 2  # each sequence and layer has its own draw
    after = probe.perturbed(model, tokens, targets, kind, 1.0, 4)
    for seed, x in enumerate((before, after)):  # random weights are nearly never right
        x[1] = at_random(*targets.shape, seed=seed) > -1
    row, moved = probe.perturb_scores(after, before, targets), after[-1]
    asked = [(i, t) for i, t in (targets != -100).nonzero().tolist()
             if t + 1 == targets.shape[1] or not moved[i, t + 1]]
    assert len(asked) < (targets != -100).sum() if kind == 'text' else not moved.any()
    for when, x in (('', after), (' before', before)):
        losses, right = ([of[at].item() for at in asked] for of in x[:2])
        exact = {i: all(x[1][at] for at in asked if at[0] == i) for i, _ in asked}
        close([row[key + when] for key in ('loss', 'token', 'exact')],
              [statistics.mean(found) for found in (losses, right, exact.values())], 2e-4)
    y, y0 = (x[2].transpose(2, 3).flatten(3) for x in (after, before))  # (n, L, T, H D)
    change = (y - y0).norm(dim=-1) / y0.norm(dim=-1)
    close(row['output'], statistics.mean(change[i, :, ~still].mean().item()
                                         for i, still in enumerate(moved) if not still.all()), 2e-4)
    assert row['output'] > 0
    rows, _, _ = untouched(probe.perturb, *nano(pe='pope+alibi'), n=2, gammas=[0.5], l_max=[3, 99])
    assert {(row['kind'], row['l_max']) for row in rows} == {  # 99 is longer than the 19 tokens
        ('original', None), *((name, 3) for name in probe.KINDS)}


def test_stretch():
    """A window over everything is attention; with the first tokens kept it is what the sequence of
    these tokens gives. Distances are over the typical one of normal points, in a loop."""
    for name in ('rope', 'pope', 'alibi', 't5', 'yarn'):
        model, tokens = make(pe=name), torch.arange(1, 11)[None]
        layer = probe.trace(model, tokens)[0]
        close(probe.sliding(layer, torch.tensor([9]), 0, 10)[0], layer.y[0, :, -1].flatten())
        other = probe.trace(model, tokens[:, [0, 1, 4, 5, 6, 7]])[0]
        found = probe.sliding(layer, torch.tensor([7]), 2, 6, first=2)[0]
        close(found, other.y[0, :, -1].flatten())
        assert not torch.allclose(probe.sliding(layer, torch.tensor([7]), 2, 6)[0], found)
    normal, later = at_random(60, 5), at_random(3, 5, seed=1) + 1
    xs = normal.tolist()
    typical = statistics.median_low(min(math.dist(x, y) for y in xs if y is not x) for x in xs)
    close(probe.nearest(later, normal),
          [min(math.dist(x, y) for y in xs) / typical for x in later.tolist()], 1e-6)
    rows, summary, _ = untouched(probe.stretch, *nano(pe='pope+alibi', n_head=2), n=2, queries=3,
                                 window=9)
    T = summary['tokens']
    assert [(row['outputs'], row['points']) for row in rows] == [
        ('later positions', 2 * (T - 9)), ('windows', 2 * 3 * (T - 8)),
        ('windows with the first tokens', 2 * 3 * (T - 8))]



# Llama

SCALED = dict(rope_type='yarn', rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize('kw', [dict(head_dim=12),
                                dict(attention_bias=True, rope_parameters=SCALED)],
                         ids=['wide', 'yarn'])
def test_a_llama_as_one_of_ours(tmp_path, kw):
    """q, k and logits of a trace give the attention and the output that transformers computes, with
    shared keys. --hf and --text replace a run, in every probe that accepts a Llama."""
    transformers, tokenizers = map(pytest.importorskip, ('transformers', 'tokenizers'))
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=67, max_position_embeddings=64)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **shape | kw, attn_implementation='eager', initializer_range=0.5)).eval()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f'w{i}': i for i in range(67)},
                                                             unk_token='w66'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder, text, out = tmp_path / 'net', tmp_path / 'text', tmp_path / 'out'
    net.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    tokens = [f'w{random.Random(i).randrange(1, 66)}' for i in range(200)]
    text.write_text(' '.join(tokens))

    model, cfg = probe.load_llama(str(folder), str(text))
    row, = probe.sequences(cfg.the_task, [16], 0, 1)
    assert [f'w{i}' for i in row[0].tolist()] in [tokens[i:i + 16] for i in range(len(tokens))]
    with torch.no_grad():
        theirs = net(input_ids=row, output_attentions=True, use_cache=False)
        close(model(row)[0], theirs.logits, 1e-4)
    for layer, attention in zip(probe.trace(model, row), theirs.attentions):
        close(layer.weights, attention, 1e-4)
        close(layer.enc.mix(layer.weights, layer.v, layer.pos, layer.state), layer.y, 1e-4)
        z = probe.polar(layer.enc, layer.q[0], layer.k[0])
        logits = rotated_products(*z, torch.arange(16)) * layer.enc.scale * layer.enc.scaling ** 2
        close((logits + pe.causal(logits)).softmax(dim=-1), attention[0], 1e-4)
    for function in probe.LLAMA:
        given = dict(gammas=[0.5], l_max=[3]) if function is probe.perturb else {}
        rows, summary, _ = function(model, cfg.the_task, cfg, length=16, **given)
        assert summary and rows
    where = [f'--hf={folder}', f'--text={text}', f'--out_dir={out}']
    probe.main(['axes', *where, '--length=16'])
    assert len(json.loads((out / 'probe_axes.json').read_text())['rows']) == 8
    for argv, says in ((where[:1], 'requires a text'), ([*where, '--seed=3'], 'without --seed'),
                       (['--hf=none', where[1]], 'no such file or folder: none')):
        with pytest.raises(train.UserError, match=says):
            probe.main(['axes', *argv])


def test_a_llamas_token_0_is_a_token():
    text = object.__new__(probe.LlamaText)
    text.begin, text.vocab = [2], list('!ab')
    tokens, targets = text.lay_out([[0, 1], [1, 0, 1, 0, 1]], 5)
    assert tokens.tolist() == [[2, 0, 1, 0, 0], [2, 1, 0, 1, 0]]
    assert targets.tolist() == [[0, 1, -100, -100, -100], [1, 0, 1, 0, -100]]


# ------------------------------------------------------------------------------------------------
# results/tables.py: records, tables, the board, marked blocks of README files, commands

def write_lines(path, *lines):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def record(exact, seeds='0', **options):
    """A record whose seeds (those that did not fail) have these exact scores at 1, 2 and 4."""
    config = {'pe': 'rope', 'task': 'parity', 'train_lengths': '1-2', 'n_test': 100,
              'seeds': seeds, 'out_dir': 'out/planted/x', **options}
    scores = {seed: {'exact': values, 'token': [1, 1, 1]} for seed, values in exact.items()}
    return {'config': config, 'lengths': '1-2,4', 'scores': scores}


def test_a_run_is_read_back_from_its_record(tmp_path):
    path = tmp_path / 'records.jsonl'
    argv = (f'--task=parity --pe=nope --d_model=8 --n_layer=1 --train_lengths=1-2 --n_eval=8 '
            f'--eval_lengths=1-3,5 --n_test=7 --max_steps=10 --warmup_steps=3 --seeds=1,2 '
            f'--length_schedule=[(0,1),(5,2)] --out_dir={tmp_path}/out/tiny/x --results={path}')
    train.main(argv.split())
    assert json.loads(path.read_text())['config'] == {
        'pe': 'nope', 'd_model': 8, 'n_layer': 1, 'task': 'parity', 'train_lengths': '1-2',
        'length_schedule': '[[0, 1], [5, 2]]', 'n_test': 7, 'seeds': '1-2', 'max_steps': 10,
        'warmup_steps': 3, 'out_dir': f'{tmp_path}/out/tiny/x'}
    run, = tables.read_runs(path)['tiny']
    assert run.trained == [1, 2] and run.sizes == {1: 7, 2: 7, 3: 7, 5: 7} and not run.failed
    for seed, by_length in json.loads((tmp_path / 'out/tiny/x/lengths.json').read_text()).items():
        for metric in ('exact', 'token', 'last'):
            wanted = {int(n): pytest.approx(x[metric], abs=5e-5) for n, x in by_length.items()}
            assert run.by_length(int(seed), metric) == wanted


def test_a_table_shows_planted_numbers_and_failed_seeds(tmp_path):
    corpus, rare = record({0: [0, 0, 0]}, task='stdlib'), record({0: [0.5, 1, 0.9]}, task='copy')
    corpus['scores'][0]['loss'] = [3.0, 2.0, 2.04]
    rare['n'] = {'1': 2, '4': 300}                         # too few of length 1 to count in reach
    write_lines(tmp_path / 'x.jsonl',
                record({0: [1, 0.95, 0.5]}, warmup_steps=7),
                record({1: [1, 0.75, 0]}, seeds='1-2', warmup_steps=7),
                record({}, seeds='0-1', pe='nope'),
                corpus, rare, {'probe': 'alignment', 'rows': {}})
    runs = tables.read_runs(tmp_path / 'x.jsonl')['planted']
    keys, grid = tables.grid_of(runs)
    assert keys == ['pe']                                  # the warm-up follows from it
    *_, head, _, rope, nope = tables.table(keys, grid)
    assert head == '| pe | parity | stdlib | copy |'
    assert rope == ('| rope | 92.5 (87.5 to 97.5): 97.5, 87.5<br>25.0 (0.0 to 50.0): 50.0, 0.0<br>'
                    '2, 1<br>1 of 3 seeds failed | 12.18<br>7.69<br>none | 99.0<br>90.0<br>2 |')
    assert nope == '| nope | 2 of 2 seeds failed |  |  |'
    if probe.pyplot():
        tables.figure(grid).savefig(tmp_path / 'x.png')


def test_every_published_cell_of_the_board_is_found():
    cells = [(row, column) for row in tables.ROWS for column in tables.COLUMNS]
    for minutes in (1, 0.25):
        grid = tables.find_cells(minutes, cells)
        assert sum(map(len, grid.values())) == len(cells) == 275
        assert all(len(run.scores) == 5 for row in grid.values() for run, in row.values())


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A board of one column in a folder of its own."""
    os.symlink(tables.ROOT / 'train.py', tmp_path / 'train.py')
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results/board.jsonl').touch()
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    monkeypatch.setattr(tables, 'RATES', '1e-3,2e-3')
    monkeypatch.setattr(tables, 'SHAPE', '--d_model=8 --n_layer=1 --batch_size=8 --n_eval=8')
    monkeypatch.setattr(tables, 'COLUMNS', {'tiny': '1 9 1-2 1-4 --task=parity'})
    return tmp_path


def test_the_board_trains_what_is_missing(tiny, monkeypatch, capsys):
    command = ['board', '--minutes=1', '--task=tiny', '--pe=nope']
    tables.main(command)
    first = capsys.readouterr().out
    assert first.splitlines()[2] == '| encoding | tiny |' and '\n| nope | ' in first
    line = json.loads((tiny / 'out/board.jsonl').read_text())
    assert line['config']['seeds'] == '0-4' and line['lengths'] == '1-4'
    monkeypatch.setattr(tables, 'run_train', None)         # nothing is left to train
    tables.main(command)
    assert capsys.readouterr().out == first
    with pytest.raises(train.UserError, match="unknown task of the board 'tyni'"):
        tables.main(['board', '--task=tyni'])


def test_a_cell_takes_the_best_rate_and_reports_errors(tiny, monkeypatch):
    folder = tiny / 'out/board_1/tiny/nope'
    for rate, exact in ((0.001, [0.5, 0.75]), (0.002, [0.25, 1])):
        log = tiny / f'{folder},search/lr={rate}/log.jsonl'
        log.parent.mkdir(parents=True)
        evals = [{'eval': {'1': {'exact': x, 'token': x}}} for x in exact]
        write_lines(log, {'step': 0, 'loss': 1}, *evals)
    run = mock.Mock(return_value=mock.Mock(returncode=0, stderr=''))
    monkeypatch.setattr(tables.subprocess, 'run', run)
    tables.run_cell(1, 'nope', 'tiny', 'out/board.jsonl')
    search, final = (set(call.args[0]) for call in run.call_args_list)
    assert {'--lr=1e-3,2e-3', '--seeds=5'} < search
    assert {'--lr=2e-3', '--seeds=0-4'} < final
    run.return_value = mock.Mock(returncode=2, stderr='noise\ntrain.py: no')
    with pytest.raises(train.UserError, match='nope,search: train.py: no'):
        tables.run_cell(1, 'nope', 'tiny', 'out/board.jsonl')


@pytest.mark.parametrize('path', ['README.md', 'results/README.md'])
def test_marked_blocks_are_made_from_the_records(path):
    text, sets = (tables.ROOT / path).read_text(), tables.read_runs()
    assert tables.refreshed(text.replace('<!-- end', 'old\n<!-- end'), sets) == text, 'refresh it'


def test_commands_name_options_and_configs_that_exist():
    for line in (tables.ROOT / 'results/commands.sh').read_text().splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ['run']:
            flags = {word[2:].partition('=')[0] for word in words if word.startswith('--')}
            assert flags <= {*train.defaults(train.Config)}, line
            assert all((tables.ROOT / word).exists() for word in words if word[:8] == 'configs/')


# ------------------------------------------------------------------------------------------------
# the programs

def test_every_program_has_help():
    programs = sorted(f for f in os.listdir(HERE) if f.endswith('.py') and f != 'model.py')
    for program, run in zip(programs, pythons(*([program, '--help'] for program in programs))):
        assert run.returncode == 0, (program, run.stderr)
        assert run.stdout, program
        assert 'Traceback' not in run.stderr, program


def test_every_file_runs():
    """pe.py prints the encodings, tasks.py all tasks or examples of one."""
    encodings, known, examples = (run.stdout for run in pythons(
        ['pe.py'], ['tasks.py'], ['tasks.py', 'parity', '3']))
    for name in pe.ENCODINGS:
        assert re.search(rf'^{name}\b', encodings, re.MULTILINE), name
    assert 'delta [4, 16]' in encodings
    for name in tasks.TASKS:
        assert re.search(rf'^{name}\b', known, re.MULTILINE), name
    assert 'predicted: ' in examples


def test_readme_code_runs(tmp_path, capsys):
    """PoPE in a foreign attention, and a trained model in a notebook."""
    names = {}
    exec(readme_code('class Attention'), names)
    assert names['x'].shape == (8, 100, 64) and names['x'].isfinite().all()
    run = python('train.py', *flags(n_layer=2, out_dir=tmp_path, pe='rope'))
    assert run.returncode == 0, run.stderr
    exec(readme_code('train.load').replace('out/parity_rope', str(tmp_path)), {'torch': torch})
    assert capsys.readouterr().out.startswith('BoS ')


if __name__ == '__main__':
    sys.exit(pytest.main(sys.argv))
