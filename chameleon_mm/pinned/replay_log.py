"""Replays on any allocator what `RecordingAllocator` logged.

    replay_log("calls.jsonl", StatisticsAllocator(PinnedPool("4GiB", "sim"))) -> LogReplay(allocations=..., peak_bytes=...)

One thread, in the order of the file, without streams: the host waits for nothing, and nothing is copied. Blocks that the log
never releases are released at its end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chameleon_mm.pinned.allocator import Allocator
from chameleon_mm.pinned.block import PinnedBlock
from chameleon_mm.pinned.recording import LOG_FORMAT


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
