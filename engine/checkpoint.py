"""The files of a run, and the state of its training in them.

A run's folder holds config.json, ckpt.pt, log.jsonl (a line per logged point) and, once it has
ended, lengths.json. ckpt.pt is a dictionary:

    config    every key of train.Config
    step      optimizer steps done
    seeds     {seed: {model: state_dict, step: its step, evals: [{step, lengths}], failed: why}}
    moments   AdamW's averages, stacked over the seeds: {number of the parameter: {name: [S, ...]}}
              With --ema, `model` is the moving average, and the weights are here under `ema`.
    batches   where the data stand: the generators' states at the start of the epoch, and the place
    rng       of each process, the state of torch's generators (dropout)
    losses    [steps, all seeds] since the last line of the log
"""
import contextlib
import glob
import io
import json
import math
import os

import torch
from tqdm import tqdm

from engine import config
from engine.config import UserError

# --------------------------------------------------------------------------------------------------
# writing and reading

@contextlib.contextmanager
def explain(what, fix=''):
    """Make an OSError in the block one line: cannot `what`: its reason, and the fix."""
    try:
        yield
    except OSError as error:
        raise UserError(f'cannot {what}: {error.strerror}{fix}') from None


def write(path, data):
    """Write bytes or text so that the file is always either the old one or the new one, whole."""
    data = data.encode() if isinstance(data, str) else data
    with explain(f'write {path}', '; the old file, if any, is unchanged'):
        try:
            with open(path + '.tmp', 'wb') as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(path + '.tmp', path)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(path + '.tmp')
            raise


def append(path, text):
    """Append text to a file in one piece, even if several processes do."""
    with explain(f'write {path}'), open(path, 'ab', buffering=0) as f:
        f.write(text.encode())


def make_folder(path):
    """Make a folder, if it is not there."""
    with explain(f'make the folder {path}', '; choose another --out_dir'):
        os.makedirs(path, exist_ok=True)


def read_json(path):
    """The dictionary in a JSON file of a run."""
    with explain(f'read {path}'), open(path) as f, contextlib.suppress(ValueError):
        value = json.load(f)
        if isinstance(value, dict):
            return value
    raise UserError(f'{path} does not hold a dictionary in JSON')


def read_lengths(path):
    """{seed: {length: scores}} in a lengths.json."""
    return {int(seed): {int(n): x for n, x in scores.items()}
            for seed, scores in read_json(path).items()}


def no_run(folder):
    """What to say of a folder in which a file of a run is missing."""
    points = sorted(glob.glob(os.path.join(glob.escape(folder), '*', 'ckpt.pt')))
    if points:
        return f'{folder} is a sweep: name one of its runs, as in {os.path.dirname(points[0])}'
    return f'no run in {folder}: train it first, or name another'


def read(path, cls):
    """The dictionary in a checkpoint; keys of `cls` that it does not have get their defaults."""
    if not os.path.exists(path):
        raise UserError(no_run(os.path.dirname(path)))
    # torch says in many ways that a file is cut off, or not a checkpoint at all
    with explain(f'read {path}'), open(path, 'rb') as f, contextlib.suppress(Exception):
        checkpoint = torch.load(f, map_location='cpu', weights_only=True)
        checkpoint['config'] = config.defaults(cls) | checkpoint['config']
        if {'seeds', 'step'} <= checkpoint.keys():
            return checkpoint
    raise UserError(f'{path} is not a whole checkpoint of train.py; delete it and train again')


# --------------------------------------------------------------------------------------------------
# what a checkpoint holds

# what may differ when a run goes on
FREE = ('out_dir', 'device', 'kernel', 'compile', 'graph', 'accumulate', 'log_interval',
        'eval_interval', 'eval_lengths', 'n_eval', 'n_test', 'results', 'resume',
        'eval_only', 'benchmark', 'prompt', 'new_tokens', 'temperature')


def check_same(cfg, saved, path, keys=None):
    """Refuse a checkpoint from a config that differs in one of the keys (None: all but FREE). With
    keys given the task's options may differ, as in flip_flop:ignore=98."""
    options_differ = keys and cfg.task.partition(':')[0] == saved['task'].partition(':')[0]
    if keys is None:
        keys = [key for key in config.keys(type(cfg)) if key not in FREE]
    for key in [*keys, 'vocab_size', 'train_len']:
        now = getattr(cfg, key)
        if saved[key] != now and not (key == 'task' and options_differ):
            advice = 'use the same, or another --out_dir'
            if key not in keys:                            # the task sets these
                advice = f'the task {cfg.task}, or its data, has changed; train again'
            raise UserError(f'{path} was trained with {key}={saved[key]}, not {now}: {advice}')


def weights(checkpoint, seed, path):
    """The state_dict of one seed's model."""
    entries = checkpoint['seeds']
    if 'model' not in entries.get(seed, {}):
        there = [str(s) for s in entries if 'model' in entries[s]]
        raise UserError(f'{path} has no model of seed {seed}; it has {", ".join(there) or "none"}')
    return entries[seed]['model']


def first_sound(checkpoint):
    """The first seed that did not fail; a run without one is not saved."""
    sound = [seed for seed, entry in checkpoint['seeds'].items() if 'failed' not in entry]
    return sound[0]


def failures(checkpoint):
    """A line about each seed that failed."""
    return [entry['failed'] for entry in checkpoint['seeds'].values() if 'failed' in entry]


def finished(cfg):
    """(checkpoint, {seed: {length: scores}}) of a run that has ended, or None twice."""
    path = os.path.join(cfg.out_dir, 'ckpt.pt')
    table = os.path.join(cfg.out_dir, 'lengths.json')
    if not (os.path.exists(table) and os.path.exists(path)):
        return None, None
    state, scores = read(path, type(cfg)), read_lengths(table)
    check_same(cfg, state['config'], path)
    sound = [seed for seed in cfg.seeds if 'failed' not in state['seeds'][seed]]
    ended, wanted = state['step'] == cfg.max_steps, set(cfg.eval_lengths)
    for seed in sound:
        there = scores.get(seed, {}).keys()
        # other lengths of a corpus are other text
        ended &= there == wanted if cfg.the_task.corpus else there >= wanted
    if not ended:
        return None, None
    return state, {seed: {n: scores[seed][n] for n in cfg.eval_lengths} for seed in sound}


# --------------------------------------------------------------------------------------------------
# a run in progress

class Diverged(UserError):
    """The loss or a weight is no longer finite."""


class Run:
    """The checkpoint and the log of a run while it trains."""
    def __init__(self, cfg, checkpoint):
        self.cfg, self.checkpoint = cfg, checkpoint
        if not checkpoint['step']:
            checkpoint['seeds'] = {seed: {'evals': []} for seed in cfg.seeds}
        self.entries = checkpoint['seeds']
        self.alive = [seed for seed in cfg.seeds if 'failed' not in self.entries[seed]]
        saved = checkpoint.get('losses', torch.empty(0)).tolist()
        self.recent = [dict(zip(cfg.seeds, row)) for row in saved]     # since the log's last line
        self.log = open(os.path.join(cfg.out_dir, 'log.jsonl'), 'a', buffering=1)

    def drop(self, step, what, finite):
        """Drop the seeds of which finite[seed] is False; Diverged if none is left."""
        for seed in [seed for seed in self.alive if not finite[seed]]:
            self.alive.remove(seed)
            entry = self.entries[seed]
            kept = ', before its first checkpoint'
            if 'step' in entry:
                kept = f'; its checkpoint of step {entry["step"]} is kept'
            entry['failed'] = f'seed {seed}: {what} became NaN or infinite at step {step}{kept}'
            if not self.alive:
                fix = 'A lower --lr or a longer --warmup_steps may help'
                raise Diverged(f'{entry["failed"]}. {fix}')
            tqdm.write(entry['failed'])

    def add_losses(self, step, rows):
        """Take in the losses [S] of the last steps up to `step`; drop seeds that are not finite."""
        losses = [dict(zip(self.cfg.seeds, row)) for row in rows]
        for number, loss in enumerate(losses, step - len(losses) + 1):
            self.drop(number, 'the loss', {seed: math.isfinite(x) for seed, x in loss.items()})
        self.recent += losses

    def log_losses(self, step, lr, steps_per_s):
        """A line for each seed: its mean loss since the last line.

        Returns the last step's loss, averaged over seeds.
        """
        for seed in self.alive:
            loss = sum(losses[seed] for losses in self.recent) / len(self.recent)
            point = dict(step=step, seed=seed, loss=loss, lr=lr, steps_per_s=round(steps_per_s, 2))
            self.log.write(json.dumps(point) + '\n')
        last, self.recent = self.recent[-1], []
        return sum(last[seed] for seed in self.alive) / len(self.alive)

    def log_scores(self, step, scores):
        """A line for each seed: its {length: scores}, which go into the checkpoint as well."""
        for seed in self.alive:
            self.entries[seed]['evals'].append({'step': step, 'lengths': scores[seed]})
            self.log.write(json.dumps(dict(step=step, seed=seed, eval=scores[seed])) + '\n')

    def save(self, step, state):
        """Write ckpt.pt, given seeds.Group.state(). A failed seed keeps its last model."""
        self.checkpoint['step'] = step
        models = state.pop('models')
        for seed in self.alive:
            self.entries[seed].update(step=step, model=models[seed])
        rows = [list(losses.values()) for losses in self.recent]
        losses = torch.tensor(rows, dtype=torch.float64).view(-1, len(self.cfg.seeds))
        self.checkpoint.update(state, losses=losses)
        buffer = io.BytesIO()
        torch.save(self.checkpoint, buffer)
        write(os.path.join(self.cfg.out_dir, 'ckpt.pt'), buffer.getvalue())


def begin(cfg, checkpoint):
    """Prepare a run's folder: remove what is newer than the checkpoint, or belongs to a run that
    this one replaces."""
    if cfg.results:
        append(cfg.results, '')                            # fails now rather than after training
    make_folder(cfg.out_dir)
    old = ['lengths.json']
    if not checkpoint['step']:
        there = os.listdir(cfg.out_dir)
        old += ['ckpt.pt', 'eval.json', 'lengths.png', 'report.md']
        old += [name for name in there if name.startswith('probe_')]
        if 'ckpt.pt' in there:
            print(f'replaces the run in {cfg.out_dir}')
    for name in old:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(cfg.out_dir, name))
    write(os.path.join(cfg.out_dir, 'config.json'), json.dumps(checkpoint['config'], indent=1))
    truncate_log(os.path.join(cfg.out_dir, 'log.jsonl'), checkpoint['step'])


def truncate_log(path, step):
    """Drop the lines of a log after a step: a resumed run writes them again."""
    lines = []
    if step and os.path.exists(path):
        with open(path) as f:
            for line in f:
                with contextlib.suppress(ValueError):      # a line cut off by a kill
                    if json.loads(line)['step'] <= step:
                        lines.append(line)
    write(path, ''.join(lines))
