"""A log of every call of an allocator, a line each in a file of JSON lines; `replay_log` does the same calls again.

    with RecordingAllocator(pool, "calls.jsonl") as recorded:
        train(recorded)
    replay_log("calls.jsonl", PinnedPool("4GiB", "sim"))

    {"log": "chameleon_mm.allocations.v1"}
    {"time_us": 12.5, "op": "allocate", "serial": 1, "nbytes": 4096, "stream": "d2h", "thread": 0}
    {"time_us": 90.1, "op": "release", "serial": 1, "nbytes": 4096, "stream": null, "thread": 1}
    {"time_us": 95.0, "op": "refuse", "serial": null, "nbytes": 1099511627776, "stream": null, "thread": 0}

`time_us` counts from the start of the recording, `thread` is a number given at its first call, `serial` tells blocks apart.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

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
            inner = self._inner.allocate(nbytes, stream)
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
