"""Every task, one small class each: generated problems, SCAN, and readers of files.

    python tasks.py                                         list the tasks
    python tasks.py parity 5                                print examples of a task and length
    python tasks.py jsb 64 --data=Jsb16thSeparated.json     the same for a task that reads files

A task has `vocab`, the list of its token strings, '<pad>' first; `end`, the index of the token that
ends an answer, or None; `sample(n, length, generator) -> (tokens, targets)`; and `decode(row)`,
which returns the text of a row of tokens. tokens [n, T] int64 are whole sequences, problem and
answer, on the generator's device. targets[:, t] are the next tokens, tokens[:, t + 1], or -100 at
positions that the loss ignores. To add a task, write a subclass of Task and register an instance
in TASKS.
"""
import argparse
import contextlib
import copy
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import signal
import string
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from pe import UserError, check_name, need

PAD, BOS, EOI, EOS = range(4)  # the same indices in every task that has these tokens
PARTS = ('train', 'val', 'test')


class Task:
    """Base of all tasks. A subclass defines vocab, and problems(n, length, draw) -> (tokens,
    targets); draw is a Draw, from which all random numbers come."""
    name = 'the task'      # the name given to make(), with its options
    vocab = ()             # the texts of the tokens, '<pad>' first
    separator = ' '        # the string between two tokens in a text
    end = None             # the index of the token that ends an answer, or None
    min_length = 1
    max_length = math.inf
    corpus = False         # True: all tokens but the first are predicted, scored by the loss
    fixed = False          # True: the training set is fixed, not generated
    needs = ''             # what --data must point to, for a task that reads files
    data = ''              # the path given by --data
    own_vocab = False      # True: the vocabulary is read from the data

    def sample(self, n, length, generator=None):
        """Return (tokens, targets) [n, T] of n problems. Raise UserError if the length has none, or
        if problems() breaks a rule of check()."""
        known = f'{self.min_length} to {self.max_length}'.replace('to inf', 'and more')
        need(self.min_length <= length <= self.max_length, f'{self.name} has problems of lengths '
             f'{known}, not {length} (options train_lengths and eval_lengths)')
        draw = Draw(generator)                  # None: the default generator
        problems = self.problems(n, length, draw)
        check(self, problems, n, draw.device)
        return problems

    def problems(self, n, length, draw):
        raise UserError(f'{self.name}: define problems(n, length, draw) -> (tokens, targets)')

    def pool(self, n, length, generator):
        """Return the training problems of a length for one epoch: n new ones, or all fixed ones."""
        return self.sample(n, length, generator)

    def held_out(self, split, n, lengths, generator):
        """Return {length: (tokens, targets)} of split eval or test, at most n problems per length.
        generator(length) returns the random generator for a length."""
        return {length: self.sample(n, length, generator(length)) for length in lengths}

    def existing(self, lengths, part):
        """Return the lengths of which `part` (None: any part) has a problem."""
        return lengths

    def count(self, lengths):
        """Return the number of training problems of these lengths, or None if unlimited."""

    def width(self, lengths):
        """Return the number of tokens in the longest sequence; it depends on the length alone.
        Raise UserError if problems differ although the generator is the same."""
        widths = []
        for n in {min(lengths), max(lengths)}:  # one of these has the longest sequences
            tokens, again = (self.sample(8, n, torch.Generator())[0] for _ in range(2))
            need(torch.equal(tokens, again), f'{self.name}: problems() must take all its random '
                 'numbers from draw, so that a seed gives the same problems again')
            widths.append(tokens.shape[1])
        return max(widths)

    def decode(self, row):
        """Return the text of a row of token indices, without padding."""
        return self.separator.join(self.vocab[i] for i in row.tolist() if i != PAD)

    def encode(self, text):
        """Return the token indices [T] of a text. Raise UserError if a word is unknown."""
        words = text.split() if self.separator else list(text)  # '': a token is a character
        index = {word: i for i, word in enumerate(self.vocab) if i != PAD}
        unknown = ' '.join(sorted({*words} - index.keys()))
        need(not unknown, f'{unknown!r} is not in the vocabulary of {self.name}, which begins '
             f'with {" ".join(self.vocab[1:33])!r}')
        return torch.tensor([index[word] for word in words], dtype=torch.int64)


def check(task, problems, n, device):
    """Raise UserError, which names the task and the rule, unless its attributes and the n problems
    that problems() returned are as the top of this file says."""
    def rule(condition, says):
        need(condition, f'{task.name}: {says}')

    words = task.vocab if isinstance(task.vocab, (list, tuple)) else []
    V = len({word for word in words if isinstance(word, str)})
    rule(words and V == len(words) and words[0] == '<pad>',
         "vocab must be a list of different strings, the first of them '<pad>'")
    rule(task.end is None or task.end in range(1, V),
         f'end must be None or the index of a token in vocab, got {task.end!r}')
    rule(isinstance(problems, (tuple, list)) and [*map(torch.is_tensor, problems)] == [True, True],
         'problems() must return two tensors, (tokens, targets), with rows padded to one width')
    tokens, targets = problems
    found = [f'{x.dtype} {[*x.shape]} on {x.device.type}' for x in problems]
    right = f'{torch.int64} {[n, *tokens.shape[-1:]]} on {device.type}'
    rule(tokens.numel() and found == [right, right],
         f'tokens and targets [n={n}, T] must be {right}; got {found[0]} and {found[1]}')
    least, most = (x.item() for x in tokens.aminmax())
    rule(0 <= least and most < V,
         f'tokens must be 0 to {V - 1}, the indices of vocab; got {least} to {most}')
    after = F.pad(tokens[:, 1:], (0, 1), value=PAD)         # [n, T], the next tokens
    rule(not ((tokens == PAD) & (after != PAD)).any(),
         'token 0 is padding, which may only follow all other tokens of a row')
    rule(((targets == -100) | (targets == after) & (after != PAD)).all(), 'targets[:, t] must be '
         'the next token, tokens[:, t + 1], or -100 (no loss), as at the end and before padding')


class Draw:
    """Random numbers from one generator, on its device."""
    def __init__(self, generator):
        self.g = generator
        self.device = generator.device if generator else torch.device('cpu')

    def integers(self, high, *shape):
        """Integers uniform on 0..high-1; high: an int, or a tensor that broadcasts to shape."""
        if isinstance(high, int):
            return torch.randint(high, shape, generator=self.g, device=self.device)
        u = torch.rand(shape, generator=self.g, device=self.device, dtype=torch.float64)
        return torch.minimum((u * high).long(), high - 1)  # u * high can round up to high

    def permutation(self, n, size):
        """n random permutations of 0..size-1, [n, size]."""
        return torch.rand(n, size, generator=self.g, device=self.device).argsort(dim=1)


def supervise(tokens, start):
    """Return targets [n, T]: the next tokens, where their index is at least `start` (int or [n, 1])
    and they are not padding, and -100 elsewhere."""
    targets = tokens.roll(-1, dims=1)   # targets[:, t] = tokens[:, t + 1]
    t = torch.arange(tokens.shape[1], device=tokens.device)
    ignored = (t + 1 < start) | (t + 1 == len(t)) | (targets == PAD)    # no token follows the last
    return targets.masked_fill(ignored, -100)


def compose(prompt, answer):
    """Return (tokens, targets) [n, T] of prompts with answers, which are supervised. Both are lists
    of tokens: ints, the same in all rows, or tensors [n, k]. Padding moves to the end of a row."""
    shapes = [[*part.shape] for part in [*prompt, *answer] if torch.is_tensor(part)]
    need(all(len(x) == 2 for x in shapes), f'compose() takes ints and tensors [n, k], got {shapes}')
    one = next(filter(torch.is_tensor, prompt))[:, :1]      # [n, 1]
    columns = [part if torch.is_tensor(part) else torch.full_like(one, part)
               for part in [*prompt, *answer]]              # an int becomes a column
    tokens = torch.cat(columns, dim=1)                      # [n, T]
    start = (torch.cat(columns[:len(prompt)], dim=1) != PAD).sum(dim=1, keepdim=True)   # of answer
    padding_last = (tokens == PAD).byte().argsort(dim=1, stable=True)   # keeps the others' order
    tokens = tokens.gather(1, padding_last)
    return tokens, supervise(tokens, start)


# ---- ViPE's tasks. Its paper names count, reverse, mode and sort (Exp. 6) but does not define them

class Iterative(Task):
    """BoS x_1..x_L EoI s_1..s_m EoS (ViPE section 2): begin of sequence, input, end of input, m
    states, end of sequence. `length` is L. The states and EoS are supervised. Option `steps`:
    parity:steps=0 keeps only the last state (A.1: no chain of thought). A subclass defines the
    symbols, and states(x) for inputs x uniform on the symbols; or inputs_and_states().
    >>> examples(5, 'copy parity polynomial reverse count mode sort')
    copy                BoS 0 1 1 0 1 EoI 0 1 1 0 1 EoS
    parity              BoS 0 1 1 0 1 EoI 0 1 0 0 1 EoS
    polynomial          BoS 4 4 3 0 3 EoI 4 2 2 1 4 EoS
    reverse             BoS 4 9 3 0 3 EoI 3 0 3 9 4 EoS
    count               BoS 80 84 EoI 80 81 82 83 84 EoS
    mode                BoS e j d a d EoI d EoS
    sort                BoS 83 94 12 35 43 EoI 12 35 43 83 94 EoS
    """
    end = EOS
    symbols = range(2)

    def __init__(self, steps=True):
        self.steps = steps
        self.vocab = ['<pad>', 'BoS', 'EoI', 'EoS', *map(str, self.symbols)]

    def problems(self, n, length, draw):
        x, s = self.inputs_and_states(n, length, draw)  # [n, L], [n, m], indices of symbols
        need(s.min() >= 0, f'{self.name}: states must be 0 and more, got {s.min()}')
        s = s if self.steps else s[:, -1:]              # [n, 1] without steps
        return compose([BOS, x + 4, EOI], [s + 4, EOS])  # symbol 0 is token 4

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(len(self.symbols), n, length)
        return x, self.states(x)


class Copy(Iterative):
    """Binary copy, s_t = x_t (ViPE Table 3)."""
    def states(self, x):
        return x


class Parity(Iterative):
    """Running parity, s_1 = x_1, s_t = (s_(t-1) + x_t) mod 2 (ViPE Table 3)."""
    def states(self, x):
        return x.cumsum(dim=1) % 2  # the recurrence in closed form


class Polynomial(Iterative):
    """Polynomial iteration, s_1 = x_1, s_t = (s_(t-1) x_t + 1) mod 5 (ViPE Table 3)."""
    symbols = range(5)

    def states(self, x):
        step = itertools.accumulate(x.unbind(dim=1), lambda s, x_t: (s * x_t + 1) % 5)
        return torch.stack([*step], dim=1)


class Reverse(Iterative):
    """The input reversed, s_t = x_(L+1-t), digits 0-9."""
    symbols = range(10)

    def states(self, x):
        return x.flip(1)


class Count(Iterative):
    """Count from the first number to the second (Zhou et al. 2023). `length`: how many numbers.
    The start is uniform, so that short problems contain every number that long problems need."""
    max_length = 128
    symbols = range(128)

    def inputs_and_states(self, n, length, draw):
        start = draw.integers(self.max_length + 1 - length, n, 1)   # [n, 1]; s_L <= 127
        s = start + torch.arange(length, device=draw.device)    # [n, L]
        return s[:, [0, -1]], s                                 # [n, 2], [n, L]


class Mode(Iterative):
    """The most frequent of the letters a-j, which is always unique (Zhou et al. 2023).
    Letters are uniform. If several tie, one occurrence of one is replaced by another."""
    symbols = 'abcdefghij'

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(10, n, length)                        # [n, L]
        counts = (x[:, :, None] == torch.arange(10, device=x.device)).sum(dim=1)    # [n, 10]
        tied = counts == counts.amax(dim=1, keepdim=True)       # letters of the highest count
        # a random rank for each tied letter, -1 for the other letters
        priority = draw.permutation(n, 10).masked_fill(~tied, -1)
        mode, second = priority.topk(2, dim=1).indices.unbind(dim=1)    # [n], [n]
        first = (x == second[:, None]).int().argmax(dim=1)      # position of the first `second`
        row = torch.arange(n, device=x.device)
        x[row, first] = torch.where(tied.sum(dim=1) > 1, mode, x[row, first])   # breaks the tie
        return x, mode[:, None]                                 # [n, L], [n, 1]


class Sort(Iterative):
    """Numbers 0-99, all different, in ascending order (Zhou et al. 2023)."""
    max_length = 100
    symbols = range(100)

    def inputs_and_states(self, n, length, draw):
        x = draw.permutation(n, 100)[:, :length]    # [n, L], all different
        return x, x.sort(dim=1).values


class IndirectIndexing(Task):
    """The letter at a given shift from a given letter (PoPE A.1). `length`: letters in the source.
    The source (20 to 40 letters in the paper) is drawn without replacement from A-Z, a-z; the shift
    is uniform on those in -15..+15 that stay inside the source. Only the last letter is supervised.
    >>> examples(20, 'indirect_indexing')
    indirect_indexing   MjrbCDsiSNgcktphwTOe,t,-3,g
    """
    separator = ''

    def __init__(self, letters=52, shift=15):
        need(1 <= letters <= 52 and shift < 100,
             f'letters must be 1 to 52 and shift 0 to 99, got {letters} and {shift}')
        self.max_length, self.max_shift = letters, shift
        alphabet = (string.ascii_uppercase + string.ascii_lowercase)[:letters]
        self.vocab = ['<pad>', ',', '+', '-', *string.digits, *alphabet]

    def problems(self, n, length, draw):
        comma, plus, minus, digit, letter = 1, 2, 3, 4, 14  # first index of each in the vocabulary
        source = draw.permutation(n, self.max_length)[:, :length] + letter  # [n, length]
        i = draw.integers(length, n, 1)                     # [n, 1], as all below
        low = (-i).clamp(min=-self.max_shift)               # so that 0 <= i + shift < length
        high = (length - 1 - i).clamp(max=self.max_shift)
        shift = low + draw.integers(high - low + 1, n, 1)
        sign, size = torch.where(shift < 0, minus, plus), shift.abs()
        tens = torch.where(size < 10, PAD, size // 10 + digit)  # padding: no leading zero
        prompt = [source, comma, source.gather(1, i), comma, sign, tens, size % 10 + digit, comma]
        return compose(prompt, [source.gather(1, i + shift)])   # the answer is one letter


# ---- the Toeplitz study's tasks: a vocabulary of 574 tokens, classes included --------------------

class Classification(Task):
    """x_1..x_L ? class: only the class is supervised. `length` is L, 128 in the paper. Words are
    uniform background; a subclass replaces some by triggers: place(words, draw) -> (words, class).
    >>> examples(9, 'distance distance_sum trigger_count')
    distance            w410 w225 w167 trigger0 w495 w299 w81 trigger1 w247 ? class1
    distance_sum        w468 trigger3 w237 w160 w51 w67 trigger0 trigger2 trigger1 ? class1
    trigger_count       trigger13 w119 w53 w120 trigger14 trigger4 w107 w103 w17 ? class3
    """
    query, first_class, first_trigger = 1, 2, 34    # first index of each kind in the vocabulary
    classes, triggers = 32, 0                       # the number of each kind

    def __init__(self):
        self.first_word = self.first_trigger + self.triggers
        counts = {'class': self.classes, 'trigger': self.triggers, 'w': 574 - self.first_word}
        words = [f'{word}{i}' for word, count in counts.items() for i in range(count)]
        self.vocab = ['<pad>', '?', *words]

    def problems(self, n, length, draw):
        words = draw.integers(574 - self.first_word, n, length) + self.first_word
        words, label = self.place(words, draw)      # [n, L], [n, 1]
        return compose([words, self.query], [label + self.first_class])


class Distance(Classification):
    """Task 1: the distance between two triggers (the Toeplitz study, section 4.1).
    The triggers are at positions i and j; either may be first. class = 32 |i - j| // span, |i - j|
    is uniform on 1..min(length, span) - 1. span=16 maps distances 1..15 to the classes 2..30."""
    triggers = min_length = 2

    def __init__(self, span=128):
        super().__init__()
        need(span >= self.triggers, f'span must be at least {self.triggers}, got {span}')
        self.span = span

    def place(self, words, draw):
        n, length = words.shape
        pairs = self.triggers // 2  # 1; 2 in distance_sum
        places = torch.zeros(n, pairs, 2, dtype=torch.int64, device=draw.device)
        clash = torch.ones(n, dtype=torch.bool, device=draw.device)     # no row is drawn yet
        while clash.any():  # draw a row again while two of its triggers share a position
            d = 1 + draw.integers(min(length, self.span) - 1, n, pairs)     # distances
            i = draw.integers(length - d, n, pairs)             # position of each pair's first word
            drawn = torch.stack([i, i + d], dim=2)              # [n, pairs, 2]
            places = torch.where(clash[:, None, None], drawn, places)   # keeps valid rows
            clash = (places.flatten(1).sort(dim=1).values.diff(dim=1) == 0).any(dim=1)  # [n]
        first = draw.integers(2, n, pairs)  # 1: trigger 1 (or 3) comes before trigger 0 (or 2)
        trigger = torch.stack([first, 1 - first], dim=2)        # [n, pairs, 2]
        trigger += self.first_trigger + 2 * torch.arange(pairs, device=draw.device)[:, None]
        words.scatter_(1, places.flatten(1), trigger.flatten(1))
        total = places.diff(dim=2).sum(dim=1)                   # [n, 1], sum of the distances
        return words, total * self.classes // (pairs * self.span)   # [n, L], [n, 1] in 0..31


class DistanceSum(Distance):
    """The sum of two trigger distances (the Toeplitz study, appendix E): triggers 0, 1 and 2, 3.
    class = 32 (|i - j| + |k - l|) // (2 span). Each pair is drawn as in `distance`."""
    triggers = min_length = 4


class TriggerCount(Classification):
    """Task 2: the number of trigger tokens, of 20 kinds (the Toeplitz study, section 4.1).
    The class is the count, uniform on 0..min(length, most); trigger_count:most=16 sets `most`."""
    triggers = 20

    def __init__(self, most=31):
        super().__init__()
        need(1 <= most < self.classes, f'most must be 1 to {self.classes - 1}, got {most}')
        self.most = most

    def place(self, words, draw):
        n, length = words.shape
        count = draw.integers(min(length, self.most) + 1, n, 1)     # [n, 1], the class
        chosen = draw.permutation(n, length) < count    # [n, length], `count` positions of each row
        trigger = self.first_trigger + draw.integers(self.triggers, n, length)
        return torch.where(chosen, trigger, words), count   # [n, L], [n, 1]


# ---- PRISM's tasks (Tables 3 and 4), in characters -----------------------------------------------

CHARACTERS = ['<pad>', *'0123456789+=,→.x[]()*^-', *string.ascii_lowercase.replace('x', '')]
CHARACTERS += [f'<unused{i}>' for i in range(64 - len(CHARACTERS))]  # 64, as in the paper


class Characters(Task):
    """The text "prompt=answer." in characters; all after "=" is supervised. By default the prompt
    is a string x of `length` digits below `symbols`, and a subclass defines answer(x). It may
    instead define write(n, length, draw) -> (prompt, answer): lists of strings and of digits
    [n, k], with -1 for no digit.
    >>> examples(6, 'string_copy string_reverse bucket_sort odds_first stack')
    string_copy         493039=493039.
    string_reverse      ^493039=930394.
    bucket_sort         443034=033444.
    odds_first          493039=909433.
    stack               110112=1011200.
    >>> examples(3, 'dyn_str_cpy addition_cot multiplication_cot')
    dyn_str_cpy         047,4=47.
    addition_cot        33+497=3407,3912,0708→728.
    multiplication_cot  839x773=839x[7*(7+1)(7+0)(3+0)+7*(7+1)(3+0)+3*(3+1)].
    """
    vocab = CHARACTERS
    end = CHARACTERS.index('.')
    separator = ''
    symbols = 10

    def problems(self, n, length, draw):
        def tokens(part):       # digit 0 is token 1, and -1 becomes padding
            return [part + 1] if torch.is_tensor(part) else map(CHARACTERS.index, part)

        prompt, answer = ([token for part in parts for token in tokens(part)]
                          for parts in self.write(n, length, draw))
        return compose(prompt, answer)

    def write(self, n, length, draw):
        x = draw.integers(self.symbols, n, length)
        return [x, '='], [self.answer(x), '.']


class StringCopy(Characters):
    """Copy a string of digits."""
    def answer(self, x):
        return x


class StringReverse(Characters):
    """Reverse a string of digits, from its end to the digit after ^ (PRISM's Figure 15).
    Option: `start`; with start=0 the prompt has no ^, as in PRISM's Table 3."""
    def __init__(self, start=1):
        self.start = '^' * start

    def write(self, n, length, draw):
        x = draw.integers(self.symbols, n, length)
        return [self.start, x, '='], [x.flip(1), '.']


class BucketSort(Characters):
    """Digits 0 to 4 in ascending order, as in the suite of Delétang et al. (2023)."""
    symbols = 5

    def answer(self, x):
        return x.sort(dim=1).values


class OddsFirst(Characters):
    """Digits at odd positions (from 0), then at even ones. `length`: digits in the string."""
    def answer(self, x):
        return torch.cat([x[:, 1::2], x[:, ::2]], dim=1)


class Stack(Characters):
    """A stack of 0 and 1, bottom first, then actions: 2 pops unless empty, 3 pushes 0, 4 pushes 1.
    The answer is the final stack, top first, a 2, and zeros up to length + 1 digits. `length`: size
    of the initial stack, uniform on 1..length-1, plus the number of actions."""
    def write(self, n, length, draw):
        size = 1 + draw.integers(max(1, length - 1), n, 1)  # [n, 1]
        start, actions = draw.integers(2, n, length), 2 + draw.integers(3, n, length)
        x = torch.where(torch.arange(length, device=draw.device) < size, start, actions)
        stack = x.new_zeros(n, length + 1)      # bottom first; the first `depth` are in use
        depth = x.new_zeros(n, 1)
        for action in x.split(1, dim=1):        # [n, 1]; pushes the initial 0s and 1s as well
            stack.scatter_(1, depth, action % 3)    # 0 and 3 write 0, 1 and 4 write 1
            depth = torch.where(action == 2, depth - 1, depth + 1).clamp(min=0)
        i = depth - 1 - torch.arange(length + 1, device=draw.device)    # [n, length + 1], top first
        bits = stack.gather(1, i.clamp(min=0))                          # unused where i < 0
        return [x, '='], [torch.where(i >= 0, bits, torch.where(i == -1, 2, 0)), '.']


class DynStrCpy(Characters):
    """The suffix of a string that begins at a given digit, which occurs once in the string."""
    def write(self, n, length, draw):
        d = draw.integers(10, n, 1)
        x = draw.integers(9, n, length)
        x = x + (x >= d)    # any digit but d
        x = x.scatter(1, draw.integers(length, n, 1), d)            # at a uniform position
        suffix = torch.where((x == d).cumsum(dim=1) > 0, x, -1)     # no digit before d
        return [x, ',', d, '='], [suffix, '.']


class AdditionCoT(Characters):
    """Add two numbers, both written lowest digit first, with a chain of thought.
    The chain: digit of a, digit of b, carry, digit of the sum, for each column. `length`: digits of
    the longer number; those of the other are uniform on 1..length. No number has leading zeros."""
    def write(self, n, length, draw):
        long = number(n, length, draw, length)  # [n, L], lowest digit first
        short = number(n, length, draw, 1 + draw.integers(length, n, 1))    # -1: no digit
        swap = draw.integers(2, n, 1) == 1
        a, b = torch.where(swap, short, long), torch.where(swap, long, short)
        carry = torch.zeros_like(swap).long()
        steps, total = [], []
        for column in torch.stack([a, b]).clamp(min=0).split(1, dim=2):     # [2, n, 1]
            s = column.sum(dim=0) + carry       # [n, 1]
            carry = s // 10
            total.append(s % 10)
            steps += [*column, carry, s % 10, ',']
        total.append(torch.where(carry == 1, 1, -1))    # nothing instead of a leading zero
        return [a, '+', b, '='], [*steps[:-1], '→', *total, '.']


class MultiplicationCoT(Characters):
    """Long multiplication by the distributive law, without the product, as in the paper's example.
    Each digit c of b, highest first, gives c*(c+1), followed by (d+0) for each lower digit d.
    `length`: digits of b; those of a are uniform on 1..length. No number has leading zeros."""
    def write(self, n, length, draw):
        a = number(n, length, draw, 1 + draw.integers(length, n, 1)).flip(1)
        b = number(n, length, draw, length).flip(1)     # highest digit first
        digits_of_b = b.split(1, dim=1)                 # [n, 1] each
        terms = []
        for i, digit in enumerate(digits_of_b):
            terms += ['+', digit, '*(', digit, '+1)']
            for lower in digits_of_b[i + 1:]:
                terms += ['(', lower, '+0)']
        return [a, 'x', b, '='], [a, 'x[', *terms[1:], '].']    # without the first +


def number(n, length, draw, size):
    """Digits [n, length] of n numbers of `size` digits (int or [n, 1]), lowest first, then -1."""
    x = draw.integers(10, n, length)
    highest = 1 + draw.integers(9, n, length)   # 1 to 9, for the highest digit
    t = torch.arange(length, device=draw.device)
    x = torch.where((t == size - 1) & (size > 1), highest, x)   # no leading zeros, except for 0
    return torch.where(t >= size, -1, x)


# ---- recall, used to test encodings since 2023 ---------------------------------------------------

class FlipFlop(Task):
    """Recall the bit written last (Liu et al. 2023). w: write the bit, i: ignore it, r: read it.
    `length`: instructions, of which `ignore` percent are i. Only bits after r are supervised.
    >>> examples(5, 'flip_flop')
    flip_flop           w 1 i 0 i 0 r 1 r 1
    """
    vocab = ['<pad>', 'w', 'i', 'r', '0', '1']
    min_length = 2

    def __init__(self, ignore=80):
        need(ignore <= 100, f'flip_flop:ignore must be a percentage, got {ignore}')
        self.ignore = ignore

    def problems(self, n, length, draw):
        write, ignore, read, zero = 1, 2, 3, 4      # indices in the vocabulary
        what = torch.where(draw.integers(2, n, length) == 1, write, read)   # [n, length]
        what[draw.integers(100, n, length) < self.ignore] = ignore
        what[:, 0], what[:, -1] = write, read       # every read follows a write
        bit = draw.integers(2, n, length)                       # a bit after i is a distractor
        t = torch.arange(length, device=draw.device)
        last_write = torch.where(what == write, t, 0).cummax(dim=1).values  # [n, length]
        bit = torch.where(what == read, bit.gather(1, last_write), bit)     # reads repeat a write
        tokens = torch.stack([what, bit + zero], dim=2).flatten(1)      # [n, 2 length]
        return tokens, torch.where(tokens == read, tokens.roll(-1, dims=1), -100)


class MQAR(Task):
    """Multi-query associative recall (Arora et al. 2023) of the values of some keys.
    Each pair of key and value occurs twice among pairs of noise; its second value is supervised.
    (In the paper the pairs come first; ours are anywhere, so that positions do not give them away.)
    `length`: pairs, noise included. Options: `keys`, their number; `words`, tokens of each kind.
    >>> examples(6, 'mqar:keys=2:words=9')
    mqar:keys=2:words=9 noise2 noise6 key3 value8 key3 value8 noise0 noise5 key2 value0 key2 value0
    """
    def __init__(self, keys=4, words=64):
        need(1 <= keys <= words, f'keys must be 1 to {words}, the number of words, got {keys}')
        self.keys, self.words = keys, words
        self.min_length = 2 * keys
        kinds = itertools.product(('key', 'value', 'noise'), range(words))
        self.vocab = ['<pad>', *(f'{kind}{i}' for kind, i in kinds)]

    def problems(self, n, length, draw):
        keys = draw.permutation(n, self.words)[:, :self.keys]       # all different
        values = draw.integers(self.words, n, self.keys) + self.words   # may repeat
        pairs = torch.stack([keys, values], dim=2) + 1              # [n, keys, 2]
        tokens = draw.integers(self.words, n, length, 2) + 2 * self.words + 1   # noise
        places = draw.permutation(n, length)[:, :2 * self.keys].view(n, self.keys, 2)
        first, again = places.sort(dim=2).values.unbind(dim=2)      # [n, keys] each
        asked = torch.zeros_like(tokens, dtype=torch.bool)          # [n, length, 2]
        for place in first, again:
            tokens.scatter_(1, place[..., None].expand(-1, -1, 2), pairs)
        asked[..., 1].scatter_(1, again, True)                      # the repeated values
        tokens, asked = tokens.flatten(1), asked.flatten(1)         # [n, 2 length]
        return tokens, torch.where(asked, tokens, -100).roll(-1, dims=1)


# ---- data sets of commands and answers in words --------------------------------------------------

class Pairs(Task):
    """A fixed data set. A subclass defines `texts`, [(part, length, text)]. The token marks[0] ends
    the command, and marks[1] ends the answer, which is supervised."""
    fixed = True
    end = EOS
    min_length = -math.inf  # find() raises for lengths without problems
    marks = ('EoI', 'EoS')  # the names of the tokens EOI and EOS

    @functools.cached_property
    def vocab(self):
        words = set(' '.join(text for _, _, text in self.texts).split())
        return ['<pad>', 'BoS', *self.marks, *sorted(words - {'BoS', *self.marks})]

    @functools.cached_property
    def rows(self):
        """{(part, length): (tokens, targets)}, both [n, T]."""
        rows = {}
        for part, length, text in self.texts:
            rows.setdefault((part, length), []).append(self.encode(text))           # [t]
        for key, group in rows.items():
            tokens = pad_sequence(group, batch_first=True, padding_value=PAD)       # [n, T]
            need((tokens == EOI).any(dim=1).all(),
                 f'{self.name}: every text must contain {self.marks[0]}, which ends its command')
            mark = (tokens == EOI).long().argmax(dim=1, keepdim=True)               # [n, 1]
            rows[key] = tokens, supervise(tokens, mark + 1)     # the answer follows its mark
        return rows

    def find(self, length, *parts):
        """Return (tokens, targets) of a length from the first of these parts that has any."""
        found = [self.rows[part, length] for part in parts if (part, length) in self.rows]
        known = sorted({n for _, n in self.rows})
        need(found, f'{self.name} has problems of lengths {known}, not {length}')
        return found[0]

    def problems(self, n, length, draw):
        """Draw n training problems of a length, with replacement; if none, from val or test."""
        tokens, targets = self.find(length, *PARTS)
        i = draw.integers(len(tokens), n).cpu()     # [n]; the rows are on the CPU
        return [x[i].to(draw.device) for x in (tokens, targets)]

    def pool(self, n, length, generator):
        return [x.to(generator.device) for x in self.find(length, 'train')]

    def held_out(self, split, n, lengths, generator):
        """Validation (split='eval') or test problems; other parts supply missing lengths."""
        order = ('val', 'test', 'train') if split == 'eval' else ('test', 'val', 'train')
        sets = {}
        for length in lengths:
            tokens, targets = self.find(length, *order)
            i = torch.randperm(len(tokens), generator=generator(length))[:n]    # without repeats
            sets[length] = tokens[i], targets[i]
        return sets

    def existing(self, lengths, part):
        known = {n for p, n in self.rows if part in (p, None)}      # lengths
        return [n for n in lengths if n in known]

    def count(self, lengths):
        return sum(len(self.rows['train', n][0]) for n in self.existing(lengths, 'train'))

    def width(self, lengths):
        return max(tokens.shape[1] for (_, n), (tokens, _) in self.rows.items() if n in lengths)


@functools.cache
def scan():
    """Return {command: (plan, steps)}, all 20,910 commands of SCAN's grammar (Lake & Baroni 2018).
    plan: the command with twice and thrice written out. steps: [(clause, actions)], its clauses in
    the order of execution."""
    verbs = ['walk', 'look', 'run', 'jump']
    clauses = {verb: ['I_' + verb.upper()] for verb in verbs}       # {clause: its actions}
    for direction, verb in itertools.product(('left', 'right'), ('turn', *verbs)):
        turn, act = ['I_TURN_' + direction.upper()], clauses.get(verb, [])  # turn: nothing more
        clauses[f'{verb} {direction}'] = turn + act
        clauses[f'{verb} opposite {direction}'] = turn + turn + act
        clauses[f'{verb} around {direction}'] = (turn + act) * 4    # four quarter turns
    commands = {}
    for clause, actions in clauses.items():     # 34 clauses, 102 phrases
        for n, times in enumerate(('', ' twice', ' thrice'), 1):
            commands[clause + times] = ' + '.join([clause] * n), [(clause, actions)] * n
    phrases = list(commands.items())            # the commands of two phrases: 2 * 102 ** 2
    for (x, (plan_x, steps_x)), (y, (plan_y, steps_y)) in itertools.product(phrases, repeat=2):
        commands[f'{x} and {y}'] = f'{plan_x} and {plan_y}', steps_x + steps_y
        commands[f'{x} after {y}'] = f'{plan_x} after {plan_y}', steps_y + steps_x  # y first
    return commands


class SCAN(Pairs):
    """SCAN, a command and its actions (Lake & Baroni 2018). `length`: actions.
    scan trains on 1 to 22 actions (16,990 commands) and tests on 24 to 48 (3,920). scan_simple
    trains on a random 80 % (16,728) and tests on the rest; the published split is another draw.
    >>> examples(4, 'scan')
    scan                BoS look right and run left EoI I_TURN_RIGHT I_LOOK I_TURN_LEFT I_RUN EoS
    """
    def __init__(self, simple=False):
        self.simple = simple

    @functools.cached_property
    def texts(self):
        texts = []
        for command, (plan, steps) in scan().items():
            length = sum(len(actions) for _, actions in steps)
            part = 'train' if length <= 22 else 'test'  # the paper's length split
            texts.append((part, length, self.text(command, plan, steps)))
        if self.simple:
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
            texts = [('train' if place < 16728 else 'test', *texts[i][1:])     # 80 %
                     for place, i in enumerate(order)]
        return texts

    def text(self, command, plan, steps):
        return f'BoS {command} EoI {" ".join(act for _, actions in steps for act in actions)} EoS'


class SCANCoT(SCAN):
    """SCAN with a chain of thought (PRISM Table 4), split by length. `length`: actions in SCAN.
    The answer writes out twice and thrice, then lists each clause with its actions, as executed.
    >>> print(SCANCoT().text('jump and look twice', *scan()['jump and look twice']))
    jump and look twice = jump and look + look → jump : I_JUMP look : I_LOOK look : I_LOOK .
    """
    marks = ('=', '.')

    def text(self, command, plan, steps):
        steps = ' '.join(f'{clause} : {" ".join(actions)}' for clause, actions in steps)
        return f'{command} = {plan} → {steps} .'


def scan_pairs(split='length', part='train'):
    """Return [(command, actions)] of SCAN for a split (length, simple) and a part (train, test)."""
    return [tuple(text[4:-4].split(' EoI '))        # without BoS and EoS
            for name, _, text in SCAN(simple=split == 'simple').texts if name == part]


class CFQ(Pairs):
    """Compositional Freebase Questions (Keysers et al. 2020): a question and its SPARQL query.
    Entities are M0, M1, ... as in its authors' baselines. Option `split`: random_split, or another
    file in the folder `splits` of the data, such as mcd1 or query_complexity_split.
    `length`: words of the query. An example:
    BoS Did M0 ' s writer write M1 EoI SELECT count ( * ) WHERE { M0 film.x ?x0 . } EoS
    """
    own_vocab = True
    needs = 'the folder in cfq1.1.tar.gz (storage.googleapis.com/cfq_dataset)'

    def __init__(self, split='random_split'):
        self.split = split

    @staticmethod
    def text(entry):
        """Return (length, text) of an entry of dataset.json. Each punctuation mark of a question,
        and each part of count(*), becomes a word. Names lose the prefix ns:, and m. becomes m_."""
        punctuation = f'([{re.escape(string.punctuation)}])'
        question = re.sub(punctuation, r' \1 ', entry['questionPatternModEntities']).split()
        query = entry['sparqlPatternModEntities'].replace('count(*)', 'count ( * )')
        query = query.replace('\\n', ' ').split()   # \n as two characters, not a line end
        query = [re.sub(r'^m\.', 'm_', word.removeprefix('ns:')) for word in query]
        return len(query), f'BoS {" ".join(question)} EoI {" ".join(query)} EoS'

    @functools.cached_property
    def texts(self):
        folder = pathlib.Path(self.data)
        with reading(folder, self.needs):
            entries = json.loads((folder / 'dataset.json').read_bytes())
            split = json.loads((folder / f'splits/{self.split}.json').read_bytes())
            numbers = zip(PARTS, (split['trainIdxs'], split['devIdxs'], split['testIdxs']))
            return [(part, *self.text(entries[i])) for part, indices in numbers for i in indices]


@contextlib.contextmanager
def reading(path, needs):
    """Turn any error in the block that reads path into a UserError that says what is required."""
    try:
        yield
    except Exception as error:
        reason = ' '.join(f'{type(error).__name__} {error}'.split())
        raise UserError(f'cannot read {path}: {reason}; required: {needs}') from None


# ---- corpora: predict the next token in contexts of `length` tokens ------------------------------

PART_NAMES = {part: part for part in PARTS} | dict(valid='val', validation='val', dev='val')


class Corpus(Task):
    """Documents in three parts. A subclass defines documents(path), a list of the documents in a
    file: arrays of symbols, memory-mapped if large; token = symbol + first. The name of a file or
    folder says its part (PART_NAMES). If no name says val or test, documents are dealt to the parts
    at random, 90, 5 and 5 % of them. If there are fewer than 20, each document is cut instead."""
    corpus = True
    fixed = True
    min_length = 2
    endings = ''           # endings of the names of files that are read; '': any
    skip = ()              # folders that are not read
    first = 1              # the token of symbol 0
    stride = 1             # contexts begin at multiples of the stride

    def read(self):
        """Yield (part, document) of all files; part is None if no name says it."""
        for path in self.files():
            # names on the path below `data`, without endings; none if `data` is the file itself
            names = [pathlib.Path(x).stem.lower() for x in path.relative_to(self.data).parts]
            part = next((PART_NAMES[x] for x in names if x in PART_NAMES), None)
            with reading(path, self.needs):
                yield from [(part, document) for document in self.documents(path)]

    def files(self):
        """Return the path `data` if it is a file, else the paths of the files below that folder,
        with one of the endings, in a fixed order; hidden files and folders are left out."""
        files = [pathlib.Path(self.data)] if os.path.isfile(self.data) else []
        for folder, folders, names in os.walk(self.data):
            # os.walk visits only what is left in `folders`
            folders[:] = sorted(x for x in folders if x[0] != '.' and x not in self.skip)
            files += [pathlib.Path(folder, name) for name in sorted(names)
                      if name[0] != '.' and name.lower().endswith(self.endings)]
        need(files, f'{self.data} is missing or has no matching files; use {self.needs}')
        return files

    @functools.cached_property
    def parts(self):
        """{part: list of its documents}."""
        found = [(part, document) for part, document in self.read() if len(document) > 1]
        need(found, f'there is nothing to read in {self.data}; it must be {self.needs}')
        if {'val', 'test'} & {part for part, _ in found}:       # the rest is for training
            named = {p: [x for part, x in found if (part or 'train') == p] for p in PARTS}
            val, test = named['val'], named['test']
            return named | dict(val=val or test, test=test or val)  # if one is missing

        def cut(x):     # into 90, 5 and 5 %
            return np.split(x, [int(0.9 * len(x)), int(0.95 * len(x))])

        documents = [document for _, document in found]
        if len(documents) < 20:     # three pieces of each -> [pieces] of each part
            return dict(zip(PARTS, zip(*map(cut, documents))))
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).numpy()
        return {part: [documents[i] for i in numbers] for part, numbers in zip(PARTS, cut(order))}

    def of_part(self, part):
        """Return the documents of a part with at least two tokens. Raise UserError if none has."""
        documents = [document for document in self.parts[part] if len(document) > 1]
        need(documents, f'{self.data} has no text for {part}: rename a file or folder to {part}, '
                        'or add text')
        return documents

    def lay_out(self, pieces, length):
        """Return (tokens, targets) [len(pieces), length] of pieces of documents, padded right."""
        size = len(self.vocab) - self.first     # the number of symbols
        tokens = np.full((len(pieces), length), PAD, dtype=np.int64)    # [n, T]
        for row, piece in zip(tokens, pieces):
            symbols = np.asarray(piece, dtype=np.int64)     # [t]; uint16 could overflow below
            need(0 <= symbols.min() and symbols.max() < size, f'{self.data} contains symbols from '
                 f'{symbols.min()} to {symbols.max()}, outside the vocabulary of 0 to {size - 1}')
            row[:len(piece)] = symbols + self.first     # the rest of the row stays PAD
        tokens = torch.from_numpy(tokens)
        return tokens, supervise(tokens, 1)

    def problems(self, n, length, draw):
        """Draw training contexts: a document in proportion to its length, then a uniform start in
        it. A document shorter than `length` is taken whole."""
        documents = self.of_part('train')
        # a token drawn uniformly from all documents selects its document
        ends = np.cumsum([*map(len, documents)])
        tokens = draw.integers(int(ends[-1]), n).cpu().numpy()      # [n]
        chosen = [documents[i] for i in np.searchsorted(ends, tokens, side='right')]
        places = [max(0, len(document) - length) // self.stride + 1 for document in chosen]
        starts = draw.integers(torch.tensor(places, device=draw.device), n) * self.stride
        pieces = [document[i:i + length] for document, i in zip(chosen, starts.tolist())]
        return [x.to(draw.device) for x in self.lay_out(pieces, length)]    # made on the CPU

    def held_out(self, split, n, lengths, generator):
        """Cut the same text for every length: n segments of max(lengths) tokens (shorter ones only
        if there are too few) into contexts of `length` tokens. Contexts overlap by one token, so
        that each token of a segment except the first is predicted once. The last context may be
        short; if stride > 1, every context is up to stride - 1 tokens shorter."""
        def step(length):   # stride of contexts = predictions in a full context
            return (length - 1) // self.stride * self.stride

        def contexts(text, length):
            return [text[i:i + step(length) + 1] for i in range(0, len(text) - 1, step(length))]

        longest = max(lengths)
        documents = self.of_part('val' if split == 'eval' else 'test')
        # each segment's document and start, as arrays because a large corpus has millions
        starts = [np.arange(0, len(document) - 1, step(longest)) for document in documents]
        which = np.repeat(np.arange(len(documents)), [*map(len, starts)])
        starts = np.concatenate(starts)
        short = np.array([*map(len, documents)])[which] - starts <= step(longest)
        order = torch.randperm(len(which), generator=generator(longest)).numpy()
        order = order[np.argsort(short[order], kind='stable')][:n]      # full ones first
        segments = [documents[which[i]][starts[i]:][:step(longest) + 1] for i in order]
        sets = {}
        for length in lengths:
            pieces = [x for segment in segments for x in contexts(segment, length)]
            sets[length] = self.lay_out(pieces, length)     # shorter contexts, more rows
        return sets

    def existing(self, lengths, part):
        return [n for n in lengths if n >= self.min_length]

    def width(self, lengths):
        return max(lengths)


def mapped(path, dtype):
    """A file as an array; mapped only if large, because each map keeps its file open."""
    large = path.stat().st_size > 2 ** 20   # bytes, 1 MiB
    return np.memmap(path, dtype, 'r') if large else np.frombuffer(path.read_bytes(), dtype)


def read_text(path):
    """The content of a text file. Raise UserError if it is not UTF-8."""
    with reading(path, 'UTF-8 text'):
        return pathlib.Path(path).read_bytes().decode()     # line ends as they are


class Text(Corpus):
    """Files as bytes; each file is a document. `length`: bytes in a context."""
    needs = 'a file, or a folder of files'
    vocab = ['<pad>', *map(chr, range(256))]

    def documents(self, path):
        return [mapped(path, np.uint8)]

    def decode(self, row):
        return bytes(i - 1 for i in row.tolist() if i != PAD).decode('utf-8', 'replace')

    def encode(self, text):
        return torch.tensor([byte + 1 for byte in text.encode()], dtype=torch.int64)


class StandardLibrary(Text):
    """The source of Python's standard library as bytes, without tests and installed packages."""
    needs = ''
    data = os.path.dirname(os.__file__)
    endings = '.py'
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}


class Tokens(Corpus):
    """Files of tokens below `size`, as in tokens:size=1000. `length`: tokens in a context."""
    needs = 'a .bin (uint16) or .npy file of tokens, or a folder of them'
    endings = ('.bin', '.npy')

    def __init__(self, size=50257):
        self.vocab = ['<pad>', *map(str, range(size))]

    def documents(self, path):
        if path.suffix.lower() == '.bin':
            tokens = mapped(path, np.uint16)
            low, high = tokens[:1000:2], tokens[1:1000:2]       # halves of numbers, if uint32
            need(high.any() or not low.any(), 'every other token is 0, as in a file of uint32')
            return [tokens]
        array = np.load(path, mmap_mode='r')    # stays on disk
        need(array.ndim == 1 and array.dtype.kind in 'ui', 'must be 1-D integers')
        return [array]


class GPT2(Tokens):
    """GPT-2's byte pairs in files of tokens, as nanoGPT's prepare.py writes them for OpenWebText.
    Converting text to tokens or back requires `tiktoken`. `length`: tokens in a context."""
    def __init__(self):
        super().__init__(50303)     # GPT-2 has 50257; with padding 50304 = 64 * 786 suits GPUs

    @functools.cached_property
    def byte_pairs(self):
        with reading('byte pairs', 'pip install tiktoken'):
            import tiktoken
            return tiktoken.get_encoding('gpt2')

    def decode(self, row):
        return self.byte_pairs.decode([i - 1 for i in row.tolist() if 1 <= i <= 50257])

    def encode(self, text):
        return torch.tensor(self.byte_pairs.encode_ordinary(text), dtype=torch.int64) + 1


class JSB(Corpus):
    """Bach's chorales (PoPE A.1): for each 16th note in turn, the pitches of the four voices.
    90 tokens: padding, silence, and the 88 pitches of a piano, 21 to 108. `length`: tokens in a
    context, which begins with the first voice. 229 chorales for training, 76 and 77 held out.
    >>> JSB().decode(JSB().encode('74 70 65 58 - 70 65 58'))
    '74 70 65 58 - 70 65 58'
    """
    needs = 'Jsb16thSeparated.json (github.com/czhuang/JSB-Chorales-dataset)'
    vocab = ['<pad>', '-', *map(str, range(21, 109))]
    stride = 4
    min_length = 5

    def read(self):
        with reading(self.data, self.needs):
            chorales = json.loads(pathlib.Path(self.data).read_bytes())
            for part, name in zip(PARTS, ('train', 'valid', 'test')):
                for chorale in chorales[name]:
                    pitches = np.array(chorale).reshape(-1, 4)      # [T, 4], -1 is silence
                    yield part, np.where(pitches < 0, 0, pitches - 20).ravel()  # [4 T]


class MIDI(Corpus):
    """Piano performances, one per .mid file, as REMI tokens (Huang & Yang 2020) from `miditok`.
    In training each context is transposed by -3 to 3 semitones. The vocabulary has 328 tokens, as
    in PoPE A.1, which does not list them. `length`: tokens in a context."""
    needs = 'a folder of .mid or .midi files (MAESTRO: magenta.withgoogle.com/datasets/maestro)'
    endings = ('.mid', '.midi')
    first = 0

    @functools.cached_property
    def remi(self):
        with reading('MIDI', 'pip install miditok'):
            import miditok
        return miditok.REMI(miditok.TokenizerConfig(
            pitch_range=(21, 108), drums_pitch_range=(27, 87), use_chords=True, use_tempos=True,
            num_tempos=32, use_time_signatures=False, one_token_stream_for_programs=True,
            special_tokens=['PAD', 'BOS', 'EOS', 'MASK']))

    @functools.cached_property
    def vocab(self):
        return ['<pad>', *sorted(self.remi.vocab, key=self.remi.vocab.get)[1:]]  # not PAD_None

    def documents(self, path):
        bos, eos = self.remi['BOS_None'], self.remi['EOS_None']
        return [np.array([bos, *track.ids, eos], dtype=np.uint16) for track in self.remi(path)]

    def problems(self, n, length, draw):
        """Training contexts, transposed; a pitch that leaves the piano moves back by an octave."""
        tokens, _ = super().problems(n, length, draw)                   # [n, length]
        low, high = self.vocab.index('Pitch_21'), self.vocab.index('Pitch_108')
        moved = tokens + draw.integers(7, n, 1) - 3     # consecutive tokens are a semitone apart
        moved += 12 * (moved < low) - 12 * (moved > high)               # [n, length]
        tokens = torch.where((low <= tokens) & (tokens <= high), moved, tokens)     # pitches only
        return tokens, supervise(tokens, 1)


class Genome(Corpus):
    """FASTA files as 6-mers, cut as for the Nucleotide Transformer; each record is a document.
    Every segment without N is cut from its left into 6-mers that do not overlap. Each letter left
    over and each N is a token of its own; other characters count as N, and case is ignored. 4,107
    tokens: 6 special ones, A C G T N, 4,096 6-mers. `length`: tokens in a context.
    >>> Genome().decode(Genome().encode('acgtacgtNNACGTTTA'))
    'ACGTAC G T N N ACGTTT A'
    """
    needs = ('a FASTA file (.fa, .fasta, .fna; unpacked), or a folder of them, as in '
             'huggingface.co/datasets/InstaDeepAI/human_reference_genome')
    endings = ('.fa', '.fasta', '.fna')
    vocab = ['<pad>', '<unk>', '<mask>', '<cls>', '<eos>', '<bos>', *'ACGTN',
             *map(''.join, itertools.product('ACGT', repeat=6))]
    first = 0

    def encode(self, text):
        letters = re.sub('[^ACGT]', 'N', ''.join(text.split()).upper())
        words = re.findall('[ACGT]{6}|.', letters)      # from the left: six letters, else one
        return super().encode(' '.join(words))

    def documents(self, path):
        head, *records = ('\n' + read_text(path)).split('\n>')
        need(not head.strip(), 'a FASTA file must begin with ">"')
        sequences = [record.partition('\n')[2] for record in records]   # without the name
        return [self.encode(text).numpy().astype(np.uint16) for text in sequences]


# ---- names, and the program ----------------------------------------------------------------------

TASKS = {'copy': Copy(), 'parity': Parity(), 'polynomial': Polynomial(),
         'count': Count(), 'reverse': Reverse(), 'mode': Mode(), 'sort': Sort(),
         'indirect_indexing': IndirectIndexing(), 'distance': Distance(),
         'trigger_count': TriggerCount(), 'distance_sum': DistanceSum(),
         'string_copy': StringCopy(), 'string_reverse': StringReverse(), 'odds_first': OddsFirst(),
         'bucket_sort': BucketSort(), 'stack': Stack(), 'dyn_str_cpy': DynStrCpy(),
         'flip_flop': FlipFlop(), 'mqar': MQAR(),
         'addition_cot': AdditionCoT(), 'multiplication_cot': MultiplicationCoT(), 'scan': SCAN(),
         'scan_simple': SCAN(simple=True), 'scan_cot': SCANCoT(), 'stdlib': StandardLibrary(),
         'cfq': CFQ(), 'text': Text(), 'tokens': Tokens(),
         'openwebtext': GPT2(), 'jsb': JSB(), 'maestro': MIDI(), 'genome': Genome()}

# the type of an option's default: (pattern of its values, what they are)
OPTIONS = {bool: ('[01]', '0 or 1'), int: ('[0-9]{1,6}', 'an integer below 10^6'),
           float: (r'[0-9]*\.?[0-9]+', 'a number, as in 0.5'), str: ('.*', 'a text')}


@functools.cache
def make(name, data=''):
    """Return the task for a name with options, as in 'parity' or 'distance:span=16'; `data` is the
    path for a task that reads files. Raise UserError if a name or option is unknown."""
    base, *options = name.split(':')
    check_name('task', base, TASKS)
    need(isinstance(TASKS[base], Task), f'TASKS[{base!r}] must be an instance of a subclass of '
         f'tasks.Task, as in Parity(); got {TASKS[base]!r}')
    task = copy.copy(TASKS[base])   # so that the registered task does not change
    need(data or not task.needs, f'{base} reads files: add --data=PATH, the path of {task.needs}')
    need(task.needs or not data, f'{base} reads no files: remove --data={data}')
    takes, given = inspect.signature(type(task)).parameters, {}
    for option in options:
        key, _, value = option.partition('=')
        need(key in takes, f'{key!r} is not an option of {base}, whose options are: '
             f'{options_of(task) or "none"}')
        kind = type(takes[key].default)
        need(kind in OPTIONS, f'{base}: option {key} requires a default, as 1, 0.5 or True')
        pattern, what = OPTIONS[kind]
        need(re.fullmatch(pattern, value), f'{key} must be {what}, got {value!r}')
        given[key] = value if kind is str else kind(float(value))
    if given:
        task = type(task)(**given)
    task.name, task.data = name, data or task.data  # stdlib has a default path
    return task


def options_of(task):
    """Return the options of a task with their defaults, as in steps=1."""
    options = ':'.join(map(str, inspect.signature(type(task)).parameters.values()))
    return options.replace('True', '1').replace('False', '0')


def examples(length, names):
    """Print one problem of this length of each task, drawn with seed 0."""
    for name in names.split():
        tokens, _ = make(name).sample(1, length, torch.Generator().manual_seed(0))
        print(f'{name:19}', make(name).decode(tokens[0]))


def main(argv):
    """List the tasks, or print examples of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda says: need(False, says)       # one line, as for all errors
    parser.add_argument('name', nargs='?')
    parser.add_argument('length', nargs='?', type=int)
    parser.add_argument('--data', default='')
    args = parser.parse_args(argv)
    if not args.name:
        for name, task in TASKS.items():
            print(f'{name:18} {(inspect.getdoc(task) or "no docstring").splitlines()[0]}')
        return print('\npython tasks.py NAME [LENGTH] [--data=PATH] prints examples')
    task = make(args.name, os.path.expanduser(args.data))
    usual = 64 if task.corpus else max(5, task.min_length)
    length = usual if args.length is None else args.length
    tokens, targets = task.sample(5, length)    # unseeded: different every time
    width = task.width([length])                # raises if a seed gives other problems
    print((inspect.getdoc(task) or 'no docstring').partition('>>>')[0].strip())
    print('options:', options_of(task) or 'none')
    print(f'\nvocabulary of {len(task.vocab)}; length {length}, {width} tokens\n')
    for row, target in zip(tokens, targets):
        answer = 'all but the first token' if task.corpus else task.decode(target[target != -100])
        print(f'{task.decode(row)}\n    to predict: {answer}')


if __name__ == '__main__':
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # python tasks.py | head
    try:
        main(sys.argv[1:])
    except (UserError, OSError, MemoryError, RuntimeError) as error:    # a length can be too large
        print(f'tasks.py: {error}', file=sys.stderr)
        sys.exit(2)
