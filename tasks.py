"""Every task, one small class each: generated tasks and SCAN; engine/data.py reads files.

    python tasks.py                                         lists the tasks
    python tasks.py jsb 64 --data=Jsb16thSeparated.json     prints examples of a task and length

A task has `vocab`, the token strings, padding first; `end`, the index of the end token or None;
`sample(n, length, generator) -> (tokens, targets)`; and `decode(row)`, a row of tokens as text.
tokens [n, T] int64 are whole sequences, problem and answer, drawn on the generator's device;
targets[t] = tokens[t + 1] where the model has to predict it, and -100 elsewhere; a task that
`labels` its tokens asks for their labels instead.
To add a task, write a class and name it in TASKS.
"""
import collections
import functools
import inspect
import itertools
import math
import re
import string
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

PAD, BOS, EOI, EOS = range(4)  # the same in every task that has them


class DataError(ValueError):
    """The data are missing or of the wrong kind, or the task has no problems of that length."""


class Task:
    """Base of all tasks. A subclass gives problems(n, length, draw) -> (tokens, targets)."""
    name = 'the task'      # as make() was asked for it
    separator = ' '        # between tokens in a text
    end = None
    min_length = 1
    max_length = math.inf
    corpus = False         # next-token prediction, judged by its loss
    fixed = False          # it has a training set of its own
    labels = False         # targets[t] is the label of token t, not the next token
    needs = ''             # what --data should be, for a task that reads files
    data = ''              # the path that --data gave
    own_vocab = False      # the vocabulary comes from the data
    couples = False        # numbers are written lowest digit first, for positions=coupled

    def sample(self, n, length, generator=None):
        """n problems of a length: (tokens, targets), both [n, T]. DataError if it has none."""
        if not self.min_length <= length <= self.max_length:
            longest = 'on' if self.max_length == math.inf else f'to {self.max_length}'
            self.refuse(length, f'from {self.min_length} {longest}')
        return self.problems(n, length, Draw(generator))

    def refuse(self, length, lengths):
        raise DataError(f'{self.name} has problems of lengths {lengths}, not {length} '
                        '(keys train_lengths and eval_lengths)')

    def pool(self, n, length, generator):
        """An epoch's training problems of a length: n new ones, or all that a data set has."""
        return self.sample(n, length, generator)

    def held_out(self, split, n, lengths, generator):
        """{length: (tokens, targets)} of split eval or test: at most n problems of each length.
        generator(length) gives the random generator for a length."""
        return {length: self.sample(n, length, generator(length)) for length in lengths}

    def existing(self, lengths, part):
        """The lengths that `part` has problems of, or any part if it is None."""
        return lengths

    def count(self, lengths):
        """The number of training problems of these lengths, None if unlimited."""

    def width(self, lengths):
        """The number of tokens in the longest sequence of these lengths."""
        ends = min(lengths), max(lengths)
        return max(self.sample(1, n, torch.Generator())[0].shape[1] for n in ends)

    def decode(self, row):
        """A row of token indices as text, without the padding."""
        return self.separator.join(self.vocab[i] for i in row.tolist() if i != PAD)

    def encode(self, text):
        """The token indices [T] of a text. DataError if a word is not in the vocabulary."""
        words = text.split() if self.separator else list(text)
        if unknown := ' '.join(sorted(set(words) - set(self.vocab[1:]))):
            raise DataError(f'{unknown!r} is not in the vocabulary of {self.name}, which begins '
                            f'with {" ".join(self.vocab[1:33])!r}')
        return torch.tensor([self.vocab.index(word) for word in words], dtype=torch.int64)


class Draw:
    """Random numbers from one generator, on its device."""
    def __init__(self, generator):
        self.g = generator
        self.device = generator.device if generator else 'cpu'

    def integers(self, high, *shape):
        """Uniform on 0..high-1; high: an int, or a tensor that broadcasts to shape."""
        if isinstance(high, int):
            return torch.randint(high, shape, generator=self.g, device=self.device)
        u = torch.rand(shape, generator=self.g, device=self.device, dtype=torch.float64)
        return torch.minimum((u * high).long(), high - 1)

    def permutation(self, n, size):
        """n random orders of 0..size-1 [n, size]."""
        return torch.rand(n, size, generator=self.g, device=self.device).argsort(dim=1)


def supervise(tokens, start):
    """Targets [n, T]: predict every token from index `start` (int or [n, 1]) on, but no padding."""
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    t = torch.arange(tokens.shape[1], device=tokens.device)
    return targets.masked_fill((t + 1 < start) | (targets == PAD), -100)


# --------------------------------------------------------------------------------------------------
# ViPE's iterative tasks. Its paper names count, reverse, mode and sort without defining them.

class Iterative(Task):
    """BoS x_1..x_L EoI s_1..s_m EoS (ViPE section 2). `length` is L; the states s and EoS are
    supervised; steps=0, as in parity:steps=0, leaves only the last state (A.1: no chain of
    thought). A subclass gives the symbols, and the states of inputs that are uniform on them."""
    end = EOS
    symbols = range(2)

    def __init__(self, steps=True):
        self.steps = steps
        self.vocab = ['<pad>', 'BoS', 'EoI', 'EoS', *map(str, self.symbols)]

    def problems(self, n, length, draw):
        x, s = self.inputs_and_states(n, length, draw)  # (n, L), (n, m), of indices into symbols
        s = s if self.steps else s[:, -1:]
        bos, eoi, eos = (torch.full((n, 1), i, device=x.device) for i in (BOS, EOI, EOS))
        tokens = torch.cat([bos, x + 4, eoi, s + 4, eos], dim=1)
        return tokens, supervise(tokens, x.shape[1] + 2)

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(len(self.symbols), n, length)
        return x, self.states(x)


class Copy(Iterative):
    """Binary copy, s_t = x_t (ViPE Table 3).
    >>> example('copy', 5)
    'BoS 0 1 1 0 1 EoI 0 1 1 0 1 EoS'
    """
    def states(self, x):
        return x


class Parity(Iterative):
    """Running parity, s_1 = x_1, s_t = (s_(t-1) + x_t) mod 2 (ViPE Table 3).
    >>> example('parity', 5)
    'BoS 0 1 1 0 1 EoI 0 1 0 0 1 EoS'
    """
    def states(self, x):
        return x.cumsum(dim=1) % 2


class Polynomial(Iterative):
    """Polynomial iteration, s_1 = x_1, s_t = (s_(t-1) x_t + 1) mod p, p = 5 (ViPE Table 3).
    >>> example('polynomial', 5)
    'BoS 4 4 3 0 3 EoI 4 2 2 1 4 EoS'
    """
    def __init__(self, p=5, steps=True):
        if p < 2:
            raise ValueError(f'polynomial needs a modulus p >= 2, not {p}')
        self.p = p
        self.symbols = range(p)
        super().__init__(steps)

    def states(self, x):
        s = [x[:, 0]]
        for t in range(1, x.shape[1]):
            s.append((s[-1] * x[:, t] + 1) % self.p)
        return torch.stack(s, dim=1)


class Product(Iterative):
    """Running product, s_t = s_(t-1) beta_t x_t mod 5, x_t in 1..4, s_0 = 1, beta = 1.
    In product:own=1 each place has a beta of its own, which no model can know beyond the trained
    lengths. (The toy of ViPE's section 3, there of real numbers.)
    >>> example('product', 5)
    'BoS 1 4 2 1 4 EoI 1 4 3 3 2 EoS'
    >>> example('product:own=1', 5)
    'BoS 1 4 2 1 4 EoI 1 1 4 4 4 EoS'
    """
    max_length = 1000
    symbols = range(1, 5)

    def __init__(self, own=False, steps=True):
        g = torch.Generator().manual_seed(0)
        beta = torch.randint(1, 5, (self.max_length,), generator=g)
        self.beta = beta if own else torch.ones_like(beta)
        super().__init__(steps)

    def states(self, x):
        s = [torch.ones_like(x[:, 0])]
        for t in range(x.shape[1]):
            s.append(s[-1] * self.beta[t].item() * (x[:, t] + 1) % 5)
        return torch.stack(s[1:], dim=1) - 1    # of indices into symbols


class Reverse(Iterative):
    """The input backwards, s_t = x_(L+1-t), digits 0-9.
    >>> example('reverse', 5)
    'BoS 4 9 3 0 3 EoI 3 0 3 9 4 EoS'
    """
    symbols = range(10)

    def states(self, x):
        return x.flip(1)


class Count(Iterative):
    """Count from the first number to the second (Zhou et al. 2023). `length`: how many numbers.
    The start is uniform, so that short problems show every number that long ones need.
    >>> example('count', 4)
    'BoS 44 47 EoI 44 45 46 47 EoS'
    """
    max_length = 128
    symbols = range(128)

    def inputs_and_states(self, n, length, draw):
        start = draw.integers(self.max_length + 1 - length, n, 1)
        s = start + torch.arange(length, device=draw.device)
        return s[:, [0, -1]], s


class Mode(Iterative):
    """The most frequent of the letters a-j, which is always unique (Zhou et al. 2023).
    Letters are uniform. If several tie, one of them at random replaces one letter of another.
    >>> example('mode', 7)
    'BoS e d d a d j h EoI d EoS'
    """
    symbols = 'abcdefghij'

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(10, n, length)
        counts = (x[:, :, None] == torch.arange(10, device=x.device)).sum(dim=1)  # (n, 10)
        tied = counts == counts.amax(dim=1, keepdim=True)
        priority = draw.permutation(n, 10).masked_fill(~tied, -1)
        mode, second = priority.topk(2, dim=1).indices.unbind(dim=1)  # (n,), (n,)
        place = (x == second[:, None]).int().argmax(dim=1)  # where the second first stands
        row = torch.arange(n, device=x.device)
        x[row, place] = torch.where(tied.sum(dim=1) > 1, mode, x[row, place])
        return x, mode[:, None]


class Sort(Iterative):
    """Numbers 0-99, all different, in ascending order (Zhou et al. 2023).
    >>> example('sort', 5)
    'BoS 83 94 12 35 43 EoI 12 35 43 83 94 EoS'
    """
    max_length = 100
    symbols = range(100)

    def inputs_and_states(self, n, length, draw):
        x = draw.permutation(n, 100)[:, :length]
        return x, x.sort(dim=1).values


class IndirectIndexing(Task):
    """The letter at a given shift from a given letter (PoPE A.1). `length`: letters in the source.
    The source, of 20 to 40 letters in the paper, is drawn without replacement from A-Z, a-z; the
    shift is uniform on those in -15..+15 that stay inside it. Only the last letter is supervised.
    >>> example('indirect_indexing', 20)
    'MjrbCDsiSNgcktphwTOe, t, -3, g'
    """
    separator = ''

    def __init__(self, letters=52, shift=15):
        if not 1 <= letters <= 52 or not 0 <= shift < 100:
            raise ValueError(f'letters must be 1 to 52, shift 0 to 99, not {letters} and {shift}')
        self.max_length = letters
        self.max_shift = shift
        alphabet = string.ascii_uppercase + string.ascii_lowercase
        self.vocab = ['<pad>', ',', '+', '-', *string.digits, *alphabet[:letters]]

    def problems(self, n, length, draw):
        comma, plus, minus, digit, letter = 1, 2, 3, 4, 14  # the first of each in the vocabulary
        source = draw.permutation(n, self.max_length)[:, :length] + letter
        i = draw.integers(length, n, 1)
        low = (-i).clamp(min=-self.max_shift)
        high = (length - 1 - i).clamp(max=self.max_shift)
        shift = low + draw.integers(high - low + 1, n, 1)
        size = shift.abs()
        sign = torch.where(shift < 0, minus, plus)
        commas = torch.full_like(shift, comma)
        target = source.gather(1, i + shift)
        two_digits = torch.cat([size // 10 + digit, size % 10 + digit, commas, target], dim=1)
        one_digit = pad(two_digits[:, 1:], (0, 1), value=PAD)
        end = torch.where(size < 10, one_digit, two_digits)
        tokens = torch.cat([source, commas, source.gather(1, i), commas, sign, end], dim=1)
        return tokens, supervise(tokens, length + 6 + (size >= 10).long())

    def decode(self, row):
        return super().decode(row).replace(',', ', ')


# --------------------------------------------------------------------------------------------------
# the Toeplitz study's tasks: a vocabulary of 574 tokens, classes included

class Classification(Task):
    """x_1..x_L ? class, the class supervised. `length` is L, 128 in the paper. Background words are
    uniform; a subclass puts triggers in their place: place(words, draw) -> (words, class)."""
    query, first_class, classes, triggers = 1, 2, 32, 0

    def __init__(self):
        self.first_trigger = self.first_class + self.classes
        self.first_word = self.first_trigger + self.triggers
        counts = {'class': self.classes, 'trigger': self.triggers, 'w': 574 - self.first_word}
        words = [f'{word}{i}' for word, count in counts.items() for i in range(count)]
        self.vocab = ['<pad>', '?', *words]

    def problems(self, n, length, draw):
        words = draw.integers(574 - self.first_word, n, length) + self.first_word
        words, label = self.place(words, draw)  # (n, L), (n, 1)
        query = torch.full_like(label, self.query)
        tokens = torch.cat([words, query, label + self.first_class], dim=1)
        return tokens, supervise(tokens, length + 1)


class Distance(Classification):
    """Task 1: the distance between two triggers (the Toeplitz study, section 4.1).
    class = 32 |i - j| // span; either trigger may be first. |i - j| is uniform below the length and
    span, 128 or, as in distance:span=16, the length to train at: so training shows every class.
    >>> example('distance', 9)
    'w410 w225 w167 trigger0 w495 w299 w81 trigger1 w247 ? class1'
    """
    triggers = min_length = 2

    def __init__(self, span=128):
        super().__init__()
        if span < self.triggers:
            raise ValueError(f'span must be at least {self.triggers}, not {span}')
        self.span = span

    def place(self, words, draw):
        n, length = words.shape
        pairs = self.triggers // 2
        places = torch.zeros(n, 2 * pairs, dtype=torch.int64, device=draw.device)
        clash = torch.ones(n, 1, dtype=torch.bool, device=draw.device)
        while clash.any():  # draw a row again while two of its triggers share a place
            d = 1 + draw.integers(min(length, self.span) - 1, n, pairs)
            i = draw.integers(length - d, n, pairs)
            places = torch.where(clash, torch.stack([i, i + d], dim=2).flatten(1), places)
            clash = (places.sort(dim=1).values.diff(dim=1) == 0).any(dim=1, keepdim=True)
        flip = draw.integers(2, n, pairs)  # which of a pair comes first
        first = 2 * torch.arange(pairs, device=draw.device)
        order = torch.stack([first + flip, first + 1 - flip], dim=2).flatten(1)
        words.scatter_(1, places, self.first_trigger + order)
        total = (places[:, 1::2] - places[:, ::2]).sum(dim=1, keepdim=True)
        return words, total * self.classes // (pairs * self.span)


class DistanceSum(Distance):
    """The sum of two trigger distances (the Toeplitz study, appendix E): triggers 0, 1 and 2, 3.
    class = 32 (|i - j| + |k - l|) // (2 span). Distances as in `distance`, at four places.
    >>> example('distance_sum', 9)
    'w468 trigger3 w237 w160 w51 w67 trigger0 trigger2 trigger1 ? class1'
    """
    triggers = min_length = 4


class TriggerCount(Classification):
    """Task 2: the number of trigger tokens, of 20 kinds (the Toeplitz study, section 4.1).
    The count is the class, uniform on 0..31; trigger_count:most=16, to train at 16: on 0..16.
    >>> example('trigger_count', 9)
    'trigger13 w119 w53 w120 trigger14 trigger4 w107 w103 w17 ? class3'
    """
    triggers = 20

    def __init__(self, most=31):
        super().__init__()
        if not 1 <= most < self.classes:
            raise ValueError(f'most must be from 1 to {self.classes - 1}, not {most}')
        self.most = most

    def place(self, words, draw):
        n, length = words.shape
        count = draw.integers(min(length, self.most) + 1, n, 1)
        chosen = draw.permutation(n, length) < count  # `count` places of each row
        trigger = self.first_trigger + draw.integers(20, n, length)
        return torch.where(chosen, trigger, words), count


# --------------------------------------------------------------------------------------------------
# PRISM's tasks (Tables 3 and 4), in characters

CHARACTERS = ['<pad>', *'0123456789+=,→.x[]()*^-', *string.ascii_lowercase.replace('x', '')]
CHARACTERS += [f'<unused{i}>' for i in range(64 - len(CHARACTERS))]  # as in the paper
LETTERS = CHARACTERS.index('a') - 1     # the number that stands for a; digits: 0 to 9


class Characters(Task):
    """prompt=answer. with everything right of "=" supervised. A subclass draws inputs(), by default
    a string of `symbols` different characters, digits before letters. write() returns a list of
    parts: texts, or numbers [n, k], of which 0 to 9 are digits, LETTERS + i is a letter, -1 is
    nothing."""
    vocab = CHARACTERS
    end = CHARACTERS.index('.')
    separator = ''
    symbols = 10

    def problems(self, n, length, draw):
        columns = []
        for part in self.write(*self.inputs(n, length, draw)):
            if isinstance(part, str):
                text = [CHARACTERS.index(character) for character in part]
                text = torch.tensor(text, dtype=torch.int64, device=draw.device)
                columns.append(text.expand(n, -1))
            else:
                columns.append(torch.where(part < 0, -1, part + 1))  # number 0 is token 1
        tokens = torch.cat(columns, dim=1)
        gaps_last = (tokens < 0).byte().argsort(dim=1, stable=True)
        tokens = tokens.gather(1, gaps_last).clamp(min=PAD)
        equals = (tokens == CHARACTERS.index('=')).long().argmax(dim=1, keepdim=True)
        return tokens, supervise(tokens, equals + 1)

    def inputs(self, n, length, draw):
        x = draw.integers(self.symbols, n, length)
        return [torch.where(x < 10, x, x - 10 + LETTERS)]


class StringCopy(Characters):
    """Copy a string of digits. `length` is its length.
    >>> example('string_copy', 7)
    '4930397=4930397.'
    """
    def write(self, x):
        return [x, '=', self.answer(x), '.']

    def answer(self, x):
        return x


class CopyRepeated(StringCopy):
    """Copy a digit or letter as often as it stands there (Kazemnejad et al. 2023).
    >>> example('copy_repeated', 7)
    '4444444=4444444.'
    """
    symbols = 35

    def inputs(self, n, length, draw):
        return [x.expand(-1, length) for x in super().inputs(n, 1, draw)]


class CopyVaried(StringCopy):
    """Copy a string of digits and letters (Kazemnejad et al. 2023, who copy words). `length`: of
    the string.
    >>> example('copy_varied', 7)
    '4osu89r=4osu89r.'
    """
    symbols = 35


class StringReverse(StringCopy):
    """Reverse a string of digits. `length` is its length. The answer ends with the digit
    that follows the start symbol, which PRISM's Figure 15 names.
    >>> example('string_reverse', 7)
    '^4930397=7930394.'
    """
    def write(self, x):
        return ['^', *super().write(x)]

    def answer(self, x):
        return x.flip(1)


class ReverseWords(StringReverse):
    """Reverse a string of digits and letters (Kazemnejad et al. 2023, who reverse words). Otherwise
    as string_reverse.
    >>> example('reverse_words', 7)
    '^4osu89r=r98uso4.'
    """
    symbols = 35


class BucketSort(StringCopy):
    """Digits 0 to 4 in ascending order, as in the suite of Delétang et al. (2023).
    >>> example('bucket_sort', 7)
    '4430342=0233444.'
    """
    symbols = 5

    def answer(self, x):
        return x.sort(dim=1).values


class OddsFirst(StringCopy):
    """Digits at odd places, then those at even places, counted from 0. `length` is the string's.
    >>> example('odds_first', 6)
    '493039=909433.'
    """
    def answer(self, x):
        return torch.cat([x[:, 1::2], x[:, ::2]], dim=1)


class Stack(StringCopy):
    """A stack of 0 and 1, bottom first, then actions: 2 pops, if it can, 3 pushes 0, 4 pushes 1.
    The answer is the final stack, top first, a 2, and zeros up to length + 1. `length`: stack and
    actions; the size of the stack is uniform on 1..length-1.
    >>> example('stack', 7)
    '1104223=01120000.'
    """
    def inputs(self, n, length, draw):
        size = 1 + draw.integers(max(1, length - 1), n, 1)
        stack = draw.integers(2, n, length)
        actions = 2 + draw.integers(3, n, length)
        return [torch.where(torch.arange(length, device=draw.device) < size, stack, actions)]

    def answer(self, x):
        n, length = x.shape
        stack = x.new_zeros(n, length + 1)
        depth = x.new_zeros(n, 1)
        for t in range(length):
            action = x[:, t:t + 1]
            pop = action == 2
            bit = torch.where(action > 2, action - 3, action)  # 0 and 1 push themselves
            stack.scatter_(1, depth, torch.where(pop, stack.gather(1, depth), bit))
            depth = torch.where(pop, depth - 1, depth + 1).clamp(min=0)
        i = depth - 1 - torch.arange(length + 1, device=x.device)  # (n, length + 1), top to bottom
        bits = stack.gather(1, i.clamp(min=0))
        return torch.where(i >= 0, bits, torch.where(i == -1, 2, 0))


class EvenPairs(StringCopy):
    """1 if an even number of neighbours differ, else 0 (Delétang et al. 2023, as the
    next three). `length`: bits.
    >>> example('even_pairs', 7)
    '0110111=0.'
    """
    symbols = 2

    def answer(self, x):
        return (x[:, :1] == x[:, -1:]).long()


class CycleNavigation(EvenPairs):
    """A walk on a cycle of 5 from 0: 0 stays, 1 goes forth, 2 back. Where does it end?
    >>> example('cycle_navigation', 7)
    '2020101=0.'
    """
    symbols = 3

    def answer(self, x):
        return torch.where(x == 2, -1, x).sum(dim=1, keepdim=True) % 5


class ModularArithmetic(EvenPairs):
    """Sums, differences and products mod 5, products first. `length`: numbers.
    >>> example('modular_arithmetic', 5)
    '4-4-3-0+3=0.'
    """
    def inputs(self, n, length, draw):
        return draw.integers(5, n, length), draw.integers(3, n, length)

    def write(self, x, operator):
        plus, minus, times = (CHARACTERS.index(sign) - 1 for sign in '+-*')
        signs = torch.tensor([plus, minus, times], device=x.device)[operator]
        total, term = torch.zeros_like(x[:, 0]), x[:, 0]
        for t in range(1, x.shape[1]):
            here, product = operator[:, t], term * x[:, t]
            total = torch.where(here == 2, total, total + term)
            term = torch.where(here == 2, product % 5, torch.where(here == 1, -x[:, t], x[:, t]))
        text = torch.stack([signs, x], dim=2).flatten(1)[:, 1:]
        return [text, '=', ((total + term) % 5)[:, None], '.']


class MissingDuplicate(EvenPairs):
    """A string of bits twice, one bit missing: which? `length`: of the string.
    >>> example('missing_duplicate', 5)
    '011010110x=1.'
    """
    def inputs(self, n, length, draw):
        return *super().inputs(n, length, draw), draw.integers(2 * length, n, 1)

    def write(self, x, place):
        twice = torch.cat([x, x], dim=1)
        blank = torch.full_like(place, CHARACTERS.index('x') - 1)
        return [twice.scatter(1, place, blank), '=', twice.gather(1, place), '.']


class DynStrCpy(Characters):
    """The part of the string that begins at a given digit, which occurs once. `length`: its own.
    >>> example('dyn_str_cpy', 7)
    '0278481,4=481.'
    """
    def inputs(self, n, length, draw):
        d = draw.integers(10, n, 1)
        x = draw.integers(9, n, length)
        x = x + (x >= d)  # any digit but d
        return x.scatter(1, draw.integers(length, n, 1), d), d

    def write(self, x, d):
        copied = torch.where((x == d).cumsum(dim=1) > 0, x, -1)
        return [x, ',', d, '=', copied, '.']


class AdditionCoT(Characters):
    """Add two numbers, both written lowest digit first, with a chain of thought.
    For each column: digit of a, digit of b, carry out, digit of the sum; then the sum. `length`:
    digits of the longer number. The other's number is uniform on 1..length; no leading zeros.
    >>> example('addition_cot', 3)
    '33+497=3407,3912,0708→728.'
    """
    def inputs(self, n, length, draw):
        long = number(n, length, draw, length)
        short = number(n, length, draw, 1 + draw.integers(length, n, 1))
        swap = draw.integers(2, n, 1) == 1
        return torch.where(swap, short, long), torch.where(swap, long, short)

    def add(self, a, b):
        """The steps, column by column, the digits of the sum, and the last carry."""
        carry = torch.zeros_like(a[:, :1])
        steps, total = [], []
        for column in torch.stack([a, b]).clamp(min=0).split(1, dim=2):  # (2, n, 1)
            s = column.sum(dim=0) + carry
            carry = s // 10
            total.append(s % 10)
            steps += [*column, carry, s % 10, ',']
        return steps, total, carry

    def write(self, a, b):
        steps, total, carry = self.add(a, b)
        steps[-1] = '→'
        return [a, '+', b, '=', *steps, *total, torch.where(carry == 1, 1, -1), '.']


class Addition(AdditionCoT):
    """Add two numbers without a chain of thought. `length` as in addition_cot. Options: reversed=1,
    lowest digits first; pad=1, zeros for missing digits; hints=1, a letter before each digit that
    names its place (Zhou et al. 2024), the lowest place's at random.
    >>> example('addition', 3)
    '33+794=827.'
    >>> example('addition:reversed=1:pad=1', 3)
    '330+497=7280.'
    >>> example('addition:reversed=1:hints=1', 3)
    'k9l3m8+k7l7=k6l1m9.'
    """
    def __init__(self, reversed=False, hints=False, pad=False):
        self.reversed, self.hints, self.pad = reversed, hints, pad
        self.max_length = 24 if hints else math.inf
        self.couples = reversed and not hints

    def inputs(self, n, length, draw):
        first = draw.integers(25 - length, n, 1) if self.hints else None
        return *super().inputs(n, length, draw), first

    def write(self, a, b, first):
        _, total, carry = self.add(a, b)
        carry = carry if self.pad else torch.where(carry == 1, 1, -1)
        if self.pad:
            a, b = a.clamp(min=0), b.clamp(min=0)
        a, b, total = (self.number(x, first) for x in (a, b, torch.cat([*total, carry], dim=1)))
        return [a, '+', b, '=', total, '.']

    def number(self, x, first):
        """Digits [n, k], lowest first, as the options want them."""
        if self.hints:
            letter = LETTERS + first + torch.arange(x.shape[1], device=x.device)
            x = torch.stack([torch.where(x < 0, -1, letter), x], dim=2)     # (n, k, 2)
        x = x if self.reversed else x.flip(1)
        return x.flatten(1)


class MultiplicationCoT(Characters):
    """Long multiplication by the distributive law, without the product, as in the paper's example.
    For each digit of b, from the highest: the digit, *, and a pair for it (+1) and for each lower
    digit (+0). `length`: digits of b. a's number is uniform on 1..length; no leading zeros.
    >>> example('multiplication_cot', 4)
    '9x1613=9x[1*(1+1)(6+0)(1+0)(3+0)+6*(6+1)(1+0)(3+0)+1*(1+1)(3+0)+3*(3+1)].'
    """
    def inputs(self, n, length, draw):
        a = number(n, length, draw, 1 + draw.integers(length, n, 1))
        b = number(n, length, draw, length)
        return a.flip(1), b.flip(1)

    def write(self, a, b):
        digits_of_b = b.split(1, dim=1)
        terms = []
        for i, digit in enumerate(digits_of_b):
            terms += ['+' if i else '', digit, '*(', digit, '+1)']
            for lower in digits_of_b[i + 1:]:
                terms += ['(', lower, '+0)']
        return [a, 'x', b, '=', a, 'x[', *terms, '].']


def number(n, length, draw, size):
    """Digits [n, length] of n numbers, lowest first, -1 beyond `size` (int or [n, 1]) digits."""
    x = draw.integers(10, n, length)
    highest = 1 + draw.integers(9, n, length)
    t = torch.arange(length, device=draw.device)
    x = torch.where((t == size - 1) & (size > 1), highest, x)  # no leading zeros
    return torch.where(t >= size, -1, x)


# --------------------------------------------------------------------------------------------------
# data sets of commands and answers in words: SCAN here, CFQ in engine/data.py

PARTS = ('train', 'val', 'test')


class Pairs(Task):
    """A fixed data set in parts. A subclass gives texts(part), [(length, text)]. marks[0] ends the
    command, marks[1] the answer, which is supervised."""
    fixed = True
    end = EOS
    marks = ('EoI', 'EoS')  # tokens EOI and EOS, whatever they are called

    @functools.cached_property
    def vocab(self):
        words = set(' '.join(text for part in PARTS for _, text in self.texts(part)).split())
        return ['<pad>', 'BoS', *self.marks, *sorted(words - {'BoS', *self.marks})]

    @functools.cached_property
    def rows(self):
        """{part: {length: (tokens, targets)}}."""
        index = {word: i for i, word in enumerate(self.vocab)}
        sets = {part: {} for part in PARTS}
        for part in PARTS:
            rows = collections.defaultdict(list)
            for length, text in self.texts(part):
                rows[length].append(torch.tensor([index[word] for word in text.split()]))
            for length in sorted(rows):
                tokens = pad_sequence(rows[length], batch_first=True, padding_value=PAD)
                mark = (tokens == EOI).long().argmax(dim=1, keepdim=True)
                sets[part][length] = tokens, supervise(tokens, mark + 1)
        return sets

    def find(self, length, *parts):
        """(tokens, targets) of a length in the first of the parts that has it."""
        for part in parts:
            if length in self.rows[part]:
                return self.rows[part][length]
        self.refuse(length, sorted(set().union(*self.rows.values())))

    def sample(self, n, length, generator=None):
        """n training problems of a length, with replacement; of val or test where it has none."""
        tokens, targets = self.find(length, *PARTS)
        draw = Draw(generator)
        i = draw.integers(len(tokens), n).cpu()
        return tokens[i].to(draw.device), targets[i].to(draw.device)

    def pool(self, n, length, generator):
        return [x.to(Draw(generator).device) for x in self.rows['train'][length]]

    def held_out(self, split, n, lengths, generator):
        """Validation (split='eval') or test problems; where a length has none, of other parts."""
        order = ('val', 'test', 'train') if split == 'eval' else ('test', 'val', 'train')
        sets = {}
        for length in lengths:
            tokens, targets = self.find(length, *order)
            i = torch.randperm(len(tokens), generator=generator(length))[:n]
            sets[length] = tokens[i], targets[i]
        return sets

    def existing(self, lengths, part):
        parts = [part] if part else PARTS
        return [n for n in lengths if any(n in self.rows[p] for p in parts)]

    def count(self, lengths):
        return sum(len(self.rows['train'][n][0]) for n in lengths)

    def width(self, lengths):
        return max(self.rows[part][n][0].shape[1]
                   for part in PARTS for n in lengths if n in self.rows[part])


@functools.cache
def scan():
    """SCAN's grammar (Lake & Baroni 2018): {clause: actions}, {phrase: its clauses} and
    {command: actions}. The clauses of 'walk left twice' are ['walk left', 'walk left']."""
    verbs = {'walk': 'I_WALK', 'look': 'I_LOOK', 'run': 'I_RUN', 'jump': 'I_JUMP'}
    clauses = dict(verbs)
    for direction, turn in (('left', 'I_TURN_LEFT'), ('right', 'I_TURN_RIGHT')):
        for verb, act in [('turn', ''), *verbs.items()]:
            step = f'{turn} {act}'.strip()
            clauses[f'{verb} {direction}'] = step
            clauses[f'{verb} opposite {direction}'] = f'{turn} {step}'
            clauses[f'{verb} around {direction}'] = ' '.join([step] * 4)
    phrases, commands = {}, {}
    for clause in clauses:
        for n, times in enumerate(('', ' twice', ' thrice'), 1):
            phrases[clause + times] = [clause] * n
            commands[clause + times] = ' '.join([clauses[clause]] * n)
    for x in phrases:
        for y in phrases:
            commands[f'{x} and {y}'] = f'{commands[x]} {commands[y]}'
            commands[f'{x} after {y}'] = f'{commands[y]} {commands[x]}'
    return clauses, phrases, commands


def scan_pairs(split='length', part='train'):
    """[(command, actions)] of SCAN's 20,910, for part 'train' or 'test' of a split.
    length: at most 22 actions (16,990), and 24 to 48 (3,920). simple: a random 80 % (16,728), and
    the rest (4,182); the published files are another draw."""
    if split not in ('length', 'simple') or part not in ('train', 'test'):
        raise ValueError(f'SCAN splits are length and simple, parts train, test: {split}, {part}')
    pairs = list(scan()[2].items())
    train = part == 'train'
    if split == 'length':
        return [pair for pair in pairs if (len(pair[1].split()) <= 22) == train]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[i] for i in (order[:16728] if train else order[16728:])]


class SCAN(Pairs):
    """SCAN, a command and its actions (Lake & Baroni 2018). `length`: actions.
    scan is split by length, 1 to 22 in training and 24 to 48 in the test; scan_simple at random.
    >>> example('scan', 4)
    'BoS look right and run left EoI I_TURN_RIGHT I_LOOK I_TURN_LEFT I_RUN EoS'
    """
    def __init__(self, simple=False):
        self.split = 'simple' if simple else 'length'

    def texts(self, part):
        pairs = scan_pairs(self.split, part) if part != 'val' else []
        return [(len(actions.split()), self.text(command, actions)) for command, actions in pairs]

    def text(self, command, actions):
        return f'BoS {command} EoI {actions} EoS'


class SCANCoT(SCAN):
    """SCAN with a chain of thought (PRISM Table 4), split by length. `length`: the actions in SCAN.
    twice and thrice are written out, then the actions of every clause, in the order of execution.
    >>> example('scan_cot', 3)
    'jump and look twice = jump and look + look → jump : I_JUMP look : I_LOOK look : I_LOOK .'
    """
    marks = ('=', '.')

    def text(self, command, actions):
        actions_of, clauses_of, _ = scan()
        conjunction = ' after ' if ' after ' in command else ' and '
        halves = [clauses_of[phrase] for phrase in command.split(conjunction)]
        plan = conjunction.join(' + '.join(clauses) for clauses in halves)
        if conjunction == ' after ':
            halves.reverse()
        steps = ' '.join(f'{clause} : {actions_of[clause]}' for half in halves for clause in half)
        return f'{command} = {plan} → {steps} .'


# --------------------------------------------------------------------------------------------------
# recall and state tracking, the tests of encodings after 2023

class FlipFlop(Task):
    """Recall what was written last (Liu et al. 2023). w writes a bit, i is to be ignored, r reads.
    `length`: instructions; only the bits after r are supervised. Option `ignore`: percent of i.
    >>> example('flip_flop', 5)
    'w 1 i 0 i 0 r 1 r 1'
    """
    vocab = ['<pad>', 'w', 'i', 'r', '0', '1']
    min_length = 2

    def __init__(self, ignore=80):
        if ignore > 100:
            raise ValueError(f'flip_flop:ignore is a percentage, not {ignore}')
        self.ignore = ignore

    def problems(self, n, length, draw):
        write, ignore, read, zero = 1, 2, 3, 4
        what = torch.where(draw.integers(2, n, length) == 1, write, read)
        what[draw.integers(100, n, length) < self.ignore] = ignore
        what[:, 0], what[:, -1] = write, read
        bit = draw.integers(2, n, length)
        t = torch.arange(length, device=draw.device)
        last_write = torch.where(what == write, t, 0).cummax(dim=1).values
        bit = torch.where(what == read, bit.gather(1, last_write), bit)
        tokens = torch.stack([what, bit + zero], dim=2).flatten(1)      # [n, 2 length]
        return tokens, torch.where(tokens == read, tokens.roll(-1, dims=1), -100)


class Group(Task):
    """State tracking (Merrill et al. 2024): token t is a group's element x_t, its label x_1 .. x_t,
    without a chain of thought. `length`: elements, uniform. Option `name`: s2 to s5 or a3 to a5,
    permutations, the left factor first; z2 to z99, sums mod n. Without the start symbol, attention
    that sees distances alone could not tell `x x` from `x`: it averages equal values.
    >>> example('group:name=s3', 5)
    '^ 102 120 210 012 021'
    """
    labels = True

    def __init__(self, name='s5'):
        kind, n = name[0], int(name[1:]) if name[1:].isdecimal() else 0
        if not 2 + (kind == 'a') <= n <= dict(s=5, a=5, z=99).get(kind, 0):
            raise ValueError(f'group:name is s2 to s5, a3 to a5 or z2 to z99, not {name!r}')
        if kind == 'z':
            elements = range(n)
            self.table = (torch.arange(n)[:, None] + torch.arange(n)) % n
        else:
            elements = [p for p in itertools.permutations(range(n)) if kind == 's' or is_even(p)]
            products = [[elements.index(tuple(b[i] for i in a)) for b in elements]
                        for a in elements]
            self.table = torch.tensor(products)     # table[a, b]: a, then b
            elements = [''.join(map(str, p)) for p in elements]
        self.vocab = ['<pad>', '^', *map(str, elements)]

    def problems(self, n, length, draw):
        x = draw.integers(len(self.table), n, length)
        table = self.table.to(draw.device)
        products = [x[:, 0]]
        for t in range(1, length):
            products.append(table[products[-1], x[:, t]])
        labels = pad(torch.stack(products, dim=1) + 2, (1, 1), value=-100)
        return pad(pad(x + 2, (1, 0), value=1), (0, 1)), labels         # padding ends a problem


def is_even(permutation):
    """Whether it is an even number of swaps."""
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


class Recall(Task):
    """Base of tasks in which keys have values. Options `keys`: how many; `words`: how many
    different ones there are of keys, of values and of noise. `length`: pairs of tokens, of key and
    value or of noise."""
    least = 1       # slots for each key

    def __init__(self, keys=4, words=64):
        if not 1 <= words <= 10000:
            raise ValueError(f'words must be 1 to 10000, not {words}')
        if not 1 <= keys <= words:
            raise ValueError(f'keys must be 1 to {words}, the words, not {keys}')
        self.keys, self.words = keys, words
        self.min_length = self.least * keys
        self.vocab = ['<pad>', *(f'{kind}{i}' for kind in ('key', 'value', 'noise')
                                 for i in range(words))]

    def pairs(self, n, draw):
        """Different keys, each with a value [n, keys, 2]."""
        keys = draw.permutation(n, self.words)[:, :self.keys]
        values = draw.integers(self.words, n, self.keys) + self.words
        return torch.stack([keys, values], dim=2) + 1

    def hide(self, pairs, size, draw):
        """The pairs in any order among noise: tokens [n, 2 size], and where values are."""
        n = len(pairs)
        slots = draw.integers(self.words, n, size, 2) + 2 * self.words + 1
        place = draw.permutation(n, size)[:, :self.keys, None].expand(-1, -1, 2)
        tokens = slots.scatter(1, place, pairs).flatten(1)
        return tokens, (tokens > self.words) & (tokens <= 2 * self.words)


class MQAR(Recall):
    """Multi-query associative recall (Arora et al. 2023): all pairs, then each again among noise.
    Only the values are supervised, and only there.
    >>> example('mqar:keys=2:words=9', 6)
    'key2 value0 key3 value8 key2 value0 noise3 noise1 noise2 noise0 key3 value8'
    """
    least = 2

    def problems(self, n, length, draw):
        pairs = self.pairs(n, draw)
        asked, value = self.hide(pairs, length - self.keys, draw)
        tokens = torch.cat([pairs.flatten(1), asked], dim=1)
        value = pad(value, (2 * self.keys, 0))
        return tokens, torch.where(value, tokens, -100).roll(-1, dims=1)


class Needle(Recall):
    """Pairs of key and value among noise, then a key, whose value is asked. (RULER's single and
    multiple keys in a haystack, Hsieh et al. 2024.)
    >>> example('needle:keys=2:words=9', 6)
    'noise2 noise6 noise3 noise1 noise2 noise0 noise0 noise5 key2 value0 key3 value8 key2 value0'
    """
    def problems(self, n, length, draw):
        pairs = self.pairs(n, draw)
        tokens = torch.cat([self.hide(pairs, length, draw)[0], pairs[:, 0]], dim=1)
        return tokens, supervise(tokens, 2 * length + 1)


# --------------------------------------------------------------------------------------------------
# names, and the program

TASKS = {'copy': Copy(), 'parity': Parity(), 'polynomial': Polynomial(), 'product': Product(),
         'count': Count(), 'reverse': Reverse(), 'mode': Mode(), 'sort': Sort(),
         'indirect_indexing': IndirectIndexing(),
         'distance': Distance(), 'trigger_count': TriggerCount(), 'distance_sum': DistanceSum(),
         'string_copy': StringCopy(), 'string_reverse': StringReverse(), 'odds_first': OddsFirst(),
         'bucket_sort': BucketSort(),
         'stack': Stack(), 'dyn_str_cpy': DynStrCpy(), 'flip_flop': FlipFlop(), 'group': Group(),
         'mqar': MQAR(), 'needle': Needle(), 'addition': Addition(),
         'copy_repeated': CopyRepeated(), 'copy_varied': CopyVaried(),
         'reverse_words': ReverseWords(), 'even_pairs': EvenPairs(),
         'cycle_navigation': CycleNavigation(), 'modular_arithmetic': ModularArithmetic(),
         'missing_duplicate': MissingDuplicate(),
         'addition_cot': AdditionCoT(), 'multiplication_cot': MultiplicationCoT(),
         'scan': SCAN(), 'scan_simple': SCAN(simple=True), 'scan_cot': SCANCoT()}


def known():
    """{name: task} of TASKS and of what engine/data.py reads from files."""
    from engine.data import READERS  # here, because its classes build on this file's
    return TASKS | READERS


@functools.cache
def make(name, data=''):
    """The task of a name and its options, as in 'parity' or 'indirect_indexing:letters=12:shift=2',
    and for one that reads files, of the path `data`. ValueError if there is none."""
    base, *options = name.split(':')
    if base not in known():
        raise ValueError(f'unknown task {base!r}. There are: {", ".join(known())}')
    task = known()[base]
    if task.needs and not data:
        raise DataError(f'{base} reads files: give --data=PATH, {task.needs}')
    if data and not task.needs:
        raise DataError(f'{base} reads no files: leave --data={data} out')
    if options or data:
        takes = options_of(task)
        given = dict(re.findall(r'(\w+)=([^:]+)', name))
        if [f'{k}={v}' for k, v in given.items()] != options or given.keys() - takes.keys():
            raise ValueError(f'{name!r} has options that {base} does not know: it has '
                             f'{", ".join(takes) or "none"}, written as in polynomial:p=7')
        for key, value in given.items():
            kind = type(takes[key])
            if not (kind is str or value.isdecimal() and (kind is int or value in ('0', '1'))):
                wants = '0 or 1' if kind is bool else 'a whole number'
                raise ValueError(f'{base}:{key} must be {wants}, not {value}')
            given[key] = value if kind is str else kind(int(value))
        task = type(task)(**given)
    task.name, task.data = name, data
    return task


def options_of(task):
    """{option: its default} of what may follow a task's name; True and False are switches."""
    takes = inspect.signature(type(task)).parameters
    return {name: parameter.default for name, parameter in takes.items()}


def example(name, length):
    """The first problem of that task and length from seed 0, as text."""
    tokens, _ = make(name).sample(1, length, torch.Generator().manual_seed(0))
    return make(name).decode(tokens[0])


@dataclass
class Arguments:
    """The flag of python tasks.py."""
    data: str = ''  # the file or folder that the task reads, if it reads any


def main(argv):
    """List the tasks, or print examples of one."""
    from engine.config import check_name, parse, print_help, wants_help
    if wants_help(argv):
        return print_help(__doc__, Arguments)
    flags, words = parse(Arguments, argv)
    if not words:
        for name, task in known().items():
            says = ' '.join(type(task).__doc__.partition('>>>')[0].split())
            sentence = re.split(r'(?<!al)\. ', says + ' ')[0]
            print(f'{name:18} {sentence}.')
        return print('\npython tasks.py NAME [LENGTH] [--data=PATH] prints examples')
    name, *rest = words
    check_name('task', name.partition(':')[0], known())
    task = make(name, **flags)
    if len(rest) > 1 or rest and not rest[0].isdigit():
        raise ValueError(f'python tasks.py {name} takes a length, not {" ".join(rest)}')
    default = 64 if task.corpus else max(5, task.min_length)
    length = int(rest[0]) if rest else default
    tokens, targets = task.sample(5, length)
    print(inspect.getdoc(task).partition('>>>')[0].strip())
    options = [f'{key}={value:d}' if type(value) is bool else f'{key}={value}'
               for key, value in options_of(task).items()]
    if options:
        print('options, here with their defaults: ' + ':'.join([name.partition(':')[0], *options]))
    print(f'\nvocabulary of {len(task.vocab)}; length {length}, {tokens.shape[1]} tokens\n')
    for row, target in zip(tokens, targets):
        answer = 'all but the first' if task.corpus else task.decode(target[target != -100])
        print(f'{task.decode(row)}\n    predicted: {answer}')


if __name__ == '__main__':
    from engine import config
    from tasks import main  # engine/data.py imports this file by its name: run that copy
    config.run(main, ValueError)
