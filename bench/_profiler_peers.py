"""Ways to watch a step, from none to a full record, and the two steps that they watch.

    peers(device)["light profiler"](step) -> the host's processor time for one forward and backward, us
    chain(device, saves), layers(device, shape)    # steps that cost the device nothing: what is left is the host's work

What a way needs before and after the step (to be made, to be read) is not in its time, but for the light profiler's own
`begin_step`, `follow` and `end_step`: there is no step without them. Hooks alone hand out handles as the light profiler's do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_mm.bench._llama import DTYPES, Shape, Stack
from chameleon_mm.bench._measure import undisturbed
from chameleon_mm.bench._stand_in import is_stand_in
from chameleon_mm.device.protocols import Device
from chameleon_mm.profiler.light import NEW_STORAGE, LightProfiler
from chameleon_mm.profiler.step_record import StepRecord

Step = Callable[[], None]
Watch = Callable[[Step], float]

NO_HOOKS = "no hooks"
HOOKS = "hooks alone"
LIGHT = "light profiler"
NEW_STEP = "light, new step"
PASS_THROUGH = "pass-through mode"
DETAILED = "detailed recorder"
TORCH = "torch.profiler"

_RECORDER = "chameleon_mm.profiler.recorder"


class PassThrough(TorchDispatchMode):
    """Sees every operator and does nothing with it, but count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no argument of it
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Facts(NamedTuple):
    """What there is to watch in a step."""

    saves: int
    storages: int
    """That these lie in."""
    operators: int


def peers(device: Device) -> Mapping[str, Watch]:
    """Every way by its name, but for the detailed recorder and torch's profiler where there is none."""
    timed = partial(_timed_us, device)
    ways: dict[str, Watch] = {NO_HOOKS: timed, HOOKS: partial(_hooks, timed)}
    ways[LIGHT], ways[NEW_STEP] = partial(_light, timed, {}), partial(_light, timed, None)
    ways[PASS_THROUGH] = partial(_pass_through, timed)
    if find_spec(_RECORDER) is not None:
        ways[DETAILED] = partial(_detailed, device, timed)
    if not is_stand_in(device.name):  # it has no CUPTI
        ways[TORCH] = partial(_torch_profiler, device, timed)
    return ways


# --- what is watched


def chain(device: Device, saves: int) -> Step:
    """An operator after the other, each of which saves its input: `saves` in all, into as many storages."""
    x = torch.zeros(2, 3, 4, device=device.torch_device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(saves):
            y = y.sin()
        y.sum().backward()
        x.grad = None

    return step


def layers(device: Device, shape: Shape) -> Step:
    """A stack of Llama-shaped layers."""
    stack = Stack(shape, device=device.torch_device)
    x = torch.zeros(shape.batch, shape.seq, shape.width, device=device.torch_device, dtype=DTYPES[shape.dtype])
    x.requires_grad_()  # so that the first layer saves what the others do

    def step() -> None:
        stack(x).sum().backward()
        stack.zero_grad(set_to_none=True)
        x.grad = None

    return step


def facts_of(step: Step) -> Facts:
    """Counted in one run of it."""
    saved: list[Tensor] = []

    def on_save(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with PassThrough() as mode, saved_tensors_hooks(on_save, keep):
        step()
    return Facts(len(saved), len({t.untyped_storage()._cdata for t in saved}), mode.count)


# --- the ways


def _timed_us(device: Device, step: Step) -> float:
    """Processor time, all threads': what other tenants of the machine take, and what the host waits for, is not in it."""
    device.synchronize()
    with undisturbed():
        start = time.process_time_ns()
        step()
        return (time.process_time_ns() - start) / 1e3


def keep(t: Tensor) -> Tensor:
    """The hook that does nothing, of a save and of a use."""
    return t


def _hooks(timed: Watch, step: Step) -> float:
    with saved_tensors_hooks(_wrap, _unwrap):
        return timed(step)


def _wrap(t: Tensor) -> tuple[Tensor, int]:
    return t, 0


def _unwrap(saved: tuple[Tensor, int]) -> Tensor:
    t, _ = saved
    return t


def _light(timed: Watch, known: dict[Step, StepRecord] | None, step: Step) -> float:
    """As the executor calls it: which storage it is and whether it was saved before is known there, and costs nothing here.

    `known`: by step, what it was the last time, to be followed this time. None: every step is a new one.
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


def _pass_through(timed: Watch, step: Step) -> float:
    with saved_tensors_hooks(keep, keep), PassThrough():
        return timed(step)


def _detailed(device: Device, timed: Watch, step: Step) -> float:
    from chameleon_mm.profiler.record_hooks import RecordingHooks
    from chameleon_mm.profiler.recorder import Recorder

    recorder = Recorder(device)
    with recorder, RecordingHooks(recorder):
        us = timed(step)
    recorder.finish()
    return us


def _torch_profiler(device: Device, timed: Watch, step: Step) -> float:
    activities = [ProfilerActivity.CPU]
    if not device.simulated:
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
    with saved_tensors_hooks(keep, keep):
        with _nothing_on_stderr():
            profiler.start()
        try:
            return timed(step)
        finally:
            with _nothing_on_stderr():
                profiler.stop()


@contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    """Drop what C++ writes there: torch's profiler says at each start and stop that it does, in hundreds of lines."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
