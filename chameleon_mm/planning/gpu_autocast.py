"""`torch.autocast("cuda")` where torch finds no GPU, and for tensors that are on none: it casts all the same.

    with gpu_autocast():
        with torch.autocast("cuda", dtype=torch.bfloat16):     # torch alone: a warning, and nothing is cast
            F.linear(x, weight)                                # bfloat16, as on a GPU

Fake tensors are the CPU's, so it becomes the CPU's autocast, which casts down what CUDA's does: matrix products, convolutions,
attention. CUDA's casts more operators up to float32 than the CPU's does: `in_float32`, by the names that torch documents. What
is left of differences is rare: products of a matrix and a vector, and cells of recurrent layers, stay in float32 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PLANNED_ON = "cpu"
"""Device of the tensors of a step without a GPU."""

_PLANNED_ON = {"cuda": PLANNED_ON}
"""Device for which autocast acts instead, by the one that it is asked for."""

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


@contextmanager
def gpu_autocast() -> Iterator[None]:
    """While active, autocast for CUDA is autocast for the tensors of a step without a GPU, in the same dtype."""
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        planned_on = _PLANNED_ON.get(device_type)
        if planned_on is not None:
            device_type, dtype = planned_on, dtype or torch.get_autocast_dtype(device_type)
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
