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
import doctest
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import warnings

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

import kernels
import pe
import tasks
import train
from engine import bench, data
from engine import scan as prism_scan
from engine.config import UserError
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
    'mla path': dict(pe='path', attention='mla'),
    'vrope+vipe': dict(pe='vrope+vipe'),
    'vipe+vrope': dict(pe='vipe+vrope'),
    't5+fire': dict(pe='t5+fire'),
    'rope on 1 head': dict(pe='rope', rope_heads=1),
    'pope+vipe on 3 heads': dict(pe='pope+vipe', rope_heads=3),
    'alibi on 2 heads': dict(pe='alibi', rope_heads=2),
    'prism on 2 heads': dict(pe='prism', rope_heads=2),
    'nope every 2': dict(pe='ape+rope', nope_every=2),
    'mla rope': dict(pe='rope', attention='mla'),
    'mla pope+vipe': dict(pe='pope+vipe', attention='mla'),
    'mla rope on 1 head': dict(pe='rope', attention='mla', rope_heads=1),
}
variants = pytest.mark.parametrize('kw', VARIANTS.values(), ids=VARIANTS)


# ------------------------------------------------------------------------------------------------
# helpers, for the tests in engine/ and probes/ as well

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
    return pe.build(cfg).double().eval()


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
    """Magnitudes softplus(q), softplus(k); phases (s - t) theta_c + delta_c; delta is clamped."""
    enc = encoding('pope', pope_delta=delta, pope_softplus=magnitudes, pope_frequencies=number)
    if delta == 'zero':
        with torch.no_grad():
            enc.delta.copy_(torch.linspace(-8, 1, 16).view(2, 8))  # beyond both bounds

    def score(h, q, k, t, s):
        total = 0.0
        for c in range(8):
            theta = 10000 ** (-(c if number == 'all' else c // 2 * 2) / 8)
            phase = min(max(enc.delta[h, c].item(), -2 * math.pi), 0) if delta != 'none' else 0
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
    close(enc.bias(enc.at(len(pos), pos)), -enc.slope[:, None, None] * apart)
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
    reset, step, _ = enc.cursors.gates(x)
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
    reset, step, copy = cursors.gates(x)
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
        cursors.W_stay.weight.zero_()
        cursors.W_stay.bias.fill_(-1e9)  # always jump
        jumped = cursors.scan(x, table)[:, 5, :, 9:18].argmax(dim=-1)
        close(jumped, cursors.gates(x)[2][:, 1, :, :-1].argmax(dim=-1))
    trained = make(pe='prism', prism_copy='trained').blocks[0].attn.pe.cursors
    assert not (trained.gates(x)[0] == 0).any()


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
    W = orthogonal.blocks[0].attn.pe.cursors.W_recurrent().detach()
    close(W.T @ W, torch.eye(20), 1e-6)  # its starting point is rounded to float32

    cursors = make(pe='prism', prism_recurrent='norm', prism_hidden=20).blocks[0].attn.pe.cursors
    close(cursors.W_recurrent().norm().detach(), cursors.s.abs().detach() * 20 ** 0.5)

    drawn = make(pe='prism', prism_recurrent='penalty', prism_hidden=20)
    W = drawn.blocks[0].attn.pe.cursors.W_h.weight.detach()
    with torch.no_grad():
        excess = drawn.train()(tokens, tokens)[1] - drawn.eval()(tokens, tokens)[1]
    expected = 0.0
    for i, j in itertools.product(range(20), range(20)):
        expected += 1e-3 * ((W[:, i] @ W[:, j]).item() - (i == j)) ** 2
    close(excess, expected, 1e-8)


def test_prism_starts_with_bits():
    """Half of the units keep their sign for 100 tokens, half flip it at each, whatever they are."""
    cursors = encoding('prism', prism_start='bits').cursors
    x = 0.3 * torch.randn(20, 100, 16, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        signs = cursors.gru(x)[:, 10:].sign()
    flips = (signs[:, 1:] != signs[:, :-1]).double().mean(dim=(0, 1))
    assert flips[::2].min() > 0.9 and flips[1::2].max() < 0.1


def test_prism_noise_disturbs_the_state_in_training():
    """Fresh noise at every token, upon what the GRU makes of the disturbed state before."""
    cursors = encoding('prism', prism_noise=0.5).cursors
    x = torch.zeros(2000, 2, 16, dtype=torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        calm, noisy = cursors.eval().gru(x), cursors.train().gru(x)
    assert (calm == calm[:1]).all()
    first, second = (noisy - calm).std(dim=(0, 2))
    close(first, 0.5, 0.01)
    assert 0.53 < second < 1


def penalty_of_gates(**kw):
    """A PRISM model, its loss, what training adds to it, and the gates (reset, step); certain
    gates, too, must have finite gradients."""
    model = make(pe='prism', n_layer=1, **kw)
    tokens = torch.arange(12).view(2, 6) % 5
    certain = make(pe='prism', n_layer=1, **kw)
    bias = certain.blocks[0].attn.pe.cursors.W.bias
    with torch.no_grad():
        bias.copy_(torch.tensor([-2e3, 2e3, 0, 0]).repeat(len(bias) // 4))
    certain(tokens, tokens)[1].backward()
    assert all(p.grad.isfinite().all() for p in certain.parameters())
    with torch.no_grad():
        loss = model.eval()(tokens, tokens)[1]
        excess = model.train()(tokens, tokens)[1] - loss
        gates = model.blocks[0].attn.pe.cursors.gates(model.embedding(tokens))
    return model, loss, excess, gates[:2]


@pytest.mark.parametrize('at', [0.0, 2.0])
def test_prism_whole_is_the_entropy_of_the_gates(at):
    """With prism_whole_at it counts less while the loss is high."""
    _, loss, excess, (reset, step) = penalty_of_gates(prism_whole=0.5, prism_whole_at=at)
    total = 0.0
    for p in reset.flatten().tolist():
        total -= p * math.log(p) + (1 - p) * math.log(1 - p)
    for p in step.flatten().tolist():
        total -= p * math.log(p)
    weight = 0.5 * math.exp(-loss / at) if at else 0.5
    close(excess, weight * total / reset.numel(), 1e-12)


def test_prism_info_is_the_mutual_information_of_gates_and_tokens():
    """I(action; token) = sum p(token) p(action | token) log(p(action | token) / p(action))."""
    model, _, excess, (reset, step) = penalty_of_gates(prism_info=0.5)
    total = 0.0
    for p in (torch.stack([reset, 1 - reset], dim=-1), step):
        p = p.transpose(0, 1).flatten(1, 2)     # (2C, places, actions)
        for cursor in p.tolist():
            for action in zip(*cursor):
                mean = sum(action) / len(action)
                total += sum(x * math.log(x / mean) for x in action) / len(action)
    close(excess, 0.5 * total / reset.shape[1], 1e-12)
    tokens = torch.arange(12).view(2, 6) % 5
    with torch.no_grad():
        model.blocks[0].attn.pe.cursors.W.weight.zero_()    # equal gates everywhere tell nothing
        close(model.train()(tokens, tokens)[1], model.eval()(tokens, tokens)[1], 1e-12)


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
        row, col = parts['vipe'].rescale(q, k, parts['vipe'].at(10, pos, states['vipe']))
        of_place = row * of_place * col.mT
    close(logits.tril(), torch.sigmoid(parts['prism'].m) * of_content + of_place)


def test_prism_gru_is_pytorchs():
    cursors = make(pe='prism').blocks[0].attn.pe.cursors
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


def positions_of(training, length=9, **kw):
    tokens = torch.tensor([[4, 9, 9, 0, 1, 2, 4, 3, 3]])[:, :length].expand(2, -1)
    return pe.positions(pe.PEConfig(digits=[1, 2, 3], **kw), tokens, training).tolist()


def test_randomized_positions():
    """In order, without repeats, uniform; in training drawn anew each time, in evaluation once."""
    draws = [positions_of(True, positions='randomized', positions_max=20) for _ in range(4000)]
    assert all(len(set(pos)) == 9 and pos == sorted(pos) for pos in draws)
    counts = torch.tensor(draws).flatten().bincount(minlength=20)
    assert (counts / 4000 - 9 / 20).abs().max() < 6 * 0.5 / math.sqrt(4000)
    fixed = [positions_of(False, positions='randomized') for _ in range(3)]
    assert fixed[0] == fixed[1] == fixed[2]
    assert positions_of(True, positions='randomized', positions_max=9) == list(range(9))
    with pytest.raises(ValueError, match='128 tokens want positions_max=128'):
        make(positions='randomized', positions_max=100, train_len=128)
    with pytest.raises(ValueError, match='learned has max_len=64 rows'):
        make(pe='learned', positions='randomized')
    model = make(pe='rope', positions='randomized')
    tokens = torch.randint(11, (2, 12))
    with torch.no_grad():   # the beginning of 12 tokens stands where it does in all 12
        close(model(tokens[:, :7], total_len=12)[0], model(tokens)[0][:, :7])


def test_abacus_positions():
    """Each digit's place in its number; in training all numbers start at one place of many."""
    assert positions_of(False, positions='abacus') == 2 * [[0, 0, 0, 0, 1, 2, 0, 1, 2]]
    first = [positions_of(True, positions='abacus', abacus_offset=3) for _ in range(200)]
    assert {tuple(row[0]) for row in first} == {(0, 0, 0, 0, a, a + 1, 0, a, a + 1)
                                                for a in (1, 2, 3, 4)}
    first = [positions_of(True, positions='coupled', abacus_offset=3) for _ in range(200)]
    assert {tuple(row[0]) for row in first} == {(a, a, a, a, a + 1, a + 2, a, a + 1, a + 2)
                                                for a in range(4)}
    assert positions_of(False, positions='coupled') == positions_of(False, positions='abacus')
    for positions in ('abacus', 'coupled'):     # the first tokens stand where they do in all
        whole = positions_of(False, positions=positions)
        assert positions_of(False, 5, positions=positions) == [row[:5] for row in whole]
        with pytest.raises(ValueError, match=f'positions={positions} reads digits'):
            make(positions=positions)
        with pytest.raises(ValueError, match='learned has max_len=64 rows: '):
            make(pe='learned', positions=positions, digits=[1])
    pos = torch.arange(10)      # an earlier key at a higher place is still that far
    pos[5:] = 0
    enc = encoding('alibi', positions='abacus', digits=[1])
    close(enc.bias(enc.at(10, pos))[0, 5], -2.0 ** -4 * pos)


@pytest.mark.parametrize('positions', ['randomized', 'abacus', 'coupled'])
def test_positions_in_a_run(positions, tmp_path):
    """Two seeds in one pass train; a task whose numbers do not fit is refused in one line."""
    assert not train.main(flags(task='addition:reversed=1', pe='learned', positions=positions,
                                positions_max=1000, seeds='0-1', out_dir=tmp_path))
    refused = {'abacus': ('scan', 'the task has none'),
               'coupled': ('addition:reversed=1:hints=1', 'written lowest digit first')}
    if positions in refused:
        task, says = refused[positions]
        with pytest.raises(UserError, match=says):
            train.main(flags(task=task, positions=positions, out_dir=tmp_path))


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
        with pytest.raises(ValueError, match='wants a causal mask'):
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
        def by_distance(self, d):
            return -torch.log1p(d)

    q, k, v, pos = qkv()
    enc = Log(pe.PEConfig(d_model=16, n_head=2)).double()
    assert enc.attend(q, k, v, pos).isfinite().all()


def test_t5_without_a_mask_tells_before_from_after():
    """Half of 8 buckets for each side: 0 | 1 | 2, 3 | from 4 on, as in T5's encoder."""
    enc = encoding('t5', causal=False, t5_buckets=8, t5_max_distance=8)
    places = torch.arange(-9, 10)
    expected = [0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    close(enc.bucket(places), torch.tensor([4 + b for b in expected[:0:-1]] + expected))


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
    (dict(pe='t5', t5_buckets=3, causal=False), 't5_buckets >= 4'),
    (dict(prism_start='bits', prism_recurrent='norm'), 'free'),
    (dict(prism_whole_at=0.1), 'prism_whole'),
    (dict(rope_heads=9), 'rope_heads'),
    (dict(pe='ape', rope_heads=1), 'acts on the embedding'),
    (dict(vipe_s='both'), 'length'),
    (dict(pope_delta='one'), 'uniform')], ids=str)
def test_impossible_shapes_say_what_to_do(kw, says):
    with pytest.raises(ValueError, match=says):
        Transformer(ModelConfig(**kw))


# ------------------------------------------------------------------------------------------------
# tasks.py, against oracles: oracle(name, length, prompt, answer) asserts that the answer, a list of
# words, is right for the prompt, by slow and obvious means

def iterative_oracle(name, length, prompt, answer):
    """BoS x_1..x_L EoI s_1..s_m EoS."""
    assert prompt[0] == 'BoS' and prompt[-1] == 'EoI'
    assert answer[-1] == 'EoS'
    x = prompt[1:-1]
    assert len(x) == (2 if name == 'count' else length)
    if name == 'mode':
        assert len(statistics.multimode(x)) == 1
        assert answer[:-1] == [statistics.mode(x)]
        return
    x = [int(word) for word in x]
    if name == 'sort':
        assert len(set(x)) == len(x)
    states = {
        'copy': x,
        'reverse': x[::-1],
        'sort': sorted(x),
        'count': range(x[0], x[-1] + 1),
        'parity': itertools.accumulate(x, lambda s, x_t: (s + x_t) % 2),
        'polynomial': itertools.accumulate(x, lambda s, x_t: (s * x_t + 1) % 5),
        'product': itertools.accumulate(x, lambda s, x_t: s * x_t % 5),
    }[name]
    assert answer[:-1] == [str(s) for s in states]
    assert name != 'count' or len(answer) == length + 1


def classification_oracle(name, length, prompt, answer):
    """x_1..x_L ? class: how many triggers there are, or how far they are apart."""
    assert prompt[-1] == '?' and len(prompt) == length + 1
    triggers = [word for word in prompt if word.startswith('trigger')]
    place = {word: prompt.index(word) for word in triggers}
    if name == 'trigger_count':
        assert answer == [f'class{len(triggers)}']
        return
    assert len(triggers) == len(place)  # each once
    if name == 'distance':
        label = abs(place['trigger0'] - place['trigger1']) // 4
    else:
        first = abs(place['trigger0'] - place['trigger1'])
        second = abs(place['trigger2'] - place['trigger3'])
        label = (first + second) // 8
    assert answer == [f'class{label}']


def indexing_oracle(name, length, prompt, answer):
    """The letter that stands `shift` places from a given one: 'abcd,b,+2,d'."""
    source, letter, shift, nothing = ''.join(prompt).split(',')
    assert nothing == ''
    assert len(source) == length == len(set(source)) and source.isalpha()
    assert re.fullmatch(r'[+-]\d{1,2}', shift) and abs(int(shift)) <= 15
    place = source.index(letter) + int(shift)
    assert place >= 0
    assert answer == [source[place]]


def string_answer(name, x):
    """What the string tasks ask for."""
    if name in ('string_copy', 'copy_varied', 'copy_repeated'):
        assert name != 'copy_repeated' or len(set(x)) == 1
        return x
    if name == 'even_pairs':
        return str((x.count('01') + x.count('10') + 1) % 2)
    if name == 'cycle_navigation':
        return str((x.count('1') - x.count('2')) % 5)
    if name == 'modular_arithmetic':
        return str(eval(x) % 5)
    if name == 'missing_duplicate':
        half = len(x) // 2
        answer = x[x.index('x') - half]                    # from either half: -1 is the last
        whole = x.replace('x', answer)
        assert whole[half:] == whole[:half]
        return answer
    if name in ('string_reverse', 'reverse_words'):
        return x[::-1]
    if name == 'odds_first':
        return x[1::2] + x[::2]
    if name == 'bucket_sort':
        assert set(x) <= set('01234')
        return ''.join(sorted(x))
    left = []  # the stack: bits first, then actions
    assert re.fullmatch('[01]+[234]*', x)
    for symbol in x:
        if symbol == '2':
            left = left[:-1]
        else:
            left.append({'0': '0', '1': '1', '3': '0', '4': '1'}[symbol])
    return (''.join(reversed(left)) + '2').ljust(len(x) + 1, '0')


def string_oracle(name, length, prompt, answer):
    """digits=digits."""
    x = ''.join(prompt).removesuffix('=')
    if name in ('string_reverse', 'reverse_words'):
        assert x[0] == '^'
        x = x[1:]
    symbols = {'modular_arithmetic': 2 * length - 1, 'missing_duplicate': 2 * length}
    assert len(x) == symbols.get(name, length)
    assert ''.join(answer) == string_answer(name, x) + '.'


def dyn_str_cpy_oracle(name, length, prompt, answer):
    """string,digit=the string from that digit on."""
    string, digit = ''.join(prompt).removesuffix('=').split(',')
    assert len(string) == length
    assert string.count(digit) == 1
    assert ''.join(answer) == string[string.index(digit):] + '.'


def addition_oracle(name, length, prompt, answer):
    """a+b=, lowest digits first; digits of a, b, carry and sum for each place; the sum."""
    a, b = ''.join(prompt).removesuffix('=').split('+')
    assert max(len(a), len(b)) == length
    numbers = int(a[::-1]), int(b[::-1])
    assert (a, b) == tuple(str(x)[::-1] for x in numbers)  # no zeros in front
    steps, carry = [], 0
    for t in range(length):
        d_a, d_b = (x // 10 ** t % 10 for x in numbers)
        carry, digit = divmod(d_a + d_b + carry, 10)
        steps.append(f'{d_a}{d_b}{carry}{digit}')
    total = str(sum(numbers))[::-1].ljust(length, '0')
    assert ''.join(answer) == ','.join(steps) + '→' + total + '.'


def plain_addition_oracle(name, length, prompt, answer):
    """a+b=c. as everyone writes it."""
    a, b = ''.join(prompt).removesuffix('=').split('+')
    assert max(len(a), len(b)) == length
    assert ''.join(answer) == f'{int(a) + int(b)}.'


@pytest.mark.parametrize('hints', [0, 1])
@pytest.mark.parametrize('pad', [0, 1])
@pytest.mark.parametrize('reversed', [0, 1])
def test_formats_of_addition(reversed, pad, hints):
    """Numbers are right however they are written; hints begin at all letters that can."""
    task = tasks.make(f'addition:reversed={reversed}:pad={pad}:hints={hints}')
    first_letters = set()
    for row in task.sample(600, 9, torch.Generator().manual_seed(0))[0]:
        numbers = re.fullmatch(r'(\w+)\+(\w+)=(\w+)\.', task.decode(row)).groups()
        if not reversed:    # the lowest digit first, and its letter before it
            pairs = [re.findall(r'[a-z]?\d', number) for number in numbers]
            numbers = [''.join(digits[::-1]) for digits in pairs]
        if hints:
            letters = [number[::2] for number in numbers]
            numbers = [number[1::2] for number in numbers]
            first_letters.add(letters[0][0])
            alphabet = 'abcdefghijklmnopqrstuvwyz'
            assert all(of in alphabet and of[0] == letters[0][0] for of in letters)
        if pad:
            assert [len(number) for number in numbers] == [9, 9, 10]
        a, b, total = (int(number[::-1]) for number in numbers)
        assert a + b == total
    assert len(first_letters) == 16 * hints


def multiplication_oracle(name, length, prompt, answer):
    """axb=ax[ and for each digit of b: digit*(digit+1)(lower digit+0)...; as in the paper."""
    a, b = ''.join(prompt).removesuffix('=').split('x')
    assert len(b) == length
    assert (a, b) == (str(int(a)), str(int(b)))  # no zeros in front
    terms = []
    for i, digit in enumerate(b):
        lower = ''.join(f'({d}+0)' for d in b[i + 1:])
        terms.append(f'{digit}*({digit}+1){lower}')
    assert ''.join(answer) == f'{a}x[{"+".join(terms)}].'


def scan_actions(words):
    """What a SCAN command means (Lake & Baroni 2018, Figure 7), by recursion."""
    for word in ('and', 'after'):
        if word in words:
            x = scan_actions(words[:words.index(word)])
            y = scan_actions(words[words.index(word) + 1:])
            return x + y if word == 'and' else y + x
    if words[-1] == 'twice':
        return scan_actions(words[:-1]) * 2
    if words[-1] == 'thrice':
        return scan_actions(words[:-1]) * 3
    verb = [] if words[0] == 'turn' else ['I_' + words[0].upper()]
    turn = ['I_TURN_' + words[-1].upper()]
    if len(words) == 1:
        return verb
    if words[1] == 'opposite':
        return turn * 2 + verb
    if words[1] == 'around':
        return (turn + verb) * 4
    return turn + verb


def scan_oracle(name, length, prompt, answer):
    """A command, a mark, its actions; in the chain of thought other words stand between these."""
    command = [word for word in prompt[:-1] if word != 'BoS']
    actions = [word for word in answer if word.startswith('I_')]
    assert actions == scan_actions(command)
    assert len(actions) == length
    if name != 'scan_cot':
        assert answer == [*actions, 'EoS']


def flip_flop_answers(words):
    """{place: bit} of the bits after r."""
    written, answers = None, {}
    for i in range(0, len(words), 2):
        if words[i] == 'w':
            written = words[i + 1]
        if words[i] == 'r':
            answers[i + 1] = written
    assert words[0] == 'w' and words[-2] == 'r'
    return answers


def recall_answers(words):
    """{place: value} of values whose key and value stood there before."""
    seen, answers = {}, {}
    for i in range(0, len(words), 2):
        if words[i] in seen:
            answers[i + 1] = seen[words[i]]
        if words[i].startswith('key'):
            seen[words[i]] = words[i + 1]
    return answers


@pytest.mark.parametrize('name, answers, length', [
    ('flip_flop', flip_flop_answers, 40), ('flip_flop:ignore=10', flip_flop_answers, 2),
    ('mqar', recall_answers, 8), ('mqar:keys=3', recall_answers, 30),
    ('needle', recall_answers, 4), ('needle:keys=1:words=5', recall_answers, 25)])
def test_recall_against_an_oracle(name, answers, length):
    """What is supervised is what a reader would know, and it is right."""
    task = tasks.make(name)
    for tokens, targets in zip(*task.sample(300, length, torch.Generator().manual_seed(0))):
        words = [task.vocab[i] for i in tokens]
        asked = {t + 1: task.vocab[i] for t, i in enumerate(targets) if i != -100}
        assert asked == answers(words)
        assert len(words) == 2 * length + 2 * (task.name.startswith('needle'))
        if name.startswith('mqar'):
            assert len(asked) == task.keys == len({word for word in words if 'key' in word})


def test_flip_flop_ignores_as_often_as_asked():
    for ignore in (10, 80, 98):
        task = tasks.make(f'flip_flop:ignore={ignore}')
        tokens, _ = task.sample(200, 100, torch.Generator().manual_seed(0))
        share = [(tokens[:, 2:-2:2] == i).double().mean() for i in (1, 2, 3)]
        rest = (1 - ignore / 100) / 2
        close(share, [rest, ignore / 100, rest], 0.02)


@pytest.mark.parametrize('name, size', [('s3', 6), ('s5', 120), ('a5', 60), ('z60', 60)])
def test_group(name, size):
    """A label does what its tokens do, one after the other; z adds; all elements are drawn."""
    task = tasks.make(f'group:name={name}')
    tokens, labels = task.sample(200, 12, torch.Generator().manual_seed(0))
    assert len(task.vocab) == size + 2 == len(tokens.unique()) and (tokens[:, 0] == 1).all()
    for row, label in zip(tokens[:, 1:-1].tolist(), labels[:, 1:-1].tolist()):
        words = [task.vocab[i] for i in row]
        places, total = range(len(words[0])), 0
        for word, i in zip(words, label):
            if name == 'z60':
                total = (total + int(word)) % 60
                assert task.vocab[i] == str(total)
            else:   # what stood at place i goes to place word[i]
                places = [int(word[place]) for place in places]
                assert task.vocab[i] == ''.join(map(str, places))


# task: its oracle, and the lengths to try; for other tasks 5 and 20, without an oracle
TEXT_LENGTHS = (1, 2, 7, 23)
STRINGS = ('string_copy string_reverse odds_first bucket_sort stack copy_repeated copy_varied '
           'reverse_words even_pairs cycle_navigation modular_arithmetic missing_duplicate').split()
ORACLES = {name: (string_oracle, TEXT_LENGTHS) for name in STRINGS}
ORACLES |= {
    'copy': (iterative_oracle, (1, 5, 48)),
    'reverse': (iterative_oracle, (1, 5, 48)),
    'sort': (iterative_oracle, (1, 5, 48, 100)),
    'count': (iterative_oracle, (1, 5, 48, 128)),
    'mode': (iterative_oracle, (1, 2, 7, 48)),
    'parity': (iterative_oracle, (1, 5, 48)),
    'polynomial': (iterative_oracle, (1, 5, 48)),
    'product': (iterative_oracle, (1, 5, 48)),
    'indirect_indexing': (indexing_oracle, (1, 20, 40, 52)),
    'distance': (classification_oracle, (2, 9, 128, 200)),
    'trigger_count': (classification_oracle, (1, 9, 128, 200)),
    'distance_sum': (classification_oracle, (4, 9, 128, 200)),
    'addition': (plain_addition_oracle, TEXT_LENGTHS),
    'dyn_str_cpy': (dyn_str_cpy_oracle, TEXT_LENGTHS),
    'addition_cot': (addition_oracle, TEXT_LENGTHS),
    'multiplication_cot': (multiplication_oracle, TEXT_LENGTHS),
    'scan': (scan_oracle, (1, 22, 48)),
    'scan_simple': (scan_oracle, (2, 5)),
    'scan_cot': (scan_oracle, (2, 24)),
}
CHARACTERS = [name for name in ORACLES if isinstance(tasks.TASKS[name], tasks.Characters)]


def oracle_and_lengths(name):
    return ORACLES.get(name, (None, (5, 20)))


def all_problems():
    """(task, length) of each task and each length to try."""
    for name, task in tasks.TASKS.items():
        _, lengths = oracle_and_lengths(name)
        for length in lengths:
            yield name, min(max(length, task.min_length), task.max_length)


@pytest.mark.parametrize('name, length', list(all_problems()))
def test_every_task(name, length):
    """tokens, targets [n, T]: padding last; targets are next tokens, or -100, one a row or more."""
    task = tasks.TASKS[name]
    tokens, targets = task.sample(300, length, torch.Generator().manual_seed(length))
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape and len(tokens) == 300
    assert len(set(task.vocab)) == len(task.vocab)
    assert tokens.min() >= 0 and tokens.max() < len(task.vocab)
    padding = tokens == tasks.PAD
    assert torch.equal(padding, padding.int().cummax(dim=1).values > 0)
    supervised = targets != -100
    assert supervised.any(dim=1).all() and not supervised[:, -1].any()
    assert task.labels or torch.equal(targets[supervised], tokens.roll(-1, dims=1)[supervised])
    assert not (targets == tasks.PAD).any()
    words = [task.vocab[i] for i in tokens[0].tolist() if i != tasks.PAD]
    assert task.decode(tokens[0]).replace(' ', '') == ''.join(words)


@pytest.mark.parametrize('name, length', [x for x in all_problems() if x[0] in ORACLES])
def test_tasks_against_an_oracle(name, length):
    """The answer is supervised, to the last token, and it is right."""
    task = tasks.TASKS[name]
    n = 400 if name in CHARACTERS else 2000 if length < 60 else 300
    tokens, targets = task.sample(n, length, torch.Generator().manual_seed(length))
    oracle, _ = ORACLES[name]
    for row, target in zip(tokens.tolist(), targets.tolist()):
        words = [task.vocab[i] for i in row if i != 0]
        first = next(t for t, i in enumerate(target) if i != -100)  # the last token of the prompt
        assert -100 not in target[first:len(words) - 1]
        oracle(name, length, words[:first + 1], words[first + 1:])


@pytest.mark.parametrize('name', CHARACTERS)
def test_tasks_in_characters(name):
    """PRISM's vocabulary of 64; rows as wide as the longest problem; which prompts vary in size."""
    task = tasks.TASKS[name]
    assert len(task.vocab) == 64
    tokens, targets = task.sample(400, 7, torch.Generator().manual_seed(7))
    assert (tokens[:, -1] != 0).any() or name.startswith('addition')  # a column for the last carry
    sizes = (targets != -100).int().argmax(dim=1).unique()  # of the prompts
    assert (len(sizes) > 1) == (name in ('addition', 'addition_cot', 'multiplication_cot'))


def first_action(text):
    """Where the actions of a stack problem begin; 0 where there are none."""
    return min([text.index(c) for c in '234' if c in text.split('=')[0]], default=0)


@pytest.mark.parametrize('name, size, values', [
    ('dyn_str_cpy', lambda text: text[:10].index(text[11]), 10),
    ('addition_cot', lambda text: min(map(len, text.split('=')[0].split('+'))), 10),
    ('multiplication_cot', lambda text: text.index('x'), 10),
    ('stack', first_action, 9)], ids=['dyn_str_cpy', 'addition_cot', 'multiplication_cot', 'stack'])
def test_places_and_sizes_are_uniform(name, size, values):
    task = tasks.TASKS[name]
    rows, _ = task.sample(6000, 10, torch.Generator().manual_seed(0))
    counts = collections.Counter(size(task.decode(row)) for row in rows)
    assert len(counts) == values
    assert all(abs(n / 6000 - 1 / values) < 0.03 for n in counts.values())


@pytest.mark.parametrize('name, length, expected', [
    ('distance', 128, [3 / 127] + [4 / 127] * 31),
    ('trigger_count', 128, [1 / 32] * 32),
    ('indirect_indexing', 30, [1 / 52] * 52),
    ('mode', 9, [1 / 10] * 10),
    ('count', 9, [1 / 120] * 120),
    ('product', 9, [1 / 4] * 4),
    ('parity', 9, [1 / 2] * 2)], ids=lambda x: '' if isinstance(x, list) else None)
def test_task_distributions(name, length, expected):
    """The share of each last state, or class, within six standard deviations."""
    tokens, targets = tasks.TASKS[name].sample(20000, length, torch.Generator().manual_seed(0))
    answers = (targets != -100) & (targets != tasks.EOS)
    last = (torch.arange(targets.shape[1]) * answers).argmax(dim=1, keepdim=True)
    share = targets.gather(1, last).unique(return_counts=True)[1] / 20000
    assert len(share) == len(expected)
    assert (share - torch.tensor(expected)).abs().max() < 6 * math.sqrt(max(expected) / 20000)


def test_distances_and_shifts_are_drawn_from_their_whole_range():
    task = tasks.TASKS['distance']
    tokens, _ = task.sample(20000, 128, torch.Generator().manual_seed(0))
    i = (tokens == task.vocab.index('trigger0')).int().argmax(dim=1)
    j = (tokens == task.vocab.index('trigger1')).int().argmax(dim=1)
    assert set((i - j).abs().tolist()) == set(range(1, 128))
    assert 0.48 < (i < j).float().mean() < 0.52  # both orders
    task = tasks.TASKS['indirect_indexing']
    rows, _ = task.sample(3000, 30, torch.Generator().manual_seed(0))
    shifts = {int(task.decode(row).split(', ')[2]) for row in rows}
    assert shifts == set(range(-15, 16))


@pytest.mark.parametrize('name', tasks.TASKS)
def test_tasks_are_seeded(name):
    def draw(seed):
        _, lengths = oracle_and_lengths(name)
        return tasks.TASKS[name].sample(50, lengths[1], torch.Generator().manual_seed(seed))[0]

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_tasks_show_an_example():
    """Each docstring has a doctest; a reader of files says what `length` counts."""
    assert doctest.testmod(tasks).failed == 0
    for task in tasks.TASKS.values():
        assert '>>> ' in type(task).__doc__, task
    for task in data.READERS.values():
        assert '`length`' in type(task).__doc__, task


def test_polynomial_of_any_modulus():
    task = tasks.make('polynomial:p=7')
    tokens, _ = task.sample(500, 9, torch.Generator().manual_seed(0))
    assert task.p == 7
    assert len(task.vocab) == 11
    assert tokens.max() == 10
    numbers = [int(word) for word in task.decode(tokens[0]).split() if word.isdigit()]
    x, states = numbers[:9], numbers[9:]
    assert states == list(itertools.accumulate(x, lambda s, x_t: (s * x_t + 1) % 7))


def test_product_with_a_coefficient_for_each_place():
    task = tasks.make('product:own=1')
    beta = task.beta.tolist()
    assert set(beta) == {1, 2, 3, 4}
    for row in task.sample(20, 9, torch.Generator().manual_seed(0))[0]:
        numbers = [int(word) for word in task.decode(row).split() if word.isdigit()]
        x, states = numbers[:9], numbers[9:]
        assert states == [math.prod(beta[:t] + x[:t]) % 5 for t in range(1, 10)]


@pytest.mark.parametrize('name', ['parity', 'polynomial', 'product'])
def test_without_steps_only_the_last_state_is_asked(name):
    """The same problems; the answer is their last state, and EoS."""
    rows = []
    for option in ('', ':steps=0'):
        task = tasks.make(name + option)
        rows.append([task.decode(row).split() for row in
                     task.sample(20, 9, torch.Generator().manual_seed(0))[0]])
    for whole, short in zip(*rows):
        assert short == whole[:11] + whole[-2:]
        assert len(whole) == 11 + 9 + 1


def test_indirect_indexing_of_fewer_letters():
    task = tasks.make('indirect_indexing:letters=12:shift=2')
    rows, _ = task.sample(500, 6, torch.Generator().manual_seed(0))
    texts = [task.decode(row).split(', ') for row in rows]
    assert {shift for _, _, shift, _ in texts} == {'+0', '+1', '+2', '-1', '-2'}
    assert set(''.join(source for source, *_ in texts)) == set('ABCDEFGHIJKL')
    for source, letter, shift, answer in texts:
        assert answer == source[source.index(letter) + int(shift)]


def test_distances_below_a_span():
    """span=16: distances 1 to 15 in 40 tokens, and classes two apart."""
    task = tasks.make('distance:span=16')
    tokens, _ = task.sample(500, 40, torch.Generator().manual_seed(0))
    triggers = [task.vocab.index(word) for word in ('trigger0', 'trigger1')]
    places = torch.isin(tokens, torch.tensor(triggers))
    i, j = places.nonzero()[:, 1].view(500, 2).T
    assert set((j - i).tolist()) == set(range(1, 16))
    assert torch.equal(tokens[:, 41] - task.vocab.index('class0'), 2 * (j - i))


def test_trigger_counts_up_to_most():
    """most=16: counts of 0 to 16 in 40 tokens."""
    task = tasks.make('trigger_count:most=16')
    tokens, _ = task.sample(500, 40, torch.Generator().manual_seed(0))
    triggers = [i for i, word in enumerate(task.vocab) if word.startswith('trigger')]
    count = torch.isin(tokens, torch.tensor(triggers)).sum(dim=1)
    assert set(count.tolist()) == set(range(17))
    assert torch.equal(tokens[:, 41] - task.vocab.index('class0'), count)


@pytest.mark.parametrize('name, length, says', [
    ('pairty', 5, 'unknown.*parity'),
    ('polynomial:q=7', 5, 'options'),
    ('polynomial:p=', 5, 'options'),
    ('copy', 0, 'from 1'),
    ('count', 200, '128'),
    ('sort', 101, '100'),
    ('distance', 1, 'from 2'),
    ('distance:span=1', 5, 'at least 2'),
    ('distance_sum', 3, 'from 4'),
    ('trigger_count:most=32', 5, 'from 1 to 31'),
    ('indirect_indexing', 53, '52'),
    ('indirect_indexing:letters=53', 5, '1 to 52'),
    ('indirect_indexing:letters=12:shift=2', 13, '12'),
    ('flip_flop:ignore=101', 5, 'percentage'),
    ('group:name=q3', 5, 'group:name is s2 to s5'),
    ('group:name=s²', 5, 'group:name is s2 to s5'),
    ('addition:pad=2', 5, '0 or 1'),
    ('polynomial:p=x', 5, 'p must be a whole number, not x'),
    ('parity:steps=2', 5, 'steps must be 0 or 1, not 2'),
    ('parity:steps=-1', 5, 'steps must be 0 or 1, not -1'),
    ('mqar:keys=65', 5, 'keys must be 1 to 64'),
    ('mqar', 7, 'from 8'),
    ('needle', 3, 'from 4')])
def test_task_errors(name, length, says):
    with pytest.raises(ValueError, match=says):
        tasks.make(name).sample(2, length)


# ------------------------------------------------------------------------------------------------
# SCAN

def scan_splits(split):
    """The published split: (command, actions) for training and for the test."""
    return tasks.scan_pairs(split, 'train'), tasks.scan_pairs(split, 'test')


def test_scan_is_the_published_data_set():
    """Its size, some lines, and the number of characters in the published tasks.txt."""
    train, test = scan_splits('length')
    pairs = train + test
    actions_of = dict(pairs)
    assert len(actions_of) == len(pairs) == 20910
    assert sum(len(f'IN: {command} OUT: {actions}\n') for command, actions in pairs) == 4080388
    for command, actions in pairs:
        assert actions.split() == scan_actions(command.split())
    jump = 'I_TURN_LEFT I_TURN_LEFT I_JUMP'
    assert actions_of['jump opposite left twice after jump opposite left'] == ' '.join([jump] * 3)
    run = 'I_TURN_RIGHT ' * 6 + 'I_RUN'
    assert actions_of['run opposite right after turn opposite right twice'] == run
    assert actions_of['walk around right after walk'] == 'I_WALK' + ' I_TURN_RIGHT I_WALK' * 4


def test_scan_splits_are_the_published_ones():
    """Length: up to 22 actions for training, more for the test. Simple: 80 % and 20 % at random."""
    train, test = scan_splits('length')
    assert (len(train), len(test)) == (16990, 3920)
    lengths = [{len(actions.split()) for _, actions in part} for part in (train, test)]
    assert lengths[0] == set(range(1, 23))
    assert lengths[1] == {24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48}
    simple = scan_splits('simple')
    assert [len(part) for part in simple] == [16728, 4182]
    assert {*simple[0], *simple[1]} == {*train, *test}
    with pytest.raises(ValueError, match='length and simple'):
        tasks.scan_pairs('mcd', 'train')


def test_scan_cot_spells_out_every_clause():
    """command = the same with twice and thrice written out → clause : actions, as executed."""
    task = tasks.make('scan_cot')
    train, test = scan_splits('length')
    for command, actions in random.Random(0).sample(train + test, 2000):
        left, right = task.text(command, actions).split(' = ')
        written, steps = right.removesuffix(' .').split(' → ')
        assert left == command
        assert 'twice' not in right and 'thrice' not in right
        said = re.findall(r'((?:walk|look|run|jump|turn)[a-z ]*) : ((?:I_\w+ ?)+)', steps)
        for clause, part in said:
            assert scan_actions(clause.split()) == part.split()
        assert ' '.join(part.strip() for _, part in said) == actions
        halves = re.split(' (?:and|after) ', written)
        if ' after ' in written:
            halves.reverse()
        clauses = [clause for half in halves for clause in half.split(' + ')]
        assert clauses == [clause for clause, _ in said]


def test_scan_cot_is_the_example_of_table_4():
    """PRISM Table 4, with four pairs of actions in every clause."""
    command = 'walk around left thrice and look opposite right'
    walk = 'walk around left'
    walked = f'{walk} : ' + 'I_TURN_LEFT I_WALK ' * 4
    assert tasks.make('scan_cot').text(command, '') == (
        f'{command} = {walk} + {walk} + {walk} and look opposite right → '
        + walked * 3 + 'look opposite right : I_TURN_RIGHT I_TURN_RIGHT I_LOOK .')


# ------------------------------------------------------------------------------------------------
# kernels.py: in Triton's interpreter without a GPU, compiled with one

CUDA = torch.cuda.is_available()
DEVICE = 'cuda' if CUDA else 'cpu'
needs_triton = pytest.mark.skipif(kernels.triton is None, reason='needs Triton')
kernel_test = gpu if CUDA else needs_triton


def kernel_and_reference(name):
    return getattr(kernels, f'{name}_attention'), getattr(kernels, f'{name}_attention_reference')


def own_argument(name, H, T, D):
    """The argument of NAME_attention after q, k, v."""
    return bench.kernel_inputs(f'{name}_attention', 1, H, T, D, torch.float32, DEVICE)[3]


def strided_qkv(B, H, T, D, dtype, layout, g):
    """q, k, v [B, H, T, D]: slices of a projection, contiguous, or with a last axis that is not."""
    if layout == 'projected':
        parts = torch.randn(B, T, 3 * H * D, generator=g).to(DEVICE, dtype).chunk(3, dim=-1)
        return [x.view(B, T, H, D).transpose(1, 2).requires_grad_() for x in parts]
    xs = torch.randn(3, B, H, T, D, generator=g).to(DEVICE, dtype)
    if layout == 'other':
        xs = xs.transpose(3, 4).contiguous().transpose(3, 4)
    return [x.requires_grad_() for x in xs.unbind()]


@kernel_test
@pytest.mark.usefixtures('nan_memory')
@pytest.mark.parametrize('name', ['pope', 'vipe', 'bias'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('seed', range(16 if CUDA else 6))
def test_kernels_against_their_references(name, dtype, seed):
    """Random shapes and strides, every output and gradient."""
    rng, g = random.Random(seed), torch.manual_seed(seed)
    B, H = rng.randint(1, 2), rng.randint(1, 3)
    T = rng.choice([1, 2, 17, 64, 65, 100, 131])
    D = rng.choice([16, 20, 32, 64, 80, 128])
    q, k, v = strided_qkv(B, H, T, D, dtype, rng.choice(['projected', 'contiguous', 'other']), g)
    inputs = [q, k, v, own_argument(name, H, T, D)]
    worst = bench.largest_error(*kernel_and_reference(name), inputs)
    assert worst < bench.largest_allowed(f'{name}_attention', inputs)


@kernel_test
@pytest.mark.parametrize('on, G', [
    ('', 2), ('polar', 2), ('pope', 2), ('vipe', 2), ('bias', 2), ('pope vipe', 2),
    ('pope bias', 2), ('vipe bias', 2), ('pope vipe bias', 1), ('pope vipe bias', 2)])
def test_kernels_with_every_switch(on, G):
    """attention() with any of its parts, each for G groups of the batch; outputs and gradients."""
    g = torch.Generator().manual_seed(1)
    B, H, T, D = 2, 2, 70, 24
    shapes = {}
    if 'pope' in on:
        shapes |= dict(delta=(G, H, D))
    if 'vipe' in on:
        shapes |= dict(row=(G, H, T), col=(B, H, T))
    if 'bias' in on:
        shapes |= dict(bias=(G, H, T))
    tensors = strided_qkv(B, H, T, D, torch.float32, 'contiguous', g)
    for shape in shapes.values():
        tensors.append((torch.rand(shape, generator=g) * 2).to(DEVICE).requires_grad_())
    base = 100.0 if on[:2] == 'po' else 0.0

    def by_kernel(q, k, v, *rest):
        return kernels.attention(q, k, v, base=base, distance=True, **dict(zip(shapes, rest)))

    def by_reference(q, k, v, *rest):
        return kernels.attention_reference(q, k, v, base=base, **dict(zip(shapes, rest)))

    assert bench.largest_error(by_kernel, by_reference, tensors) < 1e-5


@pytest.fixture
def nan_memory():
    """New tensors hold NaN, so that an element that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@kernel_test
@pytest.mark.parametrize('name', ['pope', 'vipe', 'bias'])
def test_kernels_repeat_themselves(name):
    """Bit for bit, but for the bias's gradient, which blocks add to in any order."""
    def once():
        g = torch.manual_seed(0)
        q, k, v = strided_qkv(1, 2, 70, 32, torch.float32, 'contiguous', g)
        own = own_argument(name, 2, 70, 32)
        found = bench.outputs_and_gradients(kernel_and_reference(name)[0], [q, k, v, own])
        return found[:-1] if name == 'bias' else found

    assert all(torch.equal(a, b) for a, b in zip(once(), once()))


def attention_arguments():
    """Small q, k, v, delta, row, col, bias of kernels.attention."""
    g = torch.Generator().manual_seed(0)
    q, k, v = strided_qkv(2, 2, 20, 16, torch.float32, 'projected', g)
    shapes = ((1, 2, 16), (1, 2, 20), (2, 2, 20), (1, 2, 20))
    parts = (torch.rand(shape, generator=g).to(DEVICE).requires_grad_() for shape in shapes)
    return q, k, v, *parts


@kernel_test
def test_attention_as_an_operator():
    """Schema, fake tensors and gradients, as torch.compile needs them; no second gradient."""
    q, k, v, delta, _, _, bias = attention_arguments()
    checks = ('test_schema', 'test_autograd_registration', 'test_faketensor')
    for args in ((q, k, v, bias, 0.25, True), (q, k, v, None, 0.25, False)):
        torch.library.opcheck(kernels.attention_forward, args, test_utils=checks)
    for phases in (delta, None):
        torch.library.opcheck(kernels.polar, (q, phases, 100.0, True), test_utils=checks)
    y = kernels.bias_attention(q, k, v, bias[0])
    grad, = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='second-order'):
        grad.sum().backward()


@kernel_test
def test_attention_says_what_does_not_fit():
    q, k, v, delta, row, _, bias = attention_arguments()
    for args, kw, says in (
            ((q.double(), k, v), {}, 'float32, bfloat16 or float16'),
            ((q[:, :1], k, v), {}, 'must all be'),
            ((q, k, v), dict(delta=delta), 'delta and softplus go with base'),
            ((q, k, v), dict(delta=delta[:, :1], base=9.0), r'delta must be \[1, 2, 16\]'),
            ((q, k, v), dict(row=row), 'row with col'),
            ((q, k, v), dict(bias=bias[..., :9]), r'bias must be \[1, 2, 20\]'),
            ((q, k, v), dict(bias=bias.expand(3, 2, 20)), '3 groups do not divide')):
        with pytest.raises(ValueError, match=says):
            kernels.attention(*args, **kw)


def test_blocks_divide():
    for table in (kernels.BLOCKS, bench.CANDIDATES):
        for name, rows in table.items():
            for M, N, *_ in rows:
                assert (N % M if name == 'keys_kernel' else M % N) == 0


@needs_triton
def test_positions_are_a_multiple_of_16_numbers_apart():
    """Of what the kernels write, and of what they read: others are copied."""
    x = torch.randn(1, 3, 65, 20)
    assert kernels.new_rows(x, 40).stride() == (65 * 128, 40, 128, 1)
    rows = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert rows.stride(2) == 60 and kernels.readable(rows).stride(2) == 64
    assert torch.equal(kernels.readable(rows), x)


@kernel_test
@pytest.mark.parametrize('encoding', ['plain', 'pope', 'vipe', 'bias'])
def test_launches_for_timing(encoding):
    """What `python kernels.py --blocks` times are the kernels: each writes all its outputs."""
    for launch in bench.launches(encoding, 16, 20, 1, 2, DEVICE).values():
        outputs = [x for x in launch.args[2] if x is not None]
        for x in outputs:
            x.zero_()
        launch()
        assert all(x.any() for x in outputs)


@kernel_test
def test_bias_without_parameters_has_no_gradient(monkeypatch):
    """ALiBi's has none: the kernel for keys then leaves out the sums over diagonals."""
    q, k, v, _, _, _, bias = attention_arguments()
    wanted = []

    def launch(kernel, inputs, outputs, *args):
        if kernel is kernels.keys_kernel:
            wanted.append(outputs[2] is not None)
        return plain(kernel, inputs, outputs, *args)

    plain = kernels.launch
    monkeypatch.setattr(kernels, 'launch', launch)
    for x in (bias, bias.detach()):
        kernels.attention(q, k, v, bias=x)[0].sum().backward()
    assert wanted == [True, False]


def test_auto_takes_the_reference_where_shared_memory_is_small(monkeypatch):
    """And says so once."""
    class Half:
        is_cuda, shape, dtype, device = True, (1, 1, 512, 64), torch.bfloat16, 'a small GPU'

    auto = pe.PEConfig(d_model=64, n_head=1)
    monkeypatch.setattr(kernels, 'triton', object())
    monkeypatch.setattr(kernels, 'shared_memory', lambda device: 64 * 1024)
    kernels.fits.cache_clear()
    with pytest.warns(UserWarning, match='need 101376 bytes') as said:
        assert not pe.kernels_serve(auto, Half) and not pe.kernels_serve(auto, Half)
    assert len(said) == 1
    monkeypatch.setattr(kernels, 'shared_memory', lambda device: 99 * 1024)
    kernels.fits.cache_clear()
    assert pe.kernels_serve(auto, Half)


@kernel_test
def test_bias_kernel_with_a_window():
    """A bias of -inf beyond a distance may hide whole blocks of keys from a row."""
    g = torch.Generator().manual_seed(0)
    inputs = strided_qkv(1, 2, 150, 16, torch.float32, 'projected', g)
    window = torch.where(torch.arange(150, device=DEVICE) < 8, 0.0, -math.inf).expand(2, 150)

    def by_kernel(q, k, v):
        return kernels.bias_attention(q, k, v, window)

    def by_reference(q, k, v):
        return kernels.bias_attention_reference(q, k, v, window.double())

    assert bench.largest_error(by_kernel, by_reference, inputs) < 1e-5


@kernel_test
@pytest.mark.parametrize('name', ['pope', 'vipe', 'pope+vipe', 't5'])
def test_kernels_under_autocast(name):
    """q, k and v in half precision; factors, bias and the expected distance stay in float32."""
    tokens = torch.randint(1, 11, (1, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = make(torch.float32, pe=name, kernel='reference').to(DEVICE)(tokens)[0]
    with torch.autocast(DEVICE, torch.bfloat16):
        half = make(torch.float32, pe=name, kernel='triton').to(DEVICE)(tokens)[0]
    assert (half - exact).abs().max() < 0.1 * exact.abs().max()


@kernel_test
@pytest.mark.parametrize('name', ['pope+vipe', 'rope+alibi'])
def test_sums_compile_in_one_graph(name):
    model = make(torch.float32, pe=name, kernel='reference').to(DEVICE)
    tokens = torch.randint(1, 11, (1, 9)).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, backend='aot_eager')
    close(compiled(tokens)[0].detach(), model(tokens)[0].detach(), 1e-4)


def gains(kw):
    """Whether a kernel computes this encoding's attention faster."""
    try:
        enc = pe.build(pe.PEConfig(**(dict(d_model=32, n_head=4) | kw)))
    except Exception:  # a class that is not done yet: other tests fail
        return False
    return enc.fusable and enc.gains


GAINS = {name: kw for name, kw in VARIANTS.items() if gains(kw)}
# whose cursors have a kernel of their own
GAINS['prism copy'] = dict(VARIANTS['prism copy'], n_head=2, prism_cursors=1)


@kernel_test
@pytest.mark.parametrize('kw', GAINS.values(), ids=GAINS)
def test_encodings_by_kernels(kw):
    """kernel=triton has the loss and the gradients of kernel=reference: alone, and under vmap."""
    T = 6 if kw['pe'] == 'prism' else 17  # the interpreter is slow at the scan's steps
    tokens = torch.randint(1, 11, (1, T + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def losses_and_gradients(kernel):
        """Of two seeds."""
        cfg = dict(n_layer=1, kernel=kernel, **kw)
        models = [make(torch.float32, seed, **cfg).to(DEVICE) for seed in (0, 1)]
        params, buffers = torch.func.stack_module_state(models)

        def loss_of(params, buffers):
            state = params, buffers
            return torch.func.functional_call(
                models[0], state, (inputs, targets), dict(total_len=30), tie_weights=False)[1]

        alone = torch.stack([model(inputs, targets, total_len=30)[1] for model in models])
        alone.sum().backward()
        together = torch.func.vmap(loss_of)(params, buffers)
        together.sum().backward()
        grads = [p.grad for p in params.values()]
        for name in params:
            grads.append(torch.stack([model.get_parameter(name).grad for model in models]))
        return [alone.detach(), together.detach()], grads

    losses, grads = losses_and_gradients('triton')
    expected_losses, expected_grads = losses_and_gradients('reference')
    for a, b in zip(losses, expected_losses):
        assert (a - b).abs().max() < 1e-4
    for a, b in zip(grads, expected_grads):
        assert (a - b).norm() <= 2e-4 * b.norm() + 1e-6


def random_scan(B, C, T, P, d_pe):
    """Inputs of cursor_scan, all of which want gradients; copies are of tokens up to this one."""
    return bench.kernel_inputs('cursor_scan', B, C, T, d_pe, torch.float32, DEVICE, P)


def scan_error(shape, sharpen, copy, seed=0, scan=kernels.cursor_scan):
    """Largest error of a scan, of its output and the gradients of gates, gamma, table and jumps."""
    torch.manual_seed(sum(shape) + seed)
    reset, step, gamma, table, jumps = random_scan(*shape)
    inputs = [reset, step, table, *[gamma] * sharpen, *[jumps] * copy]

    def called(function):
        def call(reset, step, table, *rest):
            gamma = rest[0] if sharpen else None
            jumps = rest[-1] if copy else None
            return function(reset, step, gamma, table, jumps)
        return call

    return bench.largest_error(called(scan), called(pe.cursor_scan), inputs)


@kernel_test
@pytest.mark.usefixtures('nan_memory')
@pytest.mark.parametrize('shape', [
    (2, 2, 12, 12, 8), (1, 1, 50, 50, 3), (3, 1, 1, 1, 4), (1, 2, 16, 100, 34)])  # B, C, T, P, d_pe
@pytest.mark.parametrize('sharpen, copy', [(True, False), (True, True), (False, True)])
def test_cursor_scan_by_the_kernel(shape, sharpen, copy):
    assert scan_error(shape, sharpen, copy) < 1e-4


@kernel_test
def test_cursor_scan_widens_its_window_twice():
    """120 tokens: 128 bins for the first 48, then 256, then 512."""
    assert scan_error((1, 1, 120, 512, 5), sharpen=True, copy=True) < 1e-4


@gpu
@pytest.mark.parametrize('copy', [False, True])
def test_gpu_cursor_scan_at_length(copy):
    """1e-4, or where ties amplify rounding, ten times the error of the reference in float32."""
    shape = (2, 3, 2048, 2048, 84)
    own = scan_error(shape, True, copy, scan=pe.cursor_scan)
    assert scan_error(shape, True, copy) < max(1e-4, 10 * own)


@kernel_test
@pytest.mark.parametrize('exponent', [1.0001, 1e4])
def test_cursor_scan_with_extreme_exponents(exponent):
    torch.manual_seed(0)
    reset, step, _, table, jumps = (x.detach() for x in random_scan(2, 2, 9, 12, 4))
    gamma = torch.full((2,), exponent, device=DEVICE)
    expected = pe.cursor_scan(reset, step, gamma, table, jumps)
    close(kernels.cursor_scan(reset, step, gamma, table, jumps), expected, 1e-5)


@kernel_test
def test_kernels_refuse_other_positions():
    """Fractions take the reference; whole numbers that do not count up by 1 give NaN."""
    q, k, v, pos = (x.to(DEVICE) for x in qkv())
    q, k, v = q.float(), k.float(), v.float()
    enc = encoding('alibi', kernel='triton').float().to(DEVICE)
    plain = encoding('alibi', kernel='reference').float().to(DEVICE)
    assert enc.attend(q, k, v, 3 * pos).isnan().any()
    close(enc.attend(q, k, v, pos + 7), plain.attend(q, k, v, pos), 1e-4)
    close(enc.attend(q, k, v, pos * 0.5), plain.attend(q, k, v, pos * 0.5), 1e-4)


@kernel_test
def test_cursor_scan_as_an_operator():
    """Schema and fake tensors, as torch.compile needs them, of both directions."""
    torch.manual_seed(0)
    reset, step, gamma, table, jumps = (x.detach() for x in random_scan(2, 2, 9, 12, 4))
    inputs = (reset, step, gamma.expand(2, -1), table, jumps)
    _, checkpoints = prism_scan.scan_forward(*inputs)
    dout = torch.randn(2, 2, 9, 4, device=DEVICE)
    checks = ('test_schema', 'test_faketensor')
    torch.library.opcheck(prism_scan.scan_forward, inputs, test_utils=checks)
    backward = (dout, *inputs, checkpoints, True)
    torch.library.opcheck(prism_scan.scan_backward, backward, test_utils=checks)


@kernel_test
@pytest.mark.parametrize('scan', [kernels.cursor_scan, pe.cursor_scan])
def test_cursor_scan_says_what_does_not_fit(scan):
    torch.manual_seed(0)
    reset, step, gamma, table, jumps = random_scan(2, 2, 9, 12, 4)
    for wrong, says in (
            ((reset, step[..., :2], gamma, table), r'step must be \[2, 2, 9, 3\]'),
            ((reset, step, gamma[:1], table), r'gamma must be \[(1, )?2\]'),
            ((reset, step, gamma, table, jumps[..., :9]), r'copy must be \[2, 2, 9, 10\]'),
            ((reset, step, gamma, table[:24]), r'\[2P\+1, d_pe\]'),
            ((reset, step, gamma, table[:17]), 'must hold offsets -9..9')):
        with pytest.raises(ValueError, match=says):
            scan(*wrong)


COMPILE = """
import functools, json, sys
import torch
import kernels
from engine import bench

def everything():
    q, k, v, delta = bench.kernel_inputs('pope_attention', 1, 1, 4096, 64, torch.bfloat16, 'cpu')
    row, col, bias = (torch.zeros(1, 1, 4096, requires_grad=True) for _ in range(3))
    y, e = kernels.attention(q, k, v, delta[None], 9.0, row, col, bias, distance=True)
    (y.sum() + e.sum()).backward()

for call in sys.argv[2:]:
    name, D, dtype = call.split('/')
    name = 'cursor_scan' if name == 'scan' else f'{name}_attention'
    T = 40 if name == 'cursor_scan' else 4096
    run = functools.partial(bench.forward_and_backward, name, int(D), dtype, T)
    run = everything if 'everything' in name else run
    for row in bench.compile_kernels(int(sys.argv[1]), [run]):
        print(json.dumps(dict(row, dtype=dtype, **{'in': call})))
"""


def test_without_triton_everything_but_the_kernels_works():
    code = ("import sys; sys.modules['triton'] = None; import torch, kernels, pe; "
            "x = torch.randn(1, 1, 4, 4); kernels.attention_reference(x, x, x); "
            "pe.build(pe.PEConfig(pe='pope')); kernels.attention(x, x, x)")
    run = python('-c', code)
    assert 'RuntimeError: the kernels need Triton' in run.stderr


@needs_triton
@pytest.mark.parametrize('arch, calls', [
    (90, ['pope/64/bfloat16', 'pope/128/float16', 'bias/64/bfloat16', 'scan/64/float32']),
    (89, ['pope/128/bfloat16', 'bias/64/bfloat16', 'bias/128/float32']),
    (80, ['pope/128/bfloat16', 'everything/64/bfloat16'])])
def test_kernels_compile(arch, calls):
    """Without a GPU, by Triton's compiler alone: shared memory fits, and registers suffice.

    On sm_90 products in half precision are asynchronous (wgmma, no mma.sync); those in float32 are
    exact (neither); the scan's logarithm is one instruction. The spills are those that are known
    of Triton 3.8; 3.6, with an older ptxas, has one more.
    """
    run = python('-c', COMPILE, str(arch), *calls, env=os.environ | dict(TRITON_INTERPRET='0'))
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    spills = {90: {('pope/128/float16', 'queries'): 92, ('pope/128/float16', 'keys'): 108,
                   ('bias/64/bfloat16', 'keys'): 252},
              89: {('pope/128/bfloat16', 'queries'): 8, ('bias/64/bfloat16', 'keys'): 116,
                   ('bias/128/float32', 'keys'): 16},
              80: {('pope/128/bfloat16', 'queries'): 4, ('everything/64/bfloat16', 'keys'): 76,
                   ('everything/64/bfloat16', 'queries'): 16,
                   ('everything/64/bfloat16', 'polar_backward'): 4}}
    if kernels.triton.__version__.startswith('3.6.'):
        spills[90] |= {('pope/64/bfloat16', 'polar_backward'): 4}
    for row in rows:
        attention = row['kernel'] in ('forward', 'queries', 'keys')
        assert row['shared'] <= bench.SHARED[arch], row
        if attention or 'polar' in row['kernel']:
            assert row['spilled'] <= 2 * spills[arch].get((row['in'], row['kernel']), 0), row
        else:
            assert row['fast_logarithms'], row
        if attention and row['dtype'] == 'float32':
            assert row['mma'] == row['wgmma'] == 0, row
        elif attention:
            assert (row['mma'] == 0, row['wgmma'] > 0) == (arch == 90, arch == 90), row
    found = {row['kernel'] for row in rows}
    assert {'forward', 'queries', 'keys', 'polar', 'polar_backward'} <= found
    assert arch != 90 or {'scan', 'scan_backward'} <= found


def exact_row(name, q, k, v, own, row):
    """(y, expected distance) [H, D], [H] of one query in float64; ViPE's enlarged queries and keys
    are rounded as the kernels take them."""
    T, D = q.shape[2:]
    dtype = q.dtype
    s = torch.arange(row + 1, device=DEVICE)
    q, own = q[0, :, row].double(), own.double()
    k, v = (x[0, :, :row + 1].double() for x in (k, v))
    if name == 'pope':
        theta = 1e4 ** (-torch.arange(D, device=DEVICE, dtype=torch.float64) / D)
        phase = (s - row)[:, None] * theta + own[:, None]  # (H, row + 1, D)
        x = torch.einsum('hd,hsd->hs', F.softplus(q), F.softplus(k) * phase.cos()) / D ** 0.5
    else:
        if name == 'vipe':
            q = (q * math.log(row + 1)).to(dtype).double()
            k = (k * (1 + torch.einsum('hd,hsd->hs', own, k))[..., None]).to(dtype).double()
        x = torch.einsum('hd,hsd->hs', q, k) / D ** 0.5
    if name == 'bias':
        x = x + own[:, row - s]
    p = x.softmax(dim=-1)
    return torch.einsum('hs,hsd->hd', p, v), (p * (row - s)).sum(dim=-1)


@gpu
@pytest.mark.parametrize('name', ['pope', 'vipe', 'bias'])
def test_gpu_kernels_at_32768_tokens(name):
    """Finite, and right on sampled rows."""
    H, T, D = 2, 32768, 64
    g = torch.manual_seed(0)
    q, k, v = strided_qkv(1, H, T, D, torch.bfloat16, 'projected', g)
    own = own_argument(name, H, T, D)
    function, _ = kernel_and_reference(name)
    out = function(q, k, v, own)
    y, e = out if name == 'vipe' else (out, None)
    loss = y.float().square().sum() + (0 if e is None else e.sum())
    assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(loss, (q, k, v, own))))
    for row in (0, 1, 4095, 20000, T - 1):
        expected, distance = exact_row(name, q, k, v, own, row)
        assert (y[0, :, row].double() - expected).norm() < 0.02 * expected.norm()
        if e is not None and row:
            assert ((e[0, :, row] - distance).abs() / (row + 1)).max() < 0.01


# ------------------------------------------------------------------------------------------------
# the programs

def test_every_program_has_help():
    programs = sorted(f for f in os.listdir(HERE) if f.endswith('.py'))
    for program, run in zip(programs, pythons(*([program, '--help'] for program in programs))):
        assert run.returncode == 0, (program, run.stderr)
        assert run.stdout, program
        assert 'Traceback' not in run.stderr, program


def test_every_file_runs():
    """pe.py prints the zoo, tasks.py all tasks or examples of one, model.py shapes."""
    zoo, known, examples, shapes = (run.stdout for run in pythons(
        ['pe.py'], ['tasks.py'], ['tasks.py', 'parity', '3'],
        ['model.py', 'configs/parity_rope.py', '--d_model=128']))
    for name in pe.ENCODINGS:
        assert re.search(rf'^{name}\b', zoo, re.MULTILINE), name
    assert 'delta [4, 16]' in zoo
    for name in (*tasks.TASKS, *data.READERS):
        assert re.search(rf'^{name}\b', known, re.MULTILINE), name
    assert 'predicted: ' in examples
    assert re.search(r'embedding.weight +\[\d+, 128\]', shapes)
    assert 'total' in shapes


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
