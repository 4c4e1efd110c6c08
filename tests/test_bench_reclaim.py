"""`bench reclaim`: the same training by each way of giving device memory back, and its curves."""

from __future__ import annotations

import pytest

from chameleon_mm import cli, native
from chameleon_mm.bench._measure import Waived
from chameleon_mm.bench._reclaim_svg import reclaim_svg
from chameleon_mm.bench.probe import reclaim_steps
from chameleon_mm.bench.probe.reclaim_steps import WAYS, Curve
from chameleon_mm.bench.reclaim import measure, table
from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.units import MIB
from tests._native import BUILDS, helper


def test_a_simulator_is_refused_and_a_share_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "reclaim", "--device", "sim"]) == 2
    assert "--device: expected a CUDA GPU, on which torch's caching allocator runs, got simulated" in capsys.readouterr().err


def test_the_picture_has_every_curve_that_there_is() -> None:
    curves = [Curve(way=way, start_bytes=0, active=[0, i * MIB], reserved=[0, 2 * i * MIB]) for i, way in enumerate(WAYS, 1)]
    text = reclaim_svg(curves, 3 * MIB, "a title")
    for words in (
        "a title",
        "no swapping",
        "copied out, record_stream",
        "session, reclaimed at hooks",
        "budget of the sessions",
    ):
        assert words in text
    assert reclaim_svg(curves, 3 * MIB, "a title") == text


@pytest.mark.gpu
def test_all_ways_train_alike_and_sessions_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim_steps, "LAYER_BYTES", 2 * MIB)
    monkeypatch.setattr(native.building, "CACHE", BUILDS / "none")
    curves, budget = measure(0.4)
    assert [curve.way for curve in curves] == list(WAYS[:-1])
    cells = table(curves, budget, CudaDevice()).rows[-1].cells
    assert all(isinstance(cell, Waived) and "chameleon-mm native" in cell.reason for cell in cells.values())
    helper("reclaim", monkeypatch)
    curves, budget = measure(0.4)
    assert [curve.way for curve in curves] == list(WAYS)
    assert len({curve.loss for curve in curves}) == 1
    assert len({len(curve.active) for curve in curves}) == 1
    unswapped, _, at_hooks, inside = (curve.peak_active_bytes - curve.start_bytes for curve in curves)
    assert max(at_hooks, inside) < unswapped
    assert inside <= at_hooks
