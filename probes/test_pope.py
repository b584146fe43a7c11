"""PoPE's probes."""
import dataclasses
import math

import pytest
import torch

import pe
import train
from engine.config import UserError
from probes import by_hand, core, pope
from probes.conftest import at_random, nano, untouched
from test_all import close, flags, make


@pytest.mark.parametrize('kw', [dict(pe='rope'), dict(pe='pope', pope_delta='uniform')])
def test_polar_multiplies_to_the_logits(kw):
    """Re sum_c conj(zq) zk e^(-i (t-s) theta) / sqrt(d) is what the encoding computes."""
    enc, pos = make(**kw).blocks[0].attn.pe, torch.arange(10)
    q, k = at_random(2, 1, 4, 10, 8)
    zq, zk, theta = pope.polar(enc, q[0], k[0])
    turn = torch.polar(torch.ones(()).double(), -(pos[:, None] - pos)[..., None] * theta)
    logits = (zq[:, :, None].conj() * zk[:, None] * turn).real.sum(dim=-1) * enc.scale
    close((logits + pe.causal(logits)).softmax(dim=-1), enc.logits(q, k, pos)[0].softmax(-1))


@pytest.mark.parametrize('name, says', [('alibi', 'RoPE and PoPE'), ('yarn', 'yarn turns')])
def test_polar_refuses(name, says):
    with pytest.raises(UserError, match=says):
        pope.polar(make(pe=name, train_len=8).blocks[0].attn.pe, *at_random(2, 4, 10, 8))


def test_loss_by_position():
    """Mean over problems of the loss at each position; nan where nothing is predicted."""
    model, task, cfg = nano('copy', pe='rope', longest=3)
    rows, summary, _ = untouched(pope.loss, model, task, cfg, n=5)
    tokens, targets = core.problems(task, [7], 5)[7]
    curve = pope.losses_by_position(model, tokens, targets)
    losses = train.token_losses(model(tokens)[0], targets)
    close(curve[8:16], losses[:, 8:16].mean(dim=0).detach(), 1e-6)
    assert curve[:8].isnan().all() and [row['first'] for row in rows] == list(range(9, 17))
    assert rows[0]['rope'] == pytest.approx(curve[8].item(), abs=1e-4)
    assert summary['rope, beyond'] == pytest.approx(curve[8:16].mean().item(), abs=1e-4)


def test_several_runs_beside_each_other(tmp_path):
    """Folders of a sweep have commas in their names; runs of other tasks are refused."""
    model, _, cfg = nano('parity')
    folders = tmp_path / 'rope', tmp_path / 'pope,lr=1', tmp_path / 'copy'
    for folder, kw in zip(folders, ({}, dict(pe='pope'), dict(task='copy'))):
        train.main(flags(out_dir=folder, **kw))
    runs = pope.besides(model, cfg, f'{folders[0]},{folders[1]}')
    assert list(runs) == ['rope', str(folders[0]), 'pope'] and runs['rope'] is model
    with pytest.raises(UserError, match='trained on copy'):
        pope.besides(model, cfg, str(folders[2]))


@pytest.mark.parametrize('name', [*pe.ENCODINGS, 'ape+rope'])
def test_norms_serve_every_encoding(name):
    """With rotations by frequency, without them by feature."""
    turns = issubclass(pe.ENCODINGS[name.split('+')[-1]], (pe.RoPE, pe.PoPE))
    for of, key in (('weights', 'wavelength_q'), ('activations', 'wavelength')):
        rows, summary, _ = untouched(pope.norms, *nano(pe=name, n_head=2), of=of, n=2)
        assert rows and all((row[key] is not None) == turns for row in rows)
    assert (summary['fast'] is not None) == turns and 0 < summary['used'] <= 1


def test_norms_find_the_largest_feature():
    model, task, cfg = nano(pe='nope', n_head=2)
    before = pope.norms(model, task, cfg, of='weights')[0]
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[8 + 3] *= 100    # query feature 4 of head 2
    after = pope.norms(model, task, cfg, of='weights')[0]
    assert after[3]['ratio_q'] > 50 * before[3]['ratio_q']
    assert after[3]['ratio_k'] == before[3]['ratio_k'] and after[:3] == before[:3]
    with pytest.raises(UserError, match='activations or weights'):
        pope.norms(model, task, cfg, of='biases')
    with pytest.raises(UserError, match='--nope_every=0'):
        pope.norms(*nano(nope_every=2))


def test_norms_of_weights_and_used_frequencies():
    model = make(pe='rope')
    weight = model.blocks[0].attn.qkv.weight
    norms = pope.weight_norms(model.blocks[0].attn)
    close(norms[1, 2, 1], weight[32 + 2 * 8 + 2:32 + 2 * 8 + 4].norm())    # a pair of features
    latent = make(pe='pope', attention='mla').blocks[0].attn
    assert pope.weight_norms(latent).shape == (2, 2, 8)    # what it acts on
    even, single = torch.ones(1, 2, 1, 4), torch.tensor([0, 0, 1.0, 0]).expand(1, 2, 1, 4)
    waves = torch.tensor([1.0, 2, 3, 4])
    assert pope.frequencies_used(even, waves)[1]['used'] == 1
    one = pope.frequencies_used(single, waves)[1]
    assert one['used'] == pytest.approx(0.25, abs=1e-4) and one['fast'] == 0


def test_tuning_curves():
    """ALiBi's are lines; RoPE's the sum of its waves; positions that are added: layer 1 alone."""
    row = torch.randint(1, 11, (1, 9), generator=torch.Generator().manual_seed(0))
    model = make(pe='alibi')
    curves = pope.tuning_curves(model, row, 6, 3)
    slope = model.blocks[0].attn.pe.slope[:, None]
    close(curves - curves[..., :1], (-slope * torch.arange(6)).expand_as(curves))
    assert pope.tuning_curves(make(pe='ape'), row, 6, 3).shape == (1, 3, 4, 6)
    model = make(pe='rope')
    layer = core.trace(model, row)[0]
    t, s = torch.randint(9, (3, 2), generator=torch.Generator().manual_seed(0))[1].tolist()
    zq, zk, theta = pope.polar(layer.enc, layer.q[0], layer.k[0])
    turn = torch.polar(torch.ones(6, 4).double(), -torch.arange(6)[:, None] * theta)
    waves = (zq[:, t].conj() * zk[:, s] @ turn.T).real * layer.enc.scale
    close(pope.tuning_curves(model, row, 6, 3)[0, 1], waves)
    blind = [nano(pe='nope'), nano(pe='vipe', dtype=torch.float32), nano(pe='vrope')]
    model, cfg = by_hand.iteration_head('copy')
    for subject in (*blind, (model, cfg.the_task, cfg)):
        with pytest.raises(UserError, match='logits that see distances'):
            pope.tuning(*subject)
    with pytest.raises(UserError, match='come from the content'):
        pope.tuning(*nano(pe='prism'))
    with pytest.raises(UserError, match='a layer of fox reads besides'):
        pope.tuning(*nano(pe='fox'))


def test_tuning_splits_the_variance():
    """Shares by distance, by content and by neither add up to 1; the peak is the largest logit."""
    model, task, cfg = nano(pe='rope', n_head=2)
    rows, summary, figure = untouched(pope.tuning, model, task, cfg, contents=6)
    row, = core.sequences(task, cfg.train_lengths, 0, 1)
    curves = pope.tuning_curves(model, row, summary['distances'], 6)
    for line, curve in zip(rows, curves.transpose(1, 2).flatten(0, 1)):
        assert line['where'] + line['what'] + line['both'] == pytest.approx(1, abs=2e-4)
        peaks = sorted(c.argmax().item() for c in curve)
        assert line['peak'] == (peaks[2] + peaks[3]) / 2
    assert len(figure.panels) == 4 and not math.isnan(summary['range'])


def test_tuning_of_a_new_encoding_with_a_state(monkeypatch):
    """RoPE at positions divided by a state is RoPE at these positions; no state is None."""
    class Slow(pe.RoPE):
        def state(self, x, pos, total_len=None):
            return x.new_full((), 2.0)

        def qk(self, q, k, at):
            return super().qk(q, k, dataclasses.replace(at, t=at.t / at.state, s=at.s / at.state))
    monkeypatch.setitem(pe.ENCODINGS, 'slow', Slow)
    slow, task, cfg = nano(pe='slow')
    row = task.sample(1, 5, torch.Generator())[0]
    rope, _, _ = nano(pe='rope')
    close(pope.tuning_curves(slow, row, 9, 2)[0, ..., ::2],
          pope.tuning_curves(rope, row, 5, 2)[0])
    assert len(pope.tuning(slow, task, cfg, length=9, contents=2)[0]) == cfg.n_layer * cfg.n_head
