"""What things cost: a training step for several seeds together, and the kernels."""
import itertools
import json
import math
import sys
import time

import torch
import torch.nn.functional as F

import kernels
import pe

# --------------------------------------------------------------------------------------------------
# the kernels: python kernels.py

def kernel_main(doc, argv):
    """Check the kernels; on a GPU time them and append a line for each shape to --results=FILE."""
    paths = [arg.removeprefix('--results=') for arg in argv if arg.startswith('--results=')]
    if len(paths) < len(argv):
        print(doc)
        sys.exit(0 if '--help' in argv else 2)
    if kernels.triton is None:
        sys.exit('kernels.py: needs Triton, which is for Linux: pip install triton')
    try:
        files = [open(path, 'a') for path in paths]  # fails now, not after the benchmark
    except OSError as error:
        print(f'kernels.py: cannot write {error.filename}: {error.strerror}', file=sys.stderr)
        sys.exit(2)

    gpu = torch.cuda.is_available()
    bad = kernel_check('cuda' if gpu else 'cpu')
    if gpu:
        about = dict(command='python ' + ' '.join(sys.argv), torch=torch.__version__,
                     triton=kernels.triton.__version__, hardware=torch.cuda.get_device_name())
        for rows in itertools.chain([kernel_scan_benchmark()], kernel_benchmark()):
            for f in files:
                print(json.dumps(about | dict(kernels=rows)), file=f, flush=True)
    else:
        print('no GPU: the benchmark needs one' + ('; nothing written' if paths else ''))
    if bad:
        sys.exit(f'kernels.py: wrong: {", ".join(bad)}')


def kernel_inputs(name, B, H, T, D, dtype, device):
    """Inputs of NAME_attention: q, k, v and its own, which all want gradients.

    They are the same on every device.
    """
    if name == 'pope':
        own = -6 * torch.rand(H, D)
    elif name == 'vipe':
        own = 0.3 * torch.randn(H, D)
    else:
        own = torch.randn(H, T)
    qkv = [torch.randn(B, H, T, D).to(device, dtype).requires_grad_() for _ in range(3)]
    return *qkv, own.to(device).requires_grad_()


def kernel_scan_inputs(B, C, T, P, d_pe, device):
    """Inputs of cursor_scan, which all want gradients; copies come from tokens up to this one.

    They are the same on every device.
    """
    later = torch.ones(T, T).triu(1).bool()
    jumps = torch.randn(B, C, T, T).masked_fill(later, -math.inf)
    jumps = torch.cat([jumps, torch.ones(B, C, T, 1)], dim=-1).softmax(dim=-1)
    reset = torch.rand(B, C, T) * 0.3
    step = (2 * torch.randn(B, C, T, 3)).softmax(dim=-1)
    gamma = 1.2 + torch.rand(C)
    table = torch.randn(2 * P + 1, d_pe)
    return tuple(x.to(device).requires_grad_() for x in (reset, step, gamma, table, jumps))


def kernel_errors(function, reference, inputs):
    """||a - b|| / ||b|| of every output and of the gradient of every input.

    a: the function's; b: the reference's in float64.
    """
    double = [x.detach().double().requires_grad_() for x in inputs]
    outputs = [y if isinstance(y, tuple) else (y,)
               for y in (function(*inputs), reference(*double))]
    weights = [torch.randn_like(y.double()) for y in outputs[1]]
    grads = []
    for ys, xs in zip(outputs, (inputs, double)):
        weighted = [(y.double() * w).sum() for y, w in zip(ys, weights)]
        grads.append(torch.autograd.grad(weighted, xs))
    pairs = [*zip(*outputs), *zip(*grads)]
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


def kernel_check(device):
    """Print the largest relative error of every kernel in every precision.

    Returns the names of those whose error is beyond what rounding explains.
    """
    torch.manual_seed(0)
    interpreted = '' if device == 'cuda' else " (Triton's interpreter)"
    print(f'relative error against the float64 reference, on {device}{interpreted}')
    bad = []
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 5e-2)):
        for name in ('pope', 'vipe', 'bias'):
            inputs = kernel_inputs(name, 2, 2, 150, 48, dtype, device)
            function = getattr(kernels, f'{name}_attention')
            reference = getattr(kernels, f'{name}_attention_reference')
            error = max(kernel_errors(function, reference, inputs))
            print(f'  {str(dtype)[6:]:9} {name}_attention  {error:.1e}')
            if not error <= limit:  # NaN is bad
                bad.append(f'{name} {dtype}')
    inputs = kernel_scan_inputs(2, 2, 50, 60, 12, device)
    error = max(kernel_errors(kernels.cursor_scan, pe.cursor_scan, inputs))
    print(f'  float32   cursor_scan     {error:.1e}')
    return bad if error <= 1e-4 else bad + ['cursor_scan']


def kernel_contestants(H, T, D, device):
    """{name: function of q, k, v}: the kernels, and what one would use without them."""
    delta, u, bias = (x.to(device).requires_grad_() for x in
                      (-6 * torch.rand(H, D), torch.randn(H, D) * 0.1, torch.randn(H, T)))
    t = torch.arange(T, device=device)
    half, full = (t[:, None] * 1e4 ** (-torch.arange(n, device=device) / n) for n in (D // 2, D))

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=D ** -0.5)

    @torch.compile(dynamic=False)
    def rope(x):
        a, b = x.chunk(2, dim=-1)
        turned = [a * half.cos() - b * half.sin(), a * half.sin() + b * half.cos()]
        return torch.cat(turned, dim=-1).to(x.dtype)

    def wide_pope(q, k, v):
        q, k, late = F.softplus(q), F.softplus(k), full + delta[:, None]
        q = torch.cat([q * full.cos(), q * full.sin()], dim=-1).to(v.dtype)
        k = torch.cat([k * late.cos(), k * late.sin()], dim=-1).to(v.dtype)
        return sdpa(q, k, F.pad(v, (0, D)))[..., :D]

    return {'sdpa': sdpa, 'sdpa + rope': lambda q, k, v: sdpa(rope(q), rope(k), v),
            'pope_attention': lambda q, k, v: kernels.pope_attention(q, k, v, delta),
            'pope, 2D-wide sdpa': wide_pope,
            'vipe_attention': lambda q, k, v: kernels.vipe_attention(q, k, v, u)[0],
            'bias_attention': lambda q, k, v: kernels.bias_attention(q, k, v, bias),
            **kernel_flex_contestants(u, bias, t), **kernel_library_contestants(full, delta)}


def kernel_flex_contestants(u, bias, t):
    """What PyTorch's flex attention can say of ViPE and of a bias by distance."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    flex = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, len(t), len(t), device=t.device)
    log_n = (t + 1).float().log()

    def flex_bias(q, k, v):
        def score(x, b, h, i, j):
            return x + bias[h, (i - j).clamp(min=0)]
        return flex(q, k, v, score_mod=score, block_mask=mask)

    def flex_vipe(q, k, v):
        col = 1 + (k.float() @ u[..., None])[..., 0]

        def score(x, b, h, i, j):
            return x * log_n[i] * col[b, h, j]
        return flex(q, k, v, score_mod=score, block_mask=mask)

    return {'bias, flex': flex_bias, 'vipe without distance, flex': flex_vipe}


def kernel_library_contestants(angle, delta):
    """PoPE's published package, where it is installed."""
    try:
        from PoPE_pytorch import flash_attn_with_pope
    except ImportError:
        return {}

    def published(q, k, v):
        return flash_attn_with_pope(q, k, v, pos_emb=(angle, delta), causal=True)
    return {'pope, PoPE-pytorch': published}


def kernel_benchmark(tokens=16384, width=2048):
    """Yields [{T, D, what, forward_ms, both_ms, forward_tflops, both_tflops, peak_mb}] of a shape.

    On CUDA in bfloat16, B T = tokens, H D = width. Times are medians of rounds in which all
    contestants take turns. TFLOP/s count 2 B H T^2 D for a forward pass of causal attention and 2.5
    times that for a backward pass; PoPE 1.5 and 1.6 times as many.
    """
    for D in (64, 128):
        for T in (512, 1024, 2048, 4096, 8192, 16384):
            B, H = tokens // T, width // D
            q, k, v = (torch.randn(B, T, H, D, device='cuda', dtype=torch.bfloat16).transpose(1, 2)
                       .requires_grad_() for _ in range(3))
            torch._dynamo.reset()  # at 8 recompilations it gives up
            rows = [dict(T=T, D=D, **row) for row in kernel_compare(q, k, v)]
            print(f'\nT={T} D={D} B={B} H={H} bfloat16{"":18} forward ms   / sdpa   TFLOP/s    '
                  'both ms   / sdpa   TFLOP/s    peak MB')
            kernel_print(rows)
            yield rows


def kernel_run(function, inputs, dy, backward=True):
    """One call, and where asked its gradients; those of delta, u or bias come with them."""
    y = function(*inputs)
    if backward:
        torch.autograd.grad(y, inputs, dy)


def kernel_ms(function, inputs, dy, backward):
    """Milliseconds of a call; the launches are queued before the first one runs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10 ** 7)
    start.record()
    kernel_run(function, inputs, dy, backward)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def kernel_peak_mb(function, inputs, dy):
    """Memory that a call and its gradients take, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel_run(function, inputs, dy)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2 ** 20


def kernel_compare(q, k, v):
    """The contestants' rows for these inputs, those that failed last."""
    B, H, T, D = q.shape
    dy = torch.randn_like(q)
    contestants, peaks, skipped = kernel_contestants(H, T, D, 'cuda'), {}, []
    for name, function in list(contestants.items()):
        try:
            for _ in range(3):
                kernel_run(function, (q, k, v), dy)
            peaks[name] = kernel_peak_mb(function, (q, k, v), dy)
        except Exception as error:  # another library's failure: one line
            why = f'{type(error).__name__}: {str(error).partition(chr(10))[0]}'[:100]
            skipped.append(dict(what=name, skipped=why))
            del contestants[name]

    times = {}
    for backward in (False, True):
        rounds = []
        for _ in range(15):
            rounds.append({name: kernel_ms(function, (q, k, v), dy, backward)
                           for name, function in contestants.items()})
        for name in contestants:
            times[name, backward] = sorted(r[name] for r in rounds)[7]

    work = 2 * B * H * T * T * D / 1e9  # TFLOP/s of a forward pass of 1 ms
    rows = []
    for name in contestants:
        forward, both = times[name, False], times[name, True]
        forward_work, both_work = (1.5, 1.5 + 1.6 * 2.5) if 'pope' in name else (1, 3.5)
        rows.append(dict(what=name, forward_ms=round(forward, 3), both_ms=round(both, 3),
                         forward_tflops=round(forward_work * work / forward, 1),
                         both_tflops=round(both_work * work / both, 1),
                         peak_mb=round(peaks[name], 1)))
    return rows + skipped


def kernel_print(rows):
    """Print the rows of a shape, times also over those of PyTorch's attention."""
    plain = next(row for row in rows if row['what'] == 'sdpa')
    for row in rows:
        if 'skipped' in row:
            print(f'  {row["what"]:38} {row["skipped"]}')
            continue
        forward, both = row['forward_ms'], row['both_ms']
        print(f'  {row["what"]:38} {forward:12.3f} {forward / plain["forward_ms"]:8.2f} '
              f'{row["forward_tflops"]:9.1f} {both:10.3f} {both / plain["both_ms"]:8.2f} '
              f'{row["both_tflops"]:9.1f} {row["peak_mb"]:10.1f}', flush=True)


def kernel_scan_benchmark(B=100, C=140, T=256, P=256, d_pe=32):
    """[{what, ms, peak_mb}]: cursor_scan and its plain form on CUDA, forward and backward.

    Medians of rounds that take turns.
    """
    offsets = torch.arange(-P, P + 1, device='cuda')
    table = pe.sinusoids(offsets, d_pe, 1e4, torch.empty(0, device='cuda'))
    gates = torch.randn(B, C, T, 4, device='cuda')
    reset, step = gates[..., 0].sigmoid(), gates[..., 1:].softmax(dim=-1)
    gamma = torch.full((C,), 2.0, device='cuda')
    inputs = [x.requires_grad_() for x in (reset, step, gamma)]
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('high')  # tf32 for the product with the table
    dy = torch.randn(B, C, T, d_pe, device='cuda')
    scans = {'cursor_scan': lambda *gates: kernels.cursor_scan(*gates, table),
             'pe.cursor_scan': lambda *gates: pe.cursor_scan(*gates, table)}
    times, peaks, rows = {}, {}, []

    def timed(name):
        torch.cuda.synchronize()
        start = time.perf_counter()
        kernel_run(scans[name], inputs, dy)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    for name in scans:
        try:
            timed(name)
            peaks[name] = kernel_peak_mb(scans[name], inputs, dy)
            times[name] = []
        except torch.cuda.OutOfMemoryError:
            rows.append(dict(what=name, skipped='out of memory'))
            torch.cuda.empty_cache()
    for _ in range(7):
        for name in times:
            times[name].append(timed(name))
    torch.set_float32_matmul_precision(usual)
    rows += [dict(what=name, ms=round(sorted(found)[3], 2), peak_mb=round(peaks[name], 1))
             for name, found in times.items()]
    print(f'\ncursor_scan at B={B} C={C} T={T} P={P} d_pe={d_pe}, forward and backward')
    for row in rows:
        cost = row.get('skipped') or f'{row["ms"]:10.2f} ms {row["peak_mb"]:12.1f} MB'
        print(f'  {row["what"]:38}{cost}')
    return [dict(row, B=B, C=C, T=T, P=P, d_pe=d_pe) for row in rows]
