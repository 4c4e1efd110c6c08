"""Differences between two steps, in lines for people.

diff_traces(before, after)  ->  ["operators 120 to 131: 12 inserted: aten::mm, aten::add, ...", ...]

Operators are aligned by their contents, so one more at the front does not make all later ones differ. What an aligned operator
writes is compared storage by storage, and hook calls are aligned by what they save or use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from difflib import SequenceMatcher

from chameleon_mm.trace.trace import OpRecord, Trace
from chameleon_mm.units import format_size, format_us

_NAMES_SHOWN = 4


def diff_traces(before: Trace, after: Trace) -> list[str]:
    """Readable differences of `after` from `before`; none: they tell of the same step. How long operators took, and what is
    comparable within one process alone, counts in sums only where it says so.

    Time: that of `difflib.SequenceMatcher` on what differs, equal beginnings and ends taken off.
    """
    lines = [
        f"{what}: {old}, now {new}"
        for what, old, new in (
            ("device", before.device, after.device),
            ("simulated", before.simulated, after.simulated),
            ("allocated at the start", format_size(before.start_bytes), format_size(after.start_bytes)),
            ("operators", len(before.op_us), len(after.op_us)),
            ("storages", len(before.tensor_bytes), len(after.tensor_bytes)),
            ("hook calls", len(before.hook_tick), len(after.hook_tick)),
            ("operators' time", format_us(before.duration_us), format_us(after.duration_us)),
        )
        if old != new
    ]
    return [*lines, *_operators(before, after), *_hooks(before, after)]


def _operators(before: Trace, after: Trace) -> Iterator[str]:
    old, new = before.op_content.tolist(), after.op_content.tolist()
    for tag, i, i_end, j, j_end in _opcodes(old, new):
        if tag == "equal":
            for a, b in zip(range(i, i_end), range(j, j_end), strict=True):
                yield from _writes(before, after, before.ops[a], after.ops[b], b)
        else:
            yield _changed("operators", tag, (i, i_end), (j, j_end), lambda k: before.ops[k].name, lambda k: after.ops[k].name)


def _writes(before: Trace, after: Trace, old: OpRecord, new: OpRecord, number: int) -> Iterator[str]:
    """Yield the differences between two operators of equal contents."""
    where = f"operator {number} ({new.name})"
    if old.phase != new.phase:
        yield f"{where}: in {old.phase.name.lower()}, now in {new.phase.name.lower()}"
    if old.inner_bytes != new.inner_bytes:
        yield f"{where}: holds {old.inner_bytes} bytes inside itself, now {new.inner_bytes}"
    if len(old.writes) != len(new.writes):
        yield f"{where}: writes {len(old.writes)} storages, now {len(new.writes)}"
    for a, b in zip(old.writes, new.writes, strict=False):
        x, y = before.tensors[a], after.tensors[b]
        if x.nbytes != y.nbytes:
            yield f"{where}: writes {x.nbytes} bytes, now {y.nbytes}"
        if x.kind != y.kind:
            yield f"{where}: writes a storage of kind {x.kind.name.lower()}, now {y.kind.name.lower()}"


def _hooks(before: Trace, after: Trace) -> Iterator[str]:
    old, new = _hook_texts(before), _hook_texts(after)
    for tag, i, i_end, j, j_end in _opcodes(old, new):
        if tag != "equal":
            yield _changed("hook calls", tag, (i, i_end), (j, j_end), old.__getitem__, new.__getitem__)


def _hook_texts(trace: Trace) -> list[str]:
    sizes = trace.tensor_bytes.tolist()
    return [
        f"{'use' if use else 'save'} of {'what stays' if tensor < 0 else f'{sizes[tensor]} bytes'}"
        for use, tensor in zip(trace.hook_use.tolist(), trace.hook_tensor.tolist(), strict=True)
    ]


def _changed(
    what: str,
    tag: str,
    old: tuple[int, int],
    new: tuple[int, int],
    old_name: Callable[[int], str],
    new_name: Callable[[int], str],
) -> str:
    gone, come = _listed(old, old_name), _listed(new, new_name)
    where = f"{what} {new[0]} to {new[1] - 1}" if new[1] > new[0] else f"{what} before {new[0]}"
    if tag == "delete":
        return f"{where}: {old[1] - old[0]} removed: {gone}"
    if tag == "insert":
        return f"{where}: {new[1] - new[0]} inserted: {come}"
    return f"{where}: {gone}, now {come}"


def _listed(which: tuple[int, int], name: Callable[[int], str]) -> str:
    begin, end = which
    shown = ", ".join(name(k) for k in range(begin, min(end, begin + _NAMES_SHOWN)))
    return shown if end - begin <= _NAMES_SHOWN else f"{shown}, and {end - begin - _NAMES_SHOWN} more"


def _opcodes(old: Sequence[Hashable], new: Sequence[Hashable]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield opcodes as `SequenceMatcher.get_opcodes` does, for sequences that are mostly equal at both ends."""
    shorter = min(len(old), len(new))
    front = next((k for k in range(shorter) if old[k] != new[k]), shorter)
    back = next((k for k in range(shorter - front) if old[-1 - k] != new[-1 - k]), shorter - front)
    if front:
        yield "equal", 0, front, 0, front
    # Not its guess at what is junk: in a step of equal layers every operator is popular.
    middle = SequenceMatcher(None, old[front : len(old) - back], new[front : len(new) - back], autojunk=False)
    for tag, i, i_end, j, j_end in middle.get_opcodes():
        yield tag, i + front, i_end + front, j + front, j_end + front
    if back:
        yield "equal", len(old) - back, len(old), len(new) - back, len(new)
