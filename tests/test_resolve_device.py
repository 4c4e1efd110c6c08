"""Device of each name, the errors for other names, and the figures of the simulated devices."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import chameleon_mm as cm
from chameleon_mm.device import CudaDevice, Device, SimDevice, cuda_is_available, resolve_device, warn_of_newer_torch
from chameleon_mm.device.specs import SPECS, GpuSpec, spec_by_name

without_cuda = pytest.mark.skipif(cuda_is_available(), reason="says what happens where there is no CUDA GPU")


def test_a_device_is_itself(device: Device) -> None:
    assert resolve_device(device) is device


@without_cuda
def test_none_is_the_simulator_without_cuda() -> None:
    assert isinstance(resolve_device(None), SimDevice)


@pytest.mark.gpu
def test_none_is_cuda_where_there_is_one() -> None:
    chosen = resolve_device(None)
    assert isinstance(chosen, CudaDevice)
    assert chosen.torch_device == torch.device("cuda", torch.cuda.current_device())


def test_sim_is_the_default_spec() -> None:
    assert resolve_device("sim").name == "simulated H200"


@pytest.mark.parametrize("name", list(SPECS))
def test_sim_takes_every_spec(name: str) -> None:
    chosen = resolve_device(f"sim:{name}")
    assert chosen.simulated
    assert chosen.capacity == SPECS[name].hbm_bytes
    assert SPECS[name].name in chosen.name


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        *(
            (name, ValueError, r'expected the name of one, got .*"cuda:0", "sim"')
            for name in ("", "gpu", "simulator", "sim:", "cuda:", "cuda:x", "cuda:-1", "cpu", "CUDA 0")
        ),
        ("sim:voodoo2", ValueError, "expected one of h200"),
        (torch.device("cpu"), ValueError, "got 'cpu'"),
        (0, TypeError, r"got 0 \(int\)"),
    ],
)
def test_another_name_is_refused_with_the_known_ones(name: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        resolve_device(name)


@without_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:1", torch.device("cuda", 1)])
def test_cuda_without_a_gpu_says_so_and_offers_the_simulator(name: str | torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"expected a CUDA GPU, got none.*'sim'"):
        resolve_device(name)


@pytest.mark.gpu
def test_cuda_by_index() -> None:
    assert (
        resolve_device("cuda:0").torch_device == resolve_device(torch.device("cuda", 0)).torch_device == torch.device("cuda", 0)
    )
    with pytest.raises(ValueError, match="expected an index from 0 to"):
        resolve_device(f"cuda:{torch.cuda.device_count()}")
    for wrong in ("0", 0.0, [0]):
        with pytest.raises(TypeError, match="index: expected the number of a GPU or None, got"):
            CudaDevice(wrong)  # type: ignore[arg-type]  # the wrong type is what is tested


@pytest.mark.parametrize(("version", "told"), [("2.14.9", 0), ("2.15.0.dev20270101+cpu", 1), ("3.0.1", 1)])
def test_a_newer_torch_than_the_tested_ones_is_one_warning(
    version: str, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    warn_of_newer_torch.cache_clear()
    with caplog.at_level(logging.WARNING, "chameleon_mm"):
        cm.PinnedPool(device="sim"), cm.save_on_cpu(device="sim"), cm.SwapSession(device="sim")
    said = [record.getMessage() for record in caplog.records if "newer" in record.getMessage()]
    assert said == [f"chameleon_mm: torch {version} is newer than 2.14, the newest that was tested"] * told
    warn_of_newer_torch.cache_clear()


# --- that it simulates

SAID = """
import sys
import chameleon_mm as cm

def say(what):
    print(what, file=sys.stderr)

cm.SwapSession(device="sim"), cm.PinnedPool(device="sim"), cm.save_on_cpu(device="sim"), cm.SimDevice()
say("asked for")
cm.SwapSession(), cm.PinnedPool(), cm.save_on_cpu(), cm.resolve_device(None)
say("found")
import torch
with cm.SwapSession(device="sim", hbm_budget="64MiB", min_bytes=0):
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(16):
        x.exp().exp().sum().backward()
    say("trained")
"""


@pytest.mark.ci
@without_cuda
def test_a_script_is_told_once_that_a_gpu_is_simulated_and_that_its_steps_are_not_seen() -> None:
    """Checked in a script that sets up no logging and turns warnings into errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", SAID], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert [lines[0], lines[2], lines[4]] == ["asked for", "found", "trained"], done.stderr
    assert len(lines) == 5
    assert lines[1].startswith("chameleon_mm: no CUDA found: simulating a GPU on the CPU")
    assert 'pass device="sim"' in lines[1]
    assert lines[3].startswith("chameleon_mm: session.step() was never called")


# --- specs: each figure is there, is possible and says where it comes from


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_every_spec_names_datasheet_and_link(spec: GpuSpec) -> None:
    assert spec.source.startswith(("NVIDIA", "AMD")) and any(word in spec.source for word in ("datasheet", "whitepaper"))
    link = spec.source.partition("link: ")[2]
    assert link.startswith(("published", "derived"))


@pytest.mark.parametrize("name", ["h200", "H200", "h-200", " H200 "])
def test_spec_by_name_forgives_spelling(name: str) -> None:
    assert spec_by_name(name) is SPECS["h200"]
    assert spec_by_name("RTX 4090") is spec_by_name("rtx_4090") is SPECS["rtx4090"]


@pytest.mark.parametrize("name", ["b300", "", "h200x"])
def test_spec_by_name_lists_what_it_knows(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of h200, h100, b200, a100, .*, gh200, got '"):
        spec_by_name(name)


@pytest.mark.parametrize("change", [{"hbm_bytes": 0}, {"bf16_tflops": -1.0}, {"duplex_gbps": 55.4}, {"duplex_gbps": 111.0}])
def test_impossible_figures_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(SPECS["h200"], **change)  # type: ignore[arg-type]  # one dict carries ints and floats
