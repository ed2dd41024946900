"""Multi-head attention of a folded batch, between the projections that are each client's own.

Queries, keys and values are `[N, heads, length, width]` of N = C * B examples. No example sees another, so nothing
here needs to know whose they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """`[N, length, parts * heads * width]` as so many `[N, heads, length, width]`."""
    return x.view(*x.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4).unbind()


def join_heads(x: Tensor) -> Tensor:
    """`[N, heads, length, width]` as `[N, length, heads * width]`."""
    return x.transpose(1, 2).flatten(2)


def joined_masks(key_padding_mask: Tensor | None, attn_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What is added to the scores, `[N or 1, heads or 1, L or 1, S]`; minus infinity where a mask says True."""
    found = None
    if attn_mask is not None:
        mask = _added(attn_mask, query)
        found = mask if mask.dim() == 2 else mask.view(*query.shape[:2], *mask.shape[1:])
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, query)[:, None, None]
        found = padding if found is None else found + padding
    return None if found is None else found.view(*[1] * (4 - found.dim()), *found.shape)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Attention whose weights nobody sees; `causal` stands for a mask that hides what comes later."""
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """`[N, heads, L, S]`; all zero for a query that may attend to nothing, as in `attend`."""
    scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    if mask is None:
        return scores.softmax(-1)
    nothing = (mask == -math.inf).all(-1, keepdim=True)
    return (scores + mask).masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
