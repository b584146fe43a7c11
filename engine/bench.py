"""What things cost: a training step for several seeds together, and the kernels."""
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

import kernels
import pe
from engine import checkpoint, config, report, seeds

# --------------------------------------------------------------------------------------------------
# a training step

def synchronize(device):
    """Wait for the device."""
    if device.type == 'cuda':
        torch.cuda.synchronize()


def seconds(group, steps, first, device):
    """How long `steps` training steps take."""
    synchronize(device)
    start = time.perf_counter()
    for step in range(first, first + steps):
        group.step(step)
    synchronize(device)
    return time.perf_counter() - start


def benchmark(cfg, device, make_group, rounds=5):
    """Time the training step for the first 1, 2, 4, ... of the seeds together.

    [{what, seeds, ms, ratio, tokens_per_s, tflops}], medians over rounds that take turns. ms: per
    step of all these seeds; ratio: that over as many seeds trained one after the other.
    make_group(cfg, device): its seeds.Group.
    """
    groups = {}
    for i in range(len(cfg.seeds).bit_length()):
        groups[f'{2 ** i} together'] = make_group(replace(cfg, seeds=cfg.seeds[:2 ** i]), device)
    if device.type == 'cuda' or cfg.compile:
        plain = replace(cfg, seeds=cfg.seeds[:1], compile=False, graph=False)
        groups['1, neither compiled nor in a graph'] = make_group(plain, device)

    steps, times = {}, {}
    for name, group in groups.items():
        seconds(group, 5 if device.type == 'cuda' else 1, 0, device)       # records the graph
        steps[name] = math.ceil(0.3 / seconds(group, 1, 5, device))
        times[name] = []
    for _ in tqdm(range(rounds), unit='round', disable=None, leave=False):
        for name, group in groups.items():
            times[name].append(seconds(group, steps[name], 6, device) / steps[name])

    rows = []
    for name, group in groups.items():
        count, took = len(group.models), statistics.median(times[name])
        ratio = statistics.median(t / one for t, one in zip(times[name], times['1 together']))
        tokens = count * cfg.batch_size * cfg.train_len
        tflops = 1e-12 * tokens / took * flops_per_token(cfg, group.models[0])
        rows.append(dict(what=name, seeds=count, ms=round(1e3 * took, 3),
                         ratio=round(ratio / count, 3), tokens_per_s=round(tokens / took),
                         tflops=round(tflops, 3)))
    return rows


def flops_per_token(cfg, model):
    """6 N + 12 n_layer d_model T: training on a token, as PaLM counts model FLOP utilization.

    N: parameters, without the token embedding unless it is also the output matrix; T: the length
    of the sequence.
    """
    N = sum(p.numel() for p in model.parameters())
    if not cfg.tie:
        N -= model.embedding.weight.numel()
    return 6 * N + 12 * cfg.n_layer * cfg.d_model * cfg.train_len


def run(label, cfg, command, make_group):
    """--benchmark: print what benchmark() finds, and append it to cfg.results."""
    if cfg.results:
        checkpoint.append(cfg.results, '')                 # fails now rather than after the timing
    device = seeds.pick_device(cfg)
    seeds.check_parallel(cfg, device, seeds.Ranks())
    rows = benchmark(cfg, device, make_group)
    print(f'\n{label}')
    report.print_table(rows)
    if cfg.results:
        line = report.provenance(cfg, command, device) | dict(steps=rows)
        checkpoint.append(cfg.results, json.dumps(line) + '\n')


# --------------------------------------------------------------------------------------------------
# the kernels: python kernels.py

@dataclass
class KernelArguments:
    """What python kernels.py takes."""
    results: str = ''              # append a JSON line about each shape to this file


def relative_errors(function, reference, inputs):
    """||a - b|| / ||b|| of every output and every input's gradient; b: the reference in float64."""
    double = [x.detach().double().requires_grad_() for x in inputs]
    found = []
    for f, xs in ((function, inputs), (reference, double)):
        y = f(*xs)
        ys = y if isinstance(y, tuple) else (y,)
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(y.shape, generator=generator).to(y.device) for y in ys]
        total = sum((y.double() * w).sum() for y, w in zip(ys, weights))
        found.append([*ys, *torch.autograd.grad(total, xs)])
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found)]


def attention_inputs(name, B, H, T, D, dtype, device):
    """Inputs of kernels.NAME_attention, the same on every device; all want gradients."""
    qkv = [torch.randn(B, H, T, D).to(dtype) for _ in range(3)]
    own = {'pope': -6 * torch.rand(H, D), 'vipe': 0.3 * torch.randn(H, D),
           'bias': torch.randn(H, T)}[name]
    return [x.to(device).requires_grad_() for x in (*qkv, own)]


def scan_inputs(B, C, T, P, d_pe, device):
    """Inputs of cursor_scan, the same on every device; all want gradients."""
    jumps = torch.randn(B, C, T, T) + pe.causal(torch.zeros(T, T))
    copy = torch.cat([jumps, torch.ones(B, C, T, 1)], dim=-1).softmax(dim=-1)
    reset, step = 0.3 * torch.rand(B, C, T), (2 * torch.randn(B, C, T, 3)).softmax(dim=-1)
    inputs = (reset, step, 1.2 + torch.rand(C), torch.randn(2 * P + 1, d_pe), copy)
    return [x.to(device).requires_grad_() for x in inputs]


def check_kernels(device):
    """Print each kernel's largest relative error; returns those that rounding cannot explain."""
    torch.manual_seed(0)
    where = device if device == 'cuda' else f"{device} (Triton's interpreter)"
    print(f'relative error against the float64 reference, on {where}')
    errors = {}
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 5e-2)):
        for name in ('pope_attention', 'vipe_attention', 'bias_attention'):
            inputs = attention_inputs(name[:4], 2, 2, 150, 48, dtype, device)
            function, reference = getattr(kernels, name), getattr(kernels, f'{name}_reference')
            found = relative_errors(function, reference, inputs)
            errors[f'{str(dtype)[6:]:9} {name}'] = found, limit
    inputs = scan_inputs(2, 2, 50, 60, 12, device)
    found = relative_errors(kernels.cursor_scan, pe.cursor_scan, inputs)
    errors['float32   cursor_scan'] = found, 1e-4
    for name, (found, _) in errors.items():
        print(f'  {name:28} {max(found):.1e}')
    # NaN is bad, too
    return [name for name, (found, limit) in errors.items() if not max(found) <= limit]


def attention_contestants(H, T, D):
    """{name: function of q, k, v}: the kernels, and what one would use without them."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    delta, u, bias = (x.cuda().requires_grad_() for x in
                      (-6 * torch.rand(H, D), 0.1 * torch.randn(H, D), torch.randn(H, T)))
    pos = torch.arange(T, device='cuda')
    flex = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device='cuda')
    cfg = pe.PEConfig(d_model=H * D, n_head=H, kernel='reference')
    rope, pope = pe.RoPE(cfg), pe.PoPE(cfg).cuda()

    def flex_bias(q, k, v):
        def score(x, b, h, i, j):
            return x + bias[h, (i - j).clamp(min=0)]
        return flex(q, k, v, score_mod=score, block_mask=mask)

    def flex_vipe(q, k, v):
        log_n = (pos + 1).float().log()
        col = 1 + (k.float() @ u[..., None])[..., 0]

        def score(x, b, h, i, j):
            return x * log_n[i] * col[b, h, j]
        return flex(q, k, v, score_mod=score, block_mask=mask)

    return {'sdpa': lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            'sdpa + rope': lambda q, k, v: rope.attend(q, k, v, pos),
            'pope_attention': lambda q, k, v: kernels.pope_attention(q, k, v, delta),
            'pope, 2D-wide sdpa': lambda q, k, v: pope.attend(q, k, v, pos),
            'vipe_attention': lambda q, k, v: kernels.vipe_attention(q, k, v, u)[0],
            'vipe without distance, flex': flex_vipe,
            'bias_attention': lambda q, k, v: kernels.bias_attention(q, k, v, bias),
            'bias, flex': flex_bias}


def compare(contestants, inputs, dy, work=0):
    """Print and return [{what, forward_ms, both_ms, over_first, peak_mb, tflops}] on CUDA.

    both: forward and backward; over_first: both over that of the first contestant; work: TFLOP of
    both in plain attention.
    """
    from triton.testing import do_bench
    rows = []
    for name, function in contestants.items():
        def both(function=function):
            return torch.autograd.grad(function(*inputs), inputs, dy)
        try:
            both()                                         # compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            peak = (torch.cuda.max_memory_allocated() - before) / 2 ** 20
            forward = do_bench(lambda f=function: f(*inputs), return_mode='median')
            ms = do_bench(both, return_mode='median')
        except Exception as error:                         # another library's failure is a line
            torch.cuda.empty_cache()
            print(f'{name}: {type(error).__name__}: {error}'.partition('\n')[0])
            continue
        # PoPE's products are 1.57 times as many (kernels.py)
        tflops = work * (1.57 if 'pope' in name else 1) / (ms / 1e3)
        over_first = ms / rows[0]['both_ms'] if rows else 1
        rows.append(dict(what=name, forward_ms=round(forward, 3), both_ms=round(ms, 3),
                         over_first=round(over_first, 2), peak_mb=round(peak, 1),
                         tflops=round(tflops, 1)))
    report.print_table(rows)
    return rows


def kernel_benchmark(tokens=16384, width=2048):
    """Print and yield the rows of each shape: the scan, then attention in bfloat16 on CUDA."""
    B, C, T, d_pe = 100, 140, 256, 32
    reset, step, gamma, _, _ = scan_inputs(B, C, T, T, d_pe, 'cuda')
    table = pe.sinusoids(torch.arange(-T, T + 1, device='cuda'), d_pe, 1e4, reset)
    scans = {'cursor_scan': lambda *gates: kernels.cursor_scan(*gates, table),
             'pe.cursor_scan': lambda *gates: pe.cursor_scan(*gates, table)}
    dy = torch.randn(B, C, T, d_pe, device='cuda')
    print(f'\ncursor_scan B={B} C={C} T={T} d_pe={d_pe}')
    rows = compare(scans, (reset, step, gamma), dy)
    yield [dict(row, B=B, C=C, T=T, d_pe=d_pe) for row in rows]
    for D in (64, 128):
        for T in (512, 1024, 2048, 4096, 8192, 16384):
            B, H = tokens // T, width // D
            q, k, v = (torch.randn(B, T, H, D, device='cuda', dtype=torch.bfloat16).transpose(1, 2)
                       .requires_grad_() for _ in range(3))
            torch._dynamo.reset()                          # at 8 recompilations it gives up
            # causal: 2 B H T^2 D forward, 2.5 times that backward
            work = 3.5 * 2 * B * H * T * T * D / 1e12
            print(f'\nT={T} D={D} B={B} H={H} bfloat16')
            rows = compare(attention_contestants(H, T, D), (q, k, v), torch.randn_like(q), work)
            yield [dict(row, T=T, D=D) for row in rows]


def kernel_main(doc, argv):
    """Check the kernels; on a GPU time them, too."""
    if config.wants_help(argv):
        return config.print_help(doc, KernelArguments)
    results = config.read(KernelArguments, argv)['results']
    if kernels.triton is None:
        raise config.UserError('needs Triton, which is for Linux: pip install triton')
    if results:
        checkpoint.append(results, '')                     # fails now rather than after the timing
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    bad = check_kernels(device.type)
    if device.type == 'cuda':
        about = dict(command='python ' + ' '.join(sys.argv)) | report.machine(device)
        for rows in kernel_benchmark():
            if results:
                checkpoint.append(results, json.dumps(about | dict(kernels=rows)) + '\n')
    else:
        print('no GPU: the benchmark needs one' + ('; nothing written' if results else ''))
    if bad:
        raise config.UserError(f'wrong: {", ".join(bad)}')
