"""Datasheets of GPUs with their sources: memory capacity, arithmetic, memory bandwidth and link rates.

    spec = spec_by_name("h200")
    gemm_us = flops / (spec.bf16_tflops * 1e6)
    copy_us = nbytes / (spec.h2d_gbps * 1e3)

A link rate is a published measurement or is derived from one. `source` says which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

from chameleon_mm.units import GIB, parse_size

_SHARED = 0.75
"""Duplex rate as a share of the sum of both directions' rates, if only those are known: the share of an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Datasheet of a GPU. Rates are peaks in 1e9 bytes (`_gbps`) or 1e12 operations (`_tflops`) per second.

    Raises `ValueError` for a figure that is not positive, or if not max(h2d, d2h) < duplex <= h2d + d2h.
    """

    name: str
    hbm_bytes: int
    """Device memory. A vendor's "GB" is 2**30 bytes here; drivers report 0.3-0.5 % less."""
    hbm_gbps: float
    bf16_tflops: float
    """Rate of dense tensor-core bfloat16 with float32 accumulation (half of a figure "with sparsity")."""
    fp32_tflops: float
    """Rate of float32 outside the tensor cores."""
    h2d_gbps: float
    """Rate from pinned host memory to device, with the other direction idle."""
    d2h_gbps: float
    """Rate from device to pinned host memory, with the other direction idle."""
    duplex_gbps: float
    """Total rate of both directions at the same time: above each single rate, at most their sum."""
    source: str
    """Origin of the figures, and which of them are derived."""

    def __post_init__(self) -> None:
        for figure in fields(self):
            value = getattr(self, figure.name)
            if isinstance(value, (int, float)) and not 0 < value < inf:
                raise ValueError(f"{self.name}: expected {figure.name} above 0, got {value}")
        fastest, total = max(self.h2d_gbps, self.d2h_gbps), self.h2d_gbps + self.d2h_gbps
        if not fastest < self.duplex_gbps <= total:
            raise ValueError(
                f"{self.name}: expected duplex_gbps above the faster direction ({fastest}) and at most the sum of both "
                f"({total}), got {self.duplex_gbps}"
            )

    def shared_by(self, ranks: int) -> GpuSpec:
        """Return this GPU with one rank's part of a link over which `ranks` ranks copy at the same time."""
        h2d, d2h, duplex = (rate / ranks for rate in (self.h2d_gbps, self.d2h_gbps, self.duplex_gbps))
        return replace(self, h2d_gbps=h2d, d2h_gbps=d2h, duplex_gbps=duplex)


_H200 = GpuSpec(
    name="H200", hbm_bytes=141 * GIB, hbm_gbps=4800.0, bf16_tflops=989.5, fp32_tflops=67.0,
    h2d_gbps=55.4, d2h_gbps=54.9, duplex_gbps=83.0,
    source=(
        "NVIDIA H200 SXM datasheet: 141 GB HBM3e at 4.8 TB/s, BF16 1979 TFLOP/s with sparsity (half is dense), FP32 67; "
        "link: published copy rates over PCIe 5.0 x16, 88 % of its 63.0 GB/s per direction"
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

_L40S = GpuSpec(
    name="L40S", hbm_bytes=48 * GIB, hbm_gbps=864.0, bf16_tflops=362.0, fp32_tflops=91.6,
    h2d_gbps=_A100.h2d_gbps, d2h_gbps=_A100.d2h_gbps, duplex_gbps=37.5,
    source=(
        "NVIDIA L40S datasheet: 48 GB GDDR6 at 864 GB/s, BF16 362 TFLOP/s dense, FP32 91.6; link: derived, one way the A100's "
        "rates, as both have PCIe 4.0 x16, both ways 75 % of their sum as on the H200"
    ),
)  # fmt: skip

SPECS: dict[str, GpuSpec] = {
    "h200": _H200,
    "h100": replace(
        _H200, name="H100", hbm_bytes=80 * GIB, hbm_gbps=3350.0, bf16_tflops=989.5, fp32_tflops=67.0,
        source=(
            "NVIDIA H100 SXM5 datasheet: 80 GB HBM3 at 3.35 TB/s, BF16 1979 TFLOP/s with sparsity (half is dense), FP32 67; "
            "link: derived, the H200's rates, as both are the same die behind PCIe 5.0 x16"
        ),
    ),
    "b200": replace(
        _H200, name="B200", hbm_bytes=180 * GIB, hbm_gbps=8000.0, bf16_tflops=2250.0, fp32_tflops=75.0,
        source=(
            "NVIDIA DGX B200 and HGX B200 datasheets, an eighth of each: 180 GB HBM3e at 8 TB/s, BF16 4.5 PFLOP/s with "
            "sparsity (half is dense), FP32 75; link: derived, the H200's rates, as both have PCIe 5.0 x16"
        ),
    ),
    "a100": _A100,
    "a100-40": replace(
        _A100, name="A100 40GB", hbm_bytes=40 * GIB, hbm_gbps=1555.0,
        source="NVIDIA A100 40GB SXM4 datasheet: 1555 GB/s; the rest as the A100 80GB's; link: derived, the A100 80GB's rates",
    ),
    "l40s": _L40S,
    "a10": replace(
        _L40S, name="A10", hbm_bytes=24 * GIB, hbm_gbps=600.0, bf16_tflops=125.0, fp32_tflops=31.2,
        source="NVIDIA A10 datasheet: 24 GB GDDR6 at 600 GB/s, BF16 125 TFLOP/s dense, FP32 31.2; link: derived as the L40S's",
    ),
    "rtx3090": replace(
        _L40S, name="RTX 3090", hbm_bytes=24 * GIB, hbm_gbps=936.0, bf16_tflops=71.0, fp32_tflops=35.6,
        source=(
            "NVIDIA Ampere GA102 whitepaper: 24 GB GDDR6X at 936 GB/s, BF16 with FP32 accumulate 71 TFLOP/s dense, FP32 35.6; "
            "link: derived as the L40S's"
        ),
    ),
    "rtx4090": replace(
        _L40S, name="RTX 4090", hbm_bytes=24 * GIB, hbm_gbps=1008.0, bf16_tflops=165.2, fp32_tflops=82.6,
        source=(
            "NVIDIA Ada architecture whitepaper: 24 GB GDDR6X at 1008 GB/s, BF16 with FP32 accumulate 165.2 TFLOP/s dense, "
            "FP32 82.6; link: derived, one way the A100's rates, as both have PCIe 4.0 x16 (79 % of its 31.5 GB/s per "
            "direction), both ways 75 % of their sum as on the H200"
        ),
    ),
    "rtx5090": replace(
        _H200, name="RTX 5090", hbm_bytes=32 * GIB, hbm_gbps=1792.0, bf16_tflops=209.5, fp32_tflops=104.8,
        source=(
            "NVIDIA RTX Blackwell architecture whitepaper: 32 GB GDDR7 at 1792 GB/s, BF16 with FP32 accumulate 209.5 TFLOP/s "
            "dense, FP32 104.8; link: derived, the H200's rates, as both have PCIe 5.0 x16"
        ),
    ),
    "gh200": GpuSpec(
        name="GH200", hbm_bytes=96 * GIB, hbm_gbps=4000.0, bf16_tflops=989.5, fp32_tflops=67.0,
        h2d_gbps=411.0, d2h_gbps=170.0, duplex_gbps=436.0,
        source=(
            "NVIDIA GH200 datasheet, 96 GB HBM3 and 480 GB LPDDR5X version: 4 TB/s, BF16 1979 TFLOP/s with sparsity (half is "
            "dense), FP32 67; link: published rates of one machine's copy engines over NVLink-C2C (arXiv 2407.07850 has 375 "
            "back, 297 out); derived, both ways 75 % of their sum as on the H200"
        ),
    ),
}  # fmt: skip
"""Known GPUs by the name for `SimDevice` and `"sim:NAME"`."""


def spec_by_name(name: str) -> GpuSpec:
    """Return the spec called `name`, ignoring case, blanks, hyphens and underscores ("RTX 4090" is "rtx4090").

    Raises `ValueError` for another name, with a list of the known ones.
    """
    for known, spec in SPECS.items():
        if _letters(known) == _letters(name):
            return spec
    raise ValueError(f"GPU spec: expected one of {', '.join(SPECS)}, got {name!r}")


def spec_from_file(path: Path) -> GpuSpec:
    """Read the spec of a GPU from a JSON file: an object with the fields of `GpuSpec`. `hbm_bytes` may be a text ("24GiB").
    `source` may be missing, and `duplex_gbps`: 75 % of both directions' sum, as on an H200, or half of the slower one above the
    faster, if that is more.

    Raises `ValueError` for a file that is no such object, and `OSError` if it cannot be read.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a GPU's figures as JSON, got {error}") from error
    kinds = {figure.name: str if figure.name in ("name", "source") else (int, float) for figure in fields(GpuSpec)}
    told = {"source": str(path), **told} if isinstance(told, dict) else {}
    if isinstance(size := told.get("hbm_bytes"), str):
        told["hbm_bytes"] = parse_size(size, what=f"{path}: hbm_bytes")
    for name, kind in kinds.items():
        if name == "duplex_gbps":
            total, fastest = told["h2d_gbps"] + told["d2h_gbps"], max(told["h2d_gbps"], told["d2h_gbps"])
            told.setdefault(name, max(_SHARED * total, (fastest + total) / 2))
        if not isinstance(told.get(name), kind) or isinstance(told[name], bool):
            found = f"got {told[name]!r}" if name in told else f"{name} is missing"
            raise ValueError(f"{path}: expected {name} as a {'text' if kind is str else 'number'}; {found}")
    if unknown := sorted(set(told) - set(kinds)):
        raise ValueError(f"{path}: expected {', '.join(kinds)}; {unknown[0]} is unknown")
    return GpuSpec(**told)


def _letters(name: str) -> str:
    return name.lower().translate(str.maketrans("", "", " -_"))
