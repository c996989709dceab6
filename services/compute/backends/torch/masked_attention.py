"""Attention with everything that a model may ask of it: any mask and scale, a soft cap, sinks, and
values of another size than the keys."""

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float | None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """softmax(cap(q k^T * scale)) v over the positions that the mask lets each query see.

    q: [n, heads, queries, k_dim]; k: [n, kv_heads, positions, k_dim]; v: [n, kv_heads, positions,
    v_dim]; mask: [n, 1, queries, positions] bool, True where seen; scale: 1 / sqrt(k_dim) by
    default; softcap: scores become softcap * tanh(score / softcap) (Gemma 2, section 2); sinks:
    [heads], one more score in each softmax, without a value (Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks", 2023). Returns [n, heads, queries, v_dim] in q's dtype.
    The query heads that share a KV head are its queries, so K and V are read once.
    """
    n, num_heads, num_queries, k_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    grouped = q.reshape(n, num_kv_heads, group * num_queries, k_dim)
    seen = mask.repeat(1, 1, group, 1)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen, scale=scale)
    else:
        scores = grouped.float() @ k.float().transpose(2, 3) * (k_dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, num_kv_heads, group, 1).repeat_interleave(num_queries, 2)
            scores = torch.cat([scores, sink.expand(n, -1, -1, -1)], dim=-1)
        out = (scores.softmax(-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)
    return out.reshape(n, num_heads, num_queries, v.shape[-1])
