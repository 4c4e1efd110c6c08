"""Checksums on the device: each shows every byte, and their pages are ordered between streams and used again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.swap.checksums import PAGE_BYTES, PAGE_SLOTS, Checksums
from tests.test_compute_streams import Side

pytestmark = pytest.mark.usefixtures("no_gc")


def checksums_on(device: Device) -> Checksums:
    return Checksums(device, cm.PinnedPool("1MiB", device=device))


def checksum_of(checksums: Checksums, buffer: Tensor) -> int:
    return checksums.read([checksums.start(buffer)])[0]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 4099, 20_003])
def test_the_checksum_sees_every_byte_and_order(nbytes: int, device: Device) -> None:
    def checksum(buffer: Tensor) -> int:
        return checksum_of(checksums, buffer)

    checksums = checksums_on(device)
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
    """Pages are added as slots are taken, and freed if none of theirs is held."""
    checksums = checksums_on(device)
    data = torch.arange(PAGE_SLOTS + 100, device=device.torch_device).view(-1, 1)
    kept = [checksums.start(row.view(torch.uint8)) for row in data]
    assert len(checksums._pages) == 2
    assert checksums.read(kept) == [checksum_of(checksums, row.view(torch.uint8)) for row in data]
    assert len(set(checksums.read(kept))) == len(kept)
    del kept[:PAGE_SLOTS]
    checksums.release_unused()
    assert checksums.read(kept) == [checksum_of(checksums, row.view(torch.uint8)) for row in data[PAGE_SLOTS:]]
    del kept
    checksums.release_unused()
    assert not checksums._pages


def test_checksums_take_nothing_but_their_pages(sim: cm.SimDevice) -> None:
    with sim.compute():
        checksums = checksums_on(sim)
        data = torch.zeros(1 << 20, dtype=torch.uint8)
        before = sim.read_memory()
        sim.reset_peaks()
        kept = checksums.start(data)
        assert [checksum_of(checksums, data)] == checksums.read([kept])
        after = sim.read_memory()
        assert after.allocated_bytes == before.allocated_bytes + PAGE_BYTES == sim.peak_allocated_bytes()
        assert after.cumulative_bytes == before.cumulative_bytes + PAGE_BYTES
        del kept
        checksums.release_unused()
        assert sim.allocated_bytes() == before.allocated_bytes


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
