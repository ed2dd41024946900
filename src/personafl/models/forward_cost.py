"""The weight matrices a forward pass multiplies by, and what that costs.

Observed, not derived from a module's class: every matrix product and convolution is seen as PyTorch dispatches it, in
a forward pass of the example. A product one of whose factors is a parameter with two axes or more belongs to that
parameter's layer, wherever it was called from: linear layers, convolutions, recurrent layers (a product a step),
attention, `F.linear` or `@` in a module of one's own. If both factors are parameters, the layer is the right one's.
Slices, copies and multiples of a parameter count as the parameter, since they are zero where it is; what is computed
from parameters in another way does not. All other products (queries by keys, attention by values, those of frozen
weights) are cost without weights to mask. An embedding is a look-up, no product.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from personafl.core.torch_internals import aten_operator
from personafl.core.types import Layer
from personafl.models.layers import CONVS

_aten = torch.ops.aten
_INTERNAL = ("_trilinear", "_to_copy", "_weight_norm_interface")
_trilinear, _to_copy, _weight_norm = (aten_operator(name) for name in _INTERNAL)  # None where PyTorch lacks it
_FACTORS: dict[Any, tuple[tuple[int, ...], int | None]] = {
    _aten.mm: ((1, 0), None),
    _aten.addmm: ((2, 1), 0),
    _aten.bmm: ((1, 0), None),
    _aten.baddbmm: ((2, 1), 0),
    _aten.mv: ((0,), None),
    _aten.convolution: ((1,), 2),
    _trilinear: ((1,), None),
}
"""Of each kind of product the arguments that may be a layer's weight, the right factor first, and its bias."""
_ZERO_WHERE_ZERO = (_aten.clone, _to_copy, _aten.neg, _aten.mul, _aten.div, _weight_norm)


@dataclass(frozen=True)
class ForwardCost:
    """What one example's forward pass takes; the fields are those of `ModelInfo`."""

    layers: tuple[Layer, ...]
    other_flops: int
    products: dict[int, int]
    activations: int


@dataclass
class _Found:
    """A parameter's products so far, of all examples."""

    macs: int = 0
    outputs: int = 0
    bias: str | None = None
    slices: dict[int, int] = field(default_factory=dict)  # of the bias that were added: where they begin, how long


def observe(module: nn.Module, example: Tensor, trainable: Collection[str]) -> ForwardCost:
    """Run the module on the example, a batch, and see what is multiplied by what."""
    missing = [name for name in _INTERNAL if aten_operator(name) is None]
    if missing:
        warnings.warn(
            f"PyTorch {torch.__version__} has no operator {', '.join(missing)}: FLOP of bilinear layers, and of layers "
            "with converted or normalised weights, may be wrong",
            stacklevel=2,
        )
    seen, sizes = _Products(module, trainable), _Sizes(module)
    with torch.no_grad(), _unfused(), sizes.counted(), seen:
        module(example)
    count = len(example)
    owners = {f"{n}.weight".lstrip("."): type(m) for n, m in module.named_modules()}
    layers, frozen = [], 0
    for name, found in seen.found.items():
        if name not in trainable:
            frozen += 2 * found.macs + found.outputs
            continue
        layers.append(
            Layer(
                name,
                found.bias if found.bias in trainable else None,
                tuple(seen.parameters[name].shape),
                found.macs // count,
                found.outputs // count,
                feedforward=owners.get(name) in (nn.Linear, *CONVS) and found.bias in (None, _bias_of(name)),
                biases=sum(found.slices.values()),
            )
        )
    products = {place: flops // count for place, flops in seen.others.items()}
    return ForwardCost(tuple(layers), sum(products.values()) + frozen // count, products, sizes.total // count)


@contextmanager
def _unfused() -> Iterator[None]:
    """Attention and recurrent layers as single products: fused ones do not say what they multiply."""
    mha, mkldnn = torch.backends.mha, cast(Any, torch.backends.mkldnn)
    before = mha.get_fastpath_enabled(), mkldnn.enabled
    mha.set_fastpath_enabled(False)
    mkldnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before[0])
        mkldnn.enabled = before[1]


class _Sizes:
    """Counts the numbers that modules without parts give."""

    def __init__(self, module: nn.Module) -> None:
        self.total, self.parts = 0, [m for m in module.modules() if not list(m.children())]

    def _add(self, _: nn.Module, __: Any, out: Any) -> None:
        self.total += out.numel() if isinstance(out, Tensor) else 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        handles = [m.register_forward_hook(self._add) for m in self.parts]
        try:
            yield
        finally:
            for h in handles:
                h.remove()


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every product, and whose it is."""

    def __init__(self, module: nn.Module, trainable: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters, self.trainable = dict(module.named_parameters()), frozenset(trainable)
        self.found: dict[str, _Found] = {}
        self.others = Counter[int]()  # FLOP of the other products, by the number of layers before them
        self._sources: dict[int, list[tuple[int, int, str]]] = {}  # memory, and which part of it is which parameter
        self._without_bias: dict[int, str] = {}  # memory of a product that a bias may yet be added to
        self._held: list[Tensor] = []  # so that this memory is not used again
        for name, p in self.parameters.items():
            self._note_source(p, name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports PyTorch's compiler: a second, and five on a slow disk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = func.overloadpacket
        if (flops := _flops(kind, args, kwargs, out)) is not None:
            self._multiplied(kind, args, flops, out)
        elif kind in _ZERO_WHERE_ZERO:
            self._followed(args if kind is _aten.mul else args[:1], out[0] if isinstance(out, tuple) else out)
        elif kind in (_aten.add, _aten.add_):
            self._added(args, out)
        return out

    def _multiplied(self, kind: Any, args: Any, flops: int, out: Tensor) -> None:
        factors, bias = _FACTORS.get(kind, ((), None))
        name = next(filter(None, (self._matrix(args[i]) for i in factors)), None)
        if name is None:
            self.others[len(self.found.keys() & self.trainable)] += flops
            return
        self.found.setdefault(name, _Found()).macs += flops // 2
        if bias is not None and args[bias] is not None:
            self._biased(name, args[bias], out)
        else:
            self._without_bias[_memory(out)] = name
            self._held.append(out)

    def _biased(self, name: str, bias: Tensor, out: Tensor) -> bool:
        """Note a bias, if it is one: a parameter with one axis."""
        source, found = self._source(bias), self.found[name]
        if source is None or self.parameters[source].dim() != 1:
            return False
        found.outputs += out.numel()
        found.bias = found.bias or source
        if source == found.bias:
            found.slices[int(bias.storage_offset())] = bias.numel()
        return True

    def _added(self, args: Any, out: Tensor) -> None:
        for product, bias in (args, args[::-1]):
            if isinstance(product, Tensor) and isinstance(bias, Tensor):
                name = self._without_bias.get(_memory(product))
                if name is not None and self._biased(name, bias, out):
                    del self._without_bias[_memory(product)]
                    return

    def _followed(self, args: Any, out: Tensor) -> None:
        """What an operation makes of a parameter without moving its zeros is that parameter still."""
        for t in args:
            if isinstance(t, Tensor) and t.numel() == out.numel() and (name := self._source(t)) is not None:
                self._note_source(out, name)
                self._held.append(out)
                return

    def _note_source(self, t: Tensor, name: str) -> None:
        start = int(t.storage_offset())
        self._sources.setdefault(_memory(t), []).append((start, start + t.numel(), name))

    def _source(self, t: Tensor) -> str | None:
        """The parameter a tensor is, or is a part of."""
        parts = self._sources.get(_memory(t), ())
        return next((name for start, end, name in parts if start <= t.storage_offset() < end), None)

    def _matrix(self, t: Tensor) -> str | None:
        name = self._source(t)
        return name if name is not None and self.parameters[name].dim() > 1 else None


def _bias_of(weight: str) -> str:
    """What a module calls the bias beside its `weight`."""
    return weight.removesuffix("weight") + "bias"


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _flops(kind: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Two per multiply-accumulate; None for what is no product."""
    if kind is _aten.mv:
        return 2 * int(args[0].numel())
    if kind is _trilinear:  # nn.Bilinear: every weight once for an example
        return 2 * int(args[1].numel() * out.numel() // out.shape[-1])
    count = flop_registry.get(kind)
    return None if count is None else int(count(*args, **kwargs, out_val=out))
