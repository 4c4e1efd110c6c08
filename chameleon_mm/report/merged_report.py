"""Report of all ranks, merged from the reports of the ranks.

    merged = merge_reports(reports)               # SwapReports, or their `to_dict()`, even read back from JSON
    print(merged); merged.to_dict(); merged.plans_agree; merged.differences

The caller collects the reports: from a file per rank, or by `torch.distributed.gather_object` after training. This module does
not communicate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from chameleon_mm.device.peak_watch import Peak
from chameleon_mm.errors import check_type, describe
from chameleon_mm.report.report import SwapReport
from chameleon_mm.units import format_apart, format_size, format_us, printable

_SUMMED = (
    "bytes_swapped_out", "bytes_swapped_in", "bytes_reclaimed", "bytes_recomputed", "bytes_held", "fallbacks",
    "pageable_swap_outs", "oom_retries", "steps_run_again", "budget_misses", "peak_host_bytes", "host_reserved_bytes",
)  # fmt: skip
"""Figures whose total is the sum over ranks. Pinned memory is included, because ranks of one machine share its memory."""

_WORST = ("peak_hbm_bytes", "stall_us", "late_us", "recompute_us", "planned_step_us", "measured_step_us")
"""Figures whose total is the maximum over ranks, because each rank has its own device, and all wait for the slowest."""

_NEEDED: dict[str, type | tuple[type, ...]] = {
    "rank": int, "world_size": int, "steps": int, "hbm_budget_bytes": int, "peak_hbm_bytes": int, "bytes_swapped_out": int,
    "bytes_swapped_in": int, "device": str, "plan_digests": dict,
}  # fmt: skip
"""Figures that every report has, and their types."""

_KINDS = {**dict.fromkeys((*_SUMMED, *_WORST), (int, float, NoneType)), "problems": (list, tuple), **_NEEDED}

_PLAN_WORDS = {
    "operators": "their steps have other operators, as parts of a pipeline have",
    "sizes": "their steps have the same operators on other sizes",
    "plan": "their steps are the same, and they chose otherwise, as budgets or measured times differ",
}
"""Reasons why plans differ, by the first digest that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedReport:
    """Figures of all ranks of a job. Sizes are in bytes, `_us` in microseconds, as in `SwapReport`."""

    ranks: tuple[dict[str, Any], ...]
    """Report of each rank as a dictionary, ordered by rank."""
    totals: dict[str, Any]
    """Sums of bytes and counts over ranks, maxima of device peaks and times (None: not measured), and the minimum of steps."""
    plans_agree: bool | None
    """True if all ranks follow the same plan; None: no rank has a plan, or reports are missing."""
    differences: tuple[str, ...]
    """Sentences about differences between the ranks, and about missing reports."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": "chameleon_mm/merged_report/1",
            "world_size": self.ranks[0]["world_size"],
            "totals": dict(self.totals),
            "plans_agree": self.plans_agree,
            "differences": list(self.differences),
            "ranks": [dict(rank) for rank in self.ranks],
        }

    def __str__(self) -> str:
        totals, simulated = self.totals, " (simulated)" if any(rank["simulated"] for rank in self.ranks) else ""
        agree = {True: "the same on all ranks", False: "not the same on all ranks", None: "not known"}[self.plans_agree]
        head = [
            ("ranks", f"{len(self.ranks)} of {self.ranks[0]['world_size']}"),
            ("plans", agree),
            *(("DIFFERENCE", sentence) for sentence in self.differences),
            ("highest peak of device memory", str(_peak(totals))),
            ("swapped out / in, all ranks", _two_sizes(totals)),
            (f"longest stall{simulated}", format_us(totals["stall_us"])),
            ("pinned host memory, all ranks", f"{format_size(totals['peak_host_bytes'])} live at most"),
        ]
        rows = [(f"rank {rank['rank']}", _row(rank, simulated)) for rank in self.ranks]
        problems = [(f"PROBLEM, rank {rank['rank']}", problem) for rank in self.ranks for problem in rank["problems"]]
        lines = [*head, *problems, *rows]
        width = max(len(label) for label, _ in lines)
        return printable("\n".join(f"{label:<{width}}  {text}" for label, text in lines))


def merge_reports(reports: Iterable[SwapReport | Mapping[str, Any]]) -> MergedReport:
    """Merge the reports of the ranks of one job, in any order: `SwapReport`s, or their `to_dict()`.

    Raises `TypeError` for an object that is not a report. Raises `ValueError` without reports, for a dictionary of other
    figures, for two reports of one rank, and for reports of different jobs' sizes.
    """
    check_type("merge_reports", reports, Iterable, "several reports", "pass a list of what session.report() gives")
    ranks = sorted((_figures(report) for report in reports), key=lambda figures: int(figures["rank"]))
    if not ranks:
        raise ValueError("merge_reports: expected a report of each rank, got none; pass what session.report() gives on each")
    numbers, sizes = [rank["rank"] for rank in ranks], sorted({rank["world_size"] for rank in ranks})
    if len(sizes) > 1:
        raise ValueError(f"merge_reports: expected reports of one job, got some of {_and(sizes)} ranks; merge each job's alone")
    if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
        raise ValueError(
            f"merge_reports: expected one report of each rank, got more of {_of_ranks(twice)}; merge one session's at a time"
        )
    missing = sorted(set(range(sizes[0])) - set(numbers))
    plans_agree, why = _plans(ranks)
    differences = [*_unlike(ranks), *([] if why is None else [why])]
    if missing:
        differences.append(f"no report of {_of_ranks(missing)} of {sizes[0]}: did they end before they made one?")
    totals: dict[str, Any] = {name: sum(rank.get(name) or 0 for rank in ranks) for name in _SUMMED}
    totals |= {name: max((rank[name] for rank in ranks if rank.get(name) is not None), default=None) for name in _WORST}
    at_most = [rank.get("peak_hbm_at_most_bytes") for rank in ranks]
    totals["peak_hbm_at_most_bytes"] = None if None in at_most else max(nbytes for nbytes in at_most if nbytes is not None)
    totals["steps"] = min(rank["steps"] for rank in ranks)
    agree = None if missing and plans_agree else plans_agree
    return MergedReport(ranks=tuple(ranks), totals=totals, plans_agree=agree, differences=tuple(differences))


def _figures(report: SwapReport | Mapping[str, Any]) -> dict[str, Any]:
    check_type("merge_reports", report, (SwapReport, Mapping), "SwapReports or their to_dict()", "read a file by json.load")
    figures = report.to_dict() if isinstance(report, SwapReport) else dict(report)
    if lacking := [name for name in _NEEDED if name not in figures]:
        raise ValueError(
            f"merge_reports: expected SwapReports or what their to_dict() gives, got a dictionary without {_and(lacking)}; "
            f"write it again with this version"
        )
    wrong = [name for name, kind in _KINDS.items() if name in figures and not isinstance(figures[name], kind)]
    if wrong:
        raise ValueError(
            f"merge_reports: expected {wrong[0]} as to_dict() gives it, got {describe(figures[wrong[0]])}; write it again with "
            f"this version"
        )
    return {"problems": [], "simulated": False, **figures}


def _unlike(ranks: list[dict[str, Any]]) -> list[str]:
    """Return sentences about budget, device and number of steps, if ranks differ in them."""
    told = (("hbm_budget_bytes", "hbm_budget", format_apart), ("device", "device", list), ("steps", "steps completed", list))
    found = []
    for name, label, show in told:
        groups = _groups(ranks, lambda rank, name=name: rank[name])
        if len(groups) > 1:
            texts = zip(show([value for value, _ in groups]), groups, strict=True)
            found.append(f"{label}: " + ", ".join(f"{text} on {_of_ranks(who)}" for text, (_, who) in texts))
    return found


def _plans(ranks: list[dict[str, Any]]) -> tuple[bool | None, str | None]:
    """Return True if all ranks follow one plan (None: no rank has a plan), and a sentence about differences between plans."""
    planned = [rank for rank in ranks if "plan" in rank["plan_digests"]]
    if not planned:
        return None, None
    if without := [rank["rank"] for rank in ranks if "plan" not in rank["plan_digests"]]:
        have = _of_ranks([rank["rank"] for rank in planned])
        return False, f"plans: {have} follow one and {_of_ranks(without)} none, where the default rule applies"
    for name, words in _PLAN_WORDS.items():
        groups = _groups(ranks, lambda rank, name=name: str(rank["plan_digests"].get(name)))
        if len(groups) > 1:
            who = "; ".join(_of_ranks(numbers) for _, numbers in groups)
            return False, f"plans: there are {len(groups)}, of {who}: {words}"
    return True, None


def _groups(ranks: list[dict[str, Any]], key: Any) -> list[tuple[Any, list[int]]]:
    """Return the values of `key` in order of appearance, each with its ranks."""
    groups: dict[Any, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank["rank"])
    return list(groups.items())


def _row(rank: dict[str, Any], simulated: str) -> str:
    peak = f"peak {_peak(rank)} of {format_size(rank['hbm_budget_bytes'])}"
    return f"{rank['steps']} steps, {peak}, {_two_sizes(rank)} out / in, stall{simulated} {format_us(rank.get('stall_us'))}"


def _peak(figures: Mapping[str, Any]) -> Peak:
    return Peak(figures["peak_hbm_bytes"], figures.get("peak_hbm_at_most_bytes"))


def _two_sizes(figures: Mapping[str, Any]) -> str:
    return f"{format_size(figures['bytes_swapped_out'])} / {format_size(figures['bytes_swapped_in'])}"


def _of_ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {_and(numbers)}"


def _and(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
