"""Graders that are not tests of the repository already, and the tests of exercises/blank.py."""
import ast
import json
import os
import secrets
import subprocess
import sys

import pytest
import torch

import kernels
import pe
import train
from exercises import blank, online
from probes import by_hand

HERE = blank.ROOT


def error(a, b):
    """Largest difference of two tensors over the largest entry of the second."""
    return ((a - b).abs().max() / b.abs().max()).item()


def test_a_shift_is_a_rotation(record_property):
    """f(t + k) is f(t) with pair c turned by k theta_c, whatever t is."""
    t, k, width = torch.arange(40).double(), 7, 16
    f = pe.sinusoids(t, width, 1e4, torch.zeros(1).double()).view(40, -1, 2)
    theta = 1e4 ** (-torch.arange(width // 2).double() * 2 / width)
    turn = torch.stack([(k * theta).cos(), (k * theta).sin()])
    sin, cos = f[:-k].unbind(dim=-1)
    turned = torch.stack([sin * turn[0] + cos * turn[1], cos * turn[0] - sin * turn[1]], dim=-1)
    worst = error(f[k:], turned)
    record_property('error', f'{worst:.1e}')
    assert worst < 1e-10


@pytest.mark.parametrize('T, block, size', [(50, 16, 1.0), (33, 8, 100.0), (5, 16, 1.0)])
def test_online_softmax(T, block, size, record_property, monkeypatch):
    """Equal to softmax over whole rows, for logits in the thousands, without a T x T matrix."""
    monkeypatch.setattr('torch.nn.functional.scaled_dot_product_attention', None)
    q, k, v = (torch.randn(2, 3, T, 8).double() * s for s in (size, size, 1))
    logits = (q @ k.transpose(-2, -1) / 8 ** 0.5).masked_fill(torch.ones(T, T).triu(1) > 0, -1e30)
    worst = error(online.attention(q, k, v, block), logits.softmax(dim=-1) @ v)
    record_property('error', f'{worst:.1e}')
    assert worst < 1e-10


def test_forward_kernel(record_property):
    """The kernel in Triton's interpreter, or on a GPU, against plain attention in float64."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    q, k, v = (torch.randn(1, 2, 70, 16, device=device) for _ in range(3))
    y, _ = kernels.attention(q, k, v)
    exact, _ = kernels.attention_reference(q.double(), k.double(), v.double())
    worst = error(y.double(), exact)
    record_property('error', f'{worst:.1e}')
    assert worst < 1e-2 if device == 'cuda' else worst < 1e-5


@pytest.mark.parametrize('name', by_hand.RULES)
def test_weights_by_hand(name, record_property):
    """Right on every problem of 10 and of 100 inputs."""
    model, cfg = by_hand.iteration_head(name)
    for length in (10, 100):
        tokens, targets = cfg.the_task.sample(20, length, torch.Generator().manual_seed(1))
        with torch.no_grad():
            wrong = (model(tokens)[0].argmax(dim=-1) != targets) & (targets != -100)
        record_property(f'right at {length}', f'{(~wrong.any(dim=1)).double().mean():.2f}')
        assert not wrong.any()


ANSWER = os.path.join(HERE, 'answer.json')


@pytest.mark.skipif(not os.path.exists(ANSWER), reason='write answer.json')
def test_where_it_breaks(record_property):
    """The run is right up to the length before, not at the length, and a probe has looked at it."""
    with open(ANSWER) as f:
        answer = json.load(f)
    model, cfg = train.load(os.path.join(HERE, answer['run']))
    draw, n = torch.Generator().manual_seed(secrets.randbits(31)), answer['length']
    fresh = {length: cfg.the_task.sample(200, length, draw) for length in (n - 1, n)}
    scores = train.evaluate(model, cfg.the_task, fresh)
    for length in fresh:
        record_property(f'exact match at {length}', scores[length]['exact'])
    assert scores[n - 1]['exact'] >= 0.95 > scores[n]['exact']
    assert os.path.exists(os.path.join(HERE, answer['run'], f'probe_{answer["probe"]}.json'))


@pytest.mark.skipif('mine' not in pe.ENCODINGS, reason="name your class 'mine' in pe.ENCODINGS")
def test_your_own_encoding(record_property, tmp_path):
    """Copying, trained to 10 digits on three seeds drawn now: at least two hold at 15."""
    seeds = ','.join(str(secrets.randbelow(10 ** 6)) for _ in range(3))
    subprocess.run(
        [sys.executable, 'train.py', '--task=string_copy', '--pe=mine', '--train_lengths=1-10',
         '--eval_lengths=10-20', '--max_steps=1500', f'--seeds={seeds}', '--n_test=200',
         f'--out_dir={tmp_path}'], cwd=HERE, check=True)
    with open(tmp_path / 'lengths.json') as f:
        by_seed = json.load(f)
    held = []
    for seed, scores in by_seed.items():
        failing = [int(n) for n, score in scores.items() if score['exact'] < 0.95]
        held.append(min(failing, default=21) - 1)
        record_property(f'seed {seed} holds to', held[-1])
    assert sum(n >= 15 for n in held) >= 2


@pytest.mark.parametrize('name', blank.EXERCISES)
def test_what_is_taken_out(name):
    """Bodies go, docstrings and all else stay; the graders exist; README has a section."""
    for path, text in blank.blanked_files(name).items():
        before, after = blank.functions(blank.read(path)), blank.functions(text)
        assert all(ast.get_docstring(x) == ast.get_docstring(after[of]) for of, x in before.items())
    for path, function in (test.split('::') for test in blank.EXERCISES[name].tests):
        assert function in blank.functions(blank.read(path))
    assert '**Question**' in blank.section(name)


@pytest.mark.parametrize('names', [
    [name for name, x in blank.EXERCISES.items() if x.blanks and name not in ('alibi', 'vipe')],
    ['alibi']])                     # without alibi test_all.py cannot start; heads' test wants vipe
def test_graders_fail_without_it(names, tmp_path, capsys, monkeypatch):
    """With several functions taken out, the first grader of each exercise names its own. That all
    hold with the functions in place, these tests show elsewhere."""
    folder = tmp_path / 'copy'
    blank.make_copy(names[0], folder)
    assert not (folder / '.git').exists() and not (folder / 'results').exists()
    files = {}
    for name in names:
        monkeypatch.setitem(blank.EXERCISES, name, blank.EXERCISES[name]._replace(hides=[]))
        blank.blanked_files(name, files)
    for path, text in files.items():
        (folder / path).write_text(text)
    firsts = [blank.EXERCISES[name].tests[0] for name in names]
    monkeypatch.setattr(blank, 'graders', lambda name: firsts)
    assert not blank.check(names[0], folder)
    told = capsys.readouterr().out
    assert f'0 of {len(names)} hold' in told
    for name in names:
        assert f'exercise {name}: write this' in told
