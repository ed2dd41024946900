"""Run any `nn.Module` over stacked parameters.

The clients' minibatches are folded into one batch of C * B examples and the module's own forward is
run on it once. Whatever has no parameters (activations, pooling, reshapes) works on the folded batch as
it is; every module that has some is replaced by one that knows which examples are whose:

    Linear, Embedding, norms,
    MultiheadAttention           batched over clients
    Conv2d of stride 1           one kernel for all clients on a GPU (`kernels`), one call per client on a CPU
    LSTM                         one product for all clients at each step on a GPU (`recurrent`), as above on a CPU
    Dropout                      drawn from each client's own stream
    anything else                called once per client with that client's parameters (GRU, your own)

A module with parameters of its own and layers inside (positions that are learnt) runs one client at a time, through
those layers.

On a GPU a model with a layer of the last kind, or with a convolution there is no kernel for, runs one client at a time,
several of them side by side (`one_by_one`, accel/cuda_graphs.py).

A forward that mixes the examples of a batch would mix clients. So the folded model is checked once,
with random parameters in float64, against the module run alone; if they differ, it runs one client at a time, through
the same layers or, if that differs too, as the module itself.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from personafl import accel
from personafl.core import rng
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.torch_internals import data_version, forward_pre_hooks, has_gradient_hooks, pruned_parameter
from personafl.core.types import Arithmetic, Batch, BufferPolicy, CriterionGradient, ModelInfo, Params
from personafl.models import agreement
from personafl.models.agreement import Sample
from personafl.models.folding import OneAtATime, PerClient, fold
from personafl.models.forward_checks import (
    RowChecks,
    activations,
    copy_module,
    has_hooks,
    is_library_code,
    refuse_dependence_on_first_call,
    refuse_state,
)
from personafl.models.forward_cost import observe
from personafl.models.frozen_weights import (
    convert_module,
    frozen_weights,
    hash_weights,
    not_persistent,
    restore_weights,
    small_weights,
    unfolded_tensors,
)
from personafl.models.layers import (
    BATCH_NORMS,
    CONVS,
    RUNNING,
    Channels,
    Context,
    Stacked,
    StackedConv,
    Taped,
    clients_without_gradient,
    gradients,
    tracks,
)
from personafl.models.norms import norm_parameters
from personafl.models.patterns import FusedForward, fused_forward
from personafl.models.sample_outputs import sample_outputs

LONG = 1e8  # FLOP of a forward pass of one example
LARGE, LARGE_IF_LONG = 64, 8  # rows of the larger minibatches that a module is called with when it is made
Mode = Literal["stacked", "layer by layer", "client by client"]
_Way = Literal["stack", "alone", "whole"]
_MODES: dict[_Way, Mode] = {"stack": "stacked", "alone": "layer by layer", "whole": "client by client"}


@dataclass(frozen=True)
class Execution:
    """How the clients of a stack go through a model, and why not faster.

    stacked: All clients in one call of the module. Layers without a stacked form, named in `exceptions`, are called
        for each client.
    layer by layer: One call for each client, through the layers of a stack.
    client by client: One call for each client of the module as it was given.
    """

    mode: Mode
    reason: str = ""
    exceptions: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.mode == "stacked" and self.exceptions:
            run = "which runs" if len(self.exceptions) == 1 else "which run"
            return f"stacked, except {' and '.join(self.exceptions)}, {run} one client at a time"
        return f"{self.mode}: {self.reason}" if self.reason else self.mode


class _NoHeadError(ValueError):
    """A model whose features cannot be told apart from its outputs."""


class StackedModel(Displayed):
    """A module as a function of stacked parameters."""

    def __init__(self, module: nn.Module, example: Tensor, head: str | None = None, policy: BufferPolicy = "average"):
        """`example` is a batch of two inputs; `head` a pattern of parameter names, by default the last linear layer."""
        _refuse_odd(module)
        example = _as_weights(module, example)
        self.example = example[:1].clone()
        self.module = copy_module(module).eval()
        own_code = not is_library_code(module) or has_hooks(module)
        if own_code:
            refuse_state(self.module, example)
            refuse_dependence_on_first_call(self.module, example)
        _without_nested_tensors(self.module)
        self._alters = _alters_input(self.module, example)
        if policy == "drop":
            _forget_statistics(self.module)
        self.info = describe(self.module, example.clone(), head, policy)
        self._long = self.info.other_flops + sum(2 * layer.macs for layer in self.info.layers) > LONG
        if own_code:  # something may be counted, or kept, of large minibatches only
            refuse_state(self.module, example, LARGE_IF_LONG if self._long else LARGE)
        state = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.initial: Params = {n: state[n].detach().clone() for n in self.info.shapes}
        self.frozen_hashes = hash_weights(self.frozen, skip=not_persistent(self.module))
        self.small_frozen = small_weights(self.frozen)  # as they were given, whatever type a run computes in
        self._context = Context()
        self._twins: list[StackedModel] = []
        self._fused: FusedForward | None = None
        self._row_checks: RowChecks | None = None
        with rng.torch_generator():
            ways, reason, checks = self._checked_ways(example)
            self._way, reason = self._choose_way(self._samples(example), ways, reason)
        if self._way == "stack":
            self._row_checks = checks
        self.whole = self._way != "stack"  # the module is called for each client
        self._folded = self._fold(self._way)
        self._head: Stacked | None = None
        self.stacks = not any(type(m) in CONVS or isinstance(m, nn.RNNBase) for m in self.module.modules())  # on a CPU
        called = [m for m in self._folded.modules() if isinstance(m, PerClient)]
        self.pads, self.random = not called, bool(called) and self._draws(called, example)
        self._execution = Execution(_MODES[self._way], reason, _without_stacked_form(called, self._folded))
        if self._way == "stack" and isinstance(self._folded, PerClient):
            own = ", ".join(n for n, _ in module.named_parameters(recurse=False))
            reason = f"{type(module).__name__} has no stacked form" + (f", for its own parameters {own}" if own else "")
            mode = _MODES["alone" if isinstance(self._folded, OneAtATime) else "whole"]
            self._execution = Execution(mode, reason)
        # Norms without statistics use those of the batch, also in evaluation.
        self.looks_at_batches = self.whole or any(
            isinstance(m, BATCH_NORMS) and not m.track_running_stats for m in self.module.modules()
        )
        self._in_closed_form = self._last_linears(example)
        features, outputs, why = self._measure_head(example)
        self.info = dataclasses.replace(self.info, features=features, without_features=why, outputs=outputs)
        self.sample_outputs = sample_outputs(self, self.module, self.initial, self.example)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if self._fused == FusedForward(None, None):  # from a pickle
            self._fused = fused_forward(self._folded)

    def _facts(self) -> dict[str, object]:
        size = sum(torch.Size(self.info.shapes[n]).numel() for n in self.info.parameters)
        head = [n for n in self.info.parameters if n in self.info.head]
        return {"module": type(self.module).__name__, "parameters": size, "head": ", ".join(head) or "none"}

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Outputs `[C, B, ...]`; training mode when the clients' random streams for this step are given."""
        out = self._run(params, x, valid, keys)
        return out.view(x.shape[0], x.shape[1], *out.shape[1:])

    @property
    def frozen(self) -> Params:
        """The weights that clients share because nobody trains them, and constant buffers, by name."""
        return frozen_weights(self.module, self.info.shapes)

    def restore_frozen(self, weights: Params) -> None:
        """Put values in place of frozen weights of these names and shapes."""
        for module in (self.module, self._folded):
            restore_weights(module, weights)
        self._twins.clear()
        restored = {n: weights[n] for n in self.frozen if n in weights}  # of their type, whatever a run computes in
        self.frozen_hashes |= hash_weights(restored, skip=not_persistent(self.module))
        self.small_frozen |= small_weights(restored)
        self.sample_outputs = sample_outputs(self, self.module, self.initial, self.example)

    def weight_hashes(self) -> dict[str, str]:
        """A hash of every tensor the model begins with, frozen ones included."""
        return hash_weights(self.initial) | self.frozen_hashes

    def initial_hash(self) -> str:
        """A hash of all that the model begins with: what methods, processes and nodes must have in common."""
        digest = hashlib.sha256()
        for n in sorted(self.initial):
            digest.update(n.encode() + self.initial[n].detach().cpu().contiguous().numpy().tobytes())
        for n, tensor_hash in sorted(self.frozen_hashes.items()):
            digest.update(f"{n}{tensor_hash}".encode())
        return digest.hexdigest()[:16]

    @property
    def execution(self) -> Execution:
        """How clients go through the model on the device where it lies, and why not faster."""
        if not self._context.one_by_one or self._execution.mode != "stacked":
            return self._execution
        if layers := self._execution.exceptions:
            return Execution("layer by layer", f"there is no stacked form of {' and '.join(layers)}")
        return Execution("layer by layer", "on a GPU its convolutions are faster for one client at a time")

    @property
    def slower_than_stack(self) -> bool:
        """Whether clients go through the model one at a time although a stack, were it right, would be faster."""
        return self._execution.mode != "stacked"

    @property
    def one_by_one(self) -> bool:
        """Whether clients gain nothing from a stack where the model lies, and run one at a time."""
        return self._context.one_by_one

    @property
    def channels_last(self) -> frozenset[str]:
        """The weights of convolutions that may lie channels last: none where a forward looks at how images lie."""
        if self._context.channels == "first":
            return frozenset()
        convs = (m for m in self._folded.modules() if isinstance(m, StackedConv) and type(m.original) is nn.Conv2d)
        return frozenset(m.own["weight"] for m in convs if "weight" in m.own)

    @torch.no_grad()
    def _draws(self, called: list[PerClient], example: Tensor) -> bool:
        """Whether a module that is called client by client draws random numbers in training."""
        for m in called:
            m.draws = False  # it is not seeded then
        params = {n: t.clone()[None] for n, t in self.initial.items()}
        with rng.torch_generator():
            before = torch.random.get_rng_state()
            self(params, example[None], keys=torch.zeros(1, dtype=torch.int64))
            drawn = not torch.equal(before, torch.random.get_rng_state())
        for m in called:
            m.draws = drawn
        return drawn

    def _run(self, params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None) -> Tensor:
        """Outputs as the module gives them, `[C * B, ...]`."""
        self._check_rows(params, x, valid, keys)
        return self._run_unchecked(params, x, valid, keys)

    def _run_unchecked(self, params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None) -> Tensor:
        if x.is_cuda and self._context.one_by_one and self._context.arithmetic == "bf16":
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                out = self._forward(params, x, valid, keys)
        else:
            out = self._forward(params, x, valid, keys)
        return out.to(_kind(params))  # bf16 ends here

    def _forward(self, params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None) -> Tensor:
        context = self._context
        context.params, context.valid, context.keys = params, valid, keys
        context.count, context.rows, context.calls = x.shape[0], x.shape[1], 0
        training = keys is not None
        if self._folded.training != training:
            self._folded.train(training)
        rows = x.flatten(0, 1).clone() if self._alters else x.flatten(0, 1)  # others may look at the same batch
        out: Tensor = self._folded(rows) if self._fused is None else self._fused(self._folded, rows)
        context.params = {}
        return out

    def _check_rows(self, params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None) -> None:
        """Refuse a stack that does not give each client what it gives alone, when its shape first comes up."""
        checks, (clients, rows) = self._row_checks, x.shape[:2]
        if checks is None or clients < 2 or not rows or (keys is not None, clients, rows) in checks.checked:
            return
        recording = x.is_cuda and torch.cuda.is_current_stream_capturing()  # the same step has run as it is before
        compare = None if recording else partial(self._difference_from_alone, params, x, valid, keys)
        checks.check(clients, rows, keys is not None, compare)

    def _difference_from_alone(
        self, params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None
    ) -> str | None:
        """Say how outputs or gradients differ from those of each client alone; None if they do not.

        Where they do in lower precision, float64 tells: rounding may decide which of two experts takes a row.
        """

        def run(own: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None) -> Tensor:
            out = model._run_unchecked(own, x, valid, keys)
            return out.view(x.shape[0], x.shape[1], *out.shape[1:])

        own = {n: params[n] for n in self.info.shapes}
        model, learnt = self, list(self.info.parameters)
        tape, self._context.tape = self._context.tape, None
        try:
            difference = agreement.difference_from_alone(run, own, learnt, x, valid, keys)
            if difference is not None and _kind(params) != torch.float64:
                with suppress(Exception):  # its forward insists on other numbers
                    model = self.copy().to(x.device, torch.float64)
                    own = {n: t.double() for n, t in own.items()}
                    x = x.double() if x.is_floating_point() else x
                    difference = agreement.difference_from_alone(run, own, learnt, x, valid, keys)
        finally:
            self._context.tape = tape
        return difference

    @torch.no_grad()
    def closed_form_gradients(
        self, params: Params, names: Collection[str], batch: Batch, slope: CriterionGradient
    ) -> tuple[Tensor, Params] | None:
        """Losses `[C]` and the gradients of these parameters, by hand: autograd takes longer than a small minibatch.

        None where that is not possible. It is where the output is what linear layers in a row give, and these
        parameters are theirs.
        """
        if not accel.ENABLED or batch.x.is_cuda or not self._in_closed_form.issuperset(names):
            return None
        out, ran = self._taped(params, batch.x, batch.valid, batch.keys)
        if ran is None:
            self._in_closed_form = frozenset()
            return None
        loss, grad = slope(out, batch)
        wanted = [False, *(n in names for n in ran.names)]
        grads = gradients(grad, ran.seen, ran.weights, wanted, self._context.threads)[1:]
        found = dict(zip(ran.names, grads, strict=True))
        return loss, {n: cast(Tensor, found[n]) for n in names}

    def differentiate(self, loss: Tensor, leaves: Params) -> tuple[Params, dict[str, list[int]]]:
        """Compute gradients as PyTorch's optimisers see them.

        Args:
            loss: The sum of the clients' losses.
            leaves: Stacked tensors by name.

        Returns:
            The gradients of the tensors that the loss depends on; and, where it depends on a tensor for some clients
            only, the others. Their part of the gradient is zero, and alone they would have none.
        """
        noted = self._context.noted = {}
        try:
            computed = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        finally:
            self._context.noted = None
        grads = {n: g for n, g in zip(leaves, computed, strict=True) if g is not None}
        return grads, clients_without_gradient(loss, leaves, noted)

    def _taped(
        self, params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None
    ) -> tuple[Tensor, Taped | None]:
        """Outputs, and the run of linear layers that gave them, if it was one and nothing changed them afterwards."""
        tape: list[Taped] = []
        self._context.tape = tape
        try:
            out = self._run(params, x, valid, keys)
        finally:
            self._context.tape = None
        alone = len(tape) == 1 and out is tape[0].out and out.dim() == 2
        alone = alone and tape[0].version is not None and data_version(out) == tape[0].version
        return out.view(x.shape[0], x.shape[1], *out.shape[1:]), tape[0] if alone else None

    @torch.no_grad()
    def _last_linears(self, example: Tensor) -> frozenset[str]:
        """The parameters whose gradients may be taken by hand; running statistics would be moved twice in vain."""
        _, ran = self._taped({n: t[None] for n, t in self.initial.items()}, example[None], None, None)
        return frozenset() if ran is None or self.info.buffers else frozenset(filter(None, ran.names))

    def features(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What enters the head, flattened to `[C, B, D]`, and the outputs; the head sees what `change` makes of it."""
        if self._head is None:
            self._head = self._find_head()
        if self._is_called_per_client(self._head):
            return self._features_per_client(params, x, valid, keys, change)
        seen: list[Tensor] = []

        def look(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            z = inputs[0].reshape(x.shape[0], x.shape[1], -1).to(_kind(params))
            seen.append(z)
            return None if change is None else (change(z).view(inputs[0].shape), *inputs[1:])

        out = self._run_with_hook(look, params, x, valid, keys)
        if not seen:
            raise _NoHeadError("its head is not called in evaluation")
        return seen[0], out

    def _features_per_client(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None,
        keys: Tensor | None,
        change: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The same where the head is called for one client after the other.

        What is to be changed is known when all clients are through, so they go through a second time. Running
        statistics move in the second pass only.
        """
        clients, size = x.shape[:2]
        seen: list[Tensor] = []

        def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            z = inputs[0].reshape(self._context.rows, -1).to(_kind(params))
            seen.append(F.pad(z, (0, 0, 0, size - len(z))))

        own = params if change is None else params | {n: params[n].clone() for n in self.info.buffers}
        out = self._run_with_hook(look, own, x, valid, keys)
        if not seen or len(seen) % clients:
            raise _NoHeadError("its head is not called once for each client")
        calls = len(seen) // clients
        z = torch.stack(seen[::calls])
        if change is None:
            return z, out
        changed, count = change(z), itertools.count()

        def replace(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            rows = changed[next(count) // calls, : self._context.rows]
            return rows.to(inputs[0].dtype).view(inputs[0].shape), *inputs[1:]

        return z, self._run_with_hook(replace, params, x, valid, keys)

    def _run_with_hook(
        self, hook: Callable[..., Any], params: Params, x: Tensor, valid: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        """Outputs, with a hook on what enters the head."""
        assert self._head is not None
        self._check_rows(params, x, valid, keys)  # before the hook, which is for these inputs alone
        handle = self._head.register_forward_pre_hook(hook)
        try:
            return self(params, x, valid, keys)
        finally:
            handle.remove()

    def _is_called_per_client(self, layer: nn.Module) -> bool:
        around = (m for m in self._folded.modules() if isinstance(m, OneAtATime) and m is not layer)
        return any(layer is inner for m in around for inner in m.modules())

    def _measure_head(self, example: Tensor) -> tuple[int, int, str]:
        """How many numbers of one example enter the head and how many come out; or 0 and why it cannot be told."""
        params = {n: t[None] for n, t in self.initial.items()}
        with torch.no_grad():
            try:
                z, out = self.features(params, example[None])
                return z.shape[2], out[0, 0].numel(), ""
            except _NoHeadError as e:
                return 0, self(params, example[None])[0, 0].numel(), str(e)

    def _find_head(self) -> Stacked:
        """The first module of the forward pass that holds a parameter of the head."""
        if not self.info.head:
            raise _NoHeadError("it has no linear layer, which would be its head")
        if self._way == "whole":
            raise _NoHeadError(f"it runs {self.execution}")
        holders = [m for m in self._folded.modules() if isinstance(m, Stacked) and self.info.head & set(m.own.values())]
        for m in holders:
            if isinstance(m, PerClient) and set(m.own.values()) - self.info.head:
                kind = type(m.original).__name__
                raise _NoHeadError(f"its head is part of {m.path or kind!r}, which is called as a whole")
        order = list(self.info.shapes)
        return min(holders, key=lambda m: min(order.index(n) for n in m.own.values()))

    @property
    def head_name(self) -> str | None:
        """The name of the module that `features` are the input of; None where the head is no layer of its own."""
        return self._find_head().path if self.info.features else None

    def copy(self) -> StackedModel:
        """Another one, to be moved elsewhere."""
        shared: dict[int, Any] = {id(t): t for t in self.small_frozen.values()}  # nobody writes to these
        return copy.deepcopy(self, activations(self.module) | activations(self._folded) | shared)

    @contextmanager
    def borrowed(self) -> Iterator[StackedModel]:
        """Another one over the same tensors, for a thread of its own; made once, then lent again."""
        try:
            twin = self._twins.pop()
        except IndexError:
            values = (*self.initial.values(), *self.small_frozen.values())
            tensors = (*values, *_tensors(self.module), *_tensors(self._folded))
            shared: dict[int, Any] = {id(t): t for t in tensors}
            twin = copy.deepcopy(self, activations(self.module) | activations(self._folded) | shared)
        try:
            yield twin
        finally:
            self._twins.append(twin)

    @contextmanager
    def threaded(self, count: int) -> Iterator[None]:
        """Take batched products on so many threads, where all else runs on one; 0: as PyTorch has it."""
        before, self._context.threads = self._context.threads, count
        try:
            yield
        finally:
            self._context.threads = before

    def to(self, device: torch.device, dtype: torch.dtype, arithmetic: Arithmetic = "float32") -> StackedModel:
        """Move what is shared by all clients (frozen parameters and constants), and say how products are taken."""
        convs = [m for m in self._folded.modules() if isinstance(m, StackedConv)]
        self._context.arithmetic = arithmetic
        stacks = self.pads and all(m.has_kernel(dtype) and not m.heavy for m in convs)
        self._context.one_by_one = device.type == "cuda" and not stacks
        self._twins.clear()
        for part in (self.module, self._folded):
            convert_module(part, dtype, device)
        self.initial = {n: t.to(device, dtype) for n, t in self.initial.items()}
        return self

    def client(self, params: Params) -> nn.Module:
        """One client's ordinary module, from its parameters (no client axis)."""
        module = copy.deepcopy(self.module)
        missing, unexpected = module.load_state_dict(params, strict=False)
        assert not unexpected and not set(missing) & set(self.info.shapes)
        return module

    def _fold(self, way: _Way) -> nn.Module:
        module = copy.deepcopy(self.module)
        make = {"stack": fold, "alone": OneAtATime, "whole": PerClient}[way]
        return make(self._context, module, "", self.info).eval()

    def _disagreement(self, truth: Sample, way: _Way, channels: Channels) -> str | None:
        """Say what differs if two clients run in this way, with images so in memory; None if nothing does.

        The module's patterns run as one call each, if nothing differs then.
        """
        before, self._context.channels = self._context.channels, channels
        try:
            self._fused = fused_forward(self._fold(way)) if way == "stack" else None
            if self._fused is not None and self._compare(truth, way) is None:
                return None
            self._fused = None
            return self._compare(truth, way)
        finally:
            self._context.channels = before

    def _compare(self, truth: Sample, way: _Way) -> str | None:
        whole = way == "whole"
        self._folded = convert_module(self._fold(way), truth.slope.dtype)
        before = {n: b.clone() for n, b in self._folded.named_buffers()}
        dropping = agreement.dropping(self._folded)

        def switch(on: bool) -> None:
            self._context.drops = on
            for m, name, share in dropping:
                setattr(m, name, share if on else 0.0)

        self._context.half = True
        try:
            difference = agreement.disagreement(self, truth, switch, lambda: self._context.calls > 0, whole=whole)
        except Exception as e:  # whatever a forward makes of layers that are not its own
            if whole:
                raise  # the module itself fails when it is called so: let its own words be seen
            return f"its forward pass fails in a stack ({type(e).__name__}: {str(e).partition(chr(10))[0][:120]})"
        finally:
            self._context.half = False
        changed = _changed(before, self._folded)
        if changed:
            raise UserError(
                f"buffer {changed!r} is changed by the forward pass; only batch norms may keep running statistics"
            )
        return difference

    def _samples(self, example: Tensor) -> Iterator[Sample]:
        """What the module alone gives, in types of number a stack is compared in until it agrees."""
        first, second = (torch.float32, torch.float64) if self._long else (torch.float64, torch.float32)
        given = False
        for dtype in (first, second):
            try:
                truth = agreement.sample(self.module, self.initial, self.info.parameters, example, dtype)
            except UserError:
                raise
            except Exception:  # its forward insists on the other one
                if dtype == second and not given:
                    raise
                continue
            given = True
            yield truth
            if not self._long:
                return

    def _checked_ways(self, example: Tensor) -> tuple[tuple[_Way, ...], str, RowChecks | None]:
        """The ways that a module of this kind may be run in, besides client by client, and why not in the fastest.

        With them, the checks of numbers of rows that a stack of it needs.
        """
        if has_hooks(self.module):
            return (), "hooks are registered on its layers", None
        ways: tuple[_Way, ...] = ("stack", "alone") if next(self.module.children(), None) is not None else ("stack",)
        if is_library_code(self.module):
            return ways, "", None
        checks = RowChecks(self.module, example)
        reason = checks.reason_not_to_stack()
        return (ways, "", checks) if reason is None else (ways[1:], reason, None)

    def _choose_way(self, samples: Iterator[Sample], ways: tuple[_Way, ...], reason: str) -> tuple[_Way, str]:
        """The fastest of these ways that gives each client what it gives alone, and why it is not a stack."""
        known: list[Sample] = []

        def truths() -> Iterator[Sample]:
            yield from known
            for truth in samples:
                known.append(truth)
                yield truth

        for way in ways:
            # A module may take for granted how images lie in memory, as `view` does.
            for channels, then in (("last", "either"), ("first", "first")):
                for truth in truths():
                    difference = self._disagreement(truth, way, cast(Channels, channels))
                    if difference is None:
                        self._context.channels = cast(Channels, then)
                        return way, reason
            reason = reason or cast(str, difference)
        self._context.channels = "first"
        if next(truths(), None) is None or self._disagreement(known[-1], "whole", "first") is not None:
            raise UserError(
                f"{type(self.module).__name__}: called with each client's weights, it does not give what it gives with "
                "them as its own; or the same input and random stream give different outputs each time"
            )
        return "whole", reason


def _without_stacked_form(called: Collection[PerClient], folded: nn.Module) -> tuple[str, ...]:
    """Name the layers of a stack that are called once for each client."""
    names = {m: n for n, m in folded.named_modules()}
    return tuple(f"{names[m]} ({type(m.original).__name__})" for m in called if m is not folded)


def _kind(params: Params) -> torch.dtype:
    """The type of all numbers a model is trained in."""
    return next(iter(params.values())).dtype


def _refuse_odd(module: nn.Module) -> None:
    """Say in a line what a module has that clients' weights cannot be put into, or that would not be heeded."""
    name = type(module).__name__
    if any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        raise UserError(f"{name}: has a part in TorchScript; give the module it was made from")
    for path, m in module.named_modules():
        for hook in forward_pre_hooks(m):
            if type(hook).__name__ == "WeightNorm":
                raise UserError(
                    f"{name}: layer {path!r} uses torch.nn.utils.weight_norm, whose weight is no parameter; use "
                    "torch.nn.utils.parametrizations.weight_norm"
                )
            if type(hook).__name__ == "SpectralNorm":
                raise UserError(
                    f"{name}: layer {path!r} uses torch.nn.utils.spectral_norm, which changes buffers in every call; "
                    "all clients of a stack would share them"
                )
            if isinstance(hook, BasePruningMethod):
                pruned = pruned_parameter(hook)
                raise UserError(
                    f"{name}: layer {path!r} is pruned by torch.nn.utils.prune, so its weight is no parameter; make "
                    f"the pruning permanent with torch.nn.utils.prune.remove(layer, {pruned!r}), or train "
                    "sparse models with dm-pfl or feddst"
                )
    for n, p in module.named_parameters():
        if nn.parameter.is_lazy(p):
            raise UserError(f"{name}: parameter {n!r} has no shape yet; call the module on a batch of examples first")
        if p.is_complex():
            raise UserError(f"{name}: parameter {n!r} is complex; give its real and imaginary part, as numbers")
        if has_gradient_hooks(p):
            raise UserError(f"{name}: parameter {n!r} has a hook, which a client's own weights would not; remove it")


def _as_weights(module: nn.Module, example: Tensor) -> Tensor:
    """A copy of the example, its numbers of the type the weights have."""
    kinds = (p.dtype for p in module.parameters() if p.is_floating_point())
    return example.clone() if not example.is_floating_point() else example.to(next(kinds, example.dtype), copy=True)


@torch.no_grad()
def _alters_input(module: nn.Module, example: Tensor) -> bool:
    """Whether a forward works in place on what it is given."""
    for training in (False, True):
        own, given = copy.deepcopy(module).train(training), example.clone()
        with rng.torch_generator(), suppress(Exception):  # what is wrong with it is said elsewhere
            own(given)
        if data_version(given) != 0:
            return True
    return False


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _changed(before: Params, module: nn.Module) -> str | None:
    """The first buffer that is no longer what it was: state that clients would share unawares."""
    for n, b in module.named_buffers():
        if not n.endswith("num_batches_tracked") and not torch.equal(b, before[n]):
            return next(name for name, t in unfolded_tensors(module) if t is b)
    return None


def _forget_statistics(module: nn.Module) -> None:
    """Make every norm whose statistics would be a client's state use those of the batch at hand."""
    for m in module.modules():
        if tracks(m):
            norm = cast(nn.BatchNorm2d, m)
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None


def _without_nested_tensors(module: nn.Module) -> None:
    """Make encoders compute padded places in evaluation as they do in training, where PyTorch has no zeros for them."""
    for m in module.modules():
        if isinstance(m, nn.TransformerEncoder):
            m.use_nested_tensor = False


def describe(module: nn.Module, example: Tensor, head: str | None, policy: BufferPolicy) -> ModelInfo:
    """What algorithms need to know about a module, from its names and one forward pass."""
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    odd = [n for n in trainable if "/" in n]
    if odd:
        raise UserError(
            f"parameter {odd[0]!r}: names with a slash are used for a client's further models; rename the module"
        )
    if not trainable:
        raise UserError(f"{type(module).__name__} has no parameter that requires a gradient")
    buffers = [f"{prefix}.{n}".lstrip(".") for prefix, m in module.named_modules() if tracks(m) for n in RUNNING]
    state = dict(module.named_buffers())
    shapes = {n: tuple(p.shape) for n, p in trainable.items()} | {n: tuple(state[n].shape) for n in buffers}
    cost = observe(module, example, trainable)
    return ModelInfo(
        shapes,
        frozenset(buffers),
        _head(module, trainable, head),
        cost.layers,
        cost.other_flops,
        cost.activations,
        policy,
        norms=norm_parameters(module).intersection(trainable),
        products=cost.products,
    )


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
        raise UserError(f"model.head={pattern!r} matches no parameter; the model has {', '.join(trainable)}")
    return found
