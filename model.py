"""A pre-norm decoder Transformer in which an encoding from pe.py computes the attention.

Probes read or replace activations through forward hooks on "taps", nn.Identity modules: tap_q and
tap_k [B, H, T, D] before the encoding; tap_logits [B, H, T, T], computed only while hooked;
tap_head_out [B, H, T, out_dim]; tap_resid [B, T, C] before the first and after each block.
"""
import copy
import traceback
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

import pe as encodings
from pe import UserError, need


@dataclass
class ModelConfig(encodings.PEConfig):
    """Options of the model and its encoding. Raises UserError if they are inconsistent."""
    vocab_size: int = 64           # size of the vocabulary, padding included (train.py sets it)
    d_ff: int = 0                  # hidden width of the MLP; 0: 4 d_model
    d_compress: int = 0            # mla: width of the compressed vector; 0: d_model / 2
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'    # before attention, MLP and output matrix
    dropout: float = 0.0           # of the embedding, and of the outputs of attention and MLP
    embedding_std: float = None    # std of the initial token embedding; None: 0.1, or 0.02 if tied
    tie: bool = False              # True: the output matrix is the token embedding

    def __post_init__(self):
        super().__post_init__()
        encodings.check_positive(self, 'vocab_size', 'embedding_std')
        need(0 <= self.dropout < 1, f'dropout must be in [0, 1), got {self.dropout}')


NORMS = {'layernorm': nn.LayerNorm, 'rmsnorm': nn.RMSNorm}


class Attention(nn.Module):
    """Multi-head attention: y = W_O concat_h(enc.attend(W_Q x, W_K x, W_V x)_h), heads h."""
    def __init__(self, cfg, enc):
        super().__init__()
        self.heads = cfg.heads      # H
        self.pe = enc               # a pe.Encoding, which computes attention from q, k and v
        self.make_projections(cfg)
        self.proj = nn.Linear(cfg.heads * enc.out_dim, cfg.d_model, bias=False)     # W_O
        self.tap_q, self.tap_k = nn.Identity(), nn.Identity()
        self.tap_logits, self.tap_head_out = nn.Identity(), nn.Identity()

    def make_projections(self, cfg):
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=False)      # W_Q, W_K, W_V

    def project(self, x):
        return self.qkv(x).chunk(3, dim=-1)                                 # 3 x (B, T, C)

    def forward(self, x, pos, state):       # (B, T, C), [T] or [B, T], what pe.state() returned
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, -1).transpose(1, 2) for z in self.project(x))
        q, k = self.tap_q(q), self.tap_k(k)                     # (B, H, T, D), like v
        if self.tap_logits._forward_hooks:                      # a probe reads or replaces logits
            logits = self.tap_logits(self.pe.logits(q, k, pos, state, x))   # (B, H, T, T)
            y = self.pe.mix(self.pe.weigh(logits), v, pos, state, x)
        else:
            y = self.pe.attend(q, k, v, pos, state, x)          # the same, fused where possible
        y = self.tap_head_out(y)                                # (B, H, T, out_dim)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))   # concatenated heads -> (B, T, C)


class LatentAttention(Attention):
    """Multi-head latent attention (the Toeplitz study, eq. 3). With the latent vector c_j = W_D x_j
    and v_j = W_UV c_j: <q_i, k_j> = <(W_UQ x_i ; R_i W_QR x_i), (W_UK c_j ; R_j W_KR c_j)>.

    The rotation R_i (pe.LatentRoPE) acts on the second half of each head; with pe=nope, R_i = 1."""
    def make_projections(self, cfg):
        self.q = nn.Linear(cfg.d_model, cfg.d_model, bias=False)            # W_UQ, W_QR
        d_compress = cfg.d_compress or cfg.d_model // 2
        self.compress = nn.Linear(cfg.d_model, d_compress, bias=False)      # W_D
        self.kv = nn.Linear(d_compress, 2 * cfg.d_model, bias=False)        # W_UK, W_KR, W_UV

    def project(self, x):
        k, v = self.kv(self.compress(x)).chunk(2, dim=-1)       # c (B, T, d_compress) -> (B, T, C)
        return self.q(x), k, v


class Block(nn.Module):
    """x += Attention(norm(x)); x += MLP(norm(x))."""
    def __init__(self, cfg, enc):
        super().__init__()
        self.norm_1 = NORMS[cfg.norm](cfg.d_model)
        self.attn = {'mha': Attention, 'mla': LatentAttention}[cfg.attention](cfg, enc)
        self.norm_2 = NORMS[cfg.norm](cfg.d_model)
        d, d_ff = cfg.d_model, cfg.d_ff or 4 * cfg.d_model
        self.mlp = nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d))
        self.drop = nn.Dropout(cfg.dropout)
        self.tap_resid = nn.Identity()

    def forward(self, x, pos, state):
        x = x + self.drop(self.attn(self.norm_1(x), pos, state))    # tokens exchange information
        x = x + self.drop(self.mlp(self.norm_2(x)))                 # each token is processed alone
        return self.tap_resid(x)                                    # (B, T, C)


class Transformer(nn.Module):
    """Decoder-only Transformer over tokens [B, T]. For classification, the class is a token."""
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.drop = nn.Dropout(cfg.dropout)
        self.tap_resid = nn.Identity()
        self.blocks = nn.ModuleList(Block(cfg, enc) for enc in encodings.build(cfg))
        self.norm = NORMS[cfg.norm](cfg.d_model)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        if cfg.tie:
            self.head.weight = self.embedding.weight            # one parameter, two uses
        self.init_weights()

    def init_weights(self):
        """Draw the embedding from N(0, embedding_std^2), matrices that write to the residual stream
        from N(0, 1 / (2 n_layer fan_in)), other matrices from N(0, 1 / fan_in). Biases are 0."""
        for name, p in self.named_parameters():
            if '.pe.' in name:
                continue                                        # encodings initialize themselves
            if name == 'embedding.weight':                      # if tied, the output matrix too
                std = self.cfg.embedding_std or (0.02 if self.cfg.tie else 0.1)
                nn.init.normal_(p, std=std)
            elif p.dim() == 2:
                writes = name.endswith(('proj.weight', 'mlp.2.weight'))
                fan_in = p.shape[1] * (2 * self.cfg.n_layer if writes else 1)   # outputs add up
                nn.init.normal_(p, std=fan_in ** -0.5)
            elif name.endswith('bias'):
                nn.init.zeros_(p)

    def forward(self, tokens, targets=None, total_len=None, pos=None):
        """tokens [B, T] int64 -> (logits [B, T, V], loss, or None without targets).

        loss: mean cross-entropy over targets [B, T] other than -100 (0 if there are none), plus, in
        training mode, the encodings' penalties. total_len: the final length, which ViPE and YaRN
        need if tokens are only the beginning. pos: positions [T] or [B, T], by default 0..T-1."""
        if pos is None:
            pos = torch.arange(tokens.shape[1], device=tokens.device)   # (T,)
        x = self.embedding(tokens)                              # (B, T, C)
        enc = self.blocks[0].attn.pe                            # embed, state serve all layers
        state = enc.state(x, pos, total_len)                    # ViPE's s, PRISM's cursors, ...
        x = self.tap_resid(self.drop(enc.embed(x, pos)))        # ape, learned, ... add p_t here
        for i, block in enumerate(self.blocks):
            if i > 0:
                state = block.attn.pe.restate(x, pos, state)    # PRISM can replace its cursors
            x = block(x, pos, state)                            # (B, T, C)
        logits = self.head(self.norm(x))                        # (B, T, V)
        if targets is None:
            return logits, None
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least float32
        loss = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction='sum')
        loss = loss / (targets != -100).sum().clamp(min=1)      # -100: ignored, PyTorch's default
        if self.training:
            loss = loss + sum(block.attn.pe.penalty() for block in self.blocks) # PRISM section 6.3
        return logits, loss

    @torch.no_grad()
    def generate(self, tokens, n, temperature=0.0, end=None):
        """tokens [B, T] -> [B, up to T + n]: without dropout, append tokens sampled from
        softmax(logits / temperature), greedily at temperature 0. After `end`, a row is padded."""
        need(self.cfg.causal, 'generate() requires a causal mask: causal=True')
        need(tokens.all(), 'prompts must be of one length, without padding (token 0)')
        total_len, was_training = tokens.shape[1] + n, self.training
        self.eval()
        done = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        for _ in range(n):                                      # no cache: recompute all positions
            logits = self(tokens, total_len=total_len)[0][:, -1].float()    # (B, V)
            logits[:, 0] = -torch.inf                           # never generate padding
            if temperature:
                new = torch.multinomial((logits / temperature).softmax(dim=-1), 1)  # (B, 1)
            else:
                new = logits.argmax(dim=-1, keepdim=True)       # (B, 1)
            tokens = torch.cat([tokens, new.masked_fill(done, 0)], dim=1)   # (B, T + 1)
            done = done | (new == end)                          # never, if end is None
            if done.all():
                break
        self.train(was_training)
        return tokens

    def optim_groups(self, lr, weight_decay):
        """Parameter groups for the optimizer: weight decay for matrices other than the embedding,
        none for other parameters, and the groups of the encodings (pe.param_groups)."""
        matrices = [p for p in self.parameters() if p.dim() >= 2 and p is not self.embedding.weight]
        others = [p for p in self.parameters() if p.dim() < 2 or p is self.embedding.weight]
        return encodings.param_groups(self, lr, [
            dict(params=matrices, name='decay', lr=lr, weight_decay=weight_decay),
            dict(params=others, name='no_decay', lr=lr, weight_decay=0.0)])


# ---- a trial of someone's encoding ---------------------------------------------------------------

@torch.no_grad()
def check(cfg):
    """Try the encodings of a configuration on random inputs. Raise UserError, which names the hook,
    if a hook fails, changes its inputs or returns another shape than attention expects."""
    cfg = copy.copy(cfg)
    cfg.kernel = 'reference'
    with torch.random.fork_rng(devices=[]):                     # leaves the caller's numbers alone
        try:
            try_hooks(cfg)
        except UserError:
            raise
        except Exception as error:
            calls = traceback.extract_tb(error.__traceback__)
            call = [x for x in calls if x.name in (*encodings.HOOKS, '__init__')] or calls
            hint = ('. at.distance is [1, Tq, T]; write a parameter m [H] as m[:, None, None]'
                    if call[-1].name == 'bias' and 'must match' in str(error) else
                    '; see the comments in pe.Encoding')
            raise UserError(f'{call[-1].name}() of {cfg.pe}, line {call[-1].lineno}: '
                            f'{type(error).__name__}: {" ".join(str(error).split())}{hint}'
                            ) from error


def try_hooks(cfg):
    """Call every hook of the first layer: it returns the shape that pe.Encoding states, keeps its
    inputs, and its outputs are finite and do not depend on later tokens."""
    enc = encodings.build(cfg)[0].eval()
    enc = enc.parts[0] if isinstance(enc, encodings.SomeHeads) else enc
    need(encodings.hooks_of(cfg.pe) or 'nope' in cfg.pe, f'{cfg.pe} overrides none of the hooks '
         + ', '.join(encodings.HOOKS))
    B, H, D, T = 2, enc.cfg.heads, cfg.head_dim, 5 + (enc.cfg.heads == 5)   # B, H, T differ
    inputs = dict(x=torch.randn(B, T, cfg.d_model), q=torch.randn(B, H, T, D),
                  k=torch.randn(B, H, T, D), v=torch.randn(B, H, T, D), pos=torch.arange(T))
    x, q, k, v, pos = [z.clone() for z in inputs.values()]

    def expect(hook, y, *shape):
        got = list(y.shape) if isinstance(y, torch.Tensor) else y
        fits = isinstance(got, list) and len(got) == len(shape) and all(
            n in ('any', size) for n, size in zip(shape, got))
        need(fits, f'{hook}() of {cfg.pe} must return [{", ".join(map(str, shape))}], got {got}')

    state = enc.state(x, pos, None)
    expect('embed', enc.embed(x, pos), B, T, cfg.d_model)
    at = enc.at(q, k, pos, state, x)
    pair = enc.qk(q, k, at)
    need(type(pair) in (tuple, list) and len(pair) == 2, f'qk() of {cfg.pe} must return q and k')
    for z in pair:
        expect('qk', z, B, H, T, 'any')
    need(pair[0].shape == pair[1].shape, f'qk() of {cfg.pe} must return q and k of one width')
    need(enc.bias(at) is not None or not encodings.changed(enc, 'bias'),
         f'bias() of {cfg.pe} returns nothing')
    expect('value', enc.value(v, at), B, H, T, 'any')
    expect('weigh', enc.weigh(enc.logits(q, k, pos, state, x)), B, H, T, T)
    y = enc.attend(q, k, v, pos, state, x)
    expect('out', y, B, H, T, enc.out_dim)                      # enc.out_dim says its last size
    for name, z in zip(inputs, (x, q, k, v, pos)):
        need(torch.equal(z, inputs[name]), f'{cfg.pe} changes its input {name} in place: write '
             'x = x + p instead of x += p')
    need(y.isfinite().all(), f'attention with {cfg.pe} is NaN or infinite (masked logits are -inf)')
    need(not isinstance(enc.penalty(), torch.Tensor) or enc.penalty().dim() == 0,
         f'penalty() of {cfg.pe} must return a number')
    for name in enc.own:
        need(isinstance(getattr(enc, name, 0), (nn.Parameter, type(None))),
             f'own of {cfg.pe} must have names of parameters: {name} is none')
    for name, z in vars(enc).items():
        need(not isinstance(z, torch.Tensor), f'{name} of {cfg.pe} would not be saved: use '
             f'nn.Parameter, or self.register_buffer({name!r}, ...)')
    if cfg.causal:
        for z in (q, k, v):
            z[:, :, -1] += 1
        x[:, -1] += torch.randn_like(x[:, -1])                  # norms would cancel a constant
        later = enc.attend(q, k, v, pos, enc.state(x, pos, None), x)
        need(torch.allclose(y[:, :, :-1], later[:, :, :-1], rtol=1e-4, atol=1e-5),
             f'outputs of {cfg.pe} change with a later token, or from call to call')
