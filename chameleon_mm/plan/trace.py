"""Columns of one step's operators, storages and hook calls. A million operators are a few arrays, not a million objects.

    trace.op_us, trace.tensor_bytes, trace.hook_tick ...  by the numbers of operators, storages, hooks

tick   0        1        2        3        4 ...          every operator and every hook of the step is one tick
       op       save     op       save     op             numbered from 0: operators and hooks on one clock
"""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from chameleon_mm.units import allocated_size

NEVER = -2
"""Number of a tick or a hook that did not happen."""

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Float64s = NDArray[np.float64]
UInt8s = NDArray[np.uint8]
Bools = NDArray[np.bool_]

_DTYPES: dict[object, type[np.generic]] = {
    "Int64s": np.int64, "Int32s": np.int32, "Float64s": np.float64, "UInt8s": np.uint8, "Bools": np.bool_,
}  # fmt: skip


class StepPhase(enum.IntEnum):
    """Part of a step to which an operator belongs. With several micro-batches, forward and backward alternate."""

    FORWARD = 0
    """Begins with the step, and with the first save after a backward."""
    BACKWARD = 1
    """Begins with the first operator that autograd's engine runs. Ends with the engine's graph task."""
    OPTIMIZER = 2
    """Begins after the last backward of the step. Ends with the step."""


class TensorKind(enum.IntEnum):
    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    """Gradient of a parameter, as the optimizer reads it."""
    OPTIMIZER = 3
    """State that an optimizer keeps from step to step."""
    INPUT = 4
    """On the device before the step, and none of the above."""
    ACTIVATION = 5
    """Made in the step and saved by autograd."""
    TEMPORARY = 6
    """Made in the step, neither saved nor kept."""


SAVE_PARTS = 5
"""Minimum number of parts of a save's feature. The last part is `since`. A use's feature has two parts."""

NEW_STORAGE = 0
"""`since` of the first save of a storage in this step."""
FIXED_STORAGE = -1
"""`since` of a storage that never moves. Its earlier saves are not looked up."""


class BirthPlace(NamedTuple):
    """Position in a step at which a storage was written."""

    hooks: int
    """Number of hooks before the operator that wrote it."""
    operator: str
    """Name of that operator, with its overload."""
    same_name: int
    """Number of operators of that name since the last hook, including this operator."""
    position: int
    """Position of the storage among the storages that the operator wrote."""


class SavePlace(NamedTuple):
    """Place in the program where autograd saved a tensor. Empty text: unknown."""

    module: str = ""
    """Path of the module whose forward ran."""
    line: str = ""
    """File and line number in the program, such as "train.py:12"."""
    keep: bool = False
    """True inside a module named in `keep`: tensors saved there stay on the device."""
    never_recompute: bool = False
    """True inside a module named in `never_recompute`: tensors saved there are never dropped."""

    def __str__(self) -> str:
        return " at ".join(filter(None, (self.module, self.line)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Trace of a step: n operators, m storages, k hook calls, n + k ticks. Columns are read-only.

    Raises `ValueError` for timings that are not finite.
    """

    start_bytes: int
    """Bytes allocated on the device when the step began, including storages that the step never touches."""

    op_names: tuple[str, ...]
    """Distinct names, which `op_name` refers to."""
    op_name: Int32s
    op_phase: UInt8s
    op_us: Float64s
    """Time on the device, in us, until the next operator could begin, without stalls on copies."""
    op_tick: Int32s
    read_offsets: Int64s
    """(n + 1,) offsets: operator i reads `read_tensors[read_offsets[i] : read_offsets[i + 1]]`."""
    read_tensors: Int32s
    """Numbers of the storages that operators read."""
    write_offsets: Int64s
    write_tensors: Int32s
    """Numbers of the storages that operators returned or changed."""
    op_inner_bytes: Int64s
    """Device memory, as the allocator counts it, that each operator holds while it runs, besides inputs and results."""
    op_passed_bytes: Int64s
    """Device memory besides `op_inner_bytes` that each operator allocates and frees. A compiled region has many."""
    op_out_bytes: Int64s
    """Bytes that each operator copies to the host: the program's own copies over the link. `op_back_bytes`: from the host."""
    op_back_bytes: Int64s

    tensor_bytes: Int64s
    tensor_kind: UInt8s
    tensor_born: Int32s
    """Tick at which each storage is made; -1: before the step."""
    tensor_released: Int32s
    """Last tick before its first use at which others than our handles held the storage. Dropping it after that tick frees
    memory. NEVER: it was not saved, or others held it until its first use."""
    tensor_sendable: Int32s
    """First hook after the operator that saved the storage, when it may be copied. NEVER: not saved, or it must stay."""
    tensor_dies: Int32s
    """Last tick of the storage's life; the number of ticks if it outlives the step."""

    hook_tick: Int32s
    hook_use: Bools
    hook_tensor: Int32s
    """Number of the storage; -1: a storage that must not move (a parameter, a small storage)."""
    hook_released: Int32s
    """Like `tensor_released`, from this use until the storage's next use. NEVER: a save, or others held it until then."""

    fingerprint: int = 0
    """Hash of the sequence of hook features, by the light profiler. Comparable only within one process."""
    places: Mapping[int, SavePlace] = field(default_factory=dict)
    """Places of saves, by the number of the hook. Unknown places are missing."""

    def __post_init__(self) -> None:
        bad = ~np.isfinite(self.op_us) | (self.op_us < 0)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(
                f"trace: expected finite times of 0 us or more, got {self.op_us[at]} for operator {at}; record it again"
            )
        for column in COLUMNS:
            getattr(self, column).flags.writeable = False

    @property
    def num_ticks(self) -> int:
        return len(self.op_us) + len(self.hook_tick)

    @property
    def duration_us(self) -> float:
        """Return the time of the step in us, without swaps."""
        return float(self.op_us.sum())

    def clock_us(self) -> Float64s:
        """Return (n + k + 1,): times in us at which compute reaches each tick and the step's end, without swaps."""
        duration = np.zeros(self.num_ticks + 1)
        duration[self.op_tick + 1] = self.op_us
        return np.cumsum(duration)

    def op_of_read(self) -> Int64s:
        """Return (reads,): number of the operator of each entry of `read_tensors`."""
        return np.repeat(np.arange(len(self.op_us)), np.diff(self.read_offsets))

    def op_of_write(self) -> Int64s:
        """Return (writes,): number of the operator of each entry of `write_tensors`."""
        return np.repeat(np.arange(len(self.op_us)), np.diff(self.write_offsets))

    def last_write(self, which: Bools) -> Int64s:
        """Return (tensors,): tick of each tensor's last write, or else of its birth. `which`: (writes,) writes to count."""
        last = self.tensor_born.astype(np.int64)
        np.maximum.at(last, self.write_tensors[which], self.op_tick[self.op_of_write()[which]].astype(np.int64))
        return last


COLUMNS = {column.name: _DTYPES[column.type] for column in dataclasses.fields(Trace) if column.type in _DTYPES}
"""Dtype of each column."""

# --- Builder of a trace, tick by tick, for a recorder or for a test

_CODES = {np.float64: "d", np.uint64: "Q", np.bool_: "B", np.uint8: "B"}
"""Type codes of the columns' arrays while they grow; all other columns are 64-bit integers."""


class TraceBuilder:
    """Trace under construction. Not thread-safe."""

    def __init__(self, *, start_bytes: int) -> None:
        self._start_bytes = start_bytes
        self._names: dict[str, int] = {}
        self._columns: dict[str, array[Any]] = {name: array(_CODES.get(dtype, "q")) for name, dtype in COLUMNS.items()}
        self._columns["read_offsets"].append(0)
        self._columns["write_offsets"].append(0)

    @property
    def num_ticks(self) -> int:
        """Number of ticks so far, which is the number of the next tick."""
        return len(self._columns["op_tick"]) + len(self._columns["hook_tick"])

    @property
    def num_ops(self) -> int:
        return len(self._columns["op_tick"])

    @property
    def num_hooks(self) -> int:
        return len(self._columns["hook_tick"])

    def tensor(self, nbytes: int, kind: TensorKind = TensorKind.TEMPORARY, *, born: int | None = None) -> int:
        """Add a storage that begins at tick `born`; None: the next tick; -1: before the step. Returns its number."""
        born = self.num_ticks if born is None else born
        self._add(tensor_bytes=nbytes, tensor_kind=kind, tensor_born=born)
        self._add(tensor_released=NEVER, tensor_sendable=NEVER, tensor_dies=NEVER)
        return len(self._columns["tensor_bytes"]) - 1

    def op(
        self,
        name: str,
        phase: StepPhase,
        duration_us: float,
        *,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        inner_bytes: int = 0,
        link_bytes: tuple[int, int] = (0, 0),
    ) -> int:
        """Add an operator that holds `inner_bytes` while it runs, and copies `link_bytes` (to host, from host). Returns its
        number."""
        number = self._names.setdefault(name, len(self._names))
        self._add(op_tick=self.num_ticks, op_name=number, op_phase=phase, op_us=duration_us)
        for kind, tensors in (("read", reads), ("write", writes)):
            column = self._columns[f"{kind}_tensors"]
            column.extend(tensors)
            self._columns[f"{kind}_offsets"].append(len(column))
        to_host, from_host = link_bytes
        self._add(op_inner_bytes=inner_bytes, op_passed_bytes=0, op_out_bytes=to_host, op_back_bytes=from_host)
        return self.num_ops - 1

    def amend_latest_op(self, *, writes: Sequence[int], inner_bytes: int, passed_bytes: int) -> None:
        """Set the storages written by the latest operator and its memory, which are known only after it ran."""
        self._columns["write_tensors"].extend(writes)
        self._columns["write_offsets"][-1] = len(self._columns["write_tensors"])
        self._columns["op_inner_bytes"][-1] = inner_bytes
        self._columns["op_passed_bytes"][-1] = passed_bytes

    def set_duration(self, op: int, duration_us: float) -> None:
        """Set the time of operator number `op`, which is known only after it ran."""
        self._columns["op_us"][op] = duration_us

    def save(self, tensor: int) -> int:
        """Add a save of storage number `tensor`; -1: a storage that must not move. Returns the hook's number."""
        return self._hook(tensor, use=False)

    def use(self, tensor: int) -> int:
        """Add a use of a saved storage. Returns the hook's number."""
        return self._hook(tensor, use=True)

    def kind(self, tensor: int, kind: TensorKind) -> None:
        self._columns["tensor_kind"][tensor] = kind

    def released(self, tensor: int) -> None:
        """Record that only our handles hold the storage since the latest tick."""
        self._columns["tensor_released"][tensor] = self.num_ticks - 1

    def released_after(self, hook: int) -> None:
        """Record that, since the latest tick, only our handles hold the storage used at hook number `hook`."""
        self._columns["hook_released"][hook] = self.num_ticks - 1

    def sendable(self, tensor: int, hook: int) -> None:
        """Record that the operator that saved the storage is over at hook number `hook`."""
        self._columns["tensor_sendable"][tensor] = hook

    def dies(self, tensor: int) -> None:
        """Record that the storage's memory is freed after the latest tick."""
        self._columns["tensor_dies"][tensor] = max(self.num_ticks - 1, self._columns["tensor_born"][tensor])

    def finish(self, fingerprint: int = 0) -> Trace:
        """Return the trace. Storages without a call of `dies` outlive the step. Raises the errors of `Trace`."""
        columns: dict[str, Any] = {name: np.array(self._columns[name], dtype) for name, dtype in COLUMNS.items()}
        dies = columns["tensor_dies"]
        dies[dies == NEVER] = self.num_ticks
        return Trace(op_names=tuple(self._names), fingerprint=fingerprint, start_bytes=self._start_bytes, **columns)

    def _hook(self, tensor: int, *, use: bool) -> int:
        self._add(hook_tick=self.num_ticks, hook_use=use, hook_tensor=tensor, hook_released=NEVER)
        return self.num_hooks - 1

    def _add(self, **row: float) -> None:
        for column, value in row.items():
            self._columns[column].append(value)


# --- Changes of a trace. One turns the trace of a first step into that of later steps, which begin with kept storages


def outliving_bytes(trace: Trace, kinds: Collection[TensorKind]) -> int:
    """Return the device memory, in bytes, of the storages of `kinds` that were made in the step and outlive it."""
    return int(allocated_size(trace.tensor_bytes[_outliving(trace, kinds)]).sum())


def there_before(trace: Trace, kinds: Collection[TensorKind]) -> Trace:
    """Return `trace` changed so that storages of `kinds` that were made in it and outlive it exist from the beginning.

    Operators that wrote only such storages take no time and no memory, because they will not run again.
    """
    outliving = _outliving(trace, kinds)
    if not outliving.any():
        return trace
    born = np.where(outliving, np.int32(-1), trace.tensor_born).astype(np.int32)
    over = _only_make(trace, outliving)
    start_bytes = trace.start_bytes + outliving_bytes(trace, kinds)
    nothing: dict[str, Any] = {
        column: np.where(over, 0, getattr(trace, column))
        for column in ("op_us", "op_inner_bytes", "op_passed_bytes", "op_out_bytes", "op_back_bytes")
    }
    return dataclasses.replace(trace, tensor_born=born, start_bytes=start_bytes, **nothing)


def with_gradients_kept(trace: Trace) -> Trace:
    """Return `trace` as the trace of a step before which gradients exist. Each new gradient is added to the existing one and
    freed: it lives until the operator after its last write in the same backward."""
    outliving = _outliving(trace, {TensorKind.GRADIENT})
    saves = np.append(trace.hook_tick[~trace.hook_use], trace.num_ticks)
    ends = saves[np.searchsorted(saves, trace.tensor_born, side="right").clip(max=len(saves) - 1)]  # of its backward
    last = trace.last_write(trace.op_tick[trace.op_of_write()] < ends[trace.write_tensors])
    freed = np.minimum(last + 1, trace.num_ticks - 1)
    kept = dataclasses.replace(
        trace,
        tensor_dies=np.where(outliving, freed, trace.tensor_dies).astype(np.int32),
        tensor_kind=np.where(outliving, np.uint8(TensorKind.TEMPORARY), trace.tensor_kind).astype(np.uint8),
    )
    return with_extra(kept, outliving_bytes(trace, {TensorKind.GRADIENT}))


def without_making(trace: Trace, kinds: Collection[TensorKind]) -> Trace:
    """Return `trace` as the trace of a later step: like `there_before`, but without the operators that wrote only such
    storages. Ticks are renumbered."""
    over = _only_make(trace, _outliving(trace, kinds))
    trace = there_before(trace, kinds)
    if not over.any():
        return trace
    gone = trace.op_tick[over]  # in order
    columns = {
        name: (column - np.searchsorted(gone, column, side="right")).astype(np.int32)
        for name in ("op_tick", "tensor_born", "tensor_released", "tensor_dies", "hook_tick", "hook_released")
        for column in (getattr(trace, name),)
    }
    for what in ("read", "write"):
        counts = np.diff(getattr(trace, f"{what}_offsets"))
        columns[f"{what}_tensors"] = getattr(trace, f"{what}_tensors")[np.repeat(~over, counts)]
        columns[f"{what}_offsets"] = np.concatenate([[0], np.cumsum(counts[~over])]).astype(np.int64)
    columns |= {name: columns.get(name, getattr(trace, name))[~over] for name in COLUMNS if name.startswith("op_")}
    return dataclasses.replace(trace, **columns)


def with_extra(trace: Trace, nbytes: int) -> Trace:
    return dataclasses.replace(trace, start_bytes=trace.start_bytes + nbytes)


def with_spikes(trace: Trace, spikes: Mapping[int, int]) -> Trace:
    """Return `trace` with extra bytes allocated during single ticks. `spikes`: bytes by tick."""
    ticks, never = list(spikes), [NEVER] * len(spikes)
    new: dict[str, list[int]] = {
        "tensor_bytes": list(spikes.values()), "tensor_kind": [TensorKind.TEMPORARY] * len(spikes), "tensor_born": ticks,
        "tensor_released": never, "tensor_sendable": never, "tensor_dies": ticks,
    }  # fmt: skip
    columns: dict[str, Any] = {
        name: np.append(getattr(trace, name), np.array(values, COLUMNS[name])) for name, values in new.items()
    }
    return dataclasses.replace(trace, **columns)


def saved_where(trace: Trace, is_there: Callable[[SavePlace], bool]) -> frozenset[int]:
    """Return the numbers of the storages with a save, the first or a later one, in a place for which `is_there` is true."""
    numbers = frozenset(int(trace.hook_tensor[hook]) for hook, place in trace.places.items() if is_there(place))
    return numbers - {-1}


def with_staying(trace: Trace, tensors: Collection[int]) -> Trace:
    """Return `trace` with the storages `tensors` never sendable, so that no plan moves or drops them."""
    sendable = trace.tensor_sendable.copy()
    sendable[list(tensors)] = NEVER
    return dataclasses.replace(trace, tensor_sendable=sendable) if tensors else trace


def with_times(trace: Trace, factor: float) -> Trace:
    return dataclasses.replace(trace, op_us=trace.op_us * factor)


def renumbered(trace: Trace) -> Trace:
    """Return `trace` with its storages numbered in the order of the operators that use them. A number then has the same meaning
    in every step of these operators. Storages that no operator uses come last."""
    ops = np.arange(len(trace.op_us))
    used_by: list[list[int]] = [[] for _ in trace.tensor_bytes]
    reads = zip(np.repeat(2 * ops, np.diff(trace.read_offsets)).tolist(), trace.read_tensors.tolist(), strict=True)
    writes = zip(np.repeat(2 * ops + 1, np.diff(trace.write_offsets)).tolist(), trace.write_tensors.tolist(), strict=True)
    for use, tensor in sorted((*reads, *writes)):
        used_by[tensor].append(use)
    old = np.array(sorted(range(len(used_by)), key=lambda tensor: (not used_by[tensor], used_by[tensor])), np.int64)
    new = np.empty(len(old) + 1, np.int32)
    new[old], new[-1] = np.arange(len(old)), -1
    columns = {name: getattr(trace, name)[old] for name in COLUMNS if name.startswith("tensor_")}
    numbers = {name: new[getattr(trace, name)] for name in ("read_tensors", "write_tensors", "hook_tensor")}
    return dataclasses.replace(trace, **columns, **numbers)


def _only_make(trace: Trace, outliving: Bools) -> Bools:
    """Return (operators,): True if an operator makes storages among `outliving` and writes nothing else."""
    op = trace.op_of_write()
    writes = trace.write_tensors
    makes = outliving[writes] & (trace.tensor_born[writes] == trace.op_tick[op])
    made, written = (np.bincount(some, minlength=len(trace.op_us)) for some in (op[makes], op))
    return np.asarray((made > 0) & (made == written))


def _outliving(trace: Trace, kinds: Collection[TensorKind]) -> Bools:
    of_kind = np.isin(trace.tensor_kind, [int(kind) for kind in kinds])
    return np.asarray(of_kind & (trace.tensor_born >= 0) & (trace.tensor_dies >= trace.num_ticks))
