"""The doctor's findings as data, and how they are shown.

finding = run_probe("host", "memory available", probe)      # "unavailable: why" where the probe raises
report = DoctorReport(findings=(...))
console.print(render(report)); json.dump(report.to_dict(), file)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

Probe = Callable[[], tuple[str, Any]]
"""Probes one thing: returns a text for people and a value for programs (what JSON can hold). Raises where there is nothing."""


class Unavailable(Exception):  # an answer among the doctor's findings, not an error
    """Raised by a probe with the reason why there is nothing to tell, and the command that mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: what was looked at, and what was seen or why nothing was."""

    section: str
    name: str
    text: str
    value: Any
    available: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All rows, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """`{"schema", "findings": {section: {name: {"available", "text", "value"}}}}`."""
        sections: dict[str, dict[str, Any]] = {}
        for finding in self.findings:
            row = {"available": finding.available, "text": finding.text, "value": finding.value}
            sections.setdefault(finding.section, {})[finding.name] = row
        return {"schema": "chameleon_mm.doctor/2", "findings": sections}


def run_probe(section: str, name: str, probe: Probe) -> Finding:
    """The row that `probe` makes. Whatever it raises becomes "unavailable: reason"."""
    try:
        text, value = probe()
    except Exception as error:  # noqa: BLE001  # a machine may be broken in any way, and the other rows still matter
        reason = str(error) or type(error).__name__
        return Finding(section=section, name=name, text=f"unavailable: {reason}", value=None, available=False)
    return Finding(section=section, name=name, text=text, value=value, available=True)


def render(report: DoctorReport) -> Table:
    """A table for a rich console, one section after the other."""
    table = Table(title="What this machine offers", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column("section", style="bold", no_wrap=True)
    table.add_column("name", no_wrap=True)
    table.add_column("found", overflow="fold")
    last = None
    for finding in report.findings:
        heading = "" if finding.section == last else finding.section
        last = finding.section
        # Text, not str: drivers answer "[N/A]", which rich would take for markup.
        table.add_row(heading, Text(finding.name), Text(finding.text, style="" if finding.available else "yellow"))
    return table
