"""Layers that know whose example they see: the stacked form of every module with parameters or randomness.

Each takes the folded batch of C * B examples its original would take, and finds the clients' own parameters in
the context of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from personafl import accel
from personafl.accel.second_derivatives import differentiable_gradients, graph_requested
from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.torch_internals import data_version, is_hooked
from personafl.core.types import Arithmetic, ModelInfo, Params

kernels: Any = accel.load_kernels("kernels")
norm_kernels: Any = accel.load_kernels("norm_kernels")

Channels = Literal["first", "last", "either"]
"""How images lie in memory; either: as is fastest."""
Follower = Literal["relu", "pool"]
"""What follows a convolution: ReLU, or 2x2 max-pooling."""
CONVS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
HEAVY = 2**18  # weights of a convolution
NARROW, WIDE, TALL = 16, 512, 32
"""Outputs at most, inputs and rows at least: such a product takes up to twice as long on an AMD CPU as its transpose.

On an Intel one it is a tenth this way or that; all other shapes are as fast or faster as they are, on both.
"""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 3,
    nn.Dropout2d: 4,
    nn.Dropout3d: 5,
}
"""The axes of a batch whose channels are dropped; None: single numbers are."""
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


def frozen(m: nn.Module) -> bool:
    """Whether a module is a batch norm with statistics nobody trains; it keeps them, also in training."""
    return isinstance(m, BATCH_NORMS) and m.track_running_stats and not tracks(m)


class Context:
    """What the replaced modules look up during a forward pass."""

    params: Params
    valid: Tensor | None  # [C, B], None when no place is padding
    keys: Tensor | None  # [C], None outside training
    count: int  # C
    rows: int  # B, the rows of each client
    calls: int  # of dropout, in this forward pass
    drops: bool = True  # not where a module is compared with one that draws otherwise
    half: bool = False  # drop half of all numbers, where draws are looked at: a small share may drop none
    arithmetic: Arithmetic = "float32"  # of convolutions on a GPU
    channels: Channels = "either"
    one_by_one: bool = False  # on a GPU: a stack of one is left to PyTorch's own layers
    tape: list[Taped] | None = None  # linear layers as they run, where their gradients are taken by hand
    threads: int = 0  # for batched products, where all else runs on one; 0: as PyTorch has it
    noted: dict[_ClientRows, list[bool]] | None = None
    """Which clients a backward pass gives a gradient, by the split of a stacked tensor; None: nobody asks."""

    def coarse(self, x: Tensor) -> bool:
        """Whether a linear layer takes this in bf16: sequences; where an example is one row, rounding weights costs
        more than its product gains."""
        return self.arithmetic == "bf16" and x.is_cuda and x.dim() > 2


class _ClientRows(Function):
    """Each client's part of a stacked tensor; the backward pass notes the clients whose part has no gradient.

    A forward pass that is called for one client after the other may use a parameter for some clients and not for
    others. The gradient of the stack is zero there, and a module of one's own would have none.
    """

    @staticmethod
    def forward(ctx: Any, context: Context, stacked: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.context, ctx.shape, ctx.stacked_clients = context, stacked.shape, len(stacked)
        return stacked.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None]:
        some = next((g for g in grads if g is not None), None)
        if ctx.context.noted is not None:
            before = ctx.context.noted.get(ctx, [False] * len(grads))
            ctx.context.noted[ctx] = [b or g is not None for b, g in zip(before, grads, strict=True)]
        if some is None:
            return None, None
        return None, torch.stack([some.new_zeros(ctx.shape[1:]) if g is None else g for g in grads])


def clients_without_gradient(loss: Tensor, leaves: Params, noted: Mapping[Any, Sequence[bool]]) -> dict[str, list[int]]:
    """Find the clients whose part of a tensor a loss does not depend on, where it depends on that of others.

    Args:
        loss: What was differentiated.
        leaves: The stacked tensors it was differentiated by.
        noted: What the backward pass noted in `Context.noted`.

    Returns:
        The places of these clients in the stack, by the names of such tensors.
    """
    if all(all(clients) for clients in noted.values()):
        return {}
    names = {id(t): n for n, t in leaves.items()}
    have: dict[str, list[bool]] = {}
    todo: list[tuple[Any, tuple[bool, ...] | None]] = [(loss.grad_fn, None)]  # nodes, and for which clients they count
    seen: set[tuple[Any, Any]] = set()
    while todo:
        node, of = todo.pop()
        if node is None or (node, of) in seen:
            continue
        seen.add((node, of))
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            count = len(leaves[name])
            before = have.get(name, [False] * count)
            have[name] = [b or h for b, h in zip(before, of or [True] * count, strict=True)]
        elif size := getattr(node, "stacked_clients", 0):
            of = tuple(noted.get(node, [False] * size))
        todo += [(before, of) for before, _ in node.next_functions]
    return {n: [c for c, h in enumerate(row) if not h] for n, row in have.items() if not all(row)}


def client_rows(context: Context, stacked: Tensor) -> Sequence[Tensor]:
    """Return each client's part of a stacked tensor."""
    if len(stacked) == 1 or not stacked.requires_grad:
        return stacked.unbind()
    return cast(Sequence[Tensor], _ClientRows.apply(context, stacked))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Taped:
    """A run of linear layers: what their gradients are made of."""

    names: list[str]  # of weight and bias of each, empty where it is shared
    seen: list[Tensor]  # [C, B, in] of each
    weights: list[Tensor]
    out: Tensor  # [C * B, ...]
    version: int | None  # of the output's memory: it is another one after a change in place


class Stacked(nn.Module):
    """A module replaced by its stacked form. `get` finds a parameter: a client's own, or the shared, frozen one."""

    def __init__(self, context: Context, original: nn.Module, name: str, info: ModelInfo) -> None:
        super().__init__()
        self.context = context
        self.own = {n: f"{name}.{n}".lstrip(".") for n, _ in (*original.named_parameters(), *original.named_buffers())}
        self.own = {n: full for n, full in self.own.items() if full in info.shapes}
        self.original = original
        self.path = name  # of the module it replaces

    def __getattr__(self, name: str) -> Any:
        """What a forward may ask its layers: sizes and switches, but no tensor, which would be nobody's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("original"), name)
            if isinstance(value, (bool, int, float, str, tuple)):
                return value
            raise

    def get(self, name: str) -> Tensor | None:
        if name in self.own:
            return self.context.params[self.own[name]]
        shared = getattr(self.original, name)
        return None if shared is None else shared.expand(self.context.count, *shared.shape)

    @property
    def watched(self) -> bool:
        """Whether somebody wants to see what enters or leaves it."""
        return is_hooked(self, "forward", "forward_pre")

    def split(self, x: Tensor) -> Tensor:
        """The folded batch with its client axis back: `[C, B, ...]`."""
        self.verify_rows(x.shape[0])
        return x.reshape(self.context.count, -1, *x.shape[1:])

    def verify_rows(self, rows: int) -> None:
        """Refuse rows that are not the same number of rows for every example of every client."""
        context = self.context
        if context.count > 1 and rows % (context.count * context.rows):
            raise UserError(
                f"layer {self.path!r} received {rows} rows for {context.count} clients with {context.rows} examples "
                "each. The forward pass regroups the rows of a batch, so they cannot be told apart by client; train "
                "stacks of one client instead (--chunk 1, or Machine(chunk=1))"
            )


class _Linears(Function):
    """Every client's own linear maps, one behind the other, with ReLU between them.

    One node for autograd instead of three a layer, which at the size of a minibatch is most of the work. Its own
    weight gradient would be a transposed view, which is slow to add.
    """

    @staticmethod
    def forward(ctx: Any, threads: int, x: Tensor, *params: Tensor | None) -> Tensor:
        *seen, out = _outputs(x, params, threads)
        ctx.save_for_backward(*seen, *params)
        ctx.threads = threads
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        depth, wanted = len(ctx.saved_tensors) // 3, ctx.needs_input_grad[1:]
        seen, params = ctx.saved_tensors[:depth], ctx.saved_tensors[depth:]
        if graph_requested():
            return None, *differentiable_gradients(_plain_linears, (seen[0], *params), [grad], wanted)
        return None, *gradients(grad, seen, params[::2], wanted, ctx.threads)


def _plain_linears(x: Tensor, *params: Tensor | None) -> Tensor:
    """Linear layers with ReLU between them, as operations that autograd knows."""
    for place in range(0, len(params), 2):
        weight, bias = params[place], params[place + 1]
        assert weight is not None
        x = torch.bmm(x.relu() if place else x, weight.transpose(1, 2))
        x = x if bias is None else x + bias.unsqueeze(1)
    return x


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
    with _Threads(threads, x.shape[0]):
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
    with _Threads(threads, grad.shape[0]):
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
    (size, inputs), outputs = x.shape[1:], weight.shape[1]
    if x.is_cuda or outputs > NARROW or inputs < WIDE or size < TALL:
        return torch.bmm(x, weight.transpose(1, 2))
    out = torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2)
    return out.clone() if out.is_contiguous() else out.contiguous()  # no view: others may work on it in place


class WithoutAutocast:
    """No autocast inside: where bf16 is asked for, modules of one client run under it, but not what is ours."""

    def __init__(self, x: Tensor) -> None:
        on = torch.is_autocast_enabled(x.device.type)
        self.inside = torch.autocast(x.device.type, enabled=False) if on else None

    def __enter__(self) -> None:
        if self.inside is not None:
            self.inside.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *why: Any) -> None:
        if self.inside is not None:
            self.inside.__exit__(*why)


def products(threads: int, rows: Tensor, *params: Tensor | None, coarse: bool = False) -> Tensor:
    """Rows `[C, B, in]` through linear layers with ReLU between them; `params` are a weight and a bias for each.

    `coarse`: in bf16, and so is what comes out, as under autocast.
    """
    if coarse:
        rows, params = rows.bfloat16(), tuple(None if p is None else p.bfloat16() for p in params)
    with WithoutAutocast(rows):
        return cast(Tensor, _Linears.apply(threads, rows, *params))  # type: ignore[no-untyped-call]


class StackedLinear(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return _together([self], x)


def _together(layers: Sequence[StackedLinear], x: Tensor) -> Tensor:
    params = [layer.get(n) for layer in layers for n in ("weight", "bias")]
    first, last = params[0], params[-2]
    assert first is not None and last is not None
    context = layers[0].context
    layers[0].verify_rows(x.shape[0])
    rows = x.reshape(context.count, -1, x.shape[-1]).to(first.dtype)  # [C, B, in]
    tape, threads = context.tape, context.threads
    if tape is None:
        return products(threads, rows, *params, coarse=context.coarse(x)).view(*x.shape[:-1], last.shape[1])
    *seen, out = _outputs(rows, params, threads)
    out = out.view(*x.shape[:-1], last.shape[1])
    names = [layer.own.get(n, "") for layer in layers for n in ("weight", "bias")]
    tape.append(Taped(names, seen, cast(list[Tensor], params[::2]), out, data_version(out)))
    return out


def linears(layers: Sequence[StackedLinear], x: Tensor) -> Tensor:
    """Linear layers with ReLU between them, all in one where nobody looks at what is between."""
    if not any(m.watched for m in layers):
        return _together(layers, x)
    *front, last = layers
    out: Tensor = last(linears(front, x).relu() if front else x)
    return out


def _channels_last(images: Tensor) -> bool:
    return images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)


class _ChannelsLast(Function):
    """Images channels last in memory, whose gradient lies as the images did."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class StackedConv(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        conv = cast(nn.Conv2d, self.original)
        weight, bias = self.get("weight"), self.get("bias")
        assert weight is not None
        call = CONVS[type(self.original)]
        rest = (conv.stride, conv.padding, conv.dilation)
        if self.fast(weight):
            return self._launched(x, kernels.PLAIN, weight.dtype)
        if x.dim() == 4:
            x = self._arranged(x, weight)
        if self.context.count == 1:
            alone = self._as(x, weight.squeeze(0))
            return call(x, alone, None if bias is None else bias.squeeze(0), *rest, conv.groups)
        parts = zip(self.split(x), weight, [None] * len(weight) if bias is None else bias, strict=True)
        return torch.cat([call(r, self._as(r, w), b, *rest, conv.groups) for r, w, b in parts])  # grouped is slower

    def _as(self, images: Tensor, weight: Tensor) -> Tensor:
        """The weights as the images lie in memory: a GPU would arrange them anew for each of its three products."""
        last = images.is_cuda and _channels_last(images)
        return weight.contiguous(memory_format=torch.channels_last) if last else weight

    def fast(self, weight: Tensor) -> bool:
        """Whether it runs as a kernel for all clients."""
        alone = self.context.one_by_one and self.context.count == 1
        return weight.is_cuda and not alone and self.has_kernel(weight.dtype)

    def has_kernel(self, dtype: torch.dtype) -> bool:
        """Whether there is one for it (float64 has none)."""
        conv = self.original
        return kernels is not None and dtype == torch.float32 and type(conv) is nn.Conv2d and kernels.fits(conv)

    @property
    def heavy(self) -> bool:
        """Whether one client's weights are so many that cuDNN is faster with them, client by client."""
        return cast(nn.Conv2d, self.original).weight.numel() > HEAVY

    def _launched(self, x: Tensor, mode: int, dtype: torch.dtype) -> Tensor:
        weight, bias, pad = self.get("weight"), self.get("bias"), cast(nn.Conv2d, self.original).padding[0]
        assert weight is not None and isinstance(pad, int)
        self.verify_rows(x.shape[0])
        out: Tensor = kernels.convolution(x, weight, bias, pad, mode, self.context.arithmetic, dtype)
        return out.contiguous() if self.context.channels == "first" else out

    def _arranged(self, x: Tensor, weight: Tensor) -> Tensor:
        """Images as they are convolved fastest: channels last, on a CPU unless weights, which follow, are larger."""
        channels = self.context.channels
        larger = not x.is_cuda and weight.numel() > x.numel()
        if channels == "first" or (channels == "either" and larger):
            return x.contiguous()
        if x.shape[1] == 1:  # contiguous either way: the strides must say which is meant
            return x.reshape(len(x), *x.shape[2:], 1).movedim(3, 1)
        if not x.requires_grad or not x.is_contiguous():
            return x.contiguous(memory_format=torch.channels_last)
        # For one row, PyTorch's instance norm gives a wrong gradient if that of its output is channels last.
        return cast(Tensor, _ChannelsLast.apply(x))  # type: ignore[no-untyped-call]

    def with_relu(self, x: Tensor, *, pooled: bool, inner: bool) -> Tensor | None:
        """ReLU and pooling in the same kernel; None where there is none. `inner`: another of these follows."""
        if not self.in_one_kernel():
            return None
        dtype = torch.bfloat16 if inner and self.context.arithmetic == "bf16" else torch.float32
        return self._launched(x, kernels.POOL if pooled else kernels.RELU, dtype)

    def in_one_kernel(self) -> bool:
        """Whether what follows it may be part of it: there is a kernel, and nobody looks at what it gives."""
        weight = self.get("weight")
        assert weight is not None
        return self.fast(weight) and not self.watched


def conv_relu(conv: StackedConv, x: Tensor, then: Sequence[Follower], into: Sequence[StackedConv] = ()) -> Tensor:
    """A convolution, `then` ReLU and perhaps 2x2 max-pooling: one kernel where there is one.

    `into` are convolutions of other such blocks, if its output goes there and nowhere else. It may then be of lower
    precision, if these have a kernel as well.
    """
    inner = bool(into) and all(m.in_one_kernel() for m in into)
    out = conv.with_relu(x, pooled="pool" in then, inner=inner)
    if out is not None:
        return out
    out = cast(Tensor, conv(x))
    for step in then:
        out = F.relu(out) if step == "relu" else F.max_pool2d(out, 2)
    return out


class StackedBatchNorm(Stacked):
    """Batch normalisation by each client's real examples.

    Without running statistics (policy `drop`) the batch at hand gives them, also in evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self._alone(x):
            return self._own(x)
        norm, weight, bias = cast(nn.BatchNorm2d, self.original), self.get("weight"), self.get("bias")
        rows = self.split(x if weight is None else x.to(weight.dtype))  # [C, B, F, ...]
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
        if weight is not None and bias is not None:
            out = out * weight.view(shape) + bias.view(shape)
        return out.flatten(0, 1)

    def _alone(self, x: Tensor) -> bool:
        """Whether it is the norm of one client by itself, without padding."""
        own = self.context.one_by_one or not x.is_cuda
        return own and self.context.count == 1 and self.context.valid is None and len(x) > 1

    def _own(self, x: Tensor) -> Tensor:
        """PyTorch's own, or a faster one."""
        out = self._in_few_passes(x)
        if out is not None:
            return out
        mean, var, weight, bias = self._numbers()
        norm = cast(nn.BatchNorm2d, self.original)
        return F.batch_norm(x, mean, var, weight, bias, self._moves(mean), norm.momentum or 0.0, norm.eps)

    def with_relu(self, x: Tensor, added: Tensor | None) -> Tensor | None:
        """ReLU in the same passes, of the sum with what is added; None where there are none."""
        if self.watched or not self._alone(x):
            return None
        if added is not None and not (isinstance(added, Tensor) and added.dtype == x.dtype and _channels_last(added)):
            return None
        if added is not None and added.shape != x.shape:
            return None
        return self._in_few_passes(x, added=added, relu=True)

    def _in_few_passes(self, x: Tensor, *, added: Tensor | None = None, relu: bool = False) -> Tensor | None:
        mean, var, weight, bias = self._numbers()
        if weight is None or bias is None or norm_kernels is None or not self._moves(mean):
            return None
        if not norm_kernels.batch_fits(x, weight, bias):
            return None
        norm = cast(nn.BatchNorm2d, self.original)
        out: Tensor | None = norm_kernels.batch_norm(
            x, weight, bias, mean, var, norm.momentum or 0.0, norm.eps, added=added, relu=relu
        )
        return out

    def _numbers(self) -> tuple[Tensor | None, ...]:
        """One client's running mean and variance, scale and shift."""
        return tuple(None if t is None else t.squeeze(0) for t in map(self.get, (*RUNNING, "weight", "bias")))

    def _moves(self, mean: Tensor | None) -> bool:
        """Whether the batch at hand is what norms it."""
        return self.training or mean is None

    def _track(self, mean: Tensor, var: Tensor, places: Tensor) -> None:
        norm = cast(nn.BatchNorm2d, self.original)
        rate = cast(float, norm.momentum)
        unbiased = var * (places / (places - 1).clamp(min=1)).unsqueeze(1)
        for name, new in (("running_mean", mean), ("running_var", unbiased)):
            old = self.get(name)
            assert old is not None
            old.data.lerp_(new.to(old.dtype), rate)  # as PyTorch's own: no sign of it to what another client saved


def norm_relu(norm: StackedBatchNorm, x: Tensor, added: Tensor | None = None, in_place: bool = False) -> Tensor:
    """A batch norm and ReLU behind it, with something added in between if it is given: together where that is known.

    `in_place`: the sum is of the norm's type, whatever is added.
    """
    out = norm.with_relu(x, added)
    if out is not None:
        return out
    out = norm(x)
    if added is None:
        return F.relu(out)
    return F.relu(out.add_(added) if in_place else out + added)


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


class StackedLayerNorm(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        norm, weight, bias = cast(nn.LayerNorm, self.original), self.get("weight"), self.get("bias")
        if weight is not None and bias is not None and self._in_one_pass(x):
            self.verify_rows(x.shape[0])
            rows = x.reshape(self.context.count, -1, x.shape[-1])
            normed: Tensor = norm_kernels.layer_norm(rows, weight, bias, norm.eps).view(x.shape)
            return normed
        if self.context.count == 1:  # PyTorch's own: one pass over memory instead of three
            scale, shift = (None if t is None else t.squeeze(0) for t in (weight, bias))
            return F.layer_norm(x, norm.normalized_shape, scale, shift, norm.eps)
        rows = self.split(F.layer_norm(x, norm.normalized_shape, eps=norm.eps))
        return _affine(rows, weight, bias, len(norm.normalized_shape))

    def _in_one_pass(self, x: Tensor) -> bool:
        """Whether a kernel of our own has all clients; a client that runs by itself has PyTorch's."""
        shape = cast(nn.LayerNorm, self.original).normalized_shape
        return norm_kernels is not None and not self.context.one_by_one and norm_kernels.fits(x, shape)


class StackedGroupNorm(Stacked):
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


class StackedEmbedding(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        table = self.get("weight")
        assert table is not None
        first = torch.arange(table.shape[0], device=x.device) * table.shape[1]
        rows = self.split(x)
        outside = (rows < 0) | (rows >= table.shape[1])  # would be rows of another client
        if not x.is_cuda and bool(outside.any()):
            name, token = self.own.get("weight", "a frozen table"), int(rows[outside][0])
            raise UserError(f"{name}: no row {token} in an embedding of {table.shape[1]} rows")
        places = rows + first.view(-1, *[1] * (rows.dim() - 1))
        if x.is_cuda:  # PyTorch's own check then, when the GPU comes to it
            places = places.masked_fill(outside, table.shape[0] * table.shape[1])
        return F.embedding(places, table.flatten(0, 1)).flatten(0, 1)


class StackedDropout(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        drop = cast(nn.Dropout, self.original)
        return drop_by_client(self, x, drop.p, DROPOUTS[type(drop)]) if self.training else x


def drop_by_client(layer: Stacked, x: Tensor, p: float, axes: int | None) -> Tensor:
    """Dropout of a folded batch in training, by the streams of the clients this layer knows.

    Of whole channels, if a number of axes is given that the batch must have.
    """
    context = layer.context
    if axes is not None and x.dim() != axes:
        raise ValueError("dropout of channels without a batch would drop examples")
    if context.keys is None or p == 0 or not context.drops:
        return x
    return dropped(layer.split(x), p, context, None if axes is None else 1).view(x.shape)


def dropped(rows: Tensor, p: float, context: Context, channels: int | None = None) -> Tensor:
    """`[C, ...]` with some numbers zero and the others scaled up, whole channels where their axis behind B is given."""
    assert context.keys is not None
    p = 0.5 if context.half else p
    if p == 1:
        return rows * 0
    context.calls += 1
    keys = rng.extend(context.keys, context.calls)
    if channels is None and kernels is not None and rows.is_cuda and rows.dtype == torch.float32:
        dropped: Tensor = kernels.dropout(rows.flatten(1), keys, p).view(rows.shape)
        return dropped
    shape = rows.shape[1:] if channels is None else rows.shape[1 : 2 + channels]
    draws = rng.uniform(keys, shape.numel(), torch.float32).view(rows.shape[0], *shape)
    kept = (draws >= p).view(*draws.shape, *[1] * (rows.dim() - draws.dim()))
    return torch.where(kept, rows / (1 - p), 0)
