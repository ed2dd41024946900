"""What a client predicts with, as an ordinary module."""

from __future__ import annotations

import copy
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.normalization import Normalization, as_inputs, rescale, transformed
from personafl.core.types import ModelInfo, Params
from personafl.models.stacked import StackedModel

MAIN = "main"  # the network whose names have no prefix
Hook = Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]


class ClientModule(nn.Module):
    """Examples `[B, ...]` as the data have them to the client's outputs `[B, K]`, by the rule of its method.

    `networks` has every network the client holds, each of the user's own class: `main`, and those its method adds,
    such as `global_` or `received`. What else the rule needs (FLDA's gate, base entropies) are buffers of `tensors`.
    Where inputs are normalised, `scaling` has `scale` and `shift` as buffers. Where training normalises targets,
    `target_scaling` has those that convert outputs back to the targets' own units.
    """

    def __init__(
        self,
        model: StackedModel,
        algorithm: Algorithm,
        deployed: Params,
        normalization: Normalization | None = None,
        target_normalization: Normalization | None = None,
    ) -> None:
        """`deployed` is what the client needs to predict, a stack of one."""
        super().__init__()
        self.algorithm, self.info, self.head = algorithm, model.info, model.head_name
        whole = _whole_networks(deployed, self.info)
        held = {n for prefix, network in whole.items() for n in _prefixed(network, prefix)}
        self.prefixes = _attributes([prefix or MAIN for prefix in whole], list(whole))
        others = [n for n in deployed if n not in held]
        self.others = _attributes(others, others)
        self.networks = nn.ModuleDict(
            {key: model.client({n: t[0] for n, t in whole[prefix].items()}) for key, prefix in self.prefixes.items()}
        )
        if not whole:  # the method makes weights when it predicts, and they take the initial ones' place
            self.networks["initial"] = copy.deepcopy(model.module)
        self.tensors = nn.Module()
        for attribute, n in self.others.items():
            self.tensors.register_buffer(attribute, deployed[n][0].clone())
        one = next(self.networks.parameters())
        self.scaling = None if normalization is None else _affine(*normalization.affine(one.dtype, one.device))
        units = target_normalization
        self.target_scaling = None if units is None else _affine(*units.inverse_affine(one.dtype, one.device))
        self.eval()

    @property
    def network(self) -> nn.Module:
        """The main network; it alone answers where `networks` and `tensors` hold nothing else."""
        if MAIN not in self.prefixes:
            raise UserError(f"{self.algorithm.called}: a client has no main network, but {', '.join(self.networks)}")
        return self.networks[MAIN]

    def prepared(self, x: Tensor) -> Tensor:
        """Examples as the networks take them: bytes divided by 255, then normalised."""
        if self.scaling is None:
            return as_inputs(x, next(self.networks.parameters()).dtype)
        scale, shift = self.scaling.get_buffer("scale"), self.scaling.get_buffer("shift")
        return transformed(x, scale / 255 if x.dtype == torch.uint8 else scale, shift)

    def converted(self, outputs: Tensor) -> Tensor:
        """Outputs `[B, ...]` of the networks in the units of the targets."""
        if self.target_scaling is None:
            return outputs
        return rescale(
            outputs, self.target_scaling.get_buffer("scale"), self.target_scaling.get_buffer("shift"), axes=1
        )

    def forward(self, x: Tensor) -> Tensor:
        stacks = [_stack_of_one(network, self.info) for network in self.networks.values()]
        deployed: Params = {n: getattr(self.tensors, k).unsqueeze(0) for k, n in self.others.items()}
        for stack, prefix in zip(stacks, self.prefixes.values(), strict=False):  # there may be initial weights only
            deployed |= _prefixed(stack, prefix)
        model = _Networks(self.info, self.head, list(zip(stacks, self.networks.values(), strict=True)))
        out, changed = self.algorithm.respond(model, deployed, self.prepared(x).unsqueeze(0))
        for attribute, n in self.others.items():  # what a rule learns from the inputs it answers
            if n in changed:
                getattr(self.tensors, attribute).copy_(changed[n].squeeze(0).detach())
        return self.converted(out.squeeze(0))


class _Networks:
    """The networks of one client as its method calls them: by their weights, a stack of one.

    Weights that are no network's were made by the method. They, and hooks, go into a copy of a network around the same
    tensors, since several threads may call a module at a time.
    """

    def __init__(self, info: ModelInfo, head: str | None, held: Sequence[tuple[Params, nn.Module]]) -> None:
        self.info, self.head, self.held = info, head, held

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        found = self._of(params)
        return self._copied(params, x) if found is None else _outputs(found, x)

    def features(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def look(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            seen.append(inputs[0].reshape(1, x.shape[1], -1))
            return None if change is None else (change(seen[-1]).view(inputs[0].shape), *inputs[1:])

        out = self._copied(params, x, look)
        return seen[0], out

    def _of(self, params: Params) -> nn.Module | None:
        """The network that has these weights."""
        return next((network for own, network in self.held if all(params[n] is t for n, t in own.items())), None)

    def _copied(self, params: Params, x: Tensor, at_head: Hook | None = None) -> Tensor:
        """Outputs of a copy that has these weights."""
        found = self._of(params)
        network = self.held[0][1] if found is None else found
        network = copy.deepcopy(network, {id(t): t for t in (*network.parameters(), *network.buffers())})
        if at_head is not None:
            assert self.head is not None  # else the method was refused when it was bound
            network.get_submodule(self.head).register_forward_pre_hook(at_head)
        if found is not None:
            return _outputs(network, x)
        out: Tensor = functional_call(network, {n: params[n].squeeze(0) for n in self.info.shapes}, (x.squeeze(0),))
        return out.unsqueeze(0)


def _affine(scale: Tensor, shift: Tensor) -> nn.Module:
    held = nn.Module()
    held.register_buffer("scale", scale.clone())
    held.register_buffer("shift", shift.clone())
    return held


def _outputs(network: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = network(x.squeeze(0))
    return out.unsqueeze(0)


def _whole_networks(deployed: Params, info: ModelInfo) -> dict[str, Params]:
    """The whole networks among these tensors by prefix, the main one's being empty."""
    found = {}
    for prefix in dict.fromkeys(map(tree.prefix_of, deployed)):
        inside = tree.under(deployed, prefix) if prefix else deployed
        if inside.keys() >= info.shapes.keys():
            found[prefix] = tree.select(inside, info.shapes)
    return found


def _attributes(names: Sequence[str], things: Sequence[str]) -> dict[str, str]:
    """Things by names a module's parts may have, also in the Python code of an exported one: `global` is `global_`."""
    found: dict[str, str] = {}
    for name, thing in zip(names, things, strict=True):
        key = re.sub(r"\W", "_", name)
        key += "_" * (keyword.iskeyword(key) or hasattr(nn.ModuleDict(), key))
        if key in found:
            raise UserError(f"{found[key]!r} and {thing!r} of a client would both be called {key!r}; rename one")
        found[key] = thing
    return found


def _prefixed(network: Params, prefix: str) -> Params:
    return tree.prefixed(network, prefix) if prefix else network


def _stack_of_one(network: nn.Module, info: ModelInfo) -> Params:
    state = dict(network.named_parameters()) | dict(network.named_buffers())
    return {n: state[n].unsqueeze(0) for n in info.shapes}
