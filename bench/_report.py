"""Several tables of one theme under one header, and the bounds that they decide.

report = Report(header=environment("pack", device), tables={"rates": results, ...}, bounds=[Bound(...), ...])
report.deliver(args, console)              # prints; writes what the user asked for
return int(report.failed)                  # 1 only for a bound that no machine can excuse
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
    """A promise, and what this run found."""

    name: str
    limit: float
    found: Found
    at_most: bool = True
    """False: at least."""
    unit: str = ""
    counted: bool = False
    """Whether it follows from the code alone, so that missing it is a fault and no accident of the machine."""
    on_stand_in: bool = False
    """Whether the CUDA stand-in can tell, as it can what is counted: of times and rates it says nothing."""

    @property
    def held(self) -> bool | None:
        """None: not measured here."""
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
        """Whether a bound was missed that no machine can excuse."""
        return any(bound.held is False and bound.counted for bound in self.bounds)

    def to_dict(self) -> dict[str, Any]:
        tables = {
            part: {key: table.to_dict()[key] for key in ("columns", "rows", "notes")} for part, table in self.tables.items()
        }
        bounds = [bound.to_dict() for bound in self.bounds]
        return {**self.header, "headline": self.headline, "tables": tables, "bounds": bounds}

    def show(self, console: Console) -> None:
        """Print it. A table without one figure takes one line: what is waived, and why."""
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
        """Print it, and write the file that `add_output_arguments` let the user ask for."""
        self.show(console)
        if args.json:
            write_record(Path(args.json), self.to_dict())


def _on_stand_in(bound: Bound) -> Bound:
    told = bound.counted or bound.on_stand_in or isinstance(bound.found, Waived)
    return bound if told else replace(bound, found=Waived(NOT_MEASURED))


def median_of(cell: Cell) -> Found:
    """The median of a figure; a waived cell as it is."""
    return cell.median if isinstance(cell, Figure) else cell


def over(a: Found, b: Found) -> Found:
    """`a / b`, waived where either is."""
    if isinstance(a, Waived):
        return a
    return b if isinstance(b, Waived) else a / b


def most(found: Sequence[Found]) -> Found:
    """The largest of what was measured; waived where nothing was."""
    measured = [value for value in found if not isinstance(value, Waived)]
    return max(measured) if measured else next(value for value in found if isinstance(value, Waived))
