"""A Transformer whose weights are set by hand: right on iterative tasks at any length."""
import torch

import train
from engine.config import UserError
from model import Transformer

NAME, OUT_DIR = 'weights set by hand', 'out/by_hand_'
RULES = {
    'copy': lambda s, x: x,
    'parity': lambda s, x: (s + x) % 2,
    'polynomial': lambda s, x: (s * x + 1) % 5,
}


def iteration_head(name):
    """(model, cfg): the circuit of ViPE Figure 1b and A.2, right at every length up to 1,000.

    Layer 1 measures distances to the anchors. Every token attends to EoI; tokens that cannot see
    it, and EoI itself, attend to BoS. ViPE's value channel (eq. 8) returns the distance D, so that
    D_1 = t at x_t and D_2 = t - 1 at s_(t-1). Layer 2 matches D_1 = D_2 + 1: a normalized vector
    (D, c) has its largest product with (D', c) at D' = D. Its MLP looks s_t = f(s_(t-1), x_t) up.
    Neighbouring distances differ by 1e-7 in that product, hence float64. The second head of each
    layer is zero. EoI as a query must find D_1 = 1, where s_1 = x_1 stands; x and s share tokens,
    so layer 1 also tells them apart; after the last state EoS follows. cfg: a train.Config with
    vipe_s='one' (D as it is) and out_dir=OUT_DIR + name, whose trained lengths, to 16, are the
    paper's. UserError for a name without a rule.
    """
    if name not in RULES:
        what = f'by_hand:{name}'.rstrip(':')
        raise UserError(f'{what}: weights are set by hand for {", ".join(RULES)} only')
    V = len(train.Config(task=name).the_task.vocab)
    BoS, EoI, EoS, symbols = 1, 2, 3, range(V - 4)
    # rows: (current token, token that attention reads, next token)
    table = [(EoI, x + 4, x + 4) for x in symbols]
    table += [(s + 4, EoI, EoS) for s in symbols]
    table += [(s + 4, x + 4, RULES[name](s, x) + 4) for s in symbols for x in symbols]
    # channels of the residual stream: token, 1, D, token that was read, next token
    one, dist, read, write = V, V + 1, V + 2, 2 * V + 2
    C = 3 * V + 2 + V % 2    # even, for two heads
    cfg = train.Config(task=name, pe='vipe', vipe_s='one', vipe_logn=False, vipe_u=False,
                       vipe_d_p=1, d_model=C, n_head=2, n_layer=2, d_ff=len(table),
                       norm='rmsnorm', dtype='float64', out_dir=OUT_DIR + name)
    model = Transformer(cfg).double().eval()
    tokens = torch.arange(V)
    unit = 1e-3              # D is kept in thousands
    with torch.no_grad():
        for p_name, p in model.named_parameters():
            p.fill_(C ** -0.5 if 'norm' in p_name else 0.0)    # norms: x / |x|; all else 0
        model.embedding.weight[tokens, tokens] = model.embedding.weight[:, one] = 1.0
        anchor, match = model.blocks

        q, k, v = anchor.attn.qkv.weight.view(3, C, C)         # each (to, from)
        q[0, one], q[1, one], q[1, EoI] = 1e3, 2e3, -2e3       # to BoS; rather to EoI, but from EoI
        k[0, BoS], k[1, EoI] = 1.0, 1.0
        anchor.attn.pe.W_p[0] = unit
        anchor.attn.proj.weight[dist, C // 2] = 1.0            # D stands behind the values

        q, k, v = match.attn.qkv.weight.view(3, C, C)
        # <(D_2 + 1, c), (D_1, c)>, c^2 = 2: token and constant add 1 each to the squared length
        q[0, dist], q[0, one], k[0, dist] = 1.0, unit, 1.0
        q[1, one], k[1, one] = 2.0, 1.0
        # EoI asks for the smallest D but BoS's: for x_1
        q[2, EoI], k[2, dist], k[2, BoS] = -10.0, 1.0, 10.0
        q *= 1e9 * (C // 2) ** 0.5
        v[tokens, tokens] = match.attn.proj.weight[read + tokens, tokens] = 1.0
        for i, (s, x, new) in enumerate(table):
            # unit i of the MLP: how strongly x was read, if the token is s
            row = torch.tensor([1e3, 4e3, -4e3], dtype=torch.float64)
            match.mlp[0].weight[i, [read + x, s, one]] = row
            match.mlp[2].weight[write + new, i] = 1e-3
        model.head.weight[tokens, write + tokens] = 100.0
    return model, cfg
