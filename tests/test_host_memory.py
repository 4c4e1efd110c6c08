"""What host memory is left, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from chameleon_mm.device import SimDevice
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pinned import PinnedPool, available_host_bytes
from chameleon_mm.units import GIB, KIB

MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1000000 kB\nMemAvailable:   33554432 kB\nBuffers:          1 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 32 * GIB, id="no control groups"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": "max\n",
                "sys/fs/cgroup/job/step/memory.current": f"{GIB}\n",
            },
            32 * GIB,
            id="v2, unlimited",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": f"{20 * GIB}\n",
                "sys/fs/cgroup/job/step/memory.current": f"{4 * GIB}\n",
            },
            16 * GIB,
            id="v2, own limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/memory.max": f"{20 * GIB}\n",
                "sys/fs/cgroup/job/step/memory.current": f"{4 * GIB}\n",
                "sys/fs/cgroup/job/memory.max": f"{12 * GIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{10 * GIB}\n",
            },
            2 * GIB,
            id="v2, the parent's limit is tighter",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{7 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {5 * GIB}\nactive_file {GIB}\n",
            },
            6 * GIB,
            id="v2 in a container, cache that can go counts as available",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "12:cpu,cpuacct:/a\n5:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{10 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            },
            7 * GIB,
            id="v1 in a container, whose path outside is not visible",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * GIB}\n",
            },
            32 * GIB,
            id="v1, unlimited",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu:/\n0::/a\n",
                "sys/fs/cgroup/unified/a/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/unified/a/memory.current": f"{GIB}\n",
            },
            GIB,
            id="v2 beside v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
            },
            0,
            id="already past the limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "nonsense\n:::\n0::/../../etc\n",
                "sys/fs/cgroup/memory.max": "a lot\n",
                "sys/fs/cgroup/memory.current": "\n",
                "sys/fs/cgroup/etc/memory.max": "1\n",
                "sys/fs/cgroup/etc/memory.current/is a folder": "",
            },
            32 * GIB,
            id="files that say nothing",
        ),
    ],
)
def test_the_least_of_the_machine_and_its_control_groups(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_host_bytes(write(tmp_path, {"proc/meminfo": MEMINFO, **files})) == expected


def test_without_proc_psutil_is_asked_and_without_an_answer_it_is_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        available = 5 * KIB

    def refuses() -> Any:
        raise OSError("not on this system")

    monkeypatch.setattr(psutil, "virtual_memory", Answer)
    assert available_host_bytes(tmp_path) == 5 * KIB
    monkeypatch.setattr(psutil, "virtual_memory", refuses)
    assert available_host_bytes(tmp_path) == 0


def test_this_machine_has_some() -> None:
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total


def test_a_limit_that_was_left_open_grows_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine that starts small and is given memory as it uses it; a limit that was given stays."""
    available = [8 << 20]
    monkeypatch.setattr("chameleon_mm.pinned.pool.available_host_bytes", lambda: available[0])
    device = SimDevice()
    with PinnedPool(None, device=device) as left_open, PinnedPool("4MiB", device=device) as given:
        assert left_open.limit_bytes == given.limit_bytes == 4 << 20
        available[0] = 64 << 20
        left_open.allocate(16 << 20).release()
        assert left_open.limit_bytes == 32 << 20
        with pytest.raises(HostMemoryExhausted):
            given.allocate(16 << 20)
