"""Picture of the latest planned step, as plain data: the plan's action on each tensor, predicted memory and times.

    source = PlannedStepData.of(planned, ...)     # immutable data, which may be kept
    picture = picture_of(source)                  # simulates the plan once
    picture.memory, picture.compute, picture.copies, picture.tensors

All times are predictions of the plan's simulation, except `times_us`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chameleon_mm.follow.planned_step import PlannedStep
from chameleon_mm.plan.simulate import Stall, Timeline, simulate
from chameleon_mm.plan.swap_plan import Action, SwapPlan
from chameleon_mm.plan.timing import EngineSpan, LinkCost
from chameleon_mm.plan.trace import Float64s, Int64s, StepPhase, TensorKind, Trace
from chameleon_mm.plan.unswapped_memory import (
    Candidates,
    largest_of,
    least_memory,
    makers_of,
    memory_curve,
    peak_memory,
    place_of,
)

# --- Readable names of a trace's storages: path of the saving module, if known, and the operator that made the storage
#
# A number distinguishes storages of the same name: "gelu #2".


def names_of(trace: Trace, numbers: Sequence[int]) -> dict[int, str]:
    """Return the names of the storages `numbers` of `trace`, in the trace's order."""
    makers = makers_of(trace)
    plain: dict[int, str] = {}
    for number in sorted(numbers):
        made_by = makers.get(number) or TensorKind(int(trace.tensor_kind[number])).name.lower()
        module = place_of(trace, number).module
        plain[number] = f"{module}: {made_by}" if module else made_by
    count, seen = Counter(plain.values()), Counter[str]()
    for number, name in plain.items():
        if count[name] > 1:
            seen[name] += 1
            plain[number] = f"{name} #{seen[name]}"
    return plain


LARGEST = "largest at that least"


def memory_rows(trace: Trace) -> list[tuple[str, str]]:
    """Return label and text about memory at the step's peak, and at the lowest peak of any plan."""
    peaks = (("peak of the step unswapped", peak_memory(trace)), ("least that a plan can reach", least_memory(trace)))
    rows = [(label, str(peak)) for label, peak in peaks]
    return [*rows, *((LARGEST, large) for large in largest_of(trace, peaks[1][1]))]


KEPT, SWAPPED, IN_PART, RECOMPUTED, HELD = "kept", "swapped", "in part", "recomputed", "held"
WHAT_PLANS_DO = (KEPT, SWAPPED, IN_PART, RECOMPUTED, HELD)
"""Actions of a plan on a storage. "in part": the last bytes are swapped, the first bytes stay."""

_Done = tuple[str, Action]
"""Element of `WHAT_PLANS_DO`, and the plan's action on the storage."""

STALL, RECOMPUTE = "stall", "recompute"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedStepData:
    """Trace and plan of a step, and the times measured so far of steps like it."""

    trace: Trace
    plan: SwapPlan
    link: LinkCost
    predicted: bool
    """True if no step of these sizes was recorded: its trace was computed from traces of other sizes."""
    times_us: tuple[float, ...]
    """Times of the latest steps that followed the plan and were timed in full."""

    @classmethod
    def of(cls, planned: PlannedStep) -> PlannedStepData | None:
        """Return the present data of `planned`; None: it has no plan."""
        current, link = planned.current, planned.link
        if current is None or link is None:
            return None
        return cls(
            trace=planned.trace,
            plan=current.program.plan,
            link=link,
            predicted=planned.predicted_by is not None,
            times_us=tuple(current.times_us),
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """Interval of time in which an engine is busy, or compute waits."""

    kind: str
    """Phase of the operators, `RECOMPUTE` or `STALL`; for a copy, the plan's action on the tensor."""
    start_us: float
    end_us: float
    tensor: int
    """Number in the trace of the bar's tensor; -1: none."""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Storage that may move or is held, and the plan's action on it."""

    tensor: int
    name: str
    nbytes: int
    does: str
    """Element of `WHAT_PLANS_DO`."""
    moved_bytes: int
    """Bytes that cross the link one way."""
    saved_us: float
    """Predicted time at which the storage is made; 0: before the step. All times here count from the step's beginning."""
    away_us: float | None
    """Predicted time at which the device memory is freed; None: it stays."""
    back_us: float | None
    """Predicted time at which the storage is on the device again."""
    used_us: float
    """Predicted time of the first use in backward; for a held storage, of the first recomputation that reads it."""
    stall_us: float
    """Predicted time that compute waits for the storage's copies."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Device memory over a step: `nbytes[i]` from `at_us[i]` until `at_us[i + 1]`, the last to `end_us`."""

    at_us: Float64s
    nbytes: Int64s
    end_us: float

    @property
    def peak_bytes(self) -> int:
        return int(self.nbytes.max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPicture:
    """Prediction of one step under its plan."""

    source: PlannedStepData
    timeline: Timeline
    planned: Memory
    unswapped: Memory
    compute: tuple[Bar, ...]
    """Bars of compute, in order: operators by phase, operators that run again, waits."""
    out: tuple[Bar, ...]
    """Copies to the host, in the order of the engine that runs them."""
    back: tuple[Bar, ...]
    tensors: tuple[TensorRow, ...]
    """Storages that may move or are held, most bytes first."""


def picture_of(source: PlannedStepData) -> StepPicture:
    """Return the picture of the step. Raises `ValueError` for an impossible plan, as `simulate` does."""
    trace, plan = source.trace, source.plan
    timeline = simulate(trace, plan, source.link)
    does = _what_is_done(plan)
    return StepPicture(
        source=source,
        timeline=timeline,
        planned=_memory(timeline.tick_us, timeline.allocated_bytes, timeline.step_us, trace.start_bytes),
        unswapped=_memory(trace.clock_us()[:-1], memory_curve(trace), trace.duration_us, trace.start_bytes),
        compute=tuple(_compute(trace, plan, timeline)),
        out=_copies(trace, timeline.out_spans, does),
        back=_copies(trace, timeline.in_spans, does),
        tensors=_tensors(source, timeline, does),
    )


def _copies(trace: Trace, spans: Sequence[EngineSpan], does: Mapping[int, _Done]) -> tuple[Bar, ...]:
    """Return the bars of one engine. A bar's kind is the plan's action on its tensor."""
    return tuple(Bar(_kind(trace, span.tensor, does), span.start_us, span.end_us, span.tensor, span.nbytes) for span in spans)


def _memory(tick_us: Float64s, nbytes: Int64s, end_us: float, start_bytes: int) -> Memory:
    """Return memory over time. Ticks at the same time become one point, their maximum. Equal neighbours become one point."""
    if not len(tick_us):
        return Memory(at_us=np.zeros(1), nbytes=np.array([start_bytes], np.int64), end_us=end_us)
    at_us, first = np.unique(tick_us, return_index=True)
    most = np.maximum.reduceat(nbytes, first)
    changes = np.append(True, most[1:] != most[:-1])
    return Memory(at_us=at_us[changes], nbytes=most[changes], end_us=end_us)


def _compute(trace: Trace, plan: SwapPlan, timeline: Timeline) -> list[Bar]:
    """Return the bars of compute. Neighbours of one kind are one bar. Each tensor for which compute waits has its own bar."""
    begin_us: list[float] = [*timeline.tick_us.tolist(), timeline.step_us]
    op_us = dict(zip(trace.op_tick.tolist(), trace.op_us.tolist(), strict=True))
    phases = dict(zip(trace.op_tick.tolist(), trace.op_phase.tolist(), strict=True))
    stalls: dict[int, list[Stall]] = defaultdict(list)
    for stall in timeline.stalls:
        stalls[int(trace.hook_tick[stall.hook])].append(stall)
    recomputed = {int(trace.hook_tick[action.in_at]) for action in plan.recomputed}
    bars: list[Bar] = []
    for tick in sorted({*op_us, *stalls, *recomputed}):
        at_us = begin_us[tick]
        if tick in op_us:
            _add(bars, Bar(StepPhase(phases[tick]).name.lower(), at_us, at_us + op_us[tick], -1))
            continue
        for stall in stalls.get(tick, ()):
            bars.append(Bar(STALL, at_us, at_us + stall.us, stall.tensor))
            at_us += stall.us
        if tick in recomputed:
            _add(bars, Bar(RECOMPUTE, at_us, begin_us[tick + 1], -1))
    return bars


def _add(bars: list[Bar], bar: Bar) -> None:
    """Add `bar`, merged with the last bar if that has the same kind and ends where `bar` begins."""
    last = bars[-1] if bars else None
    if bar.end_us <= bar.start_us:
        return
    if last is not None and last.kind == bar.kind and bar.start_us - last.end_us <= 1e-9 * max(1.0, bar.start_us):
        bars[-1] = Bar(bar.kind, last.start_us, bar.end_us, -1)
    else:
        bars.append(bar)


def _what_is_done(plan: SwapPlan) -> dict[int, _Done]:
    """Return the plan's action by tensor. A tensor that is both held and swapped counts as held."""
    done: dict[int, _Done] = {action.tensor: (SWAPPED, action) for action in plan.swaps if not action.again}
    done |= {action.tensor: (RECOMPUTED, action) for action in plan.recomputed}
    return done | {action.tensor: (HELD, action) for action in plan.held}


def _tensors(source: PlannedStepData, timeline: Timeline, does: Mapping[int, _Done]) -> tuple[TensorRow, ...]:
    trace, plan = source.trace, source.plan
    candidates = Candidates.of(trace)
    first_use = dict(zip(candidates.tensor.tolist(), candidates.use.tolist(), strict=True))
    swaps = {action.tensor: action for action in plan.swaps if not action.again}
    # Tensors that are not candidates are listed if they are held, or swapped only between two uses.
    numbers = list(dict.fromkeys((*first_use, *swaps, *(action.tensor for action in plan.held))))
    names, tick_us = names_of(trace, numbers), timeline.tick_us
    arrives_us = {span.tensor: span.end_us for span in reversed(timeline.in_spans)}  # the first of several
    predicted_us = Counter[int]()
    for stall in timeline.stalls:
        predicted_us.update({stall.tensor: stall.us})
    hook_us: Float64s = tick_us[trace.hook_tick]
    rows = []
    for number in numbers:
        kind, action = _kind(trace, number, does), does.get(number, (KEPT, None))[1]
        swap, nbytes = swaps.get(number), int(trace.tensor_bytes[number])
        goes = swap or (action if kind == RECOMPUTED else None)
        back_us = None if goes is None else float(hook_us[goes.in_at]) if swap is None else arrives_us.get(number)
        used_at = first_use[number] if number in first_use or action is None else action.use_at
        born = int(trace.tensor_born[number])
        rows.append(
            TensorRow(
                tensor=number,
                name=names[number],
                nbytes=nbytes,
                does=kind,
                moved_bytes=0 if swap is None else swap.nbytes,
                saved_us=float(tick_us[born]) if 0 <= born < len(tick_us) else 0.0,
                away_us=None if goes is None else float(hook_us[goes.reclaim_at]),
                back_us=back_us,
                used_us=float(hook_us[used_at]),
                stall_us=predicted_us[number],
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.tensor)))


def _kind(trace: Trace, tensor: int, does: Mapping[int, _Done]) -> str:
    if tensor not in does:
        return KEPT
    kind, action = does[tensor]
    return IN_PART if kind == SWAPPED and action.nbytes < trace.tensor_bytes[tensor] else kind
