"""`chameleon-mm bench profiler`: what it costs the host to watch a step, by every way there is.

    per saved tensor:   a chain of operators, each of which saves one tensor
    per layer:          Llama-shaped layers of sizes so small that the host's work is all there is
    bounds:             light profiler at most 1.2 us per saved tensor (its save and its use) over hooks that do nothing, and
                        90 % below the detailed recorder per layer. Of a cached step, as nearly all are

    chameleon-mm bench profiler --json profiler.json

Times are the host's, measured, also beside a simulated device, whose own accounting is left out; nothing is simulated. Rounds
are many and short: the median of them is that of the quiet moments of a machine that others use too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial

from rich.console import Console

from chameleon_mm.bench._llama import Shape
from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, add_output_arguments, environment, interleave
from chameleon_mm.bench._profiler_peers import (
    DETAILED,
    HOOKS,
    LIGHT,
    NEW_STEP,
    NO_HOOKS,
    PASS_THROUGH,
    TORCH,
    Facts,
    Step,
    Watch,
    chain,
    facts_of,
    layers,
    peers,
)
from chameleon_mm.bench._report import Bound, Found, Report, median_of
from chameleon_mm.bench._stand_in import NO_CUPTI
from chameleon_mm.device import resolve_device
from chameleon_mm.device.protocols import Device

MAX_US_PER_SAVE = 1.2
MIN_SHARE_BELOW = 0.9

_ROWS = (NO_HOOKS, HOOKS, LIGHT, NEW_STEP, PASS_THROUGH, DETAILED, TORCH)
_WARMUP = 3
_LIMIT_S = 20.0

_COLUMNS = (
    Column(key="save", title="us/save", formula="processor time of the chain's forward and backward / saved tensors"),
    Column(key="save_over", title="over hooks", formula="the same, less that of hooks alone in the same round"),
    Column(key="layer", title="us/layer", formula="processor time of the stack's forward and backward / layers"),
    Column(key="layer_over", title="over hooks", formula="the same, less that of hooks alone in the same round"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Register the options of `chameleon-mm bench profiler`."""
    add_output_arguments(parser)
    parser.add_argument("--saves", type=int, default=1000, metavar="N", help="of the chain (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="of the stack (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=51, metavar="N", help="samples of each (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, write what was asked for. Returns 0: a bound that a busy machine misses is no fault."""
    for name in ("saves", "layers", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure(device, saves=args.saves, num_layers=args.layers, repeats=args.repeats)
    report.deliver(args, console)
    return int(report.failed)


def measure(device: Device, *, saves: int, num_layers: int, repeats: int) -> Report:
    """The table and the bounds on it. Takes the ways in turn, so that drift falls on all alike."""
    shape = Shape(layers=num_layers, width=64, heads=4, ffn=128, seq=16, batch=1, dtype="bfloat16")
    ways = peers(device)
    stack = layers(device, shape)
    per_save = _samples(ways, chain(device, saves), saves, repeats)
    per_layer = _samples(ways, stack, num_layers, repeats)
    results = Results("profiler", device, _COLUMNS)
    results.notes += _notes(facts_of(stack), num_layers)
    cells: dict[str, dict[str, Cell]] = {name: _cells(name, per_save, per_layer) for name in _ROWS}
    for name, row in cells.items():
        results.add(name, {"peer": name}, row)
    return Report(header=environment("profiler", device), tables={"host time": results}, bounds=_bounds(cells))


def _samples(ways: Mapping[str, Watch], step: Step, per: int, repeats: int) -> dict[str, list[float]]:
    taken = interleave(
        {name: partial(way, step) for name, way in ways.items()}, warmup=_WARMUP, repeats=repeats, limit_s=_LIMIT_S
    )
    return {name: [us / per for us in samples] for name, samples in taken.items()}


def _cells(name: str, per_save: Mapping[str, list[float]], per_layer: Mapping[str, list[float]]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for key, samples in (("save", per_save), ("layer", per_layer)):
        if name not in samples:
            why_not = NO_CUPTI if name == TORCH else "this installation has no detailed recorder"
            cells[key] = cells[f"{key}_over"] = Waived(why_not)
            continue
        cells[key] = Figure.of(samples[name], "us", simulated=False)
        over = [us - hooks for us, hooks in zip(samples[name], samples[HOOKS], strict=True)]
        cells[f"{key}_over"] = (
            Waived("it is what the others are compared with") if name == HOOKS else Figure.of(over, "us", simulated=False)
        )
    return cells


def _bounds(cells: Mapping[str, Mapping[str, Cell]]) -> list[Bound]:
    light, detailed = (median_of(cells[name]["layer_over"]) for name in (LIGHT, DETAILED))
    return [
        Bound(
            name="light profiler, per saved tensor over hooks alone",
            limit=MAX_US_PER_SAVE,
            unit="us",
            found=median_of(cells[LIGHT]["save_over"]),
        ),
        Bound(
            name="light profiler, share below the detailed recorder, per layer over hooks alone",
            limit=MIN_SHARE_BELOW,
            found=_share_below(light, detailed),
            at_most=False,
        ),
    ]


def _share_below(cost: Found, other: Found) -> Found:
    if isinstance(cost, Waived):
        return cost
    return other if isinstance(other, Waived) else 1 - cost / other


def _notes(stack: Facts, num_layers: int) -> list[str]:
    def per(count: int) -> str:
        return f"{count / num_layers:.0f}"

    return [
        f"a layer: {per(stack.saves)} saves into {per(stack.storages)} storages, {per(stack.operators)} operators both ways",
        f"{LIGHT}: of a step that is known, compared with it hook by hook; {NEW_STEP}: of one that is not, kept and hashed",
        "the host's processor time, measured on this machine; what a way costs before and after the step is not in it",
        "whose storage is saved: told by the executor, which knows; not in the light profiler's figure",
    ]
