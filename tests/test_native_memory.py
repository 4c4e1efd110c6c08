"""Reading of the allocator's memory in C++ (`device/memory.cpp`), compared with torch's own."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chameleon_mm.device import native
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.device.cuda.cuda_device import reader, torch_reader
from chameleon_mm.units import KIB, MIB
from tests._fakes import refusing
from tests._native import BUILDS, helper

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_gc")]


def test_it_reads_what_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    module, rng, held = helper("memory", monkeypatch), Random(0), list[torch.Tensor]()
    for step in range(200):
        if held and rng.random() < 0.4:
            held.pop(rng.randrange(len(held)))
        else:
            held.append(torch.empty(rng.choice((1, 512, 3 * KIB, 2 * MIB, 21 * MIB)), dtype=torch.uint8, device="cuda"))
        if step == 100:
            torch.cuda.reset_peak_memory_stats()
        elif step == 150:
            torch.cuda.reset_accumulated_memory_stats()
        found = torch.cuda.memory_stats()
        expected = tuple(found[f"allocated_bytes.all.{name}"] for name in ("current", "allocated", "peak"))
        assert module.read(torch.cuda.current_device()) == (*expected, 0) == torch_reader(torch.cuda.current_device())
    assert expected[0] < expected[2]  # each of the three says something else
    assert expected[1] != expected[2]


@pytest.mark.parametrize("built", [True, False])
def test_a_device_reads_by_it_where_it_is_built(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    if built:
        module = helper("memory", monkeypatch)

        def counted(index: int) -> Any:
            calls.append(index)
            return module.read(index)

        monkeypatch.setattr(native, "load", lambda name: SimpleNamespace(read=counted))
    else:
        monkeypatch.setattr(native, "CACHE", BUILDS / "none")
    device = CudaDevice()
    calls.clear()
    before = device.read_memory()
    block = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    after = device.read_memory()
    assert after.allocated_bytes - before.allocated_bytes == after.cumulative_bytes - before.cumulative_bytes == MIB
    assert device.allocated_bytes() == torch.cuda.memory_allocated() >= block.nbytes
    assert device.peak_allocated_bytes() == after.peak_bytes == torch.cuda.max_memory_allocated()
    assert calls == [device.index] * 4 * built


def test_an_allocator_that_counts_elsewhere_is_read_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda name: SimpleNamespace(read=lambda index: (0, 0, 0, 0)))
    block = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert reader(torch.cuda.current_device())()[0] >= block.nbytes


def test_a_helper_that_cannot_read_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read = refusing(RuntimeError, "Allocator not initialized for device")
    monkeypatch.setattr(native, "load", lambda name: SimpleNamespace(read=read))
    assert reader(torch.cuda.current_device())() == torch_reader(torch.cuda.current_device())


def test_what_is_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = helper("memory", monkeypatch)
    with pytest.raises(RuntimeError, match="device"):
        module.read(99)
    for index in (-1, 128, 256, 1 << 40, 1 << 70):  # torch's own index of a device has 8 bits
        with pytest.raises((ValueError, TypeError), match=r"index|arguments"):
            module.read(index)
    with pytest.raises(TypeError):
        module.read("0")


def test_a_reading_in_the_middle_of_a_reading_is_no_reset_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's, or that of a finaliser which the collector runs in the middle of torch's own reading."""
    monkeypatch.setattr(native, "CACHE", BUILDS / "none")
    device, held = CudaDevice(), list[torch.Tensor]()
    begun = device.read_memory().cumulative_bytes
    read = device._read_allocated

    def reads(*, inner: int) -> Any:
        found = read()
        if inner:
            held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
            device._read_allocated = lambda: reads(inner=inner - 1)
            expected = begun + MIB * len(held)
            assert device.read_memory().cumulative_bytes == expected
        return found

    device._read_allocated = lambda: reads(inner=3)
    assert device.read_memory().cumulative_bytes == begun
    device._read_allocated = read
    assert device.read_memory().cumulative_bytes == begun + 3 * MIB
    torch.cuda.reset_accumulated_memory_stats()
    held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
    assert device.read_memory().cumulative_bytes == begun + 4 * MIB
