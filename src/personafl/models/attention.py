"""Multi-head attention of a folded batch, between the projections that are each client's own.

Queries, keys and values are `[N, heads, length, width]` of N = C * B examples. No example sees another, so nothing
here needs to know whose they are.
"""

from __future__ import annotations

import functools
import math
from operator import attrgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from personafl import accel
from personafl.accel.second_derivatives import differentiable_gradients, graph_requested
from personafl.core.types import ModelInfo
from personafl.models.layers import Context, Stacked, dropped, products

attention_kernels: Any = accel.load_kernels("attention_kernels")


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
    return cast(Tensor, _Attention.apply(query, key, value, mask, causal))  # type: ignore[no-untyped-call]


class _Attention(Function):
    """PyTorch's fused attention, with the second derivatives it lacks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        inputs, wanted = (query, key, value), ctx.needs_input_grad[:4]
        ctx.save_for_backward(*inputs, mask)
        ctx.causal = causal
        with torch.set_grad_enabled(any(wanted)):
            query, key, value = (t.detach().requires_grad_(w) for t, w in zip(inputs, wanted, strict=False))
            mask = None if mask is None else mask.detach().requires_grad_(wanted[3])
            ctx.leaves = query, key, value, mask
            ctx.out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        return cast(Tensor, ctx.out.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:4]
        if graph_requested():
            plain = functools.partial(_plain_attention, causal=ctx.causal)
            return *differentiable_gradients(plain, ctx.saved_tensors, [grad], wanted), None
        leaves = [t for t, want in zip(ctx.leaves, wanted, strict=True) if want]
        grads = iter(torch.autograd.grad(ctx.out, leaves, grad, retain_graph=True))
        return *(next(grads) if want else None for want in wanted), None


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """The same attention as operations that autograd knows."""
    if causal:
        mask = query.new_full((query.shape[2], key.shape[2]), -math.inf).triu(1)
    return attention_weights(query, key, mask) @ value


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """`[N, heads, L, S]`; all zero for a query that may attend to nothing, as in `attend`."""
    scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    if mask is None:
        return scores.softmax(-1)
    nothing = (mask == -math.inf).all(-1, keepdim=True)
    return (scores + mask).masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


class StackedAttention(Stacked):
    """Multi-head attention with each client's own projections.

    PyTorch's transformer layers look at their attention before they call a fused kernel that knows one set of
    weights; by these attributes they do not.
    """

    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, context: Context, original: nn.Module, name: str, info: ModelInfo) -> None:
        super().__init__(context, original, name, info)
        of = cast(nn.MultiheadAttention, original)
        self.embed_dim, self.num_heads, self.head_dim = of.embed_dim, of.num_heads, of.head_dim
        self.batch_first, self.dropout = of.batch_first, of.dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() != 3:
            raise ValueError("attention to other examples of a batch would be attention to other clients'")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal says what attn_mask is, and there is none")
        dropping = self.dropout > 0 and self.training and self.context.keys is not None and self.context.drops
        plain = key_padding_mask is None and (attn_mask is None or is_causal) and not need_weights and not dropping
        projected = self._projected(query, key, value)
        if plain and len(projected) == 1 and self._in_one_launch(projected[0]):
            how = self.context.arithmetic
            joined = attention_kernels.short_attention(projected[0], self.num_heads, causal=is_causal, how=how)
            return self._left(joined), None
        q, k, v = (t for x in projected for t in split_heads(x, x.shape[2] // self.embed_dim, self.num_heads))
        weights = None
        if need_weights or dropping:
            mask = joined_masks(key_padding_mask, attn_mask, q)
            weights = attention_weights(q, k, mask)
            if dropping:
                weights = dropped(self.split(weights), self.dropout, self.context).flatten(0, 1)
            seen = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            mask = None if causal else joined_masks(key_padding_mask, attn_mask, q)
            seen = attend(q, k, v, mask, causal=causal)
        out = self._left(join_heads(seen))
        if weights is None or not need_weights:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights

    def _in_one_launch(self, packed: Tensor) -> bool:
        """Whether a kernel of our own has this; a client that runs by itself has PyTorch's."""
        own = attention_kernels is not None and not self.context.one_by_one
        return own and attention_kernels.fits(packed, self.num_heads)

    def _left(self, joined: Tensor) -> Tensor:
        """What leaves the layer, of what is seen `[N, length, heads * width]`."""
        out = self._product(joined, self._own("out_proj.weight"), self._own("out_proj.bias"))
        return out if self.batch_first else out.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values side by side, `[N, length, parts * heads * width]`: one where they have one input,
        two where keys and values do, or three."""
        packed, bias = self.get("in_proj_weight"), self.get("in_proj_bias")
        parts = [1, 1, 1]
        if packed is not None and key is value:
            parts = [3] if query is key else [1, 2]
        widths = [self.embed_dim * n for n in parts]
        if packed is None:
            weights = [self.get(f"{n}_proj_weight") for n in "qkv"]
        else:
            weights = [packed] if len(parts) == 1 else list(torch.split_with_sizes(packed, widths, 1))
        biases = [None] * 3 if bias is None else torch.split_with_sizes(bias, widths, 1)
        found: list[Tensor] = []
        for x, weight, own in zip((query, key, value), weights, biases, strict=False):
            rows = x if self.batch_first else x.transpose(0, 1)
            found.append(self._product(rows, weight, own))
        return found

    def _product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """`[N, length, in]` by each client's own weights: `[N, length, out]`."""
        assert weight is not None
        self.verify_rows(x.shape[0])
        rows = x.reshape(self.context.count, -1, x.shape[-1]).to(weight.dtype)
        out = products(self.context.threads, rows, weight, bias, coarse=self.context.coarse(x))
        return out.view(*x.shape[:-1], weight.shape[1])

    def _own(self, name: str) -> Tensor | None:
        """`get` of a parameter of a part."""
        if name in self.own:
            return self.get(name)
        shared = attrgetter(name)(self.original)
        return None if shared is None else shared.expand(self.context.count, *shared.shape)
