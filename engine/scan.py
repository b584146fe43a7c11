"""PRISM's scan in Triton: Algorithms 1 and 2 as pe.cursor_scan has them, in float32.

On the way it keeps one histogram in CHUNK. `python kernels.py` checks it.
"""
from __future__ import annotations  # so that tl.constexpr is not read where Triton is missing

import math

import torch

from engine.operators import INTERPRETED, constexpr, fold_seeds, jit, no_second_gradient, tl, triton

LN2 = constexpr(math.log(2))
EPS, CHUNK = 1e-8, 16  # of the sharpened histograms; tokens of a chunk
EPSILON = constexpr(EPS)
K = constexpr(CHUNK)
TILE = constexpr(32)


# --------------------------------------------------------------------------------------------------
# one program for each cursor of each sequence
#
# A program holds its cursor's histogram h in registers, one bin for each offset d, and walks over
# the tokens t. Pointers to a histogram or to the table start at its middle, offset 0.
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
def within(d, reach):
    """Whether -reach <= d <= reach. Of tl.abs(d) <= reach Triton 3.6 compiles another mask."""
    return (d >= -reach) & (d <= reach)


@jit
def load_bins(ROW, d, reach):
    """Bins d of the histogram at ROW, which has mass at the offsets -reach..reach."""
    return tl.load(ROW + d, mask=within(d, reach), other=0.0)


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
    """From dh, also at DROW, the gradient of after_step's result: that of h; stores the gates'."""
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
    tl.store(HISTORY + d, h, mask=within(d, start))
    tl.debug_barrier()
    for t in range(start, end):
        ROW = HISTORY + (t - start) * L
        total = tl.sum(h, axis=0) if gamma is None else 1.0  # (1)
        h = after_step(h, ROW, d, t, total, load_gates(RESET, STEP, n * T + t))
        if COPY is not None:  # (4)
            p_copy, p_no_copy = load_copy(COPY, n * T + t, d, t, T)
            h = p_no_copy * h + p_copy
        if gamma is not None:  # (5): (h + eps)^gamma, normalized
            x = tl.where(within(d, t + 1), gamma * log2(h + EPSILON), float('-inf'))
            h = tl.exp2(x - tl.max(x, axis=0))
            h *= 1.0 / tl.sum(h, axis=0)
        tl.store(ROW + L + d, h, mask=within(d, t + 1))
        tl.debug_barrier()
    return h


@jit
def scan_kernel(RESET, STEP, GAMMA, TABLE, COPY, OUT, CHECKPOINTS, HISTORY, first, last, T, L, D,
                BL: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Algorithms 1 and 2 at the tokens first..last-1: h_t, and e_t = sum_d h_t[d] f(d)."""
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
        tl.store(CHECKPOINTS + (start // K + 1) * L + d, h, mask=within(d, end))
        t = start + k
        e = tl.zeros([K, BD], tl.float32)
        for low in range(-end, end + 1, TILE):
            j = low + tl.arange(0, TILE)
            hs = load_bins(HISTORY + (k + 1) * L, j[None, :], tl.where(t < end, t + 1, -1))
            inside = within(j[:, None], end) & (c < D)
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
        inside = within(j[:, None], end) & (c < D)
        f = tl.load(TABLE + j[:, None] * D + c, mask=inside, other=0.0)
        dh = tl.dot(de, tl.trans(f), input_precision=PRECISION)
        tl.store(GRADS + k * L + j[None, :], dh, mask=within(j[None, :], reach))
        if DTABLE is not None:
            hs = load_bins(HISTORY + (k + 1) * L, j[None, :], reach)
            df = tl.dot(tl.trans(hs), de, input_precision=PRECISION)
            tl.atomic_add(DTABLE + j[:, None] * D + c, df, mask=inside, sem='relaxed')


@jit
def scan_backward_kernel(DOUT, RESET, STEP, GAMMA, TABLE, COPY, CHECKPOINTS, DRESET, DSTEP, DGAMMA,
                         DTABLE, DCOPY, HISTORY, GRADS, first, last, T, L, D,
                         BL: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of the gates, gamma, the copies and the table at the tokens last-1..first.

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
            tl.store(DROW + d, dh, mask=within(d, t + 1))
            tl.debug_barrier()
            dh = step_gradient(dh, DROW, h, d, t, total, gates, DRESET + row, DSTEP + 3 * row)
        tl.debug_barrier()
    tl.store(GRADS + K * L + d, dh, mask=within(d, first))
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
scan_forward.register_vmap(fold_seeds(scan_forward, shared=3))    # the table
scan_backward.register_vmap(fold_seeds(scan_backward, shared=4))
