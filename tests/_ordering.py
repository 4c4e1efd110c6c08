"""Programs that fail if one ordering rule is missing, for a simulated device and for CUDA alike.

machine = OnSim(check_races=True) or OnCuda()
one_training_step(machine)            # raises AssertionError for other bits than eager's
dropped = drop_waits(monkeypatch, machine, "d2h", "compute")      # every such wait does nothing from here on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS, Device
from chameleon_mm.device.protocols import Event
from chameleon_mm.device.sim import SimStream
from chameleon_mm.plan.rule import Limits
from chameleon_mm.swap.executor import Executor
from chameleon_mm.swap.handles import SwappedView
from chameleon_mm.swap.host_copy import State
from chameleon_mm.swap.saved_storage import SavedStorage
from tests._programs import deep, swapping_executor
from tests.observed import unchecked

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.6, d2h_gbps=0.6, duplex_gbps=1.0)
"""Slow enough that no copy completes by luck before a required wait."""

BYTES = 64 * 1024


class OnSim:
    """A simulated device: plain tensors inside `compute()` are its own."""

    torch_device = torch.device("cpu")
    stream_type: type[Any] = SimStream

    def __init__(self, *, check_races: bool = True) -> None:
        self._sim = cm.SimDevice(SLOW_LINK)
        if not check_races:
            unchecked(self._sim)
        self.device: Device = self._sim

    def other_stream(self) -> Any:
        return self._sim.new_compute_stream("other")

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._sim.stream(stream)


class OnCuda:
    """First CUDA device: a GPU or the stand-in's."""

    torch_device = torch.device("cuda", 0)

    def __init__(self) -> None:
        from chameleon_mm.device.cuda import CudaDevice
        from chameleon_mm.device.cuda.cuda_stream import CudaStream

        self.device: Device = CudaDevice()
        self.stream_type: type[Any] = CudaStream

    def other_stream(self) -> Any:
        return self.device.new_stream("other")

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream.raw)


Machine = OnSim | OnCuda
Scenario = Callable[[Machine], None]


def executor(machine: Machine, pool: cm.PinnedPool, *, leaving_bytes: int | None = 0) -> Executor:
    """With `leaving_bytes=0` compute waits for every copy out at the next hook; None leaves them for the end."""
    limits = Limits(leaving_bytes=leaving_bytes, ahead_bytes=1 << 20)
    return swapping_executor(machine.device, pool, limits, pack_below_bytes=0)


def randn(machine: Machine, *shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=machine.torch_device, requires_grad=requires_grad)


def one_training_step(machine: Machine) -> None:
    """Forward, backward and again, on one stream; the gradients must be eager's."""
    device = machine.device
    swapper = executor(machine, cm.PinnedPool("4MiB", device=device))
    for _ in range(2):
        with device.compute():
            x = randn(machine, 128, 128, requires_grad=True)
            (expected,) = torch.autograd.grad(deep(x).sum(), x)
            with torch.autograd.graph.saved_tensors_hooks(swapper.save, swapper.use):
                out = deep(x).sum()
            (got,) = torch.autograd.grad(out, x)
            device.synchronize()
            assert torch.equal(got, expected)
            del out


def memory_that_an_operator_has_just_used(machine: Machine) -> None:
    """Bring a storage back into memory that an operator, which may still run, wrote last."""
    device = machine.device
    swapper = executor(machine, cm.PinnedPool("1MiB", device=device))
    with device.compute():
        kept = randn(machine, BYTES // 4)
        handle = saved(machine, swapper, kept.clone())
        swapper.save(randn(machine, 8, requires_grad=True))  # queues the copy out
        handle.claim.saved.reclaim()
        assert handle.claim.saved.state is State.ON_HOST
        temporaries = [kept * 2 for _ in range(8)]
        del temporaries
        got = swapper.use(handle) + 0
        device.synchronize()
        assert torch.equal(got, kept)


def host_copy_read_from_another_stream(machine: Machine) -> None:
    """Saved and reclaimed on one compute stream, used on another that knows nothing of the first one's waits."""
    device = machine.device
    swapper = executor(machine, cm.PinnedPool("1MiB", device=device))
    other = machine.other_stream()
    with device.compute():
        kept = randn(machine, BYTES // 4)
        handle = saved(machine, swapper, kept.clone())
        seen_by_other = device.current_stream().record()
        other.wait(seen_by_other)
        swapper.save(randn(machine, 8, requires_grad=True))  # queues the copy out
        handle.claim.saved.reclaim()
        assert handle.claim.saved.state is State.ON_HOST
        with machine.on(other):
            got = swapper.use(handle) + 0
        device.synchronize()
        assert torch.equal(got, kept)


def host_block_reused_from_another_stream(machine: Machine) -> None:
    """Refill a block from the first stream, although only another stream waited for its last use, a copy back."""
    device = machine.device
    swapper = executor(machine, cm.PinnedPool(BYTES, device=device))
    other = machine.other_stream()
    with device.compute():
        kept = randn(machine, BYTES // 4)
        first = saved(machine, swapper, kept.clone())
        swapper.save(randn(machine, 8, requires_grad=True))
        first.claim.saved.reclaim()
        other.wait(device.current_stream().record())
        with machine.on(other):
            got = swapper.use(first) + 0
            del first
        second = saved(machine, swapper, randn(machine, BYTES // 4))
        swapper.save(randn(machine, 8, requires_grad=True))
        second.claim.saved.reclaim()
        device.synchronize()
        assert torch.equal(got, kept)


def saved(machine: Machine, swapper: Executor, t: Tensor) -> SwappedView:
    """Save `t` as an op would whose end the next hook can see: the sequence number advances."""
    handle = swapper.save(t)
    assert isinstance(handle, SwappedView)
    torch.ones(1, requires_grad=True, device=machine.torch_device).exp()
    return handle


WAITS: dict[tuple[str, str], Scenario] = {
    ("d2h", "compute"): one_training_step,  # Note [Swap-out]: the source was written
    ("compute", "d2h"): one_training_step,  # Note [Reclaim]: the source was read before its block is reused
    ("h2d", "compute"): memory_that_an_operator_has_just_used,  # Note [Swap-in]: the destination's earlier owner is done
    ("compute", "h2d"): one_training_step,  # Note [Swap-in]: the bytes arrived
    ("h2d", "d2h"): host_copy_read_from_another_stream,  # Note [Swap-in]: the host copy is whole
    ("d2h", "h2d"): host_block_reused_from_another_stream,  # Note [Host block]: its last reader is done
}


def reclaim_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every reclaim drop the device memory after a copy out without waiting for the copy."""

    def reclaim(self: SavedStorage) -> None:
        assert self.copy is not None
        self._context.out_queue.issue(self.copy.out)
        self._reclaim(has_room=True)

    monkeypatch.setattr(SavedStorage, "reclaim", reclaim)


def release_without_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every release of a host block claim that its last use is over."""
    release = cm.PinnedBlock.release
    monkeypatch.setattr(cm.PinnedBlock, "release", lambda self, after=None: release(self))


def drop_waits(monkeypatch: pytest.MonkeyPatch, machine: Machine, waiter: str, recorder: str) -> list[int]:
    """Make every wait of `waiter`-named streams on events of `recorder`-named ones do nothing. Counts them in the list."""
    streams = machine.stream_type
    origin: dict[int, str] = {}
    events: list[Event] = []
    dropped = [0]
    record, wait = streams.record, streams.wait

    def recording(self: Any, *, timed: bool = False) -> Event:
        event: Event = record(self, timed=timed)
        events.append(event)  # keeps its id from being used again
        origin[id(event)] = self.name
        return event

    def waiting(self: Any, event: Event) -> None:
        if (self.name, origin.get(id(event))) == (waiter, recorder):
            dropped[0] += 1
        else:
            wait(self, event)

    monkeypatch.setattr(streams, "record", recording)
    monkeypatch.setattr(streams, "wait", waiting)
    return dropped
