"""LSTM layers of many clients at once.

Where a step of one client's layer is small, a GPU spends its time on launches. So at every step in time one batched
product takes all clients' states through their own recurrent weights; the inputs' part of the gates and the weights'
gradients are one product each over all steps. Gates and states of a step are one kernel (Triton) in float32, and
PyTorch's operations otherwise. One client by itself has the same, unless its layer is small enough for cuDNN to keep.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from personafl import accel
from personafl.accel.second_derivatives import differentiable_gradients, graph_requested
from personafl.models.layers import Stacked, WithoutAutocast, dropped

kernels: Any = accel.load_kernels("kernels")

SMALL = 128  # units of a layer that cuDNN keeps on a multiprocessor, all steps of one client in one launch


class LSTMLayer(Function):
    """One layer in one direction. Inputs `[C, T, B, I]`, weights of inputs and states `[C, 4 H, .]`, the sum of the
    biases `[C, 4 H]`, and states `[C, B, H]` before the first step; all states `[C, T, B, H]`, the last of the cell.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, of_inputs: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, into = x.flatten(1, 2), of_inputs.transpose(1, 2)
        drive = torch.bmm(rows, into) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, into)
        gates = drive.view(*x.shape[:3], -1)
        cells = gates.new_empty(*gates.shape[:3], weight.shape[2])
        states = torch.empty_like(cells)
        across = weight.transpose(1, 2)
        before = hidden, cell
        for t in range(gates.shape[1]):
            gates[:, t].baddbmm_(before[0], across)
            now = states[:, t], cells[:, t]
            _forward(gates[:, t], before[1], now[1], now[0])
            before = now
        ctx.save_for_backward(x, of_inputs, weight, bias, hidden, cell, gates, states, cells)
        return states, cells[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, for_states: Tensor, for_cell: Tensor) -> tuple[Tensor | None, ...]:
        if graph_requested():
            inputs, grads = ctx.saved_tensors[:6], (for_states, for_cell)
            return tuple(differentiable_gradients(_plain_layer, inputs, grads, ctx.needs_input_grad))
        x, of_inputs, weight, _, hidden, cell, gates, states, cells = ctx.saved_tensors
        for_states = for_states.contiguous()
        slopes = torch.empty_like(gates)
        carried, for_cell = torch.zeros_like(hidden), for_cell.clone(memory_format=torch.contiguous_format)
        for t in reversed(range(gates.shape[1])):
            before = cell if t == 0 else cells[:, t - 1]
            _backward(gates[:, t], before, cells[:, t], for_states[:, t], carried, for_cell, slopes[:, t])
            carried = torch.bmm(slopes[:, t], weight)
        for_weight = torch.bmm(slopes[:, 0].transpose(1, 2), hidden)
        for_weight.baddbmm_(slopes[:, 1:].flatten(1, 2).transpose(1, 2), states[:, :-1].flatten(1, 2))
        down = slopes.flatten(1, 2)
        wanted = ctx.needs_input_grad
        for_x = torch.bmm(down, of_inputs).view(x.shape) if wanted[0] else None
        for_inputs = torch.bmm(down.transpose(1, 2), x.flatten(1, 2))
        return for_x, for_inputs, for_weight, down.sum(1) if wanted[3] else None, carried, for_cell


def _plain_layer(
    x: Tensor, of_inputs: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """The same layer as operations that autograd knows."""
    drive = x @ of_inputs.transpose(1, 2).unsqueeze(1)  # [C, T, B, 4 H]
    states = []
    for t in range(x.shape[1]):
        gates = drive[:, t] + hidden @ weight.transpose(1, 2)
        let, keep, new, show = (gates if bias is None else gates + bias.unsqueeze(1)).chunk(4, 2)
        cell = keep.sigmoid() * cell + let.sigmoid() * new.tanh()
        hidden = show.sigmoid() * cell.tanh()
        states.append(hidden)
    return torch.stack(states, 1), cell


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


def lstm_layer(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor | None], hidden: Tensor, cell: Tensor
) -> tuple[Tensor, ...]:
    """A layer of every client. x `[C, T, B, I]`, weights of inputs and states `[C, 4 H, .]` and the sum of the biases
    `[C, 4 H]`, states before `[C, B, H]`; all states `[C, T, B, H]`, the last one and the last of the cell."""
    states, last = LSTMLayer.apply(x, *weights, hidden, cell)  # type: ignore[no-untyped-call]
    return states, states[:, -1], last


class StackedLSTM(Stacked):
    """Layer by layer: of all clients at once on a GPU, client by client else; dropout by each client's own stream."""

    def forward(self, x: Tensor, states: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        lstm = cast(nn.LSTM, self.original)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise TypeError("an LSTM in a stack takes [batch, time, features], or [time, batch, features]")
        rows = self.split(x if lstm.batch_first else x.transpose(0, 1)).transpose(1, 2)  # [C, T, B, I]
        ways = 2 if lstm.bidirectional else 1
        if states is None:
            blank = rows.new_zeros(rows.shape[0], rows.shape[2], lstm.hidden_size)
            before = [(blank, blank)] * (ways * lstm.num_layers)
        else:  # [layers * ways, C * B, H] each
            before = list(zip(*(s.view(len(s), rows.shape[0], rows.shape[2], -1) for s in states), strict=True))
        last = []
        for layer in range(lstm.num_layers):
            if layer and lstm.dropout and self.training and self.context.keys is not None and self.context.drops:
                rows = dropped(rows.transpose(1, 2), lstm.dropout, self.context).transpose(1, 2)  # padding comes last
            names = [f"l{layer}{'_reverse' * way}" for way in range(ways)]
            found = [self._one_way(rows, n, *before[ways * layer + way]) for way, n in enumerate(names)]
            rows = torch.cat([f[0] for f in found], 3) if ways == 2 else found[0][0]
            last += [f[1:] for f in found]
        out = rows.transpose(1, 2).flatten(0, 1)
        ends = tuple(torch.stack([end[i].flatten(0, 1) for end in last]) for i in (0, 1))
        return out if lstm.batch_first else out.transpose(0, 1), cast(tuple[Tensor, Tensor], ends)

    def _one_way(self, rows: Tensor, name: str, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All states `[C, T, B, H]` of a layer in one direction, the last one and the last of its cell."""
        back = name.endswith("_reverse")
        rows = rows.flip(1) if back else rows
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if cast(nn.LSTM, self.original).bias else [])]
        weights = [cast(Tensor, self.get(f"{n}_{name}")) for n in names]
        if rows.is_cuda and (len(rows) > 1 or cell.shape[2] > SMALL):
            with WithoutAutocast(rows):
                bias = weights[2] + weights[3] if len(weights) == 4 else None
                rows, hidden, cell = (t.to(weights[0].dtype) for t in (rows, hidden, cell))
                states, end, last = lstm_layer(rows, (weights[0], weights[1], bias), hidden, cell)
        else:
            each = [_alone(*one) for one in zip(rows, hidden, cell, *weights, strict=True)]
            states, end, last = (torch.stack(t) for t in zip(*each, strict=True))
        return states.flip(1) if back else states, end, last


def _alone(x: Tensor, hidden: Tensor, cell: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own layer, for one client: x `[T, B, I]`, states before `[B, H]`."""
    grad, first = torch.is_grad_enabled(), (hidden.unsqueeze(0), cell.unsqueeze(0))
    held = list(weights)
    if x.is_cuda:  # cuDNN wants them in one piece, and says so where they are not
        flat = torch.split(torch.cat([w.flatten() for w in weights]), [w.numel() for w in weights])
        held = [part.view(w.shape) for part, w in zip(flat, weights, strict=True)]
    out, end, last = torch.lstm(x, first, held, len(weights) == 4, 1, 0.0, grad, False, False)
    return out, end[0], last[0]
