"""Operators of which a GPU's kernels save something else than a CPU's: under fake tensors they become what saves the same.

with GpuOperators():
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)      # saves q, k, v, the output and a row of sums
    F.dropout(x, 0.1)                                           # saves a mask of bools
    F.layer_norm(x, (64,))                                      # under autocast in float32, its result too

The CPU's fused attention takes no dropout, so torch would fall back to a kernel that saves s x s matrices; CUDA's takes it and
saves a seed. The CPU's dropout saves what it multiplies with, in the dtype of x. Shapes are all that counts, so attention drops
nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from chameleon_mm.planning.gpu_autocast import in_float32

_DROPOUT_P = 4
"""Its place among the positional arguments of attention."""


class GpuOperators(TorchFunctionMode):
    """While active, this thread's attention and dropout are those of a GPU, and so is what autocast leaves in float32."""

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
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002 - F.dropout's name
    if inplace or not training or p in (0.0, 1.0):  # no fused kernel on a GPU either
        return F.dropout(input, p, training, inplace)
    dropped, _ = torch.native_dropout(input, p, training)
    return dropped
