"""Operators of which a GPU's kernels save something else than a CPU's: under fake tensors they become what saves the same.

with GpuOperators():
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)      # saves q, k, v, the output and a row of sums
    F.dropout(x, 0.1)                                           # saves a mask of bools
    F.rms_norm(x, (64,))                                        # saves x and one number for each row
    F.layer_norm(x, (64,))                                      # under autocast in float32, its result too

The CPU's fused attention takes no dropout, so torch would fall back to a kernel that saves s x s matrices; CUDA's takes it and
saves a seed. The CPU's dropout saves what it multiplies with, in the dtype of x. Its RMS norm is made of other operators, each
of which saves something, where CUDA has one. Shapes are all that counts, so attention drops nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from chameleon_mm.planning.gpu_autocast import in_float32

_DROPOUT_P = 4
"""Index of dropout's probability among the positional arguments of attention."""

_RMS_NORMS = (F.rms_norm, torch.rms_norm)


class GpuOperators(TorchFunctionMode):
    """While active, this thread's attention, dropout and RMS norms are a GPU's, and so is what autocast leaves in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            args = (*args[:_DROPOUT_P], *(0.0 for _ in args[_DROPOUT_P : _DROPOUT_P + 1]), *args[_DROPOUT_P + 1 :])
            if "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        args, kwargs = in_float32(getattr(func, "__name__", ""), args, kwargs)
        return _rms_norm(*args, **kwargs) if func in _RMS_NORMS else func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - F.dropout's name
    if inplace or not training or p in (0.0, 1.0):  # no fused kernel on a GPU either
        return F.dropout(input, p, training, inplace)
    dropped, _ = torch.native_dropout(input, p, training)
    return dropped


def _rms_norm(
    input: Tensor,  # noqa: A002 - F.rms_norm's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # the fused kernel takes one dtype, on a GPU too
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    normalised: Tensor = _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]  # torch's
    return normalised


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's operator, of which a build without CUDA has the shapes alone: below autograd it stays whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, scales = torch.ops.aten._fused_rms_norm(x, normalized_shape, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        ctx.normalized_shape = normalized_shape
        return out  # type: ignore[no-any-return]  # as the operator's schema has it

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            of_x, of_weight = torch.ops.aten._fused_rms_norm_backward(grads[0], x, ctx.normalized_shape, scales, weight, needed)
        return of_x, None, of_weight, None
