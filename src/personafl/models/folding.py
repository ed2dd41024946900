"""Which layer of a stack takes a module's place; a module without a rule is called client by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from personafl.core import rng
from personafl.core.types import ModelInfo
from personafl.models.attention import StackedAttention
from personafl.models.layers import (
    BATCH_NORMS,
    CONVS,
    DROPOUTS,
    Context,
    Stacked,
    StackedBatchNorm,
    StackedConv,
    StackedDropout,
    StackedEmbedding,
    StackedGroupNorm,
    StackedLayerNorm,
    StackedLinear,
    client_rows,
    frozen,
)
from personafl.models.recurrent import StackedLSTM


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
        self.draws = True  # until it is seen not to

    def forward(self, x: Tensor, *rest: Any) -> Any:
        count, valid = self.context.count, self.context.valid
        recurrent = isinstance(self.original, nn.RNNBase)
        axis = 1 if recurrent and not self.original.batch_first else 0
        self.verify_rows(x.shape[axis])
        call, outs = self._calls(x.device), []
        for c, part in enumerate(x.chunk(count, axis)):
            real = part.shape[axis] if valid is None else int(valid[c].sum())
            outs.append(call(c, (part.narrow(axis, 0, real), *rest)))
        size = x.shape[axis] // count
        if isinstance(outs[0], Tensor):
            return torch.cat([_padded(o, size, axis) for o in outs], axis)
        return torch.cat([_padded(o[0], size, axis) for o in outs], axis), _cat_states([o[1] for o in outs], size)

    def _calls(self, device: torch.device) -> Callable[[int, tuple[Any, ...]], Any]:
        """What calls the module with the parameters of a client, by its place."""
        keys = self.context.keys
        each = {n: self._rows(self.context.params[full]) for n, full in self.own.items()}

        def call(c: int, given: tuple[Any, ...]) -> Any:
            own = {n: rows[c] for n, rows in each.items()}
            if keys is None or not self.draws:
                return functional_call(self.original, own, given)
            with rng.torch_generator(device):
                torch.manual_seed(int(keys[c]))
                return functional_call(self.original, own, given)

        return call

    def _rows(self, stacked: Tensor) -> Sequence[Tensor]:
        """Return each client's tensor.

        In evaluation, parameters can be differentiated as those of any module: a forward pass may take a gradient.
        """
        if torch.is_grad_enabled() or not stacked.is_floating_point():
            return client_rows(self.context, stacked)
        return [t.detach().requires_grad_() for t in stacked.unbind()]


class OneAtATime(PerClient):
    """A module whose layers are those of a stack, but that knows one client at a time.

    Its own parameters, or what it makes itself, have no place for other clients. Dropout inside it is drawn from the
    clients' streams.
    """

    def __init__(self, context: Context, original: nn.Module, name: str, info: ModelInfo) -> None:
        super().__init__(context, original, name, info)
        self.inside = list(self.own.values())
        bare = {n for n, _ in original.named_parameters(recurse=False)}
        self.own = {n: full for n, full in self.own.items() if n in bare}
        for child, m in original.named_children():
            setattr(original, child, fold(context, m, f"{name}.{child}".lstrip("."), info))

    def forward(self, x: Tensor, *rest: Any) -> Any:
        context = self.context
        before = context.params, context.valid, context.keys, context.count, context.rows
        try:
            return super().forward(x, *rest)
        finally:
            context.params, context.valid, context.keys, context.count, context.rows = before

    def _calls(self, device: torch.device) -> Callable[[int, tuple[Any, ...]], Any]:
        context, others, first = self.context, self.context.params, self.context.calls
        each = {n: [t.unsqueeze(0) for t in client_rows(context, others[n])] for n in self.inside}
        keys = None if context.keys is None else torch.split(context.keys, 1)

        def call(c: int, given: tuple[Any, ...]) -> Any:
            context.params = others | {n: rows[c] for n, rows in each.items()}
            context.keys = None if keys is None else keys[c]
            context.valid, context.count, context.rows, context.calls = None, 1, given[0].shape[0], first
            own = {n: context.params[full].squeeze(0) for n, full in self.own.items()}
            return functional_call(self.original, own, given) if own else self.original(*given)

        return call


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
    nn.Linear: StackedLinear,
    nn.LayerNorm: StackedLayerNorm,
    nn.GroupNorm: StackedGroupNorm,
    nn.Embedding: StackedEmbedding,
    nn.LSTM: StackedLSTM,
    nn.MultiheadAttention: StackedAttention,
    **dict.fromkeys(CONVS, StackedConv),
    **dict.fromkeys(BATCH_NORMS, StackedBatchNorm),
    **dict.fromkeys(DROPOUTS, StackedDropout),
}


_USUAL = (
    ("padding_mode", "zeros"),
    ("max_norm", None),
    ("padding_idx", None),
    ("scale_grad_by_freq", False),
    ("proj_size", 0),
    ("bias_k", None),
    ("add_zero_attn", False),
)
"""Options of layers the rules above know; with others a module runs per client."""


def _freeze(module: nn.Module, context: Context, info: ModelInfo) -> None:
    """Keep the frozen norms inside a module as they are, also in training."""
    for child, m in module.named_children():
        if frozen(m):
            setattr(module, child, _FrozenNorm(context, m, child, info))
        else:
            _freeze(m, context, info)


def fold(context: Context, module: nn.Module, name: str, info: ModelInfo) -> nn.Module:
    """Replace every module that must know whose example it sees."""
    kind = type(module)
    if isinstance(module, Stacked):  # part of two others, and met before
        return module
    if frozen(module):
        return _FrozenNorm(context, module, name, info)
    if is_parametrized(module):  # its weights are computed from parameters of its parts
        return PerClient(context, module, name, info)
    own = any(f"{name}.{n}".lstrip(".") in info.shapes for n, _ in module.named_parameters(recurse=False))
    if own or kind in BATCH_NORMS or kind in DROPOUTS:
        rule = _RULES.get(kind) if all(getattr(module, o, usual) == usual for o, usual in _USUAL) else None
        other = PerClient if kind in _RULES or next(module.children(), None) is None else OneAtATime
        return (rule or other)(context, module, name, info)
    for child, m in module.named_children():
        setattr(module, child, fold(context, m, f"{name}.{child}".lstrip("."), info))
    return module
