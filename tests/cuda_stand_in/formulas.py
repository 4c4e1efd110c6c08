"""Operators without an equivalent CPU kernel of the same name, each by a formula.

A formula takes the operator, where random numbers come from, and the operator's arguments as CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in import attention, recurrent
from tests.cuda_stand_in.random_state import Draws

aten = torch.ops.aten


def softmax(op: Any, draws: Draws, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`half_to_float` exists on the GPU alone."""
    return op(x.float() if half_to_float else x, dim, False)  # type: ignore[no-any-return]  # an operator's result is Any


def softmax_backward(op: Any, draws: Draws, grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient of a half input whose softmax is a float comes back as half."""
    return op(grad, output.to(grad.dtype), dim, grad.dtype).to(dtype)  # type: ignore[no-any-return]  # as above


def convolution(op: Any, draws: Draws, *args: Any) -> Tensor:
    """Composite, but on a GPU it chooses among the GPU's own kernels."""
    return op(*args)  # type: ignore[no-any-return]  # as above


def by_decomposition(op: Any, draws: Draws, *args: Any) -> Any:
    return torch._decomp.decomposition_table[op](*args)


def native_dropout(op: Any, draws: Draws, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The CPU's formula, which takes no generator."""
    if x.numel() == 0:
        return x.clone(), torch.empty_like(x, dtype=torch.bool)
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=draws.generator())
    return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def fused_dropout(op: Any, draws: Draws, x: Tensor, p: float, generator: None = None) -> tuple[Tensor, Tensor]:
    """Here `p` is the probability to keep, and the mask is made of bytes."""
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(p, generator=draws.generator())
    return x.mul(mask).mul_(1 / p), mask.to(torch.uint8)


def masked_scale(op: Any, draws: Draws, x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return x * mask.to(x.dtype) * scale


def histc(op: Any, draws: Draws, x: Tensor, bins: int = 100, least: float = 0, most: float = 0) -> Tensor:
    """Counts integers as well, which the CPU's kernel does not."""
    counts: Tensor = op(x if x.is_floating_point() else x.double(), bins, least, most)
    return counts.to(x.dtype)


def product_as(op: Any, draws: Draws, *args: Any, **kwargs: Any) -> Tensor:
    """A matrix product with a result of another dtype: mm.dtype(a, b, out_dtype), addmm.dtype(c, a, b, out_dtype)."""
    tensors: Sequence[Tensor] = [a for a in args if isinstance(a, Tensor)]
    dtype = args[len(tensors)]
    return op._overloadpacket.default(*[t.to(dtype) for t in tensors], **kwargs)  # type: ignore[no-any-return]  # as above


def table() -> dict[Any, Any]:
    """Formula of each operator."""
    return {
        aten._softmax.default: softmax,
        aten._log_softmax.default: softmax,
        aten._softmax_backward_data.default: softmax_backward,
        aten._log_softmax_backward_data.default: softmax_backward,
        aten.convolution.default: convolution,
        aten._fused_rms_norm_backward.default: by_decomposition,
        aten.native_dropout.default: native_dropout,
        aten._fused_dropout.default: fused_dropout,
        aten._masked_scale.default: masked_scale,
        aten.histc.default: histc,
        aten.mm.dtype: product_as,
        aten.bmm.dtype: product_as,
        aten.addmm.dtype: product_as,
        aten.baddbmm.dtype: product_as,
        **attention.table(),
        **recurrent.table(),
    }
