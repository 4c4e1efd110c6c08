"""Times of work on a GPU, computed from its datasheet: a roofline for operators, one engine per link direction for copies.

    kernel_us = max(floating-point operations / rate of kernel and dtype, bytes touched / memory bandwidth, shortest kernel)

    start = max(time when the stream is ready, time when the engine is free)
    end   = start + latency + bytes / rate       # rate: this direction's, or the rest of duplex while the other is busy

FLOPs come from torch's own `flop_counter` registry, halved for causal attention. Bytes are those of the tensors that the
operator reads and writes. The roofline has no cache, no fusion and no tail effect. Rates are scaled to the share that large
kernels reach.

Attention has shares of its own, those of FlashAttention-2: `scaled_dot_product_attention` runs it on GPUs of all these kinds,
and its scratch memory is what counts here. Only on a Hopper GPU with cuDNN above 9.15, which torch's wheels for CUDA 13 bring,
it prefers cuDNN's kernel (`check_prefer_cudnn_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Published on
an H100 for head width 128 and 4,096 tokens (arXiv 2407.08608, figures 5 and 6), in TFLOP/s; half of the FLOPs count if causal:

                          forward, causal    forward    backward
    FlashAttention-2      319                368        310
    cuDNN                 518                609        499
    FlashAttention-3      579                638        542         no kernel of torch's

The link has one FIFO engine per direction. Times are fixed when a copy is issued. A copy that starts during one in the other
direction gets the rest of the duplex rate; the earlier copy keeps its rate. The sum is the link's measured duplex rate, on
which plans depend.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import torch

from chameleon_mm.device.specs import GpuSpec

_HALF = (torch.bfloat16, torch.float16)

COPY_LATENCY_US = 3.1
"""Fixed cost of one DMA copy on a PCIe 5 GPU: 4 MiB reach 53.2 of 55.4 GB/s, so 90 % of the rate is reached at 1.6 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of a GPU's work in virtual microseconds."""

    spec: GpuSpec
    matmul_efficiency: float = 0.7
    """Share of the peak rate that matrix products and convolutions reach. Published: 788 of 989 TFLOP/s dense bf16 for the best
    shapes on an H200; less when small."""
    attention_efficiency: float = 0.32
    """Share of the peak rate that fused attention reaches in forward: FlashAttention-2's, causal (above); cuDNN's is 0.52."""
    attention_backward_efficiency: float = 0.31
    """Share of the peak rate that fused attention reaches in backward: FlashAttention-2's (above); cuDNN's is 0.50."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth that streaming kernels reach."""
    shortest_kernel_us: float = 2.0
    """Minimum device time of a kernel."""
    launch_us: float = 5.0
    """Host time of one eager operator that launches a kernel."""
    view_us: float = 1.5
    """Host time of one eager operator that only makes a view or an empty tensor."""
    event_us: float = 0.5
    """Host time of an untimed event, a wait or a query."""
    copy_us: float = 3.0
    """Host time of one asynchronous copy."""
    triton_launch_us: float = 10.0
    """Host time of one launch of a Triton kernel: published as 9-11 us."""
    packed_tensor_us: float = 0.3
    """Host time per buffer that a kernel packs or unpacks, for its row in the table. Assumed: a CPU took 0.6 us with 64
    buffers, half of it for checks."""

    def __post_init__(self) -> None:
        for name in ("matmul_efficiency", "attention_efficiency", "attention_backward_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share in (0, 1], got {getattr(self, name)}")

    def kernel_us(self, flops: int, nbytes: int, dtype: torch.dtype, name: str = "") -> float:
        """Device time of a kernel that does `flops` in `dtype` and touches `nbytes` of device memory.

        name: of its operator, without namespace and overload; decides which share of the peak rate it reaches.
        """
        tflops = self.spec.bf16_tflops if dtype in _HALF else self.spec.fp32_tflops
        share = self.matmul_efficiency
        if "attention" in name:  # `_scaled_dot_product_flash_attention_backward` and its like
            share = self.attention_backward_efficiency if name.endswith("_backward") else self.attention_efficiency
        compute_us = flops / (tflops * 1e6 * share)
        memory_us = nbytes / (self.spec.hbm_gbps * 1e3 * self.memory_efficiency)
        return max(compute_us, memory_us, self.shortest_kernel_us)

    def device_copy_us(self, nbytes: int) -> float:
        """Device time of a copy inside device memory, which reads and writes every byte."""
        return self.kernel_us(0, 2 * nbytes, torch.float32)


class Span(NamedTuple):
    """Start and end of a copy on its engine, in virtual microseconds."""

    start_us: float
    end_us: float
    nbytes: int


@dataclass(slots=True)
class CopyEngine:
    """Copy engine of one direction. Its rate is `rate_gbps`, or `shared_gbps` while the other direction is busy (1e9 bytes per
    second)."""

    rate_gbps: float
    shared_gbps: float
    free_at_us: float = 0.0
    spans: deque[Span] = field(default_factory=deque)

    def schedule(self, nbytes: int, ready_us: float, other: CopyEngine) -> Span:
        """Queue a copy that may start at `ready_us`. Return its start and end."""
        start = max(ready_us, self.free_at_us)
        clock = start + COPY_LATENCY_US
        left = float(nbytes)
        first = bisect_right(other.spans, clock, key=attrgetter("end_us"))  # ends rise
        for beside in islice(other.spans, first, None):
            if left <= 0:
                break
            if beside.end_us <= clock:
                continue
            alone = max(0.0, beside.start_us - clock)
            clock, left = _advance(clock, left, self.rate_gbps, alone)
            clock, left = _advance(clock, left, self.shared_gbps, max(0.0, beside.end_us - clock))
        clock += left / (self.rate_gbps * 1e3)
        span = Span(start, clock, nbytes)
        self.spans.append(span)
        self.free_at_us = clock
        return span

    def forget_before(self, now_us: float) -> None:
        """Drop spans that end before `now_us`: no later copy can overlap them."""
        while self.spans and self.spans[0].end_us < now_us:
            self.spans.popleft()


def _advance(clock_us: float, left_bytes: float, rate_gbps: float, at_most_us: float) -> tuple[float, float]:
    """Move bytes at a rate for at most `at_most_us`. Return the new clock and the bytes left."""
    per_us = rate_gbps * 1e3
    needed = left_bytes / per_us
    if needed <= at_most_us:
        return clock_us + needed, 0.0
    return clock_us + at_most_us, left_bytes - at_most_us * per_us
