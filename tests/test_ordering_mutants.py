"""Each ordering rule of the swap path, broken on purpose: every mutant goes red, and the whole path stays green.

A mutant drops the waits of one stream on another's events, reclaims without a wait, copies in the middle of an op, keys
storages by address, or skips the version check. The simulator must say so: with its race detector, and for the waits again
with the detector off, as wrong numbers or a lost source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import SPECS
from chameleon_mm.device.protocols import Event
from chameleon_mm.device.sim import SimStream
from chameleon_mm.device.sim.stream import SimEvent
from chameleon_mm.executor import Executor, ProtectedStorages, SwappedView
from chameleon_mm.executor.claims import Claim
from chameleon_mm.executor.saved_bytes import SavedBytes
from chameleon_mm.executor.stored import Place, SavedStorage
from chameleon_mm.policy import DefaultRule, Limits, SaveFacts
from chameleon_mm.transfer import Thresholds

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # A mutant also breaks what runs when its graph is dropped, where an error can only be reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SLOW_LINK = dataclasses.replace(SPECS["h200"], h2d_gbps=0.5, d2h_gbps=0.5, duplex_gbps=0.8)
"""So slow that no copy is ever complete by luck when somebody should wait for it."""

BYTES = 64 * 1024

RED = (cm.SimRaceError, cm.SimLifetimeError, AssertionError)


def sim(*, check_races: bool) -> cm.SimDevice:
    return cm.SimDevice(SLOW_LINK, check_races=check_races)


def executor(device: cm.SimDevice, pool: cm.PinnedPool, *, leaving_bytes: int | None = 0) -> Executor:
    """With `leaving_bytes=0` compute waits for every copy out at the next hook; None leaves them for the end."""
    return Executor(
        device,
        pool,
        rule=DefaultRule(min_bytes=0),
        limits=Limits(leaving_bytes=leaving_bytes, ahead_bytes=1 << 20),
        protected=ProtectedStorages(),
        thresholds=Thresholds.direct(),
    )


def one_training_step(device: cm.SimDevice) -> None:
    """Forward, backward and again, on one stream; the gradients must be eager's."""
    pool = cm.PinnedPool("4MiB", device=device)
    swapper = executor(device, pool)
    for _ in range(2):
        with device.compute():
            x = torch.randn(128, 128, requires_grad=True)
            (expected,) = torch.autograd.grad(_chain(x).sum(), x)
            with torch.autograd.graph.saved_tensors_hooks(swapper.save, swapper.use):
                out = _chain(x).sum()
            (got,) = torch.autograd.grad(out, x)
            device.synchronize()
            assert torch.equal(got, expected)
            del out


def _chain(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x * 1.5).exp() - 1
    return x


def host_copy_read_from_another_stream(device: cm.SimDevice) -> None:
    """Saved and reclaimed on one compute stream, used on another that knows nothing of the first one's waits."""
    swapper = executor(device, cm.PinnedPool("1MiB", device=device))
    other = device.new_compute_stream("other")
    with device.compute():
        kept = torch.randn(BYTES // 4)
        handle = _saved(swapper, kept.clone())
        seen_by_other = device.current_stream().record()
        other.wait(seen_by_other)
        swapper.save(torch.randn(8, requires_grad=True))  # queues the copy out
        handle.claim.saved.reclaim()
        assert handle.claim.saved.place is Place.ON_HOST
        with device.stream(other):
            got = swapper.use(handle) + 0
        device.synchronize()
        assert torch.equal(got, kept)


def host_block_reused_from_another_stream(device: cm.SimDevice) -> None:
    """A block whose last use was a copy back that only another stream waited for is filled again from the first."""
    swapper = executor(device, cm.PinnedPool(BYTES, device=device))
    other = device.new_compute_stream("other")
    with device.compute():
        kept = torch.randn(BYTES // 4)
        first = _saved(swapper, kept.clone())
        swapper.save(torch.randn(8, requires_grad=True))
        first.claim.saved.reclaim()
        other.wait(device.current_stream().record())
        with device.stream(other):
            got = swapper.use(first) + 0
            del first
        second = _saved(swapper, torch.randn(BYTES // 4))
        swapper.save(torch.randn(8, requires_grad=True))
        second.claim.saved.reclaim()
        device.synchronize()
        assert torch.equal(got, kept)


def _saved(swapper: Executor, t: Tensor) -> SwappedView:
    """Save `t` as an op would whose end the next hook can see: the sequence number moves on."""
    handle = swapper.save(t)
    assert isinstance(handle, SwappedView)
    torch.ones(1, requires_grad=True).exp()
    return handle


WAITS: dict[tuple[str, str], Callable[[cm.SimDevice], None]] = {
    ("d2h", "compute"): one_training_step,  # Note [Swap-out]: the source was written
    ("compute", "d2h"): one_training_step,  # Note [Reclaim]: the source was read before its block is reused
    ("h2d", "compute"): one_training_step,  # Note [Swap-in]: the destination's earlier owner is done
    ("compute", "h2d"): one_training_step,  # Note [Swap-in]: the bytes arrived
    ("h2d", "d2h"): host_copy_read_from_another_stream,  # Note [Swap-in]: the host copy is whole
    ("d2h", "h2d"): host_block_reused_from_another_stream,  # Note [Host block]: its last reader is done
}


def drop_waits(monkeypatch: pytest.MonkeyPatch, waiter: str, recorder: str) -> list[int]:
    """Make every wait of `waiter`-named streams on events of `recorder`-named ones do nothing. Counts them in the list."""
    origin: dict[int, str] = {}
    events: list[Event] = []
    dropped = [0]
    record, wait = SimStream.record, SimStream.wait

    def recording(self: SimStream, *, timed: bool = False) -> SimEvent:
        event = record(self, timed=timed)
        events.append(event)  # keeps its id from being used again
        origin[id(event)] = self.name
        return event

    def waiting(self: SimStream, event: Event) -> None:
        if (self.name, origin.get(id(event))) == (waiter, recorder):
            dropped[0] += 1
        else:
            wait(self, event)

    monkeypatch.setattr(SimStream, "record", recording)
    monkeypatch.setattr(SimStream, "wait", waiting)
    return dropped


@pytest.mark.parametrize(
    "scenario", [one_training_step, host_copy_read_from_another_stream, host_block_reused_from_another_stream]
)
@pytest.mark.parametrize("check_races", [True, False])
def test_the_path_as_it_is_stays_green(scenario: Callable[[cm.SimDevice], None], check_races: bool) -> None:
    scenario(sim(check_races=check_races))


@pytest.mark.parametrize(("waiter", "recorder"), WAITS)
def test_without_one_wait_the_race_is_named(waiter: str, recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = drop_waits(monkeypatch, waiter, recorder)
    with pytest.raises(cm.SimRaceError, match="not ordered after"):
        WAITS[waiter, recorder](sim(check_races=True))
    assert dropped[0] > 0


WRONG_NUMBERS = [
    ("compute", "d2h"),
    ("compute", "h2d"),
]
"""Waits whose lack the simulator shows as bytes even with the detector off. The others are also covered by chance here (by a
wait on another stream, or because the simulator reuses no memory): only the detector can show them."""


@pytest.mark.parametrize(("waiter", "recorder"), WRONG_NUMBERS)
def test_without_one_wait_the_numbers_are_wrong(waiter: str, recorder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_waits(monkeypatch, waiter, recorder)
    with pytest.raises((cm.SimLifetimeError, AssertionError)):
        WAITS[waiter, recorder](sim(check_races=False))


def test_reclaiming_early_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def reclaim(self: SavedStorage) -> None:
        assert self._out is not None
        self._tools.transfer.issue_out(self._out)
        self._drop_device()

    monkeypatch.setattr(SavedStorage, "reclaim", reclaim)
    with pytest.raises(RED):
        one_training_step(sim(check_races=True))


def test_a_host_block_without_its_event_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    release = cm.PinnedBlock.release
    monkeypatch.setattr(cm.PinnedBlock, "release", lambda self, after=None: release(self))
    with pytest.raises(RED):
        host_block_reused_from_another_stream(sim(check_races=True))


def test_copying_in_the_middle_of_an_op_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.rrelu(x * 1, 0.1, 0.9, training=True)

    def step() -> None:
        device = sim(check_races=True)
        swapper = executor(device, cm.PinnedPool("4MiB", device=device))
        with device.compute():
            x = torch.randn(64, 64, requires_grad=True)
            (expected,) = torch.autograd.grad(_chain(noisy(x)).sum(), x)
            junk = [torch.full((64, 64), float(n)) for n in range(64)]  # or memory used again still holds the same noise
            del junk
            with torch.autograd.graph.saved_tensors_hooks(swapper.save, swapper.use):
                out = _chain(noisy(x)).sum()
            (got,) = torch.autograd.grad(out, x)
        assert torch.equal(got, expected)

    step()
    numbers = iter(range(1_000_000))
    monkeypatch.setattr("chameleon_mm.executor.op_number.sequence_nr", lambda: next(numbers))  # every hook: "the op is over"
    with pytest.raises(RED):
        step()


def test_keying_by_address_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two storages in turn at one address: the second must not be taken for the first."""

    def two_at_one_address() -> None:
        device = sim(check_races=True)
        swapper = executor(device, cm.PinnedPool("4MiB", device=device))
        with device.compute():
            memory = bytearray(BYTES)  # what an allocator would hand out twice
            first = torch.frombuffer(memory, dtype=torch.float32).normal_()
            kept, address = first.clone(), first.data_ptr()
            one = _saved(swapper, first)
            swapper.save(torch.randn(8, requires_grad=True))
            one.claim.saved.reclaim()
            del first
            second = torch.frombuffer(memory, dtype=torch.float32).normal_()
            assert second.data_ptr() == address
            two = _saved(swapper, second)
            assert torch.equal(swapper.use(one), kept)
            assert torch.equal(swapper.use(two), second)

    two_at_one_address()
    by_address: dict[int, Claim] = {}

    def claim(self: Executor, t: Tensor, saved_bytes: SavedBytes, facts: SaveFacts) -> Claim:
        key = t.untyped_storage().data_ptr()
        if key not in by_address:
            by_address[key] = real_claim(self, t, saved_bytes, facts)
        return by_address[key]

    real_claim = Executor._claim
    monkeypatch.setattr(Executor, "_claim", claim)
    with pytest.raises(RED):
        two_at_one_address()


def test_without_the_version_check_a_wrong_gradient_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def written_after_save(manager: AbstractContextManager[object], device: cm.SimDevice) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        with device.compute(), manager:
            y = x * 2
            out = y.sin()
            y.add_(1)
            return torch.autograd.grad(out.sum(), x)[0]

    device = sim(check_races=True)
    ours = cm.save_on_cpu(device=device, min_bytes=0, pool=cm.PinnedPool("1MiB", device=device))
    for manager in (nullcontext(), ours):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            written_after_save(manager, device)
    monkeypatch.setattr(SwappedView, "check_version", lambda self: None)
    assert not torch.equal(written_after_save(ours, device), 2 * torch.cos(torch.full((64,), 2.0)))
