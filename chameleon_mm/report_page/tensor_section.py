"""Section of the page about the planned step's tensors: a table that the script fills, sorts and filters.

tensor_section(picture), tensor_columns(picture)      # HTML; the rows for the script
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chameleon_mm.report_page.step_picture import WHAT_PLANS_DO, StepPicture, TensorRow
from chameleon_mm.units import format_size

MOST_TENSORS = 8_000
"""Tensors in the page's table, the largest ones: 5000 make a page of 2 MiB."""

_COLUMNS = (
    ("name", "tensor"), ("does", "plan"), ("bytes", "size"), ("moved_bytes", "crosses"), ("saved_us", "made"),
    ("away_us", "away"), ("back_us", "back"), ("used_us", "used"), ("stall_us", "stall"),
    ("measured_stall_us", "waited"),
)  # fmt: skip
"""Columns of the table of tensors, and what stands above them."""


def tensor_section(picture: StepPicture | None) -> str:
    """HTML of the section; nothing where there is no plan."""
    if picture is None or not picture.tensors:
        return ""
    kinds = [kind for kind in WHAT_PLANS_DO if any(row.does == kind for row in picture.tensors)]
    buttons = "".join(
        f'<button type="button" data-kind="{kind}" aria-pressed="{"false" if kind else "true"}">{kind or "all"}</button>'
        for kind in ("", *kinds)
    )
    heads = "".join(
        f'<th scope="col" aria-sort="none"{"" if key in ("name", "does") else " class=n"}>'
        f'<button type="button" data-key="{key}">{text}</button></th>'
        for key, text in _COLUMNS
    )
    left = picture.tensors[MOST_TENSORS:]
    out = f" The {len(left)} smallest, {format_size(sum(row.nbytes for row in left))} in all, are left out." if left else ""
    return (
        '<section id="tensors" class="needs-script"><h2>Its tensors <span class="badge">predicted</span></h2>'
        '<p class="note">What autograd saves and may move, and what is held for others to be recomputed from it. Pick a row '
        f"to see its copies in the chart above.{out}</p>"
        '<div class="controls"><input type="search" placeholder="filter by name" '
        f'aria-label="Filter by name">{buttons}</div>'
        '<p class="note count"></p>'
        f'<div class="scroll"><table class="wide cards tensors"><thead><tr>{heads}</tr></thead>'
        "<tbody></tbody></table></div>"
        '<div class="controls"><button type="button" class="more" hidden>show more</button></div></section>'
    )


def tensor_columns(picture: StepPicture) -> dict[str, Any]:
    """Rows of the table, for the script."""
    names = ("tensor", *(key for key, _ in _COLUMNS))
    return {"columns": names, "rows": [_values(row, names) for row in picture.tensors[:MOST_TENSORS]]}


def _values(row: TensorRow, names: Iterable[str]) -> list[Any]:
    values = [row.nbytes if name == "bytes" else getattr(row, name) for name in names]
    return [round(value, 2) if isinstance(value, float) else value for value in values]
