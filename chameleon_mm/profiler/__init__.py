"""The running model as data: a fingerprint of every step, a trace of one when it is needed, and how a step fits a plan."""

from __future__ import annotations
