"""Every positional encoding, one small class each.

An encoding changes only what enters or leaves causal scaled dot-product attention. For a query at t and keys at s <= t,

    logits_ts = row_t col_s <q'_t, k'_s> / sqrt(d) + bias_ts        hooks: qk, rescale, bias (by_distance)
    y_t       = out_t(sum_s softmax_s(logits_ts) value_s(v_s))      hooks: value, out

and embed() acts on the token embeddings before layer 1. A class overrides the one or two hooks that it needs. To add an encoding,
write the class and name it in ENCODINGS: then it can be trained, tested and probed like the rest.

    python pe.py                 prints the zoo: equation, parameters, which hooks each one changes
    python pe.py zoo.png         draws it
"""
import contextlib
import copy
import difflib
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels


@dataclass
class PEConfig:
    """What an encoding may read; model.ModelConfig adds the rest. Derived: `heads` and `head_dim`, of the real attention heads."""
    pe: str = 'rope'               # positional encoding, or several joined by '+' (ape+rope): `python pe.py` lists them
    rope_heads: int = None         # what acts in attention acts on the first k heads only, the rest are NoPE; None: on all
    attention: str = 'mha'         # mha | mla (keys and values from a compressed vector; half of each head is NoPE)
    d_model: int = 64              # width of the residual stream
    n_head: int = 1                # attention heads; mla makes n_head / 2 real heads, each a NoPE half and an encoded half
    train_len: int = 128           # longest total length trained on, in tokens (train.py sets it from the task)
    eval_len: int = 0              # longest total length evaluated, for vipe_s='global' (train.py sets it)
    max_len: int = 1024            # rows of the learned and random tables; positions beyond take the last row
    max_shift: int = 512           # shifted_ape: largest random offset in training
    rope_base: float = 10000.0     # theta, the base wavelength of every sinusoid and rotation
    yarn_beta_fast: float = 32.0   # yarn: features that turn more often than this over train_len are left alone
    yarn_beta_slow: float = 1.0    # yarn: features that turn less often than this are fully interpolated
    t5_buckets: int = 32           # t5: number of distance buckets
    t5_max_distance: int = 128     # t5: distances from here on share the last bucket
    fire_width: int = 32           # fire: hidden width of the MLP
    vipe_value: bool = True        # vipe: the value-side distance code
    vipe_logn: bool = True         # vipe: log(n) in the logit scale
    vipe_u: bool = True            # vipe: 1 + <u, k> in the logit scale
    vipe_s: str = 'length'         # vipe: s = length (of the sequence at hand / train_len) | global (eval_len / train_len) | one
    vipe_g: str = 's'              # vipe: s in the logit scale as s | as | as+b | rational (eq. 50), a, b, r learned
    vipe_d_p: int = 0              # vipe: width of the distance code per head; 0: the head dimension
    pope_softplus: bool = True     # pope: magnitudes softplus(q), softplus(k); False: q, k themselves
    pope_frequencies: str = 'all'  # pope: a frequency for each of the d features | half: as many as RoPE, d/2, each for two features
    pope_delta: str = 'zero'       # pope: phase bias delta starts at zero | uniform on [-2 pi, 0] | none (no bias)
    n_layer: int = 2               # blocks
    prism_layers: list = (1,)      # prism: a PRISM layer, with cursors for the layers from there on, before each of these
    prism_cursors: int = 2         # prism: query cursors, and key cursors, of each head
    prism_d_pe: int = 32           # prism: width of the sinusoids that a cursor's histogram superposes
    prism_hidden: int = 100        # prism: hidden state of the GRU that opens the gates
    prism_input: float = 0.5       # prism: size of the content that the GRU reads; larger learns faster, but sooner mistakes symbols for places
    prism_recurrent: str = 'free'  # prism: the GRU's W_h is free | orthogonal (parametrization) | penalty (1e-3 |W'W - 1|^2) | norm (learned)
    prism_reset: bool = True       # prism: cursors can go back to 0; False: that gate stays shut
    prism_superpose: bool = True   # prism: a cursor's encoding is the mean of the offsets' sinusoids (Algorithm 2); False: the sinusoid of the mean offset
    prism_sharpen: bool = True     # prism: power-sharpening of the histograms, gamma > 1 learned
    prism_copy: str = 'none'       # prism: one of five query cursors can jump to a past token; its key cursor is fixed | trained; or none
    prism_absolute: bool = False   # prism: the absolute position as one more cursor (Algorithm 3)
    prism_norm: str = 'none'       # prism: encodings as they are, or Algorithm 3's scale (one for all) | unit (each token's, to length sqrt(d_pe))
    prism_alpha_lr: float = 0.03   # prism: peak learning rate of alpha, the weights of the cursors (betas 0.8, 0.92)
    kernel: str = 'auto'           # pope, vipe, alibi, t5, prism's scan by kernels.py: auto (on CUDA where it pays) | triton (always) | reference (never)

    def __post_init__(self):
        for key in ('d_model', 'n_head', 'n_layer', 'train_len', 'max_len', 't5_buckets', 't5_max_distance', 'fire_width', 'yarn_beta_fast',
                    'yarn_beta_slow', 'prism_cursors', 'prism_d_pe', 'prism_hidden', 'prism_input', 'prism_alpha_lr'):
            if getattr(self, key) <= 0:
                raise ValueError(f'{key} must be positive, not {getattr(self, key)}')
        if self.rope_base <= 1:
            raise ValueError(f'rope_base must be above 1, not {self.rope_base}')
        for key in ('eval_len', 'max_shift', 'vipe_d_p'):
            if getattr(self, key) < 0:
                raise ValueError(f'{key} must not be negative, it is {getattr(self, key)}')
        for key, known in dict(attention=('mha', 'mla'), vipe_s=('length', 'global', 'one'), vipe_g=('s', 'as', 'as+b', 'rational'),
                               pope_delta=('zero', 'uniform', 'none'), pope_frequencies=('all', 'half'), kernel=('auto', 'triton', 'reference'),
                               prism_recurrent=('free', 'orthogonal', 'penalty', 'norm'), prism_copy=('none', 'fixed', 'trained'),
                               prism_norm=('none', 'scale', 'unit')).items():
            if getattr(self, key) not in known:
                raise ValueError(f'{key} must be one of {", ".join(known)}, not {getattr(self, key)!r}')
        layers = self.prism_layers = list(self.prism_layers)
        if not layers or layers[0] != 1 or any(type(x) is not int for x in layers) or layers != sorted(set(layers)) or layers[-1] > self.n_layer:
            raise ValueError(f'prism_layers must be layers in order, from 1 to n_layer={self.n_layer}, the first of them 1; it is {layers}')
        if self.kernel == 'triton' and kernels.triton is None:
            raise ValueError('kernel=triton needs Triton, which is for Linux: pip install triton, or take kernel=auto')
        if self.d_model % self.n_head:
            raise ValueError(f'd_model={self.d_model} is not divisible by n_head={self.n_head}')
        self.heads = self.n_head
        if self.attention == 'mla':
            if self.n_head % 2:
                raise ValueError(f'mla pairs its heads: n_head must be even, not {self.n_head}')
            self.heads = self.n_head // 2
        self.head_dim = self.d_model // self.heads
        if self.rope_heads is not None and not 1 <= self.rope_heads <= self.heads:
            raise ValueError(f"rope_heads must be from 1 to the {self.heads} heads, not {self.rope_heads}; for none take pe='nope'")


# ---------------------------------------------------------------------------------------------------------------------
# the hooks

class Encoding(nn.Module):
    """No encoding at all, and the base of every other: override the hooks that you need.

    Shapes: x [B, T, C]; q, k, v [B, H, T, D]; pos [T], integers from 0. `state` is what state() returned for the sequence.
    """
    shared = False            # True: one instance serves all layers; False: each layer has its own
    shift_invariant = False   # True: adding a constant to pos changes no logit and no output
    fp32 = False              # True: attention must not run in half precision
    widens = False            # True: qk() appends features of its own to q and k, so it comes last in a sum
    distance = False          # True: out() also gets the expected distance sum_s alpha_ts (t - s), as the last channel of y
    kernel = None             # True: kernels.attention computes it faster; False: it cannot; None: as good as without

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.out_dim = cfg.head_dim          # width per head that out() returns
        self.scale = cfg.head_dim ** -0.5    # softmax scale, whatever width qk() returns

    def for_layer(self):
        """The instance for a further layer. The first layer's also does what happens once per model: embed and state."""
        return self if self.shared else type(self)(self.cfg)

    def embed(self, x, pos):                            # [B, T, C] -> [B, T, C], before layer 1
        return x

    def state(self, x, pos, total_len=None):            # anything, once per sequence; total_len: its known final length
        return None

    def restate(self, x, pos, state):                   # the state from this layer on, given the residual stream before it
        return state

    def penalty(self):                                  # -> added to the training loss
        return 0.0

    def qk(self, q, k, pos, state=None):                # -> q', k' [B, H, T, any]
        return q, k

    def rescale(self, q, k, pos, state=None):           # -> None, or (row, col) [.., T, 1]: logits times row_t col_s
        return None

    def phases(self):                                   # -> None, or delta [H, D] where qk() is PoPE's
        return None

    def bias(self, pos, state=None):                    # -> None, or [H, T, T] added to the logits
        return self.by_distance(distance(pos))

    def by_distance(self, d):                           # -> None, or the bias [H, ..] of the distances t - s in d [..]
        return None

    def value(self, v, pos, state=None):                # -> [B, H, T, any], before the average
        return v

    def out(self, y, pos, state=None):                  # -> [B, H, T, out_dim], after it
        return y

    def scaled_qk(self, q, k, pos, state=None):
        """q' and k' with the rescaling, computed from the raw q and k, folded in."""
        factors = self.rescale(q, k, pos, state)
        q, k = self.qk(q, k, pos, state)
        return (q, k) if factors is None else (q * factors[0], k * factors[1])

    def logits(self, q, k, pos, state=None):
        """Attention logits [B, H, T, T], -inf above the diagonal: what the softmax sees, for probes."""
        q, k = self.scaled_qk(q, k, pos, state)
        logits = q @ k.transpose(-2, -1) * self.scale
        bias = self.bias(pos, state)
        return logits + causal(logits) if bias is None else logits + bias + causal(logits)

    def mix(self, weights, v, pos, state=None):
        """Attention's output [B, H, T, out_dim] from its weights [B, H, T, T], for probes."""
        y = weights @ self.counted(self.value(v, pos, state), pos)
        return self.out(self.expected(y, pos), pos, state)

    def attend(self, q, k, v, pos, state=None):
        """mix(softmax(logits), v) without keeping the logits. pos counts up by 1: the kernels see it so (a probe that moves positions
        takes kernel='reference').
        """
        if self.kernel and kernels_serve(self.cfg, q):
            with in_full_precision(q):
                y = self.by_kernels(q, k, self.value(v, pos, state), pos, state)
                return self.out(y, pos, state)
        if self.fp32 and torch.is_autocast_enabled(q.device.type):
            with in_full_precision(q):
                return self.attend(q.float(), k.float(), v.float(), pos, state)
        v = self.value(v, pos, state)
        q, k = self.scaled_qk(q, k, pos, state)
        bias = self.bias(pos, state)
        mask = None if bias is None else (bias + causal(bias)).to(q.dtype).contiguous()[None]           # (1, H, T, T)
        v = self.counted(v, pos)
        q, k, v_ = pad_to_one_width(q, k, v)                                            # fused attention wants one width
        y = fused_attention(q, k, v_, mask, self.scale)[..., :v.shape[-1]]
        return self.out(self.expected(y, pos), pos, state)

    def by_kernels(self, q, k, v, pos, state):
        """The average y by kernels.attention: nothing wider than q, k, v and no mask reaches memory; factors, bias and distance in float32."""
        factors, delta, bias, call = self.rescale(q.float(), k.float(), pos, state), self.phases(), self.by_distance(pos - pos[:1]), {}
        if factors is not None:
            row, col = (f.squeeze(-1) for f in factors)
            call |= dict(row=row.expand(1, *q.shape[1:3]), col=col.expand(q.shape[:3]))
        if delta is not None:
            call |= dict(delta=delta[None], base=self.cfg.rope_base, softplus=self.cfg.pope_softplus)
        else:
            q, k = self.qk(q, k, pos, state)
        y, e = kernels.attention(q, k, v, **call, bias=None if bias is None else bias[None], distance=self.distance)
        return torch.cat([y.float(), e[..., None]], dim=-1) if self.distance else y

    def counted(self, v, pos):
        """v, and where out() asks for the expected distance, the number of the key as one more channel."""
        return torch.cat([v, pos.to(v.dtype)[:, None].expand(*v.shape[:-1], 1)], dim=-1) if self.distance else v

    def expected(self, y, pos):
        """y, with the average key number sum_s alpha_ts s in its last channel turned into the expected distance t - sum_s alpha_ts s."""
        return torch.cat([y[..., :-1], pos.to(y.dtype)[:, None] - y[..., -1:]], dim=-1) if self.distance else y


def in_full_precision(x):
    """A context without autocast on x's device."""
    return torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else contextlib.nullcontext()


def kernels_serve(cfg, q):
    """Whether kernels.py computes attention: as cfg.kernel says, or on CUDA in half precision from 512 tokens on, where memory begins to count."""
    auto = q.is_cuda and q.shape[2] >= 512 and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 128 and kernels.triton is not None
    return cfg.kernel == 'triton' or cfg.kernel == 'auto' and auto


def fused_attention(q, k, v, mask, scale):
    """Causal attention [B, H, T, D] with an optional additive mask [1, H, T, T], by PyTorch's fused kernels."""
    if torch._C._functorch.is_batchedtensor(q):                                         # many seeds at once, under vmap
        return seeds_attention(q, k, v, mask, scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)


@torch.library.custom_op('nanope::seeds_attention', mutates_args=())
def seeds_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """fused_attention under vmap, which has no rule for it: the rule below folds the seeds into the batch or the heads."""
    raise NotImplementedError('seeds_attention exists for its vmap rule only')


@seeds_attention.register_vmap
def fold_seeds(info, in_dims, q, k, v, mask, scale):
    """q, k, v with a seed axis at in_dims -> (attention with a seed axis, where that is)."""
    S = info.batch_size
    q, k, v = (x.movedim(d, 0) if d is not None else x.expand(S, *x.shape) for x, d in zip((q, k, v), in_dims))
    if mask is not None and in_dims[3] is not None:                                     # a mask per seed: fold the seeds into the heads
        B, H = q.shape[1:3]
        q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
        y = fused_attention(q, k, v, mask.movedim(in_dims[3], 1).flatten(1, 2), scale)  # mask [1, S, H, T, T]
        return y.unflatten(1, (S, H)), 1
    y = fused_attention(*(x.flatten(0, 1) for x in (q, k, v)), mask, scale)             # into the batch
    return y.unflatten(0, (S, -1)), 0


def causal(like):
    """[T, T]: 0 where s <= t, -inf above the diagonal; T and the dtype as in `like` [.., T, T]."""
    return torch.full(like.shape[-2:], float('-inf'), dtype=like.dtype, device=like.device).triu(1)


def pad_to_one_width(*xs):
    """Zeros behind the last features of all but the widest, which change neither a dot product nor the first features of an average."""
    width = max(x.shape[-1] for x in xs)
    if xs[0].is_cuda and any(x.shape[-1] < width for x in xs):
        width += -width % 8                                                             # which its fused kernels want there
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in xs]


def frequencies(n, base, like):
    """theta_c = base^(-c/n), c = 0..n-1 [n], in float32 (float64 for a float64 model: angles in half precision are noise)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return base ** (-torch.arange(n, device=like.device, dtype=dtype) / n)


def sinusoids(pos, width, base, like):
    """f(z)[2c] = sin(z theta_c), f(z)[2c+1] = cos(z theta_c), theta_c = base^(-2c/width), of every z in pos: [.., width]."""
    angle = pos[..., None] * frequencies(width // 2, base, like)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def rotate(x, angle):
    """Rotate the pair (x_2c, x_2c+1) by angle[:, c], as complex numbers x_c e^(i angle_c): x [B, H, T, D], angle [T, D/2]."""
    pairs = torch.view_as_complex(x.to(angle.dtype).reshape(*x.shape[:-1], -1, 2))      # (B, H, T, D/2)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)


def distance(pos):
    """t - s [T, T], 0 above the diagonal, where the causal mask hides it."""
    return (pos[:, None] - pos[None, :]).clamp(min=0)


def length_ratio(cfg, pos, total_len):
    """max(1, T / train_len): how much longer the whole sequence is than any trained on."""
    return max(1.0, (total_len or pos.shape[0]) / cfg.train_len)


def even(n, name, what):
    """ValueError if n is odd."""
    if n % 2:
        raise ValueError(f'{name} rotates pairs of features: {what} must be even, not {n}')


# ---------------------------------------------------------------------------------------------------------------------
# added to the embeddings

class NoPE(Encoding):
    """No encoding: logit_ts = <q_t, k_s> / sqrt(d); order is seen through the causal mask alone (Haviv et al. 2022)."""
    shift_invariant = True


class APE(Encoding):
    """Sinusoids (Vaswani et al. 2017): x_t += p_t, p_t[2c] = sin(t theta_c), p_t[2c+1] = cos(t theta_c), theta_c = base^(-2c/C).

    Added once, to the embeddings; no parameters; defined at every position, trained only at those seen.
    """
    shared = True

    def __init__(self, cfg):
        super().__init__(cfg)
        even(cfg.d_model, 'ape', 'd_model')

    def embed(self, x, pos):
        return x + sinusoids(pos, x.shape[-1], self.cfg.rope_base, x).to(x.dtype)       # pos [T], or [B, T] where they differ


class ShiftedAPE(APE):
    """Randomly shifted sinusoids (Kiyono et al. 2021; PRISM's baseline): x_t += p_(t+m), m ~ U{0..max_shift} per sequence in training.

    m = 0 in evaluation. Positions up to max_shift beyond the training length are trained, their large distances never. The shifts are a
    Weyl sequence (multiples of 2^64 over the golden ratio, from a random start), so that they follow from the model's own state.
    """
    def __init__(self, cfg):
        super().__init__(cfg)
        self.register_buffer('start', torch.randint(2 ** 62, ()))
        self.register_buffer('used', torch.zeros((), dtype=torch.int64))

    def embed(self, x, pos):
        if self.training:
            m = self.start + (self.used + torch.arange(x.shape[0], device=x.device)) * -7046029254386353131     # wraps around
            self.used += x.shape[0]
            pos = pos + (m >> 33).remainder(self.cfg.max_shift + 1)[:, None]            # (B, T)
        return super().embed(x, pos)


class Learned(Encoding):
    """A learned vector per position (GPT-2; "Base" in ViPE): x_t += P[t], P [max_len, C] learned, started at N(0, 0.02^2).

    Positions from max_len on use the last row.
    """
    shared = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Parameter(torch.randn(cfg.max_len, cfg.d_model) * 0.02)

    def embed(self, x, pos):
        return x + F.embedding(pos.clamp(max=self.cfg.max_len - 1), self.table).to(x.dtype)


class Random(Encoding):
    """A fixed random vector per position (the Toeplitz study's "random"): x_t += P[t], entries N(0, 1/2), the norm of a sinusoid.

    That they are fixed, and that large, is ours. Positions from max_len on use the last row.
    """
    shared = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.register_buffer('table', torch.randn(cfg.max_len, cfg.d_model) * 0.5 ** 0.5)

    def embed(self, x, pos):
        return x + F.embedding(pos.clamp(max=self.cfg.max_len - 1), self.table).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# queries and keys

class RoPE(Encoding):
    """Rotary embedding (Su et al. 2024): logit_ts = q_t^T R_(s-t) k_s / sqrt(d), R_m rotating pair c by m theta_c, theta_c = base^(-2c/d).

    PoPE eq. 1. Changes q and k; no parameters. D must be even.
    """
    shift_invariant = True

    def __init__(self, cfg):
        super().__init__(cfg)
        even(cfg.head_dim, 'rope', 'the head dimension')

    def qk(self, q, k, pos, state=None):
        angle = pos[:, None] * frequencies(q.shape[-1] // 2, self.cfg.rope_base, q)     # (T, D/2)
        return rotate(q, angle), rotate(k, angle)


class YaRN(RoPE):
    """YaRN (Peng et al. 2023): RoPE with theta_c -> (1 - w_c) theta_c + w_c theta_c / s and logits times (0.1 ln s + 1)^2.

    s = max(1, T / train_len) for the sequence at hand, so training is plain RoPE. The ramp w_c goes from 0 for features that turn
    more than beta_fast times over train_len to 1 for those below beta_slow turns, linearly in c (NTK-by-parts, as in the authors' code).
    No parameters; not prefix-consistent: give the model `total_len`.
    """
    def state(self, x, pos, total_len=None):
        return length_ratio(self.cfg, pos, total_len)

    def scaled_frequencies(self, s, q):
        d, cfg = q.shape[-1], self.cfg
        feature = lambda turns: d * math.log(cfg.train_len / (2 * math.pi * turns)) / (2 * math.log(cfg.rope_base))
        low = max(math.floor(feature(cfg.yarn_beta_fast)), 0)
        high = min(math.ceil(feature(cfg.yarn_beta_slow)), d - 1)
        theta = frequencies(d // 2, cfg.rope_base, q)
        w = ((torch.arange(d // 2, device=q.device, dtype=theta.dtype) - low) / max(high - low, 0.001)).clamp(0, 1)
        return (1 - w) * theta + w * theta / s

    def qk(self, q, k, pos, state=None):
        s = self.state(None, pos) if state is None else state
        angle = pos[:, None] * self.scaled_frequencies(s, q)                            # (T, D/2)
        temperature = 0.1 * math.log(s) + 1
        return rotate(q, angle) * temperature, rotate(k, angle) * temperature


class PoPE(Encoding):
    """Polar coordinates (PoPE eq. 3-6): logit_ts = sum_c mu(q_t)_c mu(k_s)_c cos((s - t) theta_c + delta_c) / sqrt(d), theta_c = base^(-c/d).

    mu = softplus; d frequencies where RoPE has d/2 (pope_frequencies='half': theta_c = base^(-2 floor(c/2)/d), RoPE's, each for two features); delta
    [H, D] learned, held in [-2 pi, 0] (the gradient passes the clamp, so a phase at the bound can come back). In Cartesian form (eq. 7-10)
    q' = mu [cos, sin](t theta), k' = mu [cos, sin](s theta + delta), 2D wide.
    """
    shift_invariant = True
    kernel = True

    def __init__(self, cfg):
        super().__init__(cfg)
        if cfg.pope_frequencies == 'half':
            even(cfg.head_dim, 'pope with half the frequencies', 'the head dimension')
            self.kernel = False
        delta = torch.zeros(cfg.heads, cfg.head_dim)
        if cfg.pope_delta == 'none':
            self.register_buffer('delta', delta, persistent=False)
        else:
            self.delta = nn.Parameter(delta.uniform_(-2 * math.pi, 0) if cfg.pope_delta == 'uniform' else delta)

    def theta(self, like):                                                                      # (D,)
        if self.cfg.pope_frequencies == 'half':
            return frequencies(self.cfg.head_dim // 2, self.cfg.rope_base, like).repeat_interleave(2)
        return frequencies(self.cfg.head_dim, self.cfg.rope_base, like)

    def phases(self):
        return self.delta + (self.delta.clamp(-2 * math.pi, 0) - self.delta).detach()

    def qk(self, q, k, pos, state=None):
        mu_q, mu_k = (F.softplus(q), F.softplus(k)) if self.cfg.pope_softplus else (q, k)
        phase_q = pos[:, None] * self.theta(q)                                                  # (T, D)
        phase_k = phase_q + self.phases()[:, None]                                              # (H, T, D)
        return (torch.cat([mu_q * phase_q.cos(), mu_q * phase_q.sin()], dim=-1).to(q.dtype),
                torch.cat([mu_k * phase_k.cos(), mu_k * phase_k.sin()], dim=-1).to(k.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# an additive bias on the logits

class ALiBi(Encoding):
    """Linear bias (Press et al. 2022): logit_ts = <q_t, k_s> / sqrt(d) - m_h (t - s), slopes m_h = 2^(-8h/H), h = 1..H.

    Where H is no power of two: the slopes of the power of two below it, then every second one of the next power. No parameters.
    """
    shift_invariant = True
    kernel = True

    def __init__(self, cfg):
        super().__init__(cfg)
        n = 2 ** int(math.log2(cfg.heads))
        slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)] + [2 ** (-4 * h / n) for h in range(1, 2 * (cfg.heads - n), 2)]
        self.register_buffer('slope', torch.tensor(slopes), persistent=False)           # (H,)

    def by_distance(self, d):
        return -self.slope.view(-1, *[1] * d.dim()) * d


class T5(Encoding):
    """T5's relative bias (Raffel et al. 2020): logit_ts = <q_t, k_s> / sqrt(d) + b_h[bucket(t - s)], b [buckets, H] shared by all layers.

    Distances below buckets/2 have a bucket each; the rest share the other half, log-spaced up to t5_max_distance. (T5 itself has no 1/sqrt(d).)
    """
    shared = True
    shift_invariant = True
    kernel = True

    def __init__(self, cfg):
        super().__init__(cfg)
        if cfg.t5_buckets < 2 or cfg.t5_max_distance <= cfg.t5_buckets // 2:
            raise ValueError('t5 needs t5_buckets >= 2 and t5_max_distance > t5_buckets / 2')
        self.table = nn.Parameter(torch.zeros(cfg.t5_buckets, cfg.heads))

    def bucket(self, d):                                                                # distances [..] -> [..]
        n, exact = self.cfg.t5_buckets, self.cfg.t5_buckets // 2
        log = torch.log(d.clamp(min=1) / exact) / math.log(self.cfg.t5_max_distance / exact)        # 0 at exact, 1 at max_distance
        return torch.where(d < exact, d, (exact + (log * (n - exact)).long()).clamp(max=n - 1))

    def by_distance(self, d):
        return F.embedding(self.bucket(d), self.table).movedim(-1, 0)                   # (.., H) -> (H, ..)


class FIRE(Encoding):
    """Functional interpolation (Li et al. 2023): logit_ts = <q_t, k_s> / sqrt(d) + f(psi(t - s) / psi(max(t, L))), psi(x) = log(c x + 1).

    f: MLP 1 -> fire_width -> H with ReLU; c (from 0.1) and the threshold L (from train_len / 4) are learned; all per layer.
    The bias depends on t too, so PyTorch's attention gets it as an [H, T, T] mask.
    """
    kernel = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mlp = nn.Sequential(nn.Linear(1, cfg.fire_width), nn.ReLU(), nn.Linear(cfg.fire_width, cfg.heads))
        self.c = nn.Parameter(torch.tensor(0.1))
        self.L = nn.Parameter(torch.tensor(1.0))                                        # in units of train_len / 4

    def bias(self, pos, state=None):
        psi = lambda x: torch.log(self.c.abs() * x + 1)
        threshold = (self.L * max(1.0, self.cfg.train_len / 4)).abs()
        x = psi(distance(pos)) / (psi(torch.maximum(pos.to(threshold.dtype), threshold))[:, None] + 1e-6)     # (T, T)
        return self.mlp(x[..., None]).permute(2, 0, 1)                                  # (H, T, T)


# ---------------------------------------------------------------------------------------------------------------------
# values

class VRoPE(Encoding):
    """Rotated values: y_t = R_t^T sum_s alpha_ts R_s v_s, so v_s arrives rotated by its distance s - t (ViPE B.1, in words). No parameters."""
    shift_invariant = True

    def __init__(self, cfg):
        super().__init__(cfg)
        even(cfg.head_dim, 'vrope', 'the head dimension')

    def turn(self, v, pos):
        d = self.cfg.head_dim                                                           # other encodings' channels stay
        angle = pos[:, None] * frequencies(d // 2, self.cfg.rope_base, v)               # (T, D/2)
        return torch.cat([rotate(v[..., :d].contiguous(), angle), v[..., d:]], dim=-1)

    def value(self, v, pos, state=None):
        return self.turn(v, pos)

    def out(self, y, pos, state=None):
        return self.turn(y, -pos)


class ViPE(Encoding):
    """ViPE (eq. 7-9): logit_ni = g(s) log(n) (1 + <u, k_i>) <q_n, k_i> / sqrt(d),  z_n = [sum_i alpha_ni v_i ; W_p E_alpha[n - i] / s + b_p].

    n counts from 1; s = max(1, T / train_len) for the sequence at hand. The code p_(n-i) is linear in the distance, so its average needs
    one extra value channel: E_alpha[n - i] = n - sum_i alpha_ni i. u, W_p, b_p per head and layer; u and b_p start at 0.
    The output is head_dim + d_p wide. Not prefix-consistent: give the model `total_len`. Every part has its switch (vipe_*).
    """
    fp32 = True
    kernel = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.shift_invariant = not cfg.vipe_logn
        if cfg.vipe_u:
            self.u = nn.Parameter(torch.zeros(cfg.heads, cfg.head_dim))
        self.distance = cfg.vipe_value
        if cfg.vipe_value:
            d_p = cfg.vipe_d_p or cfg.head_dim
            self.W_p = nn.Parameter(torch.randn(cfg.heads, 1, d_p) * 0.02)
            self.b_p = nn.Parameter(torch.zeros(cfg.heads, 1, d_p))
            self.out_dim = cfg.head_dim + d_p
        start = {'s': [], 'as': [1.0], 'as+b': [1.0, 0.0], 'rational': [0.1]}[cfg.vipe_g]       # a | a, b | r
        self.g_param = nn.Parameter(torch.tensor(start)) if start else None

    def state(self, x, pos, total_len=None):
        if self.cfg.vipe_s == 'global' and not self.training:
            return max(1.0, self.cfg.eval_len / self.cfg.train_len)
        return length_ratio(self.cfg, pos, total_len) if self.cfg.vipe_s == 'length' else 1.0

    def g(self, s):
        """The logit scale for the ratio s: s itself, C.3.2's as + b or eq. 50, or (ours) as, with learned a, b, r."""
        if self.cfg.vipe_g == 's':
            return s
        if self.cfg.vipe_g == 'rational':
            r = self.g_param[0]
            return (1 + r) * (s - r + r ** 2 / s)
        return self.g_param[0] * s + (self.g_param[1] if self.cfg.vipe_g == 'as+b' else 0)

    def rescale(self, q, k, pos, state=None):
        s = self.state(None, pos) if state is None else state
        n = (pos + 1).to(q.dtype)[:, None]                                              # (T, 1)
        row = self.g(s) * (n.log() if self.cfg.vipe_logn else torch.ones_like(n))
        col = 1 + k @ self.u[..., None] if self.cfg.vipe_u else torch.ones_like(n)      # (B, H, T, 1)
        return row, col

    def out(self, y, pos, state=None):
        if not self.cfg.vipe_value:
            return y
        s = self.state(None, pos) if state is None else state
        return torch.cat([y[..., :-1], y[..., -1:] / s * self.W_p + self.b_p], dim=-1)  # (B, H, T, D + d_p)


# ---------------------------------------------------------------------------------------------------------------------
# positions that the content decides

class Orthogonal(nn.Module):
    """torch.nn.utils.parametrizations.orthogonal, for W [n, k], n >= k, without cuSOLVER, which a CUDA graph may not record.

    W = base H_1 .. H_k cut to k columns, H_i = 1 - 2 v_i v_i^T / |v_i|^2, v_i the i-th column of V: X below its diagonal, 1 on it. In one piece:
    H_1 .. H_k = 1 - V S^-1 V^T, S the upper triangle of V^T V with half its diagonal. In float64, which neither autocast nor tf32 shortens.
    """
    def forward(self, X):                                                               # (n, k)
        I = torch.eye(*X.shape, device=X.device, dtype=torch.float64)
        V = X.double().tril(-1) + I
        S = V.T @ V
        S = S.triu(1) + S.tril().triu() / 2
        H = I - V @ torch.linalg.solve_triangular(S, V[:X.shape[1]].T, upper=True)
        return self.base @ -H.to(X.dtype)                                               # X = 0 makes H = -1

    def right_inverse(self, W):
        Q, R = torch.linalg.qr(torch.cat([W, torch.randn(W.shape[0], W.shape[0] - W.shape[1])], dim=1))
        self.register_buffer('base', Q * R.diagonal().sign())                           # W and columns that complete it
        return torch.zeros_like(W)


class Cursors(nn.Module):
    """A PRISM layer: a GRU reads the content x_t and opens gates that move cursors, each of them a histogram over offsets.

    gates_t = W h_t,  h_t = GRU(prism_input norm(x_t), h_(t-1));  p_reset = sigmoid, (p_incr, p_decr, p_keep) = softmax. Algorithm 1, which moves the
    histograms by them, and Algorithm 2, which superposes e_t = sum_d h_t[d] f(d), f the sinusoids, are kernels.cursor_scan_reference, on a GPU
    kernels.cursor_scan. With prism_copy, every fifth query cursor may also jump to the place of a past token (5.0.3).
    """
    def __init__(self, cfg, layers):
        super().__init__()
        self.cfg, self.layers, self.count = cfg, layers, layers * cfg.heads * cfg.prism_cursors     # C, of query cursors and of key cursors
        self.W_x = nn.Linear(cfg.d_model, 3 * cfg.prism_hidden)
        self.W_h = nn.Linear(cfg.prism_hidden, 3 * cfg.prism_hidden)
        self.W = nn.Linear(cfg.prism_hidden, 2 * self.count * 4)
        nn.init.orthogonal_(self.W_h.weight)
        with torch.no_grad():
            self.W.weight.mul_(0.3)
            self.W.bias.zero_().view(2 * self.count, 4)[:, 0] = -1.0                    # resets are rare at first
        if cfg.prism_recurrent == 'orthogonal':
            nn.utils.parametrize.register_parametrization(self.W_h, 'weight', Orthogonal())
        if cfg.prism_recurrent == 'norm':
            self.s = nn.Parameter(torch.tensor(0.5))
        if cfg.prism_sharpen:
            self.g = nn.Parameter(torch.full((2 * self.count,), math.log(math.e - 1)))  # gamma = 1 + softplus(g), 2 at first
        self.copying = slice(0, self.count, 5)
        if cfg.prism_copy != 'none':
            n, width = len(range(0, self.count, 5)), cfg.d_model + cfg.prism_hidden     # C' copying cursors
            self.W_q, self.W_k, self.W_stay = nn.Linear(width, n * cfg.head_dim), nn.Linear(width, n * cfg.head_dim), nn.Linear(width, n)
            nn.init.constant_(self.W_stay.bias, 3.0)                                    # jumps are rare at first

    def W_recurrent(self):
        """W_h, orthogonal or free; with prism_recurrent='norm' of Frobenius norm s sqrt(hidden), s learned (footnote 8*)."""
        W = self.W_h.weight
        return W * (self.s * self.cfg.prism_hidden ** 0.5 / W.norm()) if self.cfg.prism_recurrent == 'norm' else W

    def penalty(self):
        """What keeps W_h near an orthogonal matrix with prism_recurrent='penalty' (6.3)."""
        W = self.W_h.weight
        return 1e-3 * (W.T @ W - torch.eye(W.shape[1], device=W.device, dtype=W.dtype)).square().sum()

    def gru(self, x):                                                                   # [B, T, C] -> [B, T, hidden] (Cho et al. 2014)
        h, out, W_h = x.new_zeros(x.shape[0], self.cfg.prism_hidden), [], self.W_recurrent()
        for from_x in self.W_x(x).unbind(dim=1):
            (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, dim=-1), F.linear(h, W_h, self.W_h.bias).chunk(3, dim=-1)
            z, n = torch.sigmoid(z_x + z_h), torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
            h = (1 - z) * n + z * h
            out.append(h)
        return torch.stack(out, dim=1)

    def gates(self, x):
        """p_reset [B, 2C, T], (p_incr, p_decr, p_keep) [B, 2C, T, 3], and p_copy [B, C', T, T + 1] of the C' copying cursors, or None."""
        x = self.cfg.prism_input * F.layer_norm(x, x.shape[-1:])
        h = self.gru(x)
        w = self.W(h).unflatten(-1, (2 * self.count, 4)).transpose(1, 2)                # (B, 2C, T, 4)
        reset, step = torch.sigmoid(w[..., 0]), w[..., 1:].softmax(dim=-1)
        if not self.cfg.prism_reset:
            reset = torch.zeros_like(reset)
        if self.cfg.prism_copy == 'fixed':                                              # the copying cursors' key cursors count the tokens from 0
            c, t = torch.arange(2 * self.count, device=x.device)[:, None] - self.count, torch.arange(x.shape[1], device=x.device)
            fixed = (c >= 0) & (c % 5 == 0)                                             # (2C, 1)
            count = torch.stack([t > 0, t < 0, t == 0], dim=-1).to(step.dtype)          # keep at the first token, then increment
            reset, step = reset.masked_fill(fixed, 0.0), torch.where(fixed[..., None], count, step)
        return reset, step, self.jumps(torch.cat([x, h], dim=-1)) if self.cfg.prism_copy != 'none' else None

    def jumps(self, x):
        """p_copy: causal self-attention from each token to those up to it, and "no copy" as its last entry."""
        q, k = (W(x).unflatten(-1, (-1, self.cfg.head_dim)).transpose(1, 2) for W in (self.W_q, self.W_k))      # (B, C', T, D)
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return torch.cat([logits + causal(logits), self.W_stay(x).transpose(1, 2)[..., None]], dim=-1).softmax(dim=-1)

    def scan(self, x, table):
        """Encodings [B, 2C, T, d_pe] of all cursors: what the histograms make of the rows of table, f(-P..P)."""
        by_kernel = self.cfg.kernel == 'triton' or self.cfg.kernel == 'auto' and x.is_cuda and kernels.triton is not None and x.dtype != torch.float64
        scan = kernels.cursor_scan if by_kernel else kernels.cursor_scan_reference
        gamma = 1 + F.softplus(self.g) if self.cfg.prism_sharpen else None
        reset, step, copy = (p if p is None else p.to(table.dtype) for p in self.gates(x))
        e = scan(reset, step, gamma, table)
        if copy is None:
            return e
        jumping = scan(reset[:, self.copying], step[:, self.copying], None if gamma is None else gamma[self.copying], table, copy)
        return e.slice_scatter(jumping, 1, 0, self.count, 5)

    def forward(self, x, pos):
        """Superpositions g_q, g_k for every layer that it serves, and head [2, layers, B, H, T, branches d_pe]; a branch is a cursor or the absolute one."""
        (B, T, _), cfg, d_pe = x.shape, self.cfg, self.cfg.prism_d_pe
        sinusoid = lambda offsets: sinusoids(offsets, d_pe, cfg.rope_base, x)
        offsets = torch.arange(-T, T + 1, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        with in_full_precision(x):
            e = self.scan(x, sinusoid(offsets)) if cfg.prism_superpose else sinusoid(self.scan(x, offsets[:, None])[..., 0])
        e = e.view(B, 2, self.layers, cfg.heads, cfg.prism_cursors, T, d_pe).permute(1, 2, 0, 3, 5, 4, 6)      # (2, layers, B, H, T, cursors, d_pe)
        if cfg.prism_absolute:                                                          # Algorithm 3
            e = torch.cat([e, sinusoid(pos)[:, None].expand(*e.shape[:4], T, 1, d_pe)], dim=-2)
        if cfg.prism_norm == 'scale':                                                   # |f|^2 = d_pe / 2, so that sqrt(d_pe) is the norm of all that are one-hot
            e = e * (d_pe / (e.shape[-2] * d_pe / 2)) ** 0.5
        elif cfg.prism_norm == 'unit':
            e = e / e.flatten(-2).norm(dim=-1)[..., None, None] * d_pe ** 0.5
        return e.flatten(-2).to(x.dtype)


class PRISM(Encoding):
    """PRISM (eq. 9): logit_ts = mu_h <q_t, k_s> / sqrt(d) + (1 - mu_h) 4 sum_c |alpha_hc| <g_tc, g_sc> / sqrt(C d_pe), positions g learned from content.

    g_tc superposes the sinusoids of all offsets at which cursor c of head h may be (class Cursors); queries and keys have cursors of their own. mu in
    [0, 1] and alpha are learned per head. The content never sees a position. One GRU and T cheap steps for the sequence, before layer 1; the factor 4
    only with prism_norm='none'.
    """
    shift_invariant = True
    widens = True
    kernel = False            # of attention; that of the scan is the cursors' own

    def __init__(self, cfg, layer=0):
        super().__init__(cfg)
        even(cfg.prism_d_pe, 'prism', 'prism_d_pe')
        starts = [number - 1 for number in cfg.prism_layers] + [cfg.n_layer]
        self.layer, self.made = layer - max(start for start in starts if start <= layer), 0         # counted from its PRISM layer on
        self.m = nn.Parameter(torch.zeros(cfg.heads, 1, 1))                             # mu = sigmoid(m)
        self.alpha = nn.Parameter(torch.ones(cfg.heads, 1, cfg.prism_cursors + cfg.prism_absolute))
        if self.layer == 0:
            self.cursors = Cursors(cfg, starts[starts.index(layer) + 1] - layer)

    def for_layer(self):
        self.made += 1
        return type(self)(self.cfg, self.made)

    def state(self, x, pos, total_len=None):
        return self.cursors(x, pos)

    def restate(self, x, pos, state):
        return self.cursors(x, pos) if self.layer == 0 else state

    def penalty(self):
        return self.cursors.penalty() if self.layer == 0 and self.cfg.prism_recurrent == 'penalty' else 0.0

    def qk(self, q, k, pos, state=None):
        g_q, g_k = state[:, self.layer]                                                 # (B, H, T, branches d_pe)
        mu, width, factor = torch.sigmoid(self.m), g_q.shape[-1], 4 if self.cfg.prism_norm == 'none' else 1
        weight = (1 - mu) * factor * (self.cfg.head_dim / width) ** 0.5 * self.alpha.abs()          # (H, 1, branches); attention divides by sqrt(d)
        weight = weight.repeat_interleave(self.cfg.prism_d_pe, dim=-1)                  # (H, 1, branches d_pe)
        return torch.cat([mu * q, weight * g_q], dim=-1), torch.cat([k, g_k], dim=-1)


ENCODINGS = {'nope': NoPE, 'ape': APE, 'learned': Learned, 'random': Random, 'shifted_ape': ShiftedAPE, 'rope': RoPE, 'yarn': YaRN,
             'pope': PoPE, 'alibi': ALiBi, 't5': T5, 'fire': FIRE, 'vrope': VRoPE, 'vipe': ViPE, 'prism': PRISM}


# ---------------------------------------------------------------------------------------------------------------------
# combining encodings

class Sum(Encoding):
    """'a+b': the hooks of a, then of b (out in reverse); factors of the logits multiply and are computed from the raw q and k; biases add."""
    def __init__(self, cfg, *parts):
        super().__init__(cfg)
        self.parts = nn.ModuleList(parts)
        self.shift_invariant = all(p.shift_invariant for p in parts)
        self.fp32 = any(p.fp32 for p in parts)
        self.distance = any(p.distance for p in parts)
        for name, what in (('vipe', 'distance'), ('prism', 'widens')):
            if sum(getattr(p, what) for p in parts) > 1:
                raise ValueError(f'{name} cannot be added to itself')
        self.widens = any(p.widens for p in parts)
        can = [p.kernel for p in parts]
        turns = [p for p in parts if type(p).qk is not Encoding.qk]
        clash = len(turns) > 1 and any(p.phases() is not None for p in turns)
        self.kernel = False if clash or False in can else True in can or None
        self.out_dim += sum(p.out_dim - p.cfg.head_dim for p in parts)

    def for_layer(self):
        return type(self)(self.cfg, *(p.for_layer() for p in self.parts))

    def each(self, state):
        return list(zip(self.parts, state if state is not None else [None] * len(self.parts)))

    def embed(self, x, pos):
        for p in self.parts:
            x = p.embed(x, pos)
        return x

    def state(self, x, pos, total_len=None):
        return [p.state(x, pos, total_len) for p in self.parts]

    def restate(self, x, pos, state):
        return [p.restate(x, pos, s) for p, s in self.each(state)]

    def penalty(self):
        return sum(p.penalty() for p in self.parts)

    def qk(self, q, k, pos, state=None):
        for p, s in sorted(self.each(state), key=lambda part: part[0].widens):
            q, k = p.qk(q, k, pos, s)
        return q, k

    def rescale(self, q, k, pos, state=None):
        factors = [p.rescale(q, k, pos, s) for p, s in self.each(state)]
        factors = [f for f in factors if f is not None]
        if not factors:
            return None
        row, col = factors[0]
        for r, c in factors[1:]:
            row, col = row * r, col * c
        return row, col

    def phases(self):
        found = [p.phases() for p in self.parts]
        return next((delta for delta in found if delta is not None), None)

    def bias(self, pos, state=None):
        return added([p.bias(pos, s) for p, s in self.each(state)])

    def by_distance(self, d):
        return added([p.by_distance(d) for p in self.parts])

    def value(self, v, pos, state=None):
        for p, s in self.each(state):
            v = p.value(v, pos, s)
        return v

    def out(self, y, pos, state=None):
        for p, s in reversed(self.each(state)):
            y = p.out(y, pos, s)
        return y


def added(biases):
    """The sum of those that are not None, None if there is none."""
    biases = [b for b in biases if b is not None]
    return sum(biases) if biases else None


class FirstHeads(Sum):
    """rope_heads = k: the part (its cfg has heads = k) acts on the first k heads; the others, padded with zeros to its width, are NoPE."""
    def __init__(self, cfg, part):
        super().__init__(cfg, part)
        self.k, self.kernel = part.cfg.heads, False

    def join(self, first, rest):                                                        # [B, k, T, wide], [B, H - k, T, D]
        return torch.cat([first, F.pad(rest, (0, first.shape[-1] - rest.shape[-1]))], dim=1)        # (B, H, T, wide)

    def qk(self, q, k, pos, state=None):
        first_q, first_k = super().qk(q[:, :self.k], k[:, :self.k], pos, state)
        return self.join(first_q, q[:, self.k:]), self.join(first_k, k[:, self.k:])

    def rescale(self, q, k, pos, state=None):
        factors = super().rescale(q[:, :self.k], k[:, :self.k], pos, state)
        ones = torch.ones_like(q[..., :1])                                              # (B, H, T, 1)
        return None if factors is None else tuple(torch.cat([ones[:, :self.k] * f, ones[:, self.k:]], dim=1) for f in factors)

    def bias(self, pos, state=None):
        bias = super().bias(pos, state)
        return None if bias is None else F.pad(bias, (0, 0, 0, 0, 0, self.cfg.heads - self.k))

    def value(self, v, pos, state=None):
        return self.join(super().value(v[:, :self.k], pos, state), v[:, self.k:])

    def out(self, y, pos, state=None):
        return self.join(super().out(y[:, :self.k], pos, state), y[:, self.k:, :, :self.cfg.head_dim])


class SecondHalf(Sum):
    """mla: the part sees the second half of every query and key (its cfg has head_dim = D/2); the first half is NoPE (Toeplitz study eq. 3).

    Of the values, which are not cut, vrope turns the first half; vipe's code is D/2 wide, prism's score of positions 1/sqrt(2) of its equation.
    """
    def __init__(self, cfg, part):
        super().__init__(cfg, part)
        self.kernel = False

    def qk(self, q, k, pos, state=None):
        (q, q_p), (k, k_p) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        q_p, k_p = super().qk(q_p, k_p, pos, state)
        return torch.cat([q, q_p], dim=-1), torch.cat([k, k_p], dim=-1)

    def rescale(self, q, k, pos, state=None):
        return super().rescale(q.chunk(2, dim=-1)[1], k.chunk(2, dim=-1)[1], pos, state)


def build(cfg):
    """The encoding that cfg.pe names, applied to the heads and halves that rope_heads and attention say. ValueError names what is wrong."""
    names = cfg.pe.split('+')
    for name in names:
        if name not in ENCODINGS:
            near = difflib.get_close_matches(name, ENCODINGS, 1)
            raise ValueError(f'unknown encoding {name!r}' + (f', did you mean {near[0]!r}?' if near else '.') + f' There are: {", ".join(ENCODINGS)}')
    part, wrappers = copy.copy(cfg), []
    if cfg.rope_heads is not None:
        wrappers.append((FirstHeads, copy.copy(part)))
        part.heads = cfg.rope_heads
    if cfg.attention == 'mla':
        even(cfg.head_dim, 'mla', 'the head dimension')
        wrappers.append((SecondHalf, copy.copy(part)))
        part.head_dim = cfg.head_dim // 2
    parts = [ENCODINGS[name](part) for name in names]
    enc = parts[0] if len(parts) == 1 else Sum(part, *parts)
    for wrapper, outer in reversed(wrappers):
        enc = wrapper(outer, enc)
    return enc


# ---------------------------------------------------------------------------------------------------------------------

HOOKS = 'embed state restate penalty qk rescale bias by_distance value out'.split()


def zoo():
    """Print each encoding: its equation, its parameters in one layer of 4 heads of 16, and the hooks that it changes."""
    for name, cls in ENCODINGS.items():
        enc = cls(PEConfig(pe=name, n_head=4))
        params = ', '.join(f'{n} {list(p.shape)}' for n, p in enc.named_parameters()) or 'none'
        hooks = ', '.join(h for h in HOOKS if getattr(cls, h) is not getattr(Encoding, h)) or 'none'
        equation = (cls.__doc__ or 'no docstring').splitlines()[0]
        print(f'{name}\n    {equation}\n    parameters: {params}\n    changes: {hooks}\n')
    print("join them with +, as in pe='ape+rope' or 'pope+vipe'")


def picture(name, T):
    """What an encoding does with the same content at every position [T, T]: the logits, or how the value at s looks from t."""
    torch.manual_seed(1)
    enc = build(PEConfig(pe=name, d_model=32, n_head=2, train_len=T // 2, t5_max_distance=T)).eval()
    for p in enc.parameters():
        torch.nn.init.normal_(p) if name == 't5' else None                              # learned, from 0: a random start shows the buckets
    pos = torch.arange(T)
    x = enc.embed(torch.full((1, T, 32), 0.0 if name in ('ape', 'learned', 'random') else 1.0), pos)
    heads = x.view(1, T, 2, 16).transpose(1, 2)                                         # (1, 2, T, 16)
    if all(type(part).out is Encoding.out for part in getattr(enc, 'parts', [enc])):
        return enc.logits(heads, heads, pos)[0, 0]
    on = torch.eye(T).expand(T, T, T)                                                   # on[:, s]: all attention on s
    seen = [enc.mix(on[:, s].expand(1, 2, T, T), heads, pos)[0, 0] for s in range(T)]   # T x (T, out_dim)
    channel = 16 if enc.out_dim > 16 else 0                                             # the first of the distance code, if there is one
    return torch.stack(seen, dim=1)[..., channel] + causal(torch.zeros(T, T))


def draw(path, T=48):
    """Draw the encodings side by side; nope has nothing to see and shifted_ape is ape in evaluation."""
    try:
        import matplotlib
    except ImportError:
        sys.exit('pe.py: drawing needs matplotlib: pip install matplotlib')
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    names = [name for name in ENCODINGS if name not in ('nope', 'shifted_ape', 'prism')] + ['ape+rope']
    rows = math.ceil(len(names) / 4)
    fig, axes = plt.subplots(rows, 4, figsize=(11, 2.87 * rows), layout='constrained')
    for ax, name in zip(axes.flat, names):
        m = picture(name, T).detach()
        ax.imshow(m.masked_fill(m.isinf(), float('nan')), cmap='viridis')
        ax.set_title(name + (' (value)' if name in ('vrope', 'vipe') else ' (logit)'), fontsize=11)
        ax.set(xlabel='key position s', ylabel='query position t')
    for ax in axes.flat[len(names):]:
        ax.axis('off')
    try:
        fig.savefig(path, dpi=80)
    except (OSError, ValueError) as error:
        sys.exit(f'pe.py: cannot draw {path}: {error}')
    print(f'drew {path}')


if __name__ == '__main__':
    if len(sys.argv) > 1 and sys.argv[1].startswith('-'):
        print(__doc__)
    elif len(sys.argv) > 1:
        draw(sys.argv[1])
    else:
        zoo()
