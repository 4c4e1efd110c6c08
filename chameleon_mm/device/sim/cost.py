"""What one operator costs on a GPU that is only a line in a table.

    kernel_us = max(floating-point operations / rate of the dtype, bytes touched / memory bandwidth, shortest kernel)

FLOPs come from torch's own `flop_counter` registry, bytes from the tensors the operator reads and writes. A roofline, no
more: it knows no cache, no fusion and no tail effect. Rates are scaled to what large kernels reach in practice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from chameleon_mm.device.specs import GpuSpec

_HALF = (torch.bfloat16, torch.float16)
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


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
    """Host time of one asynchronous copy."""

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


def flops_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> int:
    """Floating-point operations of one call, 0 for an operator that the registry does not count."""
    from torch.utils import flop_counter  # noqa: PLC0415 - imports triton where there is one: only a simulated step needs it

    packet = func.overloadpacket
    if packet.__name__.startswith(_CPU_FLASH):
        # The fused attention of CPU builds, which the registry lacks: same formulas as the CUDA one.
        if packet.__name__ == _CPU_FLASH:
            return int(flop_counter.sdpa_flop_count(*(t.shape for t in args[:3])))
        return int(flop_counter.sdpa_backward_flop_count(*(t.shape for t in args[:4])))
    formula = flop_counter.flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def bytes_touched(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of distinct tensors read or written: what streams through memory if nothing is cached."""
    seen: dict[int, int] = {}
    for t in tensors:
        seen[id(t)] = t.numel() * t.element_size()
    return sum(seen.values())
