"""The contracts of the code: read a test to learn what a part of nanoPE promises.

    python -m pytest test_all.py            a few minutes on a CPU (pip install pytest)
    python -m pytest test_all.py -k rope    only the tests whose name contains rope

What all encodings must satisfy is tested for each of VARIANTS, which includes each encoding that
you register in pe.ENCODINGS.
"""
import contextlib
import doctest
import inspect
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import types
import zlib
from collections import Counter
from functools import partial
from unittest import mock

os.environ.setdefault('OMP_NUM_THREADS', '1')  # small tensors; also for programs that tests run
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kernels
import pe
import probe
import tasks
import train
from assets import vectors
from model import ModelConfig, Transformer, check
from results import tables

TRAIN_LEN = 12
FULL, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
CPU, CUDA = torch.device('cpu'), torch.cuda.is_available()
DEVICE = 'cuda' if CUDA else 'cpu'
THETA = 10.0 ** -torch.arange(4).double()   # RoPE's theta_c = 10000^(-2c/d) at d = 8

# Every encoding, sums, options that change what an encoding computes, and wrappers of an encoding
VARIANTS = {name: dict(pe=name) for name in (*pe.ENCODINGS, 'pope+vipe', 'vipe+vrope',
                                             'pope+t5+fox', 'rope+ape')} | {
    'pope plain': dict(pe='pope', pope_delta='none', pope_softplus=False),
    'pope half': dict(pe='pope', pope_delta='uniform', pope_frequencies='half'),
    'vipe logits only': dict(pe='vipe', vipe_value=False, vipe_s='global', eval_len=40),
    'vipe value only': dict(pe='vipe', vipe_logn=False, vipe_u=False, vipe_s='one', vipe_d_p=5),
    'prism copy': dict(pe='prism', prism_copy='fixed', prism_absolute=True, prism_norm='unit'),
    'prism copy trained': dict(pe='prism', prism_copy='trained', prism_recurrent='norm'),
    'prism two layers': dict(pe='prism', prism_layers=[1, 2], prism_norm='scale'),
    'prism means': dict(pe='prism+rope', prism_reset=False, prism_superpose=False,
                        prism_sharpen=False, prism_recurrent='penalty'),
    'alibi+stickbreaking on 2 heads': dict(pe='alibi+stickbreaking', rope_heads=2),
    'prism+vipe on 3 heads': dict(pe='prism+vipe', rope_heads=3),
    'mla rope on 1 head': dict(pe='rope', attention='mla', rope_heads=1)}
variants = pytest.mark.parametrize('kw', VARIANTS.values(), ids=VARIANTS)
generator = partial(train.generator, 'cpu')     # generator(seed): random numbers


# ---- helpers -------------------------------------------------------------------------------------

def noisy(module, by=1.0):
    """Add noise to every parameter, so that none is at its initial value; return the module."""
    for p in module.parameters():
        p.data += torch.randn_like(p) * by
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


def check_logits(enc, score, state=None, x=None, T=10, what='logits [b, h, t, s]'):
    """Assert that logits of qkv() are score(q_t, k_s, t, s, head, sequence), -inf where masked."""
    __tracebackhide__ = True                               # as in close()
    q, k, _, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
    logits = torch.full_like(q @ k.mT, -math.inf)
    with torch.no_grad():
        for b, h, t in itertools.product(*map(range, q.shape[:3])):
            for s in range(t + 1 if enc.cfg.causal else T - 1):
                logits[b, h, t, s] = score(q[b, h, t], k[b, h, s], t, s, h, b)
        close(enc.logits(q, k, pos, state, x), logits, what=f'{type(enc).__name__}: {what}')


def close(a, b, tol=1e-10, what='values'):
    """Assert that a and b (tensors, lists or numbers) have one shape and agree to tol. If not, one
    line says what differs, and where most."""
    def message(says):
        return f'{what}: ' + ' '.join(says.partition('\nGreatest relative')[0].split())

    __tracebackhide__ = True                               # pytest names the caller's line
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=tol, atol=tol, msg=message)


def refused(says, call, *args, **kw):
    """Assert that call(*args, **kw) raises a UserError of one line that matches `says`."""
    with pytest.raises(pe.UserError, match=says) as error:
        call(*args, **kw)
    assert '\n' not in str(error.value)



TINY = dict(d_model=16, n_layer=1, batch_size=8, max_steps=12, eval_interval=4, log_interval=2,
            train_lengths='1-3', eval_lengths='1-5', n_eval=8, n_test=16, warmup_steps=2,
            device='cpu')


def flags(**kw):
    """TINY, a run of a few seconds, updated by the given options, as command-line arguments."""
    return [f'--{key}={value}' for key, value in {**TINY, **kw}.items()]


def python(*argv, **kw):
    """Run a program of the repository; return its returncode, stdout and stderr."""
    return subprocess.run([sys.executable, *argv], cwd=tables.ROOT, capture_output=True, text=True,
                          **kw)


# ---- pe.py: each encoding against its equation, in loops and in float64 --------------------------

def test_ape_and_tables_add_vectors():
    """shifted_ape shifts only in training; beyond its end, a table repeats its last row."""
    ape, shifted_ape = (encoding(name, heads=1, max_shift=50) for name in ('ape', 'shifted_ape'))
    pos, x = torch.arange(9), torch.randn(3000, 9, 8).double()
    angle = torch.arange(60)[:, None] * THETA
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)
    for enc in ape, shifted_ape:
        close(enc.embed(x, pos) - x, table[:9].expand(3000, 9, 8), what='vectors [b, t, channel]')
    shifted = shifted_ape.train().embed(x, pos) - x
    m = torch.cdist(shifted[:, 0], table).argmin(dim=-1)
    close(shifted, table[m[:, None] + pos])
    counts = m.bincount()
    assert len(counts) == 51 and 25 < counts.min() and counts.max() < 100
    for name, std in (('learned', 0.02), ('random', 0.5 ** 0.5)):
        enc, pos = encoding(name, max_len=500), torch.arange(504)
        close(enc.embed(torch.zeros(1, 504, 16).double(), pos)[0], enc.table[pos.clamp(max=499)])
        assert abs(enc.table.std() / std - 1) < 0.05


@pytest.mark.parametrize('p, rotates', [(1.0, [1, 1, 1, 1]), (0.3, [1, 1, 0, 0])])
def test_rope(p, rotates):
    """Pair c is rotated by t 10000^(-2c/d). With rope_fraction p, only the fastest ceil(p D/2).
    With rope_pairs=half, pairs are those of Llama. GPT-NeoX's frequencies by another base."""
    theta, (q, _, _, t) = THETA * torch.tensor(rotates), qkv()
    enc = encoding('rope', rope_fraction=p)
    close(enc.theta(q), theta, what='RoPE.theta')
    pairs = torch.view_as_complex(q.unflatten(-1, (4, 2))) * torch.exp(1j * t[:, None] * theta)
    close(pe.rotate(q, t[:, None] * theta), torch.view_as_real(pairs).flatten(-2), what='rotate')
    check_logits(enc, lambda q, k, t, s, *_: rotated(q, k, (s - t) * theta))
    n = sum(rotates)                                        # pairs (c, c + n), then the others
    adjacent = [x for c in range(n) for x in (c, c + n)] + [*range(2 * n, 8)]
    check_logits(encoding('rope', rope_fraction=p, rope_pairs='half'), lambda q, k, t, s, *_:
                 rotated(q[adjacent], k[adjacent], (s - t) * theta))
    neox = encoding('rope', rope_fraction=0.25, rope_base=1e4 ** 4, head_dim=32)
    close(neox.theta(torch.zeros(32).double())[:5], [*1e4 ** -(torch.arange(4) / 4).double(), 0])


@pytest.mark.parametrize('T, train_len, d, base', [
    (10, 12, 8, 1e4), (1280, 128, 16, 1e4), (3000, 1000, 64, 1e4), (200, 100, 8, 4)])
def test_yarn(T, train_len, d, base):
    """RoPE with scaled logits; frequencies under 1 rotation in train_len are divided by s."""
    ratio, c = max(1, T / train_len), torch.arange(d // 2).double()
    fast, slow = (d * math.log(train_len / (math.tau * n)) / (2 * math.log(base)) for n in (32, 1))
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
    w = ((c - low) / (high - low)).clamp(0, 1)
    theta = base ** (-2 * c / d) * (1 - w + w / ratio)
    if d == 16:  # from transformers 5.23, _compute_yarn_parameters
        close(theta, [1, 0.221359, 0.04, 0.003162, 0.001, 0.000316, 0.0001, 0.000032], 1e-6)
    enc = encoding('yarn', head_dim=d, train_len=train_len, rope_base=base)
    temperature = (0.1 * math.log(ratio) + 1) ** 2
    check_logits(enc, lambda q, k, t, s, *_: temperature * rotated(q, k, (s - t) * theta),
                 enc.state(None, torch.arange(10), T))


def test_pi_and_ntk_and_their_scale():
    """theta_c / s, and base s^(d/(d-2)), at s = 7 as in transformers 5.24 (`dynamic`, factor 2, 512
    tokens after 128). s is fixed by rope_scale, or by training that went on at a greater length."""
    c, L = torch.arange(4).double(), 6
    for name, factor in ('pi', lambda s: 1 / s), ('ntk', lambda s: s ** (-c / 3)):
        for kw, s in ((dict(train_len=L), 10 / L), (dict(rope_scale=3.0), 3),
                      (dict(train_len=12), 1), (dict(train_len=24, first_len=L), 4)):
            enc = encoding(name, **kw)
            check_logits(enc, lambda q, k, t, at, *_, s=s, factor=factor: rotated(
                q, k, (at - t) * THETA * factor(s)))
    close(encoding('ntk', head_dim=16).theta(torch.zeros(16).double(), 7.0), [
        1, 0.2394814, 0.0573513, 0.0137346, 0.0032892, 0.0007877, 0.0001886, 0.0000452], 1e-6)
    refused('at least 1', encoding, 'pi', rope_scale=0.5)


def test_every_third_layer_without_rope():
    layers = pe.build(pe.PEConfig(rope_skip=3, n_layer=6))
    assert [bool(enc.theta(torch.zeros(16)).any()) for enc in layers] == [True, True, False] * 2


def test_path():
    """logit_ts = q_t^T H_t ... H_(s+1) k_s / sqrt(d), H_j = 1 - beta_j w_j w_j^T, in a loop."""
    enc, x = noisy(encoding('path')), at_random(2, 10, 16)
    w, beta = enc.w(x).view(2, 10, 2, 8), 2 * torch.sigmoid(enc.beta(x))

    def score(q, k, t, s, h, b):
        for j in range(s + 1, t + 1):
            unit = w[b, j, h] / w[b, j, h].norm()
            k = k - beta[b, j, h] * unit * (unit @ k)
        return content(q, k)
    check_logits(enc, score, x=x)


def test_ssmax():
    """Logits times s_h log(t + 1), initially 1 / log(train_len)."""
    enc = encoding('rope+ssmax', train_len=50)
    close(enc.parts[1].s.flatten(), [1 / math.log(50)] * 2, 1e-6)
    noisy(enc)
    check_logits(enc, lambda q, k, t, s, h, b: enc.parts[1].s[h, 0, 0] * math.log(t + 1) * rotated(
        q, k, (s - t) * THETA))


@pytest.mark.parametrize('delta, positive, number', [
    ('zero', True, 'all'), ('uniform', False, 'all'), ('none', True, 'half')])
def test_pope(delta, positive, number):
    """The logit has magnitudes softplus(q), softplus(k) and phases (s - t) theta_c + delta_c."""
    enc = encoding('pope', pope_delta=delta, pope_softplus=positive, pope_frequencies=number)
    if delta != 'none':
        low = -2 * math.pi if delta == 'uniform' else 0
        assert low <= enc.delta.min() <= low + 1 and -1 <= enc.delta.max() <= 0
    noisy(enc)
    c = torch.arange(8) if number == 'all' else torch.tensor([0, 0, 2, 2, 4, 4, 6, 6])
    theta = 10000 ** (-c.double() / 8)
    close(enc.theta(qkv()[0]), theta, what='PoPE.theta')

    def score(q, k, t, s, h, b):
        mu = F.softplus(q) * F.softplus(k) if positive else q * k
        phase = 0 if delta == 'none' else enc.delta[h]
        return (mu * ((s - t) * theta + phase).cos()).sum() / math.sqrt(8)
    check_logits(enc, score)


def test_alibi_and_t5_add_a_bias():
    """The slopes for 12 heads are those of BLOOM and MPT; T5's buckets begin as published. Without
    a causal mask ALiBi takes |t - s|, and T5 has half of its buckets for keys after the query."""
    for causal in True, False:
        alibi, (q, k, _, pos) = encoding('alibi', causal=causal), qkv()
        bias = alibi.logits(0 * q, k, pos)
        assert (bias <= 0).all(), 'ALiBi.bias has the wrong sign: the logits of far keys must fall'
        check_logits(alibi, lambda q, k, t, s, h, b, alibi=alibi:
                     content(q, k) - alibi.slope('cpu')[h] * abs(t - s), what='bias -m_h |t - s|')
    slopes = [2.0 ** -h for h in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]
    for heads, right in (2, slopes[3:8:4]), (8, slopes[:8]), (12, slopes):
        close(encoding('alibi', heads=heads).slope('cpu'), right, 1e-6, f'slopes of {heads} heads')
    for n, far, starts in ((32, 128, [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77,
                                      87, 99, 113]), (7, 20, [0, 1, 2, 3, 5, 8, 13])):
        d, t5 = torch.arange(1000), encoding('t5', t5_buckets=n, t5_max_distance=far)
        right = torch.bucketize(d, torch.tensor(starts), right=True) - 1
        close(t5.bucket(d), right, what=f'T5.bucket of distances 0, 1, .. with {n} buckets')
    for causal in True, False:
        t5 = noisy(encoding('t5', causal=causal))
        check_logits(t5, lambda q, k, t, s, h, b, t5=t5: content(q, k) + t5.table[
            t5.bucket(torch.tensor(abs(t - s))) + 16 * (s > t), h], T=25)
    t5.table.data[:, 0] = torch.arange(32)
    keys = t5.bias(t5.at(*at_random(2, 1, 2, 201, 8), torch.arange(201)))[0, 0]     # query 0
    close(keys[[0, 1, 2, 3, 8, 16, 200]], [0, 17, 18, 19, 24, 26, 31])      # from transformers 5.23


@pytest.mark.parametrize('method, wrong, says', [
    ('bias', lambda x: -x, 'ALiBi.bias has the wrong sign'), ('bias', lambda x: x - 1, 'bias -m_h'),
    ('slope', lambda x: x / 2, r'slopes of 2 heads: .* difference: 0.03125 at index \(0,\)')])
def test_a_grader_says_what_differs(method, wrong, says, monkeypatch):
    right = getattr(pe.ALiBi, method)
    monkeypatch.setattr(pe.ALiBi, method, lambda self, x: wrong(right(self, x)))
    with pytest.raises(AssertionError, match=says):
        test_alibi_and_t5_add_a_bias()


def test_fire_and_fox_add_a_bias():
    """FIRE: MLP(psi(t - s) / psi(max(t, L))), psi(x) = log(c x + 1). FoX: a sum of log gates."""
    fire = noisy(encoding('fire', train_len=12))
    fire.c.data.fill_(-0.3)  # |c| is used
    fire.L.data.fill_(-1.2)  # in units of 12 / 4: |L| = 3.6
    W_1, b_1, W_2, b_2 = fire.mlp.parameters()

    def score(q, k, t, s, h, b):
        x = math.log(0.3 * (t - s) + 1) / (math.log(0.3 * max(t, 3.6) + 1) + 1e-6)
        return content(q, k) + W_2[h] @ (W_1[:, 0] * x + b_1).relu() + b_2[h]
    check_logits(fire, score)

    fox, x = encoding('fox'), torch.randn(2, 10, 16).double()
    log_f = F.logsigmoid(fox.gate(x))  # (B, T, H)
    check_logits(fox, lambda q, k, t, s, h, b: content(q, k) + log_f[b, s + 1:t + 1, h].sum(), x=x)
    q, x = torch.zeros(1, 2, 1024, 8).bfloat16(), torch.zeros(1, 1024, 16).bfloat16()
    fox.bfloat16().gate.bias.data.zero_()
    bias = fox.logits(q, q, torch.arange(1024), None, x)[0, 0, -1, -2]  # a difference of large sums
    close(bias.detach(), F.logsigmoid(x[0, 0, 0]).double(), 0.01)


def test_stickbreaking_replaces_the_softmax():
    """A key takes the fraction sigmoid(z) of what the keys between it and the query have left."""
    q, k, v, pos = qkv()
    share = torch.sigmoid(q @ k.mT / math.sqrt(8))
    alpha = torch.zeros_like(share)
    for s, t in itertools.combinations(range(10), 2):
        alpha[..., t, s] = share[..., t, s] * (1 - share[..., t, s + 1:t]).prod(dim=-1)
    for name in ('stickbreaking', 'nope+stickbreaking'):
        close(encoding(name).attend(q, k, v, pos), alpha @ v)


@pytest.mark.parametrize('train_len, total_len', [(6, None), (6, 30), (12, None)])
@pytest.mark.parametrize('kw', [
    dict(), dict(vipe_s='one'), dict(vipe_s='global', eval_len=48), dict(vipe_u=False),
    dict(vipe_logn=False), dict(vipe_value=False)], ids=str)
def test_vipe(kw, train_len, total_len):
    """Logits are ViPE's eq. 7; outputs are eq. 8, averages of [v_i ; p_(n-i)] with p linear."""
    enc = noisy(encoding('vipe', train_len=train_len, vipe_d_p=3, **kw), 0.3)
    s = max(1, (total_len or 10) / train_len)
    if s > 1 and 'vipe_s' in kw:
        s = {'one': 1, 'global': 48 / train_len}[kw['vipe_s']]

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
    close(enc.attend(q, k, v, pos, state), expected, what='outputs, from value() and out()')


def test_vrope_and_pope_beside_vipe():
    """VRoPE rotates values but not ViPE's code; ViPE's factor 1 + <u, k> is of the raw k."""
    q, k, v, pos = qkv()
    enc = encoding('vrope')
    alpha = enc.logits(q, k, pos).softmax(-1)
    turn = torch.exp(1j * (pos - pos[:, None])[..., None] * THETA)  # (t, s, D/2)
    pairs = torch.view_as_complex(v.unflatten(-1, (4, 2)))  # (B, H, s, D/2)
    expected = torch.einsum('bhts,tsc,bhsc->bhtc', alpha + 0j, turn, pairs)
    close(enc.attend(q, k, v, pos), torch.view_as_real(expected).flatten(-2))
    both, vipe = (encoding(name).attend(q, k, v, pos) for name in ('vipe+vrope', 'vipe'))
    close(both[..., 8:], vipe[..., 8:])

    enc = noisy(encoding('vipe+pope', train_len=20))       # the order of names does not matter
    vipe, pope = enc.parts
    polar = pope.logits(q, k, pos)
    check_logits(enc, lambda q, k, t, s, h, b:
                 math.log(t + 1) * (1 + vipe.u[h] @ k) * polar[b, h, t, s])
    calls = []                                             # out() undoes value() in reverse order
    for part in enc.parts:
        part.out = lambda y, at, part=part: calls.append(part) or y
    enc.attend(q, k, v, pos)
    assert calls == [pope, vipe]


# ---- pe.py: PRISM's cursors ----------------------------------------------------------------------

@pytest.mark.parametrize('copy', [False, True])
def test_cursor_histogram_is_the_sum_over_all_paths(copy):
    """Without sharpening a cursor walks at random: a reset, then +1, -1 or 0, then a jump."""
    T = 6
    reset, step, _, _, jump = (
        x.detach().double() for x in kernels.sample_inputs('cursor_scan', 1, 1, T, 1))
    table = torch.eye(2 * T + 5).double()   # makes the scan return histograms over -T-2..T+2
    h, chances = pe.cursor_scan(reset, step, None, table, jump if copy else None)[0, 0], {0: 1.0}
    for t in range(T):
        before, chances = chances, Counter()    # {offset: probability}
        p_reset, jumps = reset[0, 0, t], jump[0, 0, t] if copy else [0] * T + [1]
        for offset, p in before.items():
            for start, p_start in (0, p_reset), (offset, 1 - p_reset):
                for move, p_move in zip((1, -1, 0), step[0, 0, t]):
                    chances[start + move] += p * p_start * p_move * jumps[-1]
        for k in range(t + 1):
            chances[k] += jumps[k]
        close(h[t], [chances[d] for d in range(-T - 2, T + 3)], 1e-6)


def test_sharpening_multiplies_exponents():
    """n sharpenings by gamma equal one by gamma^n (PRISM A.2.1). A large gamma leaves one bin."""
    first, keep = torch.tensor([0.5, 0.2, 0.3]).double(), torch.tensor([0.0, 0.0, 1.0]).double()

    def scan(step, gamma):
        """Histograms over -4..4 after each of 4 steps: the first as given, then three of `keep`."""
        steps = torch.stack([step, keep, keep, keep])[None, None]
        return pe.cursor_scan(0 * steps[..., 0], steps, steps.new_tensor([gamma]),
                              torch.eye(9).double())[0, 0]
    for n, h in enumerate(scan(first, 1.7), 1):
        p = first ** 1.7 ** n
        close(h[[5, 3, 4]], p / p.sum(), 1e-5)  # eps = 1e-8 adds to every bin
    close(scan(first, 1e4)[-1], torch.eye(9)[5], 1e-6)
    h = scan(keep, 0.125)[0]  # empty neighbours get eps^(1/8) = 0.1
    close(h[3:6], torch.tensor([0.1, 1.0, 0.1]) / 1.2, 1e-6)


def prism(layer=0, **kw):
    """The encoding of a layer of a small model with 3 cursors per head, of width d_pe = 4."""
    return make(pe='prism', prism_cursors=3, prism_d_pe=4, **kw).blocks[layer].attn.pe


def test_prism_scores_are_eq_9():
    """In each layer; Algorithm 3, prism_norm, and without superposition f of the mean offset."""
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
    close(scale, none * (4 / (4 * 4 / 2)) ** 0.5)
    close(unit, none / none.norm(dim=-1, keepdim=True) * 4 ** 0.5)

    enc = prism(prism_reset=False, prism_superpose=False, prism_sharpen=False)
    step = enc.cursors.actions(x)[1]
    mean = (step[..., 0] - step[..., 1]).cumsum(dim=-1)  # (B, 2 layers H cursors, T)
    state = enc.state(x, pos).unflatten(-1, (3, 4)).movedim(2, 0).transpose(-3, -2)
    close(state.flatten(1, 4), pe.sinusoids(mean, 4, 10000.0, x))


def test_prism_copies_by_hand():
    """Every fifth query cursor can jump; 'fixed': its key cursor counts tokens from -1."""
    cursors = prism(prism_copy='fixed', n_layer=1).cursors
    x, table = torch.randn(2, 9, 32).double(), torch.eye(19).double()
    reset, step, copy = cursors.actions(x)
    assert torch.equal(copy[..., :-1] > 0, torch.ones(2, 3, 9, 9).tril() > 0)
    h = cursors.scan(x, table)
    for c in range(24):  # scans each cursor alone
        gamma = 1 + F.softplus(cursors.g[c:c + 1])
        jump = copy[:, [c // 5]] if c in (0, 5, 10) else None
        close(h[:, [c]], pe.cursor_scan(reset[:, [c]], step[:, [c]], gamma, table, jump))
    close(h[:, 12::5], torch.eye(19)[8:17].expand(2, 3, 9, 19), 1e-6)     # offsets -1..7


def test_prism_gates():
    """The GRU equals PyTorch's and reads norm(x) / 2; starting values; prism_recurrent."""
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

    gates = encoding('prism', head_dim=16, prism_recurrent='orthogonal').cursors.gates
    gates(x)[0].sum().backward()
    for p in gates.parameters():
        p.data -= p.grad
    close(gates.W_recurrent().T @ gates.W_recurrent(), torch.eye(100), 1e-5)
    gates = prism(prism_recurrent='norm').cursors.gates
    close(gates.W_recurrent().norm(), gates.s.abs() * 100 ** 0.5)
    drawn, tokens = make(pe='prism', prism_recurrent='penalty'), torch.randint(11, (4, 9))
    excess = drawn.train()(tokens, tokens)[1] - drawn.eval()(tokens, tokens)[1]
    W = drawn.blocks[0].attn.pe.cursors.gates.W_h.weight
    close(excess, 1e-3 * (W.T @ W - torch.eye(100)).square().sum(), 1e-8)


# ---- the contract of every encoding, which yours must satisfy, too -------------------------------

@variants
def test_attend_is_softmax_of_logits_times_value(kw):
    """attend(), the fast path, equals mix(weigh(logits)); also with a cache and its own state."""
    one, enc = (block.attn.pe for block in make(**kw).blocks)
    for T in (TRAIN_LEN, 2 * TRAIN_LEN):
        q, k, v, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
        x = torch.randn(2, T, 32, dtype=torch.float64)
        state = enc.restate(x, pos, one.state(x, pos))
        whole, logits = enc.attend(q, k, v, pos, state, x), enc.logits(q, k, pos, state, x)
        for first, end in (0, T), (T - 3, T), (0, 1), (5, 6):
            rows, keys = slice(first, end), slice(end)      # keys before `first` are in the cache
            so_far = x[:, keys], pos[keys]
            known_states = [enc.restate(*so_far, one.state(*so_far, T))]
            if end == T or 'prism' not in kw['pe']:         # it must have a state for each key
                known_states.append(state)
            for known in known_states:
                here = pos[keys], known, x[:, keys]
                some = enc.logits(q[:, :, rows], k[:, :, keys], *here)
                case = f'queries {first} to {end} of {T}, earlier keys in a cache: '
                close(some, logits[:, :, rows, keys], what=case + 'logits')
                close(enc.mix(enc.weigh(some), v[:, :, keys], *here), whole[:, :, rows],
                      what=case + 'mix(weigh(logits)) against attend() of all')
                close(enc.attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], *here),
                      whole[:, :, rows], what=case + 'attend()')


@variants
def test_causal_and_right_at_other_positions(kw):
    """A prefix or a row alone gives the same outputs, as do rows with positions of their own."""
    model, tokens = make(**kw), torch.randint(11, (3, 150))
    logits = model(tokens)[0]
    for t in (1, 7, 19, 149):
        close(model(tokens[:, :t], total_len=150)[0], logits[:, :t],
              what=f'{t} tokens alone (later ones are visible, or something depends on T)')
    close(model(tokens[1:2])[0], logits[1:2], what='a row alone (rows of a batch are mixed)')

    tokens = tokens[:1, :14].expand(3, -1)
    pos = torch.stack([torch.arange(14), torch.arange(14) + 7, torch.rand(14).cumsum(0)])
    logits = model(tokens, pos=pos)[0]
    for given, expected in zip((None, *pos[1:]), logits, strict=True):    # by default 0..T-1
        close(model(tokens[:1], pos=given)[0], expected[None])
    raw = make(**kw)
    for part in raw.modules():
        part.shift_invariant = False                       # at() passes positions as they are
    same = torch.allclose(logits[0], raw(tokens, pos=pos)[0][1])
    assert same == model.blocks[0].attn.pe.shift_invariant, f'unchanged by a shift of 7: {same}'
    if same:
        close(model(tokens[:1], pos=torch.arange(14) + 2 ** 40)[0], logits[:1])


@variants
def test_an_encoder_sees_all_but_the_answer(kw):
    """causal=False: a late word changes early outputs; the last token, the class, changes none."""
    if any(pe.ENCODINGS[name].needs_causal for name in kw['pe'].split('+')):
        return refused('requires a causal mask', make, causal=False, **kw)
    model = make(causal=False, **kw)
    tokens = torch.randint(11, (3, 12))
    seen, place = model(tokens)[0], torch.arange(12)
    late, last = (tokens.where(place != t, (tokens + 1) % 11) for t in (10, 11))
    assert not torch.isclose(model(late)[0][:, 9], seen[:, 9], rtol=0, atol=1e-12).all()
    assert torch.equal(model(last)[0][:, :11], seen[:, :11])
    model.blocks[0].attn.tap_logits.register_forward_hook(lambda *_: None)
    close(model(tokens)[0], seen)  # the same if logits are stored


@variants
@torch.no_grad()
def test_hooks_return_their_shapes_and_keep_their_inputs(kw):
    """In a float64 model nothing is in half precision, in which distances from 257 on are wrong."""
    class Exact(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            assert getattr(y, 'dtype', FULL) not in (BF16, HALF), function
            return y
    model = make(**kw)
    check(model.cfg)
    with Exact():
        model(torch.randint(11, (2, 7)))


@variants
def test_gradient_reaches_every_parameter(kw):
    model, tokens = make(**kw).train(), torch.randint(11, (3, TRAIN_LEN))
    model(tokens, tokens)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@variants
def test_loaded_models_give_the_same_logits_and_rounded_ones_stay_near(kw):
    """A model built on the meta device loads weights; 70 tokens are beyond tables of 64 rows."""
    model, tokens = make(**kw), torch.randint(11, (2, 70))
    with torch.device('meta'):
        other = Transformer(model.cfg).double().eval()
    other.to_empty(device='cpu').load_state_dict(model.state_dict())
    close(other(tokens)[0], model(tokens)[0], what='a model that loaded the weights')
    tokens = tokens[:, :3 * TRAIN_LEN]
    exact = model(tokens)[0]
    for dtype, autocast, tol in ((FULL, False, 1e-5), (FULL, True, 0.15), (BF16, False, 0.15)):
        with torch.autocast('cpu', BF16, enabled=autocast):
            error = model.to(dtype)(tokens)[0].double() - exact
        assert error.abs().max() < tol * exact.abs().max()


def test_some_attention_stays_in_float32():
    """Autocast changes no output. In bfloat16 ViPE's mean distances t / 2 are summed in float32."""
    q, k, v, pos = (z.float() for z in qkv())
    enc = encoding('rope+vipe', train_len=1024).float()
    with torch.autocast('cpu', BF16):
        y = enc.attend(q, k, v, pos)
    assert torch.equal(y, enc.attend(q, k, v, pos))
    q, pos = torch.zeros(1, 2, 1024, 8).bfloat16(), torch.arange(1024)
    enc.bfloat16().parts[1].W_p.data.fill_(1.0)
    close(enc.attend(q, q, q, pos)[0, 0, :, -1].detach(), pos / 2, 2 ** -8)


def test_which_heads_and_layers_have_which_encoding():
    """rope_heads=1: ViPE on the first head; layers share T5's table; a second PRISM layer."""
    q, k, v, pos = qkv(4)
    y, vipe, nope = (encoding(name, heads=4, rope_heads=some).attend(q, k, v, pos)
                     for name, some in (('vipe', 1), ('vipe', None), ('nope', None)))
    close(y[:, :1, :, :8], vipe[:, :1, :, :8])      # without the code, because W_p is random
    close(y[:, 1:], F.pad(nope[:, 1:], (0, 8)))
    names = [n.split('.')[-1] for n, _ in make(pe='t5+pope', n_layer=3).named_parameters()]
    assert (names.count('table'), names.count('delta')) == (1, 3)
    model, seen = make(pe='prism', n_layer=5, prism_layers=[1, 4]), []
    assert [i for i, x in enumerate(model.blocks) if hasattr(x.attn.pe, 'cursors')] == [0, 3]
    for module in model.blocks[3].attn.pe.cursors, model.blocks[3]:
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.randint(11, (2, 7)))
    assert torch.equal(*seen)


def test_what_does_not_fit_together_says_what_to_do():
    """Errors about options, about sums of encodings, and about inputs of attend() and embed()."""
    sums = 0
    for names in itertools.combinations_with_replacement(pe.ENCODINGS, 2):
        with contextlib.suppress(pe.UserError):
            model = make(pe='+'.join(names), n_layer=1)
            assert model(torch.ones(1, 5, dtype=torch.int64))[0].isfinite().all(), names
            sums += 1
    assert sums >= 179                                      # all but 31 sums of two of ours
    for kw, says in (
            (dict(d_model=30), 'divisible'), (dict(dropout=1.5), 'dropout'),
            (dict(n_head=1, attention='mla'), 'even'), (dict(pe='rope', d_model=20), 'even'),
            (dict(rope_fraction=2.0), 'at most 1'), (dict(rope_heads=9), 'rope_heads'),
            (dict(pe='vipe', vipe_s='both'), 'length'),
            (dict(pe='rop'), "mean 'rope'.*shifted_ape"),  # lists all names
            (dict(pe='ape', rope_heads=1), 'acts on the embedding'),
            (dict(pe='prism+prism'), 'PRISM and PRISM cannot be added: each appends features'),
            (dict(pe='pope+rope'), 'PoPE and RoPE cannot be added'),
            (dict(pe='rope+yarn'), 'RoPE and YaRN cannot be added: each rotates'),
            (dict(pe='t5+rope+t5'), 'T5 and T5 cannot be added: each does the same'),
            (dict(pe='learned', max_len=9), 'max_len=9 is shorter than a training'),
            (dict(pe='stickbreaking+vipe'), 'weights that sum to 1'),
            (dict(pe='stickbreaking+stickbreaking'), 'each replaces the softmax')):
        refused(says, make, **kw)

    q, k, v, pos = qkv(4)
    rope, fox, prism = (encoding(name, heads=4) for name in ('rope', 'fox', 'prism'))
    for enc, given, says in (
            (rope, (q, k[:, :2], v[:, :2], pos), 'built for 4 heads of 8.* repeat grouped keys'),
            (rope, (q[0], k, v, pos), r'q, k and v must be \[B, H, T, D\]'),
            (rope, (q, k[:1], v[:1], pos), 'the batch size of q'),
            (rope, (q, k, v[:, :, :9], pos), 'k and v must have length T'),
            (rope, (q, k[:, :, :9], v[:, :, :9], pos[:9]), 'q covers all T positions or the last'),
            (rope, (q, k, v, pos[:9]), 'pos must have a position for each'),
            (rope, (q, k, v, pos, None, torch.randn(2, 1, 32)), 'the inputs of all 10 keys'),
            (rope, (q, k, v, pos % 6), 'non-decreasing'), (rope, (q, k, v, pos - 1), 'at least 0'),
            (fox, (q, k, v, pos), 'attention input'), (prism, (q, k, v, pos), 'pass state=')):
        refused(says, enc.attend, *given)
    for name in 'ape', 'learned':
        refused('for each of the 1 keys', encoding(name).embed, torch.zeros(2, 1, 16), pos)
    for shape in (4,), (2, 10, 10), (4, 10, 9), (3, 4, 10, 10), (2, 1, 4, 10, 10):
        rope.bias = lambda at, shape=shape: torch.zeros(shape)
        refused(r'bias\(\) of RoPE must .*\[2, 4, 10, 10\], got', rope.attend, q, k, v, pos)
    rope.qk = lambda q, k, at: (q, k[..., :4])
    refused(r'qk\(\) of RoPE must return q and k of one width', rope.attend, q, k, v, pos)


# ---- pe.py in someone else's model ---------------------------------------------------------------

def test_other_models_rules_of_initialization_and_optimization():
    """nanoGPT draws every linear layer and embedding from N(0, 0.02^2), and its optimizer decays
    all matrices. Neither may change an encoding. alpha (PRISM) has its rates, delta is clamped."""
    def init_weights(module):
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.weight.data.normal_(0, 0.02)

    for kw in (*VARIANTS.values(), dict(pe='prism', prism_recurrent='orthogonal')):
        encodings = torch.nn.ModuleList(pe.build(pe.PEConfig(d_model=32, n_head=4, **kw)))
        before = {name: p.clone() for name, p in encodings.state_dict().items()}
        encodings.apply(init_weights)
        for name, p in encodings.state_dict().items():
            assert torch.equal(p, before[name]), name

    model = torch.nn.ModuleList([torch.nn.Linear(32, 32), *pe.build(pe.PEConfig(
        pe='prism+vipe', d_model=32, n_head=4)), *pe.build(pe.PEConfig(pe='pope', n_head=4))])
    plain = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=0.1),
             dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]
    groups = pe.param_groups(model, 1e-3, plain)
    assert sorted(map(id, model.parameters())) == sorted(id(p) for g in groups for p in g['params'])
    decaying = [p for g in groups if g['weight_decay'] for p in g['params']]
    assert decaying == [model[0].weight]
    by_name = {group['name']: group for group in groups[2:]}
    assert {name: len(g['params']) for name, g in by_name.items() if name != 'encoding'} == {
        'alpha': 2, 'delta': 2}
    assert (by_name['alpha']['lr'], by_name['encoding']['lr']) == (0.03, 1e-3)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for p in model.parameters():
        p.data.fill_(1.0)
    pe.clamp(optimizer)
    assert {id(p) for p in model.parameters() if p.max() == 0} == set(
        map(id, by_name['delta']['params']))


def test_positions_of_other_types_and_with_gaps():
    """Small integers do not wrap; half precision is refused. A gap hides gates from FoX: -0.69
    where -1.39 would be right; on a GPU (here: not readable), the result is NaN."""
    q, k, v, pos = qkv(4)
    for name in 'vrope', 'ape', 'fire', 'vipe', 'alibi':
        enc = encoding(name, heads=4)
        for far in (pos + 240, torch.stack([pos, pos + 40])):
            close(enc.attend(q, k, v, far.to(torch.uint8)),
                  enc.attend(q, k, v, far.to(torch.uint8).long()))
        refused('integers, float32 or float64', enc.attend, q, k, v, pos.bfloat16())
    refused('non-decreasing', enc.attend, q, k, v, pos.flip(0).to(torch.uint8))
    fox, x = encoding('fox', heads=4), at_random(2, 10, 32)
    fox.attend(q, k, v, pos * 0.9, x=x)
    gap = pos + 3 * (pos > 1)                               # sinks 0 and 1, then a window
    refused('require all tokens between a key', fox.attend, q, k, v, gap, x=x)


def test_a_gap_in_positions_is_nan_where_values_cannot_be_read(monkeypatch):
    fox, (q, k, v, pos) = encoding('fox', heads=4), qkv(4)
    monkeypatch.setattr(pe, 'readable', lambda x: False)
    for far, lost in (pos, False), (pos + 3 * (pos > 1), True):
        assert fox.attend(q, k, v, far, x=at_random(2, 10, 32)).isnan().any() == lost


@pytest.mark.parametrize('name', ['rope', 'vrope', 'yarn', 'alibi', 't5', 'fire', 'fox', 'prism',
                                  'stickbreaking', 'pope+vipe', 'ape+rope'])
def test_other_layouts_devices_and_compilers(name):
    """An empty batch, tensors whose last stride is not 1, the meta device, and torch.compile, which
    may make three graphs for all lengths, decoding with a cache included."""
    cfg = pe.PEConfig(pe=name, d_model=32, n_head=4, train_len=16)
    enc = pe.build(cfg)[0]

    def attend(T, rows=2, change=lambda z: z, last=0):
        q, k, v = (change(at_random(rows, 4, T, 8, seed=seed).float()) for seed in range(3))
        x, pos = change(at_random(rows, T, 32).float()), change(torch.arange(T))
        return call(q[:, :, last:], k, v, pos, enc.state(x, pos), x).detach()

    call = enc.attend
    expected = {T: attend(T) for T in (5, 9, 20, 31)}       # in training, and longer
    assert attend(9, rows=0).shape == (0, *expected[9].shape[1:])
    close(attend(9, change=lambda z: torch.stack([z, z], dim=-1)[..., 0]), expected[9], 1e-5)
    graphs = []
    call = torch.compile(enc.attend, backend=lambda graph, _: graphs.append(1) or graph.forward)
    torch._dynamo.reset()
    with torch.no_grad():
        for last in 0, -1:
            for T, y in expected.items():
                close(attend(T, last=last), y[:, :, last:], 1e-4)
    assert len(graphs) <= 3
    with torch.device('meta'):
        enc = pe.build(cfg)[0]
    call = enc.attend
    assert attend(9, change=lambda z: z.to('meta')).shape == expected[9].shape


@pytest.mark.parametrize('name', ['rope', 'vrope', 'pope', 'fox', 'alibi', 'yarn'])
def test_export(name):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = encoding(name, heads=4)

        def forward(self, q, k, v, pos, x):
            return self.enc.attend(q, k, v, pos, self.enc.state(x, pos), x)
    module, given = Module(), (*qkv(4), at_random(2, 10, 32))
    close(torch.export.export(module, given).module()(*given).detach(), module(*given).detach())


def test_stick_breaking_in_half_precision():
    """Its logarithms are summed in float32: at logits of standard deviation 16, weights that sum to
    at most 1. Outputs of bfloat16 inputs are off by their rounding alone."""
    q, k, v = (4 * at_random(1, 2, 64, 16, seed=i).bfloat16() for i in range(3))
    enc, pos = encoding('stickbreaking', head_dim=16), torch.arange(64)
    y, exact = (enc.attend(*(z.to(dtype) for z in (q, k, v)), pos).double()
                for dtype in (BF16, torch.float64))
    assert (y - exact).norm() < 0.004 * exact.norm()        # rounding the output: 0.0017
    weights = enc.weigh(enc.logits(q.float(), k.float(), pos))
    assert weights.sum(dim=-1).max() < 1 + 1e-5


def test_vectors_are_those_of_the_code():
    """assets/vectors.json, whose cases for rope, yarn, alibi, t5 and pope agree with other code."""
    def numbers(z):
        z = [*z.values()] if isinstance(z, dict) else z
        return [x for y in z for x in numbers(y)] if isinstance(z, list) else [z]
    with open(tables.ROOT / 'assets/vectors.json') as f:
        written, new = json.load(f), json.loads(vectors.vectors())
    for old, case in zip(written['cases'], new['cases'], strict=True):
        assert (old['pe'], old['options']) == (case['pe'], case['options'])
        for key in 'parameters', 'embed', 'results':
            ours, theirs = ([math.inf if x is None else x for x in numbers(z[key])]
                            for z in (case, old))
            close(ours, theirs, 1e-9)


@pytest.mark.parametrize('hook, says', [
    ('value(self, v, at): v * 2', r'value\(\) of mine must return \[2, 4, 5, any\], got None'),
    ('value(self, v, at): return v.repeat(1, 1, 1, 2)', r'out\(\) of mine must return .* 5, 8\]'),
    ('embed(self, x, pos): return x.add_(1)', 'changes its input x in place'),
    ('bias(self, at): return torch.ones(4) * at.distance', r'write a parameter m \[H\] as m\[:,'),
    ('qk(self, q, k, at): return q[..., :4], k', 'q and k of one width'),
    ('weigh(self, logits): return logits.sum(dim=-1)', r'weigh\(\) of mine must return .* 5, 5\]'),
    ('state(self, x, pos): return 1', 'takes 3 positional arguments but 4 were given'),
    ('penalty(self): return torch.ones(3)', r'penalty\(\) of mine must return a number'),
    ('bias(self, at): return at.distance * 0.1\n    own = dict(slope={})', 'slope is none'),
    ('biases(self, at): return -at.distance', 'mine overrides none of the hooks embed, state'),
    ('bias(self, at): -at.distance', r'bias\(\) of mine returns nothing'),
    ('bias(self, at): return -at.distance', 'must not be torch.int64: use at.dist'),
    ('bias(self, at): return at.distance < 4', 'must not be torch.bool'),
    ('bias(self, at): return 1 / at.distance', 'is NaN or infinite'),
    ('value(self, v, at): return v.roll(-1, dims=2)', 'change with a later token'),
    ('value(self, v, at): self.seen = v; return v', 'seen of mine would not be saved')])
def test_a_mistake_in_a_hook_is_one_clear_line(hook, says, monkeypatch):
    names = dict(pe=pe, torch=torch)
    exec(f'class Mine(pe.Encoding):\n    strength = 0.5\n    def {hook}', names)
    monkeypatch.setitem(pe.ENCODINGS, 'mine', names['Mine'])
    given = dict(pe='mine', d_model=32, n_head=4)
    refused(says, train.make_config, train.defaults(train.Config) | given)
    refused('Mine.strength is not an option until', train.main, ['--pe=mine', '--strength=1'])


@pytest.mark.parametrize('shape', [(1, 1, 10), (4, 1, 1), (10, 1), (2, 1, 1, 10)], ids=str)
def test_a_bias_may_broadcast(shape):
    """Fused attention is causal also with a bias that is equal for all queries or keys."""
    enc, (q, k, v, pos) = encoding('nope', heads=4), qkv(4)
    enc.bias = lambda at: at_random(*shape)
    close(enc.attend(q, k, v, pos), enc.mix(enc.logits(q, k, pos).softmax(dim=-1), v, pos))


# ---- model.py ------------------------------------------------------------------------------------

def test_mla_logits_are_eq_3():
    """The Toeplitz study, eq. 3: a head has 4 NoPE and 4 RoPE features; d_compress is 6."""
    attn = make(pe='rope', attention='mla', n_head=8, d_compress=6).blocks[0].attn  # 4 heads of 8
    assert attn.compress.weight.shape == (6, 32)
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    c, (W_K, W_V) = x @ attn.compress.weight.T, attn.kv.weight.chunk(2)
    close(torch.stack(attn.project(x)), torch.stack([x @ attn.q.weight.T, c @ W_K.T, c @ W_V.T]))
    check_logits(attn.pe, lambda q, k, t, s, *_: (  # theta_c = 10000^(-2c/4)
        q[:4] @ k[:4] + 2 * rotated(q[4:], k[4:], (s - t) * THETA[::2])) / math.sqrt(8))


@pytest.mark.parametrize('kw', [
    dict(pe='nope'), dict(pe='ape', norm='rmsnorm', d_ff=20, n_layer=3, n_head=1)], ids=str)
def test_model_and_taps_equal_plain_functions(kw):
    """Hooks double what dropout would act on; hooks on taps receive and replace activations."""
    model, tokens = noisy(make(dropout=0.3, **kw), 0.1), torch.randint(11, (2, 9))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            assert module.p == 0.3
            module.register_forward_hook(lambda module, inputs, out: 2 * out)
    H, weights = model.cfg.n_head, model.state_dict()
    norm = F.rms_norm if 'norm' in kw else F.layer_norm

    def w(name):  # the weight, and the bias if there is one
        return [weights[key] for key in (f'{name}.weight', f'{name}.bias') if key in weights]
    x = weights['embedding.weight'][tokens]
    x = 2 * (x + pe.sinusoids(torch.arange(9), 32, 1e4, x) if kw['pe'] == 'ape' else x)
    taps = {'tap_resid': x}
    for i in range(model.cfg.n_layer):
        block, attn = f'blocks.{i}', f'blocks.{i}.attn'
        qkv = F.linear(norm(x, [32], *w(f'{block}.norm_1')), *w(f'{attn}.qkv'))
        q, k, v = qkv.view(2, 9, 3, H, -1).permute(2, 0, 3, 1, 4)           # (B, H, T, D) each
        logits = q @ k.mT / (32 / H) ** 0.5 + torch.full((9, 9), -math.inf).triu(1)
        y = logits.softmax(dim=-1) @ v
        x = x + 2 * F.linear(y.transpose(1, 2).flatten(2), *w(f'{attn}.proj'))
        hidden = F.gelu(F.linear(norm(x, [32], *w(f'{block}.norm_2')), *w(f'{block}.mlp.0')))
        assert hidden.shape[-1] == kw.get('d_ff', 4 * 32)
        x = x + 2 * F.linear(hidden, *w(f'{block}.mlp.2'))
        taps |= {f'{attn}.tap_q': q, f'{attn}.tap_k': k, f'{attn}.tap_logits': logits,
                 f'{attn}.tap_head_out': y, f'{block}.tap_resid': x}
    expected = F.linear(norm(x, [32], *w('norm')), *w('head'))
    targets = tokens.where(tokens > 5, -100)
    logits, loss = model(tokens, targets)
    close(logits, expected)
    close(loss, F.cross_entropy(expected.flatten(0, 1), targets.flatten()))
    assert model(tokens, targets * 0 - 100)[1] == 0         # not NaN
    assert taps.keys() == {name for name, _ in model.named_modules() if 'tap_' in name}
    for name, activation in taps.items():
        tap, seen = model.get_submodule(name), []
        with tap.register_forward_hook(lambda module, inputs, out, seen=seen: seen.append(out)):
            close(model(tokens)[0], expected)
        close(*seen, activation)
        with tap.register_forward_hook(lambda module, inputs, out: out * 0):
            assert not torch.allclose(model(tokens)[0], expected), name


def test_generate():
    """It has no dropout, restores the mode, never draws padding, and pads rows after their end."""
    model, prompts = make(pe='rope', dropout=0.3).train(), torch.randint(1, 11, (2, 9))
    rows = model.generate(prompts, 9)
    assert model.training and not torch.equal(model(rows)[0], model(rows)[0])
    assert torch.equal(rows, model.eval().generate(prompts, 9)) and not model.training
    planned = F.one_hot(torch.tensor([[3, 2, 5], [4, 5, 2]]), 11)      # 2 ends a row
    planned[:, :, 0] = 2                                    # padding would be most likely
    model.forward = lambda tokens, total_len: (planned[:, :tokens.shape[1]], None)
    rows = model.generate(torch.ones(2, 1, dtype=torch.int64), 5, end=2)
    assert rows.tolist() == [[1, 3, 2, 0], [1, 4, 5, 2]]
    refused('of one length, without padding', model.generate, rows, 5)


def test_starting_weights_and_optimizer_groups():
    """The variance is 1 / fan_in, divided by 2 n_layer in what writes to the residual stream."""
    for std, kw in (0.1, {}), (0.2, dict(embedding_std=0.2)), (0.02, dict(tie=True)):
        model = Transformer(ModelConfig(d_model=128, vocab_size=300, n_layer=3, **kw))
        assert (model.head.weight is model.embedding.weight) == ('tie' in kw)
        for name, p in model.named_parameters():
            if p.dim() == 1:
                assert (p == name.endswith('weight')).all(), name   # norms 1, biases 0
                continue
            writes = name.endswith(('attn.proj.weight', 'mlp.2.weight'))
            fan_in = p.shape[1] * (6 if writes else 1)
            expected = std if name == 'embedding.weight' else fan_in ** -0.5
            assert abs(p.std() / expected - 1) < 0.05, name
    assert encoding('prism').alpha.unique() == 1 and abs(encoding('fire').c - 0.1) < 1e-6
    assert abs(encoding('vipe', vipe_d_p=3000).W_p.std() / 0.02 - 1) < 0.05
    model = make(pe='prism+pope')
    groups = {group['name']: group for group in model.optim_groups(1e-3, 0.1)}
    params = [p for group in groups.values() for p in group['params']]
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))
    assert [name for name, group in groups.items() if group['weight_decay']] == ['decay']
    matrices = 'attn.qkv', 'attn.proj', 'mlp.0', 'mlp.2'
    decaying = [f'blocks.{i}.{x}.weight' for i in (0, 1) for x in matrices] + ['head.weight']
    assert {*groups['decay']['params']} == {model.get_parameter(name) for name in decaying}
    alpha = groups['alpha']  # PRISM section 6.4
    assert (len(alpha['params']), alpha['lr'], alpha['betas']) == (2, 0.03, (0.8, 0.92))


# ---- tasks.py, against oracles; SCAN against its published counts; readers of files --------------

# an oracle returns the length and the correct answer of a prompt, given as text
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
    """For each digit d of b: d*(d+1), then (e+0) for each lower digit e."""
    terms = [f'{d}*({d}+1)' + ''.join(f'({e}+0)' for e in b[i + 1:]) for i, d in enumerate(b)]
    return f'{a}x[{"+".join(terms)}]'


def actions(command):
    """The actions of a SCAN command, which are compared with the published data set below."""
    return ' '.join(act for _, actions in tasks.scan()[command][1] for act in actions)


def scan(prompt):
    """The actions of a command; if it ends with =, its plan, and the actions of each clause."""
    command = re.sub('BoS | EoI| =', '', prompt)
    joint, order = (' after ', -1) if 'after' in prompt else (' and ', 1)
    halves = [re.sub('(.*) twice', r'\1 + \1', re.sub('(.*) thrice', r'\1 + \1 + \1', half))
              for half in command.split(joint)]
    steps = [f'{x} : {actions(x)}' for half in halves[::order] for x in half.split(' + ')]
    in_steps = f'{joint.join(halves)} → {" ".join(steps)} .'
    return len(actions(command).split()), in_steps if '=' in prompt else f'{actions(command)} EoS'


# oracles of tasks that supervise only some tokens: all words -> {t: targets[t]}
def flip_flop(words):
    """The target at r is the bit after the last w."""
    return {t: words[t + 1 - words[t::-1].index('w')] for t in range(len(words)) if words[t] == 'r'}


def mqar(words):
    """Each key occurs twice, with the same value; the target is at the second."""
    assert all(words.count(x) == 2 for x in words if 'key' in x)
    first = words.index
    return {t: words[first(x) + 1] for t, x in enumerate(words) if 'key' in x and first(x) < t}


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
    'scan': (scan, (1, 22, 48)), 'scan_simple': (scan, (2, 5)), 'scan_cot': (scan, (2, 9, 24)),
    'flip_flop': (flip_flop, (2, 40)), 'mqar:keys=3:words=9': (mqar, (6, 30))}


@pytest.mark.parametrize(
    'name, length', [(name, n) for name, (_, lengths) in ORACLES.items() for n in lengths])
def test_every_task(name, length):
    """Answers are those of an oracle; padding is at the end; a seed repeats its problems."""
    task, (oracle, _) = tasks.make(name), ORACLES[name]
    tokens, targets = task.sample(400, length, generator(length))
    assert tokens.dtype == targets.dtype == torch.int64 and len(tokens) == 400
    assert len(task.vocab) == len(set(task.vocab))
    padding, supervised = tokens == tasks.PAD, targets != -100
    assert (padding[:, 1:] >= padding[:, :-1]).all()
    assert not (targets == tasks.PAD).any() and not supervised[:, -1].any()
    assert torch.equal(targets[supervised], tokens.roll(-1, dims=1)[supervised])
    assert torch.equal(tokens, task.sample(400, length, generator(length))[0])
    for row, target in zip(tokens, targets.tolist()):
        words = [task.vocab[i] for i in row if i != tasks.PAD]
        found = {t: task.vocab[i] for t, i in enumerate(target) if i != -100}
        if oracle in (flip_flop, mqar):
            assert found == oracle(words) and len(words) == 2 * length
        else:       # the answer is supervised, to the last token
            first = min(found) + 1
            assert list(found) == list(range(first - 1, len(words) - 1))
            prompt, answer = (task.separator.join(x) for x in (words[:first], words[first:]))
            assert oracle(prompt) == (length, answer)


@pytest.mark.parametrize('wrong, says', [
    (dict(vocab=['=', 'a', 'b', '<pad>']), "the first of them '<pad>'"),
    (dict(vocab=['<pad>', '=', 0, 1]), 'vocab must be a list of different strings'),
    (dict(vocab=['<pad>', '=', 'a', 'a']), 'different strings'), (dict(end='='), "end .* got '='"),
    (lambda x, y: (x - 2, y), 'tokens must be 0 to 3, .* got -1 to 1'),
    (lambda x, y: (x + 1, y), 'tokens must be 0 to 3'),
    (lambda x, y: (x.float(), y), 'must be torch.int64 .* got torch.float32'),
    (lambda x, y: (x[:0], y[:0]), r'got torch.int64 \[0, 7\]'),
    (lambda x, y: (x[:, :0], y[:, :0]), r'got torch.int64 \[\d, 0\]'),
    (lambda x, y: (x[:1], y[:1]), r'got torch.int64 \[1, 7\]'),
    (lambda x, y: (x, y[:, 1:]), r', 7\] on cpu and torch.int64 \[\d, 6\]'),
    (lambda x, y: ([[2], [3, 2]], y), 'must return two tensors'),
    (lambda x, y: x, 'must return two tensors'), (lambda x, y: None, 'must return two tensors'),
    (lambda x, y: (F.pad(x, (1, 0)), F.pad(y, (1, 0), value=-100)), 'token 0 is padding'),
    (lambda x, y: (x, x), 'must be the next token'), (lambda x, y: (x, y + 9), 'the next token'),
    (lambda x, y: (x, x.roll(-1, dims=1)), 'as at the end'),
    (lambda x, y: (F.pad(x, (0, 2)), F.pad(y, (0, 2), value=0)), 'before padding')])
def test_a_wrong_task_is_refused_in_a_line(wrong, says, monkeypatch):
    """It names the task and the rule, in `python tasks.py` and before the first step."""
    class Mine(tasks.Task):
        vocab = ['<pad>', '=', 'a', 'b']

        def problems(self, n, length, draw):
            x = draw.integers(2, n, length) + 2
            problems = tasks.compose([x, 1], [x])
            return wrong(*problems) if callable(wrong) else problems
    task = Mine()
    vars(task).update({} if callable(wrong) else wrong)
    monkeypatch.setitem(tasks.TASKS, 'mine', task)
    for call in partial(tasks.main, ['mine', '3']), partial(small, task='mine', train_lengths=3):
        tasks.make.cache_clear()
        refused(f'^mine: .*{says}', call)


def test_what_a_new_task_requires(monkeypatch):
    """A base class, random numbers from draw, indices of symbols, and defaults of options."""
    class Plain:
        vocab = ['<pad>']

    class Unseeded(tasks.Task):
        vocab = ['<pad>', '=', 'a', 'b']

        def problems(self, n, length, draw):
            return tasks.compose([torch.randint(1, 4, (n, length)), 1], [2])

    class Negative(tasks.Iterative):
        def states(self, x):
            return x - 1

    class Flat(tasks.Iterative):
        def states(self, x):
            return x.sum(dim=1)

    class Options(tasks.Parity):
        def __init__(self, rate=0.5, base=None):
            super().__init__()
            self.rate = rate

    class Unmarked(tasks.Pairs):
        texts = [('train', 3, 'BoS a = b EoS')]
    for cls, says in [(Plain, "TASKS.'mine'. must be an instance of a subclass of tasks.Task"),
                      (tasks.Task, r'mine: define problems\(n, length, draw\)'),
                      (Unseeded, 'mine: problems.. must take all its random numbers from draw'),
                      (Negative, 'mine: states must be 0 and more, got -1'),
                      (Flat, r'compose\(\) takes ints and tensors .* \[\[5, 3\], \[5\]\]'),
                      (Unmarked, 'mine: every text must contain EoI')]:
        monkeypatch.setitem(tasks.TASKS, 'mine', cls())
        tasks.make.cache_clear()
        refused(says, tasks.main, ['mine', '3'])
    monkeypatch.setitem(tasks.TASKS, 'mine', Options())
    tasks.make.cache_clear()
    assert tasks.make('mine:rate=.25').rate == 0.25
    for option, says in (('rate=1-', 'rate must be a number'), ('base=2', 'requires a default')):
        refused(says, tasks.make, f'mine:{option}')


@pytest.mark.parametrize('name, length, value, values', [
    ('dyn_str_cpy', 10, lambda text: text[:10].index(text[11]), range(10)),
    ('addition_cot', 10, lambda text: min(map(len, text.split('=')[0].split('+'))), range(1, 11)),
    ('addition_cot', 1, lambda text: int(text[0]), range(10)),
    ('addition_cot', 40, lambda text: text.index('+') == 40, range(2)),
    ('stack', 10, lambda text: re.search('[234]', text).start(), range(1, 10)),
    ('distance:span=16', 40, lambda text: re.split('trigger.', text)[1].count(' '), range(1, 16)),
    ('distance', 40, lambda text: re.search('trigger(.)', text)[1], '01'),
    ('trigger_count:most=16', 40, lambda text: text.count('trigger'), range(17)),
    ('indirect_indexing:letters=12:shift=2', 6, lambda text: text[0], 'ABCDEFGHIJKL'),
    ('indirect_indexing:letters=3:shift=1', 3, lambda text: int(text[6:8]),    # i, i + shift <= 2
     [-1] * 5 + [0] * 8 + [1] * 5), ('mode', 9, lambda text: text.split()[-2], 'abcdefghij'),
    ('count', 9, lambda text: int(text.split()[1]), range(120)),
    ('flip_flop', 9, lambda text: text[8], 'wr' + 8 * 'i')])    # 80 % are i (ignore)
def test_values_are_uniform(name, length, value, values):
    """Positions, sizes and distances take all values as often as expected, to 6 deviations."""
    task, n = tasks.make(name), 6000
    expected, tokens = Counter(values), task.sample(n, length, generator(0))[0]
    found = Counter(value(task.decode(row)) for row in tokens)
    assert set(found) == set(expected)
    for x, times in expected.items():
        mean = n * times / len(values)
        assert abs(found[x] - mean) < 6 * math.sqrt(mean)



def test_scan_is_the_published_data_set():
    """Its parts are the sorted lines of tasks_train_length.txt and of tasks_test_length.txt."""
    parts = [sorted(tasks.scan_pairs('length', part)) for part in ('train', 'test')]
    texts = ['\n'.join(f'IN: {x} OUT: {actions}' for x, actions in part) for part in parts]
    assert [zlib.crc32(text.encode()) for text in texts] == [3622396584, 3784642520]
    simple = [tasks.scan_pairs('simple', part) for part in ('train', 'test')]
    assert [*map(len, simple)] == [16728, 4182]
    assert sorted(simple[0] + simple[1]) == sorted(parts[0] + parts[1])


def test_held_out_choices_are_seeded_and_never_for_training():
    simple, trained = tasks.make('scan_simple'), dict(tasks.scan_pairs('simple', 'train'))
    for task, split in (simple, 'eval'), (simple, 'test'), (tasks.make('stdlib'), 'test'):
        once, again = (task.held_out(split, 20, [16], generator)[16][0] for _ in range(2))
        assert torch.equal(once, again)
        for row in once if task is simple else []:         # which has no validation part
            assert re.search('BoS (.*) EoI', simple.decode(row))[1] not in trained


UNICODE, BYTES = 'Grüße, ∀x: x≠0 → 𝄞\r\n\tend\n\n', bytes(range(200))
MIDI = 'BOS_None Pitch_60 Pitch_64 Pitch_67 Pitch_21 Pitch_108 EOS_None'
BASS = dict(train=[[-1, 21, 60, 108], range(60, 90)], valid=[[60]], test=[[60], range(60, 72)])
CFQ = [{'questionPatternModEntities': f"Did M{i}'s writer , a film editor, write M1",
        'sparqlPatternModEntities': 'SELECT count(*) WHERE {\n?x0 a ns:film.editor .\n?x0 '
        f'ns:people.x m.0{i}' + ' .\nM1 ns:x ?x1' * (i < 3) + '\n}'} for i in range(9)]
FILES = {
    'unicode.txt': UNICODE, 'empty': '', 'utf16': b'\xff\xfe', 'odd.bin': b'123', 'one/a': BYTES,
    'a.fa': '>chr 1\r\nACGTac\r\ngtNNr\r\n\r\n>chr 2\nTTTTTTTACGTNAAAAAACCCCCCG\n',
    'three.bin': np.array([7, 258, 0], np.uint16), 'pairs.bin': np.array([*b'pairs'], np.uint16),
    'nines.bin': np.full(99, 9, np.uint16), 'uint32.bin': np.array([5, 50256], np.uint32),
    'bach.json': {part: [[[74, 70, 65, x] for x in bass] for bass in BASS[part]] for part in BASS},
    'trio.json': dict(train=[[[1, 2, 3]]]), 'cfq/dataset.json': CFQ, 'midi/test.mid': '',
    'cfq/splits/random_split.json': dict(trainIdxs=[*range(5)], devIdxs=[5, 6], testIdxs=[7, 8]),
    **{f'many/{i:02}': f'{i:02}' for i in range(40)}, 'midi/train.mid': '', 'midi/val.mid': '',
    'named/a': BYTES, 'named/Validation/b': 'val', 'named/test.c': 'test', 'named/val/.d': 'no',
    'named/.val/e': 'no', 'no_test/a': BYTES, 'no_test/val/b': 'val', 'no_val/a': BYTES,
    'no_val/test/b': 'test', 'two/a': bytes(range(20)), 'two/b': 'def', 'two/val/c': 'val'}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write FILES to the current folder. In stubs of packages, every MIDI file is five notes."""
    for name, content in FILES.items():
        content = json.dumps(content) if name.endswith('.json') else content
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.chdir(tmp_path)
    np.save('float.npy', np.zeros(99))
    names = ['PAD_None', 'BOS_None', 'EOS_None', *(f'Pitch_{pitch}' for pitch in range(21, 109))]
    remi = mock.MagicMock(vocab={name: i for i, name in enumerate(names)})
    remi.return_value = [mock.Mock(ids=[42, 46, 49, 3, 90])]
    remi.__getitem__.side_effect = remi.vocab.get
    pairs = mock.Mock(encode_ordinary=lambda x: [*x.encode()], decode=lambda x: bytes(x).decode())
    monkeypatch.setitem(sys.modules, 'miditok', mock.Mock(REMI=lambda _: remi))
    monkeypatch.setitem(sys.modules, 'tiktoken', mock.Mock(get_encoding={'gpt2': pairs}.get))


@pytest.mark.parametrize('argv, says', [
    ('copy:p=7', "'p' is not an option of copy, whose options are: steps=1"),
    ('tokens:size=1000000000 --data=three.bin', r'size must be an integer below 10\^6'),
    ('parity:steps=2', 'steps must be 0 or 1'), ('sort 101', 'lengths 1 to 100, not 101'),
    ('mqar:keys=3 5', 'lengths 6 and more'), ('scan 23', r'\[1, 2, .*, not 23'),
    ('text --data=~/missing', '^/.*/missing is missing'), ('text --data=empty', 'nothing to read'),
    ('genome --data=utf16', 'required: UTF-8'), ('maestro --data=midi', 'pip install miditok'),
    ('jsb --data=trio.json', 'required: Jsb16th'), ('tokens --data=odd.bin', r'a .bin \(uint16\)'),
    ('tokens --data=float.npy', '1-D integers'), ('tokens --data=uint32.bin', 'file of uint32'),
    ('tokens:size=9 --data=nines.bin', '0 to 8'), ('cfq:split=mcd2 --data=cfq', 'mcd2.*cfq1.1.tar'),
    ('openwebtext --data=nines.bin', 'required: pip install tiktoken')])
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
    """pool() has all training problems; if a part lacks a length, other parts supply it."""
    task = tasks.make('cfq', 'cfq')
    sets = [task.pool(1, 15, generator(0)), *(task.held_out(split, 9, [n], generator)[n]
                                              for split in ('eval', 'test') for n in (15, 19))]
    texts = [' '.join(sorted(map(task.decode, tokens))) for tokens, _ in sets]
    assert [''.join(re.findall(r'm_0(\d)', x)) for x in texts] == ['34', '56', '012', '78', '012']
    question = "BoS Did M3 ' s writer , a film editor , write M1 EoI "
    query = 'SELECT count ( * ) WHERE { ?x0 a film.editor . ?x0 people.x m_03 } EoS'
    assert texts[0].startswith(question + query)
    assert task.decode(sets[0][1][0].clamp(min=0)) == query     # targets of problem 0
    assert [task.existing(range(99), part) for part in ('train', 'val')] == [[15, 19], [15]]
    assert task.count([15, 19, 20]) == 5


def test_documents_are_dealt_to_parts(planted):
    """By names, else at random. A missing part equals the other; hidden files are not read."""
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


def test_contexts(planted):
    """Starts are uniform; chorales begin with the first voice; training MIDI is transposed."""
    tokens, targets = tasks.make('text', 'two').sample(6000, 5, generator(0))
    assert torch.equal(targets[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100))
    counts = Counter(map(tuple, tokens.tolist()))
    assert abs(counts.pop((101, 102, 103, 0, 0)) - 6000 * 3 / 23) < 120
    assert counts.keys() == {tuple(range(i, i + 5)) for i in range(1, 17)}
    assert min(counts.values()) > 240
    jsb, midi, transposed = tasks.make('jsb', 'bach.json'), tasks.make('maestro', 'midi'), set()
    for row in jsb.sample(200, 16, generator(0))[0].view(-1, 4):
        assert jsb.decode(row).startswith('74 70 65 ')
    assert jsb.existing([4, 5, 6], 'train') == [5, 6]
    for tokens, targets in jsb.held_out('test', 99, [5, 16, 60], generator).values():
        assert (targets != -100).sum() == 4 * (1 + 12) - 2      # not the first of each chorale
        assert (tokens[:, 0] == tokens[0, 0]).all()
    assert (jsb.held_out('eval', 99, [5], generator)[5][1] != -100).sum() == 3
    for shift in range(-3, 4):                              # by an octave where it would leave
        notes = 60, 64, 67, 21 + 12 * (shift < 0), 108 - 12 * (shift > 0)
        transposed.add(' '.join(['BOS_None', *(f'Pitch_{x + shift}' for x in notes), 'EOS_None']))
    assert transposed == {midi.decode(row) for row in midi.sample(200, 7, generator(0))[0]}
    assert midi.decode(midi.held_out('test', 1, [7], generator)[7][0][0]) == MIDI


@pytest.mark.parametrize('sizes', [[1000], [7, 350, 2, 99, 100, 101, 199], [40] * 30])
def test_windows_predict_every_token_once(sizes, tmp_path):
    """The same for every context length: all except the first of a document, even its rest."""
    documents = np.split(np.arange(sum(sizes), dtype=np.uint16), np.cumsum(sizes)[:-1])
    (tmp_path / 'test').mkdir()
    for i, document in enumerate(documents):
        document.tofile(tmp_path / f'test/{i}.bin')
    task = tasks.make('tokens:size=2000', str(tmp_path))
    after_first = np.concatenate([document[1:] for document in documents]).tolist()
    lengths = [2, 9, 50, 100]
    for length, (tokens, targets) in task.held_out('test', 10 ** 6, lengths, generator).items():
        asked = targets != -100
        assert sorted((targets[asked] - 1).tolist()) == after_first, length
        assert torch.equal(tokens[asked] + 1, targets[asked])       # predicted from the one before
        assert tokens.shape[1] == length and asked.any(dim=1).all()
    cfg = mock.Mock(n_test=3, the_task=task, eval_lengths=lengths)
    kept = [{*y[y != -100].tolist()} for _, (_, y) in train.held_out(cfg, 'test', CPU)]
    assert kept == 4 * kept[:1]
    assert len(kept[0]) == min(3 * 99, 3 * (max(sizes) - 1), len(after_first))


def test_a_corpus_is_learned_and_written(tmp_path, capsys):
    """In this random walk the best perplexity is 2; greedy decoding agrees with teacher forcing."""
    walk = np.random.default_rng(0).integers(2, size=50000).cumsum() % 6
    (tmp_path / 'text').write_text(''.join('abcdef'[x] for x in walk))
    train.main(flags(task='text', data=tmp_path / 'text', out_dir=tmp_path / 'sweep', lr=1e-2,
                     train_lengths=16, eval_lengths='16,32', max_steps=200, eval_interval=200,
                     batch_size=32, pe='nope,vipe'))
    table = r'every length\ncontext +16 +32\nnope +(\S+) +(\S+)\nvipe +(\S+) +(\S+)\n'
    perplexities = re.search(table, capsys.readouterr().out).groups()
    assert all(abs(float(x) - 2) < 0.03 for x in perplexities)
    model, cfg = train.load(tmp_path / 'sweep/pe=vipe')
    prompt = cfg.the_task.encode('effa')[None]
    greedy, cold, other = (model.generate(prompt, 28, temperature) for temperature in (0, 1e-5, 2))
    assert torch.equal(greedy, cold)
    assert cfg.the_task.decode(other[0])[:4] == 'effa' and not torch.equal(greedy, other)
    assert torch.equal(model(greedy)[0].argmax(dim=-1)[:, 3:-1], greedy[:, 4:])


# ---- kernels.py: in Triton's interpreter without a GPU, compiled with one ------------------------

kernel_test = pytest.mark.gpu if CUDA else pytest.mark.skipif(not kernels.tl, reason='no Triton')
BY_KERNELS = {'pope', 'pope plain', 'vipe', 'vipe logits only', 'vipe value only', 'pope+vipe',
              'vipe+vrope'}


@pytest.fixture
def nan_memory():
    """New tensors contain NaN, so that elements that a kernel does not write are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def laid_out(x, layout):
    """x [B, H, T, D] as a slice of a larger projection, with strided features, or contiguous."""
    if layout == 'slice':
        return torch.cat([x, x], dim=1).transpose(1, 2).contiguous().transpose(1, 2)[:, x.shape[1]:]
    return x.mT.contiguous().mT if layout == 'apart' else x


def test_references_of_kernels_equal_the_encodings():
    q, k, v, pos = qkv()
    pope, vipe = noisy(encoding('pope')), noisy(encoding('vipe', train_len=4))
    close(kernels.pope_attention_reference(q, k, v, pope.delta), pope.attend(q, k, v, pos))
    y, e = kernels.vipe_attention_reference(q, k, v, vipe.u, 2.5)           # s = T / train_len
    code = e[..., None] / 2.5 * vipe.W_p + vipe.b_p
    close(torch.cat([y, code], dim=-1), vipe.attend(q, k, v, pos))


@kernel_test
@pytest.mark.parametrize('name', ['pope_attention', 'vipe_attention'])
@pytest.mark.parametrize('B, H, T, D, layout, dtypes', [
    (1, 3, 131, 20, 'slice', (FULL, BF16, HALF)),       # ragged: T and D are not powers of two
    (1, 2, 100, 80, 'apart', (FULL, BF16)),             # PoPE's q and k have 160 features, v has 80
    (2, 1, 65, 128, 'whole', (FULL, HALF)), (1, 1, 17, 64, 'apart', (BF16, HALF)),
    (1, 2, 64, 32, 'slice', (FULL, BF16)),              # whole blocks
    (2, 2, 2, 16, 'whole', (FULL,)), (1, 2, 1, 48, 'slice', (FULL,)),
    *[(1, 2, 8192, 64, 'whole', (FULL, BF16))] * CUDA])
def test_attention_kernels(nan_memory, name, B, H, T, D, layout, dtypes):
    """Outputs and gradients are as near the float64 reference as kernels.compare() allows."""
    function, reference = getattr(kernels, name), getattr(kernels, f'{name}_reference')
    torch.manual_seed(T)
    for dtype in dtypes:
        inputs = [x.detach() for x in kernels.sample_inputs(name, B, H, T, D, dtype, DEVICE)]
        inputs = [laid_out(x, layout) if x.dim() == 4 else x for x in inputs]
        error, allowed = kernels.compare(function, reference, [x.requires_grad_() for x in inputs])
        assert error <= allowed, f'{name}, {dtype}: the error is {error:.2g}, not {allowed:.2g}'


@kernel_test
@pytest.mark.parametrize('sharpen, copy', [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize('B, C, T, P, d_pe', [      # 128 bins for 63 tokens, then 256
    (1, 1, 66, 66, 5), (3, 1, 1, 1, 4), (2, 2, 9, 100, 34), *[(2, 3, 2048, 2048, 84)] * CUDA])
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
    """Extreme gamma (1 / 8: an empty bin's 1e-8 becomes 0.1); a table that a cursor can leave."""
    torch.manual_seed(0)
    reset, step, gamma, table, _ = (x.detach() for x in kernels.sample_inputs(
        'cursor_scan', 1, 3, 70, 4, device=DEVICE))
    reset[:, 2], step[:, 2] = 0, gamma.new_tensor([1, 0, 0])    # a step up at each token
    inputs = reset, step, gamma.new_tensor([1.0001, 1e4, 0.125]), table
    close(kernels.cursor_scan(*inputs), pe.cursor_scan(*inputs), 1e-5)
    for module, wrong in itertools.product((kernels, pe), (table[1:], table[1:-1])):
        with pytest.raises(AssertionError, match='-70..70'):
            module.cursor_scan(reset, step, gamma, wrong)


@kernel_test
def test_kernels_as_operators():
    """As torch.compile requires; second gradients raise. The kernels repeat bit for bit."""
    torch.manual_seed(0)
    for name in 'pope_attention', 'vipe_attention', 'cursor_scan':
        inputs = kernels.sample_inputs(name, 1, 2, 9, 32, device=DEVICE)
        twice = [kernels.outputs_and_gradients(getattr(kernels, name), inputs) for _ in range(2)]
        assert all(map(torch.equal, *twice))
    check = partial(torch.library.opcheck, test_utils=(
        'test_schema', 'test_autograd_registration', 'test_faketensor'))
    q, k, v, delta = kernels.sample_inputs('pope_attention', 2, 2, 20, 16, device=DEVICE)
    reset, step, gamma, _, jumps = kernels.sample_inputs('cursor_scan', 2, 2, 4, 4, device=DEVICE)
    y, e, lse = kernels.attention_forward(q, k, v, True)
    for full, phases, rest in ((True, delta, (gamma, jumps)), (False, None, (None, None))):
        check(kernels.attention_forward, (q, k, v, full))
        check(kernels.attention_backward, (y, e, lse, q, k, v, y, e, lse, full))
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


@kernel_test
def test_positions_are_a_multiple_of_16_numbers_apart():
    """Kernels write rows of such a stride, and copy others. One of M, N divides the other."""
    x = at_random(1, 65, 3, 20).transpose(1, 2)
    assert kernels.new_rows(x, 40).stride() == (65 * 128, 40, 128, 1)
    assert x.stride(2) == 60 and kernels.readable(x).stride(2) == 64
    assert torch.equal(kernels.readable(x), x)
    for *_, blocks in kernels.BLOCKS:
        assert not any(N % M if name == 'keys' else M % N for name, (M, N, *_) in blocks.items())


def test_which_encodings_take_kernels_and_where(monkeypatch):
    """Without a bias. If kernel='auto', not where shared memory is small, with one warning."""
    encodings = {name: pe.build(pe.PEConfig(**dict(d_model=48, n_head=4) | kw))[0]
                 for name, kw in (VARIANTS | {'prism+vipe': dict(pe='prism+vipe')}).items()}
    assert {name for name, enc in encodings.items() if enc.triton == 'faster'} == BY_KERNELS
    auto = encoding('pope', heads=1, head_dim=64)
    monkeypatch.setattr(kernels, 'triton', object())
    monkeypatch.setattr(kernels, 'shared_memory', dict(small=64 * 1024, large=99 * 1024).get)
    with pytest.warns(UserWarning, match='shared memory') as said:
        for gpu in 'small', 'large', 'small':
            q = mock.Mock(is_cuda=True, shape=(1, 1, 512, 64), dtype=BF16, device=gpu)
            assert auto.takes_kernel(q, q, torch.arange(512)) == (gpu == 'large')
    assert len(said) == 1


@kernel_test
@pytest.mark.parametrize('name', [*sorted(BY_KERNELS), 'pope+t5+fox', 'prism copy'])
def test_encodings_by_kernels(name):
    """kernel=triton is as good as kernel=reference, also under autocast; sums compile."""
    kw = VARIANTS[name] | dict(n_layer=1, rope_base=100.0, prism_cursors=1)
    T = 4 if name == 'prism copy' else 17       # the scan is slow in the interpreter
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
def test_kernels_at_far_and_at_other_positions():
    """Fractional positions take the reference; integers that are not consecutive give NaN."""
    x = torch.rand(1, 1, 5000, 8, device=DEVICE)
    exact = kernels.polar_reference(x.double(), None, 1e4, True)
    close(kernels.polar(x, None, 1e4, True), exact, 1e-6)        # a float32 angle: 3e-4
    q, k, v = at_random(3, 2, 2, 10, 8).float().to(DEVICE)
    pos = torch.arange(10, device=DEVICE)
    enc, plain = (encoding('pope', kernel=x).float().to(DEVICE) for x in ('triton', 'reference'))
    assert enc.attend(q, k, v, pos + (pos > 5)).isnan().any()
    for where, same in ((pos + 7, pos), (pos * 0.5, pos * 0.5)):
        close(enc.attend(q, k, v, where), plain.attend(q, k, v, same), 1e-4)


def test_without_triton_everything_but_the_kernels_works(monkeypatch):
    """import pe imports neither Triton nor kernels, and does not change os.environ."""
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    code = ("import os; before = dict(os.environ); import sys, torch, types, pe; "
            "assert os.environ == before and not {'triton', 'kernels'} & set(sys.modules); "
            "sys.modules['triton'] = types.ModuleType('triton'); "     # an early, broken import
            "import kernels; x = torch.randn(1, 1, 4, 4); kernels.attention_reference(x, x, x); "
            "pe.build(pe.PEConfig(pe='pope')); kernels.attention(x, x, x)")
    says = python('-c', code).stderr
    assert 'RuntimeError: the kernels require Triton' in says
    assert CUDA or 'too late to choose' in says
    monkeypatch.setitem(sys.modules, 'kernels', None)
    assert pe.kernels(required=False) is None
    refused('requires kernels.py beside pe.py', pe.kernels)


COMPILE = """
import sys, types, torch, triton, kernels
from triton.backends.compiler import GPUTarget
arch, shared = int(sys.argv[1]), int(sys.argv[2])
triton.runtime.driver.set_active(types.SimpleNamespace(
    get_current_target=lambda: GPUTarget('cuda', arch, 32),
    get_current_device=lambda: 0, get_current_stream=lambda device: 0))
kernels.shared_memory = lambda device: shared
run = triton.JITFunction.run
def compile_only(kernel, *args, **kw):  # launches nothing; ptxas makes machine code
    made, half = run(kernel, *args, **(kw | dict(warmup=True))), dtype != 'float32'
    assert made.metadata.shared <= shared, kernel
    if kernel in (kernels.forward_kernel, kernels.queries_kernel, kernels.keys_kernel):
        products = ['wgmma.mma_async' in made.asm['ptx'], 'mma.sync.' in made.asm['ptx']]
        assert products == [half and arch == 90, half and arch < 90], kernel
triton.JITFunction.run = compile_only
for call in sys.argv[3:] + ['cursor_scan/64/float32']:
    name, D, dtype = call.replace('pe/', 'pe_attention/').split('/')
    inputs = kernels.sample_inputs(name, 1, 1, 112, int(D), getattr(torch, dtype))
    kernels.outputs_and_gradients(getattr(kernels, name), inputs)
"""


@kernel_test
@pytest.mark.parametrize('args', [      # architecture, bytes per block of shared memory, calls
    '90 232448 pope/128/float16 vipe/64/bfloat16 vipe/128/float32',     # H100
    '89 101376 pope/64/bfloat16 pope/128/bfloat16 vipe/128/bfloat16'])  # RTX 4090
def test_kernels_compile(args):
    """Without a GPU. Half precision uses wgmma on sm_90; float32 products use no tensor cores."""
    run = python('-c', COMPILE, *args.split(), env=os.environ | dict(TRITON_INTERPRET='0'))
    assert run.returncode == 0, run.stderr


# ---- train.py: random numbers, a step, scores, runs and their files, bad input -------------------

def small(**kw):
    """TINY's configuration with the given options, without those that follow from others."""
    kw = {key: x for key, x in kw.items() if key not in train.Config.DERIVED}
    return train.make_config(train.read_options(flags(**kw)))


def log_lines(folder):
    """The entries of a run's log, with steps_per_s=0, because it varies."""
    return [point | dict(steps_per_s=0) for _, point in tables.read_lines(folder / 'log.jsonl')]


def check_same_run(a, b):
    """Assert that the runs in two folders have bitwise the same weights and the same log."""
    of_a, of_b = (train.read_checkpoint(folder)['model'] for folder in (a, b))
    torch.testing.assert_close(of_a, of_b, rtol=0, atol=0)
    assert log_lines(a) == log_lines(b)


def sigterm_in_step(step):
    """A context in which training step number `step`, from 1, sends SIGTERM to this process."""
    def seed_and_signal(cfg, number, seed_noise=train.seed_noise):
        seed_noise(cfg, number)
        if number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)           # a second signal would end the process
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return mock.patch.object(train, 'seed_noise', seed_and_signal)


def drawn(steps, cfg):
    """The problems of these steps, as tuples without padding, a list for each step."""
    batches = train.Batches(cfg, CPU)
    return [[tuple(x[x != 0].tolist()) for rows in batches(i)[::2] for x in rows] for i in steps]


def test_a_batch_follows_from_the_seed_and_the_step_alone(monkeypatch):
    """Seeds, steps and processes differ in noise; a token outside the vocabulary names its task."""
    cfg = small(train_lengths='30-33', length_schedule='[(0, 30), (70, 33)]', batch_size=6)
    steps = [0, 63, 64, 69, 70, 133, 134]                  # pools begin at 0, 64, 70 and 134
    assert [train.pool_at(cfg, step)[1] for step in (63, 64, 70)] == [
        range(64), range(64, 70), range(70, 134)]
    assert drawn(steps, cfg) == drawn(steps[::-1], cfg)[::-1]
    one, other = (train.build(small(seed=seed), CPU)[0].head.weight for seed in (0, 1))
    assert not torch.equal(one, other)
    noise = set()
    for seed, step, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        with mock.patch.object(train, 'RANK', rank):
            train.seed_noise(small(seed=seed), step)
        noise.add(torch.rand(1).item())
    assert len(noise) == 4
    monkeypatch.setattr(tasks.Parity, 'states', lambda self, x: x + 2)
    refused('parity: tokens must be 0 to 5', small)


def test_fixed_problems_are_repeated_in_another_order():
    """A later stage adds problems. A batch mixes lengths, as rows of two widths."""
    cfg = small(n_train=9, batch_size=6, length_schedule='[(0, 2), (6, 3)]')       # 18, then 27
    first, again, longer = (sum(drawn(range(*x), cfg), []) for x in ((0, 3), (3, 6), (6, 10)))
    assert first != again and sorted(first) == sorted(again) and len(longer) == 24
    assert Counter(row for row in longer if len(row) < 9) <= Counter(first)
    staged = train.Batches(small(length_schedule='[(0, 1), (5, 3)]'), CPU)
    shapes = [[x.shape for x in staged(step)[::2]] for step in (0, 4, 5)]
    assert shapes == [[(8, 5)], [(8, 5)], [(4, 7), (4, 9)]]
    assert len({len(row) for row in drawn([5], staged.cfg)[0]}) == 3



@pytest.mark.parametrize('kw', [dict(length_schedule='[(0, 39), (70, 40)]'), dict(n_train=1500)])
def test_held_out_problems_are_never_trained_on(kw):
    """Problems too long to repeat by chance occur once over stages, seeds and parts."""
    cfgs = [small(train_lengths='39,40', eval_lengths='39,40', n_eval=200, n_test=200, seed=seed,
                  **kw) for seed in (0, 39)]
    trained = {row for cfg in cfgs for batch in drawn(range(150), cfg) for row in batch}
    validation, test = ({tuple(row) for cfg in cfgs for _, (x, _) in train.held_out(cfg, split, CPU)
                         for row in x.tolist()} for split in ('eval', 'test'))
    assert [*map(len, (trained, validation, test))] == [2 * 150 * 8, 400, 400]
    assert len(trained | validation | test) == 2 * 150 * 8 + 800


@pytest.mark.parametrize('decay, rates', [
    ('linear', [0.1, 1, 1, 0.775, 0.55, 0.1]), ('none', [0.1, 1, 1, 1, 1, 1]),
    ('cosine', [0.1, 1, 1, 0.1 + 0.9 * (0.5 + 0.5 ** 1.5), 0.55, 0.1])])
def test_learning_rate_schedules(decay, rates):
    cfg = small(lr=1.0, max_steps=100, warmup_steps=10, min_lr=0.1, decay=decay)
    close([train.learning_rate(cfg, step) for step in (0, 9, 10, 32.5, 55, 100)], rates)


def test_a_step_is_adamw_on_the_clipped_gradient():
    """Every target weighs the same, and penalties count once; alpha's own rate, delta's clamp."""
    cfg = small(accumulate=3, pe='prism+pope', dtype='float64', grad_clip=0.1, beta1=0.8,
                beta2=0.95, weight_decay=0.3, warmup_steps=5, seed=7, prism_recurrent='penalty')
    (ours, optimizer), batches = train.build(cfg, CPU), train.Batches(cfg, CPU)
    model = train.build(cfg, CPU)[0]
    adamw = torch.optim.AdamW(model.optim_groups(cfg.lr, 0.3), betas=(0.8, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: (step + 1) / 5)
    for step in range(4):
        batch = batches(step)
        batch[1][:] = -100 if step == 2 else batch[1]      # a micro-batch without targets
        x, y = (torch.nn.utils.rnn.pad_sequence([row for z in batch[i::2] for row in z], True, fill)
                for i, fill in ((0, 0), (1, -100)))        # one batch of all micro-batches
        adamw.zero_grad()
        loss = model(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        adamw.step()
        warm_up.step()
        model.blocks[0].attn.pe.parts[1].delta.data.clamp_(-2 * math.pi, 0)
        train.set_rates(optimizer, cfg, step)
        close(train.update(ours, optimizer, cfg, *batch), loss.detach(), 1e-9)
    for p, expected in zip(ours.parameters(), model.parameters()):
        close(p.detach(), expected.detach(), 1e-9)


@pytest.mark.parametrize('pe', ['rope', 'pope', 'vipe', 'prism', 'fox', 'stickbreaking'])
def test_a_step_in_bfloat16_is_near_one_in_float32(pe):
    """In its loss and its gradient; products round, but weights and averages stay in float32."""
    found = {}
    for dtype in 'float32', 'bfloat16':
        cfg = small(pe=pe, dtype=dtype, d_model=32, n_head=2, n_layer=2, grad_clip=0)
        (model, optimizer), batch = train.build(cfg, CPU), train.Batches(cfg, CPU)(0)
        with mock.patch.object(optimizer, 'zero_grad'):
            loss = train.update(model, optimizer, cfg, *batch)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found[dtype] = loss, gradient / gradient.norm(), gradient.norm()
        averages = [x for state in optimizer.state.values() for x in state.values()]
        assert {x.dtype for x in (*model.parameters(), *averages, gradient)} == {FULL}
    (loss, direction, norm), (other, near, length) = found.values()
    assert loss != other and abs(other / loss - 1) < 0.02 and abs(length / norm - 1) < 0.05
    assert direction @ near > 0.99


@pytest.mark.skipif(not shutil.which(os.environ.get('CXX', 'g++')), reason='requires a compiler')
def test_compiled_steps_train_as_eager_ones():
    """Losses and weights agree to 1e-5 after four steps. (It takes half a minute.)"""
    found = []
    for compiled in False, True:
        cfg = small(compile=compiled, train_lengths=3, pe='nope', d_model=8)
        (model, optimizer), batches = train.build(cfg, CPU), train.Batches(cfg, CPU)
        with mock.patch.object(torch, 'compile', wraps=torch.compile) as compiler:
            take_step = train.wrapped(model, optimizer, cfg, CPU)
        assert compiler.called == compiled
        losses = [take_step(*batches(step)) for step in range(4)]
        found.append(torch.cat([torch.stack(losses), *(p.flatten() for p in model.parameters())]))
    close(*found, 1e-5)


@variants
def test_no_step_waits_for_the_device(kw, monkeypatch):
    """A CUDA graph can capture a step that reads no value of a tensor; meta tensors have none."""
    cfg = small(n_head=4, n_layer=2, **kw)
    model, batch = train.build(cfg, CPU)[0], [x.to('meta') for x in train.Batches(cfg, CPU)(0)]
    params = list(model.to('meta').parameters())
    optimizer = mock.Mock(param_groups=[dict(params=params, clamp=(-1, 1))])
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)    # meta has none
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kw: contextlib.nullcontext())
    assert train.update(model, optimizer, cfg, *batch).is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason='requires a GPU')
@variants
def test_gpu_graph_trains_as_eager_steps(kw, tmp_path):
    """The losses agree across a pool's end, a change of lengths, and with dropout."""
    for graph in (False, True):
        train.run(small(n_head=4, n_layer=2, d_model=32, train_lengths=[1, 2, 4], n_train=8,
                        dropout=0.1, length_schedule=[(0, 2), (6, 4)], graph=graph, device='cuda',
                        max_steps=20, log_interval=1, out_dir=tmp_path / str(graph), **kw), [])
    graph, eager = ([x['loss'] for x in log_lines(tmp_path / name)] for name in ('True', 'False'))
    close(graph, eager, 1e-4)


def test_evaluate_counts():
    """states and final bar the end token; rows without a target do not count."""
    task, model = tasks.make('copy'), torch.nn.Module()
    tokens, targets = task.sample(5, 3, generator(0))
    targets[4], targets[3, :5] = -100, -100                # no target; three: s_2, s_3 and EoS
    truth, answers = targets.clamp(min=0), targets.clamp(min=0)
    model.forward = lambda tokens: (2 * F.one_hot(answers, 8) + F.one_hot(truth, 8) / 2, None)
    answers[0, 4] = 9 - answers[0, 4]                      # row 0: its first state is wrong
    answers[1, 6] = tasks.EOS                              # row 1: its last state is an end token
    answers[2, 6] = 9 - answers[2, 6]                      # row 2: its last state
    scores = train.evaluate(model, task, [(3, (tokens, targets))])[3]
    assert scores == dict(exact=0.25, token=0.8, last=0.5, n=4, states=round(9 / 11, 6), final=0.75)
    refused('length 3 has a target', train.evaluate, model, task, [(3, (tokens[4:], targets[4:]))])
    wide, passes = mock.Mock(vocab=range(50304), end=None, corpus=False), []
    model.forward = lambda x: (passes.append(len(x)), F.one_hot(x, 2).float())[::-1]
    train.evaluate(model, wide, [(1, (torch.ones(8, 1024).long(),) * 2)])
    assert min(passes[:-1]) > 1                            # rows in a pass, at a large vocabulary
    table = {1: dict(exact=0.95, token=0.5, n=1), 2: dict(exact=0, token=1, n=3)}
    assert train.summary(small(), table, 'token') == ('87.5 %', '-', 'none')
    assert train.summary(small(train_lengths='1'), table) == ('95.0 %', '0.0 %', 1)


def test_greedy_scores_are_those_of_generated_answers():
    """A model reads its own states; the end token is barred."""
    cfg = small(task='polynomial', pe='vipe', train_lengths='1-3', d_model=32)
    model, task = train.build(cfg, CPU)[0].double().eval(), cfg.the_task
    model.head.weight.data[tasks.EOS:] *= -9               # no padding, often the end token
    tokens, targets = task.sample(99, 6, generator(0))
    prompt = tokens[:, :8]                                 # BoS x_1..x_6 EoI
    for _ in range(6):
        logits = model(prompt, total_len=tokens.shape[1])[0][:, -1]
        logits[:, tasks.EOS] = -math.inf
        prompt = torch.cat([prompt, logits.argmax(dim=-1, keepdim=True)], dim=1)
    right, sets = (prompt[:, 8:] == tokens[:, 8:14]).double(), [(6, (tokens, targets))]
    got = train.evaluate(model, task, sets, greedy=True)[6]
    close([got['greedy_states'], got['greedy_final']], [right.mean(), right[:, -1].mean()], 1e-6)
    assert 0 < got['greedy_final'] < 1 and got['states'] != got['greedy_states']


def test_a_run_and_its_files(tmp_path, capsys):
    """Scores are those of held-out problems. The log has the loss and the rate of its own step."""
    assert train.main(flags(out_dir=tmp_path, seed=4, greedy=True, dropout=0.1)) == 0
    assert 'final, greedy' in capsys.readouterr().out
    scores, log = json.loads((tmp_path / 'lengths.json').read_text()), log_lines(tmp_path)
    assert [point['step'] for point in log] == list(range(2, 13, 2))
    assert [point['step'] for point in log if 'eval' in point] == [4, 8, 12]
    model, cfg = train.load(tmp_path)
    assert cfg.task == 'parity' and cfg.seed == 4 and not model.training
    for split, found, greedy in ('eval', log[-1]['eval'], False), ('test', scores, True):
        sets = train.held_out(cfg, split, CPU)
        again = train.evaluate(model, cfg.the_task, sets, greedy=greedy)
        assert found == {str(n): score for n, score in again.items()}
    (model, optimizer), batches = train.build(cfg, CPU), train.Batches(cfg, CPU)
    for step in range(6):
        train.seed_noise(cfg, step)
        train.set_rates(optimizer, cfg, step)
        loss = train.update(model, optimizer, cfg, *batches(step)).item()
    assert log[2] == dict(step=6, loss=loss, lr=train.learning_rate(cfg, step), steps_per_s=0)


def test_a_finished_run_is_replaced_only_on_request(tmp_path, capsys):
    """The same command prints its table. --overwrite deletes the files of the old run only."""
    run, results = tmp_path / 'r', tmp_path / 'results.jsonl'
    own = {'report.md', 'ckpt.pt.tmp', 'eval_mine.json', 'probe_notes.txt'}    # files of a user's
    argv = flags(out_dir=run)
    train.main(argv)
    train.main([*argv, f'--results={results}', '--t5_buckets=16'])     # not RoPE's
    assert 'finished earlier; --overwrite' in capsys.readouterr().out
    assert len(json.loads(results.read_text())['scores']['exact']) == 5
    train.main([*argv, '--n_test=20'])                     # only the test is repeated
    assert '"n": 20' in (run / 'lengths.json').read_text()
    kept = {path: path.read_bytes() for path in run.iterdir()}
    refused('trained with lr=0.001, not 0.5: .*--overwrite', train.main, [*argv, '--lr=0.5'])
    with mock.patch.object(os, 'fsync', side_effect=OSError(28, 'No space left on device')):
        refused('cannot write .*: No space left', train.main, [*argv, '--n_test=9'])
    with mock.patch.object(train, 'build', side_effect=MemoryError), pytest.raises(MemoryError):
        train.main([*argv, '--overwrite'])                 # the old run is kept until it begins
    assert kept == {path: path.read_bytes() for path in run.iterdir()}
    for name in ('probe_axes.json', 'eval.json', 'eval_pe=yarn.json', *own):
        (run / name).touch()
    with sigterm_in_step(1):
        train.main([*argv, '--lr=0.5', '--overwrite'])
    assert 'the same command, without --overwrite' in capsys.readouterr().out
    assert {path.name for path in run.iterdir()} == {'.lock', 'ckpt.pt', 'config.json', *own}


def test_an_unusable_folder_is_noticed_before_training(tmp_path, monkeypatch):
    """It is in use, the disk is full, or it has files that are not of a run, which are kept."""
    monkeypatch.setattr(train, 'update', None)
    argv, names = flags(out_dir=tmp_path), ['eval.json', 'probe_x.png', 'log.jsonl', 'lengths.json']
    with mock.patch('fcntl.flock', side_effect=BlockingIOError):
        refused('another process is training', train.main, argv)
    with mock.patch.object(os, 'fsync', side_effect=OSError(28, 'No space left on device')):
        refused('cannot write .*: No space left', train.main, argv)
    with mock.patch.object(train, 'open', create=True, side_effect=OSError(28, 'No space left')):
        refused('cannot write r.jsonl: No space left', train.append_line, 'r.jsonl', {})
    for name, more in itertools.product(names, ([], ['--overwrite'])):
        (tmp_path / name).write_text('of another program')
        refused(f'{name} of another program', train.main, argv + more)
        (tmp_path / name).unlink()
    (tmp_path / '.lock').unlink()
    (tmp_path / 'ckpt.pt').write_text('of nanoGPT')
    refused('ckpt.pt of another program', train.main, [*argv, '--overwrite'])
    assert [path.name for path in tmp_path.iterdir()] == ['ckpt.pt']


@pytest.mark.parametrize('kw', [
    dict(pe='shifted_ape', dropout=0.1, log_interval=5),
    dict(n_train=9, length_schedule='[(0, 2), (5, 3)]', accumulate=3),
    dict(dtype='float64', pe='prism+pope', max_steps=9),
    *[pytest.param(dict(device='cuda', dropout=0.1), marks=pytest.mark.gpu)] * CUDA], ids=str)
def test_stopped_at_any_step_and_continued_is_bitwise_the_same(kw, tmp_path):
    whole, handler = tmp_path / 'whole', signal.getsignal(signal.SIGINT)
    train.main(flags(out_dir=whole, **kw))
    for stop_at in (1, 4, 7):
        folder = tmp_path / str(stop_at)
        with sigterm_in_step(stop_at):
            assert train.main(flags(out_dir=folder, **kw)) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == handler  # as before the run
        assert train.read_checkpoint(folder)['step'] == stop_at
        with open(folder / 'log.jsonl', 'a') as log:       # as if killed after its next log line
            log.write(f'{{"step":{stop_at + 1},"loss":0}}\n{{"step":')
        train.main(flags(out_dir=folder, **kw))
        check_same_run(whole, folder)


def test_killed_and_continued_is_bitwise_the_same(tmp_path):
    """The killed process has no assertions and docstrings; --help names options by comments."""
    whole, killed = (flags(out_dir=tmp_path / name, pe='t5', t5_buckets=4) for name in 'ab')
    train.main(whole)
    run = python('-OO', '-u', '-c', f"""
import os, train
train.main(['--help'])
def kill_in_step_11(cfg, step, seed_noise=train.seed_noise):
    seed_noise(cfg, step)
    os.kill(os.getpid(), {signal.SIGKILL:d} if step == 10 else 0)      # 0: no signal
train.seed_noise = kill_in_step_11
train.main({killed})
""")
    assert run.returncode == -signal.SIGKILL, run.stderr
    for key in train.keys(train.Config):
        assert re.search(rf'(?m)^    {key}: .+ = .+  # |^    # .+\n    {key}: ', run.stdout), key
    train.main(killed)
    check_same_run(tmp_path / 'a', tmp_path / 'b')


def test_checkpoints_that_do_not_fit(tmp_path):
    """They are refused, but those that lack an option are read."""
    argv, path = flags(out_dir=tmp_path), tmp_path / 'ckpt.pt'
    train.main(argv)
    whole = train.read_checkpoint(tmp_path)
    del whole['config']['decay']
    for says, content in [(r'have changed \(its data', whole | dict(pool=1)),
                          ('has other parameters', whole | dict(model={})),
                          ('older code wrote .*git checkout', dict(config={}, seeds={}))]:
        torch.save(content, path)
        refused(says, train.main, [*argv, '--n_test=9'])   # another test than the finished one
    path.write_bytes(path.read_bytes()[:-99])
    refused('cannot read .*ckpt.pt', train.main, argv)
    whole['config']['train_len'] = 99                      # as if a task became shorter since
    torch.save(whole, path)
    cfg = train.load(tmp_path)[1]                          # FIRE and ViPE depend on train_len
    assert (cfg.train_len, cfg.decay) == (99, 'linear')


def test_a_sweep_makes_one_table_even_if_runs_diverge(tmp_path, monkeypatch, capsys):
    """With a row for each seed. A diverged run keeps its checkpoint and says the same again."""
    results = tmp_path / 'r.jsonl'

    def poisoned(model, optimizer, cfg, *batch, update=train.update):
        loss = update(model, optimizer, cfg, *batch)
        at = cfg.pe, cfg.seed, optimizer.state[model.head.weight]['step']
        if at == ('nope', 0, 6):
            model.head.weight.data[0] = math.nan
        return loss * math.nan if at == ('rope', 2, 8) else loss
    monkeypatch.setattr(train, 'update', poisoned)
    argv = flags(pe='nope,rope', seed='0-2', out_dir=tmp_path / 'sweep', results=results)
    for _ in range(2):
        refused('2 diverged: .*nope,seed=0: .* at step 6; .*rope,seed=2: the loss or a weight was '
                'NaN or infinite at step 8. A lower --lr', train.main, argv)
    out = capsys.readouterr().out
    assert out.count('finished earlier') == 6
    labels = ['nope', '  seed 1', '  seed 2', 'rope', '  seed 0', '  seed 1']
    assert re.findall(r'^(nope|rope|  seed \d) .*│', out, re.M) == 2 * labels
    records = [*map(json.loads, results.read_text().splitlines())]
    assert records[:6] == records[6:]
    assert [x.get('failed', '')[-6:] for x in records[:6]] == ['step 6', *4 * [''], 'step 8']
    for name in ('pe=nope,seed=0', 'pe=rope,seed=2'):
        checkpoint = train.read_checkpoint(tmp_path / 'sweep' / name)
        assert checkpoint['step'] == 4 and checkpoint['model']['head.weight'].isfinite().all()
        refused('diverged: the loss', train.load, tmp_path / 'sweep' / name)
    zero, one = ({1: dict(exact=exact, n=4)} for exact in (0, 1))
    train.show(small(eval_lengths='1'), {'a': {0: zero, 1: one}, 'b': {0: one}})
    means = re.findall(r'^(a|b|  seed \d) +\S+│ +(\S+) %', capsys.readouterr().out, re.M)
    assert means == [('a', '50.0'), ('  seed 0', '0.0'), ('  seed 1', '100.0'), ('b', '100.0')]


def test_two_processes_train_as_one(tmp_path):
    """A signal to one stops both. They continue a run of one process."""
    program = """
import sys, test_all, train
with test_all.sigterm_in_step(7 if train.RANK == 1 else None):
    assert train.main(sys.argv[1:]) == 143
train.dist.barrier()       # until the checkpoint is written
train.run_program(train.main)
"""
    one, two = (flags(out_dir=tmp_path / name, n_layer=2) for name in ('one', 'two'))
    train.main(one)
    with sigterm_in_step(3):
        train.main(two)
    run = python('-m', 'torch.distributed.run', '--nproc_per_node=2', '--no-python', sys.executable,
                 '-c', program, *two, timeout=100)
    assert run.returncode == 0 and run.stdout.count('exact match') > 1, run.stderr
    for x, y in zip(log_lines(tmp_path / 'one'), log_lines(tmp_path / 'two'), strict=True):
        assert x['loss'] == pytest.approx(y['loss'], abs=1e-5) and x.get('eval') == y.get('eval')
    assert len({(tmp_path / name / 'lengths.json').read_text() for name in ('one', 'two')}) == 1
    with mock.patch.object(train, 'WORLD', 2):
        refused('batch_size=3 must be at least 4', small, batch_size=3)


def test_training_goes_on_from_another_run(tmp_path, capsys):
    """With --init_from, the first step sees the old run's logits, although training is longer. The
    options are the old run's; weights of another encoding are drawn; misfits write nothing."""
    base = f'{tmp_path}/base'
    train.main(flags(pe='fire,vipe,rope', out_dir=base, seed='0,1'))
    for pe_ in 'fire', 'vipe', 'rope':
        parent = f'{base}/pe={pe_},seed={{seed}}'
        given = ['--train_lengths=4-9', '--max_steps=2', '--seed=1', f'--init_from={parent}']
        (_, cfg), = train.read_points(train.read_options(given))
        old, saved = train.load(parent.format(seed=1))
        assert (cfg.pe, cfg.d_model, cfg.out_dir[:9]) == (pe_, 16, 'out/from_')
        assert cfg.train_len > cfg.first_len == saved.train_len
        model = train.build(cfg, torch.device('cpu'))[0].eval()
        tokens, _ = cfg.the_task.sample(4, 9)
        assert torch.equal(model(tokens)[0], old(tokens)[0])
    results = tmp_path / 'x.jsonl'
    out = [f'--out_dir={tmp_path}/on', f'--results={results}']
    train.main(given + out + ['--pe=nope,fox'])
    first, second = [json.loads(line)['config'] for line in results.read_text().splitlines()]
    assert first['init_from'] == second['init_from'] == parent
    assert 'except blocks.0.attn.pe.gate.bias, blocks.0.attn.pe.gate' in capsys.readouterr().out
    for more, says in (('--pe=vipe', 'has other weights'), ('--d_model=32', 'has other weights'),
                       ('--task=copy', 'another task or vocabulary'), ('--eval_only', 'begins a'),
                       ('--pe=pi --rope_scale=0.5', 'at least 1'), ('--init_from=no', 'no run in')):
        refused(says, train.main, [*given, f'--out_dir={tmp_path}/not', *more.split()])
    assert not (tmp_path / 'not').exists()
    os.rename(base, base + '_elsewhere')
    assert train.load(f'{tmp_path}/on/pe=fox')[1].first_len == saved.train_len


def test_two_processes_with_dropout_draw_different_masks(tmp_path):
    """They have equal losses at every step, and equal weights in the end."""
    (tmp_path / 'program.py').write_text("""
import os, sys
sys.path.insert(0, os.getcwd())
import torch, train
losses, masks, update = [], [], train.update

def watched(model, *args):
    hook = model.drop.register_forward_hook(lambda module, inputs, y: masks.append(y == 0))
    losses.append(update(model, *args))
    hook.remove()
    weights[:] = [p.detach() for p in model.parameters()]
    return losses[-1]
train.update, weights = watched, []
train.main(sys.argv[1:])
torch.save([losses, weights, masks], f'{os.path.dirname(__file__)}/{train.RANK}.pt')
""")
    run = python('-m', 'torch.distributed.run', '--nproc_per_node=2', tmp_path / 'program.py',
                 *flags(out_dir=tmp_path / 'run', train_lengths=3, dropout=0.2), timeout=100)
    assert run.returncode == 0, run.stderr
    one, other = (torch.load(tmp_path / f'{rank}.pt') for rank in (0, 1))
    torch.testing.assert_close(one[:2], other[:2], rtol=0, atol=0)
    for x, y in zip(one[2], other[2], strict=True):
        assert x.shape == y.shape == (4, 9, 16) and not torch.equal(x, y)
        assert 0.1 < x.float().mean() < 0.3


def test_eval_only_uses_the_runs_own_configuration(tmp_path, capsys):
    """Scores with another encoding have a file of their own; the record has the trained values."""
    run, results = tmp_path / 'run', tmp_path / 'r.jsonl'
    again = ['--eval_only', f'--out_dir={run}', f'--results={results}']
    with mock.patch.object(train, 'evaluate', wraps=train.evaluate) as evaluate:
        train.main(flags(out_dir=run, pe='rope', dtype='bfloat16'))
        kept = {path: path.read_bytes() for path in run.iterdir()}
        train.main([*again, '--eval_lengths=2,9'])
        assert f'wrote {run}/eval.json' in capsys.readouterr().out
        train.main([*again, '--eval_lengths=2,7', '--pe=yarn'])        # with the same weights
    assert [type(call.args[3]) for call in evaluate.mock_calls] == 6 * [torch.autocast]
    out = capsys.readouterr().out
    assert 'parity with yarn' in out and 'was trained with pe=rope' in out
    for name, lengths in ('eval.json', ['2', '9']), ('eval_pe=yarn.json', ['2', '7']):
        assert list(json.loads((run / name).read_text())) == lengths
    assert kept == {path: path.read_bytes() for path in kept}
    plain, yarn = map(json.loads, results.read_text().splitlines())
    assert 'trained_with' not in plain and yarn['trained_with'] == {'pe': 'rope'}
    assert yarn['config']['pe'] == 'yarn' and yarn['config']['max_steps'] == 12
    refused('task=parity; copy is another task', train.main, [*again, '--task=copy'])
    refused('has other parameters', train.main, [*again, '--pe=fire'])
    for flag in ('--n_head=2', '--lr=5', '--max_steps=3', '--seed=1', '--dtype=float32'):
        refused('remove ' + flag.partition('=')[0], train.main, [*again, flag])


@pytest.mark.parametrize('given, says', [
    *[(f'--{x}', x.partition('=')[0] + ' must be') for x in (
        'lr=1e999 seed=1- compile=2 warmup_steps=-1 d_model=True length_schedule=[(5,3)] '
        'length_schedule=[(0,1.5)] length_schedule=[(0,1),(9,2),(5,3)] max_steps=0').split()],
    ('--lr=fast', "--lr=fast: lr must be a number >= 0, as in --lr=0.001; got 'fast'"),
    ('--length_schedule=5', 'length_schedule must be pairs (first step, longest length) from step '
     '0 on, as in [(0, 5), (400, 10)]; got [5]'), ('--decay=exp', 'one of linear, cosine, none'),
    ('--max_steps', 'as in --max_steps=4000; got no value'), ('data = 3', 'data must be text'),
    ('--batchsize=3', "did you mean 'batch_size'"), ('--learning_rate=3', "did you mean 'lr'"),
    ('--epochs=3', "'epochs'; --help lists them"), ('lr = 1\nseeds = 2', "did you mean 'seed'"),
    ('def lr(): pass', 'lr must be a number'), ('raise SystemExit(0)', 'bad.py: SystemExit: 0'),
    ('lr = = 2', 'bad.py: SyntaxError'), ('lr = 1\nseed = [x]', 'bad.py: NameError'),
    ('--lr=1 none.py', 'none.py: FileNotFoundError'), ('--task=pairty', "'parity'"),
    ('--d_model=32,33', 'even'), ('--device=cuda:7', 'available'), ('--accumulate=9', 'accumulate'),
    ('--task=distance --train_lengths=8,9 --causal=False', 'one training length'),
    ('--pe=rope,prism --causal=False', 'causal=False requires'), ('--beta1=1.5', 'below 1'),
    ('--task=scan --train_lengths=23', 'no problems of these train_lengths'),
    ('--task=jsb', 'add --data=PATH'), ('--task=text --data=nowhere', 'nowhere is missing'),
    ('--pe=yarn --rope_base=1', 'above 1'), ('--pe=prism --prism_layers=["a"]', 'must contain 1'),
    ('--n_train=1', 'too few problems'), ('--length_schedule=[(0,0)]', 'below all train_lengths'),
    ('--n_test=1000000000', 'n_test must be an integer >= 0 (a size: below 10^9)'),
    ('--train_lengths=1000000000', 'train_lengths must be integers below 10^9'),
    ('--length_schedule=1-1000000000', 'length_schedule must be a list'),
    ('--graph', '--graph requires a CUDA device'), ('--eval_only --pe=nope,rope', 'one trained'),
    ('--eval_only --out_dir=nowhere', 'no run in nowhere')])
def test_bad_input_is_one_clear_line(given, says, tmp_path, monkeypatch):
    """Of flags or a config file. Nothing is trained, not even the first point of a sweep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'bad.py').write_text(given)
    argv = given.split() if given.startswith('--') else ['bad.py']
    refused(re.escape(says), train.main, flags() + argv)
    assert not list(tmp_path.rglob('ckpt.pt'))


def test_files_and_flags_chain(tmp_path):
    """Each value takes the type of its option; reading options leaves torch's random state."""
    a, b, before = tmp_path / 'a.py', tmp_path / 'b.py', torch.get_rng_state()
    a.write_text('\ufefftask = "copy"\nlr = 0.5\nmax_steps = 10\nn_layer = 4.0\nn_test = "5"\n')
    b.write_text('# on top of a\nlr = lr / 2\ndropout = 0\nseed = range(3)\nn_eval = [7]\n')
    values = train.read_options([
        str(a), str(b), '--pe=learned', '--max_steps=1e3', '--n_head=2', '--eval_lengths=1-3,7',
        '--train_lengths=5', '--min_lr=0.1, 0.2', '--length_schedule=[(0, 5), (9, 7)]',
        '--compile=false', '--graph=None', '--overwrite', '--results=1,2'])
    expected = dict(
        task='copy', lr=0.25, n_layer=4, n_test=5, dropout=0.0, seed=[0, 1, 2], n_eval=7,
        max_steps=1000, n_head=2, eval_lengths=[1, 2, 3, 7], train_lengths=[5], min_lr=[0.1, 0.2],
        length_schedule=[(0, 5), (9, 7)], compile=False, graph=None, overwrite=True, results='1,2',
        out_dir='out/copy_learned_seed_min_lr')
    assert repr({key: values[key] for key in expected}) == repr(expected)      # types, too
    cfg = train.make_config(values | dict(seed=1, min_lr=0.0))
    assert torch.equal(torch.get_rng_state(), before)
    assert (cfg.vocab_size, cfg.train_len, cfg.eval_len) == (6, 13, 17)
    values = train.read_options(['--task=copy,sort', '--n_head=1,2', '--seed=0-2,5'])
    assert values['seed'] == [0, 1, 2, 5] and values['out_dir'] == 'out/rope_n_head_seed'
    assert train.Config(task='text', data='nowhere', pe='yarn', rope_base=1.0).vocab_size == 64
    b.write_text('data = "~/x"')
    values = train.read_options([str(b), '--results=~/y', '--seed=4294967295'])
    assert [values['data'], values['results']] == [os.path.expanduser(x) for x in ('~/x', '~/y')]


@pytest.mark.parametrize('name', sorted(os.listdir(tables.ROOT / 'configs')))
def test_configs_are_valid(name):
    """A model can be built from each config; tasks that read files are replaced by another."""
    values = train.read_options([str(tables.ROOT / 'configs' / name)])
    assert re.match('{task}_{pe}.py|addition_prism.py|paper_'.format(**values), name)
    if tasks.TASKS[values['task']].needs:
        values['task'] = 'scan' if values['task'] == 'cfq' else 'stdlib'
    for _, cfg in train.read_points(values):
        with torch.device('meta'):                         # allocates no memory
            Transformer(cfg)


# ---- probe.py: each probe finds what was planted, or agrees with a loop --------------------------

def nano(task='copy', longest=8, **kw):
    """(model, task, cfg) with random weights, as from a run with training lengths 1..longest."""
    lengths = dict(train_lengths=f'1-{longest}', eval_lengths=f'1-{longest + 4}')
    cfg = small(**dict(task=task, n_layer=2, dtype='float64') | lengths | kw)
    return probe.untrained(cfg).requires_grad_(False), cfg.the_task, cfg


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


@pytest.mark.parametrize('kw, refusals', [
    (dict(pe='pope'), {'n_head=4': 'ablate gradients'}),
    (dict(pe='ape+rope', n_head=8), {'not ape': 'disentangle stretch'}),
    (dict(pe='nope', n_head=2, n_layer=1),
     {'not nope': 'disentangle stretch', 'use rope': 'tuples', 'depend on the distance': 'tuning'}),
    (dict(pe='prism', n_head=2),
     {'not prism': 'disentangle stretch', 'use rope': 'tuples', 'from the content': 'tuning'}),
    (dict(pe='alibi', n_head=2, causal=False, task='distance', train_lengths=[8], eval_lengths=[8]),
     {'causal mask': 'axes disentangle stretch toeplitz tuning', 'unique correct key': 'alignment',
      'use rope': 'tuples', 'eval_lengths above 8': 'linear'}),
    (dict(pe='rope', n_head=2, task='text', data=__file__), {'unique correct key': 'alignment'})],
    ids=str)
def test_every_probe_on_every_kind_of_run(kw, refusals):
    """A probe returns JSON numbers and a figure, or refuses, and leaves the model as it was."""
    model, task, cfg = nano(**dict(task='parity', longest=4, dtype='float32') | kw)
    expected = {} if cfg.pe == 'prism' else dict.fromkeys(('cursor', 'kernel'), 'run with pe=prism')
    expected |= {} if 'rope' in cfg.pe else dict(dials='dials requires rope')
    expected |= {name: says for says, names in refusals.items() for name in names.split()}
    tokens = probe.batch(task, cfg.train_lengths, 0, 2)[1]
    before = model.requires_grad_(True)(tokens)[0]
    plt = pytest.importorskip('matplotlib.pyplot')
    small = dict(n=4, steps=0, gammas=[0.5], l_max=[3])
    for name, function in probe.PROBES.items():
        own = small.keys() & inspect.signature(function).parameters
        run = partial(function, model, task, cfg, **{key: small[key] for key in own})
        if name in expected:
            refused(expected[name], run)
            continue
        rows, summary, draw = run()
        assert torch.equal(model(tokens)[0], before), name
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), name
        json.dumps(dict(rows=rows, summary=summary), allow_nan=False)
        assert max(map(len, probe.as_text(rows, summary).splitlines())) <= 130, name
        figure = draw(plt)
        figure.set_layout_engine('none')  # slow
        figure.draw_without_rendering()
        plt.close(figure)


def test_the_program(tmp_path, monkeypatch, capsys):
    """It writes no other files, lists the probes and refuses mistakes; gradients retrains."""
    run, found = tmp_path / 'run', tmp_path / 'run/probe_cursor.json'
    train.main(flags(task='string_copy', pe='prism', n_head=2, out_dir=run, seed=3, dropout=0.1))
    for mine in ('probe_cursor.txt', 'probe_cursor.json.tmp', 'probe_norms.png'):
        (run / mine).touch()
    before = {path: path.read_bytes() for path in run.iterdir()}
    probe.main(['cursor', str(run), '--length=5'])
    assert {path: path.read_bytes() for path in before} == before
    probe.main(['norms', str(run), '--n=1', f'--out_dir={tmp_path}'])      # has a control
    assert 'used, untrained' in json.loads((tmp_path / 'probe_norms.json').read_text())['summary']
    model, cfg = train.load(run)
    rows = probe.gradients(model, cfg.the_task, cfg)[0][-3:]
    before_last, last, saved = ([row[key] for key in ('first', 'least', 'most')] for row in rows)
    assert last == saved != before_last
    assert (run / 'probe_cursor.png').exists() == ('matplotlib' in sys.modules)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    probe.main(['cursor', str(run), '--length=4'])
    assert json.loads(found.read_text())['summary']['length'] == 4
    assert not (run / 'probe_cursor.png').exists()  # the old figure is deleted
    for line, says in (
            ('perturb RUN --gammas=0.5,2', r'fractions in \(0, 1\]'), ('cursor', 'give one run'),
            ('axes RUN --n=0', '--n must be an integer ≥ 1, got 0'), ('cursr RUN', "'cursor'?"),
            ('cursor RUN --lenght=5', '--lenght=5'), ('cursor RUN --length=x', "'x'"),
            ('cursor RUN --length=9999', '2 to 8,192'), ('axes nowhere', 'no run in nowhere'),
            ('axes by_hand:mode', 'by_hand:mode: .* copy, parity, polynomial'),
            ('axes --hf=RUN', 'requires a text'), ('cursor --hf=RUN', r'a probe marked \*'),
            ('axes --hf=none --text=RUN', 'no such file or folder: none'),
            ('ablate RUN --what=positions', r'pe=ape or ape\+prism'),
            ('gradients RUN --steps=99', 'take fewer'), ('stretch RUN --layer=2', '1 to 1')):
        refused(says, probe.main, line.replace('RUN', str(run)).split())
    capsys.readouterr()
    probe.main([])
    assert re.findall(r'(?m)^  (\w+)[ *]+[A-Z].*[?.]$', capsys.readouterr().out) == [*probe.PROBES]


def test_problems_are_those_of_the_scores_and_constants_have_no_correlation():
    _, task, cfg = nano('addition_cot')
    found = probe.problems(task, [3], cfg.n_test)[3][0]
    assert torch.equal(found, dict(train.held_out(cfg, 'test', 'cpu'))[3][0])
    rows = probe.sequences(task, cfg.train_lengths, 3, 20)
    assert all(row.all() for row in rows) and len({row.shape for row in rows}) > 1  # no padding
    found = probe.head_rows(dict(r=torch.arange(122.0).view(2, 61)))
    assert found == [dict(layer=1, r=30.0), dict(layer=2, r=91.0)]
    assert probe.largest(torch.tensor([[math.nan, 1, 0], [0, 2, 0]])) == (1, 1)
    x, y = at_random(2, 4, 50)
    x[1], x[3], y[2:] = -1e6, 0, 0.1
    assert probe.correlation(x, y).isnan().tolist() == [False, True, True, True]


def test_alignment_finds_the_iteration_head():
    """Layer 2 attends to x_t at every length, even if the output is wrong."""
    model, cfg = probe.iteration_head('copy')
    rows, summary, _ = probe.alignment(model, cfg.the_task, cfg, length=120, n=2)
    assert summary == dict(n=2, head='2.1')
    assert all(row['2.1'] == row['exact'] == row['states'] == row['first'] == 1 for row in rows)
    longest = max(cfg.train_lengths)  # in longer problems, another key is at this distance
    assert all(row['as trained'] == (row['length'] <= longest) for row in rows)
    assert not any(row['early'] for row in rows)
    model.head.weight[4] = 0  # the symbol 0 is never predicted
    rows, _, _ = probe.alignment(model, cfg.the_task, cfg, length=17, n=99, distances=[1])
    right = (probe.problems(cfg.the_task, [3], 99)[3][1][:, 4:7] != 4).double()  # of EoI, s_1, s_2
    close([rows[2][key] for key in ('exact', 'states', 'd=1')],
          [right.prod(dim=1).mean(), right.mean(), right[:, 1].mean()], 6e-5)
    model.head.weight[cfg.the_task.end, len(cfg.the_task.vocab)] = 1e4  # EoS always
    row = probe.alignment(model, cfg.the_task, cfg, length=9, n=2)[0][-1]
    assert (row['early'], row['first']) == (1, 0)


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
    """From layer 1 of the iteration head, the distance to EoI is decoded exactly at all lengths."""
    found = probe.agreement(torch.tensor([1, 2, 2, 4, 5]), torch.tensor([1.0, 3, 2, 2, 7]))
    assert found == pytest.approx(dict(
        rmse=1.8 ** 0.5, mae=1.0, r2=1 - 9 / 10.8, pearson=12 / (10.8 * 22) ** 0.5,
        spearman=7.25 / 9.5), abs=1e-12)
    (model, cfg), state = probe.iteration_head('copy'), torch.get_rng_state()
    rows, _, _ = probe.linear(model, cfg.the_task, cfg, n=4)
    assert torch.equal(torch.get_rng_state(), state)  # although it initializes a control
    at = {(row['target'], row['layer'], row['lengths']): row for row in rows}
    assert len(rows) == 18 and at['distance', 0, 'longer']['r2'] < 0.5
    for row in (at['distance', 1, lengths] for lengths in ('trained', 'longer', '3x')):
        assert row['r2'] == row['pearson'] == 1 and row['untrained'] < 0.9


def test_squeeze():
    """Training has 13 tokens: positions are squeezed to 0..12, keys 13 or more back are masked."""
    model, task, cfg = nano('parity', pe='rope', longest=5, n_layer=1)
    tokens, targets = probe.problems(task, [9], 20)[9]  # 21 tokens
    windows = [model(tokens[:, max(0, t - 12):t + 1])[0][:, -1] for t in range(21)]
    squeezed = model(tokens, pos=torch.linspace(0, 12, 21))[0]
    found = model(tokens)[0], squeezed, torch.stack(windows, dim=1)
    right = [(x.argmax(dim=-1) == targets).sum() / (targets != -100).sum() for x in found]
    row = probe.squeeze(model, task, cfg, n=20)[0][8]
    close([row['tokens' + name] for name in ('', ', squeezed', ', masked')], right, 6e-5)
    assert len({*right}) == 3


def test_loss_by_position():
    """The loss is a mean over problems at each supervised position, here 9 to 16."""
    model, task, cfg = nano('copy', pe='rope', longest=5)  # at most 13 tokens, with 12 targets
    rows, summary, _ = probe.loss(model, task, cfg, length=7, n=5)
    tokens, targets = probe.problems(task, [7], 5)[7]
    curve = train.token_losses(model(tokens)[0], targets)[:, 8:16].mean(dim=0)
    assert [row['first'] for row in rows] == list(range(9, 17))
    close([row['rope'] for row in rows], curve, 1e-4)
    close([summary['rope, trained positions'], summary['rope, beyond']],
          [curve[:4].mean(), curve[4:].mean()], 1e-4)
    layers = [mock.Mock(weights=torch.tensor([[  # head 2 attends to the first token
        [[1, 0, 0], [0.3, 0.7, 0], [0.1, 0.2, 0.7]], [[1, 0, 0], [1, 0, 0], [0.9, 0.1, 0]]]]))]
    assert probe.sharpest_heads(layers, None) == [(0, 0)]


def test_norms_of_planted_frequencies():
    """Of four feature pairs, the second has norm 0. Head 2 has twice the norms of head 1."""
    (model, task, cfg), pairs = nano(pe='rope', n_head=2, n_layer=1), torch.tensor([1.0, 0, 1, 1])
    scale = torch.cat([pairs, 2 * pairs]).repeat_interleave(2)  # (H D,)
    W = model.blocks[0].attn.qkv.weight
    W[:] = W[:1]  # all features of a query are equal, and of a key
    W[:32] *= scale.repeat(2)[:, None]
    rows, summary, _ = probe.norms(model, task, cfg, n=2)
    close([summary['used'], summary['fast']], [3 / 4, 1 / 3], 1e-3)
    layer, = probe.trace(model, probe.batch(task, cfg.train_lengths, 0, 2)[1])
    first = layer.q[:, 0, :, :2].norm(dim=-1).mean() * pairs  # of head 1
    close([row['q'] for row in rows], 1.5 * first, 1e-4)
    close([row['largest_q'] for row in rows], 2 * first, 1e-4)
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
    refused('q and k alone, unlike fox', probe.tuning, *nano(pe='fox'))


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


def test_ablate_subtracts_the_vectors_that_were_added():
    """Without p before layer 1, the loss is that of pe=nope. Random vectors have the norms of p."""
    shape = dict(data=__file__, train_lengths=[12], eval_lengths=[12], n_head=2)
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
    """Toeplitz parts are means along diagonals. Terms of eq. 1 add up to logits linear in q, k."""
    model, task, cfg = nano(d_model=32, n_head=4, **kw)
    rows, _, _ = probe.toeplitz(model, task, cfg, length=8, n=4)
    tokens = probe.batch(task, [8], 8, 4)[1]
    p, (i, j) = probe.added_vectors(model, tokens.shape[1]), np.tril_indices(tokens.shape[1])

    def share(L):
        means = np.array([L.diagonal(-d).mean() for d in range(len(L))])
        return means[i - j].var() / L[i, j].var()
    for layer, block in zip(probe.trace(model, tokens), model.blocks):
        terms = probe.eq_1(layer, block.norm_1, p)
        assert bool(terms) == (cfg.pe not in ('pope', 'ape+vipe'))
        if terms:
            total = sum(terms.values())
            close((total + pe.causal(total)).expand_as(layer.logits), layer.logits)
        for h in range(cfg.heads):
            row = rows.pop(0)
            close(sum(row[name] for name in terms), bool(terms), 1e-3)
            for name, L in (('', layer.logits), ('qp kp ', terms.get('qp kp'))):
                if L is not None:
                    close(row[name + 'toeplitz'], np.mean([*map(share, L[:, h].numpy())]), 6e-5)
    if 'qp kp' in terms:
        model.embedding.weight.zero_()  # before layer 1 the stream is then p
        terms = probe.eq_1(probe.trace(model, tokens)[0], model.blocks[0].norm_1, p)
        assert all(terms[name].abs().max() < 1e-12 for name in terms.keys() - {'qp kp', 'B'})


def test_gradients_jacobians_and_edges():
    """H(d), summed over layers, is the gradient of T5's table; J, a block's Jacobian."""
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
              [*values.aminmax(), heads.argmax() + 1, heads.max(), np.ptp(heads.numpy())], 1e-3)
    close(rows[0]['growth'], rows[0]['margin'] / rows[1]['margin'], 2e-3)
    task = tasks.make('distance')
    tokens, _ = task.sample(200, 12, generator(0))
    b, u, j, d = probe.edges(task, tokens)
    assert (tokens[b, u] == task.query).all()
    assert (tokens[b, j] + tokens[b, j - d] == 2 * task.first_trigger + 1).all()
    assert torch.equal(d // 4 + task.first_class, tokens[:, -1])


def test_cursors_of_two_layers_with_a_copy_branch():
    """Cursors of layer 1 always increment and never jump. The answer begins at "=", token 5."""
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, prism_copy='fixed', n_layer=2,
                            prism_layers=[1, 2], dtype='float32', longest=3)
    for block in model.blocks:
        block.attn.pe.alpha.uniform_(0, 2)
        block.attn.pe.m.uniform_(-1, 1)
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
    model, task, cfg = nano('string_copy', pe='prism', n_head=2, longest=3, **kw)
    rows, summary, _ = probe.kernel(model, task, cfg)
    assert summary['rises'] == 4  # for d_pe = 32
    T, start, f = 8, 3, partial(pe.sinusoids, width=32, base=10000, like=torch.ones(1).double())
    tokens = probe.batch(task, cfg.train_lengths, 3, 1)[1]  # abc=abc. and its "="
    for c, row in zip(probe.cursors_of(model, tokens), rows):
        h, offsets = c['histogram'][0], torch.arange(-T, T + 1.0).double()
        mean = [(h[t] @ f(offsets) - f(h[t] @ offsets)).norm().item() / 4 for t in range(start, T)]
        close([row['mean'], row['peak']], [statistics.mean(mean), h[start:].amax(1).mean()], 1e-3)
        if 'jump' in c['gates']:
            assert row['eq6'] is None
            continue
        eq_4 = F.pad(probe.displacement(c, start + 1), (12, 12))  # displacements -16..16
        both = torch.outer(h[start], h[-1])  # of the first and the last token
        eq_6 = torch.stack([both.diagonal(d).sum() for d in range(-2 * T, 2 * T + 1)])
        close(row['eq6'], (eq_6 - eq_4).abs().sum() / 2, 1e-3)
        assert summary['eq6'] >= row['eq6'] > 0.01


def test_three_axes_solve_equation_7_and_two_axes_equation_12():
    """Residuals at each distance, query, key add up to ridge times a_d, b_i, c_j: d eq. 6 is 0."""
    W, (i, j) = at_random(2, 9, 9), torch.tril_indices(9, 9)
    a, b, c, fit = probe.three_axes(W, ridge=1e-3)
    rest = (W - fit).tril()
    close(torch.stack([rest.diagonal(-d, 1, 2).sum(dim=-1) for d in range(9)], dim=1), 1e-3 * a)
    close(torch.stack([rest.sum(dim=2), rest.sum(dim=1)]), 1e-3 * torch.stack([b, c]))
    close(fit[:, i, j], a[:, i - j] + b[:, i] + c[:, j])
    x, y = W[0], probe.three_axes(W)[-1][0]
    centred = [torch.cat([z[t, :t + 1] - z[t, :t + 1].mean() for t in range(9)]) for z in (x, y)]
    close(probe.axes_fit(W)[:, 0], [np.corrcoef(*z)[0, 1] for z in ((x[i, j], y[i, j]), centred)])
    a, b, fit = probe.two_axes(x)
    close(fit, a[:, None] + b)
    close([*(x - fit).mean(dim=0), *(x - fit).mean(dim=1)], [0] * 18)
    model, task, cfg = nano(pe='alibi', n_head=2)
    for block in model.blocks:
        block.attn.qkv.weight[:16] = 0  # queries of 0: only the bias is left
    assert probe.disentangle(model, task, cfg, n=1)[1]['mean_r'] == 1
    rows, _, _ = probe.disentangle(*nano(pe='rope', n_head=2, rope_heads=1), n=1)
    assert [row['r_random'] is None for row in rows] == [False, True] * 2  # head 2 has no rotation
    for name in ('ape', 'fire', 'vipe'):  # depend on positions or content
        refused(f'pe=rope, not {name}', probe.disentangle, *nano(pe=name))


@pytest.mark.parametrize('kw', [
    dict(pe='rope'), dict(pe='pope', pope_delta='uniform'), dict(pe='rope', attention='mla'),
    dict(pe='rope', rope_fraction=0.5), dict(pe='alibi', rope_heads=1), dict(pe='yarn'),
    dict(pe='pope+alibi'), dict(pe='rope', rope_pairs='half'), dict(pe='yarn', rope_pairs='half')],
    ids=str)
def test_logits_at_other_distances(kw):
    """logits_at() gives the model's logits at true positions, and fake_logits() at distances."""
    layer, pos = probe.trace(make(**kw), torch.arange(1, 11)[None])[0], torch.arange(10)
    below = torch.ones(10, 10, dtype=torch.bool).tril()
    close(probe.logits_at(layer, pos, pos)[..., below], layer.logits[..., below])
    close(probe.fake_logits(layer, 7)[:, 7 - pos[:8], pos[:8]], layer.logits[0, :, 7, :8])
    if kw['pe'] in ('rope', 'pope', 'yarn') and 'attention' not in kw:
        polar = probe.polar(layer.enc, layer.q[0], layer.k[0])
        logits = rotated_products(*polar, pos) * layer.enc.scale
        close(logits[:, below], layer.logits[0][:, below])


def test_probes_read_the_pairs_that_rope_rotates():
    """With rope_pairs=half, a model whose features are moved as follows has the same tables."""
    (model, task, cfg), (half, _, _) = (
        nano(pe='rope', n_head=2, rope_pairs=pairs) for pairs in ('adjacent', 'half'))
    order = torch.arange(16).view(2, 4, 2).mT.flatten()  # of each head: features 0, 2, .., 1, 3, ..
    for block in half.blocks:
        qk = block.attn.qkv.weight[:32].view(2, 16, 16)
        qk[:] = qk[:, order]
    for function in (probe.norms, probe.tuning, probe.axes, probe.disentangle, probe.tuples):
        assert function(half, task, cfg)[:2] == function(model, task, cfg)[:2]


def test_slow_dominating_pairs_eq_15_and_its_control():
    """Pair 8 is slow and dominates; pair 1 is fast. Eq. 15's g, of deviations, is not rotated."""
    model, task, cfg = nano(pe='rope', n_head=1, n_layer=1)
    q = torch.polar(torch.tensor([20.0] + [1] * 6 + [20]), torch.tensor([0.0] * 7 + [2]))
    model.embedding.weight.zero_()[:, 0] = 1  # the same for all tokens
    model.blocks[0].attn.qkv.weight[:32].zero_()[:, 0] = torch.cat(
        [torch.view_as_real(q).flatten(), torch.tensor([1.0, 0]).repeat(8)]).double()
    (row,), summary, _ = probe.tuples(model, task, cfg, n=2)
    assert summary == dict(pairs=1, heads=1, of_heads=1, fixed=0)
    found = dict(layer=1, head=1, pair=8, ratio=20, wavelength=2 * math.pi * 10 ** 3.5,
                 rotation=cfg.train_len / 10 ** 3.5, angle=2, fixed=0)
    assert row == pytest.approx(found, rel=1e-3, abs=1e-3)
    zq, zk = (torch.complex(*at_random(2, 1, 50, 6, seed=seed)) for seed in (0, 1))
    zk[..., 0] += 3
    theta, pos = torch.tensor([0.1] + [1.0] * 5).double(), torch.arange(50)
    pairs = torch.arange(6)[None] == 0
    kbar = zk.mean(dim=1, keepdim=True).expand_as(zk)
    W, own, f = (rotated_products(q, k, theta, pos)
                 for q, k in ((zq, zk), (zq * pairs, zk), (zq * pairs, kbar)))
    g = rotated_products(zq * pairs, torch.polar((zk - kbar).abs(), zk.angle()), 0 * theta, pos)
    lower = np.tril_indices(50)
    r = np.corrcoef([x[0][lower] for x in (own, f + g, W)])
    close(probe.analytic_fit(W, zq, zk, theta, pairs)[:, 0], [r[0, 1], r[2, 0], r[2, 1]])
    one = torch.ones(2, 12, 1) + 0j  # fits a sum for random phases only if it does not rotate
    for angle, fits in ((0, True), (math.pi, False)):
        r = probe.random_phases(one, one, torch.tensor([angle]), [11])
        assert ((r > 0.99) == fits).all()


def test_tokens_and_positions_move_by_at_most_l_max():
    """A fraction gamma of the tokens swap in disjoint pairs; of the positions, it is drawn."""
    t = torch.arange(400)
    order = probe.transposition(400, 0.5, 5, generator(0))
    moves = probe.offsets(400, 0.5, 5, generator(0))
    assert torch.equal(order[order], t) and (order != t).sum() == 200
    assert set((order - t).tolist()) == set(moves.tolist()) == set(range(-5, 6))
    close((moves != 0).double().mean(), 0.5, 0.1)


@pytest.mark.parametrize('kind', probe.KINDS)
def test_perturbed_and_original_have_the_same_targets(kind):
    """Both scores are on targets that did not move; each sequence and layer has its own draw."""
    model, task, cfg = nano('copy', pe='rope', longest=6)
    tokens, targets = probe.batch(task, [6], 0, 5)[1:]
    before = probe.perturbed(model, tokens, targets)
    t = torch.arange(tokens.shape[1])
    draws = [0 * t, t] if kind == 'position' else [t, t.flip(0)]  # nothing moves in layer 1
    draw = mock.Mock(side_effect=draws * 5)
    with mock.patch.multiple(probe, offsets=draw, transposition=draw):
        y = probe.perturbed(model, tokens, targets, kind, 0.5, 4)[2] - before[2]
    assert len({call.args[3].initial_seed() for call in draw.mock_calls}) == 5 * 2
    close(y[:, 0], torch.zeros_like(y[:, 0]))
    assert (y[:, 1].abs().max() > 1e-3) == (kind != 'text')
    after = probe.perturbed(model, tokens, targets, kind, 1.0, 4)
    for seed, x in enumerate((before, after)):  # random weights are hardly ever correct
        x[1] = at_random(*targets.shape, seed=seed) > -1
    row, moved = probe.perturb_scores(after, before, targets), after[-1]
    assert moved.any() == (kind == 'text')
    asked = [(i, t) for i, t in (targets != -100).nonzero().tolist() if not moved[i, t + 1]]
    exact = [all(after[1][at] for at in asked if at[0] == i) for i in {i for i, _ in asked}]
    values = *([x[at] for at in asked] for x in (after[0], after[1], before[0])), exact
    close([row[key] for key in ('loss', 'token', 'loss before', 'exact')], [*map(np.mean, values)],
          2e-4)
    assert row['output'] > 0


def test_dials():
    """Fractions of circles by marking 720 angles that real distances reach."""
    model, task, cfg = nano(pe='rope', d_model=32, n_head=2)        # head_dim 16: 8 pairs
    rows, summary, _ = probe.dials(model, task, cfg)
    theta = 10.0 ** -(torch.arange(8).double() / 2)
    L, others = cfg.train_len, {'pi': theta / 4, 'ntk': theta * 4 ** -(torch.arange(8) / 7)}

    def reached(theta, end):                                # (8, 720): the marked angles
        angles = torch.linspace(0, end, 40 * 720).double()[:, None] * theta
        return F.one_hot((angles / torch.pi * 360).long() % 720, 720).amax(dim=0).bool()
    seen = reached(theta, L - 1)
    for key, end, turning in (('rope 2x', 2 * L - 1, theta), ('rope 4x', 4 * L - 1, theta),
                              *((name, 4 * L - 1, x) for name, x in others.items())):
        new = (reached(turning, end) & ~seen).double().mean(dim=1)
        close([row[key] for row in rows], new, 2e-3)
    close([row['turns'] for row in rows], theta * (L - 1) / (2 * torch.pi), 1e-3)
    assert (summary['pair 1 slowed, pi'], summary['pair 1 slowed, ntk']) == (4, 1)


def test_stretch():
    """A window gives attention's outputs of its tokens; nearest() agrees with a loop."""
    model, tokens = make(pe='pope+t5'), torch.arange(1, 11)[None]
    layer, other = (probe.trace(model, x)[0] for x in (tokens, tokens[:, [0, 1, 4, 5, 6, 7]]))
    for of, *given in ((layer, 9, 0, 10), (other, 7, 2, 6, 2)):
        found = probe.sliding(layer, torch.tensor(given[:1]), *given[1:])[0]
        close(found, of.y[0, :, -1].flatten())
    normal, later = at_random(60, 5), at_random(3, 5, seed=1) + 1
    xs = normal.tolist()
    least = [min(math.dist(x, y) for y in xs if y is not x) for x in xs + later.tolist()]
    close(probe.nearest(later, normal) * statistics.median_low(least[:60]), least[60:], 1e-6)
    model, task, cfg = nano(pe='rope', n_head=2)
    y = probe.trace(model, probe.batch(task, cfg.eval_lengths, 0, 3)[1])[0].y.transpose(1, 2)
    normal, later = (x.flatten(2).flatten(0, 1) for x in (y[:, :6], y[:, 6:]))
    found = probe.stretch(model, task, cfg, n=3, window=6)[0][0]['median']
    close(found, probe.nearest(later, normal).quantile(0.5), 1e-4)


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=67, max_position_embeddings=64,
             initializer_range=0.5, head_dim=12)  # of a Llama


@pytest.fixture
def llama(tmp_path):
    """llama(kind, change, **config) -> (checkpoint's folder, text, model). Weights are random, and
    in the checkpoint as `change` says, without those that it maps to None."""
    transformers, tokenizers = map(pytest.importorskip, ('transformers', 'tokenizers'))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f'w{i}': i for i in range(67)},
                                                             unk_token='w66'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single='w1 $A w2', special_tokens=[('w1', 1), ('w2', 2)])  # begin and end a text
    text = tmp_path / 'text'
    text.write_text(' '.join(f'w{random.Random(i).randrange(1, 66)}' for i in range(200)))

    def make(kind, change=(), **config):
        torch.manual_seed(0)
        config = getattr(transformers, kind + 'Config')(**SMALL | config)
        net = transformers.AutoModelForCausalLM.from_config(config).eval()
        folder = tmp_path / f'net{len(list(tmp_path.iterdir()))}'
        net.save_pretrained(folder, state_dict={
            name: x for name, x in (net.state_dict() | dict(change)).items() if x is not None})
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
        return str(folder), str(text), net
    return make


def test_a_llama_as_one_of_ours(llama, tmp_path):
    """A trace has transformers' attention."""
    rope = dict(rope_type='yarn', rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)
    folder, text, net = llama('Llama', attention_bias=True, rope_parameters=rope)
    model, cfg = probe.load_llama(folder, text)
    row, = probe.sequences(cfg.the_task, [16], 0, 1)
    net.set_attn_implementation('eager')
    with torch.no_grad():
        theirs = net(input_ids=row, output_attentions=True, use_cache=False)
        close(model(row)[0], theirs.logits, 1e-4)
    for layer, attention in zip(probe.trace(model, row), theirs.attentions):
        close(layer.weights, attention, 1e-4)
    where = [f'--hf={folder}', f'--text={text}', f'--out_dir={tmp_path}', '--length=16']
    for name in (function.__name__ for function in probe.LLAMA):
        probe.main([name, *where, *['--l_max=3'] * (name == 'perturb')])
        assert json.loads((tmp_path / f'probe_{name}.json').read_text())['summary']
    tokens, targets = cfg.the_task.lay_out([[0, 1], [1, 0, 1, 0, 1]], 5)
    assert tokens.tolist() == [[1, 0, 1, 0, 0], [1, 1, 0, 1, 0]]
    assert targets.tolist() == [[0, 1, -100, -100, -100], [1, 0, 1, 0, -100]]  # 0 is a token


def test_lengths_at_which_a_llama_changes(llama):
    """The longest length at which attention is as in short texts is probed, the next refused."""
    def scaled(name, **more):
        return dict(rope_parameters=dict(rope_type=name, rope_theta=500.0, factor=4.0, **more))
    long = dict(short_factor=[1.0] * 6, long_factor=[2.0] * 6, original_max_position_embeddings=16)
    for kind, says, config in (
            ('Mistral', 'sliding window', dict(sliding_window=16)),
            ('Llama', 'dynamic scaling', dict(max_position_embeddings=16) | scaled('dynamic')),
            ('Llama', 'longrope scaling', scaled('longrope', **long))):
        folder, text, _ = llama(kind, **config)
        refused(f'at 17 tokens, .*{says}', probe.load_llama, folder, text, 17)
        model, cfg = probe.load_llama(folder, text, 16)
        if kind == 'Llama':  # its distances are longer than the text of the check
            refused(f'at 17 tokens, .*{says}', probe.tuning, model, cfg.the_task, cfg, length=17)


def test_checkpoints_that_are_refused(llama):
    """Transformers would draw missing weights at random, and ignores what it does not know."""
    query = 'model.layers.1.self_attn.q_proj.'
    for kind, change, says in (
            ('Llama', {query + 'weight': None}, 'q_proj.weight'),
            ('Qwen2', {query + 'bias': None}, 'q_proj.bias'),
            ('Llama', {query + 'bias': torch.ones(48)}, 'q_proj.bias'),  # not in the configuration
            ('Mistral', {'model.norm.weight': torch.ones(9)}, 'norm.weight'),
            ('Qwen2', (), 'is the tokenizer missing'),  # its class ignores ours
            ('GPT2', (), 'not gpt2'), ('OPT', (), 'not opt')):
        refused(says, probe.load_llama, *llama(kind, change)[:2], 16)
    partial = dict(rope_type='linear', rope_theta=500.0, factor=1.0, partial_rotary_factor=0.5)
    refused('cannot load', probe.load_llama, *llama('Llama', rope_parameters=partial)[:2], 16)
    net = llama('Llama')[2]
    factors = types.SimpleNamespace(name='rope_freqs.weight', data=np.array([1, 2] * 3))
    names, before = [*net.state_dict()], net.model.rotary_emb.inv_freq.clone()
    reader = types.SimpleNamespace(tensors=[mock.Mock() for _ in names] + [factors], fields=[])
    probe.read_ignored(net, reader)  # a GGUF file
    close(net.model.rotary_emb.inv_freq * torch.tensor([1, 2] * 3), before)
    reader.fields = ['llama.rope.scale_linear']
    refused('a scaling of RoPE', probe.read_ignored, net, reader)
    reader.fields, reader.tensors = [], reader.tensors + [mock.Mock()]
    refused('biases', probe.read_ignored, net, reader)


# ---- results/tables.py: records, tables, the board in results/README.md, commands ----------------

def write_lines(path, *lines):
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def record(seed, exact, **options):
    """The record of a run with these exact scores at 1, 2 and 4; None: it diverged."""
    config = {'pe': 'rope', 'task': 'parity', 'train_lengths': '1-2', 'n_test': 100, 'seed': seed,
              'out_dir': f'out/planted/seed={seed}', **options}
    scores = {'exact': exact, 'token': [1, 1, sum(exact) / 3], 'last': [1, 1, 0.3]} if exact else {}
    return {'config': config, 'lengths': '1-2,4', 'scores': scores}


def runs_of(path, *lines):
    """The runs of these records."""
    write_lines(path / 'x.jsonl', *lines)
    return tables.read_runs(path / 'x.jsonl')['planted']


def test_a_run_is_read_back_from_its_record(tmp_path):
    path = tmp_path / 'records.jsonl'
    argv = ('--pe=nope --train_lengths=1-2 --length_schedule=[(0,1),(1,2)] --eval_lengths=1-3,5 '
            f'--n_test=7 --max_steps=2 --seed=1,2 --out_dir={tmp_path}/out/tiny --results={path}')
    train.main(argv.split())
    assert tables.read_lines(path)[1][1]['config'] == {
        'pe': 'nope', 'task': 'parity', 'train_lengths': '1-2', 'n_test': 7, 'max_steps': 2,
        'length_schedule': '[[0, 1], [1, 2]]', 'seed': 2, 'out_dir': f'{tmp_path}/out/tiny/seed=2'}
    run, = tables.read_runs(path)['tiny']
    assert run.trained == [1, 2] and run.sizes == {1: 7, 2: 7, 3: 7, 5: 7}
    by_length = json.loads((tmp_path / 'out/tiny/seed=2/lengths.json').read_text())
    for metric in ('exact', 'token', 'last', 'states'):
        close([*run.scores(metric)[1].values()], [x[metric] for x in by_length.values()], 5e-5)


def test_records_of_one_configuration_are_one_run(tmp_path):
    """A repeated record counts once, even if it adds a metric; other scores begin another run."""
    one, two = [1, 0.5, 0], [1, 1, 0]
    more = record(1, one)
    more['scores']['states'] = [1, 1, 0.25]
    others = record(1, one) | {'trained_with': {'pe': 'nope'}}, record(1, one) | {'lengths': '1-3'}
    runs = runs_of(tmp_path, record(3, None), record(1, one), record(0, two), record(3, None), more,
                   *(record(*x) for x in ((1, one), (1, two), (0, two), (0, one))), *others)
    assert [sorted(run.seeds) for run in runs] == [[0, 1, 3], [0, 1], [1], [1]]
    assert [x[2] for x in runs[0].scores('exact')] == [1, 0.5]         # seeds 0 and 1
    assert runs[0].scores('states') == [{1: 1, 2: 1, 4: 0.25}]
    first, full = record(0, None), {'exact': one, 'token': [1, 1, 0.5], 'last': [1, 1, 0.2]}
    first['config'].pop('seed')                            # older records have several seeds
    several = first | {'config': first['config'] | {'seeds': '0-2'},
                       'scores': {'0': full, '2': {'exact': two}}}     # token and last are equal
    run, = runs_of(tmp_path, first | {'scores': {'0': full}}, several, several)
    assert run.seeds == {0: full, 1: {}, 2: dict.fromkeys(full, two)}


def test_a_damaged_record_is_named(tmp_path):
    """It was cut off, glued to another, or has fewer scores than lengths."""
    path, whole = tmp_path / 'x.jsonl', json.dumps(record(0, [1, 1, 0]))
    for line, says in [(whole[:-9], 'is damaged'), (whole + whole, 'is damaged'),
                       (json.dumps(record(0, [1, 1])), 'requires 3 scores, one per length')]:
        path.write_text(f'{whole}\n{line}\n')
        refused(f'x.jsonl, line 2 {says}', tables.read_runs, path)


def test_a_listing_shows_planted_numbers_and_failed_seeds(tmp_path):
    corpus, rare = record(0, [0, 0, 0], task='stdlib'), record(0, [0.5, 1, 0.9], task='copy')
    corpus['scores']['loss'] = [3.0, 2.0, 2.04]
    rare['n'] = {'1': 49, '2': 50, '4': 300}               # reach ignores length 1: under 50
    short = record(0, [1, 1, 1], task='sort', train_lengths='1-4')
    seeds = enumerate(([1, 0.95, 0.5], [1, 0.75, 0], None))
    runs = runs_of(tmp_path, *(record(*x, warmup_steps=7) for x in seeds), corpus, rare, short,
                   record(1, None, task='copy'), *(record(x, None, pe='nope') for x in (0, 1)))
    _, rope, text, copy, sort, nope = tables.listing(runs)
    assert rope == 'parity | rope | 97.5, 87.5 | 50.0, 0.0 | 2, 1 | 1 diverged'
    assert nope == 'parity | nope |  |  |  | 2 diverged'   # pe implies warmup_steps
    assert text == 'stdlib | rope | 12.18 | 7.69 | 0'
    assert copy == 'copy | rope | 75.3 | 90.0 | 2 | 1 diverged'
    assert sort == 'sort | rope | 100.0 | nan | 4'         # 4 is not longer than 1 to 4
    assert '| 97.5, 87.5 | 95.0, 75.0 |' in [*tables.listing(runs, length=2)][1]
    assert '| 100.0, 100.0 | 30.0, 30.0 | 2, 2 |' in [*tables.listing(runs, 'last')][1]


def test_the_board_trains_what_is_missing(tmp_path, monkeypatch, capsys):
    """A board of one column in a temporary folder; train.py runs in this process."""
    def run(command, cwd, **kw):                           # as if one of the seeds diverged
        assert [cwd, *command[:2]] == [tables.ROOT, sys.executable, 'train.py']
        assert command[-1] == '--overwrite'                # of a run without a record
        train.main(command[2:])
        return mock.Mock(returncode=2, stderr='a\ntrain.py: 1 diverged: out/x')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tables.Run, 'fitted', property(lambda x: x.options['max_steps'] == 60))
    command = ['board', '--minutes=20', '--task=tiny', '--pe=nope']
    with mock.patch.multiple(
            tables, ROOT=tmp_path, RATES='1e-9,1e-2', subprocess=mock.Mock(run=run),
            SHAPE='--d_model=8 --n_layer=1 --batch_size=8 --n_eval=32 --n_test=2',
            COLUMNS={'tiny': (1, [7, 8], [9, 12], '--task=parity')}):
        tables.main(command)
        table = capsys.readouterr().out.splitlines()[-4:]
        assert table[0] == '| encoding | tiny (7-8) |' and table[2].startswith('| **nope** | 0; ')
        lines = [x for _, x in tables.read_lines('out/board.jsonl')]
        assert all(x['lengths'] == '7-9,12' and x['config']['lr'] == 0.01 for x in lines)
        assert [(x['config']['max_steps'], x['config']['seed']) for x in lines] == [
            *itertools.product((20, 60), range(5))]        # until it is fitted
        tables.subprocess.run = mock.Mock(return_value=mock.Mock(returncode=2, stderr='a\nfull'))
        tables.main(command)                               # nothing is left to train
        assert capsys.readouterr().out.splitlines() == table
        (tmp_path / 'results').mkdir()
        for factor, name in (1, 'nope'), (2, '**nope**'):  # published; published with more steps
            write_lines(tmp_path / 'results/board.jsonl', *[x | dict(config=x['config'] | dict(
                max_steps=factor * x['config']['max_steps'])) for x in lines])
            tables.main(command)
            assert f'| {name} |' in capsys.readouterr().out
        write_lines(tmp_path / 'out/board.jsonl', *lines[:4])  # a seed is missing
        refused('tiny/nope,20_lr: full', tables.main, command)
        assert not capsys.readouterr().err                 # no progress bar in a log
    for flag, says in ('--task=tyni', 'task of the board'), ('--pe=nop+ape', 'encoding'):
        refused(f'unknown {says} ', tables.main, ['board', flag])


def test_a_cell_trains_at_the_rate_that_was_best(monkeypatch, tmp_path):
    """In validation at the training lengths, by means over two seeds that are not reported."""
    monkeypatch.setattr(tables, 'ROOT', tmp_path)
    monkeypatch.setattr(tables, 'run_train', mock.Mock())

    def write(rate, seed, *ends):
        log = tmp_path / f'out/board/parity/nope,2000_lr/seed={seed},lr={rate}/log.jsonl'
        log.parent.mkdir(parents=True, exist_ok=True)
        write_lines(log, {'loss': 1}, *({'eval': {1: dict(exact=1, token=1), 2: x}} for x in ends))
    for rate, seed, *exact in ((0.001, 5, 0.6), (0.001, 6, 0), (0.002, 5, 0.2), (0.002, 6, 0.5),
                               (0.004, 5, 1), (0.004, 6)):             # the last diverged
        write(rate, seed, *(dict(exact=x, token=0) for x in exact))
    assert tables.best_rate(0.5, 'nope', 'parity') == '2e-3'
    tuning = train.parse(train.Config, tables.run_train.call_args.args[1:])[0]
    assert tuning['lr'] == [1e-3, 2e-3, 4e-3] and tuning['seed'] == [5, 6]
    assert tuning['eval_lengths'] == tuning['train_lengths'] == [*range(1, 17)]
    write(0.001, 6, dict(exact=0, token=0, loss=-1))       # of a corpus
    assert tables.best_rate(0.5, 'nope', 'parity') == '1e-3'


def test_the_page_shows_the_board_of_its_records(tmp_path, monkeypatch):
    text = tables.PAGE.read_text()
    monkeypatch.setattr(tables, 'PAGE', tmp_path / 'README.md')
    tables.PAGE.write_text(text.replace('<!-- end', 'old\n<!-- end'))
    tables.main(['refresh'])
    assert tables.PAGE.read_text() == text, 'run python results/tables.py refresh'


def test_a_cell_of_the_board(tmp_path):
    """A cell: median of seeds (least to most), in italics if unfitted. Floors fit sampled tasks."""
    run, = runs_of(tmp_path, record(0, [1, 1, 1]), record(1, [1, 0.5, 0]), record(2, None))
    assert tables.board_cell(run, 4) == '*0.5 (0 to 2); 75 %*'
    run.seeds = {0: {}}
    assert tables.board_cell(run, 4) == 'diverged'
    assert tables.floor('polynomial', 2, 'last') == pytest.approx(0.36, abs=0.05)
    rows = tasks.make('mqar:keys=2:words=8').sample(2000, 9, generator(0))[0].view(2000, 9, 2)
    (a, x), (_, y), (b, _), _ = rows[rows[..., 0] <= 8].view(2000, 4, 2).permute(1, 2, 0)
    wrong = ((a == b) & (x != y)).double().mean()          # the first of the two answers
    close(tables.floor('mqar', 9, 'exact'), 1 - wrong, 0.02)
    close(tables.floor('mqar', 9, 'token'), 1 - wrong / 2, 0.02)


def test_the_headline_figure(tmp_path):
    """The plotted data: means over seeds, dotted if not fitted; of text, relative perplexities."""
    pytest.importorskip('matplotlib')
    options = tables.Options(records='results/board.jsonl', task='polynomial,mqar,stdlib')
    runs = tables.board(options, training=False)
    panels = tables.draw(runs, tmp_path / 'x.png').axes
    lines = [{line.get_label(): line for line in panel.lines} for panel in panels]
    last = runs['prism', 'polynomial'].means([32], 'last')
    text = [math.exp(x[256] - x[64]) for x in runs['rope', 'stdlib'].scores('loss')]
    for line, ends in (lines[0]['prism'], last), (lines[2]['rope'], text):
        close([line.get_xdata()[-1], line.get_ydata()[-1]], [4, statistics.mean(ends)], 1e-3)
    assert [lines[1][x].get_linestyle() for x in ('rope', 'fox', 'floor')] == [':', '-', '-.']
    assert (tmp_path / 'x.png').exists()


def test_commands_name_options_and_configs_that_exist():
    for line in re.findall('(?m)^    run .*', (tables.ROOT / 'results/commands.sh').read_text()):
        _, (_, _, *configs) = train.parse(train.Config, shlex.split(line, comments=True))
        assert all((tables.ROOT / path).exists() for path in configs if path[0] != '$'), line


# ---- all programs, and the code in README.md -----------------------------------------------------

def test_every_program_has_help_and_lists_what_it_has():
    """A mistake is one line of stderr, without a traceback, and exit code 2."""
    lists = {'pe.py': pe.ENCODINGS, 'tasks.py': tasks.TASKS}
    for program in (*lists, 'kernels.py', 'probe.py', 'results/tables.py'):
        run = python(program, *(() if program in lists else ['--help']))
        assert run.returncode == 0 and run.stdout and not run.stderr
        assert {*lists.get(program, ())} <= {x.split(' ')[0] for x in run.stdout.splitlines()}
    for program, argument in ('train.py', '--lr=fast'), ('tasks.py', 'pairty'):
        run = python(program, argument)
        assert run.returncode == 2, run.stderr
        assert run.stderr.startswith(f'{program}: ') and run.stderr.count('\n') == 1, run.stderr


def test_code_in_readme_and_in_docstrings_runs(tmp_path, capsys):
    """PoPE in another model, a loaded run, an encoding to be added to pe.py, and doctests."""
    text, names = (tables.ROOT / 'README.md').read_text('utf-8'), {}
    in_a_model, on_a_run, in_pe = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    exec(in_a_model, names)
    assert names['y'].shape == (8, 4, 100, 16) and names['y'].isfinite().all()
    train.main(flags(n_layer=2, out_dir=tmp_path, pe='rope'))
    exec(on_a_run.replace('out/parity_rope', str(tmp_path)), {'torch': torch})
    assert '\nBoS ' in capsys.readouterr().out
    exec(in_pe, names := dict(vars(pe)))
    slopes = names['Slopes'](pe.PEConfig(d_model=16, n_head=2)).double()
    assert pe.options_of(names['Slopes']) == {'steepest': (float, 0.5)}
    check_logits(slopes, lambda q, k, t, s, h, b: content(q, k) - 0.5 / (h + 1) * (t - s))
    assert doctest.testmod(tasks).failed == 0
