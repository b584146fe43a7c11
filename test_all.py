"""The contracts of the code: read a test to learn what a part of nanoPE promises.

    python -m pytest test_all.py            a few minutes on a CPU (pip install pytest)
    python -m pytest test_all.py -k rope    only the tests whose name contains rope

Each encoding is compared with its equation, written as a loop over plain numbers in float64. Tests
of what all encodings must satisfy (causality, gradients, precision, ...) run over VARIANTS. This
includes pe.ENCODINGS, so an encoding that you register is tested, too. Tasks are compared with
oracles, and kernels with their plain references, in Triton's interpreter if there is no GPU.
"""
import collections
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
import subprocess
import sys
import time
import types
import warnings
from functools import partial
from unittest import mock

# Also for the programs that tests run: with more threads, tensors this small take longer.
os.environ.setdefault('OMP_NUM_THREADS', '1')
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kernels
import pe
import probe
import tasks
import train
from model import ModelConfig, Transformer
from results import tables

HERE = os.path.dirname(os.path.abspath(__file__))
TRAIN_LEN = 12

# Every encoding with its default options, sums of encodings, ...
SUMS = 'pope+vipe', 'vipe+vrope', 'pope+t5+fox'
VARIANTS = {name: dict(pe=name) for name in (*pe.ENCODINGS, *SUMS)}
# ... options that change what an encoding computes, and wrappers of an encoding
VARIANTS |= {
    'pope plain': dict(pe='pope', pope_delta='none', pope_softplus=False),
    'pope half': dict(pe='pope', pope_delta='uniform', pope_frequencies='half'),
    'vipe logits only': dict(pe='vipe', vipe_value=False, vipe_s='global', eval_len=40),
    'vipe value only': dict(pe='vipe', vipe_logn=False, vipe_u=False, vipe_s='one', vipe_d_p=5),
    'prism copy': dict(pe='prism', prism_copy='fixed', prism_absolute=True, prism_norm='unit'),
    'prism copy trained': dict(pe='prism', prism_copy='trained', prism_recurrent='norm',
                               prism_norm='scale'),
    'prism two layers': dict(pe='prism', prism_layers=[1, 2]),
    'prism means': dict(pe='prism+rope', prism_reset=False, prism_superpose=False,
                        prism_sharpen=False, prism_recurrent='penalty'),
    'alibi+stickbreaking on 2 heads': dict(pe='alibi+stickbreaking', rope_heads=2),
    'prism+vipe on 3 heads': dict(pe='prism+vipe', rope_heads=3), 'rope+ape': dict(pe='rope+ape'),
    'mla rope on 1 head': dict(pe='rope', attention='mla', rope_heads=1)}
variants = pytest.mark.parametrize('kw', VARIANTS.values(), ids=VARIANTS)


# ---- helpers -------------------------------------------------------------------------------------

def noisy(module, by=1.0):
    """Add noise to every parameter, so that none is at its initial value; return the module."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * by)
    return module


def make(dtype=torch.float64, seed=0, **kw):
    """A small model in evaluation mode, with noise on its encoding's parameters."""
    torch.manual_seed(seed)
    small = dict(d_model=32, n_head=4, vocab_size=11, train_len=TRAIN_LEN, max_len=64)
    model = Transformer(ModelConfig(**(small | kw))).to(dtype)
    for block in model.blocks:
        noisy(block.attn.pe, 0.1)
    return model.eval()


def encoding(name, heads=2, head_dim=8, **kw):
    """The encoding alone, in float64, with its initial parameters."""
    torch.manual_seed(0)
    cfg = pe.PEConfig(pe=name, d_model=heads * head_dim, n_head=heads, **kw)
    return pe.build(cfg)[0].double().eval()


def generator(seed):
    return torch.Generator().manual_seed(seed)


def at_random(*shape, seed=0):
    """Normal numbers of this shape in float64."""
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def qkv(heads=2, T=10, head_dim=8):
    """Random q, k, v [2, heads, T, head_dim] in float64, and the positions 0..T-1."""
    return *at_random(3, 2, heads, T, head_dim), torch.arange(T)


def content(q, k):
    """<q, k> / sqrt(d) of two vectors: the logit that an additive bias is added to."""
    return q @ k / math.sqrt(len(q))


def rotated(q, k, angle):
    """RoPE's logit Re sum_c conj(q_c) k_c e^(i angle_c) / sqrt(d); feature pairs are complex."""
    q_c, k_c = (torch.view_as_complex(z.reshape(-1, 2).contiguous()) for z in (q, k))
    return (q_c.conj() * k_c * torch.exp(1j * angle)).real.sum() / math.sqrt(len(q))


@torch.no_grad()
def check_logits(enc, score, state=None, x=None, T=10):
    """Assert that the encoding's logits for qkv() are score(q_t, k_s, t, s, h, b) of the vectors
    q_t, k_s [head_dim] in head h of sequence b, and -inf where s > t."""
    q, k, _, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
    B, H, T, _ = q.shape
    logits = torch.full((B, H, T, T), -math.inf, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        for s in range(t + 1):
            logits[b, h, t, s] = score(q[b, h, t], k[b, h, s], t, s, h, b)
    close(enc.logits(q, k, pos, state, x), logits)


def close(a, b, tol=1e-10):
    """Assert that a and b (tensors, lists or numbers) have one shape and agree to tol."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def refused(says, call, *args, **kw):
    """Assert that call(*args, **kw) raises a UserError of one line that matches `says`."""
    with pytest.raises(pe.UserError, match=says) as error:
        call(*args, **kw)
    assert '\n' not in str(error.value)


def gpu(test):
    """Mark a test that requires a GPU."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason='requires a GPU')
    return pytest.mark.gpu(needs(test))


# options of train.py for a run of a few seconds
TINY = dict(d_model=16, n_layer=1, batch_size=8, max_steps=12, eval_interval=4, log_interval=2,
            train_lengths='1-3', eval_lengths='1-5', n_eval=8, n_test=16, warmup_steps=2,
            device='cpu')


def flags(**kw):
    """TINY, updated by the given options, as command-line arguments."""
    return [f'--{key}={value}' for key, value in {**TINY, **kw}.items()]


def python(*argv, **kw):
    """Run a program of the repository; return its returncode, stdout and stderr."""
    return subprocess.run([sys.executable, *argv], cwd=HERE, capture_output=True, text=True, **kw)


# ---- pe.py: each encoding against its equation, in loops and in float64 --------------------------

THETA = 10.0 ** -torch.arange(4).double()   # RoPE's theta_c = 10000^(-2c/d) at d = 8


def test_ape_and_tables_add_vectors():
    """ape: even features are sin(t theta), odd ones cos(t theta), one theta for each pair. In
    training shifted_ape shifts each sequence by its own uniform m. Past its end, a table of vectors
    repeats its last row."""
    ape, shifted_ape = (encoding(name, heads=1, max_shift=50) for name in ('ape', 'shifted_ape'))
    pos, x = torch.arange(9), torch.randn(3000, 9, 8).double()
    p = ape.embed(x, pos) - x
    close(p[..., 0::2], (pos[:, None] * THETA).sin().expand(3000, 9, 4))
    close(p[..., 1::2], (pos[:, None] * THETA).cos().expand(3000, 9, 4))

    assert torch.equal(shifted_ape.embed(x, pos), ape.embed(x, pos))
    shifted = shifted_ape.train().embed(x, pos) - x
    table = ape.embed(torch.zeros(1, 60, 8).double(), torch.arange(60))[0]
    m = torch.cdist(shifted[:, 0], table).argmin(dim=-1)
    close(shifted, table[m[:, None] + pos])
    counts = m.bincount()
    assert len(counts) == 51 and 25 < counts.min() and counts.max() < 100
    assert not torch.equal(shifted, shifted_ape.embed(x, pos) - x)

    for name, std in (('learned', 0.02), ('random', 0.5 ** 0.5)):
        enc = encoding(name, max_len=500)
        x = enc.embed(torch.zeros(1, 504, 16).double(), torch.arange(504))[0]
        close(x[:500], enc.table)
        close(x[500:], enc.table[499].expand(4, 16))
        assert abs(enc.table.std() / std - 1) < 0.05


@pytest.mark.parametrize('p, rotates', [(1.0, [1, 1, 1, 1]), (0.3, [1, 1, 0, 0])])
def test_rope(p, rotates):
    """Pair c is rotated by t 10000^(-2c/d), so the logit depends on positions only through s - t.
    With rope_fraction p, only the fastest ceil(p D/2) pairs are rotated."""
    theta = THETA * torch.tensor(rotates)
    check_logits(encoding('rope', rope_fraction=p),
                 lambda q, k, t, s, *_: rotated(q, k, (s - t) * theta))


@pytest.mark.parametrize('T, train_len, d, base', [
    (10, 12, 8, 1e4), (1280, 128, 16, 1e4), (3000, 1000, 64, 1e4), (200, 100, 8, 4)])
def test_yarn(T, train_len, d, base):
    """RoPE with logits times (0.1 ln s + 1)^2, s = max(1, T / train_len). Frequencies with under 1
    turn over train_len are divided by s, those with over 32 are not, and between is a ramp."""
    def feature(turns):
        return d * math.log(train_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    ratio, c = max(1, T / train_len), torch.arange(d // 2).double()
    low, high = max(math.floor(feature(32)), 0), min(math.ceil(feature(1)), d - 1)
    w = ((c - low) / (high - low)).clamp(0, 1)
    theta = base ** (-2 * c / d) * (1 - w + w / ratio)
    if d == 16:  # from transformers 5.23, _compute_yarn_parameters
        close(theta, [1, 0.221359, 0.04, 0.003162, 0.001, 0.000316, 0.0001, 0.000032], 1e-6)
    enc = encoding('yarn', head_dim=d, train_len=train_len, rope_base=base)
    temperature = (0.1 * math.log(ratio) + 1) ** 2
    check_logits(enc, lambda q, k, t, s, *_: temperature * rotated(q, k, (s - t) * theta),
                 enc.state(None, torch.arange(10), T))


@pytest.mark.parametrize('delta, positive, number', [
    ('zero', True, 'all'), ('uniform', False, 'all'), ('none', True, 'half')])
def test_pope(delta, positive, number):
    """The logit has magnitudes softplus(q), softplus(k) and phases (s - t) theta_c + delta_c."""
    enc = encoding('pope', pope_delta=delta, pope_softplus=positive, pope_frequencies=number)
    if delta != 'none':
        low, high = (-2 * math.pi, 0) if delta == 'uniform' else (0, 0)
        assert low <= enc.delta.min() <= low + 1 and high - 1 <= enc.delta.max() <= high
    noisy(enc)
    c = torch.arange(8) if number == 'all' else torch.tensor([0, 0, 2, 2, 4, 4, 6, 6])
    theta = 10000 ** (-c.double() / 8)

    def score(q, k, t, s, h, b):
        mu = F.softplus(q) * F.softplus(k) if positive else q * k
        phase = 0 if delta == 'none' else enc.delta[h]
        return (mu * ((s - t) * theta + phase).cos()).sum() / math.sqrt(8)

    check_logits(enc, score)


def test_alibi_and_t5_add_a_bias():
    """ALiBi's slopes are powers of two, and for 12 heads those in the code of BLOOM and MPT. Half
    of T5's buckets contain one distance each; the others are log-spaced up to max_distance. Without
    a causal mask the biases are symmetric."""
    slopes, more = (encoding('alibi', heads=heads).slope('cpu').tolist() for heads in (8, 12))
    assert slopes == [2.0 ** -h for h in range(1, 9)]
    close(more, slopes + [2.0 ** -0.5, 2.0 ** -1.5, 2.0 ** -2.5, 2.0 ** -3.5], 1e-6)
    check_logits(encoding('alibi'),
                 lambda q, k, t, s, h, b: content(q, k) - 2.0 ** (-4 * (h + 1)) * (t - s))

    def bucket(d, n, max_distance):
        exact = n // 2
        if d < exact:
            return d
        log = math.log(d / exact) / math.log(max_distance / exact)
        return min(n - 1, exact + int(log * (n - exact)))

    for n, far in ((32, 128), (24, 128), (32, 64), (7, 20)):
        t5 = noisy(encoding('t5', t5_buckets=n, t5_max_distance=far))
        assert t5.bucket(torch.arange(1000)).tolist() == [bucket(d, n, far) for d in range(1000)]
    check_logits(t5, lambda q, k, t, s, h, b:
                 content(q, k) + t5.table[bucket(t - s, n, far), h], T=25)

    q, pos = torch.zeros(2, 2, 10, 8).double(), torch.arange(10)
    for name in ('alibi', 't5'):
        bias = noisy(encoding(name, causal=False)).logits(q, q, pos)[..., :-1, :-1]
        close(bias, bias.mT)
        assert bias[..., 0, 1].ne(bias[..., 0, 2]).all()


def test_fire_and_fox_add_a_bias():
    """FIRE's bias is MLP(psi(t - s) / psi(max(t, L))), psi(x) = log(c x + 1). FoX adds the logs of
    the gates f of tokens s + 1 to t."""
    fire = noisy(encoding('fire', train_len=12))
    with torch.no_grad():
        fire.c.fill_(-0.3)  # |c| is used
        fire.L.fill_(-1.2)  # in units of 12 / 4: |L| = 3.6
    W_1, b_1, W_2, b_2 = fire.mlp.parameters()

    def score(q, k, t, s, h, b):
        x = math.log(0.3 * (t - s) + 1) / (math.log(0.3 * max(t, 3.6) + 1) + 1e-6)
        return content(q, k) + W_2[h] @ (W_1[:, 0] * x + b_1).relu() + b_2[h]

    check_logits(fire, score)

    fox, x = encoding('fox'), torch.randn(2, 10, 16).double()
    f = torch.sigmoid(x @ fox.gate.weight.T + fox.gate.bias)  # (B, T, H)
    check_logits(fox, lambda q, k, t, s, h, b: content(q, k) + f[b, s + 1:t + 1, h].log().sum(),
                 x=x)
    q, x = torch.zeros(1, 2, 1024, 8).bfloat16(), torch.zeros(1, 1024, 16).bfloat16()
    fox.bfloat16().gate.bias.data.zero_()
    bias = fox.logits(q, q, torch.arange(1024), None, x)[0, 0, -1, -2]  # a difference of large sums
    close(bias.detach(), F.logsigmoid(x[0, 0, 0]).double(), 0.01)


def test_stickbreaking_replaces_the_softmax():
    """A key takes the fraction sigmoid(z) of what the keys between it and the query have left."""
    q, k, v, pos = qkv()
    share = torch.sigmoid(q @ k.mT / math.sqrt(8))
    alpha = torch.zeros_like(share)
    for t in range(10):
        for s in range(t):
            alpha[..., t, s] = share[..., t, s] * (1 - share[..., t, s + 1:t]).prod(dim=-1)
    for name in ('stickbreaking', 'nope+stickbreaking'):
        close(encoding(name).attend(q, k, v, pos), alpha @ v)


@pytest.mark.parametrize('total_len', [None, 30])
@pytest.mark.parametrize('kw', [
    dict(), dict(vipe_s='one'), dict(vipe_s='global', eval_len=48), dict(vipe_u=False),
    dict(vipe_logn=False), dict(vipe_value=False)], ids=str)
def test_vipe(kw, total_len):
    """Logits are ViPE's eq. 7; outputs are eq. 8, averages of [v_i ; p_(n-i)] with p linear."""
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
    if kw.get('vipe_s') == 'global':  # s is 1 up to train_len
        assert [enc.state(None, torch.arange(T)) for T in (1, 6, 7, 48)] == [1, 1, 8, 8]


def test_vrope_and_pope_beside_vipe():
    """VRoPE rotates values by their distance, y_t = sum_s alpha_ts R_(s-t) v_s. In 'vipe+vrope' it
    does not rotate ViPE's code. In 'pope+vipe' ViPE's factor 1 + <u, k> is of the raw k."""
    q, k, v, pos = qkv()
    enc = encoding('vrope')
    alpha = enc.logits(q, k, pos).softmax(-1)
    turn = torch.exp(1j * (pos - pos[:, None])[..., None] * THETA)  # (t, s, D/2)
    pairs = torch.view_as_complex(v.unflatten(-1, (4, 2)))  # (B, H, s, D/2)
    expected = torch.einsum('bhts,tsc,bhsc->bhtc', alpha + 0j, turn, pairs)
    close(enc.attend(q, k, v, pos), torch.view_as_real(expected).flatten(-2))
    both, vipe = (encoding(name).attend(q, k, v, pos) for name in ('vipe+vrope', 'vipe'))
    close(both[..., 8:], vipe[..., 8:])

    enc = noisy(encoding('pope+vipe', train_len=20))
    pope, vipe = enc.parts
    polar = pope.logits(q, k, pos)
    check_logits(enc, lambda q, k, t, s, h, b:
                 math.log(t + 1) * (1 + vipe.u[h] @ k) * polar[b, h, t, s])
    other = encoding('vipe+pope', train_len=20)            # the order of names does not matter
    other.parts[0], other.parts[1] = vipe, pope
    close(other.logits(q, k, pos), enc.logits(q, k, pos))


# ---- pe.py: PRISM's cursors ----------------------------------------------------------------------

@pytest.mark.parametrize('copy', [False, True])
def test_cursor_histogram_is_the_sum_over_all_paths(copy):
    """Algorithm 1 without sharpening is a random walk: each token may reset the cursor to 0, moves
    it by +1, -1 or 0, and may then make it jump to the position of a token so far."""
    T = 6
    reset, step = torch.rand(1, 2, T).double(), torch.randn(1, 2, T, 3).double().softmax(dim=-1)
    jump = torch.randn(1, 2, T, T + 1).double()
    jump[..., :-1].masked_fill_(torch.ones(T, T).triu(1) > 0, -math.inf)    # none to later tokens
    jump = jump.softmax(dim=-1) if copy else None
    table = torch.eye(2 * T + 5).double()   # makes the scan return histograms over -T-2..T+2
    h = pe.cursor_scan(reset, step, None, table, jump)
    for c in range(2):
        law = {0: 1.0}                      # {offset: probability}
        for t in range(T):
            resets = (True, reset[0, c, t]), (False, 1 - reset[0, c, t])
            moves, jumps = zip((1, -1, 0), step[0, c, t]), [(None, 1.0)]
            if copy:
                jumps = [*enumerate(jump[0, c, t, :t + 1]), (None, jump[0, c, t, -1])]
            before, law = law, collections.Counter()
            for choices in itertools.product(before.items(), resets, moves, jumps):
                (offset, to_zero, move, target), chances = zip(*choices)
                offset = (0 if to_zero else offset) + move
                law[offset if target is None else target] += math.prod(chances)
            close(h[0, c, t], [law[d] for d in range(-T - 2, T + 3)], 1e-12)


def test_sharpening_multiplies_exponents():
    """PRISM appendix A.2.1: n sharpenings by gamma equal one by gamma^n. A large gamma leaves only
    the top bin, not NaN. Empty bins contain 1e-8."""
    first, keep = torch.tensor([0.5, 0.2, 0.3]).double(), torch.tensor([0.0, 0.0, 1.0]).double()

    def scan(step, gamma, dtype=torch.float64):
        """Histograms over -4..4 after each of 4 steps: the first as given, then three of `keep`."""
        steps = torch.stack([step, keep, keep, keep])[None, None].to(dtype)
        gamma, table = torch.tensor([gamma], dtype=dtype), torch.eye(9, dtype=dtype)
        return pe.cursor_scan(torch.zeros_like(steps[..., 0]), steps, gamma, table)[0, 0]

    for n, h in enumerate(scan(first, 1.7), 1):
        p = first ** 1.7 ** n
        close(h[[5, 3, 4]], p / p.sum(), 1e-5)  # eps = 1e-8 adds to every bin
    for dtype in (torch.float32, torch.float64):
        close(scan(first, 1e4, dtype)[-1], torch.eye(9)[5], 1e-6)
    h = scan(keep, 0.125)[0]  # empty neighbours get eps^(1/8) = 0.1
    close(h[3:6], torch.tensor([0.1, 1.0, 0.1]) / 1.2, 1e-6)


def prism(layer=0, **kw):
    """The encoding of a layer of a small model with 3 cursors per head, of width d_pe = 4."""
    return make(pe='prism', prism_cursors=3, prism_d_pe=4, **kw).blocks[layer].attn.pe


def test_prism_scores_are_eq_9():
    """mu q.k / sqrt(d) + (1 - mu) 4 sum_c |alpha_c| g_t.g_s / sqrt(C d_pe), for each layer. By
    Algorithm 3 the absolute position is the last branch. prism_norm='scale' replaces 4 by a
    constant; 'unit' makes each encoding sqrt(d_pe) long. Without superposition g is the sinusoid of
    the mean offset, which without resets is the sum of p_incr - p_decr."""
    q, k, _, pos = qkv(4)
    x = torch.randn(2, 10, 32).double()
    for layer, norm, factor in (0, 'none', 4), (1, 'none', 4), (1, 'scale', 1):
        state = prism(prism_norm=norm).state(x, pos)
        enc = noisy(prism(layer, prism_norm=norm))
        g_q, g_k = state.unflatten(-1, (3, 4))[:, layer]  # (B, H, T, C, d_pe)
        mu = torch.sigmoid(enc.m)  # (H, 1, 1)
        meetings = torch.einsum('bhtcd,bhscd,hc->bhts', g_q, g_k, enc.alpha[:, 0].abs())
        expected = mu * q @ k.mT / 8 ** 0.5 + (1 - mu) * factor * meetings / (3 * 4) ** 0.5
        close(enc.logits(q, k, pos, state).tril(), expected.tril())

    none, scale, unit = (prism(prism_absolute=True, prism_norm=norm).state(x, pos)
                         for norm in ('none', 'scale', 'unit'))
    close(none[..., 12:], pe.sinusoids(pos, 4, 10000.0, x).expand(2, 2, 2, 4, 10, 4))
    close(scale, none * 4 ** 0.5 / (4 * (4 / 2)) ** 0.5)
    close(unit, none / none.norm(dim=-1, keepdim=True) * 4 ** 0.5)

    enc = prism(prism_reset=False, prism_superpose=False, prism_sharpen=False)
    step = enc.cursors.actions(x)[1]
    mean = (step[..., 0] - step[..., 1]).cumsum(dim=-1)  # (B, 2 layers H cursors, T)
    state = enc.state(x, pos).unflatten(-1, (3, 4)).movedim(2, 0).transpose(-3, -2)
    close(state.flatten(1, 4), pe.sinusoids(mean, 4, 10000.0, x))


def test_prism_copies_by_hand():
    """Every fifth query cursor can jump to a token. With prism_copy='fixed' its key cursor counts
    tokens from -1, so that a jump to k matches the key of token k + 1."""
    cursors = prism(prism_copy='fixed', n_layer=1).cursors
    x, table = torch.randn(2, 9, 32).double(), torch.eye(19).double()
    reset, step, copy = cursors.actions(x)
    assert torch.equal(copy[..., :-1] > 0, torch.ones(2, 3, 9, 9).tril() > 0)
    close(copy.sum(dim=-1), torch.ones(2, 3, 9))
    h = cursors.scan(x, table)
    for c in range(24):  # scans each cursor alone
        gamma = 1 + F.softplus(cursors.g[c:c + 1])
        jump = copy[:, [c // 5]] if c in (0, 5, 10) else None
        close(h[:, [c]], pe.cursor_scan(reset[:, [c]], step[:, [c]], gamma, table, jump))
    close(h[:, 12::5], torch.eye(19)[8:17].expand(2, 3, 9, 19), 1e-6)     # offsets -1..7


def test_prism_gates():
    """The GRU equals PyTorch's and reads norm(x) / 2. Initially p_reset is 0.27, p_jump low,
    steps are nearly uniform, W_h has orthonormal columns and gamma is 2. prism_recurrent keeps W_h
    orthogonal, penalizes its distance from orthogonality, or makes its norm a parameter."""
    gates, x = prism().cursors.gates, torch.randn(3, 9, 32).double()
    gru = torch.nn.GRU(32, 100, batch_first=True).double()
    gru.load_state_dict(dict(weight_ih_l0=gates.W_x.weight, bias_ih_l0=gates.W_x.bias,
                             weight_hh_l0=gates.W_h.weight, bias_hh_l0=gates.W_h.bias))
    x_2 = F.layer_norm(x, [32]) / 2
    close(gates(x)[2], torch.cat([x_2, gru(x_2)[0]], dim=-1))

    cursors = encoding('prism', prism_copy='trained').cursors
    reset, step, copy = cursors.actions(torch.randn(2, 50, 16).double())
    for p, mean in ((reset, 1 / (1 + math.e)), (step, 1 / 3), (copy[..., 0, -1], 0.95)):
        close(p, torch.full_like(p, mean), 0.04)
    W = cursors.gates.W_h.weight
    close(W.T @ W, torch.eye(100), 1e-5)
    close(F.softplus(cursors.g), torch.ones_like(cursors.g), 1e-6)

    model = Transformer(ModelConfig(pe='prism', prism_recurrent='orthogonal', prism_hidden=20))
    tokens = torch.randint(11, (4, 9))
    optimizer = torch.optim.AdamW(model.optim_groups(1e-2, 0.01))
    for _ in range(3):
        model(tokens, tokens)[1].backward()
        optimizer.step()
    W = model.blocks[0].attn.pe.cursors.gates.W_recurrent()
    close(W.T @ W, torch.eye(20), 1e-5)
    gates = prism(prism_recurrent='norm').cursors.gates
    close(gates.W_recurrent().norm(), gates.s.abs() * 100 ** 0.5)
    drawn = make(pe='prism', prism_recurrent='penalty')
    excess = drawn.train()(tokens, tokens)[1] - drawn.eval()(tokens, tokens)[1]
    W = drawn.blocks[0].attn.pe.cursors.gates.W_h.weight
    close(excess, 1e-3 * (W.T @ W - torch.eye(100)).square().sum(), 1e-8)


# ---- the contract of every encoding, which yours must satisfy, too -------------------------------

@variants
@torch.no_grad()
def test_attend_is_softmax_of_logits_times_value(kw):
    """attend(), the fast path, equals mix(weigh(logits)), which probes use; here in layer 2. The
    last queries alone, as in decoding with a cache, give their rows of the output. The state may be
    that of the tokens so far, if the final length is given, or of the whole sequence."""
    first, enc = (block.attn.pe for block in make(**kw).blocks)

    def state(x, pos, total_len=None):
        return enc.restate(x, pos, first.state(x, pos, total_len))

    for T in (TRAIN_LEN, 2 * TRAIN_LEN):
        q, k, v, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
        x = torch.randn(2, T, 32, dtype=torch.float64)
        here = pos, state(x, pos), x
        whole, logits = enc.attend(q, k, v, *here), enc.logits(q, k, *here)
        assert whole.shape == (2, enc.cfg.heads, T, enc.out_dim)
        for last in (slice(T), slice(T - 3, T)):
            close(enc.attend(q[:, :, last], k, v, *here), whole[:, :, last])
            close(enc.logits(q[:, :, last], k, *here), logits[:, :, last])
            close(enc.mix(enc.weigh(logits[:, :, last]), v, *here), whole[:, :, last])
        for t in (0, 5):        # with a cache of the first t tokens
            far, row = slice(t + 1), slice(t, t + 1)
            for known in (state(x[:, far], pos[far], T), here[1]):
                past = k[:, :, far], v[:, :, far], pos[far], known, x[:, far]
                close(enc.attend(q[:, :, row], *past), whole[:, :, row])


@variants
@torch.no_grad()
def test_causal_prefix_consistent_and_right_at_other_positions(kw):
    """Changing a token does not change earlier outputs, and a prefix alone gives the same outputs.
    Rows of a batch with different (also fractional) positions do not interact."""
    model = make(**kw)
    tokens = torch.randint(11, (3, 20))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 11
    full, other = model(tokens)[0], model(changed)[0]
    assert torch.equal(full[:, :12], other[:, :12])
    assert not torch.equal(full[:, 12:], other[:, 12:])
    for t in (1, 7, 19):
        close(model(tokens[:, :t], total_len=20)[0], full[:, :t])

    tokens = tokens[:1, :14].expand(3, -1)
    steps = 3 * torch.rand(14, dtype=torch.float64)
    pos = torch.stack([torch.arange(14).double(), torch.arange(14) + 7.0, steps.cumsum(0)])
    logits = model(tokens, pos=pos)[0]
    for i in range(3):
        close(model(tokens[i:i + 1], pos=pos[i])[0], logits[i:i + 1])
    close(model(tokens)[0], logits[:1].expand(3, -1, -1))  # 0..T-1 are the default positions
    raw = make(**kw)
    for part in raw.modules():
        part.shift_invariant = False                       # at() passes positions as they are
    same = torch.allclose(logits[0], raw(tokens, pos=pos)[0][1])
    assert same == model.blocks[0].attn.pe.shift_invariant, f'unchanged by a shift of 7: {same}'
    if same:
        close(model(tokens, pos=torch.arange(14) + 2 ** 40)[0], logits[:1].expand(3, -1, -1))


@variants
@torch.no_grad()
def test_an_encoder_sees_all_but_the_answer(kw):
    """causal=False: a late word changes early outputs; the last token, the class, changes none."""
    if any(pe.ENCODINGS[name].needs_causal for name in kw['pe'].split('+')):
        return refused('requires a causal mask', make, causal=False, **kw)
    model = make(causal=False, **kw)
    tokens = torch.randint(11, (3, 12))
    seen, (late, last) = model(tokens)[0], tokens.repeat(2, 1, 1)
    late[:, 10] = (late[:, 10] + 1) % 11
    last[:, 11] = (last[:, 11] + 1) % 11
    assert not torch.isclose(model(late)[0][:, 0], seen[:, 0], rtol=0, atol=1e-12).all()
    assert torch.equal(model(last)[0][:, :11], seen[:, :11])
    model.blocks[0].attn.tap_logits.register_forward_hook(lambda *_: None)
    close(model(tokens)[0], seen)  # the same if logits are stored


@variants
def test_gradient_reaches_every_parameter(kw):
    """Every parameter has a gradient, and a small step against it lowers the loss."""
    model, tokens, losses = make(**kw).train(), torch.randint(11, (3, TRAIN_LEN)), []
    for _ in range(2):
        torch.manual_seed(0)    # for shifted_ape's shift
        losses.append(model(tokens, tokens)[1])
        model.zero_grad()
        losses[-1].backward()
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.abs().sum() > 0, name
            p.data -= 1e-5 * p.grad
    assert losses[1] < losses[0]


@variants
@torch.no_grad()
def test_saved_models_give_the_same_logits_and_rounded_ones_stay_near(kw, tmp_path):
    """A model built on the meta device loads weights and gives the same logits, also at 70 tokens
    with tables of 64 rows. float32 is within 1e-5 of float64; bfloat16, autocast within 15 %."""
    model, tokens = make(**kw), torch.randint(11, (2, 70))
    torch.save(model.state_dict(), tmp_path / 'm.pt')
    with torch.device('meta'):
        other = Transformer(model.cfg).double().eval()
    other.to_empty(device='cpu')
    other.load_state_dict(torch.load(tmp_path / 'm.pt', weights_only=True))
    exact = model(tokens)[0]
    assert exact.isfinite().all()
    close(other(tokens)[0], exact)

    tokens = tokens[:, :3 * TRAIN_LEN]
    exact = model(tokens)[0]
    rounded = [model.float()(tokens)[0]]
    with torch.autocast('cpu', torch.bfloat16):
        rounded.append(model(tokens)[0])
    rounded.append(model.bfloat16()(tokens)[0])
    for logits, tol in zip(rounded, (1e-5, 0.15, 0.15)):
        assert (logits.double() - exact).abs().max() < tol * exact.abs().max()


@pytest.mark.parametrize('name', ['vipe', 'rope+vipe'])
def test_some_attention_stays_in_float32(name):
    """Autocast changes no output. In bfloat16 ViPE's mean distances t / 2 are summed in float32."""
    q, k, v, x = (z.float() for z in (*qkv()[:3], torch.randn(2, 10, 16)))
    enc, pos = encoding(name, train_len=1024).float(), torch.arange(10)
    with torch.autocast('cpu', torch.bfloat16):
        y = enc.attend(q, k, v, pos, None, x)
    assert torch.equal(y, enc.attend(q, k, v, pos, None, x))
    if name == 'vipe':
        q, pos = torch.zeros(1, 2, 1024, 8).bfloat16(), torch.arange(1024)
        enc.bfloat16().W_p.data.fill_(1.0)
        close(enc.attend(q, q, q, pos)[0, 0, :, -1].detach(), pos / 2, 2 ** -8)


def test_a_sum_takes_apart_in_reverse_what_it_put_together():
    enc, (q, k, v, pos), calls = encoding('vipe+vrope'), qkv(), []
    for part in enc.parts:
        part.out = lambda y, at, part=part: calls.append(part) or y
    enc.out(v, enc.at(q, k, pos))
    assert calls == [enc.parts[1], enc.parts[0]]


def test_which_heads_and_layers_have_which_encoding():
    """rope_heads=1: the first head has ViPE, the others are NoPE, with zeros in place of ViPE's
    code. All layers share T5's table; each layer has its own PoPE delta, also in a sum. A second
    PRISM layer computes cursors from the residual stream before it."""
    q, k, v, pos = qkv(4)
    y, vipe, nope = (encoding(name, heads=4, rope_heads=some).attend(q, k, v, pos)
                     for name, some in (('vipe', 1), ('vipe', None), ('nope', None)))
    close(y[:, :1, :, :8], vipe[:, :1, :, :8])      # without the code, because W_p is random
    close(y[:, 1:], F.pad(nope[:, 1:], (0, 8)))

    for name, of_t5, of_pope in (('t5', 1, 0), ('pope', 0, 3), ('t5+pope', 1, 3)):
        names = [n for n, _ in make(pe=name, n_layer=3).named_parameters()]  # each tensor once
        assert sum(n.endswith('table') for n in names) == of_t5
        assert sum(n.endswith('delta') for n in names) == of_pope

    model, seen = make(pe='prism', n_layer=5, prism_layers=[1, 4]), []
    parts = [block.attn.pe for block in model.blocks]
    assert [hasattr(p, 'cursors') for p in parts] == [True, False, False, True, False]
    parts[3].cursors.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.blocks[2].tap_resid.register_forward_hook(lambda module, inputs, out: seen.append(out))
    model(torch.randint(11, (2, 7)))
    assert torch.equal(*seen)


def test_what_does_not_fit_together_says_what_to_do():
    """Errors about options, about sums of encodings, and about inputs of attend() and embed()."""
    for names in itertools.combinations_with_replacement(pe.ENCODINGS, 2):
        with contextlib.suppress(pe.UserError):
            model = make(pe='+'.join(names), n_layer=1)
            assert model(torch.ones(1, 5, dtype=torch.int64))[0].isfinite().all(), names
    for kw, says in (
            (dict(d_model=30, n_head=4), 'divisible'), (dict(dropout=1.5), 'dropout'),
            (dict(n_head=3, d_model=30, attention='mla'), 'even'),
            (dict(pe='rop'), "mean 'rope'.*shifted_ape"),  # lists all names
            (dict(pe='rope', d_model=20, n_head=4), 'even'),
            (dict(rope_fraction=2.0), 'at most 1'), (dict(rope_heads=9), 'rope_heads'),
            (dict(pe='ape', rope_heads=1), 'acts on the embedding'),
            (dict(pe='vipe', vipe_s='both'), 'length'),
            (dict(pe='prism+prism'), 'PRISM and PRISM cannot be added: each appends features'),
            (dict(pe='stickbreaking+vipe'), 'weights that sum to 1'),
            (dict(pe='pope+rope'), 'PoPE and RoPE cannot be added')):
        refused(says, make, **kw)

    q, k, v, pos = qkv(4)
    rope = encoding('rope', heads=4)
    for enc, given, says in (
            (rope, (q, k[:, :2], v[:, :2], pos), 'built for 4 heads of 8.* repeat grouped keys'),
            (rope, (q[0], k, v, pos), r'q, k and v must be \[B, H, T, D\]'),
            (rope, (q, k[:1], v[:1], pos), 'the batch size of q'),
            (rope, (q, k, v[:, :, :9], pos), 'k and v must have length T'),
            (rope, (q, k[:, :, :9], v[:, :, :9], pos[:9]), 'q covers all T positions or the last'),
            (rope, (q, k, v, pos[:9]), 'pos must have a position for each'),
            (rope, (q, k, v, pos, None, torch.randn(2, 1, 32)), 'the inputs of all 10 keys'),
            (rope, (q, k, v, pos % 6), 'non-decreasing in a row; put packed'),
            (rope, (q, k, v, pos - 1), 'finite, at least 0'),
            (encoding('fox', heads=4), (q, k, v, pos), 'requires the attention input'),
            (encoding('prism', heads=4), (q, k, v, pos), 'requires a state: pass state=encodings')):
        refused(says, enc.attend, *given)
    for name in 'ape', 'learned':
        refused('for each of the 1 keys', encoding(name).embed, torch.zeros(2, 1, 16), pos)
    for shape in (4,), (3, 10, 10), (4, 10, 9), (2, 1, 4, 10, 10):
        rope.bias = lambda at, shape=shape: torch.zeros(shape)
        refused(r'bias\(\) of RoPE must .*\[2, 4, 10, 10\], got', rope.attend, q, k, v, pos)
    rope.qk = lambda q, k, at: (q, k[..., :4])
    refused(r'qk\(\) of RoPE must return q and k of one width', rope.attend, q, k, v, pos)


# ---- model.py ------------------------------------------------------------------------------------

def test_mla_logits_are_eq_3():
    """The Toeplitz study, eq. 3: a head has 4 NoPE and 4 RoPE features; d_compress is 6."""
    attn = make(pe='rope', attention='mla', n_head=8, d_compress=6).blocks[0].attn  # 4 heads of 8
    assert attn.compress.weight.shape == (6, 32) and attn.kv.weight.shape == (64, 6)
    x, seen = torch.randn(2, 10, 32, dtype=torch.float64), []
    for tap in (attn.tap_q, attn.tap_k):
        tap.register_forward_hook(lambda module, inputs, out: seen.append(out))
    attn(x, torch.arange(10), None)
    W_K = attn.kv.weight[:32] @ attn.compress.weight
    for z, W in zip(seen, (attn.q.weight, W_K), strict=True):
        close(z, torch.einsum('hdc,btc->bhtd', W.view(4, 8, 32), x))
    theta = THETA[[0, 2]]  # 10000^(-2c/4)
    check_logits(attn.pe, lambda q, k, t, s, *_: (
        q[:4] @ k[:4] + rotated(q[4:], k[4:], (s - t) * theta) * math.sqrt(4)) / math.sqrt(8))


@pytest.mark.parametrize('tap, shape', [
    ('blocks.1.attn.tap_q', (2, 4, 9, 8)), ('blocks.1.attn.tap_k', (2, 4, 9, 8)),
    ('blocks.1.attn.tap_logits', (2, 4, 9, 9)), ('blocks.1.attn.tap_head_out', (2, 4, 9, 8)),
    ('blocks.1.tap_resid', (2, 9, 32)), ('tap_resid', (2, 9, 32))])
def test_taps_read_and_replace(tap, shape):
    """A hook on a tap receives the activation; what it returns replaces the activation."""
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
    """Tied weights are one tensor; dropout acts in training only; targets of -100 have no loss."""
    model = make(pe='rope', **kw)
    tokens = torch.randint(11, (2, 9))
    assert (model.head.weight is model.embedding.weight) == bool(kw.get('tie'))
    assert torch.equal(model(tokens)[0], model(tokens)[0])
    model.train()
    assert torch.equal(model(tokens)[0], model(tokens)[0]) != bool(kw.get('dropout'))
    drops = [mock.Mock(return_value=None) for _ in model.blocks]
    for block, drop in zip(model.blocks, drops):
        block.drop.register_forward_hook(drop)
    model(tokens)
    assert {drop.call_count for drop in drops} == {2}       # attention's output and the MLP's
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
    refused('of one length, without padding', model.generate, rows, 5)


def test_starting_weights_and_optimizer_groups():
    """The variance of matrices is 1 / fan_in, divided by 2 n_layer where they write to the residual
    stream. Every parameter is in one optimizer group. Only matrices have weight decay, except those
    of the embedding and of encodings."""
    model = Transformer(ModelConfig(d_model=128, vocab_size=300, n_layer=3, embedding_std=0.2))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (1 if name.endswith('weight') else 0)).all(), name  # norms, biases
            continue
        writes = name.endswith(('attn.proj.weight', 'mlp.2.weight'))
        std = 0.2 if name == 'embedding.weight' else (p.shape[1] * (6 if writes else 1)) ** -0.5
        assert abs(p.std() / std - 1) < 0.05, name
    assert encoding('prism').alpha.unique() == 1 and abs(encoding('fire').c - 0.1) < 1e-6
    assert abs(encoding('vipe', vipe_d_p=3000).W_p.std() / 0.02 - 1) < 0.05

    model = make(pe='prism+pope')
    groups = {group['name']: group for group in model.optim_groups(1e-3, 0.1)}
    ids = [id(p) for group in groups.values() for p in group['params']]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert [name for name, group in groups.items() if group['weight_decay']] == ['decay']
    decaying = {id(p) for p in groups['decay']['params']}
    names = [name for name, p in model.named_parameters() if id(p) in decaying]
    matrices = 'attn.qkv', 'attn.proj', 'mlp.0', 'mlp.2'
    assert names == [f'blocks.{i}.{x}.weight' for i in (0, 1) for x in matrices] + ['head.weight']
    alpha = groups['alpha']  # PRISM section 6.4
    assert (len(alpha['params']), alpha['lr'], alpha['betas']) == (2, 0.03, (0.8, 0.92))


# ---- tasks.py, against oracles; SCAN against its published counts; readers of files --------------

# An oracle returns the length and the correct answer of a prompt, given as text.

def words(states, pattern='BoS (.*) EoI', end=' EoS'):
    """An oracle for prompts of words: the answer is states(x) of the list x of numbers or words."""
    def oracle(prompt):
        x = re.fullmatch(pattern, prompt)[1].split()
        s = [*states([int(word) if word.isdigit() else word for word in x])]
        return max(len(x), len(s)), ' '.join(map(str, s)) + end
    return oracle


def characters(answer, pattern=r'(\d+)=', end='.'):
    """An oracle for prompts of characters: answer() of the strings that `pattern` captures."""
    def oracle(prompt):
        strings = re.fullmatch(pattern, prompt).groups()
        return max(map(len, strings[:2])), answer(*strings) + end
    return oracle


def distance_class(triggers, span, x):
    """The distance between trigger0 and 1, plus that of 2 and 3, in 32nds of the maximum."""
    place = [x.index(f'trigger{i}') for i in range(triggers)]
    distances = [abs(i - j) for i, j in zip(place[::2], place[1::2])]
    assert max(distances) < span and sum('trigger' in word for word in x) == triggers
    return [f'class{32 * sum(distances) // (len(distances) * span)}']


def stack(x):
    """The final stack from its top down: 0 and 1 are pushed, 2 pops, 3 and 4 push 0 and 1."""
    left = ''
    for symbol in x:
        left = left[:-1] if symbol == '2' else left + '01.01'[int(symbol)]
    return (left[::-1] + '2').ljust(len(x) + 1, '0')


def addition_cot(a, b):
    """The digits of a, b, carry and sum in each column, lowest first; then the sum."""
    steps, carry = [], 0
    for x, y in itertools.zip_longest(a, b, fillvalue='0'):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        steps.append(f'{x}{y}{carry}{digit}')
    total = int(a[::-1]) + int(b[::-1])
    return f'{",".join(steps)}→{str(total)[::-1]}'


def multiplication_cot(a, b):
    terms = [f'{d}*({d}+1)' + ''.join(f'({lower}+0)' for lower in b[i + 1:])
             for i, d in enumerate(b)]
    return f'{a}x[{"+".join(terms)}]'


def scan(prompt):
    """The actions of a SCAN command (Lake & Baroni 2018, Figure 7); if it ends with =, in steps."""
    halves = []     # for each half, [(clause, its actions)] as often as it is repeated
    for half in re.split(' and | after ', re.sub('BoS | EoI| =', '', prompt)):
        clause, verb, how, side, times = re.fullmatch(
            r'((\w+)(?: (opposite|around))?(?: (left|right))?)(?: (twice|thrice))?', half).groups()
        turn = ['I_TURN_' + side.upper()] if side else []
        act = [] if verb == 'turn' else ['I_' + verb.upper()]
        once = {None: turn + act, 'opposite': turn * 2 + act, 'around': (turn + act) * 4}[how]
        halves.append([(clause, ' '.join(once))] * {None: 1, 'twice': 2, 'thrice': 3}[times])
    joint, order = (' after ', -1) if 'after' in prompt else (' and ', 1)
    plan = joint.join(' + '.join(clause for clause, _ in half) for half in halves)
    steps = [step for half in halves[::order] for step in half]
    actions = ' '.join(actions for _, actions in steps)
    in_steps = f'{plan} → {" ".join(map(" : ".join, steps))} .'
    return len(actions.split()), in_steps if '=' in prompt else f'{actions} EoS'


VIPE, TEXT = (1, 5, 48), (1, 2, 7, 23)      # lengths to test
CLASSES = dict(pattern=r'(.*) \?', end='')
SUM, REVERSED_SUM = (rf'({x})\+({x})=' for x in (r'0|[1-9]\d*', r'0|\d*[1-9]'))  # no leading zeros
ORACLES = {
    'copy': (words(lambda x: x), VIPE), 'reverse': (words(lambda x: x[::-1]), VIPE),
    'sort': (words(lambda x: sorted(set(x))), (*VIPE, 100)),
    'count': (words(lambda x: range(x[0], x[1] + 1)), (2, 48, 128)),
    'mode': (words(statistics.multimode), (1, 2, 7, 48)),
    'parity': (words(lambda x: [sum(x[:t + 1]) % 2 for t in range(len(x))]), VIPE),
    'parity:steps=0': (words(lambda x: [sum(x) % 2]), VIPE),
    'polynomial': (words(lambda x: itertools.accumulate(x, lambda s, x: (s * x + 1) % 5)), VIPE),
    'indirect_indexing': (characters(lambda x, y, shift: x[x.index(y) + int(shift)],
                                     r'([A-Za-z]+),(\w),([+-][1-9]?\d),', ''), (1, 20, 52)),
    'distance': (words(partial(distance_class, 2, 128), **CLASSES), (2, 9, 128, 200)),
    'distance:span=16': (words(partial(distance_class, 2, 16), **CLASSES), (2, 40)),
    'distance_sum': (words(partial(distance_class, 4, 128), **CLASSES), (4, 9, 128, 200)),
    'distance_sum:span=16': (words(partial(distance_class, 4, 16), **CLASSES), (4, 40)),
    'trigger_count': (words(lambda x: [f'class{str(x).count("trigger")}'], **CLASSES), (1, 9, 128)),
    'string_copy': (characters(lambda x: x), TEXT),
    'string_reverse': (characters(lambda x: x[::-1], r'\^(\d+)='), TEXT),
    'string_reverse:start=0': (characters(lambda x: x[::-1]), TEXT),
    'odds_first': (characters(lambda x: x[1::2] + x[::2]), TEXT),
    'bucket_sort': (characters(lambda x: ''.join(sorted(x)), '([0-4]+)='), TEXT),
    'stack': (characters(stack, '([01]+[234]*)='), TEXT),
    'dyn_str_cpy': (characters(lambda x, digit: x[x.index(digit):], r'(\d+),(\d)='), TEXT),
    'addition_cot': (characters(addition_cot, REVERSED_SUM), TEXT),
    'multiplication_cot': (characters(multiplication_cot, SUM.replace(r'\+', 'x')), TEXT[:3]),
    'scan': (scan, (1, 22, 48)), 'scan_simple': (scan, (2, 5)), 'scan_cot': (scan, (2, 9, 24))}


# Oracles of tasks that supervise only some tokens: all words -> {t: targets[t]}.

def flip_flop(words):
    """The target at r is the bit after the last w."""
    return {t: words[t + 1 - words[t::-1].index('w')] for t, word in enumerate(words)
            if word == 'r'}


def mqar(words):
    """Each key occurs twice, with the same value; the target is at the second."""
    assert all(words.count(word) == 2 for word in words if 'key' in word)
    return {t: words[words.index(word) + 1] for t, word in enumerate(words)
            if 'key' in word and words.index(word) < t}


PARTIAL = {'flip_flop': (flip_flop, (2, 40)), 'mqar': (mqar, (8, 20)),
           'mqar:keys=3:words=9': (mqar, (6, 30))}


@pytest.mark.parametrize('name, length', [
    (name, n) for name, (_, lengths) in (ORACLES | PARTIAL).items() for n in lengths])
def test_every_task(name, length):
    """tokens, targets [n, T]: padding is at the end; targets are next tokens or -100. The
    supervised tokens are correct by an oracle, and the same seed gives the same problems."""
    task = tasks.make(name)
    tokens, targets = task.sample(400, length, generator(length))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape and len(tokens) == 400
    assert len(task.vocab) == len(set(task.vocab))
    padding, supervised = tokens == tasks.PAD, targets != -100
    assert torch.equal(padding, padding.int().cummax(dim=1).values > 0)
    assert not (targets == tasks.PAD).any() and not supervised[:, -1].any()
    assert torch.equal(targets[supervised], tokens.roll(-1, dims=1)[supervised])
    assert torch.equal(tokens, task.sample(400, length, generator(length))[0])
    for row, target in zip(tokens, targets.tolist()):
        words = [task.vocab[i] for i in row if i != tasks.PAD]
        found = {t: task.vocab[i] for t, i in enumerate(target) if i != -100}
        if name in PARTIAL:
            assert found == PARTIAL[name][0](words)
            assert len(words) == 2 * length
        else:       # the answer is supervised, to the last token
            first = min(found) + 1
            assert list(found) == list(range(first - 1, len(words) - 1))
            prompt, answer = (task.separator.join(x) for x in (words[:first], words[first:]))
            assert ORACLES[name][0](prompt) == (length, answer)


@pytest.mark.parametrize('name, length, value, values', [
    ('dyn_str_cpy', 10, lambda text: text[:10].index(text[11]), range(10)),
    ('addition_cot', 10, lambda text: min(map(len, text.split('=')[0].split('+'))), range(1, 11)),
    ('addition_cot', 40, lambda text: text.index('+') == 40, range(2)),
    ('stack', 10, lambda text: re.search('[234]', text).start(), range(1, 10)),
    ('distance', 128, lambda text: re.split('trigger.', text)[1].count(' '), range(1, 128)),
    ('distance:span=16', 40, lambda text: re.split('trigger.', text)[1].count(' '), range(1, 16)),
    ('distance', 40, lambda text: re.search('trigger(.)', text)[1], '01'),
    ('trigger_count:most=16', 40, lambda text: text.count('trigger'), range(17)),
    ('trigger_count', 128, lambda text: text.count('trigger'), range(32)),
    ('indirect_indexing:letters=12:shift=2', 6, lambda text: text[0], 'ABCDEFGHIJKL'),
    # the index i and i + shift are both 0, 1 or 2
    ('indirect_indexing:letters=3:shift=1', 3, lambda text: int(text[6:8]),
     [-1] * 5 + [0] * 8 + [1] * 5), ('mode', 9, lambda text: text.split()[-2], 'abcdefghij'),
    ('count', 9, lambda text: int(text.split()[1]), range(120)),
    ('flip_flop', 9, lambda text: text[8], 'wr' + 8 * 'i'),     # 80 % are i (ignore)
    ('flip_flop:ignore=0', 9, lambda text: text[8], 'wr')])
def test_values_are_uniform(name, length, value, values):
    """Positions, sizes and distances take all values as often as expected, to 6 deviations."""
    task, n = tasks.make(name), 6000
    tokens, _ = task.sample(n, length, generator(0))
    found, expected = (collections.Counter(x) for x in (
        [value(task.decode(row)) for row in tokens], values))
    assert set(found) == set(expected)
    for x, times in expected.items():
        mean = n * times / len(values)
        assert abs(found[x] - mean) < 6 * math.sqrt(mean)


def test_examples_in_docstrings_are_correct():
    assert doctest.testmod(tasks).failed == 0


@pytest.mark.parametrize('name', tasks.TASKS)
def test_a_task_is_documented(name):
    task = tasks.TASKS[name]
    docs = ' '.join(base.__doc__ or '' for base in type(task).__mro__[:-1])
    assert '`length`' in docs, 'the docstring must define `length`'
    assert task.corpus or task.needs or '>>>' in docs, 'the docstring must show an example (>>>)'


def test_scan_is_the_published_data_set():
    """It has the size of the published data set, and of tasks.txt in characters. Split by length,
    commands of up to 22 actions are for training; split at random, 80 %."""
    for split, sizes in (('length', [16990, 3920]), ('simple', [16728, 4182])):
        parts = [tasks.scan_pairs(split, part) for part in ('train', 'test')]
        pairs = dict(parts[0] + parts[1])
        assert [*map(len, parts)] == sizes and len(pairs) == 20910
        assert sum(len(f'IN: {x} OUT: {actions}\n') for x, actions in pairs.items()) == 4080388
        for command, actions in pairs.items():
            assert scan(f'BoS {command} EoI')[1] == f'{actions} EoS'
        lengths = [{len(actions.split()) for _, actions in part} for part in parts]
        by_length = [{*range(1, 23)}, {24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48}]
        assert (lengths == by_length) == (split == 'length')


# readers of files

def chorale(*bass):
    return [[74, 70, 65, pitch] for pitch in bass]


UNICODE, BYTES = 'Grüße, ∀x: x≠0 → 𝄞\r\n\tend\n\n', bytes(range(200))
MIDI = 'BOS_None Pitch_60 Pitch_64 Pitch_67 Pitch_21 Pitch_108 EOS_None'
CFQ = [{'questionPatternModEntities': f"Did M{i}'s writer , a film editor, write M1",
        'sparqlPatternModEntities': 'SELECT count(*) WHERE {\n?x0 a ns:film.editor .\n?x0 '
        f'ns:people.x m.0{i}' + ' .\nM1 ns:x ?x1' * (i < 3) + '\n}'} for i in range(9)]
FILES = {
    'unicode.txt': UNICODE, 'empty': '', 'utf16': b'\xff\xfe', 'odd.bin': b'123',
    'a.fa': '>chr 1\r\nACGTac\r\ngtNNr\r\n\r\n>chr 2\nTTTTTTTACGTNAAAAAACCCCCCG\n',
    'three.bin': np.array([7, 258, 0], np.uint16), 'pairs.bin': np.array([*b'pairs'], np.uint16),
    'nines.bin': np.full(99, 9, np.uint16), 'uint32.bin': np.array([5, 50256], np.uint32),
    'bach.json': dict(train=[chorale(-1, 21, 60, 108), chorale(*range(60, 90))],
                      valid=[chorale(60)], test=[chorale(60), chorale(*range(60, 72))]),
    'trio.json': dict(train=[[[1, 2, 3]]], valid=[], test=[]),
    'low.json': dict(train=[chorale(9)], valid=[chorale(9)], test=[]),
    'midi/train.mid': '', 'midi/val.mid': '', 'midi/test.mid': '', 'cfq/dataset.json': CFQ,
    'cfq/splits/random_split.json': dict(trainIdxs=[*range(5)], devIdxs=[5, 6], testIdxs=[7, 8]),
    **{f'many/{i:02}': f'{i:02}' for i in range(40)}, 'one/a': BYTES,
    'named/a': BYTES, 'named/Validation/b': 'val', 'named/test.c': 'test', 'named/val/.d': 'no',
    'named/.val/e': 'no', 'no_test/a': BYTES, 'no_test/val/b': 'val', 'no_val/a': BYTES,
    'no_val/test/b': 'test', 'two/train/a': bytes(range(20)), 'two/train/b': 'def',
    'two/val/c': 'val'}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write FILES to the current folder, and replace packages that readers require by stubs: for
    miditok every file is the same five notes; tiktoken encodes bytes."""
    for name, content in FILES.items():
        if name.endswith('.json'):
            content = json.dumps(content)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.chdir(tmp_path)
    np.save('float.npy', np.zeros(99))
    names = ['PAD_None', 'BOS_None', 'EOS_None', *(f'Pitch_{pitch}' for pitch in range(21, 109))]
    remi = mock.MagicMock(vocab={name: i for i, name in enumerate(names)})
    remi.return_value = [mock.Mock(ids=[42, 46, 49, 3, 90])]
    remi.__getitem__.side_effect = remi.vocab.get
    pairs = mock.Mock(encode_ordinary=lambda text: [*text.encode()],
                      decode=lambda tokens: bytes(tokens).decode())
    monkeypatch.setitem(sys.modules, 'miditok', mock.Mock(REMI=lambda _: remi))
    monkeypatch.setitem(sys.modules, 'tiktoken', mock.Mock(get_encoding={'gpt2': pairs}.get))


@pytest.mark.parametrize('argv, says', [
    ('copy:p=7', "'p' is not an option of copy, whose options are: steps=1"),
    ('parity:steps=2', 'steps must be 0 or 1'), ('sort 101', 'lengths 1 to 100, not 101'),
    ('mqar:keys=3 5', 'lengths 6 and more'), ('scan 23', r'\[1, 2, .*, not 23'),
    ('text --data=missing', 'is missing'), ('text --data=empty', 'nothing to read'),
    ('genome --data=utf16', 'required: UTF-8'),
    ('tokens --data=odd.bin', r'required: a .bin \(uint16\) or .npy file'),
    ('tokens --data=float.npy', 'must be 1-D integers'),
    ('tokens --data=uint32.bin', 'as in a file of uint32'),
    ('tokens:size=9 --data=nines.bin', 'the vocabulary of 0 to 8'),
    ('jsb --data=trio.json', 'required: Jsb16th'), ('jsb --data=low.json', 'vocabulary of 0 to 88'),
    ('openwebtext --data=nines.bin', 'required: pip install tiktoken'),
    ('maestro --data=midi', 'required: pip install miditok'),
    ('cfq:split=mcd2 --data=cfq', 'mcd2.json.*cfq1.1.tar.gz')])
def test_mistakes_are_reported_in_a_line(argv, says, planted, monkeypatch):
    for package in ('tiktoken', 'miditok'):
        monkeypatch.setitem(sys.modules, package, None)     # as if it were not installed
    tasks.make.cache_clear()                                # cached tasks may use the stubs
    refused(says, tasks.main, argv.split())


@pytest.mark.parametrize('name, data, texts, size', [
    ('text', 'unicode.txt', [UNICODE], 257), ('tokens:size=300', 'three.bin', ['7 258 0'], 301),
    ('openwebtext', 'pairs.bin', ['pairs'], 50304),
    ('jsb', 'bach.json', ['74 70 65 - 74 70 65 21 74 70 65 60 74 70 65 108'], 90),
    ('maestro', 'midi', [MIDI], 91),
    ('genome', 'a.fa', ['ACGTAC G T N N N', 'TTTTTT T A C G T N AAAAAA CCCCCC G'], 4107)])
def test_documents_are_decoded_as_written(name, data, texts, size, planted):
    task = tasks.make(name, data)
    assert len(task.vocab) == size == len(set(task.vocab))
    for (_, document), text in zip(task.read(), texts):
        row, _ = task.lay_out([document], len(document) + 2)    # with padding
        assert task.decode(row[0]) == text == task.decode(task.encode(text))
    if name == 'openwebtext':       # tokens that tiktoken lacks are not decoded
        assert task.decode(torch.tensor([1 + ord('a'), 50258, 50303, tasks.PAD])) == 'a'


def test_cfq(planted):
    """Questions and queries are split into words. pool() has all training problems; if a part has
    no problem of a length, held-out ones come from other parts."""
    task = tasks.make('cfq', 'cfq')
    sets = [task.pool(1, 15, generator(0)), *(task.held_out(split, 9, [n], generator)[n]
                                              for split in ('eval', 'test') for n in (15, 19))]
    texts = [sorted(map(task.decode, tokens)) for tokens, _ in sets]
    numbers = [''.join(re.findall(r'm_0(\d)', ' '.join(x))) for x in texts]
    assert numbers == ['34', '56', '012', '78', '012']
    question = "BoS Did M3 ' s writer , a film editor , write M1 EoI "
    query = 'SELECT count ( * ) WHERE { ?x0 a film.editor . ?x0 people.x m_03 } EoS'
    assert texts[0][0] == question + query
    assert task.decode(sets[0][1][0].clamp(min=0)) == query     # targets of problem 0
    existing = [task.existing(range(99), part) for part in (None, 'train', 'val')]
    assert existing == [[15, 19], [15, 19], [15]]
    assert task.count([15, 19, 20]) == 5


def test_documents_are_dealt_to_parts(planted):
    """At random; a single one is cut. Files and folders named after a part are that part, unless
    hidden. A missing validation or test part equals the other. Large files are memory-mapped."""
    def parts(data):
        found = tasks.make('text', data).parts
        return [[bytes(document) for document in found[part]] for part in tasks.PARTS]

    dealt = parts('many')
    assert list(map(len, dealt)) == [36, 2, 2] and dealt[0] != sorted(dealt[0])
    assert sorted(itertools.chain(*dealt)) == [f'{i:02}'.encode() for i in range(40)]
    assert parts('one') == [[BYTES[:180]], [BYTES[180:190]], [BYTES[190:]]]
    assert parts('named') == [[BYTES], [b'val'], [b'test']]
    assert parts('no_test')[1:] == [[b'val']] * 2 and parts('no_val')[1:] == [[b'test']] * 2
    library = [*map(str, tasks.make('stdlib').files())]
    assert json.__file__ in library and not any('/test/' in path for path in library)
    np.save('big.npy', np.arange(2 ** 20, dtype=np.uint16))
    for name in ('text', 'tokens:size=65536'):
        task = tasks.make(name, 'big.npy')
        assert all(isinstance(task.of_part(part)[0], np.memmap) for part in tasks.PARTS)
        assert task.held_out('test', 4, [512, 4096], generator)[512][0].shape == (36, 512)


def test_contexts(planted):
    """Contexts are uniform within a document. A short document is one context, with the probability
    of its fraction of all tokens. In chorales contexts begin with the first voice. In training MIDI
    is transposed by -3 to 3 semitones; notes that leave the piano return by an octave."""
    tokens, targets = tasks.make('text', 'two').sample(6000, 5, generator(0))
    assert torch.equal(targets[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100))
    short = tokens[:, 0] > 100
    assert abs(short.double().mean() - 3 / 23) < 0.02
    assert set(map(tuple, tokens[short].tolist())) == {(101, 102, 103, 0, 0)}
    starts, counts = tokens[~short][:, 0].unique(return_counts=True)
    assert starts.tolist() == list(range(1, 17)) and counts.min() > 240
    assert (tokens[~short].diff(dim=1) == 1).all()
    jsb, midi, shifts = tasks.make('jsb', 'bach.json'), tasks.make('maestro', 'midi'), set()
    for row in jsb.sample(200, 16, generator(0))[0].view(-1, 4):
        assert jsb.decode(row).startswith('74 70 65 ')
    assert jsb.existing([4, 5, 6], 'train') == [5, 6]
    for tokens, targets in jsb.held_out('test', 99, [5, 16, 60], generator).values():
        assert (targets != -100).sum() == 4 * (1 + 12) - 2      # not the first of each chorale
        assert (tokens[:, 0] == tokens[0, 0]).all()
    for row in midi.sample(200, 7, generator(0))[0]:
        first, *rest = [int(word[6:]) for word in midi.decode(row).split()[1:-1]]
        shift = first - 60
        shifts.add(shift)
        assert rest == [64 + shift, 67 + shift, 21 + shift + 12 * (shift < 0),
                        108 + shift - 12 * (shift > 0)]
    assert shifts == set(range(-3, 4))
    assert midi.decode(midi.held_out('test', 1, [7], generator)[7][0][0]) == MIDI


@pytest.mark.parametrize('sizes', [[1000], [7, 350, 2, 99, 100, 101, 199], [40] * 30])
def test_windows_predict_every_token_once(sizes, tmp_path):
    """For every context length, the same tokens are predicted, all except the first of a document.
    No context crosses documents, and the rest of a document is not dropped."""
    documents = np.split(np.arange(sum(sizes), dtype=np.uint16), np.cumsum(sizes)[:-1])
    (tmp_path / 'test').mkdir()
    for i, document in enumerate(documents):
        document.tofile(tmp_path / f'test/{i}.bin')
    task = tasks.make('tokens:size=2000', str(tmp_path))
    after_first = sorted(np.concatenate([document[1:] for document in documents]).tolist())
    lengths = [2, 9, 50, 100]
    for length, (tokens, targets) in task.held_out('test', 10 ** 6, lengths, generator).items():
        row, t = (targets != -100).nonzero(as_tuple=True)
        assert sorted((targets[row, t] - 1).tolist()) == after_first, length
        assert torch.equal(tokens[row, t] + 1, targets[row, t])     # predicted from the one before
        assert tokens.shape[1] == length and (targets != -100).any(dim=1).all()
    cfg = types.SimpleNamespace(n_test=3, the_task=task, eval_lengths=lengths)
    kept, *others = ({*targets[targets != -100].tolist()}
                     for _, (_, targets) in train.held_out(cfg, 'test', CPU))
    assert all(tokens == kept for tokens in others)
    assert len(kept) == min(3 * 99, 3 * (max(sizes) - 1), len(after_first))


def test_a_corpus_is_learned_and_written(tmp_path, capsys):
    """In a random walk the next letter is the same or its successor, so that the best perplexity is
    2 at every length. Greedy decoding agrees with the argmax under teacher forcing, also for an
    encoding that depends on the final length."""
    walk = np.random.default_rng(0).integers(2, size=50000).cumsum() % 6
    (tmp_path / 'text').write_text(''.join('abcdef'[x] for x in walk))
    train.main(flags(task='text', data=tmp_path / 'text', out_dir=tmp_path / 'sweep', lr=1e-2,
                     train_lengths=16, eval_lengths='16,32', max_steps=200, eval_interval=200,
                     batch_size=32, pe='nope,vipe'))
    table = r'perplexity by length, pe\ncontext +16 +32\nnope +(\S+) +(\S+)\nvipe +(\S+) +(\S+)\n'
    perplexities = re.search(table, capsys.readouterr().out).groups()
    assert all(abs(float(x) - 2) < 0.03 for x in perplexities)
    model, cfg = train.load(tmp_path / 'sweep/pe=vipe')
    prompt = cfg.the_task.encode('effa')[None]
    greedy, cold, other = (model.generate(prompt, 28, temperature) for temperature in (0, 1e-5, 2))
    assert torch.equal(greedy, cold)
    assert cfg.the_task.decode(other[0])[:4] == 'effa' and not torch.equal(greedy, other)
    assert torch.equal(model(greedy)[0].argmax(dim=-1)[:, 3:-1], greedy[:, 4:])


# ---- kernels.py: in Triton's interpreter without a GPU, compiled with one ------------------------

CUDA = torch.cuda.is_available()
DEVICE = 'cuda' if CUDA else 'cpu'
needs_triton = pytest.mark.skipif(kernels.triton is None, reason='needs Triton')
kernel_test = gpu if CUDA else needs_triton
FULL, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def nan_memory():
    """New tensors contain NaN, so that elements that a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def laid_out(x, layout):
    """x [B, H, T, D] as a slice of a larger projection, with strided features, or contiguous."""
    if layout == 'slice':
        rows = torch.cat([x, x], dim=1).transpose(1, 2).contiguous()        # (B, T, 2H, D)
        return rows.transpose(1, 2)[:, x.shape[1]:]
    return x.mT.contiguous().mT if layout == 'apart' else x


ATTENTIONS = [
    (1, 3, 131, 20, 'slice', (FULL, BF16, HALF)),       # ragged: T and D are not powers of two
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
    """For every shape, layout and precision, outputs (also ViPE's mean distance) and gradients are
    as near the float64 reference as kernels.compare() allows."""
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
SCANS += [(1, 1, 130, 512, 5, True, True)]  # 128 bins for 63 tokens, 256 from 64 on, then 512
SCANS += [(2, 3, 2048, 2048, 84, True, copy) for copy in (False, True) if CUDA]


@kernel_test
@pytest.mark.parametrize('B, C, T, P, d_pe, sharpen, copy', SCANS)
def test_cursor_scan_by_the_kernel(nan_memory, B, C, T, P, d_pe, sharpen, copy):
    """Compares the encodings, and the gradients of gates, gamma, table and jumps."""
    torch.manual_seed(T)
    inputs = kernels.sample_inputs('cursor_scan', B, C, T, d_pe, device=DEVICE, P=P)

    def call(scan, reset, step, gamma, table, jumps):
        return scan(reset, step, gamma if sharpen else None, table, jumps if copy else None)

    error, allowed = kernels.compare(partial(call, kernels.cursor_scan),
                                     partial(call, pe.cursor_scan), inputs)
    assert error <= allowed


@kernel_test
def test_cursor_scan_at_its_limits():
    """Precise for gamma near 1 and 10,000; a table that a cursor can leave is refused."""
    torch.manual_seed(0)
    reset, step, gamma, table, jumps = (x.detach() for x in kernels.sample_inputs(
        'cursor_scan', 2, 2, 9, 4, device=DEVICE))
    inputs = reset, step, gamma.new_tensor([1.0001, 1e4]), table, jumps
    close(kernels.cursor_scan(*inputs), pe.cursor_scan(*inputs), 1e-5)
    for scan in (kernels.cursor_scan, pe.cursor_scan):
        for wrong, message in ((table[1:-1], '-9..9'), (table[1:], '2P')):
            with pytest.raises(AssertionError, match=message):
                scan(reset, step, gamma, wrong)
    up = torch.tensor([1.0, 0, 0], device=DEVICE).expand(1, 1, 70, 3)      # a step up at each token
    ends = kernels.cursor_scan(up[..., 2], up, None, torch.eye(141, device=DEVICE))
    assert torch.equal(ends[0, 0].argmax(dim=-1).cpu(), 71 + torch.arange(70))     # offsets 1 to 70


@kernel_test
@pytest.mark.parametrize('name', ['pope_attention', 'vipe_attention', 'cursor_scan'])
def test_kernels_repeat_bit_for_bit(name):
    torch.manual_seed(0)
    inputs = kernels.sample_inputs(name, 1, 2, 20, 32, device=DEVICE)
    once, again = (kernels.outputs_and_gradients(getattr(kernels, name), inputs) for _ in range(2))
    assert all(map(torch.equal, once, again))


@kernel_test
def test_far_positions_keep_their_digits():
    """Angles are precise to 1e-6; a float32 product of position and frequency would be to 3e-4."""
    x = torch.rand(1, 1, 5000, 8, device=DEVICE)
    exact = kernels.polar_reference(x.double(), None, 1e4, True)
    close(kernels.polar(x, None, 1e4, True).double(), exact, 1e-6)


@kernel_test
def test_kernels_as_operators():
    """Schema, fake tensors and gradients, as torch.compile requires; second gradients raise."""
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
    """Kernels write rows of such a stride, and copy others. One of M, N divides the other."""
    x = torch.randn(1, 3, 65, 20)
    assert kernels.new_rows(x, 40).stride() == (65 * 128, 40, 128, 1)
    rows = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert rows.stride(2) == 60 and kernels.readable(rows).stride(2) == 64
    assert torch.equal(kernels.readable(rows), x)
    for name, blocks in kernels.BLOCKS.items():
        assert not any(N % M if name == 'keys' else M % N for M, N, *_ in blocks)


def test_auto_takes_the_reference_where_shared_memory_is_small(monkeypatch):
    """kernel='auto' then also warns, once."""
    auto, sizes = encoding('pope', heads=1, head_dim=64), dict(small=64 * 1024, large=99 * 1024)
    monkeypatch.setattr(kernels, 'triton', object())
    monkeypatch.setattr(kernels, 'shared_memory', sizes.get)
    for device in sizes:
        q = types.SimpleNamespace(is_cuda=True, shape=(1, 1, 512, 64), dtype=BF16, device=device)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            takes = [auto.takes_kernel(q, q, torch.arange(512)) for _ in range(2)]
        assert takes == 2 * [device == 'large'] and len(said) == (device == 'small')


BY_KERNELS = {'pope', 'pope plain', 'vipe', 'vipe logits only', 'vipe value only', 'pope+vipe',
              'vipe+vrope'}


def test_only_encodings_without_a_bias_take_kernels():
    encodings = {name: pe.build(pe.PEConfig(**dict(d_model=48, n_head=4) | kw))[0]
                 for name, kw in VARIANTS.items()}
    assert {name for name, x in encodings.items() if x.fusable and x.triton_pays} == BY_KERNELS


@kernel_test
@pytest.mark.parametrize('name', [*sorted(BY_KERNELS), 'pope+t5+fox', 'prism copy'])
def test_encodings_by_kernels(name):
    """kernel=triton gives the loss and gradients of kernel=reference, and under autocast logits
    near them. Sums compile in one graph."""
    kw, T = VARIANTS[name] | dict(n_layer=1, rope_base=100.0), 17
    if name == 'prism copy':  # the kernel of its cursors is slow in the interpreter
        kw, T = kw | dict(n_head=2, prism_cursors=1), 6
    tokens = torch.randint(1, 11, (2, T + 1), generator=generator(0)).to(DEVICE)
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
    """Fractional positions take the reference; integers that are not consecutive give NaN."""
    q, k, v, pos = (x.to(DEVICE) for x in qkv())
    q, k, v = q.float(), k.float(), v.float()
    enc, plain = (encoding('pope', kernel=x).float().to(DEVICE) for x in ('triton', 'reference'))
    assert enc.attend(q, k, v, 3 * pos).isnan().any()
    assert enc.attend(q, k, v, pos + (pos > 5)).isnan().any()
    for where, same in ((pos + 7, pos), (pos * 0.5, pos * 0.5)):
        close(enc.attend(q, k, v, where), plain.attend(q, k, v, same), 1e-4)


def test_without_triton_everything_but_the_kernels_works(monkeypatch):
    """import pe imports neither Triton nor kernels, and does not change os.environ."""
    code = ("import os; before = dict(os.environ); import sys, torch, pe; "
            "assert os.environ == before and not {'triton', 'kernels'} & set(sys.modules); "
            "sys.modules['triton'] = None; import kernels; "
            "x = torch.randn(1, 1, 4, 4); kernels.attention_reference(x, x, x); "
            "pe.build(pe.PEConfig(pe='pope')); kernels.attention(x, x, x)")
    assert 'RuntimeError: the kernels require Triton' in python('-c', code).stderr
    monkeypatch.setitem(sys.modules, 'kernels', None)
    assert pe.kernels(required=False) is None
    refused('requires kernels.py beside pe.py', pe.kernels)
    if kernels.triton and not CUDA:
        monkeypatch.delenv('TRITON_INTERPRET')
        assert 'too late to choose' in python('-c', 'import triton, kernels').stderr


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
@pytest.mark.parametrize('arch, shared, calls', [  # bytes per block of H100, RTX 4090, A100
    (90, 232448, ['pope_attention/128/float16', 'vipe_attention/64/bfloat16',
                  'vipe_attention/128/float32']),
    (89, 101376, ['pope_attention/64/bfloat16', 'pope_attention/128/bfloat16',
                  'vipe_attention/128/bfloat16']),
    (80, 166912, ['pope_attention/128/bfloat16', 'vipe_attention/64/float16'])])
def test_kernels_compile(arch, shared, calls):
    """Triton compiles them without a GPU, and shared memory suffices. On sm_90 products in half
    precision are asynchronous (wgmma, not mma.sync); float32 products use no tensor cores."""
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


# ---- train.py: runs and their files, resuming, many seeds, bad input -----------------------------

CPU = torch.device('cpu')


def small(eval_len=None, **kw):
    """TINY's configuration with the given options. eval_len is ignored: it follows from others."""
    return train.make_config(train.read_options(flags(**kw)))


def weights(folder, seed=0):
    return train.read_checkpoint(folder)['seeds'][seed]['model']


def same(a, b):
    """Whether two dictionaries of tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def read_json(path):
    return json.loads(path.read_text())


def log_lines(folder):
    """The entries of a run's log, without steps_per_s, which varies."""
    points = map(json.loads, (folder / 'log.jsonl').read_text().splitlines())
    return [{key: x for key, x in point.items() if key != 'steps_per_s'} for point in points]


def sigterm_in_step(step):
    """A context in which training step number `step`, from 1, sends SIGTERM to this process."""
    learning_rate, sent = train.learning_rate, []

    def learning_rate_and_signal(cfg, number):
        if number + 1 == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(cfg, number)
    return mock.patch.object(train, 'learning_rate', learning_rate_and_signal)


def draw(batches, n, step=0):
    """The problems of n batches drawn at a step, as tuples without padding."""
    return [tuple(row[row != 0].tolist()) for _ in range(n)
            for tokens in batches.next(step)[::2] for row in tokens]


def test_a_run_and_its_files(tmp_path, capsys):
    run = tmp_path / 'r'
    assert train.main(flags(out_dir=run, seeds='3,4')) == 0
    assert 'exact match' in capsys.readouterr().out
    scores = read_json(run / 'lengths.json')
    assert list(scores) == ['3', '4'] and list(scores['3']) == list('12345')
    assert set(scores['3']['1']) == {'exact', 'token', 'last', 'n'}
    logged = [(point['step'], point['seed']) for point in log_lines(run) if 'loss' in point]
    assert logged == [(step, seed) for step in range(2, 13, 2) for seed in (3, 4)]
    model, cfg = train.load(run, seed=4)
    assert cfg.task == 'parity' and not model.training
    assert same(model.state_dict(), weights(run, 4))
    seen = log_lines(run)[-1]['eval'], scores['4']         # validation and test scores
    for split, found in zip(('eval', 'test'), seen):
        again = train.evaluate(model, cfg.the_task, train.held_out(cfg, split, 'cpu'))
        assert found == {str(n): score for n, score in again.items()}
    assert same(train.load(run)[0].state_dict(), weights(run, 3))
    refused('seed 9 in .*found: 3; 4', train.load, run, seed=9)


def test_a_finished_run_is_replaced_only_on_request(tmp_path, capsys):
    """The same command prints the table again and records the run once. Another configuration is
    refused. With --overwrite the old files stay until the first checkpoint of the new run."""
    run, results = tmp_path / 'r', tmp_path / 'results.jsonl'
    argv = flags(out_dir=run)
    train.main(argv)
    for _ in range(2):
        train.main([*argv, f'--results={results}', '--t5_buckets=16'])    # not RoPE's
        assert 'finished earlier; --overwrite' in capsys.readouterr().out
    assert read_json(results)['scores']['0']               # a single line
    train.main([*argv, '--n_test=20'])                     # only the test is repeated
    assert read_json(run / 'lengths.json')['0']['1']['n'] == 20
    train.main(argv)
    kept = {path: path.read_bytes() for path in run.iterdir()}
    refused('trained with lr=0.001, not 0.5: .*--overwrite', train.main, [*argv, '--lr=0.5'])
    other = [*argv, '--lr=0.5', '--overwrite']
    with mock.patch.object(torch, 'save', side_effect=MemoryError), pytest.raises(MemoryError):
        train.main(other)
    assert kept == {path: path.read_bytes() for path in run.iterdir()}
    for name in ('probe_axes.json', 'eval.json', 'report.md'):
        (run / name).touch()
    with sigterm_in_step(1):
        train.main(other)
    assert 'the same command, without --overwrite' in capsys.readouterr().out
    names = {path.name for path in run.iterdir()}
    assert names == {'ckpt.pt', 'config.json', 'log.jsonl', 'report.md'}
    assert train.read_checkpoint(run)['config']['lr'] == 0.5


def test_a_second_process_in_a_folder_is_refused(tmp_path):
    with train.locked(tmp_path), pytest.raises(train.UserError, match='another process is train'):
        train.main(flags(out_dir=tmp_path))
    assert not list(tmp_path.iterdir())
    (tmp_path / 'log.jsonl').write_text('of another program')
    refused('the names of a run: log.jsonl', train.main, flags(out_dir=tmp_path))


RESUMED = [dict(pe='shifted_ape', dropout=0.1, log_interval=5),
           dict(n_train=9, length_schedule='[(0, 2), (5, 3)]'), dict(seeds='0,1', dtype='float64')]


@pytest.mark.parametrize('kw', RESUMED, ids=str)
def test_stopped_at_any_step_and_continued_is_bitwise_the_same(kw, tmp_path):
    whole = tmp_path / 'whole'
    train.main(flags(out_dir=whole, **kw))
    for stop_at in (1, 4, 7, 11):
        folder = tmp_path / str(stop_at)
        with sigterm_in_step(stop_at):
            assert train.main(flags(out_dir=folder, **kw)) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL          # as before the run
        assert train.read_checkpoint(folder)['step'] == stop_at
        log = folder / 'log.jsonl'     # as if killed before its first log, or while it saves again
        log.write_text(log.read_text() + 'half a li' if stop_at > 4 else 'older')
        train.main(flags(out_dir=folder, **kw))
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
            assert run.poll() is None                      # wait until it saves again
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
    refused('No space left', train.write_file, str(path), b'new')
    assert path.read_bytes() == b'old' and list(tmp_path.iterdir()) == [path]


def test_checkpoints_that_do_not_fit(tmp_path):
    """They are refused, but those of an older version are read if only options are missing."""
    command = flags(out_dir=tmp_path)
    train.main(command)
    path, whole = tmp_path / 'ckpt.pt', train.read_checkpoint(tmp_path)

    def refuses(says, *argv, **changes):
        torch.save(whole | changes, path)
        refused(says, train.main, [*command, *argv])
    refuses('trained with seeds', '--seeds=0,1')
    refuses('max_steps', '--max_steps=99')
    refuses('trained with train_len=3, not', config=whole['config'] | dict(train_len=3))
    refuses('damaged, or not', config=whole['config'] | dict(train_lengths='abc'))
    entry = whole['seeds'][0]
    batches, again = entry['batches'], '--eval_lengths=1-6'        # without it, a run is finished
    for says, changes in (
            ('another kind of device', dict(batches=batches | dict(start=torch.zeros(16)))),
            (r'have changed \(its data', dict(batches=batches | dict(sum=1))),
            ('older code trained', dict(moments={})), ('cannot be resumed', dict(rng=[]))):
        refuses(says, again, seeds={0: entry | changes})
    del whole['config']['pope_frequencies']
    torch.save(whole, path)
    assert train.load(tmp_path)[1].pope_frequencies == 'all'
    good = path.read_bytes()
    for bad in (good[:-99], good[:2000] + b'?' + good[2001:], b'hello'):
        path.write_bytes(bad)
        refused('damaged, or not a checkpoint', train.main, command)


@pytest.mark.parametrize('accumulate', [1, 3, 8])
def test_a_step_is_adamw_on_the_clipped_gradient(accumulate):
    """The learning rate follows the schedule; PRISM's alpha has its own peak. Micro-batches are
    weighted by their number of supervised tokens, not of rows. PoPE's delta is clamped."""
    kw = dict(pe='prism+pope', dtype='float64', grad_clip=0.1, beta1=0.8, beta2=0.95,
              weight_decay=0.3, warmup_steps=5)
    cfg = small(accumulate=accumulate, **kw)
    trainer, batches = train.Trainer(cfg, 7, CPU), train.Batches(small(**kw), 7, cfg.the_task, CPU)
    torch.manual_seed(7)
    model = Transformer(cfg).double()
    optimizer = torch.optim.AdamW(model.optim_groups(cfg.lr, 0.3), betas=(0.8, 0.95))
    peaks = [group['lr'] for group in optimizer.param_groups]
    for step in range(4):
        optimizer.zero_grad()
        x, y, wide_x, wide_y = batches.next(step)
        pad = (0, wide_x.shape[1] - x.shape[1])            # makes the two halves one batch
        loss = model(torch.cat([F.pad(x, pad), wide_x]),
                     torch.cat([F.pad(y, pad, value=-100), wide_y]))[1]
        close(trainer.step(step), loss.detach(), 1e-9)
        trainer.losses += [1.0, 3.0]
        assert trainer.mean_loss() == 2                    # and clears the losses
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for group, peak in zip(optimizer.param_groups, peaks):
            group['lr'] = peak * (step + 1) / cfg.warmup_steps
        optimizer.step()
        model.blocks[0].attn.pe.parts[1].delta.data.clamp_(-2 * math.pi, 0)
    for p, expected in zip(trainer.model.parameters(), model.parameters()):
        close(p.detach(), expected.detach(), 1e-9)


def test_a_failing_seed_does_not_disturb_the_others(tmp_path, monkeypatch, capsys):
    """Seed 1 has NaN weights after step 6, seed 2 a NaN loss in step 7. Both keep the model of the
    last checkpoint before; the same command reports it again."""
    a, b, results = tmp_path / 'a', tmp_path / 'b', tmp_path / 'r.jsonl'
    train.main(flags(out_dir=a))
    update, calls = train.Trainer.update, collections.Counter()

    def poisoned(self, *batch):
        loss, seed = update(self, *batch), self.batches.seed
        calls[seed] += 1
        if seed == 1 and calls[seed] == 6:
            self.model.head.weight.data[0] = math.nan
        return loss * math.nan if seed == 2 and calls[seed] == 7 else loss
    monkeypatch.setattr(train.Trainer, 'update', poisoned)
    says = [f'seed {x}: the loss or a weight became NaN or infinite at step {5 + x}'
            for x in (1, 2)]
    for _ in range(2):
        with pytest.raises(train.UserError, match=f'2 diverged: {"; ".join(says)}. A lower --lr'):
            train.main(flags(out_dir=b, seeds='0,1,2', results=results))
    record, seeds = read_json(results), train.read_checkpoint(b)['seeds']
    assert list(record['scores']) == ['0'] and record['failed'] == says
    assert same(weights(a, 0), weights(b, 0)) and not same(weights(b, 1), weights(b, 0))
    for seed in (1, 2):
        assert seeds[seed]['step'] == 4 and seeds[seed]['model']['head.weight'].isfinite().all()
    capsys.readouterr()
    assert not train.main(['--eval_only', f'--out_dir={b}'])
    assert f'left out: {says[0]}\nleft out: {says[1]}' in capsys.readouterr().out
    assert list(read_json(b / 'eval.json')) == ['0']


def test_two_processes_train_as_one(tmp_path):
    """Each has half of every batch. A signal to one stops both. One resumes, then two again."""
    (tmp_path / 'program.py').write_text("""
import os, sys
sys.path.insert(0, os.getcwd())
import test_all, train
with test_all.sigterm_in_step(4 if os.environ['RANK'] == sys.argv.pop(1) else None):
    train.run_program(train.main)
""")
    one, two = (flags(out_dir=tmp_path / name, n_layer=2) for name in ('one', 'two'))

    def torchrun(stopped, *argv):
        return python('-m', 'torch.distributed.run', '--nproc_per_node=2', tmp_path / 'program.py',
                      stopped, *argv, timeout=100)
    train.main(one)
    assert 'stopped and saved' in torchrun('1', *two).stdout
    with sigterm_in_step(7):
        train.main(two)
    run = torchrun('none', *two)
    assert run.returncode == 0 and run.stdout.count('exact match') > 1, run.stderr
    losses, others = ({x['step']: x['loss'] for x in log_lines(tmp_path / name) if 'loss' in x}
                      for name in ('one', 'two'))
    assert losses == pytest.approx(others, abs=1e-5)
    assert 'trains one seed' in torchrun('none', *two, '--seeds=0,1').stderr


@variants
def test_no_step_waits_for_the_device(kw, monkeypatch):
    """A CUDA graph can capture a step if the host reads no value of a tensor, as on meta tensors,
    which have none. PyTorch's AdamW is replaced by a mock."""
    trainer = train.Trainer(small(n_head=4, n_layer=2, **kw), 0, CPU)
    batch = [x.to('meta') for x in trainer.batches.next(0)]
    params = list(trainer.model.to('meta').parameters())
    trainer.optimizer = mock.Mock(param_groups=[dict(params=params, clamp=(-1, 1))])
    # autocast does not support the meta device
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kw: contextlib.nullcontext())
    assert trainer.update(*batch).is_meta and all(p.grad.is_meta for p in params)


@gpu
@variants
def test_gpu_graph_trains_as_eager_steps(kw):
    """The losses agree across an epoch's end and a change of lengths, which a graph must handle."""
    losses = {}
    for graph in (False, True):
        cfg = small(n_head=4, n_layer=2, d_model=32, train_lengths=[1, 2, 4], n_train=8,
                    length_schedule=[(0, 2), (6, 4)], graph=graph, device='cuda', **kw)
        trainer = train.Trainer(cfg, 0, torch.device('cuda'))
        losses[graph] = torch.stack([trainer.step(step) for step in range(20)]).cpu()
    close(losses[True], losses[False], 1e-4)


@gpu
def test_gpu_run_stops_and_continues(tmp_path):
    argv = flags(device='cuda', seeds='0,1', dropout=0.1, max_steps=40, eval_interval=20)
    a, b = tmp_path / 'a', tmp_path / 'b'
    train.main([*argv, f'--out_dir={a}'])
    with sigterm_in_step(25):
        assert train.main([*argv, f'--out_dir={b}']) == 128 + signal.SIGTERM
    train.main([*argv, f'--out_dir={b}'])
    for x, y in zip(log_lines(a), log_lines(b), strict=True):
        assert x['step'] == y['step'] and x.get('loss') == pytest.approx(y.get('loss'), abs=1e-4)


# sweeps and evaluation

def test_sweep_makes_one_table_and_continues(tmp_path, capsys):
    """A point that diverges does not stop the sweep, and is not trained again."""
    results = tmp_path / 'r.jsonl'
    argv = flags(pe='nope,rope', lr='1e-3,1e30', out_dir=tmp_path / 'sweep', results=results)
    refused(r'2 diverged: nope 1e\+30.*; rope 1e\+30', train.main, argv)
    names = [f'pe={name},lr={lr}' for name in ('nope', 'rope') for lr in ('0.001', '1e+30')]
    assert sorted(path.name for path in (tmp_path / 'sweep').iterdir()) == names
    assert re.findall(r'^(nope|rope) 0.001 .*│', capsys.readouterr().out, re.M) == ['nope', 'rope']
    good, bad, *_ = lines = results.read_text().splitlines()
    assert json.loads(bad)['scores'] == {} and len(json.loads(bad)['failed']) == 1
    assert list(json.loads(good)['scores']) == ['0'] and 'failed' not in json.loads(good)
    for path in (tmp_path / 'sweep' / names[2]).iterdir():           # as if killed in the third run
        path.unlink()
    refused('2 diverged', train.main, argv)
    assert capsys.readouterr().out.count('finished earlier') == 3
    assert results.read_text().splitlines() == lines       # the same run is recorded once
    diverged = tmp_path / 'sweep' / names[1]
    with pytest.raises(train.UserError, match='every seed of the run in .* diverged'):
        train.main(['--eval_only', f'--out_dir={diverged}'])
    train.main(['--eval_only', f'--out_dir={tmp_path / "sweep" / names[0]}'])
    assert not (diverged / 'eval.json').exists() and results.read_text().splitlines() == lines


def test_eval_only_uses_the_runs_own_configuration(tmp_path, capsys):
    """Scores at other lengths or with another encoding are written to eval.json."""
    train.main(flags(out_dir=tmp_path, pe='rope'))
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = ['--eval_only', f'--out_dir={tmp_path}']
    train.main([*again, '--eval_lengths=2,9', '--pe=yarn'])         # with the same weights
    out = capsys.readouterr().out
    assert 'parity with yarn' in out and 'was trained with pe=rope' in out
    assert list(read_json(tmp_path / 'eval.json')['0']) == list('29')
    assert kept == {path: path.read_bytes() for path in kept}
    refused('task=parity; copy is another task', train.main, [*again, '--task=copy'])
    refused('has other parameters', train.main, [*again, '--pe=fire'])


def test_evaluate_counts():
    task, model = tasks.make('copy'), torch.nn.Module()
    tokens, targets = task.sample(4, 3, generator(0))
    answers = targets.clamp(min=0)
    model.forward = lambda tokens: (F.one_hot(answers, 8).float(), None)
    answers[0, 4] += 1                                     # row 0: its first state is wrong
    answers[1, 6] += 1                                     # row 1: its last state
    answers[2, 6] += 1                                     # row 2: its last state
    answers[3, 7] += 1                                     # row 3: its end token
    scores = train.evaluate(model, task, [(3, (tokens, targets))])[3]
    assert scores == dict(exact=0, token=0.75, last=0.5, n=4)
    runs = {seed: {1: dict(exact=seed, n=4)} for seed in (0, 1)}
    assert train.mean_scores(runs) == {1: dict(exact=0.5, n=4)}
    table = {1: dict(exact=1, token=0.5, n=1), 2: dict(exact=0, token=1, n=3)}
    assert train.summary(small(), table, 'token') == ('87.5 %', '-', 'none')


# batches and the learning rate

def test_batches_mix_lengths_within_the_schedule_and_repeat_fixed_data():
    task = tasks.make('parity')
    batches = train.Batches(small(n_train=8, batch_size=6), 0, task, CPU)
    epoch, again = draw(batches, 4), draw(batches, 4)
    assert len(epoch) == 24 and epoch != again and sorted(epoch) == sorted(again)
    assert max(len({len(row) for row in epoch[i:i + 6]}) for i in (0, 6, 12, 18)) > 1
    online = train.Batches(small(), 0, task, CPU)
    assert len({*draw(online, 200)}) == 2 + 4 + 8
    staged = train.Batches(small(length_schedule='[(0, 1), (5, 3)]'), 0, task, CPU)
    cfg = small(n_train=8, batch_size=4, length_schedule='[(0, 2), (5, 3)]')
    fixed = train.Batches(cfg, 0, task, CPU)               # a later stage keeps its problems
    assert {*draw(fixed, 4, 0)} == {row for row in draw(fixed, 6, 5) if len(row) < 9}
    shapes = [[x.shape for x in staged.next(step)[::2]] for step in (0, 4, 5)]
    assert shapes == [[(8, 5)], [(8, 5)], [(4, 7), (4, 9)]]


def test_a_token_outside_the_vocabulary_names_its_task(monkeypatch):
    monkeypatch.setattr(tasks.Parity, 'states', lambda self, x: x + 2)
    batches = train.Batches(small(), 0, tasks.make('parity'), CPU)
    refused('Parity returned token 7, .* has 6 tokens', batches.next, 0)


@pytest.mark.parametrize('n_train', [0, 1500])
def test_held_out_problems_are_never_trained_on(n_train):
    """Of problems of length 40, too many to repeat by chance, none is in two parts."""
    cfg = small(train_lengths='40', eval_lengths='40', n_eval=200, n_test=200, n_train=n_train)
    trained = {*draw(train.Batches(cfg, 0, cfg.the_task, CPU), 200)}
    validation, test = ({tuple(row) for _, (tokens, _) in train.held_out(cfg, split, CPU)
                         for row in tokens.tolist()} for split in ('eval', 'test'))
    assert len(trained) > 1000
    assert not (trained & validation or trained & test or validation & test)
    refused('seeds', small, seeds=2 ** 40)          # seeds are below 2 ** 28


@pytest.mark.parametrize('decay, rates', [
    ('linear', {0: 0.1, 9: 1, 10: 1, 55: 0.55, 100: 0.1}),
    ('cosine', {0: 0.1, 9: 1, 32.5: 0.1 + 0.9 * (0.5 + 0.5 ** 1.5), 55: 0.55, 100: 0.1}),
    ('none', {0: 0.1, 9: 1, 99: 1})])
def test_learning_rate_schedules(decay, rates):
    cfg = small(lr=1.0, max_steps=100, warmup_steps=10, min_lr=0.1, decay=decay)
    for step, rate in rates.items():
        close(train.learning_rate(cfg, step), rate)


BAD = [
    ('--batchsize=3', "did you mean 'batch_size'"), ('--learning_rate=3', "did you mean 'lr'"),
    ('--epochs=3', "'epochs'; --help lists them"), ('--graph', '--graph requires a CUDA device'),
    ('--lr=fast', "--lr=fast: lr must be a number >= 0, as in --lr=0.001; got 'fast'"),
    ('--task=pairty', "'parity'"), ('--pe=rop', "'rope'"), ('--n_head=5', 'divisible'),
    ('--task=distance --train_lengths=8,9 --causal=False', 'one training length'),
    ('--task=scan --train_lengths=23', 'no problems of these train_lengths'),
    ('--seeds=[[1]]', 'seeds must be integers'), ('--pe=yarn --rope_base=1', 'above 1 for yarn'),
    ('--pe=prism --prism_layers=["a"]', 'prism_layers must contain 1'),
    ('--max_steps=0', 'max_steps must be positive'), ('--beta1=1.5', 'below 1'),
    ('--max_steps', 'as in --max_steps=4000; got no value'),
    ('--accumulate=9', 'at most batch_size'), ('--n_train=1', 'too few problems'),
    ('--length_schedule=[(5,3)]', 'from step 0 on'), ('--task=jsb', 'add --data=PATH'),
    ('--length_schedule=[(0,0)]', 'length_schedule at step 0 is below all train_lengths'),
    ('--length_schedule=5', 'length_schedule must be pairs'),
    ('--length_schedule=[(0,1.5)]', 'length_schedule must be pairs'),
    ('configs/none.py', 'cannot read config file configs/none.py'), ('--d_model=32,33', 'even'),
    ('--device=cuda:7', 'not available'), ('--eval_only --out_dir=nowhere', 'no run in nowhere'),
    ('--eval_only --pe=nope,rope', 'takes one trained run')]


@pytest.mark.parametrize('argv, says', BAD)
def test_bad_input_is_one_clear_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(re.escape(says), train.main, flags() + argv.split())
    assert not list(tmp_path.rglob('ckpt.pt'))


@pytest.mark.parametrize('text, says', [
    ('lr = 1e-3\npee = 1\n', "'pee', did you mean 'pe'"),
    ('lr = = 2', 'line 1: SyntaxError'), ('lr = 1\nseeds = [x]', 'line 2: NameError')])
def test_bad_config_files(text, says, tmp_path):
    (tmp_path / 'bad.py').write_text(text)
    refused(f'bad.py.*{says}', train.main, [str(tmp_path / 'bad.py')])


def test_exit_code_2_without_a_traceback():
    for program, *argv in (['train.py', '--lr=fast'], ['tasks.py', 'pairty'],
                           ['probe.py', 'cursor', 'nowhere']):
        run = python(program, *argv)
        assert run.returncode == 2, run.stderr
        assert run.stderr.startswith(f'{program}: ') and run.stderr.count('\n') == 1, run.stderr


def test_files_and_flags_chain(tmp_path):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text('task = "copy"\nlr = 0.5\nmax_steps = 10\n')
    b.write_text('# on top of a\nlr = lr / 2\neval_lengths = range(1, 4)\n')
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    cfg = train.make_config(train.read_options([
        str(a), str(b), '--pe=learned', '—max_steps=1e3', '--eval_lengths=1-3,7', '--n_head=2']))
    assert (cfg.task, cfg.lr, cfg.max_steps, cfg.n_head) == ('copy', 0.25, 1000, 2)
    assert cfg.eval_lengths == [1, 2, 3, 7] and cfg.out_dir == 'out/copy_learned'
    assert torch.rand(1) == expected                       # torch's random state is unchanged
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
        refused(f'{key} must be', train.convert, train.Config, key, given, 'a test')
    else:
        found = train.convert(train.Config, key, given, 'a test')
        assert found == value and type(found) is type(value)


def test_help_names_every_option(capsys):
    train.main(['--help'])
    out = capsys.readouterr().out
    for key in train.keys(train.Config):
        assert re.search(rf'(?m)^    {key}: .+ = .+  # |^    # .+\n    {key}: ', out), key


# configs

@pytest.mark.parametrize('name', sorted(os.listdir(os.path.join(HERE, 'configs'))))
def test_configs_are_valid(name):
    """A model can be built from each config; tasks that read files are replaced by another."""
    values = train.read_options([os.path.join(HERE, 'configs', name)])
    task, pe_name = values['task'], values['pe']
    if tasks.TASKS[task].needs:
        values['task'] = 'scan' if task == 'cfq' else 'stdlib'
    cfg = train.make_config(values)
    with torch.device('meta'):                             # allocates no memory
        Transformer(cfg)
    assert name in (f'{task}_{pe_name}.py', 'addition_prism.py') or name.startswith('paper_')


# ---- probe.py: each probe finds what was planted, or agrees with a loop --------------------------

def nano(task='copy', dtype=torch.float64, longest=8, **kw):
    """(model, task, cfg) with random weights, as from a run with training lengths 1..longest."""
    torch.manual_seed(0)
    small = dict(d_model=16, n_layer=2, dtype='float64', train_lengths=range(1, longest + 1),
                 eval_lengths=range(1, longest + 5))
    cfg = train.Config(task=task, **small | kw)
    return Transformer(cfg).to(dtype).eval().requires_grad_(False), cfg.the_task, cfg


def rotated_products(zq, zk, theta, pos):
    """Re sum_c conj(zq_tc) zk_sc e^(-i (t-s) theta_c) [H, T, T] of zq, zk [H, T, n]."""
    turn = torch.exp(-1j * (pos[:, None] - pos)[..., None] * theta)  # (T, T, n)
    return (zq[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1)


@variants
def test_a_trace_is_what_the_model_computes(kw):
    """For every layer and encoding, mix() of the traced weights and values is the traced output."""
    model = make(**kw).requires_grad_(False)
    tokens = torch.randint(1, 11, (2, 12), generator=generator(0))
    for layer, block in zip(probe.trace(model, tokens), model.blocks):
        v = probe.project(layer.attn, layer.x)[2]
        y = layer.enc.mix(layer.weights, v, layer.pos, layer.state, layer.x)
        close(y, layer.y, 1e-6)
        close(layer.x, block.norm_1(layer.stream))


@pytest.mark.parametrize('kw', [
    dict(pe='pope'), dict(pe='ape+rope', n_head=8), dict(pe='nope', n_head=2, n_layer=1),
    dict(pe='prism', n_head=2)], ids=str)
def test_every_probe_on_every_kind_of_run(kw):
    """A probe returns numbers that JSON can store and a figure that can be drawn, or raises a
    UserError of one line. Afterwards the model has no hooks and bitwise the same outputs."""
    model, task, cfg = nano('parity', dtype=torch.float32, longest=4, **kw)
    tokens, figures = task.sample(2, 5, torch.Generator())[0], []
    before = model.requires_grad_(True)(tokens)[0]
    small = dict(n=4, steps=0, gammas=[0.5], l_max=[3])
    for name, function in probe.PROBES.items():
        own = small.keys() & inspect.signature(function).parameters
        try:
            rows, summary, draw = function(model, task, cfg, **{key: small[key] for key in own})
        except train.UserError as error:
            assert '\n' not in str(error), name
            continue
        figures.append(draw)
        assert torch.equal(model(tokens)[0], before), name
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), name
        json.dumps(dict(rows=rows, summary=summary), allow_nan=False)
        assert max(map(len, probe.as_text(rows, summary).splitlines())) <= 130, name
    assert len(figures) >= 10
    plt = pytest.importorskip('matplotlib.pyplot')
    for draw in figures:
        figure = draw(plt)
        figure.set_layout_engine('none')  # slow
        figure.draw_without_rendering()
        plt.close(figure)


def test_the_program(tmp_path, monkeypatch, capsys):
    """It writes rows, a summary and a figure, and does not change the run's own files. It lists
    the probes and raises UserError for mistakes. gradients retrains the saved model."""
    run, found = tmp_path / 'run', tmp_path / 'run/probe_cursor.json'
    train.main(flags(task='string_copy', pe='prism', n_head=2, out_dir=run, seeds='0,3'))
    before = {path: path.read_bytes() for path in run.iterdir()}
    probe.main(['cursor', str(run), '--seed=3', '--length=5'])
    assert json.loads(found.read_text())['summary']['length'] == 5
    assert {path: path.read_bytes() for path in before} == before
    probe.main(['norms', str(run), '--n=1', f'--out_dir={tmp_path}'])      # has a control
    assert 'used, untrained' in json.loads((tmp_path / 'probe_norms.json').read_text())['summary']
    model, cfg = train.load(run, 3)
    rows = probe.gradients(model, cfg.the_task, cfg)[0][-3:]
    before_last, last, saved = ([row[key] for key in ('first', 'least', 'most')] for row in rows)
    assert last == pytest.approx(saved, rel=1e-2) != before_last
    drawn = importlib.util.find_spec('matplotlib') is not None
    assert (run / 'probe_cursor.png').exists() == drawn
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    probe.main(['cursor', str(run), '--length=4'])
    assert json.loads(found.read_text())['summary']['length'] == 4
    assert not (run / 'probe_cursor.png').exists()  # the old figure is deleted
    for line, says in (
            ('perturb RUN --gammas=0.5,2', r'fractions in \(0, 1\]'), ('cursor', 'give one run'),
            ('axes RUN --n=0', '--n must be an integer ≥ 1, got 0'), ('cursr RUN', "'cursor'?"),
            ('cursor RUN --lenght=5', '--lenght=5'), ('cursor RUN --length=x', "'x'"),
            ('cursor RUN --length=9999', '2 to 8,192'), ('cursor RUN --seed=1', 'seed 1'),
            ('axes nowhere', 'no run in nowhere'),
            ('axes by_hand:mode', 'by_hand:mode: .* copy, parity, polynomial'),
            ('axes --hf=RUN', 'requires a text'), ('axes --hf=RUN --seed=3', 'without --seed'),
            ('axes --hf=none --text=RUN', 'no such file or folder: none')):
        refused(says, probe.main, line.replace('RUN', str(run)).split())
    capsys.readouterr()
    probe.main([])
    listed = re.findall(r'(?m)^  (\w+) *\*? +[A-Z].*[?.]$', capsys.readouterr().out)
    assert listed == list(probe.PROBES)


@pytest.mark.parametrize('name, kw, given, says', [
    *[(name, dict(task='distance', pe='alibi', causal=False, train_lengths=[8], eval_lengths=[8]),
       {}, 'causal mask') for name in ('toeplitz', 'tuning', 'axes', 'stretch')],
    ('kernel', {}, {}, 'pe=prism'),
    ('alignment', dict(task='mode'), {}, 'unique correct key'), ('ablate', {}, {}, 'n_head=4'),
    ('linear', dict(eval_lengths=[4]), {}, 'eval_lengths above 8'),
    ('tuning', dict(pe='ape'), {}, 'depend on the distance'),
    ('tuning', dict(pe='prism', n_head=2), {}, 'come from the content'),
    ('tuning', dict(pe='fox'), {}, 'q and k alone, unlike fox'),
    ('ablate', {}, dict(what='positions'), r'pe=ape or ape\+rope'),
    ('gradients', dict(n_head=2), dict(steps=10 ** 9), 'take fewer'),
    ('stretch', {}, dict(layer=3), 'must be 1 to 2'),
    *[('disentangle', dict(pe=x), {}, f'pe=rope, not {x}') for x in ('ape', 'fire', 'vipe')]])
def test_a_probe_says_what_it_requires(name, kw, given, says):
    refused(says, probe.PROBES[name], *nano(**kw), **given)


def test_problems_are_those_of_the_scores_and_constants_have_no_correlation():
    """A correlation is nan even if a constant's mean is rounded. Rows of many heads are means."""
    _, task, cfg = nano('addition_cot')
    found = probe.problems(task, [3], cfg.n_test)[3][0]
    assert torch.equal(found, dict(train.held_out(cfg, 'test', 'cpu'))[3][0])
    rows = probe.sequences(task, cfg.train_lengths, 3, 20)
    assert all(row.all() for row in rows) and len({row.shape for row in rows}) > 1  # no padding
    found = probe.head_rows(dict(r=torch.arange(122.0).view(2, 61)))
    assert found == [dict(layer=1, r=30.0), dict(layer=2, r=91.0)]
    x, y = at_random(2, 4, 50)
    x[1], x[3], y[2:] = -1e6, 0, 0.1
    assert probe.correlation(x, y).isnan().tolist() == [False, True, True, True]


def test_alignment_finds_the_iteration_head():
    """Layer 2 attends to x_t at every length, even if the output is wrong."""
    model, cfg = probe.iteration_head('copy')
    rows, summary, _ = probe.alignment(model, cfg.the_task, cfg, length=120, n=2)
    assert summary == dict(n=2, head='2.1')
    assert all(row['2.1'] == row['exact'] == row['states'] == row['first'] == 1 for row in rows)
    assert not any(row['early'] for row in rows)
    longest = max(cfg.train_lengths)  # in longer problems, another key is at this distance
    assert all(row['as trained'] == (row['length'] <= longest) for row in rows)
    model.head.weight[cfg.the_task.end, len(cfg.the_task.vocab)] = 1e4  # EoS always
    row = probe.alignment(model, cfg.the_task, cfg, length=9, n=2)[0][-1]
    assert (row['early'], row['first']) == (1, 0)
    model.head.weight[cfg.the_task.end, len(cfg.the_task.vocab)] = 0
    model.head.weight[4] = 0  # the symbol 0 is never predicted
    rows, summary, _ = probe.alignment(model, cfg.the_task, cfg, length=17, n=99, distances=[1])
    right = (probe.problems(cfg.the_task, [3], 99)[3][1][:, 4:7] != 4).double()  # of EoI, s_1, s_2
    close([rows[2][key] for key in ('exact', 'states', 'd=1')],
          [right.prod(dim=1).mean(), right.mean(), right[:, 1].mean()], 6e-5)
    model.head.weight[4] = 1
    model.blocks[1].attn.qkv.weight[:cfg.d_model] *= 1e-2  # smaller logits
    rows, summary, _ = probe.alignment(model, cfg.the_task, cfg, length=120, n=9)
    assert all(row['2.1'] > 0.7 and 0.5 < row['states'] < 0.9 for row in rows[1:])


def test_attention_is_the_mean_over_queries():
    """For reverse, whose correct keys go backwards: BoS, 6 inputs, EoI at 7, 6 states, EoS."""
    model, task, cfg = nano('reverse', pe='rope', n_head=2)
    layers = probe.trace(model, probe.problems(task, [6], 64)[6][0])
    for row in probe.attention(model, task, cfg, length=6, n=64)[0][:4]:
        weights = layers[row['layer'] - 1].weights[:, row['head'] - 1]
        x_t = statistics.mean(weights[:, t, 13 - t].mean().item() for t in range(7, 13))
        entropy = torch.special.entr(weights)[:, 7:14].sum(dim=-1).mean()
        close([row[key] for key in ('x_to_BoS', 's_to_EoI', 's_to_x_t', 'entropy')],
              [weights[:, 1:7, 0].mean(), weights[:, 8:14, 7].mean(), x_t, entropy], 6e-5)


def test_linear():
    """agreement() gives scores computed by hand, with ties. From layer 1 of the iteration head, the
    distance to EoI is decoded exactly, also at 3 times the training length."""
    found = probe.agreement(torch.tensor([1, 2, 2, 4, 5]), torch.tensor([1.0, 3, 2, 2, 7]))
    assert found == pytest.approx(dict(
        rmse=math.sqrt(9 / 5), mae=1.0, r2=1 - 9 / 10.8, pearson=12 / math.sqrt(10.8 * 22),
        spearman=7.25 / 9.5), abs=1e-12)
    model, cfg = probe.iteration_head('copy')
    rows, _, _ = probe.linear(model, cfg.the_task, cfg, n=4)
    at = {(row['target'], row['layer'], row['lengths']): row for row in rows}
    assert len(rows) == 18 and at['distance', 0, 'longer']['r2'] < 0.5
    for row in (at['distance', 1, lengths] for lengths in ('trained', 'longer', '3x')):
        assert row['r2'] == row['pearson'] == 1 and row['untrained'] < 0.9


def test_squeeze():
    """In problems of over 13 tokens, the longest in training, squeezed positions are fractions up
    to 12, and masked keys are 13 or more tokens back."""
    model, task, cfg = nano('parity', pe='rope', longest=5, n_layer=1)
    tokens, targets = probe.problems(task, [9], 20)[9]  # 21 tokens
    windows = [model(tokens[:, max(0, t - 12):t + 1])[0][:, -1] for t in range(21)]
    found = [model(tokens)[0], model(tokens, pos=torch.linspace(0, 12, 21))[0],
             torch.stack(windows, dim=1)]
    right = [(x.argmax(dim=-1) == targets).sum() / (targets != -100).sum() for x in found]
    row = probe.squeeze(model, task, cfg, n=20)[0][8]
    close([row['tokens' + name] for name in ('', ', squeezed', ', masked')], right, 6e-5)
    assert len({*right}) == 3


def test_loss_by_position():
    """The loss is a mean over problems at each supervised position."""
    model, task, cfg = nano('copy', pe='rope', longest=3)
    rows, summary, _ = probe.loss(model, task, cfg, n=5)
    tokens, targets = probe.problems(task, [7], 5)[7]
    curve = train.token_losses(model(tokens)[0], targets)[:, 8:16].mean(dim=0)
    assert [row['first'] for row in rows] == list(range(9, 17))
    close([row['rope'] for row in rows], curve, 1e-4)
    close(summary['rope, beyond'], curve.mean(), 1e-4)
    model, task, cfg = nano('text', pe='rope', data=__file__, train_lengths=[8], eval_lengths=[16])
    rows, summary, _ = probe.loss(model, task, cfg, n=5)
    close([summary['rope, trained positions'], summary['rope, beyond']],
          [statistics.mean(row['rope'] for row in some) for some in (rows[:7], rows[7:])], 1e-4)
    layers = [types.SimpleNamespace(weights=torch.tensor([[  # head 2 attends to the first token
        [[1, 0, 0], [0.3, 0.7, 0], [0.1, 0.2, 0.7]], [[1, 0, 0], [1, 0, 0], [0.9, 0.1, 0]]]]))]
    assert probe.sharpest_heads(layers, None) == [(0, 0)]


def test_norms_of_planted_frequencies():
    """Of four feature pairs, three have the same norm and the second has norm 0. Head 2 has twice
    the norms of head 1."""
    (model, task, cfg), pairs = nano(pe='rope', n_head=2, n_layer=1), torch.tensor([1.0, 0, 1, 1])
    scale = torch.cat([pairs, 2 * pairs]).repeat_interleave(2)  # (H D,)
    W = model.blocks[0].attn.qkv.weight
    W[:] = W[:1]  # all features of a query are equal, and of a key
    W[:32] *= scale.repeat(2)[:, None]
    rows, summary, _ = probe.norms(model, task, cfg, n=2)
    close([summary['used'], summary['fast']], [3 / 4, 1 / 3], 1e-3)
    layer, = probe.trace(model, probe.batch(task, cfg.train_lengths, 0, 2)[1])
    first = layer.q[:, 0, :, :2].norm(dim=-1).mean() * pairs  # of head 1
    close([[row['q'], row['largest_q']] for row in rows],
          torch.stack([1.5 * first, 2 * first], dim=1), 1e-4)
    close([row['wavelength'] for row in rows], [2 * math.pi * 10 ** c for c in range(4)], 0.01)


def test_tuning_of_rope_are_medians_and_of_alibi_lines():
    model, task, cfg = nano(pe='rope', n_head=2)
    rows, summary, _ = probe.tuning(model, task, cfg, contents=6)
    row, = probe.sequences(task, cfg.train_lengths, 0, 1)
    curves = probe.tuning_curves(model, row, summary['distances'], 6)
    for line, curve in zip(rows, curves.transpose(1, 2).flatten(0, 1)):
        low, peak, high = np.quantile(curve.argmax(dim=1), (0.25, 0.5, 0.75))
        close([line['peak'], line['shift'], line['range']],
              [peak, high - low, np.ptp(curve.mean(dim=0).numpy())], 1e-4)
    curves = probe.tuning_curves(make(pe='alibi'), row, 6, 3)
    lines = -(0.25 ** torch.arange(1, 5.0))[:, None] * torch.arange(6)  # (H, 6)
    close(curves - curves[..., :1], lines.expand_as(curves))


def test_ablate_finds_the_head_that_carries_the_answer():
    """It is head 3 of layer 2 by the given scores; in the iteration head, head 1 of each layer."""
    model, _, cfg = nano(pe='nope', n_head=4)
    taps, drops = [block.attn.tap_head_out for block in model.blocks], [[1, 1, 1, 1], [0, 0, 7, -3]]

    def score(tap_and_hook):
        tap, hook = tap_and_hook
        zeroed, = (hook(tap, None, torch.ones(1, 4, 2, 3))[0] == 0).all(dim=(1, 2)).nonzero()
        return 10 - drops[taps.index(tap)][zeroed.item()]
    rows, summary, _ = probe.without_heads(model, cfg, 10, score)
    assert [[row[f'drop {h}'] for h in (1, 2, 3, 4)] for row in rows] == drops
    assert [row['effective'] for row in rows] == [4, 1]
    assert summary == dict(layer=2, head=3, largest=7, second=1)
    model, cfg = probe.iteration_head('parity')
    rows, summary, _ = probe.ablate(model, cfg.the_task, cfg, n=64)
    assert [[row['drop 1'], row['drop 2'], row['effective']] for row in rows] == [[100, 0, 1]] * 2
    assert summary['base'] == 100


def test_ablate_subtracts_the_vectors_that_were_added(tmp_path):
    """Subtracting p before layer 1 gives the loss of the same weights with pe=nope. Random vectors
    have the norms of p. For a text, base is the loss and a drop is its rise without a head."""
    (tmp_path / 'text').write_text(''.join(random.Random(0).choices('abcdef', k=9999)))
    shape = dict(data=str(tmp_path / 'text'), train_lengths=[12], eval_lengths=[12], n_head=2)
    model, task, cfg = nano('text', pe='random', **shape)
    plain = nano('text', pe='nope', **shape)[0]
    plain.load_state_dict(model.state_dict(), strict=False)
    row = probe.ablate(model, task, cfg, what='positions', n=30)[0][0]
    heads, summary, _ = probe.ablate(model, task, cfg, n=30)
    model.blocks[1].attn.proj.weight[:, :8] = 0  # head 1 of layer 2
    found = [train.evaluate(net, task, probe.problems(task, [12], 30).items())[12]['loss']
             for net in (plain, model)]
    close([row['without p'], summary['base'] + heads[1]['drop 1']], found, 1e-3)
    p, score = probe.added_vectors(model, 12), mock.Mock(return_value=1.0)
    probe.without_positions(model, cfg, probe.batch(task, [12], 0, 2)[1], score)
    for call in score.call_args_list:  # p and four random vectors, for each layer
        taken = call.args[0][1](None, None, torch.zeros_like(p))
        close(taken.norm(dim=-1), p.norm(dim=-1))


@pytest.mark.parametrize('kw', [
    dict(pe='ape+rope', norm='rmsnorm'), dict(pe='learned+t5'), dict(pe='rope', rope_heads=1),
    dict(pe='rope', attention='mla'), dict(pe='pope'), dict(pe='ape+vipe')], ids=str)
def test_toeplitz_splits_the_logits(kw):
    """Toeplitz parts are means along diagonals. For encodings that are linear in q and k, eq. 1's
    terms add up to the logits, and their fractions to 1; other encodings have no terms."""
    model, task, cfg = nano(d_model=32, n_head=4, **kw)
    rows, _, _ = probe.toeplitz(model, task, cfg, length=8, n=4)
    tokens = probe.batch(task, [8], 8, 4)[1]
    p, (i, j) = probe.added_vectors(model, tokens.shape[1]), np.tril_indices(tokens.shape[1])
    for layer, block in zip(probe.trace(model, tokens), model.blocks):
        terms = probe.eq_1(layer, block.norm_1, p)
        assert bool(terms) == (cfg.pe not in ('pope', 'ape+vipe'))
        if terms:
            total = sum(terms.values())
            close((total + pe.causal(total)).expand_as(layer.logits), layer.logits)
        for h in range(cfg.heads):
            row, shares = rows.pop(0), []
            for L in layer.logits[:, h].numpy():
                means = np.array([L.diagonal(-d).mean() for d in range(len(L))])
                shares.append(means[i - j].var() / L[i, j].var())
            close(row['toeplitz'], np.mean(shares), 6e-5)
            close(sum(row[name] for name in terms), bool(terms), 1e-3)
    if 'qp kp' in terms:
        model.embedding.weight.zero_()  # before layer 1 the stream is then p
        terms = probe.eq_1(probe.trace(model, tokens)[0], model.blocks[0].norm_1, p)
        assert all(terms[name].abs().max() < 1e-12 for name in terms.keys() - {'qp kp', 'B'})


def test_gradients_jacobians_and_edges():
    """H(d) over all edges, summed over layers, is the gradient of T5's table. J is a block's
    Jacobian at the last target. With two triggers, edges lead from the query to the later one."""
    model, task, cfg = nano('copy', pe='t5', n_head=2)
    model.requires_grad_(True)
    tokens, targets = task.sample(3, 5, torch.Generator())
    rows, H = probe.gradients_by_layer(model, tokens, targets, probe.edges(task, tokens))
    train.token_losses(model(tokens)[0], targets).sum().backward()
    close(H.sum(dim=0).T, model.blocks[0].attn.pe.table.grad[:13], 1e-6)
    J = probe.jacobians(model, tokens, targets)
    for i, (block, layer) in enumerate(zip(model.blocks, probe.trace(model, tokens))):
        whole = torch.autograd.functional.jacobian(
            lambda x, block=block, layer=layer: block(x, layer.pos, layer.state), layer.stream[:1])
        close(J[i, 0], whole[0, -2, :, 0, -2])  # the last token, EoS, has no target
        values, heads = torch.linalg.svdvals(J[i]), H[i].norm(dim=-1)
        close([rows[i][key] for key in ('least', 'most', 'head', 'first', 'margin')],
              [values.min(), values.max(), heads.argmax() + 1, heads.max(),
               heads.max() - heads.min()], 1e-3)
    close(rows[0]['growth'], rows[0]['margin'] / rows[1]['margin'], 2e-3)
    task = tasks.make('distance')
    tokens, _ = task.sample(200, 12, generator(0))
    b, u, j, d = probe.edges(task, tokens)
    assert (tokens[b, u] == task.query).all()
    assert (tokens[b, j] + tokens[b, j - d] == 2 * task.first_trigger + 1).all()
    assert torch.equal(d // 4 + task.first_class, tokens[:, -1])


def test_cursors_of_two_layers_with_a_copy_branch():
    """Cursors of layer 1 always increment and never jump, as their biases are set. Means are over
    the prompt, and over the answer from "=" on."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, prism_copy='fixed', n_layer=2,
                            prism_layers=[1, 2], dtype=torch.float32, longest=3)
    for block in model.blocks:
        block.attn.pe.alpha.uniform_(0, 2)
    cursors, prism = model.blocks[0].attn.pe.cursors, model.blocks[1].attn.pe
    cursors.gates.W.bias.add_(1000 * torch.eye(4)[1].repeat(2 * cursors.count))  # increment
    cursors.copy.W_stay.bias.fill_(1000)  # no copy
    rows, summary, _ = probe.cursor(model, task, cfg, length=5, n=3)
    found, used = probe.cursors_of(model, probe.problems(task, [5], 3)[5][0]), []
    for row, (c, t) in zip(rows, itertools.product(found, (range(5), range(5, 11)))):
        peak, mode = c['histogram'].max(dim=-1)
        moves = [line[s] - line[s - 1] for line in mode.tolist() for s in t if s > 0]
        steady = moves.count(statistics.mode(moves)) / len(moves)
        means = c['gates']['incr'][:, t].mean(), peak[:, t].mean(), statistics.mean(moves), steady
        close([row[key] for key in ('incr', 'peak', 'moves', 'steady')], means, 6e-4)
        if row['part'] == ('answer' if c['of'] == 'query' else 'prompt'):
            used.append((steady, c['weight']))
        if c['of'] == 'query':
            assert (row['incr'] == row['moves'] == 1) == (row['layer'] == 1)
            assert 'jump' not in row or (row['jump'] > 0) == (row['layer'] == 2)
    steady, weights = np.transpose(used)
    close(summary['steady'], np.average(steady, weights=weights), 1e-4)
    close(found[4]['weight'], (1 - prism.m[0, 0, 0].sigmoid()) * prism.alpha[0, 0, 0], 1e-6)


@pytest.mark.parametrize('kw', [dict(prism_sharpen=False), dict(prism_copy='trained')], ids=str)
def test_kernel_compares_eq_6_with_eq_4(kw):
    """eq6 is half the sum of absolute differences over all displacements, here in a loop."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, longest=3, **kw)
    rows, summary, _ = probe.kernel(model, task, cfg)
    assert summary['rises'] == 4  # for d_pe = 32
    T, start, f = 8, 3, partial(pe.sinusoids, width=32, base=10000, like=torch.ones(1).double())
    tokens = probe.batch(task, cfg.train_lengths, 3, 1)[1]  # abc=abc. and its "="
    for c, row in zip(probe.cursors_of(model, tokens), rows):
        h = c['histogram'][0]
        law, offsets = probe.displacement(c, start + 1).tolist(), torch.arange(-T, T + 1.0).double()
        mean = [(h[t] @ f(offsets) - f(h[t] @ offsets)).norm().item() / 4 for t in range(start, T)]
        close([row['mean'], row['peak']], [statistics.mean(mean), h[start:].amax(1).mean()], 1e-3)
        if 'jump' in c['gates']:
            assert row['eq6'] is None
            continue
        apart = 0
        for d in range(-2 * T, 2 * T + 1):
            eq_6 = sum((h[start, i] * h[-1, i + d]).item() for i in range(17) if 0 <= i + d < 17)
            apart += abs(eq_6 - (law[d + 4] if abs(d) <= 4 else 0)) / 2
        close(row['eq6'], apart, 1e-3)
        assert apart > 0.01


def test_three_axes_solve_equation_7_and_two_axes_equation_12():
    """Where the derivatives of eq. 6 are 0, residuals at each distance, query and key add up to
    ridge times a_d, b_i and c_j. For two axes they have mean 0 in each row and column."""
    W, (i, j) = at_random(2, 9, 9), torch.tril_indices(9, 9)
    a, b, c, fit = probe.three_axes(W, ridge=1e-3)
    rest = (W - fit).tril()
    close(torch.stack([rest.diagonal(-d, 1, 2).sum(dim=-1) for d in range(9)], dim=1), 1e-3 * a)
    close(torch.stack([rest.sum(dim=2), rest.sum(dim=1)]), 1e-3 * torch.stack([b, c]))
    close(fit[:, i, j], a[:, i - j] + b[:, i] + c[:, j])
    x, y = W[0], probe.three_axes(W)[-1][0]
    centred = [torch.cat([z[t, :t + 1] - z[t, :t + 1].mean() for t in range(9)]) for z in (x, y)]
    close(probe.axes_fit(W)[:, 0],
          [np.corrcoef(*pair)[0, 1] for pair in ((x[i, j], y[i, j]), centred)])
    a, b, fit = probe.two_axes(x)
    close(fit, a[:, None] + b)
    close([*(x - fit).mean(dim=0), *(x - fit).mean(dim=1)], [0] * 18)
    model, task, cfg = nano(pe='alibi', n_head=2)
    for block in model.blocks:
        block.attn.qkv.weight[:16] = 0  # queries of 0: only the bias is left
    assert probe.disentangle(model, task, cfg, n=1)[1]['mean_r'] == 1


@pytest.mark.parametrize('kw', [
    dict(pe='rope'), dict(pe='pope', pope_delta='uniform'), dict(pe='rope', attention='mla'),
    dict(pe='rope', rope_fraction=0.5), dict(pe='alibi', rope_heads=1), dict(pe='yarn'),
    dict(pe='pope+alibi')], ids=str)
def test_logits_at_other_distances(kw):
    """logits_at() gives the model's logits at true positions, and fake_logits() at true distances.
    For rope, pope and yarn they are Re sum_c conj(zq) zk e^(-i (t-s) theta) / sqrt(d)."""
    enc, pos = make(**kw).blocks[0].attn.pe, torch.arange(10)
    q, k = at_random(2, 1, enc.cfg.heads, 10, enc.cfg.head_dim)
    layer = types.SimpleNamespace(enc=enc, q=q, k=k, state=None, logits=enc.logits(q, k, pos))
    below = torch.ones(10, 10, dtype=torch.bool).tril()
    close(probe.logits_at(layer, pos, pos)[..., below], layer.logits[..., below])
    close(probe.fake_logits(layer, 7)[:, 7 - pos[:8], pos[:8]], layer.logits[0, :, 7, :8])
    if kw['pe'] in ('rope', 'pope', 'yarn') and 'attention' not in kw:
        logits = rotated_products(*probe.polar(enc, q[0], k[0]), pos) * enc.scale
        close(logits[:, below], layer.logits[0][:, below])


def test_slow_dominating_pairs_and_eq_15():
    """tuples finds the planted pair 8, whose key is constant. Pair 1 also dominates, but is fast.
    In eq. 15 f uses the mean key and g, without a rotation, the deviations from it."""
    model, task, cfg = nano(pe='rope', n_head=1, n_layer=1)
    q = torch.polar(torch.tensor([20.0] + [1] * 6 + [20]), torch.tensor([0.0] * 7 + [2]))
    model.embedding.weight.zero_()[:, 0] = 1  # the same for all tokens
    model.blocks[0].attn.qkv.weight[:32].zero_()[:, 0] = torch.cat(
        [torch.view_as_real(q).flatten(), torch.tensor([1.0, 0]).repeat(8)]).double()
    (row,), summary, _ = probe.tuples(model, task, cfg, n=2)
    assert summary == dict(pairs=1, heads=1, of_heads=1, fixed=0)
    theta = 10 ** -3.5
    found = dict(layer=1, head=1, pair=8, ratio=20, wavelength=2 * math.pi / theta,
                 rotation=cfg.train_len * theta, angle=2, fixed=0)
    assert row == pytest.approx(found, rel=1e-3, abs=1e-3)

    zq, zk = (torch.complex(*at_random(2, 1, 50, 6, seed=seed)) for seed in (0, 1))
    zk[..., 0] += 3
    theta, pos = torch.tensor([0.1] + [1.0] * 5).double(), torch.arange(50)
    pairs = torch.arange(6)[None] == 0
    kbar = zk.mean(dim=1, keepdim=True).expand_as(zk)
    W, own, f = (rotated_products(q, k, theta, pos)
                 for q, k in ((zq, zk), (zq * pairs, zk), (zq * pairs, kbar)))
    g = rotated_products(zq * pairs, torch.polar((zk - kbar).abs(), zk.angle()), 0 * theta, pos)
    found = probe.analytic_fit(torch.cat([W, W]), zq, zk, theta, pairs)  # for head 1 of 2
    lower = np.tril_indices(50)
    close(found[:, 0], [np.corrcoef(x[0][lower], y[0][lower])[0, 1]
                        for x, y in ((own, f + g), (W, own), (W, f + g))])
    assert found[:, 1].isnan().all()


def test_random_phases_are_a_control():
    """A pair's logits fit a sum for all phases if it does not rotate, not if it rotates fast."""
    one, many = torch.ones(2, 12, 1) + 0j, torch.ones(2, 12, 8) + 0j
    close(probe.random_phases(one, one, torch.zeros(1), [11]), torch.ones(2).double(), 1e-6)
    assert (probe.random_phases(many, many, torch.linspace(1, 3, 8), [11, 6]) < 0.7).all()
    assert (probe.random_phases(one, one, torch.tensor([math.pi]), [11]) < 0.99).all()


@pytest.mark.parametrize('kind', probe.KINDS)
def test_perturbed_and_original_have_the_same_targets(kind):
    """Both scores are on targets that did not move; each sequence and layer has its own draw."""
    model, task, cfg = nano('copy', pe='rope', longest=6)
    tokens, targets = probe.batch(task, [6], 0, 5)[1:]
    before = probe.perturbed(model, tokens, targets)
    draw = mock.Mock(return_value=torch.arange(tokens.shape[1]) * (kind != 'position'))
    with mock.patch.multiple(probe, offsets=draw, transposition=draw):  # nothing moves
        still = probe.perturbed(model, tokens, targets, kind, 0.5, 4)
    assert len({call.args[3].initial_seed() for call in draw.mock_calls}) == 5 * 2
    assert probe.perturb_scores(still, before, targets)['output'] == 0
    after = probe.perturbed(model, tokens, targets, kind, 1.0, 4)
    for seed, x in enumerate((before, after)):  # random weights are hardly ever correct
        x[1] = at_random(*targets.shape, seed=seed) > -1
    row, moved = probe.perturb_scores(after, before, targets), after[-1]
    assert moved.any() == (kind == 'text')
    asked = [(i, t) for i, t in (targets != -100).nonzero().tolist() if not moved[i, t + 1]]
    exact = {i: all(after[1][at] for at in asked if at[0] == i) for i, _ in asked}.values()
    values = [[x[at] for at in asked] for x in (after[0], after[1], before[0])]
    close([row[key] for key in ('loss', 'token', 'loss before', 'exact')],
          [np.mean(x) for x in (*values, [*exact])], 2e-4)
    assert row['output'] > 0


def test_stretch():
    """A window over all tokens gives attention's outputs; with the first tokens kept, those of the
    sequence in that window. nearest() agrees with a loop."""
    model, tokens = make(pe='pope+t5'), torch.arange(1, 11)[None]
    layer, other = (probe.trace(model, x)[0] for x in (tokens, tokens[:, [0, 1, 4, 5, 6, 7]]))
    for of, *given in ((layer, 9, 0, 10), (other, 7, 2, 6, 2)):
        found = probe.sliding(layer, torch.tensor(given[:1]), *given[1:])[0]
        close(found, of.y[0, :, -1].flatten())
    normal, later = at_random(60, 5), at_random(3, 5, seed=1) + 1
    xs = normal.tolist()
    own = statistics.median_low(min(math.dist(x, y) for y in xs if y is not x) for x in xs)
    close(probe.nearest(later, normal),
          [min(math.dist(x, y) for y in xs) / own for x in later.tolist()], 1e-6)


def test_a_llama_as_one_of_ours(tmp_path):
    """A trace has the attention and the output that transformers computes, with keys shared between
    heads. --hf and --text replace a run in every probe that accepts a Llama. Texts longer than a
    sliding window are refused."""
    transformers, tokenizers = map(pytest.importorskip, ('transformers', 'tokenizers'))
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=67, max_position_embeddings=64,
                 attn_implementation='eager', initializer_range=0.5, head_dim=12)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **shape, attention_bias=True, rope_parameters=dict(
            rope_type='yarn', rope_theta=500.0, factor=4.0,
            original_max_position_embeddings=16))).eval()
    windowed = transformers.MistralForCausalLM(transformers.MistralConfig(
        **shape, sliding_window=8))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f'w{i}': i for i in range(67)},
                                                             unk_token='w66'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single='w1 $A w2', special_tokens=[('w1', 1), ('w2', 2)])  # begin and end a text
    folder, text = tmp_path / 'net', tmp_path / 'text'
    for path, saved in ((folder, net), (tmp_path / 'windowed', windowed)):
        saved.save_pretrained(path)
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    text.write_text(' '.join(f'w{random.Random(i).randrange(1, 66)}' for i in range(200)))
    model, cfg = probe.load_llama(str(folder), str(text))
    row, = probe.sequences(cfg.the_task, [16], 0, 1)
    with torch.no_grad():
        theirs = net(input_ids=row, output_attentions=True, use_cache=False)
        close(model(row)[0], theirs.logits, 1e-4)
    for layer, attention in zip(probe.trace(model, row), theirs.attentions):
        close(layer.weights, attention, 1e-4)
        z = probe.polar(layer.enc, layer.q[0], layer.k[0])
        logits = rotated_products(*z, torch.arange(16)) * layer.enc.scale * layer.enc.scaling ** 2
        close((logits + pe.causal(logits)).softmax(dim=-1), attention[0], 1e-4)
    where = [f'--hf={folder}', f'--text={text}', f'--out_dir={tmp_path}', '--length=16']
    for function in probe.LLAMA:
        probe.main([function.__name__, *where, *['--l_max=3'] * (function is probe.perturb)])
        assert json.loads((tmp_path / f'probe_{function.__name__}.json').read_text())['summary']
    tokens, targets = cfg.the_task.lay_out([[0, 1], [1, 0, 1, 0, 1]], 5)
    assert tokens.tolist() == [[1, 0, 1, 0, 0], [1, 1, 0, 1, 0]]
    assert targets.tolist() == [[0, 1, -100, -100, -100], [1, 0, 1, 0, -100]]  # 0 is a token
    probe.load_llama(str(path), str(text), 8)
    refused('at 9 tokens, .* changes the logits by', probe.load_llama, str(path), str(text), 9)


# ---- results/tables.py: records, tables, the board in results/README.md, commands ----------------

def write_lines(path, *lines):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def record(exact, seeds='0', **options):
    """A record in which the seeds that did not diverge have these exact scores at 1, 2 and 4."""
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


def test_a_listing_shows_planted_numbers_and_failed_seeds(tmp_path):
    corpus, rare = record({0: [0, 0, 0]}, task='stdlib'), record({0: [0.5, 1, 0.9]}, task='copy')
    corpus['scores'][0]['loss'] = [3.0, 2.0, 2.04]
    rare['n'] = {'1': 2, '4': 300}                         # reach ignores length 1: under 50
    write_lines(tmp_path / 'x.jsonl', record({0: [1, 0.95, 0.5]}, warmup_steps=7),
                record({1: [1, 0.75, 0]}, seeds='1-2', warmup_steps=7),
                record({}, seeds='0-1', pe='nope'),
                corpus, rare, {'probe': 'alignment', 'rows': {}})
    runs = tables.read_runs(tmp_path / 'x.jsonl')['planted']
    _, rope, nope, text, copy = tables.listing(runs)
    assert rope == 'parity | rope | 97.5, 87.5 | 50.0, 0.0 | 2, 1 | 1 diverged'
    assert nope == 'parity | nope |  |  |  | 2 diverged'   # pe implies warmup_steps
    assert text == 'stdlib | rope | 12.18 | 7.69 | 0'
    assert copy == 'copy | rope | 99.0 | 90.0 | 2'
    assert '| 97.5, 87.5 | 95.0, 75.0 |' in [*tables.listing(runs, length=2)][1]


def test_the_board_trains_what_is_missing(tmp_path, monkeypatch, capsys):
    """On a board of one column in a temporary folder."""
    os.symlink(tables.ROOT / 'train.py', tmp_path / 'train.py')
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results/board.jsonl').touch()
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    monkeypatch.setattr(tables, 'RATES', '1e-3,2e-3')
    monkeypatch.setattr(tables, 'SHAPE', '--d_model=8 --n_layer=1 --batch_size=8 --n_eval=8')
    monkeypatch.setattr(tables, 'COLUMNS', {'tiny': '1 1-2 1-4 --task=parity'})
    stale = tmp_path / 'out/board/tiny/nope,10/ckpt.pt'    # replaced, as it has no record
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = ['board', '--minutes=1', '--task=tiny', '--pe=nope']
    tables.main(command)
    first = capsys.readouterr().out
    assert first.splitlines()[2] == '| encoding | tiny (1-2) |' and '\n| **nope** | ' in first
    lines = [json.loads(x) for x in (tmp_path / 'out/board.jsonl').read_text().splitlines()]
    assert all(x['config']['seeds'] == '0-4' and x['lengths'] == '1-4' for x in lines)
    assert [x['config']['max_steps'] for x in lines] == [10, 30, 90]       # until it is fitted
    assert len({x['config'].get('lr') for x in lines}) == 1
    monkeypatch.setattr(tables, 'run_train', None)         # nothing is left to train
    tables.main(command)
    assert capsys.readouterr().out == first
    refused("unknown task of the board 'tyni'", tables.main, ['board', '--task=tyni'])


def test_a_cell_trains_at_the_rate_that_was_best(monkeypatch, tmp_path):
    trained, point = [], dict(eval={1: dict(exact=0.5, token=1)})
    for seeds, merit in ((1, ()), (2, (0, 0.5, 1))):       # a rate loses if a seed diverges
        write_lines(tmp_path / 'log.jsonl', dict(loss=1), *[point] * seeds)
        assert tables.validation(tmp_path) == merit
    monkeypatch.setattr(tables, 'run_train', lambda folder, *flags: trained.append(flags))
    monkeypatch.setattr(tables, 'validation', lambda folder: (0, folder.endswith('lr=0.002'), 0.5))
    tables.board(tables.Options(pe='nope', task='stdlib', records='out/none.jsonl'))
    assert '--max_steps=800' in trained[0] and {'--lr=2e-3', '--max_steps=800'} <= {*trained[1]}


def test_the_page_shows_the_board_of_its_records():
    text = tables.PAGE.read_text()
    assert tables.refreshed(text.replace('<!-- end', 'old\n<!-- end')) == text, 'refresh it'


def test_a_cell_of_the_board(tmp_path):
    """A cell: median of seeds (least to most), in italics if unfitted. Floors fit sampled tasks."""
    write_lines(tmp_path / 'x.jsonl', record({0: [1, 1, 1]}), record({1: [1, 0.5, 0]}, seeds='1-2'))
    run, = tables.read_runs(tmp_path / 'x.jsonl')['planted']
    assert tables.board_cell(run) == '*0.5 (0 to 2); 100 %*'
    run.failed.clear()
    run.scores[1]['exact'] = [1, 1, 1]
    assert tables.board_cell(run) == '2; 100 %' and tables.board_cell(None) == ''
    cells = {(x, 'mqar'): tables.Run(**vars(run) | {'hardware': x[0]}) for x in ('a1', 'a2', 'b1')}
    lines = [*tables.board_table(cells)]
    assert 'trained on b, others on a' in lines[0]
    assert lines[-2:] == ['| **b1** | 2; 100 %† |', '| floor | 85 % |']  # bold: not published
    assert [*tables.floor('polynomial', [2], 'last')] == pytest.approx([0.36], abs=0.05)
    rows = train.tasks.make('mqar:keys=2:words=8').sample(2000, 9, generator(0))[0].tolist()
    right = []                                             # two answers for each problem
    for row in rows:
        latest = {}                                        # the values not yet recalled, in order
        for key, value in zip(row[::2], row[1::2]):
            if key in latest:
                right.append([*latest.values()][-1] == latest.pop(key))
            elif key <= 8:                                 # keys: 1 to 8
                latest[key] = value
    both = np.reshape(right, (-1, 2)).all(1).mean()
    assert [both] == pytest.approx([*tables.floor('mqar', [9], 'exact')], abs=0.03)
    assert [np.mean(right)] == pytest.approx([*tables.floor('mqar', [9], 'token')], abs=0.02)
    assert tables.find_cells(0.5, [('rope', 'stdlib')], 'out/none.jsonl') == {}      # no such file


def test_the_headline_figure(tmp_path):
    pytest.importorskip('matplotlib')
    cells = itertools.product(tables.ROWS, tables.PANELS)
    tables.draw(tables.find_cells(0.5, cells, 'results/board.jsonl'), tmp_path / 'x.png')
    assert (tmp_path / 'x.png').stat().st_size > 100_000   # without curves: 47,000


def test_commands_name_options_and_configs_that_exist():
    for line in (tables.ROOT / 'results/commands.sh').read_text().splitlines():
        if line.startswith('    run '):
            _, (_, _, *configs) = train.parse(train.Config, shlex.split(line, comments=True))
            assert all((tables.ROOT / path).exists() for path in configs if path[0] != '$'), line


# ---- all programs, and the code in README.md -----------------------------------------------------

def test_every_program_has_help_and_lists_what_it_has():
    def first_words(*argv):
        run = python(*argv)
        assert run.returncode == 0 and run.stdout and not run.stderr
        return {line.split(' ')[0] for line in run.stdout.splitlines()}
    for program in ('kernels.py', 'pe.py', 'probe.py', 'tasks.py', 'train.py'):
        first_words(program, '--help')
    assert pe.ENCODINGS.keys() <= first_words('pe.py')
    assert tasks.TASKS.keys() <= first_words('tasks.py')


def test_readme_code_runs(tmp_path, capsys):
    """The block with PoPE in another model, and the one that loads a trained model."""
    text, names = (tables.ROOT / 'README.md').read_text('utf-8'), {}
    in_a_model, on_a_run = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    exec(in_a_model, names)
    assert names['y'].shape == (8, 4, 100, 16) and names['y'].isfinite().all()
    run = python('train.py', *flags(n_layer=2, out_dir=tmp_path, pe='rope'))
    assert run.returncode == 0, run.stderr
    exec(on_a_run.replace('out/parity_rope', str(tmp_path)), {'torch': torch})
    assert capsys.readouterr().out.startswith('BoS ')
