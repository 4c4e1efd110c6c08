"""Recorded sequences of allocations and releases: how they are written, read, and played to any allocator.

    trace = load_trace("moe")                    # bench/traces/moe.jsonl.gz, or read_trace(path)
    trace.requests()                             # -> (nbytes, first_use, last_use), what plan_offsets takes
    play(trace, allocator, at_peak=...)          # every allocation and release, in order

A file is JSON lines, gzipped. The first is an object: `schema`, `name`, `about` (which model, at which sizes), `steps` and the
`versions` that recorded it. Each further line is an array: `["step"]`, `["+", block, nbytes]` or `["-", block]`; blocks are
numbered from 0 in the order of their allocation, and each is released once.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

SCHEMA = "chameleon_mm.trace.pinned/1"
FOLDER = Path(__file__).resolve().parents[1] / "traces"

STEP = -1
"""An entry of `Trace.entries` that stands for the start of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line: a block allocated (`nbytes` > 0) or released (`nbytes` 0), or the start of a step (`block` is `STEP`)."""

    block: int
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)  # no slots: what is worked out from the entries is kept
class Trace:
    """A recorded sequence. Raises `ValueError` for one in which a block is released twice, never, or before it is there."""

    name: str
    about: str
    entries: tuple[Entry, ...]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        live: set[int] = set()
        born = 0
        for place, entry in enumerate(self.entries):
            if entry.block == STEP:
                continue
            if entry.nbytes:
                if entry.block != born:
                    raise ValueError(f"trace {self.name}, entry {place}: expected block {born} next, got {entry.block}")
                live.add(entry.block)
                born += 1
            elif entry.block not in live:
                raise ValueError(f"trace {self.name}, entry {place}: expected a live block, got a release of {entry.block}")
            else:
                live.remove(entry.block)
        if live:
            raise ValueError(f"trace {self.name}: expected every block to be released, got {len(live)} that never are")

    @property
    def steps(self) -> int:
        return sum(entry.block == STEP for entry in self.entries)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block."""
        return tuple(entry.nbytes for entry in self.entries if entry.nbytes)

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes live at one time, as asked for, and the first entry after which they are."""
        live = most = at = 0
        for place, entry in enumerate(self.entries):
            if entry.block != STEP:
                live += entry.nbytes or -self.sizes[entry.block]
                if live > most:
                    most, at = live, place
        return most, at

    def requests(self) -> list[tuple[int, int, int]]:
        """`(nbytes, first use, last use)` of every block, uses being places in the trace."""
        born: list[int] = []
        dies: dict[int, int] = {}
        for place, entry in enumerate(self.entries):
            if entry.nbytes:
                born.append(place)
            elif entry.block != STEP:
                dies[entry.block] = place
        return [(self.sizes[block], first, dies[block]) for block, first in enumerate(born)]

    def step_requests(self, step: int) -> list[tuple[int, int, int]]:
        """`requests` of the blocks that are allocated in step number `step`, from 0."""
        starts = [place for place, entry in enumerate(self.entries) if entry.block == STEP]
        end = starts[step + 1] if step + 1 < len(starts) else len(self.entries)
        return [request for request in self.requests() if starts[step] <= request[1] < end]


Handle = TypeVar("Handle")


class Allocator(Protocol[Handle]):
    """What a trace can be played to."""

    def begin_step(self) -> None: ...

    def allocate(self, nbytes: int) -> Handle: ...

    def release(self, block: Handle) -> None: ...


def play(trace: Trace, allocator: Allocator[Handle], *, at_peak: Callable[[], None] = lambda: None) -> None:
    """Every allocation and release of `trace`, in order; `at_peak` is called once, while the most is live."""
    live: dict[int, Handle] = {}
    _, peak_at = trace.peak
    for place, entry in enumerate(trace.entries):
        if entry.block == STEP:
            allocator.begin_step()
        elif entry.nbytes:
            live[entry.block] = allocator.allocate(entry.nbytes)
        else:
            allocator.release(live.pop(entry.block))
        if place == peak_at:
            at_peak()


def write_trace(path: Path, trace: Trace) -> None:
    """Write `trace` to `path`, gzipped; the same trace gives the same bytes."""
    head = {
        "schema": SCHEMA, "name": trace.name, "about": trace.about, "steps": trace.steps, "versions": trace.versions,
    }  # fmt: skip
    lines: list[Any] = [head]
    for entry in trace.entries:
        if entry.block == STEP:
            lines.append(["step"])
        else:
            lines.append(["+", entry.block, entry.nbytes] if entry.nbytes else ["-", entry.block])
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode("ascii"), compresslevel=9, mtime=0))


def read_trace(path: Path) -> Trace:
    """The trace in the file at `path`. Raises `ValueError` for a file that is none, `OSError` for one that is not there."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        lines = [json.loads(line) for line in file]
    head = lines[0] if lines and isinstance(lines[0], dict) else {}
    if head.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected a first line with schema {SCHEMA}, got {head.get('schema')!r}")
    entries = tuple(_entries(path, lines[1:]))
    trace = Trace(name=head["name"], about=head["about"], entries=entries, versions=head["versions"])
    if trace.steps != head["steps"]:
        raise ValueError(f"{path}: expected {head['steps']} steps, got {trace.steps}; the file is cut short")
    return trace


def _entries(path: Path, lines: Sequence[Any]) -> Iterator[Entry]:
    for number, line in enumerate(lines, start=2):
        match line:
            case ["step"]:
                yield Entry(block=STEP)
            case ["+", int(block), int(nbytes)] if nbytes > 0:
                yield Entry(block=block, nbytes=nbytes)
            case ["-", int(block)]:
                yield Entry(block=block)
            case _:
                raise ValueError(f'{path}, line {number}: expected ["step"], ["+", block, nbytes] or ["-", block], got {line}')


def trace_names() -> tuple[str, ...]:
    """The traces that come with the project."""
    return tuple(sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz")))


def load_trace(name: str) -> Trace:
    """The trace of that name among those that come with the project. Raises `ValueError` for another name."""
    if name not in trace_names():
        raise ValueError(f"trace: expected one of {', '.join(trace_names())}, got {name!r}")
    return read_trace(FOLDER / f"{name}.jsonl.gz")
