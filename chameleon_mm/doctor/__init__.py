"""Describes what this machine offers, and says what is missing and which command mends it.

    for finding in collect(): finding.section, finding.name, finding.text, finding.available
    run(json_path, console)     # the same as a table, and as JSON where a path is given

A part that is missing is a row, never a crash.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chameleon_mm.doctor.checks import CHECKS, Check
from chameleon_mm.outputs import tell_written

__all__ = ["Finding", "collect", "find", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: what was looked at, and what was seen or why nothing was."""

    section: str
    name: str
    text: str
    available: bool


def collect(root: Path = Path("/")) -> list[Finding]:
    """Look at everything. Never raises for a missing part. Starts CUDA where there is one, and copies for less than a second.

    `root` is where `proc` and `sys` lie.
    """
    return [find(section, name, check, root) for section, name, check in CHECKS]


def find(section: str, name: str, check: Check, root: Path = Path("/")) -> Finding:
    """The row that `check` makes. Whatever it raises becomes "unavailable: reason"."""
    try:
        return Finding(section=section, name=name, text=check(root), available=True)
    except Exception as error:  # noqa: BLE001  # a machine may be broken in any way, and the other rows still matter
        reason = str(error) or type(error).__name__
        return Finding(section=section, name=name, text=f"unavailable: {reason}", available=False)


def run(json_path: Path | None, console: Console) -> int:
    """Collect, show on `console`, write JSON to `json_path` if given. The exit code: 0, whatever was found.

    Raises `OSError` when the file cannot be written.
    """
    table = Table(title="What this machine offers", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column("section", style="bold", no_wrap=True)
    table.add_column("name", no_wrap=True)
    table.add_column("found", overflow="fold")
    sections: dict[str, dict[str, dict[str, object]]] = {}
    for finding in collect():
        heading = "" if finding.section in sections else finding.section
        # Text, not str: drivers answer "[N/A]", which rich would take for markup.
        table.add_row(heading, finding.name, Text(finding.text, style="" if finding.available else "yellow"))
        sections.setdefault(finding.section, {})[finding.name] = {"available": finding.available, "text": finding.text}
    console.print(table)
    if json_path is not None:
        record = {"schema": "chameleon_mm.doctor/3", "findings": sections}
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        tell_written(console, json_path)
    return 0
