"""Measure the rates of the link from the copies that this process timed.

rates_of(spans, otherwise)      # LinkCost: each figure is measured if there are enough copies, else from `otherwise`

alone:   bytes / (time - copy_us), the median over copies that no copy of the other direction overlaps
duplex:  bytes of both directions / time in which both were busy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median

import numpy as np

from chameleon_mm.device import Device
from chameleon_mm.plan.timing import FASTEST_GBPS, LINK_RATES, SLOWEST_GBPS, LinkCost
from chameleon_mm.plan.trace import Float64s
from chameleon_mm.swap.calibration import kept
from chameleon_mm.swap.metrics import CopySpan

UNMEASURED_LINK = LinkCost(d2h_gbps=54.9, h2d_gbps=55.4, duplex_gbps=83.0)
"""Published rates of an H200 on PCIe 5, used until copies are timed in the first steps."""

_LEAST_PIECES = 4
"""Minimum number of copies for a measured rate."""

_LEAST_SHARED_US = 50.0
"""Minimum time in us in which both directions are busy, for a measured duplex rate."""

_LATEST, _LATEST_US = 4_000, 300e6
"""Number of copies per direction, and their maximum age in us. Older copies do not show the present rate."""

_FEW = 9
"""Number of latest copies whose median start is the present time, so that one or two wrong times do not matter."""


def link_cost_for(device: Device) -> LinkCost:
    """Return the link cost measured on this machine and stored, or else `UNMEASURED_LINK`."""
    values = kept(device, "link") or {}
    rates = [rate for name in LINK_RATES if isinstance(rate := values.get(name), float)]
    if len(rates) < 3 or not all(map(_is_rate, rates[:2])):
        return UNMEASURED_LINK
    return _link(UNMEASURED_LINK, *rates)


def rates_of(spans: Sequence[CopySpan], otherwise: LinkCost) -> LinkCost:
    """Return the link cost measured from `spans`, copies on one clock. `otherwise`: figures to use if there are too few copies.

    Only the latest copies count. A copy with a zero, negative or non-finite time is ignored, so bad timings raise no error.
    """
    sane = [span for span in spans if 0 < span.end_us - span.start_us <= _LATEST_US]  # False for NaN and infinity
    now_us = median(span.start_us for span in sane[-_FEW:]) if sane else 0.0
    recent = [span for span in sane if abs(span.start_us - now_us) <= _LATEST_US]
    out, back = (_rows([span for span in recent if span.direction == way])[-_LATEST:] for way in ("out", "in"))
    d2h_gbps, h2d_gbps = (
        _alone_gbps(one, other, otherwise.copy_us) or rate
        for one, other, rate in ((out, back, otherwise.d2h_gbps), (back, out, otherwise.h2d_gbps))
    )
    duplex_gbps = _duplex_gbps(out, back)
    if duplex_gbps is None:  # scaled like the rates of the single directions
        duplex_gbps = otherwise.duplex_gbps * (d2h_gbps + h2d_gbps) / (otherwise.d2h_gbps + otherwise.h2d_gbps)
    return _link(otherwise, d2h_gbps, h2d_gbps, duplex_gbps)


def _link(otherwise: LinkCost, d2h_gbps: float, h2d_gbps: float, duplex_gbps: float) -> LinkCost:
    """Return a link cost with measured rates. `duplex_gbps` may be noise, so it is limited to a possible value."""
    if not _is_rate(duplex_gbps):
        duplex_gbps = 0.0
    duplex_gbps = min(max(duplex_gbps, d2h_gbps, h2d_gbps), d2h_gbps + h2d_gbps)
    return dataclasses.replace(otherwise, d2h_gbps=d2h_gbps, h2d_gbps=h2d_gbps, duplex_gbps=duplex_gbps)


def _is_rate(gbps: float) -> bool:
    return SLOWEST_GBPS <= gbps <= FASTEST_GBPS


def _rows(spans: Sequence[CopySpan]) -> Float64s:
    """Return an (n, 3) array of start, end and bytes, ordered by start."""
    rows = sorted((span.start_us, span.end_us, float(span.nbytes)) for span in spans)
    return np.array(rows, np.float64).reshape(-1, 3)


def _alone_gbps(one: Float64s, other: Float64s, copy_us: float) -> float | None:
    """Return the median rate of copies that do not overlap `other`, without `copy_us` each. None: too few, or implausible."""
    if len(one) == 0:
        return None
    alone = _shared_us(one, other) == 0
    us, nbytes = one[:, 1] - one[:, 0] - copy_us, one[:, 2]
    worth = alone & (us > copy_us)  # shorter copies mostly measure the fixed cost
    if worth.sum() < _LEAST_PIECES:
        return None
    gbps = float(np.median(nbytes[worth] / us[worth]) / 1e3)
    return gbps if _is_rate(gbps) else None


def _duplex_gbps(out: Float64s, back: Float64s) -> float | None:
    """Return bytes of both directions / time in which both were busy. A copy's bytes are spread evenly over its time."""
    if len(out) == 0 or len(back) == 0:
        return None
    out_shared, back_shared = _shared_us(out, back), _shared_us(back, out)
    both_us = float(out_shared.sum())
    if both_us < _LEAST_SHARED_US:
        return None
    moved = sum(
        float((rows[:, 2] * shared / (rows[:, 1] - rows[:, 0])).sum())
        for rows, shared in ((out, out_shared), (back, back_shared))
    )
    return moved / (both_us * 1e3)


def _shared_us(one: Float64s, other: Float64s) -> Float64s:
    """Return (n,): time that each copy of `one` overlaps copies of `other`. Copies of one direction never overlap."""
    if len(one) == 0 or len(other) == 0:
        return np.zeros(len(one))
    busy = np.concatenate([[0.0], np.cumsum(other[:, 1] - other[:, 0])])

    def busy_until(times: Float64s) -> Float64s:
        """Return the time that `other` was busy before each of `times`."""
        begun = np.searchsorted(other[:, 0], times, side="right")
        last = np.maximum(begun - 1, 0)
        over = np.clip(other[last, 1] - times, 0.0, None)
        return np.where(begun > 0, busy[begun] - over, 0.0)

    return np.asarray(busy_until(one[:, 1]) - busy_until(one[:, 0]))
