"""LSTM layers of many clients at once.

Where a step of one client's layer is small, a GPU spends its time on launches. So at every step in time one batched
product takes all clients' states through their own recurrent weights; the inputs' part of the gates and the weights'
gradients are one product each over all steps. Gates and states of a step are one kernel (Triton) in float32, and
PyTorch's operations otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

try:
    from personafl.models import kernels
except ImportError:  # no Triton, so no GPU it would run on
    kernels = None  # type: ignore[assignment]


class LSTMLayer(Function):
    """One layer in one direction. Gates of the inputs `[C, T, B, 4 H]`, recurrent weights `[C, 4 H, H]`, and states
    `[C, B, H]` before the first step; all states `[C, T, B, H]` and the last cell state.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = inputs.clone(memory_format=torch.contiguous_format)
        cells = gates.new_empty(*gates.shape[:3], weight.shape[2])
        states = torch.empty_like(cells)
        across = weight.transpose(1, 2)
        before = hidden, cell
        for t in range(gates.shape[1]):
            gates[:, t].baddbmm_(before[0], across)
            now = states[:, t], cells[:, t]
            _forward(gates[:, t], before[1], now[1], now[0])
            before = now
        ctx.save_for_backward(gates, weight, hidden, cell, states, cells)
        return states, cells[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_states: Tensor, for_cell: Tensor) -> tuple[Tensor, ...]:
        gates, weight, hidden, cell, states, cells = ctx.saved_tensors
        for_states = for_states.contiguous()
        slopes = torch.empty_like(gates)
        carried, for_cell = torch.zeros_like(hidden), for_cell.clone(memory_format=torch.contiguous_format)
        for t in reversed(range(gates.shape[1])):
            before = cell if t == 0 else cells[:, t - 1]
            _backward(gates[:, t], before, cells[:, t], for_states[:, t], carried, for_cell, slopes[:, t])
            carried = torch.bmm(slopes[:, t], weight)
        earlier = torch.cat([hidden.unsqueeze(1), states[:, :-1]], 1)
        for_weight = torch.bmm(slopes.flatten(1, 2).transpose(1, 2), earlier.flatten(1, 2))
        return slopes, for_weight, carried, for_cell


def _forward(gates: Tensor, before: Tensor, cell: Tensor, state: Tensor) -> None:
    """From gates before activation and the cell's last state to its next, and the layer's; gates are activated."""
    if kernels is not None and gates.is_cuda and gates.dtype == torch.float32:
        kernels.lstm_forward(gates, before, cell, state)
        return
    let, keep, new, show = gates.chunk(4, 2)
    for t in (let, keep, show):
        t.sigmoid_()
    new.tanh_()
    torch.addcmul(let * new, keep, before, out=cell)
    torch.mul(show, cell.tanh(), out=state)


def _backward(
    gates: Tensor, before: Tensor, cell: Tensor, for_state: Tensor, carried: Tensor, for_cell: Tensor, slopes: Tensor
) -> None:
    """From the gradients of a step's state to those of its gates before activation; `for_cell` goes a step back."""
    if kernels is not None and gates.is_cuda and gates.dtype == torch.float32:
        kernels.lstm_backward(gates, before, cell, for_state, carried, for_cell, slopes)
        return
    let, keep, new, show = gates.chunk(4, 2)
    through = cell.tanh()
    grad = for_state + carried
    for_cell.addcmul_(grad * show, 1 - through.square())
    parts = slopes.chunk(4, 2)
    parts[0].copy_(for_cell * new * let * (1 - let))
    parts[1].copy_(for_cell * before * keep * (1 - keep))
    parts[2].copy_(for_cell * let * (1 - new.square()))
    parts[3].copy_(grad * through * show * (1 - show))
    for_cell.mul_(keep)


def lstm(x: Tensor, weights: tuple[Tensor, Tensor, Tensor | None], hidden: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    """A layer of every client. x `[C, T, B, I]`, weights of inputs and states `[C, 4 H, .]` and the sum of the biases
    `[C, 4 H]`, states before `[C, B, H]`; all states `[C, T, B, H]`, the last one and the last of the cell."""
    of_inputs, of_states, bias = weights
    rows = x.flatten(1, 2)
    across = of_inputs.transpose(1, 2)
    gates = torch.bmm(rows, across) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, across)
    states, last = LSTMLayer.apply(gates.view(*x.shape[:3], -1), of_states, hidden, cell)  # type: ignore[no-untyped-call]
    return states, states[:, -1], last
