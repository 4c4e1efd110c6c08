"""Measurement and output of every benchmark here: samples, figures, tables, files.

    samples = interleave({"pinned": lambda: timed_us(stream, copy), "pageable": ...})   # same process, rotating order
    results = Results("copy", device, columns)
    results.add("H2D", {"bytes": n}, {"pinned": Figure.of(samples["pinned"], "us", simulated=...), "ratio": Waived("why")})
    results.deliver(args, console)

A cell is a `Figure` or a `Waived` with its reason; a row without one of the columns is an error. Columns marked simulated have
only simulated figures, all others only measured ones.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chameleon_mm.bench._environment import environment, write_record
from chameleon_mm.bench._stand_in import NOT_MEASURED
from chameleon_mm.device.protocols import Device, Stream
from chameleon_mm.tools.outputs import print_table

__all__ = ["Cell", "Column", "Figure", "Results", "Waived", "environment", "interleave", "timed_us"]

_Sample = TypeVar("_Sample")

_SAME = 0.005
"""Share of the median. Percentiles that differ from it by less are not shown: their digits would be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Quantity that was measured: median of `count` samples, and their 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float
    count: int
    unit: str
    simulated: bool

    @classmethod
    def of(cls, samples: Sequence[float], unit: str, *, simulated: bool) -> Figure:
        """Summarise `samples` (at least one; `ValueError` otherwise) of a quantity in `unit`."""
        if not samples:
            raise ValueError(f"Figure.of: expected at least one sample ({unit}), got none; run the peer at least once")
        cuts = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else [samples[0]] * 4
        median = statistics.median(samples)
        return cls(median=median, p20=cuts[0], p80=cuts[3], count=len(samples), unit=unit, simulated=simulated)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        middle, far = _digits(self.median), _SAME * abs(self.median)
        steady = self.median - self.p20 <= far and self.p80 - self.median <= far
        return middle if steady else f"{middle} ({_digits(self.p20)}..{_digits(self.p80)})"


def simulated_figure(value: float, unit: str) -> Figure:
    return Figure.of([value], unit, simulated=True)


@dataclass(frozen=True, slots=True)
class Waived:
    """Reason why a quantity could not be measured here."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("Waived: expected the reason why there is no figure, got an empty text")

    def to_dict(self) -> dict[str, Any]:
        return {"waived": self.reason}

    def __str__(self) -> str:
        return "WAIVED"


Cell = Figure | Waived


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of a result table."""

    key: str
    title: str
    """Short title with the unit, since tables fit 80 columns: "pinned GB/s"."""
    formula: str
    """Formula of a sample: "bytes * copies / elapsed"."""
    simulated: bool = False
    """True if the column's figures are a simulator's; no other column has such figures."""
    on_stand_in: bool = False
    """True if figures on the CUDA stand-in equal those on a GPU: bytes, counts, the host's own work. No other column has
    figures there."""


def columns(about: Mapping[str, tuple[str, str]], *, simulated: bool = False, on_stand_in: bool = False) -> tuple[Column, ...]:
    """Columns of one kind. `about`: key -> title and formula."""
    return tuple(
        Column(key=key, title=title, formula=formula, simulated=simulated, on_stand_in=on_stand_in)
        for key, (title, formula) in about.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    params: Mapping[str, Any]
    cells: Mapping[str, Cell]


class Results:
    """Table of one theme on one device: rows of cells under fixed columns, as text and JSON.

    On the CUDA stand-in, figures that only a GPU has are waived when they are added.
    """

    def __init__(self, theme: str, device: Device, columns: Sequence[Column]) -> None:
        self.header = environment(theme, device)
        self.columns = tuple(columns)
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def add(self, name: str, params: Mapping[str, Any], cells: Mapping[str, Cell]) -> None:
        """Append a row. Raises `ValueError` if the keys of `cells` are not exactly the columns, or if a figure's `simulated`
        differs from its column's."""
        expected = {column.key for column in self.columns}
        if set(cells) != expected:
            raise ValueError(
                f"row {name!r}: expected cells {sorted(expected)}, got {sorted(cells)}; say Waived(reason) where there is none"
            )
        for column in self.columns:
            cell = cells[column.key]
            if isinstance(cell, Figure) and cell.simulated != column.simulated:
                raise ValueError(
                    f"row {name!r}, column {column.key!r}: expected simulated={column.simulated}, got a figure with "
                    f"simulated={cell.simulated}; put it in a column of its own"
                )
        kept = {column.key: self._kept(column, cells[column.key]) for column in self.columns}
        self.rows.append(Row(name=name, params=dict(params), cells=kept))

    def _kept(self, column: Column, cell: Cell) -> Cell:
        # A simulated figure in the same row is the simulator's, and the same on every machine.
        if self.header["stand_in"] and not (column.on_stand_in or column.simulated) and isinstance(cell, Figure):
            return Waived(NOT_MEASURED)
        return cell

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.header,
            "columns": [{"key": c.key, "title": c.title, "formula": c.formula, "simulated": c.simulated} for c in self.columns],
            "rows": [
                {"name": row.name, **row.params, "cells": {key: cell.to_dict() for key, cell in row.cells.items()}}
                for row in self.rows
            ],
            "notes": list(self.notes),
        }

    def deliver(self, args: argparse.Namespace, console: Console) -> None:
        """Print the table, and write the file that the user asked for by `--json`."""
        self.show(console)
        if args.json:
            write_record(Path(args.json), self.to_dict())

    def show(self, console: Console) -> None:
        """Print the table, then the conditions of its numbers.

        A column without any figure is left out: the list below says that it is waived, and why.
        """
        measured = [c for c in self.columns if any(isinstance(row.cells[c.key], Figure) for row in self.rows)]
        table = Table(box=box.SIMPLE_HEAVY, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("", no_wrap=True)  # readers find a row by its name, so names do not wrap; figures with a spread may
        for column in measured:
            table.add_column(_title(column), justify="right")
        for row in self.rows:
            table.add_row(Text(row.name), *(str(row.cells[column.key]) for column in measured))
        console.print(Text(f"{self.header['theme']} on {self.header['device']}", style="bold"))
        print_table(console, table)
        console.print()
        notes = Table.grid(padding=(0, 1))
        for line in self._footer(measured):
            notes.add_row("-", Text(line))
        console.print(notes, style="dim")

    def _footer(self, shown: Sequence[Column]) -> list[str]:
        header = self.header
        lines = [f"{_title(column)}: {column.formula}" for column in shown]
        lines.append(f"each figure: the median, and (p20..p80) where one is more than {_SAME:.1%} from it")
        if any(column.simulated for column in self.columns):
            lines.append("sim.: simulated, in virtual time; no GPU took part in such a figure")
        lines += [f"WAIVED, {where}: {reason}" for reason, where in self._waived().items()]
        lines += self.notes
        dirty = ", with uncommitted changes" if header["dirty"] else ""
        lines.append(", ".join(f"{name} {version}" for name, version in header["versions"].items()))
        lines.append(f"commit {header['commit'][:12]}{dirty}, {header['date']}")
        return lines

    def _waived(self) -> dict[str, str]:
        """Reason -> cells that it waives: whole rows by their names, else columns by their titles."""
        cells: dict[str, list[tuple[Row, Column]]] = {}
        for row in self.rows:
            for column in self.columns:
                cell = row.cells[column.key]
                if isinstance(cell, Waived):
                    cells.setdefault(cell.reason, []).append((row, column))
        where: dict[str, str] = {}
        for reason, places in cells.items():
            rows, columns = dict.fromkeys(row.name for row, _ in places), dict.fromkeys(_title(column) for _, column in places)
            where[reason] = ", ".join(rows if len(places) == len(rows) * len(self.columns) else columns)
        return where


def _title(column: Column) -> str:
    return f"{column.title} sim." if column.simulated else column.title


def _digits(value: float) -> str:
    """Three digits, or all digits before the point; a whole number as it is."""
    return f"{value:.0f}" if abs(value) >= 99.95 or float(value).is_integer() else f"{value:#.3g}"


def free_unused() -> None:
    """Collect cycles and empty the allocator's cache, so that earlier runs hold no memory."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operators on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable the garbage collector: otherwise the peer that makes the most objects would collect those of all peers. Run
    operators on one thread: idle threads would spin until there is work, which counts as processor time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with one_thread():
            yield
    finally:
        if was_enabled:
            gc.enable()


def timed_us(stream: Stream, work: Callable[[], None]) -> float:
    """Microseconds on the device between two timed events of `stream` around `work`. The host waits for the second."""
    start = stream.record(timed=True)
    work()
    end = stream.record(timed=True)
    end.synchronize()
    return end.elapsed_us(start)


def interleave(
    peers: Mapping[str, Callable[[], _Sample]], *, warmup: int = 2, repeats: int = 9, limit_s: float | None = None
) -> dict[str, list[_Sample]]:
    """Sample every peer `repeats` times, after `warmup` rounds that do not count.

    One round runs every peer once, and each round starts one peer later: drift (clocks, heat, other tenants) and the place in
    the round affect all peers alike. No round starts after `limit_s` seconds of wall clock, but one always counts.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"interleave: expected repeats >= 1 and warmup >= 0, got repeats={repeats}, warmup={warmup}")
    names = list(peers)
    samples: dict[str, list[_Sample]] = {name: [] for name in names}
    start = time.monotonic()
    for done in range(-warmup, repeats):
        if done > 0 and limit_s is not None and time.monotonic() - start > limit_s:
            break
        shift = done % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            sample = peers[name]()
            if done >= 0:
                samples[name].append(sample)
    return samples
