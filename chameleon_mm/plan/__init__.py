"""Decides what moves and when, as arithmetic over a step's trace: no torch, no device."""

from __future__ import annotations
