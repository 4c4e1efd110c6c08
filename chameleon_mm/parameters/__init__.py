"""Keeps a model's parameters and their gradients in pinned host memory but for what is used now and next.

swap = ParameterSwap(executor, model, beside, hbm_budget_bytes=budget)
swap.attach(stack)       # all leave; until `stack` is left, each comes back before it is used, and the next ones ahead of it
"""

from __future__ import annotations

from chameleon_mm.parameters.device_beside_window import DeviceBesideWindow, beside_window
from chameleon_mm.parameters.parameter_swap import ParameterSwap, check_parameters

__all__ = ["DeviceBesideWindow", "ParameterSwap", "beside_window", "check_parameters"]
