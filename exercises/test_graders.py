"""Graders of exercises that test_all.py does not contain, and a test of exercises/blank.py."""
import ast
import json
import os
import secrets
import subprocess
import sys

os.environ.setdefault('OMP_NUM_THREADS', '1')  # before torch: parallel tests share cores
import pytest
import torch

import pe
import probe
import train
from exercises import blank
from model import Transformer


def test_a_shift_is_a_rotation():
    """f(t + k) is f(t) with pair c rotated by k theta_c, for every t."""
    t, k = torch.arange(40).double(), 7
    sin, cos = pe.sinusoids(t, 16, 1e4, t[:1]).view(40, -1, 2).unbind(dim=-1)
    theta = 1e4 ** (-torch.arange(8).double() * 2 / 16)
    f = torch.complex(cos, sin)
    wrong = (f[k:] - f[:-k] * (1j * k * theta).exp()).abs().amax(dim=0) > 1e-10    # [8]
    assert not wrong.any(), f'f[{k}:] is not f rotated by {k} theta_c: c = {wrong.nonzero().T}'


@pytest.mark.parametrize('name', probe.RULES)
def test_weights_by_hand(name):
    """The model is correct on 20 problems each of 1, 2, 10 and 100 inputs, and on 2 of 1,000."""
    model, cfg = probe.iteration_head(name)
    assert type(model) is Transformer and (cfg.pe, cfg.n_layer) == ('vipe', 2)
    for length, n in ((1, 20), (2, 20), (10, 20), (100, 20), (1000, 2)):
        tokens, targets = cfg.the_task.sample(n, length, torch.Generator().manual_seed(1))
        with torch.no_grad():
            wrong = (model(tokens)[0].argmax(dim=-1) != targets) & (targets != -100)
        print(f'correct at length {length}: {(~wrong.any(dim=1)).double().mean():.2f}')
        assert not wrong.any(), f'length {length}: position {wrong.any(dim=0).nonzero()[0].item()}'


in_a_copy = pytest.mark.skipif(blank.ROOT.parent.name != 'exercises', reason='runs only in a copy')


@in_a_copy
def test_where_it_breaks():
    """Exact match is below 95 % only at the answer's length, and the probe was run on the run."""
    answer = json.loads((blank.ROOT / 'answer.json').read_text())
    run, name = blank.ROOT / answer['run'], answer['probe']
    assert name in probe.PROBES and (run / f'probe_{name}.json').exists(), (
        f'{name!r} must be a probe that was run on this run: python probe.py {name} {run}')
    model, cfg = train.load(str(run))
    draw = torch.Generator().manual_seed(secrets.randbits(31))
    lengths = range(min(cfg.train_lengths), answer['length'] + 1)
    scores = train.evaluate(model, cfg.the_task,
                            [(n, cfg.the_task.sample(200, n, draw)) for n in lengths])
    print('exact match', {n: scores[n]['exact'] for n in lengths})
    assert [n for n in lengths if scores[n]['exact'] < 0.95] == [answer['length']]


@in_a_copy
def test_your_own_encoding(tmp_path):
    """Models trained to copy 10 digits: at least 2 of 3 new seeds generalize to 15 digits."""
    assert 'mine' in pe.ENCODINGS, "register your class as 'mine' in pe.ENCODINGS"
    seeds = ','.join(str(secrets.randbelow(10 ** 6)) for _ in range(3))
    assert not train.main(
        [f'{blank.ROOT}/configs/string_copy_prism.py', '--pe=mine', '--eval_lengths=10-20',
         '--n_test=200', f'--seed={seeds}', f'--out_dir={tmp_path}'])
    longest = []
    for path in tmp_path.glob('seed=*/lengths.json'):
        scores = json.loads(path.read_text())
        failing = [int(n) for n, score in scores.items() if score['exact'] < 0.95]
        longest.append(min(failing, default=21) - 1)
        print(f'{path.parent.name} generalizes to length {longest[-1]}')
    assert sum(n >= 15 for n in longest) >= 2, f'the three seeds generalize to lengths {longest}'


@pytest.mark.parametrize('name', [name for name, x in blank.EXERCISES.items() if x.blanks])
def test_graders_name_the_function_to_write(name, tmp_path, monkeypatch):
    """A copy keeps every docstring, and its first grader fails because of the missing function."""
    assert '**Question**' in blank.section(name)
    for path, text in blank.blanked_files(name).items():
        before, after = (blank.functions(x) for x in ((blank.ROOT / path).read_text(), text))
        assert all(ast.get_docstring(after[x]) == ast.get_docstring(before[x]) for x in before)
    blank.make_copy(name, tmp_path / 'copy')
    assert not (tmp_path / 'copy/.git').exists()
    run = subprocess.run([sys.executable, '-m', 'pytest', blank.graders(name)[0]],
                         cwd=tmp_path / 'copy', capture_output=True, text=True)
    assert run.returncode == 1 and f'exercise {name}: write this' in run.stdout
    monkeypatch.setattr(blank, 'ROOT', tmp_path / 'copy')
    with pytest.raises(train.UserError, match='this is a copy'):
        blank.main([name])
    with pytest.raises(train.UserError, match='unknown flag --chek'):
        blank.main([name, '--chek'])
