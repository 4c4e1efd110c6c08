"""Predict a step's time and memory within a budget, for each way to fit it, by arithmetic over its trace.

prediction = predict(step, spec, hbm_budget, host_budget, recompute)
prediction.ways             no swapping, the plan, swap only or swap everything, torch's checkpointing: peak, stall, step time
prediction.infeasible       reason why no plan keeps the budget; None: a plan does
prediction.needs            device memory by class of storages: the maximum, and at the peak
peak_phase(trace, peak)     forward, backward or optimizer
smallest_within(trace, ...) the smallest budget for which there is a plan, at any cost in time

A found budget is rounded up to a value that `format_size_up` prints exactly, and tried again, because a slightly larger budget
may have a worse plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chameleon_mm.device.sim.cost_model import CostModel
from chameleon_mm.device.specs import GpuSpec
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.plan.bounds import ideal
from chameleon_mm.plan.planner import generate_plan
from chameleon_mm.plan.rule import DEFAULT_BUDGET_SHARE
from chameleon_mm.plan.swap_all import swap_all
from chameleon_mm.plan.swap_plan import SwapPlan
from chameleon_mm.plan.timing import COUNTED_ON, LinkCost
from chameleon_mm.plan.trace import StepPhase, Trace
from chameleon_mm.plan.unswapped_memory import KIND_NAMES, Peak, least_memory, peak_memory, sum_over_time
from chameleon_mm.replayable import DEFAULT, PRODUCTS
from chameleon_mm.tools.blocks import Checkpointing, fullest, part_levels
from chameleon_mm.tools.outputs import print_line, print_table
from chameleon_mm.tools.step_on_shapes import RecordedStep
from chameleon_mm.units import allocated_size, format_size, format_size_up, format_us, parse_size

REPLAYED = DEFAULT | PRODUCTS
"""Base names of operators that a predicted plan may run again. A session tests products on its device first."""

_MOST_PLANNED = 3
"""Maximum number of ways listed before torch's checkpointing: more make the table wider than a terminal."""

SCHEMA = "chameleon_mm.plan/1"


def default_budget(spec: GpuSpec) -> int:
    """Bytes of device memory that a session takes by default."""
    return int(spec.hbm_bytes * DEFAULT_BUDGET_SHARE)


def smallest_within(
    trace: Trace, budget: int, peak_bytes: int, host_budget: int, cost: LinkCost, recompute: Collection[str] = ()
) -> int:
    """Find the smallest budget, at least `budget`, for which there is a plan within `host_budget` bytes of pinned memory."""
    while True:
        budget = min(parse_size(format_size_up(budget)), peak_bytes)  # as it is printed
        try:
            generate_plan(trace, budget, host_budget, cost, recompute=recompute)
        except InfeasibleBudget as error:  # names a larger budget; the unswapped peak needs no host memory
            budget = error.smallest_bytes or peak_bytes
        else:
            return budget


def _plan_within(
    trace: Trace, hbm_budget: int, host_budget: int | None, cost: LinkCost, recompute: Collection[str] = ()
) -> SwapPlan:
    """Make a plan as a session does: the choice assumes a share of the link's rates; the plan's times use the whole link."""
    return generate_plan(trace, hbm_budget, host_budget, cost, recompute=recompute, counted_on=COUNTED_ON)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Memory that one class of storages needs, or that operators hold internally."""

    name: str
    most_bytes: int
    """Maximum bytes of this class over the step."""
    at_peak_bytes: int
    """Bytes of this class at the peak of the whole step."""


def needs_of(trace: Trace, peak: Peak) -> tuple[MemoryNeed, ...]:
    """Needs of the classes that occur in `trace`. `peak`: its peak. O(operators + storages)."""
    size = allocated_size(trace.tensor_bytes)
    since, until = np.maximum(trace.tensor_born, 0), trace.tensor_dies + 1
    needs = []
    for name in dict.fromkeys(KIND_NAMES.values()):
        which = np.isin(trace.tensor_kind, [kind for kind, its_name in KIND_NAMES.items() if its_name == name])
        if which.any():
            most = int(sum_over_time(trace.num_ticks, size[which], since[which], until[which]).max(initial=0))
            needs.append(MemoryNeed(name=name, most_bytes=most, at_peak_bytes=peak.parts.get(name, 0)))
    if trace.op_inner_bytes.any():
        most = int(trace.op_inner_bytes.max())
        needs.append(MemoryNeed(name="inside operators", most_bytes=most, at_peak_bytes=peak.inner_bytes))
    return tuple(needs)


def peak_phase(trace: Trace, peak: Peak) -> StepPhase:
    """Return the phase of the operator at the peak, or of the last operator before it."""
    op = int(np.searchsorted(trace.op_tick, peak.tick, side="right")) - 1
    return StepPhase(int(trace.op_phase[max(op, 0)])) if len(trace.op_phase) else StepPhase.FORWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    name: str
    peak_bytes: int
    step_us: float
    host_bytes: int = 0
    moved_bytes: int = 0
    """Bytes that are copied out; as many are copied back."""
    stall_us: float = 0.0
    device_copy_us: float = 0.0
    """Time of copies within device memory: if a storage moves in part, the part that stays is copied."""
    recompute_us: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class StepNeeds:
    """A recorded step, and the memory that it needs unswapped."""

    step: RecordedStep
    spec: GpuSpec
    hbm_budget_bytes: int
    host_budget_bytes: int | None
    needs: tuple[MemoryNeed, ...] = field(init=False)
    peak: Peak = field(init=False)
    phase: StepPhase = field(init=False)

    def __post_init__(self) -> None:
        self.peak = peak_memory(self.step.trace)
        self.needs, self.phase = needs_of(self.step.trace, self.peak), peak_phase(self.step.trace, self.peak)

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of these figures as plain data; all are predicted."""
        return {
            "predicted": True,
            **self.step.to_dict(),
            "hbm_budget_bytes": self.hbm_budget_bytes,
            "host_budget_bytes": self.host_budget_bytes,
            "needs": [asdict(need) for need in self.needs],
            "peak_bytes": self.peak.nbytes,
            "peak_phase": self.phase.name.lower(),
        }

    def show(self, console: Console) -> None:
        """Print the model, parameters, optimizer and GPU, then a table with a row for each class of storages."""
        step, phase = self.step, "the optimizer" if self.phase is StepPhase.OPTIMIZER else self.phase.name.lower()
        print_line(console, f"chameleon-mm plan: {step.about}", style="bold")
        autocast = "" if step.autocast is None else f"under autocast to {step.autocast}, "
        print_line(
            console,
            f"{_count(step.num_parameters)} parameters, {step.dtype}, {autocast}optimizer {step.optimizer}; one training step "
            f"on {self.spec.name}, predicted: nothing ran",
        )
        table = Table(title="what the step needs", title_justify="left")
        table.add_column("", no_wrap=True)
        table.add_column("at most", justify="right", no_wrap=True)
        table.add_column(f"at the peak, in {phase}", justify="right")
        for need in self.needs:
            table.add_row(need.name, format_size(need.most_bytes), format_size(need.at_peak_bytes))
        table.add_section()
        table.add_row("all at once", format_size(self.peak.nbytes), format_size(self.peak.nbytes))
        table.add_row("of it idle, could be swapped", "-", format_size(self.peak.idle_bytes))
        print_table(console, table)


@dataclass(slots=True, kw_only=True, eq=False)
class Prediction(StepNeeds):
    least_phase: StepPhase
    """Phase of the peak that remains with every candidate swapped out."""
    ways: tuple[Way, ...]
    """Ways to run the step, in order: no swapping; the plan, if any; a plan that only swaps, if that plan recomputes; swapping
    everything, if fewer than `_MOST_PLANNED` ways come before it; torch's checkpointing, if recorded."""
    smallest_budget_bytes: int
    """Smallest budget for which there is a plan within the host's budget, at any cost in time."""
    least_bytes: int
    """Bytes that remain at the peak with every candidate swapped out, even if the host has no room for them."""
    infeasible: str | None
    """Reason why no plan keeps the budgets; None: a plan does."""
    plan: SwapPlan | None
    planning_ms: float | None
    """Time for making `plan` on this machine, the only measured figure here."""
    partitions: tuple[Partition, ...] = ()
    """Partitions of compiled blocks that were tried; empty: all runs eagerly."""
    ideal_us: float | None
    """Lower bound T* of the step's time (docs/policy.md) within the budget; it covers recomputation if plans may recompute."""

    @property
    def fits(self) -> bool:
        """True if the step fits without swapping."""
        return self.peak.nbytes <= self.hbm_budget_bytes

    @property
    def can_be_lowered(self) -> bool:
        """True if swapping lowers the peak at all, within the host's budget."""
        return self.smallest_budget_bytes < self.peak.nbytes

    @property
    def ideal_share(self) -> float | None:
        """T* divided by the plan's step time: 1 is the best possible."""
        if self.plan is None or self.ideal_us is None:
            return None
        return self.ideal_us / self.plan.step_us if self.plan.step_us else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of all figures as plain data. Only `planning_ms` is measured; all others are predicted."""
        trace, plan = self.step.trace, self.plan
        return {
            "schema": SCHEMA,
            **StepNeeds.to_dict(self),
            "num_operators": len(trace.op_us),
            "num_saves_and_uses": len(trace.hook_tick),
            "peak_idle_bytes": self.peak.idle_bytes,
            "fits": self.fits,
            "feasible": self.infeasible is None,
            "infeasible": self.infeasible,
            "smallest_budget_bytes": self.smallest_budget_bytes,
            "planning_ms": self.planning_ms,
            "ideal_us": self.ideal_us,
            "ideal_share": self.ideal_share,
            "ways": [asdict(way) for way in self.ways],
            "partitions": [asdict(one) for one in self.partitions],
            "plan": None if plan is None else {
                "num_moved": len(plan.swaps),
                "moved_bytes": plan.moved_bytes,
                "num_recomputed": len(plan.recomputed),
                "num_held": len(plan.held),
                "recompute_us": plan.recompute_us,
            },
        }  # fmt: skip


def link_of(spec: GpuSpec) -> LinkCost:
    """Link rates of a GPU by its spec, and the rate that copies within its memory reach in practice."""
    cost = CostModel(spec=spec)
    hbm_gbps = spec.hbm_gbps * cost.memory_efficiency / 2  # a copy reads and writes every byte
    return LinkCost(d2h_gbps=spec.d2h_gbps, h2d_gbps=spec.h2d_gbps, duplex_gbps=spec.duplex_gbps, hbm_gbps=hbm_gbps)


def predict(
    step: RecordedStep, spec: GpuSpec, hbm_budget: int, host_budget: int | None, recompute: Collection[str] = REPLAYED
) -> Prediction:
    """Predict `step` on `spec` within `hbm_budget` bytes of device memory and `host_budget` bytes of pinned memory (None: any).
    `recompute`: base names of operators that may run again; empty: the plan only swaps.

    Raises `ValueError` for a budget of 0 bytes. `Prediction.infeasible` reports a budget that is too small.
    """
    trace, cost = step.trace, link_of(spec)
    peak, least = peak_memory(trace), least_memory(trace)
    plan, infeasible, planning_ms, ideal_us = None, None, None, None
    smallest, began = least.nbytes, time.perf_counter()
    try:
        plan = _plan_within(trace, hbm_budget, host_budget, cost, recompute)
        planning_ms = (time.perf_counter() - began) * 1e3
        ideal_us = ideal(trace, hbm_budget, cost, recompute=recompute)
    except InfeasibleBudget as error:
        infeasible, smallest = str(error), error.smallest_bytes or smallest
    if host_budget is not None:
        smallest = smallest_within(trace, smallest, peak.nbytes, host_budget, cost, recompute)
        if plan is not None:  # `smallest_within` tries few budgets, and `hbm_budget` has a plan
            smallest = min(smallest, hbm_budget)
    return Prediction(
        step=step,
        spec=spec,
        hbm_budget_bytes=hbm_budget,
        host_budget_bytes=host_budget,
        least_phase=peak_phase(trace, least),
        ways=_ways(trace, peak, plan, hbm_budget, host_budget, cost),
        smallest_budget_bytes=smallest,
        least_bytes=least.nbytes,
        infeasible=infeasible,
        plan=plan,
        planning_ms=planning_ms,
        ideal_us=ideal_us,
    )


PARTITIONS = tuple(share / 10 for share in range(10, -1, -1))
"""Values of torch's `activation_memory_budget` to try: shares of the bytes that torch saves by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Step whose compiled blocks are partitioned under one `activation_memory_budget` of torch."""

    activation_memory_budget: float
    peak_bytes: int
    """Peak without swapping."""
    step_us: float
    """Time without swapping."""
    planned_us: float | None
    """Time of the best plan within the budgets; None: there is none."""


def predict_compiled(
    recorded: Iterable[RecordedStep],
    spec: GpuSpec,
    hbm_budget: int,
    host_budget: int | None,
    recompute: Collection[str] = REPLAYED,
) -> Prediction:
    """Predict the step of a model with compiled blocks, with the partition whose plan takes least time, as `predict` does.

    recorded: a step for each of `PARTITIONS`, in order. All ways except the plan are those of torch's default partition. A plan
    assumes a share of the link's rates, as all plans do. The partition is the one whose plan is fastest on the whole link,
    because a partition that saves less costs time in every step, even on a fast link.
    """
    cost, steps, partitions = link_of(spec), list[RecordedStep](), list[Partition]()
    for step in recorded:
        steps.append(step)
        partitions.append(_partition(step, hbm_budget, host_budget, cost, recompute))
    own = steps[0].trace
    planned = [i for i, one in enumerate(partitions) if one.planned_us is not None]
    best = min(planned, key=lambda i: partitions[i].planned_us or 0.0, default=len(steps) - 1)  # the last partition saves least
    prediction = predict(steps[best], spec, hbm_budget, host_budget, recompute)
    ways = [Way(name="no swapping", peak_bytes=partitions[0].peak_bytes, step_us=own.duration_us)]
    if prediction.plan is not None:
        ways.append(_planned("this plan", steps[best].trace, prediction.plan))
    with suppress(InfeasibleBudget):
        ways.append(_planned("torch's partition", own, _plan_within(own, hbm_budget, host_budget, cost)))
    if alone := [one for one in partitions if one.peak_bytes <= hbm_budget]:
        fastest = min(alone, key=lambda one: one.step_us)
        again_us = fastest.step_us - own.duration_us
        ways.append(Way(name="memory budget", peak_bytes=fastest.peak_bytes, step_us=fastest.step_us, recompute_us=again_us))
    return dataclasses.replace(prediction, ways=tuple(ways), partitions=tuple(partitions))


def _partition(
    step: RecordedStep, hbm_budget: int, host_budget: int | None, cost: LinkCost, recompute: Collection[str]
) -> Partition:
    planned_us = None
    with suppress(InfeasibleBudget):
        planned_us = _plan_within(step.trace, hbm_budget, host_budget, cost, recompute).step_us
    assert step.activation_memory_budget is not None
    return Partition(
        activation_memory_budget=step.activation_memory_budget,
        peak_bytes=peak_memory(step.trace).nbytes,
        step_us=step.trace.duration_us,
        planned_us=planned_us,
    )


def _ways(
    trace: Trace, peak: Peak, plan: SwapPlan | None, hbm_budget: int, host_budget: int | None, cost: LinkCost
) -> tuple[Way, ...]:
    ways = [Way(name="no swapping", peak_bytes=peak.nbytes, step_us=trace.duration_us)]
    if plan is not None:
        ways.append(_planned("this plan", trace, plan))
    if plan is not None and plan.recomputed:
        with suppress(InfeasibleBudget):  # raised if only recomputation reaches the budget
            ways.append(_planned("swap only", trace, _plan_within(trace, hbm_budget, host_budget, cost)))
    if len(ways) < _MOST_PLANNED:
        ways.append(_planned("swap everything", trace, swap_all(trace, cost)))
    return tuple(ways)


def with_checkpointing(
    prediction: Prediction, how: Checkpointing | None, recorded: Callable[[Checkpointing], RecordedStep]
) -> Prediction:
    """Add a recorded way: the same step with torch's checkpointing of its blocks.

    how: None: as few of the blocks as keep within the budget, or all; with a survey: all, which keep of their products and
    attentions what the budget has room for. recorded: records the step.
    """

    def peak_bytes(some: Checkpointing) -> int:
        return peak_memory(recorded(some).trace).nbytes

    recorded, unswapped = cache(recorded), prediction.ways[0]
    survey = None if how is None else how.survey
    if how is None or survey is not None:
        least_bytes = peak_bytes(how or Checkpointing())
        levels = part_levels(len(prediction.step.gathered) - 1) if survey is None else survey.levels()
        search = fullest(len(levels) - 1, prediction.hbm_budget_bytes, least_bytes)
        try:
            at = next(search)
            while True:
                at = search.send(peak_bytes(levels[at]))
        except StopIteration as end:
            how = levels[end.value]
    trace = recorded(how).trace
    again_us = trace.duration_us - unswapped.step_us
    way = Way(name=how.name, peak_bytes=peak_memory(trace).nbytes, step_us=trace.duration_us, recompute_us=max(0.0, again_us))
    return dataclasses.replace(prediction, ways=(*prediction.ways, way))


def _planned(name: str, trace: Trace, plan: SwapPlan) -> Way:
    return Way(
        name=name,
        peak_bytes=plan.peak_bytes,
        host_bytes=plan.host_bytes,
        moved_bytes=plan.moved_bytes,
        stall_us=plan.stall_us,
        device_copy_us=max(0.0, plan.head_copy_us(trace.duration_us)),
        recompute_us=plan.recompute_us,
        step_us=plan.step_us,
    )


# --- Text of a prediction: the step's needs, the figures of each way to run it, and verdicts

_UNFUSED = frozenset({"aten::_safe_softmax", "aten::_scaled_dot_product_attention_math"})
"""Operators that replace torch's fused attention if no fused kernel takes its arguments."""


def show(prediction: Prediction, console: Console) -> None:
    prediction.show(console)
    print_table(console, _table_of_ways(prediction))
    conclude(verdicts(prediction), assumptions(prediction), console, holds=prediction.infeasible is None)


def conclude(verdicts: Sequence[str], assumptions: Sequence[str], console: Console, *, holds: bool) -> None:
    """Print the verdicts, then the assumptions of the figures."""
    for text in verdicts:
        print_line(console, text, style="bold" if holds else "bold red")
    print_line(console, "assumptions:")
    lines = Table.grid(padding=(0, 1))
    for text in assumptions:
        lines.add_row("-", Text(text))  # Text, not str: a model's name may look like markup
    console.print(lines)


def verdicts(prediction: Prediction) -> list[str]:
    """Lines that interpret the figures; the first says whether the step fits."""
    budget, peak = format_size(prediction.hbm_budget_bytes), prediction.peak
    if prediction.infeasible is not None:
        lines = [f"does not fit, and no plan makes it: {prediction.infeasible}"]
    elif prediction.fits:
        lines = [f"fits as it is: {format_size(peak.nbytes)} of {budget}; nothing needs to move"]
    else:
        lines = [f"does not fit as it is, {format_size(peak.nbytes)} of {budget}; with this plan it does"]
    if prediction.ideal_us is not None:
        ideal = format_us(prediction.ideal_us)
        lines.append(f"ideal bound T* within this budget: {ideal}; this plan reaches {prediction.ideal_share:.1%} of it")
    if (share := prediction.step.activation_memory_budget) is not None:
        lines.append(f"the plan is for torch._functorch.config.activation_memory_budget = {share:g}, set before blocks compile")
    if prediction.can_be_lowered:
        smallest = format_size_up(prediction.smallest_budget_bytes)  # rounded up: users may pass it as --hbm-budget
        lines.append(f"smallest budget{_within_host(prediction)}: {smallest}")
    elif prediction.least_bytes < prediction.peak.nbytes:
        lines.append(f"hardly a smaller budget{_within_host(prediction)}: too little for what would have to move")
    else:
        lines.append("swapping cannot lower the peak: nothing that could be away until its first use is idle then")
    if prediction.least_phase is StepPhase.OPTIMIZER and prediction.step.optimizer == "adamw":
        lines.append("what is left is the optimizer's: --optimizer adamw-fused has no temporaries")
    kinds = ("parameters", "gradients", "optimizer state")
    of_any_batch = sum(need.most_bytes for need in prediction.needs if need.name in kinds)
    if of_any_batch > prediction.hbm_budget_bytes:
        lines.append(
            f"no batch helps: parameters, gradients and optimizer state alone are {format_size(of_any_batch)}; "
            f"--swap-optimizer moves the state, --fsdp N shards all of it, --lora R trains adapters alone"
        )
    return lines


def assumptions(prediction: Prediction) -> list[str]:
    """Lines that state the assumptions of the figures, one sentence each."""
    spec, trace, budget = prediction.spec, prediction.step.trace, prediction.hbm_budget_bytes
    cost = CostModel(spec=spec)
    by_default = ", as a session's is by default" if budget == default_budget(spec) else ""
    percent, whole = 100 * budget / spec.hbm_bytes, format_size(spec.hbm_bytes)
    lines = [
        *rooflines(spec, host="; the host is not late"),
        f"the budget is {percent:{'.0f' if percent >= 10 else '.2g'}}% of {spec.name}'s {whole}{by_default}",
        "memory is that of the tensors and what a few operators hold inside; CUDA's context, gaps and workspaces come on top",
        "operators are those of torch on a CPU, but for attention and dropout; a few of CUDA's may save more or less",
    ]
    host_us = int(np.count_nonzero(trace.op_us)) * cost.launch_us
    if host_us > trace.duration_us:
        takes = format_us(host_us)
        lines.append(f"the host would be late: launching the kernels takes it {takes}, at {cost.launch_us:g} us each")
    if any("scaled_dot_product_flash_attention" in name for name in trace.op_names):
        lines.append("attention is fused: it saves q, k, v, its output and one float32 a row, no matrix of scores")
    if not _UNFUSED.isdisjoint(trace.op_names):
        lines.append("some attention ran unfused and saved matrices of scores: its arguments suit no fused kernel of a CPU")
    if prediction.plan is not None and prediction.plan.recomputed:
        lines.append(
            "what runs again takes its time in forward once more; products run again only where the device repeats them exactly"
        )
    lines.extend(prediction.step.notes)
    return lines


def rooflines(spec: GpuSpec, *, host: str = "") -> list[str]:
    """Lines that state a GPU's rates of arithmetic, memory and copies."""
    cost = CostModel(spec=spec)
    attention = f"{cost.attention_efficiency:.0%} in forward and {cost.attention_backward_efficiency:.0%} in backward"
    arithmetic = f"products at {cost.matmul_efficiency:.0%} of {spec.name}'s arithmetic, attention at {attention}"
    return [
        f"{arithmetic}, or {cost.memory_efficiency:.0%} of its memory bandwidth{host}",
        f"copies run at {spec.d2h_gbps:g} GB/s out, {spec.h2d_gbps:g} back and {spec.duplex_gbps:g} both ways together",
    ]


def _table_of_ways(prediction: Prediction) -> Table:
    """Return a table with a column for each way. Rows would be wider than 80 characters."""
    budget, unswapped = prediction.hbm_budget_bytes, prediction.ways[0]
    rows: list[tuple[str, Callable[[Way], str]]] = [
        ("peak", lambda way: format_size(way.peak_bytes)),
        ("pinned host", lambda way: format_size(way.host_bytes)),
        ("moved each way", lambda way: format_size(way.moved_bytes)),
        ("stall", lambda way: format_us(way.stall_us)),
        ("on-device copies", lambda way: format_us(way.device_copy_us)),
        ("recomputing", lambda way: format_us(way.recompute_us)),
        ("step", lambda way: format_us(way.step_us)),
        ("slower by", lambda way: _slower(way, unswapped)),
    ]
    over = {way.name for way in prediction.ways if way.peak_bytes > budget}
    table = Table(title=f"what it comes to within {format_size(budget)} (predicted)", title_justify="left")
    table.add_column("", no_wrap=True)
    for way in prediction.ways:
        table.add_column(way.name.replace(" ", "\n"), justify="right", no_wrap=True)
    for what, text in rows:
        table.add_row(
            what, *(text(way) + ("*" if what == "peak" and way.name in over else " " * bool(over)) for way in prediction.ways)
        )
    if over:
        table.caption, table.caption_justify = "* over the budget", "left"
    return table


def _slower(way: Way, unswapped: Way) -> str:
    if way is unswapped:
        return "-"
    share = way.step_us / unswapped.step_us - 1 if unswapped.step_us else 0.0
    return f"{round(share, 3) + 0.0:.1%}"  # no "-0.0%"


def _within_host(prediction: Prediction) -> str:
    budget = prediction.host_budget_bytes
    return "" if budget is None else f" within {format_size(budget)} of pinned host memory"


def _count(number: int) -> str:
    for factor, unit in ((1e9, " billion"), (1e6, " million")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)
