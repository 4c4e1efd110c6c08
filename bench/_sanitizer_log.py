"""What compute-sanitizer's memcheck wrote, and whether it clears the kernels it watched.

    log = MemcheckLog.parse(text)            errors: of its summary, None without one;  reports;  complaint
    problem_of_fault(fault), problem_of_kernels(kernels, cases=612)      "" where nothing is wrong

A summary of no errors is also what a tool writes that saw nothing: so a run whose kernel reads past its buffer has to be
noticed, and the kernels' own program has to have come to its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_PREFIX = "========="
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?\b")
_FRAME = ("COMPUTE-SANITIZER", "ERROR SUMMARY")
_MAX_REPORTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MemcheckLog:
    """What a log says."""

    errors: int | None
    """By the summary at its end; None where the tool did not come to that."""
    reports: tuple[str, ...]
    """The first of them, a line each: the kind of access and the kernel's name."""
    complaint: str
    """What the tool says about itself or about the program, the last such line; empty where it says nothing."""

    @classmethod
    def parse(cls, text: str) -> MemcheckLog:
        """Read the text of a log file. Lines that do not begin with the tool's prefix are the program's own."""
        lines = [line[len(_PREFIX) :].rstrip() for line in text.splitlines() if line.startswith(_PREFIX)]
        summaries = _SUMMARY.findall("\n".join(lines))
        reports, complaints = [], []
        for line, following in pairwise([*lines, ""]):
            head, detail = line.strip(), following.strip()
            if not head or line.startswith("  ") or head.startswith(_FRAME):  # details are indented further than heads
                continue
            if detail.startswith("at "):  # where in which kernel: an access
                reports.append(f"{head} {detail}")
            else:
                complaints.append(head)
        return cls(
            errors=int(summaries[-1]) if summaries else None,
            reports=tuple(reports[:_MAX_REPORTS]),
            complaint=complaints[-1] if complaints else "",
        )

    def to_dict(self) -> dict[str, Any]:
        return {"errors": self.errors, "reports": list(self.reports), "complaint": self.complaint}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A program that ran under the tool."""

    returncode: int | None
    """The tool's; None if it was stopped because its time was over."""
    seconds: float
    log: MemcheckLog
    record: dict[str, Any] | None
    """What the program wrote of itself: `cases`, and the names of those that were `wrong`. None if it did not get there."""

    def to_dict(self) -> dict[str, Any]:
        return {"returncode": self.returncode, "seconds": round(self.seconds, 1), **self.log.to_dict()}


def problem_of_fault(fault: Watched) -> str:
    """Why a tool under which a kernel read past its buffer is not to be believed, in one line; empty if it noticed that."""
    if unfinished := _unfinished(fault):
        return f"the run with a deliberate fault: {unfinished}"
    if not fault.log.errors:
        return "a deliberate read past the end of a buffer went unnoticed: the tool does not see these kernels"
    return ""


def problem_of_kernels(kernels: Watched, *, cases: int) -> str:
    """Why the kernels are not cleared that ran all `cases`, in one line; empty if they are."""
    if unfinished := _unfinished(kernels):
        return unfinished
    if kernels.log.errors:
        return f"{kernels.log.errors} memory errors; the first: {next(iter(kernels.log.reports), 'not printed')}"
    if kernels.record is None:
        return f"the kernels' program left no record, exit code {kernels.returncode}"
    if wrong := kernels.record["wrong"]:
        return f"{len(wrong)} cases wrong under the tool; the first: {wrong[0]}"
    if kernels.record["cases"] != cases:
        return f"expected {cases} cases under the tool, got {kernels.record['cases']}"
    return f"the tool ended with exit code {kernels.returncode}" if kernels.returncode else ""


def _unfinished(run: Watched) -> str:
    if run.returncode is None:
        return f"stopped after {run.seconds:.0f} s"
    if run.log.errors is None:
        return f"the tool wrote no summary, exit code {run.returncode}: {run.log.complaint or 'nothing else in its log'}"
    return ""
