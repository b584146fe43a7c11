"""The trace, the pictures and the program."""
import importlib.util
import inspect
import json
import math
import re
import sys
import types

import pytest
import torch

import probe
import train
from engine.config import UserError
from probes import core, pope, position, toeplitz
from probes.conftest import at_random, nano, untouched
from test_all import close, flags, python, variants


@variants
def test_a_trace_is_what_the_model_computes(kw):
    """Weights, values and outputs of every layer fit together, for every encoding."""
    from test_all import make
    model = make(**kw)
    tokens = torch.randint(1, 11, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(tokens)[0]
    layers = core.trace(model, tokens)
    assert all(layer.stream is above.after for above, layer in zip(layers, layers[1:]))
    for layer, block in zip(layers, model.blocks):
        y = layer.enc.mix(layer.weights, layer.v, layer.pos, layer.state, layer.x)
        close(y, layer.y, 1e-6)
        close(layer.out, block.attn.proj(layer.y.transpose(1, 2).flatten(2)).detach())
        close(layer.x, block.norm_1(layer.stream).detach())
    with torch.no_grad():
        with core.recording(model, lambda i, layer: layer.logits.roll(i, 1)):
            assert not torch.allclose(model(tokens)[0], before)    # layer 2's heads are exchanged
        with core.recording(model) as again:
            model(tokens.flip(0))
            assert not torch.equal(again[0].logits, layers[0].logits)
            assert torch.equal(model(tokens)[0], before)
        assert torch.equal(again[0].logits, layers[0].logits)    # of the latest pass


def test_problems_and_batches():
    _, task, cfg = nano('parity')
    length, tokens, targets = core.batch(task, cfg.train_lengths, 0, 3)
    assert length == 8 and tokens.shape == targets.shape == (3, 19)
    with pytest.raises(UserError, match='no problems of length 7'):
        core.problems(types.SimpleNamespace(existing=lambda lengths, _: [3]), [3, 7], 1)
    with pytest.raises(UserError, match='from 8 to 8,192'):
        core.batch(types.SimpleNamespace(corpus=True), [64], 7, 1)


def test_large_maps_are_averaged():
    """By areas, so that no line is lost and none is invented; nan stays out."""
    stripes = torch.zeros(600, 600)
    stripes[::2] = 1
    close(core.averaged(stripes), torch.full((300, 300), 0.5))
    stripes[:300] = torch.nan
    assert core.averaged(stripes)[:150].isnan().all()
    close(core.averaged(stripes)[150:], torch.full((150, 300), 0.5))
    assert core.averaged(stripes[:9, :9]).shape == (9, 9)


@pytest.mark.parametrize('values, ends', [
    ([[0.2, 0.5], [math.nan, 0.3]], (0.2, 0.5)), ([[1.0, 1], [1, 1]], (0.99, 1)),
    ([[math.nan] * 2] * 2, (-0.01, 0.0)), ([[0.1], [0.3]], (0.1, 0.3))])
def test_heads(values, ends):
    """Colours that fit the values."""
    plt = pytest.importorskip('matplotlib.pyplot')
    fig, ax = plt.subplots()
    core.Heads('', torch.tensor(values, dtype=torch.float64), 'r').draw(fig, ax)
    assert ax.images[0].get_clim() == pytest.approx(ends)
    plt.close(fig)


def test_legends_and_colours():
    """One legend for panels of the same lines, else one below each; an encoding has its colour."""
    plt = pytest.importorskip('matplotlib.pyplot')
    panel = core.Curves('', 'x', 'y', [('rope', [1, 2], [3, 4], {}), ('own', [1], [2], {})], mark=2)
    same = core.Figure('', [panel, panel]).draw(plt)
    assert len(same.legends) == 1 and not same.axes[0].get_legend()
    other = core.Curves('', 'x', 'y', [('ape', [1], [2], {})])
    fig = core.Figure('', [panel, other]).draw(plt)
    assert not fig.legends and all(ax.get_legend() for ax in fig.axes)
    assert fig.axes[0].lines[0].get_color() == core.style_of('rope')['color']
    plt.close('all')


KINDS = {'one head': dict(pe='rope'), 'eight heads': dict(pe='ape+rope', n_head=8),
         'one layer': dict(pe='nope', n_head=2, n_layer=1),
         'positions from content': dict(pe='prism', n_head=2)}
rendered = set()    # (probe, number of panels), which one kind of run is enough for


@pytest.mark.parametrize('kw', KINDS.values(), ids=KINDS)
def test_every_probe_on_every_kind_of_run(kw):
    """It answers, with numbers that JSON can hold and a picture of at most six panels without a
    legend over data; or it says in one line why it cannot."""
    plt = pytest.importorskip('matplotlib.pyplot')
    subject, answered = nano('parity', dtype=torch.float32, longest=4, **kw), []
    for name, function in probe.PROBES.items():
        own = inspect.signature(function).parameters.keys()
        small = dict(n=4, steps=0, gammas='0.5', l_max='3')
        try:
            rows, summary, figure = untouched(function, *subject,
                                              **{key: small[key] for key in small.keys() & own})
        except UserError as error:
            assert '\n' not in str(error) and len(str(error)) > 30, name
            continue
        answered.append(name)
        json.dumps(dict(rows=rows, summary=summary), allow_nan=False)
        assert max(map(len, probe.as_text(rows, summary).splitlines())) <= 130, name
        fig = figure.draw(plt)
        fig.set_layout_engine('none')    # slow, and moves a legend with its panel
        if (name, len(figure.panels)) not in rendered:
            rendered.add((name, len(figure.panels)))
            fig.draw_without_rendering()
        assert 1 <= len(figure.panels) <= 6
        for ax in fig.axes:
            below = ax.get_window_extent().y0    # no legend over data
            assert not ax.get_legend() or ax.get_legend().get_window_extent().y1 <= below, name
        plt.close(fig)
    assert len(answered) >= 10, answered


def test_figures_of_weights_set_by_hand():
    """They say so, and nothing of training."""
    plt = pytest.importorskip('matplotlib.pyplot')
    model, cfg = core.load('by_hand:copy')
    for name in ('attention', 'alignment', 'linear', 'ablate', 'toeplitz', 'loss'):
        fig = probe.PROBES[name](model, cfg.the_task, cfg, n=2)[2].draw(plt)
        words = [text.get_text() for text in fig.findobj(plt.Text)]
        assert any('set by hand' in text for text in words), name
        assert not any('vipe' in text for text in words), name
        assert not any('trained to' in text.replace('runs are trained to', '') for text in words)
        plt.close(fig)


def test_the_program_on_a_run(tmp_path, capsys):
    """Rows, a summary, a picture; the run's own files stay as they were."""
    run = tmp_path / 'run'
    train.main(flags(task='string_copy', pe='prism', n_head=2, out_dir=run, seeds='0,3'))
    before = {path: path.read_bytes() for path in run.iterdir()}
    probe.main(['cursor', str(run), '--seed=3', '--length=5'])
    found = json.loads((run / 'probe_cursor.json').read_text())
    assert len(found['rows']) == 2 * 2 * 2 * 2 and found['summary']['length'] == 5
    probe.main(['cursor', str(run), f'--out_dir={tmp_path / "elsewhere"}'])
    elsewhere = json.loads((tmp_path / 'elsewhere' / 'probe_cursor.json').read_text())
    assert elsewhere['summary']['length'] == 12
    assert {path: path.read_bytes() for path in before} == before
    drawn = importlib.util.find_spec('matplotlib') is not None
    for kind, first in (('svg', b'<?xml'), ('pdf', b'%PDF'), ('png', b'\x89PNG')):
        probe.main(['norms', str(run), f'--format={kind}'])
        pictures = [path for path in run.glob('probe_norms.*') if path.suffix != '.json']
        assert [path.suffix for path in pictures] == [f'.{kind}'] * drawn
        assert all(path.read_bytes().startswith(first) for path in pictures)
    probe.main(['report', str(run)])
    page = (run / 'report.md').read_text()
    assert '## cursor' in page and '## norms' in page and ('(probe_norms.png)' in page) == drawn
    capsys.readouterr()
    probe.main(['axes', 'RUN', '--help'])
    out = capsys.readouterr().out
    assert '--length=0 --n=8 [--seed=...]' in out and 'W_ij' in out and 'PRISM' not in out


def test_mistakes_end_in_one_line(tmp_path, capsys):
    run = str(tmp_path / 'run')
    train.main(flags(out_dir=run))
    for argv, says in (
            (['cursor', run], 'this run has pe=rope'), (['cursr', run], "did you mean 'cursor'?"),
            (['cursor'], 'which run?'), (['cursor', run, '--lenght=5'], "did you mean 'length'?"),
            (['cursor', run, '--length=x'], 'length must be a whole number'),
            (['cursor', run, '--seed=1'], 'no model of seed 1'),
            (['gradients', 'by_hand:parity'], 'never had one'),
            (['axes', run, '--n=0'], 'from 1 on'), (['axes', run, 'x'], 'written --key=value'),
            (['axes', run, '--format=gif'], 'png, svg, pdf'), ([run], 'name a probe before'),
            (['report', run], 'no probe has looked'), (['report', run, '--n=2'], 'no flags')):
        with pytest.raises(UserError, match=re.escape(says)):
            probe.main(argv)
    failed = python('probe.py', 'cursor', 'nowhere')
    assert failed.returncode == 2 and failed.stderr.count('\n') == 1
    assert 'no run in nowhere' in failed.stderr
    capsys.readouterr()
    probe.main([])
    listed = capsys.readouterr().out
    for name in probe.PROBES:
        assert re.search(rf'(?m)^  {name} *\*? +[A-Z].*[?.]', listed), name


def test_text_of_rows_and_summaries():
    """A table for rows that share columns, without those that are None throughout; a key stays with
    its value; at most 130 columns."""
    rows = [dict(step=0, layer=1, none=None), dict(layer=2, first=None), dict(layer=3, first=0),
            dict(what='x', found=3)]
    assert probe.tables(rows) == [
        [['step', 'layer', 'first'], ['0', '1', ''], ['', '2', ''], ['', '3', '0']],
        [['what', 'found'], ['x', '3']]]
    summary = {f'accuracy beyond, part {i}': 1.7030816934493487e-07 for i in range(9)}
    lines = probe.as_text([], summary | dict(tokens=8192, none=None)).splitlines()
    assert '  '.join(lines).split('  ') == [
        *(f'accuracy beyond, part {i}: 1.703e-07' for i in range(9)), 'tokens: 8192', 'none: None']
    assert max(map(len, lines)) <= 130


def test_without_matplotlib_no_older_figure_stays(tmp_path, monkeypatch, capsys):
    (tmp_path / 'probe_norms.png').touch()
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    train.main(flags(out_dir=tmp_path))
    probe.main(['norms', str(tmp_path)])
    assert 'pip install matplotlib' in capsys.readouterr().out
    assert not (tmp_path / 'probe_norms.png').exists()


def test_correlation():
    x, y = at_random(2, 3, 50)
    close(core.correlation(x, y), [torch.corrcoef(torch.stack(xy))[0, 1] for xy in zip(x, y)])
    assert core.correlation(torch.ones(5), torch.arange(5)).isnan()


def test_probes_that_want_a_causal_mask_say_so():
    subject = nano('distance', pe='rope', causal=False, train_lengths=[8], eval_lengths=[8])
    for asks in (toeplitz.toeplitz, position.axes, position.disentangle, position.stretch,
                 pope.tuning):
        with pytest.raises(UserError, match='causal mask'):
            asks(*subject)
