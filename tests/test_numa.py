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


def gh200(*, with_cpus: str = "0\n") -> dict[str, str]:
    """One node of CPUs with 480 GiB, the GPU's 96 GiB, and the nodes kept for its partitions."""

    def meminfo(node: int, free: int) -> str:
        rows = {"MemTotal": free + 4 * GIB, "MemFree": free, "MemUsed": 4 * GIB, "Active(file)": GIB // 2, "Active(anon)": GIB,
                "Inactive(file)": GIB // 4, "SReclaimable": GIB // 4, "SUnreclaim": GIB}  # fmt: skip
        return "".join(f"Node {node} {name}: {nbytes // 1024:9} kB\n" for name, nbytes in rows.items())

    return {
        "proc/meminfo": f"MemTotal: {576 * GIB // 1024} kB\nMemAvailable: {450 * GIB // 1024} kB\n",
        f"{NODES}/has_cpu": with_cpus,
        f"{NODES}/has_memory": "0-1\n",
        f"{NODES}/possible": "0-8\n",
        f"{NODES}/node0/meminfo": meminfo(0, 360 * GIB),
        f"{NODES}/node1/meminfo": meminfo(1, 80 * GIB),
    }


def test_a_node_without_cpus_is_no_host_memory(tmp_path: Path) -> None:
    root = file_tree(tmp_path, gh200())
    assert host_nodes(root) == HostNodes(with_cpus={0}, bare={1})
    assert available_host_bytes(root) == (450 - 81) * GIB


@pytest.mark.parametrize("with_cpus", ["0-1\n", "\n"], ids=["both have", "the kernel does not tell"])
def test_all_nodes_count_unless_some_are_known_to_have_no_cpus(tmp_path: Path, with_cpus: str) -> None:
    root = file_tree(tmp_path, gh200(with_cpus=with_cpus))
    assert not host_nodes(root).bare
    assert available_host_bytes(root) == 450 * GIB


@pytest.mark.parametrize("bare", [set(), {77}], ids=["none", "one"])
def test_pages_are_bound_to_the_nodes_with_cpus_if_there_are_others(bare: set[int]) -> None:
    libc, number = ctypes.CDLL(None, use_errno=True), GET_MEMPOLICY.get(os.uname().machine)
    found: set[tuple[int, int]] = set()

    def policy() -> tuple[int, int]:
        mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 64)()
        refused = libc.syscall(
            ctypes.c_long(number or -1), ctypes.byref(mode), mask, ctypes.c_ulong(64 * 64), None, ctypes.c_long(0)
        )
        return (-1, -1) if refused else (mode.value, mask[0])

    def madvise(address: int, nbytes: int, advice: int) -> int:
        found.add(policy())
        return 0

    before, with_cpus = policy(), host_nodes().with_cpus
    if before == (-1, -1) or not with_cpus:
        pytest.skip("the kernel tells of no memory policies, or of no NUMA nodes")
    populated_pages(4096, threads=1, madvise=madvise, nodes=HostNodes(with_cpus, bare))
    assert found == {(2, sum(1 << node for node in with_cpus)) if bare else before}
    assert policy() == before
