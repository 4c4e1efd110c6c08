"""A log of every call of an allocator, a line each in a file of JSON lines, which `replay_log` does again on any other.

    with RecordingAllocator(pool, "calls.jsonl") as recorded:
        train(recorded)
    replay_log("calls.jsonl", StatisticsAllocator(PinnedPool("4GiB", "sim"))) -> LogReplay(allocations=..., peak_bytes=...)

    {"log": "chameleon_mm.allocations.v1"}
    {"time_us": 12.5, "op": "allocate", "serial": 1, "nbytes": 4096, "stream": "d2h", "thread": 0}
    {"time_us": 90.1, "op": "release", "serial": 1, "nbytes": 4096, "stream": null, "thread": 1}
    {"time_us": 95.0, "op": "refuse", "serial": null, "nbytes": 1099511627776, "stream": null, "thread": 0}

`time_us` counts from the start of the recording, `thread` is a number given at its first call, `serial` tells blocks apart.
A replay has one thread and the order of the file, without streams: the host waits for nothing, and nothing is copied. Blocks
that the log never releases are released at its end.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chameleon_mm.device.protocols import Event, Stream
from chameleon_mm.errors import PoolStateError
from chameleon_mm.pinned.allocator import Allocator, AllocatorWrapper, block_nbytes
from chameleon_mm.pinned.block import PinnedBlock, Ticket

LOG_FORMAT = "chameleon_mm.allocations.v1"


class _Call(NamedTuple):
    time_ns: int
    op: str
    serial: int | None
    nbytes: int
    stream: str | None
    thread: int


class RecordingAllocator(AllocatorWrapper):
    """`inner`, with every call written to the file at `path`, which is made anew. Thread-safe where `inner` is.

    A release is noted when it happens and written with the next call, or by `close`: it may happen in any line of a program.
    After `close` nothing is recorded, and nothing can be allocated. A forked child records nothing. Raises `OSError` where the
    file cannot be written.
    """

    def __init__(self, inner: Allocator, path: str | Path) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._threads: dict[int, int] = {}
        self._pid = os.getpid()
        self._start_ns = time.perf_counter_ns()
        # Unbuffered: a child forked in between would write the buffer a second time.
        self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 - open as long as the recording is, which is a context
        self._file.write(_line({"log": LOG_FORMAT}))

    def allocate(self, nbytes: int | str, stream: Stream | None = None) -> PinnedBlock:
        """Allocate as `Allocator.allocate` does. Raises `PoolStateError` once closed."""
        if self._file.closed:
            raise PoolStateError("allocate: expected an open recording, got one that was closed; use its inner allocator")
        nbytes = block_nbytes(nbytes)
        name = None if stream is None else stream.name
        try:
            inner = self.inner.allocate(nbytes, stream)
        except MemoryError:
            self._note("refuse", None, nbytes, name)
            self._flush()
            raise
        serial = next(self._serials)
        self._note("allocate", serial, nbytes, name)  # before it can be released
        self._flush()
        self._lent[serial] = inner
        return inner.lend(self, serial)

    def note_released(self, ticket: Ticket, events: tuple[Event, ...]) -> None:
        inner = self._take_inner(ticket, events)
        self._note("release", ticket[0], inner.nbytes, None)
        inner.release()

    def close(self) -> None:
        """Write what is left to write, and end the recording. A second call does nothing."""
        try:
            self._flush()
        finally:
            with self._lock:
                self._file.close()

    def _note(self, op: str, serial: int | None, nbytes: int, stream: str | None) -> None:
        # An append is atomic; the thread's own number, not its name, for which `threading` may have to take a lock.
        self._calls.append(_Call(time.perf_counter_ns(), op, serial, nbytes, stream, threading.get_ident()))

    def _flush(self) -> None:
        with self._lock:
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
            if not calls or self._file.closed or os.getpid() != self._pid:
                return
            lines = []
            for call in calls:
                thread = self._threads.setdefault(call.thread, len(self._threads))
                time_us = (call.time_ns - self._start_ns) / 1e3
                lines.append(_line(call._asdict() | {"thread": thread}, time_us))
            self._file.write(b"".join(lines))


def _line(fields: dict[str, object], time_us: float | None = None) -> bytes:
    if time_us is not None:
        fields = {"time_us": time_us} | {name: value for name, value in fields.items() if name != "time_ns"}
    return json.dumps(fields).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReplay:
    """Counts of a replay."""

    allocations: int
    releases: int
    """Releases by the log, not counting those at its end."""
    refusals: int
    """Requests that the logged allocator refused. They are not made again."""
    peak_bytes: int
    """The most bytes in live blocks, as asked for."""


def replay_log(path: str | Path, allocator: Allocator) -> LogReplay:
    """Replay the log at `path`. Raises `ValueError`, naming the line, for what is no such log, and what `allocate` raises."""
    live: dict[int, PinnedBlock] = {}
    counts = {"allocate": 0, "release": 0, "refuse": 0}
    number = live_bytes = peak_bytes = 0
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            call = _parsed(line, f"{path}, line {number}")
            if number == 1:
                if call != {"log": LOG_FORMAT}:
                    raise ValueError(f"{path}: expected a log of {LOG_FORMAT!r}, got {line.strip()!r} in the first line")
                continue
            try:
                op, serial = call["op"], call["serial"]
                if op == "allocate":
                    block = live[serial] = allocator.allocate(call["nbytes"])
                    live_bytes += block.nbytes
                    peak_bytes = max(peak_bytes, live_bytes)
                elif op == "release":
                    block = live.pop(serial)
                    live_bytes -= block.nbytes
                    block.release()
                counts[op] += 1
            except KeyError as missing:
                raise ValueError(
                    f"{path}, line {number}: expected a call of the log, on a live block, got {line.strip()!r} ({missing} is "
                    f"unknown); replay a log from its first line"
                ) from None
    if number == 0:
        raise ValueError(f"{path}: expected a log of {LOG_FORMAT!r}, got a file that is empty; record one first")
    for block in live.values():
        block.release()
    return LogReplay(
        allocations=counts["allocate"], releases=counts["release"], refusals=counts["refuse"], peak_bytes=peak_bytes
    )


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        call = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: expected a JSON object, got {line.strip()!r} ({error}); was the recording cut short?"
        ) from error
    if not isinstance(call, dict):
        raise ValueError(f"{where}: expected a JSON object, got {line.strip()!r}; name a file that RecordingAllocator wrote")
    return call
