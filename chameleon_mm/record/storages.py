"""Table of the storages of one step: numbered by weak reference, with births, deaths, and what the device counts beside them.

    table.record_deaths()                 # before each tick: deaths so far end with the tick before
    table.add(storage, born=tick)         # a new one: a callback of its weak reference notes its death
    table.read(allocated_bytes, ...)      # what was never seen and is gone now was there before the step: a record of its own

A storage that swapping dropped is not dead: it dies with its last device copy, once nobody claims it any more.

    claims:         0 --add_claim--> n --retired--> 0   handles that autograd holds
    device copies:  1 --died--> 0 --restored--> 1 ...   device memory that holds its bytes
    both 0: it dies

    readings = Readings(device)           # the device's counters after every operator: how much it held inside itself
    inner_bytes = readings.take(table, new_storages, tick=..., made_bytes=...)

    allocated since the last reading                   growth of the cumulative count
    - results of the operator                          made_bytes
    - what nobody knows and is still there             a library's workspace: later steps begin with it
    = allocated and gone again                         what the operator held inside itself at its peak, or more

More where it took one thing after another, and where another thread allocates meanwhile.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from chameleon_mm.device import Device
from chameleon_mm.plan.trace import NEVER, TensorKind, TraceBuilder
from chameleon_mm.units import allocated_size


class Readings:
    """Readings of one step, which begins now. Not thread-safe.

    There is one after each operator: of several nobody could tell which one held what. On a GPU it takes the host 20 us, half
    of what a short operator takes and a fifth of what recording one does, but where the C++ helper `memory` is built: the time
    goes into the dictionary of all counters that torch makes. A peak would have to be reset before each operator, and is the
    users'.
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
        """Read the counters now and pass them to `table`, as `StorageTable.read` takes them. `made_bytes`: bytes of storages of
        the table that were made since the last reading. Returns the bytes of others that were allocated since then and are gone
        again."""
        table.note_emptied()
        before, now = self._last, self._device.read_memory()
        freed_bytes = table.freed_bytes - self._freed_by_then
        unknown_bytes = max(0, now.allocated_bytes - before.allocated_bytes + freed_bytes - made_bytes)
        self._last, self._freed_by_then = now, table.freed_bytes
        table.read(now.allocated_bytes, new_storages, fresh=fresh, tick=tick)
        return max(0, now.cumulative_bytes - before.cumulative_bytes - made_bytes - unknown_bytes)


class TracedStorage:
    """One storage of the trace, whatever memory holds it. Keeps nothing alive."""

    __slots__ = (
        "aliases", "born", "claims", "counted", "dead", "device_copies", "emptied", "first_write", "kind", "last_write",
        "nbytes", "number", "owner", "released", "saved", "sendable", "use_hook", "used",
    )  # fmt: skip

    def __init__(self, number: int, nbytes: int, born: int, kind: TensorKind | None, *, counted: bool, owner: object) -> None:
        self.number = number
        self.nbytes = nbytes
        self.born = born
        self.kind = kind
        """Kind that it is known to have; None: what it is seen to do will tell."""
        self.counted = counted
        """Whether the device counts it: fake memory it does not."""
        self.owner = owner
        """Owner of the number: another recorder knows nothing of it."""
        self.device_copies = 1
        self.claims = 0
        self.aliases = 0
        """Number of tensors over it that handles hold themselves: they do not keep it from having one holder alone."""
        self.emptied: Callable[[TracedStorage], None] = _nobody_asks
        """To be called when its memory has gone and its storage stays. Any thread, at any time."""
        self.saved = self.used = self.released = self.dead = False
        self.sendable = NEVER
        self.use_hook = NEVER
        """Number of the hook of its latest use."""
        self.first_write = self.last_write = NEVER
        """Numbers of operators."""

    @property
    def charged_bytes(self) -> int:
        return allocated_size(self.nbytes) if self.counted else 0


def _nobody_asks(traced: TracedStorage) -> None:
    pass


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A weak reference to one device copy that knows whose it is. Its callback is given the reference itself."""

    __slots__ = ("key", "over", "traced")

    key: int
    over: bool
    """Whether the copy's end is recorded: it may be found before the callback is read."""
    traced: TracedStorage


class _Expected:
    """A storage known to be there before the step, which no operator has touched yet."""

    __slots__ = ("kind", "nbytes", "rank", "ref")

    def __init__(self, storage: torch.UntypedStorage, kind: TensorKind, rank: int) -> None:
        self.rank = rank
        """Number of storages expected before it: their order must not depend on what id the next storage happens to get."""
        self.ref = weakref.ref(storage)
        self.kind = kind
        self.nbytes = storage.nbytes()


class StorageTable:
    """Table of the storages of one step, written into `builder`. Not thread-safe, but for deaths and `retired`: those come
    anywhere."""

    def __init__(self, builder: TraceBuilder, *, allocated_bytes: int) -> None:
        self.owner = object()
        self._builder = builder
        self.traced: list[TracedStorage] = []
        self._refs: dict[int, _Ref] = {}
        self._held: list[_Ref] = []
        """Storages that were saved, not used yet, and held by somebody beside their handle when last polled."""
        self._held_after_use: dict[int, tuple[_Ref, int]] = {}
        """Storages that autograd was given at a use and somebody held when last polled, with the use's hook, by number."""
        self._expected: dict[int, _Expected] = {}
        self._num_expected = 0
        self._gone: list[_Expected] = []
        """Expected storages that died, and whose id another storage has."""
        self._deaths: deque[_Ref] = deque()
        self._retired: deque[TracedStorage] = deque()
        self._emptied: deque[TracedStorage] = deque()
        self._live_bytes = 0
        self.freed_bytes = 0
        """Bytes of device memory that storages known here gave back so far."""
        self._unknown = allocated_bytes
        """Bytes that the device counts beside the storages in the table, at the last reading."""
        self._lowest_unknown = allocated_bytes
        """Bytes among them that were there before the step and still are. More than this came unseen: a library's workspace."""

    # --- what is there

    def expect(self, storage: torch.UntypedStorage, kind: TensorKind) -> None:
        """Note that `storage` is of this kind. It gets a number when it is touched, or when it turns out to be gone."""
        traced = self.find(storage)
        if traced is not None:
            traced.kind = kind
        else:
            self._take_expected(storage)
            self._expected[id(storage)] = _Expected(storage, kind, self._num_expected)
            self._num_expected += 1

    def find(self, storage: torch.UntypedStorage) -> TracedStorage | None:
        """Find the record of a storage by its object, compared by a weak reference: ids are recycled. One that was resized
        since is another from now on."""
        ref = self._refs.get(id(storage))
        if ref is None or ref() is not storage:
            return None
        if ref.traced.nbytes != storage.nbytes():
            return self._resized(ref, storage)
        return ref.traced

    def add(self, storage: torch.UntypedStorage, *, born: int, counted: bool) -> TracedStorage:
        """Add a storage that `find` does not know. `born`: -1 before the step."""
        expected = self._take_expected(storage)
        traced = self._record(storage.nbytes(), born, None if expected is None else expected.kind, counted=counted)
        self._add_copy(traced, storage)
        if born < 0:
            self._lowest_unknown -= traced.charged_bytes
        return traced

    # --- ticks

    def record_deaths(self) -> None:
        """Record deaths and retirements so far: they come after the tick that is the latest now. Call before every tick."""
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
        """Find which saved storages nobody but their handles holds any more, since the tick that is the latest now."""
        still: list[_Ref] = []
        for ref in self._held:
            storage, traced = ref(), ref.traced
            if storage is None or traced.used or traced.released:
                continue
            # The object in Python, which `storage` keeps alive, is one holder; tensors are the others.
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
        """Note that the device counts `allocated_bytes` now. Number `new_storages`, which it counts and an operator was given.

        What it counts for the first time by this reading was made unseen just now (`torch.tensor` on a simulated device, which
        counts at first sight): born at `tick`, as all are if `fresh`. Others were there before the step.
        """
        self.note_emptied()
        seen_now = allocated_bytes - self._live_bytes - self._unknown
        for storage in new_storages:
            charged = allocated_size(storage.nbytes())
            new = fresh or (0 < charged <= seen_now)
            if new:
                seen_now -= charged
            self.add(storage, born=tick if new else -1, counted=True)
        self._unknown = allocated_bytes - self._live_bytes
        if self._unknown < self._lowest_unknown:
            self._record_unseen_deaths(self._lowest_unknown - self._unknown)
            self._lowest_unknown = self._unknown

    # --- saved storages

    def saved(self, storage: torch.UntypedStorage) -> TracedStorage:
        """Note a handle's claim on a storage of the table."""
        ref = self._refs[id(storage)]
        traced = ref.traced
        traced.claims += 1
        if not traced.saved:
            traced.saved = True
            traced.emptied = self._emptied.append
            self._held.append(ref)
        return traced

    def restored(self, traced: TracedStorage, storage: torch.UntypedStorage) -> None:
        """Note that `storage` holds its bytes too. After a use autograd is given it."""
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
        """Note a use, at the hook that comes next. Whoever still holds the storage has held it since the use before."""
        traced.used, traced.use_hook = True, self._builder.num_hooks
        held = self._held_after_use.get(traced.number)
        if held is not None and held[0].traced is traced:
            del self._held_after_use[traced.number]

    def retired(self, traced: TracedStorage) -> None:
        """Note that a claim on it ended. Any thread may call this, in the middle of anything."""
        self._retired.append(traced)

    def note_emptied(self) -> None:
        """Note the storages whose memory has gone since the last call."""
        while self._emptied:
            traced = self._emptied.popleft()
            for ref in self._refs.values():
                if ref.traced is traced and not ref.over:
                    self._died(ref)
                    break

    # --- the end

    def end(self, *, fake: bool) -> int:
        """End the step: number what is known to be there and was never touched. `fake`: the step's memory is.

        Returns the bytes of before the step that the device did not count.
        """
        self.record_deaths()
        uncounted = sum(allocated_size(t.nbytes) for t in self.traced if t.born < 0 and not t.counted)
        for expected in self._expected.values():
            charged = allocated_size(expected.nbytes)
            if expected.ref() is None or (not fake and charged > self._lowest_unknown):
                continue
            self._record(expected.nbytes, -1, expected.kind, counted=not fake)
            uncounted += charged if fake else 0
            self._lowest_unknown -= 0 if fake else charged
        self.forget()
        return uncounted

    def forget(self) -> None:
        """Stop watching storages."""
        for watched in (
            self._refs, self._held, self._held_after_use, self._expected, self._gone, self._deaths, self._retired,
            self._emptied,
        ):  # fmt: skip
            watched.clear()

    def hide(self, storage: torch.UntypedStorage) -> None:
        """End the record of a storage that from now on is no part of the step."""
        ref = self._refs.get(id(storage))
        if ref is not None and ref() is storage:
            self._deaths.append(ref)

    def _take_expected(self, storage: torch.UntypedStorage) -> _Expected | None:
        expected = self._expected.pop(id(storage), None)
        if expected is None or expected.ref() is storage:
            return expected
        self._gone.append(expected)
        return None

    def _record(self, nbytes: int, born: int, kind: TensorKind | None, *, counted: bool) -> TracedStorage:
        number = self._builder.tensor(nbytes, TensorKind.TEMPORARY if kind is None else kind, born=born)
        traced = TracedStorage(number, nbytes, born, kind, counted=counted, owner=self.owner)
        self.traced.append(traced)
        return traced

    def _resized(self, ref: _Ref, storage: torch.UntypedStorage) -> TracedStorage:
        before = ref.traced
        del self._refs[ref.key]
        before.claims = 0  # whoever claims it finds other memory, or none
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
        """Record that `nbytes` of before the step are gone: what was expected and is no more, and beyond that what nobody
        knew."""
        gone = self._gone + [expected for expected in self._expected.values() if expected.ref() is None]
        self._gone = []
        self._expected = {key: expected for key, expected in self._expected.items() if expected.ref() is not None}
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
