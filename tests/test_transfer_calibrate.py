"""Rates of the link: the simulator's figures, and a cache that trusts nothing it reads."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_mm.adaptive.link_rates import UNMEASURED_LINK, link_cost_for
from chameleon_mm.device import SPECS, CudaDevice, SimDevice
from chameleon_mm.device.sim import CostModel
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.transfer import calibrate, keep, kept
from chameleon_mm.transfer.calibrate import busy_gbps
from chameleon_mm.transfer.calibration_cache import cache_file
from tests._fakes import CountingDevice, UnsimulatedDevice, refusing


def test_the_duplex_rate_is_that_of_the_time_when_both_are_busy() -> None:
    one = [0.0, 100.0, 200.0]
    other = [50.0, 250.0, 450.0]
    # Both from 50 to 200: 1.5 pieces of the one, 150 of 200 us of a piece of the other.
    assert busy_gbps([one, other], 1_000_000) == pytest.approx((1.5 + 0.75) * 1_000_000 / 150.0 / 1e3)
    assert busy_gbps([one], 1_000_000) == pytest.approx(10.0)


ROUND = dataclasses.replace(SPECS["a100"], h2d_gbps=10.0, d2h_gbps=20.0, duplex_gbps=25.0, hbm_gbps=1000.0)


@pytest.fixture(scope="module")
def round_figures() -> dict[str, float]:
    cost = CostModel(spec=ROUND, copy_us=3.0, triton_launch_us=10.0, packed_tensor_us=0.3, event_us=0.5)
    return calibrate(SimDevice(ROUND, cost=cost))


def test_the_simulator_s_rates_are_its_links(round_figures: dict[str, float]) -> None:
    # 32 MiB pieces: 3355 and 1678 us at 10 and 20 GB/s, and 3.1 us fixed.
    assert round_figures["h2d_gbps"] == pytest.approx(10.0, rel=0.01)
    assert round_figures["d2h_gbps"] == pytest.approx(20.0, rel=0.01)
    # The first piece was issued before anything ran beside it, and keeps its own rate: hence no closer.
    assert round_figures["duplex_gbps"] == pytest.approx(25.0, rel=0.1)
    assert round_figures["duplex_gbps"] > 20.0


def test_on_the_simulator_it_is_the_same_every_time_and_leaves_nothing(no_gc: None) -> None:
    sim, again = SimDevice(), SimDevice()
    assert calibrate(sim) == calibrate(again)
    assert sim.allocated_bytes() == 0


class _Short(CountingDevice):
    """A device that pins one buffer and no more."""

    def alloc_pinned(self, nbytes: int) -> Tensor:
        if self.num_pinned:
            raise HostMemoryExhausted("pinned memory: expected 32 MiB, got nothing")
        return super().alloc_pinned(nbytes)


def test_pinned_memory_goes_back() -> None:
    device = CountingDevice()
    calibrate(device)
    assert (device.num_pinned, device.chunks) == (2, {})


def test_a_machine_without_the_memory_says_so_and_keeps_none() -> None:
    device = _Short()
    with pytest.raises(HostMemoryExhausted):
        calibrate(device)
    assert (device.num_pinned, device.chunks) == (1, {})
    small, counted = SimDevice(hbm_bytes="40MiB"), CountingDevice()
    counted._machine.ledger.capacity = small.capacity
    with pytest.raises(torch.OutOfMemoryError):
        calibrate(counted)
    assert (counted.num_pinned, counted.chunks) == (2, {})


# --------------------------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def home(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> FilePath:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


RATES = {"h2d_gbps": 50.0, "d2h_gbps": 49.0, "duplex_gbps": 80.0}


def test_what_was_kept_is_there_for_its_device_driver_and_torch_alone(home: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    device = UnsimulatedDevice("CUDA driver 13.0, runtime 13.0")
    assert kept(device, "link") is None
    assert keep(device, "link", RATES)
    assert kept(device, "link") == RATES
    assert kept(device, "other") is None
    assert kept(UnsimulatedDevice("CUDA driver 13.1, runtime 13.0"), "link") is None
    names = [file.name for file in (home / ".cache" / "chameleon_mm").iterdir()]
    assert names == ["link-simulated-h200-cuda-driver-13.0-runtime-13.0.json"]  # and no half-written one
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert kept(device, "link") is None


def test_what_is_simulated_is_neither_kept_nor_found(home: FilePath) -> None:
    assert not keep(SimDevice(), "link", RATES)
    assert list(home.iterdir()) == []
    assert keep(UnsimulatedDevice("simulated"), "link", RATES)
    assert kept(SimDevice(), "link") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", "\udcff"])
def test_a_file_that_cannot_be_read_is_passed_over(home: FilePath, text: str, caplog: pytest.LogCaptureFixture) -> None:
    device = UnsimulatedDevice()
    keep(device, "link", RATES)
    cache_file(device, "link").write_bytes(text.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        assert kept(device, "link") is None
    assert "is passed over, as it cannot be read" in caplog.text


@pytest.mark.parametrize(
    "change", [{"h2d_gbps": 0.0}, {"h2d_gbps": "fast"}, {"d2h_gbps": None}, {"d2h_gbps": float("nan")}, {"duplex_gbps": None}]
)
def test_rates_that_were_tampered_with_are_passed_over(home: FilePath, change: dict[str, Any]) -> None:
    device = UnsimulatedDevice()
    keep(device, "link", RATES)
    assert link_cost_for(device).h2d_gbps == 50.0
    keep(device, "link", {**RATES, **change})
    assert link_cost_for(device) == UNMEASURED_LINK


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(home: FilePath, caplog: pytest.LogCaptureFixture) -> None:
    (home / ".cache").write_text("", encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="chameleon_mm"):
        assert not keep(UnsimulatedDevice(), "link", RATES)
    assert "cannot be kept" in caplog.text


def test_a_write_that_fails_leaves_the_old_file(home: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    device = UnsimulatedDevice()
    keep(device, "link", RATES)
    monkeypatch.setattr(FilePath, "replace", refusing(OSError, 28, "No space left on device"))
    assert not keep(device, "link", {**RATES, "h2d_gbps": 1.0})
    assert kept(device, "link") == RATES
    assert len(list((home / ".cache" / "chameleon_mm").iterdir())) == 1


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilePath, "expanduser", refusing(RuntimeError, "Could not determine home directory."))
    assert not keep(UnsimulatedDevice(), "link", RATES)
    assert kept(UnsimulatedDevice(), "link") is None


# ----------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_a_gpu_is_measured_and_remembered(home: FilePath) -> None:
    device = CudaDevice()
    rates = calibrate(device)
    assert min(rates["h2d_gbps"], rates["d2h_gbps"]) > 1
    assert rates["duplex_gbps"] > 0
    assert keep(device, "link", rates)
    assert kept(device, "link") == rates
