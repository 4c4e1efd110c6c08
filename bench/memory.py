"""`chameleon-mm bench memory`: a training step's peak on the simulator and by torch's caching allocator, side by side.

    for model in (MLP, GPT, with dropout, convolutions, recurrence): for budget in (none, 1/2, 1/4 or the smallest there is):
        simulated peak | allocated peak | difference     of what the step adds to what was there before it
        reserved | reserved / allocated                  fragmentation, with swapping and without

    chameleon-mm bench memory --device cuda --json memory.json

Without CUDA only the simulated side is there. What can make the two differ is written below the table, by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from rich.console import Console

from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, add_output_arguments
from chameleon_mm.bench._memory_models import MODELS, Job
from chameleon_mm.bench._memory_steps import (
    Seen,
    bounds,
    foreign_names,
    inner_by_name,
    rounding_bytes,
    swapped,
    unswapped,
)
from chameleon_mm.device import SimDevice, resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.units import MIB

SHARES = {"1/2": 0.5, "1/4": 0.25}

_NO_ALLOCATOR = Waived("torch's caching allocator runs on CUDA alone; none took part in this run")
_NOT_PLANNED = Waived("no plan was followed within this budget")

COLUMNS = (
    Column(key="budget", title="budget MiB", formula="what the step may add / 2**20", on_stand_in=True),
    Column(key="simulated", title="peak MiB", formula="what it adds at its peak on SimDevice / 2**20", simulated=True),
    Column(key="allocated", title="peak MiB", formula="the same by torch.cuda.max_memory_allocated", on_stand_in=True),
    Column(key="difference", title="difference B", formula="the second less the first, in bytes", on_stand_in=True),
    Column(key="reserved", title="reserved MiB", formula="max_memory_reserved, from an empty cache", on_stand_in=True),
    Column(key="ratio", title="reserved / peak", formula="that / torch.cuda.max_memory_allocated", on_stand_in=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the options of `chameleon-mm bench memory`."""
    add_output_arguments(parser)
    names = ";".join(MODELS)
    parser.add_argument("--models", metavar="NAME;...", default=names, help=f"which of {names} (default: all of them)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 1 if a peak passed its budget, or a difference what explains it."""
    names = args.models.split(";")
    if unknown := [name for name in names if name not in MODELS]:
        raise ValueError(f"--models: expected some of {';'.join(MODELS)}, got {';'.join(unknown)!r}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        results, problems = measure(device, names)
    results.notes += problems
    results.deliver(args, console)
    return int(bool(problems))


def measure(device: Device, names: Sequence[str]) -> tuple[Results, list[str]]:
    """The table of models on a simulator and, if it is CUDA, on `device`; and what is not as it has to be."""
    results = Results("memory", device, COLUMNS)
    results.notes.append("reserved 2 MiB at a time for blocks of up to 1 MiB, 20 MiB at a time for those below 10 MiB")
    problems: list[str] = []
    for name in names:
        _model(results, problems, name, MODELS[name], None if device.simulated else device)
    return results, problems


def _model(results: Results, problems: list[str], name: str, make: Callable[[], Job], real: Device | None) -> None:
    simulated = unswapped(SimDevice(), make)
    allocated = None if real is None else unswapped(real, make)
    _add(results, name, "none", simulated, allocated)
    results.notes.append(about(name, simulated, allocated))
    if allocated is not None and (problem := unexplained(name, simulated, allocated)):
        problems.append(problem)
    least = max(seen.least_above_bytes for seen in (simulated, allocated) if seen is not None)
    for text, share in SHARES.items():
        above = max(least, int(share * simulated.above_bytes))
        pair = swapped(SimDevice(), make, above), None if real is None else swapped(real, make, above)
        _add(results, name, text if above > least else "least", *pair)
        problems += [f"{name}, {text}: {problem}" for seen in pair if seen is not None and (problem := passed(seen))]
        if above == least:
            break


def _add(results: Results, model: str, budget: str, simulated: Seen, allocated: Seen | None) -> None:
    bytes_of = {"budget_bytes": simulated.budget_bytes, "start_bytes": simulated.start_bytes}
    cells: dict[str, Cell] = {
        "budget": Waived("no budget")
        if simulated.budget_bytes is None
        else _mib(simulated.budget_bytes - simulated.start_bytes),
        "simulated": _planned(simulated) or _mib(simulated.above_bytes, simulated=True),
        **dict.fromkeys(("allocated", "difference", "reserved", "ratio"), _NO_ALLOCATOR),
    }
    if allocated is not None and allocated.reserved_bytes is not None:
        cells["allocated"] = _planned(allocated) or _mib(allocated.above_bytes)
        difference = Figure.of([allocated.above_bytes - simulated.above_bytes], "B", simulated=False)
        cells["difference"] = _planned(simulated) or _planned(allocated) or difference
        cells["reserved"] = _mib(allocated.reserved_bytes)
        cells["ratio"] = Figure.of([allocated.reserved_bytes / allocated.peak_bytes], "1", simulated=False)
    results.add(f"{model}, {budget}", {"model": model, "budget": budget, **bytes_of}, cells)


def about(name: str, simulated: Seen, allocated: Seen | None) -> str:
    """What makes up the peak beside the tensors themselves, and what may make the two differ."""
    assert simulated.trace is not None
    parts = [f"rounding to 512 bytes adds {rounding_bytes(simulated.trace)} to either peak"]
    inner = inner_by_name(simulated.trace)
    if allocated is None:
        parts.append(f"held inside operators, simulated: {_named(inner)}")
        return f"{name}: {'; '.join(parts)}"
    assert allocated.trace is not None
    parts.append(f"held inside operators: {_named(inner_by_name(allocated.trace))}, simulated: {_named(inner)}")
    for where, here, there in (("CUDA", allocated.trace, simulated.trace), ("the simulator", simulated.trace, allocated.trace)):
        if names := foreign_names(here, there):
            parts.append(f"on {where} alone: {', '.join(names)}")
    before = allocated.training_bytes - simulated.training_bytes
    parts.append(f"before the step: {before:+d} bytes (AdamW's step counts lie on the host, but in the simulator's memory)")
    low, high = bounds(simulated.trace, allocated.trace)
    parts.append(f"so the difference may be {low} to {high:+d}")
    return f"{name}: {'; '.join(parts)}"


def unexplained(name: str, simulated: Seen, allocated: Seen) -> str:
    """Whether the peaks without swapping differ by more than operators' own memory and other operators, and by how much."""
    assert simulated.trace is not None
    assert allocated.trace is not None
    low, high = bounds(simulated.trace, allocated.trace)
    difference = allocated.above_bytes - simulated.above_bytes
    return "" if low <= difference <= high else f"{name}: NOT explained: {difference:+d} bytes, expected {low} to {high:+d}"


def passed(seen: Seen) -> str:
    """Whether a peak passed its budget, and by how much."""
    assert seen.budget_bytes is not None
    return "" if seen.peak_bytes <= seen.budget_bytes else f"PASSED its budget by {seen.peak_bytes - seen.budget_bytes} bytes"


def _planned(seen: Seen) -> Waived | None:
    return _NOT_PLANNED if seen.budget_bytes is not None and seen.planned_peak_bytes is None else None


def _mib(nbytes: int, *, simulated: bool = False) -> Figure:
    return Figure.of([nbytes / MIB], "MiB", simulated=simulated)


def _named(inner: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes}" for name, nbytes in inner.items()) or "nothing"
