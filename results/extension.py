"""Print and draw how far a trained RoPE is extended to longer contexts, from extension.jsonl.

    python results/extension.py      prints means over seeds, (least to most); draws extension.png
"""
import statistics
from pathlib import Path

from matplotlib import pyplot
from tables import read_runs

NAMES = {'nope': 'drope'}                                  # NoPE after RoPE
COLORS = dict(rope='#D55E00', pi='#56B4E9', ntk='#E69F00', yarn='#0072B2', drope='#999999',
              alibi='#CC79A7', fox='#009E73', stickbreaking='#000000', fire='#F0E442')
TUNED = 'rope', 'pi', 'ntk', 'yarn', 'drope'
AT_256 = 'rope, trained at 256'


def found():
    """{(task, steps of tuning, label): {length: values of the seeds}}: perplexity, or % exact."""
    results = {}
    for run in read_runs('results/extension.jsonl')['extension']:
        options, scores = run.options, run.scores('exact')
        steps = int(options['max_steps']) if options['init_from'] else 0
        name = options['pe'] if not steps else NAMES.get(options['pe'], options['pe'])
        if not steps and run.trained[-1] in (64, 256) and options['batch_size'] == 4:
            name = AT_256
        elif not steps and options['task'] == 'flip_flop' and run.trained[-1] == 64:
            name = 'rope, trained to 64'
        lengths = {n: run.means([n], 'exact') for n in run.sizes}
        results[options['task'], steps, name] = {
            n: [x if run.corpus else 100 * x for x in values[:3]] for n, values in lengths.items()}
        assert len(scores) >= 3, (name, steps)
    return results


def main():
    """Print every mean and range, and draw the perplexities."""
    results = found()
    for (task, steps, name), lengths in results.items():
        cells = [f'{n}: {statistics.mean(x):.4g} ({min(x):.4g} to {max(x):.4g})'
                 for n, x in lengths.items()]
        print(f'{task}, {steps} steps, {name}: {"; ".join(cells)}')
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.8), sharey=True, layout='constrained')
    for axis, steps in zip(axes, (0, 50, 200)):
        for (task, tuned, name), lengths in results.items():
            if task != 'stdlib' or tuned != steps and name != AT_256:
                continue
            style = dict(color=COLORS.get(name, '#8b1a1a'), ls='-' if name in TUNED else ':')
            values = [*lengths.values()]
            axis.plot([*lengths], [statistics.mean(x) for x in values], label=name, **style)
            axis.fill_between([*lengths], [*map(min, values)], [*map(max, values)],
                              color=style['color'], alpha=0.12, lw=0)
        axis.set(xscale='log', yscale='log', xlabel='context in bytes', ylim=(5, 32),
                 title=f'{steps} steps at 256' if steps else 'not tuned')
        axis.set_xticks([64, 128, 256, 512, 1024], [64, 128, 256, 512, 1024], minor=False)
        axis.set_yticks([5, 6, 8, 10, 15, 20, 30], [5, 6, 8, 10, 15, 20, 30], minor=False)
        axis.minorticks_off()
        axis.axvline(64, color='black', lw=0.6)
        axis.legend(fontsize=7)
    axes[0].set(ylabel='perplexity')
    path = Path(__file__).parent.parent / 'assets/extension.png'
    figure.savefig(path, dpi=100)
    print(f'drew {path.name}')


if __name__ == '__main__':
    main()
