"""Protocols of a hook in the device's allocator, which reclaims memory in the middle of an allocation that finds none.

    hook = device.allocator_hook()                   # None where there is none
    held = hook.hold(storage, done, owner, tensors)  # so many tensors over the storage are the caller's own
    held.withdraw()                                  # whether its memory is still there

Between two hooks of autograd the model allocates as it likes. A storage that is being copied to the host is lent to the
allocator meanwhile, with the event after the copy and the stream that owns its memory. Where the allocator finds no block, it
makes the owner wait for the event and takes the memory. Note [Reclaim].
"""

from __future__ import annotations

from typing import Protocol

import torch

from chameleon_mm.device.protocols import Event, Stream


class HeldStorage(Protocol):
    """A storage whose memory the allocator may reclaim: then it has none, and no bytes."""

    @property
    def reclaimed(self) -> bool:
        """Whether the allocator has reclaimed its memory."""

    def withdraw(self) -> bool:
        """Take it back, so that the allocator reclaims it no more. Returns False where it has. Once."""


class AllocatorHook(Protocol):
    """Interface of a hook to which one session lends storages. Any thread may allocate, and none of our locks is taken then."""

    @property
    def reclaimed(self) -> int:
        """Number of storages that the allocator has reclaimed, so far."""

    def hold(self, storage: torch.UntypedStorage, done: Event, owner: Stream, tensors: int) -> HeldStorage | None:
        """Hold `storage`, of `owner`'s memory, whose copy is complete at `done`; None: it is not one that may be held.

        Its memory goes when nobody else refers to the storage than `tensors` tensors and one attribute of the caller, in one of
        two ways: the copy is complete, or `owner` waits for it because memory is short. Until `withdraw` the caller gives it to
        nobody.
        """

    def set_limits(self, limit_bytes: int, growth_bytes: int | None) -> None:
        """Set what the allocator may take from the device, and what may be allocated until this is set again (None: not known).

        Memory is short where the two together pass what the allocator or the device has.
        """
