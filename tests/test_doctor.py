"""The doctor: it says what is there, says why something is not, and never falls over either."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from chameleon_mm import doctor
from chameleon_mm.device import Device, SimDevice, cuda_is_available
from chameleon_mm.doctor import DoctorReport, Finding, Machine, collect, pin_trial, render, run_program
from chameleon_mm.doctor.gpu import gpus
from chameleon_mm.doctor.host import host, software
from chameleon_mm.doctor.report import Unavailable, run_probe
from chameleon_mm.doctor.transfer import curve_text, paths_text, transfer
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.transfer import Calibration, CalibrationCache, CurvePoint, Thresholds, calibrate
from chameleon_mm.transfer import Path as Way
from chameleon_mm.units import GIB, KIB, MIB
from tests._fakes import UnsimulatedDevice, file_tree

_H200_ROW = "NVIDIA H200, 143771, 9.0, 00000000:06:00.0, 1, 16, 5, 16\n"
_NO_LINK_ROW = "NVIDIA H200, 143771, 9.0, 00000000:06:00.0, [N/A], [N/A], [N/A], [N/A]\n"


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the doctor keeps what it measured in the user's home, which is here for the tests."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def _refuse(command: Sequence[str]) -> str:
    raise Unavailable(f"{command[0]}: not on the PATH")


def _machine(root: Path, files: dict[str, str] | None = None, smi: str | None = None) -> Machine:
    """A machine whose kernel says `files`, and whose nvidia-smi says `smi` (None: there is none)."""
    return Machine(root=file_tree(root, files or {}), run=_refuse if smi is None else lambda command: smi)


def _rows(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ------------------------------------------------------------------------------------------------------------ the whole


def test_everything_is_looked_at_and_nothing_raises() -> None:
    report = collect()
    seen = {(finding.section, finding.name) for finding in report.findings}
    assert seen >= {
        ("software", "python"), ("software", "torch"), ("software", "triton"), ("software", "cupy"),
        ("software", "cuda-bindings"), ("software", "NVIDIA driver"), ("gpu", "GPUs"), ("host", "NUMA nodes"),
        ("host", "memory available"), ("host", "memory that may be pinned"), ("host", "cgroup memory limit"),
        ("host", "memlock limit"), ("device", "device=None picks"), ("device", "pinned allocation"),
        ("transfer", "link rates"), ("transfer", "transfer paths"), ("transfer", "path rates"), ("transfer", "kept in"),
    }  # fmt: skip
    assert report.find("software", "torch").value["version"] == torch.__version__
    assert report.find("device", "device=None picks").value["simulated"] is not cuda_is_available()


def test_on_a_machine_without_anything_every_row_is_still_there(tmp_path: Path) -> None:
    report = collect(_machine(tmp_path))
    assert not report.find("gpu", "GPUs").available or cuda_is_available()
    for name in ("NUMA nodes", "cgroup memory limit"):
        row = report.find("host", name)
        assert not row.available
        assert row.text.startswith("unavailable: /")
    assert not report.find("software", "NVIDIA driver").available


def test_run_shows_every_row_writes_json_and_returns_0(tmp_path: Path) -> None:
    shown = io.StringIO()
    path = tmp_path / "doctor.json"
    assert doctor.run(path, Console(file=shown, width=200)) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["schema"] == "chameleon_mm.doctor/1"
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


def test_a_row_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="expected a row 'gpu' / '7'"):
        DoctorReport(findings=()).find("gpu", "7")


# ------------------------------------------------------------------------------------------------------------------- GPU


def test_a_gpu_by_nvidia_smi(tmp_path: Path) -> None:
    machine = _machine(tmp_path, {"sys/bus/pci/devices/0000:06:00.0/numa_node": "1\n"}, smi=_H200_ROW)
    rows = _rows(gpus(machine))
    assert rows["GPUs"].value == 1
    assert rows["0"].value == {
        "name": "NVIDIA H200", "total_bytes": 143771 * MIB, "compute_capability": "9.0", "pci_id": "0000:06:00.0",
    }  # fmt: skip
    assert rows["0 link"].text == "PCIe 1.0 x16 now, at most PCIe 5.0 x16 (an idle GPU lowers its link)"
    assert rows["0 link"].value == {"generation": 1, "width": 16, "max_generation": 5, "max_width": 16}
    assert rows["0 NUMA node"].value == 1


def test_the_link_comes_from_the_kernel_where_nvidia_smi_does_not_know(tmp_path: Path) -> None:
    folder = "sys/bus/pci/devices/0000:06:00.0"
    files = {
        f"{folder}/current_link_speed": "32.0 GT/s PCIe\n", f"{folder}/current_link_width": "16\n",
        f"{folder}/max_link_speed": "32.0 GT/s PCIe\n", f"{folder}/max_link_width": "16\n",
    }  # fmt: skip
    rows = _rows(gpus(_machine(tmp_path, files, smi=_NO_LINK_ROW)))
    assert rows["0 link"].text == "PCIe 5.0 x16"


def test_a_gpu_without_a_known_link_or_node_says_so(tmp_path: Path) -> None:
    folder = "sys/bus/pci/devices/0000:06:00.0"
    files = {
        f"{folder}/numa_node": "-1\n", f"{folder}/current_link_speed": "Unknown\n", f"{folder}/current_link_width": "0\n"
    }  # fmt: skip
    rows = _rows(gpus(_machine(tmp_path, files, smi=_NO_LINK_ROW)))
    assert rows["0"].available
    assert "no PCIe link (Unknown, width 0)" in rows["0 link"].text
    assert "ties this GPU to no node" in rows["0 NUMA node"].text


def test_several_gpus_have_rows_of_their_own(tmp_path: Path) -> None:
    rows = _rows(gpus(_machine(tmp_path, smi=_H200_ROW + _H200_ROW.replace(":06:", ":07:"))))
    assert rows["GPUs"].value == 2
    assert rows["1"].value["pci_id"] == "0000:07:00.0"


@pytest.mark.skipif(cuda_is_available(), reason="torch names the GPUs where nvidia-smi does not")
@pytest.mark.parametrize(
    ("smi", "why"), [(None, "nvidia-smi: not on the PATH"), ("", "names no GPU"), ("x, y\n", "expected 8 columns")]
)
def test_no_gpu_is_one_row_with_the_reason(tmp_path: Path, smi: str | None, why: str) -> None:
    rows = _rows(gpus(_machine(tmp_path, smi=smi)))
    assert list(rows) == ["GPUs"]
    assert why in rows["GPUs"].text
    assert "torch finds no GPU either" in rows["GPUs"].text


# ---------------------------------------------------------------------------------------------------- host and software


def test_the_narrowest_group_of_version_2_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": str(4 * GIB), "sys/fs/cgroup/outer/memory.current": str(GIB),
        "sys/fs/cgroup/outer/inner/memory.max": "max\n", "sys/fs/cgroup/outer/inner/memory.current": "1\n",
    }  # fmt: skip
    row = _rows(host(_machine(tmp_path, files)))["cgroup memory limit"]
    assert row.value == {"limit_bytes": 4 * GIB, "used_bytes": GIB}
    assert row.text == "4.00 GiB, of which 1.00 GiB used (/sys/fs/cgroup/outer)"


def test_a_group_of_version_1_counts_and_its_no_limit_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "9",
    }
    machine = _machine(tmp_path, files)
    assert _rows(host(machine))["cgroup memory limit"].value == {"limit_bytes": 2 * GIB, "used_bytes": 5}
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("9223372036854771712", encoding="ascii")
    unlimited = _rows(host(machine))["cgroup memory limit"]
    assert (unlimited.text, unlimited.available) == ("none", True)


def test_half_of_what_is_available_may_be_pinned(tmp_path: Path) -> None:
    rows = _rows(host(_machine(tmp_path, {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n"})))
    assert rows["memory available"].value == 8 * GIB
    assert rows["memory that may be pinned"].value == 4 * GIB


def test_the_nodes_of_this_process_are_those_of_its_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 9})
    files = {f"sys/devices/system/node/node{node}/cpulist": cpus for node, cpus in ((0, "0-1,4"), (1, "2-3"), (10, "8-9"))}
    row = _rows(host(_machine(tmp_path, files)))["NUMA nodes"]
    assert row.value == {"process": [1, 10], "total": 3}


def test_the_driver_comes_from_the_kernel_where_nvidia_smi_is_missing(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12.3.0\n"
    machine = _machine(tmp_path, {"proc/driver/nvidia/version": text})
    assert _rows(software(machine))["NVIDIA driver"].value == "580.159.03"
    assert _rows(software(_machine(tmp_path, smi="570.10\n")))["NVIDIA driver"].value == "570.10"


# --------------------------------------------------------------------------------------------------- programs and pinning


def test_a_program_that_is_missing_or_fails_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="not on the PATH"):
        run_program(["no-such-program-anywhere"])
    with pytest.raises(Unavailable, match="it broke"):
        run_program([sys.executable, "-c", "import sys; sys.exit('it broke')"])
    assert run_program([sys.executable, "-c", "print('fine')"]) == "fine\n"


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


# ---------------------------------------------------------------------------------------------------------- the calibration


def test_a_simulated_calibration_is_called_so_in_every_row_and_kept_nowhere(tmp_path: Path) -> None:
    rows = _rows(transfer([SimDevice()], CalibrationCache(tmp_path)))
    assert rows["link rates"].value == calibrate(SimDevice(), rounds=1).to_dict()
    for row in rows.values():
        assert "simulated" in row.text
    assert not rows["kept in"].available
    assert list(tmp_path.iterdir()) == []


def test_a_real_one_is_kept_where_the_row_says(tmp_path: Path) -> None:
    cache = CalibrationCache(tmp_path)
    rows = _rows(transfer([UnsimulatedDevice()], cache))
    assert rows["kept in"].value == str(cache.file("simulated H200", "simulated"))
    kept = cache.load(UnsimulatedDevice())
    assert kept is not None
    assert rows["link rates"].value == kept.to_dict()
    assert rows["transfer paths"].value == kept.to_dict()["thresholds"]
    assert rows["path rates"].value == kept.to_dict()["curve"]


def test_a_folder_that_cannot_be_written_is_a_row(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("", encoding="utf-8")
    rows = _rows(transfer([UnsimulatedDevice()], CalibrationCache(taken)))
    assert rows["link rates"].available
    assert rows["kept in"].text == f"unavailable: {taken} cannot be written; the log says why"


@pytest.mark.parametrize("chosen", [[], [_Pins(pinned=True, refuse=True)]], ids=["no device", "no memory"])
def test_without_a_calibration_every_row_says_why(tmp_path: Path, chosen: list[Device]) -> None:
    rows = _rows(transfer(chosen, CalibrationCache(tmp_path)))
    assert [row.available for row in rows.values()] == [False] * 4
    assert "no device to measure" in rows["link rates"].text or "got nothing" in rows["link rates"].text


def _calibration(thresholds: Thresholds) -> Calibration:
    costs = {Way.PACK: (48.25, 9.96), Way.DIRECT: (1.26, 12.5)}
    curve = tuple(
        CurvePoint(path=path, nbytes=128 * KIB, count=8, gbps=gbps, host_us=host_us) for path, (gbps, host_us) in costs.items()
    )
    return Calibration(
        device="d", driver="v", versions={}, thresholds=thresholds, curve=curve, h2d_gbps=2.0, d2h_gbps=1.0, duplex_gbps=2.5,
        simulated=False,
    )  # fmt: skip


def test_paths_are_told_by_the_sizes_that_they_serve() -> None:
    assert paths_text(_calibration(Thresholds())) == (
        "stays below 4.00 KiB, packed below 128.0 KiB, a copy of its own from 128.0 KiB on"
    )
    only_direct = Thresholds(stay_below_bytes=0, pack_below_bytes=0)
    assert paths_text(_calibration(only_direct)) == "a copy of its own from 0 B on"


def test_the_curve_fits_an_ordinary_terminal() -> None:
    text = curve_text(_calibration(Thresholds()))
    assert text.splitlines() == [
        "GB/s (host us per copy)",
        "size      pack       direct",
        "128.0 KiB 48.2 (10)  1.3 (12)",
    ]
    finding = Finding(section="transfer", name="memory that may be pinned", text=text, value=None, available=True)
    shown = io.StringIO()
    Console(file=shown, width=80).print(render(DoctorReport(findings=(finding,))))
    assert all(any(line in row for row in shown.getvalue().splitlines()) for line in text.splitlines())


@pytest.mark.gpu
def test_on_a_gpu_the_trial_pins(calibrates_fast: None) -> None:
    report = collect()
    assert report.find("device", "pinned allocation").value["gbps"] > 0
    assert report.find("gpu", "0").available
    assert report.find("transfer", "kept in").available
