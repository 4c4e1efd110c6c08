"""The doctor: it says what is there, says why something is not and what mends it, and never falls over either."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm import doctor
from chameleon_mm.device import SimDevice, cuda_is_available
from chameleon_mm.device.cuda import VisibleGpu
from chameleon_mm.doctor import DoctorReport, collect, probes
from chameleon_mm.doctor.findings import Finding, Unavailable, render, run_probe
from chameleon_mm.doctor.probes import gpu_rows, host_rows, link_rates, pin_trial, software_rows
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.transfer import CalibrationCache, calibrate
from chameleon_mm.units import GIB, MIB
from tests._fakes import UnsimulatedDevice, file_tree

_FOLDER = "sys/bus/pci/devices/0000:06:00.0"


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the doctor keeps what it measured in the user's home, which is here for the tests."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = VisibleGpu(index=0, name="NVIDIA H200", total_bytes=143771 * MIB, capability="9.0", pci_id="0000:06:00.0")
    monkeypatch.setattr(probes, "visible_gpus", lambda: [gpu])


def _rows(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ------------------------------------------------------------------------------------------------------------ the whole


def test_everything_is_looked_at_and_nothing_raises() -> None:
    found = {(finding.section, finding.name): finding for finding in collect().findings}
    assert found.keys() >= {
        ("software", "python"), ("software", "torch"), ("software", "triton"), ("software", "cupy"),
        ("software", "cuda-bindings"), ("software", "NVIDIA driver"), ("gpu", "GPUs"), ("host", "memory available"),
        ("host", "memory that may be pinned"), ("host", "memlock limit"), ("device", "device=None picks"),
        ("device", "pinned allocation"), ("transfer", "link rates"),
    }  # fmt: skip
    assert found["software", "torch"].value["version"] == torch.__version__
    assert found["device", "device=None picks"].value["simulated"] is not cuda_is_available()


def test_on_a_machine_without_anything_every_row_is_still_there(tmp_path: Path) -> None:
    found = _rows(collect(tmp_path).findings)
    assert not found["GPUs"].available or cuda_is_available()
    assert found["NVIDIA driver"].text.startswith("unavailable: /proc/driver/nvidia/version")


def test_run_shows_every_row_writes_json_and_returns_0(tmp_path: Path) -> None:
    shown = io.StringIO()
    path = tmp_path / "doctor.json"
    assert doctor.run(path, Console(file=shown, width=200)) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["schema"] == "chameleon_mm.doctor/2"
    assert set(written["findings"]) == {"software", "gpu", "host", "device", "transfer"}
    for section, rows in written["findings"].items():
        assert section in shown.getvalue()
        for name, row in rows.items():
            assert name in shown.getvalue()
            assert set(row) == {"available", "text", "value"}


def test_run_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.run(None, Console(file=io.StringIO())) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        doctor.run(tmp_path / "absent" / "doctor.json", Console(file=io.StringIO()))


# ------------------------------------------------------------------------------------------------------------- one probe


@pytest.mark.parametrize("error", [ValueError("no such thing"), OSError(5, "no such thing"), Unavailable("no such thing")])
def test_whatever_a_probe_raises_is_a_row(error: Exception) -> None:
    def probe() -> tuple[str, Any]:
        raise error

    row = run_probe("host", "x", probe)
    assert (row.available, row.value) == (False, None)
    assert row.text.startswith("unavailable: ")
    assert row.text.endswith("no such thing")


def test_an_error_without_words_is_named() -> None:
    def probe() -> tuple[str, Any]:
        raise ZeroDivisionError

    assert run_probe("host", "x", probe).text == "unavailable: ZeroDivisionError"


def test_brackets_are_shown_as_they_are() -> None:
    finding = Finding(section="gpu", name="0 [x]", text="link [N/A]", value=None, available=True)
    shown = io.StringIO()
    Console(file=shown, width=80).print(render(DoctorReport(findings=(finding,))))
    assert "0 [x]" in shown.getvalue()
    assert "link [N/A]" in shown.getvalue()


# ------------------------------------------------------------------------------------------------------------------- GPU


def test_a_gpu_has_its_link_and_node_from_the_kernel(tmp_path: Path, one_gpu: None) -> None:
    files = {
        f"{_FOLDER}/current_link_speed": "2.5 GT/s PCIe\n", f"{_FOLDER}/current_link_width": "16\n",
        f"{_FOLDER}/max_link_speed": "32.0 GT/s PCIe\n", f"{_FOLDER}/max_link_width": "16\n", f"{_FOLDER}/numa_node": "1\n",
    }  # fmt: skip
    rows = _rows(gpu_rows(file_tree(tmp_path, files)))
    assert rows["GPUs"].value == 1
    assert rows["0"].value == {
        "name": "NVIDIA H200", "total_bytes": 143771 * MIB, "compute_capability": "9.0", "pci_id": "0000:06:00.0",
    }  # fmt: skip
    assert rows["0 link"].text == "2.5 GT/s PCIe x16 now, at most 32.0 GT/s PCIe x16 (an idle GPU lowers its link)"
    assert rows["0 NUMA node"].value == 1


def test_a_gpu_without_a_known_link_or_node_says_so(tmp_path: Path, one_gpu: None) -> None:
    rows = _rows(gpu_rows(file_tree(tmp_path, {f"{_FOLDER}/numa_node": "-1\n"})))
    assert rows["0"].available
    assert rows["0 link"].text.startswith(f"unavailable: /{_FOLDER}/current_link_speed")
    assert "ties this GPU to no node" in rows["0 NUMA node"].text


def test_no_gpu_is_one_row_with_the_reason_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "visible_gpus", list)
    for built_for, mend in ((None, "pip install a build with CUDA"), ("13.0", "nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        rows = _rows(gpu_rows(tmp_path))
        assert list(rows) == ["GPUs"]
        assert mend in rows["GPUs"].text


# ---------------------------------------------------------------------------------------------------- host and software


def test_half_of_what_is_available_may_be_pinned(tmp_path: Path) -> None:
    rows = _rows(host_rows(file_tree(tmp_path, {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n"})))
    assert rows["memory available"].text == "8.00 GiB"
    assert rows["memory that may be pinned"].value == 4 * GIB


def test_a_control_group_that_leaves_less_is_named(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 8388608 kB\n", "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": str(2 * GIB), "sys/fs/cgroup/job/memory.current": str(GIB),
    }  # fmt: skip
    row = _rows(host_rows(file_tree(tmp_path, files)))["memory available"]
    assert row.value == {"available_bytes": GIB, "machine_bytes": 8 * GIB}
    assert "raise its memory limit" in row.text


def test_a_memlock_limit_below_what_may_be_pinned_says_what_lifts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = file_tree(tmp_path, {"proc/meminfo": "MemAvailable: 8388608 kB\n"})
    for limit, mends in ((MIB, True), (6 * GIB, False)):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        row = _rows(host_rows(root))["memlock limit"]
        assert row.value == limit
        assert ("ulimit -l unlimited" in row.text) is mends


def test_what_is_not_installed_has_the_command_that_installs_it() -> None:
    with pytest.raises(Unavailable, match="not installed; pip install it"):
        probes._installed(("no-such-distribution-anywhere",), "pip install it")


def test_the_driver_comes_from_the_kernel(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12.3.0\n"
    rows = _rows(software_rows(file_tree(tmp_path, {"proc/driver/nvidia/version": text})))
    assert rows["NVIDIA driver"].value == "580.159.03"


# --------------------------------------------------------------------------------------------------------------- pinning


class _Pins(UnsimulatedDevice):
    """A device on which the trial is made: with pinned memory, or with what torch does not take for it."""

    def __init__(self, *, pinned: bool, refuse: bool = False) -> None:
        super().__init__()
        self.pinned, self.refuse = pinned, refuse
        self.freed: list[int] = []

    def alloc_pinned(self, nbytes: int) -> Tensor:
        if self.refuse:
            raise HostMemoryExhausted("pinned memory: expected 1 MiB, got nothing")
        memory = super().alloc_pinned(nbytes)
        return memory.as_subclass(_PinnedTensor) if self.pinned else memory

    def free_pinned(self, memory: Tensor) -> None:
        self.freed.append(memory.numel())
        super().free_pinned(memory)


class _PinnedTensor(Tensor):
    def is_pinned(self, device: torch.device | str | int | None = None) -> bool:
        return True


def test_a_trial_pins_once_and_gives_back() -> None:
    device = _Pins(pinned=True)
    text, value = pin_trial(device, MIB)
    assert text.startswith("1.00 MiB in ")
    assert value["nbytes"] == MIB
    assert value["gbps"] == MIB / value["seconds"] / 1e9
    assert device.freed == [MIB]


def test_a_trial_that_pinned_nothing_says_so_and_gives_back() -> None:
    device = _Pins(pinned=False)
    with pytest.raises(Unavailable, match="does not take them for pinned"):
        pin_trial(device, MIB)
    assert device.freed == [MIB]


def test_a_refused_trial_is_a_row() -> None:
    row = run_probe("device", "pinned allocation", lambda: pin_trial(_Pins(pinned=True, refuse=True), MIB))
    assert row.text == "unavailable: pinned memory: expected 1 MiB, got nothing"


def test_the_simulator_is_not_tried() -> None:
    with pytest.raises(Unavailable, match="plain memory"):
        pin_trial(SimDevice(), MIB)


# ----------------------------------------------------------------------------------------------------------- the link


def test_simulated_rates_are_called_so_and_kept_nowhere(tmp_path: Path) -> None:
    text, value = link_rates(SimDevice(), CalibrationCache(tmp_path))
    assert text.startswith("simulated: ")
    assert value == {**calibrate(SimDevice()).to_dict(), "kept": False}
    assert list(tmp_path.iterdir()) == []


def test_real_rates_are_kept_where_the_row_says(tmp_path: Path) -> None:
    cache = CalibrationCache(tmp_path)
    text, value = link_rates(UnsimulatedDevice(), cache)
    assert text.endswith(f"; kept in {tmp_path}")
    kept = cache.load(UnsimulatedDevice())
    assert kept is not None
    assert value == {**kept.to_dict(), "kept": True}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("", encoding="utf-8")
    text, value = link_rates(UnsimulatedDevice(), CalibrationCache(taken))
    assert text.endswith(f"; {taken} cannot be written")
    assert not value["kept"]


@pytest.mark.gpu
def test_on_a_gpu_the_trial_pins() -> None:
    found = _rows(collect().findings)
    assert found["pinned allocation"].value["gbps"] > 0
    assert found["0"].available
    assert found["link rates"].value["kept"]
