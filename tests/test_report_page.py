"""Report's page as text and as plain data: it shows the plan, its simulation and the report."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

import chameleon_mm as cm
from chameleon_mm.plan.simulate import simulate
from chameleon_mm.plan.trace import SavePlace
from chameleon_mm.plan.unswapped_memory import least_memory, memory_curve, peak_memory
from chameleon_mm.report.page import MOST_POINTS, thinned_memory
from chameleon_mm.report.step_picture import LARGEST, Memory, PlannedStepData, StepPicture, picture_of
from chameleon_mm.swap.metrics import StepKind
from chameleon_mm.units import MIB, format_size
from tests._report_sessions import busy_report, gpt_report, small_gpt
from tests._traces import H200_LINK, chain, random_plan, random_step
from tests.test_report import made_up


@pytest.fixture(scope="module")
def report() -> cm.SwapReport:
    return busy_report()


@pytest.fixture(scope="module")
def picture(report: cm.SwapReport) -> StepPicture:
    assert report.planned is not None
    return picture_of(report.planned)


class Page(HTMLParser):
    """Check that tags close in order; keep tags, text and the data of the script."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def data(self) -> dict[str, object]:
        match = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.source, re.DOTALL)
        assert match is not None
        found = json.loads(match[1])
        assert isinstance(found, dict)
        return found

    def sections(self) -> list[str | None]:
        return [attrs["id"] for tag, attrs in self.tags if tag == "section" and "id" in attrs]


def page_of(report: cm.SwapReport, tmp_path: Path) -> Page:
    report.save_html(tmp_path / "page.html")
    return Page(tmp_path / "page.html")


# --- the picture against the plan


def test_memory_is_that_of_the_simulation_at_every_moment(report: cm.SwapReport, picture: StepPicture) -> None:
    assert report.planned is not None
    trace, plan = report.planned.trace, report.planned.plan
    timeline = simulate(trace, plan, report.planned.link)
    for memory, at_us, nbytes in (
        (picture.planned, timeline.tick_us, timeline.allocated_bytes),
        (picture.unswapped, trace.clock_us()[:-1], memory_curve(trace)),
    ):
        shown = memory.nbytes[np.searchsorted(memory.at_us, at_us, side="right") - 1]
        assert (shown >= nbytes).all(), "never less than what is allocated"
        assert set(memory.nbytes.tolist()) <= set(nbytes.tolist()) and memory.peak_bytes == nbytes.max()
    assert picture.planned.peak_bytes <= plan.peak_bytes <= report.hbm_budget_bytes < picture.unswapped.peak_bytes


def test_compute_is_the_operators_the_waits_and_what_runs_again(report: cm.SwapReport, picture: StepPicture) -> None:
    assert report.planned is not None
    took_us = Counter[str]()
    for bar in picture.compute:
        took_us[bar.kind] += bar.end_us - bar.start_us  # type: ignore[assignment]  # a counter of times
    plan = report.planned.plan
    assert took_us["stall"] == pytest.approx(plan.stall_us)
    assert took_us["recompute"] == pytest.approx(plan.recompute_us) and plan.recompute_us > 0
    assert took_us["forward"] + took_us["backward"] + took_us["optimizer"] == pytest.approx(report.planned.trace.duration_us)
    assert all(before.end_us <= after.start_us + 1e-6 for before, after in pairwise(picture.compute))
    assert picture.compute[-1].end_us <= picture.timeline.step_us + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_compute_adds_up_under_any_plan(seed: int) -> None:
    random = Random(seed)
    trace = random_step(random)
    plan = random_plan(random, trace)
    timeline = simulate(trace, plan, H200_LINK)
    found = picture_of(PlannedStepData(trace=trace, plan=plan, link=H200_LINK, predicted=False, times_us=()))
    stalls_us = sum(bar.end_us - bar.start_us for bar in found.compute if bar.kind == "stall")
    assert stalls_us == pytest.approx(timeline.stall_us)
    works_us = sum(bar.end_us - bar.start_us for bar in found.compute if bar.kind != "stall")
    assert works_us == pytest.approx(trace.duration_us)
    assert all(before.end_us <= after.start_us + 1e-6 for before, after in pairwise(found.compute))


def test_copies_are_those_of_the_plan(report: cm.SwapReport, picture: StepPicture) -> None:
    assert report.planned is not None
    plan = report.planned.plan
    for bars in (picture.out, picture.back):
        assert sum(bar.nbytes for bar in bars) == plan.moved_bytes
        assert {bar.tensor for bar in bars} == {action.tensor for action in plan.swaps}
        assert all(before.end_us <= after.start_us + 1e-6 for before, after in pairwise(bars)), "one copy at a time"


def test_tensors_add_up_to_what_the_report_says(report: cm.SwapReport, picture: StepPicture) -> None:
    rows = picture.tensors
    free = [row for row in rows if row.does != "held"]
    moved = sum(row.moved_bytes for row in free)
    recomputed = sum(row.nbytes for row in rows if row.does == "recomputed")
    assert moved == report.planned_bytes["swapped"] and recomputed == report.planned_bytes["recomputed"]
    assert {row.does for row in rows} >= {"swapped", "recomputed", "kept"}
    for row in rows:
        leaves = row.does in ("swapped", "in part", "recomputed")
        assert (row.away_us is not None) == (row.back_us is not None) == leaves or row.does == "held"
        assert row.moved_bytes == row.nbytes if row.does == "swapped" else row.moved_bytes < row.nbytes or row.does == "held"
        if leaves:
            assert row.away_us is not None and row.back_us is not None
            assert row.saved_us <= row.away_us < row.back_us
    assert sum(row.stall_us for row in rows) == pytest.approx(picture.timeline.stall_us)


def test_tensors_are_named_by_the_module_that_saved_them(picture: StepPicture) -> None:
    names = [row.name for row in picture.tensors]
    assert len(set(names)) == len(names)
    paths = {path for path, _ in small_gpt().named_modules() if path} | {"GPT"}
    modules = {name.split(": ")[0] for name in names if ": " in name}
    assert modules <= paths and any(module.startswith("blocks.3.") for module in modules)
    assert all(": " in name for name in names), "all of them were saved in a forward of the model"


# --- the page


def test_the_page_holds_every_figure_and_all_sections(report: cm.SwapReport, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    assert page.sections() == ["step", "tensors", "steps", "figures"]
    for label, text in report.rows():
        assert label in page.text and text in page.text
    assert page.text.index(report.in_short) < page.text.index("budget")
    assert page.data["figures"] == report.to_dict()
    assert page.data["steps"] == [step.to_dict() for step in report.step_figures]
    assert "All times are of the simulator's virtual clock." in page.text


def test_the_page_asks_nobody_for_anything(report: cm.SwapReport, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "a", "base"}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "srcset", "action"} & set(attrs)]
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", page.source)


HOSTILE = '</script><script>alert("&amp;")</script> \u2028 \u00e4\u4e16 \' <!--script-->'


def test_no_name_becomes_markup(report: cm.SwapReport, tmp_path: Path) -> None:
    assert report.planned is not None
    trace = dataclasses.replace(report.planned.trace, places=dict.fromkeys(report.planned.trace.places, SavePlace(HOSTILE)))
    hostile = dataclasses.replace(
        report, device=HOSTILE, problems=(HOSTILE,), planned=dataclasses.replace(report.planned, trace=trace)
    )
    page, plain = page_of(hostile, tmp_path), page_of(report, tmp_path)
    assert Counter(tag for tag, _ in page.tags) - Counter(tag for tag, _ in plain.tags) == Counter(
        {"p": 1, "tr": 1, "th": 1, "td": 1}
    ), "the problem alone, above and among the figures"
    assert any(HOSTILE in text for text in page.text)
    tensors = page.data["tensors"]
    assert isinstance(tensors, dict) and all(row[1].startswith(HOSTILE) for row in tensors["rows"])


def test_a_session_without_plans_has_no_prediction_and_the_rest(tmp_path: Path) -> None:
    page = page_of(gpt_report(plans=False, steps=2), tmp_path)
    assert page.sections() == ["step", "steps", "figures"]
    assert any("There is no plan" in text for text in page.text)
    assert "step" not in page.data and "tensors" not in page.data


def test_a_session_without_a_step_says_so(tmp_path: Path) -> None:
    session = cm.SwapSession("1GiB", "64MiB", "sim")
    page = page_of(session.report(), tmp_path)
    assert page.sections() == ["step", "steps", "figures"]
    assert any("No step has ended" in text for text in page.text)


def test_a_session_whose_only_step_failed_has_a_page(tmp_path: Path) -> None:
    session = cm.SwapSession("1GiB", "64MiB", "sim")
    with pytest.raises(RuntimeError, match="on purpose"), session, session.step():
        raise RuntimeError("on purpose")
    page = page_of(session.report(), tmp_path)
    assert page.sections() == ["step", "steps", "figures"]
    steps = page.data["steps"]
    assert isinstance(steps, list) and [step["kind"] for step in steps] == [StepKind.FAILED.value]


def test_memory_at_the_peak_adds_up_and_is_named(report: cm.SwapReport, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    text = "|".join(page.text)
    assert report.planned is not None
    for peak, parts in ((peak_memory, report.unswapped_peak), (least_memory, report.least_peak)):
        assert sum(parts.values()) == peak(report.planned.trace).nbytes
        assert all(f"{format_size(nbytes)} {name}" in text for name, nbytes in parts.items())
    every = {*report.unswapped_peak, *report.least_peak}
    assert every >= {"parameters", "gradients", "optimizer state", "activations", "temporaries"}
    large = [text for label, text in report.rows() if label == LARGEST]
    assert large and all(one in page.text for one in large)
    assert re.search(r"\|512\.0 KiB activations by addmm in blocks\.\d at \w+\.py:\d+\|", text)


def test_a_plan_that_nobody_can_carry_out_has_no_picture(report: cm.SwapReport, tmp_path: Path) -> None:
    assert report.planned is not None
    plan = dataclasses.replace(report.planned.plan, fingerprint=report.planned.plan.fingerprint + 1)
    page = page_of(dataclasses.replace(report, planned=dataclasses.replace(report.planned, plan=plan)), tmp_path)
    assert page.sections() == ["step", "steps", "figures"]


def test_a_step_of_5000_tensors_stays_small_and_whole(tmp_path: Path) -> None:
    trace = chain(layers=1000)
    plan = random_plan(Random(0), trace)
    assert len(plan.swaps) > 3000
    planned = PlannedStepData(trace=trace, plan=plan, link=H200_LINK, predicted=True, times_us=())
    page = page_of(made_up(planned=planned), tmp_path)
    assert len(page.source.encode()) < 2 * MIB
    tensors = page.data["tensors"]
    assert isinstance(tensors, dict) and len(tensors["rows"]) == len(picture_of(planned).tensors) >= 4990


# --- what is drawn together


def test_few_points_are_drawn_as_they_are() -> None:
    memory = Memory(at_us=np.arange(float(MOST_POINTS)), nbytes=np.arange(MOST_POINTS), end_us=float(MOST_POINTS))
    assert thinned_memory(memory) is memory


def test_many_points_keep_every_peak() -> None:
    generator = np.random.default_rng(0)
    at_us = np.sort(generator.uniform(0, 1000, 20 * MOST_POINTS))
    at_us[0] = 0.0
    nbytes = generator.integers(0, 10**9, len(at_us))
    thin = thinned_memory(Memory(at_us=at_us, nbytes=nbytes, end_us=1000.0))
    assert len(thin.at_us) == MOST_POINTS and thin.peak_bytes == nbytes.max()
    shown = thin.nbytes[np.searchsorted(thin.at_us, at_us, side="right") - 1]
    assert (shown >= nbytes).all(), "never less than what is allocated"
