"""How long an urgent copy takes beside a large reload: through our own queue, and through streams alone.

    for peer in (Transfer, one stream for all, a stream of its own for what is urgent):
        begin the reload; every so often, until it is over:
            asked = clock.record(); copy 64 KiB to the device, urgently; arrived = an event after it
        latency = arrived - asked, on the device's clock

A copy engine is one FIFO per direction: what was handed to it first goes first, whichever stream it came from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._measure import Column, Results, Waived, interleave
from chameleon_mm.bench._overlap_packing import beside_its_kind
from chameleon_mm.device.protocols import Device, Event, Stream
from chameleon_mm.transfer import Transfer
from chameleon_mm.units import GIB, KIB, MIB, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """How much comes back, and what is asked for meanwhile."""

    nbytes: int
    block_bytes: int
    """Of one saved storage: what is asked for in one go. Two of them lie on the host, taken in turn."""
    urgent_bytes: int
    every_us: float
    """Host time from one urgent copy to the next."""


GPU_RELOAD = Reload(nbytes=4 * GIB, block_bytes=256 * MIB, urgent_bytes=64 * KIB, every_us=400)
CPU_RELOAD = Reload(nbytes=256 * MIB, block_bytes=64 * MIB, urgent_bytes=64 * KIB, every_us=40)  # every byte moves for real

_LIMIT_S = 4.0
_TOO_SHORT = Waived("the reload was over before anything was asked for urgently")


class Run(NamedTuple):
    """One reload."""

    latencies_us: list[float]
    reload_us: float


def measure(device: Device, buffers: Buffers, reload: Reload, *, repeats: int) -> Results:
    """A row for each peer."""
    about = {
        "median": ("median us", "median latency of the urgent copies of a reload"),
        "p99": ("p99 us", "their 99th percentile"),
        "most": ("most us", "the longest of them"),
        "gbps": ("reload GB/s", "bytes of the reload / time until its last has arrived / 1e9"),
    }
    columns = [
        Column(key=prefix + key, title=title, formula=formula, simulated=bool(prefix))
        for prefix in ("", "simulated_")
        for key, (title, formula) in about.items()
    ]
    results = Results("overlap, urgent copies", device, columns)
    peers = _Peers(device, buffers, reload)
    samples = interleave(peers.by_name(), warmup=1, repeats=repeats, limit_s=_LIMIT_S)
    for name, runs in samples.items():
        params = {"reload_bytes": reload.nbytes, "urgent_bytes": reload.urgent_bytes, "urgent": len(runs[0].latencies_us)}
        if not all(run.latencies_us for run in runs):
            results.add(name, params, {column.key: _TOO_SHORT for column in columns})
            continue
        figures = {
            "median": ([statistics.median(run.latencies_us) for run in runs], "us"),
            "p99": ([percentile(run.latencies_us, 0.99) for run in runs], "us"),
            "most": ([max(run.latencies_us) for run in runs], "us"),
            "gbps": ([reload.nbytes / (run.reload_us * 1e3) for run in runs], "GB/s"),
        }
        results.add(name, params, beside_its_kind(device, figures))
    urgent, whole = format_size(reload.urgent_bytes), format_size(reload.nbytes)
    each = format_size(reload.block_bytes)
    results.notes.append(f"urgent copies of {urgent} every {reload.every_us:g} us beside a reload of {whole}, {each} at a time")
    return results


def percentile(values: list[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class _Peers:
    """The same reload and the same urgent copies, by each way."""

    def __init__(self, device: Device, buffers: Buffers, reload: Reload) -> None:
        self._device, self._reload = device, reload
        self._clock = device.new_stream("clock")  # idle: its events are complete as they are recorded
        self._h2d, self._own = device.new_stream("h2d"), device.new_stream("urgent")
        self._transfer = Transfer(device)
        self._hbm, self._urgent_hbm = buffers.on_device(reload.block_bytes), buffers.on_device(reload.urgent_bytes)
        self._host = buffers.pinned(2 * reload.block_bytes).split(reload.block_bytes)
        self._urgent_host = buffers.pinned(reload.urgent_bytes)

    def by_name(self) -> dict[str, Callable[[], Run]]:
        return {"Transfer": self._queued, "one stream": self._one_stream, "own stream": self._own_stream}

    def _blocks(self) -> list[Tensor]:
        return [self._host[i % 2] for i in range(self._reload.nbytes // self._reload.block_bytes)]

    def _queued(self) -> Run:
        """Our queue: `issue_in` brings the urgent one forward."""
        self._device.synchronize()
        start = self._clock.record(timed=True)
        moves = [self._transfer.swap_in(self._hbm, block, [start], timed=True) for block in self._blocks()]

        def is_over() -> bool:
            self._transfer.hand_over()
            return moves[-1].done is not None

        def urgent() -> Event:
            move = self._transfer.swap_in(self._urgent_hbm, self._urgent_host, [], timed=True)
            self._transfer.issue_in(move)
            return move.pieces[-1].end

        return self._run(start, is_over, urgent, lambda: moves[-1].pieces[-1].end)

    def _one_stream(self) -> Run:
        """All in the order in which it was asked for."""
        return self._alone(self._h2d)

    def _own_stream(self) -> Run:
        """Urgent copies on another stream, behind the same engine."""
        return self._alone(self._own)

    def _alone(self, urgent_stream: Stream) -> Run:
        self._device.synchronize()
        start = self._clock.record(timed=True)
        self._h2d.wait(start)
        for block in self._blocks():
            self._h2d.copy(self._hbm, block)
        end = self._h2d.record(timed=True)

        def urgent() -> Event:
            urgent_stream.copy(self._urgent_hbm, self._urgent_host)
            return urgent_stream.record(timed=True)

        return self._run(start, end.query, urgent, lambda: end)

    def _run(
        self, start: Event, is_over: Callable[[], bool], urgent: Callable[[], Event], reload_end: Callable[[], Event]
    ) -> Run:
        device, waits = self._device, []
        asked_at = device.host_us
        while not is_over():
            if device.host_us - asked_at >= self._reload.every_us:
                asked_at = device.host_us
                asked = self._clock.record(timed=True)
                waits.append((asked, urgent()))
        device.synchronize()
        return Run([arrived.elapsed_us(asked) for asked, arrived in waits], reload_end().elapsed_us(start))
