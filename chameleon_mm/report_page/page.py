"""The report's page: one HTML file of its own, which asks no network for anything.

    text = page_html(device="H200", simulated=True, rows=..., figures=..., picture=..., steps=...)

The shapes and the figures are in it as they are; a script adds what tells the number under the pointer, the zoom, and the table
of tensors. It works with JSON in the page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from chameleon_mm.report_page.step_picture import StepPicture
from chameleon_mm.report_page.step_section import step_columns, step_section
from chameleon_mm.report_page.steps_section import MOST_STEPS, steps_section
from chameleon_mm.report_page.tensor_section import tensor_columns, tensor_section
from chameleon_mm.step_figures import StepFigures
from chameleon_mm.units import format_size, format_us

_PART = re.compile(r"<!--(\w+)-->")


def page_html(
    *,
    device: str,
    simulated: bool,
    rows: Sequence[tuple[str, str]],
    figures: Mapping[str, Any],
    picture: StepPicture | None,
    steps: Sequence[StepFigures],
) -> str:
    """Text of the page. `rows`: label and text of each figure; `figures`: the report's dict; `picture`: the step planned last,
    None where there is none."""
    title = f"Swap report: {device}"
    clock = "All times are of the simulator's virtual clock." if simulated else "Times are of the device's clock."
    parts = {
        "title": html.escape(title),
        "style": _file("page.css"),
        "script": _file("page.js"),
        "clock": clock,
        "problems": "".join(f'<p class="problem">{html.escape(text)}</p>' for label, text in rows if label == "PROBLEM"),
        "tiles": _tiles(figures),
        "step": step_section(picture),
        "tensors": tensor_section(picture),
        "steps": steps_section(steps),
        "figures": "".join(
            f'<tr><th scope="row">{html.escape(label)}</th><td>{html.escape(text)}</td></tr>' for label, text in rows
        ),
        "data": _json(_data(figures, picture, steps)),
    }
    return _PART.sub(lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("chameleon_mm.report_page") / name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """JSON that ends no script, whatever a name holds."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _tiles(figures: Mapping[str, Any]) -> str:
    hidden, stall = figures["hidden_fraction"], figures["stall_us"]
    tiles = [
        ("budget", format_size(figures["hbm_budget_bytes"]), "device memory"),
        ("peak", format_size(figures["peak_hbm_bytes"]) if figures["peak_hbm_bytes"] else "not measured", "device memory"),
        ("host", format_size(figures["peak_host_bytes"]), "pinned memory at most"),
        ("moved", format_size(figures["bytes_swapped_out"]), "swapped out"),
        ("hidden", "not measured" if hidden is None else f"{100 * hidden:.1f} %", "of copy time hidden"),
        ("stall", "not measured" if stall is None else format_us(stall), "in timed steps"),
        ("steps", str(figures["steps"]), "completed"),
    ]
    return "".join(
        f'<div class="tile" data-figure="{name}"><span>{name}</span><b>{html.escape(text)}</b><span>{what}</span></div>'
        for name, text, what in tiles
    )


def _data(figures: Mapping[str, Any], picture: StepPicture | None, steps: Sequence[StepFigures]) -> dict[str, Any]:
    found: dict[str, Any] = {"figures": figures}
    if picture is not None:
        found["step"] = step_columns(picture)
        if picture.tensors:
            found["tensors"] = tensor_columns(picture)
    if steps:
        found["steps"] = [step.to_dict() for step in steps[-MOST_STEPS:]]
    return found
