"""What a session did: text for people, a dict for programs, an HTML page, a trace for chrome://tracing and Perfetto.

    report = session.report()
    print(report); report.to_dict(); report.save_html("swap.html"); report.save_trace("swap.json")

A figure that was not measured is None in the dict and "not measured" in the text. Simulated times say so.
"""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chameleon_mm.device import Device
from chameleon_mm.executor import CopySpan
from chameleon_mm.executor.meter import Meter
from chameleon_mm.pinned import PoolStats
from chameleon_mm.units import format_size, format_us

_LANES = {"out": (1, "d2h: swap out"), "in": (2, "h2d: swap in")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """Figures of one session. Bytes are bytes, `_us` microseconds of the device's clock (virtual on the simulator)."""

    device: str
    simulated: bool
    steps: int
    timed_steps: int
    """Steps whose copies and waits were timed: `stall_us`, `copy_us` and `hidden_fraction` speak of these."""
    detailed_steps: int
    """Steps recorded operator by operator. The default rule needs none."""
    plans: int
    plan_cache_hits: int
    bytes_swapped_out: int
    bytes_swapped_in: int
    bytes_reclaimed: int
    """HBM given back after a swap-out while the tensor was still needed later."""
    swap_ins_on_demand: int
    """Swap-ins that nobody had started before the use."""
    prefetches: int
    uses_on_device: int
    hidden_fraction: float | None
    """1 - stall / copy time: the share of the copies' time that compute did not wait for."""
    stall_us: float | None
    copy_us: float | None
    peak_hbm_bytes: int
    hbm_budget_bytes: int
    budget_misses: int
    """Looks at memory that found the budget passed with nothing left to give back."""
    peak_host_bytes: int
    host_reserved_bytes: int
    kept_by_reason: dict[str, int]
    """Saved tensors that stayed on the device, by reason."""
    fallbacks: int
    """Storages that stayed on the device because no pinned memory was to be had."""
    oom_retries: int
    spans: tuple[CopySpan, ...] = dataclasses.field(repr=False)

    @classmethod
    def of(
        cls, meter: Meter, pool: PoolStats, device: Device, *, steps: int, hbm_budget_bytes: int, peak_hbm_bytes: int
    ) -> SwapReport:
        meter.resolve()
        totals = meter.totals
        timed = totals.timed_steps > 0
        return cls(
            device=device.name,
            simulated=device.simulated,
            steps=steps,
            timed_steps=totals.timed_steps,
            detailed_steps=0,
            plans=0,
            plan_cache_hits=0,
            bytes_swapped_out=totals.bytes_swapped_out,
            bytes_swapped_in=totals.bytes_swapped_in,
            bytes_reclaimed=totals.bytes_reclaimed,
            swap_ins_on_demand=totals.swap_ins_on_demand,
            prefetches=totals.prefetches,
            uses_on_device=totals.uses_on_device,
            hidden_fraction=totals.hidden_fraction,
            stall_us=totals.stall_us if timed else None,
            copy_us=totals.copy_us if timed else None,
            peak_hbm_bytes=peak_hbm_bytes,
            hbm_budget_bytes=hbm_budget_bytes,
            budget_misses=totals.budget_misses,
            peak_host_bytes=pool.peak_live_bytes,
            host_reserved_bytes=pool.reserved_bytes,
            kept_by_reason=dict(sorted(totals.kept_by_reason.items())),
            fallbacks=totals.fallbacks,
            oom_retries=totals.oom_retries,
            spans=tuple(meter.spans),
        )

    def to_dict(self) -> dict[str, Any]:
        """Every figure but the copy spans, ready for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "spans"}

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each figure, for tables."""
        clock = " (simulated)" if self.simulated else ""
        host = format_size(self.peak_host_bytes)
        held = "held" if self.peak_hbm_bytes <= self.hbm_budget_bytes else "PASSED"
        kept = ", ".join(f"{count} {reason}" for reason, count in self.kept_by_reason.items()) or "none"
        return [
            ("device", self.device),
            ("steps", f"{self.steps}, {self.timed_steps} of them timed"),
            ("peak device memory", f"{format_size(self.peak_hbm_bytes)} (budget {format_size(self.hbm_budget_bytes)}, {held})"),
            ("swapped out / in", f"{format_size(self.bytes_swapped_out)} / {format_size(self.bytes_swapped_in)}"),
            ("reclaimed", format_size(self.bytes_reclaimed)),
            ("swap-ins", f"{self.prefetches} prefetched, {self.swap_ins_on_demand} on demand"),
            ("uses found on the device", str(self.uses_on_device)),
            (f"hidden share of copy time{clock}", _measured(self.hidden_fraction, lambda x: f"{100 * x:.1f} %")),
            (f"stall{clock}", _measured(self.stall_us, format_us)),
            ("pinned host memory", f"{host} live at most, {format_size(self.host_reserved_bytes)} reserved"),
            ("kept on the device", kept),
            ("fallbacks, OOM retries", f"{self.fallbacks}, {self.oom_retries}"),
        ]  # fmt: skip

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

    def save_html(self, path: str | Path) -> None:
        """Write a page of its own: the figures and the copies over time."""
        cells = "".join(f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>" for label, text in self.rows())
        clock = "simulated microseconds" if self.simulated else "microseconds"
        page = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Swap report</title><style>'
            "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
            "th{text-align:left;font-weight:600;padding-right:2rem}svg{width:100%;height:auto;background:#f6f6f4}"
            f"</style><h1>Swap report</h1><table>{cells}</table><h2>Copies, {clock}</h2>{self._timeline()}</html>"
        )
        Path(path).write_text(page, encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write the timed copies as a Chrome trace: one row per direction."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}} for tid, name in _LANES.values()
        ]
        events.extend(
            {
                "ph": "X",
                "name": f"swap_{span.direction} {format_size(span.nbytes)}",
                "pid": 0,
                "tid": _LANES[span.direction][0],
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
                "args": {"bytes": span.nbytes},
            }
            for span in self.spans
        )
        document = {"traceEvents": events, "otherData": {"device": self.device, "simulated": self.simulated}}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def _timeline(self) -> str:
        """The latest copies as bars, swap-outs above swap-ins."""
        spans = self.spans[-600:]
        if not spans:
            return "<p>No copy was timed.</p>"
        begin, end = min(s.start_us for s in spans), max(s.end_us for s in spans)
        scale = 1000 / max(end - begin, 1e-9)
        bars = "".join(
            f'<rect x="{(s.start_us - begin) * scale:.2f}" y="{20 if s.direction == "out" else 60}" '
            f'width="{max((s.end_us - s.start_us) * scale, 0.3):.2f}" height="30" '
            f'fill="{"#b8502f" if s.direction == "out" else "#2f6fb8"}"><title>{format_size(s.nbytes)} in '
            f"{format_us(s.end_us - s.start_us)}</title></rect>"
            for s in spans
        )
        return (
            f'<svg viewBox="0 0 1000 120" role="img">{bars}<text x="4" y="15" font-size="12">swap out (d2h)</text>'
            f'<text x="4" y="105" font-size="12">swap in (h2d)</text>'
            f'<text x="996" y="115" font-size="12" text-anchor="end">{format_us(end - begin)}</text></svg>'
        )


def _measured(value: float | None, show: Any) -> str:
    return "not measured" if value is None else str(show(value))
