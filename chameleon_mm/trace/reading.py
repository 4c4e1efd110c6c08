"""Reads a trace's file line by line, and says of a wrong one which line, what was expected there and what was got.

reader = TraceReader("step.jsonl", "chameleon_mm.trace/2")       # and what the schema before it had
for text in file: reader.line(text)
trace = reader.finish()
"""

from __future__ import annotations

import json
from math import isfinite
from reprlib import repr as shown  # short, however long or deeply nested a value is
from typing import Any, NoReturn

from chameleon_mm.trace.records import StepPhase, TensorKind
from chameleon_mm.trace.trace import NEVER, Trace, growing_columns, trace_columns

_PHASES = {phase.name.lower(): phase for phase in StepPhase}
_KINDS = {kind.name.lower(): kind for kind in TensorKind}

_MOST_DIGITS = 40
"""Digits of whole numbers at most, with their sign: more than any that is 64 bits wide has."""

_BEFORE_INNER_BYTES = "chameleon_mm.trace/1"
"""The schema of files whose operators do not say what they hold inside themselves."""

_CUT = "was the file cut short? Save the trace again"


class TraceReader:
    """A trace of which some lines were read. Every method raises `ValueError` for what does not fit."""

    def __init__(self, name: str, schema: str) -> None:
        self._name = name
        self._schema = schema
        self._number = 0
        self._header: dict[str, Any] = {}
        self._num_inner = 1
        """Values of an operator's line that say what it holds inside itself: none in `_BEFORE_INNER_BYTES`."""
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
            case ["op", str() as name, str() as content, str() as phase, list() as reads, list() as writes, *inner] if (
                len(inner) == self._num_inner
            ):
                self._op(name, content, phase, reads, writes)
                self._columns["op_inner_bytes"].append(self._int(inner[0]) if inner else 0)
            case ["save" | "use" as kind, tensor]:
                self._columns["hook_tick"].append(self._ticks)
                self._columns["hook_use"].append(kind == "use")
                self._columns["hook_tensor"].append(
                    -1 if tensor is None else len(self._columns["tensor_bytes"]) - self._int(tensor)
                )
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
        self._num_inner = 0 if schema == _BEFORE_INNER_BYTES else 1
        if schema not in (self._schema, _BEFORE_INNER_BYTES):
            self.fail(f"a header with the schema {self._schema}", f"{shown(schema)}; load it with the version that saved it")
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
