"""What a GPU does otherwise than a CPU, for a step under fake tensors: operators that save something else, and autocast.

with GpuOperators():
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)      # saves q, k, v, the output and a row of sums
    F.dropout(x, 0.1)                                           # saves a mask of bools
    F.rms_norm(x, (64,))                                        # saves x and one number for each row
    F.layer_norm(x, (64,))                                      # under autocast in float32, its result too
with gpu_autocast():
    with torch.autocast("cuda", dtype=torch.bfloat16):          # torch alone: a warning, and nothing is cast
        F.linear(x, weight)                                     # bfloat16, as on a GPU

The CPU's fused attention takes no dropout, so torch would fall back to a kernel that saves s x s matrices; CUDA's takes it and
saves a seed. The CPU's dropout saves what it multiplies with, in the dtype of x. Its RMS norm is made of other operators, each
of which saves something, where CUDA has one. Shapes are all that counts, so attention drops nothing here.

Fake tensors are the CPU's, so autocast becomes the CPU's, which casts down what CUDA's does: matrix products, convolutions,
attention. CUDA's casts more operators up to float32 than the CPU's does: `in_float32`, by the names that torch documents. What
is left of differences is rare: products of a matrix and a vector, and cells of recurrent layers, stay in float32 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT_P = 4
"""Index of dropout's probability among the positional arguments of attention."""

_RMS_NORMS = (F.rms_norm, torch.rms_norm)

PLANNED_ON, PLANNED_FOR = "cpu", "cuda"
"""Device of the tensors of a step without a GPU, and the one for which autocast acts there instead."""

_IN_FLOAT32 = frozenset({
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
    "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
    "frobenius_norm", "group_norm", "hinge_embedding_loss", "huber_loss", "interpolate", "kl_div", "l1_loss", "layer_norm",
    "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss", "norm",
    "normalize", "nuclear_norm", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rms_norm", "rsqrt",
    "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
})  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)


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


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """While active, autocast for CUDA is autocast for the tensors of a step without a GPU, in the same dtype."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == PLANNED_FOR:
            device_type, dtype = PLANNED_ON, dtype or torch.get_autocast_dtype(device_type)
        original(self, device_type, dtype, *args, **kwargs)

    # The one place that all spellings of it pass: torch.autocast, torch.amp's, torch.cuda.amp's, and those imported by name.
    autocast.__init__ = init  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        autocast.__init__ = original  # type: ignore[method-assign]  # as it was


def in_float32(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the operator called `name`, those cast up that CUDA's autocast casts up, if one is active."""
    if name not in _IN_FLOAT32 or not torch.is_autocast_enabled(PLANNED_ON):
        return args, kwargs
    return tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value
