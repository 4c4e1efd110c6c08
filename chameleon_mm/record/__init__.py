"""Observation of steps: a fingerprint of each, the calls of its operators, a trace where one is needed."""

from __future__ import annotations
