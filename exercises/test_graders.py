"""Graders that are not tests of the repository already, and the tests of exercises/blank.py."""
import ast
import contextlib
import json
import math
import os
import secrets

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch: threads would wait for each other
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
import pe
import probe
import train
from exercises import blank, online
from model import Transformer


def grade(got, exact, largest):
    """Fail if the relative error is above `largest`."""
    error = ((got - exact).abs().max() / exact.abs().max()).item()
    assert error < largest, f'relative error {error:.1e}'


def test_a_shift_is_a_rotation():
    """f(t + k) is f(t) with pair c turned by k theta_c, whatever t is."""
    t, k = torch.arange(40).double(), 7
    sin, cos = pe.sinusoids(t, 16, 1e4, t[:1]).view(40, -1, 2).unbind(dim=-1)
    theta = 1e4 ** (-torch.arange(8).double() * 2 / 16)
    f = torch.complex(cos, sin)
    grade(f[k:], f[:-k] * (1j * k * theta).exp(), 1e-10)


@pytest.mark.parametrize('T, block, size', [(50, 16, 1.0), (33, 8, 100.0), (5, 16, 1.0)])
def test_online_softmax(T, block, size):
    """Equal to softmax over whole rows, for logits in the thousands, without a T x T matrix."""
    class NoMatrix(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            for x in tree_leaves(y):
                assert getattr(x, 'shape', ())[-2:] != (T, T), 'a matrix of T x T weights'
            return y
    q, k, v = (torch.randn(2, 3, T, 8).double() * s for s in (size, size, 1))
    logits = (q @ k.transpose(-2, -1) / 8 ** 0.5).masked_fill(torch.ones(T, T).triu(1) > 0, -1e30)
    with NoMatrix() if T > block else contextlib.nullcontext():
        y = online.attention(q, k, v, block)
    grade(y, logits.softmax(dim=-1) @ v, 1e-10)


@pytest.mark.parametrize('D, size', [(16, 1), (12, 10)])
def test_forward_kernel(D, size):
    """y, E and LSE in Triton's interpreter, or on a GPU, against plain attention in float64."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    q, k, v = (torch.randn(2, 3, 70, D, device=device) * s for s in (size, size, 1))
    apart = torch.arange(70, device=device)[:, None] - torch.arange(70, device=device)
    x = q.double() @ k.double().transpose(-2, -1) * D ** -0.5
    lse = x.masked_fill(apart < 0, -torch.inf).logsumexp(dim=-1) / math.log(2)
    exact = kernels.attention_reference(*(x.double() for x in (q, k, v)))
    got = kernels.attention_forward(q, k, v, True)
    for mine, wanted in zip(got, (*exact, lse)):
        grade(mine.double(), wanted, 1e-2 if device == 'cuda' else 1e-4)


@pytest.mark.parametrize('name', probe.RULES)
def test_weights_by_hand(name):
    """Right on 20 problems each of 1, 2, 10 and 100 inputs, and on 2 of 1,000."""
    model, cfg = probe.iteration_head(name)
    assert type(model) is Transformer and (cfg.pe, cfg.n_layer) == ('vipe', 2)
    for length, n in ((1, 20), (2, 20), (10, 20), (100, 20), (1000, 2)):
        tokens, targets = cfg.the_task.sample(n, length, torch.Generator().manual_seed(1))
        with torch.no_grad():
            wrong = (model(tokens)[0].argmax(dim=-1) != targets) & (targets != -100)
        assert not wrong.any(), f'length {length}: place {wrong.any(dim=0).nonzero()[0].item()}'


in_a_copy = pytest.mark.skipif(not os.path.exists(f'{blank.ROOT}/{blank.MARK}'),
                               reason='for the copy of an exercise')


@in_a_copy
def test_where_it_breaks():
    """The run is right at every length before, not at this one, and a probe has looked at it."""
    answer = json.loads(blank.read('answer.json'))
    run, name, n = os.path.join(blank.ROOT, answer['run']), answer['probe'], answer['length']
    looked = name in probe.PROBES and os.path.exists(f'{run}/probe_{name}.json')
    assert looked, f'run python probe.py {name} on this run first'
    model, cfg = train.load(run)
    draw = torch.Generator().manual_seed(secrets.randbits(31))
    lengths = range(min(cfg.train_lengths), n + 1)
    fresh = {length: cfg.the_task.sample(200, length, draw) for length in lengths}
    scores = train.evaluate(model, cfg.the_task, fresh.items())
    exact = {length: scores[length]['exact'] for length in lengths}
    assert [length for length in lengths if exact[length] < 0.95] == [n], exact


@in_a_copy
def test_your_own_encoding(tmp_path):
    """Copying, trained to 10 digits on three seeds drawn now: at least two hold at 15."""
    seeds = ','.join(str(secrets.randbelow(10 ** 6)) for _ in range(3))
    assert not train.main(
        [f'{blank.ROOT}/configs/string_copy_prism.py', '--pe=mine', '--eval_lengths=10-20',
         '--n_test=200', f'--seeds={seeds}', f'--out_dir={tmp_path}'])
    held = []
    for scores in json.loads((tmp_path / 'lengths.json').read_text()).values():
        failing = [int(n) for n, score in scores.items() if score['exact'] < 0.95]
        held.append(min(failing, default=21) - 1)
    assert sum(n >= 15 for n in held) >= 2, f'the seeds generalize to {held}'


@pytest.mark.parametrize('name', blank.EXERCISES)
def test_what_is_taken_out(name):
    """Bodies go, docstrings and all else stay; the graders exist; README has a section."""
    for path, text in blank.blanked_files(name).items():
        before, after = blank.functions(blank.read(path)), blank.functions(text)
        assert all(ast.get_docstring(x) == ast.get_docstring(after[of]) for of, x in before.items())
    for path, function in (test.split('::') for test in blank.EXERCISES[name].tests):
        assert function.partition('[')[0] in blank.functions(blank.read(path))
    assert '**Question**' in blank.section(name)


@pytest.mark.parametrize('kept', ['vipe', 'heads'])  # the test of heads wants ViPE
def test_graders_fail_without_it(kept, tmp_path, capfd, monkeypatch):
    """With several functions taken out, the first grader of each exercise names its own. That all
    hold with the functions in place, these tests show elsewhere."""
    names = [name for name, exercise in blank.EXERCISES.items() if exercise.blanks]
    names.remove(kept)
    folder = tmp_path / 'copy'
    blank.make_copy(names[0], folder)
    assert not (folder / '.git').exists() and not (folder / 'assets').exists()
    files = {}
    for name in names:
        monkeypatch.setitem(blank.EXERCISES, name, blank.EXERCISES[name]._replace(hides=[]))
        blank.blanked_files(name, files)
    for path, text in files.items():
        (folder / path).write_text(text)
    monkeypatch.setattr(blank, 'graders', lambda _: [blank.EXERCISES[x].tests[0] for x in names])
    assert not blank.check(names[0], folder)
    told = capfd.readouterr().out
    assert ' failed in ' in told and ' passed' not in told
    for name in names:
        assert f'exercise {name}: write this' in told
