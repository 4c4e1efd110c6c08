"""Handles that autograd holds instead of saved tensors.

    handle = KeptTensor(t) | SwappedView(claim, saved) | WrapperHandle(t, its parts' handles)    # on_save: Note [Life]
    handle.check_version()                          # on_use: eager's "modified by an inplace operation"
    handle.saved.alias.detach()                     # the saved tensor, once its storage has its memory

Note [Version]: saved-tensor hooks switch eager's in-place check off, so every handle makes that check. A detached alias shares
the version counter of `t` and of all its views.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.record.light_profiler import HEAP_TYPE
from chameleon_mm.swap.calling_thread import sequence_nr

if TYPE_CHECKING:
    from chameleon_mm.record.calls import Relied
    from chameleon_mm.swap.claims import Claim

# --- Version counter of a saved tensor: eager's check for writes, eager's error, and which saves a copy includes
#
#     saved = SavedBytes(t)                       # at save: the bytes that `t` covers, and an alias with its counter
#     saved.check()                               # at use: eager's "modified by an inplace operation"
#     earlier.copy_includes(saved)                # at a later save of the storage: its copy has these, Note [Identity]
#
# Eager's error names the tensor's `grad_fn` at its use, or at its save if an operator saved its own output. If the tensor was
# freed, our error names the `grad_fn` at its save. The hint and the spelling of operator names differ between torch versions.
# We read both from an error that we provoke in torch.

_Ref = Callable[[], Tensor | None]
"""Weak reference to a tensor, which returns None once the tensor is freed."""


def _weakly(t: Tensor | None) -> _Ref:
    return (lambda: None) if t is None else weakref.ref(t)


class Origin:
    """Operator and output index that a saved tensor came from. Holds neither tensor nor node, which would make a cycle."""

    __slots__ = ("_name", "_node_number", "_output_nr", "_ref")

    def __init__(self, t: Tensor) -> None:
        self._ref: _Ref = weakref.ref(t)
        node = t.grad_fn
        self._name = "" if node is None else node.name()
        self._node_number = -1 if node is None else node._sequence_nr()
        self._output_nr = t.output_nr

    @classmethod
    def known(cls, t: Tensor | None, name: str, node_number: int, output_nr: int) -> Origin:
        """Return the origin of a tensor that was saved earlier. `t` is None if the tensor was freed."""
        origin = cls.__new__(cls)
        origin._ref, origin._name, origin._node_number, origin._output_nr = _weakly(t), name, node_number, output_nr
        return origin

    def words(self, *, short_names: bool) -> str:
        name, output_nr = self._name, self._output_nr
        # Outside of a backward it is None, although its stub excludes that.
        number_of_user = getattr(torch._C._current_autograd_node(), "_sequence_nr", None)
        own_result = number_of_user is not None and number_of_user() == self._node_number
        t = self._ref()
        if t is not None and not own_result:
            node = t.grad_fn
            name, output_nr = ("" if node is None else node.name()), t.output_nr
        if not name:
            return ""
        stem, backward, number = name.rpartition("Backward")
        spelled = stem if short_names and backward and number.isdecimal() else name
        return f", which is output {output_nr} of {spelled},"


def inplace_message(what: tuple[str, torch.Size], origin: Origin, version: int, expected: int) -> str:
    """Return eager's full message for a tensor of this (type, shape), saved at version `expected` and now at `version`."""
    eager = _eagers_own()
    hint = eager[eager.index(" Hint:") :] if " Hint:" in eager else ""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what[0]} {list(what[1])}]{origin.words(short_names='ExpBackward' not in eager)} is at version {version}; "
        f"expected version {expected} instead.{hint}"
    )


def _eagers_own() -> str:
    """Return torch's own message for a write to the saved result of `exp`. A new thread provokes it, free of hooks and
    modes."""
    said: list[str] = []

    def provoke() -> None:
        with torch.enable_grad():
            out = torch.ones(1, requires_grad=True).exp()
            out.add_(1)
            try:
                out.backward()
            except RuntimeError as error:
                said.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    return said[0] if said else ""


class SavedBytes:
    """Saved tensor: the bytes that it covers in its storage, its version counter, its version at the save, and an alias."""

    __slots__ = ("_counter", "_geometry", "_origin", "alias", "begin", "end", "expected", "is_dense")

    def __init__(self, t: Tensor) -> None:
        self.expected = t._version
        """Version of the tensor when it was saved."""
        self.alias = t.detach()
        """Detached tensor over the same storage, with the same version counter. Private: each use gets a new alias of it."""
        self._origin = Origin(t)
        # A view shares its base's counter. Autograd's node keeps neither alive, so a dead reference proves nothing.
        self._counter: _Ref = weakref.ref(t if (base := t._base) is None else base)
        element_bytes = t.element_size()
        shape, stride, offset = t.shape, t.stride(), t.storage_offset()
        self._geometry = (element_bytes, shape, stride, offset)
        self.is_dense = t.is_contiguous()
        """True if the tensor covers all bytes from its first to its last."""
        last = t.numel() - 1
        if not self.is_dense:
            dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1)
            last = sum(step * (size - 1) for step, size in dims)
            self.is_dense = _without_holes(dims)
        self.begin = int(offset) * element_bytes
        self.end = self.begin + (last + 1) * element_bytes

    @classmethod
    def known(cls, alias: Tensor, expected: int, origin: Origin, counter: Tensor | None) -> SavedBytes:
        """Make the record of a tensor saved earlier, with its `alias`. `counter`: the tensor, or a view's base; None: freed."""
        saved = cls(alias)
        saved.alias, saved.expected, saved._origin, saved._counter = alias, expected, origin, _weakly(counter)
        return saved

    @property
    def moved(self) -> bool:
        """True if the tensor was written to since it was saved."""
        return self.alias._version != self.expected

    def check(self) -> None:
        """Raise eager's error if the tensor was written to since it was saved."""
        if self.alias._version != self.expected:
            what = self.alias.type(), self._geometry[1]
            raise RuntimeError(inplace_message(what, self._origin, self.alias._version, self.expected))

    # --- storage of the alias

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the saved tensor over `storage`: same strides, offset, dtype, conj and neg bits, version counter.

        A node may save the tensor again (double backward) or write to it. The shared counter shows that to the next use.
        """
        shared = self.alias.detach()
        shared.data = self._in(storage)
        return shared

    def move_to(self, storage: torch.UntypedStorage) -> None:
        """Make the alias a view of `storage`, as in `over`. The alias keeps its version counter."""
        self.alias.data = self._in(storage)

    def _in(self, storage: torch.UntypedStorage) -> Tensor:
        alias, (_, shape, stride, offset) = self.alias, self._geometry
        view = torch.empty(0, dtype=alias.dtype, device=alias.device).set_(storage, offset, shape, stride)
        if alias.is_conj():
            view = view.conj()
        return view._neg_view() if alias.is_neg() else view

    # --- which saves a copy includes

    def copy_includes(self, later: SavedBytes) -> bool:
        """True if a copy that began after this save includes the bytes of `later`, a later save."""
        if self.moved or self.expected != later.expected:
            return False
        counter = self._counter()
        return counter is not None and counter is later._counter() and self.covers(later)

    def covers(self, other: SavedBytes) -> bool:
        """True if this tensor is known to cover all bytes of `other`."""
        if self.is_dense and self.begin <= other.begin and other.end <= self.end:
            return True
        return self._geometry == other._geometry


def _without_holes(dims: list[tuple[int, int]]) -> bool:
    """True if `dims`, (stride, size) pairs sorted by stride, leave no gaps."""
    reach = 1
    for stride, size in dims:
        if stride > reach:
            return False
        reach += stride * (size - 1)
    return True


# --- handles

NO_HOOK = -1
"""Hook number of a save without a number: a part of another handle, or a save outside of steps."""

_NOWHERE = (-1, NO_HOOK)


class KeptTensor:
    """Saved tensor that stays on the device. It is held by reference, as in eager, unless it may be a result of the node that
    saves it, or a view of one. Such a tensor is detached, because a node must not keep itself alive."""

    __slots__ = ("__weakref__", "_origin", "expected", "relied", "saved_at", "tensor")

    def __init__(self, t: Tensor, saved_at: tuple[int, int] = _NOWHERE, by_reference: bool = False) -> None:
        self.saved_at = saved_at
        """Step and hook number of the save."""
        self.relied: Relied | None = None
        """Handles and dropped storages that depend on its bytes, in a step that recomputes; None: none do."""
        self.expected = t._version
        """Version of the tensor when it was saved."""
        self.tensor = t
        self._origin: Origin | None = None  # None: read from the tensor when needed
        if by_reference:
            return
        node, may_be_result = t.grad_fn, t._base is not None
        if node is not None and not may_be_result:
            # A C++ node takes its sequence number right before it saves; the node of a Python function perhaps much earlier.
            may_be_result = node._sequence_nr() == sequence_nr() - 1 or bool(type(node).__flags__ & HEAP_TYPE)
        if may_be_result:
            self.tensor, self._origin = t.detach(), Origin(t)

    @classmethod
    def known(cls, t: Tensor, expected: int, origin: Origin | None, saved_at: tuple[int, int]) -> KeptTensor:
        """Make the handle of a tensor saved earlier. `origin`: as in `__init__`; None: the tensor is held by reference."""
        kept = cls(t, saved_at, by_reference=True)
        kept.expected, kept._origin = expected, origin
        return kept

    def check_version(self) -> None:
        t = self.tensor
        if t._version != self.expected:
            raise RuntimeError(inplace_message((t.type(), t.shape), self._origin or Origin(t), t._version, self.expected))


class SwappedView:
    """Saved tensor whose storage moves: the claim on the storage, and the tensor's bytes and alias."""

    __slots__ = ("__weakref__", "claim", "saved", "saved_at", "swap_in_number")

    def __init__(self, claim: Claim, saved: SavedBytes) -> None:
        self.saved_at, self.claim, self.saved = _NOWHERE, claim, saved
        self.swap_in_number = -1
        """Swap-in number of the storage at this view's last use. `Uses` reads it to count the uses to come."""

    def check_version(self) -> None:
        self.saved.check()


class WrapperHandle:
    """Saved wrapper subclass (DTensor, NF4, Float8, jagged ...): handles of its inner tensors, and how to wrap them again.

    It uses PyTorch's protocol for such classes: `__tensor_flatten__` and `__tensor_unflatten__`. A write to the wrapper writes
    the inner tensors, whose handles check their versions. While the wrapper is alive, its own counter is checked too. If only
    one inner tensor moves, as in a DTensor, steps and plans treat the wrapper's hooks as hooks of that tensor.
    """

    __slots__ = (
        "_context", "_expected", "_origin", "_ref", "_rest", "_saved_at", "_shape", "_stride", "_type", "moving", "parts"
    )  # fmt: skip

    def __init__(self, t: Tensor, parts: dict[str, Handle], rest: dict[str, Any], context: Any) -> None:
        self.parts = parts
        moving = [part for part in parts.values() if not isinstance(part, KeptTensor)]
        only = moving[0] if len(moving) == 1 else None
        self.moving: SwappedView | WrapperHandle | None = (
            None if isinstance(only, WrapperHandle) and only.moving is None else only
        )
        """Handle of the inner tensor that moves (a `WrapperHandle` if it is a wrapper itself); None if none or several move."""
        self.saved_at, self._rest, self._context = _NOWHERE, rest, context
        self._type: Any = type(t)
        self._shape = t.shape
        self._stride = t.stride()
        self._expected = t._version
        self._ref = weakref.ref(t)
        self._origin = Origin(t)

    def check_version(self) -> None:
        t = self._ref()
        if t is not None and t._version != self._expected:
            raise RuntimeError(inplace_message((t.type(), t.shape), self._origin, t._version, self._expected))

    @property
    def claim(self) -> Claim | None:
        """Claim on the wrapper's only storage that moves; None if none or several move."""
        return None if self.moving is None else self.moving.claim

    @property
    def saved_at(self) -> tuple[int, int]:
        """Step and hook number of the save. If only one inner tensor moves, it has the same numbers."""
        return self._saved_at

    @saved_at.setter
    def saved_at(self, at: tuple[int, int]) -> None:
        self._saved_at = at
        if self.moving is not None:
            self.moving.saved_at = at

    def rebuild(self, use: Callable[[Handle, bool], Tensor]) -> Tensor:
        """Rebuild the wrapper. `use(handle, at_hook)` returns an inner tensor. `at_hook`: the hook counts as that tensor's."""
        whole = {**{name: use(part, part is self.moving) for name, part in self.parts.items()}, **self._rest}
        wrapped: Tensor = self._type.__tensor_unflatten__(whole, self._context, self._shape, self._stride)
        return wrapped


Handle = KeptTensor | SwappedView | WrapperHandle


def used_in_child(nbytes: int, pid: int) -> RuntimeError:
    """Error for a use in a forked child. `pid`: the process that saved the tensor of `nbytes`."""
    return RuntimeError(
        f"a saved tensor of {nbytes} bytes: expected a use in the process that saved it ({pid}), got one in a forked child "
        f"({os.getpid()}), where its device cannot be used; run backward in the parent"
    )


def used_in_capture(nbytes: int) -> RuntimeError:
    """Error for a use inside a graph capture that does not include the save."""
    return RuntimeError(
        f"a CUDA graph that captures a backward: expected its forward in the capture too, got a tensor of {nbytes} bytes that "
        f"was saved before and may be moved between replays; capture both together"
    )


def flat_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a flat uint8 tensor over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
