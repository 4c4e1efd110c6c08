"""`chameleon-mm bench planner`: how long planning takes, and how good the plans are.

    speed:       steps of 10^3 to 10^6 operators, at a quarter of what swapping can reach   -> ms, and how it grows
    quality:     a decoder's layers at 2, 4 and 8 times less activation memory, its micro-batches in a pipeline's order too
                 -> step time beside ideal and others

Planning is measured on this machine's processor. What plans take is simulated, on a link with an H200's published rates; no GPU
takes part in any figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from math import inf, log

from rich.console import Console

from chameleon_mm.bench._environment import processor_name
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, add_output_arguments, environment, interleave
from chameleon_mm.bench._planner_traces import (
    HOOKS_PER_1000,
    SAVED_PER_1000,
    LayerShape,
    layer_chain,
    pipeline_chain,
    step_of,
)
from chameleon_mm.bench._report import Bound, Report, median_of
from chameleon_mm.bench._swap_first import swap_first
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.policy import (
    LinkCost,
    generate_plan,
    ideal,
    memory_curve,
    smallest_budget,
    swap_all,
)
from chameleon_mm.trace import Trace

PARTS = ("speed", "quality")
OPERATORS = (1_000, 10_000, 100_000, 1_000_000)
LAYERS, TOKENS, LESS = 32, (4_096, 32_768), (2, 4, 8)
MICRO_BATCHES = 8
"""Of the pipeline, whose stage has that many times fewer layers."""
DEPTHS = (0, 1, 2, 4, 8)
"""Of swapping everything."""

LINK = LinkCost(d2h_gbps=54.9, h2d_gbps=55.4, duplex_gbps=83.0)
"""Published for an H200 on PCIe 5."""

MAX_MS = {100_000: 50.0, 1_000_000: 600.0}
MAX_GROWTH = 1.2
"""Exponent of the time over operators, from ten thousand on: n log n between 10^4 and 10^6 is 1.09."""
MIN_OF_IDEAL, MIN_OVER_SWAP_FIRST = 0.97, 1.10
_GROWS_FROM = 10_000
_PIPELINE = "pipeline, "

_SPEED = (
    Column(key="ms", title="planning ms", formula="processor time of generate_plan"),
    Column(
        key="growth", title="exponent", formula="log of the time over that of the row above / log of the operators over its"
    ),
)
_QUALITY = (
    Column(key="longer", title="longer", formula="step of the plan / step without swapping", simulated=True),
    Column(key="ideal", title="of T*", formula="relaxed bound of the step time / step of the plan", simulated=True),
    Column(key="first", title="swap-first", formula="step of swap_first (the best of depth 0, 1, 2) / step", simulated=True),
    Column(
        key="everything",
        title="swap-all",
        formula="step of swap_all (the best depth within the budget) / step",
        simulated=True,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark's options on `parser`."""
    add_output_arguments(parser)
    parser.add_argument(
        "--parts", metavar="PART,...", default=",".join(PARTS), help=f"which of {', '.join(PARTS)} (default: all of them)"
    )
    parser.add_argument(
        "--operators",
        metavar="N,...",
        default=",".join(map(str, OPERATORS)),
        help="operators of the steps (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="of the decoder (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="samples of each time (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. 1 if a bound is missed that does not depend on the machine, else 0.

    Raises `ValueError` for bad usage, before anything is measured.
    """
    parts = tuple(args.parts.split(","))
    if set(parts) - set(PARTS):
        raise ValueError(f"--parts: expected some of {', '.join(PARTS)}, got {args.parts!r}")
    operators = args.operators.split(",")
    if not all(text.isdecimal() and int(text) >= 100 for text in operators):
        raise ValueError(f"--operators: expected whole numbers of 100 or more, got {args.operators!r}")
    for option, number in (("--layers", args.layers), ("--repeats", args.repeats)):
        if number < 1:
            raise ValueError(f"{option}: expected 1 or more, got {number}")
    device = resolve_device(args.device)
    with console.status("planning ..."):
        report = measure(device, parts, operators=[int(text) for text in operators], layers=args.layers, repeats=args.repeats)
    report.deliver(args, console)
    return int(report.failed)


def measure(
    device: Device,
    parts: Sequence[str] = PARTS,
    *,
    operators: Sequence[int] = OPERATORS,
    layers: int = LAYERS,
    repeats: int = 9,
) -> Report:
    """The tables of `parts`, and the bounds on what they show. `device` names the run and is not used."""
    tables: dict[str, Results] = {}
    bounds: list[Bound] = []
    if "speed" in parts:
        tables["speed"] = speed(device, sorted(operators), repeats=repeats)
        bounds += speed_bounds(tables["speed"])
    if "quality" in parts:
        tables["quality"] = quality(device, layers)
        bounds += quality_bounds(tables["quality"])
    # What is measured is the host, so the figures bear its name; what is simulated is marked in its column.
    header = environment("planner", device) | {"device": processor_name(), "simulated": False}
    for table in tables.values():
        table.header |= {"device": header["device"], "simulated": False}
    return Report(header=header, tables=tables, bounds=bounds)


def speed(device: Device, operators: Sequence[int], *, repeats: int) -> Results:
    """A row for each number of operators: planning at a quarter of what swapping can reach."""
    results = Results("planner speed", device, _SPEED)
    results.notes.append(f"{SAVED_PER_1000} saved storages and {HOOKS_PER_1000} hook calls in each 1000 operators")
    last: tuple[int, Figure] | None = None
    for count in operators:
        trace = step_of(count)
        least = smallest_budget(trace)
        budget = least + (int(memory_curve(trace).max()) - least) // 4

        samples = interleave({"plan": partial(_plan_ms, trace, budget)}, warmup=1, repeats=repeats)["plan"]
        figure = Figure.of(samples, "ms", simulated=False)
        growth: Figure | Waived = Waived("the first row has none above it")
        if last is not None:
            exponent = log(figure.median / last[1].median) / log(count / last[0])
            growth = Figure.of([exponent], "", simulated=False)
        results.add(f"{count:,} operators", {"operators": count}, {"ms": figure, "growth": growth})
        last = count, figure
    return results


def quality(device: Device, layers: int) -> Results:
    """A row for each sequence length and budget: `layers` layers of a 7B decoder, one sequence; and a stage of a pipeline."""
    results = Results("planner quality", device, _QUALITY)
    results.notes.append(f"link: {LINK.d2h_gbps} GB/s out, {LINK.h2d_gbps} GB/s back, {LINK.duplex_gbps} GB/s both at once")
    results.notes.append(f"{layers} layers in the shape of a 7B model's, everything saved, times by arithmetic (LayerShape)")
    results.notes.append(f"pipeline: {MICRO_BATCHES} micro-batches, all forwards first, then their backwards in the same order")
    stage = max(1, layers // MICRO_BATCHES)
    steps = [("", tokens, layer_chain(LayerShape(tokens=tokens), layers)) for tokens in TOKENS]
    steps += [(_PIPELINE, tokens, pipeline_chain(LayerShape(tokens=tokens), MICRO_BATCHES, stage)) for tokens in TOKENS]
    for order, tokens, trace in steps:
        activations = int(memory_curve(trace).max()) - trace.start_bytes
        everything = [swap_all(trace, LINK, depth=depth) for depth in DEPTHS]
        for less in LESS:
            budget = max(smallest_budget(trace), trace.start_bytes + activations // less)
            plan = generate_plan(trace, budget, None, LINK)
            first_us = min(swap_first(trace, budget, LINK, depth=depth).step_us for depth in (0, 1, 2))
            everything_us = min((other.step_us for other in everything if other.peak_bytes <= budget), default=inf)
            figures = {
                "longer": plan.step_us / trace.duration_us,
                "ideal": ideal(trace, budget, LINK).step_us / plan.step_us,
                "first": first_us / plan.step_us,
                "everything": everything_us / plan.step_us,
            }
            cells: dict[str, Cell] = {key: Figure.of([value], "x", simulated=True) for key, value in figures.items()}
            if everything_us == inf:
                cells["everything"] = Waived("swapping everything is not within the budget")
            params = {"order": order, "tokens": tokens, "less": less, "budget_bytes": budget}
            results.add(f"{order}s={tokens}, {less}x less", params, cells)
    return results


def speed_bounds(table: Results) -> list[Bound]:
    """Times at the sizes that are promised, and how they grow from ten thousand operators to the most."""
    bounds = []
    times = {int(row.params["operators"]): median_of(row.cells["ms"]) for row in table.rows}
    for count, limit in MAX_MS.items():
        found = times.get(count, Waived(f"no step of {count:,} operators was asked for"))
        bounds.append(Bound(name=f"planning, {count:,} operators", limit=limit, unit="ms", found=found))
    large = {count: found for count, found in times.items() if count >= _GROWS_FROM and not isinstance(found, Waived)}
    growth: float | Waived = Waived(f"fewer than two steps of {_GROWS_FROM:,} operators or more were asked for")
    if len(large) > 1:
        growth = log(large[max(large)] / large[min(large)]) / log(max(large) / min(large))
    bounds.append(Bound(name="planning, exponent of its growth", limit=MAX_GROWTH, found=growth))
    return bounds


def quality_bounds(table: Results) -> list[Bound]:
    """Each plan beside swapping everything; a chain's beside T*, too, and at 4 times less beside swapping the largest first."""
    bounds = []
    for row in table.rows:
        limits = {"everything": ("over swap-everything", 1.0)}
        if row.params["order"] != _PIPELINE:
            limits["ideal"] = ("of T*", MIN_OF_IDEAL)
        if row.params["order"] != _PIPELINE and row.params["less"] == 4:
            limits["first"] = ("over swap-first", MIN_OVER_SWAP_FIRST)
        for key, (what, limit) in limits.items():
            found = median_of(row.cells[key])
            bounds.append(Bound(name=f"{row.name}: {what}", limit=limit, found=found, at_most=False, unit="x", counted=True))
    return bounds


def _plan_ms(trace: Trace, budget: int) -> float:
    start = time.process_time()
    generate_plan(trace, budget, None, LINK)
    return (time.process_time() - start) * 1e3
