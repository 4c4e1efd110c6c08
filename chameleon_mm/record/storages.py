"""Table of the storages of one step, held by weak reference: numbers, births, deaths, and memory that only the device counts.

    table.record_deaths()                 # before each tick: deaths so far belong to the previous tick
    table.add(storage, born=tick)         # a new storage: a callback of its weak reference notes its death
    table.read(allocated_bytes, ...)      # unseen memory that was freed since existed before the step: it gets a record

A storage dropped by swapping is not dead. It dies once it has no device copies and no claims.

    claims:         0 --add_claim--> n --retired--> 0   handles that autograd holds
    device copies:  1 --died--> 0 --restored--> 1 ...   device memory with its bytes
    both 0: it dies

    readings = Readings(device)           # the device's counters after every operator: the operator's inner memory
    inner_bytes = readings.take(table, new_storages, tick=..., made_bytes=...)

    allocated since the last reading                   growth of the cumulative count
    - results of the operator                          made_bytes
    - unknown memory that still exists                 a library's workspace: later steps begin with it
    = allocated and freed again                        at least the operator's inner memory at its peak

It is more if the operator allocated several buffers in turn, or if another thread allocated meanwhile.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from chameleon_mm.device import Device
from chameleon_mm.plan.trace import NEVER, TensorKind, TraceBuilder
from chameleon_mm.units import allocated_size


class Readings:
    """Readings of the device's memory counters in one step, which begins now. Not thread-safe.

    There is one reading after each operator, because a reading for several could not be divided among them. On a GPU it takes
    the host 20 us, half the time of a short operator and a fifth of its recording. Torch uses this time for a dictionary of all
    counters, which the C++ helper `memory`, if built, avoids. The peak counter would need a reset before each operator, and
    belongs to users.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = device.read_memory()
        self._freed_by_then = 0
        """Bytes that the table's storages had freed by the last reading."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated at the last reading."""
        return self._last.allocated_bytes

    def take(
        self,
        table: StorageTable,
        new_storages: Sequence[torch.UntypedStorage] = (),
        *,
        tick: int,
        fresh: bool = False,
        made_bytes: int = 0,
    ) -> int:
        """Read the counters and pass them to `StorageTable.read` of `table`. `made_bytes`: bytes of the table's storages made
        since the last reading. Returns the bytes of other memory that was allocated since then and freed again."""
        table.note_emptied()
        before, now = self._last, self._device.read_memory()
        freed_bytes = table.freed_bytes - self._freed_by_then
        unknown_bytes = max(0, now.allocated_bytes - before.allocated_bytes + freed_bytes - made_bytes)
        self._last, self._freed_by_then = now, table.freed_bytes
        table.read(now.allocated_bytes, new_storages, fresh=fresh, tick=tick)
        return max(0, now.cumulative_bytes - before.cumulative_bytes - made_bytes - unknown_bytes)


class PeakReadings:
    """Readings of the device's memory counters during one operator of several kernels, for the peak of its inner memory.

    allocated at a reading + bytes allocated until the next >= the peak between both
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._first = self._last = device.read_memory()
        self._peak_bytes = self._last.allocated_bytes

    def take(self) -> None:
        now = self._device.read_memory()
        grown_bytes = now.cumulative_bytes - self._last.cumulative_bytes
        self._peak_bytes = max(self._peak_bytes, self._last.allocated_bytes + grown_bytes)
        self._last = now

    def inner_bytes(self, bound: int) -> int:
        """Return an upper bound of the bytes held at the peak and freed by the last reading. `bound`: all bytes freed."""
        kept_bytes = self._last.cumulative_bytes - self._first.cumulative_bytes - bound
        # The device's own peak, over a longer time, is a bound too.
        peak_bytes = min(self._peak_bytes, max(self._last.peak_bytes, self._last.allocated_bytes))
        return max(0, min(bound, peak_bytes - self._first.allocated_bytes - kept_bytes))


@dataclass(slots=True, eq=False)
class TracedStorage:
    """Storage of the trace, independent of the memory that holds it. Keeps nothing alive."""

    number: int
    nbytes: int
    born: int
    kind: TensorKind | None
    """Known kind; None: the use in the step will show it."""
    counted: bool
    """True if the device counts the memory. It does not count fake memory."""
    owner: object
    """Owner of the number, which is invalid for other recorders."""
    device_copies: int = 1
    claims: int = 0
    aliases: int = 0
    """Number of tensors over the storage that handles themselves hold. They do not count as other holders."""
    emptied: Callable[[TracedStorage], None] = lambda traced: None
    """Function to call when the memory is freed but the storage stays. Any thread, at any time."""
    saved: bool = False
    used: bool = False
    released: bool = False
    dead: bool = False
    sendable: int = NEVER
    use_hook: int = NEVER
    first_write: int = NEVER
    last_write: int = NEVER
    """Numbers of the first and last operators that wrote to the storage."""

    @property
    def charged_bytes(self) -> int:
        return allocated_size(self.nbytes) if self.counted else 0


class _Ref(weakref.ref[torch.UntypedStorage]):
    """Weak reference to one device copy, with the record that owns it. The callback gets the reference itself."""

    __slots__ = ("key", "over", "traced")

    key: int
    over: bool
    """True if the copy's end is recorded, which may happen before the callback's entry is read."""
    traced: TracedStorage


class _Expected(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage known to exist before the step, which no operator has touched yet."""

    __slots__ = ("kind", "nbytes", "rank")

    nbytes: int
    kind: TensorKind
    rank: int
    """Number of storages expected before it. The order must not depend on the ids of storages."""


class StorageTable:
    """Table of the storages of one step, written into `builder`. Not thread-safe, except for deaths and `retired`."""

    def __init__(self, builder: TraceBuilder, *, allocated_bytes: int) -> None:
        self.owner = object()
        self._builder = builder
        self.traced: list[TracedStorage] = []
        self._refs: dict[int, _Ref] = {}
        self._held: list[_Ref] = []
        """Saved storages that are not used yet and had other holders than handles at the last poll."""
        self._held_after_use: dict[int, tuple[_Ref, int]] = {}
        """Storages used by autograd that had other holders at the last poll, with the use's hook, by number."""
        self._expected: dict[int, _Expected] = {}
        self._num_expected = 0
        self._expected_dead: deque[_Expected] = deque()
        """Expected storages that died since this was last asked."""
        self._deaths: deque[_Ref] = deque()
        self._retired: deque[TracedStorage] = deque()
        self._emptied: deque[TracedStorage] = deque()
        self._live_bytes = 0
        self.freed_bytes = 0
        """Bytes of device memory freed so far by the table's storages."""
        self._unknown = allocated_bytes
        """Bytes counted by the device at the last reading in addition to the table's storages."""
        self._late_bytes = 0
        """Bytes of parameters and buffers from before the step that the device (the simulator) began to count in the step."""
        self._lowest_unknown = allocated_bytes
        """Part of `_unknown` that existed before the step and still does. The rest came unseen, such as a workspace."""

    # --- known storages

    def expect(self, storage: torch.UntypedStorage, kind: TensorKind) -> None:
        """Note that `storage` has this kind. It gets a number when it is touched or found to be freed."""
        traced = self.find(storage)
        if traced is not None:
            traced.kind = kind
        else:
            expected = self._expected[id(storage)] = _Expected(storage, self._expected_dead.append)
            expected.nbytes, expected.kind, expected.rank = storage.nbytes(), kind, self._num_expected
            self._num_expected += 1

    def find(self, storage: torch.UntypedStorage) -> TracedStorage | None:
        """Return the record of a storage, or None. Looked up by id, confirmed by a weak reference, because ids are reused. A
        resized storage counts as another storage from then on."""
        ref = self._refs.get(id(storage))
        if ref is None or ref() is not storage:
            return None
        if ref.traced.nbytes != storage.nbytes():
            return self._resized(ref, storage)
        return ref.traced

    def add(self, storage: torch.UntypedStorage, *, born: int, counted: bool) -> TracedStorage:
        """Add a storage that is not in the table. `born`: its tick; -1: before the step."""
        expected = self._take_expected(storage)
        traced = self._record(storage.nbytes(), born, None if expected is None else expected.kind, counted=counted)
        self._add_copy(traced, storage)
        if born < 0:
            self._lowest_unknown -= traced.charged_bytes
        return traced

    # --- ticks

    def record_deaths(self) -> None:
        """Record all deaths and retirements so far at the latest tick. Call before every tick."""
        while self._deaths:
            ref = self._deaths.popleft()
            if self._refs.get(ref.key) is ref:
                del self._refs[ref.key]
            if not ref.over:
                self._died(ref)
        self.note_emptied()
        while self._retired:
            traced = self._retired.popleft()
            traced.claims = max(0, traced.claims - 1)
            self._end_if_gone(traced)

    def poll(self) -> None:
        """Find the saved storages that only their handles hold now. They count as released since the latest tick."""
        still: list[_Ref] = []
        for ref in self._held:
            storage, traced = ref(), ref.traced
            if storage is None or traced.used or traced.released:
                continue
            # The Python object that `storage` keeps alive is one holder. Tensors are the others.
            if torch._C._storage_Use_Count(storage._cdata) - 1 <= traced.aliases:
                self._release(traced)
            else:
                still.append(ref)
        self._held = still
        for number, (ref, hook) in list(self._held_after_use.items()):
            storage = ref()
            if storage is None or torch._C._storage_Use_Count(storage._cdata) - 1 <= ref.traced.aliases:
                del self._held_after_use[number]
                self._builder.released_after(hook)

    def read(self, allocated_bytes: int, new_storages: Sequence[torch.UntypedStorage], *, fresh: bool, tick: int) -> None:
        """Note that the device counts `allocated_bytes` now. Number `new_storages`, which it counts and an operator read.

        A storage counted for the first time by this reading was just made unseen: it is born at `tick`. Example: `torch.tensor`
        on a simulated device, which counts a storage at first sight. `fresh`: all are born at `tick`. Others existed before the
        step, as did parameters and buffers.
        """
        self.note_emptied()
        seen_now = allocated_bytes - self._live_bytes - self._unknown
        for storage in new_storages:
            charged = allocated_size(storage.nbytes())
            new = fresh or (0 < charged <= seen_now)
            if new:
                seen_now -= charged
                expected = self._expected.get(id(storage))
                if expected is not None and expected() is storage and expected.kind <= TensorKind.BUFFER:
                    self._late_bytes, self._lowest_unknown = self._late_bytes + charged, self._lowest_unknown + charged
                    new = False
            self.add(storage, born=tick if new else -1, counted=True)
        self._unknown = allocated_bytes - self._live_bytes
        if self._unknown < self._lowest_unknown:
            self._record_unseen_deaths(self._lowest_unknown - self._unknown)
            self._lowest_unknown = self._unknown

    # --- saved storages

    def saved(self, storage: torch.UntypedStorage) -> TracedStorage:
        ref = self._refs[id(storage)]
        traced = ref.traced
        traced.claims += 1
        if not traced.saved:
            traced.saved = True
            traced.emptied = self._emptied.append
            self._held.append(ref)
        return traced

    def restored(self, traced: TracedStorage, storage: torch.UntypedStorage) -> None:
        """Note `storage` as another storage with the bytes of `traced`. After a use, `storage` is the one that autograd got."""
        self.note_emptied()
        ref = self._refs.get(id(storage))
        if ref is not None and ref() is storage and ref.traced is traced and ref.over:
            ref.over = False
            traced.device_copies += 1
            self._live_bytes += traced.charged_bytes
        elif self.find(storage) is None:
            traced.device_copies += 1
            self._add_copy(traced, storage)
        if traced.used:
            self._held_after_use[traced.number] = self._refs[id(storage)], traced.use_hook

    def used(self, traced: TracedStorage) -> None:
        """Note a use, at the next hook. Other holders at that time have held the storage since the previous use."""
        traced.used, traced.use_hook = True, self._builder.num_hooks
        held = self._held_after_use.get(traced.number)
        if held is not None and held[0].traced is traced:
            del self._held_after_use[traced.number]

    def retired(self, traced: TracedStorage) -> None:
        """Note that a claim on `traced` ended. Any thread may call this at any time."""
        self._retired.append(traced)

    def note_emptied(self) -> None:
        """Note the storages whose memory was freed since the last call."""
        while self._emptied:
            traced = self._emptied.popleft()
            for ref in self._refs.values():
                if ref.traced is traced and not ref.over:
                    self._died(ref)
                    break

    # --- the end

    def end(self, *, fake: bool) -> int:
        """End the step: number the expected storages that exist and were never touched. `fake`: the step's memory is fake.

        Returns the bytes from before the step that the device did not count.
        """
        self.record_deaths()
        uncounted = self._late_bytes + sum(allocated_size(t.nbytes) for t in self.traced if t.born < 0 and not t.counted)
        for expected in self._expected.values():
            charged = allocated_size(expected.nbytes)
            if expected() is None or (not fake and charged > self._lowest_unknown):
                continue
            self._record(expected.nbytes, -1, expected.kind, counted=not fake)
            uncounted += charged if fake else 0
            self._lowest_unknown -= 0 if fake else charged
        self.forget()
        return uncounted

    def forget(self) -> None:
        for watched in (
            self._refs, self._held, self._held_after_use, self._expected, self._expected_dead, self._deaths, self._retired,
            self._emptied,
        ):  # fmt: skip
            watched.clear()

    def hide(self, storage: torch.UntypedStorage) -> None:
        """End the record of a storage, which is not part of the step from now on."""
        ref = self._refs.get(id(storage))
        if ref is not None and ref() is storage:
            self._deaths.append(ref)

    def _take_expected(self, storage: torch.UntypedStorage) -> _Expected | None:
        expected = self._expected.pop(id(storage), None)
        return expected if expected is not None and expected() is storage else None

    def _record(self, nbytes: int, born: int, kind: TensorKind | None, *, counted: bool) -> TracedStorage:
        number = self._builder.tensor(nbytes, TensorKind.TEMPORARY if kind is None else kind, born=born)
        traced = TracedStorage(number, nbytes, born, kind, counted=counted, owner=self.owner)
        self.traced.append(traced)
        return traced

    def _resized(self, ref: _Ref, storage: torch.UntypedStorage) -> TracedStorage:
        before = ref.traced
        del self._refs[ref.key]
        before.claims = 0  # its claims now have other memory, or none
        self._died(ref)
        resized = self._record(storage.nbytes(), self._builder.num_ticks, before.kind, counted=before.counted)
        self._add_copy(resized, storage)
        return resized

    def _add_copy(self, traced: TracedStorage, storage: torch.UntypedStorage) -> None:
        ref = _Ref(storage, self._deaths.append)
        ref.key, ref.over, ref.traced = id(storage), False, traced
        self._refs[ref.key] = ref
        self._live_bytes += traced.charged_bytes

    def _died(self, ref: _Ref) -> None:
        traced, ref.over = ref.traced, True
        self._live_bytes -= traced.charged_bytes
        self.freed_bytes += traced.charged_bytes
        traced.device_copies -= 1
        if traced.saved and not traced.used and not traced.released and traced.device_copies == 0:
            self._release(traced)
        self._end_if_gone(traced)

    def _release(self, traced: TracedStorage) -> None:
        traced.released = True
        self._builder.released(traced.number)

    def _end_if_gone(self, traced: TracedStorage) -> None:
        if traced.device_copies == 0 and traced.claims == 0 and not traced.dead:
            traced.dead = True
            self._builder.dies(traced.number)

    def _record_unseen_deaths(self, nbytes: int) -> None:
        """Record that `nbytes` from before the step are gone: expected storages that died, and beyond that unknown memory."""
        gone = [self._expected_dead.popleft() for _ in range(len(self._expected_dead))]
        for expected in sorted(gone, key=lambda expected: expected.rank):
            charged = allocated_size(expected.nbytes)
            if charged <= nbytes:
                nbytes -= charged
                self._record_dead(expected.nbytes, expected.kind)
        if nbytes:
            self._record_dead(nbytes, TensorKind.INPUT)

    def _record_dead(self, nbytes: int, kind: TensorKind) -> None:
        traced = self._record(nbytes, -1, kind, counted=True)
        traced.device_copies, traced.dead = 0, True
        self._builder.dies(traced.number)
