"""GPU specs: each figure is there, is possible and says where it comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_mm.device.specs import SPECS, GpuSpec, spec_by_name


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_every_spec_names_datasheet_and_link(spec: GpuSpec) -> None:
    assert "NVIDIA" in spec.source
    link = spec.source.partition("link: ")[2]
    assert link.startswith(("published", "derived"))


@pytest.mark.parametrize("name", ["h200", "H200", "h-200", " H200 "])
def test_spec_by_name_forgives_spelling(name: str) -> None:
    assert spec_by_name(name) is SPECS["h200"]
    assert spec_by_name("RTX 4090") is spec_by_name("rtx_4090") is SPECS["rtx4090"]


@pytest.mark.parametrize("name", ["b300", "", "h200x"])
def test_spec_by_name_lists_what_it_knows(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of h200, h100, a100, rtx4090, rtx5090, gh200, got '"):
        spec_by_name(name)


@pytest.mark.parametrize("change", [{"hbm_bytes": 0}, {"bf16_tflops": -1.0}, {"duplex_gbps": 55.4}, {"duplex_gbps": 111.0}])
def test_impossible_figures_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(SPECS["h200"], **change)  # type: ignore[arg-type]  # one dict carries ints and floats
