"""Budgets that a plan keeps to."""

from __future__ import annotations

from typing import NamedTuple


class Budgets(NamedTuple):
    """Bytes that a plan may take."""

    hbm_bytes: int
    host_bytes: int
