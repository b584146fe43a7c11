"""Every task, one small class each: synthetic ones, generated in batches on whatever device the generator lives on; SCAN and CFQ; and corpora.

    python tasks.py                                 lists the tasks
    python tasks.py parity 5                        prints examples of parity at length 5
    python tasks.py jsb 64 --data=Jsb16thSeparated.json
    python tasks.py scan_cot lengths                how long the problems of a data set are

A task has `vocab` (token strings; index 0 is the padding), `end` (the end token's index, or None where the answer is one class),
`sample(n, length, generator) -> (tokens, targets)`, both [n, T] int64, and `decode(row)`. tokens is the whole sequence with its
answer; targets[t] = tokens[t+1] where the answer is to be predicted and -100 elsewhere. To add a task, write a class and name it in TASKS.
"""
import collections
import difflib
import functools
import inspect
import math
import re
import signal
import string
import sys

import torch

PAD, BOS, EOI, EOS = range(4)                                   # every task that has them has them here


class DataError(ValueError):
    """Data that are not there, or not what the task reads; problems that a task does not have."""


class Task:
    """Base of all tasks: drawing numbers, turning tokens into targets, and printing them."""
    separator = ' '
    end = None
    min_length = 1
    max_length = None                                           # None: any
    corpus = False                                              # next-token prediction: judged by its loss
    needs = data = ''                                           # what --data has to be, where a task is read from files; what it is
    own_vocab = False                                           # the vocabulary comes from the data

    def sample(self, n, length, generator=None):
        """n problems of the given length -> (tokens, targets), both [n, T] int64. DataError if the task has no such length."""
        if length < self.min_length or (self.max_length and length > self.max_length):
            raise DataError(f'{type(self).__name__} problems have lengths from {self.min_length}'
                             + (f' to {self.max_length}' if self.max_length else '') + f', not {length}')
        return self.problems(n, length, Draw(generator))

    def pool(self, n, length, generator):
        """What an epoch of training has of a length: n problems; a data set's, all of them."""
        return self.sample(n, length, generator)

    def held_out(self, split, n, lengths, generator):
        """{length: (tokens, targets)} to evaluate on, n problems of each or as many as there are; generator: length -> its random generator."""
        return {length: self.sample(n, length, generator(length)) for length in lengths}

    def existing(self, lengths, part):
        """Those of the lengths that the task has for training (part='train') or at all."""
        return lengths

    def count(self, lengths):
        """Training problems of these lengths in all, None if they never end."""

    def width(self, lengths):
        """Tokens of the longest sequence with these problem lengths."""
        return max(self.sample(1, length, torch.Generator())[0].shape[1] for length in (min(lengths), max(lengths)))

    def decode(self, row):
        """A row of token indices as text, without the padding."""
        return self.separator.join(self.vocab[i] for i in row.tolist() if i != PAD)

    def encode(self, text):
        """The token indices of a text [T]. DataError if it has what is not in the vocabulary."""
        words = text.split() if self.separator else list(text)
        if unknown := sorted(set(words) - set(self.vocab[1:])):
            raise DataError(f'{" ".join(unknown)!r} is not in the vocabulary of this task, which has {" ".join(self.vocab[1:33])!r}' + ' ...' * (len(self.vocab) > 33))
        return torch.tensor([self.vocab.index(word) for word in words], dtype=torch.int64)


class Draw:
    """Random numbers from one generator, on its device."""
    def __init__(self, generator):
        self.g = generator
        self.device = generator.device if generator is not None else 'cpu'

    def integers(self, high, *shape):
        """Uniform on 0..high-1; high an int, or a tensor that broadcasts to shape."""
        if isinstance(high, int):
            return torch.randint(high, shape, generator=self.g, device=self.device)
        return torch.minimum((torch.rand(shape, generator=self.g, device=self.device, dtype=torch.float64) * high).long(), high - 1)

    def permutation(self, n, size):
        """n random orders of 0..size-1 [n, size]."""
        return torch.rand(n, size, generator=self.g, device=self.device).argsort(dim=1)


def supervise(tokens, start):
    """targets [n, T] of tokens [n, T]: predict every token from index `start` (an int, or [n, 1]) on; padding is not predicted."""
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    at = torch.arange(tokens.shape[1], device=tokens.device)
    return targets.masked_fill((at + 1 < start) | (targets == PAD), -100)


# ---------------------------------------------------------------------------------------------------------------------
# vipe.txt: BoS x_1..x_L EoI s_1..s_m EoS, the states and EoS supervised

class Iterative(Task):
    """BoS x_1..x_L EoI s_1..s_m EoS (ViPE section 2); a subclass says what x and s are. `length` is L."""
    end = EOS

    def __init__(self, symbols):
        self.vocab = ['<pad>', 'BoS', 'EoI', 'EoS', *map(str, symbols)]

    def problems(self, n, length, draw):
        x, s = self.inputs_and_states(n, length, draw)          # (n, L), (n, m), indices into the symbols
        mark = lambda token: torch.full((n, 1), token, device=x.device)
        tokens = torch.cat([mark(BOS), x + 4, mark(EOI), s + 4, mark(EOS)], dim=1)
        return tokens, supervise(tokens, x.shape[1] + 2)


class Copy(Iterative):
    """Binary copy, s_t = x_t (ViPE Table 3).

    >>> example('copy', 5)
    'BoS 0 1 1 0 1 EoI 0 1 1 0 1 EoS'
    """
    def __init__(self):
        super().__init__(range(2))

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(2, n, length)
        return x, x


class Parity(Iterative):
    """Running parity, s_1 = x_1, s_t = (s_(t-1) + x_t) mod 2 (ViPE Table 3).

    >>> example('parity', 5)
    'BoS 0 1 1 0 1 EoI 0 1 0 0 1 EoS'
    """
    def __init__(self):
        super().__init__(range(2))

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(2, n, length)
        return x, x.cumsum(dim=1) % 2


class Polynomial(Iterative):
    """Polynomial iteration, s_1 = x_1, s_t = (s_(t-1) x_t + 1) mod p, p = 5 (ViPE Table 3).

    >>> example('polynomial', 5)
    'BoS 4 4 3 0 3 EoI 4 2 2 1 4 EoS'
    """
    def __init__(self, p=5):
        if p < 2:
            raise ValueError(f'polynomial needs a modulus p >= 2, not {p}')
        super().__init__(range(p))
        self.p = p

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(self.p, n, length)
        states = [x[:, 0]]
        for t in range(1, length):
            states.append((states[-1] * x[:, t] + 1) % self.p)
        return x, torch.stack(states, dim=1)


class Count(Iterative):
    """Count from the first number to the second (Zhou et al. 2023; ViPE names the task without defining it). `length`: how many numbers.

    The start is uniform, so that short problems show every number that long ones need.

    >>> example('count', 4)
    'BoS 44 47 EoI 44 45 46 47 EoS'
    """
    max_length = 128

    def __init__(self):
        super().__init__(range(self.max_length))

    def inputs_and_states(self, n, length, draw):
        s = draw.integers(self.max_length + 1 - length, n, 1) + torch.arange(length, device=draw.device)
        return s[:, [0, -1]], s


class Reverse(Iterative):
    """The input backwards, s_t = x_(L+1-t), digits 0-9 (ViPE names the task without defining it).

    >>> example('reverse', 5)
    'BoS 4 9 3 0 3 EoI 3 0 3 9 4 EoS'
    """
    def __init__(self):
        super().__init__(range(10))

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(10, n, length)
        return x, x.flip(1)


class Mode(Iterative):
    """The most frequent of the letters a-j, which is always unique (Zhou et al. 2023; ViPE names the task without defining it).

    Letters are uniform; where several tie, one of them, drawn at random, takes over one place of another.

    >>> example('mode', 7)
    'BoS e d d a d j h EoI d EoS'
    """
    def __init__(self):
        super().__init__('abcdefghij')

    def inputs_and_states(self, n, length, draw):
        x = draw.integers(10, n, length)
        counts = (x[:, :, None] == torch.arange(10, device=x.device)).sum(dim=1)        # (n, 10)
        tied = counts == counts.amax(dim=1, keepdim=True)
        priority = draw.permutation(n, 10).masked_fill(~tied, -1)
        mode, second = priority.topk(2, dim=1).indices.unbind(dim=1)                    # (n,), (n,)
        place = (x == second[:, None]).int().argmax(dim=1)                              # where the second first stands
        row = torch.arange(n, device=x.device)
        x[row, place] = torch.where(tied.sum(dim=1) > 1, mode, x[row, place])
        return x, mode[:, None]


class Sort(Iterative):
    """Numbers 0-99, all different, in ascending order (Zhou et al. 2023; ViPE names the task without defining it).

    >>> example('sort', 5)
    'BoS 83 94 12 35 43 EoI 12 35 43 83 94 EoS'
    """
    max_length = 100

    def __init__(self):
        super().__init__(range(100))

    def inputs_and_states(self, n, length, draw):
        x = draw.permutation(n, 100)[:, :length]
        return x, x.sort(dim=1).values


# ---------------------------------------------------------------------------------------------------------------------
# pope.txt

class IndirectIndexing(Task):
    """Find the letter at a given shift from a given letter (PoPE A.1). `length`: letters in the source, 20 to 40 in the paper.

    The source is drawn without replacement from A-Z, a-z; the shift is uniform on those in -15..+15 that stay inside it. One token a
    letter, digit, sign or comma; only the last letter is supervised. Shifts of one digit leave a padding token at the end.
    A smaller problem, for a CPU: the first `letters` of the alphabet and shifts of at most `shift`, as in indirect_indexing:letters=12:shift=2.

    >>> example('indirect_indexing', 20)
    'MjrbCDsiSNgcktphwTOe, t, -3, g'
    """
    separator = ''
    max_length = 52

    def __init__(self, letters=52, shift=15):
        if not 1 <= letters <= 52 or not 0 <= shift < 100:
            raise ValueError(f'indirect_indexing has 1 to 52 letters and shifts from 0 to 99, not {letters} and {shift}')
        self.max_length, self.max_shift = letters, shift
        self.vocab = ['<pad>', ',', '+', '-', *string.digits, *(string.ascii_uppercase + string.ascii_lowercase)[:letters]]

    def problems(self, n, length, draw):
        comma, plus, minus, digit, letter = 1, 2, 3, 4, 14
        source = draw.permutation(n, self.max_length)[:, :length] + letter
        i = draw.integers(length, n, 1)
        low, high = (-i).clamp(min=-self.max_shift), (length - 1 - i).clamp(max=self.max_shift)
        shift = low + draw.integers(high - low + 1, n, 1)
        size, column = shift.abs(), torch.full_like(shift, comma)
        query = [column, source.gather(1, i), column, torch.where(shift < 0, minus, plus)]
        target = source.gather(1, i + shift)
        one = torch.cat([source, *query, size + digit, column, target, torch.full_like(i, PAD)], dim=1)
        two = torch.cat([source, *query, size // 10 + digit, size % 10 + digit, column, target], dim=1)
        tokens = torch.where(size < 10, one, two)                                       # (n, L + 8)
        return tokens, supervise(tokens, length + 6 + (size >= 10).long())

    def decode(self, row):
        return super().decode(row).replace(',', ', ')


# ---------------------------------------------------------------------------------------------------------------------
# toeplitz.txt: x_1..x_L ? class, the class supervised; a vocabulary of 574, classes included

class Classification(Task):
    """x_1..x_L, a query token, and a class to predict there; background tokens are uniform. `length` is L (128 in the paper)."""
    query, first_class, classes, triggers = 1, 2, 32, 0

    def __init__(self):
        names = [f'trigger{i}' for i in range(self.triggers)]
        used = 2 + self.classes + self.triggers
        self.vocab = ['<pad>', '?', *[f'class{i}' for i in range(self.classes)], *names, *[f'w{i}' for i in range(574 - used)]]
        self.first_trigger, self.first_word = 2 + self.classes, used

    def problems(self, n, length, draw):
        words = draw.integers(574 - self.first_word, n, length) + self.first_word
        words, label = self.place(words, draw)                                          # (n, L), (n, 1)
        tokens = torch.cat([words, torch.full_like(label, self.query), label + self.first_class], dim=1)
        return tokens, supervise(tokens, length + 1)


class Distance(Classification):
    """Task 1: how far apart are the two triggers? (Toeplitz study 4.1). 32 classes, class = |i - j| // 4, distances uniform on 1..127.

    Both orders of the two triggers occur. Where length > 128 the distances stay below 128, so that a model trained at 128 has seen every class.
    distance:span=16 is for training at 16: distances stay below 16, class = 32 |i - j| // 16.

    >>> example('distance', 9)
    'w410 w225 w167 trigger0 w495 w299 w81 trigger1 w247 ? class1'
    """
    triggers, min_length = 2, 2

    def __init__(self, span=128):
        super().__init__()
        if span < 2:
            raise ValueError(f'distances are from 1 to span - 1: span must be at least 2, not {span}')
        self.span = span

    def place(self, words, draw):
        n, length = words.shape
        d = 1 + draw.integers(min(length, self.span) - 1, n, 1)
        i = draw.integers(length - d, n, 1)
        which = draw.integers(2, n, 1)
        words.scatter_(1, torch.cat([i, i + d], dim=1), self.first_trigger + torch.cat([which, 1 - which], dim=1))
        return words, d * self.classes // self.span


class TriggerCount(Classification):
    """Task 2: how many tokens are triggers? (Toeplitz study 4.1). 20 trigger words; 32 classes, the count uniform on 0..31.

    trigger_count:most=16 is for training at 16: counts stay at most 16 in longer problems too, so that every one has been trained.

    >>> example('trigger_count', 9)
    'trigger13 w119 w53 w120 trigger14 trigger4 w107 w103 w17 ? class3'
    """
    triggers = 20

    def __init__(self, most=31):
        super().__init__()
        if not 1 <= most < self.classes:
            raise ValueError(f'counts are from 0 to most: most must be from 1 to {self.classes - 1}, not {most}')
        self.most = most

    def place(self, words, draw):
        n, length = words.shape
        count = draw.integers(min(length, self.most) + 1, n, 1)
        chosen = draw.permutation(n, length) < count                                    # count places of each row
        return torch.where(chosen, self.first_trigger + draw.integers(20, n, length), words), count


class DistanceSum(Classification):
    """Sum of two trigger distances (Toeplitz study, appendix E): triggers 0, 1 and triggers 2, 3; class = (|i-j| + |k-l|) // 8, 32 classes.

    Each distance is uniform on 1..127 (below the length), given that the four places differ. Where length > 128 they stay below 128.
    distance_sum:span=16 is for training at 16: each distance stays below 16, and the class is the sum.

    >>> example('distance_sum', 9)
    'w468 trigger3 w237 w160 w51 w67 trigger0 trigger2 trigger1 ? class1'
    """
    triggers, min_length = 4, 4

    def __init__(self, span=128):
        super().__init__()
        if span < 4:
            raise ValueError(f'four places have distances up to 3 at least: span must be at least 4, not {span}')
        self.span = span

    def place(self, words, draw):
        n, length = words.shape
        pairs = self.pairs(n, length, draw)                                             # (n, 4)
        while (clash := (pairs[:, :2, None] == pairs[:, None, 2:]).flatten(1).any(dim=1)).any():
            pairs = torch.where(clash[:, None], self.pairs(n, length, draw), pairs)
        flip = draw.integers(2, n, 2)                                                   # which of a pair comes first
        order = torch.stack([flip[:, 0], 1 - flip[:, 0], 2 + flip[:, 1], 3 - flip[:, 1]], dim=1)
        words.scatter_(1, pairs, self.first_trigger + order)
        return words, (pairs[:, 1:2] - pairs[:, 0:1] + pairs[:, 3:4] - pairs[:, 2:3]) * self.classes // (2 * self.span)

    def pairs(self, n, length, draw):
        d = 1 + draw.integers(min(length, self.span) - 1, n, 2)
        i = draw.integers(length - d, n, 2)
        return torch.stack([i, i + d], dim=2).flatten(1)                                # i, j, k, l


# ---------------------------------------------------------------------------------------------------------------------
# prism.txt (Tables 3 and 4): prompt=answer. in characters, everything right of "=" supervised, "." the end

CHARACTERS = ['<pad>', *'0123456789+=,→.x[]()*']
CHARACTERS += [f'<unused{i}>' for i in range(64 - len(CHARACTERS))]                     # the paper's vocabulary of 64 for all of them


class Characters(Task):
    """prompt=answer. A subclass draws its inputs and writes them down; digits [n, k] have -1 where a number has no digit."""
    vocab = CHARACTERS
    end = CHARACTERS.index('.')
    separator = ''

    def problems(self, n, length, draw):
        tokens = close_up(self.write(*self.inputs(n, length, draw)))
        return tokens, supervise(tokens, (tokens == CHARACTERS.index('=')).long().argmax(dim=1, keepdim=True) + 1)

    def inputs(self, n, length, draw):
        return draw.integers(10, n, length),


def chars(text, like):
    """The tokens of a text, the same in every row [n, len(text)] of `like` [n, ..]."""
    return torch.tensor([CHARACTERS.index(c) for c in text], dtype=torch.int64, device=like.device).expand(len(like), -1)


def digits(x):
    """The tokens of digits; -1, no digit, stays -1."""
    return torch.where(x < 0, x, x + 1)


def close_up(tokens):
    """Move the holes, -1, of every row to its end, where they are padding."""
    order = (tokens < 0).byte().argsort(dim=1, stable=True)
    return tokens.gather(1, order).clamp(min=PAD)


class StringCopy(Characters):
    """Copy a string of digits. `length` is its length.

    >>> written('string_copy', '8349216')
    '8349216=8349216.'
    """
    def write(self, x):
        return torch.cat([digits(x), chars('=', x), digits(self.answer(x)), chars('.', x)], dim=1)

    def answer(self, x):
        return x


class StringReverse(StringCopy):
    """Reverse a string of digits. `length` is its length.

    >>> written('string_reverse', '8349216')
    '8349216=6129438.'
    """
    def answer(self, x):
        return x.flip(1)


class OddsFirst(StringCopy):
    """The digits at odd places, then those at even ones, places counted from 0 as in the paper's example. `length` is the string's.

    >>> written('odds_first', '012345')
    '012345=135024.'
    """
    def answer(self, x):
        return torch.cat([x[:, 1::2], x[:, ::2]], dim=1)


class Stack(StringCopy):
    """A stack of 0 and 1, bottom first, then actions: 2 pops (nothing from an empty stack), 3 pushes 0, 4 pushes 1. The answer is what is left,
    top first, a 2, and zeros up to length + 1. `length` counts stack and actions; the stack's share is uniform on 1..length-1.

    >>> written('stack', '0110422')
    '0110422=11020000.'
    """
    def inputs(self, n, length, draw):
        size = 1 + draw.integers(max(1, length - 1), n, 1)
        first = torch.arange(length, device=size.device) < size
        return torch.where(first, draw.integers(2, n, length), 2 + draw.integers(3, n, length)),

    def answer(self, x):
        n, length = x.shape
        stack, depth = x.new_zeros(n, length + 1), x.new_zeros(n, 1)
        for t in range(length):
            action = x[:, t:t + 1]                                                      # 0 and 1 push themselves
            pop, bit = action == 2, torch.where(action > 2, action - 3, action)
            stack.scatter_(1, depth, torch.where(pop, stack.gather(1, depth), bit))
            depth = torch.where(pop, depth - 1, depth + 1).clamp(min=0)
        at = depth - 1 - torch.arange(length + 1, device=x.device)                      # (n, length + 1), from the top down
        return torch.where(at >= 0, stack.gather(1, at.clamp(min=0)), torch.where(at == -1, 2, 0))


class DynStrCpy(Characters):
    """The string from a digit on that occurs in it once; its place is uniform. `length` is the string's.

    >>> written('dyn_str_cpy', '5839472', '3')
    '5839472,3=39472.'
    """
    def inputs(self, n, length, draw):
        d, x = draw.integers(10, n, 1), draw.integers(9, n, length)
        x = x + (x >= d)                                                                # any digit but d
        return x.scatter(1, draw.integers(length, n, 1), d), d

    def write(self, x, d):
        copied = torch.where((x == d).cumsum(dim=1) > 0, digits(x), -1)
        return torch.cat([digits(x), chars(',', x), digits(d), chars('=', x), copied, chars('.', x)], dim=1)


class AdditionCoT(Characters):
    """Add two numbers written from the lowest digit up; each step of the chain of thought is digit of a, digit of b, carry out, digit of the sum.

    A number that has ended counts as 0; the sum has one digit more if the last carry is 1. `length` is the longer number's number of digits,
    the other's is uniform on 1..length; highest digits are not 0, except of one-digit numbers.

    >>> written('addition_cot', '829', '03')
    '829+03=8008,2305,9009→859.'
    """
    def inputs(self, n, length, draw):
        long, short = number(n, length, draw), number(n, length, draw, 1 + draw.integers(length, n, 1))
        swap = draw.integers(2, n, 1) == 1
        return torch.where(swap, short, long), torch.where(swap, long, short)

    def write(self, a, b):
        carry, parts, total = torch.zeros_like(a[:, :1]), [digits(a), chars('+', a), digits(b), chars('=', a)], []
        for t in range(a.shape[1]):
            d_a, d_b = a[:, t:t + 1].clamp(min=0), b[:, t:t + 1].clamp(min=0)
            carry, d = (d_a + d_b + carry) // 10, (d_a + d_b + carry) % 10
            parts += [digits(torch.cat([d_a, d_b, carry, d], dim=1)), chars(',→'[t == a.shape[1] - 1], a)]
            total.append(digits(d))
        return torch.cat([*parts, *total, digits(torch.where(carry == 1, 1, -1)), chars('.', a)], dim=1)


class MultiplicationCoT(Characters):
    """Long multiplication by the distributive law, the product itself not asked for: for each digit of b, from the highest, the digit, *, and
    a pair for it and each lower digit, which marks by 1 the digit itself and by 0 the places that it is shifted. As the paper's example has it.

    `length` is b's number of digits; a's is uniform on 1..length; highest digits are not 0, except of one-digit numbers.

    >>> written('multiplication_cot', '675', '1259')
    '675x1259=675x[1*(1+1)(2+0)(5+0)(9+0)+2*(2+1)(5+0)(9+0)+5*(5+1)(9+0)+9*(9+1)].'
    """
    def inputs(self, n, length, draw):
        return number(n, length, draw, 1 + draw.integers(length, n, 1)).flip(1), number(n, length, draw).flip(1)

    def write(self, a, b):
        parts, places = [digits(a), chars('x', a), digits(b), chars('=', a), digits(a), chars('x[', a)], b.shape[1]
        for i in range(places):
            parts += [chars('+' if i else '', a), digits(b[:, i:i + 1]), chars('*', a)]
            for j in range(i, places):
                parts += [chars('(', a), digits(b[:, j:j + 1]), chars('+1)' if i == j else '+0)', a)]
        return torch.cat([*parts, chars('].', a)], dim=1)


def number(n, length, draw, size=None):
    """Digits [n, length] of random numbers of `size` digits (all of them if None), lowest first, -1 beyond; the highest is 0 for one digit only."""
    at, size = torch.arange(length, device=draw.device), torch.full((n, 1), length, device=draw.device) if size is None else size
    x, highest = draw.integers(10, n, length), 1 + draw.integers(9, n, length)
    return torch.where(at >= size, -1, torch.where((at == size - 1) & (size > 1), highest, x))


def written(name, *numbers):
    """The problem of that task with those digits, as text."""
    size = max(map(len, numbers)) if name == 'addition_cot' else 0
    task = make(name)
    tokens = task.write(*(torch.tensor([[int(c) for c in x] + [-1] * (size - len(x))]) for x in numbers))
    return task.decode(close_up(tokens)[0])


# ---------------------------------------------------------------------------------------------------------------------
# data sets of commands and answers, in words: everything behind the marks[0] that ends the command is supervised, marks[1] is the end

PARTS = ('train', 'val', 'test')


class Pairs(Task):
    """A fixed data set in parts. A subclass gives texts(part), [(length, text)]; held_out() says what stands in for a part with nothing in it."""
    marks = ('EoI', 'EoS')

    @functools.cached_property
    def vocab(self):
        words = {word for part in PARTS for _, text in self.texts(part) for word in text.split()}
        return ['<pad>', 'BoS', *self.marks, *sorted(words - {'BoS', *self.marks})]

    @functools.cached_property
    def end(self):
        return self.vocab.index(self.marks[1])

    @functools.cached_property
    def rows(self):
        """{part: {length: (tokens, targets)}}."""
        index, found = {word: i for i, word in enumerate(self.vocab)}, {}
        for part in PARTS:
            by_length = collections.defaultdict(list)
            for length, text in self.texts(part):
                by_length[length].append([index[word] for word in text.split()])
            found[part] = {}
            for length, rows in sorted(by_length.items()):
                T = max(map(len, rows))
                tokens = torch.tensor([row + [PAD] * (T - len(row)) for row in rows])
                found[part][length] = tokens, supervise(tokens, (tokens == index[self.marks[0]]).long().argmax(dim=1, keepdim=True) + 1)
        return found

    def at(self, length, *parts):
        """(tokens, targets) of a length in the first of the parts that has it."""
        return next(self.rows[part][length] for part in parts if length in self.rows[part])

    def sample(self, n, length, generator=None):
        """n problems of the given length, drawn with replacement from the training part, from another where that has none."""
        if not self.existing([length], None):
            raise DataError(f'{type(self).__name__} has no problem of length {length}; there are {sorted({n for part in PARTS for n in self.rows[part]})}')
        tokens, targets = self.at(length, *PARTS)
        draw = Draw(generator)
        rows = draw.integers(len(tokens), n).cpu()
        return tokens[rows].to(draw.device), targets[rows].to(draw.device)

    def pool(self, n, length, generator):
        device = Draw(generator).device
        return tuple(x.to(device) for x in self.rows['train'][length])

    def held_out(self, split, n, lengths, generator):
        """Validation (split='eval') or test problems, the other kind where there is none, and training problems at lengths that neither has."""
        found, order = {}, ('val', 'test', 'train') if split == 'eval' else ('test', 'val', 'train')
        for length in lengths:
            tokens, targets = self.at(length, *order)
            rows = torch.randperm(len(tokens), generator=generator(length))[:n]
            found[length] = tokens[rows], targets[rows]
        return found

    def existing(self, lengths, part):
        return [n for n in lengths if any(n in self.rows[p] for p in ((part,) if part else PARTS))]

    def count(self, lengths):
        return sum(len(self.rows['train'][n][0]) for n in lengths)

    def width(self, lengths):
        return max(self.rows[part][n][0].shape[1] for part in PARTS for n in lengths if n in self.rows[part])


@functools.cache
def scan():
    """SCAN's grammar (Lake & Baroni 2018): ({clause: actions}, {command: actions}), texts. The first: without twice, thrice, and, after."""
    clauses = {'walk': 'I_WALK', 'look': 'I_LOOK', 'run': 'I_RUN', 'jump': 'I_JUMP'}
    for direction, turn in (('left', 'I_TURN_LEFT'), ('right', 'I_TURN_RIGHT')):
        for verb, act in [('turn', ''), *list(clauses.items())[:4]]:
            for how, actions in (('', [turn, act]), ('opposite ', [turn, turn, act]), ('around ', [turn, act] * 4)):
                clauses[f'{verb} {how}{direction}'] = ' '.join(filter(None, actions))
    phrases = {clause + times: ' '.join([actions] * n) for clause, actions in clauses.items() for times, n in (('', 1), (' twice', 2), (' thrice', 3))}
    commands = dict(phrases)
    for x, x_actions in phrases.items():
        for y, y_actions in phrases.items():
            commands[f'{x} and {y}'] = f'{x_actions} {y_actions}'
            commands[f'{x} after {y}'] = f'{y_actions} {x_actions}'
    return clauses, commands


def scan_pairs(split='length', part='train'):
    """[(command, actions)] of SCAN's 20,910. split: length (train: at most 22 actions, 16,990; test: 24 to 48, 3,920) or simple (80 % of all at
    random, 16,728, and 4,182; the published files are another draw). part: train or test.

    >>> len(scan_pairs('length', 'train')), len(scan_pairs('length', 'test'))
    (16990, 3920)
    >>> scan_pairs()[5]
    ('look thrice', 'I_LOOK I_LOOK I_LOOK')
    """
    if split not in ('length', 'simple') or part not in ('train', 'test'):
        raise ValueError(f'scan_pairs has the splits length and simple, and the parts train and test; not {split!r}, {part!r}')
    pairs = list(scan()[1].items())
    if split == 'length':
        return [(command, actions) for command, actions in pairs if (len(actions.split()) <= 22) == (part == 'train')]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[i] for i in (order[:16728] if part == 'train' else order[16728:])]


class SCAN(Pairs):
    """SCAN, a command and its actions (Lake & Baroni 2018). `length`: actions, 1 to 22 in training and 24 to 48 in the test of the length split.

    >>> example('scan', 4)
    'BoS look right and run left EoI I_TURN_RIGHT I_LOOK I_TURN_LEFT I_RUN EoS'
    """
    split = 'length'

    def texts(self, part):
        pairs = scan_pairs(self.split, part) if part != 'val' else []
        return [(len(actions.split()), self.text(command, actions)) for command, actions in pairs]

    def text(self, command, actions):
        return f'BoS {command} EoI {actions} EoS'


class SCANSimple(SCAN):
    """SCAN's simple split: 80 % of all commands at random for training, 20 % for the test. `length`: actions.

    >>> example('scan_simple', 2)
    'BoS run and run EoI I_RUN I_RUN EoS'
    """
    split = 'simple'


class SCANCoT(SCAN):
    """SCAN's length split with a chain of thought (prism.txt Table 4): twice and thrice written out, then the actions of every clause, in the order of
    execution. `length`: the actions in SCAN.

    >>> example('scan_cot', 3)
    'jump and look twice = jump and look + look → jump : I_JUMP look : I_LOOK look : I_LOOK .'
    >>> print(SCANCoT().text('run after turn left twice', ''))
    run after turn left twice = run after turn left + turn left → turn left : I_TURN_LEFT turn left : I_TURN_LEFT run : I_RUN .
    """
    marks = ('=', '.')

    def text(self, command, actions):
        first, *conjunction = re.split(' (and|after) ', command)
        clauses = [self.clauses(phrase) for phrase in (first, *conjunction[1:])]
        written = f' {conjunction[0]} '.join(map(' + '.join, clauses)) if conjunction else ' + '.join(clauses[0])
        ordered = reversed(clauses) if conjunction[:1] == ['after'] else clauses
        return f'{command} = {written} → ' + ' '.join(f'{clause} : {scan()[0][clause]}' for phrase in ordered for clause in phrase) + ' .'

    def clauses(self, phrase):
        """Of 'walk left twice': ['walk left', 'walk left']."""
        clause, _, times = phrase.rpartition(' ')
        return [clause] * {'twice': 2, 'thrice': 3}[times] if times in ('twice', 'thrice') else [phrase]


# ---------------------------------------------------------------------------------------------------------------------

TASKS = {'copy': Copy(), 'parity': Parity(), 'polynomial': Polynomial(), 'count': Count(), 'reverse': Reverse(), 'mode': Mode(), 'sort': Sort(),
         'indirect_indexing': IndirectIndexing(), 'distance': Distance(), 'trigger_count': TriggerCount(), 'distance_sum': DistanceSum(),
         'string_copy': StringCopy(), 'string_reverse': StringReverse(), 'odds_first': OddsFirst(), 'stack': Stack(), 'dyn_str_cpy': DynStrCpy(),
         'addition_cot': AdditionCoT(), 'multiplication_cot': MultiplicationCoT(),
         'scan': SCAN(), 'scan_simple': SCANSimple(), 'scan_cot': SCANCoT()}

def known():
    """{name: task} of every task: TASKS, and those that engine/data.py reads from files."""
    from engine.data import READERS                             # here, because its classes build on this file's
    return TASKS | READERS


@functools.cache
def make(name, data=''):
    """The task of that name, its number options behind colons: 'parity', 'indirect_indexing:letters=12:shift=2'; data: the files of those that read
    some. ValueError says what is wrong."""
    base, *options = name.split(':')
    there = known()
    if base not in there:
        near = difflib.get_close_matches(base, there, 1)
        raise ValueError(f'unknown task {base!r}' + (f', did you mean {near[0]!r}?' if near else '.') + f' There are: {", ".join(there)}')
    task = there[base]
    if bool(task.needs) != bool(data):
        raise DataError(f'{base} reads files: give --data=PATH, {task.needs}' if task.needs else f'{base} reads no files: leave --data={data} out')
    if not options and not data:
        return task
    takes = list(inspect.signature(type(task)).parameters)
    given = dict(re.findall(r'(\w+)=(\d+)', name))
    if [f'{k}={v}' for k, v in given.items()] != options or not set(given) <= set(takes):
        raise ValueError(f'task options {":".join(options)!r} not understood: {base} has {", ".join(takes) or "none"}; write e.g. polynomial:p=7')
    task = type(task)(**{k: int(v) for k, v in given.items()})
    task.data = data
    return task


def example(name, length):
    """The first problem of that task and length from seed 0, as text."""
    tokens, _ = make(name).sample(1, length, torch.Generator().manual_seed(0))
    return make(name).decode(tokens[0])


def show_lengths(task):
    """Print how many tokens the problems of a data set have, in all, before and behind the mark (prism.txt Figures 21 to 23)."""
    for part in ('train', 'test'):
        tokens, targets = zip(*((row[row != PAD], target[target != -100]) for rows in task.rows[part].values() for row, target in zip(*rows)))
        answers = [len(target) for target in targets]
        for what, sizes in (('in all', [len(row) for row in tokens]), (f'after {task.marks[0]}', answers),
                            (f'before {task.marks[0]}', [len(row) - n - 1 for row, n in zip(tokens, answers)])):
            step = max(1, math.ceil((max(sizes) + 1 - min(sizes)) / 16))
            counts = collections.Counter((size - min(sizes)) // step for size in sizes)
            print(f'\n{part}, {len(sizes)} problems: tokens {what}, from {min(sizes)} to {max(sizes)}')
            for i in range(max(counts) + 1):
                low = min(sizes) + i * step
                print(f'{low:5} - {low + step - 1:<5} {counts[i]:6} ' + '#' * math.ceil(60 * counts[i] / max(counts.values())))


def main(argv):
    """The program: the list of tasks, examples of one, or the lengths in a data set."""
    data = [arg.partition('=')[2] for arg in argv if arg.startswith('--data=')]
    name, *rest = [arg for arg in argv if not arg.startswith('--data=')] or ['']
    if not name or {'-h', '--help'} & set(argv):
        for name, task in known().items():
            print(f'{name:18} {type(task).__doc__.splitlines()[0]}')
        return print('\npython tasks.py NAME [LENGTH] [--data=PATH] prints examples')
    task = make(name, *data[-1:])
    if rest == ['lengths'] and isinstance(task, Pairs):
        return show_lengths(task)
    if rest and not rest[0].isdigit() or rest[1:]:
        raise ValueError(f'python tasks.py {name} takes a length' + (' or the word lengths' if isinstance(task, Pairs) else '') + f', not {" ".join(rest)}')
    length = int(rest[0]) if rest else 64 if task.corpus else max(5, task.min_length)
    tokens, targets = task.sample(5, length)
    print(inspect.getdoc(type(task)).split('\n\n>>>')[0])
    print(f'\nvocabulary of {len(task.vocab)}; length {length}, {tokens.shape[1]} tokens\n')
    for row, target in zip(tokens, targets):
        print(f'{task.decode(row)}\n    predicted: {"all but the first" if task.corpus else task.decode(row[1:][target[:-1] != -100])}')


if __name__ == '__main__':
    from tasks import main                                      # engine/data.py imports this file by its name: take that copy
    sys.stdout.reconfigure(errors='replace')
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)                                       # ... | head
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        print(f'tasks.py: {error}', file=sys.stderr)
        sys.exit(2)
