"""A trace as a text file: JSON lines, the same for equal traces, alike for like ones. docs/trace.md has the format.

header                     schema, counts, device
tensor, op, save, use      one line each, in the order in which they happened; numbers count back from where they stand
us                         what operators took, apart, for two recordings of one step differ in nothing else
features                   what is comparable within one process alone; the last line, so that a file cut short is told

save_trace(trace, "step.jsonl.gz"); trace = load_trace("step.jsonl.gz")
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from chameleon_mm.trace.reading import TraceReader
from chameleon_mm.trace.records import StepPhase, TensorKind
from chameleon_mm.trace.trace import NEVER, Trace

SCHEMA = "chameleon_mm.trace/2"

_TIMES_A_LINE = 100


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`, compressed where the name ends in ".gz". A file that is there is replaced.

    Equal traces make equal files. Raises `OSError` as opening and writing do.
    """
    with _open(Path(path), "w") as file:
        for line in _lines(trace):
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False, ensure_ascii=False))
            file.write("\n")


def load_trace(path: str | Path) -> Trace:
    """Load the trace that `save_trace` wrote to `path`, equal in every column. A file of the schema before,
    "chameleon_mm.trace/1", does not tell what operators hold inside themselves: they come back with 0 bytes.

    Raises `ValueError` that names the line for a file that is cut short, of another schema or no such file at all, and
    `OSError` as opening and reading do.
    """
    path = Path(path)
    reader = TraceReader(str(path), SCHEMA)
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
    hooks = zip(trace.hook_use.tolist(), trace.hook_tensor.tolist(), strict=True)
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
            use, tensor = next(hooks)
            hooks_seen += 1
            yield ["use" if use else "save", None if tensor < 0 else seen - tensor]
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
