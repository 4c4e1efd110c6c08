"""Memory of a recorded step without swaps, as a snapshot in torch's format, for https://pytorch.org/memory_viz.

    pickle.dumps(snapshot_of(trace))       # a file for that page, and for the functions of `torch.cuda._memory_viz`

Each storage of the trace is an allocation with two frames: its operator and module, and the program's line. Internal memory of
an operator, and unused memory from before the step, are allocations too. Addresses are invented.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from chameleon_mm.plan.trace import SavePlace, TensorKind, Trace
from chameleon_mm.plan.unswapped_memory import KIND_NAMES, makers_of, peak_memory, place_at, place_of
from chameleon_mm.pool.free_list import FreeList
from chameleon_mm.replayable import base_name
from chameleon_mm.units import ALLOCATION_UNIT_BYTES, allocated_size

MOST_ALLOCATIONS = 20_000
"""Maximum number of allocations in a file. The largest are included; the page draws this many in seconds."""


def snapshot_of(trace: Trace) -> dict[str, Any]:
    """Return a snapshot like `torch.cuda.memory._snapshot()`: allocations in order, and those that outlive the step."""
    storages, inner = len(trace.tensor_bytes), np.flatnonzero(trace.op_inner_bytes)
    untouched = [peak_memory(trace).untouched_bytes]
    size = np.concatenate((allocated_size(trace.tensor_bytes), trace.op_inner_bytes[inner], untouched))
    born = np.concatenate((trace.tensor_born, trace.op_tick[inner], [-1]))
    dies = np.concatenate((trace.tensor_dies, trace.op_tick[inner], [trace.num_ticks]))
    makers, clock_us = makers_of(trace), trace.clock_us()
    units = FreeList(int(allocated_size(size).sum()) + ALLOCATION_UNIT_BYTES, ALLOCATION_UNIT_BYTES)

    def frames(number: int) -> list[dict[str, Any]]:
        what, place = "from before the step, not used in it", SavePlace()
        if number < storages:
            kind, place = KIND_NAMES[TensorKind(int(trace.tensor_kind[number]))], place_of(trace, number)
            what = f"{makers.get(number, '?')}, {kind}"
        elif number < len(size) - 1:
            op = inner[number - storages]
            what, place = f"inside {base_name(trace.op_names[trace.op_name[op]])}", place_at(trace, int(trace.op_tick[op]))
        file, _, line = place.line.rpartition(":")
        lines = ((what, place.module, 0), (place.module, file, int(line or 0)))
        return [{"name": name, "filename": filename, "line": number} for name, filename, number in lines]

    largest = np.argsort(-size, kind="stable")[:MOST_ALLOCATIONS]
    moments = [(int(at[i]), dead, i) for dead, at in enumerate((born, dies)) for i in largest.tolist() if size[i]]
    events: list[dict[str, Any]] = []
    live: dict[int, dict[str, Any]] = {}
    for tick, dead, number in sorted(moments):
        if not dead:
            offset = units.allocate(int(size[number]))
            assert offset is not None
            live[number] = {"addr": offset, "size": int(size[number]), "stream": 0, "frames": frames(number)}
        elif tick < trace.num_ticks:
            units.free(live[number]["addr"])
        if 0 <= tick < trace.num_ticks:
            event = {**(live.pop(number) if dead else live[number]), "time_us": int(clock_us[tick])}
            events += [{**event, "action": action} for action in (("free_requested", "free_completed") if dead else ("alloc",))]
    blocks, end = [], 0
    for one in sorted(live.values(), key=lambda one: one["addr"]):
        gap = {"address": end, "size": one["addr"] - end, "requested_size": 0, "state": "inactive", "frames": []}
        block = {"address": one["addr"], "size": one["size"], "requested_size": one["size"], "state": "active_allocated"}
        blocks += [*([gap] if gap["size"] else []), {**block, "frames": one["frames"]}]
        end = one["addr"] + one["size"]
    held = sum(one["size"] for one in live.values())
    segment = {"device": 0, "address": 0, "total_size": end, "allocated_size": held, "active_size": held, "stream": 0}
    return {
        "segments": [{**segment, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "blocks": blocks}],
        "device_traces": [events],
    }
