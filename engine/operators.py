"""What operators need besides their kernels: Triton, or a stand-in, and rules for torch.func."""
import os

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')
try:
    import triton
    import triton.language as tl
    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # Triton is for Linux; the references work everywhere
    triton = tl = None
    jit, constexpr = lambda function: function, float

# what kernels read besides their arguments must be constexpr
INTERPRETED = constexpr(os.environ.get('TRITON_INTERPRET') == '1')


def no_second_gradient(ctx, grads):
    """Say that there is none."""
    raise NotImplementedError('the kernels have no second-order gradients: take the reference '
                              '(kernels.NAME_reference, or --kernel=reference)')


def fold_seeds(op, shared=None):
    """The vmap rule of an operator whose tensors all begin with the batch, or with groups that
    divide it: the axis of seeds is folded into that first axis. Argument number `shared` is one for
    all seeds, without a gradient (the last argument, True, asks for it)."""
    def fold(x, dim, S):
        if not isinstance(x, torch.Tensor):
            return x
        x = x.expand(S, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    def unfold(x, S):
        return x.unflatten(0, (S, len(x) // S)) if x.dim() > 1 else x.new_empty(S, 0)

    def rule(info, in_dims, *args):
        S = info.batch_size
        if shared is not None and (in_dims[shared] is not None or args[-1] is True):
            raise NotImplementedError('the table of sinusoids must be one for all: take '
                                      'pe.cursor_scan')
        out = op(*(x if i == shared else fold(x, dim, S)
                   for i, (x, dim) in enumerate(zip(args, in_dims))))
        if isinstance(out, torch.Tensor):
            return unfold(out, S), 0
        return type(out)(unfold(x, S) for x in out), type(out)([0] * len(out))
    return rule


# --------------------------------------------------------------------------------------------------
# PyTorch's fused attention, which has no vmap rule of its own

def fused_attention(q, k, v, mask, scale):
    """Causal attention by PyTorch's fused kernels, as wide as v. A mask [.., 1 or H, Tq, T] is
    added to the logits and takes the place of causality."""
    if mask is not None:
        mask = mask.to(q.dtype).expand(*mask.shape[:-3], q.shape[1], -1, -1)
        mask = mask.contiguous().view(-1, *mask.shape[-3:])  # (1 or B, H, Tq, T)
    width = v.shape[-1]
    q, k, v = pad_to_one_width(q, k, v)
    if torch._C._functorch.is_batchedtensor(q):  # many seeds at once, under vmap
        return seeds_attention(q, k, v, mask, scale)[..., :width]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                          scale=scale)[..., :width]


def pad_to_one_width(*xs):
    """Zeros behind the last features: no dot product changes, and no other channel of y."""
    width = max(x.shape[-1] for x in xs)
    if xs[0].is_cuda and any(x.shape[-1] < width for x in xs):
        width += -width % 8  # the fused CUDA kernels want that
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in xs]


@torch.library.custom_op('nanope::seeds_attention', mutates_args=())
def seeds_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
                    scale: float) -> torch.Tensor:
    """fused_attention under vmap, which has no rule for it: seeds_attention_rule is the rule."""
    raise NotImplementedError('seeds_attention exists for its vmap rule only')


@seeds_attention.register_vmap
def seeds_attention_rule(info, in_dims, q, k, v, mask, scale):
    """q, k, v with a seed axis at in_dims -> (attention with a seed axis, its place)."""
    S = info.batch_size
    q, k, v = (x.expand(S, *x.shape) if d is None else x.movedim(d, 0)
               for x, d in zip((q, k, v), in_dims))  # (S, B, H, T, D)
    if mask is None or in_dims[3] is None and len(mask) == 1:  # one mask: seeds into the batch
        y = fused_attention(*(x.flatten(0, 1) for x in (q, k, v)), mask, scale)
        return y.unflatten(0, (S, -1)), 0
    H = q.shape[2]  # a mask per seed or row: seeds into the heads
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    mask = mask.expand(S, *mask.shape) if in_dims[3] is None else mask.movedim(in_dims[3], 0)
    mask = mask.transpose(0, 1).flatten(1, 2)  # (1 or B, S H, Tq, T)
    return fused_attention(q, k, v, mask, scale).unflatten(1, (S, H)), 1
