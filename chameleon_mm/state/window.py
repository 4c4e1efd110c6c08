"""Keep parameters and gradients within their share of device memory. Those used soonest are swapped out last.

    window = Window(home, limit_bytes=..., note_taken=...)
    entry = window.add(p, key, is_gradient=False)      # `p` is on the device, and counts
    window.use([entry, ...])                           # bring them to the device, ready for compute; prefetch the next ones
    window.send_out([entry, ...])                      # queue copies out; the memory is freed when it is needed

Storages that can be freed without a wait are freed first. Among them, the one with the latest next use is freed first (Belady's
rule), by the order of uses in the previous step.
"""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device import Device, Stream
from chameleon_mm.device.protocols import MemoryReading
from chameleon_mm.errors import HostMemoryExhausted, TransferFailed
from chameleon_mm.state.hosted import Home, HostedStorage, Where

# --- Sequence in which a step uses these storages, learned from the previous step: next uses and their distances
#
# The sequence of a completed step is the guess for the next step. A use that differs from the guess moves the position to the
# next occurrence of that key. An unknown key does not move it. A wrong guess costs only time.

UNKNOWN = 1 << 30
"""Distance of a key that is not in the sequence."""


class UseSequence:
    """Keys in order of use. Pure Python, not thread-safe."""

    def __init__(self) -> None:
        self._at = 0
        self._seen: list[int] = []
        self._in_step = False
        self._latest: int | None = None
        self._expect([])

    def begin_step(self) -> None:
        self._at, self._seen, self._in_step, self._latest = 0, [], True, None

    def end_step(self, *, completed: bool) -> None:
        """End the step. If it `completed`, its sequence is the guess for the next step."""
        self._in_step, self._at, self._latest = False, 0, None
        if completed and self._seen:
            self._expect(self._seen)

    def note(self, key: int) -> bool:
        """Record a use of `key`. Returns True if the previous use was of another key."""
        if key == self._latest:
            return False
        self._latest = key
        if self._in_step:
            self._seen.append(key)
            places = self._places.get(key, ())
            at = bisect_left(places, self._at)
            if at < len(places):
                self._at = places[at] + 1
        return True

    def distance(self, key: int) -> int:
        """Return the number of uses until that of `key`; `UNKNOWN` if `key` is not in the sequence."""
        places = self._places.get(key)
        if not places:
            return UNKNOWN
        at = bisect_left(places, self._at)
        return places[at] - self._at if at < len(places) else len(self._expected) - self._at + places[0]

    def upcoming(self) -> Iterator[int]:
        """Yield the keys of the coming uses, each once: first those of the rest of this step, then those of the next step."""
        found: set[int] = set()
        for place in chain(range(self._at, len(self._expected)), range(self._at)):
            if (key := self._expected[place]) not in found:
                found.add(key)
                yield key

    def _expect(self, keys: list[int]) -> None:
        self._expected = keys
        places = defaultdict[int, list[int]](list)
        for place, key in enumerate(keys):
            places[key].append(place)
        self._places = dict(places)


_log = logging.getLogger(__name__)

NEXT_USES = 4
"""Number of coming keys that are prefetched, and freed only if no other can be. Measured: simulated steps of the demo's GPT
with parameters swapped, 8 layers of width 384 on an A100, half of the peak as budget: 20.0 ms; 20.4 ms if they may be freed.
Width 256 on an H200, a third: 10.4 ms; 10.6 ms with 32 prefetched keys, 10.9 ms without a limit."""


class Window:
    """Storages that share `limit_bytes` of device memory. Not thread-safe: hold the executor's lock, except for `settle`."""

    def __init__(self, home: Home, *, limit_bytes: int, note_taken: Callable[[int], None]) -> None:
        """`note_taken(nbytes)`: called for all memory that the window allocates."""
        self._home, self._note_taken, self.limit_bytes = home, note_taken, limit_bytes
        self._counted_bytes = limit_bytes
        """Initial limit. Traces include it, so readings of memory include it too, even after the limit has changed."""
        self.sequence = UseSequence()
        self._entries: dict[int, HostedStorage] = {}
        """Entries by the id of their storage."""
        self._by_key: dict[int, HostedStorage] = {}
        self._all_bytes = self._resident_bytes = 0
        self._deaths: deque[tuple[int, weakref.ref[torch.UntypedStorage]]] = deque()
        self._node: object = None
        self._of_node: list[HostedStorage] = []
        """Entries used by the running autograd node, `_node`. The node needs all of them at the same time."""

    # --- contents

    @property
    def resident_bytes(self) -> int:
        self.settle()
        return self._resident_bytes

    @property
    def charged_bytes(self) -> int:
        """Bytes to count for the window: the initial limit, plus the excess of its storages over the current limit."""
        return self._counted_bytes + max(0, self.resident_bytes - self.limit_bytes)

    def beside_bytes(self, hbm_budget_bytes: int, limit_bytes: int) -> int:
        """Return the budget for an executor that counts the window as `charged_bytes`, with `limit_bytes` as its limit."""
        return hbm_budget_bytes - limit_bytes + self._counted_bytes

    @property
    def entries(self) -> list[HostedStorage]:
        self.settle()
        return list(self._entries.values())

    def find(self, storage: torch.UntypedStorage) -> HostedStorage | None:
        """Return the entry of a storage, or None. Looked up by id, confirmed by a weak reference, because ids are reused."""
        entry = self._entries.get(id(storage))
        return entry if entry is not None and entry.ref() is storage else None

    def add(self, t: Tensor, key: int, *, is_gradient: bool) -> HostedStorage:
        """Add the storage of `t`, which is on the device and not in the window yet."""
        self.settle()
        number = id(t.untyped_storage())
        entry = HostedStorage(
            t,
            "gradient" if is_gradient else "parameter",
            self._home.context.streams.current(),
            self._home.context,
            self._home.budget,
            note_resident=self._note_resident,
            key=key,
            on_death=lambda ref: self._deaths.append((number, ref)),
        )
        self._entries[number] = self._by_key[key] = entry
        self._all_bytes += entry.charged_bytes
        self._resident_bytes += entry.charged_bytes
        return entry

    def settle(self) -> None:
        """Remove the entries of storages that were freed by their users."""
        while self._deaths:
            number, ref = self._deaths.popleft()
            entry = self._entries.get(number)
            if entry is not None and entry.ref is ref:
                del self._entries[number]
                self._all_bytes -= entry.charged_bytes
                if self._by_key.get(entry.key) is entry:
                    del self._by_key[entry.key]
                if entry.where is not Where.ON_HOST:
                    self._resident_bytes -= entry.charged_bytes

    def clear(self) -> None:
        """Remove all entries and free their host memory. The storages stay as they are."""
        self._entries.clear()
        self._by_key.clear()
        self.leave_node()
        self._all_bytes = self._resident_bytes = 0

    def _note_resident(self, nbytes: int) -> None:
        """Note that an entry allocated (positive) or freed (negative) `nbytes`."""
        self._resident_bytes += nbytes
        self._note_taken(max(0, nbytes))

    # --- use

    def use_by(self, node: object, entry: HostedStorage) -> None:
        """Bring `entry` to the device for the autograd node that runs now, together with the node's earlier inputs."""
        if node is not self._node:
            self._node, self._of_node = node, []
        self._of_node.append(entry)
        self.use(self._of_node)

    def leave_node(self) -> None:
        self._node, self._of_node = None, []

    def use(self, entries: Sequence[HostedStorage]) -> None:
        """Bring `entries` to the device, ready for compute. Raises `torch.OutOfMemoryError` and `TransferFailed`."""
        is_new = False
        for entry in entries:
            is_new = self.sequence.note(entry.key) or is_new
        missing = [entry for entry in entries if entry.where is not Where.ON_DEVICE]
        if not missing and not is_new:
            return
        compute = self._home.context.streams.current()
        if missing:
            self.make_room(sum(entry.charged_bytes for entry in missing if entry.where is Where.ON_HOST), keep=entries)
            for entry in missing:
                entry.swap_in(compute)
            for entry in missing:
                entry.arrive(compute)
        self.prefetch(compute, keep=entries)

    def send_out(self, entries: Iterable[HostedStorage]) -> None:
        """Queue the copies out of `entries`, unless everything fits or the host has no room. The device memory is kept until it
        is needed."""
        if self._all_bytes <= self.limit_bytes:
            return
        for entry in entries:
            if entry.where is Where.ON_DEVICE:
                entry.note_writes()
                if not entry.host_is_current:
                    self._swap_out(entry)

    def make_room(self, nbytes: int, *, keep: Collection[HostedStorage]) -> None:
        """Free storages, first those with the furthest next use, until `nbytes` more fit or only `keep` is left."""
        near = set(islice(self.sequence.upcoming(), NEXT_USES))
        while self.resident_bytes + nbytes > self.limit_bytes and (choices := self._choices(keep)):
            self.free(
                min(choices, key=lambda entry: (entry.key in near, self._cost(entry), -self.sequence.distance(entry.key)))
            )

    def _choices(self, keep: Collection[HostedStorage]) -> list[HostedStorage]:
        """Return the storages whose device memory may be freed, except `keep` and those of the running node."""
        kept = {id(entry) for entry in (*keep, *self._of_node)}
        entries = self._entries.values()
        return [one for one in entries if one.where is not Where.ON_HOST and id(one) not in kept and not one.is_refused]

    def _cost(self, entry: HostedStorage) -> int:
        """Return the cost of freeing `entry` now: 0 none, 1 a wait for a running copy out, 2 a whole copy, 3 its copy back is
        running."""
        if entry.where is Where.COMING:
            return 3
        if entry.where is Where.LEAVING:
            return 0 if entry.is_copied else 1
        entry.note_writes()
        return 0 if entry.host_is_current else 2

    def free(self, entry: HostedStorage) -> None:
        """Free the device memory of `entry`, after a copy out if one is needed. A storage that cannot be resized stays."""
        compute = self._home.context.streams.current()
        entry.arrive(compute)
        if (storage := entry.ref()) is None:  # `arrive` dropped its last reference
            return
        if not storage.resizable():  # other code uses the memory, for example a NumPy array
            entry.swap_in(compute)
            entry.is_refused = True
            return
        if entry.where is Where.ON_DEVICE:
            entry.note_writes()
            self._swap_out(entry)
        if entry.where is Where.LEAVING:
            entry.reclaim()

    def _swap_out(self, entry: HostedStorage) -> None:
        try:
            entry.swap_out()
        except (HostMemoryExhausted, TransferFailed) as refusal:
            entry.is_refused = True
            metrics = self._home.context.metrics
            metrics.totals.fallbacks += 1
            metrics.warn(_log, "chameleon_mm: %s of %d bytes stay on the device: %s", entry.what, entry.nbytes, str(refusal))

    def prefetch(self, compute: Stream, *, keep: Collection[HostedStorage]) -> None:
        """Queue the copies back of the coming keys, into memory that is free or can be freed without a wait."""
        self.settle()
        for key in islice(self.sequence.upcoming(), NEXT_USES):
            entry = self._by_key.get(key)
            if entry is None or entry.where is not Where.ON_HOST or entry.ref() is None:
                continue
            if not self._room_was_made_for(entry, keep):
                return
            try:
                entry.swap_in(compute)
            except (torch.OutOfMemoryError, TransferFailed):  # not needed yet
                return

    def _room_was_made_for(self, wanted: HostedStorage, keep: Collection[HostedStorage]) -> bool:
        """Free, without a wait, storages used later than `wanted`, until `wanted` fits. Returns True if it fits."""
        distance = self.sequence.distance
        until = distance(wanted.key)
        while self.resident_bytes + wanted.charged_bytes > self.limit_bytes:
            later = [entry for entry in self._choices(keep) if distance(entry.key) > until and self._cost(entry) == 0]
            if not later:
                return False
            self.free(max(later, key=lambda entry: distance(entry.key)))
        return True


# --- Device memory as an executor reads it: the window always counts with its full size.
#
# So swaps inside the window are no growth of the model for readers of memory, and take nothing from the plan's share.


class DeviceBesideWindow:
    """Device whose memory readings count a window at its full size. All other members are the device's own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.window: Callable[[], Window | None] = lambda: None
        """Function that returns the window to count, or None."""
        self._taken_bytes = 0
        """Total bytes that the window has allocated so far."""

    def note_taken(self, nbytes: int) -> None:
        self._taken_bytes += nbytes

    def allocated_bytes(self) -> int:
        """Bytes in live tensors, with the window at its full size."""
        return self._device.allocated_bytes() + self._beside()

    def read_memory(self) -> MemoryReading:
        """Read memory as `Device.read_memory` does, with the window at its full size, and without its allocations."""
        now, unused = self._device.read_memory(), self._beside()
        return MemoryReading(now.allocated_bytes + unused, now.cumulative_bytes - self._taken_bytes, now.peak_bytes, unused)

    def memory_reader(self) -> Callable[[], MemoryReading]:
        return self.read_memory

    def cumulative_offset(self) -> int:
        """Return 0, because `read_memory` is complete."""
        return 0

    def _beside(self) -> int:
        window = self.window()
        return 0 if window is None else window.charged_bytes - window.resident_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)
