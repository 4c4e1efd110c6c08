"""Figures of a session and of each step, and reports of them as text, JSON, HTML and a trace."""

from __future__ import annotations
