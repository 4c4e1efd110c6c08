"""Checks whether many tensors are laid out as others were, by one call for all of them.

    guard = LayoutGuard(tensors)
    guard.passes(others)      # True: each has the device, dtype, sizes and strides of its peer.   False: that is not known

From Python each attribute of a tensor costs 40-60 ns, and its layout is five of them. torch.compile asks as much of all inputs
of a graph before each run of it, in C++, at 50 ns a tensor for everything. The class that does so is private to torch: its
verdict is tried out before it is believed, and where it is not there, or not believed, no guard passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class LayoutGuard:
    """Recognises batches of the layouts of one batch of strided tensors. Holds none of them."""

    __slots__ = ("_check", "_count")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        guards = _tensor_guards()
        self._count = len(tensors)
        self._check = None if guards is None else _check_of(guards, tensors)

    def passes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors` surely have the layouts. One call for all of them.

        False also for what changes nothing of a layout: a tensor that is there twice or requires a gradient, a subclass,
        inference mode. The caller then looks at each.
        """
        return self._check is not None and len(tensors) == self._count and self._check(*tensors)


def _check_of(guards: Any, tensors: Sequence[Tensor]) -> Callable[..., bool]:
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


@functools.cache  # what the installed torch is does not change
def _tensor_guards() -> Any:
    """torch's class, where it is there and tells layouts apart, else None."""
    try:
        from torch._C._dynamo.guards import TensorGuards  # in torch 2.11 to 2.13

        with torch._C._DisableTorchDispatch():  # a mode of the caller's is not asked
            return TensorGuards if _tells_apart(TensorGuards) else None
    except (ImportError, AttributeError, TypeError, RuntimeError):  # another torch than those: attributes tell the same
        return None


def _tells_apart(guards: Any) -> bool:
    """Whether `guards` know a flat buffer from what differs in one thing, and from its like."""

    def buffer(*sizes: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    others = (buffer(3), buffer(5), buffer(2, 2), buffer(1, 4), buffer(8)[::2], buffer(4, dtype=torch.int8))
    flat, second = _check_of(guards, [buffer(4)]), _check_of(guards, [buffer(4), buffer(4)])
    return (
        flat(buffer(4))
        and second(buffer(4), buffer(4))
        and not any(map(flat, (*others, buffer(4, device="meta"))))
        and not any(second(buffer(4), other) for other in others)
    )
