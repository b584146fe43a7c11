"""The evidence's machinery: what is missing is run, and tables are what results/*.jsonl says."""
import importlib.util
import itertools
import json
import math
import os
import re
import shlex

import pytest

import train
from engine import config
from engine.config import UserError
from results import board, claims, evidence, plan

HERE = plan.ROOT


def test_readme_tables_are_made_from_results():
    evidence.ask()
    for path, text in evidence.readme().items():
        with open(os.path.join(HERE, path)) as f:
            assert text == f.read(), 'run python results/evidence.py readme'


@pytest.mark.parametrize('name', plan.GRIDS)
def test_every_piece_can_be_run(name):
    """Flags make a configuration; twice the longest trained length is evaluated; rows differ."""
    grid = plan.GRIDS[name]
    assert len(set(grid.rows.values())) == len(grid.rows)
    for flags, (given, twice) in itertools.product(grid.rows.values(), grid.columns.values()):
        if 'data/' in given:                      # a file that is not in the repository
            continue
        argv = [os.path.join(HERE, arg) if arg.startswith('configs/') else arg
                for arg in shlex.split(f'{given} {flags}')]
        cfg = train.make_config(config.read(train.Config, argv))
        longest = max(cfg.train_lengths)
        longer = [n for n in cfg.eval_lengths if n in twice]
        if list(twice) == [2 * longest]:
            assert longer == [2 * longest]
        elif twice:                               # several lengths, or an ablation's shorter steps
            assert cfg.task.startswith('scan') or name.startswith('ablation') or name == 'to_20'
            assert min(longer) > longest


TINY_TRAIN = '''
import json, os, sys
if '--pe=bad' in sys.argv:
    sys.exit('train.py: no such encoding')
folder = next(arg[10:] for arg in sys.argv if arg.startswith('--out_dir='))
open(folder + '/ckpt.pt', 'w').close()
rate = next(float(arg[5:]) for arg in sys.argv if arg.startswith('--lr='))
seeds = [1, 2] if '--seeds=1,2' in sys.argv else [0]
kept = [seed for seed in seeds if (rate, seed) not in ((4e-3, 0), (2e-3, 2))]     # others diverge
scores = {n: dict(exact=1 - 100 * rate * (n < 3) - 0.5 * (n > 3), token=0.9, n=64)
          for n in (1, 2, 4)}
line = dict(
    command='python ' + ' '.join(sys.argv),
    config=dict(train_lengths=[1, 2], eval_lengths=[1, 2, 4], lr=rate, seeds=seeds),
    lengths={seed: scores for seed in kept},
    curves={seed: [[500, 1, 1, 4], [1000, 100 * rate, 0.5, 2]] for seed in kept})
with open('results/tiny.jsonl', 'a') as f:
    f.write(json.dumps(line) + chr(10))
'''


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a train.py that takes no time, and a plan of two cells, of which one fails."""
    (tmp_path / 'results').mkdir()
    (tmp_path / 'train.py').write_text(TINY_TRAIN)
    grids = {'tiny': plan.Grid('', dict(good='--pe=rope', bad='--pe=bad'),
                               dict(short=('--task=parity', [4])))}
    monkeypatch.setattr(plan, 'ROOT', str(tmp_path))
    monkeypatch.setattr(plan, 'GRIDS', grids)
    monkeypatch.setattr(evidence, 'GRIDS', grids)
    monkeypatch.setattr(plan, 'HEADS', [])
    monkeypatch.setattr(claims, 'PAPERS', {})
    monkeypatch.setattr(claims, 'perturb_table', list)
    monkeypatch.setattr(claims, 'stops_table', list)
    monkeypatch.setattr(evidence, 'why_table', list)
    # this process keeps its own signals
    monkeypatch.setattr(evidence.signal, 'signal', lambda *_: None)
    return tmp_path


def test_run_what_is_missing(tiny, capsys):
    """Validation chooses the rate, seeds 1 and 2 follow at it; what fails is told and left."""
    evidence.run(1, 2)
    told = capsys.readouterr().out
    assert '4 done, 3 failed' in told
    assert told.count('train.py: no such encoding') == 3
    commands = list(plan.by_command('tiny'))
    # 4e-3 diverged; 1e-3 ended with a lower validation score, though its test is better
    assert len(commands) == 4 and '--lr=2e-3 --seeds=1,2' in commands[-1]
    first, *_, row, rates = evidence.grid_table('tiny')
    assert first == '1 of 2 cells so far; no cell yet of bad.\n'
    assert row == '| good | 80 ±0 (1 of 3 seeds diverged)<br>50 ±0<br>none<br>at 0.002 |'
    assert rates.startswith('\nIn 0 of these 1 cells the learning rate is the highest')
    evidence.run(0.02, 2)                                               # nothing runs again
    assert len((tiny / 'results/tiny.jsonl').read_text().splitlines()) == 4


def test_every_cell_of_the_board_can_be_run():
    cells = [('parity', row) for row in board.ROWS]
    cells += [(column, 'rope') for column, task in board.COLUMNS.items()
              if 'data/' not in task.flags]
    for column, row in cells:
        flags = board.argv('0.1', row, column, '1e-3', '0-4', board.COLUMNS[column].evaluated)[1:]
        cfg = train.make_config(config.read(train.Config, flags))
        assert len(cfg.seeds) == 5 and max(cfg.eval_lengths) > max(cfg.train_lengths)
        assert cfg.eval_len == board.COLUMNS[column].tokens


def test_board(tmp_path, monkeypatch, capsys):
    """Two rows on two tasks, for ten steps: a second command goes on, a third changes nothing."""
    (tmp_path / 'results').mkdir()
    os.symlink(os.path.join(HERE, 'train.py'), tmp_path / 'train.py')
    monkeypatch.setattr(plan, 'ROOT', str(tmp_path))
    monkeypatch.setattr(evidence.signal, 'signal', lambda *_: None)
    monkeypatch.setattr(board, 'SHAPE', '--d_model=8 --n_layer=1 --n_head=1 --n_eval=8 --n_test=64')
    monkeypatch.setattr(board, 'COLUMNS', {
        name: board.COLUMNS[name]._replace(trained='1-2', evaluated='1-4')
        for name in ('parity', 'copy')})
    command = ['board', '--minutes=0.01', '--pe=nope,alibi']
    path = tmp_path / 'results/board_0.01.jsonl'
    assert not evidence.main([*command, '--task=copy'])
    first = path.read_text()
    assert not evidence.main(command)
    told = capsys.readouterr().out
    assert '2 of 4 cells; next out/board_0.01/parity/nope,seeds=5' in told
    both = path.read_text()
    assert both.startswith(first) and both.count('--seeds=0-4') == 2 * 2
    assert 2 * 2 * 3 <= both.count('--seeds=5') <= 2 * 2 * 4
    assert not evidence.main(command)
    assert path.read_text() == both and '0 done' in capsys.readouterr().out
    # other flags: what is in the folder is not theirs
    monkeypatch.setattr(board, 'SHAPE', board.SHAPE.replace('d_model=8', 'd_model=16'))
    assert not evidence.main(['board', '--minutes=0.01', '--pe=nope', '--task=copy'])
    monkeypatch.setattr(board, 'SHAPE', board.SHAPE.replace('d_model=16', 'd_model=8'))
    cells = board.find('0.01', ['nope', 'alibi'])
    assert len(cells) == 4 and all(len(board.reach(line)) == 5 for line in cells.values())
    if importlib.util.find_spec('matplotlib'):
        assert (tmp_path / 'out/board_0.01.png').exists()
    monkeypatch.setattr(board, 'DIAL', '0.01')
    monkeypatch.setattr(board, 'ROWS', {name: f'--pe={name}' for name in ('nope', 'alibi', 'rope')})
    text, = board.block()
    assert text.startswith('No column is whole yet') and not list(board.front())
    board.ROWS.pop('rope')
    *_, first, second = board.block()
    assert first.count('<br>') == second.count('<br>') == 3 and 'nope' in first + second


def test_a_board_rate_beyond_the_three_is_tried_where_the_best_is_at_their_edge(monkeypatch):
    def line(rate, exact):
        return dict(config=dict(lr=float(rate)), lengths={'5': {1: dict(exact=1)}},
                    curves={'5': [[10, exact, None, 1, exact]]})

    def search(*exact, beyond=None):
        lines = [line(rate, x) for rate, x in zip(board.RATES.split(','), exact)]
        monkeypatch.setattr(plan, 'lines_of', lambda *_: lines)
        monkeypatch.setattr(plan, 'look_up', lambda *_: beyond and line('5e-4', beyond))
        plan.missing.clear()
        return board.search('1', 'rope', 'parity')

    assert search(0.1, 0.3, 0.2) == 2e-3 and search(0.3, 0.3, 0.2) == 1e-3
    assert search(0.3, 0.2, 0.1) is None and '--lr=5e-4' in plan.missing[0]
    assert search(0.1, 0.2, 0.3) is None and '--lr=8e-3' in plan.missing[0]
    assert search(0.3, 0.2, 0.1, beyond=0.4) == 5e-4
    assert search(0.3, 0.2, 0.1, beyond=0.3) == 1e-3
    assert search(0.3, 0.2) is None and f'--lr={board.RATES}' in plan.missing[0]


def test_reach_counts_all_seeds():
    def seed(*exact):
        return {n: dict(exact=x, n=64) for n, x in enumerate(exact, 1)}

    line = dict(config=dict(train_lengths=[1, 2], eval_lengths=[1, 2, 3, 4], seeds=[0, 1, 2, 3, 4]),
                lengths={0: seed(1, 1, 1, 0), 1: seed(1, 1, 1, 1), 2: seed(0, 1, 1, 1),
                         3: seed(1, 0, 1, 1)})
    assert board.reach(line) == [1.5, 2, 0, 0, 0]         # two have not learned, seed 4 diverged
    assert [board.times(x, line) for x in (0, 1, 1.125, 2)] == ['<1', '1', '1.12', '2+']
    assert board.cell_text(line) == '<1 (<1 to 2+)<br>75 % (1 diverged)'
    far, near = ('a', 'copy'), ('b', 'copy')
    lost = line | dict(lengths={})
    all_seeds = line | dict(lengths=dict.fromkeys('01234', seed(1, 1)))
    assert board.order({near: lost, far: all_seeds}) == ['a', 'b']
    assert board.cell_text(lost) == 'all diverged'


def test_sentences_count_ties():
    def line(exact):
        return dict(config=dict(train_lengths=[1], eval_lengths=[1, 2], seeds=[0]),
                    lengths={0: {1: dict(exact=1, n=64), 2: dict(exact=exact, n=64)}})

    far = dict(rope=0, nope=1, alibi=0, t5=1)
    cells = {(row, 'copy'): line(exact) for row, exact in far.items()}
    first, nobody, rope, nope, _ = board.sentences(cells, {})
    assert '`rope` (0)' in first and '`nope` (1)' in first       # rope shares the third place
    assert nobody.endswith('none.')
    assert rope.startswith('`rope` is number 3 to 4 of 4: it learns 1 of 1 tasks')
    assert nope.startswith('`nope` is number 1 to 2 of 4')


def test_boards_compared():
    def line(exact):
        return dict(config=dict(train_lengths=[1], eval_lengths=[1, 2], seeds=[0]),
                    lengths={0: {1: dict(exact=exact, n=64), 2: dict(exact=exact, n=64)}})

    here = {('a', 'copy'): line(1), ('b', 'copy'): line(0.5), ('c', 'copy'): line(0.2)}
    there = {('a', 'copy'): line(0.5), ('b', 'copy'): line(0.3), ('c', 'copy'): line(0.1)}
    *_, text = board.sentences(here, there)
    assert text.startswith('In 2 of 3 cells') and 'quarter of the steps it is 3 cells' in text
    python = {(row, 'Python'): dict(line(0), lengths={0: {1: dict(loss=x)}})
              for row, x in zip('abc', (1, 2, 3))}
    text = board.comparison(here | python, there | python)
    assert 'in 0 cells, here in 1, and 3 rows hold none' in text
    assert 'how far they hold nan' in text and 'lengths 1.00, by perplexity 1.00' in text


def test_rank_correlation():
    assert board.rank_correlation([(1, 10), (2, 20), (3, 90)]) == pytest.approx(1)
    assert board.rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert board.rank_correlation([(1, 1), (1, 2), (2, 1), (2, 2)]) == pytest.approx(0)
    assert math.isnan(board.rank_correlation([(1, 1), (1, 2)]))


@pytest.mark.parametrize('flags,message', [
    ([], 'wants --minutes'), (['--minutes=-1'], 'from 0.01'),
    (['--minutes=1', '--pe=,'], 'write'), (['--minutes=1', '--task=x'], 'no task x'),
    (['--minutes=1', '--pe=roep'], "no encoding 'roep'"),
    (['--minutes=1', '--lr=1'], 'write `board')])
def test_wrong_commands_of_the_board(flags, message):
    with pytest.raises(UserError, match=message):
        evidence.main(['board', *flags])


def test_resume_only_the_very_same_piece(tiny):
    argv = plan.train_argv('tiny', 'short/good', '--task=parity --pe=rope --lr=1e-3')
    for given, resumed in ((argv, False), (argv, True), ([*argv, '--n_layer=3'], False)):
        evidence.Piece(given, 1).finish()
        *_, line = (tiny / 'results/tiny.jsonl').read_text().splitlines()
        assert ('--resume' in json.loads(line)['command']) == resumed


def test_a_piece_has_its_share_of_the_cores(tiny, monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(evidence.os, 'cpu_count', lambda: 6)
    (tiny / 'train.py').write_text("import os\nopen('n', 'w').write(os.environ['OMP_NUM_THREADS'])")
    evidence.Piece(plan.train_argv('tiny', 'short/good', '--task=parity'), 2).finish()
    assert (tiny / 'n').read_text() == '3'


def test_one_run_at_a_time(tiny):
    with evidence.take_lock():
        with pytest.raises(UserError, match='another `evidence.py run` is at work'):
            evidence.take_lock()


def test_a_line_that_is_cut_off_is_told(tiny):
    (tiny / 'results/tiny.jsonl').write_text('{"comm')
    with pytest.raises(UserError, match='tiny.jsonl, line 1, is cut off'):
        evidence.ask()


def test_wrong_command_lines():
    for argv in (['runn'], ['run'], ['run', 'x'], ['run', '1', '0'], ['readme', 'x']):
        with pytest.raises(UserError, match='write `run MINUTES`'):
            evidence.main(argv)


def test_without_results(tmp_path, monkeypatch):
    """Every table and claim says that it has not run; what needs a file that is not there waits."""
    (tmp_path / 'results').mkdir()
    for path in ('README.md', 'results/README.md'):
        with open(os.path.join(HERE, path)) as f:
            (tmp_path / path).write_text(f.read())
    monkeypatch.setattr(plan, 'ROOT', str(tmp_path))
    evidence.ask()
    assert not plan.cells
    text = evidence.readme()['results/README.md']
    assert 'None' not in ''.join(evidence.claims.claims_table())
    assert text.count('\nNot run yet.\n') == len(evidence.BY_LENGTH) + 8   # why, seeds, ...
    table = text.partition('<!-- claims -->')[2].partition('<!-- end of claims -->')[0]
    rows = [row for row in re.findall(r'^\| .*', table, re.M) if not row.startswith('| claim |')]
    not_run = [row for row in rows if row.endswith(' | not run yet |  |')]
    assert len(rows) - len(not_run) == 1                                # it points to another table
    smol = 'SmolLM2-135M-Instruct.Q4_1.gguf'
    axes = next(argv for argv in plan.missing if argv[1:3] == ['axes', f'--hf={smol}'])
    by_hand = next(argv for argv in plan.missing if argv[2] == 'by_hand:polynomial')
    assert evidence.lacks(axes) == smol and evidence.lacks(by_hand) is None
    assert plan.out_dir(axes) == f'out/{smol}'
    assert plan.out_dir(by_hand) == 'out/by_hand_polynomial'


RUN = dict(config=dict(train_lengths=[1], eval_lengths=[1, 2], seeds=[0]),
           lengths={0: {1: dict(exact=1.0, token=1.0, n=64),
                        2: dict(exact=0.5, token=0.75, n=8)}}, curves={0: []})
DIVERGED = RUN | dict(lengths={}, curves={})


def test_cells():
    """One seed has no spread, nothing evaluated is -, few problems do not count for `holds`."""
    one, none = plan.summarize([RUN], [2]), plan.summarize([RUN], [])
    assert plan.shown(one, 'all') == '100 → 50 → ≥ 1'
    assert plan.shown(none, 'twice') == '-'
    lost = plan.summarize([DIVERGED], [2])
    assert plan.shown(lost, 'all') == '- (1 of 1 seeds diverged) → - → -'
    assert evidence.colour(lost, 'trained', [one, lost]) == ('diverged', 0.0)
    right, wrong = dict(exact=1.0, token=1.0, n=64), dict(exact=0.9, token=0.96, n=64)
    assert plan.shown(one, 'reach') == '≥ 1 (75)'
    two = RUN | dict(config=RUN['config'] | dict(seeds=[0, 1]),
                     lengths={0: {1: wrong, 2: right}, 1: {1: right, 2: right}})
    assert plan.shown(plan.summarize([two], [2]), 'all') == '95 ±7 → 100 ±0 → none/≥ 2'
    learned = dict(trained=[0.9, 0.5, 0.85], twice=[0.25, 1.0, 0.5])
    assert plan.shown(learned, 'best') == '50 (2 of 3 seeds)'
    assert plan.shown(dict(trained=[0.5], twice=[1.0]), 'best') == 'none (0 of 1 seeds)'


@pytest.mark.parametrize('run', [RUN, DIVERGED])
def test_every_claim_takes_every_cell(run, monkeypatch):
    for name, grid in plan.GRIDS.items():
        for row, column in itertools.product(grid.rows, grid.columns):
            monkeypatch.setitem(plan.cells, (name, row, column), plan.summarize([run], [2]))
    assert len(list(claims.claims_table())) > 20


def test_single_heads(monkeypatch):
    """Points in percent; a head whose loss is a gain is worth nothing."""
    line = dict(summary=dict(base=91.9922, largest=81.055, second=79.492, layer=1), rows=[
        {'layer': 1, 'drop 1': 81.055, 'drop 2': -2.0},
        {'layer': 2, 'drop 1': 10.0, 'drop 2': 17.0}])
    monkeypatch.setattr(claims, 'probed', lambda *_: line)
    found = claims.single_heads('toeplitz_64', 'rope', 'distance:span=64')
    assert found == ['81 / 79 of 92, layer 1'] * 3 + ['75 / 25']


def set_cells(monkeypatch, cells):
    monkeypatch.setattr(plan, 'cells', cells)
    monkeypatch.setattr(evidence, 'cells', cells)


def test_effects(monkeypatch):
    """Differences of rows that differ in one part; pairs with a diverged row are left out."""
    rows = plan.variants('', {'a': '', 'no a': ''}, {'b': '', 'no b': '', 'half b': ''})
    scores = {'a, b': [], 'a, no b': [0.51, 0.53], 'a, half b': [0.55],
              'no a, b': [0.61], 'no a, no b': [0.62], 'no a, half b': [0.65]}
    monkeypatch.setitem(plan.GRIDS, 'ablation', plan.Grid('', rows, dict(task=None)))
    cells = {('ablation', row, 'task'): dict(trained=x, twice=[]) for row, x in scores.items()}
    set_cells(monkeypatch, cells)
    assert list(evidence.effects('ablation'))[-3:] == [
        '| no a instead of a | +10 (+10 to +10) | - |',
        '| no b instead of b | +1 (+1 to +1) | - |',
        '| half b instead of b | +4 (+4 to +4) | - |']
    cells.pop(('ablation', 'a, b', 'task'))
    assert not list(evidence.effects('ablation'))                       # only complete columns


def test_figures(monkeypatch):
    """The mean over seeds and then each seed, by length and by step; the cross table's means."""
    plt = pytest.importorskip('matplotlib.pyplot')
    run = dict(
        config=dict(train_lengths=[1], eval_lengths=[1, 2], seeds=[0, 1]),
        lengths={seed: {1: dict(exact=1.0, token=1.0, n=64), 2: dict(exact=x, token=0.5, n=64)}
                 for seed, x in enumerate((0.2, 0.4))},
        curves={seed: [[500, 0.5 + seed / 4, 0.1, 0], [1000, 1, 0.3, 1]] for seed in range(2)})
    cell = plan.summarize([run], [2])
    set_cells(monkeypatch, {
        ('prism', 'prism', 'stack'): cell,
        ('cross', 'prism', 'iterative'): cell})
    mean, *seeds = evidence.lengths_figure(plt, 'prism').axes[0].lines[:3]
    assert mean.get_xydata().tolist() == [[1, 100], [2, pytest.approx(30)]]
    assert [list(line.get_ydata()) for line in seeds] == [[100, 20], [100, 40]]
    lines = evidence.learning_figure(plt, 'prism').axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[62.5, 100], [50, 100], [75, 100]]
    cross = evidence.cross_figure(plt, 'cross')
    assert [ax.texts[0].get_text() for ax in cross.axes[:2]] == ['100', '30']
    set_cells(monkeypatch, {('prism', 'prism', 'stack'): plan.summarize([DIVERGED], [2])})
    lines = evidence.learning_figure(plt, 'prism').axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[]] * 2
    plt.close('all')


def test_files_of_their_own_name_what_made_them():
    """Lines of results/ that no grid finds by command hold versions and hardware all the same."""
    for name in os.listdir(os.path.join(HERE, 'results')):
        if name.endswith('.jsonl'):
            for run in plan.runs(name.removesuffix('.jsonl')):
                assert re.match(r'python (train|probe|kernels)\.py\b', run['command'])
                assert run['torch'] and run['hardware']
