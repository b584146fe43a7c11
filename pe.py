"""All positional encodings, one small class each. This file needs only torch: copy it to use it.

Nearly every encoding changes only the inputs, the bias or the output of causal attention. For a
query at position t, a key at position s and attention heads of width d:

    logits_ts = <q'_t, k'_s> / sqrt(d) + bias_ts,   s <= t                hooks: qk, bias
    y_t       = out_t(sum_s softmax_s(logits_ts) value_s(v_s))            hooks: value, out

The hook weigh replaces the softmax, which rules out fused attention. The hook embed changes the
token embeddings before layer 1. A class overrides only the hooks that it needs; its options are
annotated class attributes, such as t5_buckets of T5. To add an encoding, write its class and
register it in ENCODINGS: it can then be trained, tested and probed like the others.

In your own model, encodings = build(PEConfig(...)) returns one encoding per layer. Call state =
encodings[0].state(x, pos) once per sequence, x = encodings[0].embed(x, pos) before layer 1, state =
enc.restate(x, pos, state) before each later one, and in each enc.attend(q, k, v, pos, state, x).
For its parameters, see param_groups(), clamp() and Encoding.penalty().

    python pe.py                 prints all encodings: equation, options, parameters, hooks
    python pe.py vectors         writes assets/vectors.json, to check other implementations
"""
import copy
import difflib
import math
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Literal, get_args, get_origin

import torch
import torch.nn as nn
import torch.nn.functional as F


class UserError(ValueError):
    """An error whose message says how to fix it; train.py prints it on one line."""


def need(condition, says):
    """Raise UserError unless the condition is true."""
    if not condition:
        raise UserError(says)


def check_name(what, name, known):
    """Raise UserError, which suggests the nearest of the known names, if `name` is not known."""
    usual = {'learning_rate': 'lr'}.get(name, name)         # other programs use the long name
    near = difflib.get_close_matches(usual, known, 1, 0.7)  # one name, similarity >= 0.7
    hint = f', did you mean {near[0]!r}? If not,' if near else ';'
    listed = 'choose from ' + ', '.join(known) if len(known) < 60 else '--help lists them'
    need(name in known, f'unknown {what} {name!r}{hint} {listed}')


@dataclass
class SharedConfig:
    """The options of all encodings; PEConfig (below ENCODINGS) adds those of each class. Derived:
    heads and head_dim, number and width of the attention heads; layer, the layer's index from 0."""
    pe: str = 'rope'               # an encoding, or several joined by +: `python pe.py` lists them
    d_model: int = 64              # width of the residual stream
    n_head: int = 1                # attention heads; mla makes n_head / 2 heads of two halves
    n_layer: int = 2               # blocks
    train_len: int = 128           # tokens in the longest training sequence (train.py sets it)
    first_len: int = 0             # the same when training began, before --init_from; 0: train_len
    eval_len: int = 0              # the same in evaluation (train.py sets it)
    rope_base: float = 10000.0     # base of the frequencies, as in theta_c = base^(-2c/d)
    rope_heads: int = None         # the encoding acts on the first k heads only; None: on all
    attention: Literal['mha', 'mla'] = 'mha'   # mha | mla: latent attention, with RoPE or NoPE
    causal: bool = True            # False: bidirectional; only the last token (answer) is masked
    # kernels.py, for pope, vipe and prism: auto (if faster, on CUDA) | triton | reference
    kernel: Literal['auto', 'triton', 'reference'] = 'auto'

    def __post_init__(self):
        for f in fields(self):
            value, choices = getattr(self, f.name), get_args(f.type)
            need(get_origin(f.type) is not Literal or value in choices,
                 f'{f.name} must be one of {", ".join(map(str, choices))}, got {value!r}')
        # numbers with a positive default, such as widths, must be positive
        check_positive(self, *(f.name for f in fields(PEConfig)
                               if type(f.default) in (int, float) and f.default > 0))
        need(self.d_model % self.n_head == 0,
             f'd_model={self.d_model} is not divisible by n_head={self.n_head}')
        need(self.attention == 'mha' or self.n_head % 2 == 0,
             f'n_head must be even for mla, which pairs heads, got {self.n_head}')
        self.heads = self.n_head // 2 if self.attention == 'mla' else self.n_head
        self.head_dim = self.d_model // self.heads
        self.layer = 0                 # build() sets it for each layer
        need(self.rope_heads is None or 1 <= self.rope_heads <= self.heads,
             f'rope_heads must be from 1 to {self.heads}, the number of heads, got '
             f"{self.rope_heads}; for none use pe='nope'")

    @property
    def original_len(self):
        """The train_len with which training began: L of pi, ntk, yarn, fire and vipe."""
        return self.first_len or self.train_len


def check_positive(cfg, *keys):
    """Raise UserError if one of these fields is a number that is not positive and finite."""
    for key in keys:
        value = getattr(cfg, key)
        need(type(value) not in (int, float) or 0 < value < math.inf,
             f'{key} must be positive and finite, got {value}')


# ---- the hooks -----------------------------------------------------------------------------------

HALF = torch.bfloat16, torch.float16


class InputMissing(UserError):
    """The encoding needs the input x of its attention layer, but the caller did not pass it."""


@dataclass
class At:
    """What the hooks of attention can read. An axis of size 1 in the positions t and s is for the
    heads, so that positions broadcast against q and k."""
    q: torch.Tensor         # [B, H, Tq, D], before any encoding
    k: torch.Tensor         # [B, H, T, D], before any encoding
    t: torch.Tensor         # positions of the queries, [1, Tq] or [B, 1, Tq]
    s: torch.Tensor         # positions of the keys, [1, T] or [B, 1, T]
    state: object           # the return value of state()
    content: torch.Tensor   # x [B, T, C], or None if the caller did not pass it
    causal: bool = True     # True: keys after the query are masked
    kernel: bool = False    # True: kernels.attention computes this call

    @property
    def distance(self):
        """t - s [1, Tq, T] or [B, 1, Tq, T], 0 at masked keys s > t; |t - s| if not causal."""
        d = self.t[..., :, None] - self.s[..., None, :]
        return d.clamp(min=0) if self.causal else d.abs()

    @property
    def x(self):
        """[B, T, C]: the normalized input of the attention layer."""
        if self.content is None:
            raise InputMissing('this encoding requires the attention input: pass x to attend()')
        return self.content

    def without_gaps(self, z):
        """Return z, of all tokens between a key and a query, if positions show that none is missing
        (steps of at most 1). Else raise UserError, or on a GPU return NaN."""
        gap = (self.s.diff() > 1).any()
        if not readable(gap):
            return z.masked_fill(gap, math.nan)
        need(not gap, 'fox and path require all tokens between a key and the query: drop only the '
             'oldest keys from a cache, and use positions with steps of at most 1')
        return z


class Encoding(nn.Module):
    """Base class, which encodes nothing. A subclass overrides the hooks, embed() to out().
    x [B, T, C]; q [B, H, Tq, D]; k, v [B, H, T, D]; pos [T], or [B, T] if rows differ."""
    shared = False            # True: one instance serves all layers; False: each layer has its own
    shift_invariant = False   # True: adding a constant to pos changes no logit and no output
    needs_causal = False      # True: raises unless the mask is causal
    needs_pairs = False       # True: rotates feature pairs; requires an even head_dim
    fp32 = False              # True: attention must not run in half precision
    order = 0                 # rank of qk() in a sum: 0 rotates, 1 appends features, 2 scales
    mean_distance = False     # True: attend_by_kernel appends sum_s alpha_ts (t - s) to y
    triton = 'no faster'      # kernels.attention is faster | no faster | unable to compute it
    own = {}                  # {parameter: its optimizer settings, such as lr, or clamp=(a, b)}

    def __init__(self, cfg):
        super().__init__()
        need(cfg.causal or not self.needs_causal,
             f'{type(self).__name__} requires a causal mask: causal=True')
        need(cfg.head_dim % 2 == 0 or not self.needs_pairs,
             f'{type(self).__name__} requires an even d_model / n_head, got {cfg.head_dim}')
        self.cfg = cfg
        for key, (_, default) in options_of(type(self)).items():
            setattr(self, key, getattr(cfg, key, default))  # default: for classes added later
        self.out_dim = cfg.head_dim          # width per head that out() returns
        self.scale = cfg.head_dim ** -0.5    # softmax scale, whatever width qk() returns
        if changed(type(self), 'bias') or changed(type(self), 'weigh') or self.order == 1:
            self.triton = 'unable'           # the kernels add no bias and take <= 256 features

    def embed(self, x, pos):                    # -> [B, T, C], before layer 1
        return x
    def state(self, x, pos, total_len=None):    # -> anything, once per sequence; total_len: the
        return None                             # sequence's final length, if known
    def restate(self, x, pos, state):           # -> state from this layer on; x: the layer's input
        return state
    def penalty(self):                          # -> added to the training loss
        return 0.0
    def qk(self, q, k, at):                     # -> q' [B, H, Tq, any], k' [B, H, T, any]
        return q, k
    def bias(self, at):                         # -> None, or [H, Tq, T] or [B, H, Tq, T], added to
        return None                             # the logits (if it has T rows, its last Tq)
    def weigh(self, logits):                    # -inf at masked keys -> attention weights
        return logits.softmax(dim=-1)
    def value(self, v, at):                     # -> values to average [B, H, T, any]
        return v
    def out(self, y, at):                       # y: averages -> [B, H, Tq, out_dim]
        return y

    def at(self, q, k, pos, state=None, x=None, q_len=None):
        """Return the At of the last q_len queries; compute the state if it is None."""
        if state is None:
            state = self.state(None, pos)
        pos = pos if pos.is_floating_point() else pos.long()    # small types would wrap
        if self.shift_invariant:                # large angles would lose precision
            pos = pos - pos[..., :1]
        s = pos.unsqueeze(-2)                   # (1, T) or (B, 1, T)
        q_len = q.shape[2] if q_len is None else q_len      # mix() passes no q
        return At(q, k, s[..., s.shape[-1] - q_len:], s, state, x, self.cfg.causal)

    def logits(self, q, k, pos, state=None, x=None):
        """Return the attention logits [B, H, Tq, T], -inf at masked keys."""
        check_shapes(self.cfg, q, k, k, pos, x)
        at = self.at(q, k, pos, state, x)
        q, k = self.qk(q, k, at)
        logits = q @ k.transpose(-2, -1) * self.scale       # (B, H, Tq, T)
        bias = self.bias_rows(at, q, k)
        return (logits if bias is None else logits + bias) + self.mask(logits)

    def bias_rows(self, at, q, k):
        """Return the last Tq rows of bias(), or None. Raise UserError if its shape is wrong."""
        bias, (B, H, Tq, _), T = self.bias(at), q.shape, k.shape[2]
        if bias is None:
            return None
        sizes = ((1, B), (1, H), (1, Tq, T), (1, T))[-bias.dim():]      # allowed on each axis
        if bias.dim() not in (2, 3, 4) or any(n not in some for n, some in zip(bias.shape, sizes)):
            raise UserError(f'bias() of {type(self).__name__} must broadcast to [B, H, Tq, T] = '
                            f'{[B, H, Tq, T]}, got {list(bias.shape)}')
        if not bias.is_floating_point():
            raise UserError(f'bias() of {type(self).__name__} must not be {bias.dtype}: '
                            'use at.distance.float(), or torch.where(visible, 0.0, -math.inf)')
        return bias[..., -Tq:, :].expand(*bias.shape[:-2], Tq, T)

    def mask(self, like):
        """Return the mask [Tq, T] in the dtype of `like` [.., Tq, T]: 0, or -inf at masked keys."""
        if self.cfg.causal:
            return causal(like)
        visible = torch.zeros(like.shape[-2:], dtype=like.dtype, device=like.device)
        return F.pad(visible[:, 1:], (0, 1), value=-math.inf)       # all but the last key

    def mix(self, weights, v, pos, state=None, x=None):
        """Return attention's output [B, H, Tq, out_dim] for the weights [B, H, Tq, T]."""
        if self.fp32 and v.dtype in HALF:
            return self.mix(weights.float(), v.float(), pos, state, x).to(v.dtype)
        at = self.at(None, None, pos, state, x, q_len=weights.shape[-2])
        return self.out(weights @ self.value(v, at), at)

    def attend(self, q, k, v, pos, state=None, x=None):
        """Return mix(weigh(logits), v) [B, H, Tq, out_dim]; stores the logits only for weigh().

        q: queries at all T positions, or at the last Tq when decoding with a cache of k and v. pos:
        positions of k and v; ape and vipe compute with them in float32, which counts up to 2^24.
        state: from state(), or None if it depends on the length alone. x: the normalized input of
        the attention layer, for encodings whose hooks read it. Raise UserError if shapes do not
        fit. The kernels return NaN for integer positions that are not consecutive;
        kernel='reference' accepts any."""
        check_shapes(self.cfg, q, k, v, pos, x)
        at = self.at(q, k, pos, state, x)
        if self.takes_kernel(q, k, pos):
            at.kernel = True
            with exactly(q):
                return self.attend_by_kernel(q, k, v, at)
        autocast = not q.is_meta and torch.is_autocast_enabled(q.device.type)
        if self.fp32 and (autocast or q.dtype in HALF):
            x = x.float() if autocast and x is not None else x      # else in the weights' dtype
            with exactly(q):
                return self.attend(q.float(), k.float(), v.float(), pos, state, x).to(q.dtype)
        if changed(self, 'weigh'):
            weights = self.weigh(self.logits(q, k, pos, state, x))
            return self.mix(weights.to(v.dtype), v, pos, state, x)
        v = self.value(v, at)
        q, k = self.qk(q, k, at)
        if q.shape[-1] != k.shape[-1]:
            raise UserError(f'qk() of {type(self).__name__} must return q and k of one width, got '
                            f'{q.shape[-1]} and {k.shape[-1]}')
        bias = self.bias_rows(at, q, k)
        mask, Tq, T = None, q.shape[2], k.shape[2]      # fused attention is causal without a mask
        if bias is not None or Tq < T or not self.cfg.causal:
            bias = q.new_zeros(1, Tq, T) if bias is None else bias
            mask = bias + self.mask(bias)               # (.., 1 or H, Tq, T)
        return self.out(fused_attention(q, k, v, mask, self.scale), at)

    def takes_kernel(self, q, k, pos):
        """Whether kernels.attention computes this call; if kernel='auto', only if faster."""
        regular = (self.cfg.causal and q.shape[2] == k.shape[2] and pos.dim() == 1
                   and not pos.is_floating_point())
        if self.cfg.kernel == 'reference' or self.triton != 'faster' or not regular:
            return False
        large = q.is_cuda and q.dtype in HALF and q.shape[2] >= 512 and q.shape[3] <= 128
        return self.cfg.kernel == 'triton' or (
            large and kernels(required=False) is not None and kernels().fits(q.device))

    def attend_by_kernel(self, q, k, v, at):
        """attend() by kernels.attention, in memory linear in T."""
        q = q.masked_fill((at.s.diff() != 1).any(), math.nan)  # NaN: an error would sync the GPU
        v = self.value(v, at)
        q, k = self.qk(q, k, at)
        y, e = kernels().attention(q, k, v, self.mean_distance)
        if self.mean_distance:
            y = torch.cat([y.float(), e[..., None]], dim=-1)
        return self.out(y, at).to(v.dtype)


def kernels(required=True):
    """Return the module kernels.py, which is imported only here, when it is needed. With
    required=False, return None if kernels.py or Triton is missing."""
    try:
        if __package__:
            from . import kernels
        else:
            import kernels
        ours = hasattr(kernels, 'cursor_scan')              # another package has this name, too
    except ImportError:
        ours = False
    need(ours or not required, "kernel='triton' requires kernels.py beside pe.py: copy it there")
    return kernels if ours and (required or kernels.triton) else None


def options_of(cls):
    """Return {option: (type, default)}: the annotated attributes of a class and its bases."""
    bases = [base for base in cls.__mro__[::-1] if issubclass(base, Encoding)]
    return {key: (kind, getattr(cls, key)) for base in bases
            for key, kind in base.__annotations__.items()}


def changed(encoding, hook):
    """Whether an encoding (an instance or a class), or a part of a sum, overrides this hook."""
    if isinstance(encoding, Sum):
        return any(changed(part, hook) for part in encoding.parts)
    cls = encoding if isinstance(encoding, type) else type(encoding)
    return getattr(cls, hook) is not getattr(Encoding, hook)


def check_shapes(cfg, q, k, v, pos, x=None):
    """Raise UserError if the shapes do not fit together, or do not fit cfg."""
    if not q.dim() == k.dim() == v.dim() == 4:
        says = 'q, k and v must be [B, H, T, D]'
    elif any((z.shape[1], z.shape[3]) != (cfg.heads, cfg.head_dim) for z in (q, k, v)):
        says = (f'the encoding was built for {cfg.heads} heads of {cfg.head_dim}, [B, H, T, D]; '
                'repeat grouped keys and values: k.repeat_interleave(queries_per_key, dim=1)')
    elif v.shape[:3] != k.shape[:3] or q.shape[2] > k.shape[2] or len(q) != len(k):
        says = ('k and v must have length T and the batch size of q; q covers all T positions or '
                'the last few')
    elif x is not None and x.shape[:2] != (len(k), k.shape[2]):
        says = f'x must be the inputs of all {k.shape[2]} keys, not {list(x.shape)}'
    else:
        return check_positions(pos, len(k), k.shape[2])
    raise UserError(f'{says}; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}')


def check_positions(pos, B, T):
    """Raise UserError unless pos is [T] or [B, T], at least 0 and non-decreasing. (On a GPU only
    the shape is checked, to avoid a sync.)"""
    if pos.shape not in ((T,), (B, T)) or pos.dtype in HALF:
        raise UserError(f'pos must have a position for each of the {T} keys, [{T}] or [{B}, {T}] '
                        'if rows differ, in integers, float32 or float64; got '
                        f'{list(pos.shape)} in {pos.dtype}')
    if readable(pos):
        need((pos >= 0).all() and (pos.double().diff() >= 0).all() and pos.isfinite().all(),
             'positions must be finite, at least 0 and non-decreasing in a row; put packed '
             'documents in separate rows')


def exactly(x):
    """Return a context without autocast on the device of a tensor."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def readable(x):
    """Whether Python may branch on the values of a tensor: it need not wait for a GPU or trace."""
    plain = type(x) is torch.Tensor                 # not a FakeTensor
    return plain and x.device.type == 'cpu' and not torch.compiler.is_compiling()


def causal(like, itself=True):
    """Return the causal mask [Tq, T] for the last Tq queries, in the dtype of `like` [.., Tq, T]:
    -inf at keys after the query (and at the query's own key unless `itself`), else 0."""
    Tq, T = like.shape[-2:]
    hidden = torch.full((Tq, T), -math.inf, dtype=like.dtype, device=like.device)
    return hidden.triu(T - Tq + int(itself))


def frequencies(n, base, like):
    """Return theta_c = base^(-c/n), c = 0..n-1; never in half precision, where angles are noise."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return base ** (-torch.arange(n, device=like.device, dtype=dtype) / n)


def stretch(cfg, pos, total_len):
    """Return s = max(1, T / cfg.original_len), T the final length, as a tensor [], because
    torch.compile would make a graph for each value of a number."""
    T = torch.tensor(max(pos.shape[-1], total_len or 0), dtype=torch.float64)
    return (T / cfg.original_len).clamp(min=1.0)


def sinusoids(pos, width, base, like):
    """f(z) [.., width] for z in pos [..]: f(z)[2c], f(z)[2c+1] = sin, cos(z base^(-2c/width))."""
    angle = pos[..., None] * frequencies(width // 2, base, like)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def rotate(x, angle, half=0):
    """Rotate the feature pairs z_c of x [.., T, D] by angle [.., T, D/2], to z_c e^(i angle_c).
    z_c = x_2c + i x_(2c+1), or x_c + i x_(c+n) for the first n pairs if half=n. Same shape."""
    wide, turn = x.to(angle.dtype), torch.polar(torch.ones_like(angle), angle)
    if half:
        z = torch.complex(wide[..., :half], wide[..., half:2 * half]) * turn[..., :half]
        return torch.cat([z.real, z.imag, wide[..., 2 * half:]], dim=-1).to(x.dtype)
    if torch.compiler.is_compiling() or wide.stride(-1) != 1 or any(    # no view as pairs
            n % 2 for n in (*wide.stride()[:-1], wide.storage_offset())):
        wide = wide.contiguous()
    z = torch.view_as_complex(wide.unflatten(-1, (x.shape[-1] // 2, 2))) * turn
    return torch.view_as_real(z).flatten(-2).to(x.dtype)


class Affine(nn.Module):
    """W x + b, initialized as in nn.Linear. It is not an nn.Linear, so that a rule for all linear
    layers of a model, such as nanoGPT's _init_weights, leaves an encoding's weights as they are."""
    def __init__(self, inputs, outputs):
        super().__init__()
        linear = nn.Linear(inputs, outputs)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def fused_attention(q, k, v, mask, scale):
    """Return causal attention, as wide as v, by PyTorch's fused kernels. If a mask
    [.., 1 or H, Tq, T] is given, it is added to the logits and replaces the causal mask."""
    if mask is not None:                        # the fused kernels require contiguous rows
        mask = mask.to(q.dtype).contiguous().expand(*q.shape[:2], -1, -1)   # (B, H, Tq, T)
    width, wide = v.shape[-1], max(q.shape[-1], v.shape[-1])
    if q.is_cuda and q.shape[-1] != width:
        wide += -wide % 8                       # the CUDA kernels require a multiple of 8
    q, k, v = (z if z.shape[-1] == wide else F.pad(z, (0, wide - z.shape[-1]))
               for z in (q, k, v))              # zeros change no product and no other feature of y
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                          scale=scale)[..., :width]


# ---- added to the embeddings ---------------------------------------------------------------------

class NoPE(Encoding):
    """NoPE (Haviv et al. 2022): logit_ts = <q_t, k_s> / sqrt(d); the mask alone gives order."""
    shift_invariant = True


class APE(Encoding):
    """Sinusoids (Vaswani et al. 2017): x_t += p_t, p_t[2c] = sin(t theta_c),
    p_t[2c+1] = cos(t theta_c), theta_c = base^(-2c/C), C = d_model. No parameters."""
    shared = True

    def __init__(self, cfg):
        super().__init__(cfg)
        need(cfg.d_model % 2 == 0, f'ape requires an even d_model, got {cfg.d_model}')

    def embed(self, x, pos):
        check_positions(pos, *x.shape[:2])
        return x + sinusoids(pos, x.shape[-1], self.cfg.rope_base, x).to(x.dtype)


class ShiftedAPE(APE):
    """Randomly shifted sinusoids (Kiyono et al. 2021; PRISM's baseline): x_t += p_(t+m),
    m uniform on 0..max_shift for each sequence in training, 0 in evaluation."""
    max_shift: int = 512           # largest random shift m in training

    def embed(self, x, pos):
        if self.training:
            m = torch.randint(self.max_shift + 1, (len(x), 1), device=x.device)     # (B, 1)
            pos = pos + m                                                           # (B, T)
        return super().embed(x, pos)


class Learned(Encoding):
    """A learned vector per position (GPT-2; "Base" in ViPE): x_t += P[min(t, max_len - 1)],
    P [max_len, C] learned, initialized from N(0, 0.02^2)."""
    shared = True
    max_len: int = 1024            # rows of the table; later positions use the last row

    def __init__(self, cfg):
        super().__init__(cfg)
        need(cfg.train_len <= self.max_len, f'max_len={self.max_len} is shorter than a training '
             f'sequence: it must be at least {cfg.train_len}')
        self.make_table(torch.randn(self.max_len, cfg.d_model))

    def make_table(self, draw):
        self.table = nn.Parameter(draw * 0.02)

    def embed(self, x, pos):
        check_positions(pos, *x.shape[:2])
        row = pos.round().long().clamp(max=self.max_len - 1)
        return x + F.embedding(row, self.table).to(x.dtype)


class Random(Learned):
    """A random vector per position (the Toeplitz study's "random"): x_t += P[min(t, max_len - 1)].
    Our choices: P is fixed, with entries from N(0, 1/2), so that norms match those of sinusoids."""
    def make_table(self, draw):
        self.register_buffer('table', draw * 0.5 ** 0.5)


# ---- queries and keys ----------------------------------------------------------------------------

class RoPE(Encoding):
    """Rotary embedding (Su et al. 2021; PoPE eq. 1): logit_ts = q_t^T R_(s-t) k_s / sqrt(d),
    R_m rotating pair c by m theta_c, theta_c = base^(-2c/d). No parameters; d must be even.

    Pair c: the features (2c, 2c + 1), or (c, c + n) as in Llama, GPT-NeoX and transformers, with n
    rotated pairs. With the other pairs, a trained model's weights give wrong logits."""
    shift_invariant = needs_pairs = True
    # p: rotate the ceil(p d/2) fastest pairs (Barbero et al. 2024), which keep their frequencies.
    # GPT-NeoX's partial rotary has base^(-2c/(p d)) instead: the same with rope_base = base^(1/p)
    rope_fraction: float = 1.0
    # pair c: features 2c and 2c + 1 (adjacent) | c and c + ceil(p d/2) (half), as in a Llama
    rope_pairs: Literal['adjacent', 'half'] = 'adjacent'
    rope_skip: int = 0             # k: every k-th layer is without RoPE (SmolLM3, Llama 4); 0: none

    def __init__(self, cfg):
        super().__init__(cfg)
        need(self.rope_fraction <= 1, f'rope_fraction must be at most 1, got {self.rope_fraction}')

    def theta(self, like, s=1.0):                   # (D/2,); s: see PI
        theta = frequencies(like.shape[-1] // 2, self.cfg.rope_base, like)
        theta[math.ceil(self.rope_fraction * len(theta)):] = 0        # slow pairs: no rotation
        skipped = self.rope_skip and (self.cfg.layer + 1) % self.rope_skip == 0
        return 0 * theta if skipped else theta

    def qk(self, q, k, at):
        theta = self.theta(q, at.state)
        half = self.half(len(theta))
        return [rotate(x, pos[..., None] * theta, half) for x, pos in ((q, at.t), (k, at.s))]

    def half(self, pairs):                          # number of rotated pairs, or 0 if adjacent
        return math.ceil(self.rope_fraction * pairs) if self.rope_pairs == 'half' else 0


class LatentRoPE(RoPE):
    """RoPE on the second half of every query and key, NoPE on the first, as in latent attention
    (the Toeplitz study, eq. 3). build() uses it for pe='rope' with attention='mla'."""
    def qk(self, q, k, at):
        (q, q_p), (k, k_p) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        q_p, k_p = super().qk(q_p, k_p, at)                           # (B, H, T, D/2)
        return torch.cat([q, q_p], dim=-1), torch.cat([k, k_p], dim=-1)


class PI(RoPE):
    """Position interpolation (Chen et al. 2023): RoPE with theta_c -> theta_c / s.

    s = max(1, T / L), T the final length (pass `total_len`), L the training length. If training
    went on at a greater length (--init_from), s = train_len / L at all T. A fixed rope_scale is the
    factor in a checkpoint's configuration (transformers: `linear`)."""
    rope_scale: float = 0.0        # s of pi, ntk and yarn, at least 1; 0: as their docstring says

    def __init__(self, cfg):
        super().__init__(cfg)
        need(cfg.rope_base > 1, f'rope_base must be above 1 for {cfg.pe}, got {cfg.rope_base}')
        need(self.rope_scale == 0 or self.rope_scale >= 1, 'rope_scale must be at least 1, or 0: '
             f'final length over training length; got {self.rope_scale}')

    def state(self, x, pos, total_len=None):        # s []
        tuned = self.cfg.train_len / self.cfg.original_len
        fixed = self.rope_scale or (tuned if tuned > 1 else 0)
        if fixed:
            return torch.tensor(fixed, dtype=torch.float64)
        return stretch(self.cfg, pos, total_len)

    def theta(self, like, s=1.0):
        return super().theta(like) / s


class NTK(PI):
    """NTK-aware interpolation (bloc97 2023): RoPE with base -> base s^(d/(d-2)), d the rotated
    width, so that the fastest pair keeps its frequency and the slowest has theta_c / s. s: see PI.
    transformers' `dynamic` with factor f is rope_scale = f T / L - (f - 1)."""
    def theta(self, like, s=1.0):
        theta = RoPE.theta(self, like)
        n = math.ceil(self.rope_fraction * len(theta))      # rotated pairs, d = 2n
        c = torch.arange(len(theta), device=like.device, dtype=theta.dtype)
        return theta * s ** (-c / max(1, n - 1))


class YaRN(PI):
    """YaRN (Peng et al. 2023): RoPE with theta_c -> (1 - w_c) theta_c + w_c theta_c / s
    and logits times (0.1 ln s + 1)^2, s as in PI.

    As in the authors' code, w_c is linear in c: 0 at the pair of 32 rotations over the training
    length L, 1 at the pair of one rotation."""
    def theta(self, like, s=1.0):
        d, base, L = like.shape[-1], self.cfg.rope_base, self.cfg.original_len
        fast, slow = (d * math.log(L / (2 * math.pi * n)) / 2 / math.log(base)
                      for n in (32, 1))             # the c of a pair that makes n rotations over L
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
        theta = RoPE.theta(self, like)
        c = torch.arange(d // 2, device=like.device, dtype=theta.dtype)
        w = ((c - low) / max(high - low, 0.001)).clamp(0, 1)        # 0 fast, 1 slow
        return (1 - w) * theta + w * theta / s                      # (D/2,)

    def qk(self, q, k, at):
        temperature = 0.1 * at.state.log() + 1      # scales q and k, so the logits by its square
        return [x * temperature for x in super().qk(q, k, at)]


class PoPE(Encoding):
    """Polar coordinates (PoPE eq. 3-6), mu = softplus, theta_c = base^(-c/d):
    logit_ts = sum_c mu(q_t)_c mu(k_s)_c cos((s - t) theta_c + delta_c) / sqrt(d).

    There are d frequencies; RoPE has d/2. delta [H, d] is learned and clamped to [-2 pi, 0] after
    every optimizer step. polar() returns q' and k' in Cartesian form (eq. 7-10), 2d wide."""
    shift_invariant = True
    triton = 'faster'
    own = {'delta': dict(clamp=(-2 * math.pi, 0.0))}    # see param_groups()
    pope_softplus: bool = True     # magnitudes softplus(q), softplus(k); False: q, k
    # a frequency for each of the d features (all) | RoPE's d/2, each for two features (half)
    pope_frequencies: Literal['all', 'half'] = 'all'
    # the phase bias delta starts at zero | uniform on [-2 pi, 0] | none: no bias
    pope_delta: Literal['zero', 'uniform', 'none'] = 'zero'

    def __init__(self, cfg):
        super().__init__(cfg)
        if self.pope_frequencies == 'half':
            need(cfg.head_dim % 2 == 0, f'half requires an even d_model / n_head, got '
                 f'{cfg.head_dim}')
            self.triton = 'unable'              # kernels.polar supports d frequencies only
        delta = torch.zeros(cfg.heads, cfg.head_dim)
        if self.pope_delta == 'uniform':
            delta.uniform_(*self.own['delta']['clamp'])
        self.delta = None if self.pope_delta == 'none' else nn.Parameter(delta)

    def theta(self, like):                      # (D,)
        n = 2 if self.pope_frequencies == 'half' else 1     # features per frequency
        theta = frequencies(self.cfg.head_dim // n, self.cfg.rope_base, like)
        return theta.repeat_interleave(n)                           # base^(-n floor(c/n)/d)

    def qk(self, q, k, at):
        if at.kernel:
            q = kernels().polar(q, None, self.cfg.rope_base, self.pope_softplus)
            k = kernels().polar(k, self.delta, self.cfg.rope_base, self.pope_softplus)
            return q, k  # (B, H, T, 2D)
        theta = self.theta(q)
        phase_q, phase_k = at.t[..., None] * theta, at.s[..., None] * theta     # (1, T, D)
        if self.delta is not None:
            phase_k = phase_k + self.delta[:, None]                         # (H, T, D)
        return polar(q, phase_q, self.pope_softplus), polar(k, phase_k, self.pope_softplus)


def polar(x, phase, positive=True):
    """Return [mu(x) cos(phase), mu(x) sin(phase)] (PoPE eq. 7-10), [B, H, T, 2D] in the dtype of x
    [B, H, T, D]; mu = softplus if `positive`, else the identity."""
    mu = F.softplus(x) if positive else x
    cos_sin = torch.cat([phase.cos(), phase.sin()], dim=-1)             # (1 or H, T, 2D)
    return (torch.cat([mu, mu], dim=-1) * cos_sin).to(x.dtype)          # one product, not two


# ---- logits and weights: an additive bias, or another softmax ------------------------------------

class ALiBi(Encoding):
    """Linear bias (Press et al. 2022): logit_ts = <q_t, k_s> / sqrt(d) - m_h |t - s|,
    slopes m_h = 2^(-8h/H), h = 1..H.

    If H is not a power of two, and n is the next lower one: the slopes for n heads, then the first,
    third, ... for 2n heads. A single head has slope 1/256, so it is nearly NoPE."""
    shift_invariant = True

    def slope(self, device):                        # (H,)
        n = 2 ** int(math.log2(self.cfg.heads))
        h = torch.arange(1, self.cfg.heads + 1, device=device)
        return 2 ** -torch.where(h <= n, 8 * h / n, 4 * (2 * (h - n) - 1) / n)  # n heads, 2n heads

    def bias(self, at):
        return -self.slope(at.s.device)[:, None, None] * at.distance


class T5(Encoding):
    """T5's relative bias (Raffel et al. 2020), with learned b [buckets, H] that all layers share:
    logit_ts = <q_t, k_s> / sqrt(d) + b_h[bucket(t - s)].

    With n buckets and e = floor(n/2): bucket(m) = m for m < e, else the smaller of n - 1 and e +
    floor((n - e) log(m/e) / log(t5_max_distance/e)). With causal=False, n = t5_buckets / 2, and
    keys after the query have the other half. The original T5 has no factor 1/sqrt(d)."""
    shared = shift_invariant = True
    t5_buckets: int = 32           # number of distance buckets
    t5_max_distance: int = 128     # all distances from here on are in the last bucket

    def __init__(self, cfg):
        super().__init__(cfg)
        n, far, least = self.t5_buckets, self.t5_max_distance, 2 if cfg.causal else 4
        need(least <= n < least * far, f't5 requires {least} <= t5_buckets < {least} '
             f't5_max_distance, got {n}, {far}')
        self.table = nn.Parameter(torch.zeros(self.t5_buckets, cfg.heads))

    def bucket(self, d):                            # distances [..] -> [..]
        n = self.t5_buckets if self.cfg.causal else self.t5_buckets // 2
        e = n // 2
        ratio = torch.log(d.clamp(min=1) / e) / math.log(self.t5_max_distance / e)
        far = (e + (ratio * (n - e)).long()).clamp(max=n - 1)
        return torch.where(d < e, d.long(), far)

    def bias(self, at):
        bucket = self.bucket(at.distance)                       # (.., 1, Tq, T)
        if not self.cfg.causal:                                 # the other half for future keys
            future = at.s[..., None, :] > at.t[..., :, None]
            bucket = bucket + self.t5_buckets // 2 * future
        b = F.embedding(bucket, self.table)                     # (.., 1, Tq, T, H)
        return b.transpose(-4, -1).squeeze(-1)                  # (.., H, Tq, T)


class FIRE(Encoding):
    """Functional interpolation (Li et al. 2023), psi(x) = log(c x + 1), f an MLP, learned c and L:
    logit_ts = <q_t, k_s> / sqrt(d) + f(psi(t - s) / psi(max(t, L)))."""
    needs_causal = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mlp = nn.Sequential(Affine(1, 32), nn.ReLU(), Affine(32, cfg.heads))
        self.c = nn.Parameter(torch.tensor(0.1))  # |c| is used
        self.L = nn.Parameter(torch.tensor(1.0))  # in units of train_len / 4

    def bias(self, at):
        threshold = (self.L * max(1.0, self.cfg.original_len / 4)).abs()
        reach = torch.maximum(at.t.to(threshold.dtype), threshold)  # (1, Tq)
        x = torch.log(self.c.abs() * at.distance.to(reach.dtype) + 1)   # psi(t - s)
        x = x / (torch.log(self.c.abs() * reach + 1)[..., None] + 1e-6)     # (.., 1, Tq, T)
        f = self.mlp(x[..., None])                                  # (.., 1, Tq, T, H)
        return f.transpose(-4, -1).squeeze(-1)                      # (.., H, Tq, T)


class FoX(Encoding):
    """Forgetting Transformer (Lin et al. 2025): logit_ts = <q_t, k_s> / sqrt(d) + sum_{s<j<=t} log
    f_j, with a forget gate f_j = sigmoid(<w_h, x_j> + b_h) for each token j and head h.

    A cache may drop its oldest keys. Attention sinks are refused, because the gates of the dropped
    tokens after them are missing: steps of pos above 1 are an error, or NaN on a GPU."""
    shift_invariant = needs_causal = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gate = Affine(cfg.d_model, cfg.heads)

    def bias(self, at):
        f = F.logsigmoid(self.gate(at.x)).transpose(1, 2)                # (B, H, T)
        c = f.to(torch.promote_types(f.dtype, torch.float32)).cumsum(dim=-1)   # never in bfloat16
        c = at.without_gaps(c)
        return c[..., :, None] - c[..., None, :]


class PaTH(Encoding):
    """PaTH attention (Yang et al. 2025): logit_ts = q_t^T H_t H_(t-1) ... H_(s+1) k_s / sqrt(d),
    H_j = 1 - beta_j w_j w_j^T, with w_j = W_w x_j + b of unit norm and beta_j = 2 sigmoid(<w, x_j>
    + b) for each token j and head (without the short convolution of the paper).

    With B = diag(beta), the bias on <q_t, k_s> / sqrt(d) is -tril(Q W^T) (1 + tril(B W W^T, -1))^-1
    B tril(W K^T, -1) / sqrt(d). A cache may drop its oldest keys alone, as with FoX."""
    shift_invariant = needs_causal = fp32 = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.w = Affine(cfg.d_model, cfg.heads * cfg.head_dim)
        self.beta = Affine(cfg.d_model, cfg.heads)

    def bias(self, at):
        q, k, (H, D) = at.q, at.k, (self.cfg.heads, self.cfg.head_dim)
        w = F.normalize(self.w(at.x).unflatten(-1, (H, D)), dim=-1).transpose(1, 2).to(q.dtype)
        beta = 2 * torch.sigmoid(self.beta(at.x)).transpose(1, 2)[..., None].to(q.dtype)
        w = at.without_gaps(w)                                  # (B, H, T, D)
        later = (beta * (w @ w.mT)).tril(-1)                    # (B, H, T, T)
        right = beta * (w @ k.mT).tril(-1)                      # j after s
        left = (q @ w.mT).tril(k.shape[2] - q.shape[2])         # (B, H, Tq, T): j up to t
        return -left @ torch.linalg.solve_triangular(
            later, right, upper=False, unitriangular=True) * self.scale


class SSMax(Encoding):
    """Scalable softmax (Nakanishi 2025): logit_ts = s_h log(n) <q_t, k_s> / sqrt(d) for n = t + 1
    visible keys, s_h learned, initially 1 / log(train_len). Use it in a sum: rope+ssmax."""
    needs_causal = True
    order = 2

    def __init__(self, cfg):
        super().__init__(cfg)
        start = 1 / math.log(max(2, cfg.original_len))
        self.s = nn.Parameter(torch.full((cfg.heads, 1, 1), start))

    def qk(self, q, k, at):
        return (q * self.s * (at.t + 1).to(self.s.dtype)[..., None].log()).to(q.dtype), k


class StickBreaking(Encoding):
    """Stick-breaking attention (Tan et al. 2024): alpha_ts = sigmoid(z_ts) prod_{s<j<t} (1 -
    sigmoid(z_tj)), s < t, z = QK^T / sqrt(d): going back from t, each key takes the fraction
    sigmoid(z) of what is left of a stick of length 1. No token attends to itself, so y_0 = 0."""
    shift_invariant = needs_causal = True
    fp32 = True                    # sums of logarithms

    def weigh(self, logits):
        logits = logits + causal(logits, itself=False)
        taken, left = F.logsigmoid(logits), F.logsigmoid(-logits)   # -inf, 0 at masked keys
        later = F.pad(left[..., 1:], (0, 1)).flip(-1).cumsum(dim=-1).flip(-1)
        return (taken + later).exp()    # later: sum_{j>s} log(1 - sigmoid(z_tj))


# ---- values --------------------------------------------------------------------------------------

class VRoPE(Encoding):
    """Values rotated as in RoPE (ViPE B.1, in words): y_t = R_t^T sum_s alpha_ts R_s v_s, adjacent
    pairs of features, also with rope_pairs='half'."""
    shift_invariant = needs_pairs = True

    def rotated(self, v, pos):
        d = self.cfg.head_dim  # channels that another encoding appended stay unchanged
        angle = pos[..., None] * frequencies(d // 2, self.cfg.rope_base, v)  # (1, T, D/2)
        return torch.cat([rotate(v[..., :d].contiguous(), angle), v[..., d:]], dim=-1)

    def value(self, v, at):
        return self.rotated(v, at.s)

    def out(self, y, at):
        return self.rotated(y, -at.t)


class ViPE(Encoding):
    """ViPE (eq. 7-9): logit_ni = s log(n) (1 + <u, k_i>) <q_n, k_i> / sqrt(d),
    z_n = [sum_i alpha_ni v_i ; W_p E_alpha[n - i] / s + b_p].

    Positions n, i count from 1; s = max(1, T / L), L as in PI, or as vipe_s says. The distance code
    W_p (n - i) / s + b_p is linear in n - i, so its average needs one extra value channel, i:
    E_alpha[n - i] = n - sum_i alpha_ni i. Each head and layer learns its own u, W_p and b_p; u and
    b_p start at 0. z_n is head_dim + d_p wide. s depends on the final length: pass `total_len`."""
    fp32 = needs_causal = True     # log(n) and n - i assume n visible keys
    triton = 'faster'
    order = 2
    vipe_value: bool = True        # the value-side distance code
    vipe_logn: bool = True         # log(n) in the logit scale; False: the factor is s alone
    vipe_u: bool = True            # 1 + <u, k> in the logit scale
    # s = length (T / L, at least 1) | global (eval_len / L if T > L) | one
    vipe_s: Literal['length', 'global', 'one'] = 'length'
    vipe_d_p: int = 0              # width of the distance code; 0: the head dimension

    def __init__(self, cfg):
        super().__init__(cfg)
        self.shift_invariant = not self.vipe_logn
        if self.vipe_u:
            self.u = nn.Parameter(torch.zeros(cfg.heads, cfg.head_dim))
        self.mean_distance = self.vipe_value
        if self.vipe_value:
            d_p = self.vipe_d_p or cfg.head_dim
            self.W_p = nn.Parameter(torch.randn(cfg.heads, 1, d_p) * 0.02)
            self.b_p = nn.Parameter(torch.zeros(cfg.heads, 1, d_p))
            self.out_dim = cfg.head_dim + d_p

    def state(self, x, pos, total_len=None):        # s []
        s = stretch(self.cfg, pos, total_len)
        if self.vipe_s == 'global':
            most = max(1.0, self.cfg.eval_len / self.cfg.original_len)
            return torch.where(s > 1, most, s)
        return torch.ones_like(s) if self.vipe_s == 'one' else s

    def qk(self, q, k, at):                         # q_n s log(n), k_i (1 + <u, k_i>)
        raw = at.k.float() if at.kernel else at.k                   # (B, H, T, D)
        n = (at.t + 1).to(raw.dtype)[..., None]                     # (1, Tq, 1)
        row = at.state * (n.log() if self.vipe_logn else torch.ones_like(n))
        col = 1 + raw @ self.u[..., None].to(raw.dtype) if self.vipe_u else 1   # (B, H, T, 1)
        return (q * row).to(q.dtype), (k * col).to(k.dtype)

    def value(self, v, at):
        if not self.vipe_value or at.kernel:  # kernels.attention itself returns E_alpha[n - i]
            return v
        i = at.s.to(v.dtype)[..., None].expand(*v.shape[:-1], 1)    # (B, H, T, 1)
        return torch.cat([v, i], dim=-1)                            # (B, H, T, D + 1)

    def out(self, y, at):
        if not self.vipe_value:
            return y
        E = y[..., -1:] if at.kernel else at.t.to(y.dtype)[..., None] - y[..., -1:]  # E_alpha[n-i]
        code = E / at.state * self.W_p + self.b_p                   # (B, H, Tq, d_p)
        return torch.cat([y[..., :-1], code], dim=-1)               # (B, H, Tq, D + d_p)


# ---- PRISM: content-dependent positions ----------------------------------------------------------
# A cursor is a probability histogram over offsets -t..t, which the gates of each token move.
# A query attends to keys whose cursors have a similar histogram.

EPS = 1e-8  # added to histograms before they are sharpened


def algorithm_1(h, p_reset, p_step, p_copy=None, gamma=None):
    """Apply PRISM's Algorithm 1 to one token: histograms h [B, C, 2t+1] over the offsets -t..t ->
    [B, C, 2t+3] over -(t+1)..t+1, all that a cursor can reach, so no clamp at +-P is needed.

    p_reset [B, C, 1]; p_step = (p_incr, p_decr, p_keep), [B, C, 1] each. p_copy [B, C, t+2]: entry
    k <= t is the probability of a jump to offset k, the last entry that of no jump. gamma [C, 1]:
    exponents of the sharpening. p_copy=None: no jumps; gamma=None: no sharpening."""
    t = h.shape[-1] // 2
    p_incr, p_decr, p_keep = p_step
    total = h.sum(dim=-1, keepdim=True)                         # (1) aggregate mass (B, C, 1)
    h = (1 - p_reset) * h + F.pad(p_reset * total, (t, t))      # (2) a reset moves to offset 0
    wide = F.pad(h, (2, 2))                                     # (3) then one step (B, C, 2t+5)
    h = p_incr * wide[..., :-2] + p_decr * wide[..., 2:] + p_keep * wide[..., 1:-1]
    if p_copy is not None:                                      # (4) a jump replaces the step
        h = p_copy[..., -1:] * h + F.pad(p_copy[..., :-1], (t + 1, 1))
    if gamma is not None:                                       # (5) (h + eps)^gamma, normalized;
        h = (gamma * (h + EPS).log()).softmax(dim=-1)           # in logs, as gamma may be large
    return h


def cursor_scan(reset, step, gamma, table, copy=None):
    """Apply PRISM's Algorithm 1 to each token, and return the superpositions (Algorithm 2) of the
    histograms h_t: e_t = sum_d h_t[d] f(d) over offsets d, [B, C, T, d_pe].

    reset [B, C, T], step [B, C, T, 3], gamma [C], copy [B, C, T, T+1]: the arguments of algorithm_1
    for each token; jumps to k > t are left out, so their mass is lost. table [2P+1, d_pe] =
    f(-P..P), P >= T. All float32 or float64. kernels.cursor_scan computes the same on a GPU."""
    (B, C, T), P = reset.shape, len(table) // 2
    assert step.shape == (B, C, T, 3) and (copy is None or copy.shape == (B, C, T, T + 1))
    assert len(table) == 2 * P + 1 > 2 * T, f'table must be [2P+1, d_pe], with offsets -{T}..{T}'
    h = table.new_ones(B, C, 1)                                 # all mass starts at offset 0
    gamma = None if gamma is None else gamma[:, None]           # (C, 1)
    gates = zip(reset[..., None].unbind(dim=2), step[..., None].unbind(dim=2))
    encodings = []
    for t, (p_reset, p_step) in enumerate(gates):               # (B, C, 1), (B, C, 3, 1)
        p_copy = None if copy is None else torch.cat(           # jumps to 0..t, and "no jump"
            [copy[:, :, t, :t + 1], copy[:, :, t, -1:]], dim=-1)
        h = algorithm_1(h, p_reset, p_step.unbind(dim=2), p_copy, gamma)    # (B, C, 2t+3)
        encodings.append(h @ table[P - t - 1:P + t + 2])        # Algorithm 2: (B, C, d_pe)
    return torch.stack(encodings, dim=2)                        # (B, C, T, d_pe)


def algorithm_3(e, pos, cfg):
    """Apply PRISM's Algorithm 3 to e [2, layers, B, H, T, branches, d_pe]: with prism_absolute,
    append the sinusoid of pos ([T] or [B, T]) as one more branch; rescale as prism_norm says."""
    d_pe = e.shape[-1]
    if cfg.prism_absolute:
        p = sinusoids((pos - pos[..., :1]).unsqueeze(-2), d_pe, cfg.rope_base, e)[..., None, :]
        e = torch.cat([e, p.expand(*e.shape[:5], 1, d_pe)], dim=-2)
    if cfg.prism_norm == 'scale':   # to norm sqrt(d_pe) if each branch is one sinusoid, whose norm
        return e * (2 / e.shape[-2]) ** 0.5                             # is sqrt(d_pe / 2)
    if cfg.prism_norm == 'unit':                                        # to norm sqrt(d_pe) exactly
        return e / e.flatten(-2).norm(dim=-1)[..., None, None] * d_pe ** 0.5
    return e


class Gates(nn.Module):
    """The gates of n cursors: u_t = GRU(norm(x_t) / 2, u_(t-1)) with content x. For each cursor,
    w_t = W u_t + b, p_reset = sigmoid(w_t[0]) and (p_incr, p_decr, p_keep) = softmax(w_t[1:4])."""
    def __init__(self, cfg, n):
        super().__init__()
        self.cfg, self.n, hidden = cfg, n, cfg.prism_hidden
        self.W_x = Affine(cfg.d_model, 3 * hidden)              # GRU gates r, z, n: input part
        self.W_h = Affine(hidden, 3 * hidden)                   # recurrent part
        self.W = Affine(hidden, 4 * n)                          # reset, incr, decr, keep
        nn.init.orthogonal_(self.W_h.weight)
        with torch.no_grad():
            self.W.weight.mul_(0.3)
            self.W.bias.zero_().view(n, 4)[:, 0] = -1.0         # initially p_reset = 0.27
        self.capturable = cfg.prism_recurrent != 'orthogonal'   # by a CUDA graph; train.py reads it
        if cfg.prism_recurrent == 'orthogonal':
            nn.utils.parametrizations.orthogonal(self.W_h, orthogonal_map='householder')
        if cfg.prism_recurrent == 'norm':
            self.s = nn.Parameter(torch.tensor(0.5))

    def W_recurrent(self):
        """Return W_h, with norm s sqrt(hidden) if prism_recurrent='norm' (PRISM, footnote 8*)."""
        cfg, W = self.cfg, self.W_h.weight                      # (3 hidden, hidden)
        if cfg.prism_recurrent == 'norm':
            return W * (self.s * cfg.prism_hidden ** 0.5 / W.norm())
        return W

    def penalty(self):
        """Return 1e-3 |W_h^T W_h - 1|^2 (PRISM 6.3) with prism_recurrent='penalty', else 0."""
        cfg, W = self.cfg, self.W_h.weight
        if cfg.prism_recurrent != 'penalty':
            return 0.0
        eye = torch.eye(W.shape[1], device=W.device, dtype=W.dtype)
        return 1e-3 * (W.T @ W - eye).square().sum()

    def forward(self, x):
        """x [B, T, C] -> p_reset [B, n, T], p_step [B, n, T, 3], [norm(x) / 2 ; u] [B, T, ..]."""
        cfg, x = self.cfg, 0.5 * F.layer_norm(x, x.shape[-1:])
        weights = [self.W_x.weight, self.W_recurrent(), self.W_x.bias, self.W_h.bias]
        start = x.new_zeros(1, len(x), cfg.prism_hidden)    # u_(-1)
        with torch.backends.cudnn.flags(enabled=False):         # cuDNN's GRU rounds to TF32
            u, _ = torch.gru(x, start, weights, has_biases=True, num_layers=1, dropout=0.0,
                             train=True, bidirectional=False, batch_first=True)
        w = self.W(u).unflatten(-1, (self.n, 4))                # (B, T, n, 4)
        w = w.permute(3, 0, 2, 1)                               # (4, B, n, T): a faster softmax
        reset, step = torch.sigmoid(w[0]), w[1:].softmax(dim=0).movedim(0, -1)
        if not cfg.prism_reset:
            reset = torch.zeros_like(reset)
        return reset, step, torch.cat([x, u], dim=-1)


class CopyBranch(nn.Module):
    """Causal self-attention whose weights p_copy are the probabilities that each of n query cursors
    jumps to the position of an earlier or the current token, or does not jump (PRISM 5.0.3)."""
    def __init__(self, cfg, n):
        super().__init__()
        width, self.head_dim = cfg.d_model + cfg.prism_hidden, cfg.head_dim
        self.W_q = Affine(width, n * cfg.head_dim)
        self.W_k = Affine(width, n * cfg.head_dim)
        self.W_stay = Affine(width, n)
        nn.init.constant_(self.W_stay.bias, 3.0)                # p_jump = 0.05 at token 0

    def forward(self, x):
        """x [B, T, width], from Gates -> p_copy [B, n, T, T + 1], whose last entry is "no jump"."""
        q, k = (W(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)     # (B, n, T, D)
                for W in (self.W_q, self.W_k))
        logits = q @ k.transpose(-2, -1) * self.head_dim ** -0.5            # (B, n, T, T)
        stay = self.W_stay(x).transpose(1, 2)[..., None]                    # (B, n, T, 1)
        return torch.cat([logits + causal(logits), stay], dim=-1).softmax(dim=-1)


class Cursors(nn.Module):
    """A PRISM layer: C query and C key cursors, which Gates move and cursor_scan superposes.
    With prism_copy, every fifth query cursor can also jump (CopyBranch)."""
    reads_content = True    # positions come from the content: probes cannot set them

    def __init__(self, cfg, layers):
        super().__init__()
        self.cfg, self.layers = cfg, layers
        self.count = layers * cfg.heads * cfg.prism_cursors             # C
        self.gates = Gates(cfg, 2 * self.count)
        if cfg.prism_sharpen:                               # gamma = 1 + softplus(g), 2 initially
            self.g = nn.Parameter(torch.full((2 * self.count,), math.log(math.e - 1)))
        if cfg.prism_copy != 'none':
            self.copy = CopyBranch(cfg, len(range(0, self.count, 5)))

    def actions(self, x):
        """Return p_reset [B, 2C, T], p_step [B, 2C, T, 3], and p_copy [B, C', T, T + 1] of the C'
        copying cursors, or None without prism_copy."""
        cfg, (reset, step, read) = self.cfg, self.gates(x)
        if cfg.prism_copy == 'none':
            return reset, step, None
        if cfg.prism_copy == 'fixed':
            # the copying cursors' key cursors step to -1, 0, 1, ...: a decrement, then increments;
            # so after a jump to offset k the query matches the key of token k + 1
            t, reset, step = torch.arange(x.shape[1], device=x.device), reset.clone(), step.clone()
            reset[:, self.count::5] = 0                                             # (B, C', T)
            step[:, self.count::5] = torch.stack([t > 0, t == 0, t < 0], dim=-1).to(step)
        return reset, step, self.copy(read)

    def scan(self, x, table):
        """Return superpositions [B, 2C, T, d_pe] of all cursors; table [2P+1, d_pe] = f(-P..P)."""
        cfg = self.cfg
        by_kernel = cfg.kernel == 'triton' or (
            cfg.kernel == 'auto' and x.is_cuda and x.dtype != torch.float64
            and kernels(required=False) is not None)
        algorithms_1_2 = kernels().cursor_scan if by_kernel else cursor_scan
        reset, step, copy = (p if p is None else p.to(table.dtype) for p in self.actions(x))
        gamma = 1 + F.softplus(self.g) if cfg.prism_sharpen else None       # (2C,)
        e = algorithms_1_2(reset, step, gamma, table)                   # (B, 2C, T, d_pe)
        if copy is None:
            return e
        some = slice(0, self.count, 5)                      # the copying cursors, now with jumps
        gamma = None if gamma is None else gamma[some]                  # (C',)
        jumping = algorithms_1_2(reset[:, some], step[:, some], gamma, table, copy)
        return e.slice_scatter(jumping, 1, 0, self.count, 5)

    def forward(self, x, pos):
        """Return g_q, g_k [2, layers, B, H, T, branches d_pe] for each layer that uses these
        cursors; a branch is the superposition of a cursor, or the absolute position."""
        cfg, (B, T, _) = self.cfg, x.shape
        d_pe = cfg.prism_d_pe
        dtype = torch.promote_types(x.dtype, torch.float32)
        offsets = torch.arange(-T, T + 1, device=x.device, dtype=dtype)             # (2T+1,)
        with exactly(x):
            if cfg.prism_superpose:
                e = self.scan(x, sinusoids(offsets, d_pe, cfg.rope_base, x))
            else:                                           # f of the mean offset (PRISM A.3)
                e = sinusoids(self.scan(x, offsets[:, None])[..., 0], d_pe, cfg.rope_base, x)
        e = e.view(B, 2, self.layers, cfg.heads, cfg.prism_cursors, T, d_pe)
        e = e.permute(1, 2, 0, 3, 5, 4, 6)              # (2, layers, B, H, T, cursors, d_pe)
        return algorithm_3(e, pos, cfg).flatten(-2).to(x.dtype)


class PRISM(Encoding):
    """PRISM (eq. 9), positions g computed from content: logit_ts = mu_h <q_t, k_s> / sqrt(d)
    + (1 - mu_h) 4 sum_c |alpha_hc| <g_tc, g_sc> / sqrt(C d_pe).

    g_tc is the mean of the sinusoids of all offsets, weighted by the histogram of cursor c (class
    Cursors). Each head h has C = prism_cursors query cursors, and as many key cursors for g_sc. mu
    in [0, 1] and alpha are learned. The factor 4 (ours) applies only to prism_norm='none'."""
    shift_invariant = needs_causal = True
    order = 1
    prism_layers: list = (1,)      # new cursors are computed before each of these layers
    prism_cursors: int = 2         # query cursors per head, and as many key cursors
    prism_d_pe: int = 32           # width of the sinusoids that a cursor superposes
    prism_hidden: int = 100        # hidden width of the GRU for the gates
    # W_h of the GRU: free | orthogonal | penalty (1e-3 |W'W - 1|^2) | norm (learned)
    prism_recurrent: Literal['free', 'orthogonal', 'penalty', 'norm'] = 'free'
    prism_reset: bool = True       # cursors can return to offset 0; False: no resets
    prism_superpose: bool = True   # mean of sinusoids; False: sinusoid of the mean offset
    prism_sharpen: bool = True     # power-sharpening of the histograms, gamma > 1 learned
    # every fifth query cursor can jump: none | fixed (its key cursor counts tokens) | trained
    prism_copy: Literal['none', 'fixed', 'trained'] = 'none'
    prism_absolute: bool = False   # the absolute position as one more cursor (Algorithm 3)
    # none | scale (Algorithm 3: one constant) | unit (each token to norm sqrt(d_pe))
    prism_norm: Literal['none', 'scale', 'unit'] = 'none'
    prism_alpha_lr: float = 0.03   # peak learning rate of alpha, the cursors' weights

    def __init__(self, cfg):
        super().__init__(cfg)
        need(cfg.prism_d_pe % 2 == 0, f'prism_d_pe must be even, got {cfg.prism_d_pe}')
        valid = range(1, cfg.n_layer + 1)
        need(1 in cfg.prism_layers and all(n in valid for n in cfg.prism_layers), 'prism_layers '
             f'must contain 1 and none above n_layer={cfg.n_layer}, got {cfg.prism_layers}')
        starts = [number - 1 for number in cfg.prism_layers]            # counted from 0
        self.own = {'alpha': dict(lr=cfg.prism_alpha_lr, betas=(0.8, 0.92))}    # PRISM 6.4
        self.layer = cfg.layer - max(n for n in starts if n <= cfg.layer)   # 0 at a PRISM layer
        self.m = nn.Parameter(torch.zeros(cfg.heads, 1, 1))             # mu = sigmoid(m)
        branches = cfg.prism_cursors + cfg.prism_absolute               # of a head
        self.alpha = nn.Parameter(torch.ones(cfg.heads, 1, branches))
        self.factor = (cfg.head_dim / (branches * cfg.prism_d_pe)) ** 0.5   # undoes 1 / sqrt(d)
        if cfg.prism_norm == 'none':
            self.factor *= 4
        if self.layer == 0:
            end = min(first for first in [*starts, cfg.n_layer] if first > cfg.layer)
            self.cursors = Cursors(cfg, end - cfg.layer)    # up to the next PRISM layer

    def state(self, x, pos, total_len=None):
        need(x is not None and self.layer == 0, 'prism requires a state: pass '
             'state=encodings[0].state(x, pos), with x [B, T, C] the token embeddings')
        return self.cursors(x, pos)

    def restate(self, x, pos, state):
        return self.cursors(x, pos) if self.layer == 0 else state

    def penalty(self):
        return self.cursors.gates.penalty() if self.layer == 0 else 0.0

    def qk(self, q, k, at):
        if at.state.shape[-2] != k.shape[2]:
            raise UserError('prism requires the state of the cached tokens: a slice of the state '
                            f'of all, state[..., start:end, :], of length {k.shape[2]}')
        g_q, g_k = at.state[:, self.layer]                              # (B, H, T, branches d_pe)
        g_q = g_q[..., k.shape[2] - q.shape[2]:, :]                     # (B, H, Tq, branches d_pe)
        mu = torch.sigmoid(self.m)                                      # (H, 1, 1)
        weight = (1 - mu) * self.factor * self.alpha.abs()              # (H, 1, branches)
        weight = weight.repeat_interleave(g_q.shape[-1] // weight.shape[-1], dim=-1)   # of g_q
        return torch.cat([mu * q, weight * g_q], dim=-1), torch.cat([k, g_k], dim=-1)


ENCODINGS = {'nope': NoPE, 'ape': APE, 'learned': Learned, 'random': Random,
             'shifted_ape': ShiftedAPE, 'rope': RoPE, 'pi': PI, 'ntk': NTK, 'yarn': YaRN,
             'pope': PoPE, 'alibi': ALiBi, 't5': T5, 'fire': FIRE, 'vrope': VRoPE, 'vipe': ViPE,
             'prism': PRISM, 'fox': FoX, 'path': PaTH, 'stickbreaking': StickBreaking,
             'ssmax': SSMax}


OPTIONS = {}                                        # {option: (type, default)} of every encoding
for encoding in ENCODINGS.values():
    for name, option in options_of(encoding).items():
        need(name not in OPTIONS or OPTIONS[name] == option, f'{name} has two defaults or types')
        need(not hasattr(Encoding, name) and not hasattr(SharedConfig, name) and name not in
             ('cfg', 'scale', 'out_dim', 'heads', 'head_dim', 'layer'), f'rename the option {name}')
        OPTIONS[name] = option
PEConfig = make_dataclass('PEConfig', [(name, *option) for name, option in OPTIONS.items()],
                          bases=(SharedConfig,),
                          namespace=dict(__doc__=SharedConfig.__doc__, __module__=__name__))


# ---- combining encodings -------------------------------------------------------------------------

class Sum(Encoding):
    """'a+b': hooks of a, then of b; qk() by rising `order`; out() of b first; biases are added."""
    def __init__(self, cfg, *parts):
        super().__init__(cfg)
        self.parts = nn.ModuleList(parts)
        self.shift_invariant = all(p.shift_invariant for p in parts)
        self.fp32 = any(p.fp32 for p in parts)
        self.mean_distance = any(p.mean_distance for p in parts)
        found = {p.triton for p in parts}       # one part is enough for the first two of these
        self.triton = next(x for x in ('unable', 'faster', 'no faster') if x in found)
        self.out_dim += sum(p.out_dim - p.cfg.head_dim for p in parts)      # each adds width
        self.scale *= math.prod(p.scale / self.scale for p in parts)        # of one that changes it

        def at_most_one(group, why):
            names = ' and '.join(type(p).__name__ for p in group)           # PoPE and RoPE
            need(len(group) < 2, f'{names} cannot be added: {why}')

        at_most_one([p for p in parts if isinstance(p, RoPE)], 'each rotates q and k')
        changing = [p for p in parts if changed(p, 'qk')]
        at_most_one([p for p in changing if p.order == 1], 'each appends features to q and k')
        if any(isinstance(p, PoPE) for p in parts):
            at_most_one([p for p in changing if p.order == 0],
                        'polar coordinates leave no pairs of features to rotate')
        softmax = [p for p in parts if changed(p, 'weigh')]
        at_most_one(softmax, 'each replaces the softmax')
        at_most_one([p for p in parts if p.mean_distance or p in softmax],
                    'the mean distance requires weights that sum to 1, and may be taken once')
        for part in parts:
            at_most_one([p for p in parts if type(p) is type(part)], 'each does the same')
        for p in softmax:                               # the only one, or none
            self.weigh = p.weigh

    def each(self, at):
        """Return [(part, at with that part's state)]."""
        return [(p, replace(at, state=s)) for p, s in zip(self.parts, at.state, strict=True)]

    def embed(self, x, pos):
        for p in self.parts:
            x = p.embed(x, pos)
        return x

    def state(self, x, pos, total_len=None):
        return [p.state(x, pos, total_len) for p in self.parts]
    def restate(self, x, pos, state):
        return [p.restate(x, pos, s) for p, s in zip(self.parts, state)]
    def penalty(self):
        return sum(p.penalty() for p in self.parts)

    def qk(self, q, k, at):
        for p, here in sorted(self.each(at), key=lambda pair: pair[0].order):
            q, k = p.qk(q, k, here)                     # rotate, append features, scale
        return q, k

    def bias(self, at):
        biases = [p.bias(here) for p, here in self.each(at)]
        biases = [b[..., -at.t.shape[-1]:, :] for b in biases if b is not None]     # the last Tq
        return sum(biases) if biases else None

    def value(self, v, at):
        for p, here in self.each(at):
            v = p.value(v, here)
        return v

    def out(self, y, at):
        for p, here in reversed(self.each(at)):         # the part that widened v last comes first
            y = p.out(y, here)
        return y


class SomeHeads(Encoding):
    """rope_heads=k: the first k heads have the encoding; the others have NoPE, with their outputs
    padded with zeros to the same width."""
    def __init__(self, cfg, first, rest):
        super().__init__(cfg)
        self.parts = nn.ModuleList([first])
        self.k, self.rest, self.out_dim = first.cfg.heads, rest, first.out_dim
        self.shift_invariant = first.shift_invariant
        self.embed, self.state = first.embed, first.state
        self.restate, self.penalty = first.restate, first.penalty

    def join(self, first, rest):    # [B, k, Tq, wide], [B, H - k, Tq, D] -> [B, H, Tq, wide]
        return torch.cat([first, F.pad(rest, (0, first.shape[-1] - rest.shape[-1]))], dim=1)

    def both(self, method, tensors, *given):    # apply each encoding's method to its heads
        return self.join(
            getattr(self.parts[0], method)(*(z[:, :self.k] for z in tensors), *given),
            getattr(self.rest, method)(*(z[:, self.k:] for z in tensors), *given))

    def attend(self, q, k, v, pos, state=None, x=None):
        return self.both('attend', (q, k, v), pos, state, x)
    def logits(self, q, k, pos, state=None, x=None):
        return self.both('logits', (q, k), pos, state, x)
    def weigh(self, logits):
        return self.both('weigh', (logits,))
    def mix(self, weights, v, pos, state=None, x=None):
        return self.both('mix', (weights, v), pos, state, x)


def build(cfg):
    """Return the encodings of cfg.pe, one per layer. Raise UserError if options do not fit."""
    names = cfg.pe.split('+')
    for name in names:
        check_name('encoding', name, ENCODINGS)
    need(cfg.attention == 'mha' or cfg.pe in ('rope', 'nope'),
         f'attention=mla requires pe=rope or nope, got {cfg.pe}')
    need(not cfg.rope_heads or hooks_of(cfg.pe) != ['embed'], 'rope_heads requires an encoding of '
         f'attention; {cfg.pe} acts on the embedding, which all heads share')
    heads = cfg.rope_heads or cfg.heads                     # number of heads with the encoding
    rest = copy.copy(cfg)
    rest.heads = cfg.heads - heads                          # number of heads with NoPE
    latent = cfg.attention == 'mla' and cfg.pe == 'rope'
    classes = [LatentRoPE] if latent else [ENCODINGS[name] for name in names]
    shared = {}                                             # {class: instance for all layers}
    layers = []
    for layer in range(cfg.n_layer):
        here = copy.copy(cfg)
        here.layer, here.heads = layer, heads
        parts = [shared.get(cls) or cls(here) for cls in classes]
        shared |= {type(part): part for part in parts if part.shared}
        enc = parts[0] if len(parts) == 1 else Sum(here, *parts)
        layers.append(SomeHeads(cfg, enc, NoPE(rest)) if rest.heads else enc)
    return layers


def param_groups(model, lr, others=()):
    """Return the parameter groups `others` of an optimizer without the parameters of the encodings
    in `model`, and then groups of these: no weight decay, and the settings of Encoding.own, such as
    the learning rate of PRISM's alpha (`lr` for the rest) or the range to clamp() PoPE's delta."""
    own, groups = {}, {}                                    # {parameter: (group's name, settings)}
    for enc in model.modules():                             # a sum comes before its parts
        if isinstance(enc, Encoding):
            own |= {p: ('encoding', {}) for p in enc.parameters() if p not in own}
            named = {name: getattr(enc, name) for name in enc.own}      # None: not in use
            own |= {p: (name, enc.own[name]) for name, p in named.items() if p is not None}
    for p, (name, settings) in own.items():
        new = dict(params=[], name=name, lr=lr, weight_decay=0.0) | settings
        groups.setdefault(name, new)['params'].append(p)
    rest = [g | dict(params=[p for p in g['params'] if p not in own]) for g in others]
    return [g for g in (*rest, *groups.values()) if g['params']]


@torch.no_grad()
def clamp(optimizer):
    """Clamp the parameters of each group that has `clamp`, (lowest, highest). Call it after every
    step of the optimizer."""
    for group in optimizer.param_groups:
        if 'clamp' in group:
            for p in group['params']:
                p.clamp_(*group['clamp'])


# ---- python pe.py --------------------------------------------------------------------------------

HOOKS = 'embed', 'state', 'restate', 'penalty', 'qk', 'bias', 'weigh', 'value', 'out'


def hooks_of(names):
    """Return the hooks that an encoding, or any part of a sum 'a+b', overrides."""
    return [hook for hook in HOOKS
            if any(changed(ENCODINGS[name], hook) for name in names.split('+'))]


def print_encodings():
    """Print each encoding: equation, options, parameters (for 4 heads of width 16), hooks."""
    for name, cls in ENCODINGS.items():
        enc = cls(PEConfig(pe=name, n_head=4))
        equation = ' '.join((cls.__doc__ or 'no docstring').split('\n\n')[0].split())
        options = [f'{key}={value}' for key, (_, value) in options_of(cls).items()]
        params = [f'{n} {list(p.shape)}' for n, p in enc.named_parameters()]
        print(f'{name}\n    {equation}\n    options: {", ".join(options) or "none"}')
        print(f'    parameters: {", ".join(params) or "none"}')
        print(f'    hooks: {", ".join(hooks_of(name)) or "none"}\n')
    print("join them with +, as in pe='ape+rope' or 'pope+vipe'")


if __name__ == '__main__':
    if hasattr(signal, 'SIGPIPE'):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)           # python pe.py | head
    if sys.argv[1:] == ['vectors']:
        from assets.vectors import write
        write()
    else:
        print(__doc__) if sys.argv[1:] else print_encodings()
