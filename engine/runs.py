"""From a command line to runs: reading it, one run, a sweep.

`cls` is train.Config, and `train(cfg, device, state, stop)` the training loop. by_seed:
{seed: {length: scores}}.
"""
import itertools
import json
import os
from dataclasses import asdict

import torch

from engine import checkpoint, config, report, seeds
from engine.checkpoint import Diverged
from engine.config import UserError


def default_out_dir(values):
    """out/TASK_PE; a sweep leaves out which of these it varies, and names other keys it varies."""
    named = 'task', 'pe'
    swept = [key for key, value in values.items() if isinstance(value, config.Sweep)]
    names = [config.slug(values[key]) for key in named if key not in swept]
    names += [key for key in swept if key not in named]
    return 'out/' + ('_'.join(names) or 'sweep')


def read_config(cls, argv):
    """Files and flags -> the value of every key, a Sweep where a comma list was given.

    With --eval_only or --resume the run's own configuration takes the place of the files, and flags
    come on top.
    """
    # in lists, and in these keys, a comma belongs to the value
    swept = [key for key, field in config.keys(cls).items()
             if field.type is not list and key not in ('out_dir', 'results', 'data', 'prompt')]
    flags, paths = config.parse(cls, argv, swept)
    values = config.defaults(cls)
    for path in paths:
        values = config.read_file(cls, path, values, swept=swept)
    values |= flags
    values['out_dir'] = values['out_dir'] or default_out_dir(values)
    sweeps = any(isinstance(value, config.Sweep) for value in values.values())
    if values['prompt'] and not values['eval_only']:
        raise UserError('--prompt needs a trained model: add --eval_only and --out_dir=RUN')
    if values['eval_only'] and sweeps:
        raise UserError('--eval_only takes one run: name its folder by --out_dir')
    if (values['eval_only'] or values['resume']) and not sweeps:
        here = {key: values[key] for key in ('out_dir', 'resume', 'eval_only')}
        path = os.path.join(values['out_dir'], 'config.json')
        if not os.path.exists(path):
            raise UserError(checkpoint.no_run(values['out_dir']))
        saved = checkpoint.read_json(path)
        for key in values.keys() & saved.keys():
            values[key] = config.check(cls, key, saved[key], path)
        values |= flags | here
    return values


def read_points(cls, values):
    """[(label, config)] of the points of a sweep, or of the one run, and the keys it varies."""
    swept = [key for key, value in values.items() if isinstance(value, config.Sweep)]
    points = []
    for point in itertools.product(*(values[key] for key in swept)):
        here = values | dict(zip(swept, point))
        if swept:
            name = ','.join(f'{key}={config.slug(str(x))}' for key, x in zip(swept, point))
            here |= {'out_dir': os.path.join(values['out_dir'], name), 'resume': True}
        points.append((' '.join(map(str, point)), config.make(cls, here)))
    if len({(*cfg.eval_lengths, cfg.the_task.corpus) for _, cfg in points}) > 1:
        raise UserError('a sweep makes one table, and these tasks differ in their eval_lengths or '
                        'in what is scored; run them one by one')
    return points, swept


def run(cfg, train, stop, command):
    """Train one configuration, with cfg.resume from its checkpoint: (checkpoint, by_seed).

    by_seed is None if it was stopped.
    """
    device = seeds.pick_device(cfg)
    path = os.path.join(cfg.out_dir, 'ckpt.pt')
    state = {'config': asdict(cfg), 'seeds': {}, 'step': 0}
    if cfg.resume and os.path.exists(path):
        state = checkpoint.read(path, type(cfg))
        checkpoint.check_same(cfg, state['config'], path)
        state['config'] = asdict(cfg)
        if state['batches']['starts'][0].shape != torch.Generator(device).get_state().shape:
            other = 'cuda' if device.type == 'cpu' else 'cpu'
            raise UserError(f'{path} was trained on another kind of device, which draws other '
                            f'random numbers: go on with --device={other}')
    checkpoint.begin(cfg, state)
    try:
        by_seed = train(cfg, device, state, stop)
    except Diverged:
        if cfg.results:
            report.append_result(cfg, {}, state, command, device)
        raise
    if by_seed:
        checkpoint.write(os.path.join(cfg.out_dir, 'lengths.json'), json.dumps(by_seed))
        if cfg.results:
            report.append_result(cfg, by_seed, state, command, device)
    return state, by_seed


def train_run(cfg, train, command):
    """Train one run and show its scores: the exit status."""
    stop = seeds.Stop()
    state, by_seed = run(cfg, train, stop, command)
    if by_seed is None:
        print('stopped and saved; go on with --resume')
        return 128 + stop.signal
    report.show(cfg, by_seed)
    return check_failures(checkpoint.failures(state))


def train_sweep(points, swept, out_dir, train, command):
    """Train each (label, config) and show a table: the exit status."""
    stop = seeds.Stop()
    scores, failed = {}, []
    for label, cfg in points:
        print(f'--- {label} ({cfg.out_dir})')
        state, by_seed = checkpoint.finished(cfg)
        if by_seed:
            print('finished earlier; delete the folder to train it again')
        else:
            try:
                state, by_seed = run(cfg, train, stop, command)
            except Diverged as error:
                failed.append(f'{label}: {error}')
                continue
        if by_seed is None:
            print('stopped and saved; go on with the same command')
            return 128 + stop.signal
        failed += [f'{label} {line}' for line in checkpoint.failures(state)]
        scores[label] = by_seed
        print(report.brief(cfg, report.mean_scores(by_seed)))
        if len(by_seed) > 1:
            print(report.over_seeds(cfg, by_seed))
    report.show_sweep(points[0][1], out_dir, swept, scores)
    return check_failures(failed)


def check_failures(failed):
    """UserError if a seed or a point of a sweep diverged: a line about each is in `failed`."""
    if failed:
        raise UserError(f'{len(failed)} diverged: ' + '; '.join(failed))
    return 0
