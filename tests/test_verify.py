"""Verify mode: one flipped bit in the host copy is found and named; without it nothing is in the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.executor.stored import SavedStorage
from chameleon_mm.executor.verify import checksum

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


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 4099])
def test_the_checksum_sees_every_byte_and_order(nbytes: int, device: Device) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device.torch_device)
    original = int(checksum(data))
    assert int(checksum(data.clone())) == original
    for place in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        changed = data.clone()
        changed[place] ^= 0x10
        assert int(checksum(changed)) != original
    if nbytes >= 16:
        swapped = torch.cat([data[8:16], data[:8], data[16:]])
        assert torch.equal(swapped, data) or int(checksum(swapped)) != original
