"""Datasheets of GPUs with their sources: memory capacity, arithmetic, memory bandwidth and link rates.

    spec = spec_by_name("h200")
    gemm_us = flops / (spec.bf16_tflops * 1e6)
    copy_us = nbytes / (spec.h2d_gbps * 1e3)

A link rate is a published measurement or is derived from one. `source` says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_mm.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Datasheet of a GPU. Rates are peaks in 1e9 bytes (`_gbps`) or 1e12 operations (`_tflops`) per second.

    Raises `ValueError` if not max(h2d, d2h) < duplex <= h2d + d2h.
    """

    name: str

    hbm_bytes: int
    """Device memory. A vendor's "GB" is 2**30 bytes here; drivers report 0.3-0.5 % less."""

    hbm_gbps: float
    """Device memory bandwidth."""

    bf16_tflops: float
    """Rate of dense tensor-core bfloat16 with float32 accumulation (half of a figure "with sparsity")."""

    fp32_tflops: float
    """Rate of float32 outside the tensor cores."""

    h2d_gbps: float
    """Rate from pinned host memory to device, with the other direction idle."""

    d2h_gbps: float
    """Rate from device to pinned host memory, with the other direction idle."""

    duplex_gbps: float
    """Total rate of both directions at once: above either alone, at most their sum."""

    source: str
    """Origin of the figures, and which of them are derived."""

    def __post_init__(self) -> None:
        fastest, total = max(self.h2d_gbps, self.d2h_gbps), self.h2d_gbps + self.d2h_gbps
        if not fastest < self.duplex_gbps <= total:
            raise ValueError(
                f"{self.name}: expected duplex_gbps above the faster direction ({fastest}) and at most the sum of both "
                f"({total}), got {self.duplex_gbps}"
            )


_H200 = GpuSpec(
    name="H200", hbm_bytes=141 * GIB, hbm_gbps=4800.0, bf16_tflops=989.5, fp32_tflops=67.0,
    h2d_gbps=55.4, d2h_gbps=54.9, duplex_gbps=83.0,
    source=(
        "NVIDIA H200 SXM datasheet: 141 GB HBM3e at 4.8 TB/s, BF16 1979 TFLOP/s with sparsity (half is dense), FP32 67; "
        "link: published copy rates over PCIe 5.0 x16, 88 % of its 63.0 GB/s per direction"
    ),
)  # fmt: skip

_H100 = GpuSpec(
    name="H100", hbm_bytes=80 * GIB, hbm_gbps=3350.0, bf16_tflops=989.5, fp32_tflops=67.0,
    h2d_gbps=_H200.h2d_gbps, d2h_gbps=_H200.d2h_gbps, duplex_gbps=_H200.duplex_gbps,
    source=(
        "NVIDIA H100 SXM5 datasheet: 80 GB HBM3 at 3.35 TB/s, BF16 1979 TFLOP/s with sparsity (half is dense), FP32 67; "
        "link: derived, the H200's rates, as both are the same die behind PCIe 5.0 x16"
    ),
)  # fmt: skip

_A100 = GpuSpec(
    name="A100", hbm_bytes=80 * GIB, hbm_gbps=2039.0, bf16_tflops=312.0, fp32_tflops=19.5,
    h2d_gbps=24.8, d2h_gbps=25.0, duplex_gbps=35.0,
    source=(
        "NVIDIA A100 80GB SXM4 datasheet: 2039 GB/s, BF16 312 TFLOP/s dense, FP32 19.5; link: published nvbandwidth 0.8 "
        "figures over PCIe 4.0 x16 (NVIDIA developer forum, topic 352186): one way 24.8 and about 25, both ways 24 + 11"
    ),
)  # fmt: skip

_RTX_4090 = GpuSpec(
    name="RTX 4090", hbm_bytes=24 * GIB, hbm_gbps=1008.0, bf16_tflops=165.2, fp32_tflops=82.6,
    h2d_gbps=_A100.h2d_gbps, d2h_gbps=_A100.d2h_gbps, duplex_gbps=37.5,
    source=(
        "NVIDIA Ada architecture whitepaper: 24 GB GDDR6X at 1008 GB/s, BF16 with FP32 accumulate 165.2 TFLOP/s dense, "
        "FP32 82.6; link: derived, one way the A100's rates, as both have PCIe 4.0 x16 (79 % of its 31.5 GB/s per "
        "direction), both ways 75 % of their sum as on the H200"
    ),
)  # fmt: skip

_RTX_5090 = GpuSpec(
    name="RTX 5090", hbm_bytes=32 * GIB, hbm_gbps=1792.0, bf16_tflops=209.5, fp32_tflops=104.8,
    h2d_gbps=_H200.h2d_gbps, d2h_gbps=_H200.d2h_gbps, duplex_gbps=_H200.duplex_gbps,
    source=(
        "NVIDIA RTX Blackwell architecture whitepaper: 32 GB GDDR7 at 1792 GB/s, BF16 with FP32 accumulate 209.5 TFLOP/s "
        "dense, FP32 104.8; link: derived, the H200's rates, as both have PCIe 5.0 x16"
    ),
)  # fmt: skip

_GH200 = GpuSpec(
    name="GH200", hbm_bytes=96 * GIB, hbm_gbps=4000.0, bf16_tflops=989.5, fp32_tflops=67.0,
    h2d_gbps=300.0, d2h_gbps=300.0, duplex_gbps=345.0,
    source=(
        "NVIDIA GH200 datasheet, 96 GB HBM3 and 480 GB LPDDR5X version: 4 TB/s, BF16 1979 TFLOP/s with sparsity (half is "
        "dense), FP32 67; link: derived, one way two thirds of NVLink-C2C's 450 GB/s per direction, both ways 90 % of the "
        "host memory's 384 GB/s, which is then the narrower"
    ),
)  # fmt: skip

SPECS: dict[str, GpuSpec] = {
    "h200": _H200,
    "h100": _H100,
    "a100": _A100,
    "rtx4090": _RTX_4090,
    "rtx5090": _RTX_5090,
    "gh200": _GH200,
}
"""Known GPUs by the name that `SimDevice` and `"sim:NAME"` take."""


def spec_by_name(name: str) -> GpuSpec:
    """Return the spec called `name`, ignoring case, blanks, hyphens and underscores ("RTX 4090" is "rtx4090").

    Raises `ValueError` for another name, with a list of the known ones.
    """
    key = name.lower().translate(str.maketrans("", "", " -_"))
    if key not in SPECS:
        raise ValueError(f"GPU spec: expected one of {', '.join(SPECS)}, got {name!r}")
    return SPECS[key]
