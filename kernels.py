"""Fused causal attention for PoPE, ViPE and Toeplitz biases, and PRISM's scan, in Triton.

    python kernels.py      check the kernels against float64; with a GPU, time them as well
    TRITON_INTERPRET=0 python kernels.py --arch=90      without one: what a compiler makes of them

Queries t and keys s <= t count from 0. Every encoding here is one attention,

    x_ts = <q_t, k_s> / sqrt(D) + bias_(t-s)        p_t = softmax(x_t)
    y_t  = sum_s p_ts v_s                           e_t = sum_s p_ts (t - s)

with a bias (ALiBi, T5), on rows turned to polar coordinates first (PoPE, a kernel of its own), or
on rows times a factor (ViPE, in plain PyTorch). attention_reference is the same in a few lines.

One forward and two backward kernels go over blocks of M queries and N keys, as FlashAttention
does (Dao et al. 2022): a running maximum and sum make the softmax, so memory grows with T, not
with T^2. Sums are in float32. The backward kernels compute the blocks again from the stored
log-sum-exp, one for queries and one for keys, so that every sum has one order. Only the gradients
of a bias and of the scan's table, by atomic additions, differ from run to run in their last bits.
Without a GPU the kernels run in Triton's interpreter.
"""
from __future__ import annotations  # so that tl.constexpr is not read where Triton is missing

import functools
import math
import os
import sys
import warnings

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')
try:
    import triton
    import triton.language as tl
    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # Triton is for Linux; the references work everywhere
    triton, jit, constexpr = None, lambda function: function, float

# what kernels read besides their arguments must be constexpr
INTERPRETED = constexpr(os.environ.get('TRITON_INTERPRET') == '1')
LN2 = constexpr(math.log(2))
LOG2E = constexpr(1 / math.log(2))  # exp(x) = 2^(LOG2E x)
EPS, CHUNK = 1e-8, 16  # PRISM: of the sharpened histograms; tokens of a chunk
EPSILON, K, TILE = constexpr(EPS), constexpr(CHUNK), constexpr(32)


# --------------------------------------------------------------------------------------------------
# references: any dtype, O(T^2) memory

def attention_reference(q, k, v, delta=None, base=0.0, row=None, col=None, bias=None):
    """The equations above as they stand: (y [B, H, T, D], e [B, H, T]).

    q, k, v [B, H, T, D]. base > 0 turns q_t and k_s to polar coordinates (PoPE eq. 7-10), with
    delta [G, H, D]. row [G, H, T] multiplies q_t and col [B, H, T] k_s. bias [G, H, T] is by the
    distance t - s. G divides B: sequence b uses entry b G // B (one for each seed of a run).
    """
    B, H, T, D = q.shape
    scale = D ** -0.5
    t = torch.arange(T, device=q.device)
    distance = t[:, None] - t  # (T, T)
    if base:
        angle = t[:, None] * base ** (-torch.arange(D, device=q.device, dtype=torch.float64) / D)
        phase = angle + for_each(delta, B)[:, :, None]  # (B, H, T, D)
        q = torch.cat([q * angle.cos().to(q.dtype), q * angle.sin().to(q.dtype)], dim=-1)
        k = torch.cat([k * phase.cos().to(k.dtype), k * phase.sin().to(k.dtype)], dim=-1)
    if row is not None:
        q = q * for_each(row, B)[..., None]
        k = k * col[..., None]
    x = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        x = x + for_each(bias, B)[..., distance.clamp(min=0)]
    p = x.masked_fill(distance < 0, -math.inf).softmax(dim=-1)  # (B, H, T, T)
    return p @ v, (p * distance).sum(dim=-1)


def for_each(x, B):
    """[G, ...] -> [B, ...]: the entry of each of B sequences."""
    return x.repeat_interleave(B // len(x), dim=0)


def pope_attention_reference(q, k, v, delta, base=10000.0):
    """PoPE eq. 3-6, with mu = softplus, theta_c = base^(-c/D) and delta [H, D]:
    logit_ts = sum_c mu(q_t)_c mu(k_s)_c cos((s - t) theta_c + delta_c) / sqrt(D)."""
    return attention_reference(F.softplus(q), F.softplus(k), v, delta[None], base)[0]


def vipe_attention_reference(q, k, v, u, s=1.0):
    """ViPE eq. 7-9: logit_ni = s log(n) (1 + <u, k_i>) <q_n, k_i> / sqrt(D), n from 1.

    Returns y and the expected distance e.
    """
    row, col = vipe_factors(q, k, u, s)
    return attention_reference(q, k, v, row=row, col=col)


def bias_attention_reference(q, k, v, bias):
    """logit_ts = <q_t, k_s> / sqrt(D) + bias[h, t - s]."""
    return attention_reference(q, k, v, bias=bias[None])[0]


# --------------------------------------------------------------------------------------------------
# PyTorch's fused attention, for what the kernels below do not compute

def fused_attention(q, k, v, mask, scale):
    """Causal attention [B, H, Tq, D] by PyTorch's fused kernels; a mask [1 or B, H, Tq, T] is added
    to the logits and takes the place of causality."""
    if torch._C._functorch.is_batchedtensor(q):  # many seeds at once, under vmap
        return seeds_attention(q, k, v, mask, scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                          scale=scale)


@torch.library.custom_op('nanope::seeds_attention', mutates_args=())
def seeds_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
                    scale: float) -> torch.Tensor:
    """fused_attention under vmap, which has no rule for it: seeds_attention_rule is the rule."""
    raise NotImplementedError('seeds_attention exists for its vmap rule only')


@seeds_attention.register_vmap
def seeds_attention_rule(info, in_dims, q, k, v, mask, scale):
    """q, k, v with a seed axis at in_dims -> (attention with a seed axis, its place)."""
    S = info.batch_size
    q, k, v = (x.expand(S, *x.shape) if d is None else x.movedim(d, 0)
               for x, d in zip((q, k, v), in_dims))  # (S, B, H, T, D)
    if mask is None or in_dims[3] is None and len(mask) == 1:  # one mask: seeds into the batch
        y = fused_attention(*(x.flatten(0, 1) for x in (q, k, v)), mask, scale)
        return y.unflatten(0, (S, -1)), 0
    H = q.shape[2]  # a mask per seed or row: seeds into the heads
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    mask = mask.expand(S, *mask.shape) if in_dims[3] is None else mask.movedim(in_dims[3], 0)
    mask = mask.transpose(0, 1).flatten(1, 2)  # (1 or B, S H, Tq, T)
    return fused_attention(q, k, v, mask, scale).unflatten(1, (S, H)), 1


# --------------------------------------------------------------------------------------------------
# what the user calls

def pope_attention(q, k, v, delta, base=10000.0):
    """pope_attention_reference by the kernels: q, k, v [B, H, T, D], delta [H, D] -> [B, H, T, D].

    delta is used as given, without a clamp.
    """
    return attention(q, k, v, delta=delta[None], base=base, softplus=True)[0]


def vipe_attention(q, k, v, u, s=1.0):
    """vipe_attention_reference by the kernels: q, k, v [B, H, T, D], u [H, D], s a number or a
    tensor -> (y [B, H, T, D], expected distance [B, H, T] in float32)."""
    row, col = vipe_factors(q, k, u, s)
    return attention(q, k, v, row=row, col=col, distance=True)


def bias_attention(q, k, v, bias):
    """bias_attention_reference by the kernels: q, k, v [B, H, T, D], bias [H, T] by the distance
    t - s -> [B, H, T, D].

    For ALiBi, T5 and any b(t - s). FIRE's bias depends on t as well: it takes PyTorch's attention.
    """
    return attention(q, k, v, bias=bias[None])[0]


def vipe_factors(q, k, u, s):
    """row [1, H, T] = s log(n), n from 1, and col [B, H, T] = 1 + <u, k_i>."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    n = torch.arange(1, q.shape[2] + 1, device=q.device).to(dtype)
    row = (s * n.log()).expand(1, q.shape[1], -1)
    # not a product of matrices, which autocast would round
    return row, 1 + (k.to(dtype) * u[:, None].to(dtype)).sum(dim=-1)


def attention(q, k, v, delta=None, base=0.0, row=None, col=None, bias=None, softplus=False,
              distance=False):
    """attention_reference by the kernels, of softplus(q) and softplus(k) if `softplus`.

    Returns y [B, H, T, D], and e [B, H, T] in float32, or None unless `distance`. Gradients for
    every tensor by backward() and autograd.grad; torch.func.grad needs the reference.
    RuntimeError without Triton; ValueError if types or shapes do not fit.
    """
    check_attention(q, k, v, delta, base, row, col, bias, softplus)
    scale = q.shape[3] ** -0.5
    if delta is not None:
        q = polar(q, torch.zeros_like(delta, dtype=torch.float32), base, softplus)
        k = polar(k, delta.float(), base, softplus)
    if row is not None:
        q = (q * for_each(row, len(q))[..., None]).to(v.dtype)
        k = (k * col[..., None]).to(v.dtype)
    bias = None if bias is None else bias.float()
    y, e, _ = attention_forward(q, k, v, bias, scale, distance)
    return y, e if distance else None


def check_attention(q, k, v, delta, base, row, col, bias, softplus):
    """RuntimeError without Triton; ValueError if attention() cannot take these."""
    if triton is None:
        raise RuntimeError('the kernels need Triton, which is for Linux: pip install triton; '
                           'kernels.attention_reference needs nothing')
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes:
        raise ValueError('q, k and v must all be float32, bfloat16 or float16, '
                         f'not {q.dtype}, {k.dtype}, {v.dtype}')
    if not q.shape == k.shape == v.shape or q.dim() != 4 or not 1 <= q.shape[3] <= 128:
        raise ValueError('q, k and v must all be [B, H, T, D], D from 1 to 128, '
                         f'not {[*q.shape]}, {[*k.shape]}, {[*v.shape]}')
    if (delta is None) != (not base) or (row is None) != (col is None) or softplus and not base:
        raise ValueError('delta goes with base, row with col, softplus with base')
    B, H, T, D = q.shape
    groups = [len(x) for x in (delta, row, bias) if x is not None]
    G = groups[0] if groups else 1
    expected = dict(delta=(delta, (G, H, D)), row=(row, (G, H, T)), col=(col, (B, H, T)),
                    bias=(bias, (G, H, T)))
    for name, (x, shape) in expected.items():
        if x is not None and (x.shape != shape or x.device != q.device):
            raise ValueError(f'{name} must be {[*shape]} on {q.device}, '
                             f'not {[*x.shape]} on {x.device}')
    if B % G:
        raise ValueError(f'{G} groups do not divide a batch of {B}')


# --------------------------------------------------------------------------------------------------
# pieces of the kernels. BD is D padded to a power of two, as Triton's blocks want

@jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32. Triton's interpreter cannot multiply bfloat16: it widens first."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision=PRECISION)


@jit
def which(T, H, ROWS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The first row, sequence and head of this program; LAST_FIRST: the longest work first."""
    blocks = tl.cdiv(T, ROWS)
    block = tl.program_id(0) % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    return block * ROWS, bh // H, bh % H


@jit
def load_rows(X, start, stride, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Rows start..start+ROWS-1 of X [T, D], zeros outside."""
    i = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BD)[None, :]
    X += tl.cast(start, tl.int64) * stride
    return tl.load(X + i * stride + c, mask=(i < T - start) & (c < D), other=0.0)


@jit
def store_rows(X, x, start, stride, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """x [ROWS, BD] to rows start.. of X [T, D]."""
    i = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, BD)[None, :]
    X += tl.cast(start, tl.int64) * stride
    tl.store(X + i * stride + c, x.to(X.dtype.element_ty), mask=(i < T - start) & (c < D))


@jit
def load_bias(BIAS, t, s, T):
    """bias_(t-s) in units of log 2 for t and s that broadcast; anything where s > t or t >= T.

    In assembly, as Triton would stage the block [M, N] of a tl.load in shared memory, where its
    M + N values would need more than an RTX 4090 has; so they come from the L1 cache.
    """
    address = BIAS + tl.minimum(tl.maximum(t - s, 0), T - 1)
    if INTERPRETED:
        return LOG2E * tl.load(address)
    return LOG2E * tl.inline_asm_elementwise('ld.global.nc.f32 $0, [$1];', '=f,l', [address],
                                             dtype=tl.float32, is_pure=True, pack=1)


# --------------------------------------------------------------------------------------------------
# attention, forward: a program for each block of M queries, head and sequence

@jit
def forward_kernel(Q, K, V, BIAS, Y, E, LSE, q_t, k_t, v_t, y_t, H, T, per_group, scale,
                   D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                   PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """y_t = sum_s p_ts v_s, e_t = sum_s p_ts (t - s), lse_t = log2 sum_s 2^x_ts; x in log 2 units.

    N divides M. X_t is the stride of tensor X from a position to the next.
    """
    t0, b, h = which(T, H, M, True)
    Q += b * T * q_t + h * D
    K += b * T * k_t + h * D
    V += b * T * v_t + h * D_V
    if BIAS is not None:
        BIAS += (b // per_group * H + h) * T
    t = t0 + tl.arange(0, M)
    q = load_rows(Q, t0, q_t, T, D, BD, M)
    y = tl.zeros([M, BD_V], tl.float32)
    e = tl.zeros([M], tl.float32)
    total = tl.zeros([M], tl.float32)
    largest = tl.full([M], float('-inf'), tl.float32)
    for diagonal in tl.static_range(2):  # first the keys that all queries see
        start = t0 if diagonal else 0
        end = min(t0 + M, T) if diagonal else t0
        for s0 in range(start, end, N):
            s = s0 + tl.arange(0, N)
            k = load_rows(K, s0, k_t, T, D, BD, N)
            x = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2E)  # (M, N)
            if BIAS is not None:
                x += load_bias(BIAS, t[:, None], s[None, :], T)
            if diagonal:
                x = tl.where(t[:, None] >= s[None, :], x, float('-inf'))
            new = tl.maximum(largest, tl.max(x, 1))
            # a bias of -inf may have hidden every key so far
            zero = tl.where(new == float('-inf'), 0.0, new)
            p = tl.exp2(x - zero[:, None])
            shrink = tl.exp2(largest - zero)
            here = tl.sum(p, 1)
            if E is not None:  # t - s = (t - s0) - (s - s0)
                e = e * shrink + (t - s0) * here - tl.sum(p * tl.arange(0, N)[None, :], 1)
            v = load_rows(V, s0, v_t, T, D_V, BD_V, N)
            y = dot(p.to(v.dtype), v, y * shrink[:, None], PRECISION)
            total = total * shrink + here
            largest = new
    store_rows(Y + b * T * y_t + h * D_V, y / total[:, None], t0, y_t, T, D_V, BD_V, M)
    rows = (b * H + h) * T + t
    tl.store(LSE + rows, largest + tl.log2(total), mask=t < T)
    if E is not None:
        tl.store(E + rows, e / total, mask=t < T)


# --------------------------------------------------------------------------------------------------
# attention, backward. With g_ts = dloss/dx_ts = p_ts (<dy_t, v_s> + de_t (t - s) - mean_t) and
# mean_t = <dy_t, y_t> + de_t e_t:
#     dq_t = sum_s g_ts k_s / sqrt(D)    dk_s = sum_t g_ts q_t / sqrt(D)    dv_s = sum_t p_ts dy_t

@jit
def queries_kernel(Q, K, V, BIAS, Y, E, LSE, DY, DE, MEAN, DQ, q_t, k_t, v_t, y_t, dy_t, dq_t,
                   H, T, per_group, scale,
                   D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                   PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dq_t, and mean_t for keys_kernel, of a block of M queries; N divides M."""
    t0, b, h = which(T, H, M, True)
    Q += b * T * q_t + h * D
    K += b * T * k_t + h * D
    V += b * T * v_t + h * D_V
    if BIAS is not None:
        BIAS += (b // per_group * H + h) * T
    t = t0 + tl.arange(0, M)
    rows = (b * H + h) * T + t
    q = load_rows(Q, t0, q_t, T, D, BD, M)
    y = load_rows(Y + b * T * y_t + h * D_V, t0, y_t, T, D_V, BD_V, M)
    dy = load_rows(DY + b * T * dy_t + h * D_V, t0, dy_t, T, D_V, BD_V, M)
    lse = tl.load(LSE + rows, mask=t < T, other=float('inf'))  # past the end p = 0
    mean = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    if DE is not None:
        de = tl.load(DE + rows, mask=t < T, other=0.0)
        mean += de * tl.load(E + rows, mask=t < T, other=0.0)
    tl.store(MEAN + rows, mean, mask=t < T)
    dq = tl.zeros([M, BD], tl.float32)
    for diagonal in tl.static_range(2):
        start = t0 if diagonal else 0
        end = min(t0 + M, T) if diagonal else t0
        for s0 in range(start, end, N):
            s = s0 + tl.arange(0, N)
            k = load_rows(K, s0, k_t, T, D, BD, N)
            v = load_rows(V, s0, v_t, T, D_V, BD_V, N)
            x = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2E)  # (M, N)
            if BIAS is not None:
                x += load_bias(BIAS, t[:, None], s[None, :], T)
            if diagonal:
                x = tl.where(t[:, None] >= s[None, :], x, float('-inf'))
            p = tl.exp2(x - lse[:, None])
            dp = dot(dy, tl.trans(v), None, PRECISION)
            if DE is not None:
                dp += de[:, None] * (t[:, None] - s[None, :])
            g = p * (dp - mean[:, None])
            dq = dot(g.to(k.dtype), k, dq, PRECISION)
    store_rows(DQ + b * T * dq_t + h * D, dq * scale, t0, dq_t, T, D, BD, M)


@jit
def keys_kernel(Q, K, V, BIAS, LSE, DY, DE, MEAN, DK, DV, DBIAS, q_t, k_t, v_t, dy_t, dk_t, dv_t,
                H, T, per_group, scale,
                D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dk_s and dv_s of a block of N keys, and dbias, which all blocks add to; M divides N.

    Blocks are [keys, queries]: so the keys are the rows of every product, and wgmma needs 64.
    """
    s0, b, h = which(T, H, N, False)
    Q += b * T * q_t + h * D
    DY += b * T * dy_t + h * D_V
    LSE += (b * H + h) * T
    MEAN += (b * H + h) * T
    if DE is not None:
        DE += (b * H + h) * T
    if BIAS is not None:
        BIAS += (b // per_group * H + h) * T
    if DBIAS is not None:
        DBIAS += (b // per_group * H + h) * T
    s = s0 + tl.arange(0, N)
    k = load_rows(K + b * T * k_t + h * D, s0, k_t, T, D, BD, N)
    v = load_rows(V + b * T * v_t + h * D_V, s0, v_t, T, D_V, BD_V, N)
    dk = tl.zeros([N, BD], tl.float32)
    dv = tl.zeros([N, BD_V], tl.float32)
    for diagonal in tl.static_range(2):
        start = s0 if diagonal else s0 + N
        end = min(s0 + N, T) if diagonal else T
        for t0 in range(start, end, M):
            t = t0 + tl.arange(0, M)
            q = load_rows(Q, t0, q_t, T, D, BD, M)
            dy = load_rows(DY, t0, dy_t, T, D_V, BD_V, M)
            lse = tl.load(LSE + t, mask=t < T, other=float('inf'))  # past the end p = 0
            mean = tl.load(MEAN + t, mask=t < T, other=0.0)
            x = dot(k, tl.trans(q), None, PRECISION) * (scale * LOG2E)  # (N, M)
            if BIAS is not None:
                x += load_bias(BIAS, t[None, :], s[:, None], T)
            if diagonal:
                x = tl.where(t[None, :] >= s[:, None], x, float('-inf'))
            p = tl.exp2(x - lse[None, :])
            dp = dot(v, tl.trans(dy), None, PRECISION)
            if DE is not None:
                de = tl.load(DE + t, mask=t < T, other=0.0)
                dp += de[None, :] * (t[None, :] - s[:, None])
            g = p * (dp - mean[None, :])
            dv = dot(p.to(dy.dtype), dy, dv, PRECISION)
            dk = dot(g.to(q.dtype), q, dk, PRECISION)
            if DBIAS is not None:
                add_diagonals(DBIAS, g, t0 - s0, T, M, N)
    store_rows(DK + b * T * dk_t + h * D, dk * scale, s0, dk_t, T, D, BD, N)
    store_rows(DV + b * T * dv_t + h * D_V, dv, s0, dv_t, T, D_V, BD_V, N)


@jit
def add_diagonals(DBIAS, g, apart, T, M: tl.constexpr, N: tl.constexpr):
    """DBIAS[t - s] += g_ts, of g [N, M] with rows s = s0 + j, columns t = t0 + i, M <= N.

    `apart` is t0 - s0. Column i is turned down by i: then row r holds the distance apart + r in
    columns i >= r, and apart + r - N in the others. So a block makes 2 N atomic additions, not
    M N. Their order differs from run to run.
    """
    r = tl.arange(0, N)[:, None]
    i = tl.arange(0, M)[None, :]
    turned = tl.gather(g, (i - r + N) % N, 0)
    near = tl.sum(tl.where(i >= r, turned, 0.0), 1)
    far = tl.sum(tl.where(i < r, turned, 0.0), 1)
    d = apart + tl.arange(0, N)
    tl.atomic_add(DBIAS + d, near, mask=(d >= 0) & (d < T), sem='relaxed')
    tl.atomic_add(DBIAS + d - N, far, mask=(d >= N) & (d - N < T), sem='relaxed')


# --------------------------------------------------------------------------------------------------
# PoPE eq. 7-10: x_t -> mu(x_t) [cos, sin](t theta + delta), mu = softplus, 2D wide

@jit
def load_turn(TURN, DELTA, t0, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """cos and sin of t theta + delta [ROWS, BD]; TURN [T, 2D] has cos and sin of t theta."""
    c = tl.arange(0, BD)
    delta = tl.load(DELTA + c, mask=c < D, other=0.0)[None, :]
    cos = load_rows(TURN, t0, 2 * D, T, D, BD, ROWS)
    sin = load_rows(TURN + D, t0, 2 * D, T, D, BD, ROWS)
    return (cos * tl.cos(delta) - sin * tl.sin(delta), sin * tl.cos(delta) + cos * tl.sin(delta))


@jit
def magnitude(x, SOFTPLUS: tl.constexpr):
    """mu(x) = log(1 + e^x), or x; the quotient makes up for the rounding of 1 + small."""
    if not SOFTPLUS:
        return x
    small = tl.exp(-tl.abs(x))
    one = 1 + small
    log1p = tl.where(one == 1, small, tl.log(one) * (small / tl.where(one == 1, 1, one - 1)))
    return tl.maximum(x, 0.0) + log1p


@jit
def polar_kernel(X, DELTA, TURN, Y, x_t, y_t, H, T, per_group, D: tl.constexpr, BD: tl.constexpr,
                 SOFTPLUS: tl.constexpr, ROWS: tl.constexpr):
    """y_t = mu(x_t) [cos, sin](t theta + delta) of a block of rows of X [T, D]."""
    t0, b, h = which(T, H, ROWS, False)
    x = load_rows(X + b * T * x_t + h * D, t0, x_t, T, D, BD, ROWS).to(tl.float32)
    mu = magnitude(x, SOFTPLUS)
    cos, sin = load_turn(TURN, DELTA + (b // per_group * H + h) * D, t0, T, D, BD, ROWS)
    Y += b * T * y_t + h * 2 * D
    store_rows(Y, mu * cos, t0, y_t, T, D, BD, ROWS)
    store_rows(Y + D, mu * sin, t0, y_t, T, D, BD, ROWS)


@jit
def polar_backward_kernel(X, DELTA, TURN, DY, DX, DDELTA, x_t, dy_t, dx_t, H, T, per_group,
                          D: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr,
                          ROWS: tl.constexpr):
    """dx_t = mu'(x_t) <dy_t, [cos, sin]>, mu' = sigmoid; and a block's part of ddelta."""
    t0, b, h = which(T, H, ROWS, False)
    x = load_rows(X + b * T * x_t + h * D, t0, x_t, T, D, BD, ROWS).to(tl.float32)
    cos, sin = load_turn(TURN, DELTA + (b // per_group * H + h) * D, t0, T, D, BD, ROWS)
    DY += b * T * dy_t + h * 2 * D
    dy_cos = load_rows(DY, t0, dy_t, T, D, BD, ROWS).to(tl.float32)
    dy_sin = load_rows(DY + D, t0, dy_t, T, D, BD, ROWS).to(tl.float32)
    dx = dy_cos * cos + dy_sin * sin
    if SOFTPLUS:
        dx *= tl.sigmoid(x)
    store_rows(DX + b * T * dx_t + h * D, dx, t0, dx_t, T, D, BD, ROWS)
    ddelta = tl.sum(magnitude(x, SOFTPLUS) * (dy_sin * cos - dy_cos * sin), 0)
    c = tl.arange(0, BD)
    block = (b * H + h) * tl.cdiv(T, ROWS) + t0 // ROWS
    tl.store(DDELTA + block * D + c, ddelta, mask=c < D)


# --------------------------------------------------------------------------------------------------
# launching

LARGE, SMALL = 160 * 1024, 99 * 1024  # bytes of shared memory that BLOCKS need at most
POLAR_ROWS = 16
TUNE = os.environ.get('NANOPE_TUNE') == '1'  # time CHOICES once, instead of the default


@functools.cache
def shared_memory(device):
    """Bytes of shared memory that a program can have; the interpreter has no limit."""
    if device.type != 'cuda':
        return LARGE
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def fits(device):
    """Whether the kernels' blocks fit this GPU; if not, say so once."""
    if shared_memory(device) >= SMALL:
        return True
    warnings.warn(f'the attention kernels need {SMALL} bytes of shared memory, this GPU has '
                  f'{shared_memory(device)}: taking the reference', stacklevel=2)
    return False


# M, N, warps and stages where q and k are up to 64, 128 and 256 wide (PoPE's are twice as wide as
# v), and up to 256 in SMALL shared memory: the largest with the fewest spilled registers, of those
# compiled for sm_80, sm_89 and sm_90 (results/README.md, "Kernels, as compiled")
BLOCKS = {
    'forward_kernel': [(128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 2)],
    'queries_kernel': [(128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)],
    'keys_kernel': [(64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 1)]}


def default_blocks(kernel, D, dtype, shared):
    """M, N, warps and stages from BLOCKS; float32 has no tensor cores to feed."""
    if dtype == torch.float32:
        return (32, 32, 8, 1) if D <= 64 else (16, 16, 8, 1)
    return BLOCKS[kernel][(D > 64) + (D > 128) + (D > 128 and shared < LARGE)]


# what tuning times besides the default
CHOICES = {
    'forward_kernel': [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
    'queries_kernel': [(128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
    'keys_kernel': [(64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (32, 64, 8, 1)]}


@functools.cache
def tuned(kernel, default, adds_to):
    """The kernel with the fastest blocks, timed at the first call of a width, cached on disk."""
    configs = []
    for M, N, warps, stages in dict.fromkeys([default, *CHOICES[kernel.__name__]]):
        check_blocks(kernel, M, N)
        configs.append(triton.Config(dict(M=M, N=N), num_warps=warps, num_stages=stages))
    return triton.autotune(configs, key=['D', 'D_V'], reset_to_zero=adds_to,
                           cache_results=True)(kernel)


def launch(kernel, inputs, outputs, scale, bias, dbias=None):
    """Run a kernel for each block of queries, or of keys, of every head and sequence.

    inputs begin with q, k, v; a stride is passed for every tensor of four axes.
    """
    q, _, v, *_ = inputs
    B, H, T, D = q.shape
    D_V = v.shape[3]
    by_keys = kernel is keys_kernel
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == 'highest'
    constants = dict(D=D, BD=power_of_2(D), D_V=D_V, BD_V=power_of_2(D_V),
                     PRECISION='ieee' if exact else 'tf32')
    tensors = [*inputs, *outputs]
    strides = [x.stride(2) for x in tensors if x is not None and x.dim() == 4]
    per_group = B if bias is None else B // len(bias)
    arguments = [*tensors, *strides, H, T, per_group, scale]

    def grid(blocks):
        return (triton.cdiv(T, blocks['N' if by_keys else 'M']) * B * H,)

    blocks = default_blocks(kernel.__name__, D, q.dtype, shared_memory(q.device))
    with torch.cuda.device_of(q):
        if TUNE:
            tuned(kernel, blocks, None if dbias is None else ('DBIAS',))[grid](
                *arguments, **constants)
            return
        M, N, warps, stages = blocks
        M, N = min(M, power_of_2(T)), min(N, power_of_2(T))
        check_blocks(kernel, M, N)
        kernel[grid](*arguments, **constants, M=M, N=N, num_warps=warps, num_stages=stages)


def check_blocks(kernel, M, N):
    """ValueError if a kernel's loops would miss some of the pairs of M queries and N keys."""
    if kernel is keys_kernel and N % M:
        raise ValueError(f'keys_kernel: M must divide N, not {M} queries and {N} keys')
    if kernel is not keys_kernel and M % N:
        raise ValueError(f'{kernel.__name__}: N must divide M, not {M} queries and {N} keys')


def power_of_2(n):
    """The least power of two that holds n, of those that tl.dot takes."""
    return max(16, triton.next_power_of_2(n))


def new_rows(x, width=None):
    """An uninitialized [B, H, T, width] that lies in memory as [B, T, H, width], so that the
    projection after attention needs no copy."""
    B, H, T, D = x.shape
    return x.new_empty(B, T, H, width or D).transpose(1, 2)


def rows(x):
    """x [B, H, T, D] as the kernels read it: of a position the heads side by side, the positions
    one stride apart. Slices of one projection are so; anything else is copied."""
    B, H, T, D = x.shape
    stride = x.stride(2)
    wanted = (T * stride, D, stride, 1)
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), wanted)):
        return x
    return new_rows(x).copy_(x)


@torch.library.custom_op('nanope::attention', mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      bias: torch.Tensor | None, scale: float, distance: bool
                      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, e, and the log-sum-exp of x in units of log 2 [B, H, T]."""
    q, k, v = rows(q), rows(k), rows(v)
    bias = None if bias is None else bias.contiguous()
    y = new_rows(v)
    lse = v.new_empty(v.shape[:3], dtype=torch.float32)
    e = torch.empty_like(lse) if distance else None
    launch(forward_kernel, (q, k, v, bias), (y, e, lse), scale, bias)
    return y, e if distance else lse.new_empty(0), lse


@torch.library.custom_op('nanope::attention_backward', mutates_args=())
def attention_backward(dy: torch.Tensor, de: torch.Tensor | None, q: torch.Tensor,
                       k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
                       y: torch.Tensor, e: torch.Tensor, lse: torch.Tensor, scale: float,
                       want_bias: bool) -> list[torch.Tensor]:
    """The gradients of q, k, v and bias; an empty tensor where nobody wants that of the bias."""
    dy, q, k, v, y = (rows(x) for x in (dy, q, k, v, y))
    dq, dk, dv = new_rows(q), new_rows(k), new_rows(v)
    lse, mean = lse.contiguous(), torch.empty_like(lse)
    e, de = (None, None) if de is None else (e.contiguous(), de.float().contiguous())
    bias = None if bias is None else bias.contiguous()
    dbias = bias.new_zeros(bias.shape) if want_bias else None
    launch(queries_kernel, (q, k, v, bias, y, e, lse, dy, de), (mean, dq), scale, bias)
    launch(keys_kernel, (q, k, v, bias, lse, dy, de, mean), (dk, dv, dbias), scale, bias, dbias)
    return [dq, dk, dv, dbias if want_bias else lse.new_empty(0)]


@functools.cache  # without a limit, as a CUDA graph may point at any of these
def turns(T, D, base, device):
    """cos and sin of t theta_c, theta_c = base^(-c/D) [T, 2D], rounded from float64."""
    c = torch.arange(D, device=device, dtype=torch.float64)
    angle = torch.arange(T, device=device)[:, None] * base ** (-c / D)
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def launch_polar(kernel, x, delta, base, softplus, *outputs):
    """Run one of PoPE's kernels, a few rows a program, so that they stay in registers."""
    (B, H, T, D), tensors = x.shape, [x, delta.contiguous(), turns(*x.shape[2:], base, x.device)]
    tensors += outputs
    strides = [y.stride(2) for y in tensors if y.dim() == 4]
    with torch.cuda.device_of(x):
        kernel[triton.cdiv(T, POLAR_ROWS) * B * H,](
            *tensors, *strides, H, T, B // len(delta), D, power_of_2(D), softplus, POLAR_ROWS)


@torch.library.custom_op('nanope::polar', mutates_args=())
def polar(x: torch.Tensor, delta: torch.Tensor, base: float, softplus: bool) -> torch.Tensor:
    """PoPE eq. 7-10: x [B, H, T, D], delta [G, H, D] -> mu(x_t) [cos, sin](t theta + delta)."""
    y = new_rows(x, 2 * x.shape[3])
    launch_polar(polar_kernel, rows(x), delta, base, softplus, y)
    return y


@torch.library.custom_op('nanope::polar_backward', mutates_args=())
def polar_backward(dy: torch.Tensor, x: torch.Tensor, delta: torch.Tensor, base: float,
                   softplus: bool) -> list[torch.Tensor]:
    """The gradients of polar's x and delta."""
    (B, H, T, D), G = x.shape, len(delta)
    dx = new_rows(x)
    parts = delta.new_empty(G, B // G, H, triton.cdiv(T, POLAR_ROWS), D)
    launch_polar(polar_backward_kernel, rows(x), delta, base, softplus, rows(dy), dx, parts)
    return [dx, parts.sum(dim=(1, 3))]


# --------------------------------------------------------------------------------------------------
# what autograd, torch.compile and vmap want to know

@attention_forward.register_fake
def _(q, k, v, bias, scale, distance):
    lse = v.new_empty(v.shape[:3], dtype=torch.float32)
    return new_rows(v), torch.empty_like(lse) if distance else lse.new_empty(0), lse


@attention_backward.register_fake
def _(dy, de, q, k, v, bias, y, e, lse, scale, want_bias):
    dbias = lse.new_empty(bias.shape if want_bias else 0)
    return [new_rows(q), new_rows(k), new_rows(v), dbias]


@polar.register_fake
def _(x, delta, base, softplus):
    return new_rows(x, 2 * x.shape[3])


@polar_backward.register_fake
def _(dy, x, delta, base, softplus):
    return [new_rows(x), delta.new_empty(delta.shape)]


def save_attention(ctx, inputs, output):
    """Keep inputs and outputs for the backward pass, nothing in between."""
    *tensors, ctx.scale, ctx.distance = inputs
    ctx.save_for_backward(*tensors, *output)


def attention_gradient(ctx, dy, de, dlse):
    """The gradients of attention_forward's inputs; nobody differentiates lse."""
    de = de if ctx.distance else None
    want_bias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = attention_backward(dy, de, *ctx.saved_tensors, ctx.scale, want_bias)
    return dq, dk, dv, dbias if want_bias else None, None, None


def save_polar(ctx, inputs, output):
    """Keep x and delta."""
    *tensors, ctx.base, ctx.softplus = inputs
    ctx.save_for_backward(*tensors)


def polar_gradient(ctx, dy):
    """The gradients of polar's inputs."""
    return *polar_backward(dy, *ctx.saved_tensors, ctx.base, ctx.softplus), None, None


def no_second_gradient(ctx, grads):
    """Say that there is none."""
    raise NotImplementedError('the kernels have no second-order gradients: take the reference '
                              '(kernels.NAME_reference, or --kernel=reference)')


def fold_seeds(op, shared=None):
    """The vmap rule of an operator whose tensors all begin with the batch, or with G: the seeds
    go in front of either. Argument `shared` is one for all seeds."""
    def in_front(x, dim, S):
        x = x.expand(S, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    def unfold(x, S):
        return x.unflatten(0, (S, len(x) // S)) if x.dim() > 1 else x.new_empty(S, 0)

    def rule(info, in_dims, *args):
        S = info.batch_size
        if shared is not None and (in_dims[shared] is not None or args[-1] is True):
            raise NotImplementedError('the table of sinusoids must be one for all: take '
                                      'pe.cursor_scan')
        folded = []
        for place, (x, dim) in enumerate(zip(args, in_dims)):
            seeded = isinstance(x, torch.Tensor) and place != shared
            folded.append(in_front(x, dim, S) if seeded else x)
        out = op(*folded)
        if isinstance(out, torch.Tensor):
            return unfold(out, S), 0
        return type(out)(unfold(x, S) for x in out), type(out)([0] * len(out))
    return rule


attention_forward.register_autograd(attention_gradient, setup_context=save_attention)
attention_backward.register_autograd(no_second_gradient)
attention_forward.register_vmap(fold_seeds(attention_forward))
attention_backward.register_vmap(fold_seeds(attention_backward))
polar.register_autograd(polar_gradient, setup_context=save_polar)
polar_backward.register_autograd(no_second_gradient)
polar.register_vmap(fold_seeds(polar))
polar_backward.register_vmap(fold_seeds(polar_backward))


# --------------------------------------------------------------------------------------------------
# PRISM's scan: one program for each cursor of each sequence
#
# A program holds its cursor's histogram h in registers, one bin for each offset d, and walks over
# the tokens t. Pointers to histograms and to the table point at offset 0, in the middle of a row.
# - Before token t only the offsets -t..t have mass: other bins are neither stored nor loaded. The
#   first launch has 128 bins and stops before mass can leave them; the next goes on with 256, etc.
# - A step needs the bins d - 1 and d + 1, which other threads hold. So each histogram is stored in
#   HISTORY and loaded from there, shifted, after a barrier.
# - The tokens are cut into chunks of K. Row k of HISTORY is the histogram before a chunk's token k,
#   row k + 1 that after it; so Algorithm 2 is a product of HISTORY and the table.
# - CHECKPOINTS keeps the histogram before each chunk. The backward kernel takes the last chunk
#   first, fills HISTORY again from its checkpoint, and walks back over its tokens.


def check_scan(reset, step, gamma, table, copy):
    """ValueError if shapes do not fit, or if a cursor can leave the offsets of the table."""
    B, C, T = reset.shape
    P = len(table) // 2
    shapes = dict(step=(B, C, T, 3), gamma=(C,), copy=(B, C, T, T + 1))
    for (name, shape), x in zip(shapes.items(), (step, gamma, copy)):
        if x is not None and x.shape != shape:
            raise ValueError(f'{name} must be {[*shape]}, not {[*x.shape]}')
    if table.dim() != 2 or len(table) % 2 == 0:
        raise ValueError(f'the table must be [2P+1, d_pe], not {[*table.shape]}')
    if P < T:
        raise ValueError(f'a cursor can move {T} places in {T} steps: the table must hold offsets '
                         f'-{T}..{T} at least, not -{P}..{P}')


def cursor_scan(reset, step, gamma, table, copy=None):
    """pe.cursor_scan by the kernels, in float32: [B, C, T, d_pe].

    Of the histograms [B, C, T, 2P+1] memory holds one in CHUNK. Gradients for every input, that of
    the table by atomic additions. RuntimeError without Triton; ValueError as check_scan says.
    """
    if triton is None:
        raise RuntimeError('the kernels need Triton, which is for Linux: pip install triton; '
                           'pe.cursor_scan needs nothing')
    check_scan(reset, step, gamma, table, copy)
    gamma = gamma if gamma is None else gamma.expand(len(reset), -1)  # (B, C)
    inputs = reset, step, gamma, table, copy
    return scan_forward(*(x if x is None else x.float() for x in inputs))[0]


@jit
def load_bins(ROW, d, reach):
    """Bins d of the histogram at ROW, which has mass at the offsets -reach..reach."""
    return tl.load(ROW + d, mask=tl.abs(d) <= reach, other=0.0)


@jit
def load_gates(RESET, STEP, row):
    """p_reset, p_incr, p_decr, p_keep."""
    STEP += 3 * row
    return tl.load(RESET + row), tl.load(STEP), tl.load(STEP + 1), tl.load(STEP + 2)


@jit
def load_copy(COPY, row, d, t, T):
    """p_copy of the offsets d, and p_no_copy."""
    COPY += row * (T + 1)
    return tl.load(COPY + d, mask=(d >= 0) & (d <= t), other=0.0), tl.load(COPY + T)


@jit
def after_reset(h, d, total, p_reset):
    """Algorithm 1 (2): a reset moves all mass to offset 0."""
    return (1 - p_reset) * h + tl.where(d == 0, p_reset * total, 0.0)


@jit
def after_step(h, ROW, d, t, total, gates):
    """Algorithm 1 (2), (3): the histogram h, also at ROW, after a reset and a step.

    Mass comes to offset d from d - 1 by an increment, from d + 1 by a decrement, from d by neither.
    """
    p_reset, p_incr, p_decr, p_keep = gates
    lower = after_reset(load_bins(ROW, d - 1, t), d - 1, total, p_reset)
    higher = after_reset(load_bins(ROW, d + 1, t), d + 1, total, p_reset)
    return p_incr * lower + p_decr * higher + p_keep * after_reset(h, d, total, p_reset)


@jit
def step_gradient(dh, DROW, h, d, t, total, gates, DRESET, DSTEP):
    """The gradient of h from dh, also at DROW, that of after_step(h); stores those of the gates."""
    p_reset, p_incr, p_decr, p_keep = gates
    higher, lower = load_bins(DROW, d + 1, t + 1), load_bins(DROW, d - 1, t + 1)
    here = after_reset(h, d, total, p_reset)
    tl.store(DSTEP, tl.sum(here * higher, axis=0))
    tl.store(DSTEP + 1, tl.sum(here * lower, axis=0))
    tl.store(DSTEP + 2, tl.sum(here * dh, axis=0))
    dh = p_incr * higher + p_decr * lower + p_keep * dh
    dh_0 = p_incr * tl.load(DROW + 1) + p_decr * tl.load(DROW - 1) + p_keep * tl.load(DROW)
    tl.store(DRESET, total * dh_0 - tl.sum(h * dh, axis=0))
    return (1 - p_reset) * dh + p_reset * dh_0


@jit
def log2(x):
    """log2(x) by one instruction, to 2^-22 (of 1 near 1). tl.log2 takes two dozen."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise('lg2.approx.ftz.f32 $0, $1;', '=f,f', [x],
                                     dtype=tl.float32, is_pure=True, pack=1)


@jit
def scan_chunk(h, start, end, n, RESET, STEP, gamma, COPY, HISTORY, d, T, L):
    """Algorithm 1 at the tokens start..end-1: fills HISTORY, returns its last row."""
    tl.store(HISTORY + d, h, mask=tl.abs(d) <= start)
    tl.debug_barrier()
    for t in range(start, end):
        ROW = HISTORY + (t - start) * L
        total = tl.sum(h, axis=0) if gamma is None else 1.0  # (1)
        h = after_step(h, ROW, d, t, total, load_gates(RESET, STEP, n * T + t))
        if COPY is not None:  # (4)
            p_copy, p_no_copy = load_copy(COPY, n * T + t, d, t, T)
            h = p_no_copy * h + p_copy
        if gamma is not None:  # (5): (h + eps)^gamma, normalized
            x = tl.where(tl.abs(d) <= t + 1, gamma * log2(h + EPSILON), float('-inf'))
            h = tl.exp2(x - tl.max(x, axis=0))
            h *= 1.0 / tl.sum(h, axis=0)
        tl.store(ROW + L + d, h, mask=tl.abs(d) <= t + 1)
        tl.debug_barrier()
    return h


@jit
def scan_kernel(RESET, STEP, GAMMA, TABLE, COPY, OUT, CHECKPOINTS, HISTORY, first, last, T, L, D,
                BL: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Algorithm 2 at the tokens first..last-1: e_t = sum_d h_t[d] f(d)."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BL) - BL // 2
    k, c = tl.arange(0, K)[:, None], tl.arange(0, BD)[None, :]
    TABLE += L // 2 * D
    HISTORY += n * (K + 1) * L + L // 2
    CHECKPOINTS += n * (tl.cdiv(T, K) + 1) * L + L // 2
    gamma = None if GAMMA is None else tl.load(GAMMA + n)
    h = load_bins(CHECKPOINTS + first // K * L, d, first)
    for start in range(first, last, K):
        end = tl.minimum(start + K, T)
        h = scan_chunk(h, start, end, n, RESET, STEP, gamma, COPY, HISTORY, d, T, L)
        tl.store(CHECKPOINTS + (start // K + 1) * L + d, h, mask=tl.abs(d) <= end)
        t = start + k
        e = tl.zeros([K, BD], tl.float32)
        for low in range(-end, end + 1, TILE):
            j = low + tl.arange(0, TILE)
            hs = load_bins(HISTORY + (k + 1) * L, j[None, :], tl.where(t < end, t + 1, -1))
            inside = (tl.abs(j[:, None]) <= end) & (c < D)
            f = tl.load(TABLE + j[:, None] * D + c, mask=inside, other=0.0)
            e = tl.dot(hs, f, e, input_precision=PRECISION)
        tl.store(OUT + (n * T + t) * D + c, e, mask=(t < end) & (c < D))


@jit
def superposition_gradient(DOUT, TABLE, DTABLE, HISTORY, GRADS, start, end, L, D,
                           BD: tl.constexpr, PRECISION: tl.constexpr):
    """Algorithm 2: dh_t[d] = <de_t, f(d)> to GRADS, df(d) = sum_t h_t[d] de_t added to DTABLE."""
    k, c = tl.arange(0, K)[:, None], tl.arange(0, BD)[None, :]
    reach = tl.where(start + k < end, start + k + 1, -1)
    de = tl.load(DOUT + k * D + c, mask=(start + k < end) & (c < D), other=0.0)
    for low in range(-end, end + 1, TILE):
        j = low + tl.arange(0, TILE)
        inside = (tl.abs(j[:, None]) <= end) & (c < D)
        f = tl.load(TABLE + j[:, None] * D + c, mask=inside, other=0.0)
        dh = tl.dot(de, tl.trans(f), input_precision=PRECISION)
        tl.store(GRADS + k * L + j[None, :], dh, mask=tl.abs(j[None, :]) <= reach)
        if DTABLE is not None:
            hs = load_bins(HISTORY + (k + 1) * L, j[None, :], reach)
            df = tl.dot(tl.trans(hs), de, input_precision=PRECISION)
            tl.atomic_add(DTABLE + j[:, None] * D + c, df, mask=inside, sem='relaxed')


@jit
def scan_backward_kernel(DOUT, RESET, STEP, GAMMA, TABLE, COPY, CHECKPOINTS, DRESET, DSTEP, DGAMMA,
                         DTABLE, DCOPY, HISTORY, GRADS, first, last, T, L, D,
                         BL: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of the gates, gamma and the table at the tokens last-1..first.

    Row k of GRADS: what the encoding of token k gives to the histogram after it, then the gradient
    before (4). Row K: the gradient after token last-1, which the launch before this one has left.
    """
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BL) - BL // 2
    TABLE += L // 2 * D
    DTABLE = None if DTABLE is None else DTABLE + L // 2 * D
    HISTORY += n * (K + 1) * L + L // 2
    GRADS += n * (K + 1) * L + L // 2
    CHECKPOINTS += n * (tl.cdiv(T, K) + 1) * L + L // 2
    gamma = None if GAMMA is None else tl.load(GAMMA + n)
    dgamma = tl.zeros([BL], tl.float32)
    dh = load_bins(GRADS + K * L, d, last)
    for start in range((last - 1) // K * K, first - 1, -K):
        end = tl.minimum(start + K, T)
        h = load_bins(CHECKPOINTS + start // K * L, d, start)
        scan_chunk(h, start, end, n, RESET, STEP, gamma, COPY, HISTORY, d, T, L)
        superposition_gradient(DOUT + (n * T + start) * D, TABLE, DTABLE, HISTORY, GRADS,
                               start, end, L, D, BD, PRECISION)
        tl.debug_barrier()
        for t in range(end - 1, start - 1, -1):
            row = n * T + t
            ROW, DROW = HISTORY + (t - start) * L, GRADS + (t - start) * L
            dh += load_bins(DROW, d, t + 1)
            h = load_bins(ROW, d, t)
            total = tl.sum(h, axis=0) if gamma is None else 1.0
            gates = load_gates(RESET, STEP, row)
            moved = after_step(h, ROW, d, t, total, gates)
            x = moved
            if COPY is not None:
                p_copy, p_no_copy = load_copy(COPY, row, d, t, T)
                x = p_no_copy * moved + p_copy
            if gamma is not None:  # (5): a softmax of gamma log(x + eps)
                y = load_bins(ROW + L, d, t + 1)
                dh = y * (dh - tl.sum(y * dh, axis=0))
                dgamma += dh * log2(x + EPSILON)
                dh = gamma * dh / (x + EPSILON)
            if COPY is not None:  # (4)
                tl.store(DCOPY + row * (T + 1) + d, dh, mask=(d >= 0) & (d <= t))
                tl.store(DCOPY + row * (T + 1) + T, tl.sum(moved * dh, axis=0))
                dh *= p_no_copy
            tl.store(DROW + d, dh, mask=tl.abs(d) <= t + 1)
            tl.debug_barrier()
            dh = step_gradient(dh, DROW, h, d, t, total, gates, DRESET + row, DSTEP + 3 * row)
        tl.debug_barrier()
    tl.store(GRADS + K * L + d, dh, mask=tl.abs(d) <= first)
    if GAMMA is not None:
        tl.store(DGAMMA + n, tl.load(DGAMMA + n) + LN2 * tl.sum(dgamma, axis=0))


def scan_launches(T, L, D):
    """Sizes and options of each launch, the first tokens first."""
    # D = 1 holds the offsets themselves, which have more digits than tf32
    rough = torch.get_float32_matmul_precision() != 'highest' and D > 1
    sizes = dict(T=T, L=L, D=D, BD=max(16, triton.next_power_of_2(D)),
                 PRECISION='tf32' if rough else 'tf32x3', num_stages=1)
    launches = []
    first, BL = 0, 128
    while first < T:
        last = min(T, BL // 2 - CHUNK)  # a multiple of CHUNK, or T
        warps = min(16, max(1, BL // 256))
        launches.append(dict(sizes, first=first, last=last, BL=BL, num_warps=warps))
        first, BL = last, 2 * BL
    return launches


@torch.library.custom_op('nanope::cursor_scan', mutates_args=())
def scan_forward(reset: torch.Tensor, step: torch.Tensor, gamma: torch.Tensor | None,
                 table: torch.Tensor, copy: torch.Tensor | None
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """cursor_scan with gamma [B, C]: encodings, and the histogram before each chunk."""
    inputs = [x if x is None else x.contiguous() for x in (reset, step, gamma, table, copy)]
    (B, C, T), (L, D) = reset.shape, table.shape
    out, checkpoints = empty_scan(*inputs)
    checkpoints[:, :, 0, L // 2] = 1  # all mass at offset 0
    history = reset.new_empty(B * C, CHUNK + 1, L)
    with torch.cuda.device_of(reset):
        for sizes in scan_launches(T, L, D):
            scan_kernel[B * C,](*inputs, out, checkpoints, history, **sizes)
    return out, checkpoints


@scan_forward.register_fake
def empty_scan(reset, step, gamma, table, copy):
    """Uninitialized outputs of scan_forward."""
    (B, C, T), (L, D) = reset.shape, table.shape
    return reset.new_empty(B, C, T, D), reset.new_empty(B, C, -(-T // CHUNK) + 1, L)


@torch.library.custom_op('nanope::cursor_scan_backward', mutates_args=())
def scan_backward(dout: torch.Tensor, reset: torch.Tensor, step: torch.Tensor,
                  gamma: torch.Tensor | None, table: torch.Tensor, copy: torch.Tensor | None,
                  checkpoints: torch.Tensor, want_table: bool) -> list[torch.Tensor]:
    """Gradients of scan_forward's inputs; empty tensors for those that are None or not wanted."""
    tensors = dout, reset, step, gamma, table, copy, checkpoints
    tensors = [x if x is None else x.contiguous() for x in tensors]
    (B, C, T), (L, D) = reset.shape, table.shape
    wanted = reset, step, gamma, table if want_table else None, copy
    # zeros: the kernel adds to dgamma and dtable, and dcopy is 0 for later tokens
    grads = [x if x is None else x.new_zeros(x.shape) for x in wanted]
    history, dhistory = reset.new_empty(2, B * C, CHUNK + 1, L)
    dhistory[:, CHUNK] = 0
    with torch.cuda.device_of(reset):
        for sizes in reversed(scan_launches(T, L, D)):
            scan_backward_kernel[B * C,](*tensors, *grads, history, dhistory, **sizes)
    return [reset.new_empty(0) if x is None else x for x in grads]


@scan_backward.register_fake
def _(dout, reset, step, gamma, table, copy, checkpoints, want_table):
    wanted = reset, step, gamma, table if want_table else None, copy
    return [reset.new_empty(0 if x is None else x.shape) for x in wanted]


def save_scan(ctx, inputs, output):
    """Keep the inputs and the checkpoints for the backward pass."""
    ctx.save_for_backward(*inputs, output[1])


def scan_gradient(ctx, dout, dcheckpoints):
    """Gradients of scan_forward's inputs; nothing depends on the checkpoints."""
    wanted = ctx.needs_input_grad
    grads = scan_backward(dout, *ctx.saved_tensors, wanted[3])
    return tuple(grad if yes else None for grad, yes in zip(grads, wanted))


scan_forward.register_autograd(scan_gradient, setup_context=save_scan)
scan_backward.register_autograd(no_second_gradient)
scan_forward.register_vmap(fold_seeds(scan_forward, shared=3))
scan_backward.register_vmap(fold_seeds(scan_backward, shared=4))


# --------------------------------------------------------------------------------------------------
# python kernels.py

if __name__ == '__main__':
    # engine.bench takes this copy, as an operator can be registered only once
    sys.modules['kernels'] = sys.modules['__main__']
    from engine import bench, config
    config.run(lambda argv: bench.kernel_main(__doc__, argv))
