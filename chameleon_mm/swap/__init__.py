"""Saved storages and their copies: autograd's hooks swap out, prefetch, recompute and reclaim within the budget."""

from __future__ import annotations
