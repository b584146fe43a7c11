"""What every probe starts from: a trace of a forward pass, a way to draw problems, three pictures.

A probe is a function NAME(model, task, cfg, ...) -> (rows, summary, figure). rows: dictionaries, a
line of the table each. summary: a dictionary. figure: a Figure of panels. Its further arguments are
flags of the command line. A probe changes nothing in the model.
"""
import contextlib
import functools
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

import train
from engine.config import UserError
from engine.report import COLOURS, style_of
from probes import by_hand

QUERY, KEY = COLOURS[:2]    # of query and key, in every figure


# --------------------------------------------------------------------------------------------------
# inside a forward pass

class Layer:
    """What one layer of a forward pass saw and made.

    stream, after [B, T, C]: the residual stream before and behind it; x [B, T, C]: the input of
    attention, after the norm; pos, state: its other inputs; q, k, v [B, H, T, D] before the
    encoding; y [B, H, T, out_dim]: what each head puts out; out [B, T, C]: attention's output,
    after the projection; logits, weights [B, H, T, T], computed when they are asked for.
    """
    def __init__(self, attn):
        self.attn = attn
        self.enc = attn.pe

    @property
    @torch.no_grad()
    def v(self):
        return project(self.attn, self.x)[2]

    @functools.cached_property
    @torch.no_grad()
    def logits(self):
        return self.enc.logits(self.q, self.k, self.pos, self.state, self.x)

    @property
    def weights(self):
        return self.enc.weigh(self.logits)

    def begin(self, attn, inputs):
        """A hook before attention, where the logits of an earlier forward pass are dropped."""
        self.__dict__.pop('logits', None)
        self.x, self.pos, self.state = inputs

    def keep(self, output, *inputs):
        """A hook that stores a module's output and inputs under these names."""
        def hook(module, args, result):
            self.__dict__.update(zip(inputs, args), **{output: result})
        return hook


def project(attn, x):
    """Queries, keys and values [B, H, T, D] of x [B, T, C]."""
    return [z.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for z in attn.project(x)]


@contextlib.contextmanager
def hooked(*hooks):
    """Forward hooks, pairs (module, hook), on these modules within."""
    with contextlib.ExitStack() as handles:
        for module, hook in hooks:
            handles.enter_context(module.register_forward_hook(hook))
        yield


@contextlib.contextmanager
def recording(model, change=None):
    """A list of Layer that every forward pass within fills.

    change(i, layer): logits [B, H, T, T] with which layer i attends instead of its own, None: its
    own. With a change `layer.logits` is what attention used, with gradients.
    """
    layers = [Layer(block.attn) for block in model.blocks]
    with contextlib.ExitStack() as stack:
        for i, (block, layer) in enumerate(zip(model.blocks, layers)):
            def replace(module, _, logits, i=i, layer=layer):
                layer.logits = logits
                return change(i, layer)

            attn = layer.attn
            stack.enter_context(attn.register_forward_pre_hook(layer.begin))
            stack.enter_context(hooked(
                (attn.tap_q, layer.keep('q')), (attn.tap_k, layer.keep('k')),
                (attn.tap_head_out, layer.keep('y')), (attn, layer.keep('out')),
                (block, layer.keep('after', 'stream')),
                *[(attn.tap_logits, replace)] * (change is not None)))
        yield layers


def check_index_positions(cfg):
    """UserError if the run has other positions than 0, 1, 2, ..., which a probe would move."""
    if cfg.positions != 'index':
        raise UserError('this probe moves the positions 0, 1, 2, ...: take a run with '
                        f'positions=index, not {cfg.positions}')


@torch.no_grad()
def trace(model, tokens, pos=None):
    """[Layer] of a forward pass over tokens [B, T] at pos [T], by default as cfg.positions says."""
    if pos is not None:
        check_index_positions(model.cfg)
    with recording(model) as layers:
        model(tokens, pos=pos)
    return layers


@torch.no_grad()
def answers_right(model, tokens, targets, pos=None):
    """Which of the answer's tokens [B, T] are predicted right, all before them given."""
    parts = tokens.split(max(1, 2 ** 15 // tokens.shape[1]))
    return torch.cat([model(x, pos=pos)[0].argmax(dim=-1) for x in parts]) == targets


# --------------------------------------------------------------------------------------------------
# runs and problems

def load(run, seed=None):
    """(model, cfg) of a run, or of by_hand:TASK; cfg.seeds: the one seed, cfg.out_dir: the run."""
    if run.startswith('by_hand:'):
        if seed is not None:
            raise UserError(f'--seed={seed} with {run}: one model only, its weights set by hand')
        return by_hand.iteration_head(run.partition(':')[2])
    return train.load(run, seed)


def name_of(cfg):
    """What a model is called."""
    return by_hand.NAME if cfg.out_dir.startswith(by_hand.OUT_DIR) else cfg.pe


def titled(cfg):
    """What a figure is of."""
    return f'{cfg.task} with {name_of(cfg)}'


def trained_to(cfg, length):
    """What a figure says of the longest trained length: weights set by hand were not trained."""
    return 'runs are ' * (name_of(cfg) == by_hand.NAME) + f'trained to {length}'


def axis(label, cfg, mark):
    """The label of an axis with a red line at `mark`, where training ended, if there is one."""
    return label if mark is None else f'{label}; {trained_to(cfg, mark)} (red line)'


def problems(task, lengths, n, split='test'):
    """{length: (tokens, targets)}, up to n held-out problems of each."""
    missing = sorted(set(lengths) - set(task.existing(lengths, None)))
    if missing:
        raise UserError(f'the task has no problems of length {missing[0]}')
    found = task.held_out(split, n, lengths, lambda length: train.generator('cpu', split, length))
    return {length: (tokens[:n], targets[:n]) for length, (tokens, targets) in found.items()}


def batch(task, lengths, length, n):
    """(length, tokens, targets [n, T]) of one length, held out. length 0: the longest of `lengths`,
    of a corpus at most 512 tokens."""
    length = length or (min(512, max(lengths)) if task.corpus else max(lengths))
    if task.corpus and not 8 <= length <= 2 ** 13:
        raise UserError(f'--length={length}: this probe makes maps of length x length, for lengths '
                        'from 8 to 8,192')
    tokens, targets = problems(task, [length], n)[length]
    if not 2 <= tokens.shape[1] <= 2 ** 13:
        raise UserError(f'--length={length} has {tokens.shape[1]} tokens: this probe wants 2 to '
                        '8,192')
    return length, tokens, targets


def check_causal(cfg):
    """UserError for a run without a causal mask."""
    if not cfg.causal:
        raise UserError('this probe wants a causal mask: train with --causal=True')


def check_alike(cfg):
    """UserError for a run whose layers have different encodings."""
    if cfg.nope_every:
        raise UserError('this probe compares layers with the same encoding: train with '
                        '--nope_every=0')


def unpadded(row):
    """The tokens [T] of one problem without the padding at its end."""
    return row[:row.nonzero().max() + 1]


def sequences(task, lengths, length, n):
    """The tokens of batch() row by row, each [1, T] without its padding."""
    return [unpadded(row)[None] for row in batch(task, lengths, length, n)[1]]


def fewer(cfg, *tensors, limit=2 ** 26):
    """As many of the problems (tokens [n, T], ...) as all their attention maps together have at
    most `limit` numbers, at least one."""
    n = max(1, limit // (cfg.n_layer * cfg.heads * tensors[0].shape[1] ** 2))
    return [x[:n] for x in tensors]


# --------------------------------------------------------------------------------------------------
# numbers

def number(x, digits=4):
    """A JSON number with so many decimals; None for nan and infinity."""
    return round(float(x), digits) if np.isfinite(float(x)) else None


def short(row):
    """The floats of a row, to four significant digits."""
    return {key: float(f'{x:.4g}') if type(x) is float else x for key, x in row.items()}


def numbers(text, flag, example, kind=int):
    """The numbers of a comma list."""
    try:
        return [kind(x) for x in text.split(',')]
    except ValueError:
        what = 'whole numbers' if kind is int else 'numbers'
        raise UserError(f'--{flag}={text}: {what}, as in {example}') from None


def correlation(x, y):
    """Pearson's r along the last dimension; nan where x or y is constant."""
    x = x.double() - x.double().mean(dim=-1, keepdim=True)
    y = y.double() - y.double().mean(dim=-1, keepdim=True)
    norms = (x.square().sum(dim=-1) * y.square().sum(dim=-1)).sqrt()
    return torch.where(norms > 1e-12 * x.shape[-1], (x * y).sum(dim=-1) / norms, torch.nan)


def head_rows(columns):
    """Rows from {name: [layers, heads]}: one for each head; of more than 60, the mean of each
    layer."""
    many = next(iter(columns.values())).numel() > 60
    if many:
        columns = {name: x.nanmean(dim=1, keepdim=True) for name, x in columns.items()}
    rows = []
    for i, h in np.ndindex(*next(iter(columns.values())).shape):
        at = dict(layer=i + 1) if many else dict(layer=i + 1, head=h + 1)
        rows.append(at | {name: number(x[i, h]) for name, x in columns.items()})
    return rows


# --------------------------------------------------------------------------------------------------
# pictures

@dataclass
class Curves:
    """Lines over one axis. lines: [(label, x, y, look)], look: plot()'s further arguments; a label
    that names an encoding has its colour. mark: where a red line stands. settings: for ax.set()."""
    title: str
    xlabel: str
    ylabel: str
    lines: list
    mark: float = None
    settings: dict = field(default_factory=dict)

    def draw(self, fig, ax):
        for i, (label, x, y, look) in enumerate(self.lines):
            plain = dict(color=COLOURS[i % len(COLOURS)], ls='-')
            ax.plot(x, y, label=label or None, **(style_of(label) or plain) | look)
        if self.mark is not None:
            ax.axvline(self.mark, color='crimson', lw=1)
        ax.set(title=self.title, xlabel=self.xlabel, ylabel=self.ylabel, **self.settings)


@dataclass
class Map:
    """values [rows, columns], nan where there is none; areas of more than 300 entries a side are
    averaged. words: the tokens along both axes. ends: the values of the first and the last colour,
    None: the 0.5 and 99.5 % quantiles. mark: where red lines stand. points: [(x, y)] of red dots.
    extent: of the axes, as imshow() takes it."""
    title: str
    xlabel: str
    ylabel: str
    values: torch.Tensor
    label: str
    words: list = None
    ends: tuple = None
    mark: float = None
    points: list = ()
    extent: tuple = None
    settings: dict = field(default_factory=dict)

    def draw(self, fig, ax):
        rows, columns = self.values.shape
        ends = self.ends or np.nanquantile(self.values, (0.005, 0.995))
        extent = self.extent or (-0.5, columns - 0.5, rows - 0.5, -0.5)
        image = ax.imshow(averaged(self.values).numpy(), vmin=ends[0], vmax=ends[1], extent=extent,
                          cmap='viridis', interpolation='nearest', aspect='auto')
        if self.words:
            label_tokens(ax.xaxis, self.words)
            label_tokens(ax.yaxis, self.words)
        if self.mark is not None:
            ax.axvline(self.mark, color='crimson', lw=0.8)
            ax.axhline(self.mark, color='crimson', lw=0.8)
        for x, y in self.points:
            ax.plot(x, y, '.', color='crimson', ms=3)
        ax.set(title=self.title, xlabel=self.xlabel, ylabel=self.ylabel, **self.settings)
        fig.colorbar(image, ax=ax, label=self.label)


@dataclass
class Heads:
    """values [layers, heads] as colours."""
    title: str
    values: torch.Tensor
    label: str

    def draw(self, fig, ax):
        layers, heads = self.values.shape
        known = self.values[~self.values.isnan()].tolist() or [0.0]
        ends = min(*known, max(known) - 0.01), max(known)    # nearly equal values look alike
        ticks = dict(xticks=range(1, heads + 1, 1 + heads // 12),
                     yticks=range(1, layers + 1, 1 + layers // 12))
        Map(self.title, 'head', 'layer', self.values, self.label, ends=ends, settings=ticks,
            extent=(0.5, heads + 0.5, layers + 0.5, 0.5)).draw(fig, ax)


def averaged(values, most=300):
    """values [rows, columns] with sides of at most `most`, each the mean of an area, nan aside."""
    size = [min(side, most) for side in values.shape]
    known = F.adaptive_avg_pool2d((~values.isnan()).double()[None], size)[0]
    total = F.adaptive_avg_pool2d(values.double().nan_to_num(0.0)[None], size)[0]
    return total / torch.where(known > 0, known, torch.nan)


def signs(words):
    """{place: word} of the words that are no digits, such as "="; none if there are many."""
    found = {i: word for i, word in enumerate(words) if not word.isdecimal()}
    return found if len(found) < 6 else {}


def label_tokens(axis, words):
    """Write tokens along an axis of a panel; of more than 40 only signs, or positions."""
    marks = dict(enumerate(words)) if len(words) <= 40 else signs(words)
    if marks:
        axis.set_ticks(list(marks), marks.values(), fontsize=6)
        if axis.axis_name == 'x' and max(map(len, marks.values())) > 1:
            axis.set_tick_params(labelrotation=90)


@dataclass
class Figure:
    """Panels, at most six, three in a row."""
    title: str
    panels: list

    def draw(self, plt):
        """The figure; one legend below it where all curves have the same lines, else one below
        each panel of curves."""
        across = 2 if len(self.panels) == 4 else min(3, len(self.panels))
        down = -(-len(self.panels) // across)
        fig = plt.figure(figsize=(4.6 * across + 0.4, 4.1 * down + 0.4), layout='constrained')
        for i, panel in enumerate(self.panels, 1):
            panel.draw(fig, fig.add_subplot(down, across, i))
        labelled = [ax for ax in fig.axes if ax.get_legend_handles_labels()[1]]
        if len({str(ax.get_legend_handles_labels()[1]) for ax in labelled}) == 1 < len(labelled):
            fig.legend(*labelled[0].get_legend_handles_labels(), loc='outside lower center',
                       ncols=3, fontsize=8)
            labelled = []
        for ax in labelled:
            ax.legend(loc='upper center', bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7)
        fig.suptitle(self.title)
        return fig
