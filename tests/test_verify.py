"""Verify mode finds and names a flipped bit in a host copy; without it nothing is in the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.swap.checksums import PAGE_BYTES, PAGE_SLOTS, Checksums
from chameleon_mm.swap.saved_storage import SavedStorage
from tests._random_models import far_ahead, planning, seeds, train
from tests.test_compute_streams import Side

pytestmark = pytest.mark.usefixtures("no_gc")


def step(device: Device, *, verify: bool) -> tuple[Tensor, cm.SwapSession]:
    torch.manual_seed(0)
    with device.compute():
        x = torch.randn(64, 65, device=device.torch_device, requires_grad=True)
        session = cm.SwapSession(
            hbm_budget=device.allocated_bytes() + (64 << 20), host_budget="8MiB", device=device, min_bytes=0, verify=verify
        )
        with session, session.step():
            y = x
            for _ in range(3):
                y = torch.tanh(y * 1.5).exp()
            (grad,) = torch.autograd.grad(y.sum(), x)
    return grad, session


def test_verifying_changes_nothing(device: Device) -> None:
    plain, _ = step(device, verify=False)
    verified, session = step(device, verify=True)
    assert torch.equal(plain, verified)
    assert session.report().bytes_swapped_in > 0
    assert session.pool.stats().num_live == 0


def test_one_flipped_bit_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = SavedStorage.swap_in

    def flipped(self: SavedStorage, compute: object) -> torch.UntypedStorage:
        assert self.copy is not None and self.copy.block is not None and self.copy.out.done is not None
        self.copy.out.done.synchronize()
        self.copy.block.buffer[1234] ^= 1
        return swap_in(self, compute)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(SavedStorage, "swap_in", flipped)
    with pytest.raises(cm.SwapMismatch, match=r"\(64, 65\) torch.float32, result of \w+Backward0, saved in step 1"):
        step(device, verify=True)
    step(device, verify=False)  # no check: verify mode exists for this case


def checksums_on(device: Device) -> Checksums:
    return Checksums(device, cm.PinnedPool("1MiB", device=device))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 4099, 20_003])
def test_the_checksum_sees_every_byte_and_order(nbytes: int, device: Device) -> None:
    checksum = checksums_on(device).of
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device.torch_device)
    original = checksum(data)
    assert checksum(data.clone()) == original
    for place in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        changed = data.clone()
        changed[place] ^= 0x10
        assert checksum(changed) != original
    if nbytes >= 16:
        swapped = torch.cat([data[8:16], data[:8], data[16:]])
        assert torch.equal(swapped, data) or checksum(swapped) != original


def test_there_are_as_many_checksums_as_are_held(device: Device) -> None:
    """Pages are added while slots are held. A page without held slots is set to zero and used again."""
    checksums = checksums_on(device)
    data = torch.arange(PAGE_SLOTS + 100, device=device.torch_device).view(-1, 1)
    kept = [checksums.start(row.view(torch.uint8)) for row in data]
    assert checksums.nbytes == 2 * PAGE_BYTES
    assert checksums.read(kept) == [checksums.of(row.view(torch.uint8)) for row in data]
    assert len(set(checksums.read(kept))) == len(kept)
    del kept
    for _ in range(5):
        again = [checksums.start(row.view(torch.uint8)) for row in data[:PAGE_SLOTS]]
        assert checksums.read(again[5:6]) == [checksums.of(data[5].view(torch.uint8))]
        del again
    assert checksums.nbytes <= 3 * PAGE_BYTES


def test_checksums_take_nothing_but_their_pages(sim: cm.SimDevice) -> None:
    with sim.compute():
        checksums = checksums_on(sim)
        data = torch.zeros(1 << 20, dtype=torch.uint8)
        checksums.prepare()
        before = sim.read_memory()
        sim.reset_peaks()
        kept = checksums.start(data)
        assert [checksums.of(data)] == checksums.read([kept])
        after = sim.read_memory()
    assert after == before
    assert sim.peak_allocated_bytes() == after.allocated_bytes
    assert checksums.nbytes == PAGE_BYTES


def test_checksums_are_ordered_between_streams(device: Device) -> None:
    """A page is set to zero on one stream and added to on another; a read comes after both."""
    checksums = checksums_on(device)
    with device.compute():
        data = torch.randint(0, 256, (5000,), dtype=torch.uint8, device=device.torch_device)
        here = checksums.start(data)
        ready = device.current_stream().record()
        side = Side(device)
        with side.current():
            device.current_stream().wait(ready)
            there = [checksums.start(data) for _ in range(PAGE_SLOTS)]
        side.joined()
        assert len({*checksums.read([here, *there])}) == 1


@pytest.mark.parametrize("seed", seeds(2, of=range(6)))
def test_a_verified_session_keeps_the_budget(seed: int) -> None:
    """Budgets at which there is a plan without verifying, and the bytes that a page of checksums takes."""
    for share in (0.7, 0.9):
        plain, _ = train(seed, far_ahead(), steps=1)
        budget = int(plain[0].peak_bytes * share)
        unverified, _ = train(seed, device := far_ahead(), planning(device, budget))
        if unverified[-1].plan is None:
            continue  # the budget is too small for any plan
        budget += PAGE_BYTES
        verified, parameters = train(seed, device := far_ahead(), planning(device, budget, verify=True))
        assert all(step.peak_bytes <= budget for step in verified[1:])
        assert verified[0].peak_bytes <= budget or unverified[0].peak_bytes > budget - PAGE_BYTES
        _, expected = train(seed, far_ahead())
        assert all(map(torch.equal, parameters, expected))


def test_a_budget_that_verifying_leaves_nothing_of_is_refused(sim: cm.SimDevice) -> None:
    with sim.compute():
        weight = torch.randn(64, 64)
        session = cm.SwapSession(hbm_budget=sim.allocated_bytes() + PAGE_BYTES, device=sim, verify=True)
        with pytest.raises(cm.InfeasibleBudget, match=r"4\.00 KiB of it for verify=True"), session:
            pass
    assert weight is not None
