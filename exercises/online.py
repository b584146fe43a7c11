"""Attention without the matrix of its weights, in torch: the exercise `attention`."""
import torch


def attention(q, k, v, block=16):
    """Causal softmax(q k^T / sqrt(D)) v for q, k, v [B, H, T, D], `block` keys at a time.

    Online softmax (Milakov & Gimelshein 2018). For each query it keeps the largest logit so far m,
    the sum l of e^(x - m) and the sum y of e^(x - m) v. Where a block of keys raises m to m', what
    was kept is multiplied by e^(m - m'). At the end y / l. No tensor has T x T entries.
    """
    T, scale = q.shape[2], q.shape[3] ** -0.5
    t = torch.arange(T, device=q.device)[:, None]
    m = q.new_full((*q.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(m)
    y = torch.zeros_like(v)
    for start in range(0, T, block):
        keys = slice(start, start + block)
        x = q @ k[:, :, keys].transpose(-2, -1) * scale    # (B, H, T, block)
        x = x.masked_fill(t.T[:, keys] > t, -torch.inf)
        new = torch.maximum(m, x.amax(dim=-1, keepdim=True))
        # the first block has a key for every query, so new is finite from then on
        p = (x - new).exp()
        shrink = (m - new).exp()
        total = shrink * total + p.sum(dim=-1, keepdim=True)
        y = shrink * y + p @ v[:, :, keys]
        m = new
    return y / total
