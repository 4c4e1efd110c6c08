"""The end of a run: the session is left, and its report is written and told, once, for all ranks of a host by the last of them.

end = End(watch, files, console, ranks); end.begin()
end.ending = program.run()
end.tell()                              # or as the interpreter exits, where another thread trained
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.console import Console

from chameleon_mm.errors import ChameleonError
from chameleon_mm.merged_report import merge_reports
from chameleon_mm.outputs import print_line, tell_written
from chameleon_mm.report import SwapReport
from chameleon_mm.running.program import Ending
from chameleon_mm.running.ranks import Gathering, LaunchedRank, Told
from chameleon_mm.running.watch import TrainingWatch

_SHOWN = frozenset(
    {
        "device", "PROBLEM", "steps", "what the steps were", "peak device memory", "recomputed", "swapped out / in",
        "hidden share of copy time", "stall", "pinned host memory",
    }
)  # fmt: skip
"""Labels of the report that are shown at the end; all others are in its files."""


class End:
    """Leaves the session of a run, and tells what it did."""

    def __init__(self, watch: TrainingWatch, files: Mapping[str, Path | None], console: Console, ranks: LaunchedRank) -> None:
        self._watch = watch
        self._files = {option: ranks.own(path) for option, path in files.items() if path is not None}
        self._written: list[str] = []
        """Files that the report was written to."""
        self._console = console
        self._ranks = ranks
        self._gathering = Gathering(ranks) if ranks.count > 1 else None
        self._told = False
        self.ending = Ending(exit_code=0, error=None)
        self.exit_code = 0
        """1 where the session itself failed, or a file of its report."""

    def begin(self) -> None:
        """Let the other ranks know that this one runs."""
        if self._gathering is not None:
            self._gathering.begin()

    def tell(self) -> None:
        """Leave the session and tell what it did. Does nothing the second time, nor in a forked child."""
        if self._told or self._watch.in_forked_child:
            return
        self._told = True
        try:
            report = self._watch.finish(self.ending.error)
        except (ChameleonError, RuntimeError) as error:
            self.exit_code = 1
            self._say(f"the session failed as it ended: {error}")
            self._gather(None, "failed as it ended")
            return
        why = self._why_nothing(report)
        if report is not None:
            self._write(report)
        alone = self._gathering is None or (self.ending.error is not None and not self._follows)
        if why is not None and (alone or self._watch.failure is not None):
            self._say(why)
        if report is not None and alone:
            self._show(report)
        self._gather(report, why)

    @property
    def _follows(self) -> bool:
        """Whether an interrupt ended this rank, and so all: the first of them tells."""
        return self.ending.interrupted and self._ranks.rank > 0

    def _why_nothing(self, report: SwapReport | None) -> str | None:
        watch = self._watch
        if watch.failure is not None:
            return f"the program was stopped before its first step: {watch.failure}"
        if watch.stood_aside is not None:
            return f"{'nothing' if report is None else 'nothing more'} was swapped: {watch.stood_aside}"
        if report is not None:
            return None
        if watch.postponed is not None:
            return f"nothing was swapped: every forward that trains ran {watch.postponed}"
        return (
            "no training was seen: no module with parameters was called with gradients on in this process, and no optimizer "
            "stepped; what child processes train is not swapped"
        )

    def _write(self, report: SwapReport) -> None:
        writers: dict[str, Callable[[Path], object]] = {
            "--report": lambda path: path.write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8"),
            "--html": report.save_html,
            "--trace": report.save_trace,
        }
        for option, path in self._files.items():
            try:
                writers[option](path)
                self._written.append(str(path))
            except OSError as error:
                self.exit_code = 1
                self._say(f"{option}: {path} was not written: {error.strerror}")

    def _show(self, report: SwapReport) -> None:
        rows = [(label, text) for label, text in report.rows() if label.removesuffix(" (simulated)") in _SHOWN]
        width = max(len(label) for label, _ in rows)
        self._say("report" if self._ranks.count == 1 else f"report of rank {self._ranks.rank}")
        for label, text in rows:
            print_line(self._console, f"  {label:<{width}}  {text}")
        self._name_files(self._written)

    def _name_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            tell_written(self._console, Path(path))

    def _gather(self, report: SwapReport | None, why: str | None) -> None:
        if self._gathering is None:
            return
        figures = {} if report is None else report.to_dict()
        # A session knows its rank only where the program has a process group.
        told_of = {"rank": self._ranks.rank, "world_size": self._ranks.count, "why_nothing": why, "files": self._written}
        self._gathering.leave({**figures, **told_of, "exit_code": self.ending.exit_code})
        told = self._gathering.told_by_last()
        if told is not None:
            self._say(f"report of {len(told.figures)} ranks")
            for line in merged_lines(told):
                print_line(self._console, f"  {line}")
            self._name_files(path for figures in told.figures.values() for path in figures["files"])

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print_line(self._console, f"chameleon-mm run: {' '.join(text.split())}")


def merged_lines(told: Told) -> list[str]:
    """Lines that tell of several ranks: their merged report, and what is to be said of single ones."""
    reports = [figures for figures in told.figures.values() if "steps" in figures]
    lines = str(merge_reports(reports)).splitlines() if reports else []
    for rank, figures in told.figures.items():
        if "steps" not in figures:
            lines.append(f"rank {rank}: {figures['why_nothing']}")
        if figures["exit_code"]:
            lines.append(f"rank {rank}: exit code {figures['exit_code']}")
    lines.extend(f"rank {number} of this host: ended without a report" for number in told.missing)
    return lines
