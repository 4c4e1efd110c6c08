"""`bench pinned`: the recorded traces and what every allocator needs for them, the promises that are counted, the command."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import platform
import random
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from chameleon_mm.bench._measure import Figure, Results, Waived
from chameleon_mm.bench._report import Bound, Report
from chameleon_mm.bench._stand_in import NOT_MEASURED, is_stand_in
from chameleon_mm.bench.pinned import command as pinned
from chameleon_mm.bench.pinned import operations, rates, waste
from chameleon_mm.bench.pinned.allocators import AddressesOnly, ListBestFit, SizeBins, power_of_two
from chameleon_mm.bench.pinned.models import GPT, GPTShape, MoE, MoEShape
from chameleon_mm.bench.pinned.record import Recorder, record, routing
from chameleon_mm.bench.pinned.traces import FOLDER, STEP, Entry, Trace, load_trace, read_trace, trace_names, write_trace
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.pinned import PinnedPool
from chameleon_mm.pinned.plan_offsets import plan_offsets
from chameleon_mm.units import GIB, MIB

NAMES = trace_names()


def trace_of(*entries: Entry) -> Trace:
    return Trace(name="made", about="made here", entries=entries, versions={})


SMALL = trace_of(
    Entry(block=STEP), Entry(block=0, nbytes=600), Entry(block=1, nbytes=3000), Entry(block=0), Entry(block=2, nbytes=700),
    Entry(block=STEP), Entry(block=1), Entry(block=3, nbytes=600), Entry(block=2), Entry(block=3),
)  # fmt: skip


# --- what was recorded


def test_the_recorded_traces_are_there_and_small() -> None:
    assert NAMES == ("llama", "moe", "resnet", "varlen")
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MIB


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_trace_is_several_steps_at_full_scale(name: str) -> None:
    trace = load_trace(name)
    assert trace.steps >= 4
    assert trace.peak[0] > 8 * GIB
    assert trace.name == name
    assert "torch" in trace.versions


def test_sizes_vary_where_they_are_said_to() -> None:
    def steps_differ(name: str) -> bool:
        trace = load_trace(name)
        first, *others = [[nbytes for nbytes, _, _ in trace.step_requests(step)] for step in range(trace.steps)]
        return any(first != other for other in others)

    assert {name: steps_differ(name) for name in NAMES} == {"llama": False, "moe": True, "resnet": True, "varlen": True}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_pool_promises_of_every_trace(name: str) -> None:
    trace = load_trace(name)
    best_fit, replay = (waste.waste(trace, make) for make in (waste.best_fit, waste.replayed))
    assert best_fit.reserved_ratio <= pinned.MAX_BEST_FIT_RATIO == 1.10
    assert replay.reserved_ratio <= pinned.MAX_REPLAY_RATIO == 1.05
    for outcome in (best_fit, replay):
        assert outcome.locked_ratio is not None
        assert 1 <= outcome.locked_ratio <= pinned.MAX_LOCKED_RATIO == 1.02
        assert outcome.peak_live_bytes == trace.peak[0] <= outcome.reserved_at_peak_bytes <= outcome.peak_reserved_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_a_trace_is_as_small_as_a_plan_can_be(name: str) -> None:
    plan = plan_offsets(load_trace(name).requests())
    assert plan.arena_bytes == plan.lower_bound_bytes


def test_a_plan_of_one_step_serves_every_step_that_is_like_it() -> None:
    trace = load_trace("llama")
    outcome = waste.waste(trace, waste.replayed_from_first)
    assert outcome.peak_reserved_bytes == plan_offsets(trace.step_requests(0)).arena_bytes


# --- recording


def test_a_recorder_writes_what_autograd_holds_and_when_it_lets_go() -> None:
    recorder = Recorder()
    weight = nn.Parameter(torch.ones(8))
    with recorder.step():
        x = weight * 2  # saves the parameter's partner, a number: nothing
        y = x.exp()  # saves its result: 32 bytes
        z = (y[:4] * y[4:]).sum()  # saves two views of the same storage: nothing more
        assert recorder.entries == [Entry(block=STEP), Entry(block=0, nbytes=32)]
        z.backward()
    assert recorder.entries[2:] == [Entry(block=0)]


def test_models_are_recorded_on_fake_tensors_at_any_size() -> None:
    shape = GPTShape(layers=2, width=1 << 14, heads=4, vocabulary=1 << 16)

    def write(recorder: Recorder) -> str:
        model = GPT(shape, 64)
        for _ in range(2):
            with recorder.step():
                tokens = torch.zeros(4, 64, dtype=torch.long)
                model.loss(tokens, tokens).backward()
        return "wide"

    trace = record("wide", write)
    assert (trace.steps, trace.about) == (2, "wide")
    assert trace.step_requests(0)[0][0] == 4 * 64 * 8  # the tokens, which the embedding saves
    sizes = [[nbytes for nbytes, _, _ in trace.step_requests(step)] for step in (0, 1)]
    assert sizes[0] == sizes[1]
    assert torch.get_default_dtype() is torch.float32


def test_tokens_go_where_the_gates_send_them_and_decide_sizes() -> None:
    shape = MoEShape(layers=2, width=64, heads=2, ffn=96, experts=4)
    routed = routing(shape, tokens=50, steps=2)
    assert [[sum(layer) for layer in step] for step in routed] == [[100, 100], [100, 100]]
    assert len({count for step in routed for layer in step for count in layer}) > 2

    def write(recorder: Recorder) -> str:
        with recorder.step():
            x = torch.empty(50, shape.width)
            MoE(shape).loss(x, x, routed[0]).backward()
        return "small"

    sizes = set(record("small", write).sizes)
    assert {count * shape.ffn * 2 for layer in routed[0] for count in layer if count} <= sizes  # bf16, inside the SwiGLU


# --- the format


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    for path in files:
        write_trace(path, SMALL)
    assert read_trace(files[0]) == SMALL
    assert files[0].read_bytes() == files[1].read_bytes()
    lines = gzip.decompress(files[0].read_bytes()).decode().splitlines()
    assert [json.loads(line) for line in lines[1:4]] == [["step"], ["+", 0, 600], ["+", 1, 3000]]


def test_what_a_trace_says_of_itself() -> None:
    assert SMALL.steps == 2
    assert SMALL.sizes == (600, 3000, 700, 600)
    assert SMALL.peak == (3700, 4)
    assert SMALL.requests() == [(600, 1, 3), (3000, 2, 6), (700, 4, 8), (600, 7, 9)]
    assert SMALL.step_requests(1) == [(600, 7, 9)]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([Entry(block=1, nbytes=5)], "expected block 0 next, got 1"),
        ([Entry(block=0, nbytes=5), Entry(block=0), Entry(block=0)], "expected a live block, got a release of 0"),
        ([Entry(block=0, nbytes=5)], "got 1 that never are"),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused(entries: list[Entry], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trace_of(*entries)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "expected a first line with schema"),
        ([{"schema": "other/1"}], "got 'other/1'"),
        ([["step"]], "expected a first line with schema"),
        ([{"schema": "chameleon_mm.trace.pinned/1", "name": "x", "about": "", "steps": 1, "versions": {}}], "1 steps, got 0"),
        ([{"schema": "chameleon_mm.trace.pinned/1"}, ["*", 1]], "line 2: expected"),
        ([{"schema": "chameleon_mm.trace.pinned/1"}, ["+", 0, 0]], "line 2: expected"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(lines: list[Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    with pytest.raises(ValueError, match=said):
        read_trace(path)


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of llama, moe, resnet, varlen, got 'bert'"):
        load_trace("bert")


# --- the peers


def keep(bins: SizeBins, trace: Trace) -> AbstractContextManager[SizeBins]:
    return nullcontext(bins)


def test_bins_keep_what_they_reserved_for_a_size() -> None:
    exact, rounded = SizeBins(lambda nbytes: nbytes), SizeBins(power_of_two)
    outcomes = [waste.waste(SMALL, partial(keep, bins)) for bins in (exact, rounded)]
    # 700 cannot lie where 600 did, nor the other way round; as 1024 they can, but the last 600 comes while 700 lives.
    assert [outcome.peak_reserved_bytes for outcome in outcomes] == [600 + 3000 + 700, 1024 + 4096 + 1024]
    assert [outcome.locked_at_peak_bytes for outcome in outcomes] == [3700, 4096 + 1024]
    assert (exact.locked_bytes, rounded.locked_bytes) == (0, 0)


@pytest.mark.parametrize(("nbytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (4096, 4096), (4097, 8192)])
def test_powers_of_two(nbytes: int, rounded: int) -> None:
    assert power_of_two(nbytes) == rounded


def test_cupys_own_pool_is_the_model_of_it() -> None:
    pytest.importorskip("cupy", reason="needs CuPy: its pool is played to")
    trace = load_trace("resnet")
    theirs, model = (waste.waste(trace, waste.PEERS[name]) for name in ("CuPy's pool", "power of two"))
    assert theirs == model


def test_the_plain_list_is_best_fit_and_joins_what_is_free() -> None:
    units = ListBestFit(64 * 4096)
    live: list[tuple[int, int]] = []
    drawn = random.Random(0)
    for _ in range(500):
        if live and drawn.random() < 0.5:
            units.free(live.pop(drawn.randrange(len(live))))
        else:
            try:
                live.append(units.allocate(drawn.randrange(1, 5 * 4096)))
            except MemoryError:
                continue
        spans = sorted(live)
        assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    for block in live:
        units.free(block)
    assert units.allocate(64 * 4096) == (0, 64 * 4096)
    with pytest.raises(MemoryError, match="expected a free block of 4096 bytes"):
        units.allocate(1)


def test_addresses_take_no_memory() -> None:
    with PinnedPool("1TiB", AddressesOnly()) as pool:
        block = pool.allocate(200 * GIB)
        assert (block.buffer.device.type, block.nbytes) == ("meta", 200 * GIB)
        block.release()


# --- the command


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    parser = argparse.ArgumentParser()
    pinned.add_arguments(parser)
    target = tmp_path / "new" / "pinned.json"
    console = Console(width=100, record=True, file=io.StringIO())
    code = pinned.run(parser.parse_args(["--device", "sim", "--json", str(target), *arguments]), console)
    return code, json.loads(target.read_text(encoding="utf-8")), console.export_text()


def test_a_run_writes_every_part_and_every_bound(tmp_path: Path) -> None:
    markdown = tmp_path / "pinned.md"
    arguments = ["--traces", "resnet", "--live", "4,32", "--pin", "8MiB", "--repeats", "1", "--markdown", str(markdown)]
    code, written, text = run(tmp_path, *arguments)
    assert code == 0
    assert written["schema"] == "chameleon_mm.bench.pinned/1"
    assert {"device", "simulated", "commit", "versions"} <= set(written)
    assert (written["device"], written["simulated"]) == (pinned.processor_name(), False), "no figure is the simulator's"
    assert list(written["tables"]) == list(pinned.PARTS)
    rows = {part: {row["name"]: row["cells"] for row in table["rows"]} for part, table in written["tables"].items()}
    assert set(rows["operations"]) == {"4 live", "32 live"}
    assert all("median" in rows["operations"]["4 live"][key] for key in ("free_list", "pool", "pool_event", "list", "torch"))
    assert set(rows["waste"]) == {f"resnet, {name}" for name in waste.OURS | waste.PEERS}
    assert "CUDA GPU alone" in rows["waste"]["resnet, torch's host allocator"]["reserved_gib"]["waived"]
    assert "median" in rows["pinning"]["4 KiB pages, 1 thread"]["populate"]
    assert all("waived" in cell for cells in rows["copies"].values() for cell in cells.values())
    held = {bound["name"]: bound["held"] for bound in written["bounds"]}
    assert held["resnet, replay: reserved / peak live"] is True
    assert held["pinning"] is None
    assert len(held) == len(written["bounds"]) == 6 + 4 + 2 + 2
    for shown in (text, markdown.read_text(encoding="utf-8")):
        assert "resnet, best fit: reserved / peak live" in shown
        assert "copies" in shown


def test_a_processor_is_called_what_the_kernel_calls_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert pinned.processor_name(info) == platform.machine()
    info.write_text("processor\t: 0\nmodel name\t: A B-1 @ 2 GHz\nprocessor\t: 1\nmodel name\t: another\n", encoding="utf-8")
    assert pinned.processor_name(info) == "A B-1 @ 2 GHz"


@pytest.mark.parametrize("part", pinned.PARTS)
def test_one_part_alone(part: str, tmp_path: Path) -> None:
    _, written, _ = run(tmp_path, "--parts", part, "--traces", "resnet", "--live", "2", "--pin", "1MiB", "--repeats", "1")
    assert list(written["tables"]) == [part]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parts", "operations,wastes"],
        ["--traces", "bert"],
        ["--live", "256,none"],
        ["--live", "0"],
        ["--repeats", "0"],
        ["--pin", "0"],
        ["--pin", "1XiB"],
        ["--device", "abacus"],
    ],
)
def test_bad_usage_raises_before_anything_is_written(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        run(tmp_path, *arguments)
    assert not (tmp_path / "new").exists()


# --- the verdicts


def figure(value: float) -> Figure:
    return Figure.of([value], "us", simulated=False)


def operations_table(sim: SimDevice, small: dict[str, float], large: dict[str, float]) -> Results:
    results = Results("pinned operations", sim, operations._COLUMNS)
    for live, found in ((1000, large), (10, small)):
        waived = dict.fromkeys(operations.PEERS, Waived("not measured"))
        results.add(f"{live} live", {"live": live}, waived | {key: figure(value) for key, value in found.items()})
    return results


def test_times_are_judged_at_the_smallest_number_of_live_blocks_and_their_growth_beyond(sim: SimDevice) -> None:
    small = {"free_list": 1.6, "pool": 4.0, "pool_event": 5.1}
    table = operations_table(sim, small, {"free_list": 3.2, "pool": 16.0, "pool_event": 5.1})
    verdicts = {bound.name: (bound.found, bound.held) for bound in pinned.operation_bounds(table)}
    assert verdicts == {
        "FreeList, release and allocate, 10 live": (1.6, False),
        "FreeList, 1000 live over 10 live": (2.0, True),
        "PinnedPool, release and allocate, 10 live": (4.0, True),
        "PinnedPool, 1000 live over 10 live": (4.0, False),
        "PinnedPool with an event, release and allocate, 10 live": (5.1, False),
        "PinnedPool with an event, 1000 live over 10 live": (1.0, True),
    }


def test_a_missed_time_is_told_and_a_missed_count_fails() -> None:
    slow = Bound(name="slow", limit=1.0, at_most=True, unit="us", found=2.0, counted=False)
    wasteful = Bound(name="wasteful", limit=1.0, at_most=True, unit="", found=1.5, counted=True)
    waived = Bound(name="rate", limit=8.0, at_most=False, unit="GB/s", found=Waived("no GPU"), counted=False)
    fast = Bound(name="fast", limit=8.0, at_most=False, unit="GB/s", found=9.0, counted=False)
    assert [bound.held for bound in (slow, wasteful, waived, fast)] == [False, False, None, True]
    told = Report(header={}, tables={}, bounds=[slow, waived, fast])
    assert (told.failed, told.headline) == (False, "1 of 3 bounds held, 1 waived; NOT held: slow")
    assert Report(header={}, tables={}, bounds=[wasteful]).failed
    assert [str(bound) for bound in (slow, waived, fast)] == [
        "NOT HELD  slow: 2 us, at most 1",
        "WAIVED    rate: no GPU",
        "held      fast: 9 GB/s, at least 8",
    ]


def test_rates_are_judged_beside_torchs(sim: SimDevice) -> None:
    results = Results("pinned pinning", sim, rates.PINNING_COLUMNS)
    for name, rate in (("ours, as the pool does", 9.0), ("torch pin_memory", 4.0)):
        results.add(name, {}, {"populate": Waived("-"), "lock": Waived("-"), "total": figure(rate)})
    assert [(bound.found, bound.held) for bound in pinned.pinning_bounds(results)] == [(9.0, True), (2.25, False)]


def test_copies_are_judged_at_the_largest_size(sim: SimDevice) -> None:
    results = Results("pinned copies", sim, rates.COPY_COLUMNS)
    for size, ratio in ((64, 0.995), (1, 0.5)):
        cells = {key: figure(1.0) for key in ("block", "torch", "call", "pending")}
        results.add(f"D2H {size}", {"bytes": size}, cells | {"ratio": figure(ratio)})
    assert [(bound.found, bound.held) for bound in pinned.copy_bounds(results)] == [(0.995, True), (1.0, True)]


@pytest.mark.gpu
def test_everything_is_measured_on_a_gpu() -> None:
    from chameleon_mm.device import resolve_device

    device: Device = resolve_device("cuda")
    report = pinned.measure(device, traces=["resnet"], live=[16], nbytes=64 * MIB, repeats=1)
    assert not report.failed
    unheld = {bound.found for bound in report.bounds if bound.held is None}
    assert unheld == ({Waived(NOT_MEASURED)} if is_stand_in(device.name) else set())
    cells = {row.name: row.cells for row in report.tables["waste"].rows}
    reserved = cells["resnet, torch's host allocator"]["reserved_gib"]
    assert isinstance(reserved, Figure)
    assert reserved.median > 0
