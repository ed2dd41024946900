"""Which layer of a stack takes a module's place; a module without a rule is called client by client."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

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
        count, keys, valid = self.context.count, self.context.keys, self.context.valid
        recurrent = isinstance(self.original, nn.RNNBase)
        axis = 1 if recurrent and not self.original.batch_first else 0
        each = {n: self.context.params[full].unbind() for n, full in self.own.items()}
        outs = []
        for c, part in enumerate(x.chunk(count, axis)):
            own = {n: rows[c] for n, rows in each.items()}
            real = part.shape[axis] if valid is None else int(valid[c].sum())
            part = part.narrow(axis, 0, real)
            if keys is None or not self.draws:
                outs.append(functional_call(self.original, own, (part, *rest)))
                continue
            with rng.torch_generator(x.device):
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


def fold(module: nn.Module, context: Context, info: ModelInfo, name: str) -> nn.Module:
    """Replace every module that must know whose example it sees."""
    kind = type(module)
    if isinstance(module, Stacked):  # part of two others, and met before
        return module
    if frozen(module):
        return _FrozenNorm(context, module, name, info)
    own = any(f"{name}.{n}".lstrip(".") in info.shapes for n, _ in module.named_parameters(recurse=False))
    if own or kind in BATCH_NORMS or kind in DROPOUTS:
        rule = _RULES.get(kind) if all(getattr(module, o, usual) == usual for o, usual in _USUAL) else None
        return (rule or PerClient)(context, module, name, info)
    for child, m in module.named_children():
        setattr(module, child, fold(m, context, info, f"{name}.{child}".lstrip(".")))
    return module
