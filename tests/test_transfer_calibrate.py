"""Calibration: thresholds from made-up curves, the simulator's figures exactly, and a cache that trusts nothing it reads."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_mm import SwapSession, save_on_cpu
from chameleon_mm.device import SPECS, CudaDevice, SimDevice
from chameleon_mm.device.sim import CostModel
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.transfer import (
    Calibration,
    CalibrationCache,
    CurvePoint,
    Path,
    Thresholds,
    calibrate,
    thresholds_for,
    thresholds_of,
)
from chameleon_mm.transfer.calibrate import SIZES_BYTES, busy_gbps
from chameleon_mm.units import KIB, MIB
from tests._fakes import CountingDevice, UnsimulatedDevice, refusing

MOVING = (Path.PACK, Path.DIRECT)


def _point(path: Path, nbytes: int, *, cost_us: float) -> CurvePoint:
    """A measurement whose cost per copy is `cost_us`, half on the link and half on the host."""
    return CurvePoint(path=path, nbytes=nbytes, count=1, gbps=nbytes / (cost_us / 2) / 1e3, host_us=cost_us / 2)


def _curve(cost_us: Callable[[Path, int], float]) -> list[CurvePoint]:
    return [_point(path, nbytes, cost_us=cost_us(path, nbytes)) for nbytes in SIZES_BYTES for path in MOVING]


# ---------------------------------------------------------------------------------------------------------------- thresholds


def test_a_path_ends_where_a_plainer_one_costs_a_tenth_more_at_most() -> None:
    def cost_us(path: Path, nbytes: int) -> float:
        # Per copy 1 and 3 us, and a us for each 10_000 bytes: PACK ends once 2 us are a tenth of it.
        return {Path.PACK: 1.0, Path.DIRECT: 3.0}[path] + nbytes / 10_000

    # 3 + x <= 1.1 (1 + x) from x = 19, 190_000 bytes.
    assert thresholds_of(_curve(cost_us)) == Thresholds(pack_below_bytes=256 * KIB)


def test_a_crossing_that_does_not_last_is_none() -> None:
    def cost_us(path: Path, nbytes: int) -> float:
        return 2.0 if path is Path.PACK and nbytes >= 64 * KIB and nbytes != 128 * KIB else 4.0

    assert thresholds_of(_curve(cost_us)).pack_below_bytes == SIZES_BYTES[-1]


def test_a_path_that_is_never_better_serves_nothing() -> None:
    assert thresholds_of(_curve(lambda path, nbytes: 5.0)) == Thresholds(stay_below_bytes=4 * KIB, pack_below_bytes=4 * KIB)


def test_beyond_the_largest_size_nothing_is_packed() -> None:
    costs = {Path.PACK: 1.0, Path.DIRECT: 100.0}
    assert thresholds_of(_curve(lambda path, nbytes: costs[path])).pack_below_bytes == SIZES_BYTES[-1]


def test_host_time_counts_as_much_as_the_link_s() -> None:
    """Equal rates: the path that spares the host serves until the others' host time is a tenth of the whole."""
    curve = [
        CurvePoint(path=path, nbytes=nbytes, count=1, gbps=50.0, host_us=0.0 if path is Path.PACK else 2.0)
        for nbytes in SIZES_BYTES
        for path in MOVING
    ]
    # 2 us are a tenth of 20 us on the link: of 1e6 bytes at 50 GB/s.
    assert thresholds_of(curve).pack_below_bytes == MIB


# --------------------------------------------------------------------------------------------------------------------- rates


def test_the_duplex_rate_is_that_of_the_time_when_both_are_busy() -> None:
    one = [0.0, 100.0, 200.0]
    other = [50.0, 250.0, 450.0]
    # Both from 50 to 200: 1.5 pieces of the one, 150 of 200 us of a piece of the other.
    assert busy_gbps([one, other], 1_000_000) == pytest.approx((1.5 + 0.75) * 1_000_000 / 150.0 / 1e3)
    assert busy_gbps([one], 1_000_000) == pytest.approx(10.0)


ROUND = dataclasses.replace(SPECS["a100"], h2d_gbps=10.0, d2h_gbps=20.0, duplex_gbps=25.0, hbm_gbps=1000.0)


@pytest.fixture(scope="module")
def round_figures() -> Calibration:
    cost = CostModel(spec=ROUND, copy_us=3.0, triton_launch_us=10.0, packed_tensor_us=0.3, event_us=0.5)
    return calibrate(SimDevice(ROUND, cost=cost), rounds=1)


def test_the_simulator_s_curve_is_what_its_prices_make(round_figures: Calibration) -> None:
    points = {(point.path, point.nbytes): point for point in round_figures.curve}
    assert list(points) == [(path, nbytes) for nbytes in SIZES_BYTES for path in MOVING]
    for nbytes in SIZES_BYTES:
        count = points[Path.DIRECT, nbytes].count
        assert count == min(64, 8 * MIB // nbytes)
        assert points[Path.DIRECT, nbytes].host_us == pytest.approx(3.0)
        # A launch, an event, a wait and a copy for all of them.
        assert points[Path.PACK, nbytes].host_us == pytest.approx((10.0 + 0.5 + 0.5 + 3.0) / count + 0.3)
    # 4 MiB: 209.7 us at 20 GB/s and 3.1 us fixed, twice; the host's wait and first call come before.
    elapsed_us = 0.5 + 3.0 + 2 * (3.1 + 4 * MIB / 20_000)
    assert points[Path.DIRECT, 4 * MIB].gbps == pytest.approx(8 * MIB / elapsed_us / 1e3)


def test_the_simulator_s_rates_are_its_links(round_figures: Calibration) -> None:
    # 32 MiB pieces: 3355 and 1678 us at 10 and 20 GB/s, and 3.1 us fixed.
    assert round_figures.h2d_gbps == pytest.approx(10.0, rel=0.01)
    assert round_figures.d2h_gbps == pytest.approx(20.0, rel=0.01)
    # The first piece was issued before anything ran beside it, and keeps its own rate: hence no closer.
    assert round_figures.duplex_gbps == pytest.approx(25.0, rel=0.1)
    assert round_figures.duplex_gbps > 20.0


def test_on_the_simulator_it_is_the_same_every_time_and_leaves_nothing(no_gc: None) -> None:
    sim, again = SimDevice(), SimDevice()
    first = calibrate(sim, rounds=1)
    assert calibrate(again, rounds=1) == first
    assert (first.simulated, first.device, first.driver) == (True, "simulated H200", "simulated")
    assert first.versions["torch"] == torch.__version__
    assert sim.allocated_bytes() == 0
    assert first.thresholds.stay_below_bytes <= first.thresholds.pack_below_bytes


class _Short(CountingDevice):
    """A device that pins one buffer and no more."""

    def alloc_pinned(self, nbytes: int) -> Tensor:
        if self.num_pinned:
            raise HostMemoryExhausted("pinned memory: expected 32 MiB, got nothing")
        return super().alloc_pinned(nbytes)


def test_pinned_memory_goes_back() -> None:
    device = CountingDevice()
    calibrate(device, budget_s=1e-9)  # one round nonetheless
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


@pytest.mark.parametrize("wrong", [{"budget_s": 0.0}, {"budget_s": -1.0}, {"budget_s": float("nan")}, {"rounds": 0}])
def test_no_budget_and_no_rounds_are_refused(sim: SimDevice, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="calibrate: expected budget_s above 0 and a round or more"):
        calibrate(sim, **wrong)


# --------------------------------------------------------------------------------------------------------------------- cache


def _real(driver: str = "CUDA driver 13.0, runtime 13.0") -> UnsimulatedDevice:
    return UnsimulatedDevice(driver)


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return calibrate(_real(), rounds=1)


def test_what_was_stored_is_loaded_for_its_device_and_driver_alone(tmp_path: FilePath, measured: Calibration) -> None:
    cache = CalibrationCache(tmp_path / "not" / "there yet")
    assert cache.load(_real()) is None
    assert cache.store(measured)
    assert cache.load(_real()) == measured
    assert CalibrationCache(str(cache.path)).load(_real()) == measured
    assert cache.load(_real("CUDA driver 13.1, runtime 13.0")) is None
    names = [file.name for file in cache.path.iterdir()]
    assert names == ["calibration-simulated-h200-cuda-driver-13.0-runtime-13.0.json"]  # and no half-written one


def test_get_measures_once(tmp_path: FilePath, measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(device: SimDevice) -> Calibration:
        calls.append(device)
        return measured

    monkeypatch.setattr("chameleon_mm.transfer.calibration_cache.calibrate", counted)
    cache = CalibrationCache(tmp_path)
    assert cache.get(_real()) == cache.get(_real()) == measured
    assert len(calls) == 1


def test_a_simulated_calibration_is_neither_stored_nor_loaded(tmp_path: FilePath, measured: Calibration) -> None:
    cache = CalibrationCache(tmp_path)
    assert not cache.store(dataclasses.replace(measured, simulated=True))
    assert list(tmp_path.iterdir()) == []
    cache.store(dataclasses.replace(measured, driver="simulated"))
    assert cache.load(SimDevice()) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", "{}", '{"schema": "another/1"}', '{"schema": "chameleon_mm.calibration/1"}', "\udcff",
    ],
)  # fmt: skip
def test_a_file_that_is_no_calibration_is_passed_over(tmp_path: FilePath, text: str, caplog: pytest.LogCaptureFixture) -> None:
    cache, device = CalibrationCache(tmp_path), _real()
    cache.file(device.name, device.driver).write_bytes(text.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING, logger="chameleon_mm"):
        assert cache.load(device) is None
    assert "is passed over, as it cannot be read" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"h2d_gbps": 0.0}, {"h2d_gbps": "fast"}, {"thresholds": {"pack_below_bytes": 1}}, {"thresholds": None},
        {"curve": [{"path": "flight"}]}, {"curve": None}, {"unknown": 1},
    ],
)  # fmt: skip
def test_a_file_that_was_tampered_with_is_passed_over(
    tmp_path: FilePath, measured: Calibration, change: dict[str, Any]
) -> None:
    cache, device = CalibrationCache(tmp_path), _real()
    cache.store(measured)
    file = cache.file(device.name, device.driver)
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    assert cache.load(device) is None


@pytest.mark.parametrize(
    "change", [{"device": "simulated A100"}, {"driver": "another"}, {"versions": {"torch": "0.1"}}, {"simulated": True}]
)
def test_a_calibration_of_something_else_is_passed_over(
    tmp_path: FilePath, measured: Calibration, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cache, device = CalibrationCache(tmp_path), _real()
    cache.store(measured)
    file = cache.file(device.name, device.driver)
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="chameleon_mm"):
        assert cache.load(device) is None
    assert "expected one of" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(
    tmp_path: FilePath, measured: Calibration, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("", encoding="utf-8")
    assert not CalibrationCache(taken).store(measured)
    assert "cannot be kept" in caplog.text


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: FilePath, measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CalibrationCache(tmp_path)
    cache.store(measured)

    monkeypatch.setattr(FilePath, "replace", refusing(OSError, 28, "No space left on device"))
    assert not cache.store(dataclasses.replace(measured, h2d_gbps=1.0))
    assert cache.load(_real()) == measured
    assert len(list(tmp_path.iterdir())) == 1


def test_a_user_without_a_home_has_no_cache(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilePath, "expanduser", refusing(RuntimeError, "Could not determine home directory."))
    assert not CalibrationCache().store(measured)
    assert CalibrationCache().load(_real()) is None


def test_by_default_it_is_in_the_user_s_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CalibrationCache().file("a", "b") == tmp_path / ".cache" / "chameleon_mm" / "calibration-a-b.json"


# ----------------------------------------------------------------------------------------------------------------- on a GPU


def test_sessions_take_what_was_kept_for_their_device(
    tmp_path: FilePath, measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    device = _real()
    assert thresholds_for(device) == Thresholds()  # nothing was measured, and nothing is
    assert not list(tmp_path.rglob("*.json"))
    mine = dataclasses.replace(measured, thresholds=Thresholds(pack_below_bytes=8 * KIB))
    CalibrationCache().store(mine)
    assert thresholds_for(device) == mine.thresholds
    assert SwapSession("1GiB", device=device)._executor.thresholds == mine.thresholds
    assert save_on_cpu(device=device)._executor.thresholds == mine.thresholds
    given = Thresholds(pack_below_bytes=16 * KIB)
    assert SwapSession("1GiB", device=device, thresholds=given)._executor.thresholds == given


@pytest.mark.gpu
def test_a_gpu_is_measured_and_remembered(calibrates_fast: None, tmp_path: FilePath) -> None:
    device, cache = CudaDevice(), CalibrationCache(tmp_path)
    calibration = cache.get(device)
    assert (calibration.device, calibration.driver, calibration.simulated) == (device.name, device.driver, False)
    assert min(calibration.h2d_gbps, calibration.d2h_gbps) > 1
    assert calibration.duplex_gbps > 0
    assert all(point.gbps > 0 and point.host_us > 0 for point in calibration.curve)
    assert cache.load(device) == calibration
