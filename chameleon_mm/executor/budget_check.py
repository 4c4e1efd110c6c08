"""Checks a session's budget against what lies on the device already, before anything is started."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from chameleon_mm.device import Device
from chameleon_mm.errors import InfeasibleBudget
from chameleon_mm.units import format_size


def check_budget(
    device: Device,
    hbm_budget_bytes: int,
    *,
    tensors: Iterable[Tensor],
    movable_bytes: int,
    window_bytes: int,
    checksum_bytes: int,
) -> None:
    """Raise `InfeasibleBudget` for a budget that what never moves takes already.

    `tensors`: parameters and buffers. `movable_bytes`: what of the allocated bytes will leave. `window_bytes`: what is
    set aside for parameters and gradients that come and go. `checksum_bytes`: what `verify=True` takes.
    """
    named = sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())
    held = max(named, device.allocated_bytes() - movable_bytes) + window_bytes + checksum_bytes
    if hbm_budget_bytes > held:
        return
    and_checksums = f" ({format_size(checksum_bytes)} of it for verify=True)" if checksum_bytes else ""
    raise InfeasibleBudget(
        f"hbm_budget: expected more than the {format_size(held)} of parameters, optimizer state and other tensors that are on "
        f"{device.name} already and never move{and_checksums}, got {format_size(hbm_budget_bytes)}; raise the budget or make "
        f"the model smaller"
    )
