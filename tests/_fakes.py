"""Doubles of events, streams, devices, clocks, files and calls that several tests use instead of the real ones.

ManualEvent(), RecordingStream(), BrokenStream()         an event that the test completes; streams that only take waits
Unwatched(), UnsimulatedDevice(), PlayedStandIn(), ...   simulated devices, each different in the one thing that it is named for
ManualClock(), file_tree(root, files)                    the module `time`; what a kernel says below /proc and /sys
Faults(error), refusing(error, ...)                      a call that fails once, and one that always fails
scripted_part(theme, record, code)                       a part of the GPU suite that writes what it is told to
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch import Tensor

from chameleon_mm.bench.gpu_suite import Part
from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.swap.calling_thread import ComputeStreams

# --- events and streams


class ManualEvent:
    """An event that is complete when the test, or a wait of the host, says so."""

    def __init__(self) -> None:
        self.complete = False
        self.syncs = 0
        """Number of host waits for the event."""

    def query(self) -> bool:
        return self.complete

    def synchronize(self) -> None:
        self.complete = True
        self.syncs += 1

    def elapsed_us(self, since: Event) -> float:
        raise ValueError("elapsed_us: not a timed event")


class RecordingStream:
    """Stream that records the events it waits for."""

    name = "recorder"

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def wait(self, event: Event) -> None:
        self.waited.append(event)


class BrokenStream(RecordingStream):
    """Stream of a destroyed device: it cannot wait."""

    def wait(self, event: Event) -> None:
        raise RuntimeError("the device is gone")


def leave_out_meeting(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the compute streams meet each time but the `number`-th, counted from 1."""
    join_all, calls = ComputeStreams.join_all, itertools.count(1)

    def meets_but_once(self: ComputeStreams, home: Stream) -> None:
        if next(calls) != number:
            join_all(self, home)

    monkeypatch.setattr(ComputeStreams, "join_all", meets_but_once)


# --- devices


class Unwatched(SimDevice):
    """Simulated device that installs nothing except hooks on a thread, as a GPU does. Its copies are still late and its memory
    still poisoned."""

    @contextmanager
    def compute(self) -> Iterator[SimDevice]:
        yield self


class CountingDevice(SimDevice):
    """A simulated GPU that keeps count of its pinned chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[int, int] = {}
        """Address and bytes of the buffers that were not given back."""
        self.num_pinned = 0
        """Number of buffers allocated so far."""

    def alloc_pinned(self, nbytes: int) -> Tensor:
        memory = super().alloc_pinned(nbytes)
        self.chunks[memory.data_ptr()] = nbytes
        self.num_pinned += 1
        return memory

    def free_pinned(self, memory: Tensor) -> None:
        assert self.chunks.pop(memory.data_ptr()) == memory.numel()
        super().free_pinned(memory)


class UnsimulatedDevice(SimDevice):
    """A simulated device that says it is a real one, under the driver's name `driver` where one is given."""

    def __init__(self, driver: str | None = None) -> None:
        super().__init__()
        self.simulated, self.driver = False, driver or SimDevice.driver


class PlayedStandIn(UnsimulatedDevice):
    """A device of the stand-in's name that says it is not simulated, as the stand-in says."""

    @property
    def name(self) -> str:
        return "CUDA stand-in, no GPU"


# --- the machine


class ManualClock:
    """Replacement of the module `time`, whose time passes under the test's control."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def file_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Root directory that holds `files`, text by path, instead of the machine's own. Returns `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


# --- calls that fail


class Faults:
    """Counter of calls of one kind, the `fail_at`-th of which raises `error`, once."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.count = 0
        self.fail_at: int | None = None
        self.counting = True

    def begin(self, fail_at: int | None) -> None:
        """Count from here on, from 0. `fail_at` None: no call fails."""
        self.count, self.fail_at, self.counting = 0, fail_at, True

    @property
    def over(self) -> bool:
        """True if no call is left that will fail."""
        return self.fail_at is None

    def hit(self, text: str = "injected") -> None:
        """Note a call, unless `counting` is off. Raises `error(text)` if it is the one to fail."""
        self.count += self.counting
        if self.counting and self.count == self.fail_at:
            self.fail_at = None
            raise self.error(text)


def refusing(error: type[BaseException], *arguments: object) -> Callable[..., NoReturn]:
    """Replacement of any function, which raises a new `error(*arguments)` at each call."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise error(*arguments)

    return refuse


# --- the GPU suite


def scripted_part(
    theme: str,
    record: Mapping[str, Any] | None,
    code: str = "",
    *,
    arguments: Sequence[str] = (),
    cap_s: float = 60,
    **more: Any,
) -> Part:
    """A part of the GPU suite that writes `record` (if any) to its file, `out`, and then runs `code`; `sys.argv` is the name of
    that file, and `arguments`."""
    write = f"out.write_text({json.dumps(record)!r}); " if record is not None else ""
    text = f"import os, pathlib, sys, time; out = pathlib.Path(sys.argv[1]); {write}{code}"
    command = [sys.executable, "-c", text.replace("{", "{{").replace("}", "}}"), "{out}", *arguments]
    return Part(theme=theme, command=command, cap_s=cap_s, least_s=min(1.0, cap_s), **more)
