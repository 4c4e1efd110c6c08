"""Saves a wrapper subclass by the tensors that it wraps, each as one of its own would be."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chameleon_mm.saved.classify import unwrapped
from chameleon_mm.saved.handles import Handle, KeptTensor, WrapperHandle


def save_parts(t: Tensor, save: Callable[[Tensor], Handle]) -> WrapperHandle | None:
    """Save each tensor that the wrapper `t` wraps by `save`; None if it cannot be unwrapped or nothing of it would move."""
    unwrapped_parts = unwrapped(t)
    if unwrapped_parts is None:
        return None
    inner, context = unwrapped_parts
    # A jagged tensor's symbolic size is known by the identity of its offsets, so all but its values stays as it is.
    stays = set(inner) - {"_values"} if t.is_nested else set()
    parts = {name: save(part) for name, part in inner.items() if isinstance(part, Tensor) and name not in stays}
    if all(isinstance(part, KeptTensor) for part in parts.values()):
        return None
    rest = {name: part for name, part in inner.items() if name not in parts}
    return WrapperHandle(t, parts, rest, context)
