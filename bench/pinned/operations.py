"""How long one block takes: a block released and another allocated in its place, with many others live.

fill the peer with `live` blocks of 4 KiB to 256 KiB; then, over and over: release a random one, allocate another size
our pool twice: released without an event, and as a copy does it, after an event and for a stream
microseconds for such a pair: CPU time of the thread over a thousand pairs / 1000, the collector off, peers interleaved

CPU time, as nobody here waits for anything: what else runs on the machine then counts for less.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from chameleon_mm.bench._measure import Cell, Column, Figure, Results, Waived, interleave
from chameleon_mm.bench.pinned.allocators import AddressesOnly, ListBestFit
from chameleon_mm.bench.probe.pools import CupyPool
from chameleon_mm.device.protocols import Device
from chameleon_mm.pinned import FreeList, PinnedPool
from chameleon_mm.units import GIB, KIB

LIVE = (256, 100_000)
"""Live blocks: what one training step holds, and far more than that."""

_SMALLEST, _LARGEST = 4 * KIB, 256 * KIB  # so that 100,000 of them fit the addresses of a machine
_ADDRESSES = 32 * GIB
_PAIRS = 1000

PEERS = {
    "free_list": ("FreeList us", "FreeList.free + FreeList.allocate"),
    "pool": ("PinnedPool us", "PinnedBlock.release + PinnedPool.allocate"),
    "pool_event": (
        "with event us",
        "PinnedBlock.release(after=event) + PinnedPool.allocate(nbytes, stream), the event complete by then and asked at once",
    ),
    "list": ("list us", "best fit over one sorted Python list: free + allocate"),
    "cupy": ("CuPy us", "PinnedMemory.free + PinnedMemoryPool.malloc, nothing pinned by it"),
    "torch": ("torch.empty us", "drop the tensor + torch.empty(nbytes, dtype=torch.uint8), not pinned"),
}

_COLUMNS = tuple(Column(key=key, title=title, formula=f"CPU time of {what}") for key, (title, what) in PEERS.items())


@dataclass(frozen=True, slots=True)
class Peer:
    """What allocates and what takes back. `release` None: dropping the last reference does it."""

    allocate: Callable[[int], Any]
    release: Callable[[Any], object] | None


class Instant:
    """A stream, and an event on it that is complete: what the pool itself takes, without the device's part."""

    name = "instant"

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is complete."""

    def wait(self, event: object) -> None:
        """Nothing to order."""


class Churn:
    """A peer with `live` blocks, one of which is replaced at a time: the same ones by the same sizes for every peer."""

    def __init__(self, peer: Peer, live: int) -> None:
        draw = random.Random(0)
        span = _LARGEST // _SMALLEST
        self._peer = peer
        self._sizes = [int(_SMALLEST * span ** draw.random()) for _ in range(_PAIRS)]
        self._places = [draw.randrange(live) for _ in range(_PAIRS)]
        self._live = [peer.allocate(self._sizes[place % _PAIRS]) for place in range(live)]

    def pair_us(self) -> float:
        """Microseconds a pair, on average over a thousand."""
        allocate, release, live = self._peer.allocate, self._peer.release, self._live
        work = list(zip(self._places, self._sizes, strict=True))
        gc.disable()  # as timeit does: a collection would fall on whoever is running
        try:
            start = time.thread_time()
            if release is None:
                for place, size in work:
                    live[place] = None
                    live[place] = allocate(size)
            else:
                for place, size in work:
                    release(live[place])
                    live[place] = allocate(size)
            return (time.thread_time() - start) / _PAIRS * 1e6
        finally:
            gc.enable()


def measure(device: Device, live: Sequence[int] = LIVE, *, repeats: int = 9) -> Results:
    """A row for each number of live blocks. Times are this host's; `device` names the run and is not used."""
    results = Results("pinned operations", device, _COLUMNS)
    results.notes.append(f"one block released and one allocated, of {_SMALLEST} to {_LARGEST} bytes, evenly in the logarithm")
    for count in live:
        results.add(f"{count} live", {"live": count}, _row(count, repeats))
    return results


def _row(live: int, repeats: int) -> dict[str, Cell]:
    missing: dict[str, Cell] = {}
    with ExitStack() as stack:
        pool, copied_into = (stack.enter_context(PinnedPool(_ADDRESSES, AddressesOnly())) for _ in range(2))
        instant: Any = Instant()
        free_list, plain = FreeList(_ADDRESSES), ListBestFit(_ADDRESSES)
        peers = {
            "free_list": Peer(free_list.allocate, free_list.free),
            "pool": Peer(pool.allocate, lambda block: block.release()),
            "pool_event": Peer(lambda nbytes: copied_into.allocate(nbytes, instant), lambda block: block.release(instant)),
            "list": Peer(plain.allocate, plain.free),
            "torch": Peer(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), None),
        }
        try:
            cupy = CupyPool()
            peers["cupy"] = Peer(cupy.malloc, cupy.free)
        except ImportError as error:
            missing["cupy"] = Waived(f"CuPy is not installed here ({error})")
        churns = {name: Churn(peer, live) for name, peer in peers.items()}
        samples = interleave({name: churn.pair_us for name, churn in churns.items()}, repeats=repeats)
        churns.clear()  # the pool closes only without live blocks
    return missing | {name: Figure.of(taken, "us", simulated=False) for name, taken in samples.items()}
