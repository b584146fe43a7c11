"""Runs of train.py: their files, resuming, many seeds, several processes, bad input."""
import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from unittest import mock

os.environ.setdefault('OMP_NUM_THREADS', '1')  # more threads only wait for each other here
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pe
import tasks
import train
from engine import checkpoint, config, report, runs, seeds
from engine.config import UserError
from model import Transformer
from test_all import close, flags, gpu, python, pythons, variants

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIGS = os.path.join(HERE, 'configs')
CPU = torch.device('cpu')

# --------------------------------------------------------------------------------------------------
# helpers

def read_config(*argv):
    """The configuration that train.py makes of a command line."""
    return train.make_config(runs.read_config(train.Config, list(argv)))


def small(**kw):
    """The configuration of a run of seconds, with the given keys."""
    return read_config(*flags(**kw))


def smaller(**kw):
    """A model and batches for single steps."""
    keys = dict(d_model=16, n_head=4, n_layer=2, batch_size=4, train_lengths=[1, 2, 3, 4],
                eval_lengths=[3], warmup_steps=5)
    return train.Config(**(keys | kw))


def read_checkpoint(folder):
    return torch.load(os.path.join(folder, 'ckpt.pt'), weights_only=True)


def weights(folder, seed=0):
    return read_checkpoint(folder)['seeds'][seed]['model']


def same(a, b):
    """Whether two dictionaries of tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def read_json(path):
    with open(path) as f:
        return json.load(f)


def log_lines(folder):
    """The lines of a run's log, without the one value that a clock gives."""
    with open(os.path.join(folder, 'log.jsonl')) as f:
        lines = [json.loads(line) for line in f]
    return [{key: x for key, x in line.items() if key != 'steps_per_s'} for line in lines]


def assert_same_run(a, b, tol=1e-9):
    """Two runs have the same scores, and the same losses to `tol`."""
    for x, y in zip(log_lines(a), log_lines(b), strict=True):
        assert x.keys() == y.keys()
        for key in x:
            assert x[key] == y[key] if key == 'eval' else abs(x[key] - y[key]) <= tol
    assert read_json(a / 'lengths.json') == read_json(b / 'lengths.json')


@contextlib.contextmanager
def sigterm_in_step(step):
    """A SIGTERM reaches this process in training step number `step`, counted from 1."""
    learning_rate = train.learning_rate

    def learning_rate_and_signal(cfg, number):
        if number + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(cfg, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'learning_rate', learning_rate_and_signal)
        yield


def wait_for_a_save(path, before, run):
    """Wait until a running process has written the checkpoint at `path` once more."""
    while not path.exists() or path.stat().st_mtime_ns == before:
        assert run.poll() is None, run.stdout and run.stdout.read()
        time.sleep(0.005)


def draw(batches, step):
    """The tokens [B, T] of a step."""
    return batches.next(step)[0]


# --------------------------------------------------------------------------------------------------
# a run and its files

def test_a_run_and_its_files(tmp_path, capsys):
    run, results = tmp_path / 'r', tmp_path / 'results.jsonl'
    assert train.main(flags(out_dir=run, seeds='3,4', results=results)) == 0
    out = capsys.readouterr().out
    for text in ('pe=rope', 'exact match', 'last state', '│'):
        assert text in out
    scores = read_json(run / 'lengths.json')
    assert list(scores) == ['3', '4'] and list(scores['3']) == list('12345')
    assert set(scores['3']['1']) == {'exact', 'token', 'last', 'n'}
    logged = [(line['step'], line['seed']) for line in log_lines(run) if 'loss' in line]
    assert logged == [(step, seed) for step in range(2, 13, 2) for seed in (3, 4)]
    assert read_json(run / 'config.json')['seeds'] == [3, 4]
    result = read_json(results)                            # a single line
    assert result['lengths'] == scores and result['config']['pe'] == 'rope'
    assert result['command'].startswith('python train.py') and result['torch']
    assert [point[0] for point in result['curves']['4']] == [4, 8, 12]
    model, cfg = train.load(run, seed=4)
    assert cfg.task == 'parity' and not model.training
    assert same(model.state_dict(), weights(run, 4))
    assert same(train.load(run)[0].state_dict(), weights(run, 3))
    with pytest.raises(UserError, match='seed 9; it has 3, 4'):
        train.load(run, seed=9)


def test_same_seed_same_losses_other_seed_other_losses(tmp_path):
    losses = {}
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        folder = tmp_path / name
        train.main(flags(out_dir=folder, seeds=seed, dropout=0.1, pe='shifted_ape'))
        losses[name] = [line['loss'] for line in log_lines(folder) if 'loss' in line]
    assert losses['a'] == losses['b'] != losses['c']
    assert same(weights(tmp_path / 'a'), weights(tmp_path / 'b'))


RESUMED = [dict(pe='shifted_ape', dropout=0.1),
           dict(n_train=9, length_schedule='[(0, 2), (5, 3)]'),
           dict(seeds='0,1', dtype='float64', ema=0.9)]


@pytest.mark.parametrize('kw', RESUMED, ids=str)
def test_stopped_at_any_step_and_resumed_is_bitwise_the_same(kw, tmp_path):
    whole = tmp_path / 'whole'
    train.main(flags(out_dir=whole, **kw))
    for stop_at in (1, 4, 7, 11):
        folder = tmp_path / str(stop_at)
        with sigterm_in_step(stop_at):
            assert train.main(flags(out_dir=folder, **kw)) == 128 + signal.SIGTERM
        assert read_checkpoint(folder)['step'] == stop_at
        train.main(flags(out_dir=folder, resume=True, **kw))
        for seed in small(**kw).seeds:
            assert same(weights(whole, seed), weights(folder, seed))
        assert log_lines(folder) == log_lines(whole)


def test_a_run_of_a_task_that_has_changed_is_refused(tmp_path):
    """string_reverse had no start symbol once; its sequences were a token shorter."""
    train.main(flags(task='string_reverse', out_dir=tmp_path))
    state = read_checkpoint(tmp_path)
    state['config']['train_len'] -= 1
    torch.save(state, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='the task string_reverse, or its data, has changed'):
        train.load(tmp_path)
    with pytest.raises(UserError, match='the task string_reverse, or its data, has changed'):
        train.main(flags(task='string_reverse', out_dir=tmp_path) + ['--eval_only'])


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_the_form_of_a_checkpoint_and_of_a_results_line_stays(numbers, tmp_path):
    """Old files go on being read. Here a checkpoint lacks what was added to its form later."""
    kw = dict(seeds=numbers, dropout=0.1, results=tmp_path / 'r.jsonl')
    with sigterm_in_step(7):
        train.main(flags(out_dir=tmp_path / 'old', **kw))
    state = read_checkpoint(tmp_path / 'old')
    assert set(state) == {'config', 'step', 'seeds', 'moments', 'batches', 'rng', 'losses'}
    assert set(state['config']) >= {'pe', 'd_model', 'task', 'seeds', 'vocab_size', 'eval_len'}
    assert state['step'] == 7 and list(state['seeds']) == numbers
    for entry in state['seeds'].values():
        assert set(entry) == {'model', 'step', 'evals'} and entry['step'] == 7
        assert [set(point) for point in entry['evals']] == [{'step', 'lengths'}]
    S = len(numbers)
    model = Transformer(small(**kw))
    groups = model.optim_groups(lr=1, weight_decay=1)
    params = [p for group in groups for p in group['params']]
    assert list(state['moments']) == list(range(len(params)))
    for moments, p in zip(state['moments'].values(), params):
        assert {key: x.shape for key, x in moments.items()} == {
            'step': (), 'exp_avg': (S, *p.shape), 'exp_avg_sq': (S, *p.shape)}
    assert set(state['batches']) == {'starts', 'lengths', 'at'}
    assert len(state['batches']['starts']) == S
    assert state['batches']['lengths'] == [1, 2, 3] and state['batches']['at'] == 7 * 8
    assert [[x.dtype for x in generators] for generators in state['rng']] == [[torch.uint8]]
    assert state['losses'].shape == (1, S) and state['losses'].dtype == torch.float64

    for key in ('prism_layers', 'pope_frequencies', 'prompt', 'new_tokens', 'temperature'):
        del state['config'][key]
    torch.save(state, tmp_path / 'old/ckpt.pt')
    train.main(flags(out_dir=tmp_path / 'old', resume=True, **kw))
    train.main(flags(out_dir=tmp_path / 'whole', **kw))
    for seed in numbers:
        assert same(weights(tmp_path / 'old', seed), weights(tmp_path / 'whole', seed))
    assert log_lines(tmp_path / 'old') == log_lines(tmp_path / 'whole')

    with open(os.path.join(HERE, 'results/parity.jsonl')) as f:
        old = json.loads(f.readline())
    new, _ = map(json.loads, (tmp_path / 'r.jsonl').read_text().splitlines())
    given_up = {'vipe_g'}
    assert old.keys() <= new.keys() and old['config'].keys() - given_up <= new['config'].keys()
    old_scores, new_scores = old['lengths']['0']['1'], new['lengths']['0']['1']
    assert old_scores.keys() == new_scores.keys()
    assert [len(x['curves']['0'][0]) for x in (old, new)] == [4, 5]


def test_killed_at_random_and_resumed_is_bitwise_the_same(tmp_path):
    kw = dict(max_steps=300, eval_interval=30, log_interval=15, pe='pope', n_eval=2)
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    python('train.py', *flags(out_dir=whole, **kw), check=True)
    rng, path = random.Random(time.time_ns()), killed / 'ckpt.pt'
    for leg in range(3):
        before = path.stat().st_mtime_ns if leg else None
        argv = flags(out_dir=killed, resume=leg > 0, **kw)
        run = subprocess.Popen([sys.executable, 'train.py', *argv], cwd=HERE,
                               stdout=subprocess.DEVNULL)
        if leg < 2:
            wait_for_a_save(path, before, run)
            time.sleep(rng.uniform(0, 0.2))
            run.kill()
        assert run.wait() == (-signal.SIGKILL if leg < 2 else 0)
    assert same(weights(whole), weights(killed))
    assert log_lines(whole) == log_lines(killed)


def test_full_disk_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path))
    before = (tmp_path / 'ckpt.pt').read_bytes()

    def full(fd):
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', full)
        with pytest.raises(UserError, match='No space left'):
            checkpoint.write(str(tmp_path / 'ckpt.pt'), b'new')
    assert (tmp_path / 'ckpt.pt').read_bytes() == before
    assert not list(tmp_path.glob('*.tmp'))


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    forward, calls = Transformer.forward, []

    def poisoned(self, tokens, targets=None, total_len=None):
        logits, loss = forward(self, tokens, targets, total_len)
        if self.training and targets is not None:
            calls.append(1)
            loss = loss * math.nan if len(calls) == 7 else loss
        return logits, loss
    monkeypatch.setattr(Transformer, 'forward', poisoned)
    with pytest.raises(UserError, match='NaN or infinite at step 7'):
        train.main(flags(out_dir=tmp_path))
    entry = read_checkpoint(tmp_path)['seeds'][0]
    assert entry['step'] == 4 and all(p.isfinite().all() for p in entry['model'].values())


def test_a_new_run_forgets_the_old_one_in_its_folder(tmp_path, monkeypatch):
    train.main(flags(out_dir=tmp_path))
    monkeypatch.setattr(train, 'train', lambda *args: None)           # as if stopped at once
    train.main(flags(out_dir=tmp_path, lr=0.5))
    assert not (tmp_path / 'ckpt.pt').exists() and not (tmp_path / 'lengths.json').exists()


def test_a_run_goes_on_only_where_its_random_numbers_are(tmp_path):
    argv = flags(out_dir=tmp_path, seeds='0,1')
    train.main(argv)
    state = read_checkpoint(tmp_path)
    state['step'] = 8
    state['batches']['starts'] = [torch.zeros(16, dtype=torch.uint8)] * 2          # a GPU's
    torch.save(state, tmp_path / 'ckpt.pt')
    says = 'was trained on another kind of device.* --device=cuda'
    with pytest.raises(UserError, match=says):
        train.main([*argv, '--resume'])
    assert (tmp_path / 'lengths.json').exists()


def test_checkpoints_that_do_not_fit(tmp_path):
    train.main(flags(out_dir=tmp_path))
    for kw, says in ((dict(d_model=32), 'trained with d_model=16, not 32'),
                     (dict(pe='nope'), 'trained with pe=rope'),
                     (dict(train_lengths='1-4'), 'train_lengths'),
                     (dict(task='copy'), 'trained with task=parity'),
                     (dict(seeds='0,1'), 'trained with seeds'),
                     (dict(lr=0.5), 'trained with lr=0.001'),
                     (dict(max_steps=99), 'max_steps')):
        with pytest.raises(UserError, match=says):
            train.main(flags(out_dir=tmp_path, resume=True, **kw))
    data = (tmp_path / 'ckpt.pt').read_bytes()
    (tmp_path / 'ckpt.pt').write_bytes(data[:len(data) // 2])
    for argv in [f'--out_dir={tmp_path}', '--eval_only'], flags(out_dir=tmp_path, resume=True):
        with pytest.raises(UserError, match='not a whole checkpoint'):
            train.main(argv)


# --------------------------------------------------------------------------------------------------
# many seeds

def losses_of(numbers, steps, together=True, **kw):
    """Losses [S, steps] of seeds that train in one Group."""
    group = train.make_group(smaller(seeds=numbers, **kw), CPU)
    if len(numbers) > 1:
        assert group.trainer.model.together                # models this small go under vmap
        group.trainer.model.together = together
    return torch.stack([group.step(step) for step in range(steps)], dim=1)


def compare_seeds(numbers, steps, tol, **kw):
    """Seeds stacked under vmap, and in a loop, have the losses that each has alone."""
    alone = torch.cat([losses_of([seed], steps, **kw) for seed in numbers])
    assert alone[0, -1] != alone[1, -1] and (alone[:, -1] < alone[:, 0]).all()
    close(losses_of(numbers, steps, **kw), alone, tol)
    close(losses_of(numbers, steps, together=False, **kw), alone, tol)


@variants
def test_seeds_together_train_as_each_alone(kw):
    """20 steps of an encoding, 10 of one with switches or of a sum, in float64. Stick-breaking
    learns more slowly at first: 20 in a sum, too."""
    plain = kw['pe'] in pe.ENCODINGS and len(kw) == 1
    long = plain or 'stickbreaking' in kw['pe']
    compare_seeds([5, 6, 7], 20 if long else 10, 1e-9, dtype='float64', **kw)


@pytest.mark.parametrize('name', pe.ENCODINGS)
def test_float32_seeds_together_train_as_each_alone(name):
    compare_seeds([5, 6], 20, 1e-5, pe=name)


def test_seeds_with_tied_embeddings_train_as_each_alone():
    compare_seeds([5, 6, 7], 15, 1e-9, dtype='float64', tie=True)


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_the_moving_average_of_the_weights(numbers):
    """ema <- 0.8 ema + 0.2 weights; training itself goes on from the weights."""
    plain = train.make_group(smaller(seeds=numbers), CPU)
    group = train.make_group(smaller(seeds=numbers, ema=0.8), CPU)
    means = None
    for step in range(6):
        assert (group.step(step) == plain.step(step)).all()
        now = [{name: p.detach().double() for name, p in model.named_parameters()}
               for model in plain.models]
        means = means or now
        means = [{name: 0.8 * mean[name] + 0.2 * p for name, p in weights.items()}
                 for mean, weights in zip(means, now)]
    group.swap_ema()
    saved = group.state()['models']
    for seed, averaged, mean in zip(numbers, group.models, means):
        for name, p in averaged.named_parameters():
            close(p, mean[name], 1e-6)
            assert (saved[seed][name] == p).all()
    group.swap_ema()
    for one, other in zip(group.models, plain.models):
        assert all((a == b).all() for a, b in zip(one.parameters(), other.parameters()))


def test_the_moving_average_is_evaluated_and_saved(tmp_path, monkeypatch):
    """It is what load() gives and what lengths.json scores."""
    averages, update_ema = [], train.Trainer.update_ema

    def spy(self):
        weights = [p.detach().clone() for p in self.model.parameters()]
        before = averages[-1] if averages else weights
        averages.append([0.9 * a + 0.1 * w for a, w in zip(before, weights)])
        update_ema(self)

    monkeypatch.setattr(train.Trainer, 'update_ema', spy)
    train.main(flags(out_dir=tmp_path, ema=0.9))
    loaded, cfg = train.load(tmp_path)
    for p, average in zip(loaded.parameters(), averages[-1]):
        close(p, average, 1e-6)
    task = cfg.the_task
    scores = train.evaluate(loaded, task, train.held_out(cfg, task, 'test', CPU))
    assert read_json(tmp_path / 'lengths.json')['0'] == {str(n): x for n, x in scores.items()}


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_phases_stay_in_their_bounds(numbers):
    """A phase that is pushed against a bound for long leaves it as soon as the push turns."""
    group = train.make_group(smaller(pe='pope', seeds=numbers, lr=0.01, min_lr=0.01), CPU)
    optimizer = group.trainer.optimizer
    delta = next(g for g in optimizer.param_groups if g['name'] == 'delta')['params'][0]
    gradient = -1.0

    def push(*_):
        delta.grad.fill_(gradient)

    optimizer.register_step_pre_hook(push)
    for step in range(100):
        group.step(step)
    assert (delta == 0).all()
    gradient = 1.0
    for step in range(100, 130):
        group.step(step)
    assert (delta < -0.01).all()


@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_compiled_seeds_are_eager_ones(numbers, monkeypatch):
    """--compile compiles what a step calls in one graph: the model, or the pass of all seeds."""
    compiler = torch.compile

    def compile_whole(function, dynamic):
        return compiler(function, fullgraph=True, backend='aot_eager', dynamic=dynamic)
    monkeypatch.setattr(torch, 'compile', compile_whole)
    kw = dict(pe='pope+vipe', n_layer=1, n_head=2, train_lengths=[2, 3], dtype='float64')
    compiled = losses_of(numbers, 4, compile=True, **kw)
    close(compiled, losses_of(numbers, 4, compile=False, **kw), 1e-9)


def test_a_failing_seed_does_not_disturb_the_others(tmp_path, monkeypatch, capsys):
    a, b, results = tmp_path / 'a', tmp_path / 'b', tmp_path / 'r.jsonl'
    train.main(flags(out_dir=a, seeds='0,1,2'))
    clip, calls = seeds.clip_each, []

    def poisoned(params, largest):
        clip(params, largest)
        calls.append(1)
        if len(calls) == 6:                                # so that the loss of step 7 is NaN
            for p in params:
                p.grad[1] = math.nan
    monkeypatch.setattr(seeds, 'clip_each', poisoned)
    with pytest.raises(UserError, match='1 diverged: seed 1'):
        train.main(flags(out_dir=b, seeds='0,1,2', results=results))
    line = read_json(results)
    assert list(line['lengths']) == list(line['curves']) == ['0', '2']
    assert 'seed 1: the loss' in line['failed'][0]
    out = capsys.readouterr().out
    assert 'seed 1: the loss became NaN or infinite at step 7' in out
    assert re.search(r'^2 seeds: .* of 3 reach 85 %', out, re.M)
    for seed in (0, 2):
        assert same(weights(a, seed), weights(b, seed))
    assert list(read_json(b / 'lengths.json')) == ['0', '2']
    assert train.main(['--eval_only', f'--out_dir={b}']) is None
    assert 'left out: seed 1: the loss' in capsys.readouterr().out
    assert list(read_json(b / 'lengths.json')) == ['0', '2']
    failed = read_checkpoint(b)['seeds'][1]
    assert failed['step'] == 4 and all(p.isfinite().all() for p in failed['model'].values())


def test_the_best_seed_is_one_that_learned():
    """ViPE's experiment 2: of the seeds with 85 % on the trained lengths."""
    cfg = train.Config(train_lengths=[1], eval_lengths=[1, 2], seeds=[0, 1, 2])
    scores = {seed: {1: dict(exact=trained, n=4), 2: dict(exact=beyond, n=4)}
              for seed, trained, beyond in ((0, 0.9, 0.25), (1, 0.5, 1.0), (2, 0.85, 0.5))}
    line = report.over_seeds(cfg, scores)
    assert '2 of 3 reach 85 %' in line and line.endswith('the best of these 50.0 % beyond')
    line = report.over_seeds(cfg, {seed: scores[1] for seed in (1, 2)})
    assert '0 of 3 reach 85 %' in line and line.endswith('the best of these - beyond')


def test_micro_batches_give_the_same_gradient(tmp_path):
    """Micro-batches count by what is supervised in them, not by their rows."""
    for accumulate in (1, 3, 8):
        train.main(flags(dtype='float64', seeds='0,1', accumulate=accumulate,
                         out_dir=tmp_path / str(accumulate)))
    assert_same_run(tmp_path / '1', tmp_path / '3')
    assert_same_run(tmp_path / '1', tmp_path / '8')


# --------------------------------------------------------------------------------------------------
# GPUs

class Operators(TorchDispatchMode):
    """The names of the operators that are called within it."""
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


# the host waits inside these, or may, which tensors without values do not show
WAITS = {'linalg_matrix_exp', 'linalg_householder_product', 'linalg_qr', 'linalg_inv_ex',
         '_linalg_solve_ex', 'nonzero'}


@variants
@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_no_step_waits_for_the_device(numbers, kw, monkeypatch):
    """A CUDA graph can record a step: the host reads no value and makes no tensor in it.

    Here the step runs on meta tensors, which have no values; all but AdamW, which is torch's.
    """
    if kw.get('prism_recurrent') == 'orthogonal':
        pytest.skip('train.make_group makes no graph of this one')
    group = train.make_group(smaller(seeds=numbers, **kw), CPU)
    trainer, model = group.trainer, group.trainer.model
    for batches in group.batches:
        batches.next(0)
        for name in ('tokens', 'targets', 'order'):
            setattr(batches, name, getattr(batches, name).to('meta'))
    if isinstance(model, seeds.Stack):
        model.params = {name: p.detach().to('meta').requires_grad_()
                        for name, p in model.params.items()}
        model.buffers = {name: x.to('meta') for name, x in model.buffers.items()}
        params = list(model.params.values())
    else:
        params = list(model.to('meta').parameters())
    trainer.optimizer = mock.Mock(param_groups=[dict(params=params, bounds=(-1, 1))])
    # autocast knows no meta device
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kw: contextlib.nullcontext())
    with Operators() as operators:
        loss = trainer.update(*trainer.batches.next(0))
    assert loss.is_meta and all(p.grad.is_meta for p in params)
    assert 'embedding' in operators.names and not operators.names & WAITS


def test_a_gpu_is_picked_by_number(monkeypatch):
    cuda = dict(is_available=True, device_count=4, set_device=None)
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)

    def number(device):
        return seeds.pick_device(train.Config(device=device)).index
    assert [number(device) for device in ('auto', 'cuda', 'cuda:1', 'cpu')] == [0, 0, 1, None]
    with pytest.raises(UserError, match='has 4 CUDA devices'):
        number('cuda:4')


@gpu
@variants
@pytest.mark.parametrize('numbers', [[0], [0, 1]], ids=str)
def test_gpu_graph_trains_as_eager_steps(numbers, kw):
    """Through an epoch's end and a change of lengths, each of which a graph must notice."""
    losses = {}
    for graph in (False, True):
        cfg = smaller(d_model=32, batch_size=8, train_lengths=[1, 2, 4], n_train=8, seeds=numbers,
                      length_schedule=[(0, 2), (6, 4)], graph=graph, **kw)
        group = train.make_group(cfg, torch.device('cuda'))
        losses[graph] = torch.stack([group.step(step) for step in range(20)]).cpu()
    close(losses[True], losses[False], 1e-4)


@gpu
@pytest.mark.parametrize('numbers', ['0', '0,1'])
def test_gpu_run_stops_and_resumes(numbers, tmp_path):
    argv = flags(device='cuda', seeds=numbers, dropout=0.1, max_steps=40, eval_interval=20)
    a, b = tmp_path / 'a', tmp_path / 'b'
    train.main([*argv, f'--out_dir={a}'])
    with sigterm_in_step(25):
        assert train.main([*argv, f'--out_dir={b}']) == 128 + signal.SIGTERM
    train.main([*argv, f'--out_dir={b}', '--resume'])
    assert_same_run(a, b, 1e-4)


# --------------------------------------------------------------------------------------------------
# sweeps and evaluation

def test_sweep_makes_one_table_and_continues(tmp_path, capsys):
    argv = flags(pe='nope,rope', lr='1e-3,1e-2', out_dir=tmp_path)
    train.main(argv)
    out = capsys.readouterr().out
    names = [f'pe={name},lr={lr}' for name in ('nope', 'rope') for lr in (0.001, 0.01)]
    with pytest.raises(UserError, match=f'is a sweep: name one .*{re.escape(names[0])}'):
        train.main(['--eval_only', f'--out_dir={tmp_path}'])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == sorted(names)
    assert len(re.findall(r'^(nope|rope) 0\.0?01? .*│', out, re.M)) == 4
    first, third = tmp_path / names[0] / 'ckpt.pt', tmp_path / names[2] / 'lengths.json'
    third.unlink()                                         # as if killed in the third run
    before = first.stat().st_mtime_ns
    train.main(argv)
    assert capsys.readouterr().out.count('finished earlier') == 3 and third.exists()
    assert first.stat().st_mtime_ns == before


def test_a_diverging_point_does_not_end_a_sweep(tmp_path, capsys):
    results = tmp_path / 'r.jsonl'
    with pytest.raises(UserError, match='1 diverged: 1e\\+30'):
        train.main(flags(lr='1e30,1e-3', out_dir=tmp_path, results=results))
    assert re.search(r'^0.001 .*│', capsys.readouterr().out, re.M)
    bad, good = map(json.loads, results.read_text().splitlines())
    assert bad['lengths'] == {} and len(bad['failed']) == 1
    assert list(good['lengths']) == ['0'] and 'failed' not in good


def test_eval_only_with_other_options_of_the_task(tmp_path):
    """Scores of flip_flop:ignore=98 do not replace those of flip_flop; they go into results."""
    train.main(flags(task='flip_flop', train_lengths='4', eval_lengths='4', out_dir=tmp_path))
    before = (tmp_path / 'lengths.json').read_text()
    train.main(['--eval_only', f'--out_dir={tmp_path}', '--task=flip_flop:ignore=98',
                f'--results={tmp_path}/lines.jsonl'])
    assert (tmp_path / 'lengths.json').read_text() == before
    line = json.loads((tmp_path / 'lines.jsonl').read_text())
    assert line['config']['task'] == 'flip_flop:ignore=98'
    assert line['lengths'] == json.loads((tmp_path / 'eval.json').read_text()) != json.loads(before)
    with pytest.raises(UserError, match='trained with task=flip_flop, not parity'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--task=parity'])
    train.main(flags(task='group:name=s3', out_dir=tmp_path))
    with pytest.raises(UserError, match='group:name=z6 has other tokens than group:name=s3'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--task=group:name=z6'])
    with pytest.raises(UserError, match='continues no prompt'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--prompt=012'])
    train.main(flags(task='distance:span=4', train_lengths='4', eval_lengths='4', causal=False,
                     out_dir=tmp_path))
    with pytest.raises(UserError, match='without causal mask'):
        train.main(['--eval_only', f'--out_dir={tmp_path}', '--prompt=w1 ?'])


def test_eval_only_uses_the_runs_own_configuration(tmp_path, capsys):
    train.main(flags(out_dir=tmp_path, pe='vipe'))
    before = (tmp_path / 'ckpt.pt').read_bytes()
    capsys.readouterr()
    train.main(['--eval_only', f'--out_dir={tmp_path}', '--eval_lengths=2,9', '--device=cpu'])
    out = capsys.readouterr().out
    assert '--eval_lengths=2,9' in out and 'parity with vipe' in out
    assert (tmp_path / 'ckpt.pt').read_bytes() == before
    assert list(read_json(tmp_path / 'lengths.json')['0']) == list('123459')
    config_file = tmp_path / 'again.py'
    config_file.write_text(f'eval_only = True\nout_dir = {str(tmp_path)!r}\n')
    train.main([str(config_file), '--eval_lengths=7'])
    assert (tmp_path / 'ckpt.pt').read_bytes() == before


def test_the_scale_of_vipe_follows_the_lengths_evaluated(tmp_path):
    """--eval_only at other lengths reports what training with these eval_lengths would have."""
    kw = dict(pe='vipe', vipe_s='global', max_steps=60)
    train.main(flags(out_dir=tmp_path / 'a', eval_lengths='1-9', **kw))
    train.main(flags(out_dir=tmp_path / 'b', eval_lengths='1-5', **kw))
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--eval_lengths=1-9'])
    assert read_json(tmp_path / 'a/lengths.json') == read_json(tmp_path / 'b/lengths.json')
    train.main(['--eval_only', f'--out_dir={tmp_path / "b"}', '--vipe_s=one'])


def test_evaluate_counts():
    class Fixed(torch.nn.Module):
        """A model that gives the answers that it was told."""
        def forward(self, tokens):
            return F.one_hot(self.answers, 8).float(), None
    task = tasks.make('copy')
    tokens, targets = task.sample(4, 3, torch.Generator().manual_seed(0))
    model = Fixed()
    model.answers = targets.clamp(min=0)
    model.answers[0, 4] += 1                               # row 0: its first state is wrong
    model.answers[1, 6] += 1                               # row 1: its last state
    model.answers[2, 7] += 1                               # row 2: its end token
    scores = train.evaluate(model, task, {3: (tokens, targets)})[3]
    assert scores == dict(exact=0.25, token=0.8125, last=0.75, n=4)


# --------------------------------------------------------------------------------------------------
# batches and the learning rate

def test_batches_mix_lengths_and_repeat_fixed_data():
    task = tasks.make('parity')
    batches = train.Batches(small(n_train=8, batch_size=6), 0, task, CPU)
    epoch = torch.cat([draw(batches, 0) for _ in range(4)])
    again = torch.cat([draw(batches, 0) for _ in range(4)])
    assert epoch.shape == (24, 9) and not torch.equal(epoch, again)
    assert sorted(epoch.tolist()) == sorted(again.tolist())
    assert len({(row != 0).sum().item() for row in epoch[:6]}) > 1
    fresh = train.Batches(small(), 0, task, CPU)
    rows = torch.cat([draw(fresh, 0) for _ in range(200)]).tolist()
    assert len({tuple(row) for row in rows}) == 2 + 4 + 8


def test_schedule_limits_lengths():
    cfg = small(length_schedule='[(0, 1), (5, 3)]')
    assert train.lengths_at(cfg, 4) == [1] and train.lengths_at(cfg, 5) == [1, 2, 3]
    batches = train.Batches(cfg, 0, tasks.make('parity'), CPU)
    assert draw(batches, 0).shape == (8, 5) and draw(batches, 5).shape == (8, 9)


@pytest.mark.parametrize('n_train', [0, 1500])
def test_held_out_problems_come_from_generators_of_their_own(n_train):
    """Problems of length 40, where chance repeats are impossible: none is in two parts."""
    cfg = small(train_lengths='40', eval_lengths='40', n_eval=200, n_test=200, n_train=n_train)
    task = tasks.make('parity')
    batches = train.Batches(cfg, 0, task, CPU)
    parts = [torch.cat([draw(batches, 0) for _ in range(200)])]
    parts += [train.held_out(cfg, task, split, CPU)[40][0] for split in ('eval', 'test')]
    trained, validation, test = ({tuple(row) for row in part.tolist()} for part in parts)
    assert len(trained) > 1000
    assert not (trained & validation or trained & test or validation & test)
    with pytest.raises(UserError, match='seeds'):          # no seed reaches another generator
        small(seeds=2 ** 40)


def test_held_out_text_is_never_trained_on(tmp_path):
    """40 files, each of a byte of its own, and the standard library: no file is in two parts."""
    for i in range(1, 41):
        (tmp_path / f'{i}.txt').write_bytes(bytes([i]) * 50)
    cfg = small(task='text', data=tmp_path, train_lengths=16, eval_lengths='16,32')
    task = tasks.make('text', str(tmp_path))
    batches = train.Batches(cfg, 0, task, CPU)
    drawn = [[draw(batches, 0) for _ in range(200)]]
    for split in ('eval', 'test'):
        sets = train.held_out(cfg, task, split, CPU)
        drawn.append([tokens for tokens, _ in sets.values()])
    parts = []
    for part in drawn:
        tokens = torch.cat([x.flatten() for x in part])
        parts.append(set(tokens.tolist()) - {tasks.PAD})
    assert [len(part) for part in parts] == [36, 2, 2] and len(set().union(*parts)) == 40

    files = {}
    for part, documents in tasks.make('stdlib').parts.items():
        files[part] = {bytes(x) for x in documents if len(x) > 38}    # two hold one short comment
    assert all(files.values())
    for a, b in (('train', 'val'), ('train', 'test'), ('val', 'test')):
        assert not files[a] & files[b]


def test_learning_rate_schedules():
    def rate(step, **kw):
        cfg = small(lr=1.0, max_steps=100, warmup_steps=10, min_lr=0.1, **kw)
        return train.learning_rate(cfg, step)
    assert rate(0) == 0.1 and rate(9) == 1 == rate(10)
    close(rate(55), 0.55)
    close(rate(55, decay='cosine'), 0.55)
    close(rate(100, decay='cosine'), 0.1)
    assert rate(99, decay='none') == 1


# --------------------------------------------------------------------------------------------------
# input

BAD = {
    # keys and types
    'unknown flag': (['--batchsize=3'], "did you mean 'batch_size'"),
    'wrong type': (['--lr=fast'], '--lr: lr must be a number'),
    'no value': (['--lr'], '--lr needs a value'),
    # names
    'unknown task': (['--task=pairty'], "'parity'"),
    'unknown encoding': (['--pe=rop'], "'rope'"),
    # the model
    'odd head': (['--d_model=21'], 'even'),
    'heads': (['--n_head=5'], 'divisible'),
    'an encoder for sequences': (['--causal=False'], 'one class'),
    'an encoder of padding': (['--task=distance', '--train_lengths=8,9', '--causal=False'],
                              'one length'),
    'yarn': (['--pe=yarn', '--yarn_beta_fast=0'], 'yarn_beta_fast'),
    'base': (['--rope_base=1'], 'rope_base'),
    # lengths and numbers
    'negative length': (['--train_lengths=-3'], 'train_lengths'),
    'zero length': (['--eval_lengths=0-3'], 'eval_lengths'),
    'no length': (['--train_lengths='], 'train_lengths'),
    'nested lengths': (['--eval_lengths=[[1, 2]]'], 'eval_lengths'),
    'mixed lengths': (["--eval_lengths=[1,'a']"], 'eval_lengths'),
    'too long': (['--task=sort', '--eval_lengths=1-200'], 'from 1 to 100'),
    'modulus': (['--task=polynomial:p=0'], 'modulus'),
    'zero steps': (['--max_steps=0'], 'max_steps must be positive'),
    'small set': (['--n_train=1'], 'fewer than batch_size'),
    # the curriculum
    'bad schedule': (['--length_schedule=[(5, 3)]'], 'begin at step 0'),
    'odd schedule': (['--length_schedule=5'], 'length_schedule'),
    'unsorted': (['--length_schedule=[(0, 1), (9, 2), (5, 3)]'], 'in order'),
    'empty schedule': (['--train_lengths=4-6', '--length_schedule=[(0, 3)]'], 'leaves no length'),
    # data
    'no data': (['--task=jsb'], 'give --data=PATH'),
    'data for none': (['--data=x'], 'reads no files'),
    'no such length': (['--task=scan', '--train_lengths=23'],
                       'no problems of the lengths train_lengths'),
    'cut data set': (['--task=scan', '--n_train=9'], 'leave n_train out'),
    'small data set': (['--task=scan', '--train_lengths=1', '--batch_size=7'],
                       'there are 6 problems'),
    # files and devices
    'no file': (['configs/none.py'], 'cannot read config file configs/none.py'),
    'no folder': (['--out_dir=/dev/null/x'], 'cannot make the folder'),
    'no results': (['--results=/dev/null/x'], 'cannot write'),
    'rates in the wrong order': (['--lr=1e-4', '--min_lr=1e-3'], 'is above lr=0.0001'),
    'no cuda': (['--device=cuda:7'], 'CUDA'),
    'bad device': (['--device=tpu'], 'cpu, cuda'),
    'no graph': (['--graph'], '--graph needs a CUDA device'),
    'no graph to time': (['--graph', '--benchmark'], '--graph needs a CUDA device'),
    # what goes together
    'nothing to resume': (['--resume', '--out_dir=nowhere'], 'no run in nowhere'),
    'nothing to evaluate': (['--eval_only', '--out_dir=nowhere'], 'no run in nowhere'),
    'two to evaluate': (['--eval_only', '--pe=nope,rope'], 'takes one run'),
    'untrained prompt': (['--prompt=x'], 'add --eval_only'),
    'a point of a sweep': (['--d_model=32,33'], 'even'),
    'two tables': (['--task=copy,scan', '--eval_lengths=22-24'], 'a sweep makes one table'),
    'two scores': (['--task=parity,stdlib', '--eval_lengths=4'], 'a sweep makes one table'),
}


def test_nothing_stays_of_a_run_that_is_replaced(tmp_path, capsys):
    train.main(flags(out_dir=tmp_path))
    (tmp_path / 'probe_axes.json').touch()
    assert 'replaces' not in capsys.readouterr().out
    train.main(flags(out_dir=tmp_path, pe='alibi'))
    assert f'replaces the run in {tmp_path}\n' in capsys.readouterr().out
    assert not (tmp_path / 'probe_axes.json').exists() and (tmp_path / 'ckpt.pt').exists()


def test_a_task_without_padding(monkeypatch):
    class Bits(tasks.StringCopy):
        vocab = ['0', '1', '=', '.']

    monkeypatch.setitem(tasks.TASKS, 'bits', Bits())
    with pytest.raises(UserError, match="the vocab of bits must begin with '<pad>'"):
        config.make(train.Config, dict(task='bits'))


@pytest.mark.parametrize('argv, says', BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {word.split('=')[0] for word in argv}
    others = [word for word in flags() if word.split('=')[0] not in given]
    with pytest.raises(UserError, match=re.escape(says)) as error:
        train.main(others + argv)
    assert '\n' not in str(error.value)
    assert not list(tmp_path.rglob('ckpt.pt'))


BAD_FILES = [('lr = 1e-3\npee = 1\n', "unknown key 'pee', did you mean 'pe'"),
             ('lr = = 2', 'line 1: invalid syntax'),
             ('lr = 1\nseeds = [x]', 'line 2: NameError'),
             ('vocab_size = None', 'unknown key')]


@pytest.mark.parametrize('text, says', BAD_FILES)
def test_bad_config_files(text, says, tmp_path):
    (tmp_path / 'bad.py').write_text(text)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        train.main([str(tmp_path / 'bad.py')])
    assert 'bad.py' in str(error.value)


def test_exit_code_2_without_a_traceback(tmp_path):
    argvs = [['train.py', '--lr=fast'],
             ['train.py', '--task=jsb', f'--data={tmp_path}'],
             ['tasks.py', 'pairty'],
             ['tasks.py', 'parity', 'x'],
             ['tasks.py', 'jsb'],
             ['model.py', 'none.py'],
             ['model.py', '--pe=rop']]
    for argv, run in zip(argvs, pythons(*argvs)):
        assert run.returncode == 2, run.stderr
        assert run.stderr.startswith(f'{argv[0]}: ') and run.stderr.count('\n') == 1, run.stderr


def test_files_and_flags_chain(tmp_path):
    a, b = tmp_path / 'a.py', tmp_path / 'b.py'
    a.write_text('task = "copy"\nlr = 0.5\nmax_steps = 10\n')
    b.write_text('# on top of a\nlr = lr / 2\neval_lengths = range(1, 4)\n')
    cfg = read_config(str(a), str(b), '--max_steps=1e3', '--eval_lengths=1-3,7', '--rope_heads=1')
    assert (cfg.task, cfg.lr, cfg.max_steps, cfg.rope_heads) == ('copy', 0.25, 1000, 1)
    assert cfg.eval_lengths == [1, 2, 3, 7] and cfg.out_dir == 'out/copy_rope'
    assert (cfg.vocab_size, cfg.train_len, cfg.eval_len) == (6, 35, 17)
    sweep = runs.read_config(train.Config, ['--task=copy,reverse', '--n_head=1,2'])
    assert sweep['out_dir'] == 'out/rope_n_head'


def test_help_names_every_key(capsys):
    train.main(['--help'])
    out = capsys.readouterr().out
    for key in config.keys(train.Config):
        line = re.search(rf'^  --{key}=(.*)$', out, re.M)
        assert line and len(line[1].split()) > 1, key


# --------------------------------------------------------------------------------------------------
# configs

def config_file(name):
    return os.path.join(CONFIGS, name + '.py')


CHORALE = [[60, -1, 60, 60]]
SMALL_DATA = {'jsb': json.dumps(dict(train=[CHORALE], valid=[CHORALE], test=[CHORALE])).encode(),
              'genome': b'>x\n' + b'ACGT' * 999,
              'openwebtext': bytes(9998)}


@pytest.mark.parametrize('name', sorted(os.listdir(CONFIGS)))
def test_configs_are_valid(name, tmp_path, request):
    values = runs.read_config(train.Config, [os.path.join(CONFIGS, name)])
    task = values['task']
    if task in SMALL_DATA:
        (tmp_path / 'data.bin').write_bytes(SMALL_DATA[task])
        values['data'] = str(tmp_path / 'data.bin')
    elif task == 'cfq':
        values |= dict(data=str(request.getfixturevalue('cfq')), batch_size=12)
    elif task == 'maestro':
        pytest.importorskip('miditok')
        values['data'] = str(request.getfixturevalue('midi'))
    cfg = train.make_config(values)
    if not name.startswith('paper_') and name != 'addition_prism.py':
        assert name == f'{cfg.task}_{cfg.pe}.py'
    with torch.device('meta'):    # of the right shape, without numbers
        Transformer(cfg)


def paper_prism_chains():
    """{task's config: the words after it} of the chains that configs/paper_prism.py lists."""
    with open(config_file('paper_prism')) as f:
        listed = re.findall(r'^#   (.+)$', f.read(), re.M)
    chains = {}
    for line in listed:
        words = re.split(', | or ', line)
        first = words.index('paper_prism')
        for name in words[:first]:
            chains[name] = words[first:]
    return chains


@pytest.mark.parametrize('baseline', [False, True])
def test_the_chains_of_paper_prism_are_the_papers(baseline):
    """The lengths of PRISM section 6, the layers with PRISM, and where the copy branch is."""
    settings = {}
    for name, words in paper_prism_chains().items():
        words = [name, *words, *['paper_prism_baseline'] * baseline]
        cfg = read_config(*(word if word.startswith('--') else config_file(word) for word in words))
        settings[name] = (max(cfg.train_lengths), cfg.length_schedule[-1], max(cfg.eval_lengths),
                          cfg.prism_layers, cfg.prism_copy)
        assert (cfg.pe, cfg.d_model) == (('shifted_ape', 512) if baseline else ('prism', 196))
        assert cfg.n_test == (10000 if name == 'scan_cot_prism' else 1000)
        assert (cfg.prism_input, cfg.prism_noise) == (0.5, 0.0)
        assert (cfg.prism_whole, cfg.prism_info, cfg.ema) == (0.0, 0.0, 0.0)
        assert cfg.prism_reset and cfg.prism_start == 'fading'
        with torch.device('meta'):
            Transformer(cfg)
    long, short = (40, [30000, 40], 150), (10, [5000, 10], 30)
    assert settings == {'string_copy_prism': (*long, [1], 'none'),
                        'string_reverse_prism': (*long, [1], 'fixed'),
                        'odds_first_prism': (*long, [1, 4], 'none'),
                        'stack_prism': (*long, [1, 4], 'none'),
                        'addition_prism': (*short, [1], 'none'),
                        'dyn_str_cpy_prism': (*short, [1], 'fixed'),
                        'multiplication_cot_prism': (*short, [1], 'none'),
                        'scan_cot_prism': (22, [10000, 22], 48, [1], 'fixed')}
