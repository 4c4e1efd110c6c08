"""CPUs near the device, and pages that are populated there."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from chameleon_mm.device.pinning import HostNodes, PageLocker, host_nodes, near_cpus, populated_pages
from chameleon_mm.pool.host_memory import available_host_bytes
from chameleon_mm.units import GIB, MIB
from tests._fakes import file_tree
from tests.test_device_pinning import FakeDriver

PCI_ID = "0000:65:00.0"
CPUS = f"sys/bus/pci/devices/{PCI_ID}/local_cpulist"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({CPUS: "0-1,4-5\n"}, {0, 1, 4, 5}, id="two ranges"),
        pytest.param({CPUS: "7\n"}, {7}, id="one"),
        pytest.param({CPUS: "\n"}, set(), id="none"),
        pytest.param({CPUS: "somewhere\n"}, set(), id="nonsense"),
        pytest.param({}, set(), id="no such device"),
    ],
)
def test_the_cpus_of_the_device(tmp_path: Path, files: dict[str, str], expected: set[int]) -> None:
    assert near_cpus(PCI_ID, file_tree(tmp_path, files)) == expected


def test_a_device_without_an_address_has_none(tmp_path: Path) -> None:
    assert near_cpus(None, file_tree(tmp_path, {CPUS: "0\n"})) == set()


@pytest.mark.parametrize("nbytes", [4096, 96 * MIB - 4095])
def test_all_pages_are_populated_on_those_cpus_and_the_caller_stays_where_it_is(nbytes: int) -> None:
    usable = os.sched_getaffinity(0)
    near = {max(usable)}
    ran_on: dict[int, set[int]] = {}

    def madvise(address: int, nbytes: int, advice: int) -> int:
        ran_on[threading.get_ident()] = os.sched_getaffinity(0)
        return 0

    populated_pages(nbytes, threads=3, madvise=madvise, cpus=near)
    assert ran_on and threading.get_ident() not in ran_on
    assert all(cpus == near for cpus in ran_on.values())
    assert os.sched_getaffinity(0) == usable


def test_cpus_that_may_not_be_used_do_no_harm() -> None:
    driver = FakeDriver()
    memory = PageLocker(driver.calls(), cpus={1023}).pin(3 * MIB)
    assert driver.registered == {memory.data_ptr(): 3 * MIB}
    assert not memory.any()


# --- nodes without CPUs: a GPU's own memory, on a GH200

NODES = "sys/devices/system/node"
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


@pytest.mark.parametrize(
    ("with_cpus", "expected", "bare_bytes"),
    [("0\n", HostNodes({0}, {1}), 81 * GIB), ("0-1\n", HostNodes({0, 1}, set()), 0), ("\n", HostNodes(set(), set()), 0)],
    ids=["one has none", "both have", "the kernel does not tell"],
)
def test_a_node_without_cpus_is_no_host_memory(with_cpus: str, expected: HostNodes, bare_bytes: int, tmp_path: Path) -> None:
    """A node of CPUs, and one of a GPU's memory with 80 GiB free and 1 GiB of caches."""
    sizes = {"MemTotal": 96, "MemFree": 80, "MemUsed": 16, "Active(anon)": 1, "SUnreclaim": 1}
    caches = {"Active(file)": 0.5, "Inactive(file)": 0.25, "SReclaimable": 0.25}
    root = file_tree(tmp_path, {
        "proc/meminfo": f"MemTotal: {576 * GIB // 1024} kB\nMemAvailable: {450 * GIB // 1024} kB\n",
        f"{NODES}/has_cpu": with_cpus,
        f"{NODES}/has_memory": "0-1\n",
        f"{NODES}/node1/meminfo": "".join(f"Node 1 {k}: {int(n * GIB) // 1024:9} kB\n" for k, n in (sizes | caches).items()),
    })  # fmt: skip
    assert host_nodes(root) == expected
    assert available_host_bytes(root) == 450 * GIB - bare_bytes


def test_pages_are_bound_to_the_nodes_with_cpus_if_there_are_others() -> None:
    libc, with_cpus = ctypes.CDLL(None), host_nodes().with_cpus
    found: list[tuple[int, int]] = []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        mode, mask, number = ctypes.c_int(), (ctypes.c_uint64 * 64)(), ctypes.c_long(GET_MEMPOLICY.get(os.uname().machine, -1))
        refused = libc.syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(64 * 64), None, ctypes.c_long(0))
        found.append((-1, -1) if refused else (mode.value, mask[0]))
        return 0

    for bare in (set[int](), {77}):
        populated_pages(4096, threads=1, madvise=madvise, nodes=HostNodes(with_cpus, bare))
    if found[0] == (-1, -1) or not with_cpus:
        pytest.skip("the kernel tells of no memory policies, or of no NUMA nodes")
    assert found[1] == (2, sum(1 << node for node in with_cpus)) != found[0]
