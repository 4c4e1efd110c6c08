"""Tests that need what the stand-in lacks, each with the reason."""

from __future__ import annotations

LIMITS: dict[str, str] = {}
"""Identifier of a test, or of its function -> what is missing."""
