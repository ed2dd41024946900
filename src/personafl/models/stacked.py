"""Run any `nn.Module` over stacked parameters.

The clients' minibatches are folded into one batch of C * B examples and the module's own forward is
run on it once. Whatever has no parameters (activations, pooling, reshapes) works on the folded batch as
it is; every module that has some is replaced by one that knows which examples are whose:

    Linear, Embedding, norms     batched over clients
    Conv1d, 2d, 3d               one grouped convolution on a GPU, one call per client on a CPU
    Dropout                      drawn from each client's own stream
    anything else                called once per client with that client's parameters (LSTM, attention, your own)

A forward that mixes the examples of a batch would mix clients. So the folded model is checked once,
with random parameters in float64, against the module run alone; if they differ, the whole module is
called once per client.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from personafl.core import rng
from personafl.core.types import BufferPolicy, Layer, ModelInfo, Params

_CONVS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS: dict[type[nn.Module], int | None] = {
    nn.Dropout: None,
    nn.Dropout1d: 1,
    nn.Dropout2d: 1,
    nn.Dropout3d: 1,
}  # channel axis kept, if any
_RUNNING = ("running_mean", "running_var")


class StackedModel:
    """A module as a function of stacked parameters."""

    def __init__(self, module: nn.Module, example: Tensor, head: str | None = None, policy: BufferPolicy = "average"):
        """`example` is a batch of two inputs; `head` a pattern of parameter names, by default the last linear layer."""
        self.module = copy.deepcopy(module).eval()
        if policy == "drop":
            _forget_statistics(self.module)
        self.info = describe(self.module, example, head, policy)
        state = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.initial: Params = {n: state[n].detach().clone() for n in self.info.shapes}
        self._context = _Context()
        self.whole = not self._agrees(example, whole=False)
        if self.whole and not self._agrees(example, whole=True):
            raise ValueError(
                f"{type(module).__name__}: the same input and random stream give different outputs each time"
            )
        self._folded = self._fold(self.whole)
        self._head: nn.Module | None = None
        self.convolutional = any(type(m) in _CONVS for m in self.module.modules())
        # Norms without statistics use those of the batch, also in evaluation.
        self.looks_at_batches = self.whole or any(
            isinstance(m, _BATCH_NORMS) and not m.track_running_stats for m in self.module.modules()
        )
        self.parallel = not any(isinstance(m, _PerClient) for m in self._folded.modules())  # see _PerClient

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Outputs `[C, B, ...]`; training mode when the clients' random streams for this step are given."""
        context = self._context
        context.params, context.valid, context.keys = params, valid, keys
        context.count, context.calls = x.shape[0], 0
        if self._folded.training != (keys is not None):
            self._folded.train(keys is not None)
        folded = x.flatten(0, 1)
        if self.convolutional and folded.dim() == 4 and not folded.is_cuda:
            folded = folded.contiguous(memory_format=torch.channels_last)
        out: Tensor = self._folded(folded)
        context.params = {}
        return out.view(x.shape[0], x.shape[1], *out.shape[1:])

    def features(
        self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What enters the head, flattened to `[C, B, D]`, and the outputs."""
        if not self.info.head:
            raise ValueError("this model has no head; set model.head to a pattern of its parameters")
        if self._head is None:
            self._head = self._find_head()
        seen: list[Tensor] = []
        handle = self._head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            out = self(params, x, valid, keys)
        finally:
            handle.remove()
        return seen[0].reshape(x.shape[0], x.shape[1], -1), out

    def _find_head(self) -> nn.Module:
        """The first module of the forward pass that holds a parameter of the head."""
        holders = [
            m for m in self._folded.modules() if isinstance(m, _Stacked) and self.info.head & set(m.own.values())
        ]
        if not holders or any(isinstance(m, _PerClient) and set(m.own.values()) - self.info.head for m in holders):
            raise ValueError("the features of this model cannot be told apart: its head is not a layer of its own")
        order = list(self.info.shapes)
        return min(holders, key=lambda m: min(order.index(n) for n in m.own.values()))

    def copy(self) -> StackedModel:
        """Another one, for another thread."""
        return copy.deepcopy(self)

    def to(self, device: torch.device, dtype: torch.dtype) -> StackedModel:
        """Move what is shared by all clients: frozen parameters and constants."""
        for part in (self.module, self._folded):
            part.to(device, dtype)
        self.initial = {n: t.to(device, dtype) for n, t in self.initial.items()}
        return self

    def client(self, params: Params) -> nn.Module:
        """One client's ordinary module, from its parameters (no client axis)."""
        module = copy.deepcopy(self.module)
        missing, unexpected = module.load_state_dict(params, strict=False)
        assert not unexpected and not set(missing) & set(self.info.shapes)
        return module

    def _fold(self, whole: bool) -> nn.Module:
        module = copy.deepcopy(self.module)
        folded = (
            _PerClient(self._context, module, "", self.info) if whole else _fold(module, self._context, self.info, "")
        )
        return folded.eval()

    def _agrees(self, example: Tensor, *, whole: bool) -> bool:
        """Whether two clients in one stack come out as each does alone, in float64."""
        self.convolutional, self._folded = False, self._fold(whole).double()
        alone = copy.deepcopy(self.module).double()
        x = (
            torch.stack([example, example.flip(0) / 2]).double()
            if example.is_floating_point()
            else example[torch.tensor([[0, 1], [1, 1]])]
        )
        params = {}
        for i, (n, t) in enumerate(self.initial.items()):
            noise = rng.uniform(rng.key(0, "check", i, torch.arange(2)), t.numel()).view(2, *t.shape)
            params[n] = t.double() + 0.1 * noise  # positive, so that a running variance stays one
        try:
            with torch.no_grad():
                before = {n: b.clone() for n, b in self._folded.named_buffers()}
                truth = torch.stack(
                    [functional_call(alone, {n: t[c] for n, t in params.items()}, (x[c],)) for c in range(2)]
                )
                stacked = self(params, x)
                trained, again, first, second = (
                    self({n: t[rows].clone() for n, t in params.items()}, x[rows], keys=torch.arange(2)[rows])
                    for rows in (slice(0, 2), slice(0, 2), slice(0, 1), slice(1, 2))
                )
                changed = _changed(before, self._folded)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            if whole:
                raise  # the module itself fails on this input: let its own words be seen
            return False
        if changed:
            raise ValueError(
                f"buffer {changed!r} is changed by the forward pass; only batch norms may keep running statistics"
            )
        pairs = ((stacked, truth), (trained, again), (trained, torch.cat([first, second])))
        return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)


def _changed(before: Params, module: nn.Module) -> str | None:
    """The first buffer that is no longer what it was: state that clients would share unawares."""
    for n, b in module.named_buffers():
        if not n.endswith("num_batches_tracked") and not torch.equal(b, before[n]):
            return n.replace("original.", "")
    return None


def _forget_statistics(module: nn.Module) -> None:
    """Make every norm whose statistics would be a client's state use those of the batch at hand."""
    for m in module.modules():
        if _tracks(m):
            norm = cast(nn.BatchNorm2d, m)
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def describe(module: nn.Module, example: Tensor, head: str | None, policy: BufferPolicy) -> ModelInfo:
    """What algorithms need to know about a module, from its names and one forward pass."""
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    odd = [n for n in trainable if "/" in n]
    if odd:
        raise ValueError(
            f"parameter {odd[0]!r}: names with a slash are used for a client's further models; rename the module"
        )
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient")
    buffers = [f"{prefix}.{n}".lstrip(".") for prefix, m in module.named_modules() if _tracks(m) for n in _RUNNING]
    state = dict(module.named_buffers())
    shapes = {n: tuple(p.shape) for n, p in trainable.items()} | {n: tuple(state[n].shape) for n in buffers}
    layers, other, activations = _layers(module, example, trainable)
    return ModelInfo(shapes, frozenset(buffers), _head(module, trainable, head), layers, other, activations, policy)


def _tracks(m: nn.Module) -> bool:
    """Whether a norm's running statistics are part of a client's state; those of a frozen norm are not."""
    if not isinstance(m, _BATCH_NORMS) or not m.track_running_stats:
        return False
    if m.momentum is None:
        raise ValueError(
            f"{type(m).__name__} with momentum=None (a cumulative average) is not supported; give it a number"
        )
    own = list(m.parameters(recurse=False))
    return not own or any(p.requires_grad for p in own)


def _head(module: nn.Module, trainable: dict[str, nn.Parameter], pattern: str | None) -> frozenset[str]:
    if pattern is None:
        linear = [
            n for n, m in module.named_modules() if isinstance(m, nn.Linear) and f"{n}.weight".lstrip(".") in trainable
        ]
        if not linear:
            return frozenset()
        last = linear[-1]
        return frozenset(n for n in trainable if n.rpartition(".")[0] == last)
    found = frozenset(n for n in trainable if fnmatch.fnmatchcase(n, pattern))
    if not found:
        raise ValueError(f"model.head={pattern!r} matches no parameter; the model has {', '.join(trainable)}")
    return found


def _layers(
    module: nn.Module, example: Tensor, trainable: dict[str, nn.Parameter]
) -> tuple[tuple[Layer, ...], int, int]:
    """Convolution and linear layers in forward order; the FLOP of everything else; numbers an example leaves behind."""
    names = {m: n for n, m in module.named_modules()}
    found: dict[str, Layer] = {}

    def note(m: nn.Module, _: Any, out: Tensor) -> None:
        name = f"{names[m]}.weight".lstrip(".")
        weight, bias = cast(Tensor, m.weight), cast("Tensor | None", m.bias)
        outputs = out.numel() // len(example)
        macs = outputs * weight[0].numel() if not isinstance(m, nn.Linear) else outputs * weight.shape[1]
        bias_name = name[: -len("weight")] + "bias"
        if name in found:  # called again: the work adds up
            macs, outputs = macs + found[name].macs, outputs + found[name].outputs
        found[name] = Layer(
            name,
            bias_name if bias is not None and bias_name in trainable else None,
            tuple(weight.shape),
            macs,
            0 if bias is None else outputs,
        )

    sizes: list[int] = []

    def measure(_: nn.Module, __: Any, out: Any) -> None:
        sizes.append(out.numel() // len(example) if isinstance(out, Tensor) else 0)

    known = (nn.Linear, *_CONVS)
    handles = [m.register_forward_hook(note) for m in module.modules() if type(m) in known]
    handles += [m.register_forward_hook(measure) for m in module.modules() if not list(m.children())]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(example)
    for h in handles:
        h.remove()
    other = counter.get_total_flops() // len(example) - 2 * sum(layer.macs for layer in found.values())
    layers = tuple(layer for layer in found.values() if layer.weight in trainable)
    frozen = sum(2 * layer.macs + layer.outputs for layer in found.values() if layer.weight not in trainable)
    return layers, other + frozen, sum(sizes)


class _Context:
    """What the replaced modules look up during a forward pass."""

    params: Params
    valid: Tensor | None  # [C, B], None when no place is padding
    keys: Tensor | None  # [C], None outside training
    count: int  # C
    calls: int  # of dropout, in this forward pass


class _Stacked(nn.Module):
    """A module replaced by its stacked form. `get` finds a parameter: a client's own, or the shared, frozen one."""

    def __init__(self, context: _Context, original: nn.Module, name: str, info: ModelInfo) -> None:
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


class _BatchedLinear(Function):
    """Every client's own linear map. Autograd's weight gradient would be a transposed view, which is slow to add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda or weight.shape[1] >= weight.shape[2]:
            out = torch.bmm(x, weight.transpose(1, 2))
        else:  # on a CPU half the time of the above where a layer narrows
            out = torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2).contiguous()
        return out if bias is None else out.add_(bias.unsqueeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if for_x else None,
            torch.bmm(grad.transpose(1, 2), x) if for_weight else None,
            grad.sum(1) if for_bias else None,
        )


class _Linear(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.get("weight"), self.get("bias")
        assert weight is not None
        rows = x.reshape(self.context.count, -1, x.shape[-1])  # [C, B, in]
        out = cast(Tensor, _BatchedLinear.apply(rows, weight, bias))  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], weight.shape[1])


class _Conv(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        conv = cast(nn.Conv2d, self.original)
        weight, bias = self.get("weight"), self.get("bias")
        assert weight is not None
        call = _CONVS[type(self.original)]
        rest = (conv.stride, conv.padding, conv.dilation)
        if self.context.count == 1:
            return call(x, weight[0], None if bias is None else bias[0], *rest, conv.groups)
        rows = self.split(x)
        if not x.is_cuda:  # grouped convolution is slower than a loop there
            parts = zip(rows, weight, [None] * len(rows) if bias is None else bias, strict=True)
            return torch.cat([call(r, w, b, *rest, conv.groups) for r, w, b in parts])
        wide = rows.transpose(0, 1).flatten(1, 2)  # [B, C * in, ...]
        out = call(wide, weight.flatten(0, 1), None if bias is None else bias.flatten(), *rest, len(rows) * conv.groups)
        return out.view(out.shape[0], len(rows), -1, *out.shape[2:]).transpose(0, 1).flatten(0, 1)


class _BatchNorm(_Stacked):
    """Batch normalisation by each client's real examples.

    Without running statistics (policy `drop`) the batch at hand gives them, also in evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        norm = cast(nn.BatchNorm2d, self.original)
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


class _LayerNorm(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        norm = cast(nn.LayerNorm, self.original)
        rows = self.split(F.layer_norm(x, norm.normalized_shape, eps=norm.eps))
        return _affine(rows, self.get("weight"), self.get("bias"), len(norm.normalized_shape))


class _GroupNorm(_Stacked):
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


class _Embedding(_Stacked):
    def forward(self, x: Tensor) -> Tensor:
        table = self.get("weight")
        assert table is not None
        first = torch.arange(table.shape[0], device=x.device) * table.shape[1]
        rows = self.split(x)
        places = rows + first.view(-1, *[1] * (rows.dim() - 1))
        return F.embedding(places, table.flatten(0, 1)).flatten(0, 1)


class _Dropout(_Stacked):
    """Dropout drawn from each client's own stream, one draw per call of a step."""

    def forward(self, x: Tensor) -> Tensor:
        drop = cast(nn.Dropout, self.original)
        if self.context.keys is None or drop.p == 0:
            return x
        if drop.p == 1:
            return x * 0
        self.context.calls += 1
        keys = rng.extend(self.context.keys, self.context.calls)
        rows = self.split(x)
        channels = _DROPOUTS[type(self.original)]
        shape = rows.shape[1:] if channels is None else rows.shape[1 : 2 + channels]
        draws = rng.uniform(keys, shape.numel(), torch.float32).view(rows.shape[0], *shape)
        kept = (draws >= drop.p).view(*draws.shape, *[1] * (rows.dim() - draws.dim()))
        return torch.where(kept, rows / (1 - drop.p), 0).flatten(0, 1)


class _FrozenNorm(_Stacked):
    """A batch norm nobody trains: it keeps the statistics it came with."""

    def forward(self, x: Tensor) -> Tensor:
        n = cast(nn.BatchNorm2d, self.original)
        return F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, training=False, eps=n.eps)


class _PerClient(_Stacked):
    """Any module, called once for each client with that client's parameters and real examples.

    Randomness inside it is made the client's own by seeding PyTorch's generator for the call, which is
    why a model with such a part does not run in several threads.
    """

    def __init__(self, context: _Context, original: nn.Module, name: str, info: ModelInfo) -> None:
        super().__init__(context, original, name, info)
        _freeze(original, context, info)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        count, keys, valid = self.context.count, self.context.keys, self.context.valid
        recurrent = isinstance(self.original, nn.RNNBase)
        axis = 1 if recurrent and not self.original.batch_first else 0
        outs = []
        for c, part in enumerate(x.chunk(count, axis)):
            own = {n: self.context.params[full][c] for n, full in self.own.items()}
            real = part.shape[axis] if valid is None else int(valid[c].sum())
            part = part.narrow(axis, 0, real)
            if keys is None:
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


_RULES: dict[type[nn.Module], type[_Stacked]] = {
    nn.Linear: _Linear,
    nn.LayerNorm: _LayerNorm,
    nn.GroupNorm: _GroupNorm,
    nn.Embedding: _Embedding,
    **dict.fromkeys(_CONVS, _Conv),
    **dict.fromkeys(_BATCH_NORMS, _BatchNorm),
    **dict.fromkeys(_DROPOUTS, _Dropout),
}


_USUAL = (("padding_mode", "zeros"), ("max_norm", None), ("padding_idx", None), ("scale_grad_by_freq", False))
"""Options of convolutions and embeddings the rules above know; with others a module runs per client."""


def _frozen(module: nn.Module) -> bool:
    """Whether a module is a batch norm with statistics nobody trains."""
    return isinstance(module, _BATCH_NORMS) and module.track_running_stats and not _tracks(module)


def _freeze(module: nn.Module, context: _Context, info: ModelInfo) -> None:
    """Keep the frozen norms inside a module as they are, also in training."""
    for child, m in module.named_children():
        if _frozen(m):
            setattr(module, child, _FrozenNorm(context, m, child, info))
        else:
            _freeze(m, context, info)


def _fold(module: nn.Module, context: _Context, info: ModelInfo, name: str) -> nn.Module:
    """Replace every module that must know whose example it sees."""
    kind = type(module)
    if _frozen(module):
        return _FrozenNorm(context, module, name, info)
    own = any(f"{name}.{n}".lstrip(".") in info.shapes for n, _ in module.named_parameters(recurse=False))
    if own or kind in _BATCH_NORMS or kind in _DROPOUTS:
        rule = _RULES.get(kind) if all(getattr(module, o, usual) == usual for o, usual in _USUAL) else None
        return (rule or _PerClient)(context, module, name, info)
    for child, m in module.named_children():
        setattr(module, child, _fold(m, context, info, f"{name}.{child}".lstrip(".")))
    return module
