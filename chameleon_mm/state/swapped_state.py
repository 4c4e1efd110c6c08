"""Optimizer state of one parameter, partly in host memory: a dict that brings a tensor to the device when it is read.

state = SwappedState(plain, home)
state.leave()                          # swap tensors out: the dict keeps them, without memory
state["exp_avg"]                       # brings it to the device; so do get, values, items, copy, pickle
state.swap_in(compute); state.arrive(compute)
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chameleon_mm.errors import HostMemoryExhausted, TransferFailed
from chameleon_mm.state.hosted import MIN_BYTES, Home, HostedStorage, Where, tensor_over
from chameleon_mm.swap.executor import Executor

if TYPE_CHECKING:
    from chameleon_mm.device import Stream

_log = logging.getLogger(__name__)

_MAPPING: Any = MutableMapping
"""Methods that read by `__getitem__`."""


class SwappedState(dict[Any, Any]):
    """State of one parameter. Readers see a dict of tensors on the device. It is pickled and copied as a plain dict."""

    def __init__(self, plain: dict[Any, Any], home: StateHome) -> None:
        super().__init__(plain)
        self._home = home
        self._hosted: dict[Any, HostedStorage] = {}
        """Tensors that were swapped out at least once, by key. Each has a block on the host."""
        home.states[id(self)] = self

    # --- calls of swapping

    def away(self) -> list[tuple[Any, HostedStorage]]:
        """Return the keys of the tensors on the host, with their hosted storages."""
        return [(key, hosted) for key, t in dict.items(self) if (hosted := self._where_away(key, t)) is not None]

    def _where_away(self, key: Any, t: object) -> HostedStorage | None:
        hosted = self._hosted.get(key)
        return None if hosted is None or hosted.where is Where.ON_DEVICE or not hosted.is_of(t) else hosted

    @property
    def away_bytes(self) -> int:
        return sum(hosted.nbytes for _, hosted in self.away())

    @property
    def moved_bytes(self) -> int:
        """Bytes of all tensors that may be swapped, on the device or on the host."""
        here = (t for key, t in dict.items(self) if self._where_away(key, t) is None)
        return self.away_bytes + sum(movable_bytes(t, self._home) for t in here)

    def end(self) -> int:
        """Bring all tensors to the device for good, and free the host memory. Returns the bytes for which the device has no
        memory; these are in pageable host memory from then on."""
        with suppress(torch.OutOfMemoryError):
            self._back()
        on_host = self.away_bytes
        with self._home.entered() as compute:  # a copy out may still have to be handed over
            for key, hosted in self.away():
                memory, t = hosted.host_bytes(compute).untyped_storage(), dict.__getitem__(self, key)
                dict.__setitem__(self, key, tensor_over(memory, t))
        self._hosted.clear()
        return on_host

    def leave(self) -> None:
        """Queue the copies out of all tensors that may be swapped, under the executor's lock. If the host is full they stay."""
        for key in list(dict.keys(self)):
            t = dict.pop(self, key)
            # Other holders would read freed memory.
            alone = isinstance(t, Tensor) and movable_bytes(t, self._home) and holders(t) <= self._home.least_holders
            dict.__setitem__(self, key, t)
            if alone and self._where_away(key, t) is None:
                self._out(key, t)
            del t

    def swap_in(self, compute: Stream) -> None:
        """Queue the copies back of all tensors on the host, under the executor's lock. Raises `torch.OutOfMemoryError` and
        `TransferFailed`."""
        for _, hosted in self.away():
            if hosted.where is Where.ON_HOST:
                self._home.budget.room_was_made(hosted.nbytes, exclude=())
            hosted.swap_in(compute)

    def arrive(self, compute: Stream) -> None:
        """Bring all tensors to the device, ready for `compute`, under the executor's lock. Raises as `swap_in` does; tensors
        copied back before the error stay."""
        try:
            self.swap_in(compute)
        finally:
            for _, hosted in self.away():
                if hosted.where is not Where.ON_HOST:
                    hosted.arrive(compute)
                    hosted.host_is_current = False  # a reader may write it

    def _out(self, key: Any, t: Tensor) -> None:
        """Queue the copy out of `t`, if the host has room."""
        hosted, home = self._hosted.get(key), self._home
        if hosted is None or not hosted.is_of(t) or hosted.nbytes != t.untyped_storage().nbytes():
            hosted = HostedStorage(
                t, "state", home.context.streams.current(), home.context, home.budget, note_resident=home.note_resident
            )
        try:
            hosted.swap_out()
        except (HostMemoryExhausted, TransferFailed) as refusal:
            _log.info("chameleon_mm: optimizer state stays on the device: %s", str(refusal))
            home.context.metrics.totals.fallbacks += 1
            return
        self._hosted[key] = home.left[id(t.untyped_storage())] = hosted
        home.recording.hide(t.untyped_storage())  # a recorded step has it until now, like later steps
        home.budget.reclaim.add(hosted)

    # --- for all other code

    def _back(self) -> None:
        """Bring all tensors to the device for a read. Raises `torch.OutOfMemoryError` and the errors of `check_readable`."""
        if away_bytes := self.away_bytes:
            self._home.check_readable("optimizer state", away_bytes)
            with self._home.entered() as compute:
                self.arrive(compute)

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        if self._where_away(key, value) is not None:
            self._back()
        return value

    get, items, values, pop, setdefault, __eq__ = (
        _MAPPING.get, _MAPPING.items, _MAPPING.values, _MAPPING.pop, _MAPPING.setdefault, _MAPPING.__eq__,
    )  # fmt: skip
    __hash__ = None

    def __iter__(self) -> Iterator[Any]:  # with its own `__iter__` no reader in C takes the raw values
        return super().__iter__()

    def popitem(self) -> Any:
        self._back()
        return super().popitem()

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        self._back()
        return super().__repr__()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


def movable_bytes(value: object, home: StateHome) -> int:
    """Return the bytes of a tensor on the device that may be swapped; 0 for any other value, a small tensor or a view."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
        return 0
    storage = value.untyped_storage()
    nbytes = storage.nbytes()
    covers = nbytes == value.numel() * value.element_size() and storage.resizable()
    return nbytes if covers and nbytes >= home.min_bytes and home.device.owns(value) else 0


def holders(t: Tensor) -> tuple[int, int]:
    """Count the references to `t`, including the caller's and this function's, and the users of its storage."""
    storage = t.untyped_storage()
    return sys.getrefcount(t), torch._C._storage_Use_Count(storage._cdata)


# --- Home of the swapped state of one session


class StateHome(Home):
    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.min_bytes = MIN_BYTES
        with torch._C._DisableTorchDispatch():
            alone = torch.empty(1)
        self.least_holders = holders(alone)
        """Result of `holders` for a tensor with one reference. Measured, because Python versions differ."""
        self.states: weakref.WeakValueDictionary[int, SwappedState] = weakref.WeakValueDictionary()
        """All swapped states by id: those of the optimizer, and those that a `state_dict` still holds."""
        self.left: weakref.WeakValueDictionary[int, HostedStorage] = weakref.WeakValueDictionary()
        """State that was swapped out at least once, by the id of its storage."""
        budget = self.budget  # not `self`: that would be a cycle
        self.note_resident: Callable[[int], None] = lambda nbytes: budget.note_allocated(max(0, nbytes))

    def find(self, storage: torch.UntypedStorage) -> HostedStorage | None:
        """Return the state with `storage` that was swapped out at least once, or None. Such state is not part of plans."""
        hosted = self.left.get(id(storage))
        return hosted if hosted is not None and hosted.ref() is storage else None
