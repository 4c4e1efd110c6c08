"""`chameleon-mm bench profiler`: host time of watching a step, by each way of watching.

    a chain of operators, each of which saves one tensor: no hooks | hooks alone | light profiler, of a known step and of a new
    one | a dispatch mode that does nothing | the call watch, under which steps that recompute run their forward | call notes,
    the same in C++, if built | the detailed recorder
    bounds: light profiler at most 1.2 us per saved tensor (its save and its use) over hooks that do nothing, and 90 % below
            the detailed recorder; for a known step, as nearly all are

    chameleon-mm bench profiler --json profiler.json

Times are the host's and measured, even on a simulated device, whose own accounting is left out; nothing is simulated. The time
of a way excludes its setup before the step and its evaluation after it, except the light profiler's `begin_step`, `follow` and
`end_step`, which every step needs. Hooks alone hand out handles as the light profiler's do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, environment, interleave, undisturbed
from chameleon_mm.bench._report import Bound, Report, median_of
from chameleon_mm.device import native, resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.plan.trace import NEW_STORAGE
from chameleon_mm.record.call_notes import watch_calls
from chameleon_mm.record.calls import CallWatch
from chameleon_mm.record.light_profiler import LightProfiler, StepRecord
from chameleon_mm.record.recorder import Recorder, RecordingHooks

MAX_US_PER_SAVE = 1.2
MIN_SHARE_BELOW = 0.9

NO_HOOKS = "no hooks"
HOOKS = "hooks alone"
LIGHT = "light profiler"
NEW_STEP = "light, new step"
PASS_THROUGH = "pass-through mode"
CALL_WATCH = "call watch"
CALL_NOTES = "call notes"
DETAILED = "detailed recorder"

_WARMUP = 3
_LIMIT_S = 20.0

_COLUMNS = (
    Column(key="save", title="us/save", formula="processor time of the chain's forward and backward / saved tensors"),
    Column(key="over", title="over hooks", formula="the same, less that of hooks alone in the same round"),
)

Step = Callable[[], None]
Watch = Callable[[Step], float]
"""Runs a step and watches it. Returns the host's processor time in us."""


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, print, and write the files asked for. Returns 0: a bound that a busy machine misses is no fault."""
    for name in ("saves", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected 1 or more, got {getattr(args, name)}")
    device = resolve_device(args.device)
    with console.status("measuring ..."):
        report = measure(device, saves=args.saves, repeats=args.repeats)
    report.deliver(args, console)
    return 0


def measure(device: Device, *, saves: int, repeats: int) -> Report:
    """Measure the table, and the bounds on it. Ways run in turn, so that drift affects all alike."""
    step = chain(device, saves)
    ways = {name: partial(way, step) for name, way in peers(device).items()}
    taken = interleave(ways, warmup=_WARMUP, repeats=repeats, limit_s=_LIMIT_S)
    results = Results("profiler", device, _COLUMNS)
    results.notes += [
        f"{LIGHT}: of a step that is known, compared with it hook by hook; {NEW_STEP}: of one that is not, kept and hashed",
        "whose storage is saved: told by the executor, which knows; not in the light profiler's figure",
    ]
    rows = {name: cells(name, taken, saves) for name in ways}
    for name, row in rows.items():
        results.add(name, {"peer": name}, row)
    return Report(header=environment("profiler", device), tables={"host time": results}, bounds=bounds(rows))


def cells(name: str, taken: Mapping[str, list[float]], saves: int) -> dict[str, Cell]:
    """Cells of a way's row, from its samples and those of hooks alone, round by round."""
    over = [(us - hooks) / saves for us, hooks in zip(taken[name], taken[HOOKS], strict=True)]
    compared = Waived("it is what the others are compared with")
    return {
        "save": Figure.of([us / saves for us in taken[name]], "us", simulated=False),
        "over": compared if name == HOOKS else Figure.of(over, "us", simulated=False),
    }


def bounds(rows: Mapping[str, Mapping[str, Cell]]) -> list[Bound]:
    """Bounds on the light profiler's time, by itself and relative to the detailed recorder."""
    light, detailed = (median_of(rows[name]["over"]) for name in (LIGHT, DETAILED))
    below = light if isinstance(light, Waived) else detailed if isinstance(detailed, Waived) else 1 - light / detailed
    return [
        Bound(name=f"{LIGHT}, per saved tensor over hooks alone", limit=MAX_US_PER_SAVE, unit="us", found=light),
        Bound(name=f"{LIGHT}, share below the detailed recorder", limit=MIN_SHARE_BELOW, found=below, at_most=False),
    ]


def chain(device: Device, saves: int) -> Step:
    """Chain of `saves` operators, each of which saves its input, in a storage of its own."""
    x = torch.zeros(2, 3, 4, device=device.torch_device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(saves):
            y = y.sin()
        y.sum().backward()
        x.grad = None

    return step


def peers(device: Device) -> Mapping[str, Watch]:
    """All ways by name."""
    timed = partial(_timed_us, device)
    return {
        NO_HOOKS: timed,
        HOOKS: partial(_hooks, timed),
        LIGHT: partial(_light, timed, {}),
        NEW_STEP: partial(_light, timed, None),
        PASS_THROUGH: partial(_under, PassThrough, timed),
        CALL_WATCH: partial(_under, lambda: CallWatch(device, lambda value: None), timed),
        **({} if native.load("notes") is None else {CALL_NOTES: partial(_noted, device, timed)}),
        DETAILED: partial(_detailed, device, timed),
    }


def _noted(device: Device, timed: Watch, step: Step) -> float:
    with watch_calls(device, lambda value: None) as notes:
        us = timed(step)
    notes.end()
    return us


class PassThrough(TorchDispatchMode):
    """Sees every operator and does nothing with it."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def keep(t: Tensor) -> Tensor:
    """Hook that does nothing, for both save and use."""
    return t


def _timed_us(device: Device, step: Step) -> float:
    """Processor time of all threads. It excludes other users of the machine, and the host's waits."""
    device.synchronize()
    with undisturbed():
        start = time.process_time_ns()
        step()
        return (time.process_time_ns() - start) / 1e3


def _hooks(timed: Watch, step: Step) -> float:
    with saved_tensors_hooks(lambda t: (t, 0), lambda saved: saved[0]):
        return timed(step)


def _light(timed: Watch, known: dict[Step, StepRecord] | None, step: Step) -> float:
    """Call the light profiler as the executor does, which knows the storage and whether it was saved before, at no cost here.

    `known`: step -> its last record, which this step follows. None: every step is a new one.
    """
    light = LightProfiler()
    followed = None if known is None else known.get(step)
    records: list[StepRecord] = []

    def on_save(t: Tensor) -> tuple[Tensor, int]:
        hook = light.num_hooks
        light.saved(t, NEW_STORAGE)
        return t, hook

    def on_use(saved: tuple[Tensor, int]) -> Tensor:
        t, hook = saved
        light.used(hook)
        return t

    def watched() -> None:
        light.begin_step()
        if followed is not None:
            light.follow(followed)
        step()
        records.append(light.end_step())

    with saved_tensors_hooks(on_save, on_use):
        us = timed(watched)
    if known is not None:
        known[step] = records[-1]
    return us


def _under(mode: Callable[[], TorchDispatchMode], timed: Watch, step: Step) -> float:
    with saved_tensors_hooks(keep, keep), mode():
        return timed(step)


def _detailed(device: Device, timed: Watch, step: Step) -> float:
    recorder = Recorder(device)
    with recorder, RecordingHooks(recorder):
        us = timed(step)
    recorder.finish()
    return us
