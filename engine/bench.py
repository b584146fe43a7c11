"""What things cost: a training step for several seeds together, and the kernels."""
import json
import math
import statistics
import time
from dataclasses import replace

import torch
from tqdm import tqdm

from engine import checkpoint, report, seeds

# --------------------------------------------------------------------------------------------------
# a training step

PEAK = {'H200': 989, 'H100': 989, 'A100': 312}             # TFLOP/s in bfloat16


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


def show_benchmark(label, rows):
    """Print the table of benchmark()."""
    print(f'\n{label}\n{"seeds":<34}{"ms/step":>10}{"steps/s":>10}{"seeds x steps/s":>17}'
          f'{"over one by one":>17}{"tokens/s":>12}{"TFLOP/s":>9}')
    for row in rows:
        rate = 1e3 / row['ms']
        print(f'{row["what"]:<34}{row["ms"]:10.2f}{rate:10.2f}{row["seeds"] * rate:17.2f}'
              f'{row["ratio"]:17.2f}{row["tokens_per_s"]:12,}{row["tflops"]:9.3f}')
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ''
    for name, peak in PEAK.items():
        if name in gpu:
            share = 100 * max(row['tflops'] for row in rows) / peak
            print(f'model FLOP utilization {share:.1f} % of the {peak} TFLOP/s of an {name} '
                  'in bfloat16')


def run(label, cfg, command, make_group):
    """--benchmark: print what benchmark() finds, and append it to cfg.results."""
    if cfg.results:
        checkpoint.append(cfg.results, '')                 # fails now rather than after the timing
    device = seeds.pick_device(cfg)
    seeds.check_parallel(cfg, device, seeds.Ranks())
    rows = benchmark(cfg, device, make_group)
    show_benchmark(label, rows)
    if cfg.results:
        line = report.made_by(cfg, command, device) | dict(steps=rows)
        checkpoint.append(cfg.results, json.dumps(line) + '\n')
