"""Readers of files: CFQ, text, tokens, chorales, MIDI and FASTA, as tasks that `--data=PATH` names; and Python's standard library as text."""
import functools
import json
import os
import re
import string
import sysconfig

import numpy as np
import torch

from tasks import PAD, PARTS, DataError, Pairs, Task, supervise


class CFQ(Pairs):
    """Compositional Freebase Questions (Keysers et al. 2020): a question and its SPARQL query, entities replaced by M0, M1, ... as in its authors'
    baselines. `length`: words of the query. The random split, or cfq:mcd=1, 2 or 3.

    >>> CFQ.text({'questionPatternModEntities': "Did M0 's writer write M1",
    ...           'sparqlPatternModEntities': 'SELECT count(*) WHERE {\\nM0 ns:film.x ?x0 .\\n?x0 a ns:m.05\\n}'})
    (15, "BoS Did M0 ' s writer write M1 EoI SELECT count ( * ) WHERE { M0 film.x ?x0 . ?x0 a m_05 } EoS")
    """
    own_vocab = True
    needs = 'the folder that cfq1.1.tar.gz (storage.googleapis.com/cfq_dataset) unpacks to, with dataset.json and splits/'

    def __init__(self, mcd=0):
        if mcd > 3:
            raise ValueError(f'cfq has the splits mcd=1, 2 and 3, and a random one; not mcd={mcd}')
        self.mcd = mcd

    @staticmethod
    def text(entry):
        """(length, text) of an entry of dataset.json: punctuation in questions and count(*) cut into words, prefixes of names dropped."""
        question = re.sub(f'([{re.escape(string.punctuation)}])', r' \1 ', entry['questionPatternModEntities'])
        query = entry['sparqlPatternModEntities'].replace('count(*)', 'count ( * )').replace('\\n', ' ').split()
        query = [re.sub(r'^m\.', 'm_', word.removeprefix('ns:')) for word in query]
        return len(query), f'BoS {" ".join(question.split())} EoI {" ".join(query)} EoS'

    @functools.cached_property
    def parts(self):
        name = f'mcd{self.mcd}' if self.mcd else 'random_split'
        split, entries = (read_json(os.path.join(self.data, *path), self.needs) for path in (('splits', name + '.json'), ('dataset.json',)))
        try:
            entries = dict(enumerate(entries))
            return {part: [self.text(entries[i]) for i in split[key]] for part, key in zip(PARTS, ('trainIdxs', 'devIdxs', 'testIdxs'))}
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(f'{self.data} is not CFQ: {type(error).__name__} {error} in dataset.json or splits/{name}.json; it should be {self.needs}') from None

    def texts(self, part):
        return self.parts[part]


def read_json(path, needs):
    """What a JSON file holds."""
    try:
        with open(path, encoding='utf-8') as f:
            return json.load(f)
    except (OSError, ValueError) as error:
        raise DataError(f'cannot read {path}: {getattr(error, "strerror", None) or "not JSON"}; --data should be {needs}') from None


# ---------------------------------------------------------------------------------------------------------------------
# corpora: predict the next token, in contexts of `length` tokens

class Corpus(Task):
    """Documents, one-dimensional arrays (mapped from disk where they are large) of symbols; token = symbol + first. A subclass gives read(), [(part,
    document)]. Files or folders named train, val (valid, validation, dev) or test are that part; if nothing is so named, 90, 5 and 5 %
    of the documents are, in an order drawn once, or of each document where there are fewer than 20.
    """
    corpus, min_length, first, stride = True, 2, 1, 1           # stride: training contexts begin at its multiples
    separator = ''

    @functools.cached_property
    def parts(self):
        """{part: [documents]}."""
        documents = [(part, document) for part, document in self.read() if len(document) > 1]
        if not documents:
            raise DataError(f'there is nothing to read in {self.data or "the standard library"}: it should be {self.needs}')
        named = {part: [document for p, document in documents if (p or 'train') == part] for part in PARTS}
        if any(part for part, _ in documents):
            return named | {'val': named['val'] or named['test'], 'test': named['test'] or named['val']}
        documents, cuts = [document for _, document in documents], ((0, 0.9), (0.9, 0.95), (0.95, 1))
        piece = lambda x, low, high: x[int(low * len(x)):int(high * len(x))]
        if len(documents) < 20:
            return {part: [piece(document, *cut) for document in documents] for part, cut in zip(PARTS, cuts)}
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
        return {part: [documents[i] for i in piece(order, *cut)] for part, cut in zip(PARTS, cuts)}

    def of_part(self, part):
        """The documents of a part with something to predict in them."""
        documents = [document for document in self.parts[part] if len(document) > 1]
        if not documents:
            raise DataError(f'{self.data or "the corpus"} has nothing for {part}: name a file or folder in it {part}, or give more of it')
        return documents

    def lay_out(self, pieces, length):
        """Pieces of documents as (tokens, targets) [len(pieces), length], padded on the right."""
        tokens = np.zeros((len(pieces), length), dtype=np.int64)
        for row, piece in zip(tokens, pieces):
            row[:len(piece)] = piece
            if row.min() < 0 or row.max() >= len(self.vocab) - self.first:
                raise DataError(f'{self.data} holds the symbol {row.min() if row.min() < 0 else row.max()}; the vocabulary has 0 to {len(self.vocab) - 1 - self.first}')
            row[:len(piece)] += self.first
        tokens = torch.from_numpy(tokens)
        return tokens, supervise(tokens, 1)

    def problems(self, n, length, draw):
        """Contexts of the training part: a token anywhere in it says which document, the place therein is uniform; a shorter document is taken whole."""
        documents = self.of_part('train')
        ends = np.cumsum([len(document) for document in documents])
        which = np.searchsorted(ends, draw.integers(int(ends[-1]), n).cpu().numpy(), side='right')
        places = torch.tensor([max(0, len(documents[i]) - length) // self.stride + 1 for i in which], device=draw.device)
        starts = (draw.integers(places, n) * self.stride).tolist()
        tokens, targets = self.lay_out([documents[i][start:start + length] for i, start in zip(which, starts)], length)
        return self.augment(tokens, targets, draw)

    def augment(self, tokens, targets, draw):
        return tokens.to(draw.device), targets.to(draw.device)

    def held_out(self, split, n, lengths, generator):
        """The same text for every length: n stretches of max(lengths) tokens, drawn from the held-out documents (shorter ones only if there are no more of
        that size), each cut into contexts of `length` tokens that overlap by one, so that every token but a stretch's first is predicted once. The
        last context may be short: lengths compare best where they cut the longest into about equal parts. Where contexts begin at multiples
        of the stride, they are up to a stride shorter.
        """
        documents, step = self.of_part('val' if split == 'eval' else 'test'), lambda length: (length - 1) // self.stride * self.stride
        longest = step(max(lengths))                                                    # predictions in a whole stretch
        starts = [np.arange(0, len(document) - 1, longest) for document in documents]
        which, starts = np.repeat(np.arange(len(documents)), list(map(len, starts))), np.concatenate(starts)
        order = torch.randperm(len(starts), generator=generator(max(lengths))).numpy()
        short = np.array([len(document) for document in documents])[which[order]] - starts[order] <= longest
        chosen = order[np.argsort(short, kind='stable')][:n]
        stretches = [documents[which[k]][starts[k]:starts[k] + longest + 1] for k in chosen]
        return {length: self.lay_out([s[i:i + step(length) + 1] for s in stretches for i in range(0, len(s) - 1, step(length))], length) for length in lengths}

    def existing(self, lengths, part):
        return [n for n in lengths if n >= self.min_length]

    def width(self, lengths):
        return max(lengths)


def files_in(data, needs, endings=None):
    """[(part, path)] of a file, or of all files below a folder with one of the endings, hidden ones aside; the part that a name says, or None."""
    def refuse(error):
        raise error                                                                     # a folder that may not be read

    if os.path.isfile(data):
        return [(None, data)]
    found, alias = [], {'valid': 'val', 'validation': 'val', 'dev': 'val'} | {part: part for part in PARTS}
    for folder, folders, names in os.walk(data, onerror=refuse if os.path.isdir(data) else None):
        folders[:] = sorted(name for name in folders if not name.startswith('.'))
        for name in sorted(names):
            path = os.path.join(folder, name)
            words = os.path.splitext(os.path.relpath(path, data))[0].lower().split(os.sep)
            if not name.startswith('.') and (endings is None or name.lower().endswith(endings)):
                found.append((next((alias[word] for word in words if word in alias), None), path))
    if not found:
        raise DataError(f'--data={data} ' + ('has no such files' if os.path.isdir(data) else 'does not exist') + f'; it should be {needs}')
    return found


def mapped(path, dtype):
    """A file as an array; from a megabyte on it stays on disk."""
    size = os.path.getsize(path)
    return np.memmap(path, dtype, 'r', shape=size // np.dtype(dtype).itemsize) if size > 2 ** 20 else np.fromfile(path, dtype)


def read_text(path):
    """A text file, which must be UTF-8."""
    try:
        with open(path, encoding='utf-8', newline='') as f:
            return f.read()
    except UnicodeDecodeError as error:
        raise DataError(f'{path} is not UTF-8 text (byte {error.start}); --task=text reads any file, as bytes') from None


class Text(Corpus):
    """Any files as bytes: a token for each of the 256, and the padding. `length`: bytes in a context. A file is a document."""
    needs = 'a file, or a folder of files'
    vocab = ['<pad>', *map(chr, range(256))]

    def read(self):
        return [(part, mapped(path, np.uint8)) for part, path in files_in(self.data, self.needs)]

    def decode(self, row):
        return bytes(i - 1 for i in row.tolist() if i != PAD).decode('utf-8', 'replace')

    def encode(self, text):
        return torch.tensor([byte + 1 for byte in text.encode()], dtype=torch.int64)


class StandardLibrary(Text):
    """The source of Python's standard library, which every machine has, as bytes; tests and installed packages left out. `length`: bytes in a context.

    >>> make('stdlib').decode(make('stdlib').encode('def f(x):'))
    'def f(x):'
    """
    needs = ''

    def read(self):
        documents, root = [], sysconfig.get_path('stdlib')
        for folder, folders, names in os.walk(root):
            folders[:] = sorted({*folders} - {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'})
            documents += [(None, mapped(os.path.join(folder, name), np.uint8)) for name in sorted(names) if name.endswith('.py')]
        return documents


class TextCharacters(Corpus):
    """Text files character by character; the vocabulary is what occurs in them. They are read whole. `length`: characters in a context."""
    own_vocab = True
    needs = 'a text file (UTF-8), or a folder of them'

    @functools.cached_property
    def texts(self):
        return [(part, read_text(path)) for part, path in files_in(self.data, self.needs)]

    @functools.cached_property
    def vocab(self):
        return ['<pad>', *sorted(set().union(*(text for _, text in self.texts)))]

    def read(self):
        index = np.zeros(max(map(ord, self.vocab[1:]), default=0) + 1, dtype=np.uint16)
        for i, character in enumerate(self.vocab[1:]):
            index[ord(character)] = i
        return [(part, index[np.frombuffer(text.encode('utf-32-le'), dtype=np.uint32)]) for part, text in self.texts]


class Tokens(Corpus):
    """Files of tokens, .bin (uint16) or .npy, mapped from disk, in numbers below `size`: tokens:size=1000. `length`: tokens in a context.

    >>> make('tokens:size=100', 'FILE').decode(torch.tensor([1, 100]))
    '0 99'
    """
    needs, endings, separator = 'a .bin (uint16) or .npy file of tokens, or a folder of them', ('.bin', '.npy'), ' '

    def __init__(self, size=50257):
        self.size = size

    @functools.cached_property
    def vocab(self):
        return ['<pad>', *map(str, range(self.size))]

    def read(self):
        return [(part, self.read_file(path)) for part, path in files_in(self.data, self.needs, self.endings)]

    def read_file(self, path):
        if path.lower().endswith('.bin'):
            if os.path.getsize(path) % 2:
                raise DataError(f'{path} has an odd number of bytes: it does not hold uint16 tokens')
            return mapped(path, np.uint16)
        try:
            array = np.load(path, mmap_mode='r')
        except (ValueError, EOFError):
            array = None
        if not isinstance(array, np.ndarray):
            raise DataError(f'{path} is not {self.needs}')
        if array.ndim != 1 or array.dtype.kind not in 'ui':
            raise DataError(f'{path} should be one row of whole numbers; it is {array.dtype} of shape {array.shape}')
        return array


class GPT2(Tokens):
    """GPT-2's byte pairs: token files (nanoGPT's prepare.py writes train.bin and val.bin of OpenWebText), or text, cut up by `tiktoken`, which also shows
    what they mean. 50,257 tokens and the padding. `length`: tokens in a context.
    """
    needs, endings = 'a .bin (uint16), .npy or .txt file, or a folder of them', ('.bin', '.npy', '.txt')

    def __init__(self):
        super().__init__()

    @functools.cached_property
    def byte_pairs(self):
        try:
            import tiktoken
            return tiktoken.get_encoding('gpt2')
        except ImportError:
            raise DataError('GPT-2\'s byte pairs need tiktoken: pip install tiktoken') from None
        except Exception as error:                                                      # whatever its download fails with
            raise DataError(f'tiktoken cannot fetch GPT-2\'s vocabulary ({type(error).__name__}); let it do so once where there is a network') from None

    def read_file(self, path):
        return np.array(self.byte_pairs.encode_ordinary(read_text(path)), dtype=np.uint16) if path.lower().endswith('.txt') else super().read_file(path)

    def decode(self, row):
        return self.byte_pairs.decode([i - 1 for i in row.tolist() if i != PAD])

    def encode(self, text):
        return torch.tensor(self.byte_pairs.encode_ordinary(text), dtype=torch.int64) + 1


class JSB(Corpus):
    """Bach's chorales (PoPE A.1): four voices at every 16th note, one after the other, then the next 16th. 90 symbols: the padding, silence, and the
    88 pitches of a piano, 21 to 108. `length`: tokens in a context, which begins with the first voice. 229 chorales for training, 76 and 77 held out.

    >>> JSB().decode(JSB().encode('74 70 65 58 - 70 65 58'))
    '74 70 65 58 - 70 65 58'
    """
    needs = 'Jsb16thSeparated.json (github.com/czhuang/JSB-Chorales-dataset)'
    vocab = ['<pad>', '-', *map(str, range(21, 109))]
    separator, stride, min_length = ' ', 4, 5

    def read(self):
        chorales, documents = read_json(self.data, self.needs), []
        try:
            for part, name in zip(PARTS, ('train', 'valid', 'test')):
                for chorale in chorales[name]:
                    pitches = np.array(chorale)
                    if pitches.dtype.kind != 'i' or pitches.shape != (len(chorale), 4) or not ((pitches == -1) | (pitches > 20) & (pitches < 109)).all():
                        raise DataError(f'{self.data}: a chorale of {name} is not rows of four pitches, each -1 or 21 to 108; --data should be {self.needs}')
                    documents.append((part, np.where(pitches < 0, 0, pitches - 20).ravel()))
        except (KeyError, TypeError, ValueError) as error:
            raise error if isinstance(error, DataError) else DataError(f'{self.data} is not {self.needs}: {type(error).__name__} {error}') from None
        return documents

    def chorale(self, row):
        """The pitches [frames, 4] of a row of tokens, -1 for silence."""
        row = row[row != PAD].view(-1, 4)
        return torch.where(row == 1, -1, row + 19)


class MIDI(Corpus):
    """Piano performances as REMI tokens (Huang & Yang 2020) by `miditok`, from BOS to EOS, a .mid file each; in training transposed by -3 to 3 semitones.
    With PAD, MASK, chords and tempi the vocabulary has 328, as in PoPE A.1, which does not say what they are. `length`: tokens in a context.
    """
    needs = 'a folder of .mid or .midi files (MAESTRO: magenta.withgoogle.com/datasets/maestro)'
    first, separator = 0, ' '

    @functools.cached_property
    def remi(self):
        try:
            import miditok
        except ImportError:
            raise DataError('MIDI files need miditok: pip install miditok') from None
        return miditok.REMI(miditok.TokenizerConfig(pitch_range=(21, 108), drums_pitch_range=(27, 87), special_tokens=['PAD', 'BOS', 'EOS', 'MASK'], use_chords=True,
                                                    use_tempos=True, use_time_signatures=False, num_tempos=32, one_token_stream_for_programs=True))

    @functools.cached_property
    def vocab(self):
        return sorted(self.remi.vocab, key=self.remi.vocab.get)

    def read(self):
        documents, remi = [], self.remi
        for part, path in files_in(self.data, self.needs, ('.mid', '.midi')):
            try:
                tokens = remi(path)
            except Exception as error:
                raise DataError(f'{path} is no MIDI file that miditok reads: {type(error).__name__} {error}') from None
            for track in tokens if isinstance(tokens, list) else [tokens]:
                documents.append((part, np.array([remi['BOS_None'], *track.ids, remi['EOS_None']], dtype=np.uint16)))
        return documents

    def augment(self, tokens, targets, draw):
        """Every context moved by a number of semitones of its own; a pitch that leaves the piano comes back by an octave."""
        tokens = self.transposed[draw.integers(7, len(tokens), 1).cpu(), tokens]
        return super().augment(tokens, supervise(tokens, 1), draw)

    @functools.cached_property
    def transposed(self):
        """[7, vocabulary]: the token that each becomes."""
        index, table = {name: i for i, name in enumerate(self.vocab)}, torch.arange(len(self.vocab)).repeat(7, 1)
        for name in (name for name in self.vocab if name.startswith('Pitch_')):
            for row, shift in zip(table, range(-3, 4)):
                pitch = int(name[6:]) + shift
                row[index[name]] = next(index[f'Pitch_{p}'] for p in (pitch, pitch - 12, pitch + 12) if f'Pitch_{p}' in index)
        return table


class Genome(Corpus):
    """FASTA files in 6-mers that do not overlap, as the Nucleotide Transformer cuts them: from the left of every stretch without N; what is left over, and
    each N, is a token by itself; other letters count as N, and case is ignored. 4,107 tokens: 6 special ones, A C G T N, 4,096 6-mers.
    `length`: tokens in a context. A record is a document.

    >>> Genome().decode(Genome().tokens(b'acgtacgtNNACGTTTA'))
    'ACGTAC G T N N ACGTTT A'
    """
    needs = 'a FASTA file (.fa, .fasta, .fna; unpacked), or a folder of them'
    special = ['<pad>', '<unk>', '<mask>', '<cls>', '<eos>', '<bos>', *'ACGTN']
    vocab = special + [''.join('ACGT'[i >> 2 * k & 3] for k in range(5, -1, -1)) for i in range(4096)]
    separator, first = ' ', 0
    letters = np.full(256, 4, dtype=np.uint8)
    letters[list(b'ACGTacgt')] = [0, 1, 2, 3] * 2

    def tokens(self, sequence):
        """The tokens of a sequence of bytes."""
        code, base = self.letters[np.frombuffer(sequence, dtype=np.uint8)], self.special.index('A')
        known = code < 4
        edges = np.flatnonzero(np.diff(known, prepend=~known[:1])) if len(code) else []     # where stretches with and without N begin
        parts = []
        for stretch in np.split(code, edges[1:]):
            whole = len(stretch) // 6 * 6 if len(stretch) and stretch[0] < 4 else 0
            kmers = stretch[:whole].reshape(-1, 6) @ (4 ** np.arange(5, -1, -1))
            parts += [kmers + len(self.special), stretch[whole:].astype(np.int64) + base]
        return torch.from_numpy(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]))

    def read(self):
        return [(part, self.tokens(sequence).numpy().astype(np.uint16)) for part, path in files_in(self.data, self.needs, ('.fa', '.fasta', '.fna'))
                for sequence in self.records(path)]

    def records(self, path):
        """The sequences in a FASTA file."""
        lines = []
        with open(path, 'rb') as f:
            filled = filter(None, map(bytes.strip, f))
            if not next(filled, b'>').startswith(b'>'):
                raise DataError(f'{path} is no FASTA file, whose first line begins with ">"; --data should be {self.needs}')
            for line in filled:
                if line.startswith(b'>'):
                    yield b''.join(lines)
                    lines = []
                elif not line.translate(None, b'-*').isalpha() and line.strip(b'-*'):
                    raise DataError(f'{path} has the line {line[:20]!r}, which is no sequence of letters')
                else:
                    lines.append(line)
        yield b''.join(lines)

    def encode(self, text):
        return self.tokens(text.replace(' ', '').encode())


# ---------------------------------------------------------------------------------------------------------------------

READERS = {'stdlib': StandardLibrary(), 'cfq': CFQ(), 'text': Text(), 'characters': TextCharacters(), 'tokens': Tokens(), 'openwebtext': GPT2(),
           'jsb': JSB(), 'maestro': MIDI(), 'genome': Genome()}
