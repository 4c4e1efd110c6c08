"""The cells that LSTM and GRU run on a GPU without cuDNN, by the formulas that the CPU's layers consist of.

The GPU's layers add the biases in the cell, the CPU's in the matrix product before it: where a product with a bias rounds as
one without and an addition, the bits are the CPU's. Workspaces have the GPU's contents: activated gates, side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in.random_state import Draws

aten = torch.ops.aten
Maybe = Tensor | None


def _plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates.clone() if bias is None else gates + bias


def lstm_cell(
    op: Any,
    draws: Draws,
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[Tensor, Tensor, Tensor]:
    workspace = _plus(hidden_gates, hidden_bias).add_(_plus(input_gates, input_bias))
    i, f, g, o = workspace.chunk(4, 1)
    i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    cy = (f * cx).add_(i * g)
    return o * cy.tanh(), cy, workspace


def lstm_cell_backward(
    op: Any, draws: Draws, grad_hy: Maybe, grad_cy: Maybe, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Maybe, Maybe, Maybe]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    through = aten.tanh_backward(grad_hy * o, tanh)
    grad_cell = through if grad_cy is None else grad_cy + through
    of_i, of_f = aten.sigmoid_backward(grad_cell * g, i), aten.sigmoid_backward(grad_cell * cx, f)
    of_g, of_o = aten.tanh_backward(grad_cell * i, g), aten.sigmoid_backward(grad_hy * tanh, o)
    gates = torch.cat((of_i, of_f, of_g, of_o), 1)
    return gates, grad_cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    op: Any,
    draws: Draws,
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Maybe = None,
    hidden_bias: Maybe = None,
) -> tuple[Tensor, Tensor]:
    input_r, input_z, input_n = _plus(input_gates, input_bias).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = _plus(hidden_gates, hidden_bias).chunk(3, 1)
    r = (hidden_r + input_r).sigmoid_()
    z = (hidden_z + input_z).sigmoid_()
    n = (input_n + hidden_n * r).tanh_()
    return (hx - n).mul_(z).add_(n), torch.cat((r, z, n, hx, hidden_n), 1)


def gru_cell_backward(
    op: Any, draws: Draws, grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Maybe, Maybe]:
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    through_z = grad * z
    of_n = aten.tanh_backward(grad - through_z, n)
    of_r = aten.sigmoid_backward(of_n * hidden_n, r)
    of_z = aten.sigmoid_backward(grad * (hx - n), z)
    of_input, of_hidden = torch.cat((of_r, of_z, of_n), 1), torch.cat((of_r, of_z, of_n * r), 1)
    return of_input, of_hidden, through_z, of_input.sum(0) if has_bias else None, of_hidden.sum(0) if has_bias else None


def table() -> dict[Any, Any]:
    """Formula of each operator."""
    return {
        aten._thnn_fused_lstm_cell.default: lstm_cell,
        aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
        aten._thnn_fused_gru_cell.default: gru_cell,
        aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    }
