"""Fused causal attention for PoPE, ViPE and Toeplitz biases, and PRISM's scan: Triton kernels beside their references (the scan's: pe.cursor_scan).

    python kernels.py               checks the kernels against the references in float64; with a GPU, prints the benchmark

Queries t and keys s <= t count from 0. One forward and two backward kernels, with a compile-time switch for every part, compute

    x_ts = row_t col_s a_ts / sqrt(D) + bias_(t-s)        a_ts = <q_t, k_s>, or sum_c q_tc k_sc cos((s - t) theta_c + delta_c)
    y_t  = sum_s p_ts v_s,    e_t = sum_s p_ts (t - s)    p_t = softmax(x_t)

in memory that grows with T, block by block with a running maximum and sum (FlashAttention: Dao et al. 2022; Milakov & Gimelshein 2018), accumulating
in float32. Gradients recompute the blocks from the stored log-sum-exp, in two kernels, one for keys and one for queries, so that every
sum has one order. In products of blocks [M, N] x D that is 2 forward and 7 backward (flash attention with atomic additions needs 5), for
PoPE 3 and 11 (8): divided by the tensor cores' rate, this is a lower bound on the time. No second-order gradients, no forward mode.
Without a GPU the kernels run in Triton's interpreter.
"""
from __future__ import annotations                                # tl.constexpr is read only where there is Triton

import math
import os
import sys

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')
try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:                                                # Triton is for Linux; the references work everywhere
    triton, jit = None, lambda function: function

LOG2E = 1.4426950408889634
STEP, FINE = 16, 128                                               # the angle tables: every 16th position, and offsets 0..127
EPS, CHUNK = 1e-8, 16                                              # of the sharpened histograms; steps of the scan between checkpoints


# ---------------------------------------------------------------------------------------------------------------------
# references: any dtype, O(T^2) memory

def attention_reference(q, k, v, delta=None, base=0.0, row=None, col=None, bias=None):
    """The equations above, as they stand: (y [B, H, T, D], e [B, H, T]).

    q, k, v [B, H, T, D]; base > 0 makes a_ts PoPE's, with delta [G, H, D]; row [G, H, T]; col [B, H, T]; bias [G, H, T], by the distance t - s.
    G divides B: the b-th sequence uses entry b G // B (one for each seed of a run; otherwise G = 1).
    """
    B, H, T, D = q.shape
    each = lambda x: x.repeat_interleave(B // len(x), dim=0)                            # [G, ..] -> [B, ..]
    pos, scale = torch.arange(T, device=q.device), D ** -0.5
    if base:
        angle = pos[:, None] * base ** (-torch.arange(D, device=q.device, dtype=torch.float64) / D)             # (T, D)
        turn_q = torch.cat([angle.cos(), angle.sin()], dim=-1).to(q.dtype)
        phase = angle.to(torch.promote_types(q.dtype, torch.float32)) + each(delta)[:, :, None]                 # (B, H, T, D)
        turn_k = torch.cat([phase.cos(), phase.sin()], dim=-1).to(k.dtype)
        q, k = torch.cat([q, q], dim=-1) * turn_q, torch.cat([k, k], dim=-1) * turn_k
    x = q @ k.transpose(-2, -1) * scale
    distance = pos[:, None] - pos                                                       # (T, T)
    if row is not None:
        x = x * each(row)[..., None] * col[..., None, :]
    if bias is not None:
        x = x + each(bias)[..., distance.clamp(min=0)]
    p = x.masked_fill(distance < 0, -math.inf).softmax(dim=-1)                          # (B, H, T, T)
    return p @ v, (p * distance).sum(dim=-1)


def pope_attention_reference(q, k, v, delta, base=10000.0):
    """PoPE eq. 3-6: logit_ts = sum_c mu(q_t)_c mu(k_s)_c cos((s - t) theta_c + delta_c) / sqrt(D), mu = softplus, theta_c = base^(-c/D)."""
    return attention_reference(F.softplus(q), F.softplus(k), v, delta[None], base)[0]


def vipe_attention_reference(q, k, v, u, s=1.0):
    """ViPE eq. 7-9: logit_ni = s log(n) (1 + <u, k_i>) <q_n, k_i> / sqrt(D), n from 1; (y, expected distance)."""
    row, col = vipe_factors(q, k, u, s)
    return attention_reference(q, k, v, row=row, col=col)


def bias_attention_reference(q, k, v, bias):
    """logit_ts = <q_t, k_s> / sqrt(D) + bias[h, t - s]."""
    return attention_reference(q, k, v, bias=bias[None])[0]


def check_scan(reset, step, gamma, table, copy):
    """ValueError if shapes do not fit, or if a cursor can leave the offsets of the table."""
    (B, C, T), P = reset.shape, len(table) // 2
    for name, x, shape in (('step', step, (B, C, T, 3)), ('copy', copy, (B, C, T, T + 1)), ('gamma', gamma, (*gamma.shape[:-1], C) if gamma is not None else ())):
        if x is not None and x.shape != shape:
            raise ValueError(f'{name} must be {[*shape]}, not {[*x.shape]}')
    if table.dim() != 2 or len(table) % 2 == 0:
        raise ValueError(f'the table must be [2P+1, d_pe], not {[*table.shape]}')
    if P < T:
        raise ValueError(f'a cursor can move {T} places in {T} steps: the table must hold offsets -{T}..{T} at least, not -{P}..{P}')


# ---------------------------------------------------------------------------------------------------------------------
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


# ---------------------------------------------------------------------------------------------------------------------
# what the user calls

def pope_attention(q, k, v, delta, base=10000.0):
    """pope_attention_reference by the kernels: q, k, v [B, H, T, D], delta [H, D] used as given -> [B, H, T, D].

    Nothing 2D-wide reaches memory. softplus takes a pass of its own before the kernels, and again before the backward ones: inside them it would
    be repeated for every block of queries, on the unit that also has the exponentials of the softmax. So mu lives only as long as they run.
    """
    return attention(q, k, v, delta=delta[None], base=base, softplus=True)[0]


def vipe_attention(q, k, v, u, s=1.0):
    """vipe_attention_reference by the kernels: q, k, v [B, H, T, D], u [H, D], s a number or tensor -> (y [B, H, T, D], E[distance] [B, H, T], float32)."""
    row, col = vipe_factors(q, k, u, s)
    return attention(q, k, v, row=row, col=col, distance=True)


def bias_attention(q, k, v, bias):
    """bias_attention_reference by the kernels: q, k, v [B, H, T, D], bias [H, T] by the distance t - s -> [B, H, T, D].

    ALiBi, T5 and any b(t - s). FIRE's bias depends on t as well: it takes PyTorch's attention with a [H, T, T] mask.
    """
    return attention(q, k, v, bias=bias[None])[0]


def vipe_factors(q, k, u, s):
    """row [1, H, T] = s log(n), n from 1, and col [B, H, T] = 1 + <u, k_i>."""
    n = torch.arange(1, q.shape[2] + 1, device=q.device).to(torch.promote_types(q.dtype, torch.float32))
    row = (s * n.log()).expand(1, q.shape[1], -1)
    return row, 1 + (k.to(n.dtype) * u[:, None].to(n.dtype)).sum(dim=-1)                # a product of matrices could be cast by autocast


def attention(q, k, v, delta=None, base=0.0, row=None, col=None, bias=None, softplus=False, distance=False):
    """attention_reference by the kernels, with softplus(q) and softplus(k) for q and k if `softplus`.

    (y [B, H, T, D], e [B, H, T] in float32, or None if `distance` is not asked for). RuntimeError without Triton; ValueError if types or shapes do not fit.
    Gradients for every tensor, by backward() and autograd.grad (torch.func.grad needs the reference).
    """
    if triton is None:
        raise RuntimeError('the kernels need Triton, which is for Linux: pip install triton; kernels.attention_reference needs nothing')
    if (q.dtype, k.dtype) != (v.dtype, v.dtype) or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'q, k and v must all be float32, bfloat16 or float16, not {q.dtype}, {k.dtype}, {v.dtype}')
    if not q.shape == k.shape == v.shape or q.dim() != 4 or not 1 <= q.shape[3] <= 128:
        raise ValueError(f'q, k and v must all be [B, H, T, D], D from 1 to 128, not {[*q.shape]}, {[*k.shape]}, {[*v.shape]}')
    if (delta is None) != (not base) or (row is None) != (col is None):
        raise ValueError('delta goes with base, row with col')
    (B, H, T, D), G = q.shape, next((len(x) for x in (delta, row, bias) if x is not None), 1)
    for name, x, shape in (('delta', delta, (G, H, D)), ('row', row, (G, H, T)), ('col', col, (B, H, T)), ('bias', bias, (G, H, T))):
        if x is not None and (x.shape != shape or x.device != q.device):
            raise ValueError(f'{name} must be {[*shape]} on {q.device}, not {[*x.shape]} on {x.device}')
    if B % G:
        raise ValueError(f'{G} groups do not divide a batch of {B}')
    fp32 = [None if x is None else x.float() for x in (delta, row, col, bias)]
    y, e, _ = attention_forward(q, k, v, *fp32, base, softplus, distance)
    return y, e if distance else None


def cursor_scan(reset, step, gamma, table, copy=None):
    """pe.cursor_scan by the kernels, in float32: [B, C, T, d_pe]. Neither the histograms [B, C, T, 2P+1] nor a loop over T outside the kernel exists.

    gamma may also be [G, C], G dividing B: a row for each seed of a run. Gradients for every input, that of the table by atomic additions.
    RuntimeError without Triton; ValueError if shapes do not fit or the support is too small for the sequence.
    """
    if triton is None:
        raise RuntimeError('the kernels need Triton, which is for Linux: pip install triton; pe.cursor_scan needs nothing')
    gamma = gamma[None] if gamma is not None and gamma.dim() == 1 else gamma
    check_scan(reset, step, gamma, table, copy)
    if gamma is not None and len(reset) % len(gamma):
        raise ValueError(f'{len(gamma)} rows of gamma do not divide a batch of {len(reset)}')
    return scan_forward(*(None if x is None else x.float() for x in (reset, step, gamma, table, copy)))[0]


# ---------------------------------------------------------------------------------------------------------------------
# pieces of the kernels. Blocks of queries have M rows, t = t0..t0+M-1, blocks of keys N, s = s0..s0+N-1; BD is D padded to a power of two

@jit
def dot(a, b, sum, PRECISION: tl.constexpr):
    """sum + a b in float32. Triton's interpreter does not know how to multiply bfloat16, so there the rounded factors are widened."""
    if PRECISION == 'interpreter':
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum)
    return tl.dot(a, b, sum, input_precision=PRECISION)


@jit
def load_rows(X, start, stride, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Rows start..start+ROWS-1 of X [T, D], zeros outside."""
    i, c = tl.arange(0, ROWS), tl.arange(0, BD)
    X += tl.full([], start, tl.int64) * stride
    return tl.load(X + i[:, None] * stride + c[None, :], mask=(i[:, None] < T - start) & (c[None, :] < D), other=0.0)


@jit
def store_rows(X, x, start, stride, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """x to rows start.. of X [T, D]."""
    i, c = tl.arange(0, ROWS), tl.arange(0, BD)
    X += tl.full([], start, tl.int64) * stride
    tl.store(X + i[:, None] * stride + c[None, :], x.to(X.dtype.element_ty), mask=(i[:, None] < T - start) & (c[None, :] < D))


@jit
def cos_sin(ANGLES, start, delta, BD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, FINE: tl.constexpr):
    """cos and sin of (start + i) theta_c + delta_c [ROWS, BD], by angle addition from the tables for offsets i and for starts.

    Four multiplications for an element; in-kernel sines would take the special-function unit longer than the tensor cores take for the block,
    and a table of all positions would be read from L2, where this one stays in L1.
    """
    i, c = tl.arange(0, ROWS), tl.arange(0, BD)
    fine_cos = tl.load(ANGLES + i[:, None] * (2 * BD) + c[None, :])
    fine_sin = tl.load(ANGLES + i[:, None] * (2 * BD) + BD + c[None, :])
    at = ANGLES + (FINE + start // STEP) * (2 * BD) + c
    cos, sin = tl.load(at), tl.load(at + BD)
    cos_d, sin_d = tl.cos(delta), tl.sin(delta)
    cos, sin = cos * cos_d - sin * sin_d, sin * cos_d + cos * sin_d
    return fine_cos * cos[None, :] - fine_sin * sin[None, :], fine_sin * cos[None, :] + fine_cos * sin[None, :]


@jit
def load_rotated(X, start, stride, ANGLES, delta, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, POPE: tl.constexpr,
                 STEP: tl.constexpr, FINE: tl.constexpr):
    """Rows of q or k [ROWS, BD] times cos and sin of their phases; twice the plain rows without PoPE, where the second is not used."""
    x = load_rows(X, start, stride, T, D, BD, ROWS)
    if POPE:
        cos, sin = cos_sin(ANGLES, start, delta, BD, ROWS, STEP, FINE)
        return (x * cos).to(x.dtype), (x * sin).to(x.dtype)
    return x, x


@jit
def products(q_cos, q_sin, k_cos, k_sin, POPE: tl.constexpr, PRECISION: tl.constexpr):
    """a_ts [M, N]."""
    a = dot(q_cos, tl.trans(k_cos), None, PRECISION)
    if POPE:
        a = dot(q_sin, tl.trans(k_sin), a, PRECISION)
    return a


@jit
def logits(a, row, col, BIAS, t, s, T, MASK: tl.constexpr, RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr):
    """x_ts in units of log 2 [M, N]; row [M] has the factors of a query, col [M] those of a key, BIAS is in units of log 2."""
    x = a * row[:, None]
    if RESCALE:
        x = x * col[None, :]
    if TOEPLITZ:
        d = t[:, None] - s[None, :]
        x += tl.load(BIAS + d, mask=(d >= 0) & (d < T), other=0.0)
    if MASK:
        x = tl.where(t[:, None] >= s[None, :], x, float('-inf'))
    return x


# ---------------------------------------------------------------------------------------------------------------------
# forward: a program for each block of queries, head and sequence

@jit
def forward_kernel(Q, K, V, Y, E, LSE, DELTA, ROW, COL, BIAS, ANGLES, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
                   H, T, per_group, scale, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, POPE: tl.constexpr,
                   RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr, DISTANCE: tl.constexpr, PRECISION: tl.constexpr,
                   STEP: tl.constexpr, FINE: tl.constexpr):
    """For a block of queries: y_t, e_t and the log-sum-exp of x_t."""
    bh = (tl.program_id(0) // tl.cdiv(T, M)).to(tl.int64)
    t0 = (tl.cdiv(T, M) - 1 - tl.program_id(0) % tl.cdiv(T, M)) * M                     # the longest rows first
    b, h = bh // H, bh % H
    gh = b // per_group * H + h
    t, c = t0 + tl.arange(0, M), tl.arange(0, BD)
    K, V, COL, BIAS = K + b * k_b + h * k_h, V + b * v_b + h * v_h, COL + bh * T, BIAS + gh * T
    delta = tl.zeros([BD], tl.float32)
    q_cos, q_sin = load_rotated(Q + b * q_b + h * q_h, t0, q_t, ANGLES, delta, T, D, BD, M, POPE, STEP, FINE)
    if POPE:
        delta = tl.load(DELTA + gh * D + c, mask=c < D, other=0.0)
    row = tl.full([M], scale * 1.4426950408889634, tl.float32)
    if RESCALE:
        row = row * tl.load(ROW + gh * T + t, mask=t < T, other=0.0)
    y, e = tl.zeros([M, BD], tl.float32), tl.zeros([M], tl.float32)
    total, largest = tl.zeros([M], tl.float32), tl.full([M], float('-inf'), tl.float32)
    # blocks of keys that all queries see, then those on the diagonal
    y, e, total, largest = forward_blocks(y, e, total, largest, 0, t0, q_cos, q_sin, K, V, row, COL, BIAS, ANGLES, delta, t, k_t, v_t, T,
                                          D, BD, N, POPE, RESCALE, TOEPLITZ, DISTANCE, False, PRECISION, STEP, FINE)
    y, e, total, largest = forward_blocks(y, e, total, largest, t0, min(t0 + M, T), q_cos, q_sin, K, V, row, COL, BIAS, ANGLES, delta, t, k_t, v_t, T,
                                          D, BD, N, POPE, RESCALE, TOEPLITZ, DISTANCE, True, PRECISION, STEP, FINE)
    store_rows(Y + b * y_b + h * y_h, y / total[:, None], t0, y_t, T, D, BD, M)
    tl.store(LSE + bh * T + t, largest + tl.log2(total), mask=t < T)
    if DISTANCE:
        tl.store(E + bh * T + t, e / total, mask=t < T)


@jit
def forward_blocks(y, e, total, largest, start, end, q_cos, q_sin, K, V, row, COL, BIAS, ANGLES, delta, t, k_t, v_t, T, D: tl.constexpr,
                   BD: tl.constexpr, N: tl.constexpr, POPE: tl.constexpr, RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr,
                   DISTANCE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, FINE: tl.constexpr):
    """Add the keys start..end-1 to the running sums: y and e, weighted by 2^(x - largest), and the total of the weights."""
    col = tl.zeros([N], tl.float32)
    for s0 in range(start, end, N):
        s = s0 + tl.arange(0, N)
        k_cos, k_sin = load_rotated(K, s0, k_t, ANGLES, delta, T, D, BD, N, POPE, STEP, FINE)
        if RESCALE:
            col = tl.load(COL + s, mask=s < T, other=0.0)
        x = logits(products(q_cos, q_sin, k_cos, k_sin, POPE, PRECISION), row, col, BIAS, t, s, T, MASK, RESCALE, TOEPLITZ)
        new = tl.maximum(largest, tl.max(x, 1))
        zero = tl.where(new == float('-inf'), 0.0, new)                                 # no key so far: the bias may be -inf
        p, shrink = tl.exp2(x - zero[:, None]), tl.exp2(largest - zero)
        here = tl.sum(p, 1)
        if DISTANCE:                                                                    # sum_s p (t - s), s = s0 + j
            e = e * shrink + (t - s0) * here - tl.sum(p * tl.arange(0, N)[None, :], 1)
        v = load_rows(V, s0, v_t, T, D, BD, N)
        y = dot(p.to(v.dtype), v, y * shrink[:, None], PRECISION)
        total, largest = total * shrink + here, new
    return y, e, total, largest


# ---------------------------------------------------------------------------------------------------------------------
# backward: with g_ts = dloss/dx_ts = p_ts (<dy_t, v_s> + de_t (t - s) - mean_t), mean_t = <dy_t, y_t> + de_t e_t,
# and da_ts = g_ts row_t col_s / sqrt(D)

@jit
def mean_kernel(Y, DY, E, DE, MEAN, y_b, y_h, y_t, dy_b, dy_h, dy_t, H, T, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
                DISTANCE: tl.constexpr):
    """MEAN [B, H, T]."""
    t0, bh = tl.program_id(0) % tl.cdiv(T, M) * M, (tl.program_id(0) // tl.cdiv(T, M)).to(tl.int64)
    b, h, t = bh // H, bh % H, t0 + tl.arange(0, M)
    y = load_rows(Y + b * y_b + h * y_h, t0, y_t, T, D, BD, M).to(tl.float32)
    dy = load_rows(DY + b * dy_b + h * dy_h, t0, dy_t, T, D, BD, M).to(tl.float32)
    mean = tl.sum(y * dy, 1)
    if DISTANCE:
        mean += tl.load(E + bh * T + t, mask=t < T, other=0.0) * tl.load(DE + bh * T + t, mask=t < T, other=0.0)
    tl.store(MEAN + bh * T + t, mean, mask=t < T)


@jit
def block_gradient(a, x, lse, mean, dy, v, de, t, s, DISTANCE: tl.constexpr, PRECISION: tl.constexpr):
    """p_ts and g_ts [M, N]."""
    p = tl.exp2(x - lse[:, None])
    dp = dot(dy, tl.trans(v), None, PRECISION)
    if DISTANCE:
        dp += de[:, None] * (t[:, None] - s[None, :])
    return p, p * (dp - mean[:, None])


@jit
def keys_kernel(Q, K, V, DY, DK, DV, DDELTA, DCOL, DBIAS, DE, LSE, MEAN, DELTA, ROW, COL, BIAS, ANGLES, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
                dy_b, dy_h, dy_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, H, T, per_group, scale, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
                N: tl.constexpr, POPE: tl.constexpr, RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr, DISTANCE: tl.constexpr,
                PRECISION: tl.constexpr, STEP: tl.constexpr, FINE: tl.constexpr):
    """For a block of keys: dk_s, dv_s, dcol_s, its part of ddelta, and dbias, which all blocks add to."""
    s0, bh = tl.program_id(0) % tl.cdiv(T, N) * N, (tl.program_id(0) // tl.cdiv(T, N)).to(tl.int64)
    b, h = bh // H, bh % H
    gh = b // per_group * H + h
    s, c = s0 + tl.arange(0, N), tl.arange(0, BD)
    Q, DY, ROW, BIAS, DBIAS = Q + b * q_b + h * q_h, DY + b * dy_b + h * dy_h, ROW + gh * T, BIAS + gh * T, DBIAS + gh * T
    LSE, MEAN, DE = LSE + bh * T, MEAN + bh * T, DE + bh * T
    k = load_rows(K + b * k_b + h * k_h, s0, k_t, T, D, BD, N)
    v = load_rows(V + b * v_b + h * v_h, s0, v_t, T, D, BD, N)
    k_cos, k_sin, col = k, k, tl.zeros([N], tl.float32)
    if POPE:
        cos, sin = cos_sin(ANGLES, s0, tl.load(DELTA + gh * D + c, mask=c < D, other=0.0), BD, N, STEP, FINE)
        k_cos, k_sin = (k * cos).to(k.dtype), (k * sin).to(k.dtype)
    if RESCALE:
        col = tl.load(COL + bh * T + s, mask=s < T, other=0.0)
    dk_cos, dk_sin, dv = tl.zeros([N, BD], tl.float32), tl.zeros([N, BD], tl.float32), tl.zeros([N, BD], tl.float32)
    dcol, end = tl.zeros([N], tl.float32), min(s0 + N, T)
    dk_cos, dk_sin, dv, dcol = keys_blocks(dk_cos, dk_sin, dv, dcol, s0, end, k_cos, k_sin, v, col, Q, DY, DBIAS, DE, LSE, MEAN, ROW, BIAS, ANGLES,
                                           s, q_t, dy_t, T, scale, D, BD, M, N, POPE, RESCALE, TOEPLITZ, DISTANCE, True, PRECISION, STEP, FINE)
    dk_cos, dk_sin, dv, dcol = keys_blocks(dk_cos, dk_sin, dv, dcol, s0 + N, T, k_cos, k_sin, v, col, Q, DY, DBIAS, DE, LSE, MEAN, ROW, BIAS, ANGLES,
                                           s, q_t, dy_t, T, scale, D, BD, M, N, POPE, RESCALE, TOEPLITZ, DISTANCE, False, PRECISION, STEP, FINE)
    dk = dk_cos
    if POPE:                                                                            # k' = k (cos phi, sin phi), phi = s theta + delta
        cos, sin = cos_sin(ANGLES, s0, tl.load(DELTA + gh * D + c, mask=c < D, other=0.0), BD, N, STEP, FINE)
        dk = dk_cos * cos + dk_sin * sin
        ddelta = tl.sum(k * (dk_sin * cos - dk_cos * sin), 0)
        tl.store(DDELTA + (bh * tl.cdiv(T, N) + s0 // N) * D + c, ddelta, mask=c < D)
    if RESCALE:
        tl.store(DCOL + bh * T + s, dcol, mask=s < T)
    store_rows(DK + b * dk_b + h * dk_h, dk, s0, dk_t, T, D, BD, N)
    store_rows(DV + b * dv_b + h * dv_h, dv, s0, dv_t, T, D, BD, N)


@jit
def keys_blocks(dk_cos, dk_sin, dv, dcol, start, end, k_cos, k_sin, v, col, Q, DY, DBIAS, DE, LSE, MEAN, ROW, BIAS, ANGLES, s, q_t, dy_t, T, scale,
                D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, POPE: tl.constexpr, RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr,
                DISTANCE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, FINE: tl.constexpr):
    """Add what the queries start..end-1 give."""
    de = tl.zeros([M], tl.float32)
    for t0 in range(start, end, M):
        t = t0 + tl.arange(0, M)
        q_cos, q_sin = load_rotated(Q, t0, q_t, ANGLES, tl.zeros([BD], tl.float32), T, D, BD, M, POPE, STEP, FINE)
        dy = load_rows(DY, t0, dy_t, T, D, BD, M)
        lse = tl.load(LSE + t, mask=t < T, other=float('inf'))                          # past the end: p = 0
        mean = tl.load(MEAN + t, mask=t < T, other=0.0)
        row = tl.full([M], scale, tl.float32)
        if RESCALE:
            row = row * tl.load(ROW + t, mask=t < T, other=0.0)
        if DISTANCE:
            de = tl.load(DE + t, mask=t < T, other=0.0)
        a = products(q_cos, q_sin, k_cos, k_sin, POPE, PRECISION)
        x = logits(a, row * 1.4426950408889634, col, BIAS, t, s, T, MASK, RESCALE, TOEPLITZ)
        p, g = block_gradient(a, x, lse, mean, dy, v, de, t, s, DISTANCE, PRECISION)
        dv = dot(tl.trans(p.to(dy.dtype)), dy, dv, PRECISION)
        if TOEPLITZ:
            add_diagonals(DBIAS, g, t0 - tl.min(s, 0), T, M, N)
        da = g * row[:, None]
        if RESCALE:
            dcol += tl.sum(da * a, 0)
            da = da * col[None, :]
        da = da.to(q_cos.dtype)
        dk_cos = dot(tl.trans(da), q_cos, dk_cos, PRECISION)
        if POPE:
            dk_sin = dot(tl.trans(da), q_sin, dk_sin, PRECISION)
    return dk_cos, dk_sin, dv, dcol


@jit
def add_diagonals(DBIAS, g, apart, T, M: tl.constexpr, N: tl.constexpr):
    """DBIAS[t - s] += g_ts, g [M, N], M <= N, t0 - s0 = apart.

    With row i turned right by i, column r holds distance apart + r in the rows from r on, and apart + r - N in those before. Two sums of a
    column and 2 N atomic additions for a block, not M N; the order of these is the only thing in this file that differs from run to run.
    """
    i, r = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    turned = tl.gather(g, (i - r + N) % N, 1)
    d = apart + tl.arange(0, N)
    tl.atomic_add(DBIAS + d, tl.sum(tl.where(i >= r, turned, 0.0), 0), mask=(d >= 0) & (d < T), sem='relaxed')
    tl.atomic_add(DBIAS + d - N, tl.sum(tl.where(i < r, turned, 0.0), 0), mask=(d >= N) & (d - N < T), sem='relaxed')


@jit
def queries_kernel(Q, K, V, DY, DQ, DROW, DE, LSE, MEAN, DELTA, ROW, COL, BIAS, ANGLES, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
                   dy_b, dy_h, dy_t, dq_b, dq_h, dq_t, H, T, per_group, scale, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                   POPE: tl.constexpr, RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr, DISTANCE: tl.constexpr, PRECISION: tl.constexpr,
                   STEP: tl.constexpr, FINE: tl.constexpr):
    """For a block of queries: dq_t and drow_t."""
    bh = (tl.program_id(0) // tl.cdiv(T, M)).to(tl.int64)
    t0 = (tl.cdiv(T, M) - 1 - tl.program_id(0) % tl.cdiv(T, M)) * M
    b, h = bh // H, bh % H
    gh = b // per_group * H + h
    t, c = t0 + tl.arange(0, M), tl.arange(0, BD)
    K, V, COL, BIAS = K + b * k_b + h * k_h, V + b * v_b + h * v_h, COL + bh * T, BIAS + gh * T
    delta, de, row = tl.zeros([BD], tl.float32), tl.zeros([M], tl.float32), tl.full([M], scale, tl.float32)
    q_cos, q_sin = load_rotated(Q + b * q_b + h * q_h, t0, q_t, ANGLES, delta, T, D, BD, M, POPE, STEP, FINE)
    dy = load_rows(DY + b * dy_b + h * dy_h, t0, dy_t, T, D, BD, M)
    lse = tl.load(LSE + bh * T + t, mask=t < T, other=float('inf'))
    mean = tl.load(MEAN + bh * T + t, mask=t < T, other=0.0)
    if POPE:
        delta = tl.load(DELTA + gh * D + c, mask=c < D, other=0.0)
    if RESCALE:
        row = row * tl.load(ROW + gh * T + t, mask=t < T, other=0.0)
    if DISTANCE:
        de = tl.load(DE + bh * T + t, mask=t < T, other=0.0)
    dq_cos, dq_sin, drow = tl.zeros([M, BD], tl.float32), tl.zeros([M, BD], tl.float32), tl.zeros([M], tl.float32)
    dq_cos, dq_sin, drow = queries_blocks(dq_cos, dq_sin, drow, 0, t0, q_cos, q_sin, dy, lse, mean, de, row, K, V, COL, BIAS, ANGLES, delta, t, k_t, v_t, T,
                                          D, BD, N, POPE, RESCALE, TOEPLITZ, DISTANCE, False, PRECISION, STEP, FINE)
    dq_cos, dq_sin, drow = queries_blocks(dq_cos, dq_sin, drow, t0, min(t0 + M, T), q_cos, q_sin, dy, lse, mean, de, row, K, V, COL, BIAS, ANGLES, delta, t,
                                          k_t, v_t, T, D, BD, N, POPE, RESCALE, TOEPLITZ, DISTANCE, True, PRECISION, STEP, FINE)
    dq = dq_cos
    if POPE:
        cos, sin = cos_sin(ANGLES, t0, tl.zeros([BD], tl.float32), BD, M, STEP, FINE)
        dq = dq_cos * cos + dq_sin * sin
    if RESCALE:                                                                         # dq_cos has no row factor yet
        tl.store(DROW + bh * T + t, drow * scale, mask=t < T)
    store_rows(DQ + b * dq_b + h * dq_h, dq * row[:, None], t0, dq_t, T, D, BD, M)


@jit
def queries_blocks(dq_cos, dq_sin, drow, start, end, q_cos, q_sin, dy, lse, mean, de, row, K, V, COL, BIAS, ANGLES, delta, t, k_t, v_t, T, D: tl.constexpr,
                   BD: tl.constexpr, N: tl.constexpr, POPE: tl.constexpr, RESCALE: tl.constexpr, TOEPLITZ: tl.constexpr,
                   DISTANCE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, FINE: tl.constexpr):
    """Add what the keys start..end-1 give, without the query's own factor row_t / sqrt(D)."""
    col = tl.zeros([N], tl.float32)
    for s0 in range(start, end, N):
        s = s0 + tl.arange(0, N)
        k_cos, k_sin = load_rotated(K, s0, k_t, ANGLES, delta, T, D, BD, N, POPE, STEP, FINE)
        v = load_rows(V, s0, v_t, T, D, BD, N)
        if RESCALE:
            col = tl.load(COL + s, mask=s < T, other=0.0)
        a = products(q_cos, q_sin, k_cos, k_sin, POPE, PRECISION)
        x = logits(a, row * 1.4426950408889634, col, BIAS, t, s, T, MASK, RESCALE, TOEPLITZ)
        _, g = block_gradient(a, x, lse, mean, dy, v, de, t, s, DISTANCE, PRECISION)
        if RESCALE:
            g = g * col[None, :]
            drow += tl.sum(g * a, 1)
        g = g.to(k_cos.dtype)
        dq_cos = dot(g, k_cos, dq_cos, PRECISION)
        if POPE:
            dq_sin = dot(g, k_sin, dq_sin, PRECISION)
    return dq_cos, dq_sin, drow


# ---------------------------------------------------------------------------------------------------------------------
# launching, gradients, torch.compile and vmap

def angle_table(base, D, BD, T, device):
    """cos and sin of t theta_c [rows, 2, BD], float32: rows t = 0..FINE-1, then t = 0, STEP, 2 STEP, .. below T + FINE. Angles in float64."""
    t = torch.cat([torch.arange(FINE, device=device), torch.arange(0, T + FINE, STEP, device=device)])
    theta = base ** (-torch.arange(BD, device=device, dtype=torch.float64) / D)
    angle = t[:, None] * theta
    return torch.stack([angle.cos(), angle.sin()], dim=1).float()


def blocks(kernel, D, T, dtype, pope):
    """M, N, warps, stages. Chosen by compiling for an H200 and taking the largest blocks whose registers do not spill (PoPE's backward at D = 128
    spills some hundred bytes a thread in every shape that uses the tensor cores well); not yet tuned by time.
    """
    narrow = D <= 64
    if dtype == torch.float32:
        M, N, warps, stages = 32 if narrow or kernel != 'keys' else 16, 32 if narrow or kernel == 'keys' else 16, 8, 1
    elif kernel == 'forward':
        M, N, warps, stages = 128, 64 if narrow or not pope else 32, 8, 2 if pope else 3
    elif kernel == 'keys':
        M, N, warps, stages = 64 if narrow and not pope else 32, 64, 8, 2
    else:
        M, N, warps, stages = 64, 64, 8, 2
    fit = max(16, triton.next_power_of_2(T))
    return min(M, fit), min(N, fit), warps, stages


def tables(like, delta, row, col, bias, base, D, BD, T):
    """What the kernels read besides q, k, v: DELTA, ROW, COL, BIAS in units of log 2, ANGLES; something to point at where there is none."""
    angles = angle_table(base, D, BD, T, like.device) if base else None
    return [like if x is None else x.contiguous() for x in (delta, row, col, None if bias is None else bias * LOG2E, angles)]


def switches(q, base, row, bias, distance):
    """The compile-time arguments that all kernels share."""
    D = q.shape[3]
    precision = 'ieee' if q.dtype == torch.float32 and torch.get_float32_matmul_precision() == 'highest' else 'tf32'
    if os.environ.get('TRITON_INTERPRET') == '1':
        precision = 'interpreter'
    return dict(D=D, BD=max(16, triton.next_power_of_2(D)), POPE=base > 0, RESCALE=row is not None, TOEPLITZ=bias is not None, DISTANCE=distance,
                PRECISION=precision, STEP=STEP, FINE=FINE)


def magnitudes(q, k, softplus):
    """q and k as the kernels take them."""
    return (F.softplus(q).to(q.dtype), F.softplus(k).to(k.dtype)) if softplus else (q, k)           # autocast on CUDA makes it float32


def rows_contiguous(x):
    """x with its last axis contiguous, as the kernels read it; the other axes may have any strides."""
    return x if x.stride(3) == 1 else x.contiguous()


def like_output(x):
    """An uninitialized [B, H, T, D] that lies in memory as [B, T, H, D]: the projection after attention needs no copy."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


@torch.library.custom_op('nanope::attention', mutates_args=())
def attention_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor | None, row: torch.Tensor | None,
                      col: torch.Tensor | None, bias: torch.Tensor | None, base: float, softplus: bool,
                      distance: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, e, and the log-sum-exp of x in units of log 2 [B, H, T]."""
    (B, H, T, D), each = q.shape, [x for x in (delta, row, bias) if x is not None]
    q, k, v = map(rows_contiguous, (*magnitudes(q, k, softplus), v))
    y, lse = like_output(q), q.new_empty(B, H, T, dtype=torch.float32)
    e = torch.empty_like(lse) if distance else lse.new_empty(0)
    on = switches(q, base, row, bias, distance)
    M, N, warps, stages = blocks('forward', D, T, q.dtype, base > 0)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(T, M) * B * H,)](
            q, k, v, y, e, lse, *tables(lse, delta, row, col, bias, base, D, on['BD'], T), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *y.stride()[:3], H, T, B // len(each[0]) if each else B, D ** -0.5, M=M, N=N, **on, num_warps=warps, num_stages=stages)
    return y, e, lse


@torch.library.custom_op('nanope::attention_backward', mutates_args=())
def attention_backward(dy: torch.Tensor, de: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, delta: torch.Tensor | None,
                       row: torch.Tensor | None, col: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor, e: torch.Tensor,
                       lse: torch.Tensor, base: float, softplus: bool) -> list[torch.Tensor]:
    """The gradients of q, k, v, delta, row, col, bias; empty tensors for those that are None."""
    (B, H, T, D), each = q.shape, [x for x in (delta, row, bias) if x is not None]
    q, k = magnitudes(q, k, softplus)
    q, k, v, y, dy, e, lse = *map(rows_contiguous, (q, k, v, y, dy)), e.contiguous(), lse.contiguous()
    on = switches(q, base, row, bias, de is not None)
    M, N, warps, stages = blocks('keys', D, T, q.dtype, base > 0)
    mean, dq, dk, dv, none = torch.empty_like(lse), like_output(q), like_output(k), like_output(v), lse.new_empty(0)
    dcol, drow = (lse.new_empty(lse.shape) if row is not None else none for _ in range(2))
    ddelta = lse.new_empty(B, H, triton.cdiv(T, N), D) if base else none
    dbias = lse.new_zeros(bias.shape) if bias is not None else none
    de = de.float().contiguous() if de is not None else none
    with torch.cuda.device_of(q):
        mean_kernel[(triton.cdiv(T, 64) * B * H,)](y, dy, e, de, mean, *y.stride()[:3], *dy.stride()[:3], H, T, D=D, BD=on['BD'], M=64,
                                               DISTANCE=on['DISTANCE'])
        inputs, strides = tables(lse, delta, row, col, bias, base, D, on['BD'], T), (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3])
        rest = (H, T, B // len(each[0]) if each else B, D ** -0.5)
        keys_kernel[(triton.cdiv(T, N) * B * H,)](q, k, v, dy, dk, dv, ddelta, dcol, dbias, de, lse, mean, *inputs, *strides, *dk.stride()[:3],
                                              *dv.stride()[:3], *rest, M=M, N=N, **on, num_warps=warps, num_stages=stages)
        M, N, warps, stages = blocks('queries', D, T, q.dtype, base > 0)
        queries_kernel[(triton.cdiv(T, M) * B * H,)](q, k, v, dy, dq, drow, de, lse, mean, *inputs, *strides, *dq.stride()[:3],
                                                 *rest, M=M, N=N, **on, num_warps=warps, num_stages=stages)
    for grad, mu in ((dq, q), (dk, k)) if softplus else ():
        grad.mul_(-torch.expm1(-mu))                                                    # softplus' = 1 - e^-mu
    group = lambda x, G: x.unflatten(0, (G, -1)).sum(dim=1)                             # [B, ..] -> [G, ..]
    grads = [dq, dk, dv, group(ddelta.sum(dim=2), len(delta)) if base else None, group(drow, len(row)) if row is not None else None, dcol, dbias]
    return [lse.new_empty(0) if x is None or x is none else x for x in grads]           # no two may be one tensor


def fold_seeds(op, shared=None):
    """The vmap rule of an operator whose tensors all begin with the batch, or with G: the seeds go in front of either. Argument `shared` is one for all."""
    def rule(info, in_dims, *args):
        S = info.batch_size
        if shared is not None and (in_dims[shared] is not None or args[-1] is True):
            raise NotImplementedError('the table of sinusoids must be one for all: take pe.cursor_scan')
        in_front = lambda x, dim: (x.movedim(dim, 0) if dim is not None else x.expand(S, *x.shape)).flatten(0, 1)
        seeded = [isinstance(x, torch.Tensor) and place != shared for place, x in enumerate(args)]
        folded = op(*(in_front(x, dim) if yes else x for yes, x, dim in zip(seeded, args, in_dims)))
        out = [x.unflatten(0, (S, len(x) // S)) if x.dim() > 1 else x.new_empty(S, 0) for x in folded]
        return (out, [0] * len(out)) if isinstance(folded, list) else (tuple(out), (0,) * len(out))
    return rule


@attention_forward.register_fake
def _(q, k, v, delta, row, col, bias, base, softplus, distance):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return like_output(q), torch.empty_like(lse) if distance else lse.new_empty(0), lse


@attention_backward.register_fake
def _(dy, de, q, k, v, delta, row, col, bias, y, e, lse, base, softplus):
    return [*map(like_output, (q, k, v)), *(lse.new_empty(0 if x is None else x.shape) for x in (delta, row, col, bias))]


def keep_for_backward(ctx, inputs, output):
    """What attention_gradient needs: inputs and outputs, nothing in between."""
    *tensors, ctx.base, ctx.softplus, ctx.distance = inputs
    ctx.save_for_backward(*tensors, *output)


def attention_gradient(ctx, dy, de, dlse):
    """The gradients of attention_forward's inputs; nobody differentiates lse."""
    *_, row, col, bias, y, e, lse = saved = ctx.saved_tensors
    grads = attention_backward(dy, de if ctx.distance else None, *saved, ctx.base, ctx.softplus)
    return *(None if x is None else grad for x, grad in zip(saved, grads)), None, None, None


def no_second_gradient(ctx, grads):
    """Say that there is none."""
    raise NotImplementedError('the kernels have no second-order gradients: take the reference (kernels.NAME_reference, or --kernel=reference)')


attention_forward.register_autograd(attention_gradient, setup_context=keep_for_backward)
attention_backward.register_autograd(no_second_gradient)
attention_forward.register_vmap(fold_seeds(attention_forward))
attention_backward.register_vmap(fold_seeds(attention_backward))


# ---------------------------------------------------------------------------------------------------------------------
# PRISM's scan: a program for each cursor of each sequence. Offset d is row P + d of the table, or bin P + d. After token t only
# the offsets -(t+1)..t+1 have mass; so the tokens are cut into windows, each a launch with twice as many bins as the one before
# (scan_windows): BL of them, i, around P, of which low to high - 1 are used. In a launch the histogram h stays in registers; the
# next one finds it in CHECKPOINTS and, going back, its gradient in DH. As no thread sees the bins of another, each step also
# writes h to HISTORY: there it finds its neighbours, and the product with the table its rows. Row k is the histogram before step
# k of a chunk of K, row k + 1 that after it.

@jit
def window(L, BL: tl.constexpr):
    """P, the bins i of a launch, low and high."""
    P = L // 2
    reach = tl.minimum(P, BL // 2 - 1)
    return P, P - BL // 2 + tl.arange(0, BL), P - reach, P + reach + 1


@jit
def neighbours(ROW, i, low, high):
    """What a step up and a step down bring to the bins i from the histogram at ROW."""
    up = tl.load(ROW + i - 1, mask=(i > low) & (i < high), other=0.0)
    return up, tl.load(ROW + i + 1, mask=(i >= low) & (i < high - 1), other=0.0)


@jit
def moved(h, up, down, reset, incr, decr, keep, total, i, P):
    """Algorithm 1, (2) and (3): all mass reset to offset 0 and then one step, or only the step."""
    no_reset, origin = 1 - reset, tl.where(i == P, keep, tl.where(i == P + 1, incr, tl.where(i == P - 1, decr, 0.0)))
    return reset * total * origin + (no_reset * incr) * up + (no_reset * decr) * down + (no_reset * keep) * h


@jit
def fast_log2(x, PRECISION: tl.constexpr):
    """log2(x) by the GPU's one instruction for it, to 2^-22 (of 1 near 1); tl.log2 takes two dozen, a third of the whole step."""
    if PRECISION == 'interpreter':
        return tl.log2(x)
    return tl.inline_asm_elementwise('lg2.approx.ftz.f32 $0, $1;', '=f,f', [x], dtype=tl.float32, is_pure=True, pack=1)


@jit
def gates(RESET, STEP, t, mask=None):
    """p_reset, p_incr, p_decr, p_keep at token t."""
    return tl.load(RESET + t, mask), tl.load(STEP + 3 * t, mask), tl.load(STEP + 3 * t + 1, mask), tl.load(STEP + 3 * t + 2, mask)


@jit
def jumps(COPY, t, i, T, P):
    """Algorithm 1, (4): p_copy at token t by bins, and p_no-copy."""
    ROW = COPY + tl.full([], t, tl.int64) * (T + 1)
    return tl.load(ROW + i - P, mask=(i >= P) & (i <= P + t), other=0.0), tl.load(ROW + T)


@jit
def scan_chunk(h, start, steps, RESET, STEP, COPY, gamma, HISTORY, i, low, high, T, L, P, SHARPEN: tl.constexpr, COPYING: tl.constexpr, EPS: tl.constexpr,
               PRECISION: tl.constexpr):
    """Algorithm 1 from token start on, `steps` times; HISTORY gets the histograms, the one before in row 0."""
    inside = (i >= low) & (i < high)
    for k in range(steps):
        t = start + k
        tl.store(HISTORY + k * L + i, h, mask=inside)
        tl.debug_barrier()
        up, down = neighbours(HISTORY + k * L, i, low, high)
        reset, incr, decr, keep = gates(RESET, STEP, t)
        h = moved(h, up, down, reset, incr, decr, keep, 1.0 if SHARPEN else tl.sum(h, axis=0), i, P)
        if COPYING:
            jump, stay = jumps(COPY, t, i, T, P)
            h = stay * h + jump
        if SHARPEN:                                                # (5): (h + eps)^gamma, normalized, by way of the logarithm
            x = tl.where(tl.abs(i - P) <= t + 1, gamma * fast_log2(h + EPS, PRECISION), float('-inf'))
            h = tl.exp2(x - tl.max(x, axis=0))
            h *= 1.0 / tl.sum(h, axis=0)
    tl.store(HISTORY + steps * L + i, h, mask=inside)
    tl.debug_barrier()
    return h


@jit
def load_tile(X, rows, columns, stride, N, M):
    """X[rows, columns], X [N, M] with rows `stride` apart, zeros outside."""
    return tl.load(X + rows[:, None] * stride + columns[None, :], mask=(rows[:, None] < N) & (columns[None, :] < M), other=0.0)


@jit
def scan_kernel(RESET, STEP, GAMMA, TABLE, COPY, OUT, CHECKPOINTS, HISTORY, first, last, C, T, L, D, EACH, BL: tl.constexpr, BJ: tl.constexpr,
                BD: tl.constexpr, K: tl.constexpr, SHARPEN: tl.constexpr, COPYING: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr):
    """A cursor's encodings OUT [T, D] at tokens first..last-1. CHECKPOINTS[m] is its histogram before token m K: that before `first` is read, the later ones
    are written. EACH sequences share a row of GAMMA."""
    n, ks, cs = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, BD)
    RESET, STEP, COPY, OUT, HISTORY = RESET + n * T, STEP + n * T * 3, COPY + n * T * (T + 1), OUT + n * T * D, HISTORY + n * (K + 1) * L
    CHECKPOINTS += n * tl.cdiv(T, K) * L
    gamma = tl.load(GAMMA + n // C // EACH * C + n % C)
    P, i, low, high = window(L, BL)
    h = tl.load(CHECKPOINTS + first // K * L + i, mask=tl.abs(i - P) <= first, other=0.0)
    for start in range(first, last, K):
        steps = tl.minimum(K, T - start)
        h = scan_chunk(h, start, steps, RESET, STEP, COPY, gamma, HISTORY, i, low, high, T, L, P, SHARPEN, COPYING, EPS, PRECISION)
        tl.store(CHECKPOINTS + (start // K + 1) * L + i, h, mask=(i >= low) & (i < high) & (start + K < T))
        e = tl.zeros([K, BD], tl.float32)
        for j in range(low, high, BJ):                             # Algorithm 2: sum_d h[d] f(d)
            js = j + tl.arange(0, BJ)
            e = dot(load_tile(HISTORY + L, ks, js, L, steps, high), load_tile(TABLE, js, cs, D, high, D), e, PRECISION)
        tl.store(OUT + (start + ks[:, None]) * D + cs[None, :], e, mask=(ks[:, None] < steps) & (cs[None, :] < D))


@jit
def scan_backward_kernel(DOUT, RESET, STEP, GAMMA, TABLE, COPY, CHECKPOINTS, DRESET, DSTEP, DGAMMA, DTABLE, DCOPY, DH, HISTORY, GRADS, first, last, C, T, L,
                         D, EACH, BL: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, SHARPEN: tl.constexpr, COPYING: tl.constexpr,
                         EPS: tl.constexpr, PRECISION: tl.constexpr, WANT_TABLE: tl.constexpr):
    """Gradients of a cursor's gates, gamma and jumps at tokens last-1..first; DH has that of its histogram after token last-1 and gets that before first.

    GRADS [K, L] first holds what the encodings give to the chunk's histograms; going back, row k becomes the gradient of what step k makes before (5).
    """
    n, ks, cs = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, BD)
    RESET, STEP, COPY, DOUT, HISTORY = RESET + n * T, STEP + n * T * 3, COPY + n * T * (T + 1), DOUT + n * T * D, HISTORY + n * (K + 1) * L
    DRESET, DSTEP, DCOPY, GRADS, CHECKPOINTS = DRESET + n * T, DSTEP + n * T * 3, DCOPY + n * T * (T + 1), GRADS + n * K * L, CHECKPOINTS + n * tl.cdiv(T, K) * L
    gamma = tl.load(GAMMA + n // C // EACH * C + n % C)
    P, i, low, high = window(L, BL)
    inside, dgamma = (i >= low) & (i < high), tl.zeros([BL], tl.float32)
    dh = tl.load(DH + n * L + i, mask=inside, other=0.0)
    for back in range(tl.cdiv(last - first, K)):
        start = first + (tl.cdiv(last - first, K) - 1 - back) * K
        steps = tl.minimum(K, T - start)
        h = tl.load(CHECKPOINTS + start // K * L + i, mask=tl.abs(i - P) <= start, other=0.0)
        scan_chunk(h, start, steps, RESET, STEP, COPY, gamma, HISTORY, i, low, high, T, L, P, SHARPEN, COPYING, EPS, PRECISION)
        de = load_tile(DOUT + start * D, ks, cs, D, steps, D)      # (K, BD)
        for j in range(low, high, BJ):
            js = j + tl.arange(0, BJ)
            dhs = dot(de, tl.trans(load_tile(TABLE, js, cs, D, high, D)), tl.zeros([K, BJ], tl.float32), PRECISION)
            tl.store(GRADS + ks[:, None] * L + js[None, :], dhs, mask=js[None, :] < high)
            if WANT_TABLE:
                hs = load_tile(HISTORY + L, ks, js, L, steps, high)
                dtable = dot(tl.trans(hs), de, tl.zeros([BJ, BD], tl.float32), PRECISION)
                tl.atomic_add(DTABLE + js[:, None] * D + cs[None, :], dtable, mask=(js[:, None] < high) & (cs[None, :] < D), sem='relaxed')
        tl.debug_barrier()
        for done in range(steps):
            k = steps - 1 - done
            t, ROW = start + k, GRADS + k * L
            dh += tl.load(ROW + i, mask=inside, other=0.0)
            reset, incr, decr, keep = gates(RESET, STEP, t)
            jump, stay = 0.0, 1.0
            if COPYING:
                jump, stay = jumps(COPY, t, i, T, P)
            if SHARPEN:
                h = tl.load(HISTORY + k * L + i, mask=inside, other=0.0)
                up, down = neighbours(HISTORY + k * L, i, low, high)
                x = stay * moved(h, up, down, reset, incr, decr, keep, 1.0, i, P) + jump + EPS
                y = tl.load(HISTORY + (k + 1) * L + i, mask=inside, other=0.0)
                dh = y * (dh - tl.sum(y * dh, axis=0))
                dgamma += dh * fast_log2(x, PRECISION)
                dh = gamma * dh / x
            if COPYING:
                tl.store(DCOPY + tl.full([], t, tl.int64) * (T + 1) + i - P, dh, mask=(i >= P) & (i <= P + t))
            tl.store(ROW + i, dh, mask=inside)
            tl.debug_barrier()
            from_down, from_up = neighbours(ROW, i, low, high)
            no_reset, reset_to = stay * (1 - reset), incr * tl.load(ROW + P + 1) + decr * tl.load(ROW + P - 1) + keep * tl.load(ROW + P)
            dh = (no_reset * incr) * from_up + (no_reset * decr) * from_down + (no_reset * keep) * dh + stay * reset * reset_to
        # the gates of all steps of the chunk: what moves up, down or not at all, times the gradient where it arrives
        ups, downs, keeps, totals = tl.zeros([K, BJ], tl.float32), tl.zeros([K, BJ], tl.float32), tl.zeros([K, BJ], tl.float32), tl.zeros([K, BJ], tl.float32)
        for j in range(low + 1, high - 1, BJ):
            js = j + tl.arange(0, BJ)
            hs = load_tile(HISTORY, ks, js, L, steps, high - 1)
            ups += hs * load_tile(GRADS, ks, js + 1, L, steps, high)
            downs += hs * load_tile(GRADS, ks, js - 1, L, steps, high)
            keeps += hs * load_tile(GRADS, ks, js, L, steps, high)
            totals += hs
        t, on, to_up, to_down, to_keep, total = start + ks, ks < steps, tl.sum(ups, axis=1), tl.sum(downs, axis=1), tl.sum(keeps, axis=1), tl.sum(totals, axis=1)
        reset, incr, decr, keep = gates(RESET, STEP, t, on)
        MIDDLE = GRADS + ks * L + P
        above, below, here = tl.load(MIDDLE + 1, on), tl.load(MIDDLE - 1, on), tl.load(MIDDLE, on)
        if_reset, if_not = total * (incr * above + decr * below + keep * here), incr * to_up + decr * to_down + keep * to_keep
        stay = 1.0
        if COPYING:
            NO_COPY = t.to(tl.int64) * (T + 1) + T
            stay = tl.load(COPY + NO_COPY, on)
            tl.store(DCOPY + NO_COPY, reset * if_reset + (1 - reset) * if_not, on)
        tl.store(DRESET + t, stay * (if_reset - if_not), on)
        tl.store(DSTEP + 3 * t, stay * ((1 - reset) * to_up + reset * total * above), on)
        tl.store(DSTEP + 3 * t + 1, stay * ((1 - reset) * to_down + reset * total * below), on)
        tl.store(DSTEP + 3 * t + 2, stay * ((1 - reset) * to_keep + reset * total * here), on)
        tl.debug_barrier()
    tl.store(DH + n * L + i, dh, mask=inside)
    tl.store(DGAMMA + n, tl.load(DGAMMA + n) + 0.6931471805599453 * tl.sum(dgamma, axis=0))         # log(x) = log(2) log2(x)


def scan_windows(T):
    """[(first, last, BL)]: the tokens first..last-1 of a launch and its bins, so many that no mass comes to the outermost."""
    found, first, BL = [], 0, 128
    while first < T:
        last = min(T, BL // 2 - CHUNK)                             # a multiple of CHUNK, or T
        found.append((first, last, BL))
        first, BL = last, 2 * BL
    return found


def scan_launches(reset, gamma, table, copy):
    """Grid, and for each window the sizes and switches that both kernels of the scan take."""
    (B, C, T), (L, D) = reset.shape, table.shape
    rough = torch.get_float32_matmul_precision() != 'highest' and D > 1        # the offsets themselves, D = 1, have more digits than tf32
    precision = 'interpreter' if os.environ.get('TRITON_INTERPRET') == '1' else 'tf32' if rough else 'tf32x3'
    sizes = dict(C=C, T=T, L=L, D=D, EACH=B if gamma is None else B // len(gamma), BJ=32, BD=max(16, triton.next_power_of_2(D)), K=CHUNK,
                 SHARPEN=gamma is not None, COPYING=copy is not None, EPS=EPS, PRECISION=precision, num_stages=1)
    return (B * C,), [sizes | dict(first=first, last=last, BL=BL, num_warps=min(16, max(1, BL // 256))) for first, last, BL in scan_windows(T)]


@torch.library.custom_op('nanope::cursor_scan', mutates_args=())
def scan_forward(reset: torch.Tensor, step: torch.Tensor, gamma: torch.Tensor | None, table: torch.Tensor,
                 copy: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The encodings [B, C, T, d_pe], and the histograms before every CHUNK-th step, of what the cursor can have reached by then."""
    (B, C, T), (L, D) = reset.shape, table.shape
    reset, step, table, rest = reset.contiguous(), step.contiguous(), table.contiguous(), [x.contiguous() if x is not None else reset for x in (gamma, copy)]
    out, checkpoints, history = reset.new_empty(B, C, T, D), reset.new_empty(B, C, triton.cdiv(T, CHUNK), L), reset.new_empty(B * C, CHUNK + 1, L)
    checkpoints[:, :, 0, L // 2] = 1                               # all mass at offset 0
    grid, launches = scan_launches(reset, gamma, table, copy)
    with torch.cuda.device_of(reset):
        for arguments in launches:
            scan_kernel[grid](reset, step, rest[0], table, rest[1], out, checkpoints, history, **arguments)
    return out, checkpoints


@torch.library.custom_op('nanope::cursor_scan_backward', mutates_args=())
def scan_backward(dout: torch.Tensor, reset: torch.Tensor, step: torch.Tensor, gamma: torch.Tensor | None, table: torch.Tensor,
                  copy: torch.Tensor | None, checkpoints: torch.Tensor, want_table: bool) -> list[torch.Tensor]:
    """The gradients of reset, step, gamma, table, copy; empty tensors for those that are None or not wanted."""
    (B, C, _), L, none = reset.shape, len(table), lambda: reset.new_empty(0)
    dout, reset, step, table, checkpoints = (x.contiguous() for x in (dout, reset, step, table, checkpoints))
    rest = [x.contiguous() if x is not None else reset for x in (gamma, copy)]
    dreset, dstep, dgamma, dh = torch.empty_like(reset), torch.empty_like(step), reset.new_zeros(B, C), reset.new_zeros(B * C, L)
    dtable, dcopy = torch.zeros_like(table) if want_table else none(), torch.zeros_like(rest[1]) if copy is not None else none()
    history, grads = reset.new_empty(B * C, CHUNK + 1, L), reset.new_empty(B * C, CHUNK, L)
    grid, launches = scan_launches(reset, gamma, table, copy)
    with torch.cuda.device_of(reset):
        for arguments in reversed(launches):
            scan_backward_kernel[grid](dout, reset, step, rest[0], table, rest[1], checkpoints, dreset, dstep, dgamma, dtable, dcopy, dh, history, grads,
                                       WANT_TABLE=want_table, **arguments)
    return [dreset, dstep, dgamma.unflatten(0, (len(gamma), -1)).sum(dim=1) if gamma is not None else none(), dtable, dcopy]


@scan_forward.register_fake
def _(reset, step, gamma, table, copy):
    return reset.new_empty(*reset.shape, table.shape[1]), reset.new_empty(*reset.shape[:2], -(-reset.shape[2] // CHUNK), len(table))


@scan_backward.register_fake
def _(dout, reset, step, gamma, table, copy, checkpoints, want_table):
    return [reset.new_empty(0 if x is None else x.shape) for x in (reset, step, gamma, table if want_table else None, copy)]


def keep_scan(ctx, inputs, output):
    """What scan_gradient needs."""
    ctx.save_for_backward(*inputs, output[1])


def scan_gradient(ctx, dout, dcheckpoints):
    """The gradients of scan_forward's inputs; nobody differentiates the checkpoints."""
    *inputs, checkpoints = ctx.saved_tensors
    grads = scan_backward(dout, *inputs, checkpoints, ctx.needs_input_grad[3])
    return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad))


scan_forward.register_autograd(scan_gradient, setup_context=keep_scan)
scan_backward.register_autograd(no_second_gradient)
scan_forward.register_vmap(fold_seeds(scan_forward, shared=3))
scan_backward.register_vmap(fold_seeds(scan_backward, shared=4))


# ---------------------------------------------------------------------------------------------------------------------
# python kernels.py

if __name__ == '__main__':
    sys.modules['kernels'] = sys.modules['__main__']               # engine.bench takes this copy: an operator is registered once
    from engine import bench, config
    config.run(lambda argv: bench.kernel_main(__doc__, argv))
