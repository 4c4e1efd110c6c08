"""`chameleon-mm plan` against figures that others measured and published: rows of published_figures.toml, and the page of them.

A ratio is of two step times, so that a GPU's rate cancels out. No price of the cost model was fitted to any row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chameleon_mm.units import GIB
from tests._published_steps import TOLD, predicted

ROOT = Path(__file__).resolve().parents[1]
ROWS: list[dict[str, Any]] = TOLD["row"]
MOST_MOVED, NEAR_RATIO, NEAR_PEAK = 0.02, 0.10, 0.05


def published_ratio(row: dict[str, Any]) -> float:
    """Ratio of the two step times that were published."""
    first, other = row["figures"]
    return float(first / other if row["unit"] in ("ms", "s") else other / first)


def ratio_now(row: dict[str, Any]) -> float:
    first, other = (predicted(name).step_us for name in row["ways"])
    tokens, others = row.get("tokens", (1, 1))
    return float(first / tokens / (other / others))


def peak_now(row: dict[str, Any]) -> float:
    name, _, unit, *_ = row["peak"]
    outcome = predicted(name)
    on_device = outcome.peak_bytes - (outcome.parameter_bytes if unit.endswith("above") else 0)
    return (outcome.host_bytes if unit.endswith("on the host") else on_device) / (GIB if unit == "GiB" else 1e9)


def off(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Shares by which the predicted ratio and peak, as written, differ from what was published; None: there is none."""
    ratio = row["ratio"] / published_ratio(row) - 1 if "ratio" in row else None
    return ratio, row["peak"][3] / row["peak"][1] - 1 if "peak" in row else None


def tables() -> str:
    """The page's tables: the figures, and for each row what was assumed and why it is off."""
    figures = ["| row | source | what | published | predicted | off | peak published | predicted | off |", "|" + "---|" * 9]
    notes = ["| row | model, GPU, ranks, batch x length | assumed | if it is off, why |", "|" + "---|" * 4]
    for number, row in enumerate(ROWS, 1):
        ratio_off, peak_off = off(row)
        ratio, peak = ("-", "-", "-"), ("-", "-", "-")
        if ratio_off is not None:
            first, other = row["figures"]
            of = f"{published_ratio(row):.3f} ({first:g} and {other:g} {row['unit']})"
            guessed = ", not counted" if row.get("guessed") else ""
            ratio = of, f"{row['ratio']:.3f}", _marked(ratio_off, NEAR_RATIO) + guessed
        if peak_off is not None:
            _, published, unit, now = row["peak"]
            peak = f"{published:g} {unit}", f"{now:.2f}", _marked(peak_off, NEAR_PEAK)
        source = f"[{row['source']}]({TOLD['sources'][row['source']]})"
        figures.append(f"| {' | '.join((str(number), source, row['what'], *ratio, *peak))} |")
        notes.append(f"| {number} | {row['setting']} | {row['assumed']} | {row.get('why', '')} |")
    return "\n".join((*figures, "", *notes))


def summary() -> str:
    ratios = [abs(share) for row in ROWS if (share := off(row)[0]) is not None and not row.get("guessed")]
    peaks = [abs(share) for row in ROWS if (share := off(row)[1]) is not None]
    return (
        f"{sum(r <= NEAR_RATIO for r in ratios)} of {len(ratios)} ratios are within 10 %, "
        f"{sum(p <= NEAR_PEAK for p in peaks)} of {len(peaks)} peaks within 5 %"
    )


def _marked(share: float, near: float) -> str:
    return f"{share:+.1%}" if abs(share) <= near else f"**{share:+.1%}**"


SAMPLED = (2, 9, 15, 21, 25, 26, 28)
"""Rows that a run of CI computes, in 25 seconds of CPU time: some share steps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if n in SAMPLED else pytest.mark.thorough, id=f"{n}") for n, row in enumerate(ROWS, 1)]
)
def test_a_prediction_is_the_one_that_was_held_against_what_was_published(row: dict[str, Any]) -> None:
    """Computed anew, on shapes. A change of ours that moves it belongs into the row, and the page then says what it is off."""
    if "ratio" in row:
        assert ratio_now(row) == pytest.approx(row["ratio"], rel=MOST_MOVED)
    if "peak" in row:
        assert peak_now(row) == pytest.approx(row["peak"][3], rel=MOST_MOVED)


def test_the_page_shows_every_row_as_it_is() -> None:
    page = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    assert tables() in page
    assert summary() in page
    *most, last = map(str, SAMPLED)
    assert f"rows {', '.join(most)} and {last} in each run of CI, the others in `make test-thorough`" in page


def test_there_are_rows_enough_and_none_that_is_off_is_left_without_a_reason() -> None:
    assert len(ROWS) >= 12
    assert len({row["source"] for row in ROWS}) >= 6
    assert set(TOLD["sources"]) == {row["source"] for row in ROWS}
    for row in ROWS:
        ratio, peak = off(row)
        is_off = abs(ratio or 0.0) > NEAR_RATIO or abs(peak or 0.0) > NEAR_PEAK
        assert row.get("why") or not is_off, row
