"""Which step it is, which plan it follows, and what steps teach: structures, sizes, times and rates."""

from __future__ import annotations
