"""The data sets: SCAN, CFQ, and the corpora that engine/data.py reads."""
import doctest
import json
import math
import os
import random
import re
import resource
import sys
import types

os.environ.setdefault('OMP_NUM_THREADS', '1')  # more threads only wait for each other here
import numpy as np
import pytest
import torch

import tasks
import train
from engine import checkpoint, data, runs
from engine.config import UserError
from probes import pope
from test_all import flags, python


def generator(seed):
    return torch.Generator().manual_seed(seed)


def config(**kw):
    return train.make_config(runs.read_config(train.Config, flags(**kw)))


def test_doctests():
    assert doctest.testmod(data, extraglobs=dict(make=tasks.make)) == (0, 5)


# --------------------------------------------------------------------------------------------------
# data sets of commands and answers

def texts(task, sets, lengths):
    return {task.decode(row) for length in lengths for row in sets[length][0]}


def test_data_sets_train_on_all_and_test_on_the_rest():
    cfg = config(task='scan', train_lengths='1-30', eval_lengths='1-60', n_test=10 ** 6)
    assert cfg.train_lengths == list(range(1, 23))
    assert cfg.eval_lengths == [*range(1, 23), 24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48]
    task = cfg.the_task
    batches = train.Batches(cfg, 0, task, 'cpu')
    batches.next(0)
    assert len(batches.tokens) == 16990
    assert len({task.decode(row) for row in batches.tokens}) == 16990
    held = train.held_out(cfg, task, 'test', 'cpu')
    long = [length for length in held if length > 22]
    assert len(texts(task, held, long)) == 3920 == sum(len(held[length][0]) for length in long)

    simple = tasks.make('scan_simple')
    held = simple.held_out('test', 10 ** 6, simple.existing(range(60), None), generator)
    trained = texts(simple, simple.rows['train'], simple.rows['train'])
    assert len(trained) == 16728
    assert not trained & texts(simple, held, [n for n in held if n in simple.rows['test']])


def test_cfq(cfq):
    task = tasks.make('cfq', str(cfq))
    text = task.decode(task.rows['train'][15][0][0])
    assert text == ("BoS Did M0 ' s writer , a film editor , write M1 EoI SELECT count ( * ) WHERE "
                    '{ ?x0 a film.editor . ?x0 people. m_00 } EoS')
    assert task.existing(range(100), 'train') == [15, 19]
    assert sum(len(tokens) for tokens, _ in task.rows['test'].values()) == 4
    assert task.count([15, 19]) == 12
    tokens, targets = task.sample(5, 19, generator(0))
    for row, target in zip(tokens, targets):
        assert task.decode(target[target != -100]) == task.decode(row).split('EoI ')[1]
    mcd = tasks.make('cfq:mcd=1', str(cfq))
    assert text in texts(mcd, mcd.rows['test'], mcd.rows['test'])
    assert mcd.count([15, 19]) == 4
    for name, says in (('cfq:mcd=2', 'cannot read .*mcd2.json'), ('cfq:mcd=4', 'mcd=1, 2 and 3')):
        with pytest.raises(ValueError, match=says):
            tasks.make(name, str(cfq)).sample(1, 15)
    (cfq / 'dataset.json').write_text('[{"question": 1}]')
    with pytest.raises(tasks.DataError, match='is not CFQ: .*cfq1.1.tar.gz'):
        tasks.make('cfq', f'{cfq}/').sample(1, 15)


# --------------------------------------------------------------------------------------------------
# corpora

def token_file(folder, array, name='train.npy'):
    folder.mkdir(exist_ok=True)
    np.save(folder / name, array)
    return folder


@pytest.mark.parametrize('sizes', [[1000], [7, 350, 2, 99, 100, 101, 199], [40] * 30])
def test_windows_predict_every_token_once(sizes, tmp_path):
    """Whatever the length of the context, and the same tokens for all; documents are cut apart, and
    the rest of a document is not dropped."""
    ends = np.cumsum(sizes)
    for i, (end, size) in enumerate(zip(ends, sizes)):
        token_file(tmp_path / 'test', np.arange(end - size, end, dtype=np.uint16), f'{i:02}.npy')
    task = tasks.make('tokens:size=2000', str(tmp_path))
    lengths = [2, 9, 50, 100]
    firsts = {0, *ends[:-1].tolist()}
    for length, (tokens, targets) in task.held_out('test', 10 ** 6, lengths, generator).items():
        predicted = sorted((targets[targets != -100] - 1).tolist())
        assert predicted == sorted(set(range(int(ends[-1]))) - firsts), length
        row, t = (targets != -100).nonzero(as_tuple=True)
        assert torch.equal(tokens[row, t] + 1, targets[row, t])  # from the token before it
        assert tokens.shape[1] == length
    kept = {}
    for length, (_, targets) in task.held_out('test', 3, lengths, generator).items():
        kept[length] = set(targets[targets != -100].tolist())
    assert all(tokens == kept[2] for tokens in kept.values())
    assert len(kept[2]) == min(3 * 99, 3 * (max(sizes) - 1), sum(sizes) - len(sizes))


def test_contexts_of_a_corpus_are_uniform_and_within_a_document(tmp_path):
    token_file(tmp_path / 'train', np.arange(20), 'a.npy')
    token_file(tmp_path / 'train', np.arange(100, 103), 'b.npy')
    token_file(tmp_path, np.arange(5), 'val.npy')
    task = tasks.make('tokens:size=200', str(tmp_path))
    tokens, targets = task.sample(6000, 5, generator(0))
    assert torch.equal(targets[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100))
    short = tokens[:, 0] > 100
    assert abs(short.double().mean() - 3 / 23) < 0.02
    assert set(map(tuple, tokens[short].tolist())) == {(101, 102, 103, 0, 0)}
    starts, counts = tokens[~short][:, 0].unique(return_counts=True)
    assert starts.tolist() == list(range(1, 17)) and counts.min() > 240
    assert (tokens[~short].diff(dim=1) == 1).all()
    assert np.array_equal(task.parts['test'][0], np.arange(5))  # val stands in for a missing test


def test_documents_are_dealt_to_parts(tmp_path):
    for i in range(40):
        (tmp_path / f'{i}.txt').write_text(f'document {i} ' * 3)
    parts = tasks.make('text', str(tmp_path)).parts
    assert [len(parts[part]) for part in tasks.PARTS] == [36, 2, 2]
    assert len({document.tobytes() for part in tasks.PARTS for document in parts[part]}) == 40

    (tmp_path / 'one').mkdir()
    (tmp_path / 'one/a').write_bytes(bytes(range(200)))
    parts = tasks.make('text', str(tmp_path / 'one')).parts
    cuts = [range(180), range(180, 190), range(190, 200)]
    assert [bytes(parts[part][0]) for part in tasks.PARTS] == [bytes(cut) for cut in cuts]

    (tmp_path / 'one/validation').mkdir()
    (tmp_path / 'one/validation/.hidden').write_text('no')
    (tmp_path / 'one/validation/b').write_text('yes')
    (tmp_path / 'one/empty').write_text('')
    parts = tasks.make('text', f'{tmp_path}/one/').parts
    found = [[bytes(document) for document in parts[part]] for part in tasks.PARTS]
    assert found == [[bytes(range(200))], [b'yes'], [b'yes']]


def test_text_comes_back(tmp_path):
    text = 'Grüße, ∀x: x≠0 → 𝄞\r\n\tend\n\n'
    (tmp_path / 'a.txt').write_bytes(text.encode())
    for name, size in (('text', 257), ('characters', 1 + len(set(text)))):
        task = tasks.make(name, str(tmp_path / 'a.txt'))
        document = np.concatenate([task.parts[part][0] for part in tasks.PARTS])
        assert task.decode(torch.from_numpy(document.astype(int)) + 1) == text
        assert task.decode(task.encode(text)) == text
        assert len(task.vocab) == size
    with pytest.raises(tasks.DataError, match="'q' is not in the vocabulary"):
        task.encode('q')
    (tmp_path / 'a.txt').write_bytes(b'\xff\xfe')
    with pytest.raises(tasks.DataError, match='not UTF-8'):
        tasks.make('characters', f'{tmp_path}/./a.txt').sample(1, 2)

    stdlib = tasks.make('stdlib')
    source = open(json.__file__, 'rb').read()
    assert stdlib.decode(stdlib.encode(source.decode())).encode() == source
    assert source in [bytes(document) for part in tasks.PARTS for document in stdlib.parts[part]]


@pytest.mark.parametrize('name, content, says', [
    ('text', b'', 'nothing to read'),
    ('text', b'x', 'nothing to read'),
    ('text', None, 'does not exist'),
    ('text', 'folder', 'has no such files'),
    ('characters', b'', 'nothing to read'),
    ('tokens', b'123', 'is not a row of whole numbers'),
    ('tokens', b'', 'is not a row of whole numbers'),
    ('tokens', 'many.npz', 'is not a row of whole numbers'),
    ('tokens:size=9', 'wide.npy', 'is not a row of whole numbers'),
    ('tokens:size=9', 'big.npy', 'the vocabulary has 0 to 8'),
    ('tokens:size=9', 'minus.npy', 'the symbol -1'),
    ('tokens:size=9', 'odd.bin', 'odd number of bytes'),
    ('openwebtext', 'odd.bin', 'odd number'),
    ('openwebtext', 'unused.npy', 'the symbol 50257; the vocabulary has 0 to 50256'),
    ('jsb', b'{"train": 3}', 'is not Jsb16th'),
    ('jsb', b'{"train": [[[1, 2, 3, 4]]], "valid": [], "test": []}', 'each -1 or 21 to 108'),
    ('jsb', b'{"train": [[[60, 60, 60]]], "valid": [], "test": []}', 'rows of four'),
    ('jsb', b'{"train": [], "valid": [], "test": []}', 'nothing to read'),
    ('jsb', b'not json', 'not JSON'),
    ('genome', b'ACGT', 'no FASTA'),
    ('genome', b'>x\nAC1\n', "b'AC1'"),
    ('genome', b'', 'nothing to read'),
])
def test_data_that_do_not_fit(name, content, says, tmp_path):
    np.save(tmp_path / 'wide.npy', np.ones((3, 3)))
    np.save(tmp_path / 'minus.npy', np.full(99, -1))
    np.save(tmp_path / 'big.npy', np.full(99, 9, dtype=np.uint16))
    np.save(tmp_path / 'unused.npy', np.full(99, 50257, dtype=np.uint16))
    np.savez(tmp_path / 'many.npz', np.ones(9))
    (tmp_path / 'odd.bin').write_bytes(b'123')
    (tmp_path / 'folder').mkdir()
    path = tmp_path / (content if isinstance(content, str) else 'data')
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(tasks.DataError, match=re.escape(says)) as error:
        tasks.make(name, str(path)).sample(2, 8)
    assert '\n' not in str(error.value)


def test_two_gigabytes_stay_on_disk(tmp_path):
    with open(tmp_path / 'big.bin', 'wb') as f:
        f.write(np.arange(1000, dtype=np.uint16).tobytes())
        f.truncate(2 ** 31)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = {'text': [0, 0, 1, 0, 2, 0, 3, 0], 'openwebtext': list(range(8))}
    for name, size in (('text', 2 ** 31), ('openwebtext', 2 ** 30)):
        task = tasks.make(name, str(tmp_path / 'big.bin'))
        assert sum(len(task.parts[part][0]) for part in tasks.PARTS) == size
        assert task.sample(8, 1024, generator(0))[0].shape == (8, 1024)
        held = task.held_out('test', 4, [512, 4096], generator)
        assert held[512][0].shape == (36, 512)
        assert task.parts['train'][0][:8].tolist() == first[name]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def chorale_text(frames):
    """Frames of pitches as JSB.decode() writes them."""
    return ' '.join('-' if pitch == -1 else str(pitch) for frame in frames for pitch in frame)


def test_jsb_chorales_come_back(tmp_path):
    chance = random.Random(0)
    chorales = {}
    for name, sizes in (('train', (5, 30)), ('valid', (9,)), ('test', (1, 12))):
        frames = [[[chance.choice([-1, *range(21, 109)]) for _ in range(4)] for _ in range(size)]
                  for size in sizes]
        chorales[name] = frames
    (tmp_path / 'j.json').write_text(json.dumps(chorales))
    task = tasks.make('jsb', str(tmp_path / 'j.json'))
    assert len(task.vocab) == 90
    for part, name in zip(tasks.PARTS, chorales):
        for document, chorale in zip(task.parts[part], chorales[name]):
            row = task.lay_out([document], len(document) + 3)[0][0]
            assert task.decode(row) == chorale_text(chorale)

    tokens, _ = task.sample(200, 16, generator(0))
    frames = [frame for chorale in chorales['train'] for frame in chorale]
    frames = {tuple(task.encode(chorale_text([frame])).tolist()) for frame in frames}
    assert set(map(tuple, tokens.view(-1, 4).tolist())) <= frames  # they begin with the first voice

    whole = [task.lay_out([document], len(document))[0][0].tolist()
             for document in task.parts['train']]
    task.parts['test'] = task.parts['train']
    for tokens, targets in task.held_out('test', 99, [5, 16, 60], generator).values():
        assert (targets != -100).sum() == sum(map(len, whole)) - 2
        for row in tokens.tolist():
            row = [token for token in row if token != tasks.PAD]
            assert any(row == document[i:i + len(row)]
                       for document in whole for i in range(0, len(document), 4))


def test_genomes_are_cut_into_6_mers(tmp_path):
    chance = random.Random(0)
    records = []
    text = '\n'
    for size in (2, 5, 6, 7, 600, 1201):
        records.append(''.join(chance.choice('ACGT' * 20 + 'acgtNNNNrY') for _ in range(size)))
        text += '>chr\r\n' + '\r\n'.join(re.findall('.{1,60}', records[-1])) + '\r\n\r\n'
    (tmp_path / 'g.fa').write_bytes(text.encode())
    task = tasks.make('genome', str(tmp_path / 'g.fa'))
    assert len(task.vocab) == 4107 == len(set(task.vocab))
    documents = [document for _, document in task.read()]
    assert len(documents) == len(records)
    for document, record in zip(documents, records):
        plain = re.sub('[^ACGT]', 'N', record.upper())
        expected = []
        for stretch in re.findall('[ACGT]+|N', plain):
            expected += re.findall('[ACGT]{6}|.', stretch)
        assert ''.join(expected) == plain
        assert task.decode(task.encode(record)).split() == expected
        assert task.decode(torch.from_numpy(document.astype(int))).split() == expected


NOTES = [60, 64, 67, 21, 108]


def pitches(words):
    return [int(word.removeprefix('Pitch_')) for word in words if word.startswith('Pitch_')]


def test_midi_files_come_back(midi):
    pytest.importorskip('miditok')
    task = tasks.make('maestro', str(midi))
    assert len(task.vocab) == 328 and task.vocab[0] == 'PAD_None'
    words = task.decode(torch.from_numpy(task.parts['train'][0].astype(int))).split()
    assert words[0] == 'BOS_None' and words[-1] == 'EOS_None'
    assert pitches(words) == NOTES
    shifts = set()
    for row in task.sample(200, len(words), generator(0))[0]:
        heard = pitches(task.decode(row).split())
        shift = heard[0] - 60
        shifts.add(shift)
        lowest = 21 + shift + 12 * (shift < 0)
        highest = 108 + shift - 12 * (shift > 0)
        assert heard == [60 + shift, 64 + shift, 67 + shift, lowest, highest]
    assert shifts == set(range(-3, 4))
    (midi / 'train.mid').write_bytes(b'no')
    with pytest.raises(tasks.DataError, match='no MIDI file'):
        tasks.make('maestro', f'{midi}/').sample(1, 2)


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    monkeypatch.setitem(sys.modules, 'miditok', None)
    (tmp_path / 'a.mid').write_text('text')
    with pytest.raises(tasks.DataError, match='pip install tiktoken'):
        tasks.make('openwebtext', str(tmp_path)).encode('text')
    with pytest.raises(tasks.DataError, match='pip install miditok'):
        tasks.make('maestro', str(tmp_path)).sample(1, 2)


def test_byte_pairs_come_back(tmp_path, monkeypatch):
    """Files of tokens become text by tiktoken (here: by something as simple as bytes). What pads
    the vocabulary is never written."""
    pairs = types.SimpleNamespace(encode_ordinary=lambda text: list(text.encode()),
                                  decode=lambda tokens: bytes(tokens).decode())
    tiktoken = types.SimpleNamespace(get_encoding={'gpt2': pairs}.get)
    monkeypatch.setitem(sys.modules, 'tiktoken', tiktoken)
    text = 'byte pairs, ' * 9
    symbols = np.array(list(text.encode()), dtype=np.uint16)
    (tmp_path / 'test.bin').write_bytes(symbols.tobytes())
    token_file(tmp_path, symbols, 'train.npy')
    task = tasks.make('openwebtext', str(tmp_path))
    for part in tasks.PARTS:
        assert np.array_equal(task.parts[part][0], symbols)
    assert len(task.vocab) == 50304 == len(set(task.vocab))
    tokens, _ = task.sample(3, 20, generator(0))
    for row in tokens:
        assert task.decode(row) in text
        assert torch.equal(task.encode(task.decode(row)), row)
    assert task.decode(torch.tensor([1 + ord('a'), 50258, 50303, tasks.PAD])) == 'a'


# --------------------------------------------------------------------------------------------------
# runs on them

def test_perplexity_of_known_distributions(tmp_path):
    """Trained on uniform bytes, and on a Markov chain whose entropy follows from its transitions:
    right to 1 %, at every length of the context."""
    source = np.random.default_rng(0)
    P = source.dirichlet(np.full(6, 0.5), size=6)
    stationary = np.linalg.matrix_power(P, 200)[0]
    entropy = -(stationary[:, None] * P * np.log(P)).sum()
    chain = [0]
    for x in source.random(200000):
        chain.append(min(5, int(np.searchsorted(P[chain[-1]].cumsum(), x))))
    token_file(tmp_path / 'chain', np.array(chain, dtype=np.uint16), 'all.npy')
    noise = source.integers(0, 256, 300000, dtype=np.uint8)
    (tmp_path / 'noise').write_bytes(noise.tobytes())
    for task, path, perplexity in (('tokens:size=6', 'chain', math.exp(entropy)),
                                   ('text', 'noise', 256)):
        train.main(flags(task=task, data=tmp_path / path, out_dir=tmp_path / 'run', lr=1e-2,
                         train_lengths=32, eval_lengths='16,32', max_steps=400, eval_interval=400,
                         n_test=300, batch_size=32))
        scores = json.load(open(tmp_path / 'run/lengths.json'))['0']
        for score in scores.values():
            assert abs(math.exp(score['loss']) / perplexity - 1) < 0.01, (perplexity, scores)


def corpus_flags(folder, **kw):
    """Flags of a small sweep on folder/text."""
    return flags(task='characters', data=folder / 'text', out_dir=folder / 'sweep', n_test=5,
                 train_lengths=16, eval_lengths='16,32,64', pe='nope,alibi', seeds='0,1', **kw)


@pytest.fixture
def corpus_run(tmp_path, capsys):
    """(folder, output) of a sweep on a text file."""
    lines = [f'def f{i}(x): return {i * 7 % 11} * x\n' for i in range(400)]
    (tmp_path / 'text').write_text(''.join(lines))
    train.main(corpus_flags(tmp_path, results=tmp_path / 'r.jsonl'))
    return tmp_path, capsys.readouterr().out


def test_a_corpus_run_and_its_table(corpus_run, capsys):
    folder, out = corpus_run
    assert re.search(r'perplexity by length of the context, pe\n'
                     r'context +16 \| +32 +64\nnope +\d+\.\d+ \| +\d', out)
    assert ') in contexts of 64' in out and '2 seeds: loss ' in out
    run = folder / 'sweep/pe=alibi'
    scores = checkpoint.read_lengths(run / 'lengths.json')
    for length in (16, 32, 64):
        assert scores[0][length].keys() == {'exact', 'token', 'last', 'n', 'loss'}
    result = json.loads(open(folder / 'r.jsonl').readlines()[1])
    assert result['lengths']['1']['64']['loss'] == scores[1][64]['loss']
    assert len(result['curves']['0'][0]) == 3

    train.main([f'--out_dir={run}', '--eval_only', '--eval_lengths=64', '--seeds=1'])
    assert checkpoint.read_lengths(run / 'eval.json') == {1: {64: scores[1][64]}}
    assert f'{math.exp(scores[1][64]["loss"]):.3f}' in capsys.readouterr().out
    assert checkpoint.read_lengths(run / 'lengths.json') == scores  # only training writes it
    train.main(corpus_flags(folder))
    assert capsys.readouterr().out.count('finished earlier') == 2


def test_a_corpus_run_continues_a_prompt(corpus_run, capsys):
    run = corpus_run[0] / 'sweep/pe=alibi'
    texts = []
    for more in ([], [], ['--temperature=0'], ['--new_tokens=7']):
        train.main([f'--out_dir={run}', '--eval_only', '--prompt=def f', *more])
        texts.append(capsys.readouterr().out.partition('\n\n')[2])
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith('def f') for text in texts)
    assert len(texts[0]) == 5 + 200 + 1 and len(texts[3]) == 5 + 7 + 1


def test_a_corpus_run_refuses_what_does_not_fit(corpus_run):
    folder = corpus_run[0]
    run = folder / 'sweep/pe=alibi'
    for argv, says in (
            (['--prompt=é'], 'not in the vocabulary'),
            (['--eval_lengths=1'], 'no problems of the lengths'),
            ([f'--data={folder}/text2'], 'does not exist'),
            (['--prompt=x', '--seeds=7'], 'no model of seed 7')):
        with pytest.raises((UserError, tasks.DataError), match=says):
            train.main([f'--out_dir={run}', '--eval_only', *argv])
    (folder / 'text').write_text('fewer letters' * 99)
    refused = python('train.py', f'--out_dir={run}', '--eval_only')
    assert refused.returncode == 2 and refused.stderr.count('\n') == 1
    assert 'was trained with vocab_size=' in refused.stderr


def test_the_benchmark_times_a_step(capsys):
    train.main([*flags(task='copy', batch_size=4, train_lengths=7), '--benchmark'])
    row = re.search(r'^1 together +1 +([\d.]+) +1.0 +(\d+)$', capsys.readouterr().out, re.M)
    milliseconds = float(row[1])
    tokens_per_second = int(row[2])
    assert abs(milliseconds * tokens_per_second / (1e3 * 4 * 17) - 1) < 0.01


def test_probe_loss_is_the_loss_of_the_run(tmp_path):
    train.main(flags(task='stdlib', out_dir=tmp_path, train_lengths=16, eval_lengths='16,64',
                     n_test=6))
    model, cfg = train.load(tmp_path)
    rows, summary, _ = pope.loss(model, cfg.the_task, cfg, n=6)
    held = cfg.the_task.held_out('test', 6, [64], lambda n: train.generator('cpu', 'test', n))
    curve = pope.losses_by_position(model, *held[64])
    loss = checkpoint.read_lengths(tmp_path / 'lengths.json')[0][64]['loss']
    assert abs(curve[:-1].mean() - loss) < 1e-4 and curve[-1].isnan()
    assert len(rows) == 16 and rows[0]['first'] == 1 and rows[-1]['last'] == 63
    trained, beyond = summary[f'{cfg.pe}, trained positions'], summary[f'{cfg.pe}, beyond']
    assert abs((trained * 15 + beyond * 48) / 63 - loss) < 1e-3
    run = python('probe.py', 'loss', str(tmp_path), '--n=2', f'--beside={tmp_path}')
    assert run.returncode == 0, run.stderr
    assert str(tmp_path) in json.load(open(tmp_path / 'probe_loss.json'))['rows'][0]


def test_scan_exact_match_is_greedy_decoding(tmp_path):
    """Of a trained model, with an encoding that depends on the final length, to the end token."""
    train.main(flags(out_dir=tmp_path, task='scan', pe='vipe', n_layer=2, d_model=32, lr=3e-3,
                     max_steps=300, eval_interval=300, batch_size=32, train_lengths='1-4',
                     eval_lengths='1-5'))
    model, cfg = train.load(tmp_path)
    task = cfg.the_task
    exact = 0
    for length, (tokens, targets) in task.held_out('test', 40, [2, 4, 5], generator).items():
        score = train.evaluate(model, task, {length: (tokens, targets)})[length]['exact']
        greedy = 0
        for row, target in zip(tokens, targets):
            prompt = row[None, :(target != -100).nonzero()[0] + 1]
            n_new = len(row) - prompt.shape[1]
            answer = model.generate(prompt, n_new, end=task.end)[0]
            greedy += task.decode(answer) == task.decode(row)
        assert abs(greedy / len(tokens) - score) < 1e-6
        exact += score
    assert exact > 0.5
