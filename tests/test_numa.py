"""Which node host memory should come from, and that asking for it can never do harm."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from pathlib import Path

import pytest

from chameleon_mm.device.cuda import CudaDevice, visible_gpus
from chameleon_mm.device.pinning import PageLocker, PreferredNode, _linux_mbind, near_node
from chameleon_mm.units import MIB
from tests._fakes import file_tree
from tests.test_device_pinning import FakeDriver

PCI_ID = "0000:65:00.0"
NODE = f"sys/bus/pci/devices/{PCI_ID}/numa_node"
MEMORY, ONLINE = "sys/devices/system/node/has_memory", "sys/devices/system/node/online"
STATUS = "proc/self/status"
MPOL_PREFERRED = 1


def allowed(nodes: str) -> str:
    return f"Name:\tpython\nMems_allowed:\t00000000,000000ff\nMems_allowed_list:\t{nodes}\nThreads:\t1\n"


class FakeKernel:
    """Notes the arguments of each mbind, and answers `failure`."""

    def __init__(self, failure: int = 0) -> None:
        self.failure = failure
        self.asked: list[tuple[int, int, int, list[int], int, int]] = []

    def mbind(self, address: int, nbytes: int, mode: int, mask: ctypes.Array[ctypes.c_ulong], max_node: int, flags: int) -> int:
        self.asked.append((address, nbytes, mode, list(mask), max_node, flags))
        return self.failure


# --- which node


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({NODE: "1\n", MEMORY: "0-1\n", STATUS: allowed("0-1")}, 1, id="the second of two"),
        pytest.param({NODE: "0\n", MEMORY: "0-1\n", STATUS: allowed("0-1")}, 0, id="the first of two"),
        pytest.param({NODE: "9\n", MEMORY: "0-3,8-9\n", STATUS: allowed("2,8-9")}, 9, id="one of those allowed"),
        pytest.param({NODE: "1\n", ONLINE: "0-1\n"}, 1, id="a kernel that says less"),
        pytest.param({NODE: "-1\n", MEMORY: "0-1\n", STATUS: allowed("0-1")}, None, id="tied to no node"),
        pytest.param({NODE: "0\n", MEMORY: "0\n", STATUS: allowed("0")}, None, id="one node"),
        pytest.param({NODE: "1\n", MEMORY: "0-1\n", STATUS: allowed("1")}, None, id="one node allowed, it is the one"),
        pytest.param({MEMORY: "0-1\n", STATUS: allowed("0-1")}, None, id="no such device"),
        pytest.param({NODE: "somewhere\n", MEMORY: "0-1\n", STATUS: allowed("0-1")}, None, id="nonsense for a node"),
        pytest.param({NODE: "1\n", MEMORY: "some\n", STATUS: allowed("0-1")}, None, id="nonsense for the nodes"),
        pytest.param({NODE: "1\n"}, None, id="a kernel without nodes"),
    ],
)
def test_the_node_of_the_device_where_there_is_a_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: dict[str, str], expected: int | None
) -> None:
    with caplog.at_level(logging.INFO):
        assert near_node(PCI_ID, file_tree(tmp_path, files)) == expected
    assert caplog.records == []


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        pytest.param({NODE: "1\n", MEMORY: "0-1\n", STATUS: allowed("0")}, "[0]", id="outside of the cpuset"),
        pytest.param({NODE: "1\n", MEMORY: "0,2\n", STATUS: allowed("0-2")}, "[0, 2]", id="processors without memory"),
    ],
)
def test_a_node_that_may_not_be_used_is_logged_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: dict[str, str], usable: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert near_node(PCI_ID, file_tree(tmp_path, files)) is None
    [record] = caplog.records
    assert f"GPU at {PCI_ID}: it hangs on NUMA node 1, the process may use memory of {usable} only" in record.getMessage()


def test_a_device_without_an_address_has_no_node(tmp_path: Path) -> None:
    assert near_node(None, file_tree(tmp_path, {MEMORY: "0-1\n", STATUS: allowed("0-1")})) is None


# --- asking for it


@pytest.mark.parametrize(
    ("node", "mask"), [(0, [1]), (1, [2]), (63, [1 << 63]), (64, [0, 1]), (130, [0, 0, 4])], ids=["0", "1", "63", "64", "130"]
)
def test_the_kernel_is_told_the_range_and_the_node_and_no_more(node: int, mask: list[int]) -> None:
    kernel = FakeKernel()
    PreferredNode(node, kernel.mbind)(0x7000, 12345)
    # The kernel takes one off the number of bits, so that a whole word needs one more.
    assert kernel.asked == [(0x7000, 12345, MPOL_PREFERRED, mask, 64 * len(mask) + 1, 0)]


@pytest.mark.parametrize("failure", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM])
def test_a_refusal_is_logged_once_and_the_memory_is_good(failure: int, caplog: pytest.LogCaptureFixture) -> None:
    kernel = FakeKernel(failure)
    driver = FakeDriver()
    locker = PageLocker(driver.calls(), prefer_pages=PreferredNode(1, kernel.mbind))
    memory = [locker.pin(nbytes) for nbytes in (3 * MIB, 4096)]
    registered = list(driver.registered.items())
    assert registered == [(each.data_ptr(), each.numel()) for each in memory]
    assert [asked[:2] for asked in kernel.asked] == registered
    assert not any(each.any() for each in memory)
    [record] = caplog.records
    assert "3.00 MiB of pinned memory: expected pages of NUMA node 1" in record.getMessage()
    assert "numactl --cpunodebind=1" in record.getMessage()


def test_an_unknown_processor_has_no_such_call() -> None:
    assert _linux_mbind("riscv128")(0, 4096, MPOL_PREFERRED, (ctypes.c_ulong * 1)(1), 65, 0) == errno.ENOSYS


def _policy(address: int) -> str:
    """What this kernel says of the mapping around `address`."""
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("this kernel knows no NUMA policies")
    lines = [line.split() for line in maps.read_text(encoding="ascii", errors="replace").splitlines()]
    start, policy = max((int(start, 16), policy) for start, policy, *_ in lines if int(start, 16) <= address)
    assert address - start < 1 << 40  # a mapping may have become one with its neighbour
    return policy


def test_this_kernel_takes_the_preference() -> None:
    usable = Path("/sys/devices/system/node/has_memory")
    if not usable.exists():
        pytest.skip("this kernel has no NUMA nodes")
    node = int(usable.read_text(encoding="ascii").replace(",", "-").split("-")[0])
    pages = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    failure = _linux_mbind()(address, MIB, MPOL_PREFERRED, mask, 64 * len(mask) + 1, 0)
    if failure in {errno.EPERM, errno.ENOSYS}:
        pytest.skip("mbind is not allowed here")
    assert failure == 0
    assert _policy(address) == f"prefer:{node}"


def test_this_kernel_refuses_a_node_that_there_is_not(caplog: pytest.LogCaptureFixture) -> None:
    pages = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    PreferredNode(1023)(ctypes.addressof(ctypes.c_char.from_buffer(pages)), MIB)
    assert len(caplog.records) == 1
    pages.write(b"x" * MIB)
    assert pages[:] == b"x" * MIB


@pytest.mark.gpu
def test_pinned_memory_asks_for_the_node_of_the_gpu(caplog: pytest.LogCaptureFixture) -> None:
    device = CudaDevice()
    node = near_node(visible_gpus()[device.index].pci_id)
    memory = device.alloc_pinned(4 * MIB)
    if any("numactl" in record.getMessage() for record in caplog.records):
        pytest.skip("mbind is not allowed here")
    assert _policy(memory.data_ptr()) == ("default" if node is None else f"prefer:{node}")
    device.free_pinned(memory)
