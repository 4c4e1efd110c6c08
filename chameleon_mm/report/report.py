"""Report of a session: text for people, a dict for programs, an HTML page, a trace for Perfetto.

    report = session.report()
    print(report); report.to_dict(); report.save_html("swap.html"); report.save_trace("swap.json")

A figure that was not measured is None in the dict and "not measured" in the text. Simulated times are labelled.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from chameleon_mm.device.peak_watch import Peak
from chameleon_mm.files import write_file
from chameleon_mm.follow.adaptation import Adaptation, plan_digests
from chameleon_mm.plan.unswapped_memory import least_memory, memory_curve, peak_memory
from chameleon_mm.pool.host_memory import available_host_bytes, local_ranks
from chameleon_mm.report.chrome_trace import write_trace
from chameleon_mm.report.memory_snapshot import snapshot_of
from chameleon_mm.report.page import page_html
from chameleon_mm.report.step_history import StepFigures, StepHistory, sums_of
from chameleon_mm.report.step_picture import PlannedStepData, memory_rows, picture_of
from chameleon_mm.swap.metrics import CopySpan, Counters, StepKind, TimedSpans
from chameleon_mm.units import format_apart, format_size, format_us, printable

# --- Rank of this process in its job, and comparison of its budgets with those of the other ranks, without a wait
#
# The first rank that enters its n-th session writes its budgets to the store. The other ranks compare theirs with these. There
# is no collective and no wait: a rank that never arrives does not block others.

_log = logging.getLogger(__name__)

_KEY = "chameleon_mm/sessions"


class Ranks:
    """Ranks of a job, from the view of one session of this process. Raises nothing, because training does not depend on it."""

    number, of = 0, 1
    """Rank of this process in the default process group, and number of processes that train together; 0 of 1 without one."""

    def __init__(self, *, host_budget_bytes: int | None) -> None:
        """`host_budget_bytes`: as given by the caller; None: each rank's share of available memory, which differs."""
        self.problems: tuple[str, ...] = ()
        """Sentences about budgets that differ among ranks, or that together exceed this machine's memory."""
        self._host_budget_bytes = host_budget_bytes

    def enter(self, hbm_budget_bytes: int | None) -> None:
        """Compare the budgets with those of other ranks and with the machine's memory. Logs a warning for each problem.
        `hbm_budget_bytes`: None: not given in bytes, so it may differ."""
        if dist.is_available() and dist.is_initialized():
            self.number, self.of = dist.get_rank(), dist.get_world_size()
        found = (self._beyond_the_machine(), self._unlike_the_first(hbm_budget_bytes))
        self.problems = tuple(problem for problem in found if problem is not None)
        for problem in self.problems:
            _log.warning("chameleon_mm: %s", problem)

    def _beyond_the_machine(self) -> str | None:
        """Return a sentence about a host budget that the machine cannot give to all its ranks; None: it can, or unknown."""
        try:
            ranks, available = local_ranks(), available_host_bytes()
        except ValueError:  # a malformed LOCAL_WORLD_SIZE, which a given budget does not need
            return None
        budget = self._host_budget_bytes
        if budget is None or ranks == 1 or not 0 < available < ranks * budget:
            return None
        return (
            f"host_budget: expected {ranks} ranks on this machine to get it, got {format_size(budget)} for each, "
            f"{format_size(ranks * budget)} together, where {format_size(available)} are available; give each "
            f"{format_size(available // ranks)} at most, or none, which divides half of what there is"
        )

    def _unlike_the_first(self, hbm_budget_bytes: int | None) -> str | None:
        """Return a sentence about budgets that differ from the first rank's in the store; None: none differ, or no store."""
        if self.of == 1:
            return None
        mine = {"rank": self.number, "hbm_budget": hbm_budget_bytes, "host_budget": self._host_budget_bytes}
        try:
            first = _first(mine)
        except Exception as error:  # noqa: BLE001 - a store that is gone, or of another kind, is no reason not to train
            _log.debug("chameleon_mm: budgets were not compared among ranks: %s", error)
            return None
        differing = [name for name in ("hbm_budget", "host_budget") if first.get(name) != mine[name]]
        if not differing:
            return None
        said = "; ".join("{} is {} here and {} there".format(name, *_sizes(mine[name], first.get(name))) for name in differing)
        return (
            f"rank {self.number} was given other budgets than rank {first.get('rank')}: {said}; their plans differ, and "
            f"the slowest decides for all: give each the same, unless their parts of the model differ"
        )


def _first(mine: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of the rank that first entered a session of this number; `mine` if it is this rank."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"{_KEY}/{mine['rank']}", 1)
    # Sets the entry if there is none, and returns the entry, in one request for any number of ranks.
    entry: Any = json.loads(store.compare_set(f"{_KEY}/number/{number}", "", json.dumps(mine)))
    return entry if isinstance(entry, dict) else mine


def _sizes(*given: Any) -> list[str]:
    texts = iter(format_apart([nbytes for nbytes in given if isinstance(nbytes, int)]))
    return [next(texts) if isinstance(nbytes, int) else "not given" for nbytes in given]


_TIMED = ("stall_us", "copy_us", "recompute_us")
"""Figures that are None unless a step was timed."""

_NOT_FIGURES = frozenset({"spans", "timed", "planned", "step_figures"})
"""Fields that only the page and the trace use."""


@dataclass(slots=True, kw_only=True)
class SwapReport(Counters):
    """Figures of one session. Sizes are in bytes, `_us` in microseconds of the device's clock (virtual on the simulator)."""

    device: str
    simulated: bool
    steps: int
    """Steps that ended without an exception."""
    detailed_steps: int
    """Steps recorded operator by operator."""
    plans: int
    """Plans made, including plans on trial, and plans made because steps needed more memory."""
    plan_cache_hits: int
    """Steps that agreed at each hook with a known step that had a plan when they began."""
    steps_by_phase: dict[str, int]
    """Ended steps by kind: "recorded" in detail; "planned" from the first hook to the last; "partly_planned"; "by_rule" without
    a plan; "failed" by an exception."""
    planning_us: float
    """Host time for making plans."""
    planned_step_us: float | None
    """Predicted time of a step under the plan for the latest recorded step; None: there is no plan."""
    planned_peak_bytes: int | None
    """Maximum device memory of that step, by the same simulation."""
    unswapped_step_us: float | None = None
    """Time of that step without swaps: its recorded time, scaled to measured steps without their waits."""
    unswapped_peak: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes at the step's peak without swaps, by purpose. `least_peak`: bytes at the lowest peak of any plan."""
    least_peak: dict[str, int] = dataclasses.field(default_factory=dict)
    most_unswapped_bytes: int = 0
    """Largest peak without swaps of all kinds of steps that were repeated; 0: none was."""
    planned_bytes: dict[str, int]
    """Bytes of movable saved tensors, by the plan's action: "kept", "swapped", "recomputed". "held": bytes that autograd did
    not save, kept as inputs of recomputation. Empty: there is no plan."""
    measured_step_us: float | None
    """Median time of the latest steps under that plan; None: none was timed."""
    program_bytes_out: int = 0
    """Bytes that operators of the program itself copied to the host in the latest planned step. The session did not make these
    copies. `program_bytes_back`: from the host."""
    program_bytes_back: int = 0
    hidden_fraction: float | None
    """1 - stall / copy time: the share of the copies' time during which compute did not wait."""
    stall_us: float | None
    """Time that compute waited for copies."""
    copy_us: float | None
    """Time that copies ran, sum of both directions."""
    recompute_us: float | None
    """Time in which compute recomputed dropped storages, in timed steps."""
    peak_hbm_bytes: int
    """Maximum device memory allocated while the session was open; a lower bound if `peak_hbm_at_most_bytes` differs."""
    peak_hbm_at_most_bytes: int | None
    """Upper bound of that maximum; None: unknown. Both bounds equal the peak if it is known. It is known if the process had not
    reached it before, and the device's peak was not reset meanwhile."""
    hbm_budget_bytes: int
    hbm_budget_from: str = ""
    """Sentence that names the memory of which the budget is a share; empty: it was given in bytes."""
    peak_reserved_bytes: int | None
    """Maximum bytes reserved by torch's allocator since the process began or the peak was reset; None: simulated."""
    peak_host_bytes: int
    """Maximum pinned memory in live blocks."""
    host_reserved_bytes: int
    """Pinned memory that the pool has reserved."""
    host_bytes_wanted: int | None
    """Maximum pinned memory that a known step needs by its plan; None: no step has a plan."""
    kept_by_reason: dict[str, int]
    """Number of saved tensors that stayed on the device, by reason."""
    not_recomputed_by_reason: dict[str, int]
    """Number of storages to recompute by a plan that were swapped or kept instead, by reason."""
    recipes_banned: tuple[str, ...]
    """Names of the operators of banned recipes: their bits differed from the original, so they are no longer used."""
    pins: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Pins as texts: "keep", "never_recompute". With a planned step also "kept_bytes" and "never_recomputed_bytes", the bytes
    of the step's saved storages that they hold. Empty: no pins."""
    compiled_partitions: tuple[str, ...] = ()
    """Lines about how much compiled regions save, with estimates of the alternatives: one line per region at its first
    compilation, then one line for all, from the first recorded step."""
    lowered_budget_bytes: int | None
    """Reduced budget of all steps since a step ran again; None: none did."""
    problems: tuple[str, ...]
    """Sentences about misuse of the session, each with a remedy."""
    warnings: dict[str, int] = dataclasses.field(default_factory=dict)
    """Warnings of the session: the text of the first of each kind, which is also in the log, and the number of its kind."""
    warm_up: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Figures, as of `sums_of`, of the latest steps before the first step with a plan. `steady`: from that step on."""
    steady: dict[str, Any] = dataclasses.field(default_factory=dict)
    plan_digests: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the latest planned step and of its plan. Equal on ranks that do the same. Empty: no step was planned."""
    spans: tuple[CopySpan, ...] = dataclasses.field(repr=False)
    """Latest timed copies. This field and the next three are for the trace and the page."""
    timed: TimedSpans = dataclasses.field(default_factory=TimedSpans, repr=False)
    """Latest timed steps and waits, and readings of memory."""
    planned: PlannedStepData | None = dataclasses.field(default=None, repr=False, compare=False)
    """Trace and plan of the latest planned step; None: there is no plan."""
    step_figures: tuple[StepFigures, ...] = dataclasses.field(default=(), repr=False)
    """Figures of the latest steps that ended."""

    @classmethod
    def of(
        cls,
        history: StepHistory,
        *,
        hbm_budget_bytes: int,
        hbm_budget_from: str,
        lowered_budget_bytes: int | None,
        problems: tuple[str, ...],
        adaptation: Adaptation | None,
        pins: Mapping[str, Sequence[str]],
    ) -> SwapReport:
        """Return a report of the present figures of a session. `pins`: by option, without empty options."""
        metrics, pool, device, peak = history.metrics, history.pool.stats(), history.device, history.peak()
        spans, totals, step_figures = metrics.resolve(), metrics.totals, history.figures()
        timed: dict[str, Any] = {name: getattr(totals, name) if totals.timed_steps else None for name in _TIMED}
        planned = None if adaptation is None else adaptation.latest
        return cls(
            device=device.name,
            simulated=device.simulated,
            steps=history.completed,
            steps_by_phase={kind.value: totals.steps_by_kind[kind] for kind in StepKind if totals.steps_by_kind[kind]},
            hidden_fraction=totals.hidden_fraction,
            peak_hbm_bytes=peak.at_least_bytes,
            peak_hbm_at_most_bytes=peak.at_most_bytes,
            hbm_budget_bytes=hbm_budget_bytes,
            hbm_budget_from=hbm_budget_from,
            peak_reserved_bytes=device.peak_reserved_bytes(),
            peak_host_bytes=pool.peak_live_bytes,
            host_reserved_bytes=pool.reserved_bytes,
            kept_by_reason=dict(sorted(totals.kept_by_reason.items())),
            not_recomputed_by_reason=dict(sorted(totals.not_recomputed_by_reason.items())),
            lowered_budget_bytes=lowered_budget_bytes,
            pins={**pins, **(adaptation.pins() if pins and adaptation is not None else {})},
            problems=problems,
            warnings=dict(totals.warnings.values()),
            plan_digests=plan_digests(planned),
            spans=spans,
            timed=metrics.timed_spans(),
            planned=None if planned is None else PlannedStepData.of(planned),
            step_figures=step_figures,
            warm_up=sums_of([step for step in step_figures if step.warm_up]),
            steady=sums_of([step for step in step_figures if not step.warm_up]),
            **{**_of_plans(adaptation), **totals.counters(), **timed},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of all figures, ready for JSON, without the fields for the page and the trace."""
        figures = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_FIGURES}
        plain: dict[type, Callable[[Any], Any]] = {dict: dict, tuple: list}
        return {name: plain.get(type(value), lambda same: same)(value) for name, value in figures.items()}

    @property
    def peak(self) -> Peak:
        """Return both bounds of the peak. Its text says "at least" if they differ."""
        return Peak(self.peak_hbm_bytes, self.peak_hbm_at_most_bytes)

    @property
    def budget_held(self) -> bool | None:
        """True if device memory stayed within the budget while the session was open; None: unknown or not measured."""
        if self.peak_hbm_bytes > self.hbm_budget_bytes:
            return False
        at_most = self.peak_hbm_at_most_bytes
        return True if at_most and at_most <= self.hbm_budget_bytes else None

    @property
    def in_short(self) -> str:
        """Return the result in one line: peak and step time against those of the step without swaps, and the planned steps.

        The peaks are of the largest kind of step. If a step of unknown kind took more, the line has only its peak."""
        warm_up, clock = self.warm_up.get("steps", 0), " (simulated)" if self.simulated else ""
        figures = self.steady if self.steady.get("steps") else self.to_dict()
        after = str(Peak(figures["peak_hbm_bytes"], figures["peak_hbm_at_most_bytes"]))
        parts, by_plan = [f"peak {after}"], self.steps_by_phase.get(StepKind.PLANNED.value, 0)
        unswapped_bytes = self.most_unswapped_bytes or sum(self.unswapped_peak.values())
        if unswapped_bytes and unswapped_bytes >= figures["peak_hbm_bytes"]:
            before = format_size(unswapped_bytes)
            parts = [f"peak {before.removesuffix(after[after.rindex(' ') :])} -> {after}"]
        took_us = self.planned_step_us if self.measured_step_us is None else self.measured_step_us
        if self.unswapped_step_us and took_us is not None:
            predicted = " predicted" if self.measured_step_us is None else ""
            parts.append(f"step {100 * (took_us / self.unswapped_step_us - 1):+.1f} %{predicted}{clock}")
        parts.append(f"{by_plan} of {sum(self.steps_by_phase.values()) - warm_up} steps by plan")
        parts += [f"after {warm_up} of warm-up"] * (warm_up > 0) + ["budget EXCEEDED"] * (self.budget_held is False)
        return ", ".join(parts)

    def rows(self) -> list[tuple[str, str]]:
        """Return label and text of each figure, for tables."""
        clock = " (simulated)" if self.simulated else ""
        host = f"{format_size(self.peak_host_bytes)} live at most, {format_size(self.host_reserved_bytes)} reserved"
        if self.host_bytes_wanted is not None:
            host += f", {format_size(self.host_bytes_wanted)} wanted by plans"
        by_allocator, lowered = self.bytes_reclaimed_by_allocator, self.lowered_budget_bytes
        inside = f", {format_size(by_allocator)} of it inside of an allocation" if by_allocator else ""
        since = "" if lowered is None else f", within {format_size(lowered)} since"
        mine = f"{format_size(self.program_bytes_out)} out, {format_size(self.program_bytes_back)} back"
        also = ", others too" * (self.timed_steps > self.steps)
        kept = ", ".join(f"{count} {reason}" for reason, count in self.kept_by_reason.items()) or "none"
        phases = ", ".join(f"{count} {StepKind(kind)}" for kind, count in self.steps_by_phase.items()) or "none ended"
        return [
            ("in short", self.in_short),
            ("device", self.device),
            *(("PROBLEM", problem) for problem in self.problems),
            *(("WARNING", f"{text} ({count} of its kind)") for text, count in self.warnings.items()),
            ("steps", f"{self.steps} completed, {self.timed_steps} timed{also}"),
            ("what the steps were", phases),
            ("plans made, host time", f"{self.plans}, {format_us(self.planning_us)}"),
            *self._planned_rows(clock),
            *self._pin_rows(),
            *(("budget of device memory", text) for text in (self.hbm_budget_from,) if text),
            ("peak device memory", self._peak()),
            *(("reserved by torch at most", format_size(n)) for n in (self.peak_reserved_bytes,) if n is not None),
            *self._recomputed_rows(clock),
            *(("partition of compiled regions", line) for line in self.compiled_partitions),
            ("swapped out / in", f"{format_size(self.bytes_swapped_out)} / {format_size(self.bytes_swapped_in)}"),
            *self._state_rows(),
            *([("the program's own copies", f"{mine} a step")] if self.program_bytes_out or self.program_bytes_back else []),
            ("reclaimed", format_size(self.bytes_reclaimed) + inside),
            ("swap-ins", f"{self.prefetches} prefetched, {self.swap_ins_on_demand} on demand"),
            (f"hidden share of copy time{clock}", self._apart("hidden_fraction", _percent)),
            (f"stall{clock}", self._apart("stall_us", format_us)),
            ("pinned host memory", host),
            ("kept on the device", kept),
            ("fallbacks, to pageable memory, OOM retries", f"{self.fallbacks}, {self.pageable_swap_outs}, {self.oom_retries}"),
            ("steps run again", f"{self.steps_run_again}{since}"),
            *([("snapshots", f"{self.snapshots}, {format_size(self.snapshot_bytes)}")] if self.snapshots else []),
        ]  # fmt: skip

    def _apart(self, name: str, show: Callable[[float | None], str]) -> str:
        """Return the text of a figure of all timed steps, and of the steps after the warm-up, if there was one."""
        after = f", after the warm-up {show(self.steady.get(name))}" if self.warm_up.get("steps") else ""
        return show(getattr(self, name)) + after

    def _state_rows(self) -> list[tuple[str, str]]:
        moved = (
            ("optimizer state", self.state_bytes_swapped_out, self.state_bytes_swapped_in),
            ("gradients", self.gradient_bytes_swapped_out, self.gradient_bytes_swapped_in),
            ("parameters", self.parameter_bytes_swapped_out, self.parameter_bytes_swapped_in),
        )
        return [(f"{what} out / in", f"{format_size(out)} / {format_size(back)}") for what, out, back in moved if out or back]

    def _peak(self) -> str:
        """Return the text about the peak as far as it is known, the budget, and whether the budget was kept."""
        budget = f"budget {format_size(self.hbm_budget_bytes)}"
        peak, at_most = self.peak, self.peak_hbm_at_most_bytes
        if at_most == 0:
            return f"not measured ({budget})"
        if self.budget_held is False:
            by = format_size(self.peak_hbm_bytes - self.hbm_budget_bytes)
            return f"{peak} ({budget}, EXCEEDED by {peak.prefix}{by})"
        if self.budget_held and at_most is not None:
            return f"{peak}{f', at most {format_size(at_most)}' if peak.prefix else ''} ({budget}, held)"
        why = "the device's peak statistics were reset while the session was open"
        if at_most is not None:
            reached = format_size(at_most)
            why = f"the process had reached {reached} before the session; reset the device's peak before it to know"
        return f"{peak} ({budget}, not known whether held: {why})"

    def _planned_rows(self, clock: str) -> list[tuple[str, str]]:
        """Return rows of the latest plan's predictions and of the measured time."""
        if self.planned_step_us is None or self.planned_peak_bytes is None:
            rule = max((step.peak_hbm_bytes for step in self.step_figures if step.kind is StepKind.BY_RULE), default=0)
            least = sum(self.least_peak.values())
            if least <= self.hbm_budget_bytes:
                return [("latest plan", "none")]
            took = f"; steps by the default rule took up to {format_size(rule)}" if rule else ""
            return [("latest plan", f"none: one needs {format_size(least)} or more{took}")]
        measured = f"{format_us(self.measured_step_us)} measured" if self.measured_step_us is not None else "not measured"
        return [
            (f"latest plan's step{clock}", f"{format_us(self.planned_step_us)} predicted, {measured}"),
            ("latest plan's peak", f"{format_size(self.planned_peak_bytes)} predicted"),
            *([] if self.planned is None else memory_rows(self.planned.trace)),
            ("latest plan's bytes", ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in self.planned_bytes.items())),
        ]

    def _pin_rows(self) -> list[tuple[str, str]]:
        """Return a row of the pins and the bytes that they hold; empty without pins."""
        given = [f"{option}={self.pins[option]}" for option in ("keep", "never_recompute") if option in self.pins]
        if not given:
            return []
        text = ", ".join(given)
        held = {name: self.pins[name] for name in ("kept_bytes", "never_recomputed_bytes") if name in self.pins}
        if held and not any(held.values()):
            text += ": hold nothing: no forward of these modules saves what could move; "
            text += "they may be used without it, replaced, or inside compiled code"
        elif held:
            text += ": {} kept, {} never recomputed".format(*map(format_size, held.values()))
        return [("pins", text)]

    def _recomputed_rows(self, clock: str) -> list[tuple[str, str]]:
        """Return rows about dropped and recomputed storages; empty if no plan has any."""
        refused = ", ".join(f"{count} {reason}" for reason, count in self.not_recomputed_by_reason.items())
        rows = [("not recomputed after all", refused)] if refused else []
        if self.recipes_banned:
            rows.append(("not run again any more", ", ".join(self.recipes_banned)))
        if not self.recomputed:
            return rows
        dropped = f"{self.recomputed} dropped, {format_size(self.bytes_recomputed)}"
        held = f"{format_size(self.bytes_held)} held for them; " if self.bytes_held else ""
        took = "" if self.recompute_us is None else f" in {format_us(self.recompute_us)}, timed steps alone"
        ran = f"{self.recomputations} recomputations{took}; {self.proofs} compared with the originals"
        return [(f"recomputed{clock}", f"{dropped}; {held}{ran}"), *rows]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return printable("\n".join(f"{label:<{width}}  {text}" for label, text in rows))

    def save_html(self, path: str | Path) -> None:
        """Write a self-contained page, for any browser without a network: memory, compute and copies over the latest planned
        step, the plan's action on each tensor, all steps, and the figures. docs/report.md explains how to read it."""
        picture = None
        if self.planned is not None:
            with suppress(ValueError):  # a plan that cannot be carried out has no picture, as in `PlannedStep`
                picture = picture_of(self.planned)
        write_file(path, page_html(self.rows(), self.to_dict(), picture, self.step_figures))

    def save_trace(self, path: str | Path) -> None:
        """Write the latest timed spans as a Chrome trace, for Perfetto (https://ui.perfetto.dev) or chrome://tracing: one track
        each for steps, compute, d2h and h2d, and counters of device memory and of the budget."""
        told = ("device", "simulated", "steps", "steps_by_phase", "detailed_steps", "plans", "plan_cache_hits")
        about = {name: getattr(self, name) for name in told}
        write_trace(path, self.spans, self.timed, hbm_budget_bytes=self.hbm_budget_bytes, about=about)

    def save_memory_viz(self, path: str | Path) -> None:
        """Write the recorded memory of the latest planned step, without swaps, for https://pytorch.org/memory_viz. Raises
        `ValueError` if no step was planned."""
        if self.planned is None:
            raise ValueError("save_memory_viz: expected a session with a plan, got none; run a step in it to its end first")
        write_file(path, pickle.dumps(snapshot_of(self.planned.trace)))


def _of_plans(adaptation: Adaptation | None) -> dict[str, Any]:
    """Return the figures of a report about plans. `adaptation`: None: the session makes no plans."""
    planned = None if adaptation is None else adaptation.latest
    entries = () if adaptation is None else adaptation.steps.entries()
    plans = [entry.plan for entry in entries if entry.plan is not None]
    again = [one for one in plans if one.recent_extra or one.predicted_by is not None]
    followed = None if planned is None else planned.current
    plan = None if followed is None else followed.program.plan
    pace = 1.0 if planned is None or followed is None or not followed.times_us else planned.slowdown_under(followed)
    return {
        "detailed_steps": 0 if adaptation is None else adaptation.detailed_steps,
        "plans": 0 if adaptation is None else adaptation.plans,
        "plan_cache_hits": 0 if adaptation is None else adaptation.plan_cache_hits,
        "planning_us": 0.0 if adaptation is None else adaptation.planning_us,
        "planned_step_us": None if plan is None else plan.step_us,
        "planned_peak_bytes": None if plan is None else plan.peak_bytes,
        "unswapped_step_us": None if planned is None else planned.trace.duration_us * pace,
        "unswapped_peak": {} if planned is None else peak_memory(planned.trace).parts,
        "most_unswapped_bytes": max((int(memory_curve(one.trace).max(initial=0)) for one in again), default=0),
        "least_peak": {} if planned is None else least_memory(planned.trace).parts,
        "planned_bytes": {} if planned is None else planned.bytes_by_class(),
        "program_bytes_out": 0 if planned is None else int(planned.trace.op_out_bytes.sum()),
        "program_bytes_back": 0 if planned is None else int(planned.trace.op_back_bytes.sum()),
        "measured_step_us": None if followed is None or not followed.times_us else median(followed.times_us),
        "host_bytes_wanted": None if adaptation is None else adaptation.host_bytes_wanted,
        "recipes_banned": () if adaptation is None else adaptation.banned,
        "compiled_partitions": ()
        if adaptation is None
        else (*adaptation.first_partitions.lines, *filter(None, [adaptation.partition.text])),
    }


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"
