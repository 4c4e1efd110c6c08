"""Several tables of one theme under one header, and bounds that are checked by them.

report = Report(header=environment("pack", device), tables={"rates": results, ...}, bounds=[Bound(...), ...])
report.deliver(args, console)              # prints; writes what the user asked for
return int(report.failed)                  # 1 only if a bound is missed that does not depend on the machine
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from chameleon_mm.bench._environment import write_record
from chameleon_mm.bench._measure import Cell, Figure, Results, Waived
from chameleon_mm.bench._stand_in import NOT_MEASURED

Found = float | Waived


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Limit that is promised, and the value that this run found."""

    name: str
    limit: float
    found: Found
    at_most: bool = True
    """True: the limit is a maximum; False: a minimum."""
    unit: str = ""
    counted: bool = False
    """True if the value depends on the code alone: a missed bound is then a fault, not an accident of the machine."""
    on_stand_in: bool = False
    """True if the CUDA stand-in gives the value, as it does for counts; it gives no times or rates."""

    @property
    def held(self) -> bool | None:
        """True if the bound holds; None: not measured here."""
        if isinstance(self.found, Waived):
            return None
        return self.found <= self.limit if self.at_most else self.found >= self.limit

    def to_dict(self) -> dict[str, Any]:
        found = self.found.to_dict() if isinstance(self.found, Waived) else self.found
        return {
            "name": self.name, "limit": self.limit, "at_most": self.at_most, "unit": self.unit,
            "found": found, "held": self.held, "counted": self.counted,
        }  # fmt: skip

    def __str__(self) -> str:
        if isinstance(self.found, Waived):
            return f"WAIVED    {self.name}: {self.found.reason}"
        verdict = "held    " if self.held else "NOT HELD"
        relation = "at most" if self.at_most else "at least"
        return f"{verdict}  {self.name}: {self.found:.4g} {self.unit}".rstrip() + f", {relation} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tables by part, and bounds."""

    header: Mapping[str, Any]
    tables: Mapping[str, Results]
    bounds: Sequence[Bound] = ()

    def __post_init__(self) -> None:
        if self.header.get("stand_in"):
            object.__setattr__(self, "bounds", [_on_stand_in(bound) for bound in self.bounds])

    @property
    def headline(self) -> str:
        missed = [bound.name for bound in self.bounds if bound.held is False]
        held = sum(bound.held is True for bound in self.bounds)
        text = f"{held} of {len(self.bounds)} bounds held, {len(self.bounds) - held - len(missed)} waived"
        return text + (f"; NOT held: {', '.join(missed)}" if missed else "")

    @property
    def failed(self) -> bool:
        """True if a bound was missed that does not depend on the machine."""
        return any(bound.held is False and bound.counted for bound in self.bounds)

    def to_dict(self) -> dict[str, Any]:
        keys = ("columns", "rows", "notes")
        tables = {part: {key: table.to_dict()[key] for key in keys} for part, table in self.tables.items()}
        bounds = [bound.to_dict() for bound in self.bounds]
        return {**self.header, "headline": self.headline, "tables": tables, "bounds": bounds}

    def show(self, console: Console) -> None:
        """Print the report. A table without any figure takes one line: its name, and why it is waived."""
        for part, table in self.tables.items():
            cells = [cell for row in table.rows for cell in row.cells.values()]
            if any(isinstance(cell, Figure) for cell in cells):
                table.show(console)
            else:
                reasons = dict.fromkeys(cell.reason for cell in cells if isinstance(cell, Waived))
                console.print(Text(f"{part}: WAIVED, {'; '.join(reasons)}"))
            console.print()
        console.print(Text("bounds", style="bold"))
        for bound in self.bounds:
            if bound.held is not None:
                console.print(Text(str(bound), style="" if bound.held else "red"), soft_wrap=True)
        for reason, names in self._waived().items():
            console.print(Text(f"WAIVED    {reason}:"))
            for name in names:
                console.print(Text(f"            {name}"))

    def _waived(self) -> dict[str, list[str]]:
        """Reason -> bounds."""
        where: dict[str, list[str]] = {}
        for bound in self.bounds:
            if isinstance(bound.found, Waived):
                where.setdefault(bound.found.reason, []).append(bound.name)
        return where

    def deliver(self, args: argparse.Namespace, console: Console) -> None:
        """Print the report, and write the file that the user asked for by `--json`."""
        self.show(console)
        if args.json:
            write_record(Path(args.json), self.to_dict())


def _on_stand_in(bound: Bound) -> Bound:
    told = bound.counted or bound.on_stand_in or isinstance(bound.found, Waived)
    return bound if told else replace(bound, found=Waived(NOT_MEASURED))


def median_of(cell: Cell) -> Found:
    """Median of a figure; a waived cell as it is."""
    return cell.median if isinstance(cell, Figure) else cell


def over(a: Found, b: Found) -> Found:
    """`a / b`; waived if either is."""
    if isinstance(a, Waived):
        return a
    return b if isinstance(b, Waived) else a / b


def most(found: Sequence[Found]) -> Found:
    """Maximum of the measured values; waived if nothing was measured."""
    measured = [value for value in found if not isinstance(value, Waived)]
    return max(measured) if measured else next(value for value in found if isinstance(value, Waived))
