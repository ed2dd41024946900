"""Layers that know whose example they see: the stacked form of every module with parameters or randomness.

Each takes the folded batch of C * B examples its original would take, and finds the clients' own parameters in
the context of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.types import Arithmetic, ModelInfo, Params
from personafl.models import attention

try:
    from personafl.models import kernels
except ImportError:  # no Triton, so no GPU it would run on
    kernels = None  # type: ignore[assignment]

Channels = Literal["first", "last", "either"]
"""How images lie in memory; either: as is fastest."""
CONVS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 1,
    nn.Dropout2d: 1,
    nn.Dropout3d: 1,
}  # channel axis kept, if any
RUNNING = ("running_mean", "running_var")


def tracks(m: nn.Module) -> bool:
    """Whether a norm's running statistics are part of a client's state; those of a frozen norm are not."""
    if not isinstance(m, BATCH_NORMS) or not m.track_running_stats:
        return False
    if m.momentum is None:
        raise UserError(
            f"{type(m).__name__} with momentum=None (a cumulative average) is not supported; give it a number"
        )
    own = list(m.parameters(recurse=False))
    return not own or any(p.requires_grad for p in own)


class Context:
    """What the replaced modules look up during a forward pass."""

    params: Params
    valid: Tensor | None  # [C, B], None when no place is padding
    keys: Tensor | None  # [C], None outside training
    count: int  # C
    calls: int  # of dropout, in this forward pass
    arithmetic: Arithmetic = "float32"  # of convolutions on a GPU
    channels: Channels = "either"
    tape: list[Taped] | None = None  # linear layers as they run, where their gradients are taken by hand
    threads: int = 0  # for batched products, where all else runs on one; 0: as PyTorch has it


@dataclass(frozen=True)
class Taped:
    """A run of linear layers: what their gradients are made of."""

    names: list[str]  # of weight and bias of each, empty where it is shared
    seen: list[Tensor]  # [C, B, in] of each
    weights: list[Tensor]
    out: Tensor  # [C * B, ...]
    version: int  # of the output's memory: it is another one after a change in place


class Stacked(nn.Module):
    """A module replaced by its stacked form. `get` finds a parameter: a client's own, or the shared, frozen one."""

    def __init__(self, context: Context, original: nn.Module, name: str, info: ModelInfo) -> None:
        super().__init__()
        self.context = context
        self.own = {n: f"{name}.{n}".lstrip(".") for n, _ in (*original.named_parameters(), *original.named_buffers())}
        self.own = {n: full for n, full in self.own.items() if full in info.shapes}
        self.original = original

    def get(self, name: str) -> Tensor | None:
        if name in self.own:
            return self.context.params[self.own[name]]
        shared = getattr(self.original, name)
        return None if shared is None else shared.expand(self.context.count, *shared.shape)

    def split(self, x: Tensor) -> Tensor:
        """The folded batch with its client axis back: `[C, B, ...]`."""
        return x.reshape(self.context.count, -1, *x.shape[1:])


class _Linears(Function):
    """Every client's own linear maps, one behind the other, with ReLU between them.

    One node for autograd instead of three a layer, which at the size of a minibatch is most of the work. Its own
    weight gradient would be a transposed view, which is slow to add.
    """

    @staticmethod
    def forward(ctx: Any, threads: int, x: Tensor, *params: Tensor | None) -> Tensor:
        *seen, out = _outputs(x, params, threads)
        ctx.save_for_backward(*seen, *params[::2])
        ctx.threads = threads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.saved_tensors) // 2
        seen, weights = ctx.saved_tensors[:depth], ctx.saved_tensors[depth:]
        return None, *gradients(grad, seen, weights, ctx.needs_input_grad[1:], ctx.threads)


class _Threads:
    """Several threads for batched products, never more than matrices, where all else runs on one.

    A thread then works on whole matrices. Where there are more threads than matrices, MKL splits single ones, and
    their sums would go by the number of threads.
    """

    def __init__(self, threads: int, matrices: int) -> None:
        self.count = min(threads, matrices)

    def __enter__(self) -> None:
        if self.count > 1:
            torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            torch.set_num_threads(1)


def _outputs(x: Tensor, params: Sequence[Tensor | None], threads: int) -> list[Tensor]:
    """The input and what each layer makes of it; `params` are a weight and a bias for each."""
    seen = [x]
    with _Threads(threads, len(x)):
        for place in range(0, len(params), 2):
            weight, bias = params[place], params[place + 1]
            assert weight is not None
            out = _product(seen[-1], weight)
            if bias is not None:
                out.add_(bias.unsqueeze(1))
            seen.append(out if place + 2 == len(params) else out.relu_())
    return seen


def gradients(
    grad: Tensor, seen: Sequence[Tensor], weights: Sequence[Tensor], wanted: Sequence[bool], threads: int
) -> list[Tensor | None]:
    """Back through linear layers with ReLU between them: for the input, then a weight and a bias of each, if wanted."""
    with _Threads(threads, len(grad)):
        return _back(grad, seen, weights, wanted)


def _back(
    grad: Tensor, seen: Sequence[Tensor], weights: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    found: list[Tensor | None] = [None] * len(wanted)
    for i in reversed(range(len(seen))):
        if wanted[2 * i + 1]:
            found[2 * i + 1] = torch.bmm(grad.transpose(1, 2), seen[i])
        if wanted[2 * i + 2]:
            found[2 * i + 2] = grad.sum(1)
        if not any(wanted[: 2 * i + 1]):
            return found
        grad = torch.bmm(grad, weights[i])
        if i:
            grad = torch.ops.aten.threshold_backward(grad, seen[i], 0)
    found[0] = grad
    return found


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`[C, B, in]` by `[C, out, in]`: `[C, B, out]`."""
    (stack, size, inputs), outputs = x.shape, weight.shape[1]
    small = stack == 1 or (size <= 32 and inputs * outputs <= 2**13)
    if x.is_cuda or outputs >= inputs or not small:
        return torch.bmm(x, weight.transpose(1, 2))
    across = x.transpose(1, 2) if len(x) == 1 else x.transpose(1, 2).contiguous()
    return torch.bmm(weight, across).transpose(1, 2).contiguous()  # half the time on a CPU where a layer narrows


class _Linear(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return _together([self], x)

    @property
    def watched(self) -> bool:
        """Whether somebody wants to see what enters or leaves it."""
        return bool(self._forward_pre_hooks or self._forward_hooks)


def _together(layers: list[_Linear], x: Tensor) -> Tensor:
    params = [layer.get(n) for layer in layers for n in ("weight", "bias")]
    first, last = params[0], params[-2]
    assert first is not None and last is not None
    rows = x.reshape(layers[0].context.count, -1, x.shape[-1]).to(first.dtype)  # [C, B, in]
    tape, threads = layers[0].context.tape, layers[0].context.threads
    if tape is None:
        out = cast(Tensor, _Linears.apply(threads, rows, *params))  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], last.shape[1])
    *seen, out = _outputs(rows, params, threads)
    out = out.view(*x.shape[:-1], last.shape[1])
    names = [layer.own.get(n, "") for layer in layers for n in ("weight", "bias")]
    tape.append(Taped(names, seen, cast(list[Tensor], params[::2]), out, out._version))
    return out


def linears(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Linear layers with ReLU between them: all in one where the stacked form has it."""
    stacked = [m for m in layers if isinstance(m, _Linear) and not m.watched]
    if len(stacked) == len(layers):
        return _together(stacked, x)
    *front, last = layers
    out: Tensor = last(linears(front, x).relu() if front else x)
    return out


class _Conv(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        conv = cast(nn.Conv2d, self.original)
        weight, bias = self.get("weight"), self.get("bias")
        assert weight is not None
        call = CONVS[type(self.original)]
        rest = (conv.stride, conv.padding, conv.dilation)
        if not x.is_cuda and x.dim() == 4:
            x = self._arranged(x, weight)
        if self.context.count == 1 and not x.is_cuda:
            return call(x, weight.squeeze(0), None if bias is None else bias.squeeze(0), *rest, conv.groups)
        rows = self.split(x)
        if x.is_cuda and self.fast(weight):
            return self._launched(x, kernels.PLAIN, weight.dtype)
        if not x.is_cuda:  # grouped convolution is slower than a loop there
            parts = zip(rows, weight, [None] * len(rows) if bias is None else bias, strict=True)
            return torch.cat([call(r, w, b, *rest, conv.groups) for r, w, b in parts])
        wide = rows.transpose(0, 1).flatten(1, 2)  # [B, C * in, ...]
        out = call(wide, weight.flatten(0, 1), None if bias is None else bias.flatten(), *rest, len(rows) * conv.groups)
        return out.view(out.shape[0], len(rows), -1, *out.shape[2:]).transpose(0, 1).flatten(0, 1)

    def fast(self, weight: Tensor) -> bool:
        """Whether there is a kernel for it (float64 has none)."""
        conv = self.original
        return (
            kernels is not None
            and weight.is_cuda
            and weight.dtype == torch.float32
            and type(conv) is nn.Conv2d
            and kernels.fits(conv)
        )

    def _launched(self, x: Tensor, mode: int, dtype: torch.dtype) -> Tensor:
        weight, bias, pad = self.get("weight"), self.get("bias"), cast(nn.Conv2d, self.original).padding[0]
        assert weight is not None and isinstance(pad, int)
        out = kernels.convolution(x, weight, bias, pad, mode, self.context.arithmetic, dtype)
        return out.contiguous() if self.context.channels == "first" else out

    def _arranged(self, x: Tensor, weight: Tensor) -> Tensor:
        """Images as a CPU convolves them fastest: channels last, unless weights, which have to follow, are larger."""
        channels = self.context.channels
        if channels == "first" or (channels == "either" and weight.numel() > x.numel()):
            return x.contiguous()
        if x.shape[1] == 1:  # contiguous either way: the strides must say which is meant
            return x.reshape(len(x), *x.shape[2:], 1).movedim(3, 1)
        return x.contiguous(memory_format=torch.channels_last)

    def with_relu(self, x: Tensor, *, pooled: bool, inner: bool) -> Tensor | None:
        """ReLU and pooling in the same kernel; None where there is none. `inner`: another of these follows."""
        weight = self.get("weight")
        assert weight is not None
        if not self.fast(weight):
            return None
        half = inner and self.context.arithmetic == "bf16"
        return self._launched(x, kernels.POOL if pooled else kernels.RELU, torch.bfloat16 if half else weight.dtype)


def conv_relu(conv: nn.Module, x: Tensor, *, pooled: bool, inner: bool = False) -> Tensor:
    """A convolution, ReLU and, where `pooled`, 2x2 max-pooling: one kernel where the stacked form has one.

    `inner` says that its output goes into another such block and nowhere else: it may then be of lower precision.
    """
    if isinstance(conv, _Conv) and (out := conv.with_relu(x, pooled=pooled, inner=inner)) is not None:
        return out
    x = F.relu(conv(x))
    return F.max_pool2d(x, 2) if pooled else x


class _BatchNorm(Stacked):
    """Batch normalisation by each client's real examples.

    Without running statistics (policy `drop`) the batch at hand gives them, also in evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        norm = cast(nn.BatchNorm2d, self.original)
        if self.context.count == 1 and self.context.valid is None and len(x) > 1 and not x.is_cuda:
            return self._alone(x)
        rows = self.split(x)  # [C, B, F, ...]
        shape = (rows.shape[0], 1, rows.shape[2], *[1] * (rows.dim() - 3))
        running = "running_mean" in self.own
        if running and not self.training:
            mean, var = self.get("running_mean"), self.get("running_var")
            assert mean is not None and var is not None
        else:
            mean, var, places = _moments(rows, self.context.valid)
            if running:
                self._track(mean.detach(), var.detach(), places)
        out = (rows - mean.view(shape)) * torch.rsqrt(var.view(shape) + norm.eps)
        weight, bias = self.get("weight"), self.get("bias")
        if weight is not None and bias is not None:
            out = out * weight.view(shape) + bias.view(shape)
        return out.flatten(0, 1)

    def _alone(self, x: Tensor) -> Tensor:
        """PyTorch's own, for one client without padding."""
        norm = cast(nn.BatchNorm2d, self.original)
        named = (self.get(n) for n in (*RUNNING, "weight", "bias"))
        mean, var, weight, bias = (None if t is None else t.squeeze(0) for t in named)
        return F.batch_norm(x, mean, var, weight, bias, self.training or mean is None, norm.momentum or 0.0, norm.eps)

    def _track(self, mean: Tensor, var: Tensor, places: Tensor) -> None:
        norm = cast(nn.BatchNorm2d, self.original)
        rate = cast(float, norm.momentum)
        unbiased = var * (places / (places - 1).clamp(min=1)).unsqueeze(1)
        for name, new in (("running_mean", mean), ("running_var", unbiased)):
            old = self.get(name)
            assert old is not None
            old.lerp_(new.to(old.dtype), rate)


def _moments(rows: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per client and feature of `[C, B, F, ...]`, and how many values made them."""
    over = [1, *range(3, rows.dim())]
    each = rows[0, 0, 0].numel()
    if valid is None:
        places = torch.full((rows.shape[0],), rows.shape[1] * each, dtype=rows.dtype, device=rows.device)
        return rows.mean(over), rows.var(over, unbiased=False), places
    real = valid.view(*valid.shape, *[1] * (rows.dim() - 2))
    places = valid.sum(1).to(rows.dtype) * each
    mean = torch.where(real, rows, 0).sum(over) / places.unsqueeze(1)
    centred = rows - mean.view(mean.shape[0], 1, mean.shape[1], *[1] * (rows.dim() - 3))
    return mean, torch.where(real, centred.square(), 0).sum(over) / places.unsqueeze(1), places


class _LayerNorm(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        norm = cast(nn.LayerNorm, self.original)
        rows = self.split(F.layer_norm(x, norm.normalized_shape, eps=norm.eps))
        return _affine(rows, self.get("weight"), self.get("bias"), len(norm.normalized_shape))


class _GroupNorm(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        norm = cast(nn.GroupNorm, self.original)
        rows = self.split(F.group_norm(x, norm.num_groups, eps=norm.eps))
        return _affine(rows.movedim(2, -1), self.get("weight"), self.get("bias"), 1).movedim(-1, 1)


def _affine(rows: Tensor, weight: Tensor | None, bias: Tensor | None, axes: int) -> Tensor:
    """Scale and shift the last `axes` axes of `[C, B, ...]` by each client's own numbers; folded again."""
    for t, join in ((weight, torch.mul), (bias, torch.add)):
        if t is not None:
            rows = join(rows, t.view(t.shape[0], *[1] * (rows.dim() - 1 - axes), *t.shape[1:]))
    return rows.flatten(0, 1)


class _Embedding(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        table = self.get("weight")
        assert table is not None
        first = torch.arange(table.shape[0], device=x.device) * table.shape[1]
        rows = self.split(x)
        places = rows + first.view(-1, *[1] * (rows.dim() - 1))
        return F.embedding(places, table.flatten(0, 1)).flatten(0, 1)


def _dropped(context: Context, x: Tensor, p: float, channels: int | None = None) -> Tensor:
    """Dropout of a folded batch drawn from each client's own stream, one draw per call of a step.

    With `channels` axes kept behind the examples', whole channels are dropped.
    """
    if context.keys is None or p == 0:
        return x
    if p == 1:
        return x * 0
    context.calls += 1
    keys = rng.extend(context.keys, context.calls)
    rows = x.reshape(context.count, -1, *x.shape[1:])
    if channels is None and kernels is not None and x.is_cuda and x.dtype == torch.float32:
        return kernels.dropout(rows.flatten(1), keys, p).view(x.shape)
    shape = rows.shape[1:] if channels is None else rows.shape[1 : 2 + channels]
    draws = rng.uniform(keys, shape.numel(), torch.float32).view(rows.shape[0], *shape)
    kept = (draws >= p).view(*draws.shape, *[1] * (rows.dim() - draws.dim()))
    return torch.where(kept, rows / (1 - p), 0).flatten(0, 1)


class _Dropout(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        drop = cast(nn.Dropout, self.original)
        return _dropped(self.context, x, drop.p, _DROPOUTS[type(drop)])


class _Attention(Stacked):
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
        q, k, v = self._projected(query, key, value)
        weights = None
        if need_weights or (self.dropout and self.context.keys is not None):
            mask = attention.joined_masks(key_padding_mask, attn_mask, q)
            weights = _dropped(self.context, attention.attention_weights(q, k, mask), self.dropout)
            seen = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            mask = None if causal else attention.joined_masks(key_padding_mask, attn_mask, q)
            seen = attention.attend(q, k, v, mask, causal=causal)
        out = self._product(attention.join_heads(seen), self._own("out_proj.weight"), self._own("out_proj.bias"))
        if not self.batch_first:
            out = out.transpose(0, 1)
        if weights is None or not need_weights:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values, `[N, heads, length, width]`; what has the same input is one product."""
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
        for x, n, weight, own in zip((query, key, value), parts, weights, biases, strict=False):
            rows = x if self.batch_first else x.transpose(0, 1)
            found += attention.split_heads(self._product(rows, weight, own), n, self.num_heads)
        return found

    def _product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """`[N, length, in]` by each client's own weights: `[N, length, out]`."""
        assert weight is not None
        rows = x.reshape(self.context.count, -1, x.shape[-1]).to(weight.dtype)
        out = cast(Tensor, _Linears.apply(self.context.threads, rows, weight, bias))  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[1])

    def _own(self, name: str) -> Tensor | None:
        """`get` of a parameter of a part."""
        if name in self.own:
            return self.get(name)
        shared = attrgetter(name)(self.original)
        return None if shared is None else shared.expand(self.context.count, *shared.shape)


class _FrozenNorm(Stacked):
    """A batch norm nobody trains: it keeps the statistics it came with."""

    def forward(self, x: Tensor) -> Tensor:
        n = cast(nn.BatchNorm2d, self.original)
        return F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, training=False, eps=n.eps)


class PerClient(Stacked):
    """Any module, called once for each client with that client's parameters and real examples.

    Randomness inside it is made the client's own by seeding PyTorch's generator for the call, which is
    why a model with such a part does not run in several threads. Recurrent layers without dropout have none.
    """

    def __init__(self, context: Context, original: nn.Module, name: str, info: ModelInfo) -> None:
        super().__init__(context, original, name, info)
        _freeze(original, context, info)
        self.random = not isinstance(original, nn.RNNBase) or original.dropout > 0

    def forward(self, x: Tensor, *rest: Any) -> Any:
        count, keys, valid = self.context.count, self.context.keys, self.context.valid
        recurrent = isinstance(self.original, nn.RNNBase)
        axis = 1 if recurrent and not self.original.batch_first else 0
        each = {n: self.context.params[full].unbind() for n, full in self.own.items()}
        outs = []
        for c, part in enumerate(x.chunk(count, axis)):
            own = {n: rows[c] for n, rows in each.items()}
            real = part.shape[axis] if valid is None else int(valid[c].sum())
            part = part.narrow(axis, 0, real)
            if keys is None or not self.random:
                outs.append(functional_call(self.original, own, (part, *rest)))
                continue
            with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                torch.manual_seed(int(keys[c]))
                outs.append(functional_call(self.original, own, (part, *rest)))
        size = x.shape[axis] // count
        if isinstance(outs[0], Tensor):
            return torch.cat([_padded(o, size, axis) for o in outs], axis)
        return torch.cat([_padded(o[0], size, axis) for o in outs], axis), _cat_states([o[1] for o in outs], size)


def _padded(t: Tensor, size: int, axis: int) -> Tensor:
    """The same with zeros behind, up to `size` along the axis."""
    missing = size - t.shape[axis]
    if not missing:
        return t
    return torch.cat([t, t.new_zeros(*t.shape[:axis], missing, *t.shape[axis + 1 :])], axis)


def _cat_states(states: list[Any], size: int) -> Any:
    """Recurrent states `[layers, batch, hidden]` of all clients behind one another."""
    if isinstance(states[0], Tensor):
        return torch.cat([_padded(s, size, 1) for s in states], 1)
    return tuple(torch.cat([_padded(s, size, 1) for s in parts], 1) for parts in zip(*states, strict=True))


_RULES: dict[type[nn.Module], type[Stacked]] = {
    nn.Linear: _Linear,
    nn.LayerNorm: _LayerNorm,
    nn.GroupNorm: _GroupNorm,
    nn.Embedding: _Embedding,
    nn.MultiheadAttention: _Attention,
    **dict.fromkeys(CONVS, _Conv),
    **dict.fromkeys(BATCH_NORMS, _BatchNorm),
    **dict.fromkeys(_DROPOUTS, _Dropout),
}


_USUAL = (
    *(("padding_mode", "zeros"), ("max_norm", None), ("padding_idx", None), ("scale_grad_by_freq", False)),
    *(("bias_k", None), ("add_zero_attn", False)),
)
"""Options of convolutions, embeddings and attention the rules above know; with others a module runs per client."""


def _frozen(module: nn.Module) -> bool:
    """Whether a module is a batch norm with statistics nobody trains."""
    return isinstance(module, BATCH_NORMS) and module.track_running_stats and not tracks(module)


def _freeze(module: nn.Module, context: Context, info: ModelInfo) -> None:
    """Keep the frozen norms inside a module as they are, also in training."""
    for child, m in module.named_children():
        if _frozen(m):
            setattr(module, child, _FrozenNorm(context, m, child, info))
        else:
            _freeze(m, context, info)


def fold(module: nn.Module, context: Context, info: ModelInfo, name: str) -> nn.Module:
    """Replace every module that must know whose example it sees."""
    kind = type(module)
    if _frozen(module):
        return _FrozenNorm(context, module, name, info)
    own = any(f"{name}.{n}".lstrip(".") in info.shapes for n, _ in module.named_parameters(recurse=False))
    if own or kind in BATCH_NORMS or kind in _DROPOUTS:
        rule = _RULES.get(kind) if all(getattr(module, o, usual) == usual for o, usual in _USUAL) else None
        return (rule or PerClient)(context, module, name, info)
    for child, m in module.named_children():
        setattr(module, child, fold(m, context, info, f"{name}.{child}".lstrip(".")))
    return module
