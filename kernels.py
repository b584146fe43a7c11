"""Fused causal attention for PoPE, ViPE and Toeplitz biases in Triton; PRISM's is engine/scan.py.

    python kernels.py      check the kernels against float64; with a GPU, time them as well
    TRITON_INTERPRET=0 python kernels.py --arch=90      without one: what a compiler makes of them

Queries t and keys s <= t count from 0. Every encoding here is one attention,

    x_ts = <q_t, k_s> / sqrt(D) + bias_(t-s)        p_t = softmax(x_t)
    y_t  = sum_s p_ts v_s                           e_t = sum_s p_ts (t - s)

ALiBi and T5 add a bias. PoPE first turns q_t and k_s to polar coordinates, by a kernel of its own.
ViPE first multiplies them by factors, in plain PyTorch.

One forward and two backward kernels go over blocks of M queries and N keys, as FlashAttention
does (Dao et al. 2022): a running maximum and sum make the softmax, so memory grows with T, not
with T^2. Sums are in float32. The backward kernels compute p again from the stored log-sum-exp.
One owns a block of queries, the other a block of keys, so every sum has one order. Only the
gradient of a bias, by atomic additions, differs from run to run in its last bits.
Without a GPU the kernels run in Triton's interpreter.
"""
from __future__ import annotations  # so that tl.constexpr is not read where Triton is missing

import functools
import math
import sys
import warnings

import torch
import torch.nn.functional as F

from engine import scan
from engine.operators import INTERPRETED, constexpr, fold_seeds, jit, no_second_gradient, tl, triton

cursor_scan = scan.cursor_scan  # PRISM's, in a file of its own
LOG2E = constexpr(1 / math.log(2))  # exp(x) = 2^(LOG2E x); kernels read constexpr alone


# --------------------------------------------------------------------------------------------------
# references: any dtype, O(T^2) memory

def attention_reference(q, k, v, delta=None, base=0.0, row=None, col=None, bias=None):
    """The equations above as they stand: (y [B, H, T, D], e [B, H, T]).

    q, k, v [B, H, T, D]. base > 0 turns q_t and k_s to polar coordinates (PoPE eq. 7-10), k_s with
    the phase delta [G, H, D]. row [G, H, T] multiplies q_t and col [B, H, T] k_s. bias [G, H, T] is
    by the distance t - s. G divides B: sequence b uses entry b G // B (one for each seed of a run).
    """
    B, H, T, D = q.shape
    scale = D ** -0.5
    t = torch.arange(T, device=q.device)
    distance = t[:, None] - t  # (T, T)
    if base:
        angle = t[:, None] * base ** (-torch.arange(D, device=q.device, dtype=torch.float64) / D)
        phase = angle if delta is None else angle + for_each(delta, B)[:, :, None]  # (B, H, T, D)
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
    if base:
        q = polar(q, None, base, softplus)
        k = polar(k, None if delta is None else delta.float(), base, softplus)
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
    if (row is None) != (col is None) or not base and (softplus or delta is not None):
        raise ValueError('delta and softplus go with base, row with col')
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
def own_block(T, H, ROWS: tl.constexpr, LAST_FIRST: tl.constexpr):
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

    Triton would stage the M N values of a tl.load in shared memory, more than an RTX 4090 has. Only
    M + N - 1 of them differ, so assembly reads them through the L1 cache.
    """
    address = BIAS + tl.minimum(tl.maximum(t - s, 0), T - 1)
    if INTERPRETED:
        return LOG2E * tl.load(address)
    return LOG2E * tl.inline_asm_elementwise('ld.global.nc.f32 $0, [$1];', '=f,l', [address],
                                             dtype=tl.float32, is_pure=True, pack=1)


# --------------------------------------------------------------------------------------------------
# attention, forward: a program for each block of M queries, head and sequence

@jit
def forward_kernel(Q, K, V, BIAS, Y, E, LSE, q_step, k_step, v_step, y_step, H, T, per_group, scale,
                   D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                   PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """y_t = sum_s p_ts v_s, e_t = sum_s p_ts (t - s), lse_t = log2 sum_s 2^x_ts, where x_ts is the
    logit times log2(e). N divides M. q_step, k_step, ...: the stride from a position to the next.
    """
    t0, b, h = own_block(T, H, M, True)
    Q += b * T * q_step + h * D
    K += b * T * k_step + h * D
    V += b * T * v_step + h * D_V
    BIAS = None if BIAS is None else BIAS + (b // per_group * H + h) * T
    t = t0 + tl.arange(0, M)
    q = load_rows(Q, t0, q_step, T, D, BD, M)
    y = tl.zeros([M, BD_V], tl.float32)
    e = tl.zeros([M], tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    row_max = tl.full([M], float('-inf'), tl.float32)
    for diagonal in tl.static_range(2):  # first the keys that all queries see
        start = t0 if diagonal else 0
        end = min(t0 + M, T) if diagonal else t0
        for s0 in range(start, end, N):
            s = s0 + tl.arange(0, N)
            k = load_rows(K, s0, k_step, T, D, BD, N)
            x = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2E)  # (M, N)
            if BIAS is not None:
                x += load_bias(BIAS, t[:, None], s[None, :], T)
            if diagonal:
                x = tl.where(t[:, None] >= s[None, :], x, float('-inf'))
            new = tl.maximum(row_max, tl.max(x, 1))
            # a bias of -inf may have hidden every key so far
            shift = tl.where(new == float('-inf'), 0.0, new)
            p = tl.exp2(x - shift[:, None])
            rescale = tl.exp2(row_max - shift)
            block_sum = tl.sum(p, 1)
            if E is not None:  # t - s = (t - s0) - (s - s0)
                e = e * rescale + (t - s0) * block_sum - tl.sum(p * tl.arange(0, N)[None, :], 1)
            v = load_rows(V, s0, v_step, T, D_V, BD_V, N)
            y = dot(p.to(v.dtype), v, y * rescale[:, None], PRECISION)
            row_sum = row_sum * rescale + block_sum
            row_max = new
    store_rows(Y + b * T * y_step + h * D_V, y / row_sum[:, None], t0, y_step, T, D_V, BD_V, M)
    rows = (b * H + h) * T + t
    tl.store(LSE + rows, row_max + tl.log2(row_sum), mask=t < T)
    if E is not None:
        tl.store(E + rows, e / row_sum, mask=t < T)


# --------------------------------------------------------------------------------------------------
# attention, backward. With g_ts = dloss/dx_ts = p_ts (<dy_t, v_s> + de_t (t - s) - mean_t) and
# mean_t = <dy_t, y_t> + de_t e_t:
#     dq_t = sum_s g_ts k_s / sqrt(D)    dk_s = sum_t g_ts q_t / sqrt(D)    dv_s = sum_t p_ts dy_t
#     dbias_d = sum_t g_(t, t-d)

@jit
def queries_kernel(Q, K, V, BIAS, Y, E, LSE, DY, DE, MEAN, DQ,
                   q_step, k_step, v_step, y_step, dy_step, dq_step, H, T, per_group, scale,
                   D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                   PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dq_t, and mean_t for keys_kernel, of a block of M queries; N divides M."""
    t0, b, h = own_block(T, H, M, True)
    Q += b * T * q_step + h * D
    K += b * T * k_step + h * D
    V += b * T * v_step + h * D_V
    BIAS = None if BIAS is None else BIAS + (b // per_group * H + h) * T
    t = t0 + tl.arange(0, M)
    rows = (b * H + h) * T + t
    q = load_rows(Q, t0, q_step, T, D, BD, M)
    y = load_rows(Y + b * T * y_step + h * D_V, t0, y_step, T, D_V, BD_V, M)
    dy = load_rows(DY + b * T * dy_step + h * D_V, t0, dy_step, T, D_V, BD_V, M)
    lse = tl.load(LSE + rows, mask=t < T, other=float('inf'))  # past the end p = 0
    mean = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    if DE is not None:
        de = tl.load(DE + rows, mask=t < T, other=0.0)
        mean += de * tl.load(E + rows, mask=t < T, other=0.0)
    tl.store(MEAN + rows, mean, mask=t < T)
    dq = tl.zeros([M, BD], tl.float32)
    for diagonal in tl.static_range(2):  # first the keys that all queries see
        start = t0 if diagonal else 0
        end = min(t0 + M, T) if diagonal else t0
        for s0 in range(start, end, N):
            s = s0 + tl.arange(0, N)
            k = load_rows(K, s0, k_step, T, D, BD, N)
            v = load_rows(V, s0, v_step, T, D_V, BD_V, N)
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
    store_rows(DQ + b * T * dq_step + h * D, dq * scale, t0, dq_step, T, D, BD, M)


@jit
def keys_kernel(Q, K, V, BIAS, LSE, DY, DE, MEAN, DK, DV, DBIAS,
                q_step, k_step, v_step, dy_step, dk_step, dv_step, H, T, per_group, scale,
                D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """dk_s and dv_s of a block of N keys, and dbias, which all blocks add to; M divides N.

    Blocks are [N keys, M queries], the transpose of forward's: keys are the rows of every product,
    and wgmma needs 64 rows.
    """
    s0, b, h = own_block(T, H, N, False)
    Q += b * T * q_step + h * D
    DY += b * T * dy_step + h * D_V
    LSE += (b * H + h) * T
    MEAN += (b * H + h) * T
    DE = None if DE is None else DE + (b * H + h) * T
    BIAS = None if BIAS is None else BIAS + (b // per_group * H + h) * T
    DBIAS = None if DBIAS is None else DBIAS + (b // per_group * H + h) * T
    s = s0 + tl.arange(0, N)
    k = load_rows(K + b * T * k_step + h * D, s0, k_step, T, D, BD, N)
    v = load_rows(V + b * T * v_step + h * D_V, s0, v_step, T, D_V, BD_V, N)
    dk = tl.zeros([N, BD], tl.float32)
    dv = tl.zeros([N, BD_V], tl.float32)
    for diagonal in tl.static_range(2):  # first the queries that see all keys
        start = s0 if diagonal else s0 + N
        end = min(s0 + N, T) if diagonal else T
        for t0 in range(start, end, M):
            t = t0 + tl.arange(0, M)
            q = load_rows(Q, t0, q_step, T, D, BD, M)
            dy = load_rows(DY, t0, dy_step, T, D_V, BD_V, M)
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
    store_rows(DK + b * T * dk_step + h * D, dk * scale, s0, dk_step, T, D, BD, N)
    store_rows(DV + b * T * dv_step + h * D_V, dv, s0, dv_step, T, D_V, BD_V, N)


@jit
def add_diagonals(DBIAS, g, apart, T, M: tl.constexpr, N: tl.constexpr):
    """DBIAS[t - s] += g_ts, of g [N, M] with rows s = s0 + j, columns t = t0 + i, M <= N.

    `apart` is t0 - s0. Row r of `by_distance` has in column i the row (i - r) mod N of g: that is
    the distance apart + r where i >= r, and apart + r - N elsewhere. So a block makes 2 N atomic
    additions, not M N. Their order differs from run to run.
    """
    r = tl.arange(0, N)[:, None]
    i = tl.arange(0, M)[None, :]
    by_distance = tl.gather(g, (i - r + N) % N, 0)
    near = tl.sum(tl.where(i >= r, by_distance, 0.0), 1)
    far = tl.sum(tl.where(i < r, by_distance, 0.0), 1)
    d = apart + tl.arange(0, N)
    tl.atomic_add(DBIAS + d, near, mask=(d >= 0) & (d < T), sem='relaxed')
    tl.atomic_add(DBIAS + d - N, far, mask=(d >= N) & (d - N < T), sem='relaxed')


# --------------------------------------------------------------------------------------------------
# PoPE eq. 7-10: x_t -> mu(x_t) [cos, sin](t theta + delta), 2D wide; mu = softplus, theta_c =
# base^(-c/D); delta for keys alone

@jit
def magnitude(x, SOFTPLUS: tl.constexpr):
    """mu(x) = log(1 + e^x), or x."""
    if not SOFTPLUS:
        return x
    small = tl.exp(-tl.abs(x))
    z = 1 + small
    # times the quotient, which undoes the rounding of z
    log1p = tl.where(z == 1, small, tl.log(z) * (small / tl.where(z == 1, 1, z - 1)))
    return tl.maximum(x, 0.0) + log1p


@jit
def load_cos_sin(COS_SIN, DELTA, t0, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """cos and sin of t theta + delta [ROWS, BD]; COS_SIN [T, 2D] has cos and sin of t theta."""
    cos = load_rows(COS_SIN, t0, 2 * D, T, D, BD, ROWS)
    sin = load_rows(COS_SIN + D, t0, 2 * D, T, D, BD, ROWS)
    if DELTA is not None:
        c = tl.arange(0, BD)
        delta = tl.load(DELTA + c, mask=c < D, other=0.0)[None, :]
        cos, sin = (cos * tl.cos(delta) - sin * tl.sin(delta),
                    sin * tl.cos(delta) + cos * tl.sin(delta))
    return cos, sin


@jit
def polar_kernel(X, DELTA, COS_SIN, Y, x_step, y_step, H, T, per_group,
                 D: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr, ROWS: tl.constexpr):
    """y_t = mu(x_t) [cos, sin](t theta + delta) of a block of rows of X [T, D]."""
    t0, b, h = own_block(T, H, ROWS, False)
    x = load_rows(X + b * T * x_step + h * D, t0, x_step, T, D, BD, ROWS).to(tl.float32)
    mu = magnitude(x, SOFTPLUS)
    DELTA = None if DELTA is None else DELTA + (b // per_group * H + h) * D
    cos, sin = load_cos_sin(COS_SIN, DELTA, t0, T, D, BD, ROWS)
    Y += b * T * y_step + h * 2 * D
    store_rows(Y, mu * cos, t0, y_step, T, D, BD, ROWS)
    store_rows(Y + D, mu * sin, t0, y_step, T, D, BD, ROWS)


@jit
def polar_backward_kernel(X, DELTA, COS_SIN, DY, DX, DDELTA, x_step, dy_step, dx_step,
                          H, T, per_group, D: tl.constexpr, BD: tl.constexpr,
                          SOFTPLUS: tl.constexpr, ROWS: tl.constexpr):
    """dx = mu'(x) (dy_cos cos + dy_sin sin), feature by feature, mu' = sigmoid; and this block's
    part of ddelta = sum_t mu(x_t) (dy_sin cos - dy_cos sin)."""
    t0, b, h = own_block(T, H, ROWS, False)
    x = load_rows(X + b * T * x_step + h * D, t0, x_step, T, D, BD, ROWS).to(tl.float32)
    DELTA = None if DELTA is None else DELTA + (b // per_group * H + h) * D
    cos, sin = load_cos_sin(COS_SIN, DELTA, t0, T, D, BD, ROWS)
    DY += b * T * dy_step + h * 2 * D
    dy_cos = load_rows(DY, t0, dy_step, T, D, BD, ROWS).to(tl.float32)
    dy_sin = load_rows(DY + D, t0, dy_step, T, D, BD, ROWS).to(tl.float32)
    dx = dy_cos * cos + dy_sin * sin
    if SOFTPLUS:
        dx *= tl.sigmoid(x)
    store_rows(DX + b * T * dx_step + h * D, dx, t0, dx_step, T, D, BD, ROWS)
    if DDELTA is not None:
        ddelta = tl.sum(magnitude(x, SOFTPLUS) * (dy_sin * cos - dy_cos * sin), 0)
        c = tl.arange(0, BD)
        block = (b * H + h) * tl.cdiv(T, ROWS) + t0 // ROWS
        tl.store(DDELTA + block * D + c, ddelta, mask=c < D)


# --------------------------------------------------------------------------------------------------
# launching

LARGE, SMALL = 220 * 1024, 99 * 1024  # bytes of shared memory that BLOCKS need at most
POLAR_ROWS = 64 if INTERPRETED else 16  # on a GPU so few stay in registers


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
# v), and up to 256 where shared memory is not LARGE: the fastest on an H100 over all encodings
# (results/README.md, "On a GPU"), but for the last, which were not timed. N divides M, and in
# keys_kernel M divides N, or the loops would miss pairs
BLOCKS = {
    'forward_kernel': [(64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 2)],
    'queries_kernel': [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2)],
    'keys_kernel': [(64, 64, 4, 3), (32, 64, 4, 2), (32, 128, 8, 2), (32, 64, 8, 1)]}


def default_blocks(kernel, D, dtype, shared):
    """M, N, warps and stages from BLOCKS; float32 takes small blocks, being twice as wide."""
    if dtype == torch.float32:
        return (32, 32, 8, 1) if D <= 64 else (16, 16, 8, 1)
    return BLOCKS[kernel][(D > 64) + (D > 128) + (D > 128 and shared < LARGE)]


def launch(kernel, inputs, outputs, scale, bias):
    """Run a kernel for each block of queries, or of keys, of every head and sequence.

    inputs begin with q, k, v; a stride is passed for every tensor of four axes.
    """
    q, _, v, *_ = inputs
    B, H, T, D = q.shape
    D_V = v.shape[3]
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == 'highest'
    constants = dict(D=D, BD=power_of_2(D), D_V=D_V, BD_V=power_of_2(D_V),
                     PRECISION='ieee' if exact else 'tf32')
    tensors = [*inputs, *outputs]
    strides = [x.stride(2) for x in tensors if x is not None and x.dim() == 4]
    per_group = B if bias is None else B // len(bias)
    shared = shared_memory(q.device)
    M, N, warps, stages = default_blocks(kernel.__name__, D, q.dtype, shared)
    M, N = min(M, power_of_2(T)), min(N, power_of_2(T))
    programs = triton.cdiv(T, N if kernel is keys_kernel else M) * B * H
    with torch.cuda.device_of(q):
        kernel[programs,](*tensors, *strides, H, T, per_group, scale, **constants,
                          M=M, N=N, num_warps=warps, num_stages=stages)


def power_of_2(n):
    """The least power of two that holds n, of those that tl.dot takes."""
    return max(16, triton.next_power_of_2(n))


def new_rows(x, width=None):
    """An uninitialized [B, H, T, width] that lies in memory as [B, T, H, width], so that the
    projection after attention needs no copy. From a position to the next are a multiple of 16
    numbers: loads are wide, and the ptxas of Triton 3.6 makes wrong code of some that are not."""
    B, H, T, D = x.shape
    D = width or D
    step = triton.cdiv(H * D, 16) * 16
    return x.new_empty(B, T, step)[..., :H * D].unflatten(-1, (H, D)).transpose(1, 2)


def readable(x):
    """A tensor, or None, as the kernels read it. Of [B, H, T, D]: the heads of a position side by
    side, the positions one stride apart, a multiple of 16. Slices of one projection are so if it is
    as wide; others are copied."""
    if x is None or x.dim() != 4:
        return x if x is None else x.contiguous()
    B, H, T, D = x.shape
    stride = x.stride(2)
    wanted = (T * stride, D, stride, 1)
    laid_out = all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), wanted))
    if laid_out and stride % 16 == 0:
        return x
    return new_rows(x).copy_(x)


@torch.library.custom_op('nanope::attention', mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      bias: torch.Tensor | None, scale: float, distance: bool
                      ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, e, and the log-sum-exp of x in units of log 2 [B, H, T]."""
    q, k, v, bias = (readable(x) for x in (q, k, v, bias))
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
    e, de = (None, None) if de is None else (e, de.float())
    dy, de, q, k, v, bias, y, e, lse = (readable(x) for x in (dy, de, q, k, v, bias, y, e, lse))
    dq, dk, dv, mean = new_rows(q), new_rows(k), new_rows(v), torch.empty_like(lse)
    dbias = bias.new_zeros(bias.shape) if want_bias else None
    launch(queries_kernel, (q, k, v, bias, y, e, lse, dy, de), (mean, dq), scale, bias)
    launch(keys_kernel, (q, k, v, bias, lse, dy, de, mean), (dk, dv, dbias), scale, bias)
    return [dq, dk, dv, dbias if want_bias else lse.new_empty(0)]


@functools.cache  # without a limit, as a CUDA graph may point at any of these
def cos_sin_table(T, D, base, device):
    """cos and sin of t theta_c, theta_c = base^(-c/D) [T, 2D], rounded from float64."""
    c = torch.arange(D, device=device, dtype=torch.float64)
    angle = torch.arange(T, device=device)[:, None] * base ** (-c / D)
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def launch_polar(kernel, x, delta, base, softplus, *others):
    """Run one of PoPE's kernels, POLAR_ROWS rows a program."""
    B, H, T, D = x.shape
    per_group = B if delta is None else B // len(delta)
    tensors = [x, delta, cos_sin_table(T, D, base, x.device), *others]
    strides = [y.stride(2) for y in tensors if y is not None and y.dim() == 4]
    with torch.cuda.device_of(x):
        kernel[triton.cdiv(T, POLAR_ROWS) * B * H,](
            *tensors, *strides, H, T, per_group, D, power_of_2(D), softplus, POLAR_ROWS)


@torch.library.custom_op('nanope::polar', mutates_args=())
def polar(x: torch.Tensor, delta: torch.Tensor | None, base: float,
          softplus: bool) -> torch.Tensor:
    """PoPE eq. 7-10: x [B, H, T, D], delta [G, H, D] -> mu(x_t) [cos, sin](t theta + delta)."""
    y = new_rows(x, 2 * x.shape[3])
    launch_polar(polar_kernel, readable(x), readable(delta), base, softplus, y)
    return y


@torch.library.custom_op('nanope::polar_backward', mutates_args=())
def polar_backward(dy: torch.Tensor, x: torch.Tensor, delta: torch.Tensor | None, base: float,
                   softplus: bool, want_delta: bool) -> list[torch.Tensor]:
    """The gradients of polar's x and delta; an empty tensor where nobody wants that of delta."""
    B, H, T, D = x.shape
    dx, parts = new_rows(x), None
    if want_delta:
        parts = delta.new_empty(len(delta), B // len(delta), H, triton.cdiv(T, POLAR_ROWS), D)
    launch_polar(polar_backward_kernel, readable(x), readable(delta), base, softplus,
                 readable(dy), dx, parts)
    return [dx, parts.sum(dim=(1, 3)) if want_delta else x.new_empty(0, dtype=torch.float32)]


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
def _(dy, x, delta, base, softplus, want_delta):
    return [new_rows(x), x.new_empty(delta.shape if want_delta else 0, dtype=torch.float32)]


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
    want_delta = ctx.needs_input_grad[1]
    dx, ddelta = polar_backward(dy, *ctx.saved_tensors, ctx.base, ctx.softplus, want_delta)
    return dx, ddelta if want_delta else None, None, None


attention_forward.register_autograd(attention_gradient, setup_context=save_attention)
polar.register_autograd(polar_gradient, setup_context=save_polar)
attention_backward.register_autograd(no_second_gradient)
polar_backward.register_autograd(no_second_gradient)
for operator in (attention_forward, attention_backward, polar, polar_backward):
    operator.register_vmap(fold_seeds(operator))


# --------------------------------------------------------------------------------------------------
# python kernels.py

if __name__ == '__main__':
    # engine.bench takes this copy, as an operator can be registered only once
    sys.modules['kernels'] = sys.modules['__main__']
    from engine import bench, config
    config.run(lambda argv: bench.kernel_main(__doc__, argv))
