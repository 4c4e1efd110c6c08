"""What recorded training steps cost each allocator: bytes reserved, in use, and lost to rounding.

    for trace: for allocator: play the trace; look at it while the most is live, and at the end

Counted, not timed, and nothing is pinned: the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived
from chameleon_mm.bench.pinned.allocators import AddressesOnly, OursPlayed, SizeBins, power_of_two
from chameleon_mm.bench.pinned.traces import Trace, load_trace, play, trace_names
from chameleon_mm.bench.probe.pools import CupyPool, TorchHostAllocator, empty_torch_host_cache
from chameleon_mm.device.protocols import Device
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.pinned.plan_offsets import plan_offsets
from chameleon_mm.pinned.replay import ReplayPool
from chameleon_mm.units import GIB, TIB

_TORCH_SCALE = 64
"""torch's allocator has no way to count without pinning; at full size it would pin for half a minute a trace."""

COLUMNS = (
    Column(
        key="reserved_gib", title="reserved GiB", formula="the most that the allocator had reserved / 2**30", on_stand_in=True
    ),
    Column(
        key="reserved_ratio",
        title="reserved / peak live",
        formula="that / the most bytes that were live, as asked for",
        on_stand_in=True,
    ),
    Column(
        key="used",
        title="requested / reserved",
        formula="bytes live, as asked for / bytes reserved, while the most is live",
        on_stand_in=True,
    ),
    Column(
        key="locked_ratio",
        title="locked / requested",
        formula="blocks as handed out / as asked for, while the most is live",
        on_stand_in=True,
    ),
)


class Played(Protocol):
    """An allocator that a trace is played to, and what it says of itself."""

    def begin_step(self) -> None: ...

    def allocate(self, nbytes: int) -> Any: ...

    def release(self, block: Any) -> None: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def locked_bytes(self) -> int | None:
        """Bytes of live blocks as handed out; None where the allocator does not tell."""
        ...


Make = Callable[[Trace], AbstractContextManager[Played]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What one allocator needed for one trace. All in bytes."""

    peak_live_bytes: int
    peak_reserved_bytes: int
    reserved_at_peak_bytes: int
    locked_at_peak_bytes: int | None
    """None: the allocator does not tell."""

    @property
    def reserved_ratio(self) -> float:
        return self.peak_reserved_bytes / self.peak_live_bytes

    @property
    def locked_ratio(self) -> float | None:
        return None if self.locked_at_peak_bytes is None else self.locked_at_peak_bytes / self.peak_live_bytes


@contextmanager
def best_fit(trace: Trace) -> Iterator[Played]:
    """Our pool by itself."""
    with PinnedPool(TIB, AddressesOnly()) as pool:
        yield OursPlayed(pool)


@contextmanager
def replayed(trace: Trace) -> Iterator[Played]:
    """Our pool with a plan of the whole recording."""
    with PinnedPool(TIB, AddressesOnly()) as pool, ReplayPool(pool, plan_offsets(trace.requests())) as replay:
        yield OursPlayed(pool, replay)


@contextmanager
def replayed_from_first(trace: Trace) -> Iterator[Played]:
    """Our pool with a plan of the first step alone, played again in each: right where steps are alike."""
    plan = plan_offsets(trace.step_requests(0))
    with PinnedPool(TIB, AddressesOnly()) as pool, ReplayPool(pool, plan) as replay:
        yield OursPlayed(pool, replay, every_step=True)


@contextmanager
def _cupy(trace: Trace) -> Iterator[Played]:
    yield CupyPool()


@contextmanager
def _torch_host(trace: Trace) -> Iterator[Played]:
    empty_torch_host_cache()
    yield TorchHostAllocator(_TORCH_SCALE)
    empty_torch_host_cache()


@contextmanager
def _power_of_two(trace: Trace) -> Iterator[Played]:
    yield SizeBins(power_of_two)


@contextmanager
def _exact_bins(trace: Trace) -> Iterator[Played]:
    yield SizeBins(lambda nbytes: nbytes)


OURS: dict[str, Make] = {
    "best fit": best_fit, "replay": replayed, "replay of step 1": replayed_from_first,
}  # fmt: skip
PEERS: dict[str, Make] = {
    "CuPy's pool": _cupy, "torch's host allocator": _torch_host, "power of two": _power_of_two, "exact bins": _exact_bins,
}  # fmt: skip


def waste(trace: Trace, make: Make) -> Waste:
    """Play `trace` to the allocator that `make` gives, and count."""
    with make(trace) as allocator:
        seen: list[tuple[int, int | None]] = []
        play(trace, allocator, at_peak=lambda: seen.append((allocator.reserved_bytes, allocator.locked_bytes)))
        return Waste(
            peak_live_bytes=trace.peak[0],
            # None of them gives anything back by itself, so that the end shows the most.
            peak_reserved_bytes=allocator.reserved_bytes,
            reserved_at_peak_bytes=seen[0][0],
            locked_at_peak_bytes=seen[0][1],
        )


def measure(device: Device, names: Sequence[str] = ()) -> tuple[Results, dict[tuple[str, str], Waste]]:
    """The table of the named traces (all by default), and what our own allocators needed by (trace, allocator)."""
    results = Results("pinned waste", device, COLUMNS)
    results.notes += [
        "counted on recorded traces, not timed; nothing was pinned for it, but by torch's host allocator",
        "replay: a plan of the whole recording; replay of step 1: the plan of its first step, played again in each",
    ]
    ours: dict[tuple[str, str], Waste] = {}
    for name in names or trace_names():
        trace = load_trace(name)
        results.notes.append(f"{name}: {trace.about}")
        for peer, make in (OURS | PEERS).items():
            try:
                if device.simulated and make is _torch_host:
                    raise LookupError("torch pins memory on a CUDA GPU alone; none took part in this run")
                outcome = waste(trace, make)
            except (ImportError, LookupError) as error:
                reason = f"CuPy is not installed here ({error})" if isinstance(error, ImportError) else str(error)
                results.add(f"{name}, {peer}", {"trace": name, "allocator": peer}, dict.fromkeys(_KEYS, Waived(reason)))
                continue
            if peer in OURS:
                ours[name, peer] = outcome
            results.add(f"{name}, {peer}", {"trace": name, "allocator": peer}, _cells(outcome))
    return results, ours


_KEYS = tuple(column.key for column in COLUMNS)


def _cells(outcome: Waste) -> dict[str, Cell]:
    locked = outcome.locked_ratio
    return {
        "reserved_gib": _figure(outcome.peak_reserved_bytes / GIB, "GiB"),
        "reserved_ratio": _figure(outcome.reserved_ratio, "1"),
        "used": _figure(outcome.peak_live_bytes / outcome.reserved_at_peak_bytes, "1"),
        "locked_ratio": Waived("it does not tell what its blocks take") if locked is None else _figure(locked, "1"),
    }


def _figure(value: float, unit: str) -> Figure:
    return Figure.of([value], unit, simulated=False)
