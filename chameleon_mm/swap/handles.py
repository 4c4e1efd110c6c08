"""The handles that autograd holds instead of saved tensors.

    handle = KeptTensor(t) | SwappedView(claim, saved) | WrapperHandle(t, its parts' handles)    # on_save: Note [Life]
    handle.check_version()                          # on_use: eager's "modified by an inplace operation"
    handle.saved.alias.detach()                     # the saved tensor, once its storage has its memory

Note [Version]: installing hooks switches eager's in-place check off, so every handle makes it itself. A detached alias
shares the version counter of `t` and of all its views.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.record.light_profiler import HEAP_TYPE
from chameleon_mm.swap.calling_thread import sequence_nr

if TYPE_CHECKING:
    from chameleon_mm.record.calls import Relied
    from chameleon_mm.swap.claims import Claim

# --- The version counter of a saved tensor: eager's check for writes, its error, and which saves a copy of the same bytes has
#
#     saved = SavedBytes(t)                       # at save: the bytes that `t` covers, and an alias with its counter
#     saved.check()                               # at use: eager's "modified by an inplace operation"
#     earlier.copy_includes(saved)                # at a later save of the same storage: a copy of the earlier bytes has these
#
# Version numbers of different counters say nothing about each other: outputs of `unsafe_chunk` and `unsafe_split`, `.data`,
# `set_` and memory that a kernel fills behind autograd's back share a storage and no counter. So a copy that began before a
# tensor was saved has that tensor's bytes only where the same bytes were saved before it began, under the same counter, at the
# same version. Note [Identity].
#
# Eager's error names the operator by what the tensor is when it is used, unless the operator saved its own result; the words
# of its hint and the spelling of an operator's name differ between torch versions, so they are read from an error that torch
# is made to raise. Of a tensor that nobody holds any more, the operator is named that it came from when it was saved.
#
# Note [Uncovered]: the bytes of a saved tensor are complete when the operator that saves it is over. So a copy of them may
# wait in a queue and come after that operator alone. Other bytes of the storage are not: their owner may write them while the
# copy waits, and no version counter of a saved tensor says so.
#
# Example: torch's GRU off cuDNN. Its gates are `unsafe_chunk` parts of one product, each with a counter of its own. It writes
# them in place one after the other, and saves each when it is complete.
#
# So a copy that reads bytes that no save covers does not wait in the queue. It is handed over at once, behind what waits
# there, and comes after every write until then. A copy that waits comes, piece by piece, after all that was launched until it
# is handed over, if a version counter of its saves has moved: what was written is covered by no save any more.
#
# Bytes that are written after the hand-over may arrive half written, and no use reads them: when they are saved later,
# `Claims.find` sees that this copy began too early for them.


class Origin:
    """Which output of which op a saved tensor is. Holds neither the tensor nor the node: that would close a cycle."""

    __slots__ = ("_name", "_node_number", "_output_nr", "_ref")

    def __init__(self, t: Tensor) -> None:
        self._ref = weakref.ref(t)
        node = t.grad_fn
        self._name = "" if node is None else node.name()
        self._node_number = -1 if node is None else node._sequence_nr()
        self._output_nr = t.output_nr

    def words(self, *, short_names: bool) -> str:
        name, output_nr = self._name, self._output_nr
        # None outside of a backward, whatever its stub says.
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
    """The whole message for a tensor of this (type, shape), found at `version` where `expected` was saved."""
    eager = _eagers_own()
    hint = eager[eager.index(" Hint:") :] if " Hint:" in eager else ""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what[0]} {list(what[1])}]{origin.words(short_names='ExpBackward' not in eager)} is at version {version}; "
        f"expected version {expected} instead.{hint}"
    )


def _eagers_own() -> str:
    """torch's own message for a write over exp's saved result. Raised on a thread of its own: hooks and modes are per
    thread."""
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
    """A saved tensor: the bytes of its storage that it covers, under the version counter that it had, and an alias of it."""

    __slots__ = ("_counter", "_geometry", "_origin", "alias", "begin", "end", "expected", "is_dense")

    def __init__(self, t: Tensor) -> None:
        self.expected = t._version
        """Version of the tensor when it was saved."""
        self.alias = t.detach()
        """A tensor over the same storage that shares the counter, and no node. Uses are given aliases of it, so that it alone
        is ours."""
        self._origin = Origin(t)
        # A view has its base's counter. Autograd's node keeps neither alive, so a reference that is gone vouches for nothing.
        self._counter = weakref.ref(t if (base := t._base) is None else base)
        element_bytes = t.element_size()
        shape, stride, offset = t.shape, t.stride(), t.storage_offset()
        self._geometry = (element_bytes, shape, stride, offset)
        self.is_dense = t.is_contiguous()
        """Whether it covers all bytes from its first to its last."""
        last = t.numel() - 1
        if not self.is_dense:
            dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1)
            last = sum(step * (size - 1) for step, size in dims)
            self.is_dense = _without_holes(dims)
        self.begin = int(offset) * element_bytes
        self.end = self.begin + (last + 1) * element_bytes

    @property
    def moved(self) -> bool:
        """Whether it was written to since it was saved."""
        return self.alias._version != self.expected

    def check(self) -> None:
        """Raise what eager raises when a saved tensor was written to since it was saved."""
        if self.alias._version != self.expected:
            what = self.alias.type(), self._geometry[1]
            raise RuntimeError(inplace_message(what, self._origin, self.alias._version, self.expected))

    # --- where its alias lies

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor as it was saved, but over `storage`: same strides, offset, dtype, conj and neg bits, version counter.

        A node may save it again (double backward) or write to it: either must be noticed wherever the tensor is used next.
        """
        shared = self.alias.detach()
        shared.data = self._in(storage)
        return shared

    def move_to(self, storage: torch.UntypedStorage | None) -> None:
        """Have the alias lie in `storage` from now on, as `over` says, or nowhere. It keeps its version counter."""
        self.alias.data = self._in(storage)

    def _in(self, storage: torch.UntypedStorage | None) -> Tensor:
        alias, (_, shape, stride, offset) = self.alias, self._geometry
        view = torch.empty(0, dtype=alias.dtype, device=alias.device)
        if storage is not None:
            view = view.set_(storage, offset, shape, stride)
        if alias.is_conj():
            view = view.conj()
        return view._neg_view() if alias.is_neg() else view

    # --- what a copy of its bytes has

    def copy_includes(self, later: SavedBytes, *, same_bytes: bool = False) -> bool:
        """Whether a copy of these bytes, begun after they were saved, has those of `later`, saved since then.

        `same_bytes`: both are known to cover the same ones.
        """
        if self.moved or self.expected != later.expected:
            return False
        counter = self._counter()
        return counter is not None and counter is later._counter() and (same_bytes or self.covers(later))

    def columns(self) -> tuple[int, int, int, int] | None:
        """Columns of a matrix that it covers: bytes of a row, number of rows, first byte in the row and the one after the last.

        A range without holes is one row. None: it covers other bytes.
        """
        if self.is_dense:
            return self.end, 1, self.begin, self.end
        element_bytes, shape, stride, _ = self._geometry
        dims = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1 and step > 0)
        run = 1  # elements side by side
        while dims and dims[0][0] == run:
            run *= dims.pop(0)[1]
        if not dims or dims[0][0] < run:
            return None
        width, num_rows = dims[0][0], 1
        for step, size in dims:
            if step != width * num_rows:
                return None
            num_rows *= size
        begin = self.begin % (width * element_bytes)
        if self.begin != begin or begin + run * element_bytes > width * element_bytes:
            return None
        return width * element_bytes, num_rows, begin, begin + run * element_bytes

    def covers(self, other: SavedBytes) -> bool:
        """Whether all bytes of `other` are among these."""
        if self.is_dense and self.begin <= other.begin and other.end <= self.end:
            return True
        return self._geometry == other._geometry


def cover_all(saves: Sequence[SavedBytes], nbytes: int) -> bool:
    """True if `saves` are known to cover every byte of their storage, of `nbytes`, together.

    As ranges of bytes, or as columns of one matrix, such as the parts of a fused projection. Those written since do not count.
    """
    by_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for saved in saves:
        columns = None if saved.moved else saved.columns()
        if columns is not None:
            width, num_rows, begin, end = columns
            # A range without holes is a row of a matrix that has this one alone.
            rows = (nbytes, 1) if num_rows == 1 else (width, num_rows)
            by_rows.setdefault(rows, []).append((begin, end))
    for (width, num_rows), ranges in by_rows.items():
        reach = 0
        for begin, end in sorted(ranges):
            if begin > reach:
                break
            reach = max(reach, end)
        if reach >= width and width * num_rows >= nbytes:
            return True
    return False


def _without_holes(dims: list[tuple[int, int]]) -> bool:
    """Whether (stride, size) sorted by stride leave no byte out."""
    reach = 1
    for stride, size in dims:
        if stride > reach:
            return False
        reach += stride * (size - 1)
    return True


# --- handles

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
