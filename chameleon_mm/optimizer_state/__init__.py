"""Keeps an optimizer's state in pinned host memory between its steps.

    swap = OptimizerSwap(executor, optimizer, bucket_bytes=64 << 20)
    swap.attach()            # all state leaves; from now on optimizer.step() brings it back, part by part
    swap.detach()            # all state is back where it was

Whoever reads the state between two steps, as a checkpoint does, gets it on the device: it comes back at the access.
"""

from __future__ import annotations

from chameleon_mm.optimizer_state.optimizer_swap import BUCKET_BYTES, OptimizerSwap, check_optimizer

__all__ = ["BUCKET_BYTES", "OptimizerSwap", "check_optimizer"]
