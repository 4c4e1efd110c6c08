"""Bytes to set aside for parameters and gradients within a budget.

sizes = charged_sizes(params)                        # before any of them is away
window_for(sizes, hbm_budget_bytes, fixed_bytes)     # a share of what the budget leaves, and at least what the largest need
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.units import KIB, allocated_size, format_size

MIN_BYTES = 64 * KIB
"""Bytes from which a storage leaves: smaller ones are a small part of all, and cost a copy each."""

WINDOW_SHARE = 0.4
"""Share that parameters and gradients may take together, where they do not all fit, of what the budget leaves beside what never
moves: the rest is for activations, optimizer state and what operators hold. Not
measured."""

LEAST_STORAGES = 3
"""Storages, as large as the largest, for which there must be room: a parameter, its gradient, and what comes next."""


def charged_sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes that the allocator counts for each storage of `tensors` of `MIN_BYTES` or more."""
    storages = {id(s): s for t in tensors for s in [t.untyped_storage()] if s.nbytes() >= MIN_BYTES}
    return [allocated_size(storage.nbytes()) for storage in storages.values()]


def least_window(sizes: Sequence[int]) -> int:
    """Bytes that parameters of these sizes and their gradients need at least."""
    return min(2 * sum(sizes), LEAST_STORAGES * max(sizes, default=0))


def window_for(sizes: Sequence[int], hbm_budget_bytes: int, fixed_bytes: int = 0) -> int:
    """Bytes to set aside for parameters of these sizes and their gradients, beside `fixed_bytes` that never move. Raises
    `InfeasibleBudget` where the largest have no room."""
    if not sizes:
        return 0
    window = min(2 * sum(sizes), max(least_window(sizes), int(WINDOW_SHARE * (hbm_budget_bytes - fixed_bytes))))
    if window + fixed_bytes >= hbm_budget_bytes:
        beside = f", beside {format_size(fixed_bytes)} that never move" if fixed_bytes else ""
        raise InfeasibleBudget(
            f"hbm_budget: expected more than {format_size(window + fixed_bytes)}, the room for a parameter of "
            f"{format_size(max(sizes))}, its gradient and what comes next{beside}, got {format_size(hbm_budget_bytes)}; raise "
            f"the budget or split that parameter",
            smallest_bytes=window + fixed_bytes + 1,
        )
    return window
