"""Budgets as people write them: "auto", shares, percent, sizes and floats of bytes; wrong ones are one line before any work."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import chameleon_mm as cm
from chameleon_mm.api import session as session_module
from chameleon_mm.device import Device, SimDevice
from chameleon_mm.pool.host_memory import pinnable_bytes
from chameleon_mm.tools.cli import main
from chameleon_mm.units import GIB, MIB, format_size, parse_budget
from tests._programs import assert_same

WHOLE = 1000 * MIB + 7


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (0.5, WHOLE // 2), ("0.5", WHOLE // 2), ("50%", WHOLE // 2), (" 12.5 % ", WHOLE // 8), (1.0, WHOLE), ("1.0", WHOLE),
        ("100%", WHOLE), ("0.5%", WHOLE // 200), (np.float32(0.25), WHOLE // 4), (Fraction(1, 3), WHOLE // 3),
        (1, 1), ("1", 1), (1024.0, 1024), (2e10, 20_000_000_000), (0.7 * 12345678901, math.floor(0.7 * 12345678901)),
        ("20GiB", 20 * GIB), (np.int64(5), 5), (0, 0),
    ],
)  # fmt: skip
def test_a_budget_is_a_size_or_a_share(given: Any, nbytes: int) -> None:
    assert parse_budget(given, lambda: WHOLE, what="hbm_budget") == nbytes
    parse_budget(given, what="hbm_budget")


SIZE = 'hbm_budget: expected a number and B, KiB, MiB, GiB, TiB, KB, MB, GB or TB ("20GiB")'
SHARE = "hbm_budget: expected a share above 0 and at most 1 or 100 %, or bytes, got "
WRONG: list[tuple[Any, type[Exception], str]] = [
    *((given, ValueError, f'{SHARE}{given!r}; write 0.9, "90%" or "20GiB"') for given in (
        1.5, 90.0, 1023.0, -0.5, 0.0, "0.0", math.nan, math.inf, -math.inf, "110%", "0%", "-5%", "%", "nan%", "1e1%",
    )),
    ("1.5", ValueError, 'hbm_budget: expected a whole number of bytes, or a unit after it ("1.5GiB"), got \'1.5\''),
    *((given, ValueError, f'{SIZE}, a share ("90%") or "auto", got {given!r}') for given in ("Auto", "20G", "abc")),
    (-1, ValueError, "hbm_budget: expected 0 bytes or more, got -1"),
    (2.0**70, ValueError, "hbm_budget: expected less than 8 EiB"),
    (True, TypeError, "hbm_budget: expected an int of bytes or text"),
    ([1], TypeError, "hbm_budget: expected an int of bytes or text"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "said"), WRONG, ids=[repr(given) for given, *_ in WRONG])
def test_a_wrong_budget_is_one_line_before_anything_starts(
    given: Any, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as told:
        parse_budget(given, what="hbm_budget")
    assert str(told.value).startswith(said)
    assert "\n" not in str(told.value)
    monkeypatch.setattr(session_module, "pool_for", None)  # no device, no pinned memory
    for name in ("hbm_budget", "host_budget"):
        with pytest.raises(error, match=f"^{name}: "):
            cm.SwapSession(**{name: given})
        with pytest.raises(error, match=f"^{name}: "):
            cm.integrations.transformers.SwapCallback(**{name: given})


@pytest.mark.parametrize("given", [None, "auto"])
def test_auto_takes_nine_tenths_of_what_is_free_or_held_here_and_says_so_once(
    device: Device, given: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "chameleon_mm")
    if not device.simulated:  # on a GPU other processes take and free memory meanwhile
        free = torch.cuda.mem_get_info()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: free)
    session = cm.SwapSession(hbm_budget=given, device=device, host_budget="64MiB")
    capacity = device.capacity
    assert abs(session.hbm_budget - capacity * 9 // 10) <= 1
    said = [record.getMessage() for record in caplog.records if "hbm_budget" in record.getMessage()]
    how = (
        f"{format_size(session.hbm_budget)}, 90% of the {format_size(capacity)} that {device.name} has free or this process "
        f"holds there (auto: the rest is for fragmentation and memory outside of torch's allocator)"
    )
    assert said == [f"chameleon_mm: hbm_budget: {how}"]
    with session:
        session.hbm_budget = session.hbm_budget  # as the first step of `attach` does
        report = session.report()
    assert report.hbm_budget_from == how
    assert ("budget of device memory", how) in report.rows()
    assert report.to_dict()["hbm_budget_from"] == how


def test_auto_again_reads_what_is_free_now(sim: SimDevice) -> None:
    with cm.SwapSession("80%", device=sim) as session:
        before = session.hbm_budget
        assert before == math.floor(Fraction(8, 10) * sim.capacity)
        sim.capacity //= 2  # another process came
        session.hbm_budget = "auto"
        assert abs(session.hbm_budget - sim.capacity * 9 // 10) <= 1
        session.hbm_budget = 0.5
        assert session.hbm_budget == sim.capacity // 2
        assert "50% of the" in session.report().hbm_budget_from
        session.hbm_budget = "1GiB"
        assert session.report().hbm_budget_from == ""


@pytest.mark.gpu
def test_memory_of_other_processes_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device = cm.CudaDevice()
    held = torch.empty(8 * MIB, dtype=torch.uint8, device=device.torch_device)
    free, total = torch.cuda.mem_get_info(device.index)
    reserved = torch.cuda.memory_reserved(device.index)
    for others in (0, free // 3):
        monkeypatch.setattr(torch.cuda, "mem_get_info", partial(lambda left, index: (left, total), free - others))
        session = cm.SwapSession(device=device, host_budget="64MiB")
        assert abs(session.hbm_budget - (free - others + reserved) * 9 // 10) <= 1
    del held


def test_shares_of_host_memory_are_of_what_this_rank_may_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chameleon_mm.pool.host_memory.available_host_bytes", lambda: 4 * GIB)
    assert pinnable_bytes() == 4 * GIB
    for given in (0.25, "25%", "1GiB", 2.0**30):
        assert cm.SwapSession(host_budget=given, device=SimDevice()).host_budget == GIB
    for half in (None, "auto", 0.5):
        assert cm.SwapSession(host_budget=half, device=SimDevice()).host_budget == 2 * GIB
    session = cm.SwapSession(device=SimDevice())
    for again, nbytes in (("25%", GIB), ("auto", 2 * GIB), (0.75, 3 * GIB)):
        session.host_budget = again
        assert session.host_budget == nbytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for half in (None, "auto", "50%"):
        assert cm.SwapSession(host_budget=half, device=SimDevice()).host_budget == GIB // 2
    monkeypatch.setattr("chameleon_mm.pool.host_memory.available_host_bytes", lambda: 0)
    with pytest.raises(ValueError, match=r"host_budget: expected memory to take '50%' of, got none that is known; give a size"):
        cm.SwapSession(host_budget="50%", device=SimDevice())
    for auto in ("auto", None):
        with pytest.raises(ValueError, match=r"^max_bytes: expected memory to take '50%' of, got none that is known"):
            cm.PinnedPool(auto, "sim")
    assert cm.PinnedPool("1MiB", "sim").limit_bytes == MIB, "a limit in bytes is nobody's share"


def trained(attach: Callable[[nn.Module], Any]) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle, seen = attach(model), []
    for _ in range(6):
        loss = model(torch.randn(2048, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    handle and handle.detach()
    return [*seen, *(p.detach() for p in model.parameters())], handle


def test_attach_alone_moves_nothing_of_what_fits_and_trains_what_does_not() -> None:
    plain, _ = trained(lambda model: None)
    roomy, small = SimDevice(hbm_bytes="1GiB"), SimDevice(hbm_bytes="34MiB")
    for device, fits in ((roomy, True), (small, False)):
        seen, handle = trained(partial(cm.attach, device=device, host_budget="64MiB"))
        assert_same(plain, seen)
        report = handle.report()
        assert report.budget_held
        assert report.hbm_budget_bytes == device.capacity * 9 // 10
        figures = report.step_figures[-1]
        assert (figures.bytes_out == 0) is fits
        if fits:
            assert figures.stall_us == 0
            assert report.measured_step_us is not None
            assert report.unswapped_step_us is not None
            assert report.measured_step_us <= 1.02 * report.unswapped_step_us
        else:
            assert sum(report.unswapped_peak.values()) > device.capacity


@pytest.mark.parametrize("option", ["--hbm-budget", "--host-budget"])
def test_the_commands_take_shares_and_refuse_wrong_ones(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("print('ran')", encoding="utf-8")
    for wrong in ("110%", "0.0", "nan"):
        assert main(["run", option, wrong, str(tmp_path / "script.py")]) == 2
        told = capsys.readouterr()
        assert f"{option}: expected" in told.err
        assert "ran" not in told.out
