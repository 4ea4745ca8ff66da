"""Fused cells of recurrent networks, and references for them, which ATen does not have on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tritonite.registry import Op
from tritonite.testing.samples import facts

# Gates of the workspace, and of the operands, by operator.
GATES = {
    "_thnn_fused_lstm_cell": (4, 4),
    "_thnn_fused_lstm_cell_backward_impl": (4, 4),
    "_thnn_fused_gru_cell": (5, 3),
    "_thnn_fused_gru_cell_backward": (5, 3),
}
facts.CANCELLING |= set(GATES)


@facts.terms("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward")
def _terms(sums: facts.Sums) -> float:
    """Return the roundings behind a gradient: ten of each row, times the mean square of the workspace to the fourth."""
    workspace = max(sums.tensors, key=torch.numel).double()
    return 10 * len(workspace) * max(1.0, float(workspace.square().mean()) ** 4)


@facts.layouts(*GATES)
def _rows(op: Op, make: facts.Make) -> Iterator[tuple[str, facts.Tensors]]:
    """Yield matrices with a column for each column of the workspace; the second one has the biases, if it differs."""
    columns = 6 * GATES[op.packet][0]
    yield "gates", [make(5, columns), make(5, columns)]
    yield "gates without biases", [make(5, columns)] * 2
    yield "gates by columns", [make(columns, 5).t(), make(5, columns)]


def _of_lstm(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _cell(tensors, 4, 4)


def _of_gru(tensors: facts.Tensors) -> dict[str, Any] | None:
    return _cell(tensors, 5, 3)


def _cell(tensors: facts.Tensors, saved: int, gates: int) -> dict[str, Any] | None:
    x, other = tensors[:2]
    if x.dim() != 2 or other.shape != x.shape or x.shape[1] % saved or not x.numel():
        return None
    size, biased = x.shape[1] // saved, other is not x
    # No plan can repeat a view of memory that several arguments share, so gates and workspace have memory of their own.
    state, columns = other[:, :size], gates * size
    return {
        "input_gates": x[:, :columns],
        "hidden_gates": other.flip(1)[:, :columns],
        "cx": state,
        "cy": state.flip(0),
        "hx": state,
        "input_bias": other[0, :columns].clone() if biased else None,
        "hidden_bias": other[-1, :columns].clone() if biased else None,
        "grad_hy": other[:, -size:],
        "grad_cy": other[:, :size] if biased else None,
        "workspace": x,
    }


facts.ARGUMENTS |= dict.fromkeys([name for name in GATES if "lstm" in name], _of_lstm)
facts.ARGUMENTS |= dict.fromkeys([name for name in GATES if "gru" in name], _of_gru)


def lstm_cell(gates: torch.Tensor, hidden: torch.Tensor, cx: torch.Tensor, bias: Any = None, other: Any = None) -> Any:
    i, f, c, o = (gates + hidden + (0 if bias is None else bias + other)).chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat((i, f, c, o), 1)


def lstm_cell_backward(
    grad_hy: Any, grad_cy: Any, cx: torch.Tensor, cy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> Any:
    i, f, c, o = workspace.chunk(4, 1)
    own = torch.zeros_like(cx) if grad_hy is None else grad_hy
    by_c = own * o * (1 - cy.tanh().square()) + (0 if grad_cy is None else grad_cy)
    gates = (
        by_c * c * i * (1 - i),
        by_c * cx * f * (1 - f),
        by_c * i * (1 - c.square()),
        own * cy.tanh() * o * (1 - o),
    )
    grad = torch.cat(gates, 1)
    return grad, by_c * f, grad.sum(0) if has_bias else None


def gru_cell(gates: torch.Tensor, hidden: torch.Tensor, hx: torch.Tensor, bias: Any = None, other: Any = None) -> Any:
    own, rest = (gates, hidden) if bias is None else (gates + bias, hidden + other)
    (a, b, c), (d, e, f) = own.chunk(3, 1), rest.chunk(3, 1)
    r, z = (a + d).sigmoid(), (b + e).sigmoid()
    n = (c + r * f).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, f), 1)


def gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    r, z, n, hx, hidden = workspace.chunk(5, 1)
    by_z, by_n = grad_hy * (hx - n) * z * (1 - z), grad_hy * (1 - z) * (1 - n.square())
    by_r = by_n * hidden * r * (1 - r)
    own, rest = torch.cat((by_r, by_z, by_n), 1), torch.cat((by_r, by_z, by_n * r), 1)
    biases = (own.sum(0), rest.sum(0)) if has_bias else (None, None)
    return own, rest, grad_hy * z, *biases


facts.REFERENCES |= {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
