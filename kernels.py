"""Every Triton kernel: causal attention, PoPE's polar coordinates and PRISM's cursor scan.

    python kernels.py   check each kernel against its reference in float64; on a GPU, time attention

Queries t and keys s <= t count from 0. Encodings with dot-product logits share one attention:

    x_ts = <q_t, k_s> / sqrt(D)        p_t = softmax(x_t)        over the visible keys s <= t
    y_t  = sum_s p_ts v_s              e_t = sum_s p_ts (t - s)  output, expected distance (ViPE)

PoPE first maps q_t and k_s from D to 2D features, with a kernel of its own. ViPE first multiplies
them by scalar factors, in plain PyTorch.

The attention kernels process blocks of M queries and N keys, as FlashAttention does (Dao et al.
2022), so memory grows with T instead of T^2. Every sum is in float32 in a fixed order, so results
are reproducible bit for bit. Without a GPU the kernels run in Triton's interpreter.
"""
from __future__ import annotations  # keeps tl.constexpr unevaluated if Triton is missing

import functools
import math
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available() and 'TRITON_INTERPRET' not in os.environ:
    if sys.modules.get('triton'):
        warnings.warn("Triton was imported before kernels.py: too late to choose Triton's "
                      'interpreter; set TRITON_INTERPRET=1 before Python starts', stacklevel=2)
    else:
        os.environ['TRITON_INTERPRET'] = '1'
try:
    import triton
    import triton.language as tl
    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # Triton requires Linux; the references run everywhere
    triton = tl = None
    jit, constexpr = lambda function: function, float

# Triton requires that globals read by kernels are constexpr
INTERPRETED = constexpr(os.environ.get('TRITON_INTERPRET') == '1')
LOG2E = constexpr(1 / math.log(2))  # exp(x) = 2^(LOG2E x)
EPS = constexpr(1e-8)  # added to histograms before sharpening; equal to pe.EPS


# ---- public functions, each below its reference; the reference of cursor_scan is in pe.py --------

def attention_reference(q, k, v):
    """y_t = sum_s p_ts v_s and e_t = sum_s p_ts (t - s), p_t = softmax(<q_t, k_s> / sqrt(D)).
    q, k [B, H, T, any width], v [B, H, T, D] -> (y [B, H, T, D], e [B, H, T])."""
    t = torch.arange(q.shape[2], device=q.device)               # (T,)
    distance = t[:, None] - t                                   # t - s (T, T)
    x = q @ k.transpose(-2, -1) * v.shape[3] ** -0.5            # (B, H, T, T)
    p = x.masked_fill(distance < 0, -math.inf).softmax(dim=-1)  # (B, H, T, T), 0 where s > t
    return p @ v, (p * distance).sum(dim=-1)                    # (B, H, T, D), (B, H, T)


def attention(q, k, v, mean_distance=False):
    """attention_reference, computed by the kernels: (y, e in float32 if `mean_distance`, else
    None). q, k and v must have one dtype, float32, bfloat16 or float16. q and k have at most 256
    features, v at most 128. torch.func.grad requires the reference."""
    require_triton('kernels.attention_reference')
    assert q.dtype == k.dtype == v.dtype != torch.float64, 'one dtype, at most float32'
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3]    # (B, H, T, D), v (B, H, T, D_V)
    assert q.shape[3] <= 256 and v.shape[3] <= 128  # PoPE's q and k are twice as wide as v
    y, e, _ = attention_forward(q, k, v, mean_distance)         # (B, H, T, D_V), (B, H, T)
    return y, e if mean_distance else None


def angles(T, D, base, device):
    """t theta_c [T, D] in float64, theta_c = base^(-c/D): a frequency for each of D features."""
    c = torch.arange(D, device=device, dtype=torch.float64)     # (D,)
    return torch.arange(T, device=device)[:, None] * base ** (-c / D)


def polar_reference(x, delta, base, softplus):
    """PoPE eq. 7-10: x_t -> mu(x_t) [cos, sin](t theta + delta), theta_c = base^(-c/D).
    x [B, H, T, D], delta [H, D] or None -> [B, H, T, 2D]. mu: softplus, or the identity."""
    angle = angles(*x.shape[2:], base, x.device)                # (T, D)
    if delta is not None:
        angle = angle + delta[:, None]                          # (H, T, D)
    mu = F.softplus(x) if softplus else x                       # (B, H, T, D) magnitudes
    return torch.cat([mu * angle.cos().to(x.dtype), mu * angle.sin().to(x.dtype)], dim=-1)


def pope_attention_reference(q, k, v, delta, base=10000.0):
    """PoPE eq. 3-6: logit_ts = sum_c mu(q_t)_c mu(k_s)_c cos((s - t) theta_c + delta_c) / sqrt(D)
    with mu = softplus, theta_c = base^(-c/D), delta [H, D] -> y [B, H, T, D]."""
    q = polar_reference(q, None, base, softplus=True)  # (B, H, T, 2D): real and imaginary parts
    k = polar_reference(k, delta, base, softplus=True)
    return attention_reference(q, k, v)[0]


def pope_attention(q, k, v, delta, base=10000.0):
    """pope_attention_reference, computed by the kernels. delta is not clamped."""
    q = polar(q, None, base, softplus=True)                     # (B, H, T, 2D)
    k = polar(k, delta, base, softplus=True)
    return attention(q, k, v)[0]


def vipe_scaled(q, k, u, s):
    """ViPE's q_n s log(n), queries n = 1..T, and k_i (1 + <u, k_i>), in the dtypes of q and k."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    n = torch.arange(1, q.shape[2] + 1, device=q.device).to(dtype)  # (T,)
    # <u, k> is not written as a matrix product, which autocast would compute in half precision
    col = 1 + (k.to(dtype) * u[:, None].to(dtype)).sum(-1, keepdim=True)    # (B, H, T, 1)
    return (q * (s * n.log())[:, None]).to(q.dtype), (k * col).to(k.dtype)


def vipe_attention_reference(q, k, v, u, s=1.0):
    """ViPE eq. 7-9: logit_ni = s log(n) (1 + <u, k_i>) <q_n, k_i> / sqrt(D), queries n = 1..T.
    q, k, v [B, H, T, D], u [H, D], s a number or a tensor -> (y [B, H, T, D], e [B, H, T])."""
    return attention_reference(*vipe_scaled(q, k, u, s), v)


def vipe_attention(q, k, v, u, s=1.0):
    """vipe_attention_reference, computed by the kernels: (y, e in float32)."""
    return attention(*vipe_scaled(q, k, u, s), v, mean_distance=True)


def cursor_scan(reset, step, gamma, table, copy=None):
    """pe.cursor_scan in float32, with Algorithm 1 in kernels: PRISM's encodings [B, C, T, d_pe].

    reset [B, C, T]; step [B, C, T, 3] = (p_incr, p_decr, p_keep); gamma [C] or None; table
    [2P+1, d_pe] = f(-P..P), P >= T; copy [B, C, T, T+1] or None: p(jump to 0..T-1), p(no jump)."""
    require_triton('pe.cursor_scan')
    (B, C, T), P = reset.shape, len(table) // 2
    assert step.shape == (B, C, T, 3) and (gamma is None or gamma.shape == (C,))
    assert copy is None or copy.shape == (B, C, T, T + 1)
    assert len(table) == 2 * P + 1 > 2 * T, f'table must be [2P+1, d_pe], with offsets -{T}..{T}'
    reset, step, gamma, copy = (x if x is None else x.float() for x in (reset, step, gamma, copy))
    h = scan_forward(reset, step, gamma, copy)                  # (B, C, T+1, L), L = 2T + 1
    return (h @ table[P - T:P + T + 1].float())[:, :, 1:]       # Algorithm 2: sum_d h[d] f(d)


def require_triton(reference):
    """Raise RuntimeError where Triton is missing."""
    if triton is None:
        raise RuntimeError('the kernels require Triton, on Linux: pip install triton. '
                           f'Elsewhere use {reference}, which requires torch alone')


# ---- operators: autograd and torch.compile cannot see into a kernel, so every launch is inside a
# custom PyTorch operator; the decorator below defines its output shapes and gradient

def operator(fake, gradient_of=None, keep_outputs=True):
    """Decorator: turn a function that launches kernels into an operator. For torch.compile, `fake`
    returns uninitialized outputs of the same shapes and strides.

    gradient_of: the forward operator whose gradient this one computes. Its inputs are tensors, then
    numbers. The gradient gets (*gradients of its outputs, *its input tensors, *its outputs if
    `keep_outputs`, *its numbers) and returns the gradients of its input tensors. Differentiating
    twice raises RuntimeError; use the reference instead."""
    def register(function):
        op = torch.library.custom_op(f'nanope::{function.__name__}', function, mutates_args=())
        op.register_fake(fake)

        def save(ctx, inputs, output):
            tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
            ctx.numbers = inputs[len(tensors):]                 # floats and bools
            if keep_outputs:
                tensors += output if isinstance(output, tuple) else [output]
            ctx.save_for_backward(*tensors)

        def gradients(ctx, *grads):
            grads = op(*grads, *ctx.saved_tensors, *ctx.numbers)  # one for each input tensor
            grads = [x if needed else None for x, needed in zip(grads, ctx.needs_input_grad)]
            return *grads, *[None] * len(ctx.numbers)           # numbers have no gradient

        if gradient_of is not None:
            gradient_of.register_autograd(gradients, setup_context=save)
        return op
    return register


# ---- shared by the kernels: the layout in memory, loads and stores of blocks of rows -------------

def power_of_2(n):
    """The smallest power of two >= n, but at least 16, as tl.dot requires."""
    return max(16, triton.next_power_of_2(n))


def new_rows(x, width=None):
    """An uninitialized [B, H, T, width], stored as [B, T, H, width], so that the projection after
    attention needs no copy. The stride between positions is a multiple of 16 elements: loads are
    wide, and the ptxas of Triton 3.6 miscompiles some other strides."""
    (B, H, T, _), D = x.shape, width or x.shape[3]
    step = triton.cdiv(H * D, 16) * 16  # the stride between positions, in elements
    return x.new_empty(B, T, step)[..., :H * D].unflatten(-1, (H, D)).transpose(1, 2)


def readable(x):
    """x [B, H, T, D] in the layout that the kernels read: the heads of a position are contiguous,
    and the stride between positions is a multiple of 16. Slices of a projection whose width is such
    a multiple are returned unchanged; other tensors are copied."""
    stride = x.stride(2)
    required = (x.shape[2] * stride, x.shape[3], stride, 1)  # strides
    laid_out = all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), required))
    return x if laid_out and stride % 16 == 0 else new_rows(x).copy_(x)


@jit
def own_block(T, H, ROWS: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(first row, sequence b, head h) of this program. LAST_FIRST: the last rows start first."""
    blocks = tl.cdiv(T, ROWS)  # programs for each head of each sequence
    block = tl.program_id(0) % blocks
    block = blocks - 1 - block if LAST_FIRST else block         # late queries have the most keys
    bh = (tl.program_id(0) // blocks).to(tl.int64)  # b H + h; offsets can exceed int32
    return block * ROWS, bh // H, bh % H                        # first row, b, h


@jit
def load_rows(X, start, stride, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Load rows start..start+ROWS-1 of X [T, D] as [ROWS, BD], with zeros outside X. BD is D padded
    to a power of two, which Triton's blocks require."""
    i = tl.arange(0, ROWS)[:, None]                             # (ROWS, 1)
    c = tl.arange(0, BD)[None, :]                               # (1, BD)
    X += tl.cast(start, tl.int64) * stride                      # start * stride can exceed int32
    # masked, because row T belongs to the next sequence and column D to the next head
    return tl.load(X + i * stride + c, mask=(i < T - start) & (c < D), other=0.0)


@jit
def store_rows(X, x, start, stride, T, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Store x [ROWS, BD] in rows start..start+ROWS-1 of X [T, D]."""
    i = tl.arange(0, ROWS)[:, None]                             # (ROWS, 1)
    c = tl.arange(0, BD)[None, :]                               # (1, BD)
    X += tl.cast(start, tl.int64) * stride
    tl.store(X + i * stride + c, x.to(X.dtype.element_ty), mask=(i < T - start) & (c < D))


@jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32. Triton's interpreter cannot multiply bfloat16, so it gets float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision=PRECISION)


# ---- attention, forward: a program for each block of M queries, head and sequence ----------------

@jit
def forward_kernel(Q, K, V, Y, E, LSE, q_step, k_step, v_step, y_step, H, T, scale,
                   D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                   PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Compute y_t, e_t and lse_t = log2 sum_s 2^(factor x_ts), with factor = scale log2(e) and
    x_ts = <q_t, k_s>, here without the scale. N divides M. q_step, ...: strides of positions."""
    t0, b, h = own_block(T, H, M, True)                         # queries t0..t0+M-1
    Q += b * T * q_step + h * D                                 # token 0 of sequence b, head h
    K += b * T * k_step + h * D
    V += b * T * v_step + h * D_V
    t = t0 + tl.arange(0, M)                                    # (M,)
    q = load_rows(Q, t0, q_step, T, D, BD, M)                   # (M, BD), zeros from row T on
    factor = scale * LOG2E  # applied inside exp2, where it costs no extra instruction
    # sums over the keys s so far, with p_ts = 2^(factor (x_ts - row_max))
    y = tl.zeros([M, BD_V], tl.float32)                         # of p_ts v_s
    e = tl.zeros([M], tl.float32)                               # of p_ts (t - s)
    row_sum = tl.zeros([M], tl.float32)                         # of p_ts: FlashAttention's l
    row_max = tl.full([M], float('-inf'), tl.float32)           # max_s x_ts: FlashAttention's m
    for diagonal in tl.static_range(2):  # 0: keys 0..t0-1, not masked; 1: keys t0..t0+M-1, masked
        start = t0 if diagonal else 0
        end = min(t0 + M, T) if diagonal else t0
        for s0 in range(start, end, N):
            s = s0 + tl.arange(0, N)                            # (N,)
            k = load_rows(K, s0, k_step, T, D, BD, N)           # (N, BD)
            x = dot(q, tl.trans(k), None, PRECISION)            # (M, N)
            if diagonal:  # also masks the keys s >= T, which are later than every query t < T
                x = tl.where(t[:, None] >= s[None, :], x, float('-inf'))
            # online softmax: a new maximum rescales the sums so far
            new_max = tl.maximum(row_max, tl.max(x, 1))  # (M,) finite: key 0 is visible to all
            rescale = tl.exp2((row_max - new_max) * factor)     # (M,) 0 in the first block
            p = tl.exp2(x * factor - (new_max * factor)[:, None])   # (M, N) at most 1
            block_sum = tl.sum(p, 1)                            # (M,)
            if E is not None:  # t - s = (t - s0) - (s - s0)
                e = e * rescale + (t - s0) * block_sum - tl.sum(p * tl.arange(0, N)[None, :], 1)
            v = load_rows(V, s0, v_step, T, D_V, BD_V, N)       # (N, BD_V)
            y = dot(p.to(v.dtype), v, y * rescale[:, None], PRECISION)  # (M, BD_V)
            row_sum = row_sum * rescale + block_sum
            row_max = new_max
    store_rows(Y + b * T * y_step + h * D_V, y / row_sum[:, None], t0, y_step, T, D_V, BD_V, M)
    rows = (b * H + h) * T + t                                  # (M,) of E and LSE [B, H, T]
    tl.store(LSE + rows, row_max * factor + tl.log2(row_sum), mask=t < T)  # lse, base 2
    if E is not None:
        tl.store(E + rows, e / row_sum, mask=t < T)             # (M,)


# ---- attention, backward. With g_ts = dloss/dx_ts = p_ts (<dy_t, v_s> + de_t (t - s) - mean_t) and
# mean_t = <dy_t, y_t> + de_t e_t:
#     dq_t = sum_s g_ts k_s / sqrt(D)    dk_s = sum_t g_ts q_t / sqrt(D)    dv_s = sum_t p_ts dy_t

@jit
def queries_kernel(Q, K, V, Y, E, LSE, DY, DE, MEAN, DQ,
                   q_step, k_step, v_step, y_step, dy_step, dq_step, H, T, scale,
                   D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                   PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Compute dq_t, and mean_t for keys_kernel, for a block of M queries; N divides M."""
    t0, b, h = own_block(T, H, M, True)                         # queries t0..t0+M-1
    Q += b * T * q_step + h * D
    K += b * T * k_step + h * D
    V += b * T * v_step + h * D_V
    t = t0 + tl.arange(0, M)                                    # (M,)
    rows = (b * H + h) * T + t                                  # (M,) of E, LSE, DE, MEAN [B, H, T]
    q = load_rows(Q, t0, q_step, T, D, BD, M)                   # (M, BD)
    y = load_rows(Y + b * T * y_step + h * D_V, t0, y_step, T, D_V, BD_V, M)      # (M, BD_V)
    dy = load_rows(DY + b * T * dy_step + h * D_V, t0, dy_step, T, D_V, BD_V, M)  # (M, BD_V)
    lse = tl.load(LSE + rows, mask=t < T, other=float('inf'))   # (M,) inf: p = 0 if t >= T
    mean = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)      # (M,) FlashAttention's D
    if DE is not None:
        de = tl.load(DE + rows, mask=t < T, other=0.0)          # (M,)
        mean += de * tl.load(E + rows, mask=t < T, other=0.0)
    tl.store(MEAN + rows, mean, mask=t < T)                     # (M,)
    dq = tl.zeros([M, BD], tl.float32)                          # sum_s g_ts k_s so far
    for diagonal in tl.static_range(2):  # as in forward_kernel
        start = t0 if diagonal else 0
        end = min(t0 + M, T) if diagonal else t0
        for s0 in range(start, end, N):
            s = s0 + tl.arange(0, N)                            # (N,)
            k = load_rows(K, s0, k_step, T, D, BD, N)           # (N, BD)
            v = load_rows(V, s0, v_step, T, D_V, BD_V, N)       # (N, BD_V)
            x = dot(q, tl.trans(k), None, PRECISION)            # (M, N)
            if diagonal:
                x = tl.where(t[:, None] >= s[None, :], x, float('-inf'))
            p = tl.exp2(x * (scale * LOG2E) - lse[:, None])     # (M, N) softmax, from the final lse
            dp = dot(dy, tl.trans(v), None, PRECISION)          # (M, N) <dy_t, v_s>
            if DE is not None:
                dp += de[:, None] * (t[:, None] - s[None, :])   # (M, N)
            g = p * (dp - mean[:, None])                        # (M, N)
            dq = dot(g.to(k.dtype), k, dq, PRECISION)           # (M, BD)
    store_rows(DQ + b * T * dq_step + h * D, dq * scale, t0, dq_step, T, D, BD, M)


@jit
def keys_kernel(Q, K, V, LSE, DY, DE, MEAN, DK, DV,
                q_step, k_step, v_step, dy_step, dk_step, dv_step, H, T, scale,
                D: tl.constexpr, BD: tl.constexpr, D_V: tl.constexpr, BD_V: tl.constexpr,
                PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Compute dk_s and dv_s for a block of N keys; M divides N. Products are transposed, [N keys,
    M queries], because wgmma requires at least 64 rows."""
    s0, b, h = own_block(T, H, N, False)                        # keys s0..s0+N-1
    Q += b * T * q_step + h * D                                 # token 0 of sequence b, head h
    DY += b * T * dy_step + h * D_V
    s = s0 + tl.arange(0, N)                                    # (N,)
    k = load_rows(K + b * T * k_step + h * D, s0, k_step, T, D, BD, N)            # (N, BD)
    v = load_rows(V + b * T * v_step + h * D_V, s0, v_step, T, D_V, BD_V, N)      # (N, BD_V)
    dk = tl.zeros([N, BD], tl.float32)                          # sum_t g_ts q_t so far
    dv = tl.zeros([N, BD_V], tl.float32)                        # sum_t p_ts dy_t so far
    for diagonal in tl.static_range(2):  # 0: queries s0+N..T-1, not masked; 1: s0..s0+N-1, masked
        start = s0 if diagonal else s0 + N
        end = min(s0 + N, T) if diagonal else T
        for t0 in range(start, end, M):
            t = t0 + tl.arange(0, M)                            # (M,)
            rows = (b * H + h) * T + t                          # (M,) of LSE, MEAN, DE [B, H, T]
            q = load_rows(Q, t0, q_step, T, D, BD, M)           # (M, BD)
            dy = load_rows(DY, t0, dy_step, T, D_V, BD_V, M)    # (M, BD_V)
            lse = tl.load(LSE + rows, mask=t < T, other=float('inf'))   # (M,) inf: p = 0 if t >= T
            mean = tl.load(MEAN + rows, mask=t < T, other=0.0)  # (M,)
            x = dot(k, tl.trans(q), None, PRECISION)            # (N, M)
            if diagonal:
                x = tl.where(t[None, :] >= s[:, None], x, float('-inf'))
            p = tl.exp2(x * (scale * LOG2E) - lse[None, :])     # (N, M)
            dp = dot(v, tl.trans(dy), None, PRECISION)          # (N, M) <dy_t, v_s>
            if DE is not None:
                de = tl.load(DE + rows, mask=t < T, other=0.0)  # (M,)
                dp += de[None, :] * (t[None, :] - s[:, None])   # (N, M)
            g = p * (dp - mean[None, :])                        # (N, M)
            dv = dot(p.to(dy.dtype), dy, dv, PRECISION)         # (N, BD_V)
            dk = dot(g.to(q.dtype), q, dk, PRECISION)           # (N, BD)
    store_rows(DK + b * T * dk_step + h * D, dk * scale, s0, dk_step, T, D, BD, N)
    store_rows(DV + b * T * dv_step + h * D_V, dv, s0, dv_step, T, D_V, BD_V, N)


# ---- attention: launches and operators -----------------------------------------------------------

LARGE, SMALL = 220 * 1024, 99 * 1024  # bytes of shared memory for the fourth row, and the others
# (greatest width of q and k, and of v, least shared memory, {kernel: (M, N, warps, stages)}), the
# fastest on an H100 (the last row: not timed). N must divide M, but in keys_kernel M must divide N
BLOCKS = [
    (64, 64, 0, dict(forward=(64, 64, 4, 3), queries=(64, 64, 4, 3), keys=(64, 64, 4, 3))),
    (128, 64, 0, dict(forward=(128, 64, 4, 3), queries=(64, 64, 4, 3), keys=(64, 64, 4, 2))),
    (128, 128, 0, dict(forward=(64, 64, 4, 3), queries=(64, 64, 4, 2), keys=(32, 64, 4, 2))),
    (256, 128, LARGE, dict(forward=(128, 64, 8, 3), queries=(128, 64, 8, 2), keys=(32, 128, 8, 2))),
    (256, 128, 0, dict(forward=(64, 32, 4, 2), queries=(64, 32, 4, 2), keys=(32, 64, 8, 1)))]


def shared_memory(device):
    """Bytes of shared memory available to a program. The interpreter has no limit."""
    if device.type != 'cuda':
        return LARGE
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def fits(device):
    """Return whether the attention kernels' blocks fit this GPU; if not, warn once."""
    if shared_memory(device) >= SMALL:
        return True
    warnings.warn(f'the kernels require {SMALL} bytes of shared memory, but this GPU has '
                  f'{shared_memory(device)}: using the reference', stacklevel=2)
    return False


def launch(kernel, *tensors):
    """Run an attention kernel for each block of queries, or of keys, of every head and sequence.
    The kernel's arguments are the tensors (q, k and v first), then their strides."""
    q, _, v, *_ = tensors                                       # (B, H, T, D), v (B, H, T, D_V)
    (B, H, T, D), D_V = q.shape, v.shape[3]
    memory = shared_memory(q.device)
    blocks = next(row for wide, wide_v, least, row in BLOCKS
                  if D <= wide and D_V <= wide_v and memory >= least)
    M, N, warps, stages = blocks[kernel.__name__.removesuffix('_kernel')]
    if q.dtype == torch.float32:  # takes twice the memory of half precision
        M, N, warps, stages = (32, 32, 8, 1) if D <= 64 else (16, 16, 8, 1)
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == 'highest'
    M, N = min(M, power_of_2(T)), min(N, power_of_2(T))         # a short sequence is one block
    count = triton.cdiv(T, N if kernel is keys_kernel else M)   # blocks of a head
    steps = [x.stride(2) for x in tensors if x is not None and x.dim() == 4]
    with torch.cuda.device_of(q):
        kernel[count * B * H,](*tensors, *steps, H, T, D_V ** -0.5,
                               D=D, BD=power_of_2(D), D_V=D_V, BD_V=power_of_2(D_V),
                               PRECISION='ieee' if exact else 'tf32',
                               M=M, N=N, num_warps=warps, num_stages=stages)


def empty_attention(q, k, v, mean_distance):
    """Uninitialized outputs of attention_forward."""
    lse = v.new_empty(v.shape[:3], dtype=torch.float32)         # (B, H, T)
    return new_rows(v), torch.empty_like(lse) if mean_distance else lse.new_empty(0), lse


@operator(fake=empty_attention)
def attention_forward(q: Tensor, k: Tensor, v: Tensor,
                      mean_distance: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y, e (empty unless `mean_distance`), and the base-2 log-sum-exp of the logits [B, H, T]."""
    y, e, lse = empty_attention(q, k, v, mean_distance)
    q, k, v = (readable(x) for x in (q, k, v))
    launch(forward_kernel, q, k, v, y, e if mean_distance else None, lse)
    return y, e, lse


@operator(fake=lambda dy, de, dlse, q, k, v, *rest: [new_rows(x) for x in (q, k, v)],
          gradient_of=attention_forward)
def attention_backward(dy: Tensor, de: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor,
                       y: Tensor, e: Tensor, lse: Tensor, mean_distance: bool) -> list[Tensor]:
    """The gradients of q, k and v. dlse is ignored: attention() does not return lse."""
    e, de = (e, de.float().contiguous()) if mean_distance else (None, None)   # (B, H, T)
    dy, q, k, v, y = (readable(x) for x in (dy, q, k, v, y))    # (B, H, T, D or D_V)
    dq, dk, dv, mean = new_rows(q), new_rows(k), new_rows(v), torch.empty_like(lse)
    launch(queries_kernel, q, k, v, y, e, lse, dy, de, mean, dq)  # writes mean, which
    launch(keys_kernel, q, k, v, lse, dy, de, mean, dk, dv)     # keys_kernel reads
    return [dq, dk, dv]


# ---- PoPE ----------------------------------------------------------------------------------------
# Eq. 7-10: x_t -> mu(x_t) [cos, sin](t theta + delta), from D to 2D features. Only keys have a
# delta. One program per block of ROWS rows, head and sequence

POLAR_ROWS = 64 if INTERPRETED else 16  # small enough to fit a GPU's registers


@jit
def load_polar(X, DELTA, COS_SIN, t0, b, h, x_step, T, D: tl.constexpr, BD: tl.constexpr,
               SOFTPLUS: tl.constexpr, ROWS: tl.constexpr):
    """x, mu(x), and cos and sin of t theta + delta, [ROWS, BD] each. DELTA is [H, D] or None;
    COS_SIN [T, 2D] contains cos and sin of t theta."""
    x = load_rows(X + b * T * x_step + h * D, t0, x_step, T, D, BD, ROWS).to(tl.float32)
    # mu = softplus: log(1 + e^x), without overflow where x is large
    mu = tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x))) if SOFTPLUS else x
    cos = load_rows(COS_SIN, t0, 2 * D, T, D, BD, ROWS)         # (ROWS, BD)
    sin = load_rows(COS_SIN + D, t0, 2 * D, T, D, BD, ROWS)     # (ROWS, BD)
    if DELTA is not None:  # cos and sin of the sum of two angles
        c = tl.arange(0, BD)                                    # (BD,)
        delta = tl.load(DELTA + h * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
        cos, sin = (cos * tl.cos(delta) - sin * tl.sin(delta),
                    sin * tl.cos(delta) + cos * tl.sin(delta))
    return x, mu, cos, sin


@jit
def polar_kernel(X, DELTA, COS_SIN, Y, x_step, y_step, H, T,
                 D: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr, ROWS: tl.constexpr):
    """y_t = mu(x_t) [cos, sin](t theta + delta)."""
    t0, b, h = own_block(T, H, ROWS, False)                     # rows t0..t0+ROWS-1
    _, mu, cos, sin = load_polar(X, DELTA, COS_SIN, t0, b, h, x_step, T, D, BD, SOFTPLUS, ROWS)
    Y += b * T * y_step + h * 2 * D                             # token 0 of sequence b, head h
    store_rows(Y, mu * cos, t0, y_step, T, D, BD, ROWS)         # (ROWS, BD) eq. 7, 8: real part
    store_rows(Y + D, mu * sin, t0, y_step, T, D, BD, ROWS)     # (ROWS, BD) imaginary part


@jit
def polar_backward_kernel(X, DELTA, COS_SIN, DY, DX, DDELTA, x_step, dy_step, dx_step, H, T,
                          D: tl.constexpr, BD: tl.constexpr, SOFTPLUS: tl.constexpr,
                          ROWS: tl.constexpr):
    """dx = mu'(x) (dy_cos cos + dy_sin sin), elementwise, with mu' = sigmoid for softplus; and this
    block's part of ddelta = sum_t mu(x_t) (dy_sin cos - dy_cos sin)."""
    t0, b, h = own_block(T, H, ROWS, False)                     # rows t0..t0+ROWS-1
    x, mu, cos, sin = load_polar(X, DELTA, COS_SIN, t0, b, h, x_step, T, D, BD, SOFTPLUS, ROWS)
    DY += b * T * dy_step + h * 2 * D
    dy_cos = load_rows(DY, t0, dy_step, T, D, BD, ROWS).to(tl.float32)  # (ROWS, BD)
    dy_sin = load_rows(DY + D, t0, dy_step, T, D, BD, ROWS).to(tl.float32)  # (ROWS, BD)
    dx = dy_cos * cos + dy_sin * sin                            # (ROWS, BD) dloss/dmu
    if SOFTPLUS:
        dx *= tl.sigmoid(x)                                     # dmu/dx
    store_rows(DX + b * T * dx_step + h * D, dx, t0, dx_step, T, D, BD, ROWS)
    if DELTA is not None:
        ddelta = tl.sum(mu * (dy_sin * cos - dy_cos * sin), 0)  # (BD,) dy = 0 in rows t >= T
        c = tl.arange(0, BD)                                    # (BD,)
        block = (b * H + h) * tl.cdiv(T, ROWS) + t0 // ROWS     # of DDELTA [B, H, blocks, D]
        tl.store(DDELTA + block * D + c, ddelta, mask=c < D)


@functools.cache  # never evicts a table, because captured CUDA graphs may read it
def cos_sin_table(T, D, base, device):
    """cos and sin of angles(T, D, base) [T, 2D], rounded from float64."""
    angle = angles(T, D, base, device)                          # (T, D)
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()  # (T, 2D)


def launch_polar(kernel, x, delta, base, softplus, *others):
    """Run polar_kernel (others: y) or polar_backward_kernel (others: dy, dx, parts of ddelta)."""
    x, delta = readable(x), delta if delta is None else delta.contiguous()
    B, H, T, D = x.shape
    tensors = [x, delta, cos_sin_table(power_of_2(T), D, base, x.device), *others]
    steps = [z.stride(2) for z in (x, *others[:2])]             # of x, y; backward: of x, dy, dx
    with torch.cuda.device_of(x):
        kernel[triton.cdiv(T, POLAR_ROWS) * B * H,](
            *tensors, *steps, H, T, D, power_of_2(D), softplus, POLAR_ROWS)


@operator(fake=lambda x, delta, base, softplus: new_rows(x, 2 * x.shape[3]))
def polar(x: Tensor, delta: Tensor | None, base: float, softplus: bool) -> Tensor:
    """polar_reference, computed by the kernels."""
    require_triton('kernels.polar_reference')
    assert delta is None or delta.shape == (x.shape[1], x.shape[3])  # (H, D)
    y = new_rows(x, 2 * x.shape[3])                             # (B, H, T, 2D)
    launch_polar(polar_kernel, x, delta, base, softplus, y)
    return y


@operator(fake=lambda dy, x, delta, base, softplus: [
    new_rows(x), x.new_empty(0) if delta is None else torch.empty_like(delta)],
          gradient_of=polar, keep_outputs=False)
def polar_backward(dy: Tensor, x: Tensor, delta: Tensor | None, base: float,
                   softplus: bool) -> list[Tensor]:
    """The gradients of x and delta (empty if delta is None)."""
    dx, parts = new_rows(x), None                               # (B, H, T, D)
    if delta is not None:  # each block of rows writes its part of ddelta
        B, H, T, D = x.shape
        parts = x.new_empty(B, H, triton.cdiv(T, POLAR_ROWS), D, dtype=torch.float32)
    launch_polar(polar_backward_kernel, x, delta, base, softplus, readable(dy), dx, parts)
    return [dx, x.new_empty(0) if delta is None else parts.sum(dim=(0, 2)).to(delta.dtype)]


# ---- PRISM's Algorithm 1: one program per cursor and sequence ------------------------------------
#
# A program keeps the histogram h of its cursor in registers, one bin per offset d, and loops over
# the tokens t. Row t of HISTORY [B, C, T+1, L], L = 2T + 1, is the histogram before token t;
# pointers to a row point to its middle, offset 0. A step reads the bins d - 1 and d + 1, which are
# in registers of other threads, so it loads them from HISTORY after a barrier. Before token t only
# the offsets -t..t have mass, so only these are stored and loaded. The first launch has 128 bins
# and stops before mass can leave them; the next continues with 256, and so on.

@jit
def within(d, reach):
    """Return -reach <= d <= reach. (The LLVM of Triton 3.6 miscompiles abs(d) <= reach.)"""
    return (d >= -reach) & (d <= reach)


@jit
def load_bins(ROW, d, reach):
    """Load bins d of the histogram at ROW, which has mass only at the offsets -reach..reach."""
    return tl.load(ROW + d, mask=within(d, reach), other=0.0)


@jit
def after_reset(h, d, total, p_reset):
    """Algorithm 1 (2): a reset moves all mass to offset 0."""
    return (1 - p_reset) * h + tl.where(d == 0, p_reset * total, 0.0)


@jit
def after_step(h, ROW, d, t, total, RESET, STEP):
    """Algorithm 1 (2), (3): the histogram h, which is also stored at ROW, after a reset and a step.
    Mass moves to offset d from d - 1 by an increment and from d + 1 by a decrement."""
    p_reset = tl.load(RESET)                                    # gates of token t: scalars
    p_incr, p_decr, p_keep = tl.load(STEP), tl.load(STEP + 1), tl.load(STEP + 2)
    lower = after_reset(load_bins(ROW, d - 1, t), d - 1, total, p_reset)
    higher = after_reset(load_bins(ROW, d + 1, t), d + 1, total, p_reset)
    return p_incr * lower + p_decr * higher + p_keep * after_reset(h, d, total, p_reset)


@jit
def step_gradient(dh, DROW, h, d, t, total, RESET, STEP, DRESET, DSTEP):
    """Return dh before the step, given dh after it (also at DROW); store the gates' gradients."""
    p_reset = tl.load(RESET)                                    # gates of token t: scalars
    p_incr, p_decr, p_keep = tl.load(STEP), tl.load(STEP + 1), tl.load(STEP + 2)
    higher, lower = load_bins(DROW, d + 1, t + 1), load_bins(DROW, d - 1, t + 1)  # (BL,) each
    here = after_reset(h, d, total, p_reset)                    # (BL,)
    tl.store(DSTEP, tl.sum(here * higher, axis=0))              # dp_incr: d moves to d + 1
    tl.store(DSTEP + 1, tl.sum(here * lower, axis=0))           # dp_decr: d moves to d - 1
    tl.store(DSTEP + 2, tl.sum(here * dh, axis=0))              # dp_keep
    dh = p_incr * higher + p_decr * lower + p_keep * dh  # between the reset and the step
    dh_0 = p_incr * tl.load(DROW + 1) + p_decr * tl.load(DROW - 1) + p_keep * tl.load(DROW)  # dh[0]
    tl.store(DRESET, total * dh_0 - tl.sum(h * dh, axis=0))     # dp_reset: from all d to 0
    return (1 - p_reset) * dh + p_reset * dh_0                  # (BL,)


@jit
def scan_kernel(RESET, STEP, GAMMA, COPY, HISTORY, first, last, T, C, BL: tl.constexpr):
    """Algorithm 1 for the tokens first..last-1: fill rows first+1..last of HISTORY."""
    n, L = tl.program_id(0).to(tl.int64), 2 * T + 1             # n = b C + c
    d = tl.arange(0, BL) - BL // 2                              # offsets (BL,)
    HISTORY += n * (T + 1) * L + T  # offset 0 (the paper's mid) of row 0
    gamma = None if GAMMA is None else tl.load(GAMMA + n % C)   # gamma_c
    h = load_bins(HISTORY + tl.cast(first, tl.int64) * L, d, first)   # (BL,)
    for t in range(first, last):
        row, ROW = n * T + t, HISTORY + tl.cast(t, tl.int64) * L
        total = tl.sum(h, axis=0) if gamma is None else 1.0     # (1)
        h = after_step(h, ROW, d, t, total, RESET + row, STEP + 3 * row)  # (2), (3)
        if COPY is not None:                                    # (4)
            JUMPS = COPY + row * (T + 1)                        # (T+1,) p_copy of token t
            h = tl.load(JUMPS + T) * h + tl.load(JUMPS + d, mask=(d >= 0) & (d <= t), other=0.0)
        if gamma is not None:                                   # (5): (h + eps)^gamma, normalized
            x = tl.where(within(d, t + 1), gamma * tl.log(h + EPS), float('-inf'))  # (BL,)
            h = tl.exp(x - tl.max(x, axis=0))                   # (BL,)
            h *= 1.0 / tl.sum(h, axis=0)
        tl.store(ROW + L + d, h, mask=within(d, t + 1))         # (BL,) to row t + 1
        tl.debug_barrier()  # the next token reads what other threads stored


@jit
def scan_backward_kernel(DHISTORY, RESET, STEP, GAMMA, COPY, HISTORY, DRESET, DSTEP, DGAMMA, DCOPY,
                         GRADS, first, last, T, C, BL: tl.constexpr):
    """Gradients of the gates, gamma and the copies for the tokens last-1..first. Threads exchange
    dh before (4) through rows 0 and 1 of GRADS, alternately; row 2 passes dh before token `first`
    to the next launch."""
    n, L = tl.program_id(0).to(tl.int64), 2 * T + 1             # n = b C + c
    d = tl.arange(0, BL) - BL // 2                              # offsets (BL,)
    HISTORY += n * (T + 1) * L + T  # offset 0 of row 0, as in scan_kernel
    DHISTORY += n * (T + 1) * L + T
    GRADS += n * 3 * L + T                                      # [B, C, 3, L]
    gamma = None if GAMMA is None else tl.load(GAMMA + n % C)   # gamma_c
    dgamma = tl.zeros([BL], tl.float32)                         # (BL,) summed at the end
    dh = load_bins(GRADS + 2 * L, d, last)                      # (BL,)
    for t in range(last - 1, first - 1, -1):
        row, ROW = n * T + t, HISTORY + tl.cast(t, tl.int64) * L
        DROW = GRADS + t % 2 * L  # alternating rows: one barrier per token suffices
        dh += load_bins(DHISTORY + tl.cast(t + 1, tl.int64) * L, d, t + 1)  # (BL,)
        # recompute the histograms of token t: h before it, moved after its step, x after its copy
        h = load_bins(ROW, d, t)                                # (BL,) h_t
        total = tl.sum(h, axis=0) if gamma is None else 1.0     # (1)
        moved = after_step(h, ROW, d, t, total, RESET + row, STEP + 3 * row)  # (BL,)
        x = moved
        if COPY is not None:
            JUMPS, DJUMPS, past = COPY + row * (T + 1), DCOPY + row * (T + 1), (d >= 0) & (d <= t)
            x = tl.load(JUMPS + T) * moved + tl.load(JUMPS + d, mask=past, other=0.0)
        if gamma is not None:                                   # (5): softmax(gamma log(x + eps))
            y = load_bins(ROW + L, d, t + 1)                    # (BL,) h_(t+1)
            dh = y * (dh - tl.sum(y * dh, axis=0))
            dgamma += dh * tl.log(x + EPS)                  # (BL,)
            dh = gamma * dh / (x + EPS)                     # (BL,) 0 where y is 0
        if COPY is not None:                                    # (4)
            tl.store(DJUMPS + d, dh, mask=past)                 # dp_copy[k] at k = d
            tl.store(DJUMPS + T, tl.sum(moved * dh, axis=0))    # dp_no-copy
            dh *= tl.load(JUMPS + T)
        tl.store(DROW + d, dh, mask=within(d, t + 1))           # (BL,)
        tl.debug_barrier()  # step_gradient reads what other threads stored
        dh = step_gradient(dh, DROW, h, d, t, total, RESET + row, STEP + 3 * row, DRESET + row,
                           DSTEP + 3 * row)
    tl.store(GRADS + 2 * L + d, dh, mask=within(d, first))      # (BL,) of h before token `first`
    if GAMMA is not None:
        tl.store(DGAMMA + n, tl.load(DGAMMA + n) + tl.sum(dgamma, axis=0))


def scan_launches(T, C):
    """Yield the arguments and options of each launch, in the order of the tokens."""
    first, BL = 0, 128
    while first < T:
        last = min(T, BL // 2 - 1)                              # then mass can be in the last bin
        yield dict(first=first, last=last, T=T, C=C, BL=BL, num_stages=1,
                   num_warps=min(16, max(1, BL // 256)))
        first, BL = last, 2 * BL


@operator(fake=lambda reset, *rest: reset.new_empty(
    *reset.shape[:2], reset.shape[2] + 1, 2 * reset.shape[2] + 1))
def scan_forward(reset: Tensor, step: Tensor, gamma: Tensor | None, copy: Tensor | None) -> Tensor:
    """Algorithm 1: the histograms before each token and after the last one [B, C, T+1, L]."""
    inputs = [x if x is None else x.contiguous() for x in (reset, step, gamma, copy)]
    B, C, T = reset.shape
    history = reset.new_zeros(B, C, T + 1, 2 * T + 1)           # (B, C, T+1, L)
    history[:, :, 0, T] = 1                                     # all mass at offset 0
    with torch.cuda.device_of(reset):
        for sizes in scan_launches(T, C):
            scan_kernel[B * C,](*inputs, history, **sizes)
    return history


@operator(fake=lambda dhistory, reset, step, gamma, copy, history: [
    reset.new_empty(reset.shape), step.new_empty(step.shape), reset.new_empty(reset.shape[1]),
    reset.new_empty(0 if copy is None else copy.shape)], gradient_of=scan_forward)
def scan_backward(dhistory: Tensor, reset: Tensor, step: Tensor, gamma: Tensor | None,
                  copy: Tensor | None, history: Tensor) -> list[Tensor]:
    """Gradients of scan_forward's inputs. Those of inputs that are None have no meaning."""
    tensors = dhistory, reset, step, gamma, copy, history
    tensors = [x if x is None else x.contiguous() for x in tensors]
    B, C, T = reset.shape
    dreset, dstep = reset.new_empty(reset.shape), step.new_empty(step.shape)
    dgamma = reset.new_zeros(B, C)                              # the kernel adds to it
    dcopy = reset.new_zeros(0 if copy is None else copy.shape)  # stays 0 for tokens after t
    exchange = reset.new_zeros(B, C, 3, 2 * T + 1)              # (B, C, 3, L)
    with torch.cuda.device_of(reset):
        for sizes in reversed([*scan_launches(T, C)]):
            scan_backward_kernel[B * C,](*tensors, dreset, dstep, dgamma, dcopy, exchange, **sizes)
    return [dreset, dstep, dgamma.sum(dim=0), dcopy]            # dgamma (B, C) -> (C,)


# ---- python kernels.py ---------------------------------------------------------------------------

def sample_inputs(name, B, H, T, D, dtype=torch.float32, device='cpu', P=None):
    """Random arguments of a public function, all of which require gradients. For cursor_scan, H is
    the number of cursors, D is d_pe, and the table has the offsets -P..P (P=None: P = T)."""
    if name == 'cursor_scan':
        copy = torch.randn(B, H, T, T + 1)                      # logits
        copy[..., :T] += torch.full((T, T), -math.inf).triu(1)  # token t jumps only to 0..t
        inputs = [0.3 * torch.rand(B, H, T), torch.randn(B, H, T, 3).mul(2).softmax(dim=-1),
                  1.2 + torch.rand(H), torch.randn(2 * (P or T) + 1, D), copy.softmax(dim=-1)]
    else:
        inputs = [torch.randn(B, H, T, D).to(dtype) for _ in range(3)]  # q, k, v
        own = dict(pope_attention=-6 * torch.rand(H, D), vipe_attention=0.3 * torch.randn(H, D))
        inputs.append(own[name])                                # delta or u [H, D]
    return [x.to(device).requires_grad_() for x in inputs]


def outputs_and_gradients(function, inputs):
    """The outputs, and the gradients of a random weighted sum of them (0 for unused inputs)."""
    ys = function(*inputs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    g = torch.Generator().manual_seed(0)
    total = sum((y.double() * torch.randn(y.shape, generator=g).to(y.device)).sum() for y in ys)
    grads = torch.autograd.grad(total, inputs, materialize_grads=True)
    return [y.detach() for y in ys] + [*grads]


def compare(function, reference, inputs):
    """(error, allowed) of the worst output or gradient a. With b from the reference in float64, the
    error is ||a - b|| / max(1, ||b||); allowed: 3 (the reference's error + max(eps, 3e-5))."""
    exact = outputs_and_gradients(reference, [x.detach().double().requires_grad_() for x in inputs])
    error, own = (torch.stack([(a.double() - b).norm() / b.norm().clamp(min=1)
                               for a, b in zip(outputs_and_gradients(f, inputs), exact)])
                  for f in (function, reference))
    allowed = 3 * (own + max(torch.finfo(inputs[0].dtype).eps, 3e-5))
    worst = (error / allowed).nan_to_num(math.inf).argmax()
    return error[worst].item(), allowed[worst].item()


def time_attention(D, B=4, T=4096, width=2048):
    """Print times of attention in bfloat16 on CUDA, and their ratios to PyTorch's attention."""
    from triton.testing import do_bench
    q, k, v, param = sample_inputs('pope_attention', B, width // D, T, D, torch.bfloat16, 'cuda')
    dy, param, baseline = torch.randn_like(q), param.detach(), None     # param: delta, or u
    for name, forward in dict(
            sdpa=lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            plain=lambda: attention(q, k, v)[0],
            pope=lambda: pope_attention(q, k, v, param),
            vipe=lambda: vipe_attention(q, k, v, param)[0]).items():
        ms = [do_bench(f, return_mode='median')
              for f in (forward, lambda f=forward: torch.autograd.grad(f(), (q, k, v), dy))]
        baseline = baseline or ms                               # the first: PyTorch's attention
        once, both = (f'{a:.2f} ms ({a / b:.2f}x)' for a, b in zip(ms, baseline))
        print(f'D={D} {name}: forward {once}, with backward {both}')


def main():
    """Check every kernel; on CUDA, also time attention. Return the exit status."""
    import pe  # has the reference of cursor_scan
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    torch.manual_seed(0)
    wrong = False
    for name in ('pope_attention', 'vipe_attention', 'cursor_scan'):
        function = globals()[name]
        reference = pe.cursor_scan if name == 'cursor_scan' else globals()[f'{name}_reference']
        half = () if name == 'cursor_scan' else (torch.float16, torch.bfloat16)
        for dtype in (torch.float32, *half):
            inputs = sample_inputs(name, 2, 2, 70, 40, dtype, device)
            error, allowed = compare(function, reference, inputs)
            wrong |= not error <= allowed  # also if the error is NaN
            print(f'{name:14} {dtype}: relative error {error:.1e}, allowed {allowed:.1e}')
    for D in (32, 64, 128) if device == 'cuda' else ():
        time_attention(D)
    return 2 * wrong


if __name__ == '__main__':
    sys.exit(print(__doc__) if {'-h', '--help'} & set(sys.argv) else main())
