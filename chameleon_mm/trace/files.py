"""A trace as a text file: JSON lines, the same for equal traces, alike for like ones. docs/trace.md has the format.

header                     schema, counts, device
tensor, op, save, use      one line each, in the order in which they happened; numbers count back from where they stand
us                         what operators took, apart, for two recordings of one step differ in nothing else
features                   what is comparable within one process alone; the last line, so that a file cut short is told

save_trace(trace, "step.jsonl.gz"); trace = load_trace("step.jsonl.gz")

A file is read line by line. Of a wrong one an error says which line, what was expected there and what was got.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import isfinite
from pathlib import Path
from reprlib import repr as shown  # short, however long or deeply nested a value is
from typing import IO, Any, NoReturn

from chameleon_mm.trace.trace import NEVER, StepPhase, TensorKind, Trace, growing_columns, trace_columns

SCHEMA = "chameleon_mm.trace/3"

_TIMES_A_LINE = 100

_PHASES = {phase.name.lower(): phase for phase in StepPhase}
_KINDS = {kind.name.lower(): kind for kind in TensorKind}

_MOST_DIGITS = 40
"""Digits of whole numbers at most, with their sign: more than any that is 64 bits wide has."""

_CUT = "was the file cut short? Save the trace again"


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`, compressed where the name ends in ".gz". A file that is there is replaced.

    Equal traces make equal files. Raises `OSError` as opening and writing do.
    """
    with _open(Path(path), "w") as file:
        for line in _lines(trace):
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
            file.write("\n")


def load_trace(path: str | Path) -> Trace:
    """Load the trace that `save_trace` wrote to `path`, equal in every column.

    Raises `ValueError` that names the line for a file that is cut short, of another schema or no such file at all, and
    `OSError` as opening and reading do.
    """
    path = Path(path)
    reader = TraceReader(str(path))
    try:
        with _open(path, "r") as file:
            for text in file:
                reader.line(text)
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        reader.unreadable(str(error))
    return reader.finish()


@contextmanager
def _open(path: Path, mode: str) -> Iterator[IO[str]]:
    with path.open(f"{mode}b") as raw:
        if path.suffix != ".gz":
            with io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as file:
                yield file
            return
        # No name and no time of writing inside: equal traces make equal files.
        with (
            gzip.GzipFile(filename="", mode=f"{mode}b", fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file,
        ):
            yield file


def _lines(trace: Trace) -> Iterator[Any]:
    yield {
        "schema": SCHEMA,
        "device": trace.device,
        "simulated": trace.simulated,
        "start_bytes": trace.start_bytes,
        "ops": len(trace.op_us),
        "tensors": len(trace.tensor_bytes),
        "hooks": len(trace.hook_tick),
        "op_names": list(trace.op_names),
    }
    yield from _what_happened(trace)
    times = trace.op_us.tolist()
    for first in range(0, len(times), _TIMES_A_LINE):
        yield ["us", first, times[first : first + _TIMES_A_LINE]]
    yield ["features", trace.fingerprint, [f"{feature:016x}" for feature in trace.hook_feature.tolist()]]


def _what_happened(trace: Trace) -> Iterator[list[Any]]:
    """Yield the lines tick by tick; each storage before the tick that it begins with, or where those before it in number
    allow."""
    tensors = zip(
        trace.tensor_bytes.tolist(),
        trace.tensor_kind.tolist(),
        trace.tensor_born.tolist(),
        trace.tensor_released.tolist(),
        trace.tensor_sendable.tolist(),
        trace.tensor_dies.tolist(),
        strict=True,
    )
    waiting = next(tensors, None)
    ops = zip(
        trace.op_name.tolist(),
        trace.op_content.tolist(),
        trace.op_phase.tolist(),
        _ragged(trace.read_offsets.tolist(), trace.read_tensors.tolist()),
        _ragged(trace.write_offsets.tolist(), trace.write_tensors.tolist()),
        trace.op_inner_bytes.tolist(),
        strict=True,
    )
    hooks = zip(trace.hook_use.tolist(), trace.hook_tensor.tolist(), trace.hook_released.tolist(), strict=True)
    of_hooks = set(trace.hook_tick.tolist())
    seen = hooks_seen = 0
    for tick in range(trace.num_ticks + 1):
        while waiting is not None and waiting[2] <= tick:
            nbytes, kind, born, released, sendable, dies = waiting
            since = max(born, 0)
            yield [
                "tensor",
                TensorKind(kind).name.lower(),
                nbytes,
                None if born < 0 else tick - born,
                None if released == NEVER else released - since,
                None if sendable == NEVER else sendable - hooks_seen,
                None if dies == trace.num_ticks else dies - since,
            ]
            seen += 1
            waiting = next(tensors, None)
        if tick in of_hooks:
            use, tensor, held_until = next(hooks)
            hooks_seen += 1
            number = None if tensor < 0 else seen - tensor
            yield ["use", number, None if held_until == NEVER else held_until - tick] if use else ["save", number]
        elif tick < trace.num_ticks:
            name, content, phase, reads, writes, inner_bytes = next(ops)
            yield [
                "op",
                trace.op_names[name],
                f"{content:016x}",
                StepPhase(phase).name.lower(),
                [seen - tensor for tensor in reads],
                [seen - tensor for tensor in writes],
                inner_bytes,
            ]


def _ragged(offsets: list[int], values: list[int]) -> Iterator[list[int]]:
    return (values[begin:end] for begin, end in pairwise(offsets))


class TraceReader:
    """A trace of which some lines were read. Every method raises `ValueError` for what does not fit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._header: dict[str, Any] = {}
        self._names: dict[str, int] = {}
        self._ended = False
        self._fingerprint = 0
        self._columns = growing_columns()
        self._outlives: list[int] = []

    def line(self, text: str) -> None:
        """Read the next line of the file."""
        self._number += 1
        try:
            line = json.loads(text, parse_constant=self._no_number, parse_int=self._whole)
        except json.JSONDecodeError as error:
            self.fail("one JSON value", f"{text[:60]!r} ({error.msg})")
        except RecursionError:
            self.fail("values of a trace's lines", f"{text[:60]!r}, which are nested too deeply")
        if self._number == 1:
            self._read_header(line)
            return
        if self._ended:
            self.fail("the end of the file after the features", f"{text[:60]!r}")
        match line:
            case ["tensor", str() as kind, nbytes, born, released, sendable, dies]:
                self._tensor(kind, nbytes, born, released, sendable, dies)
            case ["op", str() as name, str() as content, str() as phase, list() as reads, list() as writes, inner_bytes]:
                self._op(name, content, phase, reads, writes)
                self._columns["op_inner_bytes"].append(self._int(inner_bytes))
            case ["save", tensor]:
                self._hook(tensor, None, use=False)
            case ["use", tensor, released]:
                self._hook(tensor, released, use=True)
            case ["us", first, list() as times]:
                self._times(first, times)
            case ["features", int() as fingerprint, list() as features]:
                self._fingerprint, self._ended = fingerprint, True
                self._columns["hook_feature"].extend(self._hash(feature) for feature in features)
            case _:
                self.fail("a tensor, op, save, use, us or features line with all its values", f"{text[:60]!r}")

    def finish(self) -> Trace:
        """The trace, after the last line."""
        self._number += 1
        if not self._ended:
            self.fail(
                "a header" if not self._header else "more lines, and features in the last", f"the end of the file; {_CUT}"
            )
        counts = {
            "ops": (len(self._columns["op_name"]), len(self._columns["op_us"])),
            "tensors": (len(self._columns["tensor_bytes"]), len(self._columns["tensor_bytes"])),
            "hooks": (len(self._columns["hook_tick"]), len(self._columns["hook_feature"])),
        }
        for what, got in counts.items():
            if got != (self._header[what],) * 2:
                self.fail(f"{self._header[what]} {what}, as the header says", f"{min(got)}; {_CUT}")
        dies = self._columns["tensor_dies"]
        for tensor in self._outlives:
            dies[tensor] = self._ticks
        try:
            return Trace(
                device=self._header["device"],
                simulated=self._header["simulated"],
                start_bytes=self._header["start_bytes"],
                op_names=tuple(self._names),
                fingerprint=self._fingerprint,
                **trace_columns(self._columns),
            )
        except ValueError as error:
            raise ValueError(f"{self._name}: {error}") from error

    def unreadable(self, why: str) -> NoReturn:
        """Fail, as the file has no next line that is text."""
        self._number += 1
        self.fail("UTF-8 text, whole where it is compressed", f"{why}; {_CUT}")

    def fail(self, expected: str, got: str) -> NoReturn:
        """Raise `ValueError` for the line that is being read."""
        raise ValueError(f"{self._name}, line {self._number}: expected {expected}, got {got}")

    @property
    def _ticks(self) -> int:
        return len(self._columns["op_name"]) + len(self._columns["hook_tick"])

    def _read_header(self, header: Any) -> None:
        schema = header.get("schema") if isinstance(header, dict) else None
        if schema != SCHEMA:
            self.fail(f"schema {SCHEMA}", f"{shown(schema)}: record the trace again with `save_trace`")
        for key, kind in (
            ("device", str), ("simulated", bool), ("start_bytes", int), ("ops", int), ("tensors", int), ("hooks", int),
            ("op_names", list),
        ):  # fmt: skip
            if type(header.get(key)) is not kind:
                self.fail(f"{key} of type {kind.__name__} in the header", shown(header.get(key)))
        self._header = header
        self._names = {self._text(name): i for i, name in enumerate(header["op_names"])}

    def _tensor(self, kind: str, nbytes: Any, born: Any, released: Any, sendable: Any, dies: Any) -> None:
        if kind not in _KINDS:
            self.fail(f"a kind of tensor: {', '.join(_KINDS)}", shown(kind))
        begins = -1 if born is None else self._ticks - self._int(born)
        since = max(begins, 0)
        if dies is None:
            self._outlives.append(len(self._columns["tensor_bytes"]))
        self._columns["tensor_bytes"].append(self._int(nbytes))
        self._columns["tensor_kind"].append(_KINDS[kind])
        self._columns["tensor_born"].append(begins)
        self._columns["tensor_released"].append(NEVER if released is None else since + self._int(released))
        self._columns["tensor_sendable"].append(
            NEVER if sendable is None else len(self._columns["hook_tick"]) + self._int(sendable)
        )
        self._columns["tensor_dies"].append(0 if dies is None else since + self._int(dies))

    def _op(self, name: str, content: str, phase: str, reads: list[Any], writes: list[Any]) -> None:
        if name not in self._names:
            self.fail("an operator that the header names", shown(name))
        if phase not in _PHASES:
            self.fail(f"a phase: {', '.join(_PHASES)}", shown(phase))
        self._columns["op_tick"].append(self._ticks)
        self._columns["op_name"].append(self._names[name])
        self._columns["op_content"].append(self._hash(content))
        self._columns["op_phase"].append(_PHASES[phase])
        for tensors, values, offsets in (
            (reads, self._columns["read_tensors"], self._columns["read_offsets"]),
            (writes, self._columns["write_tensors"], self._columns["write_offsets"]),
        ):
            values.extend(len(self._columns["tensor_bytes"]) - self._int(tensor) for tensor in tensors)
            offsets.append(len(values))

    def _hook(self, tensor: Any, released: Any, *, use: bool) -> None:
        tick = self._ticks
        self._columns["hook_tick"].append(tick)
        self._columns["hook_use"].append(use)
        self._columns["hook_tensor"].append(-1 if tensor is None else len(self._columns["tensor_bytes"]) - self._int(tensor))
        self._columns["hook_released"].append(NEVER if released is None else tick + self._int(released))

    def _times(self, first: Any, times: list[Any]) -> None:
        if first != len(self._columns["op_us"]):
            self.fail(f"times from operator {len(self._columns['op_us'])} on", f"{shown(first)}; is a line missing?")
        for us in times:
            if type(us) not in (int, float) or not isfinite(us):
                self.fail("finite times in microseconds", shown(us))
        self._columns["op_us"].extend(times)

    def _int(self, value: Any) -> int:
        # Far below 64 bits: sums and differences of two stay within them.
        if type(value) is not int or not -(1 << 61) < value < 1 << 61:
            self.fail("a whole number", shown(value))
        return int(value)

    def _hash(self, value: Any) -> int:
        text = self._text(value)
        if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
            self.fail("a hash of 16 hexadecimal digits", shown(value))
        return int(text, 16)

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.fail("text", shown(value))
        return value

    def _whole(self, digits: str) -> int:
        if len(digits) > _MOST_DIGITS:  # Python converts no more than some thousands, and no more than 308 to a float
            self.fail(f"whole numbers of {_MOST_DIGITS} digits at most", f"{digits[:20]}... of {len(digits)}")
        return int(digits)

    def _no_number(self, constant: str) -> NoReturn:
        self.fail("finite numbers", constant)
