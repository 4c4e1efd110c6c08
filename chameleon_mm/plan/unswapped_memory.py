"""Compute a step's device memory without swaps: allocated bytes at each tick, the peak, and the minimum for any plan.

curve[t] = start_bytes + storages made in the step and alive at t - storages from before the step that are freed by t
           + internal memory of the operator at t
floor[t] = curve[t] - storages idle at t      no plan's memory is below it; the plan that moves all candidates reaches it

Sizes are rounded up to 512 bytes, as the caching allocator does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.trace import NEVER, Bools, Int32s, Int64s, SavePlace, TensorKind, Trace
from chameleon_mm.replayable import VIEWS, base_name
from chameleon_mm.units import allocated_size, format_size

Ticks = Int32s | Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Storages worth moving, and the hooks between which they may be off the device: n rows. Hooks by number."""

    tensor: Int64s
    """(n,) numbers in the trace. All columns below are (n,), too."""
    nbytes: Int64s
    size: Int64s
    """Device memory of each storage in bytes."""
    sendable: Int64s
    """First hook at which the copy out may begin."""
    first: Int64s
    """First hook at which the memory can be reclaimed, because only our handles hold the storage."""
    use: Int64s
    """Hook of the use at which the storage must be on the device: its first use, or the later of two uses."""
    last_use: Int64s
    """Hook of the last use, until which the block of pinned memory is held."""

    @classmethod
    def of(cls, trace: Trace, *, between_uses: bool = False) -> Candidates:
        """Return the candidates of `trace`: storages that autograd saved, and that only our handles held at a hook before the
        first use. `between_uses`: append those of `Candidates.between_uses`."""
        if between_uses:
            return cls.of(trace).followed_by(cls.between_uses(trace))
        uses = np.flatnonzero(trace.hook_use & (trace.hook_tensor >= 0))
        use = np.full(len(trace.tensor_bytes), NEVER, np.int64)
        use[trace.hook_tensor[uses[::-1]]] = uses[::-1]  # the last assignment stays: the first use
        after_release = np.searchsorted(trace.hook_tick, trace.tensor_released, side="right")
        first = np.maximum(trace.tensor_sendable, after_release)
        known = (trace.tensor_sendable >= 0) & (trace.tensor_released != NEVER) & (trace.tensor_bytes > 0)
        tensor = np.flatnonzero(known & (first < use))
        return cls._rows(trace, tensor, trace.tensor_sendable[tensor].astype(np.int64), first[tensor], use[tensor])

    @classmethod
    def between_uses(cls, trace: Trace) -> Candidates:
        """Return candidates that are idle between two consecutive uses, for example of two backwards over one graph: only our
        handles hold them at a hook in between. One row per pair of uses."""
        uses = np.flatnonzero(trace.hook_use & (trace.hook_tensor >= 0))
        uses = uses[np.argsort(trace.hook_tensor[uses], kind="stable")]
        of_same = trace.hook_tensor[uses[:-1]] == trace.hook_tensor[uses[1:]]
        before, use = uses[:-1][of_same], uses[1:][of_same]
        tensor, released = trace.hook_tensor[before].astype(np.int64), trace.hook_released[before]
        sendable = np.maximum(trace.tensor_sendable[tensor], before + 1)
        first = np.maximum(sendable, np.searchsorted(trace.hook_tick, released, side="right"))
        known = (trace.tensor_sendable[tensor] >= 0) & (released != NEVER) & (trace.tensor_bytes[tensor] > 0)
        which = np.flatnonzero(known & (first < use))
        which = which[np.argsort(use[which], kind="stable")]
        return cls._rows(trace, tensor[which], sendable[which], first[which], use[which])

    @classmethod
    def _rows(cls, trace: Trace, tensor: Int64s, sendable: Int64s, first: Int64s, use: Int64s) -> Candidates:
        last_save, last_use = np.full(len(trace.tensor_bytes), -1), np.zeros(len(trace.tensor_bytes), np.int64)
        for latest, which in ((last_save, ~trace.hook_use), (last_use, trace.hook_use)):
            hooks = np.flatnonzero(which & (trace.hook_tensor >= 0))
            latest[trace.hook_tensor[hooks]] = hooks  # the last assignment stays
        # A copy that begins before the last save may lack that save's bytes, and would begin again.
        sendable = np.clip(last_save[tensor] + 1, sendable, first)
        nbytes, last = trace.tensor_bytes[tensor], last_use[tensor]
        size = allocated_size(nbytes)
        return cls(tensor=tensor, nbytes=nbytes, size=size, sendable=sendable, first=first, use=use, last_use=last)

    def __len__(self) -> int:
        return len(self.tensor)

    def followed_by(self, more: Candidates) -> Candidates:
        names = [column.name for column in fields(self)]
        return replace(self, **{name: np.concatenate((getattr(self, name), getattr(more, name))) for name in names})

    def away_before(self) -> Bools:
        """Return (n,): True if an earlier row has the same storage."""
        again = np.ones(len(self), np.bool_)
        again[np.unique(self.tensor, return_index=True)[1]] = False
        return again

    def take(self, which: Int64s) -> Candidates:
        return replace(self, **{column.name: getattr(self, column.name)[which] for column in fields(self)})

    def idle_curve(self, trace: Trace) -> Int64s:
        """Return (ticks,): bytes of device memory that could be swapped out during each tick of `trace`."""
        return sum_over_time(trace.num_ticks, self.size, trace.hook_tick[self.first], trace.hook_tick[self.use])


KIND_NAMES = {
    TensorKind.PARAMETER: "parameters", TensorKind.GRADIENT: "gradients", TensorKind.OPTIMIZER: "optimizer state",
    TensorKind.ACTIVATION: "activations", TensorKind.TEMPORARY: "temporaries", TensorKind.INPUT: "inputs and buffers",
    TensorKind.BUFFER: "inputs and buffers",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Peak of allocated memory, the first time that it is reached."""

    tick: int
    """Tick of the peak; -1: the step has no ticks."""
    nbytes: int
    by_kind: Mapping[TensorKind, int]
    """Part of `nbytes` by kind of storage. Kinds of 0 bytes are missing."""
    inner_bytes: int
    """Part of `nbytes`: internal memory of the running operator."""
    untouched_bytes: int
    """Part of `nbytes`: memory from before the step that the step never touches."""
    idle_bytes: int
    """Part of `nbytes` that could be swapped out at this tick, including storages between two uses."""
    storages: Int64s = field(compare=False, repr=False)
    """Numbers of the storages that are alive at the peak."""

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes by purpose. Their sum is `nbytes`."""
        found = Counter[str]()
        for kind, name in KIND_NAMES.items():
            found[name] += self.by_kind.get(kind, 0)
        found.update({"inside operators": self.inner_bytes, "from before the step, not used in it": self.untouched_bytes})
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    def __str__(self) -> str:
        parts = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in self.parts.items())
        return f"{format_size(self.nbytes)}: {parts}"


def largest_of(trace: Trace, peak: Peak, count: int = 5) -> list[str]:
    """Describe the largest storages made in the step that are alive at `peak`, and the internal memory of the operator."""
    size, makers = allocated_size(trace.tensor_bytes), makers_of(trace)
    made = peak.storages[trace.tensor_kind[peak.storages] >= TensorKind.ACTIVATION]
    found = [
        (int(size[i]), f"{KIND_NAMES[TensorKind(int(trace.tensor_kind[i]))]} by {makers.get(i, '?')}", place_of(trace, i))
        for i in made[np.argsort(-size[made], kind="stable")][:count].tolist()
    ]
    if peak.inner_bytes:
        name = trace.op_names[trace.op_name[np.searchsorted(trace.op_tick, peak.tick)]]
        found.append((peak.inner_bytes, f"inside {base_name(name).rpartition('::')[2]}", place_at(trace, peak.tick)))
    found.sort(key=lambda one: -one[0])
    return [f"{format_size(n)} {what}{f' in {place}' if any(place) else ''}" for n, what, place in found[:count]]


def makers_of(trace: Trace) -> dict[int, str]:
    """Return, by storage, the base name of the first operator that wrote it and is not a view."""
    names = [base_name(name) for name in trace.op_names]
    op = trace.op_of_write()
    found: dict[int, str] = {}
    for tensor, name in zip(trace.write_tensors.tolist(), trace.op_name[op].tolist(), strict=True):
        if tensor not in found and names[name] not in VIEWS:
            found[tensor] = names[name].rpartition("::")[2]
    return found


def place_of(trace: Trace, tensor: int) -> SavePlace:
    """Return the place where a storage was first saved, or, if it was not saved, of the hook before it was made."""
    hooks = np.flatnonzero((trace.hook_tensor == tensor) & ~trace.hook_use)
    return trace.places.get(int(hooks[0]), SavePlace()) if len(hooks) else place_at(trace, int(trace.tensor_born[tensor]))


def place_at(trace: Trace, tick: int) -> SavePlace:
    """Return the place of the last hook before `tick`. For a use, it is the place where the tensor was saved."""
    hook = int(np.searchsorted(trace.hook_tick, tick)) - 1
    if hook >= 0 and trace.hook_use[hook]:
        return place_of(trace, int(trace.hook_tensor[hook])) if trace.hook_tensor[hook] >= 0 else SavePlace()
    return trace.places.get(hook, SavePlace())


def memory_curve(trace: Trace) -> Int64s:
    """Return (ticks,): maximum bytes allocated during each tick of `trace`, without swaps. O(operators + storages)."""
    size = allocated_size(trace.tensor_bytes)
    change = sum_over_time(trace.num_ticks, size, np.maximum(trace.tensor_born, 0), trace.tensor_dies + 1)
    change[trace.op_tick] += trace.op_inner_bytes
    return change + _untouched_bytes(trace, size)


def peak_memory(trace: Trace) -> Peak:
    """Return the peak of `trace` without swaps: its tick, and the memory at it."""
    return _peak(trace, memory_curve(trace), Candidates.of(trace, between_uses=True), away=False)


def least_memory(trace: Trace, *, between_uses: bool = True) -> Peak:
    """Return the peak if every candidate is swapped out whenever possible. No plan has a lower peak.

    Its `idle_bytes` are 0. `between_uses`: candidates may also be swapped out between two uses.
    """
    candidates = Candidates.of(trace, between_uses=between_uses)
    return _peak(trace, memory_curve(trace) - candidates.idle_curve(trace), candidates, away=True)


def smallest_budget(trace: Trace) -> int:
    """Return the minimum device memory, in bytes, for which a plan of `trace` exists, at any cost in time."""
    return least_memory(trace).nbytes


def below_least(least: int, budget: int) -> InfeasibleBudget:
    """Return the error for a `budget` below `least`, the smallest for which a plan exists."""
    return InfeasibleBudget(
        f"expected a budget of {least} bytes ({format_size(least)}) or more, which is what never moves, got {budget} "
        f"({format_size(budget)})"
    )


def _peak(trace: Trace, curve: Int64s, candidates: Candidates, *, away: bool) -> Peak:
    size = allocated_size(trace.tensor_bytes)
    tick = int(curve.argmax()) if len(curve) else -1
    there = np.flatnonzero((trace.tensor_born <= tick) & (tick <= trace.tensor_dies))
    by_kind = np.bincount(trace.tensor_kind[there], size[there], len(TensorKind))
    since, until = trace.hook_tick[candidates.first], trace.hook_tick[candidates.use]
    idle = (since <= tick) & (tick < until)
    if away:
        by_kind -= np.bincount(trace.tensor_kind[candidates.tensor[idle]], candidates.size[idle], len(TensorKind))
        there = np.setdiff1d(there, candidates.tensor[idle])
    untouched = _untouched_bytes(trace, size)
    return Peak(
        tick=tick,
        nbytes=int(curve[tick]) if len(curve) else untouched + int(size[there].sum()),
        by_kind={kind: int(by_kind[kind]) for kind in TensorKind if by_kind[kind]},
        inner_bytes=int(trace.op_inner_bytes[trace.op_tick == tick].sum()),
        untouched_bytes=untouched,
        idle_bytes=0 if away else int(candidates.size[idle].sum()),
        storages=there,
    )


def _untouched_bytes(trace: Trace, size: Int64s) -> int:
    """Return the bytes from before the step that it never touches. At least 0: the step may touch memory of other libraries,
    which the allocator does not count."""
    return max(0, trace.start_bytes - int(size[trace.tensor_born < 0].sum()))


def sum_over_time(ticks: int, amounts: Int64s, since: Ticks, until: Ticks) -> Int64s:
    """Return (ticks,): sum of those amounts[j] with since[j] <= t < until[j]."""
    change = np.zeros(ticks + 2, np.int64)
    np.add.at(change, since, amounts)
    np.subtract.at(change, until, amounts)
    return change[:ticks].cumsum()
