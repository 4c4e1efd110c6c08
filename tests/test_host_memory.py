"""Host memory that is left, read from files as the kernel writes them. Placement of tensors when no more can be pinned: on the
device while the budget allows it, then in pageable memory, then an error.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm.device import SimDevice
from chameleon_mm.errors import HostMemoryExhausted
from chameleon_mm.pool.host_memory import available_host_bytes, pinnable_bytes
from chameleon_mm.pool.pool import FRESH_S, PinnedPool
from chameleon_mm.units import GIB, KIB, MIB
from tests._fakes import ManualClock, file_tree, refusing
from tests._programs import assert_same

UNLIMITED_V1 = 9223372036854771712  # version 1's text for "no limit"
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1000000 kB\nMemAvailable:   33554432 kB\nBuffers:          1 kB\n"


def hybrid(*, v1_limit: int, v2_limit: int) -> dict[str, str]:
    """Both versions, neither in its usual place; 1 GiB is used under each."""
    return {
        "proc/self/cgroup": "4:cpu,memory:/job\n3:name=systemd:/other\n0::/user\n",
        "proc/self/mountinfo": (
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
            "35 31 0:32 / /mnt/two\\040words rw,relatime shared:9 - cgroup cgroup rw,cpu,memory\n"
            "36 31 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory_like\n"
            "41 31 0:38 / /run/v2 rw - cgroup2 none rw\n"
        ),
        "mnt/two words/job/memory.limit_in_bytes": f"{v1_limit}\n",
        "mnt/two words/job/memory.usage_in_bytes": f"{GIB}\n",
        "run/v2/user/memory.max": f"{v2_limit}\n",
        "run/v2/user/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0\n",
        "sys/fs/cgroup/user/memory.max": "1\n",
        "sys/fs/cgroup/user/memory.current": "0\n",
    }


def v2(group: str, limit: int | str, used: int, **more: str) -> dict[str, str]:
    """Files of a group of version 2, below its usual place; `more`: others of them, without their `memory.`."""
    files = {"max": f"{limit}\n", "current": f"{used}\n", **more}
    return {f"sys/fs/cgroup{group}/memory.{name}": text for name, text in files.items()}


def v1(group: str, limit: int, used: int, **more: str) -> dict[str, str]:
    """The same of version 1."""
    files = {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{used}\n", **more}
    return {f"sys/fs/cgroup/memory{group}/memory.{name}": text for name, text in files.items()}


CASES: dict[str, tuple[str | None, dict[str, str], int]] = {
    "no control groups": (None, {}, 32 * GIB),
    "v2, unlimited": ("0::/job/step\n", v2("/job/step", "max", GIB), 32 * GIB),
    "v2, own limit": ("0::/job/step\n", v2("/job/step", 20 * GIB, 4 * GIB), 16 * GIB),
    "v2, the parent's limit is tighter": (
        "0::/job/step\n", v2("/job/step", 20 * GIB, 4 * GIB) | v2("/job", 12 * GIB, 10 * GIB), 2 * GIB,
    ),
    "v2 in a container, cache that can go counts as available": (
        "0::/\n", v2("", 8 * GIB, 7 * GIB, stat=f"anon 1\ninactive_file {5 * GIB}\nactive_file {GIB}\n"), 6 * GIB,
    ),
    "v1 in a container, whose path outside is not visible": (
        "12:cpu,cpuacct:/a\n5:memory:/docker/abc\n",
        v1("", 10 * GIB, 4 * GIB, stat=f"inactive_file 7\ntotal_inactive_file {GIB}\n"),
        7 * GIB,
    ),
    "v1, unlimited": ("5:memory:/\n", v1("", UNLIMITED_V1, 4 * GIB), 32 * GIB),
    "v2 beside v1": ("5:cpu:/\n0::/a\n", v2("/unified/a", 2 * GIB, GIB), GIB),
    "already past the limit": ("0::/\n", v2("", GIB, 2 * GIB), 0),
    "files that say nothing": (
        "nonsense\n:::\n0::/job\n",
        {
            "proc/self/mountinfo": "\n1 2 3\n - \n31 23 0:28 / /a rw - tmpfs\n",
            "sys/fs/cgroup/memory.max": "a lot\n",
            "sys/fs/cgroup/memory.current": "\n",
            "sys/fs/cgroup/memory.stat": "inactive_file\ninactive_file many\n",
            "sys/fs/cgroup/job/memory.max": "1\n",
            "sys/fs/cgroup/job/memory.current/is a folder": "",
        },
        32 * GIB,
    ),
    "v2, held up before it is refused": (
        "0::/job\n", v2("/job", 20 * GIB, 4 * GIB, high=f"{6 * GIB}\n") | v2("", "max", 30 * GIB, high="max\n"), 2 * GIB,
    ),
    "v2, swap is not counted": (
        "0::/job\n", v2("/job", 8 * GIB, 2 * GIB, **{"swap.max": f"{100 * GIB}\n", "swap.current": "0\n"}), 6 * GIB,
    ),
    "v2, no more cache than is used": (
        "0::/job\n", v2("/job", 8 * GIB, 2 * GIB, stat=f"inactive_file {3 * GIB}\n"), 8 * GIB,
    ),
    "v2, no memory controller in our own group": (
        "0::/job/step\n", {**v2("/job", 8 * GIB, 2 * GIB), "sys/fs/cgroup/job/step/cgroup.procs": "1\n"}, 6 * GIB,
    ),
    "v1, a group of the container's own": (
        "5:memory:/docker/abc/job\n",
        {
            "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            **v1("", 10 * GIB, 4 * GIB),
            **v1("/job", 5 * GIB, 3 * GIB),
        },
        2 * GIB,
    ),
    "v1, a limit further up that cannot be seen": (
        "5:memory:/job\n",
        v1("/job", UNLIMITED_V1, 3 * GIB, stat=f"hierarchical_memory_limit {9 * GIB}\ntotal_inactive_file {GIB}\n"),
        7 * GIB,
    ),
    "hybrid, mounted where nobody would look: v1": (None, hybrid(v1_limit=5 * GIB, v2_limit=20 * GIB), 4 * GIB),
    "hybrid, mounted where nobody would look: v2": (None, hybrid(v1_limit=20 * GIB, v2_limit=5 * GIB), 4 * GIB),
    "v2, a group outside of the namespace": (
        "0::/../../etc\n",
        {
            "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/etc/memory.max": "1\n",
            "sys/etc/memory.current": "0\n",
            **v2("/etc", 1, 0),
            **v2("", 3 * GIB, GIB),
        },
        2 * GIB,
    ),
    "v2, outside of the namespace, mounted from there too": (
        "0::/../job\n",
        {
            "proc/self/mountinfo": "41 31 0:38 /.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            **v2("/job", 3 * GIB, 2 * GIB),
        },
        GIB,
    ),
}  # fmt: skip
"""Text of `/proc/self/cgroup`, other files, available bytes."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_least_of_the_machine_and_its_control_groups(tmp_path: Path, case: tuple[str | None, dict[str, str], int]) -> None:
    groups, files, expected = case
    own = {} if groups is None else {"proc/self/cgroup": groups}
    assert available_host_bytes(file_tree(tmp_path, {"proc/meminfo": MEMINFO, **own, **files})) == expected


def test_without_proc_psutil_is_asked_and_without_an_answer_it_is_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total  # this machine has some
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * KIB))
    assert available_host_bytes(tmp_path) == 5 * KIB
    monkeypatch.setattr(psutil, "virtual_memory", refusing(OSError, "not on this system"))
    assert available_host_bytes(tmp_path) == 0


# --- the limit "auto"


@pytest.mark.parametrize("said", ["", "0", "-1", "two", "1.5", " 4", "4 ", "+4", "٤", "1" * 5000])
def test_a_number_of_ranks_that_is_none_is_named(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    with pytest.raises(ValueError, match=r"^LOCAL_WORLD_SIZE: expected .*, 1 or more, got ") as caught:
        pinnable_bytes(available_bytes=GIB)
    assert f"got {said!r}: correct the environment variable" in str(caught.value)


@pytest.mark.parametrize(("environ", "ranks"), [({}, 1), *(({"LOCAL_WORLD_SIZE": str(ranks)}, ranks) for ranks in (1, 2, 8))])
def test_each_rank_has_its_part_of_what_is_left(environ: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    part = pinnable_bytes(available_bytes=128 * GIB)
    assert part == 128 * GIB // ranks
    for mine, theirs in itertools.product((0, part // 3, part), repeat=2):
        left = 128 * GIB - mine - (ranks - 1) * theirs
        again = pinnable_bytes(available_bytes=left, held_bytes=mine)
        assert (again == part) if theirs == 0 or ranks == 1 else (again < part)
    assert pinnable_bytes(available_bytes=0) == 0  # nothing says what is left


# --- asked often


def test_pageable_memory_is_what_was_last_read_less_what_was_taken_since(monkeypatch: pytest.MonkeyPatch) -> None:
    left, readings, clock = [50 << 10], [], ManualClock()

    def available() -> int:
        readings.append(left[0])
        return left[0]

    monkeypatch.setattr("chameleon_mm.pool.pool.available_host_bytes", available)
    monkeypatch.setattr("chameleon_mm.pool.pool.time", clock)
    with PinnedPool("4KiB", SimDevice()) as pool:
        blocks = [pool.allocate_pageable(1 << 10) for _ in range(50)]
        assert len(readings) == 1
        left[0] = 512
        with pytest.raises(HostMemoryExhausted, match="asked for 1024 bytes, but 512 B of host memory are available"):
            pool.allocate_pageable(1 << 10)
        left[0] = 4 << 10
        blocks.append(pool.allocate_pageable(1 << 10))
        assert len(readings) == 3, "a block that the last reading does not leave is not refused by it"
        clock.now += 2 * FRESH_S
        blocks.append(pool.allocate_pageable(1 << 10))
        assert len(readings) == 4, "the reading was too old"
        blocks.clear()


# --- exhausted: a stack of layers saves more than the host budget holds; the budget of the device is wide, narrow, or
# narrow beside a full host


HOST_BUDGET = 4 * MIB
STEPS = 3


def train(device: cm.SimDevice, session: cm.SwapSession | None) -> tuple[list[Tensor], int]:
    """Losses of every step, and the peak of device memory."""
    torch.manual_seed(0)
    losses = []
    with device.compute():
        model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(128, 128), nn.GELU())))
        batch = torch.randn(2048, 128)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        device.reset_peaks()
        with session or nullcontext():
            for _ in range(STEPS):
                with session.step() if session else nullcontext():
                    loss = model(batch).square().mean()
                    loss.backward()
                    losses.append(loss.detach())
                    del loss
                    optimizer.step()
                    optimizer.zero_grad()
    return losses, device.peak_allocated_bytes()


def swapped_by(device: cm.SimDevice, hbm_budget: int) -> cm.SwapSession:
    return cm.SwapSession(hbm_budget, HOST_BUDGET, device, min_bytes="64KiB")


@pytest.fixture
def unswapped() -> tuple[list[Tensor], int]:
    return train(cm.SimDevice(), None)


@pytest.mark.usefixtures("no_gc")
def test_a_wide_budget_keeps_on_the_device_what_the_host_does_not_take(
    sim: cm.SimDevice, unswapped: tuple[list[Tensor], int]
) -> None:
    session = swapped_by(sim, 2 * unswapped[1])
    assert_same(train(sim, session)[0], unswapped[0])
    report = session.report()
    assert report.fallbacks > 0
    assert report.pageable_swap_outs == 0
    assert report.peak_host_bytes <= HOST_BUDGET


@pytest.mark.usefixtures("no_gc")
def test_a_narrow_budget_sends_it_to_pageable_memory(sim: cm.SimDevice, unswapped: tuple[list[Tensor], int]) -> None:
    budget = unswapped[1] // 2
    session = swapped_by(sim, budget)
    losses, peak = train(sim, session)
    assert_same(losses, unswapped[0])
    assert peak <= budget
    report = session.report()
    assert report.pageable_swap_outs > 0
    assert report.budget_misses == 0
    stats = session.pool.stats()
    assert (stats.num_live, session.pool._ledger.ending) == (0, [])
    assert stats.peak_reserved_bytes <= HOST_BUDGET


@pytest.mark.usefixtures("no_gc")
def test_with_neither_the_error_says_so_and_nothing_leaks(
    sim: cm.SimDevice, unswapped: tuple[list[Tensor], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(pool: PinnedPool, nbytes: int, stream: object = None) -> None:
        raise cm.HostMemoryExhausted(f"host memory: asked for {nbytes} bytes, which this machine does not give")

    session = swapped_by(sim, unswapped[1] // 2)
    before = sim.allocated_bytes()
    with monkeypatch.context() as host:
        host.setattr(PinnedPool, "allocate_pageable", none_left)
        with pytest.raises(cm.HostMemoryExhausted, match=r"budget of \d+, but the host takes no more.*raise hbm_budget"):
            train(sim, session)
    sim.synchronize()
    assert session.pool.stats().num_live == 0
    assert sim.allocated_bytes() == before
    assert_same(train(sim, swapped_by(sim, unswapped[1] // 2))[0], unswapped[0])  # the host has room again
