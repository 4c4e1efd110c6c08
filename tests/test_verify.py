"""Verify mode: one flipped bit in the host copy is found and named; without it nothing is in the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.saved.saved_storage import SavedStorage
from chameleon_mm.saved.verify import Checksums
from tests._random_models import far_ahead, planning, train

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
        assert self._block is not None and self._out is not None and self._out.done is not None
        self._out.done.synchronize()
        self._block.buffer[1234] ^= 1
        return swap_in(self, compute)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(SavedStorage, "swap_in", flipped)
    with pytest.raises(cm.SwapMismatch, match=r"\(64, 65\) torch.float32, result of \w+Backward0, saved in step 1"):
        step(device, verify=True)
    step(device, verify=False)  # nobody looks: this is what verify mode is for


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 4099, 20_003])
def test_the_checksum_sees_every_byte_and_order(nbytes: int, device: Device) -> None:
    checksum = Checksums(device, 16 << 10).of  # pieces of 6 KiB
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


def test_checksums_are_kept_beyond_those_that_there_is_room_for(device: Device) -> None:
    checksums = Checksums(device, 16 << 10)
    data = torch.arange(700, device=device.torch_device).view(700, 1)
    kept = [checksums.start(row.view(torch.uint8)) for row in data]
    assert [one.read() for one in kept] == [checksums.of(row.view(torch.uint8)) for row in data]
    assert len({one.read() for one in kept}) == len(kept)
    del kept
    again = checksums.start(data[5].view(torch.uint8))
    assert again.read() == checksums.of(data[5].view(torch.uint8))


def test_checksums_take_nothing_but_their_scratch_memory(sim: cm.SimDevice) -> None:
    with sim.compute():
        checksums = Checksums(sim, 16 << 10)
        data = torch.zeros(1 << 20, dtype=torch.uint8)
        checksums.prepare()
        before = sim.read_memory()
        sim.reset_peaks()
        kept = checksums.start(data)
        assert checksums.of(data) == kept.read() == 0
        after = sim.read_memory()
    assert after == before
    assert sim.peak_allocated_bytes() == after.allocated_bytes


@pytest.mark.parametrize("seed", range(6))
def test_a_verified_session_keeps_the_budget(seed: int) -> None:
    """Budgets at which there is a plan without verifying, and the bytes that the scratch memory takes."""
    for share in (0.7, 0.9):
        plain, _ = train(seed, far_ahead(), steps=1)
        budget = int(plain[0].peak_bytes * share)
        unverified, _ = train(seed, device := far_ahead(), planning(device, budget))
        if unverified[-1].plan is None:
            continue  # the budget is too small for any plan
        budget += 16 << 10
        verified, parameters = train(seed, device := far_ahead(), planning(device, budget, verify=True))
        assert all(step.peak_bytes <= budget for step in verified[1:])
        assert verified[0].peak_bytes <= budget or unverified[0].peak_bytes > budget - (16 << 10)
        _, expected = train(seed, far_ahead())
        assert all(map(torch.equal, parameters, expected))


def test_a_budget_that_verifying_leaves_nothing_of_is_refused(sim: cm.SimDevice) -> None:
    with sim.compute():
        weight = torch.randn(64, 64)
        session = cm.SwapSession(hbm_budget=sim.allocated_bytes() + (16 << 10), device=sim, verify=True)
        with pytest.raises(cm.InfeasibleBudget, match=r"16\.0 KiB of it for verify=True"), session:
            pass
    assert weight is not None
