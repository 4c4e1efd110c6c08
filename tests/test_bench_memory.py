"""`bench memory`: what is compared with what, and what is said of a difference."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from chameleon_mm.bench import memory
from chameleon_mm.bench._measure import Figure, Waived
from chameleon_mm.bench._memory_models import MODELS
from chameleon_mm.bench._memory_steps import (
    Seen,
    bounds,
    foreign_bytes,
    foreign_names,
    inner_by_name,
    inner_bytes,
    rounding_bytes,
    unswapped,
)
from chameleon_mm.bench._stand_in import is_stand_in
from chameleon_mm.device import Device, SimDevice
from chameleon_mm.policy import peak_memory
from chameleon_mm.units import MIB


@pytest.fixture(scope="module")
def gpt() -> Seen:
    return unswapped(SimDevice(), MODELS["gpt"])


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    return memory.run(parser.parse_args(arguments), Console(quiet=True))


def test_the_trace_has_the_peak_that_the_device_counted(gpt: Seen) -> None:
    assert gpt.trace is not None
    assert peak_memory(gpt.trace).nbytes - gpt.trace.start_bytes == gpt.above_bytes


def test_what_operators_hold_inside_is_named(gpt: Seen) -> None:
    assert gpt.trace is not None
    scores = 4 * 2 * 256 * 256  # batch, heads, queries, keys
    rows, one = 4 * 2 * 256, 512
    assert inner_by_name(gpt.trace) == {"aten::_safe_softmax": scores + rows + one}
    assert inner_bytes(gpt.trace) == scores + rows + one
    assert bounds(gpt.trace, gpt.trace) == (-inner_bytes(gpt.trace), inner_bytes(gpt.trace))


def test_what_operators_made_that_the_other_device_lacks_is_counted(gpt: Seen) -> None:
    assert gpt.trace is not None
    assert foreign_bytes(gpt.trace, gpt.trace) == 0
    without = tuple(name for name in gpt.trace.op_names if name != "aten::gelu")
    kept = np.zeros(len(gpt.trace.op_us), np.int32)
    other = dataclasses.replace(gpt.trace, op_names=without, op_name=kept)
    assert foreign_names(gpt.trace, other) == ["aten::gelu"]
    # At the peak, in the loss, all three blocks' results of it are there: [4, 256, 4 * 64] floats.
    assert foreign_bytes(gpt.trace, other) == 3 * 4 * 256 * 256 * 4


def test_rounding_is_what_blocks_are_larger_by(gpt: Seen) -> None:
    assert gpt.trace is not None
    whole = dataclasses.replace(gpt.trace, tensor_bytes=gpt.trace.tensor_bytes // 512 * 512)
    assert rounding_bytes(whole) == 0
    assert 0 < rounding_bytes(gpt.trace) < 512 * len(gpt.trace.tensor_bytes)


def test_a_difference_is_explained_or_told(gpt: Seen) -> None:
    assert memory.unexplained("gpt", gpt, gpt) == ""
    high = inner_bytes(gpt.trace) if gpt.trace is not None else 0
    most = dataclasses.replace(gpt, peak_bytes=gpt.peak_bytes + high)
    assert memory.unexplained("gpt", gpt, most) == ""
    more = dataclasses.replace(gpt, peak_bytes=gpt.peak_bytes + high + 512)
    assert f"NOT explained: {high + 512:+d} bytes" in memory.unexplained("gpt", gpt, more)


def test_a_budget_that_is_passed_is_told(gpt: Seen) -> None:
    within = dataclasses.replace(gpt, budget_bytes=gpt.peak_bytes)
    assert memory.passed(within) == ""
    assert memory.passed(dataclasses.replace(within, budget_bytes=gpt.peak_bytes - 7)) == "PASSED its budget by 7 bytes"


def test_without_cuda_the_allocators_side_is_waived(tmp_path: Path) -> None:
    target = tmp_path / "memory.json"
    assert run("--device", "sim", "--models", "mlp", "--json", str(target)) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert (written["theme"], written["simulated"], written["stand_in"]) == ("memory", True, False)
    assert [row["name"] for row in written["rows"]] == ["mlp, none", "mlp, 1/2", "mlp, least"]
    for row in written["rows"]:
        assert row["cells"]["simulated"]["simulated"] is True
        assert all("waived" in row["cells"][key] for key in ("allocated", "difference", "reserved", "ratio"))
    peaks = [row["cells"]["simulated"]["median"] for row in written["rows"]]
    assert peaks == sorted(peaks, reverse=True)
    for row, peak in zip(written["rows"][1:], peaks[1:], strict=True):
        assert peak <= row["cells"]["budget"]["median"]


@pytest.mark.gpu
def test_both_sides_and_what_is_reserved_stand_in_the_table() -> None:
    from chameleon_mm.device import resolve_device

    device: Device = resolve_device("cuda")
    results, problems = memory.measure(device, ["recurrent"])
    assert problems == []
    assert results.header["stand_in"] is is_stand_in(device.name)
    assert [row.name for row in results.rows] == ["recurrent, none", "recurrent, 1/2", "recurrent, 1/4"]
    for row in results.rows:
        figures = {key: cell.median for key, cell in row.cells.items() if isinstance(cell, Figure)}
        assert set(figures) | {"budget"} == set(row.cells)
        assert figures["difference"] == pytest.approx((figures["allocated"] - figures["simulated"]) * MIB)
        assert figures["ratio"] >= 1
    assert results.rows[0].cells["budget"] == Waived("no budget")


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--models: expected some of mlp;gpt;.*got 'marmot'"):
        run("--device", "sim", "--models", "mlp;marmot")
