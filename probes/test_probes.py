"""The probes."""
import cmath
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import random
import re
import statistics
import sys
import types

os.environ.setdefault('OMP_NUM_THREADS', '1')            # in what follows, too: two threads mostly wait for each other on tensors as small as these
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pe
import probe
import tasks
import train
from engine import data
from model import Transformer
from test_all import close, encoding, flags, make, python, qkv

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

def test_probe_cursor_on_a_run(tmp_path, capsys):
    """Rows for every cursor, a summary, a figure; the run's own files stay as they were; mistakes end in one line."""
    run = str(tmp_path / 'run')
    train.main(flags(task='string_copy', pe='prism', n_head=2, prism_copy='fixed', n_layer=2, prism_layers='1,2', out_dir=run, seeds='0,3'))
    before = {name: (tmp_path / 'run' / name).read_bytes() for name in os.listdir(run)}
    probe.main(['cursor', run, '--seed=3', '--length=5'])
    found = json.loads((tmp_path / 'run' / 'probe_cursor.json').read_text())
    assert len(found['rows']) == 2 * 2 * 2 * 2 and found['summary']['length'] == 5
    assert [row['of'] for row in found['rows']] == ['query'] * 8 + ['key'] * 8
    assert all(abs(row['incr'] + row['decr'] + row['keep'] - 1) < 0.002 for row in found['rows'])
    assert {name: (tmp_path / 'run' / name).read_bytes() for name in before} == before
    probe.main(['cursor', run, f'--out_dir={tmp_path / "elsewhere"}'])
    assert json.loads((tmp_path / 'elsewhere' / 'probe_cursor.json').read_text())['summary']['length'] == 12
    train.main(flags(out_dir=tmp_path / 'rope'))
    for argv, says in ((['cursor', str(tmp_path / 'rope')], 'this run has pe=rope'), (['cursr', run], "did you mean 'cursor'?"), (['cursor'], 'which run?'),
                       (['cursor', run, '--lenght=5'], "did you mean 'length'?"), (['cursor', run, '--length=x'], 'length must be a whole number'),
                       (['cursor', run, '--seed=1'], 'no model of seed 1'), (['cursor', 'nowhere'], 'no checkpoint nowhere'),
                       (['gradients', 'by_hand:parity'], 'never had one'), (['disentangle', 'by_hand:parity'], 'the logit at any distance'), (['axes', run, '--n=0'], 'from 1 on'),
                       (['perturb', run, '--gammas=a'], 'both comma lists'), (['report', str(tmp_path / 'rope')], 'no probe has looked')):
        with pytest.raises(train.UserError, match=re.escape(says)):
            probe.main(argv)
    failed = python('probe.py', 'cursor', 'nowhere')
    assert failed.returncode == 2 and failed.stderr.count('\n') == 1
    listed = python('probe.py').stdout
    assert all(re.search(rf'(?m)^{name} +[A-Z].*[?.]', listed) for name in probe.PROBES) and listed.count('\n') < 20 + len(probe.PROBES)
    probe.main(['axes', 'RUN', '--help'])
    assert '--length=0 --n=8 [--seed=...]' in (out := capsys.readouterr().out) and 'W_ij' in out and 'PRISM' not in out


def test_probe_cursor_sees_gates_set_by_hand():
    """Query cursors that always step up, key cursors that stay: moves 1 and 0, always; and the modes are what they say."""
    cfg = train.Config(task='string_copy', pe='prism', n_head=2, d_model=16, train_lengths=[1, 2, 3], eval_lengths=[1, 2, 3])
    model = Transformer(cfg).eval()
    cursors = model.blocks[0].attn.pe.cursors
    with torch.no_grad():
        cursors.W.weight.zero_()
        cursors.W.bias.view(2, cursors.count, 4)[0] = torch.tensor([-30.0, 9, 0, 0])
        cursors.W.bias.view(2, cursors.count, 4)[1] = torch.tensor([-30.0, 0, 0, 9])
    rows, summary, _ = probe.cursor(model, tasks.make('string_copy'), cfg, length=20)
    assert [(row['moves'], row['steady']) for row in rows] == [(1.0, 1.0)] * cursors.count + [(0.0, 1.0)] * cursors.count
    assert summary['steady'] == 1
    tokens = tasks.make('string_copy').sample(2, 4, torch.Generator())[0]
    for c in probe.cursors_of(model, tokens):
        offset = c['histogram'].argmax(dim=-1) - tokens.shape[1]
        assert torch.equal(offset[0], torch.arange(1, 11) if c['of'] == 'query' else torch.zeros(10, dtype=torch.int64))
    drift = torch.tensor([[0, 1, 1, 2, 2, 3]])
    assert probe.pace(drift, torch.ones(1, 6, dtype=torch.bool)) == pytest.approx((0.6, 0.6))


def nano(task='copy', dtype=torch.float64, longest=8, **kw):
    """(model, cfg) with random weights, as a run's would be loaded."""
    torch.manual_seed(0)
    cfg = train.Config(**{**dict(task=task, d_model=16, n_layer=2, dtype='float64', train_lengths=range(1, longest + 1), eval_lengths=range(1, longest + 5)), **kw})
    return Transformer(cfg).to(dtype).eval(), cfg


def untouched(model, cfg, look):
    """look(), after which the model gives bitwise the same output as before, and no hook is left."""
    tokens, _ = cfg.the_task.sample(2, 5, torch.Generator())
    before = model(tokens)[0]
    found = look()
    assert torch.equal(model(tokens)[0], before) and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return found


def test_iteration_head_is_right_at_every_length():
    """Weights set by hand: every token of the answer right, with confidence; what has no rule is refused."""
    for name, lengths in (('copy', (1, 2, 3, 48, 1000)), ('parity', (1, 2, 3, 48, 999)), ('polynomial', (1, 2, 3, 300))):
        model, cfg = probe.iteration_head(name)
        for length in lengths:
            tokens, targets = cfg.the_task.sample(2, length, torch.Generator().manual_seed(length))
            with torch.no_grad():
                assert model(tokens, targets)[1] < 1e-6, (name, length)
    for name in ('by_hand:mode', 'by_hand:'):
        with pytest.raises(train.UserError, match=f'^{name.rstrip(":")}: .*set by hand for copy, parity, polynomial only'):
            probe.load(name)
    with pytest.raises(train.UserError, match='--seed=3 .* set by hand'):
        probe.main(['attention', 'by_hand:copy', '--seed=3'])
    with pytest.raises(train.UserError, match='every value .* is 0'):
        probe.main(['stats', 'by_hand:copy'])


def test_probes_attention_and_alignment_see_the_iteration_head(tmp_path):
    """Layer 1 looks at the anchors, layer 2 at x_t, at every length: weights 1, accuracy 1; a blunter head loses x_t and the answer."""
    probe.main(['attention', 'by_hand:parity', '--length=30', '--n=2', f'--out_dir={tmp_path}'])
    found = json.loads((tmp_path / 'probe_attention.json').read_text())
    assert [row['length'] for row in found['rows']] == [16] * 4 + [30] * 4
    for first, _, second, _ in (found['rows'][:4], found['rows'][4:]):                    # the first head of each layer; the second is zero
        assert first['x_to_BoS'] == first['s_to_EoI'] == second['s_to_x_t'] == 1 and first['s_to_BoS'] == first['s_to_x_t'] == second['x_to_BoS'] == 0
    model, cfg = probe.iteration_head('copy')
    rows, summary, _ = untouched(model, cfg, lambda: probe.alignment(model, cfg.the_task, cfg, length=120, n=2))
    assert all(row['2.1'] == row['peak'] == row['exact'] == row['states'] == 1 and row['1.1'] == 0 and 0 < row['2.2'] < 0.5 for row in rows)
    assert summary['head'] == '2.1' and summary['right_to'] == summary['aligned_to'] == 120 and summary['accuracy beyond, peak elsewhere'] is None
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:cfg.d_model] *= 1e-3
    rows, summary, _ = probe.alignment(model, cfg.the_task, cfg, length=40, n=2)
    assert all(0 < row['2.1'] < 0.4 for row in rows if row['length'] > 4) and summary['aligned_to'] == 0


def test_probes_attention_and_alignment_against_loops():
    """Each mean over queries, on random weights, in a task where the correct key runs backwards; tasks without one are refused."""
    model, cfg = nano('reverse', pe='rope', n_head=2)
    rows, _, _ = untouched(model, cfg, lambda: probe.attention(model, cfg.the_task, cfg, length=6, n=3))
    others, found, _ = probe.alignment(model, cfg.the_task, cfg, length=6, n=3)
    assert found['head'] == max(('1.1', '1.2', '2.1', '2.2'), key=lambda name: sum(row['length'] * row[name] for row in others))  # over all states
    tokens, targets = probe.problems(cfg.the_task, [6], 3)[6]
    predicted = model(tokens)[0].argmax(dim=-1)
    for layer, head in itertools.product((0, 1), (0, 1)):
        a = probe.attention_maps(model, tokens)[layer][:, head].tolist()
        row = next(row for row in rows if (row['length'], row['layer'], row['head']) == (6, layer + 1, head + 1))
        mean = lambda weight, queries: statistics.mean(weight(a[b], t) for b in range(3) for t in queries)
        assert row['x_to_BoS'] == pytest.approx(mean(lambda a, t: a[t][0], range(1, 7)), abs=6e-4)
        assert row['s_to_EoI'] == pytest.approx(mean(lambda a, t: a[t][7], range(8, 14)), abs=6e-4)
        assert row['largest'] == pytest.approx(mean(lambda a, t: max(a[t]), range(7, 14)), abs=6e-4)
        assert row['entropy'] == pytest.approx(mean(lambda a, t: -sum(x * math.log(x) for x in a[t] if x), range(7, 14)), abs=6e-4)
        assert row['s_to_x_t'] == pytest.approx(mean(lambda a, t: a[t][13 - t], range(7, 13)), abs=6e-4)
        assert others[-1][f'{layer + 1}.{head + 1}'] == pytest.approx(mean(lambda a, t: a[t][13 - t], range(7, 13)), abs=6e-5)
    assert others[-1]['states'] == pytest.approx((predicted == targets)[:, 7:13].double().mean().item(), abs=6e-5)
    long, _, _ = probe.alignment(model, cfg.the_task, cfg, length=12, n=3)                # trained 8: total 19, so queries 13..16 are seen at 12
    tokens, targets = probe.problems(cfg.the_task, [12], 3)[12]
    right = (model(tokens)[0].argmax(dim=-1) == targets).double()
    assert [long[-1]['seen'], long[-1]['unseen']] == pytest.approx([right[:, 13:18].mean().item(), right[:, 18:25].mean().item()], abs=6e-5)
    for name in ('alignment', 'steps', 'shift'):
        with pytest.raises(train.UserError, match='has not one correct key'):
            probe.PROBES[name](model, tasks.make('mode'), train.Config(task='mode', train_lengths=[8], eval_lengths=[8]))


def test_ridge_and_agreement():
    """Against the normal equations, and scipy's answers where ranks tie."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=g, dtype=torch.float64) * torch.tensor([1, 10, 0.1, 1e-3, 0]) + 3
    y = x @ torch.tensor([1.0, -2, 3, 100, 0], dtype=torch.float64) + 7
    w, b = probe.ridge(x, y, penalty=1e-12)
    assert torch.allclose(w[:4], torch.tensor([1.0, -2, 3, 100], dtype=torch.float64)) and torch.allclose(x @ w + b, y)
    z = (x - x.mean(0))[:, :4] / x[:, :4].std(0, correction=0)
    noisy = y + torch.randn(200, generator=g, dtype=torch.float64)
    w, b = probe.ridge(x[:, :4], noisy, penalty=0.3)
    direct = torch.linalg.inv(z.T @ z + 200 * 0.3 * torch.eye(4)) @ z.T @ (noisy - noisy.mean())
    close(x[:, :4] @ w + b, z @ direct + noisy.mean())
    assert probe.ranks(torch.tensor([3.0, 1, 3, 3, 2])).tolist() == [4, 1, 4, 4, 2]
    found = probe.agreement(torch.tensor([1, 2, 2, 4, 5]), torch.tensor([1.0, 3, 2, 2, 7]))
    assert found == pytest.approx(dict(rmse=math.sqrt(9 / 5), mae=1.0, r2=1 - 9 / 10.8, pearson=12 / math.sqrt(10.8 * 22), spearman=7.25 / 9.5), abs=1e-12)


def test_probe_linear_reads_the_iteration_heads_distances():
    """Layer 1 writes the distance to EoI into the stream: exact on lengths never fitted; the embedding does not hold it."""
    model, cfg = probe.iteration_head('copy')
    rows, summary, _ = untouched(model, cfg, lambda: probe.linear(model, cfg.the_task, cfg, n=4))
    r2 = {(row['target'], row['layer'], row['lengths']): row['r2'] for row in rows}
    assert all(r2['distance', layer, lengths] == 1 for layer in (1, 2) for lengths in ('trained', 'longer')) and r2['distance', 0, 'longer'] < 0.5
    assert summary['distance from layer 2, r2 longer'] == 1 and len(rows) == 12
    model, cfg = nano('string_copy', pe='ape', d_model=32)
    rows, _, _ = probe.linear(model, cfg.the_task, cfg, n=8)
    assert {row['target'] for row in rows} == {'position'} and rows[0]['r2'] > 0.9                                        # sinusoids hold the position
    with pytest.raises(train.UserError, match='train with longer ones'):
        probe.linear(model, cfg.the_task, train.Config(task='copy', train_lengths=[4], eval_lengths=[4]))


def test_probe_squeeze():
    """Within the trained length nothing is squeezed; beyond it, positions are fractions that end where training did."""
    model, cfg = nano('parity', pe='ape', longest=5)                                                                      # total length 13
    rows, _, _ = untouched(model, cfg, lambda: probe.squeeze(model, cfg.the_task, cfg, n=20))
    assert [row['length'] for row in rows] == list(range(1, 10))
    assert all(row['tokens'] == row['tokens, squeezed'] for row in rows[:5]) and rows[8]['tokens'] != rows[8]['tokens, squeezed']
    tokens, targets = probe.problems(cfg.the_task, [9], 20)[9]                                                            # 21 tokens
    right = model(tokens, pos=torch.linspace(0, 12, 21))[0].argmax(dim=-1) == targets
    assert rows[8]['tokens, squeezed'] == pytest.approx((right.sum() / (targets != -100).sum()).item(), abs=6e-5)
    model, cfg = nano('parity', pe='nope', longest=5)
    rows, summary, _ = probe.squeeze(model, cfg.the_task, cfg, n=20)
    assert summary['tokens'] == summary['tokens, squeezed'] > 0


def test_probe_steps():
    """Every cell is the accuracy at query L + 1 + d, and only what is within the trained total length is there."""
    model, cfg = nano('parity', pe='nope', longest=5)                                                                     # total length 13
    rows, _, _ = untouched(model, cfg, lambda: probe.steps(model, cfg.the_task, cfg, n=20, distances='0,2'))
    assert [list(row) for row in rows] == [['length', *(f'nope d={d}' for d in (0, 2) if d < L and L + d + 2 < 13)] for L in range(1, 11)]
    tokens, targets = probe.problems(cfg.the_task, [7], 20)[7]
    right = (model(tokens)[0].argmax(dim=-1) == targets).double().mean(dim=0)
    assert [rows[6]['nope d=0'], rows[6]['nope d=2']] == pytest.approx([right[8].item(), right[10].item()], abs=6e-5)
    model, cfg = probe.iteration_head('parity')
    rows, summary, _ = probe.steps(model, cfg.the_task, cfg, n=4, beside='by_hand:parity')
    assert len(rows) == 31 and all(value == 1 for row in rows for key, value in row.items() if key != 'length')
    assert summary['by_hand:parity d=7, longer'] == 1
    for flag, says in (('x', 'whole numbers'), ('40', 'within the trained 35 tokens')):
        with pytest.raises(train.UserError, match=says):
            probe.steps(model, cfg.the_task, cfg, distances=flag)
    with pytest.raises(train.UserError, match='by_hand:copy was trained on copy'):
        probe.steps(model, cfg.the_task, cfg, beside='by_hand:copy')


def test_proposition_1():
    """Independent Gaussian values under uniform weights follow eq. 4; in a model without queries measured is uniform; few symbols keep their variance."""
    g, d = torch.Generator().manual_seed(0), 200_000
    v = torch.cat([2 + 3 * torch.randn(1, d, generator=g), 0.5 + 1.5 * torch.randn(19, d, generator=g)])
    n = torch.arange(1, 21, dtype=torch.float64)
    for found, curve in zip(probe.coordinate_statistics(v.cumsum(0) / n[:, None]), probe.proposition_1(n, 0.5, 1.5 ** 2, 2, 3 ** 2)):
        assert torch.allclose(found, curve[:len(found)], rtol=0.02, atol=0.005)
    model, cfg = nano('parity', pe='vipe', vipe_d_p=3)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[:16] = 0
    rows, summary, _ = untouched(model, cfg, lambda: probe.stats(model, cfg.the_task, cfg, n=4))
    assert len(rows) == 19 and rows[0]['token'] == 'BoS' and rows[9]['token'] == 'EoI'
    for row in rows:
        assert all(row[part] == row[f'{part} 1/n'] for part in ('mean', 'var', 'diff') if part in row)
    assert rows[-1]['var'] > 2 * rows[-1]['var eq4']
    assert rows[0]['var'] == rows[0]['var eq4'] == pytest.approx(summary['sigma_2'] ** 2, rel=0.01)
    for kw, says in ((dict(pe='vrope'), 'turns the values'), (dict(task='string_copy', pe='nope'), 'begin with BoS')):
        model, cfg = nano(**kw)
        with pytest.raises(train.UserError, match=says):
            probe.stats(model, cfg.the_task, cfg)


def test_proposition_2():
    """z = V beta to rounding where values hang on the token alone; D.1: NoPE takes equal shares for the same prefix, RoPE does not; ALiBi sees a
    repeated prefix as the same, since e^(-md) of both differ by one factor."""
    told_apart = {}
    for name in ('nope', 'rope', 'vipe', 'alibi'):
        model, cfg = nano('polynomial', pe=name, n_head=2)
        rows, summary, _ = untouched(model, cfg, lambda: probe.prefix(model, cfg.the_task, cfg, n=4))
        assert summary['error'] < 1e-12 and len(rows) == 7
        told_apart[name] = [row['z'] > 1e-9 for row in rows[2:]]
        assert [row['beta_uniform'] > 1e-9 for row in rows[2:]] == [False, False, True, True, False]
    assert [row['case'] for row in rows[2:]] == ['0  |  0 0 0 0', '0 1 2 3  |  0 1 2 3 0 1 2 3', 'BoS 0  |  BoS 0 0 0 0', 'BoS 0 1 2 3  |  BoS 0 1 2 3 0 1 2 3',
                                                 'BoS 0 1 2 3  |  BoS 1 0 2 3']
    assert told_apart['nope'] == [False, False, True, True, False] and told_apart['rope'] == [False, True, True, True, True]
    assert told_apart['alibi'] == [False, False, True, True, True]
    for name, says in (('ape', 'adds positions to the embeddings'), ('vrope', 'turns the values')):
        model, cfg = nano('polynomial', pe=name)
        with pytest.raises(train.UserError, match=says):
            probe.prefix(model, cfg.the_task, cfg)


def test_probe_shift():
    """The iteration head follows the count from BoS, place by place; RoPE's logits change towards BoS alone; APE's embedding moves too."""
    model, cfg = probe.iteration_head('copy')
    rows, summary, _ = untouched(model, cfg, lambda: probe.shift(model, cfg.the_task, cfg, offsets='0,-3,2', n=4))
    assert [row['head'] for row in rows] == ['1.1', '1.2', '2.1', '2.2'] and summary['head'] == '2.1'
    assert [summary[f'peak {offset}'] for offset in ('+0', '-3', '+2')] == [0, 3, -2] and [rows[2][f'moved {offset}'] for offset in ('+0', '-3', '+2')] == [1, 1, 1]
    assert rows[2]['x_t -3'] == 0 and summary['states right +0'] == 1 and summary['states right -3'] < 0.9
    model, cfg = nano(pe='rope')
    tokens = cfg.the_task.sample(2, 6, torch.Generator())[0]
    plain = probe.attention_maps(model, tokens)[0].log()
    with probe.moved_from_first(model, -2):
        moved = probe.attention_maps(model, tokens)[0].log()
    with probe.listening(model.blocks[0].attn.tap_q, model.blocks[0].attn.tap_k) as heard, torch.no_grad():
        model(tokens)
    pos = torch.tensor([2, *range(1, tokens.shape[1])])
    close(moved.exp(), model.blocks[0].attn.pe.logits(heard[0][2], heard[1][2], pos).softmax(dim=-1))
    change = (moved - plain)[:, :, 1:]                                                    # all but BoS change by the normalization alone
    close(change[..., 5:, 1:6], change[..., 5:, 1:2].expand(-1, -1, -1, 5))
    model, cfg = nano(pe='ape')
    with probe.listening(model.tap_resid) as heard, torch.no_grad():
        model(tokens)
        with probe.moved_from_first(model, 3):
            model(tokens)
    (_, _, x), (_, _, y) = heard
    place = model.blocks[0].attn.pe.embed(torch.zeros(1, 20, 16, dtype=torch.float64), torch.arange(20))[0]
    close(y - x, torch.stack([place[n + 3] - place[n] if n else place[0] * 0 for n in range(tokens.shape[1])]).expand_as(x))
    for kw, says in ((dict(pe='nope'), 'sees no positions'), (dict(pe='prism'), 'sees no positions')):
        model, cfg = nano(**kw)
        with pytest.raises(train.UserError, match=says):
            probe.shift(model, cfg.the_task, cfg)
    for length, offsets in ((3, '0,-4'), (8, '-7'), (1, '')):                               # -7: s_1 would look at x_9
        with pytest.raises(train.UserError, match=f'go beyond the {length} inputs'):
            probe.shift(*probe_args(nano(pe='rope')), length=length, offsets=offsets)
    rows, _, _ = probe.shift(*probe_args(nano(pe='rope')), length=7, n=2)
    assert 'peak -4' in rows[0] and 'peak -6' not in rows[0] and all(x == x for row in rows for x in row.values())


def test_probes_refuse_a_text_of_a_few_tokens():
    task = types.SimpleNamespace(corpus=True, existing=lambda lengths, _: lengths, held_out=lambda *_: {64: (torch.ones(1, 2), torch.ones(1, 2))})
    with pytest.raises(train.UserError, match='2 tokens only'):
        probe.drawn(task, [64], 0, 1)


def probe_args(pair):
    model, cfg = pair
    return model, cfg.the_task, cfg


def test_figures_of_the_iterative_probes(tmp_path):
    """Every figure draws, of one head and of several."""
    plt = pytest.importorskip('matplotlib.pyplot')
    model, cfg = nano('polynomial', pe='rope', n_head=2, n_layer=1, longest=4)
    for name in ('attention', 'alignment', 'squeeze', 'linear', 'steps', 'stats', 'prefix', 'shift'):
        flags = dict(n=2) | (dict(offsets='0,-2') if name == 'shift' else {})
        probe.PROBES[name](model, cfg.the_task, cfg, **flags)[2](plt).savefig(tmp_path / f'{name}.png', dpi=30)
        plt.close('all')


def test_one_large_attention_map():
    """--layer and --head: their map alone, every token by name, the trained tokens marked where there are more."""
    plt = pytest.importorskip('matplotlib.pyplot')
    model, cfg = nano('polynomial', n_head=2)                                             # trained to 19 tokens
    short, long = probe.attention(model, cfg.the_task, cfg, length=40, n=1, layer=2, head=1)[2](plt).axes[:2]
    tokens = probe.problems(cfg.the_task, [40], 1)[40][0][0]
    assert [label.get_text() for label in long.get_yticklabels()] == [cfg.the_task.vocab[i] for i in tokens]
    assert long.get_title() == 'head 2.1, length 40' and not short.lines and [line.get_xdata()[0] for line in long.lines] == [18.5, 0]
    close(long.images[0].get_array().data, probe.attention_maps(model, tokens[None])[1][0, 0].detach())
    with pytest.raises(train.UserError, match='head from 1 to 2'):
        probe.attention(model, cfg.the_task, cfg, head=3)



# ---------------------------------------------------------------------------------------------------------------------
# probe.py: the Toeplitz study

def carried_by_one_head():
    """A model of copy at length 1, right for certain, in which head 3 of layer 2 alone brings x_1 to EoI; its config."""
    cfg = train.Config(task='copy', pe='nope', n_head=4, d_model=16, train_lengths=[1], eval_lengths=[1])
    model, x0, answer = Transformer(cfg).eval(), [4, 5], [8, 9]                          # tokens of the symbols 0 and 1; channels of the answer
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(6, 16))
        for p in (p for block in model.blocks for p in (block.mlp[2].weight, block.attn.proj.weight, block.attn.qkv.weight)):
            p.zero_()
        attn = model.blocks[1].attn
        for i in (0, 1):
            attn.qkv.weight[2 * 16 + 8 + i, x0[i]] = 1                                  # the value of head 3: which symbol
            attn.proj.weight[answer[i], 8 + i] = 1
            model.head.weight[x0[i]] = 100 * F.one_hot(torch.tensor(answer[i]), 16)
        model.head.weight[3] = 1e4 * torch.eye(16)[x0].sum(dim=0)                       # EoS after a symbol
        model.head.weight[:3] = 0
    return model, cfg


def test_probe_heads_finds_the_head_that_carries_the_answer():
    model, cfg = carried_by_one_head()
    tokens = cfg.the_task.sample(9, 1, torch.Generator())[0]
    before = model(tokens)[0]
    rows, summary, _ = probe.heads(model, cfg.the_task, cfg)
    assert [row[f'drop {h}'] for row in rows for h in (1, 2, 3, 4)] == [0, 0, 0, 0, 0, 0, 100, 0]
    assert (rows[1]['share'], rows[1]['gini'], rows[1]['effective'], rows[0]['share']) == (1, 0.75, 1, None)
    assert (summary['layer'], summary['head'], summary['largest'], summary['second'], summary['base']) == (2, 3, 100, 0, 100)
    assert torch.equal(model(tokens)[0], before) and not any(m._forward_hooks for m in model.modules())
    model, cfg = probe.iteration_head('parity')
    rows, summary, _ = probe.heads(model, cfg.the_task, cfg, n=64)
    assert [[row['drop 1'], row['drop 2'], row['share']] for row in rows] == [[100, 0, 1]] * 2 and summary['base'] == 100
    for name in ('toeplitz', 'spectrum'):
        json.dumps(probe.PROBES[name](model, cfg.the_task, cfg, n=2)[1], allow_nan=False)   # the second heads have no variance
    with pytest.raises(train.UserError, match='--n_head=4'):
        probe.heads(Transformer(train.Config()), cfg.the_task, train.Config())
    rows, summary, _ = probe.heads(*probe_args(nano('polynomial', n_head=2)), n=200)          # untrained: no problem right, some tokens are
    assert summary['unit'] == 'tokens right (%)' and 0 < summary['base'] < 60 and any(abs(row['drop 1']) + abs(row['drop 2']) > 0 for row in rows)


def test_concentration_of_drops():
    found = probe.concentration(torch.tensor([[1.0, 1, 1, 1], [0, 0, 7, -3], [1, 2, 3, 4]], dtype=torch.float64))
    close(found['share'], [0.25, 1, 0.4])
    close(found['gini'], [0, 0.75, sum(abs(a - b) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4)) / (2 * 4 * 10)])
    close(found['effective'], [4, 1, 100 / 30])


def test_a_planted_toeplitz_part_is_recovered():
    g = torch.Generator().manual_seed(0)
    a, rest = torch.randn(3, 9, generator=g, dtype=torch.float64), torch.randn(3, 9, 9, generator=g, dtype=torch.float64)
    for s in range(3):
        for d in range(9):
            rest[s].diagonal(-d).sub_(rest[s].diagonal(-d).mean())
    rest = rest.triu(1) * 1e6 + rest.tril()                                             # what is above the diagonal does not count
    planted = torch.tensor([[[a[s, i - j] if i >= j else 0 for j in range(9)] for i in range(9)] for s in range(3)], dtype=torch.float64)
    close(probe.diagonal_means(planted + rest), a)
    close(probe.toeplitz_matrix(a), planted)
    i, j = np.tril_indices(9)
    close(probe.variance_share(planted, planted + rest), [np.var(planted[s].numpy()[i, j]) / np.var((planted + rest)[s].numpy()[i, j]) for s in range(3)])


def test_eq_2_with_a_factor_for_each_frequency_is_rope():
    q, k, _, pos = qkv()
    rotation = lambda x, t, c: np.array([[math.cos(t * 1e4 ** (-2 * c / 8)), -math.sin(t * 1e4 ** (-2 * c / 8))],
                                         [math.sin(t * 1e4 ** (-2 * c / 8)), math.cos(t * 1e4 ** (-2 * c / 8))]]) @ x[2 * c:2 * c + 2].numpy()
    brute = [[sum(rotation(q[1, 1, i], i, c) @ rotation(k[1, 1, j], j, c) for c in range(4)) for j in range(10)] for i in range(10)]
    turn = torch.polar(torch.ones(2, 10, 4, dtype=torch.float64), pos[:, None] * pe.frequencies(4, 1e4, q).expand(2, 1, 4))
    L, G = probe.grams(q, k, turn)
    close(L[1, 1].real, brute, 1e-12)
    close(L.real, torch.matmul(*(z if i == 0 else z.mT for i, z in enumerate(encoding('rope').qk(q, k, encoding('rope').at(len(pos), pos))))), 1e-12)
    close(G.real, q @ k.mT, 1e-12)


def test_a_single_factor_is_not_enough_for_two_frequencies():
    q, k, _, pos = qkv()
    turn = torch.polar(torch.ones(2, 10, 4, dtype=torch.float64), pos[:, None] * pe.frequencies(4, 1e4, q).expand(2, 1, 4))
    def parts(q, k, turn):
        L, G = probe.grams(q, k, turn)
        return L.real, G
    angle = pos.double()[:, None].expand(2, 10, 1) * torch.pi / 36                      # on the grid of angles
    one = probe.single_factor(*parts(q[..., :2], k[..., :2], torch.polar(torch.ones_like(angle), angle)))
    assert one['unit'].max() < 1e-12 and one['free'].max() < 1e-12 and not one['impossible'].any()      # one frequency
    L, G = parts(q, k, turn)
    off = probe.single_factor(L, G)
    residual = 0
    for d in range(10):
        x, y = (np.concatenate([z[b, 0].diagonal(-d).numpy() for b in (0, 1)]) for z in (G, L))
        A = np.stack([x.real, -x.imag], axis=1)
        residual += ((A @ np.linalg.lstsq(A, y)[0] - y) ** 2).sum()
    i, j = np.tril_indices(10)
    close(off['free'][0], residual / (np.var(L[:, 0].numpy()[:, i, j]) * 2 * 55))
    assert (off['unit'] >= off['free']).all() and off['free'].min() > 0.1 and off['impossible'].min() > 0.1
    opposed = torch.tensor([[1.0, 0, 1, 0]] * 10, dtype=torch.float64)[None, None], torch.tensor([[1.0, 0, -1, 0]] * 10, dtype=torch.float64)[None, None]
    L, G = parts(*opposed, turn[:1, :, :2])                                       # <q, k> = 0, so the paper's form is 0; RoPE's logit is not
    assert not G.any() and L[0, 0, 5, 0].abs() > 0.1 and probe.single_factor(L, G)['impossible'] == 45 / 55


@pytest.mark.parametrize('kw', [dict(pe='ape+rope', norm='rmsnorm'), dict(pe='learned+t5'), dict(pe='alibi'), dict(pe='fire'), dict(pe='yarn', eval_lengths=[9]),
                                dict(pe='ape+rope', attention='mla'), dict(pe='rope', rope_heads=1), dict(pe='pope'), dict(pe='prism'), dict(pe='ape+vipe')],
                         ids=lambda kw: '-'.join(map(str, kw.values())))
def test_probe_toeplitz_splits_the_logits(kw):
    """Eq. 1 and eq. 2 hold to rounding; the terms' shares add up to 1; nothing is claimed of encodings that are not linear in q and k."""
    cfg = train.Config(**dict(dict(task='copy', d_model=32, n_head=4, train_lengths=[3], eval_lengths=[3]), **kw))
    torch.manual_seed(0)
    model = Transformer(cfg).eval()
    tokens, exact = cfg.the_task.sample(3, 5, torch.Generator())[0], not set(kw['pe'].split('+')) & {'pope', 'vipe', 'prism'}
    before = model(tokens)[0]
    rows, summary, _ = probe.toeplitz(model, cfg.the_task, cfg, length=8)
    assert len(rows) == 2 * model.blocks[0].attn.heads and ('error of eq. 1' in summary) == exact
    assert ('error of eq. 2' in summary) == (exact and ('rope' in kw['pe'] or 'yarn' in kw['pe']))
    assert all(summary.get(f'error of eq. {n}', 0) < 1e-12 for n in (1, 2))
    assert not exact or all(abs(sum(row.get(name, 0) for name in ('qc kc', 'qc kp', 'qp kc', 'qp kp', 'B')) - 1) < 1e-3 for row in rows)
    assert torch.equal(model(tokens)[0], before) and not any(m._forward_hooks for m in model.modules())
    assert kw['pe'] != 'rope' or [row['G_e off'] < 1e-6 for row in rows] == [False, True, True, True] * 2


def test_probe_positions_takes_out_what_was_added(tmp_path):
    """Before layer 1 it leaves the same weights without an encoding; random vectors of the same length cost something else; rope has nothing to take out."""
    (tmp_path / 'text').write_text(''.join(random.Random(0).choices('abcdef', k=9999)))
    cfg = lambda name: train.Config(task='characters', data=str(tmp_path / 'text'), pe=name, d_model=16, n_head=2, train_lengths=[12], eval_lengths=[12])
    models = {name: Transformer(cfg(name)).eval() for name in ('random', 'nope')}
    models['nope'].load_state_dict(models['random'].state_dict(), strict=False)
    task = cfg('random').the_task
    tokens = task.held_out('test', 30, [12], lambda n: train.generator('cpu', 'test', n))
    before = models['random'](tokens[12][0])[0]
    rows, summary, _ = probe.positions(models['random'], task, cfg('random'), n=30)
    score = lambda name: train.evaluate(models[name], task, tokens)[12]['loss']
    assert abs(rows[0]['without p'] - score('nope')) < 1e-3 and abs(summary['base'] - score('random')) < 1e-3 and len(rows) == 2
    assert abs(rows[0]['random'] - rows[0]['without p']) > 1e-3 and torch.equal(models['random'](tokens[12][0])[0], before)
    with pytest.raises(train.UserError, match=r'pe=ape\+rope'):
        probe.positions(Transformer(cfg('rope')), task, cfg('rope'))


def test_symbols_bound_the_eigenvalues():
    g = torch.Generator().manual_seed(0)
    a = torch.complex(*torch.randn(2, 7, generator=g, dtype=torch.float64))
    T = [[a[i - j].item() if i > j else a[j - i].conj().item() if i < j else a[0].real.item() for j in range(7)] for i in range(7)]
    close(torch.view_as_real(probe.hermitian(a)), torch.view_as_real(torch.tensor(T, dtype=torch.complex128)))
    f = probe.symbol(a)
    close(f[256], sum((T[d][0] if d >= 0 else T[0][-d]) * cmath.exp(-1j * d * 2 * math.pi * 256 / 4096) for d in range(-6, 7)).real)
    values = np.linalg.eigvalsh(T)
    assert f.min() < values.min() and values.max() < f.max()
    close(probe.symbol(torch.tensor([2.0, 1.0], dtype=torch.float64)).aminmax(), (0, 4))


def test_lemma_b1_holds_only_in_its_bound():
    w, phase = torch.tensor([0.0, 1, 1], dtype=torch.float64), torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    f, g = probe.lemma_b1(w, phase)
    close((f[2 ** 10], g[2 ** 10]), [2 * math.cos(-1 + math.pi / 2) + 2 * math.cos(2 + math.pi), 2 * math.cos(math.pi / 2) + 2 * math.cos(math.pi)])
    close(g.max() - g.min(), 6.25, 1e-5)                                                # 4 c^2 + 2 c - 2, c = cos theta: from -9/4 to 4
    found = [row['found'] for row in probe.spectral_claims()]
    assert found[0] <= 1 and found[1] == 1 and found[2] == 0.5 and found[3] == 6.25 / 8 and found[4] > 1.1 and found[5] < 1e-12 and found[6] > 1.1


def test_probe_spectrum_of_runs_with_and_without_turns():
    for name, factors in (('rope', {'T^(m), each'}), ('ape+alibi', {f'B {x}.{y}' for x in (1, 2) for y in (1, 2)} | {'p_i p_j'}), ('pope', set())):
        cfg = train.Config(task='copy', pe=name, d_model=32, n_head=2, train_lengths=[3], eval_lengths=[3])
        rows, summary, _ = probe.spectrum(Transformer(cfg).eval(), cfg.the_task, cfg, length=8)
        found = {row['of']: row for row in rows if 'eigenvalues to' in row}
        assert factors == {what for what in found if what.split()[0] not in ('content', 'logits')} and len(rows) == 8 + len(factors) + 7
        assert all(row['symbol from'] - 1e-3 <= row['eigenvalues from'] and row['eigenvalues to'] <= row['symbol to'] + 1e-3 for row in found.values())
    one = probe.spectrum(Transformer(train.Config(task='copy', d_model=4, n_head=2)).eval(), cfg.the_task, cfg)[1]         # one frequency: similar matrices
    assert one['ratio'] == 1 and summary['tokens'] == 19


def test_softmax_gradients_are_lemmas_c1_and_c2():
    g = torch.Generator().manual_seed(0)
    S, V, dY = (torch.randn(2, 5, n, generator=g, dtype=torch.float64) for n in (5, 3, 3))
    S.requires_grad_()
    A = S.softmax(dim=-1)
    close(probe.softmax_gradient(A.detach(), dY, V), torch.autograd.grad((A @ V * dY).sum(), S)[0])
    for row in S.detach()[0]:
        J = torch.autograd.functional.jacobian(lambda s: s.softmax(dim=0), row)
        along, across = probe.anchor_gain(row.softmax(dim=0), 1)
        close((along, across), (J[1, 1], J[1, [0, 2, 3, 4]].norm()))
        assert across <= along


def test_gradients_at_all_edges_are_those_of_t5s_table():
    """Summed over the layers, which share the table, H(d) is the gradient by the bias of distance d."""
    model = make(pe='t5')
    tokens = torch.randint(1, 11, (3, 14), generator=torch.Generator().manual_seed(0))
    found = probe.logit_gradients(model, tokens, tokens)
    edge = probe.edges(None, tokens, 'all')
    H = sum(probe.seeds_of(layer[1], edge, 14)[0] for layer in found)
    F.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten(), reduction='sum').backward()
    close(H.T, model.blocks[0].attn.pe.table.grad[:14], 1e-6)                           # token_losses is in float32
    A, dS, dY, dy, V, Y = found[1]
    close(A @ V, Y)
    close(probe.softmax_gradient(A, dY, V), dS)
    W_O = model.blocks[1].attn.proj.weight.detach()
    close(dY, (dy @ W_O).unflatten(-1, (4, 8)).transpose(1, 2))
    assert probe.seed_condition(A, dY, dy, V, W_O, edge)[1] <= 1


def test_margins_of_the_strongest_head():
    H = torch.tensor([[[3.0, -4], [0, 1], [0, 0]], [[0, 1], [0, -3], [1, 0]]], dtype=torch.float64)                      # norms 5 1 0 and 1 3 1
    low, top = probe.margins(H, torch.tensor([[0.5, 0.6, 0.7], [0.1, 0.2, 0.3]]))
    assert (low['head'], low['first'], low['second'], low['margin'], low['growth'], low['positive']) == (1, 5, 1, 4, 2, 0.5)
    assert (top['head'], top['margin'], top['growth'], top['positive'], top['coherence']) == (2, 2, None, 0, 0.2)
    assert low['effective'] == pytest.approx(36 / 26, rel=1e-3) and probe.margins(H[:1, :1], torch.ones(1, 1))[0]['margin'] == 5


def test_the_condition_of_prop_6_1_cannot_hold():
    """Whatever A, V, W_O and the gradient: here the anchor gets nearly all attention and its value points the gradient's way."""
    g, W_O = torch.Generator().manual_seed(0), torch.eye(4, dtype=torch.float64)
    edge = torch.tensor([0, 1]), torch.tensor([3, 3]), torch.tensor([1, 2]), torch.tensor([2, 1])
    for sharp in (0.0, 3.0, 30.0):
        dy, V = torch.zeros(2, 4, 4, dtype=torch.float64), 1e-3 * torch.randn(2, 1, 4, 4, generator=g, dtype=torch.float64)
        S = torch.randn(2, 1, 4, 4, generator=g, dtype=torch.float64)
        for b, u, j, _ in zip(*edge):
            dy[b, u], V[b, 0, j], S[b, 0, u, j] = torch.ones(4), torch.ones(4), sharp
        positive, most = probe.seed_condition((S + pe.causal(S)).softmax(dim=-1), dy[:, None], dy, V, W_O, edge)
        assert positive == 1 and 0 < most <= 1
    assert most > 0.99


def test_prop_6_2_cancels_for_alibi_and_for_rope():
    assert probe.cancellation('alibi') < 1e-12 and probe.cancellation('rope') < 1e-12
    assert probe.cancellation('alibi', values=1.0) > 0.1 and probe.cancellation('alibi', linear=False) > 0.1


def test_anchors_and_the_convolution_of_c6():
    task = tasks.make('distance')
    tokens, targets = task.sample(200, 12, torch.Generator().manual_seed(0))
    b, u, j, d = probe.edges(task, tokens, 'pair')
    assert (tokens[b, u] + tokens[b, j] == 2 * task.first_trigger + 1).all() and torch.equal(d, u - j) and torch.equal(d // 4 + task.first_class, tokens[:, -1])
    assert (tokens[probe.edges(task, tokens, 'read')[:2]] == task.query).all() and (targets[probe.edges(task, tokens, 'read')[:2]] != -100).all()
    g, dS = torch.Generator().manual_seed(0), torch.zeros(200, 2, 14, 14, dtype=torch.float64)
    kernel = torch.randn(28, generator=g, dtype=torch.float64)
    for s in range(200):
        for D in range(u[s] + 1):
            dS[s, 0, u[s], u[s] - D] = kernel[D - d[s]]
    dS[:, 1] = torch.randn(200, 14, 14, generator=g, dtype=torch.float64)
    share, chance = probe.convolution_share(dS, task, tokens)
    close(share[0], 1)
    assert abs(share[1] - chance) < 0.1 and 0.1 < chance < 0.4
    H, coherence = probe.seeds_of(dS, (b, u, j, d), 14)
    close(H[0], torch.bincount(d, minlength=14) * kernel[0])
    close(coherence[0], 1)
    assert coherence[1] < 0.5


def test_probe_gradients_repeats_the_first_steps_of_the_run(tmp_path):
    """After all of a run's steps done again it finds what it finds in the saved model; lines for every claim; and nothing changes."""
    run = str(tmp_path / 'run')
    train.main(flags(out_dir=run, n_head=2, n_layer=2, seeds=3))
    saved = (tmp_path / 'run' / 'ckpt.pt').read_bytes()
    probe.main(['gradients', run, '--steps=12', '--n=50'])
    rows = json.loads((tmp_path / 'run' / 'probe_gradients.json').read_text())['rows']
    by_step = {step: [row for row in rows if row.get('step') == step] for step in (0, 3, 6, 9, 12, 'trained')}
    assert all(len(some) == 2 for some in by_step.values()) and by_step[0][0]['first'] != by_step[12][0]['first']
    for a, b in zip(by_step[12], by_step['trained']):
        assert a['head'] == b['head'] and all(a[key] == pytest.approx(b[key], rel=1e-2) for key in ('first', 'second', 'positive', 'coherence'))
    claims = {row['what'][:4]: row['found'] for row in rows if 'what' in row}
    assert set(claims) == {'C.1:', 'C.2:', '6.2:', 'Theo'} and claims['C.1:'] < 1e-9 and claims['C.2:'] <= 1
    assert (tmp_path / 'run' / 'ckpt.pt').read_bytes() == saved
    with pytest.raises(train.UserError, match='need two triggers'):
        probe.main(['gradients', run, '--edge=pair'])


def test_tables_are_narrow(capsys):
    """A table for rows that share columns; what is printed fits into 130 columns."""
    a, b, c = dict(step=0, layer=1), dict(layer=2, first=None), dict(what='x', found=3)
    assert probe.tables([a, b, c]) == [[['step', 'layer', 'first'], ['0', '1', ''], ['', '2', '']], [['what', 'found'], ['x', '3']]]
    for name, pair, flags in (('gradients', nano('parity', pe='rope', n_head=2), dict(steps=0)), ('spectrum', nano('parity', pe='rope', n_head=2), {}),
                              ('stats', nano('parity', pe='nope'), {}), ('linear', nano('parity', pe='nope'), {})):
        model, cfg = pair
        probe.show(*probe.PROBES[name](model, cfg.the_task, cfg, n=4, **flags)[:2])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 130, name


def test_a_summary_keeps_keys_and_values_together(capsys):
    probe.show([], {f'accuracy beyond, part {i}': 1.7030816934493487e-07 for i in range(9)} | dict(tokens=8192, unit='exact match (%)', none=None))
    lines = capsys.readouterr().out.splitlines()
    assert [part.split(': ') for line in lines for part in line.split('  ')] == \
        [[f'accuracy beyond, part {i}', '1.703e-07'] for i in range(9)] + [['tokens', '8192'], ['unit', 'exact match (%)'], ['none', 'None']]
    assert max(map(len, lines)) <= 130


def test_without_matplotlib_no_older_figure_stays(tmp_path, monkeypatch, capsys):
    (tmp_path / 'probe_norms.png').touch()
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    train.main(flags(out_dir=tmp_path))
    for _ in range(2):
        probe.main(['norms', str(tmp_path)])
        assert 'pip install matplotlib' in capsys.readouterr().out and not (tmp_path / 'probe_norms.png').exists()


def test_colours_of_heads_fit_the_values():
    plt = pytest.importorskip('matplotlib.pyplot')
    for values, limits in (([[0.2, 0.5], [math.nan, 0.3]], (0.2, 0.5)), ([[1.0, 1.0]], (0.99, 1.0)), ([[math.nan]], (-0.01, 0.0))):
        fig, ax = plt.subplots()
        probe.head_grid(fig, ax, torch.tensor(values, dtype=torch.float64), 'r')
        assert ax.images[0].get_clim() == pytest.approx(limits)
        plt.close(fig)


def test_figures_of_weights_set_by_hand():
    """They say so, and nothing of training."""
    plt = pytest.importorskip('matplotlib.pyplot')
    model, cfg = probe.iteration_head('copy')
    for name in ('attention', 'alignment', 'linear', 'steps', 'shift', 'heads', 'toeplitz', 'entropy', 'loss'):
        figure = probe.PROBES[name](model, cfg.the_task, cfg, n=2)[2](plt)
        words = [text.get_text() for text in figure.findobj(plt.Text)]
        assert any('set by hand' in text for text in words) and not any('vipe' in text for text in words), name
        assert not any('trained to' in text.replace('runs are trained to', '') for text in words), name
        plt.close(figure)


def test_figures_of_the_toeplitz_probes():
    matplotlib = pytest.importorskip('matplotlib')
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    cfg = train.Config(task='copy', pe='ape+rope', d_model=16, n_head=2, train_lengths=[3], eval_lengths=[3])
    for name in ('heads', 'positions', 'toeplitz', 'spectrum'):
        figure = probe.PROBES[name](Transformer(cfg).eval(), cfg.the_task, cfg, n=9)[2](plt)
        figure.canvas.draw()
        assert name != 'toeplitz' or len(figure.axes) == 8                                # eq. 1 and eq. 2, and a colour bar
        assert all(ax.get_title() or ax.get_xlabel() or ax.get_ylabel() for ax in figure.axes if ax.axison)
        plt.close(figure)



# ---------------------------------------------------------------------------------------------------------------------
# the position-generalization paper, and PoPE's frequencies

def at_random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_three_axes_solve_equation_7():
    """A sum of three axes is found whole; of any other map the fit is the least-squares one."""
    T, (i, j) = 9, torch.tril_indices(9, 9)
    a, b, c = at_random(3, T)
    W = torch.zeros(T, T).double().index_put((i, j), a[i - j] + b[i] + c[j])
    fit = probe.three_axes(W[None])[-1][0]
    close(fit[i, j], W[i, j], 1e-6)
    close(probe.correlation(fit[i, j], W[i, j]), 1.0, 1e-9)
    W = at_random(2, T, T)
    design = torch.cat([F.one_hot(z, T) for z in (i - j, i, j)], dim=1).double()
    ridged = torch.cat([design, 1e-3 * torch.eye(3 * T)])                               # ridge 1e-6
    for one, fit, *abc in zip(W, probe.three_axes(W)[-1], *probe.three_axes(W)[:3]):
        solution = np.linalg.lstsq(ridged.numpy(), torch.cat([one[i, j], torch.zeros(3 * T)]).numpy(), rcond=None)[0]
        close(torch.cat(abc), torch.tensor(solution), 1e-5)
        close(fit[i, j], design @ torch.tensor(solution), 1e-7)
    assert torch.isnan(probe.correlation(torch.ones(5), torch.arange(5)))


def test_two_axes_are_equation_12():
    W, n = at_random(7, 7), 7
    a, b, fit = probe.two_axes(W)
    close(a[3], W[3].mean() - W.sum() / (2 * n * n))
    close(b[2], W[:, 2].mean() - W.sum() / (2 * n * n))
    close(fit, a[:, None] + b)
    close(a.sum(), b.sum())                                                             # eq. 11
    a, b = at_random(2, 7)
    close(probe.two_axes(a[:, None] + b)[-1], a[:, None] + b)


@pytest.mark.parametrize('kw', [dict(pe='rope'), dict(pe='pope', pope_delta='uniform'), dict(pe='rope', rope_heads=2), dict(pe='pope', attention='mla'),
                                dict(pe='alibi', rope_heads=1), dict(pe='yarn'), dict(pe='pope+alibi'), dict(pe='nope')])
def test_logits_at_other_distances(kw):
    """logits_at gives the encoding's own logits at the true positions, and at fake ones those of a sequence that stands there; polar multiplies to them."""
    enc = make(**kw).blocks[0].attn.pe
    q, k = at_random(2, 1, enc.cfg.heads, 10, enc.cfg.head_dim)
    pos = torch.arange(10)
    W, below = enc.logits(q, k, pos), torch.ones(10, 10, dtype=torch.bool).tril()
    close(probe.logits_at(enc, q, k, pos, pos)[..., below], W[..., below])
    fake = probe.fake_logits(enc, q[:, :, 7:8], k, None)
    close(fake[:, 7 - pos[:8], pos[:8]], W[0, :, 7, :8])
    if kw['pe'] in ('rope', 'pope') and len(kw) == 1 + ('pope_delta' in kw):
        zq, zk, theta = probe.polar(enc, q[0], k[0])
        turn = torch.polar(torch.ones(()).double(), -(pos[:, None] - pos)[..., None] * theta)
        close((zq[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1)[:, below] * enc.scale, W[0][:, below])


def test_analytic_f_and_g():
    """Eq. 15 where keys differ from their mean along it only: f + the signed g is the whole logit of a pair that stands still, and g loses the sign; else
    f turns from kbar, and g from k.
    """
    theta = torch.tensor([1e-6, 1.0]).double()
    size = torch.tensor([1.0, 3, 2, 5, 4]).double()
    zk = torch.stack([size * cmath.exp(0.4j), at_random(5) * 0.1 + 0j], dim=-1)[None]
    zq = torch.stack([torch.polar(2 + at_random(5).abs(), at_random(5, seed=1)), at_random(5, seed=2) * 0.1 + 0j], dim=-1)[None]
    product, slow = probe.slow_dominating(zq, zk, theta, 1000)
    assert slow.tolist() == [[False, False]]                                            # of two pairs none is above 3 times their median
    four = lambda z: torch.cat([z, z[..., 1:], z[..., 1:]], dim=-1)
    product, slow = probe.slow_dominating(four(zq), four(zk), four(theta), 1000)
    assert slow.tolist() == [[True, False, False, False]] and not probe.slow_dominating(four(zq), four(zk), four(theta), 2e6)[1].any()
    close(product[0, 0], zq[0, :, 0].abs().mean() * 3)
    f, g, signed, whole = probe.analytic(zq, zk, theta, torch.tensor([[True, False]]))
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    close((f + signed)[0][below], (zq[0, :, None, 0].conj() * zk[0, None, :, 0]).real[below], 1e-4)
    cosine = torch.cos(zq[0, :, 0].angle() - 0.4) * zq[0, :, 0].abs()
    close(g[0], cosine[:, None] * (size - 3).abs())
    close(signed[0], cosine[:, None] * (size - 3))
    close(whole, signed)                                                                # k - kbar along kbar
    zq, zk = (torch.complex(at_random(2, 5, 3, seed=n), at_random(2, 5, 3, seed=n + 1)) for n in (0, 2))
    kbar, theta, angle = zk.mean(dim=1), (0.5, 0.1, 0.01), lambda a, b: cmath.phase(a) - cmath.phase(b)
    f, g, signed, whole = probe.analytic(zq, zk, torch.tensor(theta, dtype=torch.float64), torch.ones(2, 3).bool())
    for h, i, j in itertools.product(range(2), range(5), range(5)):
        pairs = list(zip(zq[h, i].tolist(), zk[h, j].tolist(), kbar[h].tolist(), theta))
        if j <= i:
            close(f[h, i, j], sum(abs(m) * abs(q) * math.cos(angle(q, m) + (i - j) * turn) for q, k, m, turn in pairs))
        close(g[h, i, j], sum(abs(k - m) * abs(q) * math.cos(angle(q, k)) for q, k, m, turn in pairs))
        close(signed[h, i, j], sum((abs(k) * math.cos(angle(k, m)) - abs(m)) * abs(q) * math.cos(angle(q, m)) for q, k, m, turn in pairs))
        close(whole[h, i, j], sum(abs(k - m) * abs(q) * math.cos(angle(q, k - m)) for q, k, m, turn in pairs))


def llama(**kw):
    """A Llama with random weights, small, with shared keys."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=67, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | kw, attn_implementation='eager', initializer_range=0.5)).eval()


@pytest.mark.parametrize('kw', [dict(), dict(head_dim=12), dict(attention_bias=True, rope_parameters=dict(rope_type='llama3', rope_theta=500.0, factor=4.0,
                         low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16))], ids=['plain', 'wide', 'llama3'])
@torch.no_grad()
def test_a_llama_as_one_of_ours(kw):
    """q, k and logits that the probes see give the attention and the output that transformers computes."""
    net, tokens = llama(**kw), torch.randint(67, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = net(input_ids=tokens, output_attentions=True, use_cache=False)
    model = probe.Llama(net)
    close(model(tokens)[0], theirs.logits, 1e-4)
    for mine, attention, (enc, q, k, _) in zip(probe.attention_maps(model, tokens), theirs.attentions, probe.inside(model, tokens)):
        assert q.shape == k.shape == (2, 4, 20, kw.get('head_dim', 8))
        close(mine, attention, 1e-4)
        close(enc.logits(q, k, torch.arange(20)).softmax(dim=-1), attention, 1e-4)
        zq, zk, theta = probe.polar(enc, q[0], k[0])
        turn = torch.polar(torch.ones(()), -(torch.arange(20)[:, None] - torch.arange(20))[..., None] * theta)
        logits = (zq[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1) * enc.scale + pe.causal(torch.zeros(20, 20))
        close(logits.softmax(dim=-1), attention[0], 1e-4)


def test_a_llama_from_a_folder(tmp_path, monkeypatch):
    """--hf and --text in place of a run, with every probe that takes a Llama."""
    net, tokenizers = llama(), pytest.importorskip('tokenizers')
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f'w{i}': i for i in range(67)}, unk_token='w66'))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    net.save_pretrained(tmp_path / 'net')
    sys.modules['transformers'].PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / 'net')
    text = tmp_path / 'text'
    text.write_text(' '.join(f'w{random.Random(i).randrange(1, 66)}' for i in range(200)))
    where = [f'--hf={tmp_path / "net"}', f'--text={text}', f'--out_dir={tmp_path / "out"}']
    probe.main(['axes', *where, '--length=16'])
    assert len(json.loads((tmp_path / 'out' / 'probe_axes.json').read_text())['rows']) == 8
    model, cfg = probe.load_llama(str(tmp_path / 'net'), str(text))
    for function in probe.LLAMA:
        given = dict(length=16) if function is not probe.norms else {}
        rows, summary, _ = function(model, cfg.the_task, cfg, **given | (dict(gammas='0.5', l_max='3') if function is probe.perturb else {}))
        assert summary and (rows or function is probe.tuples)
    tokens = data.read_text(str(text)).split()
    row = probe.sequences(cfg.the_task, [16], 0, 1)[0][0].tolist()
    assert [f'w{i}' for i in row] in [tokens[i:i + 16] for i in range(len(tokens))]
    text_of = lambda n: len(probe.sequences(cfg.the_task, [16], 0, n))
    probe.main(['norms', where[0], where[2]])                                               # of the weights alone: no text
    seen, axes_of = [], probe.axes_of
    monkeypatch.setattr(probe, 'axes_of', lambda *layer: seen.append(1) or axes_of(*layer))
    for n, flag in ((1, []), (3, ['--n=3'])):
        seen.clear()
        probe.main(['axes', *where, '--length=16', *flag])
        assert len(seen) in (2 * n, 2 * n + 4) and text_of(n) == n                          # two layers, and the four maps of the figure, if drawn
    for argv, says in ((['axes', *where, '--seed=3'], 'has one only'), (['axes', 'run', where[1]], '--text is the text'), (['norms', *where, '--n=2'], 'not a flag'),
                       (['axes', where[0], '--text=none'], 'no such text file'), (['axes', '--hf=none', where[1]], 'no such folder'), (['axes', f'--hf={HERE}', where[1]], 'cannot load'),
                       (['axes', 'run', where[0]], 'not both'), (['cursor', where[0]], 'looks into runs only')):
        with pytest.raises(train.UserError, match=says):
            probe.main(argv)


def test_without_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    (tmp_path / 'x.gguf').touch()
    with pytest.raises(train.UserError, match='pip install transformers gguf accelerate'):
        probe.main(['axes', f'--hf={tmp_path / "x.gguf"}', f'--text={tmp_path / "x.gguf"}'])


def test_entropies_and_their_slope():
    flat = pe.causal(torch.zeros(20, 20)).double()
    logs = torch.arange(1, 21).double().log()
    close(probe.entropies(flat), logs)
    close(probe.slope(probe.entropies(flat), logs), 1.0)
    sharp = flat.masked_fill(~torch.eye(20, dtype=torch.bool), -math.inf)
    close(probe.entropies(sharp), torch.zeros(20))
    p = at_random(6, 6).softmax(dim=-1)
    close(probe.entropies(p.log()), torch.tensor([-sum(x * math.log(x) for x in row) for row in p.tolist()]).double(), 1e-6)


def test_transpositions_and_offsets():
    for gamma, l_max in ((0.2, 3), (0.5, 1), (1.0, 40), (0.01, 5)):
        moved = []
        for seed in range(30):
            source = torch.Generator().manual_seed(seed)
            order, pos = probe.transposition(40, gamma, l_max, source), torch.arange(40)
            assert torch.equal(order[order], pos) and (order - pos).abs().max() <= l_max
            moved.append((order != pos).double().mean().item())
            shift = probe.offsets(40, gamma, l_max, source)
            assert shift.abs().max() <= l_max and (gamma < 1 or (shift != 0).all())
        assert abs(statistics.mean(moved) - gamma) < (0.01 if gamma < 0.5 else 0.2)     # where neighbours run out, fewer


def test_distances_laid_out_anew():
    """LM-Infinite and InfLLM, entry by entry."""
    T, L, first, top = 16, 6, 2, 3
    near, far, mid = at_random(3, T, T)
    d = torch.arange(T)[:, None] - torch.arange(T)
    near = near + pe.causal(near)
    infinite, retrieved = probe.infinite_logits(near, far, d, L, first), probe.retrieved_logits(near, far, mid, d, L, first, top)
    for t in range(T):
        between = sorted((mid[t, s].item() for s in range(first, t - L)), reverse=True)[:top]
        for s in range(T):
            close_by, start = t - s <= L, s < first
            assert infinite[t, s] == (near[t, s] if close_by else far[t, s] if start else -math.inf)
            assert retrieved[t, s] == (near[t, s] if close_by else far[t, s] if start else mid[t, s] if mid[t, s] in between else -math.inf)


def test_layouts_fit_the_window():
    """The paper's 10 first and 32 retrieved keys from a window of 128 on, fewer in smaller ones; and all keys that are near."""
    q, k = at_random(2, 1, 4, 400, 8)
    enc, pos = encoding('rope', heads=4), torch.arange(400)
    for window, first, top in ((128, 10, 32), (24, 3, 6), (2, 1, 1)):
        for layout, keys in (('LM-Infinite', window + 1 + first), ('InfLLM', window // 2 + 1 + first + top)):
            logits = probe.laid_out(layout, window)(enc, q, k, None, enc.logits(q, k, pos))
            assert (logits[..., -1, :].isfinite().sum(dim=-1) == keys).all(), (layout, window)


@pytest.mark.parametrize('name', ['rope', 'pope', 'alibi', 't5', 'yarn', 'nope', 'ape', 'fire', 'vipe', 'ape+rope'])
def test_probes_move_keys_and_leave_no_trace(name):
    """What attention sees of positions; windows as long as the sequence give attention's own output; afterwards the model is what it was."""
    model, tokens = make(pe=name), torch.randint(1, 11, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens)[0]
        sees = probe.sees_distances(model, tokens)
        assert sees == (name not in ('nope', 'ape', 'fire', 'vipe'))
        if sees:
            pos = torch.arange(12)
            with probe.other_logits(model, lambda enc, q, k, state, logits: probe.logits_at(enc, q, k, pos, pos, state) + pe.causal(logits)):
                close(model(tokens)[0], before)
            with probe.other_logits(model, lambda enc, q, k, state, logits: probe.logits_at(enc, q, k, pos, pos // 2, state) + pe.causal(logits)):
                assert not torch.allclose(model(tokens)[0], before)
        with probe.hooked((model.blocks[0].attn.tap_k, lambda m, _, k: k.flip(2))):
            assert not torch.allclose(model(tokens)[0], before)
        with probe.listening(model.blocks[1].attn.tap_head_out) as outputs:
            model(tokens[:1])
        normal, lines = probe.windows_of(model, tokens[:1], 1, 11, 1)
        close(normal, outputs[0][2][0, :, :11].transpose(0, 1).flatten(1))
        if name != 'ape+rope' and name != 'ape' and name != 'vipe':
            assert lines[11].shape == (2, outputs[0][2].shape[1] * outputs[0][2].shape[3])
        assert torch.equal(model(tokens)[0], before)


def test_sliding_over_everything_is_attention():
    model, tokens = make(pe='rope'), torch.randint(1, 11, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), probe.listening(model.blocks[0].attn.tap_head_out, model.blocks[0].attn) as heard:
        enc, q, k, state = probe.inside(model, tokens)[0]
        y, x = heard[0][2], heard[1][1][0]
        v = model.blocks[0].attn.project(x)[2].unflatten(-1, (4, -1)).transpose(1, 2)
        close(probe.sliding(enc, q, k, v, state, 11, 12, 1)[0], y[0, :, -1].flatten())
    points = at_random(50, 4) * torch.tensor([5.0, 3, 0.1, 0.1])
    mean, axes, std = probe.plane(points)
    assert (axes[:, 2:].abs() < 0.05).all() and (axes.diagonal().abs() > 0.9).all()
    close(std, ((points - mean) @ axes.T).std(dim=0))


def test_tuning_of_a_new_encoding_with_a_state(monkeypatch):
    """RoPE at positions divided by a state is RoPE at these positions; no state is None."""
    class Slow(pe.RoPE):
        def state(self, x, pos, total_len=None):
            return x.new_full((), 2.0)

        def qk(self, q, k, at):
            return super().qk(q, k, dataclasses.replace(at, t=at.t / at.state, s=at.s / at.state))
    monkeypatch.setitem(pe.ENCODINGS, 'slow', Slow)
    slow, cfg = nano(pe='slow')
    row = cfg.the_task.sample(1, 5, torch.Generator())[0]
    curves = probe.tuning_curves(slow, row, 9, 2)
    rope, _ = nano(pe='rope')
    close(curves[0, ..., ::2], probe.tuning_curves(rope, row, 5, 2)[0])
    rows, _, _ = probe.tuning(slow, cfg.the_task, cfg, length=9, contents=2)
    assert len(rows) == cfg.n_layer * cfg.n_head


def test_tuning_curves_and_row_norms():
    """Curves with known answers; norms of the weights."""
    row = torch.randint(1, 11, (1, 9), generator=torch.Generator().manual_seed(0))
    model = make(pe='alibi')
    curves = probe.tuning_curves(model, row, 6, 3)
    close(curves - curves[..., :1], (-model.blocks[0].attn.pe.slope[:, None] * torch.arange(6)).expand_as(curves))
    assert probe.tuning_curves(make(pe='ape'), row, 6, 3).shape == (1, 3, 4, 6)         # layer 1 only
    model = make(pe='rope')
    (enc, q, k, _), *_ = probe.inside(model, row)
    t, s = torch.randint(9, (3, 2), generator=torch.Generator().manual_seed(0))[1].tolist()
    zq, zk, theta = probe.polar(enc, q[0], k[0])
    turn = torch.polar(torch.ones(6, 4).double(), -torch.arange(6)[:, None] * theta)
    close(probe.tuning_curves(model, row, 6, 3)[0, 1], (zq[:, t].conj() * zk[:, s] @ turn.T).real * enc.scale)
    for blind in (nano(pe='nope'), nano(pe='vipe', dtype=torch.float32), nano(pe='vrope'), probe.iteration_head('copy')):
        with pytest.raises(train.UserError, match='logits that see distances'):
            probe.tuning(*probe_args(blind))
    close(probe.row_norms(model.blocks[0].attn)[1, 2, 3], model.blocks[0].attn.qkv.weight[32 + 2 * 8 + 3].norm())
    assert probe.row_norms(make(pe='pope', attention='mla').blocks[0].attn).shape == (2, 2, 16)


def test_probes_of_positions_on_runs(tmp_path):
    """Every probe on runs that have what it asks for, figures and all; one line where they have not; a perturbation of nothing costs nothing."""
    asked = dict(rope='tuning frequency norms axes disentangle tuples perturb stretch entropy', pope='frequency tuples', ape='tuning perturb')
    for name, probes in asked.items():
        run = tmp_path / name
        train.main(flags(pe=name, out_dir=run, n_head=2, eval_lengths='1-9'))
        for one in probes.split():
            probe.main([one, str(run), *(['--n=2', '--gammas=0.5', '--l_max=3,9'] if one == 'perturb' else [])])
            found = json.loads((run / f'probe_{one}.json').read_text())
            assert found['summary'] and (found['rows'] or one == 'tuples') and ('note' in found['summary']) == (not found['rows'])
            if one in ('axes', 'disentangle'):
                assert -1 <= found['summary']['mean_r'] <= 1
    for name, one, says in (('ape', 'disentangle', 'pe=ape has not'), ('ape', 'frequency', 'RoPE and PoPE'), ('ape', 'norms', 'RoPE and PoPE'), ('ape', 'tuples', 'RoPE and PoPE'),
                            ('ape', 'stretch', 'pe=ape does not see')):
        with pytest.raises(train.UserError, match=says):
            probe.main([one, str(tmp_path / name)])
    rows = json.loads((tmp_path / 'rope' / 'probe_perturb.json').read_text())['rows']
    assert list(rows[0])[:3] == ['kind', 'gamma', 'l_max'] and {row['kind'] for row in rows} == {'original', 'text', 'feature', 'position'}
    assert {row['kind'] for row in json.loads((tmp_path / 'ape' / 'probe_perturb.json').read_text())['rows']} == {'original', 'text', 'feature'}
    model, cfg = train.load(tmp_path / 'rope')
    tokens, targets = probe.drawn(cfg.the_task, [3], 0, 5)
    score = train.evaluate(model, cfg.the_task, {3: (tokens, targets)})[3]
    for kind in ('original', 'text', 'feature', 'position'):
        same = probe.scores_of(model, kind, tokens, targets, 0.0, 1, torch.Generator())
        assert abs(same['token'] - score['token']) < 1e-3 and abs(same['exact'] - score['exact']) < 1e-3 and abs(same['loss'] - model(tokens, targets)[1].item()) < 1e-3
    own = json.loads((tmp_path / 'pope' / 'probe_frequency.json').read_text())
    os.rename(tmp_path / 'pope', tmp_path / 'pope,lr=1')                                    # as a sweep names its folders
    for name in ('frequency', 'heads'):
        probe.main([name, str(tmp_path / 'rope'), f'--beside={tmp_path / "pope,lr=1"},{tmp_path / "rope"}', f'--out_dir={tmp_path / "both"}'])
    found = json.loads((tmp_path / 'both' / 'probe_frequency.json').read_text())
    mean = {run: [row['q'] for row in found['rows'] if row['run'] == run] for run in ('rope', 'pope', str(tmp_path / 'rope'))}
    assert mean['pope'] == [row['q'] for row in own['rows']] and found['summary']['pope, used'] == own['summary']['used'] and mean['rope'] == mean[str(tmp_path / 'rope')]
    assert [row['run'] for row in json.loads((tmp_path / 'both' / 'probe_heads.json').read_text())['rows']] == ['rope', 'pope', str(tmp_path / 'rope')]
    probe.main(['report', str(tmp_path / 'rope')])
    page = (tmp_path / 'rope' / 'report.html').read_text()
    assert all(f'<h2>{one}</h2>' in page for one in asked['rope'].split()) and page.count('<details>') == 9
    assert page.count('data:image/png') == (9 if importlib.util.find_spec('matplotlib') else 0)
    with pytest.raises(train.UserError, match='no probe has looked'):
        probe.main(['report', str(tmp_path)])
