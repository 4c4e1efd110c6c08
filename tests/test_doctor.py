"""Doctor: it reports each part, or why the part is missing and how to fix it, and never fails itself."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from chameleon_mm.device import SimDevice, native
from chameleon_mm.swap.calibration import calibrate, kept
from chameleon_mm.tools import doctor
from chameleon_mm.tools import doctor as checks
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.doctor import CHECKS, Unavailable, driver, find, gpus, helpers, installed, link_rates, memlock, memory
from chameleon_mm.units import GIB, MIB
from tests._fakes import UnsimulatedDevice, file_tree, refusing


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HOME to a folder of the tests: on a GPU the doctor keeps its measurements there."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


# ------------------------------------------------------------------------------------------------------------ the whole


def test_on_a_machine_without_anything_every_row_is_still_there(tmp_path: Path) -> None:
    found = {(section, name): find(check, tmp_path) for section, name, check in CHECKS}
    assert found["software", "torch"][1].startswith(torch.__version__)
    assert found["software", "NVIDIA driver"][1].startswith("unavailable: /proc/driver/nvidia/version")
    assert found["link", "rates"][0]


def test_the_command_shows_every_row_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["schema"] == "chameleon_mm.tools.doctor/3"
    assert set(written["findings"]) == {"software", "gpu", "host", "link"}
    for section, rows in written["findings"].items():
        assert section in shown
        for name, row in rows.items():
            assert name in shown
            assert set(row) == {"available", "text"}


def test_without_a_path_nothing_is_written_and_brackets_are_shown_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "CHECKS", (("gpu", "GPUs", lambda root: "link [N/A]"),))
    shown = io.StringIO()
    assert doctor.run(None, Console(file=shown, width=80)) == 0
    assert list(tmp_path.iterdir()) == []
    assert "link [N/A]" in shown.getvalue()


@pytest.mark.parametrize(
    ("error", "words", "text"),
    [
        (ValueError, ("no such thing",), "no such thing"), (OSError, (5, "no such thing"), "[Errno 5] no such thing"),
        (Unavailable, ("no such thing",), "no such thing"), (ZeroDivisionError, (), "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_whatever_a_check_raises_is_a_row(error: type[Exception], words: tuple[object, ...], text: str) -> None:
    assert find(refusing(error, *words)) == (False, f"unavailable: {text}")


# ------------------------------------------------------------------------------------------------------------------- GPU


def test_each_gpu_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{number}: NVIDIA H200, 140.4 GiB, capability 9.0" for number in range(2)]
    monkeypatch.setattr(checks, "visible_gpus", lambda: lines)
    assert gpus(tmp_path) == "\n".join(lines)


def test_no_gpu_has_the_reason_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible_gpus", list)
    for built_for, mend in ((None, "pip install a build with CUDA"), ("13.0", "nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        with pytest.raises(Unavailable, match=mend):
            gpus(tmp_path)


# ---------------------------------------------------------------------------------------------------- host and software


def test_a_helper_that_is_missing_is_said_with_what_its_lack_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "useful", lambda: list(native.HELPERS))
    monkeypatch.setattr(native, "status", lambda name: "active")
    assert helpers(tmp_path) == "reclaim: active\nmemory: active\nnotes: active\nloop: active"
    monkeypatch.setattr(native, "status", lambda name: "active" if name == "notes" else "not built")
    with pytest.raises(Unavailable, match=r"notes: active\n(.*\n)*pip install 'chameleon-mm\[native\]', or build") as told:
        helpers(tmp_path)

    text = (Path(__file__).parents[1] / "docs" / "measure.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| moves by plan |"))
    python, memory, loop = ([Decimal(figure) for figure in cell.split("/")] for cell in row.split("|")[2:5])
    for name, with_it, without in (("memory", memory, python), ("loop", loop, memory)):
        save, use = (slow - fast for slow, fast in zip(without, with_it, strict=True))
        assert f"{name}: not built; without it: {save} us more for each save that moves, {use} for its use" in str(told.value)


def test_half_of_what_is_available_may_be_pinned_and_a_control_group_that_leaves_less_is_named(tmp_path: Path) -> None:
    root = file_tree(tmp_path, {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n"})
    assert memory(root) == "8.00 GiB, of which 4.00 GiB may be pinned by default"
    group = {"memory.max": str(2 * GIB), "memory.current": str(GIB)}
    files = {"proc/self/cgroup": "0::/job\n", **{f"sys/fs/cgroup/job/{name}": text for name, text in group.items()}}
    text = memory(file_tree(tmp_path, files))
    assert text.startswith("1.00 GiB, of which")
    assert "less than the 8.00 GiB of the machine: raise its memory limit" in text


def test_limits_drivers_and_packages_say_what_there_is_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, said in ((MIB, "1.00 MiB; where pinning fails: ulimit -l unlimited"), (-1, "none")):
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        assert memlock(tmp_path) == said
    with pytest.raises(Unavailable, match="not installed; pip install no-such-distribution"):
        installed(tmp_path, distributions=("no-such-distribution", "nor-this-one"))
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12.3.0\n"
    assert driver(file_tree(tmp_path, {"proc/driver/nvidia/version": text})) == "580.159.03"


# ----------------------------------------------------------------------------------------------------------- the link


def test_real_rates_are_kept_and_simulated_ones_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "present_device", SimDevice)
    text = link_rates(tmp_path)
    assert text.startswith(f"simulated H200: {calibrate(SimDevice())['h2d_gbps']:.1f} GB/s to the device, ")
    assert text.endswith("; not kept")
    monkeypatch.setattr(checks, "present_device", UnsimulatedDevice)
    assert link_rates(tmp_path).endswith("; kept for sessions")
    assert kept(UnsimulatedDevice(), "link") == calibrate(UnsimulatedDevice())


@pytest.mark.gpu
def test_on_a_gpu_the_link_is_measured_and_kept() -> None:
    assert find(gpus)[1].startswith("0: ")
    assert find(link_rates)[1].endswith("; kept for sessions")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert find(checks.segments)[0] is bool(settings["expandable_segments"])


@pytest.mark.parametrize("on", [True, False])
def test_segments_that_do_not_grow_are_said_with_the_line_that_mends_it(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": {"expandable_segments": on}})
    available, text = find(checks.segments)
    assert available is on
    assert ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text) is not on
