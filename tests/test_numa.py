"""CPUs near the device, and pages that are populated there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from chameleon_mm.device.pinning import PageLocker, near_cpus, populated_pages
from chameleon_mm.units import MIB
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
