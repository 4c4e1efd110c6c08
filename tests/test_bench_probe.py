"""The smoke checks on the simulator, and what of the probe needs no GPU: isolation, time, the allocator's history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chameleon_mm.bench import gpu_smoke
from chameleon_mm.bench.probe import command as probe
from chameleon_mm.bench.probe import costs
from chameleon_mm.bench.probe.copies import random_bytes
from chameleon_mm.bench.probe.memory import gaps_us
from chameleon_mm.device import Device, SimDevice
from chameleon_mm.units import KIB, MIB


def test_smoke_swaps_a_step_and_copies_each_way(sim: SimDevice, tmp_path: Path) -> None:
    target = tmp_path / "smoke.json"
    record = gpu_smoke.smoke(sim, target, width=128, rows=4096)
    assert record["exact"] is True, record["headline"]
    assert record["step"]["report"]["bytes_swapped_out"] > 0
    assert record["step"]["swapped_peak_bytes"] <= record["step"]["peak_bytes"] // 2
    assert record["copies"]["h2d"]["simulated"] is True
    assert "bit-identical" in record["headline"]
    assert json.loads(target.read_text(encoding="utf-8")) == record


def test_smoke_copies_that_change_a_byte_are_noticed(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    new_stream = sim.new_stream

    class Flipping:
        def __init__(self, name: str) -> None:
            self._stream = new_stream(name)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._stream, attribute)

        def copy(self, dst: Tensor, src: Tensor, *, speculative: bool = False) -> None:
            self._stream.copy(dst[1:], src[1:])

    monkeypatch.setattr(sim, "new_stream", Flipping)
    assert gpu_smoke.copy_each_way(sim, 64 * KIB)["exact"] is False


def test_smoke_notices_a_step_that_changes_a_gradient(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    train = gpu_smoke._train
    runs: list[None] = []

    def second_run_differs(*arguments: Any) -> tuple[list[Tensor], int]:
        outcome, peak = train(*arguments)
        if runs:
            outcome[-1][0] = torch.nextafter(outcome[-1][0], torch.tensor(torch.inf))
        runs.append(None)
        return outcome, peak

    monkeypatch.setattr(gpu_smoke, "_train", second_run_differs)
    step = gpu_smoke.swapped_step(sim, width=128, rows=4096)
    assert step["exact"] is False
    assert step["headline"].startswith("NOT bit-identical")


def test_smoke_keeps_what_a_check_raised(sim: SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Device, nbytes: int) -> dict[str, Any]:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(gpu_smoke, "copy_each_way", broken)
    record = gpu_smoke.smoke(sim, tmp_path / "smoke.json", width=128, rows=4096)
    assert record["exact"] is False
    assert record["copies"]["error"] == "RuntimeError: the link is down"
    assert record["step"]["exact"] is True  # the other check still ran


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("main", [gpu_smoke.main, probe.main])
def test_without_cuda_there_is_a_message_and_no_record(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "record.json"
    assert main(["--json", str(target)]) == 1
    assert "expected a CUDA GPU" in " ".join(capsys.readouterr().out.split())
    assert not target.exists()


def test_every_probe_item_is_isolated() -> None:
    kept: list[list[str]] = []

    def broken() -> dict[str, Any]:
        raise ZeroDivisionError("no such rate")

    items = {"first": lambda: {"a": 1}, "broken": broken, "last": lambda: {"b": 2}}
    answers = probe.ask(items, 60, lambda so_far: kept.append(list(so_far)))
    assert kept == [["first"], ["first", "broken"], ["first", "broken", "last"]]
    assert (answers["first"]["a"], answers["last"]["b"]) == (1, 2)
    assert answers["broken"]["error"] == "ZeroDivisionError: no such rate"
    assert "in broken" in answers["broken"]["where"]
    assert probe.headline(answers) == "2 of 3 answered; errors: broken"


def test_probe_items_out_of_time_are_waived() -> None:
    now = iter([0.0, 0.0, 50.0, 50.0])
    items: Mapping[str, probe.Item] = {"slow": dict, "late": lambda: {"ran": True}}
    answers = probe.ask(items, 40, lambda so_far: None, clock=lambda: next(now))
    assert answers["slow"] == {"took_s": 50.0}
    assert answers["late"] == {"waived": "no time left: 50 of 40 s were over"}
    assert probe.headline(answers) == "1 of 2 answered; waived: late"


def test_gaps_are_paired_by_address() -> None:
    def entry(action: str, addr: int, time_us: int, size: int = MIB) -> dict[str, Any]:
        return {"action": action, "addr": addr, "time_us": time_us, "size": size}

    history = [
        entry("alloc", 1, 0),
        entry("free_requested", 1, 10),
        entry("free_requested", 2, 11),
        entry("free_requested", 3, 12, size=512),  # too small to count
        entry("free_completed", 3, 13, size=512),
        entry("free_completed", 2, 14),
        entry("free_completed", 9, 15),  # asked for before the history began
        entry("alloc", 2, 16),
        entry("free_requested", 2, 20),  # the same address again, never completed
        entry("free_completed", 1, 110),
    ]
    assert gaps_us(history, MIB) == [3.0, 100.0]


def test_pass_through_mode_changes_nothing() -> None:
    x = torch.rand(8)
    with costs.PassThrough():  # type: ignore[no-untyped-call]  # the constructor is torch's, which has no types
        assert torch.equal(torch.mul(x, x), x * x)


def test_random_bytes_are_random_to_the_last() -> None:
    made = random_bytes(MIB + 3)
    assert (made.dtype, tuple(made.shape), made.is_contiguous()) == (torch.uint8, (MIB + 3,), True)
    assert len(set(made[:4096].tolist())) > 200
    assert torch.equal(made[MIB:], made[:3])
