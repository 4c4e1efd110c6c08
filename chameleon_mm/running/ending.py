"""The end of a run: the session is left, and its report is written and told, once; of several ranks the first tells.

end = End(watch, files, console, ranks)
end.ending = program.run()
end.tell()                              # or as the interpreter exits, where another thread trained
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from chameleon_mm.errors import ChameleonError
from chameleon_mm.outputs import print_line, tell_written
from chameleon_mm.report import SwapReport
from chameleon_mm.running.launched_ranks import LaunchedRank
from chameleon_mm.running.main_program import Ending
from chameleon_mm.running.training_watch import TrainingWatch

_SHOWN = frozenset(
    {
        "device", "PROBLEM", "steps", "what the steps were", "peak device memory", "recomputed", "swapped out / in",
        "hidden share of copy time", "stall", "pinned host memory",
    }
)  # fmt: skip
"""Labels of the report that are shown at the end; all others are in its files."""


class End:
    """Leaves the session of a run, and tells what it did."""

    def __init__(self, watch: TrainingWatch, files: Mapping[str, Path], console: Console, ranks: LaunchedRank) -> None:
        self._watch = watch
        self._files = files
        self._written: list[Path] = []
        """Files that the report was written to."""
        self._console = console
        self._ranks = ranks
        self._told = False
        self.ending = Ending(exit_code=0, error=None)
        self.exit_code = 0
        """1 where the session itself failed, or a file of its report."""

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
            return
        why = self._why_nothing(report)
        if report is not None:
            self._write(report)
        failed = self.ending.error is not None and not self.ending.interrupted  # an interrupt ends all ranks
        tells = self._ranks.rank == 0 or failed
        if why is not None and (tells or self._watch.failure is not None):
            self._say(why)
        if report is not None and tells:
            self._show(report)

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
        figures = report.to_dict()
        if self._ranks.count > 1:  # a session knows its rank only where the program has a process group
            figures |= {"rank": self._ranks.rank, "world_size": self._ranks.count}
        writers: dict[str, Callable[[Path], object]] = {
            "--report": lambda path: path.write_text(json.dumps(figures, indent=1), encoding="utf-8"),
            "--html": report.save_html,
            "--trace": report.save_trace,
        }
        for option, path in self._files.items():
            try:
                writers[option](path)
                self._written.append(path)
            except OSError as error:
                self.exit_code = 1
                self._say(f"{option}: {path} was not written: {error.strerror}")

    def _show(self, report: SwapReport) -> None:
        rows = [(label, text) for label, text in report.rows() if label.removesuffix(" (simulated)") in _SHOWN]
        width = max(len(label) for label, _ in rows)
        self._say("report" if self._ranks.count == 1 else f"report of rank {self._ranks.rank} of {self._ranks.count}")
        for label, text in rows:
            print_line(self._console, f"  {label:<{width}}  {text}")
        for path in self._written:
            tell_written(self._console, path)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print_line(self._console, f"chameleon-mm run: {' '.join(text.split())}")
