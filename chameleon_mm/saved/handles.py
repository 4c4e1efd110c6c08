"""The handles that autograd holds instead of saved tensors.

    handle = KeptTensor(t) | SwappedView(claim, saved) | WrapperHandle(t, its parts' handles)    # on_save: Note [Life]
    handle.check_version()                          # on_use: eager's "modified by an inplace operation"
    handle.saved.alias.detach()                     # the saved tensor, once its storage has its memory

Note [Version]: installing hooks switches eager's in-place check off, so every handle makes it itself. A detached alias
shares the version counter of `t` and of all its views.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.profiler.light import HEAP_TYPE
from chameleon_mm.saved.calling_thread import sequence_nr
from chameleon_mm.saved.version import Origin, SavedBytes, inplace_message

if TYPE_CHECKING:
    from chameleon_mm.profiler.calls import Relied
    from chameleon_mm.saved.claims import Claim


NO_HOOK = -1
"""Hook number of a handle that is a part of another one, or that was saved outside of steps."""

_NOWHERE = (-1, NO_HOOK)


class KeptTensor:
    """A saved tensor that stays on the device. It is held by reference, as eager holds it, unless it may be a result of the
    node that saves it, or a view of one. That one is detached: a node must not keep itself."""

    __slots__ = ("__weakref__", "_origin", "expected", "relied", "saved_at", "tensor")

    def __init__(self, t: Tensor, saved_at: tuple[int, int] = _NOWHERE, *, by_reference: bool = False) -> None:
        self.saved_at = saved_at
        """The step, and the number of the hook in it."""
        self.relied: Relied | None = None
        """What rests on its bytes, in a step that recomputes."""
        self.expected = t._version
        """The tensor's version when it was saved."""
        self.tensor = t
        self._origin: Origin | None = None  # the tensor tells of itself
        if by_reference:
            return
        node, may_be_result = t.grad_fn, t._base is not None
        if node is not None and not may_be_result:
            # A node written in C++ takes its number right before it saves. One of a function in Python may take it long before.
            may_be_result = node._sequence_nr() == sequence_nr() - 1 or bool(type(node).__flags__ & HEAP_TYPE)
        if may_be_result:
            self.tensor, self._origin = t.detach(), Origin(t)

    @property
    def is_as_saved(self) -> bool:
        """Whether nobody wrote to it since it was saved."""
        return self.tensor._version == self.expected

    def check_version(self) -> None:
        t = self.tensor
        if t._version != self.expected:
            raise RuntimeError(inplace_message((t.type(), t.shape), self._origin or Origin(t), t._version, self.expected))


class SwappedView:
    """One saved tensor whose storage moves: the storage's record, and the alias of the tensor."""

    __slots__ = ("__weakref__", "claim", "saved", "saved_at", "swap_in_number")

    def __init__(self, claim: Claim, saved: SavedBytes) -> None:
        self.saved_at = _NOWHERE
        self.claim = claim
        self.saved = saved
        self.swap_in_number = -1
        """The storage's swap-in number at which this view was last used; the storage counts down the uses that are left."""

    def check_version(self) -> None:
        self.saved.check()


class WrapperHandle:
    """A saved wrapper subclass (DTensor, NF4, Float8, jagged ...): handles of the tensors it wraps, and how to wrap them again.

    PyTorch's own protocol for such classes: `__tensor_flatten__` and `__tensor_unflatten__`. Writes reach the inner tensors,
    whose handles check their versions; the wrapper's own counter is checked too while anybody holds the wrapper. Where a single
    one of them moves, as of a DTensor, steps and plans take the wrapper's hooks for hooks of that one.
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
        """Handle of the only part that moves, which may be of another wrapper; None: several do."""
        self.saved_at = _NOWHERE
        self._rest = rest
        self._context = context
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
        """Claim on the only storage in it that moves; None: several do."""
        return None if self.moving is None else self.moving.claim

    @property
    def saved_at(self) -> tuple[int, int]:
        """The step, and the number of the hook in it; of the only part that moves, too."""
        return self._saved_at

    @saved_at.setter
    def saved_at(self, at: tuple[int, int]) -> None:
        self._saved_at = at
        if self.moving is not None:
            self.moving.saved_at = at

    def rebuild(self, use: Callable[[Handle, bool], Tensor]) -> Tensor:
        """The wrapper as it was saved. `use(handle, at_hook)`: tensor of a part, for which the wrapper's hook is or is not."""
        whole = {**{name: use(part, part is self.moving) for name, part in self.parts.items()}, **self._rest}
        wrapped: Tensor = self._type.__tensor_unflatten__(whole, self._context, self._shape, self._stride)
        return wrapped


Handle = KeptTensor | SwappedView | WrapperHandle
"""Everything that autograd may hold for one saved tensor."""


def used_in_child(nbytes: int, pid: int) -> RuntimeError:
    """The error for a use in a forked child of the process `pid`, which saved the tensor of so many bytes."""
    return RuntimeError(
        f"a saved tensor of {nbytes} bytes: expected a use in the process that saved it ({pid}), got one in a forked child "
        f"({os.getpid()}), where its device cannot be used; run backward in the parent"
    )


def used_in_capture(nbytes: int) -> RuntimeError:
    """The error for a use in the capture of a graph that the save is no part of."""
    return RuntimeError(
        f"a CUDA graph that captures a backward: expected its forward in the capture too, got a tensor of {nbytes} bytes that "
        f"was saved before and may be moved between replays; capture both together"
    )


def flat_bytes(storage: torch.UntypedStorage) -> Tensor:
    """A flat uint8 tensor over all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
