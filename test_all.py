"""The core's contracts: read a test to learn what a piece of nanoPE promises.

    python -m pytest test_all.py            on a CPU in some minutes (pip install pytest)
    python -m pytest test_all.py -k rope    what concerns one encoding

Each encoding is compared with its equation, written as a loop over plain numbers in float64. What
must hold for all of them (causality, gradients, precision, ...) runs over VARIANTS, which reads
pe.ENCODINGS, so an encoding that you register is tested, too. Tasks are compared with oracles, and
kernels with their plain references, in Triton's interpreter where there is no GPU.
"""
import cmath
import collections
import concurrent.futures
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

# For torch and for the programs that tests run: on tensors this small, threads mostly wait.
os.environ.setdefault('OMP_NUM_THREADS', '1')
if __name__ == '__main__' and {'-h', '--help'} & set(sys.argv):
    sys.exit(print(__doc__))  # works without pytest
try:
    import pytest
except ImportError:
    sys.exit('the tests need pytest: pip install pytest')
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pe
import tasks
import train
from model import ModelConfig, Transformer

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

def make(dtype=torch.float64, seed=0, **kw):
    """A small model in evaluation, its encoding's parameters moved off their starting values."""
    torch.manual_seed(seed)
    small = dict(d_model=32, n_head=4, vocab_size=11, train_len=TRAIN_LEN, max_len=64)
    model = Transformer(ModelConfig(**(small | kw))).to(dtype)
    with torch.no_grad():
        for block in model.blocks:
            for p in block.attn.pe.parameters():
                p.add_(torch.randn_like(p) * 0.1)
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


def gpu(test):
    """Marks a test that needs a GPU."""
    with warnings.catch_warnings(action='ignore'):
        needs = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
        return pytest.mark.gpu(needs(test))


def close(a, b, tol=1e-10):
    """Asserts that a and b (tensors, lists or numbers) agree to tol, relative and absolute."""
    a = torch.as_tensor(a, dtype=torch.float64)
    b = torch.as_tensor(b, dtype=torch.float64)
    # where they differ: of logits at -inf the difference is no number
    assert torch.allclose(a, b, rtol=tol, atol=tol), (
        f'largest error {(a - b)[a != b].abs().max():.1e}')


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


def softplus(x):
    return math.log1p(math.exp(x))


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def content(q, k):
    """<q, k> / sqrt(d): the logit that an additive bias is added to."""
    return dot(q, k) / math.sqrt(len(q))


def loop_logits(q, k, score):
    """Logits [B, H, T, T] from score(h, q_t, k_s, t, s) on lists of floats; -inf where s > t."""
    B, H, T, _ = q.shape
    logits = torch.full((B, H, T, T), -math.inf, dtype=torch.float64)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        for s in range(t + 1):
            logits[b, h, t, s] = score(h, q[b, h, t].tolist(), k[b, h, s].tolist(), t, s)
    return logits


def rope_score(theta):
    """RoPE: Re sum_c conj(q_c) k_c e^(i (s - t) theta_c) / sqrt(d), feature pairs as complex."""
    def score(h, q, k, t, s):
        total = 0.0
        for c, angle in enumerate(theta):
            q_c = complex(q[2 * c], q[2 * c + 1])
            k_c = complex(k[2 * c], k[2 * c + 1])
            total += (q_c.conjugate() * k_c * cmath.exp(1j * (s - t) * angle)).real
        return total / math.sqrt(len(q))
    return score


# ------------------------------------------------------------------------------------------------
# pe.py: each encoding against its equation, in loops and in float64

def test_nope_is_plain_attention():
    q, k, _, pos = qkv()
    expected = loop_logits(q, k, lambda h, q, k, t, s: content(q, k))
    close(encoding('nope').logits(q, k, pos), expected)


def test_rope():
    """Pair c is rotated by t 10000^(-2c/d): the logit depends on s - t alone."""
    q, k, _, pos = qkv()
    theta = [10000 ** (-2 * c / 8) for c in range(4)]
    close(encoding('rope').logits(q, k, pos), loop_logits(q, k, rope_score(theta)))


@pytest.mark.parametrize('T, train_len, d', [
    (10, 12, 8), (40, 12, 8), (99, 35, 32), (400, 100, 64)])
def test_yarn(T, train_len, d):
    """Slow features are interpolated by s = T / train_len, fast ones are not; a ramp between."""
    def feature(turns):
        """The feature that turns this often over train_len."""
        return d * math.log(train_len / (turns * 2 * math.pi)) / (2 * math.log(10000))

    s = max(1, T / train_len)
    low = max(math.floor(feature(32)), 0)
    high = min(math.ceil(feature(1)), d - 1)
    theta = []
    for c in range(d // 2):
        w = min(max((c - low) / (high - low), 0), 1)
        theta.append(10000 ** (-2 * c / d) * ((1 - w) + w / s))
    enc = encoding('yarn', head_dim=d, train_len=train_len)
    close(enc.scaled_frequencies(s, torch.zeros(1, d, dtype=torch.float64)), theta)
    q, k, _, pos = qkv(T=10, head_dim=d)
    temperature = 0.1 * math.log(s) + 1
    expected = temperature ** 2 * loop_logits(q, k, rope_score(theta))
    close(enc.logits(q, k, pos, enc.state(None, pos, T)), expected)


def test_yarn_against_published_values():
    """transformers 5.23, _compute_yarn_parameters: dim 16, original length 128, factor 10."""
    enc = encoding('yarn', head_dim=16, train_len=128)
    theta = enc.scaled_frequencies(10.0, torch.zeros(1, 16, dtype=torch.float64))
    close(theta, [1.0, 0.221359, 0.04, 0.003162, 0.001, 0.000316, 0.0001, 0.000032], 1e-6)


@pytest.mark.parametrize('delta', ['zero', 'uniform', 'none'])
@pytest.mark.parametrize('magnitudes, number', [(True, 'all'), (False, 'all'), (True, 'half')])
def test_pope(delta, magnitudes, number):
    """Magnitudes softplus(q), softplus(k); phases (s - t) theta_c + delta_c."""
    enc = encoding('pope', pope_delta=delta, pope_softplus=magnitudes, pope_frequencies=number)
    if delta == 'zero':
        with torch.no_grad():
            enc.delta.copy_(torch.linspace(-6, 0, 16).view(2, 8))

    def score(h, q, k, t, s):
        total = 0.0
        for c in range(8):
            theta = 10000 ** (-(c if number == 'all' else c // 2 * 2) / 8)
            phase = enc.delta[h, c].item()
            mu = softplus(q[c]) * softplus(k[c]) if magnitudes else q[c] * k[c]
            total += mu * math.cos((s - t) * theta + phase)
        return total / math.sqrt(8)

    q, k, _, pos = qkv()
    close(enc.logits(q, k, pos), loop_logits(q, k, score))


def test_pope_delta_start():
    assert (encoding('pope').delta == 0).all()
    delta = encoding('pope', heads=16, pope_delta='uniform').delta
    assert -2 * math.pi <= delta.min() < -5
    assert -1 < delta.max() <= 0


def test_alibi():
    """The published slopes: powers of two, and for 12 heads those of BLOOM's and MPT's code."""
    def slopes(heads):
        return encoding('alibi', heads=heads).slope.tolist()

    assert slopes(1) == [2.0 ** -8]
    assert slopes(8) == [2.0 ** -h for h in range(1, 9)]
    close(slopes(12), slopes(8) + [2.0 ** -0.5, 2.0 ** -1.5, 2.0 ** -2.5, 2.0 ** -3.5], 1e-6)
    q, k, _, pos = qkv()
    expected = loop_logits(
        q, k, lambda h, q, k, t, s: content(q, k) - 2.0 ** (-4 * (h + 1)) * (t - s))
    close(encoding('alibi').logits(q, k, pos), expected)
    enc = encoding('alibi', causal=False)  # keys on both sides
    apart = (pos[:, None] - pos).abs()
    close(enc.bias(enc.at(q, q, pos)), -enc.slope[:, None, None] * apart)
    t5 = encoding('t5', causal=False)
    torch.nn.init.normal_(t5.table)
    bias = t5.bias(t5.at(q, q, pos))
    close(bias, bias.transpose(1, 2))
    assert 'slope' in dict(enc.named_buffers()) and not list(enc.parameters())


@pytest.mark.parametrize('buckets, max_distance', [(32, 128), (24, 128), (32, 64), (7, 20)])
def test_t5(buckets, max_distance):
    """Half of the buckets hold one distance each, the others are log-spaced up to max_distance."""
    exact = buckets // 2

    def bucket(d):
        if d < exact:
            return d
        log = math.log(d / exact) / math.log(max_distance / exact)
        return min(buckets - 1, exact + int(log * (buckets - exact)))

    enc = encoding('t5', t5_buckets=buckets, t5_max_distance=max_distance)
    assert enc.bucket(torch.arange(1000)).tolist() == [bucket(d) for d in range(1000)]
    torch.nn.init.normal_(enc.table)
    q, k, _, pos = qkv(T=25)
    expected = loop_logits(
        q, k, lambda h, q, k, t, s: content(q, k) + enc.table[bucket(t - s), h].item())
    close(enc.logits(q, k, pos), expected)


def test_fire():
    """Bias MLP(psi(t - s) / psi(max(t, L))), psi(x) = log(c x + 1)."""
    enc = encoding('fire', train_len=12)
    with torch.no_grad():
        enc.c.fill_(-0.3)  # |c| counts
        enc.L.fill_(1.2)  # in units of 12 / 4: L = 3.6

    def psi(x):
        return math.log(0.3 * x + 1)

    def score(h, q, k, t, s):
        x = psi(t - s) / (psi(max(t, 3.6)) + 1e-6)
        first, _, last = enc.mlp
        weights = zip(first.weight[:, 0].tolist(), first.bias.tolist())
        hidden = [max(0.0, w * x + b) for w, b in weights]
        return content(q, k) + dot(hidden, last.weight[h].tolist()) + last.bias[h].item()

    q, k, _, pos = qkv()
    close(enc.logits(q, k, pos), loop_logits(q, k, score))


def test_rope_fraction():
    """The fastest ceil(p D/2) frequencies turn, the others stand still."""
    q, k, _, pos = qkv()
    expected = loop_logits(q, k, rope_score([1.0, 0.1, 0, 0]))
    close(encoding('rope', rope_fraction=0.3).logits(q, k, pos), expected)
    with pytest.raises(ValueError, match='rope_fraction must be above 0 and at most 1'):
        encoding('rope', rope_fraction=0)
    with pytest.raises(ValueError, match='rope_fraction is for rope, not for pe=yarn'):
        encoding('yarn', rope_fraction=0.5)


def content_of_layer(T=10, width=16):
    """The input x [2, T, width] that content-dependent encodings read."""
    return torch.randn(2, T, width, generator=torch.Generator().manual_seed(7)).double()


def loop_conv(weights, conv, x):
    """[T][F]: x [T, C] through two matrices, then sum_j conv[f][j] of j tokens before."""
    rows = (x @ weights[0].weight.T @ weights[1].weight.T).tolist()
    return [[sum(w * rows[t - j][f] for j, w in enumerate(of_f) if j <= t)
             for f, of_f in enumerate(conv.tolist())] for t in range(len(rows))]


def test_selective_rope():
    """Pair c turns by theta_c times the sum of what the tokens so far ask for."""
    enc = encoding('selective_rope')
    q, k, _, pos = qkv()
    x = content_of_layer()
    expected = torch.empty(2, 2, 10, 10, dtype=torch.float64)
    for b, h in itertools.product((0, 1), (0, 1)):
        steps = loop_conv(enc.W, enc.conv, x[b])

        def score(_, q, k, t, s, h=h, steps=steps):
            turned = [10000 ** (-c / 4) * sum(steps[j][4 * h + c] for j in range(s + 1, t + 1))
                      for c in range(4)]
            return rope_score(turned)(h, q, k, 0, -1)
        expected[b, h] = loop_logits(q[b:b + 1, h:h + 1], k[b:b + 1, h:h + 1], score)[0, 0]
    close(enc.logits(q, k, pos, x=x), expected)


def test_kerple_and_dape():
    """- a log(1 + b d); DAPE adds an MLP of both terms of all heads."""
    q, k, _, pos = qkv()
    enc = encoding('dape')
    with torch.no_grad():
        enc.a.copy_(torch.tensor([0.7, -3.0]))  # held above 0.01
        enc.b.copy_(torch.tensor([0.4, 0.9]))

    def bias(h, t, s):
        return -max(0.01, enc.a[h].item()) * math.log(1 + enc.b[h].item() * (t - s))

    kerple = encoding('kerple')
    kerple.load_state_dict({name: p for name, p in enc.state_dict().items() if name in 'ab'})
    expected = loop_logits(q, k, lambda h, q, k, t, s: content(q, k) + bias(h, t, s))
    close(kerple.logits(q, k, pos), expected)
    kerple.logits(q, k, pos)[0, 1, 9, 0].backward()
    assert kerple.a.grad[1] != 0    # though it is held
    first, _, last = enc.mlp
    for b, t in itertools.product((0, 1), range(10)):
        for s in range(t + 1):
            inputs = [content(q[b, h, t], k[b, h, s]) for h in (0, 1)]
            inputs += [bias(h, t, s) for h in (0, 1)]
            hidden = [dot(inputs, w) + c for w, c in zip(first.weight.tolist(), first.bias)]
            hidden = [z if z > 0 else 0.01 * z for z in hidden]
            for h in (0, 1):
                expected[b, h, t, s] += dot(hidden, last.weight[h]) + last.bias[h]
    close(enc.logits(q, k, pos), expected)


def test_cope():
    """The position of a key counts the gates from it to the query; vectors are interpolated."""
    enc = encoding('cope', cope_positions=4)
    torch.nn.init.normal_(enc.e)
    q, k, _, pos = qkv()
    e = enc.e.tolist()

    def score_with(keys):
        def score(h, q, k, t, s):
            gates = [1 / (1 + math.exp(-content(q, keys[h][j]))) for j in range(s, t + 1)]
            p = min(sum(gates), 3)
            low, high = dot(q, e[math.floor(p)]), dot(q, e[math.ceil(p)])
            return content(q, k) + low + (p - math.floor(p)) * (high - low)
        return score

    for b in (0, 1):
        expected = loop_logits(q[b:b + 1], k[b:b + 1], score_with(k[b].tolist()))
        close(enc.logits(q, k, pos)[b:b + 1], expected)


def test_path():
    """k_s passes a reflection by every token after it, one after the other."""
    enc = encoding('path')
    q, k, _, pos = qkv()
    x = content_of_layer()
    logits = enc.logits(q, k, pos, x=x)
    for b, h in itertools.product((0, 1), (0, 1)):
        w = torch.tensor(loop_conv(enc.W, enc.conv, x[b]), dtype=torch.float64)
        w = F.normalize(w[:, 8 * h:8 * h + 8], dim=-1)
        z = (x[b] @ enc.W_beta.weight[h] + enc.W_beta.bias[h]).tolist()
        for t in range(10):
            for s in range(t + 1):
                key = k[b, h, s]
                for j in range(s + 1, t + 1):
                    key = key - 2 / (1 + math.exp(-z[j])) * (key @ w[j]) * w[j]
                close(logits[b, h, t, s], content(q[b, h, t], key))


def test_stickbreaking():
    """The latest key takes sigmoid(z) of the stick, the one before it of what is left, ..."""
    enc = encoding('stickbreaking')
    q, k, v, pos = qkv()
    y = enc.attend(q, k, v, pos)
    assert (y[:, :, 0] == 0).all()
    for b, h, t in itertools.product((0, 1), (0, 1), range(10)):
        stick, total = 1.0, torch.zeros(8, dtype=torch.float64)
        for s in reversed(range(t)):
            share = 1 / (1 + math.exp(-content(q[b, h, t], k[b, h, s])))
            total += stick * share * v[b, h, s]
            stick *= 1 - share
        close(y[b, h, t], total)
    with pytest.raises(ValueError, match='serves all heads'):
        encoding('stickbreaking', rope_heads=1)


def test_ssmax():
    """Logits times s log n; with RoPE, RoPE's."""
    q, k, _, pos = qkv()
    for name, theta in (('ssmax', [0] * 4), ('rope+ssmax', [10 ** -c for c in range(4)])):
        enc = encoding(name)
        s = next(enc.parameters())
        torch.nn.init.normal_(s)
        score = rope_score(theta)
        expected = loop_logits(q, k, lambda h, q, k, t, j, s=s, score=score:
                               s[h].item() * math.log(t + 1) * score(h, q, k, t, j))
        close(enc.logits(q, k, pos), expected)
        close(enc.logits(q, k, 7 * pos * (name == 'ssmax') + pos), expected)     # n counts keys


def test_vrope():
    """Each value arrives rotated by its distance: y_t = sum_s alpha_ts R_(s-t) v_s."""
    q, k, v, pos = qkv()
    enc = encoding('vrope')
    alpha = enc.logits(q, k, pos).softmax(-1)
    expected = torch.zeros_like(v)
    for t in range(10):
        for s, c in itertools.product(range(t + 1), range(4)):
            pair = torch.complex(v[:, :, s, 2 * c], v[:, :, s, 2 * c + 1])
            turned = pair * cmath.exp(1j * (s - t) * 10000 ** (-2 * c / 8))
            expected[:, :, t, 2 * c] += alpha[:, :, t, s] * turned.real
            expected[:, :, t, 2 * c + 1] += alpha[:, :, t, s] * turned.imag
    close(enc.attend(q, k, v, pos), expected)


@pytest.mark.parametrize('total_len', [None, 30])
@pytest.mark.parametrize('kw', [
    dict(), dict(vipe_s='one'), dict(vipe_s='global', eval_len=48), dict(vipe_u=False),
    dict(vipe_logn=False), dict(vipe_value=False)], ids=str)
def test_vipe(kw, total_len):
    """Logits of ViPE eq. 7; eq. 8's average of [v_i ; p_(n-i)], the code p linear in n - i."""
    enc = encoding('vipe', train_len=6, vipe_d_p=3, **kw)
    with torch.no_grad():
        for p in enc.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    ratio = (total_len or 10) / 6
    s = {'length': ratio, 'one': 1.0, 'global': 48 / 6}[kw.get('vipe_s', 'length')]

    def score(h, q, k, t, i):
        row = math.log(t + 1) if kw.get('vipe_logn', True) else 1
        col = 1 + dot(enc.u[h].tolist(), k) if kw.get('vipe_u', True) else 1
        return s * row * col * content(q, k)

    q, k, v, pos = qkv()
    state = enc.state(None, pos, total_len)
    logits = loop_logits(q, k, score)
    close(enc.logits(q, k, pos, state), logits)
    alpha = logits.softmax(-1)
    if 'vipe_value' in kw:
        close(enc.attend(q, k, v, pos, state), alpha @ v)
        return
    expected = torch.zeros(2, 2, 10, 8 + 3, dtype=torch.float64)
    for n in range(10):
        for i in range(n + 1):
            code = enc.W_p[:, 0] * (n - i) / s + enc.b_p[:, 0]  # (H, d_p)
            value = torch.cat([v[:, :, i], code.expand(2, 2, 3)], dim=-1)
            expected[:, :, n] += alpha[:, :, n, i, None] * value
    close(enc.attend(q, k, v, pos, state), expected)


def test_vipe_global_scale_is_one_on_trained_lengths():
    enc = encoding('vipe', train_len=6, vipe_s='global', eval_len=48)
    assert [enc.state(None, torch.arange(T)) for T in (1, 6, 7, 48)] == [1, 1, 8, 8]
    assert enc.state(None, torch.arange(5), total_len=7) == 8


def test_pope_vipe_scales_by_the_raw_key():
    """In 'pope+vipe' the factor 1 + <u, k> reads k as it was before PoPE."""
    q, k, _, pos = qkv()
    enc = encoding('pope+vipe', train_len=20)
    pope, vipe = enc.parts
    torch.nn.init.normal_(vipe.u)
    row = torch.arange(1, 11).double().log()[:, None]
    col = 1 + torch.einsum('bhtd,hd->bht', k, vipe.u)[:, :, None, :]
    future = torch.ones(10, 10).triu(1) > 0
    expected = row * col * pope.logits(q, k, pos).masked_fill(future, 0)
    close(enc.logits(q, k, pos).masked_fill(future, 0), expected)
    assert enc.out_dim == 16


def test_ape():
    """Even features are sin(t theta), odd ones cos(t theta), with one theta for each pair."""
    expected = []
    for t in range(9):
        angles = [t / 10000 ** (c // 2 * 2 / 8) for c in range(8)]
        expected.append([math.sin(a) if c % 2 == 0 else math.cos(a) for c, a in enumerate(angles)])
    x = torch.zeros(1, 9, 8, dtype=torch.float64)
    close(pe.APE(pe.PEConfig(d_model=8)).embed(x, torch.arange(9))[0], expected)


def test_shifted_ape_shifts_in_training_only():
    cfg = pe.PEConfig(d_model=8, max_shift=50)
    pos, x = torch.arange(9), torch.zeros(300, 9, 8)
    enc, ape = pe.ShiftedAPE(cfg), pe.APE(cfg)
    close(enc.eval().embed(x, pos), ape.embed(x, pos), 1e-6)
    table = ape.embed(torch.zeros(1, 60, 8), torch.arange(60))[0]
    offsets = []
    for row in enc.train().embed(x, pos):
        found = [m for m in range(51) if torch.allclose(row, table[m:m + 9], atol=1e-5)]
        offsets.append(found[0])
    assert min(offsets) < 5
    assert max(offsets) > 45
    assert len(set(offsets)) > 25


@pytest.mark.parametrize('name', ['learned', 'random'])
def test_tables_repeat_their_last_row(name):
    enc = encoding(name, max_len=5)
    x = enc.embed(torch.zeros(1, 9, 16, dtype=torch.float64), torch.arange(9))[0]
    close(x[:5], enc.table)
    close(x[5:], enc.table[4].expand(4, 16))


def test_picture_of_a_sum():
    """Where no part acts on the values, a sum is drawn by its logits: 'alibi+nope' as 'alibi'."""
    alone, added = pe.picture('alibi', 6), pe.picture('alibi+nope', 6)
    assert torch.equal(alone, added)
    assert alone[5, 0] < alone[5, 5]


# ------------------------------------------------------------------------------------------------
# pe.py: PRISM's cursors

def random_gates(B, C, T, P, seed=0, copy=False, dtype=torch.float64):
    """reset, step, copy (or None), and a table with which a scan returns the histograms."""
    g = torch.Generator().manual_seed(seed)
    reset = torch.rand(B, C, T, generator=g, dtype=dtype)
    step = torch.randn(B, C, T, 3, generator=g, dtype=dtype).softmax(dim=-1)
    jump = torch.randn(B, C, T, T + 1, generator=g, dtype=dtype)
    jump[..., :-1].masked_fill_(torch.ones(T, T).triu(1) > 0, -math.inf)  # no jumps to later tokens
    return reset, step, jump.softmax(dim=-1) if copy else None, torch.eye(2 * P + 1, dtype=dtype)


def law_of_paths(reset, step, jump=None):
    """{offset: probability} of one cursor after its gates, summed over every path that they allow.

    At each step a path resets or not, moves by +1, -1 or 0, and jumps to a token or (-1) does not.
    """
    jumps = [-1] if jump is None else range(-1, len(reset))
    choices = list(itertools.product((True, False), (1, -1, 0), jumps))
    law = collections.Counter()
    for path in itertools.product(choices, repeat=len(reset)):
        weight, offset = 1.0, 0
        for t, (resets, move, target) in enumerate(path):
            weight *= reset[t] if resets else 1 - reset[t]
            weight *= step[t][(1, -1, 0).index(move)]
            weight *= 1.0 if jump is None else jump[t][target]
            offset = (0 if resets else offset) + move
            offset = target if target >= 0 else offset
        law[offset] += weight
    return law


@pytest.mark.parametrize('copy, T', [(False, 6), (True, 3)])
def test_cursor_histogram_is_the_sum_over_all_paths(copy, T):
    """Algorithm 1 without sharpening: the distribution of a random walk with resets and jumps."""
    reset, step, jump, table = random_gates(1, 2, T, T + 2, copy=copy)
    h = pe.cursor_scan(reset, step, None, table, jump)
    for c, t in itertools.product((0, 1), (1, 3, 5) if T == 6 else (0, 1, 2)):
        seen = None
        if copy:  # jumps to tokens up to t, and none at all
            seen = torch.cat([jump[0, c, :t + 1, :t + 1], jump[0, c, :t + 1, -1:]], dim=-1).tolist()
        law = law_of_paths(reset[0, c, :t + 1].tolist(), step[0, c, :t + 1].tolist(), seen)
        assert abs(sum(law.values()) - 1) < 1e-12
        close(h[0, c, t], [law[d] for d in range(-T - 2, T + 3)], 1e-12)


@pytest.mark.parametrize('dtype, tol', [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_cursor_keeps_its_mass(dtype, tol):
    """Over 2,048 tokens; what jumps to a later token is lost."""
    reset, step, _, _ = random_gates(1, 2, 2048, 1, dtype=dtype)
    ones = torch.ones(4097, 1, dtype=dtype)
    mass = pe.cursor_scan(reset * 0.01, step, None, ones)
    assert (mass - 1).abs().max() < tol
    jump = torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.75, 0.0]], dtype=dtype).expand(1, 2, 2, 3)
    mass = pe.cursor_scan(reset[..., :2], step[:, :, :2], None, ones[:5], jump)
    close(mass[0, :, :, 0], [[0.25, 1.0]] * 2, tol)


def test_sharpening_multiplies_exponents():
    """PRISM appendix A.2.1: n sharpenings by gamma are one by gamma^n.

    A large gamma leaves the top bin, not NaN; EPS, 1e-8, fills the empty bins.
    """
    T = 4
    first = torch.tensor([0.5, 0.2, 0.3]).double()
    keep = torch.tensor([0.0, 0.0, 1.0]).double()
    step = torch.stack([first, keep, keep, keep]).view(1, 1, T, 3)
    reset, table = torch.zeros(1, 1, T).double(), torch.eye(2 * T + 1).double()
    h = pe.cursor_scan(reset, step, torch.tensor([1.7]).double(), table)
    for n in range(1, T + 1):
        p = first ** 1.7 ** n
        close(h[0, 0, n - 1, [T + 1, T - 1, T]], p / p.sum(), 1e-5)  # eps = 1e-8 adds to every bin
    for dtype in (torch.float32, torch.float64):
        gamma = torch.tensor([1e4], dtype=dtype)
        gates = reset.to(dtype), step.to(dtype)
        sharp = pe.cursor_scan(*gates, gamma, table.to(dtype))
        close(sharp[0, 0, -1], F.one_hot(torch.tensor(T + 1), 2 * T + 1), 1e-6)
    root = torch.tensor([0.125]).double()  # eps^(1/8) = 0.1 where nothing is
    flat = pe.cursor_scan(reset[..., :1], step[:, :, 1:2], root, table)
    close(flat[0, 0, 0, T - 1:T + 2], torch.tensor([0.1, 1.0, 0.1]) / 1.2, 1e-6)


def cross_correlation(a, b):
    """PRISM eq. 6: {d: sum_i a_i b_(i+d)}."""
    n = len(a)
    shifts = range(1 - n, n)
    return {d: sum(float(a[i] * b[i + d]) for i in range(n) if 0 <= i + d < n) for d in shifts}


def test_displacement_restarts_from_a_point_and_is_not_eq_6():
    """PRISM eq. 4 against eq. 6: the displacement since token k is the scan started anew there.

    The cross-correlation of two histograms gives mass to displacements that no path makes.
    """
    scan = pe.cursor_scan
    reset, step, _, table = random_gates(1, 1, 5, 5)
    k, steps = 2, 2  # from after token 2 to after token 4
    later = reset[:, :, k + 1:], step[:, :, k + 1:]
    exact = scan(*later, None, torch.eye(2 * steps + 1).double())[0, 0, -1]
    law = law_of_paths(later[0][0, 0].tolist(), later[1][0, 0].tolist())
    close(exact, [law[d] for d in range(-steps, steps + 1)], 1e-12)

    h = scan(reset * 0, step, None, table)[0, 0]
    eq_6 = cross_correlation(h[k], h[4])
    close(sum(eq_6.values()), 1.0)
    assert sum(p for d, p in eq_6.items() if abs(d) > steps) > 0.05  # impossible in two steps

    increment = torch.tensor([1.0, 0.0, 0.0]).double().expand(1, 1, 5, 3)
    point = scan(reset * 0, increment, None, table)[0, 0]
    eq_6 = cross_correlation(point[k], point[4])
    close([eq_6[1], eq_6[2], eq_6[3]], [0.0, 1.0, 0.0])  # right where histograms are one-hot


def test_sharpening_keeps_half_a_place():
    """A cursor that steps up at even tokens, and at odd ones down with probability 0.27, goes half
    a place a token. Sharpening takes back what the fraction leaves, so that the two tokens of a
    place have the same two encodings at any length."""
    T = 100
    step = torch.zeros(1, 1, T, 3).double()
    step[:, :, 0::2] = torch.tensor([1.0, 0.0, 0.0]).double()
    step[:, :, 1::2] = torch.tensor([0.0, 0.27, 0.73]).double()
    reset, offsets = torch.zeros(1, 1, T).double(), torch.eye(2 * T + 1).double()
    h = pe.cursor_scan(reset, step, torch.tensor([2.0]).double(), offsets)[0, 0]
    for t in (20, 60, 96):
        place = T + t // 2 + 1
        close(h[t, [place, place - 1]], [0.98, 0.02], tol=0.01)
        close(h[t + 1, [place, place - 1]], [0.87, 0.13], tol=0.01)
    unsharpened = pe.cursor_scan(reset, step, None, offsets)[0, 0]
    assert unsharpened[96].max() < 0.2


def test_cursor_machines():
    """Gates set by hand: increments count tokens, a reset goes back to 0, a copy to its token."""
    T = 8
    increment = torch.tensor([1.0, 0.0, 0.0]).double().expand(1, 1, T, 3)
    offsets = torch.arange(-T, T + 1).double()[:, None]
    gamma = torch.tensor([2.0]).double()

    def places(reset, jump=None):
        return pe.cursor_scan(reset, increment, gamma, offsets, jump)[0, 0, :, 0]

    reset = torch.zeros(1, 1, T).double()
    close(places(reset), [1, 2, 3, 4, 5, 6, 7, 8], 1e-6)
    reset[0, 0, 4] = 1
    close(places(reset), [1, 2, 3, 4, 1, 2, 3, 4], 1e-6)
    # at token 6 to token 2; T: no jump
    jump = F.one_hot(torch.tensor([T, T, T, T, T, T, 2, T]), T + 1).double()
    close(places(reset, jump[None, None]), [1, 2, 3, 4, 1, 2, 2, 3], 1e-6)


def test_cursor_scan_in_chunks():
    """Neither the chunk size, nor the size of the table, nor what follows changes an encoding."""
    reset, step, jump, table = random_gates(2, 3, 20, 20, copy=True)
    gamma = torch.tensor([1.01, 2.0, 3.0]).double()  # near 1 the sharpening's eps counts
    whole = pe.cursor_scan(reset, step, gamma, table, jump)
    close(pe.cursor_scan(reset, step, gamma, table, jump, chunk=7), whole)
    jump = torch.cat([jump[:, :, :8, :8], jump[:, :, :8, -1:]], dim=-1)  # the first 8 tokens alone
    first = pe.cursor_scan(reset[..., :8], step[:, :, :8], gamma, table[12:29], jump)
    close(first, whole[:, :, :8])


def test_prism_scores_are_eq_9():
    """mu q.k / sqrt(d) + (1 - mu) 4 sum_c |alpha_c| g_t.g_s / sqrt(C d_pe), for each layer."""
    C, d_pe = 3, 4
    model = make(pe='prism', prism_cursors=C, prism_d_pe=d_pe)
    q, k, _, pos = qkv(4, 10, 8)
    for layer in (0, 1):
        x = torch.randn(2, 10, 32).double()
        enc = model.blocks[layer].attn.pe
        torch.nn.init.normal_(enc.alpha)
        state = model.blocks[0].attn.pe.state(x, pos)
        logits = enc.logits(q, k, pos, state)
        mu = torch.sigmoid(enc.m[:, 0, 0])
        g_q, g_k = (g.view(2, 2, 4, 10, C, d_pe)[layer] for g in state)  # (B, H, T, cursors, d_pe)
        for b, h, t, s in itertools.product((0, 1), range(4), (0, 5, 9), (0, 3)):
            if s > t:
                continue
            of_content = mu[h] * q[b, h, t] @ k[b, h, s] / 8 ** 0.5
            meetings = (g_q[b, h, t] * g_k[b, h, s]).sum(dim=-1)  # (cursors,)
            of_place = dot(enc.alpha[h, 0].abs(), meetings)
            of_place = (1 - mu[h]) * 4 * of_place / (C * d_pe) ** 0.5
            close(logits[b, h, t, s], of_content + of_place)


def test_prism_alpha_has_its_own_learning_rate():
    """PRISM section 6.4."""
    groups = make(pe='prism').optim_groups(1e-3, 0.1)
    alpha, = (group for group in groups if group['name'] == 'alpha')
    assert len(alpha['params']) == 2  # one a layer
    assert (alpha['lr'], alpha['betas']) == (0.03, (0.8, 0.92))


def test_prism_without_reset_or_superposition():
    """The sinusoid of the mean offset, which without resets is the sum of p_incr - p_decr."""
    model = make(pe='prism', prism_reset=False, prism_superpose=False, prism_sharpen=False,
                 prism_d_pe=4)
    enc = model.blocks[0].attn.pe
    x = torch.randn(1, 6, 32).double()
    reset, step, _ = enc.cursors.actions(x)
    assert (reset == 0).all()
    mean = (step[..., 0] - step[..., 1]).cumsum(dim=-1)  # (1, 2C, T)
    # (2, layers, 1, H, T, cursors, d_pe) -> (1, 2C, T, d_pe)
    state = enc.state(x, torch.arange(6)).unflatten(-1, (2, 4))
    by_cursor = state.permute(2, 0, 1, 3, 5, 4, 6).reshape(1, -1, 6, 4)
    close(by_cursor, pe.sinusoids(mean, 4, 10000.0, x))


def test_prism_copies_by_hand():
    """Every fifth query cursor can jump to a token.

    With prism_copy='fixed' its key cursor counts tokens from -1, so that a jump to k meets the key
    of token k + 1.
    """
    model = make(pe='prism', prism_copy='fixed', prism_cursors=3, prism_d_pe=4, n_layer=1)
    cursors = model.blocks[0].attn.pe.cursors
    x = torch.randn(2, 9, 32).double()
    assert cursors.count == 12
    reset, step, copy = cursors.actions(x)
    assert copy.shape == (2, 3, 9, 10)
    assert not copy[..., :-1].triu(1).any()
    close(copy.sum(dim=-1), torch.ones(2, 3, 9))

    table = torch.eye(19).double()
    h = cursors.scan(x, table)
    for c in range(24):  # each cursor alone
        gamma = 1 + F.softplus(cursors.g[c:c + 1])
        jump = copy[:, [c // 5]] if c in (0, 5, 10) else None
        gates = reset[:, c:c + 1], step[:, c:c + 1]
        alone = pe.cursor_scan(*gates, gamma, table, jump)
        close(h[:, c:c + 1], alone)
    for c in (12, 17, 22):
        assert (h[:, c].argmax(dim=-1) - 9).tolist() == [list(range(-1, 8))] * 2

    with torch.no_grad():
        cursors.copy.W_stay.weight.zero_()
        cursors.copy.W_stay.bias.fill_(-1e9)  # always jump
        jumped = cursors.scan(x, table)[:, 5, :, 9:18].argmax(dim=-1)
        close(jumped, cursors.actions(x)[2][:, 1, :, :-1].argmax(dim=-1))
    trained = make(pe='prism', prism_copy='trained').blocks[0].attn.pe.cursors
    assert not (trained.actions(x)[0] == 0).any()


def test_prism_branches_and_norms_are_algorithm_3():
    """The absolute position is the last branch.

    'scale' is one factor; 'unit' makes the encoding of each token sqrt(d_pe) long.
    """
    d_pe = 8
    x, pos = torch.randn(2, 9, 32).double(), torch.arange(9)

    def encodings(norm):
        model = make(pe='prism', prism_cursors=3, prism_d_pe=d_pe, n_layer=1,
                     prism_absolute=True, prism_norm=norm)
        return model.blocks[0].attn.pe.state(x, pos)

    plain = encodings('none')
    absolute = plain.unflatten(-1, (4, d_pe))[..., 3, :]
    angle = pos[:, None] * 1e4 ** (-torch.arange(4) * 2 / d_pe)
    close(absolute[..., 0::2], angle.sin().expand(2, 1, 2, 4, 9, 4), 1e-6)
    close(absolute[..., 1::2], angle.cos().expand(2, 1, 2, 4, 9, 4), 1e-6)
    close(encodings('scale'), plain * d_pe ** 0.5 / (4 * (d_pe / 2)) ** 0.5)
    close(encodings('unit'), plain / plain.norm(dim=-1, keepdim=True) * d_pe ** 0.5)


def test_prism_layers():
    """A second PRISM layer reads the residual stream before its layer; later layers use it."""
    model = make(pe='prism', n_layer=5, prism_layers=[1, 4])
    parts = [block.attn.pe for block in model.blocks]
    assert [hasattr(p, 'cursors') for p in parts] == [True, False, False, True, False]
    assert [p.layer for p in parts] == [0, 1, 2, 0, 1]
    assert [parts[i].cursors.layers for i in (0, 3)] == [3, 2]
    seen = []
    parts[3].cursors.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model.blocks[2].tap_resid.register_forward_hook(lambda module, inputs, out: seen.append(out))
    model(torch.randint(11, (2, 7)))
    assert torch.equal(*seen)
    with pytest.raises(ValueError, match='the first of them 1'):
        ModelConfig(pe='prism', prism_layers=[2])


def test_prism_recurrent_matrices():
    """W_h stays orthogonal, is drawn to it by a penalty, or has a learned norm."""
    tokens = torch.randint(11, (4, 9))
    torch.manual_seed(0)
    cfg = ModelConfig(pe='prism', prism_recurrent='orthogonal', prism_hidden=20)
    orthogonal = Transformer(cfg).double()
    optimizer = torch.optim.AdamW(orthogonal.optim_groups(1e-2, 0.01))
    for _ in range(3):
        orthogonal(tokens, tokens)[1].backward()
        optimizer.step()
    W = orthogonal.blocks[0].attn.pe.cursors.gates.W_recurrent().detach()
    close(W.T @ W, torch.eye(20), 1e-6)  # its starting point is rounded to float32

    cursors = make(pe='prism', prism_recurrent='norm', prism_hidden=20).blocks[0].attn.pe.cursors
    close(cursors.gates.W_recurrent().norm().detach(), cursors.gates.s.abs().detach() * 20 ** 0.5)

    drawn = make(pe='prism', prism_recurrent='penalty', prism_hidden=20)
    W = drawn.blocks[0].attn.pe.cursors.gates.W_h.weight.detach()
    with torch.no_grad():
        excess = drawn.train()(tokens, tokens)[1] - drawn.eval()(tokens, tokens)[1]
    expected = 0.0
    for i, j in itertools.product(range(20), range(20)):
        expected += 1e-3 * ((W[:, i] @ W[:, j]).item() - (i == j)) ** 2
    close(excess, expected, 1e-8)


def set_by_hand(enc):
    """Fill every parameter of an encoding with a fixed ramp."""
    with torch.no_grad():
        for p in enc.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))


@pytest.mark.parametrize('other', ['rope', 'pope', 'alibi', 'vipe'])
def test_prism_comes_last_in_a_sum(other):
    """'prism+rope' is 'rope+prism': content scores are rotated, position scores are not."""
    x = torch.randn(2, 10, 32).double()
    q, k, v, pos = qkv(4, 10, 8)
    found = []
    for names in (['prism', other], [other, 'prism']):
        enc = make(pe='+'.join(names), n_layer=1).blocks[0].attn.pe
        assert not enc.fusable  # its q and k are wider than its values
        set_by_hand(enc)
        state = enc.state(x, pos)
        logits = enc.logits(q, k, pos, state)
        found.append(logits)
        close(enc.attend(q, k, v, pos, state), enc.mix(logits.softmax(-1), v, pos, state))
    close(*found)
    if other == 'alibi':
        return
    parts = dict(zip(names, enc.parts))
    states = {name: part.state(x, pos) for name, part in parts.items()}
    of_content = parts[other].logits(q, k, pos, states[other]).tril()
    of_place = parts['prism'].logits(0 * q, k, pos, states['prism']).tril()
    if other == 'vipe':
        row, col = parts['vipe'].factors(parts['vipe'].at(q, k, pos, states['vipe']))
        of_place = row * of_place * col.mT
    close(logits.tril(), torch.sigmoid(parts['prism'].m) * of_content + of_place)


def test_prism_gru_is_pytorchs():
    cursors = make(pe='prism').blocks[0].attn.pe.cursors.gates
    gru = torch.nn.GRU(32, 100, batch_first=True).double()
    with torch.no_grad():
        for ours, name in ((cursors.W_x, 'ih'), (cursors.W_h, 'hh')):
            getattr(gru, f'weight_{name}_l0').copy_(ours.weight)
            getattr(gru, f'bias_{name}_l0').copy_(ours.bias)
    x = torch.randn(3, 9, 32).double()
    close(cursors.gru(x), gru(x)[0])


# ------------------------------------------------------------------------------------------------
# what holds for every encoding: the contract that one of your own has to meet

@variants
def test_attend_is_softmax_of_logits_times_value(kw):
    """The fast path equals the one that probes look into, in training lengths and beyond."""
    for T in (TRAIN_LEN, 3 * TRAIN_LEN):
        first, enc = (block.attn.pe for block in make(**kw).blocks)
        heads = enc.cfg.heads
        q, k, v, pos = qkv(heads, T, enc.cfg.head_dim)
        x = torch.randn(2, T, 32, dtype=torch.float64)
        state = enc.restate(x, pos, first.state(x, pos))
        y = enc.attend(q, k, v, pos, state, x)
        weights = enc.weigh(enc.logits(q, k, pos, state, x))
        close(y, enc.mix(weights, v, pos, state, x))
        assert y.shape == (2, heads, T, enc.out_dim)


@variants
def test_decoding_with_a_cache(kw):
    """A query against the keys and values so far gives its row of the whole sequence.

    The state is made of the tokens so far and the final length, or is that of the whole sequence.
    """
    first, enc = (block.attn.pe for block in make(**kw).blocks)
    T = 2 * TRAIN_LEN
    q, k, v, pos = qkv(enc.cfg.heads, T, enc.cfg.head_dim)
    x = torch.randn(2, T, 32, dtype=torch.float64)
    state = enc.restate(x, pos, first.state(x, pos))
    whole, logits = enc.attend(q, k, v, pos, state, x), enc.logits(q, k, pos, state, x)
    for t in (0, 5, T - 1):
        row, far = slice(t, t + 1), slice(t + 1)
        here = x[:, far], pos[far]
        so_far = enc.restate(*here, first.state(*here, total_len=T))
        past = k[:, :, far], v[:, :, far], pos[far]
        close(enc.attend(q[:, :, row], *past, so_far, x[:, far]), whole[:, :, row])
        close(enc.attend(q[:, :, row], *past, state, x[:, far]), whole[:, :, row])
    close(enc.attend(q[:, :, 9:], k, v, pos, state, x), whole[:, :, 9:])  # a chunk of queries
    close(enc.logits(q[:, :, 9:], k, pos, state, x), logits[:, :, 9:])
    weights = enc.weigh(logits[:, :, 9:])
    close(enc.mix(weights, v, pos, state, x), whole[:, :, 9:])


def test_nope_every():
    model = make(pe='t5', n_layer=5, nope_every=2)
    assert [type(block.attn.pe) for block in model.blocks] == [pe.T5, pe.NoPE] * 2 + [pe.T5]
    for wrong in (1, 3):
        with pytest.raises(ValueError, match='nope_every must be 0, or from 2 to n_layer=2'):
            make(nope_every=wrong)
    with pytest.raises(ValueError, match='leave prism cursors'):
        make(pe='prism', nope_every=2)


@pytest.mark.parametrize('names, says', [
    ('path+rope', 'PaTH and RoPE cannot be added'), ('path+path', 'PaTH and PaTH'),
    ('prism+prism', 'cannot be added'), ('ssmax+path', 'both change the product'),
    ('stickbreaking+vipe', 'weights that sum to 1'),
    ('pope+selective_rope', 'write it once, and last')])
def test_sums_that_would_be_neither_encoding(names, says):
    with pytest.raises(ValueError, match=says):
        encoding(names)


@pytest.mark.parametrize('first', pe.ENCODINGS)
def test_any_two_encodings_add_or_say_why_not(first):
    for second in pe.ENCODINGS:
        try:
            model = make(pe=f'{first}+{second}', n_layer=1)
        except ValueError:
            continue
        logits, _ = model(torch.ones(1, 5, dtype=torch.int64))
        assert logits.isfinite().all()


def positions_of(training, **kw):
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    return pe.positions(pe.PEConfig(**kw), tokens, training).tolist()


def test_randomized_positions():
    """In order, without repeats, uniform; in training drawn anew each time, in evaluation once."""
    draws = [positions_of(True, positions='randomized', positions_max=20) for _ in range(4000)]
    assert all(len(set(pos)) == 9 and pos == sorted(pos) for pos in draws)
    counts = torch.tensor(draws).flatten().bincount(minlength=20)
    assert (counts / 4000 - 9 / 20).abs().max() < 6 * 0.5 / math.sqrt(4000)
    fixed = [positions_of(False, positions='randomized') for _ in range(3)]
    assert fixed[0] == fixed[1] == fixed[2]
    assert positions_of(True, positions='randomized', positions_max=9) == list(range(9))
    with pytest.raises(ValueError, match='128 tokens require positions_max=128'):
        make(positions='randomized', positions_max=100, train_len=128)
    with pytest.raises(ValueError, match='learned has max_len=64 rows'):
        make(pe='learned', positions='randomized')
    model = make(pe='rope', positions='randomized')
    tokens = torch.randint(11, (2, 12))
    with torch.no_grad():   # the beginning of 12 tokens stands where it does in all 12
        close(model(tokens[:, :7], total_len=12)[0], model(tokens)[0][:, :7])


def test_randomized_positions_in_a_run(tmp_path):
    """Two seeds in one pass train."""
    assert not train.main(flags(pe='learned', positions='randomized', positions_max=1000,
                                seeds='0-1', out_dir=tmp_path))


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
    shift_invariant = model.blocks[0].attn.pe.shift_invariant
    assert torch.allclose(logits[0], logits[1]) == shift_invariant


def test_attend_refuses_what_does_not_fit():
    q, k, v, pos = qkv(4)
    enc = encoding('rope', heads=4)
    with pytest.raises(ValueError, match='q has 4 heads and k has 2: repeat grouped keys'):
        enc.attend(q, k[:, :2], v[:, :2], pos)
    with pytest.raises(ValueError, match='do not fit'):
        enc.attend(q, k, v[:, :, :9], pos)
    with pytest.raises(ValueError, match='do not fit'):
        enc.attend(q, k[:, :, :9], v[:, :, :9], pos[:9])
    for wrong in (pos[:9], pos[None, None], pos.expand(3, 10)):  # of a batch of 2
        with pytest.raises(ValueError, match='a position for each of the 10 keys'):
            enc.attend(q, k, v, wrong)
    with pytest.raises(ValueError, match='does not hold positions'):
        enc.attend(q, k, v, pos.to(torch.uint8))
    with pytest.raises(ValueError, match='built for 2 heads of 16'):
        encoding('rope', heads=2, head_dim=16).attend(q, k, v, pos)
    with pytest.raises(ValueError, match='the inputs of all 10 keys'):
        enc.attend(q, k, v, pos, x=torch.randn(2, 1, 32))
    with pytest.raises(ValueError, match='total_len=3 is less than the 10 tokens'):
        encoding('vipe', heads=4).state(None, pos, total_len=3)
    with pytest.raises(ValueError, match='needs state=enc.state'):
        encoding('prism+rope', heads=4).attend(q, k, v, pos)


def readme_code(marker):
    """README's block of Python that contains a word."""
    with open(os.path.join(HERE, 'README.md'), encoding='utf-8') as f:
        blocks = re.findall(r'```python\n(.*?)```', f.read(), re.DOTALL)
    block, = (block for block in blocks if marker in block)
    return block


def test_readme_shows_an_encoding_as_it_stands():
    with open(pe.__file__, encoding='utf-8') as f:
        assert readme_code('class FoX') in f.read()


def test_fox():
    enc = encoding('fox')
    q, k, v, pos = qkv()
    x = torch.randn(2, 10, 16, dtype=torch.float64)
    logits = enc.logits(q, k, pos, x=x)
    f = torch.sigmoid(torch.einsum('btc,hc->bht', x, enc.gate.weight) + enc.gate.bias[:, None])
    for b, h, t, s in itertools.product((0, 1), (0, 1), range(10), range(10)):
        if s <= t:
            forgotten = sum(math.log(f[b, h, j].item()) for j in range(s + 1, t + 1))
            close(logits[b, h, t, s], content(q[b, h, t], k[b, h, s]) + forgotten)
    with pytest.raises(ValueError, match='reads the input x of its attention layer'):
        enc.attend(q, k, v, pos)


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


def test_logits_without_a_mask():
    """<q_t, k_s> / sqrt(d) for every s but the last, of all queries or of the last two."""
    q, k, _, pos = qkv()
    enc = encoding('nope', causal=False)
    expected = q @ k.transpose(-2, -1) * 8 ** -0.5
    expected[..., -1] = -math.inf
    close(enc.logits(q, k, pos), expected)
    close(enc.logits(q[:, :, -2:], k, pos), expected[:, :, -2:])


def test_a_bias_may_be_undefined_at_later_keys():
    """Under a causal mask distances are not negative, and a logarithm of them stays finite."""
    class Log(pe.Encoding):
        def bias(self, at):
            return -torch.log1p(at.distance)

    q, k, v, pos = qkv()
    enc = Log(pe.PEConfig(d_model=16, n_head=2)).double()
    assert enc.attend(q, k, v, pos).isfinite().all()


@variants
def test_gradient_reaches_every_parameter(kw):
    model = make(**kw).train()
    tokens = torch.randint(11, (3, TRAIN_LEN))
    model(tokens, tokens)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@variants
def test_float32_agrees_with_float64(kw):
    model = make(**kw)
    tokens = torch.randint(11, (3, 3 * TRAIN_LEN))
    with torch.no_grad():
        exact = model(tokens)[0]
        rounded = model.float()(tokens)[0].double()
    assert (rounded - exact).abs().max() < 1e-5 * max(1, exact.abs().max())


@variants
def test_bfloat16_stays_near(kw):
    """Under autocast, and with all weights in bfloat16."""
    model = make(torch.float32, **kw)
    tokens = torch.randint(11, (2, 3 * TRAIN_LEN))
    with torch.no_grad():
        exact = model(tokens)[0]
        with torch.autocast('cpu', torch.bfloat16):
            halves = [model(tokens)[0]]
        if kw.get('prism_recurrent') != 'orthogonal':  # PyTorch has no such map in bfloat16
            halves.append(model.bfloat16()(tokens)[0])
    for half in halves:
        assert (half.float() - exact).abs().max() < 0.15 * exact.abs().max()


@variants
def test_shift_invariance_where_declared(kw):
    """Adding 7 to all positions changes the output exactly if shift_invariant is False."""
    enc = make(**kw).blocks[0].attn.pe
    q, k, v, pos = qkv(enc.cfg.heads, TRAIN_LEN, enc.cfg.head_dim)
    x = torch.randn(2, TRAIN_LEN, 32, dtype=torch.float64)

    def outputs(pos):
        return enc.attend(q, k, v, pos, enc.state(x, pos), x), enc.embed(x, pos)

    same = all(torch.allclose(a, b) for a, b in zip(outputs(pos), outputs(pos + 7)))
    assert same == enc.shift_invariant, f'unchanged by the shift: {same}'


@variants
def test_save_and_load(kw, tmp_path):
    model, other = make(**kw), make(seed=1, **kw)
    tokens = torch.randint(11, (2, 9))
    torch.save(model.state_dict(), tmp_path / 'm.pt')
    other.load_state_dict(torch.load(tmp_path / 'm.pt', weights_only=True))
    assert torch.equal(model(tokens)[0], other(tokens)[0])


@variants
def test_beyond_every_trained_length(kw):
    """200 tokens, where tables have 64 rows."""
    tokens = torch.randint(11, (1, 200))
    logits, loss = make(**kw)(tokens, tokens)
    assert logits.isfinite().all()
    assert loss.isfinite()


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


def test_only_shared_encodings_share_parameters():
    """T5's table serves all layers; PoPE's delta is each layer's own; in a sum, too."""
    def count(name, find):
        model = make(pe=name, n_layer=3)
        return len({id(find(block.attn.pe)) for block in model.blocks})

    assert count('t5', lambda enc: enc.table) == 1
    assert count('pope', lambda enc: enc.delta) == 3
    assert count('t5+pope', lambda enc: enc.parts[0].table) == 1
    assert count('t5+pope', lambda enc: enc.parts[1].delta) == 3


def test_rope_heads():
    """rope_heads=1: the first head is RoPE's, the others are NoPE's."""
    q, k, v, pos = qkv(4)
    y = encoding('rope', heads=4, rope_heads=1).attend(q, k, v, pos)
    rope = encoding('rope', heads=4).attend(q, k, v, pos)
    nope = encoding('nope', heads=4).attend(q, k, v, pos)
    close(y[:, :1], rope[:, :1])
    close(y[:, 1:], nope[:, 1:])
    assert not torch.allclose(y[:, 1:], rope[:, 1:])


# ------------------------------------------------------------------------------------------------
# model.py

def test_mla_logits_are_eq_3():
    """The Toeplitz study, eq. 3: heads of 4 NoPE and 4 RoPE features, keys from a vector of 6."""
    model = make(pe='rope', attention='mla', n_head=8, d_compress=6)  # 4 real heads of 8
    attn = model.blocks[0].attn
    x, pos = torch.randn(2, 10, 32, dtype=torch.float64), torch.arange(10)
    seen = []
    attn.tap_logits.register_forward_hook(lambda module, inputs, out: seen.append(out))
    attn(x, pos, None)
    W_Q = attn.q.weight.view(4, 8, 32)
    W_K = (attn.kv.weight[:32] @ attn.compress.weight).view(4, 8, 32)
    q = torch.einsum('hdc,btc->bhtd', W_Q, x)
    k = torch.einsum('hdc,btc->bhtd', W_K, x)
    rope = loop_logits(q[..., 4:], k[..., 4:], rope_score([1, 10000 ** -0.5])) * 2  # not / sqrt(4)
    close(seen[0], (q[..., :4] @ k[..., :4].mT + rope) / math.sqrt(8))
    assert attn.compress.weight.shape == (6, 32)
    assert attn.kv.weight.shape == (64, 6)


def test_taps_read_and_replace():
    """A hook on a tap sees the activation; what it returns takes the activation's place."""
    model = make(pe='rope')
    tokens = torch.randint(11, (2, 9))
    before = model(tokens)[0]
    shapes, handles = {}, []

    def record(name):
        def hook(module, inputs, out):
            shapes[name] = tuple(out.shape)
        return hook

    for name, module in model.named_modules():
        if name.split('.')[-1].startswith('tap_'):
            handles.append(module.register_forward_hook(record(name)))
    close(model(tokens)[0], before)
    for tap in ('tap_q', 'tap_k', 'tap_head_out'):
        assert shapes[f'blocks.1.attn.{tap}'] == (2, 4, 9, 8)
    assert shapes['blocks.0.attn.tap_logits'] == (2, 4, 9, 9)
    assert shapes['tap_resid'] == shapes['blocks.1.tap_resid'] == (2, 9, 32)
    for handle in handles:
        handle.remove()

    tap = model.blocks[1].attn.tap_head_out
    handle = tap.register_forward_hook(lambda module, inputs, out: out * 0)
    assert not torch.allclose(model(tokens)[0], before)
    handle.remove()
    assert torch.equal(model(tokens)[0], before)


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


def test_optimizer_groups_hold_every_parameter_once():
    """Only matrices decay, and none of the embedding's, the norms' or the encoding's parameters."""
    model = make(pe='pope+t5')
    groups = model.optim_groups(1e-3, 0.1)
    ids = [id(p) for group in groups for p in group['params']]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters()}
    decaying = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    names = [n for n, p in model.named_parameters() if id(p) in decaying]
    assert names
    for name in names:
        assert name.endswith('weight') and name != 'embedding.weight'
        assert 'norm' not in name and '.pe.' not in name


@pytest.mark.parametrize('kw, says', [
    (dict(d_model=30, n_head=4), 'divisible'),
    (dict(n_layer=0), 'n_layer'),
    (dict(norm='batch'), 'layernorm'),
    (dict(dropout=1.5), 'dropout'),
    (dict(attention='gqa'), 'mla'),
    (dict(n_head=3, d_model=30, attention='mla'), 'even'),
    (dict(d_compress=-1), 'd_compress'),
    (dict(pe='rop'), 'unknown.*shifted_ape'),  # lists what there is
    (dict(pe='rope+'), 'unknown'),
    (dict(pe='rope', d_model=20, n_head=4), 'even'),
    (dict(pe='ape', d_model=21, n_head=1), 'even'),
    (dict(pe='t5', t5_buckets=1), 't5'),
    (dict(rope_heads=9), 'rope_heads'),
    (dict(pe='ape', rope_heads=1), 'acts on the embedding'),
    (dict(vipe_s='both'), 'length'),
    (dict(pope_delta='one'), 'uniform')], ids=str)
def test_impossible_shapes_say_what_to_do(kw, says):
    with pytest.raises(ValueError, match=says):
        Transformer(ModelConfig(**kw))


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
    return torch.load(os.path.join(folder, 'ckpt.pt'), weights_only=True)


def weights(folder, seed=0):
    return read_checkpoint(folder)['seeds'][seed]['model']


def same(a, b):
    """Whether two dictionaries of tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def read_json(path):
    with open(path) as f:
        return json.load(f)


def log_lines(folder):
    """The lines of a run's log, without the one value that a clock gives."""
    with open(os.path.join(folder, 'log.jsonl')) as f:
        lines = [json.loads(line) for line in f]
    return [{key: x for key, x in line.items() if key != 'steps_per_s'} for line in lines]


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


def wait_for_a_save(path, before, run):
    """Wait until a running process has written the checkpoint at `path` once more."""
    while not path.exists() or path.stat().st_mtime_ns == before:
        assert run.poll() is None, run.stdout and run.stdout.read()
        time.sleep(0.005)


def draw(batches, step):
    """The tokens [B, T] of a step."""
    return batches.next(step)[0]


# ------------------------------------------------------------------------------------------------
# a run and its files

def test_a_run_and_its_files(tmp_path, capsys):
    run, results = tmp_path / 'r', tmp_path / 'results.jsonl'
    assert train.main(flags(out_dir=run, seeds='3,4', results=results)) == 0
    out = capsys.readouterr().out
    for text in ('pe=rope', 'exact match', 'last state', '│'):
        assert text in out
    scores = read_json(run / 'lengths.json')
    assert list(scores) == ['3', '4'] and list(scores['3']) == list('12345')
    assert set(scores['3']['1']) == {'exact', 'token', 'last', 'n'}
    logged = [(line['step'], line['seed']) for line in log_lines(run) if 'loss' in line]
    assert logged == [(step, seed) for step in range(2, 13, 2) for seed in (3, 4)]
    assert read_json(run / 'config.json')['seeds'] == [3, 4]
    record = read_json(results)                            # a single line
    for seed, by_length in scores.items():
        for n, x in by_length.items():
            close(record['lengths'][seed][n], [x['exact'], x['token'], x['last']], 1e-4)
    assert record['config']['seeds'] == '3,4' and record['config']['train_lengths'] == '1-3'
    assert 'pe' not in record['config'] and record['torch']        # the default is not written
    model, cfg = train.load(run, seed=4)
    assert cfg.task == 'parity' and not model.training
    assert same(model.state_dict(), weights(run, 4))
    assert same(train.load(run)[0].state_dict(), weights(run, 3))
    with pytest.raises(train.UserError, match='seed 9 in .*there are: 3; 4'):
        train.load(run, seed=9)


def test_same_seed_same_losses_other_seed_other_losses(tmp_path):
    losses = {}
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        folder = tmp_path / name
        train.main(flags(out_dir=folder, seeds=seed, dropout=0.1, pe='shifted_ape'))
        losses[name] = [line['loss'] for line in log_lines(folder) if 'loss' in line]
    assert losses['a'] == losses['b'] != losses['c']
    assert same(weights(tmp_path / 'a'), weights(tmp_path / 'b'))


RESUMED = [dict(pe='shifted_ape', dropout=0.1, log_interval=5),
           dict(n_train=9, length_schedule='[(0, 2), (5, 3)]'),
           dict(seeds='0,1', dtype='float64')]


@pytest.mark.parametrize('kw', RESUMED, ids=str)
def test_stopped_at_any_step_and_resumed_is_bitwise_the_same(kw, tmp_path):
    whole = tmp_path / 'whole'
    train.main(flags(out_dir=whole, **kw))
    for stop_at in (1, 4, 7, 11):
        folder = tmp_path / str(stop_at)
        with sigterm_in_step(stop_at):
            assert train.main(flags(out_dir=folder, **kw)) == 128 + signal.SIGTERM
        assert read_checkpoint(folder)['step'] == stop_at
        train.main(flags(out_dir=folder, resume=True, **kw))
        for seed in small(**kw).seeds:
            assert same(weights(whole, seed), weights(folder, seed))
        assert log_lines(folder) == log_lines(whole)


def test_a_run_of_a_task_that_has_changed_is_refused(tmp_path):
    """string_reverse had no start symbol once; its sequences were a token shorter."""
    train.main(flags(task='string_reverse', out_dir=tmp_path))
    state = read_checkpoint(tmp_path)
    state['config']['train_len'] -= 1
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(train.UserError, match='string_reverse, or its data, has changed'):
        train.load(tmp_path)
    with pytest.raises(train.UserError, match='string_reverse, or its data, has changed'):
        train.main(flags(task='string_reverse', out_dir=tmp_path) + ['--eval_only'])


def test_runs_with_removed_options_are_refused(tmp_path):
    """Older checkpoints are read if what they lack, or have besides, had its default value."""
    train.main(flags(out_dir=tmp_path))
    for change, readable in ((dict(prism_input=0.5, abacus_offset=99), True),
                             (dict(prism_noise=0.3), False), (dict(ema=0.9), False)):
        state = read_checkpoint(tmp_path)
        state['config'] |= change
        state['config'].pop('pope_frequencies', None)
        torch.save(state, tmp_path / 'ckpt.pt')
        if readable:
            assert train.load(tmp_path)[1].pope_frequencies == 'all'
        else:
            with pytest.raises(train.UserError, match='an option that was removed'):
                train.load(tmp_path)


def test_killed_at_random_and_resumed_is_bitwise_the_same(tmp_path):
    kw = dict(max_steps=300, eval_interval=30, log_interval=15, pe='pope', n_eval=2)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    python('train.py', *flags(out_dir=whole, **kw), check=True)
    rng, path = random.Random(time.time_ns()), killed / 'ckpt.pt'
    for leg in range(3):
        before = path.stat().st_mtime_ns if leg else None
        argv = flags(out_dir=killed, resume=leg > 0, **kw)
        run = subprocess.Popen([sys.executable, 'train.py', *argv], cwd=HERE,
                               stdout=subprocess.DEVNULL)
        if leg < 2:
            wait_for_a_save(path, before, run)
            time.sleep(rng.uniform(0, 0.2))
            run.kill()
        assert run.wait() == (-signal.SIGKILL if leg < 2 else 0)
    assert same(weights(whole), weights(killed))
    assert log_lines(whole) == log_lines(killed)


def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path))
    before = (tmp_path / 'ckpt.pt').read_bytes()

    def full(fd):
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', full)
        with pytest.raises(train.UserError, match='No space left'):
            train.write_file(str(tmp_path / 'ckpt.pt'), b'new')
    assert (tmp_path / 'ckpt.pt').read_bytes() == before
    assert not list(tmp_path.glob('*.tmp'))


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    forward, calls = Transformer.forward, []

    def poisoned(self, tokens, targets=None, total_len=None):
        logits, loss = forward(self, tokens, targets, total_len)
        if self.training and targets is not None:
            calls.append(1)
            loss = loss * math.nan if len(calls) == 7 else loss
        return logits, loss
    monkeypatch.setattr(Transformer, 'forward', poisoned)
    with pytest.raises(train.UserError, match='NaN or infinite at step 7'):
        train.main(flags(out_dir=tmp_path))
    entry = read_checkpoint(tmp_path)['seeds'][0]
    assert entry['step'] == 4 and all(p.isfinite().all() for p in entry['model'].values())


def test_a_new_run_forgets_the_old_one_in_its_folder(tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path))
    monkeypatch.setattr(train, 'train', lambda *args: None)           # as if stopped at once
    train.main(flags(out_dir=tmp_path, lr=0.5))
    assert not (tmp_path / 'ckpt.pt').exists() and not (tmp_path / 'lengths.json').exists()


def test_a_run_goes_on_only_where_its_random_numbers_are(tmp_path):
    argv = flags(out_dir=tmp_path, seeds='0,1')
    train.main(argv)
    state = read_checkpoint(tmp_path)
    state['step'] = 8
    state['batches']['starts'] = [torch.zeros(16, dtype=torch.uint8)] * 2          # a GPU's
    torch.save(state, tmp_path / 'ckpt.pt')
    says = 'was trained on another kind of device.*--device=cuda'
    with pytest.raises(train.UserError, match=says):
        train.main([*argv, '--resume'])
    assert (tmp_path / 'lengths.json').exists()


def test_checkpoints_that_do_not_fit(tmp_path):
    train.main(flags(out_dir=tmp_path))
    for kw, says in ((dict(d_model=32), 'trained with d_model=16, not 32'),
                     (dict(pe='nope'), 'trained with pe=rope'),
                     (dict(train_lengths='1-4'), 'train_lengths'),
                     (dict(task='copy'), 'trained with task=parity'),
                     (dict(seeds='0,1'), 'trained with seeds'),
                     (dict(lr=0.5), 'trained with lr=0.001'),
                     (dict(max_steps=99), 'max_steps')):
        with pytest.raises(train.UserError, match=says):
            train.main(flags(out_dir=tmp_path, resume=True, **kw))
    data = (tmp_path / 'ckpt.pt').read_bytes()
    (tmp_path / 'ckpt.pt').write_bytes(data[:len(data) // 2])
    for argv in [f'--out_dir={tmp_path}', '--eval_only'], flags(out_dir=tmp_path, resume=True):
        with pytest.raises(train.UserError, match='not a whole checkpoint'):
            train.main(argv)


# ------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize('name', pe.ENCODINGS)
def test_float32_seeds_together_train_as_each_alone(name):
    compare_seeds([5, 6], 20, 1e-5, pe=name)


def test_seeds_with_tied_embeddings_train_as_each_alone():
    compare_seeds([5, 6, 7], 15, 1e-9, dtype='float64', tie=True)


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_phases_stay_in_their_bounds(numbers):
    """A phase that is pushed against a bound for long leaves it as soon as the push turns."""
    trainer = train.Trainer(smaller(pe='pope', seeds=numbers, lr=0.01, min_lr=0.01), CPU)
    optimizer = trainer.optimizer
    delta = next(g for g in optimizer.param_groups if g['name'] == 'delta')['params'][0]
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
    line = read_json(results)
    assert list(line['lengths']) == ['0', '2']
    assert 'seed 1: the loss' in line['failed'][0]
    out = capsys.readouterr().out
    assert 'seed 1: the loss or a weight became NaN or infinite at step 6' in out
    for seed in (0, 2):
        assert same(weights(a, seed), weights(b, seed))
    assert list(read_json(b / 'lengths.json')) == ['0', '2']
    assert train.main(['--eval_only', f'--out_dir={b}']) == 0
    assert 'left out: seed 1: the loss' in capsys.readouterr().out
    assert list(read_json(b / 'lengths.json')) == ['0', '2']
    failed = read_checkpoint(b)['seeds'][1]
    assert failed['step'] == 4 and all(p.isfinite().all() for p in failed['model'].values())


def test_micro_batches_give_the_same_gradient(tmp_path):
    """Micro-batches count by what is supervised in them, not by their rows."""
    for accumulate in (1, 3, 8):
        train.main(flags(dtype='float64', seeds='0,1', accumulate=accumulate,
                         out_dir=tmp_path / str(accumulate)))
    assert_same_run(tmp_path / '1', tmp_path / '3')
    assert_same_run(tmp_path / '1', tmp_path / '8')


# ------------------------------------------------------------------------------------------------
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
    trainer.optimizer = mock.Mock(param_groups=[dict(params=params, bounds=(-1, 1))])
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
def test_gpu_run_stops_and_resumes(numbers, tmp_path):
    argv = flags(device='cuda', seeds=numbers, dropout=0.1, max_steps=40, eval_interval=20)
    a, b = tmp_path / 'a', tmp_path / 'b'
    train.main([*argv, f'--out_dir={a}'])
    with sigterm_in_step(25):
        assert train.main([*argv, f'--out_dir={b}']) == 128 + signal.SIGTERM
    train.main([*argv, f'--out_dir={b}', '--resume'])
    assert_same_run(a, b, 1e-4)


# ------------------------------------------------------------------------------------------------
# sweeps and evaluation

def test_sweep_makes_one_table_and_continues(tmp_path, capsys):
    argv = flags(pe='nope,rope', lr='1e-3,1e-2', out_dir=tmp_path)
    train.main(argv)
    out = capsys.readouterr().out
    names = [f'pe={name},lr={lr}' for name in ('nope', 'rope') for lr in (0.001, 0.01)]
    with pytest.raises(train.UserError, match='of a sweep, one of its runs'):
        train.main(['--eval_only', f'--out_dir={tmp_path}'])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(names)
    assert len(re.findall(r'^(nope|rope) 0\.0?01? .*│', out, re.M)) == 4
    first, third = tmp_path / names[0] / 'ckpt.pt', tmp_path / names[2] / 'lengths.json'
    third.unlink()                                         # as if killed in the third run
    before = first.stat().st_mtime_ns
    train.main(argv)
    assert capsys.readouterr().out.count('finished earlier') == 3 and third.exists()
    assert first.stat().st_mtime_ns == before


def test_a_diverging_point_does_not_end_a_sweep(tmp_path, capsys):
    results = tmp_path / 'r.jsonl'
    with pytest.raises(train.UserError, match='1 diverged: 1e\\+30'):
        train.main(flags(lr='1e30,1e-3', out_dir=tmp_path, results=results))
    assert re.search(r'^0.001 .*│', capsys.readouterr().out, re.M)
    bad, good = map(json.loads, results.read_text().splitlines())
    assert bad['lengths'] == {} and len(bad['failed']) == 1
    assert list(good['lengths']) == ['0'] and 'failed' not in good


def test_eval_only_with_other_options_of_the_task(tmp_path):
    """Scores of flip_flop:ignore=98 do not replace those of flip_flop; they go into results."""
    train.main(flags(task='flip_flop', train_lengths='4', eval_lengths='4', out_dir=tmp_path))
    before = (tmp_path / 'lengths.json').read_text()
    train.main(['--eval_only', f'--out_dir={tmp_path}', '--task=flip_flop:ignore=98',
                f'--results={tmp_path}/lines.jsonl'])
    assert (tmp_path / 'lengths.json').read_text() == before
    line = json.loads((tmp_path / 'lines.jsonl').read_text())
    assert line['config']['task'] == 'flip_flop:ignore=98'
    scores = read_json(tmp_path / 'eval.json')['0']['4']
    assert line['lengths']['0']['4'] == [round(scores[x], 4) for x in ('exact', 'token', 'last')]
    assert scores != json.loads(before)['0']['4']
    with pytest.raises(train.UserError, match='task=flip_flop; parity is another'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--task=parity'])
    train.main(flags(task='group:name=s3', out_dir=tmp_path))
    with pytest.raises(train.UserError, match='task=group:name=s3; group:name=z6 is another'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--task=group:name=z6'])
    with pytest.raises(train.UserError, match='continues no prompt'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--prompt=012'])
    train.main(flags(task='distance:span=4', train_lengths='4', eval_lengths='4', causal=False,
                     out_dir=tmp_path))
    with pytest.raises(train.UserError, match='no causal mask'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--prompt=w1 ?'])


def test_eval_only_uses_the_runs_own_configuration(tmp_path, capsys):
    train.main(flags(out_dir=tmp_path, pe='vipe'))
    before = (tmp_path / 'ckpt.pt').read_bytes()
    capsys.readouterr()
    train.main(['--eval_only', f'--out_dir={tmp_path}', '--eval_lengths=2,9', '--device=cpu'])
    out = capsys.readouterr().out
    assert '--eval_lengths=2,9' in out and 'parity with vipe' in out
    assert (tmp_path / 'ckpt.pt').read_bytes() == before
    assert list(read_json(tmp_path / 'lengths.json')['0']) == list('123459')
    config_file = tmp_path / 'again.py'
    config_file.write_text(f'eval_only = True\nout_dir = {str(tmp_path)!r}\n')
    train.main([str(config_file), '--eval_lengths=7'])
    assert (tmp_path / 'ckpt.pt').read_bytes() == before


def test_the_scale_of_vipe_follows_the_lengths_evaluated(tmp_path):
    """--eval_only at other lengths reports what training with these eval_lengths would have."""
    kw = dict(pe='vipe', vipe_s='global', max_steps=60)
    train.main(flags(out_dir=tmp_path / 'a', eval_lengths='1-9', **kw))
    train.main(flags(out_dir=tmp_path / 'b', eval_lengths='1-5', **kw))
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--eval_lengths=1-9'])
    assert read_json(tmp_path / 'a/lengths.json') == read_json(tmp_path / 'b/lengths.json')
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--vipe_s=one'])


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
    model.answers[2, 7] += 1                               # row 2: its end token
    scores = train.evaluate(model, task, {3: (tokens, targets)})[3]
    assert scores == dict(exact=0.25, token=0.8125, last=0.75, n=4)


# ------------------------------------------------------------------------------------------------
# batches and the learning rate

def test_batches_mix_lengths_and_repeat_fixed_data():
    task = tasks.make('parity')
    batches = train.Batches(small(n_train=8, batch_size=6), 0, task, CPU)
    epoch = torch.cat([draw(batches, 0) for _ in range(4)])
    again = torch.cat([draw(batches, 0) for _ in range(4)])
    assert epoch.shape == (24, 9) and not torch.equal(epoch, again)
    assert sorted(epoch.tolist()) == sorted(again.tolist())
    assert len({(row != 0).sum().item() for row in epoch[:6]}) > 1
    fresh = train.Batches(small(), 0, task, CPU)
    rows = torch.cat([draw(fresh, 0) for _ in range(200)]).tolist()
    assert len({tuple(row) for row in rows}) == 2 + 4 + 8


def test_schedule_limits_lengths():
    cfg = small(length_schedule='[(0, 1), (5, 3)]')
    assert train.lengths_at(cfg, 4) == [1] and train.lengths_at(cfg, 5) == [1, 2, 3]
    batches = train.Batches(cfg, 0, tasks.make('parity'), CPU)
    assert draw(batches, 0).shape == (8, 5) and draw(batches, 5).shape == (8, 9)


@pytest.mark.parametrize('n_train', [0, 1500])
def test_held_out_problems_come_from_generators_of_their_own(n_train):
    """Problems of length 40, where chance repeats are impossible: none is in two parts."""
    cfg = small(train_lengths='40', eval_lengths='40', n_eval=200, n_test=200, n_train=n_train)
    task = tasks.make('parity')
    batches = train.Batches(cfg, 0, task, CPU)
    parts = [torch.cat([draw(batches, 0) for _ in range(200)])]
    parts += [train.held_out(cfg, task, split, CPU)[40][0] for split in ('eval', 'test')]
    trained, validation, test = ({tuple(row) for row in part.tolist()} for part in parts)
    assert len(trained) > 1000
    assert not (trained & validation or trained & test or validation & test)
    with pytest.raises(train.UserError, match='seeds'):          # no seed reaches another generator
        small(seeds=2 ** 40)


def test_held_out_text_is_never_trained_on(tmp_path):
    """40 files, each of a byte of its own, and the standard library: no file is in two parts."""
    for i in range(1, 41):
        (tmp_path / f'{i}.txt').write_bytes(bytes([i]) * 50)
    cfg = small(task='text', data=tmp_path, train_lengths=16, eval_lengths='16,32')
    task = tasks.make('text', str(tmp_path))
    batches = train.Batches(cfg, 0, task, CPU)
    drawn = [[draw(batches, 0) for _ in range(200)]]
    for split in ('eval', 'test'):
        sets = train.held_out(cfg, task, split, CPU)
        drawn.append([tokens for tokens, _ in sets.values()])
    parts = []
    for part in drawn:
        tokens = torch.cat([x.flatten() for x in part])
        parts.append(set(tokens.tolist()) - {tasks.PAD})
    assert [len(part) for part in parts] == [36, 2, 2] and len(set().union(*parts)) == 40

    files = {}
    for part, documents in tasks.make('stdlib').parts.items():
        files[part] = {bytes(x) for x in documents if len(x) > 38}    # two hold one short comment
    assert all(files.values())
    for a, b in (('train', 'val'), ('train', 'test'), ('val', 'test')):
        assert not files[a] & files[b]


def test_learning_rate_schedules():
    def rate(step, **kw):
        cfg = small(lr=1.0, max_steps=100, warmup_steps=10, min_lr=0.1, **kw)
        return train.learning_rate(cfg, step)
    assert rate(0) == 0.1 and rate(9) == 1 == rate(10)
    close(rate(55), 0.55)
    close(rate(55, decay='cosine'), 0.55)
    close(rate(100, decay='cosine'), 0.1)
    assert rate(99, decay='none') == 1


# ------------------------------------------------------------------------------------------------
# input

BAD = {
    # names and types
    'unknown flag': (['--batchsize=3'], "did you mean 'batch_size'"),
    'wrong type': (['--lr=fast'], "--lr=fast: lr must be a number >= 0, got 'fast'"),
    'no value': (['--lr'], '--lr: lr must be a number'),
    'negative': (['--n_layer=-1'], 'n_layer must be an integer >= 0'),
    'unknown task': (['--task=pairty'], "'parity'"),
    'unknown encoding': (['--pe=rop'], "'rope'"),
    # the model and the lengths
    'heads': (['--n_head=5'], 'divisible'),
    'odd head': (['--d_model=21'], 'even'),
    'an encoder of padding': (['--task=distance', '--train_lengths=8,9', '--causal=False'],
                              'one training length'),
    'zero length': (['--eval_lengths=[]'], 'eval_lengths'),
    'mixed lengths': (["--eval_lengths=[1,'a']"], 'eval_lengths'),
    'no such length': (['--task=scan', '--train_lengths=23'], 'no problems of the lengths'),
    'zero steps': (['--max_steps=0'], 'max_steps must be positive'),
    'bad schedule': (['--length_schedule=[(5, 3)]'], 'from step 0 on'),
    'empty schedule': (['--train_lengths=4-6', '--length_schedule=[(0, 3)]'], 'too few problems'),
    'small set': (['--n_train=1'], 'too few problems'),
    'a point of a sweep': (['--d_model=32,33'], 'even'),
    # data, files and devices
    'no data': (['--task=jsb'], 'give --data=PATH'),
    'no file': (['configs/none.py'], 'cannot read config file configs/none.py'),
    'no cuda': (['--device=cuda:7'], 'not available'),
    'bad device': (['--device=tpu'], 'not available'),
    'no graph': (['--graph'], '--graph requires a CUDA device'),
    # what goes together
    'nothing to resume': (['--resume', '--out_dir=nowhere'], 'nowhere/config.json is missing'),
    'nothing to evaluate': (['--eval_only', '--out_dir=nowhere'], 'is missing'),
    'two to evaluate': (['--eval_only', '--pe=nope,rope'], 'takes one trained run'),
    'untrained prompt': (['--prompt=x'], '--prompt requires --eval_only'),
    'two tables': (['--task=copy,scan', '--eval_lengths=22-24'], 'a sweep prints one table'),
}


def test_nothing_stays_of_a_run_that_is_replaced(tmp_path, capsys):
    train.main(flags(out_dir=tmp_path))
    (tmp_path / 'probe_axes.json').touch()
    assert 'replaces' not in capsys.readouterr().out
    train.main(flags(out_dir=tmp_path, pe='alibi'))
    assert f'replaces the run in {tmp_path}\n' in capsys.readouterr().out
    assert not (tmp_path / 'probe_axes.json').exists() and (tmp_path / 'ckpt.pt').exists()


@pytest.mark.parametrize('argv, says', BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {word.split('=')[0] for word in argv}
    others = [word for word in flags() if word.split('=')[0] not in given]
    with pytest.raises(train.UserError, match=re.escape(says)) as error:
        train.main(others + argv)
    assert '\n' not in str(error.value)
    assert not list(tmp_path.rglob('ckpt.pt'))


BAD_FILES = [('lr = 1e-3\npee = 1\n', "unknown option 'pee', did you mean 'pe'"),
             ('lr = = 2', 'line 1: SyntaxError'),
             ('lr = 1\nseeds = [x]', 'line 2: NameError'),
             ('prism_info = 0.1', 'unknown option'),
             ('vocab_size = None', 'unknown option')]


@pytest.mark.parametrize('text, says', BAD_FILES)
def test_bad_config_files(text, says, tmp_path):
    (tmp_path / 'bad.py').write_text(text)
    with pytest.raises(train.UserError, match=re.escape(says)) as error:
        train.main([str(tmp_path / 'bad.py')])
    assert 'bad.py' in str(error.value)


def test_exit_code_2_without_a_traceback(tmp_path):
    argvs = [['train.py', '--lr=fast'],
             ['train.py', '--task=jsb', f'--data={tmp_path}'],
             ['tasks.py', 'pairty'],
             ['train.py', '--out_dir=/dev/null/x'],
             ['tasks.py', 'jsb']]
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
    assert sweep['out_dir'] == 'out/rope_n_head'


VALUES = [('d_model', '1e2', 100), ('d_model', 4.0, 4), ('lr', '3', 3.0), ('lr', 1, 1.0),
          ('decay', 'none', 'none'), ('compile', 'true', True), ('compile', 'False', False),
          ('compile', 'None', None), ('data', '12', '12'), ('seeds', '2-4,7', [2, 3, 4, 7]),
          ('seeds', '5', [5]), ('length_schedule', '[(0, 5), (9, 7)]', [(0, 5), (9, 7)]),
          ('d_model', '1.5', None), ('d_model', True, None), ('lr', 'inf', None),
          ('decay', 'exp', None), ('compile', '2', None), ('data', 3, None), ('seeds', '1-', None)]


@pytest.mark.parametrize('key, given, value', VALUES)
def test_a_value_takes_the_type_of_its_field(key, given, value):
    """None, except where it is given: refused."""
    if value is None and given != 'None':
        with pytest.raises(train.UserError, match=f'{key} must be'):
            train.check(train.Config, key, given, 'a test')
    else:
        found = train.check(train.Config, key, given, 'a test')
        assert found == value and type(found) is type(value)


def test_help_names_every_option(capsys):
    train.main(['--help'])
    out = capsys.readouterr().out
    for key in train.keys(train.Config):
        line = re.search(rf'^  --{key}=(.*)$', out, re.M)
        assert line and len(line[1].split()) > 1, key


# ------------------------------------------------------------------------------------------------
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
        pytest.importorskip('miditok')
        values['data'] = str(request.getfixturevalue('midi'))
    cfg = train.make_config(values)
    if not name.startswith('paper_') and name != 'addition_prism.py':
        assert name == f'{cfg.task}_{cfg.pe}.py'
    with torch.device('meta'):    # of the right shape, without numbers
        Transformer(cfg)


def paper_prism_chains():
    """{task's config: the words after it} of the chains that configs/paper_prism.py lists."""
    with open(config_file('paper_prism')) as f:
        listed = re.findall(r'^#   (.+)$', f.read(), re.M)
    chains = {}
    for line in listed:
        words = re.split(', | or ', line)
        first = words.index('paper_prism')
        for name in words[:first]:
            chains[name] = words[first:]
    return chains


@pytest.mark.parametrize('baseline', [False, True])
def test_the_chains_of_paper_prism_are_the_papers(baseline):
    """The lengths of PRISM section 6, the layers with PRISM, and where the copy branch is."""
    settings = {}
    for name, words in paper_prism_chains().items():
        words = [name, *words, *['paper_prism_baseline'] * baseline]
        cfg = read_config(*(word if word.startswith('--') else config_file(word) for word in words))
        settings[name] = (max(cfg.train_lengths), cfg.length_schedule[-1], max(cfg.eval_lengths),
                          cfg.prism_layers, cfg.prism_copy)
        assert (cfg.pe, cfg.d_model) == (('shifted_ape', 512) if baseline else ('prism', 196))
        assert cfg.n_test == (10000 if name == 'scan_cot_prism' else 1000)
        assert cfg.prism_reset
        with torch.device('meta'):
            Transformer(cfg)
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
