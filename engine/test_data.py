"""The data sets: SCAN, CFQ, and the corpora that engine/data.py reads."""
import json
import math
import os
import random
import re
import resource
import sys
import types

os.environ.setdefault('OMP_NUM_THREADS', '1')            # in what follows, too: two threads mostly wait for each other on tensors as small as these
import numpy as np
import pytest
import torch

import probe
import tasks
import train
from model import Transformer
from test_train import draw
from test_all import flags, python

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

def test_data_sets_train_on_all_and_test_on_the_rest():
    cfg = train.make_config(train.read_config(flags(task='scan', train_lengths='1-30', eval_lengths='1-60', n_test=10 ** 6)))
    assert cfg.train_lengths == list(range(1, 23)) and cfg.eval_lengths == [*range(1, 23), 24, 25, 26, 27, 28, 30, 32, 33, 36, 40, 48]
    task, rows = cfg.the_task, lambda sets, lengths: {task.decode(row) for n in lengths for row in sets[n][0]}
    batches = train.Batches(cfg, [0], task, 'cpu')
    draw(batches, 0)
    assert batches.size == 16990 and len({task.decode(row) for row in batches.tokens[0]}) == 16990
    held = train.held_out(cfg, task, 'test', 'cpu')
    assert len(rows(held, [n for n in held if n > 22])) == 3920 == sum(len(held[n][0]) for n in held if n > 22)
    simple = tasks.make('scan_simple')
    held = simple.held_out('test', 10 ** 6, simple.existing(range(60), None), lambda n: torch.Generator().manual_seed(n))
    trained = {simple.decode(row) for tokens, _ in simple.rows['train'].values() for row in tokens}
    assert len(trained) == 16728 and not trained & rows(held, [n for n in held if n in simple.rows['test']])


def test_cfq(cfq):
    task = tasks.make('cfq', str(cfq))
    text = task.decode(task.rows['train'][15][0][0])
    assert text == "BoS Did M0 ' s writer , a film editor , write M1 EoI SELECT count ( * ) WHERE { ?x0 a film.editor . ?x0 people. m_00 } EoS"
    assert task.existing(range(100), 'train') == [15, 19] and sum(len(tokens) for tokens, _ in task.rows['test'].values()) == 4 == task.count([15, 19]) / 3
    tokens, targets = task.sample(5, 19, torch.Generator().manual_seed(0))
    assert all(task.decode(target[target != -100]) == task.decode(row).split('EoI ')[1] for row, target in zip(tokens, targets))
    mcd = tasks.make('cfq:mcd=1', str(cfq))
    assert {task.decode(row) for tokens, _ in mcd.rows['test'].values() for row in tokens} >= {text} and mcd.count([15, 19]) == 4
    for name, says in (('cfq:mcd=2', 'cannot read .*mcd2.json'), ('cfq:mcd=4', 'mcd=1, 2 and 3')):
        with pytest.raises(ValueError, match=says):
            tasks.make(name, str(cfq)).rows
    (cfq / 'dataset.json').write_text('[{"question": 1}]')
    with pytest.raises(tasks.DataError, match='is not CFQ: .*cfq1.1.tar.gz'):
        tasks.make('cfq', f'{cfq}/').rows


def token_file(folder, array, name='train.npy'):
    folder.mkdir(exist_ok=True)
    np.save(folder / name, array)
    return folder


@pytest.mark.parametrize('sizes', [[1000], [7, 350, 2, 99, 100, 101, 199], [40] * 30])
def test_windows_predict_every_token_once(sizes, tmp_path):
    """Whatever the length of the context, and the same tokens for all; documents are cut apart, and the rest of a document is not dropped."""
    ends = np.cumsum(sizes)
    for i, (end, size) in enumerate(zip(ends, sizes)):
        token_file(tmp_path / 'test', np.arange(end - size, end, dtype=np.uint16), f'{i:02}.npy')
    task = tasks.make('tokens:size=2000', str(tmp_path))
    lengths, firsts = [2, 9, 50, 100], {0, *ends[:-1].tolist()}
    found = task.held_out('test', 10 ** 6, lengths, lambda n: torch.Generator().manual_seed(n))
    for length, (tokens, targets) in found.items():
        predicted = sorted((targets[targets != -100] - 1).tolist())
        assert predicted == sorted(set(range(int(ends[-1]))) - firsts), length
        at, nxt = (targets != -100).nonzero(as_tuple=True)
        assert torch.equal(tokens[at, nxt] + 1, targets[at, nxt]) and tokens.shape[1] == length       # and from the token before it
    some = task.held_out('test', 3, lengths, lambda n: torch.Generator().manual_seed(n))
    kept = {n: set(targets[targets != -100].tolist()) for n, (_, targets) in some.items()}
    assert len({frozenset(x) for x in kept.values()}) == 1 and len(kept[2]) == min(3 * 99, 3 * (max(sizes) - 1), sum(sizes) - len(sizes))


def test_contexts_of_a_corpus_are_uniform_and_within_a_document(tmp_path):
    token_file(tmp_path / 'train', np.arange(20), 'a.npy')
    token_file(tmp_path / 'train', np.arange(100, 103), 'b.npy')
    token_file(tmp_path, np.arange(5), 'val.npy')
    task = tasks.make('tokens:size=200', str(tmp_path))
    tokens, targets = task.sample(6000, 5, torch.Generator().manual_seed(0))
    assert torch.equal(targets[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100))
    short = tokens[:, 0] > 100
    assert abs(short.double().mean() - 3 / 23) < 0.02 and set(map(tuple, tokens[short].tolist())) == {(101, 102, 103, 0, 0)}
    starts = tokens[~short][:, 0].unique(return_counts=True)
    assert starts[0].tolist() == list(range(1, 17)) and starts[1].min() > 240 and (tokens[~short].diff(dim=1) == 1).all()
    assert np.array_equal(task.parts['test'][0], np.arange(5))                          # val stands in for a missing test


def test_documents_are_dealt_to_parts(tmp_path):
    for i in range(40):
        (tmp_path / f'{i}.txt').write_text(f'document {i} ' * 3)
    parts = tasks.make('text', str(tmp_path)).parts
    assert [len(parts[p]) for p in tasks.PARTS] == [36, 2, 2] and len({x.tobytes() for p in tasks.PARTS for x in parts[p]}) == 40
    (tmp_path / 'one').mkdir()
    (tmp_path / 'one/a').write_bytes(bytes(range(200)))
    parts = tasks.make('text', str(tmp_path / 'one')).parts
    assert [bytes(parts[p][0]) for p in tasks.PARTS] == [bytes(range(180)), bytes(range(180, 190)), bytes(range(190, 200))]
    (tmp_path / 'one/validation').mkdir()
    (tmp_path / 'one/validation/.hidden').write_text('no')
    (tmp_path / 'one/validation/b').write_text('yes')
    (tmp_path / 'one/empty').write_text('')
    parts = tasks.make('text', f'{tmp_path}/one/').parts
    assert [[bytes(x) for x in parts[p]] for p in tasks.PARTS] == [[bytes(range(200))], [b'yes'], [b'yes']]


def test_text_comes_back(tmp_path):
    text = 'Grüße, ∀x: x≠0 → 𝄞\r\n\tend\n\n'
    (tmp_path / 'a.txt').write_bytes(text.encode())
    for name in ('text', 'characters'):
        task = tasks.make(name, str(tmp_path / 'a.txt'))
        document = np.concatenate([task.parts[p][0] for p in tasks.PARTS])
        assert task.decode(torch.from_numpy(document.astype(int)) + 1) == text == task.decode(task.encode(text))
        assert len(task.vocab) == (257 if name == 'text' else 1 + len(set(text)))
    with pytest.raises(tasks.DataError, match="'q' is not in the vocabulary"):
        task.encode('q')
    (tmp_path / 'a.txt').write_bytes(b'\xff\xfe')
    with pytest.raises(tasks.DataError, match='not UTF-8'):
        tasks.make('characters', f'{tmp_path}/./a.txt').parts
    stdlib = tasks.make('stdlib')
    source = open(json.__file__, 'rb').read()
    assert stdlib.decode(stdlib.encode(source.decode())).encode() == source and any(bytes(x) == source for p in tasks.PARTS for x in stdlib.parts[p])


@pytest.mark.parametrize('name, data, says', [
    ('text', b'', 'nothing to read'), ('text', b'x', 'nothing to read'), ('text', None, 'does not exist'), ('characters', b'', 'nothing to read'), ('tokens', b'123', 'is not a .bin'),
    ('tokens:size=9', 'wide.npy', 'one row of whole numbers'), ('tokens:size=9', 'big.npy', 'the vocabulary has 0 to 8'),
    ('tokens:size=9', 'minus.npy', 'the symbol -1'), ('tokens', b'', 'is not a .bin'), ('tokens', 'many.npz', 'is not a .bin'), ('tokens:size=9', 'odd.bin', 'odd number of bytes'),
    ('jsb', b'{"train": 3}', 'is not Jsb16th'), ('jsb', b'{"train": [[[1, 2, 3, 4]]], "valid": [], "test": []}', 'each -1 or 21 to 108'),
    ('jsb', b'{"train": [[[60, 60, 60]]], "valid": [], "test": []}', 'rows of four'), ('jsb', b'not json', 'not JSON'), ('genome', b'ACGT', 'no FASTA'), ('genome', b'>x\nAC1\n', "b'AC1'"), ('jsb', b'{"train": [], "valid": [], "test": []}', 'nothing to read'),
    ('genome', b'', 'nothing to read'), ('openwebtext', 'odd.bin', 'odd number'), ('text', 'folder', 'has no such files')])
def test_data_that_do_not_fit(name, data, says, tmp_path):
    np.save(tmp_path / 'wide.npy', np.ones((3, 3)))
    np.save(tmp_path / 'minus.npy', np.full(99, -1))
    np.savez(tmp_path / 'many.npz', np.ones(9))
    np.save(tmp_path / 'big.npy', np.full(99, 9, dtype=np.uint16))
    (tmp_path / 'odd.bin').write_bytes(b'123')
    (tmp_path / 'folder').mkdir()
    path = tmp_path / (data if isinstance(data, str) else 'data')
    if isinstance(data, bytes):
        path.write_bytes(data)
    with pytest.raises(tasks.DataError, match=re.escape(says)) as error:
        tasks.make(name, str(path)).sample(2, 8)
    assert '\n' not in str(error.value)


def test_two_gigabytes_stay_on_disk(tmp_path):
    with open(tmp_path / 'big.bin', 'wb') as f:
        f.write(np.arange(1000, dtype=np.uint16).tobytes())
        f.truncate(2 ** 31)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ('text', 'openwebtext'):
        task = tasks.make(name, str(tmp_path / 'big.bin'))
        assert sum(len(task.parts[p][0]) for p in tasks.PARTS) == 2 ** 31 // (1 if name == 'text' else 2)
        assert task.sample(8, 1024, torch.Generator().manual_seed(0))[0].shape == (8, 1024)
        assert task.held_out('test', 4, [512, 4096], lambda n: torch.Generator().manual_seed(n))[512][0].shape == (36, 512)
        assert task.parts['train'][0][:8].tolist() == ([0, 0, 1, 0, 2, 0, 3, 0] if name == 'text' else list(range(8)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_jsb_chorales_come_back(tmp_path):
    pitches = random.Random(0)
    chorales = {part: [[[pitches.choice([-1, *range(21, 109)]) for _ in range(4)] for _ in range(n)] for n in sizes] for part, sizes in
                (('train', (5, 30)), ('valid', (9,)), ('test', (1, 12)))}
    (tmp_path / 'j.json').write_text(json.dumps(chorales))
    task = tasks.make('jsb', str(tmp_path / 'j.json'))
    assert len(task.vocab) == 90
    for part, name in zip(tasks.PARTS, ('train', 'valid', 'test')):
        for document, chorale in zip(task.parts[part], chorales[name]):
            row = task.lay_out([document], len(document) + 3)[0][0]
            assert task.chorale(row).tolist() == chorale and task.decode(row) == ' '.join('-' if p == -1 else str(p) for frame in chorale for p in frame)
    tokens, _ = task.sample(200, 16, torch.Generator().manual_seed(0))
    frames = {tuple(task.encode(' '.join('-' if p == -1 else str(p) for p in frame)).tolist()) for chorale in chorales['train'] for frame in chorale}
    assert all(tuple(frame) in frames for frame in tokens.view(-1, 4).tolist())          # contexts begin with the first voice
    whole = [task.lay_out([document], len(document))[0][0].tolist() for document in task.parts['train']]
    task.parts['test'], said = task.parts['train'], {}
    for length, (tokens, targets) in task.held_out('test', 99, [5, 16, 60], lambda n: torch.Generator().manual_seed(n)).items():
        said[length] = (targets != -100).sum()
        for row in ([token for token in row if token] for row in tokens.tolist()):
            assert any(row == document[i:i + len(row)] for document in whole for i in range(0, len(document), 4))
    assert set(map(int, said.values())) == {sum(map(len, whole)) - 2}


def test_genomes_are_cut_into_6_mers(tmp_path):
    chance, records = random.Random(0), []
    for size in (2, 5, 6, 7, 600, 1201):
        records.append(''.join(chance.choice('ACGT' * 20 + 'acgtNNNNrY') for _ in range(size)))
    (tmp_path / 'g.fa').write_bytes(b'\n' + b''.join(b'>chr\r\n' + '\r\n'.join(re.findall('.{1,60}', x)).encode() + b'\r\n\r\n' for x in records))
    task = tasks.make('genome', str(tmp_path / 'g.fa'))
    assert len(task.vocab) == 4107 == len(set(task.vocab))
    documents = [document for _, document in task.read()]
    assert len(documents) == len(records)
    for document, record in zip(documents, records):
        plain = re.sub('[^ACGT]', 'N', record.upper())
        assert task.decode(task.encode(record)).split() == (expected := [piece for stretch in re.findall('[ACGT]+|N', plain) for piece in re.findall('[ACGT]{6}|.', stretch)])
        assert task.decode(torch.from_numpy(document.astype(int))).split() == expected and ''.join(expected) == plain


@pytest.fixture
def midi(tmp_path):
    """A folder with three files of the same five notes."""
    symusic = pytest.importorskip('symusic')
    score = symusic.Score(480)
    track = symusic.Track(program=0)
    for i, pitch in enumerate((60, 64, 67, 21, 108)):
        track.notes.append(symusic.Note(480 * i, 240, pitch, 64))
    score.tracks.append(track)
    for i in range(3):
        score.dump_midi(tmp_path / f'{("train", "val", "test")[i]}.mid')
    return tmp_path


def test_midi_files_come_back(midi):
    pytest.importorskip('miditok')
    task = tasks.make('maestro', str(midi))
    assert len(task.vocab) == 328 and task.vocab[0] == 'PAD_None'
    words = task.decode(torch.from_numpy(task.parts['train'][0].astype(int))).split()
    assert words[0] == 'BOS_None' and words[-1] == 'EOS_None' and [w for w in words if w.startswith('Pitch_')] == [f'Pitch_{p}' for p in (60, 64, 67, 21, 108)]
    heard = set()
    for row in task.sample(200, len(words), torch.Generator().manual_seed(0))[0]:
        pitches = [int(w[6:]) for w in task.decode(row).split() if w.startswith('Pitch_')]
        heard.add(shift := pitches[0] - 60)
        assert pitches == [60 + shift, 64 + shift, 67 + shift, 21 + shift + 12 * (shift < 0), 108 + shift - 12 * (shift > 0)]
    assert heard == set(range(-3, 4))
    (midi / 'train.mid').write_bytes(b'no')
    with pytest.raises(tasks.DataError, match='no MIDI file'):
        tasks.make('maestro', f'{midi}/').parts


def test_byte_pairs_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    monkeypatch.setitem(sys.modules, 'miditok', None)
    (tmp_path / 'a.txt').write_text('text')
    (tmp_path / 'a.mid').write_text('text')
    for name, path, says in (('openwebtext', 'a.txt', 'pip install tiktoken'), ('maestro', '', 'pip install miditok')):
        with pytest.raises(tasks.DataError, match=says):
            tasks.make(name, f'{tmp_path}/{path}').parts


def test_byte_pairs_and_token_files_go_together(tmp_path, monkeypatch):
    """Text cut up by tiktoken (here: by something as simple as bytes) and files of the same tokens are the same corpus."""
    pairs = types.SimpleNamespace(encode_ordinary=lambda text: list(text.encode()), decode=lambda tokens: bytes(tokens).decode())
    monkeypatch.setitem(sys.modules, 'tiktoken', types.SimpleNamespace(get_encoding={'gpt2': pairs}.get))
    text = 'byte pairs, ' * 9
    (tmp_path / 'train.txt').write_text(text)
    token_file(tmp_path, np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16), 'val.npy')
    (tmp_path / 'test.bin').write_bytes(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16).tobytes())
    task = tasks.make('openwebtext', str(tmp_path))
    assert all(np.array_equal(task.parts[part][0], task.parts['train'][0]) for part in tasks.PARTS) and len(task.vocab) == 50258
    tokens, _ = task.sample(3, 20, torch.Generator().manual_seed(0))
    assert all(task.decode(row) in text and torch.equal(task.encode(task.decode(row)), row) for row in tokens)


def test_perplexity_of_known_distributions(tmp_path):
    """Trained on uniform bytes, and on a Markov chain whose entropy follows from its transitions: right to 1 %, at every length of the context."""
    source = np.random.default_rng(0)
    P = source.dirichlet(np.full(6, 0.5), size=6)
    stationary = np.linalg.matrix_power(P, 200)[0]
    entropy = -(stationary[:, None] * P * np.log(P)).sum()
    chain, uniform = [0], source.random(200000)
    for x in uniform:
        chain.append(min(5, int(np.searchsorted(P[chain[-1]].cumsum(), x))))
    token_file(tmp_path / 'chain', np.array(chain, dtype=np.uint16), 'all.npy')
    (tmp_path / 'noise').write_bytes(source.integers(0, 256, 300000, dtype=np.uint8).tobytes())
    for task, data, perplexity in (('tokens:size=6', 'chain', math.exp(entropy)), ('text', 'noise', 256)):
        train.main(flags(task=task, data=tmp_path / data, out_dir=tmp_path / 'run', train_lengths=32, eval_lengths='16,32', max_steps=400, eval_interval=400, lr=1e-2, n_test=300,
                         batch_size=32))
        scores = json.load(open(tmp_path / 'run/lengths.json'))['0']
        assert all(abs(math.exp(score['loss']) / perplexity - 1) < 0.01 for score in scores.values()), (perplexity, scores)


def test_a_corpus_run_its_table_prompt_and_probe(tmp_path, capsys):
    (tmp_path / 'text').write_text(''.join(f'def f{i}(x): return {i * 7 % 11} * x\n' for i in range(400)))
    kw = dict(task='characters', data=tmp_path / 'text', train_lengths=16, eval_lengths='16,32,64', n_test=5)
    train.main(flags(out_dir=tmp_path / 'sweep', results=tmp_path / 'r.jsonl', pe='nope,alibi', seeds='0,1', **kw))
    out = capsys.readouterr().out
    assert re.search(r'perplexity by length of the context, pe\ncontext +16 \| +32 +64\nnope +\d+\.\d+ \| +\d', out) and ') in contexts of 64' in out
    run = tmp_path / 'sweep/pe=alibi'
    scores = train.read_lengths(run / 'lengths.json')
    assert all(scores[0][n].keys() == {'exact', 'token', 'last', 'n', 'loss'} for n in (16, 32, 64)) and '2 seeds: loss ' in out
    result = json.loads(open(tmp_path / 'r.jsonl').readlines()[1])
    assert result['lengths']['1']['64']['loss'] == scores[1][64]['loss'] and len(result['curves']['0'][0]) == 3
    (tmp_path / 'other').write_text('def f1(x): return 0\n' * 99)
    train.main([f'--out_dir={run}', '--eval_only', '--eval_lengths=64', '--seeds=1'])
    assert train.read_lengths(run / 'eval.json') == {1: {64: scores[1][64]}} and f'{math.exp(scores[1][64]["loss"]):.3f}' in capsys.readouterr().out
    assert train.read_lengths(run / 'lengths.json') == scores                           # which is of the run's own text alone
    train.main(flags(out_dir=tmp_path / 'sweep', pe='nope,alibi', seeds='0,1', **kw))
    assert capsys.readouterr().out.count('finished earlier') == 2
    told = []
    for more in ([], [], ['--temperature=0'], ['--new_tokens=7']):
        train.main([f'--out_dir={run}', '--eval_only', '--prompt=def f', *more])
        told.append(capsys.readouterr().out.partition('\n\n')[2])
    assert told[0] == told[1] != told[2] and all(text.startswith('def f') for text in told) and len(told[3]) == 5 + 7 + 1 and len(told[0]) == 206
    for argv, says in ((['--prompt=é'], 'not in the vocabulary'), (['--eval_lengths=1'], 'no problems of the lengths'), ([f'--data={tmp_path}/text2'], 'does not exist'), (['--prompt=x', '--seeds=7'], 'no model of seed 7')):
        with pytest.raises((train.UserError, tasks.DataError), match=says):
            train.main([f'--out_dir={run}', '--eval_only', *argv])
    (tmp_path / 'text').write_text('fewer letters' * 99)
    refused = python('train.py', f'--out_dir={run}', '--eval_only')
    assert refused.returncode == 2 and refused.stderr.count('\n') == 1 and 'was trained with vocab_size=' in refused.stderr


def test_flops_are_those_that_pytorch_counts(capsys):
    from torch.utils.flop_counter import FlopCounterMode                                # imports Triton, which kernels.py has to do first
    cfg = train.make_config(train.read_config(flags(task='stdlib', pe='nope', train_lengths=64, eval_lengths=64, d_model=64, n_layer=3, batch_size=4)))
    model, (tokens, targets) = Transformer(cfg).train(), cfg.the_task.sample(4, 64, torch.Generator())
    for block in model.blocks:
        block.attn.tap_logits.register_forward_hook(lambda *_: None)                    # attention as products that the counter sees
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets)[1].backward()
    assert abs(counter.get_total_flops() / (tokens.numel() * train.flops_per_token(cfg, model)) - 1) < 0.02
    train.main([*flags(task='stdlib', train_lengths=64, eval_lengths=64, batch_size=4), '--benchmark'])
    row = re.search(r'^1 together +([\d.]+) .* ([\d,]+) +[\d.]+$', capsys.readouterr().out, re.M)
    assert abs(float(row[1]) * int(row[2].replace(',', '')) / (1e3 * 4 * 64) - 1) < 0.01


def test_probe_loss_is_the_loss_of_the_run(tmp_path):
    train.main(flags(task='stdlib', out_dir=tmp_path, train_lengths=16, eval_lengths='16,64', n_test=6))
    model, cfg = train.load(tmp_path)
    rows, summary, figure = probe.loss(model, cfg.the_task, cfg, n=6)
    tokens, targets = cfg.the_task.held_out('test', 6, [64], lambda n: train.generator('cpu', 'test', n))[64]
    curve = probe.losses_by_position(model, tokens, targets)
    loss = train.read_lengths(tmp_path / 'lengths.json')[0][64]['loss']
    assert abs(curve[:-1].mean() - loss) < 1e-4 and curve[-1].isnan() and len(rows) == 16 and rows[0]['first'] == 1 and rows[-1]['last'] == 63
    assert abs((summary[f'{cfg.pe}, trained positions'] * 15 + summary[f'{cfg.pe}, beyond'] * 48) / 63 - loss) < 1e-3
    run = python('probe.py', 'loss', str(tmp_path), '--n=2', f'--beside={tmp_path}')
    assert run.returncode == 0 and str(tmp_path) in json.load(open(tmp_path / 'probe_loss.json'))['rows'][0], run.stderr


def test_scan_exact_match_is_greedy_decoding(tmp_path):
    """Of a trained model, with an encoding that depends on the final length, to the end token."""
    train.main(flags(out_dir=tmp_path, task='scan', pe='vipe', max_steps=300, eval_interval=300, lr=3e-3, n_layer=2, d_model=32, batch_size=32, train_lengths='1-4', eval_lengths='1-5'))
    model, cfg = train.load(tmp_path)
    task, exact = cfg.the_task, 0
    for length, (tokens, targets) in task.held_out('test', 40, [2, 4, 5], lambda n: torch.Generator().manual_seed(n)).items():
        score, greedy = train.evaluate(model, task, {length: (tokens, targets)})[length]['exact'], 0
        for row, target in zip(tokens, targets):
            asked = (target != -100).nonzero()[0] + 1
            told = model.generate(row[None, :asked], tokens.shape[1] - asked.item(), end=task.end, total_len=tokens.shape[1])[0]
            greedy += task.decode(told) == task.decode(row)
        assert abs(greedy / len(tokens) - score) < 1e-6
        exact += score
    assert exact > 0.5
