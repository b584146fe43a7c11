"""What things cost: a training step for several seeds together, and the kernels."""
import contextlib
import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import time
import types
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from tqdm import tqdm

import kernels
import pe
from engine import checkpoint, config, report, seeds


def print_table(rows):
    """Print dictionaries of the same keys as a table."""
    lines = [list(rows[0])] + [[str(x) for x in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *cells in lines:
        cells = [f'{cell:>{width}}' for cell, width in zip(cells, widths[1:])]
        print('  '.join([f'{first:{widths[0]}}', *cells]))


# --------------------------------------------------------------------------------------------------
# a training step: python train.py ... --benchmark

def seconds(group, steps, first):
    """How long `steps` training steps take."""
    start = time.perf_counter()
    for step in range(first, first + steps):
        losses = group.step(step)
    losses.tolist()                                        # waits for the device
    return time.perf_counter() - start


def benchmark(cfg, device, make_group, rounds=5):
    """Time the training step for the first 1, 2, 4, ... of the seeds together.

    [{what, seeds, ms, ratio, tokens_per_s}], medians over rounds that take turns. ms: per step of
    all these seeds; ratio: that over as many seeds trained one after the other.
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
        seconds(group, 5 if device.type == 'cuda' else 1, 0)       # records the graph
        steps[name] = math.ceil(0.3 / seconds(group, 1, 5))
        times[name] = []
    for _ in tqdm(range(rounds), unit='round', disable=None, leave=False):
        for name, group in groups.items():
            times[name].append(seconds(group, steps[name], 6) / steps[name])

    rows = []
    for name, group in groups.items():
        count = len(group.models)
        took = statistics.median(times[name])
        ratio = statistics.median(t / one for t, one in zip(times[name], times['1 together']))
        tokens = count * cfg.batch_size * cfg.train_len
        rows.append(dict(what=name, seeds=count, ms=round(1e3 * took, 3),
                         ratio=round(ratio / count, 3), tokens_per_s=round(tokens / took)))
    return rows


def run(label, cfg, command, make_group):
    """--benchmark: print what benchmark() measures, and append it to cfg.results."""
    if cfg.results:
        checkpoint.append(cfg.results, '')                 # fails now rather than after the timing
    device = seeds.pick_device(cfg)
    rows = benchmark(cfg, device, make_group)
    print(f'\n{label}')
    print_table(rows)
    if cfg.results:
        report.append_line(cfg, command, device, steps=rows)


# --------------------------------------------------------------------------------------------------
# the kernels: python kernels.py

def kernel_inputs(name, B, H, T, D, dtype, device, P=None):
    """Inputs of the kernel `name`, the same on every device; all want gradients.

    For cursor_scan, H is the number of cursors, D the width of a position, and the table has the
    offsets -P to P; P is T by default.
    """
    if name == 'cursor_scan':
        jumps = torch.randn(B, H, T, T) + pe.causal(torch.zeros(T, T))
        copy = torch.cat([jumps, torch.ones(B, H, T, 1)], dim=-1).softmax(dim=-1)
        reset = 0.3 * torch.rand(B, H, T)
        step = (2 * torch.randn(B, H, T, 3)).softmax(dim=-1)
        inputs = [reset, step, 1.2 + torch.rand(H), torch.randn(2 * (P or T) + 1, D), copy]
    else:
        inputs = [torch.randn(B, H, T, D).to(dtype) for _ in range(3)]
        if name == 'pope_attention':
            inputs.append(-6 * torch.rand(H, D))           # delta
        elif name == 'vipe_attention':
            inputs.append(0.3 * torch.randn(H, D))         # u
        elif name == 'bias_attention':
            inputs.append(torch.randn(H, T))
    return [x.to(device).requires_grad_() for x in inputs]


def outputs_and_gradients(function, inputs):
    """The outputs, and the gradients of a random weighting of them for every input."""
    ys = function(*inputs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator).to(y.device) for y in ys]
    total = sum((y.double() * w).sum() for y, w in zip(ys, weights))
    return [*ys, *torch.autograd.grad(total, inputs)]


def largest_error(function, reference, inputs):
    """The largest ||a - b|| / max(1, ||b||) of outputs and gradients; b: the reference in float64.
    nan if one is nan."""
    double = [x.detach().double().requires_grad_() for x in inputs]
    pairs = zip(outputs_and_gradients(function, inputs), outputs_and_gradients(reference, double))
    found = [(a.double() - b).norm() / b.norm().clamp(min=1) for a, b in pairs]
    return torch.stack(found).max().item()                 # Python's max may pass over a nan


def usual_error(name, inputs):
    """The error of PyTorch's attention on these inputs; of ViPE's, on q and k times its factors."""
    def by_sdpa(q, k, v, *own):
        if name == 'vipe_attention':
            row, col = kernels.vipe_factors(q, k, *own, s=1.0)
            q, k = (q * row[..., None]).to(q.dtype), (k * col[..., None]).to(k.dtype)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def reference(q, k, v, *own):
        if name == 'vipe_attention':
            return kernels.vipe_attention_reference(q, k, v, *own)[0]
        return kernels.attention_reference(q, k, v)[0]

    return largest_error(by_sdpa, reference, inputs if name == 'vipe_attention' else inputs[:3])


def largest_allowed(name, inputs):
    """Of attention's kernels: 1e-5 in float32; in half precision twice usual_error(), or four times
    in the interpreter, whose casts to bfloat16 truncate."""
    dtype = inputs[0].dtype
    if dtype == torch.float32:
        return 1e-5
    factor = 4 if dtype == torch.bfloat16 and kernels.INTERPRETED else 2
    return factor * max(usual_error(name, inputs), torch.finfo(dtype).eps / 2)


def check_kernels(device):
    """Print each kernel's largest relative error; returns those that rounding cannot explain."""
    torch.manual_seed(0)
    where = 'cuda' if device == 'cuda' else "the CPU (Triton's interpreter, minutes)"
    print(f'largest relative error against the float64 reference, on {where}')
    checks = [(name, dtype) for dtype in ('float32', 'float16', 'bfloat16')
              for name in ('pope_attention', 'vipe_attention', 'bias_attention')]
    bad = []
    for name, dtype in [*checks, ('cursor_scan', 'float32')]:
        T, D, reference = 50, 12, pe.cursor_scan
        if name != 'cursor_scan':
            T, D, reference = 150, 48, getattr(kernels, f'{name}_reference')
        inputs = kernel_inputs(name, 2, 2, T, D, getattr(torch, dtype), device)
        error = largest_error(getattr(kernels, name), reference, inputs)
        print(f'  {dtype:9} {name:16} {error:.1e}')
        limit = 1e-4 if name == 'cursor_scan' else largest_allowed(name, inputs)
        if not error <= limit:                             # NaN is bad, too
            bad.append(f'{dtype} {name}')
    return bad


def time_on_cuda(title, functions, inputs):
    """Print and return the times of {name: function of the inputs}: forward, and forward with
    backward. ratio: forward with backward over that of the first function.
    """
    from triton.testing import do_bench
    rows = []
    for name, function in functions.items():
        dy = torch.randn_like(function(*inputs))

        def forward(function=function):
            return function(*inputs)

        def both(function=function, dy=dy):
            return torch.autograd.grad(function(*inputs), inputs, dy)

        forward_ms = do_bench(forward, return_mode='median')
        both_ms = do_bench(both, return_mode='median')
        ratio = both_ms / rows[0]['both_ms'] if rows else 1
        rows.append(dict(what=name, forward_ms=round(forward_ms, 3), both_ms=round(both_ms, 3),
                         ratio=round(ratio, 2)))
    print(f'\n{title}')
    print_table(rows)
    return [dict(inputs=title, **row) for row in rows]


def attention_functions(H, T, D):
    """{name: function of q, k, v}: PyTorch's attention, and the kernels."""
    delta, u, bias = (kernel_inputs(f'{name}_attention', 1, H, T, D, torch.float32, 'cuda')[3]
                      for name in ('pope', 'vipe', 'bias'))
    return {
        'scaled_dot_product_attention':
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        'pope_attention': lambda q, k, v: kernels.pope_attention(q, k, v, delta),
        'vipe_attention': lambda q, k, v: kernels.vipe_attention(q, k, v, u)[0],
        'bias_attention': lambda q, k, v: kernels.bias_attention(q, k, v, bias)}


def time_kernels(tokens=16384, width=2048):
    """Print and return times of the scan, in float32, and of attention, in bfloat16, on CUDA."""
    B, C, T, d_pe = 16, 140, 256, 32
    *gates, table, _ = kernel_inputs('cursor_scan', B, C, T, d_pe, torch.float32, 'cuda')
    table = table.detach()                                 # fixed, as PRISM's is
    scans = {'pe.cursor_scan': lambda *gates: pe.cursor_scan(*gates, table),
             'cursor_scan': lambda *gates: kernels.cursor_scan(*gates, table)}
    rows = time_on_cuda(f'B={B} C={C} T={T} d_pe={d_pe}', scans, gates)
    for D in (64, 128):
        for T in (512, 1024, 2048, 4096, 8192, 16384):
            B, H = tokens // T, width // D
            # [B, H, T, D] as a projection leaves them
            q, k, v = (torch.randn(B, T, H, D, device='cuda', dtype=torch.bfloat16).transpose(1, 2)
                       .requires_grad_() for _ in range(3))
            rows += time_on_cuda(f'T={T} D={D} B={B} H={H}', attention_functions(H, T, D),
                                 (q, k, v))
    return rows


# what --blocks times: M, N, warps and stages
CANDIDATES = {
    'forward_kernel': [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4),
        (128, 64, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3),
        (128, 32, 8, 3), (64, 32, 4, 3)],
    'queries_kernel': [
        (128, 128, 8, 1), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2),
        (64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 2), (128, 32, 4, 3),
        (64, 32, 4, 3)],
    'keys_kernel': [
        (128, 128, 8, 1), (64, 128, 8, 2), (64, 128, 8, 3), (64, 128, 4, 2), (64, 64, 8, 2),
        (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 2), (32, 128, 4, 3), (32, 64, 4, 2),
        (32, 64, 4, 3)]}


def launches(encoding, D, T, B, H, device):
    """{kernel: a call that launches it} of one attention in bfloat16, as the encoding needs it."""
    def rows(width):
        x = torch.randn(B, T, H, width, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2)
    q, k = (rows(2 * D if encoding == 'pope' else D) for _ in range(2))
    v, dy = rows(D), rows(D)
    bias = torch.randn(1, H, T, device=device) if encoding == 'bias' else None
    y, e, lse = kernels.attention_forward(q, k, v, bias, 1.0, encoding == 'vipe')
    e, de = (e, torch.randn_like(e)) if encoding == 'vipe' else (None, None)
    dq, dk, dv, mean = (torch.empty_like(x) for x in (q, k, v, lse))
    dbias = None if bias is None else torch.zeros_like(bias)
    arguments = dict(
        forward_kernel=((q, k, v, bias), (y, e, lse)),
        queries_kernel=((q, k, v, bias, y, e, lse, dy, de), (mean, dq)),
        keys_kernel=((q, k, v, bias, lse, dy, de, mean), (dk, dv, dbias)))
    return {name: functools.partial(kernels.launch, getattr(kernels, name), *tensors, 1.0, bias)
            for name, tensors in arguments.items()}


def time_blocks(B=16, width=2048):
    """Print and return the time of each attention kernel with each of CANDIDATES that fits."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench
    rows = []
    sizes = itertools.product((64, 128), ('plain', 'pope', 'vipe', 'bias'), (1024, 4096))
    for D, encoding, T in tqdm(list(sizes), disable=None, leave=False):
        for name, launch in launches(encoding, D, T, B, width // D, 'cuda').items():
            for blocks in CANDIDATES[name]:
                about = dict(encoding=encoding, D=D, T=T, kernel=name.removesuffix('_kernel'))
                chosen = {name: [blocks] * 4}
                with mock.patch.dict(kernels.BLOCKS, chosen), contextlib.suppress(OutOfResources):
                    ms = do_bench(launch, warmup=4, rep=15, return_mode='median')
                    rows.append(about | dict(zip(('M', 'N', 'warps', 'stages'), blocks), ms=ms))
    print_table(rows)
    return rows


# --------------------------------------------------------------------------------------------------
# the kernels as compiled, without a GPU: TRITON_INTERPRET=0 python kernels.py --arch=90

SHARED = {80: 166912, 89: 101376, 90: 232448}              # bytes a block on A100, RTX 4090, H100


def compile_kernels(arch, calls):
    """What Triton makes of the kernels that each of `calls` launches: a list of dictionaries.

    Nothing is launched. wgmma, mma: the tensor cores' instructions in the PTX, asynchronous and
    not; fast_logarithms: lg2.approx; registers of a thread; bytes of them that ptxas spills, and
    of a block's shared memory.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    rows, run = [], triton.JITFunction.run

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget('cuda', arch, 32),
        get_current_device=lambda: 0, get_current_stream=lambda device: 0)

    def compile_only(kernel, *args, **kw):
        made = run(kernel, *args, **(kw | dict(warmup=True)))
        ptx = made.asm['ptx']
        registers, spilled = assemble(ptx, f'sm_{arch}' + 'a' * (arch == 90))
        rows.append(dict(
            kernel=kernel.__name__.removesuffix('_kernel'), M=kw.get('M'), N=kw.get('N'),
            bins=kw.get('BL'), wgmma=ptx.count('wgmma.mma_async'), mma=ptx.count('mma.sync.'),
            fast_logarithms=ptx.count('lg2.approx'), registers=registers, spilled=spilled,
            shared=made.metadata.shared))

    triton.runtime.driver.set_active(driver)
    with mock.patch.object(triton.JITFunction, 'run', compile_only), \
         mock.patch.object(kernels, 'shared_memory', lambda device: SHARED[arch]):
        for call in calls:
            call()
    return rows


def assemble(ptx, gpu):
    """Registers of a thread and bytes that it spills, by the ptxas of Triton's wheel."""
    import triton
    ptxas = os.path.join(os.path.dirname(triton.__file__), 'backends/nvidia/bin/ptxas')
    said = subprocess.run([ptxas, '-v', f'--gpu-name={gpu}', '-', '-o', os.devnull], input=ptx,
                          capture_output=True, text=True, check=True).stderr
    registers = re.search(r'Used (\d+) registers', said)
    return int(registers[1]), int(re.search(r'(\d+) bytes spill stores', said)[1])


def forward_and_backward(name, D, dtype='bfloat16', T=4096):
    """Call kernels.NAME for one head, or one cursor, and its gradient, for compile_kernels."""
    inputs = kernel_inputs(name, 1, 1, T, D, getattr(torch, dtype), 'cpu')
    outputs_and_gradients(getattr(kernels, name), inputs)


def compile_table(arch):
    """The rows of every kernel: its encoding, D, and what compile_kernels says."""
    rows = {}
    for name in ('pope', 'vipe', 'bias'):
        for D in (64, 128):
            call = functools.partial(forward_and_backward, f'{name}_attention', D)
            for row in compile_kernels(arch, [call]):
                key = name, D, row['kernel']
                # PoPE's polar is there twice: take the one with delta
                if key not in rows or row['registers'] > rows[key]['registers']:
                    rows[key] = dict(encoding=name, D=D) | row
    call = functools.partial(forward_and_backward, 'cursor_scan', 64, 'float32', T=240)
    scan = [dict(encoding='prism', D=64) | row for row in compile_kernels(arch, [call])]
    return [*rows.values(), *scan]


@dataclass
class KernelFlags:
    """Flags of python kernels.py."""
    arch: int = 0                  # 80 | 89 | 90: only compile for that GPU, and say what comes out
    blocks: bool = False           # on a GPU: time the attention kernels with other blocks
    results: str = ''              # append what --arch says, or a GPU's times, to this file


def print_compiled(flags):
    """--arch: what becomes of every kernel."""
    if flags.arch not in SHARED:
        raise config.UserError(f'--arch must be one of {", ".join(map(str, SHARED))}')
    if kernels.INTERPRETED:
        raise config.UserError('the interpreter compiles nothing: set TRITON_INTERPRET=0')
    rows = compile_table(flags.arch)
    columns = list(rows[0])
    print_table([{key: row.get(key) for key in columns} for row in rows])
    record(flags, rows, 'cpu')


def record(flags, rows, device):
    """Append the rows as a line to flags.results, if any."""
    if flags.results:
        command = 'python kernels.py' + ' --blocks' * flags.blocks
        command += f' --arch={flags.arch}' if flags.arch else ''
        line = dict(command=command, arch=flags.arch, rows=rows)
        line |= report.machine(torch.device(device))
        checkpoint.append(flags.results, json.dumps(line) + '\n')


def kernel_main(doc, argv):
    """Check the kernels and, on a GPU, time them; or compile them for --arch."""
    if config.wants_help(argv):
        return config.print_help(doc, KernelFlags)
    flags, words = config.parse(KernelFlags, argv)
    flags = KernelFlags(**flags)
    if words:
        raise config.UserError(f'python kernels.py takes no arguments, not {words[0]!r}')
    if kernels.triton is None:
        raise config.UserError('needs Triton, which is for Linux: pip install triton')
    if flags.arch:
        return print_compiled(flags)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if flags.blocks and device == 'cpu':
        raise config.UserError('--blocks needs a GPU')
    if flags.blocks:
        return record(flags, time_blocks(), device)
    bad = check_kernels(device)
    if device == 'cuda':
        record(flags, time_kernels(), device)
    else:
        print('no GPU: nothing is timed or recorded')
    if bad:
        raise config.UserError(f'wrong: {", ".join(bad)}')
