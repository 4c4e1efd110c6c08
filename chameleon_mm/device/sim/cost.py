"""Cost of one operator on a GPU that is only a line in a table.

    kernel_us = max(floating-point operations / rate of the dtype, bytes touched / memory bandwidth, shortest kernel)

FLOPs come from torch's own `flop_counter` registry, bytes from the tensors the operator reads, plus those it writes.
A roofline, no more: it knows no cache, no fusion and no tail effect. Rates are scaled to what large kernels reach in practice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chameleon_mm.device.specs import GpuSpec

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices of one GPU's work, in virtual microseconds."""

    spec: GpuSpec
    matmul_efficiency: float = 0.7
    """Share of the peak rate that large matrix products reach (788 of 989 TFLOP/s dense bf16 on an H200; less when small)."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth that streaming kernels reach."""
    shortest_kernel_us: float = 2.0
    """No kernel takes less, however small."""
    launch_us: float = 5.0
    """Host time of one eager operator that launches a kernel."""
    view_us: float = 1.5
    """Host time of one eager operator that only makes a view or an empty tensor."""
    event_us: float = 0.5
    """Host time of an untimed event, a wait or a query."""
    copy_us: float = 3.0
    """Host time of one asynchronous copy, or of the one call of a batch of them."""
    batched_copy_us: float = 0.5
    """Host time of each copy in a batch, beside the call. Assumed: a sixth of a call, for want of a published figure."""
    triton_launch_us: float = 10.0
    """Host time of one launch of a Triton kernel: published as 9-11 us."""
    packed_tensor_us: float = 0.3
    """Host time of each buffer that a kernel packs or unpacks, for its row in the table: the goal, not a measurement."""

    def __post_init__(self) -> None:
        for name in ("matmul_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share in (0, 1], got {getattr(self, name)}")

    def kernel_us(self, flops: int, nbytes: int, dtype: torch.dtype) -> float:
        """Device time of a kernel that does `flops` in `dtype` and touches `nbytes` of device memory."""
        tflops = self.spec.bf16_tflops if dtype in _HALF else self.spec.fp32_tflops
        compute_us = flops / (tflops * 1e6 * self.matmul_efficiency)
        memory_us = nbytes / (self.spec.hbm_gbps * 1e3 * self.memory_efficiency)
        return max(compute_us, memory_us, self.shortest_kernel_us)

    def device_copy_us(self, nbytes: int) -> float:
        """Device time of a copy inside device memory, which reads and writes every byte."""
        return self.kernel_us(0, 2 * nbytes, torch.float32)
