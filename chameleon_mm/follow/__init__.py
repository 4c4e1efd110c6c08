"""Recognition of the running step, choice of its plan, and lessons of steps: structures, sizes, times and rates."""

from __future__ import annotations
