"""Write vectors.json, to compare encodings in other libraries or languages with those of pe.py.

    python pe.py vectors
"""
import json
from functools import partial
from pathlib import Path

import torch

import pe

README = """Test vectors of nanoPE, written by `python pe.py vectors`. 2 heads of width 4, d_model
8, one layer, train_len 4, max_len 6, prism_cursors 1, prism_d_pe 4, prism_hidden 3; other options
as `options` says, or their defaults. x [1, 8, 8] is the input of attention (for prism also the
token embeddings), q, k, v [1, 2, 8, 4] are those before any encoding, at positions 0 to 7. A result
uses the first T tokens and the queries from first_query on, as with a cache; total_len is the final
length (yarn, vipe). logits include 1 / sqrt(4) and are null where masked; y is the output of
attention; embed is x as layer 1 receives it; W in W x + b is [out, in]. Compared with transformers
5.24 (rope with both pairs, pi, ntk, yarn,
alibi, t5), rotary-embedding-torch 0.9.1, x-transformers 2.31
(alibi) and PoPE-pytorch 0.2.1: at most 3e-7 apart where these compute angles in float32, else
2e-12."""

OTHER = {  # each encoding's second setting in vectors(), beside its defaults
    'nope': dict(causal=False), 'ape': dict(rope_base=100.0), 'learned': dict(max_len=12),
    'random': dict(max_len=12), 'shifted_ape': dict(rope_base=100.0), 'alibi': dict(causal=False),
    'rope': dict(rope_pairs='half'), 'yarn': dict(rope_pairs='half', train_len=1000),
    'pope': dict(pope_frequencies='half', pope_softplus=False), 't5': dict(causal=False),
    'pi': dict(rope_pairs='half', rope_scale=4.0), 'ntk': dict(rope_pairs='half', train_len=5),
    'path': dict(rope_heads=1), 'ssmax': dict(rope_heads=1),
    'fire': dict(train_len=16), 'vrope': dict(rope_base=100.0), 'fox': dict(rope_heads=1),
    'vipe': dict(vipe_s='one', vipe_logn=False, vipe_d_p=3), 'stickbreaking': dict(rope_heads=1),
    'prism': dict(prism_copy='trained', prism_absolute=True, prism_norm='unit')}


@torch.no_grad()
def vectors():
    """Return test vectors as JSON: for every encoding at two settings, inputs, parameters, logits
    and outputs in float64, to check a version of it in another library or language."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, (q, k, v), pos, cases = draw(1, 8, 8), draw(3, 1, 2, 8, 4), torch.arange(8), []
    for name, options in [(key, some) for key in OTHER for some in ({}, OTHER[key])]:
        small = dict(d_model=8, n_head=2, n_layer=1, train_len=4, max_len=6, prism_cursors=1,
                     prism_d_pe=4, prism_hidden=3)
        enc = pe.build(pe.PEConfig(**dict(small, pe=name, **options)))[0].double().eval()
        for tensor in enc.state_dict().values():
            tensor.copy_(-draw(tensor.shape).abs())     # delta of PoPE must be at most 0
        results = []
        for T, first in (4, 0), (8, 0), (8, 5):         # as trained, longer, the last 3 by a cache
            total_len = T // 4 * enc.cfg.train_len
            given = pos[:T], enc.state(x[:, :T], pos[:T], total_len), x[:, :T]
            rows = q[:, :, first:T], k[:, :, :T]
            results.append(dict(T=T, first_query=first, total_len=total_len, y=enc.attend(
                *rows, v[:, :, :T], *given), logits=enc.logits(*rows, *given)))
        cases.append(dict(pe=name, options=options, equation=pe.ENCODINGS[name].__doc__,
                          parameters=enc.state_dict(), embed=enc.embed(x, pos), results=results))
    text = json.dumps(dict(README=README, x=x, q=q, k=k, v=v, cases=cases),
                      default=lambda z: torch.round(z, decimals=12).tolist())
    return text.replace('-Infinity', 'null')


def write():
    """Write the vectors beside this file."""
    Path(__file__).with_name('vectors.json').write_text(vectors())
