"""Tasks that read files, those of --data=PATH; and the source of Python's standard library."""
import functools
import itertools
import json
import os
import re
import string
import sysconfig

import numpy as np
import torch

from tasks import PAD, PARTS, DataError, Pairs, Task, supervise


class CFQ(Pairs):
    """Compositional Freebase Questions (Keysers et al. 2020): a question and its SPARQL query.
    Entities are M0, M1, ... as in its authors' baselines. The random split, or cfq:mcd=1, 2 or 3.
    `length`: words of the query.
    >>> print(CFQ.text({
    ...     'questionPatternModEntities': "Did M0 's writer write M1", 'sparqlPatternModEntities':
    ...     'SELECT count(*) WHERE {\\nM0 ns:film.x ?x0 .\\n?x0 a ns:m.05\\n}'})[1])
    BoS Did M0 ' s writer write M1 EoI SELECT count ( * ) WHERE { M0 film.x ?x0 . ?x0 a m_05 } EoS
    """
    own_vocab = True
    needs = ('the folder that cfq1.1.tar.gz (storage.googleapis.com/cfq_dataset) unpacks to, '
             'with dataset.json and splits/')

    def __init__(self, mcd=0):
        if mcd > 3:
            raise ValueError(f'cfq has the splits mcd=1, 2 and 3, and a random one; not mcd={mcd}')
        self.split = f'mcd{mcd}' if mcd else 'random_split'

    @staticmethod
    def text(entry):
        """(length, text) of an entry of dataset.json. Punctuation in questions and in count(*)
        becomes words; names lose their prefixes."""
        punctuation = f'([{re.escape(string.punctuation)}])'
        question = re.sub(punctuation, r' \1 ', entry['questionPatternModEntities']).split()
        query = entry['sparqlPatternModEntities'].replace('count(*)', 'count ( * )')
        query = query.replace('\\n', ' ').split()
        query = [re.sub(r'^m\.', 'm_', word.removeprefix('ns:')) for word in query]
        return len(query), f'BoS {" ".join(question)} EoI {" ".join(query)} EoS'

    @functools.cached_property
    def parts(self):
        splits = read_json(os.path.join(self.data, 'splits', f'{self.split}.json'), self.needs)
        entries = read_json(os.path.join(self.data, 'dataset.json'), self.needs)
        keys = dict(zip(PARTS, ('trainIdxs', 'devIdxs', 'testIdxs')))
        try:
            return {part: [self.text(entries[i]) for i in splits[keys[part]]] for part in PARTS}
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            what = f'{type(error).__name__} {error} in dataset.json or splits/{self.split}.json'
            raise DataError(f'{self.data} is not CFQ: {what}; --data should be {self.needs}') \
                from None

    def texts(self, part):
        return self.parts[part]


def read_json(path, needs):
    """The content of a JSON file. DataError, with what --data should be, if it cannot be read."""
    try:
        with open(path, encoding='utf-8') as f:
            return json.load(f)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or 'not JSON'
        raise DataError(f'cannot read {path}: {reason}; --data should be {needs}') from None


# --------------------------------------------------------------------------------------------------
# corpora: predict the next token in contexts of `length` tokens

PART_NAMES = {part: part for part in PARTS} | dict(valid='val', validation='val', dev='val')
SHARES = {'train': (0, 0.9), 'val': (0.9, 0.95), 'test': (0.95, 1)}


class Corpus(Task):
    """Documents in parts. A subclass gives read(), [(part, document)]: a document is an array of
    symbols, mapped from disk where it is large, and token = symbol + first.
    A part is what the name of the file or of its folder says (PART_NAMES). If no name says it, the
    parts are SHARES: of the documents in an order drawn once, or of each if there are under 20."""
    corpus = True
    fixed = True
    min_length = 2
    separator = ''
    first = 1              # the token of symbol 0
    stride = 1             # contexts begin at multiples of it

    @property
    def n_symbols(self):
        return len(self.vocab) - self.first

    @functools.cached_property
    def parts(self):
        """{part: [documents]}."""
        documents = [(part, document) for part, document in self.read() if len(document) > 1]
        if not documents:
            where = self.data or 'the standard library'
            raise DataError(f'there is nothing to read in {where}: it should be {self.needs}')
        if any(part for part, _ in documents):
            named = {p: [x for part, x in documents if (part or 'train') == p] for p in PARTS}
            named['val'] = named['val'] or named['test']
            named['test'] = named['test'] or named['val']
            return named
        documents = [document for _, document in documents]
        if len(documents) < 20:
            return {part: [share(document, part) for document in documents] for part in PARTS}
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0))
        documents = [documents[i] for i in order]
        return {part: share(documents, part) for part in PARTS}

    def of_part(self, part):
        """The documents of a part that have something to predict. DataError if there are none."""
        documents = [document for document in self.parts[part] if len(document) > 1]
        if not documents:
            raise DataError(f'{self.data or "the corpus"} has nothing for {part}: '
                            f'name a file or folder in it {part}, or give more of it')
        return documents

    def lay_out(self, pieces, length):
        """Pieces of documents as (tokens, targets) [len(pieces), length], padded on the right."""
        tokens = np.zeros((len(pieces), length), dtype=np.int64)
        for row, piece in zip(tokens, pieces):
            row[:len(piece)] = piece
            wrong = row[(row < 0) | (row >= self.n_symbols)]
            if len(wrong):
                raise DataError(f'{self.data} holds the symbol {wrong[0]}; '
                                f'the vocabulary has 0 to {self.n_symbols - 1}')
            row[:len(piece)] += self.first
        tokens = torch.from_numpy(tokens)
        return tokens, supervise(tokens, 1)

    def problems(self, n, length, draw):
        """Training contexts: sample a document in proportion to its length, then a uniform start.
        A shorter document is taken whole."""
        documents = self.of_part('train')
        ends = np.cumsum([len(document) for document in documents])
        tokens = draw.integers(int(ends[-1]), n).cpu().numpy()
        chosen = [documents[i] for i in np.searchsorted(ends, tokens, side='right')]
        places = [max(0, len(document) - length) // self.stride + 1 for document in chosen]
        starts = draw.integers(torch.tensor(places, device=draw.device), n) * self.stride
        pieces = [document[i:i + length] for document, i in zip(chosen, starts.tolist())]
        tokens, targets = self.lay_out(pieces, length)
        return tokens.to(draw.device), targets.to(draw.device)

    def held_out(self, split, n, lengths, generator):
        """The same text for every length: n stretches, each cut into contexts of `length` tokens.

        A stretch has max(lengths) tokens of a held-out document; shorter ones are taken only if
        there are too few. Contexts overlap by one token, so that every token but a stretch's first
        is predicted once. The last context may be short: lengths compare best if they divide the
        longest into about equal parts. With a stride, contexts are up to a stride shorter.
        """
        def step(length):  # from one context's start to the next: the predictions in a whole one
            return (length - 1) // self.stride * self.stride

        documents = self.of_part('val' if split == 'eval' else 'test')
        longest = step(max(lengths))
        stretches = []
        for document in documents:
            starts = range(0, len(document) - 1, longest)
            stretches += [(document, start) for start in starts]
        order = torch.randperm(len(stretches), generator=generator(max(lengths)))
        stretches = [stretches[i] for i in order]
        stretches.sort(key=lambda x: len(x[0]) - x[1] <= longest)  # whole ones first
        texts = [document[start:start + longest + 1] for document, start in stretches[:n]]
        sets = {}
        for length in lengths:
            pieces = [text[i:i + step(length) + 1]
                      for text in texts for i in range(0, len(text) - 1, step(length))]
            sets[length] = self.lay_out(pieces, length)
        return sets

    def existing(self, lengths, part):
        return [n for n in lengths if n >= self.min_length]

    def width(self, lengths):
        return max(lengths)


def share(x, part):
    """A part's share of a sequence."""
    low, high = SHARES[part]
    return x[int(low * len(x)):int(high * len(x))]


def files_in(data, needs, endings='', skip=()):
    """[(part, path)] of a file, or of the files in a folder and below with one of the endings.

    part: what a name in the path says, or None. Hidden files and folders in `skip` are left out.
    """
    def refuse(error):
        raise error  # a folder that may not be read

    if os.path.isfile(data):
        return [(None, data)]
    if not os.path.isdir(data):
        raise DataError(f'--data={data} does not exist; it should be {needs}')
    files = []
    for folder, folders, names in os.walk(data, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != '.' and name not in skip)
        for name in sorted(names):
            if name.lower().endswith(endings) and name[0] != '.':
                path = os.path.join(folder, name)
                words = os.path.splitext(os.path.relpath(path, data))[0].lower().split(os.sep)
                parts = [PART_NAMES[word] for word in words if word in PART_NAMES]
                files.append((parts[0] if parts else None, path))
    if not files:
        raise DataError(f'--data={data} has no such files; it should be {needs}')
    return files


def mapped(path, dtype):
    """A file as an array. A file of more than a megabyte stays on disk."""
    size = os.path.getsize(path)
    if size <= 2 ** 20:
        return np.fromfile(path, dtype)
    return np.memmap(path, dtype, 'r', shape=size // np.dtype(dtype).itemsize)


def read_text(path):
    """The content of a text file. DataError if it is not UTF-8."""
    try:
        with open(path, encoding='utf-8', newline='') as f:
            return f.read()
    except UnicodeDecodeError as error:
        raise DataError(f'{path} is not UTF-8 text (byte {error.start}); '
                        '--task=text reads any file, as bytes') from None


class Text(Corpus):
    """Files as bytes, a document each. `length`: bytes in a context."""
    needs = 'a file, or a folder of files'
    vocab = ['<pad>', *map(chr, range(256))]

    def read(self):
        return [(part, mapped(path, np.uint8)) for part, path in files_in(self.data, self.needs)]

    def decode(self, row):
        return bytes(i - 1 for i in row.tolist() if i != PAD).decode('utf-8', 'replace')

    def encode(self, text):
        return torch.tensor([byte + 1 for byte in text.encode()], dtype=torch.int64)


class StandardLibrary(Text):
    """The source of Python's standard library as bytes, without tests and installed packages.
    `length`: bytes in a context.
    >>> make('stdlib').decode(make('stdlib').encode('def f(x):'))
    'def f(x):'
    """
    needs = ''
    skip = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', '__pycache__'}

    def read(self):
        files = files_in(sysconfig.get_path('stdlib'), '', '.py', self.skip)
        return [(None, mapped(path, np.uint8)) for _, path in files]


class TextCharacters(Corpus):
    """Text files by characters, those that occur in them. `length`: characters in a context."""
    own_vocab = True
    needs = ('a text file (UTF-8), or a folder of them, as tinyshakespeare of '
             'github.com/karpathy/char-rnn')

    @functools.cached_property
    def texts(self):
        return [(part, read_text(path)) for part, path in files_in(self.data, self.needs)]

    @functools.cached_property
    def vocab(self):
        return ['<pad>', *sorted(set().union(*(text for _, text in self.texts)))]

    def read(self):
        characters = [ord(character) for character in self.vocab[1:]]
        documents = []
        for part, text in self.texts:
            codes = np.frombuffer(text.encode('utf-32-le'), dtype=np.uint32)
            documents.append((part, np.searchsorted(characters, codes).astype(np.uint16)))
        return documents


class Tokens(Corpus):
    """Files of tokens below `size`, as in tokens:size=1000. `length`: tokens in a context.
    >>> make('tokens:size=100', 'FILE').decode(torch.tensor([1, 100]))
    '0 99'
    """
    needs = 'a .bin (uint16) or .npy file of tokens, or a folder of them'
    separator = ' '

    def __init__(self, size=50257):
        self.size = size

    @functools.cached_property
    def vocab(self):
        return ['<pad>', *map(str, range(self.size))]

    def read(self):
        paths = files_in(self.data, self.needs, ('.bin', '.npy'))
        return [(part, self.read_file(path)) for part, path in paths]

    def read_file(self, path):
        if path.lower().endswith('.bin'):
            if os.path.getsize(path) % 2:
                raise DataError(f'{path} has an odd number of bytes: it holds no uint16 tokens')
            return mapped(path, np.uint16)
        try:
            array = np.load(path, mmap_mode='r')
            if array.ndim == 1 and array.dtype.kind in 'ui':
                return array
        except (AttributeError, EOFError, ValueError):  # an archive, cut off, or something else
            pass
        raise DataError(f'{path} is not a row of whole numbers; --data should be {self.needs}')


class GPT2(Tokens):
    """GPT-2's byte pairs in files of tokens, as nanoGPT's prepare.py writes them for OpenWebText.
    The vocabulary is the padding and 50,257 byte pairs, and unused tokens up to a multiple of 64,
    50,304, for an aligned output matrix. Text to and from tokens, as for --prompt, takes
    `tiktoken`. `length`: tokens in a context."""
    n_symbols = 50257

    def __init__(self):
        super().__init__(self.n_symbols)

    @functools.cached_property
    def vocab(self):
        vocab = super().vocab
        return vocab + [f'<unused{i}>' for i in range(-len(vocab) % 64)]

    @functools.cached_property
    def byte_pairs(self):
        try:
            import tiktoken
        except ImportError:
            raise DataError("GPT-2's byte pairs need tiktoken: pip install tiktoken") from None
        return tiktoken.get_encoding('gpt2')

    def decode(self, row):
        return self.byte_pairs.decode([i - 1 for i in row.tolist() if 1 <= i <= self.n_symbols])

    def encode(self, text):
        return torch.tensor(self.byte_pairs.encode_ordinary(text), dtype=torch.int64) + 1


class JSB(Corpus):
    """Bach's chorales (PoPE A.1): the pitches of four voices, then those of the next 16th note.
    90 symbols: padding, silence, and the 88 pitches of a piano, 21 to 108. `length`: tokens in a
    context, which begins with the first voice. 229 chorales for training, 76 and 77 held out.
    >>> JSB().decode(JSB().encode('74 70 65 58 - 70 65 58'))
    '74 70 65 58 - 70 65 58'
    """
    needs = 'Jsb16thSeparated.json (github.com/czhuang/JSB-Chorales-dataset)'
    vocab = ['<pad>', '-', *map(str, range(21, 109))]
    separator = ' '
    stride = 4
    min_length = 5

    def read(self):
        chorales = read_json(self.data, self.needs)
        known = [-1, *range(21, 109)]
        documents = []
        try:
            for part, name in zip(PARTS, ('train', 'valid', 'test')):
                for chorale in chorales[name]:
                    pitches = np.array(chorale)
                    if pitches.shape[1:] != (4,) or not np.isin(pitches, known).all():
                        raise ValueError(f'a chorale of {name} is not rows of four pitches, '
                                         'each -1 or 21 to 108')
                    documents.append((part, np.where(pitches < 0, 0, pitches - 20).ravel()))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f'{self.data} is not {self.needs}: '
                            f'{type(error).__name__} {error}') from None
        return documents


class MIDI(Corpus):
    """Piano performances as REMI tokens (Huang & Yang 2020) by `miditok`, a .mid file each.
    In training each context is transposed by -3 to 3 semitones. With PAD, MASK, chords and tempi
    the vocabulary has 328 tokens, as in PoPE A.1, which does not list them. `length`: tokens in a
    context."""
    needs = 'a folder of .mid or .midi files (MAESTRO: magenta.withgoogle.com/datasets/maestro)'
    first = 0
    separator = ' '

    @functools.cached_property
    def remi(self):
        try:
            import miditok
        except ImportError:
            raise DataError('MIDI files need miditok: pip install miditok') from None
        return miditok.REMI(miditok.TokenizerConfig(
            pitch_range=(21, 108), drums_pitch_range=(27, 87), use_chords=True, use_tempos=True,
            num_tempos=32, use_time_signatures=False, one_token_stream_for_programs=True,
            special_tokens=['PAD', 'BOS', 'EOS', 'MASK']))

    @functools.cached_property
    def vocab(self):
        return sorted(self.remi.vocab, key=self.remi.vocab.get)

    def read(self):
        bos, eos = self.remi['BOS_None'], self.remi['EOS_None']
        documents = []
        for part, path in files_in(self.data, self.needs, ('.mid', '.midi')):
            try:
                tracks = self.remi(path)
            except Exception as error:
                raise DataError(f'{path} is no MIDI file that miditok reads: '
                                f'{type(error).__name__} {error}') from None
            for track in tracks if isinstance(tracks, list) else [tracks]:
                documents.append((part, np.array([bos, *track.ids, eos], dtype=np.uint16)))
        return documents

    def problems(self, n, length, draw):
        tokens, _ = super().problems(n, length, draw)
        shift = draw.integers(7, n, 1)  # of each context, as a row of `transposed`
        tokens = self.transposed.to(tokens.device)[shift, tokens]
        return tokens, supervise(tokens, 1)

    @functools.cached_property
    def transposed(self):
        """[7, vocabulary]: what each token becomes, -3 to 3 semitones up. A pitch that leaves the
        piano comes back by an octave."""
        table = torch.arange(len(self.vocab)).repeat(7, 1)
        names = [name for name in self.vocab if name.startswith('Pitch_')]
        pitches = {int(name.removeprefix('Pitch_')): self.vocab.index(name) for name in names}
        for row, shift in zip(table, range(-3, 4)):
            for pitch, i in pitches.items():
                moved = pitch + shift
                row[i] = next(pitches[p] for p in (moved, moved - 12, moved + 12) if p in pitches)
        return table


class Genome(Corpus):
    """FASTA files in 6-mers as the Nucleotide Transformer cuts them; a record is a document.
    6-mers do not overlap, and start at the left of every stretch without N. Each letter left over
    and each N is a token; other letters count as N, and case is ignored. 4,107 tokens: 6 special
    ones, A C G T N, 4,096 6-mers. `length`: tokens in a context.
    >>> Genome().decode(Genome().tokens(b'acgtacgtNNACGTTTA'))
    'ACGTAC G T N N ACGTTT A'
    """
    needs = ('a FASTA file (.fa, .fasta, .fna; unpacked), or a folder of them, as in '
             'huggingface.co/datasets/InstaDeepAI/human_reference_genome')
    special = ['<pad>', '<unk>', '<mask>', '<cls>', '<eos>', '<bos>', *'ACGTN']
    vocab = special + [''.join(kmer) for kmer in itertools.product('ACGT', repeat=6)]
    separator = ' '
    first = 0
    letters = np.full(256, 4, dtype=np.uint8)
    letters[list(b'ACGTacgt')] = [0, 1, 2, 3] * 2

    def tokens(self, sequence):
        """The tokens of a sequence of bytes."""
        code = self.letters[np.frombuffer(sequence, dtype=np.uint8)]
        edges = np.flatnonzero(np.diff(code < 4)) + 1  # of the stretches without N
        parts = []
        for stretch in np.split(code, edges):
            whole = len(stretch) // 6 * 6 if (stretch < 4).all() else 0
            kmers = stretch[:whole].reshape(-1, 6) @ (4 ** np.arange(5, -1, -1))
            parts.append(kmers + len(self.special))
            parts.append(stretch[whole:].astype(np.int64) + self.special.index('A'))
        return torch.from_numpy(np.concatenate(parts))

    def read(self):
        documents = []
        for part, path in files_in(self.data, self.needs, ('.fa', '.fasta', '.fna')):
            for sequence in self.records(path):
                documents.append((part, self.tokens(sequence).numpy().astype(np.uint16)))
        return documents

    def records(self, path):
        """The sequences in a FASTA file."""
        with open(path, 'rb') as f:
            head, *records = (b'\n' + f.read()).split(b'\n>')
        if head.strip():
            raise DataError(f'{path} is no FASTA file, whose first line begins with ">"; '
                            f'--data should be {self.needs}')
        sequences = [b''.join(record.split(b'\n')[1:]).translate(None, b' \t\r\n')
                     for record in records]
        for sequence in sequences:
            if wrong := re.search(rb'.{,10}[^A-Za-z*-]', sequence):
                raise DataError(f'{path} has {wrong[0]!r} in a sequence, which is no base')
        return sequences

    def encode(self, text):
        return self.tokens(text.replace(' ', '').encode())


READERS = {'stdlib': StandardLibrary(), 'cfq': CFQ(), 'text': Text(),
           'characters': TextCharacters(), 'tokens': Tokens(), 'openwebtext': GPT2(),
           'jsb': JSB(), 'maestro': MIDI(), 'genome': Genome()}
