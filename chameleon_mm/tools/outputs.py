"""Output of commands: files, checked before any work starts, and tables of numbers.

check_outputs({"--json": args.json, "--trace": args.trace})
...
print_table(console, table)             # may be wider than the console: no number is broken in two
tell_written(console, args.json)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from chameleon_mm.units import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def check_outputs(files: Mapping[str, Path | None], *, make_folders: bool = False) -> None:
    """Raise `ValueError` if one of `files` cannot be written. A key is the option that names the file; None: no file.

    `make_folders`: the writer of the file makes missing folders.
    """
    for option, path in files.items():
        if path is None:
            continue
        try:
            if path.is_dir():
                raise ValueError(f"{option}: expected a file to write, got {path}, a folder; add the name of a file in it")
            if not make_folders and not path.parent.is_dir():
                raise ValueError(f"{option}: expected a file in an existing folder, got {path}; make {path.parent} first")
            may_be_written = _may_be_written(path)
        except OSError:  # a name that is too long, or below a file
            may_be_written = False
        if not may_be_written:
            raise ValueError(f"{option}: expected a file that may be written, got {path}; choose another, or change its rights")


def _may_be_written(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return os.access(next(parent for parent in path.parents if parent.exists()), os.W_OK)
    return os.access(path, os.W_OK)


def print_table(console: Console, table: Table) -> None:
    """Print `table` with lines broken only between words, and not at all in `no_wrap` columns: rich would cut those short.
    A table that does not fit is wider than the console."""
    from rich.measure import Measurement

    wide = console.options.update(width=1 << 16)
    for column in table.columns:
        if column.no_wrap:
            cells = (column.header, *column.cells)
            column.min_width = max(Measurement.get(console, wide, cell).maximum for cell in cells)
    needed = Measurement.get(console, wide, table).minimum
    if needed > console.width:
        table.width = needed
    console.print(table, crop=False)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print `text` made `printable`, without markup. Only the terminal breaks lines."""
    console.print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


def tell_written(console: Console, path: Path) -> None:
    print_line(console, f"written: {path}")
