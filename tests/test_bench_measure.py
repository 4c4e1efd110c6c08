"""Shared parts of the benchmarks: samples, figures, waived cells, tables and the environment shown with them."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from chameleon_mm.bench._buffers import Buffers
from chameleon_mm.bench._environment import commit, environment, result_name, versions
from chameleon_mm.bench._measure import Column, Figure, Results, Waived, interleave
from chameleon_mm.bench._options import add_output_arguments
from chameleon_mm.device import Device, SimDevice

REAL = Column(key="real", title="GB/s", formula="bytes / time")
SIMULATED = Column(key="virtual", title="GB/s", formula="bytes / virtual time", simulated=True)


def figure(*, simulated: bool) -> Figure:
    return Figure.of([1.0, 2.0, 3.0], "GB/s", simulated=simulated)


def test_figure_is_median_and_spread() -> None:
    made = Figure.of([5.0, 1.0, 4.0, 2.0, 3.0, 0.0], "us", simulated=False)
    assert (made.median, made.p20, made.p80, made.count, made.unit) == (2.5, 1.0, 4.0, 6, "us")
    alone = Figure.of([7.0], "us", simulated=True)
    assert (alone.median, alone.p20, alone.p80, alone.count, alone.simulated) == (7.0, 7.0, 7.0, 1, True)
    with pytest.raises(ValueError, match="at least one sample"):
        Figure.of([], "us", simulated=False)
    assert Waived("no GPU").to_dict() == {"waived": "no GPU"}
    with pytest.raises(ValueError, match="expected the reason"):
        Waived("")


def test_peers_are_interleaved_and_warmed_up() -> None:
    order: list[str] = []

    def peer(name: str) -> int:
        order.append(name)
        return len(order)

    samples = interleave({name: partial(peer, name) for name in "abc"}, warmup=1, repeats=3)
    assert order == ["c", "a", "b", "a", "b", "c", "b", "c", "a", "c", "a", "b"]  # a round each, one further every time
    assert samples == {"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]}  # the first three calls were the warm-up
    assert interleave({"a": lambda: 1}, warmup=0, repeats=1000, limit_s=-1) == {"a": [1]}  # one round at least


def test_a_row_has_every_column_and_each_figure_is_of_its_columns_kind(sim: SimDevice) -> None:
    results = Results("copy", sim, [REAL, SIMULATED])
    with pytest.raises(ValueError, match=r"expected cells \['real', 'virtual'\], got \['virtual'\]"):
        results.add("H2D", {}, {"virtual": figure(simulated=True)})
    for simulated in (True, False):
        with pytest.raises(ValueError, match="put it in a column of its own"):
            results.add("H2D", {}, {"real": figure(simulated=simulated), "virtual": figure(simulated=simulated)})


def test_results_as_json_and_text(sim: SimDevice, tmp_path: Path) -> None:
    results = Results("copy", sim, [REAL, SIMULATED])
    results.add("H2D 1 MiB", {"bytes": 1 << 20}, {"real": Waived("there is no GPU"), "virtual": figure(simulated=True)})
    results.add("lost", {}, dict.fromkeys(("real", "virtual"), Waived("out of memory")))
    parser = argparse.ArgumentParser()
    add_output_arguments(parser)
    target = tmp_path / "new" / "copy.json"
    console = Console(width=160, record=True, file=io.StringIO())
    results.deliver(parser.parse_args(["--json", str(target)]), console)
    written = json.loads(target.read_text(encoding="utf-8"))
    assert written["device"] == "simulated H200"
    assert written["simulated"] is True
    assert {"schema", "commit", "versions", "date"} <= set(written)
    assert [column["simulated"] for column in written["columns"]] == [False, True]
    row = written["rows"][0]
    assert (row["name"], row["bytes"], row["cells"]["real"]) == ("H2D 1 MiB", 1 << 20, {"waived": "there is no GPU"})
    assert row["cells"]["virtual"] == {"median": 2.0, "p20": 1.4, "p80": 2.6, "count": 3, "unit": "GB/s", "simulated": True}
    text = console.export_text()
    assert "GB/s sim." in text and "sim.: simulated" in text and "bytes / virtual time" in text
    assert "- WAIVED, GB/s: there is no GPU" in text
    assert "- WAIVED, lost: out of memory" in text, "a row that is waived whole is named once"


def test_a_table_fits_80_columns_and_cuts_no_name(sim: SimDevice) -> None:
    columns = [Column(key=str(index), title=f"figure {index} us", formula="time", simulated=True) for index in range(4)]
    never = [Column(key=f"w{index}", title=f"waived {index}", formula="time") for index in range(5)]
    results = Results("overlap", sim, [*columns, *never])
    name, wide = "mul, both ways", Figure.of([10_000.0, 20_000.0, 30_000.0], "us", simulated=True)
    results.add(name, {}, {c.key: wide if c.simulated else Waived("measured on a CUDA GPU alone") for c in results.columns})
    console = Console(width=80, record=True, file=io.StringIO())
    results.show(console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(name in line for line in lines)
    assert sum(line.count("(14000..26000)") for line in lines) == len(columns)
    titles = ", ".join(column.title for column in never)
    assert f"WAIVED, {titles}: measured on a CUDA GPU alone" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([1.0], "1"), ([46.04], "46.0"), ([0.9], "0.900"), ([99.96], "100"), ([12345.6], "12346"),
        ([9.22, 9.22, 9.23], "9.22"), ([9.0, 10.0, 11.0], "10 (9.40..10.6)"),
    ],
)  # fmt: skip
def test_figures_are_short_and_show_their_spread_where_there_is_one(samples: list[float], text: str) -> None:
    assert str(Figure.of(samples, "us", simulated=False)) == text


def test_environment_of_a_result(device: Device) -> None:
    header = environment("copy", device)
    assert header["schema"] == "chameleon_mm.bench.copy/1"
    assert (header["device"], header["simulated"]) == (device.name, device.simulated)
    assert {"python", "torch"} <= set(versions()) == set(header["versions"])
    assert result_name("copy", "NVIDIA H200", "2026-01-31") == "copy_nvidia-h200_2026-01-31.json"
    assert result_name("copy", "(?)", "2026-01-31") == "copy_unknown_2026-01-31.json"


def test_commit_and_dirt_are_read_from_the_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) == {"commit": "unknown", "dirty": None}
    if shutil.which("git") is None:
        pytest.skip("git is not installed: every commit is unknown")
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    assert commit(tmp_path) == {"commit": "unknown", "dirty": None}
    (tmp_path / "file").write_text("a", encoding="utf-8")
    git("add", "file")
    git(*who, "commit", "--quiet", "-m", "first")
    head = git("rev-parse", "HEAD").strip()
    assert commit(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "file").write_text("b", encoding="utf-8")
    assert commit(tmp_path) == {"commit": head, "dirty": True}


def test_buffers_are_random_and_given_back(device: Device, no_gc: None) -> None:
    before = device.allocated_bytes()
    with Buffers(device) as buffers:
        made = [buffers.on_device(1 << 20), buffers.pinned(1 << 20), buffers.pageable(1 << 20)]
        assert all(len(set(buffer[:4096].tolist())) > 200 for buffer in made)
        del made
    assert device.allocated_bytes() == before
