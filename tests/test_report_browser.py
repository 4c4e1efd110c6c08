"""Report's page in a headless Chromium: its drawings show the report and the plan, and its controls work.

report -> page -> Chromium -> coordinates of paths, text of cells, what is left after clicks
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import chameleon_mm as cm
from chameleon_mm.plan.trace import SavePlace
from chameleon_mm.report.step_picture import PlannedStepData, StepPicture, TensorRow, picture_of
from chameleon_mm.units import format_size, format_us
from tests._report_sessions import busy_report, gpt_report
from tests._traces import H200_LINK, chain, random_plan
from tests.test_report import made_up

# --- a headless Chromium: Debian's, by its driver, with a profile of its own and without a network


pytestmark = pytest.mark.slow

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def browser() -> Iterator[Any]:
    """Driver whose log has the pages' console output and network requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="the pages are opened by selenium: pip install -e '.[dev]'")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver_path = shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.skip("no Chromium with its driver here: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
        try:
            yield driver
        finally:
            driver.quit()


def errors(driver: Any) -> list[str]:
    """Messages of the page's console since the last call, warnings and errors alone."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(driver: Any) -> list[str]:
    """Addresses that pages asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]


def show(driver: Any, *, width: int, dark: bool = False) -> None:
    """Have pages shown that wide, in pixels, with or without the dark scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def report() -> cm.SwapReport:
    return busy_report()


@pytest.fixture(scope="module")
def picture(report: cm.SwapReport) -> StepPicture:
    assert report.planned is not None
    return picture_of(report.planned)


@pytest.fixture(scope="module")
def path(report: cm.SwapReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "report.html"
    report.save_html(written)
    return written


@pytest.fixture
def page(driver: Any, path: Path) -> Any:
    show(driver, width=1200)
    driver.get(path.as_uri())
    return driver


def shape(page: Any, selector: str) -> list[float]:
    """Numbers of the outlines of all paths that `selector` finds, in order."""
    outlines = page.execute_script(
        f"return [...document.querySelectorAll('{selector}')].map(path => path.getAttribute('d')).join('')"
    )
    return [float(number) for number in re.findall(r"[\d.]+", outlines)]


def rows(page: Any) -> list[list[str]]:
    """Text of the cells of the tensors' table, as shown."""
    found: list[list[str]] = page.execute_script(
        "return [...document.querySelectorAll('#tensors tbody tr')].map(tr => [...tr.cells].map(td => td.textContent))"
    )
    return found


def click(page: Any, selector: str) -> None:
    page.find_element("css selector", selector).click()


# --- what is drawn


def test_opening_it_meets_no_error_and_no_network(page: Any, path: Path) -> None:
    requests(page)
    page.get(path.as_uri())
    assert errors(page) == []
    assert {url.split("?")[0] for url in requests(page)} == {path.as_uri()}


def test_curves_and_budget_are_the_plans(page: Any, picture: StepPicture) -> None:
    end_us = max(picture.timeline.step_us, picture.unswapped.end_us)
    budget_y = float(page.execute_script("return document.querySelector('#step line.budget').getAttribute('y1')"))
    scale = picture.source.plan.hbm_budget_bytes / (100 - budget_y)  # bytes by height, as the budget line has it
    for name, memory in (("planned", picture.planned), ("unswapped", picture.unswapped)):
        numbers = shape(page, f"#step path.line.{name}")
        xs, ys = np.array(numbers[:-1:2]), np.array(numbers[1::2])
        assert xs * end_us / 1000 == pytest.approx(memory.at_us, abs=2e-3 * end_us / 1000 + 1e-6)
        assert (100 - ys) * scale == pytest.approx(memory.nbytes, rel=2e-3)
        assert numbers[-1] * end_us / 1000 == pytest.approx(memory.end_us, rel=1e-5)
    assert page.find_element("css selector", "#step .lane.memory b").text == format_size(100 * scale), "the axis' upper end"
    highest = float(min(shape(page, "#step path.line.planned")[1::2]))
    assert highest >= budget_y, "the plan's curve is never above the line"


@pytest.mark.parametrize("row", ["compute", "out", "back"])
def test_bars_are_as_long_as_what_they_stand_for(page: Any, picture: StepPicture, row: str) -> None:
    bars = {"compute": picture.compute, "out": picture.out, "back": picture.back}[row]
    end_us = max(picture.timeline.step_us, picture.unswapped.end_us)
    for kind in {bar.kind for bar in bars}:
        of_kind = [bar for bar in bars if bar.kind == kind]
        css = "part" if kind == "in part" else kind
        numbers = shape(page, f'#step [data-row="{row}"] path.bar.{css}')
        starts, ends = np.array(numbers[0::5]), np.array(numbers[2::5])
        assert len(starts) == len(of_kind)
        assert starts * end_us / 1000 == pytest.approx([bar.start_us for bar in of_kind], abs=1e-6 * end_us)
        assert ends * end_us / 1000 == pytest.approx([bar.end_us for bar in of_kind], abs=1e-6 * end_us)


def test_each_step_is_a_bar_as_high_as_its_peak(page: Any, report: cm.SwapReport) -> None:
    heights = [100 - y for y in shape(page, "#steps [data-row=peak] path:not(.budget)")[2::5]]
    level = 100 - shape(page, "#steps [data-row=peak] path.budget")[1]
    drawn = sorted(height / level * report.hbm_budget_bytes for height in heights)
    assert drawn == pytest.approx(sorted(step.peak_hbm_bytes for step in report.step_figures), rel=1e-3)
    counts = page.execute_script(
        "return [...document.querySelectorAll('#steps [data-row=peak] [data-bars]')].map(p => +p.dataset.bars)"
    )
    assert sum(counts) == len(report.step_figures) == report.steps


# --- the table


def as_shown(row: TensorRow) -> list[str]:
    times = (row.saved_us, row.away_us, row.back_us, row.used_us, row.stall_us)
    moved = format_size(row.moved_bytes) if row.moved_bytes else "\u2013"
    return [row.name, row.does, format_size(row.nbytes), moved, *("\u2013" if us is None else format_us(us) for us in times)]


def test_the_table_has_every_tensor_the_largest_first(page: Any, picture: StepPicture) -> None:
    shown = rows(page)
    assert len(shown) == len(picture.tensors) < 100
    for cells, row in zip(shown, picture.tensors, strict=True):
        assert cells[:4] == as_shown(row)[:4]
        for cell, text in zip(cells[4:], as_shown(row)[4:], strict=True):
            assert cell == text or cell.split()[1:] == text.split()[1:], "a last digit may round otherwise"


@pytest.mark.parametrize(
    ("key", "column"), [("bytes", "nbytes"), ("stall_us", "stall_us"), ("away_us", "away_us"), ("used_us", "used_us")]
)
def test_a_click_on_a_head_sorts_and_a_second_one_turns_round(page: Any, picture: StepPicture, key: str, column: str) -> None:
    by_name = {row.name: getattr(row, column) for row in picture.tensors}
    click(page, '[data-key="name"]')
    names = [cells[0] for cells in rows(page)]
    assert names == sorted(by_name), "text goes up first"
    for direction in ("descending", "ascending"):
        click(page, f'[data-key="{key}"]')
        values = [by_name[cells[0]] for cells in rows(page)]
        there = [value for value in values if value is not None]
        assert values[: len(there)] == there, "what has none comes last"
        ups = [after - before for before, after in pairwise(there)]
        assert all(up >= -0.01 if direction == "ascending" else up <= 0.01 for up in ups)
        heads = page.execute_script(
            "return [...document.querySelectorAll('#tensors th')].map(h => [h.querySelector('button').dataset.key, h.ariaSort])"
        )
        assert {key for key, sort in heads if sort != "none"} == {key} and (key, direction) in [tuple(head) for head in heads]


def test_filters_by_text_and_by_kind_leave_what_they_say(page: Any, picture: StepPicture) -> None:
    click(page, '[data-kind="recomputed"]')
    recomputed = [row for row in picture.tensors if row.does == "recomputed"]
    assert {cells[0] for cells in rows(page)} == {row.name for row in recomputed}
    total = format_size(sum(row.nbytes for row in recomputed) + 1)  # a browser rounds a tie up
    count = page.find_element("css selector", "#tensors .count").text
    assert count == f"{len(recomputed)} of {len(recomputed)} tensors, {total} in all"
    click(page, '[data-kind=""]')
    search = page.find_element("css selector", "#tensors input")
    search.send_keys("Blocks.3")
    found = [row for row in picture.tensors if "blocks.3" in row.name]
    assert found and {cells[0] for cells in rows(page)} == {row.name for row in found}
    search.send_keys(" nothing-is-called-so")
    assert rows(page) == []


def test_a_row_that_is_picked_shows_its_copies(page: Any, picture: StepPicture) -> None:
    moved = next(row for row in picture.tensors if row.does == "swapped")
    page.execute_script("document.querySelector(arguments[0]).focus()", f'#tensors [data-tensor="{moved.tensor}"]')
    page.switch_to.active_element.send_keys("\n")
    end_us = max(picture.timeline.step_us, picture.unswapped.end_us)
    for row, bars in (("out", picture.out), ("back", picture.back)):
        numbers = shape(page, f'#step [data-row="{row}"] .pick')
        own = [bar for bar in bars if bar.tensor == moved.tensor]
        assert [x * end_us / 1000 for x in numbers[0::5]] == pytest.approx([bar.start_us for bar in own], abs=1e-2)
    assert page.switch_to.active_element.get_attribute("aria-selected") == "true"
    page.switch_to.active_element.send_keys("\n")
    assert shape(page, '#step [data-row="out"] .pick') == []


def test_a_long_table_grows_when_asked(driver: Any, tmp_path: Path) -> None:
    trace = chain(layers=60)
    plan = random_plan(Random(0), trace)
    planned = PlannedStepData(trace=trace, plan=plan, link=H200_LINK, predicted=False, times_us=())
    made_up(planned=planned).save_html(tmp_path / "long.html")
    driver.get((tmp_path / "long.html").as_uri())
    everything = len(picture_of(planned).tensors)
    assert len(rows(driver)) == 100 < everything
    click(driver, "#tensors .more")
    assert len(rows(driver)) == everything
    assert not driver.find_element("css selector", "#tensors .more").is_displayed()


# --- reading and zooming


def test_the_pointer_reads_the_numbers_below_it(page: Any, picture: StepPicture) -> None:
    at = int(picture.unswapped.nbytes.argmax())
    ends = [*picture.unswapped.at_us.tolist(), picture.unswapped.end_us]
    at_us = (ends[at] + ends[at + 1]) / 2
    end_us = max(picture.timeline.step_us, picture.unswapped.end_us)
    text = page.execute_script(
        "const svg = document.querySelector('#step svg'), box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * arguments[0], bubbles: true}));"
        "return document.querySelector('#step .readout').textContent",
        at_us / end_us,
    )
    assert f"without swapping {format_size(picture.unswapped.peak_bytes)}" in text
    planned = picture.planned.nbytes[np.searchsorted(picture.planned.at_us, at_us, side="right") - 1]
    assert f"memory by the plan {format_size(int(planned))}" in text
    during = [bar for bar in picture.compute if bar.start_us <= at_us < bar.end_us]
    if during:
        assert ("stalled" if during[0].kind == "stall" else during[0].kind) in text


def test_the_keyboard_reads_and_zooms(page: Any) -> None:
    chart = page.find_element("css selector", "#step .chart")
    page.execute_script("arguments[0].focus()", chart)
    page.switch_to.active_element.send_keys("\ue014")  # the right arrow
    first = page.find_element("css selector", "#step .readout").text
    page.switch_to.active_element.send_keys("\ue014")
    assert first and page.find_element("css selector", "#step .readout").text != first
    page.switch_to.active_element.send_keys("+")
    boxes = page.execute_script("return [...document.querySelectorAll('#step svg')].map(s => s.getAttribute('viewBox'))")
    assert len(set(boxes)) == 1 and float(boxes[0].split()[2]) == 500
    click(page, '#step [data-zoom="all"]')
    assert page.execute_script("return document.querySelector('#step svg').getAttribute('viewBox')") == "0 0 1000 100"


# --- where it is read


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_screen(driver: Any, path: Path, width: int, dark: bool) -> None:
    show(driver, width=width, dark=dark)
    driver.get(path.as_uri())
    widths = driver.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1] <= width
    out = driver.execute_script(
        "return [...document.querySelectorAll('button, input, h1, h2, svg, .readout, .count')]"
        ".filter(e => e.offsetParent !== null || e.tagName === 'svg').map(e => e.getBoundingClientRect())"
        ".filter(b => b.right > innerWidth + 1 || b.left < -1).length"
    )
    assert out == 0


def brightness(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_both_schemes(driver: Any, path: Path, dark: bool) -> None:
    show(driver, width=1200, dark=dark)
    driver.get(path.as_uri())
    back, text, soft = driver.execute_script(
        "const s = (at) => getComputedStyle(document.querySelector(at));"
        "return [s('body').backgroundColor, s('body').color, s('.note').color]"
    )
    if dark:
        assert brightness(back) < 0.2 and brightness(text) > 0.8 and brightness(soft) > 0.5
    else:
        assert brightness(back) > 0.9 and brightness(text) < 0.2 and brightness(soft) < 0.5


# --- reports that are unlike others

HOSTILE = '</script><script>document.title = "broken"</script><b>&amp;"\u2028\' \u00e4\u4e16<!--' + "x" * 200


def hostile_report(report: cm.SwapReport) -> cm.SwapReport:
    assert report.planned is not None
    places = dict.fromkeys(report.planned.trace.places, SavePlace(HOSTILE, HOSTILE))
    planned = dataclasses.replace(report.planned, trace=dataclasses.replace(report.planned.trace, places=places))
    return dataclasses.replace(report, device=HOSTILE, problems=(HOSTILE,), planned=planned)


def large_report(report: cm.SwapReport) -> cm.SwapReport:
    trace = chain(layers=1000)
    plan = random_plan(Random(0), trace)
    planned = PlannedStepData(trace=trace, plan=plan, link=H200_LINK, predicted=True, times_us=())
    (first, *_) = report.step_figures
    return dataclasses.replace(report, planned=planned, step_figures=(first,) * 3000)


UNLIKE: dict[str, Callable[[cm.SwapReport], cm.SwapReport]] = {
    "hostile names": hostile_report,
    "5000 tensors": large_report,
    "no plans": lambda report: gpt_report(plans=False, steps=2),
    "no step": lambda report: cm.SwapSession("1GiB", "64MiB", "sim").report(),
    "no times": lambda report: made_up(stall_us=None, copy_us=None, hidden_fraction=None, spans=(), simulated=False),
}


@pytest.mark.parametrize("which", UNLIKE)
def test_unlike_reports_open_on_a_phone_too(driver: Any, report: cm.SwapReport, tmp_path: Path, which: str) -> None:
    found = UNLIKE[which](report)
    found.save_html(tmp_path / "page.html")
    show(driver, width=360, dark=True)
    errors(driver)
    driver.get((tmp_path / "page.html").as_uri())
    assert errors(driver) == []
    assert driver.title == f"Swap report: {found.device}"
    widths = driver.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1] <= 360
    told = driver.execute_script("return JSON.parse(document.getElementById('data').textContent).figures")
    assert told == json.loads(json.dumps(found.to_dict()))
    if found.planned is not None:
        named = {row.name for row in picture_of(found.planned).tensors}
        assert {cells[0] for cells in rows(driver)} <= named and len(rows(driver)) == min(100, len(named))
    else:
        assert rows(driver) == []
