"""Runs of train.py: their files, resuming, many seeds, several processes, bad input."""
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time

os.environ.setdefault('OMP_NUM_THREADS', '1')            # in what follows, too: two threads mostly wait for each other on tensors as small as these
import pytest
import torch
import torch.nn.functional as F

import pe
import tasks
import train
from engine.data import READERS
from model import Transformer
from test_all import close, flags, gpu, python, pythons, variants

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

def weights(folder, seed=0):
    return torch.load(os.path.join(folder, 'ckpt.pt'), weights_only=True)['seeds'][seed]['model']


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def lines(folder):
    out = [json.loads(line) for line in open(os.path.join(folder, 'log.jsonl'))]
    return [{k: v for k, v in line.items() if k != 'steps_per_s'} for line in out]


def test_a_run_and_its_files(tmp_path, capsys):
    assert train.main(flags(out_dir=tmp_path / 'r', seeds='3,4', results=tmp_path / 'results.jsonl')) is None
    out = capsys.readouterr().out
    assert 'pe=rope' in out and 'exact match' in out and 'last state' in out and '│' in out
    scores = json.load(open(tmp_path / 'r/lengths.json'))
    assert list(scores) == ['3', '4'] and list(scores['3']) == list('12345') and set(scores['3']['1']) == {'exact', 'token', 'last', 'n'}
    log = lines(tmp_path / 'r')
    assert [(p['step'], p['seed']) for p in log if 'loss' in p] == [(n, s) for n in range(2, 13, 2) for s in (3, 4)]
    assert json.load(open(tmp_path / 'r/config.json'))['seeds'] == [3, 4]
    result, = (json.loads(line) for line in open(tmp_path / 'results.jsonl'))
    assert result['lengths'] == scores and result['config']['pe'] == 'rope' and result['command'].startswith('python train.py') and result['torch']
    assert [c[0] for c in result['curves']['4']] == [4, 8, 12]
    model, cfg = train.load(tmp_path / 'r', seed=4)
    assert cfg.task == 'parity' and not model.training and same(model.state_dict(), weights(tmp_path / 'r', 4))
    assert same(train.load(tmp_path / 'r')[0].state_dict(), weights(tmp_path / 'r', 3))
    with pytest.raises(train.UserError, match='seed 9; it has 3, 4'):
        train.load(tmp_path / 'r', seed=9)


def test_same_seed_same_losses_other_seed_other_losses(tmp_path):
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        train.main(flags(out_dir=tmp_path / name, seeds=seed, dropout=0.1, pe='shifted_ape'))
    losses = {name: [p['loss'] for p in lines(tmp_path / name) if 'loss' in p] for name in 'abc'}
    assert losses['a'] == losses['b'] != losses['c'] and same(weights(tmp_path / 'a'), weights(tmp_path / 'b'))


@pytest.mark.parametrize('kw', [dict(pe='shifted_ape', dropout=0.1), dict(n_train=9, length_schedule='[(0, 2), (5, 3)]'), dict(seeds='0,1', dtype='float64')], ids=str)
def test_stopped_at_any_step_and_resumed_is_bitwise_the_same(kw, tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path / 'whole', **kw))
    for stop_at in (1, 4, 7, 11):
        folder, learning_rate = tmp_path / str(stop_at), train.learning_rate

        def stop_here(cfg, step):
            if step + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return learning_rate(cfg, step)
        monkeypatch.setattr(train, 'learning_rate', stop_here)
        assert train.main(flags(out_dir=folder, **kw)) == 128 + signal.SIGTERM
        assert torch.load(folder / 'ckpt.pt', weights_only=True)['step'] == stop_at
        monkeypatch.setattr(train, 'learning_rate', learning_rate)
        train.main(flags(out_dir=folder, resume=True, **kw))
        for seed in train.make_config(train.read_config(flags(**kw))).seeds:
            assert same(weights(tmp_path / 'whole', seed), weights(folder, seed))
        assert lines(folder) == lines(tmp_path / 'whole')


def test_killed_at_random_and_resumed_is_bitwise_the_same(tmp_path):
    kw = dict(max_steps=800, eval_interval=50, log_interval=25, pe='pope', n_eval=2)
    python('train.py', *flags(out_dir=tmp_path / 'whole', **kw), check=True)
    rng, path = random.Random(time.time_ns()), tmp_path / 'killed/ckpt.pt'
    for kill in range(3):
        before = path.stat().st_mtime_ns if kill else None
        run = subprocess.Popen([sys.executable, 'train.py', *flags(out_dir=tmp_path / 'killed', resume=kill > 0, **kw)], cwd=HERE, stdout=subprocess.DEVNULL)
        if kill < 2:
            while not path.exists() or path.stat().st_mtime_ns == before:               # until it has saved once more
                assert run.poll() is None
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.2))
            run.kill()
        assert run.wait() == (-signal.SIGKILL if kill < 2 else 0)
    assert same(weights(tmp_path / 'whole'), weights(tmp_path / 'killed')) and lines(tmp_path / 'whole') == lines(tmp_path / 'killed')


def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path))
    before, fsync = (tmp_path / 'ckpt.pt').read_bytes(), os.fsync

    def full(fd):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(train.UserError, match='No space left'):
        train.write(str(tmp_path / 'ckpt.pt'), b'new')
    monkeypatch.setattr(os, 'fsync', fsync)
    assert (tmp_path / 'ckpt.pt').read_bytes() == before and not list(tmp_path.glob('*.tmp'))


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, capsys):
    forward = Transformer.forward

    def poisoned(self, tokens, targets=None, total_len=None, calls=[0]):
        logits, loss = forward(self, tokens, targets, total_len)
        calls[0] += self.training
        return logits, loss * math.nan if loss is not None and calls[0] == 7 else loss
    monkeypatch.setattr(Transformer, 'forward', poisoned)
    with pytest.raises(train.UserError, match='NaN or infinite at step 7'):
        train.main(flags(out_dir=tmp_path))
    checkpoint = torch.load(tmp_path / 'ckpt.pt', weights_only=True)['seeds'][0]
    assert checkpoint['step'] == 4 and all(p.isfinite().all() for p in checkpoint['model'].values())


@variants
def test_seeds_together_train_as_each_alone(kw):
    """100 steps in float64, 15 with an encoding's switches or a sum: the losses of each seed agree to 1e-9 relative."""
    compare_seeds([5, 6, 7], 100 if kw['pe'] in pe.ENCODINGS and len(kw) == 1 else 15, 1e-9, dtype='float64', **kw)


@pytest.mark.parametrize('name', pe.ENCODINGS)
def test_float32_seeds_together_train_as_each_alone(name):
    compare_seeds([5, 6], 20, 1e-5, pe=name)


def test_seeds_with_tied_embeddings_train_as_each_alone():
    compare_seeds([5, 6, 7], 15, 1e-9, dtype='float64', tie=True)


def compare_seeds(together, steps, tol, **kw):
    """Train the seeds in one vmapped pass, in a loop within the step, and each alone, with train.py's own pieces: losses [steps] of each."""
    def losses(seeds, vmap):
        cfg = train.Config(**dict(dict(d_model=16, n_head=4, n_layer=2, batch_size=4, train_lengths=[1, 2, 3, 4], eval_lengths=[3], warmup_steps=5, seeds=seeds), **kw))
        models = train.Seeds(cfg, tasks.make(cfg.task), torch.device('cpu'))
        assert models.together == (len(seeds) > 1)
        models.together = vmap
        return torch.stack([models.step(step) for step in range(steps)], dim=1)         # (S, steps)
    alone = torch.cat([losses([seed], False) for seed in together])
    assert alone[0, -1] != alone[1, -1] and (alone[:, -1] < alone[:, 0]).all()
    close(losses(together, True), alone, tol)
    close(losses(together, False), alone, tol)


def test_compiled_seeds_are_eager_ones(monkeypatch):
    """--compile with many seeds compiles the one pass that all of them take, in one graph."""
    compiler = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda f, dynamic: compiler(f, fullgraph=True, backend='aot_eager', dynamic=dynamic))
    losses = {}
    for compiled in (False, True):
        cfg = train.make_config(dict(task='parity', pe='pope+vipe', n_layer=1, d_model=16, n_head=2, train_lengths=[2, 3], seeds=[0, 1], batch_size=4, max_steps=9, dtype='float64',
                                     compile=compiled))
        models = train.Seeds(cfg, cfg.the_task, torch.device('cpu'))
        losses[compiled] = torch.stack([models.step(number) for number in range(1, 5)])
    close(losses[True], losses[False], 1e-9)


def test_a_failing_seed_does_not_disturb_the_others(tmp_path, monkeypatch, capsys):
    train.main(flags(out_dir=tmp_path / 'a', seeds='0,1,2'))
    clip, calls = train.Seeds.clip, []

    def poisoned(self, largest):
        clip(self, largest)
        calls.append(1)
        if len(calls) == 6:                                                             # so that the loss of step 7 is NaN
            self.params['head.weight'].grad[1] = math.nan
    monkeypatch.setattr(train.Seeds, 'clip', poisoned)
    with pytest.raises(train.UserError, match='1 diverged: seed 1'):
        train.main(flags(out_dir=tmp_path / 'b', seeds='0,1,2', results=tmp_path / 'r.jsonl'))
    line = json.loads((tmp_path / 'r.jsonl').read_text())
    assert list(line['lengths']) == list(line['curves']) == ['0', '2'] and 'seed 1: the loss' in line['failed'][0]
    out = capsys.readouterr().out
    assert 'seed 1: the loss became NaN or infinite at step 7' in out and re.search(r'^2 seeds: .* of 3 reach 85 %', out, re.M)
    assert list(json.load(open(tmp_path / 'b/lengths.json'))) == ['0', '2']
    for seed in (0, 2):
        assert same(weights(tmp_path / 'a', seed), weights(tmp_path / 'b', seed))
    assert train.main(['--eval_only', f'--out_dir={tmp_path / "b"}']) is None and 'left out: seed 1: the loss' in capsys.readouterr().out
    assert list(json.load(open(tmp_path / 'b/lengths.json'))) == ['0', '2']
    failed = torch.load(tmp_path / 'b/ckpt.pt', weights_only=True)['seeds'][1]
    assert failed['step'] == 4 and all(p.isfinite().all() for p in failed['model'].values())


def torchrun(processes, *argv):
    """torchrun on two or more processes of train.py, started."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}', 'train.py', *argv]
    return subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def same_run(a, b, tol=1e-9):
    """Two run folders hold the same losses and scores."""
    for x, y in zip(lines(a), lines(b), strict=True):
        assert x.keys() == y.keys() and all(x[k] == y[k] if k == 'eval' else abs(x[k] - y[k]) <= tol for k in x)
    assert json.load(open(a / 'lengths.json')) == json.load(open(b / 'lengths.json'))


@pytest.mark.parametrize('kw', [dict(seeds='0,1,2'), dict(accumulate=3, pe='pope'), dict(pe='rope,nope,t5', seeds='4,5')], ids=str)
def test_two_processes_train_as_one(kw, tmp_path):
    """Seeds dealt, a batch split, the points of a sweep dealt."""
    argv = flags(dtype='float64', **kw)
    out, _ = (two := torchrun(2, *argv, f'--out_dir={tmp_path / "two"}')).communicate(timeout=120)
    assert two.returncode == 0 and out.count('max_steps=12') == 1 and out.count('holds to: the last') == 1, out
    train.main([*argv, f'--out_dir={tmp_path / "one"}', '--accumulate=1'])
    folders = [path.parent.relative_to(tmp_path / 'one') for path in tmp_path.glob('one/**/lengths.json')]
    assert len(folders) == (3 if 'rope' in kw.get('pe', '') else 1)
    for folder in folders:
        same_run(tmp_path / 'one' / folder, tmp_path / 'two' / folder)


@pytest.mark.parametrize('kw', [dict(seeds='0,1'), dict(accumulate=2)], ids=str)
def test_two_processes_killed_stopped_and_resumed(kw, tmp_path, monkeypatch):
    """One of them dies: the run ends at once with an error. torchrun passes on a SIGTERM, or dies: saved. --resume, by two or by one process: as if nothing had happened."""
    argv, path = flags(dtype='float64', max_steps=300, eval_interval=50, log_interval=10, n_eval=2, **kw), tmp_path / 'b/ckpt.pt'
    learning_rate = train.learning_rate
    train.main([*argv, f'--out_dir={tmp_path / "a"}'])
    monkeypatch.setattr(train, 'learning_rate', lambda cfg, step: (os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None, learning_rate(cfg, step))[1])
    train.main([*argv, f'--out_dir={tmp_path / "b"}'])                                   # one process, between two lines of its log
    monkeypatch.setattr(train, 'learning_rate', learning_rate)
    for leg in ('kill', 'stop' if 'seeds' in kw else 'orphan', 'finish'):
        before = path.stat().st_mtime_ns if path.exists() else None
        processes = 1 if leg == 'finish' and 'seeds' in kw else 2
        run = torchrun(processes, *argv, f'--out_dir={tmp_path / "b"}', f'--resume={path.exists()}')
        if leg != 'finish':
            while not path.exists() or path.stat().st_mtime_ns == before:
                assert run.poll() is None, run.stdout.read()
                time.sleep(0.01)
            children = open(f'/proc/{run.pid}/task/{run.pid}/children').read().split()
            assert len(children) == 2
            os.kill(int(children[1]) if leg == 'kill' else run.pid, signal.SIGTERM if leg == 'stop' else signal.SIGKILL)
        out, _ = run.communicate(timeout=60)
        assert (run.returncode == 0) == (leg == 'finish'), out
        assert ('Signal 9' in out) == ('another process has ended' in out) == (leg == 'kill') and ('stopped and saved' in out) == (leg in ('orphan', 'stop')), out
    same_run(tmp_path / 'a', tmp_path / 'b')


def test_too_many_processes_is_one_clear_line(tmp_path):
    out, _ = torchrun(3, *flags(seeds='0,1', out_dir=tmp_path / 'r')).communicate(timeout=120)
    assert out.count('train.py: 3 processes are too many for 2 seeds: start at most one per seed') == 1 and not (tmp_path / 'r').exists()


def test_micro_batches_give_the_same_gradient(tmp_path):
    """Micro-batches count by what is supervised in them, not by their rows."""
    for accumulate in (1, 3, 8):
        train.main(flags(dtype='float64', seeds='0,1', accumulate=accumulate, out_dir=tmp_path / str(accumulate)))
    same_run(tmp_path / '1', tmp_path / '3')
    same_run(tmp_path / '1', tmp_path / '8')


@variants
def test_no_step_waits_for_the_device(kw, monkeypatch):
    """A CUDA graph records a step only if the host reads no value of it and no tensor of it is made on the host: here, on tensors without values."""
    cfg = train.Config(**dict(dict(d_model=16, n_head=4, n_layer=2, batch_size=4, train_lengths=[1, 4], eval_lengths=[3], seeds=[0, 1]), **kw))
    models = train.Seeds(cfg, tasks.make('parity'), torch.device('cpu'))
    models.batches.prepare(0)
    for x in 'tokens targets order cursor window seed_axis'.split():
        setattr(models.batches, x, getattr(models.batches, x).to('meta'))
    models.params = {name: p.detach().to('meta').requires_grad_() for name, p in models.params.items()}
    models.buffers = {name: x.to('meta') for name, x in models.buffers.items()}
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)               # which knows no such device
    seen = set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.add(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))
    with Seen():
        losses = models.backward(*models.batches.take())
        models.clip(1.0)
    assert losses.is_meta and all(p.grad.is_meta for p in models.params.values())
    # the host waits inside these, or may, which no tensor without values shows
    assert 'embedding' in seen and not seen & {'linalg_matrix_exp', 'linalg_householder_product', 'linalg_qr', 'linalg_inv_ex', '_linalg_solve_ex', 'nonzero'}


def test_a_run_goes_on_only_where_its_random_numbers_are(tmp_path):
    argv = flags(out_dir=tmp_path, seeds='0,1')
    train.main(argv)
    checkpoint, path = torch.load(tmp_path / 'ckpt.pt', weights_only=True), tmp_path / 'ckpt.pt'
    checkpoint['batches']['starts'] = [torch.zeros(16, dtype=torch.uint8)] * 2           # a GPU's
    torch.save(checkpoint | {'step': 8}, path)
    with pytest.raises(train.UserError, match='was trained on another kind of device.* --device=cuda'):
        train.main([*argv, '--resume'])
    assert (tmp_path / 'lengths.json').exists()


def test_each_process_has_its_gpu(monkeypatch):
    for name, value in dict(is_available=True, device_count=4, current_device=3, set_device=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    number = lambda device: train.pick_device(train.Config(device=device)).index
    assert [number(device) for device in ('auto', 'cuda', 'cuda:1', 'cpu')] == [3, 3, 1, None]
    with pytest.raises(train.UserError, match='has 4 CUDA devices'):
        number('cuda:4')


@gpu
@variants
def test_gpu_graph_trains_as_eager_steps(kw):
    """Through an epoch's end and a change of lengths, each of which a graph must notice."""
    def losses(graph):
        cfg = train.Config(**dict(dict(d_model=32, n_head=4, n_layer=2, batch_size=8, train_lengths=[1, 2, 4], eval_lengths=[3], seeds=[0, 1], n_train=8,
                                       length_schedule=[(0, 2), (6, 4)], graph=graph), **kw))
        models = train.Seeds(cfg, tasks.make('parity'), torch.device('cuda'))
        return torch.stack([models.step(step) for step in range(20)])
    close(losses(True).cpu(), losses(False).cpu(), 1e-4)


@gpu
def test_gpu_run_stops_and_resumes(tmp_path, monkeypatch):
    argv = flags(device='cuda', seeds='0,1', dropout=0.1, max_steps=40, eval_interval=20)
    train.main([*argv, f'--out_dir={tmp_path / "a"}'])
    stop, learning_rate = [25], train.learning_rate

    def stop_here(cfg, step):
        if step + 1 in stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(cfg, step)
    monkeypatch.setattr(train, 'learning_rate', stop_here)
    assert train.main([*argv, f'--out_dir={tmp_path / "b"}']) == 128 + signal.SIGTERM
    stop.clear()
    train.main([*argv, f'--out_dir={tmp_path / "b"}', '--resume'])
    same_run(tmp_path / 'a', tmp_path / 'b', 1e-4)


def test_a_new_run_forgets_the_old_one_in_its_folder(tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path))
    monkeypatch.setattr(train, 'train', lambda *args: None)                              # as if stopped at once
    monkeypatch.setattr(train.Stop, '__init__', lambda self, parent: setattr(self, 'signal', signal.SIGTERM))
    train.main(flags(out_dir=tmp_path, lr=0.5))
    assert not (tmp_path / 'ckpt.pt').exists() and not (tmp_path / 'lengths.json').exists()


def test_the_scale_of_vipe_follows_the_lengths_evaluated(tmp_path):
    """--eval_only at longer lengths is what training with those eval_lengths would have reported, for vipe_s=global too."""
    train.main(flags(out_dir=tmp_path / 'a', pe='vipe', vipe_s='global', eval_lengths='1-9', max_steps=60))
    train.main(flags(out_dir=tmp_path / 'b', pe='vipe', vipe_s='global', eval_lengths='1-5', max_steps=60))
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--eval_lengths=1-9'])
    assert json.load(open(tmp_path / 'a/lengths.json')) == json.load(open(tmp_path / 'b/lengths.json'))
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--vipe_s=one'])


def test_sweep_makes_one_table_and_continues(tmp_path, capsys):
    argv = flags(pe='nope,rope', lr='1e-3,1e-2', out_dir=tmp_path)
    train.main(argv)
    out = capsys.readouterr().out
    folders = [f'pe={p},lr={x}' for p in ('nope', 'rope') for x in (0.001, 0.01)]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == sorted(folders)
    assert len(re.findall(r'^(nope|rope) 0\.0?01? .*│', out, re.M)) == 4
    (tmp_path / folders[2] / 'lengths.json').unlink()                                   # as if killed in the third
    first = (tmp_path / folders[0] / 'ckpt.pt').stat().st_mtime_ns
    train.main(argv)
    assert capsys.readouterr().out.count('finished earlier') == 3 and (tmp_path / folders[2] / 'lengths.json').exists()
    assert (tmp_path / folders[0] / 'ckpt.pt').stat().st_mtime_ns == first


def test_eval_only_uses_the_runs_own_configuration(tmp_path, capsys):
    train.main(flags(out_dir=tmp_path, pe='vipe'))
    before = (tmp_path / 'ckpt.pt').read_bytes()
    capsys.readouterr()
    train.main(['--eval_only', f'--out_dir={tmp_path}', '--eval_lengths=2,9', '--device=cpu'])
    out = capsys.readouterr().out
    assert 'parity with vipe' in out and '      2      9' in out and (tmp_path / 'ckpt.pt').read_bytes() == before
    assert list(json.load(open(tmp_path / 'lengths.json'))['0']) == list('123459')


def test_a_diverging_point_does_not_end_a_sweep(tmp_path, capsys):
    with pytest.raises(train.UserError, match='1 diverged: 1e\\+30'):
        train.main(flags(lr='1e30,1e-3', out_dir=tmp_path, results=tmp_path / 'r.jsonl'))
    assert re.search(r'^0.001 .*│', capsys.readouterr().out, re.M)
    bad, good = map(json.loads, (tmp_path / 'r.jsonl').read_text().splitlines())
    assert bad['lengths'] == {} and len(bad['failed']) == 1 and list(good['lengths']) == ['0'] and 'failed' not in good


def test_exact_match_is_greedy_decoding(tmp_path):
    """Teacher forcing and generation with the known final length agree, ViPE included."""
    train.main(flags(out_dir=tmp_path, pe='vipe', max_steps=600, eval_interval=600, task='copy', lr=3e-3, n_layer=2, d_model=32, batch_size=32))
    model, cfg = train.load(tmp_path)
    task = tasks.make('copy')
    exact = 0
    for length in (2, 3, 4):
        tokens, targets = task.sample(60, length, torch.Generator().manual_seed(5))
        score = train.evaluate(model, task, {length: (tokens, targets)})[length]['exact']
        row = tokens[:, :length + 2]
        with torch.no_grad():
            while row.shape[1] < tokens.shape[1]:
                row = torch.cat([row, model(row, total_len=tokens.shape[1])[0][:, -1:].argmax(-1)], dim=1)
        assert abs((row == tokens).all(1).double().mean().item() - score) < 1e-6
        exact += score
    assert exact > 0.5


def test_evaluate_counts():
    class Fixed(torch.nn.Module):
        def forward(self, tokens):
            return F.one_hot(self.answers, 8).float(), None
    task = tasks.make('copy')
    tokens, targets = task.sample(4, 3, torch.Generator().manual_seed(0))
    model = Fixed()
    model.answers = targets.clamp(min=0)
    model.answers[0, 4] += 1                                                            # first state of row 0
    model.answers[1, 6] += 1                                                            # last state of row 1
    model.answers[2, 7] += 1                                                            # EoS of row 2
    scores = train.evaluate(model, task, {3: (tokens, targets)})[3]
    assert scores == dict(exact=0.25, token=0.8125, last=0.75, n=4)


def draw(batches, step):
    batches.prepare(step)
    return batches.take()[0]


def test_batches_mix_lengths_and_repeat_fixed_data():
    cfg = train.make_config(train.read_config(flags(n_train=8, batch_size=6)))
    batches = train.Batches(cfg, [0], tasks.make('parity'), 'cpu')
    epoch = torch.cat([draw(batches, 0)[0] for _ in range(4)])
    again = torch.cat([draw(batches, 0)[0] for _ in range(4)])
    assert epoch.shape == (24, 9) and not torch.equal(epoch, again)
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, again.tolist()))
    assert len({(row != 0).sum().item() for row in epoch[:6]}) > 1
    fresh = train.Batches(train.make_config(train.read_config(flags())), [0], tasks.make('parity'), 'cpu')
    assert len({tuple(row) for _ in range(200) for row in draw(fresh, 0)[0].tolist()}) == 2 + 4 + 8


def test_schedule_limits_lengths():
    cfg = train.make_config(train.read_config(flags(length_schedule='[(0, 1), (5, 3)]')))
    assert train.lengths_at(cfg, 4) == [1] and train.lengths_at(cfg, 5) == [1, 2, 3]
    batches = train.Batches(cfg, [0], tasks.make('parity'), 'cpu')
    assert draw(batches, 0).shape == (1, 8, 5) and draw(batches, 5).shape == (1, 8, 9)


@pytest.mark.parametrize('n_train', [0, 1500])
def test_held_out_problems_come_from_generators_of_their_own(n_train):
    """No seed that a user can set reaches them, and long problems, where chance repeats are impossible, are never trained on."""
    cfg = train.make_config(train.read_config(flags(train_lengths='40', eval_lengths='40', n_eval=200, n_test=200, n_train=n_train)))
    task = tasks.make('parity')
    rows = lambda split: set(map(tuple, train.held_out(cfg, task, split, 'cpu')[40][0].tolist()))
    batches = train.Batches(cfg, [0], task, 'cpu')
    trained = {tuple(row) for _ in range(200) for row in draw(batches, 0)[0].tolist()}
    assert len(trained) > 1000 and not rows('eval') & rows('test') and not (rows('eval') | rows('test')) & trained
    with pytest.raises(train.UserError, match='seeds'):
        train.make_config(train.read_config(flags(seeds=2 ** 40)))


def test_held_out_text_is_never_trained_on(tmp_path):
    """Of 40 files, each of a byte of its own, the parts share none; of the standard library no file is in two parts (but a comment, 38 bytes, is two files)."""
    for i in range(1, 41):
        (tmp_path / f'{i}.txt').write_bytes(bytes([i]) * 50)
    cfg, task = train.make_config(train.read_config(flags(task='text', data=tmp_path, train_lengths=16, eval_lengths='16,32'))), tasks.make('text', str(tmp_path))
    batches = train.Batches(cfg, [0], task, 'cpu')
    seen = lambda many: set(torch.cat([tokens.flatten() for tokens in many]).tolist()) - {tasks.PAD}
    parts = [seen(draw(batches, 0) for _ in range(200)), *(seen(tokens for tokens, _ in train.held_out(cfg, task, split, 'cpu').values()) for split in ('eval', 'test'))]
    assert list(map(len, parts)) == [36, 2, 2] and len(set().union(*parts)) == 40
    files = {part: {bytes(x) for x in found if len(x) > 38} for part, found in tasks.make('stdlib').parts.items()}
    assert all(files.values()) and not any(files[a] & files[b] for a, b in (('train', 'val'), ('train', 'test'), ('val', 'test')))


def test_learning_rate_schedules():
    cfg = lambda **kw: train.make_config(train.read_config(flags(lr=1.0, max_steps=100, warmup_steps=10, min_lr=0.1, **kw)))
    assert train.learning_rate(cfg(), 0) == 0.1 and train.learning_rate(cfg(), 9) == 1 == train.learning_rate(cfg(), 10)
    close(train.learning_rate(cfg(), 55), 0.55)
    close(train.learning_rate(cfg(decay='cosine'), 55), 0.55)
    close(train.learning_rate(cfg(decay='cosine'), 100), 0.1)
    assert train.learning_rate(cfg(decay='none'), 99) == 1


BAD = {
    'unknown flag': (['--batchsize=3'], "did you mean 'batch_size'"), 'wrong type': (['--lr=fast'], '--lr: lr must be float'),
    'not whole': (['--max_steps=1.5'], 'max_steps must be int'), 'no value': (['--lr'], '--lr needs a value'), 'unknown task': (['--task=pairty'], "'parity'"),
    'unknown encoding': (['--pe=rop'], "'rope'"), 'odd head': (['--d_model=21'], 'even'), 'heads': (['--n_head=5'], 'divisible'),
    'negative length': (['--train_lengths=-3'], 'train_lengths'), 'zero length': (['--eval_lengths=0-3'], 'eval_lengths'), 'no length': (['--train_lengths='], 'train_lengths'),
    'too long': (['--task=sort', '--eval_lengths=1-200'], 'from 1 to 100'), 'no file': (['configs/none.py'], 'cannot read config file configs/none.py'),
    'no cuda': (['--device=cuda:7'], 'CUDA'), 'bad device': (['--device=tpu'], 'cpu, cuda'), 'no folder': (['--out_dir=/dev/null/x'], 'cannot make the folder'),
    'nothing to resume': (['--resume', '--out_dir=nowhere'], 'no run to resume'), 'nothing to evaluate': (['--eval_only', '--out_dir=nowhere'], 'no run to evaluate'),
    'zero steps': (['--max_steps=0'], 'max_steps must be positive'), 'bad choice': (['--decay=exp'], 'linear'), 'bad bool': (['--tie=maybe'], 'tie must be bool'),
    'bad schedule': (['--length_schedule=[(5, 3)]'], 'begin at step 0'), 'empty schedule': (['--train_lengths=4-6', '--length_schedule=[(0, 3)]'], 'leaves no length'),
    'odd schedule': (['--length_schedule=5'], 'length_schedule'), 'small set': (['--n_train=1'], 'fewer than batch_size'), 'no results': (['--results=/dev/null/x'], 'cannot write'),
    'a point of a sweep': (['--d_model=32,33'], 'even'), 'nested lengths': (['--eval_lengths=[[1, 2]]'], 'eval_lengths'),
    'mixed lengths': (["--eval_lengths=[1,'a']"], 'eval_lengths'), 'modulus': (['--task=polynomial:p=0'], 'modulus'), 'yarn': (['--pe=yarn', '--yarn_beta_fast=0'], 'yarn_beta_fast'),
    'base': (['--rope_base=1'], 'rope_base'), 'unsorted': (['--length_schedule=[(0, 1), (9, 2), (5, 3)]'], 'in order'),
    'two tables': (['--task=copy,scan', '--eval_lengths=22-24'], 'a sweep makes one table'), 'two scores': (['--task=parity,stdlib', '--eval_lengths=4'], 'a sweep makes one table'),
    'no data': (['--task=jsb'], 'give --data=PATH'), 'data for none': (['--data=x'], 'reads no files'), 'untrained prompt': (['--prompt=x'], 'add --eval_only'),
    'no such length': (['--task=scan', '--train_lengths=23'], 'no problems of the lengths train_lengths'), 'cut data set': (['--task=scan', '--n_train=9'], 'leave n_train out'),
    'small data set': (['--task=scan', '--train_lengths=1', '--batch_size=7'], 'there are 6 problems'), 'two to evaluate': (['--eval_only', '--pe=nope,rope'], 'takes one run')}


@pytest.mark.parametrize('argv, says', BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [f for f in flags() if f.split('=')[0] not in {a.split('=')[0] for a in argv}]
    with pytest.raises(train.UserError, match=re.escape(says)) as error:
        train.main(small + argv)
    assert '\n' not in str(error.value)
    assert not list(tmp_path.rglob('ckpt.pt'))


def test_bad_config_files(tmp_path):
    for text, says in (('lr = 1e-3\npee = 1\n', "unknown key 'pee', did you mean 'pe'"), ('lr = = 2', 'line 1: invalid syntax'), ('lr = 1\nseeds = [x]', 'line 2: NameError'),
                       ('lr = "fast"', 'lr must be float'), ('foo = None', "unknown key 'foo'"), ('vocab_size = None', 'unknown key')):
        (tmp_path / 'bad.py').write_text(text)
        with pytest.raises(train.UserError, match=re.escape(says)) as error:
            train.main([str(tmp_path / 'bad.py')])
        assert 'bad.py' in str(error.value)


def test_exit_code_2_without_a_traceback(tmp_path):
    argvs = [['train.py', '--lr=fast'], ['train.py', *flags(out_dir=tmp_path / 'r', n_train=1)], ['train.py', '--task=jsb', f'--data={tmp_path}'],
             ['tasks.py', 'pairty'], ['tasks.py', 'jsb'], ['tasks.py', 'parity', 'x'], ['model.py', '--pe=rop'], ['model.py', '--d_mode=4'],
             ['model.py', 'none.py'], ['model.py', '--n_layer=x']]
    for argv, run in zip(argvs, pythons(*argvs)):
        assert run.returncode == 2 and run.stderr.startswith(f'{argv[0]}: ') and run.stderr.count('\n') == 1, run.stderr


def test_checkpoints_that_do_not_fit(tmp_path):
    train.main(flags(out_dir=tmp_path))
    for kw, says in ((dict(d_model=32), 'trained with d_model=16, not 32'), (dict(pe='nope'), 'trained with pe=rope'), (dict(train_lengths='1-4'), 'train_lengths'),
                     (dict(task='copy'), 'trained with task=parity'), (dict(seeds='0,1'), 'trained with seeds'), (dict(lr=0.5), 'trained with lr=0.001'), (dict(max_steps=99), 'max_steps')):
        with pytest.raises(train.UserError, match=says):
            train.main(flags(out_dir=tmp_path, resume=True, **kw))
    checkpoint = torch.load(tmp_path / 'ckpt.pt')
    for key in ('prism_layers', 'pope_frequencies', 'length_schedule'):                 # an older one, before there were these keys
        del checkpoint['config'][key]
    torch.save(checkpoint, tmp_path / 'ckpt.pt')
    assert train.main(flags(out_dir=tmp_path, resume=True)) is None and train.load(tmp_path)[1].prism_layers == [1]
    data = (tmp_path / 'ckpt.pt').read_bytes()
    (tmp_path / 'ckpt.pt').write_bytes(data[:len(data) // 2])
    for argv in ([f'--out_dir={tmp_path}', '--eval_only'], flags(out_dir=tmp_path, resume=True)):
        with pytest.raises(train.UserError, match='no whole checkpoint'):
            train.main(argv)


def test_files_and_flags_chain(tmp_path):
    (tmp_path / 'a.py').write_text('task = "copy"\nlr = 0.5\nmax_steps = 10\n')
    (tmp_path / 'b.py').write_text('# on top of a\nlr = lr / 2\neval_lengths = range(1, 4)\n')
    cfg = train.make_config(train.read_config([str(tmp_path / 'a.py'), str(tmp_path / 'b.py'), '--max_steps=1e3', '--eval_lengths=1-3,7', '--rope_heads=1']))
    assert (cfg.task, cfg.lr, cfg.max_steps, cfg.eval_lengths, cfg.rope_heads) == ('copy', 0.25, 1000, [1, 2, 3, 7], 1)
    assert (cfg.vocab_size, cfg.train_len, cfg.eval_len, cfg.out_dir) == (6, 35, 17, 'out/copy_rope')


def test_help_names_every_key(capsys):
    train.main(['--help'])
    out = capsys.readouterr().out
    for key in train.KEYS:
        line = re.search(rf'^  --{key}=(.*)$', out, re.M)
        assert line and len(line[1].split()) > 1, key


@pytest.mark.parametrize('name', sorted(f for f in os.listdir(os.path.join(HERE, 'configs'))))
def test_configs_are_valid(name, cfq, request):
    values = train.read_config([os.path.join(HERE, 'configs', name)])
    data = cfq if values['task'] == 'cfq' else cfq / 'data' if values['task'] in READERS else ''
    if values['task'] == 'maestro':
        pytest.importorskip('miditok')
        data = request.getfixturevalue('midi')
    elif data and data != cfq:
        data.write_bytes({'jsb': json.dumps(dict.fromkeys(('train', 'valid', 'test'), [[[60, -1, 60, 60]]])).encode(), 'genome': b'>x\n' + b'ACGT' * 999,
                          'openwebtext': bytes(9998)}[values['task']])
        data = data.rename(data.with_suffix('.bin'))
    cfg = train.make_config(values | {'data': str(data)} | ({'batch_size': 12} if data == cfq else {}))
    if not name.startswith('paper_') and name != 'addition_prism.py':
        assert name == f'{cfg.task}_{cfg.pe}.py'
    Transformer(cfg)


def test_the_paper_size_of_prism_goes_by_the_task():
    """Lengths, layers and copy branch of prism.txt 6; SCAN's length split trains on up to 22 actions and tests on the rest, whatever the size."""
    found = {}
    for name in ('string_copy', 'stack', 'addition', 'scan_cot'):
        cfg = train.make_config(train.read_config([os.path.join(HERE, f'configs/{part}.py') for part in (f'{name}_prism', 'paper_prism')]))
        found[name] = max(cfg.train_lengths), cfg.length_schedule[-1], max(cfg.eval_lengths), cfg.prism_layers, cfg.prism_copy, cfg.n_test
    assert found == {'string_copy': (40, [30000, 40], 150, [1], 'none', 1000), 'stack': (40, [30000, 40], 150, [1, 4], 'none', 1000),
                     'addition': (10, [5000, 10], 30, [1], 'none', 1000), 'scan_cot': (22, [10000, 22], 48, [1], 'fixed', 10000)}


def test_mean_of_the_best_evaluations(tmp_path):
    """--top_evals=2: for each length and score its two best evaluations; none of those that saw other lengths."""
    train.main(flags(out_dir=tmp_path, max_steps=6, eval_interval=2, top_evals=2, results=tmp_path / 'r.jsonl'))
    evals = torch.load(tmp_path / 'ckpt.pt', weights_only=True)['seeds'][0]['evals']
    found = json.loads((tmp_path / 'r.jsonl').read_text())['top']['0']
    assert len(evals) == 3
    for n, scores in found.items():
        for key, value in scores.items():
            assert abs(value - sum(sorted(e['lengths'][int(n)][key] for e in evals)[1:]) / 2) < 1e-5
    checkpoint = {'seeds': {0: {'evals': [{'step': 1, 'lengths': {1: dict(exact=1.0, token=1.0, last=1.0)}}]}}}
    assert train.top(train.Config(eval_lengths=[1, 2], top_evals=2), checkpoint) == {}
