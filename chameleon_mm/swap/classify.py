"""Decide which saved tensors must not move, and why.

    reason_to_stay(t, device, protected, min_bytes)     "" for a plain activation, else the reason to keep it

Note [Parameters]: a parameter, or a view of one, is kept by reference. It lives on the device anyway. Others may free and
refill its storage at any time: FSDP2 resizes it to zero bytes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chameleon_mm.device import Device
from chameleon_mm.swap.copy_queue import LOG_EACH, Warn
from chameleon_mm.swap.handles import Handle, KeptTensor, WrapperHandle

_log = logging.getLogger(__name__)

_MOST_VIEWS = 8
"""Maximum number of operators between a wrapper parameter and a view of its inner tensors."""


class ProtectedStorages:
    """Storages that never move: a model's parameters and buffers, and storages that outlived their saves."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self.refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Weak references by the storage's id. A storage without an entry is not protected."""
        for t in tensors:
            self.add(t.untyped_storage())

    def add(self, storage: torch.UntypedStorage) -> None:
        key, refs = id(storage), self.refs

        def died(ref: weakref.ref[torch.UntypedStorage]) -> None:
            if refs.get(key) is ref:
                del refs[key]

        self.refs[key] = weakref.ref(storage, died)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        ref = self.refs.get(id(storage))
        return ref is not None and ref() is storage


def reason_to_stay(t: Tensor, device: Device, protected: ProtectedStorages, min_bytes: int) -> str:
    """Return why `t` must not move; "" for a plain activation. A tensor whose storage has fewer than `min_bytes` is "small" on
    any device and in any layout. Inner tensors of a "subclass" may move."""
    kind = type(t)
    # The class is tested first, because `isinstance(t, Parameter)` runs a slow check in Python.
    if kind is not Tensor:
        if kind is Parameter or isinstance(t, Parameter) or isinstance(t._base, Parameter):
            return "parameter"
        return "leaf" if t.is_leaf and t.requires_grad else "subclass"
    try:
        storage = t.untyped_storage()
        nbytes = storage.nbytes()
    except RuntimeError:  # none: sparse tensors, and those of functorch and of torch.autograd.functional
        storage = None
    else:
        if nbytes < min_bytes:
            return "small" if nbytes else "empty"
    # A view is classified by its base. Moving a view of a leaf frees nothing, and FSDP2 may free it (a parameter's local part).
    # A view of an activation may itself be a leaf if a custom function's forward made it (the local part of a `DTensor`).
    holder = t
    if (base := t._base) is not None:
        holder = base
        if type(base) is not Tensor and isinstance(base, Parameter):
            return "parameter"
    if holder.requires_grad and holder.is_leaf:
        return "leaf"
    if storage is None:
        if t.layout is not torch.strided:
            return "layout"
        return "functorch" if torch._C._functorch.is_functorch_wrapped_tensor(t) else "no_storage"
    if id(storage) in protected.refs and storage in protected:
        return "persistent"
    if t.is_nested or t.is_quantized:
        return "layout"
    if not device.owns(t):
        return "other_device"
    # Two kinds have no memory: tensors of functionalization, and zeros that are never written, such as those of a dual tensor
    # without a tangent in forward-mode differentiation. The question copies no memory that is copied on write.
    if nbytes and not torch._C._data_address(t):  # type: ignore[attr-defined]  # torch declares it in no stub
        return "no_storage"
    if base is not None and t.requires_grad and not base.requires_grad and is_part_of_parameter(t):
        return "parameter"
    # A storage that torch did not allocate cannot be freed.
    return "borrowed" if nbytes and not storage.resizable() else ""


def is_part_of_parameter(t: Tensor) -> bool:
    """True if `t`, a view made by a custom function, views an inner tensor of a wrapper parameter. `to_local()` of a `DTensor`
    makes such views. FSDP2 frees that memory and fills it again."""
    node, storage = t.grad_fn, t.untyped_storage()
    for _ in range(_MOST_VIEWS):
        before = () if node is None else node.next_functions
        if len(before) != 1:
            return False
        node = before[0][0]
        leaf = getattr(node, "variable", None)  # only the node that accumulates a leaf's gradient has one
        if leaf is not None:
            parts = unwrapped(leaf) if isinstance(leaf, Parameter) else None
            inner = () if parts is None else parts[0].values()
            return any(isinstance(part, Tensor) and part.untyped_storage()._cdata == storage._cdata for part in inner)
    return False


def unwrapped(t: Tensor, warn: Warn = LOG_EACH) -> tuple[dict[str, Any], Any] | None:
    """Return the inner values of a wrapper subclass, and the context to wrap them again; else call `warn` and return None.

    Most inner values are tensors. A DTensor also has its mesh.
    """
    wrapper: Any = t  # the stub's protocol class cannot be a Tensor for mypy
    if not is_traceable_wrapper_subclass(wrapper):
        return None
    try:
        if (wait := getattr(wrapper, "trigger_wait", None)) is not None:
            wait()  # for a collective's result: a copy before that would have other bytes
        names, context = wrapper.__tensor_flatten__()
        inner = {name: getattr(wrapper, name) for name in names}
    except Exception as error:  # noqa: BLE001 - foreign code; a hook that raises breaks the graph, a kept tensor does not
        warn(_log, "chameleon_mm: %s could not be taken apart and stays on the device: %s", type(t).__name__, str(error))
        return None
    return inner, context


def save_parts(t: Tensor, save: Callable[[Tensor], Handle], warn: Warn) -> WrapperHandle | None:
    """Save each inner tensor of the wrapper `t` by `save`. Returns None if `t` cannot be unwrapped or none would move."""
    unwrapped_parts = unwrapped(t, warn)
    if unwrapped_parts is None:
        return None
    inner, context = unwrapped_parts
    # The identity of a jagged tensor's offsets determines its symbolic size, so only its values may move.
    stays = set(inner) - {"_values"} if t.is_nested else set()
    parts = {name: save(part) for name, part in inner.items() if isinstance(part, Tensor) and name not in stays}
    if all(isinstance(part, KeptTensor) for part in parts.values()):
        return None
    rest = {name: part for name, part in inner.items() if name not in parts}
    return WrapperHandle(t, parts, rest, context)
